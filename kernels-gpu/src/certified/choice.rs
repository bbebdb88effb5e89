//! The heaviest of many numbers, by a block of [`THREADS`] threads: a histogram of their bits.
//!
//! The bits of positive floats order like the floats. A bin is what their sign, exponent and first four fraction bits have in
//! common: sixteen an octave, [`THREADS`] of them from the largest number down, 32 octaves; the last one also holds everything
//! below. Each bin counts its numbers and adds up what lies above its lower edge, in integers, so that the order of the
//! atomics does not matter. A prefix sum from the top then tells for every bin how many numbers are in it and above, and
//! how much: thread t has bin t. A choice is a threshold in that order.

use super::selection::RowSums;
use simt::math::{fma, max};
use simt::warp::{self, FULL_MASK, warp_shuffle_up, warp_shuffle_xor, warp_sum_f32};
use simt::{GlobalMut, Shared, SharedPlan, thread, unroll};

/// Threads of a block, and bins.
pub const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;
/// Bits that a bin's numbers differ in.
const BIN_BITS: u32 = 19;

/// Shared memory of a block, for sequences of up to `max_blocks` blocks.
#[derive(Clone, Copy)]
pub struct SelectLayout {
    /// w, [max_blocks].
    pub(super) masses: Shared<f32>,
    /// w·η, [max_blocks].
    pub(super) errors: Shared<f32>,
    /// Numbers of a bin, and what they are above its edge.
    bin_counts: Shared<u32>,
    bin_offsets: Shared<u32>,
    /// What the warps exchange, twice, so that one barrier each is enough: [2, 12, WARPS].
    exchanged: Shared<u32>,
    /// What the thread of the last bin tells the others.
    told: Shared<u32>,
    pub(super) last: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Lays out the shared memory.
pub const fn select_layout(max_blocks: u32) -> SelectLayout {
    let mut plan = SharedPlan::new();
    let masses = plan.array(max_blocks);
    let errors = plan.array(max_blocks);
    let bin_counts = plan.array(THREADS);
    let bin_offsets = plan.array(THREADS);
    let exchanged = plan.array(2 * 12 * WARPS);
    let told = plan.array(4);
    let last = plan.array(1);
    SelectLayout { masses, errors, bin_counts, bin_offsets, exchanged, told, last, bytes: plan.bytes() }
}

/// What is wanted of a choice.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Its sum, at least, if `most` allows it.
    pub(super) wanted: f32,
    pub(super) least: u32,
    pub(super) most: u32,
}

/// A choice: every number above a bin, and of that bin as many as there is room for.
#[derive(Clone, Copy)]
pub(super) struct Choice {
    /// The bin, as the upper bits of its numbers; numbers above are chosen.
    level: u32,
    /// The last bin holds everything below.
    is_last: bool,
    /// How many of the bin.
    room: u32,
    /// Sum of all chosen, those of the bin as if they lay at its lower edge.
    pub(super) sum: f32,
}

impl Choice {
    /// Nothing is chosen.
    pub(super) const NONE: Choice = Choice { level: u32::MAX, is_last: false, room: 0, sum: 0.0 };

    /// Whether the number is in the bin of which only some are chosen.
    #[inline(always)]
    pub(super) fn is_undecided(&self, value: f32) -> bool {
        let level = value.to_bits() >> BIN_BITS;
        level == self.level || self.is_last && level < self.level
    }

    /// Whether a lane's number is chosen, and the warp's ballot; `before` counts the undecided before this warp's.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(super) fn take(&self, value: f32, inside: bool, lane: u32, before: &mut u32) -> (bool, u32) {
        let undecided = inside && self.is_undecided(value);
        let ballot = warp::warp_vote_ballot(FULL_MASK, undecided);
        let rank = *before + (ballot & ((1 << lane) - 1)).count_ones();
        *before += ballot.count_ones();
        let above = inside && self.level != u32::MAX && value.to_bits() >> BIN_BITS > self.level;
        let taken = above || undecided && rank < self.room;
        (taken, warp::warp_vote_ballot(FULL_MASK, taken))
    }
}

/// Numbers in this thread's bin and above.
pub(super) struct Ranked {
    top: u32,
    count: u32,
    sum: f32,
    own_count: u32,
    own_sum: f32,
}

/// What the block's threads compute together, the same bits in every thread.
pub(super) struct Reduce {
    layout: SelectLayout,
    round: u32,
}

impl Reduce {
    #[inline(always)]
    pub(super) fn new(layout: SelectLayout) -> Self {
        Reduce { layout, round: 0 }
    }

