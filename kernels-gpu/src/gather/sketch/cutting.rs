//! The list, where the bins say where it is cut: the part of [`decide`](fn@super::decide) of the thread block
//! that comes last, for up to [`CACHED`] blocks of which up to [`RIVALS`] are in the bin of the cut.
//!
//! # Work split
//! A lane has a block of a word of marks. What is above the bin is marked at once; blocks of the bin, the
//! rivals, come together in shared memory. A thread counts for one of them who is ahead, and marks it if
//! these are few enough. Then a thread has a word of marks, and counts those in the words before.

use super::counting::{Edges, MASS_BINS, heads_of, in_units, inverse_of, ratio_of, units};
use super::deciding::{DECIDE_THREADS, Decide};
use super::leaving::Border;
use crate::gather::scoring::score_of;
use crate::gather::top::CACHED;
use glam::UVec4;
use simt::warp::{self, FULL_MASK};
use simt::{GlobalMut, thread, unroll};

/// The most blocks of a bin that are ranked by counting: a thread each.
pub(super) const RIVALS: u32 = DECIDE_THREADS;
/// Rivals whose masses are asked for at once, by a thread for a query head.
pub(super) const ASKED: usize = 2;
const _: () = assert!(CACHED == 32 * DECIDE_THREADS, "a thread has a word of marks");

impl Decide {
    /// Marks what is kept whatever the order of rivals, gathers these, and asks for masses and ν of the first
    /// of them. The whole thread block calls it.
    #[simt::device]
    pub fn gather(&self, border: Border, reference: f32) -> [(f32, f32); ASKED] {
        self.mark(border, reference);
        thread::sync_threads();
        self.ask(border, 0)
    }

    /// Writes the chosen blocks in their order to `list`, from `first` on, and to the shared memory of keys,
    /// from its start on; counts what is left out of the bin that is cut. `rivals`: what
    /// [`gather`](Self::gather) has asked for. The whole thread block calls it.
    #[simt::device]
    pub fn choose(
        &self,
        border: Border,
        reference: f32,
        rivals: [(f32, f32); ASKED],
        list: GlobalMut<u32>,
        first: usize,
    ) {
        if border.splits() {
            self.rank(border);
            thread::sync_threads();
            if border.whole < MASS_BINS {
                self.count_left(border, reference, rivals);
            }
        }
        self.enumerate(list, first);
    }

    /// The same but for masses and ν.
    #[simt::device]
    fn mark(&self, border: Border, reference: f32) {
        let Decide { layout, extent, .. } = *self;
        let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
        let edges = Edges::of(border.whole);
        let splits = border.splits();
        if splits && t < 4 {
            // Up to a multiple of four: less than the rank of any block.
            layout.rivals.store(border.inside + t, 0);
            layout.queue.store(border.inside + t, u32::MAX);
        }
        let mut start = 32 * warp;
        while start < extent.local {
            let (mut keys, mut inside) = ([0u32; 4], [false; 4]);
            let index = |i: usize| start + DECIDE_THREADS * i as u32 + lane;
            unroll!(for i in 0..4 {
                if index(i) < extent.local {
                    keys[i] = layout.ranking.keys.load(index(i));
                }
            });
            unroll!(for i in 0..4 {
                let there = index(i) >= 1 && index(i) < extent.local;
                let (above, within) = edges.place(score_of(keys[i]) - reference);
                inside[i] = there && within && splits;
                let marked = there && (above || within && !splits);
                let ballot = warp::warp_vote_ballot(FULL_MASK, marked);
                if lane == 0 {
                    layout.marks.store(index(i) / 32, ballot);
                }
            });
            unroll!(for i in 0..4 {
                if inside[i] {
                    // In any order.
                    let place = layout.queued.atomic_add(0, 1);
                    layout.rivals.store(place, keys[i]);
                    layout.queue.store(place, index(i));
                }
            });
            start += 4 * DECIDE_THREADS;
        }
    }

    /// Mass and ν of some rivals, for a thread's head: those from `pair` on.
    #[simt::device]
    fn ask(&self, border: Border, pair: u32) -> [(f32, f32); ASKED] {
        let (row, blocks) = ((self.row * self.shape.blocks) as usize, self.layout.queue);
        let heads = heads_of(self.shape.group);
        let mut found = [(0f32, 0f32); ASKED];
        if !border.splits() {
            return found;
        }
        unroll!(for i in 0..ASKED, at_most 2 {
            let pair = pair + thread::thread_idx_x() + DECIDE_THREADS * i as u32;
            let rival = pair >> heads.trailing_zeros();
            if rival < border.inside {
                let block = row + blocks.load(rival) as usize;
                let mass = self.masses.load(block * heads as usize + (pair & (heads - 1)) as usize);
                found[i] = (mass, self.nus.load(block));
            }
        });
        found
    }

