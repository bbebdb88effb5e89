//! # Mathematics
//! For query row r with scale σ: s_t = σ·q_r·k_t, a_t = exp(s_t) / Σ exp(s_u), o_r = Σ a_t·v_t, lse_r = ln Σ
//! exp(s_u). Scores are kept in log2 units, s·log2(e).
//!
//! # Layout
//! `queries` [sequences, query_tokens, kv_heads · group, D]. `keys`, `values`: pools of blocks, [blocks,
//! kv_heads, 16, D]. `table` [sequences, max_blocks]: a sequence's blocks in order. `lengths` \[sequences\]
//! counts the keys, those of the query tokens included; query token i of n sees `length − (n − 1 − i)` of
//! them. `output` f32 like `queries`; `lse` f32 [sequences, query_tokens, kv_heads · group].
//!
//! # Bytes
//! 4·D a token and KV head are read once (2·D of keys, 2·D of values); at head_dim 128, 512 bytes. Partials:
//! (8·D + 16)·4 bytes a block written and read: 132 blocks, 0.5 MB.
//!
//! # Work split
//! Grid (splits, kv_heads · row groups, sequences). A block takes a run of consecutive tiles of 16 tokens,
//! its warps (eight, four at head_dim 256) one after another, each with its own ring of asynchronous copies
//! and its own online softmax: no block barrier in the loop. At the end the warps' results are added in the
//! order of the warps, the block's part goes to `partials`, and the block of a row that arrives last adds the
//! parts in the order of the splits.

use super::{DenseShape, stages};
use crate::attention::{
    Adding, BLOCK_TOKENS, Glance, GridPlace, Half, KeyTile, MAX_PARTS, Merged, PartialRow, Parts, Queries,
    ROWS, Ring, Running, ValueTile, combine, combine_to_part, combined_rows, first_blocks, last_to_arrive,
    part_floats, walk, warps,
};
use glam::Vec4;
use half::{bf16, f16};
use simt::math::{canonical_nan, log2};
use simt::{Global, GlobalMut, Shared, SharedPlan, async_copy, kernel, thread, unroll, warp};

/// ln 2.
const LN_2: f32 = core::f32::consts::LN_2;

/// Shared memory of a block.
#[derive(Clone, Copy)]
pub struct Layout {
    /// The warps' rings; afterwards their results.
    pub(crate) ring: Shared<u32>,
    /// Words of one warp's ring.
    pub(crate) ring_words: u32,
    /// The same memory: Σ p·v of each warp, [warps, 8, D].
    pub(crate) outputs: Shared<f32>,
    /// The same memory again: where parts are added up.
    pub(crate) adding: Adding,
    /// References and sums, [warps, 8].
    pub(crate) rows: Shared<PartialRow>,
    /// The query rows, where they do not fit registers.
    pub(crate) queries: Shared<u32>,
    /// Whether this block came last.
    pub(crate) last: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Parts that there is room for at the end, up to head_dim 128: those of a sequence of four KV heads are all
/// there then.
const AT_ONCE: u32 = 33;

/// Lays out the shared memory of an instance of [`attend`](fn@attend).
pub const fn layout<const D: usize>() -> Layout {
    lay_out::<D>(&mut SharedPlan::new(), stages(D as u32))
}

/// Lays out that of an instance of [`attend_lean`](fn@attend_lean): no more than 99 KiB.
pub const fn lean_layout<const D: usize>() -> Layout {
    lay_out::<D>(&mut SharedPlan::new(), 1)
}

/// The same as the first arrays of a plan, with rings of so many stages.
pub(crate) const fn lay_out<const D: usize>(plan: &mut SharedPlan, stages: u32) -> Layout {
    let ring_words = stages * (KeyTile::<D>::WORDS + ValueTile::<D>::WORDS);
    let (of_rings, of_parts) = (warps(D as u32) * ring_words, Adding::words::<D>(MAX_PARTS, AT_ONCE));
    let ring = plan.array(if of_rings < of_parts && D <= 128 && stages > 1 { of_parts } else { of_rings });
    // The results take the rings' place.
    let mut over = SharedPlan::new();
    let outputs = over.array(warps(D as u32) * ROWS * D as u32);
    let adding = Adding::over::<D>(&mut SharedPlan::new(), MAX_PARTS, plan.bytes());
    let rows = plan.array(combined_rows(warps(D as u32)));
    let queries = plan.array(Queries::shared_words::<D>());
    let last = plan.array(1);
    Layout { ring, ring_words, outputs, adding, rows, queries, last, bytes: plan.bytes() }
}

/// Attention of the rows that `wanted` names.
///
/// `wanted` [sequences, kv_heads · row groups]: bit g asks for row g of the group of eight, of many or of few
/// ([`DenseShape::MANY`]); without any the block leaves. `counters`, of the same shape, are 0
/// before and after.
#[kernel(
    system = dense,
    instances((f16, 64), (f16, 96), (f16, 128), (f16, 256), (bf16, 64), (bf16, 96), (bf16, 128), (bf16, 256)),
    max_threads = 256,
    min_blocks = 1,
    overlaps = by_hand
)]
pub fn attend<E: Half, const D: usize>(
    queries: Global<E>,
    keys: Global<E>,
    values: Global<E>,
    table: Global<u32>,
    lengths: Global<u32>,
    wanted: Global<u32>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    lse: GlobalMut<f32>,
    shape: DenseShape,
) {
    let arguments =
        Arguments { queries, keys, values, table, lengths, wanted, partials, counters, output, lse, shape };
    match D {
        64 => attend_part::<E, D, 3>(arguments),
        _ => attend_part::<E, D, 2>(arguments),
    }
}

