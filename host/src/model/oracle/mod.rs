//! The forward pass in f64, as plainly as it can be written: what every faster one is measured against.
//!
//! For tokens x₀, x₁, … with the residual stream h of `hidden` channels:
//!
//! ```text
//! h    = embedding[x]
//! each layer:
//!   a  = RMSNorm(h) · attn_norm
//!   q  = Wq·a + bq,  k = Wk·a + bk,  v = Wv·a + bv
//!   q, k are turned by their position (RoPE); k and v go into the cache
//!   o  = for each query head: Σₚ softmaxₚ(q·kₚ / √head_dim) · vₚ over the cache of its KV head
//!   h += Wo·o + bo
//!   f  = RMSNorm(h) · ffn_norm
//!   h += Wdown·(SiLU(Wgate·f) ⊙ Wup·f)
//! logits = Woutput·(RMSNorm(h) · output_norm)
//! ```
//!
//! Weights are the f32 that their blocks restore to; all else is f64, sines and cosines included. The order
//! of sums is not fixed: results of two machines may differ in the last bits of an f64.

mod matrix;

use super::Model;
use super::config::ModelConfig;
use super::error::{Error, Result};
use super::weights::{LayerWeights, Tensor, Weights};
use rayon::prelude::*;
use std::borrow::Cow;

/// Positions whose logits are held at once.
const LOGIT_ROWS: usize = 128;

/// Where the oracle keeps keys and values: a dense cache, or a quantized one under test.
pub trait KeyValues: Sync {
    /// Tokens held so far; the same in all layers between two calls of [`Oracle::hidden`].
    fn tokens(&self) -> usize;

    /// Adds a token to a layer: keys after RoPE and values, each [kv_heads, head_dim].
    fn append(&mut self, layer: usize, keys: &[f64], values: &[f64]);

    /// What attention reads of a KV head: keys and values of all tokens held, each [tokens, head_dim].
    fn head(&self, layer: usize, kv_head: usize) -> [Cow<'_, [f64]>; 2];

    /// Does what is read of a token never change once it is there? Then a whole text is appended at once, and
    /// each query reads the tokens up to its own; otherwise token by token.
    fn is_append_only(&self) -> bool {
        false
    }
}

/// Keys and values as they are.
#[derive(Clone, Debug)]
pub struct DenseKeyValues {
    kv_heads: usize,
    head_dim: usize,
    /// Keys and values of each KV head of each layer: [tokens, head_dim].
    heads: Vec<[Vec<f64>; 2]>,
}

impl DenseKeyValues {
    /// An empty cache.
    pub fn new(config: &ModelConfig) -> Self {
        let heads = vec![[Vec::new(), Vec::new()]; config.layers * config.kv_heads];
        DenseKeyValues { kv_heads: config.kv_heads, head_dim: config.head_dim, heads }
    }
}

impl KeyValues for DenseKeyValues {
    fn tokens(&self) -> usize {
        self.heads.last().map_or(0, |[_, values]| values.len() / self.head_dim)
    }

    fn append(&mut self, layer: usize, keys: &[f64], values: &[f64]) {
        for (kind, all) in [keys, values].into_iter().enumerate() {
            for (kv_head, vector) in all.chunks_exact(self.head_dim).enumerate() {
                self.heads[layer * self.kv_heads + kv_head][kind].extend_from_slice(vector);
            }
        }
    }

    fn head(&self, layer: usize, kv_head: usize) -> [Cow<'_, [f64]>; 2] {
        self.heads[layer * self.kv_heads + kv_head].each_ref().map(|x| Cow::Borrowed(x.as_slice()))
    }

    fn is_append_only(&self) -> bool {
        true
    }
}

/// The forward pass of a model.
#[derive(Clone, Debug)]
pub struct Oracle<'a> {
    config: &'a ModelConfig,
    weights: &'a Weights,
    /// Radians a position, of each pair of channels.
    frequencies: Vec<f64>,
}

impl<'a> Oracle<'a> {
    /// That of this model.
    pub fn new(model: &'a Model) -> Self {
        let Model { config, weights, .. } = model;
        Oracle { config, weights, frequencies: config.rope.frequencies() }
    }

