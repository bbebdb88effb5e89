//! Steps by the list of an earlier one: as far from exact attention as they say, whatever the list has in it.

use super::*;

/// Every block from the second step on.
const ALL_CARRIED: Policy = Policy { renew: 1, ..ALL };

/// Steps of a batch, each with queries of its own: what they return, and exact attention.
fn steps<E: StepElement + CertifiedElement>(
    trial: &mut Trial<E>,
    plan: &mut ferrokv::host::certified::StepPlan<E>,
    batches: &[Batch<E>],
) -> Vec<Returned> {
    let mut out = plan.allocate().unwrap();
    let asked = batches.iter().map(|batch| {
        trial.load(batch).unwrap();
        trial.ask(batch).unwrap();
        trial.step(plan, &mut out).unwrap()
    });
    asked.collect()
}

/// The same sequences at other lengths, and from the third on others in their places.
fn batches<E: StepElement>(problem: StepProblem) -> Vec<Batch<E>> {
    let mut sequences = EDGES;
    (0..7u32)
        .map(|i| {
            if i == 3 {
                sequences.reverse();
            }
            let lengths = sequences.map(|(input, length)| (input, (length + 11 * i).min(problem.max_tokens)));
            Batch::new(problem, &lengths, u64::from(i / 3), 5)
        })
        .collect()
}

fn lists_hold<E: StepElement + CertifiedElement>() {
    let (mut rungs, mut promoted) = ([0; 5], 0);
    for (group, head_dim) in [(1, 64), (4, 128), (7, 64), (16, 128)] {
        let batches = batches::<E>(problem(EDGES.len(), group, 2, head_dim, 420));
        let truth: Vec<Vec<Exact>> = batches.iter().map(exact).collect();
        for device in devices() {
            let blocks = batches.iter().map(Batch::blocks).max().unwrap();
            let mut trial = Trial::new(device, batches[0].problem, blocks).unwrap().with_rounding(CHANCE);
            let tight = Policy { error_budget: 0.02, renew: 3, ..Policy::SOUND };
            for (name, policy) in
                [("sound", Policy::SOUND), ("fast", Policy::FAST), ("all", ALL_CARRIED), ("tight", tight)]
            {
                let mut plan = trial.plan(&policy).unwrap();
                let returned = steps(&mut trial, &mut plan, &batches);
                for (i, ((batch, truth), returned)) in batches.iter().zip(&truth).zip(&returned).enumerate() {
                    let what = format!("{} group {group} head_dim {head_dim} {name} step {i}", E::NAME);
                    let found = judge(batch, truth, returned, &what);
                    (0..5).for_each(|rung| rungs[rung] += found[rung]);
                    let of_step: u32 =
                        returned.certificates.iter().map(|c| c.promoted_keys + c.promoted_values).sum();
                    // Without a list, in the first step, the two newest blocks of each row.
                    let newest: u32 = batch.lengths.iter().map(|length| (length / 16).min(2)).sum();
                    let rows = batch.problem.q_heads;
                    assert!(
                        i > 0 || of_step == 2 * newest * rows,
                        "{what}: {of_step} promoted without a list"
                    );
                    promoted += of_step;
                }
            }
        }
    }
    println!("heads by rung: {rungs:?}, {promoted} blocks promoted");
    assert!(rungs[0] > 100 && rungs[1] > 500 && rungs[3] > 100 && promoted > 5000, "{rungs:?} {promoted}");
}

#[test]
fn errors_are_within_the_certificates_of_carried_steps_f16() {
    lists_hold::<f16>();
}

#[test]
fn errors_are_within_the_certificates_of_carried_steps_bf16() {
    lists_hold::<bf16>();
}

/// With every block listed nothing quantized is left: exact attention but for rounding, and the certificate
/// says so.
#[test]
fn everything_promoted_is_exact() {
    let sequences = [(Input::Sharp, 352), (Input::Normal, 200), (Input::Diffuse, 33)];
    let batch = Batch::<f16>::new(problem(3, 4, 2, 64, 352), &sequences, 3, 5);
    let truth = exact(&batch);
    for device in devices() {
        let mut trial = loaded(device, &batch);
        let mut plan = trial.plan(&ALL_CARRIED).unwrap();
        let returned = steps(&mut trial, &mut plan, &[batch.clone(), batch.clone()]);
        for (row, (exact, certificate)) in truth.iter().zip(&returned[1].certificates).enumerate() {
            let full = batch.lengths[row / 8] / 16;
            assert_eq!([certificate.promoted_keys, certificate.promoted_values], [full; 2]);
            assert!(certificate.e_val == 0.0 && certificate.tail_mass < 1e-9, "{certificate:?}");
            let error = exact.error(&returned[1].output[row * 64..][..64]);
            let before = returned[0].certificates[row].bound();
            assert!(error <= f64::from(certificate.bound()), "{error}: {certificate:?}");
            // The first step has promoted the two newest blocks without a list: where there are no others, it
            // was exact too.
            if full > 2 {
                assert!(certificate.bound() < before / 20.0, "{before}: {certificate:?}");
            } else {
                assert_eq!(certificate.bound(), before, "{certificate:?}");
            }
        }
    }
}

