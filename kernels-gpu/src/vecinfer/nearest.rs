//! The nearest centroids of a tile's sub-vectors.
//!
//! # Mathematics
//! The code of a sub-vector x of d channels is the number of the centroid c (equation 2) with the least
//!
//! ```text
//! s = ½‖c‖² − x·c        (½‖x − c‖² less ½‖x‖², which all have)
//! ```
//!
//! of equal ones the lowest. In f32: ½‖c‖² as [`Nearest::half_norm`] and s as [`Nearest::score`] have it. A
//! sub-vector with a NaN has code 0. The error of s is at most d·u·(‖c‖² + Σ|x_i·c_i|), u = 2^−24, so a
//! centroid that is not the nearest is chosen only where both are that near to each other.
//!
//! # Of many centroids few are scored
//! Of more than 256 centroids the tensor cores make a score s~ of each first: a row of A is −x, a column of B
//! is c, the accumulator ½‖c‖². The codebook is cut into 32 chunks in the order of the numbers, and of each
//! chunk the least s~ is kept, μ. With |s~ − s| ≤ E for all centroids, the chunk of the centroid that is
//! looked for has
//!
//! ```text
//! μ ≤ s~ ≤ s + E ≤ s' + E ≤ s~' + 2E = min μ + 2E
//! ```
//!
//! where the dash is of the centroid with the least s~; so has the chunk of every one whose s is as small.
//! Chunks within `min μ + slack`, slack ≥ 2E, are scored as s is defined, in order: the codes are those of
//! scoring all, bit by bit. Nearly always that is one chunk.
//!
//! E: with m = max(|x_i|, 2^−14), M = max(|c_i|, 2^−14) and H = max ½‖c‖² over the codebook, let B = H +
//! d·m·M. Products of f16 are exact. Of the d + 1 terms that are not zero none has an alignment beyond
//! max(m·M, H), so that cutting them off 25 bits below it loses less than (d + 1)·2^−25·B, and rounding the
//! sum toward zero less than 2^−23·B ([`simt::tensor`]); s itself is off by d·2^−24·B. For d ≤ 8 that is
//! less than 2^−20·B. `slack` is 2^−17·B, four times 2E: room for its own rounding, and for tensor cores that
//! keep 24 bits. Where an x_i is not finite nothing is known, and all chunks are scored.
//!
//! # Work split
//! A thread block of eight warps. Of 256 centroids a warp takes four sub-vectors at a time, a lane every 32nd
//! centroid, and the least s of the lanes is found by two reductions: a sub-vector costs a lane 8·(d + 3)
//! instructions and some 20 more. Of more the block takes 64 sub-vectors at a time (16 where fewer are left,
//! as of a step), a warp four chunks of them all; then a warp takes a sub-vector at a time, a lane of it a
//! chunk's μ, and of a chunk that is scored every 32nd centroid. A sub-vector costs a warp 2^b/128 MMAs and
//! four minima each, and then some 180 instructions of d = 8, b = 12.

use super::Code;
use glam::UVec4;
use half::f16;
use simt::math::{self, fma};
use simt::tensor::mma_f16;
use simt::warp::{self, FULL_MASK, warp_reduce_min_u32, warp_shuffle_xor, warp_vote_ballot};
use simt::{Global, Pod, Shared, bits, convert, thread, unroll};

/// Warps of a block.
const WARPS: u32 = super::ENCODE_THREADS / 32;
/// Sub-vectors that a warp takes at a time, of 256 centroids.
const AT_ONCE: usize = 4;
/// Centroids that a lane has in registers then.
const OF_LANE: usize = 8;
/// Chunks of a larger codebook: a lane has one.
const CHUNKS: u32 = 32;
const _: () = assert!(CHUNKS == 4 * WARPS, "a warp has four, each of which a lane of four keeps");
/// Sub-vectors that a block takes at a time then: four rows of tiles.
const ROWS: u32 = 64;
/// Floats from a sub-vector's minima to the next one's: the eight rows and four chunks that a warp stores at
/// a time are in banks of their own, and so are a row's 32 chunks.
const PITCH: u32 = CHUNKS + 4;
/// Floats that the minima take.
pub(super) const MINIMA: u32 = ROWS * PITCH;
/// Of B, how far above the least a chunk's minimum may be that is scored.
const SLACK: f32 = 1.0 / 131_072.0;
/// The smallest normal f16: subnormal operands are aligned as it is.
const LEAST_NORMAL: f32 = 1.0 / 16_384.0;
const MOST: f32 = 65_504.0;

