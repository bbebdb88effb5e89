//! `decide`: what is kept, by bounds on the mass of every block.
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
//! What is left out is summed up from above, relative to T_g: mass Σ m_bg, and moment Σ m_bg·ν_b with ν_b the
//! largest norm of the block's values. [`settle`](fn@super::settle) makes a bound of it, with the mass that
//! was attended to in place of T_g.
//!
//! # Layout
//! Read is what [`scan`](fn@super::scan) writes. `ranks` [sequences, kv_heads, blocks]; `bins` [sequences,
//! kv_heads, 2·heads + 2, 256]: masses and moments of the heads, blocks, and the largest ν as its bits; 0
//! before and after. Written besides: `list`, `counts`, `entries` and `kept` as by
//! [`select`](fn@crate::gather::select), `skipped`, `whole`.
//!
//! # Bytes
//! 4 bytes a block and query head from the L2 cache, 512 KiB at 128K tokens, blocks of 32, 4 KV heads of up
//! to eight query heads; again of more heads than eight, and of the blocks of the bin that the cut is in, if
//! it is inside one.
//!
//! # Work split
//! Grid (shares, kv_heads, sequences). A thread has a block of its share: it asks for its masses before T_g
//! is known, ranks it, and counts it in whole numbers ([`counting`](super::counting)) in shared memory. What
//! a share has counted is added to the row's bins, and the thread block of a row that arrives last sums from
//! the lowest bin on ([`leaving`](super::leaving)): a warp has a query head, a lane an octave, and which bins
//! go as a whole each warp works out for itself. Where the cut is inside a bin, the blocks of that bin are
//! ranked by counting who is ahead ([`cutting`](super::cutting)), or, if they are many, all as `select` does.
//! The result does not depend on how many shares there are.

use super::counting::{
    MASS_BINS, Shares, Skipped, Whole, bin_of, heads_of, in_units, inverse_of, kinds_of, level_of, ratio_of,
    reference_of, top_of, units,
};
use super::cutting::{ASKED, RIVALS};
use super::masses::joined;
use super::scanning::{Deal, Norms, ScanShape, Total};
use crate::attention::{BLOCK_TOKENS, PartialRow, ROWS, last_to_arrive};
use crate::gather::choice::ordered;
use crate::gather::listing::Listing;
use crate::gather::rule::Extent;
use crate::gather::top::{CACHED, Keys, Ranking, ranking};
use glam::{UVec4, Vec4};
use simt::math::{exp2_nonpositive, max, maximum};
use simt::warp::{self, FULL_MASK, warp_shuffle_idx, warp_shuffle_xor};
use simt::{Global, GlobalMut, Shared, SharedPlan, kernel, thread, unroll};

/// Threads of a block of [`decide`](fn@decide).
pub const DECIDE_THREADS: u32 = 256;
pub(super) const WARPS: u32 = DECIDE_THREADS / 32;
/// The most query heads of a KV head.
const MOST_HEADS: u32 = 16;
/// Rows of bins: masses and moments of the heads, then these two.
const MOST_KINDS: u32 = 2 * MOST_HEADS + 2;
/// Thread blocks in all: two for each of the 132 multiprocessors of a GH100, whose registers hold no more.
const BLOCKS_WANTED: u32 = 264;
/// Ranks that are asked for before it is known how many blocks are kept.
const AHEAD: u32 = 4096;
/// Blocks of a share, where there are thread blocks enough.
const SHARE_BLOCKS: u32 = 128;
const _: () = assert!(DECIDE_THREADS == MASS_BINS, "a thread has a bin");

/// Thread blocks of a sequence and KV head, for `rows` of these, whose longest has `blocks` gather-blocks.
pub const fn decide_parts(rows: u32, blocks: u32) -> u32 {
    let wanted = BLOCKS_WANTED / if rows == 0 { 1 } else { rows };
    let most = blocks.div_ceil(SHARE_BLOCKS);
    let parts = if wanted < most { wanted } else { most };
    if parts == 0 { 1 } else { parts }
}

