//! Partial results and how they are put together, always in the same order.

use super::{BLOCK_TOKENS, ROWS, warps};
use glam::Vec4;
use simt::math::{exp2_nonpositive, fma, max};
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, async_copy, bits, thread, unroll};

/// Reference and sum of one query row over some tokens; Σ p·v lies beside it.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct PartialRow {
    /// The integer to which the row's probabilities are relative, in log2 units.
    pub reference: f32,
    /// Σ 2^(s − reference).
    pub sum: f32,
}

impl PartialRow {
    /// No token.
    pub const EMPTY: PartialRow = PartialRow { reference: -1.0e30, sum: 0.0 };
}

/// Floats of a block's part: eight rows of Σ p·v, then their [`PartialRow`]s.
pub const fn part_floats(head_dim: u32) -> usize {
    (ROWS * head_dim + 2 * ROWS) as usize
}

/// Four dimensions of a row over all parts.
#[derive(Clone, Copy, Debug)]
pub struct Merged {
    /// Σ p·v.
    pub values: [f32; 4],
    /// What they are relative to, and Σ p.
    pub row: PartialRow,
}

/// The most parts that a sequence is cut into.
pub const MAX_PARTS: u32 = 136;

/// Thread blocks that fill the machine once where two share a multiprocessor: on each of the 132 of a GH100.
/// A constant, as the order of additions must not depend on the device.
const BLOCKS_WANTED: u32 = 264;

/// Parts that each sequence is cut into, for `launches` rows of blocks (sequences × KV heads × row groups)
/// with room for `tiles` tiles, where two blocks share a multiprocessor.
pub const fn split_count(launches: u32, tiles: u32) -> u32 {
    let wanted = BLOCKS_WANTED / if launches == 0 { 1 } else { launches };
    // A part should have work for every warp, twice.
    let most = tiles.div_ceil(2 * warps(64));
    let splits = if wanted < most { wanted } else { most };
    if splits == 0 {
        1
    } else if splits > MAX_PARTS {
        MAX_PARTS
    } else {
        splits
    }
}

/// How a sequence is cut.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    /// Tiles of 16 tokens, the last maybe not full.
    pub tiles: u32,
    /// Of each part, the last maybe of fewer.
    pub tiles_a_split: u32,
    /// Parts that have tiles; one even without a tile, to write the rows.
    pub used: u32,
}

impl Parts {
    /// Of a sequence of so many tokens, with room for `splits` parts.
    #[inline(always)]
    pub fn of(length: u32, splits: u32) -> Self {
        let tiles = length.div_ceil(BLOCK_TOKENS);
        let tiles_a_split = bits::div_u32(tiles + splits - 1, splits).max(1);
        let used = bits::div_u32(tiles + tiles_a_split - 1, tiles_a_split).max(1);
        Parts { tiles, tiles_a_split, used }
    }

    /// The tiles of part `split`: the first, and the one behind the last.
    #[inline(always)]
    pub fn tiles_of(self, split: u32) -> [u32; 2] {
        let first = split * self.tiles_a_split;
        [first, (first + self.tiles_a_split).min(self.tiles)]
    }
}

const _: () = assert!(warps(128) == 8 && warps(256) == 4, "as `combine` has it");

/// Rows that [`combine`] wants of so many warps: theirs, and the totals' references.
pub const fn combined_rows(warps: u32) -> u32 {
    (warps + 1) * ROWS
}

/// Adds up the `W` warps of a block in their order: calls `done(row, dimension, sums)` for every fourth
/// dimension of the eight rows. Weights are powers of two, exactly. `rows` [warps, 8] and `outputs` [warps,
/// 8, D] lie in shared memory; afterwards the references of `rows`, of which there are [`combined_rows`], are
/// the warps' weights. All threads of the block call it.
#[simt::device]
pub fn combine_of<const D: usize, const W: usize>(
    rows: Shared<PartialRow>,
    outputs: Shared<f32>,
    mut done: impl FnMut(u32, u32, Merged),
) {
    let warps = W as u32;
    let t = thread::thread_idx_x();
    let mut own = PartialRow::EMPTY;
    let mut reference = PartialRow::EMPTY.reference;
    if t < warps * ROWS {
        own = rows.load(t);
        unroll!(for w in 0..W, at_most 12 {
            reference = max(reference, rows.load(w as u32 * ROWS + t % ROWS).reference);
        });
    }
    thread::sync_threads();
    if t < warps * ROWS {
        let weight = exp2_nonpositive(own.reference - reference);
        rows.store(t, PartialRow { reference: weight, sum: own.sum });
        if t < ROWS {
            rows.store(warps * ROWS + t, PartialRow { reference, sum: 0.0 });
        }
    }
    thread::sync_threads();
    let quads = D as u32 / 4;
    let mut item = t;
    while item < ROWS * quads {
        let (r, d) = (item / quads, 4 * (item % quads));
        let mut merged = Merged { values: [0.0; 4], row: rows.load(warps * ROWS + r) };
        unroll!(for w in 0..W, at_most 12 {
            let PartialRow { reference: weight, sum } = rows.load(w as u32 * ROWS + r);
            let x: Vec4 = outputs.load_vector((w as u32 * ROWS + r) * D as u32 + d);
            merged.row.sum = fma(sum, weight, merged.row.sum);
            let x = x.to_array();
            merged.values = [0, 1, 2, 3].map(|i| fma(x[i], weight, merged.values[i]));
        });
        done(r, d, merged);
        item += 32 * warps;
    }
}

