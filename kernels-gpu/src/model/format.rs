//! Packed weights: types, their layout, and what a block of 32 channels adds to a row's sum.
//!
//! # Mathematics
//! Codes q, block scale d, block minimum m (f16 in all types that have them):
//!
//! | type | weight | bytes for 32 |
//! |---|---|---|
//! | [`Q4_1`] | d·q + m, q in 0..=15 | 20 |
//! | [`Q4_0`] | d·(q − 8) = d·q − 8·d, q in 0..=15 | 18 |
//! | [`Q8_0`] | d·q, q in −128..=127 | 34 |
//! | f16, bf16 | themselves | 64 |
//! | f32 | itself | 128 |
//!
//! With the record t, X, u = t·ΣX of the same 32 channels of a token ([`fixed`](super::fixed)) a block is
//! added to a sum `s` as
//!
//! ```text
//! S = Σ q·X                                                            (an integer, exact in any order)
//! s ← fma(d·t, f32(S), s), then for Q4_1 and Q4_0  s ← fma(m, u, s)    (m = −8·d for Q4_0)
//! ```
//!
//! f32(S) is S rounded once: |S| < 2^30 for four-bit codes, 2^33 for Q8_0. For floats S = Σ w·X is a sum of
//! eight chains: chain c adds the channels c, c + 8, c + 16 and c + 24 by multiply-adds, chains are added as
//! ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)), and s ← fma(t, S, s).
//!
//! # Layout
//! Rows go in groups of eight, blocks of a group follow each other: tile `group · blocks + block`. In a tile
//!
//! - four bits, 128 bytes: 32-bit word 8·j + r has of row r in byte i the codes of channels 8·j + i (low
//!   half) and 8·j + 4 + i (high half);
//! - eight bits, 256 bytes: word 32·e + 8·j + r has the codes of channels 8·j + 4·e + 0 to 3 of row r;
//! - floats: [32 channels][8 rows].
//!
//! So one CPU register holds four channels of eight rows; a GPU lane loads 16 bytes: four rows' words; and a
//! lane's word is a fragment of a tensor-core operand. Scales are apart: [tile][8 rows] of d, or of d and m.

use glam::UVec4;
use half::f16;
use simt::bits::{byte_perm, dp4a};
use simt::convert::f32_from_f16;
use simt::half2::{fma_f16x2, sub_f16x2};
use simt::math::fma;
use simt::warp::{FULL_MASK, warp_shuffle_xor};
use simt::{Global, Shared, unroll};

/// Rows of a group.
pub const GROUP: u32 = 8;

/// Four bits, scale and minimum.
#[derive(Clone, Copy, Debug)]
pub struct Q4_1;
/// Four bits around 8, scale.
#[derive(Clone, Copy, Debug)]
pub struct Q4_0;
/// Eight bits, scale.
#[derive(Clone, Copy, Debug)]
pub struct Q8_0;

/// 1/16, twice.
const SIXTEENTHS: u32 = 0x2c00_2c00;
/// −64, twice.
const MINUS_64S: u32 = 0xd400_d400;

/// A type of weights, as the matrix-vector kernel sees it: eight lanes have a tile.
pub trait Format: 'static {
    /// What a lane holds of a tile.
    type Loaded: Copy;
    /// Tiles that a lane loads before it uses the first: enough bytes under way, and not too many registers.
    const BATCH: u32;
    /// Whether a lane holds its first tiles while it waits for the launch before: where there are registers
    /// for that.
    const AHEAD: bool;
    /// 32-bit words of a tile.
    const TILE_WORDS: u32;
    /// 16-bit scales of a tile.
    const TILE_SCALES: u32;
    /// What lane `c` of the eight holds at the beginning.
    fn nothing() -> Self::Loaded;
    /// Loads lane `c`'s share of a tile.
    fn load(codes: Global<u32>, scales: Global<u16>, tile: usize, c: u32) -> Self::Loaded;
    /// The row of the group whose sum lane `c` keeps.
    fn row(c: u32) -> u32;
    /// Adds the block to the sum of lane `c`'s row; `part` gives parts of the token's record. All 32 lanes
    /// call it together.
    fn add(loaded: Self::Loaded, part: impl Fn(u32) -> [UVec4; 2], c: u32, sum: f32) -> f32;
    /// One weight: channel `k` of row `r` of a tile.
    fn weight(codes: Global<u32>, scales: Global<u16>, tile: usize, r: u32, k: u32) -> f32;
}

