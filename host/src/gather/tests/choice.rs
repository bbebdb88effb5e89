//! The choice of blocks: the oracle's, whatever the scores.

use super::super::oracle;
use super::*;
use crate::attention::dense::sample::random;
use crate::gather::cpu::{self, Selecting};
use crate::simd_level::Level;
use half::{bf16, f16};

/// Queries and keys that are whole numbers up to `most` in size: scores of them are exact in f32, and f64 has
/// the same.
pub(super) fn whole<E: GatherElement>(batch: &mut Batch<E>, most: u64, seed: u64) {
    let number = |stream: u64, i: usize| {
        let x = random(seed ^ stream, i as u64) % (2 * most + 1);
        E::from_f32(x as f32 - most as f32)
    };
    batch.queries.iter_mut().enumerate().for_each(|(i, x)| *x = number(1, i));
    batch.keys.iter_mut().enumerate().for_each(|(i, x)| *x = number(2, i));
}

/// The list of every sequence and KV head is the oracle's by its own scores, and the CPU's own path chooses
/// the same and gives the same bits.
fn check<E: GatherElement>(batch: &Batch<E>, support: Support) {
    let (stepped, _) = step(batch, support, false);
    assert!(step(batch, support, true).0 == stepped, "the CPU's own path, {support:?}");
    for (sequence, length) in batch.lengths.iter().enumerate() {
        for head in 0..batch.problem.kv_heads as usize {
            let queries = queries(batch, sequence, head);
            let score = |index: usize| {
                let [largest, smallest] = of_block(batch, support.block, sequence, head, index);
                let of = |query: &Vec<f64>| oracle::score(query, [&largest, &smallest]);
                queries.iter().map(of).fold(f64::NEG_INFINITY, f64::max)
            };
            let expected = oracle::kept(support, *length as usize, score);
            let found = list(batch, &stepped, sequence, head);
            assert_eq!(found, expected, "{support:?}, sequence {sequence} of {length}, head {head}");
            table(batch, support, &stepped, [sequence, head], &found);
        }
    }
}

/// The table names the blocks of the list, and the length counts their tokens.
fn table<E: GatherElement>(
    batch: &Batch<E>,
    support: Support,
    stepped: &Stepped,
    [sequence, head]: [usize; 2],
    list: &[usize],
) {
    let heads = batch.problem.kv_heads as usize;
    let (row, length) = (sequence * heads + head, batch.lengths[sequence] as usize);
    let per_block = (support.block / BLOCK_TOKENS) as usize;
    let max_blocks = batch.problem.max_tokens.div_ceil(BLOCK_TOKENS) as usize;
    let width = stepped.entries.len() / stepped.counts.len();
    let mut expected: Vec<u32> = list
        .iter()
        .flat_map(|index| index * per_block..((index + 1) * per_block).min(length.div_ceil(16)))
        .map(|entry| batch.table[sequence * max_blocks + entry] * heads as u32 + head as u32)
        .collect();
    expected.resize(width, u32::MAX);
    assert_eq!(stepped.entries[row * width..][..width], expected);
    let tokens = oracle::tokens(list, support.block as usize, length).len();
    assert_eq!((stepped.kept[row], support.kept(length as u32)), (tokens as u32, tokens as u32));
}

/// Whole numbers of ordinary size: groups, head_dims, blocks, lengths around every edge, several sequences.
#[test]
fn the_choice_is_the_oracles() {
    let lengths = [1, 15, 16, 17, 33, 79, 80, 81, 255, 256, 384, 400];
    for (group, head_dim, support) in [
        (1, 64, Support { k: 3, block: 16, local: 2 }),
        (4, 128, Support { k: 5, block: 16, local: 1 }),
        (7, 64, Support { k: 2, block: 32, local: 3 }),
        (8, 128, Support { k: 1, block: 64, local: 1 }),
        (12, 64, Support { k: 4, block: 16, local: 4 }),
        (16, 128, Support { k: 1, block: 128, local: 1 }),
        (4, 64, Support { k: 0, block: 16, local: 3 }),
        (1, 96, Support { k: 5, block: 16, local: 1 }),
        (8, 96, Support { k: 2, block: 32, local: 3 }),
        (8, 256, Support { k: 3, block: 16, local: 2 }),
    ] {
        let problem = StepProblem { q_heads: 2 * group, head_dim, ..PROBLEM };
        let mut half = batch::<f16>(problem, Input::Normal, &lengths, 3);
        whole(&mut half, 7, 11);
        check(&half, support);
        let mut brain = batch::<bf16>(problem, Input::Normal, &lengths[7..], 3);
        whole(&mut brain, 7, 12);
        check(&brain, support);
    }
}