const _: () = assert!(layout::<64>().bytes <= 99 << 10 && lean_layout::<96>().bytes <= 99 << 10);
const _: () = assert!(lean_layout::<128>().bytes <= 99 << 10 && lean_layout::<256>().bytes <= 99 << 10);
const _: () = assert!(stages(64) == 3 && stages(96) == 2 && stages(128) == 2 && stages(256) == 2);

/// The same with rings of one stage, for GPUs whose blocks have 99 KiB of shared memory: a warp's next tile
/// is asked for when its last one has been used, while those of other warps are on their way. The bits are
/// those of [`attend`](fn@attend), as no addition depends on when a tile comes.
#[kernel(
    system = dense,
    args = attend,
    instances((f16, 96), (f16, 128), (f16, 256), (bf16, 96), (bf16, 128), (bf16, 256)),
    max_threads = 256,
    min_blocks = 1,
    overlaps = by_hand
)]
pub fn attend_lean<E: Half, const D: usize>(
    queries: Global<E>,
    keys: Global<E>,
    values: Global<E>,
    table: Global<u32>,
    lengths: Global<u32>,
    wanted: Global<u32>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    lse: GlobalMut<f32>,
    shape: DenseShape,
) {
    attend_part::<E, D, 1>(Arguments {
        queries,
        keys,
        values,
        table,
        lengths,
        wanted,
        partials,
        counters,
        output,
        lse,
        shape,
    });
}

/// The arguments of all attention kernels.
#[derive(Clone, Copy)]
pub(super) struct Arguments<E> {
    pub(super) queries: Global<E>,
    pub(super) keys: Global<E>,
    pub(super) values: Global<E>,
    pub(super) table: Global<u32>,
    pub(super) lengths: Global<u32>,
    pub(super) wanted: Global<u32>,
    pub(super) partials: GlobalMut<f32>,
    pub(super) counters: GlobalMut<u32>,
    pub(super) output: GlobalMut<f32>,
    pub(super) lse: GlobalMut<f32>,
    pub(super) shape: DenseShape,
}

