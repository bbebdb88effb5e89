//! Attention of one layer of SmolLM2-135M on the CPU's own path, one query token: dense, and certified by
//! policy. Throughput is in cached tokens.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use half::f16;
use host::Device;
use host::certified::cpu::{Level, Out, Slices, Step};
use host::certified::proof::{Batch, Input, Trial};
use host::certified::{Certificate, Policy, StepProblem};
use host::dense;
use simt::emu::EmuOptions;
use std::hint::black_box;

const Q_HEADS: u32 = 9;
const KV_HEADS: u32 = 3;
const HEAD_DIM: u32 = 64;
const POLICIES: [(&str, Policy); 5] = [
    ("bare", Policy::BARE),
    ("codes", Policy::CODES),
    ("sound", Policy::SOUND),
    ("sound, each step due", Policy { renew: 1, ..Policy::SOUND }),
    ("choosing", Policy::CHOOSING),
];

fn attention(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attention");
    group.sample_size(20);
    for length in [128, 512, 4096] {
        // The last block is not full.
        let (max_tokens, tokens) = (length + 16, length + 5);
        let problem = StepProblem {
            sequences: 1,
            q_heads: Q_HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            max_tokens,
        };
        let batch = Batch::<f16>::new(problem, &[(Input::Sharp, tokens)], 1, 2);
        let device = Device::cpu(EmuOptions::default());
        let mut trial = Trial::new(&device, problem, batch.blocks()).expect("room");
        trial.load(&batch).expect("a cache");
        let (tiles, annotations) = trial.quantized().expect("tiles");
        let tiles: Vec<u32> =
            tiles.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let Batch { queries, keys, values, table, lengths, .. } = &batch;
        let heads = Q_HEADS as usize;
        let mut output = vec![0f32; heads * HEAD_DIM as usize];
        let mut lse = vec![0f32; heads];
        let mut certificates = vec![Certificate::UNKNOWN; heads];
        group.throughput(Throughput::Elements(u64::from(length)));
        for level in Level::available() {
            let exact = dense::Problem {
                sequences: 1,
                q_heads: Q_HEADS,
                kv_heads: KV_HEADS,
                head_dim: HEAD_DIM,
                query_tokens: 1,
                max_tokens,
            };
            let slices = dense::cpu::Slices { queries, keys, values, table, lengths };
            group.bench_function(format!("dense/{level:?}/{length}"), |bencher| {
                bencher.iter(|| {
                    dense::cpu::attend_at(*level, exact, black_box(slices), &mut output, &mut lse)
                        .expect("attended");
                });
            });
            for (name, policy) in POLICIES {
                let mut step = Step::new(problem, &policy).expect("a step");
                let slices = Slices {
                    queries,
                    tiles: &tiles,
                    annotations: &annotations,
                    table,
                    lengths,
                    keys,
                    values,
                };
                group.bench_function(format!("{name}/{level:?}/{length}"), |bencher| {
                    bencher.iter(|| {
                        let out = Out { output: &mut output, lse: &mut lse, certificates: &mut certificates };
                        step.run_at(*level, black_box(slices), out).expect("attended");
                    });
                });
                let read = step.originals_read();
                println!("{name}: {read:?} of {} tiles", KV_HEADS * tokens.div_ceil(16));
            }
        }
    }
    group.finish();
}

criterion_group!(benches, attention);
criterion_main!(benches);
