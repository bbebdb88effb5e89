//! `ferrokv quantize`: measures every kernel on the tensors of a file, and writes the quantized file.

mod measure;
mod report;
mod select;

use super::backend::{BackendArguments, Gpu};
use super::failure::Failure;
use super::output::ReportArguments;
use super::{progress, text};
use bytemuck::Pod;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use half::{bf16, f16};
use host::int8::file::{self, Dtype, Granularity, Original, QuantizedWriter};
use host::int8::scores::Queries;
use host::int8::{Int8Element, Matrix, Variant, cpu};
use host::tensor_file::{Target, TensorFile};
use host::{Device, DeviceInfo};
use measure::{Bench, Tensor};
use serde::Serialize;
use simt::emu::EmuOptions;
use std::path::{Path, PathBuf};

const LONG: &str = "\
Quantize the tensors of a safetensors file to INT8 and say what that costs.

Every float tensor (F32, F16, BF16) of rank 2 or more is taken as a matrix: the first extent counts tokens, the \
product of the others channels. Each chosen kernel variant runs on the emulator and, if there is one, on the GPU; \
scales, codes and restored values are compared bit by bit with those of the CPU's own SIMD code. Per variant the \
table has bytes before and after, the largest error and its share of the bound, the L2 error, time and bandwidth. \
Keys (`NAME.key`, [tokens, kv_heads, head_dim]) with queries beside them (`NAME.query`, [rows, heads, head_dim]) \
also get the error of their attention scores; with `query_first_position` = p in the file's metadata, query row r \
sees keys 0 to p + r only. The queries themselves are not quantized.

Variants: naive, tiled, coarsened and vectorized are the paper's kernels; rows gives each thread four columns of \
eight rows, wide sixteen columns of two rows. These share one scale a channel (granularity channel) and must have \
equal bits. fused has a scale for each 16 tokens of a channel (granularity block16) and makes scales and codes in one \
read.

With -o the codes and scales are written as safetensors: `NAME.codes` (I8) and `NAME.scales` (F32), with \
granularity, version and the original types in the metadata; tensors that are not quantized go along unchanged. One \
of the chosen variants must make codes of the granularity that is written. The file is written beside its place and \
renamed, so that it is there as a whole or not at all.

Exit codes: 0 all bits agree; 1 some differ (nothing is written then); 2 bad input.";

const EXAMPLES: &str = "\
Examples:
  ferrokv quantize assets/kv-smollm2.safetensors
  ferrokv quantize cache.safetensors --tensors 'layer.0?.key' --variant vectorized,fused
  ferrokv quantize cache.safetensors -o cache.q.safetensors --granularity block
  ferrokv quantize cache.safetensors --backend cuda --json report.json";

/// Quantize the tensors of a file: size, error, time, and do all bits agree?
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The safetensors file to read.
    file: PathBuf,
    /// Write codes and scales to this safetensors file.
    #[arg(short, long, value_name = "OUT")]
    output: Option<PathBuf>,
    /// Which scales go into OUT: one a channel, or one for each 16 tokens of a channel.
    #[arg(long, alias = "scheme", value_parser = granularity_parser(), default_value = "channel")]
    #[arg(requires = "output")]
    granularity: Granularity,
    /// Which kernels to measure, separated by commas.
    #[arg(long, value_parser = variant_parser(), value_delimiter = ',', default_value = "all")]
    variant: Vec<Choice>,
    /// Only tensors whose name has this in it, or matches it as a pattern of * and ?; may be given again.
    #[arg(long, value_name = "PATTERN")]
    tensors: Vec<String>,
    /// Quantize the queries beside keys too.
    #[arg(long)]
    queries: bool,
    #[command(flatten)]
    backend: BackendArguments,
    /// The most elements that the emulator is given; larger tensors are compared on the GPU only.
    #[arg(long, value_name = "ELEMENTS", default_value_t = 1 << 22)]
    emulator_limit: usize,
    /// Take NaN as 0 and infinities as the largest finite value, where they are an error otherwise.
    #[arg(long)]
    allow_nonfinite: bool,
    /// Replace OUT if it exists.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    report: ReportArguments,
}

#[derive(Clone, Copy, PartialEq)]
enum Choice {
    All,
    One(Variant),
}

