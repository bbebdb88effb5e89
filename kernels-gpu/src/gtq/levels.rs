//! Levels and thresholds, as kernels are given them.
//!
//! A codebook of b bits has 2^b levels in ascending order, symmetric about 0: level(c) = step·(i_c + 1/2)
//! with integers −128 <= i_c <= 127 and i of the opposite level −i_c − 1, which is the complement of its
//! bits. A threshold is the mean of two neighbours; code c is the number of thresholds below h_d / r, so that
//! a tie takes the lower level.

use half::f16;
use simt::{Pod, Zeroable};

/// The most bits of a code.
pub const MOST_BITS: u32 = 4;
/// Levels that a codebook has room for.
pub const MOST_LEVELS: usize = 1 << MOST_BITS;

/// A codebook: what encoding wants of it. `N`: levels that there is room for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Codebook<const N: usize = MOST_LEVELS> {
    /// In ascending order, then infinities.
    pub thresholds: [f32; N],
    /// Levels in ascending order, then zeros.
    pub levels: [f32; N],
}

/// Levels as bytes that `prmt` picks from.
///
/// Up to 3 bits entry c is code c's; of 4 bits entry m is that of the m-th positive level, and a sign bit
/// makes the opposite one of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Tables {
    /// The low bytes of the half-integers of the values' levels, as f16.
    pub values_low: [u32; 2],
    /// Their high bytes.
    pub values_high: [u32; 2],
}

/// Eight bytes as two words.
pub(super) const fn words(bytes: [u8; 8]) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = bytes;
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

/// What a table has of the integers of levels, all 2^b in ascending order.
fn entries(integers: &[i8]) -> [i8; 8] {
    let first = if integers.len() > 8 { 8 } else { 0 };
    core::array::from_fn(|i| integers.get(first + i).copied().unwrap_or(0))
}

/// The table of keys: their levels' integers, a byte each.
pub fn key_table(integers: &[i8]) -> [u32; 2] {
    words(entries(integers).map(|i| i as u8))
}

impl Tables {
    /// Of the integers of the values' levels, all 2^b in ascending order.
    pub fn new(values: &[i8]) -> Self {
        let halves = entries(values).map(|i| f16::from_f32(f32::from(i) + 0.5).to_bits());
        Tables {
            values_low: words(halves.map(|half| half as u8)),
            values_high: words(halves.map(|half| (half >> 8) as u8)),
        }
    }
}
