//! Decoding token by token, with a step captured once.

use super::{Engine, Result, Runner};
use crate::model::cache::KvCache;
use crate::model::kernels::Choice;
use crate::{GraphExec, Pinned};

/// Tokens after a prompt, one [`next`](Self::next) at a time.
///
/// By kernels a step is one graph, from the embedding of a token to the choice of the one that follows, in every layer
/// whatever the cache's scheme launches: it is captured at the start and replayed, token and position being where the step
/// before has left them. The host puts one call into the stream and waits for the token.
pub struct Decoder<'a> {
    runner: &'a mut Runner,
    cache: &'a mut dyn KvCache,
    choice: Choice,
    token: u32,
    /// The step, and where its token comes; by kernels. It names buffers of runner and cache, which stay borrowed.
    graph: Option<(GraphExec, Pinned<u32>)>,
    graph_len: Option<usize>,
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
        let graph = match &mut self.engine {
            Engine::Slices(_) => None,
            Engine::Launches(launches) => Some(launches.capture(token, choice, cache)?),
        };
        let graph_len = graph.as_ref().map(|(captured, _)| captured.len());
        let graph = graph
            .map(|(captured, chosen)| Ok::<_, super::Error>((captured.instantiate()?, chosen)))
            .transpose()?;
        Ok(Decoder { runner: self, cache, choice, token, graph, graph_len, failed: false })
    }
}

impl Decoder<'_> {
    /// Reads the token before and chooses the one that follows.
    ///
    /// # Errors
    /// As [`prefill`](Runner::prefill): no room, and nothing has changed; or what the device reports, and from then on
    /// [`Error::Failed`](super::Error::Failed).
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<u32> {
        if self.failed {
            return Err(super::Error::Failed);
        }
        let Decoder { runner, cache, choice, token, graph, failed, .. } = self;
        // Room in context and cache; the token is one that the model chose.
        Runner::room(runner.context, 1, *cache)?;
        let chosen = match (&mut runner.engine, graph) {
            (Engine::Launches(launches), Some((graph, chosen))) => {
                // SAFETY: the graph was captured with this cache and this engine, which are borrowed since; a cache keeps what
                // it named, and the engine's buffers are replaced by longer chunks alone.
                unsafe { launches.replay(graph, chosen, *cache) }
            }
            _ => runner.step(*token, *cache, *choice),
        };
        // The device may be a step ahead of the host, or one layer ahead of another: no further step.
        *failed = chosen.is_err();
        *token = chosen?;
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

    /// Launches and copies of a step; `None` where it is no graph.
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
