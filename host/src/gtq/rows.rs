//! Rows of a tile, one by one: what codes they have and what these stand for.

use super::{Books, TileLayout};
use half::f16;
use kernels_gpu::gtq::Side;
use kernels_gpu::gtq::layout::{selector, stored, word};
use kernels_gpu::gtq::parts::{MOST_LEVELS, PARTS, UNIT, bits, fields, in_nibbles, norm};

/// The bytes of an n in f16, as [`write()`] takes them.
pub fn half(n: f16) -> [u8; 4] {
    let [low, high] = n.to_bits().to_le_bytes();
    [low, high, 0, 0]
}

/// The code that is stored as zeros.
pub fn zero(bits: u32) -> u8 {
    (0..=u8::MAX).find(|code| stored(bits, u32::from(*code)) == 0).unwrap_or(0)
}

/// Writes a row's codes, `[head_dim]`, and its n to a tile: two bytes of f16, or of a key in parts one each.
pub fn write(tile: &mut [u8], layout: TileLayout, side: Side, token: u32, codes: &[u8], n: [u8; 4]) {
    if side == Side::Key && layout.parted {
        write_parts(tile, layout, token, codes);
    } else {
        write_whole(tile, layout, side, token, codes);
    }
    let at = layout.norm(side, token) as usize;
    let bytes = layout.norm_bytes(side) as usize;
    tile[at..at + bytes].copy_from_slice(&n[..bytes]);
}

fn write_whole(tile: &mut [u8], layout: TileLayout, side: Side, token: u32, codes: &[u8]) {
    let (bits, dims, each) = (layout.bits(side), side.unit_dims(layout.head_dim), side.in_selector());
    for (codes, unit) in codes.chunks_exact(dims as usize).zip(0..) {
        let selector = |k: u32| {
            let own = codes.iter().skip((k * each) as usize).take(each as usize).zip(0..);
            own.fold(0, |all, (code, i)| all | stored(bits, u32::from(*code)) << (4 * i))
        };
        for w in 0..layout.words(side) {
            let bytes = word(bits, w, selector).to_le_bytes();
            let own = each as usize / 2;
            tile[layout.column(side, token, unit, w) as usize..][..own].copy_from_slice(&bytes[..own]);
        }
    }
}

/// Calls `visit` with the unit and the half of it for each four dimensions that a part has in a row.
fn fours(layout: TileLayout, mut visit: impl FnMut(u32, u32)) {
    for unit in 0..4 {
        (0..layout.head_dim / 64).for_each(|half| visit(unit, half));
    }
}

/// The first of four dimensions of a part.
fn dimension(layout: TileLayout, part: usize, unit: u32, half: u32) -> usize {
    part * layout.head_dim as usize / PARTS + (unit * (layout.head_dim / 16) + 4 * half) as usize
}

fn write_parts(tile: &mut [u8], layout: TileLayout, token: u32, codes: &[u8]) {
    let (bits, fields) = (bits(layout.key_bits), fields(layout.key_bits));
    fours(layout, |unit, half| {
        let mut all = 0;
        for part in 0..PARTS {
            let own = &codes[dimension(layout, part, unit, half)..][..4];
            for (code, nibble) in own.iter().zip(0..) {
                let code = stored(bits[part], u32::from(*code));
                all |= in_nibbles(code, bits[part], fields[part], nibble);
            }
        }
        for (bytes, word) in all.to_le_bytes().as_chunks::<2>().0.iter().zip(0..layout.key_bits) {
            tile[layout.nibbles(token, unit, word, half) as usize..][..2].copy_from_slice(bytes);
        }
    });
}

/// The n of a row: one, or of a key in parts one each, in [`UNIT`]s.
#[inline(always)]
pub fn norms(tile: &[u8], layout: TileLayout, side: Side, token: u32) -> [f32; PARTS] {
    let at = layout.norm(side, token) as usize;
    let bytes = &tile[at..at + layout.norm_bytes(side) as usize];
    match bytes {
        [a, b, c, d] => [*a, *b, *c, *d].map(|byte| norm(byte.into())),
        _ => [f16::from_bits(u16::from_le_bytes([bytes[0], bytes[1]])).to_f32(), 0.0, 0.0, 0.0],
    }
}

/// A row's codes, in ascending order of their levels; of a key in parts in the order of its dimensions.
pub fn codes(tile: &[u8], layout: TileLayout, side: Side, token: u32) -> Vec<u8> {
    let mut codes = vec![0u8; layout.head_dim as usize];
    let identity: [u8; MOST_LEVELS] = std::array::from_fn(|code| code as u8);
    match side {
        Side::Key => read_keys(tile, layout, token, &[identity; PARTS], &mut codes),
        Side::Value => read(tile, layout, side, token, &std::array::from_fn(|i| identity[i]), &mut codes),
    }
    codes
}

/// What `levels` has for each of a key's codes; all of a whole key are the first part's.
#[inline(always)]
pub fn read_keys<T: Copy>(
    tile: &[u8],
    layout: TileLayout,
    token: u32,
    levels: &[[T; MOST_LEVELS]; PARTS],
    out: &mut [T],
) {
    match (layout.parted, layout.key_bits) {
        (false, _) => {
            read(tile, layout, Side::Key, token, &std::array::from_fn(|code| levels[0][code]), out);
        }
        (true, 2) => read_parts::<T, 2>(tile, layout, token, levels, out),
        (true, 3) => read_parts::<T, 3>(tile, layout, token, levels, out),
        (true, _) => read_parts::<T, 4>(tile, layout, token, levels, out),
    }
}

