//! `scan`: the mass of every block, bounded from above.
//!
//! # Mathematics
//! With K^ of a [sketch](super::tile), query head g and token t of tile b,
//!
//! ```text
//! ŝ_t = q_g·K^_t / √D        |ŝ_t − s_t| <= Δ_b        mass of a block <= Σ exp(ŝ_t + Δ_b(t))
//! ```
//!
//! Δ_b is [`delta`](super::bound::delta) (docs/certificate.md, equation (8)). The logarithm of the sum to
//! base two, rounded up, is what is kept of a block and query head. Σ exp(ŝ_t) over all tokens, T_g, is what
//! masses are compared with; nothing that is promised depends on it.
//!
//! Two chains of the tensor cores, as in certified attention: one multiplies q_n·σ (rows 0 to 7) and what its
//! rounding lost (rows 8 to 15) with the codes; another q_n (rows 0 to 7) and |q_n| (rows 8 to 15) with z in
//! the even columns and σ in the odd ones. A code's bits are those of a subnormal f16, code·2^−24, so that a
//! mask makes an operand of it.
//!
//! # Layout
//! `queries` [sequences, q_heads, D]; `sketches` [sequences, kv_heads, tiles of max_blocks]. Written:
//! `masses` [sequences, kv_heads, blocks, heads], heads the query heads of a KV head rounded up to a multiple
//! of eight, −∞ for those that there are not; `nus` [sequences, kv_heads, blocks]; `totals` [sequences,
//! kv_heads, parts, heads] and `norms` [sequences, kv_heads, parts].
//!
//! # Bytes
//! A sketch for each tile and KV head, read once: 80.5 bytes a token with 4 bits at D = 128, where keys and
//! values take 512. Written: 4 bytes a block and query head.
//!
//! # Work split
//! Grid (parts, kv_heads · row groups, sequences), eight warps with a ring of tiles each. A warp has
//! neighbouring blocks, whole ones, and whole tiles: a block of 16 tokens is half of one. While the launch
//! ahead may still run, it asks the L2 cache for as many tiles as its ring holds. What is kept is the next
//! launch's work: [`decide`](fn@super::decide).

use super::bound::delta;
use super::counting::heads_of;
use super::masses::{Mass, joined, most_of};
use super::products::Tiles;
use super::tile::{TILE_TOKENS, sketch_words, tiles_of};
use crate::attention::query::{LOG2_E, LOG2_E_ABOVE, Query};
use crate::attention::{BLOCK_TOKENS, GridPlace, Half, PartialRow, ROWS, fill, walk_on};
use crate::gather::rule::{Extent, Rule};
use half::{bf16, f16};
use simt::math::max;
use simt::warp;
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, async_copy, bits, kernel, thread, unroll};

/// Threads of a block of [`scan`](fn@scan).
pub const SCAN_THREADS: u32 = 256;
pub(super) const WARPS: u32 = SCAN_THREADS / 32;
/// Thread blocks that fill the machine: two on each of the 132 multiprocessors of a GH100.
const BLOCKS_WANTED: u32 = 264;

/// Thread blocks of a sequence and row group, for `rows` of these, whose longest has `tokens`.
pub const fn scan_parts(rows: u32, tokens: u32, rule: Rule) -> u32 {
    let wanted = BLOCKS_WANTED / if rows == 0 { 1 } else { rows };
    // A tile or a block, the longer of them, for every warp.
    let most = tokens.div_ceil(TILE_TOKENS * rule.tiles()).div_ceil(WARPS);
    let parts = if wanted < most { wanted } else { most };
    if parts == 0 { 1 } else { parts }
}

/// The extents of a launch of [`scan`](fn@scan).
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct ScanShape {
    /// What is kept at least.
    pub rule: Rule,
    /// Query heads of a KV head.
    pub group: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Entries of a row of the cache's block table.
    pub max_blocks: u32,
    /// Gather-blocks of a sequence, at most, a multiple of 16: a list, masses and ranks have room for them.
    pub blocks: u32,
    /// What a product of query and key is multiplied by: 1/√D.
    pub softmax_scale: f32,
    /// log2 of the share of a head's mass that may be left out.
    pub budget_log2: f32,
}

