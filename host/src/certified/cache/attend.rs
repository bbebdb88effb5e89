//! A step on the cache, and exact attention over what it holds.

use super::super::{Attended, AttendedHandles, Near, StepHandles, StepPlan};
use super::{CacheElement, CacheError, Result, SequenceId, TieredCache};
use crate::attention::PagedPool;
use crate::attention::dense;
use crate::{Buffer, Stream};
use simt::{Global, GlobalMut};
use std::ops::Range;

impl<E: CacheElement> TieredCache<E> {
    /// Attends to everything that the sequences have: rows 0 to `plan.problem().sequences` of the cache,
    /// empty ones included. `queries` is [sequences, q_heads, head_dim].
    ///
    /// It allocates nothing, waits for nothing, and can be captured, together with appends. What it reads
    /// from host memory comes into the scratch on the way; the bits of output and certificates are the same
    /// whatever is there, and whether the kernels or, on the CPU, [`cpu::Step`](super::super::cpu::Step)
    /// computes them; but of [resident](Self::begin_residence) sequences, which the CPU's path has none of,
    /// they are exact.
    ///
    /// # Errors
    /// [`CacheError::Plan`], [`CacheError::Layout`], [`CacheError::Length`], and nothing is launched;
    /// [`crate::Error::WrongDevice`]; what the launches report.
    pub fn attend(
        &mut self,
        stream: &Stream,
        plan: &mut StepPlan<E>,
        queries: &Buffer<E>,
        out: &mut Attended,
    ) -> Result<()> {
        stream.device().check_same(queries.device(), "the buffer of queries")?;
        stream.device().check_same(out.output.device(), "the output")?;
        stream.device().check_same(out.lse.device(), "the buffer of log-sums")?;
        stream.device().check_same(out.certificates.device(), "the buffer of certificates")?;
        // SAFETY: buffers of the device, which wait for it before they go; their lengths are looked at.
        unsafe { self.attend_on(stream, plan, queries.global(), out.handles()) }
    }

    /// [`attend`](Self::attend) over memory that the caller vouches for: parts of larger buffers, pinned
    /// memory.
    ///
    /// # Safety
    /// Until the last launch has finished (for a capture: until each run of the graph has), the memory behind
    /// every handle is there, reached by the stream's device, and used by nothing else that writes it, or for
    /// the outputs, that touches it.
    ///
    /// # Errors
    /// As [`attend`](Self::attend).
    pub unsafe fn attend_on(
        &mut self,
        stream: &Stream,
        plan: &mut StepPlan<E>,
        queries: Global<E>,
        out: AttendedHandles,
    ) -> Result<()> {
        stream.device().check_same(&self.device, "the cache")?;
        let problem = plan.problem();
        let blocks = problem.max_tokens.div_ceil(super::BLOCK_TOKENS);
        self.same([
            ("number of KV heads", problem.kv_heads, self.shape.kv_heads),
            ("head_dim", problem.head_dim, self.shape.head_dim),
            ("number of blocks a sequence", blocks, self.shape.max_blocks),
            // Fewer would do, as long as all sequences are in the first rows.
            ("number of sequences", problem.sequences, self.covering(problem.sequences)),
        ])?;
        let (planned, stored) = (plan.layout(), self.geometry().layout().kind);
        if planned != stored {
            return Err(CacheError::Layout { plan: planned, cache: stored }.into());
        }
        let heads = problem.sequences as usize * problem.q_heads as usize;
        let dim = problem.head_dim as usize;
        for (what, got, expected) in [
            ("the buffer of queries", queries.len(), heads * dim),
            ("the output", out.output.len(), heads * dim),
            ("the buffer of log-sums", out.lse.len(), heads),
            ("the buffer of certificates", out.certificates.len(), heads),
        ] {
            if got != expected {
                return Err(CacheError::Length { what, got, expected: expected.to_string() }.into());
            }
        }
        if self.is_resident() {
            // SAFETY: this function's contract.
            return unsafe { self.attend_residents(stream, plan, queries, out) };
        }
        let handles = self.step_handles(problem.sequences as usize, queries)?;
        if self.on_slices(stream) {
            // SAFETY: memory of the CPU backend, whose streams have done what they were told when a call
            // returns; the rest as below.
            return unsafe { plan.run_on_slices(&handles, out) };
        }
        // SAFETY: everything is the cache's own and made for these extents; lengths stay below limits, whose
        // blocks are in the table, and a block that is full was quantized in this stream. Dropping a buffer,
        // or the cache, waits for the device.
        unsafe { plan.run(stream, &handles, out) }
    }

    /// What a step over the first `rows` sequences reads.
    pub(crate) fn step_handles(&mut self, rows: usize, queries: Global<E>) -> Result<StepHandles<E>> {
        let (table, lengths) = self.table_of(0..rows)?;
        Ok(StepHandles {
            queries,
            tiles: self.tiles.global(),
            annotations: self.annotations.global(),
            table,
            lengths,
            keys: self.keys.global(),
            values: self.values.global(),
            near: Near {
                tiles: self.near.global_mut(),
                directory: self.directory.global_mut(),
                scratch: self.scratch,
            },
        })
    }

