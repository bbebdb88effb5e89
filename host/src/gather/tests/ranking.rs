//! Other ways to rank: by mean keys, and a list for each query head.

use super::super::oracle;
use super::choice::whole;
use super::*;
use half::{bf16, f16};
use kernels_gpu::gather::{TILE_BLOCKS, code_word, code_words, mean_word, scale_word, tile_words};

const ALL: [Ranking; 6] = [
    Ranking { score: Score::Bounds, list: List::KvHead },
    Ranking { score: Score::Bounds, list: List::QueryHead },
    Ranking { score: Score::Codes, list: List::KvHead },
    Ranking { score: Score::Codes, list: List::QueryHead },
    Ranking { score: Score::Mean, list: List::KvHead },
    Ranking { score: Score::Mean, list: List::QueryHead },
];

/// The mean of a block's keys by the oracle, and that of their magnitudes.
fn means<E: GatherElement>(
    batch: &Batch<E>,
    block: u32,
    [sequence, head, index]: [usize; 3],
) -> [Vec<f64>; 2] {
    let (length, block) = (batch.lengths[sequence] as usize, block as usize);
    let tokens = index * block..length.min((index + 1) * block);
    let key = |token: usize, row: &mut [f64]| read(batch, &batch.keys, sequence, head, token, row);
    oracle::means(batch.problem.head_dim as usize, tokens, key)
}

/// Every list is the oracle's, and the CPU's own path has the same bits.
fn check<E: GatherElement>(batch: &Batch<E>, support: Support, ranking: Ranking) {
    let (stepped, plan) = step_by(batch, support, ranking, false);
    assert!(step_by(batch, support, ranking, true).0 == stepped, "the CPU's own path, {ranking:?}");
    let StepProblem { q_heads, kv_heads, .. } = batch.problem;
    let (group, lists) = ((q_heads / kv_heads) as usize, plan.lists() as usize);
    assert_eq!(lists, if ranking.list == List::QueryHead { group } else { 1 });
    for (sequence, length) in batch.lengths.iter().enumerate() {
        for head in 0..kv_heads as usize {
            let queries = queries(batch, sequence, head);
            for (of, queries) in queries.chunks(group / lists).enumerate() {
                let score = |index: usize| {
                    let [high, low] = match ranking.score {
                        // Whole numbers up to 127 are codes of scale 1 or less, and exact.
                        Score::Bounds | Score::Codes => of_block(batch, support.block, sequence, head, index),
                        Score::Mean => {
                            let [mean, _] = means(batch, support.block, [sequence, head, index]);
                            [mean.clone(), mean]
                        }
                    };
                    let of = |query: &Vec<f64>| oracle::score(query, [&high, &low]);
                    queries.iter().map(of).fold(f64::NEG_INFINITY, f64::max)
                };
                let expected = oracle::kept(support, *length as usize, score);
                let found = list(batch, &stepped, sequence, head * lists + of);
                assert_eq!(
                    found, expected,
                    "{ranking:?}, sequence {sequence} of {length}, head {head}, {of}"
                );
            }
        }
    }
}

/// Whole numbers, whose means and scores are exact: groups, head_dims, blocks, several sequences.
#[test]
fn lists_are_the_oracles_by_every_ranking() {
    for ranking in ALL {
        for (group, head_dim, support) in [
            (1, 64, Support { k: 3, block: 16, local: 2 }),
            (3, 128, Support { k: 5, block: 16, local: 1 }),
            (16, 64, Support { k: 2, block: 32, local: 3 }),
            (3, 96, Support { k: 3, block: 16, local: 1 }),
            (3, 256, Support { k: 3, block: 16, local: 1 }),
        ] {
            if head_dim > 128 && ranking.score == Score::Codes {
                continue;
            }
            let problem = StepProblem { q_heads: 2 * group, head_dim, ..PROBLEM };
            let mut half = batch::<f16>(problem, Input::Normal, &[1, 17, 81, 255, 400], 3);
            whole(&mut half, 3, 11);
            check(&half, support, ranking);
            let mut brain = batch::<bf16>(problem, Input::Normal, &[256, 399], 3);
            if ranking.score == Score::Codes && group / ranking.lists(group) > 8 {
                let refused =
                    Plan::<bf16>::ranked(&device(), problem, support, ranking).expect_err("refused");
                assert!(
                    refused.to_string().contains("up to eight query heads a KV head, not 16"),
                    "{refused}"
                );
                continue;
            }
            whole(&mut brain, 3, 12);
            check(&brain, support, ranking);
        }
    }
}

