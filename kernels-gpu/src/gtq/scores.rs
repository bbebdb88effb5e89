//! Scores of a tile's keys, as [`decode`](super::decode) has the formulas: of whole rows and of rows in
//! parts.

use super::operands::Tile;
use super::parts::{self, PARTS, PartTables, part_bytes};
use super::query::{PartedQuery, Query, Rows};
use super::window::Slot;
use super::write;
use crate::attention::Half;
use half::f16;
use simt::math::fma;
use simt::tensor::mma_i8;
use simt::{Global, Pod, Zeroable, unroll};

/// Keys whose channels all have the same bits: what a launch is told.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Whole {
    /// Levels.
    pub table: [u32; 2],
    /// step·log2(e) / (32512·D): Σ i·(l + 1/2)·n·m to scores in log2 units.
    pub score: f32,
}

/// Keys in parts: the same.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Parted {
    /// Levels.
    pub tables: PartTables,
    /// 2·512·step·log2(e) / (32512·D) of each part.
    pub scores: [f32; PARTS],
}

/// How queries meet the keys of a tile.
pub(super) trait Keys<const D: usize, const K: u32, const PARTED: bool>: Copy {
    /// A query row as a lane wants it.
    type Query: Copy;

    /// What a lane needs for reading a row that no launch writes: loaded ahead of the wait for the launch
    /// before.
    fn ahead(self, lane: u32) -> u32;

    /// A lane's dimensions of row `row` of `queries` [rows, D].
    fn row(self, ahead: u32, queries: Global<f16>, row: usize, lane: u32) -> [f32; 4];

    /// Turns a row: a warp's work.
    fn turn(self, rows: Rows, x: [f32; 4], r: u32, lane: u32);

    /// What a lane wants of its row.
    fn load(self, rows: Rows, lane: u32) -> Self::Query;

    /// Scores of tokens 2q, 2q + 1, 2q + 8 and 2q + 9, in log2 units.
    /// `record` and `norms` are what the lane has of a tile.
    fn scores(self, record: &[u32; 16], norms: [u32; 4], query: Self::Query) -> [f32; 4];

    /// The same of a tile of the window.
    fn in_window(self, slot: Slot<D, PARTED>, query: Self::Query, lane: u32) -> [f32; 4];
}

impl<const D: usize, const K: u32> Keys<D, K, false> for Whole {
    type Query = Query;

    #[simt::device]
    fn ahead(self, _: u32) -> u32 {
        0
    }

    #[simt::device]
    fn row(self, _: u32, queries: Global<f16>, row: usize, lane: u32) -> [f32; 4] {
        write::row::<D>(queries, row, lane)
    }

    #[simt::device]
    fn turn(self, rows: Rows, x: [f32; 4], r: u32, lane: u32) {
        rows.turn::<D>(x, r, lane);
    }

    #[simt::device]
    fn load(self, rows: Rows, lane: u32) -> Query {
        let query = rows.load::<D>(lane);
        let factor = query.factor * self.score;
        Query { factor, offset: query.offset * factor, ..query }
    }

    #[simt::device]
    fn scores(self, record: &[u32; 16], norms: [u32; 4], query: Query) -> [f32; 4] {
        let mut sums = [[0i32; 4]; 2];
        unroll!(for s in 0..(D / 32), at_most 4 {
            let a = [query.high[2 * s], query.low[2 * s], query.high[2 * s + 1], query.low[2 * s + 1]];
            let [first, second] = [2 * s, 2 * s + 1]
                .map(|k| Tile::<D, K, 2, false>::key_bytes(record, k, self.table));
            unroll!(for j in 0..2 {
                sums[j] = mma_i8(a, [first[j], second[j]], sums[j]);
            });
        });
        let n = of_halves([norms[0], norms[1]]);
        let mut scores = [0f32; 4];
        unroll!(for j in 0..2 {
            unroll!(for i in 0..2 {
                let sum = whole(sums[j][i], sums[j][2 + i]);
                scores[2 * j + i] = scaled(sum, query.factor, query.offset) * n[2 * j + i];
            });
        });
        scores
    }

