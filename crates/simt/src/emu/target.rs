//! Which GPU is emulated.
//!
//! Kernels give the same bits on every GPU, but for products of f16 and bf16 matrices: how tensor cores add
//! is not the same in every generation ([`tensor`](super::tensor)). How much shared memory a block may have
//! is not, either. [`target_has`](crate::thread::target_has) answers for the target. All else of the emulator
//! is alike for every target.

use super::lane::running;
use super::tensor::TensorCores;
use std::fmt;
use std::str::FromStr;

/// The variable that names the [`Target`] of launches whose options leave it open, for example `sm_80`.
pub const EMULATE_VARIABLE: &str = "FERROKV_EMULATE";

/// A GPU that can be emulated, by the target that PTX has for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    sm: u32,
}

/// Targets, what their tensor cores are, and the KiB of shared memory that a block may have: those of the
/// CUDA programming guide's table of compute capabilities, and 1 KiB a block below the multiprocessor's.
const TARGETS: [(u32, TensorCores, u32); 13] = [
    (70, TensorCores::Volta, 96),
    (72, TensorCores::Volta, 96),
    (75, TensorCores::Turing, 64),
    (80, TensorCores::Ampere, 163),
    (86, TensorCores::Ampere, 99),
    (87, TensorCores::Ampere, 163),
    (89, TensorCores::Ampere, 99),
    (90, TensorCores::Hopper, 227),
    (100, TensorCores::Hopper, 227),
    (103, TensorCores::Hopper, 227),
    (110, TensorCores::Hopper, 227),
    (120, TensorCores::Hopper, 99),
    (121, TensorCores::Hopper, 99),
];

/// A target that is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownTarget {
    /// What was asked for.
    pub asked: String,
}

impl Target {
    /// What is emulated if nothing else is asked for: an H100.
    pub const HOPPER: Target = Target { sm: 90 };

    /// The target of this number, 80 for `sm_80`, if it is one that is known.
    pub fn new(sm: u32) -> Option<Target> {
        TARGETS.iter().any(|row| row.0 == sm).then_some(Target { sm })
    }

    /// The target of a GPU of this compute capability, 80 for 8.0: its own, or the newest known one that is
    /// older.
    pub fn of_gpu(capability: u32) -> Target {
        let older = TARGETS.iter().rev().find(|row| row.0 <= capability);
        Target { sm: older.unwrap_or(&TARGETS[0]).0 }
    }

    /// Its number, 80 for `sm_80`.
    pub fn number(self) -> u32 {
        self.sm
    }

    /// How its tensor cores add.
    pub fn tensor_cores(self) -> TensorCores {
        self.row().1
    }

    /// The most dynamic shared memory that a block may have, in bytes.
    pub fn max_shared_bytes(self) -> u32 {
        self.row().2 * 1024
    }

    fn row(self) -> (u32, TensorCores, u32) {
        // Every target is one of the table.
        TARGETS.into_iter().find(|row| row.0 == self.sm).unwrap_or(TARGETS[0])
    }
}

/// The GPU that the kernel runs on; outside of kernels the one that everything is proven for.
pub(crate) fn current() -> Target {
    running(|lane| lane.block().target).unwrap_or_default()
}

impl Default for Target {
    fn default() -> Self {
        Target::HOPPER
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}", self.sm)
    }
}

impl fmt::Display for UnknownTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known: Vec<String> = TARGETS.iter().map(|row| format!("sm_{}", row.0)).collect();
        write!(f, "`{}` is no GPU that can be emulated: {}", self.asked, known.join(", "))
    }
}

impl std::error::Error for UnknownTarget {}

impl FromStr for Target {
    type Err = UnknownTarget;

    /// Reads `sm_80`.
    fn from_str(text: &str) -> Result<Self, UnknownTarget> {
        let number = text.strip_prefix("sm_").and_then(|number| number.parse().ok());
        number.and_then(Target::new).ok_or_else(|| UnknownTarget { asked: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_named_as_ptx_names_them() {
        for (sm, ..) in TARGETS {
            let target = Target::new(sm).unwrap();
            assert_eq!(target.to_string().parse(), Ok(target));
            assert_eq!((target.number(), Target::of_gpu(sm)), (sm, target));
        }
        for wrong in ["", "80", "sm_", "sm_81", "sm_090x", "SM_80", "sm_-80"] {
            let error = wrong.parse::<Target>().unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("`{wrong}` is no GPU that can be emulated: sm_70,")),
                "{error}"
            );
        }
        assert_eq!(Target::default(), Target::HOPPER);
        assert!(TARGETS.is_sorted_by_key(|row| row.0));
    }

    #[test]
    fn a_gpu_that_is_not_known_is_taken_for_the_one_before() {
        let of = |capability| Target::of_gpu(capability).number();
        assert_eq!([61, 88, 101, 999].map(of), [70, 87, 100, 121]);
    }
}
