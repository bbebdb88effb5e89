//! What stays near: originals in the GPU's memory, beside those in the host's.
//!
//! # The near pool
//! Tiles of 16 · D elements, `[key slots][value slots][fresh keys][fresh values]`:
//! - **slots** hold originals that steps have used: the pair (block, KV head) in slot `pair mod slots`, keys
//!   and values apart. Of which pair a slot is, its tag says.
//! - **fresh** blocks are those that are being filled: one for each sequence, and a few for prefill. Their
//!   rows are in the originals as well, but a step reads its trailing blocks here, and so does
//!   [`quantize_block`](fn@super::quantize_block) when they are full. No two sequences share one, so nothing
//!   evicts it, and no scratch is needed for it.
//!
//! # Sequences that are resident
//! As long as the slots hold all originals that there are, a step has nothing to gain from quantized blocks:
//! dense attention over the slots takes less time than the pass over tiles, and is exact. So a cache may
//! begin with *resident* sequences: the first `resident` blocks of each have slots of their own, keys' and
//! values' [sequences, resident blocks, kv_heads], which are filled as tokens come, beside the originals and
//! fresh blocks. Meanwhile no step claims a slot and no slot has a tag. Who drives the cache ends that before
//! a sequence grows beyond it: then the slots are for what steps use, as above.
//!
//! # The directory
//! u64 words: [`HEADER`] of them, then for each slot, keys' before values', a claim and a tag.
//!
//! # Admission
//! What a step reads from the originals goes into its slot on the way: [`mark`](fn@super::mark), before
//! `replace`, settles who. Every block that the step wants and that is in its slot claims the slot with 0,
//! every other one with its place in the [`order`] of the step's blocks, counted from 1; the smallest number
//! wins. So a block that is used now stays, else the first that missed comes in, whatever order the threads
//! run in. `replace` finds the claims settled: a block is read from its slot only where a hit has claimed it,
//! and written to its slot only where it has won itself; both never happen to one slot. The bits of attention
//! are those of the originals either way.
//!
//! A second pass of a step ([`carried`](mod@super::carried)) has a round of claims of its own, as if it were
//! one more step.
//!
//! A block that is promoted on sight ([`sight`](mod@super::carried::sight)) has no claim and comes into no
//! slot. It is read from its slot where the tag is its own and no miss has claimed the slot.
//!
//! Where a list is carried, [`mark`](fn@super::mark) comes last: what it settles and counts is of the list
//! that the next step's [`carry`](fn@super::carry) uses, which reads and brings tiles as `replace` does.
//!
//! Claims carry the step's number, the larger the smaller, in their high half. So those of earlier steps lose
//! against any of this one, and nobody has to clear them.

use crate::attention::BLOCK_TOKENS;
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Pod, Zeroable, bits, thread, unroll};

/// How much is near.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Scratch {
    /// Slots for keys; 0 for none.
    pub key_slots: u32,
    /// Slots for values; 0 for none.
    pub value_slots: u32,
    /// Fresh tiles of keys, and as many of values; 0: trailing blocks are read from the originals.
    pub fresh: u32,
    /// 1: steps claim slots. 0: what the tags say stays.
    pub admits: u32,
}

impl Scratch {
    /// A tag of no pair.
    pub const EMPTY: u32 = u32::MAX;

    /// Nothing is near.
    pub const NONE: Scratch = Scratch { key_slots: 0, value_slots: 0, fresh: 0, admits: 0 };

    /// Whether there is a directory.
    #[inline(always)]
    pub const fn claims(self) -> bool {
        self.admits | self.key_slots | self.value_slots | self.fresh != 0
    }

    /// Tiles of the near pool.
    #[inline(always)]
    pub const fn tiles(self) -> u64 {
        self.key_slots as u64 + self.value_slots as u64 + 2 * self.fresh as u64
    }

    /// The tile of a fresh pair's keys (`kind` 0) or values (1).
    #[inline(always)]
    pub const fn fresh_tile(self, kind: u32, pair: u32) -> u32 {
        self.key_slots + self.value_slots + kind * self.fresh + pair
    }

