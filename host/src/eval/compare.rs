//! Two caches on the same text, step by step.
//!
//! Both are teacher-forced over the second half of a window, as in [`perplexity`]: at every step they see the
//! same tokens, so that what differs is the caches' doing and does not grow by another choice of words.

use super::decoder::{self, Steps};
use super::perplexity::Half;
use super::{Error, Result, Watch, perplexity};
use crate::kv::{KvCache, Summary as Report};
use crate::model::forward::Runner;
use crate::statistics::{self, Interval, RESAMPLES};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// From this margin between the two largest logits on, another choice is no matter of rounding: a factor of e
/// in probability.
pub const DECISIVE: f64 = 1.0;

/// The decoded half of a window over two caches, a value a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// The Kullback-Leibler divergence of the second cache's distribution from the first's, nats.
    pub kl: Vec<f64>,
    /// Their total variation.
    pub tv: Vec<f64>,
    /// Whether both find the same token most likely.
    pub agrees: Vec<bool>,
    /// The margin between the first cache's two largest logits.
    pub margin: Vec<f64>,
    /// The negative log-likelihood of the text's token over each cache, nats.
    pub nll: [Vec<f64>; 2],
    /// What the schemes promised.
    pub report: [Option<Report>; 2],
}

/// Work of a window of `length` over two caches in the measure of a [`Watch`].
pub const fn work(length: usize) -> usize {
    2 * perplexity::work(length)
}

/// Decodes the second half of `tokens` over both caches, which are empty and have room for all but the last
/// of them.
///
/// # Errors
/// Fewer than two tokens; what the pass reports; [`Error::Stopped`].
pub fn compare(
    runner: &mut Runner,
    caches: [&mut dyn KvCache; 2],
    tokens: &[u32],
    watch: Watch,
) -> Result<Compared> {
    let [first, second] = caches;
    let Beside { mut others, .. } = beside(runner, first, &mut [second], tokens, watch)?;
    // One was given.
    Ok(others.pop().unwrap_or_default())
}

/// The decoded half of a window over one cache and over others beside it.
#[derive(Clone, Debug)]
pub struct Beside {
    /// Over the first.
    pub first: Half,
    /// Each of the others, compared with it.
    pub others: Vec<Compared>,
}

/// The same of a cache and of any number of others beside it, which takes the steps of the first once.
///
/// # Errors
/// As [`compare`].
pub fn beside(
    runner: &mut Runner,
    first: &mut dyn KvCache,
    others: &mut [&mut dyn KvCache],
    tokens: &[u32],
    watch: Watch,
) -> Result<Beside> {
    if tokens.len() < 2 {
        return Err(Error::TooShort { what: "a window", found: tokens.len(), needed: 2 });
    }
    let (read, rest) = tokens.split_at(tokens.len() / 2 - 1);
    decoder::read(runner, first, read, watch)?;
    for other in &mut *others {
        decoder::read(runner, &mut **other, read, watch)?;
    }
    let mut steps = Steps::default();
    let mut steps_of = vec![Steps::default(); others.len()];
    let schemes: Vec<&str> = others.iter().map(|other| other.scheme()).collect();
    let mut nll = Vec::new();
    let mut found = vec![Compared::default(); others.len()];
    for pair in rest.windows(2) {
        let a = steps.step(runner, first, pair[0], watch)?;
        nll.push(-a.log_probability(pair[1]));
        let next = others.iter_mut().zip(&mut steps_of);
        let next: Vec<_> = next
            .map(|(other, steps)| steps.logits(runner, &mut **other, pair[0], watch))
            .collect::<Result<_>>()?;
        let position = first.tokens() - 1;
        // Vocabularies are long: of many caches, one after the other, this takes as long as the steps.
        found.par_iter_mut().zip(&next).zip(&schemes).try_for_each(|((found, logits), scheme)| {
            let b = decoder::distribution(logits, scheme, position)?;
            let distance = a.distance(&b);
            found.kl.push(distance.kl);
            found.tv.push(distance.tv);
            found.agrees.push(a.best() == b.best());
            found.margin.push(a.margin());
            found.nll[0].push(-a.log_probability(pair[1]));
            found.nll[1].push(-b.log_probability(pair[1]));
            Ok::<_, Error>(())
        })?;
    }
    runner.check_cache(first)?;
    for ((other, steps_of), found) in others.iter_mut().zip(steps_of).zip(&mut found) {
        runner.check_cache(&mut **other)?;
        found.report = [steps.report, steps_of.report];
    }
    Ok(Beside { first: Half { nll, report: steps.report }, others: found })
}

/// How often both agree.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Agreement {
    /// Steps that count.
    pub steps: usize,
    /// Those where both find the same token most likely.
    pub agree: usize,
    /// Their share.
    pub share: f64,
    /// Wilson's interval, as if steps were independent.
    pub interval: Interval,
}

