//! `wide`: eight neighbouring columns of four rows a thread; beyond the paper.
//!
//! # Why
//! As many loads in flight as [`rows`](super::quantize_rows), from half as many rows, and codes that are written and read
//! eight at a time.
//!
//! # Work split
//! A warp of the f32 kernel reads 1024 consecutive bytes of each of four rows and writes 256 bytes of codes. For f32 a
//! thread's 32 bytes are two loads, which share their sectors with the neighbours' in the first-level cache. Only for D a
//! multiple of 8; the plan takes `rows` otherwise.
//!
//! # Bytes
//! f32: 4·T·D read and T·D written, and D scales for every four rows from the L2 cache.

use super::grid::Shape;
use super::quantizer::{codes_as_f32, quantize_by};
use crate::Element;
use crate::element::store_whole;
use glam::{UVec2, Vec4};
use half::{bf16, f16};
use simt::bits::{div_u32, rem_u32};
use simt::math::Divisor;
use simt::{Global, GlobalMut, bits, kernel, thread, unroll};

/// Columns of a thread.
pub const WIDE_COLUMNS: u32 = 8;
/// Rows of a thread.
pub const WIDE_ROWS: u32 = 4;

/// This thread's first row and column; `None` outside the matrix.
#[inline(always)]
fn place(shape: Shape) -> Option<(u64, u32)> {
    let lanes = shape.channels / WIDE_COLUMNS;
    if lanes == 0 {
        return None;
    }
    let thread = thread::index_1d() as u32;
    let row = div_u32(thread, lanes) as u64 * WIDE_ROWS as u64;
    if row < shape.tokens { Some((row, rem_u32(thread, lanes) * WIDE_COLUMNS)) } else { None }
}

#[inline(always)]
fn eight_scales(scales: Global<f32>, column: u32) -> [[f32; 4]; 2] {
    let four = |at: usize| scales.load_vector_readonly::<Vec4>(at).to_array();
    [four(column as usize), four(column as usize + 4)]
}

/// Equation (7), one thread eight columns of four rows. `keys` [T, D], `scales` \[D\], `codes` [T, D]; D a multiple
/// of 8.
#[kernel(system = int8, instances(f32, f16, bf16), max_threads = 256)]
pub fn quantize_wide<T: Element>(keys: Global<T>, scales: Global<f32>, codes: GlobalMut<i8>, shape: Shape) {
    let Some((row, column)) = place(shape) else { return };
    let s = eight_scales(scales, column);
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
            store_whole(codes, start + r * stride, UVec2::new(word(0), word(1)));
        }
    });
}

/// Equation (8), one thread eight columns of four rows. `codes` [T, D], `scales` \[D\], `keys` [T, D]; D a multiple
/// of 8.
#[kernel(system = int8, instances(f32, f16, bf16), max_threads = 256)]
pub fn dequantize_wide<T: Element>(codes: Global<i8>, scales: Global<f32>, keys: GlobalMut<T>, shape: Shape) {
    let Some((row, column)) = place(shape) else { return };
    let s = eight_scales(scales, column);
    let start = row as usize * shape.channels as usize + column as usize;
    let here = shape.tokens - row;
    if here >= WIDE_ROWS as u64 {
        dequantize_strip::<T, true>(codes, s, keys, start, shape.channels as usize, here);
    } else {
        dequantize_strip::<T, false>(codes, s, keys, start, shape.channels as usize, here);
    }
}

/// The way back of [`quantize_strip`].
#[inline(always)]
fn dequantize_strip<T: Element, const FULL: bool>(
    codes: Global<i8>,
    s: [[f32; 4]; 2],
    keys: GlobalMut<T>,
    start: usize,
    stride: usize,
    here: u64,
) {
    let mut words = [UVec2::ZERO; WIDE_ROWS as usize];
    unroll!(for r in 0..4 {
        if FULL || (r as u64) < here {
            words[r] = codes.load_vector_streaming::<UVec2>(start + r * stride);
        }
    });
    unroll!(for r in 0..4 {
        if FULL || (r as u64) < here {
            let four = |word: u32, s: [f32; 4]| {
                let c = codes_as_f32(word);
                [c[0] * s[0], c[1] * s[1], c[2] * s[2], c[3] * s[3]]
            };
            let (at, x) = (start + r * stride, [four(words[r].x, s[0]), four(words[r].y, s[1])]);
            if FULL {
                T::store_eight(keys, at, x);
            } else {
                // Not the same store: the optimizer would share one between the arms, in pieces.
                keys.store_vector_streaming::<T::Four>(at, T::narrow(x[0]));
                keys.store_vector_streaming::<T::Four>(at + 4, T::narrow(x[1]));
            }
        }
    });
}
