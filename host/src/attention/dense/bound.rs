//! How far dense attention may be from the formula.
//!
//! u = 2^−24, h the relative rounding error of the cache's type (2^−11 for f16, 2^−8 for bf16), n its
//! smallest normal number. Each quantity is bounded for one query row; "tiles" are those of one warp.
//!
//! **A tensor-core step** adds 16 products and an accumulator. Each of the 17 terms is cut off below 2^−25 of
//! the largest alignment exponent, which is at most that of the largest |term| with operands below n counted
//! as n; the sum is rounded toward zero to f32. So with M the sum of those magnitudes a step adds at most
//! (17·2^−25 + 2^−23)·M = κ·M.
//!
//! **Score** in log2 units, c = log2(e)·scale: D/16 steps, then two roundings of the product with c, one of
//! the difference to the reference, which is between 16 below the largest score and 1 above it. With Q_t = Σ
//! max(|q|, n)·max(|k|, n): d_t = c·κ·(D/16)·Q_t + 2u·|s_t| + u·(17 + s_max − s_t), and 2^x itself is within
//! 2^−23: the probability is p_t·(1 + ε_t),
//! |ε_t| <= e_t = exp(ln2·d_t + 2^−23) − 1.
//!
//! **Weights.** Such ε_t move Σ a_t v_t by at most (Σ a_t e_t |v_t| + |o|·Σ a_t e_t) / (1 − Σ a_t e_t).
//!
//! **Rounding to 16 bits**, twice (rounded, and what that cut off): h²·p, and below n no less than its
//! subnormal step σ. Probabilities are relative to a reference that makes the largest of them at least 2^14,
//! or 1 where scores are beyond 2^24. With P the reciprocal of that: h²·A + σ·P·Σ|v_t|, A = Σ a_t |v_t|.
//!
//! **Sums of values**: a step a tile, hence κ·tiles·(1 + h)·(A + 2·warps·n·P·max|v|). Merging adds four warps
//! and the splits and divides: u·(splits + 8)·A.
//!
//! **Sum of probabilities**: additions of positive numbers, u·(tiles + splits + 10) relative: that share of
//! |o|, and of the logarithm.
//!
//! **Log-sum-exp**: −ln(1 − Σ a_t e_t), the sum's error, 2^−23 of a log2 of at most 40, and four roundings of
//! the result.
//!
//! The factor 1.01 covers products of these. Where Σ a_t e_t reaches 1/2 (scores in the millions: a rounding
//! of the score is a power of two of the weight) an output is still a mean of values with weights of its own:
//! 2·max|v| then.

use crate::attention::oracle::Sequence;
use crate::attention::{BLOCK_TOKENS, Half};
use kernels_gpu::attention::warps;

const U: f64 = f64::EPSILON * (1u64 << 28) as f64;
/// (17·2^−25 + 2^−23).
const KAPPA: f64 = 17.0 * U / 2.0 + 2.0 * U;
/// Below every normal f32: what underflows on the way.
const TINY: f64 = 1.0e-36;

/// Bounds like [`Attended`](crate::attention::oracle::Attended).
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// Of |output − formula|, `[query_token][q_head][head_dim]`.
    pub output: Vec<f64>,
    /// Of |lse − formula|, `[query_token][q_head]`.
    pub lse: Vec<f64>,
}

/// The bounds of one sequence in a plan of `splits` splits. Rows as in [`Sequence::attend`].
pub fn of<E: Half>(
    sequence: &Sequence,
    splits: u32,
    query: &[f64],
    key: impl Fn(usize, usize, &mut [f64]),
    value: impl Fn(usize, usize, &mut [f64]),
) -> Bound {
    let mut bound = Bound { output: Vec::new(), lse: Vec::new() };
    for query_token in 0..sequence.query_tokens {
        for q_head in 0..sequence.q_heads {
            let row = row::<E>(sequence, splits, query, &key, &value, query_token, q_head);
            bound.output.extend(row.0);
            bound.lse.push(row.1);
        }
    }
    bound
}

