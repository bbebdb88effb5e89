//! Matrix times matrix on the integer tensor cores, for prompts: the bits of [`product`](super::product) for
//! every token.
//!
//! # Mathematics
//! That of [`product`](super::product), in its order: a warp takes a strand's blocks in order, adds the
//! strand to the total, and goes on to the next strand; so one sum and one total an output are enough. The 32
//! channels of a block are one m16n8k32 product for each of the three planes of digits, exact.
//!
//! # Work split
//! A warp has 32 rows (four groups, two operands) and 32 tokens, a thread block four warps: grid (⌈tokens /
//! 32⌉, ⌈R / 128⌉). Operands come straight from memory as fragments. With g = lane / 4 and q = lane % 4, A's
//! registers are the words of part q of row g and row g + 8 of two tiles; B's are the eight bytes of a plane
//! in part q of token g's record: both name channels 8q to 8q + 7, so the order of the contraction is the
//! same on both sides. The steps t and u that the result's columns 2q and 2q + 1 want come from the lanes
//! that hold those tokens' records.
//!
//! # Bytes
//! Weights once for every 32 tokens (20 bytes for 32 of Q4_1), records once for every 128 rows: from the L2
//! cache but for the first time. What bounds it is the way from the first-level cache: a load of records
//! touches eight lines. Of 32 channels, 32 rows and 32 tokens these are 64 cycles and the weights' 12;
//! instructions are some 270, 68 cycles. With 16 rows a warp, records would be 64 cycles for half as
//! many products.

use super::fixed::{PART_WORDS, RECORD_WORDS};
use super::format::{Codes, GROUP, Q4_0, Q4_1, Q8_0};
use super::product::{LinearShape, Target, strands};
use glam::UVec4;
use simt::tensor::mma_i8;
use simt::warp::{self, FULL_MASK, warp_shuffle_idx};
use simt::{Global, GlobalMut, kernel, thread, unroll};

/// Tokens of a thread block.
pub const PREFILL_TOKENS: u32 = 32;
/// Rows of a thread block.
pub const PREFILL_ROWS: u32 = 128;
/// Threads of a thread block.
pub const PREFILL_THREADS: u32 = 128;

/// W·v for many tokens. Grid (⌈tokens / 32⌉, ⌈R / 128⌉) of 128 threads, no shared memory; arguments as
/// [`linear`](fn@super::linear).
#[kernel(system = model, instances(Q4_1, Q4_0, Q8_0), max_threads = 128, min_blocks = 3, overlaps)]
pub fn linear_prefill<F: Codes>(
    codes: Global<u32>,
    scales: Global<u16>,
    records: Global<u32>,
    bias: Global<f32>,
    residual: Global<f32>,
    out: GlobalMut<f32>,
    shape: LinearShape,
) {
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let (g, q) = (lane >> 2, lane & 3);
    let first_row = (thread::block_idx_y() * 4 + warp) * 4 * GROUP;
    if first_row >= shape.rows {
        return;
    }
    // Groups that are not there: the last one again, not written.
    let group = first_row / GROUP;
    let tiles = [0, 1, 2, 3].map(|i| (group + i).min(shape.groups() - 1) as usize * shape.blocks as usize);
    let first_token = thread::block_idx_x() * PREFILL_TOKENS;
    let mut starts = [0usize; 4];
    unroll!(for i in 0..4 {
        // Tokens that are not there: the last one again, not written.
        let token = (first_token + 8 * i as u32 + g).min(shape.tokens - 1);
        starts[i] = token as usize * (shape.blocks * RECORD_WORDS) as usize + (q * PART_WORDS) as usize;
    });

    let strand_count = strands(shape.blocks);
    let mut totals = [[[0f32; 4]; 4]; 2];
    let mut strand = 0;
    while strand < strand_count {
        let mut sums = [[[0f32; 4]; 4]; 2];
        let mut block = strand;
        while block < shape.blocks {
            let at = block as usize;
            let words = tiles.map(|tile| F::words(codes, tile + at, q, g));
            let scales = tiles.map(|tile| F::scale(scales, tile + at, g));
            unroll!(for i in 0..4 {
                let from = starts[i] + at * RECORD_WORDS as usize;
                let first: UVec4 = records.load_vector_readonly(from);
                let second: UVec4 = records.load_vector_readonly(from + 4);
                let step = columns(second.z, q);
                let u = columns(second.w, q);
                unroll!(for half in 0..2 {
                    let (upper, lower) = (words[2 * half], words[2 * half + 1]);
                    let a = [upper[0], lower[0], upper[1], lower[1]];
                    let high = mma_i8(a, [first.x, first.y], [0; 4]);
                    let middle = mma_i8(a, [first.z, first.w], [0; 4]);
                    let low = mma_i8(a, [second.x, second.y], [0; 4]);
                    unroll!(for e in 0..4 {
                        let dot = F::combine([high[e], middle[e], low[e]]);
                        let scale = scales[2 * half + e / 2];
                        sums[half][i][e] = F::finish(sums[half][i][e], scale, dot, step[e % 2], u[e % 2]);
                    });
                });
            });
            block += strand_count;
        }
        unroll!(for half in 0..2 {
            unroll!(for i in 0..4 {
                unroll!(for e in 0..4 {
                    let (sum, total) = (sums[half][i][e], totals[half][i][e]);
                    totals[half][i][e] = if strand == 0 { sum } else { total + sum };
                });
            });
        });
        strand += 1;
    }

    let target = Target { bias, residual, out, shape };
    unroll!(for half in 0..2 {
        unroll!(for i in 0..4 {
            unroll!(for e in 0..4 {
                let token = first_token + 8 * i as u32 + 2 * q + (e % 2) as u32;
                let row = first_row + g + 8 * (2 * half + e / 2) as u32;
                if token < shape.tokens && row < shape.rows {
                    target.finish(token, row, totals[half][i][e]);
                }
            });
        });
    });
}

/// The words of tokens 2q and 2q + 1 as floats; token g's is `word` of lanes 4g to 4g + 3.
#[simt::device]
pub(super) fn columns(word: u32, q: u32) -> [f32; 2] {
    let of = |token: u32| f32::from_bits(warp_shuffle_idx(FULL_MASK, word, 4 * token, 32));
    [of(2 * q), of(2 * q + 1)]
}
