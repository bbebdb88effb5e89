//! Decode attention over codes.
//!
//! # Mathematics
//! For query row r, with i and m of [`query`](super::query), L_d = step·(l_d + 1/2) and the scale 1/√D:
//!
//! ```text
//! N_t = Σ_d i_d·l_td                                     an integer
//! f   = m·step·log2(e) / (32512·D)                       c = f·Σ_d i_d / 2
//! s_t = (N_t·f + c)·n_t                                  in log2 units
//! p_t = 2^(s_t − reference)      w_t = p_t·n'_t      a_d = Σ_t w_t·(l'_td + 1/2)
//! o   = step'/√D · S·H·a / Σ_t p_t
//! ```
//!
//! n, l of keys, n', l' of values. Of keys in [parts](super::parts), with m_p, n_p and step_p of part p,
//!
//! ```text
//! N_tp = Σ_d i_d·l_td over the part          f_p = m_p·2·512·step_p·log2(e) / (32512·D)
//! s_t  = (N_t0·f_0 + c_0)·n_t0 + (N_t1·f_1 + c_1)·n_t1 + …
//! ```
//!
//! Of tiles of the [window](super::window), with k, n, v and n' as there:
//!
//! ```text
//! s_t = (Σ_d i_d·k_td · f)·n_t      of keys in parts the sum of that over p      a_d += w_t·v_td
//! ```
//!
//! Sums over parts are by fused multiply-adds. 512 is the [unit](super::parts::UNIT) of n_p, and 2/D as
//! √(D/4)·√D is D/2. The reference suits the weights w, which is what f16 holds of a token: none is above
//! 2^15, and no s_t above reference + 41. Where one would be, the reference is raised to where the largest
//! s_t + ⌈log2 n'_t⌉ of the row's tokens in the tile is 15 above it, or up to 1 less.
//!
//! # Layout
//! `queries` and `output` [sequences, query_tokens, kv_heads · group, D]; `lse` [sequences, query_tokens,
//! kv_heads · group]; `tiles`: the pool [blocks, kv_heads] of [`TileLayout`](super::TileLayout); `table`
//! [sequences, max_blocks]; `lengths` \[sequences\] counts the keys, those of the query tokens included;
//! query token i of n sees `length − (n − 1 − i)` of them. `near` [sequences, kv_heads, slots]: the window,
//! of [`SlotLayout`](super::SlotLayout). Which tiles are read from there depends on the length alone, so
//! that all query tokens read the same.
//!
//! # Bytes
//! D·(k + v)/8 + 4 a token and KV head, read once: at D = 128, 68 for 2 and 2 bits, 100 for 3 and 3, 132 for
//! 4 and 4, and 2 more of keys in parts; dense attention reads 512. Partials as there. A token of the window
//! 4·D + 8, of keys in parts 4·D + 20, and not its codes.
//!
//! # Work split
//! As in [`dense`](crate::attention::dense): grid (splits, kv_heads · row groups, sequences), a block a run
//! of tiles, eight warps with a ring of tiles and an online softmax each; two blocks on a multiprocessor.
//! While its first tiles come warp w turns query row w. The keys of a tile are the second operand of integer
//! products, 32 dimensions and eight tokens each; rows 0 to 7 of the first are the queries' high bytes, rows
//! 8 to 15 the low ones. So N is exact, whatever the order. A part of D/4 dimensions is one product of its
//! own, at D = 64 half empty. Values are the first operand of the other product, 16 dimensions and the tile's
//! tokens, and the weights the second: where a lane has scores is where it gives weights
//! ([`running`](super::running)). They are rounded to f16, by 2^−11 of themselves at most; the sum is of p as
//! it was. Tiles of the window come behind a warp's others, straight from memory: there are few, and the
//! second-level cache is asked for them at the start. Whoever comes last adds the parts and turns the eight
//! rows back, a warp each.

