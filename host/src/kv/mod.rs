//! Ways to keep keys and values: the contracts that every scheme fulfils, and that belong to no system.
//!
//! | item | what it is |
//! | --- | --- |
//! | [`System`], [`Scheme`] | what a system declares; [`crate::SYSTEMS`] lists them all |
//! | [`Selection`] | a scheme with preset and options, as a command line names it |
//! | [`Opening`] | what a scheme is given to open a cache |
//! | [`KvCache`] | keys and values of a model's layers, of one sequence or several: append, attend, report |
//! | [`PagedCache`], [`Beside`] | such a cache with everything in f16, and what a scheme keeps beside that |
//! | [`Chunk`] | what is added at once: tokens of a prompt, or one of each sequence |
//! | [`StepReport`], [`Summary`], [`Traffic`] | what is known of steps: bounds, skips, originals |
//! | [`Workload`](workload::Workload) | one layer's decode step, for benchmarks and proofs |
//! | [`restored`] | what a scheme that quantizes makes of keys and values, apart from attention |
//! | [`calibration`] | files that a scheme makes once for a model, from a real run |
//! | [`proof`] | promises held against errors, head-step by head-step |
//!
//! What caches have in common is in `sequences`; exact attention over a paged pool, which most
//! of them need for prompts, in `paged` and `exact`.

mod cache;
pub mod calibration;
mod chunk;
mod error;
mod exact;
mod option;
mod paged;
mod paged_cache;
pub mod proof;
mod report;
pub mod restored;
mod scheme;
mod sequences;
mod system;
pub mod workload;

pub use cache::{KvCache, New, Raw, Rotated};
pub use chunk::{Chunk, PARKED};
pub use error::{Error, Result};
pub(crate) use exact::Prompts;
pub use option::{Kind, OptionSpec, Value};
pub(crate) use paged::{Elsewhere, Paged, Rows};
pub use paged_cache::{Appended, Beside, Forking, PagedCache, Step};
pub use report::{Audit, Audited, HeadReport, Source, StepReport, Summary, Traffic};
pub use restored::Restored;
pub use scheme::{Opening, Preset, Rope, Scheme, Selection};
pub(crate) use sequences::{Added, Attending, Sequences};
pub use system::System;

use half::f16;

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

/// What a cache has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Sequences, at least one.
    pub sequences: usize,
}

impl From<usize> for Capacity {
    /// One sequence of so many tokens.
    fn from(tokens: usize) -> Self {
        Capacity { tokens, sequences: 1 }
    }
}

/// What a cache is made for, and how far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held<'a> {
    /// Heads and layers.
    pub geometry: Geometry,
    /// What it has room for.
    pub capacity: Capacity,
    /// Tokens of each sequence that are committed, as many entries as there is room for; `None` where no
    /// sequence is.
    pub sequences: &'a [Option<usize>],
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
