//! Language models: files, configuration, tokenizer, weights, and the forward pass.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`gguf`] | the file: metadata and packed tensors |
//! | [`config`] | sizes and variants, from the metadata |
//! | [`weights`] | the tensors by what they are for, packed as they are stored |
//! | [`synthetic`] | models of given sizes with random weights |
//!
//! [`Model::open`] reads all of it; everything is checked there, so that what uses a model relies on its shapes.

pub mod config;
mod error;
pub mod gguf;
pub mod kernels;
pub mod linear;
pub mod synthetic;
pub mod weights;

pub use config::ModelConfig;
pub use error::{Error, Result};
pub use weights::Weights;

use gguf::Gguf;
use std::path::Path;

/// A model that is ready to run.
#[derive(Debug)]
pub struct Model {
    /// Sizes and variants.
    pub config: ModelConfig,
    /// The tensors.
    pub weights: Weights,
}

impl Model {
    /// Opens a GGUF file; [`Gguf::open`] says what the mapping asks of you.
    ///
    /// # Errors
    /// What is wrong with the file, or what it asks for that there is not.
    pub fn open(path: impl AsRef<Path>) -> Result<Model> {
        Model::from_gguf(&Gguf::open(path)?)
    }

    /// The same of a file that is open.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn from_gguf(file: &Gguf) -> Result<Model> {
        let config = ModelConfig::from_gguf(file)?;
        let weights = Weights::from_gguf(file, &config)?;
        Ok(Model { config, weights })
    }
}
