//! The float types a cache may be stored in.

use glam::{UVec2, UVec4, Vec4};
use half::{bf16, f16};
use simt::{Global, GlobalMut, Pod, convert};

/// Writes `x`, of 4, 8 or 16 bytes, from element `index` on in one access. A plain store of a vector type is
/// several to the optimizer, which may leave them apart where it shares them between the arms of a branch.
#[simt::device]
pub(crate) fn store_whole<T: Pod, V: Pod>(data: GlobalMut<T>, index: usize, x: V) {
    match size_of::<V>() {
        4 => data.store_vector::<u32>(index, bytemuck::cast(x)),
        8 => data.store_vector::<u64>(index, bytemuck::cast(x)),
        16 => data.store_vector::<u128>(index, bytemuck::cast(x)),
        _ => const { core::assert!(matches!(size_of::<V>(), 4 | 8 | 16), "an access of 4, 8 or 16 bytes") },
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A storage type of floats: `f32`, `f16` or `bf16`. Arithmetic is f32 throughout; these convert at the
/// edges.
pub trait Element: Pod + Send + Sync + sealed::Sealed {
    /// Four elements side by side, moved in one access: 16 bytes of f32, 8 of f16 and bf16.
    type Four: Pod;
    /// The type's name in files and listings.
    const NAME: &'static str;
    /// What infinities count as: the largest value, for f32 a hair (2 ULP) below it, so that a scale made
    /// from it, times its largest code, does not overflow when rounded.
    const LARGEST: f32;
    /// Half the relative distance of neighbours: rounding to the type changes a normal value by no more.
    const HALF_ULP: f64;
    /// The largest absolute error of rounding into the type's subnormal range.
    const SUBNORMAL_ERROR: f64;

    /// The element as f32, exactly.
    fn to_f32(self) -> f32;
    /// The element nearest to `x`, ties to even.
    fn from_f32(x: f32) -> Self;
    /// Four elements as f32.
    fn widen(four: Self::Four) -> [f32; 4];
    /// The four elements nearest to `x`.
    fn narrow(x: [f32; 4]) -> Self::Four;

    /// Elements `index` to `index + 3`, read once; `index` is a multiple of 4.
    #[simt::device]
    fn load_four(data: Global<Self>, index: usize) -> [f32; 4] {
        Self::widen(data.load_vector_streaming::<Self::Four>(index))
    }

    /// Writes elements `index` to `index + 3`; `index` is a multiple of 4.
    #[simt::device]
    fn store_four(data: GlobalMut<Self>, index: usize, x: [f32; 4]) {
        store_whole(data, index, Self::narrow(x));
    }

    /// Elements `index` to `index + 15`, read once, in accesses of 16 bytes; `index` is a multiple of 16.
    /// Each takes half of every sector that a warp touches; the next finds its half in the first-level cache.
    #[simt::device]
    fn load_sixteen(data: Global<Self>, index: usize) -> [[f32; 4]; 4] {
        if size_of::<Self::Four>() == 16 {
            let four = |at| Self::widen(data.load_vector_readonly::<Self::Four>(at));
            return [four(index), four(index + 4), four(index + 8), four(index + 12)];
        }
        let eight =
            |at| bytemuck::cast::<UVec4, [Self::Four; 2]>(data.load_vector_readonly(at)).map(Self::widen);
        let ([a, b], [c, d]) = (eight(index), eight(index + 8));
        [a, b, c, d]
    }

    /// Writes 16 bytes: four elements of f32, of `x[0]` alone, or eight of f16 and bf16; `index` is a
    /// multiple of as many.
    #[simt::device]
    fn store_16_bytes(data: GlobalMut<Self>, index: usize, x: [[f32; 4]; 2]) {
        if size_of::<Self::Four>() == 16 {
            Self::store_four(data, index, x[0]);
        } else {
            store_whole::<_, UVec4>(data, index, bytemuck::cast(x.map(Self::narrow)));
        }
    }
}

impl Element for f32 {
    type Four = Vec4;
    const NAME: &'static str = "f32";
    const LARGEST: f32 = f32::from_bits(0x7f7f_fffd);
    const HALF_ULP: f64 = 0.0;
    const SUBNORMAL_ERROR: f64 = 0.0;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
    #[inline(always)]
    fn widen(four: Vec4) -> [f32; 4] {
        four.to_array()
    }
    #[inline(always)]
    fn narrow(x: [f32; 4]) -> Vec4 {
        Vec4::from_array(x)
    }
}

impl Element for f16 {
    type Four = UVec2;
    const NAME: &'static str = "f16";
    const LARGEST: f32 = 65504.0;
    const HALF_ULP: f64 = 1.0 / 2048.0;
    const SUBNORMAL_ERROR: f64 = 1.0 / 33_554_432.0;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        convert::f32_from_f16(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        convert::f16_from_f32(x)
    }
    #[inline(always)]
    fn widen(four: UVec2) -> [f32; 4] {
        let half = |bits: u32| convert::f32_from_f16(f16::from_bits(bits as u16));
        [half(four.x), half(four.x >> 16), half(four.y), half(four.y >> 16)]
    }
    #[inline(always)]
    fn narrow(x: [f32; 4]) -> UVec2 {
        UVec2::new(convert::f16x2_from_f32(x[0], x[1]), convert::f16x2_from_f32(x[2], x[3]))
    }
}

impl Element for bf16 {
    type Four = UVec2;
    const NAME: &'static str = "bf16";
    const LARGEST: f32 = f32::from_bits(0x7f7f_0000);
    const HALF_ULP: f64 = 1.0 / 256.0;
    // bf16 has f32's exponents: its subnormal steps are 2^-133.
    const SUBNORMAL_ERROR: f64 = 4.591774807899561e-41;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        convert::f32_from_bf16(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        convert::bf16_from_f32(x)
    }
    #[inline(always)]
    fn widen(four: UVec2) -> [f32; 4] {
        let low = |bits: u32| f32::from_bits(bits << 16);
        let high = |bits: u32| f32::from_bits(bits & 0xffff_0000);
        [low(four.x), high(four.x), low(four.y), high(four.y)]
    }
    #[inline(always)]
    fn narrow(x: [f32; 4]) -> UVec2 {
        let pair = |low, high| {
            convert::bf16_from_f32(low).to_bits() as u32
                | (convert::bf16_from_f32(high).to_bits() as u32) << 16
        };
        UVec2::new(pair(x[0], x[1]), pair(x[2], x[3]))
    }
}
