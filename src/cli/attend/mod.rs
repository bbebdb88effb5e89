//! `ferrokv attend`: attention over the keys, values and queries of a file, with each head's bound beside its true error.

mod input;
mod picture;
mod report;
mod step;

use super::backend::{BackendArguments, Gpu};
use super::failure::Failure;
use super::output::ReportArguments;
use super::picture::Picture;
use super::{progress, text};
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use half::{bf16, f16};
use host::certified::{Layout, Policy};
use host::int8::file::Dtype;
use host::tensor_file::TensorFile;
use host::{Device, Stream, certified, dense};
use picture::Heads;
use report::{Report, summary};
use simt::emu::EmuOptions;
use std::path::PathBuf;
use step::Setting;

const LONG: &str = "\
Compute attention over the keys, values and queries of a safetensors file, and hold each head's bound against its \
true error.

A layer NN is three tensors, all F16 or all BF16: `layer.NN.key` and `layer.NN.value`, [tokens, kv_heads, head_dim], \
and `layer.NN.query`, [query tokens, heads, head_dim], after RoPE and not scaled. Query head h reads KV head \
h / (heads / kv_heads). With `query_first_position` = p in the file's metadata, query row r is token p + r and sees \
keys 0 to p + r; without it, the rows are the last tokens. Each chosen query token is a sequence of its own, and \
attends to the tokens up to its own, in one step together with the others.

Schemes:
  certified  The cache holds INT8 keys and INT4 values on the GPU, originals in host memory. One pass over the \
quantized blocks gives each head an output and a bound; the heaviest blocks of 16 tokens are then replaced by their \
originals (promoted), and a head whose bound is over its budget is computed from the originals (the dense rung), \
with the bits of dense attention.
  naive      The same with nothing promoted and no budget: INT8/INT4 attention, with the bound it has.
  dense      Exact attention over the originals, with the bound on its rounding.

A bound is E_key + E_val + E_round: what quantized keys, quantized values and the arithmetic can have moved the \
head's output by, in the Euclidean norm. The true error is the distance from the formula in f64. Policies say what is \
promoted, and which bounds are too large (--json writes their thresholds): sound, the default; strict promotes more, \
checks the order of the heaviest blocks, and compares promoted blocks and a few others with their originals; fast \
promotes less; paper has the thresholds of the paper's runs, its bound, its check of the order, and no budgets; naive \
is that of the scheme. Each query chooses for itself what is promoted, where in decoding a list of an earlier token \
serves for some steps. --layout paper stores the scales and zeros of keys as f32, as the paper does: 36 bytes a token and 16 \
channels in place of 32. A head that fails a check is computed from the originals; a stored block that is not what it \
was sends all heads there (rung layer).

Without a GPU everything runs on the emulator: the same bits, and times that mean nothing but patience.

Exit codes: 0 every bound holds; 1 one does not, or the dense rung has other bits than dense attention; 2 bad input.";

const EXAMPLES: &str = "\
Examples:
  ferrokv attend assets/kv-smollm2.safetensors
  ferrokv attend assets/kv-smollm2.safetensors --layers 7,22 --queries 16 --policy strict
  ferrokv attend assets/kv-smollm2.safetensors --scheme naive --plot naive     writes naive.svg and naive.png
  ferrokv attend assets/kv-smollm2.safetensors --policy paper --layout paper
  ferrokv attend cache.safetensors --backend cuda --scratch 0 --json report.json";

/// Attend to a file's keys and values: each head's bound beside its true error.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The safetensors file to read.
    file: PathBuf,
    /// How attention is computed.
    #[arg(long, value_enum, default_value = "certified")]
    scheme: Scheme,
    /// The thresholds of the certified scheme [default: sound].
    #[arg(long, value_name = "NAME", value_parser = policy_parser())]
    policy: Option<&'static str>,
    /// How the quantized cache is stored [default: compact].
    #[arg(long, value_name = "NAME", value_parser = layout_parser())]
    layout: Option<Layout>,
    /// Only these layers, by number and separated by commas.
    #[arg(long, value_name = "N", value_delimiter = ',')]
    layers: Vec<u32>,
    /// How many query tokens of each layer, evenly spread over the file's; 1 is the last.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    queries: u16,
    /// Blocks of one KV head whose original keys the GPU keeps after use, and as many for values. Outputs do not depend
    /// on it.
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

/// How attention is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scheme {
    /// Quantized, with a bound that decides what is promoted or computed exactly.
    Certified,
    /// Exact.
    Dense,
    /// Quantized, nothing promoted.
    Naive,
}

impl Scheme {
    fn name(self) -> &'static str {
        match self {
            Scheme::Certified => "certified",
            Scheme::Dense => "dense",
            Scheme::Naive => "naive",
        }
    }
}

/// The presets, and the one that promotes nothing.
const POLICIES: [&str; 5] = ["sound", "paper", "strict", "fast", "naive"];

fn policy_parser() -> impl TypedValueParser<Value = &'static str> {
    PossibleValuesParser::new(POLICIES)
        .map(|name| POLICIES.into_iter().find(|policy| *policy == name).unwrap_or(POLICIES[0]))
}

fn layout_parser() -> impl TypedValueParser<Value = Layout> {
    PossibleValuesParser::new(Layout::ALL.map(Layout::name))
        .map(|name| Layout::ALL.into_iter().find(|layout| layout.name() == name).unwrap_or_default())
}

