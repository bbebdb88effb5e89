//! Where codes lie: a block of memory for G tokens of a sequence and KV head.
//!
//! # Bytes
//! A group's block has s of all channels of keys, then z of them, 4·D bytes; then for each tile of 16 tokens
//! codes of keys, 2·D·k bytes, codes of values, 2·D·v, and s and z of values, 64·D/G. Together
//! D·(k + v)/8 + 8·D/G bytes a token: of k = v = 2, D = 128 and G = 32, 96, where f16 takes 512.
//!
//! # Words
//! Tiles are what a warp takes at a time, and words what its lanes make operands of; g = lane / 4, q = lane %
//! 4. A word of 32 bits has 16/b *pairs* of codes: pair m has its first code at bit b·m and its second one at
//! 16 + b·m, so that both come out in the two halves of a register.
//!
//! Of keys a pair are two neighbouring channels of a token. A lane has tokens g and g + 8, and of each the
//! chunks of eight channels 4·i + q, as the keys' operands want them: 4/b chunks a word.
//!
//! Of values a pair is one channel of two neighbouring tokens. A lane has D/8 neighbouring channels from
//! D/8·g on, of tokens 2q, 2q + 1 and 2q + 8, 2q + 9: 16/b channels of the first two a word, then the same of
//! the other two. Their s and z lie in words of two tokens as well: s and z of the first two tokens, s and z
//! of the other two, for each group of channels and q.
//!
//! A lane's words are neighbours up to four; the tile has the first four of all lanes, lane by lane, then the
//! next: it is read front to back, 16 bytes a lane.

use crate::attention::{BLOCK_TOKENS, ROWS};
use simt::{Pod, Zeroable, bits};

/// The most tokens, and channels, of a group.
pub const MOST_GROUP: u32 = 128;

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// By channel.
    Key,
    /// By token.
    Value,
}

/// Where a code is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The lane that has it.
    pub lane: u32,
    /// Which of the lane's words of the side.
    pub word: u32,
    /// Its first bit.
    pub bit: u32,
}

/// The parts of a group's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Layout {
    /// D: 64 or 128.
    pub head_dim: u32,
    /// Bits of a key's code: 2 or 4.
    pub key_bits: u32,
    /// Bits of a value's code: 2 or 4.
    pub value_bits: u32,
    /// G: 32, 64 or 128, and no more than D.
    pub group: u32,
}

impl Layout {
    /// How many whole groups so many tokens, or channels, are: G is a power of two.
    #[inline(always)]
    pub const fn whole(self, n: u32) -> u32 {
        n >> self.group.trailing_zeros()
    }

    /// Bits of a code.
    #[inline(always)]
    pub const fn bits(self, side: Side) -> u32 {
        match side {
            Side::Key => self.key_bits,
            Side::Value => self.value_bits,
        }
    }

    /// Words that a lane has of a tile's keys or values.
    #[inline(always)]
    pub const fn words(self, side: Side) -> u32 {
        self.head_dim * self.bits(side) / 64
    }

    /// Words of s and z of a tile's values.
    #[inline(always)]
    pub const fn value_scales(self) -> u32 {
        BLOCK_TOKENS * self.whole(self.head_dim)
    }

    /// Words of a tile, a multiple of 4.
    #[inline(always)]
    pub const fn tile_words(self) -> u32 {
        32 * (self.words(Side::Key) + self.words(Side::Value)) + self.value_scales()
    }

    /// Tiles of a group.
    #[inline(always)]
    pub const fn tiles(self) -> u32 {
        self.group / BLOCK_TOKENS
    }

    /// Words of a group's block: s and z of the keys' channels, then tiles.
    #[inline(always)]
    pub const fn group_words(self) -> u32 {
        self.head_dim + self.tiles() * self.tile_words()
    }

    /// The first word of a tile's codes, within the tile.
    #[inline(always)]
    pub const fn first(self, side: Side) -> u32 {
        match side {
            Side::Key => 0,
            Side::Value => 32 * self.words(Side::Key),
        }
    }

