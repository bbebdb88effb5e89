//! The logarithm to base two.

use super::{NAN_BITS, fma};

/// The logarithm of `x` to base 2, for the whole range of `f32`.
///
/// Error: at most 0.934 ULP for every positive `f32`, subnormal ones included (measured over all of them).
/// Exact for powers of two. ±0 gives −∞, +∞ gives +∞, a negative number or NaN gives NaN
/// ([`NAN_BITS`](super::NAN_BITS)).
///
/// Method: x = 2^e·(1 + r) with 1 + r in [2/3, 4/3), so r is exact. r·log2(e) is kept as a sum of two floats,
/// a polynomial times r² supplies the rest, and an exact sum with e carries its rounding error along.
#[inline(always)]
#[must_use]
pub fn log2(x: f32) -> f32 {
    // (log2(1 + r) - r LOG2_E) / r^2 on [-1/3, 1/3], lowest power first; relative error below 2^-27.6.
    const C: [f32; 9] = [
        f32::from_bits(0xbf38_aa3b),
        f32::from_bits(0x3ef6_3818),
        f32::from_bits(0xbeb8_a9f0),
        f32::from_bits(0x3e93_ceb8),
        f32::from_bits(0xbe76_6854),
        f32::from_bits(0x3e4e_f2dd),
        f32::from_bits(0xbe34_29ef),
        f32::from_bits(0x3e4e_6ef8),
        f32::from_bits(0xbe3d_e209),
    ];
    // log2(e) as the sum of two floats.
    const LOG2_E: f32 = f32::from_bits(0x3fb8_aa3b);
    const LOG2_E_LOW: f32 = f32::from_bits(0x32a5_7060);
    const TWO_THIRDS: u32 = 0x3f2a_aaab;

    let subnormal = x < f32::MIN_POSITIVE;
    let bits = if subnormal { x * 8_388_608.0 } else { x }.to_bits();
    let bias = if subnormal { -23.0 } else { 0.0 };

    let exponent = (bits.wrapping_sub(TWO_THIRDS) as i32) >> 23;
    let r = f32::from_bits(bits.wrapping_sub((exponent as u32) << 23)) - 1.0;
    let e = exponent as f32 + bias;

    let mut s = fma(r, C[8], C[7]);
    s = fma(r, s, C[6]);
    s = fma(r, s, C[5]);
    s = fma(r, s, C[4]);
    s = fma(r, s, C[3]);
    s = fma(r, s, C[2]);
    s = fma(r, s, C[1]);
    s = fma(r, s, C[0]);

    let high = r * LOG2_E;
    let low = fma(r, LOG2_E_LOW, fma(r, LOG2_E, -high));
    let tail = fma(r * r, s, low);
    // e is 0 or larger than |high|, so that `lost` is exactly what the sum rounded away.
    let sum = e + high;
    let lost = high - (sum - e);
    let finite = sum + (lost + tail);

    if x > 0.0 && x < f32::INFINITY {
        finite
    } else if x == 0.0 {
        f32::NEG_INFINITY
    } else if x > 0.0 {
        f32::INFINITY
    } else {
        f32::from_bits(NAN_BITS)
    }
}
