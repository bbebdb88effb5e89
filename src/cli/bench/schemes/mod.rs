//! `ferrokv bench schemes`: every scheme beside the others by bytes, loss and speed.

mod picture;
mod quality;
mod report;
mod speed;
mod table;

use super::attention::{Shape, compared, scale};
use super::record::{Report, Skipped};
use super::seconds;
use crate::cli::environment::Environment;
use crate::cli::failure::{CommandError, Failure};
use crate::cli::output::ReportArguments;
use crate::cli::picture::Picture;
use crate::cli::scheme;
use crate::cli::subject::SubjectArguments;
use crate::cli::tokens::count;
use clap::ValueEnum;
use host::eval::statistics;
use host::kv::Selection;
use std::path::PathBuf;
use std::time::Instant;

const LONG: &str = "\
Measures KV schemes beside each other and beside the dense cache: a table with a row a scheme, by the bytes that a token takes.

Bytes are of a token and KV head. All memory is what a cache of so many tokens takes over their number: metadata, tokens that \
stay in f16, copies in the host's memory. A step reads less where a scheme leaves something out. Of each scheme both are given \
at the longest measured context of the first shape; without speed, at the end of a window of the model.

Quality is that of a model over a text. Windows are read to their half in chunks, as by `ferrokv eval ppl`; the second half is \
decoded token by token over the dense cache and over every scheme at once, teacher-forced, as by `ferrokv compare`. KL is the \
divergence of the next token's distribution from dense's, in nats a step; perplexity is over dense's on the same windows. Both \
have a 95 % bootstrap interval over windows. All schemes have the same windows: if time ends, all have fewer.

Speed is that of attention, one layer's step of decoding as by `ferrokv bench attention`: the time over the dense cache over \
the time over the scheme's, so 2 is twice as fast. On a GPU it is the median over replays of a graph, over caches that take \
turns; on a CPU that of the CPU's own path on the host's clock.

The bound is the largest that a scheme states for one of the compared rows of these steps, over the norm of the output: \
random keys and values, of which attention is flat. Above 1 it says nothing. What a scheme states of the model's own heads is in the \
record.

A scheme that needs a file (codebooks, an order of channels) is given it as with other commands. Without one it has no \
quality, and its speed is over codes made from the input itself; a file that is given is for quality alone, as its heads are the model's. \
Make files from another text than --text.

Everything ends within --seconds, with a report: what there was no time for, and what a scheme has no kernels for, is listed in \
the table and in the record.

Exit codes: 0 done; 1 a compared output is wrong (the report is written and says which); 2 bad input; 130 interrupted.";

const EXAMPLES: &str = "\
Examples:
  ferrokv bench schemes                                             every scheme, with what is there
  ferrokv bench schemes --kv gtq/k=4/v=4,gtq,kivi --contexts 8K,128K --json schemes.json --plot schemes
  ferrokv bench schemes --only speed --shapes 32/8/128 --contexts 128K,1M --batches 1,8
  ferrokv calibrate --scheme vecinfer -o codes.safetensors
  ferrokv bench schemes --only quality --kv vecinfer/codes=codes.safetensors,gtq/k=2/v=2 --windows 10
  ferrokv bench schemes --backend cpu --contexts 8K --context 512 --windows 3";

/// Half of the measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Only {
    /// What a model's text loses.
    Quality,
    /// How fast a step is.
    Speed,
}

