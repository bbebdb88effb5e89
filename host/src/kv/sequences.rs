//! What every cache knows of its sequences, and the checks that follow from it.

use super::{Capacity, Chunk, Error, Geometry, Held, Result, Rotated};
use crate::attention::dense::Problem;
use crate::attention::{BLOCK_TOKENS, PagedPool};
use crate::{Buffer, Device, Stream};
use half::f16;
use simt::{Global, GlobalMut};

/// The sequences of a cache: their extents, how far each is, and where they live.
#[derive(Debug)]
pub(crate) struct Sequences {
    pub geometry: Geometry,
    pub capacity: Capacity,
    /// Tokens of each that are committed; `None` where no sequence is.
    tokens: Vec<Option<usize>>,
    /// What was begun.
    chunk: Option<Chunk>,
    /// Whether calls take the CPU's own path in place of the kernels.
    pub simd: bool,
    pub device: Device,
}

/// A chunk's queries and where its attention goes, both [rows, q_heads, head_dim].
pub(crate) struct Attending {
    pub chunk: Chunk,
    pub queries: Global<f16>,
    pub output: GlobalMut<f32>,
}

impl Sequences {
    /// The first, empty; on the CPU by its own path.
    pub fn new(device: &Device, geometry: Geometry, capacity: Capacity) -> Self {
        let simd = device.has_host_paths();
        // There is room for one at least.
        let capacity = Capacity { sequences: capacity.sequences.max(1), ..capacity };
        let mut tokens = vec![None; capacity.sequences];
        tokens[0] = Some(0);
        Sequences { geometry, capacity, tokens, chunk: None, simd, device: device.clone() }
    }

