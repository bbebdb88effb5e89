//! How large a cache is.

use super::{BLOCK_TOKENS, CacheError, Geometry, Scratch};
use kernels_gpu::certified::{CacheShape, write_launch};
use std::fmt;

/// Blocks that a prefill fills at once, on the GPU.
const STAGED_BLOCKS: u32 = 32;

/// What a cache is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extents {
    /// KV heads and their channels, and the layout that they are stored in.
    pub geometry: Geometry,
    /// Blocks of 16 tokens, of all sequences together.
    pub blocks: u32,
    /// Sequences that there may be at once.
    pub sequences: u32,
    /// Tokens that a sequence may grow to.
    pub max_tokens: u32,
    /// Original keys that are kept on the GPU after use: slots of one block of one KV head. May be 0.
    pub key_slots: u32,
    /// The same for values.
    pub value_slots: u32,
}

impl Extents {
    /// How much is near, if the extents can be numbered.
    pub(super) fn checked(self) -> Result<Scratch, CacheError> {
        let refuse = |problem: &str| CacheError::Extents { extents: self, problem: problem.to_string() };
        let Extents { geometry, blocks, sequences, max_tokens, key_slots, value_slots } = self;
        if blocks == 0 || sequences == 0 || max_tokens == 0 {
            return Err(refuse("blocks, sequences and tokens start from 1"));
        }
        // Kernels number pairs, tiles, table entries and tokens in 32 bits.
        const MOST: u64 = 1 << 31;
        let kv_heads = u64::from(geometry.kv_heads());
        let fresh = (u64::from(sequences) + u64::from(STAGED_BLOCKS)) * kv_heads;
        let entries = u64::from(sequences) * u64::from(max_tokens.div_ceil(BLOCK_TOKENS));
        let near = u64::from(key_slots) + u64::from(value_slots) + 2 * fresh;
        if u64::from(blocks) * kv_heads >= MOST
            || entries >= MOST
            || near >= MOST
            || u64::from(max_tokens) >= MOST
        {
            return Err(refuse("32 bits do not number its blocks, slots or tokens; make it smaller"));
        }
        if write_launch(geometry.layout(), geometry.kv_heads(), self.jobs()).is_none() {
            return Err(refuse("one launch does not reach all sequences; make it for fewer"));
        }
        Ok(Scratch { key_slots, value_slots, fresh: fresh as u32, admits: 1 })
    }

    /// Jobs of one launch.
    pub(super) fn jobs(self) -> u32 {
        self.sequences.max(STAGED_BLOCKS)
    }

    /// The fresh block from which on a prefill fills, and how many there are.
    pub(super) fn staged(self) -> (u32, u32) {
        (self.sequences, STAGED_BLOCKS)
    }

    pub(super) fn shape(self) -> CacheShape {
        CacheShape {
            kv_heads: self.geometry.kv_heads(),
            head_dim: self.geometry.head_dim(),
            max_blocks: self.max_tokens.div_ceil(BLOCK_TOKENS),
            resident: 0,
        }
    }

    /// Elements of a token: keys, or values.
    pub(super) fn token_elements(self) -> usize {
        self.geometry.kv_heads() as usize * self.geometry.head_dim() as usize
    }
}

impl fmt::Display for Extents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Extents { geometry, blocks, sequences, max_tokens, key_slots, value_slots } = self;
        write!(
            f,
            "{blocks} blocks for {sequences} sequences of up to {max_tokens} tokens, {geometry}, with {key_slots} \
             slots for keys and {value_slots} for values"
        )
    }
}

/// Bytes of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Quantized blocks.
    pub tiles: usize,
    /// Their error bounds.
    pub annotations: usize,
    /// Original keys kept on the GPU.
    pub scratch_keys: usize,
    /// Original values kept on the GPU.
    pub scratch_values: usize,
    /// Blocks that are being filled: one a sequence, and those of prefill.
    pub fresh: usize,
    /// Claims and tags of the scratch.
    pub directory: usize,
    /// Block table, lengths and limits.
    pub tables: usize,
    /// Jobs, and what was found.
    pub work: usize,
    /// Page-locked host memory: the originals.
    pub host: usize,
}

impl Memory {
    /// All bytes on the GPU.
    pub fn gpu(self) -> usize {
        let Memory {
            tiles,
            annotations,
            scratch_keys,
            scratch_values,
            fresh,
            directory,
            tables,
            work,
            host: _,
        } = self;
        tiles + annotations + scratch_keys + scratch_values + fresh + directory + tables + work
    }
}
