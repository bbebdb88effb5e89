//! How far the scores of a sketch may be off: docs/certificate.md, "A sketch of every key".

use crate::attention::query::{Query, Slack};
use simt::math::{fma, min};
use simt::tensor;

/// Δ of a tile, in nats (8): no score is further from the exact logit. `x` is Σ|q_n|·σ as the tensor core
/// gives it, `eps` and `zeta` are the tile's.
#[inline(always)]
pub fn delta<const D: usize>(query: &Query, x: f32, eps: f32, zeta: f32) -> f32 {
    const BOX: f32 = 0.5 * (1.0 + 1.0 / 4096.0 + 1.0 / 16384.0);
    const CAUCHY: f32 = 1.0 + 1.0 / 32768.0;
    let key = min(x * BOX, query.norm * eps * CAUCHY);
    // Codes are subnormal operands: a product is cut off as if its code were 2^10 units.
    let codes = D as f32 / 16.0 * (1.27 / 2048.0) * tensor::truncation();
    let absolute = 600.0 * D as f32 / 67_108_864.0 * tensor::truncation();
    let rounding = fma(x, codes, fma(Slack::rounding_dense::<D>() * query.norm, zeta, absolute));
    Slack::EVALUATION * fma(query.scale, key + rounding, Slack::EXP)
}
