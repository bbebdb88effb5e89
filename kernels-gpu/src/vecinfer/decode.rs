//! # Mathematics
//! For a query head with transformed query q~, stored keys k~_t and values v_t, softmax scale σ:
//!
//! ```text
//! s_t = σ·q~·k~_t        o = Σ exp(s_t)·v_t / Σ exp(s_t)
//! ```
//!
//! with centroids for k~_t and v_t of all but the first and the most recent tokens (Algorithm 1 has no first
//! ones). The algorithm looks dot products of sub-vectors and centroids up in a table by query head. Here the
//! tensor cores multiply the centroids themselves: a key that is fetched serves all query heads of its KV
//! head, there is no table to make, and products and sums are f32 (f16 table entries are the algorithm's
//! main numerical risk).
//!
//! # Layout
//! `queries` [sequences, q_heads, D], rotated and not transformed. `transforms` [kv_heads, 5, D]. Codebooks
//! of [`Code::fetched_bytes`], one or one for each KV head. `codes`, `recent_keys`, `recent_values`,
//! `lengths` as for [`encode`](fn@super::encode). `output` f32 like the queries. Eight queries are on one
//! side of both products of the tensor cores, and four channels of f16 that were fetched, two registers, are
//! an operand as they are:
//!
//! ```text
//! scores   A: queries (rows 0 to 7 of channels X, 8 to 15 of Y)   B: keys (16 channels of X or Y, 8 tokens)
//! output   A: values (16 pairs of channels, 8 tokens twice)       B: probabilities in f16, 8 queries
//! ```
//!
//! Scores of keys that are whole numbers ([`Code::whole_keys`]) are products of integers, exact: rows 0 to 7
//! are the queries' high bytes, rows 8 to 15 their low ones, and four channels that were
//! fetched are a register. Of other keys, and of recent ones, channels are contracted 16 at a time, X and Y
//! in turns; q·k is what rows 0 to 7 have of all X plus what rows 8 to 15 have of all Y, and half of what is
//! multiplied is for nothing. So is half of the output's products: a register has two channels of a token, so
//! that the contraction is over (token, which of the two); a B operand with zeros in every other place takes
//! the first channels, another the second. In return no instruction moves or pairs what was fetched. Scores
//! come out as the B operands want probabilities. Rounding p to f16 changes it by 2^−11 relative at most; the
//! sum is of p as it was. A value that is not finite makes its neighbour's output NaN as well; only recent
//! tokens can have one, and [`encode`](fn@super::encode) reports it.
//!
//! Up to four query heads on a KV head are there twice: one B operand has the first channels' probabilities
//! in its columns 0 to 3 and the second channels' in 4 to 7, and each lane has probabilities of two tokens.
//!
//! # Bytes
//! b/d · D / 4 bytes a token and KV head (d = 4, b = 8, D = 128: 64 of dense's 512), each read once, and 4·D
//! for each of the up to 16·slots tokens in f16.
//!
//! # Work split
//! Grid (splits, kv_heads · row groups, sequences), two thread blocks of eight warps on a multiprocessor, of
//! D = 256 of four warps ([`attend_wide`](fn@super::attend_wide)). A block takes a run of consecutive tiles
//! of 16 tokens, its warps one after another. A lane has its codes of two tiles in registers, 16 bytes of
//! keys and 16 of values each at D = 128, d = 4, b = 8. Of a tile and warp there: 16 loads of 4 bytes and 16
//! of 8 from shared memory, 48 wavefronts with none lost to conflicts ([`Book`]); 32 `prmt` that make their
//! addresses; 16 multiplications with four query heads and 24 with eight; some 60 or 90 for softmax and the
//! loop. At d = 8, b = 12: 16 loads of 8 bytes, of some 98 wavefronts; 64 instructions for their addresses,
//! and 64 that make f16 of values in bytes.
//!
//! Warps are put together as in dense attention, and the block of a row that comes last adds the parts.

