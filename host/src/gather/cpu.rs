//! The same on slices: all cores, SIMD, and the bits of the kernels.
//!
//! Bounds are maxima and minima, which are the same in any order. A score is what the tensor cores make of
//! it, sixteen gather-blocks at a time, one a lane (`crate::attention::cpu::lanes`). The best of exact scores
//! are the best whichever way they are found.

use super::GatherElement;
use crate::attention::cpu::lanes::{Floats, Lanes, Order, Row, Tile, multiply_each};
use crate::attention::cpu::pieces::{Memory, with_memory};
use crate::attention::cpu::{Work, run};
use crate::attention::{BLOCK_TOKENS, Half};
use crate::simd_level::Level;
use kernels_gpu::gather::{
    BY_CODES, BY_MEANS, Extent, Extremes, FOLD_LANES, FoldShape, Quad, SelectShape, TILE_BLOCKS, code_word,
    code_words, codes, largest, mean, mean_word, ordered, scale_of, scale_word, signs, summary_words,
    tile_words, word,
};
use rayon::prelude::*;
use simt::math::maximum;
use std::cell::RefCell;
use std::marker::PhantomData;

const TILE: usize = TILE_BLOCKS as usize;
/// The most pairs of channels.
const PAIRS: usize = 128;
/// The most query heads of a KV head.
const MOST_HEADS: usize = 16;

/// What [`fold`](kernels_gpu::gather::fold()) does: the same arguments.
pub(super) fn fold<E: GatherElement>(
    shape: FoldShape,
    keys: &[E],
    table: &[u32],
    positions: &[u32],
    lengths: &[u32],
    bounds: &mut [u32],
) {
    let (heads, dim, tokens) = (shape.kv_heads as usize, shape.head_dim as usize, BLOCK_TOKENS as usize);
    let (block, max_blocks) = (shape.block as usize, shape.max_blocks as usize);
    let words = tile_words(shape.head_dim) as usize;
    let keys: &[u32] = bytemuck::cast_slice(keys);
    let pairs = dim / 2;
    let row_words = shape.tiles as usize * words;
    bounds.par_chunks_exact_mut(row_words).enumerate().for_each(|(row, bounds)| {
        let (sequence, head) = (row / heads, row % heads);
        let first = positions[sequence * shape.stride as usize] as usize;
        let length = (lengths[sequence] as usize).min(max_blocks * tokens);
        let mut begin = first;
        while begin < length {
            let index = begin / block;
            let end = length.min((index + 1) * block);
            let mut extremes = [Extremes::NONE; PAIRS];
            for token in begin..end {
                let entry = table[sequence * max_blocks + token / tokens] as usize;
                let from = ((entry * heads + head) * tokens + token % tokens) * pairs;
                for (extremes, pair) in extremes.iter_mut().zip(&keys[from..from + pairs]) {
                    extremes.take::<E>(*pair, *pair);
                }
            }
            let tile = &mut bounds[index / TILE * words..][..words];
            for (pair, extremes) in extremes.iter_mut().enumerate().take(pairs) {
                let at = |kind: u32| word(kind, (index % TILE) as u32, pair as u32) as usize;
                if begin != index * block {
                    extremes.take::<E>(tile[at(0)], tile[at(1)]);
                }
                [tile[at(0)], tile[at(1)]] = extremes.words();
            }
            begin = end;
        }
    });
}

