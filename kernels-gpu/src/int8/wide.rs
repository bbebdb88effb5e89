//! `wide`: sixteen neighbouring columns of two rows a thread, and 16 bytes of two rows on the way back;
//! beyond the paper.
//!
//! # Why
//! The stores decide, both ways. Moving 16 bytes to 4 is fastest where a thread reads four neighbouring
//! vectors and writes one (`narrow_neighbours`; docs/experiments/001-store-patterns.md): so here, codes are
//! written sixteen at a time. On the way back one or two vectors of 16 bytes a thread, side by side over the
//! warp, are faster than eight (`widen_four`). `vectorized` has one, and finds its place and its scales for
//! four elements only.
//!
//! # Work split
//! A warp of the f32 kernels reads 2048 consecutive bytes of each of two rows and writes 512 bytes of codes
//! of each; on the way back it writes 512 bytes of each of two rows. A thread's 64 bytes of f32 are four
//! loads, all issued before the first is used, which share their lines with the neighbours' in the
//! first-level cache. Stores have no such cache: 32 bytes a lane, in two stores, of four rows took 1.7 times
//! as long as `vectorized`. Quantizing needs D a multiple of 16, the way back one of 8; the plan takes `rows`
//! otherwise.
//!
//! # Bytes
//! f32: 4·T·D read and T·D written, and D scales for every two rows from the caches.

use super::grid::Shape;
use super::quantizer::{codes_as_f32, quantize_by};
use crate::Element;
use crate::element::store_whole;
use glam::{UVec2, UVec4, Vec4};
use half::{bf16, f16};
use simt::bits::{div_u32, rem_u32};
use simt::math::Divisor;
use simt::{Global, GlobalMut, bits, kernel, thread, unroll};

/// Columns of a thread that quantizes; rows are whole multiples.
pub const WIDE_COLUMNS: u32 = 16;
/// What D must be a multiple of on the way back.
pub const WIDE_BACK_COLUMNS: u32 = 8;
/// Rows of a thread, both ways.
pub const WIDE_ROWS: u32 = 2;

/// Columns of a thread on the way back: 16 bytes.
pub const fn wide_back_columns<T: Element>() -> u32 {
    (16 / size_of::<T>()) as u32
}

/// First elements of this thread's two rows and their first column, with `columns` columns a thread; `None`
/// outside the matrix. After the last of an odd number of rows comes the same row again, so that no access is
/// conditional.
#[inline(always)]
fn place(shape: Shape, columns: u32) -> Option<([usize; 2], usize)> {
    let lanes = shape.channels / columns;
    if lanes == 0 {
        return None;
    }
    let thread = thread::index_1d() as u32;
    let row = div_u32(thread, lanes) as u64 * WIDE_ROWS as u64;
    if row >= shape.tokens {
        return None;
    }
    let (column, stride) = ((rem_u32(thread, lanes) * columns) as usize, shape.channels as usize);
    let first = row as usize * stride + column;
    Some(([first, if row + 1 < shape.tokens { first + stride } else { first }], column))
}

#[inline(always)]
fn four_scales(scales: Global<f32>, column: usize) -> [f32; 4] {
    scales.load_vector_readonly::<Vec4>(column).to_array()
}

/// Equation (7), one thread sixteen columns of two rows. `keys` [T, D], `scales` \[D\], `codes` [T, D]; D a
/// multiple of 16.
#[kernel(system = int8, instances(f32, f16, bf16), args = crate::int8::quantize_naive, max_threads = 256)]
pub fn quantize_wide<T: Element>(keys: Global<T>, scales: Global<f32>, codes: GlobalMut<i8>, shape: Shape) {
    let Some((rows, column)) = place(shape, WIDE_COLUMNS) else { return };
    let x = rows.map(|at| T::load_sixteen(keys, at));
    let four = |i: usize| four_scales(scales, column + 4 * i);
    let s = [four(0), four(1), four(2), four(3)];
    let mut words = [[0u32; 4]; WIDE_ROWS as usize];
    unroll!(for four in 0..4 {
        let s = s[four].map(Divisor::new);
        unroll!(for row in 0..2 {
            let code = |i: usize| quantize_by(x[row][four][i], s[i]);
            words[row][four] = bits::pack_low_bytes([code(0), code(1), code(2), code(3)]);
        });
    });
    unroll!(for row in 0..2 {
        store_whole(codes, rows[row], UVec4::from_array(words[row]));
    });
}

/// Equation (8), one thread 16 bytes of two rows. `codes` [T, D], `scales` \[D\], `keys` [T, D]; D a multiple
/// of 8.
#[kernel(system = int8, instances(f32, f16, bf16), args = crate::int8::dequantize_naive, max_threads = 256)]
pub fn dequantize_wide<T: Element>(codes: Global<i8>, scales: Global<f32>, keys: GlobalMut<T>, shape: Shape) {
    let Some((rows, column)) = place(shape, wide_back_columns::<T>()) else { return };
    let four = wide_back_columns::<T>() == 4;
    let words = rows.map(|at| match four {
        true => UVec2::new(codes.load_vector_streaming::<u32>(at), 0),
        false => codes.load_vector_streaming::<UVec2>(at),
    });
    let s = [four_scales(scales, column), if four { [0.0; 4] } else { four_scales(scales, column + 4) }];
    T::store_16_bytes(keys, rows[0], [scaled(words[0].x, s[0]), scaled(words[0].y, s[1])]);
    T::store_16_bytes(keys, rows[1], [scaled(words[1].x, s[0]), scaled(words[1].y, s[1])]);
}

#[inline(always)]
fn scaled(word: u32, s: [f32; 4]) -> [f32; 4] {
    let c = codes_as_f32(word);
    [c[0] * s[0], c[1] * s[1], c[2] * s[2], c[3] * s[3]]
}