fn variant_parser() -> impl TypedValueParser<Value = Choice> {
    let names = ["all"].into_iter().chain(Variant::ALL.map(Variant::name));
    PossibleValuesParser::new(names).map(|name| name.parse().map_or(Choice::All, Choice::One))
}

fn granularity_parser() -> impl TypedValueParser<Value = Granularity> {
    PossibleValuesParser::new(["channel", "block"])
        .map(|name| if name == "block" { Granularity::Block16 } else { Granularity::Channel })
}

/// The report for machines.
#[derive(Serialize)]
struct Json<'a> {
    command: &'static str,
    version: &'static str,
    file: String,
    gpu: Option<GpuJson>,
    gpu_note: Option<&'a str>,
    ptx_fingerprint: &'static str,
    codegen: &'static str,
    /// Over all tensors, variants and devices.
    values_compared: u64,
    values_differing: u64,
    output: Option<Written>,
    tensors: &'a [Tensor],
    not_quantized: &'a std::collections::BTreeMap<String, String>,
}

#[derive(Serialize)]
struct GpuJson {
    name: String,
    compute_capability: Option<u32>,
    driver_version: Option<u32>,
}

impl From<&DeviceInfo> for GpuJson {
    fn from(info: &DeviceInfo) -> Self {
        let (compute_capability, driver_version) = (info.compute_capability, info.driver_version);
        GpuJson { name: info.name.clone(), compute_capability, driver_version }
    }
}

#[derive(Serialize)]
struct Written {
    path: String,
    granularity: &'static str,
    bytes: u64,
}

/// Runs the command.
///
/// # Errors
/// Bad input, a device that fails, or bits that differ.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let output = arguments.output.as_deref();
    let target = output.map(|path| Target::new(path, arguments.force, Some(&arguments.file))).transpose()?;
    let report = arguments.report.open(Some(&arguments.file), output)?;
    let mut file = TensorFile::open(&arguments.file)?;
    file::check_source(&file)?;
    let selection = select::select(&file, &arguments.tensors, arguments.queries)?;
    let kernels = arguments.backend.kernels()?;
    let (gpu, gpu_note) = match arguments.backend.open()? {
        Gpu::Ready(device) => (Some(device), None),
        Gpu::None(reason) => (None, Some(reason)),
    };
    let emulator = Device::cpu(EmuOptions::default());
    let variants = variants(&arguments.variant);
    let of_granularity =
        |variant: &Variant| (*variant == Variant::Fused) == (arguments.granularity == Granularity::Block16);
    if output.is_some() && !variants.iter().any(of_granularity) {
        return Err(Failure::GranularityNotCompared { granularity: arguments.granularity.name() });
    }
    let bench = Bench { emulator, emulator_limit: arguments.emulator_limit, gpu, variants };

    let mut writer = match target {
        None => None,
        Some(target) => {
            let kept = file.entries().iter().filter(|(name, _)| selection.kept.contains_key(*name));
            let metadata = file.metadata();
            Some(QuantizedWriter::create(target, arguments.granularity, metadata, &selection.chosen, kept)?)
        }
    };
    let bar = progress::bar(selection.chosen.len());
    let mut tensors = Vec::new();
    for (name, original) in &selection.chosen {
        bar.set_message(name.clone());
        let work = Work {
            name,
            original,
            arguments,
            bench: &bench,
            step: &|what| bar.set_message(format!("{name}: {what}")),
        };
        tensors.push(match original.dtype {
            Dtype::F32 => work.run::<f32>(&mut file, writer.as_mut())?,
            Dtype::F16 => work.run::<f16>(&mut file, writer.as_mut())?,
            Dtype::Bf16 => work.run::<bf16>(&mut file, writer.as_mut())?,
        });
        bar.inc(1);
    }
    bar.finish_and_clear();

    let (compared, differing) = report::totals(&tensors);
    let mut written = None;
    if differing == 0
        && let (Some(mut writer), Some(path)) = (writer, output)
    {
        for name in selection.kept.keys() {
            writer.write_bytes(name, &file.read_bytes(name)?)?;
        }
        writer.finish()?;
        let bytes = std::fs::metadata(path).map_or(0, |found| found.len());
        written = Some(Written {
            path: path.display().to_string(),
            granularity: arguments.granularity.name(),
            bytes,
        });
    }
    let tables = tables(&arguments.file, &bench, gpu_note.as_deref(), &tensors, &selection, written.as_ref());
    let json = Json {
        command: "quantize",
        version: env!("CARGO_PKG_VERSION"),
        file: arguments.file.display().to_string(),
        gpu: bench.gpu.as_ref().map(|gpu| gpu.info().into()),
        gpu_note: gpu_note.as_deref(),
        ptx_fingerprint: kernels.fingerprint,
        codegen: kernels.name,
        values_compared: compared,
        values_differing: differing,
        output: written,
        tensors: &tensors,
        not_quantized: &selection.kept,
    };
    report.finish(&tables, &json)?;
    match differing {
        0 => Ok(()),
        _ => Err(Failure::Differs(format!(
            "{} of {} values differ between implementations; nothing was written; run `ferrokv check`, and report \
             this with its output",
            text::count(differing),
            text::count(compared)
        ))),
    }
}

