//! What the system reports.

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
    /// A rotation that there is none of.
    #[error(transparent)]
    Rotation(#[from] crate::attention::Error),
    /// The codebooks' file.
    #[error(transparent)]
    File(#[from] crate::tensor_file::Error),
    /// A head_dim that no kernel has an instance for.
    #[error("vecinfer has no kernels for head_dim {head_dim}; those there are take 64, 96, 128 and 256")]
    HeadDim {
        /// What was asked for.
        head_dim: u32,
    },
    /// Codes of keys and values that no kernel has an instance for.
    #[error(
        "vecinfer has no kernels for keys in {keys} with values in {values}{}; there are {there}",
        at(*head_dim)
    )]
    Codes {
        /// Of keys.
        keys: String,
        /// Of values.
        values: String,
        /// Channels of a head, where that is what there are none for.
        head_dim: Option<u32>,
        /// What there is of that.
        there: String,
    },
    /// A key of a calibration that f16 has no room for once it is transformed.
    #[error(
        "the key of token {token}, KV head {head}, layer {layer} is beyond f16 in channel {channel} once it is \
         transformed; calibrate on another text, or with `mean=off` or `transform=none`"
    )]
    KeyOverflow {
        /// The layer.
        layer: usize,
        /// The token, counted over the whole text.
        token: usize,
        /// The KV head.
        head: usize,
        /// The transformed key's channel.
        channel: usize,
    },
    /// More tokens at the front in f16 than the kernels of a head_dim look for.
    #[error("vecinfer keeps up to {most} tokens at the front in f16 at head_dim {head_dim}, not {sink}")]
    Sink {
        /// Tokens.
        sink: u32,
        /// The most.
        most: u32,
        /// Channels of a head.
        head_dim: u32,
    },
    /// A cache whose steps are to restore all tokens.
    #[error(
        "vecinfer/step=restored is there for `bench attention` and `attend` to compare with; a cache attends to its \
         codes: leave it out"
    )]
    Restored,
    /// A sequence whose tokens cannot be numbered.
    #[error("{tokens} tokens a sequence are too many for vecinfer; it takes up to {most}")]
    TooLong {
        /// Tokens.
        tokens: u32,
        /// The most.
        most: u32,
    },
    /// A file of codebooks for other codes.
    #[error(
        "{path} is for {what} {found}, and the cache is to have {expected}; give it the same, or calibrate"
    )]
    Setting {
        /// The file.
        path: String,
        /// Keys or values.
        what: &'static str,
        /// The file's.
        found: String,
        /// The selection's.
        expected: String,
    },
    /// A file of codebooks that does not hold what it should.
    #[error("{path} is damaged: {what}; make it again by `ferrokv calibrate --scheme vecinfer`")]
    Damaged {
        /// The file.
        path: String,
        /// What is wrong.
        what: String,
    },
    /// A layer that a file has nothing for.
    #[error(
        "{path} has codebooks for {layers} layers, and this is layer {layer}; give the file of its model"
    )]
    Layer {
        /// The file.
        path: String,
        /// How many it has.
        layers: usize,
        /// What was asked for.
        layer: usize,
    },
    /// Too little text.
    #[error(
        "{found} sub-vectors of {what} are too few for {centroids} centroids; calibrate on {needed} tokens or more"
    )]
    TooFew {
        /// Keys or values, of which layer.
        what: String,
        /// Sub-vectors that there are.
        found: usize,
        /// Centroids of a codebook.
        centroids: usize,
        /// Tokens that are enough.
        needed: usize,
    },
    /// Values that are too large for centroids in bytes.
    #[error(
        "a centroid of the values of layer {layer} has an element of {largest}, and codes of more than 8 bits \
         hold up to {most}; calibrate with values in d2b8, d4b8 or d8b8"
    )]
    TooLarge {
        /// The layer.
        layer: usize,
        /// The largest element.
        largest: f32,
        /// The largest that there is room for.
        most: f32,
    },
    /// A key or a value that is no number.
    #[error(
        "the {what} of token {token} in layer {layer} is not finite, and has no code; the cache is spoilt"
    )]
    NotFinite {
        /// Key or value.
        what: &'static str,
        /// Its position.
        token: u32,
        /// The layer.
        layer: usize,
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
            Error::Rotation(error) => error.into(),
            Error::File(error) => error.into(),
            error @ (Error::HeadDim { .. }
            | Error::Codes { .. }
            | Error::TooLong { .. }
            | Error::Restored) => kv::Error::refused(error),
            error => kv::Error::system(error),
        }
    }
}

/// Where codes have no kernels, if not anywhere.
fn at(head_dim: Option<u32>) -> String {
    head_dim.map_or_else(String::new, |head_dim| format!(" at head_dim {head_dim}"))
}

/// Says so if a buffer is of another length.
pub(super) fn length(what: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::Length { what, got, expected }) }
}
