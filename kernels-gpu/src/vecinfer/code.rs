//! What a code is, and where it lies.
//!
//! # Layout
//! The codes of 16 tokens (a tile) of a KV head lie as the lanes of a warp want them as operands of the
//! tensor cores. With `g = lane / 4` and `j = lane % 4`, and units of max(d, 4) channels (one sub-vector, or
//! two of d = 2), a lane has
//!
//! ```text
//! keys     units 4s + j of tokens g and g + 8,                      s = 0, 1, …
//! values   units 8p + g of tokens 2j, 2j + 1, 2j + 8 and 2j + 9,    p = 0, 1, …
//! ```
//!
//! D / 2d codes either way, its slots: keys (s, token), values (p, token), the second the faster, sub-vectors
//! of a unit the fastest. The low eight bits of a lane's codes are a run of bytes, lane by lane; of b > 8 the
//! other b − 8 bits follow behind, likewise a run by lane, low bits first. So a lane reads whole words, and a
//! tile has no bit that is not a code's:
//!
//! | bytes of a tile, D = 128 | low | high | bits a channel |
//! |---|---|---|---|
//! | d = 2, b = 8 | 1,024 | 0 | 4 |
//! | d = 4, b = 12 | 512 | 256 | 3 |
//! | d = 4, b = 10 | 512 | 128 | 2.5 |
//! | d = 4, b = 8 | 512 | 0 | 2 |
//! | d = 8, b = 12 | 256 | 128 | 1.5 |
//! | d = 8, b = 10 | 256 | 64 | 1.25 |
//! | d = 8, b = 8 | 256 | 0 | 1 |

use crate::attention::BLOCK_TOKENS;

/// Sub-vectors of `d` channels in codes of `bits` bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Code {
    /// Channels of a sub-vector: 2, 4 or 8.
    pub d: u32,
    /// Bits of a code: 8, 10 or 12.
    pub bits: u32,
}

/// Whether keys or values: their tiles lie differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Keys.
    Key,
    /// Values.
    Value,
}

/// Those that there are, by falling bits a channel.
pub const CODES: [Code; 7] = [
    Code { d: 2, bits: 8 },
    Code { d: 4, bits: 12 },
    Code { d: 4, bits: 10 },
    Code { d: 4, bits: 8 },
    Code { d: 8, bits: 12 },
    Code { d: 8, bits: 10 },
    Code { d: 8, bits: 8 },
];

impl Code {
    /// As a constant of a kernel's instance names it: `100·d + bits`.
    #[inline(always)]
    pub const fn of(number: u32) -> Self {
        Code { d: number / 100, bits: number % 100 }
    }

    /// The number that [`of`](Self::of) takes.
    pub const fn number(self) -> u32 {
        100 * self.d + self.bits
    }

    /// Whether centroids of keys are whole numbers of −127 to 127, which the tensor cores multiply as bytes:
    /// those of four channels are a register. The transformation of keys and queries has their scale.
    #[inline(always)]
    pub const fn whole_keys(self) -> bool {
        self.d >= 4
    }

    /// Whether centroids of values are whole multiples, −127 to 127, of a step: bytes in shared memory, where
    /// a codebook that is not repeated in all banks is what attention waits for. Where it is, f16 is faster.
    #[inline(always)]
    pub const fn whole_values(self) -> bool {
        self.bits > 8
    }

    /// Bytes of a codebook as attention reads it: centroids one after another, in bytes if they are whole
    /// (values with 128 added), else in f16; behind whole values 16 bytes of their step s: s twice, then
    /// −1152·s twice, in f16.
    #[inline(always)]
    pub const fn fetched_bytes(self, keys: bool) -> u32 {
        let whole = if keys { self.whole_keys() } else { self.whole_values() };
        let step = if whole && !keys { 16 } else { 0 };
        if whole { self.book_elements() + step } else { 2 * self.book_elements() }
    }

    /// Centroids of a codebook.
    #[inline(always)]
    pub const fn centroids(self) -> u32 {
        1 << self.bits
    }

    /// Elements of a codebook.
    #[inline(always)]
    pub const fn book_elements(self) -> u32 {
        self.d << self.bits
    }

    /// Floats that go with a codebook: ½‖c‖² of each centroid, the largest of these, the largest |c_i| as
    /// [`Nearest::largest`](super::Nearest::largest) has it, and two that are 0.
    #[inline(always)]
    pub const fn norm_floats(self) -> u32 {
        self.centroids() + 4
    }

    /// Sub-vectors of a head.
    #[inline(always)]
    pub const fn parts(self, head_dim: u32) -> u32 {
        head_dim / self.d
    }

    /// Channels of a unit.
    #[inline(always)]
    pub const fn unit(self) -> u32 {
        if self.d < 4 { 4 } else { self.d }
    }

    /// Whether codes of a head lie as they should: the eight units of values that lanes have at a time are
    /// whole, and so are bytes of the bits above the eighth. Of head_dim 96 that is not so of d = 8.
    pub const fn fits(self, head_dim: u32) -> bool {
        head_dim.is_multiple_of(8 * self.unit()) && (self.slots(head_dim) * (self.bits - 8)).is_multiple_of(8)
    }

