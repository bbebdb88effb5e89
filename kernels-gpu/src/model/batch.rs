//! Matrix times a few vectors on the integer tensor cores, for batches: weights stream by once for every
//! eight tokens, with the bits of [`product`](super::product) for every token.
//!
//! # Mathematics
//! That of [`product`](super::product), in its order: strand s takes the blocks s, s + L, s + 2·L and so on,
//! and strands are added one after another. The 32 channels of a block are one m16n8k32 product for each of
//! the three planes of digits, exact.
//!
//! # Bytes
//! Weights once for every eight tokens (20 bytes for 32 of Q4_1, 34 of Q8_0). Records, 128 bytes a block and
//! token, once for every 16 rows, from the second-level cache: 1,024 bytes beside 544 of Q8_0, or 320 of
//! Q4_1. Shared memory: [`batch_layout`], 20 KiB.
//!
//! # Work split
//! A thread block has 16 rows (two groups) and eight tokens: grid (⌈tokens / 8⌉, ⌈R / 16⌉), eight warps. A
//! warp takes every eighth block of the rows; so with L = 32 it has four strands, whose blocks it takes in
//! turn, and the eight warps read one stretch of memory. That is what differs from
//! [`prefill`](super::prefill), where a warp takes all strands: there is work enough for it in a prompt.
//! While a warp multiplies four blocks it has its next four under way; the first four it asks for before it
//! waits for the launch before, as the matrix-vector kernel does. Strands meet in shared memory.
//!
//! Fragments are those of [`prefill`](super::prefill): lane 4·g + q has part q of rows g and g + 8 and of
//! token g's record, and of the result rows g and g + 8 of tokens 2·q and 2·q + 1.

use super::activations::THREADS;
use super::fixed::{PART_WORDS, RECORD_WORDS};
use super::format::{Codes, GROUP, Q4_0, Q4_1, Q8_0};
use super::prefill::columns;
use super::product::{LinearShape, MAX_STRANDS, Target, strands};
use glam::UVec4;
use simt::tensor::mma_i8;
use simt::{Global, GlobalMut, Shared, SharedPlan, kernel, thread, unroll, warp};

/// Tokens of a thread block.
pub const BATCH_TOKENS: u32 = 8;
/// Rows of a thread block.
pub const BATCH_ROWS: u32 = 16;
/// Warps of a thread block.
const WARPS: u32 = THREADS / 32;
/// From one token's sums of 16 rows to the next's: so what lanes store lies in different banks.
const TOKEN_STRIDE: u32 = 20;
/// Words of a strand's sums.
const STRAND_WORDS: u32 = BATCH_TOKENS * TOKEN_STRIDE;

/// Warps that have a strand, `strands(blocks).min(WARPS)`, in a form that becomes no branch ahead of the
/// wait.
#[inline(always)]
const fn side(blocks: u32) -> u32 {
    if blocks <= 6 { 4 } else { WARPS }
}

const _: () = {
    let mut blocks = 0;
    while blocks <= 64 {
        assert!(side(blocks) == if strands(blocks) < WARPS { strands(blocks) } else { WARPS });
        blocks += 1;
    }
};

/// Shared memory of a thread block.
#[derive(Clone, Copy)]
pub struct BatchLayout {
    /// Strands' sums, [L, 8 tokens, 20], of which 16 are rows.
    strands: Shared<f32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Lays out the shared memory.
pub const fn batch_layout() -> BatchLayout {
    let mut plan = SharedPlan::new();
    let strands = plan.array(MAX_STRANDS * STRAND_WORDS);
    BatchLayout { strands, bytes: plan.bytes() }
}

/// A lane's part of the thread block's rows and tokens.
#[derive(Clone, Copy)]
struct Lane {
    codes: Global<u32>,
    scales: Global<u16>,
    records: Global<u32>,
    /// First tiles of the two groups; in 32 bits, no memory holds more.
    tiles: [u32; 2],
    /// Where the token's records begin, at this lane's part: in 32 bits, which the launch sees to.
    start: u32,
    blocks: u32,
    g: u32,
    q: u32,
}

impl Lane {
    /// Asks for this lane's weights of four blocks, `side` apart, from `first` on. Past the end it is the
    /// last block again: a load without a condition is under way with the others.
    #[simt::device]
    fn load<F: Codes>(self, first: u32, side: u32) -> [[F::Stored; 2]; 4] {
        let mut stored = [[F::none(); 2]; 4];
        unroll!(for i in 0..4 {
            let block = (first + i as u32 * side).min(self.blocks - 1);
            unroll!(for half in 0..2 {
                let tile = self.tiles[half] + block;
                stored[i][half] = F::stored(self.codes, self.scales, tile as usize, self.q, self.g);
            });
        });
        stored
    }

