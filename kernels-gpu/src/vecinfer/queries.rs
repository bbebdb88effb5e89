//! A block's transformed queries as operands of the tensor cores: [`attend`](fn@super::attend) says which.

use super::Code;
use super::transform::{Rounded, share_bytes};
use crate::attention::{Half, integers};
use half::f16;
use simt::math::{abs, maximum};
use simt::warp::{FULL_MASK, warp_shuffle_xor};
use simt::{Shared, unroll};

/// The A operands of the contractions, two steps each: X in rows 0 to 7, Y in rows 8 to 15. Of four query
/// rows rows 4 to 7 are rows 0 to 3 again.
#[simt::device]
pub(super) fn load_queries<const D: usize, const R: usize>(queries: Shared<u16>, lane: u32) -> [[u32; 4]; 8] {
    let (g, j) = (lane >> 2, lane & 3);
    let row = g % R as u32 * (D as u32 / 2);
    let mut q = [[0; 4]; 8];
    unroll!(for i in 0..(D / 32), at_most 8 {
        let pair = [0, 1].map(|half| {
            let channel = 32 * i as u32 + 16 * half + 4 * j;
            queries.load_vector::<[u32; 2]>(2 * (row + channel / 2))
        });
        q[i] = [pair[0][0], pair[1][0], pair[0][1], pair[1][1]];
    });
    q
}

/// What a sum of products of a row's integers and whole keys is multiplied by to be in log2 units; `largest`
/// is the row's, `scale_log2` the [`Shape`](super::Shape)'s.
#[inline(always)]
pub fn whole_scale(largest: f32, scale_log2: f32) -> f32 {
    largest / integers::LARGEST * scale_log2
}

/// Writes a row of f16 as integers: a warp's work. Gives its largest element.
#[simt::device]
pub(super) fn store_integers<const D: usize>(target: Shared<u8>, words: Rounded, row: u32, lane: u32) -> f32 {
    let pairs = words.map(<f16 as Half>::unpack);
    let mut largest = maximum(abs(pairs[0][0]), abs(pairs[0][1]));
    unroll!(for i in 1..(D.div_ceil(64)), at_most 3 {
        largest = maximum(largest, maximum(abs(pairs[i][0]), abs(pairs[i][1])));
    });
    unroll!(for i in 0..5 {
        largest = maximum(largest, warp_shuffle_xor(FULL_MASK, largest, 1 << i, 32));
    });
    let inverse = integers::inverse_of(largest);
    let mut bytes = [[0u32; 2]; 2];
    unroll!(for i in 0..(D / 32), at_most 8 {
        let halves = integers::halves(integers::integer(pairs[i / 2][i % 2], inverse));
        unroll!(for half in 0..2 {
            bytes[half][i / 4] |= (halves[half] as u32 & 0xff) << (8 * (i as u32 % 4));
        });
    });
    unroll!(for half in 0..2 {
        share_bytes::<D>(target, (2 * row + half as u32) * D as u32, bytes[half], lane);
    });
    largest
}

/// The A operands of integer products, 32 channels each; of four query rows rows 4 to 7 are rows 0 to 3
/// again.
#[simt::device]
pub(super) fn load_integers<const D: usize, const K: u32, const R: usize>(
    source: Shared<u8>,
    lane: u32,
) -> [[u32; 4]; 8] {
    let (g, j) = (lane >> 2, lane & 3);
    let row = 2 * D as u32 * (g % R as u32);
    // The lane's unit of eight channels, or two of four.
    let (first, second) = if Code::of(K).unit() == 8 { (8 * j, 4) } else { (4 * j, 16) };
    let mut q = [[0; 4]; 8];
    unroll!(for i in 0..(D / 32), at_most 8 {
        let of = |at: u32| source.load_vector::<u32>(row + 32 * i as u32 + first + at);
        q[i] = [of(0), of(D as u32), of(second), of(D as u32 + second)];
    });
    q
}
