//! Tokens on their way into a cache.
//!
//! # Work split
//! [`append`](fn@append): a block a sequence, one token each; [`prefill`](fn@prefill): a block a token, all
//! of one sequence. Threads take vectors of 8 elements of the token's rows. Each row goes to the originals,
//! which may be host memory, to the sequence's fresh block and, where it is resident, to its slot (see
//! [`admit`](super::admit)). `quantize_block` reads the fresh block when it is full, with the jobs that these
//! kernels leave: nobody asks the host, and no block of host memory is read back.
//!
//! # What is refused
//! Keys and values that are not finite, or beyond f16: everything else can be quantized.
//! [`append`](fn@append) looks before it writes: a sequence with such a token, or at its limit, keeps its
//! length and takes no more tokens, its limit being 0 from then on, until the host has looked at
//! [`Refusals`]. For prefill [`inspect`](fn@inspect) looks first.
//!
//! # Bytes
//! A token and KV head: 4·D read and 8·D written, half of that over the bus where the originals are host
//! memory.

use super::admit::{Scratch, forget};
use super::layout::{Job, pair};
use crate::attention::{BLOCK_TOKENS, Half};
use crate::element::store_whole;
use glam::UVec4;
use half::{bf16, f16};
use simt::{Global, GlobalMut, Pod, Zeroable, bits, kernel, math, thread, unroll};

/// Threads of a block of every kernel here.
pub const THREADS: u32 = 256;
/// Elements of a vector.
const VECTOR: u32 = 8;

/// The extents of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CacheShape {
    /// KV heads.
    pub kv_heads: u32,
    /// Elements of a row, a multiple of 32.
    pub head_dim: u32,
    /// Entries of a row of the block table.
    pub max_blocks: u32,
    /// Blocks of each sequence, from its first on, whose originals are [resident](super::admit): in slots of
    /// their own. 0: slots are for what steps have used.
    pub resident: u32,
}

impl CacheShape {
    /// The slot of the near pool that holds block `index` of a sequence and KV head; none where it is not
    /// resident. The same among slots for keys and among those for values.
    #[inline(always)]
    pub fn resident_slot(self, sequence: u32, index: u32, head: u32) -> Option<u32> {
        let slot = (sequence * self.resident + index) * self.kv_heads + head;
        (index < self.resident).then_some(slot)
    }
}

/// A run of tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Piece {
    /// The sequence.
    pub row: u32,
    /// The place of the first of them in the input.
    pub first: u32,
    /// Its place in the sequence.
    pub position: u32,
    /// The fresh block for the first block that they reach; the next ones follow.
    pub fresh: u32,
}

/// What was not taken: the smallest flat index of each kind in the input, or `u64::MAX`, as they start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Refusals {
    /// A key that is NaN or infinite.
    pub key_not_finite: u64,
    /// A finite key beyond f16.
    pub key_range: u64,
    /// A value that is NaN or infinite.
    pub value_not_finite: u64,
    /// A finite value beyond f16.
    pub value_range: u64,
    /// A sequence without room.
    pub full: u64,
}

impl Refusals {
    /// Nothing.
    pub const NONE: Refusals = Refusals {
        key_not_finite: u64::MAX,
        key_range: u64::MAX,
        value_not_finite: u64::MAX,
        value_range: u64::MAX,
        full: u64::MAX,
    };
}

/// Whether a cache takes the eight elements; reports those that it does not, `kind` 0 for keys and 2 for
/// values.
#[simt::device]
fn takes<E: Half>(vector: UVec4, kind: usize, index: usize, problems: GlobalMut<u64>) -> bool {
    let words = vector.to_array();
    let mut all = true;
    unroll!(for i in 0..4 {
        let pair = E::unpack(words[i]);
        unroll!(for j in 0..2 {
            let size = math::abs(pair[j]);
            // NaN is not.
            // Not a number is beyond as well.
            #[allow(clippy::neg_cmp_op_on_partial_ord)]
            let beyond = !(size <= 65504.0);
            if beyond {
                all = false;
                let finite = (size <= f32::MAX) as usize;
                problems.atomic_min(kind + finite, (index + 2 * i + j) as u64);
            }
        });
    });
    all
}

/// Where a token's rows go.
struct Target<E> {
    keys: GlobalMut<E>,
    values: GlobalMut<E>,
    near: GlobalMut<E>,
    shape: CacheShape,
    scratch: Scratch,
    /// The block of the originals.
    block: u32,
    /// The fresh block.
    fresh: u32,
    /// The sequence, and the block's place in it.
    place: [u32; 2],
    /// The token in the block.
    token: u32,
}

impl<E: Half> Target<E> {
    /// Stores eight elements, from `head · head_dim + channel` on.
    #[simt::device]
    fn store(&self, kind: u32, element: u32, vector: UVec4) {
        let CacheShape { kv_heads, head_dim, .. } = self.shape;
        let (head, channel) = (bits::div_u32(element, head_dim), bits::rem_u32(element, head_dim));
        let tile = (BLOCK_TOKENS * head_dim) as usize;
        let inside = (self.token * head_dim + channel) as usize;
        let originals = if kind == 0 { self.keys } else { self.values };
        store_whole(originals, pair(self.block, kv_heads, head) * tile + inside, vector);
        let fresh = self.scratch.fresh_tile(kind, self.fresh * kv_heads + head);
        store_whole(self.near, fresh as usize * tile + inside, vector);
        let [sequence, index] = self.place;
        if let Some(slot) = self.shape.resident_slot(sequence, index, head) {
            let slot = kind * self.scratch.key_slots + slot;
            store_whole(self.near, slot as usize * tile + inside, vector);
        }
    }

