//! Powers of two.

use super::{ROUNDER, clamp, fma, host_nan, maximum};

/// 2^x for the whole range of `f32`.
///
/// Error, measured over every `f32`: at most 0.608 ULP where the result is normal, 0.766 ULP where it is
/// subnormal (two roundings). Exact for every integer `x`. From 128 up the result is +∞, from −150 down it is
/// +0, NaN gives NaN ([`NAN_BITS`](super::NAN_BITS)).
///
/// Method: x = n + f with n the nearest integer, so |f| <= 1/2 and f is exact. 1 + f·ln2 is kept as a sum of
/// two floats, a polynomial supplies the rest, and two multiplications by powers of two place the exponent:
/// the first is exact, the second rounds once if the result is subnormal.
#[inline(always)]
#[must_use]
pub fn exp2(x: f32) -> f32 {
    // (2^f - 1 - f LN2) / f on [-1/2, 1/2], lowest power first; relative error of 2^f below 2^-28.8.
    const C: [f32; 6] = [
        f32::from_bits(0x32af_7d2b),
        f32::from_bits(0x3e75_fdee),
        f32::from_bits(0x3d63_5774),
        f32::from_bits(0x3c1d_96bf),
        f32::from_bits(0x3aaf_9f4d),
        f32::from_bits(0x3920_ec3c),
    ];
    const LN2: f32 = f32::from_bits(0x3f31_7218);

    let x = clamp(x, -151.0, 129.0);
    let t = x + ROUNDER;
    let f = x - (t - ROUNDER);

    let high = fma(f, LN2, 1.0);
    let low = fma(f, LN2, 1.0 - high);
    let mut q = fma(f, C[5], C[4]);
    q = fma(f, q, C[3]);
    q = fma(f, q, C[2]);
    q = fma(f, q, C[1]);
    q = fma(f, q, C[0]);
    let p = high + fma(f, q, low);

    let n = t.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32;
    let half = n >> 1;
    host_nan(p * power_of_two(half) * power_of_two(n.wrapping_sub(half)))
}

/// 2^n for −127 < n < 128.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// (2^f - 1) / f on [-1/2, 1/2], lowest power first; relative error of 2^f below 2^-28.3. For SIMD versions
/// of [`exp2_nonpositive`].
#[doc(hidden)]
pub const EXP2_COEFFICIENTS: [f32; 6] = [
    f32::from_bits(0x3f31_7218),
    f32::from_bits(0x3e75_fdee),
    f32::from_bits(0x3d63_57bd),
    f32::from_bits(0x3c1d_96e9),
    f32::from_bits(0x3aaf_84a4),
    f32::from_bits(0x3920_bd38),
];

/// The rounding constant carries the exponent bias in its low bits: shifted up, the sum is 2^n.
#[doc(hidden)]
pub const EXP2_ROUNDER: f32 = ROUNDER + 127.0;

/// 2^x for `x <= 0`, in 12 instructions: the one for the inner loop of a softmax.
///
/// - −126.5 < x <= 127: error at most 0.800 ULP, measured over every `f32` there, subnormal results
///   included; exact for integers.
/// - x <= −126.5, −∞ included: exactly +0. This is the only loss against [`exp2`]: exact results up to
///   2^−126.5.
/// - NaN: NaN ([`NAN_BITS`](super::NAN_BITS)).
/// - x > 127: a value without meaning, the same on every machine.
///
/// For `x <= 0` the result lies in [0, 1]. It is not strictly monotonic: neighbouring inputs may give results
/// that are swapped by one ULP.
#[inline(always)]
#[must_use]
pub fn exp2_nonpositive(x: f32) -> f32 {
    const C: [f32; 6] = EXP2_COEFFICIENTS;
    const BIASED_ROUNDER: f32 = EXP2_ROUNDER;

    let x = maximum(x, -127.0);
    let t = x + BIASED_ROUNDER;
    let f = x - (t - BIASED_ROUNDER);
    // 2^n for n >= -126; 0 for n = -127.
    let scale = f32::from_bits(t.to_bits() << 23);

    let mut q = fma(f, C[5], C[4]);
    q = fma(f, q, C[3]);
    q = fma(f, q, C[2]);
    q = fma(f, q, C[1]);
    q = fma(f, q, C[0]);
    host_nan(fma(f * scale, q, scale))
}
