//! The CPU's INT8 quantizers and dequantizers on a cache of 4096 tokens of 1024 channels. Throughput is in
//! bytes of the unquantized matrix.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::{bf16, f16};
use host::dense::sample::normal;
use host::int8::{Int8Element, Matrix, Variant, cpu};
use std::hint::black_box;

const TOKENS: usize = 4096;
const CHANNELS: usize = 1024;

fn element<T: Int8Element>(criterion: &mut Criterion, name: &str) {
    let matrix = Matrix::new(TOKENS, CHANNELS).expect("a matrix");
    let keys: Vec<T> = (0..matrix.elements()).map(|i| T::from_f32(normal(1, i as u64))).collect();
    let mut codes = vec![0i8; keys.len()];
    let mut restored = keys.clone();
    let mut scales = vec![0f32; CHANNELS];
    let mut block_scales = vec![0f32; matrix.scales(Variant::Fused)];
    let mut group = criterion.benchmark_group("int8");
    group.sample_size(20).throughput(Throughput::Bytes(size_of_val(&keys[..]) as u64));
    group.bench_function(BenchmarkId::new("scales", name), |bencher| {
        bencher.iter(|| cpu::column_scales(black_box(&keys), matrix, &mut scales));
    });
    cpu::column_scales(&keys, matrix, &mut scales);
    group.bench_function(BenchmarkId::new("quantize", name), |bencher| {
        bencher.iter(|| cpu::quantize(black_box(&keys), matrix, &scales, &mut codes));
    });
    group.bench_function(BenchmarkId::new("dequantize", name), |bencher| {
        bencher.iter(|| cpu::dequantize(black_box(&codes), matrix, &scales, &mut restored));
    });
    group.bench_function(BenchmarkId::new("quantize blocks", name), |bencher| {
        bencher.iter(|| cpu::quantize_blocks(black_box(&keys), matrix, &mut block_scales, &mut codes));
    });
    cpu::quantize_blocks(&keys, matrix, &mut block_scales, &mut codes);
    group.bench_function(BenchmarkId::new("dequantize blocks", name), |bencher| {
        bencher.iter(|| cpu::dequantize(black_box(&codes), matrix, &block_scales, &mut restored));
    });
    group.finish();
}

fn int8(criterion: &mut Criterion) {
    element::<f32>(criterion, "f32");
    element::<f16>(criterion, "f16");
    element::<bf16>(criterion, "bf16");
}

criterion_group!(benches, int8);
criterion_main!(benches);
