//! A cache that is full without a text: for measuring steps at lengths that take long to read.

use super::{Result, Runner};
use crate::Buffer;
use crate::attention::dense::sample::normal;
use crate::kv::{Chunk, KvCache, New, Rotated};
use half::f16;
use rayon::prelude::*;

/// Tokens that are appended at a time.
const CHUNK: usize = 1024;

impl Runner {
    /// Adds `tokens` to a sequence of the cache with keys and values that no text has: numbers of about N(0,
    /// 1), keys times `key_scale`, the same in all layers and every 1024 tokens. The larger the scale the
    /// narrower is attention.
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
        let (layers, width) = (self.geometry.layers, self.geometry.kv_width());
        let numbers = |seed: u64, scale: f32| -> Vec<f16> {
            let elements = 0..(CHUNK.min(tokens) * width) as u64;
            elements.into_par_iter().map(|i| f16::from_f32(normal(seed, i) * scale)).collect()
        };
        let keys = Buffer::from_slice(stream.device(), &numbers(1, key_scale))?;
        let values = Buffer::from_slice(stream.device(), &numbers(2, 1.0))?;
        let mut left = tokens;
        while left > 0 {
            let count = CHUNK.min(left);
            let chunk = Chunk::Prompt { sequence, tokens: count };
            let positions = Buffer::from_slice(stream.device(), &cache.held().positions(chunk))?;
            cache.begin(stream, chunk)?;
            for layer in 0..layers {
                let new = Rotated { positions: &positions, keys: &keys, values: &values };
                cache.append(stream, layer, New::Rotated(new))?;
            }
            // Before the positions go.
            stream.synchronize()?;
            cache.commit();
            left -= count;
        }
        Ok(())
    }
}
