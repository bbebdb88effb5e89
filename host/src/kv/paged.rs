//! Attention over a paged pool: a table, a plan for steps and one for prompts.

use super::exact::{Exact, Prompts};
use super::{Added, Attending, Chunk, Geometry, New, Raw, Result, Rotated, Sequences};
use crate::attention::blocks::Blocks;
use crate::attention::dense::{AppendHandles, Handles, append};
use crate::attention::rope::rotate_and_append;
use crate::attention::{BLOCK_TOKENS, BlockTable, PagedPool};
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::attention::rotation::rope_append;
use simt::{Global, GlobalMut};
use std::ops::Range;

/// What attention needs besides the pool, [`Sequences::pool`].
///
/// A sequence has all blocks that it may need from the start, for a graph that appends cannot ask for more;
/// full blocks of a fork are those of the sequence that it comes from.
#[derive(Debug)]
pub(crate) struct Paged {
    table: BlockTable,
    free: Blocks,
    /// The blocks of each sequence, in order: rows of the table.
    rows: Vec<Vec<u32>>,
    decode: Exact,
    prompts: Prompts,
}

/// What kernels are given of the table for a chunk: all rows for a step, one for a prompt.
pub(crate) struct Rows {
    /// [sequences, max_blocks].
    pub table: Global<u32>,
    /// \[sequences\].
    pub lengths: GlobalMut<u32>,
    /// Tokens of each sequence.
    pub tokens: u32,
}

/// Where the blocks of the sequences lie in a pool that has a table of its own, which does not change.
#[derive(Debug)]
pub(crate) struct Elsewhere {
    /// [sequences, max_blocks].
    table: Buffer<u32>,
    rows: Vec<Vec<u32>>,
}

impl Elsewhere {
    /// By the blocks of each sequence: as many for each.
    pub fn new(device: &Device, rows: Vec<Vec<u32>>) -> Result<Self> {
        Ok(Elsewhere { table: Buffer::from_slice(device, &rows.concat())?, rows })
    }

    /// The blocks of a sequence for a kernel.
    pub fn row(&self, sequence: usize) -> Result<Global<u32>> {
        let width = self.rows[sequence].len();
        Ok(self.table.global_range(sequence * width..(sequence + 1) * width)?)
    }
}

impl Paged {
    /// For all that the sequences may hold; the first is there.
    pub fn new(sequences: &Sequences) -> Result<Self> {
        let decode = Exact::new(sequences, Chunk::Step)?;
        let problem = decode.plan.problem();
        let (count, of_each) = (problem.sequences, problem.max_blocks());
        let mut paged = Paged {
            table: BlockTable::new(&sequences.device, count, of_each, count * of_each)?,
            free: Blocks::new(count * of_each),
            rows: vec![Vec::new(); count as usize],
            decode,
            prompts: Prompts::default(),
        };
        paged.enter(0, Vec::new(), 0)?;
        Ok(paged)
    }

    /// A sequence begins with `shared` blocks of another, and gets what it may need besides.
    fn enter(&mut self, sequence: usize, shared: Vec<u32>, tokens: usize) -> Result<()> {
        self.free.share(&shared);
        let mut row = shared;
        row.extend(self.free.take(self.table.max_blocks() as usize - row.len()));
        let set = self.table.set(sequence as u32, &row, tokens as u32);
        self.rows[sequence] = row;
        Ok(set?)
    }

    /// An empty sequence more: its number.
    pub fn join(&mut self, sequences: &mut Sequences) -> Result<usize> {
        let sequence = sequences.vacant()?;
        self.enter(sequence, Vec::new(), 0)?;
        sequences.enter(sequence, 0);
        Ok(sequence)
    }

