//! What a KV head leaves out: the part of [`decide`](fn@super::decide) of the thread block that comes last.

use super::counting::{
    MASS_BINS, SHARE, Skipped, bin_of, heads_of, in_units, inverse_of, kinds_of, ratio_of, scale_of, unit_of,
    units,
};
use super::deciding::{DECIDE_THREADS, Decide, WARPS};
use crate::attention::ROWS;
use crate::gather::choice::score_of;
use crate::gather::rule::Extent;
use crate::gather::top::{Cut, Keys};
use simt::math::canonical_nan;
use simt::warp::{self, FULL_MASK, sync_warp, warp_shuffle_up};
use simt::{GlobalMut, thread, unroll};

impl Decide {
    /// Sums up to each bin, of which a thread has one; sets the bins in memory back. The distant blocks that
    /// can go within the budget.
    #[simt::device]
    pub fn sums(&self) -> u32 {
        let Decide { layout, shape, extent, .. } = *self;
        let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
        let heads = heads_of(shape.group);
        let take = |kind: u32| {
            let at = self.bins_of(kind) + t as usize;
            let own = self.bins.load(at);
            self.bins.store(at, 0);
            own
        };
        let unit = unit_of(t, units(extent.distant()));
        let take_eight = |eight: u32| {
            let mut own = [0u32; 8];
            unroll!(for i in 0..8 {
                own[i] = take(ROWS * eight + i as u32);
            });
            own
        };
        // All that is loaded is on its way before the first of it is waited for.
        let (mut count, largest) = (take(2 * heads), take(2 * heads + 1));
        let mut ahead = take_eight(0);
        layout.bins.store((2 * heads + 1) * MASS_BINS + t, largest);
        let mut fits = true;
        let mut eight = 0;
        while eight < 2 * shape.row_groups() {
            let own = ahead;
            if eight + 1 < 2 * shape.row_groups() {
                ahead = take_eight(eight + 1);
            }
            let mut sums = [0f32; 8];
            unroll!(for i in 0..8 {
                sums[i] = own[i] as f32 * unit;
            });
            unroll!(for i in 0..8 {
                unroll!(for step in 0..5 {
                    let others = warp_shuffle_up(FULL_MASK, sums[i], 1 << step, 32);
                    sums[i] += if lane >= 1 << step { others } else { 0.0 };
                });
                if lane == 31 {
                    layout.sums.store(warp * ROWS + i as u32, sums[i]);
                }
            });
            thread::sync_threads();
            unroll!(for i in 0..8 {
                unroll!(for w in 0..7 {
                    let other = layout.sums.load(w as u32 * ROWS + i as u32);
                    sums[i] += if (w as u32) < warp { other } else { 0.0 };
                });
                fits &= eight >= shape.row_groups() || sums[i] <= SHARE;
                layout.bins.store((ROWS * eight + i as u32) * MASS_BINS + t, sums[i].to_bits());
            });
            thread::sync_threads();
            eight += 1;
        }
        unroll!(for step in 0..5 {
            let others = warp_shuffle_up(FULL_MASK, count, 1 << step, 32);
            count += if lane >= 1 << step { others } else { 0 };
        });
        if lane == 31 {
            layout.words.store(warp, count);
        }
        thread::sync_threads();
        unroll!(for w in 0..7 {
            count += if (w as u32) < warp { layout.words.load(w as u32) } else { 0 };
        });
        layout.bins.store(2 * heads * MASS_BINS + t, count);
        let most = warp::warp_reduce_max_u32(FULL_MASK, if fits { count } else { 0 });
        if lane == 0 {
            layout.words.store(WARPS + warp, most);
        }
        if t < kinds_of(heads) {
            layout.rest.store(t, 0);
        }
        thread::sync_threads();
        let mut most = 0;
        unroll!(for w in 0..8 {
            most = layout.words.load(WARPS + w as u32).max(most);
        });
        if shape.budget_log2 < 0.0 { most } else { extent.distant() }
    }

