//! Originals as the tensor cores' operands.

use super::pass::{RowGroup, View};
use super::query::Queries;
use crate::attention::Half;
use crate::attention::cpu::lanes::{Floats, Lanes, Order, Sixteens, Tile, multiply_each};
use crate::attention::cpu::softmax::TOKENS;
use kernels_gpu::certified::layout::pair;
use kernels_gpu::certified::quantizer::{bound_or_infinity, norm_bound};
use simt::math::{fma, max};

/// A block's keys and its values, [16, D] each.
#[inline(always)]
pub(super) fn originals<'a, const D: usize>(view: &View<'a>, group: RowGroup, block: u32) -> [&'a [u16]; 2] {
    let elements = TOKENS * D;
    let from = pair(block, view.shape.kv_heads, group.head as u32) * elements;
    [&view.keys[from..][..elements], &view.values[from..][..elements]]
}

/// `original_scores` of rows, the `i`th of which is `row(i)`, before any scaling.
#[inline(always)]
pub(super) fn exact_scores<E: Half, L: Lanes, const D: usize>(
    queries: &Queries,
    row: impl Fn(usize) -> usize,
    tile: &Tile,
    scores: &mut [Floats],
) {
    for contraction in 0..D / 16 {
        let operands = |i: usize| &queries.operands[row(i)][contraction];
        multiply_each::<E, L>(operands, tile.of_keys(contraction), scores);
    }
}

/// The largest bound of the norms of 16 rows, by a tile of them as keys.
#[inline(always)]
pub(super) fn largest_norm<E: Half, L: Lanes, const D: usize>(tile: &Tile) -> f32 {
    let mut squares = [0f32; TOKENS];
    for d in 0..D {
        let (chunk, step) = Sixteens::step_of(d);
        let mut of_tokens = [0f32; TOKENS];
        L::widen::<E>(&tile.keys[chunk][step], &mut of_tokens);
        for (square, x) in squares.iter_mut().zip(&of_tokens) {
            *square = fma(*x, *x, *square);
        }
    }
    let mut largest = 0f32;
    for squares in squares {
        // Not a number would get lost in the maximum.
        largest = max(largest, bound_or_infinity(norm_bound(squares)));
    }
    largest
}
