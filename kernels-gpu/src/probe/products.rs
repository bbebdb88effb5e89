//! Products of groups of four warps, in every width, format and place of the operands.
//!
//! # Mathematics
//! With A [64, 2·K], B [N, 2·K] and C [64, N] of random elements of a class, K elements being 32 bytes: D = C
//! + A·Bᵀ as two products, and E = A'·B'ᵀ of the second halves of the rows as one.
//!
//! # Layout
//! Rows of A and B are 64 bytes, two steps of 32. In place 1 operands are not swizzled: a step is a tile of
//! its own, a group of eight rows 256 bytes. In place 2 they are swizzled over rows of 32 bytes, a step again
//! a tile; in 3 over rows of 64 bytes, in 4 over rows of 128, of which half is used. In place 0 A is in
//! registers, and B as in 1.
//!
//! # Work split
//! A block of 128 threads for each pair of D and E.

use super::matrices::{Bf16, F16, I8, Operands};
use crate::mix;
use simt::wgmma::{self, Tile};
use simt::{GlobalMut, Shared, SharedPlan, Swizzle, bulk, kernel, thread, unroll, warp};

/// Rows of A.
const ROWS: u32 = 64;
/// Words of a row of A or B: two steps of eight.
const WORDS: u32 = 16;

/// What is multiplied.
pub trait Product: Operands {
    /// The format.
    type Format: wgmma::Format;
    /// Sums of bits.
    fn sums<const L: usize>(words: [u32; L]) -> [Sum<Self>; L];
    /// Bits of sums.
    fn words<const L: usize>(sums: [Sum<Self>; L]) -> [u32; L];
}

type Sum<P> = <<P as Product>::Format as wgmma::Format>::Sum;

macro_rules! product {
    ($name:ident, |$word:ident| $sum:expr, |$total:ident| $bits:expr) => {
        impl Product for $name {
            type Format = wgmma::$name;
            #[inline(always)]
            fn sums<const L: usize>(words: [u32; L]) -> [Sum<Self>; L] {
                words.map(|$word| $sum)
            }
            #[inline(always)]
            fn words<const L: usize>(sums: [Sum<Self>; L]) -> [u32; L] {
                sums.map(|$total| $bits)
            }
        }
    };
}
product!(F16, |word| f32::from_bits(word), |sum| sum.to_bits());
product!(Bf16, |word| f32::from_bits(word), |sum| sum.to_bits());
product!(I8, |word| word as i32, |sum| sum as u32);

/// How an operand lies.
#[derive(Clone, Copy)]
struct Lay {
    array: Shared<u32>,
    swizzle: Swizzle,
    rows: u32,
}

impl Lay {
    #[inline(always)]
    const fn new(array: Shared<u32>, rows: u32, place: usize) -> Self {
        let swizzle = match place {
            2 => Swizzle::B32,
            3 => Swizzle::B64,
            4 => Swizzle::B128,
            _ => Swizzle::None,
        };
        Lay { array, swizzle, rows }
    }

    /// Where word `word` of a row is.
    #[inline(always)]
    fn place(self, row: u32, word: u32) -> u32 {
        let (group, row, step, byte) = (row / 8, row % 8, word / 8, 4 * (word % 8));
        let offset = match self.swizzle {
            Swizzle::None => 32 * self.rows * step + 256 * group + 128 * (byte / 16) + 16 * row + byte % 16,
            Swizzle::B32 => 32 * self.rows * step + 256 * group + 32 * row + byte,
            swizzle => swizzle.row() * (8 * group + row) + 32 * step + byte,
        };
        self.swizzle.place(offset) / 4
    }

    /// The rows' step.
    #[inline(always)]
    const fn tile(self, step: u32) -> Tile<u32> {
        match self.swizzle {
            Swizzle::None => Tile::new(self.array, 8 * self.rows * step, 256, 128),
            Swizzle::B32 => Tile::swizzled(self.array, 8 * self.rows * step, Swizzle::B32, 256),
            swizzle => Tile::swizzled(self.array, 8 * step, swizzle, 8 * swizzle.row()),
        }
    }
}

