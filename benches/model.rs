//! The CPU's products at the extents of SmolLM2-135M: 30 layers of Q4_1 and an output layer of Q8_0, each
//! layer with weights of its own, so that they come from memory as in a run. Throughput is in tokens.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use host::model::cpu::{self, Level, Onto, Source};
use host::model::gguf::TensorType;
use host::model::linear::{PackedWeights, Rows};
use kernels_gpu::model::fixed::{Part, Record};
use std::hint::black_box;

const HIDDEN: usize = 576;
const FFN: usize = 1536;
const QKV: usize = 960;
const VOCABULARY: usize = 49152;
const LAYERS: usize = 30;
const ZERO: Record = [Part { high: [0; 8], middle: [0; 8], low: [0; 8], step: 0.0, sum: 0.0 }; 4];

struct Layer {
    qkv: PackedWeights,
    output: PackedWeights,
    gate_up: PackedWeights,
    down: PackedWeights,
}

fn weights(tensor_type: TensorType, rows: usize, columns: usize, seed: usize) -> PackedWeights {
    let mut bytes: Vec<u8> = (0..tensor_type.row_bytes(columns).unwrap_or(0) * rows)
        .map(|i| ((i + seed).wrapping_mul(0x9e37_79b1) >> 13) as u8)
        .collect();
    // Scales of 2^-8: what the numbers are does not matter, but they shall be numbers.
    for block in bytes.chunks_exact_mut(tensor_type.block_bytes()) {
        block[..2].copy_from_slice(&[0, 0x1c]);
        if tensor_type == TensorType::Q4_1 {
            block[2..4].copy_from_slice(&[0, 0x9c]);
        }
    }
    PackedWeights::new(&[Rows { tensor_type, rows, columns, bytes: &bytes }]).expect("a matrix")
}

fn layers() -> Vec<Layer> {
    let q4 = |rows, columns, seed| weights(TensorType::Q4_1, rows, columns, seed);
    (0..LAYERS)
        .map(|i| Layer {
            qkv: q4(QKV, HIDDEN, i),
            output: q4(HIDDEN, HIDDEN, i + 100),
            gate_up: q4(2 * FFN, HIDDEN, i + 200),
            down: q4(HIDDEN, FFN, i + 300),
        })
        .collect()
}

/// The layers' products, with what comes before them, for some tokens.
struct State {
    x: Vec<f32>,
    qkv: Vec<f32>,
    hidden: Vec<f32>,
    records: Vec<Record>,
    wide: Vec<Record>,
    norm: Vec<f32>,
}

impl State {
    fn new(tokens: usize) -> State {
        State {
            x: (0..tokens * HIDDEN).map(|i| (i % 97) as f32 * 0.02 - 1.0).collect(),
            qkv: vec![0.0; tokens * QKV],
            hidden: vec![0.0; tokens * 2 * FFN],
            records: vec![ZERO; tokens * HIDDEN / 32],
            wide: vec![ZERO; tokens * FFN / 32],
            norm: vec![1.0; HIDDEN],
        }
    }

    fn run(&mut self, level: Level, layers: &[Layer]) {
        let State { x, qkv, hidden, records, wide, norm } = self;
        for layer in layers {
            cpu::quantize_at(level, normed(x, norm), HIDDEN, records);
            cpu::product_at(level, &layer.qkv, records, None, Onto::Nothing, qkv);
            // Attention would be here; its output has the queries' place.
            cpu::quantize_at(level, normed(x, norm), HIDDEN, records);
            cpu::product_at(level, &layer.output, records, None, Onto::Output, x);
            cpu::quantize_at(level, normed(x, norm), HIDDEN, records);
            cpu::product_at(level, &layer.gate_up, records, None, Onto::Nothing, hidden);
            cpu::quantize_at(level, Source::Gated(hidden), FFN, wide);
            cpu::product_at(level, &layer.down, wide, None, Onto::Output, x);
        }
    }
}

fn normed<'a>(x: &'a [f32], weight: &'a [f32]) -> Source<'a> {
    Source::Normed { x, weight, epsilon: 1e-5 }
}

fn products(criterion: &mut Criterion) {
    let layers = layers();
    let head = weights(TensorType::Q8_0, VOCABULARY, HIDDEN, 7);
    let mut group = criterion.benchmark_group("smollm2");
    group.sample_size(20);
    for level in Level::available() {
        for tokens in [1, 64] {
            let mut state = State::new(tokens);
            group.throughput(Throughput::Elements(tokens as u64));
            group.bench_function(format!("layers/{level:?}/{tokens}"), |bencher| {
                bencher.iter(|| state.run(*level, black_box(&layers)));
            });
        }
        let mut state = State::new(1);
        cpu::quantize(Source::Plain(&state.x), HIDDEN, &mut state.records);
        let mut logits = vec![0f32; VOCABULARY];
        group.throughput(Throughput::Elements(1));
        group.bench_function(format!("logits/{level:?}"), |bencher| {
            bencher.iter(|| {
                cpu::product_at(*level, &head, black_box(&state.records), None, Onto::Nothing, &mut logits);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, products);
criterion_main!(benches);
