//! The forward pass: prompts in chunks, then a token a step, over any [`KvCache`].
//!
//! ```
//! use host::Device;
//! use host::dense::DenseCache;
//! use host::model::config::Architecture;
//! use host::model::forward::Runner;
//! use host::model::kernels::Choice;
//! use host::model::synthetic::{self, Packing};
//! use simt::emu::EmuOptions;
//!
//! let model = synthetic::model(synthetic::tiny(Architecture::Llama), Packing::Q4_1, 1)?;
//! let device = Device::cpu(EmuOptions::default());
//! let mut runner = Runner::new(&model, &device)?;
//! let mut cache = DenseCache::new(&device, (&model.config).into(), 16)?;
//! let mut token = runner.prefill(&[5, 6, 7], &mut cache, Choice::Greedy)?;
//! for _ in 0..3 {
//!     token = runner.step(token, &mut cache, Choice::Greedy)?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Every product gives the same bits in chunks of any length, on a GPU, on the emulator and on the CPU's own
//! path; attention's are the cache's affair.

mod decoder;
mod fill;
mod launches;
mod slices;
mod timed;
mod weights;

use super::kernels::Choice;
use super::{Model, linear};
use crate::kv::{self, Chunk, Geometry, KvCache, Rope, Traffic};
use crate::{BackendKind, Device, Stream};
pub use decoder::Decoder;
use launches::Launches;
use slices::Slices;
use weights::Packed;

/// Tokens of a chunk on the CPU: records and activations of all of them stay in its caches.
const CPU_CHUNK: usize = 64;
/// Tokens of a chunk on a GPU: products of matrices of 4,096 rows are a thousand thread blocks from records,
/// 352 larger ones from panels.
const GPU_CHUNK: usize = 1024;

/// A result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why a pass cannot be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A token or a context that the model does not have.
    #[error(transparent)]
    Model(#[from] super::Error),
    /// Weights that cannot be packed, or numbers that mean nothing for sampling.
    #[error(transparent)]
    Linear(#[from] linear::Error),
    /// The cache.
    #[error(transparent)]
    Cache(#[from] kv::Error),
    /// A buffer, a launch or a copy failed.
    #[error(transparent)]
    Device(#[from] crate::Error),
    /// A step of a decoder has failed, and with it what the device and the host know of the cache.
    #[error("a step before this one failed; make a new cache and read the text again")]
    Failed,
    /// There is nothing to continue.
    #[error("there are no tokens to start from; give at least one")]
    NoTokens,
    /// More sequences than a step has rows for.
    #[error(
        "a step has rows for {most} sequences, and the cache has room for {sequences}; give the runner longer chunks"
    )]
    Sequences {
        /// What the cache has room for.
        sequences: usize,
        /// Rows of a step.
        most: usize,
    },
    /// A sequence that joins between steps of several kinds.
    #[error("sequences join when {steps} more steps are done; wait for them")]
    Turn {
        /// How many.
        steps: usize,
    },
    /// A cache of other heads or layers.
    #[error("the cache is for {found:?}, and the model has {expected:?}; make it for this model")]
    Geometry {
        /// What the cache is for.
        found: Geometry,
        /// What the model has.
        expected: Geometry,
    },
}

/// Which of a chunk's tokens get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    None,
    Last,
    All,
}

impl Rows {
    fn of(self, count: usize) -> usize {
        match self {
            Rows::None => 0,
            Rows::Last => 1,
            Rows::All => count,
        }
    }
}

/// Where products are done.
#[derive(Debug)]
enum Engine {
    Slices(Box<Slices>),
    Launches(Box<Launches>),
}

/// A model that is ready to run on a device.
#[derive(Debug)]
pub struct Runner {
    engine: Engine,
    geometry: Geometry,
    rope: Rope,
    vocab: usize,
    context: usize,
    chunk: usize,
    step_bytes: u64,
}

impl Runner {
    /// Packs the weights: on the CPU its own path does the products, on a GPU the kernels.
    ///
    /// # Errors
    /// Sizes that there are no kernels for; out of memory.
    pub fn new(model: &Model, device: &Device) -> Result<Runner> {
        match device.kind() {
            BackendKind::Cpu => {
                let engine =
                    |packed, chunk| Ok(Engine::Slices(Box::new(Slices::new(device, packed, chunk)?)));
                Runner::with(model, CPU_CHUNK, engine)
            }
            BackendKind::Cuda => Runner::of_kernels(model, device, GPU_CHUNK),
        }
    }

