//! The pass on the CPU's own path: SIMD on slices, with the kernels' bits. Attention is the cache's.

use super::weights::{Extents, Packed};
use super::{Result, Rows};
use crate::kv::{Chunk, KvCache, New, Rotated};
use crate::model::cpu::{self, Onto, Source};
use crate::model::kernels::Choice;
use crate::model::linear::PackedWeights;
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::model::fixed::{BLOCK, Part, Record};

const ZERO: Record = [Part { high: [0; 8], middle: [0; 8], low: [0; 8], step: 0.0, sum: 0.0 }; 4];

/// Weights, and the activations of a chunk.
#[derive(Debug)]
pub(super) struct Slices {
    weights: Packed<PackedWeights, Vec<f32>>,
    stream: Stream,
    /// What goes to the cache and comes back, for the longest chunk.
    queries: Buffer<f16>,
    keys: Buffer<f16>,
    values: Buffer<f16>,
    positions: Buffer<u32>,
    attended: Buffer<f32>,
    logits: Vec<f32>,
}

impl Slices {
    pub fn new(device: &Device, weights: Packed<PackedWeights, Vec<f32>>, chunk: usize) -> Result<Self> {
        let extents = weights.extents;
        Ok(Slices {
            stream: Stream::new(device)?,
            queries: Buffer::new(device, chunk * extents.query_width())?,
            keys: Buffer::new(device, chunk * extents.kv_width())?,
            values: Buffer::new(device, chunk * extents.kv_width())?,
            positions: Buffer::new(device, chunk)?,
            attended: Buffer::new(device, chunk * extents.query_width())?,
            logits: Vec::new(),
            weights,
        })
    }

    pub fn chunk(&mut self, tokens: &[u32], chunk: Chunk, rows: Rows, cache: &mut dyn KvCache) -> Result<()> {
        let Slices { weights, stream, queries, keys, values, positions: places, attended, logits } = self;
        let Extents { hidden, ffn, vocab, epsilon, rope, pairing } = weights.extents;
        let count = tokens.len();
        let (query_width, kv_width) = (weights.extents.query_width(), weights.extents.kv_width());
        let positions = cache.held().positions(chunk);
        let records = |columns: usize| vec![ZERO; count * columns / BLOCK as usize];
        let (mut narrow, mut of_heads, mut wide) = (records(hidden), records(query_width), records(ffn));
        let mut x = vec![0f32; count * hidden];
        let mut qkv = vec![0f32; count * weights.extents.qkv_width()];
        let mut gate_up = vec![0f32; count * 2 * ffn];
        let (mut q, mut o) = (vec![f16::ZERO; count * query_width], vec![0f32; count * query_width]);
        let (mut k, mut v) = (vec![f16::ZERO; count * kv_width], vec![f16::ZERO; count * kv_width]);

        cache.begin(stream, chunk)?;
        places.write(0, &positions)?;
        cpu::embedding(&weights.embedding, tokens, &mut x);
        for (number, layer) in weights.layers.iter().enumerate() {
            cpu::quantize(Source::Normed { x: &x, weight: &layer.attn_norm, epsilon }, hidden, &mut narrow);
            cpu::product(&layer.qkv, &narrow, layer.qkv_bias.as_deref(), Onto::Nothing, &mut qkv);
            let frequencies = &weights.frequencies;
            cpu::rotate(pairing, &qkv, &positions, frequencies, &mut q, &mut k, &mut v, rope)?;
            queries.write(0, &q)?;
            keys.write(0, &k)?;
            values.write(0, &v)?;
            let new = Rotated { positions: places, keys, values };
            cache.append(stream, number, New::Rotated(new))?;
            cache.attend(stream, number, queries, attended)?;
            attended.read(0, &mut o)?;
            cpu::quantize(Source::Plain(&o), query_width, &mut of_heads);
            cpu::product(&layer.output, &of_heads, layer.output_bias.as_deref(), Onto::Output, &mut x);
            cpu::quantize(Source::Normed { x: &x, weight: &layer.ffn_norm, epsilon }, hidden, &mut narrow);
            cpu::product(&layer.gate_up, &narrow, None, Onto::Nothing, &mut gate_up);
            cpu::quantize(Source::Gated(&gate_up), ffn, &mut wide);
            cpu::product(&layer.down, &wide, None, Onto::Output, &mut x);
        }
        let count = rows.of(count);
        let x = &x[x.len() - count * hidden..];
        narrow.truncate(count * hidden / BLOCK as usize);
        logits.resize(count * vocab, 0.0);
        if count > 0 {
            cpu::quantize(Source::Normed { x, weight: &weights.output_norm, epsilon }, hidden, &mut narrow);
            cpu::product(weights.output(), &narrow, None, Onto::Nothing, logits);
        }
        cache.commit();
        Ok(())
    }

    /// The stream that the cache is given.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    pub fn logits(&self) -> Vec<f32> {
        self.logits.clone()
    }

    /// A token from each of the last rows of logits: those of these positions, drawn by these numbers.
    pub fn choose(&self, choice: Choice, rows: impl Iterator<Item = (u32, u32)>) -> Result<Vec<u32>> {
        let logits = self.logits.chunks_exact(self.weights.extents.vocab);
        let chosen = logits.zip(rows);
        chosen
            .map(|(logits, (position, number))| Ok(cpu::choose(choice, logits, position, number)?))
            .collect()
    }
}
