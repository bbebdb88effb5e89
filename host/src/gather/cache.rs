//! Keys and values in f16, of which steps read a constant number.

use super::{Bounds, FoldHandles, Handles, Plan, Support};
use crate::attention::{BLOCK_TOKENS, PagedPool, StepProblem};
use crate::kv::{
    Attending, Chunk, Error, HeadReport, Held, KvCache, New, Opening, Paged, Result, Rows, Sequences,
    StepReport,
};
use crate::{Buffer, Stream};
use half::f16;

/// What one layer keeps.
#[derive(Debug)]
struct Layer {
    pool: PagedPool<f16>,
    bounds: Bounds<f16>,
}

/// A cache in f16. A prompt's attention is exact; a step attends to the blocks that it chooses, of each
/// sequence its own.
///
/// Bounds are kept up as tokens are appended, so a text may grow as long as there is room.
#[derive(Debug)]
pub struct GatherCache {
    sequences: Sequences,
    layers: Vec<Layer>,
    /// All layers have the same table; their prompts.
    paged: Paged,
    /// One for all layers: steps follow each other in the stream.
    plan: Plan<f16>,
    lse: Buffer<f32>,
    /// The last chunk that was committed.
    last: Option<Chunk>,
}

impl GatherCache {
    /// An empty cache.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; heads that there is no kernel for; settings that
    /// [`Support::checked`] refuses; out of memory.
    pub fn new(opening: &Opening<'_>, support: Support) -> Result<Self> {
        let Opening { device, geometry, capacity, .. } = *opening;
        let sequences = Sequences::new(device, geometry, capacity);
        let dense = sequences.step_problem().checked()?;
        let problem = StepProblem {
            sequences: dense.sequences,
            q_heads: dense.q_heads,
            kv_heads: dense.kv_heads,
            head_dim: dense.head_dim,
            max_tokens: dense.max_tokens,
        };
        let support = support.checked()?;
        let tokens = u64::from(dense.sequences) * u64::from(dense.max_blocks() * BLOCK_TOKENS);
        let held = geometry.token_bytes().saturating_mul(tokens);
        // Bounds are two keys a block, where a block has as many keys and values.
        Error::if_too_large(device, capacity, held.saturating_add(held / u64::from(support.block)))?;
        let plan = Plan::new(device, problem, support)?;
        let layer = |_| -> Result<Layer> {
            Ok(Layer { pool: sequences.pool()?, bounds: Bounds::new(device, problem, support)? })
        };
        let layers = (0..geometry.layers).map(layer).collect::<Result<_>>()?;
        let lse = Buffer::new(device, problem.sequences as usize * geometry.q_heads)?;
        Ok(GatherCache { layers, paged: Paged::new(&sequences)?, plan, lse, last: None, sequences })
    }

    /// The kernels on every device: on the CPU the emulator, which gives the bits of the CPU's own path.
    pub fn with_kernels(mut self) -> Self {
        self.sequences.simd = false;
        self
    }

    /// Bytes of the bounds of a sequence's tokens, in all layers.
    fn bounds_bytes(&self, tokens: usize) -> u64 {
        let blocks = (tokens as u32).div_ceil(self.plan.support().block);
        self.layers.iter().map(|layer| layer.bounds.bytes_of(blocks)).sum()
    }

    /// Tokens of each sequence that is there.
    fn lengths(&self) -> impl Iterator<Item = usize> {
        self.sequences.held().sequences.iter().flatten().copied()
    }
}

