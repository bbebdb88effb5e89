//! Other libraries on the same GPU: a Python script measures them, its rows join ours.

use super::report::{Peers, Row, Skipped};
use super::sizes::Sizes;
use kernels_gpu::int8::TOKENS_PER_BLOCK;
use serde::Deserialize;
use std::path::Path;
use std::process::{Command, Stdio};

/// What the script wrote. Fields that are not known here are left alone.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Written {
    rows: Vec<serde_json::Value>,
    skipped: Vec<String>,
    errors: Vec<String>,
    #[serde(flatten)]
    about: Peers,
}

/// Rows and remarks of the peers.
#[derive(Default)]
pub struct Found {
    /// Their rows.
    pub rows: Vec<Row>,
    /// What they did not measure.
    pub skipped: Vec<Skipped>,
    /// What they are.
    pub about: Option<Peers>,
}

impl Found {
    fn failed(reason: String) -> Self {
        Found { skipped: vec![Skipped { what: "peers".into(), reason }], ..Found::default() }
    }
}

/// Runs `script` and reads what it wrote. A failure is a remark, not an error: our own rows stand without it.
pub fn run(python: &str, script: &Path, sizes: &Sizes, dtypes: &str, budget_s: f64) -> Found {
    if !script.is_file() {
        return Found::failed(format!(
            "there is no {}; run from the repository's root or name it with --peers-script",
            script.display()
        ));
    }
    let file = match tempfile::NamedTempFile::new() {
        Ok(file) => file,
        Err(error) => return Found::failed(format!("no temporary file: {error}")),
    };
    let list = sizes.0.iter().map(|m| format!("{}x{}", m.tokens, m.channels)).collect::<Vec<_>>().join(",");
    let status = Command::new(python)
        .arg(script)
        .args(["--sizes", &list, "--dtype", dtypes])
        .args(["--block-tokens", &TOKENS_PER_BLOCK.to_string(), "--budget-s", &budget_s.to_string()])
        .arg("--json")
        .arg(file.path())
        .stdin(Stdio::null())
        .output();
    let output = match status {
        Ok(output) => output,
        Err(error) => return Found::failed(format!("cannot run {python}: {error}; name it with --python")),
    };
    let mut found =
        std::fs::read_to_string(file.path()).map_or_else(|_| Found::default(), |text| read(&text));
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
        found.skipped.push(Skipped {
            what: "peers".into(),
            reason: format!("{} ended with {}: {}", script.display(), output.status, last.trim()),
        });
    }
    found
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
        let complete = ["peer", "op", "tokens", "channels", "dtype", "bytes", "median_us"];
        if let Some(missing) = complete.iter().find(|field| value.get(**field).is_none()) {
            found.skipped.push(Skipped { what: "peers".into(), reason: format!("a row has no {missing}") });
            continue;
        }
        match serde_json::from_value(value) {
            Ok(row) => found.rows.push(row),
            Err(error) => found.skipped.push(Skipped { what: "peers".into(), reason: error.to_string() }),
        }
    }
    let skipped =
        written.skipped.into_iter().map(|what| (what, "no time left (--peers-seconds)".to_string()));
    let errors = written.errors.into_iter().map(|line| match line.split_once(": ") {
        Some((what, reason)) => (what.to_string(), reason.to_string()),
        None => ("peers".to_string(), line),
    });
    found.skipped.extend(skipped.chain(errors).map(|(what, reason)| Skipped { what, reason }));
    found
}