    /// Where this round's exchange lies.
    #[inline(always)]
    fn base(&mut self) -> u32 {
        self.round += 1;
        (self.round & 1) * 12 * WARPS
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(super) fn maxima(&mut self, values: [f32; 3]) -> [f32; 3] {
        let base = self.base();
        let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
        let mut most = values.map(warp_maximum);
        if lane == 0 {
            self.layout.exchanged.store(base + warp, most[0].to_bits());
            self.layout.exchanged.store(base + WARPS + warp, most[1].to_bits());
            self.layout.exchanged.store(base + 2 * WARPS + warp, most[2].to_bits());
        }
        thread::sync_threads();
        unroll!(for k in 0..3 {
            let part = self.layout.exchanged.load(base + k as u32 * WARPS + (lane & (WARPS - 1)));
            most[k] = warp_maximum(f32::from_bits(part));
        });
        most
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(super) fn sum(&mut self, value: f32) -> f32 {
        let base = self.base();
        let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
        let sum = warp_sum_f32(value);
        if lane == 0 {
            self.layout.exchanged.store(base + warp, sum.to_bits());
        }
        thread::sync_threads();
        let part = if lane < WARPS { f32::from_bits(self.layout.exchanged.load(base + lane)) } else { 0.0 };
        warp_sum_f32(part)
    }

    /// Sum of the counts of the threads before this one, and of all.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(super) fn prefix(&mut self, count: u32) -> (u32, u32) {
        let base = self.base();
        let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
        let up_to_here = inclusive(count, lane);
        if lane == 31 {
            self.layout.exchanged.store(base + warp, up_to_here);
        }
        thread::sync_threads();
        let part = if lane < WARPS { self.layout.exchanged.load(base + lane) } else { 0 };
        let before = warp::warp_reduce_add_u32(FULL_MASK, if lane < warp { part } else { 0 });
        (before + up_to_here - count, warp::warp_reduce_add_u32(FULL_MASK, part))
    }

    /// Sums of two counts over the warps before this one; `counts` are this warp's.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(super) fn before_this_warp(&mut self, counts: [u32; 2]) -> [u32; 2] {
        let base = self.base();
        let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
        if lane == 0 {
            self.layout.exchanged.store(base + warp, counts[0]);
            self.layout.exchanged.store(base + WARPS + warp, counts[1]);
        }
        thread::sync_threads();
        let mut before = [0; 2];
        unroll!(for k in 0..2 {
            let part =
                if lane < warp { self.layout.exchanged.load(base + k as u32 * WARPS + lane) } else { 0 };
            before[k] = warp::warp_reduce_add_u32(FULL_MASK, part);
        });
        before
    }

