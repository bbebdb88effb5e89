//! Tables for a terminal.

use super::super::record::not_measured;
use super::arguments::short;
use super::certified::{CARRIED_PARTS, PARTS};
use super::report::{Certified, Report, Row};
use crate::cli::table::{Align, Table};
use crate::cli::text::microseconds as time;

fn optional(x: Option<f64>) -> String {
    x.map_or_else(String::new, |x| format!("{x:.3}"))
}

fn ratio(x: Option<f64>) -> String {
    x.map_or_else(String::new, |x| format!("{x:.2}"))
}

/// What `bench attention` prints.
pub fn tables(report: &Report) -> String {
    let mut out = format!("{}\n", report.environment.line());
    let mut groups = Vec::new();
    for row in report.rows.iter().filter(|row| row.op == "decode") {
        if !groups.contains(&row.group()) {
            groups.push(row.group());
        }
    }
    for group in groups {
        let (q_heads, kv_heads, head_dim, dtype, batch) = group;
        out += &format!("\n{q_heads}/{kv_heads}/{head_dim} {dtype}, batch {batch}\n\n");
        let rows: Vec<&Row> =
            report.rows.iter().filter(|row| row.group() == group && row.op == "decode").collect();
        out += &figures(&rows);
        out += &certified(&rows);
        out += &side_by_side(&rows);
    }
    out += &not_measured(&report.skipped);
    out
}

/// Our rows.
fn figures(rows: &[&Row]) -> String {
    let mut table = Table::new(&[
        ("context", Align::Right),
        ("scheme", Align::Left),
        ("median", Align::Right),
        ("p10", Align::Right),
        ("p90", Align::Right),
        ("GB/s", Align::Right),
        ("GB/s read", Align::Right),
        ("dense / it", Align::Right),
        ("peer / it", Align::Right),
        ("reading alone", Align::Right),
        ("of it", Align::Right),
        ("output", Align::Left),
        ("error of bound", Align::Right),
    ]);
    let mut own: Vec<&&Row> = rows.iter().filter(|row| row.peer == "ferrokv").collect();
    own.sort_by_key(|row| row.context);
    for row in own {
        let output = match (row.verified, row.bits_compared) {
            (Some(true), Some(true)) => "right, bits of the emulator",
            (Some(true), _) => "right",
            (Some(false), _) => "WRONG",
            (None, _) => "",
        };
        table.row([
            short(row.context),
            row.label(),
            time(row.median_us),
            time(row.p10_us),
            time(row.p90_us),
            format!("{:.1}", row.gb_per_s),
            row.read_gb_per_s.map_or_else(String::new, |x| format!("{x:.1}")),
            ratio(row.dense_ratio),
            ratio(row.peer_ratio),
            row.roofline_us.map_or_else(String::new, time),
            optional(row.fraction),
            output.into(),
            optional(row.error_of_bound),
        ]);
    }
    table.render()
}

/// What the schemes over a quantized cache consist of, promoted and certify.
fn certified(rows: &[&Row]) -> String {
    let mut found: Vec<(&Row, &Certified)> =
        rows.iter().filter_map(|row| Some((*row, row.certified.as_ref()?))).collect();
    if found.is_empty() {
        return String::new();
    }
    found.sort_by_key(|(row, _)| row.context);
    let mut columns = vec![
        ("context", Align::Right),
        ("scheme", Align::Left),
        ("policy", Align::Left),
        ("originals", Align::Left),
    ];
    // Those that any row has, each once.
    let known = PARTS.into_iter().filter(|part| !CARRIED_PARTS.contains(part));
    let has =
        |name: &str| found.iter().any(|(_, figures)| figures.parts.iter().any(|part| part.name == name));
    let names: Vec<&str> = CARRIED_PARTS.into_iter().chain(known).filter(|name| has(name)).collect();
    columns.extend(names.iter().map(|part| (*part, Align::Right)));
    let figures = ["keys", "values", "tail", "E_key", "E_val", "E_round", "dense heads"];
    columns.extend(figures.map(|figure| (figure, Align::Right)));
    let mut table = Table::new(&columns);
    for (row, figures) in found {
        let bound = |x: Option<f64>| x.map_or_else(|| "none".into(), |x| format!("{x:.2e}"));
        let originals = if figures.originals == "host" { "host" } else { "GPU (warm)" };
        let mut cells = vec![short(row.context), row.label(), figures.policy.clone(), originals.into()];
        let part = |name: &str| figures.parts.iter().find(|part| part.name == name);
        let parts = names.iter().map(|name| part(name));
        cells.extend(parts.map(|part| part.map_or_else(String::new, |part| format!("{:.1} µs", part.us))));
        cells.extend([
            format!("{:.1}", figures.promoted_keys),
            format!("{:.1}", figures.promoted_values),
            format!("{:.4}", figures.tail_mass),
            bound(figures.e_key),
            bound(figures.e_val),
            bound(figures.e_round),
            format!("{} of {}", figures.dense_heads, figures.heads),
        ]);
        table.row(cells);
    }
    format!("\n{}", table.render())
}

/// Each peer's fastest form beside each of our schemes.
pub fn side_by_side(rows: &[&Row]) -> String {
    let mut table = Table::new(&[
        ("context", Align::Right),
        ("peer", Align::Left),
        ("form", Align::Left),
        ("median", Align::Right),
        ("GB/s", Align::Right),
        ("scheme", Align::Left),
        ("median", Align::Right),
        ("peer / ours", Align::Right),
    ]);
    let mut pairs: Vec<(&Row, &Row)> = Vec::new();
    for ours in rows.iter().filter(|row| row.peer == "ferrokv" && !row.emulator) {
        pairs.extend(fastest_forms(rows, ours.context).into_iter().map(|theirs| (theirs, *ours)));
    }
    pairs.sort_by(|(a, _), (b, _)| a.context.cmp(&b.context).then(a.median_us.total_cmp(&b.median_us)));
    for (theirs, ours) in &pairs {
        table.row([
            short(theirs.context),
            theirs.peer.clone(),
            theirs.config.clone().unwrap_or_default(),
            time(theirs.median_us),
            format!("{:.1}", theirs.gb_per_s),
            ours.label(),
            time(ours.median_us),
            format!("{:.2}", theirs.median_us / ours.median_us),
        ]);
    }
    if pairs.is_empty() { String::new() } else { format!("\n{}", table.render()) }
}

/// Of each peer at this context, the form that is fastest.
pub fn fastest_forms<'a>(rows: &[&'a Row], context: u32) -> Vec<&'a Row> {
    let mut fastest: Vec<&Row> = Vec::new();
    for row in rows.iter().filter(|row| row.peer != "ferrokv" && row.context == context) {
        match fastest.iter_mut().find(|known| known.peer == row.peer) {
            Some(known) if row.median_us < known.median_us => *known = row,
            Some(_) => {}
            None => fastest.push(row),
        }
    }
    fastest
}
