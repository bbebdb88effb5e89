//! Cases of whole steps for `ferrokv check`: everything that each kernel of a step leaves behind, over
//! lengths around every edge, groups, policies, hostile caches and scratches.

use super::cases::in_layout;
use super::proof::{Batch, Input, Trial};
use super::{CertifiedElement, Geometry, Layout, Policy, StepElement, StepProblem};
use crate::Device;
use crate::attention::dense::DenseElement;
use crate::check::{Case, CaseError, Coverage, OutputBuffer};
use half::{bf16, f16};
use kernels_gpu::certified::{mark, rank, settle, weigh};

/// Every head is computed from the originals.
const DENSE: Policy = Policy { error_budget: 0.0, ..Policy::CODES };
/// Some heads are.
const SOME_DENSE: Policy = Policy { error_budget: 0.5, per_group: false, ..CHOOSING };
/// The same by a list that is used for two steps.
const SOME_DENSE_CARRIED: Policy = Policy { renew: 2, ..SOME_DENSE };
/// All are over budget: in the third step no quantized block is read.
const LEFT: Policy = Policy { error_budget: 0.0, renew: 4, ..Policy::SOUND };
/// The same where every step renews: in the fifth.
const LEFT_RENEWED: Policy = Policy { renew: 1, retry: 2, ..LEFT };
/// Each step chooses for itself.
const CHOOSING: Policy = Policy::CHOOSING;
/// Every block is promoted.
const ALL: Policy = Policy {
    coverage: 1.0,
    min_keys: u32::MAX,
    max_keys: u32::MAX,
    value_tolerance: 0.0,
    max_values: u32::MAX,
    renew: 0,
    ..Policy::CODES
};
/// Every block is, from the second step on.
const ALL_CARRIED: Policy = Policy { renew: 1, ..ALL };

/// One block's keys are, whose rank is checked against all others'.
const RANKED: Policy = Policy { min_keys: 1, max_keys: 1, ranking: 1, renew: 0, ..Policy::CODES };
/// Every block's values are, and no keys: a list of one kind alone, which a second step uses again.
const VALUES_CARRIED: Policy =
    Policy { value_tolerance: 0.0, max_values: u32::MAX, renew: 2, ..Policy::CODES };

/// A list has little, and what weighs is promoted on sight.
const SIGHTED: Policy = Policy {
    min_keys: 1,
    max_keys: 1,
    max_values: 1,
    error_budget: f32::INFINITY,
    renew: 2,
    sight: 1.0 / 64.0,
    ..Policy::UNWATCHED
};
/// Everything is, as far as warps have room, and heads are over budget all the same.
const SIGHTED_ALL: Policy = Policy { sight: 1e-9, error_budget: 1e-4, ..SIGHTED };

