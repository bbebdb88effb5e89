//! A model over a cache: reading in chunks, forced steps and free ones.

use super::distribution::Distribution;
use super::{Error, Result};
use crate::kv::{KvCache, Summary};
use crate::model::Tokenizer;
use crate::model::forward::{self, Runner};
use std::ops::ControlFlow;

/// Hears how much work was done since it was last called, and may end it. A token that is read in a chunk
/// counts 1, one that is decoded by itself [`STEP`].
pub type Watch<'a> = &'a mut dyn FnMut(usize) -> ControlFlow<()>;

/// What a token that is decoded by itself counts in the measure of progress.
pub const STEP: usize = 4;

/// Nobody watches.
pub fn unwatched(_: usize) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Reads tokens into a cache in chunks.
///
/// # Errors
/// What the pass reports; [`Error::Stopped`].
pub fn read(runner: &mut Runner, cache: &mut dyn KvCache, tokens: &[u32], watch: Watch) -> Result<()> {
    let mut rest = tokens;
    while let Some((chunk, later)) = runner.split(rest) {
        runner.read(chunk, cache)?;
        hear(watch, chunk.len())?;
        rest = later;
    }
    Ok(())
}

fn hear(watch: Watch, work: usize) -> Result<()> {
    match watch(work) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Error::Stopped),
    }
}

/// Steps over one cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct Steps {
    /// What the scheme promised, over all of them.
    pub report: Option<Summary>,
}

impl Steps {
    /// Reads one token; what may follow it.
    ///
    /// # Errors
    /// As [`read`]; [`Error::NotFinite`].
    pub fn step(
        &mut self,
        runner: &mut Runner,
        cache: &mut dyn KvCache,
        token: u32,
        watch: Watch,
    ) -> Result<Distribution> {
        let logits = self.logits(runner, cache, token, watch)?;
        distribution(&logits, cache.scheme(), cache.tokens() - 1)
    }

    /// Reads one token; the logits of what may follow it.
    ///
    /// # Errors
    /// As [`read`].
    pub(super) fn logits(
        &mut self,
        runner: &mut Runner,
        cache: &mut dyn KvCache,
        token: u32,
        watch: Watch,
    ) -> Result<Vec<f32>> {
        let logits = runner.logits(&[token], cache)?;
        let own = Summary::of(&cache.report().map_err(forward::Error::from)?);
        self.report = Summary::join(self.report, own);
        hear(watch, STEP)?;
        Ok(logits)
    }
}

/// What logits say, of the token at `position` over a scheme.
///
/// # Errors
/// [`Error::NotFinite`].
pub(super) fn distribution(logits: &[f32], scheme: &str, position: usize) -> Result<Distribution> {
    Distribution::new(logits).ok_or_else(|| Error::NotFinite { scheme: scheme.to_owned(), position })
}

/// A model over a cache.
pub struct Decoder<'a> {
    runner: &'a mut Runner,
    cache: &'a mut dyn KvCache,
    watch: Watch<'a>,
    steps: Steps,
}

impl<'a> Decoder<'a> {
    /// Goes on from what the cache holds.
    pub fn new(runner: &'a mut Runner, cache: &'a mut dyn KvCache, watch: Watch<'a>) -> Self {
        Decoder { runner, cache, watch, steps: Steps::default() }
    }

    /// Waits for the device and makes sure that the cache holds everything that it was given; what its scheme
    /// promised, over all steps.
    ///
    /// # Errors
    /// What the cache refused; what the device reports.
    pub fn finish(self) -> Result<Option<Summary>> {
        self.runner.check_cache(self.cache)?;
        Ok(self.steps.report)
    }

    /// Reads tokens in chunks.
    ///
    /// # Errors
    /// As [`read`].
    pub fn read(&mut self, tokens: &[u32]) -> Result<()> {
        read(self.runner, self.cache, tokens, self.watch)
    }

    /// Reads one token; what may follow it.
    ///
    /// # Errors
    /// As [`Steps::step`].
    pub fn step(&mut self, token: u32) -> Result<Distribution> {
        self.steps.step(self.runner, self.cache, token, self.watch)
    }

    /// Reads `tokens` one by one, all but the last; the log-probability of each but the first, given those
    /// before it.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn force(&mut self, tokens: &[u32]) -> Result<Vec<f64>> {
        tokens.windows(2).map(|pair| Ok(self.step(pair[0])?.log_probability(pair[1]))).collect()
    }

    /// Reads `tokens` one by one and goes on with the most likely token each time: up to `count` of them,
    /// fewer where the model ends its text. What the text ends with is not among them.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn continue_greedily(
        &mut self,
        tokenizer: &Tokenizer,
        tokens: &[u32],
        count: usize,
    ) -> Result<Vec<u32>> {
        let mut next = None;
        for &token in tokens {
            next = Some(self.step(token)?.best());
        }
        let mut chosen = Vec::new();
        while let Some(token) = next.take().filter(|token| chosen.len() < count && !tokenizer.is_end(*token))
        {
            chosen.push(token);
            if chosen.len() < count {
                next = Some(self.step(token)?.best());
            }
        }
        Ok(chosen)
    }
}
