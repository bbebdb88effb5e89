//! Launches that overlap: each launch of a chain reads what every block of the one before it wrote, and
//! overwrites what that one read. A launch that did not wait would give other words.

use super::word;
use crate::mix;
use simt::{Global, GlobalMut, kernel, thread};

/// Reads of each element.
pub const READS: u32 = 12;
/// Threads of a block.
pub const THREADS: u32 = 256;

/// A link of the chain, which may start while the link before it runs.
#[kernel(system = probe, max_threads = 256, overlaps)]
pub fn link(from: Global<u32>, to: GlobalMut<u32>, n: u32, step: u32) {
    fold(from, to, n, step);
}

/// A link that starts when all before it is done, and lets the next one start at once.
#[kernel(system = probe, args = link, max_threads = 256)]
pub fn link_in_order(from: Global<u32>, to: GlobalMut<u32>, n: u32, step: u32) {
    thread::let_next_start();
    fold(from, to, n, step);
}

/// `to[i]` of `READS` elements of `from` that lie all over it, each read after the one before it is known and
/// with each of the three hints. Both hold `n` elements, at least `READS` and less than 2^31.
#[inline(always)]
fn fold(from: Global<u32>, to: GlobalMut<u32>, n: u32, step: u32) {
    let i = thread::index_1d() as u32;
    if i >= n {
        return;
    }
    let apart = n / READS;
    let (mut at, mut value) = (i, word(step, i, 0));
    for read in 0..READS {
        let x = match read % 3 {
            0 => from.load(at as usize),
            1 => from.load_readonly(at as usize),
            _ => from.load_streaming(at as usize),
        };
        value = mix((value as u64) << 32 | x as u64) as u32;
        // A bit of what was read decides where the next read is.
        at += apart - (x & 1);
        if at >= n {
            at -= n;
        }
    }
    to.store(i as usize, value);
}
