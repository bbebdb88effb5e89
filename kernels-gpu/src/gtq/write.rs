//! New tokens on their way into the tiles.
//!
//! # Mathematics
//! As in the [system's](super) page. With T_i the thresholds, code_d = #{i : h_d > T_i·r}: the level nearest
//! to h_d / r, without a division ([`nearest`]). r² is a sum in a fixed tree. n by [`Rule`]:
//!
//! ```text
//! none      n = r / √D
//! norm      n = r / |L|                so that |x^| = |x|
//! unbiased  n = r²·√D / Σ h_d L_d      so that x·x^ = |x|²
//! ```
//!
//! rounded to f16. A row with an element that is not finite, or with an n beyond f16, is stored as zeros, and
//! `problems` says where the first of them was.
//!
//! Tokens of the [window](super::window) are kept there as well: each chunk writes those that the window has
//! when the chunk's last token is in.
//!
//! Of keys in [parts] each part is such a row, with D/4 for D; r_p is first rounded to what a
//! byte holds, √(D/4)·n, and codes are those nearest to h over that.
//!
//! # Bytes
//! A token and KV head: 4·D bytes read, D·(k + v)/8 + 4 written, 2 more of keys in parts; to the window 4·D +
//! 8, of keys in parts 4·D + 20.
//!
//! # Work split
//! A warp a row of keys or values; four warps a block, which know nothing of each other: grid (tokens, blocks
//! of a token's rows, sequences), keys first. A lane has D/32 neighbouring dimensions; codes go to their
//! words by a few exchanges ([`pack`](super::pack)). A part is eight lanes.
//!
//! A step has few rows, and each instruction runs once: what counts is how many there are, and how many loads
//! wait for another. Rows and positions are asked for together, the table when the position is there, and
//! nothing but the last stores waits for it. Thresholds are the launch's parameters; those of parts are
//! loaded ahead of the wait for the launch before.

use super::layout::{Side, TileLayout};
use super::nearest::{self, Positive, stored_as};
use super::pack::{Column, Runs};
use super::parts::{self, PARTS, gathered, part_sum};
use super::rotation::{butterfly, with_signs};
use super::window::Place;
use crate::attention::{BLOCK_TOKENS, Half, Window};
use glam::{UVec2, Vec4};
use half::f16;
use simt::math::sqrt;
use simt::warp::{self, FULL_MASK, warp_shuffle_idx, warp_sum_f32};
use simt::{Global, GlobalMut, Pod, Zeroable, bits, convert, kernel, thread, unroll};

/// Threads of a block: four rows.
pub const ENCODE_THREADS: u32 = 128;

/// How n is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Rule {
    /// r / √D: the smallest error.
    None,
    /// The restored row is as long as the row.
    Norm,
    /// The product of row and restored row is that of the row with itself.
    Unbiased,
}

/// The extents of a launch of [`encode`](fn@encode).
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct EncodeShape {
    /// New tokens of each sequence, at least one.
    pub tokens: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Entries of a row of the block table.
    pub max_blocks: u32,
    /// Bits of a key's code.
    pub key_bits: u32,
    /// Bits of a value's code.
    pub value_bits: u32,
    /// A [`Rule`].
    pub rule: u32,
    /// √D.
    pub root: f32,
    /// 1/(32512·√D·step) of the keys' levels, of each part if they are in parts, in units of 512.
    pub key_units: [f32; PARTS],
    /// 1/step' of the values' levels.
    pub value_unit: f32,
    /// Which tiles are in the window.
    pub window: Window,
    /// The keys' levels, where keys are whole.
    pub keys: Positive,
    /// The values' levels.
    pub values: Positive,
}

impl EncodeShape {
    #[inline(always)]
    pub(super) const fn layout<const D: usize>(self, parted: bool) -> TileLayout {
        TileLayout { head_dim: D as u32, key_bits: self.key_bits, value_bits: self.value_bits, parted }
    }
}

/// Whether n fits f16: what is larger rounds to infinity.
#[inline(always)]
pub fn fits(n: f32) -> bool {
    n < 65520.0
}

/// n of a row of norm r: `squares` is Σ L², `product` Σ h·L.
#[inline(always)]
pub fn scale_of(rule: u32, root: f32, r: f32, squares: f32, product: f32) -> f32 {
    if r == 0.0 {
        0.0
    } else if rule == Rule::Norm as u32 {
        r / sqrt(squares)
    } else if rule == Rule::Unbiased as u32 {
        r * r * root / product
    } else {
        r / root
    }
}

