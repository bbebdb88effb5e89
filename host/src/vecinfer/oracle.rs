//! Transformation, codes and attention in f64, written to be obvious: what every implementation is judged by.

use super::{Code, LayerBooks};
use crate::attention::oracle::Sequence;
use kernels_gpu::vecinfer::Kind;

/// u of f32.
const U: f64 = f64::EPSILON * (1u64 << 28) as f64;
/// What a step of the tensor cores cuts off: 17·2^−25 + 2^−23.
const KAPPA: f64 = 17.0 * U / 2.0 + 2.0 * U;
/// Half an ulp of f16.
const F16: f64 = 1.0 / 2048.0;

/// H·x, H orthonormal, in Sylvester's order (equation 5): of as many channels as the largest power of two
/// that divides the row's, block by block.
pub fn hadamard(x: &[f64]) -> Vec<f64> {
    let block = 1usize << x.len().trailing_zeros();
    let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let norm = 1.0 / (block as f64).sqrt();
    let row = |x: &[f64], i: usize| norm * x.iter().enumerate().map(|(j, x)| sign(i, j) * x).sum::<f64>();
    x.chunks_exact(block).flat_map(|x| (0..block).map(move |i| row(x, i))).collect()
}

/// A row of KV head `head` in the space of the stored keys, not rounded: equation 3 for queries, 4 to 7 for
/// keys.
pub fn transformed(row: &[f64], books: &LayerBooks, head: usize, key: bool, with_hadamard: bool) -> Vec<f64> {
    let dim = row.len();
    let table = |kind: usize| {
        let own = &books.transform[(head * 5 + kind) * dim..][..dim];
        own.iter().map(|x| f64::from(*x)).collect::<Vec<_>>()
    };
    let (before, after) = if key { (table(1), table(2)) } else { (table(3), table(4)) };
    let mean = if key { table(0) } else { vec![0.0; dim] };
    let x: Vec<f64> = (0..dim).map(|i| (row[i] - mean[i]) * before[i]).collect();
    let x = if with_hadamard { hadamard(&x) } else { x };
    x.iter().zip(after).map(|(x, after)| x * after).collect()
}

/// How far a transformed row that is rounded to f16 may be from it, Euclidean, by its norm and its number of
/// channels: `transform` of the kernels derives it. All but the rounding to f16 is 1 % of that at most.
pub fn transform_error(norm: f64, dim: usize) -> f64 {
    let stages = (dim as f64).log2() + 5.0;
    norm * (stages * U * 1.01 + F16) + (dim as f64).sqrt() * F16 / (1 << 14) as f64
}

/// The numbers of the centroids that may be called nearest to `x`, the nearest first: those whose ½‖c‖² − x·c
/// is within what f32 may err. ½‖c‖² is a product and d − 1 multiply-adds, the score d more that begin with
/// it: 2·d roundings of what is at most ½‖c‖², d of what is at most the sum of all |x_i·c_i|.
pub fn nearest(x: &[f64], book: &[f64]) -> Vec<u32> {
    let d = x.len();
    let score = |c: &[f64]| {
        let half: f64 = c.iter().map(|c| c * c / 2.0).sum();
        let terms: f64 = 2.0 * half + x.iter().zip(c).map(|(x, c)| (x * c).abs()).sum::<f64>();
        let exact = half - x.iter().zip(c).map(|(x, c)| x * c).sum::<f64>();
        (exact, d as f64 * U * 1.01 * terms)
    };
    let scores: Vec<(f64, f64)> = book.chunks_exact(d).map(score).collect();
    let least = scores.iter().map(|(exact, error)| exact + error).fold(f64::INFINITY, f64::min);
    let mut near: Vec<u32> =
        (0..scores.len()).filter(|i| scores[*i].0 - scores[*i].1 <= least).map(|i| i as u32).collect();
    near.sort_by(|a, b| scores[*a as usize].0.total_cmp(&scores[*b as usize].0));
    near
}

/// Token `token` of a tile as its codes have it.
pub fn decoded(code: Code, kind: Kind, head_dim: u32, tile: &[u8], token: u32, book: &[f64]) -> Vec<f64> {
    let d = code.d as usize;
    let centroid = |part: u32| {
        let number = code.read(head_dim, tile, code.place(kind, token, part)) as usize;
        book[number * d..][..d].to_vec()
    };
    (0..code.parts(head_dim)).flat_map(centroid).collect()
}

/// Attention of a query, as the kernels transform and round it, over stored keys and values, and how far an
/// element of the kernels' output may be from it.
///
/// A score's error e, natural units: D/16 steps of the tensor cores of terms that add up to Σ|q~·k~|, and
/// three roundings. Of `whole` keys a query's elements are integers in their place, each off by half of
/// max|q~|/32512 and the rounding of its quotient, so that a score is by Σ|k~| times that; their sum is
/// exact, and the product with its scale passes four roundings. The larger of both is taken, as recent
/// tokens are as others. Weights are off by a factor of exp(±2e) then, which moves the output by no more
/// than 2.1·e·max|v| while e < 0.05; rounding weights to f16, by 2^−11·max|v|; and each of the steps of a
/// warp, of which there are `steps` at most, and of the merging, by κ·max|v|.
///
/// # Panics
/// If e is larger.
pub fn attend(
    query: &[f64],
    keys: &[Vec<f64>],
    values: &[Vec<f64>],
    steps: usize,
    whole: bool,
) -> (Vec<f64>, f64) {
    let dim = query.len();
    let sequence = Sequence::decode(keys.len(), 1, 1, dim);
    let attended = sequence.attend(
        query,
        |_, token, row: &mut [f64]| row.copy_from_slice(&keys[token]),
        |_, token, row: &mut [f64]| row.copy_from_slice(&values[token]),
    );
    let terms = |key: &Vec<f64>| key.iter().zip(query).map(|(k, q)| (k * q).abs()).sum::<f64>();
    let most = keys.iter().map(terms).fold(0.0, f64::max);
    let float = (KAPPA * (dim / 16) as f64 + 3.0 * U) * most;
    let integers = if whole {
        let sizes = |key: &Vec<f64>| key.iter().map(|k| k.abs()).sum::<f64>();
        let (size, element) = (
            keys.iter().map(sizes).fold(0.0, f64::max),
            query.iter().fold(0f64, |most, q| most.max(q.abs())),
        );
        (0.5 / 32512.0 + 2.0 * U) * element * size + 5.0 * U * most
    } else {
        0.0
    };
    let score = sequence.scale * float.max(integers);
    assert!(score < 0.05, "scores are off by {score}, and the bound is for less");
    let largest = values.iter().flatten().fold(0f64, |most, x| most.max(x.abs()));
    let bound = largest * (2.1 * score + F16 * 1.01 + KAPPA * (steps + 20) as f64) + 1e-30;
    (attended.output, bound)
}
