//! Equation (6) on the GPU: the paper computes its scales on the CPU, outside its timings.
//!
//! # Work split
//! A block of eight warps has 128 columns of a band of rows: each warp every eighth row, each lane four
//! neighbouring columns with eight loads in flight. The warps' maxima meet in shared memory (4 KiB), and one
//! atomic maximum a column leaves the block. Bit patterns of non-negative floats order as integers do, so the
//! result does not depend on which block comes first. One more kernel of D threads turns maxima into scales.
//!
//! # Bytes
//! 4·T·D read for f32; 4·D·⌈T/band⌉ in atomics, under 1 % of it for bands of 128 rows and more.

use super::grid::{Place, Shape, place, quad_rows};
use super::quantizer::scale_from_max;
use crate::Element;
use glam::Vec4;
use half::{bf16, f16};
use simt::bits::{div_ceil_u64, div_u32, rem_u32};
use simt::{Global, GlobalMut, Shared, SharedPlan, kernel, math, thread, unroll, warp};

/// Raises each of four maxima to the magnitude of a value; NaN does not count.
#[inline(always)]
fn raise(largest: &mut [f32; 4], x: [f32; 4]) {
    unroll!(for i in 0..4 {
        largest[i] = math::max(largest[i], math::abs(x[i]));
    });
}

/// Warps of a block of [`column_maxima`](fn@column_maxima).
const WARPS: u32 = 8;

/// Columns of a block: 32 lanes of four.
pub const SCAN_COLUMNS: u32 = 128;

/// Rows that a block takes in one go: eight warps with eight loads in flight. A band is a multiple of it.
pub const SCAN_ROWS: u32 = 64;

/// Shared memory of [`column_maxima`](fn@column_maxima): 4 KiB.
#[derive(Clone, Copy, Debug)]
pub struct ScanLayout {
    /// The maxima of each warp, [8, 128].
    pub maxima: Shared<f32>,
    /// Bytes in all.
    pub bytes: u32,
}

/// The layout of the shared memory of [`column_maxima`](fn@column_maxima).
pub const fn scan_layout() -> ScanLayout {
    let mut plan = SharedPlan::new();
    let maxima = plan.array(WARPS * SCAN_COLUMNS);
    ScanLayout { maxima, bytes: plan.bytes() }
}

/// Raises `maxima`\[d\], the bits of an f32 that starts at zero, to max_t |K\[t,d\]|; NaN does not count.
/// `keys` [T, D], `maxima` \[D\]. Blocks take bands of `band` rows (of [`quad_rows`]), column groups fastest;
/// the blocks after those take the left-over elements one by one. Shared: [`scan_layout`].
#[kernel(system = int8, instances(f32, f16, bf16), max_threads = 256)]
pub fn column_maxima<T: Element>(keys: Global<T>, maxima: GlobalMut<u32>, shape: Shape, band: u32) {
    let (rows, columns, rest) = quad_rows(shape);
    let groups = columns.div_ceil(SCAN_COLUMNS);
    let block = thread::block_idx_x();
    let first = div_u32(block, groups) as u64 * band as u64;
    if first < rows {
        let column = rem_u32(block, groups) * SCAN_COLUMNS + warp::lane_id() * 4;
        let end = if first + (band as u64) < rows { first + band as u64 } else { rows };
        let largest = if column < columns { scan::<T>(keys, first, end, column, columns) } else { [0.0; 4] };
        merge_warps(largest, maxima, rem_u32(block, groups) * SCAN_COLUMNS, columns, shape.channels);
    } else {
        let bands = div_ceil_u64(rows, band as u64) as u32;
        let left = (block - bands * groups) * thread::block_dim_x() + thread::thread_idx_x();
        if left < rest {
            let x = keys.load(shape.elements() - rest as usize + left as usize).to_f32();
            let column = rem_u32(left, shape.channels);
            maxima.atomic_max(column as usize, math::max(0.0, math::abs(x)).to_bits());
        }
    }
}

/// The maxima of this lane's four columns over this warp's rows of first..end.
#[inline(always)]
fn scan<T: Element>(keys: Global<T>, first: u64, end: u64, column: u32, columns: u32) -> [f32; 4] {
    let mut largest = [0f32; 4];
    let at = |row: u64| row as usize * columns as usize + column as usize;
    let mut row = first + (thread::thread_idx_x() / 32) as u64;
    while row + ((SCAN_ROWS - WARPS) as u64) < end {
        let load = |r: u64| T::load_four(keys, at(row + r * WARPS as u64));
        let x = [load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7)];
        unroll!(for r in 0..8 {
            raise(&mut largest, x[r]);
        });
        row += SCAN_ROWS as u64;
    }
    while row < end {
        raise(&mut largest, T::load_four(keys, at(row)));
        row += WARPS as u64;
    }
    largest
}

/// Brings the warps' maxima of 128 columns from `first_column` on together and sends them off.
#[inline(always)]
fn merge_warps(largest: [f32; 4], maxima: GlobalMut<u32>, first_column: u32, columns: u32, channels: u32) {
    let shared = scan_layout().maxima;
    let thread = thread::thread_idx_x();
    shared.store_vector::<Vec4>(thread * 4, Vec4::from_array(largest));
    thread::sync_threads();
    if thread < SCAN_COLUMNS && first_column + thread < columns {
        let mut max = 0f32;
        unroll!(for w in 0..8 {
            max = math::max(max, shared.load(w as u32 * SCAN_COLUMNS + thread));
        });
        maxima.atomic_max(rem_u32(first_column + thread, channels) as usize, max.to_bits());
    }
}

/// Turns the maxima of [`column_maxima`](fn@column_maxima) into scales. `maxima` \[D\], `scales` \[D\].
#[kernel(system = int8, instances(f32, f16, bf16), max_threads = 256)]
pub fn finish_scales<T: Element>(maxima: Global<u32>, scales: GlobalMut<f32>, channels: u32) {
    let column = thread::index_1d();
    if column < channels as usize {
        scales.store(column, scale_from_max::<T>(f32::from_bits(maxima.load(column))));
    }
}

/// Lowers `first`, which starts at the largest u64, to the flat index of the first element that is NaN or
/// infinite. `keys` [T, D], `first` \[1\].
#[kernel(system = int8, instances(f32, f16, bf16), max_threads = 256)]
pub fn first_nonfinite<T: Element>(keys: Global<T>, first: GlobalMut<u64>, shape: Shape) {
    let (_, columns, _) = quad_rows(shape);
    let nonfinite = |x: f32| x.to_bits() & 0x7f80_0000 == 0x7f80_0000;
    match place(shape, thread::index_1d() as u32, 1) {
        Place::Quad { row, column } => {
            let at = row as usize * columns as usize + column as usize;
            let x = T::load_four(keys, at);
            unroll!(for i in 0..4 {
                if nonfinite(x[i]) {
                    first.atomic_min(0, (at + i) as u64);
                }
            });
        }
        Place::Rest { index, .. } => {
            if nonfinite(keys.load(index).to_f32()) {
                first.atomic_min(0, index as u64);
            }
        }
        Place::Outside => {}
    }
}
