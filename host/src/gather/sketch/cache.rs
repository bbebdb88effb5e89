//! Keys and values in f16, and a sketch of every key, by which steps choose what they read.

use super::plan::scratch_bytes;
use super::{Budget, Handles, Plan, SketchHandles, Sketches};
use crate::Buffer;
use crate::attention::StepProblem;
use crate::kv::{
    Appended, Beside, Forking, Geometry, HeadReport, Held, Opening, PagedCache, Result, Sequences, Source,
    Step,
};
use half::f16;
use kernels_gpu::gather::sketch::{Verdict, sketch_words, tiles_of};

/// Sketches beside each layer's pool: a step attends to the blocks that hold nearly all of the mass, and
/// says of every head how much the others can have.
#[derive(Debug)]
pub struct BySketches {
    /// One for all layers: steps follow each other in the stream.
    plan: Plan<f16>,
    lse: Buffer<f32>,
    /// Of the last step, [layers, sequences, q_heads].
    verdicts: Buffer<Verdict>,
}

/// What one layer keeps beside its pool.
#[derive(Debug)]
pub struct Sketched {
    sketches: Sketches<f16>,
    /// Which layer it is.
    index: usize,
}

/// A cache in f16 whose steps bound what they leave out.
pub type SketchedCache = PagedCache<BySketches>;

impl SketchedCache {
    /// An empty cache.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::kv::Error::Memory) if the device can never hold it; heads that there is no
    /// kernel for; settings that [`Budget::checked`] refuses; out of memory.
    pub fn new(opening: &Opening<'_>, budget: Budget) -> Result<Self> {
        let Opening { device, geometry, capacity, .. } = *opening;
        let sequences = Sequences::new(device, geometry, capacity);
        let budget = budget.checked()?;
        let dense = sequences.fitting(|dense, _| needed_bytes(geometry, dense.into(), budget))?;
        let problem = StepProblem::from(dense);
        let plan = Plan::new(device, problem, budget)?;
        let lse = Buffer::new(device, dense.query_rows())?;
        let verdicts = Buffer::zeroed(device, geometry.layers * dense.query_rows())?;
        PagedCache::open(sequences, BySketches { plan, lse, verdicts }, |index| {
            Ok(Sketched { sketches: Sketches::new(device, problem, budget)?, index })
        })
    }
}

/// Bytes of the sketches of all layers, and of a plan's scratch.
pub(in crate::gather) fn needed_bytes(geometry: Geometry, problem: StepProblem, budget: Budget) -> u64 {
    let rows = geometry.kv_heads as u64 * geometry.layers as u64;
    let tiles = u64::from(problem.sequences) * u64::from(tiles_of(problem.max_tokens));
    let sketches = u64::from(4 * sketch_words(problem.head_dim, budget.bits));
    sketches.saturating_mul(tiles * rows).saturating_add(scratch_bytes(problem, budget))
}

/// Verdicts [layers, sequences, q_heads] as reports on the heads of sequences that are there.
pub(in crate::gather) fn head_reports(verdicts: &Buffer<Verdict>, held: Held<'_>) -> Result<Vec<HeadReport>> {
    let verdicts = verdicts.to_vec()?;
    let rows = verdicts.chunks_exact(held.geometry.q_heads).zip(held.sequences.iter().cycle());
    let there = rows.filter(|(_, tokens)| tokens.is_some());
    Ok(there.flat_map(|(row, _)| row).map(|verdict| HeadReport::from(*verdict)).collect())
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

// SAFETY: sketches, verdicts and the plan are made once.
unsafe impl Beside for BySketches {
    const SCHEME: &'static str = "gather";
    type Layer = Sketched;

    fn appended(&mut self, layer: &mut Sketched, appended: Appended<'_>) -> Result<()> {
        let Appended { stream, slices, pool, first, tokens, table, positions, lengths } = appended;
        let (keys, values) = (pool.keys().global(), pool.values().global());
        let handles = SketchHandles { keys, values, table, positions, lengths };
        // SAFETY: buffers of this device, host memory on the CPU; the table's blocks are those of the pool,
        // and a sequence's tokens follow each other. Dropping a buffer waits for the device.
        Ok(unsafe { layer.sketches.sketch_on(stream, (first, tokens), slices, handles) }?)
    }

    fn fork(&self, layer: &mut Sketched, forking: Forking<'_>) -> Result<()> {
        let Forking { stream, source, fork, tokens } = forking;
        Ok(layer.sketches.copy(stream, source, fork, tokens)?)
    }

    fn attend(&mut self, layer: &mut Sketched, step: Step<'_>) -> Result<()> {
        let Step { stream, slices, pool, table, lengths, queries, output, .. } = step;
        let rows = self.lse.len();
        let handles = Handles {
            queries,
            keys: pool.keys().global(),
            values: pool.values().global(),
            sketches: layer.sketches.words().global(),
            table,
            lengths,
            output,
            lse: self.lse.global_mut(),
            verdicts: self.verdicts.global_range_mut(layer.index * rows..(layer.index + 1) * rows)?,
            codes: None,
        };
        // SAFETY: buffers of this device, host memory on the CPU, long enough as the cache has seen; the
        // table's blocks are those of the pool. Dropping a buffer waits for the device.
        Ok(unsafe { self.plan.step_on(stream, slices, &handles) }?)
    }

    fn kept(&self, _: &Sketched, tokens: usize) -> usize {
        self.plan.budget().support.kept(tokens as u32) as usize
    }

    fn bytes(&self, layer: &Sketched, tokens: usize) -> u64 {
        layer.sketches.bytes_of(tokens as u32)
    }

    fn report(&self, _: &[&Sketched], held: Held<'_>) -> Result<Vec<HeadReport>> {
        head_reports(&self.verdicts, held)
    }
}
