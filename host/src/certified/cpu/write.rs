//! Originals to tile and annotation on slices: the bits of `quantize_block`.

use crate::attention::Half;
use crate::attention::cpu::lanes::Lanes;
use crate::attention::cpu::softmax::{TOKENS, of_lanes, warp_sum};
use crate::attention::cpu::{Work, run};
use crate::simd_level::Level;
use half::f16;
use kernels_gpu::certified::layout::{Annotation, Layout, Problems, Rounding, TileLayout, VALUE_GROUP};
use kernels_gpu::certified::quantizer::{
    SIZE_UNIT, bound_or_infinity, chance, chance_key, key_channel, key_code, key_error, key_error_bound,
    key_size_bound, norm_bound, over_size, overhang, reach, reciprocal, restore_values, squares, twice,
    uniform, value_chance, value_code, value_group, value_neighbour, value_size, wide_key_channel,
};
use simt::convert::{f16_from_f32, f32_from_f16};
use simt::math::{max, min};

/// Sums are taken over so many channels first: those of a warp.
const SPAN: usize = 32;

/// How a block of a KV head is rounded.
#[derive(Clone, Copy)]
pub(crate) struct Chances {
    /// By chance, not to the nearest.
    taken: bool,
    /// Of the block and KV head.
    key: u32,
}

impl Chances {
    /// Of block `index` of a sequence.
    pub(crate) fn new(rounding: Rounding, index: u32, head: u32) -> Self {
        let [taken, seed] = rounding.words();
        Chances { taken: taken != 0, key: chance_key(seed, index, head) }
    }
}

/// Quantizes one block of a KV head: its keys and values [16, head_dim], whose first elements have index
/// `start` in their pools; `tile` is as `layout` has it. What cannot be quantized lowers `problems`.
pub(crate) fn quantize<E: Half>(
    level: Level,
    layout: TileLayout,
    chances: Chances,
    [keys, values]: [&[E]; 2],
    start: usize,
    tile: &mut [u8],
    problems: &mut Problems,
) -> Annotation {
    run(level.checked(), Quantize { layout, chances, keys, values, start, tile, problems })
}

struct Quantize<'a, E> {
    layout: TileLayout,
    chances: Chances,
    keys: &'a [E],
    values: &'a [E],
    start: usize,
    tile: &'a mut [u8],
    problems: &'a mut Problems,
}

impl<E: Half> Work for Quantize<'_, E> {
    type Output = Annotation;

    #[inline(always)]
    fn run<L: Lanes>(self) -> Annotation {
        let Quantize { layout, chances, keys, values, start, tile, problems } = self;
        let OfValues { bounds: [eta, nu, spread, step], sizes } =
            quantize_values(values, layout, chances, tile);
        if !(eta <= f32::MAX && nu <= f32::MAX) {
            find_value_problems(values, start, problems);
        }
        let [eps, zeta] = quantize_keys(keys, layout, chances, tile);
        if !(eps <= f32::MAX && zeta <= f32::MAX) {
            find_key_problems(keys, start, layout, overhang(chances.taken), problems);
        }
        Annotation { eta, nu, eps, zeta, spread, step, reach: reach(chances.taken), unused: 0, sizes }
    }
}

/// What a block's values leave in its annotation.
struct OfValues {
    /// η, ν, the spread and the step.
    bounds: [f32; 4],
    sizes: [u32; 4],
}

/// Writes the keys; ε and ζ.
#[inline(always)]
fn quantize_keys<E: Half>(keys: &[E], layout: TileLayout, chances: Chances, tile: &mut [u8]) -> [f32; 2] {
    let dim = layout.head_dim as usize;
    let mut norms = [0f32; TOKENS];
    let mut channel_sums = [0f32; 2];
    for span in 0..dim / SPAN {
        let first = SPAN * span;
        let mut channels = [[0f32; 3]; SPAN];
        let mut lanes = [[0f32; SPAN]; 2];
        for (i, channel) in channels.iter_mut().enumerate() {
            // Of NaN alone the range is NaN.
            let (mut low, mut high) = (f32::NAN, f32::NAN);
            for row in keys.chunks_exact(dim) {
                let k = row[first + i].to_f32();
                (low, high) = (min(low, k), max(high, k));
            }
            let (s, z) = self::channel(layout.kind, low, high, overhang(chances.taken));
            *channel = [s, z, reciprocal(s)];
            let at = (first + i) as u32;
            put_key(tile, layout.kind, layout.key_scale(at), s);
            put_key(tile, layout.kind, layout.key_zero(at), z);
            // The lane that has the channel.
            let lane = i % 8 * 4 + i / 8;
            (lanes[0][lane], lanes[1][lane]) = (s * s, z * z);
        }
        for (sum, lanes) in channel_sums.iter_mut().zip(lanes) {
            *sum = then(span, *sum, warp_sum(lanes));
        }
        for (token, norm) in norms.iter_mut().enumerate() {
            let mut errors = [0f32; SPAN];
            for (i, [s, z, r]) in channels.into_iter().enumerate() {
                let k = keys[token * dim + first + i].to_f32();
                let mut offset = 0.0;
                if chances.taken {
                    offset = uniform(chance(chances.key, token as u32, (first + i) as u32)) - 0.5;
                }
                let (code, word) = key_code(k, z, r, offset);
                tile[layout.key_code(token as u32, (first + i) as u32) as usize] = word as u8;
                errors[i] = key_error(k, code, s, z);
            }
            *norm = then(span, *norm, span_squares(&errors));
        }
    }
    let error = largest(norms.map(norm_bound));
    let [scale, zero] = channel_sums.map(norm_bound);
    [key_error_bound(error, scale), key_size_bound(zero, scale)]
}

