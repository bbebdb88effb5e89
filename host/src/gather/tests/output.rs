//! The output: masked attention over the list, within the bound of dense attention.

use super::super::oracle;
use super::*;
use crate::attention::dense::bound;
use crate::attention::oracle::Sequence;
use half::{bf16, f16};

/// Every row is within the bound of dense attention of masked attention in f64 over the list.
fn check<E: GatherElement>(batch: &Batch<E>, support: Support) {
    check_by(batch, support, Ranking::default());
}

/// The same with blocks ranked in any way.
pub(super) fn check_by<E: GatherElement>(batch: &Batch<E>, support: Support, ranking: Ranking) {
    let (stepped, plan) = step_by(batch, support, ranking, false);
    assert!(step_by(batch, support, ranking, true).0 == stepped, "the CPU's own path");
    let lists = plan.lists() as usize;
    let (dim, group) = (batch.problem.head_dim as usize, lists * plan.attended().group() as usize);
    for sequence in 0..batch.lengths.len() {
        let length = batch.lengths[sequence] as usize;
        for head in 0..batch.problem.kv_heads as usize {
            let row = |pool: &[E], token: usize, to: &mut [f64]| read(batch, pool, sequence, head, token, to);
            let key = |token: usize, to: &mut [f64]| row(&batch.keys, token, to);
            let value = |token: usize, to: &mut [f64]| row(&batch.values, token, to);
            for (q, query) in queries(batch, sequence, head).iter().enumerate() {
                let blocks = list(batch, &stepped, sequence, head * lists + q * lists / group);
                let tokens = oracle::tokens(&blocks, support.block as usize, length);
                let (output, lse) = oracle::masked(&tokens, query, key, value);
                let of = Sequence::decode(tokens.len(), 1, 1, dim);
                let (bounds, lse_bound) = bound::row::<E>(
                    &of,
                    plan.splits(),
                    query,
                    |_, token, to: &mut [f64]| key(tokens[token], to),
                    |_, token, to: &mut [f64]| value(tokens[token], to),
                    0,
                    0,
                );
                let at = (sequence * batch.problem.kv_heads as usize + head) * group + q;
                for (d, (expected, bound)) in output.iter().zip(&bounds).enumerate() {
                    let found = f64::from(f32::from_bits(stepped.output[at * dim + d]));
                    assert!((found - expected).abs() <= *bound, "{found}, {expected} ± {bound}: {support:?}");
                }
                let found = f64::from(f32::from_bits(stepped.lse[at]));
                assert!((found - lse).abs() <= lse_bound, "log-sum {found}, {lse} ± {lse_bound}");
            }
        }
    }
}

#[test]
fn the_output_is_masked_attention() {
    for input in [Input::Normal, Input::Sharp, Input::Dominant, Input::Wide, Input::Huge] {
        let support = Support { k: 3, block: 32, local: 2 };
        check(&batch::<f16>(PROBLEM, input, &[400, 1, 289, 32], 5), support);
        let problem = StepProblem { head_dim: 128, q_heads: 7, kv_heads: 1, max_tokens: 1500, ..PROBLEM };
        check(&batch::<bf16>(problem, input, &[1500, 1151], 6), Support { block: 128, ..support });
    }
    for head_dim in [96, 256] {
        let problem = StepProblem { head_dim, q_heads: 3, kv_heads: 1, max_tokens: 700, ..PROBLEM };
        let support = Support { k: 2, block: 64, local: 1 };
        check(&batch::<f16>(problem, Input::Sharp, &[700, 640, 33], 5), support);
        check(&batch::<bf16>(problem, Input::Normal, &[699, 65], 6), support);
    }
}

/// A list of everything: exact attention.
#[test]
fn with_all_blocks_attention_is_exact() {
    let support = Support { k: 1000, block: 16, local: 1 };
    let batch = batch::<f16>(PROBLEM, Input::Sharp, &[400, 17], 5);
    let (stepped, _) = step(&batch, support, false);
    assert_eq!(stepped.counts, [25, 25, 2, 2]);
    assert_eq!(stepped.kept, [400, 400, 17, 17]);
    check(&batch, support);
}

/// The list has the block that matters: attention to it is close to exact attention, and further off
/// without it.
#[test]
fn what_matters_is_found() {
    let batch = batch::<f16>(PROBLEM, Input::Dominant, &[400], 5);
    let support = Support { k: 2, block: 16, local: 2 };
    let (stepped, _) = step(&batch, support, false);
    for head in 0..2 {
        assert!(list(&batch, &stepped, 0, head).contains(&(400 / 3 / 16)), "head {head}");
    }
}
