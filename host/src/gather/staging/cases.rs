//! Cases for `ferrokv check`: steps that follow each other over a batch that grows, lists that change, and
//! staging pools from the smallest to one that holds all.

use super::fetching::Carried;
use super::{Fetching, HostPool, StagedStep, Staging};
use crate::attention::inputs::{Batch, Input};
use crate::attention::{PagedPool, StepProblem};
use crate::check::{Case, CaseError, Coverage, OutputBuffer, OutputElement, poisoned};
use crate::gather::{Bounds, FoldHandles, GatherElement, Handles, Plan, Result, Support};
use crate::{Buffer, Device, Stream};
use half::{bf16, f16};
use kernels_gpu::gather::{carry, fetch, place};

/// Steps over a batch, and how much of it is staged.
#[derive(Clone, Copy)]
struct Steps {
    /// Tokens of each sequence after the last step.
    lengths: &'static [u32],
    steps: u32,
    kv_heads: u32,
    group: u32,
    head_dim: u32,
    max_tokens: u32,
    support: Support,
    slots: u32,
    race_check: bool,
}

const STEPS: Steps = Steps {
    lengths: &[150, 1, 97],
    steps: 5,
    kv_heads: 2,
    group: 4,
    head_dim: 64,
    max_tokens: 160,
    support: Support { k: 2, block: 16, local: 2 },
    slots: 3,
    race_check: false,
};

fn cases_of(coverage: Coverage) -> Vec<Steps> {
    // Lists fill the pool; blocks end while it steps, and with them their nearness.
    let small = Steps { kv_heads: 1, steps: 4, race_check: true, ..STEPS };
    // Some slots are left that no list wants.
    let roomy = Steps { slots: 5, ..small };
    if coverage == Coverage::Small {
        return vec![small, roomy];
    }
    let mut all = vec![small, roomy, STEPS];
    // More than 32 slots and more than one round of them, a list of more than one, and one of everything.
    let long = Steps { lengths: &[5200, 4100], max_tokens: 5300, kv_heads: 1, ..STEPS };
    for (k, slots) in [(40, 41), (40, 300), (270, 271), (300, 65536)] {
        all.push(Steps { support: Support { k, ..STEPS.support }, slots, ..long });
    }
    // The other sizes of blocks and heads; many sequences, some of them empty.
    for (block, head_dim) in [(32, 128), (64, 64), (128, 128)] {
        let support = Support { k: 2, block, local: 1 };
        let lengths = &[1030, 129, 641];
        all.push(Steps { lengths, max_tokens: 1100, support, head_dim, steps: 9, ..STEPS });
    }
    all.push(Steps { lengths: &[160, 0, 33, 47, 0, 49, 64, 3], steps: 20, slots: 5, ..STEPS });
    // All near; fewer blocks than local ones.
    all.push(Steps { support: Support { local: 10, ..STEPS.support }, ..STEPS });
    all.push(Steps { support: Support { local: 1000, ..STEPS.support }, slots: 1, ..STEPS });
    if coverage == Coverage::Full {
        let support = Support { k: 32, block: 128, local: 4 };
        let wide = Steps { lengths: &[40_000, 33_000], max_tokens: 40_000, head_dim: 128, ..STEPS };
        for slots in [33, 64, 200] {
            all.push(Steps { support, slots, steps: 3, ..wide });
        }
    }
    all
}

/// The cases of every kernel.
pub(in crate::gather) fn cases(coverage: Coverage) -> Vec<Case> {
    let mut cases = Vec::new();
    if coverage == Coverage::Huge {
        return cases;
    }
    for steps in cases_of(coverage) {
        add::<f16>(&mut cases, steps);
        add::<bf16>(&mut cases, steps);
    }
    cases
}

fn add<E: GatherElement + OutputElement>(cases: &mut Vec<Case>, steps: Steps) {
    let lengths = steps.lengths.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let Support { k, block, local } = steps.support;
    let label = format!(
        "{} {} steps k={k} block={block} local={local} staging={} of {}: {lengths}",
        E::NAME,
        steps.steps,
        steps.slots,
        steps.max_tokens
    );
    let case = Case::new(place::kernel().info(), label, move |device| run::<E>(device, steps));
    let case = case.and(fetch::kernel().info()).and(carry::kernel().info());
    cases.push(if steps.race_check { case.race_checked() } else { case });
}

