//! What must not change a result, and what may change it only within the bound.

use crate::{PROBLEM, devices};
use ferrokv::host::dense::sample::{Input, Sample};
use ferrokv::host::dense::{Plan, Problem};
use half::{bf16, f16};

fn bits((output, lse): (Vec<f32>, Vec<f32>)) -> (Vec<u32>, Vec<u32>) {
    let of = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    (of(output), of(lse))
}

/// Where a block lies is nothing to the result; and what lies where no token is, neither: `paged` puts NaN
/// there.
#[test]
fn the_order_of_blocks_in_the_pool_changes_no_bit() {
    let problem = Problem { sequences: 2, query_tokens: 2, max_tokens: 300, ..PROBLEM };
    let sample = Sample::<bf16>::new(problem, &[290, 37], Input::Normal, 1);
    for device in devices() {
        let mut first = None;
        for (seed, spare) in [(1, 0), (2, 0), (3, 40)] {
            let got = bits(sample.run(device, &sample.paged(seed, spare)).unwrap());
            assert_eq!(*first.get_or_insert(got.clone()), got, "order {seed}");
        }
    }
}

/// Poison of another kind in the tails: infinities, and the largest finite numbers.
#[test]
fn what_lies_behind_the_last_token_changes_no_bit() {
    let sample = Sample::<f16>::new(PROBLEM, &[71], Input::Normal, 1);
    let paged = sample.paged(1, 1);
    let device = &devices()[0];
    let expected = bits(sample.run(device, &paged).unwrap());
    for other in [f16::INFINITY, f16::NEG_INFINITY, f16::MAX, f16::ZERO] {
        let mut changed = paged.clone();
        for x in changed.keys.iter_mut().chain(&mut changed.values).filter(|x| x.is_nan()) {
            *x = other;
        }
        assert_eq!(bits(sample.run(device, &changed).unwrap()), expected, "{other}");
    }
}

/// Promised: in a batch of as many sequences with the same `max_tokens`, the others do not matter. Alone or
/// in a batch of another size, the bits are the same if the splits are; else the results differ within their
/// bounds, which `properties` checks of each.
#[test]
fn other_sequences_of_the_batch_change_no_bit() {
    let batch = Problem { sequences: 3, max_tokens: 600, ..PROBLEM };
    let rows = (batch.q_heads * batch.head_dim) as usize;
    let lengths = [250, 600, 3];
    let sample = Sample::<f16>::new(batch, &lengths, Input::Normal, 6);
    let device = &devices()[0];
    let together = bits(sample.run(device, &sample.paged(1, 0)).unwrap());
    assert_eq!(Plan::<f16>::new(device, batch).unwrap().splits(), 3);

    // Other neighbours.
    let mut others = Sample::<f16>::new(batch, &[250, 0, 77], Input::Wide, 99);
    others.queries[..rows].copy_from_slice(&sample.queries[..rows]);
    others.keys[0] = sample.keys[0].clone();
    others.values[0] = sample.values[0].clone();
    let beside = bits(others.run(device, &others.paged(2, 1)).unwrap());
    assert_eq!(beside.0[..rows], together.0[..rows]);
    assert_ne!(beside.0[rows..], together.0[rows..]);

    // Alone: this many tokens are cut into three parts whatever the batch is.
    let alone = Problem { sequences: 1, ..batch };
    assert_eq!(Plan::<f16>::new(device, alone).unwrap().splits(), 3);
    for (sequence, length) in lengths.into_iter().enumerate() {
        let single = Sample {
            problem: alone,
            lengths: vec![length],
            queries: sample.queries[sequence * rows..][..rows].to_vec(),
            keys: vec![sample.keys[sequence].clone()],
            values: vec![sample.values[sequence].clone()],
        };
        let got = bits(single.run(device, &single.paged(4, 0)).unwrap());
        assert_eq!(got.0, together.0[sequence * rows..][..rows], "sequence {sequence}");
    }
}

/// Room for more tokens means more splits: other bits, the same numbers within the bounds.
#[test]
fn more_splits_stay_within_the_bound() {
    let mut outputs = Vec::new();
    for max_tokens in [400, 1000, 4000] {
        let problem = Problem { kv_heads: 1, q_heads: 4, max_tokens, ..PROBLEM };
        let sample = Sample::<f16>::new(problem, &[390], Input::Normal, 2);
        crate::properties::holds(&sample, 3);
        outputs.push(sample.run(&devices()[0], &sample.paged(3, 0)).unwrap().0);
    }
    for other in &outputs[1..] {
        let apart = outputs[0].iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < 2e-6, "{apart:e}");
    }
}

/// A query head of each KV head alone gives what it gives in its group: rows do not meet.
#[test]
fn rows_do_not_meet() {
    let problem = Problem { q_heads: 12, kv_heads: 1, max_tokens: 100, ..PROBLEM };
    let sample = Sample::<f16>::new(problem, &[93], Input::Dominant, 2);
    let device = &devices()[0];
    let paged = sample.paged(3, 0);
    let (together, lse) = sample.run(device, &paged).unwrap();
    for head in [0, 3, 7, 8, 11] {
        let single = Sample {
            problem: Problem { q_heads: 1, ..problem },
            queries: sample.queries[head * 64..][..64].to_vec(),
            ..sample.clone()
        };
        let (alone, alone_lse) = single.run(device, &paged).unwrap();
        assert_eq!(alone, together[head * 64..][..64], "head {head}");
        assert_eq!(alone_lse, lse[head..][..1]);
    }
}

/// Query tokens in one call are what they are one by one, each with as many keys as it sees.
#[test]
fn query_tokens_see_what_they_see_alone() {
    let problem = Problem { query_tokens: 3, max_tokens: 100, ..PROBLEM };
    let sample = Sample::<f16>::new(problem, &[81], Input::Normal, 2);
    let device = &devices()[0];
    let paged = sample.paged(3, 0);
    let (together, _) = sample.run(device, &paged).unwrap();
    let rows = (problem.q_heads * problem.head_dim) as usize;
    for token in 0..3 {
        let single = Sample {
            problem: Problem { query_tokens: 1, ..problem },
            lengths: vec![79 + token as u32],
            queries: sample.queries[token * rows..][..rows].to_vec(),
            ..sample.clone()
        };
        assert_eq!(single.run(device, &paged).unwrap().0, together[token * rows..][..rows], "token {token}");
    }
}
