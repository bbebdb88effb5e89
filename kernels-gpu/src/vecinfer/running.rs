//! Scores and the online softmax of a warp: see [`attend`](fn@super::attend) for the operands.

use super::Code;
use crate::attention::{Lift, PartialRow, ROWS};
use glam::Vec4;
use simt::math::{exp2_nonpositive, fma, max};
use simt::warp::{FULL_MASK, warp_shuffle_idx, warp_shuffle_xor, warp_vote_any};
use simt::{Shared, bits, convert, tensor, unroll};

/// The reference of a row that there is not: no score is above it, and all weights are 0.
pub(super) const ABSENT: f32 = 1.0e30;

/// q~·k~ of a tile's 16 tokens and eight query rows, as far as it is summed up.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    /// Of tokens 0 to 7 and 8 to 15: the sums over X, in the first two floats, and over Y, in the others.
    x: [[f32; 4]; 2],
    y: [[f32; 4]; 2],
}

impl Scores {
    /// Nothing yet.
    pub(super) const NONE: Self = Scores { x: [[0.0; 4]; 2], y: [[0.0; 4]; 2] };

    /// Adds one unit of keys, of tokens g and g + 8.
    #[simt::device]
    pub(super) fn add<const K: u32>(&mut self, q: &[[u32; 4]; 4], s: usize, units: [[u32; 4]; 2]) {
        unroll!(for h in 0..2 {
            let [a, b, c, d] = units[h];
            if Code::of(K).unit() == 8 {
                self.x[h] = tensor::mma_f16(q[s % 4], [a, b], self.x[h]);
                self.y[h] = tensor::mma_f16(q[s % 4], [c, d], self.y[h]);
            } else if s.is_multiple_of(2) {
                self.x[h] = tensor::mma_f16(q[s / 2], [a, b], self.x[h]);
            } else {
                self.y[h] = tensor::mma_f16(q[s / 2], [a, b], self.y[h]);
            }
        });
    }

    /// Of row g, tokens 2j, 2j + 1, 2j + 8 and 2j + 9.
    #[inline(always)]
    pub(super) fn sums(&self) -> [f32; 4] {
        let of = |h: usize, i: usize| self.x[h][i] + self.y[h][2 + i];
        [of(0, 0), of(0, 1), of(1, 0), of(1, 1)]
    }
}

/// What a warp has accumulated for its eight query rows; each lane its share. Lane (g, j) has the scores of
/// tokens 2j, 2j + 1, 2j + 8 and 2j + 9 of a tile and row g, and the output of rows 2j and 2j + 1.
pub(super) struct Running {
    /// Of two neighbouring pairs of channels of a unit, the first channels, then the second: for both rows
    /// the first pair's, then the second pair's.
    output: [[f32; 4]; 8],
    /// Of row g, as in dense attention.
    pub(super) reference: f32,
    sum: f32,
    scale: f32,
}

impl Running {
    #[inline(always)]
    pub(super) fn new(scale: f32) -> Self {
        Running { output: [[0.0; 4]; 8], reference: PartialRow::EMPTY.reference, sum: 0.0, scale }
    }

    /// The weights of a tile's scores, of which the first `present` tokens count.
    #[simt::device]
    pub(super) fn weigh<const D: usize>(&mut self, scores: [f32; 4], present: u32, j: u32) -> [f32; 4] {
        let mut s = scores;
        unroll!(for i in 0..4 {
            let token = 2 * j + 8 * (i as u32 / 2) + i as u32 % 2;
            s[i] = if token < present { s[i] } else { f32::NEG_INFINITY };
        });
        let mut t = [0f32; 4];
        unroll!(for i in 0..4 {
            t[i] = fma(s[i], self.scale, -self.reference);
        });
        let largest = max(max(t[0], t[1]), max(t[2], t[3]));
        if warp_vote_any(FULL_MASK, Lift::wanted(largest, 0.0)) {
            self.raise::<D>(max(max(s[0], s[1]), max(s[2], s[3])) * self.scale, j);
            unroll!(for i in 0..4 {
                t[i] = fma(s[i], self.scale, -self.reference);
            });
        }
        let p = t.map(exp2_nonpositive);
        self.sum += (p[0] + p[1]) + (p[2] + p[3]);
        p
    }