impl ScanShape {
    /// Groups of eight query heads of a KV head.
    #[inline(always)]
    pub const fn row_groups(self) -> u32 {
        self.group.div_ceil(ROWS)
    }
}

/// Bounds of the norms of a part's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Norms {
    /// At least ‖k‖₂ of each token.
    pub kappa: f32,
    /// At least ‖v‖₂ of each token.
    pub nu: f32,
}

/// What a part knows of a query head.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Total {
    /// An estimate of its mass: an integer in log2 units, and what the mass is relative to 2^that.
    pub reference: f32,
    /// See `reference`.
    pub sum: f32,
    /// The largest mass of a block of it, as `masses` has it, of those that are finite.
    pub most: f32,
    /// 0.
    pub reserved: f32,
}

impl Total {
    /// Of no part.
    pub const NONE: Total = Total {
        reference: PartialRow::EMPTY.reference,
        sum: PartialRow::EMPTY.sum,
        most: f32::NEG_INFINITY,
        reserved: 0.0,
    };

    /// The estimate.
    #[inline(always)]
    pub const fn estimate(self) -> PartialRow {
        PartialRow { reference: self.reference, sum: self.sum }
    }
}

impl Rule {
    /// Tiles of a block, or 1 that has two blocks.
    #[inline(always)]
    pub const fn tiles(self) -> u32 {
        if self.block < TILE_TOKENS { 1 } else { self.block / TILE_TOKENS }
    }
}

/// How the tiles of a sequence are dealt out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deal {
    /// Tiles of a warp: whole blocks.
    pub of_warp: u32,
    /// Parts that have any; one even without.
    pub used: u32,
}

impl Deal {
    /// That of a sequence of `length` tokens over so many parts.
    #[inline(always)]
    pub fn of(length: u32, rule: Rule, parts: u32) -> Self {
        let (warps, tiles) = (parts * WARPS, tiles_of(length));
        let runs = bits::div_u32(tiles + rule.tiles() - 1, rule.tiles());
        let of_warp = bits::div_u32(runs + warps - 1, warps).max(1) * rule.tiles();
        Deal { of_warp, used: bits::div_u32(tiles + of_warp * WARPS - 1, of_warp * WARPS).max(1) }
    }
}

#[derive(Clone, Copy)]
struct Layout {
    ring: Shared<u32>,
    /// Totals of the warps, [warps, 8], and what bounds their norms.
    totals: Shared<Total>,
    norms: Shared<Norms>,
    bytes: u32,
}

/// Stages of a warp's ring in [`scan`](fn@scan), so that two thread blocks fit a multiprocessor of 227 KiB.
const fn stages(head_dim: usize, bits: usize) -> u32 {
    if head_dim * bits > 512 { 3 } else { 5 }
}

/// The same in [`scan_lean`](fn@scan_lean), so that one fits 99 KiB.
const fn lean_stages(head_dim: usize, bits: usize) -> u32 {
    stages(head_dim, bits) - 1
}

const _: () = assert!(stages(128, 8) == 3 && stages(128, 4) == 5 && stages(64, 8) == 5);
const _: () = assert!(scan_lean_bytes::<128, 4>() <= 99 << 10 && scan_lean_bytes::<128, 8>() <= 99 << 10);
const _: () = assert!(lean_stages(128, 8) == 2 && lean_stages(128, 4) == 4);

const fn layout<const D: usize, const BITS: usize>(stages: u32) -> Layout {
    let mut plan = SharedPlan::new();
    let ring = plan.array(WARPS * stages * sketch_words(D as u32, BITS as u32));
    let totals = plan.array(WARPS * ROWS);
    let norms = plan.array(WARPS);
    Layout { ring, totals, norms, bytes: plan.bytes() }
}

/// Shared memory of [`scan`](fn@scan).
pub const fn scan_bytes<const D: usize, const BITS: usize>() -> u32 {
    layout::<D, BITS>(stages(D, BITS)).bytes
}

/// Shared memory of [`scan_lean`](fn@scan_lean): no more than 99 KiB.
pub const fn scan_lean_bytes<const D: usize, const BITS: usize>() -> u32 {
    layout::<D, BITS>(lean_stages(D, BITS)).bytes
}

