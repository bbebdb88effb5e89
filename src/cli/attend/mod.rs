//! `ferrokv attend`: attention over the keys, values and queries of a file, with each head's bound beside its
//! true error.

mod picture;
mod report;
mod step;

use super::backend::{BackendArguments, Gpu};
use super::failure::{CommandError, Failure};
use super::layers;
use super::output::ReportArguments;
use super::picture::Picture;
use super::{progress, scheme, text};
use half::{bf16, f16};
use host::int8::file::Dtype;
use host::kv;
use host::tensor_file::TensorFile;
use host::{Device, Stream};
use picture::Heads;
use report::{Report, summary};
use simt::emu::EmuOptions;
use std::path::PathBuf;
use step::Setting;

const LONG: &str = "\
Compute attention over the keys, values and queries of a safetensors file by a KV scheme, and hold what it promises of each \
head against the head's true error.

A layer NN is three tensors, all F16 or all BF16: `layer.NN.key` and `layer.NN.value`, [tokens, kv_heads, head_dim], \
and `layer.NN.query`, [query tokens, heads, head_dim], after RoPE and not scaled. Query head h reads KV head \
h / (heads / kv_heads). With `query_first_position` = p in the file's metadata, query row r is token p + r and sees \
keys 0 to p + r; without it, the rows are the last tokens. Each chosen query token is a sequence of its own, and \
attends to the tokens up to its own, in one step together with the others.

A bound is what a scheme promises of the Euclidean norm of a head's error; the true error is the distance from the formula in \
f64. Of a scheme that promises nothing the error alone is shown. A head that an exact fallback has computed must have the \
bits of dense attention, cut as the fallback cuts it. Originals that a scheme keeps besides what it stores are in host \
memory, with a scratch of --scratch blocks on the device; the step that is judged is one that follows others of the same queries.

Without a GPU everything runs on the emulator: the same bits, and times that mean nothing but patience.

Exit codes: 0 every promise holds; 1 one does not, or the exact fallback has other bits than dense attention; 2 bad input.";

const EXAMPLES: &str = "\
Examples:
  ferrokv attend assets/kv-smollm2.safetensors
  ferrokv attend assets/kv-smollm2.safetensors --layers 7,22 --queries 16 --kv certified:strict
  ferrokv attend assets/kv-smollm2.safetensors --kv int8-int4 --plot int8-int4     writes int8-int4.svg and .png
  ferrokv attend assets/kv-smollm2.safetensors --kv certified:paper/layout=paper
  ferrokv attend cache.safetensors --backend cuda --scratch 0 --json report.json";

/// Attend to a file's keys and values: each head's bound beside its true error.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The safetensors file to read.
    file: PathBuf,
    #[arg(long, value_name = "SCHEME", default_value = "certified")]
    #[arg(help = scheme::short("How keys and values are kept"))]
    #[arg(long_help = scheme::long("How keys and values are kept"))]
    kv: String,
    /// Only these layers, by number and separated by commas.
    #[arg(long, value_name = "N", value_delimiter = ',')]
    layers: Vec<u32>,
    /// How many query tokens of each layer, evenly spread over the file's; 1 is the last.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    queries: u16,
    /// Blocks of one KV head whose original keys the GPU keeps after use, and as many for values. Outputs do
    /// not depend on it.
    #[arg(long, value_name = "BLOCKS", default_value_t = 64)]
    scratch: u32,
    /// Show every query token of every head, not the one with the tightest bound alone.
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    backend: BackendArguments,
    /// Draw bound against true error into PREFIX.svg and PREFIX.png.
    #[arg(long, value_name = "PREFIX")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    report: ReportArguments,
}

/// Why a layer cannot be attended to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Extents that the scheme does not take, or what it reports.
    #[error("{layer}: {source}")]
    Scheme {
        /// The layer.
        layer: String,
        /// What is wrong.
        source: kv::Error,
    },
}

impl CommandError for Error {}

/// Runs the command.
///
/// # Errors
/// Bad input, a device that fails, or a bound that does not hold.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let kv = &scheme::one(&arguments.kv)?;
    let report = arguments.report.open(Some(&arguments.file), None)?;
    let picture =
        arguments.plot.as_ref().map(|prefix| Picture::new(prefix, Some(&arguments.file))).transpose()?;
    let mut file = TensorFile::open(&arguments.file)?;
    let layers = layers::layers(&file, &arguments.layers)?;
    let chosen = layers.iter().map(|layer| layer.choose(arguments.queries.into()));
    let chosen = chosen.collect::<Result<Vec<_>, _>>()?;
    let (device, gpu_note) = match arguments.backend.open()? {
        Gpu::Ready(device) => (device, None),
        Gpu::None(reason) => (Device::cpu(EmuOptions::default()), Some(reason)),
    };
    let stream = Stream::new(&device)?;
    let setting = Setting { device: &device, stream: &stream, kv, scratch: arguments.scratch };

    let bar = progress::bar(layers.len());
    let mut done = Vec::new();
    for (layer, rows) in layers.iter().zip(&chosen) {
        bar.set_message(layer.name.clone());
        done.push(match layer.dtype {
            Dtype::Bf16 => step::run(&setting, layer, &layer.read::<bf16>(&mut file)?, rows)?,
            Dtype::F16 | Dtype::F32 => step::run(&setting, layer, &layer.read::<f16>(&mut file)?, rows)?,
        });
        bar.inc(1);
    }
    bar.finish_and_clear();

    let found = summary(&done);
    let machine = match gpu_note {
        None => device.info().name.clone(),
        Some(_) => "emulator".to_owned(),
    };
    let mut tables = format!("{}: {kv}, on {machine}", arguments.file.display());
    if let Some(note) = &gpu_note {
        // The first clause says what is missing; the rest is advice.
        tables += &format!("; no GPU: {}", note.split("; ").next().unwrap_or(note));
    }
    tables += "\n\n";
    for layer in &done {
        tables += &report::layer(layer, arguments.all);
    }
    tables += report::LEGEND;
    tables += &format!("\n{}", found.lines());
    if let Some(picture) = &picture {
        let stem = arguments.file.file_name().unwrap_or(arguments.file.as_os_str());
        let title = format!("Bound and true error: {}, {kv}", stem.display());
        picture.write(&Heads { title, layers: &done })?;
    }
    let json = Report {
        command: "attend",
        version: env!("CARGO_PKG_VERSION"),
        file: arguments.file.display().to_string(),
        kv: kv.to_string(),
        device: machine,
        gpu_note: gpu_note.as_deref(),
        summary: found.clone(),
        layers: &done,
    };
    report.finish(&tables, &json)?;
    let heads = text::count(found.heads as u64);
    match (found.violations, found.dense_bits_differing) {
        (0, 0) => Ok(()),
        (0, bits) => Err(Failure::Differs(format!(
            "{bits} of {heads} heads came from the exact fallback with other bits than dense attention; run `ferrokv check`, \
             and report this with its output"
        ))),
        (violated, _) => Err(Failure::Differs(format!(
            "{violated} of {heads} heads are further off than their bound; run `ferrokv check`, and report this with the \
             file"
        ))),
    }
}