use super::Code;
use super::book::{Book, Step, Words};
use super::layout::layout;
use super::queries::{load_integers, load_queries, store_integers, whole_scale};
use super::running::{ABSENT, Place, Running, Scores, WholeScores};
use super::transform::{OfQueries, Shape, load_row, round_row, share_row};
use crate::attention::{
    BLOCK_TOKENS, GridPlace, Merged, PartialRow, Parts, ROWS, combine, combine_to_part, last_to_arrive,
    part_floats, warps,
};
use glam::{UVec4, Vec4};
use half::f16;
use simt::math::canonical_nan;
use simt::{Global, GlobalMut, kernel, thread, unroll, warp};

/// Floats of the partial results of `launches` rows of `splits` blocks.
pub const fn partial_floats(launches: u32, splits: u32, head_dim: u32) -> usize {
    launches as usize * splits as usize * part_floats(head_dim)
}

/// Query rows of a warp, of which an instance has 4 or 8: the fewest that hold `group` query heads. Of most
/// pairs with codes of 12 bits there are only eight, as fetches bind them and not instructions.
#[inline(always)]
pub const fn rows_of(group: u32, keys: Code, values: Code) -> u32 {
    let long = keys.bits == 12 || values.bits == 12;
    let pair = keys.d == 8 && keys.number() == values.number();
    if group <= 4 && (!long || pair) { 4 } else { ROWS }
}

/// A step's attention of one layer, with `R` = [`rows_of`] the query heads of a KV head. `counters`
/// [sequences, kv_heads · row groups] are 0 before and after.
#[kernel(
    system = vecinfer,
    instances(
        (64, 208, 208, 4), (64, 208, 408, 4), (64, 408, 408, 4), (64, 410, 410, 4), (64, 808, 808, 4),
        (64, 810, 810, 4), (64, 812, 812, 4),
        (64, 208, 208, 8), (64, 208, 408, 8), (64, 408, 408, 8), (64, 410, 410, 8), (64, 808, 808, 8),
        (64, 412, 412, 8), (64, 410, 812, 8), (64, 810, 810, 8), (64, 812, 812, 8), (64, 812, 808, 8),
        (96, 208, 208, 4), (96, 408, 408, 4),
        (96, 208, 208, 8), (96, 408, 408, 8),
        (128, 208, 208, 4), (128, 208, 408, 4), (128, 408, 408, 4), (128, 410, 410, 4), (128, 808, 808, 4),
        (128, 810, 810, 4), (128, 812, 812, 4),
        (128, 208, 208, 8), (128, 208, 408, 8), (128, 408, 408, 8), (128, 410, 410, 8), (128, 808, 808, 8),
        (128, 412, 412, 8), (128, 410, 812, 8), (128, 810, 810, 8), (128, 812, 812, 8), (128, 812, 808, 8)
    ),
    max_threads = 256,
    min_blocks = 2,
    overlaps = by_hand
)]
pub fn attend<const D: usize, const K: u32, const V: u32, const R: usize>(
    queries: Global<f16>,
    transforms: Global<f32>,
    key_books: Global<u8>,
    value_books: Global<u8>,
    codes: Global<u8>,
    recent_keys: Global<f16>,
    recent_values: Global<f16>,
    lengths: Global<u32>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    shape: Shape,
) {
    attend_part::<D, K, V, R>(Arguments {
        queries,
        transforms,
        key_books,
        value_books,
        codes,
        recent_keys,
        recent_values,
        lengths,
        partials,
        counters,
        output,
        shape,
    });
}

/// The same of head_dim 256, in blocks of four warps: a lane has twice as many sums and codes there, and
/// takes 200 to 238 registers. With three blocks on a multiprocessor, and 168, some would be spilled.
#[kernel(
    system = vecinfer,
    args = attend,
    instances((256, 408, 408, 4), (256, 812, 812, 4), (256, 408, 408, 8), (256, 812, 812, 8)),
    max_threads = 128,
    min_blocks = 2,
    overlaps = by_hand
)]
pub fn attend_wide<const D: usize, const K: u32, const V: u32, const R: usize>(
    queries: Global<f16>,
    transforms: Global<f32>,
    key_books: Global<u8>,
    value_books: Global<u8>,
    codes: Global<u8>,
    recent_keys: Global<f16>,
    recent_values: Global<f16>,
    lengths: Global<u32>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    shape: Shape,
) {
    attend_part::<D, K, V, R>(Arguments {
        queries,
        transforms,
        key_books,
        value_books,
        codes,
        recent_keys,
        recent_values,
        lengths,
        partials,
        counters,
        output,
        shape,
    });
}

