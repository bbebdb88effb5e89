//! # What it is for
//! Rows of keys and values between the host's memory and the GPU's: [`fetch`](fn@fetch) for a step,
//! [`carry`](fn@carry) for a prompt's chunk. The host's pool, [blocks, kv_heads, 16, D] like any other, is
//! page-locked and mapped, so a kernel's loads and stores are the transfer, and the host need not know what
//! is wanted.
//!
//! # Bytes
//! A gather-block that is missed: 4·D·block bytes over the bus, once: 65,536 with D = 128 and blocks of 128.
//! A new token: 4·D bytes a KV head the other way. Elements are not looked at: both kernels move words.
//!
//! # Work split
//! `fetch`: grid (parts + 1, kv_heads, sequences). The threads of a row's parts take vectors of 16 bytes in
//! turn, of keys and of values, four of each under way before the first is stored; the last thread block
//! brings the row's new token home. What a bus of 64 GB/s and 2 µs has under way is 128 KB: the threads of
//! 264 blocks have 8.6 MB.
//!
//! `carry`: grid (blocks of 16 tokens, kv_heads).

use super::staging::StagingShape;
use crate::attention::BLOCK_TOKENS;
use glam::UVec4;
use simt::{Global, GlobalMut, Pod, Zeroable, bits, kernel, thread, unroll};

/// Threads of a block of [`fetch`](fn@fetch) and of [`carry`](fn@carry).
pub const FETCH_THREADS: u32 = 256;
/// Thread blocks that fill the machine: two on each of the 132 multiprocessors of a GH100.
const BLOCKS_WANTED: u32 = 264;
/// Words of a vector.
const VECTOR: usize = 4;

/// Thread blocks that fetch for a sequence and KV head, for `rows` of these with lists of up to `most` blocks
/// of `entries` tiles.
pub const fn fetch_parts(rows: u32, most: u32, entries: u32) -> u32 {
    let wanted = BLOCKS_WANTED / if rows == 0 { 1 } else { rows };
    // A tile for every thread block.
    let tiles = most.saturating_mul(entries);
    let parts = if wanted < tiles { wanted } else { tiles };
    if parts == 0 { 1 } else { parts }
}

