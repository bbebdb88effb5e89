//! A step as a workload: all sequences of a batch in two launches.

use super::audit::{self, Auditing};
use super::{AuditHandles, Bounds, FoldHandles, GatherElement, Handles, Plan, Ranking, Score, Support};
use crate::attention::StepProblem;
use crate::attention::dense::{Attended, bound};
use crate::kv::workload::{AnyInput, Data, Fact, Input, Memory, Opening, Outcome, Promise, Workload};
use crate::kv::{HeadReport, Result, Selection};
use crate::{Buffer, Stream};
use std::sync::Arc;

struct Gather<E: GatherElement> {
    input: Arc<Input<E>>,
    plan: Plan<E>,
    /// Of each pool.
    bounds: Vec<Bounds<E>>,
    out: Attended,
    /// Where a share of the heads is held against everything.
    auditing: Option<Auditing<E>>,
}

/// The bounds of each of the pools, and a step.
pub(super) fn open(opening: &Opening<'_>) -> Result<Box<dyn Workload>> {
    let (support, share) = (Support::of(opening.selection), audit::share(opening.selection));
    let selection = opening.selection;
    Ok(match &opening.input {
        AnyInput::F16(input) => Box::new(Gather::open(input.clone(), support, selection, share)?),
        AnyInput::Bf16(input) => Box::new(Gather::open(input.clone(), support, selection, share)?),
    })
}

impl<E: GatherElement> Gather<E> {
    fn open(input: Arc<Input<E>>, support: Support, selection: &Selection, share: f64) -> Result<Self> {
        let problem = StepProblem::from(input.problem);
        let ranking = Ranking::fitting::<E>(selection, problem);
        let plan = Plan::ranked(&input.device, problem, support, ranking)?.with_ranks_of(selection)?;
        let stream = Stream::new(&input.device)?;
        let bounds =
            (0..input.pools.len()).map(|set| bounds_of(&input, set, (support, ranking.score), &stream));
        let bounds = bounds.collect::<Result<_>>()?;
        let out = input.unwritten(&stream)?;
        let auditing = Auditing::new(&input.device, (1, problem), support, share)?;
        let mut gather = Gather { input, plan, bounds, out, auditing };
        // A first run outside any timing: the driver loads the kernels.
        gather.enqueue(&stream, 0, gather.stages().len())?;
        stream.synchronize()?;
        Ok(gather)
    }

    /// Tokens of a sequence, and how many of them a step keeps.
    fn tokens(&self, sequence: usize) -> (u32, u32) {
        let length = self.input.lengths[sequence];
        (length, self.plan.support().kept(length))
    }

    /// Bytes of bounds that a step reads.
    fn bounds_bytes(&self) -> u64 {
        let support = self.plan.support();
        let of = |length: &u32| self.bounds[0].bytes_of(support.extent(*length).ranked_blocks());
        self.input.lengths.iter().map(of).sum()
    }

    /// Bytes of keys and values that it reads.
    fn kept_bytes(&self) -> u64 {
        let kept: u64 = (0..self.input.lengths.len()).map(|i| u64::from(self.tokens(i).1)).sum();
        kept * self.input.token_bytes() * u64::from(self.plan.lists())
    }
}

