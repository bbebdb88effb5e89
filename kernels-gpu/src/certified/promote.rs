//! # Mathematics
//! The pass has attended to everything in its quantized form. For each listed block the share of the rows
//! that want it is replaced: with p^ and V^ quantized and p and V from the originals,
//!
//! ```text
//! N += Σ p·V − Σ p^·V^       P += Σ p − Σ p^        (keys and values promoted)
//! N += Σ p·V^ − Σ p^·V^      P += Σ p − Σ p^        (keys alone)
//! N += Σ p^·V − Σ p^·V^                             (values alone)
//! N += Σ p·V                 P += Σ p               (the trailing block, which has no quantized form)
//! ```
//!
//! What is subtracted is computed as the pass computed it, relative to another power of two: so it cancels
//! but for the rounding of the sums. What multiplies the same V^ is subtracted first: p − p^. Then o = N/P,
//! and the certificate from the sums of `weigh`: docs/certificate.md, (1b), (1c), (1d), (3) and (7).
//!
//! # Layout
//! The originals are pools of 16 · D elements a block and KV head, keys and values apart, and may be host
//! memory. What is near, and how a block gets there on its way through this kernel: [`admit`](super::admit).
//!
//! # Bytes
//! A listed block and KV head: 32·D + 32 quantized (36·D + 32 in the paper's layout), 32·D each of keys and
//! values; 12,320 (12,832) at head_dim 128.
//!
//! # Work split
//! Grid (replacers, kv_heads · row groups, sequences), eight warps a block; the entries of all parts' lists
//! go round the warps. The block that arrives last adds up the pass and all replacements and writes output
//! and certificate.

use super::admit::{Found, Scratch, find, order};
use super::finish::{Ends, Finish};
use super::layout::TileLayout;
use super::lists::{STARTS, find_entry, lay_out_lists};
use super::marking::{Entry, ListHead};
use super::metadata::KeyMetadata;
use super::pass::StepShape;
use super::policy::{Certificate, Thresholds};
use super::quantizer::{bound_or_infinity, norm_bound};
use super::query::{LOG2_E, Query};
use super::sums::Taken;
use super::tile::Tile;
use super::weighing::Weighed;
use crate::attention::{
    Adding, BLOCK_TOKENS, GridPlace, Half, KeyTile, MAX_PARTS, PartialRow, ROWS, Running, ValueTile,
    combine_to_part, combined_rows, last_to_arrive, part_floats, warps,
};
use half::{bf16, f16};
use simt::math::{fma, max};
use simt::warp::FULL_MASK;
use simt::{Global, GlobalMut, Shared, SharedPlan, async_copy, bits, kernel, thread, unroll, warp};

