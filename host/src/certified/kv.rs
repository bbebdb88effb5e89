//! INT8 keys and INT4 values: with a certificate and the originals behind it, or bare.

use super::{
    AttendedHandles, BLOCK_TOKENS, Carried, Certificate, Extents, Policy, Rung, SequenceId, Settings,
    StepPlan, StepProblem, TieredCache,
};
use crate::attention::PagedPool;
use crate::certified;
use crate::certified::reference::Tile;
use crate::kv::restored::{Coded, Side};
use crate::kv::{
    Attending, Capacity, Chunk, Error, Geometry, HeadReport, Held, KvCache, New, Prompts, Restored, Result,
    Sequences, Source, StepReport, Traffic,
};
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::certified::layout::VALUE_GROUP;
use kernels_gpu::certified::policy::reason;

/// A [`TieredCache`] a layer.
///
/// Attention of a prompt's chunk is exact. That of a step of decoding is the policy's, with a certificate for
/// every layer, sequence and head, unless the policy asks for none.
///
/// With room for several sequences, a layer's list is renewed in its turn alone, also at the start: until
/// then a new sequence has none, and what its bounds do not allow is computed exactly.
pub struct CertifiedCache {
    sequences: Sequences,
    policy: Policy,
    layers: Vec<Layer>,
    /// One for all layers: steps follow each other in the stream.
    plan: StepPlan<f16>,
    /// What each layer promotes from step to step; renewed in turn, a share of the layers in each step.
    carried: Vec<Carried>,
    lse: Buffer<f32>,
    /// [layers, sequences, q_heads].
    certificates: Buffer<Certificate>,
    prompts: Prompts,
    /// The originals of the layer that a chunk is at, where its kernels read them; from the first such chunk
    /// on.
    staged: Option<PagedPool<f16>>,
    /// The last chunk that was committed.
    last: Option<Chunk>,
}

/// What a layer keeps, and each sequence's name in it; none where no sequence is.
struct Layer {
    cache: TieredCache<f16>,
    names: Vec<Option<SequenceId>>,
}

impl Layer {
    /// A sequence begins, with room for all of it: a graph that appends cannot ask for more.
    fn enter(&mut self, stream: &Stream, sequence: usize, name: SequenceId, tokens: usize) -> Result<()> {
        self.names[sequence] = Some(name);
        Ok(self.cache.reserve(stream, name, tokens as u32)?)
    }

    /// A sequence's name.
    fn name(&self, sequence: usize) -> Result<SequenceId> {
        let sequences = self.names.len();
        self.names.get(sequence).copied().flatten().ok_or(Error::NoSequence { sequence, sequences })
    }
}

impl CertifiedCache {
    /// An empty cache: of `capacity` tokens of one sequence, or as many of several.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; heads that there is no kernel for; thresholds that
    /// make no sense; out of memory, of the device or of what the host can lock.
    pub fn new(
        device: &Device,
        geometry: Geometry,
        capacity: impl Into<Capacity>,
        policy: Policy,
    ) -> Result<Self> {
        Self::with_settings(device, geometry, capacity, Settings::new(policy))
    }

