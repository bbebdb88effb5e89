//! The stream check of the CPU backend: programs with one mistake each in the order of their work, and the
//! same programs without it.
//!
//! Each case is a function that makes the mistake if it is told to. It says as what the mistake is found, and
//! in which bytes; the two works that are reported are those of the lines that end in `// FIRST` and
//! `// SECOND`. `docs/emulator.md` holds the table of all cases.

mod case;
mod events;
mod graphs;
mod legal;
mod missed;
mod overlap;
mod pinned;
mod table;
