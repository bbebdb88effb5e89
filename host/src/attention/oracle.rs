//! Decode attention in f64, written to be obvious: what every implementation is judged by.
//!
//! ```text
//! s_t = scale · q·K_t    a_t = exp(s_t) / sum_u exp(s_u)    O = sum_t a_t V_t    lse = ln sum_t exp(s_t)
//! ```
//!
//! over the tokens that a query token sees. Sums run in the order of the tokens; with n of them the result is
//! within about n · 2^−52 of the largest value, 10^−10 at half a million: far below what it judges.

use rayon::prelude::*;

/// One sequence and its query tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sequence {
    /// Tokens in the cache. The query tokens are its last ones.
    pub length: usize,
    /// Tokens that ask, in order: the last sees `length` tokens, each one before it one less.
    pub query_tokens: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key and value heads. Query head h reads head h / (q_heads / kv_heads).
    pub kv_heads: usize,
    /// Elements of a row.
    pub head_dim: usize,
    /// What products of query and key are multiplied by: 1 / sqrt(head_dim), mostly.
    pub scale: f64,
}

/// Outputs `[query_token][q_head][head_dim]` and natural logarithms of the sums `[query_token][q_head]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Attended {
    /// One row for each query token and head. Zeros for a query token that sees nothing.
    pub output: Vec<f64>,
    /// Natural log-sum-exp of the logits. Minus infinity for a query token that sees nothing.
    pub lse: Vec<f64>,
}

impl Sequence {
    /// A sequence that asks with its last token, with the usual scale.
    pub fn decode(length: usize, q_heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        let scale = 1.0 / (head_dim as f64).sqrt();
        Sequence { length, query_tokens: 1, q_heads, kv_heads, head_dim, scale }
    }

    /// How many tokens query token `query_token` sees: the first so many.
    pub fn visible(&self, query_token: usize) -> usize {
        (self.length + query_token + 1).saturating_sub(self.query_tokens)
    }

    /// The key and value head that a query head reads.
    pub fn kv_head(&self, q_head: usize) -> usize {
        q_head / (self.q_heads / self.kv_heads)
    }

    /// Logits of one query token and head, for the tokens that it sees.
    ///
    /// `query` is `[query_token][q_head][head_dim]`; `key` writes the row of (kv head, token).
    pub fn logits(
        &self,
        query: &[f64],
        key: impl Fn(usize, usize, &mut [f64]),
        query_token: usize,
        q_head: usize,
    ) -> Vec<f64> {
        let first = (query_token * self.q_heads + q_head) * self.head_dim;
        let query = &query[first..first + self.head_dim];
        let mut row = vec![0.0; self.head_dim];
        (0..self.visible(query_token))
            .map(|token| {
                key(self.kv_head(q_head), token, &mut row);
                self.scale * query.iter().zip(&row).map(|(q, k)| q * k).sum::<f64>()
            })
            .collect()
    }

    /// Outputs and log-sums of all query tokens and heads.
    ///
    /// `query` is `[query_token][q_head][head_dim]`; `key` and `value` write the row of (kv head, token).
    pub fn attend(
        &self,
        query: &[f64],
        key: impl Fn(usize, usize, &mut [f64]) + Sync,
        value: impl Fn(usize, usize, &mut [f64]) + Sync,
    ) -> Attended {
        let rows: Vec<(Vec<f64>, f64)> = (0..self.query_tokens * self.q_heads)
            .into_par_iter()
            .map(|row| {
                let (query_token, q_head) = (row / self.q_heads, row % self.q_heads);
                let (weights, lse) = softmax(&self.logits(query, &key, query_token, q_head));
                let mut output = vec![0.0; self.head_dim];
                let mut of_token = vec![0.0; self.head_dim];
                for (token, weight) in weights.iter().enumerate() {
                    value(self.kv_head(q_head), token, &mut of_token);
                    output.iter_mut().zip(&of_token).for_each(|(o, v)| *o += weight * v);
                }
                (output, lse)
            })
            .collect();
        Attended {
            lse: rows.iter().map(|(_, lse)| *lse).collect(),
            output: rows.into_iter().flat_map(|(output, _)| output).collect(),
        }
    }

    /// The weights a_t of one query token and head, for the tokens that it sees: they add up to 1.
    pub fn weights(
        &self,
        query: &[f64],
        key: impl Fn(usize, usize, &mut [f64]),
        query_token: usize,
        q_head: usize,
    ) -> Vec<f64> {
        softmax(&self.logits(query, key, query_token, q_head)).0
    }
}

