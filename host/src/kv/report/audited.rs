//! What a sample of heads has shown.

use super::Audit;
use crate::statistics::{Interval, wilson};
use serde::{Deserialize, Serialize};

/// The share of an output's norm from which on a head counts as off.
const OFF: f64 = 0.1;
/// ln(2/δ) with δ = 0.025, half of the interval's chance to fail on each side.
const LOG: f64 = 4.382_026_634_673_881;

/// Heads that were held against everything: a sample, drawn without a look at the data, of all heads that
/// skipped tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Audited {
    /// Heads in it.
    pub heads: u64,
    /// Of these, such with a mass or an error that is no number; they are in nothing that follows but the
    /// count of those that are off.
    pub not_numbers: u64,
    /// The mean share of the attention mass that was skipped.
    pub mass: f64,
    /// The sum of the squares of what shares differ from the mean by.
    pub mass_deviations: f64,
    /// The largest share.
    pub worst_mass: f64,
    /// The mean error of an output over its norm.
    pub error: f64,
    /// The largest.
    pub worst_error: f64,
    /// Heads whose error is more than a tenth of the output's norm.
    pub off: u64,
}

impl Audited {
    /// Of one head.
    pub fn of(audit: Audit) -> Self {
        let [mass, error, norm] = [audit.mass, audit.error, audit.norm].map(f64::from);
        // An output of 0 that comes out as 0 is right.
        let error = if error == 0.0 { 0.0 } else { error / norm };
        let is_number = mass.is_finite() && error.is_finite();
        let [mass, error] = if is_number { [mass, error] } else { [0.0; 2] };
        Audited {
            heads: 1,
            not_numbers: u64::from(!is_number),
            mass,
            mass_deviations: 0.0,
            worst_mass: mass,
            error,
            worst_error: error,
            off: u64::from(!is_number || error > OFF),
        }
    }

    /// Both together.
    pub fn and(self, other: Audited) -> Audited {
        let [a, b] = [self, other].map(|audited| audited.numbers() as f64);
        let share = if a + b > 0.0 { b / (a + b) } else { 0.0 };
        let apart = other.mass - self.mass;
        Audited {
            heads: self.heads + other.heads,
            not_numbers: self.not_numbers + other.not_numbers,
            mass: self.mass + apart * share,
            mass_deviations: self.mass_deviations + other.mass_deviations + apart * apart * a * share,
            worst_mass: self.worst_mass.max(other.worst_mass),
            error: self.error + (other.error - self.error) * share,
            worst_error: self.worst_error.max(other.worst_error),
            off: self.off + other.off,
        }
    }

    /// Heads whose figures are numbers.
    fn numbers(self) -> u64 {
        self.heads - self.not_numbers
    }

    /// Where the mean share of all heads that skipped tokens lies, at 95 %: the empirical Bernstein bound
    /// (Maurer and Pontil, 2009, theorem 4), which takes shares to lie in [0, 1] and nothing else. That heads
    /// are drawn without putting them back makes it no smaller than it has to be (Hoeffding, 1963, section
    /// 6). All of [0, 1] of fewer than two heads.
    pub fn mass_interval(self) -> Interval {
        let n = self.numbers() as f64;
        if n < 2.0 {
            return Interval { low: 0.0, high: 1.0 };
        }
        let variance = self.mass_deviations / (n - 1.0);
        let half = (2.0 * variance * LOG / n).sqrt() + 7.0 * LOG / (3.0 * (n - 1.0));
        Interval { low: (self.mass - half).max(0.0), high: (self.mass + half).min(1.0) }
    }

    /// The share of heads that are off by more than a tenth of their output: Wilson's interval.
    pub fn off_interval(self) -> Interval {
        wilson(self.off as usize, self.heads as usize)
    }

    /// In words.
    pub fn line(self) -> String {
        let percent = |x: f64| format!("{:.2}", 100.0 * x);
        let of = |interval: Interval| format!("{}–{}", percent(interval.low), percent(interval.high));
        format!(
            "audit of {} heads: mean mass skipped {} % ({} at 95 %), worst {} %, mean error {} % of the output, \
             {} % of heads off by more than a tenth ({})",
            self.heads,
            percent(self.mass),
            of(self.mass_interval()),
            percent(self.worst_mass),
            percent(self.error),
            percent(self.off as f64 / self.heads.max(1) as f64),
            of(self.off_interval()),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn audit(mass: f32, error: f32) -> Audit {
        Audit { mass, error, norm: 2.0 }
    }

    fn all(masses: impl Iterator<Item = f32>) -> Audited {
        masses.map(|mass| Audited::of(audit(mass, 0.1))).reduce(Audited::and).expect("some")
    }

    #[test]
    fn means_do_not_depend_on_the_order() {
        let masses: Vec<f32> = (0..100).map(|i| (i * 37 % 100) as f32 / 128.0).collect();
        let whole = all(masses.iter().copied());
        let halves = all(masses[..30].iter().copied()).and(all(masses[30..].iter().copied()));
        let mean = masses.iter().map(|x| f64::from(*x)).sum::<f64>() / 100.0;
        let deviations: f64 = masses.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum();
        for audited in [whole, halves] {
            assert!((audited.mass - mean).abs() < 1e-12 && audited.heads == 100);
            assert!((audited.mass_deviations - deviations).abs() < 1e-10);
            assert!((audited.error - 0.05).abs() < 1e-8 && audited.off == 0);
        }
        assert_eq!(whole.worst_mass, 99.0 / 128.0);
    }

    /// Of samples from a population of which most is 0 and a little is large, the interval misses the mean in
    /// fewer than one of 20.
    #[test]
    fn the_interval_holds_the_mean_of_a_skewed_population() {
        let mut random = crate::random::Random::new(5);
        let population: Vec<f32> = (0..1000).map(|i| if i % 50 == 0 { 0.9 } else { 0.001 }).collect();
        let mean = population.iter().map(|x| f64::from(*x)).sum::<f64>() / 1000.0;
        for size in [2, 20, 400] {
            let mut missed = 0;
            for _ in 0..400 {
                let interval = all((0..size).map(|_| population[random.below(1000)])).mass_interval();
                missed += usize::from(!(interval.low..=interval.high).contains(&mean));
            }
            assert!(missed < 20, "{size}: {missed}");
        }
        // And it is one that says something.
        let interval = all((0..20_000).map(|i| population[i % 1000])).mass_interval();
        assert!(interval.high - interval.low < 0.007, "{interval:?}");
        assert_eq!(Audited::of(audit(0.5, 0.0)).mass_interval(), Interval { low: 0.0, high: 1.0 });
    }

    #[test]
    fn what_is_no_number_is_off() {
        let bad = Audited::of(audit(f32::NAN, 0.1)).and(Audited::of(audit(0.25, 0.5)));
        assert_eq!((bad.heads, bad.not_numbers, bad.off), (2, 1, 2));
        assert_eq!((bad.mass, bad.worst_error), (0.25, 0.25));
        let none = Audited::of(Audit { mass: 0.0, error: 0.0, norm: 0.0 });
        assert_eq!((none.off, none.not_numbers), (0, 0));
        assert_eq!(Audited::of(Audit { mass: 0.0, error: 0.1, norm: 0.0 }).off, 1);
    }
}