/// −1, 0 and 1: scores tie by the dozen, and the lower index comes first. With keys of zeros all are equal.
#[test]
fn of_equal_scores_the_lower_index_is_taken() {
    let problem = StepProblem { q_heads: 2, kv_heads: 1, max_tokens: 3200, ..PROBLEM };
    for k in [1, 7, 31, 32, 33, 150] {
        let support = Support { k, block: 16, local: 2 };
        let mut batch = batch::<f16>(problem, Input::Normal, &[3200, 1999], 3);
        whole(&mut batch, 1, u64::from(k));
        // Few channels, so that few scores are different.
        batch.queries.iter_mut().enumerate().filter(|(i, _)| i % 64 > 1).for_each(|(_, x)| *x = f16::ZERO);
        check(&batch, support);
        batch.keys.fill(f16::ZERO);
        check(&batch, support);
    }
}

/// So many sequences and KV heads that one thread block scores a whole sequence, each warp several tiles.
#[test]
fn a_warp_scores_one_tile_after_another() {
    let problem = StepProblem { q_heads: 8, kv_heads: 8, max_tokens: 4400, ..PROBLEM };
    let mut lengths = [1; 33];
    (lengths[0], lengths[32]) = (4400, 2100);
    let mut batch = batch::<f16>(problem, Input::Normal, &lengths, 3);
    whole(&mut batch, 5, 8);
    check(&batch, Support { k: 40, block: 16, local: 1 });
}

/// Every query has positive channels and every key negative ones: query heads that there are not, whose
/// scores are 0, must not count.
#[test]
fn scores_below_zero_are_ranked() {
    for group in [1, 7, 9] {
        let problem = StepProblem { q_heads: 2 * group, ..PROBLEM };
        let mut batch = batch::<f16>(problem, Input::Normal, &[400, 399], 3);
        whole(&mut batch, 9, 6);
        let above = |x: f16, sign: f32| f16::from_f32(sign * (x.to_f32().abs() + 1.0));
        batch.queries.iter_mut().for_each(|x| *x = above(*x, 1.0));
        batch.keys.iter_mut().for_each(|x| *x = above(*x, -1.0));
        check(&batch, Support { k: 3, block: 16, local: 1 });
    }
}

/// More distant blocks than are kept in shared memory are ranked from global memory.
#[test]
fn long_sequences_are_ranked_too() {
    let problem = StepProblem { q_heads: 1, kv_heads: 1, max_tokens: 16 * 8300, ..PROBLEM };
    let mut batch = batch::<f16>(problem, Input::Normal, &[16 * 8300 - 5, 16 * 8193 + 16], 3);
    whole(&mut batch, 2, 4);
    for k in [1, 100] {
        check(&batch, Support { k, block: 16, local: 1 });
    }
}

/// 164 tiles, in 82 pairs: the best are found by the maxima of pairs, by those of tiles, among all; what is
/// left is ranked by counting, or bit by bit; ties are few, or by the hundred.
#[test]
fn few_scores_are_looked_at_and_the_list_is_the_same() {
    let problem = StepProblem { q_heads: 2, kv_heads: 1, max_tokens: 16 * 2610, ..PROBLEM };
    for (most, channels) in [(200, 64), (1, 2)] {
        let mut batch = batch::<f16>(problem, Input::Normal, &[16 * 2610 - 9, 16 * 2600], 3);
        whole(&mut batch, most, 14);
        batch
            .queries
            .iter_mut()
            .enumerate()
            .filter(|(i, _)| i % 64 >= channels)
            .for_each(|(_, x)| *x = f16::ZERO);
        for k in [1, 60, 61, 120, 1000] {
            check(&batch, Support { k, block: 16, local: 1 });
        }
    }
    // The best at both ends of the row, and in one tile.
    let mut batch = batch::<f16>(problem, Input::Normal, &[16 * 2610, 16 * 34], 3);
    whole(&mut batch, 2, 15);
    batch.queries.fill(f16::ONE);
    for block in (1..17).chain(2590..2609) {
        let at = batch.row(0, 0, 16 * block);
        batch.keys[at..at + 64].fill(f16::from_f32(5.0));
    }
    for k in [3, 33, 36] {
        check(&batch, Support { k, block: 16, local: 1 });
    }
}

