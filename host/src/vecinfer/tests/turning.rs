//! A step's token, turned and encoded in one launch.

use super::super::cases::turning::{all, outputs};
use super::device;
use crate::check::Coverage;

/// Every instance, both pairings, positions at every edge and numbers that are none: the bits of the rotation
/// and of encoding one after another.
#[test]
fn one_launch_has_the_bits_of_two() {
    let all = all(Coverage::Quick);
    assert!(all.len() > 30);
    for turned in all {
        let [one, two] =
            [true, false].map(|at_once| outputs(&device(), turned, at_once).expect("a step's tokens"));
        for (one, two) in one.iter().zip(&two) {
            let same = one.bytes() == two.bytes();
            assert!(same, "{turned:?}: {}", one.name());
        }
    }
}
