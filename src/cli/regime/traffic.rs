//! What a step of decoding takes, from the bytes that it reads: two forms of the model, and their constants.

use super::least_squares::{Equation, Solution, solve, student};
use crate::cli::scheme::DENSE;
use serde::Serialize;

/// One measured row.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// The scheme.
    pub kv: String,
    /// Where it was measured.
    pub place: Place,
    /// What a step reads: weights, and the caches of all sequences.
    pub weight_bytes: u64,
    /// See `weight_bytes`.
    pub kv_bytes: u64,
    /// What it took.
    pub us: f64,
}

/// A square of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Place {
    /// Tokens of each sequence.
    pub context: u32,
    /// Sequences.
    pub batch: u32,
}

impl Cell {
    /// Bytes of weights and caches.
    pub fn bytes(&self) -> f64 {
        self.weight_bytes as f64 + self.kv_bytes as f64
    }

    /// Whether it is of the scheme that others are measured against.
    pub fn is_dense(&self) -> bool {
        self.kv == DENSE
    }
}

/// A form of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// Bytes, a term a step, and one more a step of each other scheme.
    Paper,
    /// The same, and a term for each sequence behind the first: what it takes besides its cache.
    Rows,
}

impl Form {
    /// Both, the one with fewer constants first.
    pub const ALL: [Form; 2] = [Form::Paper, Form::Rows];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Form::Paper => "paper",
            Form::Rows => "rows",
        }
    }

    /// What it says.
    pub fn formula(self) -> String {
        match self {
            Form::Paper => "t = (W + B·A)/β + c0, of other schemes + c1".into(),
            Form::Rows => "t = (W + B·A)/β + c0 + r·(B − 1), of other schemes + c1".into(),
        }
    }

    /// What bytes, a step and a row are counted by.
    fn terms(self, bytes: f64, batch: u32) -> Vec<f64> {
        match self {
            Form::Paper => vec![bytes, 1.0],
            Form::Rows => vec![bytes, 1.0, f64::from(further_rows(batch))],
        }
    }
}

/// Sequences behind the first.
pub fn further_rows(batch: u32) -> u32 {
    batch.saturating_sub(1)
}

/// A constant that was fitted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Its value.
    pub value: f64,
    /// Its standard error; none where no cell is left over to tell.
    pub standard_error: Option<f64>,
    /// The interval at 95 %; an end may be infinite, which records have as null.
    pub interval: Option<(f64, f64)>,
}

impl Estimate {
    fn of(solution: &Solution, unknown: usize) -> Self {
        let value = solution.values[unknown];
        let standard_error = solution.errors.as_ref().map(|errors| errors[unknown]);
        let interval = standard_error.map(|error| {
            let reach = student(solution.freedom) * error;
            (value - reach, value + reach)
        });
        Estimate { value, standard_error, interval }
    }

    /// A factor over it, which is above 0: the error to first order; a lower end that is not above 0 gives no
    /// upper one.
    fn inverse(self, factor: f64) -> Self {
        let value = factor / self.value;
        Estimate {
            value,
            standard_error: self.standard_error.map(|error| value * error / self.value),
            interval: self
                .interval
                .map(|(low, high)| (factor / high, if low > 0.0 { factor / low } else { f64::INFINITY })),
        }
    }
}

/// A form with its constants. Times are in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fit {
    /// The form.
    pub form: Form,
    /// Bandwidth, in 10^12 bytes a second.
    #[serde(rename = "beta_tb_per_s")]
    pub beta: Estimate,
    /// What every step takes besides.
    #[serde(rename = "c0_us")]
    pub c0: Estimate,
    /// What a further row takes.
    #[serde(rename = "row_us")]
    pub row: Option<Estimate>,
    /// What a step of each other scheme takes besides, given the constants above.
    #[serde(rename = "c1_us")]
    pub c1: Vec<(String, Estimate)>,
    /// Rows of dense attention beyond as many as there are constants fitted on them.
    pub freedom: usize,
}

