//! # Mathematics
//! With w_b the mass of block b (relative to the row's final reference), P = Σ w_b over the quantized blocks:
//! - keys: the heaviest blocks until Σ w >= τ·P, between K_min and K_max of them; where what is left is more than
//!   the threshold of rung 1, K_max is raised and the choice made again;
//! - values: blocks in the order of w_b·η_b until Σ w_b·η_b of the rest is at most the tolerance times P.
//!
//! The heaviest are found by a threshold on the masses' bits, halved between the largest and 2^−24 of it [`STEPS`] times, so
//! to 24/2^12 binades, four parts in a thousand. Blocks between the two last thresholds are taken in the order of their
//! index, as long as there is room.
//!
//! The sums of the certificate over what is not promoted, T, unnormalised: see [`RowSums`].
//!
//! # Layout
//! Input: records and annotations of the pass. Output: per row a bitmap of promoted keys and one of promoted values, and the
//! row's sums; per KV head and group of eight rows the list of blocks that any row wants, in the order of the index, the
//! trailing block last.
//!
//! # Bytes
//! 8 a block and query head and 16 a block and KV head are read, from the L2 cache for the most part.
//!
//! # Work split
//! Grid (kv_heads · group, sequences), one block a query row. The one of a KV head's rows that arrives last makes the list.

use super::layout::Annotation;
use super::pass::{Record, StepShape};
use super::policy::Thresholds;
use super::query::LOG2_E_ABOVE;
use crate::attention::{BLOCK_TOKENS, PartialRow, ROWS, last_to_arrive, part_floats};
use glam::UVec4;
use simt::math::{exp2, exp2_nonpositive, fma, max};
use simt::warp::{self, FULL_MASK, warp_shuffle_xor, warp_sum_f32};
use simt::{Global, GlobalMut, Pod, Shared, SharedPlan, Zeroable, bits, kernel, thread, unroll};

/// Threads of a block.
pub const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;
/// Halvings of the range of masses.
pub const STEPS: u32 = 12;
/// The range, in units of an f32's bits.
const RANGE: u32 = 24 << 23;

/// Above what a block's mass may have lost by weights below f32's smallest: 16 tokens of at most 2^15, times 2^−126.5.
const LOST: f32 = f32::from_bits((127 - 106) << 23);

/// Sums over one query row. Masses are relative to the row's final reference.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct RowSums {
    /// Σ_T w.
    pub tail: f32,
    /// Σ_T w (e^Δ − 1).
    pub a1: f32,
    /// Σ_T w (e^Δ − 1) ν.
    pub a2: f32,
    /// Σ_T w (1 − e^−Δ).
    pub a3: f32,
    /// Σ w η over blocks whose values are not promoted. Where the keys are, or may be for another row's sake, times e^Δ: the
    /// weight from the original keys may be that much larger than w.
    pub eta: f32,
    /// The largest Δ in T.
    pub delta: f32,
    /// The largest ν + η of all quantized blocks.
    pub nu: f32,
    /// The largest ε + ζ of all quantized blocks: no key's norm is larger.
    pub kappa: f32,
    /// Σ w of blocks that are promoted in any way: what the corrections subtract.
    pub corrected: f32,
    /// Blocks whose keys are promoted for this row.
    pub keys: u32,
    /// Blocks whose values are.
    pub values: u32,
    /// Whether K_max was raised.
    pub expanded: u32,
}

impl RowSums {
    const VECTORS: usize = size_of::<RowSums>() / 16;

    /// Writes row `row`.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn store(self, rows: GlobalMut<RowSums>, row: usize) {
        let words: [UVec4; Self::VECTORS] = bytemuck::cast(self);
        unroll!(for i in 0..3 {
            rows.cast::<UVec4>().store(row * Self::VECTORS + i, words[i]);
        });
    }

    /// Reads row `row`.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn load(rows: Global<RowSums>, row: usize) -> Self {
        let mut words = [UVec4::ZERO; Self::VECTORS];
        unroll!(for i in 0..3 {
            words[i] = rows.cast::<UVec4>().load(row * Self::VECTORS + i);
        });
        bytemuck::cast(words)
    }
}

