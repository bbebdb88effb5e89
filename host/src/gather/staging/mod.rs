//! Keys and values in the host's memory, and on the GPU what steps read of them.
//!
//! | item | what it is |
//! |---|---|
//! | [`HostPool`] | keys and values of all tokens of a layer, page-locked |
//! | [`Staging`] | a layer's staging pool: blocks near the end, and those that were chosen last |
//! | [`Fetching`] | the launches between a choice and its attention |
//! | [`trace`] | what other pools would have made of the same lists |
//! | [`StagedCache`] | the scheme's cache |
//!
//! Which blocks are staged, and how the pool is laid out, is in `kernels_gpu::gather::place`. Attention over
//! the pool is that over the cache, with its bits: a block's numbers are the same wherever it lies.

mod cache;
mod cases;
mod cpu;
mod fetching;
mod host_pool;
pub mod trace;
mod workload;

pub use cache::StagedCache;
#[cfg(test)]
pub(super) use cases::Stepping;
pub(super) use cases::cases;
pub use fetching::{Fetching, Home, StagedStep};
pub use host_pool::HostPool;
pub(super) use workload::open;

use super::bounds::checked;
use super::{Error, FEW_HEAD_DIMS, GatherElement, Result, Support};
use crate::attention::{BLOCK_TOKENS, PagedPool, StepProblem};
use crate::kv::Traffic;
use crate::{Buffer, Device, Stream};
use kernels_gpu::gather::{MOST_SLOTS, Rule, StagingShape};
use simt::{Global, GlobalMut};

/// The extents of a staging pool with `slots` blocks of each sequence and KV head besides the local ones:
/// what sequences of the problem can never need is left out.
pub(super) fn shape(problem: StepProblem, support: Support, slots: u32) -> Result<StagingShape> {
    let problem = checked(problem, "gather/staging", &FEW_HEAD_DIMS)?;
    let blocks = problem.max_tokens.div_ceil(support.block);
    let local = support.local.min(blocks);
    let most = support.most(problem.max_tokens);
    let (least, useful) = (most - local, blocks - local);
    if slots < least || slots > MOST_SLOTS {
        return Err(Error::Staging { slots, least, most: MOST_SLOTS });
    }
    Ok(StagingShape {
        rule: Rule { local, ..support.rule() },
        kv_heads: problem.kv_heads,
        max_blocks: problem.max_tokens.div_ceil(BLOCK_TOKENS),
        most,
        slots: slots.min(useful),
        head_dim: problem.head_dim,
    })
}

/// Blocks of 16 tokens that a sequence has in the staging pool.
fn staged_blocks(shape: StagingShape) -> u64 {
    (u64::from(shape.rule.local) + u64::from(shape.slots)) * u64::from(shape.rule.entries())
}

/// Bytes of a layer's staging pools and directories, for so many sequences.
fn staged_bytes(shape: StagingShape, sequences: u32) -> u64 {
    let block = 4 * u64::from(BLOCK_TOKENS * shape.head_dim);
    let row = staged_blocks(shape).saturating_mul(block) + 4 * shape.words() as u64;
    u64::from(sequences * shape.kv_heads).saturating_mul(row)
}

/// The staging pool of a layer, and what is in it.
#[derive(Debug)]
pub struct Staging<E: GatherElement> {
    shape: StagingShape,
    sequences: u32,
    pool: PagedPool<E>,
    /// As `kernels_gpu::gather::place` has it.
    directory: Buffer<u32>,
    /// Far blocks that were there and that were not, of all steps and of the last: [sequences, kv_heads, 4].
    tally: Buffer<u64>,
}

