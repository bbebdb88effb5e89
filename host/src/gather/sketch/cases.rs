//! The cases of the kernels that choose by sketches: sketches over chunks of every cut, choices with budgets
//! from none to nearly all, heads that go to the dense rung, hostile numbers.

use super::elements::SketchElement;
use super::{Budget, CodeHandles, Handles, OF_CODES, Plan, SketchHandles, Sketches};
use crate::attention::StepProblem;
use crate::attention::inputs::{Batch, Input, in_chunks, thrice};
use crate::certified::StepHandles;
use crate::certified::proof::Trial;
use crate::check::{Case, CaseError, Coverage, OutputBuffer, OutputElement, poisoned};
use crate::gather::Support;
use crate::{Device, Stream};
use half::{bf16, f16};
use kernels_gpu::attention::ROWS;
use kernels_gpu::gather::sketch::{Skipped, Verdict, decide, heads_of};

/// A batch and what may be left out of it.
#[derive(Clone, Copy)]
struct Step {
    lengths: &'static [u32],
    inputs: &'static [Input],
    kv_heads: u32,
    group: u32,
    max_tokens: u32,
    budget: Budget,
    race_check: bool,
    /// Whether queries are 64 times as long, so that blocks' masses are far apart, and these are compared
    /// too.
    apart: bool,
    /// What a block has of shared memory, at the most.
    shared_bytes: u32,
}

/// That of the kernels that take less.
const LEAN: u32 = 99 << 10;

const STEP: Step = Step {
    lengths: &[1, 15, 16, 17, 33, 64, 79, 80, 81, 150, 160],
    inputs: &[Input::Normal, Input::Ties, Input::Duplicates, Input::Wide],
    kv_heads: 2,
    group: 4,
    max_tokens: 160,
    budget: Budget { support: Support { k: 1, block: 16, local: 2 }, bits: 4, skip: 0.2, codes: false },
    race_check: false,
    apart: false,
    shared_bytes: u32::MAX,
};

fn steps(coverage: Coverage) -> Vec<Step> {
    let small = Step { lengths: &[150, 1, 97], kv_heads: 1, race_check: true, ..STEP };
    // A tile is a block, and blocks of 16 tokens are halves of it.
    let support = Support { k: 1, block: 32, local: 1 };
    let wide = Step { group: 2 * ROWS, budget: Budget { support, ..STEP.budget }, ..small };
    let several = Step {
        // Blocks enough for two thread blocks that decide.
        lengths: &[2250, 40],
        kv_heads: 1,
        max_tokens: 2304,
        budget: Budget { skip: 0.05, ..STEP.budget },
        race_check: true,
        ..STEP
    };
    let codes = Budget { codes: true, skip: 0.5, ..STEP.budget };
    let coded = Step { budget: codes, ..small };
    if coverage == Coverage::Small {
        return vec![small, wide, several, coded, Step { shared_bytes: LEAN, ..small }];
    }
    let mut steps = vec![small, wide, several, coded, STEP];
    for (inputs, group) in [(STEP.inputs, 4), (&[Input::Sharp, Input::Constant, Input::Outlier], 11)] {
        steps.push(Step { inputs, group, budget: codes, ..STEP });
    }
    let long = Budget { skip: 0.05, ..codes };
    steps.push(Step { lengths: &[2250, 1000], kv_heads: 1, max_tokens: 2304, budget: long, ..STEP });
    // Rows of blocks enough that what is kept of them is cut finer than dense attention is.
    let lengths = &[2250, 1, 700, 33, 2304, 17, 129, 1000];
    steps.push(Step { lengths, max_tokens: 4608, race_check: true, ..STEP });
    steps.extend([small, several, STEP].map(|step| Step { shared_bytes: LEAN, ..step }));
    for group in [1, 7, 8, 11, 16] {
        steps.push(Step { lengths: &[159, 111], group, ..STEP });
    }
    for (block, skip) in [(32, 0.5), (64, 0.01), (128, 1.0)] {
        let budget = Budget { support: Support { k: 1, block, local: 1 }, skip, ..STEP.budget };
        steps.push(Step { lengths: &[1000, 129, 641], max_tokens: 1024, budget, ..STEP });
    }
    let hostile = &[Input::Constant, Input::Huge, Input::Outlier];
    steps.push(Step { lengths: &[900, 800, 530], inputs: hostile, max_tokens: 900, ..STEP });
    let none = Budget { skip: 1e-6, ..STEP.budget };
    steps.push(Step { lengths: &[160, 79], budget: none, ..STEP });
    if coverage == Coverage::Full {
        let support = Support { k: 32, block: 16, local: 4 };
        let long = Budget { skip: 0.02, support, ..STEP.budget };
        steps.push(Step {
            lengths: &[140_000, 90_007],
            inputs: &[Input::Normal, Input::Duplicates],
            kv_heads: 1,
            max_tokens: 140_000,
            budget: long,
            ..STEP
        });
    }
    steps
}

