//! Where codes lie: a tile of 16 tokens and one KV head.
//!
//! # Bytes
//! A row of D codes of b bits takes D·b/8 bytes. A tile is all codes of keys and values, 16·D·(k + v)/8
//! bytes, then all n, in f16 or of keys in [parts](super::parts) four bytes each. Together 16·(D·(k + v)/8 +
//! 4): 100 bytes a token and KV head for 3 and 3 bits at D = 128, where f16 takes 512; of keys in parts 2
//! bytes more.
//!
//! # Words
//! Rows are cut into units: what one lane of a warp makes operands of. With g = lane / 4 and q = lane % 4 a
//! lane takes, of keys, unit q (of D/4 dimensions) of tokens g and g + 8; of values, unit g (of D/8
//! dimensions) of tokens 2q, 2q + 1, 2q + 8 and 2q + 9. Either way that is D/16 selectors: words of eight
//! codes in their nibbles, as `prmt` takes them. A token has bits of its own in every one of them: of keys
//! half of the word, four dimensions; of values a byte, two dimensions. So a token is written without
//! another's bits.
//!
//! Selectors of 4 bits are words as they are. Of 2 bits a word has two, one in the low bits of its nibbles
//! and one in the high ones. Of 3 bits three words have four: the fourth's three bits are bit 3 of the
//! nibbles of the three ([`selector`]). Keys in parts have as many words, in which bits are where
//! [`TileLayout::nibbles`] says.
//!
//! # Order
//! A lane's words of keys, then of values, are its record: D·(k + v)/64 words. The tile has the first four
//! words of all lanes, lane by lane, then the next four, and so on; of what is left, two words of all lanes,
//! then one. So a warp reads it front to back, 16 bytes a lane, and shared memory has no conflicts. For each
//! of the four q the n of its four tokens lie side by side, those of keys and then those of values; of keys
//! in parts, all those of values are behind all of keys.

use super::parts::PARTS;
use super::window::SlotLayout;
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

    /// Dimensions that a token has in a selector.
    #[inline(always)]
    pub const fn in_selector(self) -> u32 {
        match self {
            Side::Key => 4,
            Side::Value => 2,
        }
    }

    /// The lane whose record has unit `unit` of a token.
    #[inline(always)]
    const fn lane(self, token: u32, unit: u32) -> u32 {
        match self {
            Side::Key => (token & 7) * 4 + unit,
            Side::Value => unit * 4 + (token >> 1 & 3),
        }
    }

    /// The token's first byte in a word.
    #[inline(always)]
    const fn byte(self, token: u32) -> u32 {
        match self {
            Side::Key => 2 * (token >> 3),
            Side::Value => slot(token),
        }
    }
}

/// Which of the four tokens of values that a lane has it is: 2q, 2q + 1, 2q + 8 or 2q + 9.
#[inline(always)]
const fn slot(token: u32) -> u32 {
    (token & 1) + 2 * (token >> 3)
}

/// Selector `k` of those that `words` have from `first` on.
#[inline(always)]
pub const fn selector(bits: u32, words: &[u32; 16], first: usize, k: usize) -> u32 {
    match bits {
        4 => words[(first + k) % 16],
        3 => {
            let at = first + k / 4 * 3;
            if k % 4 < 3 {
                return words[(at + k % 4) % 16] & 0x7777_7777;
            }
            let [a, b, c] = [words[at % 16], words[(at + 1) % 16], words[(at + 2) % 16]];
            (a >> 3 & 0x1111_1111) | (b >> 2 & 0x2222_2222) | (c >> 1 & 0x4444_4444)
        }
        _ => words[(first + k / 2) % 16] >> (2 * (k as u32 % 2)) & 0x3333_3333,
    }
}

