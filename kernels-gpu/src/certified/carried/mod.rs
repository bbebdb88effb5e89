//! # Mathematics
//! One pass over everything: the blocks of a list, which an earlier step has left, from their originals, and
//! those that turn out to weigh ([`sight`]), all others in their quantized form, the trailing block from what
//! it has. With keys K' and values V' of either kind,
//!
//! ```text
//! s_t = q_r·K'_t / √D      p_t = 2^(s_t·log2 e − reference)      o_r = Σ p_t V'_t / Σ p_t
//! ```
//!
//! and with every weight, what bounds the error that it brings: docs/certificate.md, (1b), (1c), (1d),
//! (3), (7), and, with a risk, (9). Nothing is taken out again, so the weights of the certificate are
//! those of the output. What a list has in it decides how large the bound is, never whether it holds: it
//! may be any steps old, and of another sequence.
//!
//! # Layout
//! As in [`attend`](fn@super::attend) and [`replace`](fn@super::replace). `lists` and `entries` as
//! [`mark`](fn@super::mark) leaves them; rows of a KV head share what is promoted. `promoted` [sequences ·
//! kv_heads · row groups]. `gathered` [the same, splits, 8] of [`Gathered`](gather::Gathered).
//!
//! # Bytes
//! 32·D a block and KV head, and 48 where something is certified, read once; of a listed one, or one on
//! sight, the originals, 32·D each of keys and values, besides. In a step that notes blocks, 16 bytes a block
//! and query head are written, for the next list.
//!
//! # Work split
//! Grid (splits, kv_heads · row groups, sequences), a block of eight warps, twelve at head_dim 64, with a
//! ring of tiles each; then entries of the list go round all warps of a row of blocks,
//! the trailing block last. The block of a row that arrives last adds the splits up.
//!
//! # Rows that are passed over again
//! Where a second pass follows, the first one notes blocks in every step. Rows of blocks with a head over
//! budget then get a list of the step's own masses, by [`weigh`](fn@super::weigh) and
//! [`mark`](fn@super::mark), and this kernel again, which leaves all others as they are.
//!
//! # Rows that are left to the dense rung
//! Where the first step by a new list, in its second pass if there is one, finds a head over its budget, the
//! dense rung alone computes the heads of its row of blocks for some renewals: it reads the originals of the
//! row for one head as for eight. Then the row is tried again; where that finds the same, the next wait is
//! twice as long, up to [`Thresholds::retry`] renewals. Of a row that waits this pass reads the annotations,
//! for certificates.

mod ahead;
mod claim;
mod comparing;
pub mod exact;
mod finish;
pub mod gather;
pub mod judge;
mod layout;
pub mod likely;
mod list;
mod promoted;
pub mod sight;
pub mod waiting;

use super::admit::{Found, Scratch};
use super::layout::{Annotation, Layout, TileLayout};
use super::marking::{Entry, ListHead};
use super::pass::{Record, StepShape, Tiles, pass_share, stages, warps_of};
use super::policy::{Certificate, Thresholds};
use super::promote::{largest_norms, original_scores};
use super::query::{LOG2_E, Query};
use super::tile::Tile;
use crate::attention::{
    BLOCK_TOKENS, Glance, GridPlace, Half, KeyTile, Pace, PartialRow, ROWS, Running, ValueTile, Values,
    combine_to_part, combine_to_part_of, first_blocks, last_to_arrive, part_floats, tiles_of, walk,
};
use ahead::look_ahead;
pub use claim::{Bare, Certified, Claim, LeanBare, LeanCertified, carried_warps};
pub use comparing::{LOOKED, canary};
use core::cell::Cell;
use core::marker::PhantomData;
use exact::ExactRow;
use finish::Finish;
use gather::Moments;
use glam::UVec4;
use half::{bf16, f16};
pub use layout::{CarriedLayout, carried_layout};
use list::{List, Listed, Lookup};
pub use promoted::{MAX_RETRY, Promoted, Turn, first_recent, mode};
use sight::Sight;
use simt::warp::FULL_MASK;
use simt::{Global, GlobalMut, async_copy, bits, kernel, thread, unroll, warp};
use waiting::{Visited, Waiting};

