//! What a step should have returned, in f64, and what others' formula would have said of its error.

use crate::attention::dense::DenseElement;
use crate::attention::inputs::Batch;
use crate::attention::oracle::softmax;
use crate::certified::BLOCK_TOKENS;

const TOKENS: usize = BLOCK_TOKENS as usize;

/// Exact attention of one query head.
#[derive(Clone, Debug, PartialEq)]
pub struct Exact {
    /// O, \[head_dim\].
    pub output: Vec<f64>,
    /// Natural log-sum-exp of the logits.
    pub lse: f64,
    /// Δ by the paper's equation (8), for f32 scales: the largest of all quantized blocks.
    pub paper_delta: f64,
    /// The largest norm of a value.
    pub largest_value: f64,
}

impl Exact {
    /// The paper's bound on the error by quantized keys: the lesser of equations (9) and (11), for a tail of
    /// this mass.
    pub fn paper_bound(&self, tail_mass: f64) -> f64 {
        let grown = (2.0 * self.paper_delta).exp();
        let tail = grown * tail_mass * (grown - 1.0);
        2.0 * self.largest_value * tail.min(self.paper_delta.tanh())
    }

    /// Equation (15) without its second part, for a tail of this mass in the first pass.
    pub fn paper_tail_bound(&self, tail_mass: f64) -> f64 {
        let grown = (2.0 * self.paper_delta).exp();
        2.0 * self.largest_value * grown * tail_mass * (grown - 1.0)
    }

    /// The distance of an output from it.
    pub fn error(&self, output: &[f32]) -> f64 {
        let square = |(a, b): (&f64, &f32)| (a - f64::from(*b)).powi(2);
        self.output.iter().zip(output).map(square).sum::<f64>().sqrt()
    }
}

/// Sum of products, eight partial sums side by side.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum()
}

impl<E: DenseElement> Batch<E> {
    /// Exact attention of the query heads of one sequence and KV head.
    pub fn exact(&self, sequence: usize, kv_head: usize) -> Vec<Exact> {
        let dim = self.problem.head_dim as usize;
        let row = |data: &[E], token: usize, out: &mut [f64]| {
            let at = self.row(sequence, kv_head, token);
            out.iter_mut().zip(&data[at..at + dim]).for_each(|(out, x)| *out = f64::from(x.to_f32()));
        };
        self.exact_over(
            sequence,
            kv_head,
            |token, out| row(&self.keys, token, out),
            |token, out| row(&self.values, token, out),
        )
    }

    /// The same over other keys and values: `key` and `value` write a token's row.
    pub fn exact_over(
        &self,
        sequence: usize,
        kv_head: usize,
        key: impl Fn(usize, &mut [f64]),
        value: impl Fn(usize, &mut [f64]),
    ) -> Vec<Exact> {
        let dim = self.problem.head_dim as usize;
        let group = (self.problem.q_heads / self.problem.kv_heads) as usize;
        let length = self.lengths[sequence] as usize;
        let full = length / TOKENS * TOKENS;
        let scale = 1.0 / (dim as f64).sqrt();
        let queries: Vec<Vec<f64>> = (0..group)
            .map(|g| {
                self.query(sequence, kv_head * group + g).iter().map(|x| f64::from(x.to_f32())).collect()
            })
            .collect();
        let sizes: Vec<Vec<f64>> =
            queries.iter().map(|query| query.iter().map(|x| x.abs()).collect()).collect();

        let mut data = vec![0.0; dim];
        let mut logits = vec![Vec::with_capacity(length); group];
        let mut deltas = vec![0f64; group];
        let (mut low, mut high) = (vec![f64::INFINITY; dim], vec![f64::NEG_INFINITY; dim]);
        for token in 0..length {
            key(token, &mut data);
            for (logits, query) in logits.iter_mut().zip(&queries) {
                logits.push(scale * dot(query, &data));
            }
            if token < full {
                low.iter_mut().zip(&data).for_each(|(low, x)| *low = low.min(*x));
                high.iter_mut().zip(&data).for_each(|(high, x)| *high = high.max(*x));
                if token % TOKENS == TOKENS - 1 {
                    // Half a step of each channel.
                    let steps: Vec<f64> =
                        low.iter().zip(&high).map(|(low, high)| (high - low) / 510.0).collect();
                    for (delta, sizes) in deltas.iter_mut().zip(&sizes) {
                        *delta = delta.max(scale * dot(sizes, &steps));
                    }
                    low.fill(f64::INFINITY);
                    high.fill(f64::NEG_INFINITY);
                }
            }
        }
        let heads: Vec<(Vec<f64>, f64)> = logits.iter().map(|logits| softmax(logits)).collect();
        let mut outputs = vec![vec![0.0; dim]; group];
        let mut largest_value = 0f64;
        for token in 0..length {
            value(token, &mut data);
            largest_value = largest_value.max(dot(&data, &data));
            for (output, (weights, _)) in outputs.iter_mut().zip(&heads) {
                let weight = weights[token];
                output.iter_mut().zip(&data).for_each(|(o, v)| *o += weight * v);
            }
        }
        let largest_value = largest_value.sqrt();
        outputs
            .into_iter()
            .zip(&heads)
            .zip(&deltas)
            .map(|((output, (_, lse)), delta)| Exact {
                output,
                lse: *lse,
                paper_delta: *delta,
                largest_value,
            })
            .collect()
    }
}
