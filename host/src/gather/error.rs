//! What the system reports.

use super::{MOST_COUNTED, MOST_TOKENS};
use crate::kv;
use kernels_gpu::gather::MOST_LISTED;

/// A result with this system's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What the system reports.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A buffer, a launch or a copy failed.
    #[error(transparent)]
    Device(#[from] crate::Error),
    /// What attention over the chosen blocks refuses.
    #[error(transparent)]
    Exact(#[from] crate::attention::dense::Error),
    /// What attention by codes refuses.
    #[error(transparent)]
    Codes(#[from] crate::certified::Error),
    /// A setting that is 0.
    #[error("{what} is 0; give it at least one block")]
    Empty {
        /// Which.
        what: &'static str,
    },
    /// A block that there are no kernels for.
    #[error("there are no kernels for gather-blocks of {block} tokens; there are 16, 32, 64 and 128")]
    Block {
        /// Its tokens.
        block: u32,
    },
    /// Bits that no sketch has.
    #[error("there are no sketches of {bits} bits; there are 4 and 8")]
    Bits {
        /// What was asked for.
        bits: u32,
    },
    /// A share of the mass that is none.
    #[error("a share of {skip} of the mass cannot be left out; give more than 0 and at most 1")]
    Share {
        /// What was asked for.
        skip: f32,
    },
    /// Sketches of what is in the host's memory.
    #[error("gather:certified keeps keys and values on the GPU; leave staging out, or take another preset")]
    NotStaged,
    /// A sample of what is known of all.
    #[error("gather:certified bounds what every head skips; leave audit out, or take another preset")]
    NotAudited,
    /// A step by itself that would audit over the bus.
    #[error(
        "a step by itself is not audited with keys in the host's memory; leave audit or staging out, or decode"
    )]
    StagedAudit,
    /// A share of head-steps that is none.
    #[error("a share of {share} of the heads cannot be audited; give more than 0 and at most 1")]
    AuditShare {
        /// What was asked for.
        share: f64,
    },
    /// Layers that attend to everything where there are none.
    #[error(
        "dense is for keys and values on the GPU that are chosen by bounds; leave it out, or leave out staging \
         and :certified"
    )]
    DenseLayers,
    /// An option of ranking where nothing is ranked by it.
    #[error("{option}={value} does not go with {with}; leave {option} out, or {with}")]
    Ranking {
        /// Its name.
        option: &'static str,
        /// Its value.
        value: String,
        /// What it does not go with.
        with: &'static str,
    },
    /// Who ranks where that is not to be chosen.
    #[error("ranks does not go with {with}; leave ranks out, or {with}")]
    Ranks {
        /// What it does not go with.
        with: &'static str,
    },
    /// What there is for original keys and values alone.
    #[error("{option} does not go with tiles=int8-int4; leave {option} out, or tiles")]
    Tiles {
        /// The option, or the preset.
        option: &'static str,
    },
    /// A preset with layers that attend to everything.
    #[error("gather:quest attends to everything in two layers, and tiles=int8-int4 in none; add dense=0")]
    TilesDense,
    /// A list that thread blocks that rank for themselves have no room for.
    #[error(
        "a list of {k} distant blocks is too long for ranks=each, which takes up to {MOST_LISTED}; leave \
         ranks out, or take a smaller k"
    )]
    LongList {
        /// Distant blocks of it.
        k: u32,
    },
    /// Codes of bf16 for more query heads than registers hold.
    #[error(
        "bounds=8 of keys in bf16 is for up to eight query heads a KV head, not {group}; leave bounds out, \
             or take list=query"
    )]
    WideCodes {
        /// Query heads of a list.
        group: u32,
    },
    /// Distant blocks of a window.
    #[error("gather:window reads no distant block; leave k out, or take another preset")]
    Window,
    /// Options of a preset that is not asked for.
    #[error("skip and sketch are options of gather:certified; ask for that, or leave them out")]
    Preset,
    /// A head_dim that no kernel has an instance for.
    #[error("{what} has no kernels for head_dim {head_dim}; those there are take {}", listed(.takes))]
    HeadDim {
        /// The scheme, with the option that needs them.
        what: &'static str,
        /// What was asked for.
        head_dim: u32,
        /// Those that there are kernels for.
        takes: &'static [u32],
    },
    /// More query heads of a list than the kernels for a head_dim take.
    #[error(
        "gather has kernels of head_dim {head_dim} for up to eight query heads a list, not {group}; take list=query"
    )]
    WideGroup {
        /// Channels.
        head_dim: u32,
        /// Query heads of a list.
        group: u32,
    },
    /// A sequence whose tokens cannot be numbered.
    #[error("{tokens} tokens a sequence are too many for gather; it takes up to {MOST_TOKENS}")]
    TooLong {
        /// Tokens.
        tokens: u32,
    },
    /// A sequence of more blocks than masses can be counted of in 32 bits.
    #[error(
        "{tokens} tokens a sequence are too many for gather:certified with blocks of {block}; it takes up to \
         {MOST_COUNTED} blocks"
    )]
    TooManyBlocks {
        /// Tokens.
        tokens: u32,
        /// Tokens of a block.
        block: u32,
    },
    /// A staging pool that no step, or no kernel, can use.
    #[error(
        "a staging pool of {slots} blocks does not do: a step uses up to {least} besides the local ones, so \
         give it {least} to {most}, or a smaller k"
    )]
    Staging {
        /// Blocks of a sequence and KV head.
        slots: u32,
        /// What a step may use.
        least: u32,
        /// The most there may be.
        most: u32,
    },
    /// Keys and values that the host has no room for.
    #[error(
        "keys and values take {bytes} bytes of host memory, and {free} are free; ask for fewer tokens or \
         sequences"
    )]
    HostMemory {
        /// Bytes of all layers.
        bytes: u64,
        /// What the host can still give out.
        free: u64,
    },
    /// Host memory that cannot be page-locked.
    #[error(
        "{bytes} bytes of host memory for a layer's keys and values cannot be page-locked ({source}); ask for \
         fewer tokens or sequences, or let the process lock more (ulimit -l)"
    )]
    Locked {
        /// Bytes of a layer.
        bytes: u64,
        /// What the device says.
        source: crate::Error,
    },
    /// A buffer that does not hold what the problem needs.
    #[error("{what} has {got} elements, this problem needs {expected}; make it for the plan")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Elements it has.
        got: usize,
        /// Elements it needs.
        expected: usize,
    },
}

