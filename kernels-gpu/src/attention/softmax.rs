//! The online softmax of a warp, with a reference that is a power of two.

use super::fragments::{Values, output_dimension, width};
use super::{Half, ROWS};
use simt::math::{exp2_nonpositive, floor, max};
use simt::warp::{FULL_MASK, warp_shuffle_xor, warp_vote_any};
use simt::{Shared, unroll};

/// Probabilities are scaled by 2^15 relative to the row's reference: the largest is at most 32768, and what
/// f16 loses of the small ones is below 2^−39 of it.
const LARGEST_EXPONENT: f32 = 15.0;

/// "No key yet": below every reference, and `exp2` of any difference to it is 0.
const NOTHING: f32 = -1.0e30;

/// When a row's reference is raised, and to what.
#[derive(Clone, Copy, Debug)]
pub struct Lift;

impl Lift {
    /// Whether the largest of some scores is too large for a reference. Asked of the difference itself:
    /// beyond 2^24, where scores are further than 1 apart, `largest - 15` rounds, and a probability of 2^16
    /// would be infinite in f16.
    #[inline(always)]
    pub fn wanted(largest: f32, reference: f32) -> bool {
        largest - reference > LARGEST_EXPONENT
    }

    /// A reference that suits the largest score, no lower than the one there is.
    #[inline(always)]
    pub fn to(largest: f32, reference: f32) -> f32 {
        let lowered = -floor(-largest) - LARGEST_EXPONENT;
        max(if largest - lowered > LARGEST_EXPONENT { largest } else { lowered }, reference)
    }
}

/// What a warp has accumulated for its eight query rows; each lane its share.
///
/// With `r` the row's `reference`, an integer, and `p_t = 2^(s_t − r)`: `sum` is this lane's part of Σ p_t,
/// and the accumulators hold Σ p_t·v_t. As the reference is an integer, raising it multiplies by a power of
/// two: exactly.
pub struct Running {
    /// Accumulators of the output tiles, two of row `g` (probabilities) and two of what their rounding cut
    /// off.
    pub output: [[f32; 4]; 32],
    /// The row's reference, in the units of the scores; the largest score is at most `reference` + 15.
    pub reference: f32,
    /// This lane's tokens' part of the row's sum.
    pub sum: f32,
}

impl Running {
    /// Nothing yet.
    #[inline(always)]
    pub fn new() -> Self {
        Running { output: [[0.0; 4]; 32], reference: NOTHING, sum: 0.0 }
    }

    /// Takes a tile in. `scores` are in log2 units; a token that does not count has −∞. Returns this lane's
    /// part of the tile's sum, relative to the reference as it then is.
    #[simt::device]
    pub fn add<E: Half, const D: usize>(
        &mut self,
        scores: [[f32; 2]; 2],
        values: impl Values<D>,
        lane: u32,
    ) -> f32 {
        let (p, sum) = self.weigh::<D>(scores);
        self.accumulate_weights::<E, D>(p, values, lane);
        sum
    }

    /// Adds weights times values to the output, but not the weights to the sum.
    #[simt::device]
    pub fn accumulate_weights<E: Half, const D: usize>(
        &mut self,
        weights: [f32; 4],
        values: impl Values<D>,
        lane: u32,
    ) {
        self.accumulate::<E, D>(probabilities::<E>(weights), values, lane);
    }

    /// The same of operands that are there: those of [`Values::operands`], D / 64 times eight.
    #[simt::device]
    pub fn accumulate_operands<E: Half, const D: usize>(
        &mut self,
        weights: [f32; 4],
        operands: [[[u32; 2]; 8]; 2],
    ) {
        let a = probabilities::<E>(weights);
        unroll!(for s in 0..(D / 64), at_most 2 {
            unroll!(for e in 0..8 {
                let t = s * 8 + e;
                self.output[t] = E::multiply(a, operands[s][e], self.output[t]);
            });
        });
    }

    /// The weights of a tile's scores, and their sum over this lane's tokens, which is added to the row's;
    /// raises the reference if it must.
    #[simt::device]
    pub fn weigh<const D: usize>(&mut self, scores: [[f32; 2]; 2]) -> ([f32; 4], f32) {
        let [[s0, s1], [s2, s3]] = scores;
        self.raise::<D, 1>([[s0, s1, s2, s3]]);
        let p = self.weights([s0, s1, s2, s3]);
        let sum = (p[0] + p[1]) + (p[2] + p[3]);
        self.sum += sum;
        (p, sum)
    }

