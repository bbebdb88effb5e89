//! The same on slices: all cores, SIMD, and the bits of the kernels.

mod attend;
mod encode;

pub(super) use attend::attend;
pub(super) use encode::{Encoded, Encoding, encode};

use super::Setting;
use crate::attention::BLOCK_TOKENS;
use crate::attention::cpu::lanes::Lanes;
use crate::attention::cpu::{Work, run};
use crate::simd_level::Level;
use half::f16;
use kernels_gpu::vecinfer::{Code, Kind, ROWS_OF_TRANSFORM, Shape, hadamard_block, norm};
use rayon::prelude::*;
use simt::convert::{f16_from_f32, f32_from_f16};

const TILE: usize = BLOCK_TOKENS as usize;
/// Channels of a head at most.
const MOST_CHANNELS: usize = 256;

/// What a layer holds.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    pub setting: Setting,
    pub head_dim: u32,
    pub shape: Shape,
    /// [sequences, kv_heads, tiles, bytes of a tile].
    pub codes: &'a [u8],
    /// Rings of keys and of values, [sequences, kv_heads, slots, 16, head_dim].
    pub recent: [&'a [f16]; 2],
    /// Codebooks of keys and of values.
    pub books: [&'a [f16]; 2],
}

impl Stored<'_> {
    fn code(&self, kind: usize) -> Code {
        [self.setting.keys, self.setting.values][kind]
    }

    /// A tile of row `row` of [sequences, kv_heads] as it is stored in f16, [16, head_dim], of a sequence of
    /// `length` tokens. Of a tile in f16: what is there, tokens that there are not included.
    fn tile(&self, kind: usize, row: usize, tile: u32, length: u32, places: &Places, out: &mut [u16]) {
        let (dim, shape) = (self.head_dim as usize, self.shape);
        if !shape.window.is_coded(tile, length) {
            let slot = row * shape.window.slots as usize + shape.window.slot(tile) as usize;
            let from = &self.recent[kind][slot * TILE * dim..][..TILE * dim];
            out.copy_from_slice(bytemuck::cast_slice(from));
        } else {
            self.coded(kind, row, tile, places, out);
        }
    }

    /// The same from the tile's codes, which every tile has.
    fn coded(&self, kind: usize, row: usize, tile: u32, places: &Places, out: &mut [u16]) {
        let shape = self.shape;
        let code = self.code(kind);
        let bytes = self.setting.tile_bytes(self.head_dim) as usize;
        let at = (row * shape.tiles as usize + tile as usize) * bytes;
        let own = code.tile_bytes(self.head_dim) as usize;
        let first = if kind == 0 { 0 } else { bytes - own };
        let tile = &self.codes[at + first..][..own];
        let stride = [shape.key_stride, shape.value_stride][kind] as usize;
        let head = row % shape.kv_heads as usize;
        let book: &[u16] = bytemuck::cast_slice(&self.books[kind][head * stride..]);
        let book = &book[..code.book_elements() as usize];
        match code.d {
            2 => places.fetch::<2>(code, tile, book, out),
            4 => places.fetch::<4>(code, tile, book, out),
            _ => places.fetch::<8>(code, tile, book, out),
        }
    }
}

/// Where the codes of a tile are, in the order of tokens and sub-vectors.
struct Places {
    /// Which of the tile's codes.
    index: Vec<u16>,
    /// Byte and shift of the bits from the eighth on.
    high: Vec<(u16, u8)>,
}

impl Places {
    fn new(code: Code, kind: Kind, head_dim: u32) -> Self {
        let parts = code.parts(head_dim);
        let more = code.bits - 8;
        let of = |i: u32| {
            let (lane, slot) = code.place(kind, i / parts, i % parts);
            lane * code.slots(head_dim) + slot
        };
        let first = 32 * code.low_bytes(head_dim);
        let high = |i: u32| ((first + of(i) * more / 8) as u16, (of(i) * more % 8) as u8);
        let all = 0..TILE as u32 * parts;
        Places {
            index: all.clone().map(|i| of(i) as u16).collect(),
            high: if more == 0 { Vec::new() } else { all.map(high).collect() },
        }
    }

    /// The centroids of a tile.
    #[inline(always)]
    fn fetch<const N: usize>(&self, code: Code, tile: &[u8], book: &[u16], out: &mut [u16]) {
        let (book, out) = (book.as_chunks::<N>().0, out.as_chunks_mut::<N>().0);
        if self.high.is_empty() {
            for (out, index) in out.iter_mut().zip(&self.index) {
                *out = book[usize::from(tile[usize::from(*index)])];
            }
            return;
        }
        let mask = (1 << (code.bits - 8)) - 1;
        for (out, (index, (byte, shift))) in out.iter_mut().zip(self.index.iter().zip(&self.high)) {
            let high = usize::from(tile[usize::from(*byte)] >> shift) & mask;
            *out = book[usize::from(tile[usize::from(*index)]) | high << 8];
        }
    }
}

