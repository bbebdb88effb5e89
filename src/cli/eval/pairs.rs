//! What every measurement makes of its trials: pairs with the dense cache, by length and scheme.

use crate::cli::scheme::DENSE;
use host::eval::statistics::RESAMPLES;
use host::kv::Summary;
use serde::Serialize;

/// One trial of one scheme.
pub trait Paired {
    /// The scheme's name.
    fn kv(&self) -> &str;
    /// The length in tokens.
    fn context(&self) -> usize;
    /// Whether another scheme's trial had the same text.
    fn is_same(&self, other: &Self) -> bool;
    /// What the scheme promised.
    fn report(&self) -> Option<Summary>;
    /// How long it took.
    fn seconds(&self) -> f64;
}

/// Trials of one scheme, each with that of the dense cache on the same text.
pub struct Pairs<'a, T>(Vec<(&'a T, &'a T)>);

impl<'a, T: Paired> Pairs<'a, T> {
    /// Those of a scheme among `trials`; `None` if there are none.
    pub fn of(trials: &[&'a T], kv: &str) -> Option<Self> {
        let dense = |own: &T| trials.iter().find(|other| other.kv() == DENSE && other.is_same(own)).copied();
        let own = trials.iter().filter(|trial| trial.kv() == kv);
        let pairs: Vec<_> = own.filter_map(|own| Some((*own, dense(own)?))).collect();
        (!pairs.is_empty()).then_some(Pairs(pairs))
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The scheme's first trial.
    pub fn first(&self) -> &'a T {
        self.0[0].0
    }

    /// Pairs that are as wanted: the scheme's trial and dense's.
    pub fn count(&self, wanted: impl Fn(&T, &T) -> bool) -> usize {
        self.0.iter().filter(|(own, dense)| wanted(own, dense)).count()
    }

    /// A figure of the scheme's trials, and of dense's.
    pub fn figures(&self, of: impl Fn(&T) -> f64) -> (Vec<f64>, Vec<f64>) {
        self.0.iter().map(|(own, dense)| (of(own), of(dense))).unzip()
    }

    /// What the scheme promised, over all of them.
    pub fn report(&self) -> Option<Summary> {
        self.0.iter().filter_map(|(own, _)| own.report()).reduce(Summary::and)
    }

    /// How long the scheme's trials took.
    pub fn seconds(&self) -> f64 {
        self.0.iter().map(|(own, _)| own.seconds()).sum()
    }
}

/// The lengths of a record, in order.
pub fn lengths<T: Paired>(trials: &[T]) -> Vec<usize> {
    let mut lengths: Vec<usize> = trials.iter().map(Paired::context).collect();
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// A record's figures, and what their intervals are of.
#[derive(Serialize)]
pub struct Rows<R> {
    /// Which resamples.
    pub bootstrap_seed: u64,
    /// How many.
    pub bootstrap_resamples: usize,
    /// The figures.
    pub rows: Vec<R>,
}

impl<R> Rows<R> {
    /// Rows with intervals of the resamples of `seed`.
    pub fn new(seed: u64, rows: Vec<R>) -> Self {
        Rows { bootstrap_seed: seed, bootstrap_resamples: RESAMPLES, rows }
    }
}
