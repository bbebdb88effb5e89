//! What decides which blocks are used from their originals, and when a head is computed exactly.

use glam::UVec4;
use simt::{GlobalMut, Pod, Zeroable, unroll};

/// Thresholds of the ladder, as the kernels want them. The host's policy explains them and has the presets.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Thresholds {
    /// τ: the share of the attention mass that promoted keys shall cover. 0 promotes none beyond `min_keys`.
    pub coverage: f32,
    /// K_min and K_max: blocks whose keys are promoted, at least and at most.
    pub min_keys: u32,
    /// See `min_keys`.
    pub max_keys: u32,
    /// The least share of the attention mass that a block beyond `min_keys` must have for its keys to be
    /// promoted.
    pub key_floor: f32,
    /// Rung 1: where the tail is heavier than this, K_max is `expanded_keys` instead.
    pub expand_tail: f32,
    /// See `expand_tail`.
    pub expanded_keys: u32,
    /// Rung 2: values are promoted until Σ ρ_b·η_b of the others is at most this share of ν, the largest norm
    /// of a value.
    pub value_tolerance: f32,
    /// The least share of ν that ρ_b·η_b of a block must be for its values to be promoted.
    pub value_floor: f32,
    /// Blocks whose values are promoted, at most.
    pub max_values: u32,
    /// Rung 3: a head whose bound is a larger share of its output's norm is computed from the originals.
    pub error_budget: f32,
    /// For how many renewals of a list a row of blocks with a head over budget is computed from the originals
    /// alone, at the most. 0: each step tries the quantized blocks.
    pub retry: u32,
    /// ln(4/δ), δ the probability with which the bound may fail: docs/certificate.md, "A bound that may
    /// fail". 0: it never may.
    pub log_odds: f32,
    /// √(2 (`log_odds` + ln 2N)), N the most tokens that a sequence may have: but for a quarter of δ no
    /// logit is off by more standard deviations.
    pub deviations: f32,
    /// log2 of the share of a head's mass, as the step before had it, from which on a token brings its block
    /// from the originals though no list has it. Infinite: none does.
    pub sight: f32,
    /// 1: a KV head's query heads use the promoted blocks of all of them.
    pub per_group: u32,
    /// 1: outputs come with a certificate, and what is over budget is computed exactly. 0: nothing is
    /// promoted, and nothing is known.
    pub certify: u32,
    /// 1: E_key is the paper's (15). 0: the least of (1b), (1c) and (1d).
    pub paper_bound: u32,
}

/// What is checked of the stored blocks after a step, or ahead of one that makes its list anew, as the
/// kernels want it.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Watch {
    /// r: so many of the heaviest promoted blocks shall have the same order by original keys as by quantized
    /// ones; 0: nobody asks.
    pub depth: u32,
    /// ε_guard, in nats: scores by quantized and by original keys may differ by Δ and this much. Infinite:
    /// nobody asks.
    pub guard: f32,
    /// Of 2^32: how likely a step that compares looks at a block that nobody has promoted.
    pub draw: u64,
}

impl Watch {
    /// Whether stored blocks are compared with their originals.
    #[inline(always)]
    pub fn compares(self) -> bool {
        self.guard < f32::INFINITY
    }
}

/// The rung that a head's output comes from.
pub mod rung {
    /// Quantized blocks and the trailing block alone.
    pub const QUANTIZED: u32 = 0;
    /// Some keys or values promoted.
    pub const PROMOTED: u32 = 1;
    /// The same, after K_max was raised.
    pub const EXPANDED: u32 = 2;
    /// Computed from the originals.
    pub const DENSE: u32 = 3;
    /// The same, with all heads of the sequence, because a stored block is not what it was.
    pub const LAYER: u32 = 4;
}

