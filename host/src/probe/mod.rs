//! The probe kernels: every primitive of `simt`, for emulator and GPU to be compared by.

mod cluster_cases;
mod matrix_cases;
mod overlap_cases;
mod product_cases;
mod tile_cases;

use crate::check::{Case, CaseError, Coverage, OutputBuffer, OutputElement, poisoned};
use crate::kv::System;
use crate::{Buffer, Device, Stream};
use glam::Vec4;
use kernels_gpu::mix;
use kernels_gpu::probe::{
    atomics, barriers, clusters, fences, functions, indices, matrices, memory, operators, overlaps, products,
    shared, tiles, warps,
};
use simt::{Dim3, Kernel, KernelArgs, KernelInfo, LaunchShape, Pod};

/// Outputs of one launch of a function or an operator, at most.
const LAUNCH: u32 = 1 << 22;
/// Threads of their blocks.
const BLOCK: u32 = 256;

/// The system.
pub static SYSTEM: System = System {
    name: "probe",
    about: "what each primitive of the kernel language does",
    kernels: || kernels().collect(),
    cases: |coverage| match coverage {
        Coverage::Small => cases(Samples::SMALL),
        Coverage::Quick => cases(Samples::QUICK),
        Coverage::Full => cases(Samples::FULL),
        Coverage::Huge => Vec::new(),
    },
    schemes: &[],
};

/// How much of the functions' and operators' input is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Samples {
    /// Bit patterns for each function of one operand, spread over all 2^32, in multiples of 4.
    pub patterns: u32,
    /// Operands for each operator.
    pub operands: u32,
}

impl Samples {
    /// For runs with every check, in many orders, or under compute-sanitizer.
    pub const SMALL: Samples = Samples { patterns: 1 << 10, operands: 1 << 10 };
    /// Enough to notice a wrong instruction: seconds on the emulator of a debug build.
    pub const QUICK: Samples = Samples { patterns: 1 << 14, operands: 1 << 13 };
    /// Over 10^9 outputs in all.
    pub const FULL: Samples = Samples { patterns: 1 << 24, operands: 3 << 22 };
}

/// Every case of every probe kernel.
pub fn cases(samples: Samples) -> Vec<Case> {
    let mut cases = Vec::new();
    index_cases(&mut cases);
    barrier_cases(&mut cases);
    warp_cases(&mut cases);
    atomic_cases(&mut cases);
    shared_cases(&mut cases);
    memory_cases(&mut cases);
    fence_cases(&mut cases);
    cases.extend(matrix_cases::cases(samples));
    cases.extend(product_cases::cases(samples));
    cases.extend(overlap_cases::cases(samples));
    cases.extend(tile_cases::cases());
    cases.extend(cluster_cases::cases(samples));
    function_cases(&mut cases, samples.patterns);
    operator_cases(&mut cases, samples.operands);
    cases
}

/// Every probe kernel.
pub fn kernels() -> impl Iterator<Item = &'static KernelInfo> {
    [
        indices::indices::INSTANCES,
        barriers::barriers::INSTANCES,
        barriers::stages::INSTANCES,
        warps::shuffles::INSTANCES,
        warps::votes::INSTANCES,
        warps::reductions::INSTANCES,
        warps::exchanges::INSTANCES,
        warps::together::INSTANCES,
        atomics::global::INSTANCES,
        atomics::shared::INSTANCES,
        shared::widths::INSTANCES,
        shared::layouts::INSTANCES,
        memory::hints::INSTANCES,
        matrices::multiply::INSTANCES,
        matrices::matrices::INSTANCES,
        matrices::copies::INSTANCES,
        products::products::INSTANCES,
        fences::last_block::INSTANCES,
        fences::last_lane::INSTANCES,
        overlaps::link::INSTANCES,
        overlaps::link_in_order::INSTANCES,
        tiles::boxes::INSTANCES,
        tiles::boxes_back::INSTANCES,
        clusters::places::INSTANCES,
        clusters::reduce_2::INSTANCES,
        clusters::reduce_4::INSTANCES,
        clusters::reduce_8::INSTANCES,
        clusters::ring_2::INSTANCES,
        clusters::ring_4::INSTANCES,
        clusters::ring_8::INSTANCES,
        clusters::update_2::INSTANCES,
        clusters::update_4::INSTANCES,
        clusters::update_8::INSTANCES,
        functions::function::INSTANCES,
        operators::operator::INSTANCES,
    ]
    .into_iter()
    .flatten()
}