/// A block that some row wants from the originals.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct Entry {
    /// Its index in the sequence.
    pub index: u32,
    /// Rows of the group of eight that want its keys in bits 0 to 7, its values in 8 to 15; [`Entry::TRAILING`].
    pub rows: u32,
}

impl Entry {
    /// The block is the trailing one: it has no quantized form.
    pub const TRAILING: u32 = 1 << 31;
}

/// Shared memory of a block, for sequences of up to `max_blocks` blocks.
#[derive(Clone, Copy)]
pub struct SelectLayout {
    /// w, [max_blocks].
    masses: Shared<f32>,
    /// w·η, [max_blocks].
    errors: Shared<f32>,
    /// Sums of the warps, twice, so that one barrier a sum is enough.
    counts: Shared<u32>,
    sums: Shared<f32>,
    last: Shared<u32>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Lays out the shared memory.
pub const fn select_layout(max_blocks: u32) -> SelectLayout {
    let mut plan = SharedPlan::new();
    let masses = plan.array(max_blocks);
    let errors = plan.array(max_blocks);
    let counts = plan.array(2 * WARPS);
    let sums = plan.array(2 * WARPS);
    let last = plan.array(1);
    SelectLayout { masses, errors, counts, sums, last, bytes: plan.bytes() }
}

/// Words of a bitmap over `blocks` blocks.
#[inline(always)]
pub const fn bitmap_words(blocks: u32) -> u32 {
    blocks.div_ceil(32)
}

/// Chooses the blocks of each query row and lists those of each KV head.
///
/// `chosen` [sequences · query heads, 2, bitmap words]; `sums` [sequences · query heads]; `entries`
/// [sequences · kv_heads · row groups, max_blocks + 1]; `entry_counts` and `counters` [sequences · kv_heads · row groups], the
/// counters 0 before and after.
#[kernel(system = certified, max_threads = 512)]
pub fn select(
    records: Global<Record>,
    annotations: Global<Annotation>,
    table: Global<u32>,
    lengths: Global<u32>,
    totals: Global<f32>,
    chosen: GlobalMut<u32>,
    sums: GlobalMut<RowSums>,
    entries: GlobalMut<Entry>,
    entry_counts: GlobalMut<u32>,
    counters: GlobalMut<u32>,
    shape: StepShape,
    thresholds: Thresholds,
    head_dim: u32,
) {
    let (q_head, sequence) = (thread::block_idx_x(), thread::block_idx_y());
    let head = bits::div_u32(q_head, shape.group);
    let in_group = bits::rem_u32(q_head, shape.group);
    let row_group = in_group / ROWS;
    let launch_row = (sequence * shape.kv_heads + head) * shape.row_groups() + row_group;
    let row = (sequence * shape.kv_heads * shape.group + q_head) as usize;
    let length = lengths.load(sequence as usize);
    let blocks = length / BLOCK_TOKENS;
    let layout = select_layout(shape.max_blocks);
    let thread = thread::thread_idx_x();
    let at = launch_row as usize * part_floats(head_dim) + (ROWS * head_dim + 2 * (in_group & 7)) as usize;
    let total: PartialRow = totals.load_vector(at);

    let mut reduce = Reduce { layout, round: 0 };
    let mut heaviest = 0f32;
    let mut largest_error = 0f32;
    let mut error_sum = 0f32;
    let mut b = thread;
    while b < blocks {
        let record = records.load(row * shape.max_blocks as usize + b as usize);
        let annotation = annotation(annotations, table, shape, sequence, head, b);
        let mass = record.mass * exp2_nonpositive(record.reference() - total.reference);
        let error = mass * annotation.eta;
        layout.masses.store(b, mass);
        layout.errors.store(b, error);
        heaviest = max(heaviest, mass);
        largest_error = max(largest_error, error);
        error_sum += error;
        b += THREADS;
    }
    thread::sync_threads();
    let heaviest = reduce.maximum(heaviest);
    let largest_error = reduce.maximum(largest_error);
    let error_sum = reduce.sum(0, error_sum).1;

    // Keys.
    let wanted = thresholds.coverage * total.sum;
    let mut keys = Choice::EMPTY;
    let mut expanded = 0;
    if wanted > 0.0 || thresholds.min_keys > 0 {
        let limits =
            |most: u32| Limits { wanted, least: thresholds.min_keys.min(blocks), most: most.min(blocks) };
        keys = reduce.choose(layout.masses, blocks, heaviest, limits(thresholds.max_keys));
        let tail = total.sum - keys.sum;
        if tail > thresholds.expand_tail * total.sum && thresholds.expanded_keys > thresholds.max_keys {
            expanded = 1;
            keys = reduce.choose(layout.masses, blocks, heaviest, limits(thresholds.expanded_keys));
        }
    }
    // Values.
    let mut values = Choice::EMPTY;
    let allowed = thresholds.value_tolerance * total.sum;
    if error_sum > allowed && thresholds.max_values > 0 {
        let limits =
            Limits { wanted: error_sum - allowed, least: 0, most: thresholds.max_values.min(blocks) };
        values = reduce.choose(layout.errors, blocks, largest_error, limits);
    }

    // Bitmaps: a warp's ballot is a word.
    let words = bitmap_words(shape.max_blocks);
    let bitmap = row * 2 * words as usize;
    let mut key_rank = Rank { choice: keys, taken: 0 };
    let mut value_rank = Rank { choice: values, taken: 0 };
    let mut own = Own::new();
    let rounds = blocks.div_ceil(THREADS);
    for round in 0..rounds {
        let b = round * THREADS + thread;
        let inside = b < blocks;
        let mass = if inside { layout.masses.load(b) } else { 0.0 };
        let error = if inside { layout.errors.load(b) } else { 0.0 };
        let key = reduce.take(&mut key_rank, mass, inside);
        let value = reduce.take(&mut value_rank, error, inside);
        let key_word = warp::warp_vote_ballot(FULL_MASK, key);
        let value_word = warp::warp_vote_ballot(FULL_MASK, value);
        if warp::lane_id() == 0 && b < blocks {
            chosen.store(bitmap + (b / 32) as usize, key_word);
            chosen.store(bitmap + (words + b / 32) as usize, value_word);
        }
        if inside {
            let record = records.load(row * shape.max_blocks as usize + b as usize);
            let annotation = annotation(annotations, table, shape, sequence, head, b);
            let exact_weight = key || thresholds.per_group != 0;
            own.add(mass, error, [key, value, exact_weight], record.delta(), annotation);
        }
    }
    let row_sums = RowSums {
        tail: reduce.sum(0, own.tail).1,
        a1: reduce.sum(0, own.a1).1,
        a2: reduce.sum(0, own.a2).1,
        a3: reduce.sum(0, own.a3).1,
        eta: reduce.sum(0, own.eta).1,
        corrected: reduce.sum(0, own.corrected).1,
        delta: reduce.maximum(own.delta),
        nu: reduce.maximum(own.nu),
        kappa: reduce.maximum(own.kappa),
        keys: reduce.sum(own.keys, 0.0).0,
        values: reduce.sum(own.values, 0.0).0,
        expanded,
    };
    if thread == 0 {
        row_sums.store(sums, row);
    }

    let rows = (shape.group - row_group * ROWS).min(ROWS);
    if !last_to_arrive(counters, launch_row, rows, layout.last) {
        return;
    }
    let first_row = row - (in_group & 7) as usize;
    let list = launch_row as usize * (shape.max_blocks as usize + 1);
    let all = 0xff >> (ROWS - rows);
    let mut count = 0;
    for round in 0..bitmap_words(blocks).div_ceil(THREADS) {
        let word = round * THREADS + thread;
        let inside = word < bitmap_words(blocks);
        let map = |r: u32, kind: u32| {
            chosen.load((first_row + r as usize) * 2 * words as usize + (kind * words + word) as usize)
        };
        let mut any = 0u32;
        if inside {
            for r in 0..rows {
                any |= map(r, 0) | map(r, 1);
            }
        }
        let (before, here) = reduce.prefix(any.count_ones());
        let mut place = count + before;
        let mut rest = any;
        while rest != 0 {
            let bit = rest.trailing_zeros();
            rest &= rest - 1;
            let mut wants = 0u32;
            for r in 0..rows {
                wants |= (map(r, 0) >> bit & 1) << r | (map(r, 1) >> bit & 1) << (8 + r);
            }
            if thresholds.per_group != 0 {
                wants = if wants & 0xff != 0 { all } else { 0 } | if wants >> 8 != 0 { all << 8 } else { 0 };
            }
            entries.store(list + place as usize, Entry { index: word * 32 + bit, rows: wants });
            place += 1;
        }
        count += here;
    }
    if thread == 0 {
        if length % BLOCK_TOKENS != 0 {
            let rows = Entry::TRAILING | all | all << 8;
            entries.store(list + count as usize, Entry { index: blocks, rows });
            count += 1;
        }
        entry_counts.store(launch_row as usize, count);
    }
}

#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
fn annotation(
    annotations: Global<Annotation>,
    table: Global<u32>,
    shape: StepShape,
    sequence: u32,
    head: u32,
    index: u32,
) -> Annotation {
    let block = table.load_readonly((sequence * shape.max_blocks + index) as usize);
    annotations.load_vector_readonly((block * shape.kv_heads + head) as usize)
}

/// What a thread adds up over its blocks.
struct Own {
    tail: f32,
    a1: f32,
    a2: f32,
    a3: f32,
    eta: f32,
    corrected: f32,
    delta: f32,
    nu: f32,
    kappa: f32,
    keys: u32,
    values: u32,
}

impl Own {
    #[inline(always)]
    fn new() -> Self {
        Own {
            tail: 0.0,
            a1: 0.0,
            a2: 0.0,
            a3: 0.0,
            eta: 0.0,
            corrected: 0.0,
            delta: 0.0,
            nu: 0.0,
            kappa: 0.0,
            keys: 0,
            values: 0,
        }
    }

