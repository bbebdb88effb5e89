//! # Mathematics
//! For a query head with transformed query q~, stored keys k~_t and values v_t, softmax scale σ:
//!
//! ```text
//! s_t = σ·q~·k~_t        o = Σ exp(s_t)·v_t / Σ exp(s_t)
//! ```
//!
//! with centroids for k~_t and v_t of all but the most recent tokens (Algorithm 1). The algorithm looks dot
//! products of sub-vectors and centroids up in a table by query head. Here the tensor cores multiply the
//! centroids themselves: a key that is fetched serves all query heads of its KV head, there is no table to
//! make, and products and sums are f32 (f16 table entries are the algorithm's main numerical risk).
//!
//! # Layout
//! `queries` [sequences, q_heads, D], rotated and not transformed. `transforms` [kv_heads, 5, D]. Codebooks
//! [2^b, d] f16, one or one for each KV head. `codes`, `recent_keys`, `recent_values`, `lengths` as for
//! [`encode`](fn@super::encode). `output` f32 like the queries. The tensor cores' operands are
//!
//! ```text
//! scores   A: keys (16 tokens, 16 channels)       B: queries (16 channels, 8 queries)
//! output   A: values (16 channels, 16 tokens)     B: probabilities in f16 (16 tokens, 8 queries)
//! ```
//!
//! So eight queries fill both products, and a unit of four channels is two registers of either A operand,
//! whichever way it was fetched. Between the two, probabilities are transposed, by four shuffles. Rounding p
//! to f16 changes it by 2^−11 relative at most; the sum is of p as it was.
//!
//! # Bytes
//! b/d · D / 4 bytes a token and KV head (d = 4, b = 8, D = 128: 64 of dense's 512), each read once, and 4·D
//! for each of the up to 16·ring recent tokens.
//!
//! # Work split
//! Grid (splits, kv_heads · row groups, sequences), two thread blocks of eight warps on a multiprocessor. A
//! block takes a run of consecutive tiles of 16 tokens, its warps one after another. A lane has its codes of
//! two tiles ahead in registers, 16 bytes of keys and 16 of values each at D = 128, d = 4, b = 8, in two
//! loads. Of a tile and warp there: 32 loads of 8 bytes from shared memory, 64 wavefronts with none lost to
//! conflicts ([`Book`]); 64 instructions that make their addresses; 32 `prmt` that put values of two tokens
//! side by side; 16 multiplications; some 80 for softmax, the transposition and the loop.
//!
//! Warps are put together as in dense attention, and the block of a row that comes last adds the parts.

use super::Code;
use super::book::{Book, Chunks, THREADS, Words};
use super::transform::{Shape, load_row, round_row, transform};
use crate::attention::{
    Adding, BLOCK_TOKENS, Lift, MAX_PARTS, Merged, PartialRow, Parts, ROWS, combine, combine_to_part,
    combined_rows, last_to_arrive, part_floats, warps,
};
use glam::Vec4;
use half::f16;
use simt::math::{canonical_nan, exp2_nonpositive, fma, max};
use simt::warp::{FULL_MASK, warp_shuffle_idx, warp_shuffle_xor, warp_vote_any};
use simt::{Global, GlobalMut, Shared, SharedPlan, bits, convert, kernel, tensor, thread, unroll, warp};