    /// Sums up what is left out. Blocks that tie at the cut count as left out.
    #[simt::device]
    pub fn left_out(&self, extent: Extent, keys: Keys, cut: Cut, skipped: GlobalMut<Skipped>) {
        let Decide { layout, shape, .. } = *self;
        let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
        let heads = heads_of(shape.group);
        let (largest, blocks) = ((2 * heads + 1) * MASS_BINS, 2 * heads * MASS_BINS);
        let out = extent.distant() - extent.chosen;
        // Bins that go as a whole come first.
        let goes = layout.bins.load(blocks + t) <= out;
        let whole = thread::sync_threads_count(goes as u32);
        let before = if whole > 0 { layout.bins.load(blocks + (whole - 1)) } else { 0 };
        let nu = warp::warp_reduce_max_u32(FULL_MASK, if goes { layout.bins.load(largest + t) } else { 0 });
        if lane == 0 {
            layout.rest.atomic_max(2 * heads + 1, nu);
        }
        // Of the bin behind these some.
        let reference = self.reference();
        let units = units(extent.distant());
        if out > before {
            let inverse = inverse_of(layout.norms.load(0).nu);
            let mut group = 0;
            while group < shape.row_groups() {
                let (mut sums, mut largest) = ([[0u32; 2]; 8], 0);
                // What is loaded of a block is waited for: those that count are looked at 32 together.
                let (queue, mut queued) = (64 * warp, 0);
                let mut start = 1 + 32 * warp;
                while start < extent.local {
                    let block = start + lane;
                    let counts = block < extent.local && {
                        let key = keys.get(block);
                        !cut.keeps(key) && bin_of(score_of(key) - reference) == whole
                    };
                    let ballot = warp::warp_vote_ballot(FULL_MASK, counts);
                    if counts {
                        let place = (ballot & ((1 << lane) - 1)).count_ones();
                        layout.queues.store(queue + queued + place, block);
                    }
                    queued += ballot.count_ones();
                    start += DECIDE_THREADS;
                    while queued >= 32 || queued > 0 && start >= extent.local {
                        sync_warp(FULL_MASK);
                        let some = queued.min(32);
                        queued -= some;
                        if lane < some {
                            // The last of them, so that the others stay where they are.
                            let block = layout.queues.load(queue + queued + lane);
                            let nu = self.nus.load((self.row * shape.blocks + block) as usize);
                            largest = nu.to_bits().max(largest);
                            let relative = self.relative(self.masses(block, group), group);
                            unroll!(for i in 0..8 {
                                let x = relative[i] - reference;
                                let own = in_units(x, ratio_of(nu, inverse), whole, units);
                                sums[i] = [sums[i][0] + own[0], sums[i][1] + own[1]];
                            });
                        }
                        sync_warp(FULL_MASK);
                    }
                }
                unroll!(for i in 0..8 {
                    unroll!(for kind in 0..2 {
                        let sum = warp::warp_reduce_add_u32(FULL_MASK, sums[i][kind]);
                        if lane == 0 && sum > 0 {
                            layout.rest.atomic_add(kind as u32 * heads + ROWS * group + i as u32, sum);
                        }
                    });
                });
                let largest = warp::warp_reduce_max_u32(FULL_MASK, largest);
                if lane == 0 {
                    layout.rest.atomic_max(2 * heads + 1, largest);
                }
                group += 1;
            }
        }
        thread::sync_threads();
        if t < heads {
            let unit = unit_of(whole.min(MASS_BINS - 1), units);
            let scale = scale_of(reference);
            let sum = |kind: u32| {
                let bin = kind * MASS_BINS + whole.max(1) - 1;
                let whole_bins = if whole > 0 { f32::from_bits(layout.bins.load(bin)) } else { 0.0 };
                // Of what is in no bin nothing is known.
                let known = out == before || whole < MASS_BINS;
                let rest = layout.rest.load(kind) as f32 * unit;
                if known { canonical_nan((whole_bins + rest) * scale) } else { f32::NAN }
            };
            let moment = canonical_nan(sum(heads + t) * layout.norms.load(0).nu);
            let nu_rest = f32::from_bits(layout.rest.load(2 * heads + 1));
            let found = Skipped { mass: sum(t), moment, level: layout.levels.load(t), nu_rest };
            let at = (self.row * heads + t) as usize;
            skipped.store_vector(at, found);
        }
        thread::sync_threads();
    }
}
