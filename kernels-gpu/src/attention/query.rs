//! The query rows of a warp, normalised: the form in which quantized keys want them, and what bounds the
//! rounding of their products.

use super::Half;
use glam::UVec4;
use half::f16;
use simt::math::fma;
use simt::warp::{FULL_MASK, warp_shuffle_xor};
use simt::{Global, convert, half2, math, tensor, unroll};

/// log2(e).
pub const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// Above log2(e), by more than what the exponent x·log2(e) and the exponential lose in f32 for x up to 80.
pub const LOG2_E_ABOVE: f32 = 1.442_696;

/// Row `g` of a warp, a lane's quarter of it: chunks `4s + q` of 16 dimensions, normalised.
///
/// `q_n = f16(q · 2^−e)` with the largest |q_n| between 32 and 64: exact but for elements 2^−20 times smaller
/// than it.
#[derive(Clone, Copy)]
pub struct Query {
    /// Dimensions 16·(4s + q) + 2i and + 1 in `pairs[8·s + i]`.
    pub pairs: [u32; 32],
    /// 2^e / √D: what a product with `q_n` is multiplied by to be a logit.
    pub scale: f32,
    /// At least ‖q_n‖₂, and at least ‖q‖₂·2^−e.
    pub norm: f32,
    /// Whether all elements are finite.
    pub finite: bool,
}

impl Query {
    /// Loads row `row` of `queries` [rows, D]; zeros if it is not `present`. The four lanes of a row do it
    /// together.
    #[simt::device]
    pub fn load<E: Half, const D: usize>(
        queries: Global<E>,
        row: usize,
        present: bool,
        softmax_scale: f32,
        lane: u32,
    ) -> Self {
        let mut pairs = [0u32; 32];
        let mut largest = 0u32;
        unroll!(for s in 0..(D / 64), at_most 4 {
            unroll!(for h in 0..2 {
                let at = row * D + 16 * (4 * s + (lane & 3) as usize) + 8 * h;
                let chunk = if present { queries.load_vector_readonly::<UVec4>(at) } else { UVec4::ZERO };
                let words = chunk.to_array();
                unroll!(for i in 0..4 {
                    pairs[8 * s + 4 * h + i] = words[i];
                    unroll!(for k in 0..2 {
                        // Magnitudes of floats order like their bits, NaN above all.
                        let bits = E::unpack(words[i])[k].to_bits() & 0x7fff_ffff;
                        largest = if bits > largest { bits } else { largest };
                    });
                });
            });
        });
        largest = larger(largest, warp_shuffle_xor(FULL_MASK, largest, 1, 32));
        largest = larger(largest, warp_shuffle_xor(FULL_MASK, largest, 2, 32));
        let finite = largest < 0x7f80_0000;
        let [up, down] = normalization(largest);
        let mut squares = 0f32;
        unroll!(for i in 0..(D / 8), at_most 32 {
            let [a, b] = E::unpack(pairs[i]);
            let (a, b) = (a * up, b * up);
            squares = fma(a, a, squares);
            squares = fma(b, b, squares);
            pairs[i] = convert::f16x2_from_f32(a, b);
        });
        squares += warp_shuffle_xor(FULL_MASK, squares, 1, 32);
        squares += warp_shuffle_xor(FULL_MASK, squares, 2, 32);
        Query { pairs, scale: down * softmax_scale, norm: norm_above(squares), finite }
    }

    /// Pair `pair` as an operand of the element type: the normalised query is exact in bf16 too if it was
    /// bf16.
    #[inline(always)]
    pub fn operand<E: Half>(&self, pair: usize) -> u32 {
        if E::IS_F16 {
            self.pairs[pair]
        } else {
            let [a, b] = <f16 as Half>::unpack(self.pairs[pair]);
            E::pack(a, b)
        }
    }

    /// q_n·σ as a rounded pair and what rounding lost: exactly the product, but for the subnormal.
    #[inline(always)]
    pub fn times(&self, pair: usize, scales: u32) -> (u32, u32) {
        let x = half2::mul_f16x2(self.pairs[pair], scales);
        (x, half2::fms_f16x2(self.pairs[pair], scales, x))
    }
}

/// 2^−e and 2^e of a row whose largest element has these bits, the sign cleared.
#[inline(always)]
pub fn normalization(largest: u32) -> [f32; 2] {
    // 2^(5 − exponent) and 2^(exponent − 5). A largest element below 2^−100 counts as 2^−100: every logit is
    // 0 then.
    let exponent = (largest >> 23) as i32;
    let exponent = if exponent < 27 { 27 } else { exponent };
    let up = f32::from_bits(((127 + 5 - (exponent - 127)).clamp(1, 254) as u32) << 23);
    let down = f32::from_bits(((127 - 5 + (exponent - 127)).clamp(1, 254) as u32) << 23);
    [up, down]
}

/// [`Query::norm`] from the sum of squares.
#[inline(always)]
pub fn norm_above(squares: f32) -> f32 {
    math::sqrt(squares) * (1.0 + 1.0 / 65536.0)
}

#[inline(always)]
fn larger(a: u32, b: u32) -> u32 {
    if a > b { a } else { b }
}

/// Constants of the bounds on logits for head_dim D: docs/certificate.md, equations (5) and (6).
pub struct Slack;

impl Slack {
    /// c_D of `dense`: rounding of the score arithmetic, relative to ‖q‖·κ.
    #[inline(always)]
    pub fn rounding_dense<const D: usize>() -> f32 {
        (D as f32 / 16.0 + 1.0) * 1.25 / 2_097_152.0 * tensor::truncation()
    }

    /// c_F: the same of original keys, whose products are not put together from two chains.
    #[inline(always)]
    pub fn rounding_original<const D: usize>() -> f32 {
        (D as f32 / 16.0 + 0.5) * 1.25 / 2_097_152.0 * tensor::truncation()
    }

    /// δ_exp: the exponential, in nats.
    pub const EXP: f32 = 3.0 / 1_048_576.0;
    /// 1 + 2^−18: evaluating the bound in f32.
    pub const EVALUATION: f32 = 1.0 + 1.0 / 262_144.0;
}

/// Δ of `dense` attention, whose queries are not normalised: there a subnormal operand counts as
/// 2^−14, at most 2^−10 for a row of 256 of them.
#[inline(always)]
pub fn delta_dense<const D: usize>(query: &Query, softmax_scale: f32, kappa: f32) -> f32 {
    const SUBNORMAL: f32 = 1.0 / 1024.0;
    let norm = fma(query.scale, query.norm, softmax_scale * SUBNORMAL);
    Slack::EVALUATION * fma(Slack::rounding_dense::<D>() * norm, kappa + SUBNORMAL, Slack::EXP)
}

/// δ_F (6): the same where the original keys are used, `kappa` at least their norms.
#[inline(always)]
pub fn delta_original<const D: usize>(query: &Query, kappa: f32) -> f32 {
    let subnormal = D as f32 / 1_073_741_824.0 * tensor::truncation();
    let rounding = fma(Slack::rounding_original::<D>() * query.norm, kappa, subnormal);
    Slack::EVALUATION * fma(query.scale, rounding, Slack::EXP)
}
