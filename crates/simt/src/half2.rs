//! Arithmetic on two f16 in one register, `low` in bits 0 to 15. Each result is rounded once, to nearest
//! even; a NaN is 0x7fff.
//!
//! An MMA takes f16 operands: what is computed in f16 needs no conversion on the way.

#[cfg(target_arch = "nvptx64")]
use core::arch::asm;
#[cfg(not(target_arch = "nvptx64"))]
use half::f16;

macro_rules! pairs {
    ($($(#[$doc:meta])* $name:ident($($arg:ident),*), $ptx:literal, |$($x:ident),*| $value:expr;)*) => {
        sides! {$(
            $(#[$doc])*
            #[doc = concat!("PTX: `", $ptx, "`.")]
            pub fn $name($($arg: u32),*) -> u32 {
                device {
                    let d: u32;
                    // SAFETY: arithmetic on registers.
                    unsafe { pairs!(asm $ptx, d, $($arg),*) }
                    d
                }
                emulator {
                    let lane = |shift: u32| {
                        $(let $x = f16::from_bits(($arg >> shift) as u16).to_f64();)*
                        ($value as u32) << shift
                    };
                    lane(0) | lane(16)
                }
            }
        )*}
    };
    (asm $ptx:literal, $d:ident, $a:ident, $b:ident) => {
        asm!(concat!($ptx, " {0}, {1}, {2};"), out(reg32) $d, in(reg32) $a, in(reg32) $b, options(pure, nomem, nostack))
    };
    (asm $ptx:literal, $d:ident, $a:ident, $b:ident, $c:ident) => {
        asm!(concat!($ptx, " {0}, {1}, {2}, {3};"), out(reg32) $d, in(reg32) $a, in(reg32) $b, in(reg32) $c,
            options(pure, nomem, nostack))
    };
}
pairs! {
    /// a + b, twice.
    add_f16x2(a, b), "add.rn.f16x2", |x, y| from_exact(x + y, 0.0);
    /// a − b, twice.
    sub_f16x2(a, b), "sub.rn.f16x2", |x, y| from_exact(x - y, 0.0);
    /// a · b, twice.
    mul_f16x2(a, b), "mul.rn.f16x2", |x, y| from_exact(x * y, 0.0);
    /// a · b + c rounded once, twice.
    fma_f16x2(a, b, c), "fma.rn.f16x2", |x, y, z| {
        // The product is exact in f64; what the sum loses is found exactly (Knuth's two-sum).
        let product = x * y;
        let sum = product + z;
        let back = sum - product;
        from_exact(sum, (product - (sum - back)) + (z - back))
    };
}

sides! {
    /// a · b − c rounded once, twice. PTX: `neg.f16x2`, which becomes a sign of the operand, and
    /// `fma.rn.f16x2`.
    pub fn fms_f16x2(a: u32, b: u32, c: u32) -> u32 {
        device {
            let d: u32;
            // SAFETY: arithmetic on registers.
            unsafe {
                asm!("{{ .reg .b32 n; neg.f16x2 n, {3}; fma.rn.f16x2 {0}, {1}, {2}, n; }}", out(reg32) d,
                    in(reg32) a, in(reg32) b, in(reg32) c, options(pure, nomem, nostack));
            }
            d
        }
        emulator { fma_f16x2(a, b, neg_f16x2(c)) }
    }
}

/// −a, twice: the signs flipped. PTX: `xor.b32`.
#[inline(always)]
pub fn neg_f16x2(a: u32) -> u32 {
    a ^ 0x8000_8000
}

/// |a|, twice: the signs cleared. PTX: `and.b32`.
#[inline(always)]
pub fn abs_f16x2(a: u32) -> u32 {
    a & 0x7fff_7fff
}

/// Bits of the f16 nearest to `value + rest`, where `rest` is what rounding to f64 lost. On the way to fewer
/// bits a result that is not exact is kept odd: then rounding twice is rounding once.
#[cfg(not(target_arch = "nvptx64"))]
fn from_exact(value: f64, rest: f64) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    let mut exact = value;
    if rest != 0.0 && rest.is_finite() && value.to_bits() & 1 == 0 {
        let outward = (rest > 0.0) == (value > 0.0);
        exact = f64::from_bits(if outward { value.to_bits() + 1 } else { value.to_bits() - 1 });
    }
    // To f32, toward zero, then odd if something was cut off. Below f16's subnormals any odd f32 will do.
    let nearest = exact as f32;
    let single = if nearest as f64 == exact || nearest.is_infinite() {
        nearest
    } else {
        let toward_zero =
            if (nearest as f64).abs() > exact.abs() { nearest.to_bits() - 1 } else { nearest.to_bits() };
        f32::from_bits(toward_zero | 1)
    };
    f16::from_f32(single).to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(x: f32) -> u32 {
        f16::from_f32(x).to_bits() as u32
    }

    #[test]
    fn rounding_is_done_once() {
        // 1 + 2^-11 is a tie between 1 and 1 + 2^-10; a subnormal beside it decides, 2^-24 away.
        let tie = fma_f16x2(bits(2f32.powi(-11)), bits(1.0), bits(1.0));
        assert_eq!(tie, bits(1.0));
        let (a, b) = (bits(2f32.powi(-6)), bits(2f32.powi(-5) * (1.0 + 2f32.powi(-10))));
        assert_eq!(fma_f16x2(a, b, bits(1.0)), bits(1.0 + 2f32.powi(-10)));
        let (a, b) = (bits(-2f32.powi(-6)), bits(2f32.powi(-5) * (1.0 + 2f32.powi(-10))));
        // Below 1 the spacing is half: 1 - 2^-11 (1 + 2^-10) lies past 1 - 2^-11, nearest to it.
        assert_eq!(fma_f16x2(a, b, bits(1.0)), bits(1.0 - 2f32.powi(-11)));
    }

    #[test]
    fn the_rest_of_a_product_is_exact() {
        // From 1/4 up; below, its last bits lie beyond the subnormals.
        for (a, b) in [(1.3f32, 2.7f32), (1.1, 0.3), (63.9, 511.0), (-5.3, 0.2)] {
            let (a, b) = (bits(a), bits(b));
            let high = mul_f16x2(a, b);
            let low = fma_f16x2(a, b, neg_f16x2(high) & 0xffff);
            let value = |x: u32| f16::from_bits(x as u16).to_f64();
            assert_eq!(value(high) + value(low), value(a) * value(b));
        }
    }

    #[test]
    fn both_halves_and_what_is_not_finite() {
        let pair = |low: f32, high: f32| bits(low) | bits(high) << 16;
        assert_eq!(add_f16x2(pair(1.0, -3.0), pair(2.0, 1.0)), pair(3.0, -2.0));
        assert_eq!(sub_f16x2(pair(1.0, 65504.0), pair(1.0, -65504.0)), bits(0.0) | bits(f32::INFINITY) << 16);
        assert_eq!(mul_f16x2(pair(f32::INFINITY, 2.0), pair(0.0, 0.5)), 0x7fff | bits(1.0) << 16);
        assert_eq!(abs_f16x2(pair(-1.0, 2.0)), pair(1.0, 2.0));
    }
}
