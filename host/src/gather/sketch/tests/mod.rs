//! Sketches, choice, verdicts and the scheme, by the kernels on the emulator and by the CPU's own path,
//! judged by f64.

mod certificate;
mod codes;
mod counting;
mod scheme;
mod sketches;

use super::cases::{code_handles, coded};
use super::elements::SketchElement;
use super::{Budget, Handles, Plan, SketchHandles, Sketches};
use crate::attention::StepProblem;
use crate::attention::inputs::{Batch, Input, in_chunks};
use crate::certified::Certificate;
use crate::gather::Support;
use crate::gather::tests::{batch, device, read};
use crate::{Buffer, Device, Stream};
use kernels_gpu::gather::sketch::{Skipped, Verdict};

const PROBLEM: StepProblem =
    StepProblem { sequences: 1, q_heads: 8, kv_heads: 2, head_dim: 64, max_tokens: 400 };

const BUDGET: Budget =
    Budget { support: Support { k: 1, block: 16, local: 1 }, bits: 4, skip: 0.1, codes: false };

/// Sketches of a batch whose tokens came in chunks: `cuts` says how far each sequence is after each of them.
fn sketches<E: SketchElement>(
    batch: &Batch<E>,
    budget: Budget,
    cuts: &[Vec<u32>],
    slices: bool,
) -> Sketches<E> {
    sketches_on(&device(), batch, budget, cuts, slices)
}

/// The same on a device.
fn sketches_on<E: SketchElement>(
    device: &Device,
    batch: &Batch<E>,
    budget: Budget,
    cuts: &[Vec<u32>],
    slices: bool,
) -> Sketches<E> {
    let stream = Stream::new(device).expect("a stream");
    let mut sketches = Sketches::new(device, batch.problem, budget).expect("sketches");
    let at = batch.upload(device).expect("buffers");
    let sketched = in_chunks(device, cuts, |tokens, positions, lengths| {
        let (keys, values, table) = (at.keys.global(), at.values.global(), at.table.global());
        let handles = SketchHandles { keys, values, table, positions, lengths };
        // SAFETY: buffers of the emulator, whose table is of this pool.
        unsafe { sketches.sketch_on(&stream, (0, tokens), slices, handles) }
    });
    sketched.expect("sketched");
    sketches
}

/// What a step chose, found and gave.
#[derive(Debug, PartialEq)]
struct Stepped {
    list: Vec<u32>,
    counts: Vec<u32>,
    entries: Vec<u32>,
    kept: Vec<u32>,
    /// Of heads that there are.
    skipped: Vec<Skipped>,
    verdicts: Vec<Verdict>,
    wanted: Vec<u32>,
    /// Bits.
    output: Vec<u32>,
    lse: Vec<u32>,
    /// Of codes, where there are any.
    certificates: Vec<Certificate>,
}

/// A step over a batch.
fn step<E: SketchElement>(batch: &Batch<E>, budget: Budget, slices: bool) -> Stepped {
    step_judged_by(batch, budget, budget.skip, slices)
}

/// A step over a batch whose heads are judged by another budget than is chosen by.
fn step_judged_by<E: SketchElement>(batch: &Batch<E>, budget: Budget, skip: f32, slices: bool) -> Stepped {
    step_by(batch, budget, slices, |plan| plan.judge_by(skip))
}

/// A step over a batch by a plan that is changed before.
fn step_by<E: SketchElement>(
    batch: &Batch<E>,
    budget: Budget,
    slices: bool,
    change: impl FnOnce(&mut Plan<E>),
) -> Stepped {
    let device = device();
    let stream = Stream::new(&device).expect("a stream");
    let sketches = sketches(batch, budget, std::slice::from_ref(&batch.lengths), slices);
    let at = batch.upload(&device).expect("buffers");
    let rows = batch.problem.dense().query_rows();
    let mut output = Buffer::<f32>::new(&device, batch.queries.len()).expect("a buffer");
    let mut lse = Buffer::<f32>::new(&device, rows).expect("a buffer");
    let mut verdicts = Buffer::<Verdict>::zeroed(&device, rows).expect("a buffer");
    let mut plan = Plan::<E>::new(&device, batch.problem, budget).expect("a plan");
    change(&mut plan);
    let mut coded = budget.codes.then(|| coded(&device, batch).expect("codes"));
    let handles = Handles {
        queries: at.queries.global(),
        keys: at.keys.global(),
        values: at.values.global(),
        sketches: sketches.words().global(),
        table: at.table.global(),
        lengths: at.lengths.global(),
        output: output.global_mut(),
        lse: lse.global_mut(),
        verdicts: verdicts.global_mut(),
        codes: coded.as_mut().map(code_handles),
    };
    // SAFETY: buffers of the emulator, whose table is of this pool.
    unsafe { plan.scan_on(&stream, slices, &handles).expect("scanned") };
    // Once more: what the launches count in is as it was, and nothing that the first one wrote is left.
    plan.chosen_mut().poison(&stream).expect("filled");
    plan.poison(&stream).expect("filled");
    // SAFETY: as above.
    unsafe { plan.step_on(&stream, slices, &handles).expect("a step") };
    let download = |buffer: &Buffer<u32>| buffer.to_vec().expect("read");
    let bits = |buffer: &Buffer<f32>| buffer.to_vec().expect("read").iter().map(|x| x.to_bits()).collect();
    let group = batch.problem.dense().group() as usize;
    let skipped = plan.skipped().to_vec().expect("read");
    let chosen = plan.chosen();
    Stepped {
        list: download(&chosen.list),
        counts: download(&chosen.counts),
        entries: download(&chosen.entries),
        kept: download(&chosen.kept),
        skipped: skipped.chunks(group.next_multiple_of(8)).flat_map(|row| row[..group].to_vec()).collect(),
        verdicts: verdicts.to_vec().expect("read"),
        wanted: download(plan.wanted()),
        output: bits(&output),
        lse: bits(&lse),
        certificates: plan.certificates().to_vec().expect("read"),
    }
}

/// The bits of what a step gave; NaN equals itself.
fn words(stepped: &Stepped) -> Vec<u32> {
    let mut words =
        [&stepped.list, &stepped.counts, &stepped.entries, &stepped.kept].map(Clone::clone).concat();
    words.extend(bytemuck::cast_slice::<_, u32>(&stepped.skipped));
    words.extend(bytemuck::cast_slice::<_, u32>(&stepped.verdicts));
    words.extend([&stepped.wanted, &stepped.output, &stepped.lse].map(Clone::clone).concat());
    words.extend(bytemuck::cast_slice::<_, u32>(&stepped.certificates));
    words
}
