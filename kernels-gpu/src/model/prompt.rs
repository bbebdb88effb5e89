//! Matrix times matrix by groups of four warps ([`wgmma`]), for prompts on GPUs of compute capability 9.0:
//! the bits of [`product`](super::product) for every token.
//!
//! # Mathematics
//! That of [`product`](super::product), in its order. X is two digits here, which f16 holds exactly:
//!
//! ```text
//! X = 2^11·h + l        |h| <= 1018, l in −1024..=1023
//! S = 2^11·H + L        H = Σ q·h, L = Σ q·l: |H|, |L| <= 32·128·1024 = 2^22
//! ```
//!
//! The tensor cores' sums are exact for integers below 2^24, in any order, so fma(H, 2^11, L) is S rounded
//! once, the f32(S) of [`format`](super::format). The same holds of digits times a power of two. Where a
//! block's 2^14·t is from 2^−24 to 2^5, f16 holds h and l times that exactly as well: what comes out is
//! 2^14·t·f32(S), and its *factor* is 2^−14. Of other blocks (E below −18 or above 11) digits are integers,
//! and the factor is t. In both cases s ← fma(d·factor, sum, s) has the bits of fma(d·t, f32(S), s): with a
//! factor of 2^−14 nothing but s is rounded on either side, as d·t is exact.
//!
//! # Layout
//! What the tokens bring is in panels of 64 tokens and one block of 32 channels
//! ([`panel_activations`](fn@panel_activations)): for each token 128 bytes of digits, then the factors of the
//! 64 tokens, then their u. Vector 4·p + 2·s + e of a token's digits (p = 0: h, p = 1: l) has in element
//! 2·j + i those of channel 8·j + 4·s + e + 2·i, as a word of codes comes apart into f16; it is at place
//! (4·p + 2·s + e) ^ (token % 8): the swizzle of 128 bytes. Panel `token / 64 · n + block`, 8,704 bytes.
//! Tokens that are not there are zeros.
//!
//! # Work split
//! A thread block has 192 rows and 64 tokens: grid (⌈tokens / 64⌉, ⌈R / 192⌉), three groups of four warps
//! with 64 rows each. The first thread of a fourth group starts all copies: a panel, and boxes of 24 tiles
//! and their scales, by two [tensor maps](simt::tiles), into a ring of six stages. A group multiplies a block
//! at a time, while the others scale and add what they got. A lane has 32 results: their sums, their totals,
//! H and L are 128 registers.
//!
//! # Bytes
//! For 32 channels of 192 rows and 64 tokens, from the L2 cache: 6,528 of Q8_0's codes and scales, 3,840 of
//! Q4_1's, and 8,448 of a panel (8,704 where u is read). Shared memory: [`prompt_bytes`], 90 KiB for Q8_0.
//! The tensor cores take 384 cycles for it, the three warps of a scheduler 450 instructions.

use super::activations::{
    Block, Gated, Normed, Plain, Source, SourceShape, THREADS, load_ahead, make_blocks, sums_layout,
};
use super::fixed::BLOCK;
use super::format::{Codes, GROUP, Q4_0, Q4_1, Q8_0};
use super::product::{LinearShape, Target, strands};
use glam::Vec2;
use simt::convert::f16x2_from_f32;
use simt::math::fma;
use simt::warp::{self, FULL_MASK, sync_warp, warp_vote_all};
use simt::wgmma::{self, F16, Tile};
use simt::{
    Global, GlobalMut, Mbarrier, Shared, SharedPlan, Swizzle, TensorMap, bulk, kernel, thread, unroll,
};

/// Tokens of a panel and of a thread block.
pub const PANEL_TOKENS: u32 = 64;
/// 32-bit words of a panel.
pub const PANEL_WORDS: u32 = PANEL_TOKENS * (TOKEN_WORDS + 2);
/// 32-bit words of a token's digits in a panel.
const TOKEN_WORDS: u32 = 32;
/// 32-bit words of a panel's digits.
const DIGIT_WORDS: u32 = PANEL_TOKENS * TOKEN_WORDS;

