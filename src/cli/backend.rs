//! The choice of a device.

use super::failure::Failure;
use clap::ValueEnum;
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

/// A generator's name, and its images.
type Images = (&'static str, &'static [PtxImage]);

/// A GPU with the kernels of one code generator, or of two.
pub struct Opened {
    /// With the first one's kernels.
    pub gpu: Gpu,
    /// The first one.
    pub name: &'static str,
    /// The second one, and the same GPU with its kernels.
    pub second: Option<(&'static str, Device)>,
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
        if self.codegen.len() > 1 {
            return Err(Failure::OneGenerator);
        }
        Ok(self.open_generated()?.gpu)
    }

    /// Opens the GPU with the kernels of each code generator that is named.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_generated(&self) -> Result<Opened, Failure> {
        let images = self.images()?;
        let (name, first) = images[0];
        let mut opened = Opened { gpu: self.open_with(first)?, name, second: None };
        if let (Some(&(name, second)), Gpu::Ready(_)) = (images.get(1), &opened.gpu) {
            opened.second = match self.open_with(second)? {
                Gpu::Ready(device) => Some((name, device)),
                Gpu::None(reason) => return Err(Failure::NeedsGpu { what: "--codegen", reason }),
            };
        }
        Ok(opened)
    }

    /// The images of the generators that are named, or of the first that the program was built with.
    fn images(&self) -> Result<Vec<Images>, Failure> {
        let built = ferrokv::generated();
        if self.codegen.is_empty() {
            return Ok(vec![built[0]]);
        }
        let named = |generator: &Generator| {
            let name = generator.name();
            let images = built.iter().copied().find(|(built, images)| *built == name && !images.is_empty());
            images.ok_or_else(|| {
                let there: Vec<&str> =
                    built.iter().filter(|(_, images)| !images.is_empty()).map(|(name, _)| *name).collect();
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