fn variants(choices: &[Choice]) -> Vec<Variant> {
    let chosen =
        |variant: &Variant| choices.contains(&Choice::All) || choices.contains(&Choice::One(*variant));
    Variant::ALL.into_iter().filter(chosen).collect()
}

/// One tensor to be worked on.
struct Work<'a> {
    name: &'a str,
    original: &'a Original,
    arguments: &'a Arguments,
    bench: &'a Bench,
    step: &'a dyn Fn(&str),
}

impl Work<'_> {
    fn run<T: Int8Element + Pod>(
        &self,
        file: &mut TensorFile,
        writer: Option<&mut QuantizedWriter>,
    ) -> Result<Tensor, Failure> {
        let unsuitable = |reason| Failure::Unsuitable { name: self.name.to_owned(), reason };
        let matrix = self.original.matrix().map_err(unsuitable)?;
        (self.step)("reading");
        let keys: Vec<T> = file.read(self.name, self.original.dtype.to_file())?;
        if !self.arguments.allow_nonfinite
            && let Some(at) = cpu::first_nonfinite(&keys)
        {
            let index = index_of(at, &self.original.shape);
            return Err(Failure::NonFinite { name: self.name.to_owned(), value: keys[at].to_f32(), index });
        }
        let queries = self.queries(file, matrix)?;
        let rows = measure::measure(
            self.name,
            &keys,
            matrix,
            queries.as_ref().map(QueryTensor::borrow),
            self.bench,
            self.step,
        )?;
        if let Some(writer) = writer {
            (self.step)("writing");
            let (codes, scales) = measure::quantized(self.name, &keys, matrix, self.arguments.granularity)?;
            writer.write(self.name, &codes, &scales)?;
        }
        Ok(Tensor {
            name: self.name.to_owned(),
            dtype: self.original.dtype.to_string(),
            shape: self.original.shape.clone(),
            tokens: matrix.tokens,
            channels: matrix.channels,
            bytes_before: (matrix.elements() * self.original.dtype.bytes()) as u64,
            rows,
        })
    }

    /// The queries beside these keys, if there are any that fit.
    fn queries(&self, file: &mut TensorFile, keys: Matrix) -> Result<Option<QueryTensor>, Failure> {
        let Some(name) = select::query_of(self.name).filter(|name| file.entries().contains_key(name)) else {
            return Ok(None);
        };
        let entry = file.entry(&name)?;
        let ([_, heads, head_dim], Some(dtype), [_, _, own]) =
            (entry.shape.as_slice(), Dtype::from_file(entry.dtype), self.original.shape.as_slice())
        else {
            tracing::warn!(
                "{name} is no float tensor of [rows, heads, head_dim]: no score error for {}",
                self.name
            );
            return Ok(None);
        };
        let (heads, head_dim, same) = (*heads, *head_dim, head_dim == own);
        let first_position = file.metadata().get("query_first_position").and_then(|text| text.parse().ok());
        let values = match dtype {
            Dtype::F32 => file.read(&name, dtype.to_file())?,
            Dtype::F16 => widen(&file.read::<f16>(&name, dtype.to_file())?),
            Dtype::Bf16 => widen(&file.read::<bf16>(&name, dtype.to_file())?),
        };
        let queries = QueryTensor { values, heads, head_dim, first_position };
        if !same || !queries.borrow().fit(keys) || !queries.values.iter().all(|q| q.is_finite()) {
            tracing::warn!("{name} does not fit its keys or is not finite: no score error for {}", self.name);
            return Ok(None);
        }
        Ok(Some(queries))
    }
}

