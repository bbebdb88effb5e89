//! The certificate of one row: docs/certificate.md, evaluated where the row is finished.

use super::carried::carried_warps;
use super::pass::{MAX_REFERENCE, pass_share};
use super::policy::{Certificate, Thresholds, reason, rung};
use super::query::{LOG2_E_ABOVE, Query, Slack, delta_dense, delta_original};
use super::sums::{RowSums, Taken};
use crate::attention::{BLOCK_TOKENS, Chain, Half, PartialRow, warps};
use simt::math::{canonical_nan, exp2, fma, max, min, sqrt};
use simt::{Pod, Zeroable, bits};

/// The chains of certified steps.
impl Chain {
    /// That of a step; `work` is how many entries all blocks have replaced, and one warp at most.
    #[inline(always)]
    pub fn of_step<const D: usize>(length: u32, splits: u32, blocks: u32, work: [u32; 2]) -> Self {
        let [entries, rounds] = work;
        let pass = bits::div_u32(length / BLOCK_TOKENS + splits - 1, splits).div_ceil(warps(D as u32));
        // An entry's shares by original and by quantized values.
        let corrections = 2 * rounds;
        let merges = splits + blocks + 1 + 2 * warps(D as u32);
        Chain::new(pass + corrections + 1, merges, length + 32 * entries)
    }

    /// That of a step in one pass: `promoted` entries of a list, and the trailing block.
    #[inline(always)]
    pub fn of_carried<const D: usize>(length: u32, splits: u32, promoted: u32) -> Self {
        let blocks = length / BLOCK_TOKENS;
        let (a_split, used) = pass_share(blocks, splits);
        let pass = a_split.div_ceil(carried_warps(D as u32));
        let rounds = bits::div_u32(promoted, used * carried_warps(D as u32)) + 1;
        Chain::new(pass + rounds, splits + carried_warps(D as u32), length)
    }
}

/// What the certificate of one row follows from: docs/certificate.md.
pub struct Judge {
    /// Reference and sum of what is returned.
    pub row: PartialRow,
    /// The same of the pass, to which the masses of `sums` are relative.
    pub pass: PartialRow,
    /// Over all blocks.
    pub sums: RowSums,
    /// What of them was promoted.
    pub taken: Taken,
    /// ‖O‖² of what is returned.
    pub squares: f32,
    /// Bounds of the norms of the trailing block's keys and values.
    pub norms: [f32; 2],
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
        let Judge { row, pass, taken, .. } = *self;
        let mut sums = self.sums.without(taken);
        // The sum of all masses is the pass's own, and has its roundings.
        sums.tail = fma(pass.sum, self.chain.roundings(), sums.tail);
        if self.chain.tokens == 0 {
            return Certificate::zeroed();
        }
        if thresholds.certify == 0 {
            return Certificate::UNKNOWN;
        }
        let kappa = max(sums.kappa, self.norms[0]);
        let nu = max(sums.nu, self.norms[1]);
        // From masses relative to the pass's reference to shares of the final sum.
        let scale = exp2(pass.reference - row.reference) / row.sum;
        // A row may have been given blocks for another row's sake.
        let corrected = if thresholds.per_group != 0 { pass.sum } else { taken.corrected };
        let lambda = fma(corrected * (2.0 + 1.0 / 512.0), scale, 1.0);
        // 1000 roundings of the shares, and those of the sum that they are divided by.
        let relative = 1.0 / 16384.0 + self.chain.roundings();
        let up = fma(lambda, relative, 1.0);
        let share = |x: f32| x * scale * up;
        // Blocks used from their originals have a Δ too: rounding alone, whatever their mass.
        let delta_f = delta_original::<D>(query, kappa);
        let grown_f = growth(at_least_exp(delta_f));
        let e_val = fma(share(sums.eta), grown_f, share(sums.eta));
        // What is subtracted may differ from what was added by two roundings of the exponential, in N and in
        // P.
        let e_round = (lambda * nu) * self.chain.bracket::<E>()
            + (lambda - 1.0) * nu * (2.0 * Slack::EXP)
            + lambda * Chain::underflow();
        let output = sqrt(self.squares);
        let norm = output * (1.0 + 1.0 / 16384.0) + e_round + e_val;
        // The trailing block has at most what quantized ones leave, (7a).
        let moved = share(if thresholds.per_group != 0 { self.sums.a3 } else { taken.a3 });
        let left = (1.0 - pass.sum * scale) + moved + lambda * fma(up - 1.0, 2.0, grown_f);
        let trailing = min(max(left, 0.0), 1.0);
        // Roots of means of squares.
        // What is promoted for another row's sake is in them by its quantized keys.
        let others = if thresholds.per_group != 0 { at_least_exp(sums.delta) } else { 1.0 };
        let mean = |squares: f32, of_trailing: f32, largest: f32| {
            let squares = share(squares) * others;
            let all = fma(squares, grown_f, squares) + trailing * of_trailing * of_trailing;
            min(sqrt(all) * (1.0 + 1.0 / 16384.0), largest)
        };
        let value = mean(sums.nu_squares, self.norms[1], nu);
        let least = max(output * (1.0 - 1.0 / 16384.0) - e_round - e_val, 0.0);
        let spread = min(sqrt(max(value - least, 0.0) * (value + least)) * (1.0 + 1.0 / 16384.0), value);
        let rounding = delta_original::<D>(query, mean(sums.kappa_squares, self.norms[0], kappa));
        let by_original = rounding * (grown_f / delta_f) * spread;
        let by_quantized = fma(share(sums.a1), norm, share(sums.a2));
        let a3 = share(sums.a3) + grown_f;
        let ratio = if a3 < 1.0 {
            (by_quantized + by_original) / (1.0 - a3) * (1.0 + 1.0 / 262_144.0)
        } else {
            f32::INFINITY
        };
        let delta = max(sums.delta, delta_f);
        let of_tail = tail_variation(share(sums.tail), sums.delta);
        let variation = min(total_variation(nu, delta), fma(2.0 * nu, of_tail, total_variation(nu, delta_f)));
        let mut e_key = min(ratio, variation);
        let mut e_round = e_round;
        let mut tail_mass = share(sums.tail);
        if thresholds.paper_bound != 0 {
            tail_mass = if pass.sum > 0.0 { sums.tail / pass.sum * (1.0 + relative) } else { 0.0 };
            e_key = papers_bound(nu, tail_mass, sums.delta);
            // Of rounding in blocks that are used from their originals the paper has nothing.
            e_round += total_variation(nu, delta_f);
        }

