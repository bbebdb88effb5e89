//! The choice of a device.

use super::failure::Failure;
use clap::ValueEnum;
use ferrokv::Generated;
use host::{Device, PtxImage};

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

/// A GPU with the kernels of one code generator, or of two.
pub struct Opened {
    /// With the first one's kernels.
    pub gpu: Gpu,
    /// The first one, and what it made.
    pub kernels: Generated,
    /// The second one, and the same GPU with its kernels.
    pub second: Option<(Generated, Device)>,
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
    /// Whose kernels run on the GPU: those of one of the code generators that the program was built with.
    /// `check` takes two, separated by a comma, and compares them.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME")]
    codegen: Vec<Generator>,
}

/// A code generator of the build.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Generator {
    /// That of the device compiler.
    Llvm,
    /// NVIDIA's libNVVM.
    Nvvm,
}

impl Generator {
    fn name(self) -> &'static str {
        match self {
            Generator::Llvm => "llvm",
            Generator::Nvvm => "nvvm",
        }
    }
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
    /// With `--backend cuda`, why it cannot be used; a code generator that is not there, or two.
    pub fn open(&self) -> Result<Gpu, Failure> {
        self.open_with(self.kernels()?.images)
    }

    /// The kernels that [`open`](Self::open) loads: what a report says of them is of these.
    ///
    /// # Errors
    /// A code generator that is not there, or two.
    pub fn kernels(&self) -> Result<Generated, Failure> {
        if self.codegen.len() > 1 {
            return Err(Failure::OneGenerator);
        }
        Ok(self.generated()?[0])
    }

    /// Opens the GPU with the kernels of each code generator that is named.
    ///
    /// # Errors
    /// As [`open`](Self::open), but for two generators, which differ; with two also that there is no GPU.
    pub fn open_generated(&self) -> Result<Opened, Failure> {
        let generated = self.generated()?;
        let kernels = generated[0];
        let gpu = self.open_with(kernels.images)?;
        let Some(&other) = generated.get(1) else { return Ok(Opened { gpu, kernels, second: None }) };
        match (gpu, self.open_with(other.images)?) {
            (gpu @ Gpu::Ready(_), Gpu::Ready(device)) => {
                Ok(Opened { gpu, kernels, second: Some((other, device)) })
            }
            (Gpu::None(reason), _) | (_, Gpu::None(reason)) => {
                Err(Failure::NeedsGpu { what: "a comparison of two code generators", reason })
            }
        }
    }

    /// What the generators made that are named, one or two; or the first that the program was built with.
    fn generated(&self) -> Result<Vec<Generated>, Failure> {
        let built = ferrokv::generated();
        let twice = matches!(self.codegen[..], [first, second] if first == second);
        if twice || self.codegen.len() > 2 {
            let list = self.codegen.iter().map(|generator| generator.name()).collect::<Vec<_>>().join(",");
            return Err(Failure::Generators { list });
        }
        if self.codegen.is_empty() {
            return Ok(vec![built[0]]);
        }
        let named = |generator: &Generator| {
            let name = generator.name();
            let there = || built.iter().copied().filter(|kernels| !kernels.images.is_empty());
            there().find(|kernels| kernels.name == name).ok_or_else(|| {
                let there: Vec<&str> = there().map(|kernels| kernels.name).collect();
                let build = there.iter().copied().chain([name]).collect::<Vec<_>>().join(",");
                let built = if there.is_empty() { "none".into() } else { there.join(" and ") };
                Failure::NotGenerated { name, built, build }
            })
        };
        self.codegen.iter().map(named).collect()
    }

    fn open_with(&self, images: &[PtxImage]) -> Result<Gpu, Failure> {
        if self.backend == Choice::Cpu {
            return Ok(Gpu::None("not asked for (--backend cpu)".into()));
        }
        match Device::cuda(self.gpu, images) {
            Ok(device) => Ok(Gpu::Ready(device)),
            Err(error) if self.backend == Choice::Cuda => Err(error.into()),
            Err(error) => {
                tracing::debug!(%error, "no GPU");
                Ok(Gpu::None(error.to_string()))
            }
        }
    }
}
