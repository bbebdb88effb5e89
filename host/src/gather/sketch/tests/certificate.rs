//! What is said of every head, held against f64.

use super::*;
use crate::attention::oracle::Sequence;
use half::{bf16, f16};
use kernels_gpu::gather::Rule;
use kernels_gpu::gather::sketch::{ScanShape, SettleShape};

/// Of four query heads over 64 blocks of 16, half of the mass of which may be left out.
pub(super) const SETTLE: SettleShape = SettleShape {
    scan: ScanShape {
        rule: Rule { block: 16, local: 1, k: 1 },
        group: 4,
        kv_heads: 1,
        max_blocks: 64,
        blocks: 64,
        softmax_scale: 0.125,
        budget_log2: 0.0,
    },
    budget: 0.5,
    splits: [1, 1],
    codes: 0,
};

/// Every verdict holds: the mass that a head skipped, the error of its output; and lists are lists.
pub(super) fn check<E: SketchElement>(batch: &Batch<E>, budget: Budget) -> Stepped {
    let stepped = step(batch, budget, false);
    assert!(words(&step(batch, budget, true)) == words(&stepped), "the CPU's own path: {budget:?}");
    let StepProblem { kv_heads, q_heads, head_dim, .. } = batch.problem;
    let (dim, group) = (head_dim as usize, (q_heads / kv_heads) as usize);
    let most = stepped.list.len() / stepped.counts.len();
    for (row, verdict) in stepped.verdicts.iter().enumerate() {
        let (pair, sequence) = (row / group, row / q_heads as usize);
        let (head, length) = (pair % kv_heads as usize, batch.lengths[sequence] as usize);
        let query: Vec<f64> =
            batch.query(sequence, row % q_heads as usize).iter().map(|x| f64::from(x.to_f32())).collect();
        let exact = Sequence::decode(length, 1, 1, dim);
        let rows = |pool: &[E], token: usize, to: &mut [f64]| read(batch, pool, sequence, head, token, to);
        let attended = exact.attend(
            &query,
            |_, token, to: &mut [f64]| rows(&batch.keys, token, to),
            |_, token, to: &mut [f64]| rows(&batch.values, token, to),
        );
        let output = &stepped.output[row * dim..][..dim];
        let error =
            output.iter().zip(&attended.output).map(|(a, b)| (f64::from(f32::from_bits(*a)) - b).powi(2));
        let error = error.sum::<f64>().sqrt();
        assert!(error <= verdict.bound.into(), "row {row}: {error} > {verdict:?}");
        if verdict.dense == 1 {
            continue;
        }
        let list = &stepped.list[pair * most..][..stepped.counts[pair] as usize];
        assert!(
            list.is_sorted_by(|a, b| a < b)
                && list.iter().all(|b| *b < (length as u32).div_ceil(budget.support.block))
        );
        let kept = |token: usize| list.contains(&(token as u32 / budget.support.block));
        let mut key = vec![0.0; dim];
        let (mut mass, mut of_kept) = (0f64, 0f64);
        for token in 0..length {
            rows(&batch.keys, token, &mut key);
            let logit: f64 = key.iter().zip(&query).map(|(k, q)| k * q).sum();
            let to = if kept(token) { &mut of_kept } else { &mut mass };
            *to += (logit / (dim as f64).sqrt() - attended.lse[0]).exp();
        }
        if let Some(certificate) = stepped.certificates.get(row).filter(|_| length > 0) {
            let off = (of_kept.ln() + attended.lse[0] - f64::from(f32::from_bits(stepped.lse[row]))).abs();
            assert!(off <= certificate.log_sum.into(), "row {row}: {off} > {certificate:?}");
        }
        assert!(mass <= verdict.mass.into(), "row {row}: {mass} > {verdict:?}");
        assert!(verdict.mass <= budget.skip, "row {row}: {verdict:?}");
        let left = (0..length).filter(|token| !kept(*token)).count();
        assert_eq!(verdict.tokens as usize, left);
        assert_eq!(stepped.kept[pair] as usize, length - left);
    }
    stepped
}

