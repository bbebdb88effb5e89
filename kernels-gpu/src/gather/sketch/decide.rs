//! What is kept, by bounds on the mass of every block: the work of one thread block for a KV head.
//!
//! # Mathematics
//! With m_bg the mass of block b for query head g, rounded up, and T_g the estimate of all of it
//! ([`scan`](fn@super::scan)), blocks are ranked by max_g m_bg / T_g. Kept are the k best distant blocks, and
//! as many more as it takes until, by the same estimate,
//!
//! ```text
//! Σ over what is left out of m_bg <= 0.9·budget·T_g          for every g
//! ```
//!
//! unless the budget is all of the mass.
//!
//! What is left out is then summed up from above, relative to T_g: mass Σ m_bg, and moment Σ m_bg·ν_b with
//! ν_b the largest norm of the block's values. [`settle`](fn@super::settle) makes a bound of it, with the
//! mass that was attended to in place of T_g.
//!
//! # Work
//! Ranks below the budget fall into 256 bins, an eighth of an octave each, with a histogram of the mass for
//! every head. Masses are whole numbers of 2^−V of their bin's upper edge there, so that the order of the
//! atomics does not matter. A sum from the lowest bin on says how many blocks can go. Then the best are found
//! as [`select`](fn@crate::gather::select) finds them. Sums of f32 have a fixed order.

use super::scanning::{Norms, ScanShape, WARPS, joined};
use crate::attention::{PartialRow, ROWS};
use crate::gather::choice::ordered;
use crate::gather::listing::Listing;
use crate::gather::rule::Extent;
use crate::gather::top::{Cut, Keys, Ranking, ranking};
use glam::Vec4;
use simt::math::{canonical_nan, exp2, exp2_nonpositive, fma, log2, max, maximum, to_i32_floor};
use simt::warp::{self, FULL_MASK, warp_shuffle_idx, warp_shuffle_up, warp_shuffle_xor};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, thread, unroll};

const THREADS: u32 = 32 * WARPS;
/// Bins of the histogram: a thread each.
pub const MASS_BINS: u32 = 256;
/// Bins of an octave.
pub const OCTAVE: f32 = 8.0;
/// The share of the budget that the estimate may use.
pub const SHARE: f32 = 0.9;
/// The most query heads of a KV head.
const MOST_HEADS: u32 = 16;
const _: () = assert!(THREADS == MASS_BINS, "a thread has a bin");

/// Query heads that memory is laid out for: the group, rounded up to a multiple of eight.
#[inline(always)]
pub const fn heads_of(group: u32) -> u32 {
    group.next_multiple_of(ROWS)
}

/// What a query head does not attend to. `[sequences, kv_heads, heads]`.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Skipped {
    /// Its mass, at most, relative to 2^`level`.
    pub mass: f32,
    /// Σ mass · ν over its blocks, likewise.
    pub moment: f32,
    /// T_g as a logarithm to base two.
    pub level: f32,
    /// No value left out has a larger norm.
    pub nu_rest: f32,
}

/// What is known of a sequence and KV head. `[sequences, kv_heads]`.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Whole {
    /// No key of the sequence has a larger norm.
    pub kappa: f32,
    /// No value of the sequence has.
    pub nu: f32,
    /// Tokens left out.
    pub tokens: u32,
    /// 0.
    pub reserved: u32,
}

/// Shared memory of the thread block that decides.
#[derive(Clone, Copy)]
pub struct DecideLayout {
    ranking: Ranking,
    /// T_g, [heads].
    levels: Shared<f32>,
    /// Masses by head and bin, and blocks by bin.
    bins: Shared<u32>,
    blocks: Shared<u32>,
    /// What warps tell each other, [warps, 16].
    sums: Shared<f32>,
    words: Shared<u32>,
    /// Bounds of all parts' norms.
    norms: Shared<Norms>,
    /// Its size.
    pub bytes: u32,
}

/// Lays it out.
pub const fn decide_layout(plan: &mut SharedPlan) -> DecideLayout {
    let ranking = ranking(plan);
    let levels = plan.array(MOST_HEADS);
    let bins = plan.array(MOST_HEADS * MASS_BINS);
    let blocks = plan.array(MASS_BINS);
    let sums = plan.array(WARPS * 2 * ROWS);
    let words = plan.array(2 * WARPS);
    let norms = plan.array(1);
    DecideLayout { ranking, levels, bins, blocks, sums, words, norms, bytes: plan.bytes() }
}

