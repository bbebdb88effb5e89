//! The k largest of many keys by one thread block: exact, the lower index first among equal ones, the result
//! in the order of the indices.
//!
//! Keys are u32 words. What all of them have in common at the top is skipped; then eight bits at a time, a
//! histogram of the keys that are still in question tells in which bin the k-th one lies, until a bin is
//! wanted as a whole or no bits are left. Counts are integers, so the order of the atomics does not matter.
//! Then a lane has the marks of 32 neighbouring indices, and a warp of 1024 at the most; the counts of those
//! before say where each writes.

use super::choice::SELECT_THREADS;
use glam::UVec4;
use simt::warp::{self, FULL_MASK, warp_shuffle_up};
use simt::{GlobalMut, Shared, SharedPlan, thread, unroll};

/// Bits of a digit.
const DIGIT: u32 = 8;
/// Bins of a histogram: a thread each.
const BINS: u32 = 1 << DIGIT;
const WARPS: u32 = SELECT_THREADS / 32;
const _: () = assert!(SELECT_THREADS == BINS, "a thread has a bin");

/// Keys that are kept in shared memory; of longer sequences they are read again.
pub(super) const CACHED: u32 = 8192;

/// Shared memory of the ranking.
#[derive(Clone, Copy)]
pub(super) struct Ranking {
    /// The keys that are ranked, if they fit.
    pub keys: Shared<u32>,
    /// A histogram of a digit.
    pub bins: Shared<u32>,
    /// What warps tell each other, twice.
    pub warps: Shared<u32>,
    /// What one thread tells the others.
    pub told: Shared<u32>,
}

/// Lays it out.
pub(super) const fn ranking(plan: &mut SharedPlan) -> Ranking {
    let keys = plan.array(CACHED);
    let bins = plan.array(BINS);
    let warps = plan.array(2 * WARPS);
    let told = plan.array(4);
    Ranking { keys, bins, warps, told }
}

/// The keys of indices 1 to before `end`.
#[derive(Clone, Copy)]
pub(super) struct Keys {
    pub layout: Ranking,
    pub keys: GlobalMut<u32>,
    /// Where index 0 is, at a multiple of four.
    pub first: usize,
    /// Past the last index.
    pub end: u32,
    /// Whether they are in shared memory already; what is there up to a multiple of four does not count.
    pub here: bool,
}

/// What is chosen: keys whose bits from `shift` on are above those of `prefix`, and the first `ties` of those
/// that have the same.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    /// No key that is chosen is less.
    pub prefix: u32,
    shift: u32,
    ties: u32,
    /// Whether these are all that have the same bits.
    all_ties: bool,
}

impl Cut {
    /// Whether a key is chosen whatever its index.
    #[inline(always)]
    pub fn keeps(self, key: u32) -> bool {
        let (key, at) = (key as u64 >> self.shift, self.prefix as u64 >> self.shift);
        key > at || key == at && self.all_ties
    }
}

impl Keys {
    /// The key of an index that counts, once [`cut`](Self::cut) has looked at all of them.
    #[simt::device]
    pub fn get(self, index: u32) -> u32 {
        if self.here || self.end <= CACHED {
            self.layout.keys.load(index)
        } else {
            self.keys.load(self.first + index as usize)
        }
    }

    #[simt::device]
    fn counts(self, index: u32) -> bool {
        index >= 1 && index < self.end
    }

