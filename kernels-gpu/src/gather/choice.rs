//! # Mathematics
//! Score of a gather-block for query head g (the paper's section 8.1), and what blocks are ranked by, the
//! largest over the query heads of a KV head:
//!
//! ```text
//! s_g = Σ_c max(q_g,c, 0)·kmax_c + min(q_g,c, 0)·kmin_c        s = max_g s_g
//! ```
//!
//! s_g is at least q_g·k_t for every key of the block, but for rounding. The two sums are a chain of D/16
//! steps of the tensor cores each, added at the end. With κ = 17·2^−25 + 2^−23 for a step, u = 2^−24 and Q =
//! Σ_c max(|q_c|, n)·max(|bound_c|, n) over the terms that are not 0, n the type's smallest normal number: a
//! step cuts 17 terms off below 2^−25 of the largest and the sum toward zero to f32, its terms are at most Q
//! in sum, and the last addition rounds once. So
//!
//! ```text
//! |s_g computed − s_g| <= 1.01·(κ·D/16 + u)·Q
//! ```
//!
//! in units of q·k (`score_error` in `host/src/gather/oracle.rs`). A score that is no number ranks above all:
//! its block is read.
//!
//! # Layout
//! `queries` [sequences, q_heads, D]; `bounds` as [`fold`](fn@super::fold) has them; `table` [sequences,
//! max_blocks] of the cache. Written: `scores` [sequences, kv_heads, tiles, 16], of the blocks that were
//! ranked, as words that order like them; `maxima` [sequences, kv_heads, 1 + tiles, rounded up to a multiple
//! of four], from the second word on the largest of each tile; `list` [sequences, kv_heads, most], the blocks
//! that are kept in their order, then 0xffffffff; `counts` [sequences, kv_heads]; `entries` [sequences ·
//! kv_heads, most · block / 16] and `kept` [sequences · kv_heads], a block table and lengths over the pool
//! seen as one of [blocks · kv_heads, 1, 16, D].
//!
//! # Bytes
//! 4·D a distant gather-block and KV head, once: at a million tokens, blocks of 128, 4 KV heads of 128, 16.8
//! MB. Scores: 4 bytes a block and KV head, written to the L2 cache, of which few are read again.
//!
//! # Work split
//! Grid (parts, kv_heads, sequences). A warp takes every eighth tile of its part: 16 gather-blocks by eight
//! query heads in 2·D/16 steps, operands straight from global memory. The thread block of a row that arrives
//! last ranks: by the tiles' maxima it sees which few scores it must look at (`sieve.rs`, `top.rs`). Then it
//! writes the list and the table. Where nothing is left out nothing is read. The result does not depend on
//! how many parts there are.
//!
//! Ahead of the wait for the launch before, each warp asks the L2 cache for its first tiles.

use super::bounds::{TILE_BLOCKS, tile_words};
use super::listing::Listing;
use super::rule::{Extent, Rule};
use super::sieve::{Sieve, maxima_words};
use super::top::{Ranking, ranking};
use crate::attention::{BLOCK_TOKENS, Half, ROWS, last_to_arrive};
use glam::{UVec2, UVec4};
use half::{bf16, f16};
use simt::math::maximum;
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, bits, kernel, thread, unroll};

/// Threads of a block of [`select`](fn@select).
pub const SELECT_THREADS: u32 = 256;
const WARPS: u32 = SELECT_THREADS / 32;
/// Thread blocks that fill the machine: one on each of the 132 multiprocessors of a GH100, as there are
/// registers for. Its warps have 64 KiB of bounds on their way.
const BLOCKS_WANTED: u32 = 132;
/// Tiles that each warp asks for ahead of the wait.
const AHEAD: u32 = 2;

/// Thread blocks of a sequence and KV head, for `rows` of these, whose longest has `tiles` tiles.
pub const fn parts_for(rows: u32, tiles: u32) -> u32 {
    let wanted = BLOCKS_WANTED / if rows == 0 { 1 } else { rows };
    // A tile for every warp.
    let most = tiles.div_ceil(WARPS);
    let parts = if wanted < most { wanted } else { most };
    if parts == 0 { 1 } else { parts }
}

/// The extents of a launch of [`select`](fn@select).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SelectShape {
    /// What is kept.
    pub rule: Rule,
    /// Query heads of a KV head: up to eight times the instance's row groups.
    pub group: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Entries of a row of the cache's block table.
    pub max_blocks: u32,
    /// Tiles of a sequence and KV head, in bounds and scores.
    pub tiles: u32,
    /// Gather-blocks that a list has room for.
    pub most: u32,
}

/// Shared memory of a block.
#[derive(Clone, Copy)]
struct SelectLayout {
    ranking: Ranking,
    last: Shared<u32>,
    bytes: u32,
}

