//! Quantizing activations, with what comes before it: nothing, RMSNorm or SwiGLU.
//!
//! # Mathematics
//! ```text
//! Plain:   v_i = x_i
//! Normed:  v_i = (x_i · r) · w_i,  r = 1 / sqrt(Σ x² / k + ε)
//! Gated:   v_i = (g_i / (1 + 2^(−g_i·log2 e))) · u_i, with g = x_i and u = x_(k + i): SiLU(g)·u
//! ```
//! Then each block of 32 v becomes a record ([`fixed`](super::fixed)).
//!
//! Σ x² is a fixed tree: channel i belongs to chain i mod 1024 (thread (i / 4) mod 256, component i mod 4), a chain of
//! multiply-adds in the order of i; a thread's four chains are added as (0 + 1) + (2 + 3), the 32 threads of a warp
//! as butterflies, the eight warps one after another.
//!
//! # Layout and bytes
//! `x` f32 [tokens, row] read (4·k bytes a token, 8·k for SwiGLU; RMSNorm reads twice, the second time from a cache),
//! `records` [tokens, k / 32] of 128 bytes written: 4·k a token.
//!
//! # Work split
//! One block of 256 threads a token; a thread takes four neighbouring channels at a time, so eight lanes have a block of
//! channels: its largest magnitude and its sum are three exchanges each.

use super::fixed::{self, BLOCK, PART_WORDS, RECORD_WORDS, digits, magnitude};
use glam::Vec4;
use simt::math::{exp2, fma, rsqrt};
use simt::warp::{self, FULL_MASK, warp_shuffle_xor, warp_sum_f32};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, bits, kernel, thread, unroll};

/// Threads of a block, here and in the matrix-vector kernels, which do the same ahead of their product.
pub const THREADS: u32 = 256;

/// log2(e).
const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// Where a token's values are.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct SourceShape {
    /// k, a multiple of 32.
    pub columns: u32,
    /// Elements of x from one token to the next, a multiple of 4.
    pub stride: u32,
    /// ε of RMSNorm.
    pub epsilon: f32,
    /// Zero.
    pub padding: u32,
}

/// Shared memory of the sum of squares.
pub const fn sums_layout() -> (Shared<f32>, u32) {
    let mut plan = SharedPlan::new();
    let sums = plan.array(THREADS / 32);
    (sums, plan.bytes())
}

/// What comes before quantizing.
pub trait Source {
    /// What the block's threads find out about the token first: r of RMSNorm. Uses a barrier if `sums` is used.
    fn prepare(x: Global<f32>, start: usize, shape: SourceShape, sums: Shared<f32>) -> f32;
    /// v of channels `at` to `at + 3`.
    fn four(
        x: Global<f32>,
        weight: Global<f32>,
        start: usize,
        at: u32,
        shape: SourceShape,
        r: f32,
    ) -> [f32; 4];
}

/// x itself.
#[derive(Clone, Copy, Debug)]
pub struct Plain;
/// RMSNorm of x.
#[derive(Clone, Copy, Debug)]
pub struct Normed;
/// SwiGLU of x.
#[derive(Clone, Copy, Debug)]
pub struct Gated;

#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
fn load_four(x: Global<f32>, at: usize) -> [f32; 4] {
    // Another launch of the same graph wrote it, this one does not; but plain loads may share the first-level cache.
    x.load_vector::<Vec4>(at).to_array()
}

impl Source for Plain {
    #[inline(always)]
    fn prepare(_: Global<f32>, _: usize, _: SourceShape, _: Shared<f32>) -> f32 {
        1.0
    }
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn four(x: Global<f32>, _: Global<f32>, start: usize, at: u32, _: SourceShape, _: f32) -> [f32; 4] {
        load_four(x, start + at as usize)
    }
}

impl Source for Normed {
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn prepare(x: Global<f32>, start: usize, shape: SourceShape, sums: Shared<f32>) -> f32 {
        let mut chains = [0f32; 4];
        let mut at = thread::thread_idx_x() * 4;
        while at < shape.columns {
            let four = load_four(x, start + at as usize);
            unroll!(for i in 0..4 {
                chains[i] = fma(four[i], four[i], chains[i]);
            });
            at += 4 * THREADS;
        }
        let sum = warp_sum_f32((chains[0] + chains[1]) + (chains[2] + chains[3]));
        if warp::lane_id() == 0 {
            sums.store(thread::thread_idx_x() / 32, sum);
        }
        thread::sync_threads();
        let mut total = sums.load(0);
        unroll!(for w in 1..8 {
            total += sums.load(w as u32);
        });
        norm_factor(total, shape.columns, shape.epsilon)
    }
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn four(x: Global<f32>, weight: Global<f32>, start: usize, at: u32, _: SourceShape, r: f32) -> [f32; 4] {
        let (x, w) = (load_four(x, start + at as usize), load_four(weight, at as usize));
        [normed(x[0], r, w[0]), normed(x[1], r, w[1]), normed(x[2], r, w[2]), normed(x[3], r, w[3])]
    }
}

