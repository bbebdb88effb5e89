//! # Mathematics
//! For a query head with transformed query q~, stored keys k~_t and values v_t, softmax scale σ:
//!
//! ```text
//! s_t = σ·q~·k~_t        o = Σ exp(s_t)·v_t / Σ exp(s_t)
//! ```
//!
//! with centroids for k~_t and v_t of all but the most recent tokens (Algorithm 1). The algorithm looks dot
//! with centroids for k~_t and v_t of all but the most recent tokens (Algorithm 1). The algorithm looks dot
//! products of sub-vectors and centroids up in a table by query head. Here the tensor cores multiply the
//! centroids themselves: a key that is fetched serves all query heads of its KV head, there is no table to
//! make, and products and sums are f32 (f16 table entries are the algorithm's main numerical risk).
//!
//! # Layout
//! `queries` [sequences, q_heads, D], rotated and not transformed. `transforms` [kv_heads, 5, D]. Codebooks
//! [2^b, d] f16, one or one for each KV head. `codes`, `recent_keys`, `recent_values`, `lengths` as for
//! [`encode`](fn@super::encode). `output` f32 like the queries. Eight queries are on one side of both
//! products of the tensor cores, and a fetched unit of four channels, two registers, is an operand as it is:
//!
//! ```text
//! scores   A: queries (rows 0 to 7 of channels X, rows 8 to 15 of Y)   B: keys (16 channels of X or Y, 8 tokens)
//! output   A: values (16 pairs of channels, 8 tokens twice)            B: probabilities in f16, 8 queries
//! ```
//!
//! Scores: channels are contracted 16 at a time, X and Y in turns; q·k is what rows 0 to 7 have of all X
//! plus what rows 8 to 15 have of all Y. Output: a register has two channels of a token, so that the
//! contraction is over (token, which of the two): a B operand with zeros in every other place takes the
//! first channels, another the second. Either way half of what is multiplied is for nothing, and no
//! instruction moves or pairs what was fetched. Scores come out as the B operands want probabilities.
//! Rounding p to f16 changes it by 2^−11 relative at most; the sum is of p as it was.
//!
//! # Bytes
//! b/d · D / 4 bytes a token and KV head (d = 4, b = 8, D = 128: 64 of dense's 512), each read once, and 4·D
//! for each of the up to 16·ring recent tokens.
//!
//! # Work split
//! Grid (splits, kv_heads · row groups, sequences), two thread blocks of eight warps on a multiprocessor. A
//! block takes a run of consecutive tiles of 16 tokens, its warps one after another. A lane has its codes of
//! two tiles in registers, 16 bytes of keys and 16 of values each at D = 128, d = 4, b = 8. Of a tile and
//! warp there: 32 loads of 8 bytes from shared memory, 64 wavefronts with none lost to conflicts ([`Book`]);
//! 32 `prmt` that make their addresses; 32 multiplications; some 80 for softmax and the loop.
//!
//! Warps are put together as in dense attention, and the block of a row that comes last adds the parts.

use super::Code;
use super::book::{Book, Chunks, THREADS, Words, books};
use super::running::{ABSENT, Running, Scores};
use super::transform::{Shape, load_row, round_row, transform};
use crate::attention::{
    Adding, BLOCK_TOKENS, MAX_PARTS, Merged, PartialRow, Parts, ROWS, combine, combine_to_part,
    combined_rows, last_to_arrive, part_floats, warps,
};
use glam::Vec4;
use half::f16;
use simt::math::canonical_nan;
use simt::{Global, GlobalMut, Shared, SharedPlan, bits, kernel, thread, unroll, warp};

const WARPS: u32 = THREADS / 32;
const _: () = assert!(WARPS == warps(64) && WARPS == warps(128), "results are put together by as many");

/// Thread blocks that fill the machine once: two on each of the 132 multiprocessors of a GH100. A constant,
/// as the order of additions must not depend on the device.
const BLOCKS_WANTED: u32 = 264;

/// Parts that each sequence is cut into, for `launches` rows of blocks (sequences × KV heads × row groups)
/// with room for `tiles` tiles.
pub const fn split_count(launches: u32, tiles: u32) -> u32 {
    let wanted = BLOCKS_WANTED / if launches == 0 { 1 } else { launches };
    // A part should have work for every warp, twice.
    let most = tiles.div_ceil(2 * WARPS);
    let splits = if wanted < most { wanted } else { most };
    if splits == 0 {
        1
    } else if splits > MAX_PARTS {
        MAX_PARTS
    } else {
        splits
    }
}

/// Floats of the partial results of `launches` rows of `splits` blocks.
pub const fn partial_floats(launches: u32, splits: u32, head_dim: u32) -> usize {
    launches as usize * splits as usize * part_floats(head_dim)
}