    /// What a cache says of them.
    pub fn held(&self) -> Held<'_> {
        Held { geometry: self.geometry, capacity: self.capacity, sequences: &self.tokens }
    }

    /// Tokens of all that are committed.
    pub fn tokens(&self) -> usize {
        self.held().tokens()
    }

    /// The attention of a chunk of `query_tokens` of one of them, not yet checked.
    pub fn problem(&self, query_tokens: usize) -> Problem {
        let Geometry { q_heads, kv_heads, head_dim, .. } = self.geometry;
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Problem {
            sequences: 1,
            q_heads: narrow(q_heads),
            kv_heads: narrow(kv_heads),
            head_dim: narrow(head_dim),
            query_tokens: narrow(query_tokens),
            max_tokens: narrow(self.capacity.tokens),
        }
    }

    /// The attention of a step, not yet checked.
    pub fn step_problem(&self) -> Problem {
        Problem { sequences: u32::try_from(self.tokens.len()).unwrap_or(u32::MAX), ..self.problem(1) }
    }

    /// The attention of a chunk, not yet checked.
    pub fn problem_of(&self, chunk: Chunk) -> Problem {
        match chunk {
            Chunk::Prompt { tokens, .. } => self.problem(tokens),
            Chunk::Step => self.step_problem(),
        }
    }

    /// The attention of a step, if the device can hold all keys and values in f16, and beside them what
    /// `beside` says of it and of their bytes.
    ///
    /// # Errors
    /// Extents that no kernel takes; [`Error::Memory`].
    pub fn fitting(&self, beside: impl FnOnce(Problem, u64) -> u64) -> Result<Problem> {
        let problem = self.step_problem().checked()?;
        let tokens = u64::from(problem.max_blocks() * BLOCK_TOKENS) * u64::from(problem.sequences);
        let bytes = self.geometry.token_bytes().saturating_mul(tokens);
        Error::if_too_large(&self.device, self.capacity, bytes.saturating_add(beside(problem, bytes)))?;
        Ok(problem)
    }

    /// A pool for all that they may hold, its contents unspecified.
    ///
    /// # Errors
    /// Extents that no kernel takes; out of memory.
    pub fn pool(&self) -> Result<PagedPool<f16>> {
        let problem = self.step_problem().checked()?;
        let blocks = problem.sequences * problem.max_blocks();
        Ok(PagedPool::new(&self.device, blocks, problem.kv_heads, problem.head_dim)?)
    }

    /// Whether a call takes the CPU's own path: a graph wants launches.
    pub fn on_slices(&self, stream: &Stream) -> bool {
        self.simd && !stream.is_capturing()
    }

    /// The number that the next sequence gets.
    pub fn vacant(&self) -> Result<usize> {
        let vacant = self.tokens.iter().position(Option::is_none);
        vacant.ok_or(Error::NoRoom { sequences: self.tokens.len() })
    }

    /// A sequence of so many tokens is there, and what was begun is forgotten.
    pub fn enter(&mut self, sequence: usize, tokens: usize) {
        self.chunk = None;
        self.tokens[sequence] = Some(tokens);
    }

    /// Tokens of a sequence.
    pub fn length(&self, sequence: usize) -> Result<usize> {
        let length = self.tokens.get(sequence).copied().flatten();
        length.ok_or(Error::NoSequence { sequence, sequences: self.tokens.len() })
    }

    /// A sequence is there no more, and what was begun is forgotten.
    pub fn leave(&mut self, sequence: usize) -> Result<()> {
        self.length(sequence)?;
        self.chunk = None;
        self.tokens[sequence] = None;
        Ok(())
    }

    /// Whether there is room for a chunk.
    pub fn room(&self, chunk: Chunk) -> Result<()> {
        self.held().room(chunk)
    }

    /// A chunk, for which there is [`room`](Self::room), follows what is committed.
    pub fn begin(&mut self, chunk: Chunk) {
        self.chunk = Some(chunk);
    }

    /// The chunk that was begun, if it and the layer are there.
    pub fn begun(&self, layer: usize) -> Result<Chunk> {
        let Some(chunk) = self.chunk else {
            let what = "the chunk's number of tokens";
            return Err(Error::Order { what, value: 0, limit: "begin one first" });
        };
        if layer >= self.geometry.layers {
            let limit = "the cache was made for fewer layers";
            return Err(Error::Order { what: "the layer", value: layer, limit });
        }
        Ok(chunk)
    }

    /// Rows of a chunk's buffers.
    pub fn rows(&self, chunk: Chunk) -> usize {
        chunk.rows(self.tokens.len())
    }

    /// What a chunk adds: of each sequence the row of its first token, the place of that token, how many.
    pub fn added(&self, chunk: Chunk) -> Vec<Added> {
        match chunk {
            Chunk::Prompt { sequence, tokens } => {
                let first = self.tokens[sequence].unwrap_or(0);
                vec![Added { sequence, row: 0, first, tokens }]
            }
            Chunk::Step => {
                let all = self.tokens.iter().enumerate();
                all.filter_map(|(row, tokens)| {
                    tokens.map(|first| Added { sequence: row, row, first, tokens: 1 })
                })
                .collect()
            }
        }
    }

    /// Says so if something that is appended is on another device than the cache.
    pub fn check_appended(&self, stream: &Stream, new: Rotated<'_>) -> Result<()> {
        stream.device().check_same(&self.device, "the cache")?;
        stream.device().check_same(new.positions.device(), "the buffer of positions")?;
        stream.device().check_same(new.keys.device(), "the buffer of keys")?;
        Ok(stream.device().check_same(new.values.device(), "the buffer of values")?)
    }

    /// The part of `queries` and `output` that the chunk in a layer has, which must be on the cache's device.
    pub fn attending(
        &self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<Attending> {
        let chunk = self.begun(layer)?;
        stream.device().check_same(&self.device, "the cache")?;
        stream.device().check_same(queries.device(), "the buffer of queries")?;
        stream.device().check_same(output.device(), "the output buffer")?;
        let length = self.rows(chunk) * self.geometry.query_width();
        let (queries, output) = (queries.global_range(..length)?, output.global_range_mut(..length)?);
        Ok(Attending { chunk, queries, output })
    }

    /// The chunk counts from now on.
    pub fn commit(&mut self) -> Option<Chunk> {
        let chunk = self.chunk.take()?;
        for Added { sequence, tokens, .. } in self.added(chunk) {
            self.tokens[sequence] = self.tokens[sequence].map(|before| before + tokens);
        }
        Some(chunk)
    }
}

/// Tokens that a chunk adds to a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Added {
    pub sequence: usize,
    /// The row of the chunk's buffers that the first has.
    pub row: usize,
    /// Its place in the sequence.
    pub first: usize,
    pub tokens: usize,
}