/// Writes the values.
#[inline(always)]
fn quantize_values<E: Half>(values: &[E], layout: TileLayout, chances: Chances, tile: &mut [u8]) -> OfValues {
    let dim = layout.head_dim as usize;
    const GROUP: usize = VALUE_GROUP as usize;
    let mut norms = [[0f32; TOKENS]; 3];
    let mut steps = [0f32; TOKENS];
    for (token, row) in values.chunks_exact(dim).enumerate() {
        for (span, of_span) in row.as_chunks::<SPAN>().0.iter().enumerate() {
            let mut v = [0f32; SPAN];
            let mut errors = [0f32; SPAN];
            let mut halves = [f32::INFINITY; SPAN];
            for (v, x) in v.iter_mut().zip(of_span) {
                *v = x.to_f32();
            }
            for (i, v) in v.as_chunks::<GROUP>().0.iter().enumerate() {
                let group = span * (SPAN / GROUP) + i;
                let (mut low, mut high) = (f32::NAN, f32::NAN);
                for x in v {
                    (low, high) = (min(low, *x), max(high, *x));
                }
                let (scale, zero) = value_group(low, high);
                put(tile, layout.value_scale(token as u32, group as u32), scale);
                put(tile, layout.value_zero(token as u32, group as u32), zero);
                let (r, z) = (reciprocal(f32_from_f16(scale)), f32_from_f16(zero));
                for (pair, v) in v.as_chunks::<2>().0.iter().enumerate() {
                    let channel = (GROUP * group + 2 * pair) as u32;
                    let mut codes = v.map(|v| value_code(v, z, r));
                    let mut restored = restore(codes, scale, zero);
                    if chances.taken {
                        let mut neighbours = [0f32; 2];
                        for half in 0..2 {
                            neighbours[half] = value_neighbour(v[half], codes[half], restored[half]);
                        }
                        let others = restore(neighbours, scale, zero);
                        for half in 0..2 {
                            let (probability, h) = value_chance(v[half], restored[half], others[half]);
                            let drawn = chance(chances.key, token as u32, channel + half as u32);
                            if uniform(drawn >> 16) < probability {
                                (codes[half], restored[half]) = (neighbours[half], others[half]);
                            }
                            halves[GROUP * i + 2 * pair + half] = h;
                        }
                    }
                    for (half, v) in v.iter().enumerate() {
                        errors[GROUP * i + 2 * pair + half] = v - restored[half];
                    }
                    tile[layout.value_code(token as u32, channel) as usize] =
                        codes[0] as u8 | (codes[1] as u8) << 4;
                }
            }
            norms[0][token] = then(span, norms[0][token], span_squares(&errors));
            norms[1][token] = then(span, norms[1][token], span_squares(&v));
            norms[2][token] = then(span, norms[2][token], span_squares(&halves));
            for half in halves {
                steps[token] = max(steps[token], half);
            }
        }
    }
    let [errors, own, halves] = norms.map(|norms| norms.map(norm_bound));
    let (eta, nu) = (bound_or_infinity(largest(errors)), bound_or_infinity(largest(own)));
    let (tokens, unit) = (own.map(|norm| value_size(norm, nu)), nu * SIZE_UNIT);
    let over = |of: [f32; TOKENS]| {
        let mut over = of;
        over.iter_mut().zip(tokens).for_each(|(x, size)| *x = over_size(*x, size, unit));
        bound_or_infinity(largest(over))
    };
    let mut sizes = [0u32; 4];
    for (token, size) in tokens.into_iter().enumerate() {
        sizes[token / 4] |= (size as u32) << (8 * (token % 4));
    }
    OfValues { bounds: [eta, nu, over(halves), over(steps)], sizes }
}

