//! A cache that is full without a text: for measuring steps at lengths that take long to read.

use super::{Result, Runner};
use crate::Buffer;
use crate::attention::dense::sample::normal;
use crate::kv::calibration::{Material, Passed};
use crate::kv::{Chunk, KvCache, New, Rotated};
use half::f16;
use rayon::prelude::*;

/// Tokens that are appended at a time.
const CHUNK: usize = 1024;
/// Numbers by which each of these is moved on against the one before: a prime, so that it is long until the
/// same ones come back to where they were.
const STRIDE: usize = 7919;

impl Runner {
    /// Adds `tokens` to a sequence of the cache with keys and values that no text has: numbers of about N(0,
    /// 1), keys times `key_scale`, the same in all layers. The larger the scale the narrower is attention.
    ///
    /// Every 1024 tokens have the numbers of the first ones, moved on by some channels, so that no block of
    /// keys is there twice: what ranks blocks would find nothing but ties.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn fill(
        &mut self,
        cache: &mut dyn KvCache,
        sequence: usize,
        tokens: usize,
        key_scale: f32,
    ) -> Result<()> {
        if tokens == 0 {
            return Ok(());
        }
        self.fits(cache, Chunk::Prompt { sequence, tokens })?;
        let stream = self.stream();
        let layers = self.geometry.layers;
        let mut rows = self.rows(tokens, key_scale);
        let mut left = tokens;
        while left > 0 {
            let count = CHUNK.min(left);
            let chunk = Chunk::Prompt { sequence, tokens: count };
            let positions = Buffer::from_slice(stream.device(), &cache.held().positions(chunk))?;
            let keys = Buffer::from_slice(stream.device(), &rows[0])?;
            let values = Buffer::from_slice(stream.device(), &rows[1])?;
            cache.begin(stream, chunk)?;
            for layer in 0..layers {
                let new = Rotated { positions: &positions, keys: &keys, values: &values };
                cache.append(stream, layer, New::Rotated(new))?;
            }
            // Before the positions go.
            stream.synchronize()?;
            cache.commit();
            for row in &mut rows {
                let by = STRIDE % row.len().max(1);
                row.rotate_left(by);
            }
            left -= count;
        }
        Ok(())
    }

    /// What [`fill`](Self::fill) puts into a cache, 1024 tokens at most: what a file is made from for a model
    /// of random weights, of which no text says anything either. Queries are of about N(0, 1).
    pub fn filling(&self, tokens: usize, key_scale: f32) -> Material {
        let tokens = tokens.min(CHUNK);
        let [keys, values] = self.rows(tokens, key_scale);
        let queries = numbers(3, tokens * self.geometry.query_width(), 1.0);
        let layers = vec![Passed { keys, values, queries }; self.geometry.layers];
        Material { geometry: self.geometry, rope: Some(self.rope.clone()), layers, fronts: Vec::new() }
    }

    /// Keys and values of up to `tokens` tokens, of [`CHUNK`] at most.
    fn rows(&self, tokens: usize, key_scale: f32) -> [Vec<f16>; 2] {
        let elements = tokens.min(CHUNK) * self.geometry.kv_width();
        [numbers(1, elements, key_scale), numbers(2, elements, 1.0)]
    }
}

fn numbers(seed: u64, count: usize, scale: f32) -> Vec<f16> {
    (0..count as u64).into_par_iter().map(|i| f16::from_f32(normal(seed, i) * scale)).collect()
}
