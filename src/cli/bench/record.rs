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

/// The table of what was not measured; nothing if all was.
pub fn not_measured(skipped: &[Skipped]) -> String {
    if skipped.is_empty() {
        return String::new();
    }
    let mut table = Table::new(&[("what", Align::Left), ("why", Align::Left)]);
    for Skipped { what, reason } in skipped {
        table.row([what.clone(), reason.clone()]);
    }
    format!("\nnot measured\n\n{}", table.render())
}