/// Why a file cannot be attended to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No layer at all.
    #[error(
        "{path} has no layer: tensors named layer.NN.key, layer.NN.value and layer.NN.query are needed; it has {names}"
    )]
    NoLayers {
        /// The file.
        path: String,
        /// Some names.
        names: String,
    },
    /// A layer that was asked for.
    #[error("{path} has no layer {layer}; it has layers {layers}")]
    NoLayer {
        /// The file.
        path: String,
        /// What was asked for.
        layer: u32,
        /// What there is.
        layers: String,
    },
    /// A layer that is not complete.
    #[error("{path} has no {names}, which {layer} needs; add them, or choose other layers with --layers")]
    Missing {
        /// The file.
        path: String,
        /// The layer.
        layer: String,
        /// The tensors.
        names: String,
    },
    /// A tensor of another type or shape.
    #[error("tensor '{name}' cannot be used: {reason}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What is wrong, and what is expected.
        reason: String,
    },
    /// Metadata that is no number.
    #[error(
        "{path} has the metadata query_first_position = '{text}', which is no position; make it a number"
    )]
    Position {
        /// The file.
        path: String,
        /// What is there.
        text: String,
    },
    /// A NaN or an infinity.
    #[error("tensor '{name}' has {value} at {index:?}; correct the source")]
    NonFinite {
        /// The tensor.
        name: String,
        /// The value.
        value: f32,
        /// Its index.
        index: [usize; 3],
    },
    /// More query tokens than there are.
    #[error("{layer} has queries of {rows} tokens, and --queries asks for {wanted}; ask for up to {rows}")]
    TooFewQueries {
        /// The layer.
        layer: String,
        /// What it has.
        rows: usize,
        /// What was asked for.
        wanted: usize,
    },
    /// A policy for a scheme that has none.
    #[error("--policy is of the certified scheme; leave it out with --scheme {scheme}")]
    NoPolicy {
        /// The scheme.
        scheme: &'static str,
    },
    /// A layout for a scheme that quantizes nothing.
    #[error("--layout is of quantized caches; leave it out with --scheme dense")]
    NoLayout,
    /// Extents that certified attention does not take, or what it reports.
    #[error("{layer}: {source}")]
    Certified {
        /// The layer.
        layer: String,
        /// What is wrong.
        source: certified::Error,
    },
    /// The same of dense attention.
    #[error("{layer}: {source}")]
    Dense {
        /// The layer.
        layer: String,
        /// What is wrong.
        source: dense::Error,
    },
}

/// Runs the command.
///
/// # Errors
/// Bad input, a device that fails, or a bound that does not hold.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let report = arguments.report.open(Some(&arguments.file), None)?;
    let picture =
        arguments.plot.as_ref().map(|prefix| Picture::new(prefix, Some(&arguments.file))).transpose()?;
    let scheme = arguments.scheme;
    let name = match (scheme, arguments.policy) {
        (Scheme::Certified, policy) => Some(policy.unwrap_or("sound")),
        (_, Some(_)) => return Err(Error::NoPolicy { scheme: scheme.name() }.into()),
        (Scheme::Naive, None) => Some("naive"),
        (Scheme::Dense, None) => None,
    };
    if scheme == Scheme::Dense && arguments.layout.is_some() {
        return Err(Error::NoLayout.into());
    }
    let layout = arguments.layout.unwrap_or_default();
    // There is no step before these that could have chosen for them.
    let policy = Policy { renew: 0, ..name.and_then(Policy::preset).unwrap_or_default() };
    let mut file = TensorFile::open(&arguments.file)?;
    let layers = input::layers(&file, &arguments.layers)?;
    let chosen = layers.iter().map(|layer| layer.choose(arguments.queries.into()));
    let chosen = chosen.collect::<Result<Vec<_>, _>>()?;
    let (device, gpu_note) = match arguments.backend.open()? {
        Gpu::Ready(device) => (device, None),
        Gpu::None(reason) => (Device::cpu(EmuOptions::default()), Some(reason)),
    };
    let stream = Stream::new(&device)?;
    let setting = Setting {
        device: &device,
        stream: &stream,
        scheme,
        policy: &policy,
        layout,
        scratch: arguments.scratch,
    };

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
    let mut by = name.map_or(String::new(), |policy| format!(", policy {policy}"));
    if layout == Layout::Paper {
        by += ", the paper's layout";
    }
    let mut tables = format!("{}: {}{by}, on {machine}", arguments.file.display(), scheme.name());
    if let Some(note) = &gpu_note {
        // The first clause says what is missing; the rest is advice.
        tables += &format!("; no GPU: {}", note.split("; ").next().unwrap_or(note));
    }
    tables += "\n\n";
    for layer in &done {
        tables += &report::layer(layer, arguments.all, scheme == Scheme::Dense);
    }
    tables += report::LEGEND;
    tables += &format!("\n{}", found.line());
    if let Some(picture) = &picture {
        let stem = arguments.file.file_name().unwrap_or(arguments.file.as_os_str());
        let title = format!("Bound and true error: {}, {}{by}", stem.display(), scheme.name());
        picture.write(&Heads { title, layers: &done })?;
    }
    let json = Report {
        command: "attend",
        version: env!("CARGO_PKG_VERSION"),
        file: arguments.file.display().to_string(),
        scheme: scheme.name(),
        policy: name,
        layout: name.map(|_| layout.name()),
        thresholds: name.map(|_| &policy),
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
            "{bits} of {heads} heads came from the dense rung with other bits than dense attention; run `ferrokv check`, \
             and report this with its output"
        ))),
        (violated, _) => Err(Failure::Differs(format!(
            "{violated} of {heads} heads are further off than their bound; run `ferrokv check`, and report this with the \
             file"
        ))),
    }
}
