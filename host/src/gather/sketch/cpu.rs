//! The same on slices: all cores, SIMD, and the bits of the kernels.

mod choose;
mod masses;

pub(super) use choose::Choice;

use super::elements::SketchElement;
use crate::attention::BLOCK_TOKENS;
use crate::attention::cpu::query::CONTRACTIONS;
use crate::simd_level::Level;
use choose::{Totals, choose};
use kernels_gpu::attention::ROWS;
use kernels_gpu::attention::outward::{norm_bound, reciprocal};
use kernels_gpu::certified::Certificate;
use kernels_gpu::gather::Extent;
use kernels_gpu::gather::sketch::{
    Annotation, Codes, Deal, Facts, ScanShape, SettleShape, SketchShape, Skipped, TILE_TOKENS, Verdict,
    Whole, channel, code, code_word, code_words, error, heads_of, largest_code, sketch_words, tiles_of,
};
use masses::{Part, masses};
use rayon::prelude::*;
use simt::convert;
use simt::math::{fma, max, maximum, min};

const TOKENS: usize = TILE_TOKENS as usize;
/// Tokens of a block of the pool.
const BLOCK: usize = BLOCK_TOKENS as usize;
const GROUP: usize = ROWS as usize;

/// A warp's sum: lanes 16 apart first.
fn warp_sum(mut lanes: [f32; 32]) -> f32 {
    for distance in [16, 8, 4, 2, 1] {
        for i in 0..distance {
            lanes[i] += lanes[i + distance];
        }
    }
    lanes[0]
}

/// What [`sketch`](kernels_gpu::gather::sketch::sketch()) reads.
#[derive(Clone, Copy)]
pub(super) struct Tokens<'a, E> {
    pub keys: &'a [E],
    pub values: &'a [E],
    pub table: &'a [u32],
    pub positions: &'a [u32],
    pub lengths: &'a [u32],
}

/// What it does: the same arguments.
pub(super) fn sketch<E: SketchElement>(
    bits: u32,
    shape: SketchShape,
    from: Tokens<'_, E>,
    sketches: &mut [u32],
) {
    let (heads, dim) = (shape.kv_heads as usize, shape.head_dim as usize);
    let max_blocks = shape.max_blocks as usize;
    let words = sketch_words(shape.head_dim, bits) as usize;
    let of_sequence = tiles_of(shape.max_blocks * BLOCK_TOKENS) as usize;
    let rows = sketches.par_chunks_exact_mut(of_sequence * words).enumerate();
    let tiles = rows.flat_map(|(row, sketches)| {
        let (sequence, head) = (row / heads, row % heads);
        let first = from.positions[sequence * shape.stride as usize] as usize;
        let length = (from.lengths[sequence] as usize).min(max_blocks * BLOCK);
        let tiles = if first < length { first / TOKENS..length.div_ceil(TOKENS) } else { 0..0 };
        let blocks = &from.table[sequence * max_blocks..];
        let begin = tiles.start;
        let to = sketches[begin * words..tiles.end * words].par_chunks_exact_mut(words).enumerate();
        to.map(move |(i, to)| (head, blocks, begin + i, length, to))
    });
    tiles.for_each(|(head, blocks, tile, length, to)| {
        let wide = |pool: &[E]| -> Vec<f32> {
            let row = |token: usize| {
                let token = (tile * TOKENS + token).min(length - 1);
                let block = blocks[token / BLOCK] as usize;
                &pool[((block * heads + head) * BLOCK + token % BLOCK) * dim..][..dim]
            };
            (0..TOKENS).flat_map(|token| row(token).iter().map(|x| x.to_f32())).collect()
        };
        write_tile(bits, dim, &wide(from.keys), &wide(from.values), to);
    });
}

/// One tile from 32 keys and values.
fn write_tile(bits: u32, dim: usize, keys: &[f32], values: &[f32], tile: &mut [u32]) {
    let largest = largest_code(bits);
    let codes_end = code_words(dim as u32, bits) as usize;
    let mut codes = vec![0u8; TOKENS * dim];
    let mut errors = vec![0f32; TOKENS * dim];
    let (mut scales, mut zeros) = (vec![0f32; dim], vec![0f32; dim]);
    for c in 0..dim {
        let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
        for token in 0..TOKENS {
            low = min(low, keys[token * dim + c]);
            high = max(high, keys[token * dim + c]);
        }
        let (scale, zero) = channel(low, high, largest);
        (scales[c], zeros[c]) = (convert::f32_from_f16(scale), convert::f32_from_f16(zero));
        for (part, x) in [scale, zero].into_iter().enumerate() {
            let word = &mut tile[codes_end + part * dim / 2 + c / 2];
            let bits = u32::from(x.to_bits());
            *word = if c % 2 == 0 { bits } else { *word | bits << 16 };
        }
        let inverse = reciprocal(scales[c]);
        for token in 0..TOKENS {
            let k = keys[token * dim + c];
            let code = code(k, zeros[c], inverse, largest);
            codes[token * dim + c] = code as u8;
            errors[token * dim + c] = error(k, code, scales[c], zeros[c]);
        }
    }
    let norm = |x: &[f32]| {
        let half = |pairs: &[f32]| {
            let pairs = pairs.as_chunks::<2>().0;
            warp_sum(std::array::from_fn(|i| fma(pairs[i][1], pairs[i][1], pairs[i][0] * pairs[i][0])))
        };
        let sums: Vec<f32> = x.chunks_exact(64).map(half).collect();
        norm_bound(if let [a, b] = sums[..] { a + b } else { sums[0] })
    };
    let most = |x: &[f32]| x.chunks_exact(dim).map(norm).reduce(maximum).expect("there are tokens");
    let halves = [&values[..TOKENS / 2 * dim], &values[TOKENS / 2 * dim..]].map(most);
    let annotation = Annotation::of(most(&errors), norm(&scales), norm(&zeros), halves, largest);
    for (word, to) in tile[..codes_end].iter_mut().enumerate() {
        let pair = |token: u32, channel: u32| {
            let at = token as usize * dim + channel as usize;
            u32::from(codes[at]) | u32::from(codes[at + 1]) << 16
        };
        *to = code_word(bits, word as u32, pair);
    }
    tile[codes_end + dim..].copy_from_slice(bytemuck::cast_slice(&[annotation]));
}

