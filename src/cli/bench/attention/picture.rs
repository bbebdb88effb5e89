//! Pictures: bandwidth by context, a panel a batch.

use super::super::plot_data::{Chart, Panel, Series, Stroke, X};
use super::arguments::{Arguments, Shape};
use super::report::{BlockOrder, Report, Row};
use super::summary::fastest_forms;
use crate::cli::failure::Failure;
use crate::cli::picture;
use crate::cli::tokens::short;
use std::ffi::OsString;
use std::path::Path;

/// The lines of other libraries.
const PEERS: [(&str, &str, (u8, u8, u8)); 6] = [
    ("torch cudnn", "PyTorch, cuDNN", (0, 158, 115)),
    ("torch flash", "PyTorch, flash", (86, 180, 233)),
    ("torch efficient", "PyTorch, efficient", (204, 121, 167)),
    ("torch flex", "PyTorch, flex", (120, 94, 60)),
    ("torch math", "PyTorch, math", (150, 150, 150)),
    ("flashinfer", "FlashInfer", (84, 39, 143)),
];

/// Colours of schemes, in the order in which they are measured.
const COLOURS: [(u8, u8, u8); 6] =
    [(213, 94, 0), (230, 159, 0), (0, 114, 178), (140, 20, 20), (90, 120, 40), (60, 60, 110)];

/// What is drawn, name and colour: our schemes, then the peers.
fn lines<'a>(rows: &[&'a Row]) -> Vec<(&'a str, &'a str, (u8, u8, u8))> {
    let mut schemes: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| row.peer == "ferrokv") {
        if !schemes.contains(&row.by()) {
            schemes.push(row.by());
        }
    }
    let ours = schemes.into_iter().enumerate().map(|(i, name)| (name, name, COLOURS[i % COLOURS.len()]));
    ours.chain(PEERS).collect()
}

/// One picture, and its files.
pub struct Picture {
    shape: Shape,
    dtype: String,
    files: picture::Picture,
}

/// A picture for each shape and type, its files checked before any work is done.
///
/// # Errors
/// A folder that is not there, or a path that is no file.
pub fn targets(arguments: &Arguments, prefix: &Path) -> Result<Vec<Picture>, Failure> {
    let mut pictures = Vec::new();
    for &shape in &arguments.shapes {
        for dtype in &arguments.dtype {
            let Shape { q_heads, kv_heads, head_dim } = shape;
            let mut path = OsString::from(prefix);
            path.push(format!("-{q_heads}-{kv_heads}-{head_dim}-{dtype}"));
            let files = picture::Picture::new(Path::new(&path), None)?;
            pictures.push(Picture { shape, dtype: dtype.clone(), files });
        }
    }
    Ok(pictures)
}

/// Draws the report.
///
/// # Errors
/// What cannot be drawn or written.
pub fn draw(report: &Report, pictures: &[Picture]) -> Result<(), Failure> {
    for Picture { shape, dtype, files } in pictures {
        files.write(&chart(report, *shape, dtype))?;
    }
    Ok(())
}

/// The bandwidth of one shape and type.
pub fn chart(report: &Report, shape: Shape, dtype: &str) -> Chart {
    let of_shape = |row: &&Row| {
        (row.q_heads, row.kv_heads, row.head_dim) == (shape.q_heads, shape.kv_heads, shape.head_dim)
            && row.dtype == dtype
            && row.op == "decode"
    };
    let rows: Vec<&Row> = report.rows.iter().filter(of_shape).collect();
    let (mut batches, mut contexts) = (Vec::new(), Vec::new());
    for row in &rows {
        batches.push(row.batch);
        contexts.push(row.context);
    }
    for list in [&mut batches, &mut contexts] {
        list.sort_unstable();
        list.dedup();
    }
    let machine = report.environment.gpu.as_ref().map_or(&report.environment.cpu, |gpu| &gpu.name);
    Chart {
        title: format!("Decode attention {shape} {dtype}: bandwidth ({machine})"),
        panels: batches.iter().map(|batch| panel(&rows, *batch, &contexts)).collect(),
    }
}

fn panel(rows: &[&Row], batch: u32, contexts: &[u32]) -> Panel {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.batch == batch).copied().collect();
    // Of each peer its fastest form.
    let shown: Vec<(f64, &Row)> = contexts
        .iter()
        .enumerate()
        .flat_map(|(x, context)| {
            let ours = rows.iter().filter(|row| row.peer == "ferrokv" && row.context == *context).copied();
            ours.chain(fastest_forms(&rows, *context)).map(move |row| (x as f64, row)).collect::<Vec<_>>()
        })
        .collect();
    let ceiling = shown.iter().filter(|(_, row)| row.by() == "dense");
    let ceiling = ceiling.filter_map(|(x, row)| Some((*x, row.bytes as f64 / row.roofline_us? * 1e-3)));
    let mut series = Vec::new();
    let mut push = |name: &str, colour, stroke, points: Vec<(f64, f64)>| {
        if !points.is_empty() {
            series.push(Series { name: name.into(), colour, stroke, points });
        }
    };
    push("reading alone", (0, 0, 0), Stroke::Dashed, ceiling.collect());
    for (by, name, colour) in lines(&rows) {
        let points = |order: BlockOrder| {
            let of =
                shown.iter().filter(|(_, row)| row.by() == by && row.blocks.unwrap_or_default() == order);
            of.map(|(x, row)| (*x, row.gb_per_s)).collect()
        };
        push(name, colour, Stroke::Solid, points(BlockOrder::Shuffled));
        push(&format!("{name}, blocks in order"), colour, Stroke::Dashed, points(BlockOrder::InOrder));
    }
    Panel {
        title: format!("batch {batch}"),
        x: X::Sizes(contexts.iter().map(|context| short(*context)).collect()),
        x_title: "context, tokens (K = 1024)".into(),
        y_title: "GB/s of the formula's bytes".into(),
        series,
    }
}
