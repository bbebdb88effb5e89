//! Rotary position embedding of queries and keys, and their way to the types that caches take.
//!
//! # Mathematics
//! For pair i < rotary/2 of a head, angle a = f32(position)·frequency_i (one rounding), with the pair (x, y):
//!
//! ```text
//! x' = fma(x, cos a, −(y·sin a))        y' = fma(x, sin a, y·cos a)
//! ```
//!
//! A pair is channels 2i and 2i + 1 (`INTERLEAVED`, as GGUF files of Llama store heads) or i and i + rotary/2
//! (half-split). Channels from `rotary` on, and values, pass as they are. Frequencies θ^(−2i/rotary) come as
//! a table that the host computes in f64.
//!
//! # Layout and bytes
//! `qkv` f32 [tokens, (q_heads + 2·kv_heads)·D], the output of one product with Q, K and V rows one below
//! another, goes to `queries` [tokens, q_heads, D], `keys` and `values` [tokens, kv_heads, D]. `positions`
//! \[tokens\] is in device memory: a captured step finds the next position there.
//! [`rope_append`](fn@rope_append) puts keys and values into a dense cache at once.
//!
//! # Work split
//! A thread block of 128 threads for a token, or several, which deal out its pairs in turn. A thread has up
//! to four pairs under way. Where its next pair is the same one of another head, it turns by the same angle,
//! whose sine and cosine are not made again. Grid (blocks of a token, tokens), see [`blocks_of_token`].

use crate::Element;
use crate::attention::BLOCK_TOKENS;
use half::{bf16, f16};
use simt::convert::f16_from_f32;
use simt::math::{canonical_nan, fma, sin_cos};
use simt::{Global, GlobalMut, Pod, Zeroable, bits, kernel, thread, unroll};

/// Threads of a block.
pub const ROPE_THREADS: u32 = 128;
/// Pairs that a thread has under way.
const UNDER_WAY: u32 = 4;

/// Thread blocks of a token for a launch of `tokens` tokens: a thread a pair where there are few, of many
/// tokens four pairs a thread.
pub const fn blocks_of_token(shape: RopeShape, tokens: u32) -> u32 {
    let threads = ROPE_THREADS * if tokens < 64 { 1 } else { UNDER_WAY };
    shape.pairs().div_ceil(threads)
}

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
    turn_by([x, y], sin_cos(angle))
}

/// A pair turned by the angle that has this sine and cosine.
#[inline(always)]
pub fn turn_by([x, y]: [f32; 2], (sine, cosine): (f32, f32)) -> [f32; 2] {
    [fma(x, cosine, -(y * sine)), fma(x, sine, y * cosine)]
}

/// See the [module](self). Grid ([`blocks_of_token`] or any other number, tokens) of 128 threads.
#[kernel(
    system = model,
    instances((f32, 0), (f32, 1), (f16, 0), (f16, 1), (bf16, 0), (bf16, 1)),
    max_threads = 128,
    overlaps
)]
pub fn rope<E: Element, const INTERLEAVED: u32>(
    /// [tokens, (q_heads + 2·kv_heads)·head_dim].
    qkv: Global<f32>,
    /// \[tokens\].
    positions: Global<u32>,
    /// [rotary / 2].
    frequencies: Global<f32>,
    /// [tokens, q_heads, head_dim].
    queries: GlobalMut<E>,
    /// [tokens, kv_heads, head_dim].
    keys: GlobalMut<E>,
    /// [tokens, kv_heads, head_dim].
    values: GlobalMut<E>,
    /// The extents.
    shape: RopeShape,
) {
    let token = thread::block_idx_y();
    let raw = Unturned { qkv, positions, frequencies, shape };
    turn_all::<INTERLEAVED>(raw, token, |head, [first, second], pair| {
        let (target, target_heads, target_head) = if head < shape.q_heads {
            (queries, shape.q_heads, head)
        } else if head < shape.q_heads + shape.kv_heads {
            (keys, shape.kv_heads, head - shape.q_heads)
        } else {
            (values, shape.kv_heads, head - shape.q_heads - shape.kv_heads)
        };
        let to = (token as usize * target_heads as usize + target_head as usize) * shape.head_dim as usize;
        target.store(to + first as usize, E::from_f32(pair[0]));
        target.store(to + second as usize, E::from_f32(pair[1]));
    });
}

