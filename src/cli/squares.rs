//! What a calibration decides, as small squares in rows and columns.

use super::picture::{Drawing, INK, Outcome, TEXT, ink};
use host::kv::calibration::Chart;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Pixels around the squares, and of a line of text.
const LEFT: i32 = 64;
const RIGHT: i32 = 24;
const BELOW: i32 = 52;
const LINE: i32 = 24;
/// The room for all squares, as far as there is any.
const ROOM: (i32, i32) = (640, 760);
/// The least and the largest square.
const SQUARE: (i32, i32) = (3, 24);
/// The least width: what title and classes take.
const WIDTH: i32 = 560;

/// Colours of the classes, from dark to light.
const COLOURS: [RGBColor; 4] =
    [RGBColor(8, 48, 107), RGBColor(66, 146, 198), RGBColor(158, 202, 225), RGBColor(237, 243, 250)];

/// A chart to be drawn.
pub struct Squares<'a>(pub &'a Chart);

impl Squares<'_> {
    fn columns(&self) -> i32 {
        self.0.rows.iter().map(Vec::len).max().unwrap_or(0).max(1) as i32
    }

    /// Width and height of a square.
    fn square(&self) -> (i32, i32) {
        let of = |room: i32, count: i32| (room / count).clamp(SQUARE.0, SQUARE.1);
        (of(ROOM.0, self.columns()), of(ROOM.1, self.0.rows.len().max(1) as i32))
    }

    fn top(&self) -> i32 {
        40 + LINE * self.0.classes.len() as i32 + 10
    }
}

/// Which of numbers that are `apart` pixels apart are written.
fn every(apart: i32) -> usize {
    [1, 2, 4, 8, 16, 32].into_iter().find(|every| *every as i32 * apart >= TEXT + 2).unwrap_or(64)
}

impl Drawing for Squares<'_> {
    fn size(&self) -> (u32, u32) {
        let (width, height) = self.square();
        let across = LEFT + width * self.columns() + RIGHT;
        let down = self.top() + height * self.0.rows.len() as i32 + BELOW;
        (across.max(WIDTH) as u32, down as u32)
    }

    fn draw<B: DrawingBackend>(&self, root: &DrawingArea<B, Shift>) -> Outcome
    where
        B::ErrorType: 'static,
    {
        let chart = self.0;
        let ((width, height), top) = (self.square(), self.top());
        let write = |text: &str, at: (i32, i32), size: i32, pos: Pos| {
            root.draw(&Text::new(text.to_owned(), at, ink(size).pos(pos)))
        };
        let colour = |class: usize| COLOURS[class.min(COLOURS.len() - 1)];
        write(&chart.title, (10, 8), TEXT + 1, Pos::new(HPos::Left, VPos::Top))?;
        for (class, name) in chart.classes.iter().enumerate() {
            let y = 40 + LINE * class as i32;
            let corners = [(12, y), (28, y + 16)];
            root.draw(&Rectangle::new(corners, colour(class).filled()))?;
            root.draw(&Rectangle::new(corners, INK.stroke_width(1)))?;
            write(name, (38, y + 8), TEXT - 3, Pos::new(HPos::Left, VPos::Center))?;
        }
        for (row, classes) in chart.rows.iter().enumerate() {
            let y = top + height * row as i32;
            // Neighbours that are alike are one rectangle.
            let mut column = 0;
            while column < classes.len() {
                let alike = classes[column..].iter().take_while(|class| **class == classes[column]).count();
                let x = LEFT + width * column as i32;
                let corners = [(x, y), (x + width * alike as i32, y + height)];
                root.draw(&Rectangle::new(corners, colour(usize::from(classes[column])).filled()))?;
                column += alike;
            }
        }
        let mut written = i32::MIN / 2;
        for (row, name) in &chart.names {
            let y = top + height * *row as i32;
            if *row > 0 {
                let ends = [(LEFT, y), (LEFT + width * self.columns(), y)];
                root.draw(&PathElement::new(ends, WHITE.stroke_width(1)))?;
            }
            if y - written >= TEXT {
                write(name, (LEFT - 8, y), TEXT - 4, Pos::new(HPos::Right, VPos::Top))?;
                written = y;
            }
        }
        let bottom = top + height * chart.rows.len() as i32;
        for column in (0..self.columns() as usize).step_by(every(width)) {
            let x = LEFT + width * column as i32 + width / 2;
            write(&column.to_string(), (x, bottom + 4), TEXT - 4, Pos::new(HPos::Center, VPos::Top))?;
        }
        let axes = format!("{} across, {} down", chart.axes[0], chart.axes[1]);
        write(&axes, (LEFT, bottom + 26), TEXT - 3, Pos::new(HPos::Left, VPos::Top)).map_err(Into::into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::picture::svg;

    fn chart(rows: Vec<Vec<u8>>) -> Chart {
        let classes = ["many", "some", "few"].map(String::from).to_vec();
        let names = vec![(0, "first".into()), (1, "second".into())];
        Chart { title: "what".into(), axes: ["blocks".into(), "heads".into()], classes, rows, names }
    }

    #[test]
    fn squares_have_their_classes_colours_and_names() {
        let text = svg(&Squares(&chart(vec![vec![0, 0, 1, 2], vec![2, 1, 0, 0]]))).expect("drawn");
        for word in ["what", "many", "some", "few", "first", "second", "blocks across, heads down"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        // Each class in the list and once in either row.
        for colour in ["#08306B", "#4292C6", "#9ECAE1"] {
            assert_eq!(text.matches(colour).count(), 3, "{colour}: {text}");
        }
    }

    /// A chart of a large model is drawn, and no larger than it has to be.
    #[test]
    fn many_rows_are_small() {
        let (large, empty) = (chart(vec![vec![0; 64]; 640]), chart(Vec::new()));
        assert_eq!(Squares(&large).size().1, 40 + 3 * LINE as u32 + 10 + 3 * 640 + BELOW as u32);
        svg(&Squares(&large)).expect("drawn");
        svg(&Squares(&empty)).expect("drawn");
    }
}
