//! What is measured: a model on a device, and texts.

use super::backend::{BackendArguments, Gpu};
use super::failure::Failure;
use ferrokv::Generated;
use host::Device;
use host::kv::{Capacity, KvCache, Rope, Selection};
use host::model::forward::Runner;
use host::model::text::Corpus;
use host::model::{Error as ModelError, Model, Tokenizer, fetched};
use simt::emu::EmuOptions;
use std::path::PathBuf;

/// The options that choose a model and a device.
#[derive(clap::Args)]
pub struct SubjectArguments {
    /// The GGUF file; without it, what ./setup --model fetched.
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    #[command(flatten)]
    backend: BackendArguments,
}

/// A model on a device.
pub struct Subject {
    /// Its file.
    pub path: PathBuf,
    /// The model.
    pub model: Model,
    /// What it runs on.
    pub device: Device,
    /// What a GPU runs.
    pub kernels: Generated,
    /// Why there was no GPU.
    pub gpu_note: Option<String>,
}

impl SubjectArguments {
    /// The model's file.
    ///
    /// # Errors
    /// None was given and none fetched.
    pub fn path(&self) -> Result<PathBuf, Failure> {
        Ok(match &self.model {
            Some(path) => path.clone(),
            None => fetched::model()?,
        })
    }

    /// Opens both.
    ///
    /// # Errors
    /// A wrong model, or a GPU asked for that cannot be used.
    pub fn open(&self) -> Result<Subject, Failure> {
        let path = self.path()?;
        let model = Model::open(&path)?;
        let (device, gpu_note) = self.device()?;
        Ok(Subject { path, model, device, kernels: self.kernels()?, gpu_note })
    }

    /// The kernels that a GPU is opened with.
    ///
    /// # Errors
    /// Those of a code generator that is not there.
    pub fn kernels(&self) -> Result<Generated, Failure> {
        self.backend.kernels()
    }

    /// The device alone, and why it is no GPU.
    ///
    /// # Errors
    /// A GPU asked for that cannot be used.
    pub fn device(&self) -> Result<(Device, Option<String>), Failure> {
        Ok(match self.backend.open()? {
            Gpu::Ready(device) => (device, None),
            Gpu::None(reason) => (Device::cpu(EmuOptions::default()), Some(reason)),
        })
    }
}

impl Subject {
    /// What the device is called.
    pub fn device_name(&self) -> &str {
        if self.gpu_note.is_none() { &self.device.info().name } else { "CPU" }
    }

    /// The GPU, if the model runs on one.
    pub fn gpu(&self) -> Option<&Device> {
        self.gpu_note.is_none().then_some(&self.device)
    }

    /// The model's tokenizer.
    ///
    /// # Errors
    /// There is none.
    pub fn tokenizer(&self) -> Result<&Tokenizer, Failure> {
        Ok(self.model.tokenizer()?)
    }

    /// Packs the weights.
    ///
    /// # Errors
    /// Sizes that there are no kernels for; out of memory.
    pub fn runner(&self) -> Result<Runner, Failure> {
        Ok(Runner::new(&self.model, &self.device)?)
    }

    /// An empty cache of a scheme, for so many tokens of one sequence or of several.
    ///
    /// # Errors
    /// Heads that the scheme has no kernels for; out of memory.
    pub fn cache(
        &self,
        scheme: &Selection,
        capacity: impl Into<Capacity>,
    ) -> Result<Box<dyn KvCache>, Failure> {
        let config = &self.model.config;
        let scheme = scheme.of_model(self.model.fingerprint());
        Ok(scheme.open(&self.device, config.into(), Some(&Rope::from(config)), capacity)?)
    }

    /// Refuses what the model's context is too short for.
    ///
    /// # Errors
    /// It is.
    pub fn fits(&self, tokens: usize) -> Result<(), Failure> {
        let context = self.model.config.context;
        if tokens > context { Err(ModelError::Context { tokens, context }.into()) } else { Ok(()) }
    }
}

/// One of the fetched texts by its name, or a file.
///
/// # Errors
/// It cannot be read.
pub fn corpus(text: &str) -> Result<Corpus, Failure> {
    Ok(if fetched::TEXTS.contains(&text) { Corpus::fetched(text)? } else { Corpus::open(text)? })
}

/// Text that starts behind `bos`, as the model wants it.
pub fn behind_bos(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<u32> {
    tokenizer.bos().into_iter().chain(tokens.iter().copied()).collect()
}
