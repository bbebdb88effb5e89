//! How a sequence's blocks are dealt out to the thread blocks that choose and replace.

use crate::attention::MAX_PARTS;
use simt::bits;

/// Neighbouring blocks that go to the same part: attention is often heavy over a stretch of a sequence, and
/// dealt out like this each part gets its share of it.
const RUN: u32 = 8;
/// Blocks of a part at most: 32 words of a bitmap, one for each lane of a warp.
pub const PART_BLOCKS: u32 = 1024;
/// Blocks of a sequence at most.
pub const MAX_BLOCKS: u32 = MAX_PARTS * PART_BLOCKS;

/// Parts for tables of `max_blocks` blocks, for `launches` rows of blocks: two thread blocks a multiprocessor
/// if that is sensible. Depends on shapes only, for the order in which blocks are chosen depends on it.
pub const fn part_count(launches: u32, max_blocks: u32) -> u32 {
    let least = max_blocks.div_ceil(PART_BLOCKS);
    let most = max_blocks.div_ceil(4 * RUN);
    let wanted = 256 / if launches == 0 { 1 } else { launches };
    // More are merged longer than they save.
    let wanted = if wanted < 16 { wanted } else { 16 };
    let wanted = if wanted < most { wanted } else { most };
    let parts = if wanted < least { least } else { wanted };
    if parts == 0 { 1 } else { parts }
}

/// Thread blocks a query row that weigh `parts` parts of each of `rows` query rows.
pub const fn weighing_blocks(rows: u32, parts: u32) -> u32 {
    let wanted = 264 / if rows == 0 { 1 } else { rows };
    let blocks = if wanted < parts { wanted } else { parts };
    if blocks == 0 { 1 } else { blocks }
}

/// The blocks of one part, in `places` numbered from 0.
#[derive(Clone, Copy)]
pub struct Part {
    /// Which of them.
    pub index: u32,
    /// Parts of the sequence.
    pub parts: u32,
    /// Blocks of the sequence.
    pub blocks: u32,
}

impl Part {
    /// Places, a multiple of eight: the last of them may be past the sequence's end.
    #[inline(always)]
    pub fn places(self) -> u32 {
        let runs = self.blocks.div_ceil(RUN);
        RUN * bits::div_u32(runs + self.parts - 1 - self.index, self.parts)
    }

    /// Parts that have any place; one even without a block, for there is somebody to finish.
    #[inline(always)]
    pub fn used(self) -> u32 {
        self.blocks.div_ceil(RUN).min(self.parts).max(1)
    }

    /// Words of a bitmap over them.
    #[inline(always)]
    pub fn words(self) -> u32 {
        self.places().div_ceil(32)
    }

    /// The block at a place.
    #[inline(always)]
    pub fn block(self, place: u32) -> u32 {
        (place / RUN * self.parts + self.index) * RUN + place % RUN
    }
}
