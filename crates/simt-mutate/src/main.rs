//! The command: breaks kernels on purpose, and says which broken one no test sees.

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use simt_mutate::{Outcome, Report, Search};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Breaks kernels on purpose, one place at a time, and says which broken kernel no test sees.
///
/// The tests run under the emulator. First each one runs alone, and the places of the kernels that it reaches
/// are recorded: barriers, fences, atomics, waits, loads, stores, votes, and handles of one type that a
/// launch takes. Then each place is broken in turn, and the tests that reach it run until one fails. A place
/// where none does is a test that is missing, or one that makes no difference: a barrier that another one
/// makes needless, say.
///
/// Exit status: 0 if every broken kernel is seen, 1 if not, 2 if the search could not be made.
///
/// Example: the kernels of one system, by the tests of one program
///
///     cargo test --no-run -p my-crate
///     simt-mutate target/debug/deps/my_tests-0123456789abcdef --place src/kernels/
#[derive(Parser)]
#[command(version, verbatim_doc_comment)]
struct Options {
    /// Programs of tests, as `cargo test --no-run` names them
    #[arg(required = true, value_name = "PROGRAM")]
    programs: Vec<PathBuf>,
    /// Only tests with this in their name or in that of their program
    #[arg(long, value_name = "TEXT", default_value = "")]
    test: String,
    /// Only places, or kernels whose handles are exchanged, with this in their name
    #[arg(long, value_name = "TEXT", default_value = "")]
    place: String,
    /// Only such changes, as `no-barrier` or `swap`; may be given again
    #[arg(long, value_name = "CHANGE")]
    change: Vec<String>,
    /// At most so many places, drawn by the seed
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// The seed of the draw, and of the order in which places are tried
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Ends after so many seconds; what was tried by then is a sample, drawn by the seed
    #[arg(long, value_name = "SECONDS")]
    limit: Option<u64>,
    /// Tests that run at the same time; 0 for one a core
    #[arg(long, default_value_t = 0)]
    jobs: usize,
    /// Leaves tests out that take longer than this unbroken; with --jobs tests take longer than alone
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    longest: u64,
    /// An earlier report over the same sources, by --json: what was seen there is not tried again. Places are
    /// lines, so those of an edited file are taken for others
    #[arg(long, value_name = "FILE")]
    earlier: Option<PathBuf>,
    /// Also write the report to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let earlier = match options.earlier.as_deref().map(Report::read).transpose() {
        Ok(earlier) => earlier,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    let search = Search {
        programs: options.programs,
        test: options.test,
        place: options.place,
        changes: options.change,
        sample: options.sample,
        seed: options.seed,
        jobs: options.jobs,
        limit: options.limit.map(Duration::from_secs),
        longest: Some(Duration::from_secs(options.longest)),
        earlier,
    };
    let style = ProgressStyle::with_template("{msg:>12} {bar:40} {pos}/{len} {eta}");
    let bar = ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let report = search.run(&|stage, done, all| {
        bar.set_message(stage);
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    let written = report.and_then(|report| {
        if let Some(path) = &options.json {
            report.write(path)?;
        }
        Ok(report)
    });
    match written {
        Ok(report) => {
            print(&report);
            if report.unseen().next().is_none() { ExitCode::SUCCESS } else { ExitCode::from(1) }
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn print(report: &Report) {
    for test in &report.failing {
        println!("fails unbroken, or takes too long; left out: {test}");
    }
    for mutant in report.unseen() {
        let tests = mutant.tests.len();
        println!("not seen by {tests} {}: {}", if tests == 1 { "test" } else { "tests" }, mutant.change);
    }
    let count = |outcome| report.mutants.iter().filter(|mutant| mutant.outcome == outcome).count();
    let [seen, hung, unseen] = [Outcome::Seen, Outcome::Endless, Outcome::Unseen].map(count);
    println!(
        "{} broken kernels: {seen} seen, {hung} did not end, {unseen} not seen; {} tests",
        report.mutants.len(),
        report.tests
    );
    if !report.left.is_empty() {
        println!("no time for {} more", report.left.len());
    }
}
