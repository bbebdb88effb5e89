//! Attention over INT8 keys and INT4 values with a certificate, after Calver (2026).
//!
//! [`Writer`] turns full blocks of 16 tokens into the tiles and annotations of [`kernels_gpu::certified`];
//! [`mod@reference`] is the same format told once more, serially, and judged in f64.
//!
//! ```
//! use half::f16;
//! use host::certified::{Annotation, Geometry, Job, Writer};
//! use host::{Buffer, Device, Stream};
//! use simt::emu::EmuOptions;
//!
//! let device = Device::cpu(EmuOptions::default());
//! let stream = Stream::new(&device)?;
//! let geometry = Geometry::new(2, 64)?;
//! // Two blocks of 16 tokens; the second one becomes the first of the quantized pool.
//! let numbers = |step: f32| {
//!     (0..geometry.pool_elements(2)).map(|i| f16::from_f32((i as f32 * step).sin())).collect()
//! };
//! let (keys, values): (Vec<f16>, Vec<f16>) = (numbers(0.37), numbers(0.73));
//! let (keys, values) = (Buffer::from_slice(&device, &keys)?, Buffer::from_slice(&device, &values)?);
//! let mut tiles = Buffer::<u8>::new(&device, geometry.tile_bytes(1))?;
//! let mut annotations = Buffer::<Annotation>::new(&device, geometry.pairs(1))?;
//!
//! let mut writer = Writer::<f16>::new(&device, geometry, 16)?;
//! let job = Job::new(1, 0, 0);
//! writer.write(&stream, &keys, &values, &[job], &mut tiles, &mut annotations)?;
//! writer.check(&stream)?;
//! assert!(annotations.to_vec()?.iter().all(|a| a.eps < 0.05 && a.eta < 0.4 && a.nu < 8.0));
//! # Ok::<(), host::certified::Error>(())
//! ```

pub mod cache;
pub mod cases;
pub mod cpu;
mod kv;
mod policy;
pub mod proof;
pub mod reference;
mod scheme;
mod settings;
mod step;
mod step_cases;
pub(crate) mod workload;
mod write;

pub use cache::{CacheElement, CacheError, Extents, Memory, SequenceId, TieredCache};
pub use kernels_gpu::certified::layout::{
    Annotation, BLOCK_TOKENS, HEAD_DIMS, Job, Layout, Problems, Rounding, TileLayout,
};
pub use kernels_gpu::certified::{Certificate, Scratch, Traffic};
pub use kv::CertifiedCache;
pub use policy::{Bound, Policy, Rung, SecondPass, reasons};
pub use scheme::SYSTEM;
pub use settings::Settings;
pub use step::{
    Attended, AttendedHandles, Carried, Checked, Near, OriginalsRead, STEP_HEAD_DIMS, StepElement,
    StepHandles, StepPlan, StepProblem,
};
pub use write::{CertifiedElement, QuantizeBlock, Writer};

use std::fmt;

/// A result with this system's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What the certified system reports.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A buffer, a launch or a copy failed.
    #[error(transparent)]
    Device(#[from] crate::Error),
    /// Extents that the dense rung does not take.
    #[error(transparent)]
    Dense(#[from] crate::attention::dense::Error),
    /// What a cache refuses.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A head_dim that a step has no instance for.
    #[error("certified attention has no kernels for head_dim {head_dim}; those there are take 64 and 128")]
    StepHeadDim {
        /// Channels of a head.
        head_dim: u32,
    },
    /// A sequence of more parts than are added up.
    #[error("{tokens} tokens a sequence are too many for certified attention; it takes up to {most}")]
    TooLong {
        /// Tokens.
        tokens: u32,
        /// The most.
        most: u32,
    },
    /// Steps that the paper's layout has no kernels for.
    #[error(
        "the policy's renew is {renew}, and steps by a carried list have kernels for the compact layout alone; set renew to 0, or \
         take the compact layout in place of the paper's"
    )]
    CarriedLayout {
        /// The policy's.
        renew: u32,
    },
    /// Steps over resident sequences that the policy has none of.
    #[error(
        "the policy's renew is {renew}, and steps over resident sequences are of plans with certificates and a \
         carried list; set renew to 1 or more, and ask with_residents for them"
    )]
    Residents {
        /// The policy's.
        renew: u32,
    },
    /// A list of another plan.
    #[error(
        "the carried list has {got:?} lists, entries, rows and heads, expected {expected:?}; take one that this plan made"
    )]
    Carried {
        /// Its extents.
        got: [usize; 4],
        /// The plan's.
        expected: [usize; 4],
    },
    /// Thresholds that make no sense.
    #[error("the policy's {what}")]
    Policy {
        /// Which, its value, and what it may be.
        what: String,
    },
    /// Heads that no kernel has an instance for.
    #[error(
        "{kv_heads} KV heads of {head_dim} channels are not supported; use 1 to {} heads of 64, 96, 128 or 256",
        Geometry::MAX_KV_HEADS
    )]
    Geometry {
        /// KV heads.
        kv_heads: u32,
        /// Channels of one.
        head_dim: u32,
    },
    /// A buffer that is not a whole number of blocks, or two that do not belong together.
    #[error("{what} has {got} elements, expected {expected}; allocate it for {geometry}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Elements it has.
        got: usize,
        /// What it should have.
        expected: String,
        /// The heads.
        geometry: Geometry,
    },
    /// A job that names a block outside its pool.
    #[error("job {index} names {which} block {block}, and there are {blocks}; pass blocks of the pools")]
    Block {
        /// The job's place in the list.
        index: usize,
        /// `source` or `destination`.
        which: &'static str,
        /// The block named.
        block: u32,
        /// Blocks of the pool.
        blocks: usize,
    },
    /// Two jobs that write the same block.
    #[error("two jobs write block {block}; give each destination once")]
    Twice {
        /// The block.
        block: u32,
    },
    /// More jobs, or heads, than one launch can number.
    #[error("{jobs} jobs over {geometry} are too many for one launch; make a writer for fewer")]
    TooMany {
        /// Jobs.
        jobs: usize,
        /// The heads.
        geometry: Geometry,
    },
    /// An element that is NaN or infinite.
    #[error(
        "the {what} of {at} is not finite; what was quantized since the last check is not to be used, mend the cache"
    )]
    NotFinite {
        /// `key` or `value`.
        what: &'static str,
        /// Where.
        at: Position,
    },
    /// An element beyond what an f16 scale and zero can restore.
    #[error(
        "the {what} of {at} is beyond f16, in which quantized attention computes; store this cache's {what}s scaled down"
    )]
    Range {
        /// `key` or `value`.
        what: &'static str,
        /// Where.
        at: Position,
    },
}

