//! A certified step on slices that chooses for itself gives the emulator's bits, on every path that this
//! machine has; so does a cache that takes steps of any kind.

#[path = "common/certified.rs"]
mod common;

use common::{ALL, Case, Emulated, PROBLEM, Results, Spoilt};
use half::{bf16, f16};
use host::certified::cache::cases::{queries, tokens};
use host::certified::cpu::{Level, Out, Slices, Step};
use host::certified::proof::{Batch, Input};
use host::certified::{
    Annotation, CacheElement, Certificate, Extents, Geometry, Layout, Policy, StepPlan, StepProblem,
    TieredCache,
};
use host::{Buffer, Device, Stream};
use kernels_gpu::certified::policy::reason;
use proptest::prelude::*;
use simt::emu::EmuOptions;

/// Every head is computed from the originals.
const DENSE: Policy = Policy { error_budget: 0.0, ..Policy::CODES };
/// Some heads are.
const SOME_DENSE: Policy = Policy { error_budget: 0.1, per_group: false, ..Policy::SOUND };
/// Much is compared with its originals, and every order asked for: some heads fail.
const WATCHED: Policy = Policy {
    coverage: 0.9,
    max_keys: 6,
    expanded_keys: 6,
    ranking: 3,
    canary: 1e-6,
    exploration: 0.4,
    error_budget: f32::INFINITY,
    ..Policy::SOUND
};
/// The order alone, of more blocks than are promoted as a rule.
const RANKED: Policy = Policy { ranking: 16, ..Policy::CHOOSING };
/// What nobody promotes is compared, all of it.
const EXPLORED: Policy = Policy { canary: 0.0, exploration: 1.0, ..Policy::CODES };
/// Floors decide.
const FLOORS: Policy = Policy {
    coverage: 1.0,
    min_keys: 1,
    max_keys: u32::MAX,
    key_floor: 0.05,
    value_tolerance: 0.0,
    value_floor: 0.003,
    max_values: u32::MAX,
    ..Policy::SOUND
};
/// Values alone.
const VALUES: Policy = Policy { value_tolerance: 0.0, max_values: 3, ..Policy::CODES };
/// Every tail is heavy: the longer list of keys, which is not all of them.
const EXPANDED: Policy = Policy {
    coverage: 0.9999,
    min_keys: 1,
    max_keys: 1,
    expand_tail: 0.0,
    expanded_keys: 4,
    ..Policy::SOUND
};
const POLICIES: [Policy; 15] = [
    Policy::SOUND,
    Policy::PAPER,
    Policy::STRICT,
    WATCHED,
    RANKED,
    EXPLORED,
    Policy::FAST,
    Policy::CODES,
    Policy::BARE,
    DENSE,
    SOME_DENSE,
    ALL,
    VALUES,
    FLOORS,
    EXPANDED,
];

/// Compares every path with the kernels, twice: what one step leaves behind is nothing to the next. Gives the
/// reasons for which any head was computed from the originals.
fn compare<E: CacheElement>(case: &Case<E>, policy: &Policy, what: &str) -> u32 {
    let policy = &Policy { renew: 0, risk: 0.0, ..*policy };
    let mut emulated = Emulated::new(case, policy, [0; 2]);
    let (mut expected, read) = emulated.step(case, false);
    let Batch { problem, inputs, lengths, .. } = &case.batch;
    let what = format!("{} of {problem:?}, {inputs:?} {lengths:?}, {what}, {policy:?}", E::NAME);
    let mut step = Step::with_layout(*problem, policy, case.layout).unwrap();
    let mut reasons = 0;
    for (i, level) in Level::available().iter().chain(Level::available().last()).enumerate() {
        if i > 0 && policy.exploration > 0.0 && policy.exploration < 1.0 {
            // Each step draws other blocks.
            (expected, _) = emulated.step(case, false);
        }
        let mut results = Results::new(*problem);
        step.run_at(*level, case.slices(), results.out()).unwrap();
        results.check(&expected, *level, &what);
        assert_eq!(step.originals_read(), read, "{what}");
        assert_eq!(step.checked(), emulated.plan.checked(lengths).unwrap(), "{what}");
        reasons |= results.certificates.iter().fold(0, |all, certificate| all | certificate.reason());
    }
    reasons
}

