//! Rows of the embedding, from the packed weights that the output layer uses too.
//!
//! # Mathematics
//! x = row `token` of W, each weight as [`format`](super::format) says, rounded once to f32. A token outside
//! the vocabulary gives NaN: bad input shows and reads nothing.
//!
//! # Work split and bytes
//! One block of 256 threads a token; k weights read (k/32 · 20 bytes of Q4_1), 4·k written.

use super::format::{Format, GROUP, Q4_0, Q4_1, Q8_0};
use half::{bf16, f16};
use simt::math::{NAN_BITS, canonical_nan};
use simt::{Global, GlobalMut, kernel, thread};

/// The rows of `tokens` \[tokens\] of a matrix of `rows` rows and `blocks` blocks, to `out` [tokens, k].
/// Grid: a block of up to 256 threads a token.
#[kernel(system = model, instances(Q4_1, Q4_0, Q8_0, f16, bf16, f32), max_threads = 256, overlaps)]
pub fn embed<F: Format>(
    codes: Global<u32>,
    scales: Global<u16>,
    tokens: Global<u32>,
    out: GlobalMut<f32>,
    rows: u32,
    blocks: u32,
) {
    let at = thread::block_idx_x() as usize;
    let token = tokens.load(at);
    let columns = blocks * 32;
    let mut k = thread::thread_idx_x();
    while k < columns {
        let value = if token < rows {
            let tile = (token / GROUP) as usize * blocks as usize + (k / 32) as usize;
            F::weight(codes, scales, tile, token % GROUP, k % 32)
        } else {
            f32::from_bits(NAN_BITS)
        };
        out.store(at * columns as usize + k as usize, canonical_nan(value));
        k += thread::block_dim_x();
    }
}
