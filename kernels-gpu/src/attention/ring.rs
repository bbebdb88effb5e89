//! A warp's ring of tiles: copies run some rounds ahead of the arithmetic, and no other warp is waited for.

use simt::warp::{FULL_MASK, sync_warp};
use simt::{async_copy, unroll};

/// Where a warp's tiles come from, and where they go.
pub trait Ring {
    /// Stages of the ring: 3 to 5.
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
    /// Starts copying a tile, which there is, into a stage.
    fn start(&self, tile: u32, block: u32, stage: u32);
}

/// Starts a tile's copies, if there is such a tile, and closes their group in any case.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
fn start<R: Ring>(ring: &R, tile: u32, block: u32, stage: u32) {
    if tile < ring.end() {
        ring.start(tile, block, stage);
    }
    async_copy::commit();
}

/// The blocks of the tiles that a ring begins with: asked for ahead of what else is loaded at the start of a kernel, they are there
/// when it is.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn first_blocks<R: Ring>(ring: &R, first: u32) -> [u32; 5] {
    let mut blocks = [0u32; 5];
    unroll!(for s in 0..5 {
        blocks[s] = if (s as u32) < R::STAGES { ring.block(first + R::STRIDE * s as u32) } else { 0 };
    });
    blocks
}

/// Calls `visit(tile, stage)` with every [`Ring::STRIDE`]th tile from `first` on, once its copies have arrived. `blocks`: what
/// [`first_blocks`] has said.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn walk<R: Ring>(ring: &R, first: u32, blocks: [u32; 5], mut visit: impl FnMut(u32, u32)) {
    unroll!(for s in 0..4 {
        if (s as u32) < R::STAGES - 1 {
            start(ring, first + R::STRIDE * s as u32, blocks[s], s as u32);
        }
    });
    ring.begun();
    let mut next_block = blocks[R::STAGES as usize - 1];
    let mut tile = first;
    let mut stage = 0u32;
    while tile < ring.end() {
        match R::STAGES {
            3 => async_copy::wait::<1>(),
            4 => async_copy::wait::<2>(),
            _ => async_copy::wait::<3>(),
        }
        sync_warp(FULL_MASK);
        // The stage that the last round has read is free.
        let free = if stage == 0 { R::STAGES - 1 } else { stage - 1 };
        let ahead = tile + R::STRIDE * (R::STAGES - 1);
        start(ring, ahead, if R::LOOKS_AHEAD { next_block } else { ring.block(ahead) }, free);
        if R::LOOKS_AHEAD {
            next_block = ring.block(ahead + R::STRIDE);
        }
        visit(tile, stage);
        tile += R::STRIDE;
        stage = if stage == R::STAGES - 1 { 0 } else { stage + 1 };
    }
}
