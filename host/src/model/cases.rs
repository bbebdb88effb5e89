//! The model system's cases for `ferrokv check`: every instance over shapes around its edges and hostile
//! inputs. Products also run on the CPU's own path, whose bits are an output like the kernels', so that a GPU
//! is compared with all of them.

use super::kernels::{Choice, Choosing, choose, embed_kernel, embedding, quantize, record_words};
use super::linear::{
    DeviceWeights, Epilogue, Input, PackedWeights, ProductKernel, Rows, WeightKind, batch_kernel,
    decode_kernel, fused_kernels, prefill_kernel,
};
use super::{cpu, prompt_cases};
use crate::attention::rope::{
    Pairing, RopeElement, frequencies, rope_append_kernel, rotate, rotate_and_append,
};
use crate::check::{Case, CaseError, Coverage, OutputBuffer, OutputElement, poisoned};
use crate::{Buffer, Device, Stream};
use half::{bf16, f16};
use kernels_gpu::attention::rotation::RopeShape;
use kernels_gpu::mixed;
use kernels_gpu::model::activations::{Gated, Normed, Plain};
use kernels_gpu::model::fixed::{Part, Record};
use kernels_gpu::model::{choose_largest, choose_sampled, quantize_activations, rope, rope_append};
use simt::KernelInfo;

/// What activations and logits hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Uniform in [-4, 4).
    Uniform,
    /// Random bits: NaN, infinities, subnormals and every exponent.
    Bits,
    /// Mostly uniform; one number in a hundred has random bits.
    Spiked,
    /// Zeros of both signs and subnormals.
    Tiny,
}

impl Content {
    const ALL: [Content; 4] = [Content::Uniform, Content::Bits, Content::Spiked, Content::Tiny];

    /// Element `index`: the same on every machine.
    fn value(self, seed: u64, index: usize) -> f32 {
        let z = mix(seed, index);
        let uniform = (z >> 40) as f32 / (1 << 21) as f32 - 4.0;
        let bits = f32::from_bits((z >> 32) as u32);
        match self {
            Content::Uniform => uniform,
            Content::Bits => bits,
            Content::Spiked => {
                if z.is_multiple_of(100) {
                    bits
                } else {
                    uniform
                }
            }
            Content::Tiny => {
                f32::from_bits((z >> 32) as u32 & if z.is_multiple_of(3) { 1 << 31 } else { 0x807f_ffff })
            }
        }
    }

    pub(super) fn values(self, seed: u64, count: usize) -> Vec<f32> {
        (0..count).map(|index| self.value(seed, index)).collect()
    }
}

/// Number `index` of stream `seed`.
fn mix(seed: u64, index: usize) -> u64 {
    mixed(0, seed.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(index as u64))
}

/// Random weights; hostile ones have any bytes as scales or elements.
pub(super) fn weights(
    kind: WeightKind,
    rows: usize,
    columns: usize,
    hostile: bool,
) -> Result<PackedWeights, CaseError> {
    let tensor_type = kind.tensor_type();
    let len = tensor_type.row_bytes(columns).unwrap_or(0) * rows;
    let mut bytes: Vec<u8> = (0..len).map(|i| mix(3, i) as u8).collect();
    if !hostile {
        let scale = |i: usize| (mix(4, i) >> 40) as f32 / (1 << 28) as f32 - 0.03;
        let scales = if kind == WeightKind::Q4_1 { 2 } else { 1 };
        for (i, block) in bytes.chunks_exact_mut(tensor_type.block_bytes()).enumerate() {
            match kind {
                WeightKind::F32 => block.copy_from_slice(&scale(i).to_le_bytes()),
                WeightKind::F16 => block.copy_from_slice(&f16::from_f32(scale(i)).to_le_bytes()),
                WeightKind::Bf16 => block.copy_from_slice(&bf16::from_f32(scale(i)).to_le_bytes()),
                _ => {
                    for (j, two) in block[..2 * scales].chunks_exact_mut(2).enumerate() {
                        two.copy_from_slice(&f16::from_f32(scale(2 * i + j)).to_le_bytes());
                    }
                }
            }
        }
    }
    Ok(PackedWeights::new(&[Rows { tensor_type, rows, columns, bytes: &bytes }])?)
}

