//! What is kept attended to by codes: one bound on what they add and on what is left out.

use super::certificate::{SETTLE, check};
use super::scheme::{GEOMETRY, chunk, chunk_of, selection};
use super::*;
use crate::certified::{CertifiedCache, Policy};
use crate::gather::SketchedCodes;
use crate::gather::sketch::OF_CODES;
use crate::kv::proof::{Options, Trial, by_workload};
use crate::kv::{Capacity, Chunk, KvCache, Opening, Source};
use half::{bf16, f16};
use kernels_gpu::certified::Certificate;
use kernels_gpu::gather::sketch::{Codes, Facts, SettleShape, Whole, verdict};

const CODED: Budget = Budget { codes: true, ..BUDGET };

#[test]
fn both_errors_are_within_one_bound_for_every_shape() {
    let wide = StepProblem { head_dim: 128, q_heads: 11, kv_heads: 1, max_tokens: 1500, ..PROBLEM };
    for (block, skip) in [(16, 0.02), (32, 0.3), (128, 1.0)] {
        let support = Support { block, ..BUDGET.support };
        let budget = Budget { support, skip, ..CODED };
        for input in [Input::Sharp, Input::Normal, Input::Real] {
            let of_two = check(&batch::<bf16>(wide, input, &[1500, 1151], 6), budget);
            let of_one = check(&batch::<f16>(wide, input, &[700], 6), Budget { bits: 8, ..budget });
            let verdicts = of_two.verdicts.iter().chain(&of_one.verdicts);
            let skips = verdicts.clone().any(|v| v.dense == 0 && v.tokens > 0);
            assert!(skips || input != Input::Sharp, "{input} {block} {skip}");
            assert!(verdicts.filter(|v| v.dense == 0).count() > 0, "{input} {block} {skip}");
        }
    }
}

/// The same blocks as by originals, whatever codes are: these are chosen by sketches alone. Outputs differ,
/// and bounds say so.
#[test]
fn codes_do_not_choose() {
    let batch = batch::<f16>(PROBLEM, Input::Normal, &[400, 77], 5);
    // With codes a fifth of the budget is left for what they add.
    let [coded, plain] =
        [(CODED, 0.5), (BUDGET, 0.4)].map(|(of, skip)| check(&batch, Budget { skip, bits: 8, ..of }));
    assert!(coded.verdicts.iter().all(|verdict| verdict.dense == 0));
    assert_eq!((&coded.list, &coded.counts, &coded.skipped), (&plain.list, &plain.counts, &plain.skipped));
    assert!(coded.output != plain.output);
    for (coded, plain) in coded.verdicts.iter().zip(&plain.verdicts).filter(|(coded, _)| coded.dense == 0) {
        assert!(coded.tokens == plain.tokens && coded.bound > plain.bound, "{coded:?} {plain:?}");
        // What a logit is off by may have been added to the mass that is attended to.
        assert!(coded.tokens == 0 || coded.mass > plain.mass, "{coded:?} {plain:?}");
    }
}

/// A head over its budget has the bits that it has without codes: those of the dense rung.
#[test]
fn a_head_over_its_budget_is_attended_to_by_originals() {
    let batch = batch::<f16>(PROBLEM, Input::Normal, &[400, 33], 3);
    let [coded, plain] =
        [CODED, BUDGET].map(|budget| step_judged_by(&batch, Budget { skip: 0.5, ..budget }, 0.0, false));
    assert!(coded.verdicts[..8].iter().all(|verdict| verdict.dense == 1));
    let dim = PROBLEM.head_dim as usize;
    assert_eq!(coded.output[..8 * dim], plain.output[..8 * dim]);
    assert_eq!((&coded.lse[..8], &coded.verdicts[..8]), (&plain.lse[..8], &plain.verdicts[..8]));
}

