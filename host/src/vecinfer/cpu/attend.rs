//! A step's attention: what on a GPU are thread blocks and warps is shared out over threads, and the tensor
//! cores' arithmetic is done sixteen outputs at a time.

use super::{Places, Stored, TILE, turn};
use crate::attention::BLOCK_TOKENS;
use crate::attention::cpu::lanes::{Eights, Floats, Lanes, Order, Row, Tile, multiply_each};
use crate::attention::cpu::pieces::{Memory, Pieces, with_memory};
use crate::attention::cpu::softmax::{LARGEST_EXPONENT, MAX_ROWS, MergeParts, Running, WarpResult, of_lane};
use crate::attention::cpu::{TILES_ALONE, Work, run};
use crate::simd_level::Level;
use half::f16;
use kernels_gpu::attention::{Parts, part_floats, warps};
use kernels_gpu::vecinfer::Kind;
use rayon::prelude::*;
use simt::math::{canonical_nan, fma};
use std::cell::RefCell;

/// Sixteen neighbouring channels are a contraction: that of units of four channels. Of units of eight it is
/// [`Eights`].
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
    queries: [[Row; 8]; MAX_ROWS],
    /// Σ p·v, [head_dim / 16, rows].
    outputs: [[Floats; MAX_ROWS]; 8],
    /// A tile's probabilities, rounded: all, or those of tokens 0 to 7 and of 8 to 15.
    weights: [[Row; MAX_ROWS]; 2],
}

impl Scratch {
    fn new() -> Box<Self> {
        Box::new(Scratch {
            keys: Tile::ZERO,
            values: Tile::ZERO,
            key_rows: Vec::new(),
            value_rows: Vec::new(),
            queries: [[Row::ZERO; 8]; MAX_ROWS],
            outputs: [[[0.0; 16]; MAX_ROWS]; 8],
            weights: [[Row::ZERO; MAX_ROWS]; 2],
        })
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
        if self.view.stored.setting.keys.unit() == 8 {
            self.compute::<L, Eights>();
        } else {
            self.compute::<L, Neighbours>();
        }
    }
}

impl Compute<'_> {
    #[inline(always)]
    fn compute<L: Lanes, O: Order>(self) {
        let Compute { view, part, pieces, piece, scratch, results } = self;
        let Stored { shape, head_dim, .. } = view.stored;
        let dim = head_dim as usize;
        let (rows, chunks) = (view.rows(part), dim / 16);
        for (r, queries) in scratch.queries.iter_mut().enumerate().take(rows) {
            let at = view.query_row(part, r) * dim;
            let mut ordered = [[0u16; 16]; 8];
            for (d, x) in view.queries[at..at + dim].iter().enumerate() {
                let (chunk, step) = O::step_of(d);
                ordered[chunk][step] = *x;
            }
            for (query, x) in queries.iter_mut().zip(ordered).take(chunks) {
                *query = Row::new::<f16, L>(x);
            }
        }
        scratch.key_rows.resize(TILE * dim, 0);
        scratch.value_rows.resize(TILE * dim, 0);
        let row = part.sequence * shape.kv_heads as usize + part.head;
        let coded = shape.coded(part.length);
        for (warp, result) in pieces.warps_of(piece).zip(results) {
            let mut running = [Running::EMPTY; MAX_ROWS];
            for chunk in &mut scratch.outputs[..chunks] {
                chunk[..rows].fill([0.0; 16]);
            }
            for tile in (part.tiles[0] + warp as u32..part.tiles[1]).step_by(pieces.warps) {
                let present = ((part.length - tile * BLOCK_TOKENS) as usize).min(TILE);
                for (kind, to) in [&mut scratch.key_rows, &mut scratch.value_rows].into_iter().enumerate() {
                    view.stored.tile(kind, row, tile, part.length, view.places[kind], to);
                    to[present * dim..].fill(0);
                }
                L::keys::<f16, O>(&scratch.key_rows, dim, &mut scratch.keys);
                // Contractions X and Y in turns, each summed up on its own.
                let mut sums = [[[0f32; TILE]; MAX_ROWS]; 2];
                for chunk in 0..chunks {
                    let queries = |r: usize| &scratch.queries[r][chunk];
                    let sums = &mut sums[chunk % 2][..rows];
                    multiply_each::<f16, L>(queries, scratch.keys.of_keys(chunk), sums);
                }
                // Scores before the scale, and weights' exponents.
                let [mut scores, mut exponents] = sums;
                let relative = |scores: &[f32; TILE], reference: f32| {
                    scores.map(|score| fma(score, shape.scale_log2, -reference))
                };
                let mut vote = false;
                for r in 0..rows {
                    for (i, (score, y)) in scores[r].iter_mut().zip(exponents[r]).enumerate() {
                        *score = if i < present { *score + y } else { f32::NEG_INFINITY };
                    }
                    exponents[r] = relative(&scores[r], running[r].reference);
                    vote |= exponents[r].iter().any(|exponent| *exponent > LARGEST_EXPONENT);
                }
                if vote {
                    for r in 0..rows {
                        let scaled = scores[r].map(|score| score * shape.scale_log2);
                        let factor = running[r].raise(&[&scaled]);
                        if factor != 1.0 {
                            for chunk in &mut scratch.outputs[..chunks] {
                                chunk[r].iter_mut().for_each(|x| *x *= factor);
                            }
                        }
                        exponents[r] = relative(&scores[r], running[r].reference);
                    }
                }
                // Of codes, eight tokens at a time.
                let halves = if tile < coded { 2 } else { 1 };
                for r in 0..rows {
                    let p = L::exp2(&exponents[r], 0.0);
                    for q in 0..4 {
                        let [a, b, c, d] = of_lane(&p, q);
                        running[r].sums[q] += (a + b) + (c + d);
                    }
                    let rounded = L::round::<f16>(&p);
                    for (half, weights) in scratch.weights.iter_mut().enumerate().take(halves) {
                        let mut own = rounded;
                        if halves == 2 {
                            own[8 * (1 - half)..][..8].fill(0);
                        }
                        weights[r].set::<f16, L>(own);
                    }
                }
                let values = &scratch.value_rows;
                L::values::<f16>(values, dim, &mut scratch.values);
                for chunk in 0..chunks {
                    let outputs = &mut scratch.outputs[chunk][..rows];
                    for weights in &scratch.weights[..halves] {
                        let values = scratch.values.of_values(values, dim, chunk);
                        multiply_each::<f16, L>(|r: usize| &weights[r], values, outputs);
                    }
                }
            }
            // Nothing was cut off.
            let mut outputs = [[[[0f32; 16]; 2]; MAX_ROWS]; 8];
            for (to, from) in outputs.iter_mut().zip(&scratch.outputs).take(chunks) {
                to.iter_mut().zip(from).take(rows).for_each(|(to, from)| to[0] = *from);
            }
            for (r, running) in running.iter().enumerate().take(rows) {
                result.keep(r, running, &outputs[..chunks]);
            }
        }
    }
}
