//! Promoted blocks' shares replaced, and the trailing block: what a thread block of `replace` does.

use super::pass::{Note, RowGroup, Scratch, View};
use crate::attention::Half;
use crate::attention::cpu::lanes::{Floats, Lanes, Order, Row, Sixteens, Tile, multiply};
use crate::attention::cpu::softmax::{MAX_ROWS, TOKENS, of_lane, rescale, split};
use crate::attention::cpu::{Work, a_finite_row, padded};
use half::f16;
use kernels_gpu::attention::warps;
use kernels_gpu::certified::Entry;
use kernels_gpu::certified::layout::{TileLayout, pair};
use kernels_gpu::certified::quantizer::{bound_or_infinity, norm_bound};
use kernels_gpu::certified::query::LOG2_E;
use simt::math::{fma, max};
use std::marker::PhantomData;

/// One thread block: every so manieth entry of a group's lists; the trailing block comes last.
pub(super) struct Replace<'a, E, const D: usize> {
    pub(super) view: View<'a>,
    pub(super) group: RowGroup,
    pub(super) entries: &'a [Entry],
    /// Of the sequence's full blocks; empty if there are no entries.
    pub(super) notes: &'a [Note],
    /// Which thread block of how many.
    pub(super) replacer: [usize; 2],
    /// Whether the trailing block's norms are wanted.
    pub(super) norms_wanted: bool,
    pub(super) scratch: &'a mut Scratch,
    /// [8, D] of N, then [8] pairs of reference and sum.
    pub(super) out: &'a mut [f32],
    pub(super) element: PhantomData<E>,
}

impl<E: Half, const D: usize> Work for Replace<'_, E, D> {
    /// Bounds of the norms of the trailing block's keys and values, if this thread block had it.
    type Output = Option<[f32; 2]>;

    #[inline(always)]
    fn run<L: Lanes>(self) -> Option<[f32; 2]> {
        let Replace {
            view,
            group,
            entries,
            notes,
            replacer: [replacer, replacers],
            norms_wanted,
            scratch,
            out,
            ..
        } = self;
        let length = view.lengths[group.sequence] as usize;
        let in_trailing = length % TOKENS;
        let count = entries.len() + usize::from(in_trailing != 0);
        let rows = group.rows;
        let warps = warps(D as u32) as usize;
        scratch.queries.load::<E, L, D>(view.rows::<D>(group), view.shape.softmax_scale);
        let mut norms = None;
        for warp in 0..warps {
            let mut running = scratch.clear::<D>();
            let first = replacer * warps + warp;
            for e in (first..count).step_by(replacers * warps) {
                let trailing = e == entries.len();
                let entry = match entries.get(e) {
                    Some(entry) => *entry,
                    None => Entry { index: (length / TOKENS) as u32, rows: u32::MAX },
                };
                let tokens = if trailing { in_trailing } else { TOKENS };
                let [wants_keys, wants_values] = entry.wants();
                let block = view.block(group.sequence, entry.index as usize);
                let at = pair(block, view.shape.kv_heads, group.head as u32);
                let elements = TileLayout::new(D as u32).elements() as usize;
                let mut keys = &view.keys[at * elements..][..elements];
                let mut values = &view.values[at * elements..][..elements];
                if trailing {
                    // Rows that there are not are not read.
                    keys = padded(keys, tokens * D, &mut scratch.key_rows);
                    values = padded(values, tokens * D, &mut scratch.value_rows);
                    if norms_wanted {
                        norms = Some([largest_norm::<E>(keys, D), largest_norm::<E>(values, D)]);
                    }
                }
                if wants_keys {
                    L::keys::<E, Sixteens>(keys, D, &mut scratch.keys);
                }
                let mut new_scores = [[f32::NEG_INFINITY; TOKENS]; MAX_ROWS];
                let mut old_scores = [[f32::NEG_INFINITY; TOKENS]; MAX_ROWS];
                let mut vote = false;
                for r in 0..rows {
                    let [row_key, row_value] = entry.row_wants(r as u32);
                    if !(row_key || row_value) {
                        continue;
                    }
                    if !trailing {
                        old_scores[r] = notes[entry.index as usize].scores[r];
                    }
                    new_scores[r] = if row_key {
                        let to_log2 = scratch.queries.heads[r].scale * LOG2_E;
                        let operands = &scratch.queries.operands[r];
                        exact_scores::<E, L, D>(operands, &scratch.keys, keys, tokens, to_log2)
                    } else {
                        old_scores[r]
                    };
                    vote |= running[r].votes(&new_scores[r]) | running[r].votes(&old_scores[r]);
                }
                // Rows of the eight that there are not want the trailing block too, with scores of 0: nothing before it.
                if trailing && rows < MAX_ROWS {
                    vote |= scratch.keys.finite || a_finite_row::<E>(&keys[..tokens * D], D);
                }
                if vote {
                    for r in 0..rows {
                        let factor = running[r].raise(&[&new_scores[r], &old_scores[r]]);
                        if factor != 1.0 && e != first {
                            rescale(&mut scratch.outputs[r], D / 16, factor);
                        }
                    }
                }
                let mut by_quantized = [[0f32; TOKENS]; MAX_ROWS];
                for r in 0..rows {
                    let new = L::exp2(&new_scores[r], running[r].reference);
                    let old = L::exp2(&old_scores[r], running[r].reference);
                    for (q, sum) in running[r].sums.iter_mut().enumerate() {
                        let (new, old) = (of_lane(&new, q), of_lane(&old, q));
                        for i in 0..4 {
                            *sum += new[i] - old[i];
                        }
                    }
                    let by_original = if entry.row_wants(r as u32)[1] { new } else { [0.0; TOKENS] };
                    for t in 0..TOKENS {
                        by_quantized[r][t] = (new[t] - by_original[t]) - old[t];
                    }
                    scratch.weights[r] = split::<E, L>(&by_original);
                }
                if wants_values {
                    L::values::<E>(values, D, &mut scratch.values);
                    add_values::<E, L, D>(
                        &scratch.weights,
                        &scratch.values,
                        values,
                        &mut scratch.outputs,
                        rows,
                    );
                }
                if !trailing {
                    for (weights, by_quantized) in scratch.weights.iter_mut().zip(&by_quantized).take(rows) {
                        *weights = split::<f16, L>(by_quantized);
                    }
                    scratch.tile.restore::<L, D>(view.tile::<D>(block, group.head));
                    scratch.tile.add_values::<L, D>(&scratch.weights, &mut scratch.outputs, rows);
                }
            }
            for (r, running) in running.iter().enumerate().take(rows) {
                scratch.results.keep([warp, r], D / 16, running, &scratch.outputs[r]);
            }
        }
        scratch.results.merge(warps, rows, D, out);
        norms
    }
}