/// What [`scan`](kernels_gpu::gather::sketch::scan()) reads.
#[derive(Clone, Copy)]
pub(super) struct Scanning<'a, E> {
    pub queries: &'a [E],
    pub sketches: &'a [u32],
    pub lengths: &'a [u32],
}

/// What it does, over sketches of so many bits, a sequence dealt out over so many parts: the same arguments
/// but for its scratch.
pub(super) fn scan<E: SketchElement>(
    level: Level,
    (bits, parts): (u32, u32),
    shape: ScanShape,
    from: Scanning<'_, E>,
    (table, to): (&[u32], Choice<'_>),
) {
    let (heads, groups) = (shape.kv_heads as usize, shape.row_groups() as usize);
    let all_heads = heads_of(shape.group) as usize;
    let rows = to.counts.len();
    let dim = from.queries.len() / (rows * shape.group as usize);
    let extents: Vec<Extent> = from
        .lengths
        .iter()
        .map(|length| Extent::of((*length).min(shape.max_blocks * BLOCK_TOKENS), shape.rule))
        .collect();
    let mut items = Vec::new();
    for row in 0..rows {
        let used = Deal::of(extents[row / heads].length, shape.rule, parts).used as usize;
        items.extend((0..groups).flat_map(|group| (0..used).map(move |part| (row, group, part))));
    }
    let scanned: Vec<Part> = items
        .par_iter()
        .map(|(row, group, part)| {
            let extent = extents[row / heads];
            masses::<E>(level, (bits, parts, dim), shape, from, extent, [*row, *group, *part])
        })
        .collect();
    let mut of_rows: Vec<Totals> =
        (0..rows).map(|row| Totals::new(extents[row / heads].blocks as usize, all_heads)).collect();
    for ((row, group, part), scanned) in items.into_iter().zip(scanned) {
        let extent = extents[row / heads];
        let tile = part * 8 * Deal::of(extent.length, shape.rule, parts).of_warp as usize;
        let first = tile * TOKENS / shape.rule.block as usize;
        of_rows[row].take(group * GROUP, (first, part), scanned);
    }
    choose(shape, (table, &extents), of_rows, to);
}

/// What [`settle`](kernels_gpu::gather::sketch::settle()) reads.
#[derive(Clone, Copy)]
pub(super) struct Settling<'a, E> {
    pub queries: &'a [E],
    pub output: &'a [f32],
    pub lse: &'a [f32],
    /// Of each head, where what is kept is attended to by codes.
    pub certificates: &'a [Certificate],
    pub lengths: &'a [u32],
    pub skipped: &'a [Skipped],
    pub whole: &'a [Whole],
}

/// What it does: the same arguments.
pub(super) fn settle<E: SketchElement>(
    head_dim: u32,
    shape: SettleShape,
    from: Settling<'_, E>,
    verdicts: &mut [Verdict],
    wanted: &mut [u32],
) {
    let group = shape.scan.group as usize;
    let groups = shape.scan.row_groups() as usize;
    let (heads, dim) = (shape.scan.kv_heads as usize, head_dim as usize);
    wanted.fill(0);
    for (head, verdict) in verdicts.iter_mut().enumerate() {
        let (row, in_group) = (head / group, head % group);
        let query: Vec<f32> = from.queries[head * dim..][..dim].iter().map(|x| x.to_f32()).collect();
        let norm = |x: &[f32]| {
            let pair = |lane: usize, i: usize| [x[64 * i + 2 * lane], x[64 * i + 2 * lane + 1]];
            norm_bound(warp_sum(std::array::from_fn(|lane| {
                let pairs = (0..dim / 64).map(|i| pair(lane, i));
                pairs.fold(0.0, |sum, [a, b]| fma(b, b, fma(a, a, sum)))
            })))
        };
        let facts = Facts {
            skipped: from.skipped[row * heads_of(shape.scan.group) as usize + in_group],
            whole: from.whole[row],
            query: norm(&query),
            output: norm(&from.output[head * dim..][..dim]),
            lse: from.lse[head],
            length: from.lengths[row / heads].min(shape.scan.max_blocks * BLOCK_TOKENS),
            codes: from.certificates.get(head).map(Codes::of),
        };
        *verdict = if dim == 64 {
            kernels_gpu::gather::sketch::verdict::<E, 64>(&facts, shape)
        } else {
            kernels_gpu::gather::sketch::verdict::<E, 128>(&facts, shape)
        };
        wanted[row * groups + in_group / GROUP] |= verdict.dense << (in_group % GROUP);
    }
}

const _: () = assert!(CONTRACTIONS * 16 == 128);
