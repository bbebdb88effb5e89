//! One thread block's work: the query rows of a group over a part of a sequence.

use super::lanes::{Floats, Lanes, Row, Tile, bits, multiply, step_of};
use crate::attention::{BLOCK_TOKENS, Half};
use kernels_gpu::attention::{PartialRow, ROWS, warps};
use kernels_gpu::dense::DenseShape;
use simt::math::{exp2_nonpositive, floor, fma, max};

const TOKENS: usize = BLOCK_TOKENS as usize;
const MAX_ROWS: usize = ROWS as usize;
/// See `Running` of the kernels: the largest score is at most this above the reference.
const LARGEST_EXPONENT: f32 = 15.0;
/// Below it an integer less 15 is exact.
const EXACT: f32 = (1 << 22) as f32;

/// What all parts read; elements as bits.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) queries: &'a [u16],
    pub(super) keys: &'a [u16],
    pub(super) values: &'a [u16],
    pub(super) table: &'a [u32],
    pub(super) lengths: &'a [u32],
    pub(super) shape: DenseShape,
    pub(super) head_dim: usize,
}

/// Which thread block.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) sequence: usize,
    /// KV head.
    pub(super) head: usize,
    pub(super) row_group: usize,
    /// Tiles of 16 tokens, from the first to before the last.
    pub(super) tiles: [usize; 2],
}

/// What a warp knows of a row besides its output.
#[derive(Clone, Copy)]
struct Running {
    reference: f32,
    /// Of the four lanes of a row.
    sums: [f32; 4],
}

/// A thread's memory, used again and again.
pub(super) struct Scratch {
    keys: Tile,
    values: Tile,
    /// Rows that a sequence does not have are zeros: [16, head_dim] of the last tile.
    key_rows: Vec<u16>,
    value_rows: Vec<u16>,
    /// [rows, contractions].
    queries: [[Row; 16]; MAX_ROWS],
    /// Σ p·v of rounded probabilities, and of what rounding cut off: [rows, 2, head_dim / 16].
    outputs: [[[Floats; 16]; 2]; MAX_ROWS],
    /// A tile's probabilities rounded, and what rounding cut off: [rows, 2].
    weights: [[Row; 2]; MAX_ROWS],
    /// Results of the warps, [warps, rows].
    rows: [[PartialRow; MAX_ROWS]; 8],
    /// [warps, rows, head_dim / 16].
    merged: [[[Floats; 16]; MAX_ROWS]; 8],
}

impl Scratch {
    pub(super) fn new() -> Box<Self> {
        Box::new(Scratch {
            keys: Tile::ZERO,
            values: Tile::ZERO,
            key_rows: Vec::new(),
            value_rows: Vec::new(),
            queries: [[Row::ZERO; 16]; MAX_ROWS],
            outputs: [[[[0.0; 16]; 16]; 2]; MAX_ROWS],
            weights: [[Row::ZERO; 2]; MAX_ROWS],
            rows: [[PartialRow::EMPTY; MAX_ROWS]; 8],
            merged: [[[[0.0; 16]; 16]; MAX_ROWS]; 8],
        })
    }
}

/// Index of a query row's head among all [sequences, query_tokens, q_heads].
pub(super) fn query_row(shape: DenseShape, sequence: usize, head: usize, row: usize) -> usize {
    let group = shape.group as usize;
    let (token, in_group) = (row / group, row % group);
    let heads = shape.kv_heads as usize * group;
    (sequence * shape.query_tokens as usize + token) * heads + head * group + in_group
}

/// The score register order of a lane: tokens 2q, 2q + 1, 2q + 8, 2q + 9.
#[inline(always)]
fn of_lane<T: Copy>(x: &[T; TOKENS], q: usize) -> [T; 4] {
    [x[2 * q], x[2 * q + 1], x[2 * q + 8], x[2 * q + 9]]
}

