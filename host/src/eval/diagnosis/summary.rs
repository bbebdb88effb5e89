//! Means of samples, with intervals.

use super::Sample;
use crate::eval::statistics::{self, Interval, RESAMPLES};
use rayon::prelude::*;
use serde::Serialize;

/// A mean and its bootstrap interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// The mean over samples.
    pub mean: f64,
    /// At 95 %; none of a single sample.
    pub interval: Option<Interval>,
}

/// What [`Sample`]s say together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Queries, of all heads and layers.
    pub samples: usize,
    /// Of [`Sample::logit`].
    pub logit: Figure,
    /// Of [`Sample::offsets`]; none unless all samples have it.
    pub offsets: Option<Figure>,
    /// Of [`Sample::divergence`].
    pub divergence: Figure,
    /// Of [`Sample::overlap`].
    pub overlap: Figure,
    /// Of [`Sample::output`].
    pub output: Figure,
    /// Of [`Sample::values`].
    pub values: Figure,
}

/// Means over samples, each with the interval of the resamples of `seed`: the same seed draws the same
/// queries of every scheme. NaN of no samples.
///
/// Heads of one query, and queries of one text, are not independent of one another, so that the interval says
/// how far other queries of this text would move a mean, not another text.
pub fn summarize(samples: &[Sample], seed: u64) -> Summary {
    let all = |of: fn(&Sample) -> f64| samples.iter().map(of).collect::<Vec<f64>>();
    let measures = [
        all(|sample| sample.logit),
        all(|sample| sample.divergence),
        all(|sample| sample.overlap),
        all(|sample| sample.output),
        all(|sample| sample.values),
    ];
    let figure = |values: &Vec<f64>| Figure {
        mean: statistics::mean(values),
        interval: statistics::bootstrap(values, RESAMPLES, seed),
    };
    let offsets: Option<Vec<f64>> = samples.iter().map(|sample| sample.offsets).collect();
    let offsets = offsets.filter(|values| !values.is_empty());
    let (figures, offsets): (Vec<Figure>, _) =
        rayon::join(|| measures.par_iter().map(figure).collect(), || offsets.as_ref().map(figure));
    let of = |measure: usize| figures[measure];
    Summary {
        samples: samples.len(),
        logit: of(0),
        offsets,
        divergence: of(1),
        overlap: of(2),
        output: of(3),
        values: of(4),
    }
}
