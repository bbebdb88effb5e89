//! What can be wrong with a model.

use super::gguf;
use std::path::PathBuf;

/// A result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why a model cannot be used, or a text not be read by it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file itself.
    #[error(transparent)]
    File(#[from] gguf::Error),
    /// A kind of model that there is no forward pass for.
    #[error("{model} has the architecture '{found}'; llama and qwen2 can be run")]
    Architecture {
        /// The model.
        model: String,
        /// What its metadata says.
        found: String,
    },
    /// A part of the architecture that the forward pass lacks.
    #[error("{model} cannot be run: {feature} is not supported; choose another model")]
    Unsupported {
        /// The model.
        model: String,
        /// What it asks for.
        feature: String,
    },
    /// Metadata that is not there.
    #[error("{model} lacks the metadata '{key}'; make the file again with a current converter")]
    MissingKey {
        /// The model.
        model: String,
        /// The key.
        key: String,
    },
    /// Metadata of another type or range.
    #[error(
        "metadata '{key}' of {model} is {found}, expected {expected}; make the file again with a current converter"
    )]
    WrongKey {
        /// The model.
        model: String,
        /// The key.
        key: String,
        /// Its value or type.
        found: String,
        /// What is asked for.
        expected: String,
    },
    /// Metadata that contradict each other.
    #[error("{model} contradicts itself: {reason}; make the file again with a current converter")]
    Inconsistent {
        /// The model.
        model: String,
        /// The values that do not go together.
        reason: String,
    },
    /// A tensor that is not there.
    #[error("{model} lacks the tensor '{name}' of {expected}; it is incomplete, fetch or make it again")]
    MissingTensor {
        /// The model.
        model: String,
        /// The tensor.
        name: String,
        /// Its shape by the metadata.
        expected: String,
    },
    /// A tensor whose shape does not suit the configuration.
    #[error(
        "tensor '{name}' of {model} has {found}, but its metadata ask for {expected}; fetch or make it again"
    )]
    TensorShape {
        /// The model.
        model: String,
        /// The tensor.
        name: String,
        /// Its shape.
        found: String,
        /// Its shape by the metadata.
        expected: String,
    },
    /// A tensor that the architecture has no place for: to leave it out would change the results.
    #[error(
        "tensor '{name}' of {model} has no place in the architecture {architecture}; choose another model"
    )]
    UnknownTensor {
        /// The model.
        model: String,
        /// The tensor.
        name: String,
        /// The architecture.
        architecture: &'static str,
    },
    /// Random weights have no tokenizer.
    #[error("{model} has no tokenizer; give token ids, or a model from a file")]
    NoTokenizer {
        /// The model.
        model: String,
    },
    /// A kind of tokenizer that is not read.
    #[error("{model} has the tokenizer {found}; gpt2 with the pre-tokenizers {known} can be used")]
    TokenizerKind {
        /// The model.
        model: String,
        /// What its metadata say.
        found: String,
        /// The pre-tokenizers there are.
        known: String,
    },
    /// A tokenizer that cannot be made from what the file holds.
    #[error("the tokenizer of {model} is broken: {reason}; fetch or make the file again")]
    Tokenizer {
        /// The model.
        model: String,
        /// What is wrong.
        reason: String,
    },
    /// A text that the tokenizer could not read.
    #[error("the text cannot be tokenized: {reason}")]
    Encode {
        /// Why not.
        reason: String,
    },
    /// A number that no token has.
    #[error("there is no token {id}: the vocabulary has {vocab}")]
    NoToken {
        /// The number.
        id: u32,
        /// How many tokens there are.
        vocab: usize,
    },
    /// More tokens than a context holds.
    #[error(
        "{tokens} tokens are more than the context of {context} that the model was trained for; shorten the text"
    )]
    Context {
        /// Tokens asked for, with those before them.
        tokens: usize,
        /// The longest context.
        context: usize,
    },
    /// No chat template, or one of another kind.
    #[error(
        "{model} has {found}; of chat templates only ChatML is known: leave out --chat and write the prompt as the model wants it"
    )]
    ChatTemplate {
        /// The model.
        model: String,
        /// What its metadata say.
        found: String,
    },
    /// Something that `./setup --model` fetches is not there.
    #[error("there is no {} in this folder or above it; run ./setup --model, or give a path", path.display())]
    NotFetched {
        /// The path below the folder looked for.
        path: PathBuf,
    },
    /// A text that cannot be read.
    #[error("cannot read {}: {source}; check the path, or fetch the texts with ./setup --model", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A text too short for what is to be cut from it.
    #[error(
        "{text} has {found} tokens from byte {start} on, and {needed} are asked for; choose a longer text or shorter windows"
    )]
    TextTooShort {
        /// The text.
        text: String,
        /// Where the window starts.
        start: usize,
        /// Tokens there are.
        found: usize,
        /// Tokens of a window.
        needed: usize,
    },
}
