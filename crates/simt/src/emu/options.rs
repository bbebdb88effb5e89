//! How a launch is emulated: what is checked, and in which order threads run.

use super::target::{EMULATE_VARIABLE, Target};
use crate::random::SplitMix64;
use std::fmt;
use std::str::FromStr;

/// The variable that names the [`Schedule`] of launches whose options leave it open: `ascending`, `reversed`,
/// or a seed.
pub const SCHEDULE_VARIABLE: &str = "FERROKV_SCHEDULE";

/// The variable that turns [`stream_check`](EmuOptions::stream_check) on for every device of the CPU backend,
/// if it is set to anything but `0`.
pub const STREAM_CHECK_VARIABLE: &str = "FERROKV_STREAM_CHECK";

/// In which order blocks and threads run.
///
/// In every order a thread that waits for another one gives way: at a barrier, at a warp primitive, and when
/// it has made so many atomics, fences and pauses without an end that it seems to wait for a word to change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// Blocks in parallel on all cores, started in ascending order; the threads of a block in ascending
    /// order. The cheapest. Which block comes first differs from run to run.
    #[default]
    Parallel,
    /// One block after another on one core, in ascending order, and so their threads.
    Ascending,
    /// The same from the last block to the first, and from the last thread of each to its first.
    Reversed,
    /// Blocks, warps and lanes in an order that the seed decides, several blocks at once. Before and behind
    /// each atomic, fence and pause the seed also decides whether another thread goes on.
    Seeded(u32),
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Schedule::Parallel => f.write_str("parallel"),
            Schedule::Ascending => f.write_str("ascending"),
            Schedule::Reversed => f.write_str("reversed"),
            Schedule::Seeded(seed) => write!(f, "seed {seed}"),
        }
    }
}

impl FromStr for Schedule {
    type Err = String;

    /// Reads `parallel`, `ascending`, `reversed`, or a number: a seed.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "parallel" => Ok(Schedule::Parallel),
            "ascending" => Ok(Schedule::Ascending),
            "reversed" => Ok(Schedule::Reversed),
            seed => seed.parse().map(Schedule::Seeded).map_err(|_| {
                format!("`{text}` is no schedule: parallel, ascending, reversed, or a number as seed")
            }),
        }
    }
}

/// How a launch is emulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmuOptions {
    /// Also report races. Blocks then share one core and every access is recorded: for small shapes.
    pub race_check: bool,
    /// Also report reads of global memory that nobody wrote, where the memory is
    /// [accounted for](crate::emu::allocations). With this option a device of the CPU backend does so for its
    /// buffers.
    pub memory_check: bool,
    /// Also report work of two streams on the same bytes that nothing orders, and uses of pinned memory
    /// before the wait for the work that touches it. For devices of the CPU backend; one launch has no
    /// streams. [`STREAM_CHECK_VARIABLE`] turns it on as well.
    pub stream_check: bool,
    /// In which order blocks and threads run. [`Schedule::Parallel`] leaves it to [`SCHEDULE_VARIABLE`].
    pub schedule: Schedule,
    /// Runs each launch in so many orders more, each from the same contents of memory, and reports results
    /// that differ: reversed, then by seeds from 1 on. What the first order wrote stays.
    pub orders: u32,
    /// How often threads that wait may look again while nothing changes, until the wait is reported as one
    /// without end.
    pub patience: u32,
    /// Stack of each emulated thread that parks, in bytes.
    pub stack_bytes: usize,
    /// The GPU that is emulated. `None` leaves it to [`EMULATE_VARIABLE`], and that, where it is not set, to
    /// [`Target::HOPPER`].
    pub target: Option<Target>,
}

impl Default for EmuOptions {
    fn default() -> Self {
        EmuOptions {
            race_check: false,
            memory_check: false,
            stream_check: false,
            schedule: Schedule::Parallel,
            orders: 0,
            patience: 10_000,
            stack_bytes: 256 * 1024,
            target: None,
        }
    }
}

impl EmuOptions {
    /// The default options with race checking on.
    pub fn race_checked() -> Self {
        EmuOptions { race_check: true, ..Self::default() }
    }

    /// Every check, in nine orders: for a new kernel, on a small shape.
    pub fn thorough() -> Self {
        EmuOptions {
            race_check: true,
            memory_check: true,
            stream_check: true,
            schedule: Schedule::Ascending,
            orders: 8,
            ..Self::default()
        }
    }

    /// The GPU that launches with these options emulate: that of the options, or else of the environment.
    ///
    /// # Errors
    /// A name in the environment that no target has.
    pub fn emulated(&self) -> Result<Target, String> {
        if let Some(target) = self.target {
            return Ok(target);
        }
        match std::env::var(EMULATE_VARIABLE) {
            Ok(text) => text.parse().map_err(|error| format!("{EMULATE_VARIABLE}: {error}")),
            Err(_) => Ok(Target::default()),
        }
    }

    /// The schedule that a launch has: that of the options, or else of the environment.
    pub(super) fn schedule(&self) -> Result<Schedule, String> {
        if self.schedule != Schedule::Parallel {
            return Ok(self.schedule);
        }
        match std::env::var(SCHEDULE_VARIABLE) {
            Ok(text) => text.parse().map_err(|error| format!("{SCHEDULE_VARIABLE}: {error}")),
            Err(_) => Ok(Schedule::Parallel),
        }
    }
}

/// Numbers that a seed decides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dice(SplitMix64);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Dice(SplitMix64(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.word()
    }

    /// A number below `end`, which is not 0.
    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}