/// Shared memory: A, and B of at most 256 rows; at most 128 bytes a row.
pub const fn layout() -> (Shared<u32>, Shared<u32>, u32) {
    let mut plan = SharedPlan::new();
    let (a, b) = (plan.tile(ROWS * 32, Swizzle::B128), plan.tile(256 * 32, Swizzle::B128));
    (a, b, plan.bytes())
}

/// D and E of each block. `out` is [blocks, 128 threads, 2·L] words.
#[kernel(
    system = probe,
    instances(
        (F16, 4, 0), (F16, 8, 1), (F16, 16, 2), (F16, 32, 3), (F16, 48, 4), (F16, 64, 0), (F16, 96, 1), (F16, 128, 4),
        (Bf16, 4, 4), (Bf16, 16, 1), (Bf16, 32, 0), (Bf16, 64, 3), (Bf16, 96, 2),
        (I8, 4, 1), (I8, 8, 0), (I8, 16, 0), (I8, 32, 2), (I8, 48, 1), (I8, 64, 4), (I8, 96, 0), (I8, 128, 3)
    ),
    only_sm = 90,
    max_threads = 128
)]
pub fn products<P: Product, const L: usize, const PLACE: usize>(out: GlobalMut<u32>, seed: u32, class: u32) {
    let (t, block) = (thread::thread_idx_x(), thread::block_idx_x());
    let (in_a, in_b, _) = layout();
    let (a, b) = (Lay::new(in_a, ROWS, PLACE), Lay::new(in_b, 2 * L as u32, PLACE));
    let random =
        |of: u32, k: u32| mix((seed as u64) << 40 ^ (block as u64) << 20 ^ (of as u64) << 16 ^ k as u64);
    let of_a = |row: u32, word: u32| P::operand(random(0, row * WORDS + word), class);
    let mut at = t;
    while at < ROWS * WORDS {
        in_a.store(a.place(at / WORDS, at % WORDS), of_a(at / WORDS, at % WORDS));
        at += 128;
    }
    let mut at = t;
    while at < 2 * L as u32 * WORDS {
        in_b.store(b.place(at / WORDS, at % WORDS), P::operand(random(1, at), class));
        at += 128;
    }
    bulk::fence_shared();
    thread::sync_threads();

    let mut c = [0u32; L];
    unroll!(for i in 0..L, at_most 128 {
        c[i] = P::accumulator(random(2, t * L as u32 + i as u32), class);
    });
    let (g, q) = (16 * (t / 32) + warp::lane_id() / 4, warp::lane_id() & 3);
    let registers = |step: u32| {
        let word = |row: u32, vector: u32| of_a(row, 8 * step + 4 * vector + q);
        [word(g, 0), word(g + 8, 0), word(g, 1), word(g + 8, 1)]
    };
    let (first, second) = (registers(0), registers(1));
    let group = wgmma::begin();
    let sums = group.resume(P::sums(c));
    let d = if PLACE == 0 {
        let sums = group.multiply_add::<P::Format, L>(sums, first, b.tile(0));
        group.multiply_add::<P::Format, L>(sums, second, b.tile(1))
    } else {
        let sums = group.multiply_add::<P::Format, L>(sums, a.tile(0), b.tile(0));
        group.multiply_add::<P::Format, L>(sums, a.tile(1), b.tile(1))
    };
    group.commit();
    let [d] = wgmma::wait::<0, _, L, 1>([d]);
    let group = wgmma::begin();
    let e = if PLACE == 0 {
        group.multiply::<P::Format, L>(second, b.tile(1))
    } else {
        group.multiply::<P::Format, L>(a.tile(1), b.tile(1))
    };
    group.commit();
    let [e] = wgmma::wait::<0, _, L, 1>([e]);
    let (d, e) = (P::words(d), P::words(e));
    let start = ((block * 128 + t) * 2) as usize * L;
    unroll!(for i in 0..L, at_most 128 {
        out.store(start + i, d[i]);
        out.store(start + L + i, e[i]);
    });
}
