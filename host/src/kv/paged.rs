//! Attention of one sequence over a paged pool: a table, a plan for steps and one for prompts.

use super::Result;
use super::exact::{Exact, Prompts};
use super::sequence::{Attending, Sequence};
use crate::attention::dense::Handles;
use crate::attention::{BlockTable, PagedPool};
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
        // SAFETY: buffers of this device, host memory on the CPU, long enough as just seen; the table's blocks are those of
        // the pool. Dropping a buffer waits for the device.
        unsafe { exact.run(stream, sequence.on_slices(stream), handles) }
    }
}
