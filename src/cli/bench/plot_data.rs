//! Which rows become which lines.

use super::plot::main_place;
use super::report::{Place, Report, Row};

/// A picture of panels above each other.
pub struct Chart {
    /// The title over all.
    pub title: String,
    /// The panels.
    pub panels: Vec<Panel>,
}

/// One pair of axes.
pub struct Panel {
    /// Its title.
    pub title: String,
    /// The horizontal axis.
    pub x: X,
    /// Its title.
    pub x_title: String,
    /// The vertical axis's title.
    pub y_title: String,
    /// The lines.
    pub series: Vec<Series>,
}

/// A horizontal axis.
pub enum X {
    /// One place a matrix, by these labels; points count them from 0.
    Sizes(Vec<String>),
    /// The number of elements, logarithmic, and so is the vertical axis.
    Elements,
}

/// How a line is drawn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Stroke {
    /// With a dot at every point.
    Solid,
    /// A ceiling.
    Dashed,
}

/// One line.
pub struct Series {
    /// What the legend says.
    pub name: String,
    /// Red, green, blue.
    pub colour: (u8, u8, u8),
    /// How it is drawn.
    pub stroke: Stroke,
    /// Its points, from left to right.
    pub points: Vec<(f64, f64)>,
}

impl Chart {
    /// One entry a name, in the order of the panels.
    pub fn legend(&self) -> Vec<&Series> {
        let mut entries: Vec<&Series> = Vec::new();
        for series in self.panels.iter().flat_map(|panel| &panel.series) {
            if entries.iter().all(|entry| entry.name != series.name) {
                entries.push(series);
            }
        }
        entries
    }
}

/// A line of the charts: which rows, by place, peer or variant; and its looks. Colours differ in lightness
/// too.
struct Line {
    place: Place,
    by: &'static str,
    name: &'static str,
    colour: (u8, u8, u8),
}

const LINES: [Line; 11] = [
    Line { place: Place::Gpu, by: "naive", name: "naive", colour: (230, 159, 0) },
    Line { place: Place::Gpu, by: "tiled", name: "tiled", colour: (86, 180, 233) },
    Line { place: Place::Gpu, by: "coarsened", name: "coarsened", colour: (0, 158, 115) },
    Line { place: Place::Gpu, by: "vectorized", name: "vectorized", colour: (204, 121, 167) },
    Line { place: Place::Gpu, by: "rows", name: "rows", colour: (213, 94, 0) },
    Line { place: Place::Gpu, by: "wide", name: "wide", colour: (240, 180, 170) },
    Line { place: Place::Gpu, by: "fused", name: "fused (block scales)", colour: (0, 114, 178) },
    Line { place: Place::Gpu, by: "torch.compile", name: "torch.compile", colour: (120, 94, 60) },
    Line { place: Place::Gpu, by: "triton", name: "Triton", colour: (150, 150, 150) },
    Line { place: Place::Cpu, by: "simd", name: "CPU, SIMD, all cores", colour: (84, 39, 143) },
    Line { place: Place::Cpu, by: "paper", name: "CPU, the paper's loop", colour: (90, 90, 90) },
];
const BLACK: (u8, u8, u8) = (0, 0, 0);

/// The two directions: what a panel shows, by column and by block of tokens.
const DIRECTIONS: [(&str, [&str; 2]); 2] =
    [("Quantize", ["quantize", "block_quantize"]), ("Dequantize", ["dequantize", "block_dequantize"])];

/// The rows of the report's first element type.
fn of_first_type(report: &Report) -> Vec<&Row> {
    let Some(first) = report.rows.first() else { return Vec::new() };
    report.rows.iter().filter(|row| row.dtype == first.dtype).collect()
}

/// Whether a row belongs to a line of a panel. The CPU's rows of blocks would double its line.
fn belongs(row: &Row, line: &Line, operations: [&str; 2]) -> bool {
    let by_column = row.op == operations[0];
    let by_block = row.op == operations[1] && line.by == "fused";
    row.place == line.place && row.by() == line.by && (by_column || by_block)
}

