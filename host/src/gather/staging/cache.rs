//! Keys and values in the host's memory, of which steps bring to the GPU what they choose.

use super::fetching::Carried;
use super::{Fetching, HostPool, StagedStep, Staging, shape, staged_bytes};
use crate::attention::{BLOCK_TOKENS, PagedPool, StepProblem};
use crate::gather::audit::{self, Auditing, Auditor};
use crate::gather::{AuditHandles, Bounds, FoldHandles, Handles, Plan, Ranking, Support};
use crate::kv::{
    Attending, Chunk, Elsewhere, Error, Held, KvCache, New, Opening, Paged, Result, Rows, Sequences,
    StepReport, Traffic,
};
use crate::{Buffer, Stream};
use half::f16;

/// What one layer keeps.
#[derive(Debug)]
struct Layer {
    home: HostPool<f16>,
    staging: Staging<f16>,
    bounds: Bounds<f16>,
}

/// [`GatherCache`](crate::gather::GatherCache) with keys and values in page-locked host memory: its bits.
///
/// A new token goes to the staging pool, from where the step takes it home; what a step chooses and is not
/// staged is fetched between its choice and its attention. A prompt's chunk is attended to in a pool of the
/// GPU for one layer of one sequence, to which the tokens before it are brought first.
#[derive(Debug)]
pub struct StagedCache {
    sequences: Sequences,
    layers: Vec<Layer>,
    /// Where tokens are at home, the same for all layers.
    paged: Paged,
    /// Where they are while they are near: the same for all layers.
    near: Elsewhere,
    /// One for all layers: steps follow each other in the stream.
    plan: Plan<f16>,
    fetching: Fetching,
    /// A layer of the sequence that a prompt's chunk is of.
    prompt: PagedPool<f16>,
    /// Its blocks: all in order, whichever sequence it is.
    in_order: Elsewhere,
    /// Of which layer and sequence `prompt` has the tokens of the chunk that was begun.
    appended: Option<(usize, usize)>,
    lse: Buffer<f32>,
    /// Where a share of the heads is held against everything, over the bus.
    auditing: Option<Auditing<f16>>,
    /// The last chunk that was committed.
    last: Option<Chunk>,
}

impl StagedCache {
    /// An empty cache with `slots` blocks of each layer, sequence and KV head on the GPU, besides the local
    /// ones.
    ///
    /// # Errors
    /// As [`GatherCache::new`](crate::gather::GatherCache::new); and of a staging pool that is too small for
    /// a step, of host memory that is not there or cannot be locked: before anything is allocated, where that
    /// can be known.
    pub fn new(opening: &Opening<'_>, support: Support, slots: u32) -> Result<Self> {
        let Opening { device, geometry, capacity, .. } = *opening;
        let sequences = Sequences::new(device, geometry, capacity);
        let dense = sequences.step_problem().checked()?;
        let problem = StepProblem::from(dense);
        let support = support.checked()?;
        let (count, blocks) = (problem.sequences, dense.max_blocks());
        let layers = geometry.layers as u64;
        let of_sequence = geometry.token_bytes().saturating_mul(u64::from(blocks * BLOCK_TOKENS));
        let held = of_sequence.saturating_mul(count.into());
        // Bounds are two keys a block, where a block has as many keys and values; a prompt has one layer.
        let staged = staged_bytes(shape(problem, support, slots)?, count).saturating_mul(layers);
        let near = held / u64::from(support.block) + of_sequence / layers.max(1);
        let share = audit::share(opening.selection);
        let scratch = if share > 0.0 { Auditor::<f16>::bytes(problem) } else { 0 };
        Error::if_too_large(device, capacity, staged.saturating_add(near).saturating_add(scratch))?;
        HostPool::<f16>::if_too_large(held)?;
        let ranking = Ranking::fitting::<f16>(opening.selection, problem);
        let plan = Plan::ranked(device, problem, support, ranking)?;
        let fetching = Fetching::new(device, problem, support, slots)?;
        let layer = |_| -> Result<Layer> {
            Ok(Layer {
                home: HostPool::new(device, count * blocks, problem.kv_heads, problem.head_dim)?,
                staging: Staging::new(device, problem, support, slots)?,
                bounds: Bounds::scored(device, problem, support, ranking.score)?,
            })
        };
        let layers: Vec<Layer> = (0..geometry.layers).map(layer).collect::<Result<_>>()?;
        let all = |of: &dyn Fn(u32) -> Vec<u32>| Elsewhere::new(device, (0..count).map(of).collect());
        let near = |sequence| layers.first().map_or(Vec::new(), |layer| layer.staging.near_blocks(sequence));
        Ok(StagedCache {
            paged: Paged::new(&sequences)?,
            near: all(&near)?,
            in_order: all(&|_| (0..blocks).collect())?,
            appended: None,
            prompt: PagedPool::new(device, blocks, problem.kv_heads, problem.head_dim)?,
            lse: Buffer::new(device, count as usize * geometry.q_heads)?,
            auditing: Auditing::new(device, (geometry.layers, problem), support, share)?,
            layers,
            plan,
            fetching,
            last: None,
            sequences,
        })
    }