    /// The slot that a pair's keys (`kind` 0) or values (1) may have, or [`EMPTY`](Self::EMPTY).
    #[inline(always)]
    pub fn slot_of(self, kind: u32, pair: u32) -> u32 {
        let (first, slots) = if kind == 0 { (0, self.key_slots) } else { (self.key_slots, self.value_slots) };
        if slots != 0 { first + bits::rem_u32(pair, slots) } else { Scratch::EMPTY }
    }

    /// Words of the directory.
    pub const fn words(self) -> u64 {
        HEADER as u64 + 2 * (self.key_slots as u64 + self.value_slots as u64)
    }

    /// Where a slot's claim is in the directory; its tag follows. Values' slots count from `key_slots`.
    #[inline(always)]
    pub const fn word(slot: u32) -> usize {
        HEADER as usize + 2 * slot as usize
    }
}

/// Words of a directory before its slots.
pub const HEADER: u32 = 16;
/// The step that is under way, from `mark` on counted from 1.
pub const STEP: usize = 0;
/// Blocks of `mark` that are done; 0 between launches.
const ARRIVED: usize = 1;
/// [`Traffic`] of the step so far; 0 between steps.
const RUNNING: usize = 2;
/// [`Traffic`] of the last step.
pub const LAST: usize = 6;
/// [`Traffic`] of all steps.
pub const TOTAL: usize = 10;

/// Tiles that were used in place of quantized ones, and where they came from. A tile is 32·D bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Traffic {
    /// Keys found in the scratch.
    pub key_hits: u64,
    /// Keys read from the originals.
    pub key_misses: u64,
    /// Values found in the scratch.
    pub value_hits: u64,
    /// Values read from the originals.
    pub value_misses: u64,
}

impl Traffic {
    /// Bytes read from the originals.
    pub const fn bytes(self, head_dim: u32) -> u64 {
        (self.key_misses + self.value_misses) * 2 * (BLOCK_TOKENS * head_dim) as u64
    }
}

/// A claim's high half.
#[inline(always)]
pub fn stamp(step: u64) -> u64 {
    (!(step as u32) as u64) << 32
}

/// Where `replace` finds a listed block: tiles of the near pool.
#[derive(Clone, Copy)]
pub struct Found {
    /// The tile that holds it, or [`Scratch::EMPTY`]: the originals do.
    pub tile: u32,
    /// The slot that it shall be written to, or [`Scratch::EMPTY`].
    pub admit: u32,
}

impl Found {
    /// A fresh pair's keys (`kind` 0) or values (1).
    #[inline(always)]
    pub fn fresh(scratch: Scratch, kind: u32, pair: u32) -> Self {
        let tile = if scratch.fresh == 0 { Scratch::EMPTY } else { scratch.fresh_tile(kind, pair) };
        Found { tile, admit: Scratch::EMPTY }
    }

    /// Writes a block that has won its slot there: `write` writes it from an element on. A warp's work.
    #[simt::device]
    pub fn bring(
        self,
        directory: GlobalMut<u64>,
        pair: u32,
        elements: usize,
        lane: u32,
        write: impl FnOnce(usize),
    ) {
        if self.admit != Scratch::EMPTY {
            write(self.admit as usize * elements);
            admit(directory, self.admit, pair, lane);
        }
    }
}