/// A type of weights with integer codes, as the tensor-core kernels see it.
pub trait Codes: Format {
    /// Whether blocks have a minimum: whether [`finish`](Self::finish) reads u.
    const HAS_MINIMUM: bool;
    /// A row's words of a part of a tile and its scale as they are stored: nothing waits for the loads.
    type Stored: Copy;
    /// What stands for nothing loaded yet.
    fn none() -> Self::Stored;
    /// Loads row `r`'s share of part `j` of a tile.
    fn stored(codes: Global<u32>, scales: Global<u16>, tile: usize, j: u32, r: u32) -> Self::Stored;
    /// The [`words`](Self::words) of what was loaded.
    fn operands(stored: Self::Stored) -> [u32; 2];
    /// The [`scale`](Self::scale) of what was loaded.
    fn widened(stored: Self::Stored) -> [f32; 2];
    /// The [`operands`](Self::operands) of row `r` and part `j` of a tile that is in shared memory from word
    /// `tile` on.
    fn shared_operands(codes: Shared<u32>, tile: u32, j: u32, r: u32) -> [u32; 2];
    /// Those codes as f16, which hold them exactly, in pairs: for each word, codes 0 and 2, then 1 and 3.
    fn shared_halves(codes: Shared<u32>, tile: u32, j: u32, r: u32) -> [[u32; 2]; 2];
    /// The [`scale`](Self::scale) of row `r` of a tile whose scales are there from element `tile` on.
    fn shared_scale(scales: Shared<u16>, tile: u32, r: u32) -> [f32; 2];
    /// Row `r`'s words of part `j` of a tile: channels 8·j + 0 to 3, and 8·j + 4 to 7.
    fn words(codes: Global<u32>, tile: usize, j: u32, r: u32) -> [u32; 2];
    /// d and m of row `r` of a tile; m is 0 where the type has none.
    fn scale(scales: Global<u16>, tile: usize, r: u32) -> [f32; 2];
    /// f32(S) of S = 2^14·A + (2^7·B + C), from A and the rest.
    fn combine(high: i32, rest: i32) -> f32;
    /// Adds a block to `sum`: d, m, f32(S), t and u are as in the [module](self).
    fn finish(sum: f32, scale: [f32; 2], dot: f32, step: f32, u: f32) -> f32;
}

/// Lane c's words of four rows of a tile, and its row's scales as they are stored: a conversion would wait
/// for the load.
#[derive(Clone, Copy)]
pub struct FourBits<S> {
    words: UVec4,
    scale: S,
}

/// Lane c's words of four rows of a tile, of both halves, and its row's scale.
#[derive(Clone, Copy)]
pub struct EightBits {
    words: [UVec4; 2],
    scale: u16,
}

/// The eight bytes of a plane in a part, as two words each.
#[inline(always)]
pub(super) fn planes(part: [UVec4; 2]) -> [[u32; 2]; 3] {
    let [first, second] = part;
    [[first.x, first.y], [first.z, first.w], [second.x, second.y]]
}

/// Lane c = 2j + h has part j of rows 4h to 4h + 3; after three exchanges row 4h + j has its sum in lane c.
#[inline(always)]
const fn quad_row(c: u32) -> u32 {
    4 * (c & 1) + (c >> 1)
}