    /// The kernels on every device: on the CPU the emulator, which gives the bits of the CPU's own path.
    pub fn with_kernels(mut self) -> Self {
        self.sequences.simd = false;
        self
    }

    /// Bytes of the bounds of so many blocks of a sequence, in all layers.
    fn bounds_bytes(&self, blocks: u32) -> u64 {
        self.layers.iter().map(|layer| layer.bounds.bytes_of(blocks)).sum()
    }

    /// Brings tokens of a sequence from their home to the pool for prompts.
    fn recall(
        &mut self,
        stream: &Stream,
        layer: usize,
        sequence: usize,
        tokens: std::ops::Range<usize>,
    ) -> Result<()> {
        let StagedCache { sequences, layers, paged, fetching, prompt, in_order, .. } = self;
        let Rows { table, .. } = paged.rows(Chunk::Prompt { sequence, tokens: tokens.len() })?;
        let carried = Carried {
            from: layers[layer].home.words(),
            from_table: table,
            to: Fetching::of_pool_mut(prompt),
            to_table: in_order.row(sequence)?,
            tokens,
        };
        // SAFETY: two pools of this cache with their tables, host memory on the CPU. Dropping either waits
        // for the device.
        Ok(unsafe { fetching.carry_on(stream, sequences.on_slices(stream), carried) }?)
    }

    /// Takes tokens of a sequence from the pool for prompts to their home, and those that are near then to
    /// the staging pool.
    fn take_home(
        &mut self,
        stream: &Stream,
        layer: usize,
        sequence: usize,
        tokens: std::ops::Range<usize>,
    ) -> Result<()> {
        let StagedCache { sequences, layers, paged, near, fetching, prompt, in_order, .. } = self;
        let Layer { home, staging, .. } = &mut layers[layer];
        let Rows { table, .. } = paged.rows(Chunk::Prompt { sequence, tokens: tokens.len() })?;
        let first_near = staging.near_tokens(tokens.end as u32) as usize;
        let from_table = in_order.row(sequence)?;
        let slices = sequences.on_slices(stream);
        let near_tokens = tokens.start.max(first_near)..tokens.end;
        let to_home = (home.words_mut(), table, tokens);
        let to_staging = (Fetching::of_pool_mut(staging.pool_mut()), near.row(sequence)?, near_tokens);
        for (to, to_table, tokens) in [to_home, to_staging] {
            let carried = Carried { from: Fetching::of_pool(prompt), from_table, to, to_table, tokens };
            // SAFETY: as in `recall`; near tokens have a place each.
            unsafe { fetching.carry_on(stream, slices, carried) }?;
        }
        Ok(())
    }
}

