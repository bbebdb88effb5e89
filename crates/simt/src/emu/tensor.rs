//! The tensor cores' arithmetic, as measured on compute capability 9.0.
//!
//! One output of an MMA is **one** sum of seventeen terms, the sixteen products and the accumulator:
//! - a product is exact; it is aligned by the sum of its operands' exponents, not by its own normalised one;
//!   a subnormal operand has the smallest normal exponent; the accumulator is aligned by its own;
//! - every term is shifted to the largest alignment and cut off toward zero 25 bits below it; terms that are
//!   zero have no alignment;
//! - the sum of what is left is exact and is rounded toward zero to f32, subnormal results included; beyond
//!   the largest f32 it is an infinity, and a sum that is or becomes zero is +0;
//! - a NaN operand, zero times infinity, and infinities of both signs give the NaN 0x7fffffff.
//!
//! Fitted to, and equal to, 589,824 results of an H100: ordinary and random bit patterns, subnormals, signed
//! zeros, cancellation, overflow, infinities and NaN, for f16 and bf16. `ferrokv check` compares the two on
//! every GPU it runs on.

/// The formats of an MMA's operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// 5 exponent and 10 mantissa bits.
    F16,
    /// 8 exponent and 7 mantissa bits.
    Bf16,
}

/// Bits below the largest alignment that survive it.
const KEPT_BITS: i32 = 25;
/// What a NaN result is.
const NAN: u32 = 0x7fff_ffff;
/// Steps of the contraction.
const DEPTH: usize = 16;

/// One operand: mantissa · 2^(exponent − fraction bits), and what it is if not finite.
#[derive(Clone, Copy, Default)]
struct Operand {
    exponent: i32,
    mantissa: i64,
    infinite: bool,
    nan: bool,
}

fn operand(bits: u16, format: Format) -> Operand {
    let (fraction_bits, bias) = match format {
        Format::F16 => (10, 15),
        Format::Bf16 => (7, 127),
    };
    let exponent = ((bits & 0x7fff) >> fraction_bits) as i32;
    let fraction = (bits & ((1 << fraction_bits) - 1)) as i64;
    let sign = if bits >> 15 == 1 { -1 } else { 1 };
    if exponent == 2 * bias + 1 {
        // The sign lives in the mantissa.
        return Operand { exponent: 0, mantissa: sign, infinite: fraction == 0, nan: fraction != 0 };
    }
    let (exponent, mantissa) =
        if exponent == 0 { (1 - bias, fraction) } else { (exponent - bias, fraction | 1 << fraction_bits) };
    Operand { exponent, mantissa: sign * mantissa, infinite: false, nan: false }
}

/// The terms of one sum.
struct Sum {
    exponents: [i32; DEPTH + 1],
    /// With [`KEPT_BITS`] fraction bits.
    mantissas: [i64; DEPTH + 1],
    terms: usize,
    positive_infinity: bool,
    negative_infinity: bool,
    nan: bool,
}

impl Sum {
    fn new() -> Self {
        Sum {
            exponents: [0; DEPTH + 1],
            mantissas: [0; DEPTH + 1],
            terms: 0,
            positive_infinity: false,
            negative_infinity: false,
            nan: false,
        }
    }

    fn add(&mut self, exponent: i32, mantissa: i64) {
        if mantissa != 0 {
            self.exponents[self.terms] = exponent;
            self.mantissas[self.terms] = mantissa;
            self.terms += 1;
        }
    }

    fn add_infinity(&mut self, negative: bool) {
        self.negative_infinity |= negative;
        self.positive_infinity |= !negative;
    }

