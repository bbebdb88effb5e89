//! Where codes lie: a tile of 16 tokens and one KV head.
//!
//! # Bytes
//! A row of D codes of b bits takes D·b/8 bytes. Codes of 3 bits are a plane of their two low bits and a
//! plane of their high bit; codes of 4 bits are nibbles. A tile is, one behind the other:
//!
//! | part | bytes | at D = 128, 3 bits |
//! |---|---|---|
//! | keys' low plane (2 bits, or nibbles) | 16·D/4 or 16·D/2 | 512 |
//! | keys' high plane (3 bits only) | 16·D/8 | 256 |
//! | values' low plane | as the keys' | 512 |
//! | values' high plane | as the keys' | 256 |
//! | keys' n, f16, or of [parts](super::parts) four bytes | 32 or 64 | 32 |
//! | values' n, f16 | 32 | 32 |
//!
//! Together 16·(D·(k + v)/8 + 4): 100 bytes a token and KV head for 3 and 3 bits at D = 128, where f16 takes
//! 512; of keys in parts 2 bytes more.
//!
//! # Order
//! Rows are cut into units: what one lane of a warp makes operands of. With g = lane / 4 and q = lane % 4 a
//! lane takes, of keys, unit q (of D/4 dimensions) of tokens g and g + 8; of values, unit g (of D/8
//! dimensions) of tokens 2q, 2q + 1, 2q + 8 and 2q + 9. A plane has what a lane takes side by side, lane by
//! lane, so that a warp reads it front to back (of 32 bytes, the halves in two passes). In a unit, codes are
//! where [`low_bit`] and [`high_bit`] say: a word, masked, is then eight selectors of `prmt`. Of keys in
//! parts a lane has as many bytes, in which bits are where [`TileLayout::nibbles`] says.

use super::parts::PARTS;
use crate::attention::BLOCK_TOKENS;

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Units of a quarter of a row.
    Key,
    /// Units of an eighth.
    Value,
}

impl Side {
    /// Dimensions of a unit.
    #[inline(always)]
    pub const fn unit_dims(self, head_dim: u32) -> u32 {
        match self {
            Side::Key => head_dim / 4,
            Side::Value => head_dim / 8,
        }
    }

    /// Where unit `unit` of token `token` of a tile is, in units. `wide`: what a lane takes is 32 bytes, of
    /// which the second half is behind all lanes' first one.
    #[inline(always)]
    pub const fn unit_place(self, wide: bool, token: u32, unit: u32) -> u32 {
        let (lane, each, own) = match self {
            Side::Key => ((token & 7) * 4 + unit, 2, token >> 3),
            Side::Value => ((token >> 1 & 3) * 8 + unit, 4, slot(token)),
        };
        let first = if wide { each / 2 } else { each };
        own / first * 32 * first + lane * first + own % first
    }
}

/// Which of a lane's four tokens it is: 2q, 2q + 1, 2q + 8 or 2q + 9.
#[inline(always)]
const fn slot(token: u32) -> u32 {
    (token & 1) + 2 * (token >> 3)
}

/// Where a token's n is among the 16 of a tile: a lane's four tokens side by side.
#[inline(always)]
pub const fn norm_place(token: u32) -> u32 {
    4 * (token >> 1 & 3) + slot(token)
}

/// Bits of a code in the low plane, or of as many as a part's codes have on average.
#[inline(always)]
pub const fn low_bits(bits: u32) -> u32 {
    if bits == 4 { 4 } else { 2 }
}

/// The first bit of dimension `d`'s code in a unit's low plane.
#[inline(always)]
pub const fn low_bit(bits: u32, unit_dims: u32, d: u32) -> u32 {
    if bits != 4 {
        2 * d
    } else if unit_dims == 8 {
        16 * (d & 1) + 4 * (d >> 1)
    } else {
        32 * (2 * (d >> 4) + (d & 1)) + 4 * ((d & 15) >> 1)
    }
}

/// The bit of dimension `d`'s code in a unit's high plane.
#[inline(always)]
pub const fn high_bit(unit_dims: u32, d: u32) -> u32 {
    let half = unit_dims / 2;
    4 * ((d & (half - 1)) >> 1) + (d & 1) + if d >= half { 2 } else { 0 }
}

