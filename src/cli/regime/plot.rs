//! `ferrokv regime plot`: where a scheme pays, as a picture.

use super::Error;
use super::fit::head;
use super::judged::{Judged, best};
use super::map::{Predicted, Projection, Regime, projected};
use super::record::Measured;
use super::traffic::{Fit, Form};
use crate::cli::failure::Failure;
use crate::cli::output::ReportArguments;
use crate::cli::picture::Sheet;
use crate::cli::scheme::DENSE;
use crate::cli::table::{Align, Table};
use crate::cli::tokens::{Counts, short};
use clap::ValueEnum;
use serde::Serialize;
use std::path::PathBuf;

const LONG: &str = "\
Draws where a KV scheme pays: the time of a step with `dense` over one with the scheme, by context and number of \
sequences, from a fit to records of `ferrokv bench model --json` (`ferrokv regime fit` says how good that is).

Each square has the predicted speed-up: in brackets outside the contexts and batches that were measured. Squares that were \
measured have a frame, and the measured speed-up below the predicted one. Hatched ones have weights and dense caches \
that are more than the GPU's memory: nothing can be measured there. A thick line is where the speed-up passes 1.

Bytes at contexts that were not measured are those that the scheme itself counts where these give the record's bytes, \
otherwise on a line through them.

With --project a constant is put in the place of the fitted one: c0=0 is a program without fixed costs, c1=0 a scheme \
that costs its bytes alone. Such a map is no measurement.

Exit codes: 0 done; 2 bad input.";

const EXAMPLES: &str = "\
Examples:
  ferrokv regime plot model.json -o regime.svg
  ferrokv regime plot model.json --kv gather:production --contexts 4K..256K --batches 1,2,4 -o production.png
  ferrokv regime plot model.json --project c0=0,c1=0 -o projected.svg --json projected.json";

/// The most squares along a side.
const MOST: usize = 24;

/// Where a scheme pays: predicted speed-ups over context and batch, beside what was measured.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Records of `ferrokv bench model --json`, of one model on one device.
    #[arg(value_name = "RECORD", required = true)]
    records: Vec<PathBuf>,
    /// The scheme, as the records name it; without it the first one that is not dense.
    #[arg(long, value_name = "SCHEME")]
    kv: Option<String>,
    /// The picture, .svg or .png; replaced if it exists.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// The form of the model; best is the one that predicts cells held out best.
    #[arg(long, value_enum, default_value_t = Choice::Best)]
    fit: Choice,
    /// Constants in place of the fitted ones, separated by commas: c0, c1, r in ms, beta in TB/s.
    #[arg(long, value_name = "NAME=VALUE", value_delimiter = ',')]
    project: Vec<Projection>,
    /// Tokens of each sequence: a list, or FIRST..LAST by doubling; K and M may follow a number.
    #[arg(long, value_name = "LIST", default_value = "8K..1M", value_parser = side)]
    contexts: Counts,
    /// Sequences, likewise.
    #[arg(long, value_name = "LIST", default_value = "1..64", value_parser = side)]
    batches: Counts,
    #[command(flatten)]
    report: ReportArguments,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Choice {
    Best,
    Paper,
    Rows,
}

fn side(text: &str) -> Result<Counts, String> {
    let counts: Counts = text.parse()?;
    match counts.0.len() {
        0..=MOST => Ok(counts),
        many => Err(format!("{many} values are more than the {MOST} that a map has room for")),
    }
}

#[derive(Serialize)]
struct Report<'a> {
    schema: u32,
    command: &'static str,
    records: &'a [PathBuf],
    commits: &'a [String],
    model: &'a str,
    device: &'a str,
    memory_bytes: Option<u64>,
    /// With its projected constants.
    fit: &'a Fit,
    projections: Vec<String>,
    #[serde(flatten)]
    regime: &'a Regime,
}

