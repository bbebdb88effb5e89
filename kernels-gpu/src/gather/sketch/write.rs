//! `sketch`: keys and values of the pool to sketches.
//!
//! # Mathematics and layout
//! Those of [`tile`](super::tile). A tile that is not full yet is written as well, of the tokens that it has,
//! and again with each token that comes: places without a token have the code of the last one.
//!
//! # Work split
//! Grid (tiles that a chunk can touch, kv_heads, sequences), 2·D threads: a thread has two channels and every
//! fourth token, eight in all. Threads of the same channels meet in shared memory for the range; norms of
//! tokens are sums over warps, which have 64 channels of the same tokens; codes pass through shared memory as
//! bytes and leave as words.
//!
//! # Bytes
//! 128·D read and a sketch written for each tile and KV head.

use super::tile::{
    Annotation, TILE_TOKENS, channel, code, code_word, code_words, error, largest_code, sketch_words,
    tiles_of,
};
use crate::attention::outward::{norm_bound, reciprocal};
use crate::attention::{BLOCK_TOKENS, Half};
use half::{bf16, f16};
use simt::math::{fma, max, min};
use simt::warp::{self, FULL_MASK, warp_shuffle_idx, warp_shuffle_xor};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, bits, convert, kernel, thread, unroll};

/// Threads that share two channels in [`sketch`](fn@sketch).
pub const SKETCH_LANES: u32 = 4;
/// Tokens that a thread has.
const TOKENS: usize = (TILE_TOKENS / SKETCH_LANES) as usize;

/// The extents of a launch of [`sketch`](fn@sketch).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SketchShape {
    /// Positions of a sequence: the first of them is where its new tokens begin.
    pub stride: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements of a key: 64 or 128.
    pub head_dim: u32,
    /// Entries of a row of the block table.
    pub max_blocks: u32,
}

#[derive(Clone, Copy)]
struct Layout {
    /// Least and largest key, [lanes, D, 2].
    ranges: Shared<f32>,
    /// [32, D].
    codes: Shared<u8>,
    /// Sums of squares over 64 channels, [32, D / 64]: of errors, of values.
    errors: Shared<f32>,
    values: Shared<f32>,
    /// The same of σ and of z, [D / 64].
    scales: Shared<f32>,
    zeros: Shared<f32>,
    bytes: u32,
}

const fn layout() -> Layout {
    let mut plan = SharedPlan::new();
    let ranges = plan.array(SKETCH_LANES * 128 * 2);
    let codes = plan.array(TILE_TOKENS * 128);
    let (errors, values) = (plan.array(TILE_TOKENS * 2), plan.array(TILE_TOKENS * 2));
    let (scales, zeros) = (plan.array(2), plan.array(2));
    Layout { ranges, codes, errors, values, scales, zeros, bytes: plan.bytes() }
}

/// Shared memory of [`sketch`](fn@sketch).
pub const fn sketch_bytes() -> u32 {
    layout().bytes
}