/// A list is used for as many steps as the policy says, and renewed in the steps that its phase says.
#[test]
fn lists_last_as_long_as_they_should() {
    let sequences = [(Input::Sharp, 320), (Input::Sharp, 320), (Input::Sharp, 320)];
    let problem = problem(3, 2, 1, 64, 320);
    // Other queries in every step, so that a new list is another one.
    let batches: Vec<Batch<f16>> = (0..10)
        .map(|i| {
            let mut batch = Batch::new(problem, &sequences, 1, 5);
            batch.queries = Batch::<f16>::new(problem, &sequences, 100 + i, 5).queries;
            batch
        })
        .collect();
    let policy =
        Policy { coverage: 0.6, max_keys: 3, expanded_keys: 3, max_values: 0, renew: 3, ..Policy::SOUND };
    for device in devices() {
        let mut trial = loaded(device, &batches[0]);
        let mut plan = trial.plan(&policy).unwrap();
        plan.swap_carried(&mut plan.carried(1).unwrap()).unwrap();
        let mut lists = Vec::new();
        let mut out = plan.allocate().unwrap();
        for batch in &batches {
            trial.ask(batch).unwrap();
            trial.step(&mut plan, &mut out).unwrap();
            lists.push(plan.listed().unwrap());
        }
        for (i, steps) in lists.windows(2).enumerate() {
            let renewed = (i + 2) % 3 == 0;
            for (before, after) in steps[0].iter().zip(&steps[1]) {
                assert_eq!(after != before, renewed, "step {}: {before:?}, {after:?}", i + 1);
            }
        }
        assert!(lists.iter().flatten().all(|list| !list.is_empty() && list.len() <= 6));
    }
}

/// Nor whether blocks come from the originals or from a scratch.
#[test]
fn the_scratch_does_not_show_in_carried_steps() {
    let batches = batches::<f16>(problem(EDGES.len(), 7, 2, 64, 420));
    for policy in [Policy { renew: 2, ..Policy::SOUND }, ALL_CARRIED] {
        for device in devices() {
            let blocks = batches.iter().map(Batch::blocks).max().unwrap();
            let mut trial = Trial::new(device, batches[0].problem, blocks).unwrap().with_rounding(CHANCE);
            let mut plan = trial.plan(&policy).unwrap();
            let without = steps(&mut trial, &mut plan, &batches[..3]);
            for (keys, values) in [(1, 1), (7, 0), (0, 13), (1000, 1000)] {
                trial.set_scratch(keys, values).unwrap();
                let mut plan = trial.plan(&policy).unwrap();
                // Not loaded again: the scratch would be another cache's.
                let mut out = plan.allocate().unwrap();
                trial.load(&batches[2]).unwrap();
                trial.ask(&batches[2]).unwrap();
                let with: Vec<_> = (0..4).map(|_| trial.step(&mut plan, &mut out).unwrap()).collect();
                trial.set_scratch(0, 0).unwrap();
                let mut plan = trial.plan(&policy).unwrap();
                let none: Vec<_> = (0..4).map(|_| trial.step(&mut plan, &mut out).unwrap()).collect();
                assert!(with == none, "{keys} and {values} slots");
            }
            assert!(without[0] != without[1]);
        }
    }
}

#[test]
fn a_list_of_another_plan_is_refused() {
    let problem = |sequences| problem(sequences, 2, 1, 64, 320);
    let device = &devices()[0];
    let plan = |sequences| {
        let trial = Trial::<f16>::new(device, problem(sequences), 20).unwrap();
        trial.plan(&Policy::SOUND).unwrap()
    };
    let mut one = plan(1);
    let error = one.swap_carried(&mut plan(2).carried(0).unwrap()).unwrap_err().to_string();
    assert!(error.contains("take one that this plan made"), "{error}");
    one.swap_carried(&mut plan(1).carried(0).unwrap()).unwrap();
}
