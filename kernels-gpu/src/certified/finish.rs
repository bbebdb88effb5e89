//! What the thread block that arrives last does: outputs from all parts, and their certificates.

use super::judge::Judge;
use super::pass::{StepShape, used_splits};
use super::policy::{Certificate, Thresholds, rung};
use super::query::{LOG2_E, Query};
use super::sums::Taken;
use super::weighing::Weighed;
use crate::attention::Chain;
use crate::attention::{Adding, BLOCK_TOKENS, Half, Merged, PartialRow, part_floats, warps};
use glam::Vec4;
use simt::math::{canonical_nan, fma, log2};
use simt::warp::FULL_MASK;
use simt::{Global, GlobalMut, Shared, Zeroable, bits, unroll, warp};

/// Shared memory of the end of a row of blocks.
#[derive(Clone, Copy)]
pub(super) struct Ends {
    /// Where parts are added up.
    pub(super) adding: Adding,
    /// ‖O‖² of the rows, [8, 32].
    pub(super) squares: Shared<f32>,
    /// References and sums of the rows over all parts, [8].
    pub(super) totals: Shared<PartialRow>,
}

impl Ends {
    /// Adds up `parts` parts, by `W` warps, and writes `rows` rows of `output` from row `first_row` on;
    /// references, sums and squares go to shared memory. `place` says where a part is in `partials`.
    #[simt::device]
    pub(super) fn output<const D: usize, const W: usize>(
        self,
        parts: u32,
        [first_row, rows]: [u32; 2],
        partials: Global<f32>,
        place: impl Fn(u32) -> usize,
        output: GlobalMut<f32>,
    ) {
        self.adding.parts_of::<D, W>(parts, rows, partials, place, |r, d, merged| {
            let Merged { values, row } = merged;
            let empty = row.sum == 0.0;
            let value = values.map(|x| if empty { 0.0 } else { x / row.sum });
            let squares = fma(
                value[3],
                value[3],
                fma(value[2], value[2], fma(value[1], value[1], value[0] * value[0])),
            );
            self.squares.store(r * 32 + d / 4, squares);
            if d == 0 {
                self.totals.store(r, row);
            }
            let at = (first_row + r) as usize * D + d as usize;
            output.store_vector(at, Vec4::from_array(value.map(canonical_nan)));
        });
    }

    /// ‖O‖² of a row, its log-sum-exp's argument beside it.
    #[simt::device]
    pub(super) fn row<const D: usize>(self, r: u32) -> (PartialRow, f32) {
        let mut squares = 0f32;
        for quad in 0..D as u32 / 4 {
            squares += self.squares.load(r * 32 + quad);
        }
        (self.totals.load(r), squares)
    }
}

/// Writes a row's log-sum-exp.
#[simt::device]
pub(super) fn store_lse(lse: GlobalMut<f32>, at: usize, row: PartialRow) {
    let log = if row.sum == 0.0 { f32::NEG_INFINITY } else { (row.reference + log2(row.sum)) / LOG2_E };
    lse.store(at, canonical_nan(log));
}

/// Writes which rows want the dense rung, from what their four lanes each say, and `flags` with them: a
/// warp's work.
#[simt::device]
pub(super) fn store_dense_rows(
    dense_rows: GlobalMut<u32>,
    launch_row: u32,
    wants_dense: bool,
    flags: u32,
    lane: u32,
) {
    let ballot = warp::warp_vote_ballot(FULL_MASK, wants_dense);
    if lane == 0 {
        // Every fourth bit.
        let mut mask = 0u32;
        unroll!(for r in 0..8 {
            mask |= (ballot >> (4 * r) & 1) << r;
        });
        dense_rows.store(launch_row as usize, mask | flags);
    }
}

/// What finishing a row of blocks takes.
pub(super) struct Finish {
    pub(super) ends: Ends,
    pub(super) partials: Global<f32>,
    pub(super) weighed: Global<Weighed>,
    pub(super) taken: Global<Taken>,
    /// Bounds of the norms of the trailing block's keys and values.
    pub(super) norms: Global<f32>,
    pub(super) launch_row: u32,
    pub(super) first_row: u32,
    /// Rows of the group of eight that exist.
    pub(super) rows: u32,
    /// Tokens of the sequence.
    pub(super) length: u32,
    /// Entries of the lists.
    pub(super) listed: u32,
    /// Thread blocks that have replaced.
    pub(super) used: u32,
    pub(super) shape: StepShape,
    pub(super) thresholds: Thresholds,
}

impl Finish {
    /// Adds up everything and writes the rows of `output`; references, sums and squares go to shared memory.
    #[simt::device]
    pub(super) fn output<const D: usize>(&self, output: GlobalMut<f32>) {
        let shape = self.shape;
        let floats = part_floats(D as u32);
        let splits = used_splits(self.length / BLOCK_TOKENS, shape.splits);
        // The splits of the pass come first.
        let place = |p: u32| {
            let p = if p < splits { p } else { p - splits + shape.splits };
            (shape.first_partial(self.launch_row) + p) as usize * floats
        };
        let rows = [self.first_row, self.rows];
        self.ends.output::<D, 8>(splits + self.used, rows, self.partials, place, output);
    }

    /// Writes the rows' log-sums and certificates, and which of them want the dense rung: a warp's work. Four
    /// lanes have a row's query.
    #[simt::device]
    pub(super) fn certificates<E: Half, const D: usize>(
        &self,
        query: &Query,
        present: bool,
        lane: u32,
        lse: GlobalMut<f32>,
        certificates: GlobalMut<Certificate>,
        dense_rows: GlobalMut<u32>,
    ) {
        let Finish { shape, thresholds, .. } = *self;
        let r = lane >> 2;
        let at = (self.first_row + r) as usize;
        let mut of_row = Weighed::zeroed();
        let mut taken = Taken::zeroed();
        if thresholds.certify != 0 {
            if present {
                of_row = Weighed::load(self.weighed, at);
                let mut part = lane & 3;
                while part < shape.parts {
                    taken = taken.plus(Taken::load(self.taken, at * shape.parts as usize + part as usize));
                    part += 4;
                }
            }
            taken = taken.over_lanes(3);
        }
        let wants_dense = if present {
            let (row, squares) = self.ends.row::<D>(r);
            let norms = if self.length.is_multiple_of(BLOCK_TOKENS) {
                [0.0; 2]
            } else {
                [0, 1].map(|kind| self.norms.load(2 * self.launch_row as usize + kind))
            };
            let rounds = bits::div_u32(self.listed, self.used * warps(D as u32)) + 1;
            let judge = Judge {
                row,
                pass: PartialRow { reference: of_row.choice.reference, sum: of_row.choice.sum },
                sums: of_row.sums,
                taken,
                squares,
                norms,
                chain: Chain::of_step::<D>(self.length, shape.splits, self.used, [self.listed, rounds]),
                dense: Chain::of_dense::<D>(self.length, shape.rung_splits),
                softmax_scale: shape.softmax_scale,
            };
            let judged = judge.certificate::<E, D>(query, thresholds);
            if lane & 3 == 0 {
                store_lse(lse, at, row);
                judged.store(certificates, at);
            }
            judged.rung() == rung::DENSE
        } else {
            false
        };
        store_dense_rows(dense_rows, self.launch_row, wants_dense, 0, lane);
    }
}