/// The bounds of one query row: of each dimension, and of the log-sum.
#[allow(clippy::too_many_arguments)]
pub fn row<E: Half>(
    sequence: &Sequence,
    splits: u32,
    query: &[f64],
    key: impl Fn(usize, usize, &mut [f64]),
    value: impl Fn(usize, usize, &mut [f64]),
    query_token: usize,
    q_head: usize,
) -> (Vec<f64>, f64) {
    let dim = sequence.head_dim;
    let logits = sequence.logits(query, &key, query_token, q_head);
    if logits.is_empty() {
        return (vec![0.0; dim], 0.0);
    }
    let (weights, lse) = crate::attention::oracle::softmax(&logits);
    let normal = E::SUBNORMAL_ERROR / E::HALF_ULP;
    let first = (query_token * sequence.q_heads + q_head) * dim;
    let query = &query[first..first + dim];
    let c = sequence.scale * std::f64::consts::LOG2_E;
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let extreme = logits.iter().fold(0.0, |most: f64, s| most.max(s.abs())) * std::f64::consts::LOG2_E;
    let reference = if extreme < (1u64 << 23) as f64 { 1.0 / (1 << 14) as f64 } else { 1.0 };

    let tiles = (sequence.length as u64).div_ceil(BLOCK_TOKENS.into());
    let of_split = tiles.div_ceil(splits.into());
    let steps = of_split.div_ceil(warps(sequence.head_dim as u32).into()) as f64;
    let used = tiles.div_ceil(of_split.max(1)) as f64;

    let mut data = vec![0.0; dim];
    let mut moved = 0.0;
    // Σ a e |v|, Σ a |v|, Σ |v|, max |v|, Σ a v.
    let mut sums = vec![[0.0f64; 5]; dim];
    for (token, weight) in weights.iter().enumerate() {
        let kv_head = sequence.kv_head(q_head);
        key(kv_head, token, &mut data);
        let magnitude: f64 =
            query.iter().zip(&data).map(|(q, k)| counted(*q, normal) * counted(*k, normal)).sum();
        let score = logits[token] * std::f64::consts::LOG2_E;
        let below = (largest - logits[token]) * std::f64::consts::LOG2_E;
        let error = c * KAPPA * (dim / 16) as f64 * magnitude + 2.0 * U * score.abs() + U * (17.0 + below);
        let e = (std::f64::consts::LN_2 * error + 2.0 * U).exp_m1();
        // A weight of 0 in f64 has no share, whatever its error.
        let share = if *weight == 0.0 { 0.0 } else { weight * e };
        moved += share;
        value(kv_head, token, &mut data);
        for (sum, v) in sums.iter_mut().zip(&data) {
            let v_counted = counted(*v, normal);
            sum[0] += share * v.abs();
            sum[1] += weight * v.abs();
            sum[2] += v.abs();
            sum[3] = sum[3].max(v_counted);
            sum[4] += weight * v;
        }
    }
    let total = U * (steps + used + 10.0);
    let hopeless = moved.is_nan() || moved >= 0.5;
    let warps = f64::from(warps(sequence.head_dim as u32)) * used;
    let output = sums.iter().map(|&[moved_values, weighted, plain, most, exact]| {
        if hopeless {
            return 2.0 * most;
        }
        let shifted = (moved_values + exact.abs() * moved) / (1.0 - moved);
        let rounded = E::HALF_ULP * E::HALF_ULP * weighted + E::SUBNORMAL_ERROR * reference * plain;
        let stepped =
            KAPPA * steps * (1.0 + E::HALF_ULP) * (weighted + 2.0 * warps * normal * reference * most);
        let merged = U * (used + 8.0) * weighted;
        1.01 * (shifted + rounded + stepped + merged + total * exact.abs()) + TINY
    });
    let output = output.collect();
    let shifted = if hopeless { f64::INFINITY } else { -(-moved).ln_1p() };
    (output, 1.01 * (shifted + total + 80.0 * U + 4.0 * U * lse.abs()))
}

/// An operand's magnitude as far as alignment goes: a subnormal one counts as the smallest normal number.
fn counted(x: f64, normal: f64) -> f64 {
    if x == 0.0 { 0.0 } else { x.abs().max(normal) }
}
