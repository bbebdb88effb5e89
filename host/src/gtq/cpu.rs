//! Attention on slices: the bits of the kernels, by SIMD and on all cores.
//!
//! Scores are integers, so that any order gives the kernel's; weights meet values by
//! [`attention::cpu`](crate::attention::cpu)'s model of the tensor cores. Threads share out what on a GPU are
//! thread blocks and, where there are few, their warps. For a prompt, whose rows are many, a KV head's tiles
//! are restored once.

use super::codebook::Levels;
use super::encode::{butterfly, turned, turned_parts};
use super::plan::Books;
use super::{near, rows};
use crate::attention::cpu::lanes::{Floats, Lanes, Row, Tile, multiply_each};
use crate::attention::cpu::pieces::{Memory, Pieces, with_memory};
use crate::attention::cpu::softmax::{MAX_ROWS, MergeParts, Running, TOKENS, WarpResult, of_lane};
use crate::attention::cpu::{TILES_ALONE, Work, run};
use crate::simd_level::Level;
use half::f16;
use kernels_gpu::attention::integers::{integer, inverse_of};
use kernels_gpu::attention::{Lift, PartialRow, Parts, part_floats, warps};
use kernels_gpu::gtq::finish::{log_sum, restored};
use kernels_gpu::gtq::parts::{MOST_LEVELS, PARTS};
use kernels_gpu::gtq::query::half;
use kernels_gpu::gtq::rotation::signed;
use kernels_gpu::gtq::running::{largest, wanted};
use kernels_gpu::gtq::scores::{added, scaled};
use kernels_gpu::gtq::window;
use kernels_gpu::gtq::{AttendShape, Side, TileLayout};
use rayon::prelude::*;
use simt::math::{abs, exp2_nonpositive, max, maximum};
use std::cell::RefCell;

/// The most channels of a head.
const MOST_DIM: usize = 128;

/// What attention reads.
#[derive(Clone, Copy)]
pub(super) struct Slices<'a> {
    pub(super) queries: &'a [f16],
    pub(super) tiles: &'a [u8],
    pub(super) near: &'a [u8],
    pub(super) table: &'a [u32],
    pub(super) lengths: &'a [u32],
    /// [kv_heads, head_dim]; empty of whole keys.
    pub(super) order: &'a [u8],
}

