//! Pictures of a report: bandwidth by size, and time by elements, as SVG and PNG.

use super::plot_data;
use super::report::{Place, Report, Row};
use crate::cli::failure::Failure;
use crate::cli::picture::{self, Drawing, GRID, INK, Outcome, TEXT, ink};
use crate::cli::text;
use plot_data::{Chart, Panel, Series, Stroke, X};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{IntoSegmentedCoord, SegmentValue};
use plotters::prelude::*;
use std::ffi::OsString;
use std::path::Path;

/// Picture size: two panels above each other, read at the width of a README.
const SIZE: (u32, u32) = (1100, 860);
/// Room for the legend, at the right.
const LEGEND: u32 = 225;
/// Type size of titles.
const TITLE: i32 = 21;

/// One picture, and its files.
pub struct Picture {
    kind: Kind,
    files: picture::Picture,
}

#[derive(Clone, Copy)]
enum Kind {
    Bandwidth,
    Time,
}

/// The four files that `prefix` names, checked before any work is done.
///
/// # Errors
/// A folder that is not there, or a path that is no file.
pub fn targets(prefix: &Path) -> Result<Vec<Picture>, Failure> {
    let picture = |(kind, name): (Kind, &str)| {
        let mut path = OsString::from(prefix);
        path.push(name);
        Ok(Picture { kind, files: picture::Picture::new(Path::new(&path), None)? })
    };
    [(Kind::Bandwidth, "-bandwidth"), (Kind::Time, "-time")].into_iter().map(picture).collect()
}

/// Draws the report.
///
/// # Errors
/// What cannot be drawn or written.
pub fn int8(report: &Report, pictures: &[Picture]) -> Result<(), Failure> {
    for Picture { kind, files } in pictures {
        files.write(&match kind {
            Kind::Bandwidth => plot_data::bandwidth(report),
            Kind::Time => plot_data::time(report),
        })?;
    }
    Ok(())
}

impl Drawing for Chart {
    fn size(&self) -> (u32, u32) {
        SIZE
    }

    fn draw<B: DrawingBackend>(&self, root: &DrawingArea<B, Shift>) -> Outcome
    where
        B::ErrorType: 'static,
    {
        let root = root.titled(&self.title, ink(TITLE))?;
        let (width, height) = root.dim_in_pixel();
        let (plots, legend) = root.split_horizontally(width - LEGEND);
        let areas = plots.split_evenly((self.panels.len().max(1), 1));
        for (area, panel) in areas.iter().zip(&self.panels) {
            match &panel.x {
                X::Sizes(_) => by_size(area, panel)?,
                X::Elements => by_elements(area, panel)?,
            }
        }
        draw_legend(&legend, &self.legend(), height)
    }
}

/// The range of all points' y, if there is any.
fn range(panel: &Panel) -> Option<(f64, f64)> {
    let values = panel.series.iter().flat_map(|series| series.points.iter().map(|point| point.1));
    values.filter(|y| y.is_finite() && *y > 0.0).fold(None, |range, y| match range {
        None => Some((y, y)),
        Some((low, high)) => Some((y.min(low), y.max(high))),
    })
}

fn by_size<B: DrawingBackend>(area: &DrawingArea<B, Shift>, panel: &Panel) -> Outcome
where
    B::ErrorType: 'static,
{
    let X::Sizes(labels) = &panel.x else { return Ok(()) };
    let top = range(panel).map_or(1.0, |(_, high)| high) * 1.12;
    let count = labels.len().max(1) as i32;
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ink(TEXT))
        .margin(8)
        .x_label_area_size(52)
        .y_label_area_size(78)
        .build_cartesian_2d((0..count - 1).into_segmented(), 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .x_labels(labels.len() + 1)
        .x_label_formatter(&|value| match value {
            SegmentValue::CenterOf(index) => labels.get(*index as usize).cloned().unwrap_or_default(),
            _ => String::new(),
        })
        .y_label_formatter(&|y| text::count(*y as u64))
        .x_desc(&panel.x_title)
        .y_desc(&panel.y_title)
        .label_style(ink(TEXT - 2))
        .axis_desc_style(ink(TEXT))
        .draw()?;
    for series in &panel.series {
        let points: Vec<(SegmentValue<i32>, f64)> =
            series.points.iter().map(|(x, y)| (SegmentValue::CenterOf(*x as i32), *y)).collect();
        let style = line(series);
        match series.stroke {
            Stroke::Dashed => {
                chart.draw_series(DashedLineSeries::new(points, 7, 5, style))?;
            }
            Stroke::Solid => {
                chart.draw_series(LineSeries::new(points.clone(), style))?;
                let dots = points.into_iter().map(|point| Circle::new(point, 4, colour(series).filled()));
                chart.draw_series(dots)?;
            }
        }
    }
    Ok(())
}

