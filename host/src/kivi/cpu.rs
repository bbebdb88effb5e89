//! What the kernels do, on slices and all cores, with their bits. A step restores what it reads to f16 and
//! takes the path of dense attention over it.

use super::{Layout, Result, Side};
use crate::attention::dense::cpu::{Slices, attend};
use crate::attention::{BLOCK_TOKENS, StepProblem};
use half::f16;
use kernels_gpu::kivi::{EncodeShape, Shape, code_of, counted, pair_of, restored, scale_of, twice};
use rayon::prelude::*;

/// What is stored of sequences.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    pub(super) shape: Shape,
    /// [sequences, kv_heads, groups].
    pub(super) codes: &'a [u32],
    /// Rings of keys and of values, [sequences, kv_heads, slots · group, head_dim].
    pub(super) recent: [&'a [f16]; 2],
}

/// What the writing kernel does. `new`: keys and values, [sequences, tokens, kv_heads, head_dim].
pub(super) fn encode(
    shape: EncodeShape,
    new: [&[f16]; 2],
    positions: &[u32],
    codes: &mut [u32],
    [keys, values]: [&mut [f16]; 2],
    lengths: &mut [u32],
    refused: &mut [u32],
) {
    let EncodeShape { tokens, cache } = shape;
    let Layout { head_dim, group, .. } = cache.layout;
    let (heads, dim, group) = (cache.kv_heads as usize, head_dim as usize, group as usize);
    let (tokens, room) = (tokens as usize, cache.groups as usize * group);
    let (of_pair, of_ring) =
        (cache.groups as usize * cache.layout.group_words() as usize, cache.slots() as usize * group * dim);
    // Where each sequence begins and ends.
    let spans: Vec<Option<[usize; 2]>> = (0..positions.len() / tokens)
        .map(|sequence| positions[sequence * tokens] as usize)
        .map(|first| (first < room).then(|| [first, room.min(first + tokens)]))
        .collect();
    for (length, span) in lengths.iter_mut().zip(&spans) {
        if let Some([_, past]) = span {
            *length = *past as u32;
        }
    }
    let pairs =
        codes.par_chunks_mut(of_pair).zip(keys.par_chunks_mut(of_ring)).zip(values.par_chunks_mut(of_ring));
    let found = pairs.take(spans.len() * heads).enumerate().map(|(pair, ((codes, keys), values))| {
        let (sequence, head) = (pair / heads, pair % heads);
        let mut bad = [u32::MAX; 2];
        let Some([first, past]) = spans[sequence] else { return bad };
        for (kind, ring) in [keys, values].into_iter().enumerate() {
            let side = [Side::Key, Side::Value][kind];
            let row = |token: usize| {
                let at = ((sequence * tokens + token - first) * heads + head) * dim;
                &new[kind][at..at + dim]
            };
            for token in first..past {
                if row(token).iter().any(|x| !x.is_finite()) {
                    bad[kind] = bad[kind].min((token * heads + head) as u32);
                }
            }
            // Groups that the chunk completes; of the first one some tokens may be in the ring.
            let mut rows = vec![0f32; group * dim];
            for number in first / group..past / group {
                for (token, out) in (number * group..).zip(rows.chunks_exact_mut(dim)) {
                    let near = cache.near(token as u32) as usize * dim;
                    let from = if token < first { &ring[near..near + dim] } else { row(token) };
                    out.iter_mut().zip(from).for_each(|(out, x)| *out = counted(*x));
                }
                let words = cache.layout.group_words() as usize;
                quantize(cache.layout, side, &rows, &mut codes[number * words..][..words]);
            }
            // The groups that are still in the ring at the end.
            let kept = ((past - 1) / group + 1).saturating_sub(cache.slots() as usize) * group;
            for token in first.max(kept)..past {
                let near = cache.near(token as u32) as usize * dim;
                ring[near..near + dim].copy_from_slice(row(token));
            }
        }
        bad
    });
    let found = found.reduce(|| [u32::MAX; 2], |a, b| [a[0].min(b[0]), a[1].min(b[1])]);
    for (refused, found) in refused.iter_mut().zip(found) {
        *refused = (*refused).min(found);
    }
}

/// s and z of numbers, and their codes to `put`.
fn codes_of(
    numbers: impl Iterator<Item = f32> + Clone,
    bits: u32,
    mut put: impl FnMut(usize, u32),
) -> [f16; 2] {
    let (mut least, mut most) = (f32::INFINITY, f32::NEG_INFINITY);
    for x in numbers.clone() {
        least = if x < least { x } else { least };
        most = if x > most { x } else { most };
    }
    let scale = scale_of(least, most, bits);
    numbers.enumerate().for_each(|(i, x)| put(i, code_of(x, scale, least, bits)));
    [scale, f16::from_f32(least)]
}