    /// The sums of the `N` strands that begin at block `first` and every `side`-th behind it; `stored` has
    /// the first four blocks. Strands take turns, block by block.
    #[simt::device]
    fn sum<F: Codes, const N: usize>(
        self,
        mut stored: [[F::Stored; 2]; 4],
        first: u32,
        side: u32,
        layout: BatchLayout,
    ) {
        let mut sums = [[0f32; 4]; N];
        let mut at = first;
        while at < self.blocks {
            let next = self.load::<F>(at + 4 * side, side);
            unroll!(for i in 0..4 {
                let block = at + i as u32 * side;
                let inside = block < self.blocks;
                let from = (self.start + block.min(self.blocks - 1) * RECORD_WORDS) as usize;
                let first: UVec4 = self.records.load_vector(from);
                let second: UVec4 = self.records.load_vector(from + 4);
                let [upper, lower] = stored[i].map(F::operands);
                let a = [upper[0], lower[0], upper[1], lower[1]];
                let high = mma_i8(a, [first.x, first.y], [0; 4]);
                let middle = mma_i8(a, [first.z, first.w], [0; 4]);
                let rest = mma_i8(a, [second.x, second.y], middle.map(|b| b << 7));
                let (t, u) = (columns(second.z, self.q), columns(second.w, self.q));
                let scale = stored[i].map(F::widened);
                unroll!(for e in 0..4 {
                    let dot = F::combine(high[e], rest[e]);
                    let sum = F::finish(sums[i % N][e], scale[e / 2], dot, t[e % 2], u[e % 2]);
                    sums[i % N][e] = if inside { sum } else { sums[i % N][e] };
                });
            });
            stored = next;
            at += 4 * side;
        }
        unroll!(for i in 0..4 {
            if i < N {
                let strand = (first + i as u32 * side) * STRAND_WORDS;
                unroll!(for e in 0..4 {
                    let (row, token) = (self.g + 8 * (e / 2) as u32, 2 * self.q + (e % 2) as u32);
                    layout.strands.store(strand + token * TOKEN_STRIDE + row, sums[i % N][e]);
                });
            }
        });
    }
}

/// W·v for a few tokens. Grid (⌈tokens / 8⌉, ⌈R / 16⌉) of [`THREADS`] threads: tokens first, so that they
/// find each other's weights in the cache; shared: [`batch_layout`]. Arguments as
/// [`linear`](fn@super::linear); tokens · blocks · 32 is below 2^32.
#[kernel(system = model, instances(Q4_1, Q4_0, Q8_0), max_threads = 256, min_blocks = 2, overlaps = late)]
pub fn linear_batch<F: Codes>(
    codes: Global<u32>,
    scales: Global<u16>,
    records: Global<u32>,
    bias: Global<f32>,
    residual: Global<f32>,
    out: GlobalMut<f32>,
    shape: LinearShape,
) {
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let (g, q) = (lane >> 2, lane & 3);
    let first_row = thread::block_idx_y() * BATCH_ROWS;
    let first_token = thread::block_idx_x() * BATCH_TOKENS;
    let group = first_row / GROUP;
    // Rows and tokens that are not there: the last ones again, not written.
    let tiles = [group, (group + 1).min(shape.groups() - 1)].map(|x| x * shape.blocks);
    let token = (first_token + g).min(shape.tokens - 1);
    let start = token * shape.blocks * RECORD_WORDS + q * PART_WORDS;
    let share = Lane { codes, scales, records, tiles, start, blocks: shape.blocks, g, q };

    let side = side(shape.blocks);
    // No launch writes weights: they may come while those before still run.
    let stored = share.load::<F>(warp, side);
    thread::wait_for_previous();
    let (layout, strands) = (batch_layout(), strands(shape.blocks));
    if strands == MAX_STRANDS {
        share.sum::<F, 4>(stored, warp, side, layout);
    } else if strands == 2 * WARPS {
        share.sum::<F, 2>(stored, warp, side, layout);
    } else if warp < strands {
        share.sum::<F, 1>(stored, warp, side, layout);
    }
    thread::sync_threads();

    let t = thread::thread_idx_x();
    let (token, row) = (t / BATCH_ROWS, t % BATCH_ROWS);
    if token < BATCH_TOKENS && first_token + token < shape.tokens && first_row + row < shape.rows {
        let base = token * TOKEN_STRIDE + row;
        let mut total = layout.strands.load(base);
        let mut s = 1;
        while s < strands {
            total += layout.strands.load(base + s * STRAND_WORDS);
            s += 1;
        }
        Target { bias, residual, out, shape }.finish(first_token + token, first_row + row, total);
    }
}
