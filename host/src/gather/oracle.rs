//! The choice of blocks and the attention over it in f64, written to be obvious: what every implementation is
//! judged by.

use super::Support;
use crate::attention::Half;
use crate::attention::oracle::Sequence;

/// u of f32.
const U: f64 = f64::EPSILON * (1u64 << 28) as f64;
/// What a step of the tensor cores cuts off: 17·2^−25 + 2^−23.
const KAPPA: f64 = 17.0 * U / 2.0 + 2.0 * U;

/// The largest and the smallest of a block's keys, channel by channel: kmax and kmin of the paper's section
/// 8.1. `key` writes the row of a token.
pub fn bounds(dim: usize, tokens: std::ops::Range<usize>, key: impl Fn(usize, &mut [f64])) -> [Vec<f64>; 2] {
    let (mut largest, mut smallest) = (vec![f64::NEG_INFINITY; dim], vec![f64::INFINITY; dim]);
    let mut row = vec![0.0; dim];
    for token in tokens {
        key(token, &mut row);
        for c in 0..dim {
            largest[c] = largest[c].max(row[c]);
            smallest[c] = smallest[c].min(row[c]);
        }
    }
    [largest, smallest]
}

/// The mean of a block's keys, channel by channel, and that of their magnitudes.
pub fn means(dim: usize, tokens: std::ops::Range<usize>, key: impl Fn(usize, &mut [f64])) -> [Vec<f64>; 2] {
    let (mut sums, mut sizes, mut row) = (vec![0.0; dim], vec![0.0; dim], vec![0.0; dim]);
    let count = tokens.len() as f64;
    for token in tokens {
        key(token, &mut row);
        for c in 0..dim {
            sums[c] += row[c];
            sizes[c] += row[c].abs();
        }
    }
    [sums, sizes].map(|all| all.into_iter().map(|sum| sum / count).collect())
}

/// A query head's score of a block with these bounds: Σ max(q, 0)·kmax + min(q, 0)·kmin.
pub fn score(query: &[f64], [largest, smallest]: [&[f64]; 2]) -> f64 {
    let of = |(q, (high, low)): (&f64, (&f64, &f64))| q.max(0.0) * high + q.min(0.0) * low;
    query.iter().zip(largest.iter().zip(smallest)).map(of).sum()
}

/// How far a kernel's score may be from [`score`]: 1.01·(κ·D/16 + u)·Q, as `kernels_gpu::gather` derives it.
pub fn score_error<E: Half>(query: &[f64], [largest, smallest]: [&[f64]; 2]) -> f64 {
    let normal = E::SUBNORMAL_ERROR / E::HALF_ULP;
    let counted = |x: f64| if x == 0.0 { 0.0 } else { x.abs().max(normal) };
    let of =
        |(q, (high, low)): (&f64, (&f64, &f64))| counted(*q) * counted(if *q > 0.0 { *high } else { *low });
    let terms: f64 = query.iter().zip(largest.iter().zip(smallest)).map(of).sum();
    1.01 * (KAPPA * (query.len() / 16) as f64 + U) * terms
}

/// The blocks that are kept of a sequence of `length` tokens, in order; `score` is of a block, the largest
/// over the query heads.
pub fn kept(support: Support, length: usize, score: impl Fn(usize) -> f64) -> Vec<usize> {
    let (block, local) = (support.block as usize, support.local as usize);
    let blocks = length.div_ceil(block);
    let is_local = |index: usize| index + local >= blocks;
    let mut distant: Vec<(f64, usize)> =
        (1..blocks).filter(|index| !is_local(*index)).map(|index| (score(index), index)).collect();
    // The highest first; of equal ones the lower index, as they were.
    distant.sort_by(|a, b| b.0.total_cmp(&a.0));
    distant.truncate(support.k as usize);
    let mut kept: Vec<usize> = distant.into_iter().map(|(_, index)| index).collect();
    kept.extend((0..blocks).filter(|index| *index == 0 || is_local(*index)));
    kept.sort_unstable();
    kept
}

/// The tokens of these blocks.
pub fn tokens(blocks: &[usize], block: usize, length: usize) -> Vec<usize> {
    blocks.iter().flat_map(|index| index * block..length.min((index + 1) * block)).collect()
}

/// A query head's attention to some tokens of a sequence, all others masked: output and log-sum-exp.
pub fn masked(
    tokens: &[usize],
    query: &[f64],
    key: impl Fn(usize, &mut [f64]) + Sync,
    value: impl Fn(usize, &mut [f64]) + Sync,
) -> (Vec<f64>, f64) {
    let sequence = Sequence::decode(tokens.len(), 1, 1, query.len());
    let attended = sequence.attend(
        query,
        |_, token, row: &mut [f64]| key(tokens[token], row),
        |_, token, row: &mut [f64]| value(tokens[token], row),
    );
    (attended.output, attended.lse[0])
}