/// V^ of two codes of a group.
#[inline(always)]
fn restore(codes: [f32; 2], scale: f16, zero: f16) -> [f32; 2] {
    let pair = restore_values(codes, twice(scale), twice(zero));
    [pair, pair >> 16].map(|half| f32_from_f16(f16::from_bits(half as u16)))
}

/// The sum of 32 squares: eight one after another, four neighbouring lanes then.
#[inline(always)]
fn span_squares(x: &[f32; SPAN]) -> f32 {
    let mut lanes = [0f32; 4];
    for (lane, x) in lanes.iter_mut().zip(x.as_chunks::<8>().0) {
        *lane = squares(*x);
    }
    of_lanes(lanes)
}

/// A sum over spans: the first one's is where it starts.
#[inline(always)]
fn then(span: usize, sum: f32, more: f32) -> f32 {
    if span == 0 { more } else { sum + more }
}

/// The largest of numbers that are not negative. NaN counts as more than any number.
#[inline(always)]
fn largest(of: [f32; TOKENS]) -> f32 {
    let mut bits = 0;
    for x in of {
        bits = bits.max(x.to_bits());
    }
    f32::from_bits(bits)
}

/// σ and z of a channel whose keys lie between `low` and `high`.
#[inline(always)]
pub(crate) fn channel(layout: Layout, low: f32, high: f32, over: f32) -> (f32, f32) {
    match layout {
        Layout::Compact => {
            let (scale, zero) = key_channel(low, high, over);
            (f32_from_f16(scale), f32_from_f16(zero))
        }
        Layout::Paper => wide_key_channel(low, high, over),
    }
}

/// Stores a channel's σ or z.
#[inline(always)]
pub(crate) fn put_key(tile: &mut [u8], layout: Layout, at: u32, x: f32) {
    match layout {
        Layout::Compact => put(tile, at, f16_from_f32(x)),
        Layout::Paper => tile[at as usize..][..4].copy_from_slice(&x.to_le_bytes()),
    }
}

#[inline(always)]
fn put(tile: &mut [u8], at: u32, x: f16) {
    tile[at as usize..][..2].copy_from_slice(&x.to_le_bytes());
}

/// The range of a channel's keys, or of a group's values, as the search for what is wrong has it.
#[inline(always)]
fn range<E: Half>(data: &[E], first: usize, stride: usize) -> (f32, f32) {
    let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
    for x in data[first..].iter().step_by(stride).take(16) {
        let x = x.to_f32();
        (low, high) = (min(low, x), max(high, x));
    }
    (low, high)
}

#[cold]
fn find_key_problems<E: Half>(
    keys: &[E],
    start: usize,
    layout: TileLayout,
    over: f32,
    problems: &mut Problems,
) {
    let dim = layout.head_dim as usize;
    for (i, k) in keys.iter().enumerate() {
        let k = k.to_f32();
        let (low, high) = range(keys, i % dim, dim);
        let (s, z) = channel(layout.kind, low, high, over);
        let (code, _) = key_code(k, z, reciprocal(s), 0.0);
        let Problems { key_not_finite, key_range, .. } = problems;
        report([key_not_finite, key_range], k, key_error(k, code, s, z), start + i);
    }
}

#[cold]
fn find_value_problems<E: Half>(values: &[E], start: usize, problems: &mut Problems) {
    for (i, v) in values.iter().enumerate() {
        let v = v.to_f32();
        let (low, high) = range(values, i - i % VALUE_GROUP as usize, 1);
        let (scale, zero) = value_group(low, high);
        let code = value_code(v, f32_from_f16(zero), reciprocal(f32_from_f16(scale)));
        let restored = restore_values([code, code], twice(scale), twice(zero));
        let Problems { value_not_finite, value_range, .. } = problems;
        report(
            [value_not_finite, value_range],
            v,
            v - f32_from_f16(f16::from_bits(restored as u16)),
            start + i,
        );
    }
}

/// Lowers the problem that an element and its error show, if any.
fn report([not_finite, out_of_range]: [&mut u64; 2], element: f32, error: f32, index: usize) {
    if !element.is_finite() {
        *not_finite = (*not_finite).min(index as u64);
    } else if !error.is_finite() {
        *out_of_range = (*out_of_range).min(index as u64);
    }
}
