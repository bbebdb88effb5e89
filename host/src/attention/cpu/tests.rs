//! Sums of several rows at once, and warps shared out, against the model of the tensor cores and against each
//! other.

use super::lanes::{Eights, Floats, Lanes, Order, Row, Tile, multiply_each};
use super::pieces::Pieces;
use super::{Work, run};
use crate::attention::Half;
use crate::attention::dense::sample::random;
use crate::simd_level::Level;
use half::{bf16, f16};
use simt::emu::tensor::{Format, mma_16x8x16};
use std::marker::PhantomData;

/// Rows of one contraction over a tile of keys or of values, each with an accumulator.
struct Sums<'a, E> {
    rows: &'a [[u16; 16]],
    /// [16, 64].
    elements: &'a [u16],
    of_keys: bool,
    chunk: usize,
    c: &'a mut [Floats],
    element: PhantomData<E>,
}

impl<E: Half> Work for Sums<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Sums { rows, elements, of_keys, chunk, c, .. } = self;
        let mut tile = Box::new(Tile::ZERO);
        let mut operands = Vec::new();
        for row in rows {
            operands.push(Row::new::<E, L>(*row));
        }
        if of_keys {
            L::keys::<E, Eights>(elements, 64, &mut tile);
            multiply_each::<E, L>(|r| &operands[r], tile.of_keys(chunk), c);
        } else {
            L::values::<E>(elements, 64, &mut tile);
            multiply_each::<E, L>(|r| &operands[r], tile.of_values(elements, 64, chunk), c);
        }
    }
}

/// What the model gives.
fn model<E: Half>(rows: &[[u16; 16]], element: impl Fn(usize, usize) -> u16, c: &mut [Floats]) {
    let format = if E::IS_F16 { Format::F16 } else { Format::Bf16 };
    for (row, c) in rows.iter().zip(c) {
        let mut a = [[0; 16]; 16];
        a[0] = *row;
        for first in [0, 8] {
            let b = std::array::from_fn(|lane| std::array::from_fn(|step| element(step, first + lane)));
            let mut before = [[0; 8]; 16];
            before[0] = std::array::from_fn(|lane| c[first + lane].to_bits());
            let after = mma_16x8x16(format, &a, &b, &before);
            for lane in 0..8 {
                c[first + lane] = f32::from_bits(after[0][lane]);
            }
        }
    }
}

/// Elements of some kind: any bits, finite ones of near exponents, zeros of both signs, the largest.
fn elements<E: Half>(kind: u64, seed: u64, count: usize) -> Vec<u16> {
    let (one, largest) = if E::IS_F16 { (0x3c00, 0x7bff) } else { (0x3f80, 0x7f7f) };
    let element = |i: usize| {
        let z = random(seed, i as u64);
        match kind {
            0 => z as u16,
            1 => one + (z as u16 & 0x83ff) % 0x8fff,
            2 => z as u16 & 0x8000,
            _ => largest | z as u16 & 0x8000,
        }
    };
    (0..count).map(element).collect()
}

fn every_kind_of_rows<E: Half>() {
    for level in Level::available() {
        for case in 0..400u64 {
            let z = random(3, case);
            let rows = 1 + case as usize % 17;
            let tile = elements::<E>(z % 4, z, 16 * 64);
            let operands: Vec<u16> =
                (0..rows).flat_map(|r| elements::<E>(z >> (8 + 2 * (r % 8)) & 3, z ^ r as u64, 16)).collect();
            let operands = operands.as_chunks::<16>().0;
            let accumulator = |i: usize| match z >> 4 & 3 {
                0 => 0.0,
                // What a row of zeros must not leave as it is.
                1 => -0.0,
                2 => f32::from_bits(random(z, i as u64) as u32),
                _ => random(z, i as u64) as i32 as f32 * 0.001,
            };
            let before: Vec<Floats> =
                (0..rows).map(|r| std::array::from_fn(|lane| accumulator(16 * r + lane))).collect();
            for (of_keys, chunk) in [(true, case as usize % 4), (false, case as usize / 4 % 4)] {
                let (mut got, mut expected) = (before.clone(), before.clone());
                let c = &mut got[..];
                let element = PhantomData::<E>;
                run(*level, Sums { rows: operands, elements: &tile, of_keys, chunk, c, element });
                let element = |step: usize, lane: usize| {
                    if of_keys {
                        tile[64 * lane + Eights::dimension(chunk, step)]
                    } else {
                        tile[64 * step + 16 * chunk + lane]
                    }
                };
                model::<E>(operands, element, &mut expected);
                for (i, (got, expected)) in got.iter().flatten().zip(expected.iter().flatten()).enumerate() {
                    assert_eq!(
                        got.to_bits(),
                        expected.to_bits(),
                        "{got:e}, the model gives {expected:e}: {} {level:?}, case {case}, {rows} rows, keys {of_keys}, {i}",
                        E::NAME
                    );
                }
            }
        }
    }
}

#[test]
fn several_rows_at_once_are_the_models() {
    every_kind_of_rows::<f16>();
    every_kind_of_rows::<bf16>();
}

/// [`Lanes::add_scaled`].
struct Scaled<'a> {
    to: &'a mut [f32],
    x: &'a [f32],
    weight: f32,
}

impl Work for Scaled<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        L::add_scaled(self.to, self.x, self.weight);
    }
}

#[test]
fn scaled_sums_are_rounded_once() {
    // Random bits, NaN, infinities and subnormals among them, and numbers whose sums cancel.
    for level in Level::available() {
        for len in [0, 1, 7, 8, 16, 31, 64, 250] {
            for seed in 0..40 {
                let number = |stream: u64, i: usize| {
                    let bits = random(8 * seed + stream, i as u64) as u32;
                    f32::from_bits(if seed % 2 == 0 { bits } else { 0x3f00_0000 | bits & 0x80ff_ffff })
                };
                let (x, weight) = ((0..len).map(|i| number(0, i)).collect::<Vec<_>>(), number(1, 0));
                let before: Vec<f32> = (0..len).map(|i| number(2, i)).collect();
                let mut got = before.clone();
                run(*level, Scaled { to: &mut got, x: &x, weight });
                for i in 0..len {
                    let expected = x[i].mul_add(weight, before[i]);
                    let same = got[i].to_bits() == expected.to_bits() || got[i].is_nan() && expected.is_nan();
                    assert!(same, "{level:?}, {i} of {len}: {:e}, not {expected:e}", got[i]);
                }
            }
        }
    }
}

#[test]
fn pieces_have_every_warp_once() {
    for (threads, thread_blocks) in [(1, 3), (2, 3), (2, 8), (3, 1), (16, 3), (64, 1)] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        for warps in [4, 8, 12] {
            let pieces = pool.install(|| Pieces::of(thread_blocks, warps));
            let mut places: Vec<usize> = Vec::new();
            for piece in 0..pieces.count {
                for (i, warp) in pieces.warps_of(piece).enumerate() {
                    assert_eq!(pieces.place(warp), piece * pieces.each() + i);
                    places.push(warp);
                }
            }
            places.sort_unstable();
            assert_eq!(places, (0..warps).collect::<Vec<_>>(), "{pieces:?}");
        }
    }
}
