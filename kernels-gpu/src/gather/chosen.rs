//! # Mathematics
//! What [`select`](fn@super::select) chooses by the scores of [`score`](fn@super::score), and
//! [`attend`](fn@crate::attention::dense::attend) over it: the same list, the same split of its tiles, the
//! same order of additions, so the same bits.
//!
//! # Layout
//! As these have it. `scores` [sequences, lists, tiles, 16] and `maxima` [sequences, lists, 1 + tiles,
//! rounded up to a multiple of four] are read. `list`, `counts` and `kept` are written; a block table is not:
//! a warp finds its tiles by the list, in shared memory.
//!
//! # Bytes
//! 4·D a kept token and KV head of keys and values. Of scores and maxima, 4 bytes a block and 4 a tile, which
//! are in the L2 cache, every thread block of a row reads all maxima, and the few scores that the sieve
//! leaves; of up to 1,024 blocks all scores, and no maxima.
//!
//! # Work split
//! Grid (splits · row groups, kv_heads · lists, sequences), as that of `attend`. A thread block ranks **by
//! itself** (`sieve.rs`), and attends to its part of the list, as `attend` does. So nobody writes a list or a
//! table that others wait for, and nobody counts who has scored: that all have is what the launch waits for.
//! What all thread blocks of a row rank is read from the L2 cache by each, which takes no longer than if one
//! did.
//!
//! **Ahead of the wait.** Each warp asks the L2 cache for its first tiles: the first block and the last ones
//! are known, the others are those of the list that the same buffers had last. A hint: nothing depends on it.
//!
//! **What is behind.** The launch behind this one is let in when some warp has asked for its last tile, so
//! that what that one asks for comes behind these tiles, while parts are added up.

use super::bounds::TILE_BLOCKS;
use super::choice::{SelectShape, WARPS};
use super::kept::{Kept, Old, Tiles};
use super::listing::NONE;
use super::rule::{Extent, Rule};
use super::scoring::Row;
use super::sieve::Sieve;
use super::top::{Ranking, ranking};
use crate::attention::dense::{DenseShape, Layout, Target, lay_out, stages};
use crate::attention::{BLOCK_TOKENS, Half, Parts, Queries, ROWS, Running, first_blocks, walk};
use half::{bf16, f16};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, bits, kernel, thread, unroll, warp};

/// Threads of a block of [`attend_chosen`](fn@attend_chosen).
pub const CHOSEN_THREADS: u32 = 32 * WARPS;
/// The most distant blocks of a list.
pub const MOST_LISTED: u32 = 2048;

/// The extents of a launch of [`attend_chosen`](fn@attend_chosen).
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct ChosenShape {
    /// Those of the choice.
    pub select: SelectShape,
    /// Those of the attention, each list a sequence of its own, but for the blocks of the pool, which are the
    /// cache's.
    pub attend: DenseShape,
}

/// Shared memory of a block.
#[derive(Clone, Copy)]
struct ChosenLayout {
    attend: Layout,
    ranking: Ranking,
    /// The chosen blocks, in order.
    chosen: Shared<u32>,
    bytes: u32,
}

const fn layout<const D: usize>() -> ChosenLayout {
    let mut plan = SharedPlan::new();
    let attend = lay_out::<D>(&mut plan, stages(D as u32));
    let ranking = ranking(&mut plan);
    let chosen = plan.array(MOST_LISTED);
    ChosenLayout { attend, ranking, chosen, bytes: plan.bytes() }
}

/// Shared memory of [`attend_chosen`](fn@attend_chosen).
pub const fn chosen_bytes<const D: usize>() -> u32 {
    layout::<D>().bytes
}

