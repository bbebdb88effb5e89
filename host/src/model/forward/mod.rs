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
mod weights;

use super::kernels::Choice;
use super::{Model, linear};
use crate::kv::{self, Geometry, KvCache, Rope, Traffic};
use crate::{BackendKind, Device, Stream};
pub use decoder::Decoder;
use launches::Launches;
use slices::Slices;
use weights::Packed;

/// Tokens of a chunk on the CPU: records and activations of all of them stay in its caches.
const CPU_CHUNK: usize = 64;
/// Tokens of a chunk on a GPU.
const GPU_CHUNK: usize = 256;

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

    /// Reads `tokens` into the cache, after those that it holds, and chooses the one that follows.
    ///
    /// # Errors
    /// [`Error::NoTokens`]; tokens that the model lacks, or more than its context or the cache holds: the
    /// cache is as before then. What the device reports, after which the cache may hold some of the chunks.
    pub fn prefill(&mut self, tokens: &[u32], cache: &mut dyn KvCache, choice: Choice) -> Result<u32> {
        // What is wrong with the choice is said before the work.
        choice.shape(self.vocab)?;
        self.check(tokens, cache)?;
        let mut rest = tokens;
        while let Some((piece, later)) = self.split(rest) {
            self.run(piece, if later.is_empty() { Rows::Last } else { Rows::None }, cache)?;
            rest = later;
        }
        let position = cache.tokens() - 1;
        match &mut self.engine {
            Engine::Slices(slices) => slices.choose(choice, position as u32),
            Engine::Launches(launches) => launches.choose(choice),
        }
    }

    /// Reads `tokens` into the cache, after those that it holds, for others to follow.
    ///
    /// # Errors
    /// As [`prefill`](Self::prefill).
    pub fn read(&mut self, tokens: &[u32], cache: &mut dyn KvCache) -> Result<()> {
        self.check(tokens, cache)?;
        let mut rest = tokens;
        while let Some((piece, later)) = self.split(rest) {
            self.run(piece, Rows::None, cache)?;
            rest = later;
        }
        Ok(())
    }

    /// Reads one token and chooses the one that follows.
    ///
    /// # Errors
    /// As [`prefill`](Self::prefill).
    pub fn step(&mut self, token: u32, cache: &mut dyn KvCache, choice: Choice) -> Result<u32> {
        self.prefill(&[token], cache, choice)
    }

    /// Reads `tokens` into the cache; logits after each of them, [tokens, vocab].
    ///
    /// # Errors
    /// As [`prefill`](Self::prefill).
    pub fn logits(&mut self, tokens: &[u32], cache: &mut dyn KvCache) -> Result<Vec<f32>> {
        self.check(tokens, cache)?;
        let mut logits = Vec::with_capacity(tokens.len() * self.vocab);
        let mut rest = tokens;
        while let Some((piece, later)) = self.split(rest) {
            self.run(piece, Rows::All, cache)?;
            rest = later;
            logits.extend(self.last_logits()?);
        }
        Ok(logits)
    }

    /// Those that the last chunk gave.
    fn last_logits(&self) -> Result<Vec<f32>> {
        match &self.engine {
            Engine::Slices(slices) => Ok(slices.logits()),
            Engine::Launches(launches) => launches.logits(),
        }
    }

    fn check(&self, tokens: &[u32], cache: &dyn KvCache) -> Result<()> {
        let (found, expected) = (cache.geometry(), self.geometry);
        if found != expected {
            return Err(Error::Geometry { found, expected });
        }
        if tokens.is_empty() {
            return Err(Error::NoTokens);
        }
        if let Some(&id) = tokens.iter().find(|&&id| id as usize >= self.vocab) {
            return Err(super::Error::NoToken { id, vocab: self.vocab }.into());
        }
        Runner::room(self.context, tokens.len(), cache)
    }

    /// The next chunk of `tokens`, and what follows it. No token is left alone: to a cache that would be a
    /// step of decoding.
    pub fn split<'a>(&self, tokens: &'a [u32]) -> Option<(&'a [u32], &'a [u32])> {
        let mut length = self.chunk.min(tokens.len());
        if tokens.len() - length == 1 && length > 2 {
            length -= 1;
        }
        (length > 0).then(|| tokens.split_at(length))
    }

    /// Whether context and cache have room for `tokens` more.
    fn room(context: usize, tokens: usize, cache: &dyn KvCache) -> Result<()> {
        let (held, capacity) = (cache.tokens(), cache.capacity());
        if held + tokens > context {
            return Err(super::Error::Context { tokens: held + tokens, context }.into());
        }
        if held + tokens > capacity {
            return Err(kv::Error::Full { tokens, held, capacity }.into());
        }
        Ok(())
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

    /// Sets which products of a few tokens quantize their input themselves, to measure it: no bits change. On
    /// the CPU's own path it means nothing.
    pub fn set_fusing(&mut self, fusing: linear::Fusing) {
        if let Engine::Launches(launches) = &mut self.engine {
            launches.set_fusing(fusing);
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

    fn run(&mut self, chunk: &[u32], rows: Rows, cache: &mut dyn KvCache) -> Result<()> {
        match &mut self.engine {
            Engine::Slices(slices) => slices.chunk(chunk, rows, cache),
            Engine::Launches(launches) => launches.chunk(chunk, rows, cache),
        }
    }
}