/// Every case.
pub fn cases(coverage: Coverage) -> Vec<Case> {
    let mut cases = Vec::new();
    if coverage == Coverage::Huge {
        return cases;
    }
    add_quantize(&mut cases, coverage);
    add_products(&mut cases, coverage);
    prompt_cases::add(&mut cases, coverage);
    add_embedding(&mut cases);
    for pairing in [Pairing::HalfSplit, Pairing::Interleaved] {
        add_rotation::<f32>(&mut cases, pairing);
        add_rotation::<f16>(&mut cases, pairing);
        add_rotation::<bf16>(&mut cases, pairing);
        add_rotation_to_pools(&mut cases, pairing);
    }
    add_choices(&mut cases, coverage);
    cases
}

/// Records from values, and the values that made them.
pub(super) fn make_records(
    stream: &Stream,
    input: Input,
    tokens: usize,
    columns: usize,
) -> Result<Buffer<u32>, CaseError> {
    let mut words = poisoned::<u32>(stream, record_words(tokens, columns))?;
    // SAFETY: the input's handles reach `tokens` rows, as the callers below make them.
    unsafe { quantize(stream, input, words.global_mut(), tokens, columns)? };
    Ok(words)
}

fn add_quantize(cases: &mut Vec<Case>, coverage: Coverage) {
    let shapes: &[(usize, usize)] = match coverage {
        Coverage::Small => &[(2, 96)],
        Coverage::Quick => &[(1, 32), (3, 96), (2, 576), (1, 1024), (2, 1056), (1, 4128)],
        Coverage::Full | Coverage::Huge => {
            &[(1, 32), (3, 96), (2, 576), (1, 1024), (2, 1056), (1, 4128), (64, 8192), (9, 14336)]
        }
    };
    let kernels = [
        ("plain", quantize_activations::kernel::<Plain>().info()),
        ("norm", quantize_activations::kernel::<Normed>().info()),
        ("swiglu", quantize_activations::kernel::<Gated>().info()),
    ];
    for &(tokens, columns) in shapes {
        for content in Content::ALL {
            for (i, (name, kernel)) in kernels.into_iter().enumerate() {
                let label = format!("{name} {tokens}x{columns} {content:?}");
                let case = Case::new(kernel, label, move |device| {
                    let stream = Stream::new(device)?;
                    let x = Buffer::from_slice(device, &content.values(1, tokens * columns * 2))?;
                    let weight = Buffer::from_slice(device, &Content::Uniform.values(2, columns))?;
                    let (x, weight) = (x.global(), weight.global());
                    let input = match i {
                        0 => Input::Plain { x },
                        1 => Input::Normed { x, weight, epsilon: 1e-5 },
                        _ => Input::Gated { x },
                    };
                    let words = make_records(&stream, input, tokens, columns)?;
                    Ok(vec![OutputBuffer::download("records", &words)?])
                });
                cases.push(if tokens * columns <= 1024 { case.race_checked() } else { case });
            }
        }
    }
}

/// A product: what a case is about.
#[derive(Clone, Copy)]
pub(super) struct Problem {
    pub(super) kind: WeightKind,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) tokens: usize,
    pub(super) content: Content,
    pub(super) hostile: bool,
}

fn add_products(cases: &mut Vec<Case>, coverage: Coverage) {
    // Around groups of eight rows and a thread block's, every number of strands, full and ragged, one to 70
    // tokens.
    let edges: [(usize, usize, usize); 10] = [
        (1, 32, 1),
        (7, 192, 2),
        (9, 384, 4),
        (17, 416, 5),
        (24, 576, 7),
        (65, 800, 9),
        (70, 1536, 3),
        (33, 3104, 2),
        (20, 224, 33),
        (66, 64, 70),
    ];
    let shapes = if coverage == Coverage::Small { &[(9, 96, 2)][..] } else { &edges[..] };
    for kind in WeightKind::ALL {
        for &(rows, columns, tokens) in shapes {
            for content in [Content::Uniform, Content::Spiked] {
                let hostile = content == Content::Spiked;
                add_product(cases, Problem { kind, rows, columns, tokens, content, hostile });
            }
        }
    }
    if coverage == Coverage::Full {
        // SmolLM2's, and rows as long as those of an 8B model.
        for (rows, columns, tokens) in
            [(960, 576, 1), (576, 1536, 5), (3072, 576, 2), (49152, 576, 1), (512, 14336, 1)]
        {
            for kind in [WeightKind::Q4_1, WeightKind::Q8_0] {
                let content = Content::Uniform;
                add_product(cases, Problem { kind, rows, columns, tokens, content, hostile: false });
            }
        }
    }
}