/// [`read_keys`] of parts of `K` bits on average.
#[inline(always)]
fn read_parts<T: Copy, const K: u32>(
    tile: &[u8],
    layout: TileLayout,
    token: u32,
    levels: &[[T; MOST_LEVELS]; PARTS],
    out: &mut [T],
) {
    let (bits, fields) = (bits(K), fields(K));
    fours(layout, |unit, half| {
        let mut all = 0u64;
        for word in 0..K {
            let at = layout.nibbles(token, unit, word, half) as usize;
            all |= u64::from(u16::from_le_bytes([tile[at], tile[at + 1]])) << (16 * word);
        }
        for part in 0..PARTS {
            let own = &mut out[dimension(layout, part, unit, half)..][..4];
            for (out, nibble) in own.iter_mut().zip(0..) {
                let place = |bit: u32| fields[part] >> (4 * bit) & 15;
                let one =
                    |bit: u32| (all >> (16 * (place(bit) >> 2) + 4 * nibble + (place(bit) & 3)) & 1) << bit;
                let stored = (0..bits[part]).fold(0, |code, bit| code | one(bit)) as u32;
                *out = levels[part][ascending(bits[part], stored) as usize];
            }
        }
    });
}

/// The code that is stored so: as [`stored`], which is its own opposite but for the half.
#[inline(always)]
const fn ascending(bits: u32, stored: u32) -> u32 {
    let half = 1 << bits >> 1;
    if bits < 4 {
        stored
    } else if stored < half {
        stored + half
    } else {
        2 * half - 1 - stored
    }
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
    match (layout.bits(side), side) {
        (2, Side::Key) => units::<T, 2, 4>(tile, layout, side, token, levels, out),
        (2, Side::Value) => units::<T, 2, 2>(tile, layout, side, token, levels, out),
        (3, Side::Key) => units::<T, 3, 4>(tile, layout, side, token, levels, out),
        (3, Side::Value) => units::<T, 3, 2>(tile, layout, side, token, levels, out),
        (_, Side::Key) => units::<T, 4, 4>(tile, layout, side, token, levels, out),
        (_, Side::Value) => units::<T, 4, 2>(tile, layout, side, token, levels, out),
    }
}

/// [`read`] where `EACH` dimensions are in a selector.
#[inline(always)]
fn units<T: Copy, const BITS: u32, const EACH: usize>(
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
    let dims = side.unit_dims(layout.head_dim) as usize;
    for (out, unit) in out.chunks_exact_mut(dims).zip(0..) {
        let mut words = [0u32; 16];
        for (word, w) in words.iter_mut().zip(0..layout.words(side)) {
            let at = layout.column(side, token, unit, w) as usize;
            let mut bytes = [0u8; 4];
            bytes[..EACH / 2].copy_from_slice(&tile[at..at + EACH / 2]);
            *word = u32::from_le_bytes(bytes);
        }
        for (k, out) in out.as_chunks_mut::<EACH>().0.iter_mut().enumerate() {
            let selector = selector(BITS, &words, 0, k);
            for (i, out) in out.iter_mut().enumerate() {
                *out = of_stored[(selector >> (4 * i) & 15) as usize];
            }
        }
    }
}

/// What a row stands for, in f64: n · S·H·L / √D, of a key in parts for each of them, its channels where
/// `order` has them.
pub fn restored(tile: &[u8], books: &Books, side: Side, token: u32, order: &[u8]) -> Vec<f64> {
    let layout = books.layout;
    let parted = side == Side::Key && layout.parted;
    let (levels, unit) = match side {
        Side::Key => (&books.keys[..], if parted { UNIT } else { 1.0 }),
        Side::Value => (std::slice::from_ref(&books.values), 1.0),
    };
    let codes = codes(tile, layout, side, token);
    let of_part = codes.len() / levels.len();
    let n = norms(tile, layout, side, token);
    let mut x: Vec<f64> = codes
        .chunks_exact(of_part)
        .zip(levels.iter().zip(n))
        .flat_map(|(codes, (levels, n))| {
            let scale = f64::from(n * unit) / (of_part as f64).sqrt();
            let mut h: Vec<f64> = codes.iter().map(|code| levels.level(usize::from(*code)) * scale).collect();
            hadamard(&mut h);
            h
        })
        .collect();
    x.iter_mut().enumerate().for_each(|(d, x)| *x *= sign(d));
    if !parted {
        return x;
    }
    let mut channels = vec![0.0; x.len()];
    order.iter().zip(x).for_each(|(channel, x)| channels[usize::from(*channel)] = x);
    channels
}

/// H·S·x in f64, of each of so many parts of a row whose channels are in `order`; of a whole row the order is
/// empty.
pub fn turned(x: &[f64], parts: usize, order: &[u8]) -> Vec<f64> {
    let in_order = |d: usize| order.get(d).map_or(d, |channel| usize::from(*channel));
    let mut h: Vec<f64> = (0..x.len()).map(|d| x[in_order(d)] * sign(d)).collect();
    h.chunks_exact_mut(x.len() / parts).for_each(hadamard);
    h
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
