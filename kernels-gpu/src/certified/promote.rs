//! # Mathematics
//! The pass has attended to everything in its quantized form. For each listed block the share of the rows that want it is
//! replaced: with p^ and V^ quantized and p and V from the originals,
//!
//! ```text
//! N += Σ p·V − Σ p^·V^       P += Σ p − Σ p^        (keys and values promoted)
//! N += Σ p·V^ − Σ p^·V^      P += Σ p − Σ p^        (keys alone)
//! N += Σ p^·V − Σ p^·V^                             (values alone)
//! N += Σ p·V                 P += Σ p               (the trailing block, which has no quantized form)
//! ```
//!
//! What is subtracted is computed as the pass computed it, relative to another power of two: so it cancels but for the
//! rounding of the sums. Then o = N/P, and the certificate from the sums of `select`: docs/certificate.md, (1a), (1b), (3)
//! and (7).
//!
//! # Layout
//! The originals are pools of 16 · D elements a block and KV head, keys and values apart, and may be host memory. What is
//! near, and how a block gets there on its way through this kernel: [`admit`](super::admit).
//!
//! # Bytes
//! A listed block and KV head: 32·D + 16 quantized, 32·D each of keys and values; 12,304 at head_dim 128.
//!
//! # Work split
//! Grid (parts, kv_heads · row groups, sequences), eight warps a block; the entries of a list go round the warps. The block
//! that arrives last adds everything up and writes output and certificate.

use super::admit::{Found, Scratch, admit, find};
use super::judge::{Chain, Judge};
use super::layout::TileLayout;
use super::pass::StepShape;
use super::policy::{Certificate, Thresholds, rung};
use super::quantizer::{bound_or_infinity, norm_bound};
use super::query::{LOG2_E, Query};
use super::selection::{Entry, RowSums};
use super::tile::Tile;
use crate::attention::{
    BLOCK_TOKENS, Half, KeyTile, MAX_PARTS, Merged, PartialRow, ROWS, Running, ValueTile, combine,
    combine_parts, last_to_arrive, part_floats, warps,
};
use glam::Vec4;
use half::{bf16, f16};
use simt::math::{canonical_nan, fma, log2, max};
use simt::warp::FULL_MASK;
use simt::{Global, GlobalMut, Shared, SharedPlan, async_copy, bits, kernel, thread, unroll, warp};

