//! The certificate of a row that one pass has finished: docs/certificate.md, with the weights of the output
//! itself and nothing subtracted (Λ = 1).

use super::super::judge::{Exact, at_least_exp, growth, papers_bound, tail_variation, total_variation};
use super::super::policy::{Certificate, Thresholds, reason, rung};
use super::super::query::{Query, delta_original};
use super::super::sums::LOST;
use super::gather::Gathered;
use super::likely::{Chances, Likely};
use crate::attention::{BLOCK_TOKENS, Chain, Half, PartialRow};
use simt::Zeroable;
use simt::math::{canonical_nan, fma, max, min, sqrt};

/// What the certificate of one row follows from.
pub struct Judge {
    /// Reference and sum of what is returned.
    pub row: PartialRow,
    /// Over all of its blocks, relative to that reference.
    pub gathered: Gathered,
    /// ‖O‖² of what is returned.
    pub squares: f32,
    /// Blocks whose keys come from the originals, whose values do, and whether K_max was raised for them.
    pub promoted: [u32; 3],
    /// Tokens.
    pub length: u32,
    /// Of the step's sums.
    pub chain: Chain,
    /// Of the dense rung's.
    pub dense: Chain,
    /// What a product of query and key is multiplied by.
    pub softmax_scale: f32,
}

impl Judge {
    /// The certificate, and the rung with it.
    // A bound that is not a number fails every test: hence `!(x <= y)`.
    #[allow(clippy::neg_cmp_op_on_partial_ord)]
    #[inline(always)]
    pub fn certificate<E: Half, const D: usize>(&self, query: &Query, thresholds: Thresholds) -> Certificate {
        let Judge { row, gathered, promoted, .. } = *self;
        if self.length == 0 {
            return Certificate::zeroed();
        }
        if thresholds.certify == 0 {
            return Certificate::UNKNOWN;
        }
        let Gathered { kappa, delta: delta_t, .. } = gathered;
        // At least the largest norm of a value as it is used.
        let nu = gathered.nu + gathered.largest_eta;
        // What f32 has lost of a block's mass may weigh by e^Δ: no block more than the worst would.
        let lost = (self.length / BLOCK_TOKENS) as f32 * LOST;
        let grown_t = growth(at_least_exp(delta_t));
        let tail = gathered.tail + lost;
        let a1 = fma(lost, grown_t, gathered.a1);
        let a2 = fma(lost * grown_t, nu, gathered.a2);
        let a3 = gathered.a3 + lost;
        // 1000 roundings, and those of the sums and of the sum that they are divided by: once for all of
        // them.
        let up = 1.0 + (1.0 / 16384.0 + 2.0 * self.chain.roundings());
        let inverse = up / row.sum;
        let share = |x: f32| x * inverse;
        let delta_f = delta_original::<D>(query, kappa);
        let grown_f = growth(at_least_exp(delta_f));
        let e_val = share(gathered.eta);
        let mut e_round = fma(nu, self.chain.bracket::<E>(), Chain::underflow());
        let output = sqrt(self.squares);
        let norm = output * (1.0 + 1.0 / 16384.0) + e_round + e_val;
        // Roots of means of squares; not a number where a square is none, and then the largest serves.
        let mean = |squares: f32, largest: f32| min(sqrt(share(squares)) * (1.0 + 1.0 / 16384.0), largest);
        let value = mean(gathered.nu_squares, nu);
        let least = max(output * (1.0 - 1.0 / 16384.0) - e_round - e_val, 0.0);
        let spread = min(sqrt(max(value - least, 0.0) * (value + least)) * (1.0 + 1.0 / 16384.0), value);
        let rounding = delta_original::<D>(query, mean(gathered.kappa_squares, kappa));
        let by_original = rounding * (grown_f / delta_f) * spread;
        let by_quantized = fma(share(a1), norm, share(a2));
        let a3 = share(a3) + grown_f;
        let ratio = if a3 < 1.0 {
            (by_quantized + by_original) / (1.0 - a3) * (1.0 + 1.0 / 262_144.0)
        } else {
            f32::INFINITY
        };
        let delta = max(delta_t, delta_f);
        let tail_mass = share(tail);
        let of_tail = tail_variation(tail_mass, delta_t);
        let variation = min(total_variation(nu, delta), fma(2.0 * nu, of_tail, total_variation(nu, delta_f)));
        let mut e_key = min(ratio, variation);
        if thresholds.paper_bound != 0 {
            e_key = papers_bound(nu, tail_mass, delta_t);
            // Of rounding in blocks that are used from their originals the paper has nothing.
            e_round += total_variation(nu, delta_f);
        }

        let mut why = 0;
        if !query.finite {
            why |= reason::QUERY_NOT_FINITE;
        }
        let bound = e_key + e_val + e_round;
        let (mut likely, mut log_sum) = (bound, delta);
        if thresholds.log_odds > 0.0 {
            let of_chance = Likely {
                log_odds: thresholds.log_odds,
                length: self.length,
                inverse,
                output: output * (1.0 + 1.0 / 16384.0),
                e_round,
                value,
            };
            let Chances { error, log_sum: of_sum } = of_chance.bounds::<D>(query, &gathered);
            (likely, log_sum) = (min(error, bound), min(of_sum, delta));
        }
        if thresholds.error_budget < f32::INFINITY && !(likely <= thresholds.error_budget * output) {
            why |= reason::ERROR_BUDGET;
        }
        // The least of some bounds is a number even where others, and the output, are not.
        let numbers = row.sum > 0.0 && row.sum < f32::INFINITY && self.squares < f32::INFINITY;
        if !numbers || !(bound < f32::INFINITY) {
            why |= reason::NO_BOUND;
        }
        let [promoted_keys, promoted_values, expanded] = promoted;
        let of_step = Certificate {
            e_key,
            e_val,
            e_round,
            likely,
            norm: canonical_nan(output),
            tail_mass,
            delta,
            promoted_keys,
            promoted_values,
            rung_and_reason: if expanded != 0 {
                rung::EXPANDED
            } else if promoted_keys + promoted_values > 0 {
                rung::PROMOTED
            } else {
                rung::QUANTIZED
            },
            log_sum: log_sum + self.chain.bracket::<E>(),
            unused: 0,
        };
        if why == 0 {
            return of_step;
        }
        // Then `dense` is what the row gets.
        Exact::new::<E, D>(query, self.softmax_scale, nu, kappa, &self.dense)
            .certificate(of_step, rung::DENSE | why << 16)
    }
}
