//! A case, and all of them.

use crate::machine::Machine;
use crate::{
    bulk, clusters, convergence, dracc, gpuverify, indigo, legal, memory, missed, products, schedules, scor,
    tiles, weak,
};
use ferrokv_device::Result;
use simt::emu::EmuOptions;

/// A way to run the emulator, the cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// No option.
    Default,
    /// `race_check`.
    Races,
    /// `memory_check`.
    Memory,
    /// `orders`.
    Orders,
    /// All of them.
    Thorough,
}

impl Mode {
    /// All of them.
    pub const ALL: [Mode; 5] = [Mode::Default, Mode::Races, Mode::Memory, Mode::Orders, Mode::Thorough];

    /// The options that find it, as the table has them.
    pub fn words(self) -> &'static str {
        match self {
            Mode::Default => "always",
            Mode::Races => "`race_check`",
            Mode::Memory => "`memory_check`",
            Mode::Orders => "`orders`",
            Mode::Thorough => "`thorough()`",
        }
    }

    /// The emulator's options.
    pub fn options(self) -> EmuOptions {
        match self {
            Mode::Default => EmuOptions::default(),
            Mode::Races => EmuOptions::race_checked(),
            Mode::Memory => EmuOptions { memory_check: true, ..EmuOptions::default() },
            Mode::Orders => EmuOptions { orders: 8, ..EmuOptions::default() },
            Mode::Thorough => EmuOptions::thorough(),
        }
    }
}

/// What the emulator is expected to make of a bug.
#[derive(Clone, Copy, Debug)]
pub enum Found {
    /// First found in this mode, as this variant of `FaultKind`, in the line that ends in `// BUG: marker`,
    /// by this block and thread.
    In(Mode, &'static str, &'static str, (u32, u32)),
    /// The same of a thread, in no line.
    OfThread(Mode, &'static str, (u32, u32)),
    /// The same of the launch as a whole, of no line and no thread.
    OfLaunch(Mode, &'static str),
    /// There is no bug: it must pass.
    Legal,
    /// There is no bug, and it is a fault all the same, in every mode: this variant of `FaultKind`, for this
    /// reason.
    Refused(&'static str, &'static str),
    /// Not found, for this reason.
    Missed(&'static str),
}

/// A kernel with a planted bug, and without it; or one that has none.
pub struct Case {
    /// Its name, which no other case has.
    pub name: &'static str,
    /// The category, which is its file.
    pub category: &'static str,
    /// What the bug is; of a case without one, what it does.
    pub mistake: &'static str,
    /// What the emulator is expected to make of it.
    pub found: Found,
    /// The text of its file.
    pub source: &'static str,
    /// Runs it: with the bug, if the number is 1, and without, if it is 0. Panics if a result is wrong.
    pub run: fn(u32, &Machine) -> Result<()>,
}

impl Case {
    /// Whether it has a bug to plant.
    pub fn has_bug(&self) -> bool {
        !matches!(self.found, Found::Legal | Found::Refused(..))
    }

    /// Whether it is a false alarm: it has no bug, and the emulator refuses it.
    pub fn is_refused(&self) -> bool {
        matches!(self.found, Found::Refused(..))
    }

    /// Whether a GPU can launch it: none has room for a stack of that size in each thread.
    pub fn fits_a_gpu(&self) -> bool {
        self.name != "large_local_array"
    }
}

/// Every case, by category.
pub fn categories() -> Vec<(&'static str, &'static [Case])> {
    [
        indigo::CASES,
        scor::CASES,
        gpuverify::CASES,
        dracc::CASES,
        schedules::CASES,
        memory::CASES,
        convergence::CASES,
        bulk::CASES,
        products::CASES,
        tiles::CASES,
        clusters::CASES,
        weak::CASES,
        missed::CASES,
        legal::CASES,
    ]
    .into_iter()
    .map(|cases| (cases[0].category, cases))
    .collect()
}
