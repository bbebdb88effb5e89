//! Steps of certified attention, and of bare INT8/INT4 attention, as workloads.
//!
//! Both are whole steps: the pass alone leaves out a trailing block that is not full, and writes no output.

use super::kv::head_report;
use super::scheme::{layout, policy};
use super::{
    Annotation, Attended, CacheElement, Certificate, Geometry, Job, Layout, Near, OriginalsRead, Policy,
    Rounding, Rung, Scratch, StepHandles, StepPlan, StepProblem, Traffic, Writer, reasons,
};
use crate::attention::BLOCK_TOKENS;
use crate::kv::workload::{
    AnyInput, Data, Fact, Input, Memory, Opening, Originals, Outcome, Promise, Workload,
};
use crate::kv::{Error, Result};
use crate::{BackendKind, Buffer, Pinned, Stream};
use kernels_gpu::certified::admit::{HEADER, LAST, TOTAL};
use std::sync::Arc;

/// Blocks that are quantized by one launch.
const JOBS: usize = 1 << 14;
/// Query heads of a KV head that are computed together and share what is read.
const ROW_GROUP: u64 = 8;
/// Bytes of a dimension of a tile of 16 tokens: original keys, or values.
const TILE_BYTES: u64 = 2 * BLOCK_TOKENS as u64;

/// Original keys and values in host memory, and what of them is near.
struct Host<E: CacheElement> {
    keys: Pinned<E>,
    values: Pinned<E>,
    near: Buffer<E>,
    directory: Buffer<u64>,
    scratch: Scratch,
}

/// The quantized form of one pool.
pub(crate) struct Quantized {
    pub(crate) tiles: Buffer<u8>,
    pub(crate) annotations: Buffer<Annotation>,
}

struct Step<E: CacheElement> {
    input: Arc<Input<E>>,
    plan: StepPlan<E>,
    out: Attended,
    policy: Policy,
    geometry: Geometry,
    /// Of each pool.
    quantized: Vec<Quantized>,
    host: Option<Host<E>>,
    /// Steps so far.
    steps: usize,
    settled: Settled,
}

/// What is kept of steps before any that is timed.
#[derive(Default)]
struct Settled {
    output: Vec<f32>,
    lse: Vec<f32>,
    certificates: Vec<Certificate>,
    /// Of the last steps in all, and how many these are.
    read: OriginalsRead,
    steps: u64,
    checked: u64,
    /// Of the first step, with an empty scratch, and of the settled one.
    traffic: [Traffic; 2],
    /// Heads of the same steps, and those of them that were computed from the originals.
    heads: [usize; 2],
}

/// Steps of `certified`.
pub(super) fn open(opening: &Opening<'_>) -> Result<Box<dyn Workload>> {
    let policy = policy(opening.selection)?;
    let rounding = policy.rounding(opening.layer.unwrap_or(0) as u32);
    let settings = (policy, layout(opening.selection), rounding);
    Ok(match &opening.input {
        AnyInput::F16(input) => Box::new(Step::open(input.clone(), settings, opening.originals)?),
        AnyInput::Bf16(input) => Box::new(Step::open(input.clone(), settings, opening.originals)?),
    })
}

/// Steps of `int8-int4`: nothing of the originals is used but the trailing block, and their error is judged
/// by the bound of a step that makes the same outputs with a certificate.
pub(super) fn open_bare(opening: &Opening<'_>) -> Result<Box<dyn Workload>> {
    let settings = (Policy::BARE, Layout::Compact, Rounding::Nearest);
    Ok(match &opening.input {
        AnyInput::F16(input) => Box::new(Step::open(input.clone(), settings, Originals::Device)?),
        AnyInput::Bf16(input) => Box::new(Step::open(input.clone(), settings, Originals::Device)?),
    })
}

