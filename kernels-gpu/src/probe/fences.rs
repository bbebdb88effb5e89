//! Blocks that meet through fences and atomics.

use super::word;
use simt::{GlobalMut, Shared, SharedPlan, kernel, thread, warp};

/// Words of each block's part.
pub const PART: u32 = 64;

/// The probe's shared memory: the word by which a block hears that it is the last.
pub struct Layout {
    last: Shared<u32>,
    /// Its size.
    pub bytes: u32,
}

/// Lays out the probe's shared memory.
pub const fn layout() -> Layout {
    let mut plan = SharedPlan::new();
    let last = plan.array(1);
    Layout { last, bytes: plan.bytes() }
}

/// Every block writes a part; the block that finishes last reads all parts and folds them, in the order of
/// the blocks. `done` is 0 before. The fence is the device's; with `kind` 1 the system's, with 2 that of
/// sequential consistency.
#[kernel(system = probe, max_threads = 64)]
pub fn last_block(parts: GlobalMut<u32>, done: GlobalMut<u32>, folded: GlobalMut<u32>, seed: u32, kind: u32) {
    let (t, block) = (thread::thread_idx_x(), thread::block_idx_x());
    let last = layout().last;
    parts.store((block * PART + t) as usize, word(seed, block * PART + t, 0));
    match kind {
        1 => thread::system_fence(),
        2 => thread::device_fence_sc(),
        _ => thread::device_fence(),
    }
    thread::sync_threads();
    if t == 0 {
        // The barrier made the block's parts known to this thread; its own fence passes them on.
        thread::device_fence();
        last.store(0, done.atomic_add(0, 1));
    }
    thread::sync_threads();
    if last.load(0) + 1 == thread::grid_dim_x() {
        thread::device_fence();
        let mut value = t;
        for other in 0..thread::grid_dim_x() {
            value = value.rotate_left(9) ^ parts.load((other * PART + t) as usize);
        }
        folded.store(t as usize, value);
    }
}

/// The exchange probe's shared memory: a word for each thread and a counter for each warp.
pub struct Handover {
    words: Shared<u32>,
    arrived: Shared<u32>,
    /// Its size.
    pub bytes: u32,
}

/// Lays out the exchange probe's shared memory.
pub const fn handover() -> Handover {
    let mut plan = SharedPlan::new();
    let (words, arrived) = (plan.array(1024), plan.array(32));
    Handover { words, arrived, bytes: plan.bytes() }
}

/// Within a warp: every lane writes, fences for its block, and counts itself in; the lane that comes last
/// folds what all wrote.
#[kernel(system = probe)]
pub fn last_lane(out: GlobalMut<u32>, seed: u32) {
    let (t, lane) = (thread::thread_idx_x(), warp::lane_id());
    let (shared, own) = (handover(), t / 32);
    if lane == 0 {
        shared.arrived.store(own, 0);
    }
    warp::sync_warp(warp::FULL_MASK);
    shared.words.store(t, word(seed, thread::index_1d() as u32, 0));
    thread::block_fence();
    if shared.arrived.atomic_add(own, 1) == 31 {
        thread::block_fence();
        let mut value = 0u32;
        for other in 0..32 {
            value = value.rotate_left(3) ^ shared.words.load(own * 32 + other);
        }
        out.store(thread::index_1d() / 32, value);
    }
}
