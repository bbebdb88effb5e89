//! Outputs from all parts, and their certificates: what the last thread block of `replace` or `carry` does.

use super::choose::Chosen;
use super::gather::Gather;
use super::list::Used;
use super::pass::RowGroup;
use super::query::head;
use crate::attention::Half;
use crate::attention::cpu::Work;
use crate::attention::cpu::lanes::Lanes;
use crate::attention::cpu::softmax::combine;
use kernels_gpu::attention::Chain;
use kernels_gpu::attention::{BLOCK_TOKENS, PartialRow, part_floats, warps};
use kernels_gpu::certified::carried::sight::log_sum;
use kernels_gpu::certified::judge::Judge;
use kernels_gpu::certified::policy::rung;
use kernels_gpu::certified::query::LOG2_E;
use kernels_gpu::certified::{Certificate, RowSums, StepShape, Taken, Thresholds, carried};
use simt::Zeroable;
use simt::math::{canonical_nan, fma, log2};
use std::marker::PhantomData;

/// The end of a group of eight rows.
pub(super) struct Finish<'a, E, const D: usize> {
    pub(super) shape: StepShape,
    pub(super) thresholds: Thresholds,
    pub(super) group: RowGroup,
    /// Its rows, [rows, D].
    pub(super) rows: &'a [u16],
    /// What the certificates follow from.
    pub(super) known: Known<'a>,
    /// Tokens of the sequence.
    pub(super) length: u32,
    /// All partial results.
    pub(super) partials: &'a [f32],
    pub(super) output: &'a mut [f32],
    pub(super) lse: &'a mut [f32],
    pub(super) certificates: &'a mut [Certificate],
    /// What the rows leave for the next step; nothing if there is no list.
    pub(super) log_sums: &'a mut [f32],
    pub(super) element: PhantomData<E>,
}

/// What is known of a group of rows when all its blocks have been visited.
#[derive(Clone, Copy)]
pub(super) enum Known<'a> {
    /// After a pass and its corrections: the choice, and bounds of the norms of the trailing block's keys and
    /// values.
    Chosen(&'a Chosen, [f32; 2]),
    /// After one pass by a list: what it was, and what each split has gathered, if a certificate is wanted.
    Gathered(&'a Used, &'a [Gather]),
}

impl<E: Half, const D: usize> Work for Finish<'_, E, D> {
    /// Rows that want the dense rung: bit r row r.
    type Output = u32;

    #[inline(always)]
    fn run<L: Lanes>(self) -> u32 {
        let Finish { shape, thresholds, group, rows, known, length, partials, .. } = self;
        let floats = part_floats(D as u32);
        let gathered = match known {
            Known::Gathered(_, splits) => Gather::merge(splits.iter()),
            Known::Chosen(..) => Gather::NONE,
        };
        let mut dense = 0;
        for (r, query) in rows.chunks_exact(D).enumerate().take(group.rows) {
            let output = &mut self.output[r * D..][..D];
            let row = combine::<L>(partials, floats, r, D, output);
            let empty = row.sum == 0.0;
            let squares = divide(output, row.sum);
            let (query, _) = head::<E, L, D>(query, shape.softmax_scale);
            let certificate = match known {
                Known::Chosen(chosen, norms) => {
                    let judge = of_chosen::<D>(shape, thresholds, length, chosen, norms, r, row, squares);
                    judge.certificate::<E, D>(&query, thresholds)
                }
                Known::Gathered(used, _) => {
                    let judge = carried::judge::Judge {
                        row,
                        gathered: gathered.of_row(r),
                        squares,
                        promoted: used.promoted,
                        length,
                        chain: Chain::of_carried::<D>(length, shape.splits, used.entries.len() as u32),
                        dense: Chain::of_dense::<D>(length, shape.rung_splits),
                        softmax_scale: shape.softmax_scale,
                    };
                    judge.certificate::<E, D>(&query, thresholds)
                }
            };
            let log = if empty { f32::NEG_INFINITY } else { (row.reference + log2(row.sum)) / LOG2_E };
            self.lse[r] = canonical_nan(log);
            self.certificates[r] = certificate;
            if let Some(left) = self.log_sums.get_mut(r) {
                *left = log_sum(row);
            }
            dense |= u32::from(certificate.rung() == rung::DENSE) << r;
        }
        dense
    }
}

/// Divides a row's Σ p·v by Σ p; gives ‖O‖².
#[inline(always)]
fn divide(output: &mut [f32], sum: f32) -> f32 {
    let empty = sum == 0.0;
    let mut squares = 0f32;
    for four in output.as_chunks_mut::<4>().0 {
        for x in four.iter_mut() {
            *x = if empty { 0.0 } else { *x / sum };
        }
        let [a, b, c, d] = *four;
        squares += fma(d, d, fma(c, c, fma(b, b, a * a)));
        for x in four {
            *x = canonical_nan(*x);
        }
    }
    squares
}

/// What the certificate of row `r` follows from after a pass and its corrections.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn of_chosen<const D: usize>(
    shape: StepShape,
    thresholds: Thresholds,
    length: u32,
    chosen: &Chosen,
    norms: [f32; 2],
    r: usize,
    row: PartialRow,
    squares: f32,
) -> Judge {
    let (mut pass, mut sums, mut taken) = (PartialRow::zeroed(), RowSums::zeroed(), Taken::zeroed());
    if thresholds.certify != 0 {
        (pass, sums, taken) = (chosen.pass[r], chosen.sums[r], chosen.taken[r]);
    }
    let (listed, used) = (chosen.entries.len() as u32, chosen.replacers as u32);
    Judge {
        row,
        pass,
        sums,
        taken,
        squares,
        norms: if length.is_multiple_of(BLOCK_TOKENS) { [0.0; 2] } else { norms },
        chain: Chain::of_step::<D>(
            length,
            shape.splits,
            used,
            [listed, listed / (used * warps(D as u32)) + 1],
        ),
        dense: Chain::of_dense::<D>(length, shape.rung_splits),
        softmax_scale: shape.softmax_scale,
    }
}
