//! The formulas of the paper in f64, written to be obvious: what every implementation is judged by.
//!
//! The oracle rounds the scale to f32, since that is the number stored; everything else is exact or f64.

use super::Matrix;
use kernels_gpu::Element;

/// What the oracle makes of a matrix.
pub struct Quantized {
    /// One scale for each column, or for each block of tokens and column; f32 values.
    pub scales: Vec<f64>,
    /// The quotients K/s that the codes are rounded from.
    pub quotients: Vec<f64>,
    /// Rows that share a scale.
    pub rows_per_scale: usize,
}

/// Equations (6) and (7) with a scale for every `rows_per_scale` rows. NaN counts as 0, infinity as the
/// type's largest.
pub fn quantize<T: Element>(keys: &[T], matrix: Matrix, rows_per_scale: usize) -> Quantized {
    let value = |token: usize, channel: usize| {
        let x = keys[token * matrix.channels + channel].to_f32() as f64;
        if x.is_nan() { 0.0 } else { x.clamp(-(T::LARGEST as f64), T::LARGEST as f64) }
    };
    let mut scales = Vec::new();
    for first in (0..matrix.tokens).step_by(rows_per_scale) {
        let block = first..matrix.tokens.min(first + rows_per_scale);
        for channel in 0..matrix.channels {
            let largest = block.clone().map(|token| value(token, channel).abs()).fold(0.0, f64::max);
            let scale = if largest == 0.0 { 1.0 / 127.0 } else { largest / 127.0 };
            scales.push(scale.max(f32::MIN_POSITIVE as f64) as f32 as f64);
        }
    }
    let mut quotients = Vec::new();
    for token in 0..matrix.tokens {
        for channel in 0..matrix.channels {
            let scale = scales[token / rows_per_scale * matrix.channels + channel];
            quotients.push(value(token, channel) / scale);
        }
    }
    Quantized { scales, quotients, rows_per_scale }
}

impl Quantized {
    /// Whether `code` is a right rounding of the quotient at `index`.
    ///
    /// The implementations round K/s to f32 first, with a relative error of 2^−24, so a quotient that near a
    /// tie may go either way: half an integer is the tie, and |quotient| <= 127.00002.
    pub fn accepts(&self, index: usize, code: i8) -> bool {
        let quotient = self.quotients[index];
        let distance = (quotient.clamp(-127.0, 127.0) - code as f64).abs();
        distance <= 0.5 + quotient.abs() * (1.0 / 16_777_216.0)
    }
}