/// Looks a pair up: its keys, and its values. A warp's work; `entry` is the block's [`order`].
#[simt::device]
pub fn find(directory: GlobalMut<u64>, scratch: Scratch, pair: u32, entry: u32, lane: u32) -> [Found; 2] {
    let slots = [scratch.key_slots, scratch.value_slots];
    let mut own = [Scratch::EMPTY; 2];
    unroll!(for kind in 0..2 {
        if slots[kind] != 0 {
            own[kind] = kind as u32 * scratch.key_slots + bits::rem_u32(pair, slots[kind]);
        }
    });
    // Lanes 0 and 1 look at a claim and its tag for keys, 2 and 3 for values; 4 and 5 whether the claim is
    // this entry's. Atomics, for another warp may be writing the tag (which then does not matter).
    let kind = if lane < 4 { lane / 2 } else { lane & 1 };
    let slot = if kind == 0 { own[0] } else { own[1] };
    let mut holds = false;
    if lane < 6 && slot != Scratch::EMPTY {
        let tag = lane < 4 && lane & 1 == 1;
        if scratch.admits == 0 {
            // Claims count as those of hits.
            holds = lane < 4 && (!tag || directory.atomic_or(Scratch::word(slot) + 1, 0) == pair as u64);
        } else {
            let now = stamp(directory.load(STEP).wrapping_sub(1));
            let expected = if tag {
                pair as u64
            } else if lane < 4 {
                now
            } else {
                now | (entry as u64 + 1)
            };
            holds = directory.atomic_or(Scratch::word(slot) + tag as usize, 0) == expected;
        }
    }
    let ballot = warp::warp_vote_ballot(FULL_MASK, holds);
    let mut found = [Found { tile: Scratch::EMPTY, admit: Scratch::EMPTY }; 2];
    unroll!(for kind in 0..2 {
        if ballot >> (2 * kind) & 3 == 3 {
            found[kind].tile = own[kind];
        }
        if ballot >> (4 + kind) & 1 == 1 {
            found[kind].admit = own[kind];
        }
    });
    found
}

/// Whether the slots of a pair that the step has not listed hold its keys and its values, and nothing comes
/// into them in this step: then they may be read there. A thread's work.
#[simt::device]
pub fn holds_unlisted(directory: GlobalMut<u64>, scratch: Scratch, pair: u32) -> [bool; 2] {
    let mut holds = [false; 2];
    unroll!(for kind in 0..2 {
        let slot = scratch.slot_of(kind as u32, pair);
        if slot != Scratch::EMPTY {
            // Atomics, for another warp may be writing the tag (which then does not matter).
            let [claim, tag] = [0, 1].map(|i| directory.atomic_or(Scratch::word(slot) + i, 0));
            let now = stamp(directory.load(STEP).wrapping_sub(1));
            let stays = scratch.admits == 0 || claim == now || (claim ^ now) >> 32 != 0;
            holds[kind] = stays && tag == pair as u64;
        }
    });
    holds
}

/// Counts a block that was promoted on sight, whose keys and values are `near` or not: a thread's work, ahead
/// of the launch that closes the step.
#[simt::device]
pub fn count_sighted(directory: GlobalMut<u64>, near: [bool; 2]) {
    unroll!(for kind in 0..2 {
        directory.atomic_add(RUNNING + 2 * kind + !near[kind] as usize, 1);
    });
}

/// The tiles of the near pool that hold a pair's keys and values, between the launches that bring them there.
#[simt::device]
pub fn held(directory: Global<u64>, scratch: Scratch, pair: u32) -> [u32; 2] {
    let slots = [scratch.key_slots, scratch.value_slots];
    let mut own = [Scratch::EMPTY; 2];
    unroll!(for kind in 0..2 {
        if slots[kind] != 0 {
            let slot = kind as u32 * scratch.key_slots + bits::rem_u32(pair, slots[kind]);
            if directory.load(Scratch::word(slot) + 1) == pair as u64 {
                own[kind] = slot;
            }
        }
    });
    own
}

/// Says that a slot holds `pair` from now on: by the warp that has won it and written it.
#[simt::device]
pub fn admit(directory: GlobalMut<u64>, slot: u32, pair: u32, lane: u32) {
    if lane == 0 {
        directory.atomic_exchange(Scratch::word(slot) + 1, pair as u64);
    }
}