    fn result(&self) -> u32 {
        if self.nan || (self.positive_infinity && self.negative_infinity) {
            return NAN;
        }
        if self.positive_infinity || self.negative_infinity {
            return f32::INFINITY.to_bits() | (self.negative_infinity as u32) << 31;
        }
        let (exponents, mantissas) = (&self.exponents[..self.terms], &self.mantissas[..self.terms]);
        let Some(&largest) = exponents.iter().max() else { return 0 };
        let mut sum = 0i64;
        for (exponent, mantissa) in exponents.iter().zip(mantissas) {
            // Division would truncate as well; a shift of the magnitude is quicker.
            let cut = (mantissa.unsigned_abs() >> (largest - exponent).min(63)) as i64;
            sum += if *mantissa < 0 { -cut } else { cut };
        }
        round_toward_zero(sum, largest - KEPT_BITS)
    }
}

/// `value` · 2^`exponent` as an f32's bits, toward zero; a result of zero is +0.
fn round_toward_zero(value: i64, exponent: i32) -> u32 {
    if value == 0 {
        return 0;
    }
    let magnitude = value.unsigned_abs();
    let top = 63 - magnitude.leading_zeros() as i32 + exponent;
    if top > 127 {
        return f32::INFINITY.to_bits() | ((value < 0) as u32) << 31;
    }
    // The last place of an f32 of this size.
    let last = (top - 23).max(-149);
    let shift = last - exponent;
    let mantissa =
        if shift <= 0 { magnitude << -shift } else { magnitude.checked_shr(shift as u32).unwrap_or(0) };
    let bits =
        if top < -126 { mantissa as u32 } else { ((top + 127) as u32) << 23 | (mantissa as u32 & 0x7f_ffff) };
    if bits == 0 { 0 } else { bits | ((value < 0) as u32) << 31 }
}

/// D = A·B + C of one tile: `a` [16 rows, 16], `b` [8 columns, 16], `c` and the result [16 rows, 8 columns],
/// all as bits.
pub fn mma_16x8x16(
    format: Format,
    a: &[[u16; 16]; 16],
    b: &[[u16; 16]; 8],
    c: &[[u32; 8]; 16],
) -> [[u32; 8]; 16] {
    let decode = |bits: &[u16; 16]| bits.map(|x| operand(x, format));
    let a = a.each_ref().map(decode);
    let b = b.each_ref().map(decode);
    // A product has the fraction bits of both operands.
    let to_kept = KEPT_BITS - if format == Format::F16 { 20 } else { 14 };
    let mut d = [[0; 8]; 16];
    for (row, a) in a.iter().enumerate() {
        for (column, b) in b.iter().enumerate() {
            let mut sum = Sum::new();
            for (x, y) in a.iter().zip(b) {
                if x.infinite || y.infinite || x.nan || y.nan {
                    sum.nan |= x.nan || y.nan || x.mantissa == 0 || y.mantissa == 0;
                    sum.add_infinity((x.mantissa < 0) != (y.mantissa < 0));
                } else {
                    sum.add(x.exponent + y.exponent, (x.mantissa * y.mantissa) << to_kept);
                }
            }
            add_accumulator(&mut sum, c[row][column]);
            d[row][column] = sum.result();
        }
    }
    d
}

fn add_accumulator(sum: &mut Sum, bits: u32) {
    let exponent = (bits >> 23 & 0xff) as i32;
    let fraction = (bits & 0x7f_ffff) as i64;
    let signed = |mantissa: i64| if bits >> 31 == 1 { -mantissa } else { mantissa };
    match exponent {
        0xff if fraction != 0 => sum.nan = true,
        0xff => sum.add_infinity(bits >> 31 == 1),
        0 => sum.add(-126, signed(fraction << (KEPT_BITS - 23))),
        _ => sum.add(exponent - 127, signed((fraction | 1 << 23) << (KEPT_BITS - 23))),
    }
}

