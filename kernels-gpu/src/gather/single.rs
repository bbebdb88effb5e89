//! # Mathematics
//! What [`select`](fn@super::select) chooses, and [`attend`](fn@crate::attention::dense::attend) over it, in
//! one launch: the same scores, the same list, the same split of its tiles, the same order of additions, so
//! the same bits.
//!
//! # Layout
//! As these two have it. `scores` [sequences, lists, tiles, 16] and `maxima` [sequences, lists, 1 + tiles,
//! rounded up to a multiple of four], of KV heads' lists, are 0 between launches, as are `counters`
//! [sequences, lists, row groups] and `departed` [sequences, lists]. `list`, `counts` and `kept` are written;
//! a block table is not: a warp finds its tiles by the list, in shared memory.
//!
//! # Bytes
//! Those of both: 4·D a distant gather-block and KV head of bounds in 16 bits, 4·D a kept token and KV head
//! of keys and values. Scores and maxima, 4 bytes a block and 4 a tile, stay in the L2 cache: written, waited
//! for, read by every thread block of the row (maxima all, scores of the few that the sieve leaves), set to 0
//! by one.
//!
//! # Work split
//! Grid (thread blocks of a list, kv_heads · lists, sequences). First a thread block scores its part of the
//! row's tiles, as `select` does. Then it waits for the maxima of all tiles, ranks **by itself**
//! (`sieve.rs`), and attends to its part of the list, as `attend` does: part p for query heads 8g to 8g + 7
//! is the work of thread block p + g · parts. So nobody writes a list, a flag or a table that others wait
//! for.
//!
//! **A word is its own flag.** No score and no maximum is 0, so a word that is not 0 has arrived. Each is
//! looked at by relaxed atomics until then. No fence stands between a score and whoever reads it.
//!
//! **Nobody must wait for anybody.** A tile whose maximum is missing for [`PATIENCE`] looks is scored by the
//! warp that misses it: the score has the same bits whoever makes it, and is stored once more. So the launch
//! ends wherever its thread blocks run, and in any order: on a GPU that does not hold all of them at once, or
//! while the launch ahead still has multiprocessors. A score that is 0 behind a maximum that is there is on
//! its way: a warp that has begun stored it before.
//!
//! **While others still score.** The list is some µs away, and memory has little to do. Each thread block
//! asks the L2 cache for the best block that it has scored itself, which is among the k best more often than
//! not where k is no less than the thread blocks of a row, and for its share of what is kept in any case. A
//! hint: nothing depends on it.
//!
//! **Who cleans up.** The thread block that is last to attend to a row puts its parts together; when all
//! thread blocks of the row have come that far, or have scored where they have nothing to attend to, the last
//! one sets scores and maxima to 0. What comes late still finds them there.

use super::bounds::TILE_BLOCKS;
use super::choice::{AHEAD, BLOCKS_WANTED, Part, Scoring, SelectShape, WARPS, summary_words};
use super::kept::{Kept, Tiles, Wait};
use super::listing::NONE;
use super::rule::{Extent, Rule};
use super::sieve::{Sieve, maxima_words};
use super::top::{Ranking, ranking};
use crate::attention::dense::{DenseShape, Layout, Target, lay_out, stages};
use crate::attention::{
    BLOCK_TOKENS, Half, PartialRow, Parts, Queries, ROWS, Running, combine, combine_to_part, first_blocks,
    last_to_arrive, part_floats, walk,
};
use glam::UVec4;
use half::{bf16, f16};
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, async_copy, bits, kernel, thread, unroll};

/// Threads of a block of [`step`](fn@step).
pub const STEP_THREADS: u32 = 32 * WARPS;
/// The most distant blocks of a list.
pub const MOST_LISTED: u32 = 2048;
/// Maxima that are kept in shared memory; of longer sequences they are looked at again.
const KEPT_MAXIMA: u32 = 2048;
/// Looks of a warp at a maximum before it makes it, some 45 µs: under full load the thread blocks of a row
/// end their parts several µs apart, and what is made twice is read twice.
pub const PATIENCE: u32 = 64;

