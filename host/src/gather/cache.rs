//! Keys and values in f16, of which steps read a constant number.

use super::audit::{self, Auditing, Auditor};
use super::{AuditHandles, Bounds, FoldHandles, Handles, Plan, Ranking, Support};
use crate::Buffer;
use crate::attention::StepProblem;
use crate::attention::dense::Problem;
use crate::kv::{Appended, Beside, Forking, HeadReport, Held, Opening, PagedCache, Result, Sequences, Step};
use half::f16;

/// Bounds of blocks beside each layer's pool: a step attends to the blocks that it chooses by them, of each
/// sequence its own. Layers that attend to everything have none.
///
/// They are kept up as tokens are appended, so a text may grow as long as there is room.
#[derive(Debug)]
pub struct ByBounds {
    /// One for all layers: steps follow each other in the stream.
    plan: Plan<f16>,
    lse: Buffer<f32>,
    /// Where a share of the heads is held against everything.
    auditing: Option<Auditing<f16>>,
}

/// What one layer keeps beside its pool.
#[derive(Debug)]
pub struct Bounded {
    /// None of a layer that attends to everything.
    bounds: Option<Bounds<f16>>,
    /// Which layer it is.
    index: usize,
}

/// A cache in f16 of which a step reads a constant number of keys.
pub type GatherCache = PagedCache<ByBounds>;

impl GatherCache {
    /// An empty cache.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::kv::Error::Memory) if the device can never hold it; heads that there is no
    /// kernel for; settings that [`Support::checked`] refuses; out of memory.
    pub fn new(opening: &Opening<'_>, support: Support) -> Result<Self> {
        let Opening { device, geometry, capacity, .. } = *opening;
        let sequences = Sequences::new(device, geometry, capacity);
        let support = support.checked()?;
        // Bounds are two keys a block, where a block has as many keys and values.
        let share = audit::share(opening.selection);
        let scratch = |problem| if share > 0.0 { Auditor::<f16>::bytes(problem) } else { 0 };
        let beside = |dense: Problem, held: u64| held / u64::from(support.block) + scratch(dense.into());
        let problem = StepProblem::from(sequences.fitting(beside)?);
        let ranking = Ranking::fitting::<f16>(opening.selection, problem);
        let plan = Plan::ranked(device, problem, support, ranking)?.with_ranks_of(opening.selection)?;
        let lse = Buffer::new(device, problem.dense().query_rows())?;
        let exact = Support::exact_layers(opening.selection);
        let auditing = Auditing::new(device, (geometry.layers, problem), support, share)?;
        PagedCache::open(sequences, ByBounds { plan, lse, auditing }, |index| {
            let bounds = match index < exact {
                true => None,
                false => Some(Bounds::scored(device, problem, support, ranking.score)?),
            };
            Ok(Bounded { bounds, index })
        })
    }
}

// SAFETY: bounds and the plan are made once.
unsafe impl Beside for ByBounds {
    const SCHEME: &'static str = "gather";
    type Layer = Bounded;

    fn appended(&mut self, layer: &mut Self::Layer, appended: Appended<'_>) -> Result<()> {
        let Some(bounds) = &mut layer.bounds else { return Ok(()) };
        let Appended { stream, slices, pool, first, tokens, table, positions, lengths } = appended;
        let handles = FoldHandles { keys: pool.keys().global(), table, positions, lengths };
        // SAFETY: buffers of this device, host memory on the CPU; the table's blocks are those of the pool,
        // and a sequence's tokens follow each other. Dropping a buffer waits for the device.
        Ok(unsafe { bounds.fold_on(stream, (first, tokens), slices, handles) }?)
    }

    fn attend(&mut self, layer: &mut Self::Layer, step: Step<'_>) -> Result<()> {
        let Some(bounds) = &layer.bounds else { return step.exact() };
        let Step { stream, slices, pool, table, lengths, queries, output, .. } = step;
        let handles = Handles {
            queries,
            keys: pool.keys().global(),
            values: pool.values().global(),
            bounds: bounds.words().global(),
            table,
            lengths,
            output,
            lse: self.lse.global_mut(),
        };
        // SAFETY: buffers of this device, host memory on the CPU, long enough as the cache has seen; the
        // table's blocks are those of the pool. Dropping a buffer waits for the device.
        unsafe { self.plan.step_on(stream, slices, &handles) }?;
        let Some(auditing) = &mut self.auditing else { return Ok(()) };
        let handles = AuditHandles {
            queries,
            keys: handles.keys,
            values: handles.values,
            near: true,
            table,
            lengths,
            output: output.as_const(),
            lse: self.lse.global(),
        };
        // SAFETY: as above.
        Ok(unsafe { auditing.audit_on(stream, slices, layer.index, &handles) }?)
    }

    fn fork(&self, layer: &mut Self::Layer, forking: Forking<'_>) -> Result<()> {
        let Forking { stream, source, fork, tokens } = forking;
        layer.bounds.iter_mut().try_for_each(|bounds| Ok(bounds.copy(stream, source, fork, tokens)?))
    }

    fn kept(&self, layer: &Self::Layer, tokens: usize) -> usize {
        if layer.bounds.is_some() { self.plan.support().kept(tokens as u32) as usize } else { tokens }
    }

    fn bytes(&self, layer: &Self::Layer, tokens: usize) -> u64 {
        let blocks = (tokens as u32).div_ceil(self.plan.support().block);
        layer.bounds.as_ref().map_or(0, |bounds| bounds.bytes_of(blocks))
    }

    fn step_bytes(&self, layer: &Self::Layer, tokens: usize) -> u64 {
        let ranked = self.plan.support().extent(tokens as u32).ranked_blocks();
        layer.bounds.as_ref().map_or(0, |bounds| bounds.bytes_of(ranked))
    }

    fn report(&self, layers: &[&Self::Layer], held: Held<'_>) -> Result<Vec<HeadReport>> {
        let of_layer = |layer: &&Self::Layer| match layer.bounds {
            Some(_) => self.plan.support().reports(held),
            None => vec![HeadReport::STORED; held.geometry.q_heads * held.lengths().count()],
        };
        let mut reports: Vec<HeadReport> = layers.iter().flat_map(of_layer).collect();
        if let Some(auditing) = &self.auditing {
            auditing.complete(held, &mut reports)?;
        }
        Ok(reports)
    }
}