impl<E: CacheElement> Step<E> {
    fn open(
        input: Arc<Input<E>>,
        (policy, layout, rounding): (Policy, Layout, Rounding),
        originals: Originals,
    ) -> Result<Self> {
        let device = &input.device;
        let policy = match originals {
            Originals::Device => policy.with_originals_at_hand(),
            Originals::Host { .. } => policy,
        };
        let problem = StepProblem::from(input.problem);
        // Before anything large: it refuses what it cannot do.
        let plan = StepPlan::<E>::with_layout(device, problem, &policy, layout)?;
        let out = plan.allocate()?;
        let geometry = Geometry::new(problem.kv_heads, problem.head_dim)?;
        let geometry = geometry.with_layout(layout).with_rounding(rounding);
        let stream = Stream::new(device)?;
        let quantized = quantize(&input, geometry, &stream)?;
        let host = match originals {
            Originals::Device => None,
            Originals::Host { scratch } => Some(Host::new(&input, geometry, scratch, &stream)?),
        };
        let settled = Settled::default();
        let mut step = Step { input, plan, out, policy, geometry, quantized, host, steps: 0, settled };
        // What no right result is.
        stream.fill_u8(&mut step.out.output, .., 0xff)?;
        stream.fill_u8(&mut step.out.lse, .., 0xff)?;
        step.settle(&stream)?;
        if !policy.certify {
            step.bound_bare(&stream, problem, layout)?;
        }
        Ok(step)
    }

    /// Steps outside any timing: the driver loads the kernels, and until a list is there and the first
    /// queries are asked again; on a GPU, until what stays over its budget waits as long as it ever does.
    /// What is read, and how many heads are exact, is told of the last [`period`](Workload::period).
    fn settle(&mut self, stream: &Stream) -> Result<()> {
        let carries = self.policy.renew > 0 && self.policy.certify;
        // A scratch holds what a step before has used.
        let keeps = self.host.as_ref().is_some_and(|host| host.scratch != Scratch::NONE);
        // The last step asks the first queries again: they are those that outputs are judged by.
        let round = self.input.queries.len();
        let mut steps = if carries || keeps { round + 1 } else { 1 };
        if self.input.device.kind() == BackendKind::Cuda && self.period() > 1 {
            steps = steps.max((3 * self.period()).next_multiple_of(round) + 1);
        }
        // Of steps that make their list anew, which alone compare what is stored, there are some on a GPU.
        let watches = self.policy.watch().is_some() && self.input.device.kind() == BackendKind::Cuda;
        let every = if watches { self.policy.renew.max(1) as usize } else { 1 };
        if steps <= every {
            steps = every.next_multiple_of(round) + 1;
        }
        // Not of the first, which has no list yet, if there are others.
        let told = self.period().min(if carries { steps - 1 } else { steps });
        self.settled.steps = told as u64;
        // Of these, what checks read is told of whole renewals: one step in each reads anything.
        let whole = told / every * every;
        for step in 0..steps {
            self.enqueue(stream, 0, usize::MAX)?;
            stream.synchronize()?;
            if step == 0 {
                self.settled.traffic[0] = self.traffic(stream)?;
            }
            if step + told < steps {
                continue;
            }
            self.settled.read.add(self.plan.originals_read(&self.input.lengths)?);
            if step + whole >= steps {
                let seen = &self.input.seen;
                let lengths = match seen.is_empty() {
                    true => self.input.lengths.clone(),
                    false => seen[(self.steps - 1) % seen.len()].to_vec()?,
                };
                self.settled.checked += self.plan.checked(&lengths)?.bytes(self.geometry.layout());
            }
            if self.policy.certify {
                let certificates = self.out.certificates.to_vec()?;
                let dense = certificates.iter().filter(|c| Rung::of(c.rung()).is_dense()).count();
                self.settled.heads[0] += certificates.len();
                self.settled.heads[1] += dense;
            }
        }
        let settled = &mut self.settled;
        settled.output = self.out.output.to_vec()?;
        settled.lse = self.out.lse.to_vec()?;
        settled.checked /= whole as u64;
        if self.policy.certify {
            settled.certificates = self.out.certificates.to_vec()?;
        }
        self.settled.traffic[1] = self.traffic(stream)?;
        Ok(())
    }

