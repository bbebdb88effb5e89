//! Intervals and tests for paired runs. Every interval is at 95 %.

use crate::random::Random;
use serde::Serialize;

/// Resamples of a bootstrap, and the seed that commands take: those of the paper on certified attention.
pub const RESAMPLES: usize = 10_000;
/// See [`RESAMPLES`].
pub const SEED: u64 = 20_260_425;

/// The normal distribution's 97.5 % quantile.
const Z: f64 = 1.959_963_984_540_054;

/// An interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Its lower end.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
}

impl Interval {
    /// The interval of a function's values, where that increases.
    pub fn map(self, f: impl Fn(f64) -> f64) -> Interval {
        Interval { low: f(self.low), high: f(self.high) }
    }
}

/// The mean; NaN of nothing.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The quantile `p`, between neighbours by their distance; NaN of nothing. `sorted` increases.
pub fn quantile(sorted: &[f64], p: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = p.clamp(0.0, 1.0) * last as f64;
    let below = at.floor() as usize;
    let above = (below + 1).min(last);
    sorted[below] + (at - below as f64) * (sorted[above] - sorted[below])
}

/// The interval of the mean by the percentile bootstrap: `resamples` means of as many values as there are,
/// drawn with replacement. None of fewer than two values.
///
/// The values must be independent of one another, such as differences on windows with no text in common. Of
/// few values (under about ten) the interval is too narrow, as percentile bootstraps are.
pub fn bootstrap(values: &[f64], resamples: usize, seed: u64) -> Option<Interval> {
    if values.len() < 2 || resamples == 0 {
        return None;
    }
    let mut random = Random::new(seed);
    let draw = |_| (0..values.len()).map(|_| values[random.below(values.len())]).sum::<f64>();
    let mut means: Vec<f64> = (0..resamples).map(draw).map(|sum| sum / values.len() as f64).collect();
    means.sort_by(f64::total_cmp);
    Some(Interval { low: quantile(&means, 0.025), high: quantile(&means, 0.975) })
}

/// Wilson's score interval of a proportion; all of [0, 1] with no trials.
pub fn wilson(hits: usize, trials: usize) -> Interval {
    if trials == 0 {
        return Interval { low: 0.0, high: 1.0 };
    }
    let (n, p) = (trials as f64, hits as f64 / trials as f64);
    let z2 = Z * Z;
    let centre = p + z2 / (2.0 * n);
    let half = Z * (p * (1.0 - p) / n + z2 / (4.0 * n * n)).sqrt();
    let scale = 1.0 + z2 / n;
    // At the ends the formula gives 0 and 1 but for rounding.
    let low = if hits == 0 { 0.0 } else { (centre - half) / scale };
    let high = if hits >= trials { 1.0 } else { (centre + half) / scale };
    Interval { low, high }
}