/// See the [module](self). `keys` and `values` [rows, kv_heads, D]; `positions` \[rows\]; `table` [sequences,
/// max_blocks]; `lengths` \[sequences\] become one more than the last tokens' positions; `tiles`: the pool
/// [blocks, kv_heads] of [`TileLayout`]; `near`: the window, [sequences, kv_heads, slots] of
/// [`SlotLayout`](super::SlotLayout); `problems` \[2\]: of keys and of values the first row (position ·
/// kv_heads + head) that could not be stored. Tokens past the table are left out. Grid (tokens, ⌈2 · kv_heads
/// / 4⌉, sequences).
#[kernel(system = gtq, instances(64, 128), max_threads = 128, overlaps)]
pub fn encode<const D: usize>(
    keys: Global<f16>,
    values: Global<f16>,
    positions: Global<u32>,
    table: Global<u32>,
    lengths: GlobalMut<u32>,
    tiles: GlobalMut<u8>,
    near: GlobalMut<u8>,
    problems: GlobalMut<u32>,
    shape: EncodeShape,
) {
    let work = Work::of_warp(shape);
    if work.item >= 2 * shape.kv_heads {
        return;
    }
    let lane = warp::lane_id();
    let x = row::<D>(if work.is_key { keys } else { values }, work.pair(shape) as usize, lane);
    let memory = Memory { positions, table, lengths, tiles, near, problems };
    let target = memory.place::<D>(work, false, shape);
    // Two calls, so that each knows its side.
    if work.is_key {
        target.write_row::<D>(Side::Key, x, shape);
    } else {
        target.write_row::<D>(Side::Value, x, shape);
    }
}

/// The same with keys in parts, the bits of [`bits`](super::parts::bits): `order` [kv_heads, D] says which
/// channel each dimension is; `books`: [`PartBooks`].
#[kernel(system = gtq, instances(64, 128), max_threads = 128, overlaps = late)]
pub fn encode_parts<const D: usize>(
    keys: Global<f16>,
    values: Global<f16>,
    positions: Global<u32>,
    table: Global<u32>,
    order: Global<u8>,
    lengths: GlobalMut<u32>,
    tiles: GlobalMut<u8>,
    near: GlobalMut<u8>,
    problems: GlobalMut<u32>,
    books: Global<f32>,
    shape: EncodeShape,
) {
    let work = Work::of_warp(shape);
    let lane = warp::lane_id();
    // No launch writes these. A warp without a key has no use for them.
    let books = PartBooks::ahead(books, lane);
    let channels = parts::channels_ahead::<D>(order, work.head, lane);
    thread::wait_for_previous();
    if work.item >= 2 * shape.kv_heads {
        return;
    }
    let pair = work.pair(shape);
    let x = if work.is_key {
        gathered::<D>(channels, keys, pair as usize)
    } else {
        row::<D>(values, pair as usize, lane)
    };
    let memory = Memory { positions, table, lengths, tiles, near, problems };
    let target = memory.place::<D>(work, true, shape);
    if work.is_key {
        target.write_parts::<D>(x, books, shape);
    } else {
        target.write_row::<D>(Side::Value, x, shape);
    }
}

/// What a warp has to do.
#[derive(Clone, Copy)]
pub(super) struct Work {
    /// The token among all of the launch.
    pub row: u32,
    /// The row of the token: keys, then values; there may be none.
    pub item: u32,
    sequence: u32,
    pub head: u32,
    pub is_key: bool,
}

impl Work {
    /// A warp's, if there is one: keys come first, then values.
    #[simt::device]
    pub fn of_warp(shape: EncodeShape) -> Self {
        let item = thread::block_idx_y() * (ENCODE_THREADS / 32) + thread::thread_idx_x() / 32;
        let sequence = thread::block_idx_z();
        let is_key = item < shape.kv_heads;
        let head = (item - if is_key { 0 } else { shape.kv_heads }).min(shape.kv_heads - 1);
        Work { row: sequence * shape.tokens + thread::block_idx_x(), item, sequence, head, is_key }
    }

    /// Row · kv_heads + head.
    #[inline(always)]
    pub fn pair(self, shape: EncodeShape) -> u32 {
        self.row * shape.kv_heads + self.head
    }
}

/// A launch's memory beside the rows.
#[derive(Clone, Copy)]
pub(super) struct Memory {
    pub positions: Global<u32>,
    pub table: Global<u32>,
    pub lengths: GlobalMut<u32>,
    pub tiles: GlobalMut<u8>,
    pub near: GlobalMut<u8>,
    pub problems: GlobalMut<u32>,
}

