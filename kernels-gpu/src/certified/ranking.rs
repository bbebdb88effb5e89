//! # Mathematics
//! Do the original keys say what the quantized ones said of the heaviest blocks? With w_b a promoted block's
//! mass by quantized keys, m_b by original ones, both relative to the row's reference, and r the depth:
//!
//! ```text
//! (17)  the r heaviest promoted blocks by w are those by m, in the same order
//! (18)  no block of quantized keys has w_b e^Δ_b > m_(r), the r-th largest m: it might be among them
//! ```
//!
//! Where neither fails, the r heaviest blocks of the head by its exact keys are those that the selection put
//! first. Δ_b is the block's own; with the paper's bound the largest of the head, as there. With fewer than r
//! promoted blocks m_(r) is 0.
//!
//! # Layout
//! `masses` as `audit` leaves them; `flags` [sequences, query heads] of [`reason`].
//!
//! # Bytes
//! Read: 16 a block and query head, 40 a listed block, from the L2 cache for the most part.
//!
//! # Work split
//! Grid (query heads, sequences), a block of 256 threads for a query head.

use super::lists::{STARTS, lay_out_lists};
use super::marking::{Entry, ListHead};
use super::parts::MAX_BLOCKS;
use super::pass::{Record, StepShape};
use super::policy::{Thresholds, Watch, reason};
use super::query::LOG2_E_ABOVE;
use super::sums::weights;
use super::weighing::Weighed;
use crate::attention::{BLOCK_TOKENS, ROWS};
use simt::math::exp2;
use simt::{Global, GlobalMut, Shared, SharedPlan, bits, kernel, thread, unroll, warp};

/// Threads of a block.
pub const THREADS: u32 = 256;
/// The largest depth.
pub const MAX_DEPTH: u32 = 16;

/// Shared memory of a block.
#[derive(Clone, Copy)]
pub struct RankLayout {
    /// A bit for each block whose keys are promoted.
    promoted: Shared<u32>,
    starts: Shared<u32>,
    /// The heaviest by quantized and by original keys, for each rank; then the heaviest that is not promoted.
    best: Shared<u64>,
    /// The shared memory's size.
    pub bytes: u32,
}

/// Lays out the shared memory.
pub const fn rank_layout() -> RankLayout {
    let mut plan = SharedPlan::new();
    let promoted = plan.array(MAX_BLOCKS / 32);
    let starts = plan.array(STARTS);
    let best = plan.array(2 * MAX_DEPTH + 1);
    RankLayout { promoted, starts, best, bytes: plan.bytes() }
}

/// Masses order like their bits; of equal ones the first block comes first. 0 is no block.
#[inline(always)]
pub fn key(mass: f32, block: u32) -> u64 {
    (mass.to_bits() as u64) << 32 | !block as u64
}

/// Checks the order of each query head's heaviest blocks.
#[kernel(system = certified, max_threads = 256, min_blocks = 3, overlaps = in_turn)]
pub fn rank(
    records: Global<Record>,
    weighed: Global<Weighed>,
    lengths: Global<u32>,
    lists: Global<ListHead>,
    entries: Global<Entry>,
    masses: Global<f32>,
    flags: GlobalMut<u32>,
    shape: StepShape,
    thresholds: Thresholds,
    watch: Watch,
) {
    let (q_head, sequence) = (thread::block_idx_x(), thread::block_idx_y());
    let (t, lane) = (thread::thread_idx_x(), warp::lane_id());
    let head = bits::div_u32(q_head, shape.group);
    let in_group = bits::rem_u32(q_head, shape.group);
    let launch_row = (sequence * shape.kv_heads + head) * shape.row_groups() + in_group / ROWS;
    let r = in_group % ROWS;
    let row = sequence * shape.kv_heads * shape.group + q_head;
    let blocks = lengths.load(sequence as usize) / BLOCK_TOKENS;
    let layout = rank_layout();
    let mut word = t;
    while word < blocks.div_ceil(32) {
        layout.promoted.store(word, 0);
        word += THREADS;
    }
    if t <= 2 * MAX_DEPTH {
        layout.best.store(t, 0);
    }
    // And a barrier.
    lay_out_lists(layout.starts, lists, launch_row, shape, lane, t / 32);
    let of_row = Weighed::load(weighed, row as usize);
    let reference = of_row.choice.reference;
    let record = |block: u32| records.load(shape.record(row, block));

    // What comes after the last rank's, by quantized and by original keys.
    let mut below = [u64::MAX; 2];
    let (mut disagrees, mut least) = (false, 0f32);
    for rank in 0..watch.depth.min(MAX_DEPTH) {
        let mut best = [0u64; 2];
        for part in 0..shape.parts {
            let count = layout.starts.load(part + 1) - layout.starts.load(part);
            let list = (launch_row * shape.parts + part) as usize * shape.places() as usize;
            let mut e = t;
            while e < count {
                let place = list + e as usize;
                let entry = entries.load(place);
                if entry.row_wants(r)[0] {
                    let quantized = weights(record(entry.index), reference).0;
                    let exact = masses.load(place * ROWS as usize + r as usize);
                    let keys = [key(quantized, entry.index), key(exact, entry.index)];
                    unroll!(for kind in 0..2 {
                        if keys[kind] < below[kind] && keys[kind] > best[kind] {
                            best[kind] = keys[kind];
                        }
                    });
                    if rank == 0 {
                        layout.promoted.atomic_or(entry.index / 32, 1 << (entry.index % 32));
                    }
                }
                e += THREADS;
            }
        }
        unroll!(for kind in 0..2 {
            if best[kind] != 0 {
                layout.best.atomic_max(2 * rank + kind as u32, best[kind]);
            }
        });
        thread::sync_threads();
        below = [0, 1].map(|kind| layout.best.load(2 * rank + kind));
        disagrees |= below[0] as u32 != below[1] as u32;
        least = f32::from_bits((below[1] >> 32) as u32);
    }
    // What is not promoted.
    let mut tail = 0f32;
    let mut block = t;
    while block < blocks {
        if layout.promoted.load(block / 32) >> (block % 32) & 1 == 0 {
            let record = record(block);
            let delta = if thresholds.paper_bound != 0 { of_row.sums.delta } else { record.delta() };
            let most = weights(record, reference).0 * exp2(delta * LOG2_E_ABOVE);
            // What is not a number is more than any.
            tail = if most <= tail { tail } else { most };
        }
        block += THREADS;
    }
    if tail != 0.0 {
        layout.best.atomic_max(2 * MAX_DEPTH, tail.to_bits() as u64);
    }
    thread::sync_threads();
    if t == 0 {
        let tail = layout.best.load(2 * MAX_DEPTH) as u32;
        let mut found = if disagrees { reason::RANKING } else { 0 };
        if tail > least.to_bits() {
            found |= reason::BOUNDARY;
        }
        if found != 0 {
            flags.atomic_or(row as usize, found);
        }
    }
}