const fn layout() -> SelectLayout {
    let mut plan = SharedPlan::new();
    let ranking = ranking(&mut plan);
    let last = plan.array(1);
    SelectLayout { ranking, last, bytes: plan.bytes() }
}

/// Shared memory of [`select`](fn@select).
pub const fn select_bytes() -> u32 {
    layout().bytes
}

/// A score as a word that orders like it: −∞ is the least number, NaN (which [`maximum`] has made the one of
/// `NAN_BITS`) above all. Sums of the tensor cores are never −0.
#[inline(always)]
pub fn ordered(score: f32) -> u32 {
    let bits = score.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// Of a pair of elements the positive ones, and the negative ones, with zeros for the others.
#[inline(always)]
pub fn signs(pair: u32) -> [u32; 2] {
    let negative = (pair >> 15 & 0x0001_0001) * 0xffff;
    [pair & !negative, pair & negative]
}

/// Ranks the distant gather-blocks of each sequence and KV head, and writes what is kept: list and block
/// table.
///
/// `R` is the groups of eight query heads of a KV head. `lengths` \[sequences\] are at most `max_blocks` ·
/// 16; `counters` [sequences, kv_heads] are 0 before and after. Grid ([`parts_for`], kv_heads, sequences).
#[kernel(
    system = gather,
    instances(
        (f16, 64, 1), (f16, 64, 2), (f16, 128, 1), (f16, 128, 2),
        (bf16, 64, 1), (bf16, 64, 2), (bf16, 128, 1), (bf16, 128, 2)
    ),
    max_threads = 256,
    overlaps = late
)]
pub fn select<E: Half, const D: usize, const R: usize>(
    queries: Global<E>,
    bounds: Global<u32>,
    table: Global<u32>,
    lengths: Global<u32>,
    scores: GlobalMut<u32>,
    maxima: GlobalMut<u32>,
    counters: GlobalMut<u32>,
    list: GlobalMut<u32>,
    counts: GlobalMut<u32>,
    entries: GlobalMut<u32>,
    kept: GlobalMut<u32>,
    shape: SelectShape,
) {
    let (part, head, sequence) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let row = sequence * shape.kv_heads + head;
    let rule = shape.rule;
    let from =
        |tile: u32| (row as usize * shape.tiles as usize + tile as usize) * tile_words(D as u32) as usize;
    // What the launch ahead has yet to write may be counted in this length, or not: a hint needs no more.
    let glance = Part::of(lengths.peek(sequence as usize, true), shape);
    // A lane a tile.
    let mine = warp + WARPS * lane;
    let tile = part * glance.tiles_a_part + mine;
    let there = (lane < AHEAD) & (mine < glance.tiles_a_part) & (tile < glance.tiles);
    let at = from(if there { tile } else { 0 });
    bounds.prefetch(at, 4 * tile_words(D as u32), there);
    thread::wait_for_previous();

    let Part { extent, tiles, tiles_a_part } = Part::of(lengths.load(sequence as usize), shape);
    let used = bits::div_u32(tiles + tiles_a_part - 1, tiles_a_part).max(1);
    if part >= used {
        return;
    }
    let first_key = row as usize * (shape.tiles * TILE_BLOCKS) as usize;
    let first_maximum = row as usize * maxima_words(shape.tiles) as usize;
    if tiles > 0 {
        let end = tiles.min((part + 1) * tiles_a_part);
        let mut tile = part * tiles_a_part + warp;
        // Ahead of the queries, which they do not depend on.
        let mut bounds_of_tile = TileBounds::NONE;
        if tile < end {
            bounds_of_tile = TileBounds::load::<D>(bounds, from(tile), lane);
        }
        let operands = Operands::<R>::load::<E, D>(queries, (row * shape.group) as usize, shape.group, lane);
        while tile < end {
            let scored = operands.scores::<E, D>(&bounds_of_tile);
            // The next ones are on their way while these are put together.
            if tile + WARPS < end {
                bounds_of_tile = TileBounds::load::<D>(bounds, from(tile + WARPS), lane);
            }
            let [low, high] = best::<R>(scored, shape.group, lane);
            // Lanes 4g have block g, lanes 4g + 1 block g + 8.
            let block = TILE_BLOCKS * tile + 8 * (lane & 3) + (lane >> 2);
            let score = ordered(if lane & 3 == 0 { low } else { high });
            if lane & 3 < 2 {
                scores.store(first_key + block as usize, score);
            }
            let counts = lane & 3 < 2 && block >= 1 && block < extent.local;
            let most = warp::warp_reduce_max_u32(FULL_MASK, if counts { score } else { 0 });
            if lane == 0 {
                maxima.store(first_maximum + 1 + tile as usize, most);
            }
            tile += WARPS;
        }
    }
    let layout = layout();
    if !last_to_arrive(counters, row, used, layout.last) {
        return;
    }

    if tiles > 0 {
        let sieve = Sieve {
            layout: layout.ranking,
            keys: scores,
            first: first_key,
            end: extent.local,
            maxima,
            first_maximum,
            tiles,
        };
        sieve.write(extent.chosen, list, row as usize * shape.most as usize + 1);
    }
    let listing = Listing {
        table,
        list,
        counts,
        entries,
        kept,
        rule,
        most: shape.most,
        max_blocks: shape.max_blocks,
        kv_heads: shape.kv_heads,
        row,
        head,
        sequence,
    };
    listing.complete(extent);
}

