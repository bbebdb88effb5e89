//! The extents of a problem, and what follows from them.

use super::{Error, Result};
use crate::attention::BLOCK_TOKENS;
use kernels_gpu::attention::dense::{DenseShape, split_count};

/// The head dimensions that there are kernels for.
pub const HEAD_DIMS: [u32; 4] = [64, 96, 128, 256];
/// The most query heads of a KV head.
pub const MAX_GROUP: u32 = 16;
/// Blocks of a grid along y and z.
const GRID_YZ: u64 = 65535;

/// What a plan is for. Query head h reads KV head h / (q_heads / kv_heads).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Sequences of the batch.
    pub sequences: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements of a row of queries, keys and values.
    pub head_dim: u32,
    /// Query tokens of each sequence: its last tokens.
    pub query_tokens: u32,
    /// The most tokens that a sequence will have. Lengths may grow up to it without a new plan.
    pub max_tokens: u32,
}

impl Problem {
    /// The problem, if there is a kernel for it and every index of it fits 32 bits.
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::HeadDim`], [`Error::Heads`], [`Error::Group`], [`Error::TooLarge`].
    pub fn checked(self) -> Result<Self> {
        let Problem { sequences, q_heads, kv_heads, head_dim, query_tokens, max_tokens } = self;
        let extents = [
            ("sequences", sequences),
            ("q_heads", q_heads),
            ("kv_heads", kv_heads),
            ("query_tokens", query_tokens),
            ("max_tokens", max_tokens),
        ];
        if let Some((what, _)) = extents.into_iter().find(|(_, extent)| *extent == 0) {
            return Err(Error::Empty { what });
        }
        if !HEAD_DIMS.contains(&head_dim) {
            return Err(Error::HeadDim { head_dim });
        }
        if !q_heads.is_multiple_of(kv_heads) {
            return Err(Error::Heads { q_heads, kv_heads });
        }
        let group = q_heads / kv_heads;
        if group > MAX_GROUP {
            return Err(Error::Group { group });
        }
        let wide = u64::from;
        let row_groups = (wide(group) * wide(query_tokens)).div_ceil(8);
        let most = wide(u32::MAX);
        let limits = [
            ("a number of sequences", wide(sequences), GRID_YZ),
            ("KV heads times groups of eight query rows", wide(kv_heads).saturating_mul(row_groups), GRID_YZ),
            ("max_tokens plus query_tokens", wide(max_tokens) + wide(query_tokens), most),
            ("sequences times blocks of a sequence", wide(sequences) * wide(self.max_blocks()), most),
            (
                "sequences times query tokens times query heads",
                (wide(sequences) * wide(query_tokens)).saturating_mul(wide(q_heads)),
                most,
            ),
        ];
        match limits.into_iter().find(|(_, value, limit)| value > limit) {
            Some((what, value, limit)) => Err(Error::TooLarge { what, value, limit }),
            None => Ok(self),
        }
    }

    /// Query heads of a KV head.
    pub fn group(self) -> u32 {
        self.q_heads / self.kv_heads.max(1)
    }

    /// Blocks of the longest sequence: entries of a row of the block table.
    pub fn max_blocks(self) -> u32 {
        self.max_tokens.div_ceil(BLOCK_TOKENS)
    }

    /// Rows of queries: one for each sequence, query token and query head.
    pub fn query_rows(self) -> usize {
        self.sequences as usize * self.query_tokens as usize * self.q_heads as usize
    }

    /// The softmax scale, 1 / √head_dim.
    pub fn scale(self) -> f64 {
        1.0 / f64::from(self.head_dim).sqrt()
    }

    /// What the kernels are told.
    pub(super) fn shape(self) -> DenseShape {
        let shape = DenseShape {
            group: self.group(),
            query_tokens: self.query_tokens,
            kv_heads: self.kv_heads,
            max_blocks: self.max_blocks(),
            splits: 1,
            few_splits: 1,
            scale_log2: (self.scale() * std::f64::consts::LOG2_E) as f32,
            pool_blocks: 0,
            rung: 0,
        };
        let launches = self.sequences * self.kv_heads * shape.row_groups();
        let splits = split_count(launches, shape.max_blocks);
        DenseShape { splits, few_splits: splits, ..shape }
    }
}