/// [`rope`](fn@rope) of `tokens` tokens of each sequence and
/// [`append`](fn@crate::attention::dense::append) of their keys and values in one: they go to their places in
/// the pools `keys` and `values` [blocks, kv_heads, 16, D] by `table` [sequences, max_blocks], and `lengths`
/// \[sequences\] become one more than the last tokens' positions. Keys and values of a token past the table's
/// last block are left out. Grid as for `rope`.
#[kernel(system = model, instances(0, 1), max_threads = 128, overlaps)]
pub fn rope_append<const INTERLEAVED: u32>(
    /// [tokens, (q_heads + 2·kv_heads)·head_dim].
    qkv: Global<f32>,
    /// Where each token belongs, \[tokens\].
    positions: Global<u32>,
    /// [rotary / 2].
    frequencies: Global<f32>,
    /// [tokens, q_heads, head_dim].
    queries: GlobalMut<f16>,
    /// [sequences, max_blocks].
    table: Global<u32>,
    /// \[sequences\]: one more than the position of the last token.
    lengths: GlobalMut<u32>,
    /// The pool's keys, [blocks, kv_heads, 16, head_dim].
    keys: GlobalMut<f16>,
    /// Its values.
    values: GlobalMut<f16>,
    /// The extents.
    shape: RopeShape,
    /// Tokens of each sequence.
    tokens: u32,
    /// Entries of a row of the table.
    max_blocks: u32,
) {
    let token = thread::block_idx_y();
    let position = positions.load(token as usize);
    let index = position / BLOCK_TOKENS;
    let sequence = bits::div_u32(token, tokens);
    let last = token == sequence * tokens + tokens - 1;
    if last && index < max_blocks && thread::block_idx_x() == 0 && thread::thread_idx_x() == 0 {
        lengths.store(sequence as usize, position + 1);
    }
    // The token's row of the first KV head in a pool; none past the table.
    let row = if index < max_blocks {
        let block = table.load(sequence as usize * max_blocks as usize + index as usize);
        let head = block as usize * shape.kv_heads as usize;
        Some(head * BLOCK_TOKENS as usize + (position % BLOCK_TOKENS) as usize)
    } else {
        None
    };
    let raw = Unturned { qkv, positions, frequencies, shape };
    turn_all::<INTERLEAVED>(raw, token, |head, channels, pair| {
        let (target, row) = if head < shape.q_heads {
            (queries, token as usize * shape.q_heads as usize + head as usize)
        } else if let Some(row) = row {
            let is_key = head < shape.q_heads + shape.kv_heads;
            let kv_head = head - shape.q_heads - if is_key { 0 } else { shape.kv_heads };
            (if is_key { keys } else { values }, row + (kv_head * BLOCK_TOKENS) as usize)
        } else {
            return;
        };
        let to = row * shape.head_dim as usize;
        let pair = pair.map(f16_from_f32);
        if INTERLEAVED == 1 {
            let both = u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16;
            target.store_vector::<u32>(to + channels[0] as usize, both);
        } else {
            target.store(to + channels[0] as usize, pair[0]);
            target.store(to + channels[1] as usize, pair[1]);
        }
    });
}

/// Turns this thread's pairs of a token, and hands `put` each with its head (among the query heads, key heads
/// and value heads) and its channels.
#[simt::device]
fn turn_all<const INTERLEAVED: u32>(raw: Unturned, token: u32, put: impl Fn(u32, [u32; 2], [f32; 2])) {
    let (half, pairs) = (raw.shape.head_dim / 2, raw.shape.pairs());
    let stride = thread::grid_dim_x() * ROPE_THREADS;
    let mut item = thread::block_idx_x() * ROPE_THREADS + thread::thread_idx_x();
    // Which pair of a head the angle is of: none yet.
    let (mut angle_of, mut angle) = (half, (0.0, 1.0));
    while item < pairs {
        let mut all = [None; UNDER_WAY as usize];
        unroll!(for n in 0..4 {
            let item = item + n as u32 * stride;
            if item < pairs {
                let (head, i) = (bits::div_u32(item, half), bits::rem_u32(item, half));
                all[n] = Some((head, i, raw.load::<INTERLEAVED>(token, head, i)));
            }
        });
        unroll!(for n in 0..4 {
            if let Some((head, i, pair)) = all[n] {
                if pair.turns && i != angle_of {
                    (angle_of, angle) = (i, pair.angle());
                }
                put(head, pair.channels, pair.turned_by(angle));
            }
        });
        item += UNDER_WAY * stride;
    }
}

/// What a product gives, and what turns it.
#[derive(Clone, Copy)]
pub(crate) struct Unturned {
    /// [tokens, (q_heads + 2·kv_heads)·head_dim].
    pub qkv: Global<f32>,
    /// \[tokens\].
    pub positions: Global<u32>,
    /// [rotary / 2].
    pub frequencies: Global<f32>,
    /// The extents.
    pub shape: RopeShape,
}

impl Unturned {
    /// Loads pair `i` of head `head` among the query heads, key heads and value heads of a token: all at
    /// once, so that a caller can have several pairs under way.
    #[simt::device]
    pub fn load<const INTERLEAVED: u32>(self, token: u32, head: u32, i: u32) -> Pair {
        let Unturned { qkv, positions, frequencies, shape } = self;
        let channels = pair_channels(i, shape.rotary, INTERLEAVED == 1);
        let heads = shape.q_heads + 2 * shape.kv_heads;
        let from = (token as usize * heads as usize + head as usize) * shape.head_dim as usize;
        let values = if INTERLEAVED == 1 {
            qkv.load_vector(from + channels[0] as usize)
        } else {
            channels.map(|channel| qkv.load(from + channel as usize))
        };
        let position = positions.load(token as usize);
        let turns = head < shape.q_heads + shape.kv_heads && i < shape.rotary / 2;
        let frequency = if turns { frequencies.load(i as usize) } else { 0.0 };
        Pair { channels, values, turns, position, frequency }
    }
}

/// A pair as a product gives it.
#[derive(Clone, Copy)]
pub(crate) struct Pair {
    /// Its channels.
    pub channels: [u32; 2],
    values: [f32; 2],
    /// Whether it turns.
    turns: bool,
    position: u32,
    frequency: f32,
}

impl Pair {
    /// What the channels are, turned if they turn.
    #[simt::device]
    pub fn turned(self) -> [f32; 2] {
        self.turned_by(if self.turns { self.angle() } else { (0.0, 1.0) })
    }

    /// Sine and cosine of the angle that it turns by.
    #[simt::device]
    fn angle(self) -> (f32, f32) {
        sin_cos(self.position as f32 * self.frequency)
    }

    /// What the channels are, turned by the angle that has this sine and cosine if they turn.
    #[simt::device]
    fn turned_by(self, angle: (f32, f32)) -> [f32; 2] {
        let pair = if self.turns { turn_by(self.values, angle) } else { self.values };
        pair.map(canonical_nan)
    }
}