/// Writes keys or values [group, head_dim] to their group's block.
fn quantize(layout: Layout, side: Side, rows: &[f32], block: &mut [u32]) {
    let (dim, group) = (layout.head_dim as usize, layout.group as usize);
    let (bits, tile) = (layout.bits(side), BLOCK_TOKENS as usize);
    let mut codes = vec![0u32; group * dim];
    let half = |block: &mut [u32], word: usize, second: usize, x: f16| {
        let mask = 0xffff << (16 * second);
        block[word] = block[word] & !mask | u32::from(x.to_bits()) << (16 * second);
    };
    match side {
        Side::Key => {
            for channel in 0..dim {
                let numbers = rows[channel..].iter().step_by(dim).copied();
                let [scale, zero] = codes_of(numbers, bits, |i, code| codes[i * dim + channel] = code);
                half(block, channel / 2, channel % 2, scale);
                half(block, (dim + channel) / 2, channel % 2, zero);
            }
        }
        Side::Value => {
            for (number, of_group) in rows.chunks_exact(group).enumerate() {
                let first = number * group;
                let [scale, zero] =
                    codes_of(of_group.iter().copied(), bits, |i, code| codes[first + i] = code);
                let (token, channel) = (first / dim, first % dim);
                let of_tile = dim + token / tile * layout.tile_words() as usize;
                let at = of_tile + layout.value_scale((token % tile) as u32, channel as u32) as usize;
                half(block, at, token % 2, scale);
                half(block, at + 1, token % 2, zero);
            }
        }
    }
    for word in words(layout, side) {
        let mut packed = 0;
        for (m, [a, b]) in word.pairs(layout, side).enumerate() {
            packed |= (codes[a] | codes[b] << 16) << (bits * m as u32);
        }
        block[word.at] = packed;
    }
}

/// A word of a group's block.
struct Word {
    /// Where it is.
    at: usize,
    /// Its first code's token of the group, and channel.
    token: usize,
    channel: usize,
}

/// The words with codes of one side.
fn words(layout: Layout, side: Side) -> impl Iterator<Item = Word> {
    let count = layout.words(side);
    (0..layout.tiles()).flat_map(move |tile| {
        (0..32 * count).map(move |i| {
            let (lane, w) = (i / count, i % count);
            let (token, channel) = layout.origin(side, lane, w);
            let at = layout.head_dim + tile * layout.tile_words() + layout.word(side, lane, w);
            Word { at: at as usize, token: (tile * BLOCK_TOKENS + token) as usize, channel: channel as usize }
        })
    })
}

impl Word {
    /// Where in [group, head_dim] the two codes of each pair are.
    fn pairs(&self, layout: Layout, side: Side) -> impl Iterator<Item = [usize; 2]> + use<> {
        let dim = layout.head_dim as usize;
        let (token, channel) = (self.token, self.channel);
        (0..16 / layout.bits(side)).map(move |m| {
            let first = token * dim + channel + Layout::step(side, m) as usize;
            [first, first + if side == Side::Key { 1 } else { dim }]
        })
    }
}

/// What all codes of a scale and a zero stand for.
fn levels(scale: f16, zero: f16, bits: u32) -> [f16; 16] {
    let mut levels = [f16::ZERO; 16];
    for (code, level) in levels.iter_mut().enumerate().take(1 << bits) {
        let both = restored(pair_of(code as u32), twice(scale), twice(zero));
        *level = f16::from_bits(both as u16);
    }
    levels
}

/// A group's keys or values [group, head_dim] from its block.
fn restore_group(layout: Layout, side: Side, block: &[u32], out: &mut [f16]) {
    let (dim, tile) = (layout.head_dim as usize, BLOCK_TOKENS as usize);
    let bits = layout.bits(side);
    let half = |word: u32, second: usize| f16::from_bits((word >> (16 * second)) as u16);
    // By channel; by token and group of channels.
    let levels: Vec<[f16; 16]> = match side {
        Side::Key => (0..dim)
            .map(|c| levels(half(block[c / 2], c % 2), half(block[(dim + c) / 2], c % 2), bits))
            .collect(),
        Side::Value => (0..dim)
            .map(|number| {
                let first = number * layout.group as usize;
                let (token, channel) = (first / dim, first % dim);
                let of_tile = dim + token / tile * layout.tile_words() as usize;
                let at = of_tile + layout.value_scale((token % tile) as u32, channel as u32) as usize;
                levels(half(block[at], token % 2), half(block[at + 1], token % 2), bits)
            })
            .collect(),
    };
    for word in words(layout, side) {
        for (m, pair) in word.pairs(layout, side).enumerate() {
            for (second, at) in pair.into_iter().enumerate() {
                let code = block[word.at] >> (bits * m as u32 + 16 * second as u32) & ((1 << bits) - 1);
                let of = match side {
                    Side::Key => at % dim,
                    Side::Value => at / layout.group as usize,
                };
                out[at] = levels[of][code as usize];
            }
        }
    }
}

