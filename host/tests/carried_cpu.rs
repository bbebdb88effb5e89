//! Certified steps on slices that promote what an earlier one has chosen give the emulator's bits step after
//! step, on every path that this machine has.

#[path = "common/certified.rs"]
mod common;

use common::{ALL, Case, Emulated, PROBLEM, Results, Spoilt, Words};
use half::{bf16, f16};
use host::certified::cpu::{Level, Lists, Step};
use host::certified::proof::{Batch, Input};
use host::certified::{CacheElement, Checked, OriginalsRead, Policy, SecondPass, StepProblem};
use kernels_gpu::certified::carried::{Promoted, mode};
use kernels_gpu::certified::policy::reason;
use kernels_gpu::certified::{Entry, ListHead};
use proptest::prelude::*;
use simt::Zeroable;

/// Some keys and some values.
const FEW: Policy = Policy {
    coverage: 0.7,
    min_keys: 1,
    max_keys: 3,
    expand_tail: 0.4,
    expanded_keys: 5,
    value_tolerance: 0.0,
    max_values: 4,
    renew: 1,
    ..Policy::CODES
};
/// Values alone.
const VALUES: Policy = Policy { value_tolerance: 0.0, max_values: 3, ..Policy::CODES };
/// Some heads are computed from the originals.
const SOME_DENSE: Policy = Policy { error_budget: 0.1, per_group: false, ..Policy::SOUND };

const fn renewed(policy: Policy, renew: u32) -> Policy {
    Policy { renew, ..policy }
}

/// A list has little, and what weighs is promoted on sight.
const SIGHTED: Policy = Policy {
    min_keys: 1,
    max_keys: 1,
    max_values: 1,
    error_budget: f32::INFINITY,
    sight: 1.0 / 64.0,
    ..Policy::UNWATCHED
};
/// Everything is, as far as warps have room, and heads are over budget all the same.
const SIGHTED_ALL: Policy = Policy { sight: 1e-9, error_budget: 1e-4, ..SIGHTED };

/// All are, and what is over budget is left to the dense rung from the second step on.
const LEFT: Policy = Policy { error_budget: 0.0, ..Policy::SOUND };

/// What is promoted is compared with its originals, and some of the other blocks.
const WATCHED: Policy = Policy { canary: 1e-6, exploration: 0.2, ..renewed(FEW, 2) };
/// Nothing is promoted, and all of it compared.
const EXPLORED: Policy = Policy { canary: 0.0, exploration: 1.0, max_keys: 1, ..renewed(Policy::CODES, 1) };

const POLICIES: [Policy; 18] = [
    renewed(SIGHTED, 4),
    renewed(SIGHTED_ALL, 2),
    Policy { canary: 1e-6, exploration: 0.01, ..renewed(Policy::SOUND, 3) },
    WATCHED,
    EXPLORED,
    renewed(Policy::SOUND, 1),
    renewed(Policy::SOUND, 2),
    renewed(Policy::SOUND, 8),
    renewed(Policy::FAST, 3),
    renewed(Policy::CODES, 1),
    renewed(Policy::BARE, 1),
    FEW,
    renewed(VALUES, 2),
    renewed(SOME_DENSE, 1),
    renewed(ALL, 2),
    Policy { retry: 2, ..renewed(LEFT, 1) },
    renewed(LEFT, 4),
    renewed(SOME_DENSE, 3),
];

/// Steps over one cache: of each, how long its sequences are, and its queries.
struct Steps<E: CacheElement> {
    case: Case<E>,
    lengths: Vec<Vec<u32>>,
    seed: u64,
    spoilt: (Spoilt, u64),
}

impl<E: CacheElement> Steps<E> {
    /// Steps over sequences of some inputs; `lengths` [steps, sequences].
    fn new(problem: StepProblem, inputs: &[Input], lengths: Vec<Vec<u32>>, seed: u64) -> Self {
        let longest = |sequence: usize| lengths.iter().map(|of_step| of_step[sequence]).max().unwrap();
        let sequences: Vec<(Input, u32)> =
            inputs.iter().enumerate().map(|(sequence, input)| (*input, longest(sequence))).collect();
        Steps { case: Case::new(problem, &sequences, seed), lengths, seed, spoilt: (Spoilt::Nothing, 1) }
    }

    fn spoil(mut self, spoilt: Spoilt, every: u64) -> Self {
        self.case.spoil(spoilt, every, self.seed ^ 3);
        self.spoilt = (spoilt, every);
        self
    }