    /// The certificates of the same outputs, from a step that makes them.
    fn bound_bare(&mut self, stream: &Stream, problem: StepProblem, layout: Layout) -> Result<()> {
        let mut judged = StepPlan::<E>::with_layout(&self.input.device, problem, &Policy::CODES, layout)?;
        let mut out = judged.allocate()?;
        let handles = self.handles(0, 0);
        // SAFETY: as for every step of this workload; it ends before the plan goes.
        unsafe { judged.run(stream, &handles, out.handles()) }?;
        stream.synchronize()?;
        self.settled.certificates = out.certificates.to_vec()?;
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        if bits(&self.settled.output) == bits(&out.output.to_vec()?) {
            return Ok(());
        }
        #[derive(Debug, thiserror::Error)]
        #[error(
            "int8-int4 has other outputs with a certificate than without; run `ferrokv check` and report this"
        )]
        struct OtherOutputs;
        Err(Error::system(OtherOutputs))
    }

    fn handles(&mut self, set: usize, step: usize) -> StepHandles<E> {
        let Input { queries, pools, table, seen, .. } = &*self.input;
        let lengths = if seen.is_empty() { table.lengths() } else { &seen[step % seen.len()] };
        let (keys, values) = match &self.host {
            Some(host) => (host.keys.global(), host.values.global()),
            None => (pools[set].keys().global(), pools[set].values().global()),
        };
        let near = match &mut self.host {
            Some(host) if host.scratch != Scratch::NONE => Near {
                tiles: host.near.global_mut(),
                directory: host.directory.global_mut(),
                scratch: host.scratch,
            },
            _ => Near::none(),
        };
        StepHandles {
            queries: queries[step % queries.len()].global(),
            tiles: self.quantized[set].tiles.global().cast(),
            annotations: self.quantized[set].annotations.global(),
            table: table.blocks().global(),
            lengths: lengths.global(),
            keys,
            values,
            near,
        }
    }

    /// Of the last step; nothing where there is no scratch to count it.
    fn traffic(&self, stream: &Stream) -> Result<Traffic> {
        const { assert!(TOTAL == LAST + 4) };
        let Some(host) = self.host.as_ref().filter(|host| host.scratch != Scratch::NONE) else {
            return Ok(Traffic::default());
        };
        let mut words = [0u64; 4];
        stream.download(&host.directory, LAST, &mut words)?;
        Ok(bytemuck::cast(words))
    }

    /// Tiles of full blocks, each as often as a group of query heads reads them: not of groups that were left
    /// to the dense rung, twice of those that were passed over again. And their annotations where a step
    /// certifies.
    fn quantized_bytes(&self) -> u64 {
        let problem = self.input.problem;
        let groups =
            u64::from(problem.kv_heads) * u64::from(problem.q_heads / problem.kv_heads).div_ceil(ROW_GROUP);
        let blocks: u64 = self.input.lengths.iter().map(|length| u64::from(length / BLOCK_TOKENS)).sum();
        let annotation = if self.policy.certify { size_of::<Annotation>() as u64 } else { 0 };
        // A workload's sequences have the same length.
        let sequences = self.input.lengths.len().max(1) as u64;
        let OriginalsRead { exact_rows, again_rows, .. } = self.settled.read;
        let of = |rows: u64| blocks * rows / (sequences * self.settled.steps);
        let (left, again) = (of(exact_rows), of(again_rows));
        let tile = u64::from(self.geometry.layout().bytes);
        (groups * blocks + again - left) * tile + (groups * blocks + again) * annotation
    }

    /// Bytes of originals for promoted and trailing blocks, and for the dense rung.
    fn original_bytes(&self) -> [u64; 2] {
        let dim = u64::from(self.input.problem.head_dim);
        let (read, steps) = (self.settled.read, self.settled.steps);
        let token = 4 * dim;
        let longest = u64::from(self.input.lengths.iter().copied().max().unwrap_or(0));
        let promoted = (read.key_tiles + read.value_tiles) * TILE_BYTES * dim;
        [promoted / steps, read.dense_rows * longest * token / steps]
    }
}