/// Each query head wants a block of its own: one list for all cannot have them.
#[test]
fn query_heads_have_lists_of_their_own() {
    let mut batch =
        batch::<f16>(StepProblem { kv_heads: 1, q_heads: 4, ..PROBLEM }, Input::Normal, &[400], 3);
    batch.keys.fill(f16::ZERO);
    batch.queries.fill(f16::ZERO);
    for head in 0..4 {
        batch.queries[64 * head + head] = f16::ONE;
        let at = batch.row(0, 0, 16 * (3 + 4 * head));
        batch.keys[at + head] = f16::from_f32(2.0);
    }
    let support = Support { k: 1, block: 16, local: 2 };
    for score in [Score::Bounds, Score::Codes, Score::Mean] {
        let (stepped, _) = step_by(&batch, support, Ranking { score, list: List::QueryHead }, false);
        for head in 0..4 {
            assert_eq!(list(&batch, &stepped, 0, head), [0, 3 + 4 * head, 23, 24], "{score:?}");
        }
    }
}

/// The output over each list is masked attention, for each query head over its own.
#[test]
fn the_output_is_masked_attention_by_every_ranking() {
    for ranking in ALL {
        let support = Support { k: 3, block: 32, local: 2 };
        output::check_by(&batch::<f16>(PROBLEM, Input::Normal, &[400, 1, 289], 5), support, ranking);
        let problem = StepProblem { head_dim: 128, q_heads: 7, kv_heads: 1, max_tokens: 900, ..PROBLEM };
        output::check_by(&batch::<bf16>(problem, Input::Sharp, &[900, 551], 6), support, ranking);
    }
}

/// Prompts in chunks of any length and single tokens: means are within their bound of the oracle's, and have
/// the same bits however tokens came, by the kernel and by the CPU's own path.
#[test]
fn means_are_within_their_bound_however_tokens_came() {
    fn of<E: GatherElement>(block: u32, head_dim: u32, input: Input) {
        let support = Support { block, ..Support::ASSURED };
        let lengths = [400, 1, 129, 258];
        let batch = batch::<E>(StepProblem { head_dim, ..PROBLEM }, input, &lengths, u64::from(block));
        let up_to = |tokens: u32| lengths.iter().map(|length| tokens.min(*length)).collect::<Vec<_>>();
        let words = |cuts: &[Vec<u32>], slices: bool| {
            scored(&batch, support, Score::Mean, cuts, slices).words().to_vec().expect("read")
        };
        let expected = words(&[up_to(400)], false);
        let mixed = [1, 17, 18, 19, 127, 128, 129, 130, 256, 257, 400].map(up_to);
        let single: Vec<_> = (1..=400).map(up_to).collect();
        for (cuts, slices) in [(&mixed[..], false), (&mixed, true), (&single, true)] {
            assert!(words(cuts, slices) == expected, "blocks of {block}, by slices: {slices}");
        }
        let tile = (tile_words(head_dim) / 2) as usize;
        let tiles = 400u32.div_ceil(block).div_ceil(TILE_BLOCKS) as usize;
        for (sequence, length) in lengths.iter().enumerate() {
            for (head, index) in
                (0..2).flat_map(|head| (0..length.div_ceil(block) as usize).map(move |index| (head, index)))
            {
                let [mean, size] = means(&batch, block, [sequence, head, index]);
                let count = f64::from((length - index as u32 * block).min(block));
                for c in 0..head_dim {
                    let start = ((sequence * 2 + head) * tiles + index / 16) * tile;
                    let pair = expected[start + mean_word(index as u32 % 16, c / 2) as usize];
                    let found = f64::from(E::unpack(pair)[c as usize % 2]);
                    let (mean, size) = (mean[c as usize], size[c as usize]);
                    let summed = 1.01 * (count / 4.0 + 4.0) * f64::exp2(-24.0) * size;
                    let bound = summed + E::HALF_ULP * (mean.abs() + summed) + E::SUBNORMAL_ERROR;
                    assert!((found - mean).abs() <= bound, "{input}: {found}, {mean} ± {bound}");
                }
            }
        }
    }
    for block in super::super::BLOCKS {
        of::<f16>(block, 64, Input::Normal);
        of::<bf16>(block, 128, Input::Wide);
    }
    of::<bf16>(64, 96, Input::Normal);
    of::<f16>(32, 256, Input::Wide);
}

