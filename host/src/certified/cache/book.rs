//! Who has which blocks: the host's side of the block table, without a device.

use super::{BLOCK_TOKENS, CacheError, SequenceId};
use crate::attention::blocks::Blocks;

/// One row of the table.
#[derive(Clone, Debug, Default)]
pub(super) struct Row {
    /// Of the sequence that has it, or had it last.
    generation: u32,
    live: bool,
    /// Takes no tokens because it was told so.
    pub paused: bool,
    /// Takes no tokens because one was refused.
    pub stopped: bool,
    /// Tokens, as far as the host knows.
    pub length: u32,
    /// Its blocks in order, reserved ones included.
    pub blocks: Vec<u32>,
}

/// Blocks that are to be added to a row.
#[derive(Debug, PartialEq)]
pub(super) struct Growth {
    pub row: u32,
    blocks: usize,
}

/// All rows and all blocks.
#[derive(Clone, Debug)]
pub(super) struct Book {
    rows: Vec<Row>,
    pool: Blocks,
    max_tokens: u32,
}

impl Book {
    pub fn new(sequences: u32, blocks: u32, max_tokens: u32) -> Self {
        Book { rows: vec![Row::default(); sequences as usize], pool: Blocks::new(blocks), max_tokens }
    }

    pub fn free_blocks(&self) -> usize {
        self.pool.free()
    }

    /// The rows of live sequences.
    pub fn live(&self) -> impl Iterator<Item = u32> + '_ {
        self.rows.iter().enumerate().filter(|(_, row)| row.live).map(|(index, _)| index as u32)
    }

    /// The live rows that take tokens.
    pub fn active(&self) -> impl Iterator<Item = u32> + '_ {
        self.live().filter(|row| !self.row(*row).paused && !self.row(*row).stopped)
    }

    pub fn row(&self, row: u32) -> &Row {
        &self.rows[row as usize]
    }

    pub fn row_mut(&mut self, row: u32) -> &mut Row {
        &mut self.rows[row as usize]
    }

    pub fn rows_mut(&mut self) -> impl Iterator<Item = &mut Row> {
        self.rows.iter_mut()
    }

    /// Tokens that a row's blocks hold, at most as many as a sequence may have.
    pub fn room(&self, row: u32) -> u32 {
        let blocks = self.row(row).blocks.len() as u64;
        (blocks * u64::from(BLOCK_TOKENS)).min(u64::from(self.max_tokens)) as u32
    }

    /// What the device has as the row's limit: 0 where no token is to be taken.
    pub fn limit(&self, row: u32) -> u32 {
        let Row { live, paused, stopped, .. } = *self.row(row);
        if live && !paused && !stopped { self.room(row) } else { 0 }
    }

    pub fn find(&self, sequence: SequenceId) -> Result<u32, CacheError> {
        match self.rows.get(sequence.row as usize) {
            Some(row) if row.live && row.generation == sequence.generation => Ok(sequence.row),
            _ => Err(CacheError::UnknownSequence { sequence: sequence.row }),
        }
    }

    /// An empty sequence in the first free row.
    pub fn start(&mut self) -> Result<SequenceId, CacheError> {
        let sequences = self.rows.len() as u32;
        let free = self.rows.iter_mut().enumerate().find(|(_, row)| !row.live);
        let (index, row) = free.ok_or(CacheError::NoSequence { sequences })?;
        let generation = row.generation.wrapping_add(1);
        *row = Row { generation, live: true, ..Row::default() };
        Ok(SequenceId { row: index as u32, generation })
    }

    /// What rows need to hold `more` tokens each beyond their lengths. Changes nothing.
    pub fn growth(&self, more: impl Iterator<Item = (u32, u64)>) -> Result<Vec<Growth>, CacheError> {
        let mut growth = Vec::new();
        for (row, more) in more {
            let tokens = u64::from(self.row(row).length).saturating_add(more);
            if tokens > u64::from(self.max_tokens) {
                return Err(CacheError::TooLong { sequence: row, tokens, most: self.max_tokens });
            }
            let blocks = tokens.div_ceil(u64::from(BLOCK_TOKENS)) as usize;
            let blocks = blocks.saturating_sub(self.row(row).blocks.len());
            if blocks != 0 {
                growth.push(Growth { row, blocks });
            }
        }
        self.enough(growth.iter().map(|growth| growth.blocks).sum())?;
        Ok(growth)
    }

    fn enough(&self, wanted: usize) -> Result<(), CacheError> {
        let free = self.free_blocks();
        let blocks = self.pool.count();
        if wanted <= free { Ok(()) } else { Err(CacheError::PoolExhausted { wanted, free, blocks }) }
    }

    /// Gives rows what [`growth`](Self::growth) has found.
    pub fn grow(&mut self, growth: &[Growth]) {
        for Growth { row, blocks } in growth {
            let taken = self.pool.take(*blocks);
            self.rows[*row as usize].blocks.extend(taken);
        }
    }

    /// A sequence that shares the full blocks of another, with a block of its own for what does not fill one:
    /// source and copy.
    pub fn fork(&mut self, row: u32) -> Result<(SequenceId, Option<(u32, u32)>), CacheError> {
        let Row { length, ref blocks, .. } = *self.row(row);
        let full = (length / BLOCK_TOKENS) as usize;
        let shared = blocks[..full].to_vec();
        let partial = (length % BLOCK_TOKENS != 0).then(|| blocks[full]);
        self.enough(partial.is_some() as usize)?;
        let sequence = self.start()?;
        self.pool.share(&shared);
        *self.row_mut(sequence.row) = Row { length, blocks: shared, ..self.row(sequence.row).clone() };
        let copy = partial.map(|source| {
            self.grow(&[Growth { row: sequence.row, blocks: 1 }]);
            (source, self.row(sequence.row).blocks[full])
        });
        Ok((sequence, copy))
    }

    /// Ends a sequence; blocks that no other has are free again.
    pub fn free(&mut self, row: u32) {
        let generation = self.row(row).generation;
        let row = std::mem::replace(self.row_mut(row), Row { generation, ..Row::default() });
        self.pool.give_back(row.blocks);
    }
}
