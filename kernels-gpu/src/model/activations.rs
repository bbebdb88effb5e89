//! Quantizing activations, with what comes before it: nothing, RMSNorm or SwiGLU.
//!
//! # Mathematics
//! ```text
//! Plain:   v_i = x_i
//! Normed:  v_i = (x_i · r) · w_i,  r = 1 / sqrt(Σ x² / k + ε)
//! Gated:   v_i = (g_i / (1 + 2^(−g_i·log2 e))) · u_i, with g = x_i and u = x_(k + i): SiLU(g)·u
//! ```
//! Then each block of 32 v becomes a record ([`fixed`]).
//!
//! Σ x² is a fixed tree: channel i belongs to chain i mod 1024 (thread (i / 4) mod 256, component i mod 4), a
//! chain of multiply-adds in the order of i; a thread's four chains are added as (0 + 1) + (2 + 3), the 32
//! threads of a warp as butterflies, the eight warps one after another.
//!
//! # Layout and bytes
//! `x` f32 [tokens, row] read (4·k bytes a token, 8·k for SwiGLU; RMSNorm reads what is past the first 1024
//! channels twice, the second time from a cache), `records` [tokens, k / 32] of 128 bytes written: 4·k a
//! token.
//!
//! # Work split
//! A block of 256 threads for every 1024 channels of a token, so that one token's row goes to several
//! multiprocessors; for RMSNorm each of them adds up the whole row. A thread takes four neighbouring
//! channels, so eight lanes have a block of channels: its largest magnitude and its sum are three exchanges
//! each. Ahead of a fused product one thread block does all of a row.

use super::fixed::{self, BLOCK, PART_WORDS, RECORD_WORDS, Step, digits, magnitude};
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

/// What a thread loads for four channels: two vectors of x, or one of x and one of weights.
type Raw = [Vec4; 2];

