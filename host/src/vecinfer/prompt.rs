//! What a prompt's chunk needs: the sequence so far as it is stored, in f16, and exact attention over it.

use super::books::Tables;
use super::{Result, cpu};
use crate::attention::{BLOCK_TOKENS, PagedPool, StepProblem};
use crate::cpu::handles::{slice, slice_mut};
use crate::simd_level::Level;
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::vecinfer::{RESTORE_THREADS, Shape, turn};
use simt::{Global, GlobalMut, Kernel, LaunchShape};

/// Room for the longest prompt so far: one layer's, which all layers use in turn.
#[derive(Debug)]
pub(super) struct Room {
    pub pool: PagedPool<f16>,
    /// Block t is tile t, \[max_blocks\].
    pub table: Buffer<u32>,
    /// The chunk's queries in the space of the keys.
    pub queries: Buffer<f16>,
    /// Which layer is in the pool.
    pub layer: Option<usize>,
}

impl Room {
    /// For sequences of up to `tokens` tokens and chunks of up to `rows`.
    pub fn new(device: &Device, problem: StepProblem, tokens: u32, rows: usize) -> Result<Self> {
        let StepProblem { q_heads, kv_heads, head_dim, max_tokens, .. } = problem;
        let blocks = tokens.div_ceil(BLOCK_TOKENS).max(1);
        let table: Vec<u32> = (0..max_tokens.div_ceil(BLOCK_TOKENS)).collect();
        let pool = PagedPool::new(device, blocks, kv_heads, head_dim)
            .map_err(crate::attention::dense::Error::from)?;
        Ok(Room {
            pool,
            table: Buffer::from_slice(device, &table)?,
            queries: Buffer::new(device, rows * (q_heads * head_dim) as usize)?,
            layer: None,
        })
    }

    /// Whether a chunk fits.
    pub fn fits(&self, tokens: u32, elements: usize) -> bool {
        self.pool.blocks() * BLOCK_TOKENS >= tokens && self.queries.len() >= elements
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.pool.keys().bytes() + self.pool.values().bytes() + self.queries.bytes()
    }

    /// Brings queries [rows, q_heads, head_dim] into the space of the keys.
    ///
    /// # Safety
    /// As [`Stream::launch`]; with `slices` the handle is of host memory.
    pub unsafe fn turn(
        &mut self,
        stream: &Stream,
        slices: bool,
        tables: &Tables,
        problem: StepProblem,
        shape: Shape,
        queries: Global<f16>,
    ) -> Result<()> {
        let turned = self.queries.global_range_mut(..queries.len())?;
        // SAFETY: the caller's word, and own memory.
        unsafe { turn_on(stream, slices, tables, problem, shape, queries, turned) }
    }
}

/// The instance for one of [`HEAD_DIMS`](super::HEAD_DIMS).
pub(super) fn turn_for(head_dim: u32) -> Kernel<turn::Args> {
    match head_dim {
        64 => turn::kernel::<64>(),
        96 => turn::kernel::<96>(),
        128 => turn::kernel::<128>(),
        _ => turn::kernel::<256>(),
    }
}

/// Brings queries [rows, q_heads, head_dim] into the space of the keys: the first handle's to the second.
///
/// # Safety
/// As [`Stream::launch`]; the handles have the same length; with `slices` they are host memory.
pub(super) unsafe fn turn_on(
    stream: &Stream,
    slices: bool,
    tables: &Tables,
    problem: StepProblem,
    shape: Shape,
    queries: Global<f16>,
    turned: GlobalMut<f16>,
) -> Result<()> {
    let (shape, dim) = (tables.complete(shape), problem.head_dim as usize);
    if slices {
        // SAFETY: the caller's word.
        unsafe {
            let transform = slice(tables.transform.global());
            cpu::turn(Level::best(), dim, shape, transform, slice(queries), slice_mut(turned));
        }
        return Ok(());
    }
    let rows = queries.len() / (problem.q_heads as usize * dim);
    let grid = (problem.q_heads.div_ceil(RESTORE_THREADS / 32), rows as u32);
    let kernel = turn_for(problem.head_dim);
    let transforms = tables.transform.global();
    let args = turn::Args { queries, transforms, turned, heads: problem.q_heads, shape };
    // SAFETY: the caller's word; a warp a head of each row.
    Ok(unsafe { stream.launch(&kernel, LaunchShape::new(grid, RESTORE_THREADS), args) }?)
}
