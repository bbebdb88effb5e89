//! The ways to compute attention that are measured: a row each.

use super::caches::Caches;
use super::certified::{Step, quantized_bytes};
use super::report::{Certified, Part, Subject};
use crate::cli::failure::Failure;
use host::Stream;
use host::certified::CacheElement;
use host::dense::{Attended, Plan};

/// Their names on the command line, in the order of the table.
pub const NAMES: [&str; 3] = ["dense", "naive", "certified"];

/// How the certified scheme is run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The preset of its policy.
    pub policy: &'static str,
    /// Its originals are in page-locked host memory.
    pub cold: bool,
}

/// What a step has written.
#[derive(Clone, Debug)]
pub struct Output {
    /// [sequences, q_heads, head_dim].
    pub output: Vec<f32>,
    /// [sequences, q_heads].
    pub lse: Vec<f32>,
}

impl Output {
    /// Whether every bit is the same.
    pub fn same_bits(&self, other: &Output) -> bool {
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        bits(&self.output) == bits(&other.output) && bits(&self.lse) == bits(&other.lse)
    }
}

/// One way to compute the attention of all sequences.
pub trait Scheme<E: CacheElement> {
    /// Its name.
    fn name(&self) -> &'static str;

    /// Bytes of the cache that a step reads.
    fn cache_bytes(&self) -> u64;

    /// Puts a step over cache `set` into the stream: it may be captured.
    ///
    /// # Errors
    /// What the launches report.
    fn step(&mut self, stream: &Stream, caches: &Caches<E>, set: usize) -> Result<(), Failure>;

    /// How many calls a graph has that shall have `least` or more.
    fn calls(&self, least: usize) -> usize {
        least
    }

    /// Names of what a step consists of; empty if it is one launch.
    fn parts(&self) -> &'static [&'static str] {
        &[]
    }

    /// The same as [`step`](Self::step), up to the first `parts` of its parts.
    ///
    /// # Errors
    /// What the launches report.
    fn first_parts(
        &mut self,
        _parts: usize,
        stream: &Stream,
        caches: &Caches<E>,
        set: usize,
    ) -> Result<(), Failure> {
        self.step(stream, caches, set)
    }

    /// Outputs and log-sums of the last step; waits for it.
    ///
    /// # Errors
    /// What the device reports.
    fn result(&self) -> Result<Output, Failure>;

    /// The largest error of some rows as a part of its bound: above 1 it is wrong, and so is NaN.
    ///
    /// # Errors
    /// What the device reports.
    fn error_of_bound(&self, caches: &Caches<E>, result: &Output) -> Result<f64, Failure>;

    /// What the certificates of the last step say, and the times of its parts; `None` if it has none.
    ///
    /// # Errors
    /// What the device reports.
    fn certified(&self, _parts: Vec<Part>) -> Result<Option<Certified>, Failure> {
        Ok(None)
    }
}

/// Bytes of the cache that the scheme of this name reads at least.
pub fn least_bytes(name: &str, subject: Subject) -> u64 {
    if name == "dense" { subject.cache_bytes() } else { quantized_bytes(subject, name == "certified") }
}

/// The scheme of this name over these caches.
///
/// # Errors
/// Extents that it does not take; out of memory, or what the device reports.
pub fn open<E: CacheElement>(
    name: &str,
    caches: &Caches<E>,
    options: Options,
) -> Result<Box<dyn Scheme<E>>, Failure> {
    Ok(match name {
        "naive" => Box::new(Step::open("naive", caches, options)?),
        "certified" => Box::new(Step::open("certified", caches, options)?),
        _ => Box::new(Dense::open(caches)?),
    })
}

struct Dense<E: CacheElement> {
    plan: Plan<E>,
    out: Attended,
    bytes: u64,
}

impl<E: CacheElement> Dense<E> {
    fn open(caches: &Caches<E>) -> Result<Self, Failure> {
        let mut plan = Plan::new(&caches.device, caches.problem)?;
        let mut out = plan.allocate()?;
        // What no right result is.
        let stream = Stream::new(&caches.device)?;
        stream.fill_u8(&mut out.output, .., 0xff)?;
        stream.fill_u8(&mut out.lse, .., 0xff)?;
        stream.synchronize()?;
        let set = &caches.sets[0];
        // A first run outside any timing: the driver loads the kernel.
        plan.run(&stream, &set.queries, &set.pool, &caches.table, &mut out)?;
        stream.synchronize()?;
        Ok(Dense { plan, out, bytes: caches.subject.cache_bytes() })
    }
}

impl<E: CacheElement> Scheme<E> for Dense<E> {
    fn name(&self) -> &'static str {
        "dense"
    }

    fn cache_bytes(&self) -> u64 {
        self.bytes
    }

    fn step(&mut self, stream: &Stream, caches: &Caches<E>, set: usize) -> Result<(), Failure> {
        let set = &caches.sets[set];
        Ok(self.plan.run(stream, &set.queries, &set.pool, &caches.table, &mut self.out)?)
    }

    fn result(&self) -> Result<Output, Failure> {
        Ok(Output { output: self.out.output.to_vec()?, lse: self.out.lse.to_vec()? })
    }

    fn error_of_bound(&self, caches: &Caches<E>, result: &Output) -> Result<f64, Failure> {
        Ok(caches.compare(&result.output, &result.lse, self.plan.splits()))
    }
}