/// The same in the paper's layout.
fn check_paper<E: CacheElement>(
    problem: StepProblem,
    sequences: &[(Input, u32)],
    policies: &[Policy],
    seed: u64,
) {
    let case = Case::<E>::with_layout(problem, sequences, seed, Layout::Paper);
    for policy in policies {
        compare(&case, policy, "in the paper's layout");
    }
}

fn check<E: CacheElement>(problem: StepProblem, sequences: &[(Input, u32)], policies: &[Policy], seed: u64) {
    let case = Case::<E>::new(problem, sequences, seed);
    for policy in policies {
        compare(&case, policy, "as it is");
    }
}

const EDGES: &[(Input, u32)] = &[
    (Input::Normal, 0),
    (Input::Normal, 1),
    (Input::Sharp, 15),
    (Input::Normal, 16),
    (Input::Outlier, 130),
    (Input::Diffuse, 160),
];

#[test]
fn every_policy_over_the_edges_of_blocks() {
    check::<f16>(PROBLEM, EDGES, &POLICIES, 1);
    check::<bf16>(PROBLEM, EDGES, &POLICIES, 2);
    let problem = StepProblem { head_dim: 128, q_heads: 8, kv_heads: 2, ..PROBLEM };
    check::<f16>(problem, EDGES, &POLICIES, 3);
    check::<bf16>(problem, EDGES, &[Policy::SOUND, SOME_DENSE], 4);
}

#[test]
fn every_policy_in_the_papers_layout() {
    check_paper::<f16>(PROBLEM, EDGES, &POLICIES, 1);
    check_paper::<bf16>(PROBLEM, EDGES, &[Policy::PAPER, ALL], 2);
    let problem = StepProblem { head_dim: 128, q_heads: 8, kv_heads: 2, ..PROBLEM };
    check_paper::<f16>(problem, EDGES, &[Policy::PAPER, SOME_DENSE], 3);
    check_paper::<bf16>(problem, EDGES, &[Policy::STRICT, Policy::BARE], 4);
    for input in Input::MADE {
        check_paper::<f16>(PROBLEM, &[(input, 77), (input, 320)], &[Policy::PAPER], 5);
    }
    let problem = StepProblem { q_heads: 9, kv_heads: 1, max_tokens: 2048, ..PROBLEM };
    check_paper::<f16>(problem, &[(Input::Normal, 1500)], &[Policy::PAPER], 8);
}

#[test]
fn every_kind_of_input() {
    for input in Input::MADE {
        check::<f16>(PROBLEM, &[(input, 77), (input, 320)], &[Policy::SOUND, SOME_DENSE, ALL], 5);
        check::<bf16>(PROBLEM, &[(input, 141)], &[Policy::SOUND, Policy::PAPER], 6);
    }
}

#[test]
fn groups_of_more_than_eight_and_of_one() {
    for group in [1, 7, 8, 9, 16] {
        let problem = StepProblem { q_heads: group, kv_heads: 1, ..PROBLEM };
        let sequences = [(Input::Normal, 0), (Input::Sharp, 15), (Input::Outlier, 130)];
        check::<f16>(problem, &sequences, &[Policy::SOUND, Policy::PAPER, Policy::BARE], 7);
    }
}

#[test]
fn sequences_of_several_parts() {
    let problem = StepProblem { q_heads: 4, kv_heads: 1, max_tokens: 2048, ..PROBLEM };
    check::<f16>(problem, &[(Input::Normal, 1500)], &[Policy::FAST, Policy::STRICT, ALL], 8);
    check::<bf16>(problem, &[(Input::Sharp, 2047)], &[Policy::SOUND], 9);
    // More than a thousand blocks: several blocks of a part for a thread, and several parts for a thread
    // block.
    let problem = StepProblem { q_heads: 2, kv_heads: 1, max_tokens: 20_000, ..PROBLEM };
    check::<f16>(problem, &[(Input::Diffuse, 17_001)], &[Policy::PAPER], 10);
}