/// Measures KV schemes beside each other: bytes, what a model loses over them, and how fast attention is.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// KV schemes; every one with its defaults if none is named.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(long_help = scheme::long("KV schemes; every one with its defaults if none is named"))]
    kv: Vec<String>,
    /// One of both alone: quality or speed.
    #[arg(long, value_name = "WHAT", value_enum)]
    only: Option<Only>,
    /// Query heads / KV heads / head_dim that speed is measured at, separated by commas.
    #[arg(long, value_name = "LIST", default_value = "32/8/128,28/4/128", value_delimiter = ',')]
    shapes: Vec<Shape>,
    /// Tokens of each sequence there, separated by commas, measured in this order; K is 1024.
    #[arg(long, value_name = "LIST", default_value = "128K,8K,1M", value_delimiter = ',', value_parser = count)]
    contexts: Vec<u32>,
    /// Sequences at once there, separated by commas.
    #[arg(long, value_name = "LIST", default_value = "1", value_delimiter = ',', value_parser = count)]
    batches: Vec<u32>,
    /// What queries are multiplied by there, which as keys and values are about N(0, 1): attention is flat at
    /// 1 and narrow at 10.
    #[arg(long, value_name = "X", default_value_t = 3.0, value_parser = scale)]
    query_scale: f32,
    /// Seconds of repetitions of a row there.
    #[arg(long, value_name = "S", default_value_t = 0.2, value_parser = seconds)]
    seconds_per_row: f64,
    /// The text that quality is measured on: sotu or moby-dick, which ./setup --model fetched, or a file.
    #[arg(long, value_name = "NAME|FILE", default_value = "sotu")]
    text: String,
    /// Tokens of a window; its second half is decoded.
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(16..))]
    context: u32,
    /// Windows, evenly spread over the text.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    windows: u32,
    /// Which resamples the intervals are of.
    #[arg(long, value_name = "S", default_value_t = statistics::SEED)]
    seed: u64,
    /// Seconds in which everything is to end; speed gets half of them at most, if quality is measured too.
    #[arg(long, value_name = "S", default_value_t = 600.0, value_parser = seconds)]
    seconds: f64,
    /// Draw bytes against loss and speed into PREFIX.svg and PREFIX.png (replaced if they exist).
    #[arg(long, value_name = "PREFIX")]
    plot: Option<PathBuf>,
    /// The commit to name in the report.
    #[arg(long, value_name = "HASH")]
    commit: Option<String>,
    #[command(flatten)]
    subject: SubjectArguments,
    #[command(flatten)]
    report: ReportArguments,
}

impl Arguments {
    fn wants(&self, what: Only) -> bool {
        self.only.is_none_or(|only| only == what)
    }
}

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// Ctrl-C.
    #[error("interrupted; nothing was written")]
    Interrupted,
}

impl CommandError for Error {
    fn exit_code(&self) -> u8 {
        130
    }
}

/// Share of the time that speed may take where quality follows.
const SPEED_SHARE: f64 = 0.5;

/// The schemes that are asked for, dense first: every one of the registry if none is.
fn selections(arguments: &Arguments) -> Result<Vec<Selection>, Failure> {
    let every: Vec<String> = host::schemes().map(|scheme| scheme.name.to_owned()).collect();
    scheme::beside_dense(if arguments.kv.is_empty() { &every } else { &arguments.kv })
}

/// Runs the benchmark and writes what it found.
///
/// # Errors
/// What cannot be opened or written; what the device reports; Ctrl-C.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let begin = Instant::now();
    let selections = selections(arguments)?;
    let picture = arguments.plot.as_deref().map(|prefix| Picture::new(prefix, None)).transpose()?;
    let mut skipped = Vec::new();
    // What is wrong with model, text or files is said before anything is measured.
    let text = if arguments.wants(Only::Quality) { quality::text(arguments, &mut skipped)? } else { None };
    let report = arguments.report.open(text.as_ref().map(|text| text.path.as_path()), None)?;
    let (device, note) = arguments.subject.device()?;
    let gpu = note.is_none().then_some(&device);
    skipped.extend(note.clone().map(|reason| Skipped { what: "gpu".into(), reason }));
    let mut quality = match text {
        Some(text) => {
            Some(quality::Quality::open(text, arguments, &selections, (&device, note), &mut skipped)?)
        }
        None => None,
    };
    let mut rows = report::rows(&selections)?;
    if arguments.wants(Only::Speed) {
        let share = if quality.is_some() { SPEED_SHARE } else { 1.0 };
        speed::measure(arguments, &selections, &device, (begin, share), &mut rows, &mut skipped)?;
    }
    if let Some(quality) = &mut quality {
        quality.measure(begin, &mut rows, &mut skipped)?;
    }
    let found = Report::<report::Row, (), report::More> {
        schema: 1,
        command: "bench schemes",
        environment: Environment::here(gpu, arguments.subject.kernels()?, arguments.commit.as_deref()),
        seconds: begin.elapsed().as_secs_f64(),
        more: report::More::new(arguments, quality.as_ref().map(quality::Quality::about)),
        rows: report::sorted(rows),
        skipped,
        peers: None,
    };
    report.finish(&table::text(&found), &found)?;
    if let Some(picture) = &picture {
        picture.write(&picture::scatter(&found))?;
    }
    let steps: Vec<_> = found.rows.iter().flat_map(|row| row.speed.iter().cloned()).collect();
    compared(&steps)
}
