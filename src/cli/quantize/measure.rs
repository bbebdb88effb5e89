//! One tensor through every implementation: sizes, errors, times, and whether the bits agree.

use crate::cli::failure::Failure;
use crate::cli::memory::zeros;
use bytemuck::Pod;
use host::int8::file::Granularity;
use host::int8::metrics::{self, Errors};
use host::int8::scores::Queries;
use host::int8::{Int8Element, Matrix, Plan, Variant, cpu};
use host::{BackendKind, Buffer, Device, Event, Stream};
use kernels_gpu::int8::quantizer::error_bound;
use serde::Serialize;
use std::time::Instant;

/// Repetitions of what is timed on the GPU and with SIMD; the median counts.
const REPEATS: usize = 7;

/// A time and the bytes that had to be moved in it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Timing {
    /// Seconds.
    pub seconds: f64,
    /// Bytes read and written, each as often as the algorithm must.
    pub bytes: u64,
    /// 10^9 bytes a second.
    pub gb_per_s: f64,
}

impl Timing {
    fn new(seconds: f64, bytes: u64) -> Self {
        Timing { seconds, bytes, gb_per_s: bytes as f64 / seconds.max(1e-12) / 1e9 }
    }
}

/// One implementation's run.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    /// `cpu` (SIMD), `emulator` or `cuda`.
    pub on: &'static str,
    /// Scales and codes.
    pub quantize: Timing,
    /// Back to the element type.
    pub dequantize: Timing,
    /// Scales, codes and restored values compared with the CPU's.
    pub compared: u64,
    /// How many of them have other bits.
    pub differing: u64,
}

/// A variant's, or with `variant` "cpu" the SIMD path's, line of results.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The kernels, or "cpu".
    pub variant: &'static str,
    /// Which elements share a scale.
    pub granularity: &'static str,
    /// Bytes of codes and scales.
    pub bytes_after: u64,
    /// The largest error.
    pub max_error: f64,
    /// The bound of the largest scale.
    pub max_bound: f64,
    /// The largest error of an element against its own bound; at most 1.
    pub bound_ratio: f64,
    /// The root of the sum of squared errors.
    pub l2_error: f64,
    /// The mean error.
    pub mean_error: f64,
    /// The mean |q·k − q·k^|, for keys with queries.
    pub score_error: Option<f64>,
    /// The implementations.
    pub runs: Vec<Run>,
}

/// A tensor's results.
#[derive(Clone, Debug, Serialize)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The first extent.
    pub tokens: usize,
    /// The product of the others.
    pub channels: usize,
    /// Its size.
    pub bytes_before: u64,
    /// One a variant, then one a granularity for the SIMD path.
    pub rows: Vec<Row>,
}

/// What to measure on.
pub struct Bench {
    /// Always there; used up to `emulator_limit` elements.
    pub emulator: Device,
    /// The most elements that the emulator is given.
    pub emulator_limit: usize,
    /// If there is one.
    pub gpu: Option<Device>,
    /// Which kernels.
    pub variants: Vec<Variant>,
}

/// What the SIMD path made of a tensor: what the others are compared with, and what is written.
pub struct Reference<T> {
    granularity: Granularity,
    /// [tokens, channels].
    pub codes: Vec<i8>,
    /// As the granularity says.
    pub scales: Vec<f32>,
    restored: Vec<T>,
    run: Run,
}

/// Bytes that quantizing must move: two reads of the matrix with scales of whole columns (the scales are
/// needed before the first code), one with scales of blocks; and the scales read where they were written
/// before.
fn quantize_bytes<T>(matrix: Matrix, granularity: Granularity) -> u64 {
    let (elements, scales) = (matrix.elements() as u64, matrix.scales(granularity.variant()) as u64);
    let element = size_of::<T>() as u64;
    match granularity {
        Granularity::Channel => elements * (2 * element + 1) + 2 * 4 * scales,
        Granularity::Block16 => elements * (element + 1) + 4 * scales,
    }
}

fn dequantize_bytes<T>(matrix: Matrix, granularity: Granularity) -> u64 {
    let (elements, scales) = (matrix.elements() as u64, matrix.scales(granularity.variant()) as u64);
    elements * (1 + size_of::<T>() as u64) + 4 * scales
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn timed(mut work: impl FnMut()) -> f64 {
    let times = (0..REPEATS).map(|_| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    });
    median(times.collect())
}

/// Quantizes and restores with the SIMD path.
///
/// # Errors
/// [`Failure::NoMemory`].
pub fn reference<T: Int8Element + Pod>(
    name: &str,
    keys: &[T],
    matrix: Matrix,
    granularity: Granularity,
) -> Result<Reference<T>, Failure> {
    let mut codes: Vec<i8> = zeros(name, keys.len())?;
    let mut scales: Vec<f32> = zeros(name, matrix.scales(granularity.variant()))?;
    let mut restored: Vec<T> = zeros(name, keys.len())?;
    let quantize = timed(|| quantize_into(keys, matrix, granularity, &mut scales, &mut codes));
    let dequantize = timed(|| cpu::dequantize(&codes, matrix, &scales, &mut restored));
    let run = Run {
        on: "cpu",
        quantize: Timing::new(quantize, quantize_bytes::<T>(matrix, granularity)),
        dequantize: Timing::new(dequantize, dequantize_bytes::<T>(matrix, granularity)),
        compared: 0,
        differing: 0,
    };
    Ok(Reference { granularity, codes, scales, restored, run })
}

