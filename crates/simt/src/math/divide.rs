//! Exact division by a number that stays the same for many quotients.

use super::{fma, host_nan};

/// A divisor, prepared so that [`divide`](Divisor::divide) gives the bits of IEEE division in six float
/// instructions and no branch.
///
/// # What is promised
///
/// For any `s`, [`Divisor::new`]`(s).divide(x)` equals `x / s` in every bit when
/// - 2^−102 <= |x / s| <= 2^126 (x and s themselves may be subnormal), or
/// - x is ±0, ±∞ or NaN, or s is ±0, ±∞ or NaN (a NaN result is [`NAN_BITS`](super::NAN_BITS)).
///
/// In between, where |x / s| is under 2^−102 and not 0, the result is some number of magnitude at most
/// 2^−101; where it is over 2^126, some number of magnitude at least 2^125, or an infinity. So the nearest
/// integer of the quotient, or the quotient clamped to any range within ±2^125, is that of IEEE division
/// **for all `x` and `s`**.
///
/// # Why it is exact
///
/// The method is Markstein's (*Computation of elementary functions on the IBM RISC System/6000 processor*,
/// IBM J. Res. Dev. 34, 1990; theorem and proof also in Muller et al., *Handbook of Floating-Point
/// Arithmetic*, the chapter on division with an FMA). Write RN for rounding to nearest even, and let c be the
/// power of two, with the sign of s, that brings s into [1, 2). Multiplication of both s and x by c is exact,
/// since |x·c| lies between |x/s| and 2|x/s|, so take 1 <= s < 2 and write Q = x/s. (A subnormal s ends
/// between 2^−23 and 1; then |x·c| >= 2^−23, and the same holds with other powers of two.) Let u be the
/// distance of neighbouring floats in Q's binade.
///
/// ```text
/// y = RN(1/s)     q0 = RN(x y)     q1 = RN(q0 + r0 y)     q2 = RN(q1 + r1 y)
///                                  r0 = RN(x - q0 s)      r1 = RN(x - q1 s)
/// ```
///
/// 1. |s·y − 1| <= s·2^−25 =: ε, as y lies in [1/2, 1], where neighbours are 2^−24 apart. Hence |q0 − Q| <=
///    2u (but for second-order terms), r0 has a relative error of at most 2^−24, and q0 + r0·y is within
///    u·2^−21 of Q. Its rounding q1 is therefore one of the two floats around Q, and Q itself if Q is a
///    float.
/// 2. So r1 is exact: |x − q1·s| < u·s, a multiple of u·2^−23, takes 24 bits. No bit lies below 2^−149,
///    because
///    |x| >= 2^−102 after scaling.
/// 3. q1 + r1·y = Q + (Q − q1)(s·y − 1) =: z, before rounding. RN(z) = RN(Q) unless a midpoint of two
///    neighbouring floats lies between z and Q or is z. Q is no midpoint (a 25-bit odd number times s is no
///    24-bit number), and its distance d to one is at least u·2^−24/s, as Q is a ratio of integers with
///    denominator s·2^23. With a midpoint that near, |Q − q1| <= u/2 + d, so for the midpoint to be reached
///    d <= (u/2 + d)·ε would be needed, that is 2^−24/s <= d/u <= (ε/2)/(1 − ε), that is
///    4·(1 − s·2^−25) <= s². The largest s is 2 − 2^−23, with s² = 4 − 2^−21 + 2^−46, and the left side is
///    4 − 2^−22 + 2^−46 there: larger. For smaller s the left side grows and the right side shrinks. ∎
///
/// The exception of Markstein's method for an all-ones mantissa concerns how y is computed; here it comes
/// from an IEEE division.
///
/// Zeros keep their sign because the residual is formed as q·s − x and multiplied by −y. Where q0 is infinite
/// or NaN, it is the result already, and shows by the corrections turning into NaN.
#[derive(Clone, Copy, Debug)]
pub struct Divisor {
    /// The power of two, with the divisor's sign, that brings the divisor into [1, 2).
    scale: f32,
    /// The scaled divisor.
    divisor: f32,
    /// Its correctly rounded reciprocal.
    reciprocal: f32,
}

impl Divisor {
    /// Prepares the division by `s`, at the cost of one IEEE division.
    #[inline(always)]
    #[must_use]
    pub fn new(s: f32) -> Self {
        let exponent = (s.to_bits() >> 23) & 0xff;
        // 2^(127 - exponent), as bits. A subnormal s takes the largest scale there is and ends between 2^-23
        // and 1, where nothing underflows either; the scale of the largest numbers is itself subnormal,
        // 2^-127.
        let scale = if exponent >= 254 { 0x0040_0000 } else { (254 - exponent.max(1)) << 23 };
        let scale = f32::from_bits(scale | (s.to_bits() & 0x8000_0000));
        let scaled = s * scale;
        // An infinite divisor has the reciprocal 0; with itself also 0, the residuals stay finite.
        let divisor = if exponent == 255 { 0.0 } else { scaled };
        Self { scale, divisor, reciprocal: 1.0 / scaled }
    }

    /// `x / s`, in the bits of IEEE division where the type's description says so.
    #[inline(always)]
    #[must_use]
    pub fn divide(self, x: f32) -> f32 {
        let x = x * self.scale;
        let q0 = x * self.reciprocal;
        let q1 = self.correct(q0, x);
        let q2 = self.correct(q1, x);
        host_nan(if q2.is_nan() { q0 } else { q2 })
    }

    /// One step towards the quotient: q − (q·s − x)·y.
    #[inline(always)]
    fn correct(self, q: f32, x: f32) -> f32 {
        fma(fma(q, self.divisor, -x), -self.reciprocal, q)
    }
}
