//! A test from its first case to its last.

use crate::draws::{Case, Drawn, Draws};
use crate::failure::{Difference, Failed, FailedCase, Failure, GpuError, Mismatch, Versus};
use crate::process::{self, Process};
use crate::settings::{self, Gpu, Options, Settings};
use crate::shrink::{Shrinker, Tried};
use crate::trial::{Output, Trial};
use ferrokv_device::{Device, Error, PtxImage, cuda_devices};
use proptest::test_runner::Reason;
use simt::emu::EmuOptions;
use simt::random::mixed;
use std::cell::{OnceCell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Where a test stands. `#[simt::test]` makes it.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub struct Site {
    /// Module and function.
    pub path: &'static str,
    /// The package, as cargo names it.
    pub package: &'static str,
    /// Whether it was built with debug assertions.
    pub debug: bool,
}

/// What a test that passed has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// How many cases ran.
    pub cases: u32,
    /// How many drawn values were no case.
    pub skipped: u32,
    /// How many cases ran on the GPU too.
    pub on_gpu: u32,
    /// Why none did.
    pub without_gpu: Option<String>,
}

/// Draws that were no case, in a row, after which a test gives up.
const MOST_SKIPPED: u32 = 1000;
/// What an output holds before the first run: what a device of the CPU backend gives, as not written.
const FIRST: u8 = 0xa5;
/// What it holds before the second run.
const SECOND: u8 = 0x5a;
/// What an output holds before the run on the GPU.
const THIRD: u8 = 0xc3;

/// The test's function: draws its parameters and returns its trial.
type Body<'b> = &'b dyn Fn(&mut Draws<'_>) -> Result<Option<Trial>, Reason>;

/// Runs a test. `#[simt::test]` calls it.
///
/// # Errors
/// The case that failed, shrunk.
#[doc(hidden)]
pub fn check(
    site: &Site,
    options: Options,
    images: &dyn Fn() -> Option<&'static [PtxImage]>,
    body: Body<'_>,
) -> Result<Report, Failed> {
    let settings = Settings::new(options, site.path, |variable| std::env::var(variable).ok())?;
    if let Ok(child) = std::env::var(process::CHILD) {
        if child == site.path {
            serve(&settings, images, body);
        }
        return Ok(Report::default());
    }
    // The harness names the thread of a test after it.
    let thread = std::thread::current();
    let own = || site.path.split_once("::").map_or(site.path, |(_, path)| path);
    let test = thread.name().filter(|name| *name != "main").unwrap_or_else(own).to_string();
    let (gpu, without_gpu) = match gpu(&settings, images) {
        Ok(()) => (There::Runs(RefCell::new(Process::new(site.path, &test, settings.gpu_seconds))), None),
        Err(reason) if settings.gpu == Gpu::Required => (There::Missing(reason.clone()), Some(reason)),
        Err(reason) => {
            if settings.gpu == Gpu::Auto && images().is_some() {
                eprintln!("{test}: without a GPU: {reason}");
            }
            (There::No, Some(reason))
        }
    };
    let bench = Bench { settings: &settings, body, test: &test, site, gpu, thorough: OnceCell::new() };
    let mut report = Report { without_gpu, ..Report::default() };
    let mut in_a_row = 0;
    let mut number = 0;
    while report.cases < settings.cases {
        let case = Case::new(settings.only.unwrap_or_else(|| mixed(settings.seed, number)));
        number += 1;
        let run = bench.run(&case);
        match run.came {
            Came::Failed(..) => {
                return Err(bench.failed(case, run, number));
            }
            Came::Passed => {
                report.cases += 1;
                report.on_gpu += u32::from(matches!(bench.gpu, There::Runs(_)));
                in_a_row = 0;
            }
            Came::Skipped => {
                report.skipped += 1;
                in_a_row += 1;
            }
        }
        if settings.only.is_some() {
            break;
        }
        if in_a_row == MOST_SKIPPED {
            return Err(Failed::Skipped { test, skipped: in_a_row });
        }
    }
    Ok(report)
}

/// Whether cases run on the GPU, or why not.
fn gpu(settings: &Settings, images: &dyn Fn() -> Option<&'static [PtxImage]>) -> Result<(), String> {
    match settings.gpu {
        Gpu::Off => return Err(format!("{}=off", settings::GPU)),
        Gpu::Emulated => return Ok(()),
        Gpu::Auto | Gpu::Required => {}
    }
    let images = match images() {
        None => return Err("the test names no PTX (`ptx = …`)".to_string()),
        Some([]) => return Err(Error::NoPtx.to_string()),
        Some(images) => images,
    };
    let devices = cuda_devices().map_err(|error| error.to_string())?;
    let Some(first) = devices.first() else {
        return Err(Error::NoDevice { ordinal: 0, count: 0 }.to_string());
    };
    let lowest = images.iter().map(|image| image.sm).min().unwrap_or_default();
    match first.compute_capability {
        Some(capability) if capability < lowest => {
            Err(Error::GpuTooOld { device: first.name.clone(), capability, lowest }.to_string())
        }
        _ => Ok(()),
    }
}

/// In the process for the GPU: runs the cases that it is given.
fn serve(settings: &Settings, images: &dyn Fn() -> Option<&'static [PtxImage]>, body: Body<'_>) {
    let device = OnceCell::new();
    process::serve(|case| {
        let device: &Device = match device.get() {
            Some(device) => device,
            None => {
                let opened = match settings.gpu {
                    Gpu::Emulated => Device::cpu(EmuOptions::default()),
                    _ => Device::cuda(0, images().unwrap_or_default())?,
                };
                device.get_or_init(|| opened)
            }
        };
        // What is no case here was none to the parent.
        let Ok(Some(trial)) = body(&mut Draws::new(case, false)) else { return Ok(Vec::new()) };
        let outputs = trial.launch.run(device, Some(THIRD))?;
        Ok(outputs.into_iter().map(|output| output.contents).collect())
    });
}

/// What a case came to.
enum Came {
    Passed,
    Skipped,
    Failed(Failure),
}

struct Run {
    drawn: Vec<Drawn>,
    trial: Option<Trial>,
    came: Came,
}

/// Where else cases run.
enum There {
    /// On the GPU, in this process.
    Runs(RefCell<Process>),
    /// On the GPU, and there is none, for this reason.
    Missing(String),
    /// Nowhere.
    No,
}

/// What all cases of a test share.
struct Bench<'b> {
    settings: &'b Settings,
    body: Body<'b>,
    test: &'b str,
    site: &'b Site,
    gpu: There,
    thorough: OnceCell<Device>,
}

