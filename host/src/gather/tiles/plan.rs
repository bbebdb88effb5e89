//! The two launches of a step over codes: choosing, and the pass over the tiles of what was chosen.

use super::super::{GatherElement, Handles, List, Plan, Ranking, Score, Support};
use crate::attention::StepProblem;
use crate::certified::{AttendedHandles, CacheElement, Certificate, Policy, StepHandles, StepPlan};
use crate::kv::Result;
use crate::{Buffer, Device, Stream};
use simt::{Global, GlobalMut};

/// An element that there are kernels for: f16 and bf16.
pub trait TiledElement: GatherElement + CacheElement {}

impl<E: GatherElement + CacheElement> TiledElement for E {}

/// A plan for a problem, with all its scratch.
pub struct TiledPlan<E: TiledElement> {
    select: Plan<E>,
    /// Each KV head of each sequence is a sequence of its own, of one KV head.
    step: StepPlan<E>,
    /// Which the pass over tiles leaves as they are.
    certificates: Buffer<Certificate>,
}

impl<E: TiledElement> TiledPlan<E> {
    /// The stages of a step, in order.
    pub const STAGES: &[&str] = &["select", "attend"];

    /// A plan: `max_tokens` is what a sequence may grow to. A list for each KV head, by bounds.
    ///
    /// # Errors
    /// Those of [`Plan::ranked`]; extents that the pass over tiles has no kernel for; out of memory.
    pub fn new(device: &Device, problem: StepProblem, support: Support, score: Score) -> Result<Self> {
        Self::with_policy(device, (problem, support, score), &Policy::BARE)
    }

    /// The same with certificates of the codes' error over what is kept, if the policy asks for them.
    pub(super) fn with_policy(
        device: &Device,
        (problem, support, score): (StepProblem, Support, Score),
        policy: &Policy,
    ) -> Result<Self> {
        let select = Plan::ranked(device, problem, support, Ranking { score, list: List::KvHead })?;
        let step = StepPlan::new(device, StepProblem::from(select.attended()), policy)?;
        let rows = problem.dense().query_rows();
        Ok(TiledPlan { select, step, certificates: Buffer::zeroed(device, rows)? })
    }

    /// How much it keeps.
    pub fn support(&self) -> Support {
        self.select.support()
    }

    /// What the last step chose.
    pub fn select(&self) -> &Plan<E> {
        &self.select
    }

    /// What is known of the codes' error, [sequences, q_heads], where the policy asks for it.
    pub(super) fn certificates(&self) -> &Buffer<Certificate> {
        &self.certificates
    }

    /// The first `stages` of a step over `cache`, with the bounds of its original keys. It allocates nothing,
    /// waits for nothing and can be captured.
    ///
    /// With `slices` on the CPU's own path in place of the kernels, which gives the same bits.
    ///
    /// # Safety
    /// As [`Plan::select_on`] for what is read to choose; as [`StepPlan::run`] for `cache`; and nothing else
    /// touches `output` [sequences, q_heads, head_dim] and `lse` [sequences, q_heads].
    ///
    /// # Errors
    /// As these.
    pub unsafe fn run(
        &mut self,
        stream: &Stream,
        slices: bool,
        (bounds, cache): (Global<u32>, &StepHandles<E>),
        (output, lse): (GlobalMut<f32>, GlobalMut<f32>),
        stages: usize,
    ) -> Result<()> {
        let StepHandles { queries, keys, values, table, lengths, .. } = *cache;
        let handles = Handles { queries, keys, values, bounds, table, lengths, output, lse };
        // SAFETY: this function's contract.
        unsafe { self.select.select_on(stream, slices, &handles) }?;
        if stages < Self::STAGES.len() {
            return Ok(());
        }
        let chosen = self.select.chosen();
        let cache = StepHandles { table: chosen.entries.global(), lengths: chosen.kept.global(), ..*cache };
        let out = AttendedHandles { output, lse, certificates: self.certificates.global_mut() };
        // SAFETY: what was chosen are blocks of the sequences, `block · kv_heads + head`: with one KV head a
        // sequence the same tiles, annotations, originals and fresh blocks lie where they are looked for. All
        // that is kept but the last block of 16 tokens is full, and so it is quantized. The rest is this
        // function's contract.
        unsafe {
            if slices {
                self.step.run_on_slices(&cache, out)?;
            } else {
                self.step.run(stream, &cache, out)?;
            }
        }
        Ok(())
    }
}

impl<E: TiledElement> std::fmt::Debug for TiledPlan<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TiledPlan").field("support", &self.support()).finish_non_exhaustive()
    }
}
