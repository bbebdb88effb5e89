//! Tables for a terminal.

use super::operations::Operation;
use super::record::not_measured;
use super::report::{Place, Report, Row};
use crate::cli::table::{Align, Table};
use crate::cli::text::{self, microseconds as time};

/// The order in which places and operations are listed.
const OPERATIONS: [Operation; 6] = [
    Operation::Scales,
    Operation::Quantize,
    Operation::Dequantize,
    Operation::ScalesQuantize,
    Operation::BlockQuantize,
    Operation::BlockDequantize,
];

fn place(place: Place) -> &'static str {
    match place {
        Place::Gpu => "gpu",
        Place::Cpu => "cpu",
        Place::Emulator => "emulator",
    }
}

fn gigabytes(row: &Row) -> String {
    let digits = if row.gb_per_s < 10.0 { 3 } else { 1 };
    format!("{:.digits$}", row.gb_per_s)
}

/// What `bench int8` prints.
pub fn int8(report: &Report) -> String {
    let mut out = format!("{}\n", report.environment.line());
    let mut subjects: Vec<(usize, usize, &str)> = Vec::new();
    for row in &report.rows {
        let subject = (row.tokens, row.channels, row.dtype.as_str());
        if !subjects.contains(&subject) {
            subjects.push(subject);
        }
    }
    for (tokens, channels, dtype) in subjects {
        let rows: Vec<&Row> = report
            .rows
            .iter()
            .filter(|row| (row.tokens, row.channels, row.dtype.as_str()) == (tokens, channels, dtype))
            .collect();
        let elements = text::count(tokens as u64 * channels as u64);
        out += &format!("\n{tokens} × {channels} {dtype}: {elements} elements");
        if let Some(sets) = rows.iter().filter(|row| row.place == Place::Gpu).find_map(|row| row.sets) {
            out += &format!(", {} in turns on the GPU", text::plural(sets, "set"));
        }
        out += "\n\n";
        out += &figures(&rows);
        out += &side_by_side(&rows);
        for found in &report.more.accuracy {
            if (found.tokens, found.channels, found.dtype) == (tokens, channels, dtype) {
                let scale = if found.tokens_per_scale == tokens {
                    "column".into()
                } else {
                    format!("{} tokens", found.tokens_per_scale)
                };
                out += &format!(
                    "  a scale a {scale}: max error {} (bound {}), L2 {}, attention score error {}\n",
                    text::error(found.max_error),
                    text::error(found.bound),
                    text::error(found.l2_error),
                    text::error(found.attention_error),
                );
            }
        }
    }
    out += &not_measured(&report.skipped);
    out
}

/// Every row of one matrix but the peers'.
fn figures(rows: &[&Row]) -> String {
    let mut table = Table::new(&[
        ("op", Align::Left),
        ("where", Align::Left),
        ("by", Align::Left),
        ("median", Align::Right),
        ("p10", Align::Right),
        ("p90", Align::Right),
        ("GB/s", Align::Right),
        ("of memory", Align::Right),
        ("bits", Align::Left),
    ]);
    let known = |row: &Row| OPERATIONS.iter().position(|operation| operation.name() == row.op);
    let own = rows.iter().filter(|row| row.peer == "ferrokv" || row.peer == "cuda driver");
    let mut own: Vec<&&Row> = own.collect();
    // Ceilings first, then by operation; rows of one stay as they were measured.
    own.sort_by_key(|row| {
        (row.place == Place::Emulator, row.place == Place::Cpu, known(row).map_or(0, |i| i + 1))
    });
    for row in own {
        let bits = match row.verified {
            Some(true) => "same",
            Some(false) => "differ",
            None => "",
        };
        table.row([
            row.op.clone(),
            place(row.place).into(),
            if row.peer == "cuda driver" { "driver".into() } else { row.by().into() },
            time(row.median_us),
            time(row.p10_us),
            time(row.p90_us),
            gigabytes(row),
            row.fraction.map_or_else(String::new, |fraction| format!("{fraction:.3}")),
            bits.into(),
        ]);
    }
    table.render()
}

/// The fastest of ours on the GPU beside each peer's.
pub fn side_by_side(rows: &[&Row]) -> String {
    let mut table = Table::new(&[
        ("op", Align::Left),
        ("ours", Align::Left),
        ("median", Align::Right),
        ("peer", Align::Left),
        ("median", Align::Right),
        ("GB/s", Align::Right),
        ("peer / ours", Align::Right),
    ]);
    let mut any = false;
    for theirs in rows.iter().filter(|row| row.peer != "ferrokv" && row.peer != "cuda driver") {
        let Some(ours) = rival(rows, theirs) else { continue };
        any = true;
        table.row([
            theirs.op.clone(),
            ours.by().into(),
            time(ours.median_us),
            theirs.peer.clone(),
            time(theirs.median_us),
            gigabytes(theirs),
            format!("{:.2}", theirs.median_us / ours.median_us),
        ]);
    }
    if any { format!("\n{}", table.render()) } else { String::new() }
}

/// The fastest of our GPU rows that do the same as a peer's.
pub fn rival<'a>(rows: &[&'a Row], theirs: &Row) -> Option<&'a Row> {
    let same = |row: &&&Row| {
        row.peer == "ferrokv"
            && row.place == Place::Gpu
            && row.op == theirs.op
            && row.block_tokens == theirs.block_tokens
    };
    rows.iter().filter(same).min_by(|a, b| a.median_us.total_cmp(&b.median_us)).copied()
}
