//! New tokens on their way into a cache.
//!
//! # Mathematics
//! As in the [system's](super) head. A group of tokens is quantized when its last token comes, from the ring
//! of recent tokens and the new ones: what its codes are does not depend on the chunks that it came in. A
//! number that is none counts as 0 in codes and stays what it is in f16; `refused` says where the first one
//! was.
//!
//! # Layout
//! `keys`, `values` [sequences, tokens, kv_heads, D]; `positions` [sequences, tokens], of which the first of
//! each sequence is read: its tokens follow each other from there on, and those past its room are left out.
//! The rest as for [`attend`](fn@super::attend).
//!
//! # Bytes
//! A token and KV head: 4·D bytes read, and 4·D written to the ring if it is still there at the chunk's end.
//! With the last token of a group the others are read once more, 4·D·G bytes, and the group's block written.
//!
//! # Work split
//! Grid (groups that a chunk can touch, 2 · kv_heads, sequences): a thread block a group of keys or of
//! values. First each thread takes channels (of values: a token's group of channels) to find mn and mx; then
//! each takes words of codes. A block reads the ring only of the chunk's first group; it then writes to the
//! place in the ring which that group has, and others to theirs, so that nobody writes what another reads.

use super::layout::{Layout, MOST_GROUP, Shape, Side};
use super::{code_of, counted, scale_of};
use crate::attention::BLOCK_TOKENS;
use half::f16;
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, bits, convert, kernel, thread};

/// Threads of a block.
pub const ENCODE_THREADS: u32 = 128;
/// Bytes of its shared memory.
pub const ENCODE_BYTES: u32 = 4 * MOST_GROUP;

/// The extents of a launch of [`encode`](fn@encode).
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct EncodeShape {
    /// New tokens of each sequence.
    pub tokens: u32,
    /// Those of the cache.
    pub cache: Shape,
}

/// s of a group in the low half, z in the high one; of keys by channel, of values by token and channel group.
const fn scales() -> Shared<u32> {
    SharedPlan::new().array(MOST_GROUP)
}

