//! `ferrokv regime fit`: the constants, and how well they do.

use super::judged::{FAILS, Judged, best};
use super::record::Measured;
use super::traffic::{Estimate, Form};
use crate::cli::failure::Failure;
use crate::cli::output::ReportArguments;
use crate::cli::table::{Align, Table};
use crate::cli::tokens::short;
use crate::cli::{scheme, text};
use serde::Serialize;
use std::path::PathBuf;

const LONG: &str = "\
Fits what a step of decoding takes to records of `ferrokv bench model --json`, by least squares: β and c0 on the rows of \
`dense`, c1 on those of each other scheme. A row counts by its error over its time.

Two forms: 'paper' is that of the paper; 'rows' has a term r besides for each sequence behind the first: what it takes but for \
its cache. It takes rows of two batches.

Of each constant: its value, its standard error, and the interval at 95 % (Student's, of what is left over: with one row \
left over it is wide). Those of c1 hold given the other constants. Of each form: R² of the dense times and of the speed-ups, \
the largest error of a time, and the largest one held out: each context and batch is predicted by a fit to all the \
others, as a bench that skipped it would have been.

What came over the bus is not priced: of schemes with originals in the host's memory it is in c1.

Exit codes: 0 done; 2 bad input.";

const EXAMPLES: &str = "\
Examples:
  ferrokv bench model --synthetic llama-3.1-8b --contexts 8K,32K,128K --batches 1,2,4,8 --kv dense,gather --json model.json
  ferrokv regime fit model.json
  ferrokv regime fit monday.json tuesday.json --kv gather --json fit.json";

/// The constants of a step's time, with their errors, from records of `ferrokv bench model`.
#[derive(clap::Args)]
#[command(long_about = LONG, after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Records of `ferrokv bench model --json`, of one model on one device.
    #[arg(value_name = "RECORD", required = true)]
    records: Vec<PathBuf>,
    /// The schemes to fit besides dense, as the records name them, separated by commas; without it all.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    kv: Vec<String>,
    #[command(flatten)]
    report: ReportArguments,
}

#[derive(Serialize)]
struct Report<'a> {
    schema: u32,
    command: &'static str,
    records: &'a [PathBuf],
    commits: &'a [String],
    model: &'a str,
    device: &'a str,
    weight_bytes: Option<u64>,
    read_tb_per_s: Option<f64>,
    /// The form that predicts cells held out best.
    best: Option<Form>,
    fits: &'a [Judged],
}

/// Runs the command.
///
/// # Errors
/// Records that cannot be read or fitted.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let report = arguments.report.open(None, None)?;
    for input in &arguments.records {
        arguments.report.open(Some(input), None)?;
    }
    let measured = Measured::read(&arguments.records)?;
    let (_, fits) = super::fits(&measured, &arguments.kv)?;
    let best = best(&fits).map(|judged| judged.fit.form);
    let mut tables = head(&measured);
    for judged in &fits {
        tables += &format!("\n{}", shown(judged, &measured));
    }
    tables += &format!("\n{}", verdict(&fits, best));
    let json = Report {
        schema: 1,
        command: "regime fit",
        records: &measured.files,
        commits: &measured.commits,
        model: &measured.model,
        device: &measured.device,
        weight_bytes: measured.cells.first().map(|cell| cell.weight_bytes),
        read_tb_per_s: measured.read_tb_per_s,
        best,
        fits: &fits,
    };
    report.finish(&tables, &json)
}

/// What the rows are of.
pub fn head(measured: &Measured) -> String {
    let dense = measured.cells.iter().filter(|cell| cell.is_dense()).count();
    let mut out = format!(
        "{}, {}: {} of {}, {dense} of them of {}\n",
        measured.model,
        measured.device,
        text::plural(measured.cells.len(), "row"),
        text::plural(measured.files.len(), "record"),
        scheme::DENSE,
    );
    if measured.commits.len() > 1 {
        out += &format!("Records of several commits: {}.\n", measured.commits.join(", "));
    }
    if measured.over_the_bus > 0 {
        out += &format!(
            "{} moved bytes over the bus besides, which the model does not price.\n",
            text::plural(measured.over_the_bus, "row")
        );
    }
    out
}

