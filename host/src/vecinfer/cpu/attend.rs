//! A step's attention: what on a GPU are thread blocks and warps is shared out over threads, and the tensor
//! cores' arithmetic is done sixteen outputs at a time.

use super::{MOST_CHANNELS, Places, Stored, TILE, turn};
use crate::attention::BLOCK_TOKENS;
use crate::attention::cpu::lanes::{Floats, Lanes, Order, Row, Tile, multiply_each};
use crate::attention::cpu::pieces::{Memory, Pieces, with_memory};
use crate::attention::cpu::softmax::{LARGEST_EXPONENT, MAX_ROWS, MergeParts, Running, WarpResult};
use crate::attention::cpu::{TILES_ALONE, Work, run};
use crate::simd_level::Level;
use half::f16;
use kernels_gpu::attention::{Lift, Parts, integers, part_floats, warps};
use kernels_gpu::vecinfer::{Kind, rows_of, whole_scale};
use rayon::prelude::*;
use simt::convert::f32_from_f16;
use simt::math::{abs, canonical_nan, exp2_nonpositive, max, maximum};
use std::cell::RefCell;

/// Sixteen channels each.
const CHUNKS: usize = MOST_CHANNELS / 16;

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

/// Which thread block.
#[derive(Clone, Copy)]
struct Part {
    sequence: usize,
    head: usize,
    row_group: usize,
    length: u32,
    /// Tiles of 16 tokens, from the first to before the last.
    tiles: [u32; 2],
}

/// What all parts read.
#[derive(Clone, Copy)]
struct View<'a> {
    stored: Stored<'a>,
    /// [sequences, q_heads, head_dim], transformed.
    queries: &'a [u16],
    /// Of keys and of values.
    places: [&'a Places; 2],
}

impl View<'_> {
    /// Query rows of a part's group.
    fn rows(&self, part: Part) -> usize {
        (self.stored.shape.group as usize - part.row_group * MAX_ROWS).min(MAX_ROWS)
    }

    fn query_row(&self, part: Part, row: usize) -> usize {
        let group = self.stored.shape.group as usize;
        (part.sequence * self.stored.shape.kv_heads as usize + part.head) * group
            + part.row_group * MAX_ROWS
            + row
    }
}

/// What [`attend`](kernels_gpu::vecinfer::attend()) does: the same arguments but for its scratch.
pub(in super::super) fn attend(
    level: Level,
    stored: Stored<'_>,
    table: &[f32],
    queries: &[f16],
    lengths: &[u32],
    output: &mut [f32],
) {
    let (shape, dim) = (stored.shape, stored.head_dim as usize);
    let mut turned = vec![f16::ZERO; queries.len()];
    turn(level, dim, shape, table, queries, &mut turned);
    // Whole keys as integers of 16 bits.
    let whole: Vec<f16> = if stored.setting.keys.whole_keys() {
        stored.books[0].iter().map(|x| f16::from_bits(f32_from_f16(*x) as i16 as u16)).collect()
    } else {
        stored.books[0].to_vec()
    };
    let stored = Stored { books: [&whole, stored.books[1]], ..stored };
    let places = [
        Places::new(stored.code(0), Kind::Key, stored.head_dim),
        Places::new(stored.code(1), Kind::Value, stored.head_dim),
    ];
    let view = View { stored, queries: bytemuck::cast_slice(&turned), places: [&places[0], &places[1]] };
    let mut groups = Vec::new();
    let mut parts = Vec::new();
    for (sequence, length) in lengths.iter().enumerate() {
        let length = (*length).min(shape.tiles * BLOCK_TOKENS);
        let cut = Parts::of(length, shape.splits);
        for head in 0..shape.kv_heads as usize {
            for row_group in 0..shape.row_groups() as usize {
                let first = parts.len();
                parts.extend((0..cut.used).map(|split| Part {
                    sequence,
                    head,
                    row_group,
                    length,
                    tiles: cut.tiles_of(split),
                }));
                groups.push(first..parts.len());
            }
        }
    }
    let floats = part_floats(stored.head_dim);
    let mut partials = vec![0f32; parts.len() * floats];
    let pieces = Pieces::of(parts.len(), warps(stored.head_dim) as usize);
    let one = |part: &Part, out: &mut [f32], pieces: Pieces| {
        let extent = [view.rows(*part), dim];
        pieces.share(level, vec![(); pieces.count], extent, out, |piece, (), results| {
            thread_local!(static SCRATCH: Memory<Scratch> = const { RefCell::new(Vec::new()) });
            with_memory(&SCRATCH, Scratch::new, |scratch| {
                run(level, Compute { view, part: *part, pieces, piece, scratch, results });
            });
            None::<()>
        });
    };
    let tiles: u32 = parts.iter().map(|part| part.tiles[1] - part.tiles[0]).sum();
    if tiles as usize <= TILES_ALONE {
        let alone = Pieces { count: 1, ..pieces };
        parts.iter().zip(partials.chunks_exact_mut(floats)).for_each(|(part, out)| one(part, out, alone));
    } else {
        let tasks = parts.par_iter().zip(partials.par_chunks_exact_mut(floats));
        tasks.for_each(|(part, out)| one(part, out, pieces));
    }
    for range in groups {
        let part = parts[range.start];
        let partials = &partials[range.start * floats..range.end * floats];
        for r in 0..view.rows(part) {
            let at = view.query_row(part, r) * dim;
            let output = &mut output[at..at + dim];
            let merge = MergeParts { parts: partials, floats, r, values: &mut *output };
            let sum = run(level, merge).sum;
            for x in output {
                *x = if sum == 0.0 { 0.0 } else { canonical_nan(*x / sum) };
            }
        }
    }
}