use super::finish::Target;
use super::levels::Tables;
use super::operands::Tile;
use super::query::Rows;
use super::running::Running;
use super::scores::{Keys, Parted, PartedHead, Whole, of_halves};
use super::window::{Slot, Span, operand};
use crate::attention::{
    Adding, BLOCK_TOKENS, GridPlace, MAX_PARTS, PartialRow, Parts, ROWS, Ring, Window, combine,
    combine_to_part, combined_rows, fill, first_blocks, last_to_arrive, part_floats, walk_on, warps,
};
use glam::{UVec4, Vec4};
use half::f16;
use simt::{
    Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, async_copy, bits, kernel, thread, unroll, warp,
};

/// The shape of a launch. All sequences share a pool and have a row of the block table each.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct AttendShape {
    /// Query heads of a KV head.
    pub group: u32,
    /// Query tokens of a sequence; its last keys are those of these tokens.
    pub query_tokens: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Entries of a row of the block table.
    pub max_blocks: u32,
    /// Parts that a sequence is cut into: [`split_count`](crate::attention::split_count).
    pub splits: u32,
    /// step'/√D of the values.
    pub value: f32,
    /// The values' levels.
    pub tables: Tables,
    /// Which tiles are in the window.
    pub window: Window,
}

impl AttendShape {
    /// Query rows of a KV head.
    #[inline(always)]
    pub const fn rows(self) -> u32 {
        self.group * self.query_tokens
    }

    /// Groups of eight query rows of a KV head.
    #[inline(always)]
    pub const fn row_groups(self) -> u32 {
        self.rows().div_ceil(ROWS)
    }
}

/// Stages of a warp's ring: with four tiles under way a multiprocessor waits for 50 KB at 3 bits and D = 128.
const STAGES: u32 = 5;

/// The reference of a row that there is not: nothing is above it.
pub const ABSENT: f32 = 1.0e30;

/// Shared memory of a block.
#[derive(Clone, Copy)]
pub struct Layout {
    /// The warps' rings; afterwards their results.
    ring: Shared<u32>,
    /// The same memory: Σ w·(l' + 1/2) of each warp, [warps, 8, D].
    outputs: Shared<f32>,
    /// The same memory again: where parts are added up.
    adding: Adding,
    /// References and sums, [warps, 8].
    rows: Shared<PartialRow>,
    /// Query rows.
    queries: Rows,
    /// Σ w·(l' + 1/2) of the eight rows, [8, D], and their references and sums.
    finished: Shared<f32>,
    totals: Shared<PartialRow>,
    /// Whether this block came last.
    last: Shared<u32>,
    /// What is wanted behind the loop over codes, where registers are short: the block's first tile, the end
    /// of those read from codes and the end; then the row of the launch, the sequence, the KV head and the
    /// first row of the group; then how many parts are used, and this block's.
    span: Shared<UVec4>,
    /// What each tile of the window needs: how many keys the eight rows see, then the first slot of the
    /// sequence and KV head. Loaded as atomics are, which ptxas does not move out of a loop.
    of_window: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Parts that there is room for at the end.
const AT_ONCE: u32 = 17;

/// Lays out the shared memory of an instance.
pub const fn layout<const D: usize, const K: u32, const V: u32, const PARTED: bool>() -> Layout {
    let mut plan = SharedPlan::new();
    let of_rings = warps(D as u32) * STAGES * Tile::<D, K, V, PARTED>::WORDS;
    let of_outputs = warps(D as u32) * ROWS * D as u32;
    let of_parts = Adding::words::<D>(MAX_PARTS, AT_ONCE);
    let most = if of_rings < of_outputs { of_outputs } else { of_rings };
    let ring = plan.array(if most < of_parts { of_parts } else { most });
    // The results take the rings' place.
    let mut over = SharedPlan::new();
    let outputs = over.array(of_outputs);
    let adding = Adding::over::<D>(&mut SharedPlan::new(), MAX_PARTS, plan.bytes());
    let rows = plan.array(combined_rows(warps(D as u32)));
    let queries = Rows::place::<D>(&mut plan, PARTED);
    let finished = plan.array(ROWS * D as u32);
    let totals = plan.array(ROWS);
    let last = plan.array(1);
    let span = plan.array(3);
    let of_window = plan.array(ROWS + 1);
    Layout {
        ring,
        outputs,
        adding,
        rows,
        queries,
        finished,
        totals,
        last,
        span,
        of_window,
        bytes: plan.bytes(),
    }
}

/// What a step reads and writes: the kernels' arguments.
struct Memory {
    queries: Global<f16>,
    tiles: Global<u32>,
    near: Global<u32>,
    table: Global<u32>,
    lengths: Global<u32>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    lse: GlobalMut<f32>,
}

/// See the [module](self). `K` and `V` are the bits of keys and values. `counters` [sequences, kv_heads · row
/// groups] are 0 before and after.
#[kernel(
    system = gtq,
    instances(
        (64, 2, 2), (64, 2, 3), (64, 2, 4), (64, 3, 2), (64, 3, 3), (64, 3, 4), (64, 4, 2), (64, 4, 3),
        (64, 4, 4), (128, 2, 2), (128, 2, 3), (128, 2, 4), (128, 3, 2), (128, 3, 3), (128, 3, 4),
        (128, 4, 2), (128, 4, 3), (128, 4, 4),
    ),
    max_threads = 256,
    min_blocks = 2,
    overlaps = by_hand
)]
pub fn attend<const D: usize, const K: u32, const V: u32>(
    queries: Global<f16>,
    tiles: Global<u32>,
    near: Global<u32>,
    table: Global<u32>,
    lengths: Global<u32>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    lse: GlobalMut<f32>,
    shape: AttendShape,
    keys: Whole,
) {
    let memory = Memory { queries, tiles, near, table, lengths, partials, counters, output, lse };
    attended::<D, K, V, false, Whole>(memory, shape, |_| keys);
}