/// Sketches the tiles that each sequence's tokens from position `positions[sequence · stride]` to before
/// `lengths[sequence]` are in.
///
/// `keys` and `values` are the pool that holds them already, [blocks, kv_heads, 16, D]; `table` [sequences,
/// max_blocks]; `positions` [sequences, stride]; `lengths` \[sequences\]; `sketches` [sequences, kv_heads,
/// tiles of max_blocks, [`sketch_words`]]. Tokens past the table are left out. Grid (tiles that the longest
/// chunk can touch, kv_heads, sequences), [`SKETCH_LANES`] · D / 2 threads.
#[kernel(system = gather, instances((f16, 4), (f16, 8), (bf16, 4), (bf16, 8)), max_threads = 256, overlaps)]
pub fn sketch<E: Half, const BITS: usize>(
    keys: Global<E>,
    values: Global<E>,
    table: Global<u32>,
    positions: Global<u32>,
    lengths: Global<u32>,
    sketches: GlobalMut<u32>,
    shape: SketchShape,
) {
    let (head, sequence) = (thread::block_idx_y(), thread::block_idx_z());
    let first = positions.load(sequence as usize * shape.stride as usize);
    let length = lengths.load(sequence as usize).min(shape.max_blocks * BLOCK_TOKENS);
    let index = first / TILE_TOKENS + thread::block_idx_x();
    if first >= length || index * TILE_TOKENS >= length {
        return;
    }
    let (dim, width) = (shape.head_dim, BITS as u32);
    let largest = largest_code(width);
    let last = (length - index * TILE_TOKENS).min(TILE_TOKENS) - 1;
    let halves = [0, last / BLOCK_TOKENS].map(|half| {
        let block = table.load((sequence * shape.max_blocks + 2 * index + half) as usize);
        (block as usize * shape.kv_heads as usize + head as usize) * BLOCK_TOKENS as usize
    });
    let pairs = dim / 2;
    let t = thread::thread_idx_x();
    let (pair, lane) = (bits::rem_u32(t, pairs), bits::div_u32(t, pairs));
    let layout = layout();

    let mut key = [[0f32; 2]; TOKENS];
    let mut value = [[0f32; 2]; TOKENS];
    unroll!(for i in 0..8 {
        let token = (SKETCH_LANES * i as u32 + lane).min(last);
        let half = if token < BLOCK_TOKENS { halves[0] } else { halves[1] };
        let at = (half + (token % BLOCK_TOKENS) as usize) * dim as usize + 2 * pair as usize;
        key[i] = E::unpack(keys.load_vector::<u32>(at));
        value[i] = E::unpack(values.load_vector::<u32>(at));
    });
    let mut range = [[f32::INFINITY, f32::NEG_INFINITY]; 2];
    unroll!(for i in 0..8 {
        unroll!(for c in 0..2 {
            range[c] = [min(range[c][0], key[i][c]), max(range[c][1], key[i][c])];
        });
    });
    let at = |lane: u32, c: u32| 2 * (lane * dim + 2 * pair + c);
    unroll!(for c in 0..2 {
        layout.ranges.store(at(lane, c as u32), range[c][0]);
        layout.ranges.store(at(lane, c as u32) + 1, range[c][1]);
    });
    thread::sync_threads();
    let mut scale = [0f32; 2];
    let mut zero = [0f32; 2];
    let mut packed = [0u32; 2];
    unroll!(for c in 0..2 {
        let mut range = [f32::INFINITY, f32::NEG_INFINITY];
        unroll!(for other in 0..4 {
            range[0] = min(range[0], layout.ranges.load(at(other as u32, c as u32)));
            range[1] = max(range[1], layout.ranges.load(at(other as u32, c as u32) + 1));
        });
        let (s, z) = channel(range[0], range[1], largest);
        (scale[c], zero[c]) = (convert::f32_from_f16(s), convert::f32_from_f16(z));
        packed[0] |= (s.to_bits() as u32) << (16 * c);
        packed[1] |= (z.to_bits() as u32) << (16 * c);
    });
    let row = (sequence * shape.kv_heads + head) as usize;
    let tile = row * tiles_of(shape.max_blocks * BLOCK_TOKENS) as usize + index as usize;
    let start = tile * sketch_words(dim, width) as usize;
    let metadata = start + code_words(dim, width) as usize;
    let (warp, half) = (t / 32, pair / 32);
    if lane == 0 {
        sketches.store(metadata + pair as usize, packed[0]);
        sketches.store(metadata + (pairs + pair) as usize, packed[1]);
        let scales = warp::warp_sum_f32(fma(scale[1], scale[1], scale[0] * scale[0]));
        let zeros = warp::warp_sum_f32(fma(zero[1], zero[1], zero[0] * zero[0]));
        if warp::lane_id() == 0 {
            layout.scales.store(warp, scales);
            layout.zeros.store(warp, zeros);
        }
    }
    let inverse = [reciprocal(scale[0]), reciprocal(scale[1])];
    unroll!(for i in 0..8 {
        let token = SKETCH_LANES * i as u32 + lane;
        let mut e = [0f32; 2];
        unroll!(for c in 0..2 {
            let code = code(key[i][c], zero[c], inverse[c], largest);
            e[c] = error(key[i][c], code, scale[c], zero[c]);
            layout
                .codes
                .store(token * dim + 2 * pair + c as u32, simt::math::to_i32_nearest_even(code) as u8);
        });
        let errors = warp::warp_sum_f32(fma(e[1], e[1], e[0] * e[0]));
        let values = warp::warp_sum_f32(fma(value[i][1], value[i][1], value[i][0] * value[i][0]));
        if warp::lane_id() == 0 {
            layout.errors.store(2 * token + half, errors);
            layout.values.store(2 * token + half, values);
        }
    });
    thread::sync_threads();

    let mut word = t;
    while word < code_words(dim, width) {
        let codes = |token: u32, channel: u32| {
            let both: u16 = layout.codes.load_vector(token * dim + channel);
            (both as u32 & 0xff) | (both as u32 >> 8) << 16
        };
        sketches.store(start + word as usize, code_word(width, word, codes));
        word += SKETCH_LANES * pairs;
    }
    if warp != 0 {
        return;
    }
    let sum = |sums: Shared<f32>, at: u32| {
        norm_bound(if dim > 64 { sums.load(at) + sums.load(at + 1) } else { sums.load(at) })
    };
    let token = warp::lane_id();
    // NaN is above all.
    let mut errors = sum(layout.errors, 2 * token);
    let mut values = sum(layout.values, 2 * token);
    unroll!(for i in 0..5 {
        errors = simt::math::maximum(errors, warp_shuffle_xor(FULL_MASK, errors, 1 << i, 32));
        if i < 4 {
            values = simt::math::maximum(values, warp_shuffle_xor(FULL_MASK, values, 1 << i, 32));
        }
    });
    let halves = [values, warp_shuffle_idx(FULL_MASK, values, 16, 32)];
    if t == 0 {
        let annotation = Annotation::of(errors, sum(layout.scales, 0), sum(layout.zeros, 0), halves, largest);
        sketches.store_vector(metadata + dim as usize, annotation);
    }
}
