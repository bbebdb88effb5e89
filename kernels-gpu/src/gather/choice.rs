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
//! By bounds in 8 bits the operands are the codes, which are exact in both types, and the sum is multiplied
//! by the block's power of two: the same error, with Q over the restored bounds.
//!
//! By means a score is one such chain over q_g and the block's mean key, and no bound of anything. Where each
//! query head has a list of its own, s is its s_g.
//!
//! # Layout
//! `queries` [sequences, q_heads, D]; `bounds` as [`fold`](fn@super::fold) has them, or what
//! [`squeeze`](fn@super::squeeze) or [`average`](fn@super::average) have in their place; `table` [sequences,
//! max_blocks] of the cache. Written, with a KV head for each list where a KV head has several: `scores`
//! [sequences, kv_heads, tiles, 16], of the blocks that were ranked, as words that order like them; `maxima`
//! [sequences, kv_heads, 1 + tiles, rounded up to a multiple of four], from the second word on the largest of
//! each tile; `list` [sequences, kv_heads, most], the blocks that are kept in their order, then 0xffffffff;
//! `counts` [sequences, kv_heads]; `entries` [sequences · kv_heads, most · block / 16] and `kept` [sequences
//! · kv_heads], a block table and lengths over the pool seen as one of [blocks · kv_heads, 1, 16, D].
//!
//! # Bytes
//! 4·D a distant gather-block and KV head, once, of bounds in 16 bits: at a million tokens, blocks of 128, 4
//! KV heads of 128, 16.8 MB. Scores: 4 bytes a block and KV head, written to the L2 cache, of which few are
//! read again.
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
use super::codes::{code_words, restored, scale_word};
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
pub(super) const WARPS: u32 = SELECT_THREADS / 32;
/// Thread blocks that fill the machine: one on each of the 132 multiprocessors of a GH100, as there are
/// registers for. Its warps have 64 KiB of bounds on their way.
pub(super) const BLOCKS_WANTED: u32 = 132;
/// Tiles that each warp asks for ahead of the wait.
pub(super) const AHEAD: u32 = 2;

/// Thread blocks of a list, for `rows` of these, whose longest has `tiles` tiles.
pub const fn parts_for(rows: u32, tiles: u32) -> u32 {
    let wanted = BLOCKS_WANTED / if rows == 0 { 1 } else { rows };
    // A tile for every warp.
    let most = tiles.div_ceil(WARPS);
    let parts = if wanted < most { wanted } else { most };
    if parts == 0 { 1 } else { parts }
}

/// Blocks are scored by the largest and the smallest key.
pub const BY_BOUNDS: u32 = 0;
/// Blocks are scored by their mean key.
pub const BY_MEANS: u32 = 1;
/// Blocks are scored by the largest and the smallest key in 8 bits, rounded outward.
pub const BY_CODES: u32 = 2;

/// Words that a tile of 16 gather-blocks has of what they are scored by.
#[inline(always)]
pub const fn summary_words(summary: u32, head_dim: u32) -> u32 {
    match summary {
        BY_MEANS => tile_words(head_dim) / 2,
        BY_CODES => code_words(head_dim),
        _ => tile_words(head_dim),
    }
}

/// The extents of a launch of [`select`](fn@select).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SelectShape {
    /// What is kept.
    pub rule: Rule,
    /// Query heads of a list: up to eight times the instance's row groups.
    pub group: u32,
    /// Lists of a KV head.
    pub lists: u32,
    /// What blocks are scored by: [`BY_BOUNDS`], [`BY_CODES`] or [`BY_MEANS`].
    pub summary: u32,
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