/// What [`squeeze`](kernels_gpu::gather::squeeze()) does: the same arguments.
pub(super) fn squeeze<E: GatherElement>(
    shape: FoldShape,
    keys: &[E],
    table: &[u32],
    positions: &[u32],
    lengths: &[u32],
    bounds: &mut [u32],
) {
    let (heads, dim, tokens) = (shape.kv_heads as usize, shape.head_dim as usize, BLOCK_TOKENS as usize);
    let (block, max_blocks) = (shape.block as usize, shape.max_blocks as usize);
    let words = code_words(shape.head_dim) as usize;
    let keys: &[u32] = bytemuck::cast_slice(keys);
    let pairs = dim / 2;
    bounds.par_chunks_exact_mut(shape.tiles as usize * words).enumerate().for_each(|(row, bounds)| {
        let (sequence, head) = (row / heads, row % heads);
        let first = positions[sequence * shape.stride as usize] as usize;
        let length = (lengths[sequence] as usize).min(max_blocks * tokens);
        let mut begin = first;
        while begin < length {
            let index = begin / block;
            let end = length.min((index + 1) * block);
            let mut extremes = [Extremes::NONE; PAIRS];
            for token in begin..end {
                let entry = table[sequence * max_blocks + token / tokens] as usize;
                let from = ((entry * heads + head) * tokens + token % tokens) * pairs;
                for (extremes, pair) in extremes.iter_mut().zip(&keys[from..from + pairs]) {
                    extremes.take::<E>(*pair, *pair);
                }
            }
            let tile = &mut bounds[index / TILE * words..][..words];
            let at = (index % TILE) as u32;
            let quads: Vec<Quad> =
                extremes[..pairs].chunks_exact(2).map(|two| [two[0].words(), two[1].words()]).collect();
            let all = quads.iter().map(|quad| largest::<E>(*quad)).max().unwrap_or(0);
            let scale_at = scale_word(shape.head_dim, at) as usize;
            let old = (begin != index * block).then_some(f32::from_bits(tile[scale_at]));
            let scale = scale_of(all, old);
            for (quad, bounds) in quads.into_iter().enumerate() {
                let [high, low] = [0, 1].map(|kind| code_word(kind, at, quad as u32) as usize);
                let old = old.map(|scale| ([tile[high], tile[low]], scale));
                [tile[high], tile[low]] = codes::<E>(bounds, scale, old);
            }
            tile[scale_at] = scale.to_bits();
            begin = end;
        }
    });
}

/// What [`average`](kernels_gpu::gather::average()) does: the same arguments.
pub(super) fn average<E: GatherElement>(
    shape: FoldShape,
    keys: &[E],
    table: &[u32],
    positions: &[u32],
    lengths: &[u32],
    means: &mut [u32],
) {
    const LANES: usize = FOLD_LANES as usize;
    let (heads, dim, tokens) = (shape.kv_heads as usize, shape.head_dim as usize, BLOCK_TOKENS as usize);
    let (block, max_blocks, pairs) = (shape.block as usize, shape.max_blocks as usize, dim / 2);
    let words = (tile_words(shape.head_dim) / 2) as usize;
    let keys: &[u32] = bytemuck::cast_slice(keys);
    means.par_chunks_exact_mut(shape.tiles as usize * words).enumerate().for_each(|(row, means)| {
        let (sequence, head) = (row / heads, row % heads);
        let first = positions[sequence * shape.stride as usize] as usize;
        let length = (lengths[sequence] as usize).min(max_blocks * tokens);
        if first >= length {
            return;
        }
        for index in first / block..length.div_ceil(block) {
            let (begin, end) = (index * block, length.min((index + 1) * block));
            let mut sums = [[[0f32; 2]; PAIRS]; LANES];
            for token in begin..end {
                let entry = table[sequence * max_blocks + token / tokens] as usize;
                let from = ((entry * heads + head) * tokens + token % tokens) * pairs;
                for (sums, pair) in sums[token % LANES].iter_mut().zip(&keys[from..from + pairs]) {
                    let [low, high] = E::unpack(*pair);
                    *sums = [sums[0] + low, sums[1] + high];
                }
            }
            let tile = &mut means[index / TILE * words..][..words];
            for pair in 0..pairs {
                let lanes = sums[1..].iter().map(|sums| sums[pair]);
                let sums = lanes.fold(sums[0][pair], |all, own| [all[0] + own[0], all[1] + own[1]]);
                let count = (end - begin) as u32;
                tile[mean_word((index % TILE) as u32, pair as u32) as usize] = mean::<E>(sums, count);
            }
        }
    });
}

