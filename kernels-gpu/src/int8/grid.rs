//! How matrices are cut into threads.

use simt::bits::{div_ceil_u64, div_u32, rem_u32};
use simt::{Pod, Zeroable};

/// Side of the paper's square thread blocks (`TILE_DIM`).
pub const PAPER_TILE: u32 = 16;

/// A row-major matrix: what every kernel of the system gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Shape {
    /// Rows, T.
    pub tokens: u64,
    /// Columns, D.
    pub channels: u32,
    /// Zero: fills the struct to a multiple of its alignment.
    pub padding: u32,
}

impl Shape {
    /// A matrix of `tokens` rows and `channels` columns.
    pub const fn new(tokens: u64, channels: u32) -> Self {
        Shape { tokens, channels, padding: 0 }
    }

    /// T·D.
    #[inline(always)]
    pub const fn elements(self) -> usize {
        self.tokens as usize * self.channels as usize
    }
}

/// The matrix as rows that four-wide accesses fit: (rows, columns of such a row, elements left over).
///
/// With D a multiple of 4 these are the matrix's own rows. Otherwise four rows at a time are taken as one row
/// of 4·D columns, whose column c has the scale of c mod D; the up to three rows left over go element by
/// element.
#[inline(always)]
pub const fn quad_rows(shape: Shape) -> (u64, u32, u32) {
    if shape.channels.is_multiple_of(4) {
        (shape.tokens, shape.channels, 0)
    } else {
        (shape.tokens / 4, shape.channels * 4, (shape.tokens % 4) as u32 * shape.channels)
    }
}

/// Where a thread works in a [`quad_rows`] matrix.
pub(super) enum Place {
    /// Four neighbouring elements: rows from `row` on, first column `column`.
    Quad { row: u64, column: u32 },
    /// One element left over: its flat index and its column.
    Rest { index: usize, column: u32 },
    /// Nothing.
    Outside,
}

/// Thread `thread` of a grid in which each thread has one quad of `rows_per_thread` rows; the threads after
/// those take the left-over elements one by one.
#[inline(always)]
pub(super) fn place(shape: Shape, thread: u32, rows_per_thread: u32) -> Place {
    let (rows, columns, rest) = quad_rows(shape);
    let quads = columns / 4;
    let groups = div_ceil_u64(rows, rows_per_thread as u64) as u32;
    let (group, quad) =
        if quads == 0 { (groups, 0) } else { (div_u32(thread, quads), rem_u32(thread, quads)) };
    if group < groups {
        return Place::Quad { row: group as u64 * rows_per_thread as u64, column: quad * 4 };
    }
    let left = thread - groups * quads;
    if left < rest {
        let index = shape.elements() - rest as usize + left as usize;
        return Place::Rest { index, column: rem_u32(left, shape.channels) };
    }
    Place::Outside
}

/// How many threads [`place`] needs: the host's side of the same split.
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) fn threads(shape: Shape, rows_per_thread: u32) -> u64 {
    let (rows, columns, rest) = quad_rows(shape);
    rows.div_ceil(rows_per_thread as u64) * (columns as u64 / 4) + rest as u64
}

