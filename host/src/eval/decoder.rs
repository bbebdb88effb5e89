//! A model over a cache: reading in chunks, forced steps and free ones.

use super::distribution::Distribution;
use super::{Error, Result};
use crate::model::Tokenizer;
use crate::model::cache::KvCache;
use crate::model::forward::Runner;
use std::ops::ControlFlow;

/// Hears how much work was done since it was last called, and may end it. A token that is read in a chunk counts 1, one that
/// is decoded by itself [`STEP`].
pub type Watch<'a> = &'a mut dyn FnMut(usize) -> ControlFlow<()>;

/// What a token that is decoded by itself counts in the measure of progress.
pub const STEP: usize = 4;

/// Nobody watches.
pub fn unwatched(_: usize) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A model over a cache.
pub struct Decoder<'a> {
    runner: &'a mut Runner,
    cache: &'a mut dyn KvCache,
    watch: Watch<'a>,
}

impl<'a> Decoder<'a> {
    /// Goes on from what the cache holds.
    pub fn new(runner: &'a mut Runner, cache: &'a mut dyn KvCache, watch: Watch<'a>) -> Self {
        Decoder { runner, cache, watch }
    }

    /// The cache.
    pub fn cache(&self) -> &dyn KvCache {
        self.cache
    }

    fn done(&mut self, work: usize) -> Result<()> {
        match (self.watch)(work) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Stopped),
        }
    }

    /// Reads tokens in chunks.
    ///
    /// # Errors
    /// What the pass reports; [`Error::Stopped`].
    pub fn read(&mut self, tokens: &[u32]) -> Result<()> {
        for chunk in tokens.chunks(self.runner.chunk()) {
            self.runner.read(chunk, self.cache)?;
            self.done(chunk.len())?;
        }
        Ok(())
    }

    /// Reads one token; what may follow it.
    ///
    /// # Errors
    /// As [`read`](Self::read); [`Error::NotFinite`].
    pub fn step(&mut self, token: u32) -> Result<Distribution> {
        let logits = self.runner.logits(&[token], self.cache)?;
        self.done(STEP)?;
        Distribution::new(&logits).ok_or_else(|| Error::NotFinite {
            scheme: self.cache.scheme().to_string(),
            position: self.cache.tokens() - 1,
        })
    }

    /// Reads `tokens` one by one, all but the last; the log-probability of each but the first, given those before it.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn force(&mut self, tokens: &[u32]) -> Result<Vec<f64>> {
        tokens.windows(2).map(|pair| Ok(self.step(pair[0])?.log_probability(pair[1]))).collect()
    }

    /// Reads `tokens` one by one and goes on with the most likely token each time: up to `count` of them, fewer where the model
    /// ends its text. What the text ends with is not among them.
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
