//! Promotion on sight: blocks that no list has, and that turn out to weigh.
//!
//! A list is of an earlier query, and the next one may leap to blocks where none has looked. When the
//! quantized scores of a block are there, what each of its tokens would have had of all mass in the step
//! before is known: 2^(score − log2 Σ 2^score of that step). Where that is a noticeable share for any row,
//! the block is left out of the sums, and taken in behind the list from its originals, keys and values, which
//! are asked for meanwhile. Which blocks these are changes how large the bound is, never whether it holds.

use super::super::admit::{Found, Scratch, count_sighted, holds_unlisted};
use super::super::marking::Entry;
use super::list::{List, Lookup};
use crate::attention::{BLOCK_TOKENS, Half, PartialRow, ROWS};
use simt::math::{abs, log2, max};
use simt::warp::{FULL_MASK, sync_warp, warp_vote_any};
use simt::{Global, GlobalMut, Shared, bits, thread, unroll};

/// Blocks that a warp promotes on sight, at the most: others stay quantized. Each takes it a round trip.
pub const SIGHTED: u32 = 8;

/// Words of a warp: its rows' least scores, then blocks.
pub(super) const WORDS: u32 = ROWS + SIGHTED;

/// Beside a block's place in the sequence: its keys, its values are near.
const NEAR_KEYS: u32 = 1 << 31;
const NEAR_VALUES: u32 = 1 << 30;

/// What a step leaves of a row for the next one: log2 Σ 2^score. 0 where that is no number, and where no step
/// was: then nothing is promoted on sight.
#[inline(always)]
pub fn log_sum(row: PartialRow) -> f32 {
    let log = row.reference + log2(row.sum);
    if abs(log) < f32::INFINITY { log } else { 0.0 }
}

/// A least score that none is as large as, infinite ones included.
pub const NEVER: f32 = f32::NAN;

/// The score from which on a token brings its block: `log_sum` is what the last step has left of the row, and
/// `share` the log2 of the share, infinite if nothing is looked for.
#[inline(always)]
pub fn least_score(log_sum: f32, share: f32) -> f32 {
    if log_sum != 0.0 && share < f32::INFINITY { log_sum + share } else { NEVER }
}

/// What a warp has sighted.
#[derive(Clone, Copy)]
pub(super) struct Sight {
    /// [`least_score`] of the rows, whose registers others want, then blocks of the sequence: [warps,
    /// [`WORDS`]].
    memory: Shared<u32>,
    /// How many blocks.
    pub(super) count: u32,
}

impl Sight {
    /// Nothing, so far.
    #[inline(always)]
    pub(super) fn new(memory: Shared<u32>) -> Self {
        Sight { memory, count: 0 }
    }

    /// Ahead of the first block, where any may be sighted; `row` of `log_sums` is the lane's, if it looks for
    /// anything.
    #[simt::device]
    pub(super) fn begin(&self, log_sums: Global<f32>, row: usize, looks: bool, share: f32, lane: u32) {
        let least = if looks { least_score(log_sums.load(row), share) } else { NEVER };
        if lane & 3 == 0 {
            self.memory.store(thread::thread_idx_x() / 32 * WORDS + (lane >> 2), least.to_bits());
        }
        sync_warp(FULL_MASK);
    }

    /// Whether these scores of a block are noticeable to any row, and there is room for it: then it is noted.
    /// A warp's work.
    #[simt::device]
    pub(super) fn takes(&mut self, block: u32, scores: [[f32; 2]; 2]) -> bool {
        let [[a, b], [c, d]] = scores;
        let thread = bits::renewed(thread::thread_idx_x());
        let (first, lane) = (thread / 32 * WORDS, thread % 32);
        let least = f32::from_bits(self.memory.load(first + (lane >> 2)));
        let noticed = max(max(a, b), max(c, d)) >= least;
        if self.count == SIGHTED || !warp_vote_any(FULL_MASK, noticed) {
            return false;
        }
        if lane == 0 {
            self.memory.store(first + ROWS + self.count, block);
        }
        self.count += 1;
        true
    }

    /// Looks all of them up at once, a lane each, asks the L2 cache for their originals, and counts what
    /// comes from the scratch: a warp's work, behind its last block.
    #[simt::device]
    pub(super) fn look_up<E: Half, const D: usize>(&self, list: &List<E>) {
        let List { directory, scratch, warp, lane, .. } = *list;
        let (at, exists) = (warp * WORDS + ROWS + lane, lane < self.count);
        let (mut pair, mut near) = (0, [false; 2]);
        if exists {
            let index = self.memory.load(at);
            pair = list.block_of(index) * list.shape.kv_heads + list.head;
            near = holds_unlisted(directory, scratch, pair);
            if scratch.claims() {
                count_sighted(directory, near);
            }
            let flag = |kind: usize, flag: u32| if near[kind] { flag } else { 0 };
            self.memory.store(at, index | flag(0, NEAR_KEYS) | flag(1, NEAR_VALUES));
        }
        let elements = BLOCK_TOKENS as usize * D;
        unroll!(for kind in 0..2 {
            let originals = if kind == 0 { list.keys } else { list.values };
            originals.prefetch(pair as usize * elements, 2 * elements as u32, exists && !near[kind]);
        });
        sync_warp(FULL_MASK);
    }

    /// The `i`th of them, behind [`look_up`](Self::look_up).
    #[simt::device]
    pub(super) fn load<E: Half>(&self, i: u32, list: &List<E>) -> Lookup {
        let word = self.memory.load(list.warp * WORDS + ROWS + i);
        let index = word & !(NEAR_KEYS | NEAR_VALUES);
        let block = list.block_of(index);
        let pair = block * list.shape.kv_heads + list.head;
        let found = |kind: u32, flag: u32| Found {
            tile: if word & flag != 0 { list.scratch.slot_of(kind, pair) } else { Scratch::EMPTY },
            admit: Scratch::EMPTY,
        };
        let found = [found(0, NEAR_KEYS), found(1, NEAR_VALUES)];
        Lookup { entry: Entry { index, rows: 0xffff }, block, found }
    }

    /// Adds them to those of the row of blocks, whose count is at `at`.
    #[simt::device]
    pub(super) fn tell(&self, counters: GlobalMut<u32>, at: u32, lane: u32) {
        if lane == 0 {
            counters.atomic_add(at as usize, self.count);
        }
    }
}
