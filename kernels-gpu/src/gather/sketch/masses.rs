//! Masses of blocks as logarithms, rounded up, and an estimate of the mass of all of them.

use crate::attention::PartialRow;
use simt::math::{canonical_nan, exp2_nonpositive, floor, fma, log2, max};
use simt::unroll;
use simt::warp::{FULL_MASK, warp_shuffle_xor, warp_vote_any};

/// What a lane has of the masses of its query head.
#[derive(Clone, Copy)]
pub(super) struct Mass {
    /// An integer, of the four lanes of a row the same; no weight is above 2^[`SLACK`] relative to it.
    reference: f32,
    /// Σ 2^(ŝ + Δ − reference) over this lane's tokens of a block.
    above: f32,
    /// Σ 2^ŝ over those of all blocks so far.
    estimate: PartialRow,
}

impl Mass {
    pub const NONE: Mass =
        Mass { reference: PartialRow::EMPTY.reference, above: 0.0, estimate: PartialRow::EMPTY };

    /// Takes a tile in: scores and Δ in log2 units. `fresh`: a block begins with it.
    #[simt::device]
    pub fn add(&mut self, scores: [f32; 8], delta: f32, fresh: bool) {
        let mut above = [0f32; 8];
        unroll!(for i in 0..8 {
            above[i] = scores[i] + delta;
        });
        let pair = |i: usize| max(above[i], above[i + 1]);
        let largest = max(max(pair(0), pair(2)), max(pair(4), pair(6)));
        let distance = largest - self.reference;
        // The four lanes of a row move its reference together, and no other row's.
        let near = !fresh || distance >= -REACH;
        if warp_vote_any(FULL_MASK, distance > SLACK || !near) {
            let largest = max(largest, warp_shuffle_xor(FULL_MASK, largest, 1, 32));
            let largest = max(largest, warp_shuffle_xor(FULL_MASK, largest, 2, 32));
            let reference = moved(self.reference, largest, fresh);
            let factor = exp2_nonpositive(self.reference - reference);
            self.above = if fresh { 0.0 } else { self.above * factor };
            self.reference = reference;
        }
        let mut p = [0f32; 8];
        unroll!(for i in 0..8 {
            p[i] = exp2_nonpositive(above[i] - self.reference);
        });
        let weight = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
        self.above += weight;
        self.estimate = estimated(self.estimate, self.reference, weight, delta);
    }

    /// Ends a block: the logarithm of the head's mass to base two, rounded up.
    #[simt::device]
    pub fn close(&mut self) -> f32 {
        let above = self.above + warp_shuffle_xor(FULL_MASK, self.above, 1, 32);
        let above = above + warp_shuffle_xor(FULL_MASK, above, 2, 32);
        self.above = 0.0;
        mass_above(self.reference, above)
    }

    /// The estimate of the head's mass in all blocks.
    #[simt::device]
    pub fn estimate(self) -> PartialRow {
        let mut all = self.estimate;
        unroll!(for i in 0..2 {
            let reference = warp_shuffle_xor(FULL_MASK, all.reference, 1 << i, 32);
            let sum = warp_shuffle_xor(FULL_MASK, all.sum, 1 << i, 32);
            all = joined(all, PartialRow { reference, sum });
        });
        all
    }
}

/// The larger of two blocks' masses, for [`Total::most`](super::Total::most).
#[inline(always)]
pub fn most_of(most: f32, mass: f32) -> f32 {
    if mass < f32::INFINITY { max(most, mass) } else { most }
}

/// How far above its reference a row's largest score may be, in octaves, before the reference follows it.
pub const SLACK: f32 = 15.0;
/// How far below it that of a block's first tile may be: a block begins with the reference of the one before.
pub const REACH: f32 = 40.0;

/// A row's reference after its largest score of a tile, with which a block may begin.
#[inline(always)]
pub fn moved(reference: f32, largest: f32, fresh: bool) -> f32 {
    let near = !fresh || largest - reference >= -REACH;
    raised(if near { reference } else { PartialRow::EMPTY.reference }, largest)
}

#[inline(always)]
fn raised(reference: f32, largest: f32) -> f32 {
    if largest - reference > SLACK { max(reference, -floor(-largest)) } else { reference }
}

/// log2 of a block's mass of `sum` relative to 2^`reference`, rounded up: at least that of the mass that the
/// sum of these weights would have without rounding. 128 tokens at most: a weight passes 9 roundings, 2^−20
/// of it; weights below 2^−126, which are lost, are 2^−79 of the mass, whose largest is at least
/// 2^−`REACH`; the logarithm and its sum with the reference lose 2^−23 of what is larger.
#[inline(always)]
pub fn mass_above(reference: f32, sum: f32) -> f32 {
    let log = reference + log2(sum);
    canonical_nan(log + fma(simt::math::abs(log), 1.0 / 2_097_152.0, 1.0 / 65536.0))
}

/// An estimate with a tile's `weight` relative to 2^`reference` that has Δ in it, without that. As it was,
/// where that is no number: such a block is kept in any case.
#[inline(always)]
pub fn estimated(of: PartialRow, reference: f32, weight: f32, delta: f32) -> PartialRow {
    const MOST: f32 = 1.0e9;
    let known = delta <= MOST && weight < f32::INFINITY;
    let level = reference - delta;
    let mut all = of;
    if known && level - all.reference > SLACK {
        let reference = raised(all.reference, level);
        all.sum *= exp2_nonpositive(all.reference - reference);
        all.reference = reference;
    }
    let sum = fma(weight, exp2_nonpositive(level - all.reference), all.sum);
    PartialRow { reference: all.reference, sum: if known { sum } else { all.sum } }
}

/// Both together.
#[inline(always)]
pub fn joined(a: PartialRow, b: PartialRow) -> PartialRow {
    let reference = max(a.reference, b.reference);
    let of = |row: PartialRow| row.sum * exp2_nonpositive(row.reference - reference);
    PartialRow { reference, sum: of(a) + of(b) }
}
