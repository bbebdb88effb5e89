//! Which block holds which tokens.

use super::{BLOCK_TOKENS, Error, Result};
use crate::{Buffer, Device};

/// The block tables and lengths of a batch, on the device: blocks [sequences, max_blocks], lengths
/// \[sequences\].
///
/// What it holds is checked on the way in: every entry that a length reaches is a block of the pool. So
/// kernels may follow it.
#[derive(Debug)]
pub struct BlockTable {
    blocks: Buffer<u32>,
    lengths: Buffer<u32>,
    sequences: u32,
    max_blocks: u32,
    pool_blocks: u32,
}

impl BlockTable {
    /// A table of empty sequences, each of up to `max_blocks` blocks of a pool of `pool_blocks`.
    ///
    /// # Errors
    /// [`Error::Table`]; out of memory.
    pub fn new(device: &Device, sequences: u32, max_blocks: u32, pool_blocks: u32) -> Result<Self> {
        let entries = sequences.checked_mul(max_blocks).filter(|entries| *entries != 0);
        let entries = entries.ok_or(Error::Table { sequences, max_blocks })? as usize;
        Ok(BlockTable {
            blocks: Buffer::zeroed(device, entries)?,
            lengths: Buffer::zeroed(device, sequences as usize)?,
            sequences,
            max_blocks,
            pool_blocks,
        })
    }

    /// Sets a sequence's blocks, in order, and how many tokens they hold. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Sequence`], [`Error::RowLength`], [`Error::Block`], [`Error::Tokens`]: nothing is changed
    /// then; what the device reports.
    pub fn set(&mut self, sequence: u32, blocks: &[u32], length: u32) -> Result<()> {
        if sequence >= self.sequences {
            return Err(Error::Sequence { sequence, sequences: self.sequences });
        }
        if blocks.len() > self.max_blocks as usize {
            return Err(Error::RowLength { blocks: blocks.len(), max_blocks: self.max_blocks });
        }
        if let Some(block) = blocks.iter().find(|block| **block >= self.pool_blocks) {
            return Err(Error::Block { block: *block, blocks: self.pool_blocks });
        }
        if length.div_ceil(BLOCK_TOKENS) as usize > blocks.len() {
            return Err(Error::Tokens { length, blocks: blocks.len() });
        }
        // Whatever fails in between, a length never reaches an entry that is not set.
        self.lengths.write(sequence as usize, &[0])?;
        self.blocks.write(sequence as usize * self.max_blocks as usize, blocks)?;
        Ok(self.lengths.write(sequence as usize, &[length])?)
    }

    /// Where it is.
    pub fn device(&self) -> &Device {
        self.blocks.device()
    }

    /// Rows.
    pub fn sequences(&self) -> u32 {
        self.sequences
    }

    /// Entries of a row.
    pub fn max_blocks(&self) -> u32 {
        self.max_blocks
    }

    /// Blocks of the pool that the entries are of.
    pub fn pool_blocks(&self) -> u32 {
        self.pool_blocks
    }

    /// The entries.
    pub fn blocks(&self) -> &Buffer<u32> {
        &self.blocks
    }

    /// The lengths for a kernel that appends: it must not let one reach an entry that was not set.
    pub(crate) fn lengths_mut(&mut self) -> &mut Buffer<u32> {
        &mut self.lengths
    }

    /// Tokens of each sequence.
    pub fn lengths(&self) -> &Buffer<u32> {
        &self.lengths
    }
}
