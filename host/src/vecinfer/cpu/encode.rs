//! Tokens on their way into a store.

use super::super::Setting;
use super::super::books::{Search, Tables};
use super::{TILE, of_head, transform};
use crate::attention::BLOCK_TOKENS;
use crate::attention::cpu::lanes::Lanes;
use crate::attention::cpu::{Work, run};
use crate::cpu::handles::slice;
use crate::simd_level::Level;
use half::f16;
use kernels_gpu::vecinfer::{Code, EncodeShape, Kind};
use rayon::prelude::*;

/// What [`encode`](kernels_gpu::vecinfer::encode()) reads.
#[derive(Clone, Copy)]
pub(in super::super) struct Encoding<'a> {
    pub setting: Setting,
    pub head_dim: u32,
    pub shape: EncodeShape,
    pub keys: &'a [f16],
    pub values: &'a [f16],
    pub positions: &'a [u32],
    pub table: &'a [u32],
    pub tables: &'a Tables,
}

/// What it writes.
pub(in super::super) struct Encoded<'a> {
    pub codes: &'a mut [u8],
    /// Of keys and of values.
    pub recent: [&'a mut [f16]; 2],
    pub pool: Option<[&'a mut [f16]; 2]>,
    pub lengths: &'a mut [u32],
    pub refused: &'a mut u32,
}

/// The new tokens of one tile, KV head and kind.
struct Job {
    sequence: usize,
    head: usize,
    kind: usize,
    tile: u32,
    /// Positions, from the first to before the last.
    tokens: [u32; 2],
    /// The sequence's first new one, and past its last.
    all: [u32; 2],
}

/// What comes of it.
struct Done {
    /// As they are stored in f16, [tokens, head_dim].
    rows: Vec<f16>,
    /// [tokens, parts].
    codes: Vec<u16>,
    /// The mark of the last token that is not finite.
    refused: u32,
}

/// What [`encode`](kernels_gpu::vecinfer::encode()) does.
pub(in super::super) fn encode(level: Level, from: Encoding<'_>, to: Encoded<'_>) {
    let (shape, cache) = (from.shape, from.shape.cache);
    let (heads, dim) = (cache.kv_heads as usize, from.head_dim as usize);
    let mut jobs = Vec::new();
    for (sequence, first) in from.positions.iter().step_by(shape.tokens as usize).enumerate() {
        let room = cache.tiles * BLOCK_TOKENS;
        if *first >= room {
            continue;
        }
        let past = first + shape.tokens.min(room - first);
        to.lengths[sequence] = past;
        for tile in first / BLOCK_TOKENS..past.div_ceil(BLOCK_TOKENS) {
            let tokens = [*first.max(&(tile * BLOCK_TOKENS)), past.min((tile + 1) * BLOCK_TOKENS)];
            for at in 0..2 * heads {
                let (kind, head) = (at / heads, at % heads);
                jobs.push(Job { sequence, head, kind, tile, tokens, all: [*first, past] });
            }
        }
    }
    let done: Vec<Done> =
        jobs.par_iter().with_min_len(2).map(|job| run(level, Encode { from, job })).collect();
    let Encoded { codes, recent, mut pool, refused, .. } = to;
    for (job, done) in jobs.iter().zip(done) {
        *refused = done.refused.max(*refused);
        let row = job.sequence * heads + job.head;
        let place = (job.tokens[0] % BLOCK_TOKENS) as usize;
        if cache.window.keeps(job.tile, (job.all[1] - 1) / BLOCK_TOKENS) {
            let slot = row * cache.window.slots as usize + cache.window.slot(job.tile) as usize;
            recent[job.kind][(slot * TILE + place) * dim..][..done.rows.len()].copy_from_slice(&done.rows);
        }
        if let Some(pool) = &mut pool {
            let block = job.tile as usize * heads + job.head;
            pool[job.kind][(block * TILE + place) * dim..][..done.rows.len()].copy_from_slice(&done.rows);
        }
        let code = [from.setting.keys, from.setting.values][job.kind];
        let bytes = (shape.key_tile + shape.value_tile) as usize;
        let at = (row * cache.tiles as usize + job.tile as usize) * bytes;
        let first = if job.kind == 0 { 0 } else { shape.key_tile as usize };
        let tile = &mut codes[at + first..][..code.tile_bytes(from.head_dim) as usize];
        put(code, job, from.head_dim, &done.codes, tile);
    }
}

/// Writes a job's codes to its tile.
fn put(code: Code, job: &Job, head_dim: u32, codes: &[u16], tile: &mut [u8]) {
    let (kind, parts) = ([Kind::Key, Kind::Value][job.kind], code.parts(head_dim));
    let more = code.bits - 8;
    let first = 32 * code.low_bytes(head_dim);
    for (i, number) in (0u32..).zip(codes) {
        let (lane, slot) = code.place(kind, job.tokens[0] % BLOCK_TOKENS + i / parts, i % parts);
        let index = lane * code.slots(head_dim) + slot;
        tile[index as usize] = *number as u8;
        if more > 0 {
            let byte = &mut tile[(first + index * more / 8) as usize];
            let shift = index * more % 8;
            let mask = ((1u32 << more) - 1) as u8;
            *byte = *byte & !(mask << shift) | ((number >> 8) as u8) << shift;
        }
    }
}

/// One job.
struct Encode<'a> {
    from: Encoding<'a>,
    job: &'a Job,
}