/// Codes after every mix of chunks have the bits of a fresh start, by the kernel and by the CPU's own path;
/// the scale is the least that does, the bounds are outside of the exact ones, and by less than the scale.
#[test]
fn codes_are_outside_by_less_than_a_step_however_tokens_came() {
    fn of<E: GatherElement>(block: u32, head_dim: u32, input: Input) {
        let support = Support { block, ..Support::ASSURED };
        let lengths = [400, 1, 129, 258];
        let mut batch = batch::<E>(StepProblem { head_dim, ..PROBLEM }, input, &lengths, u64::from(block));
        // Keys grow along a block, so that scales do.
        for token in 0..400 {
            let at = batch.row(0, 0, token);
            let grown = (token % block as usize) as f32 / 8.0;
            batch.keys[at..at + 64].iter_mut().for_each(|x| *x = E::from_f32(x.to_f32() * grown));
        }
        let up_to = |tokens: u32| lengths.iter().map(|length| tokens.min(*length)).collect::<Vec<_>>();
        let words = |cuts: &[Vec<u32>], slices: bool| {
            scored(&batch, support, Score::Codes, cuts, slices).words().to_vec().expect("read")
        };
        let expected = words(&[up_to(400)], false);
        let mixed = [1, 17, 18, 19, 127, 128, 129, 130, 256, 257, 400].map(up_to);
        let single: Vec<_> = (1..=400).map(up_to).collect();
        for (cuts, slices) in [(&mixed[..], false), (&mixed, true), (&single, true)] {
            assert!(words(cuts, slices) == expected, "{input}, blocks of {block}, by slices: {slices}");
        }
        let tile = code_words(head_dim) as usize;
        let tiles = 400u32.div_ceil(block).div_ceil(TILE_BLOCKS) as usize;
        for (sequence, length) in lengths.iter().enumerate() {
            for (head, index) in
                (0..2).flat_map(|head| (0..length.div_ceil(block) as usize).map(move |index| (head, index)))
            {
                let [high, low] = of_block(&batch, block, sequence, head, index);
                let tile = &expected[((sequence * 2 + head) * tiles + index / 16) * tile..][..tile];
                let at = index as u32 % 16;
                let scale = f64::from(f32::from_bits(tile[scale_word(head_dim, at) as usize]));
                let most = high.iter().chain(&low).fold(0f64, |most, x| most.max(x.abs()));
                let least = f64::exp2((most / 127.0).log2().ceil().max(-100.0));
                assert_eq!(scale, least, "{input}: {most}");
                for c in 0..head_dim {
                    let [above, below] = [0, 1].map(|kind| {
                        let word = tile[code_word(kind, at, c / 4) as usize];
                        (f64::from(word >> (8 * (c % 4)) & 0xff) - 128.0) * scale
                    });
                    let (high, low) = (high[c as usize], low[c as usize]);
                    assert!(high <= above && above < high + scale, "{input}: {high}, {above}, {scale}");
                    assert!(below <= low && low - scale < below, "{input}: {low}, {below}, {scale}");
                }
            }
        }
    }
    for block in super::super::BLOCKS {
        of::<f16>(block, 64, Input::Normal);
        of::<bf16>(block, 128, Input::Wide);
        of::<f16>(block, 128, Input::Huge);
        of::<bf16>(block, 64, Input::Constant);
    }
    of::<bf16>(32, 96, Input::Normal);
    of::<f16>(64, 96, Input::Wide);
}

