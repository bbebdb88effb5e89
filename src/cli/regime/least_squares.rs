//! Least squares with weights, for a few unknowns.

use std::f64::consts::FRAC_PI_2;

/// Columns whose part that no other column explains is smaller than this share of them are dependent.
const DEPENDENT: f64 = 1e-6;

/// `Σ terms · unknowns = value`, which counts `weight` times.
#[derive(Clone, Debug, PartialEq)]
pub struct Equation {
    /// What the unknowns are multiplied by.
    pub terms: Vec<f64>,
    /// What was measured.
    pub value: f64,
    /// The weight of its squared residual.
    pub weight: f64,
}

/// The unknowns.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// Each one's value.
    pub values: Vec<f64>,
    /// Each one's standard error, from what is left over; none where nothing is.
    pub errors: Option<Vec<f64>>,
    /// Equations beyond as many as there are unknowns.
    pub freedom: usize,
}

/// The unknowns with the least sum of squared residuals; none where the equations do not determine them.
pub fn solve(equations: &[Equation]) -> Option<Solution> {
    let unknowns = equations.first()?.terms.len();
    let freedom = equations.len().checked_sub(unknowns)?;
    if unknowns == 0 || equations.iter().any(|equation| equation.terms.len() != unknowns) {
        return None;
    }
    let roots: Vec<f64> = equations.iter().map(|equation| equation.weight.sqrt()).collect();
    let column = |j: usize| -> Vec<f64> {
        equations.iter().zip(&roots).map(|(equation, root)| equation.terms[j] * root).collect()
    };
    // Columns of length 1: terms may be bytes beside ones.
    let lengths: Vec<f64> = (0..unknowns).map(|j| dot(&column(j), &column(j)).sqrt()).collect();
    if lengths.iter().any(|length| !(length.is_finite() && *length > 0.0)) {
        return None;
    }
    // Gram and Schmidt, each column against what the ones before left of it: Q, and R by columns.
    let (mut q, mut r): (Vec<Vec<f64>>, Vec<Vec<f64>>) = (Vec::new(), Vec::new());
    for (j, length) in lengths.iter().enumerate() {
        let mut left: Vec<f64> = column(j).iter().map(|x| x / length).collect();
        let mut parts = vec![0.0; unknowns];
        for (k, direction) in q.iter().enumerate() {
            parts[k] = dot(direction, &left);
            left.iter_mut().zip(direction).for_each(|(x, d)| *x -= parts[k] * d);
        }
        parts[j] = dot(&left, &left).sqrt();
        if parts[j].is_nan() || parts[j] < DEPENDENT {
            return None;
        }
        left.iter_mut().for_each(|x| *x /= parts[j]);
        q.push(left);
        r.push(parts);
    }
    let mut rest: Vec<f64> =
        equations.iter().zip(&roots).map(|(equation, root)| equation.value * root).collect();
    let mut along = Vec::with_capacity(unknowns);
    for direction in &q {
        let part = dot(direction, &rest);
        rest.iter_mut().zip(direction).for_each(|(x, d)| *x -= part * d);
        along.push(part);
    }
    let scaled = back_substitute(&r, &along);
    let values: Vec<f64> = scaled.iter().zip(&lengths).map(|(x, length)| x / length).collect();
    let errors = (freedom > 0).then(|| {
        let scatter = (dot(&rest, &rest) / freedom as f64).sqrt();
        // The columns of R's inverse: an unknown's variance is the sum of the squares of its row there.
        let inverse: Vec<Vec<f64>> = (0..unknowns)
            .map(|k| {
                back_substitute(&r, &(0..unknowns).map(|j| f64::from(u8::from(j == k))).collect::<Vec<_>>())
            })
            .collect();
        let row = |j: usize| inverse.iter().map(|column| column[j] * column[j]).sum::<f64>().sqrt();
        (0..unknowns).map(|j| scatter * row(j) / lengths[j]).collect()
    });
    values.iter().all(|value| value.is_finite()).then_some(Solution { values, errors, freedom })
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// The solution of an upper triangle, which is given by columns.
fn back_substitute(columns: &[Vec<f64>], right: &[f64]) -> Vec<f64> {
    let mut values = right.to_vec();
    for j in (0..values.len()).rev() {
        values[j] /= columns[j][j];
        for k in 0..j {
            values[k] -= columns[j][k] * values[j];
        }
    }
    values
}

/// By how many standard errors an interval of 95 % reaches to either side: Student's quantile.
pub fn student(freedom: usize) -> f64 {
    // With t = √n · tan θ the probability of less, to both sides, is a finite sum (Abramowitz and Stegun,
    // 26.7.3 and 26.7.4), which grows with θ.
    let inside = |theta: f64| {
        let (sin, cos) = theta.sin_cos();
        let odd = freedom % 2 == 1;
        let (mut term, mut sum) = if odd { (cos, 0.0) } else { (1.0, 0.0) };
        let mut k = if odd { 1.0 } else { 0.0 };
        while k + 2.0 <= freedom as f64 {
            sum += term;
            term *= cos * cos * (k + 1.0) / (k + 2.0);
            k += 2.0;
        }
        if odd { (theta + sin * sum) / FRAC_PI_2 } else { sin * sum }
    };
    let (mut low, mut high) = (0.0, FRAC_PI_2);
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        if inside(middle) < 0.95 { low = middle } else { high = middle }
    }
    (freedom as f64).sqrt() * low.tan()
}