/// What the kernel, the CPU's own path and the tests have in common.
#[derive(Debug)]
pub struct Nearest;

impl Nearest {
    /// ½‖c‖².
    #[inline(always)]
    pub fn half_norm<const N: usize>(c: &[f32; 8]) -> f32 {
        let mut sum = c[0] * c[0];
        unroll!(for i in 1..N, at_most 7 {
            sum = fma(c[i], c[i], sum);
        });
        0.5 * sum
    }

    /// ½‖c‖² − x·c.
    #[inline(always)]
    pub fn score<const N: usize>(x: &[f32; 8], c: &[f32; 8], half_norm: f32) -> f32 {
        let mut s = half_norm;
        unroll!(for i in 0..N, at_most 8 {
            s = fma(-x[i], c[i], s);
        });
        s
    }

    /// M of a codebook whose largest |c_i| is this: what [`encode`](fn@super::encode) reads behind the half
    /// norms.
    #[inline(always)]
    pub fn largest(element: f32) -> f32 {
        if element > LEAST_NORMAL { element } else { LEAST_NORMAL }
    }
}

/// A KV head's codebook.
#[derive(Clone, Copy)]
pub(super) struct HeadBook {
    /// Centroids, [2^b, d] from `at` on.
    pub centroids: Global<f16>,
    pub at: usize,
    /// [`Code::norm_floats`] from `norms_at` on: ½‖c‖² of each centroid, then H and M.
    pub norms: Global<f32>,
    pub norms_at: usize,
}

/// Shared memory of the search.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// What is stored of the tile's tokens in f16, [16, D].
    pub rows: Shared<u16>,
    /// [16, parts].
    pub codes: Shared<u32>,
    /// [`MINIMA`] floats, of more than 256 centroids.
    pub minima: Shared<f32>,
    /// The first sub-vector of the tile that is new, and how many there are.
    pub offset: u32,
    pub items: u32,
}

/// A word that orders like a score; zeros are equal.
#[inline(always)]
fn ordered(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    if bits >> 31 != 0 { !bits } else { bits | 1 << 31 }
}

/// The score of such a word.
#[inline(always)]
fn unordered(word: u32) -> f32 {
    f32::from_bits(if word >> 31 != 0 { word & !(1 << 31) } else { !word })
}

/// Codes of sub-vectors that are in `place.rows`, by all of 256 centroids. Warps write codes of their own.
#[simt::device]
pub(super) fn near_few<const C: u32>(own: Centroids<C>, place: Place) {
    let (warp, lane) = (thread::thread_idx_x() / 32, warp::lane_id());
    let mut item = warp * AT_ONCE as u32;
    while item < place.items {
        let mut x = [[0f32; 8]; AT_ONCE];
        unroll!(for i in 0..4 {
            x[i] = sub_vector::<C>(place.rows, place.offset + item + i as u32);
        });
        let mut best = [f32::INFINITY; AT_ONCE];
        let mut index = [u32::MAX; AT_ONCE];
        unroll!(for k in 0..8 {
            unroll!(for i in 0..4 {
                let score = own.score(&x[i], k);
                if score < best[i] {
                    best[i] = score;
                    index[i] = 32 * k as u32 + lane;
                }
            });
        });
        unroll!(for i in 0..4 {
            put(place, item + i as u32, best[i], index[i], lane);
        });
        item += WARPS * AT_ONCE as u32;
    }
}