        let mut why = 0;
        if !query.finite {
            why |= reason::QUERY_NOT_FINITE;
        }
        if pass.sum > 0.0 && !(simt::math::abs(pass.reference) < MAX_REFERENCE) {
            why |= reason::SCORE_RANGE;
        }
        let bound = e_key + e_val + e_round;
        if thresholds.error_budget < f32::INFINITY && !(bound <= thresholds.error_budget * output) {
            why |= reason::ERROR_BUDGET;
        }
        // The least of some bounds is a number even where others, and the output, are not.
        let numbers = row.sum > 0.0 && row.sum < f32::INFINITY && self.squares < f32::INFINITY;
        if !numbers || !(bound < f32::INFINITY) {
            why |= reason::NO_BOUND;
        }
        let of_step = Certificate {
            e_key,
            e_val,
            e_round,
            likely: bound,
            norm: canonical_nan(output),
            tail_mass,
            delta,
            promoted_keys: taken.keys,
            promoted_values: taken.values,
            rung_and_reason: if sums.expanded != 0 {
                rung::EXPANDED
            } else if taken.keys + taken.values > 0 {
                rung::PROMOTED
            } else {
                rung::QUANTIZED
            },
            log_sum: f32::INFINITY,
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

/// What is known of an output of `dense`: its rounding.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Exact {
    e_key: f32,
    e_round: f32,
    delta: f32,
    unused: u32,
}

impl Exact {
    /// That of a row over keys and values of these norms at most.
    #[inline(always)]
    pub fn new<E: Half, const D: usize>(
        query: &Query,
        softmax_scale: f32,
        nu: f32,
        kappa: f32,
        dense: &Chain,
    ) -> Self {
        let delta = delta_dense::<D>(query, softmax_scale, kappa);
        // Where it is as large as this, scores may have overflown.
        let finite = query.finite && delta < 1.0e30;
        let e_key = if finite { total_variation(nu, delta) } else { f32::INFINITY };
        Exact {
            e_key: canonical_nan(e_key),
            e_round: canonical_nan(fma(nu, dense.bracket::<E>(), Chain::underflow())),
            delta: canonical_nan(delta),
            unused: 0,
        }
    }

    /// As the certificate of a head whose step was `of_step`.
    #[inline(always)]
    pub fn certificate(self, of_step: Certificate, rung_and_reason: u32) -> Certificate {
        let Exact { e_key, e_round, delta, .. } = self;
        let likely = e_key + e_round;
        let log_sum = f32::INFINITY;
        let of_step = Certificate { e_val: 0.0, tail_mass: 0.0, log_sum, ..of_step };
        Certificate { e_key, e_round, likely, delta, rung_and_reason, ..of_step }
    }
}

/// The paper's (15) without its second part: 2 V_max e^(2Δ) α^ (e^(2Δ) − 1), a tail of nothing being worth
/// nothing.
#[inline(always)]
pub(super) fn papers_bound(nu: f32, tail: f32, delta: f32) -> f32 {
    let grown = at_least_exp(2.0 * delta);
    let up = growth(grown);
    let bound = 2.0 * nu * (grown * tail) * up * (1.0 + 1.0 / 1_048_576.0);
    if tail == 0.0 { 0.0 } else { bound }
}

/// At least e^x; past e^80 no bound is left.
#[inline(always)]
pub(super) fn at_least_exp(x: f32) -> f32 {
    exp2(if x > 80.0 { 128.0 } else { x * LOG2_E_ABOVE })
}

/// At least e^x − 1, from [`at_least_exp`]: with the rounding of the exponential on the safe side.
#[inline(always)]
pub(super) fn growth(grown: f32) -> f32 {
    fma(grown, 1.0 / 2_097_152.0, grown - 1.0)
}

/// TV_max of (1c) for a tail of this mass at most. Both of its forms grow with e^Δ − 1, which is rounded up.
#[inline(always)]
pub(super) fn tail_variation(tail: f32, delta: f32) -> f32 {
    if delta > 80.0 {
        return 1.0;
    }
    let alpha = min(tail, 1.0);
    let grown = at_least_exp(delta);
    let up = growth(grown);
    let down = up / grown;
    // e^Δ − c, without cancellation.
    let root = fma(alpha, down, up) / (sqrt(grown) + sqrt(max(1.0 - alpha * down, 0.0)));
    let variation = if alpha * fma(alpha, up, 3.0) <= 1.0 {
        alpha * (1.0 - alpha) * up / fma(alpha, up, 1.0)
    } else {
        root * root / (up + down)
    };
    variation * (1.0 + 1.0 / 262_144.0)
}

/// (1b), with tanh(x/2) <= min(x/2, 1).
#[inline(always)]
pub(super) fn total_variation(nu: f32, delta: f32) -> f32 {
    2.0 * nu * min(0.5 * delta, 1.0)
}