/// A query that is no number is one of which codes say nothing.
#[test]
fn a_query_that_is_no_number_has_no_bound() {
    let mut batch = batch::<f16>(PROBLEM, Input::Normal, &[400], 3);
    batch.queries[3 * 64 + 5] = f16::NAN;
    for length in [400, 16] {
        batch.lengths[0] = length;
        let budget = Budget { skip: 1.0, ..CODED };
        let stepped = step(&batch, budget, false);
        assert!(words(&step(&batch, budget, true)) == words(&stepped));
        let plain = step(&batch, Budget { skip: 1.0, ..BUDGET }, false);
        for (head, (verdict, plain)) in stepped.verdicts.iter().zip(&plain.verdicts).enumerate() {
            assert_eq!(verdict.bound.is_nan(), head == 3, "{verdict:?}");
            // What the head costs others of its KV head where something is left out, it costs them anyway.
            assert_eq!(verdict.dense == 1, plain.dense == 1 || head == 3, "{verdict:?} {plain:?}");
        }
    }
}

/// The shares and bounds that follow from certificates, each term by itself.
#[test]
fn a_certificate_is_taken_in_term_by_term() {
    let shape = SettleShape { budget: 0.9, codes: 1, ..SETTLE };
    let skipped = Skipped { mass: 1.0, moment: 4.0, level: 0.0, nu_rest: 5.0 };
    let of = |tokens: u32, certificate: Certificate| {
        let whole = Whole { kappa: 0.001, nu: 0.001, tokens, reserved: 0 };
        let codes = Some(Codes::of(&certificate));
        let facts = Facts { skipped, whole, query: 0.001, output: 2.0, lse: 0.0, length: 1024, codes };
        verdict::<f16, 64>(&facts, shape)
    };
    let own = Certificate { likely: 0.25, log_sum: 0.5, ..Certificate::UNKNOWN };
    // As much mass left out as attended to, but for e^0.5 that codes may have added to that.
    let share = 1.0 / (1.0 + (-0.5f64).exp());
    let near = |found: f32, expected: f64| (0.0..1e-3).contains(&(f64::from(found) / expected - 1.0));
    let all = of(512, own);
    assert!(all.dense == 0 && all.tokens == 512 && near(all.mass, share), "{all:?}");
    // Moment and mass over what is kept, or the largest value left out: the lesser; and the codes' own.
    let norm = 2.25;
    let least = f64::min((4.0 + norm) * 0.5f64.exp(), share * (5.0 + norm));
    assert!(near(all.bound, 0.25 + least), "{all:?} {}", 0.25 + least);
    // Nothing left out: the codes' own.
    let none = of(0, own);
    assert!(none.dense == 0 && none.mass == 0.0 && near(none.bound, 0.25), "{none:?}");
    for log_sum in [f32::NAN, f32::INFINITY] {
        let said = Certificate { log_sum, ..own };
        assert!(of(512, said).dense == 1 && of(0, said).dense == 1, "{said:?}");
        // The rung's bound, not the codes'.
        assert!(of(512, said).bound < 1e-3, "{:?}", of(512, said));
    }
    assert!(of(512, Certificate { log_sum: 3.0, ..own }).dense == 1, "over its budget");
}

fn cache(capacity: Capacity, budget: Budget, kernels: bool) -> SketchedCodes {
    let (device, selection) = (device(), selection("gather:certified/tiles=int8-int4"));
    let opening =
        Opening { device: &device, geometry: GEOMETRY, rope: None, capacity, selection: &selection };
    let cache = SketchedCodes::new(&opening, budget).expect("a cache");
    if kernels { cache.with_kernels() } else { cache }
}