/// The same over keys in parts, `K` bits on average. `order` [kv_heads, D]: which channel each dimension is.
#[kernel(
    system = gtq,
    instances(
        (64, 2, 2), (64, 2, 3), (64, 2, 4), (64, 3, 2), (64, 3, 3), (64, 3, 4), (64, 4, 2), (64, 4, 3),
        (64, 4, 4), (128, 2, 2), (128, 2, 3), (128, 2, 4), (128, 3, 2), (128, 3, 3), (128, 3, 4),
        (128, 4, 2), (128, 4, 3), (128, 4, 4),
    ),
    max_threads = 256,
    min_blocks = 2,
    overlaps = by_hand
)]
pub fn attend_parts<const D: usize, const K: u32, const V: u32>(
    queries: Global<f16>,
    tiles: Global<u32>,
    near: Global<u32>,
    table: Global<u32>,
    lengths: Global<u32>,
    order: Global<u8>,
    partials: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    output: GlobalMut<f32>,
    lse: GlobalMut<f32>,
    shape: AttendShape,
    keys: Parted,
) {
    let memory = Memory { queries, tiles, near, table, lengths, partials, counters, output, lse };
    attended::<D, K, V, true, _>(memory, shape, |head| PartedHead { keys, order, head });
}

/// A step, with keys as `keys_of` a KV head has them.
#[simt::device]
fn attended<const D: usize, const K: u32, const V: u32, const PARTED: bool, Y: Keys<D, K, PARTED>>(
    memory: Memory,
    shape: AttendShape,
    keys_of: impl FnOnce(u32) -> Y,
) {
    let Memory { queries, tiles, near, table, lengths, partials, counters, output, lse } = memory;
    let GridPlace { split, sequence, head, row_group, launch_row } = GridPlace::of(shape.row_groups());
    let keys = keys_of(head);
    let (lane, warp) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let ahead = keys.ahead(lane);
    thread::wait_for_previous();
    thread::let_next_start();
    let length = lengths.load(sequence as usize);
    let (own, target) = (row_group * ROWS + warp, Target { shape, sequence, head });
    let mut x = [0f32; 4];
    if own < shape.rows() {
        x = keys.row(ahead, queries, target.row(own), lane);
    }
    let Parts { tiles: all, tiles_a_split, used } = Parts::of(length, shape.splits);
    // A sequence without keys still needs somebody to write its rows.
    if split >= used {
        return;
    }
    let first = split * tiles_a_split;
    let end = (first + tiles_a_split).min(all);
    let coded = shape.window.first_recent(length).min(end);

    let layout = layout::<D, K, V, PARTED>();
    let start = Span { first, coded }.start::<D>(shape.window, warp);
    if thread::thread_idx_x() == 0 {
        let slots = (sequence * shape.kv_heads + head) * shape.window.slots;
        layout.span.store(0, UVec4::new(first, coded, end, 0));
        layout.span.store(1, UVec4::new(launch_row, sequence, head, row_group * ROWS));
        layout.span.store(2, UVec4::new(used, split, 0, 0));
        layout.of_window.store(ROWS, slots);
    }
    let ring = Tiles::<D, K, V, PARTED> {
        layout,
        pool: tiles,
        table,
        shape,
        sequence,
        head,
        warp,
        lane,
        end: coded,
    };
    // The first tiles come while the query rows are turned.
    let blocks = first_blocks(&ring, start);
    fill(&ring, start, blocks);
    let ours = (sequence * shape.kv_heads + head) * shape.window.slots;
    ask_ahead::<D, PARTED>(near, ours, Span { first, coded }, end, (shape.window, warp, lane));
    let row = row_group * ROWS + (lane >> 2);
    let query_token = bits::div_u32(row, shape.group);
    // Keys that this lane's row sees, and tiles of which every row sees all.
    let visible = (length + query_token + 1).saturating_sub(shape.query_tokens);
    let by_all = (length + 1).saturating_sub(shape.query_tokens) / BLOCK_TOKENS;
    if warp == 0 && lane & 3 == 0 {
        layout.of_window.store(lane >> 2, visible);
    }
    keys.turn(layout.queries, x, warp, lane);
    thread::sync_threads();
    let query = keys.load(layout.queries, lane);

    let mut running = Running::new(row < shape.rows());
    walk_on(&ring, start, blocks, |tile, stage| {
        let codes = ring.tile(stage);
        let (record, norms) = (codes.record(lane), codes.norms(lane));
        let mut scores = keys.scores(&record, norms.keys, query);
        let mut of_values = of_halves(norms.values);
        if tile >= by_all {
            unroll!(for t in 0..4 {
                let token = tile * BLOCK_TOKENS + 8 * (t as u32 >> 1) + 2 * (lane & 3) + (t as u32 & 1);
                // What is behind the last token may be anything.
                of_values[t] = if token < visible { of_values[t] } else { 0.0 };
                scores[t] = if token < visible { scores[t] } else { f32::NEG_INFINITY };
            });
        }
        let weights = running.weigh::<D>(scores, of_values, lane);
        unroll!(for t in 0..(D / 16), at_most 8 {
            let Tables { values_low, values_high } = shape.tables;
            let values = Tile::<D, K, V, PARTED>::values(&record, t, values_low, values_high);
            running.accumulate(t, values, weights);
        });
    });

    // Tiles of the window: that at the front, then the recent ones. What tells them apart, but for the warp,
    // is not kept across a round: a tile's operands, on their way together, leave no register for it.
    let of_rounds = || {
        let [first, coded, end, _] = layout.span.load(bits::renewed(0)).to_array();
        (Span { first, coded }, end, bits::div_u32(thread::thread_idx_x(), 32))
    };
    let (span, _, warp) = of_rounds();
    let front = span.first + warp;
    let start = span.start::<D>(shape.window, warp);
    let mut tile = if start == front { span.past::<D>(shape.window, warp) } else { front };
    while tile < of_rounds().1 {
        let slots = layout.of_window.atomic_load(ROWS);
        let lane = bits::renewed(thread::thread_idx_x()) % 32;
        let slot = Slot::<D, PARTED>::at(near, (slots + shape.window.slot(tile)) as usize);
        let mut scores = keys.in_window(slot, query, lane);
        let mut of_values = slot.value_scales(lane);
        let visible = layout.of_window.atomic_load(lane >> 2);
        unroll!(for t in 0..4 {
            let token = tile * BLOCK_TOKENS + 8 * (t as u32 >> 1) + 2 * (lane & 3) + (t as u32 & 1);
            of_values[t] = if token < visible { of_values[t] } else { 0.0 };
            scores[t] = if token < visible { scores[t] } else { f32::NEG_INFINITY };
        });
        let weights = running.weigh::<D>(scores, of_values, lane);
        unroll!(for i in 0..(D / 64), at_most 2 {
            let values = slot.values(i as u32, lane);
            unroll!(for w in 0..4 {
                running.accumulate(4 * i + w, operand(values, w), weights);
            });
        });
        let (span, _, warp) = of_rounds();
        let past = span.past::<D>(shape.window, warp);
        tile = if tile < past { past } else { tile + warps(D as u32) };
    }

    // The warps' results take the rings' place: all copies have landed, all tiles are read.
    async_copy::wait::<0>();
    thread::sync_threads();
    let lane = bits::renewed(thread::thread_idx_x()) % 32;
    running.store_output::<D>(layout.outputs, warp * ROWS * D as u32, lane);
    let sum = running.row_sum();
    if lane & 3 == 0 {
        layout.rows.store(warp * ROWS + (lane >> 2), PartialRow { reference: running.reference, sum });
    }
    thread::sync_threads();

    let [launch_row, sequence, head, first_row] = layout.span.load(1).to_array();
    let [used, split, ..] = layout.span.load(2).to_array();
    let (own, target) = (first_row + warp, Target { shape, sequence, head });
    let floats = part_floats(D as u32);
    let base = launch_row as usize * shape.splits as usize * floats;
    let keep = |r: u32, d: u32, values: [f32; 4], total: PartialRow| {
        layout.finished.store_vector(r * D as u32 + d, Vec4::from_array(values));
        if d == 0 {
            layout.totals.store(r, total);
        }
    };
    if used <= 1 {
        combine::<D>(layout.rows, layout.outputs, |r, d, merged| keep(r, d, merged.values, merged.row));
    } else {
        let part = base + split as usize * floats;
        combine_to_part::<D>(layout.rows, layout.outputs, partials, part);
        if !last_to_arrive(counters, launch_row, used, layout.last) {
            return;
        }
        let rows = (shape.rows() - first_row).min(ROWS);
        let place = |split: u32| base + split as usize * floats;
        layout.adding.parts::<D>(used, rows, partials.as_const(), place, |r, d, merged| {
            keep(r, d, merged.values, merged.row);
        });
    }
    thread::sync_threads();
    if own < shape.rows() {
        target.finish::<D>((layout.finished, layout.totals), output, lse, own, warp, lane);
    }
}