    /// The word of a lane's word `w`, within the tile.
    #[inline(always)]
    pub const fn word(self, side: Side, lane: u32, w: u32) -> u32 {
        let all = self.words(side);
        self.first(side) + if all == 2 { 2 * lane + w } else { 128 * (w / 4) + 4 * lane + w % 4 }
    }

    /// The word with s of a value's channel group, within the tile; z is in the next word. In either the half
    /// `token % 2`.
    #[inline(always)]
    pub const fn value_scale(self, token: u32, channel: u32) -> u32 {
        let (q, second) = (token / 2 % 4, token / 8);
        let group = self.whole(channel);
        self.first(Side::Value) + 32 * self.words(Side::Value) + 16 * group + 4 * q + 2 * second
    }

    /// Where the code of a token of a tile is.
    #[inline(always)]
    pub const fn place(self, side: Side, token: u32, channel: u32) -> Place {
        let bits = self.bits(side);
        match side {
            Side::Key => {
                let (chunk, of_word) = (channel / 8, if bits == 2 { 2 } else { 1 });
                let (q, i) = (chunk % 4, chunk / 4);
                let each = self.words(Side::Key) / 2;
                let pair = i % of_word * 4 + channel % 8 / 2;
                Place {
                    lane: 4 * (token % 8) + q,
                    word: token / 8 * each + i / of_word,
                    bit: bits * pair + 16 * (channel % 2),
                }
            }
            Side::Value => {
                let of_lane = self.head_dim / ROWS;
                let (g, within) = (channel / of_lane, channel % of_lane);
                let pairs = if bits == 2 { 8 } else { 4 };
                Place {
                    lane: 4 * g + token / 2 % 4,
                    word: within / pairs * 2 + token / 8,
                    bit: bits * (within % pairs) + 16 * (token % 2),
                }
            }
        }
    }

    /// The first of the codes in a lane's word: its token of the tile, and its channel. The pairs that follow
    /// are [`step`](Self::step)s further.
    #[inline(always)]
    pub const fn origin(self, side: Side, lane: u32, w: u32) -> (u32, u32) {
        let (g, q) = (lane / 4, lane % 4);
        match side {
            Side::Key => {
                let each = self.words(Side::Key) / 2;
                let (half, at) = (w >> each.trailing_zeros(), w & (each - 1));
                let chunks = if self.key_bits == 2 { 2 } else { 1 };
                (8 * half + g, 32 * chunks * at + 8 * q)
            }
            Side::Value => {
                let pairs = if self.value_bits == 2 { 8 } else { 4 };
                (2 * q + 8 * (w % 2), self.head_dim / ROWS * g + pairs * (w / 2))
            }
        }
    }

    /// The channel of a word's pair `m`, from its first one on.
    #[inline(always)]
    pub const fn step(side: Side, m: u32) -> u32 {
        match side {
            Side::Key => 32 * (m / 4) + 2 * (m % 4),
            Side::Value => m,
        }
    }
}

/// The extents of a layer's cache, and of a step's launch. All sequences have room for as many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Shape {
    /// Query heads of a KV head.
    pub queries: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Groups of tokens that a sequence has room for.
    pub groups: u32,
    /// Whole groups that are read in f16 in any case: those before the one that is being filled.
    pub kept: u32,
    /// Parts that a sequence is cut into.
    pub splits: u32,
    /// Scores in log2 units: log2(e) times the softmax scale.
    pub scale_log2: f32,
    /// Where codes lie.
    pub layout: Layout,
}

impl Shape {
    /// Groups of eight query heads of a KV head.
    #[inline(always)]
    pub const fn row_groups(self) -> u32 {
        self.queries.div_ceil(ROWS)
    }

    /// Groups of tokens that are in f16 of each sequence and KV head: a ring.
    #[inline(always)]
    pub const fn slots(self) -> u32 {
        self.kept + 1
    }

