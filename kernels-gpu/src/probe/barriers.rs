//! Block barriers.

use super::word;
use simt::{GlobalMut, Shared, SharedPlan, kernel, thread};

/// Rounds of the probe.
pub const ROUNDS: u32 = 12;
/// Words that each thread writes.
pub const WORDS: u32 = 4 * ROUNDS;

/// The probe's shared memory: one word for each of 1024 threads.
pub struct Layout {
    tile: Shared<u32>,
    /// Its size.
    pub bytes: u32,
}

/// Lays out the probe's shared memory.
pub const fn layout() -> Layout {
    let mut plan = SharedPlan::new();
    let tile = plan.array(1024);
    Layout { tile, bytes: plan.bytes() }
}

/// Threads hand words round through shared memory, and count, and, or predicates that nobody, one thread,
/// some or all fulfil.
#[kernel(system = probe)]
pub fn barriers(out: GlobalMut<u32>, seed: u32) {
    let (t, threads) = (thread::thread_idx_x(), thread::block_dim_x());
    let tile = layout().tile;
    let first = (thread::block_idx_x() * threads + t) * WORDS;
    let mut value = word(seed, t, 0);
    for round in 0..ROUNDS {
        tile.store(t, value);
        thread::sync_threads();
        value = value.rotate_left(7) ^ tile.load((t + 1 + round) % threads);
        let random = word(seed, thread::block_idx_x() * threads + t, round + 1);
        // A predicate may be any non-zero word, this one with no low bit.
        let predicate = match round % 4 {
            0 => random & 0x8000_0000,
            1 => 0x8000_0000,
            2 => (t == threads / 2) as u32 * 0x100,
            _ => 0,
        };
        let at = (first + 4 * round) as usize;
        out.store(at, value);
        out.store(at + 1, thread::sync_threads_count(predicate));
        out.store(at + 2, thread::sync_threads_and(predicate));
        out.store(at + 3, thread::sync_threads_or(predicate));
    }
}

/// Words that each consumer writes.
pub const ROUNDS_OF_STAGES: u32 = 9;

/// Half of a block's warps fill two tiles in turn, the other half empties them: barriers with a number say
/// when a tile is full (1, 2) and when it is empty (3, 4). A block has an even number of whole warps.
#[kernel(system = probe)]
pub fn stages(out: GlobalMut<u32>, seed: u32) {
    let (t, threads) = (thread::thread_idx_x(), thread::block_dim_x());
    let (half, tile, block) = (threads / 2, layout().tile, thread::block_idx_x());
    if t < half {
        for round in 0..ROUNDS_OF_STAGES {
            let stage = round % 2;
            if round >= 2 {
                thread::named_barrier_sync(3 + stage, threads);
            }
            tile.store(stage * half + t, word(seed, block * half + t, round));
            thread::named_barrier_arrive(1 + stage, threads);
        }
    } else {
        let mut value = 0u32;
        for round in 0..ROUNDS_OF_STAGES {
            let (stage, own) = (round % 2, t - half);
            thread::named_barrier_sync(1 + stage, threads);
            value = value.rotate_left(5) ^ tile.load(stage * half + (own + 1 + round) % half);
            out.store(((block * half + own) * ROUNDS_OF_STAGES + round) as usize, value);
            if round + 2 < ROUNDS_OF_STAGES {
                thread::named_barrier_arrive(3 + stage, threads);
            }
        }
    }
}
