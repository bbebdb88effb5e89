//! Matrix times matrix on the integer tensor cores, for prompts: the bits of [`product`](super::product) for
//! every token.
//!
//! # Mathematics
//! That of [`product`](super::product), in its order: a warp takes a strand's blocks in order, adds the
//! strand to the total, and goes on to the next strand; so one sum and one total an output are enough. The 32
//! channels of a block are one m16n8k32 product for each of the three planes of digits, exact.
//!
//! # Work split
//! A warp has 32 rows (four groups, two operands) and 32 tokens, a thread block four warps: grid (⌈tokens /
//! 32⌉, ⌈R / 128⌉). What a block of channels takes of weights and records comes by asynchronous copies into a
//! ring of four stages, once for all warps, while the stages before it are multiplied. With g = lane / 4 and
//! q = lane % 4, A's registers are the words of part q of row g and row g + 8 of two tiles; B's are the eight
//! bytes of a plane in part q of token g's record: both name channels 8q to 8q + 7, so the order of the
//! contraction is the same on both sides.
//!
//! # Layout
//! A stage: 32 records of eight vectors of 16 bytes, then 16 tiles, then their scales. Vector v of token t's
//! record is at place v ^ (t & 1): else a load of all lanes' vectors, which are 32 bytes apart, would meet
//! half of the banks.
//!
//! # Bytes
//! Weights once for every 32 tokens (20 bytes for 32 of Q4_1), records once for every 128 rows: from the L2
//! cache but for the first time. Of 32 channels, 32 rows and 32 tokens a warp's loads take 56 cycles of
//! shared memory or less, and some 270 instructions 68 cycles of four schedulers.

use super::fixed::RECORD_WORDS;
use super::format::{Codes, GROUP, Q4_0, Q4_1, Q8_0};
use super::product::{LinearShape, Target, strands};
use glam::{UVec2, UVec4};
use simt::tensor::mma_i8;
use simt::warp::{self, FULL_MASK, warp_shuffle_idx};
use simt::{Global, GlobalMut, Shared, SharedPlan, async_copy, kernel, thread, unroll};

/// Tokens of a thread block.
pub const PREFILL_TOKENS: u32 = 32;
/// Rows of a thread block.
pub const PREFILL_ROWS: u32 = 128;
/// Threads of a thread block.
pub const PREFILL_THREADS: u32 = 128;
/// Blocks of channels that are under way or in use.
const STAGES: u32 = 4;
/// Groups of rows of a thread block.
const GROUPS: u32 = PREFILL_ROWS / GROUP;
/// Vectors of 16 bytes of a record.
const VECTORS: u32 = RECORD_WORDS / 4;

/// Shared memory of a thread block: [`STAGES`] of each.
#[derive(Clone, Copy)]
struct Ring {
    /// [tokens, 32 words].
    records: Shared<u32>,
    /// [groups, words of a tile].
    codes: Shared<u32>,
    /// [groups, scales of a tile].
    scales: Shared<u16>,
    bytes: u32,
}

const fn ring<F: Codes>() -> Ring {
    let mut plan = SharedPlan::new();
    let records = plan.array(STAGES * PREFILL_TOKENS * RECORD_WORDS);
    let codes = plan.array(STAGES * GROUPS * F::TILE_WORDS);
    let scales = plan.array(STAGES * GROUPS * F::TILE_SCALES);
    Ring { records, codes, scales, bytes: plan.bytes() }
}

/// Shared memory of [`linear_prefill`](fn@linear_prefill).
pub const fn prefill_bytes<F: Codes>() -> u32 {
    ring::<F>().bytes
}

/// A thread's copies: which, of block 0 of the channels, and where they go in stage 0.
#[derive(Clone, Copy)]
struct Copies {
    codes: Global<u32>,
    scales: Global<u16>,
    records: Global<u32>,
    blocks: u32,
    thread: u32,
    of_records: [usize; 2],
    to_records: u32,
    of_codes: [usize; 2],
    of_scales: usize,
}