/// Empties the slots that hold an earlier block of the same number: by one thread, when the block has been
/// filled anew.
#[simt::device]
pub fn forget(directory: GlobalMut<u64>, scratch: Scratch, pair: u32) {
    if scratch.key_slots != 0 {
        let slot = bits::rem_u32(pair, scratch.key_slots);
        directory.atomic_cas(Scratch::word(slot) + 1, pair as u64, Scratch::EMPTY as u64);
    }
    if scratch.value_slots != 0 {
        let slot = scratch.key_slots + bits::rem_u32(pair, scratch.value_slots);
        directory.atomic_cas(Scratch::word(slot) + 1, pair as u64, Scratch::EMPTY as u64);
    }
}

/// A listed block's place in the order of admission: sequences' rows of blocks one after another.
#[inline(always)]
pub fn order(launch_row: u32, max_blocks: u32, block: u32) -> u32 {
    launch_row * (max_blocks + 1) + block
}

/// Claims the slots of a pair whose keys or values are wanted, for its `place` in the step's order, and
/// counts what will be found there and what not: a thread's work.
#[simt::device]
pub fn claim(
    directory: GlobalMut<u64>,
    scratch: Scratch,
    pair: u32,
    place: u32,
    wanted: [bool; 2],
    counts: &mut [u32; 4],
) {
    let step = directory.load(STEP);
    let slots = [scratch.key_slots, scratch.value_slots];
    unroll!(for kind in 0..2 {
        if wanted[kind] {
            let mut hit = false;
            if slots[kind] != 0 {
                let slot = kind as u32 * scratch.key_slots + bits::rem_u32(pair, slots[kind]);
                hit = directory.load(Scratch::word(slot) + 1) == pair as u64;
                if scratch.admits != 0 {
                    let place = if hit { 0 } else { place as u64 + 1 };
                    directory.atomic_min(Scratch::word(slot), stamp(step) | place);
                }
            }
            counts[2 * kind] += hit as u32;
            counts[2 * kind + 1] += !hit as u32;
        }
    });
}

/// What [`tally`] does in a launch that counts nothing, the first of its step: one thread's work, without
/// waiting for the others.
#[simt::device]
pub fn tally_nothing(directory: GlobalMut<u64>) {
    unroll!(for i in 0..4 {
        directory.store(LAST + i, 0);
    });
    directory.store(STEP, directory.load(STEP) + 1);
}

/// Adds a thread's counts to the step's [`Traffic`]; the block that arrives last closes the step. All blocks
/// call it. `more`: what was closed last is part of the same step, whose second pass it was for.
#[simt::device]
pub fn tally(directory: GlobalMut<u64>, counts: [u32; 4], more: bool, lane: u32) {
    unroll!(for i in 0..4 {
        let sum = warp::warp_reduce_add_u32(FULL_MASK, counts[i]);
        if lane == 0 && sum != 0 {
            directory.atomic_add(RUNNING + i, sum as u64);
        }
    });
    thread::device_fence();
    thread::sync_threads();
    if thread::thread_idx_x() != 0 {
        return;
    }
    thread::device_fence();
    let all = thread::grid_dim_x() * thread::grid_dim_y() * thread::grid_dim_z();
    if directory.atomic_add(ARRIVED, 1) + 1 != all as u64 {
        return;
    }
    thread::device_fence();
    // All loads and then all atomics, before a result is used: in turn each would be a round trip to the L2
    // cache.
    let (mut sums, mut earlier, mut totals) = ([0u64; 4], [0u64; 4], [0u64; 4]);
    unroll!(for i in 0..4 {
        earlier[i] = if more { directory.load(LAST + i) } else { 0 };
        totals[i] = directory.load(TOTAL + i);
    });
    let step = directory.load(STEP);
    directory.atomic_exchange(ARRIVED, 0);
    unroll!(for i in 0..4 {
        sums[i] = directory.atomic_exchange(RUNNING + i, 0);
    });
    unroll!(for i in 0..4 {
        directory.store(LAST + i, earlier[i] + sums[i]);
        directory.store(TOTAL + i, totals[i] + sums[i]);
    });
    directory.store(STEP, step + 1);
}
