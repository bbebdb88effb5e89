//! # Mathematics
//! The scores of the distant gather-blocks, as [`select`](fn@super::select) has them: the same chains of the
//! tensor cores, the same bits.
//!
//! # Layout
//! As `select` has it. `scores` [sequences, lists, tiles, 16] and `maxima` [sequences, lists, 1 + tiles,
//! rounded up to a multiple of four] are written, for [`attend_chosen`](fn@super::attend_chosen), which
//! ranks.
//!
//! # Bytes
//! 4·D a distant gather-block and KV head, once, of bounds in 16 bits; scores and maxima to the L2 cache.
//!
//! # Work split
//! Grid (parts, kv_heads · lists, sequences). A warp takes every fourth tile of its part: 16 gather-blocks by
//! eight query heads in 2·D/16 steps, operands straight from global memory. Nobody waits for anybody.
//!
//! **Small on purpose.** A thread block of attention leaves a multiprocessor 10,240 registers or more: enough
//! for one of this kernel. So those of a step are in place while the attention of the launch ahead still
//! runs, and ask the L2 cache for their bounds, which do not depend on it.

use super::choice::SelectShape;
use super::scoring::{Part, Row, Scoring, parts};
use crate::attention::Half;
use half::{bf16, f16};
use simt::{Global, GlobalMut, bits, kernel, thread, unroll, warp};

/// Threads of a block of [`score`](fn@score).
pub const SCORE_THREADS: u32 = 128;
const WARPS: u32 = SCORE_THREADS / 32;
/// Four on each of the 132 multiprocessors of a GH100.
const BLOCKS_WANTED: u32 = 528;
/// How many of these there is room for beside attention.
const FIRST: u32 = BLOCKS_WANTED / 4;
/// Tiles that each warp asks for ahead of the wait.
const AHEAD: u32 = 2;

/// Thread blocks of a list, for `rows` of these, whose longest has `tiles` tiles.
pub const fn score_parts(rows: u32, tiles: u32) -> u32 {
    parts(BLOCKS_WANTED, WARPS, rows, tiles)
}

/// Scores the distant gather-blocks of each sequence and KV head.
///
/// `R` is the groups of eight query heads of a list. `lengths` \[sequences\] are at most `max_blocks` · 16.
/// Grid ([`score_parts`], kv_heads · lists, sequences).
#[kernel(
    system = gather,
    instances(
        (f16, 64, 1), (f16, 64, 2), (f16, 96, 1), (f16, 128, 1),
        (bf16, 64, 1), (bf16, 64, 2), (bf16, 96, 1), (bf16, 128, 1)
    ),
    max_threads = 128,
    min_blocks = 6,
    overlaps = by_hand
)]
pub fn score<E: Half, const D: usize, const R: usize>(
    queries: Global<E>,
    bounds: Global<u32>,
    lengths: Global<u32>,
    scores: GlobalMut<u32>,
    maxima: GlobalMut<u32>,
    shape: SelectShape,
) {
    score_part::<E, D, R>(Arguments { queries, bounds, lengths, scores, maxima, shape });
}

/// The same for up to sixteen query heads of a list, whose operands take more registers: blocks of it do not
/// all start beside attention.
#[kernel(
    system = gather,
    args = score,
    instances((f16, 128, 2), (bf16, 128, 2)),
    max_threads = 128,
    min_blocks = 4,
    overlaps = by_hand
)]
pub fn score_wide<E: Half, const D: usize, const R: usize>(
    queries: Global<E>,
    bounds: Global<u32>,
    lengths: Global<u32>,
    scores: GlobalMut<u32>,
    maxima: GlobalMut<u32>,
    shape: SelectShape,
) {
    score_part::<E, D, R>(Arguments { queries, bounds, lengths, scores, maxima, shape });
}

/// The arguments of both kernels.
#[derive(Clone, Copy)]
struct Arguments<E> {
    queries: Global<E>,
    bounds: Global<u32>,
    lengths: Global<u32>,
    scores: GlobalMut<u32>,
    maxima: GlobalMut<u32>,
    shape: SelectShape,
}

/// What a block does.
#[simt::device]
fn score_part<E: Half, const D: usize, const R: usize>(arguments: Arguments<E>) {
    let Arguments { queries, bounds, lengths, scores, maxima, shape } = arguments;
    let (part, list_of, sequence) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    // Those that find room while attention runs ask for the tiles of the others, too.
    let (count, lists) = (thread::grid_dim_x(), thread::grid_dim_y());
    let linear = part + count * (list_of + lists * sequence);
    let all = count * lists * thread::grid_dim_z();
    unroll!(for i in 0..4 {
        let other = linear + i as u32 * FIRST;
        let wanted =
            if i == 0 { !(FIRST..BLOCKS_WANTED).contains(&linear) } else { (linear < FIRST) & (other < all) };
        let other = if wanted { other } else { linear };
        let (part, row) = (bits::rem_u32(other, count), bits::div_u32(other, count));
        let row = Row::of(shape, bits::rem_u32(row, lists), bits::div_u32(row, lists));
        row.ask::<D>(bounds, lengths, [part, warp, lane], [WARPS, AHEAD], wanted);
    });
    thread::wait_for_previous();
    thread::let_next_start();

    let Part { extent, tiles, tiles_a_part } = Part::of(lengths.load(sequence as usize), shape);
    let row = Row::of(shape, list_of, sequence);
    let scoring = Scoring { queries, bounds, scores, maxima, row, local: extent.local, lane };
    let (tile, end) = (part * tiles_a_part + warp, tiles.min((part + 1) * tiles_a_part));
    if tile < end {
        scoring.tiles_of::<D, R, WARPS, false>(tile, end);
    }
}