    /// Takes a block in: whether its keys and values are promoted, and whether its weights may come from the original keys.
    #[inline(always)]
    fn add(
        &mut self,
        mass: f32,
        error: f32,
        [key, value, exact_weight]: [bool; 3],
        delta: f32,
        annotation: Annotation,
    ) {
        // At least e^Δ; past e^80 no bound is left.
        let grown = exp2(if delta > 80.0 { 128.0 } else { delta * LOG2_E_ABOVE });
        if !key {
            // Weights that are nothing in f32 may be something by e^Δ.
            let mass = mass + LOST;
            // e^Δ − 1 with the rounding of the exponential on the safe side.
            let up = fma(grown, 1.0 / 2_097_152.0, grown - 1.0);
            // 1 − e^−Δ <= (e^Δ − 1)/e^Δ.
            let down = if delta > 80.0 { 1.0 } else { up / grown };
            self.tail += mass;
            self.a1 = fma(mass, up, self.a1);
            self.a2 = fma(mass * up, annotation.nu, self.a2);
            self.a3 = fma(mass, down, self.a3);
            self.delta = max(self.delta, delta);
        }
        if !value {
            self.eta += if exact_weight { fma(LOST, annotation.eta, error) * grown } else { error };
        }
        if key || value {
            self.corrected += mass;
        }
        self.nu = max(self.nu, annotation.nu + annotation.eta);
        self.kappa = max(self.kappa, annotation.eps + annotation.zeta);
        self.keys += key as u32;
        self.values += value as u32;
    }
}

/// What is wanted of a choice.
#[derive(Clone, Copy)]
struct Limits {
    /// Its sum, at least, if `most` allows it.
    wanted: f32,
    least: u32,
    most: u32,
}

/// A choice: everything from `sure` up, and from `maybe` up as long as there is room.
#[derive(Clone, Copy)]
struct Choice {
    sure: u32,
    maybe: u32,
    /// How many of those between the two.
    room: u32,
    /// Sum of all chosen, but for those between, of which it counts the smallest value.
    sum: f32,
}

impl Choice {
    const EMPTY: Choice = Choice { sure: u32::MAX, maybe: u32::MAX, room: 0, sum: 0.0 };
}

/// How far the choice of undecided blocks has come.
struct Rank {
    choice: Choice,
    taken: u32,
}

/// Sums over the block's threads, the same bits in every thread.
struct Reduce {
    layout: SelectLayout,
    round: u32,
}

impl Reduce {
    /// Sum of a count and of a float.
    #[inline(always)]
    fn sum(&mut self, count: u32, value: f32) -> (u32, f32) {
        let base = (self.round & 1) * WARPS;
        self.round += 1;
        let (count, value) = (warp::warp_reduce_add_u32(FULL_MASK, count), warp_sum_f32(value));
        if warp::lane_id() == 0 {
            self.layout.counts.store(base + thread::thread_idx_x() / 32, count);
            self.layout.sums.store(base + thread::thread_idx_x() / 32, value);
        }
        thread::sync_threads();
        let mut total = (0u32, 0f32);
        unroll!(for w in 0..16 {
            total.0 += self.layout.counts.load(base + w as u32);
            total.1 += self.layout.sums.load(base + w as u32);
        });
        total
    }

