//! Many head-steps: certificates counted against errors.

use super::{Batch, Exact, Input, Returned, Trial};
use crate::Device;
use crate::attention::dense::sample::random;
use crate::certified::{
    Attended, BLOCK_TOKENS, Bound, Certificate, CertifiedElement, Layout, Policy, Result, Rounding, Rung,
    StepElement, StepPlan, StepProblem,
};
use crate::kv::Source;
use crate::kv::proof::{Counting, Layer, Options};
use crate::kv::workload::norm;
use half::{bf16, f16};
use rayon::prelude::*;
use serde::Serialize;
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// A head-step that needs a look.
#[derive(Clone, Debug, Serialize)]
pub struct Notable {
    /// f16 or bf16.
    pub element: &'static str,
    /// Elements of a row.
    pub head_dim: u32,
    /// Query heads of a KV head.
    pub group: u32,
    /// What made the batch.
    pub seed: u64,
    /// Preset.
    pub policy: String,
    /// Which sequence of the batch.
    pub sequence: usize,
    /// Which query head.
    pub q_head: usize,
    /// Its tokens.
    pub tokens: u32,
    /// The norm of returned minus exact output.
    pub error: f64,
    /// What the certificate says of it.
    pub bound: f64,
    /// Its parts: keys, values, rounding.
    pub parts: [f32; 3],
    /// The rung.
    pub rung: Rung,
}

/// Head-steps of one input.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Tally {
    /// How many.
    pub head_steps: u64,
    /// Those with an error beyond the bound.
    pub violations: u64,
    /// Those without a finite bound.
    pub unbounded: u64,
    /// By rung: quantized, promoted, expanded, dense, layer.
    pub rungs: [u64; 5],
    /// Why heads were dense.
    pub reasons: BTreeMap<&'static str, u64>,
    /// How many have bound / error from 2^i up, i from 0; the last has all beyond.
    pub tightness: [u64; 24],
    /// Bound / error, the smallest found; by rungs other than dense.
    pub tightest: f64,
    /// Medians of bound / error: of heads on quantized blocks, of dense ones.
    pub median: [f64; 2],
    /// Median of the paper's bound on the error by keys over ours, of heads with its thresholds and a tail of
    /// a thousandth of the mass or more.
    pub paper_over_ours: f64,
    /// Its smallest.
    pub paper_over_ours_least: f64,
    /// The paper's (15) as the kernels evaluate it over the same in f64, by equation (8) and from the
    /// originals: least, median and most. Theirs is at most the least of two bounds on the scores, rounding
    /// in it.
    pub paper_kernel_over_f64: [f64; 3],
    /// Median E_key, E_val, E_round and error of heads that are not dense.
    pub medians: [f64; 4],
    /// Those of steps with a risk, and of these such with an error beyond what is likely.
    pub risked: [u64; 2],
    /// What is likely over the error, in the median, of heads with a risk that are not dense.
    pub likely_over_error: f64,
    /// What is likely over the exact output's norm: median, 99 % and most, of heads with a risk.
    pub likely_over_output: [f64; 3],
    /// In terms of no scheme.
    #[serde(skip)]
    pub counting: Counting,
    #[serde(skip)]
    ratios: [Vec<f32>; 2],
    #[serde(skip)]
    paper: Vec<f32>,
    #[serde(skip)]
    evaluated: Vec<f32>,
    #[serde(skip)]
    parts: [Vec<f32>; 4],
    #[serde(skip)]
    likely: [Vec<f32>; 2],
}

/// What was found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Findings {
    /// By input.
    pub inputs: BTreeMap<Input, Tally>,
    /// All together.
    pub total: Tally,
    /// The first violations.
    pub violations: Vec<Notable>,
    /// The head-step with the smallest bound / error.
    pub tightest: Option<Notable>,
}