/// What [`select`](kernels_gpu::gather::select()) reads.
#[derive(Clone, Copy)]
pub(super) struct Selecting<'a, E> {
    pub queries: &'a [E],
    pub bounds: &'a [u32],
    pub table: &'a [u32],
    pub lengths: &'a [u32],
}

/// What it writes.
pub(super) struct Choice<'a> {
    pub list: &'a mut [u32],
    pub counts: &'a mut [u32],
    pub entries: &'a mut [u32],
    pub kept: &'a mut [u32],
}

/// What [`select`](kernels_gpu::gather::select()) does, on a path that the machine has: the same arguments
/// but for its scratch.
pub(super) fn select<E: GatherElement>(
    level: Level,
    shape: SelectShape,
    from: Selecting<'_, E>,
    to: Choice<'_>,
) {
    let (lists, per_block) = (shape.lists as usize, shape.rule.entries() as usize);
    let of_sequence = shape.kv_heads as usize * lists;
    let max_blocks = shape.max_blocks as usize;
    let width = shape.most as usize * per_block;
    let rows = to.list.par_chunks_exact_mut(shape.most as usize);
    let rows = rows.zip(to.entries.par_chunks_exact_mut(width)).zip(to.counts).zip(to.kept);
    rows.enumerate().for_each(|(row, (((list, entries), count), kept))| {
        let (sequence, head) = (row / of_sequence, row % of_sequence / lists);
        let length = from.lengths[sequence].min(shape.max_blocks * BLOCK_TOKENS);
        let extent = Extent::of(length, shape.rule);
        list.fill(u32::MAX);
        let distant: Vec<u32> = if extent.ranked_blocks() > 0 {
            let words = scores(level, shape, from, [row, sequence, head], extent.local);
            best(&words, extent)
        } else {
            (1..extent.chosen + 1).collect()
        };
        let sink = if extent.blocks > 0 { 0..1 } else { 0..0 };
        let all = sink.chain(distant).chain(extent.local..extent.blocks);
        list.iter_mut().zip(all).for_each(|(to, block)| *to = block);
        *count = extent.kept_blocks();
        *kept = extent.kept(shape.rule);
        for (entries, block) in entries.chunks_exact_mut(per_block).zip(&*list) {
            for (i, entry) in entries.iter_mut().enumerate() {
                let index = *block as usize * per_block + i;
                *entry = if *block != u32::MAX && index < length.div_ceil(BLOCK_TOKENS) as usize {
                    from.table[sequence * max_blocks + index] * shape.kv_heads + head as u32
                } else {
                    u32::MAX
                };
            }
        }
    });
}

/// The distant blocks with the highest words, the lower index first among equal ones, in order.
fn best(words: &[u32], extent: Extent) -> Vec<u32> {
    let mut blocks: Vec<u32> = (1..extent.local).collect();
    let rank = |block: &u32| (std::cmp::Reverse(words[*block as usize]), *block);
    blocks.select_nth_unstable_by_key(extent.chosen as usize, rank);
    blocks.truncate(extent.chosen as usize);
    blocks.sort_unstable();
    blocks
}

/// Words that order like the scores of a row's blocks before `end`.
fn scores<E: GatherElement>(
    level: Level,
    shape: SelectShape,
    from: Selecting<'_, E>,
    [row, sequence, head]: [usize; 3],
    end: u32,
) -> Vec<u32> {
    let (group, heads) = (shape.group as usize, shape.kv_heads as usize);
    let dim = from.queries.len() / (from.lengths.len() * heads * shape.lists as usize * group);
    let words = summary_words(shape.summary, dim as u32) as usize;
    let summary = shape.summary;
    let queries: &[u16] = bytemuck::cast_slice(&from.queries[row * group * dim..][..group * dim]);
    let tiles = &from.bounds[(sequence * heads + head) * shape.tiles as usize * words..];
    let mut scores = vec![0u32; end.next_multiple_of(TILE_BLOCKS) as usize];
    scores.par_chunks_exact_mut(TILE).zip(tiles.par_chunks_exact(words)).with_min_len(8).for_each(
        |(scores, tile)| {
            thread_local!(static SCRATCH: Memory<Scratch> = const { RefCell::new(Vec::new()) });
            with_memory(&SCRATCH, Scratch::new, |scratch| {
                let element = PhantomData;
                run(level, Score::<E> { queries, group, dim, summary, tile, scores, scratch, element });
            });
        },
    );
    scores
}