impl Bench<'_> {
    fn run(&self, case: &Case) -> Run {
        let mut draws = Draws::new(case, false);
        let drawn = catch_unwind(AssertUnwindSafe(|| (self.body)(&mut draws)));
        let drawn_values = draws.into_drawn();
        let failed = |failure| Run { drawn: drawn_values.clone(), trial: None, came: Came::Failed(failure) };
        let trial = match drawn {
            Err(payload) => return failed(panicked(&*payload)),
            Ok(Err(reason)) => return failed(Failure::NoCase { reason: reason.to_string() }),
            Ok(Ok(None)) => return Run { drawn: drawn_values, trial: None, came: Came::Skipped },
            Ok(Ok(Some(trial))) => trial,
        };
        let judged = catch_unwind(AssertUnwindSafe(|| self.judge(&trial, case)));
        let came = match judged {
            Ok(Ok(())) => Came::Passed,
            Ok(Err(failure)) => Came::Failed(failure),
            Err(payload) => Came::Failed(panicked(&*payload)),
        };
        Run { drawn: drawn_values, trial: Some(trial), came }
    }

    fn judge(&self, trial: &Trial, case: &Case) -> Result<(), Failure> {
        let launch = &*trial.launch;
        let options = EmuOptions { orders: self.settings.orders, ..EmuOptions::thorough() };
        let thorough = self.thorough.get_or_init(|| Device::cpu(options));
        let first = launch.run(thorough, None).map_err(of_device)?;
        // With other contents before, so that an element which nobody writes is another one.
        let second = launch.run(&Device::cpu(EmuOptions::default()), Some(SECOND)).map_err(of_device)?;
        for (a, b) in first.iter().zip(&second) {
            if let Some(failure) = not_written(a, &b.contents) {
                return Err(failure);
            }
            if let Some(difference) = a.judge.between(&a.contents, &b.contents) {
                return Err(differs(trial, a, difference, Versus::Parallel));
            }
        }
        for output in &first {
            if let Some((versus, difference)) = output.judge.expected(&output.contents) {
                return Err(differs(trial, output, difference, versus));
            }
        }
        let third = match &self.gpu {
            There::No => return Ok(()),
            There::Missing(reason) => {
                return Err(Failure::Gpu(GpuError::Missing { reason: reason.clone() }));
            }
            There::Runs(process) => process.borrow_mut().run(case).map_err(Failure::Gpu)?,
        };
        if third.len() != first.len() {
            let answer = format!("{} outputs, and not {}", third.len(), first.len());
            return Err(Failure::Gpu(GpuError::Answer { answer }));
        }
        for (output, contents) in first.iter().zip(&third) {
            if let Some(difference) = output.judge.between(&output.contents, contents) {
                return Err(differs(trial, output, difference, Versus::Gpu));
            }
        }
        Ok(())
    }

    /// Shrinks a case that failed, and makes the message.
    fn failed(&self, case: Case, run: Run, number: u64) -> Failed {
        let Came::Failed(failure) = run.came else {
            // Callers have one that failed.
            return Failed::Skipped { test: self.test.to_string(), skipped: 0 };
        };
        let seed = case.seed;
        let begin = Instant::now();
        let kind = failure;
        let mut again = |case: &Case| {
            let run = self.run(case);
            let failure = match run.came {
                Came::Failed(failure) if failure.is_like(&kind) => Some((failure, run.trial)),
                _ => None,
            };
            Tried { drawn: run.drawn, failure }
        };
        // The first failure is had once more, so that it may stay what others are held against.
        let Tried { drawn, failure } = again(&case);
        let (case, steps, last) = match failure {
            None => (case, 0, None),
            Some(failure) => {
                let mut more = || begin.elapsed() < self.settings.shrink;
                let mut shrinker =
                    Shrinker { run: &mut again, more: &mut more, case, drawn, failure, steps: 0 };
                shrinker.shrink();
                (shrinker.case, shrinker.steps, Some(shrinker.failure))
            }
        };
        let (failure, trial) = last.unwrap_or((kind, run.trial));
        let mut draws = Draws::new(&case, true);
        // Only the values are of interest; the function has been seen to fail.
        let _ = catch_unwind(AssertUnwindSafe(|| (self.body)(&mut draws).map(drop)));
        let inputs = draws.into_drawn().into_iter().map(|drawn| (drawn.name, drawn.shown)).collect();
        Failed::Case(Box::new(FailedCase {
            test: self.test.to_string(),
            kernel: trial.as_ref().map(|trial| trial.launch.info().name),
            shape: trial.as_ref().map(|trial| trial.launch.shape()),
            failure,
            inputs,
            number: number as u32,
            shrunk: steps,
            command: self.command(seed),
        }))
    }

    /// The command that runs a case again: with it, every variable that decides what happens to it.
    fn command(&self, seed: u64) -> String {
        let kept = [settings::ORDERS, settings::GPU, settings::GPU_SECONDS, simt::emu::SCHEDULE_VARIABLE];
        let set = |variable| std::env::var(variable).ok().map(|value| format!("{variable}={value} "));
        let variables: String = kept.into_iter().filter_map(set).collect();
        let release = if self.site.debug { "" } else { " --release" };
        let (package, test) = (self.site.package, self.test);
        format!("{}={seed:#x} {variables}cargo test{release} -p {package} -- --exact {test}", settings::CASE)
    }
}

