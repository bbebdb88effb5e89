//! A cache with keys and values in f16, in paged pools: what is a scheme's own is what it keeps beside them,
//! and how its steps attend.

use super::{Attending, Chunk, HeadReport, Held, KvCache, New, Paged, Result, Rows, Sequences, StepReport};
use crate::attention::PagedPool;
use crate::{Buffer, Stream};
use half::f16;
use simt::{Global, GlobalMut};
use std::fmt;

/// What a scheme keeps beside the pools of a [`PagedCache`], for all layers, and what its steps do with it.
///
/// # Safety
/// As [`KvCache`]: the memory that [`appended`](Self::appended) and [`attend`](Self::attend) of a step name
/// in a capture stays where it is as long as this and the layers are there.
pub unsafe trait Beside: fmt::Debug + Send {
    /// What the scheme is called on the command line.
    const SCHEME: &'static str;

    /// What it keeps beside the pool of one layer.
    type Layer: fmt::Debug + Send;

    /// Keeps up with tokens that were appended to a layer's pool.
    ///
    /// # Errors
    /// What the launches report.
    fn appended(&mut self, _: &mut Self::Layer, _: Appended<'_>) -> Result<()> {
        Ok(())
    }

    /// Attention of a step in a layer; of a prompt's chunk it is exact.
    ///
    /// # Errors
    /// What the launches report.
    fn attend(&mut self, _: &mut Self::Layer, step: Step<'_>) -> Result<()> {
        step.exact()
    }

    /// A sequence of a layer begins with what another one has.
    ///
    /// # Errors
    /// What the copies report.
    fn fork(&self, _: &mut Self::Layer, _: Forking<'_>) -> Result<()> {
        Ok(())
    }

    /// Tokens that a step reads keys and values of at least in a layer, of a sequence of `tokens`.
    fn kept(&self, _: &Self::Layer, tokens: usize) -> usize {
        tokens
    }

    /// Bytes that a layer keeps beside the pool for a sequence of `tokens`.
    fn bytes(&self, _: &Self::Layer, _tokens: usize) -> u64 {
        0
    }

    /// Bytes that a step reads of them.
    fn step_bytes(&self, layer: &Self::Layer, tokens: usize) -> u64 {
        self.bytes(layer, tokens)
    }

    /// What is known of the last step, layer by layer: of every sequence that is there its query heads, in
    /// the order of their numbers; empty, if nothing is. May wait for the device, once.
    ///
    /// # Errors
    /// What the device reports.
    fn report(&self, _: &[&Self::Layer], _: Held<'_>) -> Result<Vec<HeadReport>> {
        Ok(Vec::new())
    }
}

/// A sequence that begins with what another one has.
#[derive(Clone, Copy, Debug)]
pub struct Forking<'a> {
    /// Where copies go.
    pub stream: &'a Stream,
    /// The sequence that has tokens.
    pub source: usize,
    /// The one that gets them.
    pub fork: usize,
    /// How many.
    pub tokens: usize,
}

/// Tokens that a layer's pool has got.
#[derive(Debug)]
pub struct Appended<'a> {
    /// Where launches go.
    pub stream: &'a Stream,
    /// Whether to take the CPU's own path in place of the kernels: handles are host memory then.
    pub slices: bool,
    /// The pool.
    pub pool: &'a PagedPool<f16>,
    /// The sequence that the first row of `table`, `positions` and `lengths` is of.
    pub first: usize,
    /// The most tokens that a row has got.
    pub tokens: u32,
    /// The pool's blocks, [rows, max_blocks].
    pub table: Global<u32>,
    /// Where new tokens belong: those of a prompt's chunk, or one of each sequence.
    pub positions: Global<u32>,
    /// Tokens that each row has with them, \[rows\].
    pub lengths: Global<u32>,
}

