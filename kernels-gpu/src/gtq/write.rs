//! New tokens on their way into the tiles.
//!
//! # Mathematics
//! As in the [system's](super) page. With T_i the thresholds, code_d = #{i : h_d > T_i·r}: the level nearest
//! to h_d / r, without a division. r² is a sum in a fixed tree. n by [`Rule`]:
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
//! A warp a row of keys or values; four warps a block, which know nothing of each other. A lane has D/32
//! neighbouring dimensions; the codes of a unit (eight lanes of keys, four of values) are put together by
//! exchanges, and its words written by a lane each. A part is eight lanes.

use super::layout::{Side, TileLayout, stored, word};
use super::levels::MOST_LEVELS;
use super::parts::{self, PARTS, gathered, part_sum};
use super::rotation::{butterfly, with_signs};
use super::window::Place;
use crate::attention::{BLOCK_TOKENS, Half, Window};
use glam::UVec2;
use half::f16;
use simt::math::sqrt;
use simt::warp::{self, FULL_MASK, warp_shuffle_idx, warp_shuffle_xor, warp_sum_f32};
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
    /// New tokens of all sequences.
    pub rows: u32,
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
}

impl EncodeShape {
    #[inline(always)]
    const fn layout<const D: usize>(self, parted: bool) -> TileLayout {
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
/// [`SlotLayout`](super::SlotLayout); `books` [2, 2, 16]: of keys and of values thresholds and levels, as
/// [`Codebook`](super::Codebook) has them; `problems` \[2\]: of keys and of values the first row
/// (position · kv_heads + head) that could not be stored. Tokens past the table are left out. Grid
/// \[⌈2 · rows · kv_heads / 4⌉\].
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
    books: Global<f32>,
    shape: EncodeShape,
) {
    let Some(item) = Item::of_warp(positions, table, lengths, shape) else { return };
    let layout = shape.layout::<D>(false);
    let slot = item.place(near, layout);
    let target = Target { tiles, tile: item.tile(layout, shape), layout, slot, problems };
    let lane = warp::lane_id();
    // Two calls, so that each knows its side.
    if item.is_key {
        target.write_row::<D>(Side::Key, row::<D>(keys, item.pair, lane), books, item, shape);
    } else {
        target.write_row::<D>(Side::Value, row::<D>(values, item.pair, lane), books, item, shape);
    }
}

/// The same with keys in parts, the bits of [`bits`](super::parts::bits): `order` [kv_heads, D] says which
/// channel each dimension is, and `books` are [4, 2, 64] of the parts, then [2, 16] of the values.
#[kernel(system = gtq, instances(64, 128), max_threads = 128, overlaps)]
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
    let Some(item) = Item::of_warp(positions, table, lengths, shape) else { return };
    let layout = shape.layout::<D>(true);
    let slot = item.place(near, layout);
    let target = Target { tiles, tile: item.tile(layout, shape), layout, slot, problems };
    let lane = warp::lane_id();
    if item.is_key {
        let x = gathered::<D>(keys, item.pair as usize, order, item.head, lane);
        target.write_parts::<D>(x, books, item, shape);
    } else {
        target.write_row::<D>(Side::Value, row::<D>(values, item.pair, lane), books, item, shape);
    }
}

/// A row of keys or values, and where it belongs.
#[derive(Clone, Copy)]
struct Item {
    /// Row · kv_heads + head.
    pair: u32,
    head: u32,
    is_key: bool,
    position: u32,
    /// The block of the pool.
    block: u32,
    /// Its slot of all those of the window, if it has one; else any past them.
    slot: u32,
}

impl Item {
    /// A warp's, if there is one and it has a place. The first warp of a sequence's last token counts the
    /// length up.
    #[simt::device]
    fn of_warp(
        positions: Global<u32>,
        table: Global<u32>,
        lengths: GlobalMut<u32>,
        shape: EncodeShape,
    ) -> Option<Self> {
        let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
        let item = thread::block_idx_x() * (ENCODE_THREADS / 32) + warp;
        if item >= 2 * shape.rows * shape.kv_heads {
            return None;
        }
        let (pair, is_key) = (item / 2, item & 1 == 0);
        let (row, head) = (bits::div_u32(pair, shape.kv_heads), bits::rem_u32(pair, shape.kv_heads));
        let sequence = bits::div_u32(row, shape.tokens);
        let position = positions.load(row as usize);
        let index = position / BLOCK_TOKENS;
        if index >= shape.max_blocks {
            return None;
        }
        let last = bits::rem_u32(row, shape.tokens) == shape.tokens - 1;
        if last && head == 0 && is_key && lane == 0 {
            lengths.store(sequence as usize, position + 1);
        }
        let block = table.load(sequence as usize * shape.max_blocks as usize + index as usize);
        // What is past the table pushes nothing out of the window.
        let past = positions.load((sequence * shape.tokens + shape.tokens - 1) as usize) / BLOCK_TOKENS;
        let slot = if shape.window.keeps(index, past.min(shape.max_blocks - 1)) {
            (sequence * shape.kv_heads + head) * shape.window.slots + shape.window.slot(index)
        } else {
            u32::MAX
        };
        Some(Item { pair, head, is_key, position, block, slot })
    }