/// Ranks the distant gather-blocks of each sequence and KV head and attends to what is kept.
///
/// `R` is the groups of eight query heads of a list. `lengths` \[sequences\] are at most `max_blocks` · 16,
/// and no list has more than [`MOST_LISTED`] distant blocks. `counters` are 0 before and after. Grid (splits
/// · R, kv_heads · lists, sequences).
#[kernel(
    system = gather,
    instances(
        (f16, 64, 1), (f16, 64, 2), (f16, 96, 1), (f16, 128, 1), (f16, 128, 2),
        (bf16, 64, 1), (bf16, 64, 2), (bf16, 96, 1), (bf16, 128, 1), (bf16, 128, 2)
    ),
    max_threads = 256,
    min_blocks = 1,
    overlaps = by_hand
)]
pub fn attend_chosen<E: Half, const D: usize, const R: usize>(
    queries: Global<E>,
    keys: Global<E>,
    values: Global<E>,
    table: Global<u32>,
    lengths: Global<u32>,
    scores: GlobalMut<u32>,
    maxima: GlobalMut<u32>,
    list: GlobalMut<u32>,
    counts: GlobalMut<u32>,
    kept: GlobalMut<u32>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    lse: GlobalMut<f32>,
    shape: ChosenShape,
) {
    let (index, list_of, sequence) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let SelectShape { rule, group, kv_heads, max_blocks, .. } = shape.select;
    let of_row = Row::of(shape.select, list_of, sequence);
    let (row, head) = (of_row.number, of_row.head);
    let splits = shape.attend.splits;
    let (row_group, split) = (bits::div_u32(index, splits), bits::rem_u32(index, splits));
    let first_listed = of_row.first_listed();
    let kept_of = |extent: Extent, chosen: Shared<u32>| Kept {
        table,
        chosen,
        shift: rule.entries_log2(),
        ranked: if extent.ranked() { extent.chosen } else { 0 },
        left_out: extent.blocks - extent.kept_blocks(),
        start: sequence * max_blocks,
        kv_heads,
        head,
    };
    let layout = layout::<D>();
    let of = |length: u32| {
        let extent = Extent::of(length.min(max_blocks * BLOCK_TOKENS), rule);
        (extent, Parts::of(extent.kept(rule), splits))
    };
    // What the launches ahead have yet to write may be counted in this length, or not, and the list is an old
    // one.
    {
        let wanted = shape.attend.pool_blocks != 0;
        let (extent, parts) = of(lengths.peek(sequence as usize, wanted));
        let at = warp + WARPS * (lane / 2);
        let tile = split * parts.tiles_a_split + at;
        let there = wanted & (lane < 2 * AHEAD) & (at < parts.tiles_a_split) & (tile < parts.tiles);
        let kept = kept_of(extent, layout.chosen);
        let old = Old {
            list: list.as_const(),
            first: first_listed,
            pool_blocks: shape.attend.pool_blocks,
            max_blocks,
        };
        kept.ask_old::<E, D>((keys, values), old, tile, there, lane);
    }
    thread::wait_for_previous();

    let (extent, Parts { tiles: kept_tiles, tiles_a_split, used }) = of(lengths.load(sequence as usize));
    if split >= used {
        return;
    }
    let tiles = if extent.ranked_blocks() > 0 { extent.local.div_ceil(TILE_BLOCKS) } else { 0 };
    let length = extent.kept(rule);
    let in_group = row_group * ROWS + (lane >> 2);
    let query_row = (row * group + in_group) as usize;
    let q =
        Queries::load::<E, D>(queries, query_row, in_group < group, layout.attend.queries, warp == 0, lane);
    if tiles > 0 {
        let sieve = Sieve {
            layout: layout.ranking,
            keys: scores,
            first: of_row.first_key(),
            end: extent.local,
            maxima,
            first_maximum: of_row.first_maximum(),
            tiles,
        };
        sieve.write(extent.chosen, |place, block| {
            layout.chosen.store(place, block);
            if index == 0 {
                // Others look at the old one.
                list.atomic_store(first_listed + 1 + place as usize, block);
            }
        });
        thread::sync_threads();
    }
    if index == 0 {
        tell(list, counts, kept, extent, rule, (row, shape.select.most));
    }

    let first = split * tiles_a_split;
    let ring = Tiles::<E, D> {
        layout: layout.attend,
        keys,
        values,
        kept: kept_of(extent, layout.chosen),
        length,
        warp,
        lane,
        end: (first + tiles_a_split).min(kept_tiles),
    };
    let ahead = first_blocks(&ring, first + warp);
    let mut running = Running::new();
    walk(&ring, first + warp, ahead, |tile, stage| {
        let (k, v) = ring.stage(stage);
        let mut scores = q.scores::<E, D>(k, lane);
        unroll!(for j in 0..2 {
            unroll!(for i in 0..2 {
                let scaled = scores[j][i] * shape.attend.scale_log2;
                let token = tile * BLOCK_TOKENS + 8 * j as u32 + 2 * (lane & 3) + i as u32;
                scores[j][i] = if token < length { scaled } else { f32::NEG_INFINITY };
            });
        });
        running.add::<E, D>(scores, v, lane);
    });

    layout.attend.lay_down::<D>(&running, warp, lane);
    let target =
        Target { output, lse, rows_wanted: u32::MAX, shape: shape.attend, sequence: row, head: 0, row_group };
    let launch_row = row * R as u32 + row_group;
    layout.attend.put_together::<D>(partials, counters, launch_row, [split, used], target);
}

/// Tiles that each warp asks for ahead of the wait, as `attend` does.
const AHEAD: u32 = 2;

/// Writes what is kept besides the chosen blocks, how many blocks that is and how many tokens.
#[simt::device]
fn tell(
    list: GlobalMut<u32>,
    counts: GlobalMut<u32>,
    kept: GlobalMut<u32>,
    extent: Extent,
    rule: Rule,
    (row, most): (u32, u32),
) {
    let count = extent.kept_blocks();
    let ranked = if extent.ranked() { extent.chosen } else { 0 };
    let mut i = thread::thread_idx_x();
    while i < most {
        if i == 0 || i > ranked {
            let block = if i == 0 { 0 } else { i + (extent.blocks - count) };
            list.atomic_store(
                row as usize * most as usize + i as usize,
                if i < count { block } else { NONE },
            );
        }
        i += CHOSEN_THREADS;
    }
    if thread::thread_idx_x() == 0 {
        counts.store(row as usize, count);
        kept.store(row as usize, extent.kept(rule));
    }
}

const _: () =
    assert!(MOST_LISTED <= 1 << 16 && chosen_bytes::<128>() <= 227 << 10, "shared memory of a block");
