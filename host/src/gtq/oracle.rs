//! How far attention may be from the formula over the keys and values that codes, and the window's numbers,
//! stand for.
//!
//! u = 2^−24, κ = 17·2^−25 + 2^−23: what a step of the tensor cores adds, relative to its terms'
//! ([`dense::bound`](crate::attention::dense::bound)). Quantities are of one query row; errors of outputs are
//! Euclidean, which the rotation does not change.
//!
//! **Query.** The butterfly's log2 D additions and those of the largest err by at most 8u·Σ|q| an element; an
//! integer is within 1/2 + 2^−8 of h·32512/m (the quotient's two roundings, of up to 32512). The sum of
//! products is exact. With c = log2(e)/D and Σ|L| over the key's levels: c·n·Σ|L|·(m·(1/2 + 2^−8)/32512 +
//! 8u·Σ|q|). Of keys in parts that is a sum over parts, each with an m, n, Σ|L| and Σ|q| of its own and c =
//! log2(e)/(√D·√(D/4)).
//!
//! **Score.** N·f + f·Σ i/2 is of the conversion of N, a constant, f's product and the offset's, and a sum,
//! which round: 4u·|s/n| and 2u·|f·Σ i/2|, as N·f is at most their sum. Of the offset |Σ i| <= D·32512 and
//! D·step/2 <= Σ|L|, so that 2u·n·|f·Σ i/2| <= c·n·Σ|L|·m·2u, which 2^−8 more at an integer's 1/2 has. And
//! the product with n: 5u·|s|. In parts that and at most four sums: 8u·Σ_p |s_p|. The difference to the
//! reference: that is at most 2 above the largest s, as ⌈log2 n'⌉ is at most 16 and both together were more
//! than 14 above it, and at most 41 below it; so u·(45 + s_max − s). And 2^x is within 2^−23. Together
//! p_t·(1 + ε_t), |ε_t| <= e_t = exp(ln2·d_t + 2^−23) − 1; such ε move the output by at most
//! (Σ a_t e_t |v^_t| + |o|·Σ a_t e_t) / (1 − Σ a_t e_t).
//!
//! **Of the window** a score is N·f·n, with N = 256·N_h + N_l of two conversions and a sum: 2u·(|N| + |N_l|);
//! a constant and three products besides, 4u: 6u·|s|, in parts 9u·Σ_p |s_p|. The share of N_l, which is at
//! most 128·D·32512, is less than the 2^−8 more of an integer, as there is no offset that has it. A key or
//! value stands for what its numbers say, with n·Σ|L| = Σ|h|/√D; the rest is as of codes.
//!
//! **Weights.** w = p·n' rounds, u, and again to f16: 2^−11 of itself, so Σ a |v^|·(2^−11 + 2u), or 2^−25
//! absolutely, which moves the output by 2^−25·|v^_t|/n'_t / Σ p. When the reference was raised last, a
//! token's s and ⌈log2 n'⌉ were together more than 14 above it, so that its w was at least 2^13, its p at
//! least 2^13 / max n', the maximum over the tokens that the row sees: Σ_t 2^−38·|v^_t|·max n' / n'_t.
//!
//! **Sums.** A step a tile: κ·steps·Σ a |v^|, twice for the accumulator. Merging adds eight warps and the
//! splits, the butterfly back and the last three roundings are 10u: u·(splits + 20)·Σ a |v^|. The sum of
//! probabilities: u·(steps + splits + 10)·|o|.

use super::rows;
use crate::attention::BLOCK_TOKENS;
use crate::attention::oracle::softmax;
use kernels_gpu::attention::warps;

const U: f64 = f64::EPSILON * (1u64 << 28) as f64;
/// (17·2^−25 + 2^−23).
const KAPPA: f64 = 17.0 * U / 2.0 + 2.0 * U;

/// A token that a row sees.
#[derive(Clone, Debug)]
pub struct Token {
    /// What its key stands for.
    pub key: Vec<f64>,
    /// What its value stands for.
    pub value: Vec<f64>,
    /// n·Σ|L| of its key, of each part.
    pub sizes: Vec<f64>,
    /// n' of its value.
    pub scale: f64,
}

/// What the formula gives, and how far from it a result may be.
#[derive(Clone, Debug)]
pub struct Judged {
    /// The output.
    pub output: Vec<f64>,
    /// The log-sum-exp.
    pub lse: f64,
    /// Of the Euclidean distance to the output.
    pub bound: f64,
    /// Of the distance to the log-sum-exp.
    pub lse_bound: f64,
}

