//! A quantized tile in shared memory, and the operands that a warp makes of it.

use super::layout::TileLayout;
use super::query::Query;
use crate::attention::{Values, width};
use glam::UVec4;
use simt::tensor::mma_f16;
use simt::{Global, Shared, bits, half2, unroll};

/// 1152 = 1024 + 128 twice: what a byte under the exponent of 1024 is above its code.
const KEY_BIAS: u32 = 0x6480_6480;
/// 1024 twice.
const VALUE_BIAS: u32 = 0x6400_6400;

/// One tile of [`TileLayout`] in shared memory, its chunks of 16 bytes in an order that avoids bank conflicts.
#[derive(Clone, Copy)]
pub struct Tile<const D: usize> {
    memory: Shared<u32>,
    /// First word.
    start: u32,
}

impl<const D: usize> Tile<D> {
    const LAYOUT: TileLayout = TileLayout::new(D as u32);
    /// Words of a tile.
    pub const WORDS: u32 = 8 * D as u32;
    /// Copies that each lane of a warp makes.
    const COPIES: u32 = Self::WORDS / 4 / 32;
    /// Chunks of a row of key codes, and of value codes.
    const KEY_CHUNKS: u32 = D as u32 / 16;
    const VALUE_CHUNKS: u32 = D as u32 / 32;

    /// The tile at word `start` of `memory`.
    #[inline(always)]
    pub fn at(memory: Shared<u32>, start: u32) -> Self {
        Tile { memory, start }
    }

    /// Where chunk `chunk` of a row of key codes lies: eight lanes read four chunks of each of two rows.
    #[inline(always)]
    fn key_word(row: u32, chunk: u32) -> u32 {
        let flip = if Self::KEY_CHUNKS >= 8 { (row & 1) << 2 } else { 0 };
        4 * (row * Self::KEY_CHUNKS + (chunk ^ flip))
    }

    /// Where chunk `chunk` of a row of value codes lies. Sixteen lanes read from each of four rows, two apart: the rows
    /// change places and their chunks too, so that they meet in no bank.
    #[inline(always)]
    fn value_word(row: u32, chunk: u32) -> u32 {
        let (row, flip) = match D {
            128 => (row ^ (row >> 2 & 1), row & 2),
            256 => (row, row & 6),
            _ => (row, 0),
        };
        Self::LAYOUT.value_codes / 4 + 4 * (row * Self::VALUE_CHUNKS + (chunk ^ flip))
    }

    /// Starts copying the tile at byte `from` of the pool; a warp's work.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn copy(self, pool: Global<u32>, from: usize, lane: u32) {
        unroll!(for i in 0..(Self::COPIES as usize), at_most 16 {
            let chunk = 32 * i as u32 + lane;
            let keys = Self::LAYOUT.key_scales / 16;
            let (values, end) = (Self::LAYOUT.value_codes / 16, Self::LAYOUT.value_scales / 16);
            let target = if chunk < keys {
                Self::key_word(chunk / Self::KEY_CHUNKS, chunk % Self::KEY_CHUNKS)
            } else if chunk >= values && chunk < end {
                let c = chunk - values;
                Self::value_word(c / Self::VALUE_CHUNKS, c % Self::VALUE_CHUNKS)
            } else {
                4 * chunk
            };
            self.memory.copy_async_once(self.start + target, pool, from / 4 + 4 * chunk as usize);
        });
    }

    /// Four words at byte `offset` of the part that is not reordered.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn plain(self, offset: u32) -> [u32; 4] {
        self.memory.load_vector::<UVec4>(self.start + offset / 4).to_array()
    }

    /// The products of the query row with the tile's keys, before any scaling: `[tokens 8j + 2q, 8j + 2q + 1]` of row `g`,
    /// and Σ|q_n|·σ.
    ///
    /// One chain multiplies q_n·σ (rows 0 to 7) and what its rounding lost (rows 8 to 15) with the codes; another q_n
    /// (rows 0 to 7) and |q_n| (rows 8 to 15) with z in the even columns and σ in the odd ones.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn products(self, query: &Query, lane: u32) -> ([[f32; 2]; 2], f32) {
        let (g, q) = (lane >> 2, lane & 3);
        let mut c = [[0f32; 4]; 2];
        let mut z = [0f32; 4];
        unroll!(for s in 0..(D / 64), at_most 4 {
            let dims = 2 * 16 * (4 * s as u32 + q);
            let mut scales = [0u32; 8];
            let mut column = [0u32; 8];
            unroll!(for h in 0..2 {
                let part = self.plain(Self::LAYOUT.key_scales + dims + 16 * h as u32);
                let own = if g & 1 == 0 { Self::LAYOUT.key_zeros } else { Self::LAYOUT.key_scales };
                let other = self.plain(own + dims + 16 * h as u32);
                unroll!(for i in 0..4 {
                    scales[4 * h + i] = part[i];
                    column[4 * h + i] = other[i];
                });
            });
            let codes = [0, 1].map(|j| {
                let at = self.start + Self::key_word(8 * j + g, 4 * s as u32 + q);
                self.memory.load_vector::<UVec4>(at).to_array()
            });
            unroll!(for i in 0..4 {
                let pair = 8 * s + 2 * i;
                let (q0, q1) = (query.pairs[pair], query.pairs[pair + 1]);
                let a = [q0, half2::abs_f16x2(q0), q1, half2::abs_f16x2(q1)];
                z = mma_f16(a, [column[2 * i], column[2 * i + 1]], z);
                let (x0, r0) = query.times(pair, scales[2 * i]);
                let (x1, r1) = query.times(pair + 1, scales[2 * i + 1]);
                unroll!(for j in 0..2 {
                    let word = codes[j][i];
                    let low = half2::sub_f16x2(bits::byte_perm(word, VALUE_BIAS, 0x7170), KEY_BIAS);
                    let high = half2::sub_f16x2(bits::byte_perm(word, VALUE_BIAS, 0x7372), KEY_BIAS);
                    c[j] = mma_f16([x0, r0, x1, r1], [low, high], c[j]);
                });
            });
        });
        let score = |j: usize, i: usize| (c[j][i] + c[j][2 + i]) + z[0];
        ([[score(0, 0), score(0, 1)], [score(1, 0), score(1, 1)]], z[3])
    }
}

