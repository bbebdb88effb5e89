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

use super::bounds::TILE_BLOCKS;
use super::choice::{BY_BOUNDS, BY_CODES, BY_MEANS, Operands, Part, SelectShape, TileBounds};
use super::choice::{best, ordered, summary_words};
use super::sieve::maxima_words;
use crate::attention::{Half, ROWS};
use glam::UVec2;
use half::{bf16, f16};
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, bits, kernel, thread, unroll};

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
    let wanted = BLOCKS_WANTED / if rows == 0 { 1 } else { rows };
    // A tile for every warp.
    let most = tiles.div_ceil(WARPS);
    let parts = if wanted < most { wanted } else { most };
    if parts == 0 { 1 } else { parts }
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
    let row = sequence * (shape.kv_heads * shape.lists) + list_of;
    let head = bits::div_u32(list_of, shape.lists);
    let words = summary_words(shape.summary, D as u32);
    let of_head = (sequence * shape.kv_heads + head) as usize * shape.tiles as usize;
    let from = |tile: u32| (of_head + tile as usize) * words as usize;
    // Those that find room while attention runs ask for the tiles of the others, too.
    let (parts, rows) = (thread::grid_dim_x(), thread::grid_dim_y());
    let linear = part + parts * (list_of + rows * sequence);
    let all = parts * rows * thread::grid_dim_z();
    unroll!(for i in 0..4 {
        let other = linear + i as u32 * FIRST;
        let there =
            if i == 0 { !(FIRST..BLOCKS_WANTED).contains(&linear) } else { (linear < FIRST) & (other < all) };
        let other = if there { other } else { linear };
        let (part, row) = (bits::rem_u32(other, parts), bits::div_u32(other, parts));
        let (list_of, sequence) = (bits::rem_u32(row, rows), bits::div_u32(row, rows));
        // What the launch ahead has yet to write may be counted in this length, or not: a hint needs no more.
        let glance = Part::of(lengths.peek(sequence as usize, there), shape);
        // A lane a tile.
        let mine = warp + WARPS * lane;
        let tile = part * glance.tiles_a_part + mine;
        let there = there & (lane < AHEAD) & (mine < glance.tiles_a_part) & (tile < glance.tiles);
        let head = bits::div_u32(list_of, shape.lists);
        let first = (sequence * shape.kv_heads + head) as usize * shape.tiles as usize;
        let at = (first + if there { tile } else { 0 } as usize) * words as usize;
        bounds.prefetch(at, 4 * words, there);
    });
    thread::wait_for_previous();
    thread::let_next_start();

    let Part { extent, tiles, tiles_a_part } = Part::of(lengths.load(sequence as usize), shape);
    let scoring = Scoring {
        queries,
        bounds,
        scores,
        maxima,
        first_query: (row * shape.group) as usize,
        first_word: from(0),
        first_key: row as usize * (shape.tiles * TILE_BLOCKS) as usize,
        first_maximum: row as usize * maxima_words(shape.tiles) as usize,
        group: shape.group,
        local: extent.local,
        lane,
    };
    let (tile, end) = (part * tiles_a_part + warp, tiles.min((part + 1) * tiles_a_part));
    if tile >= end {
        return;
    }
    match shape.summary {
        BY_MEANS => scoring.tiles::<D, R, BY_MEANS>(tile, end),
        BY_CODES if D <= 128 && (E::IS_F16 || R == 1) => scoring.tiles::<D, R, BY_CODES>(tile, end),
        _ => scoring.tiles::<D, R, BY_BOUNDS>(tile, end),
    }
}

/// A warp's work on a row.
#[derive(Clone, Copy)]
struct Scoring<E> {
    queries: Global<E>,
    bounds: Global<u32>,
    scores: GlobalMut<u32>,
    maxima: GlobalMut<u32>,
    /// The first query head.
    first_query: usize,
    /// The first word of the first tile.
    first_word: usize,
    /// Where the score of block 0 goes.
    first_key: usize,
    /// Ahead of where the largest score of the first tile goes.
    first_maximum: usize,
    group: u32,
    /// Where the local blocks begin.
    local: u32,
    lane: u32,
}

impl<E: Half> Scoring<E> {
    /// Scores tile `tile` and every fourth behind it to before `end`.
    #[simt::device]
    fn tiles<const D: usize, const R: usize, const BY: u32>(self, mut tile: u32, end: u32) {
        let lane = self.lane;
        let mut rows = [[UVec2::ZERO; 16]; R];
        unroll!(for r in 0..R, at_most 2 {
            let head = ROWS * r as u32 + (lane >> 2);
            unroll!(for s in 0..(D / 16), at_most 16 {
                let at = (self.first_query + head as usize) * D + 16 * s + 4 * (lane & 3) as usize;
                if head < self.group {
                    rows[r][s] = self.queries.load_vector_readonly::<UVec2>(at);
                }
            });
        });
        while tile < end {
            let from = self.first_word + tile as usize * summary_words(BY, D as u32) as usize;
            let bounds = TileBounds::load::<D, BY>(self.bounds, from, lane);
            let operands = Operands::<R>::of::<D, BY>(&rows);
            let scored = operands.scores::<E, D, BY>(&bounds);
            let [low, high] = best::<R>(scored, bounds.scales, self.group, lane);
            // Lanes 4g have block g, lanes 4g + 1 block g + 8.
            let block = TILE_BLOCKS * tile + 8 * (lane & 3) + (lane >> 2);
            let score = ordered(if lane & 3 == 0 { low } else { high });
            if lane & 3 < 2 {
                self.scores.store(self.first_key + block as usize, score);
            }
            let counts = lane & 3 < 2 && block >= 1 && block < self.local;
            let most = warp::warp_reduce_max_u32(FULL_MASK, if counts { score } else { 0 });
            if lane == 0 {
                self.maxima.store(self.first_maximum + 1 + tile as usize, most);
            }
            tile += WARPS;
        }
    }
}
