//! Equality instead of a tolerance: runs kernels on two devices and compares every bit of what they wrote.
//!
//! A [`Case`] is one run of a kernel with all its parameters; [`run_cases`] runs each on the emulator and, if
//! there is one, on a GPU, and reports. A case poisons its outputs before it runs ([`poisoned`]), with
//! another byte on each kind of device: so an element that a kernel never writes is a difference as well.
//!
//! ```
//! use host::check::{Case, Outcome, OutputBuffer, poisoned, run_cases};
//! use host::{Device, Stream};
//! use kernels_gpu::probe::barriers::barriers;
//! use simt::{LaunchShape, emu::EmuOptions};
//!
//! let kernel = barriers::kernel();
//! let case = Case::new(kernel.info(), "block=64", move |device| {
//!     let stream = Stream::new(device)?;
//!     let mut out = poisoned::<u32>(&stream, 64 * 48)?;
//!     let shape = LaunchShape::new(1, 64).shared(4096);
//!     // SAFETY: 64 threads write 48 words each.
//!     unsafe { stream.launch(&kernel, shape, barriers::Args { out: out.global_mut(), seed: 7 })? };
//!     Ok(vec![OutputBuffer::download("out", &out)?])
//! });
//! let cpu = Device::cpu(EmuOptions::default());
//! let report = run_cases(&[case], &cpu, None, |_| {});
//! assert_eq!(report.cases[0].outcome, Outcome::NoGpu);
//! ```

mod compare;
mod golden;
mod report;
mod times;

pub use compare::{Difference, ElementKind, OutputBuffer, OutputElement};
pub use golden::{Golden, GoldenError};
pub use report::{CaseReport, Outcome, Report, Totals};
pub use times::{LOSS, ROUNDS, TimedKernel, Times, TimesError, time_cases};

use crate::{BackendKind, Buffer, Device, Stream};
use crate::{Error, Result};
use simt::emu::EmuOptions;
use simt::{KernelInfo, Pod};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

/// How much a system's cases try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Coverage {
    /// A few small cases: for tools that slow a GPU down a hundred times.
    Small,
    /// Every instance, shapes around every edge: minutes.
    Quick,
    /// Those, and large ones.
    Full,
    /// Only what takes gigabytes: indices beyond 32 bits.
    Huge,
}

/// What a case's run may end with: this crate's [`Error`], or that of a system.
pub type CaseError = Box<dyn std::error::Error + Send + Sync>;

type Run = dyn Fn(&Device) -> std::result::Result<Vec<OutputBuffer>, CaseError> + Send + Sync;

/// One run of a kernel, or of a few that belong together, with all its parameters.
pub struct Case {
    system: &'static str,
    kernels: Vec<&'static str>,
    label: String,
    race_check: bool,
    shared_bytes: Option<u32>,
    run: Box<Run>,
}

impl Case {
    /// A case of `kernel`; `label` names every parameter: shape, input, seed. `run` makes its inputs and
    /// outputs on the device it is given, launches, and hands back what was written.
    pub fn new(
        kernel: &'static KernelInfo,
        label: impl Into<String>,
        run: impl Fn(&Device) -> std::result::Result<Vec<OutputBuffer>, CaseError> + Send + Sync + 'static,
    ) -> Self {
        Case {
            system: "",
            kernels: vec![kernel.name],
            label: label.into(),
            race_check: false,
            shared_bytes: None,
            run: Box::new(run),
        }
    }

    /// The system whose case it is, which reports name.
    pub fn of_system(mut self, system: &'static str) -> Self {
        self.system = system;
        self
    }

    /// The run also launches `kernel`.
    pub fn and(mut self, kernel: &'static KernelInfo) -> Self {
        self.kernels.push(kernel.name);
        self
    }

    /// The emulator also looks for races: for small shapes, as it then records every access.
    pub fn race_checked(mut self) -> Self {
        self.race_check = true;
        self
    }

    /// Both devices have so many bytes of shared memory for a block, if they have as many: for the kernels of
    /// smaller GPUs.
    pub fn within(mut self, shared_bytes: u32) -> Self {
        self.shared_bytes = Some(shared_bytes);
        self
    }

    /// Runs it.
    fn run(&self, device: &Device) -> std::result::Result<Vec<OutputBuffer>, CaseError> {
        match self.shared_bytes {
            Some(bytes) => (self.run)(&device.with_max_shared_bytes(bytes)),
            None => (self.run)(device),
        }
    }

    /// The entries that the run launches, the one it is about first.
    pub fn kernels(&self) -> &[&'static str] {
        &self.kernels
    }

    /// The run's parameters.
    pub fn label(&self) -> &str {
        &self.label
    }
}

/// How far [`run_cases`] has come.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The case that has just finished.
    pub case: &'a CaseReport,
    /// How many have.
    pub done: usize,
    /// How many there are.
    pub total: usize,
}

/// The byte that outputs hold before a run: another one on each kind of device.
pub(crate) fn poison(kind: BackendKind) -> u8 {
    match kind {
        BackendKind::Cpu => 0xa5,
        BackendKind::Cuda => 0x5a,
    }
}

/// An output buffer in which what the kernel does not write shows.
///
/// # Errors
/// As [`Buffer::new`] and [`Stream::fill_u8`].
pub fn poisoned<T: Pod>(stream: &Stream, len: usize) -> Result<Buffer<T>> {
    let mut buffer = Buffer::new(stream.device(), len)?;
    stream.fill_u8(&mut buffer, .., poison(stream.device().kind()))?;
    Ok(buffer)
}

