//! Plan and run: one decode step of certified attention, all of it on the device.

mod carried;
mod kernels;
mod launches;
mod plan;
mod residents;
mod slices;
mod stages;
mod watching;

pub use crate::attention::StepProblem;
pub use carried::Carried;
pub(super) use carried::Turns;
pub use kernels::{STEP_HEAD_DIMS, StepElement};
pub use plan::StepPlan;

use super::{Annotation, BLOCK_TOKENS, Error, Layout, Policy, Result, TileLayout};
use crate::Buffer;
use kernels_gpu::attention::dense::{few_split_count, split_count};
use kernels_gpu::certified::{Certificate, Scratch, StepShape, parts};
use simt::{Global, GlobalMut};

/// Tokens that a sequence may have at most: as many parts as are added up.
pub const MAX_TOKENS: u32 = BLOCK_TOKENS * parts::MAX_BLOCKS;

/// How the work of a step is cut: the order of its sums follows from it.
pub(super) fn step_shape(problem: StepProblem, policy: &Policy, layout: Layout) -> Result<StepShape> {
    let StepProblem { sequences, q_heads, kv_heads, head_dim, max_tokens } = problem;
    if let Some(what) = policy.problem() {
        return Err(Error::Policy { what });
    }
    if layout == Layout::Paper && policy.carries() {
        return Err(Error::CarriedLayout { renew: policy.renew });
    }
    if !STEP_HEAD_DIMS.contains(&head_dim) {
        return Err(Error::StepHeadDim { head_dim });
    }
    if max_tokens > MAX_TOKENS {
        return Err(Error::TooLong { tokens: max_tokens, most: MAX_TOKENS });
    }
    problem.dense().checked()?;
    let max_blocks = max_tokens.div_ceil(BLOCK_TOKENS);
    let mut shape = StepShape {
        group: q_heads / kv_heads,
        kv_heads,
        max_blocks,
        splits: 1,
        parts: 1,
        replacers: 1,
        softmax_scale: (1.0 / f64::from(head_dim).sqrt()) as f32,
        notes: (policy.certify && !policy.carries()) as u32,
        pool_blocks: 0,
        paced: 0,
        dense_splits: 1,
        rung_splits: 1,
    };
    let launches = sequences * kv_heads * shape.row_groups();
    shape.rung_splits = few_split_count(launches, max_blocks);
    let usual = split_count(launches, max_blocks);
    shape.dense_splits = if launches < FEW_PARTS_A_ROW { usual } else { shape.rung_splits };
    shape.splits = if policy.carries() { carried_splits(policy, launches, max_blocks) } else { usual };
    if policy.carries() {
        shape.replacers = 0;
    } else if policy.certify {
        // As many as are there at once.
        shape.replacers = split_count(launches, max_blocks);
    }
    if policy.promotes() || !policy.carries() && policy.certify {
        shape.parts = parts::part_count(launches, max_blocks);
    }
    Ok(shape)
}

/// Rows of blocks from which on those that are left to the dense rung are cut finer too: with fewer, one row
/// has eight multiprocessors or more, and where all are left to it that costs a tenth and more (measured).
const FEW_PARTS_A_ROW: u32 = 16;

/// Splits that the last thread block of a row merges with little more work than one: a lane each.
const MERGED_AT_ONCE: u32 = 32;

/// Splits of a pass by a carried list. Of short sequences the usual ones leave most multiprocessors idle: a
/// split here has a tile for each of eight warps, which have the list's blocks besides, or for every second
/// one where nothing is promoted (measured: 6 % of a step of 8B sizes at 1K tokens).
fn carried_splits(policy: &Policy, launches: u32, max_blocks: u32) -> u32 {
    let tiles = if policy.promotes() { 8 } else { 4 };
    let fine = max_blocks.div_ceil(tiles).min(MERGED_AT_ONCE);
    // As many as fill the machine, however long the sequences.
    let filling = split_count(launches, u32::MAX);
    split_count(launches, max_blocks).max(fine.min(filling))
}

/// One in so many rows of blocks is passed over again, for which thread blocks are dealt out.
const ROWS_A_ROW_AGAIN: u32 = 8;

/// The shape of the second pass of a step, over few of its rows of blocks: each is cut into more parts.
pub(super) fn again_shape(problem: StepProblem, shape: StepShape) -> StepShape {
    let launches = problem.sequences * problem.kv_heads * shape.row_groups();
    StepShape { splits: split_count(launches.div_ceil(ROWS_A_ROW_AGAIN), shape.max_blocks), ..shape }
}

/// What a step writes.
#[derive(Debug)]
pub struct Attended {
    /// Attention, f32 [sequences, q_heads, head_dim].
    pub output: Buffer<f32>,
    /// Natural log-sum-exp of the weights used, [sequences, q_heads]. Of a head on the dense rung that of the
    /// exact scores.
    pub lse: Buffer<f32>,
    /// What is known of each head, [sequences, q_heads].
    pub certificates: Buffer<Certificate>,
}

impl Attended {
    /// The memory of all three.
    pub fn handles(&mut self) -> AttendedHandles {
        AttendedHandles {
            output: self.output.global_mut(),
            lse: self.lse.global_mut(),
            certificates: self.certificates.global_mut(),
        }
    }
}