fn run<E: GatherElement + OutputElement>(
    device: &Device,
    steps: Steps,
) -> std::result::Result<Vec<OutputBuffer>, CaseError> {
    let Steps { lengths, kv_heads, group, head_dim, max_tokens, support, slots, .. } = steps;
    let sequences = lengths.len() as u32;
    let problem = StepProblem { sequences, q_heads: group * kv_heads, kv_heads, head_dim, max_tokens };
    let batch = Batch::<E>::in_turns(problem, &[Input::Normal, Input::Ties], lengths, 5, 9);
    let mut steps_of = Stepping::new(device, batch, support, slots, steps.steps, false)?;
    let (mut staged, mut told, mut outputs, mut lse) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for step in 0..steps.steps {
        steps_of.step(step)?;
        staged.extend(steps_of.fetching.table().to_vec()?);
        told.extend(steps_of.told()?);
        outputs.extend(steps_of.output.to_vec()?);
        lse.extend(steps_of.lse.to_vec()?);
    }
    let [home_keys, home_values] = steps_of.home.both().map(<[E]>::to_vec);
    Ok(vec![
        OutputBuffer::new("staged", staged),
        OutputBuffer::new("told", told),
        OutputBuffer::new("output", outputs),
        OutputBuffer::new("lse", lse),
        OutputBuffer::download("directory", steps_of.staging.directory())?,
        OutputBuffer::download("staged keys", steps_of.staging.pool().keys())?,
        OutputBuffer::download("staged values", steps_of.staging.pool().values())?,
        OutputBuffer::new("home keys", home_keys),
        OutputBuffer::new("home values", home_values),
        OutputBuffer::new(
            "tally",
            steps_of.staging.tally().to_vec()?.into_iter().map(|count| count as u32).collect(),
        ),
    ])
}

/// Steps over a batch whose last tokens come one by one, each step with other queries.
pub(in crate::gather) struct Stepping<E: GatherElement> {
    pub batch: Batch<E>,
    pub staging: Staging<E>,
    pub fetching: Fetching,
    pub plan: Plan<E>,
    pub output: Buffer<f32>,
    pub lse: Buffer<f32>,
    pub home: HostPool<E>,
    stream: Stream,
    slices: bool,
    bounds: Bounds<E>,
    /// All keys and values on the device, to take tokens from.
    pool: PagedPool<E>,
    table: Buffer<u32>,
    near: Buffer<u32>,
    lengths: Vec<u32>,
    /// Queries of a step, and lengths, while a launch may read them.
    held: Option<(Buffer<E>, Buffer<u32>)>,
}

impl<E: GatherElement> Stepping<E> {
    /// Before the first of `steps` steps: all other tokens are at home, and those that are near are staged.
    pub fn new(
        device: &Device,
        batch: Batch<E>,
        support: Support,
        slots: u32,
        steps: u32,
        slices: bool,
    ) -> Result<Self> {
        let problem = batch.problem;
        let stream = Stream::new(device)?;
        let pool =
            PagedPool::from_slices(device, problem.kv_heads, problem.head_dim, &batch.keys, &batch.values);
        let pool = pool.map_err(crate::attention::dense::Error::from)?;
        let mut staging = Staging::new(device, problem, support, slots)?;
        let (keys, values) = staging.pool_mut().both_mut();
        stream.fill_u8(keys, .., 0)?;
        stream.fill_u8(values, .., 0)?;
        let near: Vec<u32> = (0..problem.sequences).flat_map(|s| staging.near_blocks(s)).collect();
        let rows = problem.dense().query_rows();
        let mut stepping = Stepping {
            fetching: Fetching::new(device, problem, support, slots)?,
            plan: Plan::new(device, problem, support)?,
            output: poisoned(&stream, rows * problem.head_dim as usize)?,
            lse: poisoned(&stream, rows)?,
            home: HostPool::new(device, pool.blocks(), problem.kv_heads, problem.head_dim)?,
            bounds: Bounds::new(device, problem, support)?,
            table: Buffer::from_slice(device, &batch.table)?,
            near: Buffer::from_slice(device, &near)?,
            lengths: batch.lengths.iter().map(|length| length.saturating_sub(steps)).collect(),
            staging,
            batch,
            stream,
            slices,
            pool,
            held: None,
        };
        for scratch in stepping.fetching.scratch_mut() {
            *scratch = poisoned(&stepping.stream, scratch.len())?;
        }
        let lengths = stepping.lengths.clone();
        for (sequence, length) in lengths.iter().enumerate() {
            let first = stepping.staging.near_tokens(*length);
            stepping.bring(sequence, 0..*length, true)?;
            stepping.bring(sequence, first..*length, false)?;
        }
        stepping.fold(&vec![0; lengths.len()])?;
        Ok(stepping)
    }

    /// Copies tokens to the host's pool, or to their near places.
    fn bring(&mut self, sequence: usize, tokens: std::ops::Range<u32>, home: bool) -> Result<()> {
        let width = self.table.len() / self.lengths.len();
        let row = |table: &Buffer<u32>| table.global_range(sequence * width..(sequence + 1) * width);
        let carried = Carried {
            from: Fetching::of_pool(&self.pool),
            from_table: row(&self.table)?,
            to: if home { self.home.words_mut() } else { Fetching::of_pool_mut(self.staging.pool_mut()) },
            to_table: row(if home { &self.table } else { &self.near })?,
            tokens: tokens.start as usize..tokens.end as usize,
        };
        // SAFETY: pools with their tables, made for one problem. Dropping any waits for the device.
        unsafe { self.fetching.carry_on(&self.stream, self.slices, carried) }
    }

