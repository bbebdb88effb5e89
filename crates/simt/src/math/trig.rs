//! Sine and cosine of any `f32`, however large.

use super::{NAN_BITS, fma_f64};

/// The sine of `x` radians, for the whole range of `f32`.
///
/// Error: at most 0.502 ULP for every finite `f32` (measured over all of them). ±0 gives ±0; ±∞ and NaN
/// give NaN ([`NAN_BITS`](super::NAN_BITS)).
#[inline(always)]
#[must_use]
pub fn sin(x: f32) -> f32 {
    sin_cos(x).0
}

/// The cosine of `x` radians, for the whole range of `f32`.
///
/// Error: at most 0.502 ULP for every finite `f32` (measured over all of them). ±∞ and NaN give NaN
/// ([`NAN_BITS`](super::NAN_BITS)).
#[inline(always)]
#[must_use]
pub fn cos(x: f32) -> f32 {
    sin_cos(x).1
}

/// The sine and the cosine of `x` radians, in the bits of [`sin`] and [`cos`], for one argument reduction.
///
/// Method: x = k·π/2 + r with |r| hardly above π/4, in `f64`; two polynomials in r of relative error below
/// 2^−33; one rounding to `f32` at the end. The smallest |r| that an `f32` other than 0 can leave is about
/// 2^−30, so that an absolute error of 2^−64 in r is of no account.
#[inline(always)]
#[must_use]
pub fn sin_cos(x: f32) -> (f32, f32) {
    let (r, quadrant) =
        if x.to_bits() & 0x7fff_ffff < SMALL.to_bits() { reduce_small(x) } else { reduce_large(x) };
    let (sine, cosine) = (sin_polynomial(r), cos_polynomial(r));
    let swap = quadrant & 1 != 0;
    let s = if swap { cosine } else { sine };
    let c = if swap { sine } else { cosine };
    let s = if quadrant & 2 != 0 { -s } else { s };
    let c = if quadrant.wrapping_add(1) & 2 != 0 { -c } else { c };
    if x.to_bits() & 0x7fff_ffff < f32::INFINITY.to_bits() {
        (s as f32, c as f32)
    } else {
        (f32::from_bits(NAN_BITS), f32::from_bits(NAN_BITS))
    }
}

/// Below this, k fits an `i32` and π/2 to 109 bits is precise enough.
const SMALL: f32 = 1_073_741_824.0;

/// r and k of x = k·π/2 + r for |x| < [`SMALL`] (Cody and Waite).
///
/// π/2 is the sum of two `f64` with an error of 2^−109, so that k < 2^30 of them are off by less than 2^−79.
/// The first multiply-add rounds with 2^−53 relative to what is left after cancellation, the second one too.
#[inline(always)]
fn reduce_small(x: f32) -> (f64, u32) {
    const TWO_OVER_PI: f64 = core::f64::consts::FRAC_2_PI;
    const PI_2: f64 = core::f64::consts::FRAC_PI_2;
    const PI_2_LOW: f64 = 6.123_233_995_736_766e-17;
    // 1.5 * 2^52: see `nearest_even_i32`.
    const ROUNDER_F64: f64 = 6_755_399_441_055_744.0;

    let x = f64::from(x);
    let t = fma_f64(x, TWO_OVER_PI, ROUNDER_F64);
    let k = t - ROUNDER_F64;
    let r = fma_f64(-k, PI_2_LOW, fma_f64(-k, PI_2, x));
    (r, t.to_bits() as u32)
}

/// The first 224 bits of 2/π after the binary point.
const TWO_OVER_PI_WORDS: [u32; 7] =
    [0xa2f9_836e, 0x4e44_1529, 0xfc27_57d1, 0xf534_ddc0, 0xdb62_9599, 0x3c43_9041, 0xfe51_63ab];

