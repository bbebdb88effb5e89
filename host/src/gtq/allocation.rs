//! Bits where they count: the rotary blocks of a key get bits by what they do to scores (Liang, Zhang and
//! Jia, *RoPE-Aware Bit Allocation for KV-Cache Quantization*, 2026).
//!
//! RoPE turns pairs of channels, so a score is a sum over them: q·k = Σ_i q^(i)·k^(i), and an error e of the
//! key moves it by Σ_i q^(i)·e^(i). A block of energy E|k^(i)|² that is quantized to b bits has E|e^(i)|² =
//! E|k^(i)|²·ε(b), where ε is the quantizer's relative error; with independent directions the squared error
//! of a score is
//!
//! ```text
//! 1/2 · Σ_i E|q^(i)|² · E|k^(i)|² · ε(b_i)                                        (product)
//! ```
//!
//! The paper takes the mean (E|q^(i)|² + E|k^(i)|²) / 2 for the product, which bounds its root, and 4^−b for
//! ε. Both are here, and three more [scores](Score).
//!
//! # The greedy choice is the best
//! The bits of a head are given one by one to the block where the next one lowers the sum most. As ε is
//! convex, a block's gains fall with each bit, so the first n gains that are taken are the n largest there
//! are, and no other allocation of n bits has a larger sum of gains.

use crate::attention::rope::Pairing;

/// The channels of a head's rotary blocks.
///
/// Channels that RoPE does not turn are paired as they lie; a score is a sum over their pairs as well.
pub fn blocks(head_dim: usize, rotary: usize, pairing: Pairing) -> Vec<[usize; 2]> {
    let interleaved = pairing == Pairing::Interleaved;
    let channels = |i: usize| {
        kernels_gpu::attention::rotation::pair_channels(i as u32, rotary as u32, interleaved)
            .map(|channel| channel as usize)
    };
    (0..head_dim / 2).map(channels).collect()
}

/// What blocks carry: means over tokens, of queries over the query heads of the KV head as well.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Energies {
    /// E|q^(i)|².
    pub queries: Vec<f64>,
    /// E|k^(i)|².
    pub keys: Vec<f64>,
}

impl Energies {
    /// Of rows of one KV head: keys, and the queries of its query heads. RoPE changes no block's length, so
    /// that rows may be turned or not.
    pub fn of<'a>(
        blocks: &[[usize; 2]],
        keys: impl Iterator<Item = &'a [f64]>,
        queries: impl Iterator<Item = &'a [f64]>,
    ) -> Self {
        Energies { queries: means(blocks, queries), keys: means(blocks, keys) }
    }
}

fn means<'a>(blocks: &[[usize; 2]], rows: impl Iterator<Item = &'a [f64]>) -> Vec<f64> {
    let mut sums = vec![0.0; blocks.len()];
    let mut count = 0usize;
    for row in rows {
        count += 1;
        for (sum, [a, b]) in sums.iter_mut().zip(blocks) {
            *sum += row[*a] * row[*a] + row[*b] * row[*b];
        }
    }
    sums.iter().map(|sum| sum / count.max(1) as f64).collect()
}

/// What a block's bits are given for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    /// (E|q|² + E|k|²) / 2: the paper's.
    Average,
    /// The larger of both.
    Largest,
    /// E|q|²·E|k|²: that of the formula above.
    Product,
    /// E|k|².
    Keys,
    /// E|q|².
    Queries,
}

impl Score {
    /// Each block's.
    pub fn of(self, energies: &Energies) -> Vec<f64> {
        let one = |(q, k): (&f64, &f64)| match self {
            Score::Average => (q + k) / 2.0,
            Score::Largest => q.max(*k),
            Score::Product => q * k,
            Score::Keys => *k,
            Score::Queries => *q,
        };
        energies.queries.iter().zip(&energies.keys).map(one).collect()
    }
}

/// ε: the relative error of b bits, from 1 bit on.
pub trait Law {
    /// Of `bits` bits.
    fn error(&self, bits: u32) -> f64;
}

