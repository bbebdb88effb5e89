//! What a step has promoted, and what a step does with lists.

use simt::{Global, GlobalMut, Pod, Zeroable};

/// What a step has promoted of a row of blocks, and when the list was made that the next one promotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Promoted {
    /// Tiles of keys.
    pub key_tiles: u32,
    /// Tiles of values.
    pub value_tiles: u32,
    /// Full blocks that the sequence had when the list was made.
    pub blocks: u32,
    #[doc(hidden)]
    pub unused: u32,
}

impl Promoted {
    /// Full blocks that a row's sequence had when its list was made.
    #[simt::device]
    pub(in super::super) fn blocks(rows: Global<Promoted>, launch_row: u32) -> u32 {
        rows.cast::<u32>().load(4 * launch_row as usize + 2)
    }

    /// Notes them.
    #[simt::device]
    pub(in super::super) fn note_blocks(rows: GlobalMut<Promoted>, launch_row: u32, blocks: u32) {
        rows.cast::<u32>().store(4 * launch_row as usize + 2, blocks);
    }
}

/// The first of the full blocks that a step promotes though no list has them: those that were filled since it
/// was made, the two newest of them at the most.
#[inline(always)]
pub fn first_recent(blocks: u32, when_made: u32) -> u32 {
    when_made.max(blocks.saturating_sub(2)).min(blocks)
}

/// What a step does with lists, as the launches are told: bits. Who launches counts the steps.
pub mod mode {
    /// There is a list, of an earlier step: its blocks are promoted.
    pub const LISTED: u32 = 1;
    /// Blocks are noted, and the next list made of them.
    pub const RENEWS: u32 = 2;
}