#[test]
fn every_verdict_holds_on_every_kind_of_input() {
    for input in Input::MADE {
        for (bits, codes) in [(4, false), (8, false), (4, true), (8, true)] {
            // Of codes a fifth of it is not chosen by.
            let skip = if codes { BUDGET.skip / 0.8 } else { BUDGET.skip };
            let budget = Budget { bits, codes, skip, ..BUDGET };
            let stepped = check(&batch::<f16>(PROBLEM, input, &[400, 1, 289, 32], 5), budget);
            // Where all blocks weigh the same, none can be left out.
            let flat = matches!(input, Input::Diffuse | Input::Ties | Input::Duplicates | Input::Extremal);
            // Codes of such keys may add any mass.
            let flat = flat || codes && input == Input::Huge;
            let skips = stepped.verdicts.iter().any(|v| v.dense == 0 && v.tokens > 0);
            assert!(skips || flat, "{input} {bits} {codes}");
        }
    }
}

#[test]
fn every_verdict_holds_for_every_shape() {
    let wide = StepProblem { head_dim: 128, q_heads: 11, kv_heads: 1, max_tokens: 1500, ..PROBLEM };
    for (block, skip) in [(16, 0.02), (32, 0.3), (64, 0.5), (128, 1.0)] {
        let support = Support { block, ..BUDGET.support };
        for input in [Input::Sharp, Input::Normal, Input::Real] {
            let of_two =
                check(&batch::<bf16>(wide, input, &[1500, 1151], 6), Budget { support, skip, ..BUDGET });
            let of_one =
                check(&batch::<f16>(wide, input, &[700], 6), Budget { support, skip, bits: 8, ..BUDGET });
            let verdicts = of_two.verdicts.iter().chain(&of_one.verdicts);
            assert!(verdicts.filter(|v| v.dense == 0).count() > 0, "{input} {block} {skip}");
        }
    }
}

/// Where lists are of any length and rows of blocks many, what is kept is cut finer than dense attention of
/// as many rows is; lists of `k` blocks are not, nor few rows, nor the rung.
#[test]
fn lists_of_any_length_are_cut_finer() {
    let device = device();
    let of = |sequences: u32, budget: Budget, max_tokens: u32| {
        let problem = StepProblem { sequences, max_tokens, ..PROBLEM };
        Plan::<f16>::new(&device, problem, budget).expect("a plan").splits()
    };
    let splits = |sequences: u32, skip: f32| of(sequences, Budget { skip, ..BUDGET }, 16_384);
    let rows = PROBLEM.kv_heads;
    assert_eq!([splits(16 / rows, 0.02), splits(16 / rows, 1.0)], [[16, 8], [8, 8]]);
    assert_eq!(splits(16 / rows - 1, 0.02)[0], splits(16 / rows - 1, 1.0)[0]);
    // Codes of short lists are not.
    let codes = |tokens| of(16 / rows, Budget { codes: true, ..BUDGET }, tokens)[0];
    assert_eq!([codes(16_384), codes(32_768)], [8, 16]);
    let lengths: Vec<u32> = (0..16 / rows).map(|i| if i == 1 { 1100 } else { 40 * i }).collect();
    let problem = StepProblem { max_tokens: 4608, ..PROBLEM };
    let batch = batch::<f16>(problem, Input::Normal, &lengths, 7);
    for codes in [false, true] {
        let stepped = check(&batch, Budget { bits: 8, skip: 0.5, codes, ..BUDGET });
        assert!(stepped.verdicts.iter().any(|v| v.dense == 0 && v.tokens > 300));
    }
}

/// The list is as long as the budget asks for: shorter for a larger one, everything for none, k for all of
/// it.
#[test]
fn the_budget_sets_the_length_of_the_list() {
    let batch = batch::<f16>(PROBLEM, Input::Sharp, &[400], 5);
    let kept = |skip: f32| {
        let stepped = check(&batch, Budget { skip, bits: 8, ..BUDGET });
        stepped.counts[0]
    };
    let counts = [1e-6, 0.001, 0.02, 0.2, 1.0].map(kept);
    assert!(counts.is_sorted_by(|a, b| a >= b), "{counts:?}");
    assert!(counts[2] < counts[0] && counts[3] < counts[2] && counts[4] == 3, "{counts:?}");
}

