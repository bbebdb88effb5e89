//! A tile in shared memory, and how codes become operands of the tensor cores: in registers, by `prmt`.
//!
//! # Instructions
//! A selector word has eight codes in its nibbles; `prmt` takes four of them and picks four bytes of eight.
//! Keys' levels are bytes, so that four codes are one `prmt` (of 4 bits: one for the distance from the
//! middle, one that spreads the signs, one exclusive or). Values are f16: low bytes, high bytes, and two
//! `prmt` that pair them, two tokens a register.
//!
//! For a tile of 16 tokens at D = 128 a lane makes 32 registers of values (`prmt` 64, and 40 of `lop3`,
//! shifts and `prmt` to get the selectors of 3 bits) and 16 of keys (16, and 34).

use super::layout::{Side, TileLayout};
use glam::{UVec2, UVec4};
use simt::bits::byte_perm;
use simt::{Global, Shared, unroll};

/// The lowest bit of every nibble.
pub const ONE: u32 = 0x1111_1111;
/// The low two bits of every nibble.
pub const LOW: u32 = 0x3333_3333;
/// Bit 2 of every nibble.
pub const THIRD: u32 = 0x4444_4444;
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

/// Bit 2 of selectors, from bit `t` of the high plane's nibbles.
#[inline(always)]
fn third(plane: u32, t: usize) -> u32 {
    (if t < 2 { plane << (2 - t as u32) } else { plane >> (t as u32 - 2) }) & THIRD
}

