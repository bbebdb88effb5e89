//! The tensor cores' arithmetic: as measured on compute capability 9.0, and as published for others.
//!
//! One output of an MMA on Hopper is **one** sum of seventeen terms, sixteen products and the accumulator:
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
//!
//! Other generations do the same with fewer bits and shorter sums ([`TensorCores`]): the sixteen steps of the
//! contraction are several sums, one after another, and the f32 of one is the accumulator of the next.
//!
//! | generation | targets | bits below the largest alignment | products of one sum | known from |
//! |---|---|---|---|---|
//! | Volta | sm_70, sm_72 | 23 | 4 | publications |
//! | Turing | sm_75 | 24 | 8 | publications |
//! | Ampere, Ada | sm_80 to sm_89 | 24 | 8 | publications |
//! | Hopper, Blackwell | sm_90 to sm_121 | 25 | 16 | an H100; of Blackwell publications |
//!
//! The publications are MMA-Sim (arXiv 2511.10909) and "Accurate Models of NVIDIA Tensor Cores" (arXiv
//! 2512.07004). Of the generations that are known from these alone no GPU was at hand: those rows are **not
//! verified** here. The instruction is one of sm_80; for Volta and Turing it stands for the shorter ones that
//! these have (k = 4 and k = 8), one after another.

/// The formats of an MMA's operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// 5 exponent and 10 mantissa bits.
    F16,
    /// 8 exponent and 7 mantissa bits.
    Bf16,
}

/// The tensor cores of a generation of GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TensorCores {
    /// Not verified: 23 bits, four products at a time.
    Volta,
    /// Not verified: 24 bits, eight products at a time.
    Turing,
    /// Not verified: 24 bits, eight products at a time. Ada's, too.
    Ampere,
    /// Measured on an H100: 25 bits, sixteen products at once. Blackwell's, too, which is not verified.
    #[default]
    Hopper,
}

impl TensorCores {
    /// Every one, from the oldest.
    pub const ALL: [TensorCores; 4] =
        [TensorCores::Volta, TensorCores::Turing, TensorCores::Ampere, TensorCores::Hopper];

    /// What a chain of steps of sixteen products may lose, over what it may lose on Hopper: each of its sums
    /// of k products cuts off k terms 2^b below the largest at the most, and rounds to f32.
    pub const fn truncation(self) -> f32 {
        match self {
            TensorCores::Volta => 4.0,
            TensorCores::Turing | TensorCores::Ampere => 2.0,
            TensorCores::Hopper => 1.0,
        }
    }

    /// One element of [`mma_16x8x16`](Self::mma_16x8x16): that of a row of A and a column of B.
    pub fn dot(self, format: Format, a: &[u16; 16], b: &[u16; 16], c: u32) -> u32 {
        let (a, b) = (a.map(|x| operand(x, format)), b.map(|x| operand(x, format)));
        match self {
            TensorCores::Volta => chain::<23, 4>(format, &a, &b, c),
            TensorCores::Turing | TensorCores::Ampere => chain::<24, 8>(format, &a, &b, c),
            TensorCores::Hopper => chain::<25, 16>(format, &a, &b, c),
        }
    }

    /// D = A·B + C of one tile: `a` [16 rows, 16], `b` [8 columns, 16], `c` and the result [16 rows, 8
    /// columns], all as bits.
    pub fn mma_16x8x16(
        self,
        format: Format,
        a: &[[u16; 16]; 16],
        b: &[[u16; 16]; 8],
        c: &[[u32; 8]; 16],
    ) -> [[u32; 8]; 16] {
        match self {
            TensorCores::Volta => tile::<23, 4>(format, a, b, c),
            TensorCores::Turing | TensorCores::Ampere => tile::<24, 8>(format, a, b, c),
            TensorCores::Hopper => tile::<25, 16>(format, a, b, c),
        }
    }
}

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

/// The terms of one sum, of which `KEPT` bits below the largest alignment survive it.
struct Sum<const KEPT: i32> {
    exponents: [i32; DEPTH + 1],
    /// With `KEPT` fraction bits.
    mantissas: [i64; DEPTH + 1],
    terms: usize,
    positive_infinity: bool,
    negative_infinity: bool,
    nan: bool,
}

impl<const KEPT: i32> Sum<KEPT> {
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

    fn add_accumulator(&mut self, bits: u32) {
        let exponent = (bits >> 23 & 0xff) as i32;
        let fraction = (bits & 0x7f_ffff) as i64;
        let signed = |mantissa: i64| if bits >> 31 == 1 { -mantissa } else { mantissa };
        match exponent {
            0xff if fraction != 0 => self.nan = true,
            0xff => self.add_infinity(bits >> 31 == 1),
            0 => self.add(-126, signed(fraction << (KEPT - 23))),
            _ => self.add(exponent - 127, signed((fraction | 1 << 23) << (KEPT - 23))),
        }
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
        round_toward_zero(sum, largest - KEPT)
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

/// [`TensorCores::mma_16x8x16`] of Hopper, which code for the CPU has in place of kernels.
pub fn mma_16x8x16(
    format: Format,
    a: &[[u16; 16]; 16],
    b: &[[u16; 16]; 8],
    c: &[[u32; 8]; 16],
) -> [[u32; 8]; 16] {
    TensorCores::Hopper.mma_16x8x16(format, a, b, c)
}

/// The tile of tensor cores that keep `KEPT` bits and add `STEPS` products at a time.
fn tile<const KEPT: i32, const STEPS: usize>(
    format: Format,
    a: &[[u16; 16]; 16],
    b: &[[u16; 16]; 8],
    c: &[[u32; 8]; 16],
) -> [[u32; 8]; 16] {
    let decode = |bits: &[u16; 16]| bits.map(|x| operand(x, format));
    let a = a.each_ref().map(decode);
    let b = b.each_ref().map(decode);
    let mut d = *c;
    for (row, a) in a.iter().enumerate() {
        for (column, b) in b.iter().enumerate() {
            d[row][column] = chain::<KEPT, STEPS>(format, a, b, d[row][column]);
        }
    }
    d
}

/// One element: sums of `STEPS` products one after another, from the accumulator `c` on.
#[inline(always)]
fn chain<const KEPT: i32, const STEPS: usize>(
    format: Format,
    a: &[Operand; DEPTH],
    b: &[Operand; DEPTH],
    c: u32,
) -> u32 {
    // A product has the fraction bits of both operands.
    let to_kept = KEPT - if format == Format::F16 { 20 } else { 14 };
    let mut total = c;
    for (a, b) in a.chunks_exact(STEPS).zip(b.chunks_exact(STEPS)) {
        let mut sum = Sum::<KEPT>::new();
        for (x, y) in a.iter().zip(b) {
            if x.infinite || y.infinite || x.nan || y.nan {
                sum.nan |= x.nan || y.nan || x.mantissa == 0 || y.mantissa == 0;
                sum.add_infinity((x.mantissa < 0) != (y.mantissa < 0));
            } else {
                sum.add(x.exponent + y.exponent, (x.mantissa * y.mantissa) << to_kept);
            }
        }
        sum.add_accumulator(total);
        total = sum.result();
    }
    total
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
mod tests;
