//! What is added to a cache at once.

use super::{Error, Held, Result};

/// Where a row's token goes if no sequence is there: past the end of every sequence, also after 2^31 steps
/// that count it up.
pub const PARKED: u32 = 1 << 31;

/// Tokens that are added to a cache at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// Tokens of one sequence, row by row, behind those that it has.
    Prompt {
        /// Its number.
        sequence: usize,
        /// How many, at least one.
        tokens: usize,
    },
    /// A token of every sequence that is there: a step of decoding. Buffers have a row for each that there is
    /// room for, in the order of their numbers; rows without a sequence are passed over, and what attention
    /// gives for them is unspecified.
    Step,
}

impl Chunk {
    /// `tokens` of a cache of one sequence: one is a step, more are a prompt's.
    pub const fn of_one(tokens: usize) -> Self {
        match tokens {
            1 => Chunk::Step,
            _ => Chunk::Prompt { sequence: 0, tokens },
        }
    }

    /// Rows of buffers, of a cache with room for so many sequences.
    pub const fn rows(self, sequences: usize) -> usize {
        match self {
            Chunk::Prompt { tokens, .. } => tokens,
            Chunk::Step => sequences,
        }
    }
}

impl<'a> Held<'a> {
    /// Tokens of each sequence that is there.
    pub fn lengths(self) -> impl Iterator<Item = usize> + 'a {
        self.sequences.iter().flatten().copied()
    }

    /// Tokens of all sequences.
    pub fn tokens(self) -> usize {
        self.lengths().sum()
    }

    /// Tokens that the longest sequence of a chunk has when the chunk is in.
    pub fn longest_after(self, chunk: Chunk) -> usize {
        match chunk {
            Chunk::Prompt { sequence, tokens } => {
                self.sequences.get(sequence).copied().flatten().unwrap_or(0).saturating_add(tokens)
            }
            Chunk::Step => self.sequences.iter().flatten().max().map_or(0, |longest| longest + 1),
        }
    }

    /// Where the tokens of a chunk go, row by row.
    pub fn positions(self, chunk: Chunk) -> Vec<u32> {
        match chunk {
            Chunk::Prompt { sequence, tokens } => {
                let first = self.sequences.get(sequence).copied().flatten().unwrap_or(0);
                (first as u32..).take(tokens).collect()
            }
            Chunk::Step => {
                self.sequences.iter().map(|tokens| tokens.map_or(PARKED, |tokens| tokens as u32)).collect()
            }
        }
    }

    /// Whether there is room for a chunk.
    ///
    /// # Errors
    /// [`Error::NoSequence`], [`Error::Full`]; [`Error::Order`] for a prompt's chunk without tokens.
    pub fn room(self, chunk: Chunk) -> Result<()> {
        let capacity = self.capacity.tokens;
        let fits = |held: usize, tokens: usize| match tokens > capacity.saturating_sub(held) {
            true => Err(Error::Full { tokens, held, capacity }),
            false => Ok(()),
        };
        match chunk {
            Chunk::Prompt { tokens: 0, .. } => {
                let limit = "give at least one token";
                Err(Error::Order { what: "the chunk's number of tokens", value: 0, limit })
            }
            Chunk::Prompt { sequence, tokens } => {
                let held = self.sequences.get(sequence).copied().flatten();
                fits(held.ok_or(Error::NoSequence { sequence, sequences: self.sequences.len() })?, tokens)
            }
            Chunk::Step => self.sequences.iter().flatten().try_for_each(|held| fits(*held, 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{Capacity, Geometry};

    #[test]
    fn rows_without_a_sequence_are_parked_and_need_no_room() {
        let geometry = Geometry { layers: 1, q_heads: 1, kv_heads: 1, head_dim: 64 };
        let sequences = [Some(3), None, Some(0)];
        let held = Held { geometry, capacity: Capacity { tokens: 4, sequences: 3 }, sequences: &sequences };
        assert_eq!((held.tokens(), Chunk::Step.rows(3), held.longest_after(Chunk::Step)), (3, 3, 4));
        assert_eq!(held.longest_after(Chunk::Prompt { sequence: 2, tokens: 2 }), 2);
        assert_eq!(held.positions(Chunk::Step), [3, PARKED, 0]);
        assert_eq!(held.positions(Chunk::Prompt { sequence: 2, tokens: 2 }), [0, 1]);
        assert!(held.room(Chunk::Step).is_ok());
        let room = |sequence, tokens| held.room(Chunk::Prompt { sequence, tokens });
        assert!(room(0, 1).is_ok() && room(2, 4).is_ok());
        assert!(matches!(room(0, 2), Err(Error::Full { tokens: 2, held: 3, capacity: 4 })));
        assert!(matches!(room(1, 1), Err(Error::NoSequence { sequence: 1, sequences: 3 })));
        assert!(matches!(room(3, 1), Err(Error::NoSequence { .. })));
        assert!(matches!(room(0, 0), Err(Error::Order { .. })));
        let full = [Some(4), Some(1), None];
        assert!(matches!(
            Held { sequences: &full, ..held }.room(Chunk::Step),
            Err(Error::Full { held: 4, .. })
        ));
    }
}
