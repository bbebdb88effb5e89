//! Query rows as integers.
//!
//! With h = H·S·q and m = max |h_d|: i_d = round(h_d · 32512 / m), two signed bytes a dimension, as
//! [`integers`](crate::attention::integers) says. Where keys are in [parts](super::parts), each part of a
//! query has an m of its own.

use super::parts::PARTS;
use super::rotation::{butterfly, with_signs};
use super::window::{byte_words, largest_of_warp};
use crate::attention::ROWS;
use crate::attention::integers::{integer, inverse_of};
use glam::{UVec2, UVec4, Vec4};
use simt::math::maximum;
use simt::warp::{FULL_MASK, warp_reduce_add_i32, warp_shuffle_xor};
use simt::{Shared, SharedPlan, unroll};

/// Where dimension `d` of a row of `head_dim` is among the operands of keys in parts: the unit, and the byte
/// among the unit's high bytes, of which the low ones are `head_dim / 16` behind.
#[inline(always)]
pub const fn part_operand_of(head_dim: u32, d: u32) -> (u32, u32) {
    let (of_part, of_unit) = (head_dim / PARTS as u32, head_dim / 16);
    let (part, within) = (d / of_part, d % of_part);
    (within / of_unit, 2 * of_unit * part + within % of_unit)
}

/// Eight query rows in shared memory.
#[derive(Clone, Copy)]
pub struct Rows {
    /// Of each unit high and low bytes: [8, 4, D/2].
    bytes: Shared<u8>,
    /// m, of each row or part.
    largest: Shared<f32>,
    /// Σ i_d, likewise.
    sums: Shared<i32>,
}

/// A row as a lane wants it.
#[derive(Clone, Copy)]
pub struct Query {
    /// High bytes of half-steps.
    pub high: [u32; 8],
    /// Low bytes.
    pub low: [u32; 8],
    /// m; then, what N = Σ i·l is multiplied by.
    pub factor: f32,
    /// Σ i / 2; then, that times the factor.
    pub offset: f32,
}

/// The same of a row in parts.
#[derive(Clone, Copy)]
pub struct PartedQuery {
    /// High bytes of a part's dimensions, D/64 words.
    pub high: [[u32; 2]; PARTS],
    /// Low bytes.
    pub low: [[u32; 2]; PARTS],
    /// As of a whole row.
    pub factors: [f32; PARTS],
    /// Likewise.
    pub offsets: [f32; PARTS],
}

impl Rows {
    /// Places them in a block's memory.
    pub const fn place<const D: usize>(plan: &mut SharedPlan, parted: bool) -> Self {
        let scales = if parted { ROWS * PARTS as u32 } else { ROWS };
        Rows { bytes: plan.array(2 * ROWS * D as u32), largest: plan.array(scales), sums: plan.array(scales) }
    }

    /// Turns a row of which a lane has dimensions `x`, and keeps it as row `r`: a warp's work.
    #[simt::device]
    pub fn turn<const D: usize>(self, x: [f32; 4], r: u32, lane: u32) {
        let h = butterfly::<D, 5>(with_signs::<D>(x, lane), lane);
        let inverse = self.scaled::<D, 5>(h, r, lane);
        let d = lane * (D as u32 / 32);
        let (unit, within) = (d / (D as u32 / 4), d % (D as u32 / 4));
        // A half-step of 16 dimensions has four of each unit, those of one selector.
        let sum = self.keep::<D>(h, inverse, (r * 4 + unit) * (D as u32 / 2) + within, D as u32 / 4);
        let sum = warp_reduce_add_i32(FULL_MASK, sum);
        if lane == 0 {
            self.sums.store(r, sum);
        }
    }

    /// The same in parts, of a row whose channels are in their order.
    #[simt::device]
    pub fn turn_parts<const D: usize>(self, x: [f32; 4], r: u32, lane: u32) {
        let h = butterfly::<D, 3>(with_signs::<D>(x, lane), lane);
        let inverse = self.scaled::<D, 3>(h, r, lane);
        let (unit, byte) = part_operand_of(D as u32, lane * (D as u32 / 32));
        let mut sum = self.keep::<D>(h, inverse, (r * 4 + unit) * (D as u32 / 2) + byte, D as u32 / 16);
        unroll!(for stage in 0..3 {
            sum += warp_shuffle_xor(FULL_MASK, sum, 1 << stage, 32);
        });
        if lane & 7 == 0 {
            self.sums.store(r * PARTS as u32 + lane / 8, sum);
        }
    }

    /// Keeps the largest of the lanes that are turned together, and says what makes integers of h.
    #[simt::device]
    fn scaled<const D: usize, const STAGES: usize>(self, h: [f32; 4], r: u32, lane: u32) -> f32 {
        let mut largest = 0f32;
        unroll!(for i in 0..4 {
            if i < D / 32 {
                largest = maximum(largest, simt::math::abs(h[i]));
            }
        });
        if STAGES == 5 {
            largest = largest_of_warp(largest);
        } else {
            unroll!(for stage in 0..STAGES, at_most 5 {
                largest = maximum(largest, warp_shuffle_xor(FULL_MASK, largest, 1 << stage, 32));
            });
        }
        let lanes = 1 << STAGES as u32;
        if lane.is_multiple_of(lanes) {
            self.largest.store((r * 32 + lane) / lanes, largest);
        }
        inverse_of(largest)
    }

    /// Keeps a lane's integers, their low bytes `apart` bytes behind the high ones, and gives their sum.
    #[simt::device]
    fn keep<const D: usize>(self, h: [f32; 4], inverse: f32, to: u32, apart: u32) -> i32 {
        let mut integers = [0i32; 4];
        unroll!(for i in 0..4 {
            if i < D / 32 {
                integers[i] = integer(h[i], inverse);
            }
        });
        let [high, low] = byte_words(integers);
        if D == 128 {
            self.bytes.store_vector(to, high);
            self.bytes.store_vector(to + apart, low);
        } else {
            self.bytes.store_vector(to, high as u16);
            self.bytes.store_vector(to + apart, low as u16);
        }
        (integers[0] + integers[1]) + (integers[2] + integers[3])
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
        Query { high, low, factor: self.largest.load(row), offset: half(self.sums.load(row)) }
    }

    /// The same of a row in parts.
    #[simt::device]
    pub fn load_parts<const D: usize>(self, lane: u32) -> PartedQuery {
        let (row, unit) = (lane >> 2, lane & 3);
        let first = (row * 4 + unit) * (D as u32 / 2);
        let (mut high, mut low) = ([[0u32; 2]; PARTS], [[0u32; 2]; PARTS]);
        unroll!(for p in 0..4 {
            let at = first + p as u32 * (D as u32 / 8);
            if D == 128 {
                let [a, b, c, d] = self.bytes.load_vector::<UVec4>(at).to_array();
                (high[p], low[p]) = ([a, b], [c, d]);
            } else {
                let [a, b] = self.bytes.load_vector::<UVec2>(at).to_array();
                (high[p], low[p]) = ([a, 0], [b, 0]);
            }
        });
        let at = row * PARTS as u32;
        let factors = self.largest.load_vector::<Vec4>(at).to_array();
        let offsets = self.sums.load_vector::<UVec4>(at).to_array().map(|sum| half(sum as i32));
        PartedQuery { high, low, factors, offsets }
    }
}

/// Half of Σ i, exactly: of 128 integers it is below 2^22.
#[inline(always)]
pub fn half(sum: i32) -> f32 {
    sum as f32 * 0.5
}
