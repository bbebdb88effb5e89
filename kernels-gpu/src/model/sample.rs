//! Sampling with temperature and top-p, in integers: the same token on every machine.
//!
//! # Mathematics
//! With l_max the largest logit and c = log2(e) / temperature, token i has the integer weight
//!
//! ```text
//! w_i = round(2^30 · 2^((l_i − l_max)·c))        (NaN: 0)
//! ```
//!
//! From there on all is exact. W = Σ w. The nucleus are the tokens with w_i >= θ, θ the largest number for
//! which they weigh at least max(1, ⌊W·p⌋), p in units of 2^−16; tokens that weigh as much as the last one
//! needed are in, all of them. A draw of 64 bits from seed, position and the sequence's number
//! ([`random`](super::random)) picks ⌊draw·N / 2^64⌋ of the nucleus's weight N, counted in the order of the
//! vocabulary. What weighs less than 2^−31 of the most likely token is never drawn.
//!
//! # Work split and bytes
//! One block of 1024 threads a sequence; the logits are read six times, from a cache after the first
//! (4·vocabulary bytes). θ is found 11, 10 and 10 bits at a time from histograms of weights. For the last
//! step each warp has a run of tokens.

use super::choice::{CHOICE_THREADS, key_index, largest_key, tell};
use super::random::draw;
use simt::math::{exp2, to_i32_nearest_even};
use simt::warp::{self, FULL_MASK, warp_shuffle_up, warp_shuffle_xor};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, kernel, thread, unroll};

const WARPS: u32 = CHOICE_THREADS / 32;
const BINS: u32 = 2048;

/// What is sampled from.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct SampleShape {
    /// The draws' key.
    pub seed: u64,
    /// Logits of a sequence.
    pub vocabulary: u32,
    /// log2(e) / temperature.
    pub sharpness: f32,
    /// p in units of 2^−16, at most 65536.
    pub top_p: u32,
    /// Zero.
    pub padding: u32,
}

/// w of a logit.
#[inline(always)]
pub fn sample_weight(logit: f32, largest: f32, sharpness: f32) -> u32 {
    // The most likely ones are worth 1 even where the difference is ∞ − ∞.
    let power = if logit == largest { 1.0 } else { exp2((logit - largest) * sharpness) };
    to_i32_nearest_even(power * 1_073_741_824.0) as u32
}

/// What the nucleus weighs at least.
#[inline(always)]
pub fn nucleus_mass(total: u64, top_p: u32) -> u64 {
    let p = top_p as u64;
    ((total >> 16) * p + (((total & 0xffff) * p) >> 16)).max(1)
}

/// Shared memory of a block.
#[derive(Clone, Copy)]
pub struct SampleLayout {
    bins: Shared<u64>,
    exchanged: Shared<u64>,
    /// What the first warp tells the others.
    told: Shared<u64>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Lays out the shared memory.
pub const fn sample_layout() -> SampleLayout {
    let mut plan = SharedPlan::new();
    let bins = plan.array(BINS);
    let exchanged = plan.array(WARPS);
    let told = plan.array(2);
    SampleLayout { bins, exchanged, told, bytes: plan.bytes() }
}

/// Inclusive sum over the lanes up to this one.
#[simt::device]
fn inclusive(value: u64, lane: u32) -> u64 {
    let mut sum = value;
    unroll!(for i in 0..5 {
        let other = warp_shuffle_up(FULL_MASK, sum, 1 << i, 32);
        sum += if lane >= 1 << i { other } else { 0 };
    });
    sum
}

/// A sequence's weights.
#[derive(Clone, Copy)]
struct Weights {
    logits: Global<f32>,
    start: usize,
    largest: f32,
    shape: SampleShape,
}

impl Weights {
    #[simt::device]
    fn at(self, i: u32) -> u32 {
        sample_weight(self.logits.load(self.start + i as usize), self.largest, self.shape.sharpness)
    }

    /// Sum of the weights that are at least `least`, of tokens `first`, `first + step`, … below `end`; over
    /// the block's warps in the order of the threads, which does not matter.
    #[simt::device]
    fn sum(self, first: u32, end: u32, step: u32, least: u32) -> u64 {
        let mut sum = 0u64;
        let mut i = first;
        while i < end {
            let weight = self.at(i);
            sum += if weight >= least { weight as u64 } else { 0 };
            i += step;
        }
        unroll!(for i in 0..5 {
            sum += warp_shuffle_xor(FULL_MASK, sum, 1 << i, 32);
        });
        sum
    }

