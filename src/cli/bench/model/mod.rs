//! `ferrokv bench model`: a step of decoding of a whole model, and a prompt, by KV scheme and length.

mod made_up;
mod memory;
mod prompt;
mod step;
#[cfg(test)]
mod tests;

use super::attention::Ceiling;
use super::record::{Report, Skipped, not_measured};
use super::seconds;
use crate::cli::backend::{BackendArguments, Gpu};
use crate::cli::environment::Environment;
use crate::cli::failure::Failure;
use crate::cli::output::ReportArguments;
use crate::cli::progress;
use crate::cli::scheme::{self, DENSE};
use crate::cli::timing::Repetition;
use crate::cli::tokens::{count, short};
use host::kv::{Capacity, KvCache, Selection};
use host::model::forward::Runner;
use host::model::linear::Fusing;
use host::model::synthetic::{self, Packing, Shape};
use host::model::{Model, fetched};
use host::{BackendKind, Device};
use kernels_gpu::mixed;
use made_up::{Files, MadeUp};
use prompt::PromptRow;
use serde::Serialize;
use simt::emu::EmuOptions;
use std::path::PathBuf;
use std::time::Instant;
use step::Row;

/// Bytes that are read to see what the memory reaches.
const CEILING_BYTES: u64 = 1 << 30;
/// The seed of the random weights, and of a prompt's tokens.
const SEED: u64 = 1;
/// Contexts where nothing is asked for.
const CONTEXTS: [u32; 2] = [1 << 10, 4 << 10];

const LONG: &str = "\
Times a model's step of decoding, embedding to chosen token, over caches of several schemes and lengths: on a GPU one graph \
a step, on the CPU its own path. A cache is filled with random keys and values up to its context, and the steps follow; every \
step's time is that of a user who waits for its token.

Every step reads the same token, so that the queries of neighbouring steps differ by their rotation; with --chosen-tokens each \
reads what the one before chose: of random weights noise. What part of the originals that a certified cache uses was found on \
the device, and what came over the bus, is said.

With --prompt a prompt is timed as well, or alone: random tokens, chunk by chunk, into a new cache, up to the logits of the last \
token, by the device's clock. So what a scheme adds to a prompt is seen beside dense.

A scheme that needs a file made for the model (codebooks) is given one as elsewhere. For --synthetic, of which there is no \
text, it is made up where it is not given, from random keys and values like those that fill the caches, and the output says so: \
times are those of a calibrated model's, but for what depends on which codes there are.

Beside the bytes of a cache stands what part they are of keys and values in f16.

With --batches a step gives a token of several sequences, and reads the cache of each. On a GPU products read the weights once \
for every eight sequences (those of small models once for each of up to four). The tokens a second are those of all.

Beside each time stands what the bytes take that a step has to read, weights and cache, at the memory's measured speed; what is \
left is the fixed cost.

Exit codes: 0 done; 2 bad input.";

const EXAMPLES: &str = "\
Examples:
  ferrokv bench model                                               the model that ./setup --model fetched
  ferrokv bench model --synthetic llama-3.1-8b --contexts 1K,128K --kv dense,int8-int4,certified
  ferrokv bench model --synthetic qwen2.5-7b --contexts 8K,128K --batches 1,4
  ferrokv bench model --synthetic llama-3.1-8b --prompt 8K --kv dense,vecinfer,vecinfer/k=d8b12/v=d8b12
  ferrokv bench model --model other.gguf --steps 200 --json model.json";

/// Times a model's step of decoding, embedding to chosen token, over caches of several schemes and lengths,
/// and prompts.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The GGUF file; without it, what ./setup --model fetched.
    #[arg(long, value_name = "FILE", conflicts_with = "synthetic")]
    model: Option<PathBuf>,
    /// Random weights in 8 bits of the sizes of a known model: llama-3.1-8b, qwen2.5-7b.
    #[arg(long, value_name = "SHAPE", value_parser = shape)]
    synthetic: Option<Shape>,
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "dense,int8-int4,certified")]
    #[arg(help = scheme::short("KV schemes"))]
    #[arg(long_help = scheme::long("KV schemes"))]
    kv: Vec<String>,
    /// Tokens in the cache when the last step ends, separated by commas; K is 1024. Without it 1K,4K, or none
    /// with --prompt.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count)]
    contexts: Vec<u32>,
    /// Tokens of prompts to time, separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count)]
    prompt: Vec<u32>,
    /// Sequences of a step, separated by commas; each has the context.
    #[arg(long, value_name = "LIST", default_value = "1", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    batches: Vec<u32>,
    /// Steps that count, of each row.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    steps: u32,
    /// What keys of about N(0, 1) are multiplied by: attention is flat at 1 and narrow at 10.
    #[arg(long, value_name = "X", default_value_t = 3.0, value_parser = scale)]
    key_scale: f32,
    /// Each step reads the token that the one before chose.
    #[arg(long)]
    chosen_tokens: bool,
    /// Which products quantize their input themselves, again in each thread block: rows of up to so many
    /// channels, of matrices of up to so many thread blocks: "COLUMNS:BLOCKS". To find the best limits;
    /// without it they are the library's.
    #[arg(long, value_name = "LIMITS", value_parser = fusing, hide = true)]
    fuse_up_to: Option<Fusing>,
    /// Seconds after which no further row is begun.
    #[arg(long, value_name = "S", default_value_t = 600.0, value_parser = seconds)]
    seconds: f64,
    #[command(flatten)]
    backend: BackendArguments,
    /// The commit to name in the report.
    #[arg(long, value_name = "HASH")]
    commit: Option<String>,
    #[command(flatten)]
    report: ReportArguments,
}