/// A head that left out more than its budget is attended to exactly, and says so; others stay as they are.
#[test]
fn a_head_over_its_budget_goes_to_the_dense_rung() {
    let batch = batch::<f16>(PROBLEM, Input::Normal, &[400, 33], 3);
    let budget = Budget { bits: 8, skip: 0.5, ..BUDGET };
    let all = step(&batch, Budget { skip: 1e-6, ..budget }, false);
    let within = step(&batch, budget, false);
    assert!(within.verdicts[..8].iter().all(|verdict| verdict.dense == 0 && verdict.tokens > 0));
    let masses: Vec<f32> = within.verdicts[..8].iter().map(|verdict| verdict.mass).collect();
    let most = masses.iter().copied().fold(0f32, f32::max);
    for (skip, over) in
        [(most, 0), (0.0, 8), (most.next_down(), masses.iter().filter(|m| **m == most).count())]
    {
        let stepped = step_judged_by(&batch, budget, skip, false);
        assert!(words(&step_judged_by(&batch, budget, skip, true)) == words(&stepped), "the CPU's own path");
        assert_eq!(stepped.verdicts.iter().filter(|verdict| verdict.dense == 1).count(), over);
        assert_eq!(stepped.wanted.iter().map(|word| word.count_ones()).sum::<u32>() as usize, over);
        for (row, verdict) in stepped.verdicts.iter().enumerate() {
            let from = if verdict.dense == 1 { &all } else { &within };
            if verdict.dense == 1 {
                assert!(verdict.tokens == 0 && verdict.mass == 0.0, "{verdict:?}");
                assert!(verdict.bound < within.verdicts[row].bound / 10.0, "{verdict:?}");
                continue;
            }
            assert_eq!(stepped.output[row * 64..][..64], from.output[row * 64..][..64]);
        }
    }
}

/// Of eight heads of a KV head each is found where it alone is over its budget, the last one too.
#[test]
fn each_of_eight_heads_goes_to_the_dense_rung_alone() {
    let problem = StepProblem { kv_heads: 1, ..PROBLEM };
    let mut batch = batch::<f16>(problem, Input::Normal, &[400], 3);
    let budget = Budget { bits: 8, skip: 0.5, ..BUDGET };
    let masses: Vec<f32> = step(&batch, budget, false).verdicts.iter().map(|verdict| verdict.mass).collect();
    let (heaviest, most) =
        masses.iter().copied().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b)).expect("eight heads");
    batch.queries.rotate_left(heaviest * 64);
    for place in 0..8 {
        let stepped = step_judged_by(&batch, budget, most.next_down(), false);
        assert_eq!(stepped.wanted, [1 << place]);
        assert!((0..8).all(|row| (stepped.verdicts[row].dense == 1) == (row == place)), "{place}");
        assert!(words(&step_judged_by(&batch, budget, most.next_down(), true)) == words(&stepped));
        batch.queries.rotate_right(64);
    }
}

/// However many thread blocks share the work of deciding, and however many rounds one takes for its share,
/// the bits are the same.
#[test]
fn shares_of_any_size_decide_alike() {
    let problem = StepProblem { sequences: 2, kv_heads: 1, max_tokens: 4800, ..PROBLEM };
    for (input, skip) in [(Input::Sharp, 0.1), (Input::Normal, 0.3), (Input::Normal, 1.0)] {
        let batch = batch::<f16>(problem, input, &[4700, 4200], 5);
        let budget = Budget { bits: 8, skip, ..BUDGET };
        let expected = words(&step(&batch, budget, true));
        // 293 distant blocks are two rounds of one thread block.
        for shares in [1, 2, 3, 19] {
            let stepped = step_by(&batch, budget, false, |plan| plan.decide_by(shares));
            assert!(words(&stepped) == expected, "{input} {skip} {shares}");
        }
    }
}

/// More blocks than masses can be counted of are refused before anything is set aside.
#[test]
fn more_blocks_than_can_be_counted_are_refused() {
    let problem = StepProblem { max_tokens: 16 * (1 << 23) + 16, ..PROBLEM };
    let said = Plan::<f16>::new(&device(), problem, BUDGET).expect_err("too many").to_string();
    assert!(said.contains("blocks of 16") && said.contains("8388608 blocks"), "{said}");
}