// SAFETY: pools, bounds, tables and the plans for steps are made once; what prompts need is not captured.
unsafe impl KvCache for StagedCache {
    fn scheme(&self) -> &'static str {
        "gather"
    }

    fn held(&self) -> Held<'_> {
        self.sequences.held()
    }

    /// Bounds, and what is set aside: staging pools with their directories, a layer for prompts.
    fn bytes(&self) -> u64 {
        let block = self.plan.support().block;
        let bounds: u64 =
            self.held().lengths().map(|tokens| self.bounds_bytes((tokens as u32).div_ceil(block))).sum();
        let staged: u64 = self.layers.iter().map(|layer| layer.staging.bytes()).sum();
        bounds + staged + (self.prompt.keys().bytes() + self.prompt.values().bytes()) as u64
    }

    fn step_bytes(&self) -> u64 {
        let of_sequence = |tokens: usize| {
            let support = self.plan.support();
            let ranked = support.extent(tokens as u32).ranked_blocks();
            let kept = self.sequences.geometry.token_bytes() * u64::from(support.kept(tokens as u32));
            kept + self.bounds_bytes(ranked)
        };
        self.held().lengths().map(of_sequence).sum()
    }

    /// Keys and values.
    fn host_bytes(&self) -> u64 {
        self.sequences.geometry.token_bytes() * self.sequences.tokens() as u64
    }

    fn report(&self) -> Result<StepReport> {
        if self.last != Some(Chunk::Step) {
            return Ok(StepReport::default());
        }
        let of_layer = |_| self.plan.support().reports(self.held());
        let mut heads: Vec<_> = self.layers.iter().flat_map(of_layer).collect();
        if let Some(auditing) = &self.auditing {
            auditing.complete(self.held(), &mut heads)?;
        }
        Ok(StepReport { heads })
    }

    /// Blocks that steps have chosen, but for the local ones.
    fn traffic(&self, stream: &Stream) -> Result<Option<Traffic>> {
        let mut sum = Traffic::default();
        for layer in &self.layers {
            let [all, _] = layer.staging.traffic(stream)?;
            sum.found += all.found;
            sum.read += all.read;
            sum.read_bytes += all.read_bytes;
        }
        Ok(Some(sum))
    }

    fn join(&mut self, _: &Stream) -> Result<usize> {
        self.appended = None;
        self.paged.join(&mut self.sequences)
    }

    /// Near blocks are copied; far ones are fetched again when the fork wants them.
    fn fork(&mut self, stream: &Stream, sequence: usize) -> Result<usize> {
        let tokens = self.sequences.length(sequence)?;
        let fork = self.paged.fork(stream, &mut self.sequences, sequence, std::iter::empty())?;
        self.appended = None;
        let full = tokens / BLOCK_TOKENS as usize;
        let last = |sequence: usize| self.paged.blocks(sequence).get(full).copied();
        let partial =
            last(sequence).zip(last(fork)).filter(|_| !tokens.is_multiple_of(BLOCK_TOKENS as usize));
        for layer in 0..self.layers.len() {
            let Layer { home, bounds, .. } = &mut self.layers[layer];
            if let Some((from, to)) = partial {
                home.copy_block(stream, from, to)?;
            }
            bounds.copy(stream, sequence, fork, tokens)?;
            let near = self.layers[layer].staging.near_tokens(tokens as u32) as usize..tokens;
            self.recall(stream, layer, fork, near.clone())?;
            self.take_home(stream, layer, fork, near)?;
        }
        Ok(fork)
    }

    fn leave(&mut self, stream: &Stream, sequence: usize) -> Result<()> {
        self.paged.leave(stream, &mut self.sequences, sequence)?;
        self.appended = None;
        self.layers.iter_mut().try_for_each(|layer| Ok(layer.staging.forget(stream, sequence)?))
    }

    fn begin(&mut self, _: &Stream, chunk: Chunk) -> Result<()> {
        self.sequences.room(chunk)?;
        self.paged.ready(&self.sequences, chunk)?;
        self.sequences.begin(chunk);
        self.appended = None;
        Ok(())
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let chunk = self.sequences.begun(layer)?;
        let positions = new.positions().global_range(..self.sequences.rows(chunk))?;
        let StagedCache { sequences, layers, paged, near, prompt, in_order, .. } = self;
        let Layer { staging, bounds, .. } = &mut layers[layer];
        let (pool, elsewhere, row) = match chunk {
            Chunk::Prompt { sequence, .. } => (prompt, &*in_order, sequence),
            Chunk::Step => (staging.pool_mut(), &*near, 0),
        };
        paged.append_in(stream, sequences, (pool, Some(elsewhere)), new, chunk)?;
        let Rows { table, lengths, tokens } = paged.rows_in(chunk, Some(elsewhere))?;
        let handles =
            FoldHandles { keys: pool.keys().global(), table, positions, lengths: lengths.as_const() };
        // SAFETY: buffers of this device, host memory on the CPU; the table's blocks are those of the pool,
        // and a sequence's tokens follow each other. Dropping a buffer waits for the device.
        unsafe { bounds.fold_on(stream, (row, tokens), sequences.on_slices(stream), handles) }?;
        if let Chunk::Prompt { sequence, tokens } = chunk {
            let before = self.sequences.length(sequence)?;
            self.take_home(stream, layer, sequence, before..before + tokens)?;
            self.appended = Some((layer, sequence));
        }
        Ok(())
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let attending = self.sequences.attending(stream, layer, queries, output)?;
        if let Chunk::Prompt { sequence, tokens } = attending.chunk {
            let before = self.sequences.length(sequence)?;
            // What was appended last is there.
            let all = if self.appended == Some((layer, sequence)) { before } else { before + tokens };
            self.recall(stream, layer, sequence, 0..all)?;
            let StagedCache { sequences, paged, prompt, in_order, .. } = self;
            return paged.attend_in(stream, sequences, (prompt, Some(in_order)), attending);
        }
        let StagedCache { sequences, layers, paged, plan, fetching, lse, auditing, .. } = self;
        let Layer { home, staging, bounds } = &mut layers[layer];
        let Attending { queries, output, chunk } = attending;
        let Rows { table, lengths, .. } = paged.rows(chunk)?;
        let lengths = lengths.as_const();
        let handles = Handles {
            queries,
            keys: staging.pool().keys().global(),
            values: staging.pool().values().global(),
            bounds: bounds.words().global(),
            table,
            lengths,
            output,
            lse: lse.global_mut(),
        };
        let slices = sequences.on_slices(stream);
        // SAFETY: buffers of this device, host memory on the CPU, long enough as just seen; the table's
        // blocks are those of the home, what is chosen is staged before it is attended to, and a home has all
        // tokens of earlier chunks. Dropping a buffer, or a home, waits for the device.
        unsafe {
            fetching.step_on(stream, slices, StagedStep { plan, staging, home, handles: &handles })?;
        }
        let Some(auditing) = auditing else { return Ok(()) };
        let [keys, values] = home.global();
        let (output, lse) = (output.as_const(), lse.global());
        let handles = AuditHandles { queries, keys, values, near: false, table, lengths, output, lse };
        // SAFETY: as above; the new token went home with what was fetched.
        Ok(unsafe { auditing.audit_on(stream, slices, layer, &handles) }?)
    }

    fn commit(&mut self) {
        self.last = self.sequences.commit();
    }
}
