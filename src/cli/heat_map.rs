//! Heat maps: rows by columns, beside each other where there are several.

use super::picture::{Drawing, INK, Outcome, TEXT, ink};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Pixels of a cell, and around a map.
const CELL: (i32, i32) = (104, 44);
const LEFT: i32 = 76;
const BELOW: i32 = 66;
const GAP: i32 = 24;
/// Where the legend begins, what a line of it takes, and the room for a map's name.
const LEGEND: i32 = 34;
const LINE: i32 = 22;
const NAME: i32 = 28;
/// The least width: what title and legend take.
const WIDTH: i32 = 640;
/// Between two lines of a hatched cell.
const HATCH: usize = 9;

/// A cell.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// Its colour.
    pub fill: RGBColor,
    /// What is written on it.
    pub text: String,
    /// A second line; empty if there is none.
    pub note: String,
    /// Whether it has a frame.
    pub framed: bool,
    /// Whether it is hatched.
    pub hatched: bool,
}

impl Cell {
    /// A colour and a text.
    pub fn new(fill: RGBColor, text: String) -> Self {
        Cell { fill, text, note: String::new(), framed: false, hatched: false }
    }
}

/// One map.
pub struct Map {
    /// What it is of.
    pub name: String,
    /// [rows][columns].
    pub cells: Vec<Vec<Option<Cell>>>,
    /// Thick lines between cells, from corner to corner: columns and rows to the left of and above it.
    pub edges: Vec<[(usize, usize); 2]>,
}

/// Maps beside each other, with the same colours.
pub struct HeatMaps {
    /// What all are about.
    pub title: String,
    /// What colours and marks mean, line by line.
    pub legend: Vec<String>,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// Names of the rows, from the top.
    pub rows: Vec<String>,
    /// What columns and rows are.
    pub axes: [String; 2],
    /// The maps.
    pub maps: Vec<Map>,
}

impl HeatMaps {
    fn top(&self) -> i32 {
        LEGEND + LINE * self.legend.len() as i32 + NAME
    }

    fn map_size(&self) -> (i32, i32) {
        let (columns, rows) = (self.columns.len() as i32, self.rows.len() as i32);
        (LEFT + CELL.0 * columns.max(3) + GAP, self.top() + CELL.1 * rows + BELOW)
    }
}