fn add_product(cases: &mut Vec<Case>, problem: Problem) {
    let Problem { kind, rows, columns, tokens, content, hostile } = problem;
    let what = if hostile { "hostile weights" } else { "weights" };
    let label = format!("{rows}x{columns} {what}, {tokens} tokens {content:?}");
    let mut case = Case::new(decode_kernel(kind).info(), label, move |device| run_product(device, problem))
        .and(quantize_activations::kernel::<Plain>().info());
    let others: Vec<&'static KernelInfo> = prefill_kernel(kind)
        .iter()
        .map(|(kernel, _)| kernel.info())
        .chain(batch_kernel(kind).iter().map(|kernel| kernel.info()))
        .chain(fused_kernels(kind).iter().flatten().map(|kernel| kernel.info()))
        .collect();
    for kernel in others {
        case = case.and(kernel);
    }
    cases.push(if rows * columns * tokens <= 2048 { case.race_checked() } else { case });
}

fn run_product(device: &Device, problem: Problem) -> Result<Vec<OutputBuffer>, CaseError> {
    let Problem { kind, rows, columns, tokens, content, hostile } = problem;
    let stream = Stream::new(device)?;
    let packed = weights(kind, rows, columns, hostile)?;
    let on_device = DeviceWeights::new(device, &packed)?;
    let values = content.values(5, 2 * tokens * columns);
    let (bias, residual, norm) = (
        Content::Uniform.values(6, rows),
        Content::Uniform.values(7, tokens * rows),
        Content::Uniform.values(8, columns),
    );
    let x = Buffer::from_slice(device, &values)?;
    let bias_buffer = Buffer::from_slice(device, &bias)?;
    let residual_buffer = Buffer::from_slice(device, &residual)?;
    let norm = Buffer::from_slice(device, &norm)?;
    let words = make_records(&stream, Input::Plain { x: x.global() }, tokens, columns)?;

    let mut outputs = Vec::new();
    let mut run = |name, kernel, input, all: bool| -> Result<(), CaseError> {
        let mut out = poisoned::<f32>(&stream, tokens * rows)?;
        let epilogue = Epilogue {
            bias: all.then(|| bias_buffer.global()),
            residual: all.then(|| residual_buffer.global()),
        };
        // SAFETY: buffers of the device of these lengths, read back before they go.
        unsafe { on_device.run_on(&stream, kernel, input, epilogue, out.global_mut(), tokens)? };
        outputs.push(OutputBuffer::download(name, &out)?);
        Ok(())
    };
    let records = Input::Records(words.global());
    run("decode", ProductKernel::Decode, records, true)?;
    run("decode alone", ProductKernel::Decode, records, false)?;
    if kind.is_quantized() {
        run("batch", ProductKernel::Batch, records, true)?;
        run("batch alone", ProductKernel::Batch, records, false)?;
        run("prefill", ProductKernel::Prefill, records, true)?;
        let x = x.global();
        run("plain", ProductKernel::Auto, Input::Plain { x }, true)?;
        let weight = norm.global();
        run("normed", ProductKernel::Auto, Input::Normed { x, weight, epsilon: 1e-6 }, false)?;
        run("gated", ProductKernel::Auto, Input::Gated { x }, true)?;
    }

    // The CPU's own path: on the reference's side the bits of `decode`, and so on every other's.
    let zero = [Part { high: [0; 8], middle: [0; 8], low: [0; 8], step: 0.0, sum: 0.0 }; 4];
    let mut records: Vec<Record> = vec![zero; tokens * columns / 32];
    cpu::quantize(cpu::Source::Plain(&values[..tokens * columns]), columns, &mut records);
    let mut expected = vec![0f32; tokens * rows];
    cpu::product(&packed, &records, Some(&bias), cpu::Onto::Residual(&residual), &mut expected);
    if let Some(decode) = outputs.first() {
        let found: &[u32] = bytemuck::cast_slice(decode.bytes());
        let differing = expected.iter().zip(found).filter(|(a, b)| a.to_bits() != **b).count();
        outputs.push(OutputBuffer::new("differences from the CPU's own path", vec![differing as u64]));
        if differing != 0 {
            return Err(format!(
                "{differing} of {} outputs are not those of the CPU's own path",
                expected.len()
            )
            .into());
        }
    }
    Ok(outputs)
}