    #[simt::device]
    fn in_window(self, slot: Slot<D, false>, query: Query, lane: u32) -> [f32; 4] {
        let n = slot.scales(0, lane);
        let operand = |s: usize| {
            let (a, b) = (2 * s % 8, (2 * s + 1) % 8);
            [query.high[a], query.low[a], query.high[b], query.low[b]]
        };
        let products = if D == 128 {
            slot.products::<8>(0, operand, lane)
        } else {
            slot.products::<4>(0, operand, lane)
        };
        let mut scores = [0f32; 4];
        unroll!(for t in 0..4 {
            scores[t] = products[t] * query.factor * n[t];
        });
        scores
    }
}

/// Keys in parts of a KV head.
#[derive(Clone, Copy)]
pub(super) struct PartedHead {
    pub keys: Parted,
    pub order: Global<u8>,
    pub head: u32,
}

impl<const D: usize, const K: u32> Keys<D, K, true> for PartedHead {
    type Query = PartedQuery;

    #[simt::device]
    fn ahead(self, lane: u32) -> u32 {
        parts::channels_ahead::<D>(self.order, self.head, lane)
    }

    #[simt::device]
    fn row(self, ahead: u32, queries: Global<f16>, row: usize, _: u32) -> [f32; 4] {
        parts::gathered::<D>(ahead, queries, row)
    }

    #[simt::device]
    fn turn(self, rows: Rows, x: [f32; 4], r: u32, lane: u32) {
        rows.turn_parts::<D>(x, r, lane);
    }

    #[simt::device]
    fn load(self, rows: Rows, lane: u32) -> PartedQuery {
        let mut query = rows.load_parts::<D>(lane);
        unroll!(for p in 0..4 {
            query.factors[p] *= self.keys.scores[p];
            query.offsets[p] *= query.factors[p];
        });
        query
    }

    #[simt::device]
    fn scores(self, record: &[u32; 16], norms: [u32; 4], query: PartedQuery) -> [f32; 4] {
        let words = Tile::<D, K, 2, true>::part_words(record);
        // Two words of each part: of D = 128 those of a token, else one of each token.
        let mut operands = [[[0u32; 2]; PARTS]; 2];
        unroll!(for j in 0..(D / 64), at_most 2 {
            operands[j] = part_bytes::<K>(words[j], &self.keys.tables);
        });
        let norms = norms.map(parts::norms);
        let mut scores = [0f32; 4];
        unroll!(for p in 0..4 {
            let a = [query.high[p][0], query.low[p][0], query.high[p][1], query.low[p][1]];
            unroll!(for j in 0..2 {
                let b = if D == 128 { operands[j][p] } else { [operands[0][p][j], 0] };
                let sums = mma_i8(a, b, [0; 4]);
                unroll!(for i in 0..2 {
                    let t = 2 * j + i;
                    let sum = whole(sums[i], sums[2 + i]);
                    let scaled = scaled(sum, query.factors[p], query.offsets[p]);
                    scores[t] = added(scores[t], p, scaled, norms[t][p]);
                });
            });
        });
        scores
    }

    #[simt::device]
    fn in_window(self, slot: Slot<D, true>, query: PartedQuery, lane: u32) -> [f32; 4] {
        let mut scores = [0f32; 4];
        unroll!(for p in 0..4 {
            let n = slot.scales(p as u32, lane);
            let operand = |_| [query.high[p][0], query.low[p][0], query.high[p][1], query.low[p][1]];
            let from = p as u32 * (D as u32 / 16);
            let products = if D == 128 {
                slot.products::<2>(from, operand, lane)
            } else {
                slot.products::<1>(from, operand, lane)
            };
            unroll!(for t in 0..4 {
                scores[t] = added(scores[t], p, products[t] * query.factors[p], n[t]);
            });
        });
        scores
    }
}

/// What n is multiplied by: of N = Σ i·l, f and f·Σ i / 2.
#[inline(always)]
pub fn scaled(sum: i32, factor: f32, offset: f32) -> f32 {
    fma(sum as f32, factor, offset)
}

/// A score with what part `p` has of it added.
#[inline(always)]
pub fn added(score: f32, p: usize, scaled: f32, n: f32) -> f32 {
    if p == 0 { scaled * n } else { fma(scaled, n, score) }
}

/// N of the sums over the high bytes and over the low ones.
#[inline(always)]
const fn whole(high: i32, low: i32) -> i32 {
    256 * high + low
}

/// The n of two words.
#[inline(always)]
pub fn of_halves([low, high]: [u32; 2]) -> [f32; 4] {
    let ([a, b], [c, d]) = (<f16 as Half>::unpack(low), <f16 as Half>::unpack(high));
    [a, b, c, d]
}
