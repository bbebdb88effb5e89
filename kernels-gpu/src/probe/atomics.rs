//! Read-modify-writes.

use super::mix;
use simt::atomic::AtomicWord;
use simt::{GlobalMut, Shared, SharedPlan, kernel, thread};

/// Words that all threads update, at the start of the output.
pub const CONTENDED: usize = 6;
/// Words that each thread updates alone, and as many values before.
pub const OWN: usize = 10;
/// Words of output for each thread.
pub const WORDS: usize = 2 * OWN;

/// An integer of the probe.
pub trait Integer: AtomicWord + Send + Sync {
    /// One of any bits.
    fn of(bits: u64) -> Self;
}

impl Integer for u32 {
    #[inline(always)]
    fn of(bits: u64) -> Self {
        bits as u32
    }
}

impl Integer for i32 {
    #[inline(always)]
    fn of(bits: u64) -> Self {
        bits as i32
    }
}

impl Integer for u64 {
    #[inline(always)]
    fn of(bits: u64) -> Self {
        bits
    }
}

/// Operand `k` of thread `i`.
#[inline(always)]
fn operand<T: Integer>(seed: u32, i: usize, k: u64) -> T {
    T::of(mix((seed as u64) << 40 ^ (i as u64) << 8 ^ k))
}

/// All threads of the grid update `CONTENDED` words, whose result no order changes; then each updates its own
/// words and notes what they held. The words hold what the output held before, the same everywhere.
#[kernel(system = probe, instances(u32, i32, u64))]
pub fn global<T: Integer>(out: GlobalMut<T>, seed: u32) {
    let i = thread::index_1d();
    out.atomic_add(0, operand(seed, i, 0));
    out.atomic_min(1, operand(seed, i, 1));
    out.atomic_max(2, operand(seed, i, 2));
    out.atomic_and(3, operand(seed, i, 3));
    out.atomic_or(4, operand(seed, i, 4));
    out.atomic_xor(5, operand(seed, i, 5));

    let own = CONTENDED + i * WORDS;
    let before = own + OWN;
    out.store(before, out.atomic_add(own, operand(seed, i, 10)));
    out.store(before + 1, out.atomic_min(own + 1, operand(seed, i, 11)));
    out.store(before + 2, out.atomic_max(own + 2, operand(seed, i, 12)));
    out.store(before + 3, out.atomic_and(own + 3, operand(seed, i, 13)));
    out.store(before + 4, out.atomic_or(own + 4, operand(seed, i, 14)));
    out.store(before + 5, out.atomic_xor(own + 5, operand(seed, i, 15)));
    out.store(before + 6, out.atomic_exchange(own + 6, operand(seed, i, 16)));
    // One comparison that holds, one that does not.
    let held = out.load(own + 7);
    out.store(before + 7, out.atomic_cas(own + 7, held, operand(seed, i, 17)));
    out.store(before + 8, out.atomic_cas(own + 8, operand(seed, i, 18), operand(seed, i, 19)));
    out.atomic_store(own + 9, operand(seed, i, 20));
    out.store(before + 9, out.atomic_load(own + 9));
}

/// The most threads of a block of the shared probe.
pub const SHARED_THREADS: u32 = 128;

/// The shared probe's memory.
pub struct Layout<T> {
    words: Shared<T>,
    /// Its size.
    pub bytes: u32,
}

/// Lays out the shared probe's memory.
pub const fn layout<T: Integer>() -> Layout<T> {
    let mut plan = SharedPlan::new();
    // Not at the start of shared memory.
    let _: Shared<u32> = plan.array(1);
    let words = plan.array(CONTENDED as u32 + SHARED_THREADS * OWN as u32);
    Layout { words, bytes: plan.bytes() }
}

/// The same on shared memory: each block writes its contended words, then each thread its own and what they
/// held.
#[kernel(system = probe, instances(u32, i32, u64), max_threads = 128)]
pub fn shared<T: Integer>(out: GlobalMut<T>, seed: u32) {
    let (i, t) = (thread::index_1d(), thread::thread_idx_x());
    let words = layout::<T>().words;
    let first = thread::block_idx_x() as usize * (CONTENDED + thread::block_dim_x() as usize * WORDS);
    if t == 0 {
        for k in 0..CONTENDED as u32 {
            words.store(k, operand(seed, k as usize, 30));
        }
    }
    let mine = CONTENDED as u32 + t * OWN as u32;
    for k in 0..OWN as u32 {
        words.store(mine + k, operand(seed, i, 40 + k as u64));
    }
    thread::sync_threads();
    words.atomic_add(0, operand(seed, i, 0));
    words.atomic_min(1, operand(seed, i, 1));
    words.atomic_max(2, operand(seed, i, 2));
    words.atomic_and(3, operand(seed, i, 3));
    words.atomic_or(4, operand(seed, i, 4));
    words.atomic_xor(5, operand(seed, i, 5));

    let own = first + CONTENDED + t as usize * WORDS;
    let before = own + OWN;
    out.store(before, words.atomic_add(mine, operand(seed, i, 10)));
    out.store(before + 1, words.atomic_min(mine + 1, operand(seed, i, 11)));
    out.store(before + 2, words.atomic_max(mine + 2, operand(seed, i, 12)));
    out.store(before + 3, words.atomic_and(mine + 3, operand(seed, i, 13)));
    out.store(before + 4, words.atomic_or(mine + 4, operand(seed, i, 14)));
    out.store(before + 5, words.atomic_xor(mine + 5, operand(seed, i, 15)));
    out.store(before + 6, words.atomic_exchange(mine + 6, operand(seed, i, 16)));
    let held = words.load(mine + 7);
    out.store(before + 7, words.atomic_cas(mine + 7, held, operand(seed, i, 17)));
    out.store(before + 8, words.atomic_cas(mine + 8, operand(seed, i, 18), operand(seed, i, 19)));
    words.atomic_store(mine + 9, operand(seed, i, 20));
    out.store(before + 9, words.atomic_load(mine + 9));
    for k in 0..OWN as u32 {
        out.store(own + k as usize, words.load(mine + k));
    }
    thread::sync_threads();
    if t < CONTENDED as u32 {
        out.store(first + t as usize, words.load(t));
    }
}