/// The share of the values' variance that the predictions explain; none where there is no variance.
pub fn r_squared(pairs: impl Iterator<Item = (f64, f64)> + Clone) -> Option<f64> {
    let count = pairs.clone().count() as f64;
    let mean = pairs.clone().map(|(value, _)| value).sum::<f64>() / count;
    let around = |of: fn((f64, f64), f64) -> f64| -> f64 {
        pairs.clone().map(|pair| of(pair, mean)).map(|x| x * x).sum()
    };
    let (all, left) = (around(|pair, mean| pair.0 - mean), around(|pair, _| pair.0 - pair.1));
    (all > 0.0).then(|| 1.0 - left / all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn equation(terms: &[f64], value: f64) -> Equation {
        Equation { terms: terms.to_vec(), value, weight: 1.0 }
    }

    #[test]
    fn known_unknowns_come_back() {
        let truth = [2e-10, 3.5, -0.25];
        let rows =
            [[9e9, 1.0, 0.0], [2.5e10, 1.0, 3.0], [1.2e10, 1.0, 1.0], [8e10, 1.0, 7.0], [3e9, 1.0, 2.0]];
        let equations: Vec<Equation> = rows.iter().map(|row| equation(row, dot(row, &truth))).collect();
        let found = solve(&equations).expect("determined");
        assert_eq!(found.freedom, 2);
        for (value, truth) in found.values.iter().zip(truth) {
            assert!((value / truth - 1.0).abs() < 1e-9, "{found:?}");
        }
        assert!(found.errors.expect("errors").iter().zip(truth).all(|(e, truth)| *e < 1e-9 * truth.abs()));
        // As many equations as unknowns: solved, and no word on errors.
        let exact = solve(&equations[..3]).expect("determined");
        assert!((exact.values[1] - 3.5).abs() < 1e-9 && exact.errors.is_none());
    }

    #[test]
    fn errors_are_those_of_a_line() {
        // y = 1, 3, 2 at x = 0, 1, 2: slope 1/2, squares left 3/2, so s² = 3/2, and s²/Σ(x − 1)² = 3/4.
        let points = [(0.0, 1.0), (1.0, 3.0), (2.0, 2.0)];
        let equations: Vec<Equation> = points.iter().map(|(x, y)| equation(&[*x, 1.0], *y)).collect();
        let found = solve(&equations).expect("determined");
        assert!((found.values[0] - 0.5).abs() < 1e-12 && (found.values[1] - 1.5).abs() < 1e-12);
        let errors = found.errors.expect("one degree of freedom");
        assert!((errors[0] - 0.75f64.sqrt()).abs() < 1e-12);
        assert!((errors[1] - (1.5 * 5.0 / 6.0f64).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn weights_pull() {
        let mut equations = vec![equation(&[1.0], 1.0), equation(&[1.0], 5.0)];
        equations[1].weight = 3.0;
        assert!((solve(&equations).expect("determined").values[0] - 4.0).abs() < 1e-12);
    }

    #[test]
    fn what_is_not_determined_is_refused() {
        let same: Vec<Equation> = (0..4).map(|i| equation(&[7e9, 1.0], f64::from(i))).collect();
        assert_eq!(solve(&same), None);
        assert_eq!(solve(&[equation(&[1.0, 1.0], 1.0)]), None, "one equation");
        assert_eq!(solve(&[]), None);
        let zero: Vec<Equation> = (1..4).map(|i| equation(&[f64::from(i), 0.0], 1.0)).collect();
        assert_eq!(solve(&zero), None, "a column of zeros");
        let unequal = [equation(&[1.0], 1.0), equation(&[1.0, 2.0], 1.0)];
        assert_eq!(solve(&unequal), None);
        assert_eq!(solve(&[equation(&[f64::NAN], 1.0), equation(&[1.0], 1.0)]), None);
        assert_eq!(solve(&[equation(&[1.0], f64::INFINITY), equation(&[1.0], 1.0)]), None);
    }

    #[test]
    fn students_quantiles_are_those_of_tables() {
        for (freedom, quantile) in
            [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423)]
        {
            assert!((student(freedom) - quantile).abs() < 1e-4, "{freedom}: {}", student(freedom));
        }
    }

    #[test]
    fn r_squared_of_nothing_new_is_zero() {
        let squared = |pairs: &[(f64, f64)]| r_squared(pairs.iter().copied());
        assert_eq!(squared(&[(1.0, 1.0), (3.0, 3.0)]), Some(1.0));
        assert_eq!(squared(&[(1.0, 2.0), (3.0, 2.0)]), Some(0.0));
        assert_eq!((squared(&[(2.0, 1.0), (2.0, 3.0)]), squared(&[])), (None, None));
    }
}
