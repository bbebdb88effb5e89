//! The table, and the report for machines.

use super::measure::{Captured, Row};
use crate::cli::environment::Environment;
use crate::cli::table::{Align, Table};
use crate::cli::text;
use host::eval::diagnosis::{FURTHEST, Figure, OFFSETS, Summary, TOP};
use host::eval::statistics::RESAMPLES;
use serde::Serialize;

/// What `--json` writes.
#[derive(Serialize)]
pub struct Json<'a> {
    command: &'static str,
    environment: Environment,
    file: &'a str,
    model: Option<&'a str>,
    text: Option<&'a str>,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    layers: Vec<&'a str>,
    query_tokens: &'a [usize],
    offsets: usize,
    furthest_offset: f64,
    top: usize,
    bootstrap_seed: u64,
    bootstrap_resamples: usize,
    rows: &'a [Row],
}

impl<'a> Json<'a> {
    /// Of a cache, at `file`.
    pub fn new(
        captured: &'a Captured,
        file: &'a str,
        environment: Environment,
        seed: u64,
        rows: &'a [Row],
    ) -> Self {
        let geometry = captured.geometry(1);
        Json {
            command: "diagnose",
            environment,
            file,
            model: captured.facts.model.as_deref(),
            text: captured.facts.text.as_deref(),
            tokens: captured.tokens(),
            heads: geometry.q_heads,
            kv_heads: geometry.kv_heads,
            head_dim: geometry.head_dim,
            layers: captured.layers.iter().map(|layer| layer.name.as_str()).collect(),
            query_tokens: &captured.positions[0],
            offsets: OFFSETS,
            furthest_offset: FURTHEST,
            top: TOP,
            bootstrap_seed: seed,
            bootstrap_resamples: RESAMPLES,
            rows,
        }
    }

    /// What the pictures are of.
    pub fn title(&self) -> String {
        let of = match (self.model, self.text) {
            (Some(model), Some(text)) => format!("{model}, {text}"),
            (Some(one), None) | (None, Some(one)) => one.to_owned(),
            (None, None) => self.file.to_owned(),
        };
        format!("{of}: {} tokens", text::count(self.tokens as u64))
    }
}

/// `0.173 [0.165, 0.181]`, all with the mean's decimals.
pub(super) fn figure(figure: Figure) -> String {
    let Figure { mean, interval } = figure;
    let decimals = if mean > 0.0 { (2.0 - mean.log10().floor()).clamp(0.0, 9.0) as usize } else { 0 };
    let interval = interval.map_or_else(String::new, |interval| {
        format!(" [{:.decimals$}, {:.decimals$}]", interval.low, interval.high)
    });
    format!("{mean:.decimals$}{interval}")
}

/// `84.3 % [83.1, 85.5]`.
fn percent(figure: Figure) -> String {
    let interval = figure.interval.map(|i| format!(" [{:.1}, {:.1}]", 100.0 * i.low, 100.0 * i.high));
    format!("{:.1} %{}", 100.0 * figure.mean, interval.unwrap_or_default())
}

fn cells(summary: &Summary) -> [String; 6] {
    [
        figure(summary.logit),
        summary.offsets.map_or_else(|| "-".into(), figure),
        figure(summary.divergence),
        percent(summary.overlap),
        figure(summary.output),
        figure(summary.values),
    ]
}

/// All of it for a terminal.
pub fn tables(json: &Json, by_layer: bool) -> String {
    let columns = [
        ("scheme", Align::Left),
        ("layer", Align::Left),
        ("key B", Align::Right),
        ("value B", Align::Right),
        ("error", Align::Left),
        ("at 50", Align::Left),
        ("KL", Align::Left),
        ("top 10", Align::Left),
        ("output", Align::Left),
        ("values", Align::Left),
    ];
    let columns: Vec<_> = columns.into_iter().filter(|(name, _)| by_layer || *name != "layer").collect();
    let mut table = Table::new(&columns);
    for row in json.rows {
        let mark = if row.reference { " *" } else { "" };
        let mut line = |layer: &str, bytes: [f64; 2], summary: &Summary| {
            let layer = by_layer.then(|| layer.to_owned());
            let bytes = bytes.map(|bytes| format!("{bytes:.1}"));
            let name = format!("{}{mark}", row.name);
            table.row([name].into_iter().chain(layer).chain(bytes).chain(cells(summary)));
        };
        line("all", [row.key_bytes, row.value_bytes], &row.summary);
        for of in row.layers.iter().filter(|_| by_layer) {
            line(&of.layer, [of.key_bytes, of.value_bytes], &of.summary);
        }
    }
    let numbers: Vec<&str> =
        json.layers.iter().map(|name| name.strip_prefix("layer.").unwrap_or(name)).collect();
    let offsets = if json.rows.iter().all(|row| row.summary.offsets.is_none()) {
        "\nat 50: the file does not say how RoPE turns its keys; capture it again by `ferrokv capture`."
    } else {
        ""
    };
    format!(
        "{}, layers {}, {} of {}\n\n{}\n\
         error: |q.k - q.k^|, not scaled; at 50: the same at {OFFSETS} distances up to {FURTHEST}; KL in nats; output and \
         values over\nthe output's norm. Means over layers, heads and queries with their 95 % intervals ({} resamples, seed \
         {});\nbytes a token and KV head. * a reference, without kernels.{offsets}\n",
        json.title(),
        numbers.join(", "),
        text::plural(json.query_tokens.len(), "query token"),
        text::plural(json.heads, "head"),
        table.render(),
        text::count(json.bootstrap_resamples as u64),
        json.bootstrap_seed,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::eval::statistics::Interval;

    #[test]
    fn figures_have_three_digits() {
        let of = |mean, low, high| Figure { mean, interval: Some(Interval { low, high }) };
        assert_eq!(figure(of(0.17312, 0.1649, 0.1811)), "0.173 [0.165, 0.181]");
        assert_eq!(figure(of(9.514, 9.43, 9.6)), "9.51 [9.43, 9.60]");
        assert_eq!(figure(of(123.4, 99.0, 150.0)), "123 [99, 150]");
        assert_eq!(figure(Figure { mean: 0.0, interval: None }), "0");
        assert_eq!(percent(of(0.8433, 0.8311, 0.855)), "84.3 % [83.1, 85.5]");
    }
}
