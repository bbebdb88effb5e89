//! A quantized tile in shared memory, and the operands that a warp makes of it.

use super::layout::{Layout, TileLayout};
use super::metadata::KeyMetadata;
use super::query::Query;
use crate::attention::{Half, Values, width};
use core::marker::PhantomData;
use glam::{UVec4, Vec4};
use half::f16;
use simt::math::fma;
use simt::tensor::mma_f16;
use simt::warp::{FULL_MASK, warp_shuffle_idx, warp_shuffle_xor};
use simt::{Global, Shared, bits, convert, half2, unroll};

/// 1152 = 1024 + 128 twice: what a byte under the exponent of 1024 is above its code.
const KEY_BIAS: u32 = 0x6480_6480;
/// 1024 twice.
const VALUE_BIAS: u32 = 0x6400_6400;
/// 1/16 and −64, twice.
const SIXTEENTH: u32 = 0x2c00_2c00;
const MINUS_64: u32 = 0xd400_d400;

/// One tile of [`TileLayout`] in shared memory, its chunks of 16 bytes in an order that avoids bank
/// conflicts. `M` is what its keys' scales and zeros are.
#[derive(Clone, Copy)]
pub struct Tile<M, const D: usize> {
    memory: Shared<u32>,
    /// First word.
    start: u32,
    metadata: PhantomData<M>,
}

impl<M: KeyMetadata, const D: usize> Tile<M, D> {
    const LAYOUT: TileLayout = TileLayout::new(D as u32, M::LAYOUT);
    /// Words of a tile.
    pub const WORDS: u32 = Self::LAYOUT.bytes / 4;
    /// Chunks of it.
    const CHUNKS: u32 = Self::WORDS / 4;
    /// Copies that each lane of a warp makes.
    const COPIES: u32 = Self::CHUNKS.div_ceil(32);
    /// Chunks of a row of key codes, and of value codes.
    const KEY_CHUNKS: u32 = D as u32 / 16;
    const VALUE_CHUNKS: u32 = D as u32 / 32;

    /// The tile at word `start` of `memory`.
    #[inline(always)]
    pub fn at(memory: Shared<u32>, start: u32) -> Self {
        Tile { memory, start, metadata: PhantomData }
    }

    /// Where chunk `chunk` of a row of key codes lies: eight lanes read four chunks of each of two rows.
    #[inline(always)]
    fn key_word(row: u32, chunk: u32) -> u32 {
        let flip = if Self::KEY_CHUNKS >= 8 { (row & 1) << 2 } else { 0 };
        4 * (row * Self::KEY_CHUNKS + (chunk ^ flip))
    }

    /// Where chunk `chunk` of a row of value codes lies. Sixteen lanes read from each of four rows, two
    /// apart: the rows change places and their chunks too, so that they meet in no bank.
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
    #[simt::device]
    pub fn copy(self, pool: Global<u32>, from: usize, lane: u32) {
        // Of which part a lane's chunk is should be known when this is compiled: that no lane is beyond 31
        // gets lost on the way.
        let lane = lane % 32;
        unroll!(for i in 0..(Self::COPIES as usize), at_most 16 {
            let chunk = 32 * i as u32 + lane;
            let keys = Self::LAYOUT.key_scales / 16;
            let (values, end) = (Self::LAYOUT.value_codes / 16, Self::LAYOUT.value_scales / 16);
            let target = if chunk < keys {
                Self::key_word(chunk / Self::KEY_CHUNKS, chunk % Self::KEY_CHUNKS)
            } else if chunk >= values && chunk < end {
                let c = chunk - values;
                Self::value_word(c / Self::VALUE_CHUNKS, c % Self::VALUE_CHUNKS)
            } else if matches!(M::LAYOUT, Layout::Paper) && chunk < values {
                let zeros = Self::LAYOUT.key_zeros / 16;
                if chunk < zeros {
                    Self::wide_word(Self::LAYOUT.key_scales, chunk - keys)
                } else {
                    Self::wide_word(Self::LAYOUT.key_zeros, chunk - zeros)
                }
            } else {
                4 * chunk
            };
            if Self::CHUNKS.is_multiple_of(32) || chunk < Self::CHUNKS {
                self.memory.copy_async_once(self.start + target, pool, from / 4 + 4 * chunk as usize);
            }
        });
    }

    /// Where chunk `chunk` of the scales or zeros in f32 lies, of which `part` is the first byte: eight lanes
    /// read one of four neighbours of both parts each, 64 bytes apart.
    #[inline(always)]
    fn wide_word(part: u32, chunk: u32) -> u32 {
        let flip = (chunk >> 3 & 1) ^ if part == Self::LAYOUT.key_zeros { 2 } else { 0 };
        part / 4 + 4 * (chunk ^ flip)
    }

    /// Four words at byte `offset` of the part that is not reordered.
    #[simt::device]
    fn plain(self, offset: u32) -> [u32; 4] {
        self.memory.load_vector::<UVec4>(self.start + offset / 4).to_array()
    }