/// Codes of sub-vectors by chunks that the tensor cores choose, of more than 256 centroids. All threads come
/// here.
#[simt::device]
pub(super) fn near_many<const C: u32>(book: HeadBook, place: Place) {
    let code = Code::of(C);
    let (warp, lane) = (thread::thread_idx_x() / 32, warp::lane_id());
    let of_chunk = code.centroids() / CHUNKS;
    let [largest_norm, largest] =
        book.norms.load_vector_readonly::<[f32; 2]>(book.norms_at + code.centroids() as usize);
    let mut first = 0;
    while first < place.items {
        let mut rows = ROWS;
        if place.items - first >= ROWS {
            chunk_minima::<C, 4>(book, place, first);
        } else {
            rows = ROWS / 4;
            chunk_minima::<C, 1>(book, place, first);
        }
        thread::sync_threads();
        let mut item = warp;
        while item < rows && first + item < place.items {
            let x = sub_vector::<C>(place.rows, place.offset + first + item);
            let (mut size, mut finite) = (LEAST_NORMAL, true);
            unroll!(for i in 0..(Code::of(C).d as usize), at_most 8 {
                size = math::max(size, math::abs(x[i]));
                finite &= math::abs(x[i]) <= MOST;
            });
            let own = place.minima.load(item * PITCH + lane);
            let least = unordered(warp_reduce_min_u32(FULL_MASK, ordered(own)));
            let bound = fma(code.d as f32 * size, largest, largest_norm);
            let mut chunks = warp_vote_ballot(FULL_MASK, !finite || own <= fma(SLACK, bound, least));
            let (mut best, mut index) = (f32::INFINITY, u32::MAX);
            while chunks != 0 {
                let number = chunks.trailing_zeros() * of_chunk + lane;
                chunks &= chunks - 1;
                unroll!(for k in 0..(Code::of(C).centroids() as usize / 1024), at_most 4 {
                    let number = number + 32 * k as u32;
                    let c = centroid::<C>(book.centroids, book.at, number, false);
                    let half_norm = book.norms.load_readonly(book.norms_at + number as usize);
                    let score = score::<C>(&x, &c, half_norm);
                    if score < best {
                        best = score;
                        index = number;
                    }
                });
            }
            put(place, first + item, best, index, lane);
            item += WARPS;
        }
        // The minima of the next ones come.
        thread::sync_threads();
        first += rows;
    }
}

/// The least score by the tensor cores in each chunk, of the 16·`TILES` sub-vectors from `first` on, as far
/// as they are there. A barrier must follow.
#[simt::device]
fn chunk_minima<const C: u32, const TILES: usize>(book: HeadBook, place: Place, first: u32) {
    let (code, items) = (Code::of(C), place.items);
    let (warp, lane) = (thread::thread_idx_x() / 32, warp::lane_id());
    // Of an operand's sixteen channels those of a sub-vector are the first ones; all others are 0.
    let (g, q, pairs) = (lane >> 2, lane & 3, code.d / 2);
    let mut a = [[0u32; 2]; 4];
    unroll!(for i in 0..TILES, at_most 4 {
        unroll!(for half in 0..2 {
            let item = first + 16 * i as u32 + 8 * half as u32 + g;
            if item < items && q < pairs {
                let pair: u32 = place.rows.load_vector(2 * ((place.offset + item) * pairs + q));
                a[i][half] = pair ^ 0x8000_8000;
            }
        });
    });
    // Loops that are not unrolled: what is loaded ahead would not fit the registers.
    let (of_chunk, chunks) = (bits::renewed(code.centroids() / CHUNKS), bits::renewed(4));
    let mut kept = [[0f32; 2]; 4];
    let mut chunk = 0;
    while chunk < chunks {
        let mut least = [[f32::INFINITY; 2]; 4];
        let mut number = (4 * warp + chunk) * of_chunk;
        let end = number + of_chunk;
        while number < end {
            unroll!(for u in 0..4 {
                let column = number + 8 * u as u32;
                let mut b = 0;
                if q < pairs {
                    let at = book.at + ((column + g) * code.d + 2 * q) as usize;
                    b = book.centroids.load_vector_readonly::<u32>(at);
                }
                let [low, high] =
                    book.norms.load_vector_readonly::<[f32; 2]>(book.norms_at + (column + 2 * q) as usize);
                unroll!(for i in 0..TILES, at_most 4 {
                    let s = mma_f16([a[i][0], a[i][1], 0, 0], [b, 0], [low, high, low, high]);
                    least[i][0] = math::min(least[i][0], math::min(s[0], s[1]));
                    least[i][1] = math::min(least[i][1], math::min(s[2], s[3]));
                });
            });
            number += 32;
        }
        unroll!(for i in 0..TILES, at_most 4 {
            unroll!(for half in 0..2 {
                let mut of_row = least[i][half];
                of_row = math::min(of_row, warp_shuffle_xor(FULL_MASK, of_row, 1, 32));
                of_row = math::min(of_row, warp_shuffle_xor(FULL_MASK, of_row, 2, 32));
                if q == chunk {
                    kept[i][half] = of_row;
                }
            });
        });
        chunk += 1;
    }
    unroll!(for i in 0..TILES, at_most 4 {
        unroll!(for half in 0..2 {
            let row = 16 * i as u32 + 8 * half as u32 + g;
            place.minima.store(row * PITCH + 4 * warp + q, kept[i][half]);
        });
    });
}

