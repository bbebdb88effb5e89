//! What a KV head leaves out: the part of [`decide`](fn@super::decide) of the thread block that comes last.

use super::counting::{
    Edges, MASS_BINS, SHARE, STEPS, Skipped, heads_of, in_units, inverse_of, octave_unit, ratio_of, scale_of,
    step_of, unit_of, units,
};
use super::deciding::{DECIDE_THREADS, Decide};
use crate::attention::ROWS;
use crate::gather::rule::Extent;
use crate::gather::scoring::score_of;
use crate::gather::top::{Cut, Keys};
use glam::UVec4;
use simt::math::canonical_nan;
use simt::warp::{self, FULL_MASK, sync_warp, warp_shuffle_idx, warp_shuffle_up};
use simt::{GlobalMut, thread, unroll};

/// Where what is left out ends: the same in every thread.
#[derive(Clone, Copy)]
pub(super) struct Border {
    /// Bins that go as a whole, from the lowest on.
    pub whole: u32,
    /// Blocks in these.
    pub before: u32,
    /// Blocks of the bin behind these; of no bin, if all are whole.
    pub inside: u32,
    /// Distant blocks that are left out.
    pub out: u32,
    /// The largest norm of a value in whole bins, as its bits.
    nu: u32,
}

impl Border {
    /// Whether some blocks of the bin behind are left out.
    #[inline(always)]
    pub fn splits(self) -> bool {
        self.out > self.before
    }

    /// Blocks of the bin behind that are kept.
    #[inline(always)]
    pub fn keeps(self) -> u32 {
        self.inside - (self.out - self.before)
    }
}

/// What a lane has of the bins: those of an octave. A warp has all of a head's masses and moments.
pub(super) struct Octave {
    /// Of the warp's head of the first eight.
    own: [[u32; 8]; 2],
    /// Bins that go as a whole.
    goes: u32,
    steps: [f32; 8],
    unit: f32,
}

impl Octave {
    /// So many in each bin as a mass, but for [`unit`](Self::unit).
    #[inline(always)]
    fn weight(&self, own: [u32; 8], step: usize) -> f32 {
        own[step] as f32 * self.steps[step]
    }
}

