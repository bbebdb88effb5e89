//! Keys and values as they are, in f16.

use crate::attention::{BLOCK_TOKENS, PagedPool};
use crate::kv::{Capacity, Chunk, Error, Geometry, Held, KvCache, New, Paged, Result, Sequences};
use crate::{Buffer, Device, Stream};
use half::f16;

/// A cache in f16: a paged pool a layer, and exact attention.
///
/// The capacity, of tokens and of sequences, decides how attention cuts its work
/// ([`Plan`](crate::attention::dense::Plan)): another one may give other bits. Where it is one part, up to
/// 256 tokens, a chunk gives the bits that its tokens give one by one.
#[derive(Debug)]
pub struct DenseCache {
    sequences: Sequences,
    pools: Vec<PagedPool<f16>>,
    /// All layers have the same table.
    paged: Paged,
}

impl DenseCache {
    /// An empty cache: of `capacity` tokens of one sequence, or as many of several.
    ///
    /// # Errors
    /// [`Error::Memory`] if the device can never hold it; heads that there is no kernel for; out of memory.
    pub fn new(device: &Device, geometry: Geometry, capacity: impl Into<Capacity>) -> Result<Self> {
        let sequences = Sequences::new(device, geometry, capacity.into());
        let problem = sequences.step_problem().checked()?;
        let tokens = u64::from(problem.max_blocks() * BLOCK_TOKENS) * u64::from(problem.sequences);
        let bytes = geometry.token_bytes().saturating_mul(tokens);
        Error::if_too_large(device, sequences.capacity, bytes)?;
        let pools = (0..geometry.layers).map(|_| sequences.pool()).collect::<Result<_>>()?;
        Ok(DenseCache { pools, paged: Paged::new(&sequences)?, sequences })
    }

    /// The kernels on every device: on the CPU the emulator, which gives the bits of the CPU's own path and
    /// takes some hundred times as long.
    pub fn with_kernels(mut self) -> Self {
        self.sequences.simd = false;
        self
    }
}

// SAFETY: pools, table and the plan for steps are made once; other plans are not captured.
unsafe impl KvCache for DenseCache {
    fn scheme(&self) -> &'static str {
        "dense"
    }

    fn held(&self) -> Held<'_> {
        self.sequences.held()
    }

    fn bytes(&self) -> u64 {
        self.sequences.geometry.token_bytes() * self.sequences.tokens() as u64
    }

    fn step_bytes(&self) -> u64 {
        self.bytes()
    }

    fn join(&mut self, _: &Stream) -> Result<usize> {
        self.paged.join(&mut self.sequences)
    }

    fn fork(&mut self, stream: &Stream, sequence: usize) -> Result<usize> {
        self.paged.fork(stream, &mut self.sequences, sequence, self.pools.iter_mut())
    }

    fn leave(&mut self, stream: &Stream, sequence: usize) -> Result<()> {
        self.paged.leave(stream, &mut self.sequences, sequence)
    }

    fn begin(&mut self, _: &Stream, chunk: Chunk) -> Result<()> {
        self.sequences.room(chunk)?;
        self.paged.ready(&self.sequences, chunk)?;
        self.sequences.begin(chunk);
        Ok(())
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let chunk = self.sequences.begun(layer)?;
        self.paged.append(stream, &self.sequences, &mut self.pools[layer], new, chunk)
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let attending = self.sequences.attending(stream, layer, queries, output)?;
        self.paged.attend(stream, &self.sequences, &self.pools[layer], attending)
    }

    fn commit(&mut self) {
        self.sequences.commit();
    }
}
