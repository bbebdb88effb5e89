//! A step as a workload: all sequences of a batch in five launches, over originals or over codes.

use super::elements::SketchElement;
use super::{Budget, CodeHandles, Handles, OF_CODES, Plan, SketchHandles, Sketches};
use crate::attention::dense::Attended;
use crate::attention::{BLOCK_TOKENS, PagedPool, StepProblem};
use crate::certified::workload::{Quantized, in_host, quantize};
use crate::certified::{Annotation, Geometry, Layout, Near, TileLayout};
use crate::kv::workload::{
    AnyInput, Data, Fact, Input, Memory, Opening, Originals, Outcome, Promise, Workload,
};
use crate::kv::{HeadReport, Result};
use crate::{Buffer, Pinned, Stream};
use kernels_gpu::gather::sketch::Verdict;
use std::sync::Arc;

struct Sketched<E: SketchElement> {
    input: Arc<Input<E>>,
    plan: Plan<E>,
    /// Of each pool.
    sketches: Vec<Sketches<E>>,
    /// Of each pool, where what is kept is attended to by codes; and what a tile of them takes.
    quantized: Vec<Quantized>,
    layout: TileLayout,
    /// Keys and values, where they are with codes and in the host's memory.
    host: Option<[Pinned<E>; 2]>,
    out: Attended,
    verdicts: Buffer<Verdict>,
    /// Those of the first step over the first cache, and the tokens that each KV head kept there.
    heads: Vec<HeadReport>,
    kept: Vec<u32>,
}

/// Sketches of each of the pools, and a step.
pub(in super::super) fn open(opening: &Opening<'_>, budget: Budget) -> Result<Box<dyn Workload>> {
    Ok(match &opening.input {
        AnyInput::F16(input) => Box::new(Sketched::open(input.clone(), budget, opening.originals)?),
        AnyInput::Bf16(input) => Box::new(Sketched::open(input.clone(), budget, opening.originals)?),
    })
}

/// Sketches of a pool: of each sequence its own, whatever blocks they share.
pub(super) fn sketched<E: SketchElement>(
    input: &Input<E>,
    pool: &PagedPool<E>,
    problem: StepProblem,
    budget: Budget,
    stream: &Stream,
) -> Result<Sketches<E>> {
    let mut sketches = Sketches::new(&input.device, problem, budget)?;
    let first = Buffer::zeroed(&input.device, input.lengths.len())?;
    let handles = SketchHandles {
        keys: pool.keys().global(),
        values: pool.values().global(),
        table: input.table.blocks().global(),
        positions: first.global(),
        lengths: input.table.lengths().global(),
    };
    let (tokens, slices) = (input.lengths.iter().copied().max().unwrap_or(0), input.on_slices(stream));
    // SAFETY: buffers of this device, host memory on the CPU; the table checked its entries against the
    // pools and its lengths against its rows. Dropping a buffer waits for the device.
    unsafe { sketches.sketch_on(stream, (0, tokens), slices, handles) }?;
    Ok(sketches)
}

impl<E: SketchElement> Sketched<E> {
    fn open(input: Arc<Input<E>>, budget: Budget, originals: Originals) -> Result<Self> {
        let problem = StepProblem::from(input.problem);
        let plan = Plan::new(&input.device, problem, budget)?;
        let stream = Stream::new(&input.device)?;
        let mut sketches = Vec::new();
        for pool in &input.pools {
            sketches.push(sketched(&input, pool, problem, budget, &stream)?);
        }
        let geometry = Geometry::new(problem.kv_heads, problem.head_dim)?.with_layout(Layout::Compact);
        let geometry = geometry.with_rounding(OF_CODES.rounding(0));
        let quantized = if budget.codes { quantize(&input, geometry, &stream)? } else { Vec::new() };
        let host = match originals {
            Originals::Host { .. } if budget.codes => Some(in_host(&input, &stream)?),
            _ => None,
        };
        let out = input.unwritten(&stream)?;
        let verdicts = Buffer::zeroed(&input.device, input.problem.query_rows())?;
        let layout = geometry.layout();
        let (heads, kept) = (Vec::new(), Vec::new());
        let mut own = Sketched { input, plan, sketches, quantized, layout, host, out, verdicts, heads, kept };
        // A first run outside any timing: the driver loads the kernels.
        own.enqueue(&stream, 0, own.stages().len())?;
        stream.synchronize()?;
        own.heads = own.verdicts.to_vec()?.into_iter().map(HeadReport::from).collect();
        own.kept = own.plan.chosen().kept.to_vec()?;
        Ok(own)
    }