/// Bounds the mass of every block of each sequence.
///
/// `lengths` \[sequences\] are at most `max_blocks` · 16. Grid ([`scan_parts`], kv_heads · row groups,
/// sequences).
#[kernel(
    system = gather,
    instances(
        (f16, 64, 4), (f16, 64, 8), (f16, 128, 4), (f16, 128, 8),
        (bf16, 64, 4), (bf16, 64, 8), (bf16, 128, 4), (bf16, 128, 8)
    ),
    max_threads = 256,
    min_blocks = 2,
    overlaps = late
)]
pub fn scan<E: Half, const D: usize, const BITS: usize>(
    queries: Global<E>,
    sketches: Global<u32>,
    lengths: Global<u32>,
    masses: GlobalMut<f32>,
    nus: GlobalMut<f32>,
    totals: GlobalMut<Total>,
    norms: GlobalMut<Norms>,
    shape: ScanShape,
) {
    let arguments = Arguments { queries, sketches, lengths, masses, nus, totals, norms, shape };
    if D * BITS > 512 { scan_part::<E, D, BITS, 3>(arguments) } else { scan_part::<E, D, BITS, 5>(arguments) }
}

/// The same with a stage less, for GPUs whose blocks have 99 KiB of shared memory.
#[kernel(
    system = gather,
    args = scan,
    instances((f16, 128, 4), (f16, 128, 8), (bf16, 128, 4), (bf16, 128, 8)),
    max_threads = 256,
    min_blocks = 1,
    overlaps = late
)]
pub fn scan_lean<E: Half, const D: usize, const BITS: usize>(
    queries: Global<E>,
    sketches: Global<u32>,
    lengths: Global<u32>,
    masses: GlobalMut<f32>,
    nus: GlobalMut<f32>,
    totals: GlobalMut<Total>,
    norms: GlobalMut<Norms>,
    shape: ScanShape,
) {
    let arguments = Arguments { queries, sketches, lengths, masses, nus, totals, norms, shape };
    if D * BITS > 512 { scan_part::<E, D, BITS, 2>(arguments) } else { scan_part::<E, D, BITS, 4>(arguments) }
}

/// The arguments of both kernels.
#[derive(Clone, Copy)]
struct Arguments<E> {
    queries: Global<E>,
    sketches: Global<u32>,
    lengths: Global<u32>,
    masses: GlobalMut<f32>,
    nus: GlobalMut<f32>,
    totals: GlobalMut<Total>,
    norms: GlobalMut<Norms>,
    shape: ScanShape,
}

