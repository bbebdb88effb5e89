//! What a step of decoding is for.

use super::dense::Problem;

/// One query token for each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepProblem {
    /// Sequences of the batch.
    pub sequences: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads; each serves `q_heads / kv_heads` query heads, 16 at most.
    pub kv_heads: u32,
    /// Channels of a head: those that a system has instances for.
    pub head_dim: u32,
    /// Tokens that a sequence may grow to.
    pub max_tokens: u32,
}

impl From<Problem> for StepProblem {
    /// With one query token, however many there are.
    fn from(dense: Problem) -> Self {
        let Problem { sequences, q_heads, kv_heads, head_dim, max_tokens, .. } = dense;
        StepProblem { sequences, q_heads, kv_heads, head_dim, max_tokens }
    }
}

impl StepProblem {
    /// The same as exact attention has it.
    pub fn dense(self) -> Problem {
        Problem {
            sequences: self.sequences,
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            query_tokens: 1,
            max_tokens: self.max_tokens,
        }
    }
}