/// What rounding a query adds to a score of a key with n·Σ|L| = 1, for each part.
fn of_query(query: &[f64], parts: usize, order: &[u8]) -> Vec<f64> {
    let (h, of_part) = (rows::turned(query, parts, order), query.len() / parts);
    let c = std::f64::consts::LOG2_E / ((query.len() * of_part) as f64).sqrt();
    let own = |d: usize| query[order.get(d).map_or(d, |channel| usize::from(*channel))].abs();
    (0..parts)
        .map(|p| {
            let part = p * of_part..(p + 1) * of_part;
            let m = h[part.clone()].iter().fold(0.0, |most: f64, h| most.max(h.abs()));
            c * (m * (0.5 + 2.0 / 256.0) / 32512.0 + 8.0 * U * part.map(own).sum::<f64>())
        })
        .collect()
}

/// What a key's parts add to a score, each without its sign; of a whole key the score.
fn sizes_of_parts(query: &[f64], key: &[f64], parts: usize, order: &[u8]) -> f64 {
    let own = |d: usize| order.get(d).map_or(d, |channel| usize::from(*channel));
    let channels: Vec<usize> = (0..key.len()).map(own).collect();
    let of = |part: &[usize]| part.iter().map(|channel| query[*channel] * key[*channel]).sum::<f64>().abs();
    channels.chunks_exact(key.len() / parts).map(of).sum::<f64>() / (key.len() as f64).sqrt()
}

/// Judges a row of a sequence that is cut into `splits` parts. `order`: that of the channels of keys in
/// parts; empty of whole keys.
pub fn judge(query: &[f64], order: &[u8], tokens: &[Token], splits: u32) -> Judged {
    let dim = query.len();
    let mut output = vec![0.0; dim];
    if tokens.is_empty() {
        return Judged { output, lse: f64::NEG_INFINITY, bound: 0.0, lse_bound: 0.0 };
    }
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let scale = 1.0 / (dim as f64).sqrt();
    let logits: Vec<f64> = tokens
        .iter()
        .map(|token| scale * query.iter().zip(&token.key).map(|(q, k)| q * k).sum::<f64>())
        .collect();
    let (weights, lse) = softmax(&logits);
    let parts = tokens[0].sizes.len();
    let of_query = of_query(query, parts, order);
    // Those of the window, which are more.
    let roundings = if parts == 1 { 6.0 } else { 9.0 };
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let log2 = std::f64::consts::LOG2_E;
    let (mut moved, mut moved_values, mut weighted, mut longest) = (0.0, 0.0, 0.0, 0.0f64);
    let largest_scale = tokens.iter().map(|token| token.scale).fold(0.0, f64::max);
    let mut absolute = 0.0;
    for (token, (weight, logit)) in tokens.iter().zip(weights.iter().zip(&logits)) {
        let error = token.sizes.iter().zip(&of_query).map(|(size, error)| size * error).sum::<f64>()
            + roundings * U * log2 * sizes_of_parts(query, &token.key, parts, order)
            + U * (45.0 + log2 * (largest - logit));
        let e = (std::f64::consts::LN_2 * error + 2.0 * U).exp_m1();
        let length = norm(&token.value);
        // A weight of 0 in f64 has no share, whatever its error.
        if *weight > 0.0 {
            moved += weight * e;
            moved_values += weight * e * length;
        }
        if token.scale > 0.0 {
            absolute += length * largest_scale / token.scale;
        }
        weighted += weight * length;
        longest = longest.max(length);
        output.iter_mut().zip(&token.value).for_each(|(o, v)| *o += weight * v);
    }
    let own = norm(&output);
    let tiles = tokens.len().div_ceil(BLOCK_TOKENS as usize) as f64;
    let splits = f64::from(splits);
    let steps = ((tiles / splits).ceil() / f64::from(warps(dim as u32))).ceil() + 1.0;
    let shifted = if moved < 0.5 { (moved_values + own * moved) / (1.0 - moved) } else { 2.0 * longest };
    let rounded = weighted * (1.0 / 2048.0 + 2.0 * U + 2.0 * KAPPA * steps + U * (splits + 20.0))
        + absolute / (1u64 << 38) as f64
        + own * U * (steps + splits + 10.0);
    let of_sum = if moved < 0.5 { -(-moved).ln_1p() } else { f64::INFINITY };
    let total = U * (steps + splits + 10.0);
    Judged {
        output,
        lse,
        bound: 1.01 * (shifted + rounded) + 1e-36,
        lse_bound: 1.01 * (of_sum + total + 80.0 * U + 4.0 * U * lse.abs()),
    }
}