impl From<Error> for kv::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Device(error) => error.into(),
            Error::Exact(error) => error.into(),
            Error::Codes(error) => error.into(),
            error @ (Error::Empty { .. }
            | Error::Block { .. }
            | Error::Bits { .. }
            | Error::Share { .. }
            | Error::NotStaged
            | Error::NotAudited
            | Error::StagedAudit
            | Error::AuditShare { .. }
            | Error::Preset
            | Error::DenseLayers
            | Error::Window
            | Error::Ranking { .. }
            | Error::Ranks { .. }
            | Error::Tiles { .. }
            | Error::TilesDense
            | Error::LongList { .. }
            | Error::WideCodes { .. }
            | Error::HeadDim { .. }
            | Error::WideGroup { .. }
            | Error::TooLong { .. }
            | Error::TooManyBlocks { .. }
            | Error::Staging { .. }
            | Error::HostMemory { .. }
            | Error::Locked { .. }) => kv::Error::refused(error),
            error => kv::Error::system(error),
        }
    }
}

pub(super) fn length(what: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::Length { what, got, expected }) }
}

/// Numbers as a sentence has them: `64, 96 and 128`.
fn listed(numbers: &[u32]) -> String {
    let texts: Vec<String> = numbers.iter().map(u32::to_string).collect();
    match &texts[..] {
        [many @ .., last] if !many.is_empty() => format!("{} and {last}", many.join(", ")),
        few => few.concat(),
    }
}