impl<E: GatherElement> Workload for Gather<E> {
    fn stages(&self) -> &'static [&'static str] {
        self.plan.audited_stages(self.auditing.is_some())
    }

    fn enqueue(&mut self, stream: &Stream, set: usize, stages: usize) -> Result<()> {
        let Input { queries, pools, table, .. } = &*self.input;
        let handles = Handles {
            queries: queries[0].global(),
            keys: pools[set].keys().global(),
            values: pools[set].values().global(),
            bounds: self.bounds[set].words().global(),
            table: table.blocks().global(),
            lengths: table.lengths().global(),
            output: self.out.output.global_mut(),
            lse: self.out.lse.global_mut(),
        };
        let slices = self.input.on_slices(stream);
        // SAFETY: buffers of this device, host memory on the CPU; the table checked its entries against the
        // pools and its lengths against its rows. Dropping a buffer waits for the device.
        unsafe { self.plan.stages_on(stream, slices, &handles, stages) }?;
        let audited = stages > self.plan.stages().len();
        let Some(auditing) = self.auditing.as_mut().filter(|_| audited) else { return Ok(()) };
        let handles = AuditHandles {
            queries: handles.queries,
            keys: handles.keys,
            values: handles.values,
            near: true,
            table: handles.table,
            lengths: handles.lengths,
            output: self.out.output.global(),
            lse: self.out.lse.global(),
        };
        // SAFETY: as above.
        Ok(unsafe { auditing.audit_on(stream, slices, 0, &handles) }?)
    }

    fn read_bytes(&self) -> u64 {
        self.kept_bytes() + self.bounds_bytes()
    }

    fn memory(&self) -> Memory {
        let pool = &self.input.pools[0];
        let bounds = self.bounds[0].words().bytes();
        Memory { device: (pool.keys().bytes() + pool.values().bytes() + bounds) as u64, host: 0 }
    }

    fn outcome(&self) -> Result<Outcome> {
        let mut heads = heads(self.plan.support(), &self.input);
        if let Some(auditing) = &self.auditing {
            auditing.complete_all(&mut heads)?;
        }
        Ok(Outcome { output: self.out.output.to_vec()?, lse: self.out.lse.to_vec()?, heads })
    }

    fn promise(&self, row: usize, data: &Data<'_>) -> Promise {
        promise(&self.plan, &self.input, row, data)
    }

    fn facts(&self) -> Result<Vec<Fact>> {
        let sequences = self.input.lengths.len();
        let kept: u64 = (0..sequences).map(|i| u64::from(self.tokens(i).1)).sum();
        let mut facts = vec![
            Fact::count("tokens read", kept as f64 / sequences.max(1) as f64),
            Fact::bytes("bounds read", self.bounds_bytes()),
            Fact::bytes("keys and values read", self.kept_bytes()),
        ];
        if let Some(auditing) = &self.auditing {
            facts.push(Fact::text("audit", auditing.line()?));
        }
        Ok(facts)
    }
}

/// The bounds of a pool.
pub(super) fn bounds_of<E: GatherElement>(
    input: &Input<E>,
    set: usize,
    (support, score): (Support, Score),
    stream: &Stream,
) -> Result<Bounds<E>> {
    let mut bounds = Bounds::scored(&input.device, input.problem.into(), support, score)?;
    let positions = Buffer::<u32>::zeroed(&input.device, input.lengths.len())?;
    let tokens = input.lengths.iter().copied().max().unwrap_or(0);
    let handles = FoldHandles {
        keys: input.pools[set].keys().global(),
        table: input.table.blocks().global(),
        positions: positions.global(),
        lengths: input.table.lengths().global(),
    };
    // SAFETY: buffers of this device, host memory on the CPU; the table checked its entries against the
    // pools, and no sequence has more tokens. Dropping a buffer waits for the device.
    unsafe { bounds.fold_on(stream, (0, tokens), input.on_slices(stream), handles) }?;
    Ok(bounds)
}

/// What is known of each head of a step, [sequences, q_heads].
pub(super) fn heads<E: GatherElement>(support: Support, input: &Input<E>) -> Vec<HeadReport> {
    let of = |length: &u32| {
        let skipped = length - support.kept(*length);
        std::iter::repeat_n(HeadReport { skipped, ..HeadReport::STORED }, input.problem.q_heads as usize)
    };
    input.lengths.iter().flat_map(of).collect()
}

/// Where nothing is left out, what dense attention promises of the same cut.
pub(super) fn promise<E: GatherElement>(
    plan: &Plan<E>,
    input: &Input<E>,
    row: usize,
    data: &Data<'_>,
) -> Promise {
    let q_heads = input.problem.q_heads as usize;
    let length = input.lengths[row / q_heads];
    if plan.support().kept(length) < length {
        return Promise::Nothing;
    }
    let Data { sequence, q_head, query, key, value } = *data;
    let (output, lse) = bound::row::<E>(&sequence, plan.splits(), query, key, value, 0, q_head);
    Promise::Elements { output, lse }
}
