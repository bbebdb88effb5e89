//! The tensor cores and the copies that feed them.

use super::mix;
use simt::tensor::{self, load_matrix, load_matrix_transposed};
use simt::{Global, GlobalMut, Shared, SharedPlan, async_copy, kernel, thread, unroll, warp};

/// Registers that a lane of an MMA probe writes.
pub const REGISTERS: u32 = 4;

/// An operand format of the MMA.
pub trait Operands: Copy + Send + Sync + 'static {
    /// One MMA on bits.
    fn multiply(a: [u32; 4], b: [u32; 2], c: [u32; 4]) -> [u32; 4];
    /// An operand register: two or four elements of the class of numbers `class`.
    fn operand(random: u64, class: u32) -> u32;
    /// An accumulator.
    fn accumulator(random: u64, class: u32) -> u32;
}

/// Classes of numbers that the float probes draw from.
pub const CLASSES: u32 = 9;

/// A 16-bit float of the class: with `E` exponent and `M` mantissa bits.
#[inline(always)]
fn half<const E: u32, const M: u32>(random: u32, class: u32) -> u32 {
    let (top, bias) = ((1 << E) - 1, (1 << (E - 1)) - 1);
    let (sign, fraction) = (random >> 31, random & ((1 << M) - 1));
    let (roll, step) = (random >> 16 & 63, random >> 22 & 7);
    let make = |exponent: u32, fraction: u32| sign << 15 | exponent << M | fraction;
    let finite = random & 0xffff & !(((random >> M & top) == top) as u32 * (1 << M));
    match class {
        // Around one.
        0 | 4 => make(bias - 4 + step, fraction),
        // Any finite bits.
        1 => finite,
        // Subnormals beside the smallest normal numbers and zeros.
        2 => make(if roll < 16 { 1 + (step & 3) } else { 0 }, if roll > 50 { 0 } else { fraction }),
        // Now and then an infinity or a NaN.
        3 => {
            if roll == 0 {
                make(top, (step & 1) * fraction)
            } else {
                finite
            }
        }
        // Signed zeros and a few ones.
        5 => make(if roll == 0 { bias } else { 0 }, 0),
        // Three bits of mantissa: sums that cancel.
        6 => make(bias - 2 + step % 3, fraction & (7 << (M - 3))),
        // The largest.
        7 => make(top - 1 - step % 3, fraction),
        // Subnormals against anything.
        _ => {
            if roll < 32 {
                make(0, fraction)
            } else {
                finite
            }
        }
    }
}

/// An f32 to add to: of the class.
#[inline(always)]
fn single(random: u64, class: u32) -> u32 {
    let (sign, fraction) = ((random as u32) << 31, (random >> 8) as u32 & 0x7f_ffff);
    let (roll, step) = ((random >> 40) as u32 & 63, (random >> 48) as u32);
    let make = |exponent: u32, fraction: u32| sign | exponent << 23 | fraction;
    match class {
        4 => match roll {
            0..6 => make(255, 0),
            6..12 => make(255, fraction | 1),
            12..20 => make(0, 0),
            20..32 => make(0, fraction),
            32..44 => make(254, fraction),
            _ => (random >> 32) as u32,
        },
        5 => match roll {
            0..40 => make(0, 0),
            40..52 => make(0, fraction),
            _ => make(127, 0),
        },
        6 => {
            if roll < 32 {
                make(0, 0)
            } else {
                make(125 + step % 6, fraction & 0x70_0000)
            }
        }
        7 => make(if roll < 32 { 254 } else { 200 + step % 54 }, fraction),
        2 | 8 => match roll {
            0..20 => make(0, 0),
            20..32 => make(0, fraction),
            _ => make(step % 130, fraction),
        },
        _ => {
            if roll < 12 {
                0
            } else {
                make(107 + step % 40, fraction)
            }
        }
    }
}

/// f16 operands.
#[derive(Clone, Copy, Debug)]
pub struct F16;
/// bf16 operands.
#[derive(Clone, Copy, Debug)]
pub struct Bf16;
/// int8 operands.
#[derive(Clone, Copy, Debug)]
pub struct I8;

macro_rules! float_operands {
    ($name:ident, $e:literal, $m:literal, $mma:ident) => {
        impl Operands for $name {
            #[inline(always)]
            fn multiply(a: [u32; 4], b: [u32; 2], c: [u32; 4]) -> [u32; 4] {
                tensor::$mma(a, b, c.map(f32::from_bits)).map(f32::to_bits)
            }
            #[inline(always)]
            fn operand(random: u64, class: u32) -> u32 {
                half::<$e, $m>(random as u32, class) | half::<$e, $m>((random >> 32) as u32, class) << 16
            }
            #[inline(always)]
            fn accumulator(random: u64, class: u32) -> u32 {
                single(random, class)
            }
        }
    };
}
float_operands!(F16, 5, 10, mma_f16);
float_operands!(Bf16, 8, 7, mma_bf16);

