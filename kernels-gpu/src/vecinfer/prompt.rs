//! What a prompt needs besides [`encode`](fn@super::encode): the tokens before its chunk as they are stored,
//! and its queries in the space of the keys. Exact attention over both is the dense kernel's.
//!
//! # Layout
//! As for `encode`; `queries` [tokens, q_heads, D].
//!
//! # Bytes
//! A token and KV head: its codes are read, 4·D bytes written. A chunk's attention reads as much again.
//!
//! # Work split
//! `restore`: grid (tiles, kv_heads, 2), a thread a sub-vector at a time. `turn`: grid (q_heads / 8 rounded
//! up, tokens), a warp a head.

use super::transform::{Shape, load_row, round_row, store_row, transform};
use super::{Code, EncodeShape, Kind};
use crate::attention::BLOCK_TOKENS;
use crate::element::store_whole;
use half::f16;
use simt::{Global, GlobalMut, bits, kernel, thread, warp};

/// Threads of a block of both.
pub const RESTORE_THREADS: u32 = 256;

/// Restores the first `length` tokens of a sequence into the pools, as a step would see them: from their
/// codes, the first and the last ones as they are in f16. `codes`, `recent_keys` and `recent_values` are the
/// sequence's own.
#[kernel(
    system = vecinfer,
    instances(
        (64, 208), (64, 408), (64, 410), (64, 412), (64, 808), (64, 810), (64, 812),
        (96, 208), (96, 408),
        (128, 208), (128, 408), (128, 410), (128, 412), (128, 808), (128, 810), (128, 812),
        (256, 408), (256, 812)
    ),
    max_threads = 256,
    overlaps
)]
pub fn restore<const D: usize, const C: u32>(
    codes: Global<u8>,
    recent_keys: Global<f16>,
    recent_values: Global<f16>,
    key_books: Global<f16>,
    value_books: Global<f16>,
    pool_keys: GlobalMut<f16>,
    pool_values: GlobalMut<f16>,
    length: u32,
    shape: EncodeShape,
) {
    let cache = shape.cache;
    let code = Code::of(C);
    let (tile, head) = (thread::block_idx_x(), thread::block_idx_y());
    let key = shape.first_kind + thread::block_idx_z() == 0;
    let (books, stride) = if key { (key_books, cache.key_stride) } else { (value_books, cache.value_stride) };
    let book = (head * stride) as usize;
    let pool = if key { pool_keys } else { pool_values };
    let recent = if key { recent_keys } else { recent_values };
    let kind = if key { Kind::Key } else { Kind::Value };
    let parts = code.parts(D as u32);
    let place = (tile as usize * cache.kv_heads as usize + head as usize) * BLOCK_TOKENS as usize;
    let coded = cache.window.is_coded(tile, length);
    let bytes = (shape.key_tile + shape.value_tile) as usize;
    let own = (head as usize * cache.tiles as usize + tile as usize) * bytes
        + if key { 0 } else { shape.key_tile as usize };
    let slot = head as usize * cache.window.slots as usize + cache.window.slot(tile) as usize;
    let mut item = thread::thread_idx_x();
    while item < BLOCK_TOKENS * parts {
        let (token, part) = (bits::div_u32(item, parts), bits::rem_u32(item, parts));
        let to = (place + token as usize) * D + (part * code.d) as usize;
        let from = if coded {
            let (lane, slot) = code.place(kind, token, part);
            let index = lane * code.slots(D as u32) + slot;
            let mut number = codes.load(own + index as usize) as u32;
            if code.bits > 8 {
                let more = code.bits - 8;
                let at = 32 * code.low_bytes(D as u32) + index * more / 8;
                let high = codes.load(own + at as usize) as u32;
                number |= (high >> (index * more % 8) & ((1 << more) - 1)) << 8;
            }
            book + (number * code.d) as usize
        } else {
            (slot * BLOCK_TOKENS as usize + token as usize) * D + (part * code.d) as usize
        };
        if tile * BLOCK_TOKENS + token < length {
            let source = if coded { books } else { recent };
            match code.d {
                2 => pool.store_vector(to, source.load_vector::<u32>(from)),
                4 => store_whole::<_, [u32; 2]>(pool, to, source.load_vector(from)),
                _ => store_whole::<_, [u32; 4]>(pool, to, source.load_vector(from)),
            }
        }
        item += RESTORE_THREADS;
    }
}

/// Transforms `heads` heads of queries of each token; `turned` may not be `queries`.
#[kernel(system = vecinfer, instances(64, 96, 128, 256), max_threads = 256, overlaps)]
pub fn turn<const D: usize>(
    queries: Global<f16>,
    transforms: Global<f32>,
    turned: GlobalMut<f16>,
    heads: u32,
    shape: Shape,
) {
    let head = thread::block_idx_x() * (RESTORE_THREADS / 32) + thread::thread_idx_x() / 32;
    if head >= heads {
        return;
    }
    let lane = warp::lane_id();
    let row = thread::block_idx_y() as usize * heads as usize + head as usize;
    let x = load_row::<D>(queries, row, lane);
    let kv_head = bits::div_u32(head, shape.group);
    let words = round_row(transform::<D>(x, transforms, kv_head, false, shape.hadamard != 0, lane));
    store_row::<D>(turned, row, words, lane);
}