/// The launches of the kernels: the host's side of their work split.
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch {
    use super::{PAPER_TILE, Shape, threads};
    use crate::Element;
    use crate::int8::scales::{SCAN_COLUMNS, SCAN_ROWS, scan_layout};
    use crate::int8::wide::{WIDE_COLUMNS, WIDE_ROWS, wide_back_columns};
    use crate::int8::{ROWS_PER_THREAD, TOKENS_PER_BLOCK, tiled_layout};
    use simt::LaunchShape;

    /// Threads of a block of the one-dimensional kernels.
    pub const BLOCK: u32 = 256;
    /// Threads of a block of the fused kernels: each thread holds 16 tokens in registers.
    pub const FUSED_BLOCK: u32 = 128;

    /// 16 × 16 threads over `columns_per_thread` columns and one row each; past 65535 row tiles the blocks
    /// loop.
    fn square(shape: Shape, columns_per_thread: u32) -> LaunchShape {
        let columns = shape.channels.div_ceil(PAPER_TILE * columns_per_thread);
        let rows = shape.tokens.div_ceil(PAPER_TILE as u64).min(65535) as u32;
        LaunchShape::new((columns, rows), (PAPER_TILE, PAPER_TILE))
    }

    /// `threads` threads in a row; `None` where 32 bits cannot number them (over 2^34 elements a kernel).
    fn line(threads: u64, block: u32) -> Option<LaunchShape> {
        let threads = u32::try_from(threads).ok().filter(|threads| *threads <= u32::MAX - block)?;
        Some(LaunchShape::new(threads.div_ceil(block), block))
    }

    /// One element a thread.
    pub fn naive(shape: Shape) -> LaunchShape {
        square(shape, 1)
    }

    /// One element a thread, with a shared tile of scales.
    pub fn tiled(shape: Shape) -> LaunchShape {
        square(shape, 1).shared(tiled_layout().bytes)
    }

    /// Four columns a thread.
    pub fn coarsened(shape: Shape) -> LaunchShape {
        square(shape, 4)
    }

    /// One quad of one row a thread.
    pub fn vectorized(shape: Shape) -> Option<LaunchShape> {
        line(threads(shape, 1), BLOCK)
    }

    /// One quad of eight rows a thread.
    pub fn rows(shape: Shape) -> Option<LaunchShape> {
        line(threads(shape, ROWS_PER_THREAD), BLOCK)
    }

    /// Sixteen columns of two rows a thread; D is a multiple of 16.
    pub fn wide(shape: Shape) -> Option<LaunchShape> {
        line(shape.tokens.div_ceil(WIDE_ROWS as u64) * (shape.channels / WIDE_COLUMNS) as u64, BLOCK)
    }

    /// 16 bytes of two rows a thread; D is a multiple of 8.
    pub fn wide_back<T: Element>(shape: Shape) -> Option<LaunchShape> {
        let lanes = shape.channels / wide_back_columns::<T>();
        line(shape.tokens.div_ceil(WIDE_ROWS as u64) * lanes as u64, BLOCK)
    }

    /// One quad (or one column, if D is no multiple of 4) of 16 tokens a thread.
    pub fn fused(shape: Shape) -> Option<LaunchShape> {
        let blocks = shape.tokens.div_ceil(TOKENS_PER_BLOCK as u64);
        let lanes = if shape.channels.is_multiple_of(4) { shape.channels / 4 } else { shape.channels };
        line(blocks * lanes as u64, FUSED_BLOCK)
    }

    /// Rows of a band of `column_maxima`: enough blocks to fill a GPU, few enough atomics.
    pub fn scan_band(shape: Shape) -> u32 {
        const BLOCKS_WANTED: u64 = 4096;
        let (rows, columns, _) = super::quad_rows(shape);
        let band = rows * columns.div_ceil(SCAN_COLUMNS) as u64 / BLOCKS_WANTED;
        (band.min(1024) as u32).next_multiple_of(SCAN_ROWS).max(SCAN_ROWS)
    }

    /// Eight warps a block, 128 columns of a band of [`scan_band`] rows each.
    pub fn column_maxima(shape: Shape) -> Option<LaunchShape> {
        let (rows, columns, rest) = super::quad_rows(shape);
        let bands = rows.div_ceil(scan_band(shape) as u64);
        let blocks = bands * columns.div_ceil(SCAN_COLUMNS) as u64 + rest.div_ceil(BLOCK) as u64;
        let blocks = u32::try_from(blocks).ok().filter(|blocks| *blocks <= i32::MAX as u32)?;
        Some(LaunchShape::new(blocks, BLOCK).shared(scan_layout().bytes))
    }

    /// One column a thread.
    pub fn finish_scales(shape: Shape) -> LaunchShape {
        LaunchShape::new(shape.channels.div_ceil(BLOCK), BLOCK)
    }

    /// One quad a thread.
    pub fn first_nonfinite(shape: Shape) -> Option<LaunchShape> {
        line(threads(shape, 1), BLOCK)
    }
}
