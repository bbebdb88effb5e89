//! New tokens on their way into the tiles.
//!
//! # Mathematics
//! As in the [system's](super) page. With T_i the thresholds, code_d = #{i : h_d > T_i·r}: the level nearest
//! to h_d / r, without a division. r² is a sum in a fixed tree. n by [`Rule`]:
//!
//! ```text
//! none      n = r / √D
//! norm      n = r / |L|                so that |x^| = |x|
//! unbiased  n = r²·√D / Σ h_d L_d      so that x·x^ = |x|²
//! ```
//!
//! rounded to f16. A row with an element that is not finite, or with an n beyond f16, is stored as zeros, and
//! `problems` says where the first of them was.
//!
//! # Bytes
//! A token and KV head: 4·D bytes read, D·(k + v)/8 + 4 written.
//!
//! # Work split
//! A warp a row of keys or values; four warps a block, which know nothing of each other. A lane has D/32
//! neighbouring dimensions; the codes of a unit (eight lanes of keys, four of values) are put together by
//! exchanges, and its words written by a lane each.

use super::layout::{Side, TileLayout, high_bit, low_bit, norm_place, stored};
use super::levels::MOST_LEVELS;
use super::rotation::{butterfly, with_signs};
use crate::attention::{BLOCK_TOKENS, Half};
use glam::UVec2;
use half::f16;
use simt::math::sqrt;
use simt::warp::{self, FULL_MASK, warp_shuffle_xor, warp_sum_f32};
use simt::{Global, GlobalMut, Pod, Zeroable, bits, convert, kernel, thread, unroll};

/// Threads of a block: four rows.
pub const ENCODE_THREADS: u32 = 128;

/// How n is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Rule {
    /// r / √D: the smallest error.
    None,
    /// The restored row is as long as the row.
    Norm,
    /// The product of row and restored row is that of the row with itself.
    Unbiased,
}

/// The extents of a launch of [`encode`](fn@encode).
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct EncodeShape {
    /// New tokens of all sequences.
    pub rows: u32,
    /// New tokens of each sequence, at least one.
    pub tokens: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Entries of a row of the block table.
    pub max_blocks: u32,
    /// Bits of a key's code.
    pub key_bits: u32,
    /// Bits of a value's code.
    pub value_bits: u32,
    /// A [`Rule`].
    pub rule: u32,
    /// √D.
    pub root: f32,
}

/// Whether n fits f16: what is larger rounds to infinity.
#[inline(always)]
pub fn fits(n: f32) -> bool {
    n < 65520.0
}

/// n of a row of norm r: `squares` is Σ L², `product` Σ h·L.
#[inline(always)]
pub fn scale_of(rule: u32, root: f32, r: f32, squares: f32, product: f32) -> f32 {
    if r == 0.0 {
        0.0
    } else if rule == Rule::Norm as u32 {
        r / sqrt(squares)
    } else if rule == Rule::Unbiased as u32 {
        r * r * root / product
    } else {
        r / root
    }
}