fn of_device(error: Error) -> Failure {
    match error {
        Error::Fault(fault) => Failure::Fault(fault),
        error => Failure::Device(error),
    }
}

fn differs(trial: &Trial, output: &Output, difference: Difference, versus: Versus) -> Failure {
    let writer = trial.launch.writer(output, difference.index);
    Failure::Differs(Box::new(Mismatch { parameter: output.parameter, difference, versus, writer }))
}

/// Elements that hold in both runs what was there before.
fn not_written(output: &Output, second: &[u8]) -> Option<Failure> {
    let size = output.judge.element_bytes();
    if !output.fresh || output.contents.len() != second.len() {
        return None;
    }
    let whole = |bytes: &[u8], byte: u8| bytes.iter().all(|b| *b == byte);
    let mut pairs = output.contents.chunks_exact(size).zip(second.chunks_exact(size));
    let len = pairs.len();
    let before = output.contents.chunks_exact(size).zip(second.chunks_exact(size));
    let is_fresh = |(a, b): (&[u8], &[u8])| whole(a, FIRST) && whole(b, SECOND);
    let index = pairs.position(is_fresh)?;
    let count = before.filter(|pair| is_fresh(*pair)).count();
    Some(Failure::NotWritten { parameter: output.parameter, index, count, len })
}

fn panicked(payload: &(dyn std::any::Any + Send)) -> Failure {
    let text = payload.downcast_ref::<&str>().map(|text| text.to_string());
    let message = text.or_else(|| payload.downcast_ref::<String>().cloned());
    Failure::Panicked { message: message.unwrap_or_else(|| "(no message)".to_string()) }
}
