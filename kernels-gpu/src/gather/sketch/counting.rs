//! Masses and moments in whole numbers, by bins: what the kernel [`decide`](fn@super::decide) and the CPU's
//! path count by.
//!
//! # Mathematics
//! Ranks below a reference 2^r fall into 256 bins, an eighth of an octave each. A block's mass w for a head
//! is counted in units of 2^−V of its bin's upper edge, rounded up, and its moment likewise:
//!
//! ```text
//! w <= n·2^(edge − V + r)      n = ⌊w·2^(V − edge − r)⌋ + 1
//! w·ν <= n'·2^(edge − V + r)·ν_all      n' = ⌊w·2^(V − edge − r)·ν/ν_all·(1 + 2^−20)⌋ + 1
//! ```
//!
//! ν_all is the largest ν of the sequence. Sums of n and n' do not depend on their order, so that atomics may
//! make them. V is as large as a sum over all blocks fits a word: 18 for 4,096 of them.

use crate::attention::{PartialRow, ROWS};
use simt::math::{exp2, exp2_nonpositive, fma, log2, max, to_i32_floor};
use simt::{Pod, Zeroable, bits};

/// Bins of the histogram: a thread each.
pub const MASS_BINS: u32 = 256;
/// Bins of an octave.
pub const STEPS: u32 = 8;
/// Their number in f32.
const OCTAVE: f32 = STEPS as f32;
/// The share of the budget that the estimate may use.
pub const SHARE: f32 = 0.9;

/// Query heads that memory is laid out for: the group, rounded up to a multiple of eight.
#[inline(always)]
pub const fn heads_of(group: u32) -> u32 {
    group.next_multiple_of(ROWS)
}

/// Rows of bins of so many heads that memory is laid out for.
#[inline(always)]
pub const fn kinds_of(heads: u32) -> u32 {
    2 * heads + 2
}

/// What a query head does not attend to. `[sequences, kv_heads, heads]`.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Skipped {
    /// Its mass, at most, relative to 2^`level`.
    pub mass: f32,
    /// Σ mass · ν over its blocks, likewise.
    pub moment: f32,
    /// T_g as a logarithm to base two.
    pub level: f32,
    /// No value left out has a larger norm.
    pub nu_rest: f32,
}

/// What is known of a sequence and KV head. `[sequences, kv_heads]`.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Whole {
    /// No key of the sequence has a larger norm.
    pub kappa: f32,
    /// No value of the sequence has.
    pub nu: f32,
    /// Tokens left out.
    pub tokens: u32,
    /// 0.
    pub reserved: u32,
}

/// A bin's upper edge, as a logarithm relative to the reference; at most 0.
#[inline(always)]
pub fn edge(bin: u32) -> f32 {
    (bin as f32 - (MASS_BINS - 1) as f32) / OCTAVE
}

/// The bin of a rank `x` relative to the reference; [`MASS_BINS`] if it is not below it.
#[inline(always)]
pub fn bin_of(x: f32) -> u32 {
    if x < 0.0 {
        (to_i32_floor(x * OCTAVE) + MASS_BINS as i32).clamp(0, MASS_BINS as i32 - 1) as u32
    } else {
        MASS_BINS
    }
}

/// What is in a bin, and what is above it: [`bin_of`] without a bin.
#[derive(Clone, Copy)]
pub struct Edges {
    /// What is no less is in the bin or above it.
    low: f32,
    /// Likewise above it, unless nothing is.
    high: f32,
    topmost: bool,
}

impl Edges {
    /// Those of a bin, or of [`MASS_BINS`].
    #[inline(always)]
    pub fn of(bin: u32) -> Self {
        let low = if bin == 0 { f32::NEG_INFINITY } else { (bin as f32 - MASS_BINS as f32) / OCTAVE };
        Edges { low, high: edge(bin), topmost: bin == MASS_BINS }
    }

