//! Promoted blocks' shares replaced, and the trailing block: what a thread block of `replace` does.

use super::original::{exact_scores, largest_norm, originals};
use super::pass::{Note, RowGroup, Scratch, View};
use super::tile::add_values;
use crate::attention::Half;
use crate::attention::cpu::lanes::{Lanes, Sixteens};
use crate::attention::cpu::pieces::Pieces;
use crate::attention::cpu::softmax::{MAX_ROWS, TOKENS, WarpResult, of_lane, rescale, split};
use crate::attention::cpu::{Work, a_finite_row, padded};
use half::f16;
use kernels_gpu::certified::Entry;
use kernels_gpu::certified::query::LOG2_E;
use std::marker::PhantomData;

/// Some warps of a thread block: every so manieth entry of a group's lists; the trailing block comes last.
pub(super) struct Replace<'a, E, const D: usize> {
    pub(super) view: View<'a>,
    pub(super) group: RowGroup,
    pub(super) entries: &'a [Entry],
    /// Of the sequence's full blocks; empty if there are no entries.
    pub(super) notes: &'a [Note],
    /// Which thread block of how many.
    pub(super) replacer: [usize; 2],
    pub(super) pieces: Pieces,
    pub(super) piece: usize,
    /// Whether the trailing block's norms are wanted.
    pub(super) norms_wanted: bool,
    pub(super) scratch: &'a mut Scratch,
    pub(super) results: &'a mut [WarpResult],
    pub(super) element: PhantomData<E>,
}

impl<E: Half, const D: usize> Work for Replace<'_, E, D> {
    /// Bounds of the norms of the trailing block's keys and values, if it was here.
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
            pieces,
            piece,
            scratch,
            results,
            ..
        } = self;
        let length = view.lengths[group.sequence] as usize;
        let in_trailing = length % TOKENS;
        let count = entries.len() + usize::from(in_trailing != 0);
        let rows = group.rows;
        let warps = pieces.warps;
        if let Some(first) = entries.get(replacer * warps + piece) {
            view.prefetch::<L, D>(group, *first);
        }
        scratch.queries.load::<E, L, D>(view.rows::<D>(group), view.shape.softmax_scale);
        let mut norms = None;
        for (warp, result) in pieces.warps_of(piece).zip(results) {
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
                let after = e + replacers * warps;
                let after = if after < count { after } else { replacer * warps + warp + pieces.count };
                if let Some(after) = entries.get(after) {
                    view.prefetch::<L, D>(group, *after);
                }
                let [mut keys, mut values] = originals::<D>(&view, group, block);
                if trailing {
                    // Rows that there are not are not read.
                    keys = padded(keys, tokens * D, &mut scratch.key_rows);
                    values = padded(values, tokens * D, &mut scratch.value_rows);
                }
                if trailing && norms_wanted {
                    L::keys::<E, Sixteens>(values, D, &mut scratch.keys);
                    let of_values = largest_norm::<E, L, D>(&scratch.keys);
                    L::keys::<E, Sixteens>(keys, D, &mut scratch.keys);
                    norms = Some([largest_norm::<E, L, D>(&scratch.keys), of_values]);
                } else if wants_keys {
                    L::keys::<E, Sixteens>(keys, D, &mut scratch.keys);
                }
                // Rows that want the exact scores, and these.
                let (mut of_keys, mut wanting) = ([0; MAX_ROWS], 0);
                for r in (0..rows).filter(|r| entry.row_wants(*r as u32)[0]) {
                    of_keys[wanting] = r;
                    wanting += 1;
                }
                let of_keys = &of_keys[..wanting];
                let mut exact = [[0f32; TOKENS]; MAX_ROWS];
                let row = |i: usize| of_keys[i];
                exact_scores::<E, L, D>(&scratch.queries, row, &scratch.keys, &mut exact[..of_keys.len()]);
                let mut new_scores = [[f32::NEG_INFINITY; TOKENS]; MAX_ROWS];
                for (r, exact) in of_keys.iter().zip(&exact) {
                    let to_log2 = scratch.queries.heads[*r].scale * LOG2_E;
                    for (new, exact) in new_scores[*r].iter_mut().zip(exact).take(tokens) {
                        *new = *exact * to_log2;
                    }
                }
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
                    if !row_key {
                        new_scores[r] = old_scores[r];
                    }
                    vote |= running[r].votes(&new_scores[r]) | running[r].votes(&old_scores[r]);
                }
                // Rows of the eight that there are not want the trailing block too, with scores of 0: nothing
                // before it.
                if trailing && rows < MAX_ROWS {
                    vote |= scratch.keys.finite || a_finite_row::<E>(&keys[..tokens * D], D);
                }
                if vote {
                    for r in 0..rows {
                        let factor = running[r].raise(&[&new_scores[r], &old_scores[r]]);
                        if factor != 1.0 && e != first {
                            rescale(&mut scratch.outputs[..D / 16], r, factor);
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
                    split::<E, L>(&by_original, &mut scratch.weights[r]);
                }
                if wants_values {
                    L::values::<E>(values, D, &mut scratch.values);
                    let weights = &scratch.weights[..rows];
                    add_values::<E, L, D>(weights, &scratch.values, values, &mut scratch.outputs);
                }
                if !trailing {
                    for (weights, by_quantized) in scratch.weights.iter_mut().zip(&by_quantized).take(rows) {
                        split::<f16, L>(by_quantized, weights);
                    }
                    scratch.tile.restore::<L, D>(view.layout, view.tile::<D>(block, group.head));
                    scratch.tile.add_values::<L, D>(&scratch.weights[..rows], &mut scratch.outputs);
                }
            }
            for (r, running) in running.iter().enumerate().take(rows) {
                result.keep(r, running, &scratch.outputs[..D / 16]);
            }
        }
        norms
    }
}
