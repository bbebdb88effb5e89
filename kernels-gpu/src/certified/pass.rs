//! # Mathematics
//! One pass over all quantized blocks: for query row r, with K^ = code·σ + z and V^ = code·scale + zero,
//!
//! ```text
//! s_t = q_r·K^_t / √D      p_t = 2^(s_t·log2 e − reference)      N_r = Σ p_t V^_t      P_r = Σ p_t
//! ```
//!
//! and for each block its mass Σ p_t, and Δ (docs/certificate.md, equation (5)): how far its logits may be
//! from the exact ones. Scores follow equation (16) of the paper, the query times σ against the codes and the
//! query against z, but with f16 operands whose rounding errors are carried along: see `Tile::products`.
//!
//! # Layout
//! `queries` [sequences, kv_heads · group, D]. `tiles`: the pool [blocks, kv_heads] of
//! [`TileLayout`](super::layout), `annotations` beside it. `table` [sequences, max_blocks], `lengths`
//! \[sequences\] in tokens: the ⌊length/16⌋ full blocks are read. `records` [sequences, kv_heads, max_blocks,
//! group]; none where `shape.notes` is 0. `partials` [sequences · kv_heads · row groups, splits + replacers]
//! of N and P, of which the splits are written.
//!
//! # Bytes
//! 32·D + 48 a block and KV head (36·D + 48 in the paper's layout), read once: at head_dim 128, 259 (291)
//! bytes a token, where f16 takes 512. Written: 16 bytes a block and query head.
//!
//! # Work split
//! As in `dense`: grid (splits, kv_heads · row groups, sequences), eight warps with a ring of tiles each. The
//! kernels that follow add the splits up.

use super::layout::{Annotation, TileLayout, VECTORS};
use super::metadata::KeyMetadata;
use super::parts::Part;
use super::quantizer::f16_at_or_above;
use super::query::{LOG2_E, Query, delta};
use super::tile::Tile;
use crate::attention::{
    BLOCK_TOKENS, GridPlace, Half, MAX_PARTS, PartialRow, ROWS, Ring, Running, combine_to_part,
    combined_rows, first_blocks, part_floats, walk, warps,
};
use core::marker::PhantomData;
use glam::UVec4;
use half::{bf16, f16};
use simt::math::{exp2_nonpositive, fma, max};
use simt::warp::{FULL_MASK, warp_shuffle_xor};
use simt::{
    Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, async_copy, bits, kernel, thread, unroll, warp,
};

/// The shape of a step. All sequences share pools and have a row of the block table each.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct StepShape {
    /// Query heads of a KV head.
    pub group: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Entries of a row of the block table.
    pub max_blocks: u32,
    /// Parts that a sequence is cut into for the pass: stretches.
    pub splits: u32,
    /// Parts that it is cut into for the choice: [`Part`](super::parts::Part).
    pub parts: u32,
    /// Thread blocks of a row that replace, at most.
    pub replacers: u32,
    /// What a product of query and key is multiplied by: 1/√D.
    pub softmax_scale: f32,
    /// 1: blocks and what bounds their errors are noted. 0: nobody asks.
    pub notes: u32,
    /// Blocks of the pool.
    pub pool_blocks: u32,
    /// 1: warps of `carry` keep together, as all its blocks run at once: [`Pace`](crate::attention::Pace).
    pub paced: u32,
    /// Parts that the dense rung cuts a sequence into for rows of blocks that are left to it.
    pub dense_splits: u32,
    /// For rows that have turned out to be over budget: few of them, hence more parts.
    pub rung_splits: u32,
}

impl StepShape {
    /// Groups of eight query heads of a KV head.
    #[inline(always)]
    pub const fn row_groups(self) -> u32 {
        self.group.div_ceil(ROWS)
    }

    /// The first of a row of blocks' partial results: those of the splits, then those of the replacers.
    #[inline(always)]
    pub const fn first_partial(self, launch_row: u32) -> u32 {
        launch_row * (self.splits + self.replacers)
    }

    /// Places of a part, at most: entries that a list has room for.
    #[inline(always)]
    pub fn places(self) -> u32 {
        Part { index: 0, parts: self.parts, blocks: self.max_blocks }.places()
    }

    /// Where the record of a query row and block is: those of a KV head's query heads lie side by side, so
    /// that the pass writes whole sectors.
    #[inline(always)]
    pub fn record(self, row: u32, block: u32) -> usize {
        let (pair, in_group) = (bits::div_u32(row, self.group), bits::rem_u32(row, self.group));
        (pair as usize * self.max_blocks as usize + block as usize) * self.group as usize + in_group as usize
    }
}

