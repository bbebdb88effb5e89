//! Sketches in shared memory, and products of queries with them.

use super::scanning::Deal;
use super::tile::{Annotation, code_words, raised_by, sketch_words, tiles_of};
use crate::attention::Ring;
use crate::attention::query::Query;
use glam::UVec4;
use simt::math::fma;
use simt::tensor::mma_f16;
use simt::{Global, Shared, bits, half2, unroll, warp};

/// A warp's sketches: of neighbouring tiles of one row.
pub(super) struct Tiles<const D: usize, const BITS: usize, const S: u32> {
    /// A ring of each warp, one behind another.
    pub ring: Shared<u32>,
    pub sketches: Global<u32>,
    /// The first tile of the row.
    pub row: usize,
    pub warp: u32,
    pub lane: u32,
    pub end: u32,
}

impl<const D: usize, const BITS: usize, const S: u32> Tiles<D, BITS, S> {
    const WORDS: u32 = sketch_words(D as u32, BITS as u32);

    /// Asks the L2 cache for what the ring of warp `warp` begins with, a lane for a tile: of a row of
    /// `tokens` tokens that begins at `row`, dealt out like this.
    #[simt::device]
    pub fn ask(sketches: Global<u32>, row: usize, warp: u32, deal: Deal, tokens: u32) {
        let lane = warp::lane_id();
        let tile = warp * deal.of_warp + lane;
        let there = (lane < Self::STAGES) & (lane < deal.of_warp) & (tile < tiles_of(tokens));
        let tile = row + if there { tile } else { 0 } as usize;
        sketches.prefetch(tile * Self::WORDS as usize, 4 * Self::WORDS, there);
    }

    #[inline(always)]
    pub fn tile(&self, stage: u32) -> Sketch<D, BITS> {
        Sketch { memory: self.ring, start: (self.warp * Self::STAGES + stage) * Self::WORDS }
    }
}

impl<const D: usize, const BITS: usize, const S: u32> Ring for Tiles<D, BITS, S> {
    const STAGES: u32 = S;
    const STRIDE: u32 = 1;
    const LOOKS_AHEAD: bool = false;

    #[inline(always)]
    fn end(&self) -> u32 {
        self.end
    }

    #[inline(always)]
    fn block(&self, _: u32) -> u32 {
        0
    }

    #[simt::device]
    fn start(&self, tile: u32, _: u32, stage: u32) {
        self.tile(stage).copy(self.sketches, (self.row + tile as usize) * Self::WORDS as usize, self.lane);
    }
}

/// A sketch in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Sketch<const D: usize, const BITS: usize> {
    memory: Shared<u32>,
    start: u32,
}

impl<const D: usize, const BITS: usize> Sketch<D, BITS> {
    const CODES: u32 = code_words(D as u32, BITS as u32);
    const WORDS: u32 = sketch_words(D as u32, BITS as u32);

    /// Starts copying it; a warp's work.
    #[simt::device]
    fn copy(self, sketches: Global<u32>, from: usize, lane: u32) {
        // Chunks are a constant apart.
        let (to, from) = (self.start + 4 * lane, from + 4 * lane as usize);
        unroll!(for i in 0..(Self::WORDS.div_ceil(128) as usize), at_most 10 {
            if 128 * (i as u32 + 1) <= Self::WORDS || 4 * lane < Self::WORDS - 128 * i as u32 {
                self.memory.copy_async_once(to + 128 * i as u32, sketches, from + 128 * i);
            }
        });
    }

    #[simt::device]
    pub fn annotation(self) -> Annotation {
        self.memory.load_vector(self.start + Self::CODES + D as u32)
    }

    #[simt::device]
    fn four(self, word: u32) -> [u32; 4] {
        self.memory.load_vector::<UVec4>(self.start + word).to_array()
    }

    /// The products of query row g with the keys of tokens 8j + 2q and 8j + 2q + 1, before any scaling, and
    /// Σ|q_n|·σ.
    #[simt::device]
    pub fn products(self, query: &Query, lane: u32) -> ([[f32; 2]; 4], f32) {
        let (g, q) = (lane >> 2, lane & 3);
        let own = if g & 1 == 0 { Self::CODES + D as u32 / 2 } else { Self::CODES };
        let mut c = [[0f32; 4]; 4];
        let mut z = [0f32; 4];
        unroll!(for s in 0..(D / 64), at_most 4 {
            let at = 32 * s as u32 + 8 * q;
            let scales = self.eight(Self::CODES + at, 4);
            let column = self.eight(own + at, 4);
            let codes = self.codes(s, lane);
            unroll!(for i in 0..4 {
                let pair = 8 * s + 2 * i;
                let (q0, q1) = (query.pairs[pair], query.pairs[pair + 1]);
                let a = [q0, half2::abs_f16x2(q0), q1, half2::abs_f16x2(q1)];
                z = mma_f16(a, [column[2 * i], column[2 * i + 1]], z);
                let (x0, r0) = query.times(pair, scales[2 * i]);
                let (x1, r1) = query.times(pair + 1, scales[2 * i + 1]);
                unroll!(for j in 0..4 {
                    let own = operands::<BITS>(&codes, i, j);
                    c[j] = mma_f16([x0, r0, x1, r1], own, c[j]);
                });
            });
        });
        let mut products = [[0f32; 2]; 4];
        unroll!(for j in 0..4 {
            let unit = code_unit(BITS as u32, 8 * j as u32);
            let [a, b, rest_of_a, rest_of_b] = c[j];
            products[j] = [fma(a + rest_of_a, unit, z[0]), fma(b + rest_of_b, unit, z[0])];
        });
        (products, z[3])
    }

    /// Eight words, the second four of them `apart` behind the first.
    #[simt::device]
    fn eight(self, word: u32, apart: u32) -> [u32; 8] {
        let (low, high) = (self.four(word), self.four(word + apart));
        [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]]
    }

    /// A lane's codes of 16 channels of its tokens: with 4 bits all in the first eight words.
    #[simt::device]
    fn codes(self, s: usize, lane: u32) -> [[u32; 8]; 2] {
        if BITS == 4 {
            [self.eight(256 * s as u32 + 4 * lane, 128), [0; 8]]
        } else {
            [0, 1].map(|both| self.eight(512 * s as u32 + 256 * both + 4 * lane, 128))
        }
    }
}

/// What products with the codes of a token are multiplied by: one over what a code is as an operand.
#[inline(always)]
pub const fn code_unit(bits: u32, token: u32) -> f32 {
    16_777_216.0 / raised_by(bits, token) as f32
}

/// The codes of token 8j + g and channels 4i to 4i + 3 as an operand.
#[inline(always)]
fn operands<const BITS: usize>(codes: &[[u32; 8]; 2], i: usize, j: usize) -> [u32; 2] {
    if BITS == 4 {
        let (words, mask) = ([codes[0][2 * i], codes[0][2 * i + 1]], 0x000f_000f << (4 * (j & 1)));
        words.map(|word| if j < 2 { word } else { word >> 8 } & mask)
    } else {
        let words = [codes[j / 2][2 * i], codes[j / 2][2 * i + 1]];
        // The lower bytes of both halves, or the upper ones.
        words.map(|word| if j & 1 == 0 { word & 0x00ff_00ff } else { bits::byte_perm(word, 0, 0x4341) })
    }
}
