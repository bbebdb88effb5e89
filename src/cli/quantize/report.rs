//! The tables of `quantize`.

use super::measure::{Row, Run, Tensor};
use crate::cli::table::{Align, Table};
use crate::cli::text;

const COLUMNS: [(&str, Align); 14] = [
    ("kernels", Align::Left),
    ("granularity", Align::Left),
    ("bytes after", Align::Right),
    ("smaller", Align::Right),
    ("max error", Align::Right),
    ("bound", Align::Right),
    ("of bound", Align::Right),
    ("L2 error", Align::Right),
    ("score error", Align::Right),
    ("quantize", Align::Right),
    ("GB/s", Align::Right),
    ("dequantize", Align::Right),
    ("GB/s", Align::Right),
    ("bits", Align::Left),
];

/// What the columns mean.
pub const LEGEND: &str = "\
max error: the largest |x - x'|; bound: half a step of the largest scale, and roundings; of bound: the largest \
share that an error takes of its own element's bound (1 at most);
score error: mean |q.k - q.k'| over query heads and the keys they see, not divided by sqrt(head_dim);
quantize: scales and codes; GB/s: bytes that the algorithm must move, read and written, in 10^9 a second;
bits: scales, codes and restored values against the CPU's (SIMD, all cores), one by one.
";

/// The run whose time is shown: the GPU's if there is one.
fn shown(row: &Row) -> Option<&Run> {
    row.runs.last()
}

fn bits(row: &Row) -> String {
    if row.variant == "cpu" {
        return "(compared with)".into();
    }
    if row.runs.is_empty() {
        return "not run".into();
    }
    let agreeing: Vec<&str> = row.runs.iter().filter(|run| run.differing == 0).map(|run| run.on).collect();
    let differing: Vec<String> = row
        .runs
        .iter()
        .filter(|run| run.differing != 0)
        .map(|run| format!("{}: {} DIFFER", run.on, text::count(run.differing)))
        .collect();
    let mut parts = Vec::new();
    if !agreeing.is_empty() {
        parts.push(format!("= {}", agreeing.join(" = ")));
    }
    parts.extend(differing);
    parts.join("; ")
}

/// One tensor's table under its name.
pub fn tensor(tensor: &Tensor) -> String {
    let mut table = Table::new(&COLUMNS);
    for row in &tensor.rows {
        let (quantize, dequantize) = match shown(row) {
            Some(run) => (Some(run.quantize), Some(run.dequantize)),
            None => (None, None),
        };
        let time =
            |timing: Option<super::measure::Timing>| timing.map_or("-".into(), |t| text::seconds(t.seconds));
        let rate = |timing: Option<super::measure::Timing>| {
            timing.map_or("-".into(), |t| format!("{:.2}", t.gb_per_s))
        };
        table.row([
            row.variant.to_owned(),
            row.granularity.to_owned(),
            text::count(row.bytes_after),
            format!("{:.2}x", tensor.bytes_before as f64 / row.bytes_after as f64),
            text::error(row.max_error),
            text::error(row.max_bound),
            format!("{:.4}", row.bound_ratio),
            text::error(row.l2_error),
            row.score_error.map_or("-".into(), text::error),
            time(quantize),
            rate(quantize),
            time(dequantize),
            rate(dequantize),
            bits(row),
        ]);
    }
    format!(
        "{}  {} {:?} = {} tokens x {} channels, {} bytes\n{}\n",
        tensor.name,
        tensor.dtype,
        tensor.shape,
        text::count(tensor.tokens as u64),
        text::count(tensor.channels as u64),
        text::count(tensor.bytes_before),
        table.render()
    )
}

/// How many values were compared, and how many differ, over all runs.
pub fn totals(tensors: &[Tensor]) -> (u64, u64) {
    let runs = tensors.iter().flat_map(|tensor| &tensor.rows).flat_map(|row| &row.runs);
    runs.fold((0, 0), |(compared, differing), run| (compared + run.compared, differing + run.differing))
}