impl Tally {
    fn add(&mut self, error: f64, certificate: &Certificate, paper: Papers) -> bool {
        let bound = bound(certificate);
        let rung = Rung::of(certificate.rung());
        let dense = rung.is_dense();
        self.head_steps += 1;
        self.rungs[rung as usize] += 1;
        for reason in crate::certified::reasons(certificate.reason()) {
            *self.reasons.entry(reason).or_default() += 1;
        }
        if bound == f64::INFINITY {
            self.unbounded += 1;
            return true;
        }
        // NaN holds no bound.
        let holds = error <= bound;
        self.violations += u64::from(!holds);
        // An error of 0 says nothing of how tight a bound is.
        if error > 0.0 {
            let ratio = bound / error;
            let place = (ratio.log2().floor().max(0.0) as usize).min(self.tightness.len() - 1);
            self.tightness[place] += 1;
            self.ratios[usize::from(dense)].push(ratio as f32);
        }
        if !dense {
            let parts = [certificate.e_key, certificate.e_val, certificate.e_round, error as f32];
            self.parts.iter_mut().zip(parts).for_each(|(all, part)| all.push(part));
            // Where nearly nothing is left quantized ours is about rounding, of which the paper's has none.
            let e_key = f64::from(certificate.e_key);
            match paper {
                _ if certificate.tail_mass <= 1e-3 => {}
                Papers::Beside(paper) => self.paper.push((paper / e_key) as f32),
                Papers::Evaluated(paper) => self.evaluated.push((e_key / paper) as f32),
                Papers::No => {}
            }
        }
        holds
    }

    /// Adds what a head-step with a risk says is likely; `norm` is the exact output's.
    fn add_likely(&mut self, error: f64, norm: f64, certificate: &Certificate) {
        let likely = f64::from(certificate.likely);
        self.risked[0] += 1;
        // NaN is likely of nothing.
        self.risked[1] +=
            u64::from(!matches!(error.partial_cmp(&likely), Some(Ordering::Less | Ordering::Equal)));
        if error > 0.0 && !Rung::of(certificate.rung()).is_dense() {
            self.likely[0].push((likely / error) as f32);
        }
        if norm > 0.0 {
            self.likely[1].push((likely / norm) as f32);
        }
    }

    fn finish(&mut self) {
        self.median = self.ratios.each_mut().map(|ratios| median(ratios));
        // Sorted by the median.
        self.tightest = self.ratios[0].first().map_or(f64::NAN, |ratio| f64::from(*ratio));
        self.paper_over_ours = median(&mut self.paper);
        self.paper_over_ours_least = self.paper.first().map_or(f64::NAN, |ratio| f64::from(*ratio));
        let middle = median(&mut self.evaluated);
        let end = |x: Option<&f32>| x.map_or(f64::NAN, |x| f64::from(*x));
        self.paper_kernel_over_f64 = [end(self.evaluated.first()), middle, end(self.evaluated.last())];
        self.medians = self.parts.each_mut().map(|part| median(part));
        let [over_error, over_output] = &mut self.likely;
        self.likely_over_error = median(over_error);
        let middle = median(over_output);
        let last = over_output.len().saturating_sub(1);
        self.likely_over_output = [middle, end(over_output.get(last * 99 / 100)), end(over_output.get(last))];
    }
}

/// What the paper says of a head's error by keys.
#[derive(Clone, Copy)]
enum Papers {
    /// Nothing is asked.
    No,
    /// Its bound, beside ours.
    Beside(f64),
    /// Its bound, which the kernels have evaluated too.
    Evaluated(f64),
}

/// The bound on the whole error.
fn bound(certificate: &Certificate) -> f64 {
    f64::from(certificate.e_key) + f64::from(certificate.e_val) + f64::from(certificate.e_round)
}

/// Sorts, and the middle one.
fn median(numbers: &mut [f32]) -> f64 {
    numbers.sort_unstable_by(f32::total_cmp);
    numbers.get(numbers.len() / 2).map_or(f64::NAN, |x| f64::from(*x))
}

/// The paper's thresholds with our bound.
const PAPER_SOUND: &str = "paper, sound bound";

/// What is tried: a name, thresholds, and how the cache is stored. Where a list is carried each takes two
/// steps: by the list of another batch, then by its own.
pub type Tried<'a> = (&'a str, Policy, Layout);