/// What the attention kernel does. Runs on rayon's current thread pool.
pub(super) fn attend(
    books: &Books,
    shape: AttendShape,
    slices: Slices<'_>,
    output: &mut [f32],
    lse: &mut [f32],
) {
    let level = Level::best().checked();
    let dim = books.layout.head_dim as usize;
    let floats = part_floats(books.layout.head_dim);
    let (mut levels, mut scores) = ([[0; MOST_LEVELS]; PARTS], [0.0; PARTS]);
    for (p, (of_part, score)) in books.keys.iter().zip(books.scores()).enumerate() {
        (levels[p], scores[p]) = (integers(of_part), score);
    }
    let view = View { slices, shape, layout: books.layout, scores, levels, halves: halves(&books.values) };
    let mut groups = Vec::new();
    let mut parts = Vec::new();
    let mut pairs = Vec::new();
    for (sequence, length) in slices.lengths.iter().enumerate() {
        let cut = Parts::of(*length, shape.splits);
        for head in 0..shape.kv_heads as usize {
            pairs.push((sequence, head));
            for row_group in 0..shape.row_groups() as usize {
                let first = parts.len();
                parts.extend((0..cut.used).map(|split| {
                    let tiles = cut.tiles_of(split).map(|tile| tile as usize);
                    Part { sequence, head, row_group, tiles }
                }));
                groups.push(first..parts.len());
            }
        }
    }
    // Rows of a prompt share what is restored.
    let decoded: Option<Vec<Decoded>> = (shape.row_groups() > 1)
        .then(|| pairs.par_iter().map(|&(sequence, head)| Decoded::new(&view, sequence, head)).collect());
    let mut partials = vec![0f32; parts.len() * floats];
    let pieces = Pieces::of(parts.len(), warps(dim as u32) as usize);
    let one = |part: &Part, out: &mut [f32], pieces: Pieces| {
        let of_pair = part.sequence * shape.kv_heads as usize + part.head;
        let decoded = decoded.as_ref().map(|all| &all[of_pair]);
        pieces.share(level, vec![(); pieces.count], [part.rows(shape), dim], out, |piece, (), results| {
            thread_local!(static SCRATCH: Memory<Scratch> = const { RefCell::new(Vec::new()) });
            with_memory(&SCRATCH, Scratch::new, |scratch| {
                run(level, Compute { view: &view, part: *part, decoded, pieces, piece, scratch, results });
            });
            None::<()>
        });
    };
    let tiles: usize = parts.iter().map(|part| part.tiles[1] - part.tiles[0]).sum();
    if tiles <= TILES_ALONE {
        let alone = Pieces { count: 1, ..pieces };
        parts.iter().zip(partials.chunks_exact_mut(floats)).for_each(|(part, out)| one(part, out, alone));
    } else {
        let tasks = parts.par_iter().zip(partials.par_chunks_exact_mut(floats));
        tasks.for_each(|(part, out)| one(part, out, pieces));
    }
    let mut values = vec![0f32; dim];
    for range in groups {
        let part = parts[range.start];
        let partials = &partials[range.start * floats..range.end * floats];
        for r in 0..part.rows(shape) {
            let PartialRow { reference, sum } =
                run(level, MergeParts { parts: partials, floats, r, values: &mut values });
            butterfly(&mut values);
            let at = query_row(shape, part, r);
            for (d, (output, x)) in output[at * dim..][..dim].iter_mut().zip(&values).enumerate() {
                *output = restored(signed(*x, d), shape.value, sum);
            }
            lse[at] = log_sum(reference, sum);
        }
    }
}

/// l of each code's level.
fn integers(levels: &Levels) -> [i16; MOST_LEVELS] {
    std::array::from_fn(|code| levels.integers.get(code).map_or(0, |l| i16::from(*l)))
}

/// l + 1/2 of each code's level, as bits of an f16.
fn halves(levels: &Levels) -> [u16; 16] {
    let half = |l: &i8| f16::from_f32(f32::from(*l) + 0.5).to_bits();
    std::array::from_fn(|code| levels.integers.get(code).map_or(0, half))
}

/// What all parts read.
struct View<'a> {
    slices: Slices<'a>,
    shape: AttendShape,
    layout: TileLayout,
    /// Of each part of keys, the first of which is all of whole keys.
    scores: [f32; PARTS],
    levels: [[i16; MOST_LEVELS]; PARTS],
    halves: [u16; 16],
}

impl View<'_> {
    /// Tile `tile` of a sequence and head.
    #[inline(always)]
    fn tile(&self, sequence: usize, head: usize, tile: usize) -> &[u8] {
        let block = self.slices.table[sequence * self.shape.max_blocks as usize + tile] as usize;
        let bytes = self.layout.bytes() as usize;
        &self.slices.tiles[(block * self.shape.kv_heads as usize + head) * bytes..][..bytes]
    }

    /// Whether a tile is read from its codes.
    #[inline(always)]
    fn is_coded(&self, sequence: usize, tile: usize) -> bool {
        self.shape.window.is_coded(tile as u32, self.slices.lengths[sequence])
    }

    /// The slot of a tile that is not.
    #[inline(always)]
    fn slot(&self, sequence: usize, head: usize, tile: usize) -> &[u8] {
        let (window, bytes) = (self.shape.window, self.layout.slot().bytes() as usize);
        let first = (sequence * self.shape.kv_heads as usize + head) * window.slots as usize;
        &self.slices.near[(first + window.slot(tile as u32) as usize) * bytes..][..bytes]
    }
}

/// Which thread block.
#[derive(Clone, Copy)]
struct Part {
    sequence: usize,
    head: usize,
    row_group: usize,
    /// From the first to before the last.
    tiles: [usize; 2],
}

