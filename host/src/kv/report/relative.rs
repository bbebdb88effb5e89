//! How large bounds are beside what they bound.

use serde::{Deserialize, Serialize};

/// Bins an octave.
const FINE: f32 = 2.0;
/// The octaves below 2^4: what is less is in the first bin.
const LEAST: f32 = -12.0;
/// Bins.
const BINS: usize = 32;

/// Shares of many heads, counted in bins of half an octave: the bound on a head's error over its output's
/// norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relative {
    bins: [u64; BINS],
    /// Bits of the largest, of numbers that are not negative.
    worst: u32,
}

/// What shares are in the median, in 99 of 100 heads at the most, and at worst. Median and 99 % are upper
/// edges of bins, at most a factor of √2 above.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shares {
    /// In the median.
    pub median: f32,
    /// In 99 of 100 heads at the most.
    pub most: f32,
    /// The largest.
    pub worst: f32,
}

impl Relative {
    /// Of one head. `None` for a bound that is not finite, or of an output of which nothing is a share.
    pub fn of(bound: f32, norm: f32) -> Option<Relative> {
        let share = bound / norm;
        if !(share.is_finite() && norm > 0.0) {
            return None;
        }
        let mut bins = [0; BINS];
        let place = ((share.log2() - LEAST) * FINE).floor().clamp(0.0, (BINS - 1) as f32);
        bins[place as usize] = 1;
        Some(Relative { bins, worst: share.abs().to_bits() })
    }

    /// Both together.
    pub fn and(self, other: Relative) -> Relative {
        let mut bins = self.bins;
        bins.iter_mut().zip(other.bins).for_each(|(all, more)| *all += more);
        Relative { bins, worst: self.worst.max(other.worst) }
    }

    /// In three numbers.
    pub fn shares(&self) -> Shares {
        let all: u64 = self.bins.iter().sum();
        let worst = f32::from_bits(self.worst);
        let quantile = |of_all: u64| {
            let mut below = 0;
            let bin = self.bins.iter().position(|count| {
                below += count;
                below > of_all
            });
            let edge = bin.map_or(worst, |bin| ((bin + 1) as f32 / FINE + LEAST).exp2());
            edge.min(worst)
        };
        Shares {
            median: quantile(all.saturating_sub(1) / 2),
            most: quantile(all.saturating_sub(1) * 99 / 100),
            worst,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_and_the_most_are_within_a_bin_above_and_the_worst_is_exact() {
        let heads = (1..=1000u32).map(|i| Relative::of(i as f32, 10_000.0).expect("a share"));
        let shares = heads.reduce(Relative::and).expect("some").shares();
        assert_eq!(shares.worst, 0.1);
        assert!((0.05..0.05 * 1.415).contains(&shares.median), "{shares:?}");
        assert!((0.099..=0.1).contains(&shares.most), "{shares:?}");
        assert_eq!(Relative::of(f32::INFINITY, 1.0), None);
        assert_eq!(Relative::of(1.0, 0.0), None);
        assert_eq!(Relative::of(f32::NAN, 1.0), None);
        let one = Relative::of(0.25, 1.0).expect("a share").shares();
        assert_eq!((one.median, one.most, one.worst), (0.25, 0.25, 0.25));
    }
}