/// Why a head was computed from the originals: bits.
pub mod reason {
    /// The bound over its budget.
    pub const ERROR_BUDGET: u32 = 1;
    /// The head was not tried: an earlier step has found a head of the row of blocks over budget, or, where a
    /// bit of [`CANARY`] is set too, stored data of the sequence have changed.
    pub const EARLIER: u32 = 2;
    /// A query that is not finite.
    pub const QUERY_NOT_FINITE: u32 = 4;
    /// Scores beyond what the records hold.
    pub const SCORE_RANGE: u32 = 8;
    /// A bound that is not a number.
    pub const NO_BOUND: u32 = 16;
    /// The heaviest promoted blocks have another order by their original keys: (17).
    pub const RANKING: u32 = 32;
    /// A block whose keys are quantized may be among the heaviest: (18).
    pub const BOUNDARY: u32 = 64;
    /// A block's scores by quantized and by original keys differ by more than Δ allows.
    pub const KEY_CANARY: u32 = 128;
    /// A block's quantized and original values differ by more than η, or an original's norm is beyond ν.
    pub const VALUE_CANARY: u32 = 256;
    /// All of the sequence's originals are in the GPU's memory: nothing quantized was tried.
    pub const RESIDENT: u32 = 512;
    /// Those that tell of stored data that changed.
    pub const CANARY: u32 = KEY_CANARY | VALUE_CANARY;
}

/// What is known of one query head's output.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Certificate {
    /// Bounds the error by quantized keys, in the Euclidean norm of the output row.
    pub e_key: f32,
    /// Bounds the error by quantized values.
    pub e_val: f32,
    /// Bounds the rounding of the arithmetic.
    pub e_round: f32,
    /// Bounds the whole error, but for a probability that the policy states; no more than the sum of the
    /// three before it, and that sum where no probability is.
    pub likely: f32,
    /// The norm of the output that the head would have by its step, whatever the rung; 0 where there was no
    /// step, for [`reason::EARLIER`] and [`reason::RESIDENT`].
    pub norm: f32,
    /// The share of the mass that comes from quantized keys.
    pub tail_mass: f32,
    /// The largest Δ among quantized keys.
    pub delta: f32,
    /// Blocks whose keys were promoted for this head.
    pub promoted_keys: u32,
    /// Blocks whose values were.
    pub promoted_values: u32,
    /// [`rung`] in the low half, [`reason`] in the high one.
    pub rung_and_reason: u32,
    /// What the natural log-sum-exp that comes with the output may be off by, the rounding of its sum
    /// included and that of the logarithm not, but for a probability (docs/certificate.md, (8e)). Infinite
    /// where it is not that of a step of one pass.
    pub log_sum: f32,
    #[doc(hidden)]
    pub unused: u32,
}

impl Certificate {
    /// Nothing is known.
    pub const UNKNOWN: Certificate = Certificate {
        e_key: f32::INFINITY,
        e_val: f32::INFINITY,
        e_round: f32::INFINITY,
        likely: f32::INFINITY,
        norm: 0.0,
        tail_mass: 1.0,
        delta: f32::INFINITY,
        promoted_keys: 0,
        promoted_values: 0,
        rung_and_reason: rung::QUANTIZED,
        log_sum: f32::INFINITY,
        unused: 0,
    };

    /// Row `row`.
    #[simt::device]
    pub fn load(rows: GlobalMut<Certificate>, row: usize) -> Self {
        let words: [UVec4; 3] = [0, 1, 2].map(|i| rows.cast::<UVec4>().load(3 * row + i));
        bytemuck::cast(words)
    }

    /// Writes row `row`.
    #[simt::device]
    pub fn store(self, rows: GlobalMut<Certificate>, row: usize) {
        let words: [UVec4; 3] = bytemuck::cast(self);
        unroll!(for i in 0..3 {
            rows.cast::<UVec4>().store(3 * row + i, words[i]);
        });
    }

    /// The rung.
    pub const fn rung(self) -> u32 {
        self.rung_and_reason & 0xffff
    }

    /// Why it is that rung: bits of [`reason`].
    pub const fn reason(self) -> u32 {
        self.rung_and_reason >> 16
    }

    /// The bound on the whole error that never fails.
    pub fn bound(self) -> f32 {
        self.e_key + self.e_val + self.e_round
    }
}
