//! The ways to compute attention that are measured: a row each.

use super::caches::Caches;
use crate::cli::failure::Failure;
use host::Stream;
use host::dense::{Attended, DenseElement, Plan};

/// Their names on the command line, in the order of the table.
pub const NAMES: [&str; 1] = ["dense"];

/// What a step has written.
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
pub trait Scheme<E: DenseElement> {
    /// Its name.
    fn name(&self) -> &'static str;

    /// Bytes of the cache that a step reads.
    fn cache_bytes(&self) -> u64;

    /// Puts a step over cache `set` into the stream: it may be captured.
    ///
    /// # Errors
    /// What the launches report.
    fn step(&mut self, stream: &Stream, caches: &Caches<E>, set: usize) -> Result<(), Failure>;

    /// Outputs and log-sums of the last step; waits for it.
    ///
    /// # Errors
    /// What the device reports.
    fn result(&self) -> Result<Output, Failure>;

    /// How many splits the bound on rounding is for; `None` if the scheme is not exact and is judged otherwise.
    fn splits(&self) -> Option<u32>;
}

/// The scheme of this name over these caches; `None` if it does not support their heads.
///
/// # Errors
/// Out of memory, or what the device reports.
pub fn open<'a, E: DenseElement>(
    name: &str,
    caches: &Caches<E>,
) -> Result<Option<Box<dyn Scheme<E> + 'a>>, Failure> {
    match name {
        "dense" => {
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
            Ok(Some(Box::new(Dense { plan, out, bytes: caches.subject.cache_bytes() })))
        }
        _ => Ok(None),
    }
}

struct Dense<E: DenseElement> {
    plan: Plan<E>,
    out: Attended,
    bytes: u64,
}

impl<E: DenseElement> Scheme<E> for Dense<E> {
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

    fn splits(&self) -> Option<u32> {
        Some(self.plan.splits())
    }
}
