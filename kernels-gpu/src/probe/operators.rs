//! Operators of two and three operands, over patterns that mix random bits with the values at the edges.

use super::mix;
use simt::math::{self, canonical_nan};
use simt::{GlobalMut, bits, half2, kernel, thread};

/// An operator of three 64-bit patterns; those of floats and 32-bit integers take the low half.
pub trait Operator: Copy + Send + Sync + 'static {
    /// The result's bits.
    fn apply(a: u64, b: u64, c: u64) -> u64;
}

/// A float of the pattern: one of four any bits, one of four a medium exponent, else an exponent and a
/// mantissa from the edges (zero, subnormal, one, two, the largest, infinite, NaN).
#[inline(always)]
pub fn float(pattern: u64) -> f32 {
    let random = pattern as u32;
    let kind = (pattern >> 32) as u32 & 3;
    let exponents = 0xff_fe_81_80_7f_7e_01_00u64;
    let exponent = (exponents >> (8 * (pattern >> 34 & 7))) as u32 & 0xff;
    let mantissa = match pattern >> 37 & 3 {
        0 => 0,
        1 => 1,
        2 => 0x7f_ffff,
        _ => random & 0x7f_ffff,
    };
    f32::from_bits(match kind {
        0 => random,
        1 => random & 0x83ff_ffff | 0x3c00_0000,
        _ => random & 0x8000_0000 | exponent << 23 | mantissa,
    })
}

/// A double of the pattern: mixed likewise.
#[inline(always)]
pub fn double(pattern: u64) -> f64 {
    let rest = mix(pattern);
    let exponents = 0x7ff_7fe_3ff_001_000u64;
    let exponent = exponents >> (12 * (rest >> 2 & 3)) & 0x7ff;
    let mantissa = match rest >> 5 & 3 {
        0 => 0,
        1 => 1,
        2 => 0xf_ffff_ffff_ffff,
        _ => pattern & 0xf_ffff_ffff_ffff,
    };
    f64::from_bits(match rest & 3 {
        0 => pattern,
        1 => pattern & 0x83ff_ffff_ffff_ffff | 0x3c00_0000_0000_0000,
        _ => pattern & 1 << 63 | exponent << 52 | mantissa,
    })
}

/// The bits of a float whose NaN is any.
#[inline(always)]
fn any_nan(x: f32) -> u64 {
    canonical_nan(x).to_bits() as u64
}

/// The bits of a double whose NaN is any.
#[inline(always)]
fn any_nan_f64(x: f64) -> u64 {
    if x.is_nan() { 0x7ff8 << 48 } else { x.to_bits() }
}

macro_rules! operators {
    ($($name:ident: |$a:ident, $b:ident, $c:ident| $body:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($body), "`.")]
            #[derive(Clone, Copy, Debug)]
            pub struct $name;

            impl Operator for $name {
                #[inline(always)]
                #[allow(unused_variables)]
                fn apply($a: u64, $b: u64, $c: u64) -> u64 {
                    $body
                }
            }
        )*

        /// Writes `O` of the operands of `len` indices from `first` on.
        #[kernel(system = probe, instances($($name),*))]
        pub fn operator<O: Operator>(out: GlobalMut<u64>, first: u64, len: u32) {
            let i = thread::index_1d();
            if i < len as usize {
                let seed = (first + i as u64) * 3;
                out.store(i, O::apply(mix(seed), mix(seed + 1), mix(seed + 2)));
            }
        }

        /// Every instance of [`fn@operator`].
        #[cfg(not(target_arch = "nvptx64"))]
        pub const KERNELS: &[simt::Kernel<operator::Args>] = &[$(operator::kernel::<$name>()),*];
    };
}

