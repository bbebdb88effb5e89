//! Codes whose blocks are chosen by sketches of the original keys: `gather:certified/tiles=int8-int4`.

use super::super::sketch::{Budget, CodeHandles, Handles, OF_CODES, Plan, SketchHandles, Sketches};
use super::super::sketch::{head_reports, needed_bytes};
use super::OverCodes;
use super::cache::CodedCache;
use crate::attention::StepProblem;
use crate::certified::{CertifiedCache, Policy, StepHandles};
use crate::kv::{Chunk, Error, HeadReport, Held, KvCache, Opening, Result, Sequences};
use crate::{Buffer, Stream};
use half::f16;
use kernels_gpu::gather::sketch::Verdict;
use simt::{Global, GlobalMut};

/// A cache whose steps bound what they leave out and what codes add to it, together.
pub type SketchedCodes = CodedCache<BySketches>;

/// Sketches of the original keys of each layer, with the largest norms of their values.
#[derive(Debug)]
pub struct BySketches {
    /// One for all layers: steps follow each other in the stream.
    plan: Plan<f16>,
    /// Of each layer.
    sketches: Vec<Sketches<f16>>,
    lse: Buffer<f32>,
    /// Of the last step, [layers, sequences, q_heads].
    verdicts: Buffer<Verdict>,
}

impl SketchedCodes {
    /// An empty cache.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; settings that [`Budget::checked`] refuses; as
    /// [`CertifiedCache::new`] and [`Plan::new`].
    pub fn new(opening: &Opening<'_>, budget: Budget) -> Result<Self> {
        let Opening { device, geometry, capacity, .. } = *opening;
        let problem = StepProblem::from(Sequences::new(device, geometry, capacity).step_problem().checked()?);
        let beside = needed_bytes(geometry, problem, budget.checked()?);
        let bytes = CertifiedCache::needed(geometry, problem)?.saturating_add(beside);
        Error::if_too_large(device, capacity, bytes)?;
        // Before anything large: it refuses what it cannot do.
        let plan = Plan::new(device, problem, Budget { codes: true, ..budget })?;
        let stored = CertifiedCache::new(device, geometry, capacity, Policy { certify: false, ..OF_CODES })?;
        let sketches = (0..geometry.layers).map(|_| Ok(Sketches::new(device, problem, budget)?));
        let rows = problem.dense().query_rows();
        let choice = BySketches {
            plan,
            sketches: sketches.collect::<Result<_>>()?,
            lse: Buffer::new(device, rows)?,
            verdicts: Buffer::zeroed(device, geometry.layers * rows)?,
        };
        Ok(CodedCache { stored, choice })
    }
}

// SAFETY: sketches, verdicts and the plan are made by `new`.
unsafe impl OverCodes for BySketches {
    /// Keys and values of the tiles that the tokens are in are read from the originals: of a step up to 32
    /// tokens a KV head, over the bus.
    fn take(
        &mut self,
        stream: &Stream,
        stored: &mut CertifiedCache,
        (layer, chunk): (usize, Chunk),
        positions: &Buffer<u32>,
    ) -> Result<()> {
        let sequences = stored.held().capacity.sequences;
        let (cache, slices) = stored.stored(stream, layer)?;
        let (rows, tokens) = match chunk {
            Chunk::Step => (0..sequences, 1),
            Chunk::Prompt { sequence, tokens } => (sequence..sequence + 1, tokens as u32),
        };
        let (row, positions) = (rows.start, positions.global_range(..rows.len())?);
        let (table, lengths) = cache.table_of(rows)?;
        let (keys, values) = (cache.original_keys(), cache.original_values());
        let handles = SketchHandles { keys, values, table, positions, lengths };
        // SAFETY: buffers of this device and memory that it reaches, host memory on the CPU; the table's
        // blocks are those of the originals, and a sequence's tokens follow each other. Dropping a buffer, or
        // the cache, waits for the device.
        Ok(unsafe { self.sketches[layer].sketch_on(stream, (row, tokens), slices, handles) }?)
    }

    fn copy(&mut self, stream: &Stream, source: usize, fork: usize, tokens: usize) -> Result<()> {
        for sketches in &mut self.sketches {
            sketches.copy(stream, source, fork, tokens)?;
        }
        Ok(())
    }

    fn attend(
        &mut self,
        stream: &Stream,
        stored: &mut CertifiedCache,
        layer: usize,
        (queries, output): (Global<f16>, GlobalMut<f32>),
    ) -> Result<()> {
        let sequences = stored.held().capacity.sequences;
        let (cache, slices) = stored.stored(stream, layer)?;
        let StepHandles { tiles, annotations, table, lengths, keys, values, near, .. } =
            cache.step_handles(sequences, queries)?;
        let rows = self.lse.len();
        let handles = Handles {
            queries,
            keys,
            values,
            sketches: self.sketches[layer].words().global(),
            table,
            lengths,
            output,
            lse: self.lse.global_mut(),
            verdicts: self.verdicts.global_range_mut(layer * rows..(layer + 1) * rows)?,
            codes: Some(CodeHandles { tiles, annotations, near }),
        };
        // SAFETY: everything but queries and output, whose lengths were looked at, is the cache's own and
        // made for these extents; a block that is full was quantized in this stream. Dropping a buffer, or
        // the cache, waits for the device.
        Ok(unsafe { self.plan.step_on(stream, slices, &handles) }?)
    }

    fn kept(&self, tokens: usize) -> usize {
        self.plan.budget().support.kept(tokens as u32) as usize
    }

    fn bytes(&self, tokens: usize) -> u64 {
        self.sketches.iter().map(|sketches| sketches.bytes_of(tokens as u32)).sum()
    }

    fn step_bytes(&self, tokens: usize) -> u64 {
        self.bytes(tokens)
    }

    fn reports(&self, held: Held<'_>) -> Result<Vec<HeadReport>> {
        head_reports(&self.verdicts, held)
    }
}
