//! What the system reports.

use super::Setting;
use crate::attention::StepProblem;
use crate::kv;

/// A result with this system's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What the system reports.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A buffer, a launch or a copy failed.
    #[error(transparent)]
    Device(#[from] crate::Error),
    /// What exact attention refuses.
    #[error(transparent)]
    Exact(#[from] crate::attention::dense::Error),
    /// A head_dim that no kernel has an instance for.
    #[error("kivi has no kernels for head_dim {head_dim}; those there are take 64 and 128")]
    HeadDim {
        /// What was asked for.
        head_dim: u32,
    },
    /// Bits that no kernel has an instance for.
    #[error("kivi has no kernels for {what} of {bits} bits; those there are take 2 and 4")]
    Bits {
        /// Keys or values.
        what: &'static str,
        /// What was asked for.
        bits: u32,
    },
    /// A group that there are no kernels for, or that does not divide a head.
    #[error(
        "groups of {group} do not divide head_dim {head_dim}, or have no kernel; give group=32, 64 or 128 that does"
    )]
    Group {
        /// What was asked for.
        group: u32,
        /// Channels of a head.
        head_dim: u32,
    },
    /// Recent tokens that are no whole groups.
    #[error("a residual of {residual} tokens is no multiple of the group of {group}; make it one")]
    Residual {
        /// What was asked for.
        residual: u32,
        /// The group.
        group: u32,
    },
    /// A sequence whose tokens cannot be numbered.
    #[error("{tokens} tokens a sequence are too many for kivi; it takes up to {most}")]
    TooLong {
        /// Tokens.
        tokens: u32,
        /// The most.
        most: u32,
    },
    /// A key or a value that is no number.
    #[error(
        "layer {layer}, KV head {head}: the {what} of token {position} is not finite, and has no code; the cache is \
         not to be used further"
    )]
    NotFinite {
        /// The layer.
        layer: usize,
        /// The KV head.
        head: u32,
        /// Key or value.
        what: &'static str,
        /// Its token's place in its sequence.
        position: u32,
    },
    /// New tokens that are none.
    #[error("{tokens} tokens for each of {sequences} sequences are nothing to store; give at least one")]
    NoTokens {
        /// Sequences that get some.
        sequences: u32,
        /// Tokens of each.
        tokens: u32,
    },
    /// Sequences that a store does not have.
    #[error("{count} sequences from {first} on are not all in a store of {there}; make it for more")]
    NoSequence {
        /// The first.
        first: usize,
        /// How many.
        count: usize,
        /// How many the store has.
        there: u32,
    },
    /// More tokens of a sequence than a store has room for.
    #[error(
        "{tokens} tokens of a sequence are more than the {room} that the store has room for; make it for more"
    )]
    Full {
        /// Tokens.
        tokens: usize,
        /// The most.
        room: u32,
    },
    /// A store that is not what a plan is for.
    #[error("the store is of {}, the plan of {}; make both of the same", told(.store), told(.plan))]
    OtherStore {
        /// What the store was made for.
        store: (StepProblem, Setting),
        /// What the plan was made for.
        plan: (StepProblem, Setting),
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
            error @ (Error::NotFinite { .. }
            | Error::NoTokens { .. }
            | Error::NoSequence { .. }
            | Error::Full { .. }
            | Error::OtherStore { .. }
            | Error::Length { .. }) => kv::Error::system(error),
            error => kv::Error::refused(error),
        }
    }
}

/// An extent and a setting, in words.
fn told((problem, setting): &(StepProblem, Setting)) -> String {
    let StepProblem { sequences, q_heads, kv_heads, head_dim, max_tokens } = problem;
    let Setting { key_bits, value_bits, group, residual } = setting;
    format!(
        "{sequences} sequences of up to {max_tokens} tokens, {q_heads} heads on {kv_heads} KV heads of {head_dim}, \
         k={key_bits}/v={value_bits}/group={group}/residual={residual}"
    )
}

/// Says so if a buffer is of another length.
pub(super) fn length(what: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::Length { what, got, expected }) }
}