/// Scores by codes are at least those by the exact bounds, but for the rounding of the sum.
#[test]
fn scores_by_codes_are_bounds_too() {
    fn of<E: GatherElement>(input: Input, head_dim: u32) {
        let support = Support { k: 4, block: 16, local: 2 };
        let batch = batch::<E>(StepProblem { head_dim, ..PROBLEM }, input, &[400], 5);
        let ranking = Ranking { score: Score::Codes, list: List::KvHead };
        let (_, plan) = step_by(&batch, support, ranking, false);
        let words = plan.scores().to_vec().expect("read");
        for head in 0..2 {
            for index in 1..support.extent(400).local as usize {
                let bits = words[head * words.len() / 2 + index];
                let found = f64::from(f32::from_bits(if bits >> 31 == 1 { bits ^ 1 << 31 } else { !bits }));
                let [high, low] = of_block(&batch, 16, 0, head, index);
                let most = high.iter().chain(&low).fold(0f64, |most, x| most.max(x.abs()));
                // A step of the codes at the most, 2·most/127, on each channel.
                let step = 2.0 * most / 127.0;
                let wider = |x: &Vec<f64>, by: f64| x.iter().map(|x| x + by).collect::<Vec<_>>();
                let (above, below) = (wider(&high, step), wider(&low, -step));
                let (mut least, mut largest) = (f64::MIN, f64::MIN);
                for query in queries(&batch, 0, head) {
                    let error = oracle::score_error::<E>(&query, [&above, &below])
                        .max(oracle::score_error::<E>(&query, [&below, &above]));
                    least = least.max(oracle::score(&query, [&high, &low]) - error);
                    largest = largest.max(oracle::score(&query, [&above, &below]) + error);
                }
                assert!(least <= found && found <= largest, "{input}: {least}, {found}, {largest}");
            }
        }
    }
    for input in [Input::Normal, Input::Sharp, Input::Wide, Input::Outlier] {
        of::<f16>(input, 64);
        of::<bf16>(input, 128);
        of::<f16>(input, 96);
    }
}

/// A block with a key that is not finite is read before all others, also when later keys are.
#[test]
fn codes_of_what_is_no_number_are_read() {
    for bad in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY] {
        let mut batch = batch::<f16>(PROBLEM, Input::Normal, &[400], 5);
        let at = batch.row(0, 1, 16 * 9 + 3);
        batch.keys[at + 17] = bad;
        let support = Support { k: 1, block: 16, local: 2 };
        let ranking = Ranking { score: Score::Codes, list: List::KvHead };
        let (stepped, _) = step_by(&batch, support, ranking, false);
        assert_eq!(list(&batch, &stepped, 0, 1), [0, 9, 23, 24]);
        assert!(step_by(&batch, support, ranking, true).0.list == stepped.list);
        let cuts: Vec<_> = (1..=400).map(|tokens| vec![tokens]).collect();
        let whole =
            scored(&batch, support, Score::Codes, &[vec![400]], false).words().to_vec().expect("read");
        assert!(scored(&batch, support, Score::Codes, &cuts, true).words().to_vec().expect("read") == whole);
    }
}

/// A block whose mean is no number is read before all others.
#[test]
fn a_mean_that_is_no_number_is_read() {
    for bad in [f16::NAN, f16::INFINITY] {
        let mut batch = batch::<f16>(PROBLEM, Input::Normal, &[400], 5);
        batch.queries.iter_mut().for_each(|x| *x = f16::from_f32(x.to_f32().abs()));
        let at = batch.row(0, 1, 16 * 9 + 3);
        batch.keys[at + 17] = bad;
        let support = Support { k: 1, block: 16, local: 2 };
        for list_of in [List::KvHead, List::QueryHead] {
            let ranking = Ranking { score: Score::Mean, list: list_of };
            let (stepped, _) = step_by(&batch, support, ranking, false);
            assert_eq!(list(&batch, &stepped, 0, stepped.counts.len() / 2), [0, 9, 23, 24]);
            assert!(step_by(&batch, support, ranking, true).0.list == stepped.list);
        }
    }
}
