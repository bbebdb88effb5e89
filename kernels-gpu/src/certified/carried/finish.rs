//! What is left when a row of blocks has passed everything: sums over warps and splits, outputs,
//! certificates.

use super::super::finish::{store_dense_rows, store_lse};
use super::super::pass::{Rings, StepShape, warps_of};
use super::super::policy::{Certificate, Thresholds, reason, rung};
use super::super::query::Query;
use super::claim::carried_warps;
use super::gather::{Gathered, merge};
use super::judge::Judge;
use super::layout::{CarriedLayout, SPLITS_AT_HAND};
use super::sight::log_sum;
use crate::attention::Chain;
use crate::attention::{Half, ROWS, part_floats};
use glam::UVec4;
use simt::warp::{FULL_MASK, warp_vote_any};
use simt::{Global, GlobalMut, Zeroable, async_copy, thread, unroll};

/// What finishing a row of blocks takes.
pub(super) struct Finish {
    pub(super) layout: CarriedLayout,
    pub(super) launch_row: u32,
    /// Rows of the group of eight that exist, and the first of them among all.
    pub(super) rows: u32,
    pub(super) first_row: u32,
    /// Tokens of the sequence.
    pub(super) length: u32,
    /// Splits that have blocks.
    pub(super) used: u32,
    /// Whether there is a list.
    pub(super) exists: bool,
    /// Entries of it, and blocks that are newer.
    pub(super) listed: u32,
    /// What is left for the next step: [`log_sum`](super::sight::log_sum) of all rows.
    pub(super) log_sums: GlobalMut<f32>,
    pub(super) shape: StepShape,
    pub(super) thresholds: Thresholds,
}

impl Finish {
    /// Adds up what the warps have gathered, with the weights that [`combine`](crate::attention::combine) has
    /// left, and writes it as that of `split`.
    #[simt::device]
    pub(super) fn gather_warps<const D: usize>(&self, gathered: GlobalMut<f32>, split: u32) {
        let t = thread::thread_idx_x();
        if t < Gathered::EIGHT {
            let (r, word) = (t / Gathered::WORDS, t % Gathered::WORDS);
            let weight = |w: u32| self.layout.pass.rows.load(w * ROWS + r).reference;
            let of_warp = |w: u32| self.layout.gathered.load(w * Gathered::EIGHT + t);
            let merged = merge(word, carried_warps(D as u32), of_warp, weight);
            gathered.store((self.first_split() + split * Gathered::EIGHT + t) as usize, merged);
        }
    }

    /// Where what the row's splits have gathered starts.
    #[inline(always)]
    fn first_split(&self) -> u32 {
        self.launch_row * self.shape.splits * Gathered::EIGHT
    }

    /// Asks for what the splits have gathered, if there is room for it: it is there when outputs are added
    /// up.
    #[simt::device]
    pub(super) fn ask(&self, gathered: Global<f32>) {
        let mut at = 4 * thread::thread_idx_x();
        while self.used <= SPLITS_AT_HAND && at < self.used * Gathered::EIGHT {
            self.layout.splits.copy_async(at, gathered, (self.first_split() + at) as usize);
            at += 4 * thread::block_dim_x();
        }
        async_copy::commit();
    }

    /// Adds up the splits and writes the rows of `output`.
    #[simt::device]
    pub(super) fn output<const D: usize, R: Rings>(&self, partials: Global<f32>, output: GlobalMut<f32>) {
        let first = self.shape.first_partial(self.launch_row);
        let place = |p: u32| (first + p) as usize * part_floats(D as u32);
        let (ends, rows) = (self.layout.ends, [self.first_row, self.rows]);
        if warps_of::<R>(D as u32) == 12 {
            ends.output::<D, 12>(self.used, rows, partials, place, output);
        } else {
            ends.output::<D, 8>(self.used, rows, partials, place, output);
        }
    }

    /// Adds up what the splits have gathered, with the weights that [`output`](Self::output) has left.
    #[simt::device]
    pub(super) fn gather_splits(&self, gathered: Global<f32>) {
        let t = thread::thread_idx_x();
        let (r, word) = (t / Gathered::WORDS, t % Gathered::WORDS);
        if r < self.rows {
            let of_split = |p: u32| {
                let at = p * Gathered::EIGHT + t;
                if self.used <= SPLITS_AT_HAND {
                    self.layout.splits.load(at)
                } else {
                    gathered.load((self.first_split() + at) as usize)
                }
            };
            let weight = |p: u32| self.layout.ends.adding.weight(p, r);
            let merged = merge(word, self.used, of_split, weight);
            self.layout.gathered.store(t, merged);
        }
    }

    /// Adds what all warps have promoted on sight, the count at `at`, to what the list has: one thread's
    /// work.
    #[simt::device]
    pub(super) fn add_sighted(&self, counters: GlobalMut<u32>, at: u32) {
        let sighted = counters.atomic_exchange(at as usize, 0);
        let promoted = self.layout.promoted;
        unroll!(for kind in 0..2 {
            promoted.store(kind as u32, promoted.load(kind as u32) + sighted);
        });
    }

    /// Certificates, LSE, and which rows want the dense rung: a warp's work. Whether one of them is over its
    /// budget, and nothing else is wrong with it.
    #[simt::device]
    pub(super) fn certificates<E: Half, const D: usize>(
        &self,
        query: &Query,
        present: bool,
        lane: u32,
        lse: GlobalMut<f32>,
        certificates: GlobalMut<Certificate>,
        dense_rows: GlobalMut<u32>,
    ) -> bool {
        let Finish { layout, length, shape, thresholds, .. } = *self;
        let r = lane >> 2;
        let (mut wants_dense, mut over) = (false, false);
        if present {
            let (row, squares) = layout.ends.row::<D>(r);
            let mut gathered = Gathered::zeroed();
            let (mut promoted, mut chains) = ([0; 3], [0; 4]);
            if thresholds.certify != 0 {
                chains = layout.chains.load_vector::<UVec4>(0).to_array();
                let words: [f32; Gathered::WORDS as usize] =
                    core::array::from_fn(|i| layout.gathered.load(r * Gathered::WORDS + i as u32));
                gathered = bytemuck::cast(words);
            }
            if self.exists {
                promoted = [0, 1, 2].map(|kind| layout.promoted.load(kind));
                promoted[2] = if self.listed != 0 { promoted[2] } else { 0 };
            }
            let judge = Judge {
                row,
                gathered,
                squares,
                promoted,
                length,
                chain: Chain::of_words([chains[0], chains[1]], length),
                dense: Chain::of_words([chains[2], chains[3]], length),
                softmax_scale: shape.softmax_scale,
            };
            let judged = judge.certificate::<E, D>(query, thresholds);
            let at = (self.first_row + r) as usize;
            if lane & 3 == 0 {
                store_lse(lse, at, row);
                judged.store(certificates, at);
                if self.exists {
                    self.log_sums.store(at, log_sum(row));
                }
            }
            wants_dense = judged.rung() == rung::DENSE;
            over = judged.reason() == reason::ERROR_BUDGET;
        }
        store_dense_rows(dense_rows, self.launch_row, wants_dense, 0, lane);
        warp_vote_any(FULL_MASK, over)
    }
}
