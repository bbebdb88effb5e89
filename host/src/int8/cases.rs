//! The INT8 system's cases for `ferrokv check`: every instance over shapes around every edge and hostile
//! inputs.

use super::{Int8Element, Matrix, Plan, Variant};
use crate::check::{Case, CaseError, Coverage, OutputBuffer, OutputElement, poisoned};
use crate::{Buffer, Device, Stream};
use half::{bf16, f16};
use kernels_gpu::mixed;
use rayon::prelude::*;
use simt::KernelInfo;

/// What the matrices hold.
#[derive(Clone, Copy, Debug)]
enum Input {
    /// Uniform in [-1, 1).
    Uniform,
    /// Random bits: NaN, infinities, subnormals and every exponent.
    Bits,
    /// Multiples of half a scale: every quotient is a tie.
    Ties,
    /// Zeros and subnormals.
    Tiny,
    /// One channel 1000 times the others.
    Outlier,
}

impl Input {
    const ALL: [Input; 5] = [Input::Uniform, Input::Bits, Input::Ties, Input::Tiny, Input::Outlier];

    fn name(self) -> &'static str {
        match self {
            Input::Uniform => "uniform",
            Input::Bits => "bits",
            Input::Ties => "ties",
            Input::Tiny => "tiny",
            Input::Outlier => "outlier",
        }
    }

    /// Element `index` of a matrix: the same on every machine.
    fn value<T: Int8Element>(self, index: usize, matrix: Matrix) -> T {
        let z = mixed(0, index as u64);
        let uniform = (z >> 40) as f32 / (1 << 23) as f32 - 1.0;
        let bits = f32::from_bits((z >> 32) as u32);
        match self {
            Input::Uniform => T::from_f32(uniform),
            Input::Bits => T::from_f32(bits),
            // The first row sets the scale to 1; all these values are exact in every type.
            Input::Ties if index < matrix.channels => T::from_f32(127.0),
            Input::Ties => T::from_f32((z % 254) as f32 - 126.5),
            Input::Tiny if z.is_multiple_of(3) => T::from_f32(if z.is_multiple_of(2) { 0.0 } else { -0.0 }),
            Input::Tiny => T::from_f32(f32::from_bits((z >> 40) as u32 | ((z & 1) as u32) << 31)),
            Input::Outlier if index % matrix.channels == matrix.channels / 2 => T::from_f32(uniform * 1000.0),
            Input::Outlier => T::from_f32(uniform),
        }
    }

    fn matrix<T: Int8Element>(self, matrix: Matrix) -> Vec<T> {
        (0..matrix.elements()).into_par_iter().map(|index| self.value(index, matrix)).collect()
    }
}

/// Tokens × channels around the edges of vectors (4, 8 and 16), strips (2 and 8), tiles and token blocks
/// (16), warps and scan blocks (128 columns, 64 rows).
const EDGES: [(usize, usize); 19] = [
    (1, 1),
    (1, 4),
    (3, 1),
    (3, 5),
    (4, 3),
    (5, 7),
    (7, 12),
    (8, 15),
    (9, 16),
    (15, 17),
    (16, 64),
    (17, 68),
    (31, 33),
    (33, 65),
    (63, 132),
    (65, 130),
    (129, 127),
    (200, 192),
    (3, 24),
];

const LARGE: [(usize, usize); 4] = [(1025, 1023), (4096, 1024), (16384, 256), (131_072, 128)];

