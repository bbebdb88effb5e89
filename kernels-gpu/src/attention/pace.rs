//! Keeping the warps of a launch together.
//!
//! Multiprocessors get unequal shares of the memory's bandwidth, always the same ones more, and a launch
//! takes as long as its slowest block: with equal work some end a twentieth before the others, and then who
//! is late cannot use the bandwidth that is left, as its arithmetic holds it back. So warps count what they
//! have done, and one that is ahead of the mean asks for its next tile a little later. Whoever pauses, what
//! is computed stays the same.

use super::ring::Ring;
use core::cell::Cell;
use simt::warp::{FULL_MASK, warp_shuffle_idx};
use simt::{GlobalMut, thread};

/// What a warp has to do, in the units that are counted.
const WHOLE: u32 = 1 << 16;
/// Tiles from count to count.
const EVERY: u32 = 8;
/// Eighths of what lies between two counts that a warp may be ahead of the mean: five are one tile, as the
/// mean's own counts are half an interval old.
const EIGHTHS: u32 = 5;
/// What a warp that is ahead waits for with each tile: at head_dim 128 a ninth of what a tile takes a warp at
/// full bandwidth.
const NANOSECONDS: u32 = 150;

/// A warp's part in it.
pub struct Pace {
    /// At `place` the sum over all warps; 0 before and after a launch.
    progress: GlobalMut<u32>,
    place: usize,
    /// Warps of the launch; 0: nobody counts, as not all of them run at once.
    warps: u32,
    /// What is counted at a time, and was so far.
    unit: u32,
    own: Cell<u32>,
    /// In lane 0: what the last count has found.
    seen: Cell<u32>,
    /// Tiles since then.
    tiles: Cell<u32>,
    ahead: Cell<bool>,
    lane: u32,
}

impl Pace {
    /// For a warp that has so many tiles; `counts` says whether the launch's blocks all run at once, and if
    /// they do every warp of every block comes to [`done`](Self::done) or is spoken for by
    /// [`none`](Self::none).
    #[inline(always)]
    pub fn new(progress: GlobalMut<u32>, place: u32, counts: bool, tiles: u32, lane: u32) -> Self {
        Pace {
            progress,
            place: place as usize,
            warps: if counts { all_warps() } else { 0 },
            unit: if tiles < EVERY { 0 } else { simt::bits::div_u32(WHOLE * EVERY, tiles) },
            own: Cell::new(0),
            seen: Cell::new(u32::MAX),
            tiles: Cell::new(0),
            ahead: Cell::new(false),
            lane,
        }
    }

    /// Comes with every tile, ahead of the next copy.
    #[simt::device]
    pub fn turn(&self) {
        if self.warps == 0 {
            return;
        }
        if self.ahead.get() {
            thread::pause(NANOSECONDS);
        }
        self.tiles.set(self.tiles.get() + 1);
        if self.tiles.get() == EVERY {
            self.tiles.set(0);
            // What it has found has come by now.
            let seen = warp_shuffle_idx(FULL_MASK, self.seen.get(), 0, 32);
            let own = self.own.get();
            self.ahead.set(own.saturating_sub(self.unit * EIGHTHS / 8) * self.warps > seen);
            self.own.set(own + self.unit);
            if self.lane == 0 {
                self.seen.set(self.progress.atomic_add(self.place, self.unit));
            }
        }
    }

    /// Counts what is left, when all tiles are done: whether the launch is then, in lane 0. It takes a while
    /// until that is known, so [`close`](Self::close) should come later.
    #[simt::device]
    pub fn done(&self) -> Done {
        let mut before = 0;
        let rest = WHOLE - self.own.get();
        if self.warps != 0 && self.lane == 0 {
            before = self.progress.atomic_add(self.place, rest);
        }
        Done { before, rest }
    }

    /// Makes the sum 0 for the next launch, if all have counted everything.
    #[simt::device]
    pub fn close(&self, done: Done) {
        if self.warps != 0 && self.lane == 0 && done.before + done.rest == self.warps * WHOLE {
            self.progress.atomic_exchange(self.place, 0);
        }
    }

    /// For all warps of a block that has nothing to do: one thread's work.
    #[simt::device]
    pub fn none(progress: GlobalMut<u32>, place: u32, counts: bool) {
        if counts && thread::thread_idx_x() == 0 {
            let own = thread::block_dim_x() / 32 * WHOLE;
            let before = progress.atomic_add(place as usize, own);
            if before + own == all_warps() * WHOLE {
                progress.atomic_exchange(place as usize, 0);
            }
        }
    }
}

/// What a warp's last count has found.
#[derive(Clone, Copy)]
pub struct Done {
    before: u32,
    rest: u32,
}

/// Warps of the launch.
#[inline(always)]
fn all_warps() -> u32 {
    thread::grid_dim_x() * thread::grid_dim_y() * thread::grid_dim_z() * (thread::block_dim_x() / 32)
}

/// Tiles of a warp that begins with `first`.
#[inline(always)]
pub fn tiles_of<R: Ring>(ring: &R, first: u32) -> u32 {
    (ring.end() + R::STRIDE - 1).saturating_sub(first) / R::STRIDE
}

/// The most warps that are counted: their sum is 32 bits.
pub const MAX_WARPS: u32 = u32::MAX / WHOLE;
