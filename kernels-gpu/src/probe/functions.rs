//! Functions of one operand, over a range of 32-bit patterns: all of them, where a launch can afford that.

use glam::UVec4;
use half::{bf16, f16};
use simt::math::{self, canonical_nan};
use simt::{GlobalMut, bits, convert, kernel, thread};

/// A function of one 32-bit pattern.
pub trait Function: Copy + Send + Sync + 'static {
    /// The result's bits.
    fn apply(x: u32) -> u32;
}

#[inline(always)]
fn float(x: u32) -> f32 {
    f32::from_bits(x)
}

/// The bits of a float whose NaN is any.
#[inline(always)]
fn any_nan(x: f32) -> u32 {
    canonical_nan(x).to_bits()
}

macro_rules! functions {
    ($($name:ident: |$x:ident| $body:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($body), "`.")]
            #[derive(Clone, Copy, Debug)]
            pub struct $name;

            impl Function for $name {
                #[inline(always)]
                fn apply($x: u32) -> u32 {
                    $body
                }
            }
        )*

        /// Writes `F` of `len` patterns, `stride` apart from `first` on; `len` is a multiple of 4.
        #[kernel(system = probe, instances($($name),*))]
        pub fn function<F: Function>(out: GlobalMut<u32>, first: u32, stride: u32, len: u32) {
            let i = thread::index_1d() * 4;
            if i < len as usize {
                let x = first.wrapping_add((i as u32).wrapping_mul(stride));
                let y = x.wrapping_add(stride);
                let z = y.wrapping_add(stride);
                let w = z.wrapping_add(stride);
                out.store_vector(i, UVec4::new(F::apply(x), F::apply(y), F::apply(z), F::apply(w)));
            }
        }

        /// Every instance of [`fn@function`].
        #[cfg(not(target_arch = "nvptx64"))]
        pub const KERNELS: &[simt::Kernel<function::Args>] =
            &[$(function::kernel::<$name>()),*];
    };
}

functions! {
    Exp2: |x| math::exp2(float(x)).to_bits();
    Exp2Nonpositive: |x| math::exp2_nonpositive(float(x)).to_bits();
    Log2: |x| math::log2(float(x)).to_bits();
    Sin: |x| math::sin(float(x)).to_bits();
    Cos: |x| math::cos(float(x)).to_bits();
    Sqrt: |x| any_nan(math::sqrt(float(x)));
    Rsqrt: |x| math::rsqrt(float(x)).to_bits();
    Reciprocal: |x| any_nan(1.0 / float(x));
    Square: |x| any_nan(float(x) * float(x));
    Twice: |x| any_nan(float(x) + float(x));
    Negative: |x| any_nan(-float(x));
    Abs: |x| any_nan(math::abs(float(x)));
    CanonicalNan: |x| canonical_nan(float(x)).to_bits();
    RoundTiesEven: |x| math::round_ties_even(float(x)).to_bits();
    Floor: |x| math::floor(float(x)).to_bits();
    ToI32NearestEven: |x| math::to_i32_nearest_even(float(x)) as u32;
    ToI32Floor: |x| math::to_i32_floor(float(x)) as u32;
    ToI32Trunc: |x| math::to_i32_trunc(float(x)) as u32;
    NearestEvenI32: |x| if float(x).is_nan() { 0 } else { math::nearest_even_i32(float(x)) as u32 };
    CastI32: |x| float(x) as i32 as u32;
    CastU32: |x| float(x) as u32;
    CastI8: |x| float(x) as i8 as u32;
    CastU8: |x| float(x) as u8 as u32;
    CastI64: |x| { let y = float(x) as i64 as u64; (y >> 32) as u32 ^ y as u32 };
    FromU32: |x| (x as f32).to_bits();
    FromI32: |x| (x as i32 as f32).to_bits();
    ThroughF64: |x| any_nan((float(x) as f64 * 0.1) as f32);
    F16FromF32: |x| convert::f16_from_f32(float(x)).to_bits() as u32;
    F32FromF16: |x| any_nan(convert::f32_from_f16(f16::from_bits(x as u16)));
    F16x2FromF32: |x| convert::f16x2_from_f32(float(x), float(x.rotate_left(16)));
    Bf16FromF32: |x| convert::bf16_from_f32(float(x)).to_bits() as u32;
    F32FromBf16: |x| convert::f32_from_bf16(bf16::from_bits(x as u16)).to_bits();
    E4m3FromF32: |x| convert::e4m3_from_f32(float(x)) as u32;
    F32FromE4m3: |x| any_nan(convert::f32_from_e4m3(x as u8));
    CountOnes: |x| x.count_ones();
    LeadingZeros: |x| x.leading_zeros();
    TrailingZeros: |x| x.trailing_zeros();
    ReverseBits: |x| x.reverse_bits();
    SwapBytes: |x| x.swap_bytes();
    PackLowBytes: |x| bits::pack_low_bytes([x, x >> 8, x >> 16, x.rotate_left(8)]);
}
