//! Products: bits of all paths, the bound against f64, prefill against token by token.

use super::{Numbers, assert_bits, blocks, emulator, weights};
use host::Buffer;
use host::model::cpu::{self, Level, Onto, Source};
use host::model::gguf::{TensorType, dequantize};
use host::model::kernels::{panel_words, panels, quantize, record_words};
use host::model::linear::{DeviceWeights, Epilogue, Input, PackedWeights, ProductKernel, Rows, WeightKind};
use kernels_gpu::model::fixed::{Part, Record, undo_digits};
use kernels_gpu::model::product::strands;
use proptest::prelude::*;
use simt::{Pod, Zeroable};

const ZERO: Record = [Part { high: [0; 8], middle: [0; 8], low: [0; 8], step: 0.0, sum: 0.0 }; 4];

fn records_of(source: Source<'_>, tokens: usize, columns: usize) -> Vec<Record> {
    let mut records = vec![ZERO; tokens * columns / 32];
    cpu::quantize(source, columns, &mut records);
    records
}

struct Problem {
    kind: WeightKind,
    rows: usize,
    columns: usize,
    tokens: usize,
    seed: u64,
    wild: bool,
    /// Values are times 2^exponent.
    exponent: i32,
}

/// Every path's product is that of the emulated matrix-vector kernel.
fn check(problem: &Problem) -> Vec<f32> {
    let &Problem { kind, rows, columns, tokens, seed, wild, exponent } = problem;
    let mut numbers = Numbers::new(seed ^ 0x55);
    let weights = weights(kind, rows, columns, seed, wild);
    let x: Vec<f32> = (0..tokens * columns)
        .map(|_| if wild && numbers.bits().is_multiple_of(50) { numbers.wild() } else { numbers.uniform() })
        .map(|x| x * 2f32.powi(exponent))
        .collect();
    let (bias, residual) = (numbers.values(rows, 1.0), numbers.values(tokens * rows, 1.0));
    let records = records_of(Source::Plain(&x), tokens, columns);

    let (device, stream) = emulator();
    let on_device = DeviceWeights::new(&device, &weights).unwrap();
    let values = Buffer::from_slice(&device, &x).unwrap();
    let mut words = Buffer::<u32>::new(&device, record_words(tokens, columns)).unwrap();
    let input = Input::Plain { x: values.global() };
    // SAFETY: the buffers have the lengths that tokens and columns ask for.
    unsafe { quantize(&stream, input, words.global_mut(), tokens, columns) }.unwrap();
    assert_eq!(bytemuck::cast_slice::<Record, u32>(&records), words.to_vec().unwrap(), "records");

    let (bias_buffer, residual_buffer) =
        (Buffer::from_slice(&device, &bias).unwrap(), Buffer::from_slice(&device, &residual).unwrap());
    let epilogue = Epilogue { bias: Some(bias_buffer.global()), residual: Some(residual_buffer.global()) };
    let run = |kernel, input| {
        let mut out = Buffer::<f32>::from_slice(&device, &vec![7.0; tokens * rows]).unwrap();
        // SAFETY: as above.
        unsafe { on_device.run_on(&stream, kernel, input, epilogue, out.global_mut(), tokens) }.unwrap();
        out.to_vec().unwrap()
    };
    let expected = run(ProductKernel::Decode, Input::Records(words.global()));
    if kind.is_quantized() {
        let found = run(ProductKernel::Prefill, Input::Records(words.global()));
        assert_bits("tensor cores", &expected, &found);
        let found = run(ProductKernel::Batch, Input::Records(words.global()));
        assert_bits("tensor cores, eight tokens", &expected, &found);
        // An emulated GPU of another generation has no such kernel.
        if on_device.has_panels() {
            let mut panel = Buffer::<u32>::new(&device, panel_words(tokens, columns)).unwrap();
            // SAFETY: as above.
            unsafe { panels(&stream, input, panel.global_mut(), tokens, columns) }.unwrap();
            let found = run(ProductKernel::Prompt, Input::Panels(panel.global()));
            assert_bits("groups of four warps", &expected, &found);
        }
        assert_bits("fused", &expected, &run(ProductKernel::Auto, input));
    }
    for level in Level::available() {
        let mut out = vec![7.0; tokens * rows];
        cpu::product_at(*level, &weights, &records, Some(&bias), Onto::Residual(&residual), &mut out);
        assert_bits(&format!("{level:?}"), &expected, &out);
        out.copy_from_slice(&residual);
        cpu::product_at(*level, &weights, &records, Some(&bias), Onto::Output, &mut out);
        assert_bits(&format!("{level:?}, in place"), &expected, &out);
    }
    expected
}

