//! New tokens on their way into a paged cache.
//!
//! # Layout and bytes
//! Rows `[tokens, kv_heads, D]`, `tokens` of each sequence one behind another, go where the block table says:
//! pools are `[blocks, kv_heads, 16, D]`. A token and KV head: 4·D bytes read, 4·D written.
//!
//! # Work split
//! A block a token; a thread takes vectors of 8 elements of its keys and of its values. Positions are in
//! device memory, where the step before counts them up, and the lengths that attention reads follow them: a
//! captured step grows its sequences without the host. A token beyond the table's last block is left out.

use crate::attention::{BLOCK_TOKENS, Half};
use crate::element::store_whole;
use glam::UVec4;
use half::{bf16, f16};
use simt::{Global, GlobalMut, Pod, Zeroable, bits, kernel, thread};

/// Threads of a block of [`append`](fn@append).
pub const APPEND_THREADS: u32 = 128;
/// Elements of a vector.
const VECTOR: u32 = 8;

/// The extents of a launch of [`append`](fn@append).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AppendShape {
    /// New tokens of each sequence, at least one.
    pub tokens: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements of a row, a multiple of 8.
    pub head_dim: u32,
    /// Entries of a row of the block table.
    pub max_blocks: u32,
}

/// Copies each token's keys and values to its position, and sets its sequence's length to one more than the
/// last token's position.
///
/// `new_keys` and `new_values` [sequences, tokens, kv_heads, D]; `positions` [sequences, tokens]; `table`
/// [sequences, max_blocks], whose entries up to the last position are blocks of the pools; `lengths`
/// \[sequences\]; `keys` and `values` [blocks, kv_heads, 16, D]. Grid \[sequences · tokens\],
/// [`APPEND_THREADS`] threads.
#[kernel(system = dense, instances(f16, bf16), max_threads = 128, overlaps)]
pub fn append<E: Half>(
    new_keys: Global<E>,
    new_values: Global<E>,
    positions: Global<u32>,
    table: Global<u32>,
    lengths: GlobalMut<u32>,
    keys: GlobalMut<E>,
    values: GlobalMut<E>,
    shape: AppendShape,
) {
    let item = thread::block_idx_x();
    let sequence = bits::div_u32(item, shape.tokens);
    let position = positions.load(item as usize);
    let index = position / BLOCK_TOKENS;
    if index >= shape.max_blocks {
        return;
    }
    let block = table.load(sequence as usize * shape.max_blocks as usize + index as usize);
    let elements = shape.kv_heads * shape.head_dim;
    let from = item as usize * elements as usize;
    let mut i = VECTOR * thread::thread_idx_x();
    while i < elements {
        let (head, channel) = (bits::div_u32(i, shape.head_dim), bits::rem_u32(i, shape.head_dim));
        let row = (block as usize * shape.kv_heads as usize + head as usize) * BLOCK_TOKENS as usize;
        let to = (row + (position % BLOCK_TOKENS) as usize) * shape.head_dim as usize + channel as usize;
        store_whole(keys, to, new_keys.load_vector::<UVec4>(from + i as usize));
        store_whole(values, to, new_values.load_vector::<UVec4>(from + i as usize));
        i += VECTOR * APPEND_THREADS;
    }
    let last = bits::rem_u32(item, shape.tokens) == shape.tokens - 1;
    if last && thread::thread_idx_x() == 0 {
        lengths.store(sequence as usize, position + 1);
    }
}
