//! How well a fit does: on the cells that it was fitted to, and on cells that it was not.

use super::least_squares::r_squared;
use super::traffic::{Cell, Fit, Form, Place, Unfit};
use serde::Serialize;

/// A form is said to fail where it is further off than this, of a cell's time.
pub const FAILS: f64 = 0.05;

/// A fit and what it makes of every cell.
#[derive(Debug, Serialize)]
pub struct Judged {
    /// The form in words.
    pub formula: String,
    /// Its constants.
    #[serde(flatten)]
    pub fit: Fit,
    /// The share of the variance of dense times, and of speed-ups, that it explains; none where nothing is
    /// left over to tell.
    pub r2_times: Option<f64>,
    /// See `r2_times`.
    pub r2_speedups: Option<f64>,
    /// The largest error over a time.
    pub worst: f64,
    /// The same, of cells that were held out; none where no cell can be.
    pub worst_held_out: Option<f64>,
    /// Whether it is further off than a few per cent.
    pub fails: bool,
    /// Every cell.
    pub cells: Vec<Row>,
}

/// What a fit makes of a cell.
#[derive(Debug, PartialEq, Serialize)]
pub struct Row {
    /// The scheme.
    pub kv: String,
    /// Where.
    #[serde(flatten)]
    pub place: Place,
    /// What was measured.
    pub measured_us: f64,
    /// By the fit to all cells, and its error over the time.
    pub predicted_us: f64,
    /// See `predicted_us`.
    pub error: f64,
    /// By a fit to all cells but those of this context and batch; none where the others do not determine it.
    pub held_out_us: Option<f64>,
    /// Its error over the time.
    pub held_out_error: Option<f64>,
    /// Dense time over this one, of other schemes where dense was measured.
    pub speedup: Option<Speedup>,
}

/// A ratio of times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speedup {
    /// Of what was measured.
    pub measured: f64,
    /// Of what the fit to all cells says.
    pub predicted: f64,
    /// Of what the fit without this context and batch says.
    pub held_out: Option<f64>,
}

/// The mean dense time at a place.
pub fn dense_us(cells: &[Cell], place: Place) -> Option<f64> {
    let own = || cells.iter().filter(|cell| cell.is_dense() && cell.place == place);
    let count = own().count();
    (count > 0).then(|| own().map(|cell| cell.us).sum::<f64>() / count as f64)
}

impl Judged {
    /// Fits a form to the cells and judges it.
    ///
    /// # Errors
    /// [`Unfit`].
    pub fn new(form: Form, cells: &[Cell], schemes: &[String]) -> Result<Judged, Unfit> {
        let fit = Fit::new(form, cells.iter(), schemes)?;
        let shown = |cell: &&Cell| cell.is_dense() || schemes.contains(&cell.kv);
        let row = |cell: &Cell| -> Option<Row> {
            let place = cell.place;
            let without = cells.iter().filter(|other| other.place != place);
            let held_out = Fit::new(form, without, schemes).ok();
            let step = |fit: &Fit| fit.step_us(&cell.kv, cell.bytes(), place.batch);
            let (predicted_us, held_out_us) = (step(&fit)?, held_out.as_ref().and_then(step));
            let error = |us: f64| us / cell.us - 1.0;
            let dense = cells.iter().find(|other| other.is_dense() && other.place == place);
            let speedup = dense.filter(|_| !cell.is_dense()).and_then(|dense| {
                let over = |fit: &Fit| Some(fit.step_us(&dense.kv, dense.bytes(), place.batch)? / step(fit)?);
                Some(Speedup {
                    measured: dense_us(cells, place)? / cell.us,
                    predicted: over(&fit)?,
                    held_out: held_out.as_ref().and_then(over),
                })
            });
            Some(Row {
                kv: cell.kv.clone(),
                place,
                measured_us: cell.us,
                predicted_us,
                error: error(predicted_us),
                held_out_us,
                held_out_error: held_out_us.map(error),
                speedup,
            })
        };
        let rows: Vec<Row> = cells.iter().filter(shown).filter_map(row).collect();
        let largest = |errors: &mut dyn Iterator<Item = f64>| errors.map(f64::abs).reduce(f64::max);
        let worst = largest(&mut rows.iter().map(|row| row.error)).unwrap_or(0.0);
        let worst_held_out = largest(&mut rows.iter().filter_map(|row| row.held_out_error));
        let dense = cells.iter().filter(|cell| cell.is_dense());
        let times =
            dense.filter_map(|cell| Some((cell.us, fit.step_us(&cell.kv, cell.bytes(), cell.place.batch)?)));
        let r2_times = if fit.freedom > 0 { r_squared(times) } else { None };
        let speedups = rows.iter().filter_map(|row| row.speedup.map(|of| (of.measured, of.predicted)));
        let told = fit.freedom > 0 || speedups.clone().count() > fit.c1.len();
        Ok(Judged {
            formula: form.formula(),
            r2_times,
            r2_speedups: if told { r_squared(speedups) } else { None },
            worst,
            worst_held_out,
            fails: worst.max(worst_held_out.unwrap_or(0.0)) > FAILS,
            cells: rows,
            fit,
        })
    }
}

