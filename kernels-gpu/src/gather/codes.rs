//! # Mathematics
//! The bounds of a gather-block in 8 bits, rounded outward, with one scale 2^e for all of its channels:
//!
//! ```text
//! e = the least with max_c max(|kmax_c|, |kmin_c|) <= 127·2^e, and no less than −100
//! high_c = ceil(kmax_c / 2^e)        low_c = floor(kmin_c / 2^e)
//! ```
//!
//! so kmax_c <= high_c·2^e < kmax_c + 2^e, and kmin_c likewise from below: a score by them is at least the
//! score by the bounds, and still at least q·k for every key of the block. Division by a power of two is
//! exact, and ceil(ceil(x/2^d)/2^f) = ceil(x/2^(d+f)): so codes of some tokens become those of more tokens by
//! shifts that round outward, and have the same bits however the tokens came. A block with a key that is not
//! finite has NaN for a scale, and a score that ranks above all.
//!
//! # Layout
//! `codes` [sequences, kv_heads, tiles, 8·D + 16 words]: a tile is 16 gather-blocks. Byte c mod 4 of word
//!
//! ```text
//! 128·(c / 16) + 4·(4·(b mod 8) + c mod 16 / 4) + 2·kind + b / 8
//! ```
//!
//! is the code of channel c of block b, and 128; kind 0 is the high one. So a load of 16 bytes is what a lane
//! of a warp needs of both operands of a contraction. The last 16 words are the blocks' scales as f32.
//!
//! # Bytes
//! 2·D + 4 a gather-block and KV head, where bounds of 16 bits take 4·D. `squeeze` reads 2·D a new token and
//! KV head, and reads and writes 2·D + 4 for a step's block.
//!
//! # Work split
//! Grid as for [`fold`](fn@super::fold). A thread has four channels and every eighth token; the eight threads
//! of the same channels meet in shared memory, and one warp writes.

use super::bounds::{Extremes, FoldShape, TILE_BLOCKS, tile_words};
use crate::attention::{BLOCK_TOKENS, Half};
use glam::UVec2;
use half::{bf16, f16};
use simt::math::{NAN_BITS, to_i32_floor};
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Shared, SharedPlan, bits, half2, kernel, thread, unroll};

/// Threads that share four channels in [`squeeze`](fn@squeeze).
pub const SQUEEZE_LANES: u32 = 8;
/// The least e.
const LEAST: i32 = -100;
/// What a code has added to it.
const BIAS: i32 = 128;
/// Words of a thread in shared memory: two pairs, each the largest and the smallest.
const OWN: u32 = 4;

/// Words of a tile of codes.
#[inline(always)]
pub const fn code_words(head_dim: u32) -> u32 {
    tile_words(head_dim) / 2 + TILE_BLOCKS
}

/// The word of a tile with channels `4·quad` to `4·quad + 3` of block `block` of it.
#[inline(always)]
pub const fn code_word(kind: u32, block: u32, quad: u32) -> u32 {
    quad / 4 * 128 + 4 * (4 * (block % 8) + quad % 4) + 2 * kind + block / 8
}

/// The word of a tile with the scale of block `block` of it.
#[inline(always)]
pub const fn scale_word(head_dim: u32, block: u32) -> u32 {
    tile_words(head_dim) / 2 + block
}

/// e as the scale is stored.
#[inline(always)]
pub fn scale(e: i32) -> f32 {
    f32::from_bits(((e + 127) as u32) << 23)
}

/// The least e for a largest magnitude, by its bits.
#[inline(always)]
fn exponent(largest: u32) -> i32 {
    // 127 is 1.984375·2^6.
    let beyond = (largest & 0x7f_ffff > 0x7e_0000) as i32;
    ((largest >> 23) as i32 - 127 - 6 + beyond).max(LEAST)
}

/// The bounds of four channels in 16 bits, as stored: for each pair maxima and minima.
pub type Quad = [[u32; 2]; 2];

