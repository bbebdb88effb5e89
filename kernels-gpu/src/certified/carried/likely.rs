//! The bound that may fail with a stated probability: docs/certificate.md, "A bound that may fail". Errors of
//! codes that were rounded by chance add up like noise.

use super::super::judge::{at_least_exp, growth};
use super::super::layout::Annotation;
use super::super::query::{LOG2_E_ABOVE, Query, Slack};
use super::gather::Gathered;
use simt::math::{exp2, fma, min, sqrt};
use simt::tensor;

/// What is known of the logits of a block whose keys were rounded by chance.
#[derive(Clone, Copy)]
pub struct Noise {
    /// v_b: their variance is at most this, and they are sub-Gaussian by it.
    pub variance: f32,
    /// e^(2Δ'), Δ' what none of them is off by, rounding included: the lesser of Δ and `deviations` times
    /// √v_b.
    pub growth: f32,
}

impl Noise {
    /// Of a block: `squares` is Σ(q_n·σ)² as the tensor core gives it, `delta` its Δ (5).
    ///
    /// v = Σ q²σ²/4D. Products q_n·σ in f16 are within 2^−11 of it, or 2^−25 where they are subnormal, and
    /// so is q_n; the chain of sums loses less than 2^−12.
    #[inline(always)]
    pub fn of_keys<const D: usize>(
        query: &Query,
        squares: f32,
        delta: f32,
        deviations: f32,
        of: Annotation,
    ) -> Self {
        // 2^−26 ‖z, 128σ‖ squared is 2^−52; D·2^−38 twice over.
        const SUBNORMAL: f32 = 1.0 / 67_108_864.0;
        let small = fma(of.zeta * SUBNORMAL, of.zeta * SUBNORMAL, D as f32 / 137_438_953_472.0);
        let scale = 0.5 * query.scale;
        // Keys that were rounded to the nearest have no variance.
        let known = if of.reach >= 1.0 { 1.0 + 1.0 / 512.0 } else { f32::INFINITY };
        let variance = scale * scale * (squares + small) * known;
        let likely = fma(deviations, sqrt(variance), rounding::<D>(query, of.eps + of.zeta));
        let x = min(delta, likely) * (2.0 * LOG2_E_ABOVE);
        Noise { variance, growth: exp2(if x > 120.0 { 128.0 } else { x }) }
    }
}

/// What logits are off by besides the chances of codes: the rounding of (5) of compact tiles, and how far the
/// mean of a code is from the number, 2^−14 σ.
#[inline(always)]
fn rounding<const D: usize>(query: &Query, kappa: f32) -> f32 {
    let relative = (D as f32 / 16.0 + 2.0) * 1.25 / 2_097_152.0 * tensor::truncation();
    let absolute = 257.0 * D as f32 / 67_108_864.0 * tensor::truncation();
    let sum = fma(relative * query.norm, kappa, absolute);
    Slack::EVALUATION * fma(query.scale, sum, Slack::EXP)
}

/// What the bound follows from, besides what is gathered.
pub struct Likely {
    /// ln(4/δ).
    pub log_odds: f32,
    /// Tokens.
    pub length: u32,
    /// 1/Σp, times what makes the sums of weights upper bounds.
    pub inverse: f32,
    /// ‖O‖ of what is returned, rounded up.
    pub output: f32,
    /// Bounds the rounding of the sums.
    pub e_round: f32,
    /// √Σ ρ ν².
    pub value: f32,
}

/// What holds but for a stated probability.
pub struct Chances {
    /// Bounds the whole error.
    pub error: f32,
    /// What the log-sum-exp is off by, at most, but for the rounding of its sum.
    pub log_sum: f32,
}

impl Likely {
    /// The bounds.
    #[inline(always)]
    pub fn bounds<const D: usize>(&self, query: &Query, gathered: &Gathered) -> Chances {
        let Likely { log_odds: u, inverse, .. } = *self;
        let share = |x: f32| x * inverse;
        let root = |squares: f32| sqrt(squares) * inverse;
        let once = sqrt(u);

        // Values: a vector of independent errors, whose covariance has this trace at most and no larger
        // eigenvalue than that.
        let (trace, largest) = (gathered.spread, min(gathered.step, gathered.spread));
        // A root of each: their product is beyond f32 where values are some ten thousands.
        let mixed = sqrt(trace) * sqrt(largest);
        let of_values = fma(2.0, mixed * once, fma(2.0 * u, largest, trace));
        // The mean of a code is within 2^−16 h of the value.
        let bias = sqrt(self.length as f32) * (1.0 / 65536.0);
        let e_val = root(of_values) + root(trace) * bias;

        // Keys, to first order: of any covariance of that trace. Then what is of second order, whose mean
        // is the first part, and the rest how far it is from it.
        let first = sqrt(fma(2.0, u + once, 1.0));
        let second = u + once;
        let grown = growth(at_least_exp(rounding::<D>(query, gathered.kappa)));
        let free = fma(first, root(gathered.noise_values), 0.5 * share(gathered.twice_values))
            + fma(second, root(gathered.fourth_values), grown * self.value);
        let by_norm = fma(first, root(gathered.noise), 0.5 * share(gathered.twice))
            + fma(second, root(gathered.fourth), grown);
        let known = self.e_round + e_val;
        let e_key = fma(by_norm, self.output + known, free) / (1.0 - by_norm);
        // Exact weights add up to at least 1 − Y of those used, and −ln(1 − Y) is at most Y/(1 − Y).
        let log_sum = by_norm / (1.0 - by_norm);
        if by_norm < 1.0 {
            let above = 1.0 + 1.0 / 65536.0;
            Chances { error: (known + e_key) * above, log_sum: log_sum * above }
        } else {
            Chances { error: f32::INFINITY, log_sum: f32::INFINITY }
        }
    }
}