/// A step in a layer: a query token of every sequence.
#[derive(Debug)]
pub struct Step<'a> {
    /// Where launches go.
    pub stream: &'a Stream,
    /// Whether to take the CPU's own path in place of the kernels: handles are host memory then.
    pub slices: bool,
    /// Keys and values.
    pub pool: &'a PagedPool<f16>,
    /// The pool's blocks, [sequences, max_blocks].
    pub table: Global<u32>,
    /// Tokens of each sequence, \[sequences\].
    pub lengths: Global<u32>,
    /// [sequences, q_heads, head_dim].
    pub queries: Global<f16>,
    /// [sequences, q_heads, head_dim].
    pub output: GlobalMut<f32>,
    sequences: &'a Sequences,
    paged: &'a mut Paged,
}

impl Step<'_> {
    /// Attention to all tokens.
    ///
    /// # Errors
    /// What the launch reports.
    pub fn exact(self) -> Result<()> {
        let Step { stream, pool, queries, output, sequences, paged, .. } = self;
        paged.attend(stream, sequences, pool, Attending { chunk: Chunk::Step, queries, output })
    }
}

/// A cache in f16: a paged pool a layer and what a scheme keeps beside it. A prompt's attention is exact.
///
/// The capacity, of tokens and of sequences, decides how attention cuts its work
/// ([`Plan`](crate::attention::dense::Plan)): another one may give other bits. Where it is one part, up to
/// 256 tokens, exact attention gives a chunk the bits that its tokens give one by one.
#[derive(Debug)]
pub struct PagedCache<B: Beside> {
    sequences: Sequences,
    layers: Vec<(PagedPool<f16>, B::Layer)>,
    /// All layers have the same table.
    paged: Paged,
    beside: B,
    /// The last chunk that was committed.
    last: Option<Chunk>,
}

impl<B: Beside> PagedCache<B> {
    /// An empty cache; `layer` makes what is beside the pool of a layer.
    pub(crate) fn open(
        sequences: Sequences,
        beside: B,
        mut layer: impl FnMut(usize) -> Result<B::Layer>,
    ) -> Result<Self> {
        let layers = (0..sequences.geometry.layers).map(|index| Ok((sequences.pool()?, layer(index)?)));
        let layers = layers.collect::<Result<_>>()?;
        Ok(PagedCache { layers, paged: Paged::new(&sequences)?, beside, last: None, sequences })
    }

    /// The kernels on every device: on the CPU the emulator, which gives the bits of the CPU's own path and
    /// takes some hundred times as long.
    pub fn with_kernels(mut self) -> Self {
        self.sequences.simd = false;
        self
    }

    /// The sum of what `of` says of each sequence in each layer.
    fn sum(&self, of: impl Fn(&B::Layer, usize) -> u64) -> u64 {
        let lengths = || self.sequences.held().lengths();
        self.layers.iter().flat_map(|(_, layer)| lengths().map(|tokens| of(layer, tokens))).sum()
    }
}