    /// Logits after each token, [tokens, vocab], for tokens that follow those in the cache.
    ///
    /// # Errors
    /// A token that the embedding lacks, or more tokens than the context holds.
    pub fn forward(&self, tokens: &[u32], cache: &mut dyn KeyValues) -> Result<Vec<f64>> {
        Ok(self.logits(&self.hidden(tokens, cache)?))
    }

    /// What the output projection reads after each token, [tokens, hidden]: the residual stream after the
    /// last norm.
    ///
    /// # Errors
    /// As [`Oracle::forward`]; the cache is then as before.
    pub fn hidden(&self, tokens: &[u32], cache: &mut dyn KeyValues) -> Result<Vec<f64>> {
        let &ModelConfig { hidden, vocab, context, .. } = self.config;
        let first = cache.tokens();
        if first + tokens.len() > context {
            return Err(Error::Context { tokens: first + tokens.len(), context });
        }
        let mut stream = vec![0.0; tokens.len() * hidden];
        let mut row = vec![0.0; hidden];
        for (&id, stream) in tokens.iter().zip(stream.chunks_exact_mut(hidden)) {
            if id as usize >= vocab {
                return Err(Error::NoToken { id, vocab });
            }
            self.weights.token_embedding.dequantize_row(id as usize, &mut row);
            stream.iter_mut().zip(&row).for_each(|(x, &weight)| *x = f64::from(weight));
        }
        if cache.is_append_only() {
            self.layers(&mut stream, first, cache);
        } else {
            // In such a cache a later token may change what is read of an earlier one.
            for (i, stream) in stream.chunks_exact_mut(hidden).enumerate() {
                self.layers(stream, first + i, cache);
            }
        }
        Ok(self.norm(&stream, &self.weights.output_norm))
    }

    /// The output projection: [tokens, hidden] to [tokens, vocab].
    pub fn logits(&self, hidden: &[f64]) -> Vec<f64> {
        matrix::project(&self.weights.output, None, hidden)
    }

    /// Log-probabilities of `tokens[1..]`, each after all tokens before it, with a dense cache.
    ///
    /// # Errors
    /// As [`Oracle::forward`].
    pub fn log_probabilities(&self, tokens: &[u32]) -> Result<Vec<f64>> {
        let ModelConfig { hidden, vocab, .. } = self.config;
        let outputs = self.hidden(tokens, &mut DenseKeyValues::new(self.config))?;
        let mut result = Vec::with_capacity(tokens.len().saturating_sub(1));
        let targets = tokens.get(1..).unwrap_or_default().chunks(LOGIT_ROWS);
        for (targets, outputs) in targets.zip(outputs.chunks(LOGIT_ROWS * hidden)) {
            let logits = self.logits(&outputs[..targets.len() * hidden]);
            let rows = logits.chunks_exact(*vocab).zip(targets);
            result.extend(rows.map(|(logits, &target)| log_probability(logits, target)));
        }
        Ok(result)
    }

    /// All layers, for the tokens in `stream` that follow the `first` in the cache.
    fn layers(&self, stream: &mut [f64], first: usize, cache: &mut dyn KeyValues) {
        for (layer, weights) in self.weights.layers.iter().enumerate() {
            let attended = self.attention(layer, weights, stream, first, cache);
            add(stream, &attended);
            let fed = self.feed_forward(weights, stream);
            add(stream, &fed);
        }
    }

