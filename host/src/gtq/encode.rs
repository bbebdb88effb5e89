//! Encoding on slices: the bits of the kernels, by SIMD and on all cores.

use super::near::{self, Turned};
use super::plan::Books;
use super::rows;
use crate::attention::cpu::softmax::{TOKENS, warp_sum};
use half::f16;
use kernels_gpu::gtq::parts::{self, PARTS, nearest_scale, norm_byte};
use kernels_gpu::gtq::rotation::{butterfly_row, signed};
use kernels_gpu::gtq::write::{dot, fits, scale_of, squares};
use kernels_gpu::gtq::{Codebook, EncodeShape, Side};
use rayon::prelude::*;
use simt::math::sqrt;

/// H·S·x.
pub(super) fn turned(x: &[f16]) -> Vec<f32> {
    let mut h: Vec<f32> = x.iter().enumerate().map(|(d, x)| signed(x.to_f32(), d)).collect();
    butterfly(&mut h);
    h
}

/// The same part by part, of channels in `order`.
pub(super) fn turned_parts(x: &[f16], order: &[u8]) -> Vec<f32> {
    let channels = order.iter().map(|channel| x[usize::from(*channel)].to_f32());
    let mut h: Vec<f32> = channels.enumerate().map(|(d, x)| signed(x, d)).collect();
    h.chunks_exact_mut(x.len() / PARTS).for_each(butterfly);
    h
}

/// H·x, of a row or a part.
pub(super) fn butterfly(x: &mut [f32]) {
    match x.len() {
        16 => butterfly_row::<16>(x.as_mut_array().expect("16")),
        32 => butterfly_row::<32>(x.as_mut_array().expect("32")),
        64 => butterfly_row::<64>(x.as_mut_array().expect("64")),
        _ => butterfly_row::<128>(x.as_mut_array().expect("64 or 128 channels")),
    }
}

/// What a row is stored as.
pub(super) struct Encoded {
    pub(super) codes: Vec<u8>,
    /// The bytes of n, as [`rows::write`] takes them; none of a row that cannot be stored.
    pub(super) norms: Option<[u8; 4]>,
    /// H·S·x, and of a whole row its length.
    h: Vec<f32>,
    r: f32,
}

/// The up to four dimensions of lane `lane`, and zeros.
fn of_lane(x: &[f32], each: usize, lane: usize) -> [f32; 4] {
    std::array::from_fn(|i| if i < each { x[lane * each + i] } else { 0.0 })
}

/// A row's codes of `bits` bits and n; zeros of a row that cannot be stored.
pub(super) fn encoded(x: &[f16], book: &Codebook, bits: u32, shape: EncodeShape) -> Encoded {
    // Of a warp: each lane its neighbouring dimensions.
    let each = x.len() / 32;
    let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
    let r = sqrt(warp_sum(std::array::from_fn(|lane| squares(of_lane(&wide, each, lane)))));
    let h = turned(x);
    let thresholds = book.thresholds.map(|threshold| threshold * r);
    let code = |h: &f32| {
        let mut code = 0u8;
        for threshold in &thresholds[..15] {
            code += u8::from(*h > *threshold);
        }
        code
    };
    let codes: Vec<u8> = h.iter().map(code).collect();
    let levels: Vec<f32> = codes.iter().map(|code| book.levels[usize::from(*code)]).collect();
    let sum_of_squares = warp_sum(std::array::from_fn(|lane| squares(of_lane(&levels, each, lane))));
    let product = |lane| dot(of_lane(&h, each, lane), of_lane(&levels, each, lane));
    let product = warp_sum(std::array::from_fn(product));
    let scale = scale_of(shape.rule, shape.root, r, sum_of_squares, product);
    let norms = fits(scale).then(|| rows::half(f16::from_f32(scale)));
    let codes = if norms.is_some() { codes } else { vec![rows::zero(bits); x.len()] };
    Encoded { codes, norms, h, r }
}

/// Sum over the eight lanes of a part.
fn part_sum(mut lanes: [f32; 8]) -> f32 {
    for distance in [4, 2, 1] {
        for lane in 0..distance {
            lanes[lane] += lanes[lane + distance];
        }
    }
    lanes[0]
}

