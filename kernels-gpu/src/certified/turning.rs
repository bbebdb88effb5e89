//! `turn_append`: a token of each sequence from a product's output into the cache, in one launch.
//!
//! What [`rope`](fn@crate::attention::rotation::rope), [`append`](fn@super::append) and
//! [`quantize_block`](fn@super::quantize_block) do one after another, with their bits: queries and keys are
//! turned, all three are rounded to f16, keys and values go to the originals and the fresh block, and a block
//! that is full then is quantized.
//!
//! # Work split
//! Grid (kv_heads + ⌈q_heads / 2⌉, sequences) of D threads. A block of a **KV head** turns the keys and looks
//! at the values of *all* KV heads, so that each sees for itself whether the token is refused: they are
//! 8·D·kv_heads bytes, which the L2 cache has, and nobody waits for another. It stores its own head's rows,
//! and quantizes its own head of a full block: the rows before this one are in the fresh block, this one's
//! stores are ordered by a barrier. The other blocks turn two **query heads** each. A thread has one pair of
//! channels, of every second head, and so one angle.
//!
//! # What is refused
//! As in [`tokens`](super::tokens). A token's place is its position: where a sequence has stopped, positions
//! have to be made of the lengths anew before it goes on. `limits` is read by all blocks of a sequence while
//! the first of them may set it to 0, by atomics: who finds 0 has nothing to store, and so has everybody
//! else.
//!
//! # Bytes
//! A sequence: 4·D·(q_heads + 2·kv_heads) read from memory, 2·D·q_heads + 8·D·kv_heads written, half of the
//! latter over the bus where the originals are host memory; each KV head reads 8·D·kv_heads from the L2
//! cache. A full block: as [`quantize_block`](fn@super::quantize_block).

use super::admit::{Scratch, forget};
use super::layout::{TileLayout, pair};
use super::metadata::KeyMetadata;
use super::tokens::CacheShape;
use super::write::{Chances, Destination, quantize, vector_places, write_layout};
use crate::attention::BLOCK_TOKENS;
use crate::attention::rotation::{RopeShape, pair_channels, turn_by};
use glam::UVec4;
use half::f16;
use simt::convert::f16_from_f32;
use simt::math::{canonical_nan, sin_cos};
use simt::{Global, GlobalMut, kernel, thread, unroll};

/// KV heads of which a thread has its pairs under way at once.
const AT_ONCE: usize = 4;

/// What a product gives for a token, and what turns it: one thread's pair of each head. A pair of
/// [`rope`](fn@crate::attention::rotation::rope) loads its position and makes sine and cosine for itself;
/// here one angle serves all heads.
#[derive(Clone, Copy)]
struct Turner {
    qkv: Global<f32>,
    /// The token's first element.
    from: usize,
    head_dim: u32,
    channels: [u32; 2],
    /// Sine and cosine of the angle, of a pair that turns.
    angle: Option<(f32, f32)>,
}

impl Turner {
    /// The pair of head `head` among the query heads, key heads and value heads.
    #[inline(always)]
    fn load(self, head: u32) -> [f32; 2] {
        let at = self.from + (head * self.head_dim) as usize;
        [self.qkv.load(at + self.channels[0] as usize), self.qkv.load(at + self.channels[1] as usize)]
    }

    /// A pair of a query or a key, turned if it turns.
    #[inline(always)]
    fn turned(self, pair: [f32; 2]) -> [f32; 2] {
        match self.angle {
            Some(angle) => turn_by(pair, angle),
            None => pair,
        }
    }
}

/// A pair rounded to f16, NaN canonical.
#[inline(always)]
fn rounded([x, y]: [f32; 2]) -> [f16; 2] {
    [f16_from_f32(canonical_nan(x)), f16_from_f32(canonical_nan(y))]
}

/// Whether both elements of a pair are finite in f16. Reports each that is not by its flat index in
/// [sequences, kv_heads, D], `from` + channel; `kind` is 0 for keys and 2 for values.
#[inline(always)]
fn takes(pair: [f16; 2], kind: usize, from: usize, channels: [u32; 2], refusals: GlobalMut<u64>) -> bool {
    let mut all = true;
    unroll!(for i in 0..2 {
        // Whatever is beyond f16 is infinite in it.
        if pair[i].to_bits() & 0x7c00 == 0x7c00 {
            all = false;
            refusals.atomic_min(kind, (from + channels[i] as usize) as u64);
        }
    });
    all
}

