//! A step over sequences whose originals are all in the GPU's memory: dense attention, with certificates.

use super::{AttendedHandles, StepElement, StepHandles, StepPlan, StepProblem};
use crate::attention::dense;
use crate::certified::{BLOCK_TOKENS, Error, Result};
use crate::{Buffer, Stream};
use kernels_gpu::certified::residents::THREADS;
use kernels_gpu::certified::{CacheShape, StepShape, vouch, vouch_layout};
use simt::{Global, LaunchShape};

/// What such steps have of their own.
pub(super) struct Residents<E: StepElement> {
    dense: dense::Plan<E>,
    /// Block i of sequence s is block `s · blocks + i` of the slots.
    table: Buffer<u32>,
}

impl<E: StepElement> StepPlan<E> {
    /// With steps over resident sequences, [`run_residents`](Self::run_residents), of up to so many tokens
    /// each; without for 0.
    ///
    /// # Errors
    /// [`Error::Residents`] for a policy whose steps carry no list or have no certificates; extents that
    /// `dense` does not take; out of memory.
    pub fn with_residents(mut self, tokens: u32) -> Result<Self> {
        self.residents = None;
        if tokens == 0 {
            return Ok(self);
        }
        if !self.policy.carries() || !self.policy.certify {
            return Err(Error::Residents { renew: self.policy.renew });
        }
        let blocks = tokens.div_ceil(BLOCK_TOKENS);
        let sequences = self.problem.sequences;
        let problem = dense::Problem { max_tokens: blocks * BLOCK_TOKENS, ..self.problem.dense() };
        let table: Vec<u32> = (0..sequences * blocks).collect();
        self.residents = Some(Residents {
            dense: dense::Plan::new(&self.device, problem)?,
            table: Buffer::from_slice(&self.device, &table)?,
        });
        Ok(self)
    }

    /// Tokens that a sequence may have in [`run_residents`](Self::run_residents); 0 without.
    pub fn resident_tokens(&self) -> u32 {
        self.residents.as_ref().map_or(0, |residents| residents.dense.problem().max_tokens)
    }

    /// A step over sequences whose originals are in slots besides where `cache` has them: keys and values,
    /// [sequences, blocks, kv_heads, 16, head_dim], the first of those of `cache.near`, as `resident` says.
    /// It has the bits of `dense` for sequences of up to [`resident_tokens`](Self::resident_tokens), counts
    /// as no step of a carried list, and leaves that as it is.
    ///
    /// # Safety
    /// As [`run`](Self::run); lengths are at most `resident_tokens`.
    ///
    /// # Errors
    /// [`Error::Residents`] without [residents](Self::with_residents); [`crate::Error::WrongDevice`]; what
    /// the launches report.
    pub unsafe fn run_residents(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        [keys, values]: [Global<E>; 2],
        resident: CacheShape,
        out: AttendedHandles,
    ) -> Result<()> {
        stream.device().check_same(&self.device, "the plan")?;
        let Some(Residents { dense, table }) = &mut self.residents else {
            return Err(Error::Residents { renew: self.policy.renew });
        };
        self.on_slices = None;
        self.resident = true;
        self.mode = 0;
        let arguments = vouch::Args {
            queries: cache.queries,
            annotations: cache.annotations,
            table: cache.table,
            lengths: cache.lengths,
            near: cache.near.tiles.as_const(),
            certificates: out.certificates,
            shape: StepShape { dense_splits: dense.splits(), ..self.shape },
            cache: resident,
            scratch: cache.near.scratch,
        };
        let StepProblem { sequences, kv_heads, head_dim, .. } = self.problem;
        let grid = LaunchShape::new((1, kv_heads * self.shape.row_groups(), sequences), THREADS)
            .shared(vouch_layout(head_dim).bytes);
        // SAFETY: this function's contract.
        unsafe { stream.launch(&self.kernels.vouch, grid, arguments) }?;
        let handles = dense::Handles {
            queries: cache.queries,
            keys,
            values,
            table: table.global(),
            lengths: cache.lengths,
            wanted: None,
            near: true,
            output: out.output,
            lse: out.lse,
        };
        // SAFETY: this function's contract; the table names the blocks of the slots.
        unsafe { dense.run_on(stream, handles) }?;
        Ok(())
    }
}