/// Query rows that each warp transforms.
#[inline(always)]
const fn rows_each(head_dim: u32) -> usize {
    (ROWS / warps(head_dim)) as usize
}

/// The arguments of both kernels.
#[derive(Clone, Copy)]
struct Arguments {
    queries: Global<f16>,
    transforms: Global<f32>,
    key_books: Global<u8>,
    value_books: Global<u8>,
    codes: Global<u8>,
    recent_keys: Global<f16>,
    recent_values: Global<f16>,
    lengths: Global<u32>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    shape: Shape,
}

/// What a block does.
#[simt::device]
fn attend_part<const D: usize, const K: u32, const V: u32, const R: usize>(arguments: Arguments) {
    let Arguments { queries, transforms, key_books, value_books, codes, recent_keys, recent_values, .. } =
        arguments;
    let Arguments { lengths, partials, counters, output, shape, .. } = arguments;
    let GridPlace { split, sequence, head, row_group, launch_row } = GridPlace::of(shape.row_groups());
    let layout = layout::<D, K, V>();
    let (lane, warp, warps) = (warp::lane_id(), thread::thread_idx_x() / 32, warps(D as u32));
    // No launch writes codebooks, nor the table of transformations.
    let key_at = Book::<K, true>::of_head(head, shape.key_stride != 0);
    let value_at = Book::<V, false>::of_head(head, shape.value_stride != 0);
    let own_keys = Book::<K, true>::ahead::<D>(key_books, key_at);
    let own_values = Book::<V, false>::ahead::<D>(value_books, value_at);
    let of_queries = OfQueries::ahead::<D>(transforms, head, lane);
    thread::wait_for_previous();
    thread::let_next_start();
    // Warp w transforms query row w, and the one that is as many further: loads that wait for no other. Rows
    // that there are not load the last one that there is.
    let first_row = row_group * ROWS + warp;
    let of_head = sequence * shape.kv_heads * shape.group + head * shape.group;
    let query_rows = [0, 1].map(|i| {
        let own =
            (first_row + if i < rows_each(D as u32) { warps * i as u32 } else { 0 }).min(shape.group - 1);
        load_row::<D>(queries, (of_head + own) as usize, lane)
    });
    let length = lengths.load(sequence as usize).min(shape.tiles * BLOCK_TOKENS);
    let Parts { tiles, tiles_a_split, used } = Parts::of(length, shape.splits);
    if split >= used {
        return;
    }
    let first = split * tiles_a_split;
    let end = (first + tiles_a_split).min(tiles);
    let row = sequence as usize * shape.kv_heads as usize + head as usize;
    let coded = shape.window.recent(length).min(end);
    // A tile at the front is in f16 though it is not recent: its warp takes it behind its codes.
    let front = first + warp;
    let sink = front < shape.window.sink && front < coded;
    let mut tile = if sink { front + warps } else { front };
    let (key_bytes, value_bytes) = (Code::of(K).tile_bytes(D as u32), Code::of(V).tile_bytes(D as u32));
    let tiles_at = row * shape.tiles as usize * (key_bytes + value_bytes) as usize;
    let load = |tile: u32, own: &mut (Words<K>, Words<V>)| {
        if tile < coded {
            let at = tiles_at + tile as usize * (key_bytes + value_bytes) as usize;
            own.0 = Words::load::<D>(codes, at, lane);
            own.1 = Words::load::<D>(codes, at + key_bytes as usize, lane);
        }
    };
    let none = (Words::NONE, Words::NONE);
    let (mut even, mut odd) = (none, none);
    load(tile, &mut even);
    // The second-level cache is asked for the tiles in f16, whose loads wait for each other.
    let past = tile + coded.saturating_sub(tile).div_ceil(warps) * warps;
    let mut near = if sink { front } else { past };
    while near < end {
        let slot = row * shape.window.slots as usize + shape.window.slot(near) as usize;
        let (at, bytes) = (slot * BLOCK_TOKENS as usize * D, 2 * BLOCK_TOKENS * D as u32);
        recent_keys.prefetch(at, bytes, lane == 0);
        recent_values.prefetch(at, bytes, lane == 0);
        near = if near < past { past } else { near + warps };
    }
    layout.key_book.fill::<D>(own_keys);
    layout.value_book.fill::<D>(own_values);
    load(tile + warps, &mut odd);

    unroll!(for i in 0..(rows_each(D as u32)), at_most 2 {
        let own = warp + warps * i as u32;
        let in_group = row_group * ROWS + own;
        let mut words = [0; 4];
        if in_group < shape.group {
            words = round_row(of_queries.transform::<D>(query_rows[i % 2], shape.hadamard != 0, lane));
        }
        share_row::<D>(layout.queries, own, words, lane);
        if Code::of(K).whole_keys() {
            let largest = store_integers::<D>(layout.integers, words, own, lane);
            if lane == 0 {
                layout.largest.store(own, largest);
            }
        }
    });
    thread::sync_threads();

    // Only recent keys want these of a row of integers: later, as they take 16 registers.
    let load_q = |wanted: bool| if wanted { load_queries::<D, R>(layout.queries, lane) } else { [[0; 4]; 8] };
    let q = load_q(!Code::of(K).whole_keys());
    let whole =
        if Code::of(K).whole_keys() { load_integers::<D, K, R>(layout.integers, lane) } else { [[0; 4]; 8] };
    let place = Place { g: lane >> 2, j: lane & 3 };
    let rows = (shape.group - row_group * ROWS).min(ROWS);
    let mut running = Running::<R>::new();
    if place.g % R as u32 >= rows {
        running.reference = ABSENT;
    }
    let (key_book, value_book) = (layout.key_book, layout.value_book);
    let whole_scale = if Code::of(K).whole_keys() {
        whole_scale(layout.largest.load(place.g % R as u32), shape.scale_log2)
    } else {
        0.0
    };
    let (key_lane, value_lane) = (key_book.of_lane(lane), value_book.of_lane(lane));
    let step = Book::<V, false>::step(value_books, value_at);
    let mut attend = |k: &Words<K>, v: &Words<V>| {
        let (scores, scale) = if Code::of(K).whole_keys() {
            let mut scores = WholeScores::NONE;
            unroll!(for i in 0..(D / 32), at_most 8 {
                let words = [0, 1].map(|h| {
                    if Code::of(K).d == 8 {
                        return key_book.whole(k, 2 * i + h, key_lane);
                    }
                    [0, 2].map(|s| key_book.whole(k, 4 * i + s + h, key_lane)[0])
                });
                scores.add(whole[i], words);
            });
            (scores.sums(), whole_scale)
        } else {
            let mut scores = Scores::NONE;
            unroll!(for s in 0..(D / 16), at_most 16 {
                let units = [0, 1].map(|h| key_book.unit(k, (2 * s + h) * of_unit(K), key_lane, Step::NONE));
                scores.add(&q, s, units);
            });
            (scores.sums(), shape.scale_log2)
        };
        let p = running.weigh::<D>(scores, scale, BLOCK_TOKENS, place);
        let operands = Running::<R>::operands(p, place);
        unroll!(for u in 0..(D / 8 / Code::of(V).unit() as usize), at_most 8 {
            let units = [0, 1, 2, 3].map(|i| value_book.unit(v, (4 * u + i) * of_unit(V), value_lane, step));
            running.accumulate::<V>(u, units, operands);
        });
    };
    // Two tiles a round, so that codes stay in the registers in which they came.
    while tile < coded {
        attend(&even.0, &even.1);
        tile += warps;
        load(tile + warps, &mut even);
        if tile < coded {
            attend(&odd.0, &odd.1);
            tile += warps;
            load(tile + warps, &mut odd);
        }
    }

    // Tokens in f16.
    let mut recent = if sink { front } else { tile };
    let q = if Code::of(K).whole_keys() { load_q(recent < end) } else { q };
    while recent < end {
        let slot = row * shape.window.slots as usize + shape.window.slot(recent) as usize;
        let at = slot * BLOCK_TOKENS as usize * D;
        let present = length - recent * BLOCK_TOKENS;
        let mut scores = Scores::NONE;
        unroll!(for s in 0..(D / 16), at_most 16 {
            let units = [place.g, place.g + 8]
                .map(|token| load_unit::<D, 4>(recent_keys, at, token, 4 * s as u32 + place.j, present));
            scores.add(&q, s, units);
        });
        let p = running.weigh::<D>(scores.sums(), shape.scale_log2, present, place);
        let operands = Running::<R>::operands(p, place);
        unroll!(for u in 0..(D / 8 / Code::of(V).unit() as usize), at_most 8 {
            let tokens = [0, 1, 8, 9].map(|token| 2 * place.j + token);
            let units = tokens.map(|token| {
                let unit = 8 * u as u32 + place.g;
                if Code::of(V).unit() == 8 {
                    load_unit::<D, 8>(recent_values, at, token, unit, present)
                } else {
                    load_unit::<D, 4>(recent_values, at, token, unit, present)
                }
            });
            running.accumulate::<V>(u, units, operands);
        });
        recent = if recent < tile { tile } else { recent + warps };
    }

    // The warps' results take the codebooks' place.
    thread::sync_threads();
    running.store_output::<D, V>(layout.outputs, warp * ROWS * D as u32, place);
    let sum = running.row_sum();
    if place.j == 0 {
        let own = PartialRow { reference: running.reference, sum };
        layout.rows.store(warp * ROWS + place.g, if place.g < R as u32 { own } else { PartialRow::EMPTY });
    }
    thread::sync_threads();

    let target = Target { output, shape, sequence, head, row_group };
    let floats = part_floats(D as u32);
    let base = launch_row as usize * shape.splits as usize * floats;
    if used <= 1 {
        combine::<D>(layout.rows, layout.outputs, |r, d, merged| target.finish::<D>(r, d, merged));
        return;
    }
    combine_to_part::<D>(layout.rows, layout.outputs, partials, base + split as usize * floats);
    if !last_to_arrive(counters, launch_row, used, layout.last) {
        return;
    }
    let place = |split: u32| base + split as usize * floats;
    layout
        .adding
        .parts::<D>(used, rows, partials.as_const(), place, |r, d, merged| target.finish::<D>(r, d, merged));
}

