//! What a scheme that quantizes makes of keys and values, apart from attention.

use super::{Chunk, Error, KvCache, New, Result, Rotated};
use crate::attention::BLOCK_TOKENS;
use crate::{Buffer, Stream};
use half::f16;
use kernels_gpu::attention::Window;

/// Tokens that are appended at a time.
const CHUNK: usize = 512;

/// Which tokens of a sequence steps read from codes: whole blocks, but for the first tokens and the last few
/// blocks. Those, and what follows, are read as they were, in f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coded {
    /// Tokens of a block.
    pub block: usize,
    /// Full blocks at the end that are read as they were.
    pub kept: usize,
    /// Tokens at the front that are read as they were.
    pub front: usize,
    /// Bytes that a token which is read as it was takes beyond its channels in 16 bits.
    pub extra: u32,
}

impl Coded {
    /// All of them.
    pub const ALL: Coded = Coded { block: 1, kept: 0, front: 0, extra: 0 };

    /// Those outside of a window.
    pub(crate) fn outside(window: Window) -> Self {
        let (tile, front) = (BLOCK_TOKENS as usize, (window.sink * BLOCK_TOKENS) as usize);
        match window.slots.checked_sub(window.sink + 1) {
            Some(kept) => Coded { block: tile, kept: kept as usize, front, extra: 0 },
            None => Coded { front, ..Coded::ALL },
        }
    }

    /// The first so many of a sequence of `length` tokens, but for those at the front.
    pub fn of(self, length: usize) -> usize {
        (length / self.block).saturating_sub(self.kept) * self.block
    }

    /// How many these are.
    pub fn count(self, length: usize) -> usize {
        self.of(length).saturating_sub(self.front)
    }
}

/// Keys, or values, of a layer as its codes have them.
#[derive(Clone, Debug, PartialEq)]
pub struct Side {
    /// [tokens, kv_heads, head_dim], in the space of the model: keys as RoPE has turned them. Of tokens that
    /// have no codes yet what they were.
    pub rows: Vec<f32>,
    /// Bytes that a token's codes take in a KV head, with all that belongs to them.
    pub bytes: f64,
    /// Which of a sequence's tokens are read so.
    pub coded: Coded,
}

impl Side {
    /// Bytes that a step reads of a KV head's token, on average over a sequence of `length` tokens.
    pub fn bytes_at(&self, length: usize, head_dim: usize) -> f64 {
        let coded = self.coded.count(length) as f64;
        let near = length as f64 - coded;
        (coded * self.bytes + near * (size_of::<f16>() * head_dim + self.coded.extra as usize) as f64)
            / length.max(1) as f64
    }
}

/// A layer as its codes have it.
#[derive(Clone, Debug, PartialEq)]
pub struct Restored {
    /// Its keys.
    pub keys: Side,
    /// Its values.
    pub values: Side,
}

/// A layer's keys and values as a model has made them.
#[derive(Clone, Copy, Debug)]
pub struct Original<'a> {
    /// Which layer of the cache it is to be.
    pub layer: usize,
    /// [tokens, kv_heads, head_dim], turned by RoPE.
    pub keys: &'a [f16],
    /// Likewise.
    pub values: &'a [f16],
}

/// Puts layers of the same number of tokens through an empty cache, and reads back what it has stored.
/// `watch` hears of each token of a layer that was appended.
///
/// # Errors
/// [`Error::NotRestored`] for a scheme that reads originals; what appending reports, and what the cache says
/// of rows that it cannot store.
pub fn through(
    cache: &mut dyn KvCache,
    stream: &Stream,
    layers: &[Original<'_>],
    mut watch: impl FnMut(usize),
) -> Result<Vec<Restored>> {
    let refused = || Error::NotRestored { scheme: cache.scheme() };
    // Before any work: a cache of no tokens says whether it can.
    if let Some(first) = layers.first()
        && cache.restored(stream, first.layer, 0)?.is_none()
    {
        return Err(refused());
    }
    let width = cache.geometry().kv_width();
    let tokens = layers.first().map_or(0, |layer| layer.keys.len() / width);
    for first in (0..tokens).step_by(CHUNK) {
        let chunk = Chunk::Prompt { sequence: 0, tokens: CHUNK.min(tokens - first) };
        let device = stream.device();
        let positions = Buffer::from_slice(device, &cache.held().positions(chunk))?;
        cache.begin(stream, chunk)?;
        for layer in layers {
            let rows = first * width..(first + chunk.rows(1)) * width;
            let keys = Buffer::from_slice(device, &layer.keys[rows.clone()])?;
            let values = Buffer::from_slice(device, &layer.values[rows])?;
            let new = Rotated { positions: &positions, keys: &keys, values: &values };
            cache.append(stream, layer.layer, New::Rotated(new))?;
            // Before the buffers go.
            stream.synchronize()?;
            watch(chunk.rows(1));
        }
        cache.commit();
    }
    cache.check(stream)?;
    let restored = |layer: &Original<'_>| {
        cache.restored(stream, layer.layer, 0)?.ok_or(Error::NotRestored { scheme: cache.scheme() })
    };
    layers.iter().map(restored).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_blocks_are_read_from_codes_but_for_the_last() {
        let of = |block, kept, length| Coded { block, kept, front: 0, extra: 0 }.of(length);
        assert_eq!([of(1, 0, 7), of(16, 0, 47), of(16, 2, 47), of(16, 2, 48)], [7, 32, 0, 16]);
        assert_eq!([of(1, 32, 31), of(1, 32, 40)], [0, 8]);
        assert_eq!(Coded::ALL.of(5), 5);
        let front = Coded { block: 16, kept: 1, front: 16, extra: 2 };
        assert_eq!([15, 33, 63, 70].map(|length| front.count(length)), [0, 0, 16, 32]);
    }

    /// 30 tokens of which 16 have codes of 3 bytes; 14 of 8 channels in f16.
    #[test]
    fn bytes_count_what_is_read_as_it_was() {
        let side =
            Side { rows: Vec::new(), bytes: 3.0, coded: Coded { block: 16, kept: 0, front: 0, extra: 0 } };
        assert_eq!(side.bytes_at(30, 8), (16.0 * 3.0 + 14.0 * 16.0) / 30.0);
        assert_eq!(side.bytes_at(32, 8), 3.0);
        assert_eq!(side.bytes_at(0, 8), 0.0);
    }
}
