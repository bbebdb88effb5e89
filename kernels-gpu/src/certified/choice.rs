//! The heaviest of many numbers, spread over thread blocks: a histogram of their bits.
//!
//! The bits of positive floats order like the floats. A bin is what their sign, exponent and first fraction
//! bits have in common; [`BINS`] of them from a top downward, the first also for what lies above it and the
//! last for all below. Each bin counts its numbers and adds up what lies above its lower edge, in integers,
//! so that the order of the additions does not matter. A prefix sum from the top then tells for every bin how
//! many numbers are in it and above, and how much: thread t has bin t. A choice is a threshold in that order:
//! all bins before one, and of that one as many as there is room for, by part and place.

use super::sums::Own;
use simt::math::{fma, max};
use simt::warp::{self, FULL_MASK, warp_shuffle_up};
use simt::{Pod, Shared, SharedPlan, Zeroable, thread, unroll};

/// Bins, and threads of a block that weighs.
pub const BINS: u32 = 256;
const WARPS: u32 = BINS / 32;

/// A thread block's histogram has one word a bin: numbers above this bit, modulo 4096; below it what they are
/// above the bin's edge, in units of 2^−10 of its width. Of a part, of 1024 numbers at most, the difference
/// of two such words is exact.
pub const PART_SHIFT: u32 = 20;
/// The same in the histogram of all parts.
pub const COUNT_SHIFT: u32 = 40;
const OFFSET_BITS: u32 = 10;
/// Bits that a bin's numbers differ in: eight bins an octave, 32 octaves.
const SHIFT: u32 = 20;

/// A part's word as the histogram of all parts has it.
#[inline(always)]
pub fn widened(word: u32) -> u64 {
    ((word >> PART_SHIFT) as u64) << COUNT_SHIFT | (word & ((1 << PART_SHIFT) - 1)) as u64
}

/// Which numbers have a bin in common.
#[derive(Clone, Copy)]
pub struct Bins {
    /// The bits that the numbers of the first bin share.
    top: u32,
}

impl Bins {
    /// Of masses relative to their row's reference: 16 tokens of at most 2^15.
    #[inline(always)]
    pub fn of_masses() -> Self {
        Bins { top: 524_288f32.to_bits() >> SHIFT }
    }

    /// Of masses times η, from 2^8 times what a block with all of the mass and the η of the first block has.
    #[inline(always)]
    pub fn of_errors(first_eta: f32) -> Self {
        let exponent = first_eta.to_bits() >> 23;
        let exponent = if exponent == 0 { 127 } else { exponent };
        Bins { top: (exponent + 19 + 8).min(254) << (23 - SHIFT) }
    }

    /// The bin of a number that is not negative.
    #[inline(always)]
    pub fn bin(self, value: f32) -> u32 {
        (self.top - (value.to_bits() >> SHIFT).min(self.top)).min(BINS - 1)
    }

    /// What it adds to its bin's word of a part.
    #[inline(always)]
    pub fn addend(self, value: f32) -> u32 {
        1 << PART_SHIFT | (value.to_bits() & ((1 << SHIFT) - 1)) >> (SHIFT - OFFSET_BITS)
    }

    /// The least number of a bin; what is in the last counts as nothing.
    #[inline(always)]
    pub fn edge(self, bin: u32) -> f32 {
        f32::from_bits(if bin < BINS - 1 && bin <= self.top { (self.top - bin) << SHIFT } else { 0 })
    }

    /// The sum of a bin's numbers, by its word; what the offsets cut off counts as nothing.
    #[inline(always)]
    pub fn sum(self, bin: u32, word: u64) -> f32 {
        let edge = self.edge(bin);
        if edge == 0.0 {
            return 0.0;
        }
        // An addend's last bit is 2^(SHIFT − OFFSET_BITS) units in the last place.
        let ulps = (1u32 << (SHIFT - OFFSET_BITS)) as f32 * (1.0 / 8_388_608.0);
        let unit = f32::from_bits(edge.to_bits() & 0x7f80_0000) * ulps;
        let offsets = (word & ((1 << COUNT_SHIFT) - 1)) as f32;
        fma(offsets, unit, (word >> COUNT_SHIFT) as u32 as f32 * edge)
    }
}

/// What is wanted of a choice.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Its sum, at least, if `most` allows it.
    pub wanted: f32,
    /// Numbers, at least.
    pub least: u32,
    /// Numbers, at most.
    pub most: u32,
    /// Of bins with numbers below this one none is chosen beyond `least`.
    pub floor: f32,
}

impl Limits {
    /// How many of a bin are missing, each at least as heavy as its `edge`, if those of the bins before it
    /// have `taken_sum`. A bin that is there for the sake of `least` alone has nothing to add.
    #[inline(always)]
    pub fn missing(self, taken_sum: f32, edge: f32) -> u32 {
        let missing = (self.wanted - taken_sum) / edge;
        let some = if missing < 1.0e9 { missing as u32 + 1 } else { 1_000_000_000 };
        if edge < self.floor || taken_sum >= self.wanted { 0 } else { some }
    }
}

/// A choice: every number of the bins before one, and of that one as many as there is room for.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Choice {
    /// The bin.
    pub bin: u32,
    /// How many of the bin.
    pub room: u32,
}

impl Choice {
    /// Nothing is chosen.
    pub const NONE: Choice = Choice { bin: 0, room: 0 };
}

