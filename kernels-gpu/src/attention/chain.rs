//! What bounds the rounding of the sums of attention: docs/certificate.md, equation (7).

use super::{BLOCK_TOKENS, Half, warps};
use simt::{bits, tensor};

/// What bounds the rounding of the sums.
pub struct Chain {
    /// Matrix multiplications in a row on one accumulator: n of (7).
    pub(crate) steps: u32,
    /// Additions that an addend of the numerator and one of the denominator pass: d + d_l.
    pub(crate) additions: u32,
    /// Tokens, those taken out and in again included.
    pub(crate) tokens: u32,
}

impl Chain {
    /// As words, for [`of_words`](Self::of_words).
    #[inline(always)]
    pub(crate) const fn words(self) -> [u32; 2] {
        [self.steps, self.additions]
    }

    /// That of these words.
    #[inline(always)]
    pub(crate) const fn of_words([steps, additions]: [u32; 2], tokens: u32) -> Self {
        Chain { steps, additions, tokens }
    }

    /// That of `dense`: it cuts a sequence into as many parts.
    #[inline(always)]
    pub fn of_dense<const D: usize>(length: u32, splits: u32) -> Self {
        let tiles = bits::div_u32(length.div_ceil(BLOCK_TOKENS) + splits - 1, splits);
        Chain::new(tiles.div_ceil(warps(D as u32)) + 1, splits + warps(D as u32), length)
    }

    /// A lane adds up its tokens' weights one tile after another, then four lanes theirs; a row of the
    /// numerator its two halves; of a corrected token the difference of two weights is taken first. All is
    /// merged.
    #[inline(always)]
    pub(crate) fn new(steps: u32, merges: u32, tokens: u32) -> Self {
        Chain { steps, additions: steps + 2 * merges + 8, tokens }
    }

    /// What an addend may lose or gain by its additions, relative.
    #[inline(always)]
    pub(crate) fn roundings(&self) -> f32 {
        self.additions as f32 * (1.0 / 16_777_216.0)
    }

    /// What subnormal values and weights lose, √D·2^−34 and 2^−30 at the most: the last term of (7).
    #[inline(always)]
    pub(crate) fn underflow() -> f32 {
        tensor::truncation() / 1_073_741_824.0
    }

    /// The bracket of (7).
    #[inline(always)]
    pub(crate) fn bracket<E: Half>(&self) -> f32 {
        let probabilities = if E::IS_F16 { 1.0 / 8_388_608.0 } else { 1.0 / 131_072.0 };
        self.steps as f32 * (1.26 / 2_097_152.0 * tensor::truncation())
            + (self.additions + 4) as f32 * (1.0 / 16_777_216.0)
            + probabilities
            + self.tokens as f32 * (1.0 / 68_719_476_736.0)
    }
}
