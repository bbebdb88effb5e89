//! `fused`: scales and codes of each block of 16 tokens in one read of the keys; beyond the paper.
//!
//! # Why
//! A scale over the whole column (6) needs every token before the first code: two reads of the keys, and
//! nothing may be appended later. With a scale for each block of 16 tokens and channel, a block is quantized
//! the moment it is full, from one read, and the error bound (9) follows the block's own range.
//!
//! # Work split
//! One thread has four neighbouring columns of 16 tokens, 64 values in registers: 16 loads of 16 bytes in
//! flight, no shared memory and no barrier. Where D is no multiple of 4, rows are not aligned for that, and a
//! thread has one column.
//!
//! # Bytes
//! f32: 4·T·D read, T·D codes and 4·D·⌈T/16⌉ scales written: 5.25 bytes an element.

use super::grid::Shape;
use super::quantizer::{codes_as_f32, quantize, quantize_by, scale_from_max};
use crate::Element;
use crate::element::store_whole;
use glam::Vec4;
use half::{bf16, f16};
use simt::bits::{div_u32, rem_u32};
use simt::math::{self, Divisor};
use simt::{Global, GlobalMut, bits, kernel, thread, unroll};

/// Tokens that share a scale.
pub const TOKENS_PER_BLOCK: u32 = 16;

/// Equations (6) and (7) for each block of 16 tokens. `keys` [T, D], `scales` [⌈T/16⌉, D], `codes` [T, D].
#[kernel(system = int8, instances(f32, f16, bf16), max_threads = 128)]
pub fn quantize_fused<T: Element>(
    keys: Global<T>,
    scales: GlobalMut<f32>,
    codes: GlobalMut<i8>,
    shape: Shape,
) {
    if shape.channels.is_multiple_of(4) {
        quantize_lanes::<T, 4>(keys, scales, codes, shape);
    } else {
        quantize_lanes::<T, 1>(keys, scales, codes, shape);
    }
}

/// Equation (8) with the scales of each block of 16 tokens. `codes` [T, D], `scales` [⌈T/16⌉, D], `keys` [T,
/// D].
#[kernel(system = int8, instances(f32, f16, bf16), args = crate::int8::dequantize_naive, max_threads = 128)]
pub fn dequantize_fused<T: Element>(
    codes: Global<i8>,
    scales: Global<f32>,
    keys: GlobalMut<T>,
    shape: Shape,
) {
    if shape.channels.is_multiple_of(4) {
        dequantize_lanes::<T, 4>(codes, scales, keys, shape);
    } else {
        dequantize_lanes::<T, 1>(codes, scales, keys, shape);
    }
}

/// This thread's block of tokens and first column, with `LANES` columns a thread; `None` outside the matrix.
#[inline(always)]
fn block_and_column<const LANES: u32>(shape: Shape) -> Option<(u64, u32)> {
    let per_block = shape.channels / LANES;
    let thread = thread::index_1d() as u32;
    let block = div_u32(thread, per_block) as u64;
    let inside = block * (TOKENS_PER_BLOCK as u64) < shape.tokens;
    if inside { Some((block, rem_u32(thread, per_block) * LANES)) } else { None }
}

#[inline(always)]
fn quantize_lanes<T: Element, const LANES: u32>(
    keys: Global<T>,
    scales: GlobalMut<f32>,
    codes: GlobalMut<i8>,
    shape: Shape,
) {
    let Some((block, column)) = block_and_column::<LANES>(shape) else { return };
    if shape.tokens - block * TOKENS_PER_BLOCK as u64 >= TOKENS_PER_BLOCK as u64 {
        quantize_block::<T, LANES, true>(keys, scales, codes, shape, block, column);
    } else {
        quantize_block::<T, LANES, false>(keys, scales, codes, shape, block, column);
    }
}

