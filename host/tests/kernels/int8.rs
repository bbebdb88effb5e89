//! The INT8 system's kernels one by one; `tests/int8` has them as plans run them.

use half::{bf16, f16};
use host::int8::{Matrix, cpu, oracle};
use kernels_gpu::Element;
use kernels_gpu::int8::quantizer::scale_from_max;
use kernels_gpu::int8::{
    Shape, column_maxima, dequantize_naive, dequantize_rows, dequantize_tiled, first_nonfinite, launch,
    quantize_coarsened, quantize_naive, quantize_rows, quantize_tiled,
};
use simt::{Kernel, LaunchShape};
use simt_test::{Trial, array, bits, exact, finite, near, sizes};

/// 2^-24: rounding to f32 changes a normal number by no more than that part of it.
const U: f64 = 1.0 / 16_777_216.0;

fn shape(matrix: Matrix) -> Shape {
    Shape::new(matrix.tokens as u64, matrix.channels as u32)
}

/// Codes of a matrix by the scales of its columns.
fn quantized<T>(
    kernel: Kernel<quantize_naive::Args<T>>,
    cover: fn(Shape) -> Option<LaunchShape>,
    (tokens, channels): (usize, usize),
    keys: Vec<T>,
) -> Option<Trial>
where
    T: host::int8::Int8Element,
{
    let matrix = Matrix::new(tokens, channels).ok()?;
    let truth = oracle::quantize(&keys, matrix, tokens);
    let scales: Vec<f32> = truth.scales.iter().map(|scale| *scale as f32).collect();
    let quotients: Vec<f64> = truth.quotients.iter().map(|quotient| quotient.clamp(-127.0, 127.0)).collect();
    let bounds: Vec<f64> = truth.quotients.iter().map(|quotient| 0.5 + quotient.abs() * U).collect();
    let mut simd = vec![0; keys.len()];
    cpu::quantize(&keys, matrix, &scales, &mut simd);
    let why = "half a code, and 2^-24 of the quotient, which is rounded to f32 before";
    let shape = shape(matrix);
    Some(Trial::new(kernel, cover(shape)?, move |memory| quantize_naive::Args {
        keys: memory.input(&keys),
        scales: memory.input(&scales),
        codes: memory
            .output(near::<i8>(quotients.clone(), |i| bounds[i], why).and("the SIMD path", simd.as_slice())),
        shape,
    }))
}

/// Values of codes by scales.
fn restored<T>(
    kernel: Kernel<dequantize_naive::Args<T>>,
    cover: fn(Shape) -> Option<LaunchShape>,
    (tokens, channels): (usize, usize),
    codes: Vec<i8>,
    maxima: Vec<T>,
) -> Option<Trial>
where
    T: host::int8::Int8Element + simt_test::Element,
{
    let matrix = Matrix::new(tokens, channels).ok()?;
    let scales: Vec<f32> = maxima.iter().map(|x| scale_from_max::<T>(x.to_f32().abs())).collect();
    let exactly: Vec<f64> = codes
        .iter()
        .enumerate()
        .map(|(i, code)| f64::from(*code) * f64::from(scales[i % channels]))
        .collect();
    // The product of a code and a scale has 32 bits, so it is exact in f64. It is rounded to f32, where it is
    // a normal number or 0, since scales are, and then to T.
    let bound = |x: f64| x.abs() * U + x.abs() * (1.0 + U) * T::HALF_ULP + T::SUBNORMAL_ERROR;
    let bounds: Vec<f64> = exactly.iter().map(|x| bound(*x)).collect();
    let mut simd = maxima.repeat(tokens);
    cpu::dequantize(&codes, matrix, &scales, &mut simd);
    let shape = shape(matrix);
    Some(Trial::new(kernel, cover(shape)?, move |memory| dequantize_naive::Args {
        codes: memory.input(&codes),
        scales: memory.input(&scales),
        keys: memory.output(
            near::<T>(exactly.clone(), |i| bounds[i], "one rounding to f32, one to the type")
                .and("the SIMD path", simd.as_slice()),
        ),
        shape,
    }))
}

macro_rules! quantizes {
    ($($name:ident: $kernel:ident, $cover:expr, $element:ident;)*) => {$(
        #[simt::test(cases = 24, ptx = ferrokv::ptx())]
        fn $name(
            #[draw(sizes(1..=40))] tokens: usize,
            #[draw(sizes(1..=70))] channels: usize,
            #[draw(array(tokens * channels, bits::<$element>()))] keys: Vec<$element>,
        ) -> Option<Trial> {
            quantized($kernel::kernel::<$element>(), $cover, (tokens, channels), keys)
        }
    )*};
}

