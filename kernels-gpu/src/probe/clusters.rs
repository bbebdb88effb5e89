//! Clusters of two, four and eight blocks: their barrier and each other's shared memory.

use super::atomics::Integer;
use super::word;
use crate::mix;
use glam::Vec4;
use simt::cluster::{self, ClusterWord};
use simt::{GlobalMut, Pod, Shared, SharedPlan, kernel, thread};

/// Threads of a block; of the updates the most.
pub const THREADS: u32 = 128;

/// Words that each thread of [`places()`] writes.
pub const PLACE_WORDS: u32 = 5;

/// Where each block is in its cluster, and where that is in the grid.
#[kernel(system = probe, min_sm = 90, cluster = (2, 1, 4))]
pub fn places(out: GlobalMut<u32>) {
    let (x, y, z) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let block = x + thread::grid_dim_x() * (y + thread::grid_dim_y() * z);
    let at = ((block * thread::block_dim_x() + thread::thread_idx_x()) * PLACE_WORDS) as usize;
    out.store(at, cluster::rank());
    out.store(at + 1, cluster::size());
    out.store(at + 2, cluster::id_x());
    out.store(at + 3, cluster::id_y());
    out.store(at + 4, cluster::id_z());
}

/// The shared memory of the reductions.
pub struct Sums {
    tile: Shared<f32>,
    sums: Shared<f32>,
    /// Its size.
    pub bytes: u32,
}

/// Lays out the shared memory of the reductions.
pub const fn sums() -> Sums {
    let mut plan = SharedPlan::new();
    let (sums, tile) = (plan.array(3), plan.array(THREADS));
    Sums { tile, sums, bytes: plan.bytes() }
}

/// Rounds of each probe.
pub const ROUNDS: u32 = 5;

/// Sums over the threads of a cluster in a fixed tree: of a block in its own memory, then of the blocks, each
/// of which reads those of all others. A round's sum stays until all have read it, two rounds on.
#[inline(always)]
fn reduce(out: GlobalMut<f32>, seed: u32) {
    let Sums { tile, sums, .. } = sums();
    let (t, i) = (thread::thread_idx_x(), thread::index_1d());
    let mut last = 0.0f32;
    for round in 0..ROUNDS {
        // Exponents of 2^-32 to 2^31, both signs: the order of the additions shows in the bits.
        let float = f32::from_bits(word(seed, i as u32, round) & 0x8fff_ffff | 0x3000_0000);
        tile.store(t, float + last);
        thread::sync_threads();
        let mut half = THREADS / 2;
        while half > 0 {
            if t < half {
                tile.store(t, tile.load(t) + tile.load(t + half));
            }
            thread::sync_threads();
            half /= 2;
        }
        if t == 0 {
            sums.store(round % 3, tile.load(0));
        }
        cluster::sync();
        let mut sum = 0.0;
        for rank in 0..cluster::size() {
            sum += sums.of_block(rank).load(round % 3);
        }
        last = sum * 0.5;
        out.store(i * ROUNDS as usize + round as usize, sum);
    }
    // A block ends when no other one reads its sums.
    cluster::sync();
}

/// `reduce` in clusters of two.
#[kernel(system = probe, min_sm = 90, cluster = 2, max_threads = 128)]
pub fn reduce_2(out: GlobalMut<f32>, seed: u32) {
    reduce(out, seed);
}

/// `reduce` in clusters of four.
#[kernel(system = probe, args = reduce_2, min_sm = 90, cluster = 4, max_threads = 128)]
pub fn reduce_4(out: GlobalMut<f32>, seed: u32) {
    reduce(out, seed);
}

/// `reduce` in clusters of eight.
#[kernel(system = probe, args = reduce_2, min_sm = 90, cluster = 8, max_threads = 128)]
pub fn reduce_8(out: GlobalMut<f32>, seed: u32) {
    reduce(out, seed);
}

