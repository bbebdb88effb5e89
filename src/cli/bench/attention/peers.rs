//! Other libraries on the same GPU: a Python script measures them, its rows join ours.

use super::super::report::Skipped;
use super::arguments::Arguments;
use super::report::{About, Row};
use serde::Deserialize;
use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Of the time there is, the script may start rows until so many seconds before its end: what it then has under way is done,
/// and its report is written.
const MARGIN: f64 = 10.0;

/// What the script wrote. Fields that are not known here are left alone.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Written {
    rows: Vec<serde_json::Value>,
    skipped: Vec<String>,
    errors: Vec<String>,
    #[serde(flatten)]
    about: About,
}

/// Rows and remarks of the peers.
#[derive(Default)]
pub struct Found {
    /// Their rows.
    pub rows: Vec<Row>,
    /// What they did not measure.
    pub skipped: Vec<Skipped>,
    /// What they are.
    pub about: Option<About>,
}

impl Found {
    fn failed(reason: String) -> Self {
        Found { skipped: vec![Skipped { what: "peers".into(), reason }], ..Found::default() }
    }
}

/// Runs the script for at most `seconds` and reads what it wrote. A failure is a remark, not an error: our own rows stand
/// without it.
pub fn run(arguments: &Arguments, seconds: f64) -> Found {
    let script = &arguments.peers_script;
    if !script.is_file() {
        return Found::failed(format!(
            "there is no {}; run from the repository's root or name it with --peers-script",
            script.display()
        ));
    }
    let folder = match tempfile::tempdir() {
        Ok(folder) => folder,
        Err(error) => return Found::failed(format!("no temporary folder: {error}")),
    };
    let (json, log) = (folder.path().join("peers.json"), folder.path().join("peers.log"));
    let join = |parts: Vec<String>| parts.join(",");
    let mut command = Command::new(&arguments.python);
    command
        .arg(script)
        .args(["--shapes", &join(arguments.shapes.iter().map(ToString::to_string).collect())])
        .args(["--batches", &join(arguments.batches.iter().map(ToString::to_string).collect())])
        .args(["--contexts", &join(arguments.contexts.iter().map(ToString::to_string).collect())])
        .args(["--dtype", &arguments.dtype.join(",")])
        .args(["--seconds", &format!("{:.0}", (seconds - MARGIN).max(0.0))])
        .arg("--json")
        .arg(&json);
    let status = match within(&mut command, &log, seconds) {
        Ok(status) => status,
        Err(error) => {
            return Found::failed(format!("cannot run {}: {error}; name it with --python", arguments.python));
        }
    };
    let mut found = std::fs::read_to_string(&json).map_or_else(|_| Found::default(), |text| read(&text));
    let reason = match status {
        Some(status) if status.success() => return found,
        Some(status) => {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
            format!("{} ended with {status}: {}", script.display(), last.trim())
        }
        None => format!("{} was not done after {seconds:.0} s; give --seconds more", script.display()),
    };
    found.skipped.push(Skipped { what: "peers".into(), reason });
    found
}

/// Runs a command, what it says going to `log`; `None` if it had to be ended.
fn within(command: &mut Command, log: &Path, seconds: f64) -> io::Result<Option<ExitStatus>> {
    let end = Instant::now() + Duration::from_secs_f64(seconds.clamp(0.0, 1e6));
    let log = File::create(log)?;
    let out = log.try_clone()?;
    let mut child = command.stdin(Stdio::null()).stdout(out).stderr(log).spawn()?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What a report of the script holds.
pub fn read(text: &str) -> Found {
    let written: Written = match serde_json::from_str(text) {
        Ok(written) => written,
        Err(_) if text.trim().is_empty() => return Found::default(),
        Err(error) => return Found::failed(format!("its report is no JSON that is known here: {error}")),
    };
    let mut found = Found { about: Some(written.about), ..Found::default() };
    for value in written.rows {
        let complete =
            ["peer", "op", "dtype", "batch", "q_heads", "kv_heads", "head_dim", "context", "median_us"];
        if let Some(missing) = complete.iter().find(|field| value.get(**field).is_none()) {
            found.skipped.push(Skipped { what: "peers".into(), reason: format!("a row has no {missing}") });
            continue;
        }
        match serde_json::from_value(value) {
            Ok(row) => found.rows.push(row),
            Err(error) => found.skipped.push(Skipped { what: "peers".into(), reason: error.to_string() }),
        }
    }
    let lines = written.skipped.into_iter().chain(written.errors);
    found.skipped.extend(lines.map(|line| match line.split_once(": ") {
        Some((what, reason)) => Skipped { what: what.into(), reason: reason.into() },
        None => Skipped { what: "peers".into(), reason: line },
    }));
    found
}
