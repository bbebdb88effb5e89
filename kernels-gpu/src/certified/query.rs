//! What the quantized keys' own arithmetic adds to the bound on their logits.

use super::layout::Annotation;
use super::metadata::KeyMetadata;
pub use crate::attention::query::*;
use simt::math::fma;
use simt::{math, tensor};

/// c_D: rounding of the score arithmetic, relative to ‖q_n‖·ζ.
#[inline(always)]
fn rounding<M: KeyMetadata, const D: usize>() -> f32 {
    (D as f32 / 16.0 + M::ROUNDING) * 1.25 / 2_097_152.0 * tensor::truncation()
}

/// a_D: what subnormals lose.
#[inline(always)]
fn absolute<M: KeyMetadata, const D: usize>() -> f32 {
    M::ABSOLUTE * D as f32 / 67_108_864.0 * tensor::truncation()
}

/// Δ of a block (5): no weight's logarithm is further from the exact logit. `x` is Σ|q_n|·σ as the tensor
/// core gives it, and `M` is what the scales and zeros of the block's keys are.
#[inline(always)]
pub fn delta<M: KeyMetadata, const D: usize>(query: &Query, x: f32, of: Annotation) -> f32 {
    const CAUCHY: f32 = 1.0 + 1.0 / 32768.0;
    let key = math::min(x * of.reach, query.norm * of.eps * CAUCHY);
    let rounding = fma(rounding::<M, D>() * query.norm, of.zeta, absolute::<M, D>());
    Slack::EVALUATION * fma(query.scale, key + rounding, Slack::EXP)
}