/// The same of a key in parts.
pub(super) fn encoded_parts(
    x: &[f16],
    order: &[u8],
    books: &[Codebook<{ parts::MOST_LEVELS }>; PARTS],
    shape: EncodeShape,
) -> Encoded {
    let (of_part, each, root) = (x.len() / PARTS, x.len() / 32, shape.root * 0.5);
    let wide: Vec<f32> = order.iter().map(|channel| x[usize::from(*channel)].to_f32()).collect();
    let h = turned_parts(x, order);
    let mut codes = Vec::with_capacity(x.len());
    let mut bytes = [0u32; PARTS];
    for (p, book) in books.iter().enumerate() {
        let part = p * of_part..(p + 1) * of_part;
        let (x, h) = (&wide[part.clone()], &h[part]);
        let sum = |of: &dyn Fn(usize) -> f32| part_sum(std::array::from_fn(of));
        let r = sqrt(sum(&|lane| squares(of_lane(x, each, lane))));
        let near = nearest_scale(r, root);
        let code = |h: &f32| book.thresholds.iter().filter(|threshold| *h > **threshold * near).count();
        let own: Vec<usize> = h.iter().map(code).collect();
        let levels: Vec<f32> = own.iter().map(|code| book.levels[*code]).collect();
        let of_levels = sum(&|lane| squares(of_lane(&levels, each, lane)));
        let product = sum(&|lane| dot(of_lane(h, each, lane), of_lane(&levels, each, lane)));
        bytes[p] = norm_byte(scale_of(shape.rule, root, r, of_levels, product));
        codes.extend(own.into_iter().map(|code| code as u8));
    }
    let norms = bytes.iter().all(|byte| *byte <= 255).then(|| bytes.map(|byte| byte as u8));
    if norms.is_none() {
        let zeros = parts::bits(shape.key_bits).map(rows::zero);
        codes.iter_mut().enumerate().for_each(|(d, code)| *code = zeros[d / of_part]);
    }
    Encoded { codes, norms, h, r: 0.0 }
}

/// New tokens.
#[derive(Clone, Copy)]
pub(super) struct New<'a> {
    pub(super) keys: &'a [f16],
    pub(super) values: &'a [f16],
    pub(super) positions: &'a [u32],
    pub(super) table: &'a [u32],
    /// [kv_heads, head_dim]; empty of whole keys.
    pub(super) order: &'a [u8],
}

/// Where they go.
pub(super) struct Kept<'a> {
    pub(super) lengths: &'a mut [u32],
    pub(super) tiles: &'a mut [u8],
    pub(super) near: &'a mut [u8],
    pub(super) problems: &'a mut [u32],
}

/// What the encoding kernels do.
pub(super) fn append(books: &Books, shape: EncodeShape, new: New<'_>, kept: Kept<'_>) {
    let Kept { lengths, tiles, near, problems } = kept;
    let (layout, heads) = (books.layout, shape.kv_heads as usize);
    let dim = layout.head_dim as usize;
    let of_values = books.values.codebook();
    let of_keys = books.keys[0].codebook();
    let of_parts = books.part_codebooks();
    let items: Vec<(usize, usize)> = (0..new.positions.len())
        .filter(|row| new.positions[*row] / TOKENS as u32 <= shape.max_blocks.saturating_sub(1))
        .flat_map(|row| (0..heads).map(move |head| (row, head)))
        .collect();
    let one = |&(row, head): &(usize, usize)| {
        let own = (row * heads + head) * dim..(row * heads + head + 1) * dim;
        let key = &new.keys[own.clone()];
        let key = match &of_parts {
            Some(books) => encoded_parts(key, &new.order[head * dim..(head + 1) * dim], books, shape),
            None => encoded(key, &of_keys, layout.key_bits, shape),
        };
        [key, encoded(&new.values[own], &of_values, layout.value_bits, shape)]
    };
    let all: Vec<[Encoded; 2]> =
        if items.len() < 64 { items.iter().map(one).collect() } else { items.par_iter().map(one).collect() };
    for ((row, head), encoded) in items.into_iter().zip(all) {
        let (position, sequence) = (new.positions[row], row / shape.tokens as usize);
        let index = sequence * shape.max_blocks as usize + position as usize / TOKENS;
        let from = (new.table[index] as usize * heads + head) * layout.bytes() as usize;
        let tile = &mut tiles[from..from + layout.bytes() as usize];
        let (window, slot) = (shape.window, layout.slot());
        let tokens = shape.tokens as usize;
        let past = new.positions[sequence * tokens + tokens - 1] / TOKENS as u32;
        let own = position / TOKENS as u32;
        let mut slot_of = window.keeps(own, past.min(shape.max_blocks - 1)).then(|| {
            let at = (sequence * heads + head) * window.slots as usize + window.slot(own) as usize;
            &mut near[at * slot.bytes() as usize..][..slot.bytes() as usize]
        });
        let sides = [Side::Key, Side::Value].into_iter().zip(problems.iter_mut());
        for (Encoded { codes, norms, h, r }, (side, problem)) in encoded.into_iter().zip(sides) {
            if norms.is_none() {
                *problem = (*problem).min(position * shape.kv_heads + head as u32);
            }
            let token = position % TOKENS as u32;
            rows::write(tile, layout, side, token, &codes, norms.unwrap_or_default());
            if let Some(to) = &mut slot_of {
                near::write(to, slot, side, token, norms.map(|_| Turned { h: &h, r }), shape);
            }
        }
        if row % shape.tokens as usize == shape.tokens as usize - 1 {
            lengths[sequence] = position + 1;
        }
    }
}
