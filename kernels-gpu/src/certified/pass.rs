//! # Mathematics
//! One pass over all quantized blocks: for query row r, with K^ = code·σ + z and V^ = code·scale + zero,
//!
//! ```text
//! s_t = q_r·K^_t / √D      p_t = 2^(s_t·log2 e − reference)      N_r = Σ p_t V^_t      P_r = Σ p_t
//! ```
//!
//! and for each block its mass Σ p_t, and Δ (docs/certificate.md, equation (5)): how far its logits may be from the exact
//! ones. Scores follow equation (16) of the paper, the query times σ against the codes and the query against z, but with
//! f16 operands whose rounding errors are carried along: see `Tile::products`.
//!
//! # Layout
//! `queries` [sequences, kv_heads · group, D]. `tiles`: the pool [blocks, kv_heads] of [`TileLayout`](super::layout),
//! `annotations` beside it. `table` [sequences, max_blocks], `lengths` \[sequences\] in tokens: the ⌊length/16⌋ full blocks
//! are read. `records` [sequences, kv_heads · group, max_blocks]. `totals` [sequences · kv_heads · row groups] of parts: N and P.
//!
//! # Bytes
//! 32·D + 16 a block and KV head, read once: at head_dim 128, 257 bytes a token, where f16 takes 512. Written: 16 bytes a
//! block and query head.
//!
//! # Work split
//! As in `dense`: grid (splits, kv_heads · row groups, sequences), eight warps with a ring of tiles each, the parts added
//! by the block that arrives last.

use super::layout::{Annotation, TileLayout};
use super::quantizer::f16_at_or_above;
use super::query::{LOG2_E, Query, delta};
use super::tile::Tile;
use crate::attention::{
    BLOCK_TOKENS, Half, MAX_PARTS, PartialRow, ROWS, Running, combine, combine_parts, last_to_arrive,
    part_floats, warps,
};
use glam::Vec4;
use half::{bf16, f16};
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
    /// Parts that a sequence is cut into.
    pub splits: u32,
    /// What a product of query and key is multiplied by: 1/√D.
    pub softmax_scale: f32,
}

impl StepShape {
    /// Groups of eight query heads of a KV head.
    #[inline(always)]
    pub const fn row_groups(self) -> u32 {
        self.group.div_ceil(ROWS)
    }
}

/// What the pass notes of one block and query head: all that the selection wants to know, so that it reads nothing else.
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

/// Stages of a warp's ring.
pub const fn stages(head_dim: u32) -> u32 {
    if head_dim <= 128 { 5 } else { 4 }
}