impl<E: GatherElement> Staging<E> {
    /// An empty one, with `slots` blocks of each sequence and KV head besides the local ones.
    ///
    /// # Errors
    /// [`Error::HeadDim`]; [`Error::Staging`] if a step's list does not fit; those of [`Support::checked`];
    /// out of memory.
    pub fn new(device: &Device, problem: StepProblem, support: Support, slots: u32) -> Result<Self> {
        let shape = shape(problem, support.checked()?, slots)?;
        let blocks = u64::from(problem.sequences) * staged_blocks(shape);
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let pool = PagedPool::new(device, blocks, problem.kv_heads, problem.head_dim);
        let rows = problem.sequences as usize * problem.kv_heads as usize;
        Ok(Staging {
            shape,
            sequences: problem.sequences,
            pool: pool.map_err(crate::attention::dense::Error::from)?,
            directory: Buffer::from_slice(device, &empty(shape).repeat(rows))?,
            tally: Buffer::zeroed(device, 4 * rows)?,
        })
    }

    /// The pool: attention reads it by [`Fetching::table`], new tokens go to it by
    /// [`near_blocks`](Self::near_blocks).
    pub fn pool(&self) -> &PagedPool<E> {
        &self.pool
    }

    /// The pool, to be written.
    pub fn pool_mut(&mut self) -> &mut PagedPool<E> {
        &mut self.pool
    }

    /// The directory, as `kernels_gpu::gather::place` has it.
    pub fn directory(&self) -> &Buffer<u32> {
        &self.directory
    }

    /// Far blocks that were there and that were not, of all steps and of the last: [sequences, kv_heads, 4].
    pub fn tally(&self) -> &Buffer<u64> {
        &self.tally
    }

    /// Blocks of each sequence and KV head that it has room for besides the local ones.
    pub fn slots(&self) -> u32 {
        self.shape.slots
    }

    /// Bytes of the device's memory.
    pub fn bytes(&self) -> u64 {
        staged_bytes(self.shape, self.sequences)
    }

    /// Where a sequence's tokens are while they are near: its row of a block table over the pool.
    pub fn near_blocks(&self, sequence: u32) -> Vec<u32> {
        let entries = self.shape.rule.entries();
        let block = |index: u32| {
            let slot = self.shape.near_slot(index / entries);
            self.shape.entry(sequence, 0, slot, index % entries) / self.shape.kv_heads
        };
        (0..self.shape.max_blocks).map(block).collect()
    }

    /// The first token that is near in a sequence of `length` tokens.
    pub fn near_tokens(&self, length: u32) -> u32 {
        let Rule { block, local, .. } = self.shape.rule;
        length.div_ceil(block).saturating_sub(local) * block
    }

    /// Forgets the far blocks of a sequence. Waits for the stream.
    ///
    /// # Errors
    /// A sequence that there is not; what the device reports.
    pub fn forget(&mut self, stream: &Stream, sequence: usize) -> Result<()> {
        let words = empty(self.shape).repeat(self.shape.kv_heads as usize);
        Ok(stream.upload(&words, &mut self.directory, sequence * words.len())?)
    }

    /// What steps have used so far, and the last one alone; local blocks are not counted. Waits for the
    /// stream.
    ///
    /// # Errors
    /// What the device reports.
    pub fn traffic(&self, stream: &Stream) -> Result<[Traffic; 2]> {
        let mut words = vec![0; self.tally.len()];
        stream.download(&self.tally, 0, &mut words)?;
        // Tiles of 16 tokens, of keys and of values.
        let tiles = 2 * u64::from(self.shape.rule.entries());
        let tile = 2 * u64::from(BLOCK_TOKENS * self.shape.head_dim);
        Ok([0, 2].map(|from| {
            let sum = |i: usize| words.chunks_exact(4).map(|row| row[from + i]).sum::<u64>();
            let read = tiles * sum(1);
            Traffic { found: tiles * sum(0), read, read_bytes: read * tile }
        }))
    }
}

/// A directory with nothing in it.
fn empty(shape: StagingShape) -> Vec<u32> {
    let mut words = vec![u32::MAX; (shape.blocks() + shape.slots) as usize];
    words.extend(0..shape.slots);
    words
}

/// Elements as words: the kernels that move them do not look at them.
fn words<E: simt::Pod>(handle: Global<E>) -> Global<u32> {
    handle.cast()
}

/// The same to be written.
fn words_mut<E: simt::Pod>(handle: GlobalMut<E>) -> GlobalMut<u32> {
    handle.cast()
}