    /// The same with the layout of its tiles, and of how much a GPU keeps the originals.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_settings(
        device: &Device,
        geometry: Geometry,
        capacity: impl Into<Capacity>,
        settings: Settings,
    ) -> Result<Self> {
        let Settings { policy, layout, .. } = settings;
        let mut sequences = Sequences::new(device, geometry, capacity.into());
        sequences.simd &= !settings.as_on_a_gpu;
        let problem = sequences.step_problem().checked()?;
        let heads = certified::Geometry::new(problem.kv_heads, problem.head_dim)?.with_layout(layout);
        let blocks = problem.sequences * problem.max_blocks();
        let bytes = quantized_bytes(heads, geometry.layers, blocks as usize);
        Error::if_too_large(device, sequences.capacity, bytes)?;
        let slots = settings.slots(device, problem);
        let resident = slots > 0 && settings.has_residents(problem);
        let extents = Extents {
            geometry: heads,
            blocks,
            sequences: problem.sequences,
            max_tokens: problem.max_tokens,
            key_slots: slots,
            value_slots: slots,
        };
        let stream = Stream::new(device)?;
        let layer = |layer: usize| -> Result<_> {
            let geometry = heads.with_rounding(policy.rounding(layer as u32));
            let mut cache = TieredCache::new(device, Extents { geometry, ..extents })?;
            if settings.as_on_a_gpu {
                cache = cache.with_kernels();
            }
            if resident {
                cache.begin_residence(&stream)?;
            }
            let name = cache.start_sequence()?;
            let mut layer = Layer { cache, names: vec![None; problem.sequences as usize] };
            layer.enter(&stream, 0, name, sequences.capacity.tokens)?;
            Ok(layer)
        };
        let step = StepProblem {
            sequences: problem.sequences,
            q_heads: problem.q_heads,
            kv_heads: problem.kv_heads,
            head_dim: problem.head_dim,
            max_tokens: problem.max_tokens,
        };
        let layers = (0..geometry.layers).map(layer).collect::<Result<Vec<_>>>()?;
        let tokens = layers.first().filter(|_| resident).map_or(0, |layer| layer.cache.resident_tokens());
        let plan = StepPlan::with_layout(device, step, &policy, layout)?.with_residents(tokens)?;
        let carried = (0..geometry.layers).map(|layer| {
            let carried = plan.carried(layer as u32)?;
            Ok(if problem.sequences > 1 { carried.in_turn() } else { carried })
        });
        let rows = problem.sequences as usize * geometry.q_heads;
        Ok(CertifiedCache {
            policy,
            carried: carried.collect::<certified::Result<_>>()?,
            plan,
            layers,
            lse: Buffer::new(device, rows)?,
            certificates: Buffer::zeroed(device, geometry.layers * rows)?,
            prompts: Prompts::default(),
            staged: None,
            last: None,
            sequences,
        })
    }

    /// The kernels on every device, for exact attention too: on the CPU the emulator, which gives the same
    /// bits.
    pub fn with_kernels(mut self) -> Self {
        self.sequences.simd = false;
        let layers = self.layers.into_iter();
        self.layers = layers.map(|layer| Layer { cache: layer.cache.with_kernels(), ..layer }).collect();
        self
    }

    /// The certificates of the last step, [layers, sequences that are there, q_heads]: none, if the policy
    /// asks for none or the last chunk was a prompt's. Waits for the device.
    ///
    /// # Errors
    /// What the device reports.
    pub fn certificates(&self) -> Result<Vec<Certificate>> {
        if !self.policy.certify || self.last != Some(Chunk::Step) {
            return Ok(Vec::new());
        }
        let rows = self.certificates.to_vec()?;
        let there = self.held().sequences.iter().cycle();
        let rows = rows.chunks(self.sequences.geometry.q_heads).zip(there);
        Ok(rows.filter(|(_, there)| there.is_some()).flat_map(|(heads, _)| heads).copied().collect())
    }

    /// Says so if the stream is another device's or captures, before a layer has changed: all layers have a
    /// sequence in the same row.
    fn can_change(&self, stream: &Stream) -> Result<()> {
        let Some(Layer { cache, .. }) = self.layers.first() else { return Ok(()) };
        stream.device().check_same(&self.sequences.device, "the cache")?;
        cache.traffic(stream)?;
        Ok(())
    }

    /// A layer's storage, for caches that choose for themselves what steps attend to, and whether calls take
    /// the CPU's own path.
    pub(crate) fn stored(&mut self, stream: &Stream, layer: usize) -> Result<(&mut TieredCache<f16>, bool)> {
        self.sequences.begun(layer)?;
        Ok((&mut self.layers[layer].cache, self.sequences.on_slices(stream)))
    }

    /// Bytes of a sequence of so many tokens in all layers: full blocks quantized, the last one in f16.
    pub(crate) fn sequence_bytes(&self, tokens: usize) -> u64 {
        let Some(Layer { cache, .. }) = self.layers.first() else { return 0 };
        let (block, geometry) = (BLOCK_TOKENS as usize, self.sequences.geometry);
        quantized_bytes(cache.geometry(), geometry.layers, tokens / block)
            + geometry.token_bytes() * (tokens % block) as u64
    }

    /// Bytes of all sequences.
    fn stored_bytes(&self) -> u64 {
        self.held().sequences.iter().flatten().map(|tokens| self.sequence_bytes(*tokens)).sum()
    }

    /// Whether the sequence is resident.
    fn is_resident(&self) -> bool {
        self.layers.first().is_some_and(|layer| layer.cache.is_resident())
    }

    /// Whether it has no more tokens than fit when a chunk is in.
    fn fits_after(&self, chunk: Chunk) -> bool {
        self.held().longest_after(chunk) <= self.plan.resident_tokens() as usize
    }

    /// Whether the next step is over a resident sequence.
    fn steps_resident(&self) -> bool {
        self.is_resident() && self.fits_after(Chunk::Step)
    }

    /// Bytes that the device must hold for all that sequences may have, in the compact layout.
    ///
    /// # Errors
    /// Heads that there is no kernel for.
    pub(crate) fn needed(geometry: Geometry, problem: StepProblem) -> Result<u64> {
        let heads = certified::Geometry::new(problem.kv_heads, problem.head_dim)?;
        let blocks = problem.sequences * problem.max_tokens.div_ceil(BLOCK_TOKENS);
        Ok(quantized_bytes(heads, geometry.layers, blocks as usize))
    }

    /// The last chunk that was committed.
    pub(crate) fn last(&self) -> Option<Chunk> {
        self.last
    }

    /// What is known of its sequences.
    pub(crate) fn sequences(&self) -> &Sequences {
        &self.sequences
    }

    /// What decides which blocks are promoted, and when a head is computed exactly.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }
}

