//! A query row as integers of two signed bytes, for the tensor cores' integer products: sums of products are
//! exact, whatever their order.
//!
//! With m = max |x_d|: i_d = round(x_d · 32512 / m) = 256·high + low. An element is off by half of m/32512,
//! an eighth of what f16 would lose of the largest one.

use simt::math::to_i32_nearest_even;

/// The largest integer: 127 bytes' worth, so that high and low bytes are signed.
pub const LARGEST: f32 = 32512.0;

/// What elements are multiplied by to be integers, by the largest of them; 0 for a row of zeros.
#[inline(always)]
pub fn inverse_of(largest: f32) -> f32 {
    if largest == 0.0 { 0.0 } else { LARGEST / largest }
}

/// The integer of an element.
#[inline(always)]
pub fn integer(x: f32, inverse: f32) -> i32 {
    to_i32_nearest_even(x * inverse)
}

/// The high byte and the low one of an integer.
#[inline(always)]
pub const fn halves(integer: i32) -> [i32; 2] {
    let high = (integer + 128) >> 8;
    [high, integer - 256 * high]
}
