//! Minimum, maximum and clamp, with every case defined.
//!
//! `f32::max` and `f32::min` leave open which zero they return; these do not. Each is one PTX instruction,
//! and next to it stands the host code with the same result in every bit, NaN included.

use super::NAN_BITS;

/// One PTX instruction over two `f32` operands.
#[cfg(target_arch = "nvptx64")]
macro_rules! two_operand {
    ($mnemonic:literal, $a:expr, $b:expr) => {{
        let result: f32;
        // SAFETY: one arithmetic instruction over registers, with no side effect.
        unsafe {
            core::arch::asm!(
                concat!($mnemonic, " {r}, {a}, {b};"),
                r = out(reg32) result,
                a = in(reg32) $a,
                b = in(reg32) $b,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        result
    }};
}

/// The larger number: IEEE 754-2019 `maximumNumber`.
///
/// A NaN operand loses to a number; of two NaN the result is the NaN [`NAN_BITS`]; −0 counts as less than +0.
/// PTX: `max.f32`.
#[inline(always)]
#[must_use]
pub fn max(a: f32, b: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return two_operand!("max.f32", a, b);
    #[cfg(not(target_arch = "nvptx64"))]
    if a > b || b.is_nan() {
        super::host_nan(a)
    } else if a == b {
        // Equal numbers have equal bits, but for the zeros: +0 unless both are -0.
        f32::from_bits(a.to_bits() & b.to_bits())
    } else {
        b
    }
}

/// The smaller number: IEEE 754-2019 `minimumNumber`.
///
/// A NaN operand loses to a number; of two NaN the result is the NaN [`NAN_BITS`]; −0 counts as less than +0.
/// PTX: `min.f32`.
#[inline(always)]
#[must_use]
pub fn min(a: f32, b: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return two_operand!("min.f32", a, b);
    #[cfg(not(target_arch = "nvptx64"))]
    if a < b || b.is_nan() {
        super::host_nan(a)
    } else if a == b {
        // -0 as soon as one of the zeros is.
        f32::from_bits(a.to_bits() | b.to_bits())
    } else {
        b
    }
}

/// The larger value: IEEE 754-2019 `maximum`.
///
/// NaN ([`NAN_BITS`]) as soon as one operand is; −0 counts as less than +0. PTX: `max.NaN.f32`.
#[inline(always)]
#[must_use]
pub fn maximum(a: f32, b: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return two_operand!("max.NaN.f32", a, b);
    #[cfg(not(target_arch = "nvptx64"))]
    if a > b {
        a
    } else if a < b {
        b
    } else if a == b {
        f32::from_bits(a.to_bits() & b.to_bits())
    } else {
        f32::from_bits(NAN_BITS)
    }
}

/// The smaller value: IEEE 754-2019 `minimum`.
///
/// NaN ([`NAN_BITS`]) as soon as one operand is; −0 counts as less than +0. PTX: `min.NaN.f32`.
#[inline(always)]
#[must_use]
pub fn minimum(a: f32, b: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return two_operand!("min.NaN.f32", a, b);
    #[cfg(not(target_arch = "nvptx64"))]
    if a < b {
        a
    } else if a > b {
        b
    } else if a == b {
        f32::from_bits(a.to_bits() | b.to_bits())
    } else {
        f32::from_bits(NAN_BITS)
    }
}

/// `x` held between `low` and `high`: `minimum(maximum(x, low), high)`.
///
/// NaN stays NaN ([`NAN_BITS`]), as in `f32::clamp`; −0 counts as less than +0; with `low > high` the result
/// is `high`. Two PTX instructions.
#[inline(always)]
#[must_use]
pub fn clamp(x: f32, low: f32, high: f32) -> f32 {
    minimum(maximum(x, low), high)
}

/// The absolute value: the sign bit cleared. A NaN stays a NaN (with which payload is not defined).
#[inline(always)]
#[must_use]
pub fn abs(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & 0x7fff_ffff)
}

/// `x` itself, or the NaN [`NAN_BITS`] when it is any NaN.
///
/// Use it where a NaN that came from plain arithmetic is stored and its bits are compared: every PTX
/// instruction over `f32` returns this NaN, and a CPU passes on the operand's.
#[inline(always)]
#[must_use]
pub fn canonical_nan(x: f32) -> f32 {
    // On the bits: told with floats, the compiler may take one NaN for as good as another and drop the choice
    // (it did behind a square root).
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { NAN_BITS } else { bits })
}
