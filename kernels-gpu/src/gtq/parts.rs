//! Keys in four parts: channels in an order that depends on layer and KV head, D/4 a part, with fewer bits
//! the less a part matters.
//!
//! # Mathematics
//! With P the order (channel P_d is dimension d), d_p = D/4, H the Hadamard matrix of order d_p and S the
//! signs, a part of a key or a query is h_p = H·S·(P·x)_p, and as for whole rows
//!
//! ```text
//! r_p = |x_p|    code_d = nearest level of part p to h_d / n_p·√d_p    x^_p = n_p·S·H·L_p / √d_p
//! q·k^ = Σ_p n_p / √d_p · (h_p of q)·L_p
//! ```
//!
//! n_p is a byte: four bits of exponent and four of mantissa, times [`UNIT`]. Codes are nearest to the row
//! over the n that is stored, so that levels make good much of what a byte's rounding, up to 3 %, costs.
//!
//! # Bits
//! | on average | of parts | levels that a lane of a warp picks from |
//! |---|---|---|
//! | 2 | 4, 2, 1, 1 | 8 and a sign, 4, 2, 2 |
//! | 3 | 6, 3, 2, 1 | 32 and a sign, 8, 4, 2 |
//! | 4 | 6, 4, 3, 3 | 32 and a sign, 8 and a sign, 8, 8 |
//!
//! The bits of a lane's four dimensions of all parts fill as many words' nibbles as there are bits on
//! average: [`fields`]. Masked, a word is then selectors of `prmt`, as of whole rows.

use super::levels::{key_table, words};
use super::operands::{EIGHTHS, LOW, ONE, THIRD, key_bytes};
use crate::attention::Half;
use half::f16;
use simt::bits::byte_perm;
use simt::warp::{FULL_MASK, warp_shuffle_xor};
use simt::{Global, Pod, Zeroable, convert, unroll};

/// Parts of a key.
pub const PARTS: usize = 4;
/// Levels that a part's codebook has room for.
pub const MOST_LEVELS: usize = 64;
/// What the n of a byte is counted in: the largest n is 1.9375 times it, a 2^−18th of it the smallest.
pub const UNIT: f32 = 512.0;

/// Bits of the parts' codes, the first part's most.
#[inline(always)]
pub const fn bits(average: u32) -> [u32; PARTS] {
    match average {
        2 => [4, 2, 1, 1],
        3 => [6, 3, 2, 1],
        _ => [6, 4, 3, 3],
    }
}

/// Where the bits of the parts' stored codes are, from bit 0 on in four bits each: four times the word, plus
/// the place in a nibble.
#[inline(always)]
pub const fn fields(average: u32) -> [u32; PARTS] {
    match average {
        2 => [0x3210, 0x54, 0x6, 0x7],
        3 => [0x54_3210, 0xa76, 0x98, 0xb],
        _ => [0x98_3210, 0x7654, 0xeba, 0xfdc],
    }
}

/// What `bits` bits of a stored code are in the nibbles numbered `nibble` of up to four words of 16 bits, one
/// above the other.
#[inline(always)]
pub const fn in_nibbles(code: u32, bits: u32, fields: u32, nibble: u32) -> u64 {
    let (mut all, mut bit) = (0, 0);
    while bit < 6 {
        let field = fields >> (4 * bit) & 15;
        let one = if bit < bits { (code >> bit & 1) as u64 } else { 0 };
        all |= one << (16 * (field >> 2) + 4 * nibble + (field & 3));
        bit += 1;
    }
    all
}

/// The byte of an n that is not negative, to nearest even; more than 255 of one that has none.
#[inline(always)]
pub fn norm_byte(n: f32) -> u32 {
    // 2^−112 / UNIT: exponents of f32 become those of a byte, which are f16's without the highest bit. A NaN
    // may have a sign, and the sum room for none.
    let bits = (n * f32::from_bits(6 << 23)).to_bits() & 0x7fff_ffff;
    (bits + 0x3_ffff + (bits >> 19 & 1)) >> 19
}

/// The n of a byte, in [`UNIT`]s.
#[inline(always)]
pub fn norm(byte: u32) -> f32 {
    convert::f32_from_f16(f16::from_bits((byte << 6) as u16))
}

/// What codes are nearest to: the row over this has coordinates of mean square 1.
#[inline(always)]
pub fn nearest_scale(r: f32, root: f32) -> f32 {
    let byte = norm_byte(r / root);
    norm(if byte < 255 { byte } else { 255 }) * UNIT * root
}

/// Levels as bytes that `prmt` picks from, part by part, as [`Codebook`](super::Codebook)'s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PartTables {
    /// Of the first part: positive levels, 8 or 32.
    pub first: [u32; 8],
    /// Of the others.
    pub others: [[u32; 2]; 3],
}