/// A thread's memory, used again and again.
struct Scratch {
    keys: Tile,
    values: Tile,
    key_rows: Vec<u16>,
    value_rows: Vec<u16>,
    /// [rows, contractions].
    queries: [[Row; CHUNKS]; MAX_ROWS],
    /// The same as integers, [rows, head_dim], and what scores of them are multiplied by.
    integers: [[i16; MOST_CHANNELS]; MAX_ROWS],
    scales: [f32; MAX_ROWS],
    /// Σ p·v, [head_dim / 16, rows].
    outputs: [[Floats; MAX_ROWS]; CHUNKS],
    /// A tile's probabilities, rounded: those of tokens 0 to 7, and of 8 to 15.
    weights: [[Row; MAX_ROWS]; 2],
}

impl Scratch {
    fn new() -> Box<Self> {
        Box::new(Scratch {
            keys: Tile::ZERO,
            values: Tile::ZERO,
            key_rows: Vec::new(),
            value_rows: Vec::new(),
            queries: [[Row::ZERO; CHUNKS]; MAX_ROWS],
            integers: [[0; MOST_CHANNELS]; MAX_ROWS],
            scales: [0.0; MAX_ROWS],
            outputs: [[[0.0; 16]; MAX_ROWS]; CHUNKS],
            weights: [[Row::ZERO; MAX_ROWS]; 2],
        })
    }
}

/// Tokens of a lane of a row: of eight rows four, of four rows two.
fn tokens_of(rows: u32) -> &'static [&'static [usize]] {
    if rows == 4 {
        &[&[0, 1], &[2, 3], &[4, 5], &[6, 7], &[8, 9], &[10, 11], &[12, 13], &[14, 15]]
    } else {
        &[&[0, 1, 8, 9], &[2, 3, 10, 11], &[4, 5, 12, 13], &[6, 7, 14, 15]]
    }
}

/// Σ i·k, which 32 bits hold: 128 · 32512 · 127 < 2^29.
#[inline(always)]
fn product(query: &[i16], key: &[u16]) -> i32 {
    query.iter().zip(key).map(|(i, k)| i32::from(*i) * i32::from(*k as i16)).sum()
}

/// Raises a row's reference as its lanes agree on, and gives the factor for what it has.
#[inline(always)]
fn raise(reference: &mut f32, scores: &[f32; TILE], lanes: &[&[usize]]) -> f32 {
    let mut new = f32::NEG_INFINITY;
    for tokens in lanes {
        let largest = tokens.iter().map(|token| scores[*token]).reduce(max).expect("a lane has tokens");
        new = max(new, Lift::to(largest, *reference));
    }
    let factor = exp2_nonpositive(*reference - new);
    *reference = new;
    factor
}

