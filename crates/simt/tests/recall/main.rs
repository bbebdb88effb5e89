//! Recall: kernels with one planted bug each, by category, and their twins without it.
//!
//! Each case is one kernel whose last argument plants the bug. It says in which mode of the emulator the bug
//! is found, as what, in which line, block and thread; or why it is not found. A test runs the bug in every
//! mode up to that one, and the twin in all of them. `docs/emulator.md` holds the table of all cases.

mod case;
mod convergence;
mod dracc;
mod gpuverify;
mod indigo;
mod legal;
mod memory;
mod missed;
mod schedules;
mod scor;
mod table;
mod weak;