/// One long sequence among so many that a thread block has all of its blocks.
const CROWD: [u32; 140] = {
    let mut lengths = [1; 140];
    lengths[3] = 9700;
    lengths
};

/// The cases of every instance.
pub(in super::super) fn cases(coverage: Coverage) -> Vec<Case> {
    let mut cases = Vec::new();
    if coverage == Coverage::Huge {
        return cases;
    }
    for step in steps(coverage) {
        // At 64 there are none that take less.
        let head_dims: &[u32] = if step.shared_bytes == LEAN { &[128] } else { &[64, 128] };
        for &head_dim in head_dims {
            for bits in super::BITS {
                let step = Step { budget: Budget { bits, ..step.budget }, ..step };
                add::<f16>(&mut cases, step, head_dim);
                add::<bf16>(&mut cases, step, head_dim);
            }
        }
    }
    if coverage == Coverage::Small {
        let support = Support { k: 40, ..STEP.budget.support };
        let budget = Budget { support, skip: 1.0, ..STEP.budget };
        // Blocks of nearly one mass: of one sequence more than are ranked by counting, of the other fewer.
        let equal = Step {
            lengths: &[4200, 2250],
            inputs: &[Input::Ties],
            kv_heads: 1,
            max_tokens: 4208,
            budget,
            race_check: true,
            ..STEP
        };
        add::<f16>(&mut cases, equal, 64);
        // Blocks of a tile whose masses are far apart, in all rows of a warp.
        let inputs = &[Input::Sharp, Input::Wide, Input::Outlier];
        let lengths = &[97, 150, 113];
        let apart = Step { lengths, inputs, kv_heads: 1, group: ROWS, race_check: true, apart: true, ..STEP };
        add::<f16>(&mut cases, apart, 64);
    } else {
        let support = Support { k: 40, ..STEP.budget.support };
        for (inputs, skip) in [(&[Input::Normal], 0.05), (&[Input::Constant], 1.0)] {
            let budget = Budget { support, skip, ..STEP.budget };
            let crowd = Step { lengths: &CROWD, inputs, kv_heads: 1, max_tokens: 9700, budget, ..STEP };
            add::<f16>(&mut cases, Step { race_check: skip < 1.0, ..crowd }, 64);
        }
    }
    cases
}

fn add<E: SketchElement + OutputElement>(cases: &mut Vec<Case>, step: Step, head_dim: u32) {
    let Step { group, kv_heads, budget, shared_bytes, .. } = step;
    let Budget { support: Support { k, block, local }, bits, skip, codes } = budget;
    let kernels =
        (E::scan_kernel(head_dim, bits, shared_bytes), E::sketch_kernel(bits), E::settle_kernel(head_dim));
    let (Some((scan, _)), Some(sketch), Some(settle)) = kernels else { return };
    let lean = if shared_bytes == LEAN { " in 99 KiB" } else { "" };
    let apart = if step.apart { " far apart" } else { "" };
    let by = if codes { " by codes" } else { "" };
    let lengths = step.lengths.iter().take(12).map(u32::to_string).collect::<Vec<_>>().join(",");
    let label = format!(
        "heads={}/{kv_heads} k={k} block={block} local={local} skip={skip} of {}{apart}{lean}{by}: {lengths}",
        group * kv_heads,
        step.max_tokens
    );
    let case = Case::new(scan.info(), label, move |device| run::<E>(device, step, head_dim));
    let case = case.and(sketch.info()).and(decide::kernel().info()).and(settle.info());
    let case = case.within(shared_bytes);
    cases.push(if step.race_check { case.race_checked() } else { case });
}