/// Rows of a thread block.
pub const PROMPT_ROWS: u32 = 64 * TEAMS;
/// Groups of eight rows of a thread block: tiles of a box.
pub const PROMPT_GROUPS: u32 = PROMPT_ROWS / GROUP;
/// Threads of a thread block.
pub const PROMPT_THREADS: u32 = 128 * (TEAMS + 1);
/// Groups of four warps.
const TEAMS: u32 = 3;
/// Blocks of channels that are under way or in use.
const STAGES: u32 = 6;
/// Registers of a thread that multiplies, and of one of the group that copies.
const REGISTERS: [u32; 2] = [160, 32];

/// Splits X into h and l.
#[inline(always)]
fn two_digits(fixed: i32) -> [i32; 2] {
    let high = (fixed + 1024) >> 11;
    [high, fixed - (high << 11)]
}

/// What digits in panels are times t: 2^14, so that f16 holds those of blocks whose E is from −18 to 11.
const RAISED: f32 = 16384.0;
/// The factor of a block whose digits are times t: 2^−14.
const PLAIN: f32 = 1.0 / RAISED;

/// A block's digits are integers times the first of these, and S times the second is t·S.
#[inline(always)]
fn scaling(block: &Block) -> [f32; 2] {
    let raised = block.step.step * RAISED;
    let fits = (SMALLEST..=LARGEST).contains(&raised);
    if fits | (block.largest == 0) {
        [if fits { raised } else { 1.0 }, PLAIN]
    } else {
        [1.0, block.step.step]
    }
}

/// What digits may be times: 2^−24, the least f16, and 2^5, of which 1,024 are 32,768.
const SMALLEST: f32 = 1.0 / (1 << 24) as f32;
const LARGEST: f32 = 32.0;

/// A token's place in the panels of its block of channels.
#[derive(Clone, Copy)]
struct Row {
    panels: GlobalMut<u32>,
    /// The panel's first word.
    first: usize,
    /// Of the panel's tokens.
    row: u32,
}

impl Row {
    #[simt::device]
    fn new(panels: GlobalMut<u32>, token: u32, at: u32, columns: u32) -> Row {
        let panel = (token / PANEL_TOKENS) as usize * (columns / BLOCK) as usize + (at / BLOCK) as usize;
        Row { panels, first: panel * PANEL_WORDS as usize, row: token % PANEL_TOKENS }
    }

    /// Writes the digits of four channels from `at` on, times `scale`.
    #[simt::device]
    fn store_digits(self, at: u32, fixed: [i32; 4], scale: f32) {
        let quad = at / 4 % 8;
        let (j, s) = (quad / 2, quad % 2);
        let digits = fixed.map(|x| two_digits(x).map(|digit| digit as f32 * scale));
        unroll!(for p in 0..2 {
            unroll!(for e in 0..2 {
                let vector = (4 * p as u32 + 2 * s + e as u32) ^ (self.row % 8);
                let word = self.row * TOKEN_WORDS + 4 * vector + j;
                self.panels.store(self.first + word as usize, f16x2_from_f32(digits[e][p], digits[e + 2][p]));
            });
        });
    }

    /// Writes the block's factor and u.
    #[simt::device]
    fn store_block(self, factor: f32, u: f32) {
        let at = self.first + (DIGIT_WORDS + self.row) as usize;
        self.panels.store(at, factor.to_bits());
        self.panels.store(at + PANEL_TOKENS as usize, u.to_bits());
    }
}