/// Shared memory of a block.
#[derive(Clone, Copy)]
pub struct PassLayout {
    /// The warps' rings; afterwards their results.
    ring: Shared<u32>,
    /// The same memory: N of each warp, [warps, 8, D].
    outputs: Shared<f32>,
    /// Annotations of the tiles in the rings, [warps, stages].
    annotations: Shared<Annotation>,
    /// The rings' memory again: references and sums of all parts, [parts, 8].
    staged: Shared<PartialRow>,
    rows: Shared<PartialRow>,
    last: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Lays out the shared memory of an instance.
pub const fn pass_layout<const D: usize>() -> PassLayout {
    let mut plan = SharedPlan::new();
    let stages = stages(D as u32);
    let ring = plan.array(warps(D as u32) * stages * Tile::<D>::WORDS);
    let mut over = SharedPlan::new();
    let outputs = over.array(warps(D as u32) * ROWS * D as u32);
    let mut over = SharedPlan::new();
    let staged = over.array(MAX_PARTS * ROWS);
    let annotations = plan.array(warps(D as u32) * stages);
    let rows = plan.array(warps(D as u32) * ROWS);
    let last = plan.array(1);
    PassLayout { ring, outputs, annotations, staged, rows, last, bytes: plan.bytes() }
}

/// One pass over the quantized blocks of every sequence.
#[kernel(
    system = certified,
    instances((f16, 64), (f16, 128), (bf16, 64), (bf16, 128)),
    max_threads = 256
)]
pub fn attend<E: Half, const D: usize>(
    queries: Global<E>,
    tiles: Global<u32>,
    annotations: Global<Annotation>,
    table: Global<u32>,
    lengths: Global<u32>,
    records: GlobalMut<Record>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    totals: GlobalMut<f32>,
    shape: StepShape,
) {
    let (split, sequence) = (thread::block_idx_x(), thread::block_idx_z());
    let launch_row = sequence * thread::grid_dim_y() + thread::block_idx_y();
    let head = bits::div_u32(thread::block_idx_y(), shape.row_groups());
    let row_group = bits::rem_u32(thread::block_idx_y(), shape.row_groups());
    let blocks = lengths.load(sequence as usize) / BLOCK_TOKENS;
    let (a_split, used) = share(blocks, shape.splits);
    if split >= used {
        return;
    }
    let first = split * a_split;
    let end = (first + a_split).min(blocks);

    let layout = pass_layout::<D>();
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let in_group = row_group * ROWS + (lane >> 2);
    let present = in_group < shape.group;
    let query_row = (sequence * shape.kv_heads + head) * shape.group + in_group;
    let query = Query::load::<E, D>(queries, query_row as usize, present, shape.softmax_scale, lane);
    let to_log2 = query.scale * LOG2_E;
    let record_row = query_row as usize * shape.max_blocks as usize;

    let walk = Walk { layout, tiles, annotations, table, shape, sequence, head, warp, lane, end };
    let mut running = Running::new();
    walk.tiles::<D>(first + warp, |block, tile, annotation| {
        let (products, x) = tile.products(&query, lane);
        let scores = products.map(|pair| pair.map(|s| s * to_log2));
        let sum = running.add::<f16, D>(scores, tile.values(lane), lane);
        let sum = sum + warp_shuffle_xor(FULL_MASK, sum, 1, 32);
        let mass = sum + warp_shuffle_xor(FULL_MASK, sum, 2, 32);
        if lane & 3 == 0 && present {
            let delta = delta::<D>(&query, x, annotation.eps, annotation.zeta);
            records
                .store(record_row + block as usize, Record::new(mass, running.reference, delta, annotation));
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
    let used = share(lengths.load(sequence as usize) / BLOCK_TOKENS, shape.splits).1;
    let (target, base) = if used <= 1 {
        (totals, launch_row as usize * floats)
    } else {
        (partials, (launch_row * shape.splits + split) as usize * floats)
    };
    let store = |target: GlobalMut<f32>, base: usize, r: u32, d: u32, merged: crate::attention::Merged| {
        target.store_vector(base + (r * D as u32 + d) as usize, Vec4::from_array(merged.values));
        if d == 0 {
            target.store_vector(base + (ROWS * D as u32 + 2 * r) as usize, merged.row);
        }
    };
    combine::<D>(layout.rows, layout.outputs, |r, d, merged| store(target, base, r, d, merged));
    if used <= 1 || !last_to_arrive(counters, launch_row, used, layout.last) {
        return;
    }
    let parts = partials.as_const();
    let base = launch_row as usize * shape.splits as usize * floats;
    combine_parts::<D>(
        used,
        (shape.group - row_group * ROWS).min(ROWS),
        layout.staged,
        |s, r| parts.load_vector(base + s as usize * floats + (ROWS * D as u32 + 2 * r) as usize),
        |s, r, d| parts.load_vector(base + s as usize * floats + (r * D as u32 + d) as usize),
        |r, d, merged| store(totals, launch_row as usize * floats, r, d, merged),
    );
}

/// Blocks of a split, and splits that have any: one even without a block, to write the totals.
#[inline(always)]
fn share(blocks: u32, splits: u32) -> (u32, u32) {
    let a_split = bits::div_u32(blocks + splits - 1, splits).max(1);
    (a_split, bits::div_u32(blocks + a_split - 1, a_split).max(1))
}

/// A warp's way through its tiles.
struct Walk {
    layout: PassLayout,
    tiles: Global<u32>,
    annotations: Global<Annotation>,
    table: Global<u32>,
    shape: StepShape,
    sequence: u32,
    head: u32,
    warp: u32,
    lane: u32,
    /// Past the last block.
    end: u32,
}

impl Walk {
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn block(&self, index: u32) -> u32 {
        if index < self.end {
            self.table.load_readonly((self.sequence * self.shape.max_blocks + index) as usize)
        } else {
            0
        }
    }

    /// Starts copying the tile of the `index`th block; closes the group even if there is none.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn start<const D: usize>(&self, index: u32, block: u32, stage: u32) {
        if index < self.end {
            let slot = self.warp * stages(D as u32) + stage;
            let pair = block * self.shape.kv_heads + self.head;
            let from = pair as usize * TileLayout::new(D as u32).bytes as usize;
            Tile::<D>::at(self.layout.ring, slot * Tile::<D>::WORDS).copy(self.tiles, from, self.lane);
            if self.lane == 0 {
                self.layout.annotations.copy_async(slot, self.annotations, pair as usize);
            }
        }
        async_copy::commit();
    }

    /// Calls `visit` with the blocks that are this warp's, from `first` on.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn tiles<const D: usize>(&self, first: u32, mut visit: impl FnMut(u32, Tile<D>, Annotation)) {
        let stages = stages(D as u32);
        let mut blocks = [0u32; 5];
        unroll!(for s in 0..5 {
            blocks[s] = if (s as u32) < stages { self.block(first + warps(D as u32) * s as u32) } else { 0 };
        });
        unroll!(for s in 0..4 {
            if (s as u32) < stages - 1 {
                self.start::<D>(first + warps(D as u32) * s as u32, blocks[s], s as u32);
            }
        });
        let mut next_block = blocks[stages as usize - 1];
        let mut index = first;
        let mut stage = 0u32;
        while index < self.end {
            if stages == 5 {
                async_copy::wait::<3>();
            } else {
                async_copy::wait::<2>();
            }
            warp::sync_warp(FULL_MASK);
            // The stage that the last round has read is free.
            let free = if stage == 0 { stages - 1 } else { stage - 1 };
            let ahead = index + warps(D as u32) * (stages - 1);
            self.start::<D>(ahead, next_block, free);
            next_block = self.block(ahead + warps(D as u32));
            let slot = self.warp * stages + stage;
            let annotation = self.layout.annotations.load(slot);
            visit(index, Tile::at(self.layout.ring, slot * Tile::<D>::WORDS), annotation);
            index += warps(D as u32);
            stage = if stage == stages - 1 { 0 } else { stage + 1 };
        }
    }
}
