//! Language models: files, configuration, tokenizer, weights, and the forward pass.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`gguf`] | the file: metadata and packed tensors |
//! | [`config`] | sizes and variants, from the metadata |
//! | [`tokenizer`] | text to tokens and back, from the file |
//! | [`weights`] | the tensors by what they are for, packed as they are stored |
//! | [`oracle`] | the forward pass in f64, to measure others against |
//! | [`forward`] | the forward pass on a device |
//! | [`text`] | long texts and windows of them |
//! | [`fetched`] | where `./setup --model` puts a model and texts |
//! | [`synthetic`] | models of given sizes with random weights |
//!
//! [`Model::open`] reads all of it; everything is checked there, so that what uses a model relies on its
//! shapes.

pub mod cases;
pub mod config;
pub mod cpu;
mod error;
pub mod fetched;
pub mod forward;
pub mod gguf;
pub mod kernels;
pub mod linear;
pub mod oracle;
mod prompt_cases;
pub mod synthetic;
pub mod text;
pub mod tokenizer;
pub mod weights;

pub use config::ModelConfig;
pub use error::{Error, Result};
pub use tokenizer::Tokenizer;
pub use weights::Weights;

use crate::hash::hash;
use crate::kv::System;
use gguf::Gguf;
use std::path::Path;

/// The system: kernels of the forward pass. How keys and values are kept is the affair of the systems that
/// offer [schemes](crate::kv::Scheme).
pub static SYSTEM: System = System {
    name: "model",
    about: "a transformer's forward pass but for attention",
    kernels: || kernels_gpu::model::kernels().collect(),
    cases: cases::cases,
    schemes: &[],
};

/// A model that is ready to run.
#[derive(Debug)]
pub struct Model {
    /// Sizes and variants.
    pub config: ModelConfig,
    /// The tensors.
    pub weights: Weights,
    /// The tokenizer; random weights have none, nor has a file without the metadata.
    pub tokenizer: Option<Tokenizer>,
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
        let has_tokenizer = file.get("tokenizer.ggml.model").is_some();
        let tokenizer = has_tokenizer.then(|| Tokenizer::from_gguf(file)).transpose()?;
        match tokenizer.as_ref().map(Tokenizer::vocab).filter(|&tokens| tokens > config.vocab) {
            None => Ok(Model { config, weights, tokenizer }),
            Some(tokens) => Err(Error::Inconsistent {
                model: config::model_name(file),
                reason: format!("its tokenizer has {tokens} tokens and its embedding {} rows", config.vocab),
            }),
        }
    }

    /// A hash of its norms: another one for another model, a fine-tuned one too, and the same however its
    /// weights are packed.
    pub fn fingerprint(&self) -> String {
        let norms = self.weights.layers.iter().flat_map(|layer| [&layer.attn_norm, &layer.ffn_norm]);
        let all = norms.chain([&self.weights.output_norm]).flat_map(|norm| norm.to_f32());
        let bytes: Vec<[u8; 4]> = all.map(f32::to_le_bytes).collect();
        format!("{:016x}", hash(std::iter::once(bytes.as_flattened())))
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// There is none.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().ok_or_else(|| Error::NoTokenizer { model: self.config.name.clone() })
    }
}