/// The bits of the largest magnitude of all, no less than those of an infinity where one is not finite.
#[inline(always)]
pub fn largest<E: Half>(quad: Quad) -> u32 {
    let mut largest = 0;
    unroll!(for pair in 0..2 {
        unroll!(for kind in 0..2 {
            let [low, high] = E::unpack(quad[pair][kind]);
            largest = largest.max(low.to_bits() & 0x7fff_ffff).max(high.to_bits() & 0x7fff_ffff);
        });
    });
    largest
}

/// The scale of a block of which `largest` are the bits of the largest magnitude; `old` is what it had for
/// its first tokens.
#[inline(always)]
pub fn scale_of(largest: u32, old: Option<f32>) -> f32 {
    const INFINITY: u32 = 0x7f80_0000;
    let (had, finite) = match old {
        Some(old) => ((old.to_bits() >> 23) as i32 - 127, !old.is_nan()),
        None => (LEAST, true),
    };
    let e = exponent(largest);
    if finite && largest < INFINITY { scale(if e > had { e } else { had }) } else { f32::from_bits(NAN_BITS) }
}

/// The codes of four channels by `scale`, high ones and low ones; `old` are those of the block's first
/// tokens, with the scale that they had.
#[inline(always)]
pub fn codes<E: Half>(quad: Quad, scale: f32, old: Option<([u32; 2], f32)>) -> [u32; 2] {
    let mut words = [0u32; 2];
    if scale.is_nan() {
        return [BIAS as u32 * 0x0101_0101; 2];
    }
    // A power of two, and its reciprocal is one.
    let inverse = f32::from_bits((254 << 23) - scale.to_bits());
    unroll!(for kind in 0..2 {
        unroll!(for pair in 0..2 {
            let both = E::unpack(quad[pair][kind]);
            unroll!(for i in 0..2 {
                let at = 8 * (2 * pair + i) as u32;
                // Downward, of the number or of its opposite.
                let x = if kind == 0 { -both[i] } else { both[i] };
                let mut code = to_i32_floor(x * inverse);
                // What a product is too small for.
                code = if x < 0.0 && code == 0 { -1 } else { code };
                if let Some((words, had)) = old {
                    let had_code = (words[kind] >> at & 0xff) as i32 - BIAS;
                    let steps = ((scale.to_bits() >> 23) - (had.to_bits() >> 23)).min(31);
                    let shifted = (if kind == 0 { -had_code } else { had_code }) >> steps;
                    code = if shifted < code { shifted } else { code };
                }
                let code = if kind == 0 { -code } else { code };
                words[kind] |= ((code + BIAS) as u32) << at;
            });
        });
    });
    words
}

/// Codes of channels `4·quad + 2·half` and the next as a pair of the type.
#[inline(always)]
pub fn restored<E: Half>(word: u32, half: usize) -> u32 {
    if E::IS_F16 {
        // 1024 + byte, less 1152.
        const THOUSAND: u32 = 0x6400_6400;
        let biased = bits::byte_perm(word, THOUSAND, if half == 0 { 0x7170 } else { 0x7372 });
        half2::sub_f16x2(biased, 0x6480_6480)
    } else {
        // 2^23 + byte, less 2^23 + 128.
        const LARGE: u32 = 0x4b00_0000;
        let first = 2 * half as u32;
        let number = |byte: u32| f32::from_bits(bits::byte_perm(word, LARGE, 0x7440 | byte)) - 8_388_736.0;
        E::pack(number(first), number(first + 1))
    }
}

/// What the threads of the same channels have: [lanes, head_dim / 4, 4].
const fn shared() -> Shared<u32> {
    SharedPlan::new().array(SQUEEZE_LANES * 32 * OWN)
}

/// Shared memory of [`squeeze`](fn@squeeze).
pub const fn squeeze_bytes() -> u32 {
    4 * shared().len()
}