/// A lane's part of a tile's values: codes, scales and zeros of its four tokens and D/8 dimensions.
#[derive(Clone, Copy)]
pub struct Int4Values<const D: usize> {
    /// Of tokens 2q, 2q + 1, 2q + 8 and 2q + 9: eight dimensions a word.
    codes: [[u32; 4]; 4],
    /// Of two groups of dimensions (one up to head_dim 128): tokens 2q and 2q + 1, tokens 2q + 8 and 2q + 9.
    scales: [[u32; 2]; 2],
    zeros: [[u32; 2]; 2],
}

impl<const D: usize> Tile<D> {
    /// Loads a lane's part of the values.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn values(self, lane: u32) -> Int4Values<D> {
        let (g, q) = (lane >> 2, lane & 3);
        let first = D as u32 / 8 * g;
        let (chunk, within) = (first / 32, first % 32 / 8);
        let mut codes = [[0u32; 4]; 4];
        unroll!(for i in 0..4 {
            let token = 2 * q + (i as u32 & 1) + 8 * (i as u32 >> 1);
            let at = self.start + Self::value_word(token, chunk) + within;
            match D {
                64 => codes[i][0] = self.memory.load(at),
                128 => {
                    let pair: [u32; 2] = self.memory.load_vector(at);
                    (codes[i][0], codes[i][1]) = (pair[0], pair[1]);
                }
                _ => codes[i] = self.memory.load_vector::<UVec4>(at).to_array(),
            }
        });
        let pair = |part: u32, token: u32, group: u32| {
            bits::byte_perm(self.metadata(part, token, group), self.metadata(part, token + 1, group), 0x5410)
        };
        let both = |part: u32| {
            let groups = [first / 16, if D == 256 { first / 16 + 1 } else { first / 16 }];
            groups.map(|group| [pair(part, 2 * q, group), pair(part, 2 * q + 8, group)])
        };
        Int4Values { codes, scales: both(Self::LAYOUT.value_scales), zeros: both(Self::LAYOUT.value_zeros) }
    }

    /// The f16 of a token and group, in the low half.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn metadata(self, part: u32, token: u32, group: u32) -> u32 {
        let at = part + 2 * (token * (D as u32 / 16) + group);
        self.memory.load(self.start + at / 4) >> (8 * (at & 2))
    }
}

impl<const D: usize> Values<D> for Int4Values<D> {
    #[inline(always)]
    fn operands(self, s: u32, _: u32) -> [[u32; 2]; 8] {
        let first = s as usize * width::<D>();
        let (word, byte, group) = (first / 8, first % 8 / 2, first / 16);
        let mut b = [[0u32; 2]; 8];
        unroll!(for e in 0..(width::<D>() / 2), at_most 4 {
            unroll!(for h in 0..2 {
                // A byte of both tokens, in bytes 0 and 2: the code of an even dimension below that of an odd one.
                let selector = (byte + e) as u32 * 0x1111 + 0x4400;
                let both = bits::byte_perm(self.codes[2 * h][word], self.codes[2 * h + 1][word], selector);
                let restore = |nibbles: u32| {
                    let code = half2::sub_f16x2(nibbles & 0x000f_000f | VALUE_BIAS, VALUE_BIAS);
                    half2::fma_f16x2(code, self.scales[group][h], self.zeros[group][h])
                };
                b[2 * e][h] = restore(both);
                b[2 * e + 1][h] = restore(both >> 4);
            });
        });
        b
    }
}
