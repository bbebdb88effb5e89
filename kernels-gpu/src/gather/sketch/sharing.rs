//! The part of [`decide`](fn@super::decide) that every thread block has: its share of the blocks, ranked and
//! counted.

use super::counting::{
    MASS_BINS, Shares, bin_of, heads_of, in_units, inverse_of, kinds_of, level_of, ratio_of, reference_of,
    top_of, units,
};
use super::deciding::{BIN_ROW, DECIDE_THREADS, Decide, WARPS};
use super::masses::joined;
use super::scanning::{Norms, Total};
use crate::attention::PartialRow;
use crate::gather::scoring::ordered;
use glam::UVec4;
use simt::math::{exp2_nonpositive, max, maximum};
use simt::warp::{self, FULL_MASK, warp_shuffle_xor};
use simt::{Global, async_copy, thread, unroll};

/// Blocks whose masses are in shared memory at once.
const ROUND: u32 = DECIDE_THREADS;
/// Where their ν are there, from that of the block before them on.
const NUS: u32 = 16 * ROUND;

impl Decide {
    /// Ranks and counts a share's blocks. `meanwhile` is called while what is loaded is on its way. What
    /// masses are counted against.
    #[simt::device]
    pub fn take_share(
        &self,
        totals: Global<Total>,
        norms: Global<Norms>,
        (parts, used): (u32, u32),
        share: Shares,
        meanwhile: impl FnOnce(),
    ) -> f32 {
        let Decide { layout, shape, extent, .. } = *self;
        let (t, warp) = (thread::thread_idx_x(), thread::thread_idx_x() / 32);
        let begin = 1 + thread::block_idx_x() * share.blocks;
        let end = (begin + share.blocks).min(extent.local);
        self.copy(begin, end);
        let first = (self.row * parts) as usize;
        let two = |part: u32| {
            [part, part + 32].map(|part| {
                let none = Norms { kappa: 0.0, nu: 0.0 };
                if warp == WARPS - 1 && part < used { norms.load(first + part as usize) } else { none }
            })
        };
        let ahead = two(warp::lane_id());
        meanwhile();
        self.levels(totals, first, used);
        if warp == WARPS - 1 {
            self.largest_norms(ahead, two, used);
        }
        let kinds = kinds_of(heads_of(shape.group));
        let mut place = 4 * t;
        while place < kinds * BIN_ROW {
            layout.bins.store_vector(place, UVec4::ZERO);
            place += 4 * DECIDE_THREADS;
        }
        if t < layout.rest.len() {
            layout.rest.store(t, 0);
        }
        if t == 0 {
            layout.queued.store(0, 0);
        }
        async_copy::wait::<0>();
        thread::sync_threads();

        let reference = self.reference();
        let inverse = inverse_of(layout.norms.load(0).nu);
        let mut start = begin;
        while start < end {
            self.count(start, end.min(start + ROUND), reference, inverse);
            start += ROUND;
            if start < end {
                thread::sync_threads();
                self.copy(start, end);
                async_copy::wait::<0>();
                thread::sync_threads();
            }
        }
        thread::sync_threads();
        let mut kind = 0;
        while kind < kinds {
            let own = layout.bins.load(kind * BIN_ROW + t);
            let at = self.bins_of(kind) + t as usize;
            if own > 0 {
                if kind == kinds - 1 {
                    self.bins.atomic_max(at, own);
                } else {
                    self.bins.atomic_add(at, own);
                }
            }
            kind += 1;
        }
        reference
    }

    /// Starts copying masses and ν of the blocks from `start` on, of a round at the most, to the shared
    /// memory of keys.
    #[simt::device]
    fn copy(&self, start: u32, end: u32) {
        let (t, to) = (thread::thread_idx_x(), self.layout.ranking.keys);
        let heads = heads_of(self.shape.group);
        let blocks = (end.max(start) - start).min(ROUND);
        let row = (self.row * self.shape.blocks) as usize;
        let from = (row + start as usize) * heads as usize;
        let mut word = 4 * t;
        while word < blocks * heads {
            to.copy_async(word, self.masses, from + word as usize);
            word += 4 * DECIDE_THREADS;
        }
        // A share begins behind a multiple of 32.
        if 4 * t < blocks + 1 {
            to.copy_async(NUS + 4 * t, self.nus, row + (start - 1 + 4 * t) as usize);
        }
        async_copy::commit();
    }

