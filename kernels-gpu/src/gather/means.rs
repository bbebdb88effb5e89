//! # Mathematics
//! Of the n keys k_t of a gather-block that are there, by KV head and channel c (the paper's ablation):
//!
//! ```text
//! mean_c = (1/n)·Σ_t k_t,c
//! ```
//!
//! in f32, rounded to the keys' type. Token t is added by lane t mod 4, each lane in the order of its tokens,
//! then the lanes' sums in the order of the lanes; then one division. So |mean stored − mean| is at most
//!
//! ```text
//! 1.01·(n/4 + 4)·2^−24·(1/n)·Σ_t |k_t,c|  +  the rounding of a number of the type
//! ```
//!
//! A sum over a block begins anew with every token that is appended to it, so how a prompt was cut does not
//! show.
//!
//! # Layout
//! `means` [sequences, kv_heads, tiles, 8·D words]: as [`fold`](fn@super::fold) has the maxima, without the
//! minima between them.
//!
//! # Bytes
//! 2·D a gather-block and KV head. A chunk reads all keys of the blocks that it touches, 2·D·`block` each.
//!
//! # Work split
//! As in [`fold`](fn@super::fold).

use super::bounds::{FOLD_LANES, FoldShape, TILE_BLOCKS, mean_word, tile_words};
use crate::attention::{BLOCK_TOKENS, Half};
use half::{bf16, f16};
use simt::{Global, GlobalMut, Shared, SharedPlan, kernel, thread, unroll};

/// What the threads of the same channels have: [lanes, head_dim / 2, 2].
const fn shared() -> Shared<f32> {
    SharedPlan::new().array(FOLD_LANES * 128 * 2)
}

/// Makes the mean of each gather-block that has one of a sequence's tokens from position `positions[sequence
/// · stride]` to before `lengths[sequence]`.
///
/// Arguments, grid and threads are those of [`fold`](fn@super::fold); the pool has all keys of these blocks.
#[kernel(system = gather, instances(f16, bf16), max_threads = 512, overlaps)]
pub fn average<E: Half>(
    keys: Global<E>,
    table: Global<u32>,
    positions: Global<u32>,
    lengths: Global<u32>,
    means: GlobalMut<u32>,
    shape: FoldShape,
) {
    let (head, sequence) = (thread::block_idx_y(), thread::block_idx_z());
    let first = positions.load(sequence as usize * shape.stride as usize);
    let room = shape.max_blocks * BLOCK_TOKENS;
    let length = lengths.load(sequence as usize).min(room);
    if first >= length {
        return;
    }
    let index = simt::bits::div_u32(first, shape.block) + thread::block_idx_x();
    let begin = index * shape.block;
    let end = length.min(begin + shape.block);
    if begin >= end {
        return;
    }
    let pairs = shape.head_dim / 2;
    let t = thread::thread_idx_x();
    let (pair, lane) = (simt::bits::rem_u32(t, pairs), simt::bits::div_u32(t, pairs));
    let mut sums = [0f32; 2];
    let mut tile = begin / BLOCK_TOKENS;
    while tile * BLOCK_TOKENS < end {
        let block = table.load((sequence * shape.max_blocks + tile) as usize);
        let rows = (block as usize * shape.kv_heads as usize + head as usize) * BLOCK_TOKENS as usize;
        let first = tile * BLOCK_TOKENS + lane;
        let mut four = [0u32; 4];
        unroll!(for i in 0..4 {
            // One that is not there yet gives way to the last.
            let token = (first + FOLD_LANES * i as u32).min(end - 1);
            let row = rows + (token % BLOCK_TOKENS) as usize;
            four[i] = keys.load_vector::<u32>(row * shape.head_dim as usize + 2 * pair as usize);
        });
        unroll!(for i in 0..4 {
            let [low, high] = E::unpack(four[i]);
            if first + FOLD_LANES * (i as u32) < end {
                sums = [sums[0] + low, sums[1] + high];
            }
        });
        tile += 1;
    }
    let at = |lane: u32| 2 * (lane * pairs + pair);
    shared().store(at(lane), sums[0]);
    shared().store(at(lane) + 1, sums[1]);
    thread::sync_threads();
    if lane != 0 {
        return;
    }
    unroll!(for other in 1..4 {
        let at = at(other as u32);
        sums = [sums[0] + shared().load(at), sums[1] + shared().load(at + 1)];
    });
    let row = sequence as usize * shape.kv_heads as usize + head as usize;
    let words = (tile_words(shape.head_dim) / 2) as usize;
    let start = (row * shape.tiles as usize + (index / TILE_BLOCKS) as usize) * words;
    means.store(start + mean_word(index % TILE_BLOCKS, pair) as usize, mean::<E>(sums, end - begin));
}

/// The mean of `count` keys of two channels, from their sums.
#[inline(always)]
pub fn mean<E: Half>(sums: [f32; 2], count: u32) -> u32 {
    let count = count as f32;
    E::pack(sums[0] / count, sums[1] / count)
}
