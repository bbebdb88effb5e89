//! Sixteen outputs of the tensor cores' arithmetic at a time, one a lane.
//!
//! [`simt::emu::tensor`] says what an output is: the sum of 16 products and the accumulator, each cut off 25
//! bits below the largest alignment, the sum rounded toward zero. Here, for all lanes at once:
//! 1. The alignment of a product is the sum of its operands' exponents. Exponents are 16-bit words, two steps
//!    of the contraction in a lane: an addition and a maximum see to two products. [`word`] makes a zero
//!    operand come out below everything.
//! 2. A product is exact in f32, times 2^(25 − alignment) too; the conversion to an integer cuts off, toward
//!    zero. Sixteen such integers are below 2^31 in sum: 16 · 2^25 · (2 − 2^−10)². With the accumulator f64
//!    holds them; nearly always 32 bits do.
//! 3. That to f32 toward zero, and the scale undone.
//!
//! Lanes for which f32 or, where a path adds in them, 32 bits are too narrow, or whose accumulator is not
//! finite, are left to the emulator's own model, as are tiles with an operand that is not finite.

pub(crate) use super::order::{Eights, Order, Sixteens};
use crate::attention::Half;
use half::f16;
use simt::emu::tensor::{Format, mma_16x8x16};
use simt::math::{exp2_nonpositive, fma};

/// Sixteen lanes of f32.
pub(crate) type Floats = [f32; 16];
/// Sixteen lanes of a pair of exponent words.
pub(crate) type Pairs = [u32; 16];

/// The words of two operands, both nonzero, add up to no less than this.
pub(crate) const BOTH: i32 = 0x8000;
/// Alignments, biased like f32's exponents, for which f32 is wide enough: no scale and no relevant product
/// under- or overflows.
pub(crate) const NARROWEST: i32 = 27;
/// See [`NARROWEST`].
pub(crate) const WIDEST: i32 = 240;
/// Scale of an alignment: 2^(25 − alignment) has the exponent field `SCALE` − biased alignment.
pub(crate) const SCALE: i32 = 127 + 25 + 127;
/// The exponent field of 2^(alignment − 25) is the biased alignment less this.
pub(crate) const UNSCALE: i32 = 25;

/// An element type's format.
#[derive(Clone, Copy)]
pub(crate) struct Bits {
    /// Fraction bits.
    pub(crate) fraction: u32,
    /// The exponent field of what is not finite.
    pub(crate) largest: u16,
    /// From a sum of two exponent words to an alignment biased like f32's exponents.
    pub(crate) bias: i32,
}

/// The format of `E`.
pub(crate) const fn bits<E: Half>() -> Bits {
    if E::IS_F16 {
        Bits { fraction: 10, largest: 31, bias: BOTH + 2 * 15 - 127 }
    } else {
        Bits { fraction: 7, largest: 255, bias: BOTH + 2 * 127 - 127 }
    }
}

/// The exponent word of an operand: 0 for zero, 2^14 and the exponent field, that of the smallest normal
/// number for subnormal ones.
#[inline(always)]
pub(crate) fn word(x: u16, bits: Bits) -> u16 {
    let exponent = (x & 0x7fff) >> bits.fraction;
    let word = 0x4000 + exponent.max(1);
    if x & 0x7fff == 0 { 0 } else { word }
}

/// A row of the first operand: 16 steps of a contraction.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    pub(crate) floats: Floats,
    /// Exponent words of steps 2j and 2j + 1.
    pub(crate) pairs: [u32; 8],
    pub(crate) bits: [u16; 16],
    /// Whether all are finite.
    pub(crate) finite: bool,
}

impl Row {
    pub(crate) const ZERO: Row = Row { floats: [0.0; 16], pairs: [0; 8], bits: [0; 16], finite: true };

    /// Of 16 elements.
    #[inline(always)]
    pub(crate) fn new<E: Half, L: Lanes>(x: [u16; 16]) -> Row {
        let mut row = Row::ZERO;
        row.set::<E, L>(x);
        row
    }

    /// Makes it one of 16 elements.
    #[inline(always)]
    pub(crate) fn set<E: Half, L: Lanes>(&mut self, x: [u16; 16]) {
        L::widen::<E>(&x, &mut self.floats);
        self.finite = L::pairs::<E>(&x, &mut self.pairs);
        self.bits = x;
    }
}

