//! The cache in two tiers: against a plain model, with any scratch, in graphs, and at its limits.

mod claims;
mod limits;
mod model;
mod residence;
mod steps;

use ferrokv::host::certified::cache::cases::{queries, tokens};
use ferrokv::host::certified::{
    CacheElement, Extents, Geometry, Policy, Rounding, SequenceId, StepPlan, StepProblem, TieredCache,
};
use ferrokv::host::{Buffer, Device, Stream};
use ferrokv::simt::emu::EmuOptions;
use std::sync::OnceLock;

/// The devices to run on: the emulator, and the GPU where there is one.
fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let mut devices = vec![Device::cpu(EmuOptions::default())];
        match Device::cuda(0, ferrokv::ptx()) {
            Ok(gpu) => devices.push(gpu),
            Err(error) => println!("without a GPU: {error}"),
        }
        devices
    })
}

fn extents(geometry: Geometry) -> Extents {
    Extents { geometry, blocks: 40, sequences: 4, max_tokens: 192, key_slots: 0, value_slots: 0 }
}

/// Rounded by chance, which follows from a block's place in its sequence, wherever the pool has it.
fn geometry() -> Geometry {
    Geometry::new(2, 64).unwrap().with_rounding(Rounding::Stochastic { seed: 3 })
}

/// `count` tokens on the device.
fn input<E: CacheElement>(device: &Device, geometry: Geometry, count: usize, seed: u64) -> Buffer<E> {
    Buffer::from_slice(device, &tokens::<E>(geometry, count, seed)).unwrap()
}

fn prefill<E: CacheElement>(
    cache: &mut TieredCache<E>,
    stream: &Stream,
    sequence: SequenceId,
    count: usize,
    seed: u64,
) {
    let device = stream.device();
    let (keys, values) =
        (input(device, cache.geometry(), count, seed), input(device, cache.geometry(), count, seed + 1000));
    cache.prefill(stream, sequence, &keys, &values).unwrap();
}

/// Few promotions, so that the scratch is wanted and contested.
fn policy() -> Policy {
    Policy { coverage: 0.7, max_keys: 4, expanded_keys: 6, value_tolerance: 0.02, ..Policy::CHOOSING }
}

fn problem(extents: Extents) -> StepProblem {
    StepProblem {
        sequences: extents.sequences,
        q_heads: 3 * extents.geometry.kv_heads(),
        kv_heads: extents.geometry.kv_heads(),
        head_dim: extents.geometry.head_dim(),
        max_tokens: extents.max_tokens,
    }
}

/// The bits of a step: output, log-sums, certificates.
fn step<E: CacheElement>(
    cache: &mut TieredCache<E>,
    stream: &Stream,
    plan: &mut StepPlan<E>,
    seed: u64,
) -> Vec<u32> {
    let queries = Buffer::from_slice(stream.device(), &queries::<E>(plan.problem(), seed)).unwrap();
    let mut out = plan.allocate().unwrap();
    cache.attend(stream, plan, &queries, &mut out).unwrap();
    stream.synchronize().unwrap();
    let mut bits: Vec<u32> = out.output.to_vec().unwrap().into_iter().map(f32::to_bits).collect();
    bits.extend(out.lse.to_vec().unwrap().into_iter().map(f32::to_bits));
    bits.extend(bytemuck::cast_slice::<_, u32>(&out.certificates.to_vec().unwrap()));
    bits
}
