//! The numbers that a kernel's memory holds: their bits, and how a message shows them.

use half::{bf16, f16};
use simt::Pod;
use std::fmt::Debug;

mod sealed {
    pub trait Sealed {}
}

/// How the bits of a float are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Bits of the exponent.
    pub exponent: u32,
    /// Bits of the mantissa that are stored.
    pub mantissa: u32,
}

impl Layout {
    /// The bits of infinity.
    pub const fn infinity(self) -> u64 {
        ((1 << self.exponent) - 1) << self.mantissa
    }

    /// The bit of the sign.
    pub const fn sign(self) -> u64 {
        1 << (self.exponent + self.mantissa)
    }

    /// The bits of 1.
    pub const fn one(self) -> u64 {
        ((1 << (self.exponent - 1)) - 1) << self.mantissa
    }

    /// Whether `bits` are those of a NaN.
    pub const fn is_nan(self, bits: u64) -> bool {
        bits & !self.sign() > self.infinity()
    }
}

/// A number of a kernel's memory: a float or an integer of 8 to 64 bits.
pub trait Element: Pod + Debug + PartialEq + Send + Sync + sealed::Sealed {
    /// The type's name.
    const NAME: &'static str;
    /// Its bits.
    const BITS: u32;
    /// How its bits are divided; `None` for integers.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    const FLOAT: Option<Layout>;
    /// Whether it is an integer with a sign.
    #[doc(hidden)]
    const SIGNED: bool;

    /// Its bits as a number.
    fn bits(self) -> u64;
    /// The value of some bits; those that are too many count for nothing.
    fn of_bits(bits: u64) -> Self;
    /// Its value. Integers of 64 bits are rounded.
    fn value(self) -> f64;

    /// Whether it is a NaN.
    fn is_nan(self) -> bool {
        Self::FLOAT.is_some_and(|layout| layout.is_nan(self.bits()))
    }

    /// Whether the two are the same bits, or each a NaN: of a NaN, emulator and GPU promise no more.
    fn same(self, other: Self) -> bool {
        self.bits() == other.bits() || self.is_nan() && other.is_nan()
    }

    /// The value, and for a float its bits: `1.5 (0x3fc00000)`.
    fn show(self) -> String {
        match Self::FLOAT {
            Some(_) => format!("{:?} ({:#0width$x})", self, self.bits(), width = 2 + Self::BITS as usize / 4),
            None => format!("{self:?}"),
        }
    }
}

macro_rules! elements {
    ($($ty:ident, $bits:ty, $layout:expr, $signed:expr, $to:expr, $from:expr, $value:expr;)*) => {$(
        impl sealed::Sealed for $ty {}
        impl Element for $ty {
            const NAME: &'static str = stringify!($ty);
            const BITS: u32 = <$bits>::BITS;
            #[allow(private_interfaces)]
            const FLOAT: Option<Layout> = $layout;
            const SIGNED: bool = $signed;

            fn bits(self) -> u64 {
                let bits: fn($ty) -> $bits = $to;
                bits(self) as u64
            }
            fn of_bits(bits: u64) -> Self {
                let value: fn($bits) -> $ty = $from;
                value(bits as $bits)
            }
            fn value(self) -> f64 {
                let value: fn($ty) -> f64 = $value;
                value(self)
            }
        }
    )*};
}

const fn layout(exponent: u32, mantissa: u32) -> Option<Layout> {
    Some(Layout { exponent, mantissa })
}

elements! {
    f64, u64, layout(11, 52), true, f64::to_bits, f64::from_bits, |x| x;
    f32, u32, layout(8, 23), true, f32::to_bits, f32::from_bits, f64::from;
    f16, u16, layout(5, 10), true, f16::to_bits, f16::from_bits, f64::from;
    bf16, u16, layout(8, 7), true, bf16::to_bits, bf16::from_bits, f64::from;
    u8, u8, None, false, |x| x, |x| x, f64::from;
    u16, u16, None, false, |x| x, |x| x, f64::from;
    u32, u32, None, false, |x| x, |x| x, f64::from;
    u64, u64, None, false, |x| x, |x| x, |x| x as f64;
    i8, u8, None, true, |x| x as u8, |x| x as i8, f64::from;
    i16, u16, None, true, |x| x as u16, |x| x as i16, f64::from;
    i32, u32, None, true, |x| x as u32, |x| x as i32, f64::from;
    i64, u64, None, true, |x| x as u64, |x| x as i64, |x| x as f64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_types() {
        fn check<T: Element>(one: T, infinity: T, nan: T) {
            let layout = T::FLOAT.unwrap();
            assert_eq!(layout.one(), one.bits(), "{}", T::NAME);
            assert_eq!(layout.infinity(), infinity.bits(), "{}", T::NAME);
            assert!(nan.is_nan() && !infinity.is_nan() && !one.is_nan());
            assert_eq!(T::of_bits(layout.one() | layout.sign()).value(), -1.0);
            assert!(nan.same(T::of_bits(nan.bits() ^ 1 ^ layout.sign())), "{}", T::NAME);
            assert!(!one.same(T::of_bits(one.bits() | layout.sign())));
        }
        check(1f64, f64::INFINITY, f64::NAN);
        check(1f32, f32::INFINITY, f32::NAN);
        check(f16::ONE, f16::INFINITY, f16::NAN);
        check(bf16::ONE, bf16::INFINITY, bf16::NAN);
    }

    #[test]
    fn values_are_shown_with_their_bits() {
        assert_eq!(1.5f32.show(), "1.5 (0x3fc00000)");
        assert_eq!(f16::from_bits(1).show(), "5.9604645e-8 (0x0001)");
        assert_eq!((-3i8).show(), "-3");
        assert_eq!((-3i8).bits(), 0xfd);
        assert_eq!(i8::of_bits(0xfd), -3);
    }
}
