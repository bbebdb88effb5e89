//! # What it is for
//! Keys and values of all tokens are in the host's memory; the GPU has a **staging pool**, in which attention
//! reads what a step has chosen. [`place`](fn@place) says where each chosen block is or comes to be,
//! [`fetch`](fn@super::fetch) brings what is not there yet.
//!
//! # Which blocks are staged
//! Of each sequence and KV head, gather-blocks b of n:
//!
//! ```text
//! near, b >= n − local:   slot b mod local                 written as tokens come, never fetched
//! far, the others:        slot local + i, i < slots        least recently used
//! ```
//!
//! A near block is the only one of its slot, since the last `local` blocks differ modulo `local`. A block
//! that stops being near is full and whole in the host's memory; if it is chosen then, it is fetched like any
//! other. Of the far slots a step keeps those whose blocks are in its list (hits), and gives those of the
//! blocks that were not chosen for the longest time to the ones that are missing. Blocks that were last
//! chosen by the same step go in their order, the lowest first. So what is hit and what is missed depends on
//! the lists alone. A list is whole in the pool if there are as many far slots as it has far blocks: k + 1 at
//! the most, the sink and the distant ones.
//!
//! # Layout
//! The staging pool is [sequences · (local + slots) · block / 16, kv_heads, 16, D], keys and values: tile i
//! of slot s of a sequence and KV head is entry `((sequence · (local + slots) + s) · block / 16 + i) ·
//! kv_heads + head` of it seen as [blocks · kv_heads, 1, 16, D].
//!
//! `directory` [sequences, kv_heads, blocks + 2 · slots]: of each gather-block the far slot that holds it, of
//! each far slot its block (0xffffffff is none in both), and the far slots in order, the one that was used
//! the longest time ago first. The last are a permutation at any time.
//!
//! # Bytes
//! 8 bytes a far slot, and 4 a gather-block, whose bounds are 4·D. A step reads and writes the order once, 8
//! bytes a slot, and touches up to four words a block that it chooses.
//!
//! # Work split
//! Grid (kv_heads, sequences): a thread block has the directory of a sequence and KV head to itself. Ranks
//! are ballots and prefix sums, so the result does not depend on the order of threads.

use super::rule::{Extent, Rule};
use crate::attention::BLOCK_TOKENS;
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, bits, kernel, thread, unroll};

/// Threads of a block of [`place`](fn@place).
pub const PLACE_THREADS: u32 = 256;
const WARPS: u32 = PLACE_THREADS / 32;
/// The most far slots of a sequence and KV head: those that this step uses are bits in shared memory.
pub const MOST_SLOTS: u32 = 1 << 16;
/// What is not there.
const NONE: u32 = u32::MAX;

/// The extents of a staging pool, and of the steps that use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct StagingShape {
    /// What is kept.
    pub rule: Rule,
    /// KV heads.
    pub kv_heads: u32,
    /// Entries of a row of the cache's block table.
    pub max_blocks: u32,
    /// Gather-blocks that a list has room for.
    pub most: u32,
    /// Far slots of a sequence and KV head, at most [`MOST_SLOTS`].
    pub slots: u32,
    /// D: 64 or 128.
    pub head_dim: u32,
}

impl StagingShape {
    /// Gather-blocks that a sequence may have.
    #[inline(always)]
    pub fn blocks(self) -> u32 {
        bits::div_u32(self.max_blocks + self.rule.entries() - 1, self.rule.entries())
    }

    /// Words of the directory of a sequence and KV head.
    #[inline(always)]
    pub fn words(self) -> usize {
        self.blocks() as usize + 2 * self.slots as usize
    }

    /// The first gather-block of `extent` that is near.
    #[inline(always)]
    pub fn near(self, extent: Extent) -> u32 {
        extent.blocks.saturating_sub(self.rule.local)
    }

    /// How many blocks of a list are far: its first ones.
    #[inline(always)]
    pub fn far(self, extent: Extent) -> u32 {
        extent.kept_blocks() - (extent.blocks - self.near(extent))
    }

    /// The slot of a near block.
    #[inline(always)]
    pub fn near_slot(self, block: u32) -> u32 {
        bits::rem_u32(block, self.rule.local)
    }

    /// The entry of tile `tile` of a sequence's slot `slot`.
    #[inline(always)]
    pub fn entry(self, sequence: u32, head: u32, slot: u32, tile: u32) -> u32 {
        let slots = self.rule.local + self.slots;
        ((sequence * slots + slot) * self.rule.entries() + tile) * self.kv_heads + head
    }
}

/// Shared memory of a block.
#[derive(Clone, Copy)]
struct Layout {
    /// A bit for each far slot whose block this step has chosen.
    used: Shared<u32>,
    /// What warps tell each other.
    warps: Shared<u32>,
    bytes: u32,
}

const fn layout() -> Layout {
    let mut plan = SharedPlan::new();
    let used = plan.array(MOST_SLOTS / 32);
    let warps = plan.array(WARPS);
    Layout { used, warps, bytes: plan.bytes() }
}

/// Shared memory of [`place`](fn@place).
pub const fn place_bytes() -> u32 {
    layout().bytes
}

