//! What a KV scheme does to a language model: measurements over any [`KvCache`](crate::kv::KvCache).
//!
//! | module | what it is |
//! | --- | --- |
//! | [`statistics`] | intervals and tests for paired runs |
//! | [`distribution`] | what the logits of a step say |
//! | [`decoder`] | a model over a cache: reading, forced and free steps |
//! | [`perplexity`] | the decoded half of a window |
//! | [`compare`] | two caches on the same text, step by step |
//! | [`prompt`] | texts of a given length with a question |
//! | [`needle`] | a needle in a haystack, among other needles |
//! | [`ruler`] | seven tasks over long texts |
//! | [`capture`] | what passes through a cache, kept |
//! | [`diagnosis`] | what codes of a captured cache do to its attention, with no model in the loop |
//! | [`references`] | published quantizers without kernels, to hold schemes against |
//!
//! Every measurement of a model has the same shape: what comes before is read in chunks, and then each token
//! goes through the cache by itself, as a text that is being written does. That is where a scheme acts.

pub mod capture;
pub mod compare;
pub mod decoder;
pub mod diagnosis;
pub mod distribution;
pub mod needle;
pub mod perplexity;
pub mod prompt;
pub mod references;
pub mod ruler;

pub use crate::random::Random;
pub use crate::statistics;
pub use decoder::{Decoder, Watch};

use crate::model::forward;

/// A result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why something could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A forward pass failed.
    #[error(transparent)]
    Forward(#[from] forward::Error),
    /// A text or its tokens.
    #[error(transparent)]
    Model(#[from] crate::model::Error),
    /// A scheme whose output is no number.
    #[error(
        "the logits after token {position} over the KV scheme {scheme} are not finite; the scheme does not suit this model"
    )]
    NotFinite {
        /// The scheme.
        scheme: String,
        /// The token's position.
        position: usize,
    },
    /// Fewer tokens than a measurement takes.
    #[error("{what} needs at least {needed} tokens and has {found}; give more")]
    TooShort {
        /// The measurement.
        what: &'static str,
        /// Tokens there are.
        found: usize,
        /// Tokens needed.
        needed: usize,
    },
    /// A text with too few words of its own.
    #[error(
        "{text} has {found} plain words of four to nine letters and {needed} are needed; choose a longer text"
    )]
    FewWords {
        /// The text.
        text: String,
        /// Words that were found.
        found: usize,
        /// Words needed.
        needed: usize,
    },
    /// Whoever watches said so.
    #[error("stopped before its end")]
    Stopped,
}
