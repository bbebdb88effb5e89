//! A tile in shared memory, and how codes become operands of the tensor cores: in registers.
//!
//! # Instructions
//! With a code in bits p to p + b of the fraction of an f16 whose exponent says 1024, the number is 1024 +
//! code·2^p: one `lop3` takes it out of a word, in both halves of a register, and one fused multiply-add by
//! 2^−p and −1024·2^−p makes the code of it, exactly. That holds up to p + b = 10; the other pairs of a word
//! come after one shift. Another multiply-add makes x^. Of a tile at D = 128 that is three instructions for
//! each of 32 registers of keys and 32 of values, and a few shifts.

use super::layout::{Layout, Side};
use super::restored;
use crate::attention::{BLOCK_TOKENS, ROWS, Values};
use glam::{UVec2, UVec4};
use half::f16;
use simt::half2::fma_f16x2;
use simt::tensor::mma_f16;
use simt::{Global, Shared, SharedPlan, bits, unroll};

/// Pairs of a word that need no shift.
#[inline(always)]
const fn in_place(code_bits: u32) -> u32 {
    if code_bits == 2 { 5 } else { 2 }
}

/// Pair `m` of a word as two f16.
#[inline(always)]
pub fn code_pair(code_bits: u32, word: u32, m: u32) -> u32 {
    let near = in_place(code_bits);
    let (from, at) =
        if m < near { (word, code_bits * m) } else { (word >> (code_bits * near), code_bits * (m - near)) };
    let mask = if code_bits == 2 { 0x0003_0003 } else { 0x000f_000f };
    // 1024, 2^−at and −1024·2^−at as f16, twice.
    let raised = from & (mask << at) | 0x6400_6400;
    let (down, offset) = ((15 - at) << 10, 0x8000 | (25 - at) << 10);
    fma_f16x2(raised, down | down << 16, offset | offset << 16)
}

/// Eight query rows in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Rows(Shared<u32>);

impl Rows {
    /// Places them in a block's memory.
    pub(super) const fn place<const D: usize>(plan: &mut SharedPlan) -> Self {
        Rows(plan.array(ROWS * D as u32 / 2))
    }

    /// Where a chunk of eight elements of a row lies: neither the rows' writes nor the lanes' reads meet in a
    /// bank.
    #[inline(always)]
    const fn word<const D: usize>(row: u32, chunk: u32) -> u32 {
        row * (D as u32 / 2) + 4 * (chunk ^ (row & 1) << 2)
    }

    /// Keeps row `row` of `queries` [rows, D], or zeros if it is not present, as row `r`: a warp's work.
    #[simt::device]
    pub(super) fn load<const D: usize>(
        self,
        queries: Global<f16>,
        row: usize,
        present: bool,
        r: u32,
        lane: u32,
    ) {
        if lane < D as u32 / 8 {
            let at = row * D + 8 * lane as usize;
            let chunk = if present { queries.load_vector_readonly::<UVec4>(at) } else { UVec4::ZERO };
            self.0.store_vector(Self::word::<D>(r, lane), chunk);
        }
    }

    /// Scores of a tile's 16 tokens: tokens 8j + 2q and 8j + 2q + 1 of row g, j = 0 and 1. `keys(i)`: chunks
    /// `4·i + q` of keys g and g + 8.
    #[simt::device]
    pub(super) fn scores<const D: usize>(
        self,
        keys: impl Fn(usize) -> [[u32; 4]; 2],
        lane: u32,
    ) -> [[f32; 2]; 2] {
        let mut c = [[0f32; 4]; 2];
        unroll!(for i in 0..(D / 32), at_most 4 {
            let at = Self::word::<D>(lane >> 2, 4 * i as u32 + (lane & 3));
            let q = self.0.load_vector::<UVec4>(at).to_array();
            let both = keys(i);
            unroll!(for j in 0..2 {
                let k = both[j];
                c[j] = mma_f16([q[0], 0, q[1], 0], [k[0], k[1]], c[j]);
                c[j] = mma_f16([q[2], 0, q[3], 0], [k[2], k[3]], c[j]);
            });
        });
        [[c[0][0], c[0][1]], [c[1][0], c[1][1]]]
    }
}

/// A tile in shared memory, behind s and z of its group's keys. `K` and `V` are the bits of keys and values.
#[derive(Clone, Copy)]
pub(super) struct Tile<const D: usize, const K: u32, const V: u32> {
    memory: Shared<u32>,
    /// First word.
    start: u32,
}

/// That with the largest tiles.
const fn largest<const D: usize, const K: u32, const V: u32>() -> Layout {
    Layout { head_dim: D as u32, key_bits: K, value_bits: V, group: 32 }
}

impl<const D: usize, const K: u32, const V: u32> Tile<D, K, V> {
    const LAYOUT: Layout = largest::<D, K, V>();
    /// Words of a stage.
    pub(super) const WORDS: u32 = D as u32 + Self::LAYOUT.tile_words();
    /// Chunks of 16 bytes of the largest tile.
    const CHUNKS: u32 = Self::LAYOUT.tile_words() / 4;
    /// Words of a lane.
    const KEY_WORDS: usize = Self::LAYOUT.words(Side::Key) as usize;
    const VALUE_WORDS: usize = Self::LAYOUT.words(Side::Value) as usize;

    /// The stage at word `start` of `memory`.
    #[inline(always)]
    pub(super) fn at(memory: Shared<u32>, start: u32) -> Self {
        Tile { memory, start }
    }

