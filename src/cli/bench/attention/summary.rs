//! Tables for a terminal.

use super::super::record::not_measured;
use super::report::{Report, Row};
use crate::cli::table::{Align, Table};
use crate::cli::text::{self, microseconds as time};
use crate::cli::tokens::short;

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
        out += &facts(&rows);
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

/// What a step consists of, and what its scheme says of it.
fn facts(rows: &[&Row]) -> String {
    let mut found: Vec<&Row> =
        rows.iter().copied().filter(|row| !row.facts.is_empty() || !row.stages.is_empty()).collect();
    if found.is_empty() {
        return String::new();
    }
    found.sort_by_key(|row| row.context);
    // Those that any row has, each once, in the order of their schemes.
    let (mut stages, mut facts) = (Vec::new(), Vec::new());
    for row in &found {
        for stage in &row.stages {
            if !stages.contains(&stage.name.as_str()) {
                stages.push(&stage.name);
            }
        }
        for fact in &row.facts {
            if !facts.contains(&fact.name.as_str()) {
                facts.push(&fact.name);
            }
        }
    }
    let mut columns = vec![("context", Align::Right), ("scheme", Align::Left)];
    columns.extend(stages.iter().map(|name: &&str| (*name, Align::Right)));
    columns.extend([("error / output", Align::Right), ("bound / output", Align::Right)]);
    columns.extend(facts.iter().map(|name| (*name, Align::Right)));
    let mut table = Table::new(&columns);
    for row in found {
        let mut cells = vec![short(row.context), row.label()];
        cells.extend(stages.iter().map(|name| {
            let stage = row.stages.iter().find(|stage| stage.name == **name);
            stage.map_or_else(String::new, |stage| format!("{:.1} µs", stage.us))
        }));
        cells.extend(
            [row.relative_error, row.relative_bound]
                .map(|relative| relative.map_or_else(String::new, |[median, _]| text::error(median))),
        );
        cells.extend(facts.iter().map(|name| {
            let fact = row.facts.iter().find(|fact| fact.name == **name);
            fact.map_or_else(String::new, |fact| text::figure(&fact.value))
        }));
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