    fn attention(
        &self,
        layer: usize,
        weights: &LayerWeights,
        stream: &[f64],
        first: usize,
        cache: &mut dyn KeyValues,
    ) -> Vec<f64> {
        let config = self.config;
        let (query_width, kv_width) = (config.query_width(), config.kv_width());
        let input = self.norm(stream, &weights.attn_norm);
        let mut queries = matrix::project(&weights.attn_q, weights.attn_q_bias.as_ref(), &input);
        let mut keys = matrix::project(&weights.attn_k, weights.attn_k_bias.as_ref(), &input);
        let values = matrix::project(&weights.attn_v, weights.attn_v_bias.as_ref(), &input);
        self.rotate(&mut queries, query_width, first);
        self.rotate(&mut keys, kv_width, first);
        for (keys, values) in keys.chunks_exact(kv_width).zip(values.chunks_exact(kv_width)) {
            cache.append(layer, keys, values);
        }
        let mut output = vec![0.0; queries.len()];
        let heads: Vec<_> = (0..config.kv_heads).map(|kv_head| cache.head(layer, kv_head)).collect();
        let vectors =
            output.par_chunks_exact_mut(config.head_dim).zip(queries.par_chunks_exact(config.head_dim));
        vectors.enumerate().for_each(|(i, (output, query))| {
            let (token, query_head) = (i / config.query_heads, i % config.query_heads);
            let [keys, values] = &heads[query_head / config.group()];
            let seen = (first + token + 1) * config.head_dim;
            attend(query, &keys[..seen], &values[..seen], output);
        });
        matrix::project(&weights.attn_output, weights.attn_output_bias.as_ref(), &output)
    }

    fn feed_forward(&self, weights: &LayerWeights, stream: &[f64]) -> Vec<f64> {
        let input = self.norm(stream, &weights.ffn_norm);
        let mut gate = matrix::project(&weights.ffn_gate, None, &input);
        let up = matrix::project(&weights.ffn_up, None, &input);
        gate.iter_mut().zip(&up).for_each(|(gate, up)| *gate = *gate / (1.0 + (-*gate).exp()) * up);
        matrix::project(&weights.ffn_down, None, &gate)
    }

    /// RMSNorm of each token's channels, times the norm's weights.
    fn norm(&self, stream: &[f64], weight: &Tensor) -> Vec<f64> {
        let weight = weight.to_f32();
        let eps = f64::from(self.config.norm_eps);
        let one = |x: &[f64]| {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            let scale = 1.0 / (mean + eps).sqrt();
            x.iter().zip(&weight).map(move |(x, &weight)| x * scale * f64::from(weight)).collect::<Vec<f64>>()
        };
        stream.chunks_exact(weight.len()).flat_map(one).collect()
    }

    /// RoPE of every head in rows of `width` values, the first row at position `first`.
    fn rotate(&self, vectors: &mut [f64], width: usize, first: usize) {
        let rope = &self.config.rope;
        for (token, row) in vectors.chunks_exact_mut(width).enumerate() {
            for (i, frequency) in self.frequencies.iter().enumerate() {
                let (sin, cos) = ((first + token) as f64 * frequency).sin_cos();
                let (a, b) = rope.kind.pair(i, rope.dims);
                for head in row.chunks_exact_mut(self.config.head_dim) {
                    (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
                }
            }
        }
    }
}

/// One query head over the tokens it sees.
fn attend(query: &[f64], keys: &[f64], values: &[f64], output: &mut [f64]) {
    let scale = 1.0 / (query.len() as f64).sqrt();
    let mut scores = matrix::products(keys, query);
    scores.iter_mut().for_each(|score| *score *= scale);
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut sum = 0.0;
    for (score, value) in scores.iter().zip(values.chunks_exact(query.len())) {
        let weight = (score - largest).exp();
        sum += weight;
        output.iter_mut().zip(value).for_each(|(output, value)| *output += weight * value);
    }
    output.iter_mut().for_each(|output| *output /= sum);
}

fn add(stream: &mut [f64], more: &[f64]) {
    stream.iter_mut().zip(more).for_each(|(x, more)| *x += more);
}

/// The log-probability of a token by these logits.
///
/// # Panics
/// If there is no logit for it.
pub fn log_probability(logits: &[f64], token: u32) -> f64 {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|logit| (logit - largest).exp()).sum();
    logits[token as usize] - largest - sum.ln()
}

/// The exponential of the mean surprise.
pub fn perplexity(log_probabilities: &[f64]) -> f64 {
    (-log_probabilities.iter().sum::<f64>() / log_probabilities.len() as f64).exp()
}
