//! `ferrokv dequantize`: back to the types and shapes that a quantized file was made from.

use super::backend::{BackendArguments, Gpu};
use super::failure::Failure;
use super::memory::zeros;
use super::{output, progress, text};
use bytemuck::Pod;
use half::{bf16, f16};
use host::int8::file::{Dtype, Granularity, QuantizedFile};
use host::int8::{Int8Element, Matrix, Plan, Quantized, cpu};
use host::tensor_file::{Target, TensorWriter};
use host::{Buffer, Device, Stream};
use std::path::PathBuf;

const LONG: &str = "\
Restore the tensors of a file that `ferrokv quantize -o` wrote.

Each tensor gets its original name, type and shape back: every value is code x scale, rounded to the type. Tensors \
that were not quantized come back unchanged, and so does the source's metadata. CPU and GPU give the same bits.

Exit codes: 0 done; 2 bad input (nothing is written then).";

const EXAMPLES: &str = "\
Examples:
  ferrokv quantize cache.safetensors -o cache.q.safetensors
  ferrokv dequantize cache.q.safetensors -o back.safetensors";

/// Restore the tensors of a quantized file.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The quantized file to read.
    file: PathBuf,
    /// The safetensors file to write.
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
    #[command(flatten)]
    backend: BackendArguments,
    /// Replace OUT if it exists.
    #[arg(long)]
    force: bool,
}

/// Runs the command.
///
/// # Errors
/// Bad input, or a device that fails.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let target = Target::new(&arguments.output, arguments.force, Some(&arguments.file))?;
    let mut file = QuantizedFile::open(&arguments.file)?;
    let gpu = match arguments.backend.open()? {
        Gpu::Ready(device) => Some(device),
        Gpu::None(_) => None,
    };
    let originals = file.originals().clone();
    let others: Vec<_> =
        file.others().map(|(name, entry)| (name.clone(), entry.dtype, entry.shape.clone())).collect();
    let restored = originals.iter().map(|(name, o)| (name.clone(), o.dtype.to_file(), o.shape.clone()));
    let mut writer =
        TensorWriter::create(target, &file.restored_metadata(), restored.chain(others.iter().cloned()))?;
    let bar = progress::bar(originals.len());
    for (name, original) in &originals {
        bar.set_message(name.clone());
        let (codes, scales) = file.read(name)?;
        let unsuitable = |reason| Failure::Unsuitable { name: name.clone(), reason };
        let matrix = original.matrix().map_err(unsuitable)?;
        let work = Work { name, matrix, granularity: file.granularity(), codes, scales, gpu: gpu.as_ref() };
        match original.dtype {
            Dtype::F32 => writer.write(name, &work.restore::<f32>()?)?,
            Dtype::F16 => writer.write(name, &work.restore::<f16>()?)?,
            Dtype::Bf16 => writer.write(name, &work.restore::<bf16>()?)?,
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    for (name, ..) in &others {
        writer.write(name, &file.read_bytes(name)?)?;
    }
    writer.finish()?;
    output::print(&format!(
        "{}: {} restored from codes by {}, {} as they were; on {}\n",
        arguments.output.display(),
        text::plural(originals.len(), "tensor"),
        file.granularity(),
        others.len(),
        gpu.as_ref().map_or("the CPU", |gpu| &gpu.info().name)
    ))
}

struct Work<'a> {
    name: &'a str,
    matrix: Matrix,
    granularity: Granularity,
    codes: Vec<i8>,
    scales: Vec<f32>,
    gpu: Option<&'a Device>,
}

impl Work<'_> {
    fn restore<T: Int8Element + Pod>(&self) -> Result<Vec<T>, Failure> {
        let mut restored: Vec<T> = zeros(self.name, self.matrix.elements())?;
        let Some(gpu) = self.gpu else {
            cpu::dequantize(&self.codes, self.matrix, &self.scales, &mut restored);
            return Ok(restored);
        };
        let stream = Stream::new(gpu)?;
        let plan = Plan::<T>::new(gpu, self.matrix, self.granularity.variant())?;
        let codes = Buffer::from_slice(gpu, &self.codes)?;
        let quantized = Quantized { codes, scales: Buffer::from_slice(gpu, &self.scales)? };
        let mut out = Buffer::<T>::new(gpu, restored.len())?;
        plan.dequantize(&stream, &quantized, &mut out)?;
        stream.download(&out, 0, &mut restored)?;
        Ok(restored)
    }
}
