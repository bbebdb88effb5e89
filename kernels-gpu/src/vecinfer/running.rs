//! Scores and the online softmax of a warp: see [`attend`](fn@super::attend) for the operands.
//!
//! With g = lane / 4 and j = lane % 4, a lane has scores of row g % R, and output of rows (2j) % R and the
//! next one. Of R = 8 query rows its tokens are 2j, 2j + 1, 2j + 8 and 2j + 9 of a tile, of R = 4 the first
//! two if g < 4 and else the others.

use super::Code;
use crate::attention::{Lift, PartialRow};
use glam::Vec4;
use simt::math::{exp2_nonpositive, max};
use simt::warp::{FULL_MASK, warp_shuffle_idx, warp_shuffle_xor, warp_vote_any};
use simt::{Shared, bits, convert, tensor, unroll};

/// The reference of a row that there is not: no score is above it, and all weights are 0.
pub(super) const ABSENT: f32 = 1.0e30;

/// q~·k~ of a tile's 16 tokens and the query rows, as far as it is summed up.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    /// Of tokens 0 to 7 and 8 to 15: the sums over X, in the first two floats, and over Y, in the others.
    x: [[f32; 4]; 2],
    y: [[f32; 4]; 2],
}

impl Scores {
    /// Nothing yet.
    pub(super) const NONE: Self = Scores { x: [[0.0; 4]; 2], y: [[0.0; 4]; 2] };

    /// Adds four channels of keys, of tokens g and g + 8.
    #[simt::device]
    pub(super) fn add(&mut self, q: &[[u32; 4]; 8], s: usize, units: [[u32; 4]; 2]) {
        unroll!(for h in 0..2 {
            let [a, b, ..] = units[h];
            if s.is_multiple_of(2) {
                self.x[h] = tensor::mma_f16(q[s / 2], [a, b], self.x[h]);
            } else {
                self.y[h] = tensor::mma_f16(q[s / 2], [a, b], self.y[h]);
            }
        });
    }

    /// Of row g % R, tokens 2j, 2j + 1, 2j + 8 and 2j + 9.
    #[inline(always)]
    pub(super) fn sums(&self) -> [f32; 4] {
        let of = |h: usize, i: usize| self.x[h][i] + self.y[h][2 + i];
        [of(0, 0), of(0, 1), of(1, 0), of(1, 1)]
    }
}

/// The same of queries and keys that are whole numbers: exact.
#[derive(Clone, Copy)]
pub(super) struct WholeScores {
    /// Of tokens 0 to 7 and 8 to 15: the sums of high bytes, in the first two, and of low ones.
    sums: [[i32; 4]; 2],
}

impl WholeScores {
    /// Nothing yet.
    pub(super) const NONE: Self = WholeScores { sums: [[0; 4]; 2] };

    /// Adds 32 channels of keys, of tokens g and g + 8: two words of each lane.
    #[simt::device]
    pub(super) fn add(&mut self, q: [u32; 4], words: [[u32; 2]; 2]) {
        unroll!(for h in 0..2 {
            self.sums[h] = tensor::mma_i8(q, words[h], self.sums[h]);
        });
    }

    /// As [`Scores::sums`] has them.
    #[inline(always)]
    pub(super) fn sums(&self) -> [f32; 4] {
        let of = |h: usize, i: usize| whole(self.sums[h][i], self.sums[h][2 + i]) as f32;
        [of(0, 0), of(0, 1), of(1, 0), of(1, 1)]
    }
}

/// The sum of the sums over high bytes and over low ones.
#[inline(always)]
const fn whole(high: i32, low: i32) -> i32 {
    256 * high + low
}

/// Which lane of a warp: g = lane / 4, j = lane % 4.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub g: u32,
    pub j: u32,
}

/// What a warp has accumulated for its query rows; each lane its share.
pub(super) struct Running<const R: usize> {
    /// Of R = 8, of four channels of a unit the first and third, for both rows each, then the second and
    /// fourth. Of R = 4 the first and third if j < 2, else the second and fourth.
    output: [[f32; 4]; 16],
    /// Of the lane's row, as in dense attention.
    pub(super) reference: f32,
    /// Of the lane's tokens.
    sum: f32,
}

