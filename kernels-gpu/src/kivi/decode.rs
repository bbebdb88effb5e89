//! # Mathematics
//! Of a step: for query row r with scale σ, over k^ and v^ of groups that are read from codes and over k and
//! v of the other tokens,
//!
//! ```text
//! s_t = σ·q_r·k^_t      o_r = Σ exp(s_t)·v^_t / Σ exp(s_u)
//! ```
//!
//! k^ and v^ are f16, and become the operands that [dense attention](crate::attention::dense) has of keys and
//! values in f16: the same sums in the same order, with tiles dealt out to warps and parts alike. So a step
//! has the bits of dense attention over the restored cache, and its bounds.
//!
//! Scales stay on the side of the keys. Folded into the queries, q·(code·s + z) = (q·s)·code + q·z, they
//! would cost a rounded product or two of every query element for each group, and of values nothing would be
//! gained; and s of a channel that varies little can be so small that q·s has no f16.
//!
//! # Layout
//! `queries` [sequences, kv_heads · queries, D]. `codes` [sequences, kv_heads, groups] of
//! [`Layout`](super::Layout). `recent_keys`, `recent_values` [sequences, kv_heads, slots · G, D]: a ring of
//! groups in f16. `lengths` \[sequences\] with the step's token. `output` f32 like the queries.
//!
//! # Bytes
//! D·(k + v)/8 + 8·D/G a token and KV head that is read from codes, each read once, and 4·D of the newest
//! ones: residual to residual + G − 1. s and z of keys are read by every tile of a group, which the L2 cache
//! serves. Partials as in dense attention.
//!
//! # Work split
//! Grid (splits, kv_heads · row groups, sequences), a thread block of eight warps on a multiprocessor: the
//! accumulators and what codes become want 168 registers at D = 128. A block takes a run of consecutive tiles
//! of 16 tokens, its warps one after another, each with its own ring of asynchronous copies. Tiles in f16 are
//! the last ones of a sequence and come straight from memory.

use super::layout::{Layout, Shape};
use super::tile::{Near, Rows, Tile};
use crate::attention::{
    Adding, BLOCK_TOKENS, GridPlace, MAX_PARTS, Merged, PartialRow, Parts, ROWS, Ring, Running, combine,
    combine_to_part, combined_rows, first_blocks, last_to_arrive, part_floats, walk, warps,
};
use glam::Vec4;
use half::f16;
use simt::math::canonical_nan;
use simt::{Global, GlobalMut, Shared, SharedPlan, async_copy, kernel, thread, unroll, warp};

/// Stages of a warp's ring: as many as 99 KiB have room for.
const fn stages<const D: usize, const K: u32, const V: u32>() -> u32 {
    if D == 128 && K + V == 8 { 4 } else { 5 }
}

/// Parts that there is room for at the end.
const AT_ONCE: u32 = 8;