/// Bytes a microsecond in one 10^12 bytes a second.
const BYTES_PER_US: f64 = 1e6;

/// Why there is no fit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unfit {
    /// Fewer dense rows than constants.
    Few {
        /// How many there are.
        found: usize,
        /// How many it takes.
        needed: usize,
    },
    /// All read as much, or every batch has as many rows.
    Alike,
    /// More bytes take no more time.
    NotPhysical,
}

impl Fit {
    /// Fits β and c0 (and r) on the dense cells, then c1 of each of `schemes` on its own. A cell counts by
    /// its error over its time, since ratios of times are what is asked for.
    ///
    /// # Errors
    /// [`Unfit`]. A scheme without cells has no c1.
    pub fn new<'a>(
        form: Form,
        cells: impl Iterator<Item = &'a Cell> + Clone,
        schemes: &[String],
    ) -> Result<Fit, Unfit> {
        let weight = |cell: &Cell| 1.0 / (cell.us * cell.us);
        let dense: Vec<Equation> = cells
            .clone()
            .filter(|cell| cell.is_dense())
            .map(|cell| Equation {
                terms: form.terms(cell.bytes(), cell.place.batch),
                value: cell.us,
                weight: weight(cell),
            })
            .collect();
        let needed = form.terms(0.0, 1).len();
        if dense.len() < needed {
            return Err(Unfit::Few { found: dense.len(), needed });
        }
        let solution = solve(&dense).ok_or(Unfit::Alike)?;
        if solution.values[0] <= 0.0 {
            return Err(Unfit::NotPhysical);
        }
        let estimate = |unknown| Estimate::of(&solution, unknown);
        let mut fit = Fit {
            form,
            beta: estimate(0).inverse(1.0 / BYTES_PER_US),
            c0: estimate(1),
            row: (form == Form::Rows).then(|| estimate(2)),
            c1: Vec::new(),
            freedom: solution.freedom,
        };
        for scheme in schemes {
            let own: Vec<Equation> = cells
                .clone()
                .filter(|cell| cell.kv == *scheme)
                .map(|cell| Equation {
                    terms: vec![1.0],
                    value: cell.us - fit.base_us(cell.bytes(), cell.place.batch),
                    weight: weight(cell),
                })
                .collect();
            if let Some(solution) = solve(&own) {
                fit.c1.push((scheme.clone(), Estimate::of(&solution, 0)));
            }
        }
        Ok(fit)
    }

    fn base_us(&self, bytes: f64, batch: u32) -> f64 {
        let row = self.row.map_or(0.0, |row| row.value);
        bytes / (self.beta.value * BYTES_PER_US) + self.c0.value + row * f64::from(further_rows(batch))
    }

    /// What a step takes; none of a scheme that was not fitted.
    pub fn step_us(&self, kv: &str, bytes: f64, batch: u32) -> Option<f64> {
        let more = if kv == DENSE {
            0.0
        } else {
            self.c1.iter().find(|(scheme, _)| scheme == kv).map(|(_, c1)| c1.value)?
        };
        Some(self.base_us(bytes, batch) + more)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Steps of a machine with 4 TB/s, 1200 µs a step, 900 a further row and 300 of `gather`: weights of
    /// 8 GB, and of a token 128 KB dense.
    pub fn made_up(contexts: &[u32], batches: &[u32], row_us: f64) -> Vec<Cell> {
        let mut cells = Vec::new();
        for (context, batch) in contexts.iter().flat_map(|c| batches.iter().map(move |b| (*c, *b))) {
            let each = |kv: &str, tokens: u32, more: f64| {
                let kv_bytes = 131_072 * u64::from(tokens) * u64::from(batch);
                let bytes = 8e9 + kv_bytes as f64;
                let us = bytes / 4e6 + 1200.0 + row_us * f64::from(further_rows(batch)) + more;
                let place = Place { context, batch };
                Cell { kv: kv.into(), place, weight_bytes: 8_000_000_000, kv_bytes, us }
            };
            cells.push(each(DENSE, context, 0.0));
            cells.push(each("gather", 4736 + context / 128, 300.0));
        }
        cells
    }

    fn gather() -> Vec<String> {
        vec!["gather".into()]
    }

    fn near(value: f64, truth: f64) -> bool {
        (value / truth - 1.0).abs() < 1e-6
    }

    #[test]
    fn each_form_finds_its_own_constants() {
        let rows = made_up(&[8192, 131_072], &[1, 2, 4, 8], 900.0);
        let fit = Fit::new(Form::Rows, rows.iter(), &gather()).expect("a fit");
        assert!(near(fit.beta.value, 4.0) && near(fit.c0.value, 1200.0), "{fit:?}");
        assert!(near(fit.row.expect("r").value, 900.0) && near(fit.c1[0].1.value, 300.0), "{fit:?}");
        assert_eq!(fit.freedom, 5);
        for cell in &rows {
            let us = fit.step_us(&cell.kv, cell.bytes(), cell.place.batch).expect("of both");
            assert!(near(us, cell.us), "{cell:?}: {us}");
        }
        assert_eq!(fit.step_us("int8", 1e9, 1), None);

        let plain = made_up(&[8192, 131_072], &[1, 4], 0.0);
        let fit = Fit::new(Form::Paper, plain.iter(), &gather()).expect("a fit");
        assert!(near(fit.beta.value, 4.0) && near(fit.c0.value, 1200.0) && fit.row.is_none(), "{fit:?}");
        // What the form has no term for it cannot have right.
        let wrong = Fit::new(Form::Paper, rows.iter(), &gather()).expect("a fit");
        assert!((wrong.c0.value / 1200.0 - 1.0).abs() > 0.1, "{wrong:?}");
    }

    #[test]
    fn intervals_hold_what_noise_hid() {
        let mut cells = made_up(&[8192, 32_768, 131_072], &[1, 2, 4], 900.0);
        for (i, cell) in cells.iter_mut().enumerate() {
            cell.us *= 1.0 + 0.002 * [1.0, -1.0, 0.5, -0.5, -1.0, 0.5, 1.0][i * i % 7];
        }
        let fit = Fit::new(Form::Rows, cells.iter(), &gather()).expect("a fit");
        for (estimate, truth) in [(fit.beta, 4.0), (fit.c0, 1200.0), (fit.row.expect("r"), 900.0)] {
            let (low, high) = estimate.interval.expect("six rows are left over");
            assert!(low < truth && truth < high && high - low < 0.1 * truth, "{estimate:?}");
            let error = estimate.standard_error.expect("an error");
            assert!(error > 0.0 && error < high - low, "{estimate:?}");
        }
    }

    #[test]
    fn what_cannot_be_fitted_says_why() {
        let one = made_up(&[8192], &[1], 0.0);
        assert_eq!(Fit::new(Form::Paper, one.iter(), &[]), Err(Unfit::Few { found: 1, needed: 2 }));
        let two = made_up(&[8192, 131_072], &[1], 0.0);
        assert_eq!(Fit::new(Form::Rows, two.iter(), &[]), Err(Unfit::Few { found: 2, needed: 3 }));
        let fit = Fit::new(Form::Paper, two.iter(), &[]).expect("two rows, two constants");
        assert!(near(fit.beta.value, 4.0) && fit.beta.interval.is_none() && fit.c1.is_empty());
        let again = [two[0].clone(), two[0].clone(), two[1].clone()];
        assert_eq!(Fit::new(Form::Paper, again.iter(), &[]), Err(Unfit::Alike));
        let no_rows = made_up(&[8192, 32_768, 131_072], &[1], 900.0);
        assert_eq!(Fit::new(Form::Rows, no_rows.iter(), &[]), Err(Unfit::Alike), "one batch");
        let mut backwards = two;
        backwards[0].us = 1e6;
        assert_eq!(Fit::new(Form::Paper, backwards.iter(), &[]), Err(Unfit::NotPhysical));
    }
}