impl Source for Gated {
    #[inline(always)]
    fn prepare(_: Global<f32>, _: usize, _: SourceShape, _: Shared<f32>) -> f32 {
        1.0
    }
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn four(x: Global<f32>, _: Global<f32>, start: usize, at: u32, shape: SourceShape, _: f32) -> [f32; 4] {
        let (g, u) = (load_four(x, start + at as usize), load_four(x, start + (shape.columns + at) as usize));
        [gated(g[0], u[0]), gated(g[1], u[1]), gated(g[2], u[2]), gated(g[3], u[3])]
    }
}

/// r of RMSNorm, from Σ x².
#[inline(always)]
pub fn norm_factor(squares: f32, columns: u32, epsilon: f32) -> f32 {
    rsqrt(squares / columns as f32 + epsilon)
}

/// v of RMSNorm.
#[inline(always)]
pub fn normed(x: f32, factor: f32, weight: f32) -> f32 {
    (x * factor) * weight
}

/// v of SwiGLU.
#[inline(always)]
pub fn gated(gate: f32, up: f32) -> f32 {
    (gate / (1.0 + exp2(gate * -LOG2_E))) * up
}

/// Makes the records of a token, by all threads of a block; `store` gets words of the token's records.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub(super) fn make_records<S: Source>(
    x: Global<f32>,
    weight: Global<f32>,
    token: u32,
    shape: SourceShape,
    sums: Shared<f32>,
    store: impl Fn(u32, u32),
) {
    let start = token as usize * shape.stride as usize;
    let r = S::prepare(x, start, shape, sums);
    let mut first = 0;
    while first < shape.columns {
        let at = first + thread::thread_idx_x() * 4;
        let inside = at < shape.columns;
        let v = if inside { S::four(x, weight, start, at, shape, r) } else { [0.0; 4] };
        let mut largest = magnitude(v[0]).max(magnitude(v[1])).max(magnitude(v[2]).max(magnitude(v[3])));
        unroll!(for i in 0..3 {
            largest = largest.max(warp_shuffle_xor(FULL_MASK, largest, 1 << i, 32));
        });
        let step = fixed::step(largest);
        let fixed = [step.fixed(v[0]), step.fixed(v[1]), step.fixed(v[2]), step.fixed(v[3])];
        let mut sum = (fixed[0] + fixed[1]) + (fixed[2] + fixed[3]);
        unroll!(for i in 0..3 {
            sum += warp_shuffle_xor(FULL_MASK, sum, 1 << i, 32);
        });
        if inside {
            let d = fixed.map(digits);
            let quad = at / 4 % 8;
            let base = at / BLOCK * RECORD_WORDS + quad / 2 * PART_WORDS + quad % 2;
            unroll!(for p in 0..3 {
                let plane = [d[0][p] as u32, d[1][p] as u32, d[2][p] as u32, d[3][p] as u32];
                store(base + 2 * p as u32, bits::pack_low_bytes(plane));
            });
            store(base + 6, if quad.is_multiple_of(2) { step.step } else { step.sum(sum) }.to_bits());
        }
        first += 4 * THREADS;
    }
}

/// The records of every token. One block of [`THREADS`] threads a token; `weight` \[k\] is read by `Normed` alone.
#[kernel(system = model, instances(Plain, Normed, Gated), max_threads = 256, overlaps)]
pub fn quantize_activations<S: Source>(
    x: Global<f32>,
    weight: Global<f32>,
    records: GlobalMut<u32>,
    shape: SourceShape,
) {
    let token = thread::block_idx_x();
    let start = token as usize * (shape.columns / BLOCK * RECORD_WORDS) as usize;
    let (sums, _) = sums_layout();
    make_records::<S>(x, weight, token, shape, sums, |word, value| {
        records.store(start + word as usize, value)
    });
}