/// Writes the number of the least of the lanes' scores, of equal ones the lowest; 0 if there is none.
#[simt::device]
fn put(place: Place, item: u32, best: f32, index: u32, lane: u32) {
    let own = ordered(best);
    let least = warp_reduce_min_u32(FULL_MASK, own);
    let index = warp_reduce_min_u32(FULL_MASK, if own == least { index } else { u32::MAX });
    if lane == 0 {
        place.codes.store(place.offset + item, if index == u32::MAX { 0 } else { index });
    }
}

/// The channels of a sub-vector of the tile, the same in all lanes.
#[simt::device]
fn sub_vector<const C: u32>(rows: Shared<u16>, item: u32) -> [f32; 8] {
    let pairs = Code::of(C).d / 2;
    let mut x = [0f32; 8];
    unroll!(for i in 0..(Code::of(C).d as usize / 2), at_most 4 {
        [x[2 * i], x[2 * i + 1]] = halves(rows.load_vector(2 * (item * pairs + i as u32)));
    });
    x
}

#[inline(always)]
fn halves(pair: u32) -> [f32; 2] {
    let half = |bits: u32| convert::f32_from_f16(f16::from_bits(bits as u16));
    [half(pair), half(pair >> 16)]
}

/// The centroid of a number, of a codebook that begins at `book`; `ahead` of the wait of a launch that
/// overlaps: no launch writes centroids.
#[simt::device]
fn centroid<const C: u32>(books: Global<f16>, book: usize, number: u32, ahead: bool) -> [f32; 8] {
    let d = Code::of(C).d;
    let at = book + (number * d) as usize;
    let words = match d {
        2 => [word(books, at, ahead), 0, 0, 0],
        4 => {
            let [a, b] = word::<[u32; 2]>(books, at, ahead);
            [a, b, 0, 0]
        }
        _ => word::<UVec4>(books, at, ahead).to_array(),
    };
    let mut c = [0f32; 8];
    unroll!(for i in 0..(Code::of(C).d as usize / 2), at_most 4 {
        [c[2 * i], c[2 * i + 1]] = halves(words[i]);
    });
    c
}

#[inline(always)]
fn word<V: Pod>(books: Global<f16>, at: usize, ahead: bool) -> V {
    if ahead { books.load_vector_ahead(at) } else { books.load_vector_readonly(at) }
}

#[inline(always)]
fn score<const C: u32>(x: &[f32; 8], c: &[f32; 8], half_norm: f32) -> f32 {
    match Code::of(C).d {
        2 => Nearest::score::<2>(x, c, half_norm),
        4 => Nearest::score::<4>(x, c, half_norm),
        _ => Nearest::score::<8>(x, c, half_norm),
    }
}

/// Centroids of a lane: number 32·k + lane is its k-th.
#[derive(Clone, Copy)]
pub(super) struct Centroids<const C: u32> {
    c: [[f32; 8]; OF_LANE],
    half_norms: [f32; OF_LANE],
}

impl<const C: u32> Centroids<C> {
    /// Those of a codebook that begins at `book`, of 256; `ahead` as for one.
    #[simt::device]
    pub fn load(books: Global<f16>, book: usize, lane: u32, ahead: bool) -> Self {
        let mut own = Centroids { c: [[0.0; 8]; OF_LANE], half_norms: [0.0; OF_LANE] };
        unroll!(for k in 0..8 {
            own.c[k] = centroid::<C>(books, book, 32 * k as u32 + lane, ahead);
            own.half_norms[k] = match Code::of(C).d {
                2 => Nearest::half_norm::<2>(&own.c[k]),
                4 => Nearest::half_norm::<4>(&own.c[k]),
                _ => Nearest::half_norm::<8>(&own.c[k]),
            };
        });
        own
    }

    #[inline(always)]
    fn score(&self, x: &[f32; 8], k: usize) -> f32 {
        score::<C>(x, &self.c[k], self.half_norms[k])
    }
}
