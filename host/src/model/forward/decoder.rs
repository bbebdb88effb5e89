//! Decoding token by token, with a step captured once.

use super::{Engine, Result, Runner};
use crate::kv::KvCache;
use crate::model::kernels::Choice;
use crate::{GraphExec, Pinned};

/// Tokens after a prompt, one [`next`](Self::next) at a time.
///
/// By kernels a step is one graph, from the embedding of a token to the choice of the one that follows, in
/// every layer whatever the cache's scheme launches: it is captured at the start and replayed, token and
/// position being where the step before has left them. The host puts one call into the stream and waits for
/// the token. Where a cache has steps of several kinds ([`KvCache::period`]), a graph of each is captured,
/// behind a first step that is launched kernel by kernel.
pub struct Decoder<'a> {
    runner: &'a mut Runner,
    cache: &'a mut dyn KvCache,
    choice: Choice,
    token: u32,
    /// Steps that take turns, and where the token of each comes; by kernels. They name buffers of runner and
    /// cache, which stay borrowed.
    graphs: Vec<(GraphExec, Pinned<u32>)>,
    graph_len: Option<usize>,
    /// Steps so far.
    steps: usize,
    /// A step has failed half-way.
    failed: bool,
}

impl Runner {
    /// Continues after `token`, which is the first that the cache does not hold.
    ///
    /// # Errors
    /// As [`prefill`](Runner::prefill); what the capture reports.
    pub fn decoder<'a>(
        &'a mut self,
        token: u32,
        cache: &'a mut dyn KvCache,
        choice: Choice,
    ) -> Result<Decoder<'a>> {
        choice.shape(self.vocab)?;
        self.check(&[token], cache)?;
        let mut decoder = Decoder {
            runner: self,
            cache,
            choice,
            token,
            graphs: Vec::new(),
            graph_len: None,
            steps: 0,
            failed: false,
        };
        if decoder.cache.period() == 1 {
            decoder.capture()?;
        }
        Ok(decoder)
    }
}

impl Decoder<'_> {
    /// Captures the steps that follow, of each kind one; nothing, where there are no kernels.
    fn capture(&mut self) -> Result<()> {
        let Decoder { runner, cache, choice, token, graphs, graph_len, .. } = self;
        let Engine::Launches(launches) = &mut runner.engine else { return Ok(()) };
        let mut captured = Vec::new();
        for _ in 0..cache.period() {
            captured.push(launches.capture(*token, *choice, *cache)?);
        }
        *graph_len = captured.first().map(|(graph, _)| graph.len());
        for (graph, chosen) in captured {
            graphs.push((graph.instantiate()?, chosen));
        }
        Ok(())
    }

    /// Which of the graphs is the step that comes now; `None` for a first one that is launched kernel by
    /// kernel.
    fn turn(&self) -> Option<usize> {
        let period = self.cache.period();
        let by_hand = usize::from(period > 1);
        self.steps.checked_sub(by_hand).map(|step| step % period)
    }

    /// Reads the token before and chooses the one that follows.
    ///
    /// # Errors
    /// As [`prefill`](Runner::prefill): no room, and nothing has changed; or what the device reports, and
    /// from then on [`Error::Failed`](super::Error::Failed).
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<u32> {
        if self.failed {
            return Err(super::Error::Failed);
        }
        // Room in context and cache; the token is one that the model chose.
        Runner::room(self.runner.context, 1, self.cache)?;
        if self.steps > 0 && self.graphs.is_empty() {
            let captured = self.capture();
            self.failed = captured.is_err();
            captured?;
        }
        let turn = self.turn();
        let Decoder { runner, cache, choice, token, graphs, steps, failed, .. } = self;
        let chosen = match (&mut runner.engine, turn.and_then(|turn| graphs.get(turn))) {
            (Engine::Launches(launches), Some((graph, chosen))) => {
                // SAFETY: the graph was captured with this cache and this engine, which are borrowed since; a
                // cache keeps what it named, and the engine's buffers are replaced by longer chunks alone.
                unsafe { launches.replay(graph, chosen, *cache) }
            }
            _ => runner.step(*token, *cache, *choice),
        };
        // The device may be a step ahead of the host, or one layer ahead of another: no further step.
        *failed = chosen.is_err();
        *token = chosen?;
        *steps += 1;
        Ok(*token)
    }

    /// Has the next step read `token` in place of the one that was chosen. Waits for the device.
    ///
    /// # Errors
    /// A token that the model does not have; what the device reports.
    pub fn set_token(&mut self, token: u32) -> Result<()> {
        let vocab = self.runner.vocab;
        if token as usize >= vocab {
            return Err(crate::model::Error::NoToken { id: token, vocab }.into());
        }
        if let Engine::Launches(launches) = &mut self.runner.engine {
            launches.set_token(token)?;
        }
        self.token = token;
        Ok(())
    }

    /// The logits of the last step, \[vocab\]. Waits for the device.
    ///
    /// # Errors
    /// What the device reports.
    pub fn logits(&self) -> Result<Vec<f32>> {
        self.runner.last_logits()
    }

    /// The cache.
    pub fn cache(&self) -> &dyn KvCache {
        self.cache
    }

    /// Launches and copies of a step, the first of its kinds; `None` where it is no graph, or none yet.
    pub fn graph_len(&self) -> Option<usize> {
        self.graph_len
    }
}

impl Drop for Decoder<'_> {
    fn drop(&mut self) {
        // A replay that failed half-way may still be under way, and the graph and its memory go now.
        if let Engine::Launches(launches) = &self.runner.engine
            && let Err(error) = launches.wait()
        {
            tracing::debug!(%error, "waiting for the device before a captured step goes");
        }
    }
}
