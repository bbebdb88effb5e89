//! Activations in fixed point: what makes a dot product with quantized weights an integer.
//!
//! # Mathematics
//! A block is 32 neighbouring channels. With m its largest magnitude, E the exponent for which
//! |x| <= m < 2^(E + 1)·(1 − 3·2^−9) holds, and the step t = 2^(E − 20):
//!
//! ```text
//! X_i = round(x_i / t)                 |X_i| <= 2084864 < 2^21, ties to even
//! X_i = 2^14·a_i + 2^7·b_i + c_i       a in −127..=127, b and c in −64..=63
//! ```
//!
//! t is a power of two, so x_i / t is exact and |x_i − t·X_i| <= t/2 <= 2^−20·m: activations keep some 21
//! bits of their block's largest value. t is never below 2^−126; below m = 2^−106 the error is at most
//! 2^−127. A block that holds an infinity or a NaN has X = 0 and t = NaN: what is computed from it is NaN.
//!
//! # Layout
//! A record is 128 bytes for a block of a token: four [`Part`]s of eight channels with three planes of digits
//! each, so that a lane gets all that it needs of eight channels in two loads of 16 bytes. t and u = t·ΣX
//! stand in each part.

use simt::math::{NAN_BITS, nearest_even_i32};
use simt::{Pod, Zeroable};

/// Channels of a block.
pub const BLOCK: u32 = 32;
/// 32-bit words of a block's record.
pub const RECORD_WORDS: u32 = 32;
/// 32-bit words of a part of a record.
pub const PART_WORDS: u32 = 8;

/// Eight channels of a block: see the [module](self).
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Part {
    /// a: digits of weight 2^14.
    pub high: [i8; 8],
    /// b: digits of weight 2^7.
    pub middle: [i8; 8],
    /// c: digits of weight 1.
    pub low: [i8; 8],
    /// t, the step of the block.
    pub step: f32,
    /// u = t·ΣX over the block's 32 channels, rounded twice; infinite if it exceeds f32.
    pub sum: f32,
}

/// A block of 32 channels: part j has channels 8j to 8j + 7.
pub type Record = [Part; 4];

/// A block's step, and what turns values into multiples of it.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// t.
    pub step: f32,
    /// 1/t.
    pub reciprocal: f32,
    /// Whether all of the block's values are finite.
    pub finite: bool,
}

/// The step of a block whose largest magnitude has these bits (the sign bit is 0).
#[inline(always)]
pub fn step(largest: u32) -> Step {
    let finite = largest < f32::INFINITY.to_bits();
    // Rounded up where X might not fit three digits; below 21 the step would be subnormal.
    let exponent = ((largest + 0x1_8000) >> 23).max(21);
    let exponent = if finite { exponent } else { 21 };
    let bits = if finite { (exponent - 20) << 23 } else { NAN_BITS };
    Step { step: f32::from_bits(bits), reciprocal: f32::from_bits((274 - exponent) << 23), finite }
}

impl Step {
    /// X of a value.
    #[inline(always)]
    pub fn fixed(self, x: f32) -> i32 {
        let rounded = nearest_even_i32(x * self.reciprocal);
        if self.finite { rounded } else { 0 }
    }

    /// u of a block with this sum of X.
    #[inline(always)]
    pub fn sum(self, sum: i32) -> f32 {
        if self.finite { self.step * sum as f32 } else { self.step }
    }
}

/// a, b and c of X.
#[inline(always)]
pub fn digits(fixed: i32) -> [i32; 3] {
    let raised = fixed + (64 << 7) + 64;
    [raised >> 14, ((raised >> 7) & 127) - 64, (raised & 127) - 64]
}

/// X of its digits.
#[inline(always)]
pub fn undo_digits([a, b, c]: [i32; 3]) -> i32 {
    (a << 14) + (b << 7) + c
}

/// Bits of the magnitude of `x`: they order like magnitudes, with infinities and NaN above all numbers.
#[inline(always)]
pub fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}
