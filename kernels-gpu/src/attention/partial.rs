//! Partial results and how they are put together, always in the same order.

use super::{ROWS, threads, warps};
use glam::Vec4;
use simt::math::{exp2_nonpositive, fma, max};
use simt::warp::{self, FULL_MASK};
use simt::{GlobalMut, Pod, Shared, Zeroable, thread, unroll};

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

/// Adds up the warps of a block in their order: calls `done(row, dimension, sums)` for every fourth dimension of the eight
/// rows. Weights are powers of two, exactly. `rows` [warps, 8] and `outputs` [warps, 8, D] lie in shared memory.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn combine<const D: usize>(
    rows: Shared<PartialRow>,
    outputs: Shared<f32>,
    mut done: impl FnMut(u32, u32, Merged),
) {
    let quads = D as u32 / 4;
    let mut item = thread::thread_idx_x();
    while item < ROWS * quads {
        let (r, d) = (item / quads, 4 * (item % quads));
        let mut merging = Merging::new();
        unroll!(for w in 0..8 {
            if (w as u32) < warps(D as u32) {
                merging.meet(rows.load(w as u32 * ROWS + r));
            }
        });
        unroll!(for w in 0..8 {
            if (w as u32) < warps(D as u32) {
                let at = (w as u32 * ROWS + r) * D as u32 + d;
                merging.add(rows.load(w as u32 * ROWS + r), outputs.load_vector(at));
            }
        });
        done(r, d, merging.merged);
        item += threads(D as u32);
    }
}

/// Rows of [`PartialRow`]s that [`combine_parts`] wants for `parts` parts.
pub const fn staged_rows(parts: u32) -> u32 {
    (parts + 1) * ROWS
}

/// Adds up `parts` parts in their order, like [`combine`], for the first `rows` of the eight rows.
///
/// Each thread has sixteen loads under way, the first of them while a warp each turns a row's references into weights, in
/// `staged`, its total behind them. All of it is run once a launch, from an instruction cache that has none of it: short code is
/// fast code here.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn combine_parts<const D: usize>(
    parts: u32,
    rows: u32,
    staged: Shared<PartialRow>,
    row: impl Fn(u32, u32) -> PartialRow,
    values: impl Fn(u32, u32, u32) -> Vec4,
    mut done: impl FnMut(u32, u32, Merged),
) {
    let items = rows * (D as u32 / 4);
    let of_item = |item: u32| (item / (D as u32 / 4), 4 * (item % (D as u32 / 4)));
    // Past the end the last one again, so that no load waits for a condition.
    let sixteen = |item: u32, first: u32| {
        let (r, d) = of_item(item);
        let mut x = [Vec4::ZERO; 16];
        unroll!(for k in 0..16 {
            x[k] = values((first + k as u32).min(parts - 1), r, d);
        });
        x
    };
    let mut item = thread::thread_idx_x();
    let mut x = [Vec4::ZERO; 16];
    if item < items {
        x = sixteen(item, 0);
    }
    let lane = warp::lane_id();
    let mut r = thread::thread_idx_x() / 32;
    while r < rows {
        let mut reference = PartialRow::EMPTY.reference;
        let mut part = lane;
        while part < parts {
            let of_part = row(part, r);
            staged.store(part * ROWS + r, of_part);
            reference = max(reference, of_part.reference);
            part += 32;
        }
        unroll!(for i in 0..5 {
            reference = max(reference, warp::warp_shuffle_xor(FULL_MASK, reference, 1 << i, 32));
        });
        let mut sum = 0f32;
        let mut part = lane;
        while part < parts {
            let PartialRow { reference: own, sum: of_part } = staged.load(part * ROWS + r);
            let weight = exp2_nonpositive(own - reference);
            sum = fma(of_part, weight, sum);
            staged.store(part * ROWS + r, PartialRow { reference: weight, sum: 0.0 });
            part += 32;
        }
        let sum = warp::warp_sum_f32(sum);
        if lane == 0 {
            staged.store(parts * ROWS + r, PartialRow { reference, sum });
        }
        r += warps(D as u32);
    }
    thread::sync_threads();
    while item < items {
        let (r, d) = of_item(item);
        let mut merged = Merged { values: [0.0; 4], row: staged.load(parts * ROWS + r) };
        let mut first = 0;
        loop {
            unroll!(for k in 0..16 {
                if first + (k as u32) < parts {
                    let weight = staged.load((first + k as u32) * ROWS + r).reference;
                    let x = x[k].to_array();
                    merged.values = [0, 1, 2, 3].map(|i| fma(x[i], weight, merged.values[i]));
                }
            });
            first += 16;
            if first >= parts {
                break;
            }
            x = sixteen(item, first);
        }
        done(r, d, merged);
        item += threads(D as u32);
        if item < items {
            x = sixteen(item, 0);
        }
    }
}

/// Four dimensions of a row on the way.
struct Merging {
    merged: Merged,
}

impl Merging {
    #[inline(always)]
    fn new() -> Self {
        Merging { merged: Merged { values: [0.0; 4], row: PartialRow::EMPTY } }
    }

    /// Takes a part's reference into account; all come before the first [`add`](Self::add).
    #[inline(always)]
    fn meet(&mut self, row: PartialRow) {
        self.merged.row.reference = max(self.merged.row.reference, row.reference);
    }

    #[inline(always)]
    fn add(&mut self, row: PartialRow, values: Vec4) {
        let weight = exp2_nonpositive(row.reference - self.merged.row.reference);
        self.merged.row.sum = fma(row.sum, weight, self.merged.row.sum);
        let x = values.to_array();
        unroll!(for i in 0..4 {
            self.merged.values[i] = fma(x[i], weight, self.merged.values[i]);
        });
    }
}

/// Publishes what the block has written and says whether all `expected` blocks of `row` have: then their parts may be
/// read. `counters` are 0 before the first and after the last.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn last_to_arrive(counters: GlobalMut<u32>, row: u32, expected: u32, last: Shared<u32>) -> bool {
    // The barrier shows the block's writes to one thread, and that thread's fence passes them on; likewise back.
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
