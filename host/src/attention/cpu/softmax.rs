//! The online softmax of the kernels' warps, and how their results are put together.

use super::Work;
use super::lanes::{Floats, Lanes, Row};
use super::pieces::Pieces;
use crate::attention::{BLOCK_TOKENS, Half};
use kernels_gpu::attention::{PartialRow, ROWS};
use simt::math::{exp2_nonpositive, floor, fma, max};

/// Tokens of a tile.
pub(crate) const TOKENS: usize = BLOCK_TOKENS as usize;
/// Query rows that a warp handles.
pub(crate) const MAX_ROWS: usize = ROWS as usize;
/// See `Running` of the kernels: the largest score is at most this above the reference.
pub(crate) const LARGEST_EXPONENT: f32 = 15.0;
/// Below it an integer less 15 is exact.
const EXACT: f32 = (1 << 22) as f32;

/// What a warp knows of a row besides its output.
#[derive(Clone, Copy)]
pub(crate) struct Running {
    pub(crate) reference: f32,
    /// Of the four lanes of a row.
    pub(crate) sums: [f32; 4],
}

impl Running {
    /// No token.
    pub(crate) const EMPTY: Running = Running { reference: PartialRow::EMPTY.reference, sums: [0.0; 4] };

    /// The row's sum, as the four lanes add theirs up.
    #[inline(always)]
    pub(crate) fn row(&self) -> PartialRow {
        PartialRow { reference: self.reference, sum: of_lanes(self.sums) }
    }

    /// Whether one of the scores is too large for the reference.
    #[inline(always)]
    pub(crate) fn votes(&self, scores: &[f32; TOKENS]) -> bool {
        let mut vote = false;
        for score in scores {
            vote |= *score - self.reference > LARGEST_EXPONENT;
        }
        vote
    }

    /// Raises the reference to one that suits the scores, and gives the factor for the row's output.
    #[inline(always)]
    pub(crate) fn raise(&mut self, scores: &[&[f32; TOKENS]]) -> f32 {
        let mut tops = [f32::NEG_INFINITY; 8];
        for scores in scores {
            for eight in scores.as_chunks::<8>().0 {
                for (top, score) in tops.iter_mut().zip(eight) {
                    // A NaN is passed over.
                    *top = if *score > *top { *score } else { *top };
                }
            }
        }
        let mut top = f32::NEG_INFINITY;
        for x in tops {
            top = if x > top { x } else { top };
        }
        let new = if top.abs() < EXACT {
            max(-floor(-top) - LARGEST_EXPONENT, self.reference)
        } else {
            raised_by_lanes(scores, self.reference)
        };
        let factor = exp2_nonpositive(self.reference - new);
        self.reference = new;
        for sum in &mut self.sums {
            *sum *= factor;
        }
        factor
    }
}

/// The new reference as the four lanes of a row find it, where scores are not all numbers or so large that
/// differences round.
#[cold]
#[inline(never)]
fn raised_by_lanes(scores: &[&[f32; TOKENS]], reference: f32) -> f32 {
    let mut new = reference;
    for q in 0..4 {
        let mut largest = f32::NEG_INFINITY;
        for scores in scores {
            let [s0, s1, s2, s3] = of_lane(scores, q);
            largest = max(largest, max(max(s0, s1), max(s2, s3)));
        }
        let lowered = -floor(-largest) - LARGEST_EXPONENT;
        let wanted = if largest - lowered > LARGEST_EXPONENT { largest } else { lowered };
        new = max(new, max(wanted, reference));
    }
    new
}

/// The score register order of a lane: tokens 2q, 2q + 1, 2q + 8, 2q + 9.
#[inline(always)]
pub(crate) fn of_lane<T: Copy>(x: &[T; TOKENS], q: usize) -> [T; 4] {
    [x[2 * q], x[2 * q + 1], x[2 * q + 8], x[2 * q + 9]]
}

/// The sum of four lanes as two exchanges make it.
#[inline(always)]
pub(crate) fn of_lanes([a, b, c, d]: [f32; 4]) -> f32 {
    (a + b) + (c + d)
}

/// Probabilities rounded, and what rounding cut off: `probabilities` of the kernels.
#[inline(always)]
pub(crate) fn split<E: Half, L: Lanes>(p: &[f32; TOKENS], [rounded, lost]: &mut [Row; 2]) {
    rounded.set::<E, L>(L::round::<E>(p));
    let mut cut = [0f32; TOKENS];
    for (cut, (p, rounded)) in cut.iter_mut().zip(p.iter().zip(&rounded.floats)) {
        *cut = p - rounded;
    }
    lost.set::<E, L>(L::round::<E>(&cut));
}

/// Multiplies a row's output by a factor of [`Running::raise`]: of `outputs` [head_dim / 16, rows, 2].
#[inline(always)]
pub(crate) fn rescale(outputs: &mut [[[Floats; 2]; MAX_ROWS]], r: usize, factor: f32) {
    for chunk in outputs {
        for x in chunk[r].as_flattened_mut() {
            *x *= factor;
        }
    }
}