/// The shared memory of the rings: a tile to read from and one to write to, 16 bytes for each thread.
pub struct Tiles {
    from: Shared<u8>,
    to: Shared<u8>,
    /// Its size.
    pub bytes: u32,
}

/// Lays out the shared memory of the rings.
pub const fn tiles() -> Tiles {
    let mut plan = SharedPlan::new();
    // Not at the start of shared memory.
    let _: Shared<u32> = plan.array(1);
    let (from, to) = (plan.array(THREADS * 16), plan.array(THREADS * 16));
    Tiles { from, to, bytes: plan.bytes() }
}

/// The next block's tile of 16 bytes a thread in units of `V`: read there and added to what the block after
/// that gets.
#[inline(always)]
fn pass_on<V: Pod>(next: u32, after: u32, t: u32) {
    let (Tiles { from, to, .. }, size) = (tiles(), size_of::<V>() as u32);
    let (source, target) = (from.of_block(next), to.of_block(after));
    for unit in 0..16 / size {
        let at = t * 16 + unit * size;
        target.store_vector::<V>(at, source.load_vector(at));
    }
}

/// Tiles go round a cluster, in units of one to 16 bytes: each block takes one from the next block and hands
/// it on to the one after that. The barrier's halves stand apart, with work in between.
#[inline(always)]
fn ring(out: GlobalMut<u32>, seed: u32) {
    let Tiles { from, to, .. } = tiles();
    let (t, i) = (thread::thread_idx_x(), thread::index_1d());
    let (rank, size) = (cluster::rank(), cluster::size());
    let (next, after) = ((rank + 1) % size, (rank + 2) % size);
    for k in 0..4 {
        from.store_vector::<u32>(t * 16 + 4 * k, word(seed, i as u32, k));
    }
    cluster::sync();
    for round in 0..ROUNDS {
        match round {
            0 => pass_on::<u8>(next, after, t),
            1 => pass_on::<u16>(next, after, t),
            2 => pass_on::<u32>(next, after, t),
            3 => pass_on::<u64>(next, after, t),
            _ => pass_on::<Vec4>(next, after, t),
        }
        cluster::arrive();
        let mut value = word(seed, i as u32, 16 + round);
        cluster::wait();
        // The tile that came is the one to take in the next round, with a word of this thread's.
        for k in 0..4 {
            let came = to.load_vector::<u32>(t * 16 + 4 * k);
            from.store_vector::<u32>(t * 16 + 4 * k, came.rotate_left(k + 1));
            value = mix((value as u64) << 32 | came as u64) as u32;
        }
        out.store(i * ROUNDS as usize + round as usize, value);
        cluster::sync();
    }
}

/// `ring` in clusters of two.
#[kernel(system = probe, min_sm = 90, cluster = 2, max_threads = 128)]
pub fn ring_2(out: GlobalMut<u32>, seed: u32) {
    ring(out, seed);
}

/// `ring` in clusters of four.
#[kernel(system = probe, args = ring_2, min_sm = 90, cluster = 4, max_threads = 128)]
pub fn ring_4(out: GlobalMut<u32>, seed: u32) {
    ring(out, seed);
}

/// `ring` in clusters of eight.
#[kernel(system = probe, args = ring_2, min_sm = 90, cluster = 8, max_threads = 128)]
pub fn ring_8(out: GlobalMut<u32>, seed: u32) {
    ring(out, seed);
}

/// Words that all threads of a cluster update, in the memory of each of its blocks.
pub const CONTENDED: u32 = 6;
/// Words that each thread updates alone, in the memory of the next block, and as many values before.
pub const OWN: u32 = 10;

/// The shared memory of the updates.
pub struct Words<T> {
    words: Shared<T>,
    /// Its size.
    pub bytes: u32,
}

/// Lays out the shared memory of the updates.
pub const fn words<T: Integer>() -> Words<T> {
    let mut plan = SharedPlan::new();
    // Not at the start of shared memory.
    let _: Shared<u32> = plan.array(1);
    let words = plan.array(CONTENDED + THREADS * OWN);
    Words { words, bytes: plan.bytes() }
}

