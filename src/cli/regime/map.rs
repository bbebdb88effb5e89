//! The map: predicted speed-ups over context and batch, and what was measured.

use super::Error;
use super::bytes::Bytes;
use super::judged::dense_us;
use super::record::Measured;
use super::traffic::{Fit, Place};
use crate::cli::heat_map::{Cell as Square, HeatMaps, Map, two_sided};
use crate::cli::scheme::DENSE;
use crate::cli::tokens::short;
use serde::Serialize;
use std::str::FromStr;

/// A constant put in the place of a fitted one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Projection {
    constant: Constant,
    /// In 10^12 bytes a second, or milliseconds.
    value: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Constant {
    Beta,
    C0,
    C1,
    Row,
}

impl Constant {
    const ALL: [(Constant, &'static str); 4] =
        [(Constant::Beta, "beta"), (Constant::C0, "c0"), (Constant::C1, "c1"), (Constant::Row, "r")];
}

impl FromStr for Projection {
    type Err = String;

    /// `c0=0`, `c1=0.5`, `r=0`, `beta=3.35`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("'{text}' is not NAME=VALUE, of c0, c1 and r in ms from 0 up, or of beta in TB/s above 0")
        };
        let (name, value) = text.split_once('=').ok_or_else(wrong)?;
        let (constant, _) = Constant::ALL.into_iter().find(|(_, known)| *known == name).ok_or_else(wrong)?;
        let value = value.parse::<f64>().ok().filter(|x| (0.0..=1e6).contains(x)).ok_or_else(wrong)?;
        if constant == Constant::Beta && value < 1e-6 {
            return Err(wrong());
        }
        Ok(Projection { constant, value })
    }
}

impl std::fmt::Display for Projection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let unit = if self.constant == Constant::Beta { "TB/s" } else { "ms" };
        let name = Constant::ALL.into_iter().find(|(constant, _)| *constant == self.constant);
        write!(f, "{} = {} {unit}", name.map_or("", |(_, name)| name), self.value)
    }
}

/// The fit with constants of `projections` in place of its own.
///
/// # Errors
/// r, of a form that has none.
pub fn projected(fit: &Fit, projections: &[Projection]) -> Result<Fit, Error> {
    let mut fit = fit.clone();
    for Projection { constant, value } in projections {
        let us = value * 1e3;
        match constant {
            Constant::Beta => fit.beta.value = *value,
            Constant::C0 => fit.c0.value = us,
            Constant::C1 => fit.c1.iter_mut().for_each(|(_, c1)| c1.value = us),
            Constant::Row => match &mut fit.row {
                Some(row) => row.value = us,
                None => return Err(Error::NoRows { form: fit.form.name() }),
            },
        }
    }
    Ok(fit)
}

/// A square of the map.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Predicted {
    /// Where.
    #[serde(flatten)]
    pub place: Place,
    /// What a step of dense takes.
    pub dense_us: f64,
    /// What one of the scheme takes.
    pub scheme_us: f64,
    /// The first over the second.
    pub speedup: f64,
    /// The same of what was measured here.
    pub measured: Option<f64>,
    /// Whether weights and dense caches are more than the device's memory; none where that is not known.
    pub too_large: Option<bool>,
    /// Whether contexts and batches were measured on both sides of it.
    pub inside: bool,
}

