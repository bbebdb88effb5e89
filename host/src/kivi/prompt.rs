//! What a prompt's chunk needs: the sequence so far as it is stored, in f16, and the chunk behind it.

use super::Result;
use crate::attention::dense::{AppendHandles, Problem, append};
use crate::attention::{BLOCK_TOKENS, PagedPool};
use crate::cpu::handles::{slice, slice_mut};
use crate::{Buffer, Device, Stream};
use half::f16;
use simt::{Global, GlobalMut};

/// Room for the longest prompt so far: one layer's, which all layers use in turn.
#[derive(Debug)]
pub(super) struct Room {
    pub pool: PagedPool<f16>,
    /// Block t is tile t, \[max_blocks\].
    pub table: Buffer<u32>,
    /// Which layer is in the pool.
    pub layer: Option<usize>,
}

impl Room {
    /// For sequences of up to `tokens` tokens, of heads as `problem` has them.
    pub fn new(device: &Device, problem: Problem, tokens: u32) -> Result<Self> {
        let blocks = tokens.div_ceil(BLOCK_TOKENS).max(1);
        let table: Vec<u32> = (0..problem.max_blocks()).collect();
        let pool = PagedPool::new(device, blocks, problem.kv_heads, problem.head_dim)
            .map_err(crate::attention::dense::Error::from)?;
        Ok(Room { pool, table: Buffer::from_slice(device, &table)?, layer: None })
    }

    /// Whether so many tokens fit.
    pub fn fits(&self, tokens: u32) -> bool {
        self.pool.blocks() * BLOCK_TOKENS >= tokens
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.pool.keys().bytes() + self.pool.values().bytes()
    }

    /// Puts a chunk's tokens behind those that are there, `before` of them.
    ///
    /// # Safety
    /// As [`append`]: the pool has room for the tokens; with `slices` the handles are host memory.
    pub unsafe fn append(
        &mut self,
        stream: &Stream,
        slices: bool,
        (problem, before): (Problem, u32),
        [new_keys, new_values]: [Global<f16>; 2],
        positions: Global<u32>,
        lengths: GlobalMut<u32>,
    ) -> Result<()> {
        let table = self.table.global();
        let (keys, values) = self.pool.both_mut();
        let (keys, values) = (keys.global_mut(), values.global_mut());
        if !slices {
            let handles = AppendHandles { new_keys, new_values, positions, table, lengths, keys, values };
            // SAFETY: the caller's word.
            return Ok(unsafe { append(stream, problem, handles) }?);
        }
        let (heads, dim, tile) =
            (problem.kv_heads as usize, problem.head_dim as usize, BLOCK_TOKENS as usize);
        for (new, pool) in [(new_keys, keys), (new_values, values)] {
            // SAFETY: the caller's word.
            let (new, pool) = unsafe { (slice(new), slice_mut(pool)) };
            for (row, new) in new.chunks_exact(dim).enumerate() {
                let (token, head) = (before as usize + row / heads, row % heads);
                let to = ((token / tile * heads + head) * tile + token % tile) * dim;
                pool[to..to + dim].copy_from_slice(new);
            }
        }
        Ok(())
    }
}
