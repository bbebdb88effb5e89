//! `wide`: eight neighbouring columns of four rows a thread, and 16 bytes of two rows on the way back; beyond the paper.
//!
//! # Why
//! Quantizing: as many loads in flight as [`rows`](super::quantize_rows), from half as many rows, and codes that are
//! written eight at a time. On the way back the stores decide: one or two vectors of 16 bytes a thread, side by side over
//! the warp, are faster than eight (`widen_four` in docs/performance.md). `vectorized` has one, and finds its place and its
//! scales for four elements only.
//!
//! # Work split
//! A warp of the f32 kernels reads 1024 consecutive bytes of each of four rows and writes 256 bytes of codes; on the way
//! back it writes 512 bytes of each of two rows. For f32 a thread's 32 bytes are two loads, which share their sectors with
//! the neighbours' in the first-level cache. Stores have no such cache: 32 bytes a lane, in two stores, of four rows took
//! 1.7 times as long as `vectorized`. Only for D a multiple of 8; the plan takes `rows` otherwise.
//!
//! # Bytes
//! f32: 4·T·D read and T·D written, and D scales for every four rows (back: every two) from the caches.

use super::grid::Shape;
use super::quantizer::{codes_as_f32, quantize_by};
use crate::Element;
use glam::{UVec2, Vec4};
use half::{bf16, f16};
use simt::bits::{div_u32, rem_u32};
use simt::math::Divisor;
use simt::{Global, GlobalMut, bits, kernel, thread, unroll};

/// Columns of a thread that quantizes; rows are whole multiples.
pub const WIDE_COLUMNS: u32 = 8;
/// Rows of a thread that quantizes.
pub const WIDE_ROWS: u32 = 4;
/// Rows of a thread on the way back.
pub const WIDE_BACK_ROWS: u32 = 2;

/// Columns of a thread on the way back: 16 bytes.
pub const fn wide_back_columns<T: Element>() -> u32 {
    (16 / size_of::<T>()) as u32
}

/// First row and column of this thread of `columns` columns and `rows` rows; `None` outside the matrix.
#[inline(always)]
fn place(shape: Shape, columns: u32, rows: u32) -> Option<(u64, u32)> {
    let lanes = shape.channels / columns;
    if lanes == 0 {
        return None;
    }
    let thread = thread::index_1d() as u32;
    let row = div_u32(thread, lanes) as u64 * rows as u64;
    if row < shape.tokens { Some((row, rem_u32(thread, lanes) * columns)) } else { None }
}

#[inline(always)]
fn four_scales(scales: Global<f32>, column: usize) -> [f32; 4] {
    scales.load_vector_readonly::<Vec4>(column).to_array()
}

/// Equation (7), one thread eight columns of four rows. `keys` [T, D], `scales` \[D\], `codes` [T, D]; D a multiple
/// of 8.
#[kernel(system = int8, instances(f32, f16, bf16), max_threads = 256)]
pub fn quantize_wide<T: Element>(keys: Global<T>, scales: Global<f32>, codes: GlobalMut<i8>, shape: Shape) {
    let Some((row, column)) = place(shape, WIDE_COLUMNS, WIDE_ROWS) else { return };
    let s = [four_scales(scales, column as usize), four_scales(scales, column as usize + 4)];
    let start = row as usize * shape.channels as usize + column as usize;
    let here = shape.tokens - row;
    if here >= WIDE_ROWS as u64 {
        quantize_strip::<T, true>(keys, s, codes, start, shape.channels as usize, here);
    } else {
        quantize_strip::<T, false>(keys, s, codes, start, shape.channels as usize, here);
    }
}

/// Eight columns of `here` rows from element `start` on; with all four there (`FULL`) no access is conditional, so that
/// all loads are in flight before the first is used.
#[inline(always)]
fn quantize_strip<T: Element, const FULL: bool>(
    keys: Global<T>,
    scales: [[f32; 4]; 2],
    codes: GlobalMut<i8>,
    start: usize,
    stride: usize,
    here: u64,
) {
    let mut x = [[[0f32; 4]; 2]; WIDE_ROWS as usize];
    unroll!(for r in 0..4 {
        if FULL || (r as u64) < here {
            x[r] = T::load_eight(keys, start + r * stride);
        }
    });
    let s = scales.map(|four| four.map(Divisor::new));
    unroll!(for r in 0..4 {
        if FULL || (r as u64) < here {
            let code = |half: usize, i: usize| quantize_by(x[r][half][i], s[half][i]);
            let word = |h: usize| bits::pack_low_bytes([code(h, 0), code(h, 1), code(h, 2), code(h, 3)]);
            codes.store_vector_streaming::<UVec2>(start + r * stride, UVec2::new(word(0), word(1)));
        }
    });
}

/// Equation (8), one thread 16 bytes of two rows. `codes` [T, D], `scales` \[D\], `keys` [T, D]; D a multiple of 8.
#[kernel(system = int8, instances(f32, f16, bf16), max_threads = 256)]
pub fn dequantize_wide<T: Element>(codes: Global<i8>, scales: Global<f32>, keys: GlobalMut<T>, shape: Shape) {
    let Some((row, column)) = place(shape, wide_back_columns::<T>(), WIDE_BACK_ROWS) else { return };
    let (column, stride) = (column as usize, shape.channels as usize);
    let first = row as usize * stride + column;
    // After the last of an odd number of rows comes the same row again: nothing here is conditional.
    let second = if row + 1 < shape.tokens { first + stride } else { first };
    let four = wide_back_columns::<T>() == 4;
    let words = [first, second].map(|at| match four {
        true => UVec2::new(codes.load_vector_streaming::<u32>(at), 0),
        false => codes.load_vector_streaming::<UVec2>(at),
    });
    let s = [four_scales(scales, column), if four { [0.0; 4] } else { four_scales(scales, column + 4) }];
    T::store_16_bytes(keys, first, [scaled(words[0].x, s[0]), scaled(words[0].y, s[1])]);
    T::store_16_bytes(keys, second, [scaled(words[1].x, s[0]), scaled(words[1].y, s[1])]);
}

#[inline(always)]
fn scaled(word: u32, s: [f32; 4]) -> [f32; 4] {
    let c = codes_as_f32(word);
    [c[0] * s[0], c[1] * s[1], c[2] * s[2], c[3] * s[3]]
}
