//! What the logits of one step say about the next token.

/// Log-probabilities of all tokens, in f64, natural logarithms.
#[derive(Clone, Debug)]
pub struct Distribution {
    log: Vec<f64>,
    best: usize,
    margin: f64,
}

/// How far one distribution is from another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distance {
    /// The Kullback-Leibler divergence Σ p·ln(p/q) of the other, q, from this one, p, in nats.
    pub kl: f64,
    /// The total variation ½·Σ|p − q|.
    pub tv: f64,
}

impl Distribution {
    /// The softmax of logits; `None` if there are none, or not all are finite.
    pub fn new(logits: &[f32]) -> Option<Distribution> {
        let (mut best, mut second) = (0, f32::NEG_INFINITY);
        for (i, &logit) in logits.iter().enumerate() {
            if !logit.is_finite() {
                return None;
            }
            if i > 0 && logit > logits[best] {
                (best, second) = (i, logits[best]);
            } else if i > 0 && logit > second {
                second = logit;
            }
        }
        let largest = f64::from(*logits.get(best)?);
        let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
        let shift = largest + sum.ln();
        let log = logits.iter().map(|&logit| f64::from(logit) - shift).collect();
        Some(Distribution { log, best, margin: largest - f64::from(second) })
    }

    /// The log-probability of a token; minus infinity of one that there is not.
    pub fn log_probability(&self, token: u32) -> f64 {
        self.log.get(token as usize).copied().unwrap_or(f64::NEG_INFINITY)
    }

    /// The most likely token, of equals the first.
    pub fn best(&self) -> u32 {
        self.best as u32
    }

    /// How much larger its logit is than the next largest; infinite with one token.
    pub fn margin(&self) -> f64 {
        self.margin
    }

    /// The distance of another distribution over the same tokens.
    pub fn distance(&self, other: &Distribution) -> Distance {
        let (mut kl, mut tv) = (0.0, 0.0);
        for (&p, &q) in self.log.iter().zip(&other.log) {
            let (a, b) = (p.exp(), q.exp());
            kl += a * (p - q);
            tv += (a - b).abs();
        }
        // The divergence of a distribution from itself may come out as minus a rounding.
        Distance { kl: kl.max(0.0), tv: 0.5 * tv }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// p = (1/7, 2/7, 4/7) and q = (1/2, 1/4, 1/4), by hand.
    #[test]
    fn distances_are_those_of_the_formulas() {
        let logits = |p: [f64; 3]| p.map(|p| (p.ln() + 3.0) as f32);
        let p = Distribution::new(&logits([1.0, 2.0, 4.0])).expect("finite");
        let q = Distribution::new(&logits([2.0, 1.0, 1.0])).expect("finite");
        let kl = (2f64 / 7.0).ln() / 7.0 + 2.0 / 7.0 * (8f64 / 7.0).ln() + 4.0 / 7.0 * (16f64 / 7.0).ln();
        let distance = p.distance(&q);
        assert!((distance.kl - kl).abs() < 1e-6 && (distance.tv - 5.0 / 14.0).abs() < 1e-6, "{distance:?}");
        assert_eq!(p.distance(&p), Distance { kl: 0.0, tv: 0.0 });
        assert!((p.log_probability(2) - (4f64 / 7.0).ln()).abs() < 1e-6);
        assert_eq!((p.best(), q.best(), p.log_probability(3)), (2, 0, f64::NEG_INFINITY));
        assert!((p.margin() - 2f64.ln()).abs() < 1e-6 && (q.margin() - 2f64.ln()).abs() < 1e-6);
    }

    #[test]
    fn ties_and_extremes() {
        let tie = Distribution::new(&[1.0, 5.0, 5.0, 5.0]).expect("finite");
        assert_eq!((tie.best(), tie.margin()), (1, 0.0));
        let far = Distribution::new(&[-3e38, 3e38]).expect("finite");
        assert_eq!((far.best(), far.log_probability(1)), (1, 0.0));
        assert!(far.margin() > 5e38);
        for bad in [&[][..], &[1.0, f32::NAN], &[f32::INFINITY, 0.0], &[f32::NEG_INFINITY]] {
            assert!(Distribution::new(bad).is_none(), "{bad:?}");
        }
        assert_eq!(Distribution::new(&[7.0]).map(|one| one.margin()), Some(f64::INFINITY));
    }
}
