//! The paper's first three kernels: `naive` (listing 5), `tiled` (listing 6) and `coarsened`.
//!
//! # Work split
//! Blocks of 16 × 16 threads, x along the channels, y along the tokens. Each row of a block touches 64 bytes
//! of f32: half a warp, so these kernels reach less of the memory's bandwidth by construction. Past 65535 row
//! tiles (1,048,560 tokens), where the grid's y ends, blocks go on to further tiles.
//!
//! The paper's listing 7 (`coarsened`) loops over rows with a stride of `blockDim.y` from `blockIdx.y`, which
//! visits some rows twice and others never for any grid but one; the authors' code gives each thread four
//! columns 16 apart instead, and so does this one.
//!
//! `tiled` stages the 16 scales of the block's columns in shared memory, as the paper describes; the authors'
//! code stages the data, which nothing reuses.

use super::grid::{PAPER_TILE, Shape};
use super::quantizer::{dequantize, quantize};
use crate::Element;
use half::{bf16, f16};
use simt::{Global, GlobalMut, Shared, SharedPlan, kernel, thread, unroll};

/// Shared memory of `tiled`: 64 bytes.
#[derive(Clone, Copy, Debug)]
pub struct TiledLayout {
    /// The scales of the block's 16 columns.
    pub scales: Shared<f32>,
    /// Bytes in all.
    pub bytes: u32,
}

/// The layout of `tiled`'s shared memory.
pub const fn tiled_layout() -> TiledLayout {
    let mut plan = SharedPlan::new();
    let scales = plan.array(PAPER_TILE);
    TiledLayout { scales, bytes: plan.bytes() }
}

/// Calls `body(row)` for each row of this thread: one per row tile.
#[inline(always)]
fn for_rows(shape: Shape, mut body: impl FnMut(usize)) {
    let step = thread::grid_dim_y() as u64 * PAPER_TILE as u64;
    let mut row = thread::block_idx_y() as u64 * PAPER_TILE as u64 + thread::thread_idx_y() as u64;
    while row < shape.tokens {
        body(row as usize);
        row += step;
    }
}

/// Equation (7), one thread an element (listing 5). `keys` [T, D], `scales` \[D\], `codes` [T, D].
#[kernel(system = int8, instances(f32, f16, bf16), max_threads = 256)]
pub fn quantize_naive<T: Element>(keys: Global<T>, scales: Global<f32>, codes: GlobalMut<i8>, shape: Shape) {
    let column = thread::block_idx_x() * PAPER_TILE + thread::thread_idx_x();
    if column < shape.channels {
        for_rows(shape, |row| {
            let at = row * shape.channels as usize + column as usize;
            codes.store(at, quantize(keys.load(at).to_f32(), scales.load(column as usize)) as i8);
        });
    }
}

/// Equation (8), one thread an element. `codes` [T, D], `scales` \[D\], `keys` [T, D].
#[kernel(system = int8, instances(f32, f16, bf16), max_threads = 256)]
pub fn dequantize_naive<T: Element>(
    codes: Global<i8>,
    scales: Global<f32>,
    keys: GlobalMut<T>,
    shape: Shape,
) {
    let column = thread::block_idx_x() * PAPER_TILE + thread::thread_idx_x();
    if column < shape.channels {
        for_rows(shape, |row| {
            let at = row * shape.channels as usize + column as usize;
            keys.store(at, T::from_f32(dequantize(codes.load(at), scales.load(column as usize))));
        });
    }
}

/// Stages the scales of the block's columns and returns this thread's column; `None` outside the matrix.
#[inline(always)]
fn stage_scales(scales: Global<f32>, shape: Shape) -> Option<u32> {
    let tile = tiled_layout().scales;
    let lane = thread::thread_idx_x();
    let column = thread::block_idx_x() * PAPER_TILE + lane;
    let inside = column < shape.channels;
    if thread::thread_idx_y() == 0 && inside {
        tile.store(lane, scales.load(column as usize));
    }
    thread::sync_threads();
    if inside { Some(column) } else { None }
}

/// Equation (7), one thread an element, scales from shared memory (listing 6). Shared: [`tiled_layout`].
#[kernel(system = int8, instances(f32, f16, bf16), args = crate::int8::quantize_naive, max_threads = 256)]
pub fn quantize_tiled<T: Element>(keys: Global<T>, scales: Global<f32>, codes: GlobalMut<i8>, shape: Shape) {
    if let Some(column) = stage_scales(scales, shape) {
        let scale = tiled_layout().scales.load(thread::thread_idx_x());
        for_rows(shape, |row| {
            let at = row * shape.channels as usize + column as usize;
            codes.store(at, quantize(keys.load(at).to_f32(), scale) as i8);
        });
    }
}

/// Equation (8), one thread an element, scales from shared memory. Shared: [`tiled_layout`].
#[kernel(system = int8, instances(f32, f16, bf16), args = crate::int8::dequantize_naive, max_threads = 256)]
pub fn dequantize_tiled<T: Element>(
    codes: Global<i8>,
    scales: Global<f32>,
    keys: GlobalMut<T>,
    shape: Shape,
) {
    if let Some(column) = stage_scales(scales, shape) {
        let scale = tiled_layout().scales.load(thread::thread_idx_x());
        for_rows(shape, |row| {
            let at = row * shape.channels as usize + column as usize;
            keys.store(at, T::from_f32(dequantize(codes.load(at), scale)));
        });
    }
}

/// This thread's four columns, 16 apart.
#[inline(always)]
fn coarse_column(i: usize) -> u32 {
    thread::block_idx_x() * PAPER_TILE * 4 + thread::thread_idx_x() + i as u32 * PAPER_TILE
}

/// Equation (7), one thread four columns 16 apart.
#[kernel(system = int8, instances(f32, f16, bf16), args = crate::int8::quantize_naive, max_threads = 256)]
pub fn quantize_coarsened<T: Element>(
    keys: Global<T>,
    scales: Global<f32>,
    codes: GlobalMut<i8>,
    shape: Shape,
) {
    for_rows(shape, |row| {
        let row = row * shape.channels as usize;
        unroll!(for i in 0..4 {
            let column = coarse_column(i);
            if column < shape.channels {
                let at = row + column as usize;
                codes.store(at, quantize(keys.load(at).to_f32(), scales.load(column as usize)) as i8);
            }
        });
    });
}

/// Equation (8), one thread four columns 16 apart.
#[kernel(system = int8, instances(f32, f16, bf16), args = crate::int8::dequantize_naive, max_threads = 256)]
pub fn dequantize_coarsened<T: Element>(
    codes: Global<i8>,
    scales: Global<f32>,
    keys: GlobalMut<T>,
    shape: Shape,
) {
    for_rows(shape, |row| {
        let row = row * shape.channels as usize;
        unroll!(for i in 0..4 {
            let column = coarse_column(i);
            if column < shape.channels {
                let at = row + column as usize;
                keys.store(at, T::from_f32(dequantize(codes.load(at), scales.load(column as usize))));
            }
        });
    });
}