/// Warps of a thread block at most.
pub(crate) const MAX_WARPS: usize = 12;

/// What a warp has come to.
#[derive(Clone)]
pub(crate) struct WarpResult {
    rows: [PartialRow; MAX_ROWS],
    /// [rows, head_dim / 16].
    outputs: [[Floats; 16]; MAX_ROWS],
}

impl WarpResult {
    pub(crate) const EMPTY: WarpResult =
        WarpResult { rows: [PartialRow::EMPTY; MAX_ROWS], outputs: [[[0.0; 16]; 16]; MAX_ROWS] };

    /// Keeps a row, whose output is in `outputs` [head_dim / 16, rows, 2].
    #[inline(always)]
    pub(crate) fn keep(&mut self, r: usize, running: &Running, outputs: &[[[Floats; 2]; MAX_ROWS]]) {
        self.rows[r] = running.row();
        for (kept, chunk) in self.outputs[r].iter_mut().zip(outputs) {
            let [rounded, cut] = &chunk[r];
            for i in 0..16 {
                kept[i] = rounded[i] + cut[i];
            }
        }
    }
}

/// Adds up the warps of a thread block in their order: `out` [8, head_dim] of Σ p·v, then [8] pairs of
/// reference and sum. `Merging` of the kernels.
pub(crate) struct Merge<'a> {
    /// In the order of [`Pieces`].
    pub(crate) results: &'a [WarpResult],
    pub(crate) pieces: Pieces,
    pub(crate) rows: usize,
    pub(crate) head_dim: usize,
    pub(crate) out: &'a mut [f32],
}

impl Work for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Merge { results, pieces, rows, head_dim, out } = self;
        let (values, sums) = out.split_at_mut(MAX_ROWS * head_dim);
        let warps = || (0..pieces.warps).map(|warp| &results[pieces.place(warp)]);
        for r in 0..rows {
            let values = &mut values[r * head_dim..][..head_dim];
            let mut merged = PartialRow::EMPTY;
            for warp in warps() {
                merged.reference = max(merged.reference, warp.rows[r].reference);
            }
            values.fill(0.0);
            for warp in warps() {
                let PartialRow { reference, sum } = warp.rows[r];
                let weight = exp2_nonpositive(reference - merged.reference);
                merged.sum = fma(sum, weight, merged.sum);
                L::add_scaled(values, warp.outputs[r].as_flattened(), weight);
            }
            sums[2 * r..2 * r + 2].copy_from_slice(&[merged.reference, merged.sum]);
        }
    }
}

/// `Adding::parts` of the kernels for row `r`: a warp adds up the sums, a part a lane; values in the order of
/// the parts.
#[inline(always)]
pub(crate) fn combine<L: Lanes>(
    parts: &[f32],
    floats: usize,
    r: usize,
    head_dim: usize,
    values: &mut [f32],
) -> PartialRow {
    let sums_at = MAX_ROWS * head_dim + 2 * r;
    let mut reference = PartialRow::EMPTY.reference;
    for part in parts.chunks_exact(floats) {
        reference = max(reference, part[sums_at]);
    }
    let mut lanes = [0f32; 32];
    values.fill(0.0);
    for (i, part) in parts.chunks_exact(floats).enumerate() {
        let weight = exp2_nonpositive(part[sums_at] - reference);
        lanes[i % 32] = fma(part[sums_at + 1], weight, lanes[i % 32]);
        L::add_scaled(values, &part[r * head_dim..][..head_dim], weight);
    }
    PartialRow { reference, sum: warp_sum(lanes) }
}

/// Row `r` over the parts of a sequence, which have `floats` floats each: Σ p·v to `values`. A single part is
/// the result.
pub(crate) struct MergeParts<'a> {
    pub parts: &'a [f32],
    pub floats: usize,
    pub r: usize,
    pub values: &'a mut [f32],
}

impl Work for MergeParts<'_> {
    type Output = PartialRow;

    #[inline(always)]
    fn run<L: Lanes>(self) -> PartialRow {
        let MergeParts { parts, floats, r, values } = self;
        let head_dim = values.len();
        if parts.len() == floats {
            values.copy_from_slice(&parts[r * head_dim..][..head_dim]);
            let at = MAX_ROWS * head_dim + 2 * r;
            return PartialRow { reference: parts[at], sum: parts[at + 1] };
        }
        combine::<L>(parts, floats, r, head_dim, values)
    }
}

/// `warp_sum_f32` of the lanes' values.
#[inline(always)]
pub(crate) fn warp_sum(mut lanes: [f32; 32]) -> f32 {
    for distance in [16, 8, 4, 2, 1] {
        for lane in 0..distance {
            lanes[lane] += lanes[lane + distance];
        }
    }
    lanes[0]
}