/// See the head of the file. `lengths` \[sequences\] become one more than the last tokens' positions.
/// `refused` \[2\]: of keys and of values the first row (position · kv_heads + head) with a number that is
/// none; `u32::MAX` before.
#[kernel(system = kivi, instances(64, 128), max_threads = 128, overlaps)]
pub fn encode<const D: usize>(
    keys: Global<f16>,
    values: Global<f16>,
    positions: Global<u32>,
    codes: GlobalMut<u32>,
    recent_keys: GlobalMut<f16>,
    recent_values: GlobalMut<f16>,
    lengths: GlobalMut<u32>,
    refused: GlobalMut<u32>,
    shape: EncodeShape,
) {
    let cache = shape.cache;
    let layout = Layout { head_dim: D as u32, ..cache.layout };
    let (t, sequence) = (thread::thread_idx_x(), thread::block_idx_z());
    let kind = bits::div_u32(thread::block_idx_y(), cache.kv_heads);
    let head = bits::rem_u32(thread::block_idx_y(), cache.kv_heads);
    let first = positions.load((sequence * shape.tokens) as usize);
    let room = cache.groups * layout.group;
    if first >= room {
        return;
    }
    let past = if shape.tokens < room - first { first + shape.tokens } else { room };
    let before = layout.whole(first);
    let group = before + thread::block_idx_x();
    let begin = if first > group * layout.group { first } else { group * layout.group };
    let end = if past < (group + 1) * layout.group { past } else { (group + 1) * layout.group };
    if begin >= end {
        return;
    }
    if end == past && thread::block_idx_y() == 0 && t == 0 {
        lengths.store(sequence as usize, past);
    }
    let pair = (sequence * cache.kv_heads + head) as usize;
    let key = kind == 0;
    let rows = Rows::<D> {
        new: if key { keys } else { values },
        ring: if key { recent_keys } else { recent_values },
        ring_start: pair * (cache.slots() * layout.group) as usize * D,
        new_start: ((sequence * shape.tokens * cache.kv_heads + head) as usize) * D,
        first,
        cache,
    };

    // What is no number.
    let mut item = t;
    let words = (end - begin) * (D as u32 / 2);
    while item < words.next_multiple_of(ENCODE_THREADS) {
        let token = begin + item / (D as u32 / 2);
        let mut finite = true;
        if item < words {
            let word = rows.new_word(token, item % (D as u32 / 2));
            finite = word & 0x7c00 != 0x7c00 && word & 0x7c00_0000 != 0x7c00_0000;
        }
        if !warp::warp_vote_all(FULL_MASK, finite) && !finite {
            refused.atomic_min(kind as usize, token * cache.kv_heads + head);
        }
        item += ENCODE_THREADS;
    }

    if end == (group + 1) * layout.group {
        let to = (pair * cache.groups as usize + group as usize) * layout.group_words() as usize;
        quantize::<D>(rows, codes, to, group * layout.group, layout, key);
    }

    // The ring, where all of it has been read that this block reads.
    thread::sync_threads();
    if thread::block_idx_x() < cache.slots() {
        let last = layout.whole(past - 1);
        let kept = last - bits::rem_u32(last - group, cache.slots());
        let begin = if first > kept * layout.group { first } else { kept * layout.group };
        let end = if past < (kept + 1) * layout.group { past } else { (kept + 1) * layout.group };
        let mut item = t;
        while item < (end - begin) * (D as u32 / 2) {
            let (token, at) = (begin + item / (D as u32 / 2), item % (D as u32 / 2));
            let to = rows.ring_start + cache.near(token) as usize * D + 2 * at as usize;
            rows.ring.store_vector(to, rows.new_word(token, at));
            item += ENCODE_THREADS;
        }
    }
}

/// Rows of a sequence and KV head: new ones, and those of the ring before.
#[derive(Clone, Copy)]
struct Rows<const D: usize> {
    new: Global<f16>,
    ring: GlobalMut<f16>,
    /// First elements.
    ring_start: usize,
    new_start: usize,
    /// The first new token.
    first: u32,
    cache: Shape,
}

impl<const D: usize> Rows<D> {
    /// Channels `2·at` and `2·at + 1` of a new token.
    #[simt::device]
    fn new_word(self, token: u32, at: u32) -> u32 {
        let row = ((token - self.first) * self.cache.kv_heads) as usize * D;
        self.new.load_vector::<u32>(self.new_start + row + 2 * at as usize)
    }

    /// The same of any token that is there.
    #[simt::device]
    fn word(self, token: u32, at: u32) -> [f32; 2] {
        let word = if token >= self.first {
            self.new_word(token, at)
        } else {
            self.ring
                .load_vector::<u32>(self.ring_start + self.cache.near(token) as usize * D + 2 * at as usize)
        };
        [word, word >> 16].map(|bits| counted(f16::from_bits(bits as u16)))
    }

    /// A channel of a token that is there.
    #[simt::device]
    fn element(self, token: u32, channel: u32) -> f32 {
        let [low, high] = self.word(token, channel / 2);
        if channel.is_multiple_of(2) { low } else { high }
    }
}

/// The least and the largest so far.
#[derive(Clone, Copy)]
struct Extent {
    least: f32,
    most: f32,
}

impl Extent {
    const NONE: Self = Extent { least: f32::INFINITY, most: f32::NEG_INFINITY };

    #[inline(always)]
    fn with(self, x: f32) -> Self {
        Extent {
            least: if x < self.least { x } else { self.least },
            most: if x > self.most { x } else { self.most },
        }
    }

    /// s and z of a group.
    #[inline(always)]
    fn scales(self, bits: u32) -> u32 {
        let zero = convert::f16_from_f32(self.least).to_bits() as u32;
        scale_of(self.least, self.most, bits).to_bits() as u32 | zero << 16
    }
}