/// What a case is about.
#[derive(Clone, Copy)]
struct Step {
    sequences: &'static [(Input, u32)],
    kv_heads: u32,
    group: u32,
    max_tokens: u32,
    layout: Layout,
    policy: (&'static str, Policy),
    /// Slots for keys and for values. Several steps then: the second finds what the first has brought.
    slots: Option<(u32, u32)>,
    race_check: bool,
    /// Whether stored data change after they were written.
    fault: bool,
    /// Whether an element of the last query head of the last sequence is no number.
    no_number: bool,
    /// What a block has of shared memory, at the most.
    shared_bytes: u32,
}

const EDGES: &[(Input, u32)] = &[
    (Input::Normal, 0),
    (Input::Normal, 1),
    (Input::Sharp, 15),
    (Input::Normal, 16),
    (Input::Outlier, 130),
    (Input::Diffuse, 160),
];
const HOSTILE: &[(Input, u32)] = &[
    (Input::Constant, 100),
    (Input::Ties, 320),
    (Input::Huge, 77),
    (Input::Trailing, 141),
    (Input::Dominant, 256),
    (Input::Duplicates, 90),
    (Input::Wide, 111),
    (Input::Extremal, 208),
];
const FEW: &[(Input, u32)] = &[(Input::Normal, 0), (Input::Sharp, 15), (Input::Outlier, 130)];
/// With nine KV heads no sequence is cut, and the warps of the first have enough tiles to count them.
const UNEQUAL: &[(Input, u32)] = &[
    (Input::Normal, 2100),
    (Input::Sharp, 40),
    (Input::Normal, 0),
    (Input::Outlier, 300),
    (Input::Normal, 17),
    (Input::Diffuse, 64),
    (Input::Normal, 700),
    (Input::Wide, 16),
];
const SMALL: &[(Input, u32)] = &[(Input::Normal, 51)];
/// Each edge once, and each hostile input, in as few tokens as still have blocks to choose from.
const SHORT_EDGES: &[(Input, u32)] = &[(Input::Normal, 0), (Input::Sharp, 15), (Input::Outlier, 50)];
const SHORT_HOSTILE: &[(Input, u32)] = &[
    (Input::Constant, 20),
    (Input::Ties, 48),
    (Input::Huge, 17),
    (Input::Trailing, 29),
    (Input::Dominant, 64),
    (Input::Duplicates, 34),
    (Input::Wide, 31),
    (Input::Extremal, 32),
];

const PLAIN: Step = Step {
    sequences: EDGES,
    kv_heads: 2,
    group: 4,
    max_tokens: 160,
    layout: Layout::Compact,
    policy: ("choosing", CHOOSING),
    slots: None,
    race_check: false,
    fault: false,
    no_number: false,
    shared_bytes: u32::MAX,
};

/// Shared memory of a block on GPUs with the least of those that have what the kernels need.
const LEAN: u32 = 99 << 10;

/// Warps keep together.
const PACED: Step = Step {
    sequences: UNEQUAL,
    kv_heads: 9,
    group: 1,
    max_tokens: 8192,
    policy: ("bare", Policy::BARE),
    ..PLAIN
};

/// The same where sequences are cut in two, and some blocks have nothing to do.
const PACED_IN_TWO: Step = Step { kv_heads: 8, max_tokens: 16384, ..PACED };
/// Both with one KV head, and as many sequences in the place of the others, most of them empty.
const PACED_SHORT: Step = Step { sequences: &lone::<72>(2100), kv_heads: 1, ..PACED };
const PACED_IN_TWO_SHORT: Step = Step { sequences: &lone::<64>(2100), kv_heads: 1, ..PACED_IN_TWO };

/// One sequence of so many tokens, a short one, and empty ones.
const fn lone<const N: usize>(tokens: u32) -> [(Input, u32); N] {
    let mut sequences = [(Input::Normal, 0); N];
    sequences[0] = (Input::Normal, tokens);
    sequences[N - 2] = (Input::Diffuse, 40);
    sequences
}

/// Every check, and a third of the other blocks looked at.
const WATCHED: Policy = Policy { ranking: 3, canary: 1e-6, exploration: 0.33, ..CHOOSING };
/// What a list has and some other blocks are looked at, ahead of every second step, and of every one.
const WATCHED_CARRIED: Policy = Policy { canary: 1e-6, exploration: 0.17, renew: 2, ..Policy::SOUND };
const WATCHED_ALL: Policy = Policy { canary: 1e-6, ..ALL_CARRIED };
/// The same where nothing is promoted and everything is looked at.
const EXPLORED: Policy = Policy { canary: 1e-6, exploration: 1.0, renew: 0, ..Policy::CODES };
const EXPLORED_CARRIED: Policy = Policy { renew: 1, max_keys: 1, ..EXPLORED };

fn steps(coverage: Coverage) -> Vec<Step> {
    // Looking for races takes its time with the hundreds of threads that choose: two heads, and two splits.
    let small = Step { sequences: SMALL, kv_heads: 1, group: 2, max_tokens: 288, race_check: true, ..PLAIN };
    let long = Step { sequences: &[(Input::Normal, 1500)], kv_heads: 1, max_tokens: 2048, ..PLAIN };
    let mut steps = vec![
        Step { policy: ("some dense", SOME_DENSE), ..small },
        Step { policy: ("some dense, carried", SOME_DENSE_CARRIED), slots: Some((2, 3)), ..small },
        Step { policy: ("all, carried", ALL_CARRIED), slots: Some((2, 3)), ..small },
        Step { policy: ("ranked", RANKED), ..small },
        Step { policy: ("left to the dense rung", LEFT), slots: Some((2, 3)), ..small },
        Step { policy: ("left to the dense rung", LEFT), slots: Some((0, 0)), group: 9, ..PLAIN },
        Step { policy: ("left, renewed", LEFT_RENEWED), slots: Some((40, 7)), ..PLAIN },
        Step { policy: ("values, carried", VALUES_CARRIED), slots: Some((2, 3)), ..small },
        Step { policy: ("sound", Policy::SOUND), slots: Some((40, 7)), ..PLAIN },
        Step { policy: ("sighted", SIGHTED), slots: Some((2, 3)), ..small },
        Step { policy: ("sighted", SIGHTED), slots: Some((40, 7)), group: 9, ..PLAIN },
        Step { policy: ("all sighted", SIGHTED_ALL), slots: Some((40, 7)), ..PLAIN },
        Step { policy: ("all sighted", SIGHTED_ALL), slots: Some((400, 0)), ..PACED },
        Step { group: 9, policy: ("sound", Policy::SOUND), slots: Some((0, 0)), ..PLAIN },
        Step { group: 3, policy: ("all, carried", ALL_CARRIED), slots: Some((2, 3)), ..PLAIN },
        Step {
            sequences: HOSTILE,
            group: 8,
            kv_heads: 1,
            max_tokens: 320,
            policy: ("sound", Policy::SOUND),
            slots: Some((5, 40)),
            ..PLAIN
        },
        Step {
            sequences: HOSTILE,
            group: 8,
            kv_heads: 1,
            max_tokens: 320,
            policy: ("sighted", SIGHTED),
            slots: Some((5, 40)),
            ..PLAIN
        },
        Step { policy: ("fast, chosen in the step", Policy { renew: 0, risk: 0.0, ..Policy::FAST }), ..long },
        Step { policy: ("fast", Policy::FAST), slots: Some((40, 7)), ..long },
        Step { policy: ("bare", Policy::BARE), ..PLAIN },
        PACED,
        PACED_IN_TWO,
        // A warp has enough blocks for sums that wait for four of them, several times.
        Step { policy: ("sound", Policy::SOUND), ..PACED },
        Step { policy: ("bare, two passes", Policy { renew: 0, ..Policy::BARE }), ..PLAIN },
        Step { policy: ("all", ALL), slots: Some((2, 3)), ..small },
        Step { policy: ("watched", WATCHED), slots: Some((2, 3)), fault: true, ..small },
        Step { group: 9, policy: ("watched", WATCHED), slots: Some((40, 7)), ..PLAIN },
        Step { policy: ("explored", EXPLORED), fault: true, ..PLAIN },
        Step { policy: ("watched, carried", WATCHED_CARRIED), slots: Some((2, 3)), fault: true, ..small },
        Step { group: 9, policy: ("watched, carried", WATCHED_CARRIED), slots: Some((40, 7)), ..PLAIN },
        Step { policy: ("watched, all", WATCHED_ALL), slots: Some((2, 3)), fault: true, ..PLAIN },
        Step { policy: ("explored, carried", EXPLORED_CARRIED), fault: true, ..PLAIN },
        Step { policy: ("watched", WATCHED), no_number: true, ..PLAIN },
        Step { policy: ("watched, all", WATCHED_ALL), slots: Some((2, 3)), no_number: true, ..PLAIN },
        Step { policy: ("sound", Policy::SOUND), slots: Some((2, 3)), no_number: true, ..PLAIN },
        Step { sequences: EDGES, group: 3, policy: ("all", ALL), slots: Some((2, 3)), ..PLAIN },
        Step { group: 7, policy: ("strict", Policy::STRICT), kv_heads: 1, ..PLAIN },
        Step {
            sequences: FEW,
            group: 16,
            policy: ("paper", Policy::PAPER),
            slots: Some((5, 40)),
            kv_heads: 1,
            ..PLAIN
        },
        Step { group: 1, policy: ("codes", Policy::CODES), ..PLAIN },
        Step { policy: ("dense", DENSE), ..PLAIN },
        Step { sequences: HOSTILE, group: 8, kv_heads: 1, max_tokens: 320, ..PLAIN },
        Step { policy: ("strict", Policy::STRICT), slots: Some((40, 7)), ..long },
    ];
    // Lists, and passes without them, by the kernels that take less: all of their code.
    let listed = [
        "all, carried",
        "values, carried",
        "sound",
        "sighted",
        "all sighted",
        "left, renewed",
        "fast",
        "bare",
    ];
    let again = |step: &&Step| listed.contains(&step.policy.0) && step.kv_heads < PACED_IN_TWO.kv_heads;
    let lean: Vec<Step> =
        steps.iter().filter(again).map(|step| Step { shared_bytes: LEAN, ..*step }).collect();
    steps.extend(lean);
    let paper = Step { layout: Layout::Paper, ..PLAIN };
    steps.extend([
        Step { policy: ("paper", Policy::PAPER), slots: Some((2, 3)), layout: Layout::Paper, ..small },
        Step { group: 9, policy: ("watched", WATCHED), slots: Some((40, 7)), ..paper },
        Step { policy: ("explored", EXPLORED), fault: true, ..paper },
        Step { policy: ("watched", WATCHED), no_number: true, ..paper },
        Step { group: 3, policy: ("all", ALL), slots: Some((2, 3)), ..paper },
        Step { policy: ("some dense", SOME_DENSE), ..paper },
        Step { policy: ("bare, two passes", Policy { renew: 0, ..Policy::BARE }), ..paper },
        Step { sequences: HOSTILE, group: 8, kv_heads: 1, max_tokens: 320, ..paper },
        Step { policy: ("paper", Policy::PAPER), layout: Layout::Paper, ..long },
    ]);
    if coverage == Coverage::Full {
        let many: &[(Input, u32)] =
            &[(Input::Sharp, 3000), (Input::Diffuse, 8192), (Input::Outlier, 5), (Input::Ties, 7777)];
        steps.push(Step { sequences: many, group: 8, max_tokens: 8192, ..PLAIN });
        let one: &[(Input, u32)] = &[(Input::Normal, 39_999)];
        let step =
            Step { sequences: one, kv_heads: 4, max_tokens: 131_072, slots: Some((500, 500)), ..PLAIN };
        let paper = Step { policy: ("paper", Policy::PAPER), layout: Layout::Paper, ..step };
        steps.extend([step, Step { policy: ("sound", Policy::SOUND), ..step }, paper]);
    }
    if coverage == Coverage::Small {
        steps.iter_mut().for_each(|step| *step = short(*step));
        // More entries in a list than its sequence's warps take in one round.
        let listed =
            Step { sequences: &[(Input::Normal, 350)], group: 2, kv_heads: 1, max_tokens: 384, ..PLAIN };
        steps.push(Step { policy: ("all, carried", ALL_CARRIED), slots: Some((2, 3)), ..listed });
    }
    steps
}

/// The same step over as little as still takes every way through the kernels: one KV head, two query heads
/// where nine (two rows of a tile) are not what it is about, and no more tokens than two splits and a choice
/// of blocks need.
fn short(step: Step) -> Step {
    let long = step.sequences.iter().any(|(_, tokens)| *tokens > 1000);
    match step {
        Step { kv_heads: 9, policy, slots, .. } => Step { policy, slots, ..PACED_SHORT },
        Step { kv_heads: 8, .. } => PACED_IN_TWO_SHORT,
        _ => Step {
            sequences: match step.sequences {
                [(Input::Constant, _), ..] => SHORT_HOSTILE,
                _ if long => &[(Input::Normal, 150)],
                [_, _, ..] => SHORT_EDGES,
                one => one,
            },
            kv_heads: 1,
            group: if step.group < 9 { 2 } else { 9 },
            max_tokens: if long { 288 } else { step.max_tokens },
            ..step
        },
    }
}

/// The cases of every instance, over short sequences or up to caches of many thousand tokens.
pub fn cases(coverage: Coverage) -> Vec<Case> {
    let mut cases = Vec::new();
    for step in steps(coverage) {
        for head_dim in super::STEP_HEAD_DIMS {
            add::<f16>(&mut cases, step, head_dim);
            add::<bf16>(&mut cases, step, head_dim);
        }
    }
    cases
}

fn add<E: StepElement + CertifiedElement>(cases: &mut Vec<Case>, step: Step, head_dim: u32) {
    let Step {
        sequences,
        kv_heads,
        group,
        max_tokens,
        layout,
        policy,
        slots,
        race_check,
        fault,
        no_number,
        shared_bytes,
    } = step;
    let problem = StepProblem {
        sequences: sequences.len() as u32,
        q_heads: group * kv_heads,
        kv_heads,
        head_dim,
        max_tokens,
    };
    let (Some(kernels), Some((dense, _)), Ok(geometry)) = (
        E::step_kernels(head_dim, layout),
        <E as DenseElement>::kernel(head_dim, shared_bytes),
        Geometry::new(kv_heads, head_dim),
    ) else {
        return;
    };
    let text: Vec<String> = sequences.iter().map(|(input, length)| format!("{input} {length}")).collect();
    let kernels = kernels.within(shared_bytes);
    let fault = if fault { " with faults" } else { "" };
    let no_number = if no_number { " with a query that is no number" } else { "" };
    let lean = if shared_bytes == LEAN { " in 99 KiB" } else { "" };
    let scratch = slots.map_or(String::new(), |(keys, values)| format!(" slots={keys},{values}"));
    let label = format!(
        "{} heads={}/{kv_heads} head_dim={head_dim} of {max_tokens} {}{scratch}{fault}{no_number}{lean}{}: {}",
        E::NAME,
        problem.q_heads,
        policy.0,
        in_layout(layout),
        text.join(", ")
    );
    let [attend, replace, audit] = kernels.infos();
    let case = Case::new(attend, label, move |device| run::<E>(device, problem, step))
        .and(weigh::kernel().info())
        .and(mark::kernel().info())
        .and(replace)
        .and(audit)
        .and(rank::kernel().info())
        .and(settle::kernel().info())
        .and(dense.info())
        .and(E::quantize_block(geometry.with_layout(layout)).info());
    // In the paper's layout no list is carried.
    let case =
        if layout == Layout::Compact { case.and(kernels.carry(policy.1.certify).info()) } else { case };
    let compares_ahead = policy.1.renew > 0 && policy.1.watch().is_some();
    let case = if compares_ahead { case.and(kernels.canary().info()) } else { case };
    let case = case.within(shared_bytes);
    cases.push(if race_check { case.race_checked() } else { case });
}

/// One step, or two with a scratch: what is returned, and what the kernels hand to each other.
fn run<E: StepElement + CertifiedElement>(
    device: &Device,
    problem: StepProblem,
    step: Step,
) -> Result<Vec<OutputBuffer>, CaseError> {
    let mut batch = Batch::<E>::new(problem, step.sequences, 5, 9);
    if step.no_number
        && let Some(last) = batch.queries.last_mut()
    {
        *last = E::from_f32(f32::NAN);
    }
    let mut trial = Trial::with_layout(device, problem, batch.blocks(), step.layout)?
        .with_rounding(step.policy.1.rounding(3));
    trial.load(&batch)?;
    trial.ask(&batch)?;
    if step.fault {
        // A code's highest bit and a zero's sign, of a block of the last sequence.
        let geometry = Geometry::new(problem.kv_heads, problem.head_dim)?.with_layout(step.layout);
        let elements = geometry.layout().elements() as usize;
        let tile = batch.row(step.sequences.len() - 1, 0, 0) / elements * geometry.layout().bytes as usize;
        trial.flip(tile + geometry.layout().key_code(3, 5) as usize, 0x80)?;
        trial.flip(tile + geometry.layout().value_zero(2, 1) as usize + 1, 0x80)?;
    }
    if let Some((keys, values)) = step.slots {
        trial.set_scratch(keys, values)?;
    }
    let mut plan = trial.plan(&step.policy.1)?;
    plan.fill(trial.stream(), 0x33)?;
    let mut out = plan.allocate()?;
    let mut outputs = Vec::new();
    for (i, names) in [
        ["output", "lse", "certificates"],
        ["second output", "second lse", "second certificates"],
        ["third output", "third lse", "third certificates"],
        ["fourth output", "fourth lse", "fourth certificates"],
        ["fifth output", "fifth lse", "fifth certificates"],
    ]
    .into_iter()
    .enumerate()
    {
        let returned = trial.step_poisoned(&mut plan, &mut out)?;
        outputs.push(OutputBuffer::new(names[0], returned.output));
        outputs.push(OutputBuffer::new(names[1], returned.lse));
        let words: Vec<u32> = bytemuck::cast_slice(&returned.certificates).to_vec();
        outputs.push(OutputBuffer::new(names[2], words));
        // A list that is carried is there in the second step, and tiles that it has brought in the third; a
        // row is left to the dense rung in the fifth at the latest.
        let last = match (step.slots, step.policy.1) {
            (None, _) => 0,
            (_, Policy { renew: 0, .. }) => 1,
            (_, policy) if policy == LEFT_RENEWED => 4,
            _ => 2,
        };
        if i == last {
            break;
        }
    }
    // What is between has masses then that are no numbers, of no particular bits.
    let between = if step.no_number { Vec::new() } else { plan.between()? };
    for (name, words) in between {
        outputs.push(if name.starts_with("gathered") {
            // Sums, of which those of infinite terms are no numbers: one is as good as any.
            OutputBuffer::new(name, words.into_iter().map(f32::from_bits).collect::<Vec<f32>>())
        } else {
            OutputBuffer::new(name, words)
        });
    }
    if step.slots.is_some() {
        let (near, directory) = trial.scratch_contents()?;
        outputs.push(OutputBuffer::new("directory", directory));
        outputs.push(OutputBuffer::new("scratch", near.iter().map(|x| x.to_f32()).collect::<Vec<f32>>()));
    }
    Ok(outputs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use simt::emu::EmuOptions;

    #[test]
    fn counts_are_zero_again_behind_a_step() {
        let device = Device::cpu(EmuOptions::default());
        let problem = |step: &Step, max_tokens| StepProblem {
            sequences: step.sequences.len() as u32,
            q_heads: step.group * step.kv_heads,
            kv_heads: step.kv_heads,
            head_dim: 64,
            max_tokens,
        };
        let plan = |policy: &Policy, max_tokens| {
            super::super::StepPlan::<f16>::new(&device, problem(&PACED, max_tokens), policy).unwrap()
        };
        assert!(plan(&Policy::BARE, 8192).is_paced() && !plan(&Policy::BARE, 8000).is_paced());
        assert!(!plan(&Policy::CODES, 8192).is_paced() && !plan(&Policy::SOUND, 8192).is_paced());
        for (step, splits) in [(PACED, 1), (PACED_IN_TWO, 2), (PACED_SHORT, 1), (PACED_IN_TWO_SHORT, 2)] {
            let problem = problem(&step, step.max_tokens);
            let batch = Batch::<f16>::new(problem, step.sequences, 5, 9);
            let mut trial = Trial::with_layout(&device, problem, batch.blocks(), Layout::Compact).unwrap();
            trial.load(&batch).unwrap();
            trial.ask(&batch).unwrap();
            let mut plan = trial.plan(&Policy::BARE).unwrap();
            assert!(plan.is_paced() && plan.splits() == splits);
            let mut out = plan.allocate().unwrap();
            for _ in 0..2 {
                trial.step_poisoned(&mut plan, &mut out).unwrap();
                let between = plan.between().unwrap();
                let (_, counters) = between.iter().find(|(name, _)| *name == "counters").unwrap();
                assert_eq!(counters, &vec![0; 2 * step.sequences.len() * step.kv_heads as usize + 1]);
            }
        }
    }
}