/// D = A·B + C of one integer tile, modulo 2^32: `a` [16 rows, 32], `b` [8 columns, 32].
pub fn mma_16x8x32(a: &[[i8; 32]; 16], b: &[[i8; 32]; 8], c: &[[u32; 8]; 16]) -> [[u32; 8]; 16] {
    let mut d = *c;
    for (row, a) in a.iter().enumerate() {
        for (column, b) in b.iter().enumerate() {
            // At most 32 · 2^14: no overflow before the accumulator.
            let products: i32 = a.iter().zip(b).map(|(x, y)| *x as i32 * *y as i32).sum();
            d[row][column] = d[row][column].wrapping_add(products as u32);
        }
    }
    d
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    fn one(a: &[(f32, f32)], c: f32) -> u32 {
        let mut rows = [[0; 16]; 16];
        let mut columns = [[0; 16]; 8];
        for (k, (x, y)) in a.iter().enumerate() {
            rows[3][k] = f16::from_f32(*x).to_bits();
            columns[5][k] = f16::from_f32(*y).to_bits();
        }
        let mut acc = [[0; 8]; 16];
        acc[3][5] = c.to_bits();
        mma_16x8x16(Format::F16, &rows, &columns, &acc)[3][5]
    }

    #[test]
    fn small_sums_are_exact() {
        assert_eq!(one(&[(1.5, 2.0), (-0.25, 4.0)], 10.0), 12f32.to_bits());
        assert_eq!(one(&[], -0.0), 0);
        assert_eq!(one(&[(1.0, 1.0), (-1.0, 1.0)], 0.0), 0);
    }

    #[test]
    fn terms_are_cut_off_25_bits_below_the_largest() {
        // 2^-25 is the last bit beside 1: two of them survive and round away toward zero in the f32.
        let tiny = 2f32.powi(-12);
        assert_eq!(one(&[(tiny, 2f32.powi(-13))], 1.0), 1f32.to_bits());
        assert_eq!(one(&[(tiny, tiny), (tiny, tiny)], 1.0), (1.0 + 2f32.powi(-23)).to_bits());
        // 2^-26 is cut off on its own, though eight of them would make 2^-23.
        assert_eq!(one(&[(2f32.powi(-13), 2f32.powi(-13)); 8], 1.0), 1f32.to_bits());
        // Toward zero, not down.
        assert_eq!(one(&[(-2f32.powi(-13), 2f32.powi(-13)); 8], -1.0), (-1f32).to_bits());
    }

    #[test]
    fn what_is_not_finite() {
        assert_eq!(one(&[(f32::INFINITY, 1.0)], 0.0), f32::INFINITY.to_bits());
        assert_eq!(one(&[(f32::INFINITY, -1.0)], 1.0), f32::NEG_INFINITY.to_bits());
        assert_eq!(one(&[(f32::INFINITY, 0.0)], 0.0), NAN);
        assert_eq!(one(&[(f32::INFINITY, 1.0)], f32::NEG_INFINITY), NAN);
        assert_eq!(one(&[(f32::NAN, 1.0)], 0.0), NAN);
        // A product that is cut off beside the largest f32 does not round it up.
        assert_eq!(one(&[(65504.0, 65504.0)], f32::MAX), f32::MAX.to_bits());
    }

    #[test]
    fn beyond_the_largest_is_infinite() {
        // bf16 has f32's exponents: 2^127 · 1 + 2^127.
        let (one, big) = (0x3f80, 0x7f00);
        let mut a = [[0; 16]; 16];
        let mut b = [[0; 16]; 8];
        (a[0][0], b[0][0]) = (big, one);
        let mut c = [[0; 8]; 16];
        c[0][0] = 2f32.powi(127).to_bits();
        assert_eq!(mma_16x8x16(Format::Bf16, &a, &b, &c)[0][0], f32::INFINITY.to_bits());
        c[0][0] |= 1 << 31;
        assert_eq!(mma_16x8x16(Format::Bf16, &a, &b, &c)[0][0], 0);
    }

    #[test]
    fn integers_wrap() {
        let c = [[0x7fff_ffff; 8]; 16];
        let d = mma_16x8x32(&[[-128; 32]; 16], &[[-128; 32]; 8], &c);
        assert_eq!(d[0][0], 0x7fff_ffffu32.wrapping_add(32 << 14));
    }
}
