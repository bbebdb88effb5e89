//! Keys and values as uniform codes of 2 or 4 bits, keys by channel and values by token, after Liu et al.,
//! *KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache*.
//!
//! | kernel | what it does |
//! |---|---|
//! | [`encode`](fn@encode) | keeps new tokens in f16, and quantizes the groups that they complete |
//! | [`attend`](fn@attend) | a step's attention over codes and recent tokens: all heads in one launch |
//! | [`restore`](fn@restore) | tokens of a sequence as they are stored, in f16: for a prompt's attention |
//!
//! # Mathematics
//! Keys have channels that are large in all tokens, values have not. So a *group* that shares a scale is of
//! keys G neighbouring tokens of one channel, and of values G neighbouring channels of one token. With b bits
//! and mn, mx the least and the largest of a group:
//!
//! ```text
//! s = f16((mx − mn)/(2^b − 1))      z = mn
//! code = round(min((x − mn)/s, 2^b − 1)), 0 where s is 0        x^ = f16(code·s + z)
//! ```
//!
//! (x − mn)/s is in f32, ties go to even, and x^ is rounded once. Where s as it is rounded would put x^ of
//! the largest code beyond f16 ([`scale_of`]), the next smaller one is taken.
//!
//! # How far off
//! With u = 2^−11 and τ = 2^−25 (half a unit of f16, relative and below its normal numbers), s differs from
//! (mx − mn)/(2^b − 1) by at most σ = 2·u·s + τ: u·s by rounding, and a unit where the next smaller one is
//! taken. A code that is not cut leaves s/2; one that is leaves at most (2^b − 1)·σ more, by which the range
//! falls short; x^ loses u·|x^| + τ:
//!
//! ```text
//! |x − x^| ≤ s/2 + (2^b − 1)·(2·u·s + τ) + u·|x^| + τ
//! ```
//!
//! (the quotient's own rounding in f32, 2^−23 of a code, is inside the doubled u). A group whose range is too
//! small for a scale has s = 0 and x^ = mn: the same bound with s/2 = 0, as (2^b − 1)·τ is all its range.

mod decode;
mod layout;
mod prompt;
mod tile;
mod write;

pub use decode::{attend, layout as shared_layout};
pub use layout::{Layout, MOST_GROUP, Shape, Side};
pub use prompt::{RESTORE_THREADS, restore};
pub use tile::code_pair;
pub use write::{ENCODE_BYTES, ENCODE_THREADS, EncodeShape, encode};

use half::f16;
use simt::half2::fma_f16x2;
use simt::math::to_i32_nearest_even;
use simt::{bits, convert};

/// Every kernel instance of the system.
#[cfg(not(target_arch = "nvptx64"))]
pub fn kernels() -> impl Iterator<Item = &'static simt::KernelInfo> {
    encode::INSTANCES.iter().chain(attend::INSTANCES).chain(restore::INSTANCES)
}

/// The largest code of so many bits.
#[inline(always)]
pub const fn largest_code(bits: u32) -> u32 {
    (1 << bits) - 1
}

/// An element as it is quantized: what is no number counts as 0, and is reported.
#[inline(always)]
pub fn counted(x: f16) -> f32 {
    if x.to_bits() & 0x7c00 == 0x7c00 { 0.0 } else { convert::f32_from_f16(x) }
}

/// s of a group from `least` to `most`, both f16.
#[inline(always)]
pub fn scale_of(least: f32, most: f32, bits: u32) -> f16 {
    let codes = largest_code(bits);
    let scale = convert::f16_from_f32((most - least) / codes as f32);
    let top = restored(pair_of(codes), twice(scale), twice(convert::f16_from_f32(least)));
    let fits = top & 0x7c00 != 0x7c00;
    if fits { scale } else { f16::from_bits(scale.to_bits() - 1) }
}

/// The code of x in a group.
#[inline(always)]
pub fn code_of(x: f32, scale: f16, least: f32, bits: u32) -> u32 {
    let (s, most) = (convert::f32_from_f16(scale), largest_code(bits) as f32);
    if s == 0.0 {
        return 0;
    }
    let steps = (x - least) / s;
    to_i32_nearest_even(if steps < most { steps } else { most }) as u32
}

/// x^ twice: of two codes that are f16, two scales and two zeros.
#[inline(always)]
pub fn restored(codes: u32, scales: u32, zeros: u32) -> u32 {
    fma_f16x2(codes, scales, zeros)
}

/// A code as f16, twice.
#[inline(always)]
pub fn pair_of(code: u32) -> u32 {
    twice(convert::f16_from_f32(code as f32))
}

/// The same f16 in both halves.
#[inline(always)]
pub fn twice(x: f16) -> u32 {
    bits::byte_perm(x.to_bits() as u32, 0, 0x1010)
}
