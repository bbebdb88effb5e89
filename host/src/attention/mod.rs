//! What every attention system shares: paged caches, rotation, exact attention, and the formula in f64 that
//! each is judged by.

pub(crate) mod blocks;
pub(crate) mod cpu;
pub mod dense;
pub mod inputs;
pub mod oracle;
mod pool;
mod problem;
pub mod rope;
mod table;

pub use kernels_gpu::attention::{BLOCK_TOKENS, Half};
pub use pool::{PagedPool, page};
pub use problem::StepProblem;
pub use table::BlockTable;

/// A result with the caches' [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What a paged cache reports.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A buffer or a copy failed.
    #[error(transparent)]
    Device(#[from] crate::Error),
    /// A pool whose blocks no kernel can number.
    #[error(
        "a pool of {blocks} blocks of {kv_heads} KV heads of {head_dim} elements is empty or too large; give it at \
         least one of each, and fewer than 2^32 blocks × KV heads"
    )]
    Pool {
        /// Blocks.
        blocks: u32,
        /// KV heads.
        kv_heads: u32,
        /// Elements of a row.
        head_dim: u32,
    },
    /// Contents that are not a whole number of blocks, or keys and values of different sizes.
    #[error("{keys} elements of keys and {values} of values are no pool: both must be a multiple of {block}")]
    PoolLength {
        /// Elements of the keys.
        keys: usize,
        /// Elements of the values.
        values: usize,
        /// Elements of a block.
        block: usize,
    },
    /// A table that no kernel can number.
    #[error("a table of {sequences} sequences of {max_blocks} blocks has no entry, or more than 2^32")]
    Table {
        /// Rows.
        sequences: u32,
        /// Entries of a row.
        max_blocks: u32,
    },
    /// A row that the table does not have.
    #[error("there is no sequence {sequence}: the table has {sequences}")]
    Sequence {
        /// The row asked for.
        sequence: u32,
        /// Rows.
        sequences: u32,
    },
    /// A block outside the pool.
    #[error("block {block} is not in the pool, which has {blocks}")]
    Block {
        /// The entry.
        block: u32,
        /// Blocks of the pool.
        blocks: u32,
    },
    /// More blocks than a row holds.
    #[error("{blocks} blocks do not fit a row of {max_blocks}; make the table for longer sequences")]
    RowLength {
        /// Blocks given.
        blocks: usize,
        /// Entries of a row.
        max_blocks: u32,
    },
    /// More tokens than the blocks hold.
    #[error("{length} tokens do not fit {blocks} blocks of {BLOCK_TOKENS}; give the sequence more blocks")]
    Tokens {
        /// Tokens.
        length: u32,
        /// Blocks given.
        blocks: usize,
    },
    /// Extents that cannot be rotated.
    #[error("{what} is {value}; {limit}")]
    Rotation {
        /// What was given.
        what: &'static str,
        /// Its value.
        value: usize,
        /// What it may be.
        limit: &'static str,
    },
}