impl Operands for I8 {
    #[inline(always)]
    fn multiply(a: [u32; 4], b: [u32; 2], c: [u32; 4]) -> [u32; 4] {
        tensor::mma_i8(a, b, c.map(|x| x as i32)).map(|x| x as u32)
    }
    #[inline(always)]
    fn operand(random: u64, class: u32) -> u32 {
        // Class 0: the extremes, where products are largest.
        if class == 0 { ((random as u32 & 0x0101_0101) * 0xff) ^ 0x8080_8080 } else { random as u32 }
    }
    #[inline(always)]
    fn accumulator(random: u64, _: u32) -> u32 {
        random as u32
    }
}

/// One MMA a warp, of operands drawn from a class.
#[kernel(system = probe, instances(F16, Bf16, I8))]
pub fn multiply<O: Operands>(out: GlobalMut<u32>, seed: u32, class: u32) {
    let i = thread::index_1d();
    let word = |k: u64| mix((seed as u64) << 40 ^ (i as u64) << 8 ^ k);
    let mut a = [0u32; 4];
    let mut b = [0u32; 2];
    let mut c = [0u32; 4];
    unroll!(for k in 0..4 {
        a[k] = O::operand(word(k as u64), class);
        c[k] = O::accumulator(word(8 + k as u64), class);
    });
    unroll!(for k in 0..2 {
        b[k] = O::operand(word(4 + k as u64), class);
    });
    let d = O::multiply(a, b, c);
    unroll!(for k in 0..4 {
        out.store(i * REGISTERS as usize + k, d[k]);
    });
}

/// Shared memory of [`fn@matrices`]: 32 rows of 8 elements of 16 bits.
pub const fn rows() -> (Shared<u16>, u32) {
    let mut plan = SharedPlan::new();
    (plan.array(32 * 8), plan.bytes())
}

/// `ldmatrix`, plain and transposed, of rows in an order of their own: one warp.
#[kernel(system = probe, max_threads = 32)]
pub fn matrices(out: GlobalMut<u32>, seed: u32) {
    let lane = warp::lane_id();
    let (shared, _) = rows();
    unroll!(for k in 0..8 {
        let at = lane * 8 + k as u32;
        shared.store(at, mix((seed as u64) << 32 ^ at as u64) as u16);
    });
    warp::sync_warp(warp::FULL_MASK);
    // An odd multiple permutes the rows.
    let row = (lane * (2 * seed + 1)) & 31;
    let plain = load_matrix(shared, row * 8);
    let transposed = load_matrix_transposed(shared, row * 8);
    unroll!(for k in 0..4 {
        out.store((lane * 8) as usize + k, plain[k]);
        out.store((lane * 8) as usize + 4 + k, transposed[k]);
    });
}

/// Stages of the ring of [`fn@copies`].
pub const STAGES: u32 = 4;
/// Words of one stage: 16 bytes a thread of a warp.
pub const STAGE_WORDS: u32 = 128;

/// Shared memory of [`fn@copies`].
pub const fn ring() -> (Shared<u32>, u32) {
    let mut plan = SharedPlan::new();
    (plan.array(STAGES * STAGE_WORDS), plan.bytes())
}

/// A ring of asynchronous copies: sums `tiles` tiles of 128 words, of which those from `present` on count as
/// zero. One warp; `out` \[32\].
#[kernel(system = probe, max_threads = 32)]
pub fn copies(source: Global<u32>, out: GlobalMut<u32>, tiles: u32, present: u32) {
    let lane = warp::lane_id();
    let (ring, _) = ring();
    let start = |tile: u32| {
        if tile < tiles {
            let at = (tile % STAGES) * STAGE_WORDS + 4 * lane;
            let from = (tile * STAGE_WORDS + 4 * lane) as usize;
            if tile.is_multiple_of(2) && tile < present {
                ring.copy_async(at, source, from);
            } else {
                ring.copy_async_or_zero(at, source, from, tile < present);
            }
        }
        async_copy::commit();
    };
    for tile in 0..STAGES - 1 {
        start(tile);
    }
    let mut sum = 0u32;
    for tile in 0..tiles {
        async_copy::wait::<{ STAGES as usize - 2 }>();
        warp::sync_warp(warp::FULL_MASK);
        start(tile + STAGES - 1);
        // Another lane's bytes, so that the barrier matters.
        let words: [u32; 4] = ring.load_vector((tile % STAGES) * STAGE_WORDS + 4 * (lane ^ 5));
        sum = sum
            .rotate_left(7)
            .wrapping_add(words[0] ^ words[1].rotate_left(8) ^ words[2] ^ words[3].rotate_left(16));
    }
    async_copy::wait::<0>();
    out.store(lane as usize, sum);
}
