//! Masses of blocks as logarithms, rounded up, and estimates of them.

use crate::attention::PartialRow;
use simt::math::{canonical_nan, exp2_nonpositive, floor, fma, log2, max};
use simt::unroll;
use simt::warp::{FULL_MASK, warp_shuffle_xor, warp_vote_any};

/// What a lane has of a block's mass for its query head.
#[derive(Clone, Copy)]
pub(super) struct Mass {
    /// An integer; no weight is above 2^[`SLACK`] relative to it.
    reference: f32,
    /// Σ 2^(ŝ + Δ − reference) over this lane's tokens, and the same with each weight times its Δ.
    above: f32,
    excess: f32,
}

impl Mass {
    pub const NONE: Mass = Mass { reference: PartialRow::EMPTY.reference, above: 0.0, excess: 0.0 };

    /// Takes a tile in: scores and Δ in log2 units.
    #[simt::device]
    pub fn add(&mut self, scores: [f32; 8], delta: f32) {
        let mut above = [0f32; 8];
        unroll!(for i in 0..8 {
            above[i] = scores[i] + delta;
        });
        let quarter = |i: usize| max(above[i], above[i + 1]);
        let largest = max(max(quarter(0), quarter(2)), max(quarter(4), quarter(6)));
        // The four lanes of a row raise its reference together, and no other row's.
        if warp_vote_any(FULL_MASK, largest - self.reference > SLACK) {
            let largest = max(largest, warp_shuffle_xor(FULL_MASK, largest, 1, 32));
            let largest = max(largest, warp_shuffle_xor(FULL_MASK, largest, 2, 32));
            let reference = raised(self.reference, largest);
            let factor = exp2_nonpositive(self.reference - reference);
            self.reference = reference;
            self.above *= factor;
            self.excess *= factor;
        }
        let mut p = [0f32; 8];
        unroll!(for i in 0..8 {
            p[i] = exp2_nonpositive(above[i] - self.reference);
        });
        let weight = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
        self.above += weight;
        self.excess = fma(weight, delta, self.excess);
    }

    /// The logarithm of the head's mass to base two, rounded up, and its estimate.
    #[simt::device]
    pub fn close(self) -> (f32, PartialRow) {
        let row = |x: f32| {
            let x = x + warp_shuffle_xor(FULL_MASK, x, 1, 32);
            x + warp_shuffle_xor(FULL_MASK, x, 2, 32)
        };
        let above = row(self.above);
        (mass_above(self.reference, above), about(self.reference, above, row(self.excess)))
    }
}

/// The larger of two blocks' masses, for [`Total::most`](super::Total::most).
#[inline(always)]
pub fn most_of(most: f32, mass: f32) -> f32 {
    if mass < f32::INFINITY { max(most, mass) } else { most }
}

/// How far above its reference a row's largest score may be, in octaves, before the reference follows it.
pub const SLACK: f32 = 15.0;

/// A row's reference after its largest score of a tile.
#[inline(always)]
pub fn raised(reference: f32, largest: f32) -> f32 {
    if largest - reference > SLACK { max(reference, -floor(-largest)) } else { reference }
}

/// log2 of a block's mass of `sum` relative to 2^`reference`, rounded up: at least that of the mass that the
/// sum of these weights would have without rounding. 128 tokens at most: a weight passes 9 roundings, 2^−20
/// of it; weights below 2^−126 of the largest one, which are lost, are 2^−119; the logarithm and its sum with
/// the reference lose 2^−23 of what is larger.
#[inline(always)]
pub fn mass_above(reference: f32, sum: f32) -> f32 {
    let log = reference + log2(sum);
    canonical_nan(log + fma(simt::math::abs(log), 1.0 / 2_097_152.0, 1.0 / 65536.0))
}

/// An estimate of a block's mass without Δ: that with it, less the mean of Δ. Nothing, where that is no
/// number: such a block is kept in any case.
#[inline(always)]
pub fn about(reference: f32, above: f32, excess: f32) -> PartialRow {
    const MOST: f32 = 1.0e9;
    let mean = excess / above;
    // Whole octaves go to the reference, which has room for them.
    let whole = floor(mean);
    let estimate = PartialRow { reference: reference - whole, sum: above * exp2_nonpositive(whole - mean) };
    if mean <= MOST { estimate } else { PartialRow::EMPTY }
}

/// Both together.
#[inline(always)]
pub fn joined(a: PartialRow, b: PartialRow) -> PartialRow {
    let reference = max(a.reference, b.reference);
    let of = |row: PartialRow| row.sum * exp2_nonpositive(row.reference - reference);
    PartialRow { reference, sum: of(a) + of(b) }
}