impl PartTables {
    /// Of the integers of each part's levels, each all 2^b in ascending order.
    pub fn new(integers: [&[i8]; PARTS]) -> Self {
        let [of_first, others @ ..] = integers;
        let positive = &of_first[of_first.len() / 2..];
        let byte = |i: usize| positive.get(i).copied().unwrap_or(0) as u8;
        let mut first = [0; 8];
        for (i, pair) in first.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            *pair = words(core::array::from_fn(|j| byte(8 * i + j)));
        }
        PartTables { first, others: others.map(key_table) }
    }
}

/// The one of four that is part `part`'s.
#[inline(always)]
pub fn of_part(all: [u32; PARTS], part: u32) -> u32 {
    let [a, b, c, d] = all;
    let pick = if part & 1 == 0 { (a, c) } else { (b, d) };
    if part & 2 == 0 { pick.0 } else { pick.1 }
}

/// Which channels a lane's D/32 dimensions are, a byte each: `order` [kv_heads, D], loaded ahead of the wait
/// for the launch before.
#[simt::device]
pub fn channels_ahead<const D: usize>(order: Global<u8>, head: u32, lane: u32) -> u32 {
    let at = head as usize * D + lane as usize * (D / 32);
    if D == 128 { order.load_vector_ahead::<u32>(at) } else { order.load_vector_ahead::<u16>(at).into() }
}

/// A lane's dimensions of row `row` of `rows` [rows, D].
#[simt::device]
pub fn gathered<const D: usize>(channels: u32, rows: Global<f16>, row: usize) -> [f32; 4] {
    let mut x = [0f32; 4];
    unroll!(for i in 0..4 {
        if i < D / 32 {
            let channel = channels >> (8 * i) & 0xff;
            x[i] = convert::f32_from_f16(rows.load_readonly(row * D + channel as usize));
        }
    });
    x
}

/// Sum over the eight lanes of a part: lanes 4 apart first, then 2 and 1.
#[simt::device]
pub fn part_sum(value: f32) -> f32 {
    let mut sum = value;
    sum += warp_shuffle_xor(FULL_MASK, sum, 4, 32);
    sum += warp_shuffle_xor(FULL_MASK, sum, 2, 32);
    sum += warp_shuffle_xor(FULL_MASK, sum, 1, 32);
    sum
}

/// The n of a token's parts, of its four bytes.
#[inline(always)]
pub fn norms(bytes: u32) -> [f32; PARTS] {
    // The bits of an f16 from bit 6 on: bytes 0 and 2, then 1 and 3.
    let [a, c] = <f16 as Half>::unpack(bytes << 6 & 0x3fc0_3fc0);
    let [b, d] = <f16 as Half>::unpack(bytes >> 2 & 0x3fc0_3fc0);
    [a, b, c, d]
}

/// The two words of levels' bytes of each part that a lane's words of nibbles are.
#[inline(always)]
pub fn part_bytes<const K: u32>(words: [u32; 4], tables: &PartTables) -> [[u32; 2]; PARTS] {
    let [first, second, third, fourth] = words;
    let [a, b, c] = tables.others;
    let small = |selector: u32, table: [u32; 2]| key_bytes::<2>(selector, table);
    match K {
        2 => [
            key_bytes::<4>(first, [tables.first[0], tables.first[1]]),
            small(second & LOW, a),
            small(second >> 2 & ONE, b),
            small(second >> 3 & ONE, c),
        ],
        3 => [
            six_bits(first, second, &tables.first),
            small(second >> 2 & LOW | third & THIRD, a),
            small(third & LOW, b),
            small(third >> 3 & ONE, c),
        ],
        _ => [
            six_bits(first, third, &tables.first),
            key_bytes::<4>(second, a),
            small(third >> 2 & LOW | fourth & THIRD, b),
            small(fourth & LOW | fourth >> 1 & THIRD, c),
        ],
    }
}

/// Of codes of 6 bits: the distance's low four bits are in `low`'s nibbles, its highest and the sign are the
/// low two bits of `high`'s.
#[inline(always)]
fn six_bits(low: u32, high: u32, table: &[u32; 8]) -> [u32; 2] {
    // Where a nibble's bit 3 is set `prmt` spreads the sign of what it would pick, and levels are positive:
    // of two picks one is 0.
    let other = low ^ EIGHTHS;
    let of = |near: u32, far: u32, spread: u32| {
        // 0xff where the nibble's bit 3 is set.
        let mask = |bits: u32| byte_perm(bits, bits << 4, spread);
        let pick = |i: usize, selectors: u32| byte_perm(table[2 * i], table[2 * i + 1], selectors);
        let [first, second] = [pick(0, near) | pick(1, far), pick(2, near) | pick(3, far)];
        let upper = mask(high << 3);
        (first & !upper | second & upper) ^ mask(high << 2)
    };
    [of(low, other, 0x9d8c), of(low >> 16, other >> 16, 0xbfae)]
}