struct QueryTensor {
    values: Vec<f32>,
    heads: usize,
    head_dim: usize,
    first_position: Option<usize>,
}

impl QueryTensor {
    fn borrow(&self) -> Queries<'_> {
        let QueryTensor { values, heads, head_dim, first_position } = self;
        Queries { values, heads: *heads, head_dim: *head_dim, first_position: *first_position }
    }
}

fn widen<T: Int8Element>(values: &[T]) -> Vec<f32> {
    values.iter().map(|x| x.to_f32()).collect()
}

/// The index along each axis of flat element `at`.
fn index_of(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index: Vec<usize> = shape
        .iter()
        .rev()
        .map(|extent| {
            let along = at % extent;
            at /= extent;
            along
        })
        .collect();
    index.reverse();
    index
}

fn tables(
    path: &Path,
    bench: &Bench,
    gpu_note: Option<&str>,
    tensors: &[Tensor],
    selection: &select::Selection,
    written: Option<&Written>,
) -> String {
    let mut out = format!("{}: {}\n", path.display(), text::plural(tensors.len(), "tensor"));
    match (&bench.gpu, gpu_note) {
        (Some(gpu), _) => out += &format!("times of kernels: {}\n", gpu.info().name),
        (None, note) => {
            // The first clause says what is missing; the rest is advice.
            let note = note.and_then(|note| note.split("; ").next()).unwrap_or("none");
            out += &format!("times of kernels: the emulator's; no GPU: {note} (ferrokv doctor says more)\n");
        }
    }
    out += &format!("times of \"cpu\": SIMD on {} threads\n\n", rayon::current_num_threads());
    tensors.iter().for_each(|tensor| out += &report::tensor(tensor));
    out += report::LEGEND;
    if !selection.kept.is_empty() {
        out += &format!("\nnot quantized: {}\n", text::plural(selection.kept.len(), "tensor"));
        let mut reasons: Vec<&String> = selection.kept.values().collect();
        reasons.sort();
        reasons.dedup();
        for reason in reasons {
            let names: Vec<&str> = selection
                .kept
                .iter()
                .filter(|(_, other)| *other == reason)
                .map(|(name, _)| name.as_str())
                .collect();
            let shown = names[..names.len().min(5)].join(", ");
            let more = if names.len() > 5 { ", …" } else { "" };
            out += &format!("  {shown}{more}: {reason}\n");
        }
    }
    let skipped = tensors.iter().flat_map(|tensor| &tensor.rows).filter(|row| row.runs.is_empty()).count();
    if skipped != 0 {
        out += &format!(
            "\nnot run: {skipped} kernels on tensors of over {} elements; raise --emulator-limit, or use a GPU\n",
            text::count(bench.emulator_limit as u64)
        );
    }
    if let Some(written) = written {
        out += &format!(
            "\nwritten: {} ({} bytes), granularity {}\n",
            written.path,
            text::count(written.bytes),
            written.granularity
        );
    }
    let (compared, differing) = report::totals(tensors);
    out += &match (compared, differing) {
        (0, _) => "\nbits: nothing was compared\n".to_owned(),
        (_, 0) => format!("\nbits: all {} values agree\n", text::count(compared)),
        _ => format!("\nbits: {} of {} values DIFFER\n", text::count(differing), text::count(compared)),
    };
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_elements_have_an_index_on_each_axis() {
        assert_eq!(index_of(0, &[2, 3, 4]), [0, 0, 0]);
        assert_eq!(index_of(23, &[2, 3, 4]), [1, 2, 3]);
        assert_eq!(index_of(13, &[2, 3, 4]), [1, 0, 1]);
    }

    #[test]
    fn choices_keep_the_papers_order() {
        assert_eq!(variants(&[Choice::All, Choice::One(Variant::Fused)]), Variant::ALL);
        let two = [Choice::One(Variant::Fused), Choice::One(Variant::Naive)];
        assert_eq!(variants(&two), [Variant::Naive, Variant::Fused]);
    }
}
