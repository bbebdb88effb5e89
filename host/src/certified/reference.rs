//! The certified system's storage told again: a block quantized one element after another, and judged in f64.
//!
//! [`quantize`] shares the arithmetic of one element with the kernel, and nothing of its work split: the two
//! must agree in every bit. [`Tile`] reads a tile without that arithmetic, and [`measure`] says in f64 what
//! was lost; those judge both.

use super::cpu::{channel, put_key};
use super::{Annotation, BLOCK_TOKENS, CertifiedElement, Layout, TileLayout};
use half::f16;
use kernels_gpu::certified::layout::{Rounding, VALUE_GROUP};
use kernels_gpu::certified::quantizer as q;

const TOKENS: usize = BLOCK_TOKENS as usize;
const GROUP: usize = VALUE_GROUP as usize;

/// Quantizes one block of one KV head: `keys` and `values` are `[16][D]`; `place` is the block's place in its
/// sequence and the KV head.
///
/// # Panics
/// If a slice is not a block of `layout`.
pub fn quantize<T: CertifiedElement>(
    keys: &[T],
    values: &[T],
    layout: TileLayout,
    rounding: Rounding,
    place: [u32; 2],
) -> (Vec<u8>, Annotation) {
    let [by_chance, seed] = rounding.words();
    let by_chance = by_chance != 0;
    let chances = q::chance_key(seed, place[0], place[1]);
    let d = layout.head_dim as usize;
    assert_eq!((keys.len(), values.len()), (TOKENS * d, TOKENS * d), "a block is 16 × {d} keys and values");
    let mut tile = vec![0; layout.bytes as usize];
    let keys: Vec<f32> = keys.iter().map(|x| x.to_f32()).collect();
    let values: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();

    let mut key_errors = vec![0f32; keys.len()];
    let (mut scales, mut zeros) = (vec![0f32; d], vec![0f32; d]);
    for c in 0..d {
        let column = keys.iter().skip(c).step_by(d).copied();
        let over = q::overhang(by_chance);
        (scales[c], zeros[c]) = channel(layout.kind, lowest(column.clone()), highest(column), over);
        put_key(&mut tile, layout.kind, layout.key_scale(c as u32), scales[c]);
        put_key(&mut tile, layout.kind, layout.key_zero(c as u32), zeros[c]);
        for t in 0..TOKENS {
            let drawn = q::uniform(q::chance(chances, t as u32, c as u32)) - 0.5;
            let offset = if by_chance { drawn } else { 0.0 };
            let (code, word) = q::key_code(keys[t * d + c], zeros[c], q::reciprocal(scales[c]), offset);
            tile[layout.key_code(t as u32, c as u32) as usize] = word as u8;
            key_errors[t * d + c] = q::key_error(keys[t * d + c], code, scales[c], zeros[c]);
        }
    }

    let mut value_errors = vec![0f32; values.len()];
    let mut halves = vec![f32::INFINITY; values.len()];
    for (index, group) in values.chunks_exact(GROUP).enumerate() {
        let (t, g) = (index / (d / GROUP), index % (d / GROUP));
        let (scale, zero) = q::value_group(lowest(group.iter().copied()), highest(group.iter().copied()));
        put(&mut tile, layout.value_scale(t as u32, g as u32), scale);
        put(&mut tile, layout.value_zero(t as u32, g as u32), zero);
        for (i, v) in group.iter().enumerate() {
            let restored = |code: f32| {
                let pair = q::restore_values([code, code], q::twice(scale), q::twice(zero));
                f16::from_bits(pair as u16).to_f32()
            };
            let mut code = q::value_code(*v, zero.to_f32(), q::reciprocal(scale.to_f32()));
            if by_chance {
                let neighbour = q::value_neighbour(*v, code, restored(code));
                let (probability, half) = q::value_chance(*v, restored(code), restored(neighbour));
                let drawn = q::uniform(q::chance(chances, t as u32, (g * GROUP + i) as u32) >> 16);
                halves[index * GROUP + i] = half;
                code = if drawn < probability { neighbour } else { code };
            }
            let byte = &mut tile[layout.value_code(t as u32, (g * GROUP + i) as u32) as usize];
            *byte |= (code as u8) << (i % 2 * 4);
            value_errors[index * GROUP + i] = *v - restored(code);
        }
    }

    let (scale, zero) = (q::norm_bound(channel_sum(&scales)), q::norm_bound(channel_sum(&zeros)));
    let nu = q::bound_or_infinity(largest_norm(&values, d));
    let tokens: Vec<f32> = norms(&values, d).map(|norm| q::value_size(norm, nu)).collect();
    let over = |of: &mut dyn Iterator<Item = f32>| {
        let over = of.zip(&tokens).map(|(x, size)| q::over_size(x, *size, nu * q::SIZE_UNIT));
        q::bound_or_infinity(largest(over))
    };
    let mut steps = halves.chunks_exact(d).map(|token| token.iter().copied().fold(0.0, simt::math::max));
    let mut sizes = [0u32; 4];
    for (t, size) in tokens.iter().enumerate() {
        sizes[t / 4] |= (*size as u32) << (t % 4 * 8);
    }
    let annotation = Annotation {
        eta: q::bound_or_infinity(largest_norm(&value_errors, d)),
        nu,
        eps: q::key_error_bound(largest_norm(&key_errors, d), scale),
        zeta: q::key_size_bound(zero, scale),
        spread: over(&mut norms(&halves, d)),
        step: over(&mut steps),
        reach: q::reach(by_chance),
        unused: 0,
        sizes,
    };
    (tile, annotation)
}