quantizes! {
    naive_f32: quantize_naive, |shape| Some(launch::naive(shape)), f32;
    naive_f16: quantize_naive, |shape| Some(launch::naive(shape)), f16;
    tiled_bf16: quantize_tiled, |shape| Some(launch::tiled(shape)), bf16;
    coarsened_f16: quantize_coarsened, |shape| Some(launch::coarsened(shape)), f16;
    rows_f32: quantize_rows, launch::rows, f32;
    rows_f16: quantize_rows, launch::rows, f16;
    rows_bf16: quantize_rows, launch::rows, bf16;
}

macro_rules! restores {
    ($($name:ident: $kernel:ident, $cover:expr, $element:ident;)*) => {$(
        #[simt::test(cases = 24, ptx = ferrokv::ptx())]
        fn $name(
            #[draw(sizes(1..=40))] tokens: usize,
            #[draw(sizes(1..=70))] channels: usize,
            #[draw(array(tokens * channels, -127i8..=127))] codes: Vec<i8>,
            #[draw(array(channels, finite::<$element>()))] maxima: Vec<$element>,
        ) -> Option<Trial> {
            restored($kernel::kernel::<$element>(), $cover, (tokens, channels), codes, maxima)
        }
    )*};
}

restores! {
    back_naive_f32: dequantize_naive, |shape| Some(launch::naive(shape)), f32;
    back_tiled_f16: dequantize_tiled, |shape| Some(launch::tiled(shape)), f16;
    back_rows_f32: dequantize_rows, launch::rows, f32;
    back_rows_f16: dequantize_rows, launch::rows, f16;
    back_rows_bf16: dequantize_rows, launch::rows, bf16;
}

/// The largest magnitude of each column: a reduction over blocks, by atomics.
macro_rules! reduces {
    ($($maxima:ident, $first:ident: $element:ident;)*) => {$(
        #[simt::test(cases = 24, ptx = ferrokv::ptx())]
        fn $maxima(
            #[draw(sizes(1..=150))] tokens: usize,
            #[draw(sizes(1..=140))] channels: usize,
            #[draw(array(tokens * channels, bits::<$element>()))] keys: Vec<$element>,
        ) -> Option<Trial> {
            let mut largest = vec![0f32; channels];
            for (i, x) in keys.iter().map(|x| x.to_f32().abs()).enumerate().filter(|(_, x)| !x.is_nan()) {
                largest[i % channels] = largest[i % channels].max(x);
            }
            let expected: Vec<u32> = largest.iter().map(|x| x.to_bits()).collect();
            let shape = Shape::new(tokens as u64, channels as u32);
            let (kernel, band) = (column_maxima::kernel::<$element>(), launch::scan_band(shape));
            Some(Trial::new(kernel, launch::column_maxima(shape)?, move |memory| column_maxima::Args {
                keys: memory.input(&keys),
                maxima: memory.in_out(&vec![0; channels], &expected),
                shape,
                band,
            }))
        }

        #[simt::test(cases = 24, ptx = ferrokv::ptx())]
        fn $first(
            #[draw(sizes(1..=40))] tokens: usize,
            #[draw(sizes(1..=40))] channels: usize,
            #[draw(array(tokens * channels, bits::<$element>()))] drawn: Vec<$element>,
            #[draw(sizes(0..=1600))] from: usize,
        ) -> Option<Trial> {
            // Most matrices have one at their start: none before `from`.
            let tame = |(i, x): (usize, $element)| if i < from { <$element>::from_f32(0.5) } else { x };
            let keys: Vec<$element> = drawn.into_iter().enumerate().map(tame).collect();
            let first = keys.iter().position(|x| !x.to_f32().is_finite()).map_or(u64::MAX, |at| at as u64);
            let shape = Shape::new(tokens as u64, channels as u32);
            let kernel = first_nonfinite::kernel::<$element>();
            Some(Trial::new(kernel, launch::first_nonfinite(shape)?, move |memory| first_nonfinite::Args {
                keys: memory.input(&keys),
                first: memory.in_out(&[u64::MAX], exact(vec![first])),
                shape,
            }))
        }
    )*};
}

reduces! { maxima_f32, first_f32: f32; maxima_f16, first_f16: f16; maxima_bf16, first_bf16: bf16; }