/// The products of values of which some are not finite: a half's weights meet only its tokens, and each value
/// its neighbour's, as 0.
#[cold]
#[inline(never)]
fn spoilt<L: Lanes>(
    values: &[u16],
    dim: usize,
    tile: &mut Tile,
    weights: &[[Row; MAX_ROWS]; 2],
    outputs: &mut [[Floats; MAX_ROWS]],
    rows: usize,
) {
    for (half, weights) in weights.iter().enumerate() {
        let mut own = values.to_vec();
        own[8 * (1 - half) * dim..][..8 * dim].fill(0);
        L::values::<f16>(&own, dim, tile);
        for (chunk, outputs) in outputs.iter_mut().enumerate() {
            let values = tile.of_values(&own, dim, chunk);
            multiply_each::<f16, L>(|r: usize| &weights[r], values, &mut outputs[..rows]);
        }
    }
    for (d, x) in values[..TILE * dim].iter().enumerate() {
        if !f16::from_bits(*x).is_finite() {
            let d = (d % dim) ^ 1;
            outputs[d / 16].iter_mut().for_each(|row| row[d % 16] = f32::NAN);
        }
    }
}

/// What a piece of a part's warps come to.
struct Compute<'a> {
    view: View<'a>,
    part: Part,
    pieces: Pieces,
    piece: usize,
    scratch: &'a mut Scratch,
    results: &'a mut [WarpResult],
}