/// Runs every case on `reference`, the emulator, and on `other`, usually a GPU, and compares their outputs.
///
/// Without `other`, and where that is too old a GPU for the kernel, the cases run all the same, so that the
/// emulator checks them, and end as [`Outcome::NoGpu`]. Cases that ask for it run on the emulator with race
/// checking.
pub fn run_cases(
    cases: &[Case],
    reference: &Device,
    other: Option<&Device>,
    progress: impl FnMut(Progress<'_>),
) -> Report {
    let options = EmuOptions { target: Some(reference.target()), ..EmuOptions::race_checked() };
    run_on(cases, [reference, &Device::cpu(options)], other, progress)
}

/// Runs every case on the emulator with these options, whatever the case asks for; as many at a time as there
/// are cores, each on a device of its own.
pub fn run_emulated(cases: &[Case], options: EmuOptions, mut progress: impl FnMut(Progress<'_>)) -> Report {
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get()).min(cases.len());
    // Each takes the next case when it has done one: they take unequally long.
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    let mut reports: Vec<(usize, CaseReport)> = Vec::with_capacity(cases.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (next, sender) = (&next, sender.clone());
            scope.spawn(move || {
                while let Some((at, case)) = {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    cases.get(at).map(|case| (at, case))
                } {
                    // The other end is there until all have ended.
                    let _ = sender.send((at, run_case(case, &Device::cpu(options), None)));
                }
            });
        }
        drop(sender);
        for (at, report) in receiver {
            progress(Progress { case: &report, done: reports.len() + 1, total: cases.len() });
            reports.push((at, report));
        }
    });
    reports.sort_by_key(|(at, _)| *at);
    let reports = reports.into_iter().map(|(_, report)| report).collect();
    Report::new(Device::cpu(options).info().name.clone(), None, reports)
}

fn run_on(
    cases: &[Case],
    [reference, race_checking]: [&Device; 2],
    other: Option<&Device>,
    mut progress: impl FnMut(Progress<'_>),
) -> Report {
    let mut reports = Vec::with_capacity(cases.len());
    for case in cases {
        let reference = if case.race_check { race_checking } else { reference };
        let report = run_case(case, reference, other);
        progress(Progress { case: &report, done: reports.len() + 1, total: cases.len() });
        reports.push(report);
    }
    Report::new(reference.info().name.clone(), other.map(|other| other.info().name.clone()), reports)
}

fn run_case(case: &Case, reference: &Device, other: Option<&Device>) -> CaseReport {
    let mut report = CaseReport::new(case);
    let expected = timed(&mut report.reference_ms, || case.run(reference));
    let expected = match expected {
        Ok(expected) => expected,
        // It emulates the other's generation.
        Err(error) if is_for_others(&*error) => return report.without(&*error, other.unwrap_or(reference)),
        Err(error) => return report.failed(&*error, reference),
    };
    report.outputs = expected.iter().map(|output| output.len() as u64).sum();
    report.digest = Some(compare::digest(&expected));
    let Some(other) = other else { return report };
    let actual = match timed(&mut report.other_ms, || case.run(other)) {
        Ok(actual) => actual,
        Err(error) if is_too_new(&*error, other) => return report.without(&*error, other),
        Err(error) => return report.failed(&*error, other),
    };
    report.compare(&expected, &actual);
    report
}

fn timed<R>(milliseconds: &mut f64, f: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = f();
    *milliseconds = start.elapsed().as_secs_f64() * 1e3;
    result
}

/// Whether the emulator caught a mistake of the kernel, as opposed to a failure around it.
fn is_fault(error: &(dyn std::error::Error + 'static)) -> bool {
    let is_one = |error: &(dyn std::error::Error + 'static)| {
        matches!(error.downcast_ref::<Error>(), Some(Error::Fault(_))) || error.is::<simt::emu::Fault>()
    };
    std::iter::successors(Some(error), |error| error.source()).any(is_one)
}

/// Whether the kernel is for other GPUs: not that its driver takes but an older text.
fn is_too_new(error: &(dyn std::error::Error + 'static), gpu: &Device) -> bool {
    let capability = gpu.info().compute_capability.unwrap_or(0);
    let is_one = |error: &(dyn std::error::Error + 'static)| match error.downcast_ref::<Error>() {
        Some(Error::KernelNeeds { needs, .. }) => *needs > capability,
        Some(Error::KernelOnly { .. }) => true,
        _ => false,
    };
    std::iter::successors(Some(error), |error| error.source()).any(is_one)
}

/// Whether the kernel is for GPUs of another generation than the one that is emulated.
fn is_for_others(error: &(dyn std::error::Error + 'static)) -> bool {
    let is_one = |error: &(dyn std::error::Error + 'static)| {
        matches!(error.downcast_ref::<Error>(), Some(Error::KernelOnly { .. }))
    };
    std::iter::successors(Some(error), |error| error.source()).any(is_one)
}

/// The kernels of `all` that no case launches.
pub fn not_covered<'a>(cases: &[Case], all: impl IntoIterator<Item = &'a KernelInfo>) -> Vec<&'static str> {
    let covered: std::collections::HashSet<&str> =
        cases.iter().flat_map(|case| case.kernels.iter().copied()).collect();
    all.into_iter().map(|info| info.name).filter(|name| !covered.contains(name)).collect()
}

#[cfg(test)]
mod small;
#[cfg(test)]
mod tests;
