//! The schemes over INT8 keys and INT4 values: `naive` promotes nothing, `certified` what its policy says.
//!
//! Both are whole steps: the pass alone leaves out a trailing block that is not full, and writes no output.

use super::caches::Caches;
use super::report::{Certified, Part, Subject};
use super::schemes::{Options, Output, Scheme};
use crate::cli::failure::Failure;
use host::certified::{
    Annotation, Attended, BLOCK_TOKENS, CacheElement, Certificate, Geometry, Job, Near, OriginalsRead,
    Policy, Rung, StepHandles, StepPlan, StepProblem, Writer,
};
use host::{Buffer, Pinned, Stream};

/// The launches of a step that chooses for itself, in order.
pub const PARTS: [&str; 6] = ["pass", "weigh", "mark", "replace", "checks", "dense"];
/// Those of a step by a list that is carried.
pub const CARRIED_PARTS: [&str; 4] = ["carry", "dense", "weigh", "mark"];
/// Steps of a graph at least, where each promotes what others have chosen.
const LEAST_CALLS: usize = 16;
/// Blocks that are quantized by one launch.
const JOBS: usize = 1 << 14;
/// Bytes of a dimension of a tile of 16 tokens: quantized keys and values; original keys, or values.
const TILE_BYTES: u64 = 32;

/// What a scheme reads of a quantized cache: tiles of full blocks, and their annotations where it certifies.
pub fn quantized_bytes(subject: Subject, certifies: bool) -> u64 {
    let pairs = u64::from(subject.batch) * u64::from(subject.shape.kv_heads);
    let blocks = u64::from(subject.context / BLOCK_TOKENS);
    let annotation = if certifies { size_of::<Annotation>() as u64 } else { 0 };
    pairs * blocks * (TILE_BYTES * u64::from(subject.shape.head_dim) + annotation)
}

/// The policy of that name, which the command line has checked.
fn policy(name: &str) -> Policy {
    Policy::preset(name).unwrap_or_default()
}

/// Original keys and values in host memory.
struct Host<E: CacheElement> {
    keys: Pinned<E>,
    values: Pinned<E>,
}

/// A step over each of the caches.
pub struct Step<E: CacheElement> {
    name: &'static str,
    preset: &'static str,
    plan: StepPlan<E>,
    out: Attended,
    policy: Policy,
    /// Of steps that follow each other.
    queries: Vec<Buffer<E>>,
    /// Steps so far, and heads on the dense rung in the first of them.
    steps: usize,
    dense_heads: usize,
    /// Of a step with the first queries, when the list is as it will be: what it returned, and its certificates.
    returned: Output,
    certificates: Vec<Certificate>,
    /// Of each cache.
    tiles: Vec<Buffer<u8>>,
    annotations: Vec<Buffer<Annotation>>,
    host: Option<Host<E>>,
    subject: Subject,
    read: OriginalsRead,
}