    /// Copies the token's rows, `[kv_heads, D]` from `from` on; if the block is full then, empties the slots
    /// that hold what it held before.
    #[simt::device]
    fn copy(&self, keys: Global<E>, values: Global<E>, from: usize, directory: GlobalMut<u64>) {
        let elements = self.shape.kv_heads * self.shape.head_dim;
        let mut i = VECTOR * thread::thread_idx_x();
        while i < elements {
            self.store(0, i, keys.load_vector_readonly(from + i as usize));
            self.store(1, i, values.load_vector_readonly(from + i as usize));
            i += VECTOR * THREADS;
        }
        if self.token == BLOCK_TOKENS - 1 {
            let mut head = thread::thread_idx_x();
            while head < self.shape.kv_heads {
                forget(directory, self.scratch, pair(self.block, self.shape.kv_heads, head) as u32);
                head += THREADS;
            }
        }
    }
}

/// Appends one token to each sequence whose limit is not 0.
///
/// `new_keys` and `new_values` [sequences, kv_heads, D]; `table` [sequences, max_blocks]; `lengths` and
/// `limits` \[sequences\], in tokens, every block below a limit being in the table; `keys` and `values` the
/// originals, [blocks, kv_heads, 16, D]; `jobs` \[sequences\]; `problems` as [`Refusals`].
///
/// Grid \[sequences\], [`THREADS`] threads.
#[kernel(system = certified, instances(f16, bf16), max_threads = 256, overlaps = in_turn)]
pub fn append<E: Half>(
    new_keys: Global<E>,
    new_values: Global<E>,
    table: Global<u32>,
    lengths: GlobalMut<u32>,
    limits: GlobalMut<u32>,
    keys: GlobalMut<E>,
    values: GlobalMut<E>,
    near: GlobalMut<E>,
    directory: GlobalMut<u64>,
    jobs: GlobalMut<Job>,
    problems: GlobalMut<u64>,
    shape: CacheShape,
    scratch: Scratch,
) {
    let row = thread::block_idx_x();
    let (length, limit) = (lengths.load(row as usize), limits.load(row as usize));
    let elements = shape.kv_heads * shape.head_dim;
    let from = row as usize * elements as usize;
    let mut taken = length < limit;
    if taken {
        let mut i = VECTOR * thread::thread_idx_x();
        while i < elements {
            let at = from + i as usize;
            let key = takes::<E>(new_keys.load_vector_readonly(at), 0, at, problems);
            let value = takes::<E>(new_values.load_vector_readonly(at), 2, at, problems);
            taken = taken && key && value;
            i += VECTOR * THREADS;
        }
    }
    // Also: every thread has read the length.
    let taken = thread::sync_threads_and(taken as u32) != 0;
    let mut job = Job::NONE;
    if taken {
        let token = bits::rem_u32(length, BLOCK_TOKENS);
        let index = length / BLOCK_TOKENS;
        let block = table.load((row * shape.max_blocks + index) as usize);
        let place = [row, index];
        let target = Target { keys, values, near, shape, scratch, block, fresh: row, place, token };
        target.copy(new_keys, new_values, from, directory);
        if token == BLOCK_TOKENS - 1 {
            job = Job::new(row, block, index);
        }
    }
    if thread::thread_idx_x() == 0 {
        jobs.store(row as usize, job);
        if taken {
            lengths.store(row as usize, length + 1);
        } else if limit != 0 {
            limits.store(row as usize, 0);
            if length >= limit {
                problems.atomic_min(4, row as u64);
            }
        }
    }
}

/// Copies tokens of one sequence to its blocks, which the table has. The length stays as it is. `jobs` gets
/// one for each block that is full then, from the first block that the tokens reach on.
///
/// `new_keys` and `new_values` [tokens, kv_heads, D]; the others as for [`append`](fn@append). Grid \[tokens
/// of the piece\].
#[kernel(system = certified, instances(f16, bf16), max_threads = 256, overlaps = in_turn)]
pub fn prefill<E: Half>(
    new_keys: Global<E>,
    new_values: Global<E>,
    table: Global<u32>,
    keys: GlobalMut<E>,
    values: GlobalMut<E>,
    near: GlobalMut<E>,
    directory: GlobalMut<u64>,
    jobs: GlobalMut<Job>,
    shape: CacheShape,
    scratch: Scratch,
    piece: Piece,
) {
    let position = piece.position + thread::block_idx_x();
    let index = position / BLOCK_TOKENS;
    let nth = index - piece.position / BLOCK_TOKENS;
    let block = table.load((piece.row * shape.max_blocks + index) as usize);
    let token = position - index * BLOCK_TOKENS;
    let fresh = piece.fresh + nth;
    let from = (piece.first + thread::block_idx_x()) as usize * (shape.kv_heads * shape.head_dim) as usize;
    let place = [piece.row, index];
    Target { keys, values, near, shape, scratch, block, fresh, place, token }
        .copy(new_keys, new_values, from, directory);
    if token == BLOCK_TOKENS - 1 && thread::thread_idx_x() == 0 {
        jobs.store(nth as usize, Job::new(fresh, block, index));
    }
}

/// Reports every one of `vectors` · 8 keys and values that a cache does not take; `problems` as [`Refusals`].
#[kernel(system = certified, instances(f16, bf16), max_threads = 256, overlaps = in_turn)]
pub fn inspect<E: Half>(keys: Global<E>, values: Global<E>, problems: GlobalMut<u64>, vectors: u64) {
    let i = thread::index_1d();
    if i as u64 >= vectors {
        return;
    }
    let at = VECTOR as usize * i;
    takes::<E>(keys.load_vector_streaming(at), 0, at, problems);
    takes::<E>(values.load_vector_streaming(at), 2, at, problems);
}
