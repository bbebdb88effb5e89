//! RoPE undone, and done again at other distances.

use super::{FURTHEST, OFFSETS};
use crate::attention::rope::Pairing;
use crate::kv::{Geometry, Rope};
use kernels_gpu::attention::rotation::pair_channels;

/// Queries of a layer at all distances.
#[derive(Debug)]
pub(super) struct Turns {
    /// Channels that turn together.
    pairs: Vec<[usize; 2]>,
    /// Radians a position of each.
    frequencies: Vec<f64>,
    dim: usize,
    /// [query tokens, q_heads, OFFSETS, head_dim].
    queries: Vec<f32>,
}

/// The distances.
pub(super) fn offsets() -> impl Iterator<Item = f64> {
    (0..OFFSETS).map(|i| FURTHEST * (2.0 * i as f64 / (OFFSETS - 1) as f64 - 1.0))
}

impl Turns {
    /// `queries` [query tokens, q_heads, head_dim], turned by their positions.
    pub fn new(rope: &Rope, positions: &[usize], queries: &[f32], geometry: Geometry) -> Self {
        let dim = geometry.head_dim;
        let interleaved = rope.pairing == Pairing::Interleaved;
        let pair = |i| pair_channels(i, rope.rotary, interleaved).map(|channel| channel as usize);
        let pairs = (0..rope.rotary / 2).map(pair).collect();
        let frequencies = rope.frequencies.iter().map(|x| f64::from(*x)).collect();
        let mut turns = Turns { pairs, frequencies, dim, queries: Vec::new() };
        let mut at_all = Vec::with_capacity(queries.len() * OFFSETS);
        for (row, query) in queries.chunks_exact(dim).enumerate() {
            let position = positions[row / geometry.q_heads] as f64;
            at_all.extend(offsets().flat_map(|offset| turns.turned(query, offset - position)));
        }
        turns.queries = at_all;
        turns
    }

    /// A row turned by so many positions more.
    fn turned(&self, row: &[f32], by: f64) -> Vec<f32> {
        let mut out = row.to_vec();
        for ([a, b], frequency) in self.pairs.iter().zip(&self.frequencies) {
            let (sine, cosine) = (by * frequency).sin_cos();
            let (x, y) = (f64::from(row[*a]), f64::from(row[*b]));
            out[*a] = (x * cosine - y * sine) as f32;
            out[*b] = (x * sine + y * cosine) as f32;
        }
        out
    }

    /// Rows of `tokens` among rows [tokens, head_dim], each as it is before RoPE.
    pub fn back(&self, rows: &[f32], tokens: &[usize]) -> Vec<f32> {
        let one = |token: &usize| self.turned(&rows[token * self.dim..][..self.dim], -(*token as f64));
        tokens.iter().flat_map(one).collect()
    }

    /// Mean of abs(q·e) over the distances and the errors [keys, head_dim]; `row` is of [query tokens,
    /// q_heads].
    pub fn error(&self, row: usize, errors: &[f32]) -> f64 {
        let queries = &self.queries[row * OFFSETS * self.dim..][..OFFSETS * self.dim];
        let mut sum = 0.0;
        for error in errors.chunks_exact(self.dim) {
            let of_key: f32 =
                queries.chunks_exact(self.dim).map(|query| super::dot(query, error).abs()).sum();
            sum += f64::from(of_key);
        }
        sum / (errors.len() / self.dim * OFFSETS) as f64
    }
}
