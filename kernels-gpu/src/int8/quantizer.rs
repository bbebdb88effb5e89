//! The arithmetic of one element: the one source that host and device quantize with.
//!
//! # The error bound
//! Let s be the stored scale, x a value with |x| <= 127·s·(1 + 2^−22) (true of the column that s was made
//! from: max/127 is rounded, and f32's largest two values count as the third), u = 2^−24 and C =
//! rint(RN(x/s)).
//! - RN(x/s) is within 127·(1 + 2^−22)·u of x/s, and C within 1/2 of RN(x/s), so
//!   |x − C·s| <= s·(1/2 + 127·(1 + 2^−22)·u). The clamp to ±127 changes nothing: |x/s| is below 127.5.
//! - The stored K^ = RN(C·s) is within 127·s·u of C·s. Nothing underflows, since s >= 2^−126.
//!
//! Together |x − K^| <= s·(1/2 + 254·(1 + 2^−22)·u) < s/2·(1 + 2^−15), equation (9) with its rounding terms;
//! [`error_bound`] is the right-hand side, plus the rounding of K^ to the element type. The paper's authors
//! clamp at −128 in their code and test to ±1; here both ends are ±127 and the test is equality.

use crate::Element;
use simt::math::{self, Divisor};

/// The largest code.
pub const CODE_MAX: i32 = 127;

/// The scale of a column of zeros: the authors' choice, where the paper would divide 0 by 0.
pub const ZERO_COLUMN_SCALE: f32 = 1.0 / 127.0;

/// 1.5·2^23: adding it to a float of at most 2^22 rounds to the nearest integer, ties to even, and leaves
/// that integer in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// Equation (6): the scale of a column of `T` whose largest magnitude is `max_abs` (NaN counts as 0, ∞ as
/// [`Element::LARGEST`], so that no code restores to an infinity).
///
/// Never below 2^−126: a subnormal scale would be too coarse for (9) (a column of 2^−149 would get scale 0).
#[inline(always)]
pub fn scale_from_max<T: Element>(max_abs: f32) -> f32 {
    if max_abs == 0.0 {
        return ZERO_COLUMN_SCALE;
    }
    math::max(math::min(max_abs, T::LARGEST) / 127.0, f32::MIN_POSITIVE)
}

/// A quotient x/s held to what has a code: clamped to ±127, NaN as 0.
#[inline(always)]
fn clamp_quotient(quotient: f32) -> f32 {
    // NaN first: `max` would make a number of it.
    let quotient = if quotient.is_nan() { 0.0 } else { quotient };
    math::min(math::max(quotient, -127.0), 127.0)
}

/// Equation (7) as the paper's listings do it, with one IEEE division and one conversion.
///
/// The conversion is an instruction of its own on purpose. Storing the low byte of [`quantize_by`]'s word
/// with `st.b8` makes ptxas 13.0 take the addition for a conversion of its own (`F2IP.U8.F32.TRUNC`), which
/// saturates: every code became -1. The lint refuses byte stores of float registers for that reason.
#[inline(always)]
pub fn quantize(x: f32, scale: f32) -> i32 {
    math::to_i32_nearest_even(clamp_quotient(x / scale))
}

/// [`quantize`] for a scale that serves many elements, without a division: a word whose low byte is the code,
/// to be packed with three others by [`simt::bits::pack_low_bytes`].
#[inline(always)]
pub fn quantize_by(x: f32, scale: Divisor) -> u32 {
    (clamp_quotient(scale.divide(x)) + ROUNDER).to_bits()
}

/// Equation (8).
#[inline(always)]
pub fn dequantize(code: i8, scale: f32) -> f32 {
    code as f32 * scale
}

/// The four codes of a word as floats, exactly: byte + 2^23 is a float whose last place is 1.
#[inline(always)]
pub fn codes_as_f32(word: u32) -> [f32; 4] {
    const EXPONENT: u32 = 0x4b00_0000; // 2^23
    let biased = word ^ 0x8080_8080; // code + 128
    let lane = |selector| f32::from_bits(simt::bits::byte_perm(biased, EXPONENT, selector)) - 8_388_736.0;
    [lane(0x7440), lane(0x7441), lane(0x7442), lane(0x7443)]
}

/// The largest |x − K^| that quantizing by `scale` and storing the result as `T` can leave, for any finite x
/// of the column that the scale was made from (or any |x| <= 127·scale). The derivation is in the module's
/// description.
pub fn error_bound<T: Element>(scale: f32) -> f64 {
    let scale = scale as f64;
    let largest = 127.0 * scale * (1.0 + 1.0 / 8_388_608.0);
    scale * 0.5 * (1.0 + 1.0 / 32768.0) + largest * T::HALF_ULP + T::SUBNORMAL_ERROR
}