#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// Of the last thread block.
    pub ranking: Ranking,
    /// T_g as logarithms, and the largest mass of a block, [heads].
    pub levels: Shared<f32>,
    mosts: Shared<f32>,
    /// What is counted of a share, [kinds, bins].
    bins: Shared<u32>,
    /// Masses and moments of the bins that go as a whole, [2, heads].
    pub sums: Shared<f32>,
    /// The same of those blocks of a bin that are left out, in units; and the largest ν as its bits.
    pub rest: Shared<u32>,
    /// What warps tell each other.
    pub words: Shared<u32>,
    /// Rivals: how many came, their ranks, whether they are left out; their blocks are in `queue`.
    pub queued: Shared<u32>,
    pub rivals: Shared<u32>,
    pub left: Shared<u32>,
    /// Blocks that are about to be looked at again; 64 of each warp where there are too many rivals.
    pub queue: Shared<u32>,
    /// A bit for each block.
    pub marks: Shared<u32>,
    /// Bounds of all parts' norms.
    pub norms: Shared<Norms>,
    last: Shared<u32>,
    bytes: u32,
}

const fn layout() -> Layout {
    let mut plan = SharedPlan::new();
    let ranking = ranking(&mut plan);
    let (levels, mosts) = (plan.array(MOST_HEADS), plan.array(MOST_HEADS));
    let bins = plan.array(MOST_KINDS * MASS_BINS);
    let (sums, rest) = (plan.array(2 * MOST_HEADS), plan.array(2 * MOST_HEADS + 1));
    let (words, queued) = (plan.array(WARPS), plan.array(1));
    let (rivals, left) = (plan.array(RIVALS + 4), plan.array(RIVALS));
    let (queue, marks) = (plan.array(WARPS * 64), plan.array(CACHED / 32));
    let (norms, last) = (plan.array(1), plan.array(1));
    let bytes = plan.bytes();
    Layout {
        ranking,
        levels,
        mosts,
        bins,
        sums,
        rest,
        words,
        queued,
        rivals,
        left,
        queue,
        marks,
        norms,
        last,
        bytes,
    }
}

/// Shared memory of [`decide`](fn@decide).
pub const fn decide_bytes() -> u32 {
    layout().bytes
}

/// Decides what is kept of each sequence: list and block table, and bounds on what is left out.
///
/// `scan_parts` is the width of the grid of [`scan`](fn@super::scan); `counters` [sequences, kv_heads] and
/// `bins` are 0 before and after. Grid ([`decide_parts`], kv_heads, sequences).
#[kernel(system = gather, max_threads = 256, overlaps)]
pub fn decide(
    table: Global<u32>,
    lengths: Global<u32>,
    masses: Global<f32>,
    nus: Global<f32>,
    totals: Global<Total>,
    norms: Global<Norms>,
    ranks: GlobalMut<u32>,
    bins: GlobalMut<u32>,
    counters: GlobalMut<u32>,
    list: GlobalMut<u32>,
    counts: GlobalMut<u32>,
    entries: GlobalMut<u32>,
    kept: GlobalMut<u32>,
    skipped: GlobalMut<Skipped>,
    whole: GlobalMut<Whole>,
    scan_parts: u32,
    shape: ScanShape,
) {
    let (head, sequence) = (thread::block_idx_y(), thread::block_idx_z());
    let row = sequence * shape.kv_heads + head;
    let rule = shape.rule;
    let extent = Extent::of(lengths.load(sequence as usize).min(shape.max_blocks * BLOCK_TOKENS), rule);
    let share = Shares::of(extent.distant(), thread::grid_dim_x());
    if thread::block_idx_x() >= share.used {
        return;
    }
    let used = Deal::of(extent.length, rule, scan_parts).used;
    let decide = Decide { layout: layout(), masses, nus, ranks, bins, shape, extent, row };
    let listing = Listing {
        table,
        list,
        counts,
        entries,
        kept,
        rule,
        most: shape.blocks,
        max_blocks: shape.max_blocks,
        kv_heads: shape.kv_heads,
        row,
        head,
        sequence,
    };
    let clear = || listing.clear(thread::block_idx_x(), share.used);
    let reference = decide.levels(totals, norms, (scan_parts, used), share, clear);
    if !last_to_arrive(counters, row, share.used, decide.layout.last) {
        return;
    }
    let first = (row * shape.blocks) as usize;
    let here = extent.local <= CACHED;
    let place = |i: usize| 4 * (thread::thread_idx_x() + DECIDE_THREADS * i as u32);
    let vector = |place: u32| ranks.load_vector::<UVec4>(first + place as usize);
    // On their way while the bins are looked at.
    let mut ahead = [UVec4::ZERO; (AHEAD / 4 / DECIDE_THREADS) as usize];
    unroll!(for i in 0..4 {
        if place(i) < extent.local {
            ahead[i] = vector(place(i));
        }
    });
    let cached = decide.layout.ranking.keys;
    let (border, octave) = decide.border(|| {
        unroll!(for i in 0..4 {
            cached.store_vector(place(i), ahead[i]);
        });
        let mut i = 4;
        while here && place(i) < extent.local {
            cached.store_vector(place(i), vector(place(i)));
            i += 1;
        }
    });
    let extent = decide.kept(border);
    // Few rivals are ranked by counting.
    let few = extent.ranked() && here && (border.inside <= RIVALS || !border.splits());
    let rivals = if few { decide.gather(border, reference) } else { [(0.0, 0.0); ASKED] };
    decide.sum_up(&octave);
    if few {
        decide.choose(border, reference, rivals, list, first + 1);
    } else if extent.ranked() {
        let keys =
            Keys { layout: decide.layout.ranking, keys: ranks, first, end: extent.local, here, live: false };
        let cut = keys.cut(extent.chosen);
        keys.write(cut, |place, index| list.store(first + 1 + place as usize, index));
        if border.splits() && border.whole < MASS_BINS {
            decide.rest(border, keys, cut, reference);
        }
    }
    thread::sync_threads();
    decide.tell(border, reference, skipped);
    if thread::thread_idx_x() == 0 {
        let Norms { kappa, nu } = decide.layout.norms.load(0);
        let tokens = extent.length - extent.kept(rule);
        whole.store_vector(row as usize, Whole { kappa, nu, tokens, reserved: 0 });
    }
    listing.complete_cleared(extent, |place| {
        if few { cached.load(place - 1) } else { list.load(first + place as usize) }
    });
}