    /// A sequence with the tokens of another: its number. The block that `source` is filling is copied in
    /// each of `pools`. Waits for the stream.
    pub fn fork<'a>(
        &mut self,
        stream: &Stream,
        sequences: &mut Sequences,
        source: usize,
        pools: impl Iterator<Item = &'a mut PagedPool<f16>>,
    ) -> Result<usize> {
        let (tokens, sequence) = (sequences.length(source)?, sequences.vacant()?);
        stream.synchronize()?;
        let full = tokens / BLOCK_TOKENS as usize;
        let shared = self.rows[source][..full].to_vec();
        self.enter(sequence, shared, tokens)?;
        if !tokens.is_multiple_of(BLOCK_TOKENS as usize) {
            let (from, to) = (self.rows[source][full], self.rows[sequence][full]);
            for pool in pools {
                pool.copy_block(stream, from, to)?;
            }
        }
        sequences.enter(sequence, tokens);
        Ok(sequence)
    }

    /// Forgets a sequence. Waits for the stream.
    pub fn leave(&mut self, stream: &Stream, sequences: &mut Sequences, sequence: usize) -> Result<()> {
        sequences.length(sequence)?;
        stream.synchronize()?;
        // In the table before others may have the blocks.
        self.table.set(sequence as u32, &[], 0)?;
        self.free.give_back(std::mem::take(&mut self.rows[sequence]));
        sequences.leave(sequence)
    }

    /// The blocks of a sequence, in order.
    pub fn blocks(&self, sequence: usize) -> &[u32] {
        &self.rows[sequence]
    }

    /// How far attention sees of a sequence.
    pub fn set_length(&mut self, sequence: usize, tokens: u32) -> Result<()> {
        Ok(self.table.lengths_mut().write(sequence, &[tokens])?)
    }

    /// Makes ready for a chunk: for a step nothing has to be done.
    pub fn ready(&mut self, sequences: &Sequences, chunk: Chunk) -> Result<()> {
        self.prompts.ready(sequences, chunk)
    }

    /// What of the table a chunk is about.
    pub fn rows(&mut self, chunk: Chunk) -> Result<Rows> {
        self.rows_in(chunk, None)
    }

    /// The same with the blocks of another table.
    pub fn rows_in(&mut self, chunk: Chunk, elsewhere: Option<&Elsewhere>) -> Result<Rows> {
        let all = self.rows.len();
        let (rows, tokens): (Range<usize>, usize) = match chunk {
            Chunk::Prompt { sequence, tokens } => (sequence..sequence + 1, tokens),
            Chunk::Step => (0..all, 1),
        };
        let width = self.table.max_blocks() as usize;
        let table = elsewhere.map_or(self.table.blocks(), |elsewhere| &elsewhere.table);
        Ok(Rows {
            table: table.global_range(rows.start * width..rows.end * width)?,
            lengths: self.table.lengths_mut().global_range_mut(rows)?,
            tokens: tokens as u32,
        })
    }

    /// Adds a chunk to a layer's `pool`, behind what is committed: what is not rotated yet with the rotation,
    /// in one launch.
    pub fn append(
        &mut self,
        stream: &Stream,
        sequences: &Sequences,
        pool: &mut PagedPool<f16>,
        new: New<'_>,
        chunk: Chunk,
    ) -> Result<()> {
        self.append_in(stream, sequences, (pool, None), new, chunk)
    }

    /// The same to a pool that has a table of its own.
    pub fn append_in(
        &mut self,
        stream: &Stream,
        sequences: &Sequences,
        (pool, elsewhere): (&mut PagedPool<f16>, Option<&Elsewhere>),
        new: New<'_>,
        chunk: Chunk,
    ) -> Result<()> {
        let new = match new {
            New::Raw(raw) if !sequences.on_slices(stream) => {
                return self.rotate_and_append(stream, sequences, (pool, elsewhere), raw, chunk);
            }
            new => new.rotated(stream, sequences.geometry, sequences.rows(chunk))?,
        };
        sequences.check_appended(stream, new)?;
        let Rotated { positions, keys, values } = new;
        let (pool_keys, pool_values) = pool.both_mut();
        if sequences.on_slices(stream) {
            // Which gives the same, without an emulated launch.
            let Geometry { kv_heads, head_dim, .. } = sequences.geometry;
            let block_tokens = BLOCK_TOKENS as usize;
            for Added { sequence, row, first, tokens } in sequences.added(chunk) {
                let blocks = &elsewhere.map_or(&self.rows, |elsewhere| &elsewhere.rows)[sequence];
                for token in 0..tokens {
                    let position = first + token;
                    let (index, place) = (position / block_tokens, position % block_tokens);
                    let block = blocks[index] as usize;
                    for head in 0..kv_heads {
                        let from = ((row + token) * kv_heads + head) * head_dim;
                        let to = ((block * kv_heads + head) * block_tokens + place) * head_dim;
                        stream.copy(keys, from..from + head_dim, pool_keys, to)?;
                        stream.copy(values, from..from + head_dim, pool_values, to)?;
                    }
                }
                self.set_length(sequence, (first + tokens) as u32)?;
            }
            return Ok(());
        }
        let rows = sequences.rows(chunk);
        let elements = rows * sequences.geometry.kv_width();
        let Rows { table, lengths, .. } = self.rows_in(chunk, elsewhere)?;
        let handles = AppendHandles {
            new_keys: keys.global_range(..elements)?,
            new_values: values.global_range(..elements)?,
            positions: positions.global_range(..rows)?,
            table,
            lengths,
            keys: pool_keys.global_mut(),
            values: pool_values.global_mut(),
        };
        // SAFETY: buffers of this device, long enough as just seen; a row of the table has all blocks of its
        // sequence, and what is past it is left out, as are rows without a sequence. Equal positions of one
        // sequence would leave one token's row or the other's. Dropping a buffer waits for the device.
        Ok(unsafe { append(stream, sequences.problem_of(chunk), handles) }?)
    }

    fn rotate_and_append(
        &mut self,
        stream: &Stream,
        sequences: &Sequences,
        (pool, elsewhere): (&mut PagedPool<f16>, Option<&Elsewhere>),
        new: Raw<'_>,
        chunk: Chunk,
    ) -> Result<()> {
        stream.device().check_same(&sequences.device, "the cache")?;
        new.check_device(stream)?;
        let (geometry, shape) = (sequences.geometry, new.shape(sequences.geometry));
        let (count, max_blocks) = (sequences.rows(chunk), self.table.max_blocks());
        let Rows { table, lengths, tokens } = self.rows_in(chunk, elsewhere)?;
        let width = geometry.query_width() + 2 * geometry.kv_width();
        let (keys, values) = pool.both_mut();
        let args = rope_append::Args {
            qkv: new.qkv.global_range(..count * width)?,
            positions: new.positions.global_range(..count)?,
            frequencies: new.frequencies.global_range(..new.rotary as usize / 2)?,
            queries: new.queries.global_range_mut(..count * geometry.query_width())?,
            table,
            lengths,
            keys: keys.global_mut(),
            values: values.global_mut(),
            shape,
            tokens,
            max_blocks,
        };
        // SAFETY: buffers of this device, long enough as just seen; a row of the table has all blocks of its
        // sequence, and what is past it is left out. Dropping a buffer waits for the device.
        Ok(unsafe { rotate_and_append(stream, new.pairing, args, count) }?)
    }

    /// Causal attention of the chunk that was begun over a layer's `pool`.
    pub fn attend(
        &mut self,
        stream: &Stream,
        sequences: &Sequences,
        pool: &PagedPool<f16>,
        attending: Attending,
    ) -> Result<()> {
        self.attend_in(stream, sequences, (pool, None), attending)
    }

    /// The same over a pool that has a table of its own.
    pub fn attend_in(
        &mut self,
        stream: &Stream,
        sequences: &Sequences,
        (pool, elsewhere): (&PagedPool<f16>, Option<&Elsewhere>),
        attending: Attending,
    ) -> Result<()> {
        let Attending { chunk, queries, output } = attending;
        let Rows { table, lengths, .. } = self.rows_in(chunk, elsewhere)?;
        let exact = self.prompts.of(chunk).unwrap_or(&mut self.decode);
        let handles = Handles {
            queries,
            keys: pool.keys().global(),
            values: pool.values().global(),
            table,
            lengths: lengths.as_const(),
            wanted: None,
            near: true,
            output,
            lse: exact.lse(),
        };
        // SAFETY: buffers of this device, host memory on the CPU, long enough as just seen; the table's
        // blocks are those of the pool. Dropping a buffer waits for the device.
        unsafe { exact.run(stream, sequences.on_slices(stream), handles) }
    }
}
