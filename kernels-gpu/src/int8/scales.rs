//! Equation (6) on the GPU: the paper computes its scales on the CPU, outside its timings.
//!
//! # Work split
//! A thread scans four neighbouring columns of a stretch of rows, eight loads in flight, and raises four words
//! of `maxima` by an atomic maximum. Bit patterns of non-negative floats order as integers do, so the result does
//! not depend on which thread comes first. One more kernel of D threads turns maxima into scales.
//!
//! # Bytes
//! 4·T·D read for f32; 4·D·(number of stretches) in atomics, under 1 % of it for long columns.

use super::grid::{Place, Shape, place, quad_rows};
use super::quantizer::scale_from_max;
use crate::Element;
use half::{bf16, f16};
use simt::bits::rem_u32;
use simt::{Global, GlobalMut, kernel, math, thread, unroll};

/// Raises each of four maxima to the magnitude of a value; NaN does not count.
#[inline(always)]
fn raise(largest: &mut [f32; 4], x: [f32; 4]) {
    unroll!(for i in 0..4 {
        largest[i] = math::max(largest[i], math::abs(x[i]));
    });
}

/// Raises `maxima`\[d\], the bits of an f32 that starts at zero, to max_t |K\[t,d\]|; NaN does not count.
/// `keys` [T, D], `maxima` [D]; each thread scans `rows_per_thread` rows, a multiple of 8.
#[kernel(system = int8, instances(f32, f16, bf16), max_threads = 256)]
pub fn column_maxima<T: Element>(
    keys: Global<T>,
    maxima: GlobalMut<u32>,
    shape: Shape,
    rows_per_thread: u32,
) {
    let (rows, columns, _) = quad_rows(shape);
    match place(shape, thread::index_1d() as u32, rows_per_thread) {
        Place::Quad { row, column } => {
            let end = if row + (rows_per_thread as u64) < rows { row + rows_per_thread as u64 } else { rows };
            let mut largest = [0f32; 4];
            let mut first = row;
            while first + 8 <= end {
                let start = first as usize * columns as usize + column as usize;
                let mut x = [[0f32; 4]; 8];
                unroll!(for r in 0..8 {
                    x[r] = T::load_four(keys, start + r * columns as usize);
                });
                unroll!(for r in 0..8 {
                    raise(&mut largest, x[r]);
                });
                first += 8;
            }
            while first < end {
                raise(&mut largest, T::load_four(keys, first as usize * columns as usize + column as usize));
                first += 1;
            }
            unroll!(for i in 0..4 {
                maxima.atomic_max(rem_u32(column + i as u32, shape.channels) as usize, largest[i].to_bits());
            });
        }
        Place::Rest { index, column } => {
            let x = math::max(0.0, math::abs(keys.load(index).to_f32()));
            maxima.atomic_max(column as usize, x.to_bits());
        }
        Place::Outside => {}
    }
}

/// Turns the maxima of [`column_maxima`](fn@column_maxima) into scales. `maxima` [D], `scales` [D].
#[kernel(system = int8, instances(f32, f16, bf16), max_threads = 256)]
pub fn finish_scales<T: Element>(maxima: Global<u32>, scales: GlobalMut<f32>, channels: u32) {
    let column = thread::index_1d();
    if column < channels as usize {
        scales.store(column, scale_from_max::<T>(f32::from_bits(maxima.load(column))));
    }
}

/// Lowers `first`, which starts at the largest u64, to the flat index of the first element that is NaN or infinite.
/// `keys` [T, D], `first` [1].
#[kernel(system = int8, instances(f32, f16, bf16), max_threads = 256)]
pub fn first_nonfinite<T: Element>(keys: Global<T>, first: GlobalMut<u64>, shape: Shape) {
    let (_, columns, _) = quad_rows(shape);
    let nonfinite = |x: f32| x.to_bits() & 0x7f80_0000 == 0x7f80_0000;
    match place(shape, thread::index_1d() as u32, 1) {
        Place::Quad { row, column } => {
            let at = row as usize * columns as usize + column as usize;
            let x = T::load_four(keys, at);
            unroll!(for i in 0..4 {
                if nonfinite(x[i]) {
                    first.atomic_min(0, (at + i) as u64);
                }
            });
        }
        Place::Rest { index, .. } => {
            if nonfinite(keys.load(index).to_f32()) {
                first.atomic_min(0, index as u64);
            }
        }
        Place::Outside => {}
    }
}
