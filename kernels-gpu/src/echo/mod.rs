//! Keys and values in fewer bits, by rounding alone: the system that `docs/adding-a-system.md` adds.
//!
//! # Mathematics
//! An f16 has a sign, 5 bits of exponent and 10 of mantissa. Of the mantissa the last `dropped` bits are
//! rounded away, to the nearest of what is left, ties to even: for 6 bits of mantissa an error of at most
//! 2^-7 of the value. What would become an infinity is the largest number of that precision; infinities and
//! NaN stay as they are.
//!
//! # Layout and bytes
//! Rows `[tokens, kv_heads, D]` of keys and of values: 2 bytes read and 2 written an element.
//!
//! # Work split
//! A thread an element of keys and one of values.

use half::f16;
use simt::{Global, GlobalMut, kernel, thread};

/// Threads of a block of [`round`](fn@round).
pub const THREADS: u32 = 256;
/// The most bits of a mantissa that can be dropped: all but one.
pub const MOST_DROPPED: u32 = 9;

/// `x` with `dropped` bits fewer, 0 to [`MOST_DROPPED`].
#[inline(always)]
pub fn rounded(x: f16, dropped: u32) -> f16 {
    const INFINITY: u32 = 0x7c00;
    let (sign, size) = (x.to_bits() as u32 & 0x8000, x.to_bits() as u32 & 0x7fff);
    if size >= INFINITY {
        return x;
    }
    let unit = 1 << dropped;
    // Half a unit, and a little less where the bit that stays is even: a tie goes there.
    let up = (size + (unit - 1) / 2 + ((size >> dropped) & 1)) & !(unit - 1);
    // Without dropped bits there is nothing to round.
    let nearest = if dropped == 0 { size } else { up };
    let largest = INFINITY - unit;
    f16::from_bits((sign | if nearest > largest { largest } else { nearest }) as u16)
}

/// Rounds `count` elements of `keys` and of `values`. Grid \[count / [`THREADS`]\], rounded up.
#[kernel(system = echo, max_threads = 256)]
pub fn round(
    keys: Global<f16>,
    values: Global<f16>,
    rounded_keys: GlobalMut<f16>,
    rounded_values: GlobalMut<f16>,
    count: u32,
    dropped: u32,
) {
    let i = thread::index_1d();
    if i < count as usize {
        rounded_keys.store(i, rounded(keys.load(i), dropped));
        rounded_values.store(i, rounded(values.load(i), dropped));
    }
}

/// Every kernel instance of the system.
#[cfg(not(target_arch = "nvptx64"))]
pub fn kernels() -> impl Iterator<Item = &'static simt::KernelInfo> {
    round::INSTANCES.iter()
}