fn add_embedding(cases: &mut Vec<Case>) {
    for kind in WeightKind::ALL {
        for hostile in [false, true] {
            let label = format!("21x96, {}", if hostile { "hostile weights" } else { "weights" });
            let case = Case::new(embed_kernel(kind).info(), label, move |device| {
                let stream = Stream::new(device)?;
                let on_device = DeviceWeights::new(device, &weights(kind, 21, 96, hostile)?)?;
                let tokens = Buffer::from_slice(device, &[0u32, 7, 8, 20, 21, 3, u32::MAX])?;
                let mut out = poisoned::<f32>(&stream, 7 * 96)?;
                // SAFETY: a row for each token.
                unsafe { embedding(&stream, &on_device, tokens.global(), out.global_mut(), 7)? };
                Ok(vec![OutputBuffer::download("rows", &out)?])
            });
            cases.push(case.race_checked());
        }
    }
}

fn add_rotation<E: RopeElement + OutputElement>(cases: &mut Vec<Case>, pairing: Pairing) {
    // With 66 tokens a thread has several pairs, of heads of 96 channels not all at one angle.
    for (q_heads, kv_heads, head_dim, rotary, tokens) in
        [(9, 3, 64, 64, 6), (9, 3, 96, 80, 66), (2, 2, 10, 6, 6), (1, 1, 128, 32, 6), (4, 1, 2, 0, 6)]
    {
        for content in Content::ALL {
            let shape = RopeShape { q_heads, kv_heads, head_dim, rotary };
            let label = format!("{q_heads}/{kv_heads} heads of {head_dim}, {rotary} turn, {content:?}");
            let case = Case::new(E::kernel(pairing).info(), label, move |device| {
                let stream = Stream::new(device)?;
                let positions = [0u32, 1, 2, 8191, 131_071, u32::MAX].into_iter().cycle();
                let positions: Vec<u32> = positions.take(tokens).collect();
                let row = ((q_heads + 2 * kv_heads) * head_dim) as usize;
                let qkv = Buffer::from_slice(device, &content.values(9, tokens * row))?;
                let positions = Buffer::from_slice(device, &positions)?;
                // An empty table has no memory to point at.
                let mut table = frequencies(500_000.0, rotary as usize);
                table.push(0.0);
                let table = Buffer::from_slice(device, &table)?;
                let mut queries = poisoned::<E>(&stream, tokens * (q_heads * head_dim) as usize)?;
                let mut keys = poisoned::<E>(&stream, tokens * (kv_heads * head_dim) as usize)?;
                let mut values = poisoned::<E>(&stream, tokens * (kv_heads * head_dim) as usize)?;
                let args = rope::Args {
                    qkv: qkv.global(),
                    positions: positions.global(),
                    frequencies: table.global(),
                    queries: queries.global_mut(),
                    keys: keys.global_mut(),
                    values: values.global_mut(),
                    shape,
                };
                // SAFETY: buffers of the shape's lengths, read back before they go.
                unsafe { rotate(&stream, pairing, args, tokens)? };
                Ok(vec![
                    OutputBuffer::download("queries", &queries)?,
                    OutputBuffer::download("keys", &keys)?,
                    OutputBuffer::download("values", &values)?,
                ])
            });
            cases.push(case.race_checked());
        }
    }
}

