//! What the reports of all benchmarks have in common.

use crate::cli::environment::Environment;
use crate::cli::table::{Align, Table};
use serde::{Deserialize, Serialize};

/// A whole report: `R` is a row, `L` the versions of the libraries that the peers use, `M` what one benchmark
/// has besides.
#[derive(Clone, Debug, Serialize)]
pub struct Report<R, L, M = ()> {
    /// Version of this layout.
    pub schema: u32,
    /// Which benchmark.
    pub command: &'static str,
    /// What it ran on.
    pub environment: Environment,
    /// Seconds that it took.
    pub seconds: f64,
    /// Every figure.
    pub rows: Vec<R>,
    /// What this benchmark has besides.
    #[serde(flatten)]
    pub more: M,
    /// What was not measured.
    pub skipped: Vec<Skipped>,
    /// What the peers' script said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peers: Option<Peers<L>>,
}

/// A row that was not measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Skipped {
    /// Which.
    pub what: String,
    /// Why.
    pub reason: String,
}

/// What the peers' script reported besides rows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, bound(deserialize = "L: Default + Deserialize<'de>"))]
pub struct Peers<L> {
    /// PyTorch's version.
    pub torch: Option<String>,
    /// CUDA's, of PyTorch.
    pub cuda: Option<String>,
    /// Those of the other libraries.
    #[serde(flatten)]
    pub libraries: L,
    /// The GPU that they ran on.
    pub device: Option<String>,
    /// Each peer against the formula in f64.
    pub checks: serde_json::Value,
}

/// Of a reason as many characters as a line of the table has room for: a library's may fill a screen.
const REASON: usize = 120;

/// The table of what was not measured, each reason once; nothing if all was. The report has every row and
/// every reason whole.
pub fn not_measured(skipped: &[Skipped]) -> String {
    if skipped.is_empty() {
        return String::new();
    }
    let mut reasons: Vec<(&str, &str, usize)> = Vec::new();
    for Skipped { what, reason } in skipped {
        match reasons.iter_mut().find(|(_, known, _)| known == reason) {
            Some((_, _, count)) => *count += 1,
            None => reasons.push((what, reason, 1)),
        }
    }
    let mut table = Table::new(&[("what", Align::Left), ("why", Align::Left)]);
    for (what, reason, count) in reasons {
        let what = if count == 1 { what.into() } else { format!("{what} and {} more", count - 1) };
        let words = reason.split_whitespace().collect::<Vec<_>>().join(" ");
        let short: String = words.chars().take(REASON).collect();
        table.row([what, if short.len() < words.len() { format!("{short}…") } else { short }]);
    }
    format!("\nnot measured\n\n{}", table.render())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_said_once_and_in_a_line() {
        let skipped = |what: &str, reason: String| Skipped { what: what.into(), reason };
        let long = format!("no kernel.\n{}", "a line of a library's\n".repeat(40));
        let table = not_measured(&[
            skipped("row 1", long.clone()),
            skipped("row 2", "too long".into()),
            skipped("row 3", long.clone()),
            skipped("row 4", long),
        ]);
        assert!(table.contains("row 1 and 2 more") && !table.contains("row 3"), "{table}");
        assert!(table.contains("row 2") && table.lines().count() == 6, "{table}");
        assert!(table.lines().all(|line| line.chars().count() < 160), "{table}");
        assert_eq!(not_measured(&[]), "");
    }
}