impl Decide {
    /// A lane's bins of one kind.
    #[simt::device]
    fn eight(&self, kind: u32) -> [u32; 8] {
        let at = self.bins_of(kind) + (STEPS * warp::lane_id()) as usize;
        let low: UVec4 = self.bins.load_vector(at);
        let high: UVec4 = self.bins.load_vector(at + 4);
        let (low, high) = (low.to_array(), high.to_array());
        [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]]
    }

    /// Sets a lane's bins of one kind back.
    #[simt::device]
    fn clear(&self, kind: u32) {
        let at = self.bins_of(kind) + (STEPS * warp::lane_id()) as usize;
        self.bins.store_vector(at, UVec4::ZERO);
        self.bins.store_vector(at + 4, UVec4::ZERO);
    }

    /// Where what is left out ends, and what a lane has of the bins. The whole thread block calls it;
    /// `meanwhile` is called while what it asks for is on its way.
    #[simt::device]
    pub fn border(&self, meanwhile: impl FnOnce()) -> (Border, Octave) {
        let Decide { layout, shape, extent, .. } = *self;
        let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
        let heads = heads_of(shape.group);
        let (counts, largest) = (self.eight(2 * heads), self.eight(2 * heads + 1));
        let own = [self.eight(warp), self.eight(heads + warp)];
        let units = units(extent.distant());
        let step = step_of(lane % STEPS);
        let mut steps = [0f32; 8];
        unroll!(for i in 0..8 {
            steps[i] = warp_shuffle_idx(FULL_MASK, step, i as u32, 32);
        });
        let mut octave = Octave { own, goes: 0, steps, unit: octave_unit(lane, units) };
        if shape.budget_log2 < 0.0 {
            let fits = self.fitting(&octave);
            if lane == 0 {
                layout.words.store(warp, fits);
            }
        }
        meanwhile();
        // Every warp has read what is cleared behind it.
        thread::sync_threads();
        if warp < 2 {
            self.clear(2 * heads + warp);
        }
        let mut dispensable = extent.distant();
        if shape.budget_log2 < 0.0 {
            let mut fits = MASS_BINS;
            unroll!(for w in 0..8 {
                fits = layout.words.load(w as u32).min(fits);
            });
            let mut count = 0;
            unroll!(for i in 0..8 {
                count += if STEPS * lane + (i as u32) < fits { counts[i] } else { 0 };
            });
            dispensable = warp::warp_reduce_add_u32(FULL_MASK, count);
        }
        let out = extent.distant() - extent.chosen.max(extent.distant() - dispensable);
        let mut upto = counts;
        unroll!(for i in 1..8 {
            upto[i] += upto[i - 1];
        });
        let mut all = upto[7];
        unroll!(for step in 0..5 {
            let others = warp_shuffle_up(FULL_MASK, all, 1 << step, 32);
            all += if lane >= 1 << step { others } else { 0 };
        });
        let lower = all - upto[7];
        let (mut goes, mut before, mut behind, mut nu) = (0, 0, extent.distant(), 0);
        unroll!(for i in 0..8 {
            let upto = lower + upto[i];
            if upto <= out {
                (goes, before, nu) = (goes + 1, upto, largest[i].max(nu));
            } else {
                behind = upto.min(behind);
            }
        });
        octave.goes = goes;
        let before = warp::warp_reduce_max_u32(FULL_MASK, before);
        let border = Border {
            whole: warp::warp_reduce_add_u32(FULL_MASK, goes),
            before,
            inside: warp::warp_reduce_min_u32(FULL_MASK, behind) - before,
            out,
            nu: warp::warp_reduce_max_u32(FULL_MASK, nu),
        };
        (border, octave)
    }

    /// How many bins, from the lowest on, can go within the budget of the warp's heads.
    #[simt::device]
    fn fitting(&self, octave: &Octave) -> u32 {
        let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
        let mut fitting = MASS_BINS;
        let mut group = 0;
        while group < self.shape.row_groups() {
            let own = if group > 0 { self.eight(ROWS * group + warp) } else { octave.own[0] };
            let mut upto = [0f32; 8];
            let mut sum = 0f32;
            unroll!(for i in 0..8 {
                sum += octave.weight(own, i);
                upto[i] = sum * octave.unit;
            });
            let mut all = upto[7];
            unroll!(for step in 0..5 {
                let others = warp_shuffle_up(FULL_MASK, all, 1 << step, 32);
                all += if lane >= 1 << step { others } else { 0.0 };
            });
            let others = warp_shuffle_up(FULL_MASK, all, 1, 32);
            let lower = if lane > 0 { others } else { 0.0 };
            let mut fits = 0;
            unroll!(for i in 0..8 {
                fits += (lower + upto[i] <= SHARE) as u32;
            });
            // Up to the first lane whose octave does not fit as a whole.
            let octaves = (!warp::warp_vote_ballot(FULL_MASK, fits == STEPS)).trailing_zeros();
            let within = warp_shuffle_idx(FULL_MASK, fits, octaves % 32, 32);
            let bins = STEPS * octaves + if octaves < 32 { within } else { 0 };
            fitting = fitting.min(bins);
            group += 1;
        }
        fitting
    }

    /// Sums masses and moments of what goes as a whole, and sets their bins back.
    #[simt::device]
    pub fn sum_up(&self, octave: &Octave) {
        let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
        let heads = heads_of(self.shape.group);
        let mut group = 0;
        while group < self.shape.row_groups() {
            let head = ROWS * group + warp;
            unroll!(for kind in 0..2 {
                let row = kind as u32 * heads + head;
                let own = if group > 0 { self.eight(row) } else { octave.own[kind] };
                self.clear(row);
                let mut sum = 0f32;
                unroll!(for i in 0..8 {
                    sum += if (i as u32) < octave.goes { octave.weight(own, i) } else { 0.0 };
                });
                let sum = warp::warp_sum_f32(sum * octave.unit);
                if lane == 0 {
                    self.layout.sums.store(row, sum);
                }
            });
            group += 1;
        }
    }

    /// Counts those blocks of the bin behind the whole ones that are left out, of any number. Blocks that tie
    /// at the cut count as left out.
    #[simt::device]
    pub fn rest(&self, border: Border, keys: Keys, cut: Cut, reference: f32) {
        let Decide { layout, shape, extent, .. } = *self;
        let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
        let heads = heads_of(shape.group);
        let (units, inverse) = (units(extent.distant()), inverse_of(layout.norms.load(0).nu));
        let edges = Edges::of(border.whole);
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
                    !cut.keeps(key) && edges.place(score_of(key) - reference).1
                };
                let ballot = warp::warp_vote_ballot(FULL_MASK, counts);
                if counts {
                    let place = (ballot & ((1 << lane) - 1)).count_ones();
                    layout.queue.store(queue + queued + place, block);
                }
                queued += ballot.count_ones();
                start += DECIDE_THREADS;
                while queued >= 32 || queued > 0 && start >= extent.local {
                    sync_warp(FULL_MASK);
                    let some = queued.min(32);
                    queued -= some;
                    if lane < some {
                        // The last of them, so that the others stay where they are.
                        let block = layout.queue.load(queue + queued + lane);
                        let nu = self.nus.load((self.row * shape.blocks + block) as usize);
                        largest = nu.to_bits().max(largest);
                        let relative = self.relative(self.masses(block, group), group);
                        unroll!(for i in 0..8 {
                            let x = relative[i] - reference;
                            let own = in_units(x, ratio_of(nu, inverse), border.whole, units);
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
                layout.rest.atomic_max(2 * heads, largest);
            }
            group += 1;
        }
    }

    /// Writes what is left out of each head, once all of it is summed up.
    #[simt::device]
    pub fn tell(&self, border: Border, reference: f32, skipped: GlobalMut<Skipped>) {
        let Decide { layout, shape, extent, row, .. } = *self;
        let t = thread::thread_idx_x();
        let heads = heads_of(shape.group);
        if t < heads {
            let unit = unit_of(border.whole.min(MASS_BINS - 1), units(extent.distant()));
            let scale = scale_of(reference);
            // Of what is in no bin nothing is known.
            let known = !border.splits() || border.whole < MASS_BINS;
            let sum = |kind: u32| {
                let sum = layout.sums.load(kind) + layout.rest.load(kind) as f32 * unit;
                if known { canonical_nan(sum * scale) } else { f32::NAN }
            };
            let moment = canonical_nan(sum(heads + t) * layout.norms.load(0).nu);
            let nu_rest = f32::from_bits(layout.rest.load(2 * heads).max(border.nu));
            let found = Skipped { mass: sum(t), moment, level: layout.levels.load(t), nu_rest };
            skipped.store_vector((row * heads + t) as usize, found);
        }
    }

    /// The extent with what is kept in fact.
    #[inline(always)]
    pub fn kept(&self, border: Border) -> Extent {
        Extent { chosen: self.extent.distant() - border.out, ..self.extent }
    }
}
