//! A growing INT8 cache: tokens on their way into blocks of 16, and blocks on their way back.
//!
//! # Mathematics
//! Equations (6) to (8) with a scale for each block of 16 tokens, KV head and channel, as in
//! [`fused`](super::fused): a block is quantized at the moment it is full, and never again. The block that is
//! being filled stays as it came.
//!
//! # Layout and bytes
//! Keys and values are the two halves of each array, keys first:
//!
//! | array | shape | bytes a token and KV head |
//! |---|---|---|
//! | codes | i8 [2, blocks, kv_heads, 16, D] | 2·D |
//! | scales | f32 [2, blocks, kv_heads, D] | D / 2 |
//! | fresh | E [sequences, 2, kv_heads, 16, D] | (one block) |
//!
//! A sequence has the blocks that its row of the block table names. What
//! [`restore_blocks`](fn@restore_blocks) writes is a paged pool of dense attention with the same table: all
//! layers of a model use one. A step reads 2.5·D bytes a token and KV head and
//! writes 4·D, which attention reads.
//!
//! # Work split
//! A thread has one channel and handles its tokens in order, so that a full block is read back by the thread
//! that wrote it. For appending a thread block has a KV head's keys or values; for restoring a block of 16
//! tokens of them.

use super::quantizer::{dequantize, quantize, scale_from_max};
use crate::Element;
use half::f16;
use simt::{Global, GlobalMut, Pod, Zeroable, kernel, math, thread, unroll};

/// Tokens of a block.
const BLOCK: u32 = super::TOKENS_PER_BLOCK;
/// Positions from here on are of no sequence.
const ABSENT: u32 = 1 << 31;

/// The extents of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockShape {
    /// New tokens of each sequence.
    pub tokens: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// D, a multiple of 32, at most 256: threads of a block.
    pub head_dim: u32,
    /// Blocks that there are.
    pub blocks: u32,
    /// Blocks that a sequence has: entries of a row of the table.
    pub max_blocks: u32,
}

impl BlockShape {
    /// The first element of a tile of [16, D]; `kind` 0 for keys, 1 for values.
    #[inline(always)]
    pub const fn tile(self, kind: u32, block: u32, head: u32) -> usize {
        self.pair(kind, block, head) * (BLOCK * self.head_dim) as usize
    }

    /// The number of a tile.
    #[inline(always)]
    const fn pair(self, kind: u32, block: u32, head: u32) -> usize {
        (kind as usize * self.blocks as usize + block as usize) * self.kv_heads as usize + head as usize
    }

    /// The first scale of a tile.
    #[inline(always)]
    pub const fn scale(self, kind: u32, block: u32, head: u32) -> usize {
        self.pair(kind, block, head) * self.head_dim as usize
    }

    /// The first element of a fresh tile.
    #[inline(always)]
    pub const fn fresh(self, sequence: u32, kind: u32, head: u32) -> usize {
        let tile = (sequence * 2 + kind) * self.kv_heads + head;
        tile as usize * (BLOCK * self.head_dim) as usize
    }
}

/// Takes `shape.tokens` tokens of each sequence, `new_keys` and `new_values` [sequences, tokens, kv_heads, D]
/// for `positions` [sequences, tokens], which follow each other; what is past a sequence's last block is left
/// out. `table` [sequences, max_blocks]. Grid (kv_heads, 2, sequences), D threads.
#[kernel(system = int8, instances(f16), max_threads = 256, overlaps)]
pub fn append_blocks<E: Element>(
    new_keys: Global<E>,
    new_values: Global<E>,
    positions: Global<u32>,
    table: Global<u32>,
    fresh: GlobalMut<E>,
    codes: GlobalMut<i8>,
    scales: GlobalMut<f32>,
    shape: BlockShape,
) {
    let (head, kind, sequence) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let channel = thread::thread_idx_x() as usize;
    let new = if kind == 0 { new_keys } else { new_values };
    let d = shape.head_dim as usize;
    let row = sequence as usize * shape.tokens as usize;
    let (first, own) = (positions.load(row), shape.fresh(sequence, kind, head) + channel);
    let mut token = 0;
    while token < shape.tokens {
        let position = first + token;
        let (index, place) = (position / BLOCK, position % BLOCK);
        if index >= shape.max_blocks {
            return;
        }
        let from = ((row + token as usize) * shape.kv_heads as usize + head as usize) * d + channel;
        fresh.store(own + place as usize * d, new.load(from));
        if place == BLOCK - 1 {
            let block = table.load(sequence as usize * shape.max_blocks as usize + index as usize);
            let mut x = [0f32; BLOCK as usize];
            let mut largest = 0f32;
            unroll!(for t in 0..16 {
                x[t] = fresh.load(own + t * d).to_f32();
                largest = math::max(largest, math::abs(x[t]));
            });
            let scale = scale_from_max::<E>(largest);
            scales.store(shape.scale(kind, block, head) + channel, scale);
            let tile = shape.tile(kind, block, head) + channel;
            unroll!(for t in 0..16 {
                codes.store(tile + t * d, quantize(x[t], scale) as i8);
            });
        }
        token += 1;
    }
}

/// Writes the tokens of each sequence up to the last of `positions` [sequences, tokens] to a pool, `keys` and
/// `values` [blocks, kv_heads, 16, D], and their number to `lengths` \[sequences\]: full blocks from their
/// codes (8), the last from where it is being filled. `table` [sequences, max_blocks]. Grid (max_blocks,
/// kv_heads, 2·sequences), D threads; thread blocks past the last token do nothing, nor do those of a
/// sequence whose tokens are past its last block.
#[kernel(system = int8, instances(f16), max_threads = 256, overlaps)]
pub fn restore_blocks<E: Element>(
    positions: Global<u32>,
    table: Global<u32>,
    fresh: Global<E>,
    codes: Global<i8>,
    scales: Global<f32>,
    lengths: GlobalMut<u32>,
    keys: GlobalMut<E>,
    values: GlobalMut<E>,
    shape: BlockShape,
) {
    let (index, head, both) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let (sequence, kind) = (both / 2, both % 2);
    let channel = thread::thread_idx_x() as usize;
    let last = positions.load(sequence as usize * shape.tokens as usize + shape.tokens as usize - 1);
    // Attention follows the length through the table: it must not reach past it.
    let length = last.min(shape.max_blocks * BLOCK - 1) + 1;
    if index * BLOCK >= length || last >= ABSENT {
        return;
    }
    if index == 0 && head == 0 && kind == 0 && channel == 0 {
        lengths.store(sequence as usize, length);
    }
    let block = table.load(sequence as usize * shape.max_blocks as usize + index as usize);
    let pool = if kind == 0 { keys } else { values };
    let d = shape.head_dim as usize;
    let to = shape.tile(0, block, head) + channel;
    if length < (index + 1) * BLOCK {
        let from = shape.fresh(sequence, kind, head) + channel;
        let mut t = 0;
        while t < (length - index * BLOCK) as usize {
            pool.store(to + t * d, fresh.load(from + t * d));
            t += 1;
        }
        return;
    }
    let scale = scales.load(shape.scale(kind, block, head) + channel);
    let from = shape.tile(kind, block, head) + channel;
    unroll!(for t in 0..16 {
        pool.store(to + t * d, E::from_f32(dequantize(codes.load(from + t * d), scale)));
    });
}
