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
//! symmetric. Of 96 channels there is no such matrix: H is three blocks of 32 on the diagonal there, strides
//! go to 16, and the factor is 1/sqrt(32). It is orthonormal and symmetric as well.
//!
//! # Rounding
//! With u = 2^−24, every stage of the butterflies rounds once, so ‖error of y‖ is at most (log2 D + 5)·u·‖y‖
//! (Euclidean; each stage keeps norms but for √2, which the last product takes back), and that of f16 is at
//! most 2^−11 of each channel, or 2^−25 below the normal numbers. A key's own f16 has as much.

use crate::attention::Window;
use glam::{UVec2, UVec4};
use half::f16;
use simt::warp::{FULL_MASK, warp_shuffle_xor};
use simt::{Global, GlobalMut, Pod, Shared, Zeroable, unroll};

/// Rows of a KV head's transformation, [5, D]: mean, key_before, key_after, query_before, query_after.
pub const ROWS_OF_TRANSFORM: u32 = 5;

/// Channels of a block of H: D, of D = 96 32.
#[inline(always)]
pub const fn hadamard_block(head_dim: u32) -> u32 {
    if head_dim == 96 { 32 } else { head_dim }
}

/// 1/sqrt of the channels of a block of H, rounded.
#[inline(always)]
pub const fn norm(head_dim: u32) -> f32 {
    match hadamard_block(head_dim) {
        32 => 0.176_776_7,
        64 => 0.125,
        128 => 0.088_388_346,
        _ => 0.0625,
    }
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

/// A row across a warp: a lane has D/32 channels, from [`first_channel`] on, [`stride`] apart.
pub(super) type Row = [f32; 8];

/// A lane's first channel.
#[inline(always)]
fn first_channel<const D: usize>(lane: u32) -> u32 {
    if D == 96 { lane } else { lane * (D as u32 / 32) }
}

/// From a lane's channel to its next: of D = 96 a lane has one of each block of H, else neighbours.
#[inline(always)]
const fn stride<const D: usize>() -> usize {
    if D == 96 { 32 } else { 1 }
}

/// A head's row of the table.
#[simt::device]
fn table_row<const D: usize>(table: Global<f32>, head: u32, row: u32, lane: u32, ahead: bool) -> Row {
    let at = ((head * ROWS_OF_TRANSFORM + row) * D as u32 + first_channel::<D>(lane)) as usize;
    let mut out = [0f32; 8];
    unroll!(for i in 0..(D / 32), at_most 8 {
        let at = at + i * stride::<D>();
        out[i] = if ahead { table.load_ahead(at) } else { table.load_readonly(at) };
    });
    out
}

/// What a query's channels are multiplied by before and after H: rows 3 and 4 of the table.
#[derive(Clone, Copy)]
pub(super) struct OfQueries {
    before: Row,
    after: Row,
}

impl OfQueries {
    /// Of a KV head, ahead of the wait of a launch that overlaps: no launch writes the table.
    #[simt::device]
    pub fn ahead<const D: usize>(table: Global<f32>, head: u32, lane: u32) -> Self {
        let [before, after] = [3, 4].map(|row| table_row::<D>(table, head, row, lane, true));
        OfQueries { before, after }
    }

    /// Transforms a query.
    #[simt::device]
    pub fn transform<const D: usize>(self, x: Row, hadamard: bool, lane: u32) -> Row {
        turned::<D>(x, self.before, self.after, hadamard, lane)
    }
}

/// What a key passes through: rows 0 to 2 of the table.
#[derive(Clone, Copy)]
pub(super) struct OfKeys {
    mean: Row,
    before: Row,
    after: Row,
}

impl OfKeys {
    /// Of a KV head, ahead of the wait of a launch that overlaps: no launch writes the table.
    #[simt::device]
    pub fn ahead<const D: usize>(table: Global<f32>, head: u32, lane: u32) -> Self {
        let [mean, before, after] = [0, 1, 2].map(|row| table_row::<D>(table, head, row, lane, true));
        OfKeys { mean, before, after }
    }

    /// Transforms a key.
    #[simt::device]
    pub fn transform<const D: usize>(self, x: Row, hadamard: bool, lane: u32) -> Row {
        turned::<D>(less::<D>(x, self.mean), self.before, self.after, hadamard, lane)
    }
}

/// A row less another.
#[simt::device]
fn less<const D: usize>(mut x: Row, mean: Row) -> Row {
    unroll!(for i in 0..(D / 32), at_most 8 {
        x[i] -= mean[i];
    });
    x
}

/// Transforms a row.
#[simt::device]
pub(super) fn transform<const D: usize>(
    mut x: Row,
    table: Global<f32>,
    head: u32,
    key: bool,
    hadamard: bool,
    lane: u32,
) -> Row {
    let row = |row: u32| table_row::<D>(table, head, row, lane, false);
    let first = if key { 1 } else { 3 };
    let (before, after) = (row(first), row(first + 1));
    if key {
        x = less::<D>(x, row(0));
    }
    turned::<D>(x, before, after, hadamard, lane)
}

/// A row by `before`, H if wanted, and `after`.
#[simt::device]
fn turned<const D: usize>(mut x: Row, before: Row, after: Row, hadamard: bool, lane: u32) -> Row {
    unroll!(for i in 0..(D / 32), at_most 8 {
        x[i] *= before[i];
    });
    if hadamard {
        // Strides within a lane, then those across lanes.
        unroll!(for s in 0..3 {
            if D != 96 && 32 << s < D {
                let mut y = x;
                unroll!(for i in 0..(D / 32), at_most 8 {
                    y[i] = if i >> s & 1 == 0 { x[i] + x[(i | 1 << s) % 8] } else { x[i & !(1 << s)] - x[i] };
                });
                x = y;
            }
        });
        unroll!(for s in 0..5 {
            let upper = lane >> s & 1 != 0;
            unroll!(for i in 0..(D / 32), at_most 8 {
                let other = warp_shuffle_xor(FULL_MASK, x[i], 1 << s, 32);
                x[i] = if upper { other - x[i] } else { x[i] + other };
            });
        });
        unroll!(for i in 0..(D / 32), at_most 8 {
            x[i] *= norm(D as u32);
        });
    }
    unroll!(for i in 0..(D / 32), at_most 8 {
        x[i] *= after[i];
    });
    x
}

/// Reads a row of f16 across a warp.
#[simt::device]
pub(super) fn load_row<const D: usize>(rows: Global<f16>, row: usize, lane: u32) -> Row {
    let at = row * D + first_channel::<D>(lane) as usize;
    let words = match D {
        64 => [rows.load_vector::<u32>(at), 0, 0, 0],
        96 => {
            let [a, b, c] = [0, 1, 2].map(|i| u32::from(rows.load(at + i * stride::<D>()).to_bits()));
            [a | b << 16, c, 0, 0]
        }
        128 => {
            let [a, b] = rows.load_vector::<[u32; 2]>(at);
            [a, b, 0, 0]
        }
        _ => rows.load_vector::<UVec4>(at).to_array(),
    };
    widened(words)
}

/// Reads a row of f16 in shared memory, likewise.
#[simt::device]
pub(super) fn shared_row<const D: usize>(rows: Shared<u16>, row: u32, lane: u32) -> Row {
    let at = row * D as u32 + first_channel::<D>(lane);
    widened(match D {
        64 => [rows.load_vector::<u32>(at), 0, 0, 0],
        96 => {
            let [a, b, c] = [0, 1, 2].map(|i| u32::from(rows.load(at + 32 * i)));
            [a | b << 16, c, 0, 0]
        }
        128 => {
            let [a, b] = rows.load_vector::<[u32; 2]>(at);
            [a, b, 0, 0]
        }
        _ => rows.load_vector::<UVec4>(at).to_array(),
    })
}

/// A lane's channels from its words.
#[simt::device]
fn widened(words: Rounded) -> Row {
    let half = |bits: u32| simt::convert::f32_from_f16(f16::from_bits(bits as u16));
    let mut x = [0f32; 8];
    unroll!(for i in 0..4 {
        [x[2 * i], x[2 * i + 1]] = [half(words[i]), half(words[i] >> 16)];
    });
    x
}

/// A row that is rounded to f16: two of a lane's channels a word.
pub(super) type Rounded = [u32; 4];

/// Rounds a row to f16.
#[simt::device]
pub(super) fn round_row(x: Row) -> Rounded {
    [0, 1, 2, 3].map(|i| simt::convert::f16x2_from_f32(x[2 * i], x[2 * i + 1]))
}

/// A lane's `i`-th channel of a rounded row.
#[inline(always)]
const fn channel_of(words: Rounded, i: usize) -> u16 {
    (words[i / 2] >> (16 * (i as u32 % 2))) as u16
}

/// Writes a rounded row, word by word.
#[simt::device]
pub(super) fn store_row<const D: usize>(target: GlobalMut<f16>, row: usize, words: Rounded, lane: u32) {
    let at = row * D + first_channel::<D>(lane) as usize;
    if D == 96 {
        unroll!(for i in 0..3 {
            target.store(at + i * stride::<D>(), f16::from_bits(channel_of(words, i)));
        });
        return;
    }
    unroll!(for i in 0..(D / 64), at_most 4 {
        target.store_vector(at + 2 * i, words[i]);
    });
}

/// The same in shared memory, rows of f16.
#[simt::device]
pub(super) fn share_row<const D: usize>(target: Shared<u16>, row: u32, words: Rounded, lane: u32) {
    if D == 96 {
        unroll!(for i in 0..3 {
            target.store(row * D as u32 + lane + 32 * i as u32, channel_of(words, i));
        });
        return;
    }
    let at = row * (D as u32 / 2) + lane * (D as u32 / 64);
    unroll!(for i in 0..(D / 64), at_most 4 {
        target.store_vector(2 * (at + i as u32), words[i]);
    });
}

/// Writes a lane's bytes of a row, in the order of its channels, from `start` on.
#[simt::device]
pub(super) fn share_bytes<const D: usize>(target: Shared<u8>, start: u32, bytes: [u32; 2], lane: u32) {
    let at = start + first_channel::<D>(lane);
    match D {
        64 => target.store_vector(at, bytes[0] as u16),
        96 => unroll!(for i in 0..3 {
            target.store(at + 32 * i as u32, (bytes[0] >> (8 * i as u32)) as u8);
        }),
        128 => target.store_vector(at, bytes[0]),
        _ => target.store_vector(at, UVec2::from_array(bytes)),
    }
}