/// Computes a part: `out` [8, head_dim] of Σ p·v, then [8] pairs of reference and sum.
///
/// Must be inlined into a function with the instructions of `L` enabled.
#[inline(always)]
pub(super) fn compute<E: Half, L: Lanes>(view: View<'_>, part: Part, scratch: &mut Scratch, out: &mut [f32]) {
    let View { shape, head_dim, .. } = view;
    let first_row = part.row_group * MAX_ROWS;
    let rows = (shape.rows() as usize - first_row).min(MAX_ROWS);
    let length = view.lengths[part.sequence];
    let chunks = head_dim / 16;
    // Keys that a row sees.
    let mut visible = [0u32; MAX_ROWS];
    for (r, visible) in visible.iter_mut().enumerate().take(rows) {
        let row = first_row + r;
        let at = query_row(shape, part.sequence, part.head, row) * head_dim;
        let mut ordered = [[0u16; 16]; 16];
        for (d, x) in view.queries[at..at + head_dim].iter().enumerate() {
            let (chunk, step) = step_of(d);
            ordered[chunk][step] = *x;
        }
        for (query, x) in scratch.queries[r].iter_mut().zip(ordered).take(chunks) {
            *query = Row::new::<E, L>(x);
        }
        let query_token = (row / shape.group as usize) as u32;
        *visible = (length + query_token + 1).saturating_sub(shape.query_tokens);
    }
    let warps = warps(head_dim as u32) as usize;
    for warp in 0..warps {
        let mut running = [Running { reference: PartialRow::EMPTY.reference, sums: [0.0; 4] }; MAX_ROWS];
        for output in scratch.outputs[..rows].as_flattened_mut() {
            output[..chunks].fill([0.0; 16]);
        }
        // Rows of the eight that there are not vote as well, with scores of 0.
        let mut absent_vote = rows < MAX_ROWS;
        for tile in (part.tiles[0] + warp..part.tiles[1]).step_by(warps) {
            let present = length as usize - tile * TOKENS;
            let [mut keys, mut values] = tile_of(view, part, tile);
            let next = if tile + warps < part.tiles[1] { tile + warps } else { part.tiles[0] + warp + 1 };
            let ahead = (next < part.tiles[1]).then(|| tile_of(view, part, next));
            if present < TOKENS {
                keys = padded(keys, present * head_dim, &mut scratch.key_rows);
                values = padded(values, present * head_dim, &mut scratch.value_rows);
            }
            L::keys::<E>(keys, head_dim, &mut scratch.keys);
            let mut scores = [[0f32; TOKENS]; MAX_ROWS];
            for chunk in 0..chunks {
                // A few lines at a time: the rest of this tile's work hides them.
                if let Some([keys, _]) = ahead {
                    L::prefetch(&keys[chunk * 256..][..256]);
                }
                let element = |step: usize, token: usize| {
                    let d = 32 * (chunk / 2) + 8 * (step / 4) + 4 * (chunk % 2) + step % 4;
                    keys[token * head_dim + d]
                };
                for (r, scores) in scores.iter_mut().enumerate().take(rows) {
                    multiply::<E, L>(&scratch.queries[r][chunk], &scratch.keys, chunk, scores, element);
                }
            }
            let mut vote = absent_vote && (scratch.keys.finite || a_finite_row::<E>(keys, head_dim, present));
            absent_vote &= !vote;
            for r in 0..rows {
                let seen = visible[r].saturating_sub((tile * TOKENS) as u32);
                for (score, i) in scores[r].iter_mut().zip(0u32..) {
                    let scaled = *score * shape.scale_log2;
                    *score = if i < seen { scaled } else { f32::NEG_INFINITY };
                    vote |= *score - running[r].reference > LARGEST_EXPONENT;
                }
            }
            if vote {
                for r in 0..rows {
                    let factor = raise(&scores[r], &mut running[r]);
                    // Before a warp's first tile there are zeros.
                    if factor != 1.0 && tile != part.tiles[0] + warp {
                        for output in &mut scratch.outputs[r] {
                            output[..chunks].iter_mut().for_each(|chunk| scale(chunk, factor));
                        }
                    }
                }
            }
            for r in 0..rows {
                let p = L::exp2(&scores[r], running[r].reference);
                for q in 0..4 {
                    let [a, b, c, d] = of_lane(&p, q);
                    running[r].sums[q] += (a + b) + (c + d);
                }
                let rounded = Row::new::<E, L>(L::round::<E>(&p));
                let mut cut = [0f32; TOKENS];
                for (cut, (p, rounded)) in cut.iter_mut().zip(p.iter().zip(&rounded.floats)) {
                    *cut = p - rounded;
                }
                scratch.weights[r] = [rounded, Row::new::<E, L>(L::round::<E>(&cut))];
            }
            L::values::<E>(values, head_dim, &mut scratch.values);
            for chunk in 0..chunks {
                if let Some([_, values]) = ahead {
                    L::prefetch(&values[chunk * 256..][..256]);
                }
                let element = |token: usize, lane: usize| values[token * head_dim + 16 * chunk + lane];
                for r in 0..rows {
                    for (weights, output) in scratch.weights[r].iter().zip(&mut scratch.outputs[r]) {
                        multiply::<E, L>(weights, &scratch.values, chunk, &mut output[chunk], element);
                    }
                }
            }
        }
        for (r, running) in running.iter().enumerate().take(rows) {
            let [a, b, c, d] = running.sums;
            scratch.rows[warp][r] = PartialRow { reference: running.reference, sum: (a + b) + (c + d) };
            let [rounded, cut] = &scratch.outputs[r];
            for chunk in 0..chunks {
                for i in 0..16 {
                    scratch.merged[warp][r][chunk][i] = rounded[chunk][i] + cut[chunk][i];
                }
            }
        }
    }
    let (values, sums) = out.split_at_mut(MAX_ROWS * head_dim);
    for r in 0..rows {
        let of_warps = scratch.rows[..warps].iter().zip(&scratch.merged[..warps]);
        let of_warps = of_warps.map(|(rows, values)| (rows[r], values[r].as_flattened()));
        let row = merge(of_warps, &mut values[r * head_dim..][..head_dim]);
        sums[2 * r..2 * r + 2].copy_from_slice(&[row.reference, row.sum]);
    }
}