/// What a block does, with rings of `S` stages.
#[simt::device]
fn scan_part<E: Half, const D: usize, const BITS: usize, const S: u32>(arguments: Arguments<E>) {
    let Arguments { queries, sketches, lengths, masses, nus, totals, norms, shape } = arguments;
    let GridPlace { split: part, sequence, head, row_group, .. } = GridPlace::of(shape.row_groups());
    let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
    let row = sequence * shape.kv_heads + head;
    let (rule, parts) = (shape.rule, thread::grid_dim_x());
    let most = shape.max_blocks * BLOCK_TOKENS;
    let of_row = row as usize * tiles_of(most) as usize;
    // What the launch ahead has yet to write may be counted in this length, or not: a hint needs no more.
    let glance = lengths.peek(sequence as usize, true).min(most);
    Tiles::<D, BITS, S>::ask(sketches, of_row, part * WARPS + warp, Deal::of(glance, rule, parts), glance);
    thread::wait_for_previous();

    let extent = Extent::of(lengths.load(sequence as usize).min(most), rule);
    let Deal { of_warp, used } = Deal::of(extent.length, rule, parts);
    if part >= used {
        return;
    }
    let tiles = tiles_of(extent.length);
    let layout = const { layout::<D, BITS>(S) };
    let first = ((part * WARPS + warp) * of_warp).min(tiles);
    let end = (first + of_warp).min(tiles);
    let ring = Tiles::<D, BITS, S> { ring: layout.ring, sketches, row: of_row, warp, lane, end };
    fill(&ring, first, [0; 5]);
    let in_group = row_group * ROWS + (lane >> 2);
    let present = in_group < shape.group;
    let query_row = (row * shape.group + in_group) as usize;
    let query = Query::load::<E, D>(queries, query_row, present, shape.softmax_scale, lane);
    let to_log2 = query.scale * LOG2_E;
    let heads = heads_of(shape.group);

    let (mut mass, mut most) = (Mass::NONE, f32::NEG_INFINITY);
    let (mut kappa, mut nu, mut largest_nu) = (0f32, 0f32, 0f32);
    let halves = rule.block < TILE_TOKENS;
    let of_row = row as usize * shape.blocks as usize;
    let own = of_row * heads as usize + in_group as usize;
    walk_on(&ring, first, [0; 5], |tile, stage| {
        let sketch = ring.tile(stage);
        let annotation = sketch.annotation();
        let (products, x) = sketch.products(&query, lane);
        let delta = delta::<D>(&query, x, annotation.eps, annotation.zeta) * LOG2_E_ABOVE;
        let mut scores = [0f32; 8];
        unroll!(for i in 0..8 {
            scores[i] = products[i / 2][i & 1] * to_log2;
        });
        let tokens = extent.length - tile * TILE_TOKENS;
        // Those of tokens `from` to before `to`.
        let of = |from: u32, to: u32| {
            let mut some = [0f32; 8];
            unroll!(for i in 0..8 {
                let token = 8 * (i as u32 / 2) + 2 * (lane & 3) + (i as u32 & 1);
                some[i] = if token >= from && token < to { scores[i] } else { f32::NEG_INFINITY };
            });
            some
        };
        let mut close = |mass: &mut Mass, block: u32, nu: f32| {
            let above = mass.close();
            let above = if present { above } else { f32::NEG_INFINITY };
            if lane & 3 == 0 {
                masses.store(own + (block * heads) as usize, above);
            }
            if lane == 0 && row_group == 0 {
                nus.store(of_row + block as usize, nu);
            }
            most = most_of(most, above);
            largest_nu = max(largest_nu, nu);
        };
        kappa = max(kappa, annotation.zeta + annotation.eps);
        let [of_first, of_second] = annotation.nu;
        if halves {
            mass.add(of(0, tokens.min(BLOCK_TOKENS)), delta, true);
            close(&mut mass, 2 * tile, of_first);
            if tokens > BLOCK_TOKENS {
                mass.add(of(BLOCK_TOKENS, tokens), delta, true);
                close(&mut mass, 2 * tile + 1, of_second);
            }
        } else {
            // A block is a power of two of tiles.
            let last = rule.tiles() - 1;
            mass.add(if tokens < TILE_TOKENS { of(0, tokens) } else { scores }, delta, tile & last == 0);
            nu = max(nu, max(of_first, of_second));
            if tile + 1 == end || tile & last == last {
                close(&mut mass, tile >> rule.tiles().trailing_zeros(), nu);
                nu = 0.0;
            }
        }
    });
    let total = mass.estimate();
    async_copy::wait::<0>();
    if lane & 3 == 0 {
        let PartialRow { reference, sum } = total;
        layout.totals.store(warp * ROWS + (lane >> 2), Total { reference, sum, most, reserved: 0.0 });
    }
    if lane == 0 {
        layout.norms.store(warp, Norms { kappa, nu: largest_nu });
    }
    thread::sync_threads();
    if t < ROWS {
        let (mut all, mut most) = (PartialRow::EMPTY, f32::NEG_INFINITY);
        let mut largest = Norms { kappa: 0.0, nu: 0.0 };
        unroll!(for w in 0..8 {
            let total = layout.totals.load(w as u32 * ROWS + t);
            (all, most) = (joined(all, total.estimate()), max(most, total.most));
            let norms = layout.norms.load(w as u32);
            largest = Norms { kappa: max(largest.kappa, norms.kappa), nu: max(largest.nu, norms.nu) };
        });
        let at = row as usize * parts as usize + part as usize;
        let PartialRow { reference, sum } = all;
        let total = Total { reference, sum, most, reserved: 0.0 };
        totals.store_vector(at * heads as usize + (row_group * ROWS + t) as usize, total);
        if t == 0 && row_group == 0 {
            norms.store(at, largest);
        }
    }
}