// SAFETY: pools, bounds, table and the plan for steps are made once; what prompts need is not captured.
unsafe impl KvCache for GatherCache {
    fn scheme(&self) -> &'static str {
        "gather"
    }

    fn held(&self) -> Held<'_> {
        self.sequences.held()
    }

    fn bytes(&self) -> u64 {
        let bounds: u64 = self.lengths().map(|tokens| self.bounds_bytes(tokens)).sum();
        self.sequences.geometry.token_bytes() * self.sequences.tokens() as u64 + bounds
    }

    fn step_bytes(&self) -> u64 {
        let of_sequence = |tokens: usize| {
            let support = self.plan.support();
            let extent = support.extent(tokens as u32);
            let distant = if extent.ranked() { extent.distant() } else { 0 };
            let bounds: u64 = self.layers.iter().map(|layer| layer.bounds.bytes_of(distant)).sum();
            self.sequences.geometry.token_bytes() * u64::from(support.kept(tokens as u32)) + bounds
        };
        self.lengths().map(of_sequence).sum()
    }

    fn report(&self) -> Result<StepReport> {
        if self.last != Some(Chunk::Step) {
            return Ok(StepReport::default());
        }
        // How many blocks are kept follows from the length; which ones, from the step.
        let skipped = |tokens: usize| tokens as u32 - self.plan.support().kept(tokens as u32);
        let heads = self.sequences.geometry.q_heads;
        let of_layer = || {
            self.lengths()
                .flat_map(|tokens| vec![HeadReport { skipped: skipped(tokens), ..HeadReport::STORED }; heads])
        };
        Ok(StepReport { heads: self.layers.iter().flat_map(|_| of_layer()).collect() })
    }

    fn join(&mut self, _: &Stream) -> Result<usize> {
        self.paged.join(&mut self.sequences)
    }

    fn fork(&mut self, stream: &Stream, sequence: usize) -> Result<usize> {
        let GatherCache { sequences, layers, paged, .. } = self;
        let pools = layers.iter_mut().map(|layer| &mut layer.pool);
        let fork = paged.fork(stream, sequences, sequence, pools)?;
        for layer in layers {
            layer.bounds.copy(stream, sequence, fork)?;
        }
        Ok(fork)
    }

    fn leave(&mut self, stream: &Stream, sequence: usize) -> Result<()> {
        self.paged.leave(stream, &mut self.sequences, sequence)
    }

    fn begin(&mut self, _: &Stream, chunk: Chunk) -> Result<()> {
        self.sequences.room(chunk)?;
        self.paged.ready(&self.sequences, chunk)?;
        self.sequences.begin(chunk);
        Ok(())
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let chunk = self.sequences.begun(layer)?;
        let GatherCache { sequences, layers, paged, .. } = self;
        let Layer { pool, bounds } = &mut layers[layer];
        let positions = match &new {
            New::Raw(raw) => raw.positions,
            New::Rotated(rotated) => rotated.positions,
        };
        let positions = positions.global_range(..sequences.rows(chunk))?;
        paged.append(stream, sequences, pool, new, chunk)?;
        let Rows { table, lengths, tokens } = paged.rows(chunk)?;
        let handles =
            FoldHandles { keys: pool.keys().global(), table, positions, lengths: lengths.as_const() };
        let row = match chunk {
            Chunk::Prompt { sequence, .. } => sequence,
            Chunk::Step => 0,
        };
        // SAFETY: buffers of this device, host memory on the CPU; the table's blocks are those of the pool,
        // and a sequence's tokens follow each other. Dropping a buffer waits for the device.
        Ok(unsafe { bounds.fold_on(stream, (row, tokens), sequences.on_slices(stream), handles) }?)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let attending = self.sequences.attending(stream, layer, queries, output)?;
        let GatherCache { sequences, layers, paged, plan, lse, .. } = self;
        let Layer { pool, bounds } = &layers[layer];
        if attending.chunk != Chunk::Step {
            return paged.attend(stream, sequences, pool, attending);
        }
        let Attending { queries, output, chunk } = attending;
        let Rows { table, lengths, .. } = paged.rows(chunk)?;
        let handles = Handles {
            queries,
            keys: pool.keys().global(),
            values: pool.values().global(),
            bounds: bounds.words().global(),
            table,
            lengths: lengths.as_const(),
            output,
            lse: lse.global_mut(),
        };
        let slices = sequences.on_slices(stream);
        // SAFETY: buffers of this device, host memory on the CPU, long enough as just seen; the table's
        // blocks are those of the pool. Dropping a buffer waits for the device.
        unsafe {
            plan.select_on(stream, slices, &handles)?;
            Ok(plan.attend_on(stream, slices, &handles)?)
        }
    }

    fn commit(&mut self) {
        self.last = self.sequences.commit();
    }
}
