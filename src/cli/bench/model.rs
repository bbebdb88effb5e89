//! `ferrokv bench model`: a step of decoding of a whole model, by KV scheme and context.

use super::attention::Ceiling;
use super::record::{Report, Skipped, not_measured};
use super::seconds;
use crate::cli::backend::{BackendArguments, Gpu};
use crate::cli::environment::Environment;
use crate::cli::failure::Failure;
use crate::cli::output::ReportArguments;
use crate::cli::progress;
use crate::cli::scheme::{self, DENSE};
use crate::cli::table::{Align, Table};
use crate::cli::text;
use crate::cli::timing::{Repetition, Timing};
use crate::cli::tokens::{count, short};
use host::kv::{Capacity, Selection, Summary};
use host::model::forward::{Error as ForwardError, Runner};
use host::model::kernels::Choice;
use host::model::linear::Fusing;
use host::model::synthetic::{self, Packing, Shape};
use host::model::{Model, fetched};
use host::{BackendKind, Device};
use serde::Serialize;
use simt::emu::EmuOptions;
use std::path::PathBuf;
use std::time::Instant;

/// Bytes that are read to see what the memory reaches.
const CEILING_BYTES: u64 = 1 << 30;
/// Steps before those that count.
const WARM: usize = 20;
/// What every step reads.
const TOKEN: u32 = 1;
/// The seed of the random weights.
const SEED: u64 = 1;

const LONG: &str = "\
Times a model's step of decoding, embedding to chosen token, over caches of several schemes and lengths: on a GPU one graph \
a step, on the CPU its own path. A cache is filled with random keys and values up to its context, and the steps follow; every \
step's time is that of a user who waits for its token.

Every step reads the same token, so that the queries of neighbouring steps differ by their rotation; with --chosen-tokens each \
reads what the one before chose: of random weights noise. What part of the originals that a certified cache uses was found on \
the device, and what came over the bus, is said.

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
  ferrokv bench model --model other.gguf --steps 200 --json model.json";

/// Times a model's step of decoding, embedding to chosen token, over caches of several schemes and lengths.
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
    /// Tokens in the cache when the last step ends, separated by commas; K is 1024.
    #[arg(long, value_name = "LIST", default_value = "1K,4K", value_delimiter = ',', value_parser = count)]
    contexts: Vec<u32>,
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

/// One scheme at one context.
#[derive(Clone, Debug, Serialize)]
struct Row {
    kv: String,
    /// Tokens of each sequence at the last step.
    context: u32,
    /// Sequences.
    batch: u32,
    steps: usize,
    /// Of a step, the host's wait for the token included.
    median_us: f64,
    p10_us: f64,
    p90_us: f64,
    tokens_per_second: f64,
    /// What a step reads at least.
    weight_bytes: u64,
    kv_bytes: u64,
    /// What they take at the memory's speed; GPU only.
    read_us: Option<f64>,
    /// The rest.
    fixed_us: Option<f64>,
    /// The dense scheme's median at this context and batch over this one's.
    times_dense: Option<f64>,
    /// The cache's bytes in the device's memory, and in the host's.
    cache_bytes: u64,
    cache_host_bytes: u64,
    /// Launches and copies of the graph.
    launches: Option<usize>,
    /// Seconds that filling the cache took.
    fill_seconds: f64,
    /// Of the steps that count.
    report: Option<Summary>,
    /// Bytes that a step read from the originals in the host's memory.
    bus_bytes: Option<u64>,
    /// Of the tiles that were used from their originals, the share that was on the device already.
    found: Option<f64>,
}

