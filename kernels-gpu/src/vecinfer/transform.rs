//! The dual transformation, and what the kernels are told.
//!
//! A head's row x is transformed in f32, channel by channel, in this order:
//!
//! ```text
//! keys      y = (x − mean)·key_before       queries   y = x·query_before
//! then with H:  butterflies of strides 1, 2, … D/2: (a, b) to (a + b, a − b); each times 1/sqrt(D)
//! then          y·key_after                           y·query_after
//! ```
//!
//! and rounded to f16. `before` and `after` are λ or 1/λ where the scheme smooths there, else 1, which
//! changes nothing. Without rounding q~·k~ = q·(k − mean) for any λ that is not 0, as H is orthonormal and
//! symmetric.
//!
//! # Rounding
//! With u = 2^−24, every stage of the butterflies rounds once, so ‖error of y‖ is at most (log2 D + 5)·u·‖y‖
//! (Euclidean; each stage keeps norms but for √2, which the last product takes back), and that of f16 is at
//! most 2^−11 of each channel, or 2^−25 below the normal numbers. A key's own f16 has as much.

use crate::attention::Window;
use simt::warp::{FULL_MASK, warp_shuffle_xor};
use simt::{Global, Pod, Zeroable, unroll};

/// Rows of a KV head's transformation, [5, D]: mean, key_before, key_after, query_before, query_after.
pub const ROWS_OF_TRANSFORM: u32 = 5;

/// 1/sqrt(D) of D = 64 and 128, rounded.
pub const NORMS: [f32; 2] = [0.125, 0.088_388_346];

/// 1/sqrt(D), rounded.
#[inline(always)]
pub const fn norm(head_dim: u32) -> f32 {
    NORMS[(head_dim / 128) as usize]
}

/// The extents of a layer's cache, and of a step's launch. All sequences have room for as many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Shape {
    /// Query heads of a KV head.
    pub group: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Tiles of 16 tokens that a sequence has room for.
    pub tiles: u32,
    /// Tiles that are in f16 as well.
    pub window: Window,
    /// Parts that a sequence is cut into.
    pub splits: u32,
    /// Scores in log2 units: log2(e) times the softmax scale.
    pub scale_log2: f32,
    /// Whether H is applied: 0 or 1.
    pub hadamard: u32,
    /// Elements from a KV head's codebook of keys to the next one's; 0 where all have the same.
    pub key_stride: u32,
    /// Of values.
    pub value_stride: u32,
}

impl Shape {
    /// Groups of eight query heads of a KV head.
    #[inline(always)]
    pub const fn row_groups(self) -> u32 {
        self.group.div_ceil(8)
    }
}

/// A row across a warp: lane l has channels `l·D/32` on, two or four of them.
#[simt::device]
pub(super) fn transform<const D: usize>(
    mut x: [f32; 4],
    table: Global<f32>,
    head: u32,
    key: bool,
    hadamard: bool,
    lane: u32,
) -> [f32; 4] {
    let each = D as u32 / 32;
    let row = |row: u32| {
        let at = ((head * ROWS_OF_TRANSFORM + row) * D as u32 + lane * each) as usize;
        let mut out = [0f32; 4];
        unroll!(for i in 0..(D / 32), at_most 4 {
            out[i] = table.load_readonly(at + i);
        });
        out
    };
    let first = if key { 1 } else { 3 };
    let (before, after) = (row(first), row(first + 1));
    if key {
        let mean = row(0);
        unroll!(for i in 0..(D / 32), at_most 4 {
            x[i] -= mean[i];
        });
    }
    unroll!(for i in 0..(D / 32), at_most 4 {
        x[i] *= before[i];
    });
    if hadamard {
        x = [x[0] + x[1], x[0] - x[1], x[2] + x[3], x[2] - x[3]];
        if D == 128 {
            x = [x[0] + x[2], x[1] + x[3], x[0] - x[2], x[1] - x[3]];
        }
        unroll!(for s in 0..5 {
            let upper = lane >> s & 1 != 0;
            unroll!(for i in 0..(D / 32), at_most 4 {
                let other = warp_shuffle_xor(FULL_MASK, x[i], 1 << s, 32);
                x[i] = if upper { other - x[i] } else { x[i] + other };
            });
        });
        unroll!(for i in 0..(D / 32), at_most 4 {
            x[i] *= norm(D as u32);
        });
    }
    unroll!(for i in 0..(D / 32), at_most 4 {
        x[i] *= after[i];
    });
    x
}

/// Reads a row of f16 across a warp, as [`transform`] has it.
#[simt::device]
pub(super) fn load_row<const D: usize>(rows: Global<half::f16>, row: usize, lane: u32) -> [f32; 4] {
    let at = row * D + (lane * (D as u32 / 32)) as usize;
    let words = if D == 128 { rows.load_vector::<[u32; 2]>(at) } else { [rows.load_vector::<u32>(at), 0] };
    let half = |bits: u32| simt::convert::f32_from_f16(half::f16::from_bits(bits as u16));
    [half(words[0]), half(words[0] >> 16), half(words[1]), half(words[1] >> 16)]
}

/// Rounds a row to f16: two words across a warp, of D = 64 one.
#[simt::device]
pub(super) fn round_row(x: [f32; 4]) -> [u32; 2] {
    [simt::convert::f16x2_from_f32(x[0], x[1]), simt::convert::f16x2_from_f32(x[2], x[3])]
}
