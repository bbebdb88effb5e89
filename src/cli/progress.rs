//! Progress on stderr, for people: nothing where stderr is not a terminal.

use indicatif::{ProgressBar, ProgressStyle};

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
    bar.enable_steady_tick(std::time::Duration::from_millis(200));
    bar
}