/// McNemar's exact test, two-sided: the probability, were both runs equally good, of pairs as uneven as
/// these, of which the first run alone hit in `first` and the second alone in `second`.
pub fn mcnemar(first: usize, second: usize) -> f64 {
    let (fewer, n) = (first.min(second), first + second);
    // Binomial probabilities by their logarithms: 2⁻ⁿ is no f64 for large n.
    let mut log = -(n as f64) * std::f64::consts::LN_2;
    let mut tail = log.exp();
    for i in 0..fewer {
        log += (((n - i) as f64) / (i + 1) as f64).ln();
        tail += log.exp();
    }
    (2.0 * tail).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(interval: Interval, low: f64, high: f64, tolerance: f64) {
        let Interval { low: a, high: b } = interval;
        assert!((a - low).abs() <= tolerance && (b - high).abs() <= tolerance, "{interval:?}: {low}, {high}");
    }

    /// Newcombe (1998), Statistics in Medicine 17, table I, method 3.
    #[test]
    fn proportions_have_the_intervals_of_the_literature() {
        for (hits, trials, low, high) in [
            (81, 263, 0.2553, 0.3662),
            (15, 148, 0.0624, 0.1605),
            (0, 20, 0.0, 0.1611),
            (1, 29, 0.0061, 0.1718),
        ] {
            close(wilson(hits, trials), low, high, 5e-5);
        }
        // The other side of the same coin.
        let (a, b) = (wilson(3, 11), wilson(8, 11));
        close(b, 1.0 - a.high, 1.0 - a.low, 1e-15);
        assert_eq!(wilson(20, 20).high, 1.0);
        assert_eq!(wilson(0, 0), Interval { low: 0.0, high: 1.0 });
    }

    /// Sums of binomial coefficients: 2·(1 + 10)/2^10, 2·Σ_{i≤6} C(22, i)/2^22, 2/2^5.
    #[test]
    fn uneven_pairs_are_as_unlikely_as_coins() {
        for (a, b, p) in [
            (1, 9, 22.0 / 1024.0),
            (6, 16, 2.0 * 110_056.0 / 4_194_304.0),
            (0, 5, 0.0625),
            (0, 0, 1.0),
            (4, 4, 1.0),
            (7, 8, 1.0),
        ] {
            assert!((mcnemar(a, b) - p).abs() < 1e-12, "{a}, {b}: {} for {p}", mcnemar(a, b));
            assert_eq!(mcnemar(a, b), mcnemar(b, a));
        }
        // By the normal distribution, with the correction for continuity: 2·(1 − Φ((120 − 1)/√4120)), and Φ
        // is 0.96813 there.
        assert!((mcnemar(2000, 2120) - 0.0637).abs() < 5e-4, "{}", mcnemar(2000, 2120));
    }

    /// The sum of four draws from 0, 1, 2, 3 is at most 1 in 5 of 256 cases and at most 2 in 15 of them: 2.5
    /// % lie below 2.
    #[test]
    fn small_bootstraps_are_those_of_all_resamples() {
        let interval = bootstrap(&[3.0, 0.0, 2.0, 1.0], RESAMPLES, SEED).expect("four values");
        assert_eq!(interval, Interval { low: 0.5, high: 2.5 });
        assert_eq!(bootstrap(&[1.0], RESAMPLES, SEED), None);
        assert_eq!(bootstrap(&[2.0, 2.0], 10, 1), Some(Interval { low: 2.0, high: 2.0 }));
    }

    #[test]
    fn large_bootstraps_are_those_of_the_normal_distribution() {
        // Halton's sequence in base 3: uniform, with mean 1/2 and variance 1/12.
        let values: Vec<f64> = (1..=2000u32)
            .map(|mut i| {
                let (mut x, mut step) = (0.0, 1.0 / 3.0);
                while i > 0 {
                    x += f64::from(i % 3) * step;
                    (i, step) = (i / 3, step / 3.0);
                }
                x
            })
            .collect();
        let (centre, half) = (mean(&values), Z * (1.0 / 12.0f64).sqrt() / 2000f64.sqrt());
        assert!((centre - 0.5).abs() < 1e-3);
        // The ends of 10,000 resamples are good to about 2 % of the half-width.
        close(bootstrap(&values, RESAMPLES, SEED).expect("many"), centre - half, centre + half, 0.06 * half);
        assert_ne!(bootstrap(&values, 100, 1), bootstrap(&values, 100, 2));
        assert_eq!(bootstrap(&values, 100, 1), bootstrap(&values, 100, 1));
    }

    /// As numpy's `quantile` defines it.
    #[test]
    fn quantiles_lie_between_neighbours() {
        let values = [1.0, 2.0, 4.0, 8.0];
        for (p, expected) in [(0.0, 1.0), (0.5, 3.0), (0.25, 1.75), (0.975, 7.7), (1.0, 8.0)] {
            assert!((quantile(&values, p) - expected).abs() < 1e-12);
        }
        assert!(quantile(&[], 0.5).is_nan() && mean(&[]).is_nan());
    }
}
