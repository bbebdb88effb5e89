//! Exact attention of a chunk: a plan of the dense system, or on the CPU its SIMD path.

use super::{Chunk, Result, Sequences};
use crate::attention::dense::{Handles, Plan};
use crate::{Buffer, Stream};
use half::f16;
use simt::GlobalMut;

/// A plan and what it writes besides the output.
#[derive(Debug)]
pub(crate) struct Exact {
    pub plan: Plan<f16>,
    lse: Buffer<f32>,
}

impl Exact {
    /// For chunks like this one.
    pub fn new(sequences: &Sequences, chunk: Chunk) -> Result<Self> {
        let plan = Plan::new(&sequences.device, sequences.problem_of(chunk))?;
        let rows = plan.problem().query_rows();
        Ok(Exact { plan, lse: Buffer::new(&sequences.device, rows)? })
    }

    /// The log-sums that nobody reads.
    pub fn lse(&mut self) -> GlobalMut<f32> {
        self.lse.global_mut()
    }

    /// One chunk in one layer; `simd`: on the CPU's own path in place of the kernels.
    ///
    /// # Safety
    /// As [`Plan::run_on`]; with `simd` the handles are host memory.
    pub unsafe fn run(&mut self, stream: &Stream, simd: bool, handles: Handles<f16>) -> Result<()> {
        // SAFETY: the caller's word.
        Ok(unsafe { self.plan.attend_on(stream, simd, handles) }?)
    }
}

/// The plan for a prompt's chunks: all but the last of a prompt are of one length.
#[derive(Debug, Default)]
pub(crate) struct Prompts(Option<Exact>);

impl Prompts {
    /// Makes ready for a chunk. For a step the plan that is there stays.
    pub fn ready(&mut self, sequences: &Sequences, chunk: Chunk) -> Result<()> {
        let Chunk::Prompt { tokens, .. } = chunk else { return Ok(()) };
        let planned = self.0.as_ref().map(|exact| exact.plan.problem().query_tokens as usize);
        if planned != Some(tokens) {
            // The old scratch goes before the new one comes.
            self.0 = None;
            self.0 = Some(Exact::new(sequences, chunk)?);
        }
        Ok(())
    }

    /// The plan for a chunk that was made ready for; `None` for a step.
    pub fn of(&mut self, chunk: Chunk) -> Option<&mut Exact> {
        self.0.as_mut().filter(|_| chunk != Chunk::Step)
    }
}
