//! INT8 quantization of slices on the CPU: all cores, SIMD, and the kernels' bits.
//!
//! Row-major bands go to the thread pool; each band's inner loop is compiled for AVX-512, AVX2 and the
//! build's baseline, and the best that the machine has is taken at run time. The arithmetic is that of
//! [`kernels_gpu::int8::quantizer`] in a form that vectorises: tests compare them bit for bit.
//!
//! [`paper`] is the paper's own baseline, for its table.

mod lanes;
pub mod paper;

use super::{Int8Element, Matrix};
use kernels_gpu::int8::TOKENS_PER_BLOCK;
use kernels_gpu::int8::quantizer::scale_from_max;
use rayon::prelude::*;

/// Elements of a band of rows that one task works on: a few hundred KiB, to stay in a core's cache.
const BAND: usize = 64 * 1024;

fn rows_per_band(matrix: Matrix) -> usize {
    (BAND / matrix.channels).max(1)
}

fn check(matrix: Matrix, keys: usize, codes: usize) {
    assert_eq!(keys, matrix.elements(), "the matrix is {matrix}");
    assert_eq!(codes, matrix.elements(), "codes of a matrix of {matrix}");
}

/// Equation (6): `scales` \[D\] of `keys` [T, D].
///
/// # Panics
/// If a slice does not fit the matrix.
pub fn column_scales<T: Int8Element>(keys: &[T], matrix: Matrix, scales: &mut [f32]) {
    check(matrix, keys.len(), keys.len());
    assert_eq!(scales.len(), matrix.channels, "one scale a channel");
    let band = (rows_per_band(matrix) * 8).min(matrix.tokens.div_ceil(rayon::current_num_threads())).max(1);
    let maxima = keys
        .par_chunks(band * matrix.channels)
        .map(|rows| {
            let mut maxima = vec![0f32; matrix.channels];
            lanes::raise_maxima(rows, &mut maxima);
            maxima
        })
        .reduce_with(|mut a, b| {
            lanes::raise_maxima(&b, &mut a);
            a
        });
    for (scale, max) in scales.iter_mut().zip(maxima.iter().flatten()) {
        *scale = scale_from_max::<T>(*max);
    }
}

/// Equation (7): `codes` [T, D] of `keys` [T, D] by `scales` \[D\].
///
/// # Panics
/// If a slice does not fit the matrix.
pub fn quantize<T: Int8Element>(keys: &[T], matrix: Matrix, scales: &[f32], codes: &mut [i8]) {
    check(matrix, keys.len(), codes.len());
    assert_eq!(scales.len(), matrix.channels, "one scale a channel");
    let band = rows_per_band(matrix) * matrix.channels;
    keys.par_chunks(band).zip(codes.par_chunks_mut(band)).for_each(|(keys, codes)| {
        lanes::quantize(keys, scales, codes);
    });
}

/// Equations (6) and (7) for each block of 16 tokens: `scales` [⌈T/16⌉, D] and `codes` [T, D] of `keys` [T,
/// D].
///
/// # Panics
/// If a slice does not fit the matrix.
pub fn quantize_blocks<T: Int8Element>(keys: &[T], matrix: Matrix, scales: &mut [f32], codes: &mut [i8]) {
    check(matrix, keys.len(), codes.len());
    let block = TOKENS_PER_BLOCK as usize * matrix.channels;
    assert_eq!(scales.len(), keys.len().div_ceil(block) * matrix.channels, "one scale a block and channel");
    // As many blocks a task as fit a band.
    let blocks = (BAND / block).max(1);
    let tasks = keys.par_chunks(blocks * block).zip(codes.par_chunks_mut(blocks * block));
    tasks.zip(scales.par_chunks_mut(blocks * matrix.channels)).for_each(|((keys, codes), scales)| {
        let blocks = keys.chunks(block).zip(codes.chunks_mut(block));
        for ((keys, codes), scales) in blocks.zip(scales.chunks_mut(matrix.channels)) {
            lanes::quantize_block(keys, scales, codes);
        }
    });
}

/// Equation (8): `keys` [T, D] of `codes` [T, D] by `scales`, which are \[D\] or [⌈T/16⌉, D].
///
/// # Panics
/// If a slice does not fit the matrix.
pub fn dequantize<T: Int8Element>(codes: &[i8], matrix: Matrix, scales: &[f32], keys: &mut [T]) {
    check(matrix, keys.len(), codes.len());
    let Some(rows_per_scale) = matrix.tokens_per_scale(scales.len()) else {
        panic!("{} scales fit neither the columns nor the blocks of a matrix of {matrix}", scales.len())
    };
    let rows = rows_per_band(matrix).next_multiple_of(TOKENS_PER_BLOCK as usize);
    let band = rows * matrix.channels;
    codes.par_chunks(band).zip(keys.par_chunks_mut(band)).enumerate().for_each(|(index, (codes, keys))| {
        // Rows that share scales are done together: a band begins with a block, and one of columns has one
        // group.
        let group = rows_per_scale.min(rows) * matrix.channels;
        for (part, (codes, keys)) in codes.chunks(group).zip(keys.chunks_mut(group)).enumerate() {
            let row = index * rows + part * rows_per_scale.min(rows);
            let first = row / rows_per_scale * matrix.channels;
            lanes::dequantize(codes, &scales[first..first + matrix.channels], keys);
        }
    });
}

/// The flat index of the first NaN or infinity, if there is one.
pub fn first_nonfinite<T: Int8Element>(keys: &[T]) -> Option<usize> {
    keys.par_iter().position_first(|x| !x.to_f32().is_finite())
}
