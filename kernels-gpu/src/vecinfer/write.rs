//! # Mathematics
//! A key is transformed and rounded to f16, a value stays as it is; both are cut into sub-vectors of d
//! channels, whose codes are the numbers of the nearest centroids ([`nearest`](super::nearest)).
//!
//! # Layout
//! `keys`, `values`: rows [sequences, tokens, kv_heads, D], or a pool [blocks, kv_heads, 16, D] with a table.
//! `codes` [sequences, kv_heads, tiles, bytes of a tile of keys and one of values], as [`Code`] says.
//! `recent_keys` (transformed), `recent_values` [sequences, kv_heads, slots, 16, D]: where a tile lies is the
//! [`Window`](crate::attention::Window)'s. `lengths` \[sequences\]. `pool_keys`, `pool_values` [blocks,
//! kv_heads, 16, D]: tile t is block t, for a prompt's attention. `key_norms`, `value_norms` [1 or kv_heads,
//! 2^b + 4]: of each centroid ½‖c‖², then what a search needs of all ([`Code::norm_floats`]).
//!
//! # Work split
//! Grid (tiles that a chunk can touch, kv_heads · kinds, sequences): a thread block is alone with its tile.
//! Its eight warps transform a token each at a time; then they look for centroids.

use super::nearest::{Centroids, HeadBook, MINIMA, Place, near_few, near_many};
use super::transform::{Rounded, Row, Shape, load_row, round_row, share_row, store_row, transform};
use super::{Code, Kind};
use crate::attention::BLOCK_TOKENS;
use crate::element::store_whole;
use glam::UVec4;
use half::f16;
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, bits, kernel, thread, unroll};

/// Threads of a block.
pub const ENCODE_THREADS: u32 = 256;
const WARPS: u32 = ENCODE_THREADS / 32;

/// The extents of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct EncodeShape {
    /// The cache's.
    pub cache: Shape,
    /// Tokens of each sequence.
    pub tokens: u32,
    /// 0 for keys, 1 for values: what the launch begins with.
    pub first_kind: u32,
    /// Bytes of a tile of keys.
    pub key_tile: u32,
    /// Bytes of a tile of values.
    pub value_tile: u32,
    /// Entries of a row of the table; 0 where keys and values come in rows.
    pub max_blocks: u32,
    /// Whether what is stored goes to the pools as well: 0 or 1.
    pub to_pool: u32,
}

pub(super) struct Layout {
    /// What is stored of the tile's tokens in f16, [16, D].
    pub rows: Shared<u16>,
    /// [16, parts].
    pub codes: Shared<u32>,
    /// What chooses among more than 256 centroids.
    pub minima: Shared<f32>,
    bytes: u32,
}

pub(super) const fn layout<const D: usize, const C: u32>() -> Layout {
    let mut plan = SharedPlan::new();
    let rows = plan.array(BLOCK_TOKENS * D as u32);
    let codes = plan.array(BLOCK_TOKENS * Code::of(C).parts(D as u32));
    let minima = plan.array(if Code::of(C).bits > 8 { MINIMA } else { 0 });
    Layout { rows, codes, minima, bytes: plan.bytes() }
}

/// Shared memory of an instance.
pub const fn encode_bytes<const D: usize, const C: u32>() -> u32 {
    layout::<D, C>().bytes
}

