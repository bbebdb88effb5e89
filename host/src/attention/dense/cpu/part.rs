//! One thread block's work: the query rows of a group over a part of a sequence.

use crate::attention::Half;
use crate::attention::cpu::lanes::{Eights, Floats, Lanes, Order, Row, Tile, multiply_each};
use crate::attention::cpu::pieces::Pieces;
use crate::attention::cpu::softmax::{
    LARGEST_EXPONENT, MAX_ROWS, Running, TOKENS, WarpResult, of_lane, rescale, split,
};
use crate::attention::cpu::{a_finite_row, padded};
use kernels_gpu::attention::dense::DenseShape;

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

impl Part {
    /// Query rows of its group.
    pub(super) fn rows(self, shape: DenseShape) -> usize {
        (shape.rows() as usize - self.row_group * MAX_ROWS).min(MAX_ROWS)
    }
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
    /// Σ p·v of rounded probabilities, and of what rounding cut off: [head_dim / 16, rows, 2].
    outputs: [[[Floats; 2]; MAX_ROWS]; 16],
    /// A tile's probabilities rounded, and what rounding cut off: [rows, 2].
    weights: [[Row; 2]; MAX_ROWS],
}

impl Scratch {
    pub(super) fn new() -> Box<Self> {
        Box::new(Scratch {
            keys: Tile::ZERO,
            values: Tile::ZERO,
            key_rows: Vec::new(),
            value_rows: Vec::new(),
            queries: [[Row::ZERO; 16]; MAX_ROWS],
            outputs: [[[[0.0; 16]; 2]; MAX_ROWS]; 16],
            weights: [[Row::ZERO; 2]; MAX_ROWS],
        })
    }
}

/// Computes what a piece of a part's warps come to.
///
/// Must be inlined into a function with the instructions of `L` enabled.
#[inline(always)]
pub(super) fn compute<E: Half, L: Lanes>(
    view: View<'_>,
    part: Part,
    pieces: Pieces,
    piece: usize,
    scratch: &mut Scratch,
    results: &mut [WarpResult],
) {
    let View { shape, head_dim, .. } = view;
    let first_row = part.row_group * MAX_ROWS;
    let rows = part.rows(shape);
    let length = view.lengths[part.sequence];
    let chunks = head_dim / 16;
    // Keys that a row sees.
    let mut visible = [0u32; MAX_ROWS];
    for (r, visible) in visible.iter_mut().enumerate().take(rows) {
        let row = first_row + r;
        let at = shape.query_row(part.sequence as u32, part.head as u32, row as u32) as usize * head_dim;
        let mut ordered = [[0u16; 16]; 16];
        for (d, x) in view.queries[at..at + head_dim].iter().enumerate() {
            let (chunk, step) = Eights::step_of(d);
            ordered[chunk][step] = *x;
        }
        for (query, x) in scratch.queries[r].iter_mut().zip(ordered).take(chunks) {
            *query = Row::new::<E, L>(x);
        }
        *visible = shape.visible(length, row as u32);
    }
    let warps = pieces.warps;
    for (warp, result) in pieces.warps_of(piece).zip(results) {
        let mut running = [Running::EMPTY; MAX_ROWS];
        for chunk in &mut scratch.outputs[..chunks] {
            chunk[..rows].fill([[0.0; 16]; 2]);
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
            L::keys::<E, Eights>(keys, head_dim, &mut scratch.keys);
            let mut scores = [[0f32; TOKENS]; MAX_ROWS];
            for chunk in 0..chunks {
                // A few lines at a time: the rest of this tile's work hides them.
                if let Some([keys, _]) = ahead {
                    L::prefetch(&keys[chunk * 256..][..256]);
                }
                let queries = |r: usize| &scratch.queries[r][chunk];
                multiply_each::<E, L>(queries, scratch.keys.of_keys(chunk), &mut scores[..rows]);
            }
            let mut vote = absent_vote
                && (scratch.keys.finite || a_finite_row::<E>(seen(keys, head_dim, present), head_dim));
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
                    let factor = running[r].raise(&[&scores[r]]);
                    // Before a warp's first tile there are zeros.
                    if factor != 1.0 && tile != part.tiles[0] + warp {
                        rescale(&mut scratch.outputs[..chunks], r, factor);
                    }
                }
            }
            for r in 0..rows {
                let p = L::exp2(&scores[r], running[r].reference);
                for q in 0..4 {
                    let [a, b, c, d] = of_lane(&p, q);
                    running[r].sums[q] += (a + b) + (c + d);
                }
                split::<E, L>(&p, &mut scratch.weights[r]);
            }
            L::values::<E>(values, head_dim, &mut scratch.values);
            for chunk in 0..chunks {
                if let Some([_, values]) = ahead {
                    L::prefetch(&values[chunk * 256..][..256]);
                }
                let weights = |i: usize| &scratch.weights.as_flattened()[i];
                let outputs = scratch.outputs[chunk][..rows].as_flattened_mut();
                multiply_each::<E, L>(weights, scratch.values.of_values(values, head_dim, chunk), outputs);
            }
        }
        for (r, running) in running.iter().enumerate().take(rows) {
            result.keep(r, running, &scratch.outputs[..chunks]);
        }
    }
}

/// The rows that a query row which there is not sees: the tokens, and one more.
#[inline(always)]
fn seen(keys: &[u16], head_dim: usize, present: usize) -> &[u16] {
    &keys[..present.saturating_add(1).min(TOKENS) * head_dim]
}

/// A tile's keys and values, [16, head_dim] each.
#[inline(always)]
fn tile_of(view: View<'_>, part: Part, tile: usize) -> [&[u16]; 2] {
    let elements = TOKENS * view.head_dim;
    let block = view.table[part.sequence * view.shape.max_blocks as usize + tile] as usize;
    let from = (block * view.shape.kv_heads as usize + part.head) * elements;
    [&view.keys[from..][..elements], &view.values[from..][..elements]]
}