/// The score of such a word.
#[inline(always)]
pub fn score_of(word: u32) -> f32 {
    f32::from_bits(if word >> 31 == 1 { word & !(1 << 31) } else { !word })
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
/// `R` is the groups of eight query heads of a list. `lengths` \[sequences\] are at most `max_blocks` ·
/// 16; `counters` [sequences, kv_heads · lists] are 0 before and after. Grid ([`parts_for`], kv_heads ·
/// lists, sequences).
#[kernel(
    system = gather,
    instances(
        (f16, 64, 1), (f16, 64, 2), (f16, 96, 1), (f16, 128, 1), (f16, 128, 2), (f16, 256, 1),
        (bf16, 64, 1), (bf16, 64, 2), (bf16, 96, 1), (bf16, 128, 1), (bf16, 128, 2), (bf16, 256, 1)
    ),
    max_threads = 256,
    // As many as are launched: for two, ptxas would hold some instances to 128 registers, which do not do.
    min_blocks = 1,
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
    let (part, list_of, sequence) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let row = sequence * (shape.kv_heads * shape.lists) + list_of;
    let head = bits::div_u32(list_of, shape.lists);
    let rule = shape.rule;
    let words = summary_words(shape.summary, D as u32);
    let of_head = (sequence * shape.kv_heads + head) as usize * shape.tiles as usize;
    let from = |tile: u32| (of_head + tile as usize) * words as usize;
    // What the launch ahead has yet to write may be counted in this length, or not: a hint needs no more.
    let glance = Part::of(lengths.peek(sequence as usize, true), shape);
    // A lane a tile.
    let mine = warp + WARPS * lane;
    let tile = part * glance.tiles_a_part + mine;
    let there = (lane < AHEAD) & (mine < glance.tiles_a_part) & (tile < glance.tiles);
    let at = from(if there { tile } else { 0 });
    bounds.prefetch(at, 4 * words, there);
    thread::wait_for_previous();

    let Part { extent, tiles, tiles_a_part } = Part::of(lengths.load(sequence as usize), shape);
    let used = bits::div_u32(tiles + tiles_a_part - 1, tiles_a_part).max(1);
    if part >= used {
        return;
    }
    let first_key = row as usize * (shape.tiles * TILE_BLOCKS) as usize;
    let first_maximum = row as usize * maxima_words(shape.tiles) as usize;
    if tiles > 0 {
        let scoring = Scoring {
            queries,
            bounds,
            scores,
            maxima,
            first_query: (row * shape.group) as usize,
            first_word: from(0),
            first_key,
            first_maximum,
            group: shape.group,
            local: extent.local,
            lane,
        };
        let (tile, end) = (part * tiles_a_part + warp, tiles.min((part + 1) * tiles_a_part));
        scoring.any::<D, R>(shape.summary, tile, end);
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
        let first = row as usize * shape.most as usize + 1;
        sieve.write(extent.chosen, |place, block| list.store(first + place as usize, block));
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
pub(super) struct Part {
    pub extent: Extent,
    pub tiles: u32,
    pub tiles_a_part: u32,
}

impl Part {
    /// Of a sequence of so many tokens, as far as the table reaches.
    #[simt::device]
    pub fn of(length: u32, shape: SelectShape) -> Self {
        let extent = Extent::of(length.min(shape.max_blocks * BLOCK_TOKENS), shape.rule);
        let tiles = if extent.ranked_blocks() > 0 { extent.local.div_ceil(TILE_BLOCKS) } else { 0 };
        let parts = thread::grid_dim_x();
        Part { extent, tiles, tiles_a_part: bits::div_u32(tiles + parts - 1, parts).max(1) }
    }
}

/// A warp's work on a row.
#[derive(Clone, Copy)]
pub(super) struct Scoring<E> {
    pub queries: Global<E>,
    pub bounds: Global<u32>,
    pub scores: GlobalMut<u32>,
    pub maxima: GlobalMut<u32>,
    /// The first query head.
    pub first_query: usize,
    /// The first word of the first tile.
    pub first_word: usize,
    /// Where the score of block 0 goes.
    pub first_key: usize,
    /// Ahead of where the largest score of the first tile goes.
    pub first_maximum: usize,
    pub group: u32,
    /// Where the local blocks begin.
    pub local: u32,
    pub lane: u32,
}

impl<E: Half> Scoring<E> {
    /// [`tiles`](Self::tiles) by what `summary` says.
    #[simt::device]
    pub fn any<const D: usize, const R: usize>(self, summary: u32, tile: u32, end: u32) {
        // A loop for each: what one does not need takes no registers.
        match summary {
            BY_MEANS => self.tiles::<D, R, BY_MEANS>(tile, end),
            // Of bf16 and two groups of heads there are not the registers; of more channels no codes.
            BY_CODES if D <= 128 && (E::IS_F16 || R == 1) => self.tiles::<D, R, BY_CODES>(tile, end),
            _ => self.tiles::<D, R, BY_BOUNDS>(tile, end),
        }
    }

    /// Scores tile `tile` and every eighth behind it to before `end`.
    #[simt::device]
    fn tiles<const D: usize, const R: usize, const BY: u32>(self, mut tile: u32, end: u32) {
        let lane = self.lane;
        let from = |tile: u32| self.first_word + tile as usize * summary_words(BY, D as u32) as usize;
        // Ahead of the queries, which they do not depend on.
        let mut bounds = TileBounds::NONE;
        if tile < end {
            bounds = TileBounds::load::<D, BY>(self.bounds, from(tile), lane);
        }
        let operands = Operands::<R>::load::<E, D, BY>(self.queries, self.first_query, self.group, lane);
        while tile < end {
            let scored = operands.scores::<E, D, BY>(&bounds);
            let scales = bounds.scales;
            // The next ones are on their way while these are put together.
            if tile + WARPS < end {
                bounds = TileBounds::load::<D, BY>(self.bounds, from(tile + WARPS), lane);
            }
            let [low, high] = best::<R>(scored, scales, self.group, lane);
            // Lanes 4g have block g, lanes 4g + 1 block g + 8.
            let block = TILE_BLOCKS * tile + 8 * (lane & 3) + (lane >> 2);
            let score = ordered(if lane & 3 == 0 { low } else { high });
            if lane & 3 < 2 {
                self.scores.store(self.first_key + block as usize, score);
            }
            let counts = lane & 3 < 2 && block >= 1 && block < self.local;
            let score = if counts { score } else { 0 };
            let most = warp::warp_reduce_max_u32(FULL_MASK, score);
            if lane == 0 {
                self.maxima.store(self.first_maximum + 1 + tile as usize, most);
            }
            tile += WARPS;
        }
    }
}

/// The query heads of a list as B operands: for each contraction the positive channels and the negative ones,
/// or all and none.
pub(super) struct Operands<const R: usize>([[[[u32; 2]; 2]; 16]; R]);

impl<const R: usize> Operands<R> {
    /// Loads `group` rows of `queries` from `row` on; heads that there are not are zeros.
    #[simt::device]
    fn load<E: Half, const D: usize, const BY: u32>(
        queries: Global<E>,
        row: usize,
        group: u32,
        lane: u32,
    ) -> Self {
        let mut operands = [[[[0u32; 2]; 2]; 16]; R];
        unroll!(for r in 0..R, at_most 2 {
            let head = ROWS * r as u32 + (lane >> 2);
            unroll!(for s in 0..(D / 16), at_most 16 {
                let at = (row + head as usize) * D + 16 * s + 4 * (lane & 3) as usize;
                let four = if head < group { queries.load_vector_readonly::<UVec2>(at) } else { UVec2::ZERO };
                let parts = |pair: u32| if BY == BY_MEANS { [pair, 0] } else { signs(pair) };
                let (low, high) = (parts(four.x), parts(four.y));
                operands[r][s] = [[low[0], high[0]], [low[1], high[1]]];
            });
        });
        Operands(operands)
    }

    /// Of rows in registers.
    #[simt::device]
    pub fn of<const D: usize, const BY: u32>(rows: &[[UVec2; 16]; R]) -> Self {
        let mut operands = [[[[0u32; 2]; 2]; 16]; R];
        unroll!(for r in 0..R, at_most 2 {
            unroll!(for s in 0..(D / 16), at_most 16 {
                let four = rows[r][s];
                let parts = |pair: u32| if BY == BY_MEANS { [pair, 0] } else { signs(pair) };
                let (low, high) = (parts(four.x), parts(four.y));
                operands[r][s] = [[low[0], high[0]], [low[1], high[1]]];
            });
        });
        Operands(operands)
    }

    /// Sums over the positive and over the negative channels of a tile: of blocks g and g + 8 for two query
    /// heads each, for each group of eight heads.
    #[simt::device]
    pub fn scores<E: Half, const D: usize, const BY: u32>(&self, bounds: &TileBounds) -> [[[f32; 4]; 2]; R] {
        let mut c = [[[0f32; 4]; 2]; R];
        if BY == BY_CODES {
            unroll!(for s in 0..(D / 16), at_most 16 {
                let words = bounds.operands[s][0].to_array();
                unroll!(for kind in 0..2 {
                    let of = [words[2 * kind], words[2 * kind + 1]];
                    let low = [restored::<E>(of[0], 0), restored::<E>(of[1], 0)];
                    let high = [restored::<E>(of[0], 1), restored::<E>(of[1], 1)];
                    let a = [low[0], low[1], high[0], high[1]];
                    unroll!(for r in 0..R, at_most 2 {
                        c[r][kind] = E::multiply(a, self.0[r][s][kind], c[r][kind]);
                    });
                });
            });
            return c;
        }
        unroll!(for s in 0..(D / 16), at_most 16 {
            unroll!(for kind in 0..2 {
                if BY != BY_MEANS || kind == 0 {
                    let a = bounds.operands[s][kind].to_array();
                    unroll!(for r in 0..R, at_most 2 {
                        c[r][kind] = E::multiply(a, self.0[r][s][kind], c[r][kind]);
                    });
                }
            });
        });
        c
    }
}

/// The bounds of 16 gather-blocks as A operands: for each contraction maxima and minima; or means and zeros;
/// or codes of both, and nothing.
pub(super) struct TileBounds {
    operands: [[UVec4; 2]; 16],
    /// What scores of blocks g and g + 8 are multiplied by.
    pub scales: [f32; 2],
}

impl TileBounds {
    const NONE: TileBounds = TileBounds { operands: [[UVec4::ZERO; 2]; 16], scales: [1.0; 2] };

    /// Loads the tile at word `from`.
    #[simt::device]
    pub fn load<const D: usize, const BY: u32>(bounds: Global<u32>, from: usize, lane: u32) -> Self {
        let mut a = Self::NONE;
        if BY != BY_BOUNDS {
            unroll!(for s in 0..(D / 16), at_most 16 {
                a.operands[s][0] = bounds.load_vector_streaming(from + 128 * s + 4 * lane as usize);
            });
            if BY == BY_CODES {
                unroll!(for i in 0..2 {
                    let at = from + scale_word(D as u32, (lane >> 2) + 8 * i as u32) as usize;
                    a.scales[i] = f32::from_bits(bounds.load_readonly(at));
                });
            }
            return a;
        }
        unroll!(for s in 0..(D / 16), at_most 16 {
            unroll!(for kind in 0..2 {
                a.operands[s][kind] = bounds.load_vector_streaming(from + 128 * (2 * s + kind) + 4 * lane as usize);
            });
        });
        a
    }
}

/// The best scores of blocks g and g + 8 over the query heads, in all lanes of g.
#[simt::device]
pub(super) fn best<const R: usize>(
    sums: [[[f32; 4]; 2]; R],
    scales: [f32; 2],
    group: u32,
    lane: u32,
) -> [f32; 2] {
    let mut best = [f32::NEG_INFINITY; 2];
    unroll!(for r in 0..R, at_most 2 {
        unroll!(for i in 0..4 {
            let head = ROWS * r as u32 + 2 * (lane & 3) + (i as u32 & 1);
            let score = (sums[r][0][i] + sums[r][1][i]) * scales[i / 2];
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