    /// The products of the query row with the tile's keys, before any scaling:
    /// `[tokens 8j + 2q, 8j + 2q + 1]` of row `g`, and Σ|q_n|·σ.
    #[simt::device]
    pub fn products(self, query: &Query, lane: u32) -> ([[f32; 2]; 2], f32) {
        M::products(self, query, lane)
    }

    /// A lane's 16 codes of token `8j + g`, dimensions 16·(4s + q) to 16·(4s + q) + 15, for each `j`.
    #[simt::device]
    fn key_codes(self, s: usize, lane: u32) -> [[u32; 4]; 2] {
        [0, 1].map(|j| {
            let at = self.start + Self::key_word(8 * j + (lane >> 2), 4 * s as u32 + (lane & 3));
            self.memory.load_vector::<UVec4>(at).to_array()
        })
    }
}

/// Adds the products of four codes of each of two tokens, `codes[j]`, with q_n·σ, rounded (`x`) and what
/// rounding lost (`r`).
#[simt::device]
fn multiply_codes(x: [u32; 2], r: [u32; 2], codes: [u32; 2], c: &mut [[f32; 4]; 2]) {
    unroll!(for j in 0..2 {
        let low = half2::sub_f16x2(bits::byte_perm(codes[j], VALUE_BIAS, 0x7170), KEY_BIAS);
        let high = half2::sub_f16x2(bits::byte_perm(codes[j], VALUE_BIAS, 0x7372), KEY_BIAS);
        c[j] = mma_f16([x[0], r[0], x[1], r[1]], [low, high], c[j]);
    });
}

/// Scores from the sums of the codes' chain and that of the zeros.
#[inline(always)]
fn scores(c: [[f32; 4]; 2], z: f32) -> [[f32; 2]; 2] {
    c.map(|c| [(c[0] + c[2]) + z, (c[1] + c[3]) + z])
}

impl<const D: usize> Tile<f16, D> {
    /// [`products`](Tile::products) of the compact layout.
    ///
    /// One chain multiplies q_n·σ (rows 0 to 7) and what its rounding lost (rows 8 to 15) with the codes;
    /// another q_n (rows 0 to 7) and |q_n| (rows 8 to 15) with z in the even columns and σ in the odd ones.
    #[simt::device]
    pub(super) fn narrow_products(self, query: &Query, lane: u32) -> ([[f32; 2]; 2], f32) {
        let (scores, [x, _]) = self.products_and_sums(query, false, lane);
        (scores, x)
    }

    /// [`products`](Tile::products), and Σ(q_n·σ)² of row `g`, the products rounded to f16, if that is
    /// `squared`: the same in the row's four lanes.
    ///
    /// It is what a matrix of eight rows q_n·σ times its transpose, whose operands are the same registers,
    /// has on its diagonal.
    #[simt::device]
    pub fn products_and_sums(self, query: &Query, squared: bool, lane: u32) -> ([[f32; 2]; 2], [f32; 2]) {
        let (g, q) = (lane >> 2, lane & 3);
        let mut c = [[0f32; 4]; 2];
        let mut z = [0f32; 4];
        let mut squares = [0f32; 4];
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
            let codes = self.key_codes(s, lane);
            unroll!(for i in 0..4 {
                let pair = 8 * s + 2 * i;
                let (q0, q1) = (query.pairs[pair], query.pairs[pair + 1]);
                // Made anew where twelve warps share the registers.
                let magnitudes = [q0, q1].map(|q| {
                    half2::abs_f16x2(if squared && D == 64 { bits::renewed(q) } else { q })
                });
                let a = [q0, magnitudes[0], q1, magnitudes[1]];
                z = mma_f16(a, [column[2 * i], column[2 * i + 1]], z);
                let (x0, r0) = query.times(pair, scales[2 * i]);
                let (x1, r1) = query.times(pair + 1, scales[2 * i + 1]);
                multiply_codes([x0, x1], [r0, r1], [codes[0][i], codes[1][i]], &mut c);
                if squared {
                    squares = mma_f16([x0, r0, x1, r1], [x0, x1], squares);
                }
            });
        });
        let mut diagonal = 0f32;
        if squared {
            // Row g and column g: lane g/2 of the row has columns g and g + 1, or g − 1 and g.
            let own = if g & 1 == 0 { squares[0] } else { squares[1] };
            diagonal = warp_shuffle_idx(FULL_MASK, own, (lane & !3) | g >> 1, 32);
        }
        (scores(c, z[0]), [z[3], diagonal])
    }
}