/// Prompts and steps in turn, over edges of blocks: the bits of the kernels, a verdict on every head, bytes
/// as they are.
#[test]
fn a_cache_is_the_same_by_kernels_and_by_slices() {
    let (mut own, mut kernels) = (cache(120.into(), CODED, false), cache(120.into(), CODED, true));
    for tokens in [40, 1, 1, 20, 1, 1, 1, 30, 1, 1, 1] {
        let of = Chunk::of_one(tokens);
        assert!(chunk(&mut kernels, of) == chunk(&mut own, of), "{tokens} tokens to {}", own.tokens());
        let report = own.report().expect("a report");
        assert_eq!(report, kernels.report().expect("a report"));
        if tokens > 1 {
            assert!(report.heads.is_empty(), "a prompt is exact");
            continue;
        }
        assert_eq!(report.heads.len(), 8);
        for head in &report.heads {
            assert!(head.bound.is_some_and(f32::is_finite) && head.skipped_mass.is_some_and(|m| m <= 0.1));
            assert!(head.skipped.is_multiple_of(16) && head.source == Source::Stored || head.skipped == 0);
        }
    }
    assert_eq!(own.tokens(), 98);
    // Six full blocks and two tokens; sketches of four tiles.
    let of_codes =
        4 * (6 * 16 * 128 + 2 * 256) + 2 * 6 * 2 * size_of::<crate::certified::Annotation>() as u64;
    assert_eq!(own.bytes() - of_codes, 2 * 2 * 4 * 324 * 4);
    assert!(own.host_bytes() >= 98 * 1024);
}

/// Where nothing may be left out a step has the bits of codes rounded by chance, and their bound.
#[test]
fn all_of_it_is_what_codes_have() {
    let mut own = cache(160.into(), Budget { skip: 1e-6, ..CODED }, false);
    let mut all = CertifiedCache::new(&device(), GEOMETRY, 160, OF_CODES).expect("a cache");
    for tokens in [40, 1, 1, 60, 1, 1] {
        let of = Chunk::of_one(tokens);
        assert!(chunk(&mut own, of) == chunk(&mut all, of), "{tokens} tokens");
    }
    let [own, all] = [own.report(), all.report()].map(|report| report.expect("a report").heads);
    assert!(own.len() == 8 && own.iter().all(|head| head.skipped == 0 && head.source == Source::Stored));
    for (own, all) in own.iter().zip(&all) {
        let [own, all] = [own, all].map(|head| head.bound.expect("a bound"));
        // They add up in another order, each KV head being a sequence of its own.
        assert!((own / all - 1.0).abs() < 1e-3, "{own} {all}");
    }
    const { assert!(1.5 * OF_CODES.risk <= Policy::SOUND.risk) };
}

/// Sequences beside each other: one forked in the middle of a block, whose text goes on otherwise, and one
/// that joins in the place of the fork, with fewer tokens. Each gets what it gets alone.
#[test]
fn sequences_are_alone_in_their_bits() {
    let capacity = Capacity { tokens: 120, sequences: 2 };
    // Lists of the best block alone: sketches tell.
    let budget = Budget { skip: 1.0, ..CODED };
    let stream = Stream::new(&device()).expect("a stream");
    let heads = |cache: &SketchedCodes| cache.report().expect("a report").heads;
    // As row 0 of a cache of its own.
    let steps = |many: &mut SketchedCodes, alone: &mut [SketchedCodes; 2], texts: [u64; 2]| {
        for _ in 0..28 {
            let rows = chunk_of(many, Chunk::Step, |row| texts[row]);
            let all = heads(many);
            for (row, own) in alone.iter_mut().enumerate() {
                let one = chunk_of(own, Chunk::Step, |_| texts[row]);
                for layer in 0..2 {
                    assert!(rows[2 * layer + row] == one[layer], "row {row}");
                }
                // Verdicts say more than outputs: where all is kept, these are the same whatever sketches
                // say.
                for (all, own) in all.chunks(2 * 4).zip(heads(own).chunks(4)) {
                    assert_eq!(all[4 * row..4 * (row + 1)], *own, "row {row}");
                }
            }
        }
    };
    let prompt = |tokens: usize, text: u64| {
        let mut one = cache(capacity, budget, false);
        chunk_of(&mut one, Chunk::Prompt { sequence: 0, tokens }, |_| text);
        one
    };
    let mut many = cache(capacity, budget, false);
    chunk_of(&mut many, Chunk::Prompt { sequence: 0, tokens: 70 }, |_| 1);
    assert_eq!(many.fork(&stream, 0).expect("forked"), 1);
    let mut alone = [prompt(70, 1), prompt(70, 1)];
    steps(&mut many, &mut alone, [1, 2]);
    many.leave(&stream, 1).expect("left");
    assert_eq!(many.join(&stream).expect("joined"), 1);
    chunk_of(&mut many, Chunk::Prompt { sequence: 1, tokens: 33 }, |_| 3);
    alone[1] = prompt(33, 3);
    // The first has room for as many more.
    for _ in 0..14 {
        let rows = chunk_of(&mut many, Chunk::Step, |row| [1, 3][row]);
        let one = chunk_of(&mut alone[1], Chunk::Step, |_| 3);
        assert!(rows[1] == one[0] && rows[3] == one[1]);
        for (all, own) in heads(&many).chunks(2 * 4).zip(heads(&alone[1]).chunks(4)) {
            assert_eq!(all[4..], *own);
        }
    }
}

