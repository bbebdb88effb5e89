//! Conversions between f32 and the storage types, each rounding to nearest even.
//!
//! `half` converts in software on `nvptx64`, so kernels convert through here: one `cvt` on the device, the
//! same bits on the host. A NaN becomes the format's canonical NaN, as the hardware makes it.

use half::{bf16, f16};

#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

sides! {
    /// f16 to f32, exact. PTX: `cvt.f32.f16`.
    pub fn f32_from_f16(x: f16) -> f32 {
        device {
            let y: f32;
            // SAFETY: arithmetic on registers.
            unsafe { asm!("cvt.f32.f16 {0}, {1};", out(reg32) y, in(reg16) x.to_bits(), options(pure, nomem, nostack)) }
            y
        }
        emulator { x.to_f32() }
    }

    /// f32 to f16, to nearest even, beyond 65519.99… to infinity. PTX: `cvt.rn.f16.f32`.
    pub fn f16_from_f32(x: f32) -> f16 {
        device {
            let bits: u16;
            // SAFETY: arithmetic on registers.
            unsafe { asm!("cvt.rn.f16.f32 {0}, {1};", out(reg16) bits, in(reg32) x, options(pure, nomem, nostack)) }
            f16::from_bits(bits)
        }
        emulator { if x.is_nan() { f16::from_bits(0x7fff) } else { f16::from_f32(x) } }
    }

    /// f32 to bf16, to nearest even. PTX: `cvt.rn.bf16.f32`.
    pub fn bf16_from_f32(x: f32) -> bf16 {
        device {
            let bits: u16;
            // SAFETY: arithmetic on registers.
            unsafe { asm!("cvt.rn.bf16.f32 {0}, {1};", out(reg16) bits, in(reg32) x, options(pure, nomem, nostack)) }
            bf16::from_bits(bits)
        }
        emulator { if x.is_nan() { bf16::from_bits(0x7fff) } else { bf16::from_f32(x) } }
    }

    /// Two f32 to the packed f16 pair that a vector or an MMA operand holds: `low` in bits 0 to 15.
    /// PTX: `cvt.rn.f16x2.f32`.
    pub fn f16x2_from_f32(low: f32, high: f32) -> u32 {
        device {
            let bits: u32;
            // SAFETY: arithmetic on registers.
            unsafe { asm!("cvt.rn.f16x2.f32 {0}, {1}, {2};", out(reg32) bits, in(reg32) high, in(reg32) low, options(pure, nomem, nostack)) }
            bits
        }
        emulator { f16_from_f32(low).to_bits() as u32 | (f16_from_f32(high).to_bits() as u32) << 16 }
    }

    /// Two f32 to a packed pair of bf16: `low` in bits 0 to 15. PTX: `cvt.rn.bf16x2.f32`.
    pub fn bf16x2_from_f32(low: f32, high: f32) -> u32 {
        device {
            let bits: u32;
            // SAFETY: arithmetic on registers.
            unsafe { asm!("cvt.rn.bf16x2.f32 {0}, {1}, {2};", out(reg32) bits, in(reg32) high, in(reg32) low, options(pure, nomem, nostack)) }
            bits
        }
        emulator { bf16_from_f32(low).to_bits() as u32 | (bf16_from_f32(high).to_bits() as u32) << 16 }
    }
}

/// bf16 to f32, exact: its bits are the upper half of the f32's.
#[inline(always)]
pub fn f32_from_bf16(x: bf16) -> f32 {
    f32::from_bits((x.to_bits() as u32) << 16)
}

/// The largest finite e4m3 value.
pub const E4M3_MAX: f32 = 448.0;

/// f32 to e4m3 (1 sign, 4 exponent, 3 mantissa bits, no infinity), to nearest even, saturating at ±448; NaN
/// becomes 0x7f. The same as `cvt.rn.satfinite.e4m3x2.f32`, which targets before sm_89 lack: integer code on
/// both sides.
#[inline(always)]
pub fn e4m3_from_f32(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24 & 0x80) as u8;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return 0x7f;
    }
    // 464 is the tie between 448 and the absent 480; both sides of it saturate.
    if magnitude >= 448f32.to_bits() {
        return sign | 0x7e;
    }
    let code = if magnitude >= (1f32 / 64.0).to_bits() {
        // Normal: rebias the exponent from 127 to 7 and round 20 mantissa bits away.
        let rebased = magnitude - (120 << 23);
        (rebased + 0x7_ffff + (rebased >> 20 & 1)) >> 20
    } else {
        // Subnormal, in steps of 2^-9: adding 2^14 leaves exactly that step in the f32's last place.
        (f32::from_bits(magnitude) + 16384.0).to_bits() - 16384f32.to_bits()
    };
    sign | code as u8
}

/// e4m3 to f32, exact; 0x7f and 0xff are NaN.
#[inline(always)]
pub fn f32_from_e4m3(x: u8) -> f32 {
    let sign = (x as u32 & 0x80) << 24;
    let (exponent, mantissa) = (x as u32 >> 3 & 0xf, x as u32 & 7);
    let magnitude = if x & 0x7f == 0x7f {
        0x7fff_ffff
    } else if exponent == 0 {
        (mantissa as f32 * (1.0 / 512.0)).to_bits()
    } else {
        (exponent + 120) << 23 | mantissa << 20
    };
    f32::from_bits(sign | magnitude)
}