/// Thread blocks of a list: all that `splits` parts of each of `row_groups` groups of eight query heads are,
/// or so many as fill the machine, if there is a tile for each.
pub const fn step_blocks(rows: u32, tiles: u32, splits: u32, row_groups: u32) -> u32 {
    let wanted = BLOCKS_WANTED / if rows == 0 { 1 } else { rows };
    let scoring = if wanted < tiles { wanted } else { tiles };
    if scoring > splits * row_groups { scoring } else { splits * row_groups }
}

/// The extents of a launch of [`step`](fn@step).
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct StepShape {
    /// Those of the choice.
    pub select: SelectShape,
    /// Those of the attention, each list a sequence of its own.
    pub attend: DenseShape,
}

/// Shared memory of a block.
#[derive(Clone, Copy)]
struct StepLayout {
    attend: Layout,
    ranking: Ranking,
    /// The largest score of each tile.
    maxima: Shared<u32>,
    /// The chosen blocks, in order.
    chosen: Shared<u32>,
    bytes: u32,
}

const fn layout<const D: usize>() -> StepLayout {
    let mut plan = SharedPlan::new();
    let attend = lay_out::<D>(&mut plan, stages(D as u32));
    let ranking = ranking(&mut plan);
    let maxima = plan.array(KEPT_MAXIMA);
    let chosen = plan.array(MOST_LISTED);
    StepLayout { attend, ranking, maxima, chosen, bytes: plan.bytes() }
}

/// Shared memory of [`step`](fn@step).
pub const fn step_bytes<const D: usize>() -> u32 {
    layout::<D>().bytes
}