impl<const D: usize> Tile<f32, D> {
    /// [`products`](Tile::products) of the paper's layout.
    ///
    /// Of q_n·σ, rounded to f32, two f16 have 22 bits, for the chain over the codes. The other chain has z
    /// rounded in the even columns, what that lost in every fourth of the odd ones, and σ, rounded up, in the
    /// others: its sums come from two lanes.
    #[simt::device]
    pub(super) fn wide_products(self, query: &Query, lane: u32) -> ([[f32; 2]; 2], f32) {
        let (g, q) = (lane >> 2, lane & 3);
        let (takes_scales, takes_rest) = (g & 3 == 1, g & 3 == 3);
        let own = if takes_scales { Self::LAYOUT.key_scales } else { Self::LAYOUT.key_zeros };
        let mut c = [[0f32; 4]; 2];
        let mut z = [0f32; 4];
        unroll!(for s in 0..(D / 64), at_most 4 {
            let codes = self.key_codes(s, lane);
            unroll!(for i in 0..4 {
                let chunk = 4 * (4 * s as u32 + q) + i as u32;
                let scales = self.four(Self::LAYOUT.key_scales, chunk);
                let column = self.four(own, chunk).map(|x| if takes_scales { scale_above(x) } else { x });
                let mut b = [0u32; 2];
                let (mut x, mut r) = ([0u32; 2], [0u32; 2]);
                unroll!(for h in 0..2 {
                    let (rounded, rest) = split([column[2 * h], column[2 * h + 1]]);
                    b[h] = if takes_rest { rest } else { rounded };
                    let [q0, q1] = <f16 as Half>::unpack(query.pairs[8 * s + 2 * i + h]);
                    (x[h], r[h]) = split([q0 * scales[2 * h], q1 * scales[2 * h + 1]]);
                });
                let pair = 8 * s + 2 * i;
                let (q0, q1) = (query.pairs[pair], query.pairs[pair + 1]);
                z = mma_f16([q0, half2::abs_f16x2(q0), q1, half2::abs_f16x2(q1)], b, z);
                multiply_codes(x, r, [codes[0][i], codes[1][i]], &mut c);
            });
        });
        // Columns 2q + 1: σ where q is even, else the rest of z. Each lane wants both.
        let odd = q & 1 == 1;
        let other = warp_shuffle_xor(FULL_MASK, if odd { z[1] } else { z[3] }, 1, 32);
        let (rest, sigma) = if odd { (z[1], other) } else { (other, z[3]) };
        (scores(c, z[0] + rest), sigma)
    }

    /// Four scales or zeros.
    #[simt::device]
    fn four(self, part: u32, chunk: u32) -> [f32; 4] {
        self.memory.load_vector::<Vec4>(self.start + Self::wide_word(part, chunk)).to_array()
    }
}

/// Two numbers as f16, and as f16 what that lost of them.
#[inline(always)]
pub fn split(x: [f32; 2]) -> (u32, u32) {
    let rounded = convert::f16x2_from_f32(x[0], x[1]);
    let [a, b] = <f16 as Half>::unpack(rounded);
    (rounded, convert::f16x2_from_f32(x[0] - a, x[1] - b))
}

/// A number that, rounded to the nearest f16, is not below σ >= 0 unless σ is below 2^−49, and is 0 for 0.
#[inline(always)]
pub fn scale_above(scale: f32) -> f32 {
    const HALF_STEP: f32 = 1.0 / 33_554_432.0;
    fma(scale, 1.0 + 1.0 / 1024.0, HALF_STEP)
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

impl<M: KeyMetadata, const D: usize> Tile<M, D> {
    /// Loads a lane's part of the values.
    #[simt::device]
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
        // Two groups a word, the words of a token side by side: a lane's are at distances that are known when
        // this is compiled.
        let words = D as u32 / 32;
        let own = self.start + 2 * q * words + first / 32;
        let both = |part: u32| {
            [0, if D == 256 { 1 } else { 0 }].map(|more| {
                let half = if D == 256 { 0x5410 + 0x2222 * more } else { 0x5410 + 0x2222 * (first / 16 % 2) };
                [0, 8].map(|token| {
                    let at = own + part / 4 + token * words;
                    bits::byte_perm(self.memory.load(at), self.memory.load(at + words), half)
                })
            })
        };
        Int4Values { codes, scales: both(Self::LAYOUT.value_scales), zeros: both(Self::LAYOUT.value_zeros) }
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
                // A byte of both tokens, in bytes 0 and 2: the code of an even dimension below that of an odd
                // one.
                let selector = (byte + e) as u32 * 0x1111 + 0x4400;
                let both = bits::byte_perm(self.codes[2 * h][word], self.codes[2 * h + 1][word], selector);
                let restore = |code: u32| half2::fma_f16x2(code, self.scales[group][h], self.zeros[group][h]);
                // 1024 + the low code, and 1024 + 16 times the high one, which needs no shift: both become
                // the code, exactly.
                let low = half2::sub_f16x2(bits::and_or(both, 0x000f_000f, VALUE_BIAS), VALUE_BIAS);
                let high = bits::and_or(both, 0x00f0_00f0, VALUE_BIAS);
                b[2 * e][h] = restore(low);
                b[2 * e + 1][h] = restore(half2::fma_f16x2(high, SIXTEENTH, MINUS_64));
            });
        });
        b
    }
}