/// A bin's upper edge, as a logarithm relative to the budget; at most 0.
#[inline(always)]
pub fn edge(bin: u32) -> f32 {
    (bin as f32 - (MASS_BINS - 1) as f32) / OCTAVE
}

/// The bin of a rank `x` below 0, relative to the budget.
#[inline(always)]
pub fn bin_of(x: f32) -> u32 {
    let bin = to_i32_floor(x * OCTAVE) + MASS_BINS as i32;
    bin.clamp(0, MASS_BINS as i32 - 1) as u32
}

/// Units of a bin's upper edge: so many fit a word for each of `blocks`.
#[inline(always)]
pub fn units(blocks: u32) -> f32 {
    f32::from_bits((127 + blocks.leading_zeros().max(9) - 1).min(127 + 22) << 23)
}

/// A mass in units of its bin, `x` its logarithm relative to the budget.
#[inline(always)]
pub fn in_units(x: f32, bin: u32, units: f32) -> u32 {
    let weight = exp2_nonpositive(x - edge(bin));
    if weight > 0.0 { to_i32_floor(weight * units) as u32 + 1 } else { 0 }
}

/// A head's level from its total: a number in any case.
#[inline(always)]
pub fn level_of(total: PartialRow) -> f32 {
    let level = total.reference + log2(total.sum);
    if simt::math::abs(level) < 1.0e29 { level } else { 0.0 }
}

/// All that the thread block knows.
pub(super) struct Decide {
    pub layout: DecideLayout,
    pub masses: Global<f32>,
    pub nus: Global<f32>,
    pub totals: Global<PartialRow>,
    pub norms: Global<Norms>,
    pub table: Global<u32>,
    pub ranks: GlobalMut<u32>,
    pub list: GlobalMut<u32>,
    pub counts: GlobalMut<u32>,
    pub entries: GlobalMut<u32>,
    pub kept: GlobalMut<u32>,
    pub skipped: GlobalMut<Skipped>,
    pub whole: GlobalMut<Whole>,
    pub shape: ScanShape,
    pub extent: Extent,
    pub parts: u32,
    pub used: u32,
    pub row: u32,
    pub head: u32,
    pub sequence: u32,
}

impl Decide {
    /// The whole thread block calls it.
    #[simt::device]
    pub fn decide(&self) {
        let Decide { layout, shape, extent, .. } = *self;
        let t = thread::thread_idx_x();
        self.levels();
        let mut i = t;
        while i < MOST_HEADS * MASS_BINS {
            layout.bins.store(i, 0);
            i += THREADS;
        }
        layout.blocks.store(t, 0);
        thread::sync_threads();
        self.rank();
        thread::sync_threads();
        let bounded = shape.budget_log2 < 0.0;
        let dispensable = if bounded { self.dispensable() } else { extent.distant() };
        let wanted = extent.chosen.max(extent.distant() - dispensable);
        let extent = Extent { chosen: wanted, ..extent };
        let first = (self.row * shape.blocks) as usize;
        let mut cut = Cut::ALL;
        if extent.ranked() {
            let (layout, end) = (layout.ranking, extent.local);
            let keys = Keys { layout, keys: self.ranks, first, end, here: false, live: false };
            cut = keys.cut(wanted);
            keys.write(cut, |place, index| self.list.store(first + 1 + place as usize, index));
        }
        self.sum_up(extent, cut);
        let listing = Listing {
            table: self.table,
            list: self.list,
            counts: self.counts,
            entries: self.entries,
            kept: self.kept,
            rule: shape.rule,
            most: shape.blocks,
            max_blocks: shape.max_blocks,
            kv_heads: shape.kv_heads,
            row: self.row,
            head: self.head,
            sequence: self.sequence,
        };
        listing.complete(extent);
    }