/// The codes and scales of a granularity, from the SIMD path.
///
/// # Errors
/// [`Failure::NoMemory`].
pub fn quantized<T: Int8Element>(
    name: &str,
    keys: &[T],
    matrix: Matrix,
    granularity: Granularity,
) -> Result<(Vec<i8>, Vec<f32>), Failure> {
    let mut codes: Vec<i8> = zeros(name, keys.len())?;
    let mut scales: Vec<f32> = zeros(name, matrix.scales(granularity.variant()))?;
    quantize_into(keys, matrix, granularity, &mut scales, &mut codes);
    Ok((codes, scales))
}

fn quantize_into<T: Int8Element>(
    keys: &[T],
    matrix: Matrix,
    granularity: Granularity,
    scales: &mut [f32],
    codes: &mut [i8],
) {
    match granularity {
        Granularity::Channel => {
            cpu::column_scales(keys, matrix, scales);
            cpu::quantize(keys, matrix, scales, codes);
        }
        Granularity::Block16 => cpu::quantize_blocks(keys, matrix, scales, codes),
    }
}

fn differing<T: Pod>(a: &[T], b: &[T]) -> u64 {
    // Bits, so that NaN equals NaN and −0 differs from 0.
    a.iter().zip(b).filter(|(a, b)| bytemuck::bytes_of(*a) != bytemuck::bytes_of(*b)).count() as u64
}

/// Quantizes and restores with a variant's kernels on `device`, and compares.
fn run_kernels<T: Int8Element + Pod>(
    device: &Device,
    variant: Variant,
    keys: &[T],
    matrix: Matrix,
    expected: &Reference<T>,
) -> Result<Run, Failure> {
    let stream = Stream::new(device)?;
    let input = Buffer::from_slice(device, keys)?;
    let mut output = Buffer::<T>::new(device, keys.len())?;
    let mut plan = Plan::<T>::new(device, matrix, variant)?;
    let mut quantized = plan.allocate()?;
    let (start, middle, end) = (Event::new(device)?, Event::new(device)?, Event::new(device)?);
    let on_gpu = device.kind() == BackendKind::Cuda;
    let (mut quantize, mut dequantize) = (Vec::new(), Vec::new());
    // The emulator's time is no figure to be proud of, and long: once will do. A GPU's first run warms up.
    for repeat in 0..if on_gpu { REPEATS + 1 } else { 1 } {
        stream.record(&start)?;
        plan.quantize(&stream, &input, &mut quantized)?;
        stream.record(&middle)?;
        plan.dequantize(&stream, &quantized, &mut output)?;
        stream.record(&end)?;
        stream.synchronize()?;
        if !on_gpu || repeat != 0 {
            quantize.push(middle.elapsed_ms(&start)? / 1e3);
            dequantize.push(end.elapsed_ms(&middle)? / 1e3);
        }
    }
    let mut different = differing(&quantized.scales.to_vec()?, &expected.scales);
    different += differing(&quantized.codes.to_vec()?, &expected.codes);
    different += differing(&output.to_vec()?, &expected.restored);
    Ok(Run {
        on: if on_gpu { "cuda" } else { "emulator" },
        quantize: Timing::new(median(quantize), quantize_bytes::<T>(matrix, expected.granularity)),
        dequantize: Timing::new(median(dequantize), dequantize_bytes::<T>(matrix, expected.granularity)),
        compared: (expected.scales.len() + 2 * keys.len()) as u64,
        differing: different,
    })
}

fn row<T: Int8Element + Pod>(
    variant: &'static str,
    reference: &Reference<T>,
    (errors, score_error): (Errors, Option<f64>),
    runs: Vec<Run>,
) -> Row {
    let largest = reference.scales.iter().copied().fold(0f32, f32::max);
    Row {
        variant,
        granularity: reference.granularity.name(),
        bytes_after: (reference.codes.len() + 4 * reference.scales.len()) as u64,
        max_error: errors.max_abs,
        max_bound: error_bound::<T>(largest),
        bound_ratio: errors.bound_ratio,
        l2_error: errors.l2,
        mean_error: errors.mean_abs,
        score_error,
        runs,
    }
}

/// Measures one tensor. `step` is called before each piece of work with what it is.
///
/// # Errors
/// What a device reports, [`Failure::NoMemory`].
pub fn measure<T: Int8Element + Pod>(
    name: &str,
    keys: &[T],
    matrix: Matrix,
    queries: Option<Queries>,
    bench: &Bench,
    step: &dyn Fn(&str),
) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    let mut simd = Vec::new();
    for granularity in Granularity::ALL {
        let variants: Vec<Variant> = bench
            .variants
            .iter()
            .copied()
            .filter(|variant| Granularity::of(*variant) == granularity)
            .collect();
        if variants.is_empty() {
            continue;
        }
        step("cpu");
        let reference = reference(name, keys, matrix, granularity)?;
        let errors = metrics::errors(keys, &reference.restored, matrix, &reference.scales);
        let score = queries.map(|queries| queries.score_error(keys, &reference.restored, matrix));
        for variant in variants {
            let emulator = (keys.len() <= bench.emulator_limit).then_some(&bench.emulator);
            let mut runs = Vec::new();
            for device in emulator.into_iter().chain(&bench.gpu) {
                step(&format!("{variant} on {}", device.kind()));
                runs.push(run_kernels(device, variant, keys, matrix, &reference)?);
            }
            rows.push(row(variant.name(), &reference, (errors, score), runs));
        }
        simd.push(row("cpu", &reference, (errors, score), vec![reference.run.clone()]));
    }
    rows.append(&mut simd);
    Ok(rows)
}
