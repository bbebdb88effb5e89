//! # Mathematics
//! Of the keys k_t of a gather-block, by KV head and channel c (the paper's section 8.1):
//!
//! ```text
//! kmax_c = max_t k_t,c        kmin_c = min_t k_t,c
//! ```
//!
//! exactly, in the keys' own 16 bits: −0 is less than +0, and a NaN key makes both NaN (0x7fff). A maximum is
//! the same in whatever order keys come, so a block's first token sets its bounds, later ones are folded in,
//! and how a prompt was cut does not show.
//!
//! # Layout
//! `bounds` [sequences, kv_heads, tiles, 16·D words]: a tile is 16 gather-blocks, in the order in which a
//! warp's lanes want it as A operands of the tensor cores. Word `(2s + kind)·128 + 4·lane + register` holds
//! two channels, kind 0 of the maxima and 1 of the minima, contraction s of channels 16s to 16s + 15:
//!
//! ```text
//! lane 4g + j, register i + 2h:  block g + 8i of the tile, channels 16s + 4j + 2h and 16s + 4j + 2h + 1
//! ```
//!
//! so that a load of 16 bytes a lane is one operand, and a tile is read from its first byte to its last.
//!
//! # Bytes
//! 4·D a gather-block and KV head: with blocks of 128 tokens 1/128 of keys and values, 448 bytes a token in
//! 28 layers of 4 KV heads of 128 channels (A_s of the paper's section 2). `fold` reads 2·D a new token and
//! KV head, and reads and writes 4·D for a step's block.
//!
//! # Work split
//! Grid (blocks that a chunk can touch, kv_heads, sequences). A thread has two channels and every fourth
//! token; four threads of the same channels meet in shared memory. A block of the grid is alone with its
//! gather-block, so there is nothing to race for.

use crate::attention::{BLOCK_TOKENS, Half};
use half::{bf16, f16};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, kernel, thread, unroll};

/// Gather-blocks of a tile.
pub const TILE_BLOCKS: u32 = 16;
/// Threads that share two channels in [`fold`](fn@fold).
pub const FOLD_LANES: u32 = 4;
/// What a NaN becomes.
const NAN: u32 = 0x7fff;
/// Where a NaN is in the order of maxima, and of minima: it wins in both.
const ABOVE: i32 = 0x7fff;
const BELOW: i32 = -0x8000;

/// Words of a tile.
#[inline(always)]
pub const fn tile_words(head_dim: u32) -> u32 {
    TILE_BLOCKS * head_dim
}

/// The word of a tile that holds channels `2·pair` and `2·pair + 1` of block `block` of it; `kind` is 0 for
/// maxima and 1 for minima.
#[inline(always)]
pub const fn word(kind: u32, block: u32, pair: u32) -> u32 {
    let lane = 4 * (block % 8) + pair % 8 / 2;
    let register = 2 * (pair % 2) + block / 8;
    ((pair / 8 * 2 + kind) * 32 + lane) * 4 + register
}

/// The word of a tile of means that holds channels `2·pair` and `2·pair + 1` of block `block` of it.
#[inline(always)]
pub const fn mean_word(block: u32, pair: u32) -> u32 {
    let kind = 0;
    word(kind, block, pair) - pair / 8 * 128
}

/// The largest and the smallest of two channels, as numbers that order like them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extremes {
    largest: [i32; 2],
    smallest: [i32; 2],
}

impl Extremes {
    /// Of no key.
    pub const NONE: Extremes = Extremes { largest: [BELOW - 1; 2], smallest: [ABOVE + 1; 2] };

    /// Takes two channels in, `high` into the maxima and `low` into the minima: both are the pair of a key,
    /// or they are the bounds of some keys.
    #[inline(always)]
    pub fn take<E: Half>(&mut self, high: u32, low: u32) {
        unroll!(for i in 0..2 {
            let (high, low) = (place::<E, ABOVE>(high >> (16 * i)), place::<E, BELOW>(low >> (16 * i)));
            self.largest[i] = if high > self.largest[i] { high } else { self.largest[i] };
            self.smallest[i] = if low < self.smallest[i] { low } else { self.smallest[i] };
        });
    }

    /// The bounds of two channels as they are stored: maxima, minima. There is at least one key.
    #[inline(always)]
    pub fn words(self) -> [u32; 2] {
        let pair = |keys: [i32; 2]| number(keys[0]) | number(keys[1]) << 16;
        [pair(self.largest), pair(self.smallest)]
    }
}

