//! The results: for machines all of them, for people a row a head.

use crate::cli::table::{Align, Table};
use crate::cli::text;
use host::kv::Source;
use host::kv::workload::{Fact, Memory};
use serde::Serialize;

/// The report for machines.
#[derive(Serialize)]
pub struct Report<'a> {
    /// `attend`.
    pub command: &'static str,
    /// Of this program.
    pub version: &'static str,
    /// The file read.
    pub file: String,
    /// The scheme, with preset and options.
    pub kv: String,
    /// `emulator`, or the GPU's name.
    pub device: String,
    /// Why it is no GPU.
    pub gpu_note: Option<&'a str>,
    /// Over all layers.
    pub summary: Summary,
    /// One by one.
    pub layers: &'a [LayerReport],
}

/// What was found over all layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Heads, counted for each query token.
    pub heads: usize,
    /// Heads for which the scheme promises something.
    pub bounded: usize,
    /// Those whose error is not within what is promised.
    pub violations: usize,
    /// Bound over error, median.
    pub median_ratio: Option<f64>,
    /// The least of them.
    pub least_ratio: Option<f64>,
    /// Error over the output's norm: median, 99 % and largest.
    pub relative_error: Option<[f64; 3]>,
    /// Bound over the output's norm: likewise.
    pub relative_bound: Option<[f64; 3]>,
    /// Heads that the exact fallback computed.
    pub exact_heads: usize,
    /// Those of them that have other bits than exact attention.
    pub dense_bits_differing: usize,
}

/// A layer.
#[derive(Clone, Debug, Serialize)]
pub struct LayerReport {
    /// `layer.07`.
    pub name: String,
    /// F16 or BF16.
    pub dtype: String,
    /// Tokens in the file.
    pub tokens: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Query heads.
    pub heads: usize,
    /// Channels of one.
    pub head_dim: usize,
    /// Positions of the query tokens.
    pub query_tokens: Vec<usize>,
    /// A step, all query tokens at once.
    pub step_seconds: f64,
    /// Exact attention of the same.
    pub dense_seconds: f64,
    /// Bytes of the cache that a step reads at least.
    pub read_bytes: u64,
    /// Those of exact attention.
    pub dense_read_bytes: u64,
    /// What the cache takes.
    pub memory: Memory,
    /// Figures that the scheme alone knows the meaning of.
    pub facts: Vec<Fact>,
    /// A row for each query token and head.
    pub rows: Vec<Head>,
}

/// A head for one query token.
#[derive(Clone, Debug, Serialize)]
pub struct Head {
    /// The query token's position: it sees the keys up to its own.
    pub token: usize,
    /// The query head.
    pub head: usize,
    /// The head of keys and values that it reads.
    pub kv_head: usize,
    /// What is promised of the Euclidean norm of the error; none if nothing is.
    pub bound: Option<f64>,
    /// The distance from the formula in f64.
    pub error: f64,
    /// Bound over error; none where the error is 0.
    pub ratio: Option<f64>,
    /// Whether the error is within what is promised.
    pub holds: bool,
    /// Exact attention's distance from the formula.
    pub dense_error: f64,
    /// The exact output's norm.
    pub output_norm: f64,
    /// What the output was computed from.
    pub source: Source,
    /// Blocks of 16 tokens whose keys were used from their originals.
    pub original_keys: u32,
    /// The same of values.
    pub original_values: u32,
    /// Tokens that were not attended to.
    pub skipped: u32,
    /// Of a head that the exact fallback computed: whether the output has the bits of exact attention.
    pub bits_of_dense: Option<bool>,
    /// Figures that the scheme alone knows the meaning of.
    pub facts: Vec<Fact>,
}

impl Head {
    /// A bound that does not hold is tighter than any; where there is none, the largest error comes first.
    fn tightness(&self) -> f64 {
        match (self.holds, self.bound) {
            (false, _) => f64::NEG_INFINITY,
            (true, Some(_)) => self.ratio.unwrap_or(f64::INFINITY),
            (true, None) => -self.share(self.error).unwrap_or(self.error),
        }
    }

    /// A part of the output's norm; none of an output of 0.
    fn share(&self, value: f64) -> Option<f64> {
        (self.output_norm > 0.0).then(|| value / self.output_norm)
    }
}

/// Median, 99 % and largest.
fn spread(values: impl Iterator<Item = f64>) -> Option<[f64; 3]> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    Some([values[last / 2], values[last * 99 / 100], values[last]])
}

/// What was found over all layers.
pub fn summary(layers: &[LayerReport]) -> Summary {
    let rows = || layers.iter().flat_map(|layer| &layer.rows);
    let mut ratios: Vec<f64> = rows().filter_map(|row| row.ratio).collect();
    ratios.sort_by(f64::total_cmp);
    let exact = |row: &&Head| row.source == Source::Originals;
    Summary {
        heads: rows().count(),
        bounded: rows().filter(|row| row.bound.is_some()).count(),
        violations: rows().filter(|row| !row.holds).count(),
        median_ratio: ratios.get(ratios.len() / 2).copied(),
        least_ratio: ratios.first().copied(),
        relative_error: spread(rows().filter_map(|row| row.share(row.error))),
        relative_bound: spread(rows().filter_map(|row| row.share(row.bound?))),
        exact_heads: rows().filter(exact).count(),
        dense_bits_differing: rows().filter(|row| row.bits_of_dense == Some(false)).count(),
    }
}