impl Memory {
    /// Where a row goes. The first key's warp of a sequence's last token counts the length up.
    #[simt::device]
    pub fn place<const D: usize>(self, work: Work, parted: bool, shape: EncodeShape) -> Target {
        let Work { row, sequence, head, is_key, .. } = work;
        let last = (sequence + 1) * shape.tokens - 1;
        let position = self.positions.load(row as usize);
        let past = self.positions.load(last as usize) / BLOCK_TOKENS;
        let index = position / BLOCK_TOKENS;
        let present = index < shape.max_blocks;
        let entry = index.min(shape.max_blocks - 1);
        let block = self.table.load(sequence as usize * shape.max_blocks as usize + entry as usize);
        if present && row == last && head == 0 && is_key && warp::lane_id() == 0 {
            self.lengths.store(sequence as usize, position + 1);
        }
        let layout = shape.layout::<D>(parted);
        let token = position % BLOCK_TOKENS;
        // What is past the table pushes nothing out of the window.
        let kept = shape.window.keeps(entry, past.min(shape.max_blocks - 1));
        // Without last tiles the remainder is of no use, but has to be one.
        let Window { sink, slots } = shape.window;
        let own =
            if entry < sink { entry } else { sink + bits::rem_u32(entry - sink, (slots - sink).max(1)) };
        let slot = (sequence * shape.kv_heads + head) * slots + own;
        Target {
            column: Column { tiles: self.tiles, block, head, kv_heads: shape.kv_heads, layout, token },
            present,
            place: Place { near: self.near, slot, layout: layout.slot(), token },
            kept,
            problems: self.problems,
            position,
        }
    }
}

/// A warp's row, D/32 dimensions a lane.
#[simt::device]
pub(super) fn row<const D: usize>(source: Global<f16>, row: usize, lane: u32) -> [f32; 4] {
    let at = row * D + lane as usize * (D / 32);
    let mut x = [0f32; 4];
    if D == 128 {
        let [low, high] = source.load_vector::<UVec2>(at).to_array();
        let ([a, b], [c, d]) = (<f16 as Half>::unpack(low), <f16 as Half>::unpack(high));
        x = [a, b, c, d];
    } else {
        [x[0], x[1]] = <f16 as Half>::unpack(source.load_vector::<u32>(at));
    }
    x
}

/// Levels of keys in parts, in memory: positive thresholds of each part, [4, 8]; then for each lane of a
/// part four more, [4, 8, 4]; then positive levels, [4, 32].
///
/// Of up to 4 bits the eight are all thresholds, and the others infinities. Of 6 bits the eight are every
/// fourth, and lane l has the three below number l of them.
#[derive(Clone, Copy)]
pub struct PartBooks {
    books: Global<f32>,
    /// The eight of this lane's part.
    coarse: [[f32; 4]; 2],
    /// The lane's own.
    fine: [f32; 4],
}

impl PartBooks {
    /// Floats.
    pub const FLOATS: usize = PARTS * (8 + 32 + parts::MOST_LEVELS / 2);
    /// Where levels begin.
    pub const LEVELS: usize = PARTS * (8 + 32);

    /// A lane's, ahead of the wait for the launch before.
    #[simt::device]
    pub(super) fn ahead(books: Global<f32>, lane: u32) -> Self {
        let four = |at: u32| books.load_vector_ahead::<Vec4>(at as usize).to_array();
        let part = lane / 8;
        let coarse = [four(8 * part), four(8 * part + 4)];
        PartBooks { books, coarse, fine: four(8 * PARTS as u32 + 4 * lane) }
    }
}

/// Where a warp writes.
#[derive(Clone, Copy)]
pub(super) struct Target {
    column: Column,
    /// Whether the token has a place; one past the table has none.
    present: bool,
    /// The token's place in the window, if that keeps it.
    place: Place,
    kept: bool,
    problems: GlobalMut<u32>,
    position: u32,
}