/// The one with the smallest error on cells held out; where none can be held out, the one with the fewest
/// constants.
pub fn best(fits: &[Judged]) -> Option<&Judged> {
    let rank = |judged: &&Judged| judged.worst_held_out.unwrap_or(f64::INFINITY);
    fits.iter().min_by(|a, b| rank(a).total_cmp(&rank(b)))
}

#[cfg(test)]
mod tests {
    use super::super::traffic::tests::made_up;
    use super::*;

    fn gather() -> Vec<String> {
        vec!["gather".into()]
    }

    #[test]
    fn cells_held_out_are_predicted_by_the_others() {
        let mut cells = made_up(&[8192, 131_072], &[1, 4], 900.0);
        let judged = Judged::new(Form::Rows, &cells, &gather()).expect("a fit");
        assert_eq!(judged.cells.len(), 8);
        assert!(judged.worst < 1e-9 && judged.worst_held_out.is_some_and(|worst| worst < 1e-6));
        assert!(judged.r2_times.is_some_and(|r2| r2 > 1.0 - 1e-9) && !judged.fails, "{judged:?}");
        // One dense cell half as slow again: its own prediction without it is that of the truth.
        let truth = cells[2].us;
        cells[2].us *= 1.5;
        let judged = Judged::new(Form::Rows, &cells, &gather()).expect("a fit");
        let row = &judged.cells[2];
        assert!((row.held_out_us.expect("held out") / truth - 1.0).abs() < 1e-6, "{row:?}");
        assert!((row.held_out_error.expect("held out") - (1.0 / 1.5 - 1.0)).abs() < 1e-6 && judged.fails);
        // The fit to all cells has seen it.
        assert!(row.predicted_us > 1.01 * truth, "{row:?}");
    }

    #[test]
    fn the_form_that_predicts_best_is_taken() {
        let rows = made_up(&[8192, 131_072], &[1, 2, 4], 900.0);
        let judged = |cells: &[Cell]| Form::ALL.map(|form| Judged::new(form, cells, &gather()));
        let both: Vec<Judged> = judged(&rows).into_iter().map(|fit| fit.expect("a fit")).collect();
        assert!(both[0].fails && !both[1].fails);
        assert_eq!(best(&both).map(|judged| judged.fit.form), Some(Form::Rows));
        assert_eq!(best(&[]).map(|judged| judged.fit.form), None);
        let one: Vec<Judged> = judged(&made_up(&[8192, 131_072], &[1], 0.0)).into_iter().flatten().collect();
        assert_eq!((one.len(), best(&one).map(|judged| judged.fit.form)), (1, Some(Form::Paper)));
        // Two cells, two constants: nothing is left over to say how good they are.
        assert_eq!((one[0].r2_times, one[0].worst_held_out), (None, None));
    }

    #[test]
    fn speed_ups_are_ratios_of_a_place() {
        let cells = made_up(&[8192, 131_072], &[1, 8], 0.0);
        let judged = Judged::new(Form::Paper, &cells, &gather()).expect("a fit");
        for pair in judged.cells.chunks(2) {
            assert_eq!((pair[0].speedup, pair[0].kv.as_str()), (None, "dense"));
            let speedup = pair[1].speedup.expect("dense is there");
            assert_eq!(speedup.measured, pair[0].measured_us / pair[1].measured_us);
            assert!((speedup.predicted / speedup.measured - 1.0).abs() < 1e-9);
            assert!((speedup.held_out.expect("held out") / speedup.measured - 1.0).abs() < 1e-6);
        }
        assert!(judged.r2_speedups.is_some_and(|r2| r2 > 1.0 - 1e-9));
    }
}
