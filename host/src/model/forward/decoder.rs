//! Decoding token by token, one sequence or several, with a step captured once.

use super::{Engine, Error, Result, Rows, Runner};
use crate::kv::{self, Chunk, KvCache};
use crate::model::kernels::Choice;
use crate::{GraphExec, Pinned};

/// Tokens after prompts: of one sequence one [`next`](Self::next) at a time, of several one of each with
/// every [`step`](Self::step).
///
/// By kernels a step is one graph, from the embedding of tokens to the choice of those that follow, in every
/// layer whatever the cache's scheme launches: it is captured at the start and replayed, tokens and positions
/// being where the step before has left them. The host puts one call into the stream and waits for the
/// tokens. A graph has a row for every sequence that the cache has room for, so that sequences come and go
/// without a new one. Where a cache has steps of several kinds ([`KvCache::period`]), a graph of each is
/// captured; of one sequence behind a first step that is launched kernel by kernel. Where its
/// [regime](KvCache::regime) changes, graphs are captured anew.
///
/// What a sequence gets has the same bits whoever is beside it, of sequences that join the same decoder: a
/// new one starts with the first kind of step, wherever the cache is.
pub struct Decoder<'a> {
    runner: &'a mut Runner,
    cache: &'a mut dyn KvCache,
    choice: Choice,
    /// What each sequence's next step reads.
    tokens: Vec<u32>,
    /// What its draws are keyed by.
    numbers: Vec<u32>,
    /// Whether the device does not have that yet.
    stale: bool,
    /// Steps that take turns, and where the tokens of each come; by kernels. They name buffers of runner and
    /// cache, which stay borrowed.
    graphs: Vec<(GraphExec, Pinned<u32>)>,
    graph_len: Option<usize>,
    /// The [regime](KvCache::regime) that the steps so far are of.
    regime: u32,
    /// Steps so far in it.
    steps: usize,
    /// A step has failed half-way.
    failed: bool,
}

impl Runner {
    /// Continues a cache's one sequence after `token`, which is the first that the cache does not hold.
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
        self.check(&[token])?;
        self.fits(cache, Chunk::Step)?;
        let (sequences, regime) = (cache.held().sequences.len(), cache.regime());
        let mut decoder = Decoder {
            runner: self,
            cache,
            choice,
            tokens: vec![token; sequences],
            numbers: vec![0; sequences],
            stale: true,
            graphs: Vec::new(),
            graph_len: None,
            regime,
            steps: 0,
            failed: false,
        };
        if !decoder.first_by_hand() {
            decoder.capture()?;
        }
        Ok(decoder)
    }

    /// Continues several sequences, those of prompts that [`join`](Decoder::join). Of an empty cache the
    /// sequence that it starts with leaves.
    ///
    /// # Errors
    /// As [`decoder`](Self::decoder).
    pub fn batch<'a>(&'a mut self, cache: &'a mut dyn KvCache, choice: Choice) -> Result<Decoder<'a>> {
        if cache.held().sequences.first() == Some(&Some(0)) {
            cache.leave(self.stream(), 0)?;
        }
        self.decoder(0, cache, choice)
    }
}