/// 16 tokens of keys or values as the second operand. Chunk `c` is sixteen steps of a contraction for sixteen
/// lanes: for keys contraction `c` over dimensions, a token a lane; for values the tokens, dimensions 16c to
/// 16c + 15 in the lanes.
pub(crate) struct Tile {
    /// Elements of keys, [chunks, steps, lanes]. Values are read where they are.
    pub(crate) keys: [[[u16; 16]; 16]; 16],
    /// All elements as f32, if the level wants them so.
    pub(crate) floats: [[Floats; 16]; 16],
    /// Exponent words of steps 2j and 2j + 1, if the level wants them so.
    pub(crate) pairs: [[Pairs; 8]; 16],
    /// Whether all are finite.
    pub(crate) finite: bool,
}

impl Tile {
    pub(crate) const ZERO: Tile = Tile {
        keys: [[[0; 16]; 16]; 16],
        floats: [[[0.0; 16]; 16]; 16],
        pairs: [[[0; 16]; 8]; 16],
        finite: true,
    };

    /// A contraction over dimensions, of keys.
    #[inline(always)]
    pub(crate) fn of_keys(&self, chunk: usize) -> Chunk<'_> {
        let elements = self.keys[chunk].as_flattened();
        Chunk { elements, stride: 16, tile: self, index: chunk }
    }

    /// Sixteen dimensions of the values [16, head_dim] of which this tile is.
    #[inline(always)]
    pub(crate) fn of_values<'a>(&'a self, values: &'a [u16], head_dim: usize, chunk: usize) -> Chunk<'a> {
        Chunk { elements: &values[16 * chunk..], stride: head_dim, tile: self, index: chunk }
    }
}

/// Sixteen steps of a contraction for sixteen lanes.
#[derive(Clone, Copy)]
pub(crate) struct Chunk<'a> {
    elements: &'a [u16],
    /// From a step's elements to the next one's.
    stride: usize,
    pub(crate) tile: &'a Tile,
    /// Which of the tile's.
    pub(crate) index: usize,
}

impl Chunk<'_> {
    /// The elements of a step.
    #[inline(always)]
    pub(crate) fn step(&self, step: usize) -> &[u16; 16] {
        self.elements[step * self.stride..].first_chunk().expect("a step has sixteen lanes")
    }
}

/// Operations on sixteen lanes.
///
/// # Safety
/// Of all functions: the machine has the instructions of the implementation.
pub(crate) trait Lanes {
    /// Whether [`steps`](Self::steps) of several rows are cheaper than of one after another.
    const SEVERAL: bool = false;

