//! The level that is nearest to a coordinate, and how its code is stored.
//!
//! Levels are symmetric about 0, so a code is a side of 0 and the number of positive thresholds that the
//! coordinate's distance from 0 reaches. On a threshold T·r the lower level is taken, which is the nearer to
//! 0 above it and the farther below: h is beyond T·r where h > T·r above 0, where −h >= T·r below. One
//! comparison does for both if the distance of what is above 0 is first lowered to the next float.

use super::levels::{Codebook, MOST_LEVELS};
use simt::{Pod, Zeroable, unroll};

/// The positive half of a [`Codebook`]: with the thresholds' and the levels' opposites and a threshold at 0
/// it is all of it.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Positive {
    /// In ascending order, then infinities.
    pub thresholds: [f32; MOST_LEVELS / 2],
    /// In ascending order, then zeros.
    pub levels: [f32; MOST_LEVELS / 2],
}

impl Positive {
    /// Of a codebook of `bits` bits.
    pub fn of(book: &Codebook, bits: u32) -> Self {
        let half = 1 << bits >> 1;
        Positive {
            thresholds: core::array::from_fn(|i| book.thresholds[half + i]),
            levels: core::array::from_fn(|i| if i < half { book.levels[half + i] } else { 0.0 }),
        }
    }
}

/// Whether a coordinate is above 0, and a distance that is not below a threshold where the coordinate is
/// beyond it.
#[inline(always)]
pub fn distance(h: f32) -> (bool, f32) {
    let above = h > 0.0;
    (above, f32::from_bits((h.to_bits() & 0x7fff_ffff) - above as u32))
}

/// A code as it is [stored](super::layout::stored), by its side and the number of thresholds on the way.
#[inline(always)]
pub const fn stored_as(bits: u32, above: bool, beyond: u32) -> u32 {
    let half = 1 << bits >> 1;
    beyond ^ sides(bits, half)[above as usize]
}

/// What turns the number of thresholds into a code as it is stored, of what is not above 0 and of what is.
#[inline(always)]
const fn sides(bits: u32, half: u32) -> [u32; 2] {
    if bits < 4 { [half - 1, half] } else { [half, 0] }
}

/// The stored codes of a lane's coordinates, one in each nibble: those nearest to h / r.
#[inline(always)]
pub fn nibbles<const D: usize, const B: u32>(h: [f32; 4], r: f32, book: &Positive) -> u32 {
    let of = h.map(distance);
    let mut beyond = [0u32; 4];
    unroll!(for t in 0..((1 << B >> 1) - 1), at_most 7 {
        let threshold = book.thresholds[t % 8] * r;
        unroll!(for i in 0..4 {
            if i < D / 32 {
                beyond[i] += (of[i].1 >= threshold) as u32;
            }
        });
    });
    let mut all = 0;
    unroll!(for i in 0..4 {
        if i < D / 32 {
            all |= stored_as(B, of[i].0, beyond[i]) << (4 * i as u32);
        }
    });
    all
}

/// The levels of stored codes in nibbles, of which there are `count`.
#[inline(always)]
pub fn levels(nibbles: u32, count: usize, bits: u32, book: &Positive) -> [f32; 4] {
    let half = 1 << bits >> 1;
    let mut levels = [0f32; 4];
    unroll!(for i in 0..4 {
        if i < count {
            let code = nibbles >> (4 * i as u32) & 15;
            let above = (code >= half) == (bits < 4);
            let beyond = code ^ if above { sides(bits, half)[1] } else { sides(bits, half)[0] };
            let mut level = book.levels[0];
            unroll!(for k in 1..8 {
                level = if beyond >= k as u32 { book.levels[k] } else { level };
            });
            levels[i] = if above { level } else { -level };
        }
    });
    levels
}
