//! A step as a workload, over a trace: queries of steps that follow each other, so that lists change as those
//! of a text do, and what is missing is fetched.

use super::fetching::Carried;
use super::{Fetching, HostPool, StagedStep, Staging};
use crate::attention::StepProblem;
use crate::attention::dense::Attended;
use crate::gather::workload::{bounds_of, heads, promise};
use crate::gather::{Bounds, Error, GatherElement, Handles, Plan, Ranking, Support, audit};
use crate::kv::workload::{AnyInput, Data, Fact, Input, Memory, Opening, Outcome, Promise, Workload};
use crate::kv::{Result, Selection, Traffic};
use crate::{Buffer, Stream};
use std::sync::Arc;

/// What a step leaves behind for the next one over the same cache.
struct Set<E: GatherElement> {
    bounds: Bounds<E>,
    staging: Staging<E>,
    /// Steps so far.
    steps: usize,
}

struct Staged<E: GatherElement> {
    input: Arc<Input<E>>,
    plan: Plan<E>,
    fetching: Fetching,
    /// Of each pool.
    sets: Vec<Set<E>>,
    /// All pools are the same, and what comes over the bus is in nobody's cache: one copy will do.
    home: HostPool<E>,
    out: Attended,
    settled: Settled,
}

/// What is kept of steps before any that is timed.
#[derive(Default)]
struct Settled {
    output: Vec<f32>,
    lse: Vec<f32>,
    /// Of the first step, with nothing staged but what is near.
    first: Traffic,
    /// Of as many steps as there are queries, which have all been asked before.
    later: Traffic,
}

/// The bounds and staging pools of each of the pools, and steps.
pub(in crate::gather) fn open(opening: &Opening<'_>, slots: u32) -> Result<Box<dyn Workload>> {
    if audit::share(opening.selection) > 0.0 {
        return Err(Error::StagedAudit.into());
    }
    Ok(match &opening.input {
        AnyInput::F16(input) => Box::new(Staged::open(input.clone(), opening.selection, slots)?),
        AnyInput::Bf16(input) => Box::new(Staged::open(input.clone(), opening.selection, slots)?),
    })
}

impl<E: GatherElement> Staged<E> {
    fn open(input: Arc<Input<E>>, selection: &Selection, slots: u32) -> Result<Self> {
        let support = Support::of(selection);
        let device = &input.device;
        let problem = StepProblem::from(input.problem);
        let ranking = Ranking::fitting::<E>(selection, problem);
        let plan = Plan::ranked(device, problem, support, ranking)?;
        let fetching = Fetching::new(device, problem, support, slots)?;
        let pool = &input.pools[0];
        HostPool::<E>::if_too_large((pool.keys().bytes() + pool.values().bytes()) as u64)?;
        let stream = Stream::new(device)?;
        let mut home = HostPool::new(device, pool.blocks(), problem.kv_heads, problem.head_dim)?;
        let [keys, values] = home.both_mut();
        stream.download(pool.keys(), 0, keys)?;
        stream.download(pool.values(), 0, values)?;
        let out = input.unwritten(&stream)?;
        let settled = Settled::default();
        let mut staged =
            Staged { plan, fetching, sets: Vec::new(), home, out, settled, input: input.clone() };
        for set in 0..input.pools.len() {
            staged.sets.push(Set {
                bounds: bounds_of(&input, set, (support, ranking.score), &stream)?,
                staging: Staging::new(device, problem, support, slots)?,
                steps: 0,
            });
            staged.fill(&stream, set)?;
        }
        staged.settle(&stream)?;
        Ok(staged)
    }

    /// Near tokens in their places.
    fn fill(&mut self, stream: &Stream, set: usize) -> Result<()> {
        let Staged { input, fetching, sets, .. } = self;
        let (pool, staging) = (&input.pools[set], &mut sets[set].staging);
        let width = input.table.max_blocks() as usize;
        for (sequence, length) in input.lengths.iter().enumerate() {
            let near = Buffer::from_slice(&input.device, &staging.near_blocks(sequence as u32))?;
            let carried = Carried {
                from: Fetching::of_pool(pool),
                from_table: input.table.blocks().global_range(sequence * width..(sequence + 1) * width)?,
                tokens: staging.near_tokens(*length) as usize..*length as usize,
                to: Fetching::of_pool_mut(staging.pool_mut()),
                to_table: near.global(),
            };
            // SAFETY: buffers of this device, host memory on the CPU; the table checked its entries against
            // the pools, and near tokens have a place each. Dropping a buffer waits for the device.
            unsafe { fetching.carry_on(stream, input.on_slices(stream), carried) }?;
        }
        Ok(())
    }