/// Shared memory of a block.
#[derive(Clone, Copy)]
pub struct PromoteLayout {
    /// A key tile, a value tile and a quantized tile for each warp; afterwards their results.
    tiles: Shared<u32>,
    outputs: Shared<f32>,
    /// The tiles' memory again: references and sums of all parts, [parts, 8].
    staged: Shared<PartialRow>,
    rows: Shared<PartialRow>,
    /// ‖N‖² of the rows, [8, 32].
    squares: Shared<f32>,
    totals: Shared<PartialRow>,
    last: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Words of a warp's tiles.
const fn warp_words<const D: usize>() -> u32 {
    KeyTile::<D>::WORDS + ValueTile::<D>::WORDS + Tile::<D>::WORDS
}

/// Lays out the shared memory of an instance.
pub const fn promote_layout<const D: usize>() -> PromoteLayout {
    let mut plan = SharedPlan::new();
    let tiles = plan.array(warps(D as u32) * warp_words::<D>());
    let mut over = SharedPlan::new();
    let outputs = over.array(warps(D as u32) * ROWS * D as u32);
    let mut over = SharedPlan::new();
    let staged = over.array(MAX_PARTS * ROWS);
    let rows = plan.array(warps(D as u32) * ROWS);
    let squares = plan.array(ROWS * 32);
    let totals = plan.array(ROWS);
    let last = plan.array(1);
    PromoteLayout { tiles, outputs, staged, rows, squares, totals, last, bytes: plan.bytes() }
}

/// Replaces the shares of the listed blocks, and finishes: output, LSE, certificate, and which rows want the dense rung.
///
/// `output` f32 [sequences, query heads, D]; `lse` and `certificates` [sequences, query heads]; `dense_rows`
/// [sequences · kv_heads · row groups], bit g for row g; `trailing_norms` of the same shape, two each; `counters` of the same shape, 0 before and after.
#[kernel(
    system = certified,
    instances((f16, 64), (f16, 128), (bf16, 64), (bf16, 128)),
    max_threads = 256
)]
pub fn replace<E: Half, const D: usize>(
    queries: Global<E>,
    tiles: Global<u32>,
    table: Global<u32>,
    lengths: Global<u32>,
    keys: Global<E>,
    values: Global<E>,
    near: GlobalMut<E>,
    directory: GlobalMut<u64>,
    entries: Global<Entry>,
    entry_counts: Global<u32>,
    sums: Global<RowSums>,
    totals: Global<f32>,
    trailing_norms: GlobalMut<f32>,
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
    let (part, sequence) = (thread::block_idx_x(), thread::block_idx_z());
    let launch_row = sequence * thread::grid_dim_y() + thread::block_idx_y();
    let head = bits::div_u32(thread::block_idx_y(), shape.row_groups());
    let row_group = bits::rem_u32(thread::block_idx_y(), shape.row_groups());
    let count = entry_counts.load(launch_row as usize);
    // One block at least, to finish.
    let used = count.div_ceil(warps(D as u32)).min(thread::grid_dim_x()).max(1);
    if part >= used {
        return;
    }
    let length = lengths.load(sequence as usize);
    let layout = promote_layout::<D>();
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let in_group = row_group * ROWS + (lane >> 2);
    let present = in_group < shape.group;
    let query_row = (sequence * shape.kv_heads + head) * shape.group + in_group;
    let query = Query::load::<E, D>(queries, query_row as usize, present, shape.softmax_scale, lane);
    let to_log2 = query.scale * LOG2_E;

    let list = launch_row as usize * (shape.max_blocks as usize + 1);
    let mut running = Running::new();
    let mut e = part * warps(D as u32) + warp;
    while e < count {
        // The addresses in three tiles would take more registers than there are.
        let start = bits::renewed(warp * warp_words::<D>());
        let lane = bits::renewed(lane);
        let key_tile = KeyTile::<D>::at(layout.tiles, start);
        let value_tile = ValueTile::<D>::at(layout.tiles, start + KeyTile::<D>::WORDS);
        let tile = Tile::<D>::at(layout.tiles, start + KeyTile::<D>::WORDS + ValueTile::<D>::WORDS);
        let entry: Entry = entries.load(list + e as usize);
        let trailing = entry.rows & Entry::TRAILING != 0;
        let block = table.load_readonly((sequence * shape.max_blocks + entry.index) as usize);
        let pair = block * shape.kv_heads + head;
        let elements = BLOCK_TOKENS as usize * D;
        let rows = (length - entry.index * BLOCK_TOKENS).min(BLOCK_TOKENS);
        // The last round's tiles are read.
        warp::sync_warp(FULL_MASK);
        let wants_values = entry.rows >> 8 & 0xff != 0;
        let found = if trailing {
            // Fresh blocks are the sequences', in their order.
            let fresh = sequence * shape.kv_heads + head;
            [0, 1].map(|kind| Found::fresh(scratch, kind, fresh))
        } else {
            find(directory, scratch, pair, (list as u32).wrapping_add(e), lane)
        };
        let source = |found: Found, originals: Global<E>| match found.tile {
            Scratch::EMPTY => (originals, pair as usize * elements),
            tile => (near.as_const(), tile as usize * elements),
        };
        let (from, at) = source(found[0], keys);
        key_tile.copy(from, at, rows, lane);
        if wants_values {
            let (from, at) = source(found[1], values);
            value_tile.copy(from, at, rows, lane);
        }
        if !trailing {
            tile.copy(tiles, pair as usize * TileLayout::new(D as u32).bytes as usize, lane);
        }
        async_copy::commit();
        async_copy::wait::<0>();
        warp::sync_warp(FULL_MASK);
        if found[0].admit != Scratch::EMPTY {
            key_tile.store(near, found[0].admit as usize * elements, lane);
            admit(directory, found[0].admit, pair, lane);
        }
        if wants_values && found[1].admit != Scratch::EMPTY {
            value_tile.store(near, found[1].admit as usize * elements, lane);
            admit(directory, found[1].admit, pair, lane);
        }

        let (row_key, row_value) =
            (entry.rows >> (lane >> 2) & 1 != 0, entry.rows >> (8 + (lane >> 2)) & 1 != 0);
        let exact = original_scores::<E, D>(&query, key_tile, lane);
        let masked = |scores: [[f32; 2]; 2], wanted: bool| {
            let mut out = scores;
            unroll!(for j in 0..2 {
                unroll!(for i in 0..2 {
                    let token = 8 * j as u32 + 2 * (lane & 3) + i as u32;
                    out[j][i] =
                        if wanted && token < rows { scores[j][i] * to_log2 } else { f32::NEG_INFINITY };
                });
            });
            out
        };
        if trailing {
            let norms = [0, 1].map(|kind| {
                let mut largest = 0f32;
                if lane < BLOCK_TOKENS {
                    let mut squares = 0f32;
                    for chunk in 0..D as u32 / 8 {
                        let words = if kind == 0 {
                            key_tile.chunk(lane, chunk)
                        } else {
                            value_tile.chunk(lane, chunk)
                        };
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
            });
            if lane == 0 {
                trailing_norms.store(2 * launch_row as usize, norms[0]);
                trailing_norms.store(2 * launch_row as usize + 1, norms[1]);
            }
            running.add::<E, D>(masked(exact, true), value_tile, lane);
        } else {
            let (quantized, _) = tile.products(&query, lane);
            let mut high = quantized;
            if row_key {
                high = exact;
            }
            if wants_values {
                running.add::<E, D>(masked(high, row_value), value_tile, lane);
            }
            if entry.rows & 0xff & !(entry.rows >> 8) != 0 {
                running.add::<f16, D>(masked(high, row_key && !row_value), tile.values(lane), lane);
            }
            running.subtract::<f16, D>(masked(quantized, row_key || row_value), tile.values(lane), lane);
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
    let base = launch_row as usize * thread::grid_dim_x() as usize * floats;
    let own = base + part as usize * floats;
    combine::<D>(layout.rows, layout.outputs, |r, d, merged| {
        partials.store_vector(own + (r * D as u32 + d) as usize, Vec4::from_array(merged.values));
        if d == 0 {
            partials.store_vector(own + (ROWS * D as u32 + 2 * r) as usize, merged.row);
        }
    });
    if !last_to_arrive(counters, launch_row, used, layout.last) {
        return;
    }
    let first_row = ((sequence * shape.kv_heads + head) * shape.group + row_group * ROWS) as usize;
    let rows = (shape.group - row_group * ROWS).min(ROWS);
    let parts = partials.as_const();
    let total = launch_row as usize * floats;
    // Part 0 is the pass.
    let place = |p: u32| if p == 0 { total } else { base + (p - 1) as usize * floats };
    combine_parts::<D>(
        used + 1,
        rows,
        layout.staged,
        |p, r| {
            let at = place(p) + (ROWS * D as u32 + 2 * r) as usize;
            if p == 0 { totals.load_vector(at) } else { parts.load_vector(at) }
        },
        |p, r, d| {
            let at = place(p) + (r * D as u32 + d) as usize;
            if p == 0 { totals.load_vector(at) } else { parts.load_vector(at) }
        },
        |r, d, merged| {
            let Merged { values, row } = merged;
            let empty = row.sum == 0.0;
            let value = values.map(|x| if empty { 0.0 } else { x / row.sum });
            let squares = fma(
                value[3],
                value[3],
                fma(value[2], value[2], fma(value[1], value[1], value[0] * value[0])),
            );
            layout.squares.store(r * 32 + d / 4, squares);
            if d == 0 {
                layout.totals.store(r, row);
            }
            let at = (first_row + r as usize) * D + d as usize;
            output.store_vector(at, Vec4::from_array(value.map(canonical_nan)));
        },
    );
    thread::sync_threads();
    if warp != 0 {
        return;
    }
    // Four lanes a row; they hold the same query.
    let r = lane >> 2;
    let wants_dense = if present {
        let row = layout.totals.load(r);
        let mut squares = 0f32;
        for quad in 0..D as u32 / 4 {
            squares += layout.squares.load(r * 32 + quad);
        }
        let pass: PartialRow = totals.load_vector(total + (ROWS * D as u32 + 2 * r) as usize);
        let norms = if length.is_multiple_of(BLOCK_TOKENS) {
            [0.0; 2]
        } else {
            [0, 1].map(|kind| trailing_norms.load(2 * launch_row as usize + kind))
        };
        let judge = Judge {
            row,
            pass,
            sums: RowSums::load(sums, first_row + r as usize),
            squares,
            norms,
            chain: Chain::of_step::<D>(length, shape.splits, count, used),
            dense: Chain::of_dense::<D>(length, shape.splits),
            softmax_scale: shape.softmax_scale,
        };
        let judged = judge.certificate::<E, D>(&query, thresholds);
        if lane & 3 == 0 {
            let log =
                if row.sum == 0.0 { f32::NEG_INFINITY } else { (row.reference + log2(row.sum)) / LOG2_E };
            lse.store(first_row + r as usize, canonical_nan(log));
            judged.store(certificates, first_row + r as usize);
        }
        judged.rung() == rung::DENSE
    } else {
        false
    };
    let ballot = warp::warp_vote_ballot(FULL_MASK, wants_dense);
    if lane == 0 {
        // Every fourth bit.
        let mut mask = 0u32;
        unroll!(for r in 0..8 {
            mask |= (ballot >> (4 * r) & 1) << r;
        });
        dense_rows.store(launch_row as usize, mask);
    }
}

/// Products of the normalised query with original keys: `[tokens 8j + 2q, 8j + 2q + 1]` of row `g`.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
fn original_scores<E: Half, const D: usize>(query: &Query, keys: KeyTile<D>, lane: u32) -> [[f32; 2]; 2] {
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