impl Stored<'_> {
    /// The codes' block of a group of a sequence and KV head, of all.
    fn block(&self, pair: usize, group: usize) -> &[u32] {
        let words = self.shape.layout.group_words() as usize;
        &self.codes[(pair * self.shape.groups as usize + group) * words..][..words]
    }

    /// The first `present` rows of a group as a step that reads it from codes, or not, sees them.
    fn group(&self, kind: usize, pair: usize, group: usize, coded: bool, present: usize, out: &mut [f16]) {
        let layout = self.shape.layout;
        if coded {
            restore_group(layout, [Side::Key, Side::Value][kind], self.block(pair, group), out);
            return;
        }
        let (dim, tokens) = (layout.head_dim as usize, layout.group as usize);
        let ring = pair * self.shape.slots() as usize * tokens;
        let first = (ring + self.shape.near((group * tokens) as u32) as usize) * dim;
        out[..present * dim].copy_from_slice(&self.recent[kind][first..first + present * dim]);
    }

    /// Writes the first `length` tokens of sequence `sequence` to a pool [tiles, kv_heads, 16, head_dim] of
    /// keys or values.
    fn restore(&self, kind: usize, sequence: usize, length: u32, pool: &mut [f16]) {
        let Shape { kv_heads, layout, .. } = self.shape;
        let (heads, dim, tokens) = (kv_heads as usize, layout.head_dim as usize, layout.group as usize);
        let (tile, coded) = (BLOCK_TOKENS as usize * dim, self.shape.coded(length) as usize);
        let groups = (length as usize).div_ceil(tokens);
        let of_groups = pool.par_chunks_mut(layout.tiles() as usize * heads * tile).take(groups);
        of_groups.enumerate().for_each(|(group, pool)| {
            let present = tokens.min(length as usize - group * tokens);
            let mut rows = vec![f16::ZERO; tokens * dim];
            for head in 0..heads {
                self.group(kind, sequence * heads + head, group, group < coded, present, &mut rows);
                let used = rows[..present * dim].chunks(tile);
                for (index, from) in used.enumerate() {
                    let to = (index * heads + head) * tile;
                    pool[to..to + from.len()].copy_from_slice(from);
                }
            }
        });
    }
}

/// What the restoring kernel does, of the one sequence that there is.
pub(super) fn restore(stored: Stored<'_>, length: u32, pools: [&mut [f16]; 2]) {
    for (kind, pool) in pools.into_iter().enumerate() {
        stored.restore(kind, 0, length, pool);
    }
}

/// Keys and values of a sequence, [tokens, kv_heads, head_dim]: of whole groups from their codes, the rest as
/// it was.
pub(super) fn rows(stored: Stored<'_>, length: usize) -> [Vec<f32>; 2] {
    let Shape { kv_heads, layout, .. } = stored.shape;
    let (heads, dim, tokens) = (kv_heads as usize, layout.head_dim as usize, layout.group as usize);
    [0, 1].map(|kind| {
        let mut out = vec![0f32; length * heads * dim];
        out.par_chunks_mut(tokens * heads * dim).enumerate().for_each(|(group, out)| {
            let present = out.len() / (heads * dim);
            let mut rows = vec![f16::ZERO; tokens * dim];
            for head in 0..heads {
                stored.group(kind, head, group, present == tokens, present, &mut rows);
                for (token, row) in rows.chunks_exact(dim).take(present).enumerate() {
                    let to = &mut out[(token * heads + head) * dim..][..dim];
                    to.iter_mut().zip(row).for_each(|(to, x)| *to = x.to_f32());
                }
            }
        });
        out
    })
}

/// What the kernel of a step does.
pub(super) fn attend_step(
    stored: Stored<'_>,
    problem: StepProblem,
    queries: &[f16],
    lengths: &[u32],
    output: &mut [f32],
) -> Result<()> {
    let Shape { kv_heads, layout, .. } = stored.shape;
    let problem = problem.dense();
    let width = problem.max_blocks();
    // Whole groups of blocks for each sequence, one behind another.
    let blocks = lengths.iter().map(|n| n.div_ceil(layout.group) * layout.tiles());
    let firsts: Vec<u32> = blocks
        .scan(0, |next, blocks| {
            *next += blocks;
            Some(*next - blocks)
        })
        .collect();
    let of_block = (BLOCK_TOKENS * kv_heads * layout.head_dim) as usize;
    let all: u32 = lengths.iter().map(|n| n.div_ceil(layout.group) * layout.tiles()).sum();
    let pools = [0, 1].map(|kind| {
        let mut pool = vec![f16::ZERO; all as usize * of_block];
        for (sequence, (length, first)) in lengths.iter().zip(&firsts).enumerate() {
            stored.restore(kind, sequence, *length, &mut pool[*first as usize * of_block..]);
        }
        pool
    });
    let table: Vec<u32> = firsts.iter().flat_map(|first| (0..width).map(move |tile| first + tile)).collect();
    let slices = Slices { queries, keys: &pools[0], values: &pools[1], table: &table, lengths };
    let mut lse = vec![0f32; problem.query_rows()];
    Ok(attend(problem, slices, output, &mut lse)?)
}