fn put(tile: &mut [u8], at: u32, x: f16) {
    tile[at as usize..at as usize + 2].copy_from_slice(&x.to_bits().to_le_bytes());
}

fn lowest(x: impl Iterator<Item = f32>) -> f32 {
    x.fold(f32::NAN, simt::math::min)
}

fn highest(x: impl Iterator<Item = f32>) -> f32 {
    x.fold(f32::NAN, simt::math::max)
}

/// The largest norm of a token.
fn largest_norm(x: &[f32], d: usize) -> f32 {
    largest(norms(x, d))
}

/// The largest of numbers that are not negative; NaN counts as more than any number.
fn largest(x: impl Iterator<Item = f32>) -> f32 {
    f32::from_bits(x.map(f32::to_bits).max().unwrap_or(0))
}

/// The norms of tokens: sums of squares in the kernel's order.
fn norms(x: &[f32], d: usize) -> impl Iterator<Item = f32> {
    let eight = |x: &[f32]| q::squares([x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]]);
    x.chunks_exact(d).map(move |token| {
        let of_32 = |x: &[f32]| (eight(x) + eight(&x[8..])) + (eight(&x[16..]) + eight(&x[24..]));
        q::norm_bound(token.chunks_exact(32).map(of_32).reduce(|a, b| a + b).unwrap_or(0.0))
    })
}

/// The sum of squares over the channels, in the kernel's order: in each 32, pairs first that are half of the
/// lanes apart, where lane 4p + i has channel 8i + p.
fn channel_sum(x: &[f32]) -> f32 {
    let sum_of_32 = |x: &[f32]| {
        let mut lanes: Vec<f32> = (0..32).map(|lane| x[lane % 4 * 8 + lane / 4]).map(|x| x * x).collect();
        while lanes.len() > 1 {
            let (low, high) = lanes.split_at(lanes.len() / 2);
            lanes = low.iter().zip(high).map(|(a, b)| a + b).collect();
        }
        lanes[0]
    };
    x.chunks_exact(32).map(sum_of_32).reduce(|a, b| a + b).unwrap_or(0.0)
}

/// A tile's contents, read by its layout alone.
#[derive(Clone, Copy, Debug)]
pub struct Tile<'a> {
    layout: TileLayout,
    bytes: &'a [u8],
}

impl<'a> Tile<'a> {
    /// A tile of `layout`; `None` if `bytes` has another length.
    pub fn new(layout: TileLayout, bytes: &'a [u8]) -> Option<Self> {
        (bytes.len() == layout.bytes as usize).then_some(Tile { layout, bytes })
    }

    fn f16_at(self, at: u32) -> f16 {
        f16::from_le_bytes([self.bytes[at as usize], self.bytes[at as usize + 1]])
    }

