//! Pools of cache blocks.

use super::{BLOCK_TOKENS, Error, Half, Result};
use crate::{Buffer, Device, Stream};

/// Keys and values of many sequences in blocks of 16 tokens: two arrays [blocks, kv_heads, 16, head_dim].
///
/// Which block holds which tokens of which sequence is in a [`BlockTable`](super::BlockTable).
#[derive(Debug)]
pub struct PagedPool<E: Half> {
    keys: Buffer<E>,
    values: Buffer<E>,
    blocks: u32,
    kv_heads: u32,
    head_dim: u32,
}

impl<E: Half> PagedPool<E> {
    /// A pool whose contents are unspecified.
    ///
    /// # Errors
    /// [`Error::Pool`]; out of memory.
    pub fn new(device: &Device, blocks: u32, kv_heads: u32, head_dim: u32) -> Result<Self> {
        let refuse = || Error::Pool { blocks, kv_heads, head_dim };
        let tiles = blocks.checked_mul(kv_heads).filter(|tiles| *tiles != 0).ok_or_else(refuse)?;
        let tile = block_elements(1, head_dim).filter(|elements| *elements != 0).ok_or_else(refuse)?;
        let elements = tile.checked_mul(tiles as usize).ok_or_else(refuse)?;
        let (keys, values) = (Buffer::new(device, elements)?, Buffer::new(device, elements)?);
        Ok(PagedPool { keys, values, blocks, kv_heads, head_dim })
    }

    /// A pool that holds these keys and values, both [blocks, kv_heads, 16, head_dim].
    ///
    /// # Errors
    /// [`Error::PoolLength`] if they are not of one size, a whole number of blocks; as [`new`](Self::new).
    pub fn from_slices(
        device: &Device,
        kv_heads: u32,
        head_dim: u32,
        keys: &[E],
        values: &[E],
    ) -> Result<Self> {
        let refuse = || Error::Pool { blocks: 0, kv_heads, head_dim };
        let block = block_elements(kv_heads, head_dim).filter(|n| *n != 0).ok_or_else(refuse)?;
        if keys.len() != values.len() || !keys.len().is_multiple_of(block) {
            return Err(Error::PoolLength { keys: keys.len(), values: values.len(), block });
        }
        let blocks = u32::try_from(keys.len() / block).unwrap_or(u32::MAX);
        let mut pool = Self::new(device, blocks, kv_heads, head_dim)?;
        pool.keys.write(0, keys)?;
        pool.values.write(0, values)?;
        Ok(pool)
    }

    /// Where it is.
    pub fn device(&self) -> &Device {
        self.keys.device()
    }

    /// Blocks.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// KV heads.
    pub fn kv_heads(&self) -> u32 {
        self.kv_heads
    }

    /// Elements of a row.
    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// The keys.
    pub fn keys(&self) -> &Buffer<E> {
        &self.keys
    }

    /// The values.
    pub fn values(&self) -> &Buffer<E> {
        &self.values
    }

    /// Copies the keys and values of block `from` to block `to`. Waits for the stream.
    ///
    /// # Errors
    /// Blocks that the pool does not have; what the device reports.
    pub fn copy_block(&mut self, stream: &Stream, from: u32, to: u32) -> Result<()> {
        let elements = (BLOCK_TOKENS * self.kv_heads) as usize * self.head_dim as usize;
        let mut block = vec![E::from_f32(0.0); elements];
        for buffer in [&mut self.keys, &mut self.values] {
            stream.download(buffer, from as usize * elements, &mut block)?;
            stream.upload(&block, buffer, to as usize * elements)?;
        }
        Ok(())
    }

    /// Keys and values, to be written.
    pub fn both_mut(&mut self) -> (&mut Buffer<E>, &mut Buffer<E>) {
        (&mut self.keys, &mut self.values)
    }
}

/// Puts tokens' rows, [tokens, kv_heads, head_dim], into the blocks of a pool, [blocks, kv_heads, 16,
/// head_dim], that a sequence has in turn.
///
/// # Panics
/// If the sequence has too few blocks, or the pool does not have one of them.
pub fn page<E: Copy>(rows: &[E], [kv_heads, head_dim]: [usize; 2], blocks: &[u32], pool: &mut [E]) {
    const BLOCK: usize = BLOCK_TOKENS as usize;
    for (at, row) in rows.chunks_exact(head_dim).enumerate() {
        let (token, head) = (at / kv_heads, at % kv_heads);
        let tile = blocks[token / BLOCK] as usize * kv_heads + head;
        pool[(tile * BLOCK + token % BLOCK) * head_dim..][..head_dim].copy_from_slice(row);
    }
}

/// Elements of a block.
fn block_elements(kv_heads: u32, head_dim: u32) -> Option<usize> {
    (BLOCK_TOKENS as usize).checked_mul(kv_heads as usize)?.checked_mul(head_dim as usize)
}
