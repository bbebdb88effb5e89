//! What every cache knows of its sequence, and the checks that follow from it.

use super::{Error, Geometry, Held, Result, Rotated};
use crate::attention::PagedPool;
use crate::attention::dense::Problem;
use crate::{BackendKind, Buffer, Device, Stream};
use half::f16;
use simt::{Global, GlobalMut};

/// One sequence in a cache: its extents, how far it is, and where it lives.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub geometry: Geometry,
    /// Tokens that fit.
    pub capacity: usize,
    /// Tokens that are committed.
    pub tokens: usize,
    /// Tokens of the chunk that was begun.
    chunk: usize,
    /// Whether calls take the CPU's own path in place of the kernels.
    pub simd: bool,
    pub device: Device,
}

/// A chunk's queries and where its attention goes, both [chunk, q_heads, head_dim].
pub(crate) struct Attending {
    pub chunk: usize,
    pub queries: Global<f16>,
    pub output: GlobalMut<f32>,
}

impl Sequence {
    /// An empty one, on the CPU by its own path.
    pub fn new(device: &Device, geometry: Geometry, capacity: usize) -> Self {
        let simd = device.kind() == BackendKind::Cpu;
        Sequence { geometry, capacity, tokens: 0, chunk: 0, simd, device: device.clone() }
    }

    /// What a cache says of it.
    pub fn held(&self) -> Held {
        Held { geometry: self.geometry, capacity: self.capacity, tokens: self.tokens }
    }

    /// The attention of a chunk of `query_tokens`, not yet checked.
    pub fn problem(&self, query_tokens: usize) -> Problem {
        let Geometry { q_heads, kv_heads, head_dim, .. } = self.geometry;
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Problem {
            sequences: 1,
            q_heads: narrow(q_heads),
            kv_heads: narrow(kv_heads),
            head_dim: narrow(head_dim),
            query_tokens: narrow(query_tokens),
            max_tokens: narrow(self.capacity),
        }
    }

    /// A pool for all that it may hold, its contents unspecified.
    pub fn pool(&self) -> Result<PagedPool<f16>> {
        let problem = self.problem(1);
        Ok(PagedPool::new(&self.device, problem.max_blocks(), problem.kv_heads, problem.head_dim)?)
    }

    /// Whether a call takes the CPU's own path: a graph wants launches.
    pub fn on_slices(&self, stream: &Stream) -> bool {
        self.simd && !stream.is_capturing()
    }

    /// Whether there is room for `tokens` more.
    pub fn room(&self, tokens: usize) -> Result<()> {
        let (held, capacity) = (self.tokens, self.capacity);
        if tokens > capacity - held { Err(Error::Full { tokens, held, capacity }) } else { Ok(()) }
    }

    /// A chunk of `tokens`, for which there is [`room`](Self::room), follows those committed.
    pub fn begin(&mut self, tokens: usize) {
        self.chunk = tokens;
    }

    /// Tokens of the chunk that was begun, if it and the layer are there.
    pub fn begun(&self, layer: usize) -> Result<usize> {
        if self.chunk == 0 {
            let what = "the chunk's number of tokens";
            return Err(Error::Order { what, value: 0, limit: "begin one first" });
        }
        if layer >= self.geometry.layers {
            let limit = "the cache was made for fewer layers";
            return Err(Error::Order { what: "the layer", value: layer, limit });
        }
        Ok(self.chunk)
    }

    /// Says so if something that is appended is on another device than the cache.
    pub fn check_appended(&self, stream: &Stream, new: Rotated<'_>) -> Result<()> {
        stream.device().check_same(&self.device, "the cache")?;
        stream.device().check_same(new.positions.device(), "the buffer of positions")?;
        stream.device().check_same(new.keys.device(), "the buffer of keys")?;
        Ok(stream.device().check_same(new.values.device(), "the buffer of values")?)
    }

    /// The chunk's part of `queries` and `output`, which must be on the cache's device.
    pub fn attending(
        &self,
        stream: &Stream,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<Attending> {
        stream.device().check_same(&self.device, "the cache")?;
        stream.device().check_same(queries.device(), "the buffer of queries")?;
        stream.device().check_same(output.device(), "the output buffer")?;
        let length = self.chunk * self.geometry.query_width();
        let (queries, output) = (queries.global_range(..length)?, output.global_range_mut(..length)?);
        Ok(Attending { chunk: self.chunk, queries, output })
    }

    /// The chunk counts from now on; how many tokens it has.
    pub fn commit(&mut self) -> usize {
        let chunk = std::mem::take(&mut self.chunk);
        self.tokens += chunk;
        chunk
    }
}