/// What a block does, with rings of `S` stages.
#[simt::device]
fn attend_part<E: Half, const D: usize, const S: u32>(arguments: Arguments<E>) {
    let Arguments { queries, keys, values, table, lengths, wanted, .. } = arguments;
    let Arguments { partials, counters, output, lse, shape, .. } = arguments;
    let DenseShape { max_blocks, pool_blocks, .. } = shape;
    let glance = Glance { table, lengths, max_blocks, pool_blocks, wanted: shape.rung == 0 };
    // At 256 every register is taken, and what is kept over the wait would cost some.
    if D <= 128 {
        look_ahead::<E, D>(keys, values, glance, shape);
    }
    thread::wait_for_previous();
    // Again when tiles are under way, which changes nothing.
    if shape.rung != 0 {
        thread::let_next_start();
    }
    let GridPlace { split, sequence, head, row_group, launch_row } = GridPlace::of(shape.row_groups());
    let (rows_wanted, length) = (wanted.load(launch_row as usize), lengths.load(sequence as usize));

    let Parts { tiles_a_split, used, .. } = Parts::of(length, shape.splits_of(rows_wanted));
    // A sequence without keys still needs somebody to write its rows. One branch for both, so that both loads
    // are under way at once.
    if rows_wanted == 0 || split >= used {
        return;
    }
    let first = split * tiles_a_split;
    let end = (first + tiles_a_split).min(shape.visible_tiles(length, row_group));

    let layout = const { lay_out::<D>(&mut SharedPlan::new(), S) };
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let row = row_group * ROWS + (lane >> 2);
    let present = row < shape.rows();
    let query_row = shape.query_row(sequence, head, row) as usize;
    let tiles =
        Tiles::<E, D, S> { layout, keys, values, table, shape, sequence, head, length, warp, lane, end };
    let ahead = if D > 128 { [0; 5] } else { first_blocks(&tiles, first + warp) };
    let q = Queries::load::<E, D>(queries, query_row, present, layout.queries, warp == 0, lane);
    if D > 128 {
        thread::sync_threads();
    }
    let visible = shape.visible(length, row);

    let mut running = Running::new();
    // There registers are short.
    let ahead = if D > 128 { first_blocks(&tiles, first + warp) } else { ahead };
    walk(&tiles, first + warp, ahead, |tile, stage| {
        let (k, v) = tiles.stage(stage);
        let mut scores = q.scores::<E, D>(k, lane);
        unroll!(for j in 0..2 {
            unroll!(for i in 0..2 {
                let scaled = scores[j][i] * shape.scale_log2;
                let token = tile * BLOCK_TOKENS + 8 * j as u32 + 2 * (lane & 3) + i as u32;
                scores[j][i] = if token < visible { scaled } else { f32::NEG_INFINITY };
            });
        });
        running.add::<E, D>(scores, v, lane);
    });

    layout.lay_down::<D>(&running, warp, lane);
    let (mut rows_wanted, mut used) = (rows_wanted, used);
    if D > 128 {
        // Read again: kept since the start they would cost registers that the loop has not.
        rows_wanted = wanted.load(launch_row as usize);
        used = Parts::of(lengths.load(sequence as usize), shape.splits_of(rows_wanted)).used;
    }
    let target = Target { output, lse, rows_wanted, shape, sequence, head, row_group };
    layout.put_together::<D>(partials, counters, launch_row, [split, used], target);
}

impl Layout {
    /// Puts the warps' results in the rings' place. The whole thread block calls it.
    #[simt::device]
    pub(crate) fn lay_down<const D: usize>(self, running: &Running, warp: u32, lane: u32) {
        // All copies have landed, all tiles are read.
        async_copy::wait::<0>();
        thread::sync_threads();
        running.store_output::<D>(self.outputs, warp * ROWS * D as u32, lane);
        let sum = running.row_sum();
        if lane & 3 == 0 {
            self.rows.store(warp * ROWS + (lane >> 2), PartialRow { reference: running.reference, sum });
        }
        thread::sync_threads();
    }

    /// Adds up what [`lay_down`](Self::lay_down) has put there: to the rows themselves where one thread block
    /// is `used`, else to part `split` of `launch_row`, and whoever comes last adds these up.
    #[simt::device]
    pub(crate) fn put_together<const D: usize>(
        self,
        partials: GlobalMut<f32>,
        counters: GlobalMut<u32>,
        launch_row: u32,
        [split, used]: [u32; 2],
        target: Target,
    ) {
        let floats = part_floats(D as u32);
        let base = launch_row as usize * target.shape.most_splits() as usize * floats;
        if used <= 1 {
            combine::<D>(self.rows, self.outputs, |r, d, merged| target.finish::<D>(r, d, merged));
            return;
        }
        let part = base + split as usize * floats;
        combine_to_part::<D>(self.rows, self.outputs, partials, part);
        if !last_to_arrive(counters, launch_row, used, self.last) {
            return;
        }
        let rows = (target.shape.rows() - target.row_group * ROWS).min(ROWS);
        let place = |split: u32| base + split as usize * floats;
        let done = |r, d, merged| target.finish::<D>(r, d, merged);
        self.adding.parts::<D>(used, rows, partials.as_const(), place, done);
    }
}

/// Tiles that each warp asks for ahead of the wait: as much as memory can bring while the launch ahead puts
/// its parts together. More would be given up by the L2 cache before it is used.
const AHEAD: u32 = 2;

