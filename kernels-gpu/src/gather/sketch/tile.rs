//! A sketch of 32 keys: where its parts lie, and its arithmetic.
//!
//! # Mathematics
//! For each channel c of a tile, over the 32 tokens that it has (or has so far), lo and hi the least and the
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
//! | D·bits | σ, f16 \[D\] |
//! | D·bits + D/2 | z, f16 \[D\] |
//! | D·bits + D | [`Annotation`] |
//!
//! # Bytes
//! 4·D·bits + 4·D + 16: at D = 128 80.5 bytes a token with 4 bits, 144.5 with 8.

use crate::attention::BLOCK_TOKENS;
use crate::attention::outward::{bound_or_infinity, f16_at_or_above, f16_at_or_below};
use half::f16;
use simt::{Pod, Zeroable, convert, math};

/// What is known of a tile: each an upper bound, infinite where there is none. Where 64σ is beyond f16 scores
/// are no numbers, whatever this says (docs/certificate.md, "A sketch of every key").
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Annotation {
    /// max over the tokens of ‖k − K^‖₂.
    pub eps: f32,
    /// ‖z‖₂ + N·‖σ‖₂: no ‖K^‖₂ is larger.
    pub zeta: f32,
    /// max over the tokens of each half of ‖v‖₂.
    pub nu: [f32; 2],
}

/// Tokens of a tile, which share σ and z.
pub const TILE_TOKENS: u32 = 32;

/// Tiles of a sequence of so many tokens.
#[inline(always)]
pub const fn tiles_of(tokens: u32) -> u32 {
    tokens.div_ceil(TILE_TOKENS)
}

/// Words of a tile's codes.
#[inline(always)]
pub const fn code_words(head_dim: u32, bits: u32) -> u32 {
    head_dim * bits
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

/// Tokens that have a code in half a word.
#[inline(always)]
const fn in_half(bits: u32) -> u32 {
    16 / bits
}

/// The word of a tile that holds the code of a token's channel, and the code's first bit there.
///
/// Lane 4g + q of a warp has tokens g, g + 8, g + 16 and g + 24 and channels 16q to 16q + 15 of each 64. A
/// word has two neighbouring channels, 16 bits apart, so that a mask makes both an operand, of four of these
/// tokens with 4 bits and of two with 8.
#[inline(always)]
pub const fn place(bits: u32, token: u32, channel: u32) -> (u32, u32) {
    let (g, j) = (token % 8, token / 8);
    let (s, q, p, e) = (channel / 64, channel % 64 / 16, channel % 16 / 2, channel % 2);
    let many = in_half(bits);
    let section = s * (4 / many) + j / many;
    (256 * section + 128 * (p / 4) + 4 * (4 * g + q) + p % 4, bits * (j % many) + 16 * e)
}

/// Word `word` of a tile's codes; `codes` gives those of a token's two channels from an even one on, the
/// second 16 bits above the first.
#[inline(always)]
pub fn code_word(bits: u32, word: u32, codes: impl Fn(u32, u32) -> u32) -> u32 {
    let many = in_half(bits);
    let (section, half, lane, p) = (word / 256, word % 256 / 128, word % 128 / 4, word % 4);
    let (s, first) = (section / (4 / many), section % (4 / many) * many);
    let channel = 64 * s + 16 * (lane % 4) + 8 * half + 2 * p;
    let token = 8 * first + lane / 4;
    let pair = |j: u32| codes(token + 8 * j, channel) << (bits * j);
    if bits == 4 { pair(0) | pair(1) | pair(2) | pair(3) } else { pair(0) | pair(1) }
}

/// What a code of a token is as an operand, in units of a subnormal f16's last bit: the code, or 16 times as
/// much where a mask leaves it in its place.
#[inline(always)]
pub const fn raised_by(bits: u32, token: u32) -> u32 {
    if bits == 4 { 1 << (4 * (token / 8 % 2)) } else { 1 }
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
    /// From the bounds of the norms of the tokens' errors, of σ, of z, and of the values of each half.
    #[inline(always)]
    pub fn of(errors: f32, scale: f32, zero: f32, values: [f32; 2], largest: f32) -> Self {
        Annotation {
            eps: bound_or_infinity(math::fma(scale, 1.0 / 32768.0, errors)),
            zeta: bound_or_infinity(math::fma(scale, largest, zero) * (1.0 + 1.0 / 1_048_576.0)),
            nu: values.map(bound_or_infinity),
        }
    }
}

const _: () = assert!(TILE_TOKENS == 2 * BLOCK_TOKENS, "a tile's halves are blocks of the pool");
