//! Arithmetic that rounds outward: steps of f16 that cover a range, and norms that bound.
//!
//! # Norms
//! Squares are summed in f32, a sum of up to 256 terms by at most 20 nested roundings. So a sum is low by at
//! most 20·u of itself (u = 2^−24) plus, where squares underflow, 2·256·2^−150; its root by at most 10·u of
//! itself plus 2^−70. [`norm_bound`] multiplies the root by 1 + 2^−16 = 1 + 256·u, which also pays for the
//! rounding of the root, of the product, of a later sum of two such, and of each term; and adds 2^−70.

use half::f16;
use simt::{convert, math, unroll};

/// The smallest f16 at or above `x >= 0`; infinite past 65504.
#[inline(always)]
pub fn f16_at_or_above(x: f32) -> f16 {
    let nearest = convert::f16_from_f32(x);
    // For positive numbers the next one has the next bits, the infinity after the largest.
    let low = convert::f32_from_f16(nearest) < x;
    f16::from_bits(nearest.to_bits() + low as u16)
}

/// The largest f16 at or below `x`; infinite below −65504.
#[inline(always)]
pub fn f16_at_or_below(x: f32) -> f16 {
    let nearest = convert::f16_from_f32(x);
    let bits = nearest.to_bits();
    // Away from zero for negative numbers (−0 included), towards it for positive ones. +0 is never above x.
    let down = if bits & 0x8000 != 0 { bits.wrapping_add(1) } else { bits.wrapping_sub(1) };
    if convert::f32_from_f16(nearest) > x { f16::from_bits(down) } else { nearest }
}

/// 1/x, and 0 for 0: where the scale is 0 every code is 0.
#[inline(always)]
pub fn reciprocal(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { 1.0 / x }
}

/// The sum of eight squares, in order.
#[inline(always)]
pub fn squares(x: [f32; 8]) -> f32 {
    let mut sum = x[0] * x[0];
    unroll!(for i in 1..8 {
        sum = math::fma(x[i], x[i], sum);
    });
    sum
}

/// An upper bound of a norm from its computed sum of squares: see the module's description.
#[inline(always)]
pub fn norm_bound(sum_of_squares: f32) -> f32 {
    const RELATIVE: f32 = 1.0 + 1.0 / 65536.0;
    const ABSOLUTE: f32 = f32::from_bits((127 - 70) << 23);
    math::fma(math::sqrt(sum_of_squares), RELATIVE, ABSOLUTE)
}

/// A bound that is no number bounds nothing: infinity does.
#[inline(always)]
pub fn bound_or_infinity(x: f32) -> f32 {
    if x <= f32::MAX { x } else { f32::INFINITY }
}