    /// Kernels for everything, on any device, with chunks of up to `chunk` tokens: on the emulator slow, to
    /// compare with.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_kernels(model: &Model, device: &Device, chunk: usize) -> Result<Runner> {
        let engine = |packed, chunk| Ok(Engine::Launches(Box::new(Launches::new(device, &packed, chunk)?)));
        Runner::with(model, chunk, engine)
    }

    fn with(
        model: &Model,
        chunk: usize,
        engine: impl FnOnce(Packed<linear::PackedWeights, Vec<f32>>, usize) -> Result<Engine>,
    ) -> Result<Runner> {
        let config = &model.config;
        let chunk = chunk.clamp(1, config.context);
        let packed = Packed::new(model)?;
        let step_bytes = packed.step_bytes();
        let engine = engine(packed, chunk)?;
        let (geometry, rope) = (Geometry::from(config), Rope::from(config));
        let (vocab, context) = (config.vocab, config.context);
        Ok(Runner { engine, geometry, rope, vocab, context, chunk, step_bytes })
    }

    /// Heads and layers of the caches that it runs over.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// How it turns queries and keys.
    pub fn rope(&self) -> &Rope {
        &self.rope
    }

    /// Tokens of a chunk, at most.
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// Reads `tokens` into the cache's one sequence, after those that it holds, and chooses the one that
    /// follows.
    ///
    /// # Errors
    /// [`Error::NoTokens`]; tokens that the model lacks, or more than its context or the cache holds: the
    /// cache is as before then. What the device reports, after which the cache may hold some of the chunks.
    pub fn prefill(&mut self, tokens: &[u32], cache: &mut dyn KvCache, choice: Choice) -> Result<u32> {
        self.prefill_of(0, tokens, cache, (choice, 0))
    }

    /// [`prefill`](Self::prefill) of one of several sequences. Its draws are keyed by `number` besides the
    /// choice's seed. A single token is a step where the cache has one sequence, and else a prompt's.
    ///
    /// # Errors
    /// As [`prefill`](Self::prefill).
    pub fn prefill_of(
        &mut self,
        sequence: usize,
        tokens: &[u32],
        cache: &mut dyn KvCache,
        (choice, number): (Choice, u32),
    ) -> Result<u32> {
        // What is wrong with the choice is said before the work.
        choice.shape(self.vocab)?;
        self.pieces(sequence, tokens, Rows::Last, cache, |_| Ok(()))?;
        let position = cache.held().sequences[sequence].unwrap_or(0) as u32 - 1;
        let chosen = match &mut self.engine {
            Engine::Slices(slices) => slices.choose(choice, [(position, number)].into_iter()),
            Engine::Launches(launches) => launches.choose(choice, &[number]),
        }?;
        Ok(chosen[0])
    }

    /// Reads `tokens` into the cache's one sequence, after those that it holds, for others to follow.
    ///
    /// # Errors
    /// As [`prefill`](Self::prefill).
    pub fn read(&mut self, tokens: &[u32], cache: &mut dyn KvCache) -> Result<()> {
        self.pieces(0, tokens, Rows::None, cache, |_| Ok(()))
    }

    /// Reads one token and chooses the one that follows.
    ///
    /// # Errors
    /// As [`prefill`](Self::prefill).
    pub fn step(&mut self, token: u32, cache: &mut dyn KvCache, choice: Choice) -> Result<u32> {
        self.prefill(&[token], cache, choice)
    }

    /// Reads `tokens` into the cache's one sequence; logits after each of them, [tokens, vocab].
    ///
    /// # Errors
    /// As [`prefill`](Self::prefill).
    pub fn logits(&mut self, tokens: &[u32], cache: &mut dyn KvCache) -> Result<Vec<f32>> {
        let mut logits = Vec::with_capacity(tokens.len() * self.vocab);
        self.pieces(0, tokens, Rows::All, cache, |runner| {
            logits.extend(runner.last_logits()?);
            Ok(())
        })?;
        Ok(logits)
    }

    /// Chunk by chunk, with logits of these rows, or of the last chunk's last. `after` is called behind each.
    fn pieces(
        &mut self,
        sequence: usize,
        tokens: &[u32],
        rows: Rows,
        cache: &mut dyn KvCache,
        mut after: impl FnMut(&Self) -> Result<()>,
    ) -> Result<()> {
        self.check(tokens)?;
        self.fits(cache, Chunk::Prompt { sequence, tokens: tokens.len() })?;
        let mut rest = tokens;
        while let Some((piece, later)) = self.split(rest) {
            let rows = if rows == Rows::Last && !later.is_empty() { Rows::None } else { rows };
            let chunk = match cache.held().sequences.len() {
                1 => Chunk::of_one(piece.len()),
                _ => Chunk::Prompt { sequence, tokens: piece.len() },
            };
            self.run(piece, chunk, rows, cache)?;
            after(self)?;
            rest = later;
        }
        Ok(())
    }

    /// Those that the last chunk gave.
    fn last_logits(&self) -> Result<Vec<f32>> {
        match &self.engine {
            Engine::Slices(slices) => Ok(slices.logits()),
            Engine::Launches(launches) => launches.logits(),
        }
    }

    /// Whether there are tokens, and the model has them.
    fn check(&self, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            return Err(Error::NoTokens);
        }
        match tokens.iter().find(|&&id| id as usize >= self.vocab) {
            Some(&id) => Err(super::Error::NoToken { id, vocab: self.vocab }.into()),
            None => Ok(()),
        }
    }

    /// Whether the cache is for this model, and cache and context have room for a chunk, of any length.
    fn fits(&self, cache: &dyn KvCache, chunk: Chunk) -> Result<()> {
        let held = cache.held();
        let (found, expected) = (held.geometry, self.geometry);
        if found != expected {
            return Err(Error::Geometry { found, expected });
        }
        if held.sequences.len() > self.chunk {
            return Err(Error::Sequences { sequences: held.sequences.len(), most: self.chunk });
        }
        Runner::in_context(self.context, held.longest_after(chunk))?;
        Ok(held.room(chunk)?)
    }

    /// Whether the model's context has room for so many tokens.
    fn in_context(context: usize, tokens: usize) -> Result<()> {
        if tokens > context { Err(super::Error::Context { tokens, context }.into()) } else { Ok(()) }
    }

    /// The next chunk of `tokens`, and what follows it. No token is left alone: to a cache of one sequence
    /// that would be a step of decoding.
    pub fn split<'a>(&self, tokens: &'a [u32]) -> Option<(&'a [u32], &'a [u32])> {
        let mut length = self.chunk.min(tokens.len());
        if tokens.len() - length == 1 && length > 2 {
            length -= 1;
        }
        (length > 0).then(|| tokens.split_at(length))
    }

    /// Waits, and says whether the cache holds everything that it was given: a scheme may refuse keys and
    /// values that are not finite, and a step does not wait to see.
    ///
    /// # Errors
    /// What the cache refused; what the device reports.
    pub fn check_cache(&self, cache: &mut dyn KvCache) -> Result<()> {
        Ok(cache.check(self.stream())?)
    }

    /// What the cache's steps have used from its originals: [`KvCache::traffic`].
    ///
    /// # Errors
    /// What the device reports.
    pub fn traffic(&self, cache: &dyn KvCache) -> Result<Option<Traffic>> {
        Ok(cache.traffic(self.stream())?)
    }

    /// A sequence more in the cache, empty: its number.
    ///
    /// # Errors
    /// [`kv::Error::NoRoom`]; what the device reports.
    pub fn join(&self, cache: &mut dyn KvCache) -> Result<usize> {
        Ok(cache.join(self.stream())?)
    }

    /// Sets which products of a few tokens quantize their input themselves, to measure it: no bits change. On
    /// the CPU's own path it means nothing.
    pub fn set_fusing(&mut self, fusing: linear::Fusing) {
        if let Engine::Launches(launches) = &mut self.engine {
            launches.set_fusing(fusing);
        }
    }

    /// Sets from how many tokens on a prompt's product takes panels
    /// ([`DeviceWeights::takes_panels`](linear::DeviceWeights::takes_panels)), and says whether the device
    /// has the kernel for them: no bits change. On the CPU's own path it means nothing.
    pub fn set_panels_from(&mut self, tokens: usize) -> bool {
        match &mut self.engine {
            Engine::Slices(_) => false,
            Engine::Launches(launches) => launches.set_panels_from(tokens),
        }
    }

    /// Bytes of weights that a step of one token reads.
    pub fn step_bytes(&self) -> u64 {
        self.step_bytes
    }

    fn stream(&self) -> &Stream {
        match &self.engine {
            Engine::Slices(slices) => slices.stream(),
            Engine::Launches(launches) => launches.stream(),
        }
    }

    fn run(&mut self, tokens: &[u32], chunk: Chunk, rows: Rows, cache: &mut dyn KvCache) -> Result<()> {
        match &mut self.engine {
            Engine::Slices(slices) => slices.chunk(tokens, chunk, rows, cache),
            Engine::Launches(launches) => launches.chunk(tokens, chunk, rows, cache),
        }
    }
}
