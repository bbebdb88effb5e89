//! Steps of certified attention: never further from exact attention than their certificate says, part by part
//! what they should be, and the same bits wherever the cache lies.

mod carried;
mod choosing;
mod faults;
mod parts;
mod ranking;
mod relations;
mod targets;

use ferrokv::host::Device;
use ferrokv::host::certified::proof::{Batch, Exact, Input, Options, POLICIES, Returned, Trial, prove};
use ferrokv::host::certified::{
    CertifiedElement, Layout, Policy, Rounding, Rung, SecondPass, StepElement, StepProblem,
};
use ferrokv::simt::emu::EmuOptions;
use half::{bf16, f16};
use std::sync::OnceLock;

/// The emulator, and the GPU where there is one.
fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let mut devices = vec![Device::cpu(EmuOptions::default())];
        match Device::cuda(0, ferrokv::ptx()) {
            Ok(gpu) => devices.push(gpu),
            Err(error) => println!("without a GPU: {error}"),
        }
        devices
    })
}

/// Every head is computed from the originals.
const DENSE: Policy = Policy { error_budget: 0.0, ..Policy::CODES };
/// Every block is promoted, its keys and its values.
const ALL: Policy = Policy {
    coverage: 1.0,
    min_keys: u32::MAX,
    max_keys: u32::MAX,
    value_tolerance: 0.0,
    max_values: u32::MAX,
    renew: 0,
    ..Policy::CODES
};
/// How codes are rounded.
const CHANCE: Rounding = Rounding::Stochastic { seed: 5 };
/// The default thresholds, by which each step chooses for itself.
const CHOOSING: Policy = Policy::CHOOSING;

fn problem(sequences: usize, group: u32, kv_heads: u32, head_dim: u32, max_tokens: u32) -> StepProblem {
    StepProblem { sequences: sequences as u32, q_heads: group * kv_heads, kv_heads, head_dim, max_tokens }
}

/// A batch on a device with its queries.
fn loaded<E: StepElement + CertifiedElement>(device: &Device, batch: &Batch<E>) -> Trial<E> {
    loaded_in(device, batch, Layout::Compact)
}

fn loaded_in<E: StepElement + CertifiedElement>(
    device: &Device,
    batch: &Batch<E>,
    layout: Layout,
) -> Trial<E> {
    // The paper's layout has no steps that ask for chances.
    let rounding = match layout {
        Layout::Compact => CHANCE,
        Layout::Paper => Rounding::Nearest,
    };
    let mut trial =
        Trial::with_layout(device, batch.problem, batch.blocks(), layout).unwrap().with_rounding(rounding);
    trial.load(batch).unwrap();
    trial.ask(batch).unwrap();
    trial
}

fn step<E: StepElement + CertifiedElement>(trial: &mut Trial<E>, policy: &Policy) -> Returned {
    let mut plan = trial.plan(policy).unwrap();
    let mut out = plan.allocate().unwrap();
    trial.step(&mut plan, &mut out).unwrap()
}

/// Exact attention of every head of a batch.
fn exact<E: StepElement>(batch: &Batch<E>) -> Vec<Exact> {
    let sequences = 0..batch.lengths.len();
    let heads = batch.problem.kv_heads as usize;
    sequences.flat_map(|sequence| (0..heads).flat_map(move |head| batch.exact(sequence, head))).collect()
}

/// No head is further from exact attention than it says; returns how many heads came from which rung.
fn judge<E: StepElement>(batch: &Batch<E>, truth: &[Exact], returned: &Returned, what: &str) -> [u32; 5] {
    let dim = batch.problem.head_dim as usize;
    let heads = batch.problem.q_heads as usize;
    let mut rungs = [0; 5];
    for (row, (exact, certificate)) in truth.iter().zip(&returned.certificates).enumerate() {
        let error = exact.error(&returned.output[row * dim..][..dim]);
        let bound =
            f64::from(certificate.e_key) + f64::from(certificate.e_val) + f64::from(certificate.e_round);
        let sequence = row / heads;
        assert!(
            error <= bound,
            "{what}, {} tokens of {}, head {}: error {error:e} above {bound:e}; {certificate:?}",
            batch.lengths[sequence],
            batch.inputs[sequence],
            row % heads
        );
        rungs[Rung::of(certificate.rung()) as usize] += 1;
    }
    rungs
}