fn percent(share: f64) -> String {
    format!("{:+.1} %", 100.0 * share)
}

fn or_dash(x: Option<f64>) -> String {
    x.map_or_else(|| "–".into(), |x| format!("{x:.5}"))
}

/// Constants and cells of a fit.
fn shown(judged: &Judged, measured: &Measured) -> String {
    let fit = &judged.fit;
    let mut constants = Table::new(&[
        ("constant", Align::Left),
        ("value", Align::Right),
        ("standard error", Align::Right),
        ("95 %", Align::Left),
    ]);
    let mut row = |name: String, estimate: Estimate, scale: f64, unit: &str| {
        let end = |x: f64| if x.is_finite() { format!("{:.3}", x * scale) } else { "∞".into() };
        let interval = estimate
            .interval
            .map_or_else(String::new, |(low, high)| format!("[{}, {}]", end(low), end(high)));
        let error = estimate.standard_error.map_or_else(String::new, |error| format!("{:.3}", error * scale));
        constants.row([name, format!("{:.3} {unit}", estimate.value * scale), error, interval]);
    };
    row("β".into(), fit.beta, 1.0, "TB/s");
    row("c0".into(), fit.c0, 1e-3, "ms");
    fit.row.into_iter().for_each(|estimate| row("r".into(), estimate, 1e-3, "ms"));
    for (kv, estimate) in &fit.c1 {
        row(format!("c1 of {kv}"), *estimate, 1e-3, "ms");
    }
    let mut cells = Table::new(&[
        ("KV", Align::Left),
        ("context", Align::Right),
        ("batch", Align::Right),
        ("step", Align::Right),
        ("fit", Align::Right),
        ("off", Align::Right),
        ("held out", Align::Right),
        ("speed-up", Align::Right),
        ("fit", Align::Right),
        ("held out", Align::Right),
    ]);
    for row in &judged.cells {
        let ratio = |x: Option<f64>| x.map_or_else(String::new, |x| format!("{x:.2}"));
        cells.row([
            row.kv.clone(),
            short(row.place.context),
            row.place.batch.to_string(),
            text::microseconds(row.measured_us),
            text::microseconds(row.predicted_us),
            percent(row.error),
            row.held_out_error.map_or_else(String::new, percent),
            ratio(row.speedup.map(|of| of.measured)),
            ratio(row.speedup.map(|of| of.predicted)),
            ratio(row.speedup.and_then(|of| of.held_out)),
        ]);
    }
    let reads = measured.read_tb_per_s.map_or_else(String::new, |speed| {
        format!("; β is {:.2} of what reading alone reached, {speed:.2} TB/s", fit.beta.value / speed)
    });
    format!(
        "{}: {}\n{}R² {} of dense times, {} of speed-ups; {} left over{reads}\n\n{}",
        fit.form.name(),
        judged.formula,
        constants.render(),
        or_dash(judged.r2_times),
        or_dash(judged.r2_speedups),
        text::plural(fit.freedom, "dense row"),
        cells.render(),
    )
}

/// Which form to go by.
fn verdict(fits: &[Judged], best: Option<Form>) -> String {
    let mut out = String::new();
    for judged in fits {
        let held_out = match judged.worst_held_out {
            Some(worst) => format!("{:.1} % of cells held out", 100.0 * worst),
            None => "no cell can be held out".into(),
        };
        let fails = match judged.fails {
            true => format!(": above {:.0} %, so it does not describe these steps", 100.0 * FAILS),
            false => String::new(),
        };
        out += &format!(
            "{}: off by up to {:.1} %, {held_out}{fails}.\n",
            judged.fit.form.name(),
            100.0 * judged.worst
        );
    }
    match (fits, best) {
        ([_], _) => out + "rows: cannot be fitted to these rows; it takes rows of two batches.\n",
        (_, Some(best)) => out + &format!("{} predicts cells held out best.\n", best.name()),
        (_, None) => out,
    }
}