/// A step of attention by a list from an earlier step: output, LSE, certificate, and which rows want the
/// dense rung.
///
/// `output` f32 [sequences, query heads, D]; `lse` and `certificates` [sequences, query heads]; `dense_rows`
/// [sequences · kv_heads · row groups], bit g for row g, and of rows that wait
/// [`MANY`](crate::attention::dense::DenseShape::MANY); `counters` twice that shape and one for [`Pace`]
/// between, 0 before and after. `log_sums` [sequences, query heads] of [`sight::log_sum`]. `mode`: bits of
/// [`mode`], none of them where nothing is [claimed](Claim).
#[kernel(
    system = certified,
    instances(
        (f16, 64, Bare) => 384, (f16, 128, Bare), (bf16, 64, Bare) => 384, (bf16, 128, Bare),
        (f16, 64, Certified) => 384, (f16, 128, Certified),
        (bf16, 64, Certified) => 384, (bf16, 128, Certified),
        (f16, 64, LeanBare) => 384, (f16, 128, LeanBare), (bf16, 64, LeanBare) => 384, (bf16, 128, LeanBare),
        (f16, 64, LeanCertified) => 384, (f16, 128, LeanCertified),
        (bf16, 64, LeanCertified) => 384, (bf16, 128, LeanCertified)
    ),
    max_threads = 256,
    min_blocks = 1,
    overlaps = by_hand
)]
pub fn carry<E: Half, const D: usize, C: Claim>(
    queries: Global<E>,
    tiles: Global<u32>,
    annotations: Global<Annotation>,
    table: Global<u32>,
    lengths: Global<u32>,
    keys: Global<E>,
    values: Global<E>,
    near: GlobalMut<E>,
    directory: GlobalMut<u64>,
    lists: Global<ListHead>,
    entries: Global<Entry>,
    promoted: GlobalMut<Promoted>,
    records: GlobalMut<Record>,
    partials: GlobalMut<f32>,
    gathered: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    lse: GlobalMut<f32>,
    certificates: GlobalMut<Certificate>,
    dense_rows: GlobalMut<u32>,
    log_sums: GlobalMut<f32>,
    shape: StepShape,
    thresholds: Thresholds,
    scratch: Scratch,
    mode: u32,
) {
    let StepShape { max_blocks, pool_blocks, .. } = shape;
    let certify = C::CERTIFIES;
    let (thresholds, mode) = C::narrowed(thresholds, mode);
    let glance = Glance { table, lengths, max_blocks, pool_blocks, wanted: !certify };
    look_ahead::<D, C>(tiles, glance, shape);
    thread::wait_for_previous();
    thread::let_next_start();
    let GridPlace { split, sequence, head, row_group, launch_row } = GridPlace::of(shape.row_groups());
    let length = lengths.load(sequence as usize);
    let blocks = length / BLOCK_TOKENS;
    let (a_split, used) = pass_share(blocks, shape.splits);
    // The count lies behind those of the rows.
    let progress = thread::grid_dim_y() * thread::grid_dim_z();
    if split >= used {
        Pace::none(counters, progress, shape.paced != 0);
        return;
    }
    // Only those ask that the last one waits for, which writes what they ask.
    if Promoted::passed_over(promoted.as_const(), dense_rows.as_const(), launch_row, mode) {
        return;
    }
    let first = split * a_split;
    let end = (first + a_split).min(blocks);

    let layout = carried_layout::<D, C>();
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let in_group = row_group * ROWS + (lane >> 2);
    let present = in_group < shape.group;
    let first_row = (sequence * shape.kv_heads + head) * shape.group + row_group * ROWS;
    let query_row = (first_row + (lane >> 2)) as usize;
    let again = mode & mode::AGAIN != 0;
    let own = Tiles::<f16, D, C> {
        layout: layout.pass,
        kind: PhantomData,
        tiles,
        annotations,
        table,
        shape,
        sequence,
        head,
        warp,
        lane,
        end,
        annotated: certify,
    };
    let ahead = first_blocks(&own, first + warp);
    let listed = mode & mode::LISTED != 0;
    let mut made = blocks;
    let mut turn = Turn::NONE;
    if listed {
        (made, turn) = Promoted::turn(promoted.as_const(), launch_row, mode);
    }
    let recent = if certify { first_recent(blocks, made) } else { blocks };
    let query = Query::load::<E, D>(queries, query_row, present, shape.softmax_scale, lane);
    if turn.is_exact() && length != 0 {
        let exact = ExactRow {
            layout,
            annotations,
            table,
            keys,
            values,
            near: near.as_const(),
            scratch,
            shape,
            launch_row,
            first_row,
            present,
            sequence,
            head,
            length,
            blocks: [first, end],
            split: [split, used],
            why: turn.rung_and_reason(),
            lane,
            warp,
        };
        let last = exact.finish::<D>(&query, gathered, counters, certificates, dense_rows);
        if last && thread::thread_idx_x() == 0 {
            Promoted::note(promoted, launch_row, [0; 2], turn.after(false, thresholds.retry), true, false);
        }
        return;
    }
    let to_log2 = query.scale * LOG2_E;
    let noting = mode & (mode::RENEWS | mode::FOLLOWED) != 0;
    let notes = Notes { records, shape, first: shape.record(first_row, 0), writes: noting && present };

    let pass = layout.pass;
    let list = List {
        layout,
        lists,
        entries,
        keys,
        values,
        near,
        directory,
        table,
        shape,
        scratch,
        launch_row,
        sequence,
        head,
        first,
        end,
        blocks,
        recent,
        // The warp's place among those of all splits.
        place: split * warps_of::<C>(D as u32) + warp,
        lane,
        warp,
    };
    let pace = Pace::new(counters, progress, shape.paced != 0, tiles_of(&own, first + warp), lane);
    let ring = Listed {
        tiles: own,
        read: Cell::new(false),
        skipped: Cell::new(0),
        list,
        pace,
        exists: listed,
        length,
    };
    let mut sight = Sight::new(layout.sighted);
    let mut running = Running::new();
    let mut waiting = Waiting::new(layout.gathered, layout.waiting);
    if certify {
        waiting.begin(running.reference);
        let looks = listed && !again && present;
        sight.begin(log_sums.as_const(), query_row, looks, thresholds.sight, lane);
    }
    walk(&ring, first + warp, ahead, |block, stage| {
        if ring.skipped.get() >> stage & 1 != 0 {
            return;
        }
        let tile = ring.tiles.tile(stage);
        // Ahead of the scores, of which they want nothing: what the tensor cores take their time for hides
        // behind them.
        let values = tile.values(lane);
        let mut operands = [[[0u32; 2]; 8]; 2];
        unroll!(for s in 0..(D / 64), at_most 2 {
            operands[s] = Values::<D>::operands(values, s as u32, lane);
        });
        let (products, sums) = tile.products_and_sums(&query, certify, lane);
        let scores = products.map(|pair| pair.map(|s| s * to_log2));
        if certify && sight.takes(block, scores) {
            return;
        }
        let (p, sum) = running.weigh::<D>(scores);
        if certify {
            let (bounds, sizes) = ring.tiles.annotation_of_lane(stage, lane);
            let reference = running.reference;
            let visited =
                Visited { index: block, exact: [false; 2], trailing: false, sums, reference, bounds };
            waiting.leave(sum, Moments::of_weights(p, sizes), visited, lane);
        }
        running.accumulate_operands::<f16, D>(p, operands);
        // Behind the multiplications, whose operands take the registers.
        if certify && waiting.is_full() {
            let lane = bits::renewed(warp::lane_id());
            waiting.add_up::<D>(&query, running.reference, thresholds, &notes, lane);
        }
    });
    let done = ring.pace.done();
    async_copy::wait::<0>();
    // What was looked up ahead is there for all lanes.
    warp::sync_warp(FULL_MASK);

    let count = ring.entries();
    let (mut e, mut sighted) = (list.place, 0);
    if certify && sight.count != 0 {
        sight.tell(counters, progress + 1 + launch_row, lane);
        sight.look_up::<E, D>(&list);
    }
    while e < count || certify && sighted < sight.count {
        let trailing = e < count && (!certify || ring.trailing() && e + 1 == count);
        let look = if trailing {
            list.look_trailing()
        } else if certify && e >= count {
            sighted += 1;
            sight.load(sighted - 1, &list)
        } else if e >= ring.listed() {
            list.look_recent(e - ring.listed())
        } else if e == list.place {
            Lookup::load(layout.ahead, warp)
        } else {
            list.look(e)
        };
        e += used * warps_of::<C>(D as u32);
        let Lookup { entry, block, found } = look;
        // Of a sequence that was longer.
        if !trailing && entry.index >= blocks {
            continue;
        }
        let index = entry.index;
        let pair = block * shape.kv_heads + head;
        let elements = BLOCK_TOKENS as usize * D;
        let tokens = if trailing { length % BLOCK_TOKENS } else { BLOCK_TOKENS };
        // The tiles of the warp's own ring are read.
        warp::sync_warp(FULL_MASK);
        // The addresses in three tiles would take more registers than there are.
        let start = bits::renewed(warp * stages::<C>(D as u32) * Tile::<f16, D>::WORDS);
        let lane = bits::renewed(lane);
        let key_tile = KeyTile::<D>::at(pass.ring, start);
        let value_tile = ValueTile::<D>::at(pass.ring, start + Tile::<f16, D>::WORDS);
        let [wants_keys, wants_values] = entry.wants();
        // Of the three no more than two are there.
        let third = if stages::<C>(D as u32) > 2 { 2 } else { wants_keys as u32 };
        let tile = Tile::<f16, D>::at(pass.ring, start + third * Tile::<f16, D>::WORDS);
        let source = |found: Found, originals: Global<E>| match found.tile {
            Scratch::EMPTY => (originals, pair as usize * elements),
            tile => (near.as_const(), tile as usize * elements),
        };
        if wants_keys {
            let (from, at) = source(found[0], keys);
            key_tile.copy(from, at, tokens, lane);
        }
        if wants_values {
            let (from, at) = source(found[1], values);
            value_tile.copy(from, at, tokens, lane);
        }
        if !(wants_keys && wants_values) {
            tile.copy(tiles, pair as usize * TileLayout::new(D as u32, Layout::Compact).bytes as usize, lane);
        }
        if !trailing {
            ring.tiles.copy_annotation(pair, 0);
        }
        async_copy::commit();
        async_copy::wait::<0>();
        warp::sync_warp(FULL_MASK);
        if wants_keys {
            found[0].bring(directory, pair, elements, lane, |at| key_tile.store(near, at, lane));
        }
        if wants_values {
            found[1].bring(directory, pair, elements, lane, |at| value_tile.store(near, at, lane));
        }
        let (mut scores, sums) = if wants_keys {
            (original_scores::<E, D>(&query, key_tile, lane), [0.0; 2])
        } else {
            tile.products_and_sums(&query, true, lane)
        };
        unroll!(for j in 0..2 {
            unroll!(for i in 0..2 {
                let token = 8 * j as u32 + 2 * (lane & 3) + i as u32;
                let scaled = scores[j][i] * to_log2;
                scores[j][i] = if token < tokens { scaled } else { f32::NEG_INFINITY };
            });
        });
        let (p, sum) = running.weigh::<D>(scores);
        if certify {
            let (mut bounds, mut sizes) = (UVec4::ZERO, [0.0; 4]);
            if trailing {
                let [kappa, nu] = largest_norms::<E, D>(key_tile, value_tile, lane);
                if lane & 1 == 0 {
                    bounds = bytemuck::cast([0.0, nu, kappa, 0.0]);
                }
            } else {
                (bounds, sizes) = ring.tiles.annotation_of_lane(0, lane);
            }
            let (exact, reference) = ([wants_keys, wants_values], running.reference);
            let visited = Visited { index, exact, trailing, sums, reference, bounds };
            waiting.leave(sum, Moments::of_weights(p, sizes), visited, lane);
        }
        if wants_values {
            running.accumulate_weights::<E, D>(p, value_tile, lane);
        } else {
            running.accumulate_weights::<f16, D>(p, tile.values(lane), lane);
        }
        if certify && waiting.is_full() {
            waiting.add_up::<D>(&query, running.reference, thresholds, &notes, lane);
        }
    }
    if certify && waiting.any() {
        waiting.add_up::<D>(&query, running.reference, thresholds, &notes, lane);
    }

    thread::sync_threads();
    running.store_output::<D>(pass.outputs, warp * ROWS * D as u32, lane);
    let sum = running.row_sum();
    if lane & 3 == 0 {
        pass.rows.store(warp * ROWS + (lane >> 2), PartialRow { reference: running.reference, sum });
    }
    thread::sync_threads();

    let floats = part_floats(D as u32);
    let base = (shape.first_partial(launch_row) + split) as usize * floats;
    if warps_of::<C>(D as u32) == 12 {
        combine_to_part_of::<D, 12>(pass.rows, pass.outputs, partials, base);
    } else {
        combine_to_part::<D>(pass.rows, pass.outputs, partials, base);
    }
    let finish = Finish {
        layout,
        launch_row,
        rows: (shape.group - row_group * ROWS).min(ROWS),
        first_row,
        length,
        used,
        exists: listed,
        listed: count - ring.trailing() as u32,
        log_sums,
        shape,
        thresholds,
    };
    if certify {
        finish.gather_warps::<D>(gathered, split);
    }
    ring.pace.close(done);
    if !last_to_arrive(counters, launch_row, used, layout.last) {
        return;
    }
    if certify {
        finish.ask(gathered.as_const());
        if listed && thread::thread_idx_x() == 32 {
            finish.add_sighted(counters, progress + 1 + launch_row);
        }
    }
    finish.output::<D, C>(partials.as_const(), output);
    if certify {
        finish.gather_splits(gathered.as_const());
    }
    thread::sync_threads();
    if warp == 0 {
        let over = finish.certificates::<E, D>(&query, present, lane, lse, certificates, dense_rows);
        if lane == 0 && listed {
            let tiles = [0, 1].map(|kind| layout.promoted.load(kind));
            Promoted::note(promoted, launch_row, tiles, turn.after(over, thresholds.retry), false, again);
        }
    }
}

/// Where blocks are noted.
#[derive(Clone, Copy)]
struct Notes {
    records: GlobalMut<Record>,
    shape: StepShape,
    /// The record of block 0 and the first of the eight rows.
    first: usize,
    /// Whether this lane's row is noted.
    writes: bool,
}

impl Notes {
    /// Notes a block of the lane's row.
    #[simt::device]
    fn store(&self, block: u32, lane: u32, record: Record) {
        let at = self.first + block as usize * self.shape.group as usize + (lane >> 2) as usize;
        self.records.store(at, record);
    }
}
