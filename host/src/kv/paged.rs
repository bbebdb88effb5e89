//! Attention of one sequence over a paged pool: a table, a plan for steps and one for prompts.

use super::exact::{Exact, Prompts};
use super::sequence::{Attending, Sequence};
use super::{Geometry, Result, Rotated};
use crate::attention::dense::{AppendHandles, Handles, append};
use crate::attention::{BLOCK_TOKENS, BlockTable, PagedPool};
use crate::{Buffer, Stream};
use half::f16;

/// What attention needs besides the pool: [`Sequence::pool`], whose block i holds tokens 16·i to 16·i + 15.
#[derive(Debug)]
pub(crate) struct Paged {
    pub table: BlockTable,
    decode: Exact,
    prompts: Prompts,
}

impl Paged {
    /// For all that the sequence may hold.
    pub fn new(sequence: &Sequence) -> Result<Self> {
        let decode = Exact::new(sequence, 1)?;
        let blocks = decode.plan.problem().max_blocks();
        let mut table = BlockTable::new(&sequence.device, 1, blocks, blocks)?;
        table.set(0, &(0..blocks).collect::<Vec<_>>(), 0)?;
        Ok(Paged { table, decode, prompts: Prompts::default() })
    }

    /// Makes ready for a chunk of `tokens`: for one nothing has to be done.
    pub fn ready(&mut self, sequence: &Sequence, tokens: usize) -> Result<()> {
        self.prompts.ready(sequence, tokens)
    }

    /// Adds `tokens` tokens to a layer's `pool`, behind those that are committed.
    pub fn append(
        &mut self,
        stream: &Stream,
        sequence: &Sequence,
        pool: &mut PagedPool<f16>,
        new: Rotated<'_>,
        tokens: usize,
    ) -> Result<()> {
        sequence.check_appended(stream, new)?;
        let Rotated { positions, keys, values } = new;
        let (pool_keys, pool_values) = pool.both_mut();
        if sequence.on_slices(stream) {
            // Which gives the same, without an emulated launch.
            let Geometry { kv_heads, head_dim, .. } = sequence.geometry;
            let block_tokens = BLOCK_TOKENS as usize;
            for token in 0..tokens {
                let position = sequence.tokens + token;
                let (block, place) = (position / block_tokens, position % block_tokens);
                for head in 0..kv_heads {
                    let from = (token * kv_heads + head) * head_dim;
                    let to = ((block * kv_heads + head) * block_tokens + place) * head_dim;
                    stream.copy(keys, from..from + head_dim, pool_keys, to)?;
                    stream.copy(values, from..from + head_dim, pool_values, to)?;
                }
            }
            return Ok(self.table.lengths_mut().write(0, &[(sequence.tokens + tokens) as u32])?);
        }
        let elements = tokens * sequence.geometry.kv_width();
        let handles = AppendHandles {
            new_keys: keys.global_range(..elements)?,
            new_values: values.global_range(..elements)?,
            positions: positions.global_range(..tokens)?,
            table: self.table.blocks().global(),
            lengths: self.table.lengths_mut().global_mut(),
            keys: pool_keys.global_mut(),
            values: pool_values.global_mut(),
        };
        // SAFETY: buffers of this device, long enough as just seen; the table has all blocks of the pools,
        // and what is past it is left out. Equal positions would leave one token's row or the other's.
        // Dropping a buffer waits for the device.
        Ok(unsafe { append(stream, sequence.problem(tokens), handles) }?)
    }

    /// Causal attention of the chunk that was begun over `pool`, which is the sequence's.
    pub fn attend(
        &mut self,
        stream: &Stream,
        sequence: &Sequence,
        pool: &PagedPool<f16>,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let Attending { chunk, queries, output } = sequence.attending(stream, queries, output)?;
        let exact = self.prompts.of(chunk).unwrap_or(&mut self.decode);
        let handles = Handles {
            queries,
            keys: pool.keys().global(),
            values: pool.values().global(),
            table: self.table.blocks().global(),
            lengths: self.table.lengths().global(),
            wanted: None,
            near: true,
            output,
            lse: exact.lse(),
        };
        // SAFETY: buffers of this device, host memory on the CPU, long enough as just seen; the table's
        // blocks are those of the pool. Dropping a buffer waits for the device.
        unsafe { exact.run(stream, sequence.on_slices(stream), handles) }
    }
}