    /// Elements to f32.
    fn widen<E: Half>(x: &[u16; 16], out: &mut Floats);
    /// Exponent words of elements; whether all are finite.
    fn pairs<E: Half>(x: &[u16; 16], out: &mut [u32; 8]) -> bool;
    /// f32 to elements, to nearest even.
    fn round<E: Half>(x: &Floats) -> [u16; 16];
    /// 2^(x − reference) as [`exp2_nonpositive`] has it; the bits of a NaN may be others.
    fn exp2(x: &Floats, reference: f32) -> Floats;
    /// to + x·weight of each element, with one rounding.
    #[inline(always)]
    fn add_scaled(to: &mut [f32], x: &[f32], weight: f32) {
        for (to, x) in to.iter_mut().zip(x) {
            *to = fma(*x, weight, *to);
        }
    }
    /// f32 to f16, to nearest even; the bits of a NaN may be others than those of [`round`](Self::round).
    fn round_f16(x: &Floats) -> [u16; 16];
    /// A byte each, less 128.
    fn signed(x: &[u8; 16]) -> Floats;
    /// code · scale + zero of sixteen codes of four bits, low nibbles first.
    fn restore(codes: [u8; 8], scale: f32, zero: f32) -> Floats;
    /// The same of sixteen groups of codes, rounded to f16 as [`round_f16`](Self::round_f16) does it.
    #[inline(always)]
    fn restore_groups(codes: &[[u8; 8]; 16], scales: &Floats, zeros: &Floats, out: &mut [[u16; 16]; 16]) {
        for (out, (codes, (scale, zero))) in out.iter_mut().zip(codes.iter().zip(scales.iter().zip(zeros))) {
            *out = Self::round_f16(&Self::restore(*codes, *scale, *zero));
        }
    }
    /// Asks for memory that will be read soon.
    fn prefetch(memory: &[u16]);
    /// Keys [16, head_dim], a token a lane.
    fn keys<E: Half, O: Order>(rows: &[u16], head_dim: usize, tile: &mut Tile);
    /// Keys of bytes less 128, [16, head_dim], a token a lane, as f16; `memory` for as many elements.
    #[inline(always)]
    fn codes<O: Order>(rows: &[u8], head_dim: usize, memory: &mut [u16], tile: &mut Tile) {
        for (codes, out) in rows.as_chunks::<16>().0.iter().zip(memory.as_chunks_mut::<16>().0) {
            *out = Self::round_f16(&Self::signed(codes));
        }
        Self::keys::<f16, O>(memory, head_dim, tile);
    }
    /// Values [16, head_dim], a dimension a lane.
    fn values<E: Half>(rows: &[u16], head_dim: usize, tile: &mut Tile);
    /// c += row · chunk for each row; the lanes (a bit each) that are not what they should be, and are as
    /// they were. Operands are finite.
    fn steps<E: Half, const R: usize>(
        rows: [&Row; R],
        chunk: Chunk<'_>,
        c: &mut [&mut Floats; R],
    ) -> [u32; R];
}

/// c += row · chunk for each row.
#[inline(always)]
pub(crate) fn multiply<E: Half, L: Lanes, const R: usize>(
    rows: [&Row; R],
    chunk: Chunk<'_>,
    mut c: [&mut Floats; R],
) {
    let mut finite = chunk.tile.finite;
    for row in rows {
        finite &= row.finite;
    }
    let lanes = if finite { L::steps::<E, R>(rows, chunk, &mut c) } else { [0xffff; R] };
    if lanes != [0; R] {
        for ((row, lanes), c) in rows.into_iter().zip(lanes).zip(c) {
            if lanes != 0 {
                exactly::<E>(row, lanes, chunk, c);
            }
        }
    }
}

/// [`multiply`] for any number of rows, several at a time: they share what is loaded of the chunk.
#[inline(always)]
pub(crate) fn multiply_each<'a, E: Half, L: Lanes>(
    row: impl Fn(usize) -> &'a Row,
    chunk: Chunk<'_>,
    mut c: &mut [Floats],
) {
    /// The first `R` of `c`, rows from `first` on; gives the others.
    #[inline(always)]
    fn some<'a, 'c, E: Half, L: Lanes, const R: usize>(
        row: impl Fn(usize) -> &'a Row,
        first: usize,
        chunk: Chunk<'_>,
        c: &'c mut [Floats],
    ) -> &'c mut [Floats] {
        let (own, others) = c.split_first_chunk_mut::<R>().expect("as many are left");
        let mut rows = [row(first); R];
        for (r, to) in rows.iter_mut().enumerate().skip(1) {
            *to = row(first + r);
        }
        multiply::<E, L, R>(rows, chunk, own.each_mut());
        others
    }
    let rows = c.len();
    while !c.is_empty() {
        let first = rows - c.len();
        c = match c.len() {
            1 => some::<E, L, 1>(&row, first, chunk, c),
            _ if !L::SEVERAL => some::<E, L, 1>(&row, first, chunk, c),
            2 => some::<E, L, 2>(&row, first, chunk, c),
            3 => some::<E, L, 3>(&row, first, chunk, c),
            4..6 => some::<E, L, 4>(&row, first, chunk, c),
            6..8 => some::<E, L, 6>(&row, first, chunk, c),
            _ => some::<E, L, 8>(&row, first, chunk, c),
        };
    }
}

