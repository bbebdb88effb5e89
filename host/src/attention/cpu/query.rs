//! Query rows normalised as `kernels_gpu::attention::query` does it.

use super::lanes::Lanes;
use super::softmax::of_lanes;
use crate::attention::Half;
use kernels_gpu::attention::query::{Query, norm_above, normalization};
use simt::math::fma;

/// Contractions of a row: up to head_dim 128.
pub(crate) const CONTRACTIONS: usize = 8;

/// A row without its elements, and these, normalised.
#[inline(always)]
pub(crate) fn head<E: Half, L: Lanes, const D: usize>(
    row: &[u16],
    softmax_scale: f32,
) -> (Query, [f32; 16 * CONTRACTIONS]) {
    let mut x = [0f32; 16 * CONTRACTIONS];
    let mut largest = 0;
    for (x, bits) in x.as_chunks_mut::<16>().0.iter_mut().zip(row.as_chunks::<16>().0) {
        L::widen::<E>(bits, x);
        for x in x {
            largest = largest.max(x.to_bits() & 0x7fff_ffff);
        }
    }
    let [up, down] = normalization(largest);
    // A lane has every fourth chunk of 16 dimensions.
    let mut squares = [0f32; 4];
    for (chunk, x) in x[..D].as_chunks_mut::<16>().0.iter_mut().enumerate() {
        for x in x.iter_mut() {
            *x *= up;
            squares[chunk % 4] = fma(*x, *x, squares[chunk % 4]);
        }
    }
    let query = Query {
        pairs: [0; 32],
        scale: down * softmax_scale,
        norm: norm_above(of_lanes(squares)),
        finite: largest < 0x7f80_0000,
    };
    (query, x)
}