/// What is tried where nothing is said.
pub const POLICIES: [Tried<'static>; 10] = [
    ("paper", Policy::PAPER, Layout::Compact),
    (PAPER_SOUND, Policy { bound: Bound::Sound, ranking: 0, renew: 1, ..Policy::PAPER }, Layout::Compact),
    ("choosing", Policy::CHOOSING, Layout::Compact),
    ("sound", Policy::SOUND, Layout::Compact),
    ("sound, watched", Policy { canary: 1e-6, exploration: 1.0 / 16.0, ..Policy::SOUND }, Layout::Compact),
    ("codes", Policy::CODES, Layout::Compact),
    ("strict", Policy::STRICT, Layout::Compact),
    ("fast", Policy::FAST, Layout::Compact),
    ("paper, paper's layout", Policy::PAPER, Layout::Paper),
    ("choosing, paper's layout", Policy::CHOOSING, Layout::Paper),
];

/// Extents that batches have, in turn: head_dim, query heads of a KV head, KV heads.
const SHAPES: [(u32, u32, u32); 8] =
    [(128, 4, 2), (64, 8, 2), (128, 8, 1), (64, 1, 3), (128, 7, 1), (64, 16, 1), (128, 16, 1), (64, 3, 3)];

/// Head-steps over made-up caches, until there are enough, and over `layers`. `progress` is told how many
/// there are.
///
/// # Errors
/// What the device reports.
pub fn prove(
    device: &Device,
    options: Options,
    layers: &[Layer],
    tried: &[Tried<'_>],
    mut progress: impl FnMut(u64),
) -> Result<Findings> {
    let mut findings = Findings::default();
    let mut done = 0;
    for layer in layers {
        let batch = layer.batch();
        let mut runner = Runner::<f16>::new(device, batch.problem, batch.blocks(), tried)?;
        for policy in 0..tried.len() {
            done += runner.run(&batch, 0, &[policy], &mut findings)?;
            progress(done);
        }
    }
    let mut runners = Vec::new();
    for &(head_dim, group, kv_heads) in &SHAPES {
        let problem = |sequences: usize, max_tokens| StepProblem {
            sequences: sequences as u32,
            q_heads: group * kv_heads,
            kv_heads,
            head_dim,
            max_tokens,
        };
        runners.push((problem(Input::MADE.len(), options.max_tokens), None));
        runners.push((problem(1, options.long_tokens), None));
    }
    let mut round = 0;
    while done < options.head_steps {
        // Every shape in both types; a long sequence now and then.
        let long = round % 8 == 7;
        let at = (2 * (round as usize % SHAPES.len()) + usize::from(long)) % runners.len();
        let wide = round / 16 % 2 == 1;
        let (problem, runner) = &mut runners[at];
        let seed = random(options.seed, round);
        if runner.is_none() {
            let blocks = (problem.sequences * problem.max_tokens.div_ceil(BLOCK_TOKENS) + 3) as usize;
            *runner = Some((
                Runner::<f16>::new(device, *problem, blocks, tried)?,
                Runner::<bf16>::new(device, *problem, blocks, tried)?,
            ));
        }
        let Some((narrow_runner, wide_runner)) = runner else { continue };
        let sequences: Vec<(Input, u32)> = match long {
            true => vec![(
                [Input::Diffuse, Input::Normal, Input::Ties][round as usize / 8 % 3],
                problem.max_tokens - seed as u32 % 16,
            )],
            false => Input::MADE
                .into_iter()
                .enumerate()
                .map(|(i, input)| (input, length(random(seed, i as u64), problem.max_tokens)))
                .collect(),
        };
        // The paper's in every batch, of the others one.
        let policies: Vec<usize> = match tried.len() {
            0..=3 => (0..tried.len()).collect(),
            all => vec![0, 1, 2 + round as usize % (all - 2)],
        };
        done += if wide {
            let batch = Batch::<bf16>::new(*problem, &sequences, seed, seed);
            wide_runner.run(&batch, seed, &policies, &mut findings)?
        } else {
            let batch = Batch::<f16>::new(*problem, &sequences, seed, seed);
            narrow_runner.run(&batch, seed, &policies, &mut findings)?
        };
        progress(done);
        round += 1;
    }
    findings.total.finish();
    findings.inputs.values_mut().for_each(Tally::finish);
    Ok(findings)
}

/// A number of tokens: often at an edge.
fn length(z: u64, max_tokens: u32) -> u32 {
    let any = 1 + (z >> 32) as u32 % max_tokens;
    match z % 10 {
        0 => any.min(1 + (z >> 8) as u32 % 16),
        1 | 2 => any.div_ceil(BLOCK_TOKENS).min(max_tokens / BLOCK_TOKENS) * BLOCK_TOKENS,
        3 => max_tokens,
        _ => any,
    }
}

/// A trial for each layout, and plans for each policy when they are needed.
struct Runner<'a, E: StepElement + CertifiedElement> {
    tried: &'a [Tried<'a>],
    /// Rounded to the nearest, in each layout, and by chance in the compact one.
    trials: [Trial<E>; 3],
    plans: Vec<Option<(StepPlan<E>, Attended)>>,
}