/// A certificate in terms of no scheme.
pub(super) fn head_report(certificate: &Certificate) -> HeadReport {
    HeadReport {
        bound: Some(certificate.likely),
        // What was not tried has none.
        norm: (certificate.reason() & (reason::EARLIER | reason::RESIDENT) == 0).then_some(certificate.norm),
        source: match Rung::of(certificate.rung()) {
            Rung::Quantized => Source::Stored,
            Rung::Promoted | Rung::Expanded => Source::Mixed,
            Rung::Dense | Rung::Layer => Source::Originals,
        },
        original_keys: certificate.promoted_keys,
        original_values: certificate.promoted_values,
        skipped: 0,
        skipped_mass: None,
        audit: None,
        changed: Rung::of(certificate.rung()) == Rung::Layer,
    }
}

impl From<certified::Error> for Error {
    fn from(error: certified::Error) -> Self {
        use certified::Error as Own;
        match error {
            Own::Device(error) => error.into(),
            Own::Dense(error) => error.into(),
            Own::StepHeadDim { .. }
            | Own::TooLong { .. }
            | Own::Policy { .. }
            | Own::CarriedLayout { .. }
            | Own::Geometry { .. } => Error::refused(error),
            _ => Error::system(error),
        }
    }
}

/// Bytes of `blocks` quantized blocks in all layers, annotations included.
fn quantized_bytes(heads: certified::Geometry, layers: usize, blocks: usize) -> u64 {
    let annotations = heads.pairs(blocks) * size_of::<certified::Annotation>();
    layers as u64 * (heads.tile_bytes(blocks) + annotations) as u64
}