/// `rows` up to element `present`, then zeros.
#[inline(always)]
fn padded<'a>(rows: &[u16], present: usize, memory: &'a mut Vec<u16>) -> &'a [u16] {
    memory.clear();
    memory.extend_from_slice(&rows[..present]);
    memory.resize(rows.len(), 0);
    memory
}

/// Whether a row that there is not has a score that is not NaN: it sees the tokens, and one more.
#[cold]
fn a_finite_row<E: Half>(keys: &[u16], head_dim: usize, present: usize) -> bool {
    let format = bits::<E>();
    keys.chunks_exact(head_dim)
        .take(present.saturating_add(1))
        .any(|row| row.iter().all(|x| (x & 0x7fff) >> format.fraction < format.largest))
}

/// A tile's keys and values, [16, head_dim] each.
#[inline(always)]
fn tile_of(view: View<'_>, part: Part, tile: usize) -> [&[u16]; 2] {
    let elements = TOKENS * view.head_dim;
    let block = view.table[part.sequence * view.shape.max_blocks as usize + tile] as usize;
    let from = (block * view.shape.kv_heads as usize + part.head) * elements;
    [&view.keys[from..][..elements], &view.values[from..][..elements]]
}

/// Raises the reference of a row to one that suits its scores, and gives the factor for the row's output.
#[inline(always)]
fn raise(scores: &[f32; TOKENS], running: &mut Running) -> f32 {
    let mut tops = [f32::NEG_INFINITY; 8];
    for eight in scores.as_chunks::<8>().0 {
        for (top, score) in tops.iter_mut().zip(eight) {
            // A NaN is passed over.
            *top = if *score > *top { *score } else { *top };
        }
    }
    let top = tops.into_iter().fold(f32::NEG_INFINITY, |top, x| if x > top { x } else { top });
    let new = if top.abs() < EXACT {
        max(-floor(-top) - LARGEST_EXPONENT, running.reference)
    } else {
        raised_by_lanes(scores, running.reference)
    };
    let factor = exp2_nonpositive(running.reference - new);
    running.reference = new;
    for sum in &mut running.sums {
        *sum *= factor;
    }
    factor
}

/// The new reference as the four lanes of a row find it, where scores are not all numbers or so large that differences round.
#[cold]
#[inline(never)]
fn raised_by_lanes(scores: &[f32; TOKENS], reference: f32) -> f32 {
    let mut new = reference;
    for q in 0..4 {
        let [s0, s1, s2, s3] = of_lane(scores, q);
        let largest = max(f32::NEG_INFINITY, max(max(s0, s1), max(s2, s3)));
        let lowered = -floor(-largest) - LARGEST_EXPONENT;
        let wanted = if largest - lowered > LARGEST_EXPONENT { largest } else { lowered };
        new = max(new, max(wanted, reference));
    }
    new
}

#[inline(always)]
fn scale(lanes: &mut Floats, factor: f32) {
    for x in lanes {
        *x *= factor;
    }
}

/// `Merging` of the kernels: adds up the warps' results in their order.
#[inline(always)]
fn merge<'a>(warps: impl Iterator<Item = (PartialRow, &'a [f32])> + Clone, values: &mut [f32]) -> PartialRow {
    let mut merged = PartialRow::EMPTY;
    for (row, _) in warps.clone() {
        merged.reference = max(merged.reference, row.reference);
    }
    values.fill(0.0);
    for (row, own) in warps {
        let weight = exp2_nonpositive(row.reference - merged.reference);
        merged.sum = fma(row.sum, weight, merged.sum);
        for (value, x) in values.iter_mut().zip(own) {
            *value = fma(*x, weight, *value);
        }
    }
    merged
}

/// `combine_parts` of the kernels for row `r`: a warp adds up the sums, a part a lane; values in the order of the parts.
#[inline(always)]
pub(super) fn combine(
    parts: &[f32],
    floats: usize,
    r: usize,
    head_dim: usize,
    values: &mut [f32],
) -> PartialRow {
    const LANES: usize = 32;
    let sums_at = MAX_ROWS * head_dim + 2 * r;
    let mut reference = PartialRow::EMPTY.reference;
    for part in parts.chunks_exact(floats) {
        reference = max(reference, part[sums_at]);
    }
    let mut lanes = [0f32; LANES];
    values.fill(0.0);
    for (i, part) in parts.chunks_exact(floats).enumerate() {
        let weight = exp2_nonpositive(part[sums_at] - reference);
        lanes[i % LANES] = fma(part[sums_at + 1], weight, lanes[i % LANES]);
        for (value, x) in values.iter_mut().zip(&part[r * head_dim..]) {
            *value = fma(*x, weight, *value);
        }
    }
    for distance in [16, 8, 4, 2, 1] {
        let before = lanes;
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum = before[lane] + before[lane ^ distance];
        }
    }
    PartialRow { reference, sum: lanes[0] }
}
