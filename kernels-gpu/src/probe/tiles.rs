//! Tensor copies: boxes of every rank and swizzle, as they lie in shared memory, and back.

use super::word;
use simt::{Global, GlobalMut, Mbarrier, Shared, SharedPlan, Swizzle, TensorMap, bulk, kernel, thread};

/// Coordinates of a box, of which a kernel takes its rank's.
pub const COORDINATES: u32 = 5;
/// Threads of a block.
pub const THREADS: u32 = 64;

/// Shared memory of both kernels.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// A box, at a place that suits every swizzle.
    pub tile: Shared<u32>,
    /// The barrier that counts its bytes.
    pub full: Shared<Mbarrier>,
    /// All of it.
    pub bytes: u32,
}

/// Where things lie, for boxes of so many words.
pub const fn layout(words: u32) -> Layout {
    let mut plan = SharedPlan::new();
    let (tile, full) = (plan.tile(words, Swizzle::B128), plan.array(1));
    Layout { tile, full, bytes: plan.bytes() }
}

/// The coordinates of a block's box.
#[inline(always)]
fn corner<const RANK: usize>(corners: Global<i32>, block: u32) -> [i32; RANK] {
    let mut corner = [0; RANK];
    let mut i = 0;
    while i < RANK {
        corner[i] = corners.load((block * COORDINATES) as usize + i);
        i += 1;
    }
    corner
}

/// Each block brings a box of `words` words of the tensor of map 1 to shared memory, twice, and writes out
/// the words as they lie there: `out` \[blocks · words\].
#[kernel(system = probe, min_sm = 90, max_threads = 64, instances(1, 2, 3, 4, 5))]
pub fn boxes<const RANK: usize>(
    maps: Global<TensorMap>,
    corners: Global<i32>,
    out: GlobalMut<u32>,
    words: u32,
) {
    let Layout { tile, full, .. } = layout(words);
    let (t, block) = (thread::thread_idx_x(), thread::block_idx_x());
    if t == 0 {
        full.init(0, 1);
        maps.acquire(1);
        maps.prefetch_map(1);
    }
    // What is there before shows what a copy leaves out.
    let mut at = t;
    while at < words {
        tile.store(at, !at);
        at += THREADS;
    }
    bulk::fence_shared();
    thread::sync_threads();
    for round in 0..2 {
        if t == 0 {
            full.arrive_and_expect(0, 4 * words);
            tile.copy_tile(0, maps, 1, corner::<RANK>(corners, block), full, 0);
        }
        full.wait(0, round);
        // The second copy may not come ahead of what others have waited for.
        thread::sync_threads();
    }
    let mut at = t;
    while at < words {
        out.store((block * words + at) as usize, tile.load(at));
        at += THREADS;
    }
}

/// Each block writes `words` words of its own to shared memory and copies them, as a box that lies there, to
/// the tensor of map 0. The boxes of two blocks do not overlap.
#[kernel(system = probe, min_sm = 90, max_threads = 64, instances(1, 2, 3, 4, 5))]
pub fn boxes_back<const RANK: usize>(maps: Global<TensorMap>, corners: Global<i32>, words: u32, seed: u32) {
    let Layout { tile, .. } = layout(words);
    let (t, block) = (thread::thread_idx_x(), thread::block_idx_x());
    let mut at = t;
    while at < words {
        tile.store(at, word(seed, block * words + at, 0));
        at += THREADS;
    }
    bulk::fence_shared();
    thread::sync_threads();
    if t == 0 {
        maps.acquire(0);
        maps.copy_tile(0, corner::<RANK>(corners, block), tile, 0);
        bulk::commit();
        bulk::wait::<0>();
    }
}