const WARPS: u32 = THREADS / 32;
const _: () = assert!(WARPS == warps(64) && WARPS == warps(128), "results are put together by as many");

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
    let key_book = Book::<K>::plan(&mut plan);
    let value_book = Book::<V>::plan(&mut plan);
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
    let mut running = Running::new(shape.scale_log2, [2 * j < rows, 2 * j + 1 < rows]);
    let row = sequence as usize * shape.kv_heads as usize + head as usize;
    let coded = shape.coded(length).min(end);
    let mut tile = first + warp;

    let (key_bytes, value_bytes) = (Code::of(K).tile_bytes(D as u32), Code::of(V).tile_bytes(D as u32));
    let tiles_at = row * shape.tiles as usize * (key_bytes + value_bytes) as usize;
    let load = |tile: u32| {
        if tile >= coded {
            return (Words::<K>::NONE, Words::<V>::NONE);
        }
        let at = tiles_at + tile as usize * (key_bytes + value_bytes) as usize;
        (Words::load::<D>(codes, at, lane), Words::load::<D>(codes, at + key_bytes as usize, lane))
    };
    let (mut next, mut later) = (load(tile), load(tile + WARPS));
    let (key_book, value_book) = (layout.key_book, layout.value_book);
    let (key_lane, value_lane) = (key_book.of_lane(lane), value_book.of_lane(lane));
    while tile < coded {
        let (k, v) = next;
        next = later;
        later = load(tile + 2 * WARPS);
        let mut scores = [0f32; 4];
        unroll!(for s in 0..(D / 4 / Code::of(K).unit() as usize), at_most 8 {
            let units = [0, 1].map(|h| key_book.unit(&k, (2 * s + h) * of_unit(K), key_lane));
            scores = multiply_keys::<K>(&q, s, units, scores);
        });
        let b = running.weigh::<D, true>(scores, BLOCK_TOKENS, lane);
        unroll!(for p in 0..(D / 8 / Code::of(V).unit() as usize), at_most 4 {
            let units = [0, 1, 2, 3].map(|i| value_book.unit(&v, (4 * p + i) * of_unit(V), value_lane));
            running.accumulate::<V>(p, units, b);
        });
        tile += WARPS;
    }

    // Recent tokens, in f16.
    while tile < end {
        let slot = row * shape.ring as usize + bits::rem_u32(tile, shape.ring) as usize;
        let at = slot * BLOCK_TOKENS as usize * D;
        let present = length - tile * BLOCK_TOKENS;
        let mut scores = [0f32; 4];
        unroll!(for s in 0..(D / 4 / Code::of(K).unit() as usize), at_most 8 {
            let units = [g, g + 8]
                .map(|token| load_unit::<D, K>(recent_keys, at, token, 4 * s as u32 + j, present));
            scores = multiply_keys::<K>(&q, s, units, scores);
        });
        let b = running.weigh::<D, false>(scores, present, lane);
        unroll!(for p in 0..(D / 8 / Code::of(V).unit() as usize), at_most 4 {
            let tokens = [2 * j, 2 * j + 1, 2 * j + 8, 2 * j + 9];
            let units =
                tokens.map(|token| load_unit::<D, V>(recent_values, at, token, 8 * p as u32 + g, present));
            running.accumulate::<V>(p, units, b);
        });
        tile += WARPS;
    }

    // The warps' results take the codebooks' place.
    thread::sync_threads();
    running.store_output::<D, V>(layout.outputs, warp * ROWS * D as u32, lane);
    let sums = running.row_sums();
    if g == 0 {
        unroll!(for i in 0..2 {
            let row = PartialRow { reference: running.reference[i], sum: sums[i] };
            layout.rows.store(warp * ROWS + 2 * j + i as u32, row);
        });
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

/// The B operands of all steps of a contraction: two words of row `g` each.
#[simt::device]
fn load_queries<const D: usize, const K: u32>(queries: Shared<u32>, lane: u32) -> [[u32; 2]; 8] {
    let (g, j) = (lane >> 2, lane & 3);
    let row = g * (D as u32 / 2);
    let mut q = [[0; 2]; 8];
    unroll!(for s in 0..(D / 16), at_most 8 {
        // Of units of eight channels a step has half.
        let channel = if Code::of(K).unit() == 8 {
            32 * (s as u32 / 2) + 8 * j + 4 * (s as u32 % 2)
        } else {
            16 * s as u32 + 4 * j
        };
        q[s] = queries.load_vector::<[u32; 2]>(row + channel / 2);
    });
    q
}

/// Adds the products of one unit of keys, of tokens g and g + 8.
#[simt::device]
fn multiply_keys<const K: u32>(
    q: &[[u32; 2]; 8],
    s: usize,
    [low, high]: [[u32; 4]; 2],
    c: [f32; 4],
) -> [f32; 4] {
    if Code::of(K).unit() == 8 {
        let c = tensor::mma_f16([low[0], high[0], low[1], high[1]], q[2 * s % 8], c);
        return tensor::mma_f16([low[2], high[2], low[3], high[3]], q[(2 * s + 1) % 8], c);
    }
    tensor::mma_f16([low[0], high[0], low[1], high[1]], q[s], c)
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

/// What a warp has accumulated for its eight query rows; each lane its share. Lane (g, j) has the scores of
/// tokens g and g + 8 of a tile and rows 2j and 2j + 1, and these rows' output.
struct Running {
    /// Of channels x and x + 1 of a unit (see [`accumulate`](Self::accumulate)): of the first for both rows,
    /// then of the second.
    output: [[f32; 4]; 8],
    /// As in dense attention, of both rows.
    reference: [f32; 2],
    sum: [f32; 2],
    scale: f32,
    /// 0, or −∞ where the row is of no query.
    bias: [f32; 2],
}

impl Running {
    #[inline(always)]
    fn new(scale: f32, present: [bool; 2]) -> Self {
        let bias = present.map(|present| if present { 0.0 } else { f32::NEG_INFINITY });
        Running {
            output: [[0.0; 4]; 8],
            reference: [PartialRow::EMPTY.reference; 2],
            sum: [0.0; 2],
            scale,
            bias,
        }
    }

    /// The probabilities of a tile's scores as a B operand; of the first `present` tokens, of all if `FULL`.
    #[simt::device]
    fn weigh<const D: usize, const FULL: bool>(
        &mut self,
        scores: [f32; 4],
        present: u32,
        lane: u32,
    ) -> [u32; 2] {
        let (g, j) = (lane >> 2, lane & 3);
        let mut s = scores;
        unroll!(for i in 0..4 {
            s[i] = fma(s[i], self.scale, self.bias[i % 2]);
            let token = g + 8 * (i as u32 / 2);
            s[i] = if FULL || token < present { s[i] } else { f32::NEG_INFINITY };
        });
        let largest = [max(s[0], s[2]), max(s[1], s[3])];
        let wanted =
            Lift::wanted(largest[0], self.reference[0]) | Lift::wanted(largest[1], self.reference[1]);
        if warp_vote_any(FULL_MASK, wanted) {
            let mut factor = [0f32; 2];
            unroll!(for i in 0..2 {
                let mut new = Lift::to(largest[i], self.reference[i]);
                unroll!(for k in 0..3 {
                    new = max(new, warp_shuffle_xor(FULL_MASK, new, 4 << k, 32));
                });
                factor[i] = exp2_nonpositive(self.reference[i] - new);
                self.reference[i] = new;
                self.sum[i] *= factor[i];
            });
            unroll!(for t in 0..(D / 16), at_most 8 {
                unroll!(for i in 0..4 {
                    self.output[t][i] *= factor[i % 2];
                });
            });
        }
        let mut p = [0f32; 4];
        unroll!(for i in 0..4 {
            p[i] = exp2_nonpositive(s[i] - self.reference[i % 2]);
        });
        self.sum = [self.sum[0] + (p[0] + p[2]), self.sum[1] + (p[1] + p[3])];
        // Rows of eight tokens to rows of eight queries: of tokens 2j and 2j + 1 what lane 4·token + g/2 has.
        let select = if g & 1 == 0 { 0x5410 } else { 0x7632 };
        let transposed = |x: u32| {
            let of = |token: u32| warp_shuffle_idx(FULL_MASK, x, 4 * token + g / 2, 32);
            bits::byte_perm(of(2 * j), of(2 * j + 1), select)
        };
        [transposed(convert::f16x2_from_f32(p[0], p[1])), transposed(convert::f16x2_from_f32(p[2], p[3]))]
    }

    /// Adds the values of one unit of the four tokens of a lane: word x has channels 2x and 2x + 1 of it.
    #[simt::device]
    fn accumulate<const V: u32>(&mut self, p: usize, units: [[u32; 4]; 4], b: [u32; 2]) {
        let words = Code::of(V).unit() as usize / 2;
        unroll!(for x in 0..(Code::of(V).unit() as usize / 2), at_most 4 {
            let a = [
                bits::byte_perm(units[0][x], units[1][x], 0x5410),
                bits::byte_perm(units[0][x], units[1][x], 0x7632),
                bits::byte_perm(units[2][x], units[3][x], 0x5410),
                bits::byte_perm(units[2][x], units[3][x], 0x7632),
            ];
            let t = (p * words + x) % 8;
            self.output[t] = tensor::mma_f16(a, b, self.output[t]);
        });
    }

    /// The rows' sums, in each of their eight lanes.
    #[simt::device]
    fn row_sums(&self) -> [f32; 2] {
        let mut sums = self.sum;
        unroll!(for k in 0..3 {
            unroll!(for i in 0..2 {
                sums[i] += warp_shuffle_xor(FULL_MASK, sums[i], 4 << k, 32);
            });
        });
        sums
    }

    /// Writes Σ p·v of the eight rows to `target` [8, D] from element `start` on.
    #[simt::device]
    fn store_output<const D: usize, const V: u32>(&self, target: Shared<f32>, start: u32, lane: u32) {
        let (g, j) = (lane >> 2, lane & 3);
        let unit = Code::of(V).unit();
        // Two words, four channels, at a time.
        unroll!(for f in 0..(D / 32), at_most 4 {
            let in_unit = 4 * (f as u32 % (unit / 4));
            let channel = unit * (8 * (f as u32 / (unit / 4)) + g) + in_unit;
            let [a, b] = [self.output[2 * f], self.output[2 * f + 1]];
            unroll!(for i in 0..2 {
                let four = Vec4::new(a[i], a[2 + i], b[i], b[2 + i]);
                target.store_vector(start + (2 * j + i as u32) * D as u32 + channel, four);
            });
        });
    }
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