/// How many threads before this one say `yes`, and how many of the whole block, which calls it; its barriers
/// part what is before from what is behind.
#[simt::device]
fn rank(warps: Shared<u32>, yes: bool) -> [u32; 2] {
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let ballot = warp::warp_vote_ballot(FULL_MASK, yes);
    if lane == 0 {
        warps.store(warp, ballot.count_ones());
    }
    thread::sync_threads();
    let (mut before, mut all) = ((ballot & ((1 << lane) - 1)).count_ones(), 0);
    unroll!(for w in 0..8 {
        let count = warps.load(w as u32);
        before += if (w as u32) < warp { count } else { 0 };
        all += count;
    });
    thread::sync_threads();
    [before, all]
}

/// Finds or makes a slot for each block of the lists that [`select`](fn@super::select) wrote, and writes the
/// block table over the staging pool.
///
/// `list` [sequences, kv_heads, most] and `entries` [sequences · kv_heads, most · block / 16] are those of
/// `select`; `lengths` \[sequences\]; `directory` as above. Written: `at` [sequences, kv_heads, most], the
/// far slot of each far block of the list; `missed` [sequences, kv_heads, most], the places in the list of
/// the blocks that are to be fetched, and `misses` [sequences, kv_heads], how many; `staged` like `entries`;
/// `tally` [sequences, kv_heads, 4], far blocks that were there and that were not, of all steps and of this
/// one. Grid (kv_heads, sequences).
#[kernel(system = gather, max_threads = 256, overlaps)]
pub fn place(
    list: Global<u32>,
    entries: Global<u32>,
    lengths: Global<u32>,
    directory: GlobalMut<u32>,
    at: GlobalMut<u32>,
    missed: GlobalMut<u32>,
    misses: GlobalMut<u32>,
    staged: GlobalMut<u32>,
    tally: GlobalMut<u64>,
    shape: StagingShape,
) {
    let (head, sequence, t) = (thread::block_idx_x(), thread::block_idx_y(), thread::thread_idx_x());
    let row = (sequence * shape.kv_heads + head) as usize;
    let rule = shape.rule;
    let extent = Extent::of(lengths.load(sequence as usize).min(shape.max_blocks * BLOCK_TOKENS), rule);
    let far = shape.far(extent);
    let slot_of = row * shape.words();
    let held = slot_of + shape.blocks() as usize;
    let order = held + shape.slots as usize;
    let first = row * shape.most as usize;
    let Layout { used, warps, .. } = layout();
    let mut missing = 0;
    if far > 0 {
        let mut word = t;
        while word < shape.slots.div_ceil(32) {
            used.store(word, 0);
            word += PLACE_THREADS;
        }
        thread::sync_threads();
        let mut start = 0;
        while start < far {
            let i = start + t;
            let mut slot = 0;
            if i < far {
                let block = list.load(first + i as usize);
                slot = directory.load(slot_of + block as usize);
            }
            let misses = i < far && slot == NONE;
            if i < far && !misses {
                used.atomic_or(slot / 32, 1 << (slot % 32));
                at.store(first + i as usize, slot);
            }
            let [before, all] = rank(warps, misses);
            if misses {
                missed.store(first + (missing + before) as usize, i);
            }
            missing += all;
            start += PLACE_THREADS;
        }
        thread::sync_threads();
        // Slots that are not used go to the front in their order, but for the first of them, which are taken.
        // None goes behind where it was, so what is overwritten has been read.
        let (mut start, mut unused) = (0, 0);
        while start < shape.slots {
            let i = start + t;
            let mut slot = 0;
            let mut free = false;
            if i < shape.slots {
                slot = directory.load(order + i as usize);
                free = used.load(slot / 32) >> (slot % 32) & 1 == 0;
            }
            let [before, all] = rank(warps, free);
            let place = unused + before;
            if free && place < missing {
                let i = missed.load(first + place as usize) as usize;
                let (old, block) = (directory.load(held + slot as usize), list.load(first + i));
                if old != NONE {
                    directory.store(slot_of + old as usize, NONE);
                }
                directory.store(held + slot as usize, block);
                directory.store(slot_of + block as usize, slot);
                at.store(first + i, slot);
            } else if free {
                directory.store(order + (place - missing) as usize, slot);
            }
            unused += all;
            start += PLACE_THREADS;
        }
        thread::sync_threads();
        let mut i = t;
        while i < far {
            directory.store(order + (shape.slots - far + i) as usize, at.load(first + i as usize));
            i += PLACE_THREADS;
        }
    }
    let per_block = rule.entries();
    let width = shape.most * per_block;
    let mut i = t;
    while i < width {
        let to = row * width as usize + i as usize;
        let mut entry = NONE;
        if entries.load(to) != NONE {
            let listed = bits::div_u32(i, per_block);
            let slot = if listed < far {
                rule.local + at.load(first + listed as usize)
            } else {
                shape.near_slot(list.load(first + listed as usize))
            };
            entry = shape.entry(sequence, head, slot, i - listed * per_block);
        }
        staged.store(to, entry);
        i += PLACE_THREADS;
    }
    if t == 0 {
        misses.store(row, missing);
        let step = [far - missing, missing];
        unroll!(for i in 0..2 {
            tally.store(4 * row + i, tally.load(4 * row + i) + step[i] as u64);
            tally.store(4 * row + 2 + i, step[i] as u64);
        });
    }
}