/// Shared memory of a block that weighs.
#[derive(Clone, Copy)]
pub struct WeighLayout {
    /// Histograms of masses and of errors, [2, BINS].
    pub(super) histograms: Shared<u32>,
    /// What the warps exchange, twice, so that one barrier each is enough: [2, 16, WARPS].
    exchanged: Shared<u32>,
    /// What one thread tells the others.
    pub(super) told: Shared<u32>,
    pub(super) last: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Lays out the shared memory.
pub const fn weigh_layout() -> WeighLayout {
    let mut plan = SharedPlan::new();
    let histograms = plan.array(2 * BINS);
    let exchanged = plan.array(2 * 16 * WARPS);
    let told = plan.array(20);
    let last = plan.array(1);
    WeighLayout { histograms, exchanged, told, last, bytes: plan.bytes() }
}

/// Numbers in this thread's bin and above.
pub struct Ranked {
    bins: Bins,
    count: u32,
    sum: f32,
    own_count: u32,
    own_sum: f32,
}

/// What a block of [`BINS`] threads computes together, the same bits in every thread.
pub struct Reduce {
    pub(super) layout: WeighLayout,
    round: u32,
}

impl Reduce {
    #[inline(always)]
    pub(super) fn new(layout: WeighLayout) -> Self {
        Reduce { layout, round: 0 }
    }

    /// Where word `k` of a warp is in this round's exchange.
    #[inline(always)]
    fn base(&mut self) -> u32 {
        self.round += 1;
        (self.round & 1) * 16 * WARPS
    }

    /// Adds up, or takes the largest of, each of the threads' words, the largest from word `first_maximum`
    /// on; the result is in `told`.
    #[simt::device]
    pub(super) fn words(&mut self, words: [f32; Own::WORDS], first_maximum: u32) {
        let base = self.base();
        let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
        unroll!(for k in 0..Own::WORDS, at_most 10 {
            let value = if (k as u32) < first_maximum {
                warp::warp_sum_f32(words[k])
            } else {
                warp_maximum(words[k])
            };
            if lane == 0 {
                self.layout.exchanged.store(base + k as u32 * WARPS + warp, value.to_bits());
            }
        });
        thread::sync_threads();
        if t < Own::WORDS as u32 {
            let mut total = f32::from_bits(self.layout.exchanged.load(base + t * WARPS));
            for w in 1..WARPS {
                let part = f32::from_bits(self.layout.exchanged.load(base + t * WARPS + w));
                total = if t < first_maximum { total + part } else { max(total, part) };
            }
            self.layout.told.store(t, total.to_bits());
        }
        thread::sync_threads();
    }

    /// Puts the bins in order; `word` is that of this thread's bin.
    #[simt::device]
    pub(super) fn rank(&mut self, bins: Bins, word: u64) -> Ranked {
        let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
        let (own_count, own_sum) = ((word >> COUNT_SHIFT) as u32, bins.sum(t, word));
        let (mut count, mut sum) = (own_count, own_sum);
        unroll!(for i in 0..5 {
            let (others, other) =
                (warp_shuffle_up(FULL_MASK, count, 1 << i, 32), warp_shuffle_up(FULL_MASK, sum, 1 << i, 32));
            count += if lane >= 1 << i { others } else { 0 };
            sum = if lane >= 1 << i { other + sum } else { sum };
        });
        let base = self.base();
        if lane == 31 {
            self.layout.exchanged.store(base + warp, count);
            self.layout.exchanged.store(base + WARPS + warp, sum.to_bits());
        }
        thread::sync_threads();
        let (mut count_before, mut sum_before) = (0, 0.0);
        unroll!(for w in 0..7 {
            if (w as u32) < warp {
                count_before += self.layout.exchanged.load(base + w as u32);
                sum_before += f32::from_bits(self.layout.exchanged.load(base + WARPS + w as u32));
            }
        });
        Ranked { bins, count: count_before + count, sum: sum_before + sum, own_count, own_sum }
    }

    /// The largest of what was ranked that make `limits`, and their sum, those of the choice's bin as if they
    /// lay at its edge.
    #[simt::device]
    pub(super) fn choose(&mut self, ranked: &Ranked, limits: Limits) -> (Choice, f32) {
        let (t, told) = (thread::thread_idx_x(), self.layout.told);
        let edge = ranked.bins.edge(t);
        let low = edge < limits.floor;
        let enough = ((ranked.sum >= limits.wanted || low) && ranked.count >= limits.least)
            || ranked.count > limits.most;
        // Counts and sums grow with the bins, so the bins before the first that is enough are its number.
        let bin = thread::sync_threads_count(!enough as u32).min(BINS - 1);
        if t == bin {
            let (taken, taken_sum) = (ranked.count - ranked.own_count, ranked.sum - ranked.own_sum);
            let missing = limits.missing(taken_sum, edge);
            let room = missing.max(limits.least.saturating_sub(taken)).min(limits.most.saturating_sub(taken));
            let counted = room.min(ranked.own_count);
            told.store(16, room);
            told.store(17, fma(counted as f32, edge, taken_sum).to_bits());
        }
        thread::sync_threads();
        let chosen = (Choice { bin, room: told.load(16) }, f32::from_bits(told.load(17)));
        // The next choice tells again.
        thread::sync_threads();
        chosen
    }
}

#[simt::device]
fn warp_maximum(value: f32) -> f32 {
    let mut most = value;
    unroll!(for i in 0..5 {
        most = max(most, warp::warp_shuffle_xor(FULL_MASK, most, 1 << i, 32));
    });
    most
}