#[test]
fn what_is_not_finite_takes_the_same_way() {
    let mut reasons = 0;
    for (spoilt, every) in [
        (Spoilt::Queries, 1),
        (Spoilt::Queries, 300),
        (Spoilt::Extremes, 1),
        (Spoilt::Originals, 1000),
        (Spoilt::Tiles, 1),
        (Spoilt::Tiles, 5000),
        (Spoilt::Annotations, 5),
    ] {
        let sequences = [(Input::Normal, 100), (Input::Sharp, 64)];
        for layout in Layout::ALL {
            let mut case = Case::<f16>::with_layout(PROBLEM, &sequences, 11, layout);
            case.spoil(spoilt, every, 12);
            for policy in [Policy::SOUND, Policy::CODES, Policy::BARE, ALL, WATCHED, EXPLORED] {
                reasons |= compare(&case, &policy, &format!("{spoilt:?} every {every}, {layout:?}"));
            }
        }
    }
    // Everything was found that there is to find by steps that choose for themselves.
    let found =
        reason::CANARY | reason::RANKING | reason::BOUNDARY | reason::QUERY_NOT_FINITE | reason::NO_BOUND;
    assert_eq!(reasons & found, found, "{reasons:#b}");
}

/// Warps of a group are shared out where threads would else be idle: whoever computes them, the bits are the
/// same.
#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let sequences = [(Input::Normal, 250), (Input::Sharp, 97)];
    for (problem, sequences) in [
        (PROBLEM, &sequences[..1]),
        (PROBLEM, &sequences[..]),
        (StepProblem { q_heads: 4, kv_heads: 1, max_tokens: 2048, ..PROBLEM }, &[(Input::Normal, 1500)][..]),
    ] {
        let case = Case::<f16>::new(problem, sequences, 14);
        for threads in [1, 2, 3, 16] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for policy in [Policy::SOUND, ALL, SOME_DENSE, WATCHED] {
                pool.install(|| {
                    compare(&case, &policy, &format!("{threads} threads"));
                });
            }
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
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_step_gives_the_emulators_bits(
        head_dim in prop::sample::select(vec![64u32, 128]),
        group in 1u32..=16,
        kv_heads in 1u32..3,
        sequences in prop::collection::vec(
            (prop::sample::select(Input::MADE.to_vec()), prop_oneof![0u32..40, 0u32..400]), 1..3),
        spare in 0u32..2000,
        policy in prop::sample::select(POLICIES.to_vec()),
        per_group in any::<bool>(),
        spoilt in spoilts(),
        every in prop::sample::select(vec![1u64, 2, 16, 1000, 20_000]),
        half_floats in any::<bool>(),
        layout in prop::sample::select(Layout::ALL.to_vec()),
        seed in any::<u64>(),
    ) {
        fn one<E: CacheElement>(
            problem: StepProblem, sequences: &[(Input, u32)], policy: &Policy, (spoilt, every): (Spoilt, u64),
            layout: Layout, seed: u64,
        ) {
            let mut case = Case::<E>::with_layout(problem, sequences, seed, layout);
            case.spoil(spoilt, every, seed ^ 3);
            compare(&case, policy, &format!("{spoilt:?} every {every}, {layout:?}, seed {seed}"));
        }
        let max_tokens = sequences.iter().map(|(_, length)| *length).max().unwrap() + spare + 1;
        let problem = StepProblem { sequences: 1, q_heads: group * kv_heads, kv_heads, head_dim, max_tokens };
        let policy = Policy { per_group, ..policy };
        if half_floats {
            one::<f16>(problem, &sequences, &policy, (spoilt, every), layout, seed);
        } else {
            one::<bf16>(problem, &sequences, &policy, (spoilt, every), layout, seed);
        }
    }
}

/// Steps on the CPU's own path: none.
const NEVER: std::ops::Range<u64> = u64::MAX..u64::MAX;

/// A cache that grows and takes steps, on either path or first on the one and then on the other: the bits of
/// everything that is returned, the traffic of its scratch included.
fn grow<E: CacheElement>(slots: (u32, u32), policy: &Policy, slices: std::ops::Range<u64>) -> Vec<Vec<u32>> {
    grow_in::<E>(Layout::Compact, slots, policy, slices)
}