impl Work for Encode<'_> {
    type Output = Done;

    #[inline(always)]
    fn run<L: Lanes>(self) -> Done {
        let Encode { from, job } = self;
        let Job { sequence, head, kind, tile, tokens: [begin, end], all: [first, _] } = *job;
        let (shape, dim) = (from.shape, from.head_dim as usize);
        let heads = shape.cache.kv_heads as usize;
        let source = if kind == 0 { from.keys } else { from.values };
        // SAFETY: the CPU's own path runs over memory of the host.
        let table = of_head(unsafe { slice(from.tables.transform.global()) }, head, dim);
        let count = (end - begin) as usize;
        let code = [from.setting.keys, from.setting.values][kind];
        let parts = code.parts(from.head_dim) as usize;
        let mut done = Done { rows: vec![f16::ZERO; count * dim], codes: vec![0; count * parts], refused: 0 };
        let books = &from.tables.search[kind];
        let search = &books[if books.len() == 1 { 0 } else { head }];
        for (i, token) in (begin..end).enumerate() {
            let row = if shape.max_blocks != 0 {
                let block = from.table[sequence * shape.max_blocks as usize + tile as usize] as usize;
                (block * heads + head) * TILE + (token % BLOCK_TOKENS) as usize
            } else {
                (sequence * shape.tokens as usize + (token - first) as usize) * heads + head
            };
            let row = &source[row * dim..][..dim];
            let stored = &mut done.rows[i * dim..][..dim];
            if kind == 0 {
                transform(row, table, true, shape.cache.hadamard != 0, stored);
            } else {
                stored.copy_from_slice(row);
            }
            if stored.iter().any(|x| !x.is_finite()) {
                done.refused = 2 * token + 1 + kind as u32;
            }
            for x in stored.iter_mut().filter(|x| x.is_nan()) {
                *x = f16::from_bits(0x7fff);
            }
            let codes = &mut done.codes[i * parts..][..parts];
            for (number, x) in codes.iter_mut().zip(stored.chunks_exact(code.d as usize)) {
                let mut wide = [0f32; 8];
                wide.iter_mut().zip(x).for_each(|(wide, x)| *wide = x.to_f32());
                *number = nearest(&wide[..x.len()], search) as u16;
            }
        }
        done
    }
}

/// The nearest centroid of a sub-vector: see the kernel's mathematics.
#[inline(always)]
fn nearest(x: &[f32], search: &Search) -> u32 {
    match x.len() {
        2 => nearest_of::<2>(x, search),
        4 => nearest_of::<4>(x, search),
        _ => nearest_of::<8>(x, search),
    }
}

/// Sixteen centroids at a time, in lanes.
#[inline(always)]
fn nearest_of<const N: usize>(x: &[f32], search: &Search) -> u32 {
    let mut minus = [0f32; N];
    minus.iter_mut().zip(x).for_each(|(minus, x)| *minus = -x);
    let count = search.half_norms.len();
    let mut best = [f32::INFINITY; 16];
    let mut index = [u32::MAX; 16];
    for (chunk, half_norms) in search.half_norms.as_chunks::<16>().0.iter().enumerate() {
        let mut s = *half_norms;
        for (i, minus) in minus.iter().enumerate() {
            let c: &[f32; 16] = search.channels[i * count + 16 * chunk..].first_chunk().expect("sixteen");
            for (s, c) in s.iter_mut().zip(c) {
                *s = minus.mul_add(*c, *s);
            }
        }
        for lane in 0..16 {
            let less = s[lane] < best[lane];
            best[lane] = if less { s[lane] } else { best[lane] };
            index[lane] = if less { chunk as u32 } else { index[lane] };
        }
    }
    let mut least = (f32::INFINITY, u32::MAX);
    for lane in 0..16 {
        let own = index[lane].saturating_mul(16).saturating_add(lane as u32);
        if index[lane] != u32::MAX && (best[lane] < least.0 || best[lane] == least.0 && own < least.1) {
            least = (best[lane], own);
        }
    }
    if least.1 == u32::MAX { 0 } else { least.1 }
}
