//! Steps by the list of an earlier one: as far from exact attention as they say, whatever the list has in it.

use super::*;
use kernels_gpu::certified::policy::reason;

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
            let once = |policy| Policy { again: SecondPass::Never, ..policy };
            for (name, policy) in [
                ("sound", Policy::SOUND),
                ("fast", once(Policy::FAST)),
                ("all", once(ALL_CARRIED)),
                ("tight", tight),
                ("tight, once", once(tight)),
            ] {
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
                        policy.again != SecondPass::Never || i > 0 || of_step == 2 * newest * rows,
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
    let policy = Policy {
        coverage: 0.6,
        max_keys: 3,
        expanded_keys: 3,
        max_values: 0,
        error_budget: f32::INFINITY,
        renew: 3,
        ..Policy::SOUND
    };
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

/// Where the first step by a new list finds a head over budget, its row of blocks is left to the dense rung
/// for as many renewals as the policy says, and then tried again. Its bound holds, its bits are those of
/// dense, and no quantized block is read. Rows within their budgets know nothing of it.
#[test]
fn rows_over_budget_are_left_to_the_dense_rung() {
    // The last sequence is of one block, from its originals; it has nothing over budget.
    let sequences = [(Input::Diffuse, 352), (Input::Normal, 0), (Input::Diffuse, 205), (Input::Normal, 9)];
    for (head_dim, group) in [(64, 9), (128, 2)] {
        let mut batch = Batch::<f16>::new(problem(4, group, 2, head_dim, 352), &sequences, 3, 5);
        let (heads, dim) = ((2 * group) as usize, head_dim as usize);
        // The largest norms of the third sequence are those of its trailing block, which has no annotations.
        for (head, token) in (0..2).flat_map(|head| (192..205).map(move |token| (head, token))) {
            let at = batch.row(2, head, token);
            for pool in [&mut batch.keys, &mut batch.values] {
                pool[at..at + dim].iter_mut().for_each(|x| *x = f16::from_f32(4.0 * x.to_f32()));
            }
        }
        let truth = exact(&batch);
        for device in devices() {
            let mut trial = loaded(device, &batch);
            let (dense, lse) = trial.dense().unwrap();
            // A budget between those of the last sequence and of the long ones, of which little is promoted.
            let fresh = Policy {
                max_keys: 2,
                expanded_keys: 2,
                max_values: 2,
                per_group: false,
                renew: 2,
                again: SecondPass::Never,
                error_budget: f32::INFINITY,
                ..Policy::SOUND
            };
            let mut plan = trial.plan(&fresh).unwrap();
            let mut out = plan.allocate().unwrap();
            trial.step(&mut plan, &mut out).unwrap();
            let second = trial.step(&mut plan, &mut out).unwrap();
            let share = |row: &usize| second.certificates[*row].likely / second.certificates[*row].norm;
            let least = (0..heads).chain(2 * heads..3 * heads).map(|row| share(&row)).fold(1.0, f32::min);
            let of_block = (3 * heads..4 * heads).map(|row| share(&row)).fold(0.0, f32::max);
            assert!(of_block < least, "{of_block} {least}");
            let budget = (of_block + least) / 2.0;
            // Of heads that were tried and ended on the dense rung.
            let mut tried = Vec::<ferrokv::host::certified::Certificate>::new();
            for (retry, pattern) in [
                // Steps 0, 2, 4, … renew; the step behind each judges. Waits of one renewal are over at once.
                (0, [0; 14]),
                (1, [0; 14]),
                (2, [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]),
                (3, [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0]),
            ] {
                let policy = Policy { retry, error_budget: budget, ..fresh };
                let mut plan = trial.plan(&policy).unwrap();
                let mut out = plan.allocate().unwrap();
                for (i, left) in pattern.into_iter().enumerate() {
                    let returned = trial.step(&mut plan, &mut out).unwrap();
                    let what = format!("head_dim {head_dim} retry {retry} step {i}");
                    judge(&batch, &truth, &returned, &what);
                    let rows = 2 * u64::from(group.div_ceil(8));
                    let read = plan.originals_read(&batch.lengths).unwrap();
                    assert_eq!(read.exact_rows, 2 * rows * left, "{what}");
                    // The two sequences that are over, whether they were tried or not.
                    assert_eq!(read.dense_rows, if i == 0 { read.dense_rows } else { 2 * rows }, "{what}");
                    for (row, certificate) in returned.certificates.iter().enumerate() {
                        let over = matches!(row / heads, 0 | 2);
                        let earlier = certificate.reason() == reason::EARLIER;
                        assert_eq!(earlier, over && left == 1, "{what}, row {row}: {certificate:?}");
                        if earlier {
                            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                            let at = row * dim..(row + 1) * dim;
                            assert_eq!(bits(&returned.output[at.clone()]), bits(&dense[at]), "{what}");
                            assert_eq!(returned.lse[row].to_bits(), lse[row].to_bits(), "{what}");
                            let most = 1e-3 * truth[row].largest_value;
                            assert!(f64::from(certificate.bound()) < most, "{what}: {certificate:?}");
                            assert_eq!(certificate.promoted_keys + certificate.promoted_values, 0);
                            // By the same keys, and by values without what rounding adds to them.
                            let found = &tried[row];
                            assert_eq!(
                                certificate.delta.to_bits(),
                                found.delta.to_bits(),
                                "{what}, row {row}"
                            );
                            let rounding = certificate.e_round / found.e_round;
                            assert!((0.9..=1.0).contains(&rounding), "{what}, row {row}: {rounding}");
                        }
                    }
                    if retry == 0 {
                        tried = returned.certificates;
                    }
                }
            }
        }
    }
}

/// A query that is no number says nothing of the next one: its head alone is exact, in its step alone.
#[test]
fn what_is_no_number_leaves_no_row_to_the_dense_rung() {
    let batch = Batch::<f16>::new(problem(1, 4, 1, 64, 352), &[(Input::Sharp, 350)], 3, 5);
    for device in devices() {
        let mut trial = loaded(device, &batch);
        let policy = Policy { renew: 2, error_budget: 1e3, ..Policy::SOUND };
        let mut plan = trial.plan(&policy).unwrap();
        let mut out = plan.allocate().unwrap();
        for i in 0..6 {
            let mut asked = batch.clone();
            if i == 1 || i == 3 {
                asked.queries[64 + 3] = f16::NAN;
            }
            trial.ask(&asked).unwrap();
            let returned = trial.step(&mut plan, &mut out).unwrap();
            let dense: Vec<bool> =
                returned.certificates.iter().map(|c| Rung::of(c.rung()).is_dense()).collect();
            assert_eq!(dense, [false, i == 1 || i == 3, false, false], "step {i}");
            assert_eq!(plan.originals_read(&batch.lengths).unwrap().exact_rows, 0, "step {i}");
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

/// Where queries leap from step to step, lists of earlier steps miss what matters: heads over budget by them
/// get one of their own masses, and are within it then.
#[test]
fn heads_over_budget_get_a_list_of_their_own() {
    for (group, head_dim) in [(3, 64), (8, 128), (12, 64)] {
        let lengths = [(Input::Sharp, 600), (Input::Normal, 333), (Input::Sharp, 421)];
        let problem = problem(3, group, 2, head_dim, 608);
        let base = Batch::<f16>::new(problem, &lengths, 5, 40);
        let leap =
            |seed| Batch { queries: Batch::<f16>::new(problem, &lengths, seed, 40).queries, ..base.clone() };
        let asked: Vec<Batch<f16>> = (5..11).map(leap).collect();
        let truth: Vec<Vec<Exact>> = asked.iter().map(exact).collect();
        for device in devices() {
            let mut trial = loaded(device, &asked[0]);
            // What bounds are by lists of the same queries.
            let free = Policy { renew: 1, error_budget: f32::INFINITY, ..Policy::SOUND };
            let mut most = 0f32;
            let mut plan = trial.plan(&free).unwrap();
            let mut out = plan.allocate().unwrap();
            for batch in &asked {
                trial.ask(batch).unwrap();
                trial.step(&mut plan, &mut out).unwrap();
                let own = trial.step(&mut plan, &mut out).unwrap();
                most = own.certificates.iter().map(|c| c.likely / c.norm).fold(most, f32::max);
            }
            let budget = Policy { error_budget: 1.5 * most, ..Policy::SOUND };
            let mut exact_heads = [0; 2];
            for (again, exact_heads) in
                [SecondPass::Never, SecondPass::Always].into_iter().zip(&mut exact_heads)
            {
                let mut plan = trial.plan(&Policy { again, retry: 0, ..budget }).unwrap();
                let mut out = plan.allocate().unwrap();
                let mut again_rows = 0;
                for (i, (batch, truth)) in asked.iter().zip(&truth).enumerate() {
                    trial.ask(batch).unwrap();
                    let returned = trial.step(&mut plan, &mut out).unwrap();
                    let what = format!("group {group} head_dim {head_dim} again {again:?} step {i}");
                    judge(batch, truth, &returned, &what);
                    let dense = returned.certificates.iter().filter(|c| Rung::of(c.rung()).is_dense());
                    let dense = dense.count();
                    let read = plan.originals_read(&batch.lengths).unwrap();
                    *exact_heads += dense;
                    again_rows += read.again_rows;
                }
                assert_eq!(again_rows > 0, again == SecondPass::Always, "group {group} head_dim {head_dim}");
            }
            println!("group {group} head_dim {head_dim}: {exact_heads:?} heads exact, budget {}", 1.5 * most);
            assert!(
                exact_heads[0] > 0 && exact_heads[1] == 0,
                "{exact_heads:?} of a budget of {}",
                1.5 * most
            );
        }
    }
}
