//! Keys and values in f16, of which steps read a constant number.

use super::{Bounds, FoldHandles, Handles, Plan, Support};
use crate::attention::{BLOCK_TOKENS, PagedPool, StepProblem};
use crate::kv::{
    Attending, Error, HeadReport, Held, KvCache, New, Opening, Paged, Result, Sequence, StepReport,
};
use crate::{Buffer, Stream};
use half::f16;

/// What one layer keeps.
#[derive(Debug)]
struct Layer {
    pool: PagedPool<f16>,
    bounds: Bounds<f16>,
}

/// A cache of one sequence in f16. A prompt's attention is exact; a step of one token attends to the blocks
/// that it chooses.
///
/// Bounds are kept up as tokens are appended, so a text may grow as long as there is room.
#[derive(Debug)]
pub struct GatherCache {
    sequence: Sequence,
    layers: Vec<Layer>,
    /// All layers have the same table; their prompts.
    paged: Paged,
    /// One for all layers: steps follow each other in the stream.
    plan: Plan<f16>,
    lse: Buffer<f32>,
    /// Tokens of the last chunk that was committed.
    last: usize,
}

impl GatherCache {
    /// An empty cache.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; heads that there is no kernel for; settings that
    /// [`Support::checked`] refuses; out of memory.
    pub fn new(opening: &Opening<'_>, support: Support) -> Result<Self> {
        let Opening { device, geometry, capacity, .. } = *opening;
        let sequence = Sequence::new(device, geometry, capacity);
        let dense = sequence.problem(1).checked()?;
        let problem = StepProblem {
            sequences: 1,
            q_heads: dense.q_heads,
            kv_heads: dense.kv_heads,
            head_dim: dense.head_dim,
            max_tokens: dense.max_tokens,
        };
        let support = support.checked()?;
        let blocks = u64::from(dense.max_blocks());
        let held = geometry.token_bytes().saturating_mul(blocks * u64::from(BLOCK_TOKENS));
        // Bounds are two keys a block, where a block has as many keys and values.
        Error::if_too_large(device, capacity, held.saturating_add(held / u64::from(support.block)))?;
        let plan = Plan::new(device, problem, support)?;
        let layer = |_| -> Result<Layer> {
            Ok(Layer { pool: sequence.pool()?, bounds: Bounds::new(device, problem, support)? })
        };
        let layers = (0..geometry.layers).map(layer).collect::<Result<_>>()?;
        let lse = Buffer::new(device, geometry.q_heads)?;
        Ok(GatherCache { layers, paged: Paged::new(&sequence)?, plan, lse, last: 0, sequence })
    }

    /// The kernels on every device: on the CPU the emulator, which gives the bits of the CPU's own path.
    pub fn with_kernels(mut self) -> Self {
        self.sequence.simd = false;
        self
    }

    /// Bytes of the bounds of its tokens, in all layers.
    fn bounds_bytes(&self) -> u64 {
        let blocks = (self.sequence.tokens as u32).div_ceil(self.plan.support().block);
        self.layers.iter().map(|layer| layer.bounds.bytes_of(blocks)).sum()
    }
}

// SAFETY: pools, bounds, table and the plan for one token are made once; what prompts need is not captured.
unsafe impl KvCache for GatherCache {
    fn scheme(&self) -> &'static str {
        "gather"
    }

    fn held(&self) -> Held {
        self.sequence.held()
    }

    fn bytes(&self) -> u64 {
        self.sequence.geometry.token_bytes() * self.sequence.tokens as u64 + self.bounds_bytes()
    }

    fn step_bytes(&self) -> u64 {
        let (tokens, support) = (self.sequence.tokens as u32, self.plan.support());
        let bounds = if support.extent(tokens).ranked() { self.bounds_bytes() } else { 0 };
        self.sequence.geometry.token_bytes() * u64::from(support.kept(tokens)) + bounds
    }

    fn report(&self) -> Result<StepReport> {
        if self.last != 1 {
            return Ok(StepReport::default());
        }
        let tokens = self.sequence.tokens as u32;
        // How many blocks are kept follows from the length; which ones, from the step.
        let skipped = tokens - self.plan.support().kept(tokens);
        let heads = self.sequence.geometry.layers * self.sequence.geometry.q_heads;
        Ok(StepReport { heads: vec![HeadReport { skipped, ..HeadReport::STORED }; heads] })
    }

    fn begin(&mut self, _: &Stream, tokens: usize) -> Result<()> {
        self.sequence.room(tokens)?;
        self.paged.ready(&self.sequence, tokens)?;
        self.sequence.begin(tokens);
        Ok(())
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let tokens = self.sequence.begun(layer)?;
        let GatherCache { sequence, layers, paged, .. } = self;
        let Layer { pool, bounds } = &mut layers[layer];
        let new = new.rotated(stream, sequence.geometry, tokens)?;
        let positions = new.positions.global_range(..tokens)?;
        paged.append(stream, sequence, pool, new, tokens)?;
        let handles = FoldHandles {
            keys: pool.keys().global(),
            table: paged.table.blocks().global(),
            positions,
            lengths: paged.table.lengths().global(),
        };
        // SAFETY: buffers of this device, host memory on the CPU; the table's blocks are those of the pool,
        // and the chunk's tokens follow each other. Dropping a buffer waits for the device.
        Ok(unsafe { bounds.fold_on(stream, tokens as u32, sequence.on_slices(stream), handles) }?)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let tokens = self.sequence.begun(layer)?;
        let GatherCache { sequence, layers, paged, plan, lse, .. } = self;
        let Layer { pool, bounds } = &layers[layer];
        if tokens > 1 {
            return paged.attend(stream, sequence, pool, queries, output);
        }
        let Attending { queries, output, .. } = sequence.attending(stream, queries, output)?;
        let handles = Handles {
            queries,
            keys: pool.keys().global(),
            values: pool.values().global(),
            bounds: bounds.words().global(),
            table: paged.table.blocks().global(),
            lengths: paged.table.lengths().global(),
            output,
            lse: lse.global_mut(),
        };
        let slices = sequence.on_slices(stream);
        // SAFETY: buffers of this device, host memory on the CPU, long enough as just seen; the table's
        // blocks are those of the pool. Dropping a buffer waits for the device.
        unsafe {
            plan.select_on(stream, slices, &handles)?;
            Ok(plan.attend_on(stream, slices, &handles)?)
        }
    }

    fn commit(&mut self) {
        self.last = self.sequence.commit();
    }
}