/// Shared memory of a block.
#[derive(Clone, Copy)]
pub struct SharedLayout {
    /// The warps' rings; afterwards their results.
    ring: Shared<u32>,
    /// The same memory: Σ p·v of each warp, [warps, 8, D].
    outputs: Shared<f32>,
    /// The same memory again: where parts are added up.
    adding: Adding,
    /// References and sums, [warps, 8].
    rows: Shared<PartialRow>,
    /// The query rows.
    queries: Rows,
    /// Whether this block came last.
    last: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Lays out the shared memory of an instance.
pub const fn layout<const D: usize, const K: u32, const V: u32>() -> SharedLayout {
    let mut plan = SharedPlan::new();
    let of_rings = warps(D as u32) * stages::<D, K, V>() * Tile::<D, K, V>::WORDS;
    let of_outputs = warps(D as u32) * ROWS * D as u32;
    let of_parts = Adding::words::<D>(MAX_PARTS, AT_ONCE);
    let most = if of_rings < of_outputs { of_outputs } else { of_rings };
    let ring = plan.array(if most < of_parts { of_parts } else { most });
    // The results take the rings' place.
    let outputs = SharedPlan::new().array(of_outputs);
    let adding = Adding::over::<D>(&mut SharedPlan::new(), MAX_PARTS, plan.bytes());
    let rows = plan.array(combined_rows(warps(D as u32)));
    let queries = Rows::place::<D>(&mut plan);
    let last = plan.array(1);
    SharedLayout { ring, outputs, adding, rows, queries, last, bytes: plan.bytes() }
}

/// A step's attention of one layer. `K` and `V` are the bits of keys and values. `counters` [sequences,
/// kv_heads · row groups] are 0 before and after.
#[kernel(
    system = kivi,
    instances(
        (64, 2, 2), (64, 2, 4), (64, 4, 2), (64, 4, 4), (128, 2, 2), (128, 2, 4), (128, 4, 2), (128, 4, 4),
    ),
    max_threads = 256,
    min_blocks = 1,
    overlaps = in_turn
)]
pub fn attend<const D: usize, const K: u32, const V: u32>(
    queries: Global<f16>,
    codes: Global<u32>,
    recent_keys: Global<f16>,
    recent_values: Global<f16>,
    lengths: Global<u32>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    shape: Shape,
) {
    let GridPlace { split, sequence, head, row_group, launch_row } = GridPlace::of(shape.row_groups());
    let length = lengths.load(sequence as usize).min(shape.groups * shape.layout.group);
    let Parts { tiles, tiles_a_split, used } = Parts::of(length, shape.splits);
    // A sequence without keys still needs somebody to write its rows.
    if split >= used {
        return;
    }
    let first = split * tiles_a_split;
    let end = (first + tiles_a_split).min(tiles);
    let coded = (shape.coded(length) * shape.layout.tiles()).min(end);

    let shared = layout::<D, K, V>();
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let pair = sequence * shape.kv_heads + head;
    let ring = Tiles::<D, K, V> { memory: shared.ring, pool: codes, shape, pair, warp, lane, end: coded };
    let ahead = first_blocks(&ring, first + warp);
    let own = row_group * ROWS + warp;
    let query = (pair * shape.queries + own) as usize;
    shared.queries.load::<D>(queries, query, own < shape.queries, warp, lane);
    thread::sync_threads();
    let channels = shape.layout.whole((lane >> 2) * (D as u32 / ROWS));

    let mut running = Running::new();
    walk(&ring, first + warp, ahead, |_, stage| {
        let codes = ring.stage(stage);
        let words = codes.key_words(lane);
        let mut scores = shared.queries.scores::<D>(|i| codes.keys(&words, i, lane), lane);
        unroll!(for j in 0..2 {
            unroll!(for i in 0..2 {
                scores[j][i] *= shape.scale_log2;
            });
        });
        running.add::<f16, D>(scores, codes.values(channels, lane), lane);
    });

    // Tokens in f16.
    let mut tile = first + warp;
    if tile < coded {
        tile += (coded - tile).div_ceil(warps(D as u32)) * warps(D as u32);
    }
    while tile < end {
        let rows = (pair * shape.slots() * shape.layout.group) as usize;
        let start = (rows + shape.near(tile * BLOCK_TOKENS) as usize) * D;
        let present = length - tile * BLOCK_TOKENS;
        let near = Near::<D> { keys: recent_keys, values: recent_values, start, present };
        let mut scores = shared.queries.scores::<D>(|i| near.keys(i, lane), lane);
        unroll!(for j in 0..2 {
            unroll!(for i in 0..2 {
                let token = 8 * j as u32 + 2 * (lane & 3) + i as u32;
                let scaled = scores[j][i] * shape.scale_log2;
                scores[j][i] = if token < present { scaled } else { f32::NEG_INFINITY };
            });
        });
        running.add::<f16, D>(scores, near, lane);
        tile += warps(D as u32);
    }

    // The warps' results take the rings' place: all copies have landed, all tiles are read.
    async_copy::wait::<0>();
    thread::sync_threads();
    running.store_output::<D>(shared.outputs, warp * ROWS * D as u32, lane);
    let sum = running.row_sum();
    if lane & 3 == 0 {
        shared.rows.store(warp * ROWS + (lane >> 2), PartialRow { reference: running.reference, sum });
    }
    thread::sync_threads();

    let target = Target { output, shape, pair, row_group };
    let floats = part_floats(D as u32);
    let base = launch_row as usize * shape.splits as usize * floats;
    if used <= 1 {
        combine::<D>(shared.rows, shared.outputs, |r, d, merged| target.finish::<D>(r, d, merged));
        return;
    }
    combine_to_part::<D>(shared.rows, shared.outputs, partials, base + split as usize * floats);
    if !last_to_arrive(counters, launch_row, used, shared.last) {
        return;
    }
    let rows = (shape.queries - row_group * ROWS).min(ROWS);
    let place = |split: u32| base + split as usize * floats;
    shared
        .adding
        .parts::<D>(used, rows, partials.as_const(), place, |r, d, merged| target.finish::<D>(r, d, merged));
}

/// A warp's tiles of codes.
struct Tiles<const D: usize, const K: u32, const V: u32> {
    memory: Shared<u32>,
    pool: Global<u32>,
    shape: Shape,
    /// The sequence and KV head among all.
    pair: u32,
    warp: u32,
    lane: u32,
    end: u32,
}

impl<const D: usize, const K: u32, const V: u32> Tiles<D, K, V> {
    #[inline(always)]
    fn stage(&self, stage: u32) -> Tile<D, K, V> {
        Tile::at(self.memory, (self.warp * stages::<D, K, V>() + stage) * Tile::<D, K, V>::WORDS)
    }
}

impl<const D: usize, const K: u32, const V: u32> Ring for Tiles<D, K, V> {
    const STAGES: u32 = stages::<D, K, V>();
    const STRIDE: u32 = warps(D as u32);
    const LOOKS_AHEAD: bool = false;

    #[inline(always)]
    fn end(&self) -> u32 {
        self.end
    }

    /// There is no table.
    #[inline(always)]
    fn block(&self, _: u32) -> u32 {
        0
    }

    #[simt::device]
    fn start(&self, tile: u32, _: u32, stage: u32) {
        let Shape { groups, layout, .. } = self.shape;
        let layout = Layout { head_dim: D as u32, key_bits: K, value_bits: V, ..layout };
        let group = layout.whole(tile * BLOCK_TOKENS);
        let scales = (self.pair * groups + group) as usize * layout.group_words() as usize;
        let own = D as u32 + (tile & (layout.tiles() - 1)) * layout.tile_words();
        self.stage(stage).copy(self.pool, scales, scales + own as usize, layout.tile_words() / 4, self.lane);
    }
}

/// Where finished rows go.
#[derive(Clone, Copy)]
struct Target {
    output: GlobalMut<f32>,
    shape: Shape,
    /// The sequence and KV head among all.
    pair: u32,
    row_group: u32,
}

impl Target {
    /// Four dimensions of a row. A row that sees no key is 0.
    #[simt::device]
    fn finish<const D: usize>(self, r: u32, d: u32, merged: Merged) {
        let row = self.row_group * ROWS + r;
        if row >= self.shape.queries {
            return;
        }
        let at = self.pair * self.shape.queries + row;
        let PartialRow { sum, .. } = merged.row;
        let value = merged.values.map(|x| if sum == 0.0 { 0.0 } else { canonical_nan(x / sum) });
        self.output.store_vector(at as usize * D + d as usize, Vec4::from_array(value));
    }
}