/// What a log-sum-exp is off by is above its bound no more often than that says, with odds at which it could
/// be; a bound an eighth as large would be found out.
#[test]
fn log_sums_are_off_by_more_as_rarely_as_is_said() {
    const RISK: f32 = 0.2;
    let policy = Policy { risk: RISK, ..OF_CODES };
    let problem = StepProblem { sequences: 4, max_tokens: 160, ..PROBLEM };
    let (mut heads, mut above, mut near) = (0, 0, 0);
    for seed in 0..60 {
        let input = [Input::Sharp, Input::Normal, Input::Outlier][seed as usize % 3];
        let batch = batch::<f16>(problem, input, &[160, 96, 48, 144], seed);
        let device = device();
        let rounding = policy.rounding(seed as u32);
        let trial = crate::certified::proof::Trial::new(&device, problem, batch.blocks()).expect("a trial");
        let mut trial = trial.with_rounding(rounding);
        trial.load(&batch).expect("codes");
        trial.ask(&batch).expect("queries");
        let mut plan = trial.plan(&policy).expect("a plan");
        let mut out = plan.allocate().expect("buffers");
        let found = trial.step(&mut plan, &mut out).expect("a step");
        for (row, certificate) in found.certificates.iter().enumerate() {
            let (sequence, head) = (row / 8, row % 8);
            let query: Vec<f64> = batch.query(sequence, head).iter().map(|x| f64::from(x.to_f32())).collect();
            let mut key = vec![0.0; 64];
            let logits: Vec<f64> = (0..batch.lengths[sequence] as usize)
                .map(|token| {
                    read(&batch, &batch.keys, sequence, head / 4, token, &mut key);
                    key.iter().zip(&query).map(|(k, q)| k * q).sum::<f64>() / 8.0
                })
                .collect();
            let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let exact = most + logits.iter().map(|x| (x - most).exp()).sum::<f64>().ln();
            let off = (exact - f64::from(found.lse[row])).abs();
            // What the worst case bounds says nothing of the odds.
            if certificate.log_sum < certificate.delta {
                heads += 1;
                above += u32::from(off > certificate.log_sum.into());
                near += u32::from(8.0 * off > certificate.log_sum.into());
            }
        }
    }
    println!("{heads} heads: {above} above their bound, {near} above an eighth of it");
    // Of six events four have the risk.
    assert!(f64::from(above) <= f64::from(RISK) * 1.5 * f64::from(heads), "{above} of {heads}");
    // Of an eighth of the bound that would not hold.
    assert!(heads > 500 && f64::from(near) > f64::from(RISK) * 1.5 * f64::from(heads), "{near} of {heads}");
}

/// Head-steps on made-up inputs, hostile ones among them: every bound holds.
#[test]
fn head_steps_are_within_their_bounds() {
    let options = Options { head_steps: 200, max_tokens: 300, long_tokens: 500, seed: 3 };
    let device = device();
    let selection = selection("gather:certified/tiles=int8-int4/k=1/block=16/local=1/skip=0.1");
    let trial = Trial { device: &device, selection: &selection, options, layers: &[] };
    let findings = by_workload(&trial, &mut |_| ()).expect("proven");
    assert_eq!(findings.violations, Vec::<String>::new());
    assert!(findings.total.bounded == findings.total.head_steps && findings.total.head_steps >= 200);
    assert!(findings.total.sources[0] > 100, "{:?}", findings.total.sources);
}