/// Word `w` of those that have the selectors.
#[inline(always)]
pub fn word(bits: u32, w: u32, selector: impl Fn(u32) -> u32) -> u32 {
    match bits {
        4 => selector(w),
        3 => {
            let (four, own) = (w / 3 * 4, w % 3);
            selector(four + own) | (selector(four + 3) >> own & 0x1111_1111) << 3
        }
        _ => selector(2 * w) | selector(2 * w + 1) << 2,
    }
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
    /// Bits of a code.
    #[inline(always)]
    pub const fn bits(self, side: Side) -> u32 {
        match side {
            Side::Key => self.key_bits,
            Side::Value => self.value_bits,
        }
    }

    /// Words that a lane has of keys or values.
    #[inline(always)]
    pub const fn words(self, side: Side) -> u32 {
        self.head_dim * self.bits(side) / 64
    }

    /// Words of a lane's record.
    #[inline(always)]
    pub const fn record(self) -> u32 {
        self.words(Side::Key) + self.words(Side::Value)
    }

    /// The first byte of word `w` of a lane's record.
    #[inline(always)]
    const fn place(self, lane: u32, w: u32) -> u32 {
        let all = self.record();
        let (fours, twos) = (all / 4 * 4, all / 2 * 2);
        if w < fours {
            512 * (w / 4) + 16 * lane + 4 * (w % 4)
        } else if w < twos {
            128 * fours + 8 * lane + 4 * (w % 2)
        } else {
            128 * twos + 4 * lane
        }
    }

    /// The first byte of a token's codes in word `w` of those that have its unit `unit`: of a key two bytes,
    /// of a value one.
    #[inline(always)]
    pub const fn column(self, side: Side, token: u32, unit: u32, w: u32) -> u32 {
        let first = match side {
            Side::Key => 0,
            Side::Value => self.words(Side::Key),
        };
        self.place(side.lane(token, unit), first + w) + side.byte(token)
    }

    /// Bytes of the n of a key or value.
    #[inline(always)]
    pub const fn norm_bytes(self, side: Side) -> u32 {
        match side {
            Side::Key if self.parted => PARTS as u32,
            _ => 2,
        }
    }

    /// Bytes of all codes; the n are behind them.
    #[inline(always)]
    pub const fn code_bytes(self) -> u32 {
        128 * self.record()
    }

    /// The first byte of a token's n.
    #[inline(always)]
    pub const fn norm(self, side: Side, token: u32) -> u32 {
        let q = token >> 1 & 3;
        let at = match side {
            Side::Key => 16 * q,
            Side::Value if self.parted => 64 + 8 * q,
            Side::Value => 16 * q + 8,
        };
        self.code_bytes() + at + self.norm_bytes(side) * slot(token)
    }

    /// Of keys in parts: the first of the two bytes with bits of four dimensions of each part, those from
    /// `4·half` on of unit `unit` (of D/16 dimensions of each part). `word` numbers the pairs of bytes.
    #[inline(always)]
    pub const fn nibbles(self, token: u32, unit: u32, word: u32, half: u32) -> u32 {
        let own = token >> 3;
        // A lane's word has eight dimensions of a token, or four of both.
        let (word, half) =
            if self.head_dim == 128 { (own * self.key_bits + word, half) } else { (word, own) };
        self.place(Side::Key.lane(token, unit), word) + 2 * half
    }

    /// Bytes of a tile, a multiple of 16.
    #[inline(always)]
    pub const fn bytes(self) -> u32 {
        self.code_bytes() + (self.norm_bytes(Side::Key) + self.norm_bytes(Side::Value)) * BLOCK_TOKENS
    }

    /// Where the same tokens' numbers lie in a window.
    #[inline(always)]
    pub const fn slot(self) -> SlotLayout {
        SlotLayout { head_dim: self.head_dim, parted: self.parted }
    }

    /// Bytes of a token and KV head.
    #[inline(always)]
    pub const fn token_bytes(self) -> u32 {
        self.bytes() / BLOCK_TOKENS
    }
}