impl<E: CacheElement> Step<E> {
    /// Quantizes the caches and runs one step.
    ///
    /// # Errors
    /// Extents that certified attention does not take; out of memory; what the device reports.
    pub fn open(name: &'static str, caches: &Caches<E>, options: Options) -> Result<Self, Failure> {
        let subject = caches.subject;
        let preset = if name == "naive" { "naive" } else { options.policy };
        // Timed without what only a certificate needs; its error is judged by the certificate of the same outputs.
        let timed = if name == "naive" { Policy::BARE } else { policy(preset) };
        let problem = StepProblem {
            sequences: subject.batch,
            q_heads: subject.shape.q_heads,
            kv_heads: subject.shape.kv_heads,
            head_dim: subject.shape.head_dim,
            max_tokens: subject.context,
        };
        // Before anything large: it refuses what it cannot do.
        let plan = StepPlan::<E>::new(&caches.device, problem, &timed)?;
        let out = plan.allocate()?;
        let geometry = Geometry::new(problem.kv_heads, problem.head_dim)?;
        let stream = Stream::new(&caches.device)?;
        let blocks = caches.table.pool_blocks();
        let jobs: Vec<Job> = (0..blocks).map(|block| Job { source: block, destination: block }).collect();
        let mut writer = Writer::<E>::new(&caches.device, geometry, jobs.len().min(JOBS))?;
        let (mut tiles, mut annotations) = (Vec::new(), Vec::new());
        for set in &caches.sets {
            let mut of_set = Buffer::new(&caches.device, geometry.tile_bytes(blocks as usize))?;
            let mut bounds = Buffer::new(&caches.device, geometry.pairs(blocks as usize))?;
            writer.write(&stream, set.pool.keys(), set.pool.values(), &jobs, &mut of_set, &mut bounds)?;
            tiles.push(of_set);
            annotations.push(bounds);
        }
        writer.check(&stream)?;
        // All caches are the same, and what comes over the bus is in nobody's cache: one copy will do.
        let host = if options.cold && name != "naive" {
            let pinned = |from: &Buffer<E>| -> Result<Pinned<E>, Failure> {
                let mut to = Pinned::zeroed(&caches.device, from.len())?;
                stream.download(from, 0, &mut to)?;
                Ok(to)
            };
            let pool = &caches.sets[0].pool;
            Some(Host { keys: pinned(pool.keys())?, values: pinned(pool.values())? })
        } else {
            None
        };
        let read = OriginalsRead::default();
        let mut step = Step {
            name,
            preset,
            plan,
            out,
            policy: timed,
            queries: caches.queries_of_steps()?,
            steps: 0,
            dense_heads: 0,
            returned: Output { output: Vec::new(), lse: Vec::new() },
            certificates: Vec::new(),
            tiles,
            annotations,
            host,
            subject,
            read,
        };
        // What no right result is.
        stream.fill_u8(&mut step.out.output, .., 0xff)?;
        stream.fill_u8(&mut step.out.lse, .., 0xff)?;
        // First runs outside any timing: the driver loads the kernels, and a list is there. The last one asks the first queries.
        for _ in 0..step.first_steps() {
            step.step(&stream, caches, 0)?;
            stream.synchronize()?;
            let dense = |c: &Certificate| Rung::of(c.rung()).is_dense();
            step.dense_heads += step.out.certificates.to_vec()?.iter().filter(|c| dense(c)).count();
        }
        step.returned = Output { output: step.out.output.to_vec()?, lse: step.out.lse.to_vec()? };
        step.read = step.plan.originals_read(&vec![subject.context; subject.batch as usize])?;
        step.certificates = step.out.certificates.to_vec()?;
        if name == "naive" {
            let timed = step.returned.output.clone();
            let mut judged = StepPlan::<E>::new(&caches.device, problem, &Policy::NAIVE)?;
            let handles = step.handles(caches, 0, 0);
            // SAFETY: as for every step of this scheme; it ends before the plan goes.
            unsafe { judged.run(&stream, &handles, step.out.handles()) }?;
            stream.synchronize()?;
            step.certificates = step.out.certificates.to_vec()?;
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            if bits(&timed) != bits(&step.out.output.to_vec()?) {
                let what = "naive attention has other outputs with a certificate than without";
                return Err(Failure::Differs(what.into()));
            }
        }
        Ok(step)
    }

    /// Steps outside any timing: until a list is there and the first queries are asked again.
    fn first_steps(&self) -> usize {
        if self.policy.renew > 0 && self.policy.certify { self.queries.len() + 1 } else { 1 }
    }

    fn handles(&self, caches: &Caches<E>, set: usize, step: usize) -> StepHandles<E> {
        let pool = &caches.sets[set].pool;
        let (keys, values) = match &self.host {
            Some(host) => (host.keys.global(), host.values.global()),
            None => (pool.keys().global(), pool.values().global()),
        };
        StepHandles {
            queries: self.queries[step % self.queries.len()].global(),
            tiles: self.tiles[set].global().cast(),
            annotations: self.annotations[set].global(),
            table: caches.table.blocks().global(),
            lengths: caches.table.lengths().global(),
            keys,
            values,
            near: Near::none(),
        }
    }

    /// Bytes of originals for promoted and trailing blocks, and for the dense rung.
    fn original_bytes(&self) -> [u64; 2] {
        let dim = u64::from(self.subject.shape.head_dim);
        let tiles = self.read.key_tiles + self.read.value_tiles;
        let token = 4 * dim;
        [tiles * TILE_BYTES * dim, self.read.dense_rows * u64::from(self.subject.context) * token]
    }
}

