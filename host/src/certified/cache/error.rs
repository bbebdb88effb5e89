//! What a cache refuses.

use super::Extents;
use crate::certified::Layout;
use std::fmt;

/// What a [`TieredCache`](super::TieredCache) reports.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// Extents that are 0 or cannot be numbered.
    #[error("a cache of {extents} cannot be made: {problem}")]
    Extents {
        /// As asked for.
        extents: Extents,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// Every sequence that the cache may have is there.
    #[error("all {sequences} sequences of the cache are in use; free one, or make the cache for more")]
    NoSequence {
        /// Sequences of the cache.
        sequences: u32,
    },
    /// A sequence that has been freed, or is another cache's.
    #[error(
        "there is no sequence {sequence}: it was freed, or is another cache's; use one that start_sequence gave"
    )]
    UnknownSequence {
        /// Its row.
        sequence: u32,
    },
    /// Too few free blocks.
    #[error(
        "{wanted} more blocks of 16 tokens are needed, and {free} of {blocks} are free; free sequences, or make the cache larger"
    )]
    PoolExhausted {
        /// Blocks needed.
        wanted: usize,
        /// Blocks free.
        free: usize,
        /// Blocks of the cache.
        blocks: u32,
    },
    /// More tokens than a sequence may have.
    #[error(
        "sequence {sequence} would have {tokens} tokens, and the cache is for up to {most}; make it for longer ones"
    )]
    TooLong {
        /// Its row.
        sequence: u32,
        /// Tokens that it would have.
        tokens: u64,
        /// The most.
        most: u32,
    },
    /// A capture of an append for which no room was reserved.
    #[error("sequence {sequence} has no room for a token; reserve it before the capture")]
    NotReserved {
        /// Its row.
        sequence: u32,
    },
    /// A replay went on after the room that was reserved.
    #[error(
        "sequence {sequence} was at the {tokens} tokens reserved for it, and took no more; {}; reserve more, and append again",
        stopped_text(*.stopped)
    )]
    Full {
        /// Its row.
        sequence: u32,
        /// Tokens that it has.
        tokens: u32,
        /// Sequences that took no more tokens, this one included.
        stopped: usize,
    },
    /// A key or value that cannot be quantized.
    #[error("the {at} is {problem}; {}", stopped_text(*.stopped))]
    Refused {
        /// Where.
        at: Refused,
        /// What is wrong with it.
        problem: &'static str,
        /// Sequences that took neither this token nor later ones.
        stopped: usize,
    },
    /// A buffer of another size.
    #[error("{what} has {got} elements, expected {expected}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Elements it has.
        got: usize,
        /// What it should have.
        expected: String,
    },
    /// Sequences that are not resident, or cannot be.
    #[error(
        "sequences of {tokens} tokens cannot become resident in slots for {most} of each; begin with empty ones, \
         and make the cache with slots for a block of each sequence and KV head at least"
    )]
    Residence {
        /// Tokens of the longest sequence.
        tokens: u32,
        /// What the slots hold of each.
        most: u32,
    },
    /// A plan for caches that are stored in another way.
    #[error(
        "the plan is for the {} layout, and the cache is in the {} one; plan with the cache's",
        .plan.name(),
        .cache.name()
    )]
    Layout {
        /// The plan's.
        plan: Layout,
        /// The cache's.
        cache: Layout,
    },
    /// A plan for another cache.
    #[error("the plan's {what} is {plan}, and the cache's {cache}; plan for this cache")]
    Plan {
        /// Which extent.
        what: &'static str,
        /// The plan's.
        plan: u32,
        /// The cache's.
        cache: u32,
    },
}

fn stopped_text(stopped: usize) -> String {
    match stopped {
        0 => "the cache is as it was".to_string(),
        1 => "the sequence ends before it".to_string(),
        n => format!("{n} sequences end before such tokens"),
    }
}

/// An element that was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// `key` or `value`.
    pub what: &'static str,
    /// The sequence's row.
    pub sequence: u32,
    /// The token's place in the sequence.
    pub token: u32,
    /// The KV head.
    pub kv_head: u32,
    /// The channel.
    pub channel: u32,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refused { what, sequence, token, kv_head, channel } = self;
        write!(f, "{what} of sequence {sequence}, token {token}, KV head {kv_head}, channel {channel}")
    }
}