impl Agreement {
    fn of(agrees: impl Iterator<Item = bool>) -> Agreement {
        let (steps, agree) = agrees.fold((0, 0), |(n, yes), agrees| (n + 1, yes + usize::from(agrees)));
        let share = agree as f64 / steps as f64;
        Agreement { steps, agree, share, interval: statistics::wilson(agree, steps) }
    }
}

/// Windows together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// How many.
    pub windows: usize,
    /// The mean divergence of a step, nats.
    pub kl: f64,
    /// Its bootstrap interval over windows.
    pub kl_interval: Option<Interval>,
    /// The median of all steps.
    pub kl_median: f64,
    /// The 99 % quantile of all steps.
    pub kl_99: f64,
    /// The largest.
    pub kl_max: f64,
    /// The mean total variation of a step.
    pub tv: f64,
    /// The largest.
    pub tv_max: f64,
    /// All steps.
    pub all: Agreement,
    /// Those whose margin over the first cache is above [`DECISIVE`].
    pub decisive: Agreement,
    /// The decoded half over each cache.
    pub perplexity: [f64; 2],
    /// The second cache's negative log-likelihood less the first's, nats a token.
    pub delta: f64,
    /// Its bootstrap interval over windows.
    pub delta_interval: Option<Interval>,
}

/// Sums up windows of one length.
pub fn summarize<'a>(windows: impl Iterator<Item = &'a Compared> + Clone, seed: u64) -> Summary {
    let means = |of: fn(&Compared) -> &Vec<f64>| -> Vec<f64> {
        windows.clone().map(|window| statistics::mean(of(window))).collect()
    };
    let steps = |of: fn(&Compared) -> &Vec<f64>| {
        let mut all: Vec<f64> = windows.clone().flat_map(|window| of(window).iter().copied()).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    let (kl_means, kl) = (means(|window| &window.kl), steps(|window| &window.kl));
    let tv = steps(|window| &window.tv);
    let nll = [means(|window| &window.nll[0]), means(|window| &window.nll[1])];
    let delta: Vec<f64> = nll[1].iter().zip(&nll[0]).map(|(b, a)| b - a).collect();
    let marked =
        windows.clone().flat_map(|window| window.agrees.iter().copied().zip(window.margin.iter().copied()));
    Summary {
        windows: delta.len(),
        kl: statistics::mean(&kl_means),
        kl_interval: statistics::bootstrap(&kl_means, RESAMPLES, seed),
        kl_median: statistics::quantile(&kl, 0.5),
        kl_99: statistics::quantile(&kl, 0.99),
        kl_max: statistics::quantile(&kl, 1.0),
        tv: statistics::mean(&tv),
        tv_max: statistics::quantile(&tv, 1.0),
        all: Agreement::of(marked.clone().map(|(agrees, _)| agrees)),
        decisive: Agreement::of(marked.filter(|(_, margin)| *margin > DECISIVE).map(|(agrees, _)| agrees)),
        perplexity: nll.map(|nll| statistics::mean(&nll).exp()),
        delta: statistics::mean(&delta),
        delta_interval: statistics::bootstrap(&delta, RESAMPLES, seed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_windows_are_counted() {
        let window = |kl: [f64; 2], agrees: [bool; 2], margin: [f64; 2], nll: [[f64; 2]; 2]| Compared {
            kl: kl.into(),
            tv: kl.map(|kl| kl / 2.0).into(),
            agrees: agrees.into(),
            margin: margin.into(),
            nll: nll.map(Vec::from),
            report: [None; 2],
        };
        let windows = [
            window([0.0, 0.2], [true, false], [3.0, 0.5], [[1.0, 2.0], [1.5, 2.5]]),
            window([0.4, 0.2], [true, false], [1.0, 1.5], [[3.0, 3.0], [2.0, 4.5]]),
        ];
        let summary = summarize(windows.iter(), 1);
        assert_eq!((summary.windows, summary.kl_max, summary.tv_max), (2, 0.4, 0.2));
        assert!((summary.kl - 0.2).abs() < 1e-12 && (summary.kl_median - 0.2).abs() < 1e-12);
        assert_eq!((summary.all.steps, summary.all.agree), (4, 2));
        // A margin of exactly 1 is not above it.
        assert_eq!((summary.decisive.steps, summary.decisive.agree), (2, 1));
        assert!((summary.delta - 0.375).abs() < 1e-12);
        assert!((summary.perplexity[0] - 2.25f64.exp()).abs() < 1e-9);
        let interval = summary.delta_interval.expect("two windows");
        assert!((interval.low - 0.25).abs() < 1e-12 && (interval.high - 0.5).abs() < 1e-12);
    }
}
