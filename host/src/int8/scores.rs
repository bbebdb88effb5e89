//! The paper's attention-score error over real queries: grouped heads, and only the keys that a query sees.

use super::{Int8Element, Matrix};
use rayon::prelude::*;

/// Queries that read a matrix of keys.
#[derive(Clone, Copy, Debug)]
pub struct Queries<'a> {
    /// [rows, heads, head_dim], row-major.
    pub values: &'a [f32],
    /// Query heads; a multiple of the matrix's KV heads.
    pub heads: usize,
    /// Channels of one head.
    pub head_dim: usize,
    /// The position of row 0: row r sees the keys 0 to `first_position` + r. `None`: every row sees all keys.
    pub first_position: Option<usize>,
}

impl Queries<'_> {
    /// Whether these queries can read `keys`: whole rows, and KV heads that divide the query heads.
    pub fn fit(&self, keys: Matrix) -> bool {
        let row = self.heads * self.head_dim;
        row != 0
            && !self.values.is_empty()
            && self.values.len().is_multiple_of(row)
            && keys.channels.is_multiple_of(self.head_dim)
            && self.heads.is_multiple_of(keys.channels / self.head_dim)
    }

    /// The mean of |q·k − q·k^| over the scores that are computed: each query head with each key it sees. Not
    /// divided by √head_dim, as in the paper. Query head h reads KV head h / (heads / KV heads). Keys that
    /// are not finite count as unchanged. 0 if no query sees a key.
    ///
    /// # Panics
    /// If the queries do not [`fit`](Self::fit) or a slice does not fit the matrix.
    pub fn score_error<T: Int8Element>(&self, original: &[T], restored: &[T], matrix: Matrix) -> f64 {
        assert!(self.fit(matrix), "queries of {} heads do not fit keys of {matrix}", self.heads);
        assert_eq!(original.len(), matrix.elements());
        assert_eq!(restored.len(), matrix.elements());
        let group = self.heads / (matrix.channels / self.head_dim);
        let rows = self.values.len() / (self.heads * self.head_dim);
        // Row r sees key t if t <= first + r.
        let first_row =
            |token: usize| self.first_position.map_or(0, |first| token.saturating_sub(first)).min(rows);
        let keys = original.par_chunks(matrix.channels).zip(restored.par_chunks(matrix.channels)).enumerate();
        let sums: Vec<f64> = keys
            .map(|(token, (original, restored))| {
                let moved: Vec<f64> = original
                    .iter()
                    .zip(restored)
                    .map(|(x, y)| (x.to_f32(), y.to_f32()))
                    .map(|(x, y)| if x.is_finite() { x as f64 - y as f64 } else { 0.0 })
                    .collect();
                let seeing = &self.values[first_row(token) * self.heads * self.head_dim..];
                let heads = seeing.chunks_exact(self.head_dim).enumerate();
                heads
                    .map(|(index, query)| {
                        let first = index % self.heads / group * self.head_dim;
                        let key = &moved[first..first + self.head_dim];
                        query.iter().zip(key).map(|(q, d)| *q as f64 * d).sum::<f64>().abs()
                    })
                    .sum()
            })
            .collect();
        let scores: usize = (0..matrix.tokens).map(|token| (rows - first_row(token)) * self.heads).sum();
        // Added in order: a parallel sum would round differently from run to run.
        if scores == 0 { 0.0 } else { sums.iter().sum::<f64>() / scores as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two KV heads of two channels, four query heads: 0 and 1 read KV head 0, 2 and 3 KV head 1.
    #[test]
    fn heads_read_their_group_and_rows_see_their_past() {
        let matrix = Matrix::new(3, 4).unwrap();
        let original = [0f32; 12];
        // Only token 2 moved: by 1 in channel 0 (KV head 0) and by 4 in channel 2 (KV head 1).
        let mut restored = original;
        (restored[8], restored[10]) = (1.0, 4.0);
        let head = |x: f32| [x, 7.0];
        let row = |x: f32| [head(x), head(10.0 * x), head(100.0 * x), head(1000.0 * x)].concat();
        let values = [row(1.0), row(2.0)].concat();
        let mut queries = Queries { values: &values, heads: 4, head_dim: 2, first_position: None };
        let moved = |x: f64| x + 10.0 * x + 4.0 * (100.0 * x + 1000.0 * x);
        let all = queries.score_error(&original, &restored, matrix);
        assert_eq!(all, (moved(1.0) + moved(2.0)) / (2.0 * 4.0 * 3.0));

        // Row 0 is position 1 and sees tokens 0 and 1; row 1 sees all three.
        queries.first_position = Some(1);
        let causal = queries.score_error(&original, &restored, matrix);
        assert_eq!(causal, moved(2.0) / (4.0 * 5.0));
        queries.first_position = Some(usize::MAX);
        assert_eq!(queries.score_error(&original, &restored, matrix), all);
    }

    #[test]
    fn agrees_with_the_plain_metric_for_one_head() {
        let matrix = Matrix::new(5, 6).unwrap();
        let value = |i: usize| (i as f32 * 0.7).sin();
        let original: Vec<f32> = (0..30).map(value).collect();
        let restored: Vec<f32> = original.iter().map(|x| (x * 8.0).round() / 8.0).collect();
        let values: Vec<f32> = (0..12).map(|i| value(i + 100)).collect();
        let queries = Queries { values: &values, heads: 1, head_dim: 6, first_position: None };
        let plain = crate::int8::metrics::attention_error(&values, &original, &restored, matrix);
        let ours = queries.score_error(&original, &restored, matrix);
        assert!((plain - ours).abs() <= 1e-12 * plain && plain > 0.0, "{plain} {ours}");
    }

    #[test]
    fn shapes_that_do_not_fit_are_seen() {
        let values = [0f32; 24];
        let keys = Matrix::new(3, 8).unwrap();
        let fit =
            |heads, head_dim| Queries { values: &values, heads, head_dim, first_position: None }.fit(keys);
        assert!(fit(6, 4) && fit(2, 4) && fit(3, 8));
        assert!(!fit(3, 4), "two KV heads do not divide three");
        assert!(!fit(4, 3), "a head across the row's end");
        assert!(!fit(5, 4), "no whole rows");
        assert!(!fit(0, 4) && !fit(4, 0));
    }
}
