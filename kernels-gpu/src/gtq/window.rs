//! The first and the most recent tokens in 16 bits: tiles that are read in place of their codes.
//!
//! # Mathematics
//! What is kept is the turned row, in the units of the codes, so that a step goes on with them as with codes.
//! Of a key, or of each of its [parts](super::parts), h is rounded to integers as a query is
//! ([`integers`](crate::attention::integers)), with m = max |h_d|; of a value to f16:
//!
//! ```text
//! k_d = round(h_d · 32512 / m)      n  = m / (32512·√D·step)      h ≈ k·n·√D·step
//! v_d = f16(h_d / (r·step'))        n' = r / √D                   h ≈ v·n'·√D·step'
//! ```
//!
//! A key's coordinate is off by half of m/32512, a value's by 2^−11 of itself; v is below 800. A row that is
//! not stored as codes is zeros here as well.
//!
//! # Layout
//! A slot is a tile of 16 tokens of a sequence and KV head: keys, values, then in f32 the n of keys, part by
//! part, and the n' of values. That is 4·D + 8 bytes a token, of keys in parts 4·D + 20. Of a key the
//! dimensions of unit 0 come first, which a lane of a warp has (see [`layout`](super::layout)): their high
//! bytes, then their low ones; then those of unit 1, and so on. Values are rows of f16.

use super::parts::PARTS;
use super::query::part_operand_of;
use crate::attention::integers::{integer, inverse_of};
use crate::attention::{BLOCK_TOKENS, Half, Window, warps};
use glam::{UVec2, UVec4, Vec2};
use half::f16;
use simt::math::{abs, fma, maximum};
use simt::tensor::mma_i8;
use simt::warp::{FULL_MASK, warp_reduce_max_u32, warp_shuffle_xor};
use simt::{Global, GlobalMut, bits, unroll};

/// Where numbers lie in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotLayout {
    /// D: 64 or 128.
    pub head_dim: u32,
    /// Whether keys are in [parts](super::parts).
    pub parted: bool,
}

impl SlotLayout {
    /// The n of a key.
    #[inline(always)]
    pub const fn scales(self) -> u32 {
        if self.parted { PARTS as u32 } else { 1 }
    }

    /// The byte that a token's dimension `d` has its high byte in; the low one is
    /// [`apart`](Self::apart) behind it.
    #[inline(always)]
    pub const fn key(self, token: u32, d: u32) -> u32 {
        let of_unit = self.head_dim / 4;
        let (unit, byte) = if self.parted {
            // The operand has twice as many: high and low bytes by turns.
            let (unit, byte) = part_operand_of(self.head_dim, d);
            let each = self.head_dim / 16;
            (unit, byte / (2 * each) * each + byte % each)
        } else {
            (d / of_unit, d % of_unit)
        };
        self.unit(token, unit) + byte
    }

    /// From a high byte to the low one.
    #[inline(always)]
    pub const fn apart(self) -> u32 {
        self.head_dim / 4
    }

    /// The first byte of a unit of a key.
    #[inline(always)]
    pub const fn unit(self, token: u32, unit: u32) -> u32 {
        2 * self.head_dim * token + self.head_dim / 2 * unit
    }

    /// The first byte of a value.
    #[inline(always)]
    pub const fn value(self, token: u32) -> u32 {
        2 * self.head_dim * (BLOCK_TOKENS + token)
    }

    /// The first byte of the n of a part of a key.
    #[inline(always)]
    pub const fn key_scale(self, token: u32, part: u32) -> u32 {
        self.value(BLOCK_TOKENS) + 4 * (BLOCK_TOKENS * part + token)
    }

    /// The first byte of a value's n'.
    #[inline(always)]
    pub const fn value_scale(self, token: u32) -> u32 {
        self.key_scale(token, self.scales())
    }

    /// Bytes of a slot, a multiple of 16.
    #[inline(always)]
    pub const fn bytes(self) -> u32 {
        self.value_scale(BLOCK_TOKENS)
    }

    /// Bytes of a token.
    #[inline(always)]
    pub const fn token_bytes(self) -> u32 {
        self.bytes() / BLOCK_TOKENS
    }
}

/// What a value's h is multiplied by; `unit` is 1/step'.
#[inline(always)]
pub fn inverse_of_value(r: f32, unit: f32) -> f32 {
    if r == 0.0 { 0.0 } else { unit / r }
}

/// Σ i·k of the sums over the keys' high bytes and over the low ones.
#[inline(always)]
pub fn product(high: i32, low: i32) -> f32 {
    fma(high as f32, 256.0, low as f32)
}

/// A slot in memory.
#[derive(Clone, Copy)]
pub(super) struct Slot<const D: usize, const PARTED: bool> {
    memory: Global<u32>,
    /// First word.
    start: usize,
}

