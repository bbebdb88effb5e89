//! What a warp accumulates: an online softmax whose weights are the second operand of the product with
//! values.
//!
//! A lane (g, q) has the scores of query row g and tokens 2q, 2q + 1, 2q + 8 and 2q + 9, as the scores'
//! product leaves them and as the product with values wants the weights: nothing is exchanged. What that
//! product gives a lane are two dimensions each of query rows 2q and 2q + 1.

use crate::attention::{Lift, PartialRow, ROWS};
use crate::gtq::decode::ABSENT;
use glam::Vec4;
use simt::math::{exp2_nonpositive, max};
use simt::warp::{FULL_MASK, warp_shuffle_idx, warp_shuffle_xor, warp_vote_any};
use simt::{Shared, convert, tensor, unroll};

/// ⌈log2 n⌉ of an n that is not negative, or a little more; of the smallest ones and 0 that of 2^−26.
#[inline(always)]
pub fn exponent(n: f32) -> f32 {
    let field = n.to_bits() >> 23;
    ((if field < 101 { 101 } else { field }) as i32 - 126) as f32
}

/// The largest weight.
const LARGEST: f32 = 32768.0;
/// How far a score may be above the reference, where n' is so small that its weight is none too large: as far
/// as it is when a reference is raised, 15 and the least [`exponent`], and a rounding.
const FARTHEST: f32 = 41.0;

#[inline(always)]
fn most([a, b, c, d]: [f32; 4]) -> f32 {
    max(max(a, b), max(c, d))
}

/// The p of scores relative to a reference, and the weights. Of a score that is [too large](wanted) they are
/// any numbers.
#[inline(always)]
pub fn weights(scores: [f32; 4], of_values: [f32; 4], reference: f32) -> [[f32; 4]; 2] {
    let p = scores.map(|s| exp2_nonpositive(s - reference));
    let n = of_values;
    [p, [p[0] * n[0], p[1] * n[1], p[2] * n[2], p[3] * n[3]]]
}

/// Whether a lane's scores or weights are too large for the reference.
#[inline(always)]
pub fn wanted(scores: [f32; 4], weights: [f32; 4], reference: f32) -> bool {
    (most(scores.map(|s| s - reference)) > FARTHEST) | (most(weights) > LARGEST)
}

/// What the reference has to suit: the largest s + ⌈log2 n'⌉ of a lane's four tokens.
#[inline(always)]
pub fn largest([s0, s1, s2, s3]: [f32; 4], n: [f32; 4]) -> f32 {
    most([s0 + exponent(n[0]), s1 + exponent(n[1]), s2 + exponent(n[2]), s3 + exponent(n[3])])
}

/// What a warp has of its eight query rows; each lane its share.
pub(super) struct Running {
    /// Σ w·(l' + 1/2) of dimensions 2t and 2t + 1 of unit g (see [`layout`](super::layout)): of the first
    /// for query rows 2q and 2q + 1, then of the second.
    output: [[f32; 4]; 8],
    /// Of row g, as in dense attention.
    pub(super) reference: f32,
    /// This lane's tokens' part of the row's Σ p.
    sum: f32,
}

impl Running {
    /// Nothing yet, of a row that there is or not.
    #[inline(always)]
    pub(super) fn new(present: bool) -> Self {
        let reference = if present { PartialRow::EMPTY.reference } else { ABSENT };
        Running { output: [[0.0; 4]; 8], reference, sum: 0.0 }
    }

    /// Takes a tile's scores and n' in, and gives the weights as the second operand; raises the reference if
    /// it must. A token that does not count has −∞ and 0.
    #[simt::device]
    pub(super) fn weigh<const D: usize>(
        &mut self,
        scores: [f32; 4],
        of_values: [f32; 4],
        lane: u32,
    ) -> [u32; 2] {
        let [mut p, mut w] = weights(scores, of_values, self.reference);
        if warp_vote_any(FULL_MASK, wanted(scores, w, self.reference)) {
            self.raise::<D>(largest(scores, of_values), lane);
            [p, w] = weights(scores, of_values, self.reference);
        }
        self.sum += (p[0] + p[1]) + (p[2] + p[3]);
        [convert::f16x2_from_f32(w[0], w[1]), convert::f16x2_from_f32(w[2], w[3])]
    }

    /// Raises the reference of row g to what suits its four lanes.
    #[simt::device]
    fn raise<const D: usize>(&mut self, largest: f32, lane: u32) {
        let mut new = Lift::to(largest, self.reference);
        new = max(new, warp_shuffle_xor(FULL_MASK, new, 1, 32));
        new = max(new, warp_shuffle_xor(FULL_MASK, new, 2, 32));
        // An exact power of two, or 0 where nothing was accumulated.
        let factor = exp2_nonpositive(self.reference - new);
        self.reference = new;
        self.sum *= factor;
        let q = lane & 3;
        let factors = [0, 4].map(|next| warp_shuffle_idx(FULL_MASK, factor, 8 * q + next, 32));
        unroll!(for t in 0..(D / 16), at_most 8 {
            unroll!(for i in 0..4 {
                self.output[t][i] *= factors[i % 2];
            });
        });
    }

    /// Adds weights times the values of two dimensions.
    #[inline(always)]
    pub(super) fn accumulate(&mut self, t: usize, values: [u32; 4], weights: [u32; 2]) {
        self.output[t] = tensor::mma_f16(values, weights, self.output[t]);
    }

    /// The row's sum, in each of its four lanes.
    #[simt::device]
    pub(super) fn row_sum(&self) -> f32 {
        let sum = self.sum + warp_shuffle_xor(FULL_MASK, self.sum, 1, 32);
        sum + warp_shuffle_xor(FULL_MASK, sum, 2, 32)
    }

    /// Writes Σ w·(l' + 1/2) of the eight rows to `target` [8, D] from element `start` on.
    #[simt::device]
    pub(super) fn store_output<const D: usize>(&self, target: Shared<f32>, start: u32, lane: u32) {
        let (g, q) = (lane >> 2, lane & 3);
        let row = start + 2 * q * D as u32 + g * (D as u32 / 8);
        unroll!(for f in 0..(D / 32), at_most 4 {
            let [a, b] = [self.output[2 * f], self.output[2 * f + 1]];
            unroll!(for i in 0..2 {
                let four = Vec4::new(a[i], a[2 + i], b[i], b[2 + i]);
                target.store_vector(row + i as u32 * D as u32 + 4 * f as u32, four);
            });
        });
    }
}

const _: () = assert!(ROWS == 8, "a lane's row is its number over four");
