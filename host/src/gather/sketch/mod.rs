//! Blocks chosen by a sketch of every key, with a bound on what is left out: `gather:certified`.
//!
//! [`Sketches`] keep each key in 4 or 8 bits beside the pool, 32 tokens together. A step reads all of them
//! ([`Plan::scan_on`]): with what bounds their errors they say how much mass each gather-block has at most,
//! for every query head. Blocks with the most are kept, until what is left out is within the budget;
//! [`Plan::attend_on`] attends to these by the kernel of [`crate::attention::dense`], or to their codes by
//! the pass of [`crate::certified`], which certifies what codes add ([`Budget::codes`]); [`Plan::settle_on`]
//! judges every head, and attends again to all of the sequence for a head that is over its budget. So every
//! head's report has a bound on the mass it skipped and on its output's error.

mod cache;
mod cases;
mod cpu;
mod elements;
mod kept;
mod plan;
mod pool;
#[cfg(test)]
mod tests;
mod workload;

pub use cache::SketchedCache;
pub(super) use cache::{head_reports, needed_bytes};
pub(super) use cases::cases;
pub(super) use kept::OF_CODES;
pub use plan::{CodeHandles, Handles, Plan};
pub use pool::{SketchHandles, Sketches};
pub(super) use workload::open;

use super::{Error, FEW_HEAD_DIMS, Result, Support};
use crate::attention::StepProblem;
use crate::kv::Selection;

/// Bits that a key may be sketched in.
pub const BITS: [u32; 2] = [4, 8];

/// What its errors call it.
const WHAT: &str = "gather:certified";

/// A problem that there are kernels for.
fn checked(problem: StepProblem) -> Result<StepProblem> {
    super::bounds::checked(problem, WHAT, &FEW_HEAD_DIMS)
}

/// What a step keeps, and what it may leave out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// What is kept at least.
    pub support: Support,
    /// Bits of a sketched key: one of [`BITS`].
    pub bits: u32,
    /// The share of a head's mass that may be left out, above 0 and at most 1: with 1 the `k` best blocks are
    /// kept whatever they leave out.
    pub skip: f32,
    /// Whether what is kept is attended to by codes, keys of 8 bits and values of 4, in place of the
    /// originals: these are read for heads over their budget alone.
    pub codes: bool,
}

impl Budget {
    /// The default: at most 2 % of a head's mass, keys in 4 bits, blocks of 32 tokens.
    pub const CERTIFIED: Budget =
        Budget { support: Support { k: 32, block: 32, local: 4 }, bits: 4, skip: 0.02, codes: false };

    /// What a selection says.
    pub(super) fn of(selection: &Selection) -> Self {
        let own = Budget::CERTIFIED;
        Budget {
            support: Support::of_options(selection, own.support),
            bits: if selection.word("sketch", "4") == "8" { 8 } else { 4 },
            skip: selection.number("skip", f64::from(own.skip)) as f32,
            codes: super::tiles::asked(selection),
        }
    }

    /// Itself, if it can be launched.
    ///
    /// # Errors
    /// Those of [`Support::checked`]; [`Error::Bits`], [`Error::Share`].
    pub fn checked(self) -> Result<Self> {
        self.support.checked()?;
        if self.support.k == 0 {
            return Err(Error::Empty { what: "k" });
        }
        if !BITS.contains(&self.bits) {
            return Err(Error::Bits { bits: self.bits });
        }
        if !(self.skip > 0.0 && self.skip <= 1.0) {
            return Err(Error::Share { skip: self.skip });
        }
        Ok(self)
    }
}

/// Bytes that a step reads of a KV head at least: every sketch, keys and values of what is kept in any case.
pub(super) fn step_bytes(budget: Budget, head_dim: u32, tokens: u64) -> f64 {
    let kept = budget.support.kept(tokens.min(super::MOST_TOKENS.into()) as u32);
    let words = kernels_gpu::gather::sketch::sketch_words(head_dim, budget.bits);
    let sketch = f64::from(4 * words) / f64::from(kernels_gpu::gather::sketch::TILE_TOKENS);
    let token = if budget.codes { super::tiles::token_bytes(head_dim) } else { f64::from(4 * head_dim) };
    sketch * tokens as f64 + token * f64::from(kept)
}