/// The cases of every instance.
pub fn cases(coverage: Coverage) -> Vec<Case> {
    let mut cases = Vec::new();
    if coverage == Coverage::Huge {
        // 2^31 + 2^21 elements in odd rows: flat indices and quads past 32 bits.
        for variant in [Variant::Naive, Variant::Rows, Variant::Fused] {
            add::<bf16>(&mut cases, (2_099_201, 1024), Input::Uniform, variant);
        }
        return cases;
    }
    let (step, inputs) = match coverage {
        Coverage::Small => (4, &[Input::Bits][..]),
        _ => (1, &Input::ALL[..]),
    };
    super::block_cases::add(&mut cases);
    for variant in Variant::ALL {
        for shape in EDGES.into_iter().step_by(step) {
            for &input in inputs {
                add_types(&mut cases, shape, input, variant);
            }
        }
        if coverage == Coverage::Full {
            for shape in LARGE {
                for input in [Input::Uniform, Input::Bits] {
                    add_types(&mut cases, shape, input, variant);
                }
            }
        }
    }
    cases
}

fn add_types(cases: &mut Vec<Case>, shape: (usize, usize), input: Input, variant: Variant) {
    add::<f32>(cases, shape, input, variant);
    add::<f16>(cases, shape, input, variant);
    add::<bf16>(cases, shape, input, variant);
}

fn add<T: Int8Element + OutputElement>(
    cases: &mut Vec<Case>,
    (tokens, channels): (usize, usize),
    input: Input,
    variant: Variant,
) {
    let matrix = Matrix { tokens, channels };
    let label = format!("{} {matrix} {} {}", T::NAME, input.name(), variant.name());
    let [quantize, dequantize] = kernels_of::<T>(matrix, variant);
    let mut case =
        Case::new(quantize, label, move |device| run::<T>(device, matrix, input, variant)).and(dequantize);
    case = case.and(T::KERNELS.first_nonfinite.info());
    if variant != Variant::Fused {
        case = case.and(T::KERNELS.column_maxima.info()).and(T::KERNELS.finish_scales.info());
    }
    cases.push(if matrix.elements() <= 4096 { case.race_checked() } else { case });
}

fn kernels_of<T: Int8Element>(matrix: Matrix, variant: Variant) -> [&'static KernelInfo; 2] {
    let k = T::KERNELS;
    match variant {
        Variant::Naive => [k.quantize_naive.info(), k.dequantize_naive.info()],
        Variant::Tiled => [k.quantize_tiled.info(), k.dequantize_tiled.info()],
        Variant::Coarsened => [k.quantize_coarsened.info(), k.dequantize_coarsened.info()],
        Variant::Vectorized => [k.quantize_vectorized.info(), k.dequantize_vectorized.info()],
        Variant::Wide if matrix.is_wide() => [k.quantize_wide.info(), k.dequantize_wide.info()],
        Variant::Wide if matrix.is_wide_back() => [k.quantize_rows.info(), k.dequantize_wide.info()],
        Variant::Rows | Variant::Wide => [k.quantize_rows.info(), k.dequantize_rows.info()],
        Variant::Fused => [k.quantize_fused.info(), k.dequantize_fused.info()],
    }
}

fn run<T: Int8Element + OutputElement>(
    device: &Device,
    matrix: Matrix,
    input: Input,
    variant: Variant,
) -> Result<Vec<OutputBuffer>, CaseError> {
    let stream = Stream::new(device)?;
    let keys = Buffer::from_slice(device, &input.matrix::<T>(matrix))?;
    let mut plan = Plan::<T>::new(device, matrix, variant)?;
    let mut out = super::Quantized {
        codes: poisoned(&stream, matrix.elements())?,
        scales: poisoned(&stream, matrix.scales(variant))?,
    };
    plan.quantize(&stream, &keys, &mut out)?;
    let mut restored = poisoned::<T>(&stream, matrix.elements())?;
    plan.dequantize(&stream, &out, &mut restored)?;
    let first = plan.first_nonfinite(&stream, &keys)?.map_or(u64::MAX, |index| index as u64);
    Ok(vec![
        OutputBuffer::download("scales", &out.scales)?,
        OutputBuffer::download("codes", &out.codes)?,
        OutputBuffer::download("restored", &restored)?,
        OutputBuffer::new("first_nonfinite", vec![first]),
    ])
}