/// One launch with one output of `len` elements.
///
/// # Safety
/// The kernel stays inside the output, with these arguments and this shape, and has no race.
unsafe fn one_output<T: OutputElement, A: KernelArgs>(
    kernel: Kernel<A>,
    label: String,
    shape: LaunchShape,
    len: usize,
    args: impl Fn(&mut Buffer<T>) -> A + Send + Sync + 'static,
) -> Case {
    Case::new(kernel.info(), label, move |device| {
        let stream = Stream::new(device)?;
        let mut out = poisoned::<T>(&stream, len)?;
        // SAFETY: this function's contract; the output lives until it is downloaded.
        unsafe { stream.launch(&kernel, shape, args(&mut out)) }?;
        Ok(vec![OutputBuffer::download("out", &out)?])
    })
    .race_checked()
}

fn index_cases(cases: &mut Vec<Case>) {
    let dim = |x, y, z| Dim3 { x, y, z };
    let shapes = [
        (dim(1, 1, 1), dim(1, 1, 1)),
        (dim(3, 1, 1), dim(33, 1, 1)),
        (dim(2, 3, 1), dim(8, 8, 1)),
        (dim(2, 3, 4), dim(5, 4, 3)),
        (dim(1, 2, 5), dim(1, 2, 64)),
        (dim(5, 1, 2), dim(1024, 1, 1)),
    ];
    for (grid, block) in shapes {
        let shape = LaunchShape::new((grid.x, grid.y, grid.z), (block.x, block.y, block.z));
        let len = (grid.count() * block.count()) as usize * indices::WORDS;
        let label = format!("grid={grid} block={block}");
        // SAFETY: each thread writes its own words of the output.
        cases.push(unsafe {
            one_output(indices::indices::kernel(), label, shape, len, |out| indices::indices::Args {
                out: out.global_mut(),
            })
        });
    }
}

fn barrier_cases(cases: &mut Vec<Case>) {
    for (threads, seed) in [(1, 1), (31, 2), (32, 3), (48, 4), (257, 5), (1024, 6)] {
        let shape = LaunchShape::new(3, threads).shared(barriers::layout().bytes);
        let len = (3 * threads * barriers::WORDS) as usize;
        let label = format!("blocks=3 threads={threads} seed={seed}");
        let args = move |out: &mut Buffer<u32>| barriers::barriers::Args { out: out.global_mut(), seed };
        // SAFETY: each thread writes its own words of the output; at most 1024 threads share the tile.
        cases.push(unsafe { one_output(barriers::barriers::kernel(), label, shape, len, args) });
    }
    for (threads, seed) in [(64u32, 3u32), (256, 4), (1024, 5)] {
        let shape = LaunchShape::new(3, threads).shared(barriers::layout().bytes);
        let len = (3 * threads / 2 * barriers::ROUNDS_OF_STAGES) as usize;
        let label = format!("blocks=3 threads={threads} seed={seed}");
        let args = move |out: &mut Buffer<u32>| barriers::stages::Args { out: out.global_mut(), seed };
        // SAFETY: as above.
        cases.push(unsafe { one_output(barriers::stages::kernel(), label, shape, len, args) });
    }
}

fn shuffle_cases(cases: &mut Vec<Case>, kernel: Kernel<warps::shuffles::Args>) {
    for width in [1, 2, 4, 8, 16, 32] {
        for partial in [0, 1] {
            let label = format!("warps=2 width={width} mask={}", if partial == 0 { "full" } else { "group" });
            let len = 64 * warps::SHUFFLE_WORDS as usize;
            let args =
                move |out: &mut Buffer<u64>| warps::shuffles::Args { out: out.global_mut(), width, partial };
            // SAFETY: each thread writes its own words of the output, and every lane of a mask calls.
            cases.push(unsafe { one_output(kernel, label, LaunchShape::new(1, 64), len, args) });
        }
    }
}