/// As [`fold`](fn@super::fold), with the bounds in 8 bits: the same arguments and grid, [`SQUEEZE_LANES`] · D
/// / 4 threads. D is up to 128: one warp has all channels of a block.
#[kernel(system = gather, instances(f16, bf16), max_threads = 256, overlaps)]
pub fn squeeze<E: Half>(
    keys: Global<E>,
    table: Global<u32>,
    positions: Global<u32>,
    lengths: Global<u32>,
    bounds: GlobalMut<u32>,
    shape: FoldShape,
) {
    let (head, sequence) = (thread::block_idx_y(), thread::block_idx_z());
    let first = positions.load(sequence as usize * shape.stride as usize);
    let room = shape.max_blocks * BLOCK_TOKENS;
    let length = lengths.load(sequence as usize).min(room);
    if first >= length {
        return;
    }
    let index = bits::div_u32(first, shape.block) + thread::block_idx_x();
    let begin = first.max(index * shape.block);
    let end = length.min((index + 1) * shape.block);
    if begin >= end {
        return;
    }
    let quads = shape.head_dim / 4;
    let t = thread::thread_idx_x();
    let (quad, lane) = (bits::rem_u32(t, quads), bits::div_u32(t, quads));
    let mut extremes = [Extremes::NONE; 2];
    let mut tile = begin / BLOCK_TOKENS;
    while tile * BLOCK_TOKENS < end {
        let block = table.load((sequence * shape.max_blocks + tile) as usize);
        let rows = (block as usize * shape.kv_heads as usize + head as usize) * BLOCK_TOKENS as usize;
        let mut two = [UVec2::ZERO; 2];
        unroll!(for i in 0..2 {
            // A token that is not of the chunk gives way to its nearest: once more changes nothing.
            let token = (tile * BLOCK_TOKENS + SQUEEZE_LANES * i as u32 + lane).max(begin).min(end - 1);
            let row = rows + (token % BLOCK_TOKENS) as usize;
            two[i] = keys.load_vector(row * shape.head_dim as usize + 4 * quad as usize);
        });
        unroll!(for i in 0..2 {
            extremes[0].take::<E>(two[i].x, two[i].x);
            extremes[1].take::<E>(two[i].y, two[i].y);
        });
        tile += 1;
    }
    let at = |lane: u32, pair: usize, kind: u32| OWN * (lane * quads + quad) + 2 * pair as u32 + kind;
    unroll!(for pair in 0..2 {
        let [largest, smallest] = extremes[pair].words();
        shared().store(at(lane, pair, 0), largest);
        shared().store(at(lane, pair, 1), smallest);
    });
    thread::sync_threads();
    if t >= 32 {
        return;
    }
    // A warp, of whose lanes some have the same channels where there are fewer than 32 quads.
    let mut quad_bounds = [[0u32; 2]; 2];
    unroll!(for pair in 0..2 {
        unroll!(for other in 0..8 {
            let other = other as u32;
            extremes[pair].take::<E>(shared().load(at(other, pair, 0)), shared().load(at(other, pair, 1)));
        });
        quad_bounds[pair] = extremes[pair].words();
    });
    let row = sequence as usize * shape.kv_heads as usize + head as usize;
    let words = code_words(shape.head_dim) as usize;
    let start = (row * shape.tiles as usize + (index / TILE_BLOCKS) as usize) * words;
    let block = index % TILE_BLOCKS;
    let place = |kind: u32| start + code_word(kind, block, quad) as usize;
    let scale_at = start + scale_word(shape.head_dim, block) as usize;
    let mut had = None;
    let mut old = None;
    if begin != index * shape.block {
        let scale = f32::from_bits(bounds.load(scale_at));
        had = Some(scale);
        old = Some(([bounds.load(place(0)), bounds.load(place(1))], scale));
    }
    // All have read.
    warp::sync_warp(FULL_MASK);
    let all = warp::warp_reduce_max_u32(FULL_MASK, largest::<E>(quad_bounds));
    let scale = scale_of(all, had);
    let [high, low] = codes::<E>(quad_bounds, scale, old);
    if t < quads {
        bounds.store(place(0), high);
        bounds.store(place(1), low);
    }
    if t == 0 {
        bounds.store(scale_at, scale.to_bits());
    }
}