    /// Marks those rivals that are kept. Those that tie with one that is not count as left out.
    #[simt::device]
    fn rank(&self, border: Border) {
        let layout = self.layout;
        let t = thread::thread_idx_x();
        if t >= border.inside {
            return;
        }
        let (own, name) = (layout.rivals.load(t), layout.queue.load(t));
        // Who is ahead, and who is no worse, itself among them.
        let (mut ahead, mut no_worse, mut i) = (0, 0, 0);
        while i < border.inside {
            let keys: UVec4 = layout.rivals.load_vector(i);
            let names: UVec4 = layout.queue.load_vector(i);
            let (keys, names) = (keys.to_array(), names.to_array());
            unroll!(for j in 0..4 {
                ahead += (keys[j] > own || keys[j] == own && names[j] < name) as u32;
                no_worse += (keys[j] >= own) as u32;
            });
            i += 4;
        }
        if ahead < border.keeps() {
            layout.marks.atomic_or(name / 32, 1 << (name % 32));
        }
        layout.left.store(t, (no_worse > border.keeps()) as u32);
    }

    /// Counts masses and moments of the rivals that are left out.
    #[simt::device]
    fn count_left(&self, border: Border, reference: f32, ahead: [(f32, f32); ASKED]) {
        let Decide { layout, shape, extent, .. } = *self;
        let (t, heads) = (thread::thread_idx_x(), heads_of(shape.group));
        let head = t & (heads - 1);
        let (units, inverse) = (units(extent.distant()), inverse_of(layout.norms.load(0).nu));
        let level = layout.levels.load(head);
        let (mut sums, mut largest) = ([0u32; 2], 0);
        let (mut pair, mut found) = (0, ahead);
        while pair < border.inside << heads.trailing_zeros() {
            unroll!(for i in 0..ASKED, at_most 2 {
                let rival = (pair + t + DECIDE_THREADS * i as u32) >> heads.trailing_zeros();
                if rival < border.inside && layout.left.load(rival) != 0 {
                    let (mass, nu) = found[i];
                    let x = mass - level - reference;
                    let own = in_units(x, ratio_of(nu, inverse), border.whole, units);
                    sums = [sums[0] + own[0], sums[1] + own[1]];
                    largest = nu.to_bits().max(largest);
                }
            });
            pair += ASKED as u32 * DECIDE_THREADS;
            if pair < border.inside << heads.trailing_zeros() {
                found = self.ask(border, pair);
            }
        }
        unroll!(for kind in 0..2 {
            if sums[kind] > 0 {
                layout.rest.atomic_add(kind as u32 * heads + head, sums[kind]);
            }
        });
        let largest = warp::warp_reduce_max_u32(FULL_MASK, largest);
        if warp::lane_id() == 0 {
            layout.rest.atomic_max(2 * heads, largest);
        }
    }

    /// Writes the marked blocks in their order.
    #[simt::device]
    fn enumerate(&self, list: GlobalMut<u32>, first: usize) {
        let Decide { layout, extent, .. } = *self;
        let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
        let words = extent.local.div_ceil(32);
        if 32 * warp >= words {
            return;
        }
        let mut before = 0;
        unroll!(for w in 0..7 {
            before +=
                if (w as u32) < warp { layout.marks.load(32 * w as u32 + lane).count_ones() } else { 0 };
        });
        let before = warp::warp_reduce_add_u32(FULL_MASK, before);
        let mut rest = if t < words { layout.marks.load(t) } else { 0 };
        let own = rest.count_ones();
        let mut count = own;
        unroll!(for i in 0..5 {
            let others = warp::warp_shuffle_up(FULL_MASK, count, 1 << i, 32);
            count += if lane >= 1 << i { others } else { 0 };
        });
        let mut place = before + count - own;
        while rest != 0 {
            let block = 32 * t + rest.trailing_zeros();
            rest &= rest - 1;
            list.store(first + place as usize, block);
            layout.ranking.keys.store(place, block);
            place += 1;
        }
    }
}