// SAFETY: pools, table and the plan for steps are made once, and by the word of `Beside` what is beside them
// stays; what prompts need is not captured.
unsafe impl<B: Beside> KvCache for PagedCache<B> {
    fn scheme(&self) -> &'static str {
        B::SCHEME
    }

    fn held(&self) -> Held<'_> {
        self.sequences.held()
    }

    fn bytes(&self) -> u64 {
        let pools = self.sequences.geometry.token_bytes() * self.sequences.tokens() as u64;
        pools + self.sum(|layer, tokens| self.beside.bytes(layer, tokens))
    }

    fn step_bytes(&self) -> u64 {
        let geometry = self.sequences.geometry;
        let of_layer = geometry.token_bytes() / geometry.layers.max(1) as u64;
        self.sum(|layer, tokens| {
            of_layer * self.beside.kept(layer, tokens) as u64 + self.beside.step_bytes(layer, tokens)
        })
    }

    fn report(&self) -> Result<StepReport> {
        if self.last != Some(Chunk::Step) {
            return Ok(StepReport::default());
        }
        let layers: Vec<&B::Layer> = self.layers.iter().map(|(_, layer)| layer).collect();
        Ok(StepReport { heads: self.beside.report(&layers, self.held())? })
    }

    fn join(&mut self, _: &Stream) -> Result<usize> {
        self.paged.join(&mut self.sequences)
    }

    fn fork(&mut self, stream: &Stream, sequence: usize) -> Result<usize> {
        let PagedCache { sequences, layers, paged, beside, .. } = self;
        let pools = layers.iter_mut().map(|(pool, _)| pool);
        let tokens = sequences.length(sequence)?;
        let fork = paged.fork(stream, sequences, sequence, pools)?;
        let forking = Forking { stream, source: sequence, fork, tokens };
        match layers.iter_mut().try_for_each(|(_, layer)| beside.fork(layer, forking)) {
            Ok(()) => Ok(fork),
            Err(error) => {
                // What was not copied is that of an ended sequence: there is no fork.
                paged.leave(stream, sequences, fork)?;
                Err(error)
            }
        }
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
        let PagedCache { sequences, layers, paged, beside, .. } = self;
        let (pool, layer) = &mut layers[layer];
        let positions = new.positions().global_range(..sequences.rows(chunk))?;
        paged.append(stream, sequences, pool, new, chunk)?;
        let Rows { table, lengths, tokens } = paged.rows(chunk)?;
        let first = match chunk {
            Chunk::Prompt { sequence, .. } => sequence,
            Chunk::Step => 0,
        };
        let (slices, lengths) = (sequences.on_slices(stream), lengths.as_const());
        beside.appended(layer, Appended { stream, slices, pool, first, tokens, table, positions, lengths })
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let attending = self.sequences.attending(stream, layer, queries, output)?;
        let PagedCache { sequences, layers, paged, beside, .. } = self;
        let (pool, layer) = &mut layers[layer];
        if attending.chunk != Chunk::Step {
            return paged.attend(stream, sequences, pool, attending);
        }
        let Attending { queries, output, chunk } = attending;
        let Rows { table, lengths, .. } = paged.rows(chunk)?;
        let (slices, lengths) = (sequences.on_slices(stream), lengths.as_const());
        let step = Step { stream, slices, pool, table, lengths, queries, output, sequences, paged };
        beside.attend(layer, step)
    }

    fn commit(&mut self) {
        self.last = self.sequences.commit();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Capacity, Error, Geometry};
    use super::*;
    use crate::Device;
    use simt::emu::EmuOptions;

    /// What cannot be copied to a fork.
    #[derive(Debug)]
    struct NoCopies;

    // SAFETY: it adds no launches.
    unsafe impl Beside for NoCopies {
        const SCHEME: &'static str = "no-copies";
        type Layer = ();

        fn fork(&self, _: &mut (), forking: Forking<'_>) -> Result<()> {
            Err(Error::NoSequence { sequence: forking.fork, sequences: 0 })
        }
    }

    #[test]
    fn a_fork_that_cannot_be_made_whole_is_none() {
        let device = Device::cpu(EmuOptions::default());
        let geometry = Geometry { layers: 2, q_heads: 2, kv_heads: 1, head_dim: 64 };
        let sequences = Sequences::new(&device, geometry, Capacity { tokens: 32, sequences: 3 });
        let mut cache = PagedCache::open(sequences, NoCopies, |_| Ok(())).expect("a cache");
        let stream = Stream::new(&device).expect("a stream");
        // The first sequence is there from the start.
        let there = |cache: &PagedCache<NoCopies>| cache.held().lengths().count();
        // As often as one likes: no place is lost.
        for _ in 0..4 {
            let refused = cache.fork(&stream, 0).expect_err("no copy");
            assert!(matches!(refused, Error::NoSequence { sequences: 0, .. }), "{refused}");
            assert_eq!(there(&cache), 1);
        }
        for sequences in [2, 3] {
            cache.join(&stream).expect("room");
            assert_eq!(there(&cache), sequences);
        }
    }
}
