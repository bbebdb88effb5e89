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
//! `queries` [sequences, q_heads, D]; `sketches` the pool [blocks, kv_heads] of tiles; `table` [sequences,
//! max_blocks]. Written: `masses` [sequences, kv_heads, blocks, heads], heads the query heads of a KV head
//! rounded up to a multiple of eight, −∞ for those that there are not; `nus` [sequences, kv_heads, blocks];
//! `totals` [sequences, kv_heads, parts, heads] and `norms` [sequences, kv_heads, parts].
//!
//! # Bytes
//! A sketch for each tile and KV head, read once: 97 bytes a token with 4 bits at D = 128, where keys and
//! values take 512. Written: 4 bytes a block and query head.
//!
//! # Work split
//! Grid (parts, kv_heads · row groups, sequences), eight warps with a ring of tiles each. A warp has
//! neighbouring blocks, whole ones. What is kept is the next launch's work: [`decide`](fn@super::decide).

use super::bound::delta;
use super::counting::heads_of;
use super::tile::{Annotation, code_words, sketch_words};
use crate::attention::query::{LOG2_E, LOG2_E_ABOVE, Query};
use crate::attention::{BLOCK_TOKENS, Half, PartialRow, ROWS, Ring, first_blocks, walk};
use crate::gather::rule::{Extent, Rule};
use glam::UVec4;
use half::{bf16, f16};
use simt::math::{canonical_nan, exp2_nonpositive, floor, fma, log2, max};
use simt::tensor::mma_f16;
use simt::warp::{self, FULL_MASK, warp_shuffle_xor, warp_vote_any};
use simt::{
    Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, async_copy, bits, half2, kernel, thread, unroll,
};

/// Threads of a block of [`scan`](fn@scan).
pub const SCAN_THREADS: u32 = 256;
pub(super) const WARPS: u32 = SCAN_THREADS / 32;
/// Thread blocks that fill the machine: two on each of the 132 multiprocessors of a GH100.
const BLOCKS_WANTED: u32 = 264;

/// Thread blocks of a sequence and row group, for `rows` of these, whose longest has `blocks` gather-blocks.
pub const fn scan_parts(rows: u32, blocks: u32) -> u32 {
    let wanted = BLOCKS_WANTED / if rows == 0 { 1 } else { rows };
    // A block for every warp.
    let most = blocks.div_ceil(WARPS);
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
    /// The estimate.
    #[inline(always)]
    pub const fn estimate(self) -> PartialRow {
        PartialRow { reference: self.reference, sum: self.sum }
    }
}

/// The larger of two blocks' masses, for [`Total::most`].
#[inline(always)]
pub fn most_of(most: f32, mass: f32) -> f32 {
    if mass < f32::INFINITY { max(most, mass) } else { most }
}

/// How the blocks of a sequence are dealt out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deal {
    /// Blocks of a warp.
    pub of_warp: u32,
    /// Parts that have any; one even without.
    pub used: u32,
}

impl Deal {
    /// That of so many blocks over so many parts.
    #[inline(always)]
    pub fn of(blocks: u32, parts: u32) -> Self {
        let warps = parts * WARPS;
        let of_warp = bits::div_u32(blocks + warps - 1, warps).max(1);
        Deal { of_warp, used: bits::div_u32(blocks + of_warp * WARPS - 1, of_warp * WARPS).max(1) }
    }
}

const STAGES: u32 = 5;

#[derive(Clone, Copy)]
struct Layout {
    ring: Shared<u32>,
    /// Totals of the warps, [warps, 8], and what bounds their norms.
    totals: Shared<Total>,
    norms: Shared<Norms>,
    bytes: u32,
}

const fn layout<const D: usize, const BITS: usize>() -> Layout {
    let mut plan = SharedPlan::new();
    let ring = plan.array(WARPS * STAGES * sketch_words(D as u32, BITS as u32));
    let totals = plan.array(WARPS * ROWS);
    let norms = plan.array(WARPS);
    Layout { ring, totals, norms, bytes: plan.bytes() }
}