impl Part {
    fn rows(self, shape: AttendShape) -> usize {
        (shape.rows() as usize - self.row_group * MAX_ROWS).min(MAX_ROWS)
    }
}

/// Index of row `r` of a part among all query rows.
fn query_row(shape: AttendShape, part: Part, r: usize) -> usize {
    let (group, row) = (shape.group as usize, part.row_group * MAX_ROWS + r);
    let (token, in_group) = (row / group, row % group);
    let heads = shape.kv_heads as usize * group;
    (part.sequence * shape.query_tokens as usize + token) * heads + part.head * group + in_group
}

/// A tile restored: integers of keys, f16 of values, and all n.
#[derive(Clone)]
struct Restored {
    /// l, or of the window the high bytes of k, [16, head_dim].
    keys: Vec<i16>,
    /// Of the window the low bytes of k.
    low: Vec<i16>,
    /// Whether it is of the window.
    near: bool,
    /// l' + 1/2 or v, [16, head_dim].
    values: Vec<u16>,
    /// Of each part.
    key_n: [[f32; PARTS]; TOKENS],
    value_n: [f32; TOKENS],
}

impl Restored {
    fn new() -> Self {
        let elements = TOKENS * MOST_DIM;
        let (key_n, value_n) = ([[0.0; PARTS]; TOKENS], [0.0; TOKENS]);
        let (keys, low, values) = (vec![0; elements], vec![0; elements], vec![0; elements]);
        Restored { keys, low, near: false, values, key_n, value_n }
    }

    #[inline(always)]
    fn set(&mut self, view: &View<'_>, sequence: usize, head: usize, tile: usize) {
        let (layout, dim) = (view.layout, view.layout.head_dim as usize);
        self.near = !view.is_coded(sequence, tile);
        if self.near {
            let (slot, layout) = (view.slot(sequence, head, tile), layout.slot());
            for token in 0..TOKENS {
                let own = token * dim..(token + 1) * dim;
                let planes = [&mut self.keys[own.clone()], &mut self.low[own.clone()]];
                self.key_n[token] = near::read_key(slot, layout, token as u32, planes);
                let values = &mut self.values[own];
                self.value_n[token] = near::read_value(slot, layout, token as u32, values);
            }
            return;
        }
        let tile = view.tile(sequence, head, tile);
        for token in 0..TOKENS {
            let at = token * dim;
            let index = token as u32;
            rows::read_keys(tile, layout, index, &view.levels, &mut self.keys[at..at + dim]);
            rows::read(tile, layout, Side::Value, index, &view.halves, &mut self.values[at..at + dim]);
            self.key_n[token] = rows::norms(tile, layout, Side::Key, index);
            [self.value_n[token], ..] = rows::norms(tile, layout, Side::Value, index);
        }
    }
}

/// All tiles of a sequence and head.
struct Decoded(Vec<Restored>);

impl Decoded {
    fn new(view: &View<'_>, sequence: usize, head: usize) -> Self {
        let tiles = view.slices.lengths[sequence].div_ceil(TOKENS as u32) as usize;
        let restore = |tile: usize| {
            let mut restored = Restored::new();
            restored.set(view, sequence, head, tile);
            restored
        };
        Decoded((0..tiles).into_par_iter().map(restore).collect())
    }
}

/// A thread's memory, used again and again.
struct Scratch {
    restored: Restored,
    values: Tile,
    /// Query rows as integers, [8, head_dim].
    queries: [[i16; MOST_DIM]; MAX_ROWS],
    /// f of N·f + c, and c.
    factors: [[[f32; 2]; PARTS]; MAX_ROWS],
    /// Σ w·(l' + 1/2), [head_dim / 16, rows].
    outputs: [[Floats; MAX_ROWS]; 8],
    /// A tile's weights, rounded.
    weights: [Row; MAX_ROWS],
}

