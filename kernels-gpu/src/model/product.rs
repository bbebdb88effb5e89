//! Matrix times vector, for one to a few tokens: weights stream by once, at the memory's speed.
//!
//! # Mathematics
//! y = W·v + bias + residual, for v in records ([`fixed`](super::fixed)). W has R rows and n = k / 32 blocks
//! a row. The order of all float additions is fixed by n alone:
//!
//! - block b belongs to strand b mod L, L = [`strands`]`(n)`;
//! - a strand starts at +0 and takes its blocks in order, each by what [`format`](super::format) says;
//! - strands are added one after another, ((s_0 + s_1) + s_2) + …; then the bias, then the residual.
//!
//! The matrix-matrix kernel ([`prefill`](super::prefill)) and the CPU path follow the same order: a token's
//! bits depend on neither the number of tokens nor the machine.
//!
//! # Error
//! With z = Σ over channels of (15·|d| + |m|)·|x| for four-bit codes, 128·|d|·|x| for eight-bit ones, |w|·|x|
//! for floats (the block's d and m), M a block's largest |x| and q its n' = 32 weights, a row's result
//! differs from Σ w·x by at most
//!
//! ```text
//! Σ_blocks 2^−20·M·Σ|w|  +  (⌈n/L⌉·2 + L + 12)·2^−24·1.01·z  +  n·2^−120
//! ```
//!
//! first the fixed point (|x − t·X| <= 2^−20·M, half a step; 2^−127 for tiny blocks goes with the last term),
//! then roundings: of d·t·S (at most three), of m·u (three), of a strand's two additions a block, of the
//! strands' sum (floats: chains of four, three additions, one), last what underflows. Bias and residual add
//! one rounding each. The tests use this bound.
//!
//! # Layout and bytes
//! Weights as [`format`](super::format) packs them, read once for each token: 20 bytes for 32 of Q4_1.
//! Records: 128 bytes a block and token, read by all (from a cache). `out`, `residual` f32 [tokens, R],
//! `bias` \[R\].
//!
//! # Work split
//! Eight lanes have a tile of eight rows and a block; four tiles side by side, four strands, are a warp's; L
//! / 4 warps have a group of rows. A thread block is eight warps, so 32 / L · 8 groups. n alone decides how
//! many warps share a row: 4 at k = 576, 8 from 800 on; so matrices of few rows still go to many
//! multiprocessors. The last step, a row's strands, goes through shared memory.
//!
//! # Ahead of the launch before
//! A product's input is the last thing that the launches before it make, and they are short, many and wait
//! for each other: left alone, the memory stands still meanwhile. No launch writes weights. So a thread
//! block, which may be placed as soon as those before have begun, asks for its first weights before it waits,
//! as many as registers hold: on an H100 18 MB, what its memory delivers in 6 µs. Bringing more to the
//! second-level cache makes steps slower (docs/experiments/024-the-fixed-cost-of-a-step.md).
//!
//! [`linear_fused`](fn@linear_fused) makes the records itself, in shared memory: a launch less in a chain of
//! short ones. Each thread block does that work again, so it is for short rows.

use super::activations::{Gated, Normed, Plain, Source, SourceShape, THREADS, load_ahead, make_records};
use super::fixed::{PART_WORDS, RECORD_WORDS};
use super::format::{Format, GROUP, Q4_0, Q4_1, Q8_0};
use glam::UVec4;
use half::{bf16, f16};
use simt::math::canonical_nan;
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, bits, kernel, thread, unroll, warp};

/// The most strands there are.
pub const MAX_STRANDS: u32 = 32;

/// Strands that a row of `blocks` blocks is summed in: 4 for each warp that has a part of the row.
#[inline(always)]
pub const fn strands(blocks: u32) -> u32 {
    match blocks {
        0..=6 => 4,
        7..=12 => 8,
        13..=24 => 16,
        _ => MAX_STRANDS,
    }
}

/// A product's extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct LinearShape {
    /// R.
    pub rows: u32,
    /// n = k / 32.
    pub blocks: u32,
    /// Tokens.
    pub tokens: u32,
    /// [`HAS_BIAS`] and [`HAS_RESIDUAL`].
    pub flags: u32,
}

/// A bias is added.
pub const HAS_BIAS: u32 = 1;
/// A residual is added.
pub const HAS_RESIDUAL: u32 = 2;

impl LinearShape {
    /// Groups of eight rows.
    #[inline(always)]
    pub const fn groups(self) -> u32 {
        self.rows.div_ceil(GROUP)
    }

