//! `ferrokv eval`: what a KV scheme does to a language model.

mod heat_map;
pub mod journal;
mod niah;
mod pairs;
mod ppl;
mod ruler;

use super::failure::Failure;
use super::interrupt::{self, Interrupt};
use super::progress;
use super::scheme::{self, DENSE};
use clap::Subcommand;
use host::eval::statistics::Interval;
use host::kv::{Selection, Summary};
use indicatif::ProgressBar;
use std::ops::ControlFlow;
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

/// Why a measurement has no result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An earlier record.
    #[error(transparent)]
    Journal(#[from] journal::Error),
    /// Ctrl-C cannot be watched for.
    #[error(transparent)]
    Watch(#[from] interrupt::Error),
    /// Ctrl-C.
    #[error("{0}")]
    Interrupted(String),
    /// A comparison of more or fewer than two.
    #[error("--kv {found} does not name two KV schemes; give two, for instance --kv dense,certified")]
    NotTwo {
        /// What was given.
        found: String,
    },
    /// A part that is more than the whole.
    #[error("{what} {value} is more than the {tokens} tokens there are; give fewer, or more --tokens")]
    MoreThanTokens {
        /// The option.
        what: &'static str,
        /// Its value.
        value: u32,
        /// How many there are.
        tokens: usize,
    },
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

/// The schemes of a run: the baseline first, each once.
pub fn beside_dense(selections: &[Selection]) -> Vec<Selection> {
    let dense = scheme::dense();
    let others = scheme::each_once(selections).into_iter().filter(|other| Some(other) != dense.as_ref());
    dense.iter().cloned().chain(others).collect()
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

/// Progress for a person, and Ctrl-C.
pub struct Watcher {
    bar: ProgressBar,
    interrupt: Interrupt,
}

impl Watcher {
    /// Watches from now on, over so much work.
    ///
    /// # Errors
    /// Somebody else watches for Ctrl-C.
    pub fn new(work: usize) -> Result<Watcher, Error> {
        Ok(Watcher { bar: progress::timed(work), interrupt: Interrupt::watch()? })
    }

    /// What is being done.
    pub fn say(&self, what: String) {
        self.bar.set_message(what);
    }

    /// Work that an earlier run did.
    pub fn skip(&self, work: usize) {
        self.bar.set_length(self.bar.length().unwrap_or(0).saturating_sub(work as u64));
    }

    /// Hears of work that is done; breaks where Ctrl-C was pressed.
    pub fn hear(&self, work: usize) -> ControlFlow<()> {
        self.add(work);
        if self.interrupt.pressed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Work that is done.
    pub fn add(&self, work: usize) {
        self.bar.inc(work as u64);
    }

    /// Work of which `shown` are counted, however much there is.
    pub fn part(&self, shown: usize) -> Part<'_> {
        Part { watcher: self, left: shown }
    }

    /// Takes the bar away.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

/// One trial's share of a bar.
pub struct Part<'a> {
    watcher: &'a Watcher,
    left: usize,
}

impl Part<'_> {
    /// As [`Watcher::hear`], up to the share.
    pub fn hear(&mut self, work: usize) -> ControlFlow<()> {
        let shown = work.min(self.left);
        self.left -= shown;
        self.watcher.hear(shown)
    }

    /// The rest of the share is done.
    pub fn end(self) {
        self.watcher.add(self.left);
    }
}

/// `[-0.0012, +0.0034]`.
pub fn signed(interval: Option<Interval>) -> String {
    interval.map_or_else(|| "-".into(), |i| format!("[{:+.5}, {:+.5}]", i.low, i.high))
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