fn by_elements<B: DrawingBackend>(area: &DrawingArea<B, Shift>, panel: &Panel) -> Outcome
where
    B::ErrorType: 'static,
{
    let (low, high) = range(panel).unwrap_or((1.0, 10.0));
    let xs = panel.series.iter().flat_map(|series| series.points.iter().map(|point| point.0));
    let (first, last) = xs.fold((f64::INFINITY, 1.0_f64), |(a, b), x| (x.min(a), x.max(b)));
    let first = if first.is_finite() { first } else { 1.0 };
    // Whole powers of ten, so that every tick is one.
    let whole = |low: f64, high: f64| {
        let (low, high) = (10f64.powf(low.log10().floor()), 10f64.powf(high.log10().ceil()));
        low..if high > low { high } else { low * 10.0 }
    };
    let (x, y) = (whole(first, last), whole(low, high));
    let ticks = |range: &std::ops::Range<f64>| (range.end / range.start).log10().round() as usize + 1;
    let (x_ticks, y_ticks) = (ticks(&x), ticks(&y));
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ink(TEXT))
        .margin(8)
        .margin_right(18)
        .x_label_area_size(52)
        .y_label_area_size(88)
        .build_cartesian_2d(x.log_scale(), y.log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .x_labels(x_ticks)
        .y_labels(y_ticks)
        .x_label_formatter(&|x| power(*x))
        .y_label_formatter(&|y| tick(*y))
        .x_desc(&panel.x_title)
        .y_desc(&panel.y_title)
        .label_style(ink(TEXT - 2))
        .axis_desc_style(ink(TEXT))
        .draw()?;
    for series in &panel.series {
        let points = series.points.clone();
        match series.stroke {
            Stroke::Dashed => {
                chart.draw_series(DashedLineSeries::new(points, 7, 5, line(series)))?;
            }
            Stroke::Solid => {
                chart.draw_series(LineSeries::new(points.clone(), line(series)))?;
                let dots = points.into_iter().map(|point| Circle::new(point, 4, colour(series).filled()));
                chart.draw_series(dots)?;
            }
        }
    }
    Ok(())
}

fn draw_legend<B: DrawingBackend>(area: &DrawingArea<B, Shift>, series: &[&Series], height: u32) -> Outcome
where
    B::ErrorType: 'static,
{
    const STEP: i32 = 27;
    let top = (height as i32 - STEP * series.len() as i32) / 2;
    for (index, series) in series.iter().enumerate() {
        let y = top + STEP * index as i32;
        let style = line(series);
        match series.stroke {
            Stroke::Dashed => {
                for start in [8, 20, 32] {
                    area.draw(&PathElement::new([(start, y), (start + 7, y)], style))?;
                }
            }
            Stroke::Solid => {
                area.draw(&PathElement::new([(8, y), (39, y)], style))?;
                area.draw(&Circle::new((23, y), 4, colour(series).filled()))?;
            }
        }
        let label = ink(TEXT - 2);
        area.draw(&Text::new(series.name.clone(), (48, y - (TEXT - 2) / 2 - 1), label))?;
    }
    Ok(())
}

fn colour(series: &Series) -> RGBColor {
    let (r, g, b) = series.colour;
    RGBColor(r, g, b)
}

fn line(series: &Series) -> ShapeStyle {
    ShapeStyle::from(colour(series)).stroke_width(2)
}

/// `10⁶`.
fn power(x: f64) -> String {
    let digits = ["⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"];
    let exponent = x.log10().round() as i64;
    let sign = if exponent < 0 { "⁻" } else { "" };
    let text: String =
        exponent.unsigned_abs().to_string().bytes().map(|digit| digits[(digit - b'0') as usize]).collect();
    format!("10{sign}{text}")
}

/// `10 µs`.
fn tick(microseconds: f64) -> String {
    match microseconds {
        us if us < 999.0 => format!("{} µs", (us * 1000.0).round() / 1000.0),
        us if us < 999e3 => format!("{} ms", (us / 1e3).round()),
        us => format!("{} s", (us / 1e6).round()),
    }
}

/// Whether the row is of the GPU, and of the CPU if there is no GPU.
pub fn main_place(rows: &[Row]) -> Place {
    if rows.iter().any(|row| row.place == Place::Gpu) { Place::Gpu } else { Place::Cpu }
}