#[test]
fn odd_shapes_have_the_same_bits_on_every_path() {
    // Around a group, a warp's rows and a thread block's; every number of strands, full and ragged; around 4,
    // 8, 16, 32 and 64 tokens.
    let shapes = [
        (1, 32, 1),
        (7, 192, 2),
        (8, 96, 3),
        (9, 384, 4),
        (17, 416, 5),
        (24, 576, 7),
        (65, 800, 8),
        (70, 1536, 3),
        (33, 3104, 2),
        (8, 4128, 1),
        (20, 224, 31),
        (31, 1088, 15),
        (15, 128, 17),
        (16, 96, 33),
        (9, 64, 70),
    ];
    for kind in WeightKind::ALL {
        for (seed, (rows, columns, tokens)) in shapes.into_iter().enumerate() {
            check(&Problem { kind, rows, columns, tokens, seed: seed as u64, wild: false, exponent: 0 });
        }
    }
}

#[test]
fn wild_weights_and_inputs_have_the_same_bits_on_every_path() {
    for kind in WeightKind::ALL {
        for seed in 0..4 {
            let out =
                check(&Problem { kind, rows: 19, columns: 192, tokens: 6, seed, wild: true, exponent: 0 });
            assert!(out.iter().any(|y| y.is_nan()));
        }
    }
}

/// Around the largest magnitudes from and to which f16 holds digits times their block's step, and where those
/// are subnormal.
#[test]
fn values_of_any_size_have_the_same_bits_on_every_path() {
    for kind in [WeightKind::Q4_1, WeightKind::Q8_0] {
        for exponent in [-126i32, -60, -21, -20, -19, -18, -17, -16, -8, 8, 9, 10, 11, 12, 13, 14, 60, 110] {
            let seed = exponent.unsigned_abs().into();
            check(&Problem { kind, rows: 17, columns: 160, tokens: 5, seed, wild: false, exponent });
        }
    }
}

/// What each kernel over one token's records or panels gives, with nothing added.
fn alone(matrix: Rows<'_>, x: &[f32]) -> Vec<(ProductKernel, Vec<f32>)> {
    let (rows, columns) = (matrix.rows, matrix.columns);
    let (device, stream) = emulator();
    let weights = DeviceWeights::new(&device, &PackedWeights::new(&[matrix]).unwrap()).unwrap();
    let x = Buffer::from_slice(&device, x).unwrap();
    let input = Input::Plain { x: x.global() };
    let mut words = Buffer::<u32>::new(&device, record_words(1, columns)).unwrap();
    let mut panel = Buffer::<u32>::new(&device, panel_words(1, columns)).unwrap();
    // SAFETY: one token of so many channels.
    unsafe { quantize(&stream, input, words.global_mut(), 1, columns) }.unwrap();
    // SAFETY: as above.
    unsafe { panels(&stream, input, panel.global_mut(), 1, columns) }.unwrap();
    let (records, panels) = (Input::Records(words.global()), Input::Panels(panel.global()));
    let kernels = [
        (ProductKernel::Decode, records),
        (ProductKernel::Batch, records),
        (ProductKernel::Prefill, records),
        (ProductKernel::Prompt, panels),
    ];
    let run = |(kernel, input)| {
        let mut out = Buffer::<f32>::from_slice(&device, &vec![7.0; rows]).unwrap();
        // SAFETY: as above, and an output for each row.
        unsafe { weights.run_on(&stream, kernel, input, Epilogue::default(), out.global_mut(), 1) }.unwrap();
        (kernel, out.to_vec().unwrap())
    };
    let is_there = |kernel| kernel != ProductKernel::Prompt || weights.has_panels();
    kernels.into_iter().filter(|(kernel, _)| is_there(*kernel)).map(run).collect()
}

