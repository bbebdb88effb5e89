//! # Mathematics
//! With w_b the mass of block b (relative to the row's final reference), P = Σ w_b over the quantized blocks:
//! - keys: the heaviest blocks until Σ w >= τ·P, between K_min and K_max of them; where what is left is more than
//!   the threshold of rung 1, K_max is raised and the choice made again;
//! - values: blocks in the order of w_b·η_b until Σ w_b·η_b of the rest is at most the tolerance times ν·P.
//!
//! The heaviest are found by a histogram of the masses' bits, sixteen bins an octave: see [`choice`](super::choice). Blocks of
//! the last bin, which differ by 1/16 at most, are taken in the order of their index as long as there is room.
//!
//! The sums of the certificate over what is not promoted, T, unnormalised: see [`RowSums`]. They are taken over all blocks, a
//! hair too large, while the records are read; what is promoted, little, is then taken out.
//!
//! # Layout
//! Input: records of the pass. Output: per row a bitmap of promoted keys and one of promoted values, and the
//! row's sums; per KV head and group of eight rows the list of blocks that any row wants, in the order of the index, the
//! trailing block last.
//!
//! # Bytes
//! 16 a block and query head, from the L2 cache for the most part.
//!
//! # Work split
//! Grid (kv_heads · group, sequences), one block a query row. The one of a KV head's rows that arrives last makes the list.

use super::choice::{Choice, Limits, Reduce, select_layout};
use super::pass::{Record, StepShape};
use super::policy::Thresholds;
use super::query::LOG2_E_ABOVE;
use crate::attention::{BLOCK_TOKENS, PartialRow, ROWS, last_to_arrive, part_floats};
use glam::UVec4;
use simt::math::{exp2, exp2_nonpositive, fma, max};
use simt::warp::{self, FULL_MASK};
use simt::{Global, GlobalMut, Pod, Zeroable, bits, kernel, thread, unroll};

pub use super::choice::THREADS;

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
    /// The largest Δ of all quantized blocks.
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
#[kernel(system = certified, max_threads = 512, min_blocks = 2)]
pub fn select(
    records: Global<Record>,
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
    let at = launch_row as usize * part_floats(head_dim) + (ROWS * head_dim + 2 * (in_group & 7)) as usize;
    let total: PartialRow = totals.load_vector(at);
    let records = Records { records, first: row * shape.max_blocks as usize, blocks };

    let mut reduce = Reduce::new(layout);
    let mut extent = Extent { heaviest: 0.0, largest_error: 0.0, error_sum: 0.0 };
    let per_group = thresholds.per_group != 0;
    let mut own = Own::new();
    records.each(thread::thread_idx_x(), THREADS, |b, record| {
        let mass = record.mass * exp2_nonpositive(record.reference() - total.reference);
        let error = mass * record.eta();
        layout.masses.store(b, mass);
        layout.errors.store(b, error);
        extent.heaviest = max(extent.heaviest, mass);
        extent.largest_error = max(extent.largest_error, error);
        extent.error_sum += error;
        own.add(mass, error, per_group, record);
    });
    let [heaviest, largest_error, nu] = reduce.maxima([extent.heaviest, extent.largest_error, own.sums.nu]);
    let error_sum = reduce.sum(extent.error_sum);

    // Keys.
    let wanted = thresholds.coverage * total.sum;
    let mut keys = Choice::NONE;
    let mut expanded = 0;
    if thresholds.max_keys > 0 && (wanted > 0.0 || thresholds.min_keys > 0) {
        let ranked = reduce.rank(layout.masses, blocks, heaviest);
        let limits =
            |most: u32| Limits { wanted, least: thresholds.min_keys.min(blocks), most: most.min(blocks) };
        keys = reduce.choose(&ranked, limits(thresholds.max_keys));
        let tail = total.sum - keys.sum;
        if tail > thresholds.expand_tail * total.sum && thresholds.expanded_keys > thresholds.max_keys {
            expanded = 1;
            keys = reduce.choose(&ranked, limits(thresholds.expanded_keys));
        }
    }
    // Values.
    let mut values = Choice::NONE;
    let allowed = thresholds.value_tolerance * nu * total.sum;
    if error_sum > allowed && thresholds.max_values > 0 {
        let limits =
            Limits { wanted: error_sum - allowed, least: 0, most: thresholds.max_values.min(blocks) };
        let ranked = reduce.rank(layout.errors, blocks, largest_error);
        values = reduce.choose(&ranked, limits);
    }

    // Each warp has a run of whole words of the bitmaps; how many undecided blocks come before it tells who still has room.
    let words = bitmap_words(shape.max_blocks);
    let run = bitmap_words(blocks).div_ceil(THREADS / 32);
    let first_word = thread::thread_idx_x() / 32 * run;
    let end_word = (first_word + run).min(bitmap_words(blocks));
    let lane = warp::lane_id();
    let value_at = |from: simt::Shared<f32>, b: u32| if b < blocks { from.load(b) } else { 0.0 };
    let mut undecided = [0u32; 2];
    for word in first_word..end_word {
        let b = 32 * word + lane;
        let both =
            [keys.is_undecided(value_at(layout.masses, b)), values.is_undecided(value_at(layout.errors, b))];
        undecided[0] += warp::warp_vote_ballot(FULL_MASK, b < blocks && both[0]).count_ones();
        undecided[1] += warp::warp_vote_ballot(FULL_MASK, b < blocks && both[1]).count_ones();
    }
    let mut before = reduce.before_this_warp(undecided);
    let bitmap = row * 2 * words as usize;
    for word in first_word..end_word {
        let b = 32 * word + lane;
        let inside = b < blocks;
        let (mass, error) = (value_at(layout.masses, b), value_at(layout.errors, b));
        let (key, key_word) = keys.take(mass, inside, lane, &mut before[0]);
        let (value, value_word) = values.take(error, inside, lane, &mut before[1]);
        if lane == 0 {
            chosen.store(bitmap + word as usize, key_word);
            chosen.store(bitmap + (words + word) as usize, value_word);
        }
        if key || value {
            own.promote(mass, error, [key, value], per_group, records.load(b));
        }
    }
    reduce.store_row(own.words(), expanded, sums, row);

    let rows = (shape.group - row_group * ROWS).min(ROWS);
    if !last_to_arrive(counters, launch_row, rows, layout.last) {
        return;
    }
    let first_row = row - (in_group & 7) as usize;
    let list = launch_row as usize * (shape.max_blocks as usize + 1);
    let all = 0xff >> (ROWS - rows);
    let mut count = 0;
    for round in 0..bitmap_words(blocks).div_ceil(THREADS) {
        let word = round * THREADS + thread::thread_idx_x();
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
    if thread::thread_idx_x() == 0 {
        if !length.is_multiple_of(BLOCK_TOKENS) {
            let rows = Entry::TRAILING | all | all << 8;
            entries.store(list + count as usize, Entry { index: blocks, rows });
            count += 1;
        }
        entry_counts.store(launch_row as usize, count);
    }
}

/// The largest mass, the largest error and the sum of errors.
struct Extent {
    heaviest: f32,
    largest_error: f32,
    error_sum: f32,
}

/// A row's records.
#[derive(Clone, Copy)]
struct Records {
    records: Global<Record>,
    first: usize,
    blocks: u32,
}

impl Records {
    /// Record `b`, or the last one past the end. There is one at least.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn load(self, b: u32) -> Record {
        self.records.load(self.first + b.min(self.blocks - 1) as usize)
    }

    /// Calls `visit` with every `stride`th block from `first` on, four loads under way.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn each(self, first: u32, stride: u32, mut visit: impl FnMut(u32, Record)) {
        let mut b = first;
        while b < self.blocks {
            let four = [0, 1, 2, 3].map(|i| self.load(b + i * stride));
            unroll!(for i in 0..4 {
                if b + i as u32 * stride < self.blocks {
                    visit(b + i as u32 * stride, four[i]);
                }
            });
            b += 4 * stride;
        }
    }
}

