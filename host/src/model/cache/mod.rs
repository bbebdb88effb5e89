//! What stands between a model and the cache of its keys and values.
//!
//! A model's step is the same for every scheme: [`begin`](KvCache::begin) with the number of new tokens, then for each layer
//! [`append`](KvCache::append) and [`attend`](KvCache::attend), then [`commit`](KvCache::commit). A scheme implements
//! [`KvCache`] and has a name in [`Scheme`]. What any of them knows of its sequence, and the checks that go with it, are in
//! `sequence`; attention over a paged pool is in `paged`; exact attention of a prompt's chunks, over whatever memory, in `exact`.
//!
//! # Graphs
//! The launches of a step of one token can be captured once and replayed: `begin` and `commit` are the host's affair and
//! happen around each replay, `append` and `attend` put nothing but launches into the stream, and where the token goes they
//! find in the device's memory.

mod certified;
mod dense;
mod exact;
mod int8;
mod paged;
mod scheme;
mod sequence;
mod summary;

pub use certified::CertifiedCache;
pub use dense::DenseCache;
pub use int8::Int8Cache;
pub use scheme::Scheme;
pub use summary::Summary;

use crate::certified::{Certificate, Traffic};
use crate::model::kernels::Pairing;
use crate::model::{ModelConfig, linear};
use crate::{Buffer, Device, Stream, attention};
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
    /// Certified attention and its cache.
    #[error(transparent)]
    Certified(#[from] crate::certified::Error),
    /// A scheme that there is not.
    #[error("there is no KV scheme '{name}'; there is {names}")]
    Scheme {
        /// What was asked for.
        name: String,
        /// What there is.
        names: String,
    },
    /// Extents that cannot be rotated.
    #[error(transparent)]
    Rotation(#[from] linear::Error),
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

/// Queries, keys and values of a chunk as the product gives them.
#[derive(Clone, Copy, Debug)]
pub struct Unrotated<'a> {
    /// [tokens, (q_heads + 2·kv_heads)·head_dim].
    pub qkv: &'a Buffer<f32>,
    /// Where they belong in the sequence, \[tokens\]: the tokens that follow those committed.
    pub positions: &'a Buffer<u32>,
    /// Radians a position, [rotary / 2].
    pub frequencies: &'a Buffer<f32>,
    /// Which channels turn together.
    pub pairing: Pairing,
    /// Channels of a head that turn.
    pub rotary: u32,
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

    /// Bytes of a token in f16, in all layers.
    pub fn token_bytes(self) -> u64 {
        2 * size_of::<f16>() as u64 * self.layers as u64 * self.kv_width() as u64
    }
}

impl From<&ModelConfig> for Geometry {
    fn from(config: &ModelConfig) -> Self {
        let &ModelConfig { layers, query_heads: q_heads, kv_heads, head_dim, .. } = config;
        Geometry { layers, q_heads, kv_heads, head_dim }
    }
}

impl Error {
    /// Says so if a device can never hold `bytes`.
    fn if_too_large(device: &Device, tokens: usize, bytes: u64) -> Result<()> {
        match device.info().memory_bytes.filter(|memory| bytes > *memory) {
            Some(memory) => Err(Error::Memory { tokens, bytes, device: device.info().name.clone(), memory }),
            None => Ok(()),
        }
    }
}

/// Keys and values of one sequence, in all layers of a model, on a device.
///
/// Queries, keys and values come as f16, rotated; what attention gives is f32. Buffers may be longer than the chunk needs:
/// its tokens are the first rows. After an error of [`append`](Self::append), [`attend`](Self::attend) or
/// [`check`](Self::check) some layers may hold what others do not: the cache is not to be used further.
///
/// # Safety
/// The memory that appending and `attend` of one token name in a capture stays where it is as long as the cache is there,
/// whatever is called on it: replays of the graph use it.
pub unsafe trait KvCache: Send {
    /// What the scheme is called on the command line.
    fn scheme(&self) -> &'static str;

    /// Heads and layers that it is for.
    fn geometry(&self) -> Geometry;

    /// Tokens that are committed.
    fn tokens(&self) -> usize;

    /// Tokens that fit.
    fn capacity(&self) -> usize;

    /// Bytes that its committed tokens take in all layers, and what is set aside for using them: the device's memory.
    fn bytes(&self) -> u64;

    /// Bytes of keys and values that a step of decoding reads at least, in all layers.
    fn step_bytes(&self) -> u64;

    /// Bytes of the host's memory that they take beside.
    fn host_bytes(&self) -> u64 {
        0
    }

    /// What is known of the attention of the last token, [layers, q_heads]: nothing, if the scheme does not say or the last
    /// chunk had more than one token. Waits for the device.
    ///
    /// # Errors
    /// What the device reports.
    fn certificates(&self) -> Result<Vec<Certificate>> {
        Ok(Vec::new())
    }

    /// Tiles that steps have used from the originals so far, in all layers, and where they were found; `None` for a scheme that
    /// keeps none. Waits for the stream.
    ///
    /// # Errors
    /// What the device reports.
    fn traffic(&self, _: &Stream) -> Result<Option<Traffic>> {
        Ok(None)
    }

    /// Waits for the stream, and says whether everything that was appended is held.
    ///
    /// # Errors
    /// The first key or value that the scheme does not take; what the device reports.
    fn check(&mut self, _: &Stream) -> Result<()> {
        Ok(())
    }

    /// After how many steps of decoding what they launch is the same again. Where it is more than one, graphs of so many steps take
    /// turns, captured when a first step was launched.
    fn period(&self) -> usize {
        1
    }

    /// Makes ready for a chunk of `tokens` that follow those committed. A chunk that was begun, and of which nothing was
    /// appended, is forgotten. For one token nothing happens on the device.
    ///
    /// # Errors
    /// [`Error::Full`], before anything changes; what the device reports.
    fn begin(&mut self, stream: &Stream, tokens: usize) -> Result<()>;

    /// Adds the chunk's `keys` and `values`, each [tokens, kv_heads, head_dim], to a layer. `positions` \[tokens\] is where they
    /// belong in the sequence: the tokens that follow those committed.
    ///
    /// # Errors
    /// [`Error::Order`]; buffers that are too short; what the device reports.
    fn append(
        &mut self,
        stream: &Stream,
        layer: usize,
        positions: &Buffer<u32>,
        keys: &Buffer<f16>,
        values: &Buffer<f16>,
    ) -> Result<()>;

    /// [`append`](Self::append) of what is not rotated yet, with the rotation, in one launch: also writes the rotated `queries`
    /// [tokens, q_heads, head_dim]. `false`, and nothing is done, where the scheme has no such launch.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    fn rotate_and_append(
        &mut self,
        _stream: &Stream,
        _layer: usize,
        _new: Unrotated<'_>,
        _queries: &mut Buffer<f16>,
    ) -> Result<bool> {
        Ok(false)
    }

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
