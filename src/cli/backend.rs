//! The choice of a device.

use super::failure::Failure;
use clap::ValueEnum;
use host::Device;

/// What kernels may run on.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// The GPU if there is one that can be used.
    Auto,
    /// No GPU.
    Cpu,
    /// The GPU; an error if it cannot be used.
    Cuda,
}

/// The options of every command that runs kernels.
#[derive(clap::Args)]
pub struct BackendArguments {
    /// What to run on besides the CPU.
    #[arg(long, value_enum, default_value = "auto")]
    backend: Choice,
    /// Which GPU, counted from 0 as the driver does.
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpu: u32,
}

/// A GPU, or why there is none.
pub enum Gpu {
    /// Ready, with its kernels loaded.
    Ready(Device),
    /// Not there or not asked for.
    None(String),
}

impl BackendArguments {
    /// Opens the GPU if the choice asks for it.
    ///
    /// # Errors
    /// With `--backend cuda`, why it cannot be used.
    pub fn open(&self) -> Result<Gpu, Failure> {
        if self.backend == Choice::Cpu {
            return Ok(Gpu::None("not asked for (--backend cpu)".into()));
        }
        match Device::cuda(self.gpu, ferrokv::ptx()) {
            Ok(device) => Ok(Gpu::Ready(device)),
            Err(error) if self.backend == Choice::Cuda => Err(error.into()),
            Err(error) => {
                tracing::debug!(%error, "no GPU");
                Ok(Gpu::None(error.to_string()))
            }
        }
    }
}