    /// T_g of every head, and the norms of all parts.
    #[simt::device]
    fn levels(&self) {
        let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
        let heads = heads_of(self.shape.group);
        let first = (self.row * self.parts) as usize;
        let mut head = warp;
        while head < heads {
            let mut all = PartialRow::EMPTY;
            let mut part = lane;
            while part < self.used {
                all = joined(all, self.totals.load((first + part as usize) * heads as usize + head as usize));
                part += 32;
            }
            let mut reference = all.reference;
            unroll!(for i in 0..5 {
                reference = max(reference, warp_shuffle_xor(FULL_MASK, reference, 1 << i, 32));
            });
            let sum = warp::warp_sum_f32(all.sum * exp2_nonpositive(all.reference - reference));
            if lane == 0 {
                self.layout.levels.store(head, level_of(PartialRow { reference, sum }));
            }
            head += WARPS;
        }
        if warp == 0 {
            let mut most = Norms { kappa: 0.0, nu: 0.0 };
            let mut part = lane;
            while part < self.used {
                let norms = self.norms.load(first + part as usize);
                most = Norms { kappa: max(most.kappa, norms.kappa), nu: max(most.nu, norms.nu) };
                part += 32;
            }
            unroll!(for i in 0..5 {
                most.kappa = max(most.kappa, warp_shuffle_xor(FULL_MASK, most.kappa, 1 << i, 32));
                most.nu = max(most.nu, warp_shuffle_xor(FULL_MASK, most.nu, 1 << i, 32));
            });
            if lane == 0 {
                self.layout.norms.store(0, most);
            }
        }
    }

    /// Eight heads' masses of a block relative to T_g, as logarithms.
    #[simt::device]
    fn relative(&self, block: u32, group: u32) -> [f32; 8] {
        let heads = heads_of(self.shape.group) as usize;
        let block = (self.row * self.shape.blocks) as usize + block as usize;
        let at = block * heads + (ROWS * group) as usize;
        let (low, high): (Vec4, Vec4) = (self.masses.load_vector(at), self.masses.load_vector(at + 4));
        let (low, high) = (low.to_array(), high.to_array());
        let mut relative = [0f32; 8];
        unroll!(for i in 0..8 {
            let mass = if i < 4 { low[i % 4] } else { high[i % 4] };
            relative[i] = mass - self.layout.levels.load(ROWS * group + i as u32);
        });
        relative
    }

    /// Ranks the distant blocks, and fills the histogram.
    #[simt::device]
    fn rank(&self) {
        let Decide { layout, shape, extent, .. } = *self;
        let units = units(extent.distant());
        let (t, lane) = (thread::thread_idx_x(), warp::lane_id());
        let mut first = 1;
        while first < extent.local {
            let block = first + t;
            let there = block < extent.local;
            let mut rank = f32::NEG_INFINITY;
            let mut group = 0;
            while there && group < shape.row_groups() {
                let relative = self.relative(block, group);
                unroll!(for i in 0..8 {
                    rank = maximum(rank, relative[i]);
                });
                group += 1;
            }
            if there {
                self.ranks.store((self.row * shape.blocks + block) as usize, ordered(rank));
            }
            let below = rank - shape.budget_log2;
            let counted = there && below < 0.0;
            let bin = if counted { bin_of(below) } else { MASS_BINS };
            // Where attention is flat a warp's blocks are all in one bin: then one lane speaks for all.
            let one = warp::warp_vote_all(FULL_MASK, bin == warp_shuffle_idx(FULL_MASK, bin, 0, 32));
            let speaks = counted && (!one || lane == 0);
            if speaks {
                layout.blocks.atomic_add(bin, if one { 32 } else { 1 });
            }
            let mut group = 0;
            while group < shape.row_groups() {
                let relative = if counted { self.relative(block, group) } else { [f32::NEG_INFINITY; 8] };
                unroll!(for i in 0..8 {
                    let own = if counted { in_units(relative[i] - shape.budget_log2, bin, units) } else { 0 };
                    let mass = if one { warp::warp_reduce_add_u32(FULL_MASK, own) } else { own };
                    if speaks && mass > 0 {
                        layout.bins.atomic_add((ROWS * group + i as u32) * MASS_BINS + bin, mass);
                    }
                });
                group += 1;
            }
            first += THREADS;
        }
    }

