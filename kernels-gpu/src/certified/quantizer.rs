//! The arithmetic of a block: the one source that host and device quantize and restore with.
//!
//! # Keys
//! Asymmetric, for each channel of a block (equations (2) and (3)): K^ = code·σ + z with code in −128..=127,
//! σ and z f16. The paper keeps both in f32; rounded to f16 they take half the room, but z then lies up to
//! half an ULP beside the place where the ends of the channel get the end codes, and where a channel's offset
//! is large against its range that is many σ. So z is rounded first, and σ is what covers the channel
//! **around that z**:
//!
//! ```text
//! σ₀ = ⌈(hi − lo)/255⌉₁₆        z = RN₁₆(lo + 128·σ₀)
//! σ  = ⌈max(σ₀, (z − lo)/128.5, (hi − z)/127.5)⌉₁₆
//! code = clamp(rint((k − z)·RN(1/σ)), −128, 127)
//! ```
//!
//! ⌈·⌉₁₆ is the next f16 at or above. A constant channel of f16 gets σ = 0 and is exact. A channel whose
//! range is few f16 steps pays up to twice σ₀ (one step: 1/128.5 of it), still far below the step.
//!
//! In the paper's layout both are f32, and so are their roundings: σ₀ = RN₃₂((hi − lo)/255), z = RN₃₂(lo +
//! 128·σ₀), and σ the maximum of the same three, not below [`LEAST_WIDE_SCALE`] unless it is 0. What it costs
//! to take the rounding of z into account is at most a 30th of σ, where a channel's range is one step of f16
//! at its offset. A constant channel is exact whatever its type. A channel with |z| + 64·σ₀ beyond f16 is
//! refused as well, for the products with queries, below 64 when normalised, are f16; no key within f16 makes
//! such a channel.
//!
//! **The bound.** For finite k in [lo, hi], |k − K^| <= [`KEY_BOUND`]·σ, half a step and 2^−13 of one for
//! rounding. With u = 2^−24 and t = (k − z)/σ:
//! - σ is at least max((z − lo)/128.5, (hi − z)/127.5)·(1 − u)² (a subtraction and a division, rounded), so t
//!   is in [−128.5, 127.5]·(1 + 3u).
//! - The computed quotient has three roundings (difference, reciprocal, product): it is within 128.51·3.01·u
//!   of t. (1/σ is between 2^−16 and 2^64; what underflows has code 0 either way.)
//! - rint moves it by at most 1/2. Where the clamp acts, t is past the end code by at most 1/2 + 128.5·3·u,
//!   or short of it by no more than the quotient's error.
//!
//! Together |t − code| <= 1/2 + 128.51·6.01·u < 1/2 + 2^−14.
//!
//! **By chance.** With U uniform over the 2^16 numbers (i + 1/2)·2^−16 and x the quotient (k − z)·RN(1/σ),
//! code = clamp(rint(x + U − 1/2), −128, 127): x + U, rounded down. σ covers the channel with 128 and 127 in
//! place of 128.5 and 127.5, so that no code is cut off. Then |t − code| <= 1 + 2^−14, code is one of two
//! neighbours, and its mean over U is within 2^−14 of t: 128.01·3.01·u by the quotient, 2^−18 by the sum,
//! 2^−17 by U's steps and as much again where a tie goes to the even side, 127·3·u where the clamp acts.
//!
//! # Values
//! Asymmetric, for each token and group of 16 channels: zero = ⌊lo⌋₁₆, scale = ⌈(hi − zero)/15⌉₁₆, code =
//! clamp(rint((v − zero)·RN(1/scale)), 0, 15). V^ = RN₁₆(code·scale + zero), one half-precision fused
//! multiply-add, is what the kernels restore, so η is measured against that. Where code 15 would be restored
//! as an infinity (a group that reaches f16's last value), the scale is one f16 lower: the largest then errs
//! by 15 ULP of the scale, under 2^−6 of it.
//!
//! **By chance.** Of the nearest code and its neighbour towards v, whose V^ have v between them, each is
//! taken with the probability that makes v the mean of V^, the rounding of V^ to f16 included: it is off
//! by U's steps alone, 2^−17 of their distance, and by the rounding of the quotient. Where v is V^ there
//! is nothing to choose; where it is not between the two ([`value_chance`]) no mean is known, and the
//! spread is infinite.
//!
//! # Norms that bound
//! [`norm_bound`] of sums of squares (`crate::attention::outward`), each sum of D terms by at most 20 nested
//! roundings for D <= 256: fused multiply-adds over 8 channels, a tree over 4 such, one after another the
//! rest.
//!
//! A key's error e = (k − z) − code·σ is computed with two roundings: the last (of the fused multiply-add) is
//! relative to e, the first to |k − z| <= 128.6·σ, that is at most 128.6·u·σ < 2^−16·σ a channel:
//! [`key_error_bound`] adds 2^−16·‖σ‖₂. A value's error v − V^ is one subtraction.