/// What the pass notes of one block and query head: all that the choice wants to know, so that it reads
/// nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Record {
    /// Σ p_t of its tokens, relative to `reference`.
    pub mass: f32,
    /// The reference, an integer, in the low half; Δ as an f16, rounded up, in the high one.
    packed: u32,
    /// η and ε + ζ as bf16, rounded up, in the low and the high half.
    errors: u32,
    /// ν of the block.
    pub nu: f32,
}

/// References beyond this are not represented: the row goes to the dense rung.
pub const MAX_REFERENCE: f32 = 32000.0;

impl Record {
    /// Packs what a block of this mass has.
    #[inline(always)]
    pub fn new(mass: f32, reference: f32, delta: f32, annotation: Annotation) -> Self {
        let reference = simt::math::clamp(reference, -MAX_REFERENCE, MAX_REFERENCE);
        let reference = simt::math::to_i32_nearest_even(reference);
        let delta = f16_at_or_above(delta).to_bits() as u32;
        // The bits of the next bf16 at or above a number that is not negative.
        let above = |x: f32| x.to_bits().wrapping_add(0xffff) & 0xffff_0000;
        Record {
            mass,
            packed: reference as u32 & 0xffff | delta << 16,
            errors: above(annotation.eta) >> 16 | above(annotation.eps + annotation.zeta),
            nu: annotation.nu,
        }
    }

    /// η of the block, at most 1/128 above what it was.
    #[inline(always)]
    pub fn eta(self) -> f32 {
        f32::from_bits(self.errors << 16)
    }

    /// ε + ζ, likewise: no key's norm is larger.
    #[inline(always)]
    pub fn kappa(self) -> f32 {
        f32::from_bits(self.errors & 0xffff_0000)
    }

    /// What the mass is relative to.
    #[inline(always)]
    pub fn reference(self) -> f32 {
        self.packed as u16 as i16 as f32
    }

    /// Δ, at most half an ULP of f16 above what it was.
    #[inline(always)]
    pub fn delta(self) -> f32 {
        simt::convert::f32_from_f16(f16::from_bits((self.packed >> 16) as u16))
    }
}

/// How much shared memory the rings of a kernel take, and how many warps there are.
pub trait Rings {
    /// Whether they have fewer stages, so that a block of the kernel fits 99 KiB.
    const LEAN: bool;
    /// Whether a block has twelve warps at head_dim 64. A warp waits for what it has just begun most of the
    /// time, and a third one on a scheduler has something to do then. At head_dim 128 registers are for
    /// eight.
    const TWELVE: bool;
}

/// Warps of a block of a kernel.
#[inline(always)]
pub const fn warps_of<R: Rings>(head_dim: u32) -> u32 {
    if R::TWELVE && head_dim <= 64 { 12 } else { warps(head_dim) }
}

/// Rings of as many stages as are any use.
pub struct Whole;

impl Rings for Whole {
    const LEAN: bool = false;
    const TWELVE: bool = false;
}

/// Stages of a warp's ring.
pub const fn stages<R: Rings>(head_dim: u32) -> u32 {
    match (head_dim <= 64, R::LEAN) {
        (true, false) => 5,
        (true, true) => 2,
        (false, false) => 3,
        (false, true) => 2,
    }
}

