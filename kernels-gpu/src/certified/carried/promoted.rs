//! What a step has promoted, what it leaves to the dense rung alone, and what a step does with lists.

use glam::{UVec2, UVec4};
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
    /// For how many renewals of the list the row's heads are still computed from the originals alone; 0: the
    /// next step tries the quantized blocks.
    pub exact_for: u16,
    /// 1: this step has computed them so, and looked at no quantized block.
    pub exact: u16,
}

/// Whether a step computes a row of blocks from the originals alone, and for how long.
#[derive(Clone, Copy)]
pub struct Turn {
    /// What it is from this step on, unless the step finds heads over budget.
    left: u32,
    /// Whether the step's verdict counts: it is the first one by a list, and there is one.
    judges: bool,
}

impl Turn {
    /// That of a step with these bits of [`mode`] for a row with this count, whose list is of a sequence with
    /// `made` full blocks.
    #[inline(always)]
    pub fn of(mode: u32, exact_for: u32, made: u32) -> Self {
        let left = if mode & mode::RENEWS != 0 { exact_for.saturating_sub(1) } else { exact_for };
        // A list that nobody has renewed says nothing of what a new one would do.
        Turn { left, judges: mode & mode::JUDGES != 0 && exact_for == 0 && made != 0 }
    }

    /// Whether the row is computed from the originals alone.
    #[inline(always)]
    pub fn is_exact(self) -> bool {
        self.left != 0
    }

    /// [`Promoted::exact_for`] behind the step, which may have found a head over budget.
    #[inline(always)]
    pub fn after(self, over_budget: bool, retry: u32) -> u32 {
        if self.judges && over_budget { retry } else { self.left }
    }
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

    /// Full blocks that a row's sequence had when its list was made, and the row's turn in a step with bits of
    /// [`mode`].
    #[simt::device]
    pub(super) fn turn(rows: Global<Promoted>, launch_row: u32, mode: u32) -> (u32, Turn) {
        let [_, _, made, exact] = rows.cast::<UVec4>().load(launch_row as usize).to_array();
        (made, Turn::of(mode, exact & 0xffff, made))
    }

    /// For how many renewals the row is exact still, and whether it was in this step.
    #[simt::device]
    pub(in super::super) fn exact(rows: Global<Promoted>, launch_row: u32) -> [u32; 2] {
        let word = rows.cast::<u32>().load(4 * launch_row as usize + 3);
        [word & 0xffff, word >> 16]
    }

    /// Notes what the step has promoted, and what [`exact`](Self::exact) says of it.
    #[simt::device]
    pub(super) fn note(
        rows: GlobalMut<Promoted>,
        launch_row: u32,
        [keys, values]: [u32; 2],
        exact: [u32; 2],
    ) {
        rows.cast::<UVec2>().store(2 * launch_row as usize, UVec2::new(keys, values));
        rows.cast::<u32>().store(4 * launch_row as usize + 3, exact[0] | exact[1] << 16);
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
    /// The step is the first by a new list: rows of blocks with a head over budget are left to the dense rung
    /// alone from the next step on.
    pub const JUDGES: u32 = 4;
}
