//! Keys in 8 bits and values in 4, of which steps read some blocks.

use super::super::{Bounds, FoldHandles, Ranking, Support};
use super::TiledPlan;
use crate::attention::{BLOCK_TOKENS, StepProblem};
use crate::certified::{CertifiedCache, Policy};
use crate::kv::{
    Attending, Chunk, Error, HeadReport, Held, KvCache, New, Opening, Restored, Result, Sequences, StepReport,
};
use crate::{Buffer, Stream};
use half::f16;
use simt::{Global, GlobalMut};

/// How steps over codes choose the blocks that they read, and what is kept for that beside the codes.
///
/// # Safety
/// What a step reads or writes of its own is made once, before the first step: graphs keep its addresses.
pub unsafe trait OverCodes: Send {
    /// Takes a chunk's tokens, which the cache has, into what a layer's blocks are chosen by.
    ///
    /// # Errors
    /// What the launches report.
    fn take(
        &mut self,
        stream: &Stream,
        stored: &mut CertifiedCache,
        of: (usize, Chunk),
        positions: &Buffer<u32>,
    ) -> Result<()>;

    /// Makes what a fork is chosen by that of its source, which has so many tokens.
    ///
    /// # Errors
    /// What the copies report.
    fn copy(&mut self, stream: &Stream, source: usize, fork: usize, tokens: usize) -> Result<()>;

    /// A step of a layer: chooses, and attends.
    ///
    /// # Errors
    /// What the launches report.
    fn attend(
        &mut self,
        stream: &Stream,
        stored: &mut CertifiedCache,
        layer: usize,
        of: (Global<f16>, GlobalMut<f32>),
    ) -> Result<()>;

    /// Tokens that a step keeps of so many, at the least.
    fn kept(&self, tokens: usize) -> usize;

    /// Bytes that a sequence of so many tokens has beside its codes, in all layers.
    fn bytes(&self, tokens: usize) -> u64;

    /// Bytes of these that a step reads.
    fn step_bytes(&self, tokens: usize) -> u64;

    /// What is known of the last step, [layers, sequences that are there, q_heads]; waits for the device.
    ///
    /// # Errors
    /// What the device reports.
    fn reports(&self, held: Held<'_>) -> Result<Vec<HeadReport>>;
}

/// The cache of `int8-int4`, and what steps choose by beside each layer.
///
/// The attention of a prompt's chunk is exact, as it is there.
#[derive(Debug)]
pub struct CodedCache<C: OverCodes> {
    pub(super) stored: CertifiedCache,
    pub(super) choice: C,
}

/// A cache whose steps choose by bounds of the original keys.
pub type TiledCache = CodedCache<ByBounds>;

/// Bounds of the original keys of each layer.
#[derive(Debug)]
pub struct ByBounds {
    /// One for all layers: steps follow each other in the stream.
    plan: TiledPlan<f16>,
    /// Of each layer.
    bounds: Vec<Bounds<f16>>,
    lse: Buffer<f32>,
    /// A block table in which all of a sequence is its fresh block, where a step finds its new token.
    fresh: Buffer<u32>,
    layers: usize,
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
        let lse = Buffer::new(device, problem.dense().query_rows())?;
        let fresh = Buffer::from_slice(device, &fresh)?;
        let choice = ByBounds { plan, bounds, lse, fresh, layers: geometry.layers };
        Ok(CodedCache { stored, choice })
    }

    /// The plan, and a layer's bounds.
    #[cfg(test)]
    pub(in crate::gather) fn choice(&self, layer: usize) -> (&TiledPlan<f16>, &Bounds<f16>) {
        (&self.choice.plan, &self.choice.bounds[layer])
    }
}

// SAFETY: bounds, plan and log-sums are made by `new`.
unsafe impl OverCodes for ByBounds {
    fn take(
        &mut self,
        stream: &Stream,
        stored: &mut CertifiedCache,
        (layer, chunk): (usize, Chunk),
        positions: &Buffer<u32>,
    ) -> Result<()> {
        let sequences = stored.held().capacity.sequences;
        let (cache, slices) = stored.stored(stream, layer)?;
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

    fn copy(&mut self, stream: &Stream, source: usize, fork: usize, tokens: usize) -> Result<()> {
        for bounds in &mut self.bounds {
            bounds.copy(stream, source, fork, tokens)?;
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
        let rows = stored.held().capacity.sequences;
        let (cache, slices) = stored.stored(stream, layer)?;
        let handles = cache.step_handles(rows, queries)?;
        let bounds = self.bounds[layer].words().global();
        let out = (output, self.lse.global_mut());
        // SAFETY: everything but queries and output, whose lengths were looked at, is the cache's own and
        // made for these extents; a block that is full was quantized in this stream. Dropping a buffer, or
        // the cache, waits for the device.
        unsafe { self.plan.run(stream, slices, (bounds, &handles), out, usize::MAX) }
    }

    fn kept(&self, tokens: usize) -> usize {
        self.plan.support().kept(tokens as u32) as usize
    }

    fn bytes(&self, tokens: usize) -> u64 {
        let blocks = (tokens as u32).div_ceil(self.plan.support().block);
        self.bounds.iter().map(|bounds| bounds.bytes_of(blocks)).sum()
    }

    fn step_bytes(&self, tokens: usize) -> u64 {
        let ranked = self.plan.support().extent(tokens as u32).ranked_blocks();
        self.bounds.iter().map(|bounds| bounds.bytes_of(ranked)).sum()
    }

    fn reports(&self, held: Held<'_>) -> Result<Vec<HeadReport>> {
        Ok((0..self.layers).flat_map(|_| self.plan.support().reports(held)).collect())
    }
}

impl<C: OverCodes> CodedCache<C> {
    /// The kernels on every device: on the CPU the emulator, which gives the same bits.
    pub fn with_kernels(mut self) -> Self {
        self.stored = self.stored.with_kernels();
        self
    }
}

// SAFETY: what is not the stored cache's is made once, as `OverCodes` asks.
unsafe impl<C: OverCodes> KvCache for CodedCache<C> {
    fn scheme(&self) -> &'static str {
        "gather"
    }

    fn held(&self) -> Held<'_> {
        self.stored.held()
    }

    fn bytes(&self) -> u64 {
        let beside = |tokens: &usize| self.choice.bytes(*tokens);
        self.stored.bytes() + self.held().sequences.iter().flatten().map(beside).sum::<u64>()
    }

    fn step_bytes(&self) -> u64 {
        let of_sequence = |tokens: &usize| {
            self.choice.step_bytes(*tokens) + self.stored.sequence_bytes(self.choice.kept(*tokens))
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
        Ok(StepReport { heads: self.choice.reports(self.held())? })
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
        self.choice.copy(stream, sequence, fork, tokens)?;
        Ok(fork)
    }

    fn leave(&mut self, stream: &Stream, sequence: usize) -> Result<()> {
        self.stored.leave(stream, sequence)
    }

    fn begin(&mut self, stream: &Stream, chunk: Chunk) -> Result<()> {
        self.stored.begin(stream, chunk)
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let chunk = self.stored.sequences().begun(layer)?;
        let positions = new.positions();
        stream.device().check_same(positions.device(), "the buffer of positions")?;
        self.stored.append(stream, layer, new)?;
        self.choice.take(stream, &mut self.stored, (layer, chunk), positions)
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
        self.choice.attend(stream, &mut self.stored, layer, (queries, output))
    }

    fn commit(&mut self) {
        self.stored.commit();
    }
}