/// A block's minimum times u is −2^−150, which rounds to −0; three of four strands have no block, and adding
/// them makes it +0.
#[test]
fn a_sum_of_minus_zero_is_zero_on_every_path() {
    let mut bytes = vec![0u8; 20];
    bytes[2..4].copy_from_slice(&0x8001u16.to_le_bytes());
    let matrix = Rows { tensor_type: WeightKind::Q4_1.tensor_type(), rows: 1, columns: 32, bytes: &bytes };
    let mut x = [0f32; 32];
    x[5] = f32::MIN_POSITIVE;
    for (kernel, out) in alone(matrix, &x) {
        assert_eq!(out[0].to_bits(), 0, "{kernel:?}");
    }
}

/// Codes and values so large that S has more bits than two roundings would leave right, and the lower digit
/// of X at its least, −1024, on both sides of the border up to which f16 holds it times the step.
#[test]
fn a_blocks_sum_rounds_once() {
    let mut numbers = Numbers::new(11);
    let rows = 40;
    let mut bytes = Vec::new();
    for _ in 0..rows {
        bytes.extend(half::f16::ONE.to_le_bytes());
        bytes.extend((0..32).map(|_| 100 + (numbers.bits() % 28) as u8));
    }
    let uniform: Vec<f32> = (0..32).map(|_| 1.75 + numbers.uniform() / 16.0).collect();
    let of_steps = |exponent: i32| {
        let mut x = vec![2f32.powi(exponent - 10); 32];
        x[3] = 1.2 * 2f32.powi(exponent);
        x
    };
    for x in [uniform, of_steps(10), of_steps(11), of_steps(12), of_steps(13), of_steps(-18), of_steps(-19)] {
        let record = &records_of(Source::Plain(&x), 1, 32)[0];
        let fixed: Vec<i64> = (record.iter())
            .flat_map(|part| (0..8).map(|i| [part.high[i], part.middle[i], part.low[i]].map(i32::from)))
            .map(|digits| undo_digits(digits).into())
            .collect();
        let expected: Vec<f32> = (bytes.chunks_exact(34))
            .map(|row| row[2..].iter().zip(&fixed).map(|(code, x)| i64::from(*code as i8) * x).sum::<i64>())
            .map(|sum| record[0].step * sum as f32)
            .collect();
        let matrix = Rows { tensor_type: WeightKind::Q8_0.tensor_type(), rows, columns: 32, bytes: &bytes };
        for (kernel, out) in alone(matrix, &x) {
            assert_bits(&format!("{kernel:?}"), &expected, &out);
        }
        let matrix = Rows { tensor_type: WeightKind::Q8_0.tensor_type(), rows, columns: 32, bytes: &bytes };
        let packed = PackedWeights::new(&[matrix]).unwrap();
        for level in Level::available() {
            let mut out = vec![7.0; rows];
            cpu::product_at(*level, &packed, std::slice::from_ref(record), None, Onto::Nothing, &mut out);
            assert_bits(&format!("{level:?}"), &expected, &out);
        }
    }
}

