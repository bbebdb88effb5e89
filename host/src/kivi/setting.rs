//! How a cache stores.

use super::{Error, Result};
use crate::attention::StepProblem;
use crate::kv::Selection;
use kernels_gpu::attention::BLOCK_TOKENS;
use kernels_gpu::attention::dense::split_count;
use kernels_gpu::kivi::{Layout, MOST_GROUP, Shape};

/// Channels of a head that there are kernels for.
pub const HEAD_DIMS: [u32; 2] = [64, 128];
/// Bits of a code that there are kernels for.
pub(super) const BITS: [u32; 2] = [2, 4];
/// Groups that there are kernels for, where they divide a head.
pub(super) const GROUPS: [u32; 3] = [32, 64, MOST_GROUP];
/// The most tokens of a sequence.
const MOST_TOKENS: u32 = 1 << 30;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Bits of a key's code: 2 or 4.
    pub key_bits: u32,
    /// Bits of a value's code: 2 or 4.
    pub value_bits: u32,
    /// Tokens of a channel of keys, and channels of a value, that share a scale: 32, 64 or 128.
    pub group: u32,
    /// Tokens at the end that are read in f16 at least, a multiple of the group.
    pub residual: u32,
}

impl Setting {
    /// 2 bits, groups of 32, the last 128 tokens in f16.
    pub const DEFAULT: Setting = Setting { key_bits: 2, value_bits: 2, group: 32, residual: 128 };

    /// What a selection says.
    pub(super) fn of(selection: &Selection) -> Self {
        let number = |option, default: u32| selection.word(option, "").parse().unwrap_or(default);
        let default = Setting::DEFAULT;
        let key_bits = number("k", default.key_bits);
        Setting {
            key_bits,
            value_bits: number("v", key_bits),
            group: number("group", default.group),
            residual: selection.count("residual", default.residual.into()) as u32,
        }
    }

    /// Itself, if there are kernels for it.
    ///
    /// # Errors
    /// [`Error::Bits`], [`Error::Group`], [`Error::Residual`].
    pub fn checked(self) -> Result<Self> {
        let Setting { key_bits, value_bits, group, residual } = self;
        for (what, bits) in [("keys", key_bits), ("values", value_bits)] {
            if !BITS.contains(&bits) {
                return Err(Error::Bits { what, bits });
            }
        }
        let most = HEAD_DIMS[HEAD_DIMS.len() - 1];
        if !GROUPS.contains(&group) {
            return Err(Error::Group { group, head_dim: most });
        }
        if !residual.is_multiple_of(group) {
            return Err(Error::Residual { residual, group });
        }
        Ok(self)
    }

    /// Where codes lie for heads of so many channels.
    pub fn layout(self, head_dim: u32) -> Layout {
        let Setting { key_bits, value_bits, group, .. } = self;
        Layout { head_dim, key_bits, value_bits, group }
    }

    /// Tokens of a sequence of `length` that a step reads from their codes: whole groups, but for those that
    /// the residual keeps.
    pub fn coded(self, length: u64) -> u64 {
        let (group, kept) = (u64::from(self.group), u64::from(self.residual / self.group));
        (length / group).saturating_sub(kept) * group
    }

    /// Bytes of a token's codes in a KV head, with their share of scales and zeros.
    pub fn token_bytes(self, head_dim: u32) -> f64 {
        f64::from(4 * self.layout(head_dim).group_words()) / f64::from(self.group)
    }

    /// Bytes that a step reads of a KV head of so many tokens.
    pub fn step_bytes(self, head_dim: u32, tokens: u64) -> f64 {
        let coded = self.coded(tokens);
        self.token_bytes(head_dim) * coded as f64 + f64::from(4 * head_dim) * (tokens - coded) as f64
    }

    /// What the kernels are told of a cache for such steps.
    pub(super) fn shape(self, problem: StepProblem) -> Shape {
        let queries = problem.q_heads / problem.kv_heads.max(1);
        let groups = problem.max_tokens.div_ceil(self.group).max(1);
        let launches = problem.sequences * problem.kv_heads * queries.div_ceil(8);
        Shape {
            queries,
            kv_heads: problem.kv_heads,
            groups,
            // A ring that holds all has no use for more.
            kept: (self.residual / self.group).min(groups),
            splits: split_count(launches, problem.max_tokens.div_ceil(BLOCK_TOKENS)),
            scale_log2: (problem.dense().scale() * std::f64::consts::LOG2_E) as f32,
            layout: self.layout(problem.head_dim),
        }
    }
}

/// The problem, if there are kernels for it and the setting, and it can be numbered.
pub(super) fn checked(problem: StepProblem, setting: Setting) -> Result<StepProblem> {
    problem.dense().checked()?;
    let (head_dim, group) = (problem.head_dim, setting.checked()?.group);
    if !HEAD_DIMS.contains(&head_dim) {
        return Err(Error::HeadDim { head_dim });
    }
    if !head_dim.is_multiple_of(group) {
        return Err(Error::Group { group, head_dim });
    }
    if problem.max_tokens > MOST_TOKENS {
        return Err(Error::TooLong { tokens: problem.max_tokens, most: MOST_TOKENS });
    }
    Ok(problem)
}
