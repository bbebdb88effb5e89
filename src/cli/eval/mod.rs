//! `ferrokv eval`: what a KV scheme does to a language model.

mod niah;
mod pairs;
mod ppl;
mod ruler;

use super::failure::Failure;
use super::scheme::{DENSE, beside_dense};
use clap::Subcommand;
use host::kv::Summary;
use std::str::FromStr;

const LONG: &str = "\
Measure what a KV scheme does to a language model, beside the dense cache on the same texts.

Every measurement reads what comes first in chunks and then decodes token by token through the cache: that is where a \
scheme acts. With --json FILE the record grows as trials are done: Ctrl-C keeps what there is, and the same command goes on \
from there, with more schemes or lengths if it names them.

Exit codes: 0 done; 2 bad input; 130 interrupted.";

/// Measure what a KV scheme does to a language model.
#[derive(clap::Args)]
#[command(long_about = LONG)]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Ppl(Box<ppl::Arguments>),
    Niah(Box<niah::Arguments>),
    Ruler(Box<ruler::Arguments>),
}

/// Runs the measurement.
///
/// # Errors
/// Bad input, what the device reports, or Ctrl-C.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.what {
        What::Ppl(arguments) => ppl::run(arguments),
        What::Niah(arguments) => niah::run(arguments),
        What::Ruler(arguments) => ruler::run(arguments),
    }
}

/// Lengths in tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lengths(pub Vec<usize>);

/// The shortest length that anything is measured at.
const SHORTEST: usize = 16;

impl FromStr for Lengths {
    type Err = String;

    /// `512,1024`, or `512..8192` with what lies between by doubling.
    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            let number = text.trim().parse::<usize>().ok().filter(|n| (SHORTEST..1 << 30).contains(n));
            number.ok_or_else(|| format!("'{text}' is no number of tokens of {SHORTEST} or more"))
        };
        let mut lengths = Vec::new();
        for part in text.split(',') {
            match part.split_once("..") {
                None => lengths.push(number(part)?),
                Some((first, last)) => {
                    let (first, last) = (number(first)?, number(last)?);
                    if first > last {
                        return Err(format!("'{part}' ends before it starts"));
                    }
                    let doubled = std::iter::successors(Some(first), |n| Some(2 * n));
                    lengths.extend(doubled.take_while(|n| *n < last).chain([last]));
                }
            }
        }
        lengths.sort_unstable();
        lengths.dedup();
        Ok(Lengths(lengths))
    }
}

/// The names of a record's schemes: the baseline first, the others as they came.
pub fn names<'a>(found: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut names = vec![DENSE];
    for name in found {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// The share of heads that were computed exactly; nothing where nothing is known of steps.
pub fn exact_heads(report: Option<Summary>) -> String {
    report
        .map_or_else(String::new, |all| format!("{:.2} %", 100.0 * all.exact_heads as f64 / all.heads as f64))
}

/// The largest bound on a head's error; nothing where none is stated.
pub fn worst_bound(report: Option<Summary>) -> String {
    report.filter(|all| all.bounded_heads > 0).map_or_else(String::new, |all| match all.worst_bound {
        Some(bound) => format!("{bound:.4}"),
        None => "none".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_double_up_to_the_last() {
        let lengths = |text: &str| text.parse::<Lengths>().map(|lengths| lengths.0);
        assert_eq!(lengths("512..4096"), Ok(vec![512, 1024, 2048, 4096]));
        assert_eq!(lengths("100..250,64"), Ok(vec![64, 100, 200, 250]));
        assert_eq!(lengths("64,64"), Ok(vec![64]));
        for bad in ["", "15", "x", "512..", "1024..512", "64,", "-64"] {
            assert!(lengths(bad).is_err(), "{bad}");
        }
    }
}
