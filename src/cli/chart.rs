//! Charts of lines and intervals, panels above each other.

use super::picture::{Drawing, GRID, INK, Outcome, TEXT, colour, ink};
use plotters::coord::Shift;
use plotters::prelude::*;
use std::ops::Range;

/// Pixels.
const WIDTH: u32 = 900;
const PANEL: u32 = 400;
const HEAD: u32 = 40;
/// Between two lines' points at one label, of the room that a label has.
const SPREAD: f64 = 0.5;

/// A picture.
pub struct Chart {
    /// What all panels are about.
    pub title: String,
    /// From the top.
    pub panels: Vec<Panel>,
}

/// Lines over one pair of axes.
pub struct Panel {
    /// What x is.
    pub x_title: String,
    /// What y is.
    pub y_title: String,
    /// Where x is one of a few things, their names: x counts them from 0.
    pub labels: Vec<String>,
    /// Whether y is drawn by its logarithm: what is not above 0 is left out then.
    pub logarithmic: bool,
    /// A value of y that is always in the picture, with a line of its own.
    pub zero: Option<f64>,
    /// The lines; an empty one keeps its colour for another panel.
    pub lines: Vec<Line>,
}

/// Points of one kind.
pub struct Line {
    /// What they are; empty where the axes say it.
    pub name: String,
    /// Points, by x.
    pub points: Vec<Point>,
}

/// A point and its interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Its place.
    pub x: f64,
    /// Its value.
    pub y: f64,
    /// The interval's ends, if there is one.
    pub interval: Option<(f64, f64)>,
}

impl Point {
    fn values(&self) -> impl Iterator<Item = f64> + use<> {
        let (low, high) = self.interval.unwrap_or((self.y, self.y));
        [self.y, low, high].into_iter()
    }
}

/// What holds all values, with room at both ends.
fn around(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (low, high) = values
        .filter(|y| y.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), y| (low.min(y), high.max(y)));
    if low > high {
        return 0.0..1.0;
    }
    let room = 0.08 * (high - low);
    let room = if room > 0.0 { room } else { 0.05 * high.abs().max(1e-6) };
    low - room..high + room
}

/// Decimals that tell the ticks of a range apart.
fn decimals(range: &Range<f64>) -> usize {
    (2.0 - (range.end - range.start).log10()).clamp(0.0, 12.0) as usize
}

/// Three digits of a number above 0: `0.0316`.
fn significant(y: f64) -> String {
    let decimals = (2.0 - y.log10().floor()).clamp(0.0, 12.0) as usize;
    format!("{y:.decimals$}")
}

impl Drawing for Chart {
    fn size(&self) -> (u32, u32) {
        (WIDTH, HEAD + PANEL * self.panels.len() as u32)
    }

    fn draw<B: DrawingBackend>(&self, root: &DrawingArea<B, Shift>) -> Outcome
    where
        B::ErrorType: 'static,
    {
        let root = root.titled(&self.title, ink(TEXT + 2))?;
        let areas = root.split_evenly((self.panels.len().max(1), 1));
        areas.iter().zip(&self.panels).try_for_each(|(area, panel)| panel.draw(area))
    }
}

impl Panel {
    /// Where a line's point is drawn: at a label, lines stand beside each other.
    fn place(&self, line: usize, x: f64) -> f64 {
        let own = |line: usize| !self.lines[line].points.is_empty();
        if self.labels.is_empty() {
            return x;
        }
        let shown = (0..self.lines.len()).filter(|other| own(*other)).count().max(1);
        let before = (0..line).filter(|other| own(*other)).count();
        x + SPREAD * ((before as f64 + 0.5) / shown as f64 - 0.5)
    }

    /// Whether a value of y is drawn.
    fn shows(&self, y: f64) -> bool {
        !self.logarithmic || y > 0.0
    }