/// The panels of every token. Grid (tokens, rounded up to whole panels; any number of blocks for a token, of
/// use up to one for every 1024 channels), blocks of [`THREADS`] threads; the rest as for
/// [`quantize_activations`](fn@super::quantize_activations).
#[kernel(system = model, instances(Plain, Normed, Gated), max_threads = 256, overlaps)]
pub fn panel_activations<S: Source>(
    x: Global<f32>,
    weight: Global<f32>,
    panels: GlobalMut<u32>,
    shape: SourceShape,
    tokens: u32,
) {
    let token = thread::block_idx_x();
    let row = |at: u32| Row::new(panels, token, at, shape.columns);
    let share = [thread::block_idx_y(), thread::grid_dim_y()];
    if token < tokens {
        let ahead = load_ahead::<S>(weight, share[0], shape);
        make_blocks::<S>(x, weight, ahead, token, share, shape, sums_layout().0, |at, fixed, block| {
            let [scale, factor] = scaling(&block);
            row(at).store_digits(at, fixed, scale);
            if at.is_multiple_of(BLOCK) {
                row(at).store_block(factor, block.step.sum(block.sum));
            }
        });
        return;
    }
    let mut at = (share[0] * THREADS + thread::thread_idx_x()) * 4;
    while at < shape.columns {
        row(at).store_digits(at, [0; 4], 1.0);
        if at.is_multiple_of(BLOCK) {
            row(at).store_block(PLAIN, 0.0);
        }
        at += share[1] * THREADS * 4;
    }
}

/// Shared memory of a thread block. A stage of the ring is one piece, so that all that a thread reads of it
/// is as far from its beginning in each: digits [64 tokens, 32 words], swizzled; codes [tiles, words of a
/// tile]; scales [tiles, scales of a tile]; factors \[64 tokens\] and u \[64 tokens\].
#[derive(Clone, Copy)]
struct Layout {
    /// [stages, words of a stage].
    ring: Shared<u32>,
    /// The same memory: scales.
    halves: Shared<u16>,
    /// The same memory again: factors and u.
    floats: Shared<f32>,
    /// \[stages\]: a stage has come.
    full: Shared<Mbarrier>,
    /// \[stages\]: a stage has been used by all warps.
    free: Shared<Mbarrier>,
    bytes: u32,
}

/// Where a stage's parts begin, in words.
#[derive(Clone, Copy)]
struct Parts {
    codes: u32,
    scales: u32,
    factors: u32,
    words: u32,
}

const fn parts<F: Codes>() -> Parts {
    let codes = DIGIT_WORDS;
    let scales = codes + PROMPT_GROUPS * F::TILE_WORDS;
    let factors = scales + PROMPT_GROUPS * F::TILE_SCALES / 2;
    let end = factors + 2 * PANEL_TOKENS;
    Parts { codes, scales, factors, words: end.next_multiple_of(Swizzle::B128.period() / 4) }
}

const fn layout<F: Codes>() -> Layout {
    let words = STAGES * parts::<F>().words;
    let mut plan = SharedPlan::new();
    let ring = plan.tile(words, Swizzle::B128);
    let (full, free) = (plan.array(STAGES), plan.array(STAGES));
    let halves = SharedPlan::new().array(2 * words);
    let floats = SharedPlan::new().array(words);
    Layout { ring, halves, floats, full, free, bytes: plan.bytes() }
}

/// Shared memory of [`linear_prompt`](fn@linear_prompt).
pub const fn prompt_bytes<F: Codes>() -> u32 {
    layout::<F>().bytes
}

/// The blocks of channels in the order of the strands, and where the ring takes each.
#[derive(Clone, Copy)]
struct Walk {
    strand: u32,
    block: u32,
    stage: u32,
    /// Of the barriers.
    phase: u32,
}

impl Walk {
    const START: Walk = Walk { strand: 0, block: 0, stage: 0, phase: 0 };

    /// The next one; past the last strand a block that there is not.
    #[simt::device]
    fn next(self, blocks: u32, strands: u32) -> Walk {
        let wraps = self.stage == STAGES - 1;
        let (stage, phase) = (if wraps { 0 } else { self.stage + 1 }, self.phase ^ wraps as u32);
        let (strand, block) = (self.strand + 1, self.block + strands);
        if block < blocks {
            return Walk { block, stage, phase, ..self };
        }
        Walk { strand, block: if strand < strands { strand } else { blocks }, stage, phase }
    }
}