impl<const D: usize, const K: u32, const V: u32, const PARTED: bool> Tile<D, K, V, PARTED> {
    const LAYOUT: TileLayout = TileLayout { head_dim: D as u32, key_bits: K, value_bits: V, parted: PARTED };
    /// Words of a tile.
    pub const WORDS: u32 = Self::LAYOUT.bytes() / 4;
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
        unroll!(for i in 0..(Self::CHUNKS.div_ceil(32) as usize), at_most 5 {
            let chunk = 32 * i as u32 + lane;
            if 32 * (i as u32 + 1) <= Self::CHUNKS || chunk < Self::CHUNKS {
                self.memory.copy_async_once(self.start + 4 * chunk, pool, from + 4 * chunk as usize);
            }
        });
    }

    /// `BYTES` bytes, up to 32, that a lane has of a part whose first byte is `part`.
    #[simt::device]
    fn own<const BYTES: u32>(self, part: u32, index: u32) -> [u32; 8] {
        let at = self.start + part / 4 + index * (BYTES.min(16) / 4);
        let mut words = [0u32; 8];
        match BYTES {
            4 => words[0] = self.memory.load(at),
            8 => [words[0], words[1]] = self.memory.load_vector::<UVec2>(at).to_array(),
            16 => [words[0], words[1], words[2], words[3]] = self.memory.load_vector::<UVec4>(at).to_array(),
            _ => {
                let low = self.memory.load_vector::<UVec4>(at).to_array();
                let high = self.memory.load_vector::<UVec4>(at + 32 * 4).to_array();
                words = [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]];
            }
        }
        words
    }

    /// The n of tokens 2q, 2q + 1, 2q + 8 and 2q + 9, two a word.
    #[simt::device]
    pub fn norms(self, side: Side, lane: u32) -> [u32; 2] {
        let at = self.start + Self::LAYOUT.norms(side) / 4 + 2 * (lane & 3);
        self.memory.load_vector::<UVec2>(at).to_array()
    }

    /// The bytes of the n of keys in parts: of the same tokens, a word each.
    #[simt::device]
    pub fn part_norms(self, lane: u32) -> [u32; 4] {
        let at = self.start + Self::LAYOUT.norms(Side::Key) / 4 + 4 * (lane & 3);
        self.memory.load_vector::<UVec4>(at).to_array()
    }

    /// Words of nibbles of keys in parts: of D = 128 those of tokens g and g + 8, else the first are those of
    /// both.
    #[simt::device]
    pub fn part_words(self, lane: u32) -> [[u32; 4]; 2] {
        let (low, high) = (Self::LAYOUT.low(Side::Key), Self::LAYOUT.high(Side::Key));
        let each = D / 64;
        let words = match each * K as usize {
            8 => self.own::<32>(low, lane),
            4 | 6 => self.own::<16>(low, lane),
            _ => self.own::<8>(low, lane),
        };
        let mut highs = [0u32; 8];
        if K == 3 {
            highs = if D == 128 { self.own::<8>(high, lane) } else { self.own::<4>(high, lane) };
        }
        let in_low = if K == 4 { 4 } else { 2 };
        let mut of_tokens = [[0u32; 4]; 2];
        unroll!(for j in 0..2 {
            unroll!(for w in 0..4 {
                if j < each && w < in_low {
                    of_tokens[j][w] = words[(j * in_low + w) % 8];
                }
            });
            if j < each && K == 3 {
                of_tokens[j][2] = highs[j];
            }
        });
        of_tokens
    }

    /// Selectors of keys: of tokens g and g + 8, a word for each 32 dimensions.
    #[simt::device]
    pub fn key_selectors(self, lane: u32) -> [[u32; 4]; 2] {
        let (low, high) = (Self::LAYOUT.low(Side::Key), Self::LAYOUT.high(Side::Key));
        let mut selectors = [[0u32; 4]; 2];
        if K == 4 {
            let words = if D == 128 { self.own::<32>(low, lane) } else { self.own::<16>(low, lane) };
            unroll!(for j in 0..2 {
                unroll!(for s in 0..4 {
                    if s < D / 32 {
                        selectors[j][s] = words[j * (D / 32) + s];
                    }
                });
            });
            return selectors;
        }
        let words = if D == 128 { self.own::<16>(low, lane) } else { self.own::<8>(low, lane) };
        let mut planes = [0u32; 2];
        if K == 3 && D == 128 {
            let both = self.own::<8>(high, lane);
            planes = [both[0], both[1]];
        } else if K == 3 {
            let [both, ..] = self.own::<4>(high, lane);
            // Dimensions 8 to 15 of the unit are two bits above dimensions 0 to 7.
            planes = [byte_perm(both, both >> 2, 0x5410), byte_perm(both, both >> 2, 0x7632)];
        }
        unroll!(for j in 0..2 {
            unroll!(for m in 0..2 {
                unroll!(for p in 0..2 {
                    if m < D / 64 {
                        let word = words[j * (D / 64) + m];
                        let own = (if p == 0 { word } else { word >> 2 }) & LOW;
                        selectors[j][2 * m + p] =
                            if K == 3 { own | third(planes[j], p + 2 * m) } else { own };
                    }
                });
            });
        });
        selectors
    }

    /// Operands of the values: of each output tile tokens 2q and 2q + 1, and 2q + 8 and 2q + 9.
    #[simt::device]
    pub fn value_operands(self, low: [u32; 2], high: [u32; 2], lane: u32) -> [[[u32; 2]; 8]; 2] {
        let selectors = self.value_selectors(lane);
        let mut operands = [[[0u32; 2]; 8]; 2];
        unroll!(for pair in 0..2 {
            unroll!(for m in 0..2 {
                unroll!(for p in 0..2 {
                    if m < D / 64 {
                        let [a, b, c, d] = value_pairs::<V>(selectors[pair][2 * m + p], low, high);
                        operands[m][p][pair] = a;
                        operands[m][p + 2][pair] = b;
                        operands[m][p + 4][pair] = c;
                        operands[m][p + 6][pair] = d;
                    }
                });
            });
        });
        operands
    }

    /// Selectors of values: of both pairs of tokens, a word for four dimensions of each token.
    #[simt::device]
    fn value_selectors(self, lane: u32) -> [[u32; 4]; 2] {
        let (low, high) = (Self::LAYOUT.low(Side::Value), Self::LAYOUT.high(Side::Value));
        let index = (lane & 3) * 8 + (lane >> 2);
        let mut selectors = [[0u32; 4]; 2];
        if V == 4 {
            let words = if D == 128 { self.own::<32>(low, index) } else { self.own::<16>(low, index) };
            unroll!(for pair in 0..2 {
                if D == 128 {
                    unroll!(for p in 0..2 {
                        let (a, b) = (words[4 * pair + p], words[4 * pair + 2 + p]);
                        selectors[pair][p] = byte_perm(a, b, 0x5140);
                        selectors[pair][2 + p] = byte_perm(a, b, 0x7362);
                    });
                } else {
                    let (a, b) = (words[2 * pair], words[2 * pair + 1]);
                    selectors[pair][0] = byte_perm(a, b, 0x5140);
                    selectors[pair][1] = byte_perm(a, b, 0x7362);
                }
            });
            return selectors;
        }
        let words = if D == 128 { self.own::<16>(low, index) } else { self.own::<8>(low, index) };
        let mut planes = [0u32; 2];
        if V == 3 && D == 128 {
            let both = self.own::<8>(high, index);
            planes = [byte_perm(both[0], 0, 0x3120), byte_perm(both[1], 0, 0x3120)];
        } else if V == 3 {
            let [all, ..] = self.own::<4>(high, index);
            planes = [byte_perm(all, all >> 2, 0x5410), byte_perm(all, all >> 2, 0x7632)];
        }
        unroll!(for pair in 0..2 {
            let merged = if D == 128 {
                let (a, b) = (words[2 * pair], words[2 * pair + 1]);
                [byte_perm(a, b, 0x5140), byte_perm(a, b, 0x7362)]
            } else {
                [byte_perm(words[pair], 0, 0x3120), 0]
            };
            unroll!(for m in 0..2 {
                unroll!(for p in 0..2 {
                    if m < D / 64 {
                        let own = (if p == 0 { merged[m] } else { merged[m] >> 2 }) & LOW;
                        selectors[pair][2 * m + p] =
                            if V == 3 { own | third(planes[pair], p + 2 * m) } else { own };
                    }
                });
            });
        });
        selectors
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

/// The four registers of a selector word of values: both tokens of dimensions 0, 2, 4 and 6 behind its own.
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
