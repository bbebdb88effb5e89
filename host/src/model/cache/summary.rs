//! A step's certificates in a few numbers.

use crate::certified::{Certificate, Rung};
use serde::{Deserialize, Serialize};

/// What the certificates of some heads say together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Heads, of all layers and steps.
    pub heads: u64,
    /// The largest bound on a head's error: the Euclidean norm of an output row. `None` where a head has none that is finite.
    pub worst_bound: Option<f32>,
    /// Heads some of whose blocks were used from their originals.
    pub promoted_heads: u64,
    /// Heads that were computed from the originals alone.
    pub dense_heads: u64,
    /// Blocks whose keys were promoted.
    pub promoted_keys: u64,
    /// Blocks whose values were.
    pub promoted_values: u64,
}

impl Summary {
    /// That of one step, if it has certificates.
    pub fn of(certificates: &[Certificate]) -> Option<Summary> {
        let bound = |worst: Option<f32>, certificate: &Certificate| {
            let bound = certificate.bound();
            worst.filter(|_| bound.is_finite()).map(|worst| worst.max(bound))
        };
        let rungs = |wanted: fn(Rung) -> bool| {
            certificates.iter().filter(|certificate| wanted(Rung::of(certificate.rung()))).count() as u64
        };
        let sum = |of: fn(&Certificate) -> u32| certificates.iter().map(|c| u64::from(of(c))).sum();
        (!certificates.is_empty()).then(|| Summary {
            heads: certificates.len() as u64,
            worst_bound: certificates.iter().fold(Some(0.0), bound),
            promoted_heads: rungs(|rung| matches!(rung, Rung::Promoted | Rung::Expanded)),
            dense_heads: rungs(Rung::is_dense),
            promoted_keys: sum(|certificate| certificate.promoted_keys),
            promoted_values: sum(|certificate| certificate.promoted_values),
        })
    }

    /// Both together.
    pub fn and(self, other: Summary) -> Summary {
        Summary {
            heads: self.heads + other.heads,
            worst_bound: self.worst_bound.zip(other.worst_bound).map(|(a, b)| a.max(b)),
            promoted_heads: self.promoted_heads + other.promoted_heads,
            dense_heads: self.dense_heads + other.dense_heads,
            promoted_keys: self.promoted_keys + other.promoted_keys,
            promoted_values: self.promoted_values + other.promoted_values,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(e_key: f32, rung: u32) -> Certificate {
        Certificate {
            e_key,
            e_val: 0.25,
            e_round: 0.0,
            promoted_keys: 2,
            rung_and_reason: rung | 1 << 16,
            ..Certificate::UNKNOWN
        }
    }

    #[test]
    fn heads_are_counted_by_rung_and_the_worst_bound_counts() {
        let certificates =
            [certificate(1.0, 0), certificate(0.5, 1), certificate(2.0, 2), certificate(0.0, 3)];
        let one = Summary::of(&certificates).expect("some");
        assert_eq!((one.heads, one.promoted_heads, one.dense_heads, one.promoted_keys), (4, 2, 1, 8));
        assert_eq!(one.worst_bound, Some(2.25));
        let unbounded = Summary::of(&[certificate(f32::NAN, 0), certificate(0.0, 0)]).expect("one");
        assert_eq!(unbounded.worst_bound, None);
        assert_eq!((one.and(unbounded).worst_bound, one.and(one).heads), (None, 8));
        assert_eq!(Summary::of(&[]), None);
    }
}