    /// Bounds of all parts' norms, of which `two` loads two. A warp's work.
    #[simt::device]
    fn largest_norms(&self, ahead: [Norms; 2], two: impl Fn(u32) -> [Norms; 2], used: u32) {
        let lane = warp::lane_id();
        let both = |[a, b]: [Norms; 2]| Norms { kappa: max(a.kappa, b.kappa), nu: max(a.nu, b.nu) };
        let mut most = both(ahead);
        let mut part = lane + 64;
        while part < used {
            most = both([most, both(two(part))]);
            part += 64;
        }
        unroll!(for i in 0..5 {
            most.kappa = max(most.kappa, warp_shuffle_xor(FULL_MASK, most.kappa, 1 << i, 32));
            most.nu = max(most.nu, warp_shuffle_xor(FULL_MASK, most.nu, 1 << i, 32));
        });
        if lane == 0 {
            self.layout.norms.store(0, most);
        }
    }

    /// T_g of every head, a warp each.
    #[simt::device]
    fn levels(&self, totals: Global<Total>, first: usize, used: u32) {
        let (layout, heads) = (self.layout, heads_of(self.shape.group));
        let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
        let mut head = warp;
        while head < heads {
            let (mut all, mut most) = (PartialRow::EMPTY, f32::NEG_INFINITY);
            let mut part = lane;
            while part < used {
                // Two at once are waited for.
                let two = [part, part + 32].map(|part| {
                    let at = (first + part as usize) * heads as usize + head as usize;
                    if part < used { totals.load_vector(at) } else { Total::NONE }
                });
                unroll!(for i in 0..2 {
                    (all, most) = (joined(all, two[i].estimate()), max(most, two[i].most));
                });
                part += 64;
            }
            let mut reference = all.reference;
            unroll!(for i in 0..5 {
                reference = max(reference, warp_shuffle_xor(FULL_MASK, reference, 1 << i, 32));
                most = max(most, warp_shuffle_xor(FULL_MASK, most, 1 << i, 32));
            });
            let sum = warp::warp_sum_f32(all.sum * exp2_nonpositive(all.reference - reference));
            if lane == 0 {
                layout.levels.store(head, level_of(PartialRow { reference, sum }));
                layout.mosts.store(head, most);
            }
            head += WARPS;
        }
    }

    /// The logarithm that masses are counted against, of levels that are known. The whole warp calls it.
    #[simt::device]
    fn reference(&self) -> f32 {
        let (layout, lane) = (self.layout, warp::lane_id());
        let mut top = f32::NEG_INFINITY;
        if self.shape.budget_log2 >= 0.0 {
            if lane < heads_of(self.shape.group) {
                top = top_of(top, layout.mosts.load(lane), layout.levels.load(lane));
            }
            unroll!(for i in 0..5 {
                top = max(top, warp_shuffle_xor(FULL_MASK, top, 1 << i, 32));
            });
        }
        reference_of(self.shape.budget_log2, top)
    }

    /// Ranks and counts the blocks from `start` to before `end`, whose masses are in shared memory. A thread
    /// has a query head of a block: code for all heads of one would be eight times as long, and code that
    /// runs once is waited for.
    #[simt::device]
    fn count(&self, start: u32, end: u32, reference: f32, inverse: f32) {
        let Decide { layout, shape, extent, .. } = *self;
        let (t, heads, here) = (thread::thread_idx_x(), heads_of(shape.group), layout.ranking.keys);
        let head = t & (heads - 1);
        let (level, units) = (layout.levels.load(head), units(extent.distant()));
        let pairs = (end - start) * heads;
        let mut first = 0;
        while first < pairs {
            let (pair, there) = (first + t, first + t < pairs);
            let block = pair >> heads.trailing_zeros();
            let (mut relative, mut nu) = (f32::NEG_INFINITY, 0f32);
            if there {
                relative = f32::from_bits(here.load(pair)) - level;
                nu = f32::from_bits(here.load(NUS + 1 + block));
            }
            // NaN comes to have the bits that the order of ranks knows.
            let mut rank = maximum(relative, f32::NEG_INFINITY);
            unroll!(for i in 0..3 {
                rank = maximum(rank, warp_shuffle_xor(FULL_MASK, rank, 1 << i, 32));
            });
            if heads > 8 {
                rank = maximum(rank, warp_shuffle_xor(FULL_MASK, rank, 8, 32));
            }
            let bin = bin_of(rank - reference);
            if there && head == 0 {
                self.ranks.store((self.row * shape.blocks + start + block) as usize, ordered(rank));
                if bin < MASS_BINS {
                    layout.bins.atomic_add(2 * heads * BIN_ROW + bin, 1);
                    layout.bins.atomic_max((2 * heads + 1) * BIN_ROW + bin, nu.to_bits());
                }
            }
            if there && bin < MASS_BINS {
                let own = in_units(relative - reference, ratio_of(nu, inverse), bin, units);
                unroll!(for kind in 0..2 {
                    if own[kind] > 0 {
                        layout.bins.atomic_add((kind as u32 * heads + head) * BIN_ROW + bin, own[kind]);
                    }
                });
            }
            first += DECIDE_THREADS;
        }
    }
}

const _: () = assert!(NUS + ROUND + 4 <= crate::gather::top::CACHED, "a round is where keys will be");