/// Weights of logits, and the natural logarithm of the sum of their exponentials.
pub fn softmax(logits: &[f64]) -> (Vec<f64>, f64) {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return (vec![0.0; logits.len()], largest);
    }
    let weights: Vec<f64> = logits.iter().map(|s| (s - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (weights.iter().map(|w| w / sum).collect(), largest + sum.ln())
}

/// Rows of a contiguous `[kv_head][tokens][head_dim]`, as [`Sequence::attend`] asks for them.
pub fn rows(data: &[f64], tokens: usize, head_dim: usize) -> impl Fn(usize, usize, &mut [f64]) + Sync + '_ {
    move |kv_head, token, row| {
        let first = (kv_head * tokens + token) * head_dim;
        row.copy_from_slice(&data[first..first + head_dim]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: &[f64], b: &[f64]) {
        assert_eq!(a.len(), b.len());
        assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-14 * (1.0 + b.abs())), "{a:?} {b:?}");
    }

    /// Logits ln 1, ln 2, ln 5: weights of eighths.
    #[test]
    fn weights_by_hand() {
        let sequence = Sequence { scale: 0.5, ..Sequence::decode(3, 1, 1, 2) };
        let keys = [0.0, 0.0, 2f64.ln(), 7.0, 5f64.ln(), -3.0];
        let values = [8.0, 0.0, 0.0, 4.0, 16.0, -8.0];
        let query = [2.0, 0.0];
        close(&sequence.weights(&query, rows(&keys, 3, 2), 0, 0), &[1.0 / 8.0, 2.0 / 8.0, 5.0 / 8.0]);
        let attended = sequence.attend(&query, rows(&keys, 3, 2), rows(&values, 3, 2));
        close(&attended.output, &[11.0, -4.0]);
        close(&attended.lse, &[8f64.ln()]);
    }

    #[test]
    fn usual_scale_is_of_the_root_of_head_dim() {
        let sequence = Sequence::decode(2, 1, 1, 16);
        let mut keys = vec![0.0; 32];
        keys[16..].fill(3f64.ln());
        // A product of 16 · ln 3 / 4, over 4.
        let weights = sequence.weights(&[0.25; 16], rows(&keys, 2, 16), 0, 0);
        close(&weights, &[0.25, 0.75]);
    }

    /// Four query heads on two: heads 0, 1 read the first, 2, 3 the second.
    #[test]
    fn groups_are_neighbours() {
        let sequence = Sequence { scale: 1.0, ..Sequence::decode(2, 4, 2, 1) };
        let keys = [0.0, 3f64.ln(), 0.0, 7f64.ln()];
        let values = [0.0, 4.0, 100.0, 108.0];
        let attended = sequence.attend(&[1.0, 0.0, 1.0, -1.0], rows(&keys, 2, 1), rows(&values, 2, 1));
        close(&attended.output, &[3.0, 2.0, 107.0, 101.0]);
        close(&attended.lse, &[4f64.ln(), 2f64.ln(), 8f64.ln(), (8.0f64 / 7.0).ln()]);
    }

    #[test]
    fn query_tokens_do_not_see_later_ones() {
        let sequence = Sequence { query_tokens: 3, ..Sequence::decode(4, 1, 1, 1) };
        assert_eq!((0..3).map(|i| sequence.visible(i)).collect::<Vec<_>>(), [2, 3, 4]);
        let values = [1.0, 3.0, 8.0, 20.0];
        let attended = sequence.attend(&[0.0; 3], rows(&[5.0; 4], 4, 1), rows(&values, 4, 1));
        close(&attended.output, &[2.0, 4.0, 8.0]);
        close(&attended.lse, &[2f64.ln(), 3f64.ln(), 4f64.ln()]);
    }

    #[test]
    fn more_query_tokens_than_tokens_leaves_some_without_any() {
        let sequence = Sequence { query_tokens: 3, ..Sequence::decode(1, 1, 1, 2) };
        assert_eq!((0..3).map(|i| sequence.visible(i)).collect::<Vec<_>>(), [0, 0, 1]);
        let attended = sequence.attend(&[1.0; 6], rows(&[0.5, 0.5], 1, 2), rows(&[7.0, -7.0], 1, 2));
        assert_eq!(attended.output, [0.0, 0.0, 0.0, 0.0, 7.0, -7.0]);
        assert_eq!(attended.lse[..2], [f64::NEG_INFINITY; 2]);
        close(&attended.lse[2..], &[1.0 / 2f64.sqrt()]);
    }

    /// exp of either logit alone is infinite, or zero.
    #[test]
    fn huge_logits_do_not_overflow() {
        for shift in [1e5, -1e5] {
            let (weights, lse) = softmax(&[shift, shift + 3f64.ln()]);
            assert!((weights[1] - 0.75).abs() < 1e-10 && (lse - shift - 4f64.ln()).abs() < 1e-10);
        }
    }
}