/// c += the row times itself: one output, whose sixteen products are in the lanes.
#[inline(always)]
pub(crate) fn square<E: Half>(row: &Row, c: &mut f32) {
    let mut largest = 0u32;
    for pair in row.pairs {
        // Twice the larger word: that of a product of an operand with itself.
        largest = largest.max(2 * (pair & 0xffff)).max(2 * (pair >> 16));
    }
    let products = largest as i32;
    let alignment = (products - bits::<E>().bias).max((c.to_bits() >> 23 & 0xff) as i32);
    let narrow = products >= BOTH && alignment < NARROWEST;
    if narrow || alignment > WIDEST || !row.finite {
        square_exactly::<E>(row, c);
        return;
    }
    if alignment < NARROWEST {
        // No product: the accumulator, but −0 becomes +0.
        *c += 0.0;
        return;
    }
    let scale = f32::from_bits(((SCALE - alignment) as u32) << 23);
    let mut sum = 0i32;
    for x in row.floats {
        sum = sum.wrapping_add((x * x * scale) as i32);
    }
    let sum = f64::from(sum) + f64::from((*c * scale) as i32);
    let cut = f64::from_bits(sum.to_bits() & !((1 << 29) - 1));
    *c = cut as f32 * f32::from_bits(((alignment - UNSCALE) as u32) << 23);
}

/// The emulator's own model of [`square`].
#[cold]
#[inline(never)]
fn square_exactly<E: Half>(row: &Row, c: &mut f32) {
    let format = if E::IS_F16 { Format::F16 } else { Format::Bf16 };
    let (mut a, mut columns, mut before) = ([[0; 16]; 16], [[0; 16]; 8], [[0; 8]; 16]);
    (a[0], columns[0], before[0][0]) = (row.bits, row.bits, c.to_bits());
    *c = f32::from_bits(mma_16x8x16(format, &a, &columns, &before)[0][0]);
}

/// The emulator's own model, for some lanes.
#[cold]
#[inline(never)]
fn exactly<E: Half>(row: &Row, lanes: u32, chunk: Chunk<'_>, c: &mut Floats) {
    let format = if E::IS_F16 { Format::F16 } else { Format::Bf16 };
    let mut a = [[0; 16]; 16];
    a[0] = row.bits;
    for first in [0, 8] {
        let columns = std::array::from_fn(|lane| std::array::from_fn(|step| chunk.step(step)[first + lane]));
        let mut before = [[0; 8]; 16];
        before[0] = std::array::from_fn(|lane| c[first + lane].to_bits());
        let after = mma_16x8x16(format, &a, &columns, &before);
        for lane in 0..8 {
            if lanes >> (first + lane) & 1 == 1 {
                c[first + lane] = f32::from_bits(after[0][lane]);
            }
        }
    }
}

/// Any machine.
pub(crate) struct Portable;

impl Lanes for Portable {
    #[inline(always)]
    fn widen<E: Half>(x: &[u16; 16], out: &mut Floats) {
        *out = x.map(|x| E::unpack(u32::from(x))[0]);
    }

    #[inline(always)]
    fn pairs<E: Half>(x: &[u16; 16], out: &mut [u32; 8]) -> bool {
        let format = bits::<E>();
        let mut largest = 0;
        for (pair, x) in out.iter_mut().zip(x.as_chunks::<2>().0) {
            *pair = u32::from(word(x[0], format)) | u32::from(word(x[1], format)) << 16;
            largest = largest.max((x[0] & 0x7fff).max(x[1] & 0x7fff) >> format.fraction);
        }
        largest < format.largest
    }

    #[inline(always)]
    fn round<E: Half>(x: &Floats) -> [u16; 16] {
        x.map(|x| E::pack(x, 0.0) as u16)
    }

    #[inline(always)]
    fn exp2(x: &Floats, reference: f32) -> Floats {
        x.map(|x| exp2_nonpositive(x - reference))
    }

    #[inline(always)]
    fn round_f16(x: &Floats) -> [u16; 16] {
        Self::round::<f16>(x)
    }

    #[inline(always)]
    fn signed(x: &[u8; 16]) -> Floats {
        x.map(|x| f32::from(x) - 128.0)
    }

    #[inline(always)]
    fn restore(codes: [u8; 8], scale: f32, zero: f32) -> Floats {
        let codes = u64::from_le_bytes(codes);
        std::array::from_fn(|i| (codes >> (4 * i) & 15) as f32 * scale + zero)
    }

    #[inline(always)]
    fn prefetch(_memory: &[u16]) {}

