//! What commands that run many trials of a model share: a record that grows, progress, Ctrl-C.

pub mod journal;

use super::failure::CommandError;
use super::interrupt::{self, Interrupt};
use super::progress;
use host::eval::statistics::Interval;
use indicatif::ProgressBar;
use std::ops::ControlFlow;

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

impl CommandError for Error {
    fn exit_code(&self) -> u8 {
        if matches!(self, Error::Interrupted(_)) { 130 } else { 2 }
    }
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