/// A scheme's map.
#[derive(Debug, Serialize)]
pub struct Regime {
    /// The scheme.
    pub kv: String,
    /// Where bytes at contexts that were not measured are from: of dense, and of the scheme.
    pub bytes: [&'static str; 2],
    /// By batch, then by context.
    pub squares: Vec<Vec<Predicted>>,
}

impl Regime {
    /// The map of a scheme by a fit.
    ///
    /// # Errors
    /// [`Error::Bytes`]; [`Error::NoTime`] for constants of `what` that leave no time to a step.
    pub fn new(
        measured: &Measured,
        fit: &Fit,
        kv: &str,
        (contexts, batches): (&[u32], &[u32]),
        what: &str,
    ) -> Result<Regime, Error> {
        let cells = &measured.cells;
        let (dense, own) = (Bytes::new(DENSE, cells)?, Bytes::new(kv, cells)?);
        let weights = cells.first().map_or(0, |cell| cell.weight_bytes) as f64;
        let within = |value: u32, of: fn(Place) -> u32| {
            let ours = || cells.iter().filter(|cell| cell.is_dense() || cell.kv == kv);
            let all = || ours().map(|cell| of(cell.place));
            all().min().is_some_and(|low| low <= value) && all().max().is_some_and(|high| value <= high)
        };
        let square = |context: u32, batch: u32| -> Result<Predicted, Error> {
            let place = Place { context, batch };
            let step = |kv: &str, bytes: &Bytes| {
                let us = fit
                    .step_us(kv, weights + f64::from(batch) * bytes.of(context), batch)
                    .unwrap_or(f64::NAN);
                if us.is_finite() && us > 0.0 {
                    return Ok(us);
                }
                Err(Error::NoTime { what: what.to_owned(), kv: kv.to_owned(), us, context, batch })
            };
            let (dense_step, scheme_us) = (step(DENSE, &dense)?, step(kv, &own)?);
            let times: Vec<f64> = cells
                .iter()
                .filter(|cell| cell.kv == kv && cell.place == place)
                .map(|cell| cell.us)
                .collect();
            let mean = (!times.is_empty()).then(|| times.iter().sum::<f64>() / times.len() as f64);
            let held = weights + f64::from(batch) * dense.of(context);
            Ok(Predicted {
                place,
                dense_us: dense_step,
                scheme_us,
                speedup: dense_step / scheme_us,
                measured: dense_us(cells, place).zip(mean).map(|(dense, own)| dense / own),
                too_large: measured.memory_bytes.map(|memory| held > memory as f64),
                inside: within(context, |place| place.context) && within(batch, |place| place.batch),
            })
        };
        let row = |batch: &u32| contexts.iter().map(|context| square(*context, *batch)).collect();
        let squares = batches.iter().map(row).collect::<Result<Vec<Vec<Predicted>>, Error>>()?;
        Ok(Regime { kv: kv.to_owned(), bytes: [dense.source(), own.source()], squares })
    }

    /// Sides of squares on which the speed-up passes 1, the largest batch above.
    fn edges(&self) -> Vec<[(usize, usize); 2]> {
        let height = self.squares.len();
        let faster = |row: usize, column: usize| self.squares[height - 1 - row][column].speedup >= 1.0;
        let mut edges = Vec::new();
        for row in 0..height {
            for column in 0..self.squares[row].len() {
                if column > 0 && faster(row, column) != faster(row, column - 1) {
                    edges.push([(column, row), (column, row + 1)]);
                }
                if row > 0 && faster(row, column) != faster(row - 1, column) {
                    edges.push([(column, row), (column + 1, row)]);
                }
            }
        }
        edges
    }

    /// The picture, with lines that say what it is of.
    pub fn picture(&self, title: String, about: Vec<String>) -> HeatMaps {
        let all = || self.squares.iter().flatten();
        let most = all().map(|square| square.speedup.log2().abs()).fold(0.0, f64::max);
        let cell = |square: &Predicted| {
            let text = match square.speedup {
                large if large >= 9.95 => format!("{large:.1}"),
                x => format!("{x:.2}"),
            };
            let text = if square.inside { text } else { format!("({text})") };
            Some(Square {
                note: square.measured.map_or_else(String::new, |x| format!("measured {x:.2}")),
                framed: square.measured.is_some(),
                hatched: square.too_large == Some(true),
                ..Square::new(two_sided(square.speedup.log2(), most), text)
            })
        };
        let rows = || self.squares.iter().rev();
        HeatMaps {
            title,
            legend: about,
            columns: self.squares.first().into_iter().flatten().map(|s| short(s.place.context)).collect(),
            rows: rows().filter_map(|row| Some(row.first()?.place.batch.to_string())).collect(),
            axes: ["tokens of each sequence".into(), "sequences".into()],
            maps: vec![Map {
                name: String::new(),
                cells: rows().map(|row| row.iter().map(cell).collect()).collect(),
                edges: self.edges(),
            }],
        }
    }
}