pub use crate::attention::outward::*;
use half::f16;
use simt::half2::fma_f16x2;
use simt::{convert, math, unroll};

/// |k − K^| is at most this many σ.
pub const KEY_BOUND: f64 = 0.5 + 1.0 / 8192.0;

/// The same where rounding is by chance.
pub const KEY_BOUND_BY_CHANCE: f64 = 1.0 + 1.0 / 8192.0;

/// How many σ a key may be below code −128's number and above code 127's: [`key_channel`] covers the channel
/// with 128 and 127 σ and this.
#[inline(always)]
pub const fn overhang(by_chance: bool) -> f32 {
    if by_chance { 0.0 } else { 0.5 }
}

/// [`Annotation::reach`](super::layout::Annotation::reach): [`KEY_BOUND`], what X' of (5) is too small by,
/// and the rounding of their product.
#[inline(always)]
pub const fn reach(by_chance: bool) -> f32 {
    const SLACK: f32 = 1.0 + 1.0 / 512.0 + 1.0 / 16384.0;
    if by_chance { SLACK } else { 0.5 * SLACK }
}

/// [`Annotation::unit`](super::layout::Annotation::unit) over ν.
pub const SIZE_UNIT: f32 = (1.0 + 1.0 / 262_144.0) / 255.0;

/// The size of a token whose value's norm is at most `norm`, in a block where none is above `nu`: the least
/// whole number, from 1 to 255, of which [`SIZE_UNIT`] · ν makes no less than `norm`.
///
/// The quotient is off by 2^−22 of it, which [`SIZE_UNIT`] has room for; so it has where it is a little above
/// 255. What is no number is 255.
#[inline(always)]
pub fn value_size(norm: f32, nu: f32) -> f32 {
    let size = -math::floor(-(norm * (255.0 * reciprocal(nu))));
    // An infinite norm over an infinite one is no number.
    if !(norm <= nu && size <= 255.0) {
        return 255.0;
    }
    if size >= 1.0 { size } else { 1.0 }
}

/// At least `x` over the size of a token, `unit` what sizes are told in.
#[inline(always)]
pub fn over_size(x: f32, size: f32, unit: f32) -> f32 {
    x * (reciprocal(size * unit) * (1.0 + 1.0 / 1_048_576.0))
}

/// Random bits for a key (the low half) and a value (the high half), by what they are of.
#[inline(always)]
pub fn chance(key: u32, token: u32, channel: u32) -> u32 {
    mixed(key ^ (token << 16 | channel))
}

/// What the chances of a block and KV head have in common.
#[inline(always)]
pub fn chance_key(seed: u32, index: u32, head: u32) -> u32 {
    mixed(mixed(mixed(seed) ^ index) ^ head)
}

/// A permutation of 32 bits in which each bit of the argument changes about half of the result's (Appleby's
/// finalizer, twice).
#[inline(always)]
pub fn mixed(mut x: u32) -> u32 {
    unroll!(for _i in 0..2 {
        x = (x ^ x >> 16).wrapping_mul(0x85eb_ca6b);
        x = (x ^ x >> 13).wrapping_mul(0xc2b2_ae35);
        x = (x ^ x >> 16).wrapping_add(0x9e37_79b9);
    });
    x
}

/// U of 16 random bits: the middle of one of 2^16 parts of [0, 1).
#[inline(always)]
pub fn uniform(bits: u32) -> f32 {
    math::fma((bits & 0xffff) as f32, 1.0 / 65536.0, 0.5 / 65536.0)
}

/// What is added to a key's code in its byte.
pub const KEY_CODE_BIAS: i32 = 128;

/// 1.5·2^23: adding it to a float of at most 2^22 rounds to the nearest integer, ties to even, and leaves
/// that integer in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// σ and z of a channel whose keys lie between `low` and `high`. Either is infinite or NaN if f16 cannot
/// cover them. `over` is their [`overhang`].
#[inline(always)]
pub fn key_channel(low: f32, high: f32, over: f32) -> (f16, f16) {
    let step = convert::f32_from_f16(f16_at_or_above((high - low) / 255.0));
    let zero = convert::f16_from_f32(math::fma(128.0, step, low));
    let z = convert::f32_from_f16(zero);
    let needed = math::max((z - low) / (128.0 + over), (high - z) / (127.0 + over));
    (f16_at_or_above(math::max(step, needed)), zero)
}

/// The least σ of the paper's layout that is not 0: its reciprocal is finite, and what it multiplies is far
/// below f16's last bit.
pub const LEAST_WIDE_SCALE: f32 = f32::from_bits((127 - 64) << 23);

