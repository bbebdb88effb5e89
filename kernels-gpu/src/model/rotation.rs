//! Rotary position embedding of queries and keys, and their way to the types that caches take.
//!
//! # Mathematics
//! For pair i < rotary/2 of a head, angle a = f32(position)·frequency_i (one rounding), with the pair (x, y):
//!
//! ```text
//! x' = fma(x, cos a, −(y·sin a))        y' = fma(x, sin a, y·cos a)
//! ```
//!
//! A pair is channels 2i and 2i + 1 (`INTERLEAVED`, as GGUF files of Llama store heads) or i and i + rotary/2 (half-split).
//! Channels from `rotary` on, and values, pass as they are. Frequencies θ^(−2i/rotary) come as a table that the host
//! computes in f64.
//!
//! # Layout and bytes
//! `qkv` f32 [tokens, (q_heads + 2·kv_heads)·D], the output of one product with Q, K and V rows one below another, goes to
//! `queries` [tokens, q_heads, D], `keys` and `values` [tokens, kv_heads, D]. `positions` \[tokens\] is in device memory: a
//! captured step finds the next position there.
//!
//! # Work split
//! A thread a pair; grid (⌈pairs of a token / 128⌉, tokens) of 128 threads.

use crate::Element;
use half::{bf16, f16};
use simt::math::{canonical_nan, fma, sin_cos};
use simt::{Global, GlobalMut, Pod, Zeroable, bits, kernel, thread};

/// Threads of a block.
pub const ROPE_THREADS: u32 = 128;

/// The extents of a token's heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RopeShape {
    /// Query heads.
    pub q_heads: u32,
    /// Key heads, and value heads.
    pub kv_heads: u32,
    /// D, even.
    pub head_dim: u32,
    /// Channels of a head that turn, even, at most D.
    pub rotary: u32,
}

impl RopeShape {
    /// Pairs of a token.
    #[inline(always)]
    pub const fn pairs(self) -> u32 {
        (self.q_heads + 2 * self.kv_heads) * (self.head_dim / 2)
    }
}

/// Channels of pair `i` of a head.
#[inline(always)]
pub const fn pair_channels(i: u32, rotary: u32, interleaved: bool) -> [u32; 2] {
    if interleaved || i >= rotary / 2 { [2 * i, 2 * i + 1] } else { [i, i + rotary / 2] }
}

/// A pair turned by `angle`.
#[inline(always)]
pub fn turn(x: f32, y: f32, angle: f32) -> [f32; 2] {
    let (sine, cosine) = sin_cos(angle);
    [fma(x, cosine, -(y * sine)), fma(x, sine, y * cosine)]
}

/// See the [module](self). Grid (⌈[`pairs`](RopeShape::pairs) / 128⌉, tokens) of 128 threads.
#[kernel(
    system = model,
    instances((f32, 0), (f32, 1), (f16, 0), (f16, 1), (bf16, 0), (bf16, 1)),
    max_threads = 128,
    overlaps
)]
pub fn rope<E: Element, const INTERLEAVED: u32>(
    qkv: Global<f32>,
    positions: Global<u32>,
    frequencies: Global<f32>,
    queries: GlobalMut<E>,
    keys: GlobalMut<E>,
    values: GlobalMut<E>,
    shape: RopeShape,
) {
    let (item, token) =
        (thread::block_idx_x() * ROPE_THREADS + thread::thread_idx_x(), thread::block_idx_y());
    if item >= shape.pairs() {
        return;
    }
    let half = shape.head_dim / 2;
    let (head, i) = (bits::div_u32(item, half), bits::rem_u32(item, half));
    let [first, second] = pair_channels(i, shape.rotary, INTERLEAVED == 1);
    let heads = shape.q_heads + 2 * shape.kv_heads;
    let from = (token as usize * heads as usize + head as usize) * shape.head_dim as usize;
    let mut pair = [qkv.load(from + first as usize), qkv.load(from + second as usize)];
    if head < shape.q_heads + shape.kv_heads && i < shape.rotary / 2 {
        let angle = positions.load(token as usize) as f32 * frequencies.load(i as usize);
        pair = turn(pair[0], pair[1], angle);
    }
    let (target, target_heads, target_head) = if head < shape.q_heads {
        (queries, shape.q_heads, head)
    } else if head < shape.q_heads + shape.kv_heads {
        (keys, shape.kv_heads, head - shape.q_heads)
    } else {
        (values, shape.kv_heads, head - shape.q_heads - shape.kv_heads)
    };
    let to = (token as usize * target_heads as usize + target_head as usize) * shape.head_dim as usize;
    target.store(to + first as usize, E::from_f32(canonical_nan(pair[0])));
    target.store(to + second as usize, E::from_f32(canonical_nan(pair[1])));
}