    /// Bytes of sketches that a step reads.
    fn sketch_bytes(&self) -> u64 {
        self.input.lengths.iter().map(|length| self.sketches[0].bytes_of(*length)).sum()
    }

    /// Bytes of keys and values that it reads: of what is kept, by originals or by codes; and all of them for
    /// the rung.
    fn kept_bytes(&self) -> u64 {
        let problem = self.input.problem;
        let group = problem.group() as usize;
        let token = self.input.token_bytes() / u64::from(problem.kv_heads);
        let tile = u64::from(self.layout.bytes) + size_of::<Annotation>() as u64;
        let of_kept = |kept: u32| match self.plan.budget().codes {
            true => u64::from(kept / BLOCK_TOKENS) * tile + u64::from(kept % BLOCK_TOKENS) * token,
            false => u64::from(kept) * token,
        };
        let rows = self.kept.iter().zip(self.heads.chunks(group)).enumerate();
        rows.map(|(row, (kept, heads))| {
            let length = self.input.lengths[row / problem.kv_heads as usize];
            let dense = heads.iter().any(|head| head.source == crate::kv::Source::Originals);
            of_kept(*kept) + if dense { token * u64::from(length) } else { 0 }
        })
        .sum()
    }
}

impl<E: SketchElement> Workload for Sketched<E> {
    fn stages(&self) -> &'static [&'static str] {
        Plan::<E>::STAGES
    }

    fn enqueue(&mut self, stream: &Stream, set: usize, stages: usize) -> Result<()> {
        let Input { queries, pools, table, .. } = &*self.input;
        let codes = self.quantized.get(set).map(|Quantized { tiles, annotations }| CodeHandles {
            tiles: tiles.global().cast(),
            annotations: annotations.global(),
            near: Near::none(),
        });
        let (keys, values) = match &self.host {
            Some([keys, values]) => (keys.global(), values.global()),
            None => (pools[set].keys().global(), pools[set].values().global()),
        };
        let handles = Handles {
            queries: queries[0].global(),
            keys,
            values,
            sketches: self.sketches[set].words().global(),
            table: table.blocks().global(),
            lengths: table.lengths().global(),
            output: self.out.output.global_mut(),
            lse: self.out.lse.global_mut(),
            verdicts: self.verdicts.global_mut(),
            codes,
        };
        let slices = self.input.on_slices(stream);
        // SAFETY: buffers of this device, host memory on the CPU; the table checked its entries against the
        // pools and its lengths against its rows. Dropping a buffer waits for the device.
        Ok(unsafe { self.plan.stages_on(stream, slices, &handles, stages) }?)
    }

    fn read_bytes(&self) -> u64 {
        self.kept_bytes() + self.sketch_bytes()
    }

    fn memory(&self) -> Memory {
        let pool = &self.input.pools[0];
        let sketches = self.sketches[0].words().bytes() as u64;
        let originals = (pool.keys().bytes() + pool.values().bytes()) as u64;
        match self.quantized.first() {
            Some(Quantized { tiles, annotations }) => {
                let codes = (tiles.bytes() + annotations.bytes()) as u64;
                let host = if self.host.is_some() { originals } else { 0 };
                Memory { device: codes + sketches + originals - host, host }
            }
            None => Memory { device: originals + sketches, host: 0 },
        }
    }

    fn outcome(&self) -> Result<Outcome> {
        Ok(Outcome {
            output: self.out.output.to_vec()?,
            lse: self.out.lse.to_vec()?,
            heads: self.heads.clone(),
        })
    }

    fn promise(&self, row: usize, _: &Data<'_>) -> Promise {
        match self.heads[row].bound {
            Some(bound) => Promise::Norm(bound.into()),
            None => Promise::Nothing,
        }
    }

    fn facts(&self) -> Result<Vec<Fact>> {
        let kept: u64 = self.kept.iter().map(|kept| u64::from(*kept)).sum();
        let dense = self.heads.iter().filter(|head| head.source == crate::kv::Source::Originals).count();
        let masses = self.heads.iter().filter_map(|head| head.skipped_mass);
        let most = masses.fold(0f32, f32::max);
        Ok(vec![
            Fact::count("tokens read", kept as f64 / self.kept.len().max(1) as f64),
            Fact::error("mass skipped", most.into()),
            Fact::count("dense heads", dense as f64),
            Fact::bytes("sketches read", self.sketch_bytes()),
            Fact::bytes("keys and values read", self.kept_bytes()),
        ])
    }
}