operators! {
    Add: |a, b, c| any_nan(float(a) + float(b));
    Sub: |a, b, c| any_nan(float(a) - float(b));
    Mul: |a, b, c| any_nan(float(a) * float(b));
    Div: |a, b, c| any_nan(float(a) / float(b));
    Fma: |a, b, c| any_nan(math::fma(float(a), float(b), float(c)));
    MulThenAdd: |a, b, c| any_nan(float(a) * float(b) + float(c));
    Max: |a, b, c| math::max(float(a), float(b)).to_bits() as u64;
    Min: |a, b, c| math::min(float(a), float(b)).to_bits() as u64;
    Maximum: |a, b, c| math::maximum(float(a), float(b)).to_bits() as u64;
    Minimum: |a, b, c| math::minimum(float(a), float(b)).to_bits() as u64;
    Clamp: |a, b, c| math::clamp(float(a), float(b), float(c)).to_bits() as u64;
    DivideByDivisor: |a, b, c| math::Divisor::new(float(b)).divide(float(a)).to_bits() as u64;
    Compare: |a, b, c| compare(float(a), float(b));
    AddF64: |a, b, c| any_nan_f64(double(a) + double(b));
    SubF64: |a, b, c| any_nan_f64(double(a) - double(b));
    MulF64: |a, b, c| any_nan_f64(double(a) * double(b));
    DivF64: |a, b, c| any_nan_f64(double(a) / double(b));
    FmaF64: |a, b, c| any_nan_f64(math::fma_f64(double(a), double(b), double(c)));
    SqrtF64: |a, b, c| any_nan_f64(math::sqrt_f64(double(a)));
    F64ToF32: |a, b, c| any_nan(double(a) as f32);
    F64ToI64: |a, b, c| double(a) as i64 as u64;
    F64ToI32: |a, b, c| double(a) as i32 as u32 as u64;
    I64ToF64: |a, b, c| (a as i64 as f64).to_bits();
    I64ToF32: |a, b, c| (a as i64 as f32).to_bits() as u64;
    U64ToF32: |a, b, c| (a as f32).to_bits() as u64;
    Dp4a: |a, b, c| bits::dp4a(a as u32, b as u32, c as i32) as u32 as u64;
    AndOr: |a, b, c| bits::and_or(a as u32, b as u32, c as u32) as u64;
    BytePerm: |a, b, c| bits::byte_perm(a as u32, b as u32, c as u32) as u64;
    PackLowBytes: |a, b, c| bits::pack_low_bytes([a as u32, (a >> 32) as u32, b as u32, c as u32]) as u64;
    AddF16x2: |a, b, c| half2::add_f16x2(a as u32, b as u32) as u64;
    SubF16x2: |a, b, c| half2::sub_f16x2(a as u32, b as u32) as u64;
    MulF16x2: |a, b, c| half2::mul_f16x2(a as u32, b as u32) as u64;
    FmaF16x2: |a, b, c| half2::fma_f16x2(a as u32, b as u32, c as u32) as u64;
    FmsF16x2: |a, b, c| half2::fms_f16x2(a as u32, b as u32, c as u32) as u64;
    MulU64: |a, b, c| a.wrapping_mul(b).wrapping_add(c);
    MulHigh: |a, b, c| ((a as u128 * b as u128) >> 64) as u64;
    DivU32: |a, b, c| (a as u32 / (b as u32 | 1)) as u64;
    RemI32: |a, b, c| (a as i32).wrapping_rem(b as i32 >> (c & 31) | 1) as u32 as u64;
    DivU64: |a, b, c| a / (b >> (c & 63) | 1);
    RemU64: |a, b, c| a % (b >> (c & 63) | 1);
    ShiftU32: |a, b, c| (((a as u32) << (b & 31)) ^ ((a as u32) >> (c & 31))) as u64;
    ShiftI64: |a, b, c| ((a as i64) >> (b & 63)) as u64 ^ a << (c & 63);
}

/// One bit for each comparison.
#[inline(always)]
fn compare(a: f32, b: f32) -> u64 {
    (a < b) as u64
        | ((a <= b) as u64) << 1
        | ((a == b) as u64) << 2
        | ((a >= b) as u64) << 3
        | ((a > b) as u64) << 4
        | ((a != b) as u64) << 5
        | (a.is_nan() as u64) << 6
        | (b.is_finite() as u64) << 7
}