/// Where a step writes: the parts of [`Attended`], in memory of any kind that the device reaches.
#[derive(Clone, Copy, Debug)]
pub struct AttendedHandles {
    /// [sequences, q_heads, head_dim].
    pub output: GlobalMut<f32>,
    /// [sequences, q_heads].
    pub lse: GlobalMut<f32>,
    /// [sequences, q_heads].
    pub certificates: GlobalMut<Certificate>,
}

/// What a step reads of the originals, counted in tiles of 16 tokens of a KV head: up to 8 query heads of it
/// are computed together and share what is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OriginalsRead {
    /// Tiles of keys, the trailing blocks among them.
    pub key_tiles: u64,
    /// Tiles of values.
    pub value_tiles: u64,
    /// How many such groups of query heads have one on the dense rung, which reads all of the sequence.
    pub dense_rows: u64,
    /// How many of these were left to the dense rung: their quantized tiles were not read.
    pub exact_rows: u64,
    /// How many were passed over a second time: their quantized tiles were read twice.
    pub again_rows: u64,
}

impl OriginalsRead {
    /// With what another step has read.
    pub fn add(&mut self, other: Self) {
        self.key_tiles += other.key_tiles;
        self.value_tiles += other.value_tiles;
        self.dense_rows += other.dense_rows;
        self.exact_rows += other.exact_rows;
        self.again_rows += other.again_rows;
    }
}

/// What the checks of a step read once more, counted as [`OriginalsRead`] is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Quantized tiles.
    pub quantized_tiles: u64,
    /// Tiles of original keys, in the scratch or not.
    pub key_tiles: u64,
    /// Of original values.
    pub value_tiles: u64,
}

impl Checked {
    /// With what the checks of another group of rows have read.
    pub(super) fn add(&mut self, other: Self) {
        self.quantized_tiles += other.quantized_tiles;
        self.key_tiles += other.key_tiles;
        self.value_tiles += other.value_tiles;
    }

    /// Bytes of all of them, of tiles in this layout.
    pub const fn bytes(self, layout: TileLayout) -> u64 {
        self.quantized_tiles * layout.bytes as u64
            + (self.key_tiles + self.value_tiles) * 2 * layout.elements() as u64
    }
}

/// Where a step finds the cache: memory of any kind that the device reaches.
#[derive(Clone, Copy, Debug)]
pub struct StepHandles<E> {
    /// [sequences, q_heads, head_dim].
    pub queries: Global<E>,
    /// Quantized blocks, [blocks, kv_heads] of tiles in the plan's layout.
    pub tiles: Global<u32>,
    /// Their annotations, [blocks, kv_heads].
    pub annotations: Global<Annotation>,
    /// [sequences, max_blocks].
    pub table: Global<u32>,
    /// \[sequences\], in tokens.
    pub lengths: Global<u32>,
    /// Original keys, [blocks, kv_heads, 16, head_dim].
    pub keys: Global<E>,
    /// Original values.
    pub values: Global<E>,
    /// Originals in the GPU's memory.
    pub near: Near<E>,
}

/// Originals that are in the GPU's memory too: [`kernels_gpu::certified::admit`] says how they lie.
#[derive(Clone, Copy, Debug)]
pub struct Near<E> {
    /// Tiles of [16, head_dim]: slots for keys, slots for values, fresh keys, fresh values.
    pub tiles: GlobalMut<E>,
    /// What the slots hold. Zeros, claims of `u64::MAX` and tags of [`Scratch::EMPTY`] at the start.
    pub directory: GlobalMut<u64>,
    /// How much of each there is.
    pub scratch: Scratch,
}

impl<E: simt::Pod> Near<E> {
    /// Nothing: everything is read from the originals.
    pub fn none() -> Self {
        // SAFETY: they reach no element.
        let (tiles, directory) = unsafe { (GlobalMut::from_raw(0, 0), GlobalMut::from_raw(0, 0)) };
        Near { tiles, directory, scratch: Scratch::NONE }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row that is exact alone has eight multiprocessors at least; where there are few rows, one that
    /// waits has as many as in `dense`.
    #[test]
    fn rows_of_the_dense_rung_have_multiprocessors_enough() {
        for (sequences, kv_heads) in [(1, 1), (1, 3), (1, 8), (1, 15), (2, 8), (8, 3), (8, 8), (64, 8)] {
            let problem = StepProblem {
                sequences,
                q_heads: 4 * kv_heads,
                kv_heads,
                head_dim: 128,
                max_tokens: 131_072,
            };
            let shape = step_shape(problem, &Policy::SOUND, Layout::Compact).unwrap();
            let rows = sequences * kv_heads;
            let usual = split_count(rows, shape.max_blocks);
            assert_eq!(shape.dense_splits, if rows < 16 { usual } else { shape.rung_splits }, "{rows}");
            assert!(shape.rung_splits >= usual && shape.rung_splits * rows <= 4 * 132, "{rows}");
            assert!(shape.rung_splits >= 8 || rows > 66, "{rows}: {}", shape.rung_splits);
        }
    }
}