    /// The highest bin of weights with `upper` above `shift + bits` bits for which it and the bins above
    /// weigh at least `wanted` (`above` being what lies above all bins); and what lies above it.
    #[simt::device]
    fn find(
        self,
        layout: SampleLayout,
        upper: u32,
        shift: u32,
        bits: u32,
        above: u64,
        wanted: u64,
    ) -> [u64; 2] {
        let (t, lane) = (thread::thread_idx_x(), warp::lane_id());
        layout.bins.store(t, 0);
        layout.bins.store(t + CHOICE_THREADS, 0);
        thread::sync_threads();
        let mut i = t;
        while i < self.shape.vocabulary {
            let weight = self.at(i);
            if weight != 0 && weight >> (shift + bits) == upper {
                layout.bins.atomic_add((weight >> shift) & ((1 << bits) - 1), weight as u64);
            }
            i += CHOICE_THREADS;
        }
        thread::sync_threads();
        if t < 32 {
            // Lane 0 has the uppermost 64 bins.
            let top = BINS - 1 - 64 * lane;
            let mut own = 0u64;
            for i in 0..64 {
                own += layout.bins.load(top - i);
            }
            let before = above + inclusive(own, lane) - own;
            if before < wanted && before + own >= wanted {
                let (mut sum, mut bin) = (before, top);
                while sum + layout.bins.load(bin) < wanted {
                    sum += layout.bins.load(bin);
                    bin -= 1;
                }
                layout.told.store(0, bin as u64);
                layout.told.store(1, sum);
            }
        }
        thread::sync_threads();
        [layout.told.load(0), layout.told.load(1)]
    }
}

/// A token of each sequence: `logits` [sequences, vocabulary]; `numbers` \[sequences\] are what their draws
/// are keyed by. One block of [`CHOICE_THREADS`] threads a
/// sequence; shared: [`sample_layout`]. Without a weight that is not 0 (nothing but NaN) the choice is that
/// of [`choose_largest`](fn@super::choose_largest).
#[kernel(system = model, max_threads = 1024, overlaps)]
pub fn choose_sampled(
    logits: Global<f32>,
    numbers: Global<u32>,
    tokens: GlobalMut<u32>,
    positions: GlobalMut<u32>,
    shape: SampleShape,
) {
    let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
    let sequence = thread::block_idx_x();
    let start = sequence as usize * shape.vocabulary as usize;
    let layout = sample_layout();
    let key = largest_key(logits, start, shape.vocabulary, layout.exchanged);
    let best = key_index(key);
    if key >> 32 == 0 {
        if t == 0 {
            tell(tokens, positions, sequence as usize, best);
        }
        return;
    }
    let weights = Weights { logits, start, largest: logits.load(start + best as usize), shape };

    let own = weights.sum(t, shape.vocabulary, CHOICE_THREADS, 0);
    if lane == 0 {
        layout.exchanged.store(warp, own);
    }
    thread::sync_threads();
    let mut total = layout.exchanged.load(lane);
    unroll!(for i in 0..5 {
        total += warp_shuffle_xor(FULL_MASK, total, 1 << i, 32);
    });
    let wanted = nucleus_mass(total, shape.top_p);

    let [first, above] = weights.find(layout, 0, 20, 11, 0, wanted);
    let [second, above] = weights.find(layout, first as u32, 10, 10, above, wanted);
    let upper = (first << 10 | second) as u32;
    let [third, _] = weights.find(layout, upper, 0, 10, above, wanted);
    let least = upper << 10 | third as u32;

    // Runs of whole warps' widths.
    let run = shape.vocabulary.div_ceil(CHOICE_THREADS) * 32;
    let (begin, end) = (warp * run, ((warp + 1) * run).min(shape.vocabulary));
    let own = weights.sum(begin + lane, end, 32, least);
    if lane == 0 {
        layout.exchanged.store(warp, own);
    }
    thread::sync_threads();
    let up_to_warp = inclusive(layout.exchanged.load(lane), lane);
    let nucleus = warp::warp_shuffle_idx(FULL_MASK, up_to_warp, 31, 32);
    let mut before = warp::warp_shuffle_idx(FULL_MASK, up_to_warp, warp, 32) - own;
    let number = numbers.load(sequence as usize);
    let random = draw(shape.seed, positions.load(sequence as usize), number);
    let pick = ((random as u128 * nucleus as u128) >> 64) as u64;
    // One warp has the token; it tells after the others have read the position.
    thread::sync_threads();
    if pick < before || pick >= before + own {
        return;
    }
    let mut i = begin;
    while i < end {
        let weight = if i + lane < end { weights.at(i + lane) } else { 0 };
        let weight = if weight >= least { weight as u64 } else { 0 };
        let sum = before + inclusive(weight, lane);
        if pick >= sum - weight && pick < sum {
            tell(tokens, positions, sequence as usize, i + lane);
        }
        before = warp::warp_shuffle_idx(FULL_MASK, sum, 31, 32);
        i += 32;
    }
}