/// Encodes the new tokens of each sequence; see the head of the file. A sequence's tokens follow each other
/// from the position of its first on; those past its room are left out.
#[kernel(
    system = vecinfer,
    instances(
        (64, 208), (64, 408), (64, 410), (64, 412), (64, 808), (64, 810), (64, 812),
        (96, 208), (96, 408),
        (128, 208), (128, 408), (128, 410), (128, 412), (128, 808), (128, 810), (128, 812),
        (256, 408), (256, 812)
    ),
    max_threads = 256,
    min_blocks = 2,
    overlaps
)]
pub fn encode<const D: usize, const C: u32>(
    keys: Global<f16>,
    values: Global<f16>,
    positions: Global<u32>,
    table: Global<u32>,
    transforms: Global<f32>,
    key_books: Global<f16>,
    value_books: Global<f16>,
    key_norms: Global<f32>,
    value_norms: Global<f32>,
    codes: GlobalMut<u8>,
    recent_keys: GlobalMut<f16>,
    recent_values: GlobalMut<f16>,
    pool_keys: GlobalMut<f16>,
    pool_values: GlobalMut<f16>,
    lengths: GlobalMut<u32>,
    refused: GlobalMut<u32>,
    shape: EncodeShape,
) {
    let cache = shape.cache;
    let code = Code::of(C);
    let layout = layout::<D, C>();
    let (t, lane) = (thread::thread_idx_x(), warp::lane_id());
    let (warp, sequence) = (t / 32, thread::block_idx_z());
    let kind = shape.first_kind + bits::div_u32(thread::block_idx_y(), cache.kv_heads);
    let head = bits::rem_u32(thread::block_idx_y(), cache.kv_heads);
    let key = kind == 0;
    let row = sequence as usize * cache.kv_heads as usize + head as usize;

    let first = positions.load((sequence * shape.tokens) as usize);
    let room = cache.tiles * BLOCK_TOKENS;
    if first >= room {
        return;
    }
    let past = if shape.tokens < room - first { first + shape.tokens } else { room };
    let tile = first / BLOCK_TOKENS + thread::block_idx_x();
    let begin = if first > tile * BLOCK_TOKENS { first } else { tile * BLOCK_TOKENS };
    let end = if past < (tile + 1) * BLOCK_TOKENS { past } else { (tile + 1) * BLOCK_TOKENS };
    if begin >= end {
        return;
    }
    if end == past && thread::block_idx_y() == 0 && t == 0 && shape.first_kind == 0 {
        lengths.store(sequence as usize, past);
    }

    // What is stored.
    let source = if key { keys } else { values };
    let target = Target {
        rows: layout.rows,
        key,
        row,
        recent: cache.window.keeps(tile, (past - 1) / BLOCK_TOKENS).then_some(if key {
            recent_keys
        } else {
            recent_values
        }),
        pool: (shape.to_pool != 0).then_some(if key { pool_keys } else { pool_values }),
        head,
        refused,
        cache,
    };
    let mut token = begin + warp;
    while token < end {
        let place = token % BLOCK_TOKENS;
        let from = if shape.max_blocks != 0 {
            let block = table.load((sequence * shape.max_blocks + tile) as usize);
            (block as usize * cache.kv_heads as usize + head as usize) * BLOCK_TOKENS as usize
                + place as usize
        } else {
            let token = (sequence * shape.tokens + (token - first)) as usize;
            token * cache.kv_heads as usize + head as usize
        };
        let mut x = load_row::<D>(source, from, lane);
        if key {
            x = transform::<D>(x, transforms, head, true, cache.hadamard != 0, lane);
        }
        target.keep::<D>(x, token, lane);
        token += WARPS;
    }
    thread::sync_threads();

    // The nearest centroids.
    let (books, stride) = if key { (key_books, cache.key_stride) } else { (value_books, cache.value_stride) };
    let parts = code.parts(D as u32);
    let (offset, items) = (begin % BLOCK_TOKENS * parts, (end - begin) * parts);
    let norms_at = if stride == 0 { 0 } else { (head * code.norm_floats()) as usize };
    let norms = if key { key_norms } else { value_norms };
    let book = HeadBook { centroids: books, at: (head * stride) as usize, norms, norms_at };
    let place = Place { rows: layout.rows, codes: layout.codes, minima: layout.minima, offset, items };
    if code.bits == 8 {
        near_few::<C>(Centroids::load(book.centroids, book.at, lane, false), place);
    } else {
        near_many::<C>(book, place);
    }
    thread::sync_threads();

    let tile_words = (shape.key_tile + shape.value_tile) / 4;
    let base = (row * cache.tiles as usize + tile as usize) * tile_words as usize
        + if key { 0 } else { shape.key_tile as usize / 4 };
    let kind = if key { Kind::Key } else { Kind::Value };
    let new = (begin % BLOCK_TOKENS, (end - 1) % BLOCK_TOKENS + 1);
    pack::<D, C>(codes.cast::<u32>(), base, kind, layout.codes, new);
}