impl Target {
    /// A whole row.
    #[simt::device]
    pub fn write_row<const D: usize>(self, side: Side, x: [f32; 4], shape: EncodeShape) {
        let lane = warp::lane_id();
        let r = sqrt(warp_sum_f32(squares(x)));
        let h = butterfly::<D, 5>(with_signs::<D>(x, lane), lane);
        let book = match side {
            Side::Key => &shape.keys,
            Side::Value => &shape.values,
        };
        let bits = self.column.layout.bits(side);
        let nibbles = match bits {
            2 => nearest::nibbles::<D, 2>(h, r, book),
            3 => nearest::nibbles::<D, 3>(h, r, book),
            _ => nearest::nibbles::<D, 4>(h, r, book),
        };
        let scale = if shape.rule == Rule::None as u32 {
            r / shape.root
        } else {
            let levels = nearest::levels(nibbles, D / 32, bits, book);
            let sum_of_squares = warp_sum_f32(squares(levels));
            scale_of(shape.rule, shape.root, r, sum_of_squares, warp_sum_f32(dot(h, levels)))
        };
        let fits = fits(scale);
        let (nibbles, stored_scale) = if fits { (nibbles, scale) } else { (0, 0.0) };
        if !self.present {
            return;
        }
        match bits {
            2 => self.column.write::<D, 2>(side, nibbles, lane),
            3 => self.column.write::<D, 3>(side, nibbles, lane),
            _ => self.column.write::<D, 4>(side, nibbles, lane),
        }
        if lane == 0 {
            let Column { tiles, layout, token, .. } = self.column;
            let to = self.column.tile() + layout.norm(side, token) as usize;
            tiles.store_vector(to, convert::f16_from_f32(stored_scale).to_bits());
            if !fits {
                self.refuse(side, shape);
            }
        }
        if !self.kept {
            return;
        }
        match side {
            Side::Key => self.place.keep_key::<D, 5>(h, fits, shape.key_units, lane),
            Side::Value => {
                let r = if fits { r } else { 0.0 };
                self.place.keep_value::<D>(h, r, [shape.value_unit, shape.root], lane);
            }
        }
    }

    /// A key in parts.
    #[simt::device]
    pub fn write_parts<const D: usize>(self, x: [f32; 4], books: PartBooks, shape: EncodeShape) {
        let lane = warp::lane_id();
        let (part, own) = (lane / 8, lane % 8);
        // √(D/4).
        let root = shape.root * 0.5;
        let r = sqrt(part_sum(squares(x)));
        let h = butterfly::<D, 3>(with_signs::<D>(x, lane), lane);
        let near = parts::nearest_scale(r, root);
        let bits = parts::of_part(parts::bits(shape.key_bits), part);
        let of = h.map(nearest::distance);
        let mut beyond = [0u32; 4];
        unroll!(for t in 0..7 {
            let threshold = books.coarse[t / 4][t % 4] * near;
            unroll!(for i in 0..4 {
                if i < D / 32 {
                    beyond[i] += (of[i].1 >= threshold) as u32;
                }
            });
        });
        if shape.key_bits > 2 {
            // Only the first part has more than eight levels.
            let (first, fours) = (lane & 24, if part == 0 { 4 } else { 1 });
            unroll!(for i in 0..4 {
                if i < D / 32 {
                    let between = first | beyond[i];
                    beyond[i] *= fours;
                    unroll!(for t in 0..3 {
                        let threshold = warp_shuffle_idx(FULL_MASK, books.fine[t] * near, between, 32);
                        beyond[i] += (of[i].1 >= threshold) as u32;
                    });
                }
            });
        }
        let mut codes = [0u32; 4];
        unroll!(for i in 0..4 {
            codes[i] = stored_as(bits, of[i].0, beyond[i]);
        });
        let n = if shape.rule == Rule::None as u32 {
            r / root
        } else {
            let mut levels = [0f32; 4];
            unroll!(for i in 0..4 {
                if i < D / 32 {
                    let at = PartBooks::LEVELS as u32 + part * (parts::MOST_LEVELS as u32 / 2) + beyond[i];
                    let level = books.books.load_readonly(at as usize);
                    levels[i] = if of[i].0 { level } else { -level };
                }
            });
            scale_of(shape.rule, root, r, part_sum(squares(levels)), part_sum(dot(h, levels)))
        };
        let byte = parts::norm_byte(n);
        let refused = warp::warp_vote_any(FULL_MASK, byte > 255);
        if !self.present {
            return;
        }
        self.column.write_parts::<D>(codes, !refused, Runs::of(shape.key_bits, part), lane);
        if own == 0 {
            let Column { tiles, layout, token, .. } = self.column;
            let to = self.column.tile() + (layout.norm(Side::Key, token) + part) as usize;
            tiles.store(to, if refused { 0 } else { byte as u8 });
            if refused && part == 0 {
                self.refuse(Side::Key, shape);
            }
        }
        if self.kept {
            self.place.keep_key::<D, 3>(h, !refused, shape.key_units, lane);
        }
    }

    /// Says that a row could not be stored.
    #[simt::device]
    fn refuse(self, side: Side, shape: EncodeShape) {
        let place = if side == Side::Key { 0 } else { 1 };
        self.problems.atomic_min(place, self.position * shape.kv_heads + self.column.head);
    }
}

/// Σ x² of a lane.
#[inline(always)]
pub fn squares(x: [f32; 4]) -> f32 {
    (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3])
}

/// Σ a·b of a lane.
#[inline(always)]
pub fn dot(a: [f32; 4], b: [f32; 4]) -> f32 {
    (a[0] * b[0] + a[1] * b[1]) + (a[2] * b[2] + a[3] * b[3])
}
