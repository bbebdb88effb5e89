//! A picture: each head's bound against its true error, and the diagonal on which they would be equal.

use super::report::LayerReport;
use crate::cli::bench::Error;
use crate::cli::failure::Failure;
use host::certified::Rung;
use host::tensor_file::Target;
use plotters::coord::Shift;
use plotters::prelude::*;
use std::ffi::OsString;
use std::ops::Range;
use std::path::Path;

const SIZE: (u32, u32) = (900, 760);
const TEXT: i32 = 17;
const INK: RGBColor = RGBColor(40, 40, 40);
const GRID: RGBColor = RGBColor(228, 228, 228);
/// What errors of 0 are drawn as.
const LEAST: f64 = 1e-12;

/// A colour that everybody can tell from the others, and a name, by rung.
const RUNGS: [(Rung, &str, RGBColor); 5] = [
    (Rung::Quantized, "quantized", RGBColor(230, 159, 0)),
    (Rung::Promoted, "promoted", RGBColor(0, 114, 178)),
    (Rung::Expanded, "expanded", RGBColor(0, 158, 115)),
    (Rung::Dense, "dense", RGBColor(213, 94, 0)),
    (Rung::Layer, "layer", RGBColor(204, 121, 167)),
];

/// PREFIX.svg and PREFIX.png.
pub struct Picture {
    svg: Target,
    png: Target,
}

impl Picture {
    /// The files, checked before any work is done.
    ///
    /// # Errors
    /// A folder that is not there, or a path that is no file.
    pub fn new(prefix: &Path, input: &Path) -> Result<Picture, Failure> {
        let target = |extension: &str| {
            let mut path = OsString::from(prefix);
            path.push(extension);
            Target::new(Path::new(&path), true, Some(input))
        };
        Ok(Picture { svg: target(".svg")?, png: target(".png")? })
    }

    /// Draws the layers' heads.
    ///
    /// # Errors
    /// What cannot be drawn or written.
    pub fn draw(&self, title: &str, layers: &[LayerReport]) -> Result<(), Failure> {
        let failed = |target: &Target, reason: String| Error::Plot {
            path: target.path().display().to_string(),
            reason,
        };
        let mut text = String::new();
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        draw(area, title, layers).map_err(|error| failed(&self.svg, error.to_string()))?;
        self.svg.write(text.as_bytes())?;
        let png = png(title, layers).map_err(|reason| failed(&self.png, reason))?;
        Ok(self.png.write(&png)?)
    }
}

fn png(title: &str, layers: &[LayerReport]) -> Result<Vec<u8>, String> {
    // The library encodes into files only.
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let path = folder.path().join("picture.png");
    draw(BitMapBackend::new(&path, SIZE).into_drawing_area(), title, layers)
        .map_err(|error| error.to_string())?;
    std::fs::read(&path).map_err(|error| error.to_string())
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

fn draw<B: DrawingBackend>(
    root: DrawingArea<B, Shift>,
    title: &str,
    layers: &[LayerReport],
) -> Result<(), Box<dyn std::error::Error>>
where
    B::ErrorType: 'static,
{
    // A font of our own, so that a machine without any draws the same picture.
    plotters::style::register_font("sans-serif", FontStyle::Normal, dejavu::sans::regular())
        .map_err(|_| "the font is broken")?;
    let ink = |size: i32| TextStyle::from(("sans-serif", size)).color(&INK);
    let points: Vec<(Rung, f64, f64)> = layers
        .iter()
        .flat_map(|layer| &layer.rows)
        .filter(|row| row.bound.is_finite() && row.error.is_finite())
        .map(|row| (row.rung, row.error.max(LEAST), row.bound.max(LEAST)))
        .collect();
    let x = decades(points.iter().map(|point| point.1));
    let y = decades(points.iter().flat_map(|point| [point.1, point.2]));
    let diagonal = (x.start.max(y.start), x.end.min(y.end));
    let ticks = |range: &Range<f64>| (range.end / range.start).log10().round() as usize + 1;
    let (x_ticks, y_ticks) = (ticks(&x), ticks(&y));
    root.fill(&WHITE)?;
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
    for (rung, name, colour) in RUNGS {
        let own: Vec<(f64, f64)> =
            points.iter().filter(|point| point.0 == rung).map(|(_, error, bound)| (*error, *bound)).collect();
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
    root.present()?;
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