/// Where the number in the low 16 bits stands in the order of all; a NaN is at `NAN_AT`.
#[inline(always)]
fn place<E: Half, const NAN_AT: i32>(bits: u32) -> i32 {
    let infinity = if E::IS_F16 { 0x7c00 } else { 0x7f80 };
    let signed = bits as u16 as i16 as i32;
    if bits & 0x7fff > infinity { NAN_AT } else { mirrored(signed) }
}

/// The number at a place.
#[inline(always)]
fn number(place: i32) -> u32 {
    if place == BELOW { NAN } else { mirrored(place) as u32 & 0xffff }
}

/// Sign and magnitude to two's complement, and back.
#[inline(always)]
fn mirrored(x: i32) -> i32 {
    if x < 0 { x ^ 0x7fff } else { x }
}

/// The extents of a launch of [`fold`](fn@fold).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FoldShape {
    /// Positions of a sequence: the first of them is where its new tokens begin.
    pub stride: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements of a key: 64, 96, 128 or 256.
    pub head_dim: u32,
    /// Entries of a row of the block table.
    pub max_blocks: u32,
    /// Tokens of a gather-block.
    pub block: u32,
    /// Tiles of a sequence and KV head.
    pub tiles: u32,
}

/// What the threads of the same channels have: [lanes, head_dim / 2, 2].
const fn shared() -> Shared<u32> {
    SharedPlan::new().array(FOLD_LANES * 128 * 2)
}

/// Shared memory of [`fold`](fn@fold).
pub const fn fold_bytes() -> u32 {
    4 * shared().len()
}

/// Takes each sequence's tokens from position `positions[sequence · stride]` to before `lengths[sequence]`
/// into the bounds of their gather-blocks.
///
/// `keys` is the pool that holds them already, [blocks, kv_heads, 16, D]; `table` [sequences, max_blocks];
/// `positions` [sequences, stride]; `lengths` \[sequences\]; `bounds` as above. Tokens past the table are
/// left out. Grid (gather-blocks that the longest chunk can touch, kv_heads, sequences), [`FOLD_LANES`] ·
/// D / 2 threads.
#[kernel(system = gather, instances(f16, bf16), max_threads = 512, overlaps)]
pub fn fold<E: Half>(
    keys: Global<E>,
    table: Global<u32>,
    positions: Global<u32>,
    lengths: Global<u32>,
    bounds: GlobalMut<u32>,
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
    let begin = first.max(index * shape.block);
    let end = length.min((index + 1) * shape.block);
    if begin >= end {
        return;
    }
    let pairs = shape.head_dim / 2;
    let t = thread::thread_idx_x();
    let (pair, lane) = (simt::bits::rem_u32(t, pairs), simt::bits::div_u32(t, pairs));
    let mut extremes = Extremes::NONE;
    let mut tile = begin / BLOCK_TOKENS;
    while tile * BLOCK_TOKENS < end {
        let block = table.load((sequence * shape.max_blocks + tile) as usize);
        let rows = (block as usize * shape.kv_heads as usize + head as usize) * BLOCK_TOKENS as usize;
        let mut four = [0u32; 4];
        unroll!(for i in 0..4 {
            // A token that is not of the chunk gives way to its nearest: once more changes nothing.
            let token = (tile * BLOCK_TOKENS + FOLD_LANES * i as u32 + lane).max(begin).min(end - 1);
            let row = rows + (token % BLOCK_TOKENS) as usize;
            four[i] = keys.load_vector::<u32>(row * shape.head_dim as usize + 2 * pair as usize);
        });
        unroll!(for i in 0..4 {
            extremes.take::<E>(four[i], four[i]);
        });
        tile += 1;
    }
    let at = |lane: u32| 2 * (lane * pairs + pair);
    let [largest, smallest] = extremes.words();
    shared().store(at(lane), largest);
    shared().store(at(lane) + 1, smallest);
    thread::sync_threads();
    if lane != 0 {
        return;
    }
    unroll!(for other in 1..4 {
        extremes.take::<E>(shared().load(at(other as u32)), shared().load(at(other as u32) + 1));
    });
    let row = sequence as usize * shape.kv_heads as usize + head as usize;
    let start =
        (row * shape.tiles as usize + (index / TILE_BLOCKS) as usize) * tile_words(shape.head_dim) as usize;
    let place = |kind: u32| start + word(kind, index % TILE_BLOCKS, pair) as usize;
    if begin != index * shape.block {
        extremes.take::<E>(bounds.load(place(0)), bounds.load(place(1)));
    }
    let [largest, smallest] = extremes.words();
    bounds.store(place(0), largest);
    bounds.store(place(1), smallest);
}