/// The same straight to a pool of which the table names every other block.
fn add_rotation_to_pools(cases: &mut Vec<Case>, pairing: Pairing) {
    for (q_heads, kv_heads, head_dim, rotary) in [(9, 3, 64, 64), (2, 2, 10, 6), (4, 1, 2, 0)] {
        for content in Content::ALL {
            let shape = RopeShape { q_heads, kv_heads, head_dim, rotary };
            let label =
                format!("{q_heads}/{kv_heads} heads of {head_dim}, {rotary} turn, {content:?}, to pools");
            let case = Case::new(rope_append_kernel(pairing).info(), label, move |device| {
                let stream = Stream::new(device)?;
                // The last is past the table, also where three of two sequences have three blocks each.
                let positions = [31u32, 0, 17, 15, 95, 96];
                let tokens = positions.len();
                let row = ((q_heads + 2 * kv_heads) * head_dim) as usize;
                let qkv = Buffer::from_slice(device, &content.values(9, tokens * row))?;
                let positions = Buffer::from_slice(device, &positions)?;
                let mut turns = frequencies(500_000.0, rotary as usize);
                turns.push(0.0);
                let turns = Buffer::from_slice(device, &turns)?;
                let table = Buffer::from_slice(device, &[10u32, 0, 8, 2, 6, 4])?;
                let pool = 12 * (kv_heads * 16 * head_dim) as usize;
                let mut keys = Buffer::<f16>::zeroed(device, pool)?;
                let mut values = Buffer::<f16>::zeroed(device, pool)?;
                let mut lengths = Buffer::<u32>::zeroed(device, 2)?;
                let mut queries = poisoned::<f16>(&stream, tokens * (q_heads * head_dim) as usize)?;
                // All, then all but the last: only that one sets the length. Then as two sequences.
                for (count, of_each, blocks) in [(tokens, 6, 6), (tokens - 1, 5, 6), (tokens, 3, 3)] {
                    let args = rope_append::Args {
                        qkv: qkv.global(),
                        positions: positions.global(),
                        frequencies: turns.global(),
                        queries: queries.global_mut(),
                        table: table.global(),
                        lengths: lengths.global_mut(),
                        keys: keys.global_mut(),
                        values: values.global_mut(),
                        shape,
                        tokens: of_each,
                        max_blocks: blocks,
                    };
                    // SAFETY: buffers of the shape's lengths, read back before they go; the table's blocks
                    // are the pools'.
                    unsafe { rotate_and_append(&stream, pairing, args, count)? };
                }
                Ok(vec![
                    OutputBuffer::download("queries", &queries)?,
                    OutputBuffer::download("keys", &keys)?,
                    OutputBuffer::download("values", &values)?,
                    OutputBuffer::download("lengths", &lengths)?,
                ])
            });
            cases.push(case.race_checked());
        }
    }
}

fn add_choices(cases: &mut Vec<Case>, coverage: Coverage) {
    let vocabularies: &[usize] = match coverage {
        Coverage::Small => &[33],
        Coverage::Quick => &[1, 33, 1025, 3000, 17_000],
        Coverage::Full | Coverage::Huge => &[1, 31, 32, 33, 1024, 1025, 3000, 49152, 262_144],
    };
    let draws = [
        Choice::Sampled { temperature: 1.0, top_p: 1.0, seed: 1 },
        Choice::Sampled { temperature: 0.7, top_p: 0.9, seed: u64::MAX },
        Choice::Sampled { temperature: 5.0, top_p: 0.01, seed: 77 },
    ];
    for &vocabulary in vocabularies {
        for content in Content::ALL {
            for choice in [Choice::Greedy].into_iter().chain(draws) {
                let kernel = match choice {
                    Choice::Greedy => choose_largest::kernel().info(),
                    Choice::Sampled { .. } => choose_sampled::kernel().info(),
                };
                let label = format!("{choice:?} of {vocabulary} {content:?}");
                let case = Case::new(kernel, label, move |device| {
                    let stream = Stream::new(device)?;
                    let logits = Buffer::from_slice(device, &content.values(10, 3 * vocabulary))?;
                    let numbers = Buffer::from_slice(device, &[0u32, 1, 70_000])?;
                    let mut tokens = poisoned::<u32>(&stream, 3)?;
                    let mut positions = Buffer::from_slice(device, &[0u32, 4096, u32::MAX])?;
                    let rows = Choosing {
                        logits: logits.global(),
                        numbers: numbers.global(),
                        tokens: tokens.global_mut(),
                        positions: positions.global_mut(),
                    };
                    // SAFETY: three rows of logits, three of the others.
                    unsafe { choose(&stream, choice, rows, 3, vocabulary) }?;
                    Ok(vec![
                        OutputBuffer::download("tokens", &tokens)?,
                        OutputBuffer::download("positions", &positions)?,
                    ])
                });
                cases.push(if vocabulary == 33 && content != Content::Tiny {
                    case.race_checked()
                } else {
                    case
                });
            }
        }
    }
}