/// `original_scores` of a row, in log2 units; −∞ from token `tokens` on.
#[inline(always)]
fn exact_scores<E: Half, L: Lanes, const D: usize>(
    query: &[Row],
    tile: &Tile,
    keys: &[u16],
    tokens: usize,
    to_log2: f32,
) -> Floats {
    let mut scores = [0f32; TOKENS];
    for (contraction, query) in query.iter().enumerate().take(D / 16) {
        let element = |step: usize, token: usize| keys[token * D + Sixteens::dimension(contraction, step)];
        multiply::<E, L>(query, tile, contraction, &mut scores, element);
    }
    for (token, score) in scores.iter_mut().enumerate() {
        *score = if token < tokens { *score * to_log2 } else { f32::NEG_INFINITY };
    }
    scores
}

/// Adds weights times original values to the outputs of the rows.
#[inline(always)]
fn add_values<E: Half, L: Lanes, const D: usize>(
    weights: &[[Row; 2]; MAX_ROWS],
    tile: &Tile,
    values: &[u16],
    outputs: &mut [[[Floats; 16]; 2]; MAX_ROWS],
    rows: usize,
) {
    for chunk in 0..D / 16 {
        let element = |token: usize, lane: usize| values[token * D + 16 * chunk + lane];
        for (weights, outputs) in weights.iter().zip(outputs.iter_mut()).take(rows) {
            for (weights, output) in weights.iter().zip(outputs) {
                multiply::<E, L>(weights, tile, chunk, &mut output[chunk], element);
            }
        }
    }
}

/// The largest bound of the norms of 16 rows.
#[inline(always)]
fn largest_norm<E: Half>(rows: &[u16], head_dim: usize) -> f32 {
    let mut squares = [0f32; TOKENS];
    for d in 0..head_dim {
        for (squares, row) in squares.iter_mut().zip(rows.chunks_exact(head_dim)) {
            let x = E::unpack(u32::from(row[d]))[0];
            *squares = fma(x, x, *squares);
        }
    }
    let mut largest = 0f32;
    for squares in squares {
        // Not a number would get lost in the maximum.
        largest = max(largest, bound_or_infinity(norm_bound(squares)));
    }
    largest
}
