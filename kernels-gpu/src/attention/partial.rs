//! Partial results and how they are put together, always in the same order.

use super::{ROWS, WARPS};
use glam::Vec4;
use simt::math::{exp2_nonpositive, fma, max};
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

/// Adds `parts` parts of eight rows in their order and calls `done(row, dimension, sums)` for every fourth dimension: the
/// work of a block of [`WARPS`] warps. Weights are powers of two, exactly.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn combine<const D: usize>(
    parts: u32,
    row: impl Fn(u32, u32) -> PartialRow,
    values: impl Fn(u32, u32, u32) -> Vec4,
    mut done: impl FnMut(u32, u32, Merged),
) {
    let quads = D as u32 / 4;
    let mut item = thread::thread_idx_x();
    while item < ROWS * quads {
        let (r, d) = (item / quads, 4 * (item % quads));
        let mut reference = PartialRow::EMPTY.reference;
        for part in 0..parts {
            reference = max(reference, row(part, r).reference);
        }
        let mut sum = 0f32;
        let mut total = [0f32; 4];
        for part in 0..parts {
            let own = row(part, r);
            let weight = exp2_nonpositive(own.reference - reference);
            sum = fma(own.sum, weight, sum);
            let x = values(part, r, d).to_array();
            unroll!(for i in 0..4 {
                total[i] = fma(x[i], weight, total[i]);
            });
        }
        done(r, d, Merged { values: total, row: PartialRow { reference, sum } });
        item += WARPS * 32;
    }
}

/// Publishes what the block has written and says whether all `expected` blocks of `row` have: then their parts may be
/// read. `counters` are 0 before the first and after the last.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn last_to_arrive(counters: GlobalMut<u32>, row: u32, expected: u32, last: Shared<u32>) -> bool {
    thread::device_fence();
    thread::sync_threads();
    if thread::thread_idx_x() == 0 {
        thread::device_fence();
        let before = counters.atomic_add(row as usize, 1);
        let is_last = before + 1 == expected;
        if is_last {
            // For the next launch.
            counters.atomic_exchange(row as usize, 0);
        }
        last.store(0, is_last as u32);
    }
    thread::sync_threads();
    let is_last = last.load(0) != 0;
    if is_last {
        thread::device_fence();
    }
    is_last
}
