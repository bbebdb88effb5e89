//! Outputs from all parts, and their certificates: what the last thread block of `replace` does.

use super::choose::Chosen;
use super::pass::RowGroup;
use super::query::Queries;
use crate::attention::Half;
use crate::attention::cpu::Work;
use crate::attention::cpu::lanes::Lanes;
use crate::attention::cpu::softmax::combine;
use kernels_gpu::attention::{BLOCK_TOKENS, PartialRow, part_floats, warps};
use kernels_gpu::certified::judge::{Chain, Judge};
use kernels_gpu::certified::policy::rung;
use kernels_gpu::certified::query::LOG2_E;
use kernels_gpu::certified::{Certificate, RowSums, StepShape, Taken, Thresholds};
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
    pub(super) queries: &'a mut Queries,
    pub(super) chosen: &'a Chosen,
    /// Tokens of the sequence.
    pub(super) length: u32,
    /// Bounds of the norms of the trailing block's keys and values.
    pub(super) norms: [f32; 2],
    /// Partial results of the pass and of the replacements.
    pub(super) partials: &'a [f32],
    pub(super) output: &'a mut [f32],
    pub(super) lse: &'a mut [f32],
    pub(super) certificates: &'a mut [Certificate],
    pub(super) element: PhantomData<E>,
}

impl<E: Half, const D: usize> Work for Finish<'_, E, D> {
    /// Rows that want the dense rung: bit r row r.
    type Output = u32;

    #[inline(always)]
    fn run<L: Lanes>(self) -> u32 {
        let Finish { shape, thresholds, group, queries, chosen, length, partials, .. } = self;
        let floats = part_floats(D as u32);
        queries.load::<E, L, D>(self.rows, shape.softmax_scale);
        let (listed, used) = (chosen.entries.len() as u32, chosen.replacers as u32);
        let mut dense = 0;
        for r in 0..group.rows {
            let output = &mut self.output[r * D..][..D];
            let row = combine(partials, floats, r, D, output);
            let empty = row.sum == 0.0;
            let mut squares = 0f32;
            for four in output.as_chunks_mut::<4>().0 {
                for x in four.iter_mut() {
                    *x = if empty { 0.0 } else { *x / row.sum };
                }
                let [a, b, c, d] = *four;
                squares += fma(d, d, fma(c, c, fma(b, b, a * a)));
                for x in four {
                    *x = canonical_nan(*x);
                }
            }
            let (mut pass, mut sums, mut taken) = (PartialRow::zeroed(), RowSums::zeroed(), Taken::zeroed());
            if thresholds.certify != 0 {
                (pass, sums, taken) = (chosen.pass[r], chosen.sums[r], chosen.taken[r]);
            }
            let trailing = !length.is_multiple_of(BLOCK_TOKENS);
            let judge = Judge {
                row,
                pass,
                sums,
                taken,
                squares,
                norms: if trailing { self.norms } else { [0.0; 2] },
                chain: Chain::of_step::<D>(
                    length,
                    shape.splits,
                    used,
                    [listed, listed / (used * warps(D as u32)) + 1],
                ),
                dense: Chain::of_dense::<D>(length, shape.splits),
                softmax_scale: shape.softmax_scale,
            };
            let certificate = judge.certificate::<E, D>(&queries.heads[r], thresholds);
            let log = if empty { f32::NEG_INFINITY } else { (row.reference + log2(row.sum)) / LOG2_E };
            self.lse[r] = canonical_nan(log);
            self.certificates[r] = certificate;
            dense |= u32::from(certificate.rung() == rung::DENSE) << r;
        }
        dense
    }
}