/// What comes before quantizing.
pub trait Source {
    /// Loads what channels `at` to `at + 3` are made of.
    fn load(x: Global<f32>, weight: Global<f32>, start: usize, at: u32, shape: SourceShape) -> [Vec4; 2];
    /// What of channels `at` to `at + 3` no launch writes: RMSNorm's weights. May come before the wait for
    /// the launch before.
    fn ahead(_weight: Global<f32>, _at: u32) -> Vec4 {
        Vec4::ZERO
    }
    /// [`load`](Self::load) of what is left when that is there.
    fn load_rest(x: Global<f32>, _ahead: Vec4, start: usize, at: u32, shape: SourceShape) -> [Vec4; 2] {
        Self::load(x, x, start, at, shape)
    }
    /// What the block's threads find out about the token first: r of RMSNorm. `first` is what each loaded of
    /// its first four channels. Uses a barrier if `sums` is used.
    fn prepare(first: [Vec4; 2], x: Global<f32>, start: usize, shape: SourceShape, sums: Shared<f32>) -> f32;
    /// v of four channels.
    fn four(raw: [Vec4; 2], r: f32) -> [f32; 4];
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

impl Source for Plain {
    #[simt::device]
    fn load(x: Global<f32>, _: Global<f32>, start: usize, at: u32, _: SourceShape) -> Raw {
        [x.load_vector(start + at as usize), Vec4::ZERO]
    }
    #[inline(always)]
    fn prepare(_: Raw, _: Global<f32>, _: usize, _: SourceShape, _: Shared<f32>) -> f32 {
        1.0
    }
    #[inline(always)]
    fn four([x, _]: Raw, _: f32) -> [f32; 4] {
        x.to_array()
    }
}

impl Source for Normed {
    #[simt::device]
    fn load(x: Global<f32>, weight: Global<f32>, start: usize, at: u32, _: SourceShape) -> Raw {
        [x.load_vector(start + at as usize), weight.load_vector(at as usize)]
    }
    #[simt::device]
    fn ahead(weight: Global<f32>, at: u32) -> Vec4 {
        weight.load_vector_ahead(at as usize)
    }
    #[simt::device]
    fn load_rest(x: Global<f32>, ahead: Vec4, start: usize, at: u32, _: SourceShape) -> Raw {
        [x.load_vector(start + at as usize), ahead]
    }
    #[simt::device]
    fn prepare(first: Raw, x: Global<f32>, start: usize, shape: SourceShape, sums: Shared<f32>) -> f32 {
        // Threads past the row's end hold zeros.
        let mut chains = first[0].to_array().map(|x| fma(x, x, 0.0));
        let mut at = (thread::thread_idx_x() + THREADS) * 4;
        while at < shape.columns {
            let four = x.load_vector::<Vec4>(start + at as usize).to_array();
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
    fn four([x, w]: Raw, r: f32) -> [f32; 4] {
        [normed(x.x, r, w.x), normed(x.y, r, w.y), normed(x.z, r, w.z), normed(x.w, r, w.w)]
    }
}

impl Source for Gated {
    #[simt::device]
    fn load(x: Global<f32>, _: Global<f32>, start: usize, at: u32, shape: SourceShape) -> Raw {
        [x.load_vector(start + at as usize), x.load_vector(start + (shape.columns + at) as usize)]
    }
    #[inline(always)]
    fn prepare(_: Raw, _: Global<f32>, _: usize, _: SourceShape, _: Shared<f32>) -> f32 {
        1.0
    }
    #[inline(always)]
    fn four([g, u]: Raw, _: f32) -> [f32; 4] {
        [gated(g.x, u.x), gated(g.y, u.y), gated(g.z, u.z), gated(g.w, u.w)]
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

/// What comes ahead of the wait for this thread's first channels in part `part` of a token; past the end, for
/// the last ones.
#[simt::device]
pub(super) fn load_ahead<S: Source>(weight: Global<f32>, part: u32, shape: SourceShape) -> Vec4 {
    let at = part * (4 * THREADS) + thread::thread_idx_x() * 4;
    S::ahead(weight, at.min(shape.columns - 4))
}

/// A block of 32 channels, as each of the eight lanes knows it that have four of them.
#[derive(Clone, Copy)]
pub(super) struct Block {
    /// Bits of the largest magnitude.
    pub(super) largest: u32,
    pub(super) step: Step,
    /// ΣX.
    pub(super) sum: i32,
}

/// Turns a token's values to fixed point, by all threads of a block, or of `parts` blocks of which this one
/// is number `part`; `use_four` gets the first of four channels, their X, and their block. `ahead` is what
/// [`load_ahead`] gives for the part.
#[simt::device]
#[allow(clippy::too_many_arguments)]
pub(super) fn make_blocks<S: Source>(
    x: Global<f32>,
    weight: Global<f32>,
    ahead: Vec4,
    token: u32,
    [part, parts]: [u32; 2],
    shape: SourceShape,
    sums: Shared<f32>,
    use_four: impl Fn(u32, [i32; 4], Block),
) {
    let start = token as usize * shape.stride as usize;
    let load = |at: u32| {
        if at < shape.columns { S::load(x, weight, start, at, shape) } else { [Vec4::ZERO; 2] }
    };
    let mut first = part * (4 * THREADS);
    let at = first + thread::thread_idx_x() * 4;
    let mut raw = if at < shape.columns { S::load_rest(x, ahead, start, at, shape) } else { [Vec4::ZERO; 2] };
    let of_row = if part == 0 { raw } else { load(thread::thread_idx_x() * 4) };
    let r = S::prepare(of_row, x, start, shape, sums);
    while first < shape.columns {
        let at = first + thread::thread_idx_x() * 4;
        let inside = at < shape.columns;
        let v = if inside { S::four(raw, r) } else { [0.0; 4] };
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
            use_four(at, fixed, Block { largest, step, sum });
        }
        first += parts * (4 * THREADS);
        raw = load(first + thread::thread_idx_x() * 4);
    }
}

/// Makes the records of a token: [`make_blocks`], of which `store` gets words of the token's records.
#[simt::device]
#[allow(clippy::too_many_arguments)]
pub(super) fn make_records<S: Source>(
    x: Global<f32>,
    weight: Global<f32>,
    ahead: Vec4,
    token: u32,
    share: [u32; 2],
    shape: SourceShape,
    sums: Shared<f32>,
    store: impl Fn(u32, u32),
) {
    make_blocks::<S>(x, weight, ahead, token, share, shape, sums, |at, fixed, Block { step, sum, .. }| {
        let d = fixed.map(digits);
        let quad = at / 4 % 8;
        let base = at / BLOCK * RECORD_WORDS + quad / 2 * PART_WORDS + quad % 2;
        unroll!(for p in 0..3 {
            let plane = [d[0][p] as u32, d[1][p] as u32, d[2][p] as u32, d[3][p] as u32];
            store(base + 2 * p as u32, bits::pack_low_bytes(plane));
        });
        store(base + 6, if quad.is_multiple_of(2) { step.step } else { step.sum(sum) }.to_bits());
    });
}

/// The records of every token. Grid (tokens, any number of blocks for a token, of use up to one for every
/// 1024 channels), blocks of [`THREADS`] threads; `weight` \[k\] is read by `Normed` alone.
#[kernel(system = model, instances(Plain, Normed, Gated), max_threads = 256, overlaps = late)]
pub fn quantize_activations<S: Source>(
    x: Global<f32>,
    weight: Global<f32>,
    records: GlobalMut<u32>,
    shape: SourceShape,
) {
    let token = thread::block_idx_x();
    let start = token as usize * (shape.columns / BLOCK * RECORD_WORDS) as usize;
    let (sums, _) = sums_layout();
    let share = [thread::block_idx_y(), thread::grid_dim_y()];
    let ahead = load_ahead::<S>(weight, share[0], shape);
    thread::wait_for_previous();
    make_records::<S>(x, weight, ahead, token, share, shape, sums, |word, value| {
        records.store(start + word as usize, value)
    });
}