    /// Raises the reference where one of the scores is too large for it.
    #[simt::device]
    pub fn raise<const D: usize, const N: usize>(&mut self, scores: [[f32; 4]; N]) {
        let mut largest = f32::NEG_INFINITY;
        unroll!(for i in 0..N, at_most 2 {
            let [s0, s1, s2, s3] = scores[i];
            largest = max(largest, max(max(s0, s1), max(s2, s3)));
        });
        if warp_vote_any(FULL_MASK, Lift::wanted(largest, self.reference)) {
            let mut new = Lift::to(largest, self.reference);
            new = max(new, warp_shuffle_xor(FULL_MASK, new, 1, 32));
            new = max(new, warp_shuffle_xor(FULL_MASK, new, 2, 32));
            self.rescale::<D>(new);
        }
    }

    /// The weights of scores relative to the reference: 0 of −∞.
    #[inline(always)]
    pub fn weights(&self, scores: [f32; 4]) -> [f32; 4] {
        scores.map(|s| exp2_nonpositive(s - self.reference))
    }

    /// Raises the reference of this lane's row; the four lanes of a row agree on it.
    #[inline(always)]
    fn rescale<const D: usize>(&mut self, reference: f32) {
        // An exact power of two, or 0 where nothing was accumulated.
        let factor = exp2_nonpositive(self.reference - reference);
        self.reference = reference;
        self.sum *= factor;
        unroll!(for t in 0..(D / 8), at_most 32 {
            self.output[t] = self.output[t].map(|x| x * factor);
        });
    }

    /// Adds `a`·values to the output.
    #[simt::device]
    pub fn accumulate<E: Half, const D: usize>(&mut self, a: [u32; 4], values: impl Values<D>, lane: u32) {
        unroll!(for s in 0..(D / 8 / width::<D>()), at_most 8 {
            let b = values.operands(s as u32, lane);
            unroll!(for e in 0..(width::<D>()), at_most 8 {
                let t = s * width::<D>() + e;
                self.output[t] = E::multiply(a, b[e], self.output[t]);
            });
        });
    }

    /// [`accumulate_weights`](Self::accumulate_weights) of two times eight rows and values that are loaded
    /// once, for those that want them.
    #[simt::device]
    pub fn accumulate_two<E: Half, const D: usize>(
        both: &mut [Self; 2],
        weights: [[f32; 4]; 2],
        wanted: [bool; 2],
        values: impl Values<D>,
        lane: u32,
    ) {
        let a = weights.map(probabilities::<E>);
        unroll!(for s in 0..(D / 8 / width::<D>()), at_most 8 {
            let b = values.operands(s as u32, lane);
            unroll!(for group in 0..2 {
                if wanted[group] {
                    unroll!(for e in 0..(width::<D>()), at_most 8 {
                        let t = s * width::<D>() + e;
                        both[group].output[t] = E::multiply(a[group], b[e], both[group].output[t]);
                    });
                }
            });
        });
    }

    /// The row's sum, in each of its four lanes.
    #[simt::device]
    pub fn row_sum(&self) -> f32 {
        let sum = self.sum + warp_shuffle_xor(FULL_MASK, self.sum, 1, 32);
        sum + warp_shuffle_xor(FULL_MASK, sum, 2, 32)
    }

    /// Writes Σ p·v of the eight rows to `target` [8, D] from element `start` on.
    #[simt::device]
    pub fn store_output<const D: usize>(&self, target: Shared<f32>, start: u32, lane: u32) {
        let (g, q) = (lane >> 2, lane & 3);
        let row = start + g * D as u32;
        unroll!(for i in 0..2 {
            unroll!(for f in 0..(D / 32), at_most 8 {
                // Four tiles side by side are four dimensions side by side.
                let tile = |e: usize| {
                    let o = self.output[4 * f + e];
                    o[i] + o[2 + i]
                };
                let at = row + output_dimension::<D>(4 * f, 2 * q + i as u32);
                target.store_vector(at, glam::Vec4::new(tile(0), tile(1), tile(2), tile(3)));
            });
        });
    }
}

impl Default for Running {
    fn default() -> Self {
        Self::new()
    }
}

/// The A operand of four probabilities: row `g` rounded, row `g + 8` what rounding cut off.
#[inline(always)]
fn probabilities<E: Half>(p: [f32; 4]) -> [u32; 4] {
    let split = |low: f32, high: f32| {
        let rounded = E::pack(low, high);
        let [a, b] = E::unpack(rounded);
        (rounded, E::pack(low - a, high - b))
    };
    let (h0, l0) = split(p[0], p[1]);
    let (h1, l1) = split(p[2], p[3]);
    [h0, l0, h1, l1]
}

const _: () = assert!(ROWS == 8, "a lane's row is its number over four");