/// Adds up the warps of a block in their order, as many as [`warps`] says of the dimension.
#[simt::device]
pub fn combine<const D: usize>(
    rows: Shared<PartialRow>,
    outputs: Shared<f32>,
    done: impl FnMut(u32, u32, Merged),
) {
    if warps(D as u32) == 8 {
        combine_of::<D, 8>(rows, outputs, done);
    } else {
        combine_of::<D, 4>(rows, outputs, done);
    }
}

/// Combines the rows of `W` warps as [`combine`] does those of a block of attention, and writes what comes of
/// it to the block's part: [`part_floats`] of `partials` from `part` on.
#[simt::device]
pub fn combine_to_part_of<const D: usize, const W: usize>(
    rows: Shared<PartialRow>,
    outputs: Shared<f32>,
    partials: GlobalMut<f32>,
    part: usize,
) {
    combine_of::<D, W>(rows, outputs, |r, d, merged| keep_part::<D>(partials, part, r, d, merged));
}

/// The same of as many warps as [`warps`] says.
#[simt::device]
pub fn combine_to_part<const D: usize>(
    rows: Shared<PartialRow>,
    outputs: Shared<f32>,
    partials: GlobalMut<f32>,
    part: usize,
) {
    combine::<D>(rows, outputs, |r, d, merged| keep_part::<D>(partials, part, r, d, merged));
}

#[inline(always)]
fn keep_part<const D: usize>(partials: GlobalMut<f32>, part: usize, r: u32, d: u32, merged: Merged) {
    partials.store_vector(part + (r * D as u32 + d) as usize, Vec4::from_array(merged.values));
    if d == 0 {
        partials.store_vector(part + (ROWS * D as u32 + 2 * r) as usize, merged.row);
    }
}

/// Items of four dimensions of a row that are a thread's work.
const fn items<const D: usize>(warps: u32) -> usize {
    (ROWS * D as u32 / 4).div_ceil(32 * warps) as usize
}

/// Shared memory in which parts are added up: the place of what is done with.
#[derive(Clone, Copy)]
pub struct Adding {
    /// References and sums of all parts, [parts, 8]; then their weights, and behind them the totals.
    heads: Shared<PartialRow>,
    /// Σ p·v of some parts, [at_once, 8, D].
    values: Shared<f32>,
    at_once: u32,
}

impl Adding {
    /// For up to `most` parts, in what `plan` has left of the first `bytes` bytes.
    pub const fn over<const D: usize>(plan: &mut SharedPlan, most: u32, bytes: u32) -> Self {
        let heads = plan.array((most + 1) * ROWS);
        let at_once = (bytes - plan.bytes()) / (4 * ROWS * D as u32);
        assert!(at_once > 0, "there is room for one part");
        let values = plan.array(at_once * ROWS * D as u32);
        Adding { heads, values, at_once }
    }

    /// Words in which up to `most` parts can be added up, `at_once` of them in one go.
    pub const fn words<const D: usize>(most: u32, at_once: u32) -> u32 {
        2 * (most + 1) * ROWS + at_once * ROWS * D as u32
    }

    /// The weight of a part in row `r`, when all are added up.
    #[simt::device]
    pub fn weight(self, part: u32, r: u32) -> f32 {
        self.heads.load(part * ROWS + r).reference
    }

