//! A step's new token as the product gives it: rotary position embedding and [encoding](super::write) in one
//! launch.
//!
//! # Mathematics
//! That of the [rotation](crate::attention::rotation), whose results are rounded to f16 and encoded: the bits
//! of the two launches one after another.
//!
//! # Layout
//! `qkv` f32 [sequences, (q_heads + 2·kv_heads)·D], one token each; the others as for
//! [`encode`](fn@super::encode), keys and values in the same codes of 8 bits.
//!
//! # Bytes
//! A token: 4·(q_heads + 2·kv_heads)·D bytes read and 2·q_heads·D of queries written, besides what encoding
//! writes; 2^9·d bytes of codebook for each KV head's key and value, from the L2 cache. The rotated row is in
//! shared memory alone.
//!
//! # Work split
//! Grid (1, [`step_blocks`], sequences) of 256 threads. The first blocks have a KV head's key or value each:
//! one warp turns and transforms it, then eight look for centroids. The others have queries, a thread a pair.
//! A lane has its centroids, and its share of the transformation, ahead of the wait for the launch before: no
//! launch writes them, and little is loaded behind the wait but the row itself.

use super::nearest::{Centroids, Place, near_few};
use super::transform::{OfKeys, shared_row};
use super::write::{ENCODE_THREADS, EncodeShape, Target, layout, new_codes};
use super::{Code, Kind};
use crate::attention::BLOCK_TOKENS;
use crate::attention::rotation::{Pair, RopeShape, Unturned};
use half::f16;
use simt::convert::f16_from_f32;
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Shared, bits, kernel, thread, unroll};

/// Thread blocks of a token: those of keys and values, then those of queries.
pub const fn step_blocks(q_heads: u32, kv_heads: u32, head_dim: u32) -> u32 {
    2 * kv_heads + (q_heads * head_dim / 2).div_ceil(ENCODE_THREADS)
}

/// [`rope`](fn@crate::attention::rotation::rope) and [`encode`](fn@super::encode) of one token of each
/// sequence in one launch; `interleaved` is 1 for pairs of neighbours, 0 for halves. A token past its
/// sequence's room is left out, but for its queries. Grid (1, [`step_blocks`], sequences), with the shared
/// memory of [`encode_bytes`](super::encode_bytes).
#[kernel(
    system = vecinfer,
    instances(
        (64, 208), (64, 408), (64, 808), (96, 208), (96, 408), (128, 208), (128, 408), (128, 808), (256, 408)
    ),
    max_threads = 256,
    // Few blocks: each has the registers of a multiprocessor.
    min_blocks = 1,
    overlaps = late
)]
pub fn rope_encode<const D: usize, const C: u32>(
    qkv: Global<f32>,
    positions: Global<u32>,
    frequencies: Global<f32>,
    queries: GlobalMut<f16>,
    transforms: Global<f32>,
    key_books: Global<f16>,
    value_books: Global<f16>,
    codes: GlobalMut<u8>,
    recent_keys: GlobalMut<f16>,
    recent_values: GlobalMut<f16>,
    lengths: GlobalMut<u32>,
    refused: GlobalMut<u32>,
    rope: RopeShape,
    interleaved: u32,
    shape: EncodeShape,
) {
    let cache = shape.cache;
    let (t, lane) = (thread::thread_idx_x(), warp::lane_id());
    let (item, sequence) = (thread::block_idx_y(), thread::block_idx_z());
    let raw = Raw { rows: Unturned { qkv, positions, frequencies, shape: rope }, interleaved, sequence };
    let key = item < cache.kv_heads;
    // Blocks of queries load some head's, and have no use for them: ahead of the wait is no branch.
    let head = bits::rem_u32(item, cache.kv_heads);
    let (books, stride) = if key { (key_books, cache.key_stride) } else { (value_books, cache.value_stride) };
    let centroids = Centroids::<C>::load(books, (head * stride) as usize, lane, true);
    let of_keys = OfKeys::ahead::<D>(transforms, head, lane);
    thread::wait_for_previous();
    if item >= 2 * cache.kv_heads {
        turn_queries::<D>(raw, queries, (item - 2 * cache.kv_heads) * ENCODE_THREADS + t);
        return;
    }

    let position = positions.load(sequence as usize);
    if position >= cache.tiles * BLOCK_TOKENS {
        return;
    }
    if item == 0 && t == 0 {
        lengths.store(sequence as usize, position + 1);
    }
    let (tile, place) = (position / BLOCK_TOKENS, position % BLOCK_TOKENS);
    let (layout, row) = (layout::<D, C>(), sequence as usize * cache.kv_heads as usize + head as usize);
    // A thread has a word of the tile, which codes of other tokens share: from memory while the row is made.
    const { core::assert!(Code::of(C).tile_bytes(D as u32) / 4 <= ENCODE_THREADS) };
    let code = Code::of(C);
    let words = code.tile_bytes(D as u32) / 4;
    let codes = codes.cast::<u32>();
    let tile_words = ((shape.key_tile + shape.value_tile) / 4) as usize;
    let word_at = (row * cache.tiles as usize + tile as usize) * tile_words
        + if key { 0 } else { shape.key_tile as usize / 4 }
        + t as usize;
    let before = if t < words { codes.load(word_at) } else { 0 };
    if t < 32 {
        // Keys come behind the queries, values behind the keys, as items do.
        raw.share::<D>(layout.rows, place, rope.q_heads + item, lane);
        let mut x = shared_row::<D>(layout.rows, place, lane);
        if key {
            x = of_keys.transform::<D>(x, cache.hadamard != 0, lane);
        }
        // All lanes have read before one writes.
        warp::sync_warp(FULL_MASK);
        let recent = Some(if key { recent_keys } else { recent_values });
        let target = Target { rows: layout.rows, key, row, recent, pool: None, head, refused, cache };
        target.keep::<D>(x, position, lane);
    }
    thread::sync_threads();
    let parts = code.parts(D as u32);
    let found = Place {
        rows: layout.rows,
        codes: layout.codes,
        minima: layout.minima,
        offset: place * parts,
        items: parts,
    };
    near_few::<C>(centroids, found);
    thread::sync_threads();

    if t < words {
        let kind = if key { Kind::Key } else { Kind::Value };
        let (new, mask) = new_codes::<D, C>(kind, layout.codes, t, (place, place + 1));
        if mask != 0 {
            codes.store(word_at, before & !mask | new);
        }
    }
}

