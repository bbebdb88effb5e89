//! The IEEE operations that have no operator in Rust, and the roundings to integers.

/// `a * b + c` with one rounding, to nearest even. PTX: `fma.rn.f32`.
///
/// This and every other float operation leave the payload and the sign of a NaN open; see
/// [`canonical_nan`](super::canonical_nan).
#[inline(always)]
#[must_use]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return core::f32::math::mul_add(a, b, c);
    #[cfg(not(target_arch = "nvptx64"))]
    fused(a, b, c)
}

/// One instruction where the CPU has it. The build is for CPUs that may not, so a compiler makes a call of
/// [`f32::mul_add`]; a function with the feature would be one, too.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
fn fused(a: f32, b: f32, c: f32) -> f32 {
    #[cfg(all(target_arch = "x86_64", not(target_feature = "fma")))]
    if std::arch::is_x86_feature_detected!("fma") {
        let mut result = a;
        // SAFETY: the CPU has the instruction, which is one over registers, with no side effect.
        unsafe {
            core::arch::asm!(
                "vfmadd213ss {a}, {b}, {c}",
                a = inout(xmm_reg) result,
                b = in(xmm_reg) b,
                c = in(xmm_reg) c,
                options(pure, nomem, nostack),
            );
        }
        return result;
    }
    a.mul_add(b, c)
}

/// `a * b + c` with one rounding, to nearest even. PTX: `fma.rn.f64`.
#[inline(always)]
#[must_use]
pub fn fma_f64(a: f64, b: f64, c: f64) -> f64 {
    #[cfg(target_arch = "nvptx64")]
    return core::f64::math::mul_add(a, b, c);
    #[cfg(not(target_arch = "nvptx64"))]
    a.mul_add(b, c)
}

/// The square root, rounded to nearest even. PTX: `sqrt.rn.f32`.
#[inline(always)]
#[must_use]
pub fn sqrt(x: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return core::f32::math::sqrt(x);
    #[cfg(not(target_arch = "nvptx64"))]
    x.sqrt()
}

/// The square root, rounded to nearest even. PTX: `sqrt.rn.f64`.
#[inline(always)]
#[must_use]
pub fn sqrt_f64(x: f64) -> f64 {
    #[cfg(target_arch = "nvptx64")]
    return core::f64::math::sqrt(x);
    #[cfg(not(target_arch = "nvptx64"))]
    x.sqrt()
}

/// `1 / sqrt(x)`, two IEEE operations.
///
/// Error: at most 1.491 ULP, measured over every `f32`. +0 gives +∞ and −0 gives −∞, +∞ gives +0, a
/// negative number or NaN gives NaN.
#[inline(always)]
#[must_use]
pub fn rsqrt(x: f32) -> f32 {
    super::host_nan(1.0 / sqrt(x))
}

/// The nearest integer, ties to the even one, as a float.
///
/// Keeps the sign (−0.3 gives −0); infinities and NaN stay what they are. PTX: `cvt.rni.f32.f32`.
#[inline(always)]
#[must_use]
pub fn round_ties_even(x: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return core::f32::math::round_ties_even(x);
    #[cfg(not(target_arch = "nvptx64"))]
    {
        // From 2^23 up every float is an integer; below, adding 2^23 leaves no bit for a fraction.
        const INTEGERS: f32 = 8_388_608.0;
        let size = super::abs(x);
        if size < INTEGERS { ((size + INTEGERS) - INTEGERS).copysign(x) } else { super::host_nan(x) }
    }
}

/// The largest integer that is not above `x`, as a float.
///
/// −0, infinities and NaN stay what they are. PTX: `cvt.rmi.f32.f32`.
#[inline(always)]
#[must_use]
pub fn floor(x: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return core::f32::math::floor(x);
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let nearest = round_ties_even(x);
        if nearest > x { nearest - 1.0 } else { nearest }
    }
}

/// Converts with one `cvt` instruction; all of them saturate and turn NaN into 0.
#[cfg(target_arch = "nvptx64")]
macro_rules! cvt_s32 {
    ($mnemonic:literal, $x:expr) => {{
        let result: i32;
        // SAFETY: one conversion over registers, with no side effect.
        unsafe {
            core::arch::asm!(
                concat!($mnemonic, " {r}, {x};"),
                r = out(reg32) result,
                x = in(reg32) $x,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        result
    }};
}

/// The nearest integer, ties to even; out of range the nearest `i32`; NaN gives 0. PTX: `cvt.rni.s32.f32`.
#[inline(always)]
#[must_use]
pub fn to_i32_nearest_even(x: f32) -> i32 {
    #[cfg(target_arch = "nvptx64")]
    return cvt_s32!("cvt.rni.s32.f32", x);
    #[cfg(not(target_arch = "nvptx64"))]
    {
        round_ties_even(x) as i32
    }
}

/// The largest integer not above `x`; out of range the nearest `i32`; NaN gives 0. PTX: `cvt.rmi.s32.f32`.
#[inline(always)]
#[must_use]
pub fn to_i32_floor(x: f32) -> i32 {
    #[cfg(target_arch = "nvptx64")]
    return cvt_s32!("cvt.rmi.s32.f32", x);
    #[cfg(not(target_arch = "nvptx64"))]
    {
        floor(x) as i32
    }
}

/// The integer part; out of range the nearest `i32`; NaN gives 0. The same as `x as i32`, in one instruction.
/// PTX: `cvt.rzi.s32.f32`.
#[inline(always)]
#[must_use]
pub fn to_i32_trunc(x: f32) -> i32 {
    #[cfg(target_arch = "nvptx64")]
    return cvt_s32!("cvt.rzi.s32.f32", x);
    #[cfg(not(target_arch = "nvptx64"))]
    {
        x as i32
    }
}

/// The nearest integer of `|x| <= 2^22`, ties to even, in one float addition and one integer subtraction.
///
/// Adding 1.5·2^23 leaves no fraction bit, so the addition itself rounds, and the low bits of the sum are the
/// integer. Any other `x` gives some integer without meaning, the same on every machine but for NaN.
#[inline(always)]
#[must_use]
pub fn nearest_even_i32(x: f32) -> i32 {
    (x + super::ROUNDER).to_bits().wrapping_sub(super::ROUNDER.to_bits()) as i32
}
