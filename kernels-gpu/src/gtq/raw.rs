//! New tokens as the product gives them: rotary position embedding and [encoding](super::write) in one
//! launch.
//!
//! # Mathematics
//! That of the [rotation](crate::attention::rotation), whose results are rounded to f16 and encoded: the bits
//! of the two launches one after another.
//!
//! # Bytes
//! A token: 4·(q_heads + 2·kv_heads)·D bytes read and 2·q_heads·D of queries written, besides what encoding
//! writes. Rotated keys, and values in f16, are in shared memory alone: 1 KiB a block at D = 128.
//!
//! # Work split
//! Grid (tokens, blocks of a token, sequences) of 128 threads. The first blocks of a token have four rows of
//! keys and values each, a warp a row, as in [`encode`](fn@super::encode). The others have its queries, a
//! thread a pair. A lane turns D/64 pairs of its warp's row, which go through shared memory to the lanes that
//! have them as neighbouring dimensions, or as dimensions of a part. Nothing but a warp waits for it. All of
//! a lane's loads but that of the table are under way before the first sine.

use super::Side;
use super::parts;
use super::write::{ENCODE_THREADS, EncodeShape, Memory, PartBooks, Work};
use crate::attention::Half;
use crate::attention::rotation::{Pair, RopeShape, Unturned};
use glam::UVec2;
use half::f16;
use simt::convert::f16_from_f32;
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Shared, SharedPlan, kernel, thread, unroll};

/// Warps of a block: rows of keys and values.
const ROWS: u32 = ENCODE_THREADS / 32;

/// The shared memory of a block, rows of f16 [4, D], and its bytes.
pub const fn row_layout<const D: usize>() -> (Shared<u16>, u32) {
    let mut plan = SharedPlan::new();
    let rows = plan.array(ROWS * D as u32);
    (rows, plan.bytes())
}

/// Thread blocks of a token: those of keys and values, then those of queries.
pub const fn blocks(q_heads: u32, kv_heads: u32, head_dim: u32) -> [u32; 2] {
    [(2 * kv_heads).div_ceil(ROWS), (q_heads * head_dim / 2).div_ceil(ENCODE_THREADS)]
}

/// [`rope`](fn@crate::attention::rotation::rope) and [`encode`](fn@super::encode) in one launch: `qkv` f32
/// [rows, (q_heads + 2·kv_heads)·D], `frequencies` [rotary / 2], `queries` [rows, q_heads, D]; the others as
/// for `encode`. Grid (tokens, sum of [`blocks`], sequences), with the shared memory of [`row_layout`].
#[kernel(system = gtq, instances((64, 0), (64, 1), (128, 0), (128, 1)), max_threads = 128, overlaps)]
pub fn rope_encode<const D: usize, const INTERLEAVED: u32>(
    qkv: Global<f32>,
    positions: Global<u32>,
    frequencies: Global<f32>,
    queries: GlobalMut<f16>,
    table: Global<u32>,
    lengths: GlobalMut<u32>,
    tiles: GlobalMut<u8>,
    near: GlobalMut<u8>,
    problems: GlobalMut<u32>,
    rope: RopeShape,
    shape: EncodeShape,
) {
    let (work, lane) = (Work::of_warp(shape), warp::lane_id());
    let raw = Unturned { qkv, positions, frequencies, shape: rope };
    if !has_row(work, shape) {
        turn_queries::<D, INTERLEAVED>(raw, queries, work.row, shape);
        return;
    }
    let own = load_pairs::<D, INTERLEAVED>(raw, work, lane);
    let memory = Memory { positions, table, lengths, tiles, near, problems };
    let target = memory.place::<D>(work, false, shape);
    let x = share_row::<D>(own).neighbours::<D>(lane);
    // Two calls, so that each knows its side.
    if work.is_key {
        target.write_row::<D>(Side::Key, x, shape);
    } else {
        target.write_row::<D>(Side::Value, x, shape);
    }
}

