//! What holds of every output, on every device.

use crate::{PROBLEM, devices};
use ferrokv::host::dense::sample::{Input, Sample};
use ferrokv::host::dense::{DenseElement, HEAD_DIMS, Plan, Problem};
use half::{bf16, f16};
use proptest::prelude::*;

/// Every output and log-sum is within its bound of the formula, and every device gives the same bits. Returns
/// the largest part of a bound that was used.
pub fn holds<E: DenseElement>(sample: &Sample<E>, seed: u64) -> f64 {
    let paged = sample.paged(seed, 2);
    let mut first: Option<(Vec<u32>, Vec<u32>)> = None;
    let mut worst = 0f64;
    for device in devices() {
        let splits = Plan::<E>::new(device, sample.problem).unwrap().splits();
        let (output, lse) = sample.run(device, &paged).unwrap();
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let got = (bits(&output), bits(&lse));
        if let Some(first) = &first {
            assert_eq!(*first, got, "{:?} differs from the emulator", device.kind());
            continue;
        }
        first = Some(got);
        let rows = sample.problem.query_rows() / sample.lengths.len();
        let dim = sample.problem.head_dim as usize;
        for sequence in 0..sample.lengths.len() {
            let (truth, bound) = sample.truth(sequence, splits);
            let outputs = &output[sequence * rows * dim..][..rows * dim];
            let place = |i: usize| {
                format!("{:?} sequence {sequence} row {} dim {}", sample.problem, i / dim, i % dim)
            };
            for (i, got) in outputs.iter().enumerate() {
                let error = (f64::from(*got) - truth.output[i]).abs();
                assert!(
                    error <= bound.output[i],
                    "{}: {got} for {}: {error:e} > {:e}",
                    place(i),
                    truth.output[i],
                    bound.output[i]
                );
                worst = worst.max(error / bound.output[i].max(1e-30));
            }
            for (row, got) in lse[sequence * rows..][..rows].iter().enumerate() {
                let want = truth.lse[row];
                if want == f64::NEG_INFINITY {
                    assert_eq!(*got, f32::NEG_INFINITY);
                    assert!(outputs[row * dim..][..dim].iter().all(|x| x.to_bits() == 0), "zeros for no key");
                    continue;
                }
                let error = (f64::from(*got) - want).abs();
                assert!(
                    error <= bound.lse[row],
                    "{}: lse {got} for {want}: {error:e} > {:e}",
                    place(row * dim),
                    bound.lse[row]
                );
            }
        }
    }
    worst
}

/// A batch of up to three sequences.
fn batches() -> impl Strategy<Value = (Problem, Vec<u32>, Input, u64)> {
    let length = prop_oneof![0u32..4, 14u32..19, 62u32..67, 100u32..400];
    let rows = (1u32..3, prop_oneof![Just(1u32), Just(4), Just(7), Just(8), 1u32..17], 1u32..4);
    let input = (0usize..Input::ALL.len()).prop_map(|i| Input::ALL[i]);
    (proptest::collection::vec(length, 1..4), rows, 0usize..4, 0u32..600, input, any::<u64>()).prop_map(
        |(lengths, (kv_heads, group, query_tokens), dim, room, input, seed)| {
            let longest = lengths.iter().copied().max().unwrap_or(0);
            let problem = Problem {
                sequences: lengths.len() as u32,
                q_heads: kv_heads * group,
                kv_heads,
                head_dim: HEAD_DIMS[dim],
                query_tokens,
                max_tokens: (longest + room).max(1),
            };
            (problem, lengths, input, seed)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn outputs_are_within_their_bounds((problem, lengths, input, seed) in batches()) {
        holds(&Sample::<f16>::new(problem, &lengths, input, seed), seed);
        holds(&Sample::<bf16>::new(problem, &lengths, input, seed), seed);
    }
}

/// The lengths around every edge, of every instance.
#[test]
fn lengths_around_every_edge() {
    let lengths = [0, 1, 15, 16, 17, 63, 64, 65, 129];
    for head_dim in HEAD_DIMS {
        let problem = Problem { sequences: 9, q_heads: 4, kv_heads: 1, head_dim, max_tokens: 144, ..PROBLEM };
        holds(&Sample::<f16>::new(problem, &lengths, Input::Normal, 1), 2);
        holds(&Sample::<bf16>::new(problem, &lengths, Input::Normal, 1), 2);
    }
}

/// Numbers that are hard on a softmax, in one split and in several.
#[test]
fn hostile_numbers() {
    for input in Input::ALL {
        for (max_tokens, query_tokens) in [(310, 1), (310, 3)] {
            let problem = Problem { q_heads: 5, kv_heads: 1, query_tokens, max_tokens, ..PROBLEM };
            holds(&Sample::<f16>::new(problem, &[303], input, 8), 3);
            holds(&Sample::<bf16>::new(problem, &[303], input, 8), 3);
        }
    }
}

/// Scores of some tens of millions, one above the other: raising the reference must not overflow a
/// probability. 2^24 to 2^28 in log2 units is where an f32 less 15 is rounded.
#[test]
fn growing_scores_past_two_to_the_24() {
    let problem = Problem { q_heads: 1, kv_heads: 1, max_tokens: 256, ..PROBLEM };
    for start in [8000f32, 11000.0, 16000.0, 22000.0, 31000.0, 45000.0] {
        let mut sample = Sample::<f16>::new(problem, &[256], Input::Normal, 4);
        sample.queries = vec![f16::from_f32(start); 64];
        for (token, key) in sample.keys[0].chunks_mut(64).enumerate() {
            key.fill(f16::ZERO);
            // Steps of the last place of the score.
            key[0] = f16::from_f32(start);
            key[1] = f16::from_f32((token / 2) as f32 / 512.0);
        }
        holds(&sample, 9);
    }
}

/// On ordinary numbers f16 attention is as exact as f32 sums are: the bound is no excuse.
#[test]
fn ordinary_numbers_are_far_more_exact_than_the_cache() {
    let problem = Problem { head_dim: 128, max_tokens: 600, ..PROBLEM };
    let device = &devices()[0];
    let sample = Sample::<f16>::new(problem, &[600], Input::Normal, 5);
    let (output, _) = sample.run(device, &sample.paged(1, 0)).unwrap();
    let splits = Plan::<f16>::new(device, problem).unwrap().splits();
    let (truth, bound) = sample.truth(0, splits);
    let worst = output.iter().zip(&truth.output).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
    let largest = truth.output.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    assert!(worst < largest * 4e-6, "{worst:e} of {largest}");
    let loosest = bound.output.iter().copied().fold(0.0, f64::max);
    assert!(loosest < largest * 2e-3, "{loosest:e} of {largest}");
}