    /// Where it is drawn.
    fn height(&self, y: f64) -> f64 {
        if self.logarithmic { y.log10() } else { y }
    }

    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Outcome
    where
        B::ErrorType: 'static,
    {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let values = points().flat_map(Point::values).chain(self.zero);
        let y = around(values.filter(|y| self.shows(*y)).map(|y| self.height(y)));
        let x = match self.labels.len() {
            0 => around(points().map(|point| point.x)),
            n => -0.5..n as f64 - 0.5,
        };
        let decimals = decimals(&y);
        let ends = (x.start, x.end);
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .margin_right(24)
            .x_label_area_size(52)
            .y_label_area_size(96)
            .build_cartesian_2d(x, y)?;
        let label = |x: &f64| match self.labels.is_empty() {
            true => format!("{x:.0}"),
            false if (x - x.round()).abs() < 1e-6 && *x > -0.1 => {
                self.labels.get(x.round() as usize).cloned().unwrap_or_default()
            }
            false => String::new(),
        };
        let value = |y: &f64| match self.logarithmic {
            true => significant(10f64.powf(*y)),
            false => format!("{y:.decimals$}"),
        };
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .x_label_formatter(&label)
            .y_label_formatter(&value)
            .x_desc(&self.x_title)
            .y_desc(&self.y_title)
            .label_style(ink(TEXT - 2))
            .axis_desc_style(ink(TEXT));
        if !self.labels.is_empty() {
            mesh.x_labels(self.labels.len());
        }
        mesh.draw()?;
        if let Some(zero) = self.zero {
            chart.draw_series(DashedLineSeries::new(
                [(ends.0, zero), (ends.1, zero)],
                6,
                5,
                INK.stroke_width(1),
            ))?;
        }
        for (number, line) in self.lines.iter().enumerate().filter(|(_, line)| !line.points.is_empty()) {
            let colour = colour(number);
            let at = |point: &Point| (self.place(number, point.x), self.height(point.y));
            let shown = || line.points.iter().filter(|point| self.shows(point.y));
            let sample = move |(x, y): (i32, i32)| Circle::new((x + 9, y), 4, colour.filled());
            for point in shown() {
                if let Some((low, high)) = point.interval {
                    let x = self.place(number, point.x);
                    // Of an interval that reaches 0 the part from the point up.
                    let low = if self.shows(low) { low } else { point.y };
                    let (low, high) = (self.height(low), self.height(high));
                    chart.draw_series([PathElement::new([(x, low), (x, high)], colour.stroke_width(2))])?;
                }
            }
            if self.labels.is_empty() {
                chart.draw_series(LineSeries::new(shown().map(at), colour.stroke_width(2)))?;
            }
            let size = if self.labels.is_empty() { 2 } else { 4 };
            let dots = shown().map(|point| Circle::new(at(point), size, colour.filled()));
            let drawn = chart.draw_series(dots)?;
            if !line.name.is_empty() {
                drawn.label(&line.name).legend(sample);
            }
        }
        if self.lines.iter().all(|line| line.name.is_empty()) {
            return Ok(());
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .label_font(ink(TEXT - 2))
            .background_style(WHITE.mix(0.9))
            .border_style(GRID)
            .draw()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(counts: [usize; 3]) -> Panel {
        let line = |count: usize| Line {
            name: "a".into(),
            points: (0..count).map(|x| Point { x: x as f64, y: 2.0, interval: None }).collect(),
        };
        Panel {
            x_title: String::new(),
            y_title: String::new(),
            labels: vec!["512".into(), "1024".into()],
            logarithmic: false,
            zero: None,
            lines: counts.map(line).into(),
        }
    }

    #[test]
    fn lines_stand_beside_each_other_at_a_label() {
        let panel = panel([2, 0, 2]);
        assert_eq!((panel.place(0, 1.0), panel.place(2, 1.0)), (0.875, 1.125));
    }

    #[test]
    fn ranges_hold_all_values() {
        let range = around([1.0, f64::NAN, 2.0].into_iter());
        assert!(range.start < 1.0 && range.end > 2.0);
        let one = around([0.0].into_iter());
        assert!(one.start < 0.0 && one.end > 0.0);
        assert_eq!(around(std::iter::empty()), 0.0..1.0);
        assert_eq!([0.0..0.002, 0.0..30.0].map(|range| decimals(&range)), [4, 0]);
    }

    /// Of logarithms what is not above 0 is left out, and an interval ends where it would be.
    #[test]
    fn logarithms_leave_out_what_has_none() {
        let point = |x: f64, y: f64| Point { x, y, interval: Some((y - 1.0, y + 1.0)) };
        let line =
            Line { name: String::new(), points: vec![point(1.0, 0.0), point(2.0, 0.5), point(3.0, 40.0)] };
        let panel = Panel { labels: Vec::new(), logarithmic: true, lines: vec![line], ..panel([0; 3]) };
        let heights: Vec<f64> = [0.01, 1.0, 100.0].map(|y| panel.height(y)).into();
        assert_eq!(heights, [-2.0, 0.0, 2.0]);
        let text =
            crate::cli::picture::svg(&Chart { title: String::new(), panels: vec![panel] }).expect("drawn");
        assert_eq!(text.matches("<circle").count(), 2);
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        assert_eq!([0.0316227, 0.5, 12.34, 4567.0].map(significant), ["0.0316", "0.500", "12.3", "4567"]);
    }

    #[test]
    fn a_chart_shows_what_it_has() {
        let chart = Chart { title: "of things".into(), panels: vec![panel([2, 0, 2])] };
        let text = crate::cli::picture::svg(&chart).expect("drawn");
        for word in ["of things", "1024", "512"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        // Two points of each of two lines, and one beside each name.
        assert_eq!(text.matches("<circle").count(), 6);
        let mut nameless = panel([2, 0, 0]);
        nameless.lines.iter_mut().for_each(|line| line.name.clear());
        let chart = Chart { title: String::new(), panels: vec![nameless] };
        let text = crate::cli::picture::svg(&chart).expect("drawn");
        assert_eq!(text.matches("<circle").count(), 2);
    }
}
