//! What stands between a model and the cache of its keys and values.
//!
//! A model's step is the same for every scheme: [`begin`](KvCache::begin) with the number of new tokens, then for each layer
//! [`append`](KvCache::append) and [`attend`](KvCache::attend), then [`commit`](KvCache::commit). A scheme implements
//! [`KvCache`] and is named where the command chooses one.

mod dense;

pub use dense::DenseCache;

use crate::model::ModelConfig;
use crate::{Buffer, Stream, attention};
use half::f16;

/// A result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What a cache reports.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A paged pool or its table.
    #[error(transparent)]
    Pool(#[from] attention::Error),
    /// Dense attention.
    #[error(transparent)]
    Dense(#[from] crate::dense::Error),
    /// A buffer, a launch or a copy failed.
    #[error(transparent)]
    Device(#[from] crate::Error),
    /// Tokens that there is no room for.
    #[error(
        "{tokens} tokens more do not fit a cache that has {held} of {capacity}; make it for more tokens, or ask for fewer"
    )]
    Full {
        /// Tokens to come.
        tokens: usize,
        /// Tokens that are there.
        held: usize,
        /// Tokens that fit.
        capacity: usize,
    },
    /// A cache that cannot be numbered, or that the device's memory cannot hold.
    #[error(
        "a cache of {tokens} tokens takes {bytes} bytes, and {device} has {memory}; ask for fewer tokens"
    )]
    Memory {
        /// Tokens asked for.
        tokens: usize,
        /// Bytes that they take in all layers.
        bytes: u64,
        /// The device.
        device: String,
        /// Its memory in bytes.
        memory: u64,
    },
    /// A call outside its order, or for a layer that is not there.
    #[error("{what} is {value}; {limit}")]
    Order {
        /// What was given.
        what: &'static str,
        /// Its value.
        value: usize,
        /// What it may be.
        limit: &'static str,
    },
}

/// Heads and layers that a cache is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Transformer blocks.
    pub layers: usize,
    /// Query heads.
    pub q_heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
}

impl Geometry {
    /// Elements of one token's queries.
    pub fn query_width(self) -> usize {
        self.q_heads * self.head_dim
    }

    /// Elements of one token's keys, and of its values.
    pub fn kv_width(self) -> usize {
        self.kv_heads * self.head_dim
    }
}

impl From<&ModelConfig> for Geometry {
    fn from(config: &ModelConfig) -> Self {
        let &ModelConfig { layers, query_heads: q_heads, kv_heads, head_dim, .. } = config;
        Geometry { layers, q_heads, kv_heads, head_dim }
    }
}

/// Keys and values of one sequence, in all layers of a model, on a device.
///
/// Queries, keys and values come as f16, rotated; what attention gives is f32. Buffers may be longer than the chunk needs:
/// its tokens are the first rows.
pub trait KvCache: Send {
    /// What the scheme is called on the command line.
    fn scheme(&self) -> &'static str;

    /// Heads and layers that it is for.
    fn geometry(&self) -> Geometry;

    /// Tokens that are committed.
    fn tokens(&self) -> usize;

    /// Tokens that fit.
    fn capacity(&self) -> usize;

    /// Bytes that its committed tokens take, in all layers.
    fn bytes(&self) -> u64;

    /// Makes ready for a chunk of `tokens` that follow those committed. A chunk that was begun and not committed is
    /// forgotten.
    ///
    /// # Errors
    /// [`Error::Full`], before anything changes; what the device reports.
    fn begin(&mut self, stream: &Stream, tokens: usize) -> Result<()>;

    /// Adds the chunk's `keys` and `values`, each [tokens, kv_heads, head_dim], to a layer.
    ///
    /// # Errors
    /// [`Error::Order`]; buffers that are too short; what the device reports.
    fn append(
        &mut self,
        stream: &Stream,
        layer: usize,
        keys: &Buffer<f16>,
        values: &Buffer<f16>,
    ) -> Result<()>;

    /// Causal attention of the chunk's `queries` to `output`, both [tokens, q_heads, head_dim], in a layer that has its keys
    /// and values.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()>;

    /// The chunk is in all layers: from now on it counts.
    fn commit(&mut self);
}