impl Scratch {
    fn new() -> Box<Self> {
        Box::new(Scratch {
            restored: Restored::new(),
            values: Tile::ZERO,
            queries: [[0; MOST_DIM]; MAX_ROWS],
            factors: [[[0.0; 2]; PARTS]; MAX_ROWS],
            outputs: [[[0.0; 16]; MAX_ROWS]; 8],
            weights: [Row::ZERO; MAX_ROWS],
        })
    }
}

/// p and the weights of a row's scores.
#[inline(always)]
fn weigh<L: Lanes>(scores: &Floats, of_values: &Floats, reference: f32) -> [Floats; 2] {
    let p = L::exp2(scores, reference);
    let mut weights = [0f32; TOKENS];
    for (weight, (p, n)) in weights.iter_mut().zip(p.iter().zip(of_values)) {
        *weight = p * n;
    }
    [p, weights]
}

/// Raises a row's reference as its four lanes agree on, and gives the factor for what it has.
#[inline(always)]
fn raise(running: &mut Running, scores: &Floats, of_values: &Floats) -> f32 {
    let mut new = f32::NEG_INFINITY;
    for q in 0..4 {
        let largest = largest(of_lane(scores, q), of_lane(of_values, q));
        new = max(new, Lift::to(largest, running.reference));
    }
    let factor = exp2_nonpositive(running.reference - new);
    running.reference = new;
    running.sums.iter_mut().for_each(|sum| *sum *= factor);
    factor
}

/// What a piece of a part's warps come to.
struct Compute<'a, 'v> {
    view: &'a View<'v>,
    part: Part,
    decoded: Option<&'a Decoded>,
    pieces: Pieces,
    piece: usize,
    scratch: &'a mut Scratch,
    results: &'a mut [WarpResult],
}