/// Ranks the distant gather-blocks of each sequence and KV head and attends to what is kept.
///
/// `R` is the groups of eight query heads of a list. `lengths` \[sequences\] are at most `max_blocks` · 16,
/// and no list has more than [`MOST_LISTED`] distant blocks. `scores`, `maxima`, `departed` and `counters`
/// are 0 before and after. Grid ([`step_blocks`], kv_heads · lists, sequences).
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
pub fn step<E: Half, const D: usize, const R: usize>(
    queries: Global<E>,
    keys: Global<E>,
    values: Global<E>,
    bounds: Global<u32>,
    table: Global<u32>,
    lengths: Global<u32>,
    scores: GlobalMut<u32>,
    maxima: GlobalMut<u32>,
    departed: GlobalMut<u32>,
    list: GlobalMut<u32>,
    counts: GlobalMut<u32>,
    kept: GlobalMut<u32>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    lse: GlobalMut<f32>,
    shape: StepShape,
) {
    let (index, list_of, sequence) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let SelectShape { rule, group, lists, summary, kv_heads, max_blocks, .. } = shape.select;
    let row = sequence * (kv_heads * lists) + list_of;
    let head = bits::div_u32(list_of, lists);
    let words = summary_words(summary, D as u32);
    let of_head = (sequence * kv_heads + head) as usize * shape.select.tiles as usize;
    let from = |tile: u32| (of_head + tile as usize) * words as usize;
    // As in `select`: what the launch ahead has yet to write may be counted in this length, or not.
    let glance = Part::of(lengths.peek(sequence as usize, true), shape.select);
    let mine = warp + WARPS * lane;
    let tile = index * glance.tiles_a_part + mine;
    let there = (lane < AHEAD) & (mine < glance.tiles_a_part) & (tile < glance.tiles);
    let at = from(if there { tile } else { 0 });
    bounds.prefetch(at, 4 * words, there);
    thread::wait_for_previous();

    let Part { extent, tiles, tiles_a_part } = Part::of(lengths.load(sequence as usize), shape.select);
    let scoring_blocks = bits::div_u32(tiles + tiles_a_part - 1, tiles_a_part);
    let Parts { tiles: kept_tiles, tiles_a_split, used } = Parts::of(extent.kept(rule), shape.attend.splits);
    let attending = used * R as u32;
    let blocks = scoring_blocks.max(attending);
    if index >= blocks {
        return;
    }
    let attends = index < attending;
    let layout = layout::<D>();
    let first_key = row as usize * (shape.select.tiles * TILE_BLOCKS) as usize;
    let first_maximum = row as usize * maxima_words(shape.select.tiles) as usize;
    let kept_blocks = Kept {
        table,
        chosen: layout.chosen,
        shift: rule.entries().trailing_zeros(),
        ranked: if extent.ranked() { extent.chosen } else { 0 },
        left_out: extent.blocks - extent.kept_blocks(),
        start: sequence * max_blocks,
        kv_heads,
        head,
    };
    if tiles > 0 {
        let scoring = Scoring {
            queries,
            bounds,
            scores,
            maxima,
            first_query: (row * group) as usize,
            first_word: from(0),
            first_key,
            first_maximum,
            group,
            local: extent.local,
            lane,
            live: true,
        };
        let mut tile = (index * tiles_a_part).min(tiles) + warp;
        let mut end = tiles.min((index + 1) * tiles_a_part);
        let mut wait =
            Wait { maxima, here: layout.maxima, first_maximum, tiles, next: 32 * warp, looks: 0, lane };
        let mut own = true;
        // Its own tiles, then those that nobody else makes.
        'made: loop {
            let seen = if tile < end { scoring.any::<D, R>(summary, tile, end) } else { [0, 0] };
            let best = if own { best_of_block(seen, layout.ranking.warps, warp, lane) } else { 0 };
            loop {
                let looks = attends & (wait.next < tiles);
                let missing = if looks { wait.look() } else { 0 };
                if missing == NONE {
                    if wait.next >= tiles {
                        break 'made;
                    }
                    continue;
                }
                if own {
                    // There is time: memory has little to do until the list is there.
                    kept_blocks.ask::<E, D>(keys, values, best, lane);
                    if warp == WARPS - 1 {
                        kept_blocks.ask_known::<E, D>(keys, values, kept_tiles, [index, blocks, lane]);
                    }
                    own = false;
                }
                if !looks {
                    break 'made;
                }
                wait.looks += 1;
                if wait.looks >= PATIENCE {
                    (tile, end) = (missing, missing + 1);
                    break;
                }
            }
        }
    }
    if !attends {
        if depart(departed, row, 1, blocks, layout.attend.last) {
            clear(scores, first_key, maxima, first_maximum, tiles);
        }
        return;
    }
    if tiles > 0 {
        // All warps' maxima.
        thread::sync_threads();
        let sieve = Sieve {
            layout: layout.ranking,
            keys: scores,
            first: first_key,
            end: extent.local,
            maxima,
            first_maximum,
            tiles,
            live: Some(layout.maxima),
        };
        let first = row as usize * shape.select.most as usize + 1;
        sieve.write(extent.chosen, |place, block| {
            layout.chosen.store(place, block);
            if index == 0 {
                list.store(first + place as usize, block);
            }
        });
        thread::sync_threads();
    }
    if index == 0 {
        tell(list, counts, kept, extent, rule, (row, shape.select.most));
    }

    let (row_group, split) = (bits::div_u32(index, used), bits::rem_u32(index, used));
    let first = split * tiles_a_split;
    let tiles_end = (first + tiles_a_split).min(kept_tiles);
    let length = extent.kept(rule);
    let in_group = row_group * ROWS + (lane >> 2);
    let ring = Tiles::<E, D> {
        layout: layout.attend,
        keys,
        values,
        kept: kept_blocks,
        length,
        warp,
        lane,
        end: tiles_end,
    };
    let ahead = first_blocks(&ring, first + warp);
    let query_row = (row * group + in_group) as usize;
    let q =
        Queries::load::<E, D>(queries, query_row, in_group < group, layout.attend.queries, warp == 0, lane);
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

    // The warps' results take the rings' place: all copies have landed, all tiles are read.
    async_copy::wait::<0>();
    thread::sync_threads();
    let layout = layout.attend;
    running.store_output::<D>(layout.outputs, warp * ROWS * D as u32, lane);
    let sum = running.row_sum();
    if lane & 3 == 0 {
        layout.rows.store(warp * ROWS + (lane >> 2), PartialRow { reference: running.reference, sum });
    }
    thread::sync_threads();

    let target =
        Target { output, lse, rows_wanted: u32::MAX, shape: shape.attend, sequence: row, head: 0, row_group };
    // Where all of the row's thread blocks attend to the same query heads, whoever is last is the last.
    let alone = used == blocks;
    if used <= 1 {
        combine::<D>(layout.rows, layout.outputs, |r, d, merged| target.finish::<D>(r, d, merged));
        if alone {
            clear(scores, first_key, maxima, first_maximum, tiles);
        }
    } else {
        let launch_row = row * R as u32 + row_group;
        let floats = part_floats(D as u32);
        let base = launch_row as usize * shape.attend.splits as usize * floats;
        combine_to_part::<D>(layout.rows, layout.outputs, partials, base + split as usize * floats);
        if !last_to_arrive(counters, launch_row, used, layout.last) {
            return;
        }
        if alone {
            clear(scores, first_key, maxima, first_maximum, tiles);
        }
        let rows = (group - row_group * ROWS).min(ROWS);
        let place = |split: u32| base + split as usize * floats;
        layout.adding.parts::<D>(used, rows, partials.as_const(), place, |r, d, merged| {
            target.finish::<D>(r, d, merged)
        });
    }
    if !alone && tiles > 0 && depart(departed, row, used, blocks, layout.last) {
        clear(scores, first_key, maxima, first_maximum, tiles);
    }
}