impl Work for Compute<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Compute { view, part, pieces, piece, scratch, results } = self;
        let Stored { shape, head_dim, .. } = view.stored;
        let dim = head_dim as usize;
        let (rows, chunks) = (view.rows(part), dim / 16);
        for (r, queries) in scratch.queries.iter_mut().enumerate().take(rows) {
            let at = view.query_row(part, r) * dim;
            let mut ordered = [[0u16; 16]; CHUNKS];
            for (d, x) in view.queries[at..at + dim].iter().enumerate() {
                let (chunk, step) = Neighbours::step_of(d);
                ordered[chunk][step] = *x;
            }
            for (query, x) in queries.iter_mut().zip(ordered).take(chunks) {
                *query = Row::new::<f16, L>(x);
            }
        }
        let whole = view.stored.setting.keys.whole_keys();
        if whole {
            for r in 0..rows {
                let row = view.query_row(part, r) * dim;
                let query = view.queries[row..row + dim].iter().map(|x| f32_from_f16(f16::from_bits(*x)));
                let largest = query.clone().fold(0.0, |most, x| maximum(most, abs(x)));
                let inverse = integers::inverse_of(largest);
                for (to, x) in scratch.integers[r].iter_mut().zip(query) {
                    *to = integers::integer(x, inverse) as i16;
                }
                scratch.scales[r] = whole_scale(largest, shape.scale_log2);
            }
        }
        scratch.key_rows.resize(TILE * dim, 0);
        scratch.value_rows.resize(TILE * dim, 0);
        let row = part.sequence * shape.kv_heads as usize + part.head;
        let lanes = tokens_of(rows_of(shape.group, view.stored.code(0), view.stored.code(1)));
        for (warp, result) in pieces.warps_of(piece).zip(results) {
            let mut running = [Running::EMPTY; MAX_ROWS];
            let mut sums = [[0f32; 8]; MAX_ROWS];
            for chunk in &mut scratch.outputs[..chunks] {
                chunk[..rows].fill([0.0; 16]);
            }
            // Tiles in f16 come last.
            let is_coded = |tile: &u32| shape.window.is_coded(*tile, part.length);
            let own = (part.tiles[0] + warp as u32..part.tiles[1]).step_by(pieces.warps);
            for tile in own.clone().filter(is_coded).chain(own.filter(|tile| !is_coded(tile))) {
                let present = ((part.length - tile * BLOCK_TOKENS) as usize).min(TILE);
                for (kind, to) in [&mut scratch.key_rows, &mut scratch.value_rows].into_iter().enumerate() {
                    view.stored.tile(kind, row, tile, part.length, view.places[kind], to);
                    to[present * dim..].fill(0);
                }
                let coded = whole && is_coded(&tile);
                // Contractions X and Y in turns, each summed up on its own.
                let mut products = [[[0f32; TILE]; MAX_ROWS]; 2];
                if coded {
                    let keys = &scratch.key_rows;
                    for (r, products) in products[0].iter_mut().enumerate().take(rows) {
                        for (token, score) in products.iter_mut().enumerate() {
                            let key = &keys[token * dim..][..dim];
                            *score = product(&scratch.integers[r][..dim], key) as f32;
                        }
                    }
                } else {
                    L::keys::<f16, Neighbours>(&scratch.key_rows, dim, &mut scratch.keys);
                    for chunk in 0..chunks {
                        let queries = |r: usize| &scratch.queries[r][chunk];
                        let products = &mut products[chunk % 2][..rows];
                        multiply_each::<f16, L>(queries, scratch.keys.of_keys(chunk), products);
                    }
                }
                // Scores before the scale, and weights' exponents.
                let [mut scores, mut exponents] = products;
                let scales = scratch.scales;
                let scale = |r: usize| if coded { scales[r] } else { shape.scale_log2 };
                let relative = |scores: &[f32; TILE], r: usize, reference: f32| {
                    scores.map(|score| score * scale(r) - reference)
                };
                let mut vote = false;
                for r in 0..rows {
                    for (i, (score, y)) in scores[r].iter_mut().zip(exponents[r]).enumerate() {
                        let sum = if coded { *score } else { *score + y };
                        *score = if i < present { sum } else { f32::NEG_INFINITY };
                    }
                    exponents[r] = relative(&scores[r], r, running[r].reference);
                    vote |= exponents[r].iter().any(|exponent| *exponent > LARGEST_EXPONENT);
                }
                if vote {
                    for r in 0..rows {
                        let scaled = scores[r].map(|score| score * scale(r));
                        let factor = raise(&mut running[r].reference, &scaled, lanes);
                        if factor != 1.0 {
                            sums[r].iter_mut().for_each(|sum| *sum *= factor);
                            for chunk in &mut scratch.outputs[..chunks] {
                                chunk[r].iter_mut().for_each(|x| *x *= factor);
                            }
                        }
                        exponents[r] = relative(&scores[r], r, running[r].reference);
                    }
                }
                for r in 0..rows {
                    let p = L::exp2(&exponents[r], 0.0);
                    for (sum, tokens) in sums[r].iter_mut().zip(lanes) {
                        let pair = |at: usize| p[tokens[at]] + p[tokens[at + 1]];
                        *sum += if tokens.len() == 4 { pair(0) + pair(2) } else { pair(0) };
                    }
                    let rounded = L::round::<f16>(&p);
                    for (half, weights) in scratch.weights.iter_mut().enumerate() {
                        let mut own = rounded;
                        own[8 * (1 - half)..][..8].fill(0);
                        weights[r].set::<f16, L>(own);
                    }
                }
                let Scratch { value_rows: values, values: tile, weights, outputs, .. } = &mut *scratch;
                L::values::<f16>(values, dim, tile);
                if tile.finite {
                    for (chunk, outputs) in outputs[..chunks].iter_mut().enumerate() {
                        for weights in &*weights {
                            let values = tile.of_values(values, dim, chunk);
                            multiply_each::<f16, L>(|r: usize| &weights[r], values, &mut outputs[..rows]);
                        }
                    }
                } else {
                    spoilt::<L>(values, dim, tile, weights, &mut outputs[..chunks], rows);
                }
            }
            // Nothing was cut off.
            let mut outputs = [[[[0f32; 16]; 2]; MAX_ROWS]; CHUNKS];
            for (to, from) in outputs.iter_mut().zip(&scratch.outputs).take(chunks) {
                to.iter_mut().zip(from).take(rows).for_each(|(to, from)| to[0] = *from);
            }
            for (r, running) in running.iter_mut().enumerate().take(rows) {
                let [a, b, c, d, e, f, g, h] = sums[r];
                running.sums = [((a + b) + (c + d)) + ((e + f) + (g + h)), 0.0, 0.0, 0.0];
                result.keep(r, running, &outputs[..chunks]);
            }
        }
    }
}
