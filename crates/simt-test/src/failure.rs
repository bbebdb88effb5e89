//! What a test reports: one message, with everything that it takes to look at the case again.

use ferrokv_device::Error;
use simt::LaunchShape;
use simt::emu::{Fault, Place, ThreadId};
use std::fmt;

/// An array that is not what it should be: its first wrong element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The element.
    pub index: usize,
    /// How many elements the array has.
    pub len: usize,
    /// How many of them are wrong.
    pub count: usize,
    /// The element's value and bits.
    pub found: String,
    /// What it should be.
    pub expected: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { index, len, count, found, expected } = self;
        write!(f, "element {index} is {found}, expected {expected}; {count} of {len} elements differ")
    }
}

/// What a result was held against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Versus {
    /// The oracle's bits.
    Oracle,
    /// The oracle's value in f64 with a bound, and why the bound is what it is.
    Bound(&'static str),
    /// Another implementation.
    Implementation(&'static str),
    /// The emulator on all cores, where blocks run beside each other.
    Parallel,
    /// The GPU.
    Gpu,
}

impl fmt::Display for Versus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Versus::Oracle => f.write_str("the oracle says otherwise"),
            Versus::Bound(derivation) => {
                write!(f, "further from the oracle than its bound allows ({derivation})")
            }
            Versus::Implementation(name) => write!(f, "{name} says otherwise"),
            Versus::Parallel => f.write_str("a second run, on all cores, says otherwise"),
            Versus::Gpu => f.write_str("GPU and emulator differ"),
        }
    }
}

/// What can go wrong with the process that runs a case on the GPU.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// It could not be started.
    #[error("the process for the GPU cannot be started: {0}")]
    Start(#[source] std::io::Error),
    /// The launch failed there. On a GPU its context is lost with it, and the process with the context.
    #[error("on the GPU: {message}")]
    Fault {
        /// The driver's code, if it is the driver's error.
        code: Option<u32>,
        /// The error in words.
        message: String,
    },
    /// The process ended while it had the case.
    #[error("the process for the GPU ended while it ran the case: {status}")]
    Ended {
        /// How it ended: a signal or a code.
        status: String,
    },
    /// It did not answer in time, and was ended.
    #[error("the process for the GPU gave no answer in {seconds} s and was ended")]
    Silent {
        /// How long it had.
        seconds: u64,
    },
    /// It did not get to the test, or said what nobody understands.
    #[error("the process for the GPU did not answer as this test: {answer}")]
    Answer {
        /// What it said.
        answer: String,
    },
    /// There is none, and the environment asks for one.
    #[error("SIMT_TEST_GPU=required, and there is no GPU to run on: {reason}")]
    Missing {
        /// Why.
        reason: String,
    },
}

/// An output that is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mismatch {
    /// The kernel's parameter.
    pub parameter: &'static str,
    /// The first wrong element.
    pub difference: Difference,
    /// What it was held against.
    pub versus: Versus,
    /// Who wrote the element last, if any thread did.
    pub writer: Option<(ThreadId, Place)>,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "output `{}`: {}", self.parameter, self.difference)?;
        if let Some((thread, place)) = &self.writer {
            write!(f, " (written by {thread} at {place})")?;
        }
        write!(f, ": {}", self.versus)
    }
}

/// What is wrong with a case.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The emulator caught a mistake.
    #[error("{0}")]
    Fault(Box<Fault>),
    /// A device refused the launch, or memory for it.
    #[error("{0}")]
    Device(#[source] Error),
    /// An output is not what it should be.
    #[error("{0}")]
    Differs(Box<Mismatch>),
    /// An element of an output that no thread wrote.
    #[error("output `{parameter}`: no thread wrote element {index}, and {count} of {len} elements in all")]
    NotWritten {
        /// The kernel's parameter.
        parameter: &'static str,
        /// The first such element.
        index: usize,
        /// How many there are.
        count: usize,
        /// How many elements the output has.
        len: usize,
    },
    /// The process for the GPU.
    #[error(transparent)]
    Gpu(GpuError),
    /// The test's own function panicked.
    #[error("the test's own function panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
    /// A strategy had no value, or the function returned an error.
    #[error("no case: {reason}")]
    NoCase {
        /// Why.
        reason: String,
    },
}

impl Failure {
    /// Whether two failures are of one kind, so that one may stand for the other when a case shrinks.
    pub(crate) fn is_like(&self, other: &Failure) -> bool {
        use std::mem::discriminant;
        match (self, other) {
            (Failure::Fault(a), Failure::Fault(b)) => {
                // One mistake may show as a race or as a dependence on the order, at one place or another.
                discriminant(&a.kind) == discriminant(&b.kind)
            }
            (Failure::Differs(a), Failure::Differs(b)) => {
                a.parameter == b.parameter && discriminant(&a.versus) == discriminant(&b.versus)
            }
            (Failure::Gpu(a), Failure::Gpu(b)) => discriminant(a) == discriminant(b),
            (a, b) => discriminant(a) == discriminant(b),
        }
    }
}

/// A test that failed. Its text is the whole message.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failed {
    /// A case failed.
    #[error("{0}")]
    Case(Box<FailedCase>),
    /// The function found no case in what was drawn, again and again.
    #[error("test {test}: {skipped} drawn values in a row were no case; draw such that more of them are")]
    Skipped {
        /// The test.
        test: String,
        /// How many.
        skipped: u32,
    },
    /// A variable of the environment that nobody understands.
    #[error("{variable}={value}: {expected}")]
    Setting {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
}

/// A case that failed, shrunk.
#[derive(Debug)]
#[non_exhaustive]
pub struct FailedCase {
    /// The test.
    pub test: String,
    /// The kernel; `None` if there was no launch.
    pub kernel: Option<&'static str>,
    /// The launch.
    pub shape: Option<LaunchShape>,
    /// What is wrong.
    pub failure: Failure,
    /// Each parameter's name and value in short form, shrunk.
    pub inputs: Vec<(&'static str, String)>,
    /// Which case it was, from 1.
    pub number: u32,
    /// How many simpler cases failed on the way.
    pub shrunk: u32,
    /// The command that runs this case again.
    pub command: String,
}

impl fmt::Display for FailedCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "test {}", self.test)?;
        if let Some(kernel) = self.kernel {
            write!(f, ", kernel {kernel}")?;
        }
        writeln!(f, ", case {}, shrunk in {} steps", self.number, self.shrunk)?;
        writeln!(f, "  {}", self.failure)?;
        if !self.inputs.is_empty() {
            writeln!(f, "with")?;
        }
        for (name, value) in &self.inputs {
            writeln!(f, "  {name} = {value}")?;
        }
        if let Some(LaunchShape { grid, block, shared_bytes }) = self.shape {
            writeln!(f, "  launch = grid {grid}, block {block}, {shared_bytes} bytes of shared memory")?;
        }
        write!(f, "to run this case again:\n  {}", self.command)
    }
}