    /// Block table and lengths of some sequences.
    pub(crate) fn table_of(&self, rows: Range<usize>) -> Result<(Global<u32>, Global<u32>)> {
        let of_each = self.shape.max_blocks as usize;
        let table = self.table.global_range(rows.start * of_each..rows.end * of_each)?;
        Ok((table, self.lengths.global_range(rows)?))
    }

    /// The original keys of all blocks, [blocks, kv_heads, 16, head_dim]: host memory.
    pub(crate) fn original_keys(&self) -> Global<E> {
        self.keys.global()
    }

    /// Their values.
    pub(crate) fn original_values(&self) -> Global<E> {
        self.values.global()
    }

    /// The keys of each sequence's fresh block, [sequences, kv_heads, 16, head_dim].
    pub(crate) fn fresh_keys(&self) -> Result<Global<E>> {
        let [first, end] = [0, self.extents.sequences].map(|block| self.fresh_elements(0, block));
        Ok(self.near.global_range(first..end)?)
    }

    /// Exact attention over the originals, for as many query tokens as the plan says: what a prompt wants,
    /// whose last keys are those of its queries. The originals are read where they are: from host memory, for
    /// a GPU.
    ///
    /// # Safety
    /// As [`attend_on`](Self::attend_on).
    ///
    /// # Errors
    /// [`CacheError::Plan`]; as [`dense::Plan::run_on`].
    pub unsafe fn attend_exactly(
        &mut self,
        stream: &Stream,
        plan: &mut dense::Plan<E>,
        queries: Global<E>,
        output: GlobalMut<f32>,
        lse: GlobalMut<f32>,
    ) -> Result<()> {
        let sequences = plan.problem().sequences;
        self.same([("number of sequences", sequences, self.covering(sequences))])?;
        let handles = self.originals(plan.problem(), 0, queries, output, lse)?;
        // SAFETY: the caller's word for queries and outputs; the rest is the cache's own, as in `attend_on`.
        unsafe { plan.run_on(stream, handles) }?;
        Ok(())
    }

    /// The originals of as many sequences as the problem has, from a row on, as dense attention wants them.
    pub(crate) fn originals(
        &self,
        problem: dense::Problem,
        row: u32,
        queries: Global<E>,
        output: GlobalMut<f32>,
        lse: GlobalMut<f32>,
    ) -> Result<dense::Handles<E>> {
        self.same([
            ("number of KV heads", problem.kv_heads, self.shape.kv_heads),
            ("head_dim", problem.head_dim, self.shape.head_dim),
            ("number of blocks a sequence", problem.max_blocks(), self.shape.max_blocks),
        ])?;
        let (row, rows) = (row as usize, problem.sequences as usize);
        let (table, lengths) = self.table_of(row..row + rows)?;
        Ok(dense::Handles {
            queries,
            keys: self.keys.global(),
            values: self.values.global(),
            table,
            lengths,
            wanted: None,
            near: false,
            output,
            lse,
        })
    }

    /// Puts the originals of a sequence's first `tokens` tokens into `pool`, which has as many blocks as the
    /// cache, in the stream's order. For a GPU they come over the bus once, where attention of many query
    /// tokens would read them again and again.
    pub(crate) fn stage(
        &self,
        stream: &Stream,
        sequence: SequenceId,
        tokens: usize,
        pool: &mut PagedPool<E>,
    ) -> Result<()> {
        let (expected, got) = (self.keys.len(), pool.keys().len());
        if got != expected {
            let what = "the pool of originals";
            return Err(CacheError::Length { what, got, expected: expected.to_string() }.into());
        }
        let blocks = &self.book.row(self.row_of(sequence)?).blocks;
        let blocks = &blocks[..tokens.div_ceil(super::BLOCK_TOKENS as usize).min(blocks.len())];
        let (keys, values) = pool.both_mut();
        // Runs of blocks that follow each other: one, as a rule.
        for run in blocks.chunk_by(|a, b| a + 1 == *b) {
            let first = self.geometry().pool_elements(run[0] as usize);
            let end = first + self.geometry().pool_elements(run.len());
            // SAFETY: kernels of this stream alone write the originals, and dropping the cache waits for the
            // device.
            unsafe {
                stream.upload_async(&self.keys, first..end, keys, first)?;
                stream.upload_async(&self.values, first..end, values, first)?;
            }
        }
        Ok(())
    }

    pub(super) fn same<const N: usize>(&self, extents: [(&'static str, u32, u32); N]) -> Result<()> {
        match extents.into_iter().find(|(_, plan, cache)| plan != cache) {
            Some((what, plan, cache)) => Err(CacheError::Plan { what, plan, cache }.into()),
            None => Ok(()),
        }
    }

    /// As many sequences as a plan must have that has `planned`.
    fn covering(&self, planned: u32) -> u32 {
        let used = self.book.live().last().map_or(0, |row| row + 1);
        if planned < used || planned > self.extents.sequences { self.extents.sequences } else { planned }
    }
}