/// Adds four rows' integers over the four parts; lane c = 2j + h is left with that of row j of its four.
#[simt::device]
fn add_parts(rows: [i32; 4], c: u32) -> i32 {
    let upper = c & 4 != 0;
    let keep = if upper { [rows[2], rows[3]] } else { [rows[0], rows[1]] };
    let give = if upper { [rows[0], rows[1]] } else { [rows[2], rows[3]] };
    let two = [
        keep[0].wrapping_add(warp_shuffle_xor(FULL_MASK, give[0], 4, 32)),
        keep[1].wrapping_add(warp_shuffle_xor(FULL_MASK, give[1], 4, 32)),
    ];
    let upper = c & 2 != 0;
    let (keep, give) = if upper { (two[1], two[0]) } else { (two[0], two[1]) };
    keep.wrapping_add(warp_shuffle_xor(FULL_MASK, give, 2, 32))
}

/// Sums over the three planes of the eight channels in `words`.
#[inline(always)]
fn dot(words: [u32; 2], planes: [[u32; 2]; 3]) -> [i32; 3] {
    planes.map(|p| dp4a(words[0], p[0], dp4a(words[1], p[1], 0)))
}

#[inline(always)]
fn low_and_high(word: u32) -> [u32; 2] {
    [word & 0x0f0f_0f0f, (word >> 4) & 0x0f0f_0f0f]
}

/// The f16 of these bits.
#[inline(always)]
fn half_bits(bits: u16) -> f32 {
    f32_from_f16(f16::from_bits(bits))
}

/// S of four-bit codes, from A and the rest: below 2^30 in magnitude.
#[inline(always)]
fn four_bit_sum(high: i32, rest: i32) -> i32 {
    high.wrapping_shl(14).wrapping_add(rest)
}

/// f32(S) of eight-bit codes, S = 2^14·A + (2^7·B + C), from A and the rest: |A| < 2^19, and the rest is
/// below 2^25 + 2^18. What of it exceeds 14 bits goes to A, so both become floats exactly.
#[inline(always)]
fn eight_bit_dot(high: i32, rest: i32) -> f32 {
    fma(high.wrapping_add(rest >> 14) as f32, 16384.0, (rest & 16383) as f32)
}

