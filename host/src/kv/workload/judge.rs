//! A row of a workload's output beside attention in f64.

use super::Promise;
use crate::attention::oracle::{Sequence, softmax};

/// Writes the row of (KV head, token).
pub type Rows<'a> = dyn Fn(usize, usize, &mut [f64]) + Sync + 'a;

/// What one row of the output is attention over.
#[derive(Clone, Copy)]
pub struct Data<'a> {
    /// Its sequence.
    pub sequence: Sequence,
    /// Its query head.
    pub q_head: usize,
    /// The sequence's query, [q_heads, head_dim].
    pub query: &'a [f64],
    /// Its keys.
    pub key: &'a Rows<'a>,
    /// Its values.
    pub value: &'a Rows<'a>,
}

/// Exact attention of a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Exact {
    /// `[head_dim]`.
    pub output: Vec<f64>,
    /// Natural log-sum-exp of the logits.
    pub lse: f64,
}

impl Data<'_> {
    /// The row by the formula.
    pub fn exact(&self) -> Exact {
        let Data { sequence, q_head, query, key, value } = *self;
        let (weights, lse) = softmax(&sequence.logits(query, key, 0, q_head));
        let mut output = vec![0.0; sequence.head_dim];
        let mut of_token = vec![0.0; sequence.head_dim];
        for (token, weight) in weights.iter().enumerate() {
            value(sequence.kv_head(q_head), token, &mut of_token);
            output.iter_mut().zip(&of_token).for_each(|(o, v)| *o += weight * v);
        }
        Exact { output, lse }
    }
}

/// How a row does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judged {
    /// The distance from the formula, Euclidean.
    pub error: f64,
    /// The norm of the formula's row.
    pub norm: f64,
    /// What was promised of the norm of the error; none if nothing was.
    pub bound: Option<f64>,
    /// The largest error as a part of its bound; none if nothing was promised. Above 1 the promise is broken,
    /// and so it is if this is NaN.
    pub error_of_bound: Option<f64>,
}

impl Judged {
    /// Whether what was promised holds.
    pub fn holds(&self) -> bool {
        self.error_of_bound.is_none_or(|part| part <= 1.0)
    }

    /// An error or a bound as a part of the output's norm; none of an output of 0.
    pub fn share(&self, value: f64) -> Option<f64> {
        (self.norm > 0.0).then(|| value / self.norm)
    }
}

/// Judges a row; `lse` where the scheme has one.
pub fn judge(exact: &Exact, promise: &Promise, output: &[f32], lse: Option<f32>) -> Judged {
    let errors = || output.iter().zip(&exact.output).map(|(got, want)| f64::from(*got) - want);
    let error = norm(errors());
    let (bound, error_of_bound) = match promise {
        Promise::Nothing => (None, None),
        // An error of 0 is within a bound of 0.
        Promise::Norm(bound) => (Some(*bound), Some(part(error, *bound))),
        Promise::Elements { output, lse: lse_bound } => {
            let of_lse = lse.map_or(0.0, |lse| part((f64::from(lse) - exact.lse).abs(), *lse_bound));
            let parts = errors().zip(output).map(|(error, bound)| part(error.abs(), *bound));
            (Some(norm(output.iter().copied())), Some(parts.fold(of_lse, worse)))
        }
    };
    Judged { error, norm: norm(exact.output.iter().copied()), bound, error_of_bound }
}

/// An error as a part of its bound; NaN where either is no number.
fn part(error: f64, bound: f64) -> f64 {
    if error == 0.0 && bound >= 0.0 { 0.0 } else { error / bound }
}

/// The larger; NaN if one is.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// The Euclidean norm.
pub fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exact() -> Exact {
        Exact { output: vec![3.0, 4.0], lse: 1.0 }
    }

    #[test]
    fn a_promise_that_is_broken_or_no_number_does_not_hold() {
        let judged = |bound, output: [f32; 2]| judge(&exact(), &Promise::Norm(bound), &output, None);
        assert!(judged(1.0, [3.0, 5.0]).holds() && !judged(0.99, [3.0, 5.0]).holds());
        assert!(judged(0.0, [3.0, 4.0]).holds());
        assert!(!judged(f64::NAN, [3.0, 4.0]).holds() && !judged(1.0, [f32::NAN, 4.0]).holds());
        assert_eq!(judged(2.0, [3.0, 5.0]).error_of_bound, Some(0.5));
        let judged = judged(2.0, [3.0, 5.0]);
        assert_eq!((judged.norm, judged.share(judged.error)), (5.0, Some(0.2)));
    }

    #[test]
    fn each_element_and_the_log_sum_have_their_own_bound() {
        let promise = Promise::Elements { output: vec![1.0, 0.5], lse: 0.25 };
        let judged = |output: [f32; 2], lse: f32| judge(&exact(), &promise, &output, Some(lse));
        assert_eq!(judged([3.5, 4.0], 1.0).error_of_bound, Some(0.5));
        assert!(!judged([3.0, 4.75], 1.0).holds() && !judged([3.0, 4.0], 1.5).holds());
        assert!(!judged([3.0, 4.0], f32::NAN).holds());
        assert!(judge(&exact(), &Promise::Nothing, &[f32::NAN, 0.0], None).holds());
    }

    #[test]
    fn the_formula_by_hand() {
        // Logits 0 and ln 3: a quarter and three quarters.
        let key =
            |_: usize, token: usize, row: &mut [f64]| row.fill(if token == 0 { 0.0 } else { 3f64.ln() });
        let value = |_: usize, token: usize, row: &mut [f64]| row.fill(if token == 0 { 4.0 } else { 8.0 });
        let sequence = Sequence { scale: 1.0, ..Sequence::decode(2, 1, 1, 1) };
        let exact = Data { sequence, q_head: 0, query: &[1.0], key: &key, value: &value }.exact();
        assert!((exact.output[0] - 7.0).abs() < 1e-12 && (exact.lse - 4f64.ln()).abs() < 1e-12);
    }
}