fn warp_cases(cases: &mut Vec<Case>) {
    shuffle_cases(cases, warps::shuffles::kernel::<u32>());
    shuffle_cases(cases, warps::shuffles::kernel::<i32>());
    shuffle_cases(cases, warps::shuffles::kernel::<f32>());
    shuffle_cases(cases, warps::shuffles::kernel::<u64>());
    shuffle_cases(cases, warps::shuffles::kernel::<i64>());
    shuffle_cases(cases, warps::shuffles::kernel::<f64>());
    let shape = LaunchShape::new(4, 128);
    for width in [1, 2, 4, 8, 16, 32] {
        for seed in [1, 2] {
            let label = format!("warps=16 width={width} seed={seed}");
            let args = move |out: &mut Buffer<u32>| warps::votes::Args { out: out.global_mut(), width, seed };
            // SAFETY: each thread writes its own words of the outputs, every lane of a mask calls, and the
            // tile has room for 1024 threads.
            unsafe {
                let len = 512 * warps::VOTE_WORDS as usize;
                cases.push(one_output(warps::votes::kernel(), label.clone(), shape, len, args));
                let len = 512 * warps::REDUCE_WORDS as usize;
                cases.push(one_output(warps::reductions::kernel(), label.clone(), shape, len, args));
                let len = 512 * warps::ROUNDS as usize;
                let shape = shape.shared(warps::layout().bytes);
                cases.push(one_output(warps::exchanges::kernel(), label, shape, len, args));
            }
        }
    }
    for (blocks, threads, seed) in [(1u32, 32u32, 1u32), (3, 70, 2), (40, 256, 3)] {
        let kernel = warps::together::kernel();
        let run = move |device: &Device| -> Result<_, CaseError> {
            let stream = Stream::new(device)?;
            let places = (blocks * threads * warps::ROUNDS) as usize;
            let mut taken = Buffer::<u32>::zeroed(device, 1 + places)?;
            let args = warps::together::Args { taken: taken.global_mut(), seed };
            // SAFETY: there is a place for each thread in each round.
            unsafe { stream.launch(&kernel, LaunchShape::new(blocks, threads), args) }?;
            Ok(vec![OutputBuffer::download("taken", &taken)?])
        };
        let label = format!("blocks={blocks} threads={threads} seed={seed}");
        cases.push(Case::new(kernel.info(), label, run).race_checked());
    }
}

fn atomic_cases_of<T: atomics::Integer + OutputElement>(
    cases: &mut Vec<Case>,
    global: Kernel<atomics::global::Args<T>>,
    shared: Kernel<atomics::shared::Args<T>>,
) {
    let (blocks, threads, seed) = (5u32, 96u32, 9u32);
    let label = format!("blocks={blocks} threads={threads} seed={seed}");
    let shape = LaunchShape::new(blocks, threads);
    let len = atomics::CONTENDED + (blocks * threads) as usize * atomics::WORDS;
    let run = move |device: &Device| -> Result<_, CaseError> {
        let stream = Stream::new(device)?;
        // The words start from what the output holds: the same on every device.
        let start: Vec<T> = (0..len as u64).map(|i| T::of(mix(i))).collect();
        let mut out = Buffer::from_slice(device, &start)?;
        // SAFETY: the output has the contended words and those of every thread.
        unsafe { stream.launch(&global, shape, atomics::global::Args { out: out.global_mut(), seed }) }?;
        Ok(vec![OutputBuffer::download("out", &out)?])
    };
    cases.push(Case::new(global.info(), label.clone(), run).race_checked());
    let len = blocks as usize * (atomics::CONTENDED + threads as usize * atomics::WORDS);
    let shape = shape.shared(atomics::layout::<T>().bytes);
    let args = move |out: &mut Buffer<T>| atomics::shared::Args { out: out.global_mut(), seed };
    // SAFETY: each block has its words of the output, and at most SHARED_THREADS threads.
    cases.push(unsafe { one_output(shared, label, shape, len, args) });
}

fn atomic_cases(cases: &mut Vec<Case>) {
    atomic_cases_of(cases, atomics::global::kernel::<u32>(), atomics::shared::kernel::<u32>());
    atomic_cases_of(cases, atomics::global::kernel::<i32>(), atomics::shared::kernel::<i32>());
    atomic_cases_of(cases, atomics::global::kernel::<u64>(), atomics::shared::kernel::<u64>());
}

fn shared_cases(cases: &mut Vec<Case>) {
    let widths = [
        shared::widths::kernel::<u8>(),
        shared::widths::kernel::<u16>(),
        shared::widths::kernel::<u32>(),
        shared::widths::kernel::<u64>(),
        shared::widths::kernel::<Vec4>(),
    ];
    for kernel in widths {
        for threads in [1, 32, 100, shared::THREADS] {
            let label = format!("blocks=2 threads={threads} seed=3");
            let shape = LaunchShape::new(2, threads).shared(shared::bytes().size);
            let args = |out: &mut Buffer<u8>| shared::widths::Args { out: out.global_mut(), seed: 3 };
            // SAFETY: each thread has 32 bytes of the output and 16 of shared memory, for at most THREADS.
            cases.push(unsafe { one_output(kernel, label, shape, 2 * threads as usize * 32, args) });
        }
    }
    let shape = LaunchShape::new(1, 32).shared(shared::layout().bytes);
    let args = |out: &mut Buffer<u32>| shared::layouts::Args { out: out.global_mut(), seed: 4 };
    let (kernel, len) = (shared::layouts::kernel(), shared::LAYOUT_WORDS);
    // SAFETY: one thread writes LAYOUT_WORDS words.
    cases.push(unsafe { one_output(kernel, "threads=32 seed=4".into(), shape, len, args) });
}