/// What the columns mean.
pub const LEGEND: &str = "\
token: the query token's position, which sees the keys up to its own; of each head the one whose bound is tightest, or
without bounds the one that is furthest off, is shown (--all: every one);
bound: of the Euclidean norm of the head's error; error: its distance from the formula in f64; of output: parts of the
output's norm; keys, values: blocks of 16 tokens that were used from their originals; from: what the output was computed from:
stored data, some originals with them (mixed), or originals alone, the exact fallback; the columns between are the scheme's own.
";

/// A layer's table and what it cost.
pub fn layer(layer: &LayerReport, all: bool) -> String {
    let own: Vec<String> =
        layer.rows.first().map_or(Vec::new(), |row| row.facts.iter().map(|fact| fact.name.clone()).collect());
    let mut columns = vec![("token", Align::Right), ("head", Align::Right)];
    columns.extend(own.iter().map(|name| (name.as_str(), Align::Right)));
    columns.extend([
        ("bound", Align::Right),
        ("error", Align::Right),
        ("bound/error", Align::Right),
        ("error of output", Align::Right),
        ("bound of output", Align::Right),
        ("keys", Align::Right),
        ("values", Align::Right),
        ("from", Align::Left),
        ("", Align::Left),
    ]);
    let mut table = Table::new(&columns);
    let mut shown: Vec<&Head> = Vec::new();
    if all {
        shown.extend(&layer.rows);
    } else {
        for head in 0..layer.heads {
            let own = layer.rows.iter().filter(|row| row.head == head);
            shown.extend(own.min_by(|a, b| a.tightness().total_cmp(&b.tightness())));
        }
    }
    for row in shown {
        let mut cells = vec![row.token.to_string(), row.head.to_string()];
        cells.extend(row.facts.iter().map(|fact| text::figure(&fact.value)));
        let share = |x: f64| row.share(x).map_or("-".into(), |part| format!("{:.3} %", 100.0 * part));
        cells.extend([
            row.bound.map_or("none".into(), text::error),
            text::error(row.error),
            row.ratio.map_or("-".into(), |ratio| format!("{ratio:.1}")),
            share(row.error),
            row.bound.map_or("none".into(), share),
            row.original_keys.to_string(),
            row.original_values.to_string(),
            match row.source {
                Source::Stored => "stored",
                Source::Mixed => "mixed",
                Source::Originals => "originals",
            }
            .into(),
            if row.holds { String::new() } else { "VIOLATED".into() },
        ]);
        table.row(cells);
    }
    let LayerReport { name, dtype, tokens, kv_heads, heads, head_dim, memory, .. } = layer;
    let positions: Vec<String> = layer.query_tokens.iter().map(usize::to_string).collect();
    let mut out = format!(
        "{name}  {dtype}, {} tokens, {heads} heads on {kv_heads} KV heads of {head_dim}; query tokens {}\n{}",
        text::count(*tokens as u64),
        positions.join(", "),
        table.render()
    );
    out += &format!(
        "  step {} (dense {}); reads {} (dense {}); the cache takes {} on the device, {} on the host\n",
        text::seconds(layer.step_seconds),
        text::seconds(layer.dense_seconds),
        text::bytes(layer.read_bytes),
        text::bytes(layer.dense_read_bytes),
        text::bytes(memory.device),
        text::bytes(memory.host),
    );
    let facts: Vec<String> =
        layer.facts.iter().map(|fact| format!("{} {}", fact.name, text::figure(&fact.value))).collect();
    if !facts.is_empty() {
        out += &format!("  {}\n", facts.join("; "));
    }
    out + "\n"
}

impl Summary {
    /// Its lines.
    pub fn lines(&self) -> String {
        let count = |n: usize| text::count(n as u64);
        let bounds = match (self.bounded, self.violations) {
            (0, _) => "none is stated".into(),
            (bounded, 0) => format!("all {} hold", count(bounded)),
            (bounded, n) => format!("{} of {} are VIOLATED", count(n), count(bounded)),
        };
        let ratio = |ratio: Option<f64>| ratio.map_or("-".into(), |ratio| format!("{ratio:.1}"));
        let bits = match (self.exact_heads, self.dense_bits_differing) {
            (0, _) => String::new(),
            (_, 0) => " with the bits of dense attention".into(),
            (_, n) => format!(", {n} of which DIFFER from dense attention"),
        };
        let spread = |what: &str, spread: Option<[f64; 3]>| match spread {
            None => String::new(),
            Some(spread) => {
                let [median, most, worst] = spread.map(|x| format!("{:.3} %", 100.0 * x));
                format!("{what} of the output's norm: median {median}, 99 % {most}, worst {worst}\n")
            }
        };
        format!(
            "bounds: {bounds}; bound over error: median {}, least {}; {} exact{bits}\n{}{}",
            ratio(self.median_ratio),
            ratio(self.least_ratio),
            text::plural(self.exact_heads, "head"),
            spread("error", self.relative_error),
            spread("bound", self.relative_bound),
        )
    }
}