impl<'a, E: StepElement + CertifiedElement> Runner<'a, E> {
    fn new(device: &Device, problem: StepProblem, blocks: usize, tried: &'a [Tried<'a>]) -> Result<Self> {
        let trial = |layout| Trial::with_layout(device, problem, blocks, layout);
        let by_chance = trial(Layout::Compact)?.with_rounding(Rounding::Stochastic { seed: 1 });
        let trials = [trial(Layout::Compact)?, trial(Layout::Paper)?, by_chance];
        Ok(Runner { tried, trials, plans: tried.iter().map(|_| None).collect() })
    }

    /// Which of the trials a policy is for.
    fn trial(&self, policy: usize) -> usize {
        let (_, thresholds, layout) = &self.tried[policy];
        if thresholds.risk > 0.0 { 2 } else { *layout as usize }
    }

    /// Steps of one batch with some policies; says how many head-steps that were.
    fn run(
        &mut self,
        batch: &Batch<E>,
        seed: u64,
        policies: &[usize],
        findings: &mut Findings,
    ) -> Result<u64> {
        let wanted: Vec<usize> = policies.iter().map(|policy| self.trial(*policy)).collect();
        for (number, trial) in self.trials.iter_mut().enumerate() {
            if wanted.contains(&number) {
                trial.load(batch)?;
                trial.ask(batch)?;
            }
        }
        let mut returned = Vec::new();
        for (&policy, trial) in policies.iter().zip(wanted) {
            let trial = &mut self.trials[trial];
            if self.plans[policy].is_none() {
                let plan = trial.plan(&self.tried[policy].1)?;
                let out = plan.allocate()?;
                self.plans[policy] = Some((plan, out));
            }
            let carries = self.tried[policy].1.renew > 0;
            if let Some((plan, out)) = &mut self.plans[policy] {
                if carries {
                    returned.push((policy, true, trial.step(plan, out)?));
                }
                returned.push((policy, false, trial.step(plan, out)?));
            }
        }
        let heads = batch.problem.kv_heads as usize;
        let truth: Vec<Vec<Exact>> = (0..batch.lengths.len() * heads)
            .into_par_iter()
            .map(|i| batch.exact(i / heads, i % heads))
            .collect();
        let truth: Vec<Exact> = truth.into_iter().flatten().collect();
        for (policy, foreign, returned) in &returned {
            let (name, thresholds, _) = &self.tried[*policy];
            count(batch, seed, (name, *foreign, thresholds.risk > 0.0), &truth, returned, findings);
        }
        Ok((returned.len() * truth.len()) as u64)
    }
}