/// What [`restore`](kernels_gpu::vecinfer::restore()) does: the same arguments. `stored` is the sequence's
/// own.
pub(super) fn restore(stored: Stored<'_>, length: u32, pool: [&mut [f16]; 2]) {
    let (heads, dim) = (stored.shape.kv_heads as usize, stored.head_dim as usize);
    for (kind, pool) in pool.into_iter().enumerate() {
        let places = Places::new(stored.code(kind), [Kind::Key, Kind::Value][kind], stored.head_dim);
        let tiles =
            pool.par_chunks_exact_mut(TILE * dim).take(length.div_ceil(BLOCK_TOKENS) as usize * heads);
        tiles.enumerate().for_each_init(
            || vec![0; TILE * dim],
            |memory, (at, out)| {
                let (tile, head) = ((at / heads) as u32, at % heads);
                stored.tile(kind, head, tile, length, &places, memory);
                let tokens = (length - tile * BLOCK_TOKENS).min(BLOCK_TOKENS) as usize;
                out[..tokens * dim].copy_from_slice(bytemuck::cast_slice(&memory[..tokens * dim]));
            },
        );
    }
}

/// What the codes of the first `length` tokens stand for, [tokens, kv_heads, head_dim]: of keys (0) in their
/// own space, or of values (1). `stored` is the sequence's own.
pub(super) fn from_codes(stored: Stored<'_>, kind: usize, length: usize) -> Vec<f32> {
    let (heads, dim) = (stored.shape.kv_heads as usize, stored.head_dim as usize);
    let places = Places::new(stored.code(kind), [Kind::Key, Kind::Value][kind], stored.head_dim);
    let mut rows = vec![0f32; length * heads * dim];
    rows.par_chunks_mut(TILE * heads * dim).enumerate().for_each(|(tile, out)| {
        let mut memory = vec![0; TILE * dim];
        for head in 0..heads {
            stored.coded(kind, head, tile as u32, &places, &mut memory);
            for (token, row) in memory.chunks_exact(dim).enumerate().take(out.len() / (heads * dim)) {
                let out = &mut out[(token * heads + head) * dim..][..dim];
                out.iter_mut().zip(row).for_each(|(out, bits)| *out = f16::from_bits(*bits).to_f32());
            }
        }
    });
    rows
}

/// Brings stored keys [tokens, kv_heads, head_dim] back into the space of the model: what gives the products
/// with a query that the stored ones give with the transformed query, and with the mean that a softmax does
/// not see.
pub(super) fn turn_back(shape: Shape, dim: usize, transform: &[f32], keys: &mut [f32]) {
    let heads = shape.kv_heads as usize;
    keys.par_chunks_exact_mut(dim).enumerate().for_each(|(row, key)| {
        let table = of_head(transform, row % heads, dim);
        let [mean, _, _, before, after]: [&[f32]; 5] = std::array::from_fn(|i| &table[i * dim..][..dim]);
        // q~ = after·H·before·q, and H is its own transpose.
        key.iter_mut().zip(after).for_each(|(x, after)| *x *= after);
        if shape.hadamard != 0 {
            hadamard(key);
        }
        for (x, (before, mean)) in key.iter_mut().zip(before.iter().zip(mean)) {
            *x = *x * before + mean;
        }
    });
}

/// The orthonormal Hadamard matrix times a row, block by block.
#[inline(always)]
fn hadamard(x: &mut [f32]) {
    let dim = x.len() as u32;
    let mut stride = 1;
    while stride < hadamard_block(dim) as usize {
        for pair in x.chunks_exact_mut(2 * stride) {
            let (low, high) = pair.split_at_mut(stride);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        stride *= 2;
    }
    x.iter_mut().for_each(|x| *x *= norm(dim));
}

/// The dual transformation of a head's row, to f16; `table` [5, head_dim] is the KV head's.
#[inline(always)]
pub(super) fn transform(row: &[f16], table: &[f32], key: bool, with_hadamard: bool, out: &mut [f16]) {
    let dim = row.len();
    let mut x = [0f32; MOST_CHANNELS];
    let x = &mut x[..dim];
    x.iter_mut().zip(row).for_each(|(x, row)| *x = f32_from_f16(*row));
    let rows: [&[f32]; 5] = std::array::from_fn(|i| &table[i * dim..][..dim]);
    let [mean, key_before, key_after, query_before, query_after] = rows;
    let (before, after) = if key { (key_before, key_after) } else { (query_before, query_after) };
    if key {
        x.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
    }
    x.iter_mut().zip(before).for_each(|(x, before)| *x *= before);
    if with_hadamard {
        hadamard(x);
    }
    for ((x, after), out) in x.iter().zip(after).zip(out) {
        *out = f16_from_f32(x * after);
    }
}

/// A KV head's rows of a transformation.
fn of_head(transform: &[f32], head: usize, dim: usize) -> &[f32] {
    let rows = ROWS_OF_TRANSFORM as usize * dim;
    &transform[head * rows..][..rows]
}

/// What [`turn`](kernels_gpu::vecinfer::turn()) does.
pub(super) fn turn(
    level: Level,
    dim: usize,
    shape: Shape,
    table: &[f32],
    queries: &[f16],
    turned: &mut [f16],
) {
    struct Turn<'a> {
        table: &'a [f32],
        hadamard: bool,
        row: &'a [f16],
        out: &'a mut [f16],
    }
    impl Work for Turn<'_> {
        type Output = ();
        #[inline(always)]
        fn run<L: Lanes>(self) {
            transform(self.row, self.table, false, self.hadamard, self.out);
        }
    }
    let heads = (shape.kv_heads * shape.group) as usize;
    let rows = queries.par_chunks_exact(dim).zip(turned.par_chunks_exact_mut(dim)).with_min_len(64);
    rows.enumerate().for_each(|(row, (query, out))| {
        let table = of_head(table, row % heads / shape.group as usize, dim);
        run(level, Turn { table, hadamard: shape.hadamard != 0, row: query, out });
    });
}