fn shape(name: &str) -> Result<Shape, String> {
    let names = Shape::ALL.map(Shape::name).join(", ");
    let known = Shape::ALL.into_iter().find(|shape| shape.name() == name);
    known.ok_or_else(|| format!("'{name}' is no shape that is known; there are {names}"))
}

fn fusing(text: &str) -> Result<Fusing, String> {
    let parts = text.split_once(':').map(|(columns, blocks)| (columns.parse(), blocks.parse()));
    let Some((Ok(columns), Ok(blocks))) = parts else {
        return Err(format!("'{text}' is not COLUMNS:BLOCKS, such as 2048:512"));
    };
    Ok(Fusing { columns, blocks })
}

fn scale(text: &str) -> Result<f32, String> {
    let number = text.parse::<f32>().ok().filter(|x| (0.0..=1000.0).contains(x));
    number.ok_or_else(|| format!("'{text}' is no number from 0 to 1000"))
}

impl Arguments {
    /// Tokens that a context must have for its steps.
    fn least(&self) -> usize {
        self.steps as usize + step::WARM + 1
    }
}

/// What the report has besides rows.
#[derive(Serialize)]
struct More {
    model: String,
    key_scale: f32,
    chosen_tokens: bool,
    /// The memory's speed, GPU only.
    read_gb_per_s: Option<f64>,
    prompts: Vec<PromptRow>,
    made_up: Vec<MadeUp>,
}

/// A model that is ready to run.
struct Subject {
    runner: Runner,
    device: Device,
    name: String,
    fingerprint: String,
    vocab: u32,
}

/// A scheme that caches can be opened of.
struct Chosen {
    selection: Selection,
    /// As it was asked for, of a file its name alone.
    name: String,
    /// The option whose file was made up.
    made_up: Option<&'static str>,
}

impl Subject {
    fn open(path: Option<&PathBuf>, shape: Option<Shape>, device: Device) -> Result<Self, Failure> {
        let model = match path {
            Some(path) => Model::open(path)?,
            None => synthetic::model(shape.unwrap_or(Shape::Llama31_8B).config(), Packing::Q8_0, SEED)?,
        };
        Ok(Subject {
            runner: Runner::new(&model, &device)?,
            device,
            name: model.config.name.clone(),
            fingerprint: model.fingerprint(),
            vocab: model.config.vocab as u32,
        })
    }

    /// An empty cache, whose file is for this model if it has one.
    fn cache(&self, chosen: &Chosen, capacity: impl Into<Capacity>) -> Result<Box<dyn KvCache>, Failure> {
        let selection = chosen.selection.of_model(self.fingerprint.clone());
        Ok(selection.open(&self.device, self.runner.geometry(), Some(self.runner.rope()), capacity)?)
    }

    /// A prompt that no one wrote.
    fn random_tokens(&self, count: usize) -> Vec<u32> {
        (0..count as u64).map(|i| (mixed(SEED, i) % u64::from(self.vocab.max(1))) as u32).collect()
    }
}

