//! INT8 keys and INT4 values: with a certificate and the originals behind it, or bare.

use super::{
    AttendedHandles, BLOCK_TOKENS, Carried, Certificate, Extents, Layout, Policy, Rung, SequenceId, StepPlan,
    StepProblem, TieredCache,
};
use crate::attention::PagedPool;
use crate::certified;
use crate::kv::{
    Attending, Error, Geometry, HeadReport, Held, KvCache, New, Prompts, Result, Sequence, Source,
    StepReport, Traffic,
};
use crate::{BackendKind, Buffer, Device, Stream};
use half::f16;

/// Of the blocks of a layer, the share whose original keys, and values, the GPU keeps after use.
pub(super) const SCRATCH_SHARE: f64 = 1.0 / 8.0;

/// A [`TieredCache`] a layer, all of one sequence.
///
/// A chunk of more than one token is a prompt's: its attention is exact. A chunk of one token is a step of
/// decoding: its attention is that of the policy, with a certificate for every layer and head, unless the
/// policy asks for none.
pub struct CertifiedCache {
    sequence: Sequence,
    policy: Policy,
    layers: Vec<(TieredCache<f16>, SequenceId)>,
    /// One for all layers: steps follow each other in the stream.
    plan: StepPlan<f16>,
    /// What each layer promotes from step to step; renewed in turn, a share of the layers in each step.
    carried: Vec<Carried>,
    lse: Buffer<f32>,
    /// [layers, q_heads].
    certificates: Buffer<Certificate>,
    prompts: Prompts,
    /// The originals of the layer that a chunk is at, where its kernels read them; from the first such chunk
    /// on.
    staged: Option<PagedPool<f16>>,
    /// Tokens of the last chunk that was committed.
    last: usize,
}

impl CertifiedCache {
    /// An empty cache for up to `capacity` tokens.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; heads that there is no kernel for; thresholds that
    /// make no sense; out of memory, of the device or of what the host can lock.
    pub fn new(device: &Device, geometry: Geometry, capacity: usize, policy: Policy) -> Result<Self> {
        Self::with_settings(device, geometry, capacity, (policy, Layout::Compact, SCRATCH_SHARE))
    }

    /// The same with the layout of its tiles, and the share of the blocks whose originals the GPU keeps after
    /// use.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_settings(
        device: &Device,
        geometry: Geometry,
        capacity: usize,
        (policy, layout, scratch_share): (Policy, Layout, f64),
    ) -> Result<Self> {
        let sequence = Sequence::new(device, geometry, capacity);
        let problem = sequence.problem(1).checked()?;
        let heads = certified::Geometry::new(problem.kv_heads, problem.head_dim)?.with_layout(layout);
        let blocks = problem.max_blocks();
        let bytes = quantized_bytes(heads, geometry.layers, blocks as usize);
        Error::if_too_large(device, capacity, bytes)?;
        // The CPU's originals are as near as everything else.
        let promotes = policy.certify && device.kind() != BackendKind::Cpu;
        let all = f64::from(blocks * problem.kv_heads);
        let slots = if promotes { (all * scratch_share).ceil() as u32 } else { 0 };
        let extents = Extents {
            geometry: heads,
            blocks,
            sequences: 1,
            max_tokens: problem.max_tokens,
            key_slots: slots,
            value_slots: slots,
        };
        let stream = Stream::new(device)?;
        let layer = |_| -> Result<_> {
            let mut cache = TieredCache::new(device, extents)?;
            let sequence = cache.start_sequence()?;
            // All of it: a graph that appends cannot ask for more.
            cache.reserve(&stream, sequence, problem.max_tokens)?;
            Ok((cache, sequence))
        };
        let step = StepProblem {
            sequences: 1,
            q_heads: problem.q_heads,
            kv_heads: problem.kv_heads,
            head_dim: problem.head_dim,
            max_tokens: problem.max_tokens,
        };
        let plan = StepPlan::with_layout(device, step, &policy, layout)?;
        let carried = (0..geometry.layers).map(|layer| plan.carried(layer as u32));
        Ok(CertifiedCache {
            sequence,
            policy,
            carried: carried.collect::<certified::Result<_>>()?,
            plan,
            layers: (0..geometry.layers).map(layer).collect::<Result<_>>()?,
            lse: Buffer::new(device, geometry.q_heads)?,
            certificates: Buffer::zeroed(device, geometry.layers * geometry.q_heads)?,
            prompts: Prompts::default(),
            staged: None,
            last: 0,
        })
    }

    /// The kernels on every device, for exact attention too: on the CPU the emulator, which gives the same
    /// bits.
    pub fn with_kernels(mut self) -> Self {
        self.sequence.simd = false;
        let layers = self.layers.into_iter();
        self.layers = layers.map(|(cache, sequence)| (cache.with_kernels(), sequence)).collect();
        self
    }

    /// The certificates of the last token, [layers, q_heads]: none, if the policy asks for none or the last
    /// chunk had more than one token. Waits for the device.
    ///
    /// # Errors
    /// What the device reports.
    pub fn certificates(&self) -> Result<Vec<Certificate>> {
        if !self.policy.certify || self.last != 1 {
            return Ok(Vec::new());
        }
        Ok(self.certificates.to_vec()?)
    }

    /// What decides which blocks are promoted, and when a head is computed exactly.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }
}