/// Shared memory of a block.
#[derive(Clone, Copy)]
pub struct PassLayout {
    /// The warps' rings; afterwards their results.
    pub(super) ring: Shared<u32>,
    /// The same memory: N of each warp, [warps, 8, D].
    pub(super) outputs: Shared<f32>,
    /// Annotations of the tiles in the rings, [warps, stages, VECTORS].
    annotations: Shared<UVec4>,
    /// References and sums of the warps, [warps, 8].
    pub(super) rows: Shared<PartialRow>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Lays out the shared memory of an instance.
pub const fn pass_layout<M: KeyMetadata, const D: usize>() -> PassLayout {
    pass_layout_in::<M, D, Whole>(&mut SharedPlan::new(), 0)
}

/// The same at the beginning of a plan that has more.
///
/// The rings' memory has `least` words at least.
pub(super) const fn pass_layout_in<M: KeyMetadata, const D: usize, R: Rings>(
    plan: &mut SharedPlan,
    least: u32,
) -> PassLayout {
    let stages = stages::<R>(D as u32);
    let warps = warps_of::<R>(D as u32);
    let words = warps * stages * Tile::<M, D>::WORDS;
    let ring = plan.array(if words < least { least } else { words });
    let mut over = SharedPlan::new();
    let outputs = over.array(warps * ROWS * D as u32);
    let annotations = plan.array(warps * stages * VECTORS);
    let rows = plan.array(combined_rows(warps));
    PassLayout { ring, outputs, annotations, rows, bytes: plan.bytes() }
}

/// One pass over the quantized blocks of every sequence. `M` is what their keys' scales and zeros are.
#[kernel(
    system = certified,
    instances(
        (f16, 64, f16), (f16, 128, f16), (bf16, 64, f16), (bf16, 128, f16),
        (f16, 64, f32), (f16, 128, f32), (bf16, 64, f32), (bf16, 128, f32),
    ),
    max_threads = 256,
    min_blocks = 1,
    overlaps = in_turn
)]
pub fn attend<E: Half, const D: usize, M: KeyMetadata>(
    queries: Global<E>,
    tiles: Global<u32>,
    annotations: Global<Annotation>,
    table: Global<u32>,
    lengths: Global<u32>,
    records: GlobalMut<Record>,
    partials: GlobalMut<f32>,
    shape: StepShape,
) {
    let GridPlace { split, sequence, head, row_group, launch_row } = GridPlace::of(shape.row_groups());
    let blocks = lengths.load(sequence as usize) / BLOCK_TOKENS;
    let (a_split, used) = pass_share(blocks, shape.splits);
    if split >= used {
        return;
    }
    let first = split * a_split;
    let end = (first + a_split).min(blocks);

    let layout = pass_layout::<M, D>();
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let in_group = row_group * ROWS + (lane >> 2);
    let present = in_group < shape.group;
    let query_row = (sequence * shape.kv_heads + head) * shape.group + in_group;
    let ring = Tiles::<M, D, Whole> {
        layout,
        kind: PhantomData,
        tiles,
        annotations,
        table,
        shape,
        sequence,
        head,
        warp,
        lane,
        end,
        annotated: true,
    };
    let ahead = first_blocks(&ring, first + warp);
    let query = Query::load::<E, D>(queries, query_row as usize, present, shape.softmax_scale, lane);
    let to_log2 = query.scale * LOG2_E;
    let first_record = (sequence * shape.kv_heads + head) as usize * shape.max_blocks as usize;

    let mut running = Running::new();
    walk(&ring, first + warp, ahead, |block, stage| {
        let (tile, annotation) = (ring.tile(stage), ring.annotation(stage));
        let (products, x) = tile.products(&query, lane);
        let scores = products.map(|pair| pair.map(|s| s * to_log2));
        let (p, sum) = running.weigh::<D>(scores);
        let sum = sum + warp_shuffle_xor(FULL_MASK, sum, 1, 32);
        let mass = sum + warp_shuffle_xor(FULL_MASK, sum, 2, 32);
        // Before the multiplications, and by every lane, so that it hides behind them.
        let delta = delta::<M, D>(&query, x, annotation);
        let record = Record::new(mass, running.reference, delta, annotation);
        running.accumulate_weights::<f16, D>(p, tile.values(lane), lane);
        if lane & 3 == 0 && present && shape.notes != 0 {
            let at = (first_record + block as usize) * shape.group as usize + in_group as usize;
            records.store(at, record);
        }
    });

    async_copy::wait::<0>();
    thread::sync_threads();
    running.store_output::<D>(layout.outputs, warp * ROWS * D as u32, lane);
    let sum = running.row_sum();
    if lane & 3 == 0 {
        layout.rows.store(warp * ROWS + (lane >> 2), PartialRow { reference: running.reference, sum });
    }
    thread::sync_threads();

    let floats = part_floats(D as u32);
    let base = (shape.first_partial(launch_row) + split) as usize * floats;
    combine_to_part::<D>(layout.rows, layout.outputs, partials, base);
}

/// Splits that have any block; one even without, whose part is empty.
#[inline(always)]
pub fn used_splits(blocks: u32, splits: u32) -> u32 {
    pass_share(blocks, splits).1
}

