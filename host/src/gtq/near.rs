//! Rows of the window, one by one: tokens in 16 bits, as [`kernels_gpu::gtq::window`] has them.

use super::Books;
use super::rows;
use half::f16;
use kernels_gpu::attention::integers::{LARGEST, halves, integer, inverse_of};
use kernels_gpu::gtq::parts::{PARTS, UNIT};
use kernels_gpu::gtq::window::{SlotLayout, inverse_of_value};
use kernels_gpu::gtq::{EncodeShape, Side};
use simt::math::{abs, maximum};

/// A row on its way to a window: H·S·x, and its length; none of one that cannot be stored.
pub(super) struct Turned<'a> {
    pub(super) h: &'a [f32],
    pub(super) r: f32,
}

fn set_float(slot: &mut [u8], at: u32, x: f32) {
    slot[at as usize..at as usize + 4].copy_from_slice(&x.to_le_bytes());
}

fn float(slot: &[u8], at: u32) -> f32 {
    f32::from_le_bytes(*slot[at as usize..].first_chunk().expect("a slot has all of them"))
}

/// Writes a row to a slot.
pub(super) fn write(
    slot: &mut [u8],
    layout: SlotLayout,
    side: Side,
    token: u32,
    row: Option<Turned<'_>>,
    shape: EncodeShape,
) {
    let dim = layout.head_dim as usize;
    let zeros = vec![0f32; dim];
    let Turned { h, r } = row.unwrap_or(Turned { h: &zeros, r: 0.0 });
    if side == Side::Value {
        let inverse = inverse_of_value(r, shape.value_unit);
        let values = &mut slot[layout.value(token) as usize..][..2 * dim];
        for (bytes, h) in values.as_chunks_mut::<2>().0.iter_mut().zip(h) {
            let value = if r == 0.0 { f16::ZERO } else { simt::convert::f16_from_f32(h * inverse) };
            *bytes = value.to_bits().to_le_bytes();
        }
        set_float(slot, layout.value_scale(token), r / shape.root);
        return;
    }
    let of_part = dim / layout.scales() as usize;
    for ((part, h), unit) in h.chunks_exact(of_part).enumerate().zip(shape.key_units) {
        let largest = h.iter().fold(0f32, |most, h| maximum(most, abs(*h)));
        let inverse = inverse_of(largest);
        for (i, h) in h.iter().enumerate() {
            let at = layout.key(token, (part * of_part + i) as u32) as usize;
            let [high, low] = halves(integer(*h, inverse));
            slot[at] = high as u8;
            slot[at + layout.apart() as usize] = low as u8;
        }
        set_float(slot, layout.key_scale(token, part as u32), largest * unit);
    }
}

/// The high and the low bytes of a key's integers, and its n.
#[inline(always)]
pub(super) fn read_key(
    slot: &[u8],
    layout: SlotLayout,
    token: u32,
    [high, low]: [&mut [i16]; 2],
) -> [f32; PARTS] {
    for (d, (high, low)) in (0..).zip(high.iter_mut().zip(low)) {
        let at = layout.key(token, d) as usize;
        *high = i16::from(slot[at] as i8);
        *low = i16::from(slot[at + layout.apart() as usize] as i8);
    }
    let mut n = [0.0; PARTS];
    for (part, n) in n.iter_mut().enumerate().take(layout.scales() as usize) {
        *n = float(slot, layout.key_scale(token, part as u32));
    }
    n
}

/// The bits of a value's numbers, and its n'.
#[inline(always)]
pub(super) fn read_value(slot: &[u8], layout: SlotLayout, token: u32, out: &mut [u16]) -> f32 {
    let values = &slot[layout.value(token) as usize..];
    for (out, bytes) in out.iter_mut().zip(values.as_chunks::<2>().0) {
        *out = u16::from_le_bytes(*bytes);
    }
    float(slot, layout.value_scale(token))
}

/// What a row stands for, in f64; of a key in parts with its channels where `order` has them.
pub fn restored(slot: &[u8], books: &Books, side: Side, token: u32, order: &[u8]) -> Vec<f64> {
    let layout = books.layout.slot();
    let dim = layout.head_dim as usize;
    let parted = side == Side::Key && layout.parted;
    let h: Vec<f64> = match side {
        Side::Key => {
            let (mut high, mut low) = (vec![0; dim], vec![0; dim]);
            let n = read_key(slot, layout, token, [&mut high, &mut low]);
            let of_part = dim / layout.scales() as usize;
            let unit = if parted { f64::from(UNIT) } else { 1.0 };
            let factor = |d: usize| {
                let levels = &books.keys[d / of_part];
                f64::from(n[d / of_part]) * unit * levels.step * (of_part as f64).sqrt()
            };
            let integer = |d: usize| 256.0 * f64::from(high[d]) + f64::from(low[d]);
            (0..dim).map(|d| integer(d) * factor(d)).collect()
        }
        Side::Value => {
            let mut bits = vec![0; dim];
            let n = f64::from(read_value(slot, layout, token, &mut bits));
            let factor = n * books.values.step * (dim as f64).sqrt();
            bits.into_iter().map(|bits| f16::from_bits(bits).to_f64() * factor).collect()
        }
    };
    // x = S·H·h / D, of a part with its own.
    let of_part = if parted { dim / PARTS } else { dim };
    let mut x = h;
    x.chunks_exact_mut(of_part).for_each(rows::hadamard);
    x.iter_mut().enumerate().for_each(|(d, x)| *x *= rows::sign(d) / of_part as f64);
    if !parted {
        return x;
    }
    let mut channels = vec![0.0; dim];
    order.iter().zip(x).for_each(|(channel, x)| channels[usize::from(*channel)] = x);
    channels
}

/// n·Σ|L| of a key, of each part, as the oracle counts it: Σ|h|/√D.
pub fn sizes(slot: &[u8], books: &Books, token: u32, order: &[u8]) -> Vec<f64> {
    let key = restored(slot, books, Side::Key, token, order);
    let parts = books.keys.len();
    let of_part = key.len() / parts;
    let h = rows::turned(&key, parts, order);
    h.chunks_exact(of_part)
        .map(|h| h.iter().map(|h| h.abs()).sum::<f64>() / (of_part as f64).sqrt())
        .collect()
}

/// What makes n of a key's largest coordinate, for each part.
pub(super) fn key_units(books: &Books) -> [f32; PARTS] {
    let of_part = f64::from(books.layout.head_dim) / books.keys.len() as f64;
    let unit = if books.layout.parted { f64::from(UNIT) } else { 1.0 };
    let one = |step: f64| (1.0 / (f64::from(LARGEST) * of_part.sqrt() * unit * step)) as f32;
    std::array::from_fn(|p| books.keys.get(p).map_or(0.0, |levels| one(levels.step)))
}