    /// Codes of a tile that a lane has.
    #[inline(always)]
    pub const fn slots(self, head_dim: u32) -> u32 {
        BLOCK_TOKENS * self.parts(head_dim) / 32
    }

    /// Bytes of a lane's low bits.
    #[inline(always)]
    pub const fn low_bytes(self, head_dim: u32) -> u32 {
        self.slots(head_dim)
    }

    /// Bytes of a lane's high bits.
    #[inline(always)]
    pub const fn high_bytes(self, head_dim: u32) -> u32 {
        self.slots(head_dim) * (self.bits - 8) / 8
    }

    /// Bytes of a tile.
    #[inline(always)]
    pub const fn tile_bytes(self, head_dim: u32) -> u32 {
        32 * (self.low_bytes(head_dim) + self.high_bytes(head_dim))
    }

    /// Lane and slot of the code of sub-vector `part` of token `token` of a tile.
    #[inline(always)]
    pub const fn place(self, kind: Kind, token: u32, part: u32) -> (u32, u32) {
        let of_unit = self.unit() / self.d;
        let (unit, sub) = (part / of_unit, part % of_unit);
        match kind {
            Kind::Key => {
                let lane = 4 * (token % 8) + unit % 4;
                (lane, (2 * (unit / 4) + token / 8) * of_unit + sub)
            }
            Kind::Value => {
                let lane = 4 * (unit % 8) + token % 8 / 2;
                (lane, (4 * (unit / 8) + 2 * (token / 8) + token % 2) * of_unit + sub)
            }
        }
    }

    /// Token of the tile and sub-vector of a lane's slot: undoes [`place`](Self::place).
    #[inline(always)]
    pub const fn owner(self, kind: Kind, lane: u32, slot: u32) -> (u32, u32) {
        let of_unit = self.unit() / self.d;
        let (of_lane, sub) = (slot / of_unit, slot % of_unit);
        let (g, j) = (lane / 4, lane % 4);
        match kind {
            Kind::Key => (8 * (of_lane % 2) + g, (4 * (of_lane / 2) + j) * of_unit + sub),
            Kind::Value => {
                (8 * (of_lane / 2 % 2) + 2 * j + of_lane % 2, (8 * (of_lane / 4) + g) * of_unit + sub)
            }
        }
    }

    /// The code at `(lane, slot)` of a tile's bytes.
    #[inline(always)]
    pub fn read(self, head_dim: u32, tile: &[u8], (lane, slot): (u32, u32)) -> u32 {
        let index = lane * self.slots(head_dim) + slot;
        let low = tile[index as usize] as u32;
        if self.bits == 8 {
            return low;
        }
        let (more, first) = (self.bits - 8, 32 * self.low_bytes(head_dim));
        let high = tile[(first + index * more / 8) as usize] as u32;
        low | (high >> (index * more % 8) & ((1 << more) - 1)) << 8
    }

    /// The token and the word bits of a code that word `word` of a tile has a part of; `index` counts the
    /// parts of a word: its codes' low bytes, or their high bits. Past the last part it is `None`.
    #[inline(always)]
    pub const fn part_of_word(self, kind: Kind, head_dim: u32, word: u32, index: u32) -> Option<Part> {
        let low_words = 8 * self.low_bytes(head_dim);
        let more = self.bits - 8;
        let (each, from, place) = if word < low_words {
            (8, 0, 4 * word + index)
        } else if more == 0 {
            return None;
        } else {
            (more, 8, (word - low_words) * (32 / more) + index)
        };
        if index >= 32 / each {
            return None;
        }
        let slots = self.slots(head_dim);
        let (token, part) = self.owner(kind, place / slots, place % slots);
        Some(Part { token, part, from, bits: each, at: index * each })
    }
}

/// A part of a code in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Token of the tile.
    pub token: u32,
    /// Sub-vector.
    pub part: u32,
    /// First bit of the code that is here.
    pub from: u32,
    /// How many bits are.
    pub bits: u32,
    /// Where in the word.
    pub at: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_place_of_its_own_and_every_bit_a_code() {
        for code in CODES {
            for head_dim in [64, 96, 128, 256].into_iter().filter(|dim| code.fits(*dim)) {
                for kind in [Kind::Key, Kind::Value] {
                    let mut owned = vec![0u32; code.tile_bytes(head_dim) as usize / 4];
                    for (word, owned) in owned.iter_mut().enumerate() {
                        let mut index = 0;
                        while let Some(part) = code.part_of_word(kind, head_dim, word as u32, index) {
                            let mask = (((1u64 << part.bits) - 1) << part.at) as u32;
                            assert_eq!(*owned & mask, 0);
                            *owned |= mask;
                            index += 1;
                        }
                    }
                    assert!(owned.iter().all(|bits| *bits == u32::MAX), "{code:?} {head_dim} {kind:?}");
                    assert_eq!(code.tile_bytes(head_dim) * 8, 16 * code.parts(head_dim) * code.bits);
                    for token in 0..16 {
                        for part in 0..code.parts(head_dim) {
                            let (lane, slot) = code.place(kind, token, part);
                            assert!(lane < 32 && slot < code.slots(head_dim));
                            assert_eq!(code.owner(kind, lane, slot), (token, part));
                        }
                    }
                }
            }
        }
    }
}