    /// Groups of rows that a thread block of the matrix-vector kernel has.
    #[inline(always)]
    pub const fn groups_a_block(self) -> u32 {
        MAX_STRANDS / strands(self.blocks)
    }
}

/// Where finished sums go.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) bias: Global<f32>,
    pub(super) residual: Global<f32>,
    pub(super) out: GlobalMut<f32>,
    pub(super) shape: LinearShape,
}

impl Target {
    /// Adds what is to be added to a row's sum, and writes it.
    #[simt::device]
    pub(super) fn finish(self, token: u32, row: u32, sum: f32) {
        let at = token as usize * self.shape.rows as usize + row as usize;
        let mut y = sum;
        if self.shape.flags & HAS_BIAS != 0 {
            y += self.bias.load(row as usize);
        }
        if self.shape.flags & HAS_RESIDUAL != 0 {
            y += self.residual.load(at);
        }
        self.out.store(at, canonical_nan(y));
    }
}

/// Shared memory of a thread block.
#[derive(Clone, Copy)]
pub struct LinearLayout {
    /// Strands of the rows, [groups, L, 8].
    strands: Shared<f32>,
    /// The sum of squares of RMSNorm.
    sums: Shared<f32>,
    /// The token's records.
    records: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Lays out the shared memory, with room for the records of `blocks` blocks (0 where they come from global
/// memory).
pub const fn linear_layout(blocks: u32) -> LinearLayout {
    let mut plan = SharedPlan::new();
    let strands = plan.array(THREADS);
    let sums = plan.array(THREADS / 32);
    let records = plan.array(blocks * RECORD_WORDS);
    LinearLayout { strands, sums, records, bytes: plan.bytes() }
}

/// A warp's rows and blocks.
#[derive(Clone, Copy)]
struct Share {
    /// Index of the group's first tile; in 32 bits, no memory holds more.
    tiles: u32,
    /// This lane's first block; each next one is L further.
    first: u32,
    blocks: u32,
    strands: u32,
    /// This lane among the eight of a tile.
    c: u32,
}

impl Share {
    #[inline(always)]
    fn new(shape: LinearShape) -> Self {
        let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
        let strands = strands(shape.blocks);
        let warps = strands / 4;
        let group = thread::block_idx_y() * shape.groups_a_block() + bits::div_u32(warp, warps);
        // A group that is not there does the last one's work for nothing.
        let group = group.min(shape.groups() - 1);
        Share {
            tiles: group * shape.blocks,
            first: 4 * bits::rem_u32(warp, warps) + lane / 8,
            blocks: shape.blocks,
            strands,
            c: lane % 8,
        }
    }

    /// Loads this lane's part of up to four blocks from `first` on.
    #[simt::device]
    fn load<F: Format>(self, codes: Global<u32>, scales: Global<u16>, first: u32) -> [F::Loaded; 4] {
        let mut loaded = [F::nothing(); 4];
        unroll!(for i in 0..4 {
            if (i as u32) < F::BATCH {
                // Past the end the last block again: a load without a condition is under way with the others.
                let block = (first + i as u32 * self.strands).min(self.blocks - 1);
                loaded[i] = F::load(codes, scales, (self.tiles + block) as usize, self.c);
            }
        });
        loaded
    }

    /// This lane's strand; `loaded` has its first blocks, `part` gives parts of a block's record.
    #[simt::device]
    fn sum<F: Format>(
        self,
        codes: Global<u32>,
        scales: Global<u16>,
        mut loaded: [F::Loaded; 4],
        part: impl Fn(u32, u32) -> [UVec4; 2],
    ) -> f32 {
        let mut sum = 0f32;
        let mut first = self.first;
        loop {
            unroll!(for i in 0..4 {
                if (i as u32) < F::BATCH {
                    let block = first + i as u32 * self.strands;
                    // The first of the warp's four: past the end the whole warp has nothing to do.
                    if (block & !3) < self.blocks {
                        let inside = block < self.blocks;
                        let at = block.min(self.blocks - 1);
                        let next = F::add(loaded[i], |j| part(at, j), self.c, sum);
                        sum = if inside { next } else { sum };
                    }
                }
            });
            first += F::BATCH * self.strands;
            if (first & !3) >= self.blocks {
                break;
            }
            loaded = self.load::<F>(codes, scales, first);
        }
        sum
    }

    /// Adds the strands of the thread block's rows.
    #[simt::device]
    fn finish<F: Format>(self, layout: LinearLayout, token: u32, sum: f32, target: Target) {
        let (t, lane) = (thread::thread_idx_x(), warp::lane_id());
        layout.strands.store(t / 32 * 32 + lane / 8 * GROUP + F::row(self.c), sum);
        thread::sync_threads();
        let groups = target.shape.groups_a_block();
        if t < groups * GROUP {
            let (group, r) = (t / GROUP, t % GROUP);
            let row = (thread::block_idx_y() * groups + group) * GROUP + r;
            let base = group * self.strands * GROUP + r;
            let mut total = layout.strands.load(base);
            unroll!(for s in 1..4 {
                total += layout.strands.load(base + s as u32 * GROUP);
            });
            let mut s = 4;
            while s < self.strands {
                unroll!(for i in 0..4 {
                    total += layout.strands.load(base + (s + i as u32) * GROUP);
                });
                s += 4;
            }
            if row < target.shape.rows {
                target.finish(token, row, total);
            }
        }
    }
}

/// W·v of records in global memory. Grid (tokens, ⌈groups / [`groups_a_block`](LinearShape::groups_a_block)⌉)
/// of [`THREADS`] threads: tokens first, so that they find each other's weights in the cache; shared:
/// [`linear_layout`]`(0)`. `bias` and `residual` are read where the flags say so; `residual` may be `out`.
///
/// Four blocks a multiprocessor: 512 groups of rows, a matrix of 4096, are then there at once.
#[kernel(system = model, instances(Q4_1, Q4_0, Q8_0, f16, bf16, f32), max_threads = 256, min_blocks = 4, overlaps = late)]
pub fn linear<F: Format>(
    codes: Global<u32>,
    scales: Global<u16>,
    records: Global<u32>,
    bias: Global<f32>,
    residual: Global<f32>,
    out: GlobalMut<f32>,
    shape: LinearShape,
) {
    let token = thread::block_idx_x();
    let share = Share::new(shape);
    // No launch writes weights: they may come while those before still run.
    let mut loaded = [F::nothing(); 4];
    if F::AHEAD {
        loaded = share.load::<F>(codes, scales, share.first);
    }
    thread::wait_for_previous();
    if !F::AHEAD {
        loaded = share.load::<F>(codes, scales, share.first);
    }
    // In 32 bits: no memory holds more records.
    let start = token * shape.blocks;
    let sum = share.sum::<F>(codes, scales, loaded, |block, j| {
        let at = (start + block) as usize * RECORD_WORDS as usize + (j * PART_WORDS) as usize;
        [records.load_vector(at), records.load_vector(at + 4)]
    });
    share.finish::<F>(linear_layout(0), token, sum, Target { bias, residual, out, shape });
}

/// [`quantize_activations`](fn@super::quantize_activations) and [`linear`](fn@linear) in one. Grid and block
/// as there; shared: [`linear_layout`]`(blocks)`.
#[kernel(
    system = model,
    instances(
        (Plain, Q4_1), (Plain, Q4_0), (Plain, Q8_0), (Normed, Q4_1), (Normed, Q4_0), (Normed, Q8_0), (Gated, Q4_1),
        (Gated, Q4_0), (Gated, Q8_0)
    ),
    max_threads = 256,
    min_blocks = 3,
    overlaps = late
)]
pub fn linear_fused<S: Source, F: Format>(
    codes: Global<u32>,
    scales: Global<u16>,
    x: Global<f32>,
    weight: Global<f32>,
    bias: Global<f32>,
    residual: Global<f32>,
    out: GlobalMut<f32>,
    source: SourceShape,
    shape: LinearShape,
) {
    let token = thread::block_idx_x();
    let share = Share::new(shape);
    // Before the records, and before what they are made of is there.
    let loaded = share.load::<F>(codes, scales, share.first);
    let norm = load_ahead::<S>(weight, 0, source);
    thread::wait_for_previous();
    let layout = linear_layout(shape.blocks);
    make_records::<S>(x, weight, norm, token, [0, 1], source, layout.sums, |word, value| {
        layout.records.store(word, value)
    });
    thread::sync_threads();
    let sum = share.sum::<F>(codes, scales, loaded, |block, j| {
        let at = block * RECORD_WORDS + j * PART_WORDS;
        [layout.records.load_vector(at), layout.records.load_vector(at + 4)]
    });
    share.finish::<F>(layout, token, sum, Target { bias, residual, out, shape });
}
