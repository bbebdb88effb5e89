//! Query rows as integers.
//!
//! With h = H·S·q and m = max |h_d|: i_d = round(h_d · 32512 / m), two signed bytes a dimension, i = 256·high
//! + low. A quotient is off by half of m/32512, an eighth of what f16 would lose of the largest h.

use super::rotation::{butterfly, with_signs};
use crate::attention::{Half, ROWS};
use glam::{UVec2, UVec4};
use half::f16;
use simt::math::{maximum, to_i32_nearest_even};
use simt::warp::{FULL_MASK, warp_reduce_add_i32, warp_shuffle_xor};
use simt::{Global, Shared, SharedPlan, unroll};

/// The largest integer: 127 bytes' worth, so that high and low bytes are signed.
pub const LARGEST: f32 = 32512.0;

/// m, of which h·`LARGEST`/m are the integers, as one of them is.
#[inline(always)]
pub fn integer(h: f32, inverse: f32) -> i32 {
    to_i32_nearest_even(h * inverse)
}

/// The high byte and the low one of an integer.
#[inline(always)]
pub const fn halves(integer: i32) -> [i32; 2] {
    let high = (integer + 128) >> 8;
    [high, integer - 256 * high]
}

/// Where dimension `d` of a lane's unit is among the operands: the half-step, of 16 dimensions, and the byte
/// in its word. Steps are those of `prmt` selectors, as [`super::layout`] has them.
#[inline(always)]
pub const fn operand_of(d: u32) -> (u32, u32) {
    (2 * (2 * (d >> 4) + (d & 1)) + (d >> 3 & 1), d >> 1 & 3)
}

/// Eight query rows in shared memory.
#[derive(Clone, Copy)]
pub struct Rows {
    /// High bytes, then low ones, of each unit: [8, 4, 2, D/4].
    bytes: Shared<u8>,
    /// m.
    largest: Shared<f32>,
    /// Σ i_d.
    sums: Shared<i32>,
}

/// A row as a lane wants it.
#[derive(Clone, Copy)]
pub struct Query {
    /// High bytes of half-steps.
    pub high: [u32; 8],
    /// Low bytes.
    pub low: [u32; 8],
    /// m.
    pub largest: f32,
    /// Σ i_d.
    pub sum: i32,
}

impl Rows {
    /// Places them in a block's memory.
    pub const fn place<const D: usize>(plan: &mut SharedPlan) -> Self {
        Rows { bytes: plan.array(2 * ROWS * D as u32), largest: plan.array(ROWS), sums: plan.array(ROWS) }
    }

    /// Turns row `row` of `queries` [rows, D], or zeros if it is not present, and keeps it as row `r`: a
    /// warp's work.
    #[simt::device]
    pub fn turn<const D: usize>(self, queries: Global<f16>, row: usize, present: bool, r: u32, lane: u32) {
        let each = D as u32 / 32;
        let at = row * D + (lane * each) as usize;
        let mut x = [0f32; 4];
        if present && D == 128 {
            let [low, high] = queries.load_vector_readonly::<UVec2>(at).to_array();
            let ([a, b], [c, d]) = (<f16 as Half>::unpack(low), <f16 as Half>::unpack(high));
            x = [a, b, c, d];
        } else if present {
            [x[0], x[1]] = <f16 as Half>::unpack(queries.load_vector_readonly::<u32>(at));
        }
        let h = butterfly::<D>(with_signs::<D>(x, lane), lane);
        let mut largest = 0f32;
        unroll!(for i in 0..4 {
            if i < D / 32 {
                largest = maximum(largest, simt::math::abs(h[i]));
            }
        });
        unroll!(for stage in 0..5 {
            largest = maximum(largest, warp_shuffle_xor(FULL_MASK, largest, 1 << stage, 32));
        });
        let inverse = inverse_of(largest);
        let mut sum = 0;
        unroll!(for i in 0..4 {
            if i < D / 32 {
                let integer = integer(h[i], inverse);
                sum += integer;
                let [high, low] = halves(integer);
                let d = lane * each + i as u32;
                let (unit, within) = (d / (D as u32 / 4), d % (D as u32 / 4));
                let (half_step, byte) = operand_of(within);
                let to = (r * 4 + unit) * (D as u32 / 2) + 4 * half_step + byte;
                self.bytes.store(to, high as u8);
                self.bytes.store(to + D as u32 / 4, low as u8);
            }
        });
        let sum = warp_reduce_add_i32(FULL_MASK, sum);
        if lane == 0 {
            self.largest.store(r, largest);
            self.sums.store(r, sum);
        }
    }

    /// What a lane wants of its row.
    #[simt::device]
    pub fn load<const D: usize>(self, lane: u32) -> Query {
        let (row, unit) = (lane >> 2, lane & 3);
        let first = (row * 4 + unit) * (D as u32 / 2);
        let (mut high, mut low) = ([0u32; 8], [0u32; 8]);
        unroll!(for part in 0..2 {
            if part < D / 64 {
                let four =
                    |at: u32| self.bytes.load_vector::<UVec4>(first + at + 16 * part as u32).to_array();
                let (highs, lows) = (four(0), four(D as u32 / 4));
                unroll!(for i in 0..4 {
                    high[4 * part + i] = highs[i];
                    low[4 * part + i] = lows[i];
                });
            }
        });
        Query { high, low, largest: self.largest.load(row), sum: self.sums.load(row) }
    }
}

/// What h is multiplied by to be an integer; 0 for a row of zeros.
#[inline(always)]
pub fn inverse_of(largest: f32) -> f32 {
    if largest == 0.0 { 0.0 } else { LARGEST / largest }
}
