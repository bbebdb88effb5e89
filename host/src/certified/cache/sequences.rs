//! Sequences: started, given room, forked, freed.

use super::book::Growth;
use super::{Annotation, BLOCK_TOKENS, CacheElement, CacheError, Result, SequenceId, TieredCache};
use crate::Stream;
use simt::Zeroable;

impl<E: CacheElement> TieredCache<E> {
    /// An empty sequence. It has no block yet.
    ///
    /// # Errors
    /// [`CacheError::NoSequence`].
    pub fn start_sequence(&mut self) -> Result<SequenceId> {
        Ok(self.book.start()?)
    }

    /// Room for `tokens` more tokens of a sequence: the blocks are its own from then on. A graph that appends
    /// needs it, for it cannot ask. Waits for the stream.
    ///
    /// # Errors
    /// [`CacheError::UnknownSequence`], [`CacheError::TooLong`], [`CacheError::PoolExhausted`], and the cache
    /// is as it was; [`crate::Error::Capturing`].
    pub fn reserve(&mut self, stream: &Stream, sequence: SequenceId, tokens: u32) -> Result<()> {
        let row = self.row_of(sequence)?;
        self.refresh(stream)?;
        let growth = self.book.growth([(row, u64::from(tokens))].into_iter())?;
        self.grow(stream, &growth)
    }