/// Quantizes the full blocks of each pool.
pub(crate) fn quantize<E: CacheElement>(
    input: &Input<E>,
    geometry: Geometry,
    stream: &Stream,
) -> Result<Vec<Quantized>> {
    let blocks = input.table.pool_blocks();
    let mut jobs: Vec<Job> = Vec::new();
    for (row, length) in input.blocks.iter().zip(&input.lengths) {
        let full = row[..(length / BLOCK_TOKENS) as usize].iter().zip(0..);
        jobs.extend(full.map(|(block, index)| Job::new(*block, *block, index)));
    }
    // Sequences may share blocks.
    jobs.sort_unstable_by_key(|job| (job.source, job.index));
    jobs.dedup_by_key(|job| job.source);
    let mut writer = Writer::<E>::new(&input.device, geometry, jobs.len().clamp(1, JOBS))?;
    let mut all = Vec::with_capacity(input.pools.len());
    for pool in &input.pools {
        let mut tiles = Buffer::zeroed(&input.device, geometry.tile_bytes(blocks as usize))?;
        let mut annotations = Buffer::zeroed(&input.device, geometry.pairs(blocks as usize))?;
        for jobs in jobs.chunks(JOBS) {
            writer.write(stream, pool.keys(), pool.values(), jobs, &mut tiles, &mut annotations)?;
        }
        all.push(Quantized { tiles, annotations });
    }
    writer.check(stream)?;
    Ok(all)
}

/// Keys and values in page-locked host memory. All pools are the same, and what comes over the bus is in
/// nobody's cache: one copy will do.
pub(crate) fn in_host<E: CacheElement>(input: &Input<E>, stream: &Stream) -> Result<[Pinned<E>; 2]> {
    let pinned = |from: &Buffer<E>| -> Result<Pinned<E>> {
        let mut to = Pinned::zeroed(&input.device, from.len())?;
        stream.download(from, 0, &mut to)?;
        Ok(to)
    };
    let pool = &input.pools[0];
    Ok([pinned(pool.keys())?, pinned(pool.values())?])
}

impl<E: CacheElement> Host<E> {
    fn new(input: &Input<E>, geometry: Geometry, blocks: u32, stream: &Stream) -> Result<Self> {
        // No more than there are. The pool has all of them twice, keys and values, so they can be numbered.
        let slots = blocks.min(input.table.pool_blocks()) * input.problem.kv_heads;
        let scratch = match slots {
            0 => Scratch::NONE,
            _ => Scratch { key_slots: slots, value_slots: slots, fresh: 0, admits: 1 },
        };
        let mut directory = vec![0u64; HEADER as usize];
        for _ in 0..2 * u64::from(slots) {
            directory.extend([u64::MAX, u64::from(Scratch::EMPTY)]);
        }
        let tile = geometry.layout().elements() as usize;
        let [keys, values] = in_host(input, stream)?;
        Ok(Host {
            keys,
            values,
            near: Buffer::zeroed(&input.device, scratch.tiles() as usize * tile)?,
            directory: Buffer::from_slice(&input.device, &directory)?,
            scratch,
        })
    }
}