/// A key that nothing is known of is never left out, and costs its KV head alone.
#[test]
fn a_key_without_a_sketch_is_kept() {
    let mut batch = batch::<bf16>(PROBLEM, Input::Normal, &[400], 3);
    let at = batch.row(0, 0, 100);
    batch.keys[at] = bf16::from_f32(1.0e6);
    let stepped = check(&batch, Budget { bits: 8, skip: 0.5, ..BUDGET });
    let most = stepped.list.len() / 2;
    assert!(stepped.list[..stepped.counts[0] as usize].contains(&6));
    assert!(stepped.counts[0] < 25, "the others are chosen by what is known of them");
    assert!(stepped.verdicts[4..].iter().all(|verdict| verdict.tokens > 0), "{:?}", stepped.verdicts);
    assert!(stepped.list[most..][..stepped.counts[1] as usize].len() < 25);
}

/// A head whose log-sum-exp is far above its level, or whose left-out mass is near the largest f32: no share
/// of either is taken for a small one.
#[test]
fn what_cannot_be_told_goes_to_the_rung() {
    use kernels_gpu::gather::sketch::{Facts, Whole, verdict};
    let whole = Whole { kappa: 1.0, nu: 1.0, tokens: 512, reserved: 0 };
    let of = |mass: f32, lse: f32| {
        let skipped = Skipped { mass, moment: mass, level: 0.0, nu_rest: 1.0 };
        let facts = Facts { skipped, whole, query: 1.0, output: 1.0, lse, length: 1024, codes: None };
        verdict::<f16, 64>(&facts, SETTLE)
    };
    // As much kept as left out, and less.
    let even = of(1.0, 0.001);
    assert!(even.dense == 0 && (0.49..=0.5).contains(&even.mass), "{even:?}");
    assert_eq!(of(1.0, -0.01).dense, 1);
    // 2^160 kept: not more than 2^100 is counted.
    let much = of(2f32.powi(99), 160.0 * std::f32::consts::LN_2);
    assert!(much.dense == 0 && (0.33..0.34).contains(&much.mass), "{much:?}");
    assert_eq!(of(2.0e38, 128.0).dense, 1);
    assert_eq!(of(f32::INFINITY, 1.0).dense, 1);
    assert_eq!(of(f32::NAN, 1.0).dense, 1);
    assert_eq!(of(1.0, f32::NAN).dense, 1);
    assert_eq!(of(1.0, f32::INFINITY).dense, 1);
}

/// Weights of any size with Δ of any size are taken in without it; what is no number tells nothing.
#[test]
fn an_estimate_takes_off_delta() {
    use kernels_gpu::attention::PartialRow;
    use kernels_gpu::gather::sketch::estimated;
    for delta in [0.0f32, 0.3, 7.75, 126.5, 1300.25, 1.0e6] {
        let mut all = PartialRow::EMPTY;
        // One after another further up, further down, and far below what there is.
        for reference in [2000.0, 2100.0, 1990.0, 1500.0] {
            all = estimated(all, reference, 3.0, delta);
        }
        let PartialRow { reference, sum } = all;
        let expected = 2100.0 + 3f64.log2() - f64::from(delta);
        let found = f64::from(reference) + f64::from(sum).log2();
        // The level is rounded to 2^−24 of it or of 2100.
        assert!((found - expected).abs() <= 1e-7 * f64::from(delta) + 2e-4, "{delta}: {found} {expected}");
    }
    let some = estimated(PartialRow::EMPTY, 5.0, 1.0, 2.0);
    for (weight, delta) in [(f32::NAN, 1.0), (1.0, f32::NAN), (1.0, f32::INFINITY), (f32::INFINITY, 0.0)] {
        assert_eq!(estimated(some, 5.0, weight, delta), some);
    }
    assert_eq!(estimated(some, f32::INFINITY, f32::NAN, 1.0), some);
}

/// A block begins with the reference of the one before, unless that is far off.
#[test]
fn a_reference_follows_what_is_largest() {
    use kernels_gpu::gather::sketch::moved;
    for (largest, fresh, expected) in [
        (15.0, false, 0.0),
        (15.5, false, 16.0),
        (-1000.0, false, 0.0),
        (-40.0, true, 0.0),
        (-40.5, true, -40.0),
        (15.5, true, 16.0),
        (f32::NAN, false, 0.0),
        (f32::NAN, true, -1.0e30),
    ] {
        assert_eq!(moved(0.0, largest, fresh), expected, "{largest} {fresh}");
    }
}
