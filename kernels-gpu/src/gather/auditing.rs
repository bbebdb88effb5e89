//! `draw` and `audit`: heads of a step that are held against all of their sequence, and what that shows.
//!
//! # Mathematics
//! A head-step is drawn by a hash of layer, sequence, length and head, which looks at no key, value or query:
//! so the mean over those that are drawn estimates that over all without a bias. With o and L the output and
//! the natural log-sum-exp over what was kept, o' and L' those over the whole sequence:
//!
//! ```text
//! mass = 1 − exp(L − L')      error = ‖o − o'‖₂      norm = ‖o'‖₂
//! ```
//!
//! `mass` is the share of the head's attention that was left out; in f32 it is within some 2^−22·(1 + |L'|)
//! of what it is over these keys.
//!
//! # Layout
//! `lengths` \[sequences\]; `wanted` [sequences, kv_heads · row groups], a bit for each head that is drawn:
//! what [`attend`](fn@crate::attention::dense::attend) takes. `output`, `exact` [sequences, q_heads, D];
//! `lse`, `exact_lse` [sequences, q_heads]; of `exact` and `exact_lse` only heads that are wanted are read.
//! Written: `audits` [sequences, q_heads], all of them.
//!
//! # Work split
//! `draw`: a thread a word of `wanted`. `audit`: grid (kv_heads · row groups, 1, sequences), a warp a query
//! head.

use super::rule::{Extent, Rule};
use crate::attention::query::LOG2_E;
use crate::attention::{BLOCK_TOKENS, ROWS};
use crate::{mix, mixed};
use simt::math::{canonical_nan, exp2, fma, sqrt};
use simt::warp;
use simt::{Global, GlobalMut, Pod, Zeroable, bits, kernel, thread, unroll};

/// Threads of a block of [`draw`](fn@draw).
pub const DRAW_THREADS: u32 = 128;
/// Threads of a block of [`audit`](fn@audit).
pub const AUDIT_THREADS: u32 = 32 * ROWS;

/// What was found of a query head.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Audited {
    /// The share of the head's mass that was left out.
    pub mass: f32,
    /// ‖output − output over everything‖₂.
    pub error: f32,
    /// ‖output over everything‖₂.
    pub norm: f32,
    /// 1: the head was drawn; 0: it was not, and the others are 0.
    pub drawn: u32,
}

/// The extents of a launch of either kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AuditShape {
    /// What is kept: of a sequence that is kept as a whole nothing is drawn.
    pub rule: Rule,
    /// Query heads of a KV head.
    pub group: u32,
    /// KV heads of a sequence.
    pub kv_heads: u32,
    /// Sequences.
    pub sequences: u32,
    /// Blocks of a row of the cache's table: tokens beyond them are not there.
    pub max_blocks: u32,
    /// Which layer it is.
    pub layer: u32,
    /// A head-step is drawn whose word is at most this: a share of (threshold + 1)/2^32 of them.
    pub threshold: u32,
}

impl AuditShape {
    /// Groups of eight query heads of a KV head.
    #[inline(always)]
    pub const fn row_groups(self) -> u32 {
        self.group.div_ceil(ROWS)
    }

    /// Whether a head of a sequence of so many tokens is drawn.
    #[inline(always)]
    pub fn draws(self, sequence: u32, length: u32, q_head: u32) -> bool {
        let of_layer = mix(((self.layer as u64) << 32) | sequence as u64);
        let word = mixed(of_layer, ((length as u64) << 32) | q_head as u64);
        (word >> 32) as u32 <= self.threshold
    }

    /// The word of `wanted` of a sequence, KV head and group of rows.
    #[inline(always)]
    pub fn wanted(self, sequence: u32, head: u32, row_group: u32, length: u32) -> u32 {
        let length = length.min(self.max_blocks * BLOCK_TOKENS);
        let mut word = 0;
        if Extent::of(length, self.rule).kept(self.rule) < length {
            unroll!(for i in 0..8 {
                let in_group = row_group * ROWS + i as u32;
                let is = in_group < self.group && self.draws(sequence, length, head * self.group + in_group);
                word |= (is as u32) << (i as u32);
            });
        }
        word
    }
}

/// The share of a head's mass that is left out, by both log-sum-exps.
#[inline(always)]
pub fn skipped_mass(lse: f32, exact_lse: f32) -> f32 {
    canonical_nan(not_below_zero(1.0 - exp2((lse - exact_lse) * LOG2_E)))
}

/// At least 0, if it is a number.
#[inline(always)]
fn not_below_zero(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

/// Says which heads are held against everything.
#[kernel(system = gather, max_threads = 128, overlaps)]
pub fn draw(lengths: Global<u32>, wanted: GlobalMut<u32>, shape: AuditShape) {
    let i = thread::block_idx_x() * DRAW_THREADS + thread::thread_idx_x();
    let rows = shape.kv_heads * shape.row_groups();
    if i < shape.sequences * rows {
        let sequence = bits::div_u32(i, rows);
        let row = i - sequence * rows;
        let head = bits::div_u32(row, shape.row_groups());
        let row_group = row - head * shape.row_groups();
        let length = lengths.load(sequence as usize);
        wanted.store(i as usize, shape.wanted(sequence, head, row_group, length));
    }
}

/// Compares what was kept with everything, for the heads that were drawn.
#[kernel(system = gather, instances(64, 128), max_threads = 256, overlaps)]
pub fn audit<const D: usize>(
    wanted: Global<u32>,
    output: Global<f32>,
    exact: Global<f32>,
    lse: Global<f32>,
    exact_lse: Global<f32>,
    audits: GlobalMut<Audited>,
    shape: AuditShape,
) {
    let sequence = thread::block_idx_z();
    let head = bits::div_u32(thread::block_idx_x(), shape.row_groups());
    let row_group = thread::block_idx_x() - head * shape.row_groups();
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let in_group = row_group * ROWS + warp;
    let word = wanted.load((sequence * thread::grid_dim_x() + thread::block_idx_x()) as usize);
    if in_group < shape.group {
        let row = ((sequence * shape.kv_heads + head) * shape.group + in_group) as usize;
        let mut audited = Audited { mass: 0.0, error: 0.0, norm: 0.0, drawn: (word >> warp) & 1 };
        if audited.drawn == 1 {
            let (mut error, mut norm) = (0f32, 0f32);
            unroll!(for i in 0..(D / 64), at_most 2 {
                let at = row * D + 64 * i + 2 * lane as usize;
                let a: [f32; 2] = output.load_vector(at);
                let b: [f32; 2] = exact.load_vector(at);
                let (x, y) = (a[0] - b[0], a[1] - b[1]);
                error = fma(y, y, fma(x, x, error));
                norm = fma(b[1], b[1], fma(b[0], b[0], norm));
            });
            audited.error = canonical_nan(sqrt(warp::warp_sum_f32(error)));
            audited.norm = canonical_nan(sqrt(warp::warp_sum_f32(norm)));
            audited.mass = skipped_mass(lse.load(row), exact_lse.load(row));
        }
        if lane == 0 {
            audits.store(row, audited);
        }
    }
}
