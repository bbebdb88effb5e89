//! Keys in 8 bits and values in 4, of which steps read a constant number.

use super::super::{Bounds, FoldHandles, Ranking, Support};
use super::TiledPlan;
use crate::attention::{BLOCK_TOKENS, StepProblem};
use crate::certified::{CertifiedCache, Policy};
use crate::kv::{
    Attending, Chunk, Error, Held, KvCache, New, Opening, Restored, Result, Sequences, StepReport,
};
use crate::{Buffer, Stream};
use half::f16;

/// The cache of `int8-int4`, and bounds of the original keys beside each layer.
///
/// The attention of a prompt's chunk is exact, as it is there.
#[derive(Debug)]
pub struct TiledCache {
    stored: CertifiedCache,
    /// One for all layers: steps follow each other in the stream.
    plan: TiledPlan<f16>,
    /// Of each layer.
    bounds: Vec<Bounds<f16>>,
    lse: Buffer<f32>,
    /// A block table in which all of a sequence is its fresh block, where a step finds its new token.
    fresh: Buffer<u32>,
}

impl TiledCache {
    /// An empty cache.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; as [`CertifiedCache::new`] and [`TiledPlan::new`].
    pub fn new(opening: &Opening<'_>, support: Support) -> Result<Self> {
        let Opening { device, geometry, capacity, .. } = *opening;
        let problem = StepProblem::from(Sequences::new(device, geometry, capacity).step_problem().checked()?);
        let score = Ranking::fitting::<f16>(opening.selection, problem).score;
        // Before anything large: it refuses what it cannot do.
        let plan = TiledPlan::new(device, problem, support, score)?;
        let bounds = (0..geometry.layers).map(|_| Ok(Bounds::scored(device, problem, support, score)?));
        let bounds: Vec<Bounds<f16>> = bounds.collect::<Result<_>>()?;
        let beside: u64 = bounds.iter().map(|bounds| bounds.words().bytes() as u64).sum();
        let bytes = CertifiedCache::needed(geometry, problem)?.saturating_add(beside);
        Error::if_too_large(device, capacity, bytes)?;
        let stored = CertifiedCache::new(device, geometry, capacity, Policy::BARE)?;
        let max_blocks = problem.max_tokens.div_ceil(BLOCK_TOKENS);
        let fresh: Vec<u32> =
            (0..problem.sequences).flat_map(|row| std::iter::repeat_n(row, max_blocks as usize)).collect();
        Ok(TiledCache {
            lse: Buffer::new(device, problem.dense().query_rows())?,
            fresh: Buffer::from_slice(device, &fresh)?,
            stored,
            plan,
            bounds,
        })
    }

    /// The kernels on every device: on the CPU the emulator, which gives the same bits.
    pub fn with_kernels(mut self) -> Self {
        self.stored = self.stored.with_kernels();
        self
    }

    /// The plan, and a layer's bounds.
    #[cfg(test)]
    pub(in crate::gather) fn choice(&self, layer: usize) -> (&TiledPlan<f16>, &Bounds<f16>) {
        (&self.plan, &self.bounds[layer])
    }

    /// Takes a chunk's keys, which the cache has, into a layer's bounds.
    fn fold(&mut self, stream: &Stream, layer: usize, chunk: Chunk, positions: &Buffer<u32>) -> Result<()> {
        let sequences = self.stored.held().capacity.sequences;
        let (cache, slices) = self.stored.stored(stream, layer)?;
        // A step's new token is in the fresh block, in the device's memory; a prompt's are with the
        // originals.
        let (row, tokens, handles) = match chunk {
            Chunk::Step => {
                let (positions, table) = (positions.global_range(..sequences)?, self.fresh.global());
                let (_, lengths) = cache.table_of(0..sequences)?;
                (0, 1, FoldHandles { keys: cache.fresh_keys()?, table, positions, lengths })
            }
            Chunk::Prompt { sequence, tokens } => {
                let (positions, keys) = (positions.global_range(..1)?, cache.original_keys());
                let (table, lengths) = cache.table_of(sequence..sequence + 1)?;
                (sequence, tokens as u32, FoldHandles { keys, table, positions, lengths })
            }
        };
        // SAFETY: buffers of this device, host memory on the CPU; the table's blocks are those of the keys,
        // and a sequence's tokens follow each other. Dropping a buffer waits for the device.
        Ok(unsafe { self.bounds[layer].fold_on(stream, (row, tokens), slices, handles) }?)
    }
}