impl<const D: usize, const PARTED: bool> Slot<D, PARTED> {
    const LAYOUT: SlotLayout = SlotLayout { head_dim: D as u32, parted: PARTED };

    /// Slot `slot` of the window in `memory`.
    #[inline(always)]
    pub fn at(memory: Global<u32>, slot: usize) -> Self {
        Slot { memory, start: slot * (Self::LAYOUT.bytes() / 4) as usize }
    }

    /// Asks the second-level cache for all of it, where `wanted`: one lane's work.
    #[simt::device]
    pub fn ask(self, wanted: bool) {
        self.memory.prefetch(self.start, Self::LAYOUT.bytes(), wanted);
    }

    /// The word `words` and a constant number of bytes into the slot: of a lane's loads one address, the
    /// others a constant from it.
    #[inline(always)]
    fn word(self, words: u32, bytes: u32) -> usize {
        self.start + words as usize + (bytes / 4) as usize
    }

    /// Σ i·k of query row g with tokens 2q, 2q + 1, 2q + 8 and 2q + 9, over `WORDS` words of high bytes that
    /// lanes have of a unit from byte `from` on: two words an operand, which `query` gives that of the query
    /// for.
    #[simt::device]
    pub fn products<const WORDS: usize>(
        self,
        from: u32,
        query: impl Fn(usize) -> [u32; 4],
        lane: u32,
    ) -> [f32; 4] {
        let (g, q) = (lane >> 2, lane & 3);
        let mut products = [0f32; 4];
        unroll!(for j in 0..2 {
            let mut sums = [[0i32; 4]; 2];
            unroll!(for plane in 0..2 {
                let more = Self::LAYOUT.unit(8 * j as u32, 0) + from + Self::LAYOUT.apart() * plane as u32;
                let at = self.word(Self::LAYOUT.unit(g, q) / 4, more);
                if WORDS == 1 {
                    let word = self.memory.load(at);
                    sums[plane] = mma_i8(query(0), [word, 0], sums[plane]);
                } else if WORDS == 2 {
                    let words = self.memory.load_vector::<UVec2>(at).to_array();
                    sums[plane] = mma_i8(query(0), words, sums[plane]);
                } else {
                    unroll!(for i in 0..(WORDS / 4), at_most 2 {
                        let [a, b, c, d] = self.memory.load_vector::<UVec4>(at + 4 * i).to_array();
                        sums[plane] = mma_i8(query(2 * i), [a, b], sums[plane]);
                        sums[plane] = mma_i8(query(2 * i + 1), [c, d], sums[plane]);
                    });
                }
            });
            unroll!(for i in 0..2 {
                let [high, low] = sums.map(|sums| 256 * sums[i] + sums[2 + i]);
                products[2 * j + i] = product(high, low);
            });
        });
        products
    }

    /// The n of part `p` of keys 2q, 2q + 1, 2q + 8 and 2q + 9; past the last part the n' of their values.
    #[simt::device]
    pub fn scales(self, p: u32, lane: u32) -> [f32; 4] {
        let first = self.word(2 * (lane & 3), Self::LAYOUT.key_scale(0, p));
        let [a, b] = self.memory.load_vector::<Vec2>(first).to_array();
        let [c, d] = self.memory.load_vector::<Vec2>(first + 8).to_array();
        [a, b, c, d]
    }

    /// The n' of those tokens' values.
    #[simt::device]
    pub fn value_scales(self, lane: u32) -> [f32; 4] {
        self.scales(Self::LAYOUT.scales(), lane)
    }

    /// Eight dimensions of unit g from dimension `8·i` of it on, of tokens 2q, 2q + 1, 2q + 8 and 2q + 9: a
    /// word has two.
    #[simt::device]
    pub fn values(self, i: u32, lane: u32) -> [[u32; 4]; 4] {
        let (g, q) = (lane >> 2, lane & 3);
        let words = q * D as u32 + g * (D as u32 / 16);
        [0, 1, 8, 9].map(|token| {
            let at = self.word(words, Self::LAYOUT.value(token) + 16 * i);
            self.memory.load_vector::<UVec4>(at).to_array()
        })
    }
}

/// Word `w` of four tokens' values as a first operand, like [`Tile`](super::operands::Tile)'s.
#[inline(always)]
pub(super) fn operand(tokens: [[u32; 4]; 4], w: usize) -> [u32; 4] {
    let [a, b, c, d] = tokens.map(|words| words[w % 4]);
    let pairs = |a: u32, b: u32| [bits::byte_perm(a, b, 0x5410), bits::byte_perm(a, b, 0x7632)];
    let ([first, second], [third, fourth]) = (pairs(a, b), pairs(c, d));
    [first, second, third, fourth]
}

/// A token's place in the window: where a warp writes.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub near: GlobalMut<u8>,
    pub slot: u32,
    pub layout: SlotLayout,
    pub token: u32,
}