/// Lengths around every edge, of inputs that quantize.
const EDGES: [(Input, u32); 10] = [
    (Input::Normal, 0),
    (Input::Normal, 1),
    (Input::Sharp, 15),
    (Input::Normal, 16),
    (Input::Outlier, 17),
    (Input::Dominant, 130),
    (Input::Sharp, 352),
    (Input::Trailing, 70),
    (Input::Diffuse, 128),
    (Input::Extremal, 200),
];

fn edges_hold<E: StepElement + CertifiedElement>() {
    let mut rungs = [0; 5];
    for (group, head_dim) in [(1, 64), (4, 128), (7, 64), (8, 128), (16, 64), (16, 128)] {
        let batch = Batch::<E>::new(problem(EDGES.len(), group, 2, head_dim, 352), &EDGES, 3, 5);
        let truth = exact(&batch);
        for device in devices() {
            let mut trial = loaded(device, &batch);
            let presets = Policy::PRESETS.map(|name| (name, Policy::preset(name).unwrap()));
            let more = [("codes", Policy::CODES), ("dense", DENSE), ("all", ALL), ("choosing", CHOOSING)];
            // All of them for one shape, of the others two each.
            let all: Vec<_> = presets.into_iter().chain(more).collect();
            let some = all.iter().enumerate().filter(|(i, _)| group == 4 || i % 3 == group as usize % 3);
            for (name, policy) in some.map(|(_, policy)| *policy) {
                let what = format!("{} group {group} head_dim {head_dim} {name}", E::NAME);
                let found = judge(&batch, &truth, &step(&mut trial, &policy), &what);
                (0..5).for_each(|rung| rungs[rung] += found[rung]);
            }
        }
    }
    println!("heads by rung: {rungs:?}");
    assert!(rungs[0] > 100 && rungs[1] > 100 && rungs[3] > 100, "{rungs:?}");
}

#[test]
fn errors_are_within_the_certificates_f16() {
    edges_hold::<f16>();
}

#[test]
fn errors_are_within_the_certificates_bf16() {
    edges_hold::<bf16>();
}

/// Hostile caches, and some of hundreds of blocks in many splits.
#[test]
fn errors_are_within_the_certificates_for_every_input() {
    let sequences: Vec<(Input, u32)> =
        Input::MADE.into_iter().enumerate().map(|(i, input)| (input, 250 + 23 * i as u32)).collect();
    let batch = Batch::<f16>::new(problem(sequences.len(), 4, 1, 128, 520), &sequences, 11, 2);
    let truth = exact(&batch);
    for device in devices() {
        let mut trial = loaded(device, &batch);
        for name in Policy::PRESETS {
            judge(&batch, &truth, &step(&mut trial, &Policy::preset(name).unwrap()), name);
        }
    }
    let long = [(Input::Normal, 3000)];
    let batch = Batch::<bf16>::new(problem(1, 4, 1, 64, 4000), &long, 4, 1);
    let truth = exact(&batch);
    for device in devices() {
        let mut trial = loaded(device, &batch);
        assert!(trial.plan(&Policy::SOUND).unwrap().splits() > 8);
        for policy in [CHOOSING, Policy::SOUND, Policy::CODES, DENSE] {
            judge(&batch, &truth, &step(&mut trial, &policy), "long");
        }
    }
}

