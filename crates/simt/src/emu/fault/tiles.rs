//! Wrong uses of tensor maps.

use core::fmt;

/// A wrong use of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TileMistake {
    /// The element holds no map that the emulator can read.
    NoMap {
        /// The element of the array of maps.
        index: u64,
    },
    /// The thread copies by a map that it has not acquired.
    NotAcquired {
        /// The element of the array of maps.
        index: u64,
    },
    /// A copy with more or fewer coordinates than the map's tensor has dimensions.
    Rank {
        /// The element of the array of maps.
        index: u64,
        /// How many dimensions.
        rank: usize,
        /// How many coordinates.
        coordinates: usize,
    },
    /// A box that begins in the middle of 16 bytes along the innermost dimension: no GPU's copy engine takes
    /// it.
    Corner {
        /// The innermost coordinate.
        coordinate: i32,
        /// How many bytes into a row it is.
        bytes: i64,
    },
    /// A box to be written that begins outside, ahead of the tensor: the same.
    Negative {
        /// Which dimension, 0 the innermost.
        dimension: usize,
        /// The coordinate.
        coordinate: i32,
    },
    /// A copy to the tensor of a map to read by.
    ReadOnly {
        /// The element of the array of maps.
        index: u64,
    },
    /// A box whose place in shared memory is not aligned.
    Place {
        /// The element of the shared array.
        index: u64,
        /// What its offset must be a multiple of.
        align: u32,
        /// How far it is past one.
        off_by: u64,
    },
}

impl fmt::Display for TileMistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TileMistake::NoMap { index } => write!(
                f,
                "global element {index} holds no tensor map that the emulator can read: make it by \
                 `Buffer::tensor_map` on the device that launches, or by `emu::tensor_map`"
            ),
            TileMistake::NotAcquired { index } => write!(
                f,
                "a copy by the tensor map in global element {index}, which this thread has not acquired: `acquire` \
                 it ahead of the first copy"
            ),
            TileMistake::Rank { index, rank, coordinates } => write!(
                f,
                "{coordinates} coordinates for the tensor map in global element {index}, whose tensor has {rank} \
                 dimensions"
            ),
            TileMistake::Corner { coordinate, bytes } => write!(
                f,
                "a box at innermost coordinate {coordinate}, which is {bytes} bytes into a row: a multiple of 16 is \
                 needed"
            ),
            TileMistake::Negative { dimension, coordinate } => write!(
                f,
                "a box to be written at coordinate {coordinate} of dimension {dimension}: it may end outside of the \
                 tensor, and not begin ahead of it"
            ),
            TileMistake::ReadOnly { index } => write!(
                f,
                "a copy to the tensor of the map in global element {index}, which is one to read by: make it by \
                 `Buffer::tensor_map_mut`"
            ),
            TileMistake::Place { index, align, off_by } => write!(
                f,
                "a box in shared memory from element {index} on, which lies {off_by} bytes past a multiple of \
                 {align}: `SharedPlan::tile` aligns it"
            ),
        }
    }
}
