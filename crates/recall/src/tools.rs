//! What the tools of compute-sanitizer made of the same kernels on a GPU, by the records of docs/results.

use crate::case::Case;
use serde_json::Value;
use std::path::Path;

/// The tools, in the order of the columns.
pub const TOOLS: [&str; 4] = ["memcheck", "racecheck", "synccheck", "initcheck"];

/// What one tool made of one program.
#[derive(Clone, Debug)]
pub struct Run {
    /// It named errors or hazards: so many.
    pub alarms: u64,
    /// The first of them.
    pub first: String,
    /// It was ended, as it did not end.
    pub hung: bool,
}

/// Every run, the later ones ahead of the earlier.
pub struct Record {
    /// The files, from docs on.
    pub files: Vec<String>,
    /// The device, and which compute-sanitizer.
    pub by: String,
    rows: Vec<Value>,
}

impl Record {
    /// The records `sanitizer/…-recall….json` that `current.toml` names, in its order.
    pub fn read(docs: &Path) -> Record {
        let read = |name: &str| {
            let path = docs.join(name);
            std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        let current = read("results/current.toml");
        let named = current.lines().filter_map(|line| line.strip_prefix("[records.\"")?.strip_suffix("\"]"));
        let files: Vec<String> = named
            .filter(|path| path.starts_with("sanitizer/") && path.contains("-recall"))
            .map(|path| format!("results/{path}"))
            .collect();
        let (mut rows, mut by) = (Vec::new(), String::new());
        for file in files.iter().rev() {
            let record: Value = serde_json::from_str(&read(file)).expect("a record is JSON");
            rows.extend(record["rows"].as_array().expect("a record has rows").iter().cloned());
            let version = record["compute_sanitizer"].as_array().and_then(|lines| lines.last()?.as_str());
            let version = version.and_then(|line| line.split_whitespace().nth(1)).expect("its version");
            by = format!("{}, compute-sanitizer {version}", record["device"].as_str().expect("a device"));
        }
        Record { files, by, rows }
    }

    /// What a tool made of a case, with the bug or without. `None` if it cannot be launched on a GPU.
    pub fn run(&self, case: &Case, bug: bool, tool: &str) -> Option<Run> {
        let row = self.rows.iter().find(|row| {
            row["case"] == case.name && row["bug"] == bug && row["tool"] == tool && row["not_run"].is_null()
        })?;
        Some(Run {
            alarms: row["count"].as_u64().unwrap_or(0),
            // Without addresses in the machine code.
            first: row["first"].as_str().unwrap_or_default().split(" at ").next().unwrap_or_default().into(),
            hung: row["late"] == true,
        })
    }
}
