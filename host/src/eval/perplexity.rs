//! Perplexity of the decoded half of a window.
//!
//! The first half of the window is read in chunks, the second token by token through the cache,
//! teacher-forced. Each token of the second half is predicted by such a step, the first of them too: the last
//! token of the first half is a step already. So what is measured is the scheme's and nothing else; a mean
//! over the whole window would be diluted by its first half.

use super::{Decoder, Error, Result, Watch, decoder};
use crate::kv::{self, KvCache};
use crate::model::forward::Runner;
use crate::statistics::{self, Interval, RESAMPLES};
use serde::Serialize;

/// Tokens of a window of `length` that are decoded: its second half, the longer one if they differ.
pub const fn decoded(length: usize) -> usize {
    length - length / 2
}

/// Work of a window of `length` in the measure of a [`Watch`].
pub const fn work(length: usize) -> usize {
    (length / 2).saturating_sub(1) + decoded(length) * decoder::STEP
}

/// What the decoded half of a window gives.
#[derive(Clone, Debug)]
pub struct Half {
    /// The negative log-likelihood of each of its tokens, nats.
    pub nll: Vec<f64>,
    /// What the scheme promised, over all steps.
    pub report: Option<kv::Summary>,
}

/// Decodes the second half of `tokens`. The cache is empty and has room for all but
/// the last of them.
///
/// # Errors
/// Fewer than two tokens; what the pass reports; [`Error::Stopped`].
pub fn decode_half(
    runner: &mut Runner,
    cache: &mut dyn KvCache,
    tokens: &[u32],
    watch: Watch,
) -> Result<Half> {
    if tokens.len() < 2 {
        return Err(Error::TooShort { what: "a window", found: tokens.len(), needed: 2 });
    }
    let (read, rest) = tokens.split_at(tokens.len() / 2 - 1);
    let mut decoder = Decoder::new(runner, cache, watch);
    decoder.read(read)?;
    let nll = decoder.force(rest)?.into_iter().map(|log| -log).collect();
    Ok(Half { nll, report: decoder.finish()? })
}

/// Windows of one scheme beside the same windows of the baseline.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// How many.
    pub windows: usize,
    /// The mean of the windows' mean negative log-likelihoods, nats a token.
    pub nll: f64,
    /// Its exponential.
    pub perplexity: f64,
    /// The mean difference from the baseline, nats a token: positive is worse.
    pub delta: f64,
    /// Its bootstrap interval over windows.
    pub delta_interval: Option<Interval>,
    /// The perplexity over the baseline's: the exponential of the difference.
    pub ratio: f64,
    /// Its interval.
    pub ratio_interval: Option<Interval>,
}

/// Sums up windows: the mean negative log-likelihood of each, beside the baseline's on the same window.
pub fn summarize(nll: &[f64], baseline: &[f64], seed: u64) -> Summary {
    let differences: Vec<f64> = nll.iter().zip(baseline).map(|(a, b)| a - b).collect();
    let (mean, delta) = (statistics::mean(nll), statistics::mean(&differences));
    let delta_interval = statistics::bootstrap(&differences, RESAMPLES, seed);
    Summary {
        windows: differences.len(),
        nll: mean,
        perplexity: mean.exp(),
        delta,
        delta_interval,
        ratio: delta.exp(),
        ratio_interval: delta_interval.map(|interval| interval.map(f64::exp)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paired_differences_are_of_the_same_windows() {
        // Windows differ far more than schemes: only pairs show the difference.
        let baseline = [1.0, 5.0, 3.0, 9.0];
        let worse = baseline.map(|x| x + 0.25);
        let summary = summarize(&worse, &baseline, 1);
        assert_eq!((summary.windows, summary.nll, summary.delta), (4, 4.75, 0.25));
        assert_eq!(summary.delta_interval, Some(Interval { low: 0.25, high: 0.25 }));
        assert!((summary.ratio - 0.25f64.exp()).abs() < 1e-12);
        assert!((summary.perplexity - 4.75f64.exp()).abs() < 1e-9);
        let same = summarize(&baseline, &baseline, 1);
        assert_eq!((same.delta, same.ratio), (0.0, 1.0));
    }

    #[test]
    fn halves_make_a_window() {
        assert_eq!([2, 3, 1024].map(decoded), [1, 2, 512]);
        assert_eq!(work(1024), 511 + 4 * 512);
    }
}
