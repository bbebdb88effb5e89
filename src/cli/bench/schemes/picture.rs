//! The picture: bytes against loss, each scheme a disc whose area is its speed.

use super::report::{More, Row};
use super::table::{places, ratio};
use crate::cli::bench::record::Report;
use crate::cli::picture::{Drawing, GRID, INK, Outcome, TEXT, colour, ink};
use crate::cli::tokens::short;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::ops::Range;

/// Pixels.
const SIZE: (i32, i32) = (1000, 640);
const LEFT: i32 = 96;
const RIGHT: i32 = 40;
const TOP: i32 = 96;
const BELOW: i32 = 70;
/// The band below the axis, for schemes that lose nothing or whose loss is not known.
const BAND: i32 = 46;
/// Pixels of a disc's radius at dense's speed.
const RADIUS: f64 = 6.0;
/// The least radius.
const LEAST: i32 = 3;
/// A label's height, and about the width of a letter.
const LINE: i32 = 18;
const LETTER: i32 = 9;

/// One scheme.
#[derive(Clone, Debug, PartialEq)]
pub struct Disc {
    /// Its name, and its speed.
    pub label: String,
    /// What it has its colour by.
    pub family: String,
    /// Bytes of a token and KV head.
    pub bytes: f64,
    /// What is lost; none or 0 go into the band.
    pub loss: Option<f64>,
    /// Times dense's speed, where it was measured.
    pub speed: Option<f64>,
}

/// Discs over bytes and loss.
pub struct Scatter {
    title: String,
    /// What discs are.
    note: String,
    y_title: String,
    discs: Vec<Disc>,
}

/// The schemes of a report whose bytes are known. Without quality they are by speed.
pub fn scatter(report: &Report<Row, (), More>) -> Scatter {
    let place = places(&report.rows).into_iter().next();
    let quality = report.rows.iter().any(|row| row.quality.is_some());
    let discs = report.rows.iter().filter_map(|row| {
        let speed = place.and_then(|place| ratio(row, place));
        let kl = || row.quality.as_ref().map(|of| of.beside.as_ref().map_or(0.0, |beside| beside.kl));
        let factor = speed.map_or_else(String::new, |speed| format!("  {speed:.2}×"));
        Some(Disc {
            label: format!("{}{factor}", row.name),
            family: row.kv.split(['/', ':']).next().unwrap_or_default().into(),
            bytes: row.bytes()?.0,
            loss: if quality { kl() } else { speed },
            speed: speed.filter(|_| quality),
        })
    });
    let title = match (&report.more.model, &report.more.text) {
        (Some(model), Some(text)) => format!("KV schemes: {model} over {text}"),
        _ => "KV schemes".into(),
    };
    let note = place.map_or_else(String::new, |([q_heads, kv_heads, head_dim], batch, context)| {
        let device = report.environment.gpu.as_ref().map_or(report.environment.cpu.as_str(), |gpu| &gpu.name);
        let context = short(context);
        format!(
            "Area and ×: speed of attention over dense's, {q_heads}/{kv_heads}/{head_dim}, batch {batch}, {context} tokens, {device}"
        )
    });
    let y_title = if quality { "KL from dense, nats a step" } else { "times dense's speed" };
    Scatter { title, note, y_title: y_title.into(), discs: discs.collect() }
}

/// Logarithms of what holds all values above 0, with room at both ends.
fn logarithms(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (low, high) = values
        .filter(|x| *x > 0.0)
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x.log10()), high.max(x.log10())));
    if low > high { 0.0..1.0 } else { low - 0.1..high + 0.1 }
}

/// Round numbers of a range of logarithms, 1, 2 and 5 times powers of ten, and how they are written.
fn ticks(range: &Range<f64>) -> Vec<(f64, String)> {
    let decades = range.start.floor() as i32..=range.end.ceil() as i32;
    let of = |decade: i32| {
        let decimals = usize::try_from(-decade).unwrap_or(0);
        [1.0, 2.0, 5.0].map(|step: f64| step * 10f64.powi(decade)).map(|x| (x, format!("{x:.decimals$}")))
    };
    decades.flat_map(of).filter(|(tick, _)| range.contains(&tick.log10())).collect()
}

/// A box of a label.
type Place = (i32, i32, i32, i32);

/// Where a label of so many letters goes: to the right of a disc, or to its left at the picture's end, moved
/// up or down until it is on no other.
fn free(taken: &[Place], (x, y): (i32, i32), radius: i32, letters: usize) -> Place {
    let width = LETTER * letters as i32;
    let right = x + radius + 4;
    let left = if right + width > SIZE.0 - 6 { (x - radius - 4 - width).max(0) } else { right };
    let at = |shift: i32| (left, y + shift - LINE / 2, left + width, y + shift + LINE / 2);
    let hits = |a: &Place, b: &Place| a.0 < b.2 && b.0 < a.2 && a.1 < b.3 && b.1 < a.3;
    let shifts = (0..12).flat_map(|step| [step, -step]).map(|step| step * LINE / 2);
    let mut places = shifts.map(at);
    places.find(|place| !taken.iter().any(|other| hits(place, other))).unwrap_or_else(|| at(0))
}

impl Drawing for Scatter {
    fn size(&self) -> (u32, u32) {
        (SIZE.0 as u32, SIZE.1 as u32)
    }