/// Runs the command.
///
/// # Errors
/// Records that cannot be read or fitted, a file that cannot be written.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let sheet = Sheet::new(&arguments.output, &arguments.records)?;
    let report = arguments.report.open(None, Some(&arguments.output))?;
    for input in &arguments.records {
        arguments.report.open(Some(input), None)?;
    }
    let measured = Measured::read(&arguments.records)?;
    let asked: Vec<String> = arguments.kv.iter().cloned().collect();
    let (schemes, fits) = super::fits(&measured, &asked)?;
    let kv = schemes.first().ok_or(Error::NoOther)?;
    let judged = match arguments.fit {
        Choice::Best => best(&fits),
        Choice::Paper => fits.iter().find(|judged| judged.fit.form == Form::Paper),
        Choice::Rows => fits.iter().find(|judged| judged.fit.form == Form::Rows),
    };
    let judged = match judged {
        Some(judged) => judged,
        // Why not, in its own words.
        None => &Judged::new(Form::Rows, &measured.cells, &schemes)
            .map_err(|why| Error::unfit(Form::Rows, why))?,
    };
    let fit = projected(&judged.fit, &arguments.project)?;
    let projections: Vec<String> = arguments.project.iter().map(ToString::to_string).collect();
    let constants = constants(&fit, kv);
    let regime = Regime::new(&measured, &fit, kv, (&arguments.contexts.0, &arguments.batches.0), &constants)?;
    let about = legend(judged, &constants, &projections, &measured);
    let title = format!("{}, {}: a step of {DENSE} over one of {kv}", measured.model, measured.device);
    sheet.write(&regime.picture(title, about))?;
    let tables = format!(
        "{}\n{}: {}\n{constants}{}\nbytes of {DENSE} {}, of {kv} {}\n\n{}\n{} written\n",
        head(&measured),
        fit.form.name(),
        judged.formula,
        projection(&projections),
        regime.bytes[0],
        regime.bytes[1],
        table(&regime),
        arguments.output.display(),
    );
    report.finish(
        &tables,
        &Report {
            schema: 1,
            command: "regime plot",
            records: &measured.files,
            commits: &measured.commits,
            model: &measured.model,
            device: &measured.device,
            memory_bytes: measured.memory_bytes,
            fit: &fit,
            projections,
            regime: &regime,
        },
    )
}

fn constants(fit: &Fit, kv: &str) -> String {
    let row = fit.row.map_or_else(String::new, |row| format!(", r {:.2} ms", row.value * 1e-3));
    let c1 = fit.c1.iter().find(|(scheme, _)| scheme == kv);
    let c1 = c1.map_or_else(String::new, |(_, c1)| format!(", c1 {:.2} ms", c1.value * 1e-3));
    format!("β {:.2} TB/s, c0 {:.2} ms{row}{c1}", fit.beta.value, fit.c0.value * 1e-3)
}

fn projection(projections: &[String]) -> String {
    if projections.is_empty() { String::new() } else { format!("; projected: {}", projections.join(", ")) }
}

fn legend(judged: &Judged, constants: &str, projections: &[String], measured: &Measured) -> Vec<String> {
    let off = match judged.worst_held_out {
        Some(worst) => format!("off by up to {:.1} % on cells held out", 100.0 * worst),
        None => "no cell can be held out".into(),
    };
    let memory = match measured.memory_bytes {
        Some(bytes) => format!("hatched: weights and dense caches exceed {:.0} GB", bytes as f64 * 1e-9),
        None => "the device's memory is not known".into(),
    };
    vec![
        format!("{}: {}", judged.fit.form.name(), judged.formula),
        format!("{constants}{}; {off}", projection(projections)),
        format!("framed: measured; in brackets: beyond what was measured; {memory}; thick line: speed-up 1"),
    ]
}

fn table(regime: &Regime) -> String {
    let contexts: Vec<String> =
        regime.squares.first().into_iter().flatten().map(|square| short(square.place.context)).collect();
    let columns = [("batch", Align::Right)]
        .into_iter()
        .chain(contexts.iter().map(|context| (context.as_str(), Align::Right)));
    let mut table = Table::new(&columns.collect::<Vec<_>>());
    let cell = |square: &Predicted| {
        let mark = if square.too_large == Some(true) { "*" } else { "" };
        let measured = square.measured.map_or_else(String::new, |x| format!(" [{x:.2}]"));
        let speedup = format!("{:.2}{mark}", square.speedup);
        if square.inside { format!("{speedup}{measured}") } else { format!("({speedup}){measured}") }
    };
    for row in &regime.squares {
        let batch = row.first().map_or_else(String::new, |square| square.place.batch.to_string());
        table.row([batch].into_iter().chain(row.iter().map(cell)));
    }
    table.render()
        + "[measured], (beyond what was measured), * weights and dense caches exceed the device's memory\n"
}