/// A certificate in terms of no scheme.
pub(super) fn head_report(certificate: &Certificate) -> HeadReport {
    HeadReport {
        bound: Some(certificate.bound()),
        source: match Rung::of(certificate.rung()) {
            Rung::Quantized => Source::Stored,
            Rung::Promoted | Rung::Expanded => Source::Mixed,
            Rung::Dense | Rung::Layer => Source::Originals,
        },
        original_keys: certificate.promoted_keys,
        original_values: certificate.promoted_values,
        skipped: 0,
        skipped_mass: None,
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

    fn held(&self) -> Held {
        self.sequence.held()
    }

    /// Full blocks quantized, the trailing block in f16, the scratch, and what a prompt's chunks read one
    /// layer from.
    fn bytes(&self) -> u64 {
        let Some((cache, _)) = self.layers.first() else { return 0 };
        let memory = cache.memory();
        let scratch = (memory.scratch_keys + memory.scratch_values) * self.layers.len();
        let staged = self.staged.as_ref().map_or(0, |pool| pool.keys().bytes() + pool.values().bytes());
        self.step_bytes() + (scratch + staged) as u64
    }

    fn step_bytes(&self) -> u64 {
        let Some((cache, _)) = self.layers.first() else { return 0 };
        let block = BLOCK_TOKENS as usize;
        quantized_bytes(cache.geometry(), self.layers.len(), self.sequence.tokens / block)
            + self.sequence.geometry.token_bytes() * (self.sequence.tokens % block) as u64
    }

    /// The originals.
    fn host_bytes(&self) -> u64 {
        self.sequence.geometry.token_bytes() * self.sequence.tokens as u64
    }

    fn report(&self) -> Result<StepReport> {
        Ok(StepReport { heads: self.certificates()?.iter().map(head_report).collect() })
    }

    fn traffic(&self, stream: &Stream) -> Result<Option<Traffic>> {
        let mut sum = Traffic::default();
        for (cache, _) in &self.layers {
            let [_, total] = cache.traffic(stream)?;
            sum.found += total.key_hits + total.value_hits;
            sum.read += total.key_misses + total.value_misses;
            sum.read_bytes += total.bytes(cache.geometry().head_dim());
        }
        Ok(self.policy.certify.then_some(sum))
    }

    fn check(&mut self, stream: &Stream) -> Result<()> {
        Ok(self.layers.iter_mut().try_for_each(|(cache, _)| cache.check(stream))?)
    }

    /// Steps that renew the lists of some layers each, in turn.
    fn period(&self) -> usize {
        self.policy.every().max(1) as usize
    }

    fn begin(&mut self, _: &Stream, tokens: usize) -> Result<()> {
        self.sequence.room(tokens)?;
        self.prompts.ready(&self.sequence, tokens)?;
        if tokens > 1 && !self.sequence.simd && self.staged.is_none() {
            self.staged = Some(self.sequence.pool()?);
        }
        self.sequence.begin(tokens);
        Ok(())
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let tokens = self.sequence.begun(layer)?;
        let new = new.rotated(stream, self.sequence.geometry, tokens)?;
        let (cache, sequence) = &mut self.layers[layer];
        // Either knows where the sequence ends.
        Ok(match tokens {
            1 => cache.append(stream, new.keys, new.values),
            _ => cache.prefill_first(stream, *sequence, new.keys, new.values, tokens),
        }?)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        self.sequence.begun(layer)?;
        let Attending { chunk, queries, output } = self.sequence.attending(stream, queries, output)?;
        let (cache, _) = &mut self.layers[layer];
        match self.prompts.of(chunk) {
            Some(exact) => {
                let mut handles = cache.originals(exact.plan.problem(), queries, output, exact.lse())?;
                if let Some(pool) = &mut self.staged {
                    // One sequence has the cache's blocks in their order.
                    let blocks = (self.sequence.tokens + chunk).div_ceil(BLOCK_TOKENS as usize) as u32;
                    cache.stage(stream, blocks, pool)?;
                    (handles.keys, handles.values) = (pool.keys().global(), pool.values().global());
                }
                // SAFETY: handles of this device, host memory on the CPU, of these lengths; the cache's
                // lengths and table are its own. Dropping a buffer, or the cache, waits for the device.
                unsafe { exact.run(stream, self.sequence.on_slices(stream), handles) }
            }
            None => {
                let heads = self.sequence.geometry.q_heads;
                let certificates = self.certificates.global_range_mut(layer * heads..(layer + 1) * heads)?;
                let out = AttendedHandles { output, lse: self.lse.global_mut(), certificates };
                let carried = &mut self.carried[layer];
                self.plan.swap_carried(carried)?;
                // SAFETY: as above; the layer's list lives as long as its cache.
                let attended = unsafe { cache.attend_on(stream, &mut self.plan, queries, out) };
                self.plan.swap_carried(carried)?;
                Ok(attended?)
            }
        }
    }

    fn commit(&mut self) {
        self.last = self.sequence.commit();
    }
}

impl std::fmt::Debug for CertifiedCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let CertifiedCache { sequence, policy, .. } = self;
        f.debug_struct("CertifiedCache")
            .field("sequence", sequence)
            .field("policy", policy)
            .finish_non_exhaustive()
    }
}