/// Shared memory of a block.
#[derive(Clone, Copy)]
pub struct Layout<const K: u32, const V: u32> {
    key_book: Book<K>,
    value_book: Book<V>,
    /// The queries, transformed, [8, D / 2] words.
    queries: Shared<u32>,
    /// In the codebooks' place, when they are done with: Σ p·v of each warp, [warps, 8, D].
    outputs: Shared<f32>,
    /// There too: where parts are added up.
    adding: Adding,
    /// References and sums, [warps, 8].
    rows: Shared<PartialRow>,
    /// Whether this block came last.
    last: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Words that the results of the warps, and a few parts, take.
const fn result_words<const D: usize>() -> u32 {
    let (outputs, adding) = (WARPS * ROWS * D as u32, Adding::words::<D>(MAX_PARTS, 4));
    if outputs > adding { outputs } else { adding }
}

/// Lays out the shared memory of an instance.
pub const fn layout<const D: usize, const K: u32, const V: u32>() -> Layout<K, V> {
    let mut plan = SharedPlan::new();
    let (key_book, value_book) = books::<K, V>(&mut plan);
    if plan.bytes() < 4 * result_words::<D>() {
        let more: Shared<u32> = plan.array(result_words::<D>() - plan.bytes() / 4);
        let _ = more;
    }
    let outputs = SharedPlan::new().array(WARPS * ROWS * D as u32);
    let adding = Adding::over::<D>(&mut SharedPlan::new(), MAX_PARTS, plan.bytes());
    let queries = plan.array(ROWS * D as u32 / 2);
    let rows = plan.array(combined_rows(D as u32));
    let last = plan.array(1);
    Layout { key_book, value_book, queries, outputs, adding, rows, last, bytes: plan.bytes() }
}

/// A step's attention of one layer. `counters` [sequences, kv_heads · row groups] are 0 before and after.
#[kernel(
    system = vecinfer,
    instances(
        (64, 208, 208), (64, 208, 408), (64, 408, 408), (64, 410, 410),
        (128, 208, 208), (128, 208, 408), (128, 408, 408), (128, 410, 410)
    ),
    max_threads = 256,
    min_blocks = 2,
    overlaps = by_hand
)]
pub fn attend<const D: usize, const K: u32, const V: u32>(
    queries: Global<f16>,
    transforms: Global<f32>,
    key_books: Global<f16>,
    value_books: Global<f16>,
    codes: Global<u8>,
    recent_keys: Global<f16>,
    recent_values: Global<f16>,
    lengths: Global<u32>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    shape: Shape,
) {
    let (split, sequence) = (thread::block_idx_x(), thread::block_idx_z());
    let head = bits::div_u32(thread::block_idx_y(), shape.row_groups());
    let row_group = bits::rem_u32(thread::block_idx_y(), shape.row_groups());
    let layout = layout::<D, K, V>();
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    // No launch writes codebooks.
    let (key_at, value_at) = ((head * shape.key_stride) as usize, (head * shape.value_stride) as usize);
    let (own_keys, own_values) =
        (Chunks::<K>::ahead(key_books, key_at), Chunks::ahead(value_books, value_at));
    thread::wait_for_previous();
    thread::let_next_start();
    let length = lengths.load(sequence as usize).min(shape.tiles * BLOCK_TOKENS);
    let Parts { tiles, tiles_a_split, used } = Parts::of(length, shape.splits);
    if split >= used {
        return;
    }
    layout.key_book.fill(own_keys, key_books, key_at);
    layout.value_book.fill(own_values, value_books, value_at);
    let first = split * tiles_a_split;
    let end = (first + tiles_a_split).min(tiles);

    // Warp w transforms query row w.
    let heads = shape.kv_heads * shape.group;
    let in_group = row_group * ROWS + warp;
    let mut words = [0; 2];
    if in_group < shape.group {
        let row = sequence * heads + head * shape.group + in_group;
        let x = load_row::<D>(queries, row as usize, lane);
        words = round_row(transform::<D>(x, transforms, head, false, shape.hadamard != 0, lane));
    }
    let at = warp * (D as u32 / 2) + lane * (D as u32 / 64);
    unroll!(for i in 0..(D / 64), at_most 2 {
        layout.queries.store(at + i as u32, words[i]);
    });
    thread::sync_threads();

    let q = load_queries::<D, K>(layout.queries, lane);
    let (g, j) = (lane >> 2, lane & 3);
    let rows = (shape.group - row_group * ROWS).min(ROWS);
    let mut running = Running::new(shape.scale_log2);
    if g >= rows {
        running.reference = ABSENT;
    }
    let row = sequence as usize * shape.kv_heads as usize + head as usize;
    let coded = shape.coded(length).min(end);
    let mut tile = first + warp;

    let (key_bytes, value_bytes) = (Code::of(K).tile_bytes(D as u32), Code::of(V).tile_bytes(D as u32));
    let tiles_at = row * shape.tiles as usize * (key_bytes + value_bytes) as usize;
    let load = |tile: u32, own: &mut (Words<K>, Words<V>)| {
        if tile < coded {
            let at = tiles_at + tile as usize * (key_bytes + value_bytes) as usize;
            own.0 = Words::load::<D>(codes, at, lane);
            own.1 = Words::load::<D>(codes, at + key_bytes as usize, lane);
        }
    };
    let (key_book, value_book) = (layout.key_book, layout.value_book);
    let (key_lane, value_lane) = (key_book.of_lane(lane), value_book.of_lane(lane));
    let mut attend = |k: &Words<K>, v: &Words<V>| {
        let mut scores = Scores::NONE;
        unroll!(for s in 0..(D / 4 / Code::of(K).unit() as usize), at_most 8 {
            let units = [0, 1].map(|h| key_book.unit(k, (2 * s + h) * of_unit(K), key_lane));
            scores.add::<K>(&q, s, units);
        });
        let p = running.weigh::<D>(scores.sums(), BLOCK_TOKENS, j);
        let operands = Running::eight_by_eight(p);
        unroll!(for u in 0..(D / 8 / Code::of(V).unit() as usize), at_most 4 {
            let units = [0, 1, 2, 3].map(|i| value_book.unit(v, (4 * u + i) * of_unit(V), value_lane));
            running.accumulate_eight::<V>(u, units, operands);
        });
    };
    let none = (Words::NONE, Words::NONE);
    let (mut even, mut odd) = (none, none);
    load(tile, &mut even);
    load(tile + WARPS, &mut odd);
    // Two tiles a round, so that codes stay in the registers in which they came.
    while tile < coded {
        attend(&even.0, &even.1);
        tile += WARPS;
        load(tile + WARPS, &mut even);
        if tile < coded {
            attend(&odd.0, &odd.1);
            tile += WARPS;
            load(tile + WARPS, &mut odd);
        }
    }

    // Recent tokens, in f16.
    while tile < end {
        let slot = row * shape.ring as usize + bits::rem_u32(tile, shape.ring) as usize;
        let at = slot * BLOCK_TOKENS as usize * D;
        let present = length - tile * BLOCK_TOKENS;
        let mut scores = Scores::NONE;
        unroll!(for s in 0..(D / 4 / Code::of(K).unit() as usize), at_most 8 {
            let units = [g, g + 8]
                .map(|token| load_unit::<D, K>(recent_keys, at, token, 4 * s as u32 + j, present));
            scores.add::<K>(&q, s, units);
        });
        let p = running.weigh::<D>(scores.sums(), present, j);
        let operand = Running::sixteen(p);
        unroll!(for u in 0..(D / 8 / Code::of(V).unit() as usize), at_most 4 {
            let tokens = [2 * j, 2 * j + 1, 2 * j + 8, 2 * j + 9];
            let units =
                tokens.map(|token| load_unit::<D, V>(recent_values, at, token, 8 * u as u32 + g, present));
            running.accumulate_sixteen::<V>(u, units, operand);
        });
        tile += WARPS;
    }

    // The warps' results take the codebooks' place.
    thread::sync_threads();
    running.store_output::<D, V>(layout.outputs, warp * ROWS * D as u32, lane);
    let sum = running.row_sum();
    if j == 0 {
        layout.rows.store(warp * ROWS + g, PartialRow { reference: running.reference, sum });
    }
    thread::sync_threads();

    let target = Target { output, shape, sequence, head, row_group };
    let launch_row = sequence * thread::grid_dim_y() + thread::block_idx_y();
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

/// The A operands of the contractions, two steps each: X in rows 0 to 7, Y in rows 8 to 15.
#[simt::device]
fn load_queries<const D: usize, const K: u32>(queries: Shared<u32>, lane: u32) -> [[u32; 4]; 4] {
    let (g, j) = (lane >> 2, lane & 3);
    let row = g * (D as u32 / 2);
    let mut q = [[0; 4]; 4];
    unroll!(for i in 0..(D / 32), at_most 4 {
        let pair = [0, 1].map(|half| {
            // Of units of eight channels a step has half.
            let channel = if Code::of(K).unit() == 8 {
                32 * i as u32 + 8 * j + 4 * half
            } else {
                32 * i as u32 + 16 * half + 4 * j
            };
            queries.load_vector::<[u32; 2]>(row + channel / 2)
        });
        q[i] = [pair[0][0], pair[1][0], pair[0][1], pair[1][1]];
    });
    q
}

/// A unit of a recent token; zeros of a token that there is not.
#[simt::device]
fn load_unit<const D: usize, const C: u32>(
    rows: Global<f16>,
    tile: usize,
    token: u32,
    unit: u32,
    present: u32,
) -> [u32; 4] {
    let channels = Code::of(C).unit();
    let at = tile + token as usize * D + (unit * channels) as usize;
    if token >= present {
        return [0; 4];
    }
    if channels == 8 {
        return rows.load_vector::<glam::UVec4>(at).to_array();
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