/// Operand `k` of thread `i`.
#[inline(always)]
fn operand<T: Integer>(seed: u32, i: usize, k: u64) -> T {
    T::of(mix((seed as u64) << 40 ^ (i as u64) << 8 ^ k))
}

/// Atomics on the words of other blocks: all threads of a cluster update `CONTENDED` words of each block,
/// whose result no order changes, then each its own in the next block, and what they held.
#[inline(always)]
fn update<T: Integer + ClusterWord>(out: GlobalMut<T>, seed: u32) {
    let (t, i, words) = (thread::thread_idx_x(), thread::index_1d(), words::<T>().words);
    let (rank, size, block) = (cluster::rank(), cluster::size(), thread::block_idx_x());
    let threads = thread::block_dim_x();
    let own = CONTENDED + t * OWN;
    if t < CONTENDED {
        words.store(t, operand(seed, t as usize, 99));
    }
    for k in 0..OWN {
        words.store(own + k, operand(seed, i, 100 + k as u64));
    }
    cluster::sync();
    for other in 0..size {
        let (words, k) = (words.of_block(other), 8 * other as u64);
        words.atomic_add(0, operand(seed, i, k));
        words.atomic_min(1, operand(seed, i, k + 1));
        words.atomic_max(2, operand(seed, i, k + 2));
        words.atomic_and(3, operand(seed, i, k + 3));
        words.atomic_or(4, operand(seed, i, k + 4));
        words.atomic_xor(5, operand(seed, i, k + 5));
    }
    let next = words.of_block((rank + 1) % size);
    let block_words = (CONTENDED + threads * 2 * OWN) as usize;
    let before = block as usize * block_words + (CONTENDED + threads * OWN + t * OWN) as usize;
    out.store(before, next.atomic_add(own, operand(seed, i, 80)));
    out.store(before + 1, next.atomic_min(own + 1, operand(seed, i, 81)));
    out.store(before + 2, next.atomic_max(own + 2, operand(seed, i, 82)));
    out.store(before + 3, next.atomic_and(own + 3, operand(seed, i, 83)));
    out.store(before + 4, next.atomic_or(own + 4, operand(seed, i, 84)));
    out.store(before + 5, next.atomic_xor(own + 5, operand(seed, i, 85)));
    out.store(before + 6, next.atomic_exchange(own + 6, operand(seed, i, 86)));
    // One comparison that holds, one that does not.
    let held = next.atomic_load(own + 7);
    out.store(before + 7, next.atomic_cas(own + 7, held, operand(seed, i, 87)));
    out.store(before + 8, next.atomic_cas(own + 8, operand(seed, i, 88), operand(seed, i, 89)));
    next.atomic_store(own + 9, operand(seed, i, 90));
    out.store(before + 9, next.atomic_load(own + 9));
    cluster::sync();
    let first = block as usize * block_words;
    if t < CONTENDED {
        out.store(first + t as usize, words.load(t));
    }
    for k in 0..OWN {
        out.store(first + (own + k) as usize, words.load(own + k));
    }
}

/// `update` in clusters of two.
#[kernel(system = probe, instances(u32, i32), min_sm = 90, cluster = 2, max_threads = 128)]
pub fn update_2<T: Integer + ClusterWord>(out: GlobalMut<T>, seed: u32) {
    update(out, seed);
}

/// `update` in clusters of four.
#[kernel(system = probe, args = update_2, instances(u32), min_sm = 90, cluster = 4, max_threads = 128)]
pub fn update_4<T: Integer + ClusterWord>(out: GlobalMut<T>, seed: u32) {
    update(out, seed);
}

/// `update` in clusters of eight.
#[kernel(system = probe, args = update_2, instances(i32), min_sm = 90, cluster = 8, max_threads = 128)]
pub fn update_8<T: Integer + ClusterWord>(out: GlobalMut<T>, seed: u32) {
    update(out, seed);
}
