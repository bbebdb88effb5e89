//! Which rows a thread block is for.

use simt::{bits, thread};

/// The place of a thread block in a grid of \[splits, kv_heads · row groups, sequences\]. Blocks that differ
/// in the split alone are a *row of blocks*: each computes a part of a sequence for the same query rows of
/// one KV head, [eight](super::ROWS) at the most.
#[derive(Clone, Copy)]
pub struct GridPlace {
    /// Which part of the sequence.
    pub split: u32,
    /// Which sequence.
    pub sequence: u32,
    /// Which KV head.
    pub head: u32,
    /// Which eight query rows of the KV head.
    pub row_group: u32,
    /// The number of its row of blocks, which are counted as \[sequences, kv_heads, row groups\].
    pub launch_row: u32,
}

impl GridPlace {
    /// The calling block's, where a KV head has so many row groups.
    #[simt::device]
    pub fn of(row_groups: u32) -> Self {
        let (split, row, sequence) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
        GridPlace {
            split,
            sequence,
            head: bits::div_u32(row, row_groups),
            row_group: bits::rem_u32(row, row_groups),
            launch_row: sequence * thread::grid_dim_y() + row,
        }
    }
}