/// Reference and sum of row `r` of eight over all splits: a warp's work, the same bits in each of its lanes.
#[simt::device]
pub fn row_total(
    partials: Global<f32>,
    launch_row: u32,
    r: u32,
    blocks: u32,
    shape: StepShape,
    head_dim: u32,
    lane: u32,
) -> PartialRow {
    let used = used_splits(blocks, shape.splits);
    let mut rows = [PartialRow::EMPTY; 5];
    let mut reference = PartialRow::EMPTY.reference;
    unroll!(for i in 0..5 {
        let split = 32 * i as u32 + lane;
        if split < used {
            let part = (shape.first_partial(launch_row) + split) as usize * part_floats(head_dim);
            rows[i] = partials.load_vector(part + (ROWS * head_dim + 2 * r) as usize);
        }
        reference = max(reference, rows[i].reference);
    });
    unroll!(for i in 0..5 {
        reference = max(reference, warp_shuffle_xor(FULL_MASK, reference, 1 << i, 32));
    });
    let mut sum = 0f32;
    unroll!(for i in 0..5 {
        sum = fma(rows[i].sum, exp2_nonpositive(rows[i].reference - reference), sum);
    });
    PartialRow { reference, sum: warp::warp_sum_f32(sum) }
}

const _: () = assert!(MAX_PARTS <= 160, "five parts a lane");

/// Blocks of a split, and splits that have any: one even without a block, to write the totals.
#[inline(always)]
pub fn pass_share(blocks: u32, splits: u32) -> (u32, u32) {
    let a_split = bits::div_u32(blocks + splits - 1, splits).max(1);
    (a_split, bits::div_u32(blocks + a_split - 1, a_split).max(1))
}

/// A warp's quantized tiles.
pub(super) struct Tiles<M, const D: usize, R> {
    pub(super) kind: PhantomData<(M, R)>,
    pub(super) layout: PassLayout,
    pub(super) tiles: Global<u32>,
    pub(super) annotations: Global<Annotation>,
    pub(super) table: Global<u32>,
    pub(super) shape: StepShape,
    pub(super) sequence: u32,
    pub(super) head: u32,
    pub(super) warp: u32,
    pub(super) lane: u32,
    pub(super) end: u32,
    /// Whether anybody asks for the annotations: only certificates do.
    pub(super) annotated: bool,
}

impl<M: KeyMetadata, const D: usize, R: Rings> Tiles<M, D, R> {
    /// The place of a stage among those of all warps.
    #[inline(always)]
    pub(super) fn slot(&self, stage: u32) -> u32 {
        self.warp * stages::<R>(D as u32) + stage
    }

    /// The annotation of a stage's tile.
    #[simt::device]
    pub(super) fn annotation(&self, stage: u32) -> Annotation {
        let at = VECTORS * self.slot(stage);
        let vectors: [UVec4; 3] = [0, 1, 2].map(|i| self.layout.annotations.load(at + i));
        bytemuck::cast(vectors)
    }

    /// Of the annotation of a stage's tile the first four words in even lanes, the next four in odd ones, and
    /// the [sizes](Annotation::sizes_of_lane) of the lane's tokens.
    #[simt::device]
    pub(super) fn annotation_of_lane(&self, stage: u32, lane: u32) -> (UVec4, [f32; 4]) {
        let at = VECTORS * self.slot(stage);
        let [bounds, sizes] = [lane & 1, 2].map(|i| self.layout.annotations.load(at + i));
        let annotation: Annotation = bytemuck::cast([UVec4::ZERO, UVec4::ZERO, sizes]);
        (bounds, annotation.sizes_of_lane(lane & 3))
    }

    /// Starts copying the annotation of a pair of block and KV head to a stage's.
    #[simt::device]
    pub(super) fn copy_annotation(&self, pair: u32, stage: u32) {
        if self.lane < VECTORS {
            let to = VECTORS * self.slot(stage) + self.lane;
            let from = VECTORS as usize * pair as usize + self.lane as usize;
            self.layout.annotations.copy_async(to, self.annotations.cast::<UVec4>(), from);
        }
    }

    #[inline(always)]
    pub(super) fn tile(&self, stage: u32) -> Tile<M, D> {
        Tile::at(self.layout.ring, self.slot(stage) * Tile::<M, D>::WORDS)
    }
}

impl<M: KeyMetadata, const D: usize, R: Rings> Ring for Tiles<M, D, R> {
    const STAGES: u32 = stages::<R>(D as u32);
    const STRIDE: u32 = warps_of::<R>(D as u32);
    const LOOKS_AHEAD: bool = true;

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

    #[simt::device]
    fn start(&self, _: u32, block: u32, stage: u32) {
        let pair = block * self.shape.kv_heads + self.head;
        let from = pair as usize * TileLayout::new(D as u32, M::LAYOUT).bytes as usize;
        self.tile(stage).copy(self.tiles, from, self.lane);
        if self.annotated {
            self.copy_annotation(pair, stage);
        }
    }
}