    /// Groups that a step reads from codes, the first ones, of a sequence of `length` tokens: those which are
    /// complete, but for the last [`kept`](Self::kept).
    #[inline(always)]
    pub fn coded(self, length: u32) -> u32 {
        self.layout.whole(length).saturating_sub(self.kept)
    }

    /// The place of a token in f16, in rows of D, of the ring of a sequence and KV head.
    #[inline(always)]
    pub fn near(self, token: u32) -> u32 {
        let group = self.layout.whole(token);
        let slot = bits::rem_u32(group, self.slots());
        slot * self.layout.group + (token - group * self.layout.group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = Layout> {
        [64, 128].into_iter().flat_map(|head_dim| {
            [32, 64, 128].into_iter().filter(move |group| *group <= head_dim).flat_map(move |group| {
                [2, 4].into_iter().flat_map(move |key_bits| {
                    [2, 4].map(|value_bits| Layout { head_dim, key_bits, value_bits, group })
                })
            })
        })
    }

    /// Each bit of a tile has one owner, and `origin` and `step` find the code that `place` has put there.
    #[test]
    fn every_code_has_bits_of_its_own() {
        for layout in all() {
            let mut taken = vec![0u32; layout.tile_words() as usize];
            let mut take = |word: u32, mask: u32| {
                let word = &mut taken[word as usize];
                assert_eq!(*word & mask, 0, "{layout:?}");
                *word |= mask;
            };
            for side in [Side::Key, Side::Value] {
                let bits = layout.bits(side);
                for (token, channel) in (0..16).flat_map(|t| (0..layout.head_dim).map(move |c| (t, c))) {
                    let Place { lane, word, bit } = layout.place(side, token, channel);
                    take(layout.word(side, lane, word), ((1 << bits) - 1) << bit);
                    let (first_token, first_channel) = layout.origin(side, lane, word);
                    let (m, second) = (bit % 16 / bits, bit / 16);
                    let channel_of = first_channel + Layout::step(side, m);
                    let found = match side {
                        Side::Key => (first_token, channel_of + second),
                        Side::Value => (first_token + second, channel_of),
                    };
                    assert_eq!(found, (token, channel), "{layout:?} {side:?}");
                }
            }
            for token in 0..16 {
                for channel in (0..layout.head_dim).step_by(layout.group as usize) {
                    let at = layout.value_scale(token, channel);
                    let half = 0xffff << (16 * (token % 2));
                    take(at, half);
                    take(at + 1, half);
                }
            }
            assert!(taken.iter().all(|word| *word == u32::MAX), "{layout:?}");
        }
    }

    #[test]
    fn a_token_takes_what_the_bits_say() {
        for layout in all() {
            let Layout { head_dim, key_bits, value_bits, group } = layout;
            let token = head_dim * (key_bits + value_bits) / 8 + 8 * head_dim / group;
            assert_eq!(4 * layout.group_words(), token * group, "{layout:?}");
            assert!(layout.tile_words().is_multiple_of(4));
        }
        let layout = Layout { head_dim: 128, key_bits: 2, value_bits: 2, group: 32 };
        assert_eq!(4 * layout.group_words() / 32, 96);
    }

    /// Tokens in f16 have places of their own, and the newest `kept` groups are among them.
    #[test]
    fn recent_tokens_have_places_of_their_own() {
        let layout = Layout { head_dim: 64, key_bits: 2, value_bits: 2, group: 32 };
        for kept in 0..4 {
            let shape =
                Shape { queries: 1, kv_heads: 1, groups: 99, kept, splits: 1, scale_log2: 1.0, layout };
            for length in 1..400 {
                let first = 32 * shape.coded(length);
                let mut places: Vec<u32> = (first..length).map(|token| shape.near(token)).collect();
                places.sort_unstable();
                places.dedup();
                assert_eq!(places.len() as u32, length - first);
                assert!(places.iter().all(|place| *place < 32 * shape.slots()));
                let near = length - first;
                assert!(near >= length.min(32 * kept) && near < 32 * (kept + 1));
            }
        }
    }
}