// SAFETY: bounds, plan and log-sums are made once; the rest is the stored cache's.
unsafe impl KvCache for TiledCache {
    fn scheme(&self) -> &'static str {
        "gather"
    }

    fn held(&self) -> Held<'_> {
        self.stored.held()
    }

    fn bytes(&self) -> u64 {
        let bounds = |tokens: &usize| self.bounds_bytes((*tokens as u32).div_ceil(self.plan.support().block));
        self.stored.bytes() + self.held().sequences.iter().flatten().map(bounds).sum::<u64>()
    }

    fn step_bytes(&self) -> u64 {
        let of_sequence = |tokens: &usize| {
            let (support, tokens) = (self.plan.support(), *tokens as u32);
            self.bounds_bytes(support.extent(tokens).ranked_blocks())
                + self.stored.sequence_bytes(support.kept(tokens) as usize)
        };
        self.held().sequences.iter().flatten().map(of_sequence).sum()
    }

    fn host_bytes(&self) -> u64 {
        self.stored.host_bytes()
    }

    fn report(&self) -> Result<StepReport> {
        if self.stored.last() != Some(Chunk::Step) {
            return Ok(StepReport::default());
        }
        let held = self.held();
        let heads = (0..held.geometry.layers).flat_map(|_| self.plan.support().reports(held));
        Ok(StepReport { heads: heads.collect() })
    }

    fn restored(&self, stream: &Stream, layer: usize, sequence: usize) -> Result<Option<Restored>> {
        self.stored.restored(stream, layer, sequence)
    }

    fn check(&mut self, stream: &Stream) -> Result<()> {
        self.stored.check(stream)
    }

    fn join(&mut self, stream: &Stream) -> Result<usize> {
        self.stored.join(stream)
    }

    fn fork(&mut self, stream: &Stream, sequence: usize) -> Result<usize> {
        let tokens = self.stored.sequences().length(sequence)?;
        let fork = self.stored.fork(stream, sequence)?;
        for bounds in &mut self.bounds {
            bounds.copy(stream, sequence, fork, tokens)?;
        }
        Ok(fork)
    }

    fn leave(&mut self, stream: &Stream, sequence: usize) -> Result<()> {
        self.stored.leave(stream, sequence)
    }

    fn begin(&mut self, stream: &Stream, chunk: Chunk) -> Result<()> {
        self.stored.begin(stream, chunk)
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let sequences = self.stored.sequences();
        let chunk = sequences.begun(layer)?;
        let positions = new.positions();
        stream.device().check_same(positions.device(), "the buffer of positions")?;
        self.stored.append(stream, layer, new)?;
        self.fold(stream, layer, chunk, positions)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        if self.stored.sequences().begun(layer)? != Chunk::Step {
            return self.stored.attend(stream, layer, queries, output);
        }
        let Attending { queries, output, .. } =
            self.stored.sequences().attending(stream, layer, queries, output)?;
        let rows = self.held().capacity.sequences;
        let (cache, slices) = self.stored.stored(stream, layer)?;
        let handles = cache.step_handles(rows, queries)?;
        let bounds = self.bounds[layer].words().global();
        let out = (output, self.lse.global_mut());
        // SAFETY: everything but queries and output, whose lengths were looked at, is the cache's own and
        // made for these extents; a block that is full was quantized in this stream. Dropping a buffer, or
        // the cache, waits for the device.
        unsafe { self.plan.run(stream, slices, (bounds, &handles), out, usize::MAX) }
    }

    fn commit(&mut self) {
        self.stored.commit();
    }
}

impl TiledCache {
    /// Bytes of the bounds of so many gather-blocks in all layers.
    fn bounds_bytes(&self, blocks: u32) -> u64 {
        self.bounds.iter().map(|bounds| bounds.bytes_of(blocks)).sum()
    }
}
