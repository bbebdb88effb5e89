//! Arithmetic that gives the same bits on the GPU and on the CPU.
//!
//! Every function is built from IEEE-754 additions, multiplications, divisions, square roots and fused
//! multiply-adds (all rounding to nearest even), from comparisons and from integer operations, in a fixed
//! order. No function of the platform's mathematics library is involved, and nothing is approximated or
//! flushed to zero by hardware.
//!
//! | function | domain | largest error | instructions on sm_90 |
//! |---|---|---|---|
//! | [`exp2`] | every `f32` | 0.608 ULP; 0.766 ULP for subnormal results | 24 |
//! | [`exp2_nonpositive`] | −126.5 < x <= 127; below, +0 | 0.800 ULP | 12 |
//! | [`log2`] | every `f32` | 0.934 ULP | 40 |
//! | [`sin`], [`cos`] | every `f32` | 0.502 ULP | 54 below 2^30, 86 above; `f64` |
//! | [`sin_cos`] | every `f32` | as [`sin`] and [`cos`] | 63 below 2^30, 94 above; `f64` |
//! | [`rsqrt`] | every `f32` | 1.491 ULP | those of one `sqrt.rn` and one `rcp.rn` |
//! | [`Divisor::divide`] | 2^−102 <= abs(x / s) <= 2^126, special values | none: the bits of `x / s` | 8 |
//!
//! The errors are measured over every input there is, against `f64` (`tests/math_ulp.rs`). Sine and
//! cosine hold their bound up to `f32::MAX`.
//!
//! One ULP is the distance between neighbouring `f32` in the binade of the exact result (2^−149 for subnormal
//! ones).
//!
//! Plain operators are IEEE as well, so a kernel adds and multiplies with `+` and `*`; the one thing they
//! leave open is the bits of a NaN. See [`canonical_nan`].

mod compare;
mod divide;
mod exp2;
mod ieee;
mod log2;
mod trig;

pub use compare::{abs, canonical_nan, clamp, max, maximum, min, minimum};
pub use divide::Divisor;
#[doc(hidden)]
pub use exp2::{EXP2_COEFFICIENTS, EXP2_ROUNDER};
pub use exp2::{exp2, exp2_nonpositive};
pub use ieee::{
    floor, fma, fma_f64, nearest_even_i32, round_ties_even, rsqrt, sqrt, sqrt_f64, to_i32_floor,
    to_i32_nearest_even, to_i32_trunc,
};
pub use log2::log2;
pub use trig::{cos, sin, sin_cos};

/// The bits of the NaN that the functions of this module return: the one that PTX instructions over `f32`
/// give.
pub const NAN_BITS: u32 = 0x7fff_ffff;

/// 1.5·2^23: added to a float of at most 2^22, it rounds to the nearest integer and shows it in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// Turns the NaN of a CPU's arithmetic into the one that the device's arithmetic has already given.
#[inline(always)]
fn host_nan(x: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return x;
    #[cfg(not(target_arch = "nvptx64"))]
    canonical_nan(x)
}
