//! The inner loops over one row, in a form that the compiler turns into SIMD, for three instruction sets.

use super::Int8Element;

/// 1.5·2^23: see [`kernels_gpu::int8::quantizer`].
const ROUNDER: f32 = 12_582_912.0;

/// Makes `$name(arguments)`: the loop `$body`, compiled for AVX-512, for AVX2 and as it comes, chosen at run time.
macro_rules! multiversion {
    ($(#[$doc:meta])* fn $name:ident<$T:ident>($($argument:ident: $type:ty),*) $body:block) => {
        $(#[$doc])*
        pub(super) fn $name<$T: Int8Element>($($argument: $type),*) {
            #[inline(always)]
            fn body<$T: Int8Element>($($argument: $type),*) $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
                fn avx512<$T: Int8Element>($($argument: $type),*) {
                    body($($argument),*)
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2<$T: Int8Element>($($argument: $type),*) {
                    body($($argument),*)
                }
                let has_avx2 = is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c");
                if has_avx2
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                {
                    // SAFETY: the machine has these instructions.
                    return unsafe { avx512($($argument),*) };
                }
                if has_avx2 {
                    // SAFETY: the machine has these instructions.
                    return unsafe { avx2($($argument),*) };
                }
            }
            body($($argument),*)
        }
    };
}

multiversion! {
    /// Raises each maximum to the magnitude of the row's value; NaN does not count.
    fn raise_maxima<T>(row: &[T], maxima: &mut [f32]) {
        for (max, x) in maxima.iter_mut().zip(row) {
            let magnitude = x.to_f32().abs();
            *max = if magnitude > *max { magnitude } else { *max };
        }
    }
}

multiversion! {
    /// Equation (7) over one row.
    fn quantize<T>(row: &[T], scales: &[f32], codes: &mut [i8]) {
        for ((code, x), scale) in codes.iter_mut().zip(row).zip(scales) {
            let quotient = x.to_f32() / *scale;
            let low = if quotient < -127.0 { -127.0 } else { quotient };
            let clamped = if low > 127.0 { 127.0 } else { low };
            // Rounding a NaN through ROUNDER leaves one: its code is 0.
            let word = (clamped + ROUNDER).to_bits();
            *code = if quotient.is_nan() { 0 } else { word as i8 };
        }
    }
}

multiversion! {
    /// Equation (8) over one row.
    fn dequantize<T>(codes: &[i8], scales: &[f32], row: &mut [T]) {
        for ((x, code), scale) in row.iter_mut().zip(codes).zip(scales) {
            *x = T::from_f32(*code as f32 * *scale);
        }
    }
}