impl<E: CacheElement> Workload for Step<E> {
    fn stages(&self) -> &'static [&'static str] {
        self.plan.stages()
    }

    fn enqueue(&mut self, stream: &Stream, set: usize, stages: usize) -> Result<()> {
        let handles = self.handles(set, self.steps);
        self.steps += 1;
        // SAFETY: every buffer lives as long as the workload, which the caller keeps until the stream is
        // done; the table's lengths and blocks are those that the pools were made for, and every full block
        // is quantized.
        Ok(unsafe { self.plan.run_stages(stream, &handles, self.out.handles(), stages) }?)
    }

    /// So many that queries change as they do from token to token, and of each kind of step as many as there
    /// are in the long run: those that try again what was left to the dense rung among them.
    fn period(&self) -> usize {
        let Policy { renew, retry, error_budget, .. } = self.policy;
        let lists = if renew > 0 && error_budget < f32::INFINITY { retry.max(1) } else { 1 };
        if self.policy.certify { (renew.max(1) * lists) as usize } else { 1 }
    }

    fn read_bytes(&self) -> u64 {
        self.quantized_bytes() + self.original_bytes().iter().sum::<u64>()
    }

    fn memory(&self) -> Memory {
        let quantized = &self.quantized[0];
        let stored = quantized.tiles.bytes() + quantized.annotations.bytes();
        let pool = &self.input.pools[0];
        let originals = (pool.keys().bytes() + pool.values().bytes()) as u64;
        match &self.host {
            Some(host) => Memory {
                device: (stored + host.near.bytes() + host.directory.bytes()) as u64,
                host: originals,
            },
            None if self.policy.certify => Memory { device: stored as u64 + originals, host: 0 },
            None => Memory { device: stored as u64, host: 0 },
        }
    }

    fn exact_outputs(&mut self, stream: &Stream) -> Result<Vec<Vec<f32>>> {
        let handles = self.handles(0, 0);
        // SAFETY: as for every step of this workload; it has ended when this returns.
        Ok(unsafe { self.plan.exact_outputs(stream, &handles) }?)
    }

    fn outcome(&self) -> Result<Outcome> {
        let Settled { output, lse, certificates, .. } = &self.settled;
        Ok(Outcome {
            output: output.clone(),
            lse: lse.clone(),
            heads: certificates.iter().map(head_report).collect(),
        })
    }

    fn promise(&self, row: usize, _: &Data<'_>) -> Promise {
        Promise::Norm(self.settled.certificates[row].likely.into())
    }

    fn facts(&self) -> Result<Vec<Fact>> {
        let certificates = &self.settled.certificates;
        let mean = |of: &dyn Fn(&Certificate) -> f64| {
            certificates.iter().map(of).sum::<f64>() / certificates.len() as f64
        };
        let median = |of: &dyn Fn(&Certificate) -> f32| {
            let mut all: Vec<f32> = certificates.iter().map(of).collect();
            all.sort_by(f32::total_cmp);
            all.get(all.len() / 2).map_or(f64::NAN, |x| f64::from(*x))
        };
        let [promoted, dense] = self.original_bytes();
        let [first, later] = self.settled.traffic;
        let dim = self.input.problem.head_dim;
        let mut facts = vec![
            Fact::text(
                "originals",
                match &self.host {
                    _ if !self.policy.certify => "none",
                    Some(_) => "host",
                    None => "device",
                },
            ),
            Fact::count("keys", mean(&|c| f64::from(c.promoted_keys))),
            Fact::count("values", mean(&|c| f64::from(c.promoted_values))),
            Fact::count("tail", mean(&|c| f64::from(c.tail_mass))),
            Fact::error("E_key", median(&|c| c.e_key)),
            Fact::error("E_val", median(&|c| c.e_val)),
            Fact::error("E_round", median(&|c| c.e_round)),
            Fact::error("worst case", median(&|c| c.bound())),
            Fact::bytes("quantized", self.quantized_bytes()),
            Fact::bytes("promoted", promoted),
            Fact::bytes("dense", dense),
            Fact::bytes("checked", self.settled.checked),
            Fact::text("dense heads", format!("{} of {}", self.settled.heads[1], self.settled.heads[0])),
        ];
        if self.policy.passes_again() {
            let rows = self.settled.read.again_rows as f64 / self.settled.steps as f64;
            facts.push(Fact::count("rows again", rows));
        }
        if self.host.as_ref().is_some_and(|host| host.scratch != Scratch::NONE) {
            facts.push(Fact::bytes("host, first step", first.bytes(dim)));
            facts.push(Fact::bytes("host, later", later.bytes(dim)));
            facts.push(Fact::count("scratch hits", (later.key_hits + later.value_hits) as f64));
        }
        Ok(facts)
    }

    fn row_facts(&self, row: usize) -> Vec<Fact> {
        let certificate = &self.settled.certificates[row];
        vec![
            Fact::error("E_key", certificate.e_key.into()),
            Fact::error("E_val", certificate.e_val.into()),
            Fact::error("E_round", certificate.e_round.into()),
            Fact::error("worst case", certificate.bound().into()),
            Fact::count("tail", certificate.tail_mass.into()),
            Fact::error("delta", certificate.delta.into()),
            Fact::text("rung", Rung::of(certificate.rung()).to_string()),
            Fact::text("why", reasons(certificate.reason()).join(", ")),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use crate::attention::StepProblem;
    use crate::attention::inputs::{Batch, Input as Kind};
    use crate::certified::policy::SecondPass;
    use crate::kv::proof::by_workload::to_device;
    use half::f16;
    use simt::emu::EmuOptions;

    /// By default a step has a second pass where it saves the bus, and not where originals are at hand.
    #[test]
    fn originals_on_the_device_leave_out_the_second_pass() {
        let device = Device::cpu(EmuOptions::default());
        let problem = StepProblem { sequences: 1, q_heads: 2, kv_heads: 1, head_dim: 64, max_tokens: 64 };
        let batch = Batch::<f16>::new(problem, &[(Kind::Normal, 64)], 3, 7);
        let passes_again = |again, originals| {
            let input = Arc::new(to_device(&device, &batch).expect("an input"));
            let settings = (Policy { again, ..Policy::SOUND }, Layout::Compact, Rounding::Nearest);
            let step = Step::open(input, settings, originals).expect("a step");
            step.stages().contains(&"again")
        };
        let host = Originals::Host { scratch: 4 };
        for (again, on_device, on_host) in [
            (Policy::SOUND.again, false, true),
            (SecondPass::Always, true, true),
            (SecondPass::Never, false, false),
        ] {
            assert_eq!(passes_again(again, Originals::Device), on_device, "{again:?}");
            assert_eq!(passes_again(again, host), on_host, "{again:?}");
        }
    }

    /// Queries of earlier tokens see the tokens that there were for them, whatever has come since: the bits
    /// of a step over a sequence that is as long.
    #[test]
    fn a_step_sees_the_tokens_of_its_queries() {
        let device = Device::cpu(EmuOptions::default());
        let problem = StepProblem { sequences: 1, q_heads: 4, kv_heads: 2, head_dim: 64, max_tokens: 96 };
        let open = |lengths: [u32; 2]| {
            let batch = Batch::<f16>::new(problem, &[(Kind::Normal, lengths[0])], 3, 7);
            let mut input = to_device(&device, &batch).expect("an input");
            let queries = Buffer::from_slice(&device, &batch.queries).expect("queries");
            input.queries.push(queries);
            for length in lengths {
                input.seen.push(Buffer::from_slice(&device, &[length]).expect("a length"));
            }
            let settings = (Policy::BARE, Layout::Compact, Rounding::Nearest);
            Step::open(Arc::new(input), settings, Originals::Device).expect("a step")
        };
        let stream = Stream::new(&device).expect("a stream");
        let mut step = open([90, 41]);
        let of_all = step.settled.output.clone();
        // The one that settled had the first queries.
        step.enqueue(&stream, 0, usize::MAX).expect("a step");
        stream.synchronize().expect("done");
        let shorter = step.out.output.to_vec().expect("an output");
        assert_ne!(of_all, shorter);
        // The same keys and values are there for a shorter sequence: those of a batch are by token.
        let batch = Batch::<f16>::new(problem, &[(Kind::Normal, 90)], 3, 7);
        let cut = Batch { lengths: vec![41], ..batch };
        let input = Arc::new(to_device(&device, &cut).expect("an input"));
        let settings = (Policy::BARE, Layout::Compact, Rounding::Nearest);
        let own = Step::open(input, settings, Originals::Device).expect("a step");
        assert_eq!(own.settled.output, shorter);
    }
}
