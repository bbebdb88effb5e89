//! How far quantization moved a matrix, summed in f64: an f32 running sum stops growing long before 2^30
//! terms (the paper's L2 errors of its large cases are low by up to a factor of 3 for that reason).

use super::{Int8Element, Matrix};
use kernels_gpu::int8::quantizer::error_bound;
use rayon::prelude::*;

/// Distances between a matrix and what came back from its codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Errors {
    /// The largest |K − K^|.
    pub max_abs: f64,
    /// The largest |K − K^| / bound, with the bound of the element's own scale: sound if at most 1.
    pub bound_ratio: f64,
    /// The square root of the sum of squares.
    pub l2: f64,
    /// The mean |K − K^|.
    pub mean_abs: f64,
}

/// Errors of `restored` [T, D] against `original` [T, D], with the `scales` (\[D\] or [⌈T/16⌉, D]) it was
/// made by. Values that are not finite are left out.
///
/// # Panics
/// If a slice does not fit the matrix.
pub fn errors<T: Int8Element>(original: &[T], restored: &[T], matrix: Matrix, scales: &[f32]) -> Errors {
    assert_eq!(original.len(), matrix.elements());
    assert_eq!(restored.len(), matrix.elements());
    let Some(rows_per_scale) = matrix.tokens_per_scale(scales.len()) else {
        panic!("{} scales fit neither the columns nor the blocks of a matrix of {matrix}", scales.len())
    };
    let bounds: Vec<f64> = scales.iter().map(|scale| error_bound::<T>(*scale)).collect();
    let rows = original.par_chunks(matrix.channels).zip(restored.par_chunks(matrix.channels)).enumerate();
    let sums = rows
        .map(|(row, (original, restored))| {
            let first = row / rows_per_scale * matrix.channels;
            let bounds = &bounds[first..first + matrix.channels];
            let (mut largest, mut ratio, mut squares, mut sum, mut count) = (0f64, 0f64, 0f64, 0f64, 0f64);
            for ((x, y), bound) in original.iter().zip(restored).zip(bounds) {
                let (x, y) = (x.to_f32(), y.to_f32());
                if x.is_finite() {
                    // A finite value that comes back as none is infinitely wrong; `max` would overlook a NaN.
                    let error = if y.is_finite() { (x as f64 - y as f64).abs() } else { f64::INFINITY };
                    largest = largest.max(error);
                    ratio = ratio.max(error / bound);
                    squares += error * error;
                    sum += error;
                    count += 1.0;
                }
            }
            [largest, ratio, squares, sum, count]
        })
        .reduce(|| [0.0; 5], |a, b| [a[0].max(b[0]), a[1].max(b[1]), a[2] + b[2], a[3] + b[3], a[4] + b[4]]);
    Errors {
        max_abs: sums[0],
        bound_ratio: sums[1],
        l2: sums[2].sqrt(),
        mean_abs: if sums[4] == 0.0 { 0.0 } else { sums[3] / sums[4] },
    }
}

/// The paper's attention-score error: the mean over queries and tokens of |q·K\[t\] − q·K^\[t\]|, not divided
/// by √D. `queries` [n, D]; 0 for no query.
///
/// # Panics
/// If a slice does not fit the matrix.
pub fn attention_error<T: Int8Element>(
    queries: &[f32],
    original: &[T],
    restored: &[T],
    matrix: Matrix,
) -> f64 {
    assert!(queries.len().is_multiple_of(matrix.channels));
    assert_eq!(original.len(), matrix.elements());
    assert_eq!(restored.len(), matrix.elements());
    let rows = original.par_chunks(matrix.channels).zip(restored.par_chunks(matrix.channels));
    let sum: f64 = rows
        .map(|(original, restored)| {
            let difference = |i: usize| original[i].to_f32() as f64 - restored[i].to_f32() as f64;
            let dot = |q: &[f32]| q.iter().enumerate().map(|(i, q)| *q as f64 * difference(i)).sum::<f64>();
            queries.chunks_exact(matrix.channels).map(|q| dot(q).abs()).sum::<f64>()
        })
        .sum();
    let scores = matrix.tokens * (queries.len() / matrix.channels);
    if scores == 0 { 0.0 } else { sum / scores as f64 }
}