/// All that a thread block knows.
pub(super) struct Decide {
    pub layout: Layout,
    pub masses: Global<f32>,
    pub nus: Global<f32>,
    ranks: GlobalMut<u32>,
    pub bins: GlobalMut<u32>,
    pub shape: ScanShape,
    pub extent: Extent,
    pub row: u32,
}

impl Decide {
    /// The first word of a row of the bins in memory.
    #[inline(always)]
    pub fn bins_of(&self, kind: u32) -> usize {
        ((self.row * kinds_of(heads_of(self.shape.group)) + kind) * MASS_BINS) as usize
    }

    /// Eight heads' masses of a block, as logarithms.
    #[simt::device]
    pub fn masses(&self, block: u32, group: u32) -> [f32; 8] {
        let heads = heads_of(self.shape.group) as usize;
        let block = (self.row * self.shape.blocks) as usize + block as usize;
        let at = block * heads + (ROWS * group) as usize;
        let (low, high): (Vec4, Vec4) = (self.masses.load_vector(at), self.masses.load_vector(at + 4));
        let (low, high) = (low.to_array(), high.to_array());
        [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]]
    }

    /// The same relative to T_g.
    #[simt::device]
    pub fn relative(&self, masses: [f32; 8], group: u32) -> [f32; 8] {
        let mut relative = [0f32; 8];
        unroll!(for i in 0..8 {
            relative[i] = masses[i] - self.layout.levels.load(ROWS * group + i as u32);
        });
        relative
    }

    /// The logarithm that masses are counted against, of levels that are known.
    #[simt::device]
    fn reference(&self) -> f32 {
        let (mut top, mut head) = (f32::NEG_INFINITY, 0);
        while self.shape.budget_log2 >= 0.0 && head < heads_of(self.shape.group) {
            top = top_of(top, self.layout.mosts.load(head), self.layout.levels.load(head));
            head += 1;
        }
        reference_of(self.shape.budget_log2, top)
    }

    /// T_g of every head and the norms of all parts; then this share's blocks are ranked and counted.
    /// `meanwhile` is called while what is loaded is on its way. What masses are counted against.
    #[simt::device]
    fn levels(
        &self,
        totals: Global<Total>,
        norms: Global<Norms>,
        (parts, used): (u32, u32),
        share: Shares,
        meanwhile: impl FnOnce(),
    ) -> f32 {
        let Decide { layout, shape, extent, .. } = *self;
        let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
        let heads = heads_of(shape.group);
        let begin = 1 + thread::block_idx_x() * share.blocks;
        let end = (begin + share.blocks).min(extent.local);
        // On their way while the totals are added up.
        let mut ahead = ([0f32; 8], 0f32);
        if begin + t < end {
            ahead = self.block(begin + t);
        }
        let first = (self.row * parts) as usize;
        let mut norms_ahead = Norms { kappa: 0.0, nu: 0.0 };
        if warp == WARPS - 1 && lane < used {
            norms_ahead = norms.load(first + lane as usize);
        }
        meanwhile();
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
        if warp == WARPS - 1 {
            let mut most = norms_ahead;
            let mut part = lane + 32;
            while part < used {
                let norms = norms.load(first + part as usize);
                most = Norms { kappa: max(most.kappa, norms.kappa), nu: max(most.nu, norms.nu) };
                part += 32;
            }
            unroll!(for i in 0..5 {
                most.kappa = max(most.kappa, warp_shuffle_xor(FULL_MASK, most.kappa, 1 << i, 32));
                most.nu = max(most.nu, warp_shuffle_xor(FULL_MASK, most.nu, 1 << i, 32));
            });
            if lane == 0 {
                layout.norms.store(0, most);
            }
        }
        let kinds = kinds_of(heads);
        let mut kind = 0;
        while kind < kinds {
            layout.bins.store(kind * MASS_BINS + t, 0);
            kind += 1;
        }
        if t < layout.rest.len() {
            layout.rest.store(t, 0);
        }
        if t == 0 {
            layout.queued.store(0, 0);
        }
        thread::sync_threads();

        let reference = self.reference();
        let inverse = inverse_of(layout.norms.load(0).nu);
        let mut start = begin;
        while start < end {
            let block = start + t;
            let there = block < end;
            if start > begin && there {
                ahead = self.block(block);
            }
            if warp::warp_vote_any(FULL_MASK, there) {
                self.count(block, there, ahead, reference, inverse);
            }
            start += DECIDE_THREADS;
        }
        thread::sync_threads();
        let mut kind = 0;
        while kind < kinds {
            let own = layout.bins.load(kind * MASS_BINS + t);
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

    /// The first eight heads' masses of a block, and ν.
    #[simt::device]
    fn block(&self, block: u32) -> ([f32; 8], f32) {
        (self.masses(block, 0), self.nus.load((self.row * self.shape.blocks + block) as usize))
    }

    /// Ranks a block and counts it. The whole warp calls it.
    #[simt::device]
    fn count(&self, block: u32, there: bool, of: ([f32; 8], f32), reference: f32, inverse: f32) {
        let Decide { layout, shape, extent, .. } = *self;
        let (first, nu) = of;
        let heads = heads_of(shape.group);
        // Code that runs once is waited for: a loop over the groups of heads.
        let relative = |group: u32| {
            let masses = if group > 0 && there { self.masses(block, group) } else { first };
            self.relative(masses, group)
        };
        let mut rank = f32::NEG_INFINITY;
        let mut group = 0;
        while group < shape.row_groups() {
            let relative = relative(group);
            unroll!(for i in 0..8 {
                rank = maximum(rank, relative[i]);
            });
            group += 1;
        }
        if there {
            self.ranks.store((self.row * shape.blocks + block) as usize, ordered(rank));
        }
        let bin = if there { bin_of(rank - reference) } else { MASS_BINS };
        let counted = bin < MASS_BINS;
        // Where attention is flat a warp's blocks are all in one bin: then one lane speaks for all.
        let one = warp::warp_vote_all(FULL_MASK, bin == warp_shuffle_idx(FULL_MASK, bin, 0, 32));
        let speaks = counted && (!one || warp::lane_id() == 0);
        let (units, ratio) = (units(extent.distant()), ratio_of(nu, inverse));
        let largest = if counted { nu.to_bits() } else { 0 };
        let largest = if one { warp::warp_reduce_max_u32(FULL_MASK, largest) } else { largest };
        if speaks {
            layout.bins.atomic_add(2 * heads * MASS_BINS + bin, if one { 32 } else { 1 });
            layout.bins.atomic_max((2 * heads + 1) * MASS_BINS + bin, largest);
        }
        let mut group = 0;
        while group < shape.row_groups() {
            let relative = relative(group);
            unroll!(for i in 0..8 {
                let own = if counted { in_units(relative[i] - reference, ratio, bin, units) } else { [0; 2] };
                unroll!(for kind in 0..2 {
                    let sum = if one { warp::warp_reduce_add_u32(FULL_MASK, own[kind]) } else { own[kind] };
                    let row = kind as u32 * heads + ROWS * group + i as u32;
                    if speaks && sum > 0 {
                        layout.bins.atomic_add(row * MASS_BINS + bin, sum);
                    }
                });
            });
            group += 1;
        }
    }
}