fn grow_in<E: CacheElement>(
    layout: Layout,
    slots: (u32, u32),
    policy: &Policy,
    slices: std::ops::Range<u64>,
) -> Vec<Vec<u32>> {
    let device = Device::cpu(EmuOptions::default());
    let stream = Stream::new(&device).unwrap();
    let geometry = Geometry::new(2, 64).unwrap().with_layout(layout).with_rounding(policy.rounding(3));
    let (key_slots, value_slots) = slots;
    let extents = Extents { geometry, blocks: 40, sequences: 4, max_tokens: 300, key_slots, value_slots };
    let mut cache = TieredCache::<E>::new(&device, extents).unwrap();
    let input =
        |count: usize, seed: u64| Buffer::from_slice(&device, &tokens::<E>(geometry, count, seed)).unwrap();
    let first = cache.start_sequence().unwrap();
    if slices.start > 0 {
        cache = cache.with_kernels();
    }
    cache.prefill(&stream, first, &input(157, 1), &input(157, 2)).unwrap();
    let second = cache.start_sequence().unwrap();
    cache.prefill(&stream, second, &input(15, 3), &input(15, 4)).unwrap();
    cache.fork(&stream, first).unwrap();
    let problem = StepProblem { sequences: 4, q_heads: 6, kv_heads: 2, head_dim: 64, max_tokens: 300 };
    let mut plan = StepPlan::<E>::with_layout(&device, problem, policy, layout).unwrap();
    let mut out = plan.allocate().unwrap();
    let mut all = Vec::new();
    for step in 0..6 {
        if step == slices.end {
            cache = cache.with_kernels();
        }
        cache.append(&stream, &input(4, 10 + step), &input(4, 20 + step)).unwrap();
        let queries = Buffer::from_slice(&device, &queries::<E>(problem, 30 + step / 2)).unwrap();
        cache.attend(&stream, &mut plan, &queries, &mut out).unwrap();
        let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<u32>>();
        all.push(bits(out.output.to_vec().unwrap()));
        all.push(bits(out.lse.to_vec().unwrap()));
        all.push(bytemuck::cast_slice(&out.certificates.to_vec().unwrap()).to_vec());
        all.push(bytemuck::cast_slice(&cache.traffic(&stream).unwrap()).to_vec());
        let [long, short] = [158, 16].map(|length| length + step as u32);
        let read = plan.originals_read(&[long, short, long, 0]).unwrap();
        all.push(vec![read.key_tiles as u32, read.value_tiles as u32, read.dense_rows as u32]);
    }
    cache.check(&stream).unwrap();
    for (tiles, annotations) in cache.quantized(&stream, first).unwrap() {
        all.push(tiles.into_iter().map(u32::from).collect());
        all.push(bytemuck::cast_slice(&annotations).to_vec());
    }
    all
}

#[test]
fn a_cache_may_change_its_path_at_any_time() {
    let few = Policy { coverage: 0.7, max_keys: 4, expanded_keys: 6, value_tolerance: 0.02, ..Policy::SOUND };
    for slots in [(0, 0), (3, 2), (100, 100)] {
        let checked = Policy { ranking: 1, canary: 1e-6, renew: 0, risk: 0.0, ..few };
        let for_itself = Policy { renew: 0, risk: 0.0, ..few };
        for policy in [few, for_itself, Policy { renew: 2, ..ALL }, Policy::BARE, checked] {
            let kernels = grow::<f16>(slots, &policy, NEVER);
            for slices in [0..6, 0..3, 0..1] {
                let mixed = grow::<f16>(slots, &policy, slices.clone());
                let other = kernels.iter().zip(&mixed).position(|(a, b)| a != b);
                assert_eq!(other, None, "{slots:?} {slices:?} {policy:?}");
                assert_eq!(kernels.len(), mixed.len());
            }
        }
    }
    assert_eq!(grow::<bf16>((3, 2), &few, NEVER), grow::<bf16>((3, 2), &few, 0..6));
    for policy in [Policy { renew: 0, risk: 0.0, ..few }, Policy::PAPER] {
        let of_slices = |slices| grow_in::<f16>(Layout::Paper, (3, 2), &policy, slices);
        let kernels = of_slices(NEVER);
        assert!(kernels == of_slices(0..6) && kernels == of_slices(0..3), "{policy:?}");
    }
}

/// What a cache says, its originals, and its tiles and annotations.
type Held = (Vec<String>, Vec<Vec<bf16>>, Vec<(Vec<u8>, Vec<Annotation>)>);