/// A colour between those of `stops`, which are at 0, 1, 2 and so on.
fn between(stops: &[(f64, f64, f64)], at: f64) -> RGBColor {
    let below = (at.max(0.0).floor() as usize).min(stops.len() - 2);
    let part = (at - below as f64).clamp(0.0, 1.0);
    let (a, b) = (stops[below], stops[below + 1]);
    let mix = |a: f64, b: f64| (a + part * (b - a)).round() as u8;
    RGBColor(mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}

/// White at 0, through orange, to dark red at the least.
pub fn shade(value: f64, least: f64) -> RGBColor {
    const STOPS: [(f64, f64, f64); 4] =
        [(255.0, 252.0, 240.0), (253.0, 204.0, 138.0), (227.0, 89.0, 51.0), (127.0, 0.0, 0.0)];
    between(&STOPS, if least < 0.0 { (value / least).clamp(0.0, 1.0) } else { 0.0 } * 3.0)
}

/// White at 0; to one side through light to dark blue at `most`, to the other to orange at its negative.
pub fn two_sided(value: f64, most: f64) -> RGBColor {
    const UP: [(f64, f64, f64); 3] = [(250.0, 250.0, 250.0), (107.0, 174.0, 214.0), (8.0, 69.0, 148.0)];
    const DOWN: [(f64, f64, f64); 3] = [(250.0, 250.0, 250.0), (253.0, 174.0, 97.0), (217.0, 72.0, 1.0)];
    let part = if most > 0.0 { (value / most).clamp(-1.0, 1.0) } else { 0.0 };
    between(if part < 0.0 { &DOWN } else { &UP }, 2.0 * part.abs())
}

/// The lines of a hatched rectangle, from corner to corner of small squares.
fn hatching((x, y): (i32, i32), (width, height): (i32, i32)) -> impl Iterator<Item = [(i32, i32); 2]> {
    (0..width + height).step_by(HATCH).map(move |along| {
        let (down, over) = (along.min(height), (along - height).max(0));
        let (right, up) = (along.min(width), (along - width).max(0));
        [(x + over, y + down), (x + right, y + up)]
    })
}

fn draw_cell<B: DrawingBackend>(root: &DrawingArea<B, Shift>, cell: &Cell, (x, y): (i32, i32)) -> Outcome
where
    B::ErrorType: 'static,
{
    let (width, height) = (CELL.0 - 2, CELL.1 - 2);
    let fill = cell.fill;
    // As bright as an eye finds it: green counts most, blue least.
    let brightness = 0.30 * f64::from(fill.0) + 0.59 * f64::from(fill.1) + 0.11 * f64::from(fill.2);
    let colour = if brightness < 120.0 { &WHITE } else { &INK };
    root.draw(&Rectangle::new([(x, y), (x + width, y + height)], fill.filled()))?;
    if cell.hatched {
        for line in hatching((x, y), (width, height)) {
            root.draw(&PathElement::new(line, colour.mix(0.25).stroke_width(1)))?;
        }
    }
    if cell.framed {
        let ends = [(x + 1, y + 1), (x + width - 1, y + height - 1)];
        root.draw(&Rectangle::new(ends, colour.stroke_width(2)))?;
    }
    let write = |text: &str, down: i32, smaller: i32| {
        let style = TextStyle::from(("sans-serif", TEXT - 4 - smaller)).color(colour);
        let style = style.pos(Pos::new(HPos::Center, VPos::Center));
        root.draw(&Text::new(text.to_owned(), (x + CELL.0 / 2, y + down), style))
    };
    if cell.note.is_empty() {
        write(&cell.text, CELL.1 / 2, 0)?;
    } else {
        write(&cell.text, CELL.1 / 2 - 8, 0)?;
        write(&cell.note, CELL.1 / 2 + 9, 2)?;
    }
    Ok(())
}

impl Drawing for HeatMaps {
    fn size(&self) -> (u32, u32) {
        let (width, height) = self.map_size();
        (((width * self.maps.len() as i32).max(WIDTH)) as u32, height as u32)
    }

    fn draw<B: DrawingBackend>(&self, root: &DrawingArea<B, Shift>) -> Outcome
    where
        B::ErrorType: 'static,
    {
        let place = |x, y| Pos::new(x, y);
        let text =
            |text: &str, at: (i32, i32), style: TextStyle<'static>| Text::new(text.to_owned(), at, style);
        root.draw(&text(&self.title, (10, 8), ink(TEXT + 1).pos(place(HPos::Left, VPos::Top))))?;
        for (number, line) in self.legend.iter().enumerate() {
            let style = ink(TEXT - 2).pos(place(HPos::Left, VPos::Top));
            root.draw(&text(line, (10, LEGEND + LINE * number as i32), style))?;
        }
        let ((width, height), top) = (self.map_size(), self.top());
        for (number, map) in self.maps.iter().enumerate() {
            let corner = (number as i32 * width + LEFT, top);
            root.draw(&text(&map.name, (corner.0, top - 8), ink(TEXT).pos(place(HPos::Left, VPos::Bottom))))?;
            for (row, cells) in map.cells.iter().enumerate() {
                let y = corner.1 + row as i32 * CELL.1;
                if let Some(name) = self.rows.get(row) {
                    let style = ink(TEXT - 3).pos(place(HPos::Right, VPos::Center));
                    root.draw(&text(name, (corner.0 - 6, y + CELL.1 / 2), style))?;
                }
                for (column, cell) in cells.iter().enumerate() {
                    if let Some(cell) = cell {
                        draw_cell(root, cell, (corner.0 + column as i32 * CELL.0, y))?;
                    }
                }
            }
            for edge in &map.edges {
                let ends = edge.map(|(column, row)| {
                    (corner.0 + column as i32 * CELL.0 - 1, corner.1 + row as i32 * CELL.1 - 1)
                });
                root.draw(&PathElement::new(ends, INK.stroke_width(4)))?;
            }
            let bottom = corner.1 + CELL.1 * self.rows.len() as i32;
            for (column, name) in self.columns.iter().enumerate() {
                let x = corner.0 + column as i32 * CELL.0 + CELL.0 / 2;
                let style = ink(TEXT - 3).pos(place(HPos::Center, VPos::Top));
                root.draw(&text(name, (x, bottom + 6), style))?;
            }
            let style = ink(TEXT - 3).pos(place(HPos::Left, VPos::Bottom));
            let axes = format!("{} across, {} down", self.axes[0], self.axes[1]);
            root.draw(&text(&axes, (corner.0, height - 8), style))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_go_from_light_to_dark() {
        assert_eq!(shade(0.0, -3.0), RGBColor(255, 252, 240));
        assert_eq!(shade(-3.0, -3.0), RGBColor(127, 0, 0));
        assert_eq!(shade(-1.0, -3.0), RGBColor(253, 204, 138));
        assert_eq!((shade(0.0, 0.0), shade(-9.0, -3.0)), (RGBColor(255, 252, 240), RGBColor(127, 0, 0)));
        let white = RGBColor(250, 250, 250);
        assert_eq!((two_sided(0.0, 2.0), two_sided(1.0, 0.0)), (white, white));
        assert_eq!(two_sided(1.0, 2.0), RGBColor(107, 174, 214));
        assert_eq!((two_sided(9.0, 2.0), two_sided(-9.0, 2.0)), (RGBColor(8, 69, 148), RGBColor(217, 72, 1)));
    }

    #[test]
    fn hatching_stays_in_its_rectangle() {
        let lines: Vec<_> = hatching((10, 20), (102, 42)).collect();
        assert_eq!(lines.len(), 16);
        for (x, y) in lines.into_iter().flatten() {
            assert!((10..=112).contains(&x) && (20..=62).contains(&y), "{x} {y}");
        }
    }

    #[test]
    fn cells_say_what_they_have() {
        let cell = |value: f64| Some(Cell::new(shade(value, -2.0), format!("v{value}")));
        let marked = Cell { note: "as measured".into(), framed: true, ..Cell::new(WHITE, "v3".into()) };
        let mut maps = HeatMaps {
            title: "needles".into(),
            legend: vec!["colours".into(), "marks".into()],
            columns: vec!["512".into(), "1024".into()],
            rows: vec!["0 %".into(), "100 %".into()],
            axes: ["length".into(), "depth".into()],
            maps: vec![Map {
                name: "dense".into(),
                cells: vec![vec![cell(0.0), cell(-2.0)], vec![None, Some(marked)]],
                edges: vec![[(1, 0), (1, 1)]],
            }],
        };
        let text = crate::cli::picture::svg(&maps).expect("drawn");
        for word in ["needles", "colours", "marks", "v-2", "as measured", "1024", "100 %", "dense"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        // The ground, three cells and a frame; an edge.
        assert_eq!((text.matches("<rect").count(), text.matches("<polyline").count()), (5, 1));
        maps.maps[0].cells[1][1].as_mut().expect("the cell").hatched = true;
        let hatched = crate::cli::picture::svg(&maps).expect("drawn");
        assert!(hatched.matches("<line").count() + hatched.matches("<polyline").count() > 10);
    }
}
