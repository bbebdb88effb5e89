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

use super::listing::Listing;
use super::rule::Rule;
use super::scoring::{Part, Row, Scoring, parts};
use super::sieve::Sieve;
use super::top::{Ranking, ranking};
use crate::attention::{Half, last_to_arrive};
use half::{bf16, f16};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, bits, kernel, thread, warp};

/// Threads of a block of [`select`](fn@select).
pub const SELECT_THREADS: u32 = 256;
pub(super) const WARPS: u32 = SELECT_THREADS / 32;
/// Thread blocks that fill the machine: one on each of the 132 multiprocessors of a GH100, as there are
/// registers for. Its warps have 64 KiB of bounds on their way.
const BLOCKS_WANTED: u32 = 132;
/// Tiles that each warp asks for ahead of the wait.
const AHEAD: u32 = 2;

/// Thread blocks of a list, for `rows` of these, whose longest has `tiles` tiles.
pub const fn parts_for(rows: u32, tiles: u32) -> u32 {
    parts(BLOCKS_WANTED, WARPS, rows, tiles)
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
    /// What blocks are scored by: [`BY_BOUNDS`](super::BY_BOUNDS), [`BY_CODES`](super::BY_CODES) or
    /// [`BY_MEANS`](super::BY_MEANS).
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
    let row = Row::of(shape, list_of, sequence);
    row.ask::<D>(bounds, lengths, [part, warp, lane], [WARPS, AHEAD], true);
    thread::wait_for_previous();

    let Part { extent, tiles, tiles_a_part } = Part::of(lengths.load(sequence as usize), shape);
    let used = bits::div_u32(tiles + tiles_a_part - 1, tiles_a_part).max(1);
    if part >= used {
        return;
    }
    if tiles > 0 {
        let scoring = Scoring { queries, bounds, scores, maxima, row, local: extent.local, lane };
        let (tile, end) = (part * tiles_a_part + warp, tiles.min((part + 1) * tiles_a_part));
        scoring.tiles_of::<D, R, WARPS, true>(tile, end);
    }
    let layout = layout();
    if !last_to_arrive(counters, row.number, used, layout.last) {
        return;
    }

    if tiles > 0 {
        let sieve = Sieve {
            layout: layout.ranking,
            keys: scores,
            first: row.first_key(),
            end: extent.local,
            maxima,
            first_maximum: row.first_maximum(),
            tiles,
        };
        let first = row.first_listed() + 1;
        sieve.write(extent.chosen, |place, block| list.store(first + place as usize, block));
    }
    let listing = Listing {
        table,
        list,
        counts,
        entries,
        kept,
        rule: shape.rule,
        most: shape.most,
        max_blocks: shape.max_blocks,
        kv_heads: shape.kv_heads,
        row: row.number,
        head: row.head,
        sequence,
    };
    listing.complete(extent);
}
