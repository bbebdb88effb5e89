//! A warp's ring of tiles: copies run some rounds ahead of the arithmetic, and no other warp is waited for.

use simt::warp::{FULL_MASK, sync_warp};
use simt::{Global, async_copy, unroll};

/// Where a warp's tiles come from, and where they go.
pub trait Ring {
    /// Stages of the ring: up to 5. With one, a tile is asked for when the one ahead of it has been used.
    const STAGES: u32;
    /// How far apart the tiles of one warp are: the warps of a block.
    const STRIDE: u32;
    /// Whether a register is left for the block of the tile after the one whose copy starts.
    const LOOKS_AHEAD: bool;

    /// Past the last tile.
    fn end(&self) -> u32;
    /// The cache block of a tile; any past the end.
    fn block(&self, tile: u32) -> u32;
    /// Comes once, when the first copies are under way.
    #[inline(always)]
    fn begun(&self) {}
    /// Comes with each tile, ahead of the next copy.
    #[inline(always)]
    fn turn(&self) {}
    /// Starts copying a tile, which there is, into a stage.
    fn start(&self, tile: u32, block: u32, stage: u32);
}

/// Starts a tile's copies, if there is such a tile, and closes their group in any case.
#[simt::device]
fn start<R: Ring>(ring: &R, tile: u32, block: u32, stage: u32) {
    if tile < ring.end() {
        ring.start(tile, block, stage);
    }
    async_copy::commit();
}

/// The blocks of the tiles that a ring begins with: asked for ahead of what else is loaded at the start of a
/// kernel, they are there when it is.
#[simt::device]
pub fn first_blocks<R: Ring>(ring: &R, first: u32) -> [u32; 5] {
    let mut blocks = [0u32; 5];
    unroll!(for s in 0..5 {
        blocks[s] = if (s as u32) < R::STAGES { ring.block(first + R::STRIDE * s as u32) } else { 0 };
    });
    blocks
}

/// Starts the copies that a ring begins with; `blocks`: what [`first_blocks`] has said. What else a kernel
/// has to do first it may do behind this, while they come; [`walk_on`] goes on.
#[simt::device]
pub fn fill<R: Ring>(ring: &R, first: u32, blocks: [u32; 5]) {
    unroll!(for s in 0..4 {
        if (s as u32) < (R::STAGES - 1).max(1) {
            start(ring, first + R::STRIDE * s as u32, blocks[s], s as u32);
        }
    });
    ring.begun();
}

/// Calls `visit(tile, stage)` with every [`Ring::STRIDE`]th tile from `first` on, once its copies have
/// arrived. `blocks`: what [`first_blocks`] has said.
#[simt::device]
pub fn walk<R: Ring>(ring: &R, first: u32, blocks: [u32; 5], visit: impl FnMut(u32, u32)) {
    fill(ring, first, blocks);
    walk_on(ring, first, blocks, visit);
}

/// [`walk`] of a ring that [`fill`] has been called with.
#[simt::device]
pub fn walk_on<R: Ring>(ring: &R, first: u32, blocks: [u32; 5], mut visit: impl FnMut(u32, u32)) {
    let mut tile = first;
    if R::STAGES == 1 {
        while tile < ring.end() {
            let next = tile + R::STRIDE;
            // Known when its copy may start.
            let block = ring.block(next);
            async_copy::wait::<0>();
            sync_warp(FULL_MASK);
            visit(tile, 0);
            // All lanes have read what the copy writes over.
            sync_warp(FULL_MASK);
            ring.turn();
            start(ring, next, block, 0);
            tile = next;
        }
        return;
    }
    let mut next_block = blocks[R::STAGES as usize - 1];
    let mut stage = 0u32;
    while tile < ring.end() {
        match R::STAGES {
            2 => async_copy::wait::<0>(),
            3 => async_copy::wait::<1>(),
            4 => async_copy::wait::<2>(),
            _ => async_copy::wait::<3>(),
        }
        sync_warp(FULL_MASK);
        // The stage that the last round has read is free.
        let free = if stage == 0 { R::STAGES - 1 } else { stage - 1 };
        let ahead = tile + R::STRIDE * (R::STAGES - 1);
        ring.turn();
        start(ring, ahead, if R::LOOKS_AHEAD { next_block } else { ring.block(ahead) }, free);
        if R::LOOKS_AHEAD {
            next_block = ring.block(ahead + R::STRIDE);
        }
        visit(tile, stage);
        tile += R::STRIDE;
        stage = if stage == R::STAGES - 1 { 0 } else { stage + 1 };
    }
}

/// What a launch can know of its tiles while the one ahead of it still runs: which blocks they most likely
/// are. That one may be counting lengths up, or writing the table: a glance decides what is asked for early,
/// nothing else.
#[derive(Clone, Copy)]
pub struct Glance {
    /// [sequences, max_blocks].
    pub table: Global<u32>,
    /// \[sequences\].
    pub lengths: Global<u32>,
    /// Entries of a row of the table.
    pub max_blocks: u32,
    /// Blocks of the pool.
    pub pool_blocks: u32,
    /// Whether anything shall be asked for.
    pub wanted: bool,
}

impl Glance {
    /// The tokens of a sequence, no more than its row of the table holds.
    #[simt::device]
    pub fn length(self, sequence: u32) -> u32 {
        self.lengths.peek(sequence as usize, self.wanted).min(self.max_blocks * super::BLOCK_TOKENS)
    }

    /// Block `tile` of a sequence, and whether it is one of the pool's; 0 if not.
    #[simt::device]
    pub fn block(self, sequence: u32, tile: u32) -> (u32, bool) {
        let tile = tile.min(self.max_blocks - 1);
        let block = self.table.peek((sequence * self.max_blocks + tile) as usize, self.wanted);
        if self.wanted & (block < self.pool_blocks) { (block, true) } else { (0, false) }
    }
}
