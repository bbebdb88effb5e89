//! What passes through a cache, kept.

use crate::kv::{Chunk, Error, Held, KvCache, New, Restored, Result, Rotated, StepReport, Traffic};
use crate::{Buffer, Stream};
use half::f16;

/// One layer's part of a capture, row-major.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Captured {
    /// The layer.
    pub layer: usize,
    /// [tokens, kv_heads, head_dim], rotated.
    pub keys: Vec<f16>,
    /// Likewise.
    pub values: Vec<f16>,
    /// Those of the tokens from [`Capture::first_query`] on: [tokens, q_heads, head_dim], rotated and not
    /// scaled.
    pub queries: Vec<f16>,
}

/// A cache around another one, which does what that one does and keeps what chosen layers are given.
///
/// Its copies wait for the device, so that it is slower, and no step over it can be captured in a graph.
pub struct Capture<'a> {
    inner: &'a mut dyn KvCache,
    first_query: usize,
    layers: Vec<Captured>,
    /// Tokens of the chunk that was begun.
    chunk: usize,
}

impl<'a> Capture<'a> {
    /// Around an empty cache: all keys and values of these layers, and the queries of the tokens from
    /// `first_query` on.
    ///
    /// # Errors
    /// [`Error::Order`] for a layer that the cache does not have.
    pub fn new(inner: &'a mut dyn KvCache, layers: &[usize], first_query: usize) -> Result<Self> {
        let limit = "the cache was made for fewer layers";
        if let Some(&value) = layers.iter().find(|layer| **layer >= inner.geometry().layers) {
            return Err(Error::Order { what: "the layer to capture", value, limit });
        }
        let mut layers = layers.to_vec();
        layers.sort_unstable();
        layers.dedup();
        let layers = layers.into_iter().map(|layer| Captured { layer, ..Captured::default() }).collect();
        Ok(Capture { inner, first_query, layers, chunk: 0 })
    }

    /// The first token whose queries are kept.
    pub fn first_query(&self) -> usize {
        self.first_query
    }

    /// What was kept, by layer.
    pub fn into_layers(self) -> Vec<Captured> {
        self.layers
    }

    fn find(&mut self, layer: usize) -> Option<&mut Captured> {
        self.layers.iter_mut().find(|captured| captured.layer == layer)
    }
}

/// The rows of a buffer from `first` to before `last`, behind what a chunk that was begun again may have
/// left.
fn keep(
    stream: &Stream,
    kept: &mut Vec<f16>,
    before: usize,
    buffer: &Buffer<f16>,
    rows: std::ops::Range<usize>,
    width: usize,
) -> Result<()> {
    kept.truncate(before * width);
    let start = kept.len();
    kept.resize(start + rows.len() * width, f16::ZERO);
    Ok(stream.download(buffer, rows.start * width, &mut kept[start..])?)
}

// SAFETY: the cache inside, which stays borrowed, names what it names; copies out of a capture are refused.
unsafe impl KvCache for Capture<'_> {
    fn step_bytes(&self) -> u64 {
        self.inner.step_bytes()
    }

    fn scheme(&self) -> &'static str {
        self.inner.scheme()
    }

    fn held(&self) -> Held<'_> {
        self.inner.held()
    }

    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn host_bytes(&self) -> u64 {
        self.inner.host_bytes()
    }

    fn period(&self) -> usize {
        self.inner.period()
    }

    fn regime(&self) -> u32 {
        self.inner.regime()
    }

    fn report(&self) -> Result<StepReport> {
        self.inner.report()
    }

    fn traffic(&self, stream: &Stream) -> Result<Option<Traffic>> {
        self.inner.traffic(stream)
    }

    fn restored(&self, stream: &Stream, layer: usize, sequence: usize) -> Result<Option<Restored>> {
        self.inner.restored(stream, layer, sequence)
    }

    fn check(&mut self, stream: &Stream) -> Result<()> {
        self.inner.check(stream)
    }

    fn join(&mut self, _: &Stream) -> Result<usize> {
        Err(Error::NoRoom { sequences: 1 })
    }

    fn fork(&mut self, _: &Stream, _: usize) -> Result<usize> {
        Err(Error::NoRoom { sequences: 1 })
    }

    fn leave(&mut self, stream: &Stream, sequence: usize) -> Result<()> {
        self.inner.leave(stream, sequence)
    }

    fn begin(&mut self, stream: &Stream, chunk: Chunk) -> Result<()> {
        self.inner.begin(stream, chunk)?;
        self.chunk = chunk.rows(1);
        Ok(())
    }

    fn append(&mut self, stream: &Stream, layer: usize, new: New<'_>) -> Result<()> {
        let (held, chunk, width) = (self.tokens(), self.chunk, self.geometry().kv_width());
        let new = new.rotated(stream, self.geometry(), chunk)?;
        self.inner.append(stream, layer, New::Rotated(new))?;
        let Rotated { keys, values, .. } = new;
        match self.find(layer) {
            None => Ok(()),
            Some(captured) => {
                keep(stream, &mut captured.keys, held, keys, 0..chunk, width)?;
                keep(stream, &mut captured.values, held, values, 0..chunk, width)
            }
        }
    }

    fn attend(
        &mut self,
        stream: &Stream,
        layer: usize,
        queries: &Buffer<f16>,
        output: &mut Buffer<f32>,
    ) -> Result<()> {
        let (held, chunk, width) = (self.tokens(), self.chunk, self.geometry().query_width());
        let (before, skipped) =
            (held.saturating_sub(self.first_query), self.first_query.saturating_sub(held));
        self.inner.attend(stream, layer, queries, output)?;
        match self.find(layer).filter(|_| skipped < chunk) {
            None => Ok(()),
            Some(captured) => keep(stream, &mut captured.queries, before, queries, skipped..chunk, width),
        }
    }

    fn commit(&mut self) {
        self.inner.commit();
        self.chunk = 0;
    }
}
