//! Recall: kernels with one planted bug each, by category, and their twins without it.
//!
//! Each case is one kernel whose last argument plants the bug. It says in which mode of the emulator the bug
//! is found, as what, in which line, block and thread; or why it is not found. A test runs the bug in every
//! mode up to that one, and the twin in all of them. `docs/emulator.md` holds the table of all cases.
//!
//! The same kernels are PTX as well: `crates/recall-gpu` launches one case on a GPU, for compute-sanitizer.

/// Makes the cases of a file: a test for each, and the list `CASES`.
macro_rules! cases {
    ($category:literal; $($name:ident: $mistake:literal, $found:expr, |$bug:pat_param, $on:ident| $run:expr;)*) => {
        #[cfg(not(target_arch = "nvptx64"))]
        pub const CASES: &[crate::case::Case] = &[$(crate::case::Case {
            name: stringify!($name),
            category: $category,
            mistake: $mistake,
            found: $found,
            source: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/", $category, ".rs")),
            run: |$bug, $on| $run,
        }),*];

        #[cfg(test)]
        mod tests {
            $(#[test]
            fn $name() {
                let case = super::CASES.iter().find(|case| case.name == stringify!($name));
                crate::check::check(case.expect("the list has every case"));
            })*
        }
    };
}

mod bulk;
#[cfg(not(target_arch = "nvptx64"))]
mod case;
#[cfg(test)]
mod check;
mod clusters;
mod convergence;
mod dracc;
mod gpuverify;
mod indigo;
pub mod language;
mod legal;
#[cfg(not(target_arch = "nvptx64"))]
mod machine;
mod memory;
mod missed;
pub mod printing;
mod products;
mod schedules;
mod scor;
pub mod stopping;
#[cfg(test)]
mod table;
mod tiles;
#[cfg(test)]
mod tools;
mod weak;

#[cfg(not(target_arch = "nvptx64"))]
pub use case::{Case, Found, Mode, categories};
#[cfg(not(target_arch = "nvptx64"))]
pub use machine::Machine;
