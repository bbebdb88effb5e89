//! A tile in shared memory, and how codes become operands of the tensor cores: in registers, by `prmt`.
//!
//! # Instructions
//! A selector has eight codes in its nibbles; `prmt` takes four of them and picks four bytes of eight. Keys'
//! levels are bytes, so that four codes are one `prmt` (of 4 bits: one for the distance from the middle, one
//! that spreads the signs, one exclusive or). Values are f16: low bytes, high bytes, and two `prmt` that pair
//! them, two tokens a register.
//!
//! For a tile of 16 tokens at D = 128 a lane makes eight selectors of either, 18 instructions of 3 bits, and
//! of those 16 registers of keys (16 `prmt`, 8 shifts) and 32 of values (64, and 8).

use super::layout::{Side, TileLayout, selector};
use glam::{UVec2, UVec4};
use simt::bits::byte_perm;
use simt::{Global, Shared, unroll};

/// The lowest bit of every nibble.
pub const ONE: u32 = 0x1111_1111;
/// The low two bits of every nibble.
pub const LOW: u32 = 0x3333_3333;
/// Bit 2 of every nibble.
pub const THIRD: u32 = 0x4444_4444;
/// Bit 3 of every nibble.
pub const EIGHTHS: u32 = 0x8888_8888;
/// The distance from the middle in every nibble of a code of 4 bits.
pub const DISTANCE: u32 = 0x7777_7777;

/// A tile in shared memory. `K` and `V` are the bits of keys and values, `PARTED` says whether keys are in
/// [parts](super::parts).
#[derive(Clone, Copy)]
pub struct Tile<const D: usize, const K: u32, const V: u32, const PARTED: bool> {
    memory: Shared<u32>,
    /// First word.
    start: u32,
}

/// The n of a tile that a lane wants: of tokens 2q, 2q + 1, 2q + 8 and 2q + 9.
#[derive(Clone, Copy)]
pub struct Norms {
    /// Of keys, two in a word, or of keys in parts a word of four bytes each.
    pub keys: [u32; 4],
    /// Of values, two in a word.
    pub values: [u32; 2],
}

impl<const D: usize, const K: u32, const V: u32, const PARTED: bool> Tile<D, K, V, PARTED> {
    const LAYOUT: TileLayout = TileLayout { head_dim: D as u32, key_bits: K, value_bits: V, parted: PARTED };
    /// Words of a tile.
    pub const WORDS: u32 = Self::LAYOUT.bytes() / 4;
    /// Words of keys in a lane's record, and of both.
    const KEY_WORDS: usize = Self::LAYOUT.words(Side::Key) as usize;
    const RECORD: usize = Self::LAYOUT.record() as usize;
    /// Chunks of 16 bytes.
    const CHUNKS: u32 = Self::WORDS / 4;

    /// The tile at word `start` of `memory`.
    #[inline(always)]
    pub fn at(memory: Shared<u32>, start: u32) -> Self {
        Tile { memory, start }
    }

    /// Starts copying the tile at word `from` of the pool; a warp's work.
    #[simt::device]
    pub fn copy(self, pool: Global<u32>, from: usize, lane: u32) {
        // That no lane is beyond 31 is not said: of what is known then ptxas 13.0 makes copies whose
        // descriptor is no register, an illegal instruction.
        let (to, from) = (self.start + 4 * lane, from + 4 * lane as usize);
        unroll!(for i in 0..(Self::CHUNKS.div_ceil(32) as usize), at_most 5 {
            if 32 * (i as u32 + 1) <= Self::CHUNKS || 32 * i as u32 + lane < Self::CHUNKS {
                self.memory.copy_async(to + 128 * i as u32, pool, from + 128 * i);
            }
        });
    }

