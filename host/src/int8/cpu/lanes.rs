//! The inner loops over whole rows, in a form that the compiler turns into SIMD, for three instruction sets.

use super::Int8Element;
use half::f16;
use kernels_gpu::int8::quantizer::scale_from_max;
use std::any::TypeId;

/// 1.5·2^23: see [`kernels_gpu::int8::quantizer`].
const ROUNDER: f32 = 12_582_912.0;

/// Makes `$name(arguments)`: the loop `$body`, compiled for AVX-512, for AVX2 and as it comes, chosen at run
/// time.
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
    /// Raises each maximum to the magnitude of the rows' values in its column; NaN does not count.
    fn raise_maxima<T>(rows: &[T], maxima: &mut [f32]) {
        for row in rows.chunks_exact(maxima.len()) {
            raise(row, maxima);
        }
    }
}

multiversion! {
    /// Equation (7) over rows of `scales.len()`.
    fn quantize<T>(rows: &[T], scales: &[f32], codes: &mut [i8]) {
        encode_rows(rows, scales, codes);
    }
}

multiversion! {
    /// Equations (6) and (7) over the rows of one block. The second look at them finds them in a cache.
    fn quantize_block<T>(rows: &[T], scales: &mut [f32], codes: &mut [i8]) {
        scales.fill(0.0);
        for row in rows.chunks_exact(scales.len()) {
            raise(row, scales);
        }
        for scale in scales.iter_mut() {
            *scale = scale_from_max::<T>(*scale);
        }
        encode_rows(rows, scales, codes);
    }
}

multiversion! {
    /// Equation (8) over rows of `scales.len()`.
    fn dequantize<T>(codes: &[i8], scales: &[f32], rows: &mut [T]) {
        let channels = scales.len();
        let paired = paired::<T>(rows.len(), channels);
        let (code_pairs, codes) = codes.split_at(paired);
        let (row_pairs, rows) = rows.split_at_mut(paired);
        let pairs = code_pairs.chunks_exact(2 * channels).zip(row_pairs.chunks_exact_mut(2 * channels));
        for (codes, rows) in pairs {
            let ((codes, next_codes), (row, next_row)) = (codes.split_at(channels), rows.split_at_mut(channels));
            let values = row.iter_mut().zip(next_row).zip(codes).zip(next_codes).zip(scales);
            for ((((x, y), code), next), scale) in values {
                *x = narrow(*code as f32 * *scale);
                *y = narrow(*next as f32 * *scale);
            }
        }
        for (codes, row) in codes.chunks_exact(channels).zip(rows.chunks_exact_mut(channels)) {
            for ((x, code), scale) in row.iter_mut().zip(codes).zip(scales) {
                *x = narrow(*code as f32 * *scale);
            }
        }
    }
}

#[inline(always)]
fn raise<T: Int8Element>(row: &[T], maxima: &mut [f32]) {
    for (max, x) in maxima.iter_mut().zip(row) {
        let magnitude = widen(*x).abs();
        *max = if magnitude > *max { magnitude } else { *max };
    }
}

/// How many of `elements`, in rows of `channels`, are done two rows at a time: a scale is then loaded once
/// for both, which counts where a row and its scales are longer than the nearest cache. (Narrower ones gain
/// nothing, and two rows of 2-byte elements vectorise badly.)
#[inline(always)]
fn paired<T>(elements: usize, channels: usize) -> usize {
    if size_of::<T>() == 4 && channels >= 4096 { elements / (2 * channels) * (2 * channels) } else { 0 }
}

/// Equation (7) over rows.
#[inline(always)]
fn encode_rows<T: Int8Element>(rows: &[T], scales: &[f32], codes: &mut [i8]) {
    let channels = scales.len();
    let paired = paired::<T>(rows.len(), channels);
    let (row_pairs, rows) = rows.split_at(paired);
    let (code_pairs, codes) = codes.split_at_mut(paired);
    let pairs = row_pairs.chunks_exact(2 * channels).zip(code_pairs.chunks_exact_mut(2 * channels));
    for (rows, codes) in pairs {
        let ((row, next_row), (codes, next_codes)) = (rows.split_at(channels), codes.split_at_mut(channels));
        let values = codes.iter_mut().zip(next_codes).zip(row).zip(next_row).zip(scales);
        for ((((code, next_code), x), y), scale) in values {
            *code = encode(*x, *scale);
            *next_code = encode(*y, *scale);
        }
    }
    for (row, codes) in rows.chunks_exact(channels).zip(codes.chunks_exact_mut(channels)) {
        for ((code, x), scale) in codes.iter_mut().zip(row).zip(scales) {
            *code = encode(*x, *scale);
        }
    }
}

