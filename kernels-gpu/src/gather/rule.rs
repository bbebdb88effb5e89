//! What a step keeps, as far as it follows from the length alone.

use crate::attention::BLOCK_TOKENS;
use simt::{Pod, Zeroable, bits};

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Rule {
    /// Tokens of a gather-block: [`BLOCK_TOKENS`] times a power of two.
    pub block: u32,
    /// Blocks at the end that are always kept, at least one; the last one counts, full or not.
    pub local: u32,
    /// Distant blocks that are kept besides.
    pub k: u32,
}

impl Rule {
    /// Blocks of the cache's table that a gather-block has.
    #[inline(always)]
    pub const fn entries(self) -> u32 {
        self.block / BLOCK_TOKENS
    }

    /// log2 of these.
    #[inline(always)]
    pub const fn entries_log2(self) -> u32 {
        // Without the branch that a zero would need.
        (self.entries() - 1).count_ones()
    }

    /// Gather-blocks of so many tokens.
    #[inline(always)]
    pub fn blocks(self, tokens: u32) -> u32 {
        bits::div_u32(tokens + self.block - 1, self.block)
    }
}

/// A sequence's blocks by how they come to be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its tokens.
    pub length: u32,
    /// Its gather-blocks, the last maybe not full.
    pub blocks: u32,
    /// Where its local blocks begin. The distant ones are those from 1 to before this one.
    pub local: u32,
    /// Distant blocks that are kept.
    pub chosen: u32,
}

impl Extent {
    /// That of a sequence of `length` tokens, at most 2^31.
    #[inline(always)]
    pub fn of(length: u32, rule: Rule) -> Self {
        let blocks = rule.blocks(length);
        // Behind the sink, so that nothing is there twice.
        let local = blocks.saturating_sub(rule.local).max(1).min(blocks);
        let distant = local.saturating_sub(1);
        Extent { length, blocks, local, chosen: if rule.k < distant { rule.k } else { distant } }
    }

    /// Distant blocks.
    #[inline(always)]
    pub fn distant(self) -> u32 {
        self.local.saturating_sub(1)
    }

    /// Whether some distant blocks are not kept.
    #[inline(always)]
    pub fn ranked(self) -> bool {
        self.chosen < self.distant()
    }

    /// Blocks that must be ranked: all distant ones, or none where all of them are kept, or none of them is.
    #[inline(always)]
    pub fn ranked_blocks(self) -> u32 {
        if self.ranked() && self.chosen > 0 { self.distant() } else { 0 }
    }

    /// Blocks that are kept.
    #[inline(always)]
    pub fn kept_blocks(self) -> u32 {
        self.blocks - (self.distant() - self.chosen)
    }

    /// Tokens that are kept: what is left out are full blocks.
    #[inline(always)]
    pub fn kept(self, rule: Rule) -> u32 {
        self.length - (self.distant() - self.chosen) * rule.block
    }
}