/// What the thread that copies copies from.
#[derive(Clone, Copy)]
struct Copies {
    maps: Global<TensorMap>,
    panels: Global<u32>,
    blocks: u32,
}

impl Copies {
    /// Starts the copies of a block into its stage, once all warps have used that.
    #[simt::device]
    fn start<F: Codes>(self, layout: Layout, first: Walk) {
        let factors = if F::HAS_MINIMUM { 2 * PANEL_TOKENS } else { PANEL_TOKENS };
        let words = DIGIT_WORDS + factors + PROMPT_GROUPS * F::TILE_WORDS;
        let (stage, full, digits) = (first.stage, layout.full, 4 * DIGIT_WORDS);
        layout.free.wait(stage, first.phase ^ 1);
        full.arrive_and_expect(stage, 4 * words + 2 * PROMPT_GROUPS * F::TILE_SCALES);
        let panel = thread::block_idx_x() as usize * self.blocks as usize + first.block as usize;
        let panel = panel * PANEL_WORDS as usize;
        let parts = const { parts::<F>() };
        let to = stage * parts.words;
        layout.ring.copy_bulk(to, self.panels, panel, digits, full, stage);
        let from = panel + DIGIT_WORDS as usize;
        layout.ring.copy_bulk(to + parts.factors, self.panels, from, 4 * factors, full, stage);
        let at = [0, first.block as i32, (thread::block_idx_y() * PROMPT_GROUPS) as i32];
        layout.ring.copy_tile(to + parts.codes, self.maps, 0, at, full, stage);
        layout.halves.copy_tile(2 * (to + parts.scales), self.maps, 1, at, full, stage);
    }
}

/// Adds a block to a lane's 32 sums, H and L of which are there, for rows g and g + 8 with their `scales`:
/// `factor` and `u` give those of tokens 8·j + 2·q and the next one.
#[simt::device]
fn add<F: Codes>(
    sums: &mut [f32; 32],
    [high, low]: [[f32; 32]; 2],
    scales: [[f32; 2]; 2],
    factor: impl Fn(u32) -> [f32; 2],
    u: impl Fn(u32) -> [f32; 2],
) {
    let mut dots = [0f32; 32];
    unroll!(for i in 0..32 {
        dots[i] = fma(high[i], 2048.0, low[i]);
    });
    unroll!(for j in 0..8 {
        let (factor, u) = (factor(j as u32), u(j as u32));
        unroll!(for e in 0..4 {
            let i = 4 * j + e;
            sums[i] = F::finish(sums[i], scales[e / 2], dots[i], factor[e % 2], u[e % 2]);
        });
    });
}