    /// Raises the references of rows where a lane's largest score, in log2 units, asks for it.
    #[simt::device]
    fn raise<const D: usize>(&mut self, largest: f32, j: u32) {
        let mut new = Lift::to(largest, self.reference);
        new = max(new, warp_shuffle_xor(FULL_MASK, new, 1, 32));
        new = max(new, warp_shuffle_xor(FULL_MASK, new, 2, 32));
        // An exact power of two, or 0 where nothing was accumulated.
        let factor = exp2_nonpositive(self.reference - new);
        self.reference = new;
        self.sum *= factor;
        let of_rows = [0, 1].map(|i| warp_shuffle_idx(FULL_MASK, factor, 4 * (2 * j + i), 32));
        unroll!(for t in 0..(D / 16), at_most 8 {
            unroll!(for i in 0..4 {
                self.output[t][i] *= of_rows[i % 2];
            });
        });
    }

    /// Weights as B operands of 8 tokens: for tokens 0 to 7 that of the first channels of pairs and that of
    /// the second, then for tokens 8 to 15.
    #[inline(always)]
    pub(super) fn eight_by_eight(p: [f32; 4]) -> [[[u32; 2]; 2]; 2] {
        let first = p.map(|p| convert::f16x2_from_f32(p, 0.0));
        let of = |h: usize| {
            let pair = [first[2 * h], first[2 * h + 1]];
            [pair, pair.map(|x| x << 16)]
        };
        [of(0), of(1)]
    }

    /// Adds the values of one unit of the four tokens of a lane: word x has channels 2x and 2x + 1 of it.
    #[simt::device]
    pub(super) fn accumulate_eight<const V: u32>(
        &mut self,
        unit: usize,
        units: [[u32; 4]; 4],
        operands: [[[u32; 2]; 2]; 2],
    ) {
        let pairs = Code::of(V).unit() as usize / 4;
        unroll!(for x in 0..(Code::of(V).unit() as usize / 4), at_most 2 {
            unroll!(for h in 0..2 {
                let (a, b) = (units[2 * h], units[2 * h + 1]);
                let a = [a[2 * x], a[2 * x + 1], b[2 * x], b[2 * x + 1]];
                unroll!(for i in 0..2 {
                    let t = (2 * (unit * pairs + x) + i) % 8;
                    self.output[t] = tensor::mma_f16(a, operands[h][i], self.output[t]);
                });
            });
        });
    }

    /// Weights as a B operand of 16 tokens.
    #[inline(always)]
    pub(super) fn sixteen(p: [f32; 4]) -> [u32; 2] {
        [convert::f16x2_from_f32(p[0], p[1]), convert::f16x2_from_f32(p[2], p[3])]
    }

    /// [`accumulate_eight`](Self::accumulate_eight) of values that may be infinite, which must not meet the
    /// zeros of its operands.
    #[simt::device]
    pub(super) fn accumulate_sixteen<const V: u32>(
        &mut self,
        unit: usize,
        units: [[u32; 4]; 4],
        operand: [u32; 2],
    ) {
        let pairs = Code::of(V).unit() as usize / 4;
        unroll!(for x in 0..(Code::of(V).unit() as usize / 4), at_most 2 {
            unroll!(for i in 0..2 {
                let select = if i == 0 { 0x5410 } else { 0x7632 };
                let of = |h: usize, word: usize| {
                    bits::byte_perm(units[2 * h][word], units[2 * h + 1][word], select)
                };
                let a = [of(0, 2 * x), of(0, 2 * x + 1), of(1, 2 * x), of(1, 2 * x + 1)];
                let t = (2 * (unit * pairs + x) + i) % 8;
                self.output[t] = tensor::mma_f16(a, operand, self.output[t]);
            });
        });
    }

    /// The row's sum, in each of its four lanes.
    #[simt::device]
    pub(super) fn row_sum(&self) -> f32 {
        let sum = self.sum + warp_shuffle_xor(FULL_MASK, self.sum, 1, 32);
        sum + warp_shuffle_xor(FULL_MASK, sum, 2, 32)
    }

    /// Writes Σ p·v of the eight rows to `target` [8, D] from element `start` on.
    #[simt::device]
    pub(super) fn store_output<const D: usize, const V: u32>(
        &self,
        target: Shared<f32>,
        start: u32,
        lane: u32,
    ) {
        let (g, j) = (lane >> 2, lane & 3);
        let unit = Code::of(V).unit();
        // Two neighbouring pairs, four channels, at a time.
        unroll!(for f in 0..(D / 32), at_most 4 {
            let in_unit = 4 * (f as u32 % (unit / 4));
            let channel = unit * (8 * (f as u32 / (unit / 4)) + g) + in_unit;
            let [a, b] = [self.output[2 * f], self.output[2 * f + 1]];
            unroll!(for i in 0..2 {
                let four = Vec4::new(a[i], b[i], a[2 + i], b[2 + i]);
                target.store_vector(start + (2 * j + i as u32) * D as u32 + channel, four);
            });
        });
    }
}

const _: () = assert!(ROWS == 8, "a lane's row is its number over four");