/// An element of a pool of originals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The block.
    pub block: u32,
    /// The KV head.
    pub kv_head: u32,
    /// The token in the block.
    pub token: u32,
    /// The channel.
    pub channel: u32,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Position { block, kv_head, token, channel } = self;
        write!(f, "block {block}, KV head {kv_head}, token {token}, channel {channel}")
    }
}

/// KV heads and their channels, in which layout they are stored, and how they are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    kv_heads: u32,
    head_dim: u32,
    layout: Layout,
    rounding: Rounding,
}

impl Geometry {
    /// The most KV heads.
    pub const MAX_KV_HEADS: u32 = 1024;

    /// `kv_heads` heads of `head_dim` channels, one of [`HEAD_DIMS`], in the compact layout, rounded to the
    /// nearest codes.
    ///
    /// # Errors
    /// [`Error::Geometry`].
    pub fn new(kv_heads: u32, head_dim: u32) -> Result<Self> {
        if kv_heads == 0 || kv_heads > Self::MAX_KV_HEADS || !HEAD_DIMS.contains(&head_dim) {
            return Err(Error::Geometry { kv_heads, head_dim });
        }
        Ok(Geometry { kv_heads, head_dim, layout: Layout::Compact, rounding: Rounding::Nearest })
    }

    /// The same heads in a layout. Of the paper's, steps that choose for themselves have kernels
    /// ([`Policy::renew`] 0): see [`StepPlan::with_layout`].
    pub fn with_layout(self, layout: Layout) -> Self {
        Geometry { layout, ..self }
    }

    /// The same heads, whose codes are rounded otherwise.
    pub fn with_rounding(self, rounding: Rounding) -> Self {
        Geometry { rounding, ..self }
    }

    /// How codes are rounded.
    pub fn rounding(self) -> Rounding {
        self.rounding
    }

    /// KV heads.
    pub fn kv_heads(self) -> u32 {
        self.kv_heads
    }

    /// Channels of a head, D.
    pub fn head_dim(self) -> u32 {
        self.head_dim
    }

    /// Where everything of a tile lies.
    pub fn layout(self) -> TileLayout {
        TileLayout::new(self.head_dim, self.layout)
    }

    /// Pairs of block and KV head in `blocks` blocks: how many annotations there are.
    pub fn pairs(self, blocks: usize) -> usize {
        blocks * self.kv_heads as usize
    }

    /// Elements of keys, or of values, in `blocks` blocks of originals.
    pub fn pool_elements(self, blocks: usize) -> usize {
        self.pairs(blocks) * self.layout().elements() as usize
    }

    /// Bytes of `blocks` quantized blocks.
    pub fn tile_bytes(self, blocks: usize) -> usize {
        self.pairs(blocks) * self.layout().bytes as usize
    }

    /// Where the element of a flat index is in a pool of originals.
    pub fn position(self, index: u64) -> Position {
        let (d, heads) = (self.head_dim as u64, self.kv_heads as u64);
        Position {
            channel: (index % d) as u32,
            token: (index / d % BLOCK_TOKENS as u64) as u32,
            kv_head: (index / (d * BLOCK_TOKENS as u64) % heads) as u32,
            block: (index / (d * BLOCK_TOKENS as u64 * heads)) as u32,
        }
    }

    /// What was found while quantizing, as an error.
    ///
    /// # Errors
    /// [`Error::NotFinite`], [`Error::Range`].
    pub fn verdict(self, problems: Problems) -> Result<()> {
        let found = |index: u64| (index != u64::MAX).then(|| self.position(index));
        for (what, not_finite) in [("key", problems.key_not_finite), ("value", problems.value_not_finite)] {
            if let Some(at) = found(not_finite) {
                return Err(Error::NotFinite { what, at });
            }
        }
        for (what, range) in [("key", problems.key_range), ("value", problems.value_range)] {
            if let Some(at) = found(range) {
                return Err(Error::Range { what, at });
            }
        }
        Ok(())
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} KV heads of {} channels", self.kv_heads, self.head_dim)?;
        match self.layout {
            Layout::Compact => Ok(()),
            Layout::Paper => write!(f, " in the paper's layout"),
        }
    }
}