    /// The first byte of its tile.
    #[inline(always)]
    fn tile(self, layout: TileLayout, shape: EncodeShape) -> usize {
        (self.block * shape.kv_heads + self.head) as usize * layout.bytes() as usize
    }

    /// Its place in the window, if it has one.
    #[inline(always)]
    fn place(self, near: GlobalMut<u8>, layout: TileLayout) -> Option<Place> {
        let (layout, token) = (layout.slot(), self.position % BLOCK_TOKENS);
        let start = self.slot as usize * layout.bytes() as usize;
        if self.slot == u32::MAX { None } else { Some(Place { near, start, layout, token }) }
    }
}

/// A warp's row, D/32 dimensions a lane.
#[simt::device]
fn row<const D: usize>(source: Global<f16>, pair: u32, lane: u32) -> [f32; 4] {
    let at = pair as usize * D + lane as usize * (D / 32);
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

/// Where a warp writes.
#[derive(Clone, Copy)]
struct Target {
    tiles: GlobalMut<u8>,
    /// First byte of the tile.
    tile: usize,
    layout: TileLayout,
    /// The token's place in the window, if it has one.
    slot: Option<Place>,
    problems: GlobalMut<u32>,
}

impl Target {
    /// A whole row.
    #[simt::device]
    fn write_row<const D: usize>(
        self,
        side: Side,
        x: [f32; 4],
        books: Global<f32>,
        item: Item,
        shape: EncodeShape,
    ) {
        let lane = warp::lane_id();
        let r = sqrt(warp_sum_f32(squares(x)));
        let h = butterfly::<D, 5>(with_signs::<D>(x, lane), lane);
        let mut codes = [0u32; 4];
        let mut levels = [0f32; 4];
        let book = match side {
            Side::Key => 0,
            Side::Value if self.layout.parted => 2 * PARTS * parts::MOST_LEVELS,
            Side::Value => 2 * MOST_LEVELS,
        };
        let first = books.load_readonly(book + MOST_LEVELS);
        unroll!(for i in 0..4 {
            levels[i] = if i < D / 32 { first } else { 0.0 };
        });
        unroll!(for t in 0..(MOST_LEVELS - 1), at_most 15 {
            let threshold = books.load_readonly(book + t) * r;
            let level = books.load_readonly(book + MOST_LEVELS + t + 1);
            unroll!(for i in 0..4 {
                if i < D / 32 && h[i] > threshold {
                    codes[i] += 1;
                    levels[i] = level;
                }
            });
        });
        let sum_of_squares = warp_sum_f32(squares(levels));
        let scale = scale_of(shape.rule, shape.root, r, sum_of_squares, warp_sum_f32(dot(h, levels)));
        let fits = fits(scale);
        let stored_scale = if fits { scale } else { 0.0 };
        let token = item.position % BLOCK_TOKENS;
        write_unit::<D>(self.tiles, self.tile, self.layout, side, token, lane, codes);
        if lane == 0 {
            let to = self.tile + self.layout.norm(side, token) as usize;
            self.tiles.store_vector(to, convert::f16_from_f32(stored_scale).to_bits());
            if !fits {
                self.refuse(side, item, shape);
            }
        }
        match (self.slot, side) {
            (None, _) => {}
            (Some(slot), Side::Key) => slot.keep_key::<D, 5>(h, fits, shape.key_units, lane),
            (Some(slot), Side::Value) => {
                slot.keep_value::<D>(h, if fits { r } else { 0.0 }, [shape.value_unit, shape.root], lane);
            }
        }
    }

    /// A key in parts.
    #[simt::device]
    fn write_parts<const D: usize>(self, x: [f32; 4], books: Global<f32>, item: Item, shape: EncodeShape) {
        let lane = warp::lane_id();
        let (part, own) = (lane / 8, lane % 8);
        // √(D/4).
        let root = shape.root * 0.5;
        let r = sqrt(part_sum(squares(x)));
        let h = butterfly::<D, 3>(with_signs::<D>(x, lane), lane);
        let near = parts::nearest_scale(r, root);
        let mut codes = [0u32; 4];
        let mut levels = [0f32; 4];
        let book = part as usize * 2 * parts::MOST_LEVELS;
        unroll!(for i in 0..4 {
            if i < D / 32 {
                // The number of thresholds below, bit by bit.
                unroll!(for bit in 0..6 {
                    let step = 32 >> bit as u32;
                    let threshold = books.load_readonly(book + (codes[i] + step - 1) as usize);
                    codes[i] += if h[i] > threshold * near { step } else { 0 };
                });
                levels[i] = books.load_readonly(book + parts::MOST_LEVELS + codes[i] as usize);
            }
        });
        let n = scale_of(shape.rule, root, r, part_sum(squares(levels)), part_sum(dot(h, levels)));
        let byte = parts::norm_byte(n);
        let refused = warp::warp_vote_any(FULL_MASK, byte > 255);

        let of_part = |all: [u32; PARTS]| {
            let [a, b, c, d] = all;
            let pick = if part & 1 == 0 { (a, c) } else { (b, d) };
            if part & 2 == 0 { pick.0 } else { pick.1 }
        };
        let (bits, fields) = (of_part(parts::bits(shape.key_bits)), of_part(parts::fields(shape.key_bits)));
        let each = D as u32 / 32;
        let mut nibbles = 0u64;
        unroll!(for i in 0..4 {
            if i < D / 32 {
                let nibble = if D == 128 { i as u32 } else { own % 2 * each + i as u32 };
                nibbles |= parts::in_nibbles(stored(bits, codes[i]), bits, fields, nibble);
            }
        });
        // All parts' bits are in the same words, and of D = 64 those of two lanes.
        let mut words = [nibbles as u32, (nibbles >> 32) as u32];
        unroll!(for w in 0..2 {
            words[w] |= warp_shuffle_xor(FULL_MASK, words[w], 8, 32);
            words[w] |= warp_shuffle_xor(FULL_MASK, words[w], 16, 32);
            if D == 64 {
                words[w] |= warp_shuffle_xor(FULL_MASK, words[w], 1, 32);
            }
        });
        let token = item.position % BLOCK_TOKENS;
        // The lanes of part p write word p.
        let pair = if part & 2 == 0 { words[0] } else { words[1] };
        let word = (if part & 1 == 0 { pair } else { pair >> 16 }) as u16;
        if part < shape.key_bits && (D == 128 || own & 1 == 0) {
            let to = self.tile + self.layout.nibbles(token, own / 2, part, own % 2) as usize;
            self.tiles.store_vector(to, word);
        }
        if own == 0 {
            let to = self.tile + (self.layout.norm(Side::Key, token) + part) as usize;
            self.tiles.store(to, if refused { 0 } else { byte as u8 });
            if refused && part == 0 {
                self.refuse(Side::Key, item, shape);
            }
        }
        if let Some(slot) = self.slot {
            slot.keep_key::<D, 3>(h, !refused, shape.key_units, lane);
        }
    }

    /// Says that a row could not be stored.
    #[simt::device]
    fn refuse(self, side: Side, item: Item, shape: EncodeShape) {
        let place = if side == Side::Key { 0 } else { 1 };
        self.problems.atomic_min(place, item.position * shape.kv_heads + item.head);
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

/// Writes the codes of a warp's row.
#[simt::device]
fn write_unit<const D: usize>(
    tiles: GlobalMut<u8>,
    tile: usize,
    layout: TileLayout,
    side: Side,
    token: u32,
    lane: u32,
    codes: [u32; 4],
) {
    let each = D as u32 / 32;
    let bits = layout.bits(side);
    let lanes = side.unit_dims(D as u32) / each;
    let (unit, own) = (lane / lanes, lane % lanes);
    let in_selector = side.in_selector();
    // The token's bits in this lane's selectors, one above the other; of keys at D = 64 two lanes have one.
    let mut selectors = 0;
    unroll!(for i in 0..4 {
        if i < D / 32 {
            selectors |= stored(bits, codes[i]) << (4 * i as u32);
        }
    });
    if each < in_selector {
        selectors <<= 8 * (lane & 1);
        selectors |= warp_shuffle_xor(FULL_MASK, selectors, 1, 32);
    }
    let selector = |k: u32| {
        // Past the last one any will do: its word is not written.
        let first = in_selector * (k % (D as u32 / 16));
        let all = warp_shuffle_idx(FULL_MASK, selectors, unit * lanes + first / each, 32);
        if in_selector < each { all >> (4 * (first % each)) & 0xff } else { all }
    };
    let words = layout.words(side);
    unroll!(for i in 0..2 {
        let w = own + lanes * i as u32;
        if i as u32 * lanes < words {
            let word = word(bits, w, selector);
            if w < words {
                let to = tile + layout.column(side, token, unit, w) as usize;
                match side {
                    Side::Key => tiles.store_vector(to, word as u16),
                    Side::Value => tiles.store(to, word as u8),
                }
            }
        }
    });
}