/// The same with keys in parts, as [`encode_parts`](fn@super::encode_parts).
#[kernel(system = gtq, instances((64, 0), (64, 1), (128, 0), (128, 1)), max_threads = 128, overlaps = late)]
pub fn rope_encode_parts<const D: usize, const INTERLEAVED: u32>(
    qkv: Global<f32>,
    positions: Global<u32>,
    frequencies: Global<f32>,
    queries: GlobalMut<f16>,
    table: Global<u32>,
    order: Global<u8>,
    lengths: GlobalMut<u32>,
    tiles: GlobalMut<u8>,
    near: GlobalMut<u8>,
    problems: GlobalMut<u32>,
    books: Global<f32>,
    rope: RopeShape,
    shape: EncodeShape,
) {
    let (work, lane) = (Work::of_warp(shape), warp::lane_id());
    // No launch writes these. A warp without a key has no use for them.
    let books = PartBooks::ahead(books, lane);
    let channels = parts::channels_ahead::<D>(order, work.head, lane);
    thread::wait_for_previous();
    let raw = Unturned { qkv, positions, frequencies, shape: rope };
    if !has_row(work, shape) {
        turn_queries::<D, INTERLEAVED>(raw, queries, work.row, shape);
        return;
    }
    let own = load_pairs::<D, INTERLEAVED>(raw, work, lane);
    let memory = Memory { positions, table, lengths, tiles, near, problems };
    let target = memory.place::<D>(work, true, shape);
    let own = share_row::<D>(own);
    if work.is_key {
        target.write_parts::<D>(own.gathered::<D>(channels), books, shape);
    } else {
        target.write_row::<D>(Side::Value, own.neighbours::<D>(lane), shape);
    }
}

/// Whether a warp has a row of keys or values.
#[inline(always)]
fn has_row(work: Work, shape: EncodeShape) -> bool {
    work.item < 2 * shape.kv_heads
}

/// Turns a block's share of a token's queries.
#[simt::device]
fn turn_queries<const D: usize, const INTERLEAVED: u32>(
    raw: Unturned,
    queries: GlobalMut<f16>,
    row: u32,
    shape: EncodeShape,
) {
    let first = (2 * shape.kv_heads).div_ceil(ROWS);
    if thread::block_idx_y() < first {
        return;
    }
    let item = (thread::block_idx_y() - first) * ENCODE_THREADS + thread::thread_idx_x();
    let (head, i) = (item / (D as u32 / 2), item % (D as u32 / 2));
    if head >= raw.shape.q_heads {
        return;
    }
    let own = raw.load::<INTERLEAVED>(row, head, i);
    let ([first, second], pair) = (own.channels, own.turned());
    let to = (row as usize * raw.shape.q_heads as usize + head as usize) * D;
    queries.store(to + first as usize, f16_from_f32(pair[0]));
    queries.store(to + second as usize, f16_from_f32(pair[1]));
}

/// A warp's row of f16 in shared memory.
#[derive(Clone, Copy)]
struct OwnRow {
    rows: Shared<u16>,
    start: u32,
}

/// Loads a lane's pairs of the warp's row of keys or values: of D = 64 there is one.
#[simt::device]
fn load_pairs<const D: usize, const INTERLEAVED: u32>(raw: Unturned, work: Work, lane: u32) -> [Pair; 2] {
    // Keys come behind the queries, values behind the keys, as items do.
    let head = raw.shape.q_heads + work.item;
    [0, 1].map(|t| raw.load::<INTERLEAVED>(work.row, head, lane + if t < D / 64 { 32 * t as u32 } else { 0 }))
}

/// Turns them, into shared memory.
#[simt::device]
fn share_row<const D: usize>(pairs: [Pair; 2]) -> OwnRow {
    let (rows, _) = row_layout::<D>();
    let start = thread::thread_idx_x() / 32 * D as u32;
    unroll!(for t in 0..(D / 64), at_most 2 {
        let pair = pairs[t].turned();
        unroll!(for i in 0..2 {
            rows.store(start + pairs[t].channels[i], f16_from_f32(pair[i]).to_bits());
        });
    });
    warp::sync_warp(FULL_MASK);
    OwnRow { rows, start }
}

impl OwnRow {
    /// As [`row`](super::write::row) has it.
    #[simt::device]
    fn neighbours<const D: usize>(self, lane: u32) -> [f32; 4] {
        let at = self.start + lane * (D as u32 / 32);
        let mut words = [0u32; 2];
        if D == 128 {
            words = self.rows.load_vector::<UVec2>(at).to_array();
        } else {
            words[0] = self.rows.load_vector::<u32>(at);
        }
        let ([a, b], [c, d]) = (<f16 as Half>::unpack(words[0]), <f16 as Half>::unpack(words[1]));
        [a, b, c, d]
    }

    /// As [`gathered`](parts::gathered) has it.
    #[simt::device]
    fn gathered<const D: usize>(self, channels: u32) -> [f32; 4] {
        let mut x = [0f32; 4];
        unroll!(for i in 0..4 {
            if i < D / 32 {
                let channel = channels >> (8 * i) & 0xff;
                let bits = self.rows.load(self.start + channel);
                x[i] = simt::convert::f32_from_f16(f16::from_bits(bits));
            }
        });
        x
    }
}
