//! Heat maps: depth by length, one a scheme.

use crate::cli::picture::{Drawing, INK, Outcome, TEXT, ink};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Pixels of a cell, and around a map.
const CELL: (i32, i32) = (104, 44);
const LEFT: i32 = 76;
const TOP: i32 = 84;
const BELOW: i32 = 66;
const GAP: i32 = 24;
/// The least width: what title and legend take.
const WIDTH: i32 = 640;

/// A cell.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// Its colour: from 0, all is well, down to the least of all cells.
    pub value: f64,
    /// What is written on it.
    pub text: String,
}

/// One scheme's map.
pub struct Map {
    /// The scheme.
    pub name: String,
    /// [rows][columns].
    pub cells: Vec<Vec<Option<Cell>>>,
}

/// Maps beside each other, with the same colours.
pub struct HeatMaps {
    /// What all are about.
    pub title: String,
    /// What the colours mean.
    pub legend: String,
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
    fn map_size(&self) -> (i32, i32) {
        let (columns, rows) = (self.columns.len() as i32, self.rows.len() as i32);
        (LEFT + CELL.0 * columns.max(3) + GAP, TOP + CELL.1 * rows + BELOW)
    }

    fn least(&self) -> f64 {
        let cells = self.maps.iter().flat_map(|map| map.cells.iter().flatten().flatten());
        cells.map(|cell| cell.value).filter(|value| value.is_finite()).fold(0.0, f64::min)
    }
}

/// White at 0, through orange, to dark red at the least.
fn shade(value: f64, least: f64) -> RGBColor {
    const STOPS: [(f64, f64, f64); 4] =
        [(255.0, 252.0, 240.0), (253.0, 204.0, 138.0), (227.0, 89.0, 51.0), (127.0, 0.0, 0.0)];
    let at = if least < 0.0 { (value / least).clamp(0.0, 1.0) } else { 0.0 } * 3.0;
    let (below, part) = ((at.floor() as usize).min(2), at - at.floor().min(2.0));
    let (a, b) = (STOPS[below], STOPS[below + 1]);
    let mix = |a: f64, b: f64| (a + part * (b - a)).round() as u8;
    RGBColor(mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
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
        let least = self.least();
        let place = |x, y| Pos::new(x, y);
        let text =
            |text: &str, at: (i32, i32), style: TextStyle<'static>| Text::new(text.to_owned(), at, style);
        let left = ink(TEXT - 2).pos(place(HPos::Left, VPos::Top));
        root.draw(&text(&self.title, (10, 8), ink(TEXT + 1).pos(place(HPos::Left, VPos::Top))))?;
        root.draw(&text(&self.legend, (10, 34), left))?;
        let (width, height) = self.map_size();
        for (number, map) in self.maps.iter().enumerate() {
            let corner = (number as i32 * width + LEFT, TOP);
            root.draw(&text(&map.name, (corner.0, TOP - 8), ink(TEXT).pos(place(HPos::Left, VPos::Bottom))))?;
            for (row, cells) in map.cells.iter().enumerate() {
                let y = corner.1 + row as i32 * CELL.1;
                if let Some(name) = self.rows.get(row) {
                    let style = ink(TEXT - 3).pos(place(HPos::Right, VPos::Center));
                    root.draw(&text(name, (corner.0 - 6, y + CELL.1 / 2), style))?;
                }
                for (column, cell) in cells.iter().enumerate() {
                    let Some(cell) = cell else { continue };
                    let x = corner.0 + column as i32 * CELL.0;
                    let fill = shade(cell.value, least);
                    let ends = [(x, y), (x + CELL.0 - 2, y + CELL.1 - 2)];
                    root.draw(&Rectangle::new(ends, fill.filled()))?;
                    let dark = u32::from(fill.0) + u32::from(fill.1) + u32::from(fill.2) < 330;
                    let style =
                        TextStyle::from(("sans-serif", TEXT - 4)).color(if dark { &WHITE } else { &INK });
                    let style = style.pos(place(HPos::Center, VPos::Center));
                    root.draw(&text(&cell.text, (x + CELL.0 / 2, y + CELL.1 / 2), style))?;
                }
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
    }

    #[test]
    fn cells_say_what_they_have() {
        let cell = |value| Some(Cell { value, text: format!("v{value}") });
        let maps = HeatMaps {
            title: "needles".into(),
            legend: "colours".into(),
            columns: vec!["512".into(), "1024".into()],
            rows: vec!["0 %".into(), "100 %".into()],
            axes: ["length".into(), "depth".into()],
            maps: vec![Map {
                name: "dense".into(),
                cells: vec![vec![cell(0.0), cell(-2.0)], vec![None, cell(-1.0)]],
            }],
        };
        let text = crate::cli::picture::svg(&maps).expect("drawn");
        for word in ["needles", "colours", "v-2", "1024", "100 %", "dense"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        // The ground and three cells.
        assert_eq!(text.matches("<rect").count(), 4);
    }
}
