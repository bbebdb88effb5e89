//! How a model's cache is made: what a GPU keeps of the originals.

use super::{BLOCK_TOKENS, Layout, Policy};
use crate::attention::dense::Problem;
use crate::{BackendKind, Device};

/// How a [`CertifiedCache`](super::CertifiedCache) is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// What is promoted, and when a head is computed from the originals.
    pub policy: Policy,
    /// The layout of the tiles.
    pub layout: Layout,
    /// Of the blocks of a layer, the share whose original keys, and values, a GPU keeps after use.
    pub scratch: f64,
    /// Tokens whose originals a GPU keeps at the least, if the cache is for one sequence and steps carry
    /// lists. As long as all that there are fit what it keeps, attention is computed from them: the sequence
    /// is [resident](super::TieredCache::begin_residence). 0: it never is.
    pub resident: u32,
    /// On the CPU the kernels and what a GPU keeps: for tests.
    #[doc(hidden)]
    pub as_on_a_gpu: bool,
}

impl Settings {
    /// Of the blocks, the share that is kept by default: with tiles and annotations 0.6 of the bytes of f16.
    /// More gains a hundredth of a long context's step (docs/experiments/062-what-a-gpu-keeps.md).
    pub const SCRATCH: f64 = 1.0 / 16.0;
    /// Tokens that are kept by default, as many as a sixteenth of 16,384: where a step by tiles takes two to
    /// four times that of `dense`.
    pub const RESIDENT: u32 = 1024;

    /// The defaults for a policy.
    pub const fn new(policy: Policy) -> Self {
        Settings {
            policy,
            layout: Layout::Compact,
            scratch: Settings::SCRATCH,
            resident: Settings::RESIDENT,
            as_on_a_gpu: false,
        }
    }

    /// Slots for keys, and as many for values, of a cache of so many blocks of each of `sequences`.
    pub(super) fn slots(&self, device: &Device, problem: Problem) -> u32 {
        // The CPU's originals are as near as everything else.
        if !self.policy.certify || device.kind() == BackendKind::Cpu && !self.as_on_a_gpu {
            return 0;
        }
        let blocks = problem.sequences * problem.max_blocks();
        let share = (f64::from(blocks) * f64::from(problem.kv_heads) * self.scratch).ceil() as u32;
        let resident =
            if self.has_residents(problem) { self.resident.div_ceil(BLOCK_TOKENS).min(blocks) } else { 0 };
        share.max(resident * problem.kv_heads)
    }

    /// Whether sequences may be resident. Not several: what each gets would depend on how long the others
    /// are.
    pub(super) fn has_residents(&self, problem: Problem) -> bool {
        self.resident > 0 && problem.sequences == 1 && self.policy.certify && self.policy.carries()
    }
}
