//! What the tests of several benchmarks use.

use super::record::Report;
use crate::cli::environment::Environment;
use crate::cli::timing::Timing;
use clap::FromArgMatches;
use serde_json::Value;
use std::path::Path;

/// The arguments of a benchmark, or what its user reads.
pub fn parse<A: clap::Args + FromArgMatches>(line: &[&str]) -> Result<A, String> {
    let command = A::augment_args(clap::Command::new("bench").no_binary_name(true));
    let matches = command.try_get_matches_from(line).map_err(|error| error.to_string())?;
    A::from_arg_matches(&matches).map_err(|error| error.to_string())
}

/// What a line is refused with.
pub fn refusal<A: clap::Args + FromArgMatches>(line: &[&str]) -> String {
    parse::<A>(line).err().unwrap_or_else(|| panic!("{line:?} was accepted"))
}

/// A report that was written.
pub fn written(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A timing of one call, all of whose percentiles are the same.
pub fn timing(median_us: f64) -> Timing {
    Timing { median_us, p10_us: median_us, p90_us: median_us, calls: 1, replays: 1 }
}

/// A report of these rows.
pub fn report<R, L, M: Default>(command: &'static str, rows: Vec<R>) -> Report<R, L, M> {
    Report {
        schema: 1,
        command,
        environment: Environment::here(None, ferrokv::generated()[0], Some("0123abc")),
        seconds: 1.0,
        rows,
        more: M::default(),
        skipped: Vec::new(),
        peers: None,
    }
}

/// Puts a script for `sh` into a folder that, where its arguments begin with `arguments`, writes `report` to
/// the file that its last argument names.
pub fn peer_that_writes(folder: &Path, report: &str, arguments: &str) -> String {
    std::fs::write(folder.join("written.json"), report).unwrap();
    let script = folder.join("peer.sh");
    let text = format!(
        "case \"$*\" in '{arguments} '*) ;; *) echo \"asked for $*\" >&2; exit 1 ;; esac\n\
         while [ $# -gt 1 ]; do shift; done\ncp \"$(dirname \"$0\")/written.json\" \"$1\"\n"
    );
    std::fs::write(&script, text).unwrap();
    script.display().to_string()
}