    /// Adds up `parts` parts in their order, like [`combine`], for the first `rows` of the eight rows;
    /// `place` says where a part is in `partials`. Of copies that are under way at the beginning all have
    /// arrived at the end.
    ///
    /// Copies bring whatever there is room for at once, first of all references and sums, of which a warp
    /// each makes a row's weights while the rest comes. All of it is run once a launch: what counts is how
    /// often somebody waits for the L2 cache.
    #[simt::device]
    pub fn parts_of<const D: usize, const W: usize>(
        self,
        parts: u32,
        rows: u32,
        partials: Global<f32>,
        place: impl Fn(u32) -> usize,
        mut done: impl FnMut(u32, u32, Merged),
    ) {
        let Adding { heads, values, at_once } = self;
        let (t, lane) = (thread::thread_idx_x(), warp::lane_id());
        let threads = 32 * W as u32;
        // Two rows a copy.
        let mut i = t;
        while i < parts * (ROWS / 2) {
            let (part, pair) = (i / (ROWS / 2), i % (ROWS / 2));
            let from = place(part) + (ROWS * D as u32 + 4 * pair) as usize;
            heads.copy_async(2 * i, partials, from);
            i += threads;
        }
        async_copy::commit();
        let ask = |first: u32, end: u32| {
            let mut part = first;
            while part < end {
                let from = place(part);
                unroll!(for k in 0..(items::<D>(W as u32)), at_most 4 {
                    let item = t + k as u32 * threads;
                    if item < rows * (D as u32 / 4) {
                        let to = (part - first) * ROWS * D as u32 + 4 * item;
                        values.copy_async(to, partials, from + 4 * item as usize);
                    }
                });
                part += 1;
            }
            async_copy::commit();
        };
        let mut first = 0;
        let mut end = parts.min(at_once);
        ask(first, end);
        async_copy::wait::<1>();
        thread::sync_threads();
        let mut r = t / 32;
        while r < rows {
            self.weights(parts, r, lane);
            r += W as u32;
        }
        let mut sums = [[0f32; 4]; 4];
        loop {
            async_copy::wait::<0>();
            thread::sync_threads();
            unroll!(for k in 0..(items::<D>(W as u32)), at_most 4 {
                let item = t + k as u32 * threads;
                if item < rows * (D as u32 / 4) {
                    let r = item / (D as u32 / 4);
                    let mut part = first;
                    while part < end {
                        // Past the end the last one again, so that no load waits for a condition.
                        let of = |i: u32| (part + i).min(end - 1);
                        let x = [0, 1, 2, 3].map(|i| {
                            let four: Vec4 = values.load_vector((of(i) - first) * ROWS * D as u32 + 4 * item);
                            (self.weight(of(i), r), four.to_array())
                        });
                        unroll!(for i in 0..4 {
                            if part + (i as u32) < end {
                                let (weight, four) = x[i];
                                sums[k] = [0, 1, 2, 3].map(|d| fma(four[d], weight, sums[k][d]));
                            }
                        });
                        part += 4;
                    }
                }
            });
            first = end;
            if first >= parts {
                break;
            }
            // They have been read.
            thread::sync_threads();
            end = parts.min(first + at_once);
            ask(first, end);
        }
        unroll!(for k in 0..(items::<D>(W as u32)), at_most 4 {
            let item = t + k as u32 * threads;
            if item < rows * (D as u32 / 4) {
                let (r, d) = (item / (D as u32 / 4), 4 * (item % (D as u32 / 4)));
                done(r, d, Merged { values: sums[k], row: heads.load(parts * ROWS + r) });
            }
        });
    }

    /// The same by as many warps as [`warps`] says.
    #[simt::device]
    pub fn parts<const D: usize>(
        self,
        parts: u32,
        rows: u32,
        partials: Global<f32>,
        place: impl Fn(u32) -> usize,
        done: impl FnMut(u32, u32, Merged),
    ) {
        if warps(D as u32) == 8 {
            self.parts_of::<D, 8>(parts, rows, partials, place, done);
        } else {
            self.parts_of::<D, 4>(parts, rows, partials, place, done);
        }
    }

    /// Turns a row's references into weights, and makes its total: a warp's work.
    #[simt::device]
    fn weights(self, parts: u32, r: u32, lane: u32) {
        let heads = self.heads;
        let mut reference = PartialRow::EMPTY.reference;
        let mut part = lane;
        while part < parts {
            reference = max(reference, heads.load(part * ROWS + r).reference);
            part += 32;
        }
        unroll!(for i in 0..5 {
            reference = max(reference, warp::warp_shuffle_xor(FULL_MASK, reference, 1 << i, 32));
        });
        let mut sum = 0f32;
        let mut part = lane;
        while part < parts {
            let PartialRow { reference: own, sum: of_part } = heads.load(part * ROWS + r);
            let weight = exp2_nonpositive(own - reference);
            sum = fma(of_part, weight, sum);
            heads.store(part * ROWS + r, PartialRow { reference: weight, sum: 0.0 });
            part += 32;
        }
        let sum = warp::warp_sum_f32(sum);
        if lane == 0 {
            heads.store(parts * ROWS + r, PartialRow { reference, sum });
        }
    }
}

/// Publishes what the block has written and says whether all `expected` blocks of `row` have: then their
/// parts may be read. `counters` are 0 before the first and after the last.
#[simt::device]
pub fn last_to_arrive(counters: GlobalMut<u32>, row: u32, expected: u32, last: Shared<u32>) -> bool {
    // The barrier shows the block's writes to one thread, and that thread's fence passes them on; likewise
    // back.
    thread::sync_threads();
    if thread::thread_idx_x() == 0 {
        thread::device_fence();
        let before = counters.atomic_add(row as usize, 1);
        let is_last = before + 1 == expected;
        if is_last {
            thread::device_fence();
            // For the next launch; behind the fence, which would wait for it.
            counters.atomic_exchange(row as usize, 0);
        }
        last.store(0, is_last as u32);
    }
    thread::sync_threads();
    last.load(0) != 0
}
