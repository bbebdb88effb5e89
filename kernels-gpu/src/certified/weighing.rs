//! # Mathematics
//! What each query row wants from the originals, by what the pass has noted: blocks sorted by mass,
//!
//! ```text
//! w_b = Σ p_t of block b, relative to the row's reference      keys: the heaviest, until Σ w >= τ P
//! e_b = w_b·η_b                                                values: the largest, until Σ rest <= v·ν·P
//! ```
//!
//! and the sums that the certificate is made of (docs/certificate.md, (1c), (1d), (3)), over all blocks as if
//! nothing were promoted.
//!
//! # Layout
//! Parts of a sequence are those of [`Part`]. `histograms` [rows, 2, BINS], of masses and of errors, and
//! `counts` [rows, parts, BINS], the numbers of masses of each bin in the low half and of errors in the high
//! half; `partial_sums` [rows, thread blocks of a row, 12]; `weighed` \[rows\]. A row is a sequence's query
//! head.
//!
//! # Bytes
//! Read: 16 a block and query head, from the L2 cache for the most part. Written: 1 KB a part and row.
//!
//! # Work split
//! Grid (thread blocks of a row, query heads, sequences), each with every so manieth part, four blocks of it
//! a thread at most; the one of a row that arrives last chooses.

use super::carried::Promoted;
use super::choice::{BINS, Bins, Choice, Limits, PART_SHIFT, Reduce, weigh_layout, widened};
use super::parts::Part;
use super::pass::{Record, StepShape, row_total};
use super::policy::Thresholds;
use super::sums::{Own, RowSums, weights};
use crate::attention::{BLOCK_TOKENS, PartialRow, ROWS, last_to_arrive};
use glam::UVec4;
use simt::{Global, GlobalMut, Pod, Zeroable, bits, kernel, thread, unroll, warp};

/// What a row wants, and what the numbers are relative to.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct RowChoice {
    /// By mass.
    pub keys: Choice,
    /// By mass times η.
    pub values: Choice,
    /// The row's reference over all quantized blocks.
    pub reference: f32,
    /// Σ p of them, relative to it.
    pub sum: f32,
    /// η of the first block: the bins of errors start from it.
    pub first_eta: f32,
    #[doc(hidden)]
    pub unused: u32,
}

/// What `weigh` leaves of a row.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct Weighed {
    /// What it wants.
    pub choice: RowChoice,
    /// What its certificate is made of, over all blocks.
    pub sums: RowSums,
}

impl Weighed {
    /// Words of it.
    pub const WORDS: u32 = size_of::<Weighed>() as u32 / 4;
    /// The word that says whether K_max was raised.
    pub(super) const EXPANDED: u32 =
        (core::mem::offset_of!(Weighed, sums) + core::mem::offset_of!(RowSums, expanded)) as u32 / 4;
    const VECTORS: usize = size_of::<Weighed>() / 16;

    /// Writes row `row`.
    #[simt::device]
    pub fn store(self, rows: GlobalMut<Weighed>, row: usize) {
        let words: [UVec4; Self::VECTORS] = bytemuck::cast(self);
        unroll!(for i in 0..5 {
            rows.cast::<UVec4>().store(Self::VECTORS * row + i, words[i]);
        });
    }

    /// Reads row `row`.
    #[simt::device]
    pub fn load(rows: Global<Weighed>, row: usize) -> Self {
        let mut words = [UVec4::ZERO; Self::VECTORS];
        unroll!(for i in 0..5 {
            words[i] = rows.cast::<UVec4>().load(Self::VECTORS * row + i);
        });
        bytemuck::cast(words)
    }
}

/// Whether a block's values are in the choice: its η is more than the tolerated share of its ν. The others
/// together are within what is tolerated.
// What is not a number ranks.
#[allow(clippy::neg_cmp_op_on_partial_ord)]
#[inline(always)]
pub fn ranks_error(record: Record, thresholds: Thresholds) -> bool {
    thresholds.max_values != 0 && !(record.eta() <= thresholds.value_tolerance * record.nu)
}