impl Decoder<'_> {
    /// Whether the first step is like none that follows: one sequence's, where steps are of several kinds.
    fn first_by_hand(&self) -> bool {
        self.cache.period() > 1 && self.tokens.len() == 1
    }

    /// Captures the steps that follow, of each kind one; nothing, where there are no kernels.
    fn capture(&mut self) -> Result<()> {
        let Decoder { runner, cache, choice, graphs, graph_len, .. } = self;
        let Engine::Launches(launches) = &mut runner.engine else { return Ok(()) };
        let mut captured = Vec::new();
        for _ in 0..cache.period() {
            captured.push(launches.capture(*choice, *cache)?);
        }
        *graph_len = captured.first().map(|(graph, _)| graph.len());
        for (graph, chosen) in captured {
            graphs.push((graph.instantiate()?, chosen));
        }
        self.stale = true;
        Ok(())
    }

    /// Which of the graphs is the step that comes now; `None` for a first one that is launched kernel by
    /// kernel.
    fn turn(&self) -> Option<usize> {
        let period = self.cache.period();
        self.steps.checked_sub(usize::from(self.first_by_hand())).map(|step| step % period)
    }

    /// Steps until sequences can [`join`](Self::join): 0 for now.
    pub fn steps_to_join(&self) -> usize {
        let period = self.cache.period();
        (period - self.steps % period) % period
    }

    /// Whether there is room for another sequence.
    pub fn has_room(&self) -> bool {
        self.cache.held().sequences.contains(&None)
    }

    /// A sequence more, that of a prompt: its number, and the first token after the prompt. Draws are keyed
    /// by `number` besides the seed, so that they do not depend on which sequences are there.
    ///
    /// # Errors
    /// [`Error::Turn`]; no room for a sequence; as [`prefill`](Runner::prefill): nothing has changed. What
    /// the device reports, and from then on [`Error::Failed`].
    pub fn join(&mut self, prompt: &[u32], number: u32) -> Result<(usize, u32)> {
        self.can_change()?;
        self.runner.check(prompt)?;
        let (tokens, capacity) = (prompt.len(), self.cache.capacity());
        Runner::in_context(self.runner.context, tokens)?;
        if tokens > capacity {
            return Err(kv::Error::Full { tokens, held: 0, capacity }.into());
        }
        let joined = self.cache.join(self.runner.stream());
        let sequence = self.changed(joined)?;
        let chosen = self.runner.prefill_of(sequence, prompt, self.cache, (self.choice, number));
        self.failed = chosen.is_err();
        let chosen = chosen?;
        (self.tokens[sequence], self.numbers[sequence], self.stale) = (chosen, number, true);
        Ok((sequence, chosen))
    }

    /// A sequence more, with the tokens of one that is there, which continues with `token`: its number.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn fork(&mut self, sequence: usize, token: u32, number: u32) -> Result<usize> {
        self.can_change()?;
        self.runner.check(&[token])?;
        let forked = self.cache.fork(self.runner.stream(), sequence);
        let fork = self.changed(forked)?;
        (self.tokens[fork], self.numbers[fork], self.stale) = (token, number, true);
        Ok(fork)
    }

    /// Forgets a sequence.
    ///
    /// # Errors
    /// A sequence that is not there, and nothing has changed; what the device reports, and from then on
    /// [`Error::Failed`].
    pub fn leave(&mut self, sequence: usize) -> Result<()> {
        let left = self.cache.leave(self.runner.stream(), sequence);
        self.changed(left)
    }

    /// What became of a change of the cache's sequences: refused, and nothing has changed, or done, or failed
    /// half-way.
    fn changed<T>(&mut self, change: kv::Result<T>) -> Result<T> {
        let refused = matches!(change, Err(kv::Error::NoRoom { .. } | kv::Error::NoSequence { .. }));
        self.failed |= change.is_err() && !refused;
        self.stale = true;
        Ok(change?)
    }

    fn can_change(&self) -> Result<()> {
        match self.steps_to_join() {
            _ if self.failed => Err(Error::Failed),
            0 => Ok(()),
            steps => Err(Error::Turn { steps }),
        }
    }

    /// Reads the token before and chooses the one that follows, of a cache's one sequence.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<u32> {
        Ok(self.step()?[0])
    }

    /// Reads the token before of each sequence and chooses the one that follows: a token for each that there
    /// is room for, which means nothing where no sequence is.
    ///
    /// # Errors
    /// As [`prefill`](Runner::prefill): no room, and nothing has changed; or what the device reports, and
    /// from then on [`Error::Failed`].
    pub fn step(&mut self) -> Result<&[u32]> {
        if self.failed {
            return Err(Error::Failed);
        }
        // Room in context and cache; the tokens are those that the model chose.
        let held = self.cache.held();
        Runner::in_context(self.runner.context, held.longest_after(Chunk::Step))?;
        held.room(Chunk::Step)?;
        let chosen = self.advance();
        // The device may be a step ahead of the host, or one layer ahead of another: no further step.
        self.failed = chosen.is_err();
        self.tokens = chosen?;
        self.steps += 1;
        Ok(&self.tokens)
    }

    fn advance(&mut self) -> Result<Vec<u32>> {
        let regime = self.cache.regime();
        if regime != self.regime {
            // The last replay has been waited for.
            self.graphs.clear();
            (self.regime, self.steps, self.stale) = (regime, 0, true);
        }
        if self.graphs.is_empty() && (self.steps > 0 || !self.first_by_hand()) {
            self.capture()?;
        }
        let turn = self.turn();
        if turn.is_some() {
            self.refresh()?;
        }
        let Decoder { runner, cache, choice, tokens, numbers, graphs, .. } = self;
        match (&mut runner.engine, turn.and_then(|turn| graphs.get(turn))) {
            (Engine::Launches(launches), Some((graph, chosen))) => {
                // SAFETY: the graph was captured with this cache and this engine, which are borrowed since,
                // and in this regime, or it would have gone above; a cache keeps what it named, and the
                // engine's buffers are replaced by longer chunks alone.
                unsafe { launches.replay(graph, chosen, *cache) }
            }
            (Engine::Launches(launches), None) => {
                launches.chunk(tokens, Chunk::Step, Rows::All, *cache)?;
                launches.choose(*choice, numbers)
            }
            (Engine::Slices(slices), _) => {
                let positions = cache.held().positions(Chunk::Step);
                slices.chunk(tokens, Chunk::Step, Rows::All, *cache)?;
                slices.choose(*choice, positions.into_iter().zip(numbers.iter().copied()))
            }
        }
    }

    /// Tells the device what the next captured step reads, if it does not know.
    fn refresh(&mut self) -> Result<()> {
        let Engine::Launches(launches) = &mut self.runner.engine else { return Ok(()) };
        if std::mem::take(&mut self.stale) {
            launches.set_rows(&self.tokens, &self.cache.held().positions(Chunk::Step), &self.numbers)?;
        }
        Ok(())
    }

    /// Has the next step of each sequence read `token` in place of the one that was chosen. Waits for the
    /// device.
    ///
    /// # Errors
    /// A token that the model does not have; what the device reports.
    pub fn set_token(&mut self, token: u32) -> Result<()> {
        self.runner.check(&[token])?;
        self.tokens.fill(token);
        self.stale = true;
        self.refresh()
    }

    /// The logits of the last step, [sequences, vocab]. Waits for the device.
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