    /// Whether the bin of `x` is a higher one, and whether it is this one.
    #[inline(always)]
    pub fn place(self, x: f32) -> (bool, bool) {
        // NaN is below nothing.
        let (within, below) = (x < self.high, x < self.low);
        let above = !self.topmost && !within;
        (above, !above && !below)
    }
}

/// Units of a bin's upper edge: so many fit a word for each of `blocks`.
#[inline(always)]
pub fn units(blocks: u32) -> f32 {
    f32::from_bits((127 + blocks.leading_zeros().max(9) - 1).min(127 + 22) << 23)
}

/// A unit of a bin relative to the reference.
#[inline(always)]
pub fn unit_of(bin: u32, units: f32) -> f32 {
    step_of(bin) * octave_unit(bin / STEPS, units)
}

/// A bin's upper edge as a factor of its octave's.
#[inline(always)]
pub fn step_of(bin: u32) -> f32 {
    exp2_nonpositive(edge(MASS_BINS - STEPS + bin % STEPS))
}

/// A unit of the last bin of an octave, relative to the reference: a power of two.
#[inline(always)]
pub fn octave_unit(octave: u32, units: f32) -> f32 {
    // 2^(octave − 31), over another power of two.
    f32::from_bits(((127 + 96 + octave) << 23) - units.to_bits())
}

/// A mass and its moment in units of their bin. `x` is the mass's logarithm relative to the reference,
/// `ratio` what [`ratio_of`] gives. Nothing where there is no mass at all.
#[inline(always)]
pub fn in_units(x: f32, ratio: f32, bin: u32, units: f32) -> [u32; 2] {
    let weight = exp2_nonpositive(x - edge(bin)) * units;
    let counted = |weight: f32| if x > f32::NEG_INFINITY { to_i32_floor(weight) as u32 + 1 } else { 0 };
    [counted(weight), counted(weight * ratio)]
}

/// At least ν/ν_all, at most 1, where ν_all is a number above 0; else it does not matter.
#[inline(always)]
pub fn ratio_of(nu: f32, inverse: f32) -> f32 {
    simt::math::min(nu * inverse, 1.0)
}

/// What [`ratio_of`] multiplies by.
#[inline(always)]
pub fn inverse_of(nu_all: f32) -> f32 {
    // Three roundings. Of a norm below 2^−126 the quotient may be +∞: then 1 is the ratio.
    (1.0 + 1.0 / 1_048_576.0) / nu_all
}

/// A head's level from its total: a number in any case.
#[inline(always)]
pub fn level_of(total: PartialRow) -> f32 {
    let level = total.reference + log2(total.sum);
    if simt::math::abs(level) < 1.0e29 { level } else { 0.0 }
}

/// What masses relative to T_g are counted against, as a logarithm: the budget; where that is all of the
/// mass, something above every rank that is finite. `top`: no such rank is larger.
#[inline(always)]
pub fn reference_of(budget_log2: f32, top: f32) -> f32 {
    if budget_log2 < 0.0 { budget_log2 } else { top + 1.0 / 16.0 }
}

/// 2^`reference`, and more by what logarithms beyond 64 lose that are subtracted from each other near it.
#[inline(always)]
pub fn scale_of(reference: f32) -> f32 {
    exp2(fma(simt::math::abs(reference), 1.0 / 4_194_304.0, reference))
}

/// The largest rank that a head can give a block, `most` of [`Total`](super::Total) and its level given.
#[inline(always)]
pub fn top_of(top: f32, most: f32, level: f32) -> f32 {
    max(top, most - level)
}

/// How the distant blocks are dealt out to the thread blocks of [`decide`](fn@super::decide).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    /// Blocks of a share, a multiple of a warp's lanes.
    pub blocks: u32,
    /// Shares that have any; one even without.
    pub used: u32,
}

impl Shares {
    /// Those of so many blocks over so many thread blocks.
    #[inline(always)]
    pub fn of(distant: u32, parts: u32) -> Self {
        let blocks = bits::div_u32(distant + parts - 1, parts).next_multiple_of(32).max(32);
        Shares { blocks, used: bits::div_u32(distant + blocks - 1, blocks).max(1) }
    }
}