impl<E: CacheElement> Scheme<E> for Step<E> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cache_bytes(&self) -> u64 {
        quantized_bytes(self.subject, self.policy.certify) + self.original_bytes().iter().sum::<u64>()
    }

    fn step(&mut self, stream: &Stream, caches: &Caches<E>, set: usize) -> Result<(), Failure> {
        let handles = self.handles(caches, set, self.steps);
        self.steps += 1;
        // SAFETY: every buffer lives as long as the scheme or the caches, which the caller keeps until the stream is done;
        // the table's lengths and blocks are those that the pools were made for, and every block is quantized.
        Ok(unsafe { self.plan.run(stream, &handles, self.out.handles()) }?)
    }

    /// So many that queries change as they do from token to token, and of each kind of step as many as there are in the long run.
    fn calls(&self, least: usize) -> usize {
        if self.policy.renew == 0 || !self.policy.certify {
            return least;
        }
        least.max(LEAST_CALLS).next_multiple_of(self.policy.renew as usize)
    }

    fn parts(&self) -> &'static [&'static str] {
        if self.policy.renew > 0 { &CARRIED_PARTS } else { &PARTS }
    }

    fn first_parts(
        &mut self,
        parts: usize,
        stream: &Stream,
        caches: &Caches<E>,
        set: usize,
    ) -> Result<(), Failure> {
        let handles = self.handles(caches, set, self.steps);
        self.steps += 1;
        if self.policy.renew > 0 {
            // SAFETY: as for the whole step; each launch finds what those before it have written.
            unsafe {
                self.plan.run_carry(stream, &handles, self.out.handles())?;
                if parts > 1 {
                    self.plan.run_dense(stream, &handles, self.out.handles())?;
                }
                if parts > 2 {
                    self.plan.run_weigh(stream, &handles)?;
                }
                if parts > 3 {
                    self.plan.run_mark(stream, &handles)?;
                }
            }
            return Ok(());
        }
        // SAFETY: as for the whole step; each launch finds what those before it have written.
        unsafe {
            self.plan.run_pass(stream, &handles)?;
            if parts > 1 {
                self.plan.run_weigh(stream, &handles)?;
            }
            if parts > 2 {
                self.plan.run_mark(stream, &handles)?;
            }
            if parts > 3 {
                self.plan.run_replace(stream, &handles, self.out.handles())?;
            }
            if parts > 4 {
                self.plan.run_checks(stream, &handles, self.out.handles())?;
            }
            if parts > 5 {
                self.plan.run_dense(stream, &handles, self.out.handles())?;
            }
        }
        Ok(())
    }

    fn result(&self) -> Result<Output, Failure> {
        Ok(self.returned.clone())
    }

    /// The error of a row, in the Euclidean norm, beside what its certificate says.
    fn error_of_bound(&self, caches: &Caches<E>, result: &Output) -> Result<f64, Failure> {
        let bound = |c: &Certificate| f64::from(c.e_key) + f64::from(c.e_val) + f64::from(c.e_round);
        let bounds: Vec<f64> = self.certificates.iter().map(bound).collect();
        Ok(caches.compare_norms(&result.output, &bounds))
    }

    fn certified(&self, parts: Vec<Part>) -> Result<Option<Certified>, Failure> {
        let certificates = &self.certificates;
        let mean = |of: &dyn Fn(&Certificate) -> f64| {
            certificates.iter().map(of).sum::<f64>() / certificates.len() as f64
        };
        let median = |of: &dyn Fn(&Certificate) -> f32| {
            let mut all: Vec<f32> = certificates.iter().map(of).collect();
            all.sort_by(f32::total_cmp);
            all.get(all.len() / 2).copied().map(f64::from).filter(|x| x.is_finite())
        };
        let [promoted_bytes, dense_bytes] = self.original_bytes();
        Ok(Some(Certified {
            policy: self.preset.into(),
            originals: if self.host.is_some() { "host" } else { "gpu" }.into(),
            parts,
            quantized_bytes: quantized_bytes(self.subject, self.policy.certify),
            promoted_bytes,
            dense_bytes,
            promoted_keys: mean(&|c| f64::from(c.promoted_keys)),
            promoted_values: mean(&|c| f64::from(c.promoted_values)),
            tail_mass: mean(&|c| f64::from(c.tail_mass)),
            e_key: median(&|c| c.e_key),
            e_val: median(&|c| c.e_val),
            e_round: median(&|c| c.e_round),
            heads: certificates.len() * self.first_steps(),
            dense_heads: self.dense_heads,
        }))
    }
}