    /// Takes the tokens from these positions on into the bounds.
    fn fold(&mut self, positions: &[u32]) -> Result<()> {
        let device = self.stream.device();
        let (first, lengths) =
            (Buffer::from_slice(device, positions)?, Buffer::from_slice(device, &self.lengths)?);
        let tokens = self.lengths.iter().zip(positions).map(|(to, from)| to - from).max().unwrap_or(0);
        let handles = FoldHandles {
            keys: self.pool.keys().global(),
            table: self.table.global(),
            positions: first.global(),
            lengths: lengths.global(),
        };
        // SAFETY: as in `bring`; the table's entries up to each length are the pool's.
        unsafe { self.bounds.fold_on(&self.stream, (0, tokens), self.slices, handles) }
    }

    /// A step: a token more of each sequence that has one, then its attention.
    pub fn step(&mut self, step: u32) -> Result<()> {
        let before = self.lengths.clone();
        for (sequence, length) in before.iter().copied().enumerate() {
            if length < self.batch.lengths[sequence] {
                self.lengths[sequence] += 1;
                self.bring(sequence, length..length + 1, false)?;
            }
        }
        self.fold(&before)?;
        let device = self.stream.device();
        let mut queries = self.batch.queries.clone();
        // By no whole number of heads: other queries.
        queries.rotate_left(67 * step as usize % self.batch.queries.len());
        let (queries, lengths) =
            (Buffer::from_slice(device, &queries)?, Buffer::from_slice(device, &self.lengths)?);
        let handles = Handles {
            queries: queries.global(),
            keys: self.staging.pool().keys().global(),
            values: self.staging.pool().values().global(),
            bounds: self.bounds.words().global(),
            table: self.table.global(),
            lengths: lengths.global(),
            output: self.output.global_mut(),
            lse: self.lse.global_mut(),
        };
        let Stepping { stream, slices, plan, fetching, staging, home, .. } = self;
        // SAFETY: as in `bring`; all tokens but the near ones are at home, earlier steps have taken theirs
        // there. Dropping a buffer waits for the device.
        unsafe {
            let step = StagedStep { plan, staging, home, handles: &handles };
            fetching.step_on(stream, *slices, step)?;
        }
        self.held = Some((queries, lengths));
        Ok(())
    }

    /// Output and log-sums of the last step over the pool that has all on the device, as bits.
    #[cfg(test)]
    pub fn resident(&mut self) -> Result<[Vec<u32>; 2]> {
        let device = self.stream.device();
        let Some((queries, lengths)) = &self.held else { return Ok([Vec::new(), Vec::new()]) };
        let mut output = Buffer::<f32>::zeroed(device, self.output.len())?;
        let mut lse = Buffer::<f32>::zeroed(device, self.lse.len())?;
        let handles = Handles {
            queries: queries.global(),
            keys: self.pool.keys().global(),
            values: self.pool.values().global(),
            bounds: self.bounds.words().global(),
            table: self.table.global(),
            lengths: lengths.global(),
            output: output.global_mut(),
            lse: lse.global_mut(),
        };
        // SAFETY: as in `step`.
        unsafe { self.plan.attend_on(&self.stream, self.slices, &handles) }?;
        let bits = |buffer: &Buffer<f32>| -> Result<Vec<u32>> {
            Ok(buffer.to_vec()?.iter().map(|x| x.to_bits()).collect())
        };
        Ok([bits(&output)?, bits(&lse)?])
    }

    /// The far blocks of each list of the last step.
    #[cfg(test)]
    pub fn far_lists(&self) -> Result<Vec<Vec<u32>>> {
        let (list, misses) = (self.plan.chosen().list.to_vec()?, self.fetching.rows());
        let most = list.len() / misses;
        let heads = misses / self.lengths.len();
        let far = |(row, list): (usize, &[u32])| {
            let near = self.staging.near_tokens(self.lengths[row / heads]) / self.plan.support().block;
            list.iter().copied().take_while(|block| *block < near).collect()
        };
        Ok(list.chunks(most).enumerate().map(far).collect())
    }

    /// What `place` told `fetch`, without what it left as it was: far slots, missed places, how many.
    fn told(&mut self) -> Result<Vec<u32>> {
        let [at, missed, misses, _] = self.fetching.scratch_mut().map(|buffer| buffer.to_vec());
        let (at, missed, misses) = (at?, missed?, misses?);
        let most = at.len() / misses.len();
        let tally = self.staging.tally().to_vec()?;
        let mut told = misses.clone();
        for (row, misses) in misses.iter().enumerate() {
            let far = (tally[4 * row + 2] + tally[4 * row + 3]) as usize;
            told.extend(&at[row * most..][..far.min(most)]);
            told.extend(&missed[row * most..][..(*misses as usize).min(most)]);
        }
        Ok(told)
    }
}