/// Where k is what there is, or more, all is kept, and nothing twice.
#[test]
fn more_than_there_is_is_all() {
    let mut batch = batch::<f16>(PROBLEM, Input::Normal, &[400, 300, 96, 97, 1], 3);
    whole(&mut batch, 3, 4);
    // 25 blocks, of which 20 are distant.
    for k in [19, 20, 21, 1000, u32::MAX] {
        let support = Support { k, block: 16, local: 4 };
        check(&batch, support);
        assert_eq!(support.kept(400), if k == 19 { 384 } else { 400 });
    }
    check(&batch, Support { k: 1, block: 16, local: u32::MAX });
}

/// Numbers of any kind: scores are within their bound, the list is in their order on every path that the
/// machine has, and what is left out is no better than what is taken but for that bound.
#[test]
fn scores_are_within_their_bound() {
    fn of<E: GatherElement>(input: Input, head_dim: u32) {
        let support = Support { k: 4, block: 16, local: 2 };
        let batch = batch::<E>(StepProblem { head_dim, ..PROBLEM }, input, &[400, 333], 5);
        let (stepped, plan) = step(&batch, support, false);
        let words = plan.scores().to_vec().expect("read");
        let row_words = words.len() / stepped.counts.len();
        for (sequence, length) in batch.lengths.iter().enumerate() {
            for head in 0..batch.problem.kv_heads as usize {
                let words = &words[(sequence * 2 + head) * row_words..][..row_words];
                let found = list(&batch, &stepped, sequence, head);
                let queries = queries(&batch, sequence, head);
                let extent = support.extent(*length);
                let mut judged = Vec::new();
                for (index, bits) in words.iter().enumerate().take(extent.local as usize).skip(1) {
                    let [largest, smallest] = of_block(&batch, 16, sequence, head, index);
                    let bounds = [largest.as_slice(), smallest.as_slice()];
                    let most =
                        |of: &dyn Fn(&Vec<f64>) -> f64| queries.iter().map(of).fold(f64::MIN, f64::max);
                    let score = most(&|query| oracle::score(query, bounds));
                    let error = most(&|query| oracle::score_error::<E>(query, bounds));
                    let got = f32::from_bits(if bits >> 31 == 1 { bits ^ 1 << 31 } else { !bits });
                    assert!((f64::from(got) - score).abs() <= error, "{input}: {got}, {score}, {error}");
                    judged.push((score, error, found.contains(&index)));
                }
                for taken in judged.iter().filter(|block| block.2) {
                    for left in judged.iter().filter(|block| !block.2) {
                        assert!(taken.0 + taken.1 >= left.0 - left.1, "{input}: {taken:?} {left:?}");
                    }
                }
                let expected = oracle::kept(support, *length as usize, |index| f64::from(words[index]));
                assert_eq!(found, expected, "{input}");
            }
        }
        let bounds = bounds(&batch, support, std::slice::from_ref(&batch.lengths), true);
        let bounds = bounds.words().to_vec().expect("read");
        for level in Level::available() {
            let [mut list, mut counts, mut entries, mut kept] =
                [&stepped.list, &stepped.counts, &stepped.entries, &stepped.kept].map(|of| vec![7; of.len()]);
            let from = Selecting {
                queries: batch.queries.as_slice(),
                bounds: &bounds,
                table: &batch.table,
                lengths: &batch.lengths,
            };
            let to =
                cpu::Choice { list: &mut list, counts: &mut counts, entries: &mut entries, kept: &mut kept };
            cpu::select(*level, plan.shape(), from, to);
            assert!((list, counts) == (stepped.list.clone(), stepped.counts.clone()), "{input} by {level:?}");
            assert!((entries, kept) == (stepped.entries.clone(), stepped.kept.clone()), "{input}");
        }
    }
    for input in Input::MADE {
        of::<f16>(input, 64);
        of::<bf16>(input, 128);
        of::<bf16>(input, 96);
        of::<f16>(input, 256);
    }
}

/// A block with a key that is no number, or infinite, is read before all others.
#[test]
fn what_is_no_number_is_read() {
    for bad in [f16::NAN, f16::from_bits(0xfe01)] {
        let mut batch = batch::<f16>(PROBLEM, Input::Normal, &[400], 5);
        let at = batch.row(0, 1, 16 * 9 + 3);
        batch.keys[at + 17] = bad;
        let support = Support { k: 1, block: 16, local: 2 };
        let (stepped, _) = step(&batch, support, false);
        assert_eq!(list(&batch, &stepped, 0, 1), [0, 9, 23, 24]);
        let (slices, _) = step(&batch, support, true);
        assert_eq!((slices.list, slices.entries), (stepped.list, stepped.entries));
    }
}
