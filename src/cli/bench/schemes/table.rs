//! The table for a terminal.

use super::report::{More, OfText, Row};
use crate::cli::bench::record::{Report, not_measured};
use crate::cli::table::{Align, Table};
use crate::cli::text;
use crate::cli::tokens::short;
use host::eval::statistics::Interval;

/// Where a step was measured: heads, batch, context.
type Place = ([u32; 3], u32, u32);

/// The places of a report, each once, in order.
pub fn places(rows: &[Row]) -> Vec<Place> {
    let place = |row: &super::super::attention::Row| {
        ([row.q_heads, row.kv_heads, row.head_dim], row.batch, row.context)
    };
    let mut places: Vec<Place> = Vec::new();
    for found in rows.iter().flat_map(|row| &row.speed).map(place) {
        if !places.contains(&found) {
            places.push(found);
        }
    }
    places
}

/// The time over dense over that over a scheme.
pub fn ratio(row: &Row, (heads, batch, context): Place) -> Option<f64> {
    let here = row.speed.iter().find(|row| {
        ([row.q_heads, row.kv_heads, row.head_dim], row.batch, row.context) == (heads, batch, context)
    });
    here?.dense_ratio
}

fn between(interval: Option<Interval>, figure: impl Fn(f64) -> String) -> String {
    interval.map_or_else(|| "-".into(), |i| format!("[{}, {}]", figure(i.low), figure(i.high)))
}

/// KL and perplexity over dense's, each with its interval.
fn lost(of: &OfText) -> [String; 4] {
    let Some(beside) = &of.beside else {
        return ["", "", &format!("{:.3}", of.perplexity), ""].map(String::from);
    };
    let percent = |delta: f64| format!("{:+.2}", 100.0 * delta.exp_m1());
    [
        text::error(beside.kl),
        between(beside.kl_interval, text::error),
        format!("{} %", percent(beside.delta)),
        between(beside.delta_interval, percent),
    ]
}

/// What `bench schemes` prints.
pub fn text(report: &Report<Row, (), More>) -> String {
    let places = places(&report.rows);
    let with_quality = report.rows.iter().any(|row| row.quality.is_some());
    let names: Vec<String> = places
        .iter()
        .map(|([q_heads, kv_heads, head_dim], batch, context)| {
            let batch = if *batch == 1 { String::new() } else { format!(" ×{batch}") };
            format!("{q_heads}/{kv_heads}/{head_dim}{batch} {}", short(*context))
        })
        .collect();
    let mut columns = vec![("KV scheme", Align::Left), ("B/token", Align::Right), ("B/step", Align::Right)];
    if with_quality {
        let quality = [
            ("KL", Align::Right),
            ("95 %", Align::Left),
            ("perplexity", Align::Right),
            ("95 %", Align::Left),
        ];
        columns.extend(quality);
    }
    if !places.is_empty() {
        columns.push(("bound/output", Align::Right));
    }
    columns.extend(names.iter().map(|name| (name.as_str(), Align::Right)));
    let mut table = Table::new(&columns);
    for row in &report.rows {
        let bytes = row
            .bytes()
            .map_or(["-"; 2].map(String::from), |(all, step)| [all, step].map(|bytes| format!("{bytes:.1}")));
        let quality = row.quality.as_ref().map_or_else(|| ["-", "", "-", ""].map(String::from), lost);
        let bound = row.bound().map_or_else(|| "-".into(), text::error);
        let ratios =
            places.iter().map(|place| ratio(row, *place).map_or_else(|| "-".into(), |x| format!("{x:.2}")));
        let cells = [row.kv.clone()].into_iter().chain(bytes);
        let cells = cells.chain(quality.into_iter().filter(|_| with_quality));
        table.row(cells.chain(Some(bound).filter(|_| !places.is_empty())).chain(ratios));
    }
    let mut out = format!("{}\n\n{}", report.environment.line(), table.render());
    out += "\nBytes of a token and KV head: in all memory, and what a step reads of them.\n";
    let read = report.rows.iter().find_map(|row| row.quality.as_ref());
    if let (Some(of), Some(model), Some(name)) = (read, &report.more.model, &report.more.text) {
        out += &format!(
            "KL in nats a step and perplexity against dense's: {model} over {name}, {} of {} tokens, the second half decoded;\n\
             bootstrap over windows ({} resamples, seed {}).\n",
            text::plural(of.windows.len(), "window"),
            text::count(of.context.into()),
            text::count(report.more.bootstrap_resamples as u64),
            report.more.bootstrap_seed,
        );
    }
    if !places.is_empty() {
        let on_slices = report.rows.iter().flat_map(|row| &row.speed).any(|row| row.on_slices);
        let place = if on_slices { "a CPU's own path" } else { "the GPU" };
        out += &format!(
            "Heads and tokens: time of attention over dense over its time, by {place}; bound: the largest of these steps, over \
             the output's norm.\n"
        );
    }
    out + &not_measured(&report.skipped)
}