/// Of what lanes have seen ([`Scoring::any`]) the best one of the thread block's, in all lanes of the first
/// warp that has it; 0, which is no distant block, in the others. All threads of the block call it.
#[simt::device]
fn best_of_block(seen: [u32; 2], warps: Shared<u32>, warp: u32, lane: u32) -> u32 {
    let most = warp::warp_reduce_max_u32(FULL_MASK, seen[0]);
    let block = warp::warp_reduce_max_u32(FULL_MASK, if seen[0] == most { seen[1] } else { 0 });
    if lane == 0 {
        warps.store(warp, most);
    }
    thread::sync_threads();
    let mut wins = true;
    unroll!(for w in 0..8 {
        let other = warps.load(w as u32);
        wins &= other < most || other == most && w as u32 >= warp;
    });
    if wins { block } else { 0 }
}

/// Says that `count` thread blocks are done with a row's scores, and whether all `expected` are, that many at
/// the end of the row's launch. `departed` is 0 before the first and after the last.
#[simt::device]
fn depart(departed: GlobalMut<u32>, row: u32, count: u32, expected: u32, last: Shared<u32>) -> bool {
    thread::sync_threads();
    if thread::thread_idx_x() == 0 {
        thread::device_fence();
        let all = departed.atomic_add(row as usize, count) + count == expected;
        if all {
            thread::device_fence();
            departed.atomic_exchange(row as usize, 0);
        }
        last.store(0, all as u32);
    }
    thread::sync_threads();
    last.load(0) != 0
}

/// Sets a row's scores and maxima to 0, for the next launch.
#[simt::device]
fn clear(scores: GlobalMut<u32>, first_key: usize, maxima: GlobalMut<u32>, first_maximum: usize, tiles: u32) {
    let mut i = thread::thread_idx_x();
    while i < tiles * (TILE_BLOCKS / 4) {
        scores.store_vector(first_key + 4 * i as usize, UVec4::ZERO);
        if i < tiles {
            maxima.store(first_maximum + 1 + i as usize, 0);
        }
        i += STEP_THREADS;
    }
}

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
            list.store(row as usize * most as usize + i as usize, if i < count { block } else { NONE });
        }
        i += STEP_THREADS;
    }
    if thread::thread_idx_x() == 0 {
        counts.store(row as usize, count);
        kept.store(row as usize, extent.kept(rule));
    }
}

const _: () = assert!(MOST_LISTED <= 1 << 16 && step_bytes::<128>() <= 227 << 10, "shared memory of a block");