    /// Makes the case that of a step.
    fn to(&mut self, step: usize) {
        // Some queries stay for a while, as those of a text do by and large.
        let seed = self.seed ^ (step as u64 / 2) << 8;
        self.case.batch.lengths.clone_from(&self.lengths[step]);
        self.case.batch.renew_queries(seed);
        if let (spoilt @ (Spoilt::Queries | Spoilt::Extremes), every) = self.spoilt {
            self.case.spoil(spoilt, every, seed);
        }
    }

    fn describe(&self, step: usize, what: &str, policy: &Policy) -> String {
        let Batch { problem, inputs, .. } = &self.case.batch;
        let Steps { lengths, spoilt, seed, .. } = self;
        format!(
            "{what} step {step} of {}, {problem:?}, {inputs:?} {lengths:?}, {spoilt:?}, seed {seed}, {policy:?}",
            E::NAME
        )
    }

    /// What the kernels give in each step, and what they read.
    fn kernels(&mut self, policy: &Policy) -> Vec<(Words, OriginalsRead, Checked)> {
        let mut emulated = Emulated::new(&self.case, policy, [0; 2]);
        let mut all = Vec::new();
        for step in 0..self.lengths.len() {
            self.to(step);
            let (words, read) = emulated.step(&self.case, false);
            all.push((words, read, emulated.plan.checked(&self.lengths[step]).unwrap()));
        }
        all
    }

    /// Compares every path with the kernels. Gives the reasons for which any head was computed from the
    /// originals.
    fn compare(&mut self, policy: &Policy, what: &str) -> u32 {
        let expected = self.kernels(policy);
        let mut reasons = 0;
        for level in Level::available() {
            let mut own = Step::new(self.case.batch.problem, policy).unwrap();
            for (step, (expected, read, checked)) in expected.iter().enumerate() {
                self.to(step);
                let what = self.describe(step, what, policy);
                let mut results = Results::new(self.case.batch.problem);
                own.run_at(*level, self.case.slices(), results.out()).unwrap();
                results.check(expected, *level, &what);
                assert_eq!(own.originals_read(), *read, "{what}");
                assert_eq!(own.checked(), *checked, "{what}");
                reasons |= results.certificates.iter().fold(0, |all, certificate| all | certificate.reason());
            }
        }
        reasons
    }

    /// The same with the kernels' lists and scratch, on the kernels in some steps and on slices in the
    /// others.
    fn mix(&mut self, policy: &Policy, slots: [u32; 2], on_slices: &[bool]) {
        let mut kernels = Emulated::new(&self.case, policy, slots);
        let mut mixed = Emulated::new(&self.case, policy, slots);
        for (step, on_slices) in on_slices.iter().enumerate() {
            self.to(step);
            for emulated in [&mut kernels, &mut mixed] {
                // Near the end the scratch stays as it is, but for one step.
                emulated.admit(step < 4 || step == 6);
                if step == 0 {
                    emulated.restart(slots[0] % 3);
                }
            }
            let what = self.describe(step, &format!("{slots:?}"), policy);
            let expected = kernels.step(&self.case, false);
            let got = mixed.step(&self.case, *on_slices);
            assert!(expected == got, "{what}, {on_slices}");
            let checked = [&kernels, &mixed].map(|which| which.plan.checked(&self.lengths[step]).unwrap());
            assert_eq!(checked[0], checked[1], "{what}, {on_slices}");
            let (expected, got) = (kernels.scratch_contents(), mixed.scratch_contents());
            assert_eq!(expected.1, got.1, "directory, {what}");
            assert!(expected.0 == got.0, "near tiles, {what}");
        }
    }
}

/// Growing by a few tokens a step, over the edges of blocks.
fn growing(first: &[u32], by: u32, steps: u32) -> Vec<Vec<u32>> {
    (0..steps).map(|step| first.iter().map(|length| length + by * step).collect()).collect()
}

#[test]
fn every_policy_over_the_edges_of_blocks() {
    let lengths = growing(&[0, 1, 14, 16, 127, 156], 1, 5);
    let inputs = [Input::Normal, Input::Normal, Input::Sharp, Input::Normal, Input::Outlier, Input::Diffuse];
    let problem = StepProblem { head_dim: 128, q_heads: 8, kv_heads: 2, ..PROBLEM };
    for policy in POLICIES {
        Steps::<f16>::new(PROBLEM, &inputs, lengths.clone(), 1).compare(&policy, "");
        Steps::<bf16>::new(PROBLEM, &inputs[2..5], growing(&[15, 33, 130], 5, 4), 2).compare(&policy, "");
        Steps::<f16>::new(problem, &inputs[2..4], growing(&[94, 200], 1, 4), 3).compare(&policy, "");
        Steps::<bf16>::new(problem, &inputs[4..], growing(&[31, 150], 7, 4), 4).compare(&policy, "");
    }
}