    /// Room for `tokens` more tokens of every sequence that is not paused, or of none. Waits for the stream.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn reserve_all(&mut self, stream: &Stream, tokens: u32) -> Result<()> {
        self.refresh(stream)?;
        let growth = self.book.growth(self.book.active().map(|row| (row, u64::from(tokens))))?;
        self.grow(stream, &growth)
    }

    /// From now on appends pass the sequence by, until [`resume`](Self::resume). Waits for the stream.
    ///
    /// # Errors
    /// [`CacheError::UnknownSequence`]; [`crate::Error::Capturing`].
    pub fn pause(&mut self, stream: &Stream, sequence: SequenceId) -> Result<()> {
        self.set_paused(stream, sequence, true)
    }

    /// Appends go to the sequence again. Waits for the stream.
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    pub fn resume(&mut self, stream: &Stream, sequence: SequenceId) -> Result<()> {
        self.set_paused(stream, sequence, false)
    }

    fn set_paused(&mut self, stream: &Stream, sequence: SequenceId, paused: bool) -> Result<()> {
        let row = self.row_of(sequence)?;
        self.refresh(stream)?;
        self.book.row_mut(row).paused = paused;
        self.write_limit(stream, row)
    }

    /// A sequence with the same tokens. Full blocks are shared, the one that is being filled is copied.
    /// Sequences are [resident](Self::begin_residence) no more. Waits for the stream.
    ///
    /// # Errors
    /// [`CacheError::UnknownSequence`], [`CacheError::NoSequence`], [`CacheError::PoolExhausted`], and the
    /// cache is as it was; [`crate::Error::Capturing`].
    pub fn fork(&mut self, stream: &Stream, sequence: SequenceId) -> Result<SequenceId> {
        let source = self.row_of(sequence)?;
        self.refresh(stream)?;
        if self.is_resident() {
            // What is refused changes nothing.
            self.book.clone().fork(source)?;
            self.end_residence(stream)?;
        }
        let (fork, copy) = self.book.fork(source)?;
        if let Some((from, to)) = copy {
            let block = self.geometry().pool_elements(1);
            let (from, to) = (from as usize * block, to as usize * block);
            for kind in 0..2 {
                let fresh = self.fresh_elements(kind, fork.row);
                // The stream was waited for: nothing else is using the host's memory.
                let originals = if kind == 0 { &mut self.keys } else { &mut self.values };
                originals.copy_within(from..from + block, to);
                stream.upload(&originals[to..to + block], &mut self.near, fresh)?;
            }
        }
        self.write_table(stream, fork.row, 0)?;
        stream.upload(&[self.book.row(fork.row).length], &mut self.lengths, fork.row as usize)?;
        self.write_limit(stream, fork.row)?;
        Ok(fork)
    }

    /// Ends a sequence: blocks that no fork has are free again. Waits for the stream.
    ///
    /// # Errors
    /// [`CacheError::UnknownSequence`]; [`crate::Error::Capturing`].
    pub fn free(&mut self, stream: &Stream, sequence: SequenceId) -> Result<()> {
        let row = self.row_of(sequence)?;
        // Before anybody else may have the blocks.
        stream.upload(&[0], &mut self.limits, row as usize)?;
        stream.upload(&[0], &mut self.lengths, row as usize)?;
        self.book.free(row);
        Ok(())
    }

    /// Tokens of a sequence, as the device has it. Waits for the stream.
    ///
    /// # Errors
    /// [`CacheError::UnknownSequence`]; [`crate::Error::Capturing`].
    pub fn length(&self, stream: &Stream, sequence: SequenceId) -> Result<u32> {
        let row = self.row_of(sequence)?;
        let mut length = [0];
        stream.download(&self.lengths, row as usize, &mut length)?;
        Ok(length[0])
    }

    /// The original keys and values of a sequence, [tokens, kv_heads, head_dim]. Waits for the stream.
    ///
    /// # Errors
    /// As [`length`](Self::length).
    pub fn read(&self, stream: &Stream, sequence: SequenceId) -> Result<[Vec<E>; 2]> {
        let length = self.length(stream, sequence)?;
        let blocks = &self.book.row(sequence.row).blocks;
        let dim = self.geometry().head_dim() as usize;
        let mut rows = [Vec::new(), Vec::new()];
        for token in 0..length {
            let block = blocks[(token / BLOCK_TOKENS) as usize];
            for head in 0..self.shape.kv_heads {
                let at = self.geometry().layout().originals(block, self.shape.kv_heads, head)
                    + (token % BLOCK_TOKENS) as usize * dim;
                rows[0].extend_from_slice(&self.keys[at..at + dim]);
                rows[1].extend_from_slice(&self.values[at..at + dim]);
            }
        }
        Ok(rows)
    }

    /// The full blocks of a sequence in their quantized form: tiles and annotations of its KV heads. Waits
    /// for the device.
    ///
    /// # Errors
    /// As [`length`](Self::length).
    pub fn quantized(
        &self,
        stream: &Stream,
        sequence: SequenceId,
    ) -> Result<Vec<(Vec<u8>, Vec<Annotation>)>> {
        let length = self.length(stream, sequence)?;
        let blocks = &self.book.row(sequence.row).blocks[..(length / BLOCK_TOKENS) as usize];
        let (words, pairs) = (self.geometry().tile_bytes(1) / 4, self.geometry().pairs(1));
        let one = |block: &u32| {
            let mut tiles = vec![0u32; words];
            let mut annotations = vec![Annotation::zeroed(); pairs];
            self.tiles.read(*block as usize * words, &mut tiles)?;
            self.annotations.read(*block as usize * pairs, &mut annotations)?;
            Ok((bytemuck::cast_slice(&tiles).to_vec(), annotations))
        };
        blocks.iter().map(one).collect()
    }

    /// The row of a sequence that has not been freed.
    pub(super) fn row_of(&self, sequence: SequenceId) -> std::result::Result<u32, CacheError> {
        self.book.find(sequence)
    }

    /// Asks the device for lengths, and which sequences have stopped. Waits for the stream.
    pub(super) fn refresh(&mut self, stream: &Stream) -> Result<()> {
        stream.device().check_same(&self.device, "the cache")?;
        let mut lengths = vec![0; self.lengths.len()];
        let mut limits = lengths.clone();
        stream.download(&self.lengths, 0, &mut lengths)?;
        stream.download(&self.limits, 0, &mut limits)?;
        let expected: Vec<u32> = (0..lengths.len() as u32).map(|row| self.book.limit(row)).collect();
        for (index, row) in self.book.rows_mut().enumerate() {
            row.length = lengths[index];
            row.stopped |= expected[index] != 0 && limits[index] == 0;
        }
        Ok(())
    }

    /// Gives rows their blocks: in the table before the limit reaches them.
    pub(super) fn grow(&mut self, stream: &Stream, growth: &[Growth]) -> Result<()> {
        let before: Vec<usize> = growth.iter().map(|growth| self.book.row(growth.row).blocks.len()).collect();
        self.book.grow(growth);
        for (growth, before) in growth.iter().zip(before) {
            self.write_table(stream, growth.row, before)?;
            self.write_limit(stream, growth.row)?;
        }
        Ok(())
    }

    fn write_table(&mut self, stream: &Stream, row: u32, from: usize) -> Result<()> {
        let start = row as usize * self.shape.max_blocks as usize + from;
        Ok(stream.upload(&self.book.row(row).blocks[from..], &mut self.table, start)?)
    }

    pub(super) fn write_limit(&mut self, stream: &Stream, row: u32) -> Result<()> {
        let most = if self.is_resident() { self.resident_tokens() } else { u32::MAX };
        Ok(stream.upload(&[self.book.limit(row).min(most)], &mut self.limits, row as usize)?)
    }

    /// The element of the near pool at which a fresh block's keys (0) or values (1) start.
    pub(super) fn fresh_elements(&self, kind: u32, block: u32) -> usize {
        let tile = self.scratch.fresh_tile(kind, block * self.shape.kv_heads);
        tile as usize * self.geometry().layout().elements() as usize
    }
}