/// r and k modulo 4 of x = k·π/2 + r for |x| >= [`SMALL`] (Payne and Hanek), in integers.
///
/// |x| = m·2^e with a 24-bit integer m. Of x·2/π only the value modulo 4 matters: bits of 2/π whose weight
/// times 2^e is 4 or more are skipped, the next 96 are multiplied by m, and the product modulo 2^96 is
/// |x|·2/π modulo 4, scaled by 2^94 and too small by less than 2^24. Hence r is off by less than 2^−63.
///
/// Infinities and NaN give numbers without meaning.
#[inline(always)]
fn reduce_large(x: f32) -> (f64, u32) {
    // pi/2 * 2^-64.
    const PI_2_SCALED: f64 = 8.515_303_950_216_386e-20;
    const W: [u32; 7] = TWO_OVER_PI_WORDS;

    let bits = x.to_bits();
    let mantissa = u64::from((bits & 0x007f_ffff) | 0x0080_0000);
    // e - 2, the number of bits of 2/pi to skip: 5 to 102.
    let skip = ((bits >> 23) & 0xff).wrapping_sub(152);

    // Selects instead of an indexed table, which would live in memory.
    let by_two = skip & 64 != 0;
    let pair = |a: u32, b: u32| if by_two { b } else { a };
    let v = [pair(W[0], W[2]), pair(W[1], W[3]), pair(W[2], W[4]), pair(W[3], W[5]), pair(W[4], W[6])];
    let by_one = skip & 32 != 0;
    let next = |a: u32, b: u32| if by_one { b } else { a };
    let w = [next(v[0], v[1]), next(v[1], v[2]), next(v[2], v[3]), next(v[3], v[4])];
    let shift = skip & 31;
    let window = |a: u32, b: u32| ((((u64::from(a) << 32) | u64::from(b)) << shift) >> 32) as u32;

    // Three digits of the product modulo 2^96, with carries.
    let low = mantissa * u64::from(window(w[2], w[3]));
    let middle = mantissa * u64::from(window(w[1], w[2])) + (low >> 32);
    let high = mantissa * u64::from(window(w[0], w[1])) + (middle >> 32);
    let top = (high << 32) | (middle & 0xffff_ffff);

    // Two bits of k, then the fraction: read as a signed number, it is the distance to the nearest integer.
    let k = (top.wrapping_add(1 << 61) >> 62) as u32;
    let fraction = ((top << 2) | ((low & 0xffff_ffff) >> 30)) as i64;
    let r = fraction as f64 * PI_2_SCALED;
    if bits >> 31 != 0 { (-r, k.wrapping_neg()) } else { (r, k) }
}

/// sin(r) for |r| up to a little over π/4, relative error below 2^−37.
#[inline(always)]
fn sin_polynomial(r: f64) -> f64 {
    // (sin(r) / r - 1) / r^2 as a polynomial in r^2, lowest power first.
    const C: [f64; 4] = [
        f64::from_bits(0xbfc5_5555_54c7_1e8a),
        f64::from_bits(0x3f81_1110_86a6_f2b5),
        f64::from_bits(0xbf2a_00f7_f320_ff7f),
        f64::from_bits(0x3ec6_cd1f_4a12_da59),
    ];
    let u = r * r;
    let mut p = fma_f64(u, C[3], C[2]);
    p = fma_f64(u, p, C[1]);
    p = fma_f64(u, p, C[0]);
    // In this form -0 stays -0.
    r * fma_f64(u, p, 1.0)
}

/// cos(r) for |r| up to a little over π/4, relative error below 2^−33.
#[inline(always)]
fn cos_polynomial(r: f64) -> f64 {
    // (cos(r) - 1) / r^2 as a polynomial in r^2, lowest power first.
    const C: [f64; 4] = [
        f64::from_bits(0xbfdf_ffff_fcb8_2248),
        f64::from_bits(0x3fa5_5553_c785_10cc),
        f64::from_bits(0xbf56_c07f_14b3_3cda),
        f64::from_bits(0x3ef9_9169_871f_0cab),
    ];
    let u = r * r;
    let mut p = fma_f64(u, C[3], C[2]);
    p = fma_f64(u, p, C[1]);
    p = fma_f64(u, p, C[0]);
    fma_f64(u, p, 1.0)
}