fn memory_cases_of<V: Pod>(cases: &mut Vec<Case>, kernel: Kernel<memory::hints::Args>) {
    for count in [1u32, 33, 1000] {
        let run = move |device: &Device| -> Result<_, CaseError> {
            let stream = Stream::new(device)?;
            let input: Vec<u8> =
                (0..(count as usize * size_of::<V>()) as u64).map(|i| mix(i) as u8).collect();
            let x = Buffer::from_slice(device, &input)?;
            let mut out = poisoned::<u8>(&stream, input.len() * memory::COPIES)?;
            let shape = LaunchShape::new(count.div_ceil(128), 128);
            // SAFETY: the input has `count` units, the output as many in each of its copies.
            unsafe {
                stream.launch(
                    &kernel,
                    shape,
                    memory::hints::Args { x: x.global(), out: out.global_mut(), count },
                )
            }?;
            Ok(vec![OutputBuffer::download("out", &out)?])
        };
        cases.push(Case::new(kernel.info(), format!("count={count}"), run).race_checked());
    }
}

fn memory_cases(cases: &mut Vec<Case>) {
    memory_cases_of::<u8>(cases, memory::hints::kernel::<u8>());
    memory_cases_of::<u16>(cases, memory::hints::kernel::<u16>());
    memory_cases_of::<u32>(cases, memory::hints::kernel::<u32>());
    memory_cases_of::<u64>(cases, memory::hints::kernel::<u64>());
    memory_cases_of::<Vec4>(cases, memory::hints::kernel::<Vec4>());
}

fn fence_cases(cases: &mut Vec<Case>) {
    for (blocks, kind) in [(1u32, 0u32), (7, 0), (200, 0), (7, 1), (200, 1), (7, 2), (200, 2)] {
        let kernel = fences::last_block::kernel();
        let run = move |device: &Device| -> Result<_, CaseError> {
            let stream = Stream::new(device)?;
            let mut parts = poisoned::<u32>(&stream, (blocks * fences::PART) as usize)?;
            let mut done = Buffer::<u32>::zeroed(device, 1)?;
            let mut folded = poisoned::<u32>(&stream, fences::PART as usize)?;
            let shape = LaunchShape::new(blocks, fences::PART).shared(fences::layout().bytes);
            let args = fences::last_block::Args {
                parts: parts.global_mut(),
                done: done.global_mut(),
                folded: folded.global_mut(),
                seed: 5,
                kind,
            };
            // SAFETY: each block has its part, the counter starts at zero, and one block folds.
            unsafe { stream.launch(&kernel, shape, args) }?;
            Ok(vec![
                OutputBuffer::download("parts", &parts)?,
                OutputBuffer::download("done", &done)?,
                OutputBuffer::download("folded", &folded)?,
            ])
        };
        let scope = ["device", "system", "sc"][kind as usize];
        cases.push(Case::new(kernel.info(), format!("blocks={blocks} fence={scope}"), run).race_checked());
    }
    let shape = LaunchShape::new(3, 256).shared(fences::handover().bytes);
    let args = |out: &mut Buffer<u32>| fences::last_lane::Args { out: out.global_mut(), seed: 6 };
    let label = "blocks=3 threads=256 seed=6".to_string();
    // SAFETY: each of the 24 warps writes one word.
    cases.push(unsafe { one_output(fences::last_lane::kernel(), label, shape, 24, args) });
}

/// Where functions of a float change: around zero, the subnormals' end, one, 2^22 to 2^31, infinity, both
/// signs.
const EDGES: [u32; 16] = [
    0,
    0x0080_0000,
    0x3f00_0000,
    0x3f80_0000,
    0x4300_0000,
    0x4a80_0000,
    0x4b00_0000,
    0x4f00_0000,
    0x7f80_0000,
    0x8000_0000,
    0x8080_0000,
    0xbf00_0000,
    0xbf80_0000,
    0xc315_0000,
    0xcf00_0000,
    0xff80_0000,
];
/// Patterns around each edge.
const EDGE: u32 = 256;