/// Shared memory of a block.
#[derive(Clone, Copy)]
pub struct PromoteLayout {
    /// A key tile, a value tile and a quantized tile for each warp; afterwards their results.
    tiles: Shared<u32>,
    outputs: Shared<f32>,
    /// Parts are added up in the tiles' memory.
    ends: Ends,
    /// Where each part's list starts among all entries, and how many there are.
    starts: Shared<u32>,
    rows: Shared<PartialRow>,
    last: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Words of a warp's tiles.
const fn warp_words<M: KeyMetadata, const D: usize>() -> u32 {
    KeyTile::<D>::WORDS + ValueTile::<D>::WORDS + Tile::<M, D>::WORDS
}

/// Lays out the shared memory of an instance.
pub const fn promote_layout<M: KeyMetadata, const D: usize>() -> PromoteLayout {
    let mut plan = SharedPlan::new();
    let tiles = plan.array(warps(D as u32) * warp_words::<M, D>());
    let mut over = SharedPlan::new();
    let outputs = over.array(warps(D as u32) * ROWS * D as u32);
    let adding = Adding::over::<D>(&mut SharedPlan::new(), 2 * MAX_PARTS, plan.bytes());
    let starts = plan.array(STARTS);
    let rows = plan.array(combined_rows(warps(D as u32)));
    let squares = plan.array(ROWS * 32);
    let totals = plan.array(ROWS);
    let last = plan.array(1);
    let ends = Ends { adding, squares, totals };
    PromoteLayout { tiles, outputs, ends, starts, rows, last, bytes: plan.bytes() }
}

/// Replaces the shares of the listed blocks, and finishes: output, LSE, certificate, and which rows want the
/// dense rung.
///
/// `output` f32 [sequences, query heads, D]; `lse` and `certificates` [sequences, query heads]; `dense_rows`
/// [sequences · kv_heads · row groups], bit g for row g; `lists`, `entries` and `taken` as `mark` leaves
/// them; `norms` [sequences · kv_heads · row groups, 2], of the trailing blocks; `partials` those of the
/// pass, with room for this kernel's; `counters` [sequences · kv_heads · row groups], 0 before and after.
#[kernel(
    system = certified,
    instances(
        (f16, 64, f16), (f16, 128, f16), (bf16, 64, f16), (bf16, 128, f16),
        (f16, 64, f32), (f16, 128, f32), (bf16, 64, f32), (bf16, 128, f32),
    ),
    max_threads = 256,
    min_blocks = 1,
    overlaps = in_turn
)]
pub fn replace<E: Half, const D: usize, M: KeyMetadata>(
    queries: Global<E>,
    tiles: Global<u32>,
    table: Global<u32>,
    lengths: Global<u32>,
    keys: Global<E>,
    values: Global<E>,
    near: GlobalMut<E>,
    directory: GlobalMut<u64>,
    lists: Global<ListHead>,
    entries: Global<Entry>,
    weighed: Global<Weighed>,
    taken: Global<Taken>,
    norms: GlobalMut<f32>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    lse: GlobalMut<f32>,
    certificates: GlobalMut<Certificate>,
    dense_rows: GlobalMut<u32>,
    shape: StepShape,
    thresholds: Thresholds,
    scratch: Scratch,
) {
    let GridPlace { split: replacer, sequence, head, row_group, launch_row } =
        GridPlace::of(shape.row_groups());
    let length = lengths.load(sequence as usize);
    let layout = promote_layout::<M, D>();
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let in_group = row_group * ROWS + (lane >> 2);
    let present = in_group < shape.group;
    let first_row = (sequence * shape.kv_heads + head) * shape.group + row_group * ROWS;
    let query_row = (first_row + (lane >> 2)) as usize;
    let query = Query::load::<E, D>(queries, query_row, present, shape.softmax_scale, lane);
    let to_log2 = query.scale * LOG2_E;
    let listed = if thresholds.certify != 0 {
        lay_out_lists(layout.starts, lists, launch_row, shape, lane, warp)
    } else {
        0
    };
    // The trailing block comes last.
    let count = listed + !length.is_multiple_of(BLOCK_TOKENS) as u32;
    let used = count.div_ceil(warps(D as u32)).min(shape.replacers).max(1);
    if replacer >= used {
        return;
    }

    let mut running = Running::new();
    let mut e = replacer * warps(D as u32) + warp;
    while e < count {
        // The addresses in three tiles would take more registers than there are.
        let start = bits::renewed(warp * warp_words::<M, D>());
        let lane = bits::renewed(lane);
        let key_tile = KeyTile::<D>::at(layout.tiles, start);
        let value_tile = ValueTile::<D>::at(layout.tiles, start + KeyTile::<D>::WORDS);
        let tile = Tile::<M, D>::at(layout.tiles, start + KeyTile::<D>::WORDS + ValueTile::<D>::WORDS);
        let trailing = e == listed;
        let entry = if trailing {
            Entry { index: length / BLOCK_TOKENS, rows: u32::MAX }
        } else {
            find_entry(layout.starts, entries, launch_row, shape, e, lane)
        };
        let index = entry.index;
        let block = table.load_readonly((sequence * shape.max_blocks + index) as usize);
        let pair = block * shape.kv_heads + head;
        let elements = BLOCK_TOKENS as usize * D;
        let tokens = if trailing { length % BLOCK_TOKENS } else { BLOCK_TOKENS };
        // The last round's tiles are read.
        warp::sync_warp(FULL_MASK);
        let [wants_keys, wants_values] = entry.wants();
        let found = if trailing {
            // Fresh blocks are the sequences', in their order.
            let fresh = sequence * shape.kv_heads + head;
            [0, 1].map(|kind| Found::fresh(scratch, kind, fresh))
        } else {
            find(directory, scratch, pair, order(launch_row, shape.max_blocks, index), lane)
        };
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
        if !trailing {
            tile.copy(tiles, pair as usize * TileLayout::new(D as u32, M::LAYOUT).bytes as usize, lane);
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

        let [row_key, row_value] = entry.row_wants(lane >> 2);
        let exact = if wants_keys { original_scores::<E, D>(&query, key_tile, lane) } else { [[0.0; 2]; 2] };
        let quantized = if trailing { exact } else { tile.products(&query, lane).0 };
        if trailing {
            let largest = largest_norms::<E, D>(key_tile, value_tile, lane);
            if lane == 0 {
                norms.store(2 * launch_row as usize, largest[0]);
                norms.store(2 * launch_row as usize + 1, largest[1]);
            }
        }
        // What is used and what was: nothing of either where the row wants nothing.
        let (wanted, old) = (row_key || row_value, (row_key || row_value) && !trailing);
        let (mut new_scores, mut old_scores) = ([f32::NEG_INFINITY; 4], [f32::NEG_INFINITY; 4]);
        unroll!(for i in 0..4 {
            let token = 8 * (i as u32 / 2) + 2 * (lane & 3) + (i as u32 & 1);
            if wanted && token < tokens {
                let new = if row_key { exact[i / 2][i % 2] } else { quantized[i / 2][i % 2] };
                new_scores[i] = new * to_log2;
            }
            if old {
                old_scores[i] = quantized[i / 2][i % 2] * to_log2;
            }
        });
        running.raise::<D, 2>([new_scores, old_scores]);
        let (new, old) = (running.weights(new_scores), running.weights(old_scores));
        // By the original values, and by the quantized ones.
        let (mut by_original, mut by_quantized) = ([0f32; 4], [0f32; 4]);
        unroll!(for i in 0..4 {
            by_original[i] = if row_value { new[i] } else { 0.0 };
            by_quantized[i] = (new[i] - by_original[i]) - old[i];
            running.sum += new[i] - old[i];
        });
        if wants_values {
            running.accumulate_weights::<E, D>(by_original, value_tile, lane);
        }
        if !trailing {
            running.accumulate_weights::<f16, D>(by_quantized, tile.values(lane), lane);
        }
        e += used * warps(D as u32);
    }

    thread::sync_threads();
    running.store_output::<D>(layout.outputs, warp * ROWS * D as u32, lane);
    let sum = running.row_sum();
    if lane & 3 == 0 {
        layout.rows.store(warp * ROWS + (lane >> 2), PartialRow { reference: running.reference, sum });
    }
    thread::sync_threads();
    let floats = part_floats(D as u32);
    let own = (shape.first_partial(launch_row) + shape.splits + replacer) as usize * floats;
    combine_to_part::<D>(layout.rows, layout.outputs, partials, own);
    if !last_to_arrive(counters, launch_row, used, layout.last) {
        return;
    }
    let finish = Finish {
        ends: layout.ends,
        partials: partials.as_const(),
        weighed,
        taken,
        norms: norms.as_const(),
        launch_row,
        first_row,
        rows: (shape.group - row_group * ROWS).min(ROWS),
        length,
        listed,
        used,
        shape,
        thresholds,
    };
    finish.output::<D>(output);
    thread::sync_threads();
    if warp == 0 {
        finish.certificates::<E, D>(&query, present, lane, lse, certificates, dense_rows);
    }
}

/// Bounds of the norms of a block's keys and of its values: a warp's work, the same in each lane.
#[simt::device]
pub(super) fn largest_norms<E: Half, const D: usize>(
    keys: KeyTile<D>,
    values: ValueTile<D>,
    lane: u32,
) -> [f32; 2] {
    [0, 1].map(|kind| {
        let mut largest = 0f32;
        if lane < BLOCK_TOKENS {
            let mut squares = 0f32;
            for chunk in 0..D as u32 / 8 {
                let words = if kind == 0 { keys.chunk(lane, chunk) } else { values.chunk(lane, chunk) };
                unroll!(for i in 0..4 {
                    let [a, b] = E::unpack(words[i]);
                    squares = fma(b, b, fma(a, a, squares));
                });
            }
            // Not a number would get lost in the maximum.
            largest = bound_or_infinity(norm_bound(squares));
        }
        unroll!(for i in 0..5 {
            largest = max(largest, warp::warp_shuffle_xor(FULL_MASK, largest, 1 << i, 32));
        });
        largest
    })
}

/// Products of the normalised query with original keys: `[tokens 8j + 2q, 8j + 2q + 1]` of row `g`.
#[simt::device]
pub(super) fn original_scores<E: Half, const D: usize>(
    query: &Query,
    keys: KeyTile<D>,
    lane: u32,
) -> [[f32; 2]; 2] {
    let (g, q) = (lane >> 2, lane & 3);
    let mut c = [[0f32; 4]; 2];
    unroll!(for s in 0..(D / 64), at_most 4 {
        unroll!(for h in 0..2 {
            // The query's chunk of 16 dimensions is two of the keys'.
            let chunk = 2 * (4 * s as u32 + q) + h as u32;
            unroll!(for j in 0..2 {
                let k = keys.chunk(8 * j as u32 + g, chunk);
                unroll!(for i in 0..2 {
                    let pair = 8 * s + 4 * h + 2 * i;
                    let (a, b) = (query.operand::<E>(pair), query.operand::<E>(pair + 1));
                    c[j] = E::multiply([a, 0, b, 0], [k[2 * i], k[2 * i + 1]], c[j]);
                });
            });
        });
    });
    [[c[0][0], c[0][1]], [c[1][0], c[1][1]]]
}
