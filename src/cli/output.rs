//! Where results go: stdout, or a report for machines.

use super::failure::Failure;
use host::tensor_file::Target;
use serde::Serialize;
use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The option for machines.
#[derive(clap::Args)]
pub struct ReportArguments {
    /// Write the results as JSON: to FILE (replaced if it exists), or with `-` to stdout in place of the
    /// tables.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

/// Where a report goes, checked before any work is done.
pub struct Report {
    /// `None`: no report is asked for.
    to: Option<To>,
}

enum To {
    Stdout,
    File(Target),
}

impl ReportArguments {
    /// The file that the report goes to, if it goes to one.
    pub fn file(&self) -> Option<&Path> {
        self.json.as_deref().filter(|path| path.as_os_str() != OsStr::new("-"))
    }

    /// Checks the path against those of the command's other files.
    ///
    /// # Errors
    /// A path that cannot be written or that another use has.
    pub fn open(&self, input: Option<&Path>, output: Option<&Path>) -> Result<Report, Failure> {
        let to = match &self.json {
            None => None,
            Some(path) if path.as_os_str() == OsStr::new("-") => Some(To::Stdout),
            Some(path) => {
                let same = |other: &Path| {
                    path == other || std::path::absolute(path).ok() == std::path::absolute(other).ok()
                };
                if output.is_some_and(same) {
                    return Err(Failure::SamePath { what: "the output", path: path.display().to_string() });
                }
                Some(To::File(Target::new(path, true, input)?))
            }
        };
        Ok(Report { to })
    }
}

impl Report {
    /// Whether the report takes the tables' place on stdout.
    pub fn takes_stdout(&self) -> bool {
        matches!(self.to, Some(To::Stdout))
    }

    /// Prints `tables` unless the report goes to stdout, and writes the report.
    ///
    /// # Errors
    /// What cannot be written.
    pub fn finish(&self, tables: &str, report: &impl Serialize) -> Result<(), Failure> {
        self.save(report)?;
        match &self.to {
            Some(To::Stdout) => print(&json(report)),
            _ => print(tables),
        }
    }

    /// Writes the report if it goes to a file: a longer run does so before its end, too.
    ///
    /// # Errors
    /// What cannot be written.
    pub fn save(&self, report: &impl Serialize) -> Result<(), Failure> {
        match &self.to {
            Some(To::File(target)) => Ok(target.write(json(report).as_bytes())?),
            _ => Ok(()),
        }
    }
}

fn json(report: &impl Serialize) -> String {
    // Only strings are keys in our reports, and numbers that are not finite become null.
    let mut text = serde_json::to_string_pretty(report).unwrap_or_default();
    text.push('\n');
    text
}

/// Writes to stdout; a reader that has gone (`| head`) is no error.
///
/// # Errors
/// What else stdout reports.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::Stdout(error)),
        _ => Ok(()),
    }
}
