//! What a launch asks for while the one ahead of it still runs.

use super::super::pass::{Rings, warps_of};
use super::{StepShape, Tile, pass_share};
use crate::attention::{BLOCK_TOKENS, Glance, GridPlace};
use half::f16;
use simt::{Global, thread, warp};

/// Tiles that each warp asks for ahead of the wait.
const AHEAD: u32 = 4;

/// Asks the L2 cache for each warp's first tiles, while the launch ahead may still run, as dense attention
/// does. Not where steps certify: the launch ahead is most often the dense rung of another step then, which
/// leaves no time (measured: 1.5 us lost).
#[simt::device]
pub(super) fn look_ahead<const D: usize, C: Rings>(tiles: Global<u32>, glance: Glance, shape: StepShape) {
    let GridPlace { split, sequence, head, .. } = GridPlace::of(shape.row_groups());
    let blocks = glance.length(sequence) / BLOCK_TOKENS;
    let (a_split, _) = pass_share(blocks, shape.splits);
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let at = warp + warps_of::<C>(D as u32) * lane;
    let tile = split * a_split + at;
    let (block, exists) = glance.block(sequence, tile);
    let wanted = exists & (lane < AHEAD) & (at < a_split) & (tile < blocks);
    let pair = (block * shape.kv_heads + head) as usize;
    let words = Tile::<f16, D>::WORDS;
    tiles.prefetch(pair * words as usize, 4 * words, wanted);
}
