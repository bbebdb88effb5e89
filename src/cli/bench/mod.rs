//! `ferrokv bench`: how fast things are, beside what the machine allows.

mod accuracy;
mod attention;
mod cpu;
mod device;
mod int8;
mod launch;
mod model;
mod operations;
mod peers;
mod plot;
mod plot_data;
mod record;
mod report;
mod schemes;
mod sizes;
mod summary;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use super::failure::{CommandError, Failure};
use clap::Subcommand;

const LONG: &str = "\
Measures speed: kernels against the memory's ceiling, the CPU and other libraries; launches against the driver; a model's steps against \
their bytes; KV schemes by bytes, loss and speed.

Exit codes: 0 done; 1 compared bits differ (the report is written and says which); 2 bad input, or no GPU where one \
is needed.";

/// Measures speed: kernels against the memory's ceiling, the CPU and other libraries; launches against the
/// driver.
#[derive(clap::Args)]
#[command(long_about = LONG)]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Attention(Box<attention::Arguments>),
    Int8(int8::Arguments),
    Launch(launch::Arguments),
    Model(model::Arguments),
    Schemes(Box<schemes::Arguments>),
}

/// Why a benchmark could not be done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command measures a GPU and has none.
    #[error("this benchmark needs a GPU: {reason}")]
    NeedsGpu {
        /// Why there is none.
        reason: String,
    },
    /// The driver refused a call that goes around `host`.
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    #[error("CUDA error {code} while {doing}; run `ferrokv doctor` to see what the machine has")]
    Driver {
        /// The driver's code.
        code: u32,
        /// What was being done.
        doing: &'static str,
    },
    /// Captures that cannot be one trace.
    #[error("{path}: {what}; a trace is of captures of one model, with the same layers")]
    Unlike {
        /// The file.
        path: String,
        /// How it differs.
        what: String,
    },
    /// A trace that is not long enough.
    #[error("the trace has {there} {what}, and {wanted} are asked for; ask for less, or give more files")]
    ShortTrace {
        /// Tokens or layers.
        what: &'static str,
        /// Of them.
        there: u32,
        /// What was asked for.
        wanted: u32,
    },
    /// A trace with few queries.
    #[error(
        "the trace's last file has queries of {there} tokens, and --queries asks for {wanted}; ask for less, or capture with --queries {wanted}"
    )]
    FewQueries {
        /// What it has.
        there: usize,
        /// What was asked for.
        wanted: usize,
    },
    /// Some row's output was wrong.
    #[error("{rows} of {checked} compared rows are wrong: {first}; the rows say `WRONG`")]
    Wrong {
        /// How many are.
        rows: usize,
        /// How many were compared.
        checked: usize,
        /// The first of them.
        first: String,
    },
    /// Some row's bits were not those of the CPU.
    #[error("{rows} of {checked} compared rows differ from the CPU's bits: {first}; the rows say `differ`")]
    Bits {
        /// How many differ.
        rows: usize,
        /// How many were compared.
        checked: usize,
        /// The first of them.
        first: String,
    },
}

impl CommandError for Error {
    fn exit_code(&self) -> u8 {
        if matches!(self, Error::Bits { .. } | Error::Wrong { .. }) { 1 } else { 2 }
    }
}

/// An argument in seconds.
fn seconds(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|s| (0.0..=3600.0).contains(s));
    number.ok_or_else(|| format!("'{text}' is no number of seconds from 0 to 3600"))
}

/// Runs the benchmark.
///
/// # Errors
/// What cannot be opened, written or launched; bits that differ.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.what {
        What::Attention(arguments) => attention::run(arguments),
        What::Int8(arguments) => int8::run(arguments),
        What::Launch(arguments) => launch::run(arguments),
        What::Model(arguments) => model::run(arguments),
        What::Schemes(arguments) => schemes::run(arguments),
    }
}
