//! A step that restores all tokens to f16 and attends to these: what attention from codes is measured
//! against.

use super::books::Tables;
use super::prompt::turn_on;
use super::store::Store;
use super::{Handles, Result};
use crate::attention::{BLOCK_TOKENS, PagedPool, StepProblem, dense};
use crate::{Buffer, Device, Stream};
use half::f16;

/// Room for all tokens of all sequences in f16, and exact attention over it.
///
/// What is attended to is what a step from codes sees: the codes' centroids, and the first and the recent
/// tokens as they are in f16. So the two differ by the rounding of their sums alone.
#[derive(Debug)]
pub(super) struct Restored {
    problem: StepProblem,
    exact: dense::Plan<f16>,
    pool: PagedPool<f16>,
    /// Block t of sequence s is s·max_blocks + t, [sequences, max_blocks].
    table: Buffer<u32>,
    /// In the space of the keys, [sequences, q_heads, head_dim].
    queries: Buffer<f16>,
    lse: Buffer<f32>,
}

impl Restored {
    /// The launches of a step, in their order; that of the queries is counted with attention.
    pub const STAGES: &[&str] = &["restore", "attend"];

    /// For steps over a [`Store`] of the same extents.
    ///
    /// # Errors
    /// Extents that dense attention has no kernel for; out of memory.
    pub fn new(device: &Device, problem: StepProblem) -> Result<Self> {
        let exact = dense::Plan::new(device, problem.dense())?;
        let blocks = problem.dense().max_blocks() * problem.sequences;
        let rows = problem.dense().query_rows();
        let pool =
            PagedPool::new(device, blocks, problem.kv_heads, problem.head_dim).map_err(dense::Error::from)?;
        Ok(Restored {
            problem,
            exact,
            pool,
            table: Buffer::from_slice(device, &(0..blocks).collect::<Vec<u32>>())?,
            queries: Buffer::new(device, rows * problem.head_dim as usize)?,
            lse: Buffer::new(device, rows)?,
        })
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.pool.keys().bytes() + self.pool.values().bytes() + self.queries.bytes()
    }

    /// The first `stages` stages of a step over sequences of `lengths` tokens. With `slices` on the CPU's own
    /// path, which gives the same bits.
    ///
    /// # Safety
    /// As [`Plan::run_on`](super::Plan::run_on); `handles.lengths` are these lengths.
    ///
    /// # Errors
    /// What the launches report.
    pub unsafe fn run_on(
        &mut self,
        stream: &Stream,
        slices: bool,
        (store, tables): (&Store, &Tables),
        (handles, lengths): (Handles, &[u32]),
        stages: usize,
    ) -> Result<()> {
        let StepProblem { kv_heads, head_dim, .. } = self.problem;
        let blocks = self.problem.dense().max_blocks() as usize;
        let of_sequence = blocks * (kv_heads * BLOCK_TOKENS * head_dim) as usize;
        for (sequence, length) in lengths.iter().enumerate().filter(|(_, length)| **length > 0) {
            let own = sequence * of_sequence..(sequence + 1) * of_sequence;
            let (keys, values) = self.pool.both_mut();
            let to = [keys.global_range_mut(own.clone())?, values.global_range_mut(own)?];
            // SAFETY: the caller's word; a sequence has its own blocks, as many as it has room for.
            unsafe { store.restore_on(stream, slices, tables, (sequence as u32, *length), to) }?;
        }
        if stages < 2 {
            return Ok(());
        }
        let turned = self.queries.global_mut();
        // SAFETY: the caller's word; as many queries as the problem has.
        unsafe { turn_on(stream, slices, tables, self.problem, store.shape(), handles.queries, turned) }?;
        let exact = dense::Handles {
            queries: self.queries.global(),
            keys: self.pool.keys().global(),
            values: self.pool.values().global(),
            table: self.table.global(),
            lengths: handles.lengths,
            wanted: None,
            near: true,
            output: handles.output,
            lse: self.lse.global_mut(),
        };
        // SAFETY: the caller's word; the table's entries are the pool's blocks.
        Ok(unsafe { self.exact.attend_on(stream, slices, exact) }?)
    }
}