/// `LANES` columns of one block of tokens. With all 16 tokens there (`FULL`) no access is conditional, so
/// that all loads are in flight before the first is used.
#[inline(always)]
fn quantize_block<T: Element, const LANES: u32, const FULL: bool>(
    keys: Global<T>,
    scales: GlobalMut<f32>,
    codes: GlobalMut<i8>,
    shape: Shape,
    block: u64,
    column: u32,
) {
    let first = block * TOKENS_PER_BLOCK as u64;
    let stride = shape.channels as usize;
    let start = first as usize * stride + column as usize;

    let mut x = [[0f32; 4]; TOKENS_PER_BLOCK as usize];
    unroll!(for t in 0..16 {
        if FULL || first + (t as u64) < shape.tokens {
            let at = start + t * stride;
            if LANES == 4 {
                x[t] = T::load_four(keys, at);
            } else {
                x[t][0] = keys.load_streaming(at).to_f32();
            }
        }
    });
    let mut largest = [0f32; 4];
    unroll!(for t in 0..16 {
        unroll!(for i in 0..LANES as usize, at_most 4 {
            largest[i] = math::max(largest[i], math::abs(x[t][i]));
        });
    });
    let s = largest.map(scale_from_max::<T>);
    let scale_at = block as usize * stride + column as usize;
    if LANES == 4 {
        store_whole(scales, scale_at, Vec4::from_array(s));
    } else {
        scales.store(scale_at, s[0]);
    }
    let divisors = s.map(Divisor::new);
    unroll!(for t in 0..16 {
        if FULL || first + (t as u64) < shape.tokens {
            let at = start + t * stride;
            if LANES == 4 {
                let code = |i: usize| quantize_by(x[t][i], divisors[i]);
                let word = bits::pack_low_bytes([code(0), code(1), code(2), code(3)]);
                codes.store_vector::<u32>(at, word);
            } else {
                codes.store(at, quantize(x[t][0], s[0]) as i8);
            }
        }
    });
}

#[inline(always)]
fn dequantize_lanes<T: Element, const LANES: u32>(
    codes: Global<i8>,
    scales: Global<f32>,
    keys: GlobalMut<T>,
    shape: Shape,
) {
    let Some((block, column)) = block_and_column::<LANES>(shape) else { return };
    if shape.tokens - block * TOKENS_PER_BLOCK as u64 >= TOKENS_PER_BLOCK as u64 {
        dequantize_block::<T, LANES, true>(codes, scales, keys, shape, block, column);
    } else {
        dequantize_block::<T, LANES, false>(codes, scales, keys, shape, block, column);
    }
}

/// The way back of [`quantize_block`].
#[inline(always)]
fn dequantize_block<T: Element, const LANES: u32, const FULL: bool>(
    codes: Global<i8>,
    scales: Global<f32>,
    keys: GlobalMut<T>,
    shape: Shape,
    block: u64,
    column: u32,
) {
    let first = block * TOKENS_PER_BLOCK as u64;
    let stride = shape.channels as usize;
    let start = first as usize * stride + column as usize;
    let scale_at = block as usize * stride + column as usize;

    let mut words = [0u32; TOKENS_PER_BLOCK as usize];
    unroll!(for t in 0..16 {
        if FULL || first + (t as u64) < shape.tokens {
            let at = start + t * stride;
            words[t] = if LANES == 4 {
                codes.load_vector_streaming::<u32>(at)
            } else {
                codes.load_streaming(at) as u8 as u32
            };
        }
    });
    let s = if LANES == 4 {
        scales.load_vector_streaming::<Vec4>(scale_at).to_array()
    } else {
        [scales.load_streaming(scale_at), 0.0, 0.0, 0.0]
    };
    unroll!(for t in 0..16 {
        if FULL || first + (t as u64) < shape.tokens {
            let at = start + t * stride;
            let c = codes_as_f32(words[t]);
            if LANES == 4 {
                T::store_four(keys, at, [c[0] * s[0], c[1] * s[1], c[2] * s[2], c[3] * s[3]]);
            } else {
                keys.store(at, T::from_f32(c[0] * s[0]));
            }
        }
    });
}