/// W·v for many tokens. `maps`: of the tiles' codes, u32 [groups, n, words of a tile] in boxes of 24 tiles of
/// one block, and of their scales, u16 [groups, n, scales of a tile] likewise. Grid (⌈tokens / 64⌉,
/// ⌈R / 192⌉) of [`PROMPT_THREADS`] threads, shared memory [`prompt_bytes`]; the rest as for
/// [`linear`](fn@super::linear).
#[kernel(system = model, instances(Q4_1, Q4_0, Q8_0), max_threads = 512, min_blocks = 1, only_sm = 90, overlaps)]
pub fn linear_prompt<F: Codes>(
    maps: Global<TensorMap>,
    panels: Global<u32>,
    bias: Global<f32>,
    residual: Global<f32>,
    out: GlobalMut<f32>,
    shape: LinearShape,
) {
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let layout = layout::<F>();
    let (blocks, strand_count) = (shape.blocks, strands(shape.blocks));
    let copies = Copies { maps, panels, blocks };
    if thread::thread_idx_x() == 0 {
        unroll!(for stage in 0..6 {
            layout.full.init(stage as u32, 1);
            layout.free.init(stage as u32, 4 * TEAMS);
        });
        bulk::fence_shared();
    }
    thread::sync_threads();
    let mut at = Walk::START;
    if warp >= 4 * TEAMS {
        wgmma::release_registers::<{ REGISTERS[1] }>();
        if warp == 4 * TEAMS && lane == 0 {
            maps.acquire(0);
            maps.acquire(1);
            while at.block < blocks {
                copies.start::<F>(layout, at);
                at = at.next(blocks, strand_count);
            }
        }
        return;
    }
    wgmma::claim_registers::<{ REGISTERS[0] }>();

    let (g, q) = (lane >> 2, lane & 3);
    let parts = const { parts::<F>() };
    let mut totals = [0f32; 32];
    while at.block < blocks {
        let strand = at.strand;
        let mut sums = [0f32; 32];
        while at.strand == strand {
            let stage = at.stage;
            layout.full.wait(stage, at.phase);
            let base = stage * parts.words;
            let tile = |half: u32| base + parts.codes + (2 * warp + half) * F::TILE_WORDS;
            let upper = F::shared_halves(layout.ring, tile(0), q, g);
            let lower = F::shared_halves(layout.ring, tile(1), q, g);
            let a = [0, 1].map(|s| [upper[s][0], lower[s][0], upper[s][1], lower[s][1]]);
            let digits = Tile::swizzled(layout.ring, 0, Swizzle::B128, 1024);
            let of = |p: u32, s: u32| digits.at(base + 16 * p + 8 * s);

            let group = wgmma::begin();
            let high = group.multiply::<F16, 32>(a[0], of(0, 0));
            let high = group.multiply_add::<F16, 32>(high, a[1], of(0, 1));
            let low = group.multiply::<F16, 32>(a[0], of(1, 0));
            let low = group.multiply_add::<F16, 32>(low, a[1], of(1, 1));
            group.commit();
            let scales = [0, 1].map(|half| {
                let tile = 2 * (base + parts.scales) + (2 * warp + half) * F::TILE_SCALES;
                F::shared_scale(layout.halves, tile, g)
            });
            let factors = base + parts.factors;
            let two: Vec2 = layout.floats.load_vector(factors + 2 * lane);
            let all_plain = warp_vote_all(FULL_MASK, (two.x == PLAIN) & (two.y == PLAIN));
            let [high, low] = wgmma::wait::<0, f32, 32, 2>([high, low]);
            let of_tokens = |from: u32, j: u32| -> [f32; 2] {
                let two: Vec2 = layout.floats.load_vector(from + 8 * j + 2 * q);
                two.to_array()
            };
            let u = |j: u32| if F::HAS_MINIMUM { of_tokens(factors + PANEL_TOKENS, j) } else { [0.0; 2] };
            if all_plain {
                let scales = scales.map(|[d, m]| [d * PLAIN, m]);
                add::<F>(&mut sums, [high, low], scales, |_| [1.0; 2], u);
            } else {
                add::<F>(&mut sums, [high, low], scales, |j| of_tokens(factors, j), u);
            }
            sync_warp(FULL_MASK);
            if lane == 0 {
                layout.free.arrive(stage);
            }
            at = at.next(blocks, strand_count);
        }
        unroll!(for i in 0..32 {
            totals[i] = if strand == 0 { sums[i] } else { totals[i] + sums[i] };
        });
    }

    // Strands without a block are added too: a total of −0 becomes +0.
    if blocks < strand_count {
        unroll!(for i in 0..32 {
            totals[i] += 0.0;
        });
    }

    let first_row = thread::block_idx_y() * PROMPT_ROWS + 16 * warp;
    let first_token = thread::block_idx_x() * PANEL_TOKENS;
    let target = Target { bias, residual, out, shape };
    unroll!(for j in 0..8 {
        unroll!(for e in 0..4 {
            let token = first_token + 8 * j as u32 + 2 * q + (e % 2) as u32;
            let row = first_row + g + 8 * (e / 2) as u32;
            if token < shape.tokens && row < shape.rows {
                target.finish(token, row, totals[4 * j + e]);
            }
        });
    });
}