/// See the [module](self). `qkv` [sequences, (q_heads + 2·kv_heads)·D], `positions` \[sequences\], where each
/// sequence ends; `queries` [sequences, q_heads, D]; `fresh_keys` and `fresh_values` [sequences, kv_heads,
/// 16, D] of the near pool, `slots` all of that; `refusals` and the rest as for [`append`](fn@super::append);
/// `tiles`, `annotations`, `problems`, `by_chance` and `seed` as for
/// [`quantize_block`](fn@super::quantize_block). `interleaved` is 0 or 1. Shared: [`write_layout`].
#[kernel(
    system = certified,
    instances((64, f16), (128, f16), (64, f32), (128, f32)),
    max_threads = 128,
    min_blocks = 4,
    overlaps = in_turn
)]
pub fn turn_append<const D: u32, M: KeyMetadata>(
    qkv: Global<f32>,
    positions: Global<u32>,
    frequencies: Global<f32>,
    queries: GlobalMut<f16>,
    table: Global<u32>,
    lengths: GlobalMut<u32>,
    limits: GlobalMut<u32>,
    keys: GlobalMut<f16>,
    values: GlobalMut<f16>,
    fresh_keys: GlobalMut<f16>,
    fresh_values: GlobalMut<f16>,
    slots: GlobalMut<f16>,
    directory: GlobalMut<u64>,
    tiles: GlobalMut<u8>,
    annotations: GlobalMut<f32>,
    problems: GlobalMut<u64>,
    refusals: GlobalMut<u64>,
    rope: RopeShape,
    shape: CacheShape,
    scratch: Scratch,
    interleaved: u32,
    by_chance: u32,
    seed: u32,
) {
    let (block, row, t) = (thread::block_idx_x(), thread::block_idx_y(), thread::thread_idx_x());
    let (q_heads, kv_heads) = (rope.q_heads, rope.kv_heads);
    // Threads of the first half have every even head, those of the second every odd one.
    let (half, i) = (t / (D / 2), t % (D / 2));
    let position = positions.load(row as usize);
    let turns = i < rope.rotary / 2;
    let angle = if turns { Some(sin_cos(position as f32 * frequencies.load(i as usize))) } else { None };
    let from = row as usize * ((q_heads + 2 * kv_heads) * D) as usize;
    let channels = pair_channels(i, rope.rotary, interleaved == 1);
    let turner = Turner { qkv, from, head_dim: D, channels, angle };
    if block >= kv_heads {
        let head = 2 * (block - kv_heads) + half;
        if head < q_heads {
            let pair = rounded(turner.turned(turner.load(head)));
            let to = (row as usize * q_heads as usize + head as usize) * D as usize;
            queries.store(to + channels[0] as usize, pair[0]);
            queries.store(to + channels[1] as usize, pair[1]);
        }
        return;
    }

    let layout = TileLayout::new(D, M::LAYOUT);
    // The token's rows of this head, of keys and then of values, have the room of the tile.
    let token_rows = write_layout(layout).tile;
    let limit = limits.atomic_load(row as usize);
    let has_room = position < limit;
    let (index, token) = (position / BLOCK_TOKENS, position % BLOCK_TOKENS);
    let destination = if has_room { table.load((row * shape.max_blocks + index) as usize) } else { 0 };
    let mut taken = has_room;
    let mut first = half;
    while first < kv_heads {
        let mut raw = [[[0f32; 2]; 2]; AT_ONCE];
        unroll!(for j in 0..AT_ONCE, at_most 4 {
            let head = first + 2 * j as u32;
            if head < kv_heads {
                raw[j] = [turner.load(q_heads + head), turner.load(q_heads + kv_heads + head)];
            }
        });
        unroll!(for j in 0..AT_ONCE, at_most 4 {
            let head = first + 2 * j as u32;
            if has_room && head < kv_heads {
                let (key, value) = (rounded(turner.turned(raw[j][0])), rounded(raw[j][1]));
                let at = (row as usize * kv_heads as usize + head as usize) * D as usize;
                let takes_key = takes(key, 0, at, channels, refusals);
                let takes_value = takes(value, 2, at, channels, refusals);
                taken = taken && takes_key && takes_value;
                if head == block {
                    unroll!(for c in 0..2 {
                        token_rows.store_vector::<u16>(2 * channels[c], key[c].to_bits());
                        token_rows.store_vector::<u16>(2 * (D + channels[c]), value[c].to_bits());
                    });
                }
            }
        });
        first += 2 * AT_ONCE as u32;
    }
    if thread::sync_threads_and(taken as u32) == 0 {
        if block == 0 && t == 0 && limit != 0 {
            limits.atomic_store(row as usize, 0);
            if !has_room {
                refusals.atomic_min(4, row as u64);
            }
        }
        return;
    }

    // Two neighbouring channels a thread: of keys in the first half, of values in the second.
    let two = token_rows.load_vector::<u32>(4 * t);
    let inside = (token * D + 2 * i) as usize;
    let (originals, fresh) = if half == 0 { (keys, fresh_keys) } else { (values, fresh_values) };
    originals.store_vector::<u32>(layout.originals(destination, kv_heads, block) + inside, two);
    let start = layout.originals(row, kv_heads, block);
    fresh.store_vector::<u32>(start + inside, two);
    if let Some(slot) = shape.resident_slot(row, index, block) {
        let slot = if half == 0 { slot } else { scratch.key_slots + slot };
        slots.store_vector::<u32>(slot as usize * (BLOCK_TOKENS * D) as usize + inside, two);
    }
    if block == 0 && t == 0 {
        lengths.store(row as usize, position + 1);
    }
    if token < BLOCK_TOKENS - 1 {
        return;
    }
    if t == 0 {
        forget(directory, scratch, pair(destination, kv_heads, block) as u32);
    }
    // The rows are in the fresh block, and nobody needs the room of the tile any more.
    thread::sync_threads();
    let from = vector_places::<D>(start, t);
    let vectors = [
        fresh_keys.load_vector::<UVec4>(from[0]),
        fresh_keys.load_vector::<UVec4>(from[1]),
        fresh_values.load_vector::<UVec4>(from[2]),
        fresh_values.load_vector::<UVec4>(from[3]),
    ];
    let to = Destination { block: destination, kv_heads, head: block, tiles, annotations, problems };
    let chances = Chances::new(by_chance, seed, index, block);
    quantize::<f16, D, M>(vectors, (fresh_keys.as_const(), fresh_values.as_const(), start), to, chances);
}

/// The launch of [`turn_append`](fn@turn_append) for so many sequences.
#[cfg(not(target_arch = "nvptx64"))]
pub fn turn_launch(layout: TileLayout, rope: RopeShape, sequences: u32) -> simt::LaunchShape {
    let blocks = rope.kv_heads + rope.q_heads.div_ceil(2);
    simt::LaunchShape::new((blocks, sequences), layout.head_dim).shared(write_layout(layout).bytes)
}