/// A thread's memory, used again and again.
struct Scratch {
    tile: Tile,
    /// 16 gather-blocks' maxima or minima, [16, head_dim].
    rows: Vec<u16>,
}

impl Scratch {
    fn new() -> Box<Self> {
        Box::new(Scratch { tile: Tile::ZERO, rows: Vec::new() })
    }
}

/// Sixteen neighbouring channels are a contraction.
struct Neighbours;

impl Order for Neighbours {
    #[inline(always)]
    fn step_of(d: usize) -> (usize, usize) {
        (d / 16, d % 16)
    }

    #[inline(always)]
    fn dimension(contraction: usize, step: usize) -> usize {
        16 * contraction + step
    }
}

/// The scores of a tile.
struct Score<'a, E> {
    queries: &'a [u16],
    group: usize,
    dim: usize,
    summary: u32,
    tile: &'a [u32],
    scores: &'a mut [u32],
    scratch: &'a mut Scratch,
    element: PhantomData<E>,
}

impl<E: Half> Work for Score<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Score { queries, group, dim, summary, tile, scores, scratch, .. } = self;
        let by_means = summary == BY_MEANS;
        let mut sums = [[[0f32; TILE]; MOST_HEADS]; 2];
        // Means have no second kind: its sums are 0.
        for (kind, sums) in sums.iter_mut().enumerate().take(if by_means { 1 } else { 2 }) {
            scratch.rows.resize(TILE * dim, 0);
            for (block, row) in scratch.rows.chunks_exact_mut(dim).enumerate() {
                for (pair, to) in row.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    let (kind, block, pair) = (kind as u32, block as u32, pair as u32);
                    let bits = match summary {
                        BY_CODES => {
                            let codes = tile[code_word(kind, block, pair / 2) as usize] >> (16 * (pair % 2));
                            let number = |code: u32| (code & 0xff) as f32 - 128.0;
                            E::pack(number(codes), number(codes >> 8))
                        }
                        BY_MEANS => tile[mean_word(block, pair) as usize],
                        _ => tile[word(kind, block, pair) as usize],
                    };
                    *to = [bits as u16, (bits >> 16) as u16];
                }
            }
            L::keys::<E, Neighbours>(&scratch.rows, dim, &mut scratch.tile);
            for chunk in 0..dim / 16 {
                let mut rows = [Row::ZERO; MOST_HEADS];
                for (row, query) in rows.iter_mut().zip(queries.chunks_exact(dim)) {
                    let query: &[u16; 16] = query[16 * chunk..].first_chunk().expect("a whole contraction");
                    let part = |x: u16| if by_means { x } else { signs(x.into())[kind] as u16 };
                    row.set::<E, L>(query.map(part));
                }
                multiply_each::<E, L>(|r| &rows[r], scratch.tile.of_keys(chunk), &mut sums[..group]);
            }
        }
        let [largest, smallest]: [[Floats; MOST_HEADS]; 2] = sums;
        for (lane, to) in scores.iter_mut().enumerate() {
            let heads = largest.iter().zip(&smallest).take(group);
            let scale = match summary {
                BY_CODES => f32::from_bits(tile[scale_word(dim as u32, lane as u32) as usize]),
                _ => 1.0,
            };
            let best =
                heads.fold(f32::NEG_INFINITY, |best, (a, b)| maximum(best, (a[lane] + b[lane]) * scale));
            *to = ordered(best);
        }
    }
}
