//! The paper's CPU baseline: one thread, and every loop down the columns of row-major data.
//!
//! The paper's listings 2 to 4 show row-major loops for the codes; the authors' code walks column by column
//! throughout, touching a new cache line with every element, and its speedups over 1,000 are against that.
//! Kept as the yardstick that it was, next to the honest one in [`cpu`](super). Rounding is to nearest even
//! as everywhere here; the authors' is half away from zero.

use crate::int8::{Int8Element, Matrix};
use kernels_gpu::int8::quantizer;

/// Equation (6), column by column (listing 2): `scales` \[D\] of `keys` [T, D].
pub fn column_scales<T: Int8Element>(keys: &[T], matrix: Matrix, scales: &mut [f32]) {
    for (column, scale) in scales.iter_mut().enumerate() {
        let mut largest = 0f32;
        for token in 0..matrix.tokens {
            let magnitude = keys[token * matrix.channels + column].to_f32().abs();
            if magnitude > largest {
                largest = magnitude;
            }
        }
        *scale = quantizer::scale_from_max::<T>(largest);
    }
}

/// Equation (7), column by column: `codes` [T, D].
pub fn quantize<T: Int8Element>(keys: &[T], matrix: Matrix, scales: &[f32], codes: &mut [i8]) {
    for (column, scale) in scales.iter().enumerate() {
        for token in 0..matrix.tokens {
            let at = token * matrix.channels + column;
            codes[at] = quantizer::quantize(keys[at].to_f32(), *scale) as i8;
        }
    }
}

/// Equation (8), column by column: `keys` [T, D].
pub fn dequantize<T: Int8Element>(codes: &[i8], matrix: Matrix, scales: &[f32], keys: &mut [T]) {
    for (column, scale) in scales.iter().enumerate() {
        for token in 0..matrix.tokens {
            let at = token * matrix.channels + column;
            keys[at] = T::from_f32(quantizer::dequantize(codes[at], *scale));
        }
    }
}
