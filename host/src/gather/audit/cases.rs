//! The cases of the kernels that draw and compare: shares from few to all, layers, sequences of which nothing
//! is left out, hostile numbers.

use super::{AuditHandles, Auditor};
use crate::attention::StepProblem;
use crate::attention::inputs::{Batch, Input};
use crate::check::{Case, CaseError, Coverage, OutputBuffer, OutputElement, poisoned};
use crate::gather::{Bounds, FoldHandles, GatherElement, Handles, Plan, Support};
use crate::{Buffer, Device, Stream};
use half::{bf16, f16};
use kernels_gpu::attention::ROWS;
use kernels_gpu::gather::{Audited, audit, draw};

/// A batch and how much of it is looked at.
#[derive(Clone, Copy)]
struct Step {
    lengths: &'static [u32],
    inputs: &'static [Input],
    kv_heads: u32,
    group: u32,
    share: f64,
    layer: u32,
    race_check: bool,
}

const STEP: Step = Step {
    lengths: &[150, 1, 97, 64],
    inputs: &[Input::Normal, Input::Sharp],
    kv_heads: 2,
    group: 4,
    share: 0.5,
    layer: 3,
    race_check: false,
};
const SUPPORT: Support = Support { k: 2, block: 16, local: 2 };
const MOST: u32 = 160;

fn steps(coverage: Coverage) -> Vec<Step> {
    let small = Step { kv_heads: 1, race_check: true, ..STEP };
    let wide = Step { group: 2 * ROWS, share: 1.0, ..small };
    if coverage == Coverage::Small {
        return vec![small, wide];
    }
    let mut steps = vec![small, wide, STEP];
    for group in [1, 7, 11] {
        steps.push(Step { group, share: 1.0, layer: group, ..STEP });
    }
    steps.push(Step { share: 0.01, kv_heads: 8, ..STEP });
    let hostile = &[Input::Constant, Input::Huge, Input::Outlier];
    steps.push(Step { lengths: &[150, 140, 130], inputs: hostile, share: 1.0, ..STEP });
    steps
}

/// The cases of every instance.
pub(in super::super) fn cases(coverage: Coverage) -> Vec<Case> {
    let mut cases = Vec::new();
    if coverage == Coverage::Huge {
        return cases;
    }
    for step in steps(coverage) {
        for head_dim in super::super::FEW_HEAD_DIMS {
            add::<f16>(&mut cases, step, head_dim);
            add::<bf16>(&mut cases, step, head_dim);
        }
    }
    cases
}

fn add<E: GatherElement + OutputElement>(cases: &mut Vec<Case>, step: Step, head_dim: u32) {
    let Step { group, kv_heads, share, layer, .. } = step;
    let kernel = if head_dim == 64 { audit::kernel::<64>() } else { audit::kernel::<128>() };
    let lengths = step.lengths.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let heads = group * kv_heads;
    let label = format!("{} heads={heads}/{kv_heads} share={share} layer={layer}: {lengths}", E::NAME);
    let case = Case::new(kernel.info(), label, move |device| run::<E>(device, step, head_dim));
    let case = case.and(draw::kernel().info());
    cases.push(if step.race_check { case.race_checked() } else { case });
}

/// A step, then its audit.
fn run<E: GatherElement>(device: &Device, step: Step, head_dim: u32) -> Result<Vec<OutputBuffer>, CaseError> {
    let Step { lengths, inputs, kv_heads, group, share, layer, .. } = step;
    let (sequences, q_heads) = (lengths.len() as u32, group * kv_heads);
    let problem = StepProblem { sequences, q_heads, kv_heads, head_dim, max_tokens: MOST };
    let batch = Batch::<E>::in_turns(problem, inputs, lengths, 5, 9);
    let (stream, at) = (Stream::new(device)?, batch.upload(device)?);
    let mut bounds = Bounds::<E>::new(device, problem, SUPPORT)?;
    let positions = Buffer::<u32>::zeroed(device, lengths.len())?;
    let (table, ends) = (at.table.global(), at.lengths.global());
    let fold = FoldHandles { keys: at.keys.global(), table, positions: positions.global(), lengths: ends };
    let most = lengths.iter().copied().max().unwrap_or(0);
    let mut plan = Plan::<E>::new(device, problem, SUPPORT)?;
    let rows = (sequences * q_heads) as usize;
    let mut output = poisoned::<f32>(&stream, rows * head_dim as usize)?;
    let mut lse = poisoned::<f32>(&stream, rows)?;
    let handles = Handles {
        queries: at.queries.global(),
        keys: at.keys.global(),
        values: at.values.global(),
        bounds: bounds.words().global(),
        table,
        lengths: ends,
        output: output.global_mut(),
        lse: lse.global_mut(),
    };
    // SAFETY: buffers of the device; the table's entries up to each length are the pool's, and no sequence
    // has more new tokens.
    unsafe {
        bounds.fold_on(&stream, (0, most), false, fold)?;
        plan.step_on(&stream, false, &handles)?;
    }
    let mut auditor = Auditor::<E>::new(device, problem, SUPPORT, share)?;
    let mut audits = poisoned::<Audited>(&stream, rows)?;
    let handles = AuditHandles {
        queries: at.queries.global(),
        keys: at.keys.global(),
        values: at.values.global(),
        near: true,
        table,
        lengths: ends,
        output: output.global(),
        lse: lse.global(),
    };
    // SAFETY: as above.
    unsafe { auditor.audit_on(&stream, false, layer, &handles, audits.global_mut()) }?;
    Ok(vec![
        OutputBuffer::download("wanted", auditor.wanted())?,
        OutputBuffer::new("audits", bytemuck::cast_slice::<_, u32>(&audits.to_vec()?).to_vec()),
    ])
}