fn machine(report: &Report) -> String {
    let name = report.environment.gpu.as_ref().map_or(&report.environment.cpu, |gpu| &gpu.name);
    let dtype = report.rows.first().map_or("", |row| row.dtype.as_str());
    format!("{name}, {dtype}")
}

/// `128K` for 131072.
fn short(n: usize) -> String {
    if n >= 1024 && n.is_multiple_of(1024) { format!("{}K", n / 1024) } else { n.to_string() }
}

/// GB/s by matrix.
pub fn bandwidth(report: &Report) -> Chart {
    let rows = of_first_type(report);
    let place = main_place(&report.rows);
    let mut sizes: Vec<(usize, usize)> = rows.iter().map(|row| (row.tokens, row.channels)).collect();
    sizes.sort_by_key(|(tokens, channels)| (tokens * channels, *tokens));
    sizes.dedup();
    // A size with no row of this place (the emulator's own) has nothing to show.
    sizes.retain(|size| rows.iter().any(|row| row.place == place && (row.tokens, row.channels) == *size));
    let at = |row: &Row| sizes.iter().position(|size| *size == (row.tokens, row.channels));
    let panel = |&(title, operations): &(&str, [&str; 2])| {
        let mut series = Vec::new();
        // The ceiling first, under the lines.
        let mut ceiling: Vec<(f64, f64)> = Vec::new();
        for row in rows.iter().filter(|row| row.place == place && row.op == operations[0]) {
            if let (Some(x), Some(us)) = (at(row), row.roofline_us) {
                ceiling.push((x as f64, row.bytes as f64 / us * 1e-3));
            }
        }
        ceiling.sort_by(|a, b| a.0.total_cmp(&b.0));
        ceiling.dedup_by(|a, b| a.0 == b.0);
        if !ceiling.is_empty() {
            let name = if place == Place::Gpu { "memory alone" } else { "parallel memcpy" };
            series.push(Series { name: name.into(), colour: BLACK, stroke: Stroke::Dashed, points: ceiling });
        }
        for line in LINES.iter().filter(|line| line.place == place) {
            let points = rows.iter().filter(|row| belongs(row, line, operations));
            let points = points.filter_map(|row| Some((at(row)? as f64, row.gb_per_s)));
            push(&mut series, line, points.collect());
        }
        Panel {
            title: title.into(),
            x: X::Sizes(sizes.iter().map(|(t, d)| format!("{}×{}", short(*t), short(*d))).collect()),
            x_title: "tokens × channels (K = 1024)".into(),
            y_title: "GB/s read + written".into(),
            series,
        }
    };
    Chart {
        title: format!("INT8 quantization: bandwidth ({})", machine(report)),
        panels: DIRECTIONS.iter().map(panel).collect(),
    }
}

/// Time by elements.
pub fn time(report: &Report) -> Chart {
    let rows = of_first_type(report);
    let panel = |&(title, operations): &(&str, [&str; 2])| {
        let mut series = Vec::new();
        for line in LINES.iter() {
            let points = rows.iter().filter(|row| belongs(row, line, operations));
            push(&mut series, line, points.map(|row| (row.elements() as f64, row.median_us)).collect());
        }
        Panel {
            title: title.into(),
            x: X::Elements,
            x_title: "elements (tokens × channels)".into(),
            y_title: "time a call".into(),
            series,
        }
    };
    Chart {
        title: format!("INT8 quantization: time ({})", machine(report)),
        panels: DIRECTIONS.iter().map(panel).collect(),
    }
}

fn push(series: &mut Vec<Series>, line: &Line, mut points: Vec<(f64, f64)>) {
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    if !points.is_empty() {
        let (name, colour) = (line.name.into(), line.colour);
        series.push(Series { name, colour, stroke: Stroke::Solid, points });
    }
}