    #[inline(always)]
    fn maximum(&mut self, value: f32) -> f32 {
        let base = (self.round & 1) * WARPS;
        self.round += 1;
        let mut most = value;
        unroll!(for i in 0..5 {
            most = max(most, warp_shuffle_xor(FULL_MASK, most, 1 << i, 32));
        });
        if warp::lane_id() == 0 {
            self.layout.sums.store(base + thread::thread_idx_x() / 32, most);
        }
        thread::sync_threads();
        unroll!(for w in 0..16 {
            most = max(most, self.layout.sums.load(base + w as u32));
        });
        most
    }

    /// Sum of the counts of the threads before this one, and of all.
    #[inline(always)]
    fn prefix(&mut self, count: u32) -> (u32, u32) {
        let base = (self.round & 1) * WARPS;
        self.round += 1;
        let lane = warp::lane_id();
        let mut before = count;
        unroll!(for i in 0..5 {
            let other = warp::warp_shuffle_up(FULL_MASK, before, 1 << i, 32);
            before += if lane >= 1 << i { other } else { 0 };
        });
        if lane == 31 {
            self.layout.counts.store(base + thread::thread_idx_x() / 32, before);
        }
        thread::sync_threads();
        let mut all = 0;
        let mut warps_before = 0;
        unroll!(for w in 0..16 {
            let part = self.layout.counts.load(base + w as u32);
            warps_before += if (w as u32) < thread::thread_idx_x() / 32 { part } else { 0 };
            all += part;
        });
        (warps_before + before - count, all)
    }

