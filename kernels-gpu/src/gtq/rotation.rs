//! The rotation: signs, then a Hadamard matrix, without its factor 1/√D.
//!
//! A butterfly of log2 D stages, with distances 1, 2, 4, … D/2 in this order: (a, b) becomes (a + b, a − b).
//! A warp has D/32 neighbouring dimensions a lane.

use crate::mixed;
use simt::math::fma;
use simt::unroll;
use simt::warp::{FULL_MASK, warp_shuffle_xor};

/// What the signs come from.
const SEED: u64 = 0x6774_7100;

/// The bits of 1.
const ONE: u32 = 0x3f80_0000;

/// Signs of dimensions 32·i to 32·i + 31: a set bit is −1.
pub const SIGNS: [u32; 4] =
    [mixed(SEED, 0) as u32, mixed(SEED, 1) as u32, mixed(SEED, 2) as u32, mixed(SEED, 3) as u32];

/// `x` with the sign of dimension `d`.
#[inline(always)]
pub const fn signed(x: f32, d: usize) -> f32 {
    f32::from_bits(x.to_bits() ^ (SIGNS[d / 32 % 4] >> (d % 32) & 1) << 31)
}

/// Signs of a lane's dimensions, from bit 0 on.
#[simt::device]
fn lane_signs<const D: usize>(lane: u32) -> u32 {
    let each = D as u32 / 32;
    let word = lane * each / 32;
    let pick = if word & 1 == 0 { (SIGNS[0], SIGNS[2]) } else { (SIGNS[1], SIGNS[3]) };
    (if word & 2 == 0 { pick.0 } else { pick.1 }) >> (lane * each % 32)
}

/// A lane's dimensions with their signs.
#[simt::device]
pub fn with_signs<const D: usize>(x: [f32; 4], lane: u32) -> [f32; 4] {
    let signs = lane_signs::<D>(lane);
    let mut signed = x;
    unroll!(for i in 0..4 {
        signed[i] = f32::from_bits(x[i].to_bits() ^ (signs >> i as u32 & 1) << 31);
    });
    signed
}

/// H·x of a warp's row: a lane has dimensions D/32·lane and the next ones, up to four. `STAGES` exchanges
/// between lanes: five of whole rows, three where each quarter of a row is turned by itself.
#[simt::device]
pub fn butterfly<const D: usize, const STAGES: usize>(x: [f32; 4], lane: u32) -> [f32; 4] {
    let mut x = [x[0] + x[1], x[0] - x[1], x[2] + x[3], x[2] - x[3]];
    if D == 128 {
        x = [x[0] + x[2], x[1] + x[3], x[0] - x[2], x[1] - x[3]];
    }
    unroll!(for stage in 0..STAGES, at_most 5 {
        // x + other, or other - x, in one instruction: a product with 1 or -1 is exact.
        let sign = f32::from_bits(ONE | (lane >> stage & 1) << 31);
        unroll!(for i in 0..4 {
            if i < D / 32 {
                let other = warp_shuffle_xor(FULL_MASK, x[i], 1 << stage, 32);
                x[i] = fma(x[i], sign, other);
            }
        });
    });
    x
}

/// H·x of a row.
#[inline(always)]
pub fn butterfly_row<const D: usize>(x: &mut [f32; D]) {
    let mut distance = 1;
    while distance < D {
        for pair in x.chunks_exact_mut(2 * distance) {
            let (low, high) = pair.split_at_mut(distance);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        distance *= 2;
    }
}