    /// Where the `wanted` largest end; there are more keys than that, and one is wanted at least. The whole
    /// block calls it.
    #[simt::device]
    pub fn cut(self, wanted: u32) -> Cut {
        let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
        let layout = self.layout;
        let (mut least, mut most) = (u32::MAX, 0);
        let mut index = 4 * t;
        while index < self.end {
            let four: [u32; 4];
            if self.here {
                four = layout.keys.load_vector::<UVec4>(index).to_array();
            } else {
                let from = self.first + index as usize;
                four = self.keys.load_vector::<UVec4>(from).to_array();
                if self.end <= CACHED {
                    layout.keys.store_vector(index, UVec4::from_array(four));
                }
            }
            unroll!(for i in 0..4 {
                if self.counts(index + i as u32) {
                    least = least.min(four[i]);
                    most = most.max(four[i]);
                }
            });
            index += 4 * SELECT_THREADS;
        }
        let least = warp::warp_reduce_min_u32(FULL_MASK, least);
        let most = warp::warp_reduce_max_u32(FULL_MASK, most);
        if lane == 0 {
            layout.warps.store(warp, least);
            layout.warps.store(WARPS + warp, most);
        }
        layout.bins.store(t, 0);
        thread::sync_threads();
        let (mut least, mut most) = (u32::MAX, 0);
        unroll!(for w in 0..8 {
            least = least.min(layout.warps.load(w as u32));
            most = most.max(layout.warps.load(WARPS + w as u32));
        });
        // Bits that are not the same in all keys.
        let mut shift = 32 - (least ^ most).leading_zeros();
        let mut prefix = if shift == 32 { 0 } else { most >> shift << shift };
        let mut missing = wanted;
        let mut all_ties = false;
        while shift > 0 {
            let digit = shift.min(DIGIT);
            let below = shift - digit;
            let mut index = 1 + t;
            while index < self.end {
                // What differs from the prefix above the digit is decided.
                let offset = self.get(index) ^ prefix;
                if (offset >> below) < 1 << digit {
                    layout.bins.atomic_add(offset >> below, 1);
                }
                index += SELECT_THREADS;
            }
            thread::sync_threads();
            // Thread t has the bin that comes t-th from the top.
            let bin = BINS - 1 - t;
            let own = layout.bins.load(bin);
            let mut count = own;
            unroll!(for i in 0..5 {
                let others = warp_shuffle_up(FULL_MASK, count, 1 << i, 32);
                count += if lane >= 1 << i { others } else { 0 };
            });
            if lane == 31 {
                layout.warps.store(warp, count);
            }
            layout.bins.store(bin, 0);
            thread::sync_threads();
            unroll!(for w in 0..7 {
                count += if (w as u32) < warp { layout.warps.load(w as u32) } else { 0 };
            });
            if count >= missing && count - own < missing {
                layout.told.store(0, bin);
                layout.told.store(1, count - own);
                layout.told.store(2, own);
            }
            thread::sync_threads();
            prefix |= layout.told.load(0) << below;
            missing -= layout.told.load(1);
            shift = below;
            // All of the bin: what is below does not matter.
            all_ties = layout.told.load(2) == missing;
            if all_ties {
                break;
            }
        }
        Cut { prefix, shift, ties: missing, all_ties }
    }

    /// Calls `put` with each index that `cut` chooses and its place among these. The whole block calls it.
    #[simt::device]
    pub fn write(self, cut: Cut, put: impl Fn(u32, u32)) {
        let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
        let layout = self.layout;
        let at = cut.prefix >> cut.shift;
        let run = (self.end.div_ceil(32 * WARPS) * 32).min(32 * 32);
        // Chosen above the cut, and ties seen, before the round.
        let (mut above_before, mut equal_before) = (0, 0);
        let mut start = 0;
        while start < self.end {
            let first = start + warp * run;
            // Lane i keeps which of indices first + 32·i and on are above the cut, and which tie.
            let (mut above, mut equal) = (0, 0);
            let mut i = 0;
            while 32 * i < run {
                let index = first + 32 * i + lane;
                let there = self.counts(index);
                let key = if there { self.get(index) >> cut.shift } else { 0 };
                let ballot = warp::warp_vote_ballot(FULL_MASK, there && key > at);
                let ties = warp::warp_vote_ballot(FULL_MASK, there && key == at);
                above = if lane == i { ballot } else { above };
                equal = if lane == i { ties } else { equal };
                i += 1;
            }
            let own = [above.count_ones(), equal.count_ones()];
            let mut counts = own;
            unroll!(for kind in 0..2 {
                unroll!(for step in 0..5 {
                    let others = warp_shuffle_up(FULL_MASK, counts[kind], 1 << step, 32);
                    counts[kind] += if lane >= 1 << step { others } else { 0 };
                });
            });
            // Everybody has read what the round before, or the cut, has told.
            thread::sync_threads();
            if lane == 31 {
                layout.warps.store(warp, counts[0]);
                layout.warps.store(WARPS + warp, counts[1]);
            }
            thread::sync_threads();
            let mut before = [above_before + counts[0] - own[0], equal_before + counts[1] - own[1]];
            unroll!(for w in 0..8 {
                let of_warp = [layout.warps.load(w as u32), layout.warps.load(WARPS + w as u32)];
                if (w as u32) < warp {
                    before[0] += of_warp[0];
                    before[1] += of_warp[1];
                }
                above_before += of_warp[0];
                equal_before += of_warp[1];
            });
            let mut rest = above | equal;
            while rest != 0 {
                let bit = rest.trailing_zeros();
                rest &= rest - 1;
                let [place, ties] = [before[0], before[1].min(cut.ties)];
                if equal >> bit & 1 == 0 {
                    put(place + ties, first + 32 * lane + bit);
                    before[0] += 1;
                } else {
                    if before[1] < cut.ties {
                        put(place + ties, first + 32 * lane + bit);
                    }
                    before[1] += 1;
                }
            }
            start += WARPS * run;
        }
    }
}