impl Work for Compute<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Compute { view, part, decoded, pieces, piece, scratch, results } = self;
        let (shape, dim) = (view.shape, view.layout.head_dim as usize);
        let (rows, chunks) = (part.rows(shape), dim / 16);
        let parted = view.layout.parted;
        let parts = if parted { PARTS } else { 1 };
        let of_part = dim / parts;
        let length = view.slices.lengths[part.sequence];
        let by_all = (length + 1).saturating_sub(shape.query_tokens) as usize;
        let mut visible = [0u32; MAX_ROWS];
        for (r, visible) in visible.iter_mut().enumerate().take(rows) {
            let at = query_row(shape, part, r) * dim;
            let query = &view.slices.queries[at..at + dim];
            let h = if parted {
                turned_parts(query, &view.slices.order[part.head * dim..][..dim])
            } else {
                turned(query)
            };
            let to = scratch.queries[r].chunks_exact_mut(of_part).zip(&mut scratch.factors[r]);
            for ((h, (to, factor)), score) in h.chunks_exact(of_part).zip(to).zip(view.scores) {
                let largest = h.iter().fold(0f32, |most, h| maximum(most, abs(*h)));
                let inverse = inverse_of(largest);
                let mut sum = 0;
                for (to, h) in to.iter_mut().zip(h) {
                    let integer = integer(*h, inverse);
                    sum += integer;
                    *to = integer as i16;
                }
                let f = largest * score;
                *factor = [f, half(sum) * f];
            }
            let query_token = ((part.row_group * MAX_ROWS + r) / shape.group as usize) as u32;
            *visible = (length + query_token + 1).saturating_sub(shape.query_tokens);
        }
        for (warp, result) in pieces.warps_of(piece).zip(results) {
            let mut running = [Running::EMPTY; MAX_ROWS];
            for chunk in &mut scratch.outputs[..chunks] {
                chunk[..rows].fill([0.0; 16]);
            }
            // Tiles of the window come last.
            let own = (part.tiles[0] + warp..part.tiles[1]).step_by(pieces.warps);
            let is_coded = |tile: &usize| view.is_coded(part.sequence, *tile);
            for tile in own.clone().filter(is_coded).chain(own.filter(|tile| !is_coded(tile))) {
                let codes = match decoded {
                    Some(decoded) => &decoded.0[tile],
                    None => {
                        scratch.restored.set(view, part.sequence, part.head, tile);
                        &scratch.restored
                    }
                };
                let mut scores = [[0f32; TOKENS]; MAX_ROWS];
                let mut of_values = [codes.value_n; MAX_ROWS];
                let (mut p, mut weights) = ([[0f32; TOKENS]; MAX_ROWS], [[0f32; TOKENS]; MAX_ROWS]);
                let mut vote = false;
                for r in 0..rows {
                    for token in 0..TOKENS {
                        let keys = &codes.keys[token * dim..][..dim];
                        let (query, factors) = (&scratch.queries[r][..dim], &scratch.factors[r]);
                        scores[r][token] = if codes.near {
                            let low = &codes.low[token * dim..][..dim];
                            in_window(query, [keys, low], &factors[..parts], &codes.key_n[token])
                        } else if parted {
                            in_parts(query, keys, factors, &codes.key_n[token])
                        } else {
                            scaled(product(query, keys), factors[0][0], factors[0][1]) * codes.key_n[token][0]
                        };
                        if (tile + 1) * TOKENS > by_all && (tile * TOKENS + token) as u32 >= visible[r] {
                            scores[r][token] = f32::NEG_INFINITY;
                            of_values[r][token] = 0.0;
                        }
                    }
                    let reference = running[r].reference;
                    [p[r], weights[r]] = weigh::<L>(&scores[r], &of_values[r], reference);
                    for q in 0..4 {
                        vote |= wanted(of_lane(&scores[r], q), of_lane(&weights[r], q), reference);
                    }
                }
                if vote {
                    for r in 0..rows {
                        let factor = raise(&mut running[r], &scores[r], &of_values[r]);
                        if factor != 1.0 {
                            for chunk in &mut scratch.outputs[..chunks] {
                                chunk[r].iter_mut().for_each(|x| *x *= factor);
                            }
                        }
                        [p[r], weights[r]] = weigh::<L>(&scores[r], &of_values[r], running[r].reference);
                    }
                }
                for r in 0..rows {
                    for q in 0..4 {
                        let [a, b, c, d] = of_lane(&p[r], q);
                        running[r].sums[q] += (a + b) + (c + d);
                    }
                    scratch.weights[r].set::<f16, L>(L::round::<f16>(&weights[r]));
                }
                let values = &codes.values[..TOKENS * dim];
                L::values::<f16>(values, dim, &mut scratch.values);
                for chunk in 0..chunks {
                    let weights = |r: usize| &scratch.weights[r];
                    let outputs = &mut scratch.outputs[chunk][..rows];
                    multiply_each::<f16, L>(weights, scratch.values.of_values(values, dim, chunk), outputs);
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

/// Σ i·l, which 32 bits hold: 128 · 32512 · 128 < 2^30.
#[inline(always)]
fn product(query: &[i16], keys: &[i16]) -> i32 {
    query.iter().zip(keys).map(|(i, l)| i32::from(*i) * i32::from(*l)).sum()
}

/// A score of a key in parts.
#[inline(always)]
fn in_parts(query: &[i16], keys: &[i16], factors: &[[f32; 2]; PARTS], n: &[f32; PARTS]) -> f32 {
    let of_part = keys.len() / PARTS;
    let of_parts = query.chunks_exact(of_part).zip(keys.chunks_exact(of_part)).zip(factors.iter().zip(n));
    of_parts.enumerate().fold(0.0, |score, (p, ((query, keys), ([factor, offset], n)))| {
        added(score, p, scaled(product(query, keys), *factor, *offset), *n)
    })
}

/// A score of a key of the window.
#[inline(always)]
fn in_window(query: &[i16], [high, low]: [&[i16]; 2], factors: &[[f32; 2]], n: &[f32; PARTS]) -> f32 {
    let of_part = query.len() / factors.len();
    let of =
        |keys: &[i16], p: usize| product(&query[p * of_part..][..of_part], &keys[p * of_part..][..of_part]);
    factors.iter().zip(n).enumerate().fold(0.0, |score, (p, ([factor, _], n))| {
        added(score, p, window::product(of(high, p), of(low, p)) * factor, *n)
    })
}
