//! What can be wrong with a scheme, its options or its cache.

use super::Capacity;
use crate::attention;
use crate::{Device, Error as DeviceError};

/// A result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// What a scheme reports.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A paged pool or its table, or extents that cannot be rotated.
    #[error(transparent)]
    Attention(#[from] attention::Error),
    /// Exact attention.
    #[error(transparent)]
    Exact(#[from] attention::dense::Error),
    /// A buffer, a launch or a copy failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Extents or settings that a system has nothing for; another scheme may take them.
    #[error(transparent)]
    Refused(Source),
    /// What else a system reports.
    #[error(transparent)]
    System(Source),
    /// A scheme that there is not.
    #[error("there is no KV scheme '{name}'; there is {names}")]
    Scheme {
        /// What was asked for.
        name: String,
        /// What there is.
        names: String,
    },
    /// A preset that the scheme does not have.
    #[error("{scheme} has no preset '{preset}'; {presets}")]
    Preset {
        /// The scheme.
        scheme: &'static str,
        /// What was asked for.
        preset: String,
        /// What it has, as a sentence's end.
        presets: String,
    },
    /// An option that the scheme does not have.
    #[error("{scheme} has no option '{option}'; {options}")]
    Option {
        /// The scheme.
        scheme: &'static str,
        /// What was given.
        option: String,
        /// What it has, as a sentence's end.
        options: String,
    },
    /// An option's value.
    #[error("{scheme}/{option}={value}: {option} is {expected}")]
    Value {
        /// The scheme.
        scheme: &'static str,
        /// The option.
        option: &'static str,
        /// What was given.
        value: String,
        /// What it may be.
        expected: String,
    },
    /// An option that is given twice.
    #[error("{scheme} is given {option} twice; leave one out")]
    Twice {
        /// The scheme.
        scheme: &'static str,
        /// The option.
        option: &'static str,
    },
    /// A file that a scheme asks for and that does not go with the model.
    #[error("{path} is for {what} {found}, and the model has {expected}; make it for this model")]
    Artifact {
        /// The file.
        path: String,
        /// What differs.
        what: &'static str,
        /// The file's.
        found: String,
        /// The model's.
        expected: String,
    },
    /// A file that a scheme asks for and that another one has made.
    #[error(
        "{path} is for {found}, and {scheme} cannot read it; make one by `ferrokv calibrate --scheme {scheme}`"
    )]
    ArtifactOf {
        /// The file.
        path: String,
        /// The scheme that it is for.
        found: String,
        /// The scheme that was given it.
        scheme: &'static str,
    },
    /// A scheme that cannot do without a file, and none was given.
    #[error(
        "{scheme} needs a file made for the model: make one by `ferrokv calibrate --scheme {scheme} -o FILE`, and \
         give it as {scheme}/{option}=FILE"
    )]
    NoArtifact {
        /// The scheme.
        scheme: &'static str,
        /// The option that takes the file.
        option: &'static str,
    },
    /// A scheme that no file is made for.
    #[error("{scheme} needs no calibration; `ferrokv calibrate --help` lists the schemes that do")]
    NoCalibration {
        /// The scheme.
        scheme: &'static str,
    },
    /// A scheme whose keys and values cannot be looked at apart from attention.
    #[error(
        "{scheme} does not say what its keys and values are restored to, as schemes of codes alone do; `ferrokv attend` \
         shows the errors of its outputs"
    )]
    NotRestored {
        /// The scheme.
        scheme: &'static str,
    },
    /// Keys, values or queries that nothing can be made of.
    #[error("the {what} of layer {layer} are {found}; give finite ones of every token and layer")]
    Material {
        /// The layer.
        layer: usize,
        /// Keys, values or queries.
        what: &'static str,
        /// What they are.
        found: String,
    },
    /// Somebody wanted no more of it.
    #[error("stopped; nothing was made")]
    Stopped,
    /// A file that a scheme asks for and that cannot be read.
    #[error(transparent)]
    File(#[from] crate::tensor_file::Error),
    /// Tokens that there is no room for.
    #[error(
        "{tokens} tokens more do not fit a cache that has {held} of {capacity}; make it for more tokens, or ask for fewer"
    )]
    Full {
        /// Tokens to come.
        tokens: usize,
        /// Tokens that are there.
        held: usize,
        /// Tokens that fit.
        capacity: usize,
    },
    /// A sequence that a cache does not have.
    #[error(
        "there is no sequence {sequence}; the cache has room for {sequences}, and let this one join first"
    )]
    NoSequence {
        /// Its number.
        sequence: usize,
        /// How many there is room for.
        sequences: usize,
    },
    /// All sequences that a cache has room for are there.
    #[error(
        "the cache has room for {sequences} sequences, and all are there; let one leave, or make it for more"
    )]
    NoRoom {
        /// How many there is room for.
        sequences: usize,
    },
    /// A cache that cannot be numbered, or that the device's memory cannot hold.
    #[error(
        "a cache of {tokens} tokens takes {bytes} bytes, and {device} has {memory}; ask for fewer tokens"
    )]
    Memory {
        /// Tokens asked for.
        tokens: usize,
        /// Bytes that they take in all layers.
        bytes: u64,
        /// The device.
        device: String,
        /// Its memory in bytes.
        memory: u64,
    },
    /// A call outside its order, or for a layer that is not there.
    #[error("{what} is {value}; {limit}")]
    Order {
        /// What was given.
        what: &'static str,
        /// Its value.
        value: usize,
        /// What it may be.
        limit: &'static str,
    },
}

impl Error {
    /// What a system says of extents or settings that it has nothing for.
    pub fn refused(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Error::Refused(Box::new(error))
    }

    /// Anything else that a system says.
    pub fn system(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Error::System(Box::new(error))
    }

    /// Whether another scheme, or a smaller problem, may well succeed: the device has not failed.
    pub fn is_refusal(&self) -> bool {
        use attention::dense::Error as Exact;
        let memory = |error: &DeviceError| matches!(error, DeviceError::OutOfMemory { .. });
        match self {
            Error::Refused(_) | Error::Memory { .. } => true,
            Error::Device(error) | Error::Attention(attention::Error::Device(error)) => memory(error),
            Error::Exact(Exact::Device(error) | Exact::Cache(attention::Error::Device(error))) => {
                memory(error)
            }
            Error::Exact(
                Exact::HeadDim { .. } | Exact::Group { .. } | Exact::Heads { .. } | Exact::TooLarge { .. },
            ) => true,
            _ => false,
        }
    }

    /// Says so if a device can never hold `bytes`.
    pub(crate) fn if_too_large(device: &Device, capacity: Capacity, bytes: u64) -> Result<()> {
        let tokens = capacity.tokens.saturating_mul(capacity.sequences);
        match device.info().memory_bytes.filter(|memory| bytes > *memory) {
            Some(memory) => Err(Error::Memory { tokens, bytes, device: device.info().name.clone(), memory }),
            None => Ok(()),
        }
    }
}