/// Asks the L2 cache for each warp's first tiles, while the launch ahead may still run: memory has less and
/// less to do towards a launch's end. Not as a rung, which has nothing to read most of the time.
#[simt::device]
fn look_ahead<E: Half, const D: usize>(
    keys: Global<E>,
    values: Global<E>,
    glance: Glance,
    shape: DenseShape,
) {
    let GridPlace { split, sequence, head, .. } = GridPlace::of(shape.row_groups());
    let Parts { tiles, tiles_a_split, .. } = Parts::of(glance.length(sequence), shape.splits);
    // Two lanes a tile.
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let at = warp + warps(D as u32) * (lane / 2);
    let tile = split * tiles_a_split + at;
    let (block, exists) = glance.block(sequence, tile);
    let wanted = exists & (lane < 2 * AHEAD) & (at < tiles_a_split) & (tile < tiles);
    let elements = BLOCK_TOKENS as usize * D;
    let from = (block * shape.kv_heads + head) as usize * elements;
    let bytes = 2 * elements as u32;
    keys.prefetch(from, bytes, wanted & (lane & 1 == 0));
    values.prefetch(from, bytes, wanted & (lane & 1 != 0));
}

/// A warp's tiles of keys and values.
pub(super) struct Tiles<E, const D: usize, const S: u32> {
    pub(super) layout: Layout,
    pub(super) keys: Global<E>,
    pub(super) values: Global<E>,
    pub(super) table: Global<u32>,
    pub(super) shape: DenseShape,
    pub(super) sequence: u32,
    pub(super) head: u32,
    pub(super) length: u32,
    pub(super) warp: u32,
    pub(super) lane: u32,
    pub(super) end: u32,
}

impl<E: Half, const D: usize, const S: u32> Tiles<E, D, S> {
    /// The tile in a stage of the ring.
    #[inline(always)]
    pub(super) fn stage(&self, stage: u32) -> (KeyTile<D>, ValueTile<D>) {
        let words = KeyTile::<D>::WORDS;
        let start = self.warp * self.layout.ring_words + stage * 2 * words;
        (KeyTile::at(self.layout.ring, start), ValueTile::at(self.layout.ring, start + words))
    }
}

impl<E: Half, const D: usize, const S: u32> Ring for Tiles<E, D, S> {
    const STAGES: u32 = S;
    const STRIDE: u32 = warps(D as u32);
    const LOOKS_AHEAD: bool = D < 256;

    #[inline(always)]
    fn end(&self) -> u32 {
        self.end
    }

    #[simt::device]
    fn block(&self, tile: u32) -> u32 {
        if tile < self.end {
            self.table.load_readonly((self.sequence * self.shape.max_blocks + tile) as usize)
        } else {
            0
        }
    }

    /// A product behind this launch asks for weights ahead of its wait: behind these tiles, not before them.
    #[inline(always)]
    fn begun(&self) {
        thread::let_next_start();
    }

    #[simt::device]
    fn start(&self, tile: u32, block: u32, stage: u32) {
        let (k, v) = self.stage(stage);
        let from = (block * self.shape.kv_heads + self.head) as usize * (BLOCK_TOKENS as usize * D);
        let rows = self.length - tile * BLOCK_TOKENS;
        if D > 128 {
            k.copy(self.keys, from, rows, self.lane);
            v.copy(self.values, from, rows, self.lane);
        } else {
            k.copy_once(self.keys, from, rows, self.lane);
            v.copy_once(self.values, from, rows, self.lane);
        }
    }
}

/// Where finished rows go.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub output: GlobalMut<f32>,
    pub lse: GlobalMut<f32>,
    pub rows_wanted: u32,
    pub shape: DenseShape,
    pub sequence: u32,
    pub head: u32,
    pub row_group: u32,
}

impl Target {
    /// Four dimensions of a row, if it is wanted. A row that sees no key is 0, its LSE −∞.
    #[simt::device]
    pub fn finish<const D: usize>(self, r: u32, d: u32, merged: Merged) {
        let row = self.row_group * ROWS + r;
        if row >= self.shape.rows() || self.rows_wanted >> r & 1 == 0 {
            return;
        }
        let at = self.shape.query_row(self.sequence, self.head, row);
        let PartialRow { reference, sum } = merged.row;
        let empty = sum == 0.0;
        let value = merged.values.map(|x| if empty { 0.0 } else { canonical_nan(x / sum) });
        self.output.store_vector(at as usize * D + d as usize, Vec4::from_array(value));
        if d == 0 {
            let log = if empty { f32::NEG_INFINITY } else { canonical_nan((reference + log2(sum)) * LN_2) };
            self.lse.store(at as usize, log);
        }
    }
}