/// What a thread adds up over its blocks: sums, maxima, counts, in the order of [`RowSums`].
struct Own {
    sums: RowSums,
}

impl Own {
    #[inline(always)]
    fn new() -> Self {
        Own { sums: RowSums::zeroed() }
    }

    #[inline(always)]
    fn words(self) -> [u32; 12] {
        bytemuck::cast(self.sums)
    }

    /// Takes a block in, as if nothing of it were promoted.
    #[inline(always)]
    fn add(&mut self, mass: f32, error: f32, per_group: bool, record: Record) {
        let share = Share::of(mass, error, record);
        let own = &mut self.sums;
        own.tail = fma(share.mass, SLACK, own.tail);
        own.a1 = fma(share.a1, SLACK, own.a1);
        own.a2 = fma(share.a2, SLACK, own.a2);
        own.a3 = fma(share.a3, SLACK, own.a3);
        own.eta = fma(if per_group { share.exact_error } else { error }, SLACK, own.eta);
        own.delta = max(own.delta, record.delta());
        own.nu = max(own.nu, record.nu + record.eta());
        own.kappa = max(own.kappa, record.kappa());
    }

    /// Takes out what a promoted block has no part in.
    #[inline(always)]
    fn promote(&mut self, mass: f32, error: f32, [key, value]: [bool; 2], per_group: bool, record: Record) {
        let share = Share::of(mass, error, record);
        let own = &mut self.sums;
        if key {
            own.tail -= share.mass;
            own.a1 -= share.a1;
            own.a2 -= share.a2;
            own.a3 -= share.a3;
        }
        if value {
            own.eta -= if per_group { share.exact_error } else { error };
        } else if !per_group {
            // Its weights come from the original keys now.
            own.eta = fma(share.exact_error - error, SLACK, own.eta);
        }
        own.corrected += mass;
        own.keys += key as u32;
        own.values += value as u32;
    }
}

/// What is taken in counts for so much more than what is taken out: 512 roundings of the sum of all. An addend passes at most
/// 55 additions of its thread, 55 subtractions and 20 additions over the threads, and what passes them is at most twice the
/// sum of all.
const SLACK: f32 = 1.0 + 1.0 / 32768.0;

/// A block's part of the sums. Computed twice, with the same bits.
struct Share {
    /// With what may have been lost.
    mass: f32,
    a1: f32,
    a2: f32,
    a3: f32,
    /// w·η if the weights come from the original keys: times e^Δ.
    exact_error: f32,
}

impl Share {
    #[inline(always)]
    fn of(mass: f32, error: f32, record: Record) -> Self {
        let (delta, eta) = (record.delta(), record.eta());
        // At least e^Δ; past e^80 no bound is left.
        let grown = exp2(if delta > 80.0 { 128.0 } else { delta * LOG2_E_ABOVE });
        // Weights that are nothing in f32 may be something by e^Δ.
        let mass = mass + LOST;
        // e^Δ − 1 with the rounding of the exponential on the safe side.
        let up = fma(grown, 1.0 / 2_097_152.0, grown - 1.0);
        // 1 − e^−Δ <= (e^Δ − 1)/e^Δ.
        let down = if delta > 80.0 { 1.0 } else { up / grown };
        Share {
            mass,
            a1: mass * up,
            a2: mass * up * record.nu,
            a3: mass * down,
            exact_error: fma(LOST, eta, error) * grown,
        }
    }
}
