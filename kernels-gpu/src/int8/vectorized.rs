//! The paper's fourth kernel, `vectorized` (listing 8): four neighbouring elements a thread.
//!
//! # Work split
//! A warp of the f32 kernel reads 512 bytes of keys and 512 of scales and writes 128 bytes of codes. The
//! authors' kernel leaves the columns after the last multiple of 4 unprocessed; here a matrix whose D is no
//! multiple of 4 is taken four rows at a time (see [`quad_rows`](super::quad_rows)), so that every access
//! stays aligned, and the up to three rows left over go element by element.

use super::grid::{Place, Shape, place, quad_rows};
use super::quantizer::{codes_as_f32, dequantize, quantize};
use crate::Element;
use glam::Vec4;
use half::{bf16, f16};
use simt::bits::rem_u32;
use simt::{Global, GlobalMut, bits, kernel, thread};

/// The scales of four neighbouring columns of a quad row.
#[inline(always)]
pub(super) fn four_scales(scales: Global<f32>, column: u32, channels: u32) -> [f32; 4] {
    if channels.is_multiple_of(4) {
        return scales.load_vector_readonly::<Vec4>(column as usize).to_array();
    }
    let scale = |i| scales.load_readonly(rem_u32(column + i, channels) as usize);
    [scale(0), scale(1), scale(2), scale(3)]
}

/// Equation (7), one thread four elements. `keys` [T, D], `scales` \[D\], `codes` [T, D].
#[kernel(system = int8, instances(f32, f16, bf16), args = crate::int8::quantize_naive, max_threads = 256)]
pub fn quantize_vectorized<T: Element>(
    keys: Global<T>,
    scales: Global<f32>,
    codes: GlobalMut<i8>,
    shape: Shape,
) {
    let (_, columns, _) = quad_rows(shape);
    match place(shape, thread::index_1d() as u32, 1) {
        Place::Quad { row, column } => {
            let at = row as usize * columns as usize + column as usize;
            let x = T::load_four(keys, at);
            let s = four_scales(scales, column, shape.channels);
            let code = |i: usize| quantize(x[i], s[i]) as u32;
            codes.store_vector::<u32>(at, bits::pack_low_bytes([code(0), code(1), code(2), code(3)]));
        }
        Place::Rest { index, column } => {
            let scale = scales.load_readonly(column as usize);
            codes.store(index, quantize(keys.load(index).to_f32(), scale) as i8);
        }
        Place::Outside => {}
    }
}

/// Equation (8), one thread four elements. `codes` [T, D], `scales` \[D\], `keys` [T, D].
#[kernel(system = int8, instances(f32, f16, bf16), args = crate::int8::dequantize_naive, max_threads = 256)]
pub fn dequantize_vectorized<T: Element>(
    codes: Global<i8>,
    scales: Global<f32>,
    keys: GlobalMut<T>,
    shape: Shape,
) {
    let (_, columns, _) = quad_rows(shape);
    match place(shape, thread::index_1d() as u32, 1) {
        Place::Quad { row, column } => {
            let at = row as usize * columns as usize + column as usize;
            let c = codes_as_f32(codes.load_vector_streaming::<u32>(at));
            let s = four_scales(scales, column, shape.channels);
            T::store_four(keys, at, [c[0] * s[0], c[1] * s[1], c[2] * s[2], c[3] * s[3]]);
        }
        Place::Rest { index, column } => {
            let scale = scales.load_readonly(column as usize);
            keys.store(index, T::from_f32(dequantize(codes.load(index), scale)));
        }
        Place::Outside => {}
    }
}