/// Shared memory of [`scan`](fn@scan).
pub const fn scan_bytes<const D: usize, const BITS: usize>() -> u32 {
    layout::<D, BITS>().bytes
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
    overlaps
)]
pub fn scan<E: Half, const D: usize, const BITS: usize>(
    queries: Global<E>,
    sketches: Global<u32>,
    table: Global<u32>,
    lengths: Global<u32>,
    masses: GlobalMut<f32>,
    nus: GlobalMut<f32>,
    totals: GlobalMut<Total>,
    norms: GlobalMut<Norms>,
    shape: ScanShape,
) {
    let (part, sequence) = (thread::block_idx_x(), thread::block_idx_z());
    let head = bits::div_u32(thread::block_idx_y(), shape.row_groups());
    let row_group = bits::rem_u32(thread::block_idx_y(), shape.row_groups());
    let (t, lane, warp) = (thread::thread_idx_x(), warp::lane_id(), thread::thread_idx_x() / 32);
    let row = sequence * shape.kv_heads + head;
    let rule = shape.rule;
    let extent = Extent::of(lengths.load(sequence as usize).min(shape.max_blocks * BLOCK_TOKENS), rule);
    let parts = thread::grid_dim_x();
    let Deal { of_warp, used } = Deal::of(extent.blocks, parts);
    if part >= used {
        return;
    }
    let per_block = rule.entries();
    let tiles = extent.length.div_ceil(BLOCK_TOKENS);
    let layout = layout::<D, BITS>();
    let first = ((part * WARPS + warp) * of_warp * per_block).min(tiles);
    let end = (first + of_warp * per_block).min(tiles);
    let ring =
        Tiles::<D, BITS> { ring: layout.ring, sketches, table, shape, sequence, head, warp, lane, end };
    let ahead = first_blocks(&ring, first);
    let in_group = row_group * ROWS + (lane >> 2);
    let present = in_group < shape.group;
    let query_row = (row * shape.group + in_group) as usize;
    let query = Query::load::<E, D>(queries, query_row, present, shape.softmax_scale, lane);
    let to_log2 = query.scale * LOG2_E;
    let heads = heads_of(shape.group);

    let mut mass = Mass::NONE;
    let (mut total, mut most) = (PartialRow::EMPTY, f32::NEG_INFINITY);
    let (mut kappa, mut nu, mut largest_nu) = (0f32, 0f32, 0f32);
    walk(&ring, first, ahead, |tile, stage| {
        let sketch = ring.tile(stage);
        let annotation = sketch.annotation();
        let (products, x) = sketch.products(&query, lane);
        let delta = delta::<D>(&query, x, annotation.eps, annotation.zeta) * LOG2_E_ABOVE;
        let mut scores = [0f32; 4];
        unroll!(for i in 0..4 {
            scores[i] = products[i / 2][i & 1] * to_log2;
        });
        let tokens = extent.length - tile * BLOCK_TOKENS;
        if tokens < BLOCK_TOKENS {
            unroll!(for i in 0..4 {
                let token = 8 * (i as u32 / 2) + 2 * (lane & 3) + (i as u32 & 1);
                scores[i] = if token < tokens { scores[i] } else { f32::NEG_INFINITY };
            });
        }
        mass.add(scores, delta);
        kappa = max(kappa, annotation.zeta + annotation.eps);
        nu = max(nu, annotation.nu);
        // A block is a power of two of tiles.
        if tile + 1 == end || (tile + 1) & (per_block - 1) == 0 {
            let (above, about) = mass.close();
            let block = tile >> per_block.trailing_zeros();
            let at = row as usize * shape.blocks as usize + block as usize;
            let above = if present { above } else { f32::NEG_INFINITY };
            if lane & 3 == 0 {
                masses.store(at * heads as usize + in_group as usize, above);
            }
            if lane == 0 && row_group == 0 {
                nus.store(at, nu);
            }
            total = joined(total, about);
            most = most_of(most, above);
            largest_nu = max(largest_nu, nu);
            (mass, nu) = (Mass::NONE, 0.0);
        }
    });
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

/// What a lane has of a block's mass for its query head.
#[derive(Clone, Copy)]
struct Mass {
    /// An integer; no weight is above 2^[`SLACK`] relative to it.
    reference: f32,
    /// Σ 2^(ŝ + Δ − reference) over this lane's tokens, and the same with each weight times its Δ.
    above: f32,
    excess: f32,
}

impl Mass {
    const NONE: Mass = Mass { reference: PartialRow::EMPTY.reference, above: 0.0, excess: 0.0 };

    /// Takes a tile in: scores and Δ in log2 units.
    #[simt::device]
    fn add(&mut self, scores: [f32; 4], delta: f32) {
        let above = scores.map(|s| s + delta);
        let largest = max(max(above[0], above[1]), max(above[2], above[3]));
        // The four lanes of a row raise its reference together, and no other row's.
        if warp_vote_any(FULL_MASK, largest - self.reference > SLACK) {
            let largest = max(largest, warp_shuffle_xor(FULL_MASK, largest, 1, 32));
            let largest = max(largest, warp_shuffle_xor(FULL_MASK, largest, 2, 32));
            let reference = raised(self.reference, largest);
            let factor = exp2_nonpositive(self.reference - reference);
            self.reference = reference;
            self.above *= factor;
            self.excess *= factor;
        }
        let p = above.map(|s| exp2_nonpositive(s - self.reference));
        let weight = (p[0] + p[1]) + (p[2] + p[3]);
        self.above += weight;
        self.excess = fma(weight, delta, self.excess);
    }

    /// The logarithm of the head's mass to base two, rounded up, and its estimate.
    #[simt::device]
    fn close(self) -> (f32, PartialRow) {
        let row = |x: f32| {
            let x = x + warp_shuffle_xor(FULL_MASK, x, 1, 32);
            x + warp_shuffle_xor(FULL_MASK, x, 2, 32)
        };
        let above = row(self.above);
        (mass_above(self.reference, above), about(self.reference, above, row(self.excess)))
    }
}

/// How far above its reference a row's largest score may be, in octaves, before the reference follows it.
pub const SLACK: f32 = 15.0;

/// A row's reference after its largest score of a tile.
#[inline(always)]
pub fn raised(reference: f32, largest: f32) -> f32 {
    if largest - reference > SLACK { max(reference, -floor(-largest)) } else { reference }
}

/// log2 of a block's mass of `sum` relative to 2^`reference`, rounded up: at least that of the mass that the
/// sum of these weights would have without rounding. 128 tokens at most: a weight passes 12 roundings, 2^−20
/// of it; weights below 2^−126 of the largest one, which are lost, are 2^−119; the logarithm and its sum with
/// the reference lose 2^−23 of what is larger.
#[inline(always)]
pub fn mass_above(reference: f32, sum: f32) -> f32 {
    let log = reference + log2(sum);
    canonical_nan(log + fma(simt::math::abs(log), 1.0 / 2_097_152.0, 1.0 / 65536.0))
}

/// An estimate of a block's mass without Δ: that with it, less the mean of Δ. Nothing, where that is no
/// number: such a block is kept in any case.
#[inline(always)]
pub fn about(reference: f32, above: f32, excess: f32) -> PartialRow {
    const MOST: f32 = 1.0e9;
    let mean = excess / above;
    // Whole octaves go to the reference, which has room for them.
    let whole = floor(mean);
    let estimate = PartialRow { reference: reference - whole, sum: above * exp2_nonpositive(whole - mean) };
    if mean <= MOST { estimate } else { PartialRow::EMPTY }
}

/// Both together.
#[inline(always)]
pub fn joined(a: PartialRow, b: PartialRow) -> PartialRow {
    let reference = max(a.reference, b.reference);
    let of = |row: PartialRow| row.sum * exp2_nonpositive(row.reference - reference);
    PartialRow { reference, sum: of(a) + of(b) }
}

/// A warp's sketches.
struct Tiles<const D: usize, const BITS: usize> {
    ring: Shared<u32>,
    sketches: Global<u32>,
    table: Global<u32>,
    shape: ScanShape,
    sequence: u32,
    head: u32,
    warp: u32,
    lane: u32,
    end: u32,
}

impl<const D: usize, const BITS: usize> Tiles<D, BITS> {
    const WORDS: u32 = sketch_words(D as u32, BITS as u32);

    #[inline(always)]
    fn tile(&self, stage: u32) -> Sketch<D, BITS> {
        Sketch { memory: self.ring, start: (self.warp * STAGES + stage) * Self::WORDS }
    }
}

impl<const D: usize, const BITS: usize> Ring for Tiles<D, BITS> {
    const STAGES: u32 = STAGES;
    const STRIDE: u32 = 1;
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
        let pair = block as usize * self.shape.kv_heads as usize + self.head as usize;
        self.tile(stage).copy(self.sketches, pair * Self::WORDS as usize, self.lane);
    }
}