/// A code as it is stored: from 4 bits on a sign and the distance from the middle, else as it is.
#[inline(always)]
pub const fn stored(bits: u32, code: u32) -> u32 {
    let half = 1 << bits >> 1;
    if bits < 4 {
        code
    } else if code < half {
        2 * half - 1 - code
    } else {
        code - half
    }
}

/// The parts of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileLayout {
    /// D: 64 or 128.
    pub head_dim: u32,
    /// Bits of a key's code: 2, 3 or 4.
    pub key_bits: u32,
    /// Bits of a value's code: 2, 3 or 4.
    pub value_bits: u32,
    /// Whether keys are in [parts](super::parts), whose codes have `key_bits` on average.
    pub parted: bool,
}

impl TileLayout {
    /// Bytes of the low planes of keys or values.
    #[inline(always)]
    const fn low_bytes(self, bits: u32) -> u32 {
        BLOCK_TOKENS * self.head_dim * low_bits(bits) / 8
    }

    /// Bytes of the high planes.
    #[inline(always)]
    const fn high_bytes(self, bits: u32) -> u32 {
        if bits == 3 { BLOCK_TOKENS * self.head_dim / 8 } else { 0 }
    }

    /// Whether a lane's codes are 32 bytes: [`Side::unit_place`].
    #[inline(always)]
    pub const fn wide(self, side: Side) -> bool {
        self.head_dim == 128 && self.bits(side) == 4
    }

    /// Bits of a code.
    #[inline(always)]
    pub const fn bits(self, side: Side) -> u32 {
        match side {
            Side::Key => self.key_bits,
            Side::Value => self.value_bits,
        }
    }

    /// The first byte of a low plane.
    #[inline(always)]
    pub const fn low(self, side: Side) -> u32 {
        match side {
            Side::Key => 0,
            Side::Value => self.low_bytes(self.key_bits) + self.high_bytes(self.key_bits),
        }
    }

    /// The first byte of a high plane.
    #[inline(always)]
    pub const fn high(self, side: Side) -> u32 {
        self.low(side) + self.low_bytes(self.bits(side))
    }

    /// Bytes of the n of a key or value.
    #[inline(always)]
    pub const fn norm_bytes(self, side: Side) -> u32 {
        match side {
            Side::Key if self.parted => PARTS as u32,
            _ => 2,
        }
    }

    /// The first byte of the sixteen n.
    #[inline(always)]
    pub const fn norms(self, side: Side) -> u32 {
        let end = self.high(Side::Value) + self.high_bytes(self.value_bits);
        match side {
            Side::Key => end,
            Side::Value => end + self.norm_bytes(Side::Key) * BLOCK_TOKENS,
        }
    }

    /// The first byte of a token's n.
    #[inline(always)]
    pub const fn norm(self, side: Side, token: u32) -> u32 {
        self.norms(side) + self.norm_bytes(side) * norm_place(token)
    }

    /// Of keys in parts: the first of the two bytes with bits of four dimensions of each part, those from
    /// `4·half` on of unit `unit` (of D/16 dimensions of each part). `word` numbers the pairs of bytes.
    #[inline(always)]
    pub const fn nibbles(self, token: u32, unit: u32, word: u32, half: u32) -> u32 {
        let (lane, own) = ((token & 7) * 4 + unit, token >> 3);
        // A lane's word has eight dimensions of a token, or four of both.
        let (tokens, half) = if self.head_dim == 128 { (2, half) } else { (1, own) };
        let own = if tokens == 2 { own } else { 0 };
        let at = if self.key_bits == 3 && word == 2 {
            self.high(Side::Key) + 4 * (lane * tokens + own)
        } else if self.wide(Side::Key) {
            // What a lane takes is 32 bytes, the second token's behind all lanes' first one.
            512 * own + 16 * lane + 4 * word
        } else {
            let words = if self.key_bits == 3 { 2 } else { self.key_bits };
            4 * (words * (lane * tokens + own) + word)
        };
        at + 2 * half
    }

    /// Bytes of a tile, a multiple of 16.
    #[inline(always)]
    pub const fn bytes(self) -> u32 {
        self.norms(Side::Value) + self.norm_bytes(Side::Value) * BLOCK_TOKENS
    }

    /// Bytes of a token and KV head.
    #[inline(always)]
    pub const fn token_bytes(self) -> u32 {
        self.bytes() / BLOCK_TOKENS
    }
}
