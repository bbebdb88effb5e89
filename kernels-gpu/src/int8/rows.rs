//! `rows`: four neighbouring columns of eight rows a thread; beyond the paper.
//!
//! # Why
//! `vectorized` has one load in flight a thread and divides once an element. With eight rows a thread the
//! eight loads are issued before the first is used, and the scales, loaded once, are turned into
//! [`Divisor`]s, whose quotients are those of IEEE division without its cost.
//!
//! # Bytes
//! f32: 4·T·D read and T·D written, and D scales for every eight rows from the L2 cache.

use super::grid::{Place, Shape, place, quad_rows};
use super::quantizer::{codes_as_f32, dequantize, quantize, quantize_by};
use super::vectorized::four_scales;
use crate::Element;
use half::{bf16, f16};
use simt::math::Divisor;
use simt::{Global, GlobalMut, bits, kernel, thread, unroll};

/// Rows that one thread has in flight.
pub const ROWS_PER_THREAD: u32 = 8;

/// Equation (7), one thread four columns of eight rows. `keys` [T, D], `scales` \[D\], `codes` [T, D].
#[kernel(system = int8, instances(f32, f16, bf16), args = crate::int8::quantize_naive, max_threads = 256)]
pub fn quantize_rows<T: Element>(keys: Global<T>, scales: Global<f32>, codes: GlobalMut<i8>, shape: Shape) {
    let (rows, columns, _) = quad_rows(shape);
    match place(shape, thread::index_1d() as u32, ROWS_PER_THREAD) {
        Place::Quad { row, column } => {
            let s = four_scales(scales, column, shape.channels);
            let start = row as usize * columns as usize + column as usize;
            let here = rows - row;
            if here >= ROWS_PER_THREAD as u64 {
                quantize_strip::<T, true>(keys, s, codes, start, columns as usize, here);
            } else {
                quantize_strip::<T, false>(keys, s, codes, start, columns as usize, here);
            }
        }
        Place::Rest { index, column } => {
            let scale = scales.load_readonly(column as usize);
            codes.store(index, quantize(keys.load(index).to_f32(), scale) as i8);
        }
        Place::Outside => {}
    }
}

/// Four columns of `here` rows from element `start` on. With all eight there (`FULL`) no access is
/// conditional: a condition shared by load and store would let the compiler pair them up, one load in flight
/// at a time.
#[inline(always)]
fn quantize_strip<T: Element, const FULL: bool>(
    keys: Global<T>,
    scales: [f32; 4],
    codes: GlobalMut<i8>,
    start: usize,
    stride: usize,
    here: u64,
) {
    let mut x = [[0f32; 4]; ROWS_PER_THREAD as usize];
    unroll!(for r in 0..8 {
        if FULL || (r as u64) < here {
            x[r] = T::load_four(keys, start + r * stride);
        }
    });
    let s = scales.map(Divisor::new);
    unroll!(for r in 0..8 {
        if FULL || (r as u64) < here {
            let code = |i: usize| quantize_by(x[r][i], s[i]);
            let word = bits::pack_low_bytes([code(0), code(1), code(2), code(3)]);
            codes.store_vector_streaming::<u32>(start + r * stride, word);
        }
    });
}

/// Equation (8), one thread four columns of eight rows. `codes` [T, D], `scales` \[D\], `keys` [T, D].
#[kernel(system = int8, instances(f32, f16, bf16), args = crate::int8::dequantize_naive, max_threads = 256)]
pub fn dequantize_rows<T: Element>(codes: Global<i8>, scales: Global<f32>, keys: GlobalMut<T>, shape: Shape) {
    let (rows, columns, _) = quad_rows(shape);
    match place(shape, thread::index_1d() as u32, ROWS_PER_THREAD) {
        Place::Quad { row, column } => {
            let s = four_scales(scales, column, shape.channels);
            let start = row as usize * columns as usize + column as usize;
            let here = rows - row;
            if here >= ROWS_PER_THREAD as u64 {
                dequantize_strip::<T, true>(codes, s, keys, start, columns as usize, here);
            } else {
                dequantize_strip::<T, false>(codes, s, keys, start, columns as usize, here);
            }
        }
        Place::Rest { index, column } => {
            let scale = scales.load_readonly(column as usize);
            keys.store(index, T::from_f32(dequantize(codes.load(index), scale)));
        }
        Place::Outside => {}
    }
}

/// The way back of [`quantize_strip`].
#[inline(always)]
fn dequantize_strip<T: Element, const FULL: bool>(
    codes: Global<i8>,
    s: [f32; 4],
    keys: GlobalMut<T>,
    start: usize,
    stride: usize,
    here: u64,
) {
    let mut words = [0u32; ROWS_PER_THREAD as usize];
    unroll!(for r in 0..8 {
        if FULL || (r as u64) < here {
            words[r] = codes.load_vector_streaming::<u32>(start + r * stride);
        }
    });
    unroll!(for r in 0..8 {
        if FULL || (r as u64) < here {
            let c = codes_as_f32(words[r]);
            T::store_four(keys, start + r * stride, [c[0] * s[0], c[1] * s[1], c[2] * s[2], c[3] * s[3]]);
        }
    });
}
