//! Kernels on a GPU, timed by its events: INT8 quantization both ways, and dense attention. Without a GPU it
//! says so and measures nothing.
//!
//! Launches of a sample follow each other in one stream, so what the caches hold is what the launch before
//! has left: `ferrokv bench` has cold caches, rotating buffers and the memory's ceiling beside each row.

mod events;

use criterion::{BenchmarkId, Criterion, Throughput};
use events::EventTime;
use half::{bf16, f16};
use host::attention::{BlockTable, PagedPool};
use host::dense::sample::{Input, Sample, normal};
use host::dense::{self, DenseElement, Problem};
use host::int8::{self, Int8Element, Matrix, Variant};
use host::{Buffer, Device, Stream};
use std::rc::Rc;

const VARIANTS: [(&str, Variant); 7] = [
    ("naive", Variant::Naive),
    ("tiled", Variant::Tiled),
    ("coarsened", Variant::Coarsened),
    ("vectorized", Variant::Vectorized),
    ("rows", Variant::Rows),
    ("wide", Variant::Wide),
    ("fused", Variant::Fused),
];

fn main() {
    let device = match Device::cuda(0, ferrokv::ptx()) {
        Ok(device) => device,
        Err(reason) => return println!("gpu: nothing is measured: {reason}"),
    };
    let stream = Rc::new(Stream::new(&device).expect("a stream"));
    let mut criterion =
        Criterion::default().with_measurement(EventTime::new(&stream)).sample_size(20).configure_from_args();
    quantizers::<f32>(&mut criterion, &stream, "f32");
    quantizers::<f16>(&mut criterion, &stream, "f16");
    quantizers::<bf16>(&mut criterion, &stream, "bf16");
    attention::<f16>(&mut criterion, &stream, "f16");
    attention::<bf16>(&mut criterion, &stream, "bf16");
    criterion.final_summary();
}

/// Every variant's kernels on 32,768 tokens of 1024 channels. Throughput is in bytes read and written.
fn quantizers<T: Int8Element>(criterion: &mut Criterion<EventTime>, stream: &Stream, name: &str) {
    let device = stream.device();
    let matrix = Matrix::new(32_768, 1024).expect("a matrix");
    let keys: Vec<T> = (0..matrix.elements()).map(|i| T::from_f32(normal(1, i as u64))).collect();
    let keys = Buffer::from_slice(device, &keys).expect("room");
    let mut restored = Buffer::<T>::new(device, matrix.elements()).expect("room");
    let mut group = criterion.benchmark_group(format!("int8/{name}"));
    for (variant_name, variant) in VARIANTS {
        let mut plan = int8::Plan::<T>::new(device, matrix, variant).expect("a plan");
        let mut quantized = plan.allocate().expect("room");
        plan.quantize(stream, &keys, &mut quantized).expect("codes to go on with");
        // The scales by column need a pass of their own.
        let passes = if variant == Variant::Fused { 1 } else { 2 };
        let scales = quantized.scales.bytes() as u64;
        let (wide, narrow) = (keys.bytes() as u64, quantized.codes.bytes() as u64);
        group.throughput(Throughput::Bytes(passes * wide + narrow + scales));
        group.bench_function(BenchmarkId::new("quantize", variant_name), |bencher| {
            bencher.iter(|| plan.quantize(stream, &keys, &mut quantized).expect("launched"));
        });
        group.throughput(Throughput::Bytes(wide + narrow + scales));
        group.bench_function(BenchmarkId::new("dequantize", variant_name), |bencher| {
            bencher.iter(|| plan.dequantize(stream, &quantized, &mut restored).expect("launched"));
        });
    }
    group.finish();
}

/// One query token a sequence over caches of the heads of an 8B model. Throughput is in bytes of keys and
/// values.
fn attention<E: DenseElement>(criterion: &mut Criterion<EventTime>, stream: &Stream, name: &str) {
    let device = stream.device();
    let mut group = criterion.benchmark_group(format!("dense/{name}"));
    for (sequences, length) in [(1, 8192), (1, 32_768), (8, 4096)] {
        let problem = Problem {
            sequences,
            q_heads: 32,
            kv_heads: 8,
            head_dim: 128,
            query_tokens: 1,
            max_tokens: length,
        };
        let lengths = vec![length; sequences as usize];
        let sample = Sample::<E>::new(problem, &lengths, Input::Normal, 1);
        let paged = sample.paged(2, 0);
        let pool =
            PagedPool::from_slices(device, problem.kv_heads, problem.head_dim, &paged.keys, &paged.values)
                .expect("a pool");
        let mut table =
            BlockTable::new(device, sequences, problem.max_blocks(), pool.blocks()).expect("a table");
        for (sequence, blocks) in paged.tables.iter().enumerate() {
            table.set(sequence as u32, blocks, length).expect("blocks of the pool");
        }
        let queries = Buffer::from_slice(device, &sample.queries).expect("room");
        let mut plan = dense::Plan::<E>::new(device, problem).expect("a plan");
        let mut out = plan.allocate().expect("room");
        let bytes =
            2 * u64::from(sequences * length * problem.kv_heads * problem.head_dim) * size_of::<E>() as u64;
        group.throughput(Throughput::Bytes(bytes));
        group.bench_function(BenchmarkId::new(format!("{sequences} sequences"), length), |bencher| {
            bencher.iter(|| plan.run(stream, &queries, &pool, &table, &mut out).expect("launched"));
        });
    }
    group.finish();
}