/// 4^−b: the paper's.
#[derive(Clone, Copy, Debug)]
pub struct Quarters;

impl Law for Quarters {
    fn error(&self, bits: u32) -> f64 {
        0.25f64.powi(bits as i32)
    }
}

/// Errors by bits, the first of 1 bit.
#[derive(Clone, Debug)]
pub struct Table(pub Vec<f64>);

impl Table {
    /// Those of the best levels on the sphere in `dim` dimensions, up to `most` bits.
    pub fn of_sphere(dim: usize, most: u32) -> Self {
        Table((1..=most).map(|bits| super::codebook::best_error(dim, bits)).collect())
    }
}

impl Law for Table {
    fn error(&self, bits: u32) -> f64 {
        self.0[bits as usize - 1]
    }
}

/// What cannot be allocated.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// A sum of bits that no allocation has.
    #[error(
        "{total} bits for {blocks} blocks of {least} to {most} bits each: the sum is {least}·{blocks} to {most}·{blocks}"
    )]
    Total {
        /// What was asked for.
        total: u32,
        /// Blocks.
        blocks: usize,
        /// Of a block.
        least: u32,
        /// Of a block.
        most: u32,
    },
    /// A score that orders nothing.
    #[error("block {block} has the score {score}; scores are numbers from 0 up")]
    Score {
        /// Which.
        block: usize,
        /// Its score.
        score: f64,
    },
}

/// The allocation of `total` bits, `least` to `most` each, with the smallest Σ score·ε(bits); of blocks that
/// gain as much the first gets the bit.
///
/// # Errors
/// [`Error`].
pub fn allocate(
    scores: &[f64],
    total: u32,
    [least, most]: [u32; 2],
    law: &impl Law,
) -> Result<Vec<u32>, Error> {
    let blocks = scores.len();
    if let Some((block, score)) =
        scores.iter().enumerate().find(|(_, score)| !(score.is_finite() && **score >= 0.0))
    {
        return Err(Error::Score { block, score: *score });
    }
    let range = least as usize * blocks..=most as usize * blocks;
    if !range.contains(&(total as usize)) {
        return Err(Error::Total { total, blocks, least, most });
    }
    let mut bits = vec![least; blocks];
    for _ in 0..total as usize - least as usize * blocks {
        let mut best: Option<(f64, usize)> = None;
        for (block, (bits, score)) in bits.iter().zip(scores).enumerate() {
            if *bits < most {
                let gain = score * (law.error(*bits) - law.error(bits + 1));
                if best.is_none_or(|(most, _)| gain > most) {
                    best = Some((gain, block));
                }
            }
        }
        // There is one as long as the sum is in range.
        if let Some((_, block)) = best {
            bits[block] += 1;
        }
    }
    Ok(bits)
}

/// What an allocation leaves: Σ score·ε(bits).
pub fn cost(scores: &[f64], bits: &[u32], law: &impl Law) -> f64 {
    scores.iter().zip(bits).map(|(score, bits)| score * law.error(*bits)).sum()
}

/// Blocks of equal bits, in ascending order of bits: what has one rotation and one n together.
pub fn groups(bits: &[u32]) -> Vec<(u32, Vec<usize>)> {
    let mut groups: std::collections::BTreeMap<u32, Vec<usize>> = std::collections::BTreeMap::new();
    for (block, bits) in bits.iter().enumerate() {
        groups.entry(*bits).or_default().push(block);
    }
    groups.into_iter().collect()
}

/// Blocks in `parts` parts of as many each, the highest product scores first.
pub fn ranked(energies: &Energies, parts: usize) -> Vec<Vec<usize>> {
    let scores = Score::Product.of(energies);
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    order.chunks_exact((scores.len() / parts.max(1)).max(1)).map(<[usize]>::to_vec).collect()
}