/// A batch's codes, as a cache over codes has them.
pub(super) fn coded<E: SketchElement>(
    device: &Device,
    batch: &Batch<E>,
) -> crate::certified::Result<Trial<E>> {
    let trial = Trial::new(device, batch.problem, batch.blocks())?;
    let mut trial = trial.with_rounding(OF_CODES.rounding(0));
    trial.load(batch)?;
    Ok(trial)
}

/// What a step reads of them.
pub(super) fn code_handles<E: SketchElement>(coded: &mut Trial<E>) -> CodeHandles<E> {
    let StepHandles { tiles, annotations, near, .. } = coded.handles();
    CodeHandles { tiles, annotations, near }
}

/// Sketches by chunks of several lengths, then a step.
fn run<E: SketchElement>(device: &Device, step: Step, head_dim: u32) -> Result<Vec<OutputBuffer>, CaseError> {
    let Step { lengths, inputs, kv_heads, group, max_tokens, budget, .. } = step;
    let sequences = lengths.len() as u32;
    let q_heads = group * kv_heads;
    let problem = StepProblem { sequences, q_heads, kv_heads, head_dim, max_tokens };
    let mut batch = Batch::<E>::in_turns(problem, inputs, lengths, 5, 9);
    if step.apart {
        batch.queries.iter_mut().for_each(|x| *x = E::from_f32(64.0 * x.to_f32()));
    }
    let stream = Stream::new(device)?;
    let at = batch.upload(device)?;
    let mut sketches = Sketches::<E>::new(device, problem, budget)?;
    in_chunks(device, &thrice(lengths), |tokens, positions, lengths| -> Result<(), CaseError> {
        let (keys, values, table) = (at.keys.global(), at.values.global(), at.table.global());
        let handles = SketchHandles { keys, values, table, positions, lengths };
        // SAFETY: buffers of the device; the table's entries up to each length are the pool's, and no
        // sequence has more new tokens.
        Ok(unsafe { sketches.sketch_on(&stream, (0, tokens), false, handles) }?)
    })?;
    let mut plan = Plan::<E>::new(device, problem, budget)?;
    let mut coded = if budget.codes { Some(coded(device, &batch)?) } else { None };
    let rows = (sequences * q_heads) as usize;
    let mut output = poisoned::<f32>(&stream, rows * head_dim as usize)?;
    let mut lse = poisoned::<f32>(&stream, rows)?;
    let mut verdicts = poisoned::<Verdict>(&stream, rows)?;
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
    // Of the short ones twice: what the launches count in must be as it was.
    if step.race_check {
        // SAFETY: as above.
        unsafe { plan.scan_on(&stream, false, &handles) }?;
    }
    plan.chosen_mut().poison(&stream)?;
    plan.poison(&stream)?;
    // SAFETY: as above.
    unsafe { plan.step_on(&stream, false, &handles) }?;
    // Of heads that there are.
    let heads = heads_of(group) as usize;
    let skipped: Vec<Skipped> = plan.skipped().to_vec()?;
    let skipped: Vec<u32> = skipped
        .chunks_exact(heads)
        .flat_map(|row| bytemuck::cast_slice::<_, u32>(&row[..group as usize]).to_vec())
        .collect();
    let verdicts: Vec<u32> = bytemuck::cast_slice(&verdicts.to_vec()?).to_vec();
    let mut outputs = vec![OutputBuffer::download("sketches", sketches.words())?];
    outputs.extend(plan.chosen().outputs()?);
    outputs.extend([
        OutputBuffer::new("skipped", skipped),
        OutputBuffer::new("whole", bytemuck::cast_slice::<_, u32>(&plan.whole().to_vec()?).to_vec()),
        OutputBuffer::new("verdicts", verdicts),
        OutputBuffer::download("wanted", plan.wanted())?,
        OutputBuffer::download("output", &output)?,
        OutputBuffer::download("lse", &lse)?,
    ]);
    if step.apart {
        // Of blocks that there are: nothing is written of others.
        let masses = plan.masses().to_vec()?;
        let of_head = masses.len() / (lengths.len() * kv_heads as usize);
        let written = masses.chunks_exact(of_head).enumerate().flat_map(|(pair, of_head)| {
            let length = lengths[pair / kv_heads as usize];
            &of_head[..length.div_ceil(budget.support.block) as usize * heads]
        });
        outputs.push(OutputBuffer::new("masses", written.map(|mass| mass.to_bits()).collect()));
    }
    Ok(outputs)
}