impl<const R: usize> Running<R> {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Running { output: [[0.0; 4]; 16], reference: PartialRow::EMPTY.reference, sum: 0.0 }
    }

    /// Token `i` of the lane's, of a tile.
    #[inline(always)]
    fn token(i: usize, place: Place) -> u32 {
        let half = if R == 8 { i as u32 / 2 } else { place.g / 4 };
        8 * half + 2 * place.j + i as u32 % 2
    }

    /// Row `i` of the two that the lane has output of.
    #[inline(always)]
    fn row(i: usize, place: Place) -> u32 {
        (2 * place.j + i as u32) % R as u32
    }

    /// The largest of the lane's tokens'.
    #[inline(always)]
    fn largest(x: [f32; 4]) -> f32 {
        let pair = max(x[0], x[1]);
        if R == 8 { max(pair, max(x[2], x[3])) } else { pair }
    }

    /// The weights of a tile's scores, which times `scale` are in log2 units; of the first `present` tokens.
    /// Of R = 4 there are two.
    #[simt::device]
    pub(super) fn weigh<const D: usize>(
        &mut self,
        scores: [f32; 4],
        scale: f32,
        present: u32,
        place: Place,
    ) -> [f32; 4] {
        let mut s = scores;
        if R == 4 {
            s = if place.g < 4 { [s[0], s[1], 0.0, 0.0] } else { [s[2], s[3], 0.0, 0.0] };
        }
        unroll!(for i in 0..4 {
            s[i] = if Self::token(i, place) < present { s[i] } else { f32::NEG_INFINITY };
        });
        // In two roundings, as the reference is from the first: of scores beyond 2^28 one alone would leave
        // weights that f16 does not hold.
        let mut t = s.map(|s| s * scale - self.reference);
        if warp_vote_any(FULL_MASK, Lift::wanted(Self::largest(t), 0.0)) {
            self.raise::<D>(Self::largest(s) * scale, place);
            t = s.map(|s| s * scale - self.reference);
        }
        let mut p = [0f32; 4];
        unroll!(for i in 0..4 {
            if i < R / 2 {
                p[i] = exp2_nonpositive(t[i]);
            }
        });
        let pair = p[0] + p[1];
        self.sum += if R == 8 { pair + (p[2] + p[3]) } else { pair };
        p
    }

    /// Raises the references of rows where a lane's largest score, in log2 units, asks for it.
    #[simt::device]
    fn raise<const D: usize>(&mut self, largest: f32, place: Place) {
        let mut new = Lift::to(largest, self.reference);
        new = max(new, warp_shuffle_xor(FULL_MASK, new, 1, 32));
        new = max(new, warp_shuffle_xor(FULL_MASK, new, 2, 32));
        if R == 4 {
            new = max(new, warp_shuffle_xor(FULL_MASK, new, 16, 32));
        }
        // An exact power of two, or 0 where nothing was accumulated.
        let factor = exp2_nonpositive(self.reference - new);
        self.reference = new;
        self.sum *= factor;
        let of_rows = [0, 1].map(|i| warp_shuffle_idx(FULL_MASK, factor, 4 * Self::row(i, place), 32));
        unroll!(for t in 0..(D * R / 128), at_most 16 {
            unroll!(for i in 0..4 {
                self.output[t][i] *= of_rows[i % 2];
            });
        });
    }

    /// Weights as B operands of tokens 0 to 7, then of 8 to 15. Of R = 8 that of the first channels of pairs,
    /// then that of the second; of R = 4 one for both.
    #[simt::device]
    pub(super) fn operands(p: [f32; 4], place: Place) -> [[[u32; 2]; 2]; 2] {
        if R == 8 {
            let first = p.map(|p| convert::f16x2_from_f32(p, 0.0));
            let of = |h: usize| {
                let pair = [first[2 * h], first[2 * h + 1]];
                [pair, pair.map(|x| x << 16)]
            };
            return [of(0), of(1)];
        }
        let own = convert::f16x2_from_f32(p[0], p[1]);
        let other = warp_shuffle_xor(FULL_MASK, own, 16, 32);
        let second = place.g >= 4;
        let (low, high) = if second { (other, own) } else { (own, other) };
        // A weight in the half of its channel, zeros in the other.
        let select = if second { [0x1044, 0x3244] } else { [0x4410, 0x4432] };
        let of = |pair: u32| [select.map(|select| bits::byte_perm(pair, 0, select)), [0, 0]];
        [of(low), of(high)]
    }

    /// Adds the values of one unit of the four tokens of a lane's codes: word x has channels 2x and 2x + 1 of
    /// it.
    #[simt::device]
    pub(super) fn accumulate<const V: u32>(
        &mut self,
        unit: usize,
        units: [[u32; 4]; 4],
        operands: [[[u32; 2]; 2]; 2],
    ) {
        let fours = Code::of(V).unit() as usize / 4;
        unroll!(for x in 0..(Code::of(V).unit() as usize / 4), at_most 2 {
            unroll!(for h in 0..2 {
                let (a, b) = (units[2 * h], units[2 * h + 1]);
                let a = [a[2 * x], a[2 * x + 1], b[2 * x], b[2 * x + 1]];
                unroll!(for i in 0..(R / 4), at_most 2 {
                    let t = (R / 4 * (unit * fours + x) + i) % 16;
                    self.output[t] = tensor::mma_f16(a, operands[h][i], self.output[t]);
                });
            });
        });
    }

    /// The row's sum, in each of its lanes.
    #[simt::device]
    pub(super) fn row_sum(&self) -> f32 {
        let sum = self.sum + warp_shuffle_xor(FULL_MASK, self.sum, 1, 32);
        let sum = sum + warp_shuffle_xor(FULL_MASK, sum, 2, 32);
        if R == 4 { sum + warp_shuffle_xor(FULL_MASK, sum, 16, 32) } else { sum }
    }

    /// Writes Σ p·v of the rows to `target` [8, D] from element `start` on, and zeros of rows that there are
    /// not.
    #[simt::device]
    pub(super) fn store_output<const D: usize, const V: u32>(
        &self,
        target: Shared<f32>,
        start: u32,
        place: Place,
    ) {
        let unit = Code::of(V).unit();
        unroll!(for f in 0..(D / 32), at_most 8 {
            // Four channels at a time.
            let in_unit = 4 * (f as u32 % (unit / 4));
            let channel = unit * (8 * (f as u32 / (unit / 4)) + place.g) + in_unit;
            if R == 4 {
                target.store_vector(start + (4 + place.j) * D as u32 + channel, Vec4::ZERO);
            }
            unroll!(for i in 0..2 {
                let at = start + Self::row(i, place) * D as u32 + channel;
                if R == 8 {
                    let [a, b] = [self.output[2 * f], self.output[2 * f + 1]];
                    target.store_vector(at, Vec4::new(a[i], b[i], a[2 + i], b[2 + i]));
                } else {
                    target.store(at + place.j / 2, self.output[f][i]);
                    target.store(at + 2 + place.j / 2, self.output[f][2 + i]);
                }
            });
        });
    }
}