impl Copies {
    #[simt::device]
    fn new<F: Codes>(
        codes: Global<u32>,
        scales: Global<u16>,
        records: Global<u32>,
        shape: LinearShape,
        first_token: u32,
        first_group: u32,
    ) -> Self {
        let thread = thread::thread_idx_x();
        // Of groups and tokens that are not there the last one again, not written.
        let tile =
            |group: u32| (first_group + group).min(shape.groups() - 1) as usize * shape.blocks as usize;
        let (token, at) = (thread / VECTORS, thread % VECTORS);
        let of_records = [0, 1].map(|i| {
            let token = (first_token + token + PREFILL_THREADS / VECTORS * i).min(shape.tokens - 1);
            token as usize * (shape.blocks * RECORD_WORDS) as usize + (4 * at) as usize
        });
        let vectors = F::TILE_WORDS / 4;
        let of_codes = [0, 1].map(|i| {
            let vector = thread + PREFILL_THREADS * i;
            tile(vector / vectors) * F::TILE_WORDS as usize + (4 * (vector % vectors)) as usize
        });
        let vectors = F::TILE_SCALES / 8;
        let of_scales = tile(thread / vectors) * F::TILE_SCALES as usize + (8 * (thread % vectors)) as usize;
        let to_records = token * RECORD_WORDS + 4 * (at ^ token & 1);
        Copies {
            codes,
            scales,
            records,
            blocks: shape.blocks,
            thread,
            of_records,
            to_records,
            of_codes,
            of_scales,
        }
    }

    /// Starts those of a block of channels, if there is one: a group of their own.
    #[simt::device]
    fn start<F: Codes>(self, ring: Ring, stage: u32, block: u32) {
        if block < self.blocks {
            let to = stage * PREFILL_TOKENS * RECORD_WORDS + self.to_records;
            let from = (block * RECORD_WORDS) as usize;
            ring.records.copy_async(to, self.records, self.of_records[0] + from);
            ring.records.copy_async(to + 4 * PREFILL_THREADS, self.records, self.of_records[1] + from);
            let to = stage * GROUPS * F::TILE_WORDS + 4 * self.thread;
            let from = block as usize * F::TILE_WORDS as usize;
            ring.codes.copy_async(to, self.codes, self.of_codes[0] + from);
            if GROUPS * F::TILE_WORDS / 4 > PREFILL_THREADS {
                ring.codes.copy_async(to + 4 * PREFILL_THREADS, self.codes, self.of_codes[1] + from);
            }
            if self.thread < GROUPS * F::TILE_SCALES / 8 {
                let to = stage * GROUPS * F::TILE_SCALES + 8 * self.thread;
                let from = block as usize * F::TILE_SCALES as usize;
                ring.scales.copy_async(to, self.scales, self.of_scales + from);
            }
        }
        async_copy::commit();
    }
}

/// The blocks of channels in the order in which strands take them.
#[derive(Clone, Copy)]
struct Order {
    strand: u32,
    block: u32,
}

impl Order {
    /// The next one; past the last strand a block that there is not.
    #[simt::device]
    fn next(self, shape: LinearShape, strands: u32) -> Order {
        let block = self.block + strands;
        if block < shape.blocks {
            return Order { block, ..self };
        }
        let strand = self.strand + 1;
        Order { strand, block: if strand < strands { strand } else { shape.blocks } }
    }
}

