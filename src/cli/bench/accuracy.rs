//! The paper's error columns, and the data they are of.

use super::report::{Accuracy, Subject};
use host::int8::{Int8Element, metrics};
use kernels_gpu::int8::quantizer::error_bound;
use kernels_gpu::mixed;
use rayon::prelude::*;

/// Queries that the attention error is a mean over.
const QUERIES: usize = 4;

/// Value `index` of a fixed stream of U(−1, 1), in steps of 2^−23.
fn uniform(seed: u64, index: u64) -> f32 {
    (mixed(seed, index) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// `count` elements from U(−1, 1), the same on every machine.
pub fn uniform_matrix<T: Int8Element>(seed: u64, count: usize) -> Vec<T> {
    (0..count as u64).into_par_iter().map(|index| T::from_f32(uniform(seed, index))).collect()
}

/// Errors of `restored`, which came from codes by `scales`.
pub fn accuracy<T: Int8Element>(
    subject: Subject,
    original: &[T],
    restored: &[T],
    scales: &[f32],
) -> Accuracy {
    let matrix = subject.matrix;
    let errors = metrics::errors(original, restored, matrix, scales);
    let queries: Vec<f32> = uniform_matrix(2, QUERIES * matrix.channels);
    Accuracy {
        tokens: matrix.tokens,
        channels: matrix.channels,
        dtype: subject.dtype,
        tokens_per_scale: matrix.tokens_per_scale(scales.len()).unwrap_or(matrix.tokens),
        max_error: errors.max_abs,
        bound: scales.iter().map(|scale| error_bound::<T>(*scale)).fold(0.0, f64::max),
        bound_ratio: errors.bound_ratio,
        l2_error: errors.l2,
        mean_error: errors.mean_abs,
        attention_error: metrics::attention_error(&queries, original, restored, matrix),
        queries: QUERIES,
    }
}