/// Counts a step's heads; of a step by a `foreign` list nothing is compared with the paper.
fn count<E: StepElement>(
    batch: &Batch<E>,
    seed: u64,
    (policy, foreign, risked): (&str, bool, bool),
    truth: &[Exact],
    returned: &Returned,
    findings: &mut Findings,
) {
    let dim = batch.problem.head_dim as usize;
    let heads = batch.problem.q_heads as usize;
    for (row, (exact, certificate)) in truth.iter().zip(&returned.certificates).enumerate() {
        let sequence = row / heads;
        let error = exact.error(&returned.output[row * dim..][..dim]);
        let tail = f64::from(certificate.tail_mass);
        let paper = match policy {
            _ if foreign => Papers::No,
            "paper" => Papers::Evaluated(exact.paper_tail_bound(tail)),
            PAPER_SOUND => Papers::Beside(exact.paper_bound(tail)),
            _ => Papers::No,
        };
        let input = batch.inputs[sequence];
        findings.total.add(error, certificate, paper);
        let own = findings.inputs.entry(input).or_default();
        let holds = own.add(error, certificate, paper);
        let source = match Rung::of(certificate.rung()) {
            Rung::Quantized => Source::Stored,
            Rung::Promoted | Rung::Expanded => Source::Mixed,
            Rung::Dense | Rung::Layer => Source::Originals,
        };
        let length = norm(exact.output.iter().copied());
        for tally in [own, &mut findings.total] {
            if risked {
                tally.add_likely(error, length, certificate);
            }
            tally.counting.add(source, error, Some(self::bound(certificate)), length);
        }
        let bound = bound(certificate);
        let notable = || Notable {
            element: E::NAME,
            head_dim: batch.problem.head_dim,
            group: batch.problem.q_heads / batch.problem.kv_heads,
            seed,
            policy: policy.to_owned(),
            sequence,
            q_head: row % heads,
            tokens: batch.lengths[sequence],
            error,
            bound,
            parts: [certificate.e_key, certificate.e_val, certificate.e_round],
            rung: Rung::of(certificate.rung()),
        };
        if !holds && findings.violations.len() < 20 {
            findings.violations.push(notable());
        }
        let ratio = |found: &Notable| found.bound / found.error;
        if error > 0.0 && findings.tightest.as_ref().is_none_or(|found| bound / error < ratio(found)) {
            findings.tightest = Some(notable());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels_gpu::certified::policy::{reason, rung};

    fn certificate(e_key: f32, rung_and_reason: u32) -> Certificate {
        Certificate {
            e_key,
            e_val: 0.25,
            e_round: 0.25,
            likely: e_key + 0.5,
            norm: 1.0,
            tail_mass: 0.5,
            delta: 0.1,
            promoted_keys: 0,
            promoted_values: 0,
            rung_and_reason,
            log_sum: 0.0,
            unused: 0,
        }
    }

    #[test]
    fn an_error_beyond_its_bound_is_counted_and_nan_is_one() {
        let mut tally = Tally::default();
        assert!(tally.add(1.0, &certificate(0.5, rung::QUANTIZED), Papers::Beside(2.0)));
        assert!(!tally.add(1.001, &certificate(0.5, rung::PROMOTED), Papers::No));
        assert!(!tally.add(f64::NAN, &certificate(0.5, rung::PROMOTED), Papers::No));
        assert!(!tally.add(0.0, &certificate(f32::NAN, rung::PROMOTED), Papers::No));
        assert!(tally.add(
            5.0,
            &certificate(f32::INFINITY, rung::DENSE | reason::NO_BOUND << 16),
            Papers::No
        ));
        tally.finish();
        assert_eq!((tally.head_steps, tally.violations, tally.unbounded), (5, 3, 1));
        assert_eq!(tally.rungs, [1, 3, 0, 1, 0]);
        assert_eq!(tally.reasons.into_iter().collect::<Vec<_>>(), [("no finite bound", 1)]);
        assert_eq!(tally.paper_over_ours, 4.0);
    }

    #[test]
    fn lengths_are_at_edges_and_in_range() {
        let lengths: Vec<u32> = (0..1000).map(|i| length(random(3, i), 200)).collect();
        assert!(lengths.iter().all(|length| (1..=200).contains(length)));
        assert!(lengths.iter().filter(|length| **length % 16 == 0).count() > 150);
        assert!(lengths.iter().any(|length| *length < 16) && lengths.contains(&200));
    }
}
