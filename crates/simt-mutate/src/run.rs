//! Programs of tests, one test at a time.

use crate::Error;
use simt::emu::MUTATION_VARIABLE;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// One test of a program.
pub(crate) struct Test {
    program: PathBuf,
    pub(crate) name: String,
}

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Passed,
    Failed,
    /// It took too long and was ended.
    Stopped,
}

/// What a test reaches.
pub(crate) struct Recorded {
    pub(crate) ended: Ended,
    pub(crate) took: Duration,
    pub(crate) changes: Vec<String>,
}

/// The tests of a program, but for those that are ignored.
pub(crate) fn tests_of(program: &Path) -> Result<Vec<Test>, Error> {
    let wrong = |reason: String| Error::Program { program: program.into(), reason };
    let output = Command::new(program)
        .args(["--list", "--format", "terse"])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| wrong(error.to_string()))?;
    if !output.status.success() {
        return Err(wrong(format!("--list ended with {}", output.status)));
    }
    let list = String::from_utf8_lossy(&output.stdout);
    let names = list.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(names.map(|name| Test { program: program.into(), name: name.into() }).collect())
}

impl Test {
    /// Runs it as it is, for so long at most, and notes the places that it reaches.
    pub(crate) fn record(&self, limit: Duration) -> Result<Recorded, Error> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::SeqCst);
        let path = std::env::temp_dir().join(format!("simt-mutate-{}-{number}", std::process::id()));
        let start = Instant::now();
        let mut value = std::ffi::OsString::from("record=");
        value.push(&path);
        let ended = self.run(&value, limit)?;
        let took = start.elapsed();
        let changes = match std::fs::read_to_string(&path) {
            Ok(text) => text.lines().map(String::from).collect(),
            // It reaches none.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(source) => return Err(Error::File { path, source }),
        };
        // What cannot be removed stays in the system's folder for such files.
        let _ = std::fs::remove_file(&path);
        Ok(Recorded { ended, took, changes })
    }

    /// Runs it with a kernel broken, for so long at most.
    pub(crate) fn with(&self, change: &str, limit: Duration) -> Result<Ended, Error> {
        self.run(change.as_ref(), limit)
    }

    fn run(&self, mutation: &std::ffi::OsStr, limit: Duration) -> Result<Ended, Error> {
        let wrong = |error: std::io::Error| Error::Program {
            program: self.program.clone(),
            reason: error.to_string(),
        };
        let mut child = Command::new(&self.program)
            .args(["--exact", &self.name, "--test-threads", "1"])
            .env(MUTATION_VARIABLE, mutation)
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(wrong)?;
        let start = Instant::now();
        let mut nap = Duration::from_millis(1);
        loop {
            if let Some(status) = child.try_wait().map_err(wrong)? {
                return Ok(if status.success() { Ended::Passed } else { Ended::Failed });
            }
            if start.elapsed() > limit {
                // One that has just ended cannot be stopped.
                let _ = child.kill();
                child.wait().map_err(wrong)?;
                return Ok(Ended::Stopped);
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(50));
        }
    }
}
