//! Embedding rows and rotation on slices.

use super::product::scale;
use crate::attention::rope::{Pairing, check_rope};
use crate::model::linear::{PackedWeights, Result, WeightKind};
use half::{bf16, f16};
use kernels_gpu::Element;
use kernels_gpu::attention::rotation::{RopeShape, pair_channels, turn};
use rayon::prelude::*;
use simt::math::{NAN_BITS, canonical_nan};

/// Rows `tokens` of `weights` to `out` [tokens, columns]; a row that is not there is NaN.
///
/// # Panics
/// If `out` does not fit.
pub fn embedding(weights: &PackedWeights, tokens: &[u32], out: &mut [f32]) {
    assert_eq!(out.len(), tokens.len() * weights.columns(), "rows of {} tokens", tokens.len());
    for (token, out) in tokens.iter().zip(out.chunks_exact_mut(weights.columns())) {
        let token = *token as usize;
        if token < weights.rows() {
            for (k, y) in out.iter_mut().enumerate() {
                *y = canonical_nan(weight(weights, token, k));
            }
        } else {
            out.fill(f32::from_bits(NAN_BITS));
        }
    }
}

/// One weight.
fn weight(weights: &PackedWeights, row: usize, column: usize) -> f32 {
    let (r, k) = (row % 8, column % 32);
    let tile = row / 8 * weights.blocks() + column / 32;
    let kind = weights.kind();
    let words = &weights.codes()[tile * kind.tile_words()..][..kind.tile_words()];
    let byte = |word: u32| (word >> (8 * (k % 4))) as u8;
    match kind {
        WeightKind::Q8_0 => {
            let code = byte(words[32 * (k / 4 % 2) + 8 * (k / 8) + r]) as i8;
            scale(kind, weights.scales(), tile, r)[0] * f32::from(code)
        }
        WeightKind::Q4_1 | WeightKind::Q4_0 => {
            let code = byte(words[8 * (k / 8) + r]) >> (k / 4 % 2 * 4) & 15;
            let [d, m] = scale(kind, weights.scales(), tile, r);
            d.mul_add(f32::from(code), m)
        }
        WeightKind::F32 => f32::from_bits(words[8 * k + r]),
        WeightKind::F16 | WeightKind::Bf16 => {
            let bits = (words[(8 * k + r) / 2] >> (16 * (r % 2))) as u16;
            if kind == WeightKind::F16 {
                f16::from_bits(bits).to_f32()
            } else {
                bf16::from_bits(bits).to_f32()
            }
        }
    }
}

/// Rotates queries and keys of `qkv` [tokens, (q_heads + 2·kv_heads)·head_dim] and hands all three on:
/// `queries` [tokens, q_heads, head_dim], `keys` and `values` [tokens, kv_heads, head_dim].
///
/// # Errors
/// [`Error::Argument`](crate::model::linear::Error::Argument) for odd or missing extents.
///
/// # Panics
/// If a slice does not fit.
#[allow(clippy::too_many_arguments)]
pub fn rotate<E: Element>(
    pairing: Pairing,
    qkv: &[f32],
    positions: &[u32],
    frequencies: &[f32],
    queries: &mut [E],
    keys: &mut [E],
    values: &mut [E],
    shape: RopeShape,
) -> Result<()> {
    check_rope(shape)?;
    let (dim, rotary) = (shape.head_dim as usize, shape.rotary as usize);
    let (q_row, kv_row) = (shape.q_heads as usize * dim, shape.kv_heads as usize * dim);
    let tokens = positions.len();
    assert_eq!(qkv.len(), tokens * (q_row + 2 * kv_row), "queries, keys and values of {tokens} tokens");
    assert_eq!(frequencies.len(), rotary / 2, "a frequency a pair");
    assert_eq!([queries.len(), keys.len(), values.len()], [q_row, kv_row, kv_row].map(|row| tokens * row));
    let rows = qkv.par_chunks_exact(q_row + 2 * kv_row).zip(positions);
    let targets = queries.par_chunks_exact_mut(q_row).zip(keys.par_chunks_exact_mut(kv_row));
    rows.zip(targets.zip(values.par_chunks_exact_mut(kv_row))).for_each(
        |((row, position), ((queries, keys), values))| {
            let angles: Vec<f32> = frequencies.iter().map(|frequency| *position as f32 * frequency).collect();
            let (q, kv) = row.split_at(q_row);
            let (k, v) = kv.split_at(kv_row);
            for (from, to) in q.chunks_exact(dim).zip(queries.chunks_exact_mut(dim)) {
                turn_head(pairing, from, &angles, to);
            }
            for (from, to) in k.chunks_exact(dim).zip(keys.chunks_exact_mut(dim)) {
                turn_head(pairing, from, &angles, to);
            }
            for (from, to) in v.iter().zip(values) {
                *to = E::from_f32(canonical_nan(*from));
            }
        },
    );
    Ok(())
}

fn turn_head<E: Element>(pairing: Pairing, from: &[f32], angles: &[f32], to: &mut [E]) {
    let rotary = 2 * angles.len() as u32;
    for i in 0..from.len() / 2 {
        let [first, second] = pair_channels(i as u32, rotary, pairing == Pairing::Interleaved);
        let (first, second) = (first as usize, second as usize);
        let pair = match angles.get(i) {
            Some(angle) => turn(from[first], from[second], *angle),
            None => [from[first], from[second]],
        };
        to[first] = E::from_f32(canonical_nan(pair[0]));
        to[second] = E::from_f32(canonical_nan(pair[1]));
    }
}