/// Asks the second-level cache for a warp's first two tiles of the window, whose loads wait for each other.
#[simt::device]
fn ask_ahead<const D: usize, const PARTED: bool>(
    near: Global<u32>,
    slots: u32,
    span: Span,
    end: u32,
    (window, warp, lane): (Window, u32, u32),
) {
    if span.coded >= end && span.first >= window.sink {
        return;
    }
    let (front, past) = (span.first + warp, span.past::<D>(window, warp));
    let mut tile = if span.start::<D>(window, warp) == front { past } else { front };
    let mut asked = 0;
    while tile < end && asked < 2 {
        Slot::<D, PARTED>::at(near, (slots + window.slot(tile)) as usize).ask(lane == 0);
        tile = if tile < past { past } else { tile + warps(D as u32) };
        asked += 1;
    }
}

/// A warp's tiles.
struct Tiles<const D: usize, const K: u32, const V: u32, const PARTED: bool> {
    layout: Layout,
    pool: Global<u32>,
    table: Global<u32>,
    shape: AttendShape,
    sequence: u32,
    head: u32,
    warp: u32,
    lane: u32,
    end: u32,
}

impl<const D: usize, const K: u32, const V: u32, const PARTED: bool> Tiles<D, K, V, PARTED> {
    #[inline(always)]
    fn tile(&self, stage: u32) -> Tile<D, K, V, PARTED> {
        Tile::at(self.layout.ring, (self.warp * STAGES + stage) * Tile::<D, K, V, PARTED>::WORDS)
    }
}

impl<const D: usize, const K: u32, const V: u32, const PARTED: bool> Ring for Tiles<D, K, V, PARTED> {
    const STAGES: u32 = STAGES;
    const STRIDE: u32 = warps(D as u32);
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
        let pair = (block * self.shape.kv_heads + self.head) as usize;
        self.tile(stage).copy(self.pool, pair * Tile::<D, K, V, PARTED>::WORDS as usize, self.lane);
    }
}