/// Equation (7).
#[inline(always)]
fn encode<T: Int8Element>(x: T, scale: f32) -> i8 {
    let quotient = widen(x) / scale;
    let low = if quotient < -127.0 { -127.0 } else { quotient };
    let clamped = if low > 127.0 { 127.0 } else { low };
    // Rounding a NaN through ROUNDER leaves one: its code is 0.
    let word = (clamped + ROUNDER).to_bits();
    if quotient.is_nan() { 0 } else { word as i8 }
}

/// The element as f32, in a form that vectorises: `half` asks the machine anew for each f16.
#[inline(always)]
fn widen<T: Int8Element>(x: T) -> f32 {
    if TypeId::of::<T>() == TypeId::of::<f16>() { f32_from_f16(bytemuck::cast(x)) } else { x.to_f32() }
}

/// The element nearest to `x`, as [`widen`].
#[inline(always)]
fn narrow<T: Int8Element>(x: f32) -> T {
    if TypeId::of::<T>() == TypeId::of::<f16>() { bytemuck::cast(f16_from_f32(x)) } else { T::from_f32(x) }
}

/// Exact: the magnitude's bits, moved to where f32 has them, are a float 2^112 too small, subnormals
/// included.
#[inline(always)]
fn f32_from_f16(half: u16) -> f32 {
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = (half as u32 & 0x7fff) << 13;
    let scaled = (f32::from_bits(magnitude) * REBIAS).to_bits();
    // All ones in the exponent mean infinity and NaN, not a number; a NaN becomes quiet.
    let special = magnitude | 0x7f80_0000 | if magnitude > 0x7c00 << 13 { 0x0040_0000 } else { 0 };
    let bits = if magnitude >= 0x7c00 << 13 { special } else { scaled };
    f32::from_bits(bits | (half as u32 & 0x8000) << 16)
}

/// Rounds to nearest even.
#[inline(always)]
fn f16_from_f32(x: f32) -> u16 {
    let (magnitude, sign) = (x.to_bits() & 0x7fff_ffff, (x.to_bits() >> 16) & 0x8000);
    // Normal: the exponent is moved by 112, and a carry of the rounding may move it once more, up to
    // infinity.
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_add(0xfff + odd).wrapping_sub(112 << 23) >> 13;
    // Subnormal: beside 0.5 the last place of an f32 is that of an f16 subnormal, and the sum is rounded to
    // it.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let small = if magnitude < 113 << 23 { subnormal } else { normal };
    let nan = 0x7e00 | (magnitude >> 13) & 0x3ff;
    let large = if magnitude > 0x7f80_0000 { nan } else { 0x7c00 };
    // From 2^16 on; values from 65520 to there round up to infinity by themselves.
    let half = if magnitude >= 143 << 23 { large } else { small };
    (half | sign) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels_gpu::int8::quantizer;

    /// Rows as wide as the cache are done in pairs: every count of rows, and widths around the change.
    #[test]
    fn wide_rows_have_the_quantizers_bits() {
        for channels in [4095, 4096, 4097] {
            for tokens in 1..=5 {
                let rows: Vec<f32> =
                    (0..tokens * channels).map(|i| ((i * 7919 % 65_537) as f32 - 32_768.0) * 0.37).collect();
                let scales: Vec<f32> = (0..channels).map(|i| 90.0 + (i % 13) as f32).collect();
                let mut codes = vec![0; rows.len()];
                quantize(&rows, &scales, &mut codes);
                let mut restored = vec![0f32; rows.len()];
                dequantize(&codes, &scales, &mut restored);
                for (i, x) in rows.iter().enumerate() {
                    let scale = scales[i % channels];
                    assert_eq!(
                        i32::from(codes[i]),
                        quantizer::quantize(*x, scale),
                        "{tokens}x{channels} at {i}"
                    );
                    let expected = quantizer::dequantize(codes[i], scale);
                    assert_eq!(restored[i].to_bits(), expected.to_bits(), "{tokens}x{channels} at {i}");
                }
            }
        }
    }

    #[test]
    fn every_f16_widens_as_the_hardware_does() {
        for bits in 0..=u16::MAX {
            let expected = f16::from_bits(bits).to_f32();
            assert_eq!(f32_from_f16(bits).to_bits(), expected.to_bits(), "{bits:#06x}");
        }
    }

    #[test]
    fn narrowing_rounds_as_the_hardware_does() {
        let check = |x: f32| {
            assert_eq!(f16_from_f32(x), f16::from_f32(x).to_bits(), "{:#010x}", x.to_bits());
        };
        // Around every f16, every boundary between two, and each next f32.
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits).to_f32().to_bits();
            for offset in [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff] {
                check(f32::from_bits(x.wrapping_add(offset)));
                check(f32::from_bits(x.wrapping_sub(offset)));
            }
        }
        for step in 0..1 << 22 {
            check(f32::from_bits(step * 1021));
        }
    }
}