/// Sub-vectors of a unit.
#[inline(always)]
const fn of_unit(code: u32) -> usize {
    (Code::of(code).unit() / Code::of(code).d) as usize
}

/// `CHANNELS` channels of a recent token; zeros of a token that there is not.
#[simt::device]
fn load_unit<const D: usize, const CHANNELS: u32>(
    rows: Global<f16>,
    tile: usize,
    token: u32,
    unit: u32,
    present: u32,
) -> [u32; 4] {
    let at = tile + token as usize * D + (unit * CHANNELS) as usize;
    if token >= present {
        return [0; 4];
    }
    if CHANNELS == 8 {
        return rows.load_vector::<UVec4>(at).to_array();
    }
    let [a, b] = rows.load_vector::<glam::UVec2>(at).to_array();
    [a, b, 0, 0]
}

/// Where finished rows go.
#[derive(Clone, Copy)]
struct Target {
    output: GlobalMut<f32>,
    shape: Shape,
    sequence: u32,
    head: u32,
    row_group: u32,
}

impl Target {
    /// Four dimensions of a row. A row that sees no key is 0.
    #[simt::device]
    fn finish<const D: usize>(self, r: u32, d: u32, merged: Merged) {
        let row = self.row_group * ROWS + r;
        if row >= self.shape.group {
            return;
        }
        let heads = self.shape.kv_heads * self.shape.group;
        let at = self.sequence * heads + self.head * self.shape.group + row;
        let PartialRow { sum, .. } = merged.row;
        let value = merged.values.map(|x| if sum == 0.0 { 0.0 } else { canonical_nan(x / sum) });
        self.output.store_vector(at as usize * D + d as usize, Vec4::from_array(value));
    }
}