    fn draw<B: DrawingBackend>(&self, root: &DrawingArea<B, Shift>) -> Outcome
    where
        B::ErrorType: 'static,
    {
        let x = logarithms(self.discs.iter().map(|disc| disc.bytes));
        let y = logarithms(self.discs.iter().filter_map(|disc| disc.loss));
        let (bottom, floor) = (SIZE.1 - BELOW, SIZE.1 - BELOW - BAND);
        let part = |value: f64, range: &Range<f64>| (value.log10() - range.start) / (range.end - range.start);
        let across = |bytes: f64| LEFT + (part(bytes, &x) * f64::from(SIZE.0 - LEFT - RIGHT)) as i32;
        let up = |loss: f64| floor - (part(loss, &y) * f64::from(floor - TOP)) as i32;
        let centred = |v| ink(TEXT - 2).pos(Pos::new(HPos::Center, v));
        root.draw(&Text::new(
            self.title.clone(),
            (SIZE.0 / 2, 14),
            ink(TEXT + 2).pos(Pos::new(HPos::Center, VPos::Top)),
        ))?;
        root.draw(&Text::new(self.note.clone(), (SIZE.0 / 2, 42), centred(VPos::Top)))?;
        for (tick, name) in ticks(&x) {
            let at = across(tick);
            root.draw(&PathElement::new([(at, TOP), (at, bottom)], GRID))?;
            root.draw(&Text::new(name, (at, bottom + 8), centred(VPos::Top)))?;
        }
        for (tick, name) in ticks(&y) {
            let at = up(tick);
            root.draw(&PathElement::new([(LEFT, at), (SIZE.0 - RIGHT, at)], GRID))?;
            let style = ink(TEXT - 2).pos(Pos::new(HPos::Right, VPos::Center));
            root.draw(&Text::new(name, (LEFT - 8, at), style))?;
        }
        for line in [
            [(LEFT, TOP), (LEFT, bottom)],
            [(LEFT, floor), (SIZE.0 - RIGHT, floor)],
            [(LEFT, bottom), (SIZE.0 - RIGHT, bottom)],
        ] {
            root.draw(&PathElement::new(line, INK))?;
        }
        let band = ink(TEXT - 4).pos(Pos::new(HPos::Right, VPos::Center));
        root.draw(&Text::new("0 or unknown", (LEFT - 4, bottom - BAND / 2), band))?;
        root.draw(&Text::new(
            "bytes of a token and KV head",
            (SIZE.0 / 2, SIZE.1 - 26),
            centred(VPos::Center),
        ))?;
        root.draw(&Text::new(
            self.y_title.clone(),
            (LEFT, TOP - 8),
            ink(TEXT - 2).pos(Pos::new(HPos::Left, VPos::Bottom)),
        ))?;
        let mut families: Vec<&str> = Vec::new();
        let mut taken: Vec<Place> = Vec::new();
        for disc in &self.discs {
            let number = families.iter().position(|known| *known == disc.family).unwrap_or(families.len());
            if number == families.len() {
                families.push(&disc.family);
            }
            let height = disc.loss.filter(|loss| *loss > 0.0).map_or(bottom - BAND / 2, up);
            let (at, radius) =
                ((across(disc.bytes), height), LEAST.max((RADIUS * disc.speed.unwrap_or(1.0).sqrt()) as i32));
            root.draw(&Circle::new(at, radius, colour(number).mix(0.75).filled()))?;
            let place = free(&taken, at, radius, disc.label.chars().count());
            taken.push(place);
            let style = ink(TEXT - 3).pos(Pos::new(HPos::Left, VPos::Center));
            root.draw(&Text::new(disc.label.clone(), (place.0, (place.1 + place.3) / 2), style))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::picture::svg;

    #[test]
    fn labels_are_on_no_other_and_in_the_picture() {
        let mut taken = Vec::new();
        for _ in 0..5 {
            let place = free(&taken, (500, 300), 6, 20);
            assert!(taken.iter().all(|other: &Place| place.1 >= other.3 || place.3 <= other.1), "{place:?}");
            taken.push(place);
        }
        assert_eq!(taken[0].0, 510);
        assert!(free(&[], (SIZE.0 - 10, 300), 6, 20).2 < SIZE.0 - 10);
    }

    #[test]
    fn discs_grow_with_speed_and_unknown_losses_are_in_the_band() {
        let disc = |label: &str, loss, speed| Disc {
            label: label.into(),
            family: label.into(),
            bytes: 100.0,
            loss,
            speed,
        };
        let discs = vec![
            disc("twice", Some(0.01), Some(4.0)),
            disc("none", None, None),
            disc("dense", Some(0.0), Some(1.0)),
        ];
        let scatter = Scatter { title: "a title".into(), note: String::new(), y_title: String::new(), discs };
        let text = svg(&scatter).expect("drawn");
        assert_eq!(text.matches("<circle").count(), 3);
        assert!(text.contains("r=\"12\"") && text.matches("r=\"6\"").count() == 2, "{text}");
        let band = format!("cy=\"{}\"", SIZE.1 - BELOW - BAND / 2);
        assert_eq!(text.matches(&band).count(), 2, "{text}");
        assert!(text.contains("a title") && text.contains("twice") && !text.contains("NaN"), "{text}");
    }

    #[test]
    fn ticks_are_round() {
        let names = |range| ticks(&range).into_iter().map(|(_, name)| name).collect::<Vec<_>>();
        assert_eq!(names(1.5..2.8), ["50", "100", "200", "500"]);
        assert_eq!(names(-5.5..-4.5), ["0.000005", "0.00001", "0.00002"]);
        assert_eq!(logarithms([0.0].into_iter()), 0.0..1.0);
    }
}