#[test]
fn groups_of_every_size() {
    for group in [1, 3, 4, 7, 9, 16] {
        let problem = StepProblem { q_heads: group, kv_heads: 1, ..PROBLEM };
        let inputs = [Input::Normal, Input::Sharp];
        for policy in [FEW, renewed(Policy::SOUND, 2), Policy { per_group: true, ..renewed(FEW, 3) }] {
            Steps::<f16>::new(problem, &inputs, growing(&[46, 127], 1, 4), 5).compare(&policy, "");
        }
    }
}

#[test]
fn every_kind_of_input() {
    for input in Input::MADE {
        for policy in [FEW, renewed(Policy::SOUND, 2), renewed(ALL, 1)] {
            Steps::<f16>::new(PROBLEM, &[input, input], growing(&[76, 300], 5, 4), 6).compare(&policy, "");
            Steps::<bf16>::new(PROBLEM, &[input], growing(&[140], 1, 4), 7).compare(&policy, "");
        }
    }
}

#[test]
fn what_is_not_finite_takes_the_same_way() {
    let mut reasons = 0;
    for (spoilt, every) in [
        (Spoilt::Queries, 1),
        (Spoilt::Queries, 300),
        (Spoilt::Extremes, 1),
        (Spoilt::Originals, 1000),
        (Spoilt::Originals, 30_000),
        (Spoilt::Tiles, 1),
        (Spoilt::Tiles, 5000),
        (Spoilt::Annotations, 5),
    ] {
        let left = Policy { retry: 2, ..renewed(LEFT, 1) };
        let plain = [FEW, renewed(Policy::SOUND, 1), renewed(Policy::CODES, 1), renewed(ALL, 2), left];
        for policy in plain.into_iter().chain([WATCHED, EXPLORED]) {
            let inputs = [Input::Normal, Input::Sharp];
            reasons |= Steps::<f16>::new(PROBLEM, &inputs, growing(&[97, 64], 1, 4), 8)
                .spoil(spoilt, every)
                .compare(&policy, "");
            reasons |= Steps::<bf16>::new(PROBLEM, &inputs[..1], growing(&[120], 3, 4), 9)
                .spoil(spoilt, every)
                .compare(&policy, "");
        }
    }
    // Everything was found that there is to find by steps of one pass.
    let found = reason::CANARY | reason::EARLIER | reason::QUERY_NOT_FINITE | reason::NO_BOUND;
    assert_eq!(reasons & found, found, "{reasons:#b}");
}

/// A list serves any sequence: the row's is shorter now, then another one.
#[test]
fn a_list_may_be_stale() {
    let lengths = [[310, 40], [313, 41], [100, 41], [33, 200], [15, 201], [0, 31], [311, 17]];
    let lengths: Vec<Vec<u32>> = lengths.iter().map(|of_step| of_step.to_vec()).collect();
    let left = Policy { retry: 2, ..renewed(LEFT, 1) };
    for policy in [renewed(ALL, 8), renewed(Policy::SOUND, 8), renewed(FEW, 5), FEW, left, renewed(LEFT, 2)] {
        Steps::<f16>::new(PROBLEM, &[Input::Normal, Input::Sharp], lengths.clone(), 10).compare(&policy, "");
        Steps::<bf16>::new(PROBLEM, &[Input::Sharp, Input::Normal], lengths.clone(), 11).mix(
            &policy,
            [5, 3],
            &[false, true, true, false, true, false, true],
        );
    }
}

#[test]
fn sequences_of_several_splits_and_parts() {
    let problem = StepProblem { q_heads: 4, kv_heads: 1, max_tokens: 2048, ..PROBLEM };
    for policy in [renewed(Policy::FAST, 2), FEW, renewed(ALL, 1)] {
        Steps::<f16>::new(problem, &[Input::Normal], growing(&[1500], 9, 4), 12).compare(&policy, "");
    }
    Steps::<bf16>::new(problem, &[Input::Sharp], growing(&[2040], 2, 4), 13)
        .compare(&renewed(Policy::SOUND, 3), "");
    // More than a thousand blocks: several blocks of a part for a thread, and several parts for a thread
    // block.
    let problem = StepProblem { q_heads: 2, kv_heads: 1, max_tokens: 20_000, ..PROBLEM };
    Steps::<f16>::new(problem, &[Input::Diffuse], growing(&[17_001], 9, 2), 14)
        .compare(&renewed(SOME_DENSE, 1), "");
}