    /// Distant blocks that can go within the budget.
    #[simt::device]
    fn dispensable(&self) -> u32 {
        let Decide { layout, shape, extent, .. } = *self;
        let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
        let unit = exp2_nonpositive(edge(t)) / units(extent.distant());
        let mut fits = true;
        let mut group = 0;
        while group < shape.row_groups() {
            let mut sums = [0f32; 8];
            unroll!(for i in 0..8 {
                let mut sum = layout.bins.load((ROWS * group + i as u32) * MASS_BINS + t) as f32 * unit;
                unroll!(for step in 0..5 {
                    let others = warp_shuffle_up(FULL_MASK, sum, 1 << step, 32);
                    sum += if lane >= 1 << step { others } else { 0.0 };
                });
                sums[i] = sum;
                if lane == 31 {
                    layout.sums.store(warp * 2 * ROWS + i as u32, sum);
                }
            });
            thread::sync_threads();
            unroll!(for i in 0..8 {
                unroll!(for w in 0..7 {
                    let other = layout.sums.load(w as u32 * 2 * ROWS + i as u32);
                    sums[i] += if (w as u32) < warp { other } else { 0.0 };
                });
                fits &= sums[i] <= SHARE;
            });
            thread::sync_threads();
            group += 1;
        }
        let mut count = layout.blocks.load(t);
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
        let most = warp::warp_reduce_max_u32(FULL_MASK, if fits { count } else { 0 });
        if lane == 0 {
            layout.words.store(WARPS + warp, most);
        }
        thread::sync_threads();
        let mut most = 0;
        unroll!(for w in 0..8 {
            most = layout.words.load(WARPS + w as u32).max(most);
        });
        most
    }

    /// Sums up what is left out. Blocks that tie at the cut count as left out.
    #[simt::device]
    fn sum_up(&self, extent: Extent, cut: Cut) {
        let Decide { layout, shape, .. } = *self;
        let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
        let first = (self.row * shape.blocks) as usize;
        if t == 0 {
            let Norms { kappa, nu } = layout.norms.load(0);
            let tokens = extent.length - extent.kept(shape.rule);
            self.whole.store_vector(self.row as usize, Whole { kappa, nu, tokens, reserved: 0 });
        }
        let mut group = 0;
        while group < shape.row_groups() {
            let (mut mass, mut moment, mut largest) = ([0f32; 8], [0f32; 8], 0f32);
            let mut block = 1 + t;
            while extent.ranked() && block < extent.local {
                if !cut.keeps(self.ranks.load(first + block as usize)) {
                    let nu = self.nus.load(first + block as usize);
                    largest = maximum(largest, nu);
                    let relative = self.relative(block, group);
                    unroll!(for i in 0..8 {
                        let weight = exp2(relative[i]);
                        mass[i] += weight;
                        moment[i] = fma(weight, nu, moment[i]);
                    });
                }
                block += THREADS;
            }
            unroll!(for i in 0..8 {
                let (mass, moment) = (warp::warp_sum_f32(mass[i]), warp::warp_sum_f32(moment[i]));
                if lane == 0 {
                    layout.sums.store(warp * 2 * ROWS + i as u32, mass);
                    layout.sums.store(warp * 2 * ROWS + ROWS + i as u32, moment);
                }
            });
            unroll!(for i in 0..5 {
                largest = maximum(largest, warp_shuffle_xor(FULL_MASK, largest, 1 << i, 32));
            });
            if lane == 0 {
                layout.words.store(warp, largest.to_bits());
            }
            thread::sync_threads();
            if t < ROWS {
                let (mut mass, mut moment, mut largest) = (0f32, 0f32, 0f32);
                unroll!(for w in 0..8 {
                    mass += layout.sums.load(w as u32 * 2 * ROWS + t);
                    moment += layout.sums.load(w as u32 * 2 * ROWS + ROWS + t);
                    largest = maximum(largest, f32::from_bits(layout.words.load(w as u32)));
                });
                let head = ROWS * group + t;
                let skipped = Skipped {
                    mass: canonical_nan(mass),
                    moment: canonical_nan(moment),
                    level: layout.levels.load(head),
                    nu_rest: canonical_nan(largest),
                };
                let at = (self.row * heads_of(shape.group) + head) as usize;
                self.skipped.store_vector(at, skipped);
            }
            thread::sync_threads();
            group += 1;
        }
    }
}