/// A sketch in shared memory.
#[derive(Clone, Copy)]
struct Sketch<const D: usize, const BITS: usize> {
    memory: Shared<u32>,
    start: u32,
}

impl<const D: usize, const BITS: usize> Sketch<D, BITS> {
    const CODES: u32 = code_words(D as u32, BITS as u32);
    const WORDS: u32 = sketch_words(D as u32, BITS as u32);

    /// Starts copying it; a warp's work.
    #[simt::device]
    fn copy(self, sketches: Global<u32>, from: usize, lane: u32) {
        unroll!(for i in 0..(Self::WORDS.div_ceil(128) as usize), at_most 6 {
            let chunk = 32 * i as u32 + lane;
            if 4 * chunk < Self::WORDS {
                self.memory.copy_async_once(self.start + 4 * chunk, sketches, from + 4 * chunk as usize);
            }
        });
    }

    #[simt::device]
    fn annotation(self) -> Annotation {
        self.memory.load_vector(self.start + Self::CODES + D as u32)
    }

    #[simt::device]
    fn four(self, word: u32) -> [u32; 4] {
        self.memory.load_vector::<UVec4>(self.start + word).to_array()
    }

    /// The products of query row g with the keys of tokens 8j + 2q and 8j + 2q + 1, before any scaling, and
    /// Σ|q_n|·σ.
    #[simt::device]
    fn products(self, query: &Query, lane: u32) -> ([[f32; 2]; 2], f32) {
        let (g, q) = (lane >> 2, lane & 3);
        let own = if g & 1 == 0 { Self::CODES + D as u32 / 2 } else { Self::CODES };
        let mut c = [[0f32; 4]; 2];
        let mut z = [0f32; 4];
        unroll!(for s in 0..(D / 64), at_most 4 {
            let at = 32 * s as u32 + 8 * q;
            let mut scales = [0u32; 8];
            let mut column = [0u32; 8];
            unroll!(for h in 0..2 {
                let part = self.four(Self::CODES + at + 4 * h as u32);
                let other = self.four(own + at + 4 * h as u32);
                unroll!(for i in 0..4 {
                    scales[4 * h + i] = part[i];
                    column[4 * h + i] = other[i];
                });
            });
            let codes = self.codes(s, lane);
            unroll!(for i in 0..4 {
                let pair = 8 * s + 2 * i;
                let (q0, q1) = (query.pairs[pair], query.pairs[pair + 1]);
                let a = [q0, half2::abs_f16x2(q0), q1, half2::abs_f16x2(q1)];
                z = mma_f16(a, [column[2 * i], column[2 * i + 1]], z);
                let (x0, r0) = query.times(pair, scales[2 * i]);
                let (x1, r1) = query.times(pair + 1, scales[2 * i + 1]);
                unroll!(for j in 0..2 {
                    c[j] = mma_f16([x0, r0, x1, r1], operands::<BITS>(codes, i, j), c[j]);
                });
            });
        });
        let score = |x: f32, rest: f32| fma(x + rest, CODE_UNIT, z[0]);
        (c.map(|c| [score(c[0], c[2]), score(c[1], c[3])]), z[3])
    }

    /// A lane's codes of 16 channels of both its tokens: with 4 bits in the first four words.
    #[simt::device]
    fn codes(self, s: usize, lane: u32) -> [[u32; 4]; 2] {
        if BITS == 4 {
            [self.four(128 * s as u32 + 4 * lane), [0; 4]]
        } else {
            [0, 1].map(|half| self.four(256 * s as u32 + 128 * half + 4 * lane))
        }
    }
}

/// One over what a code is as an operand.
pub const CODE_UNIT: f32 = 16_777_216.0;

/// The codes of token half `j` and channels 4i to 4i + 3 as an operand.
#[inline(always)]
fn operands<const BITS: usize>(codes: [[u32; 4]; 2], i: usize, j: usize) -> [u32; 2] {
    if BITS == 4 {
        let word = codes[0][i];
        [word >> (8 * j) & 0x000f_000f, word >> (8 * j + 4) & 0x000f_000f]
    } else {
        let word = codes[j][i];
        [word & 0x00ff_00ff, word >> 8 & 0x00ff_00ff]
    }
}