impl Place {
    /// The first byte of the slot.
    #[inline(always)]
    fn start(self) -> usize {
        self.slot as usize * self.layout.bytes() as usize
    }

    /// A turned key, or zeros of one that does not fit; `STAGES` exchanges reach the lanes that were turned
    /// together. `units`: what makes n of m.
    #[simt::device]
    pub fn keep_key<const D: usize, const STAGES: usize>(
        self,
        h: [f32; 4],
        fits: bool,
        units: [f32; PARTS],
        lane: u32,
    ) {
        let Place { near, layout, token, .. } = self;
        let start = self.start();
        let mut largest = 0f32;
        unroll!(for i in 0..4 {
            if i < D / 32 {
                largest = maximum(largest, abs(h[i]));
            }
        });
        if STAGES == 5 {
            largest = largest_of_warp(largest);
        } else {
            unroll!(for stage in 0..STAGES, at_most 5 {
                largest = maximum(largest, warp_shuffle_xor(FULL_MASK, largest, 1 << stage, 32));
            });
        }
        // What is no number is 0 as an integer.
        let inverse = if fits { inverse_of(largest) } else { 0.0 };
        let [high, low] = byte_words(h.map(|h| integer(h, inverse)));
        let to = start + layout.key(token, lane * (D as u32 / 32)) as usize;
        if D == 128 {
            near.store_vector(to, high);
            near.store_vector(to + layout.apart() as usize, low);
        } else {
            near.store_vector(to, high as u16);
            near.store_vector(to + layout.apart() as usize, low as u16);
        }
        let lanes = 1 << STAGES as u32;
        if lane.is_multiple_of(lanes) {
            let part = lane / lanes;
            let pick = |a: usize, b: usize| if part & 1 == 0 { units[a] } else { units[b] };
            let unit = if part & 2 == 0 { pick(0, 1) } else { pick(2, 3) };
            let to = start + layout.key_scale(token, part) as usize;
            near.store_vector(to, if fits { largest * unit } else { 0.0 });
        }
    }

    /// A turned value of length `r`, or zeros where that is 0. `unit` is 1/step', `root` √D.
    #[simt::device]
    pub fn keep_value<const D: usize>(self, h: [f32; 4], r: f32, [unit, root]: [f32; 2], lane: u32) {
        let Place { near, layout, token, .. } = self;
        let start = self.start();
        let words = value_words(h, inverse_of_value(r, unit));
        // Of a row that does not fit h may be no number.
        let words = if r == 0.0 { [0; 2] } else { words };
        let to = start + layout.value(token) as usize + lane as usize * (D / 16);
        if D == 128 {
            near.store_vector(to, UVec2::from_array(words));
        } else {
            near.store_vector(to, words[0]);
        }
        if lane == 0 {
            near.store_vector(start + layout.value_scale(token) as usize, r / root);
        }
    }
}

/// A lane's integers as words of their bytes: high ones, then low ones, the first dimension lowest.
#[inline(always)]
pub(super) fn byte_words(integers: [i32; 4]) -> [u32; 2] {
    // Of an integer and 128 the second byte is the high one, and the first the low one and 128.
    let [a, b, c, d] = integers.map(|integer| (integer + 128) as u32);
    let [first, second] = [bits::byte_perm(a, b, 0x5140), bits::byte_perm(c, d, 0x5140)];
    [bits::byte_perm(first, second, 0x7632), bits::byte_perm(first, second, 0x5410) ^ 0x8080_8080]
}

/// The largest of all lanes' numbers, none of them negative. A NaN is larger than all.
#[simt::device]
pub(super) fn largest_of_warp(x: f32) -> f32 {
    // The bits of what is not negative are in the same order.
    f32::from_bits(warp_reduce_max_u32(FULL_MASK, x.to_bits()))
}

/// A lane's value as words.
#[inline(always)]
pub(super) fn value_words(h: [f32; 4], inverse: f32) -> [u32; 2] {
    let x = h.map(|h| h * inverse);
    [<f16 as Half>::pack(x[0], x[1]), <f16 as Half>::pack(x[2], x[3])]
}

/// A block's first tile, and the end of those that it reads from codes.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub first: u32,
    pub coded: u32,
}

impl Span {
    /// The first tile that warp `warp` may read from codes. A tile at the front is in the window though it is
    /// not recent: its warp takes it behind its codes.
    #[inline(always)]
    pub fn start<const D: usize>(self, window: Window, warp: u32) -> u32 {
        let front = self.first + warp;
        if front < window.sink && front < self.coded { front + warps(D as u32) } else { front }
    }

    /// The first of its tiles behind those.
    #[inline(always)]
    pub fn past<const D: usize>(self, window: Window, warp: u32) -> u32 {
        let start = self.start::<D>(window, warp);
        start + self.coded.saturating_sub(start).div_ceil(warps(D as u32)) * warps(D as u32)
    }
}
