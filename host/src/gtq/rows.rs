//! Rows of a tile, one by one: what codes they have and what these stand for.

use super::{Books, TileLayout};
use half::f16;
use kernels_gpu::gtq::Side;
use kernels_gpu::gtq::layout::{high_bit, low_bit, low_bits, norm_place, stored};

/// Where a token's codes are in a tile: bytes and first bits.
#[derive(Clone, Copy)]
struct Place {
    low: usize,
    high: usize,
}

fn place(layout: TileLayout, side: Side, token: u32, unit: u32) -> Place {
    let (bits, dims) = (layout.bits(side), side.unit_dims(layout.head_dim));
    let at = side.unit_place(layout.wide(side), token, unit);
    Place {
        low: (layout.low(side) + at * dims * low_bits(bits) / 8) as usize,
        high: (layout.high(side) + at * dims / 8) as usize,
    }
}

/// Writes a row's codes, `[head_dim]`, and its n to a tile.
pub fn write(tile: &mut [u8], layout: TileLayout, side: Side, token: u32, codes: &[u8], n: f16) {
    let (bits, dims) = (layout.bits(side), side.unit_dims(layout.head_dim));
    for (codes, unit) in codes.chunks_exact(dims as usize).zip(0..) {
        let Place { low, high } = place(layout, side, token, unit);
        tile[low..][..(dims * low_bits(bits) / 8) as usize].fill(0);
        if bits == 3 {
            tile[high..][..(dims / 8) as usize].fill(0);
        }
        for (code, d) in codes.iter().zip(0..) {
            let code = stored(bits, u32::from(*code));
            let at = low_bit(bits, dims, d) as usize;
            let own = if bits == 4 { code } else { code & 3 };
            tile[low + at / 8] |= (own << (at % 8)) as u8;
            if bits == 3 {
                let at = high_bit(dims, d) as usize;
                tile[high + at / 8] |= ((code >> 2) << (at % 8)) as u8;
            }
        }
    }
    let at = (layout.norms(side) + 2 * norm_place(token)) as usize;
    tile[at..at + 2].copy_from_slice(&n.to_bits().to_le_bytes());
}

/// n of a row.
#[inline(always)]
pub fn n(tile: &[u8], layout: TileLayout, side: Side, token: u32) -> f16 {
    let at = (layout.norms(side) + 2 * norm_place(token)) as usize;
    f16::from_bits(u16::from_le_bytes([tile[at], tile[at + 1]]))
}

/// A row's codes, in ascending order of their levels.
pub fn codes(tile: &[u8], layout: TileLayout, side: Side, token: u32) -> Vec<u8> {
    let mut codes = vec![0u8; layout.head_dim as usize];
    let identity: [u8; 16] = std::array::from_fn(|code| code as u8);
    read(tile, layout, side, token, &identity, &mut codes);
    codes
}

/// What `levels` has for each of a row's codes.
#[inline(always)]
pub fn read<T: Copy>(
    tile: &[u8],
    layout: TileLayout,
    side: Side,
    token: u32,
    levels: &[T; 16],
    out: &mut [T],
) {
    match (layout.bits(side), side.unit_dims(layout.head_dim)) {
        (2, 8) => units::<T, 2, 8>(tile, layout, side, token, levels, out),
        (2, 16) => units::<T, 2, 16>(tile, layout, side, token, levels, out),
        (2, 32) => units::<T, 2, 32>(tile, layout, side, token, levels, out),
        (3, 8) => units::<T, 3, 8>(tile, layout, side, token, levels, out),
        (3, 16) => units::<T, 3, 16>(tile, layout, side, token, levels, out),
        (3, 32) => units::<T, 3, 32>(tile, layout, side, token, levels, out),
        (4, 8) => units::<T, 4, 8>(tile, layout, side, token, levels, out),
        (4, 16) => units::<T, 4, 16>(tile, layout, side, token, levels, out),
        (4, 32) => units::<T, 4, 32>(tile, layout, side, token, levels, out),
        (bits, dims) => unreachable!("no layout has {bits} bits and units of {dims}"),
    }
}

/// [`read`] of units of `U` dimensions.
#[inline(always)]
fn units<T: Copy, const BITS: u32, const U: usize>(
    tile: &[u8],
    layout: TileLayout,
    side: Side,
    token: u32,
    levels: &[T; 16],
    out: &mut [T],
) {
    // By what is stored.
    let mut of_stored = *levels;
    for code in 0..1 << BITS {
        of_stored[stored(BITS, code) as usize] = levels[code as usize];
    }
    for (out, unit) in out.as_chunks_mut::<U>().0.iter_mut().zip(0..) {
        let Place { low, high } = place(layout, side, token, unit);
        let bytes = U * low_bits(BITS) as usize / 8;
        let mut of_unit = [0u8; 16];
        of_unit[..bytes].copy_from_slice(&tile[low..low + bytes]);
        let lows = u128::from_le_bytes(of_unit);
        let mut highs = 0u32;
        if BITS == 3 {
            let mut of_unit = [0u8; 4];
            of_unit[..U / 8].copy_from_slice(&tile[high..high + U / 8]);
            highs = u32::from_le_bytes(of_unit);
        }
        let words: [u32; 4] = std::array::from_fn(|w| (lows >> (32 * w)) as u32);
        for (d, out) in out.iter_mut().enumerate() {
            let at = low_bit(BITS, U as u32, d as u32);
            let mut code = words[at as usize / 32] >> (at % 32) & if BITS == 4 { 15 } else { 3 };
            if BITS == 3 {
                code |= (highs >> high_bit(U as u32, d as u32) & 1) << 2;
            }
            *out = of_stored[code as usize];
        }
    }
}

/// What a row stands for, in f64: n · S·H·L / √D.
pub fn restored(tile: &[u8], books: &Books, side: Side, token: u32) -> Vec<f64> {
    let (layout, levels) = match side {
        Side::Key => (books.layout, &books.keys),
        Side::Value => (books.layout, &books.values),
    };
    let scale = n(tile, layout, side, token).to_f64() / f64::from(layout.head_dim).sqrt();
    let codes = codes(tile, layout, side, token);
    let mut x: Vec<f64> = codes.iter().map(|code| levels.level(usize::from(*code)) * scale).collect();
    hadamard(&mut x);
    x.iter_mut().enumerate().for_each(|(d, x)| *x *= sign(d));
    x
}

/// ±1: the sign of a dimension.
pub fn sign(d: usize) -> f64 {
    f64::from(kernels_gpu::gtq::rotation::signed(1.0, d))
}

/// H·x, of a power of two of elements: entry (i, j) of H is −1 to the number of bits that i and j share.
pub fn hadamard(x: &mut [f64]) {
    if x.len() > 1 {
        let (low, high) = x.split_at_mut(x.len() / 2);
        for (a, b) in low.iter_mut().zip(high) {
            (*a, *b) = (*a + *b, *a - *b);
        }
        let half = x.len() / 2;
        hadamard(&mut x[..half]);
        hadamard(&mut x[half..]);
    }
}