/// Floats of a part's sums.
pub const PARTIAL_SUMS: u32 = 12;
const _: () = assert!(Own::WORDS <= PARTIAL_SUMS as usize, "a part's sums have room");
const THREADS: u32 = BINS;

/// Weighs the blocks of each query row, and chooses.
///
/// `records` and `partials` as `attend` leaves them, or [`carry`](fn@super::carry), with `promoted` and bits
/// of its `mode`, which is 0 behind `attend`. `histograms` and `counters` \[rows\] are 0 before and after.
#[kernel(system = certified, max_threads = 256, min_blocks = 3, overlaps = in_turn)]
pub fn weigh(
    records: Global<Record>,
    lengths: Global<u32>,
    partials: Global<f32>,
    histograms: GlobalMut<u64>,
    counts: GlobalMut<u32>,
    partial_sums: GlobalMut<f32>,
    weighed: GlobalMut<Weighed>,
    counters: GlobalMut<u32>,
    promoted: Global<Promoted>,
    dense_rows: Global<u32>,
    shape: StepShape,
    thresholds: Thresholds,
    head_dim: u32,
    mode: u32,
) {
    let (q_head, sequence) = (thread::block_idx_y(), thread::block_idx_z());
    let head = bits::div_u32(q_head, shape.group);
    let in_group = bits::rem_u32(q_head, shape.group);
    let launch_row = (sequence * shape.kv_heads + head) * shape.row_groups() + in_group / ROWS;
    let row = sequence * shape.kv_heads * shape.group + q_head;
    // Most often a second pass has nothing to do: all that says so is loaded at once.
    let exact_for = if mode != 0 { Promoted::exact(promoted, launch_row)[0] } else { 0 };
    let passed_over = Promoted::passed_over(promoted, dense_rows, launch_row, mode);
    let blocks = lengths.load(sequence as usize) / BLOCK_TOKENS;
    let mut part = Part { index: thread::block_idx_x(), parts: shape.parts, blocks };
    let used = part.used().min(thread::grid_dim_x());
    // A row that is left to the dense rung has noted nothing.
    if passed_over | (part.index >= used) | (exact_for != 0) {
        return;
    }
    let (t, lane) = (thread::thread_idx_x(), warp::lane_id());
    let layout = weigh_layout();
    unroll!(for i in 0..2 {
        layout.histograms.store(i as u32 * BINS + t, 0);
    });
    let load = |b: u32| if b < blocks { records.load(shape.record(row, b)) } else { Record::zeroed() };
    let first_eta = load(0).eta();
    let total = row_total(partials, launch_row, in_group % ROWS, blocks, shape, head_dim, lane);
    let (of_masses, of_errors) = (Bins::of_masses(), Bins::of_errors(first_eta));
    let mut own = Own::new();
    // This thread's bins, as they were before the part.
    let mut before = [0u32; 2];
    thread::sync_threads();
    while part.index < part.used() {
        // All loads at once.
        let of_place = |t: u32, i: u32| {
            if t + i * THREADS < part.places() { part.block(t + i * THREADS) } else { blocks }
        };
        let found = [0, 1, 2, 3].map(|i| load(of_place(t, i)));
        // To keep four places, or whether they are there, would take more registers than there are.
        let again = bits::renewed(t);
        unroll!(for i in 0..4 {
            if of_place(again, i as u32) < blocks {
                let (mass, error) = weights(found[i], total.reference);
                own.add(mass, error, thresholds.per_group != 0, found[i]);
                if thresholds.max_keys != 0 {
                    layout.histograms.atomic_add(of_masses.bin(mass), of_masses.addend(mass));
                }
                if ranks_error(found[i], thresholds) {
                    layout.histograms.atomic_add(BINS + of_errors.bin(error), of_errors.addend(error));
                }
            }
        });
        thread::sync_threads();
        let now = [0, BINS].map(|kind| layout.histograms.load(kind + t));
        let of_part = [0, 1].map(|kind| now[kind].wrapping_sub(before[kind]));
        let at = (row * part.parts + part.index) * BINS + t;
        counts.store(at as usize, of_part[0] >> PART_SHIFT | (of_part[1] >> PART_SHIFT) << 16);
        unroll!(for kind in 0..2 {
            if of_part[kind] != 0 {
                histograms.atomic_add(((row * 2 + kind as u32) * BINS + t) as usize, widened(of_part[kind]));
            }
        });
        before = now;
        part.index += thread::grid_dim_x();
        // Nobody adds to a bin that another has yet to read.
        thread::sync_threads();
    }
    let mut reduce = Reduce::new(layout);
    reduce.words(own.words(), Own::FIRST_MAXIMUM);
    let sums_at = |block: u32| (row * thread::grid_dim_x() + block) * PARTIAL_SUMS + t;
    if t < Own::WORDS as u32 {
        partial_sums.store(sums_at(thread::block_idx_x()) as usize, f32::from_bits(layout.told.load(t)));
    }
    if !last_to_arrive(counters, row, used, layout.last) {
        return;
    }

    let words = [0, BINS].map(|kind| {
        let at = (row * 2 * BINS + kind + t) as usize;
        let word = histograms.load(at);
        histograms.store(at, 0);
        word
    });
    let partial_sums = partial_sums.as_const();
    if t < Own::WORDS as u32 {
        let mut total = 0f32;
        let mut p = 0;
        while p < used {
            let eight =
                [0, 1, 2, 3, 4, 5, 6, 7].map(|i| partial_sums.load(sums_at((p + i).min(used - 1)) as usize));
            unroll!(for i in 0..8 {
                if p + (i as u32) < used {
                    let more = eight[i];
                    total = if t < Own::FIRST_MAXIMUM { total + more } else { simt::math::max(total, more) };
                }
            });
            p += 8;
        }
        layout.told.store(t, total.to_bits());
    }
    thread::sync_threads();

    // Keys.
    let wanted = thresholds.coverage * total.sum;
    let mut keys = Choice::NONE;
    let mut expanded = 0;
    if thresholds.max_keys > 0 && (wanted > 0.0 || thresholds.min_keys > 0) {
        let ranked = reduce.rank(of_masses, words[0]);
        let limits = |most: u32| Limits {
            wanted,
            least: thresholds.min_keys.min(blocks),
            most: most.min(blocks),
            floor: thresholds.key_floor * total.sum,
        };
        let chosen = reduce.choose(&ranked, limits(thresholds.max_keys));
        keys = chosen.0;
        let tail = total.sum - chosen.1;
        if tail > thresholds.expand_tail * total.sum && thresholds.expanded_keys > thresholds.max_keys {
            expanded = 1;
            keys = reduce.choose(&ranked, limits(thresholds.expanded_keys)).0;
        }
    }
    // Values.
    let mut values = Choice::NONE;
    let [nu, error_sum] = [Own::NU, Own::ERROR].map(|word| f32::from_bits(layout.told.load(word)));
    let allowed = thresholds.value_tolerance * nu * total.sum;
    if error_sum > allowed && thresholds.max_values > 0 {
        let limits = Limits {
            wanted: error_sum - allowed,
            least: 0,
            most: thresholds.max_values.min(blocks),
            floor: thresholds.value_floor * nu * total.sum,
        };
        let ranked = reduce.rank(of_errors, words[1]);
        values = reduce.choose(&ranked, limits).0;
    }
    if t == 0 {
        let mut merged = [0f32; Own::WORDS];
        unroll!(for i in 0..Own::WORDS, at_most 10 {
            merged[i] = f32::from_bits(layout.told.load(i as u32));
        });
        let PartialRow { reference, sum } = total;
        let choice = RowChoice { keys, values, reference, sum, first_eta, unused: 0 };
        Weighed { choice, sums: Own::row(merged, sum, expanded) }.store(weighed, row as usize);
    }
}