/// W·v for many tokens. Grid (⌈tokens / 32⌉, ⌈R / 128⌉) of 128 threads, shared memory [`prefill_bytes`];
/// arguments as [`linear`](fn@super::linear).
#[kernel(system = model, instances(Q4_1, Q4_0, Q8_0), max_threads = 128, min_blocks = 3, overlaps)]
pub fn linear_prefill<F: Codes>(
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
    let (first_token, first_group) = (thread::block_idx_x() * PREFILL_TOKENS, thread::block_idx_y() * GROUPS);
    let copies = Copies::new::<F>(codes, scales, records, shape, first_token, first_group);
    let (ring, strand_count) = (ring::<F>(), strands(shape.blocks));
    let mut ahead = Order { strand: 0, block: 0 };
    unroll!(for stage in 0..3 {
        copies.start::<F>(ring, stage as u32, ahead.block);
        ahead = ahead.next(shape, strand_count);
    });

    let mut totals = [[[0f32; 4]; 4]; 2];
    let (mut strand, mut stage) = (0, 0);
    while strand < strand_count {
        let mut sums = [[[0f32; 4]; 4]; 2];
        let mut block = strand;
        while block < shape.blocks {
            // This stage is there for all, and the one before it has been read by all.
            async_copy::wait::<2>();
            thread::sync_threads();
            copies.start::<F>(ring, (stage + STAGES - 1) % STAGES, ahead.block);
            ahead = ahead.next(shape, strand_count);

            let mut words = [[0u32; 2]; 4];
            let mut scales = [[0f32; 2]; 4];
            unroll!(for i in 0..4 {
                let tile = stage * GROUPS + 4 * warp + i as u32;
                words[i] = F::shared_operands(ring.codes, tile * F::TILE_WORDS, q, g);
                scales[i] = F::shared_scale(ring.scales, tile * F::TILE_SCALES, g);
            });
            unroll!(for i in 0..4 {
                let of = |token: u32, vector: u32| {
                    (stage * PREFILL_TOKENS + 8 * i as u32 + token) * RECORD_WORDS + 4 * (vector ^ token & 1)
                };
                let first: UVec4 = ring.records.load_vector(of(g, 2 * q));
                let second: UVec2 = ring.records.load_vector(of(g, 2 * q + 1));
                // Every part has the step and the sum: each q reads other banks.
                let of_columns =
                    [0, 1].map(|e| -> UVec2 { ring.records.load_vector(of(2 * q + e, 2 * q + 1) + 2) });
                let step = of_columns.map(|own| f32::from_bits(own.x));
                let u = of_columns.map(|own| f32::from_bits(own.y));
                unroll!(for half in 0..2 {
                    let (upper, lower) = (words[2 * half], words[2 * half + 1]);
                    let a = [upper[0], lower[0], upper[1], lower[1]];
                    let high = mma_i8(a, [first.x, first.y], [0; 4]);
                    let middle = mma_i8(a, [first.z, first.w], [0; 4]);
                    let rest = mma_i8(a, [second.x, second.y], middle.map(|b| b << 7));
                    unroll!(for e in 0..4 {
                        let dot = F::combine(high[e], rest[e]);
                        let scale = scales[2 * half + e / 2];
                        sums[half][i][e] = F::finish(sums[half][i][e], scale, dot, step[e % 2], u[e % 2]);
                    });
                });
            });
            stage = (stage + 1) % STAGES;
            block += strand_count;
        }
        unroll!(for half in 0..2 {
            unroll!(for i in 0..4 {
                unroll!(for e in 0..4 {
                    let (sum, total) = (sums[half][i][e], totals[half][i][e]);
                    totals[half][i][e] = if strand == 0 { sum } else { total + sum };
                });
            });
        });
        strand += 1;
    }
    async_copy::wait::<0>();

    let first_row = (first_group + 4 * warp) * GROUP;
    let target = Target { bias, residual, out, shape };
    unroll!(for half in 0..2 {
        unroll!(for i in 0..4 {
            unroll!(for e in 0..4 {
                let token = first_token + 8 * i as u32 + 2 * q + (e % 2) as u32;
                let row = first_row + g + 8 * (2 * half + e / 2) as u32;
                if token < shape.tokens && row < shape.rows {
                    target.finish(token, row, totals[half][i][e]);
                }
            });
        });
    });
}

/// The words of tokens 2q and 2q + 1 as floats; token g's is `word` of lanes 4g to 4g + 3.
#[simt::device]
pub(super) fn columns(word: u32, q: u32) -> [f32; 2] {
    let of = |token: u32| f32::from_bits(warp_shuffle_idx(FULL_MASK, word, 4 * token, 32));
    [of(2 * q), of(2 * q + 1)]
}
