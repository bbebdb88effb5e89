//! Partial results and how they are put together.

use simt::math::exp2_nonpositive;
use simt::{Pod, Zeroable};

/// Reference and sum of one query row over some tokens; Σ p·v lies beside it.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct PartialRow {
    /// The integer to which the row's probabilities are relative, in log2 units.
    pub reference: f32,
    /// Σ 2^(s − reference).
    pub sum: f32,
}

impl PartialRow {
    /// No token.
    pub const EMPTY: PartialRow = PartialRow { reference: -1.0e30, sum: 0.0 };
}

/// What a part with its own `reference` counts for relative to `common`, the largest: a power of two, exactly.
#[inline(always)]
pub fn merge_weight(reference: f32, common: f32) -> f32 {
    exp2_nonpositive(reference - common)
}