    #[inline(always)]
    fn keys<E: Half, O: Order>(rows: &[u16], head_dim: usize, tile: &mut Tile) {
        let format = bits::<E>();
        let mut largest = 0;
        for (token, row) in rows.chunks_exact(head_dim).enumerate() {
            for (d, x) in row.iter().enumerate() {
                let (chunk, step) = O::step_of(d);
                tile.keys[chunk][step][token] = *x;
                tile.floats[chunk][step][token] = E::unpack(u32::from(*x))[0];
                let pair = &mut tile.pairs[chunk][step / 2][token];
                let word = u32::from(word(*x, format));
                *pair = if step % 2 == 0 { word } else { *pair | word << 16 };
                largest = largest.max((x & 0x7fff) >> format.fraction);
            }
        }
        tile.finite = largest < format.largest;
    }

    #[inline(always)]
    fn values<E: Half>(rows: &[u16], head_dim: usize, tile: &mut Tile) {
        let format = bits::<E>();
        let mut largest = 0;
        for (token, row) in rows.chunks_exact(head_dim).enumerate() {
            for (d, x) in row.iter().enumerate() {
                let (chunk, lane) = (d / 16, d % 16);
                tile.floats[chunk][token][lane] = E::unpack(u32::from(*x))[0];
                let pair = &mut tile.pairs[chunk][token / 2][lane];
                let word = u32::from(word(*x, format));
                *pair = if token % 2 == 0 { word } else { *pair | word << 16 };
                largest = largest.max((x & 0x7fff) >> format.fraction);
            }
        }
        tile.finite = largest < format.largest;
    }

    #[inline(always)]
    fn steps<E: Half, const R: usize>(
        rows: [&Row; R],
        chunk: Chunk<'_>,
        c: &mut [&mut Floats; R],
    ) -> [u32; R] {
        let (floats, pairs) = (&chunk.tile.floats[chunk.index], &chunk.tile.pairs[chunk.index]);
        let mut rows = rows.into_iter().zip(c);
        [(); R].map(|()| rows.next().map_or(0, |(row, c)| step::<E>(row, floats, pairs, c)))
    }
}

/// One row of [`Lanes::steps`].
fn step<E: Half>(row: &Row, floats: &[Floats; 16], pairs: &[Pairs; 8], c: &mut Floats) -> u32 {
    let bias = bits::<E>().bias;
    let mut low = [0i32; 16];
    let mut high = [0i32; 16];
    for (a, b) in row.pairs.iter().zip(pairs) {
        for lane in 0..16 {
            low[lane] = low[lane].max(((a & 0xffff) + (b[lane] & 0xffff)) as i32);
            high[lane] = high[lane].max(((a >> 16) + (b[lane] >> 16)) as i32);
        }
    }
    let mut lanes = 0;
    let mut alignments = [0; 16];
    let mut scales = [0f32; 16];
    for lane in 0..16 {
        let products = low[lane].max(high[lane]);
        let alignment = (products - bias).max((c[lane].to_bits() >> 23 & 0xff) as i32);
        let narrow = products >= BOTH && alignment < NARROWEST;
        lanes |= u32::from(narrow || alignment > WIDEST) << lane;
        alignments[lane] = alignment;
        scales[lane] = f32::from_bits(((SCALE - alignment.clamp(NARROWEST, WIDEST)) as u32) << 23);
    }
    let mut sums = [0i32; 16];
    for (a, b) in row.floats.iter().zip(floats) {
        for lane in 0..16 {
            sums[lane] = sums[lane].wrapping_add((a * b[lane] * scales[lane]) as i32);
        }
    }
    for lane in 0..16 {
        if lanes >> lane & 1 == 1 {
            continue;
        }
        if alignments[lane] < NARROWEST {
            // No product: the accumulator, but −0 becomes +0.
            c[lane] += 0.0;
            continue;
        }
        let accumulator = (c[lane] * scales[lane]) as i32;
        let sum = f64::from(sums[lane]) + f64::from(accumulator);
        let cut = f64::from_bits(sum.to_bits() & !((1 << 29) - 1));
        c[lane] = cut as f32 * f32::from_bits(((alignments[lane] - UNSCALE) as u32) << 23);
    }
    lanes
}
