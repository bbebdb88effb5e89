//! Kernels that only move bytes, with the access pattern of the kernels that they stand beside: what a device
//! reaches with no arithmetic in the way.
//!
//! | kernel | reads : writes | stands beside |
//! |---|---|---|
//! | [`read_four`](fn@read_four) | 4 : 0 | column scales |
//! | [`narrow_four`](fn@narrow_four) | 4 : 1 | quantizing f32 |
//! | [`widen_four`](fn@widen_four) | 1 : 4 | dequantizing f32 |
//! | [`copy_four`](fn@copy_four) | 4 : 4 | a plain copy |
//!
//! The vectors form rows of [`Grid::row`]; a thread has `PER_THREAD` of them, one below the other. With rows
//! of 256 vectors a block's are side by side; with the rows of a matrix it is the pattern of kernels that
//! walk down columns. In [`narrow_neighbours`](fn@narrow_neighbours) a thread's vectors are neighbours, and
//! their narrow side is one access. [`narrow_four`](fn@narrow_four) stores with the hint that the data is not
//! read again, which lets it leave the second-level cache at once; the others leave it there until its place
//! is needed. Which is fastest depends on the mix and the memory; a ceiling is the best of them. What is here
//! was the best at some size.

use crate::element::store_whole;
use glam::UVec4;
use simt::bits::{div_u32, rem_u32};
use simt::{Global, GlobalMut, Pod, Zeroable, kernel, thread, unroll};

/// Vectors in rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Grid {
    /// Vectors in all; the last row may be short.
    pub vectors: u64,
    /// Vectors of a row.
    pub row: u32,
    /// Zero: fills the struct to a multiple of its alignment.
    pub padding: u32,
}

impl Grid {
    /// `vectors` vectors in rows of `row`.
    pub const fn new(vectors: u64, row: u32) -> Self {
        Grid { vectors, row, padding: 0 }
    }
}

/// This thread's vector `i` of `PER_THREAD`.
#[inline(always)]
fn vector<const PER_THREAD: usize>(grid: Grid, i: usize) -> usize {
    let thread = thread::index_1d() as u32;
    let first = div_u32(thread, grid.row) as usize * PER_THREAD;
    (first + i) * grid.row as usize + rem_u32(thread, grid.row) as usize
}

/// Moves this thread's vectors: all loads before the first store, but for threads at the end.
#[inline(always)]
fn each<T: Copy, const PER_THREAD: usize>(
    grid: Grid,
    load: impl Fn(usize) -> T,
    mut store: impl FnMut(usize, T),
) {
    let at = |i| vector::<PER_THREAD>(grid, i);
    if (at(PER_THREAD - 1) as u64) < grid.vectors {
        let first = load(at(0));
        let mut x = [first; PER_THREAD];
        unroll!(for i in 1..PER_THREAD, at_most 8 {
            x[i] = load(at(i));
        });
        unroll!(for i in 0..PER_THREAD, at_most 8 {
            store(at(i), x[i]);
        });
    } else {
        unroll!(for i in 0..PER_THREAD, at_most 8 {
            if (at(i) as u64) < grid.vectors {
                store(at(i), load(at(i)));
            }
        });
    }
}

/// Reads `grid.vectors` × 16 bytes; counts in `target` the threads whose vectors cancel to one certain word.
#[kernel(system = roofline, instances(1, 8), args = copy_four, max_threads = 256)]
pub fn read_four<const PER_THREAD: usize>(source: Global<u32>, target: GlobalMut<u32>, grid: Grid) {
    let mut all = UVec4::ZERO;
    each::<_, PER_THREAD>(grid, |at| source.load_vector_streaming::<UVec4>(at * 4), |_, x| all ^= x);
    if all.x ^ all.y ^ all.z ^ all.w == 0x9e37_79b9 {
        target.atomic_add(0, 1);
    }
}

/// The 4 bytes that a vector is narrowed to.
#[inline(always)]
fn narrowed(x: UVec4) -> u32 {
    x.x ^ x.y ^ x.z ^ x.w
}

/// Reads `grid.vectors` × 16 bytes and writes the exclusive or of each vector's words: 4 bytes.
#[kernel(system = roofline, instances(1, 2), args = copy_four, max_threads = 256)]
pub fn narrow_four<const PER_THREAD: usize>(source: Global<u32>, target: GlobalMut<u32>, grid: Grid) {
    each::<_, PER_THREAD>(
        grid,
        |at| source.load_vector_streaming::<UVec4>(at * 4),
        |at, x| target.store_streaming(at, narrowed(x)),
    );
}

/// Reads `grid.vectors` × 4 bytes and writes each word four times: 16 bytes.
#[kernel(system = roofline, instances(1, 2, 8), args = copy_four, max_threads = 256)]
pub fn widen_four<const PER_THREAD: usize>(source: Global<u32>, target: GlobalMut<u32>, grid: Grid) {
    each::<_, PER_THREAD>(
        grid,
        |at| source.load_streaming(at),
        |at, x| store_whole(target, at * 4, UVec4::splat(x)),
    );
}

/// [`narrow_four`](fn@narrow_four) with four neighbouring vectors a thread, narrowed to one store. A thread's
/// loads meet in the first-level cache, so they may stay there.
#[kernel(system = roofline, args = copy_four, max_threads = 256)]
pub fn narrow_neighbours(source: Global<u32>, target: GlobalMut<u32>, grid: Grid) {
    let first = thread::index_1d() * 4;
    let load = |i: usize| source.load_vector_readonly::<UVec4>((first + i) * 4);
    if (first + 4) as u64 <= grid.vectors {
        let vectors = [load(0), load(1), load(2), load(3)];
        store_whole(target, first, UVec4::from_array(vectors.map(narrowed)));
    } else {
        unroll!(for i in 0..4 {
            if ((first + i) as u64) < grid.vectors {
                target.store(first + i, narrowed(load(i)));
            }
        });
    }
}

/// Copies `grid.vectors` × 16 bytes.
#[kernel(system = roofline, max_threads = 256)]
pub fn copy_four(source: Global<u32>, target: GlobalMut<u32>, grid: Grid) {
    each::<_, 1>(
        grid,
        |at| source.load_vector_streaming::<UVec4>(at * 4),
        |at, x| target.store_vector_streaming::<UVec4>(at * 4, x),
    );
}

/// The launch over `grid` with `per_thread` vectors a thread; `None` where 32 bits cannot number the threads,
/// or rows or threads have no vector.
#[cfg(not(target_arch = "nvptx64"))]
pub fn launch(grid: Grid, per_thread: u32) -> Option<simt::LaunchShape> {
    if grid.row == 0 || per_thread == 0 {
        return None;
    }
    let rows = grid.vectors.div_ceil(grid.row as u64);
    let threads = rows.div_ceil(per_thread as u64).checked_mul(grid.row as u64)?;
    let threads = u32::try_from(threads).ok().filter(|threads| *threads <= u32::MAX - 256)?;
    Some(simt::LaunchShape::new(threads.div_ceil(256), 256))
}

/// Every kernel instance of the system.
#[cfg(not(target_arch = "nvptx64"))]
pub fn kernels() -> impl Iterator<Item = &'static simt::KernelInfo> {
    [
        read_four::INSTANCES,
        narrow_four::INSTANCES,
        widen_four::INSTANCES,
        narrow_neighbours::INSTANCES,
        copy_four::INSTANCES,
    ]
    .into_iter()
    .flatten()
}