/// [`key_channel`] in f32; both infinite for keys that are not finite, and where products with queries would
/// be beyond f16.
#[inline(always)]
pub fn wide_key_channel(low: f32, high: f32, over: f32) -> (f32, f32) {
    let step = (high - low) / 255.0;
    let zero = math::fma(128.0, step, low);
    let needed = math::max((zero - low) / (128.0 + over), (high - zero) / (127.0 + over));
    let scale = math::max(step, needed);
    let scale = if scale > 0.0 { math::max(scale, LEAST_WIDE_SCALE) } else { 0.0 };
    // NaN is not within.
    let within = math::fma(64.0, step, math::abs(zero)) <= 65504.0;
    if within { (scale, zero) } else { (f32::INFINITY, f32::INFINITY) }
}

/// The code of key `k` as a float, and a word whose low byte is the code plus 128. NaN gets the lowest code.
/// `offset`: U − 1/2, or 0 for the nearest code.
#[inline(always)]
pub fn key_code(k: f32, zero: f32, reciprocal: f32, offset: f32) -> (f32, u32) {
    const BIASED: f32 = ROUNDER + KEY_CODE_BIAS as f32;
    let quotient = math::min(math::max(math::fma(k - zero, reciprocal, offset), -128.0), 127.0);
    let sum = quotient + BIASED;
    (sum - BIASED, sum.to_bits())
}

/// k − K^, with the rounding that [`key_error_bound`] pays for.
#[inline(always)]
pub fn key_error(k: f32, code: f32, scale: f32, zero: f32) -> f32 {
    math::fma(-code, scale, k - zero)
}

/// Scale and zero of a group of values between `low` and `high`. Either is infinite if f16 cannot cover them.
#[inline(always)]
pub fn value_group(low: f32, high: f32) -> (f16, f16) {
    let zero = f16_at_or_below(low);
    let z = convert::f32_from_f16(zero);
    let scale = f16_at_or_above((high - z) / 15.0);
    // Halfway between the largest f16 and what would be the next: from there on rounding gives an infinity.
    let top = math::fma(15.0, convert::f32_from_f16(scale), z);
    let infinite = scale.to_bits() >= 0x7c00;
    let lower = top >= 65520.0 && !infinite;
    (f16::from_bits(scale.to_bits() - lower as u16), zero)
}

/// The code of value `v`, 0 to 15, as a float. NaN gets 0.
#[inline(always)]
pub fn value_code(v: f32, zero: f32, reciprocal: f32) -> f32 {
    let quotient = math::min(math::max((v - zero) * reciprocal, 0.0), 15.0);
    (quotient + ROUNDER) - ROUNDER
}

/// The neighbour of a value's nearest code on the other side of the value, or the code itself where there is
/// none, or the value is `restored`, what the code stands for.
#[inline(always)]
pub fn value_neighbour(v: f32, code: f32, restored: f32) -> f32 {
    let step = if v > restored {
        1.0
    } else if v < restored {
        -1.0
    } else {
        0.0
    };
    math::min(math::max(code + step, 0.0), 15.0)
}

/// The probability with which the neighbour is taken, and h, half the distance of what the two stand for.
/// Infinite where the value does not lie between them.
#[inline(always)]
pub fn value_chance(v: f32, restored: f32, neighbour: f32) -> (f32, f32) {
    let (away, apart) = (math::abs(v - restored), math::abs(neighbour - restored));
    if away == 0.0 {
        (0.0, 0.0)
    } else if away <= apart {
        (away / apart, 0.5 * apart)
    } else {
        (0.0, f32::INFINITY)
    }
}

/// Four codes, as [`value_code`] gives them, in the low 16 bits of a word: the first in the lowest nibble.
#[inline(always)]
pub fn pack_value_codes(codes: [f32; 4]) -> u32 {
    // Up to 65535, exact in the low bits.
    let low = math::fma(16.0, codes[1], codes[0]);
    let high = math::fma(16.0, codes[3], codes[2]);
    (math::fma(256.0, high, low) + ROUNDER).to_bits()
}

/// V^ of two codes of a group: two f16, the first in bits 0 to 15. `scale` and `zero` hold theirs twice.
#[inline(always)]
pub fn restore_values(codes: [f32; 2], scale: u32, zero: u32) -> u32 {
    fma_f16x2(convert::f16x2_from_f32(codes[0], codes[1]), scale, zero)
}

/// An f16 in both halves of a word.
#[inline(always)]
pub fn twice(x: f16) -> u32 {
    x.to_bits() as u32 * 0x0001_0001
}

/// ε from the largest [`norm_bound`] of the tokens' errors and that of σ.
#[inline(always)]
pub fn key_error_bound(error: f32, scale: f32) -> f32 {
    bound_or_infinity(math::fma(scale, 1.0 / 65536.0, error))
}

/// ζ from the [`norm_bound`]s of z and of σ.
#[inline(always)]
pub fn key_size_bound(zero: f32, scale: f32) -> f32 {
    bound_or_infinity(math::fma(scale, 128.0, zero))
}