// SAFETY: layers, plan, lists, log-sums and certificates are made once; what a prompt needs is not captured.
unsafe impl KvCache for CertifiedCache {
    fn scheme(&self) -> &'static str {
        if self.policy.certify { "certified" } else { "int8-int4" }
    }

    fn held(&self) -> Held<'_> {
        self.sequences.held()
    }

    /// Full blocks quantized, the trailing blocks in f16, the scratch, and what a prompt's chunks read one
    /// layer from.
    fn bytes(&self) -> u64 {
        let Some(Layer { cache, .. }) = self.layers.first() else { return 0 };
        let memory = cache.memory();
        let scratch = (memory.scratch_keys + memory.scratch_values) * self.layers.len();
        let staged = self.staged.as_ref().map_or(0, |pool| pool.keys().bytes() + pool.values().bytes());
        self.stored_bytes() + (scratch + staged) as u64
    }

    fn step_bytes(&self) -> u64 {
        if self.is_resident() { self.host_bytes() } else { self.stored_bytes() }
    }

    /// The originals.
    fn host_bytes(&self) -> u64 {
        self.sequences.geometry.token_bytes() * self.sequences.tokens() as u64
    }

    fn report(&self) -> Result<StepReport> {
        Ok(StepReport { heads: self.certificates()?.iter().map(head_report).collect() })
    }

    fn traffic(&self, stream: &Stream) -> Result<Option<Traffic>> {
        let mut sum = Traffic::default();
        for Layer { cache, .. } in &self.layers {
            let [_, total] = cache.traffic(stream)?;
            sum.found += total.key_hits + total.value_hits;
            sum.read += total.key_misses + total.value_misses;
            sum.read_bytes += total.bytes(cache.geometry().head_dim());
        }
        Ok(self.policy.certify.then_some(sum))
    }

    /// With a certificate steps read originals as well.
    fn restored(&self, stream: &Stream, layer: usize, sequence: usize) -> Result<Option<Restored>> {
        if self.policy.certify {
            return Ok(None);
        }
        let Layer { cache, .. } = &self.layers[layer];
        let name = self.layers[layer].name(sequence)?;
        let (heads, d) = (self.sequences.geometry.kv_heads, self.sequences.geometry.head_dim);
        let block = BLOCK_TOKENS as usize;
        let [mut keys, mut values] =
            cache.read(stream, name)?.map(|rows| rows.iter().map(|x| x.to_f32()).collect::<Vec<f32>>());
        let layout = cache.geometry().layout();
        for (number, (tiles, _)) in cache.quantized(stream, name)?.iter().enumerate() {
            for (head, tile) in tiles.chunks_exact(layout.bytes as usize).enumerate() {
                let Some(tile) = Tile::new(layout, tile) else { continue };
                for token in 0..block {
                    let at = ((number * block + token) * heads + head) * d;
                    for channel in 0..d {
                        keys[at + channel] = tile.key(token, channel) as f32;
                        values[at + channel] = tile.value(token, channel) as f32;
                    }
                }
            }
        }
        // Codes of 8 and 4 bits; the rest of a tile are scales and zeros, of values those of their groups.
        let groups = (d / VALUE_GROUP as usize * 2 * size_of::<f16>()) as f64;
        let of_values = d as f64 / 2.0 + groups;
        let of_keys = f64::from(layout.bytes) / block as f64 - of_values;
        let coded = Coded { block, kept: 0, front: 0, extra: 0 };
        Ok(Some(Restored {
            keys: Side { rows: keys, bytes: of_keys, coded },
            values: Side { rows: values, bytes: of_values, coded },
        }))
    }

    fn check(&mut self, stream: &Stream) -> Result<()> {
        Ok(self.layers.iter_mut().try_for_each(|layer| layer.cache.check(stream))?)
    }

    /// Steps that renew the lists of some layers each, in turn; over a resident sequence all are alike.
    fn period(&self) -> usize {
        if self.steps_resident() { 1 } else { self.policy.every().max(1) as usize }
    }

    /// Over a resident sequence, or by tiles.
    fn regime(&self) -> u32 {
        self.steps_resident().into()
    }

    fn join(&mut self, stream: &Stream) -> Result<usize> {
        let (sequence, tokens) = (self.sequences.vacant()?, self.sequences.capacity.tokens);
        self.can_change(stream)?;
        let resident = self.plan.resident_tokens() > 0;
        for layer in &mut self.layers {
            if resident {
                layer.cache.begin_residence(stream)?;
            }
            let name = layer.cache.start_sequence()?;
            layer.enter(stream, sequence, name, tokens)?;
        }
        let sequences = self.sequences.capacity.sequences;
        for carried in &mut self.carried {
            carried.forget(stream, sequence, sequences)?;
        }
        self.sequences.enter(sequence, 0);
        Ok(sequence)
    }

    fn fork(&mut self, stream: &Stream, sequence: usize) -> Result<usize> {
        let (tokens, fork) = (self.sequences.length(sequence)?, self.sequences.vacant()?);
        self.can_change(stream)?;
        // A layer that has refused a token has fewer than the others.
        self.check(stream)?;
        let left = self.sequences.capacity.tokens - tokens;
        for layer in &mut self.layers {
            let name = layer.cache.fork(stream, layer.name(sequence)?)?;
            layer.enter(stream, fork, name, left)?;
        }
        let sequences = self.sequences.capacity.sequences;
        for carried in &mut self.carried {
            carried.copy(stream, (sequence, fork), sequences)?;
        }
        self.sequences.enter(fork, tokens);
        Ok(fork)
    }

    fn leave(&mut self, stream: &Stream, sequence: usize) -> Result<()> {
        self.sequences.length(sequence)?;
        for layer in &mut self.layers {
            let name = layer.name(sequence)?;
            layer.cache.free(stream, name)?;
            layer.names[sequence] = None;
        }
        self.sequences.leave(sequence)
    }

    fn begin(&mut self, stream: &Stream, chunk: Chunk) -> Result<()> {
        self.sequences.room(chunk)?;
        self.prompts.ready(&self.sequences, chunk)?;
        if chunk != Chunk::Step && !self.sequences.simd && self.staged.is_none() {
            self.staged = Some(self.sequences.pool()?);
        }
        if !self.fits_after(chunk) {
            for layer in &mut self.layers {
                layer.cache.end_residence(stream)?;
            }
        }
        self.sequences.begin(chunk);
        Ok(())
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let chunk = self.sequences.begun(layer)?;
        let layer = &mut self.layers[layer];
        let new = match new {
            New::Raw(raw) if chunk == Chunk::Step && layer.cache.turns(stream) => {
                return layer.cache.turn_and_append(stream, self.sequences.geometry, raw);
            }
            new => new.rotated(stream, self.sequences.geometry, self.sequences.rows(chunk))?,
        };
        // Either knows where the sequences end.
        Ok(match chunk {
            Chunk::Step => layer.cache.append(stream, new.keys, new.values),
            Chunk::Prompt { sequence, tokens } => {
                let name = layer.name(sequence)?;
                layer.cache.prefill_first(stream, name, new.keys, new.values, tokens)
            }
        }?)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let Attending { chunk, queries, output } =
            self.sequences.attending(stream, layer, queries, output)?;
        let kept = &mut self.layers[layer];
        if let (Chunk::Prompt { sequence, tokens }, Some(exact)) = (chunk, self.prompts.of(chunk)) {
            let lse = exact.lse();
            let problem = exact.plan.problem();
            let mut handles = kept.cache.originals(problem, sequence as u32, queries, output, lse)?;
            if let Some(pool) = &mut self.staged {
                let end = self.sequences.length(sequence)? + tokens;
                kept.cache.stage(stream, kept.name(sequence)?, end, pool)?;
                (handles.keys, handles.values) = (pool.keys().global(), pool.values().global());
            }
            // SAFETY: handles of this device, host memory on the CPU, of these lengths; the cache's lengths
            // and table are its own. Dropping a buffer, or the cache, waits for the device.
            return unsafe { exact.run(stream, self.sequences.on_slices(stream), handles) };
        }
        let rows = self.sequences.rows(chunk) * self.sequences.geometry.q_heads;
        let certificates = self.certificates.global_range_mut(layer * rows..(layer + 1) * rows)?;
        let out = AttendedHandles { output, lse: self.lse.global_mut(), certificates };
        let carried = &mut self.carried[layer];
        self.plan.swap_carried(carried)?;
        // SAFETY: as above; the layer's list lives as long as its cache.
        let attended = unsafe { kept.cache.attend_on(stream, &mut self.plan, queries, out) };
        self.plan.swap_carried(carried)?;
        Ok(attended?)
    }

    fn commit(&mut self) {
        self.last = self.sequences.commit();
    }
}

impl std::fmt::Debug for CertifiedCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let CertifiedCache { sequences, policy, .. } = self;
        f.debug_struct("CertifiedCache")
            .field("sequences", sequences)
            .field("policy", policy)
            .finish_non_exhaustive()
    }
}