/// What the report has besides rows.
#[derive(Serialize)]
struct More {
    model: String,
    key_scale: f32,
    chosen_tokens: bool,
    /// The memory's speed, GPU only.
    read_gb_per_s: Option<f64>,
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
    let gpu = (device.kind() == BackendKind::Cuda).then_some(&device);
    let spinner = progress::spinner("opening the model");
    let (mut runner, name) = {
        let model = match (&path, arguments.synthetic) {
            (Some(path), _) => Model::open(path)?,
            (None, shape) => {
                let shape = shape.unwrap_or(Shape::Llama31_8B);
                synthetic::model(shape.config(), Packing::Q8_0, SEED)?
            }
        };
        (Runner::new(&model, &device)?, model.config.name.clone())
    };
    if let Some(fusing) = arguments.fuse_up_to {
        runner.set_fusing(fusing);
    }
    let speed = match gpu {
        None => None,
        Some(device) => {
            spinner.set_message("what the memory reaches");
            let repetition = Repetition { seconds: 0.3, least: 3, most: 200 };
            let ceiling = Ceiling::measure(device, CEILING_BYTES, repetition)?;
            Some(ceiling.bytes as f64 / ceiling.timing.median_us * 1e6)
        }
    };
    let (mut rows, mut skipped) = (Vec::<Row>::new(), Vec::new());
    let wanted =
        arguments.contexts.iter().flat_map(|context| arguments.batches.iter().map(|b| (*context, *b)));
    for ((context, batch), scheme) in wanted.flat_map(|at| schemes.iter().map(move |scheme| (at, scheme))) {
        let beside = if batch == 1 { String::new() } else { format!(", {batch} sequences") };
        let what = format!("{scheme} at {}{beside}", short(context));
        let mut skip = |reason: String| skipped.push(Skipped { what: what.clone(), reason });
        if start.elapsed().as_secs_f64() > arguments.seconds {
            skip(format!("--seconds {} had passed", arguments.seconds));
            continue;
        }
        let least = arguments.steps as usize + WARM + 1;
        if (context as usize) < least {
            skip(format!(
                "{} steps need a context of {least} tokens; ask for fewer --steps",
                arguments.steps
            ));
            continue;
        }
        spinner.set_message(what.clone());
        match measure(&mut runner, &device, scheme, (context, batch), speed, arguments) {
            Ok(row) => rows.push(row),
            // Others may fit, unless the device itself has failed.
            Err(error) => {
                device.synchronize()?;
                skip(error.to_string());
            }
        }
    }
    spinner.finish_and_clear();
    for i in 0..rows.len() {
        let at = (rows[i].context, rows[i].batch);
        let dense = rows.iter().find(|row| row.kv == DENSE && (row.context, row.batch) == at);
        rows[i].times_dense = dense.map(|dense| dense.median_us / rows[i].median_us);
    }
    let environment = Environment::here(gpu, arguments.commit.as_deref());
    let memory = speed.map_or_else(String::new, |s| format!("; reads at {:.0} GB/s", s * 1e-9));
    let tables =
        format!("{}\n{name}{memory}\n\n{}{}", environment.line(), table(&rows), not_measured(&skipped));
    let more = More {
        model: name,
        key_scale: arguments.key_scale,
        chosen_tokens: arguments.chosen_tokens,
        read_gb_per_s: speed.map(|s| s * 1e-9),
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

fn measure(
    runner: &mut Runner,
    device: &Device,
    scheme: &Selection,
    (context, batch): (u32, u32),
    speed: Option<f64>,
    arguments: &Arguments,
) -> Result<Row, ForwardError> {
    let (tokens, steps) = (context as usize, arguments.steps as usize);
    let capacity = Capacity { tokens, sequences: batch as usize };
    let mut cache = scheme.open(device, runner.geometry(), Some(runner.rope()), capacity)?;
    let start = Instant::now();
    // The steps, those to warm up, and the token before them.
    let before = tokens.saturating_sub(steps + WARM + 1);
    runner.fill(&mut *cache, 0, before, arguments.key_scale)?;
    for _ in 1..batch {
        let sequence = runner.join(&mut *cache)?;
        runner.fill(&mut *cache, sequence, before, arguments.key_scale)?;
    }
    let fill_seconds = start.elapsed().as_secs_f64();
    let mut first = TOKEN;
    for sequence in 0..batch as usize {
        first = runner.prefill_of(sequence, &[TOKEN], &mut *cache, (Choice::Greedy, 0))?;
    }
    let before = runner.traffic(&*cache)?;
    let mut decoder = runner.decoder(first, &mut *cache, Choice::Greedy)?;
    let (mut times, mut report) = (Vec::with_capacity(steps), None::<Summary>);
    for step in 0..WARM + steps {
        if !arguments.chosen_tokens {
            decoder.set_token(TOKEN)?;
        }
        let start = Instant::now();
        decoder.step()?;
        let time = start.elapsed().as_secs_f64() * 1e6;
        if step < WARM {
            continue;
        }
        times.push(time);
        report = Summary::join(report, Summary::of(&decoder.cache().report()?));
    }
    let launches = decoder.graph_len();
    drop(decoder);
    runner.check_cache(&mut *cache)?;
    let traffic = runner.traffic(&*cache)?.zip(before).map(|(after, before)| after.since(before));
    let timing = Timing::new(times, 1);
    let (weight_bytes, kv_bytes) = (runner.step_bytes(), cache.step_bytes());
    let read_us = speed.map(|speed| (weight_bytes + kv_bytes) as f64 / speed * 1e6);
    Ok(Row {
        kv: scheme.to_string(),
        context,
        batch,
        steps,
        median_us: timing.median_us,
        p10_us: timing.p10_us,
        p90_us: timing.p90_us,
        tokens_per_second: f64::from(batch) * 1e6 / timing.median_us,
        weight_bytes,
        kv_bytes,
        read_us,
        fixed_us: read_us.map(|read| timing.median_us - read),
        times_dense: None,
        cache_bytes: cache.bytes(),
        cache_host_bytes: cache.host_bytes(),
        launches,
        fill_seconds,
        report,
        bus_bytes: traffic.map(|traffic| traffic.read_bytes / (WARM + steps) as u64),
        found: traffic.map(host::kv::Traffic::found_share),
    })
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new(&[
        ("KV", Align::Left),
        ("context", Align::Right),
        ("batch", Align::Right),
        ("step", Align::Right),
        ("tokens/s", Align::Right),
        ("dense/this", Align::Right),
        ("bytes take", Align::Right),
        ("fixed", Align::Right),
        ("cache", Align::Right),
        ("over the bus", Align::Right),
        ("found", Align::Right),
        ("heads computed exactly", Align::Right),
    ]);
    let or_nothing = |x: Option<f64>| x.map_or_else(String::new, text::microseconds);
    for row in rows {
        table.row([
            row.kv.clone(),
            short(row.context),
            row.batch.to_string(),
            text::microseconds(row.median_us),
            format!("{:.1}", row.tokens_per_second),
            row.times_dense.map_or_else(String::new, |ratio| format!("{ratio:.2}")),
            or_nothing(row.read_us),
            or_nothing(row.fixed_us),
            text::bytes(row.cache_bytes),
            row.bus_bytes.map_or_else(String::new, text::bytes),
            row.found.map_or_else(String::new, |share| format!("{:.0} %", 100.0 * share)),
            row.report.map_or_else(String::new, |known| format!("{} of {}", known.exact_heads, known.heads)),
        ]);
    }
    table.render()
}
