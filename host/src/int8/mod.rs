//! Per-channel symmetric INT8 quantization: plans over the kernels of [`kernels_gpu::int8`], the same
//! arithmetic on all CPU cores, an f64 oracle, and error metrics.
//!
//! ```
//! use host::{Buffer, Device, Stream, int8};
//! use simt::emu::EmuOptions;
//!
//! let device = Device::cpu(EmuOptions::default());
//! let stream = Stream::new(&device)?;
//! let keys: Vec<f32> = (0..64 * 32).map(|i| (i as f32 * 0.37).sin()).collect();
//! let keys = Buffer::from_slice(&device, &keys)?;
//!
//! let mut plan = int8::Plan::<f32>::new(&device, int8::Matrix::new(64, 32)?, int8::Variant::Rows)?;
//! let mut quantized = plan.allocate()?;
//! plan.quantize(&stream, &keys, &mut quantized)?;
//! assert_eq!(quantized.codes.to_vec()?.iter().map(|c| c.unsigned_abs()).max(), Some(127));
//! # Ok::<(), int8::Error>(())
//! ```

mod block_cases;
mod cache;
pub mod cases;
pub mod cpu;
pub mod file;
mod kernels;
pub mod metrics;
pub mod oracle;
mod plan;
pub mod scores;

pub use cache::Int8Cache;
pub use kernels::Int8Element;
pub use plan::{Plan, Quantized};

use kernels_gpu::int8::{Shape, TOKENS_PER_BLOCK, WIDE_BACK_COLUMNS, WIDE_COLUMNS};
use std::fmt;
use std::str::FromStr;

use crate::kv::{Scheme, System, proof, workload};

/// The system.
pub static SYSTEM: System = System {
    name: "int8",
    about: "per-channel INT8 quantization of a KV cache, after Taneja and Shingvi (2025)",
    kernels: || kernels_gpu::int8::kernels().collect(),
    cases: cases::cases,
    schemes: &[Scheme {
        name: "int8",
        about: "keys and values in 8 bits, restored for attention",
        presets: &[],
        options: &[],
        // Codes, and a scale in f32 for 16 tokens of a channel.
        step_bytes: |_, head_dim, tokens| f64::from(2 * head_dim) * (1.0 + 4.0 / 16.0) * tokens as f64,
        check: |_| Ok(()),
        open: |opening| Ok(Box::new(Int8Cache::new(opening.device, opening.geometry, opening.capacity)?)),
        workload: workload::through_cache,
        proof: proof::by_workload,
        calibrate: None,
    }],
};

/// A result with this system's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What the INT8 system reports.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A buffer, a launch or a copy failed.
    #[error(transparent)]
    Device(#[from] crate::Error),
    /// A matrix with no element.
    #[error(
        "a matrix of {tokens} tokens and {channels} channels has no element; give it at least one of each"
    )]
    Empty {
        /// Rows.
        tokens: usize,
        /// Columns.
        channels: usize,
    },
    /// A matrix whose threads 32 bits cannot number.
    #[error(
        "a matrix of {tokens} tokens and {channels} channels is too large for one launch; split it by tokens"
    )]
    TooLarge {
        /// Rows.
        tokens: usize,
        /// Columns.
        channels: usize,
    },
    /// A buffer that does not hold what the plan's matrix needs.
    #[error("{what} has {got} elements, a matrix of {matrix} needs {expected}; allocate it for this plan")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Elements it has.
        got: usize,
        /// Elements it needs.
        expected: usize,
        /// The plan's matrix.
        matrix: Matrix,
    },
    /// A name that is no variant.
    #[error("there is no INT8 variant '{name}'; there are {}", names())]
    UnknownVariant {
        /// What was asked for.
        name: String,
    },
}

fn names() -> String {
    Variant::ALL.map(|variant| variant.name()).join(", ")
}

/// A row-major matrix of keys or values: one row a token, one column a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Rows, T.
    pub tokens: usize,
    /// Columns, D: KV heads × head_dim.
    pub channels: usize,
}

impl Matrix {
    /// A matrix of at least one element.
    ///
    /// # Errors
    /// [`Error::Empty`] for a zero extent, [`Error::TooLarge`] for more channels or elements than can be
    /// numbered.
    pub fn new(tokens: usize, channels: usize) -> Result<Self> {
        if tokens == 0 || channels == 0 {
            return Err(Error::Empty { tokens, channels });
        }
        // Four rows of an odd matrix are taken as one: their columns are numbered in 32 bits as well.
        let fits =
            channels <= (u32::MAX / 4) as usize && tokens.checked_mul(channels).is_some_and(|n| n < 1 << 40);
        if fits { Ok(Matrix { tokens, channels }) } else { Err(Error::TooLarge { tokens, channels }) }
    }

    /// T·D.
    pub fn elements(self) -> usize {
        self.tokens * self.channels
    }

    /// How many scales `variant` makes: D, or D for every block of 16 tokens.
    pub fn scales(self, variant: Variant) -> usize {
        match variant {
            Variant::Fused => self.tokens.div_ceil(TOKENS_PER_BLOCK as usize) * self.channels,
            _ => self.channels,
        }
    }

    /// How many rows share a scale where there are `scales` of them: all T, or 16; `None` if that many fit
    /// neither.
    pub fn tokens_per_scale(self, scales: usize) -> Option<usize> {
        let block = TOKENS_PER_BLOCK as usize;
        if scales == self.channels {
            Some(self.tokens)
        } else {
            (scales == self.tokens.div_ceil(block) * self.channels).then_some(block)
        }
    }

    /// Whether rows are whole sixteens, which the quantizer of [`Variant::Wide`] needs.
    pub(crate) fn is_wide(self) -> bool {
        self.channels.is_multiple_of(WIDE_COLUMNS as usize)
    }

    /// Whether rows are whole eights, which the way back of [`Variant::Wide`] needs.
    pub(crate) fn is_wide_back(self) -> bool {
        self.channels.is_multiple_of(WIDE_BACK_COLUMNS as usize)
    }

    pub(crate) fn shape(self) -> Shape {
        Shape::new(self.tokens as u64, self.channels as u32)
    }
}

impl fmt::Display for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} × {}", self.tokens, self.channels)
    }
}

/// Which kernels do the work; all but `Fused` give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// One element a thread (the paper's listing 5).
    Naive,
    /// One element a thread, scales in shared memory (listing 6).
    Tiled,
    /// Four columns 16 apart a thread (the authors' code).
    Coarsened,
    /// Four neighbouring elements a thread (listing 8).
    Vectorized,
    /// Four neighbouring columns of eight rows a thread.
    Rows,
    /// Sixteen neighbouring columns of two rows a thread, 16 bytes of two rows on the way back; `Rows` where
    /// channels are no multiple of 16 (back: of 8).
    Wide,
    /// Scales and codes of each block of 16 tokens in one read.
    Fused,
}

impl Variant {
    /// All of them, in the paper's order.
    pub const ALL: [Variant; 7] = [
        Variant::Naive,
        Variant::Tiled,
        Variant::Coarsened,
        Variant::Vectorized,
        Variant::Rows,
        Variant::Wide,
        Variant::Fused,
    ];

    /// The name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Variant::Naive => "naive",
            Variant::Tiled => "tiled",
            Variant::Coarsened => "coarsened",
            Variant::Vectorized => "vectorized",
            Variant::Rows => "rows",
            Variant::Wide => "wide",
            Variant::Fused => "fused",
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Variant {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Variant::ALL.into_iter().find(|variant| variant.name() == name);
        found.ok_or_else(|| Error::UnknownVariant { name: name.to_string() })
    }
}