    /// A lane's words: of keys, then of values.
    #[simt::device]
    pub fn record(self, lane: u32) -> [u32; 16] {
        let mut words = [0u32; 16];
        unroll!(for i in 0..(Self::RECORD / 4), at_most 4 {
            let at = self.start + 128 * i as u32 + 4 * lane;
            let four = self.memory.load_vector::<UVec4>(at).to_array();
            unroll!(for w in 0..4 {
                words[4 * i + w] = four[w];
            });
        });
        let fours = Self::RECORD / 4 * 4;
        if Self::RECORD % 4 >= 2 {
            let at = self.start + 32 * fours as u32 + 2 * lane;
            [words[fours % 16], words[(fours + 1) % 16]] = self.memory.load_vector::<UVec2>(at).to_array();
        }
        if Self::RECORD % 2 == 1 {
            let last = Self::RECORD - 1;
            words[last % 16] = self.memory.load(self.start + 32 * last as u32 + lane);
        }
        words
    }

    /// A lane's n.
    #[simt::device]
    pub fn norms(self, lane: u32) -> Norms {
        let at = self.start + 32 * Self::RECORD as u32;
        let own: [u32; 4] = self.memory.load_vector::<UVec4>(at + 4 * (lane & 3)).to_array();
        if PARTED {
            let values = self.memory.load_vector::<UVec2>(at + 16 + 2 * (lane & 3)).to_array();
            return Norms { keys: own, values };
        }
        Norms { keys: [own[0], own[1], 0, 0], values: [own[2], own[3]] }
    }

    /// The two words of keys' bytes, of tokens g and g + 8, that selector `k` is.
    #[inline(always)]
    pub fn key_bytes(record: &[u32; 16], k: usize, table: [u32; 2]) -> [u32; 2] {
        key_bytes::<K>(selector(K, record, 0, k), table)
    }

    /// Words of keys in parts: of D = 128 those of tokens g and g + 8, else the first are those of both.
    #[inline(always)]
    pub fn part_words(record: &[u32; 16]) -> [[u32; 4]; 2] {
        let mut of_tokens = [[0u32; 4]; 2];
        unroll!(for j in 0..2 {
            unroll!(for w in 0..4 {
                if j < D / 64 && w < K as usize {
                    of_tokens[j][w] = record[j * K as usize + w];
                }
            });
        });
        of_tokens
    }

    /// Values of dimensions 2t and 2t + 1 of unit g as a first operand: of both tokens 2q and 2q + 1, then of
    /// tokens 2q + 8 and 2q + 9.
    #[inline(always)]
    pub fn values(record: &[u32; 16], t: usize, low: [u32; 2], high: [u32; 2]) -> [u32; 4] {
        value_pairs::<V>(selector(V, record, Self::KEY_WORDS, t), low, high)
    }
}

/// The two words of keys' bytes that a selector word is.
#[inline(always)]
pub fn key_bytes<const K: u32>(selector: u32, table: [u32; 2]) -> [u32; 2] {
    if K < 4 {
        return [byte_perm(table[0], table[1], selector), byte_perm(table[0], table[1], selector >> 16)];
    }
    let (distances, up) = (selector & DISTANCE, selector << 4);
    let of = |distances: u32, signs: u32| {
        byte_perm(table[0], table[1], distances) ^ byte_perm(selector, up, signs)
    };
    [of(distances, 0x9d8c), of(distances >> 16, 0xbfae)]
}

/// The four registers of a selector of values: two tokens' first dimension, their second, and the same of the
/// other two.
#[inline(always)]
fn value_pairs<const V: u32>(selector: u32, low: [u32; 2], high: [u32; 2]) -> [u32; 4] {
    let own = if V == 4 { selector & DISTANCE } else { selector };
    let up = selector << 4;
    let of = |own: u32, signs: u32| {
        let lows = byte_perm(low[0], low[1], own);
        let mut highs = byte_perm(high[0], high[1], own);
        if V == 4 {
            highs ^= byte_perm(selector, up, signs) & 0x8080_8080;
        }
        [byte_perm(lows, highs, 0x6240), byte_perm(lows, highs, 0x7351)]
    };
    let ([a, b], [c, d]) = (of(own, 0x9d8c), of(own >> 16, 0xbfae));
    [a, b, c, d]
}