fn function_cases(cases: &mut Vec<Case>, patterns: u32) {
    let patterns = patterns.next_multiple_of(4).max(4);
    for &kernel in functions::KERNELS {
        let run = move |device: &Device| -> Result<_, CaseError> {
            let stream = Stream::new(device)?;
            let mut out = poisoned::<u32>(&stream, EDGES.len() * EDGE as usize)?;
            for (i, edge) in EDGES.into_iter().enumerate() {
                let start = i * EDGE as usize;
                let part = out.global_range_mut(start..start + EDGE as usize)?;
                let args = functions::function::Args {
                    out: part,
                    first: edge.wrapping_sub(EDGE / 2),
                    stride: 1,
                    len: EDGE,
                };
                // SAFETY: the part has EDGE words.
                unsafe { stream.launch(&kernel, LaunchShape::new(1, EDGE / 4), args) }?;
            }
            Ok(vec![OutputBuffer::download("out", &out)?])
        };
        let label = format!("{EDGE} patterns around each of {} edges", EDGES.len());
        cases.push(Case::new(kernel.info(), label, run).race_checked());

        // All values of 16 bits, for the functions of storage types.
        sweep(cases, kernel, "low 16 bits", 0, 1, 1 << 16);
        // Every tie of f16, bf16 and e4m3 among the f32, and its two neighbours.
        let ties = (1 << 20).min(patterns);
        let step = 0x1000 * ((1 << 20) / ties);
        for (name, first) in [("ties", 0), ("below ties", u32::MAX), ("above ties", 1)] {
            sweep(cases, kernel, name, first, step, ties);
        }
        // An odd stride, so that the low bits vary too.
        sweep(cases, kernel, "all binades", 0, ((1u64 << 32) / patterns as u64) as u32 | 1, patterns);
    }
}

/// Cases of at most [`LAUNCH`] patterns each.
fn sweep(
    cases: &mut Vec<Case>,
    kernel: Kernel<functions::function::Args>,
    name: &str,
    first: u32,
    stride: u32,
    patterns: u32,
) {
    for start in (0..patterns).step_by(LAUNCH as usize) {
        let len = LAUNCH.min(patterns - start);
        let first = first.wrapping_add(start.wrapping_mul(stride));
        let label = format!("{name}: first={first:#010x} stride={stride:#x} len={len}");
        let run = move |device: &Device| -> Result<_, CaseError> {
            let stream = Stream::new(device)?;
            let mut out = poisoned::<u32>(&stream, len as usize)?;
            let shape = LaunchShape::new((len / 4).div_ceil(BLOCK), BLOCK);
            // SAFETY: the output has `len` words, a multiple of 4.
            unsafe {
                stream.launch(
                    &kernel,
                    shape,
                    functions::function::Args { out: out.global_mut(), first, stride, len },
                )
            }?;
            Ok(vec![OutputBuffer::download("out", &out)?])
        };
        cases.push(Case::new(kernel.info(), label, run));
    }
}

fn operator_cases(cases: &mut Vec<Case>, operands: u32) {
    for &kernel in operators::KERNELS {
        for start in (0..operands).step_by(LAUNCH as usize) {
            let len = LAUNCH.min(operands - start);
            let label = format!("operands {start} to {}", start + len - 1);
            let run = move |device: &Device| -> Result<_, CaseError> {
                let stream = Stream::new(device)?;
                let mut out = poisoned::<u64>(&stream, len as usize)?;
                let shape = LaunchShape::new(len.div_ceil(BLOCK), BLOCK);
                // SAFETY: the output has `len` words.
                unsafe {
                    stream.launch(
                        &kernel,
                        shape,
                        operators::operator::Args { out: out.global_mut(), first: start as u64, len },
                    )
                }?;
                Ok(vec![OutputBuffer::download("out", &out)?])
            };
            cases.push(Case::new(kernel.info(), label, run));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Outcome, not_covered, run_cases};
    use simt::emu::EmuOptions;

    #[test]
    fn every_probe_runs_on_the_emulator_the_same_twice() {
        let cases = cases(Samples { patterns: 1 << 10, operands: 1 << 10 });
        assert_eq!(not_covered(&cases, kernels()), Vec::<&str>::new());
        let cpu = Device::cpu(EmuOptions::default());
        // The second run without race checking: blocks then run in parallel.
        let report = run_cases(&cases, &cpu, Some(&cpu), |_| {});
        for case in &report.cases {
            assert_eq!(case.outcome, Outcome::Equal, "{case:?}");
            assert!(case.compared > 0);
        }
    }

    #[test]
    fn full_coverage_is_over_a_billion_outputs() {
        let full = Samples::FULL;
        let swept = full.patterns as u64 * functions::KERNELS.len() as u64;
        let operated = full.operands as u64 * operators::KERNELS.len() as u64;
        assert!(swept + operated > 1_000_000_000, "{swept} + {operated}");
    }
}
