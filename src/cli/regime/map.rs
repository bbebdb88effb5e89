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
                name: format!("{DENSE} / {}", self.kv),
                cells: rows().map(|row| row.iter().map(cell).collect()).collect(),
                edges: self.edges(),
            }],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::traffic::Form;
    use super::super::traffic::tests::made_up;
    use super::*;
    use std::path::PathBuf;

    const CONTEXTS: [u32; 3] = [8192, 131_072, 1 << 20];

    fn measured() -> Measured {
        Measured {
            model: "a model".into(),
            device: "a GPU".into(),
            memory_bytes: Some(80_000_000_000),
            read_tb_per_s: None,
            files: vec![PathBuf::from("r.json")],
            commits: Vec::new(),
            cells: made_up(&CONTEXTS[..2], &[1, 4], 900.0),
            over_the_bus: 0,
        }
    }

    fn fitted(measured: &Measured) -> Fit {
        Fit::new(Form::Rows, measured.cells.iter(), &["gather".into()]).expect("a fit")
    }

    fn regime(measured: &Measured, fit: &Fit) -> Regime {
        Regime::new(measured, fit, "gather", (&CONTEXTS, &[1, 2, 8]), "c0 = 0 ms").expect("a map")
    }

    #[test]
    fn squares_are_those_of_the_constants() {
        let measured = measured();
        let regime = regime(&measured, &fitted(&measured));
        let square = |row: usize, column: usize| &regime.squares[row][column];
        // 8 GB of weights and 1 GB of keys and values at 4 TB/s.
        let us = (8e9 + 131_072.0 * 8192.0) / 4e6 + 1200.0;
        assert!((square(0, 0).dense_us / us - 1.0).abs() < 1e-6, "{:?}", square(0, 0));
        for row in &regime.squares {
            for square in row {
                assert_eq!(square.speedup, square.dense_us / square.scheme_us);
                let known = measured.cells.iter().filter(|cell| cell.place == square.place);
                let times: Vec<f64> = known.map(|cell| cell.us).collect();
                assert_eq!(square.measured, (!times.is_empty()).then(|| times[0] / times[1]));
            }
        }
        // Two sequences lie between one and four, eight and a million tokens do not.
        assert!(square(0, 0).inside && square(1, 1).inside && !square(2, 0).inside && !square(0, 2).inside);
        // A million tokens are 137 GB.
        let large: Vec<bool> = regime.squares.iter().flatten().filter_map(|s| s.too_large).collect();
        assert_eq!(large, [false, false, true, false, false, true, false, true, true]);
        // Each sequence more takes its cache, and r.
        let more = square(2, 0).dense_us - square(1, 0).dense_us;
        assert!((more / (6.0 * (131_072.0 * 8192.0 / 4e6 + 900.0)) - 1.0).abs() < 1e-6, "{more}");
    }

    #[test]
    fn edges_are_where_the_speed_up_passes_one() {
        let measured = measured();
        let mut regime = regime(&measured, &fitted(&measured));
        for (square, speedup) in
            regime.squares.iter_mut().flatten().zip([0.9, 1.1, 2.0, 1.0, 1.2, 2.0, 0.8, 0.9, 0.99])
        {
            square.speedup = speedup;
        }
        // From above: the row of eight sequences is slower, of one the first square.
        let mut edges = regime.edges();
        edges.sort_unstable();
        assert_eq!(
            edges,
            [[(0, 1), (1, 1)], [(0, 2), (1, 2)], [(1, 1), (2, 1)], [(1, 2), (1, 3)], [(2, 1), (3, 1)]]
        );
        let maps = regime.picture("title".into(), vec!["about".into()]);
        let text = crate::cli::picture::svg(&maps).expect("drawn");
        for word in ["title", "about", "1024K", "128K", "measured", "(0.99)"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert_eq!(maps.rows, ["8", "2", "1"]);
    }

    #[test]
    fn projections_replace_constants() {
        let measured = measured();
        let fit = fitted(&measured);
        let project = |text: &str| projected(&fit, &[text.parse().expect(text)]).expect(text);
        assert_eq!((project("c0=0").c0.value, project("c1=0.5").c1[0].1.value), (0.0, 500.0));
        assert_eq!((project("beta=3.35").beta.value, project("r=0").row.expect("r").value), (3.35, 0.0));
        let faster = regime(&measured, &project("c0=0"));
        let before = regime(&measured, &fit);
        // Without what both pay the ratio is further from 1.
        assert!(faster.squares[0][1].speedup > before.squares[0][1].speedup);
        assert_eq!("c0=0".parse::<Projection>().expect("c0").to_string(), "c0 = 0 ms");

        let paper = Fit::new(Form::Paper, measured.cells.iter(), &[]).expect("a fit");
        assert!(projected(&paper, &["r=0".parse().expect("r")]).is_err());
        for bad in ["c0", "c2=0", "c0=-1", "c0=x", "c0=inf", "c0=NaN", "beta=0", "=1", ""] {
            assert!(bad.parse::<Projection>().is_err(), "{bad}");
        }
        // Fitted constants may be below 0; a step cannot be.
        let mut backwards = fit.clone();
        backwards.c0.value = -1e9;
        let error = Regime::new(&measured, &backwards, "gather", (&[8192], &[1]), "c0 = −1 s");
        assert!(error.expect_err("no time").to_string().contains("c0 = −1 s"));
    }
}
