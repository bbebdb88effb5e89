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
//! to eight query heads; again of the blocks of the bin that the cut is in, if it is inside one.
//!
//! # Work split
//! Grid (shares, kv_heads, sequences). Masses of a share are copied to shared memory before T_g is known;
//! then blocks are ranked, and counted in whole numbers ([`counting`](super::counting)) in shared memory, by
//! a thread for a query head of a block ([`sharing`](super::sharing)). What a share has counted is added to
//! the row's bins, and the thread block of a row that arrives last sums from the lowest bin on
//! ([`leaving`](super::leaving)): a warp has a query head, a lane an octave, and which bins go as a whole
//! each warp works out for itself. Where the cut is inside a bin, the blocks of that bin are ranked by
//! counting who is ahead ([`cutting`](super::cutting)), or, if they are many, all as `select` does. The
//! result does not depend on how many shares there are.

use super::counting::{MASS_BINS, Shares, Skipped, Whole, heads_of, kinds_of};
use super::cutting::{ASKED, RIVALS};
use super::scanning::{Deal, Norms, ScanShape, Total};
use crate::attention::{BLOCK_TOKENS, ROWS, last_to_arrive};
use crate::gather::listing::Listing;
use crate::gather::rule::Extent;
use crate::gather::top::{CACHED, Keys, Ranking, ranking};
use glam::{UVec4, Vec4};
use simt::{Global, GlobalMut, Shared, SharedPlan, kernel, thread, unroll};

/// Threads of a block of [`decide`](fn@decide).
pub const DECIDE_THREADS: u32 = 256;
pub(super) const WARPS: u32 = DECIDE_THREADS / 32;
/// The most query heads of a KV head.
const MOST_HEADS: u32 = 16;
/// Rows of bins: masses and moments of the heads, then these two.
const MOST_KINDS: u32 = 2 * MOST_HEADS + 2;
/// Words from a row of bins in shared memory to the next: heads that count in one bin are in other banks.
pub(super) const BIN_ROW: u32 = MASS_BINS + 4;
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
    pub mosts: Shared<f32>,
    /// What is counted of a share, [kinds, [`BIN_ROW`]].
    pub bins: Shared<u32>,
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
    let bins = plan.array(MOST_KINDS * BIN_ROW);
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
    let reference = decide.take_share(totals, norms, (scan_parts, used), share, clear);
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
        let keys = Keys { layout: decide.layout.ranking, keys: ranks, first, end: extent.local, here };
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
    pub ranks: GlobalMut<u32>,
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
}