/// See the [module](self). `keys` and `values` [rows, kv_heads, D]; `positions` \[rows\]; `table` [sequences,
/// max_blocks]; `lengths` \[sequences\] become one more than the last tokens' positions; `tiles`: the pool
/// [blocks, kv_heads] of [`TileLayout`]; `books` [2, 2, 16]: of keys and of values thresholds and levels, as
/// [`Codebook`](super::Codebook) has them; `problems` \[2\]: of keys and of values the first row
/// (position · kv_heads + head) that could not be stored. Tokens past the table are left out. Grid
/// \[⌈2 · rows · kv_heads / 4⌉\].
#[kernel(system = gtq, instances(64, 128), max_threads = 128, overlaps)]
pub fn encode<const D: usize>(
    keys: Global<f16>,
    values: Global<f16>,
    positions: Global<u32>,
    table: Global<u32>,
    lengths: GlobalMut<u32>,
    tiles: GlobalMut<u8>,
    problems: GlobalMut<u32>,
    books: Global<f32>,
    shape: EncodeShape,
) {
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let item = thread::block_idx_x() * (ENCODE_THREADS / 32) + warp;
    if item >= 2 * shape.rows * shape.kv_heads {
        return;
    }
    let (pair, is_key) = (item / 2, item & 1 == 0);
    let (row, head) = (bits::div_u32(pair, shape.kv_heads), bits::rem_u32(pair, shape.kv_heads));
    let sequence = bits::div_u32(row, shape.tokens);
    let position = positions.load(row as usize);
    let index = position / BLOCK_TOKENS;
    if index >= shape.max_blocks {
        return;
    }
    let last = bits::rem_u32(row, shape.tokens) == shape.tokens - 1;
    if last && head == 0 && is_key && lane == 0 {
        lengths.store(sequence as usize, position + 1);
    }
    let block = table.load(sequence as usize * shape.max_blocks as usize + index as usize);

    let each = D as u32 / 32;
    let at = pair as usize * D + (lane * each) as usize;
    let source = if is_key { keys } else { values };
    let mut x = [0f32; 4];
    if D == 128 {
        let [low, high] = source.load_vector::<UVec2>(at).to_array();
        let ([a, b], [c, d]) = (<f16 as Half>::unpack(low), <f16 as Half>::unpack(high));
        x = [a, b, c, d];
    } else {
        [x[0], x[1]] = <f16 as Half>::unpack(source.load_vector::<u32>(at));
    }
    let r = sqrt(warp_sum_f32(squares(x)));
    let h = butterfly::<D>(with_signs::<D>(x, lane), lane);

    let mut codes = [0u32; 4];
    let mut levels = [0f32; 4];
    let book = if is_key { 0 } else { 2 * MOST_LEVELS };
    let first = books.load_readonly(book + MOST_LEVELS);
    unroll!(for i in 0..4 {
        levels[i] = if i < D / 32 { first } else { 0.0 };
    });
    unroll!(for t in 0..(MOST_LEVELS - 1), at_most 15 {
        let threshold = books.load_readonly(book + t) * r;
        let level = books.load_readonly(book + MOST_LEVELS + t + 1);
        unroll!(for i in 0..4 {
            if i < D / 32 && h[i] > threshold {
                codes[i] += 1;
                levels[i] = level;
            }
        });
    });
    let sum_of_squares = warp_sum_f32(squares(levels));
    let product = warp_sum_f32((h[0] * levels[0] + h[1] * levels[1]) + (h[2] * levels[2] + h[3] * levels[3]));
    let scale = scale_of(shape.rule, shape.root, r, sum_of_squares, product);
    let fits = fits(scale);
    let stored_scale = if fits { scale } else { 0.0 };

    let layout = TileLayout { head_dim: D as u32, key_bits: shape.key_bits, value_bits: shape.value_bits };
    let tile = (block * shape.kv_heads + head) as usize * layout.bytes() as usize;
    let token = position % BLOCK_TOKENS;
    if is_key {
        write_unit::<D>(tiles, tile, layout, Side::Key, token, lane, codes);
    } else {
        write_unit::<D>(tiles, tile, layout, Side::Value, token, lane, codes);
    }
    if lane == 0 {
        let norms = layout.norms(if is_key { Side::Key } else { Side::Value });
        let to = tile + (norms + 2 * norm_place(token)) as usize;
        tiles.store_vector(to, convert::f16_from_f32(stored_scale).to_bits());
        if !fits {
            let place = if is_key { 0 } else { 1 };
            problems.atomic_min(place, position * shape.kv_heads + head);
        }
    }
}

/// Σ x² of a lane.
#[inline(always)]
pub fn squares(x: [f32; 4]) -> f32 {
    (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3])
}

/// Writes the codes of a warp's row.
#[simt::device]
fn write_unit<const D: usize>(
    tiles: GlobalMut<u8>,
    tile: usize,
    layout: TileLayout,
    side: Side,
    token: u32,
    lane: u32,
    codes: [u32; 4],
) {
    let each = D as u32 / 32;
    let (bits, unit_dims) = (layout.bits(side), side.unit_dims(D as u32));
    let lanes = unit_dims / each;
    let (unit, own) = (lane / lanes, lane % lanes);
    let (mut low, mut high) = ([0u32; 4], 0u32);
    unroll!(for i in 0..4 {
        if i < D / 32 {
            let d = own * each + i as u32;
            let code = stored(bits, codes[i]);
            let at = low_bit(bits, unit_dims, d);
            let part = (if bits == 4 { code } else { code & 3 }) << (at % 32);
            unroll!(for w in 0..4 {
                low[w] |= if at / 32 == w as u32 { part } else { 0 };
            });
            high |= (code >> 2 & 1) << high_bit(unit_dims, d);
        }
    });
    unroll!(for stage in 0..3 {
        if 1 << stage < lanes {
            unroll!(for w in 0..4 {
                low[w] |= warp_shuffle_xor(FULL_MASK, low[w], 1 << stage, 32);
            });
            high |= warp_shuffle_xor(FULL_MASK, high, 1 << stage, 32);
        }
    });
    let place = side.unit_place(layout.wide(side), token, unit);
    let bytes = unit_dims * super::layout::low_bits(bits) / 8;
    let to = tile + (layout.low(side) + place * bytes) as usize;
    let word = if own & 1 == 0 { [low[0], low[2]] } else { [low[1], low[3]] };
    let word = if own & 2 == 0 { word[0] } else { word[1] };
    if bytes == 2 {
        if own == 0 {
            tiles.store_vector(to, word as u16);
        }
    } else if own < bytes / 4 {
        tiles.store_vector(to + 4 * own as usize, word);
    }
    if bits == 3 && own == 0 {
        let bytes = unit_dims / 8;
        let to = tile + (layout.high(side) + place * bytes) as usize;
        match bytes {
            1 => tiles.store_vector(to, high as u8),
            2 => tiles.store_vector(to, high as u16),
            _ => tiles.store_vector(to, high),
        }
    }
}