/// Where a token's key or value goes besides its codes.
#[derive(Clone, Copy)]
pub(super) struct Target {
    /// The tile's rows in shared memory.
    pub rows: Shared<u16>,
    pub key: bool,
    /// Of sequence and KV head.
    pub row: usize,
    /// The window of keys, or of values, if it keeps the tile.
    pub recent: Option<GlobalMut<f16>>,
    /// The pool, if there is one.
    pub pool: Option<GlobalMut<f16>>,
    pub head: u32,
    pub refused: GlobalMut<u32>,
    pub cache: Shape,
}

impl Target {
    /// A transformed row of a token, rounded: to shared memory, to the window, to the pool.
    #[simt::device]
    pub fn keep<const D: usize>(self, x: Row, token: u32, lane: u32) {
        let Target { rows, key, row, recent, pool, head, refused, cache } = self;
        let (tile, place) = (token / BLOCK_TOKENS, token % BLOCK_TOKENS);
        let words = round_row(x);
        let mut finite = true;
        unroll!(for i in 0..(D / 32), at_most 8 {
            finite &= words[i / 2] >> (16 * (i % 2)) & 0x7c00 != 0x7c00;
        });
        if !warp::warp_vote_all(FULL_MASK, finite) && lane == 0 {
            refused.atomic_max(0, 2 * token + 1 + !key as u32);
        }
        share_words::<D>(rows, place, words, lane);
        if let Some(recent) = recent {
            let slot = row * cache.window.slots as usize + cache.window.slot(tile) as usize;
            store_words::<D>(recent, slot * BLOCK_TOKENS as usize + place as usize, words, lane);
        }
        if let Some(pool) = pool {
            let block = tile as usize * cache.kv_heads as usize + head as usize;
            store_words::<D>(pool, block * BLOCK_TOKENS as usize + place as usize, words, lane);
        }
    }
}

/// Words of a tile, from `base` on, by the codes of its tokens `begin` to before `end`; of tokens that were
/// there before, what was there.
#[simt::device]
fn pack<const D: usize, const C: u32>(
    codes: GlobalMut<u32>,
    base: usize,
    kind: Kind,
    numbers: Shared<u32>,
    tokens: (u32, u32),
) {
    let mut word = thread::thread_idx_x();
    while word < Code::of(C).tile_bytes(D as u32) / 4 {
        let (new, mask) = new_codes::<D, C>(kind, numbers, word, tokens);
        if mask != 0 {
            let before = if mask == u32::MAX { 0 } else { codes.load(base + word as usize) };
            codes.store(base + word as usize, before & !mask | new);
        }
        word += ENCODE_THREADS;
    }
}

/// What codes of tokens `begin` to before `end` a word of a tile has, and the mask of their bits.
#[simt::device]
pub(super) fn new_codes<const D: usize, const C: u32>(
    kind: Kind,
    numbers: Shared<u32>,
    word: u32,
    (begin, end): (u32, u32),
) -> (u32, u32) {
    let code = Code::of(C);
    let parts = code.parts(D as u32);
    let (mut new, mut mask) = (0u32, 0u32);
    unroll!(for index in 0..16 {
        if let Some(part) = code.part_of_word(kind, D as u32, word, index as u32)
            && (begin..end).contains(&part.token)
        {
            let whole = numbers.load(part.token * parts + part.part);
            let own = (1 << part.bits) - 1;
            new |= (whole >> part.from & own) << part.at;
            mask |= own << part.at;
        }
    });
    (new, mask)
}

/// [`share_row`], in one access if a lane's channels are neighbours.
#[simt::device]
fn share_words<const D: usize>(rows: Shared<u16>, place: u32, words: Rounded, lane: u32) {
    let at = 2 * (place * (D as u32 / 2) + lane * (D as u32 / 64));
    match D {
        128 => rows.store_vector(at, [words[0], words[1]]),
        256 => rows.store_vector(at, UVec4::from_array(words)),
        _ => share_row::<D>(rows, place, words, lane),
    }
}

/// [`store_row`], likewise.
#[simt::device]
fn store_words<const D: usize>(target: GlobalMut<f16>, row: usize, words: Rounded, lane: u32) {
    let at = row * D + (lane * (D as u32 / 32)) as usize;
    match D {
        128 => store_whole(target, at, [words[0], words[1]]),
        256 => store_whole(target, at, words),
        _ => store_row::<D>(target, row, words, lane),
    }
}
