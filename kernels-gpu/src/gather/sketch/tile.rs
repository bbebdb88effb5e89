//! A sketch of 16 keys: where its parts lie, and its arithmetic.
//!
//! # Mathematics
//! For each channel c of a tile, over the 16 tokens that it has (or has so far), lo and hi the least and the
//! largest key:
//!
//! ```text
//! z = ⌊lo⌋₁₆      σ = ⌈(hi − z)/N⌉₁₆      code = clamp(rint((k − z)·RN(1/σ)), 0, N)      K^ = code·σ + z
//! ```
//!
//! N = 2^bits − 1, ⌊·⌋₁₆ and ⌈·⌉₁₆ the next f16 below and above. |k − K^| <= σ·(1/2 + 2^−13): with u = 2^−24,
//! (k − z)/σ is between 0 and N·(1 + 2u), the quotient has three roundings, and where the clamp acts it is
//! past the end code by less than that; N <= 255 and 255·6.01·u < 2^−13.
//!
//! # Layout
//! A tile in words of 32 bits, of head_dim D:
//!
//! | from word | what |
//! |---|---|
//! | 0 | codes, in the order in which the lanes of a warp want them ([`place`]) |
//! | D·bits/2 | σ, f16 \[D\] |
//! | D·bits/2 + D/2 | z, f16 \[D\] |
//! | D·bits/2 + D | [`Annotation`] |
//!
//! # Bytes
//! 16·(D·bits/8 + D/4 + 1): at D = 128 97 bytes a token with 4 bits, 161 with 8.

use crate::attention::BLOCK_TOKENS;
use crate::attention::outward::{bound_or_infinity, f16_at_or_above, f16_at_or_below};
use half::f16;
use simt::{Pod, Zeroable, bits, convert, math};

/// What is known of a tile: each an upper bound, infinite where there is none. Where 64σ is beyond f16 scores
/// are no numbers, whatever this says (docs/certificate.md, "A sketch of every key").
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Annotation {
    /// max over the tokens of ‖k − K^‖₂.
    pub eps: f32,
    /// ‖z‖₂ + N·‖σ‖₂: no ‖K^‖₂ is larger.
    pub zeta: f32,
    /// max over the tokens of ‖v‖₂.
    pub nu: f32,
    /// 0.
    pub reserved: f32,
}

/// Words of a tile's codes.
#[inline(always)]
pub const fn code_words(head_dim: u32, bits: u32) -> u32 {
    head_dim * bits / 2
}

/// Words of a tile.
#[inline(always)]
pub const fn sketch_words(head_dim: u32, bits: u32) -> u32 {
    code_words(head_dim, bits) + head_dim + 4
}

/// The largest code.
#[inline(always)]
pub const fn largest_code(bits: u32) -> f32 {
    ((1 << bits) - 1) as f32
}

/// The word of a tile that holds the code of a token's channel, and the code's first bit there.
///
/// Lane 4g + q of a warp has tokens g and g + 8 and channels 16q to 16q + 15 of each 64. Of four neighbouring
/// channels the first two are 16 bits apart, so that a mask makes both an operand.
#[inline(always)]
pub const fn place(bits: u32, token: u32, channel: u32) -> (u32, u32) {
    let (g, half) = (token % 8, token / 8);
    let (s, q, i, e) = (channel / 64, channel % 64 / 16, channel % 16 / 4, channel % 4);
    let lane = 4 * g + q;
    let pair = bits * (e / 2) + 16 * (e % 2);
    if bits == 4 {
        (128 * s + 4 * lane + i, 8 * half + pair)
    } else {
        (256 * s + 128 * half + 4 * lane + i, pair)
    }
}

/// Word `word` of a tile's codes from four bytes each of the two tokens that have a share in it; `codes`
/// gives the codes of four channels from the first of them on.
#[inline(always)]
pub fn code_word(bits: u32, word: u32, codes: impl Fn(u32, u32) -> u32) -> u32 {
    if bits == 4 {
        let (s, lane, i) = (word / 128, word % 128 / 4, word % 4);
        let channel = 64 * s + 16 * (lane % 4) + 4 * i;
        let nibbles = |four: u32| {
            four & 0xf | (four >> 8 & 0xf) << 16 | (four >> 16 & 0xf) << 4 | (four >> 24 & 0xf) << 20
        };
        nibbles(codes(lane / 4, channel)) | nibbles(codes(lane / 4 + 8, channel)) << 8
    } else {
        let (s, half, lane, i) = (word / 256, word % 256 / 128, word % 128 / 4, word % 4);
        let channel = 64 * s + 16 * (lane % 4) + 4 * i;
        // The second and the third change places.
        bits::byte_perm(codes(lane / 4 + 8 * half, channel), 0, 0x3120)
    }
}

/// σ and z of a channel whose keys lie between `low` and `high`. Either is infinite or NaN if f16 cannot
/// cover them.
#[inline(always)]
pub fn channel(low: f32, high: f32, largest: f32) -> (f16, f16) {
    let zero = f16_at_or_below(low);
    let z = convert::f32_from_f16(zero);
    (f16_at_or_above((high - z) / largest), zero)
}

/// The code of key `k`, as a number. NaN gets 0.
#[inline(always)]
pub fn code(k: f32, zero: f32, reciprocal: f32, largest: f32) -> f32 {
    /// 1.5·2^23: adding it rounds to the nearest integer, ties to even.
    const ROUNDER: f32 = 12_582_912.0;
    let quotient = math::min(math::max((k - zero) * reciprocal, 0.0), largest);
    (quotient + ROUNDER) - ROUNDER
}

/// k − K^. The difference is rounded, |k − z| <= N·1.01·σ, and so is what is left: together less than 2^−15·σ
/// more than the error, which [`Annotation::of`] adds.
#[inline(always)]
pub fn error(k: f32, code: f32, scale: f32, zero: f32) -> f32 {
    math::fma(-code, scale, k - zero)
}

impl Annotation {
    /// From the bounds of the norms of the tokens' errors, of σ, of z, and of the tokens' values.
    #[inline(always)]
    pub fn of(errors: f32, scale: f32, zero: f32, values: f32, largest: f32) -> Self {
        Annotation {
            eps: bound_or_infinity(math::fma(scale, 1.0 / 32768.0, errors)),
            zeta: bound_or_infinity(math::fma(scale, largest, zero) * (1.0 + 1.0 / 1_048_576.0)),
            nu: bound_or_infinity(values),
            reserved: 0.0,
        }
    }
}

const _: () = assert!(BLOCK_TOKENS == 16, "a lane has a token of each half");