macro_rules! four_bits {
    ($name:ident, $scales:literal, $stored:ty, |$bits:ident| $scale:expr) => {
        impl $name {
            /// d and m of what is stored for a row of a tile.
            #[inline(always)]
            fn widen($bits: $stored) -> [f32; 2] {
                $scale
            }
        }
        impl Format for $name {
            type Loaded = FourBits<$stored>;
            const BATCH: u32 = 4;
            const AHEAD: bool = true;
            const TILE_WORDS: u32 = 32;
            const TILE_SCALES: u32 = $scales * GROUP;
            #[inline(always)]
            fn nothing() -> Self::Loaded {
                FourBits { words: UVec4::ZERO, scale: 0 }
            }
            #[simt::device]
            fn load(codes: Global<u32>, scales: Global<u16>, tile: usize, c: u32) -> Self::Loaded {
                let words = codes.load_vector_ahead(tile * Self::TILE_WORDS as usize + 4 * c as usize);
                let row = tile * GROUP as usize + quad_row(c) as usize;
                FourBits { words, scale: scales.cast::<$stored>().load_ahead(row) }
            }
            #[inline(always)]
            fn row(c: u32) -> u32 {
                quad_row(c)
            }
            #[simt::device]
            fn add(loaded: Self::Loaded, part: impl Fn(u32) -> [UVec4; 2], c: u32, sum: f32) -> f32 {
                let part = part(c >> 1);
                let planes = planes(part);
                let sums = loaded.words.to_array().map(|word| {
                    let [a, b, c] = dot(low_and_high(word), planes);
                    four_bit_sum(a, b.wrapping_shl(7).wrapping_add(c))
                });
                let dot = add_parts(sums, c) as f32;
                let [step, u] = [f32::from_bits(part[1].z), f32::from_bits(part[1].w)];
                Self::finish(sum, Self::widen(loaded.scale), dot, step, u)
            }
            #[simt::device]
            fn weight(codes: Global<u32>, scales: Global<u16>, tile: usize, r: u32, k: u32) -> f32 {
                let [low, high] = Self::words(codes, tile, k / 8, r);
                let word = if k & 4 == 0 { low } else { high };
                let [d, m] = Self::scale(scales, tile, r);
                fma(d, (word >> (8 * (k & 3)) & 15) as f32, m)
            }
        }
        impl Codes for $name {
            const HAS_MINIMUM: bool = true;
            type Stored = (u32, $stored);
            #[inline(always)]
            fn none() -> Self::Stored {
                (0, 0)
            }
            #[simt::device]
            fn stored(codes: Global<u32>, scales: Global<u16>, tile: usize, j: u32, r: u32) -> Self::Stored {
                let word = codes.load_ahead(tile * Self::TILE_WORDS as usize + (8 * j + r) as usize);
                (word, scales.cast::<$stored>().load_ahead(tile * GROUP as usize + r as usize))
            }
            #[inline(always)]
            fn operands((word, _): Self::Stored) -> [u32; 2] {
                low_and_high(word)
            }
            #[inline(always)]
            fn widened((_, scale): Self::Stored) -> [f32; 2] {
                Self::widen(scale)
            }
            #[simt::device]
            fn shared_operands(codes: Shared<u32>, tile: u32, j: u32, r: u32) -> [u32; 2] {
                low_and_high(codes.load(tile + 8 * j + r))
            }
            #[simt::device]
            fn shared_halves(codes: Shared<u32>, tile: u32, j: u32, r: u32) -> [[u32; 2]; 2] {
                let word = codes.load(tile + 8 * j + r);
                let pairs = [word, word >> 8];
                // 1024 + q, and 1024 + 16·q.
                let low = pairs.map(|word| sub_f16x2(word & 0x000f_000f | 0x6400_6400, 0x6400_6400));
                let high =
                    pairs.map(|word| fma_f16x2(word & 0x00f0_00f0 | 0x6400_6400, SIXTEENTHS, MINUS_64S));
                [low, high]
            }
            #[simt::device]
            fn shared_scale(scales: Shared<u16>, tile: u32, r: u32) -> [f32; 2] {
                Self::widen(scales.load_vector::<$stored>(tile + $scales * r))
            }
            #[simt::device]
            fn words(codes: Global<u32>, tile: usize, j: u32, r: u32) -> [u32; 2] {
                low_and_high(codes.load_readonly(tile * Self::TILE_WORDS as usize + (8 * j + r) as usize))
            }
            #[simt::device]
            fn scale(scales: Global<u16>, tile: usize, r: u32) -> [f32; 2] {
                let row = tile * GROUP as usize + r as usize;
                Self::widen(scales.cast::<$stored>().load_readonly(row))
            }
            #[inline(always)]
            fn combine(high: i32, rest: i32) -> f32 {
                four_bit_sum(high, rest) as f32
            }
            #[inline(always)]
            fn finish(sum: f32, [d, m]: [f32; 2], dot: f32, step: f32, u: f32) -> f32 {
                fma(m, u, fma(d * step, dot, sum))
            }
        }
    };
}
four_bits!(Q4_1, 2, u32, |pair| [half_bits(pair as u16), half_bits((pair >> 16) as u16)]);
four_bits!(Q4_0, 1, u16, |d| [half_bits(d), -8.0 * half_bits(d)]);