    /// The largest of `values` that make `limits`.
    #[inline(always)]
    fn choose(&mut self, values: Shared<f32>, blocks: u32, largest: f32, limits: Limits) -> Choice {
        if limits.most == 0 || largest <= 0.0 {
            return Choice::EMPTY;
        }
        let top = largest.to_bits();
        // Nothing is at or above `high`, or too little; everything that counts is above `low`.
        let (mut high, mut low) = (top + 1, top.saturating_sub(RANGE));
        let (mut taken, mut taken_sum) = (0u32, 0f32);
        // [`STEPS`] times; counted by the range, so that the compiler does not unroll it.
        while high - low > RANGE >> STEPS {
            let middle = low + (high - low) / 2;
            let (mut count, mut sum) = (0u32, 0f32);
            let mut b = thread::thread_idx_x();
            while b < blocks {
                let value = values.load(b);
                let in_it = value.to_bits() >= middle;
                count += in_it as u32;
                sum += if in_it { value } else { 0.0 };
                b += THREADS;
            }
            let (count, sum) = self.sum(count, sum);
            let enough = (sum >= limits.wanted && count >= limits.least) || count > limits.most;
            if enough {
                low = middle;
            } else {
                high = middle;
                (taken, taken_sum) = (count, sum);
            }
        }
        // Of those between the thresholds as many as are missing, each at least `low` heavy.
        let weight = f32::from_bits(low);
        let missing = max(limits.wanted - taken_sum, 0.0) / weight;
        let missing = if missing < 1.0e9 { missing as u32 + 1 } else { 1_000_000_000 };
        let missing = missing.max(limits.least.saturating_sub(taken));
        let room = missing.min(limits.most - taken);
        Choice { sure: high, maybe: low, room, sum: fma(room as f32, weight, taken_sum) }
    }

    /// Whether this thread's block is in the choice; all threads ask, in the order of the blocks.
    #[inline(always)]
    fn take(&mut self, rank: &mut Rank, value: f32, inside: bool) -> bool {
        let bits = value.to_bits();
        let sure = inside && bits >= rank.choice.sure;
        let maybe = inside && bits >= rank.choice.maybe && !sure;
        let (before, here) = self.prefix(maybe as u32);
        let taken = maybe && rank.taken + before < rank.choice.room;
        rank.taken += here;
        sure || taken
    }
}