/// Tokens that a cache takes and tokens that it does not, on one path: what it says and what it holds.
fn refuse(kernels: bool) -> Held {
    let device = Device::cpu(EmuOptions::default());
    let stream = Stream::new(&device).unwrap();
    let geometry = Geometry::new(3, 64).unwrap();
    let extents =
        Extents { geometry, blocks: 24, sequences: 3, max_tokens: 70, key_slots: 5, value_slots: 3 };
    let mut cache = TieredCache::<bf16>::new(&device, extents).unwrap();
    if kernels {
        cache = cache.with_kernels();
    }
    let elements = 3 * 64;
    let made = |count: usize, seed: u64| tokens::<bf16>(geometry, count, seed);
    let buffer = |elements: &[bf16]| Buffer::from_slice(&device, elements).unwrap();
    let [first, second] = [cache.start_sequence().unwrap(), cache.start_sequence().unwrap()];
    cache.prefill(&stream, first, &buffer(&made(39, 1)), &buffer(&made(39, 2))).unwrap();
    let mut said = Vec::new();
    for step in 0..12 {
        let (mut keys, mut values) = (made(3, 100 + step), made(3, 200 + step));
        match step {
            4 => keys[elements + 5] = bf16::NAN,
            7 => values[elements - 1] = bf16::NEG_INFINITY,
            9 => (keys[70], values[3]) = (bf16::from_f32(-1e6), bf16::from_f32(7e4)),
            _ => {}
        }
        cache.append(&stream, &buffer(&keys), &buffer(&values)).unwrap();
        if step % 3 == 2 {
            said.push(format!("{:?}", cache.check(&stream).map_err(|error| error.to_string())));
        }
    }
    // Begins in a block, fills several, ends in one.
    cache.prefill(&stream, second, &buffer(&made(45, 3)), &buffer(&made(45, 4))).unwrap();
    let mut bad = made(9, 5);
    bad[7 * elements + 70] = bf16::INFINITY;
    let error = cache.prefill(&stream, second, &buffer(&made(9, 6)), &buffer(&bad)).unwrap_err();
    said.push(error.to_string());
    let (mut rows, mut quantized) = (Vec::new(), Vec::new());
    for sequence in [first, second] {
        rows.extend(cache.read(&stream, sequence).unwrap());
        quantized.extend(cache.quantized(&stream, sequence).unwrap());
    }
    said.push(format!("{:?}", cache.check(&stream).map_err(|error| error.to_string())));
    (said, rows, quantized)
}

#[test]
fn tokens_are_refused_alike() {
    let (kernels, slices) = (refuse(true), refuse(false));
    assert_eq!(kernels.0, slices.0);
    assert!(kernels.0.iter().filter(|said| said.contains("not finite")).count() >= 2, "{:?}", kernels.0);
    assert!(kernels.0.iter().any(|said| said.contains("beyond f16")), "{:?}", kernels.0);
    assert!(kernels.1 == slices.1 && kernels.2 == slices.2);
}

#[test]
fn what_does_not_fit_is_refused() {
    let case = Case::<f16>::new(StepProblem { max_tokens: 40, ..PROBLEM }, &[(Input::Normal, 33)], 13);
    let refused = |slices: Slices<'_, f16>, heads: usize, part: &str| {
        let mut step = Step::new(case.batch.problem, &Policy::SOUND).unwrap();
        let (mut output, mut lse) = (vec![1.0; 9 * 64], vec![1.0; 9]);
        let mut certificates = vec![Certificate::UNKNOWN; heads];
        let out = Out { output: &mut output, lse: &mut lse, certificates: &mut certificates };
        let error = step.run(slices, out).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        assert_eq!(error.lines().count(), 1);
        assert!(output.iter().chain(&lse).all(|x| *x == 1.0), "written in spite of {error}");
    };
    let slices = case.slices();
    refused(Slices { queries: &slices.queries[1..], ..slices }, 9, "the slice of queries has 575");
    refused(Slices { tiles: &slices.tiles[1..], ..slices }, 9, "the slice of tiles");
    refused(Slices { annotations: &[], ..slices }, 9, "the slice of annotations has 0");
    refused(Slices { table: &[0, 1, 6], ..slices }, 9, "block 6 is not in the pool, which has 6");
    refused(Slices { lengths: &[49], ..slices }, 9, "49 tokens do not fit 3 blocks");
    refused(slices, 8, "the slice of certificates has 8");
    for (problem, part) in [
        (StepProblem { head_dim: 96, ..PROBLEM }, "head_dim 96"),
        (StepProblem { max_tokens: u32::MAX, ..PROBLEM }, "tokens a sequence are too many"),
        (StepProblem { kv_heads: 0, ..PROBLEM }, "kv_heads is 0"),
    ] {
        let error = Step::new(problem, &Policy::SOUND).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let error = Step::new(PROBLEM, &Policy { coverage: 2.0, ..Policy::SOUND }).unwrap_err().to_string();
    assert!(error.contains("coverage is 2"), "{error}");
}
