//! Keys and values in f16, and a sketch of every key, by which steps choose what they read.

use super::{Budget, Handles, Plan, SketchHandles, Sketches};
use crate::attention::{BLOCK_TOKENS, PagedPool, StepProblem};
use crate::kv::{
    Attending, Chunk, Error, HeadReport, Held, KvCache, New, Opening, Paged, Result, Rows, Sequences, Source,
    StepReport,
};
use crate::{Buffer, Stream};
use half::f16;
use kernels_gpu::gather::sketch::{Verdict, sketch_words};

/// What one layer keeps.
#[derive(Debug)]
struct Layer {
    pool: PagedPool<f16>,
    sketches: Sketches<f16>,
    /// Of the last step, [sequences, q_heads].
    verdicts: Buffer<Verdict>,
}

/// A cache in f16. A prompt's attention is exact; a step attends to the blocks that hold nearly all of the
/// mass, and says of every head how much the others can have.
#[derive(Debug)]
pub struct SketchedCache {
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

impl SketchedCache {
    /// An empty cache.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; heads that there is no kernel for; settings that
    /// [`Budget::checked`] refuses; out of memory.
    pub fn new(opening: &Opening<'_>, budget: Budget) -> Result<Self> {
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
        let budget = budget.checked()?;
        let blocks = dense.sequences * dense.max_blocks();
        let sketches = u64::from(4 * sketch_words(dense.head_dim, budget.bits))
            .saturating_mul(u64::from(blocks) * geometry.kv_heads as u64 * geometry.layers as u64);
        let held = geometry.token_bytes().saturating_mul(u64::from(blocks) * u64::from(BLOCK_TOKENS));
        Error::if_too_large(device, capacity, held.saturating_add(sketches))?;
        let plan = Plan::new(device, problem, budget)?;
        let rows = problem.sequences as usize * geometry.q_heads;
        let layer = |_| -> Result<Layer> {
            Ok(Layer {
                pool: sequences.pool()?,
                sketches: Sketches::new(device, problem, blocks, budget)?,
                verdicts: Buffer::zeroed(device, rows)?,
            })
        };
        let layers = (0..geometry.layers).map(layer).collect::<Result<_>>()?;
        let lse = Buffer::new(device, rows)?;
        Ok(SketchedCache { layers, paged: Paged::new(&sequences)?, plan, lse, last: None, sequences })
    }

    /// The kernels on every device: on the CPU the emulator, which gives the bits of the CPU's own path.
    pub fn with_kernels(mut self) -> Self {
        self.sequences.simd = false;
        self
    }

    /// Bytes of the sketches of all sequences, in all layers.
    fn sketch_bytes(&self) -> u64 {
        let of = |tokens: usize| -> u64 {
            self.layers.iter().map(|layer| layer.sketches.bytes_of(tokens as u32)).sum()
        };
        self.lengths().map(of).sum()
    }

    /// Tokens of each sequence that is there.
    fn lengths(&self) -> impl Iterator<Item = usize> {
        self.sequences.held().sequences.iter().flatten().copied()
    }
}

impl From<Verdict> for HeadReport {
    fn from(verdict: Verdict) -> Self {
        let source = if verdict.dense == 1 { Source::Originals } else { Source::Stored };
        HeadReport {
            bound: Some(verdict.bound),
            source,
            skipped: verdict.tokens,
            skipped_mass: Some(verdict.mass),
            ..HeadReport::STORED
        }
    }
}

// SAFETY: pools, sketches, table and the plan for steps are made once; what prompts need is not captured.
unsafe impl KvCache for SketchedCache {
    fn scheme(&self) -> &'static str {
        "gather"
    }

    fn held(&self) -> Held<'_> {
        self.sequences.held()
    }

    fn bytes(&self) -> u64 {
        self.sequences.geometry.token_bytes() * self.sequences.tokens() as u64 + self.sketch_bytes()
    }

    fn step_bytes(&self) -> u64 {
        let kept = |tokens: usize| u64::from(self.plan.budget().support.kept(tokens as u32));
        self.sequences.geometry.token_bytes() * self.lengths().map(kept).sum::<u64>() + self.sketch_bytes()
    }

    fn report(&self) -> Result<StepReport> {
        if self.last != Some(Chunk::Step) {
            return Ok(StepReport::default());
        }
        let q_heads = self.sequences.geometry.q_heads;
        let mut heads = Vec::new();
        for layer in &self.layers {
            let verdicts = layer.verdicts.to_vec()?;
            let rows = verdicts.chunks_exact(q_heads).zip(self.sequences.held().sequences);
            heads.extend(rows.filter(|(_, there)| there.is_some()).flat_map(|(row, _)| row).copied());
        }
        Ok(StepReport { heads: heads.into_iter().map(HeadReport::from).collect() })
    }

    fn join(&mut self, _: &Stream) -> Result<usize> {
        self.paged.join(&mut self.sequences)
    }

    fn fork(&mut self, stream: &Stream, sequence: usize) -> Result<usize> {
        let SketchedCache { sequences, layers, paged, .. } = self;
        // The block that is being filled is sketched again with the token that comes next.
        let pools = layers.iter_mut().map(|layer| &mut layer.pool);
        paged.fork(stream, sequences, sequence, pools)
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
        let SketchedCache { sequences, layers, paged, .. } = self;
        let Layer { pool, sketches, .. } = &mut layers[layer];
        let positions = match &new {
            New::Raw(raw) => raw.positions,
            New::Rotated(rotated) => rotated.positions,
        };
        let positions = positions.global_range(..sequences.rows(chunk))?;
        paged.append(stream, sequences, pool, new, chunk)?;
        let Rows { table, lengths, tokens } = paged.rows(chunk)?;
        let handles = SketchHandles {
            keys: pool.keys().global(),
            values: pool.values().global(),
            table,
            positions,
            lengths: lengths.as_const(),
        };
        // SAFETY: buffers of this device, host memory on the CPU; the table's blocks are those of the pool,
        // those that are being filled are one sequence's own, and a sequence's tokens follow each other.
        // Dropping a buffer waits for the device.
        Ok(unsafe { sketches.sketch_on(stream, tokens, sequences.on_slices(stream), handles) }?)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let attending = self.sequences.attending(stream, layer, queries, output)?;
        let SketchedCache { sequences, layers, paged, plan, lse, .. } = self;
        let Layer { pool, sketches, verdicts } = &mut layers[layer];
        if attending.chunk != Chunk::Step {
            return paged.attend(stream, sequences, pool, attending);
        }
        let Attending { queries, output, chunk } = attending;
        let Rows { table, lengths, .. } = paged.rows(chunk)?;
        let handles = Handles {
            queries,
            keys: pool.keys().global(),
            values: pool.values().global(),
            sketches: sketches.words().global(),
            table,
            lengths: lengths.as_const(),
            output,
            lse: lse.global_mut(),
            verdicts: verdicts.global_mut(),
        };
        let slices = sequences.on_slices(stream);
        // SAFETY: buffers of this device, host memory on the CPU, long enough as just seen; the table's
        // blocks are those of the pool. Dropping a buffer waits for the device.
        unsafe {
            plan.scan_on(stream, slices, &handles)?;
            plan.attend_on(stream, slices, &handles)?;
            Ok(plan.settle_on(stream, slices, &handles)?)
        }
    }

    fn commit(&mut self) {
        self.last = self.sequences.commit();
    }
}
