//! What a system declares of itself.

use super::Scheme;
use crate::check::{Case, Coverage};
use simt::KernelInfo;

/// A system: kernels that belong together, with what proves them and what they offer.
///
/// ```
/// for system in host::SYSTEMS {
///     println!("{}: {} ({} kernels)", system.name, system.about, (system.kernels)().len());
/// }
/// ```
#[derive(Debug)]
pub struct System {
    /// The name, that of its folders and of its kernels' entries.
    pub name: &'static str,
    /// What it is, in a line.
    pub about: &'static str,
    /// Every kernel instance.
    pub kernels: fn() -> Vec<&'static KernelInfo>,
    /// Its cases for `ferrokv check`.
    pub cases: fn(Coverage) -> Vec<Case>,
    /// The ways to keep keys and values that it offers; empty for a system of other kernels.
    pub schemes: &'static [Scheme],
}

impl System {
    /// Its cases, which know that they are its.
    pub fn own_cases(&self, coverage: Coverage) -> Vec<Case> {
        (self.cases)(coverage).into_iter().map(|case| case.of_system(self.name)).collect()
    }
}
