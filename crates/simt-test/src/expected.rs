//! What a kernel's output is held against.

use crate::element::Element;
use crate::failure::{Difference, Versus};

/// What an output must be: the oracle's word, and that of other implementations.
#[derive(Clone, Debug)]
pub struct Expected<T> {
    oracle: Oracle<T>,
    others: Vec<(&'static str, Vec<T>)>,
}

#[derive(Clone, Debug)]
enum Oracle<T> {
    Exact(Vec<T>),
    Near { values: Vec<f64>, bounds: Vec<f64>, derivation: &'static str },
    Unstated(usize),
}

/// These bits and no others. A NaN may be any NaN: of its payload, emulator and GPU promise nothing.
pub fn exact<T: Element>(values: impl Into<Vec<T>>) -> Expected<T> {
    Expected { oracle: Oracle::Exact(values.into()), others: Vec::new() }
}

/// Within `bound(i)` of `values[i]`, computed in f64. `derivation` says why the bound is what it is, in a
/// sentence: a failure shows it. Where the oracle is infinite or a NaN, the output must be so as well.
///
/// The bound is for the oracle alone: emulator and GPU must agree in every bit.
pub fn near<T: Element>(
    values: impl Into<Vec<f64>>,
    bound: impl Fn(usize) -> f64,
    derivation: &'static str,
) -> Expected<T> {
    let values = values.into();
    let bounds = (0..values.len()).map(bound).collect();
    Expected { oracle: Oracle::Near { values, bounds, derivation }, others: Vec::new() }
}

/// `len` elements of which no oracle knows anything: each must be written, and the same everywhere.
pub fn unstated<T: Element>(len: usize) -> Expected<T> {
    Expected { oracle: Oracle::Unstated(len), others: Vec::new() }
}

impl<T: Element> Expected<T> {
    /// The bits that another implementation gave for the same inputs: the emulator must give them as well.
    /// `name` says which one, for the message.
    pub fn and(mut self, name: &'static str, values: impl Into<Vec<T>>) -> Self {
        self.others.push((name, values.into()));
        self
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        match &self.oracle {
            Oracle::Exact(values) => values.len(),
            Oracle::Near { values, .. } => values.len(),
            Oracle::Unstated(len) => *len,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first thing that `found` is held against and is not.
    pub(crate) fn difference(&self, found: &[T]) -> Option<(Versus, Difference)> {
        let against = |values: &[T]| exact_difference(values, found);
        let others = || {
            self.others
                .iter()
                .find_map(|(name, values)| Some((Versus::Implementation(name), against(values)?)))
        };
        let oracle = match &self.oracle {
            Oracle::Unstated(_) => None,
            Oracle::Exact(values) => against(values).map(|difference| (Versus::Oracle, difference)),
            Oracle::Near { values, bounds, derivation } => {
                let wrong = |i: usize| !is_near(found[i].value(), values[i], bounds[i]);
                let count = if found.len() == values.len() { found.len() } else { 0 };
                let at: Vec<usize> = (0..count).filter(|i| wrong(*i)).collect();
                at.first().map(|&i| {
                    let difference = Difference {
                        index: i,
                        len: found.len(),
                        count: at.len(),
                        found: found[i].show(),
                        expected: format!("{:?} ± {:e}", values[i], bounds[i]),
                    };
                    (Versus::Bound(derivation), difference)
                })
            }
        };
        oracle.or_else(others)
    }
}

fn is_near(found: f64, expected: f64, bound: f64) -> bool {
    if expected.is_nan() || found.is_nan() {
        return expected.is_nan() && found.is_nan();
    }
    found == expected || expected.is_finite() && (found - expected).abs() <= bound
}

/// The first element of `found` that is another, and how many there are.
pub(crate) fn exact_difference<T: Element>(expected: &[T], found: &[T]) -> Option<Difference> {
    if expected.len() != found.len() {
        return Some(Difference {
            index: expected.len().min(found.len()),
            len: found.len(),
            count: expected.len().abs_diff(found.len()),
            found: format!("{} elements", found.len()),
            expected: format!("{} elements", expected.len()),
        });
    }
    let differ: Vec<usize> = (0..found.len()).filter(|i| !found[*i].same(expected[*i])).collect();
    let first = *differ.first()?;
    Some(Difference {
        index: first,
        len: found.len(),
        count: differ.len(),
        found: found[first].show(),
        expected: expected[first].show(),
    })
}

impl<T: Element> From<Vec<T>> for Expected<T> {
    fn from(values: Vec<T>) -> Self {
        exact(values)
    }
}

impl<T: Element> From<&Vec<T>> for Expected<T> {
    fn from(values: &Vec<T>) -> Self {
        exact(values.as_slice())
    }
}

impl<T: Element> From<&[T]> for Expected<T> {
    fn from(values: &[T]) -> Self {
        exact(values)
    }
}

impl<T: Element> From<&Expected<T>> for Expected<T> {
    fn from(expected: &Expected<T>) -> Self {
        expected.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_kept_and_broken() {
        let within = |found: f32, expected: f64, bound: f64| {
            near::<f32>(vec![expected], |_| bound, "why").difference(&[found]).is_none()
        };
        assert!(within(1.0, 1.25, 0.25) && !within(1.0, 1.25, 0.125));
        assert!(within(f32::NAN, f64::NAN, 0.0) && !within(f32::NAN, 0.0, f64::INFINITY));
        assert!(!within(0.0, f64::NAN, f64::INFINITY));
        assert!(within(f32::INFINITY, f64::INFINITY, 0.0) && !within(f32::MAX, f64::INFINITY, f64::INFINITY));
        assert!(!within(f32::NEG_INFINITY, f64::INFINITY, 1.0) && !within(f32::INFINITY, 1.0, 1e30));
        let (versus, difference) =
            near::<f32>(vec![0.0, 1.0, 2.0], |_| 0.5, "why").difference(&[0.0, 3.0, 4.0]).unwrap();
        assert!(matches!(versus, Versus::Bound("why")));
        assert_eq!((difference.index, difference.count, difference.len), (1, 2, 3));
        assert_eq!(difference.expected, "1.0 ± 5e-1");
    }

    #[test]
    fn bits_are_compared_but_for_nan() {
        let found = [0f32, f32::NAN, 1.0];
        let same = [0f32, f32::from_bits(0xff80_0001), 1.0];
        assert!(exact_difference(&same, &found).is_none());
        let difference = exact_difference(&[-0f32, f32::NAN, 2.0], &found).unwrap();
        assert_eq!((difference.index, difference.count), (0, 2));
        assert_eq!(difference.expected, "-0.0 (0x80000000)");
        let difference = exact_difference(&[0f32], &found).unwrap();
        assert_eq!((difference.index, difference.expected.as_str()), (1, "1 elements"));
    }

    #[test]
    fn another_implementation_is_held_against_as_well() {
        let expected = unstated::<u32>(2).and("simd", vec![1, 2]);
        assert!(expected.difference(&[1, 2]).is_none());
        let (versus, difference) = expected.difference(&[1, 3]).unwrap();
        assert!(matches!(versus, Versus::Implementation("simd")) && difference.index == 1);
        assert!(exact(vec![1u32, 3]).and("simd", vec![1, 2]).difference(&[1, 3]).is_some());
        assert_eq!((unstated::<u8>(0).is_empty(), expected.len()), (true, 2));
    }
}