impl Format for Q8_0 {
    type Loaded = EightBits;
    const BATCH: u32 = 4;
    const AHEAD: bool = true;
    const TILE_WORDS: u32 = 64;
    const TILE_SCALES: u32 = GROUP;
    #[inline(always)]
    fn nothing() -> EightBits {
        EightBits { words: [UVec4::ZERO; 2], scale: 0 }
    }
    #[simt::device]
    fn load(codes: Global<u32>, scales: Global<u16>, tile: usize, c: u32) -> EightBits {
        let at = tile * Self::TILE_WORDS as usize + 4 * c as usize;
        let words = [codes.load_vector_ahead(at), codes.load_vector_ahead(at + 32)];
        EightBits { words, scale: scales.load_ahead(tile * GROUP as usize + quad_row(c) as usize) }
    }
    #[inline(always)]
    fn row(c: u32) -> u32 {
        quad_row(c)
    }
    #[simt::device]
    fn add(loaded: EightBits, part: impl Fn(u32) -> [UVec4; 2], c: u32, sum: f32) -> f32 {
        let part = part(c >> 1);
        let planes = planes(part);
        let [first, second] = loaded.words.map(|words| words.to_array());
        let (mut high, mut rest) = ([0; 4], [0; 4]);
        unroll!(for r in 0..4 {
            let [a, b, c] = dot([first[r], second[r]], planes);
            high[r] = a;
            rest[r] = (b << 7) + c;
        });
        let dot = eight_bit_dot(add_parts(high, c), add_parts(rest, c));
        let [step, u] = [f32::from_bits(part[1].z), f32::from_bits(part[1].w)];
        Self::finish(sum, [half_bits(loaded.scale), 0.0], dot, step, u)
    }
    #[simt::device]
    fn weight(codes: Global<u32>, scales: Global<u16>, tile: usize, r: u32, k: u32) -> f32 {
        let [first, second] = Self::words(codes, tile, k / 8, r);
        let word = if k & 4 == 0 { first } else { second };
        let code = (word >> (8 * (k & 3))) as u8 as i8;
        Self::scale(scales, tile, r)[0] * code as f32
    }
}

impl Codes for Q8_0 {
    const HAS_MINIMUM: bool = false;
    type Stored = ([u32; 2], u16);
    #[inline(always)]
    fn none() -> Self::Stored {
        ([0; 2], 0)
    }
    #[simt::device]
    fn stored(codes: Global<u32>, scales: Global<u16>, tile: usize, j: u32, r: u32) -> Self::Stored {
        let at = tile * Self::TILE_WORDS as usize + (8 * j + r) as usize;
        let words = [codes.load_ahead(at), codes.load_ahead(at + 32)];
        (words, scales.load_ahead(tile * GROUP as usize + r as usize))
    }
    #[inline(always)]
    fn operands((words, _): Self::Stored) -> [u32; 2] {
        words
    }
    #[inline(always)]
    fn widened((_, scale): Self::Stored) -> [f32; 2] {
        [half_bits(scale), 0.0]
    }
    #[simt::device]
    fn shared_operands(codes: Shared<u32>, tile: u32, j: u32, r: u32) -> [u32; 2] {
        let at = tile + 8 * j + r;
        [codes.load(at), codes.load(at + 32)]
    }
    #[simt::device]
    fn shared_halves(codes: Shared<u32>, tile: u32, j: u32, r: u32) -> [[u32; 2]; 2] {
        Self::shared_operands(codes, tile, j, r).map(|word| {
            // 1024 + 128 + q.
            let raised = word ^ 0x8080_8080;
            [0x7270, 0x7371].map(|bytes| sub_f16x2(byte_perm(raised, 0x6400_0000, bytes), 0x6480_6480))
        })
    }
    #[simt::device]
    fn shared_scale(scales: Shared<u16>, tile: u32, r: u32) -> [f32; 2] {
        [half_bits(scales.load(tile + r)), 0.0]
    }
    #[simt::device]
    fn words(codes: Global<u32>, tile: usize, j: u32, r: u32) -> [u32; 2] {
        let at = tile * Self::TILE_WORDS as usize + (8 * j + r) as usize;
        [codes.load_readonly(at), codes.load_readonly(at + 32)]
    }
    #[simt::device]
    fn scale(scales: Global<u16>, tile: usize, r: u32) -> [f32; 2] {
        [half_bits(scales.load_readonly(tile * GROUP as usize + r as usize)), 0.0]
    }
    #[inline(always)]
    fn combine(high: i32, rest: i32) -> f32 {
        eight_bit_dot(high, rest)
    }
    #[inline(always)]
    fn finish(sum: f32, [d, _]: [f32; 2], dot: f32, step: f32, _: f32) -> f32 {
        fma(d * step, dot, sum)
    }
}