/// What there is to score in a row, and how much of it a thread block takes.
#[derive(Clone, Copy)]
struct Part {
    extent: Extent,
    tiles: u32,
    tiles_a_part: u32,
}

impl Part {
    /// Of a sequence of so many tokens, as far as the table reaches.
    #[simt::device]
    fn of(length: u32, shape: SelectShape) -> Self {
        let extent = Extent::of(length.min(shape.max_blocks * BLOCK_TOKENS), shape.rule);
        let tiles = if extent.ranked_blocks() > 0 { extent.local.div_ceil(TILE_BLOCKS) } else { 0 };
        let parts = thread::grid_dim_x();
        Part { extent, tiles, tiles_a_part: bits::div_u32(tiles + parts - 1, parts).max(1) }
    }
}

/// The query heads of a KV head as B operands: for each contraction the positive channels and the negative
/// ones.
struct Operands<const R: usize>([[[[u32; 2]; 2]; 8]; R]);

impl<const R: usize> Operands<R> {
    /// Loads `group` rows of `queries` from `row` on; heads that there are not are zeros.
    #[simt::device]
    fn load<E: Half, const D: usize>(queries: Global<E>, row: usize, group: u32, lane: u32) -> Self {
        let mut operands = [[[[0u32; 2]; 2]; 8]; R];
        unroll!(for r in 0..R, at_most 2 {
            let head = ROWS * r as u32 + (lane >> 2);
            unroll!(for s in 0..(D / 16), at_most 8 {
                let at = (row + head as usize) * D + 16 * s + 4 * (lane & 3) as usize;
                let four = if head < group { queries.load_vector_readonly::<UVec2>(at) } else { UVec2::ZERO };
                let (low, high) = (signs(four.x), signs(four.y));
                operands[r][s] = [[low[0], high[0]], [low[1], high[1]]];
            });
        });
        Operands(operands)
    }

    /// Sums over the positive and over the negative channels of a tile: of blocks g and g + 8 for two query
    /// heads each, for each group of eight heads.
    #[simt::device]
    fn scores<E: Half, const D: usize>(&self, bounds: &TileBounds) -> [[[f32; 4]; 2]; R] {
        let mut c = [[[0f32; 4]; 2]; R];
        unroll!(for s in 0..(D / 16), at_most 8 {
            unroll!(for kind in 0..2 {
                unroll!(for r in 0..R, at_most 2 {
                    c[r][kind] = E::multiply(bounds.0[s][kind].to_array(), self.0[r][s][kind], c[r][kind]);
                });
            });
        });
        c
    }
}

/// The bounds of 16 gather-blocks as A operands: for each contraction maxima and minima.
struct TileBounds([[UVec4; 2]; 8]);

impl TileBounds {
    const NONE: TileBounds = TileBounds([[UVec4::ZERO; 2]; 8]);

    /// Loads the tile at word `from`.
    #[simt::device]
    fn load<const D: usize>(bounds: Global<u32>, from: usize, lane: u32) -> Self {
        let mut a = Self::NONE;
        unroll!(for s in 0..(D / 16), at_most 8 {
            unroll!(for kind in 0..2 {
                a.0[s][kind] = bounds.load_vector_streaming(from + 128 * (2 * s + kind) + 4 * lane as usize);
            });
        });
        a
    }
}

/// The best scores of blocks g and g + 8 over the query heads, in all lanes of g.
#[simt::device]
fn best<const R: usize>(sums: [[[f32; 4]; 2]; R], group: u32, lane: u32) -> [f32; 2] {
    let mut best = [f32::NEG_INFINITY; 2];
    unroll!(for r in 0..R, at_most 2 {
        unroll!(for i in 0..4 {
            let head = ROWS * r as u32 + 2 * (lane & 3) + (i as u32 & 1);
            let score = sums[r][0][i] + sums[r][1][i];
            if head < group {
                best[i / 2] = maximum(best[i / 2], score);
            }
        });
    });
    unroll!(for i in 0..2 {
        unroll!(for distance in 0..2 {
            let other = warp::warp_shuffle_xor(FULL_MASK, best[i], 1 << distance, 32);
            best[i] = maximum(best[i], other);
        });
    });
    best
}