    /// Sorts `values` into bins; `largest` is the largest of them.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(super) fn rank(&mut self, values: Shared<f32>, blocks: u32, largest: f32) -> Ranked {
        let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
        let layout = self.layout;
        // Everybody has read the bins of the last time.
        thread::sync_threads();
        layout.bin_counts.store(t, 0);
        layout.bin_offsets.store(t, 0);
        thread::sync_threads();
        let top = largest.to_bits() >> BIN_BITS;
        let mut b = t;
        while b < blocks {
            let bits = values.load(b).to_bits();
            let bin = (top - (bits >> BIN_BITS).min(top)).min(THREADS - 1);
            layout.bin_counts.atomic_add(bin, 1);
            // 15 bits: the sum of 2^17 of them fits.
            layout.bin_offsets.atomic_add(bin, (bits & ((1 << BIN_BITS) - 1)) >> 4);
            b += THREADS;
        }
        thread::sync_threads();
        let own_count = layout.bin_counts.load(t);
        // What lies below the range counts as nothing.
        let edge = if t < THREADS - 1 && t <= top { (top - t) << BIN_BITS } else { 0 };
        let own_sum = if edge == 0 {
            0.0
        } else {
            // 16 units in the last place of the octave are 2^−19 of its power of two.
            let unit = f32::from_bits(edge & 0x7f80_0000) * (1.0 / 524_288.0);
            fma(layout.bin_offsets.load(t) as f32, unit, own_count as f32 * f32::from_bits(edge))
        };
        let (count, mut sum) = (inclusive(own_count, lane), own_sum);
        unroll!(for i in 0..5 {
            let other = warp_shuffle_up(FULL_MASK, sum, 1 << i, 32);
            sum = if lane >= 1 << i { other + sum } else { sum };
        });
        let base = self.base();
        if lane == 31 {
            layout.exchanged.store(base + warp, count);
            layout.exchanged.store(base + WARPS + warp, sum.to_bits());
        }
        thread::sync_threads();
        let (mut count_before, mut sum_before) = (0, 0.0);
        unroll!(for w in 0..15 {
            if (w as u32) < warp {
                count_before += layout.exchanged.load(base + w as u32);
                sum_before += f32::from_bits(layout.exchanged.load(base + WARPS + w as u32));
            }
        });
        Ranked { top, count: count_before + count, sum: sum_before + sum, own_count, own_sum }
    }

    /// The largest of what was ranked that make `limits`.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(super) fn choose(&mut self, ranked: &Ranked, limits: Limits) -> Choice {
        let t = thread::thread_idx_x();
        let enough =
            (ranked.sum >= limits.wanted && ranked.count >= limits.least) || ranked.count > limits.most;
        // Counts and sums grow with the bins, so the bins before the first that is enough are its number.
        let bin = thread::sync_threads_count(!enough as u32).min(THREADS - 1);
        if t == bin {
            let (taken, taken_sum) = (ranked.count - ranked.own_count, ranked.sum - ranked.own_sum);
            let edge = f32::from_bits(if t < THREADS - 1 && t <= ranked.top {
                (ranked.top - t) << BIN_BITS
            } else {
                0
            });
            // Of this bin as many as are missing, each at least as heavy as its edge.
            let missing = max(limits.wanted - taken_sum, 0.0) / edge;
            let missing = if missing < 1.0e9 { missing as u32 + 1 } else { 1_000_000_000 };
            let room = missing.max(limits.least.saturating_sub(taken)).min(limits.most.saturating_sub(taken));
            let counted = room.min(ranked.own_count);
            self.layout.told.store(0, room);
            self.layout.told.store(1, fma(counted as f32, edge, taken_sum).to_bits());
        }
        thread::sync_threads();
        let choice = Choice {
            level: ranked.top.saturating_sub(bin),
            is_last: bin == THREADS - 1,
            room: self.layout.told.load(0),
            sum: f32::from_bits(self.layout.told.load(1)),
        };
        // The next choice tells again.
        thread::sync_threads();
        choice
    }

    /// Adds up the threads' words, in the order of the fields of [`RowSums`], and writes the row.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(super) fn store_row(
        &mut self,
        words: [u32; 12],
        expanded: u32,
        rows: GlobalMut<RowSums>,
        row: usize,
    ) {
        let base = self.base();
        let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
        unroll!(for k in 0..11 {
            let value = match kind(k as u32) {
                Kind::Sum => warp_sum_f32(f32::from_bits(words[k])).to_bits(),
                Kind::Maximum => warp_maximum(f32::from_bits(words[k])).to_bits(),
                Kind::Count => warp::warp_reduce_add_u32(FULL_MASK, words[k]),
            };
            if lane == 0 {
                self.layout.exchanged.store(base + k as u32 * WARPS + warp, value);
            }
        });
        thread::sync_threads();
        if t < 11 {
            let mut total = self.layout.exchanged.load(base + t * WARPS);
            for w in 1..WARPS {
                let part = self.layout.exchanged.load(base + t * WARPS + w);
                total = match kind(t) {
                    Kind::Sum => (f32::from_bits(total) + f32::from_bits(part)).to_bits(),
                    Kind::Maximum => max(f32::from_bits(total), f32::from_bits(part)).to_bits(),
                    Kind::Count => total + part,
                };
            }
            rows.cast::<u32>().store(row * 12 + t as usize, total);
        } else if t == 11 {
            rows.cast::<u32>().store(row * 12 + 11, expanded);
        }
    }
}

/// How a field of [`RowSums`] is put together.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Sum,
    Maximum,
    Count,
}

#[inline(always)]
const fn kind(field: u32) -> Kind {
    match field {
        // δ, ν and κ.
        5..=7 => Kind::Maximum,
        9..=10 => Kind::Count,
        _ => Kind::Sum,
    }
}

#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
fn warp_maximum(value: f32) -> f32 {
    let mut most = value;
    unroll!(for i in 0..5 {
        most = max(most, warp_shuffle_xor(FULL_MASK, most, 1 << i, 32));
    });
    most
}

/// Sum over the lanes up to this one.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
fn inclusive(count: u32, lane: u32) -> u32 {
    let mut sum = count;
    unroll!(for i in 0..5 {
        let other = warp_shuffle_up(FULL_MASK, sum, 1 << i, 32);
        sum += if lane >= 1 << i { other } else { 0 };
    });
    sum
}