    /// Steps outside any timing: the driver loads the kernels, and each of the queries is asked once, then
    /// again, then the first of them.
    fn settle(&mut self, stream: &Stream) -> Result<()> {
        let steps = self.input.queries.len();
        let mut before = Traffic::default();
        for step in 0..2 * steps + 1 {
            self.enqueue(stream, 0, usize::MAX)?;
            let [all, last] = self.sets[0].staging.traffic(stream)?;
            match step {
                0 => self.settled.first = last,
                _ if step == 2 * steps - 1 => self.settled.later = all.since(before),
                _ => {}
            }
            if step == steps - 1 {
                before = all;
            }
        }
        self.settled.output = self.out.output.to_vec()?;
        self.settled.lse = self.out.lse.to_vec()?;
        Ok(())
    }

    /// Tokens of a sequence, and how many of them a step keeps.
    fn tokens(&self, sequence: usize) -> (u32, u32) {
        let length = self.input.lengths[sequence];
        (length, self.plan.support().kept(length))
    }

    /// Bytes of bounds that a step reads, and of keys and values.
    fn bytes(&self) -> [u64; 2] {
        let support = self.plan.support();
        let bounds = |length: &u32| self.sets[0].bounds.bytes_of(support.extent(*length).ranked_blocks());
        let kept: u64 = (0..self.input.lengths.len()).map(|i| u64::from(self.tokens(i).1)).sum();
        [self.input.lengths.iter().map(bounds).sum(), kept * self.input.token_bytes()]
    }
}

impl<E: GatherElement> Workload for Staged<E> {
    fn stages(&self) -> &'static [&'static str] {
        Fetching::STAGES
    }

    fn enqueue(&mut self, stream: &Stream, set: usize, stages: usize) -> Result<()> {
        let Staged { input, plan, fetching, sets, home, out, .. } = self;
        let Input { queries, table, .. } = &**input;
        let Set { bounds, staging, steps } = &mut sets[set];
        let handles = Handles {
            queries: queries[*steps % queries.len()].global(),
            keys: staging.pool().keys().global(),
            values: staging.pool().values().global(),
            bounds: bounds.words().global(),
            table: table.blocks().global(),
            lengths: table.lengths().global(),
            output: out.output.global_mut(),
            lse: out.lse.global_mut(),
        };
        *steps += 1;
        let slices = input.on_slices(stream);
        let step = StagedStep { plan, staging, home, handles: &handles };
        // SAFETY: buffers of this device, host memory on the CPU; the table checked its entries against the
        // pools and its lengths against its rows, and the host's pool has all tokens. Dropping a buffer waits
        // for the device.
        Ok(unsafe { fetching.stages_on(stream, slices, step, stages) }?)
    }

    /// Caches take turns, and each of them asks all queries.
    fn period(&self) -> usize {
        match self.input.queries.len() {
            1 => 1,
            queries => queries * self.sets.len(),
        }
    }

    fn read_bytes(&self) -> u64 {
        self.bytes().iter().sum()
    }

    fn memory(&self) -> Memory {
        let Set { bounds, staging, .. } = &self.sets[0];
        let [keys, values] = self.home.both().map(|elements| size_of_val(elements) as u64);
        Memory { device: bounds.words().bytes() as u64 + staging.bytes(), host: keys + values }
    }

    fn outcome(&self) -> Result<Outcome> {
        let Settled { output, lse, .. } = &self.settled;
        let heads = heads(self.plan.support(), &self.input);
        Ok(Outcome { output: output.clone(), lse: lse.clone(), heads })
    }

    fn promise(&self, row: usize, data: &Data<'_>) -> Promise {
        promise(&self.plan, &self.input, row, data)
    }

    fn facts(&self) -> Result<Vec<Fact>> {
        let [bounds, kept] = self.bytes();
        let Settled { first, later, .. } = self.settled;
        let steps = self.input.queries.len() as u64;
        // Tiles of keys and of values; as blocks.
        let tiles = 2 * u64::from(self.plan.support().block / crate::attention::BLOCK_TOKENS) * steps;
        let of_step = |count: u64| count as f64 / tiles as f64;
        Ok(vec![
            Fact::bytes("bounds read", bounds),
            Fact::bytes("keys and values read", kept),
            Fact::count("blocks found", of_step(later.found)),
            Fact::count("blocks fetched", of_step(later.read)),
            Fact::bytes("from the host", later.read_bytes / steps),
            Fact::bytes("from the host, first step", first.read_bytes),
        ])
    }
}