/// The bound of `kernels_gpu::model::product`, for one output.
fn bound(kind: WeightKind, row: &[u8], weights: &[f32], x: &[f32]) -> f64 {
    let blocks = x.len() / 32;
    let (mut fixed, mut z) = (0f64, 0f64);
    for (b, (w, x)) in weights.chunks_exact(32).zip(x.chunks_exact(32)).enumerate() {
        let largest = x.iter().fold(0f64, |m, x| m.max(f64::from(x.abs())));
        let size: f64 = w.iter().map(|w| f64::from(w.abs())).sum();
        fixed += largest * size / f64::from(1 << 20);
        let block_bytes = kind.tensor_type().block_bytes();
        let half = |at: usize| {
            let at = b * block_bytes + at;
            f64::from(half::f16::from_le_bytes([row[at], row[at + 1]]).to_f32().abs())
        };
        let sum_x: f64 = x.iter().map(|x| f64::from(x.abs())).sum();
        z += match kind {
            WeightKind::Q4_1 => (15.0 * half(0) + half(2)) * sum_x,
            WeightKind::Q4_0 => 23.0 * half(0) * sum_x,
            WeightKind::Q8_0 => 128.0 * half(0) * sum_x,
            _ => w.iter().zip(x).map(|(w, x)| f64::from((w * x).abs())).sum(),
        };
    }
    let l = strands(blocks as u32) as usize;
    let steps = (blocks.div_ceil(l) * 2 + l + 12) as f64;
    fixed + steps * 1.01 * z / f64::from(1 << 24) + blocks as f64 * 2f64.powi(-120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn errors_are_within_the_bound(
        kind in prop::sample::select(WeightKind::ALL.to_vec()),
        rows in 1usize..20,
        columns in (1usize..60).prop_map(|blocks| blocks * 32),
        tokens in 1usize..3,
        exponent in -130i32..100,
        seed: u64,
    ) {
        let bytes = blocks(kind.tensor_type(), rows, columns, seed, false);
        let matrix = Rows { tensor_type: kind.tensor_type(), rows, columns, bytes: &bytes };
        let packed = PackedWeights::new(&[matrix]).unwrap();
        let scale = 2f64.powi(exponent) as f32;
        let x = Numbers::new(seed ^ 1).values(tokens * columns, scale);
        let mut out = vec![0f32; tokens * rows];
        cpu::product(&packed, &records_of(Source::Plain(&x), tokens, columns), None, Onto::Nothing, &mut out);
        let mut w = vec![0f32; columns];
        for r in 0..rows {
            let row = &bytes[r * bytes.len() / rows..(r + 1) * bytes.len() / rows];
            dequantize(kind.tensor_type(), row, &mut w);
            for t in 0..tokens {
                let x = &x[t * columns..][..columns];
                let exact: f64 = match kind {
                    // The type's own weights; the restored ones are rounded to f32.
                    WeightKind::Q4_1 => row.chunks_exact(20).zip(x.chunks_exact(32)).map(|(block, x)| {
                        let half = |at: usize| f64::from(half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32());
                        (0..32).map(|k| {
                            let q = block[4 + k % 16] >> (k / 16 * 4) & 15;
                            (half(0) * f64::from(q) + half(2)) * f64::from(x[k])
                        }).sum::<f64>()
                    }).sum(),
                    _ => w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum(),
                };
                let error = (f64::from(out[t * rows + r]) - exact).abs();
                let bound = bound(kind, row, &w, x);
                prop_assert!(error <= bound, "row {r}: {error:e} off, {bound:e} allowed");
            }
        }
    }

    #[test]
    fn random_products_have_the_same_bits_on_every_path(
        kind in prop::sample::select(WeightKind::ALL.to_vec()),
        rows in 1usize..30,
        blocks in 1usize..30,
        tokens in 1usize..10,
        wild: bool,
        seed: u64,
    ) {
        check(&Problem { kind, rows, columns: blocks * 32, tokens, seed, wild, exponent: 0 });
    }
}

#[test]
fn a_prompt_in_chunks_is_the_prompt_token_by_token() {
    let (rows, columns, tokens) = (40, 608, 70);
    let x = Numbers::new(5).values(tokens * columns, 3.0);
    for kind in WeightKind::ALL {
        let weights = weights(kind, rows, columns, 9, false);
        let records = records_of(Source::Plain(&x), tokens, columns);
        let mut whole = vec![0f32; tokens * rows];
        cpu::product(&weights, &records, None, Onto::Nothing, &mut whole);
        for chunk in [1, 3, 32, 33] {
            let mut parts = vec![0f32; tokens * rows];
            let pieces = records.chunks(chunk * columns / 32).zip(parts.chunks_mut(chunk * rows));
            pieces.for_each(|(records, out)| cpu::product(&weights, records, None, Onto::Nothing, out));
            assert_bits("chunks", &whole, &parts);
        }
    }
}

#[test]
fn matrices_of_parts_are_their_rows_one_below_another() {
    let columns = 96;
    let x = Numbers::new(2).values(columns, 1.0);
    let records = records_of(Source::Plain(&x), 1, columns);
    let part = |tensor_type: TensorType, rows: usize, seed: u64| {
        (tensor_type, rows, blocks(tensor_type, rows, columns, seed, false))
    };
    let product = |parts: &[(TensorType, usize, Vec<u8>)]| {
        let parts: Vec<Rows<'_>> = parts
            .iter()
            .map(|(tensor_type, rows, bytes)| Rows { tensor_type: *tensor_type, rows: *rows, columns, bytes })
            .collect();
        let packed = PackedWeights::new(&parts).unwrap();
        let mut out = vec![0f32; packed.rows()];
        cpu::product(&packed, &records, None, Onto::Nothing, &mut out);
        (packed.kind(), out)
    };
    let (a, b) = (part(TensorType::Q4_1, 5, 1), part(TensorType::Q4_1, 13, 2));
    let (kind, whole) = product(&[a.clone(), b.clone()]);
    assert_eq!(kind, WeightKind::Q4_1);
    let parts = [product(std::slice::from_ref(&a)).1, product(&[b]).1].concat();
    assert_bits("parts", &whole, &parts);
    let f32s = part(TensorType::F32, 3, 3);
    assert_eq!(product(&[a.clone(), part(TensorType::Q8_0, 2, 4)]).0, WeightKind::F16);
    let (kind, mixed) = product(&[a, f32s.clone()]);
    assert_eq!(kind, WeightKind::F32);
    assert_bits("f32 rows beside others", &product(&[f32s]).1, &mixed[5..]);
}

#[test]
fn bytes_are_those_of_the_file() {
    for (kind, bytes) in [
        (WeightKind::Q4_1, 20),
        (WeightKind::Q4_0, 18),
        (WeightKind::Q8_0, 34),
        (WeightKind::F16, 64),
        (WeightKind::F32, 128),
    ] {
        assert_eq!(weights(kind, 16, 320, 1, false).bytes(), 16 * 10 * bytes);
    }
}

#[test]
fn bad_matrices_and_launches_are_refused_by_name() {
    let rows = |tensor_type, rows, columns, bytes| Rows { tensor_type, rows, columns, bytes };
    let refused: [(&[Rows<'_>], &str); 6] = [
        (&[], "give at least one part"),
        (&[rows(TensorType::F32, 1, 33, &[0; 132])], "33 channels a row are no multiple of 32"),
        (&[rows(TensorType::Q8_0, 2, 32, &[0; 34])], "34 bytes of Q8_0 where the shape asks for 68"),
        (&[rows(TensorType::Q8_0, 0, 32, &[])], "0 × 32 cannot be used"),
        (
            &[rows(TensorType::F32, 1, 32, &[0; 128]), rows(TensorType::F32, 1, 64, &[0; 256])],
            "[32, 64] channels",
        ),
        (&[rows(TensorType::Q6K, 1, 32, &[0; 210])], "32 channels"),
    ];
    for (parts, text) in refused {
        let error = PackedWeights::new(parts).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
        assert_eq!(error.lines().count(), 1);
    }
    let (device, stream) = emulator();
    let on_device = DeviceWeights::new(&device, &weights(WeightKind::F16, 8, 32, 1, false)).unwrap();
    let x = Buffer::<f32>::zeroed(&device, 32).unwrap();
    let words = Buffer::<u32>::zeroed(&device, 32).unwrap();
    let mut out = Buffer::<f32>::zeroed(&device, 8).unwrap();
    let mut run = |kernel, input, tokens| {
        // SAFETY: refused before anything is read.
        unsafe { on_device.run_on(&stream, kernel, input, Epilogue::default(), out.global_mut(), tokens) }
            .unwrap_err()
            .to_string()
    };
    let (plain, records) = (Input::Plain { x: x.global() }, Input::Records(words.global()));
    assert!(run(ProductKernel::Auto, records, 0).contains("tokens is 0"));
    for kernel in [ProductKernel::Batch, ProductKernel::Prefill] {
        assert!(run(kernel, records, 1).contains("take integer codes"));
        assert!(run(kernel, plain, 1).contains("quantize first"));
    }
    assert!(run(ProductKernel::Auto, plain, 1).contains("quantize first"));
}

/// A record is 128 bytes without holes.
const _: () = {
    const fn plain<T: Pod + Zeroable>() -> usize {
        size_of::<T>()
    }
    assert!(plain::<Part>() == 32 && size_of::<Record>() == 128);
};
