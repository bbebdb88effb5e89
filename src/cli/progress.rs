//! Progress on stderr, for people: nothing where stderr is not a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;

/// A bar of `steps`.
pub fn bar(steps: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg}") {
        bar.set_style(style);
    }
    bar
}

/// A bar of so much work, with the time left.
pub fn timed(work: usize) -> ProgressBar {
    let bar = ProgressBar::new(work as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {percent:>3} %, {eta} left  {wide_msg}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// A line that says what is being done, for work whose steps are not counted.
pub fn spinner(doing: &str) -> ProgressBar {
    let line = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
        line.set_style(style);
    }
    line.set_message(doing.to_string());
    line.enable_steady_tick(Duration::from_millis(100));
    line
}