/// Runs the benchmark and writes what it found.
///
/// # Errors
/// A model that cannot be opened, a scheme that there is not; what the device reports.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let start = Instant::now();
    let schemes = scheme::each_once(&arguments.kv)?;
    let path = match (&arguments.model, arguments.synthetic) {
        (Some(path), _) => Some(path.clone()),
        (None, Some(_)) => None,
        (None, None) => Some(fetched::model()?),
    };
    let report = arguments.report.open(path.as_deref(), None)?;
    let device = match arguments.backend.open()? {
        Gpu::Ready(device) => device,
        Gpu::None(_) => Device::cpu(EmuOptions::default()),
    };
    let gpu = (device.kind() == BackendKind::Cuda).then(|| device.clone());
    let spinner = progress::spinner("opening the model");
    let mut subject = Subject::open(path.as_ref(), arguments.synthetic, device.clone())?;
    if let Some(fusing) = arguments.fuse_up_to {
        subject.runner.set_fusing(fusing);
    }
    let speed = match &gpu {
        None => None,
        Some(device) => {
            spinner.set_message("what the memory reaches");
            let repetition = Repetition { seconds: 0.3, least: 3, most: 200 };
            let ceiling = Ceiling::measure(device, CEILING_BYTES, repetition)?;
            Some(ceiling.bytes as f64 / ceiling.timing.median_us * 1e6)
        }
    };
    let mut files = Files::default();
    let chosen: Vec<(String, Result<Chosen, Failure>)> = schemes
        .iter()
        .map(|scheme| {
            let name = scheme::plain(scheme);
            spinner.set_message(format!("what {name} needs"));
            (name, choose(scheme, &mut files, &subject, arguments))
        })
        .collect();
    let (mut rows, mut prompts, mut skipped) = (Vec::<Row>::new(), Vec::<PromptRow>::new(), Vec::new());
    for ((length, of), (name, chosen)) in
        wanted(arguments).iter().flat_map(|at| chosen.iter().map(move |c| (at, c)))
    {
        let what = match of {
            Of::Prompt => format!("{name}, a prompt of {}", short(*length)),
            Of::Steps(1) => format!("{name} at {}", short(*length)),
            Of::Steps(batch) => format!("{name} at {}, {batch} sequences", short(*length)),
        };
        let mut skip = |reason: String| skipped.push(Skipped { what: what.clone(), reason });
        let chosen = match chosen {
            Ok(chosen) => chosen,
            Err(error) => {
                skip(error.to_string());
                continue;
            }
        };
        if start.elapsed().as_secs_f64() > arguments.seconds {
            skip(format!("--seconds {} had passed", arguments.seconds));
            continue;
        }
        spinner.set_message(what.clone());
        let done = match of {
            Of::Prompt => prompt::measure(&mut subject, chosen, *length).map(|row| prompts.push(row)),
            Of::Steps(_) if (*length as usize) < arguments.least() => {
                let (steps, least) = (arguments.steps, arguments.least());
                skip(format!("{steps} steps need a context of {least} tokens; ask for fewer --steps"));
                continue;
            }
            Of::Steps(batch) => {
                let at = (*length, *batch);
                step::measure(&mut subject, chosen, at, speed, arguments).map(|row| rows.push(row))
            }
        };
        // Others may fit, unless the device itself has failed.
        if let Err(error) = done {
            device.synchronize()?;
            skip(error.to_string());
        }
    }
    spinner.finish_and_clear();
    beside_dense(&mut rows, &mut prompts);
    let environment =
        Environment::here(gpu.as_ref(), arguments.backend.kernels()?, arguments.commit.as_deref());
    let memory = speed.map_or_else(String::new, |s| format!("; reads at {:.0} GB/s", s * 1e-9));
    let parts = [step::table(&rows), prompt::table(&prompts), made_up::lines(files.made())];
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    let (line, name) = (environment.line(), &subject.name);
    let tables = format!("{line}\n{name}{memory}\n\n{}{}", parts.join("\n"), not_measured(&skipped));
    let more = More {
        model: subject.name.clone(),
        key_scale: arguments.key_scale,
        chosen_tokens: arguments.chosen_tokens,
        read_gb_per_s: speed.map(|s| s * 1e-9),
        prompts,
        made_up: files.made().cloned().collect(),
    };
    report.finish(
        &tables,
        &Report::<Row, (), More> {
            schema: 1,
            command: "bench model",
            environment,
            seconds: start.elapsed().as_secs_f64(),
            rows,
            more,
            skipped,
            peers: None,
        },
    )
}

/// What is timed at a length.
#[derive(Clone, Copy)]
enum Of {
    Prompt,
    /// Of so many sequences.
    Steps(u32),
}

/// Lengths, and what is timed at each.
fn wanted(arguments: &Arguments) -> Vec<(u32, Of)> {
    let contexts = match &*arguments.contexts {
        [] if arguments.prompt.is_empty() => &CONTEXTS[..],
        given => given,
    };
    let steps = contexts.iter().flat_map(|at| arguments.batches.iter().map(|b| (*at, Of::Steps(*b))));
    steps.chain(arguments.prompt.iter().map(|tokens| (*tokens, Of::Prompt))).collect()
}

/// The scheme, with a file that is made up where it lacks one and no text could have made it.
fn choose(
    scheme: &Selection,
    files: &mut Files,
    subject: &Subject,
    arguments: &Arguments,
) -> Result<Chosen, Failure> {
    let (selection, made_up) = match arguments.synthetic {
        Some(_) => files.complete(scheme, &subject.runner, &subject.fingerprint, arguments.key_scale)?,
        None => (scheme.clone(), None),
    };
    Ok(Chosen { selection, name: scheme::plain(scheme), made_up })
}

/// Each row beside the dense scheme's at the same place.
fn beside_dense(rows: &mut [Row], prompts: &mut [PromptRow]) {
    for i in 0..rows.len() {
        let at = (rows[i].context, rows[i].batch);
        let dense = rows.iter().find(|row| row.kv == DENSE && (row.context, row.batch) == at);
        rows[i].times_dense = dense.map(|dense| dense.median_us / rows[i].median_us);
    }
    for i in 0..prompts.len() {
        let dense = prompts.iter().find(|row| row.kv == DENSE && row.tokens == prompts[i].tokens);
        prompts[i].times_dense = dense.map(|dense| dense.median_us / prompts[i].median_us);
    }
}
