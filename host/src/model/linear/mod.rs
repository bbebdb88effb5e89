//! Products of weights and activations: packing, and launches on a device. The CPU's own path is in
//! [`cpu`](super::cpu).

mod device;
mod packed;

pub(super) use device::{batch_kernel, decode_kernel, fused_kernels, prefill_kernel, prompt_kernel};

pub use device::{
    BATCH_UP_TO, DeviceWeights, Epilogue, Fusing, Input, ProductKernel, panel_words, record_words,
};
pub use packed::{PackedWeights, Rows, WeightKind};

use super::gguf::TensorType;

/// A result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why weights cannot be packed or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Rows that are no whole number of blocks.
    #[error("{columns} channels a row are no multiple of 32; the kernels take blocks of 32")]
    Columns {
        /// Channels of a row.
        columns: usize,
    },
    /// Parts that are not one matrix.
    #[error(
        "parts of one matrix have rows of {columns:?} channels; give at least one part, all of one length"
    )]
    Parts {
        /// Channels of each part's rows.
        columns: Vec<usize>,
    },
    /// A part of another size than its shape says.
    #[error(
        "{found} bytes of {tensor_type} where the shape asks for {expected}; the tensor's data are not its own"
    )]
    Bytes {
        /// The part's type.
        tensor_type: TensorType,
        /// Bytes there are.
        found: usize,
        /// Bytes there must be.
        expected: usize,
    },
    /// More than indices count, or nothing.
    #[error("a matrix of {rows} × {columns} cannot be used; rows and columns go from 1 to 67108863")]
    TooLarge {
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
    },
    /// A number that a launch cannot take.
    #[error("{what} is {value}; {limit}")]
    Argument {
        /// What was given.
        what: &'static str,
        /// Its value.
        value: usize,
        /// What it may be.
        limit: &'static str,
    },
    /// Extents that cannot be rotated.
    #[error(transparent)]
    Rotation(#[from] crate::attention::Error),
    /// A number that means nothing for sampling.
    #[error("{what} is {value}; {limit}")]
    Sampling {
        /// What was given.
        what: &'static str,
        /// Its value.
        value: f32,
        /// What it may be.
        limit: &'static str,
    },
    /// A buffer that is too short.
    #[error("{what} has {found} elements, {needed} are needed")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Elements there are.
        found: usize,
        /// Elements there must be.
        needed: usize,
    },
    /// What the device reports.
    #[error(transparent)]
    Device(#[from] crate::Error),
}
