//! Exact attention over paged f16 and bf16 caches: what the system `dense` is, and what others fall back to.
//!
//! ```
//! use half::f16;
//! use host::attention::{BlockTable, PagedPool};
//! use host::attention::dense::{Plan, Problem};
//! use host::{Buffer, Device, Stream};
//! use simt::emu::EmuOptions;
//!
//! let device = Device::cpu(EmuOptions::default());
//! let stream = Stream::new(&device)?;
//! // Two sequences of up to 40 tokens, four query heads on one KV head of 64 elements.
//! let problem =
//!     Problem { sequences: 2, q_heads: 4, kv_heads: 1, head_dim: 64, query_tokens: 1, max_tokens: 40 };
//! let mut plan = Plan::<f16>::new(&device, problem)?;
//!
//! let number = |i: usize, step: f32| f16::from_f32((i as f32 * step).sin());
//! let numbers = |n: usize, step: f32| (0..n).map(|i| number(i, step)).collect::<Vec<_>>();
//! let (keys, values) = (numbers(5 * 16 * 64, 0.37), numbers(5 * 16 * 64, 0.73));
//! let pool = PagedPool::from_slices(&device, 1, 64, &keys, &values)?;
//! let mut table = BlockTable::new(&device, 2, problem.max_blocks(), pool.blocks())?;
//! table.set(0, &[3, 1, 0], 37)?;
//! table.set(1, &[4], 16)?;
//!
//! let queries = Buffer::from_slice(&device, &numbers(2 * 4 * 64, 0.11))?;
//! let mut out = plan.allocate()?;
//! plan.run(&stream, &queries, &pool, &table, &mut out)?;
//! assert!(out.output.to_vec()?.iter().all(|x| x.abs() <= 1.0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod append;
pub mod bound;
pub mod cpu;
mod plan;
mod problem;
pub mod sample;

pub use append::{AppendElement, AppendHandles, append};
pub use plan::{Attended, DenseElement, Handles, Plan};
pub use problem::{HEAD_DIMS, MAX_GROUP, Problem};

use crate::attention;

/// A result with this system's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What dense attention reports.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A buffer, a launch or a copy failed.
    #[error(transparent)]
    Device(#[from] crate::Error),
    /// A paged cache is wrong.
    #[error(transparent)]
    Cache(#[from] attention::Error),
    /// An extent that is 0.
    #[error("{what} is 0; give the problem at least one")]
    Empty {
        /// Which.
        what: &'static str,
    },
    /// A head_dim that no kernel has an instance for.
    #[error("there is no kernel for head_dim {head_dim}; there are 64, 96, 128 and 256")]
    HeadDim {
        /// What was asked for.
        head_dim: u32,
    },
    /// Query heads that do not divide among the KV heads.
    #[error("{q_heads} query heads are no multiple of {kv_heads} KV heads; each KV head needs as many")]
    Heads {
        /// Query heads.
        q_heads: u32,
        /// KV heads.
        kv_heads: u32,
    },
    /// Too many query heads on a KV head.
    #[error("{group} query heads on a KV head are too many; up to {MAX_GROUP} are possible")]
    Group {
        /// Query heads of a KV head.
        group: u32,
    },
    /// An extent that a launch or 32 bits cannot number.
    #[error("{what} of {value} is too large: {limit} is the most; split the batch")]
    TooLarge {
        /// Which.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The largest that works.
        limit: u64,
    },
    /// A buffer that does not hold what the problem needs.
    #[error("{what} has {got} elements, this problem needs {expected}; make it for the plan")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Elements it has.
        got: usize,
        /// Elements it needs.
        expected: usize,
    },
    /// A cache of other extents than the plan's.
    #[error("{what} is {got}, the plan's is {expected}; make plan and cache for the same problem")]
    Mismatch {
        /// Which extent of what.
        what: &'static str,
        /// What it is.
        got: u32,
        /// What it should be.
        expected: u32,
    },
}