/// Copies each block that [`place`](fn@super::place) found missing from the host's pool to its slot, and the
/// last token of each sequence from its slot to the host's pool.
///
/// `entries`, `at`, `missed` and `misses` are those of `select` and `place`; `table` [sequences, max_blocks]
/// of the host's pool; `lengths` \[sequences\]. `host_keys` and `host_values` are the host's pool, `keys` and
/// `values` the staging pool, as words. Grid ([`fetch_parts`] + 1, kv_heads, sequences).
#[kernel(system = gather, max_threads = 256, overlaps)]
pub fn fetch(
    entries: Global<u32>,
    at: Global<u32>,
    missed: Global<u32>,
    misses: Global<u32>,
    table: Global<u32>,
    lengths: Global<u32>,
    host_keys: GlobalMut<u32>,
    host_values: GlobalMut<u32>,
    keys: GlobalMut<u32>,
    values: GlobalMut<u32>,
    shape: StagingShape,
) {
    let (part, head, sequence) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let (t, parts) = (thread::thread_idx_x(), thread::grid_dim_x() - 1);
    let row = (sequence * shape.kv_heads + head) as usize;
    // Vectors of a row, 8 elements each: powers of two, like the tiles of a block.
    let of_row = shape.head_dim / 8;
    let of_tile = BLOCK_TOKENS * of_row;
    if part == parts {
        let length = lengths.load(sequence as usize).min(shape.max_blocks * BLOCK_TOKENS);
        if length == 0 || t >= 2 * of_row {
            return;
        }
        let position = length - 1;
        let (tile, place) = (position / BLOCK_TOKENS, position % BLOCK_TOKENS);
        let block = bits::div_u32(position, shape.rule.block);
        let entry = shape.entry(sequence, head, shape.near_slot(block), tile - block * shape.rule.entries());
        let home = table.load((sequence * shape.max_blocks + tile) as usize) * shape.kv_heads + head;
        let vector = place * of_row + if t < of_row { t } else { t - of_row };
        let of = |entry: u32| (entry as usize * of_tile as usize + vector as usize) * VECTOR;
        let (from, to) = if t < of_row { (keys, host_keys) } else { (values, host_values) };
        to.store_vector_streaming::<UVec4>(of(home), from.load_vector::<UVec4>(of(entry)));
        return;
    }
    let per_block = shape.rule.entries();
    let (tile_shift, block_shift) = (of_tile.trailing_zeros(), per_block.trailing_zeros());
    let first = row * shape.most as usize;
    let total = (misses.load(row) << block_shift) << tile_shift;
    let stride = parts * FETCH_THREADS;
    let mut vector = part * FETCH_THREADS + t;
    while vector < total {
        let mut fetched = [[UVec4::ZERO; 2]; 4];
        let mut to = [0usize; 4];
        unroll!(for i in 0..4 {
            let own = vector + i as u32 * stride;
            if own < total {
                let (tile, within) = (own >> tile_shift, (own & (of_tile - 1)) as usize);
                let (miss, tile) = (tile >> block_shift, tile & (per_block - 1));
                let listed = missed.load(first + miss as usize);
                let slot = shape.rule.local + at.load(first + listed as usize);
                let entry = entries.load((first + listed as usize) * per_block as usize + tile as usize);
                let from = (entry as usize * of_tile as usize + within) * VECTOR;
                let entry = shape.entry(sequence, head, slot, tile);
                to[i] = (entry as usize * of_tile as usize + within) * VECTOR;
                fetched[i] = [
                    host_keys.as_const().load_vector_streaming(from),
                    host_values.as_const().load_vector_streaming(from),
                ];
            }
        });
        unroll!(for i in 0..4 {
            if vector + (i as u32 * stride) < total {
                keys.store_vector(to[i], fetched[i][0]);
                values.store_vector(to[i], fetched[i][1]);
            }
        });
        vector += 4 * stride;
    }
}

/// Which tokens of a sequence [`carry`](fn@carry) copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CarryShape {
    /// The first of them.
    pub begin: u32,
    /// Past the last.
    pub end: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// D: 64 or 128.
    pub head_dim: u32,
}

/// Copies tokens `begin` to before `end` of a sequence from one pool to another.
///
/// Pools are words of [blocks, kv_heads, 16, D], `from_table` and `to_table` the blocks of the sequence in
/// each. Grid (blocks of 16 tokens that these are in, kv_heads).
#[kernel(system = gather, max_threads = 256, overlaps)]
pub fn carry(
    from_keys: Global<u32>,
    from_values: Global<u32>,
    from_table: Global<u32>,
    to_keys: GlobalMut<u32>,
    to_values: GlobalMut<u32>,
    to_table: Global<u32>,
    shape: CarryShape,
) {
    let (head, t) = (thread::block_idx_y(), thread::thread_idx_x());
    let tile = shape.begin / BLOCK_TOKENS + thread::block_idx_x();
    let of_row = shape.head_dim / 8;
    let of_tile = BLOCK_TOKENS * of_row;
    let token = tile * BLOCK_TOKENS + (t >> of_row.trailing_zeros());
    if t >= of_tile || token < shape.begin || token >= shape.end {
        return;
    }
    let at = |table: Global<u32>| {
        let entry = table.load(tile as usize) as usize * shape.kv_heads as usize + head as usize;
        (entry * of_tile as usize + t as usize) * VECTOR
    };
    let (from, to) = (at(from_table), at(to_table));
    let key: UVec4 = from_keys.load_vector_streaming(from);
    let value: UVec4 = from_values.load_vector_streaming(from);
    to_keys.store_vector(to, key);
    to_values.store_vector(to, value);
}