    /// A key's code, −128 to 127.
    pub fn key_code(self, token: usize, channel: usize) -> i32 {
        self.bytes[self.layout.key_code(token as u32, channel as u32) as usize] as i32 - 128
    }

    /// A key's scale or zero.
    fn of_key(self, at: u32) -> f64 {
        match self.layout.kind {
            Layout::Compact => self.f16_at(at).to_f64(),
            Layout::Paper => {
                let bytes =
                    self.bytes[at as usize..].first_chunk().expect("the layout's parts are in the tile");
                f64::from(f32::from_le_bytes(*bytes))
            }
        }
    }

    /// σ of a channel.
    pub fn key_scale(self, channel: usize) -> f64 {
        self.of_key(self.layout.key_scale(channel as u32))
    }

    /// z of a channel.
    pub fn key_zero(self, channel: usize) -> f64 {
        self.of_key(self.layout.key_zero(channel as u32))
    }

    /// A value's code, 0 to 15.
    pub fn value_code(self, token: usize, channel: usize) -> u32 {
        let byte = self.bytes[self.layout.value_code(token as u32, channel as u32) as usize];
        (byte >> (channel % 2 * 4) & 0xf) as u32
    }

    /// The scale of a value's group.
    pub fn value_scale(self, token: usize, channel: usize) -> f16 {
        self.f16_at(self.layout.value_scale(token as u32, (channel / GROUP) as u32))
    }

    /// The zero of a value's group.
    pub fn value_zero(self, token: usize, channel: usize) -> f16 {
        self.f16_at(self.layout.value_zero(token as u32, (channel / GROUP) as u32))
    }

    /// K^: without rounding in the compact layout (19 bits of product, and f16's 40 binades, fit an f64),
    /// rounded to f64 once in the paper's.
    pub fn key(self, token: usize, channel: usize) -> f64 {
        self.key_code(token, channel) as f64 * self.key_scale(channel) + self.key_zero(channel)
    }

    /// V^, rounded to f16 once.
    pub fn value(self, token: usize, channel: usize) -> f64 {
        let code = self.value_code(token, channel) as f64;
        let scale = self.value_scale(token, channel).to_f64();
        round_to_f16(code * scale + self.value_zero(token, channel).to_f64())
    }
}

/// The f16 nearest to `x`, ties to even; a finite x rounds to an infinity from 65520 on.
pub fn round_to_f16(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let mut exponent = -14;
    while x.abs() >= 2f64.powi(exponent + 1) {
        exponent += 1;
    }
    // The distance of neighbours in x's binade; those of the lowest also below it.
    let step = 2f64.powi(exponent - 10);
    let rounded = (x / step).round_ties_even() * step;
    if rounded.abs() > 65504.0 { f64::INFINITY.copysign(x) } else { rounded }
}

/// What one block really lost, in f64.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// What [`Annotation::eta`] bounds.
    pub eta: f64,
    /// What [`Annotation::nu`] bounds.
    pub nu: f64,
    /// What [`Annotation::eps`] bounds.
    pub eps: f64,
    /// What [`Annotation::zeta`] bounds.
    pub zeta: f64,
    /// ‖σ‖₂: what roundings of the key's errors are relative to.
    pub scale: f64,
}

/// Measures a tile against the block that it was made from: `keys` and `values` are `[16][D]`.
pub fn measure<T: CertifiedElement>(tile: Tile<'_>, keys: &[T], values: &[T]) -> Measured {
    let d = tile.layout.head_dim as usize;
    let norm = |x: &dyn Fn(usize) -> f64| (0..d).map(|c| x(c) * x(c)).sum::<f64>().sqrt();
    let largest =
        |x: &dyn Fn(usize, usize) -> f64| (0..TOKENS).map(|t| norm(&|c| x(t, c))).fold(0.0, f64::max);
    let scale = norm(&|c| tile.key_scale(c));
    Measured {
        eta: largest(&|t, c| values[t * d + c].to_f32() as f64 - tile.value(t, c)),
        nu: largest(&|t, c| values[t * d + c].to_f32() as f64),
        eps: largest(&|t, c| keys[t * d + c].to_f32() as f64 - tile.key(t, c)),
        zeta: norm(&|c| tile.key_zero(c)) + 128.0 * scale,
        scale,
    }
}