/// So many sequences that none is cut: a warp of the long one has several times the four blocks whose parts
/// of the sums are made together.
#[test]
fn a_warp_has_many_blocks() {
    const SEQUENCES: usize = 72;
    let mut first = [5; SEQUENCES];
    first[0] = 2090;
    let inputs = [Input::Normal; SEQUENCES];
    for head_dim in [64, 128] {
        let problem = StepProblem { head_dim, q_heads: 2, kv_heads: 1, max_tokens: 2304, ..PROBLEM };
        for policy in [renewed(Policy::SOUND, 1), renewed(ALL, 2), renewed(Policy::CODES, 1)] {
            Steps::<f16>::new(problem, &inputs, growing(&first, 9, 3), 16).compare(&policy, "");
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let one = StepProblem { q_heads: 4, kv_heads: 1, max_tokens: 2048, ..PROBLEM };
    for (problem, first) in [(PROBLEM, &[250][..]), (PROBLEM, &[250, 97]), (one, &[1500])] {
        let inputs = &[Input::Normal, Input::Sharp][..first.len()];
        let mut steps = Steps::<f16>::new(problem, inputs, growing(first, 3, 4), 15);
        for threads in [1, 2, 3, 16] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for policy in [renewed(Policy::SOUND, 2), renewed(ALL, 1), renewed(SOME_DENSE, 1), WATCHED] {
                pool.install(|| {
                    steps.compare(&policy, &format!("{threads} threads"));
                });
            }
        }
    }
}

/// The lists, the scratch and its traffic are the kernels': either path goes on where the other has stopped.
#[test]
fn paths_may_change_at_any_step() {
    let lengths = growing(&[140, 31], 7, 8);
    let inputs = [Input::Normal, Input::Sharp];
    for slots in [[0, 0], [3, 2], [40, 0], [0, 7], [200, 200]] {
        for policy in [
            FEW,
            renewed(FEW, 3),
            renewed(ALL, 2),
            renewed(Policy::CODES, 1),
            WATCHED,
            renewed(SIGHTED, 3),
            renewed(SIGHTED_ALL, 2),
        ] {
            for on_slices in [[true; 8], [false, true, true, false, false, true, false, true]] {
                let mut steps = Steps::<f16>::new(PROBLEM, &inputs, lengths.clone(), 16);
                steps.mix(&policy, slots, &on_slices);
            }
        }
    }
}

/// Rows that wait are cut as `dense` cuts them, those that are over budget finer: fewer than 16 of them, and
/// room for enough blocks that the two are not the same.
#[test]
fn rows_of_many_and_of_few_are_cut_alike() {
    let problem = StepProblem { sequences: 15, q_heads: 1, kv_heads: 1, head_dim: 64, max_tokens: 4096 };
    let mut lengths = vec![17; 15];
    (lengths[0], lengths[13]) = (1500, 700);
    let policy = Policy { again: SecondPass::Never, ..renewed(LEFT, 4) };
    let reasons = Steps::<f16>::new(problem, &[Input::Normal; 15], vec![lengths; 4], 25).compare(&policy, "");
    assert!(reasons & reason::EARLIER != 0 && reasons & reason::ERROR_BUDGET != 0);
}

/// Both paths compare what a scratch has of the list, and nothing else: an alarm of one is the other's.
#[test]
fn what_is_at_hand_is_compared_alike() {
    let listed = Policy { exploration: 0.0, ..WATCHED };
    let lengths = growing(&[300, 150], 3, 6);
    let spoilt = || {
        let inputs = [Input::Normal, Input::Sharp];
        Steps::<f16>::new(PROBLEM, &inputs, lengths.clone(), 18).spoil(Spoilt::Tiles, 100)
    };
    assert!(spoilt().compare(&listed, "") & reason::CANARY != 0, "something listed has changed");
    for slots in [[0, 0], [3, 2], [40, 0], [0, 7], [200, 200]] {
        for on_slices in [[true; 6], [false, true, true, false, false, true]] {
            spoilt().mix(&listed, slots, &on_slices);
        }
    }
}

/// A query leaps, and what no list has is promoted: the bound is smaller, and a warp brings eight blocks at
/// the most. The step before says how much weighs, so the first one promotes nothing so.
#[test]
fn what_weighs_is_promoted_though_no_list_has_it() {
    let mut steps = Steps::<f16>::new(PROBLEM, &[Input::Sharp], growing(&[320], 0, 4), 23);
    let mut run = |sight: f32| {
        let policy = Policy { sight, ..renewed(SIGHTED, 4) };
        let mut own = Step::new(PROBLEM, &policy).unwrap();
        [0, 1, 2, 3].map(|step| {
            steps.to(step);
            let mut results = Results::new(PROBLEM);
            own.run(steps.case.slices(), results.out()).unwrap();
            let bounds: f32 = results.certificates.iter().map(|certificate| certificate.bound()).sum();
            let keys: u32 = results.certificates.iter().map(|certificate| certificate.promoted_keys).sum();
            // Rows of a KV head share what is promoted.
            assert_eq!(u64::from(keys), own.originals_read().key_tiles * 3, "{sight} {step}");
            (bounds, keys)
        })
    };
    let (none, some, all) = (run(0.0), run(1.0 / 64.0), run(1e-9));
    assert_eq!((none[0], none[0]), (some[0], all[0]));
    // 20 blocks, of which the last two of step 0 are newer than any list: one warp has two of the others.
    for (step, blocks) in [(1, 20), (2, 20), (3, 20)] {
        assert!(none[step].1 <= some[step].1 && some[step].1 <= all[step].1, "{none:?} {some:?} {all:?}");
        assert_eq!(all[step].1, 9 * blocks, "{all:?}");
        assert!(all[step].0 < none[step].0, "{none:?} {all:?}");
    }
    // The third step's query is another one than the list's.
    assert!(some[2].1 > none[2].1 && some[2].0 < none[2].0, "{none:?} {some:?}");

    // One split of 131 blocks for twelve warps, each of which takes eight at the most.
    let problem = StepProblem { sequences: 18, q_heads: 9, kv_heads: 9, head_dim: 64, max_tokens: 8192 };
    let lengths: Vec<u32> = (0..18).map(|sequence| if sequence == 0 { 2100 } else { 0 }).collect();
    let mut steps = Steps::<f16>::new(problem, &[Input::Normal; 18], vec![lengths; 2], 24);
    let mut own = Step::new(problem, &Policy { sight: 1e-9, ..renewed(SIGHTED, 4) }).unwrap();
    let listed = [0, 1].map(|step| {
        steps.to(step);
        let mut results = Results::new(problem);
        own.run(steps.case.slices(), results.out()).unwrap();
        results.certificates[0].promoted_keys
    });
    assert!((90..=1 + 96).contains(&listed[1]), "{listed:?}");
}

/// Sequences change places between steps: claims that were made for one block are another's.
#[test]
fn claims_of_blocks_that_moved() {
    let lengths = growing(&[200, 200, 90], 1, 6);
    let inputs = [Input::Normal, Input::Sharp, Input::Dominant];
    let mut steps = Steps::<f16>::new(PROBLEM, &inputs, lengths, 17);
    let policy = renewed(FEW, 2);
    let mut kernels = Emulated::new(&steps.case, &policy, [6, 5]);
    let mut slices = Emulated::new(&steps.case, &policy, [6, 5]);
    for step in 0..6 {
        steps.to(step);
        let blocks = steps.case.batch.table.len() / 3;
        if step % 2 == 1 {
            steps.case.batch.table.rotate_left(blocks);
            steps.case.batch.lengths.rotate_left(1);
        }
        assert!(kernels.step(&steps.case, false) == slices.step(&steps.case, true), "step {step}");
        assert_eq!(kernels.scratch_contents().1, slices.scratch_contents().1, "step {step}");
        if step % 2 == 1 {
            steps.case.batch.table.rotate_right(blocks);
        }
    }
}

fn spoilts() -> impl Strategy<Value = Spoilt> {
    use Spoilt::{Annotations, Extremes, Nothing, Originals, Queries, Tiles};
    prop_oneof![
        5 => Just(Nothing),
        1 => Just(Queries),
        1 => Just(Extremes),
        1 => Just(Originals),
        1 => Just(Tiles),
        1 => Just(Annotations)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_steps_give_the_emulators_bits(
        head_dim in prop::sample::select(vec![64u32, 128]),
        group in 1u32..=16,
        kv_heads in 1u32..3,
        inputs in prop::collection::vec(prop::sample::select(Input::MADE.to_vec()), 1..3),
        lengths in prop::collection::vec(prop::collection::vec(prop_oneof![0u32..40, 0u32..400], 2), 2..5),
        spare in 0u32..2000,
        policy in prop::sample::select(POLICIES.to_vec()),
        renew in 1u32..4,
        spoilt in spoilts(),
        every in prop::sample::select(vec![1u64, 2, 16, 1000, 20_000]),
        half_floats in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let lengths: Vec<Vec<u32>> = lengths.iter().map(|of_step| of_step[..inputs.len()].to_vec()).collect();
        let max_tokens = lengths.iter().flatten().max().unwrap() + spare + 1;
        let problem = StepProblem { sequences: 1, q_heads: group * kv_heads, kv_heads, head_dim, max_tokens };
        let policy = renewed(policy, renew);
        if half_floats {
            Steps::<f16>::new(problem, &inputs, lengths, seed).spoil(spoilt, every).compare(&policy, "");
        } else {
            Steps::<bf16>::new(problem, &inputs, lengths, seed).spoil(spoilt, every).compare(&policy, "");
        }
    }
}

#[test]
fn lists_of_other_extents_are_refused() {
    let case = Case::<f16>::new(PROBLEM, &[(Input::Normal, 33)], 18);
    let mut step = Step::new(case.batch.problem, &Policy::SOUND).unwrap();
    let (mut lists, mut entries) = (vec![ListHead::zeroed(); 3], vec![Entry::zeroed(); 72]);
    let mut promoted = vec![Promoted::zeroed(); 3];
    let mut log_sums = vec![0.0; (case.batch.problem.sequences * case.batch.problem.q_heads) as usize];
    let mut run = |lists: &mut [ListHead], entries: &mut [Entry], promoted: &mut [Promoted]| {
        let mut results = Results::new(case.batch.problem);
        let log_sums = &mut log_sums[..];
        let lists = Lists { lists, entries, promoted, log_sums, mode: mode::LISTED, directory: None };
        let done = step.run_carried(case.slices(), lists, results.out()).map_err(|error| error.to_string());
        assert_eq!(done.is_err(), results.output.iter().all(|x| x.to_bits() == u32::MAX));
        done
    };
    let places = entries.len();
    for [of_lists, of_entries, of_promoted] in [[2, places, 3], [3, places - 1, 3], [3, places, 0]] {
        let error = run(&mut lists[..of_lists], &mut entries[..of_entries], &mut promoted[..of_promoted]);
        let error = error.unwrap_err();
        assert!(error.contains("the carried list has") && error.lines().count() == 1, "{error}");
    }
    // What no kernel leaves is no reason to panic.
    lists.fill(ListHead { entries: u32::MAX, key_tiles: 7, value_tiles: 7, expanded: 9 });
    entries.fill(Entry { index: 1, rows: u32::MAX });
    run(&mut lists, &mut entries, &mut promoted).unwrap();
    assert!(promoted[2].key_tiles > 0, "{promoted:?}");
}

/// An entry that wants neither keys nor values, which no kernel leaves, keeps its block quantized: the others
/// are promoted on sight.
#[test]
fn what_is_listed_is_not_promoted_on_sight() {
    let case = Case::<f16>::new(PROBLEM, &[(Input::Normal, 48)], 19);
    let problem = case.batch.problem;
    let policy = Policy { sight: 1e-9, ..renewed(SIGHTED, 4) };
    let mut step = Step::new(problem, &policy).unwrap();
    let heads = (problem.sequences * problem.q_heads) as usize;
    for listed in [0, 1] {
        let head = ListHead { entries: listed, ..ListHead::zeroed() };
        let (mut lists, mut entries) = ([head; 3], [Entry { index: 1, rows: 0 }; 72]);
        // No block is newer than the list, and any token is noticeable beside the mass that was.
        let mut promoted = [Promoted { blocks: 3, ..Promoted::zeroed() }; 3];
        let mut log_sums = vec![-100.0; heads];
        let mut results = Results::new(problem);
        let lists = Lists {
            lists: &mut lists,
            entries: &mut entries,
            promoted: &mut promoted,
            log_sums: &mut log_sums,
            mode: mode::LISTED,
            directory: None,
        };
        step.run_carried(case.slices(), lists, results.out()).unwrap();
        for row in promoted {
            assert_eq!([row.key_tiles, row.value_tiles], [3 - listed; 2], "{listed}");
        }
    }
}