/// The paper's layout, over edges and over every input, by all policies whose steps choose for themselves.
fn the_papers_layout_holds<E: StepElement + CertifiedElement>() {
    let mut rungs = [0; 5];
    let inputs: Vec<(Input, u32)> =
        Input::MADE.into_iter().enumerate().map(|(i, input)| (input, 150 + 17 * i as u32)).collect();
    for (sequences, group, head_dim) in
        [(&EDGES[..], 4, 128), (&EDGES, 9, 64), (&inputs, 4, 64), (&inputs, 7, 128)]
    {
        let batch = Batch::<E>::new(problem(sequences.len(), group, 1, head_dim, 352), sequences, 3, 5);
        let truth = exact(&batch);
        for device in devices() {
            let mut trial = loaded_in(device, &batch, Layout::Paper);
            let presets = ["paper", "strict"].map(|name| (name, Policy::preset(name).unwrap()));
            let codes = Policy { renew: 0, ..Policy::CODES };
            for (name, policy) in
                presets.into_iter().chain([("codes", codes), ("all", ALL), ("choosing", CHOOSING)])
            {
                let what = format!("{} group {group} head_dim {head_dim} {name}, paper's layout", E::NAME);
                let found = judge(&batch, &truth, &step(&mut trial, &policy), &what);
                (0..5).for_each(|rung| rungs[rung] += found[rung]);
                assert_eq!(found[Rung::Layer as usize], 0, "{what}: an alarm over sound data");
            }
        }
    }
    println!("heads by rung: {rungs:?}");
    assert!(rungs[0] > 50 && rungs[1] > 50 && rungs[3] > 20, "{rungs:?}");
}

#[test]
fn errors_are_within_the_certificates_in_the_papers_layout_f16() {
    the_papers_layout_holds::<f16>();
}

#[test]
fn errors_are_within_the_certificates_in_the_papers_layout_bf16() {
    the_papers_layout_holds::<bf16>();
}

/// Keys far from zero whose channels have two neighbouring numbers of f16: an f16 zero is one of them, and
/// the steps must reach the other. In f32 it lies between.
#[test]
fn f32_scales_and_zeros_make_deltas_smaller_where_keys_lie_far_out() {
    let mut batch = Batch::<f16>::new(problem(1, 4, 1, 64, 256), &[(Input::Normal, 256)], 3, 5);
    for (i, key) in batch.keys.iter_mut().enumerate() {
        let low = 256.0 * ((i % 64) as f32 - 31.5).signum();
        *key = f16::from_f32(low + if key.to_f32() > 0.0 { 0.25 } else { 0.0 });
    }
    let truth = exact(&batch);
    for device in devices() {
        let [compact, paper] = Layout::ALL.map(|layout| {
            let returned =
                step(&mut loaded_in(device, &batch, layout), &Policy { renew: 0, ..Policy::CODES });
            judge(&batch, &truth, &returned, layout.name());
            returned.certificates
        });
        for (compact, paper) in compact.iter().zip(&paper) {
            assert!(paper.delta < 0.8 * compact.delta, "{paper:?} {compact:?}");
        }
    }
}

/// Lists are carried in the compact layout alone, and whoever asks is told.
#[test]
fn steps_by_a_carried_list_are_refused_in_the_papers_layout() {
    let batch = Batch::<f16>::new(problem(1, 4, 1, 64, 64), &[(Input::Normal, 40)], 1, 1);
    let trial = loaded_in(&devices()[0], &batch, Layout::Paper);
    for name in ["sound", "fast"] {
        let policy = Policy::preset(name).unwrap();
        let Err(error) = trial.plan(&policy) else { panic!("{name} is planned") };
        let refused = |renew| matches!(error, ferrokv::host::certified::Error::CarriedLayout { renew: r } if r == renew);
        assert!(refused(policy.renew), "{error}");
        let error = error.to_string();
        assert!(error.contains("set renew to 0") && error.contains("compact layout"), "{error}");
    }
    assert_eq!(trial.plan(&Policy::PAPER).unwrap().layout(), Layout::Paper);
}

/// What `ferrokv prove` does, small.
#[test]
fn no_certificate_promises_too_much() {
    for device in devices() {
        let options = Options { head_steps: 700, max_tokens: 96, long_tokens: 400, seed: 5 };
        let findings = prove(device, options, &[], &POLICIES, |_| {}).unwrap();
        let total = &findings.total;
        assert!(total.violations == 0 && total.unbounded == 0, "{:#?}", findings.violations);
        assert_eq!(total.rungs[4], 0, "no alarm over sound data: {:?}", total.reasons);
        assert!(total.head_steps >= 700 && findings.inputs.len() == Input::MADE.len());
        // The bounds are neither idle nor all of one kind.
        assert!(total.tightest > 1.0 && total.tightest < 8.0, "{}", total.tightest);
        assert!(total.rungs[0] > 50 && total.rungs[1] > 50, "{:?}", total.rungs);
    }
}
