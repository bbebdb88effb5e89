//! Float weights as a [`Format`]: what a block adds to a row's sum is in [`format`](super::format).

use super::fixed::undo_digits;
use super::format::{Format, GROUP, planes};
use crate::Element;
use glam::UVec4;
use half::{bf16, f16};
use simt::math::fma;
use simt::warp::{FULL_MASK, warp_shuffle_xor};
use simt::{Global, unroll};

/// Channels c, c + 8, c + 16 and c + 24 of a tile's eight rows, as bits.
#[derive(Clone, Copy)]
pub struct Floats<const VECTORS: usize> {
    words: [[UVec4; VECTORS]; 4],
}

/// X of byte `c` of a part.
#[inline(always)]
fn fixed_at(part: [UVec4; 2], c: u32) -> i32 {
    let digit = |pair: [u32; 2]| {
        let word = if c & 4 == 0 { pair[0] } else { pair[1] };
        (word >> (8 * (c & 3))) as u8 as i8 as i32
    };
    undo_digits(planes(part).map(digit))
}

/// Adds eight rows' chains over the eight lanes: distances 4, 2 and 1; lane c is left with row c.
#[simt::device]
fn add_chains(rows: [f32; 8], c: u32) -> f32 {
    let mut four = [0f32; 4];
    let upper = c & 4 != 0;
    unroll!(for i in 0..4 {
        let (keep, give) = if upper { (rows[4 + i], rows[i]) } else { (rows[i], rows[4 + i]) };
        four[i] = keep + warp_shuffle_xor(FULL_MASK, give, 4, 32);
    });
    let mut two = [0f32; 2];
    let upper = c & 2 != 0;
    unroll!(for i in 0..2 {
        let (keep, give) = if upper { (four[2 + i], four[i]) } else { (four[i], four[2 + i]) };
        two[i] = keep + warp_shuffle_xor(FULL_MASK, give, 2, 32);
    });
    let (keep, give) = if c & 1 != 0 { (two[1], two[0]) } else { (two[0], two[1]) };
    keep + warp_shuffle_xor(FULL_MASK, give, 1, 32)
}

macro_rules! floats {
    ($element:ty, $vectors:literal, $batch:literal, |$words:ident| $widen:expr) => {
        impl Format for $element {
            type Loaded = Floats<$vectors>;
            const BATCH: u32 = $batch;
            const AHEAD: bool = false;
            const TILE_WORDS: u32 = 32 * 4 * $vectors;
            const TILE_SCALES: u32 = 0;
            #[inline(always)]
            fn nothing() -> Self::Loaded {
                Floats { words: [[UVec4::ZERO; $vectors]; 4] }
            }
            #[simt::device]
            fn load(codes: Global<u32>, _: Global<u16>, tile: usize, c: u32) -> Self::Loaded {
                let mut words = [[UVec4::ZERO; $vectors]; 4];
                unroll!(for i in 0..4 {
                    let at = tile * Self::TILE_WORDS as usize + (8 * i + c as usize) * 4 * $vectors;
                    words[i][0] = codes.load_vector_streaming(at);
                    words[i][$vectors - 1] = codes.load_vector_streaming(at + 4 * ($vectors - 1));
                });
                Floats { words }
            }
            #[inline(always)]
            fn row(c: u32) -> u32 {
                c
            }
            #[simt::device]
            fn add(loaded: Self::Loaded, part: impl Fn(u32) -> [UVec4; 2], c: u32, sum: f32) -> f32 {
                let mut rows = [0f32; 8];
                unroll!(for i in 0..4 {
                    let part = part(i as u32);
                    let x = fixed_at(part, c) as f32;
                    let $words = loaded.words[i];
                    let weights: [f32; 8] = $widen;
                    unroll!(for r in 0..8 {
                        rows[r] = fma(weights[r], x, rows[r]);
                    });
                });
                fma(f32::from_bits(part(0)[1].z), add_chains(rows, c), sum)
            }
            #[simt::device]
            fn weight(codes: Global<u32>, _: Global<u16>, tile: usize, r: u32, k: u32) -> f32 {
                let elements = codes.cast::<$element>();
                elements.load_readonly(tile * (32 * GROUP) as usize + (k * GROUP + r) as usize).to_f32()
            }
        }
    };
}
floats!(f16, 1, 2, |words| eight::<f16>(words[0]));
floats!(bf16, 1, 2, |words| eight::<bf16>(words[0]));
floats!(f32, 2, 1, |words| {
    let [low, high] = words.map(|four| four.to_array());
    [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]].map(f32::from_bits)
});

/// Eight 16-bit elements as f32.
#[inline(always)]
fn eight<E: Element>(words: UVec4) -> [f32; 8] {
    let [low, high] = bytemuck::cast::<UVec4, [E::Four; 2]>(words).map(E::widen);
    [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]]
}