/// [`ranked`] parts with bits for each: `bits` on average. The score of a part is the product of its
/// energies, since its rotation spreads the error over all of it.
///
/// Parts of one size have one layout whatever their bits, and a tile of keys as many bytes in every head.
///
/// # Errors
/// [`Error`].
pub fn parts(
    energies: &Energies,
    parts: usize,
    bits: u32,
    range: [u32; 2],
    law: &impl Law,
) -> Result<Vec<(u32, Vec<usize>)>, Error> {
    let of_parts = ranked(energies, parts);
    let sum = |of: &[f64], part: &[usize]| part.iter().map(|block| of[*block]).sum::<f64>();
    let spread: Vec<f64> =
        of_parts.iter().map(|part| sum(&energies.queries, part) * sum(&energies.keys, part)).collect();
    let bits = allocate(&spread, bits * of_parts.len() as u32, range, law)?;
    Ok(bits.into_iter().zip(of_parts).collect())
}

/// How far two allocations of one head are apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Apart {
    /// Share of blocks with other bits.
    pub hamming: f64,
    /// Of blocks with more bits than the mean in either: the share that has them in both; 1 where there are
    /// none.
    pub jaccard: f64,
}

/// Compares two allocations.
pub fn apart(a: &[u32], b: &[u32]) -> Apart {
    let mean = |bits: &[u32]| f64::from(bits.iter().sum::<u32>()) / bits.len().max(1) as f64;
    let (mean_a, mean_b) = (mean(a), mean(b));
    let (mut other, mut both, mut either) = (0, 0, 0);
    for (x, y) in a.iter().zip(b) {
        other += usize::from(x != y);
        let high = (f64::from(*x) > mean_a, f64::from(*y) > mean_b);
        both += usize::from(high.0 && high.1);
        either += usize::from(high.0 || high.1);
    }
    Apart {
        hamming: other as f64 / a.len().max(1) as f64,
        jaccard: if either == 0 { 1.0 } else { both as f64 / either as f64 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels_gpu::mixed;

    #[test]
    fn blocks_are_what_rope_turns() {
        assert_eq!(blocks(8, 8, Pairing::Interleaved), [[0, 1], [2, 3], [4, 5], [6, 7]]);
        assert_eq!(blocks(8, 8, Pairing::HalfSplit), [[0, 4], [1, 5], [2, 6], [3, 7]]);
        // Half of the channels turn, the others lie behind them.
        assert_eq!(blocks(8, 4, Pairing::HalfSplit), [[0, 2], [1, 3], [4, 5], [6, 7]]);
        let rows = [[3.0, 0.0, 1.0, 4.0], [1.0, 2.0, 1.0, 0.0]];
        let energies = Energies::of(
            &blocks(4, 4, Pairing::HalfSplit),
            rows.iter().map(<[f64; 4]>::as_slice),
            rows[..1].iter().map(<[f64; 4]>::as_slice),
        );
        assert_eq!(energies, Energies { keys: vec![6.0, 10.0], queries: vec![10.0, 16.0] });
        assert_eq!(Score::Average.of(&energies), [8.0, 13.0]);
        assert_eq!(Score::Product.of(&energies), [60.0, 160.0]);
        assert_eq!(Score::Largest.of(&energies), [10.0, 16.0]);
        assert_eq!(
            (Score::Keys.of(&energies), Score::Queries.of(&energies)),
            (vec![6.0, 10.0], vec![10.0, 16.0])
        );
    }

    /// The smallest cost of all allocations.
    fn exhaustive(scores: &[f64], total: u32, [least, most]: [u32; 2], law: &impl Law) -> f64 {
        let Some((first, rest)) = scores.split_first() else {
            return if total == 0 { 0.0 } else { f64::INFINITY };
        };
        (least..=most.min(total))
            .map(|bits| first * law.error(bits) + exhaustive(rest, total - bits, [least, most], law))
            .fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn greedy_is_the_best() {
        let table = Table::of_sphere(64, 6);
        for seed in 0..200 {
            let blocks = 1 + (mixed(seed, 0) % 6) as usize;
            // Over nine orders of magnitude, with ties and zeros.
            let score = |i: u64| match mixed(seed, i) % 10 {
                0 => 0.0,
                z => 10f64.powi(z as i32 - 5) * if z < 4 { 1.0 } else { 1.0 + (mixed(seed, i) >> 40) as f64 },
            };
            let scores: Vec<f64> = (1..=blocks as u64).map(score).collect();
            let range = [1 + (seed % 2) as u32, 5 + (seed % 2) as u32];
            for total in range[0] * blocks as u32..=range[1] * blocks as u32 {
                let close = |found: f64, least: f64| found <= least * (1.0 + 1e-12);
                let found = allocate(&scores, total, range, &Quarters).expect("in range");
                assert_eq!(found.iter().sum::<u32>(), total);
                let least = exhaustive(&scores, total, range, &Quarters);
                assert!(close(cost(&scores, &found, &Quarters), least), "{scores:?} {total}: {found:?}");
                let found = allocate(&scores, total, range, &table).expect("in range");
                let least = exhaustive(&scores, total, range, &table);
                assert!(close(cost(&scores, &found, &table), least), "{scores:?} {total}: {found:?}");
            }
        }
    }

    /// What the argument rests on: each bit gains less than the one before.
    #[test]
    fn errors_are_convex() {
        for dim in [2, 16, 32, 64, 128] {
            let table = Table::of_sphere(dim, 8);
            let gain = |bits: u32| table.error(bits) - table.error(bits + 1);
            assert!((1..7).all(|bits| gain(bits) > gain(bits + 1)), "{dim}: {table:?}");
        }
    }

    #[test]
    fn what_cannot_be_met_is_said() {
        let error = allocate(&[1.0, 2.0], 17, [1, 8], &Quarters).expect_err("too many");
        assert_eq!(error, Error::Total { total: 17, blocks: 2, least: 1, most: 8 });
        assert!(allocate(&[1.0, 2.0], 1, [1, 8], &Quarters).is_err());
        let error = allocate(&[1.0, f64::NAN], 4, [1, 8], &Quarters).expect_err("no number");
        assert!(error.to_string().contains("block 1 has the score NaN"), "{error}");
        // Scores of 0 still get all bits.
        assert_eq!(allocate(&[0.0, 0.0], 5, [1, 8], &Quarters).expect("bits"), [4, 1]);
    }

    #[test]
    fn groups_and_parts_are_all_blocks_once() {
        let bits = [3, 1, 3, 2, 1, 3];
        assert_eq!(groups(&bits), [(1, vec![1, 4]), (2, vec![3]), (3, vec![0, 2, 5])]);
        let keys = vec![1.0, 9.0, 0.5, 100.0, 2.0, 3.0, 0.1, 40.0];
        let energies = Energies { queries: vec![1.0; 8], keys };
        let found = parts(&energies, 4, 3, [1, 6], &Quarters).expect("parts");
        let order: Vec<usize> = found.iter().flat_map(|(_, blocks)| blocks.clone()).collect();
        assert_eq!(order, [3, 7, 1, 5, 4, 0, 2, 6]);
        assert_eq!(found.iter().map(|(bits, _)| bits).sum::<u32>(), 12);
        assert!(found.is_sorted_by(|a, b| a.0 >= b.0) && found[0].0 > 3, "{found:?}");
    }

    #[test]
    fn allocations_are_compared() {
        assert_eq!(apart(&[4, 2, 2, 4], &[4, 2, 2, 4]), Apart { hamming: 0.0, jaccard: 1.0 });
        assert_eq!(apart(&[4, 2, 2, 4], &[4, 2, 4, 2]), Apart { hamming: 0.5, jaccard: 1.0 / 3.0 });
        assert_eq!(apart(&[3, 3], &[3, 3]), Apart { hamming: 0.0, jaccard: 1.0 });
    }
}