    /// Starts copying the tile at word `tile` of the pool, of `chunks` chunks, and s and z at word `scales`:
    /// a warp's work.
    #[simt::device]
    pub(super) fn copy(self, pool: Global<u32>, scales: usize, tile: usize, chunks: u32, lane: u32) {
        if D == 128 || lane < 16 {
            self.memory.copy_async(self.start + 4 * lane, pool, scales + 4 * lane as usize);
        }
        let (to, from) = (self.start + D as u32 + 4 * lane, tile + 4 * lane as usize);
        unroll!(for i in 0..(Self::CHUNKS.div_ceil(32) as usize), at_most 5 {
            if 32 * i as u32 + lane < chunks {
                self.memory.copy_async(to + 128 * i as u32, pool, from + 128 * i);
            }
        });
    }

    /// A lane's words of one side.
    #[simt::device]
    fn words(self, side: Side, count: usize, lane: u32) -> [u32; 8] {
        let first = self.start + D as u32 + Self::LAYOUT.first(side);
        let mut words = [0u32; 8];
        if count == 2 {
            [words[0], words[1]] = self.memory.load_vector::<UVec2>(first + 2 * lane).to_array();
        } else {
            unroll!(for i in 0..2 {
                if 4 * i < count {
                    let at = first + 128 * i as u32 + 4 * lane;
                    let four = self.memory.load_vector::<UVec4>(at).to_array();
                    unroll!(for w in 0..4 {
                        words[4 * i + w] = four[w];
                    });
                }
            });
        }
        words
    }

    /// A lane's words of keys.
    #[simt::device]
    pub(super) fn key_words(self, lane: u32) -> [u32; 8] {
        self.words(Side::Key, Self::KEY_WORDS, lane)
    }

    /// Chunks `4·i + q` of keys g and g + 8.
    #[simt::device]
    pub(super) fn keys(self, words: &[u32; 8], i: usize, lane: u32) -> [[u32; 4]; 2] {
        let at = self.start + 4 * (4 * i as u32 + (lane & 3));
        let scales = self.memory.load_vector::<UVec4>(at).to_array();
        let zeros = self.memory.load_vector::<UVec4>(at + D as u32 / 2).to_array();
        let of_word = if K == 2 { 2 } else { 1 };
        let mut keys = [[0u32; 4]; 2];
        unroll!(for j in 0..2 {
            unroll!(for p in 0..4 {
                let word = words[(j * (Self::KEY_WORDS / 2) + i / of_word) % 8];
                let codes = code_pair(K, word, (i % of_word * 4 + p) as u32);
                keys[j][p] = restored(codes, scales[p], zeros[p]);
            });
        });
        keys
    }

    /// A lane's values; `channels`: which group of channels they are of.
    #[simt::device]
    pub(super) fn values(self, channels: u32, lane: u32) -> Coded<D, V> {
        let words = self.words(Side::Value, Self::VALUE_WORDS, lane);
        let first = Self::LAYOUT.first(Side::Value) + 32 * Self::VALUE_WORDS as u32;
        let at = self.start + D as u32 + first + 16 * channels + 4 * (lane & 3);
        Coded { words, scales: self.memory.load_vector::<UVec4>(at).to_array() }
    }
}

/// Values of a tile in codes: a lane's share.
#[derive(Clone, Copy)]
pub(super) struct Coded<const D: usize, const V: u32> {
    words: [u32; 8],
    /// s and z of tokens 2q and 2q + 1, then of the other two.
    scales: [u32; 4],
}

impl<const D: usize, const V: u32> Values<D> for Coded<D, V> {
    #[simt::device]
    fn operands(self, s: u32, _: u32) -> [[u32; 2]; 8] {
        let pairs = if V == 2 { 8 } else { 4 };
        let mut b = [[0u32; 2]; 8];
        unroll!(for e in 0..8 {
            unroll!(for h in 0..2 {
                let word = self.words[((8 / pairs * s as usize + e / pairs) * 2 + h) % 8];
                let codes = code_pair(V, word, (e % pairs) as u32);
                b[e][h] = restored(codes, self.scales[2 * h], self.scales[2 * h + 1]);
            });
        });
        b
    }
}

/// A tile in f16, straight from memory: of tokens that there are not zeros.
#[derive(Clone, Copy)]
pub(super) struct Near<const D: usize> {
    pub keys: Global<f16>,
    pub values: Global<f16>,
    /// The first element of its rows.
    pub start: usize,
    /// Tokens that there are.
    pub present: u32,
}

impl<const D: usize> Near<D> {
    #[simt::device]
    fn chunk(self, rows: Global<f16>, token: u32, chunk: u32) -> [u32; 4] {
        if token >= self.present || token >= BLOCK_TOKENS {
            return [0; 4];
        }
        rows.load_vector::<UVec4>(self.start + (token * D as u32 + 8 * chunk) as usize).to_array()
    }

    /// Chunks `4·i + q` of keys g and g + 8.
    #[simt::device]
    pub(super) fn keys(self, i: usize, lane: u32) -> [[u32; 4]; 2] {
        let (g, q) = (lane >> 2, lane & 3);
        [0, 8].map(|half| self.chunk(self.keys, g + half, 4 * i as u32 + q))
    }
}

impl<const D: usize> Values<D> for Near<D> {
    #[simt::device]
    fn operands(self, s: u32, lane: u32) -> [[u32; 2]; 8] {
        let (g, q) = (lane >> 2, lane & 3);
        let tokens = [0, 1, 8, 9].map(|token| self.chunk(self.values, 2 * q + token, D as u32 / 64 * g + s));
        let mut b = [[0u32; 2]; 8];
        unroll!(for e in 0..4 {
            unroll!(for h in 0..2 {
                let (first, second) = (tokens[2 * h][e], tokens[2 * h + 1][e]);
                b[2 * e][h] = bits::byte_perm(first, second, 0x5410);
                b[2 * e + 1][h] = bits::byte_perm(first, second, 0x7632);
            });
        });
        b
    }
}
