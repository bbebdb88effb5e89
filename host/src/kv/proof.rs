//! Head-steps by the thousand: what a scheme promises of each head, held against the head's true error.

pub(crate) mod by_workload;

pub use by_workload::prove as by_workload;

use super::workload::Fact;
use super::{Result, Selection, Source};
use crate::Device;
use half::f16;
use serde::Serialize;

/// How much is tried.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Head-steps at least: query heads of steps.
    pub head_steps: u64,
    /// The longest of most sequences.
    pub max_tokens: u32,
    /// The length of a few sequences that are attended to all over.
    pub long_tokens: u32,
    /// Another seed, other numbers.
    pub seed: u64,
}

/// A piece of a real cache of one layer, and queries at its end.
#[derive(Clone, Debug)]
pub struct Layer {
    /// [tokens, kv_heads, head_dim].
    pub keys: Vec<f16>,
    /// Likewise.
    pub values: Vec<f16>,
    /// [query tokens, q_heads, head_dim]; the last query token is the last token.
    pub queries: Vec<f16>,
    /// Tokens.
    pub tokens: u32,
    /// Query tokens.
    pub query_tokens: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Query heads.
    pub q_heads: u32,
    /// Elements of a row.
    pub head_dim: u32,
}

/// What a proof is given.
#[derive(Clone, Copy, Debug)]
pub struct Trial<'a> {
    /// Where it runs.
    pub device: &'a Device,
    /// The scheme with its preset and options.
    pub selection: &'a Selection,
    /// How much is tried.
    pub options: Options,
    /// Real caches.
    pub layers: &'a [Layer],
}

/// A scheme's proof; told of head-steps as they are done.
pub type Prove = fn(&Trial<'_>, &mut dyn FnMut(u64)) -> Result<Findings>;

/// Head-steps of one kind of input.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Tally {
    /// How many.
    pub head_steps: u64,
    /// Those for which something finite is promised.
    pub bounded: u64,
    /// Those with an error beyond what is promised.
    pub violations: u64,
    /// By [`Source`]: stored, mixed, originals.
    pub sources: [u64; 3],
    /// Bound over error: median and least.
    pub ratio: Option<[f64; 2]>,
    /// Error over the output's norm: median, 99 % and largest.
    pub relative_error: Option<[f64; 3]>,
    /// Bound over the output's norm: likewise.
    pub relative_bound: Option<[f64; 3]>,
    /// Figures that the scheme alone knows the meaning of.
    pub facts: Vec<Fact>,
}

/// What was found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Findings {
    /// By input.
    pub inputs: Vec<(String, Tally)>,
    /// All together.
    pub total: Tally,
    /// The first violations, a line each.
    pub violations: Vec<String>,
    /// What else is to be said, a line each.
    pub notes: Vec<String>,
    /// What must not have happened besides violations, if anything: stored data taken for changed, say.
    pub alarms: u64,
}

/// A tally under way.
#[derive(Clone, Debug, Default)]
pub struct Counting {
    head_steps: u64,
    bounded: u64,
    violations: u64,
    sources: [u64; 3],
    ratios: Vec<f32>,
    errors: Vec<f32>,
    bounds: Vec<f32>,
}

impl Counting {
    /// Adds a head-step: its error, what was promised of it, and the output's norm. Whether the promise
    /// holds.
    pub fn add(&mut self, source: Source, error: f64, bound: Option<f64>, norm: f64) -> bool {
        self.head_steps += 1;
        self.sources[source as usize] += 1;
        // Nothing is a share of an output of 0.
        let share = |value: f64| (norm > 0.0).then_some((value / norm) as f32);
        self.errors.extend(share(error));
        // An infinite bound promises nothing; one that is no number is a broken promise.
        let Some(bound) = bound.filter(|bound| *bound != f64::INFINITY) else { return true };
        self.bounded += 1;
        self.bounds.extend(share(bound));
        // An error of 0 says nothing of how tight a bound is.
        if error > 0.0 {
            self.ratios.push((bound / error) as f32);
        }
        let holds = error <= bound;
        self.violations += u64::from(!holds);
        holds
    }

    /// The tally.
    pub fn finish(mut self) -> Tally {
        let sorted = |values: &mut Vec<f32>| {
            values.sort_unstable_by(f32::total_cmp);
            let last = values.len().checked_sub(1)?;
            Some([values[0], values[last / 2], values[last * 99 / 100], values[last]].map(f64::from))
        };
        let spread = |[_, median, most, worst]: [f64; 4]| [median, most, worst];
        Tally {
            head_steps: self.head_steps,
            bounded: self.bounded,
            violations: self.violations,
            sources: self.sources,
            ratio: sorted(&mut self.ratios).map(|[least, median, ..]| [median, least]),
            relative_error: sorted(&mut self.errors).map(spread),
            relative_bound: sorted(&mut self.bounds).map(spread),
            facts: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_beyond_its_bound_is_counted_and_nan_is_one() {
        let mut counting = Counting::default();
        assert!(counting.add(Source::Stored, 1.0, Some(1.0), 2.0));
        assert!(!counting.add(Source::Mixed, 1.001, Some(1.0), 2.0));
        assert!(!counting.add(Source::Mixed, f64::NAN, Some(1.0), 2.0));
        assert!(!counting.add(Source::Mixed, 0.0, Some(f64::NAN), 2.0));
        assert!(counting.add(Source::Originals, 5.0, Some(f64::INFINITY), 2.0));
        assert!(counting.add(Source::Stored, 5.0, None, 2.0));
        let tally = counting.finish();
        assert_eq!((tally.head_steps, tally.bounded, tally.violations), (6, 4, 3));
        assert_eq!(tally.sources, [2, 3, 1]);
        assert!(tally.ratio.is_some_and(|[_, least]| (least - 1.0 / 1.001).abs() < 1e-6));
    }
}