/// Writes the block of the group that begins with token `first`: its keys, or its values. The block's work.
#[simt::device]
fn quantize<const D: usize>(
    rows: Rows<D>,
    codes: GlobalMut<u32>,
    to: usize,
    first: u32,
    layout: Layout,
    key: bool,
) {
    let (t, scales) = (thread::thread_idx_x(), scales());
    let side = if key { Side::Key } else { Side::Value };
    let bits = layout.bits(side);
    let pairs = D as u32 / 2;
    if key && t < pairs {
        let mut both = [Extent::NONE; 2];
        let mut token = first;
        while token < first + layout.group {
            let [a, b] = rows.word(token, t);
            both = [both[0].with(a), both[1].with(b)];
            token += 1;
        }
        let [a, b] = both.map(|extent| extent.scales(bits));
        scales.store(2 * t, a);
        scales.store(2 * t + 1, b);
        codes.store(to + t as usize, a & 0xffff | b << 16);
        codes.store(to + (pairs + t) as usize, a >> 16 | b & 0xffff_0000);
    }
    // D/G, a power of two: groups of channels of each of G tokens.
    let of_row = layout.whole(D as u32);
    let shift = of_row.trailing_zeros();
    if !key && t < D as u32 {
        let (token, of_token) = (t >> shift, t & (of_row - 1));
        let mut extent = Extent::NONE;
        let mut at = 0;
        while at < layout.group / 2 {
            let [a, b] = rows.word(first + token, of_token * layout.group / 2 + at);
            extent = extent.with(a).with(b);
            at += 1;
        }
        scales.store(t, extent.scales(bits));
    }
    thread::sync_threads();
    let tile_words = layout.tile_words();
    if !key {
        // Words of two tokens.
        let mut item = t;
        while item < D as u32 / 2 {
            let (token, of_token) = (2 * (item >> shift), item & (of_row - 1));
            let (a, b) =
                (scales.load(token * of_row + of_token), scales.load((token + 1) * of_row + of_token));
            let (tile, of_tile) = (token / BLOCK_TOKENS, token % BLOCK_TOKENS);
            let at = D as u32 + tile * tile_words + layout.value_scale(of_tile, of_token * layout.group);
            codes.store(to + at as usize, a & 0xffff | b << 16);
            codes.store(to + at as usize + 1, a >> 16 | b & 0xffff_0000);
            item += ENCODE_THREADS;
        }
    }
    // 2, 4 or 8.
    let count = layout.words(side);
    let shift_words = count.trailing_zeros();
    let mut item = t;
    while item < layout.tiles() * 32 * count {
        let (tile, of_tile) = (item >> (5 + shift_words), item & (32 * count - 1));
        let (lane, w) = (of_tile >> shift_words, of_tile & (count - 1));
        let (token, channel) = layout.origin(side, lane, w);
        let token = tile * BLOCK_TOKENS + token;
        let mut word = 0u32;
        let mut m = 0;
        while m < if bits == 2 { 8 } else { 4 } {
            let channel = channel + Layout::step(side, m);
            // Of keys the same token's next channel, of values the next token's same one.
            let second = if key { (token, channel + 1) } else { (token + 1, channel) };
            let code = |(token, channel): (u32, u32)| {
                let place = if key { channel } else { token * of_row + layout.whole(channel) };
                let own = scales.load(place);
                let least = convert::f32_from_f16(f16::from_bits((own >> 16) as u16));
                let x = rows.element(first + token, channel);
                code_of(x, f16::from_bits(own as u16), least, bits)
            };
            word |= (code((token, channel)) | code(second) << 16) << (bits * m);
            m += 1;
        }
        let at = D as u32 + tile * tile_words + layout.word(side, lane, w);
        codes.store(to + at as usize, word);
        item += ENCODE_THREADS;
    }
}
