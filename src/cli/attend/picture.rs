//! A picture: each head's bound against its true error, and the diagonal on which they would be equal.

use super::report::LayerReport;
use crate::cli::picture::{Drawing, GRID, INK, Outcome, TEXT, ink};
use host::kv::Source;
use plotters::coord::Shift;
use plotters::prelude::*;
use std::ops::Range;

const SIZE: (u32, u32) = (900, 760);
/// What errors of 0 are drawn as.
const LEAST: f64 = 1e-12;

/// A colour that everybody can tell from the others, and a name, by what heads were computed from.
const SOURCES: [(Source, &str, RGBColor); 3] = [
    (Source::Stored, "stored", RGBColor(230, 159, 0)),
    (Source::Mixed, "mixed with originals", RGBColor(0, 114, 178)),
    (Source::Originals, "originals alone", RGBColor(213, 94, 0)),
];

/// The layers' heads.
pub struct Heads<'a> {
    /// File and scheme.
    pub title: String,
    /// What is drawn.
    pub layers: &'a [LayerReport],
}

/// Whole powers of ten around the values.
fn decades(values: impl Iterator<Item = f64>) -> Range<f64> {
    let range = values.filter(|x| x.is_finite() && *x > 0.0);
    let (low, high) = range.fold((f64::INFINITY, 0f64), |(a, b), x| (a.min(x), b.max(x)));
    if low > high {
        return 0.1..1.0;
    }
    let (low, high) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    10f64.powi(low)..10f64.powi(high.max(low + 1))
}

impl Drawing for Heads<'_> {
    fn size(&self) -> (u32, u32) {
        SIZE
    }

    fn draw<B: DrawingBackend>(&self, root: &DrawingArea<B, Shift>) -> Outcome
    where
        B::ErrorType: 'static,
    {
        draw(root, &self.title, self.layers)
    }
}

fn draw<B: DrawingBackend>(root: &DrawingArea<B, Shift>, title: &str, layers: &[LayerReport]) -> Outcome
where
    B::ErrorType: 'static,
{
    // Without a bound there is the error to see: on the diagonal.
    let points: Vec<(Source, f64, f64)> = layers
        .iter()
        .flat_map(|layer| &layer.rows)
        .map(|row| (row.source, row.error, row.bound.unwrap_or(row.error)))
        .filter(|(_, error, bound)| error.is_finite() && bound.is_finite())
        .map(|(source, error, bound)| (source, error.max(LEAST), bound.max(LEAST)))
        .collect();
    let x = decades(points.iter().map(|point| point.1));
    let y = decades(points.iter().flat_map(|point| [point.1, point.2]));
    let diagonal = (x.start.max(y.start), x.end.min(y.end));
    let ticks = |range: &Range<f64>| (range.end / range.start).log10().round() as usize + 1;
    let (x_ticks, y_ticks) = (ticks(&x), ticks(&y));
    let root = root.titled(title, ink(TEXT + 3))?;
    let mut chart = ChartBuilder::on(&root)
        .margin(10)
        .margin_right(24)
        .x_label_area_size(56)
        .y_label_area_size(84)
        .build_cartesian_2d(x.log_scale(), y.log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .x_labels(x_ticks)
        .y_labels(y_ticks)
        .x_label_formatter(&|x| format!("{x:.0e}"))
        .y_label_formatter(&|y| format!("{y:.0e}"))
        .x_desc("true error, Euclidean norm")
        .y_desc("bound")
        .label_style(ink(TEXT - 2))
        .axis_desc_style(ink(TEXT))
        .draw()?;
    let (low, high) = diagonal;
    if low < high {
        let line = LineSeries::new([(low, low), (high, high)], INK.stroke_width(2));
        let sample = |(x, y): (i32, i32)| PathElement::new([(x, y), (x + 18, y)], INK.stroke_width(2));
        chart.draw_series(line)?.label("bound = error").legend(sample);
    }
    for (source, name, colour) in SOURCES {
        let own: Vec<(f64, f64)> = points
            .iter()
            .filter(|point| point.0 == source)
            .map(|(_, error, bound)| (*error, *bound))
            .collect();
        if own.is_empty() {
            continue;
        }
        let label = format!("{name} ({})", own.len());
        let dots = own.into_iter().map(|point| Circle::new(point, 4, colour.mix(0.7).filled()));
        let sample = move |(x, y): (i32, i32)| Circle::new((x + 9, y), 4, colour.filled());
        chart.draw_series(dots)?.label(label).legend(sample);
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .label_font(ink(TEXT - 2))
        .background_style(WHITE.mix(0.9))
        .border_style(GRID)
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_powers_of_ten() {
        let range = decades([0.02, 3.0, f64::NAN].into_iter());
        assert!((range.start - 0.01).abs() < 1e-12 && (range.end - 10.0).abs() < 1e-12, "{range:?}");
        assert_eq!(decades([0.0].into_iter()), 0.1..1.0);
        assert_eq!(decades([1.0].into_iter()), 1.0..10.0);
    }
}