/// The product's row of a sequence's token.
#[derive(Clone, Copy)]
struct Raw {
    rows: Unturned,
    interleaved: u32,
    sequence: u32,
}

impl Raw {
    #[simt::device]
    fn load(self, head: u32, i: u32) -> Pair {
        if self.interleaved != 0 {
            self.rows.load::<1>(self.sequence, head, i)
        } else {
            self.rows.load::<0>(self.sequence, head, i)
        }
    }

    /// Turns a head's pairs and puts them, in f16, into row `place` of shared memory. A warp does it.
    #[simt::device]
    fn share<const D: usize>(self, rows: Shared<u16>, place: u32, head: u32, lane: u32) {
        let pairs = D as u32 / 2;
        // All under way before the first sine; where there is none, the lane's first again, not written.
        let own = [0, 1, 2, 3].map(|k| {
            let i = lane + 32 * k;
            self.load(head, if i < pairs { i } else { lane })
        });
        unroll!(for k in 0..4 {
            if lane + 32 * (k as u32) < pairs {
                let (channels, pair) = (own[k].channels, own[k].turned());
                rows.store(place * D as u32 + channels[0], f16_from_f32(pair[0]).to_bits());
                rows.store(place * D as u32 + channels[1], f16_from_f32(pair[1]).to_bits());
            }
        });
        warp::sync_warp(FULL_MASK);
    }
}

/// Turns pair `item` of the token's queries.
#[simt::device]
fn turn_queries<const D: usize>(raw: Raw, queries: GlobalMut<f16>, item: u32) {
    let (head, i) = (item / (D as u32 / 2), item % (D as u32 / 2));
    let q_heads = raw.rows.shape.q_heads;
    if head >= q_heads {
        return;
    }
    let own = raw.load(head, i);
    let pair = own.turned();
    let to = (raw.sequence as usize * q_heads as usize + head as usize) * D;
    queries.store(to + own.channels[0] as usize, f16_from_f32(pair[0]));
    queries.store(to + own.channels[1] as usize, f16_from_f32(pair[1]));
}
