//! Lines that emulated threads print.
//!
//! A thread only puts its line aside: it is handed to the sink when no kernel runs on the core, on a stack
//! that has room for whatever the sink does. That is at the end of its block's turn, when all of the block's
//! threads have ended or wait for other blocks; or sooner, if very many lines wait: then the thread gives
//! way.

use super::fault::{Place, ThreadId, interned};
use super::lane::{self, CURRENT};
use crate::print::{self, Line, Printed, Sink};
use core::panic::Location;
use std::cell::RefCell;
use std::fmt;

/// A thread whose line finds so many in its block gives way.
const MOST_WAITING: usize = 8192;

/// The lines of a block that nobody has been given.
#[derive(Default)]
pub(crate) struct Lines {
    sink: Option<Sink>,
    waiting: RefCell<Vec<Line>>,
}

impl Lines {
    /// Lines for `sink`; without one they are forgotten.
    pub(crate) fn new(sink: Option<Sink>) -> Self {
        Lines { sink, waiting: RefCell::default() }
    }

    /// Hands all of them over.
    pub(crate) fn hand_over(&self) {
        if self.waiting.borrow().is_empty() {
            return;
        }
        let lines = self.waiting.take();
        if let Some(sink) = &self.sink {
            lines.into_iter().for_each(|line| print::call(sink, &Printed::Line(line)));
        }
    }
}

/// What `println!` in a kernel does; in a function that no kernel has called it is the standard library's.
#[track_caller]
pub fn line((file, line, column): (&str, u32, u32), text: fmt::Arguments<'_>) {
    let lane = CURRENT.get();
    if lane.is_null() {
        return std::println!("{text}");
    }
    // SAFETY: set by the runner on this OS thread for as long as the lane runs.
    let lane = unsafe { &*lane };
    let block = lane.block();
    if block.lines.sink.is_none() {
        return;
    }
    let thread = ThreadId { block: block.index.get(), thread: lane.thread };
    let place = Place { file: interned(file), line, column };
    let line = Line { kernel: block.info.name, thread, place, text: text.to_string() };
    let mut waiting = block.lines.waiting.borrow_mut();
    waiting.push(line);
    if waiting.len() >= MOST_WAITING {
        drop(waiting);
        lane::give_way(Location::caller());
    }
}
