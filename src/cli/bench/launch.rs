//! `ferrokv bench launch`: what a launch costs the host.

use super::Error;
use crate::cli::backend::{BackendArguments, Gpu};
use crate::cli::environment::Environment;
use crate::cli::failure::Failure;
use crate::cli::output::ReportArguments;
use crate::cli::table::{Align, Table};
use crate::cli::text;
use ferrokv::Generated;
use host::{Buffer, Device, Stream};
use kernels_gpu::int8::finish_scales;
use serde::Serialize;
use simt::LaunchShape;
use std::time::Instant;

/// Launches between two waits: fewer than the driver queues before a launch has to wait for the GPU.
const BATCH: usize = 400;
/// Repetitions.
const ROUNDS: usize = 200;
/// Launches in the graph.
const GRAPH: usize = 1000;
/// Elements that the launched kernel works on: one warp's.
const ELEMENTS: u32 = 32;

const LONG: &str = "\
Times a typed launch against the driver's own call, and a graph of 1000 captured launches. Needs a GPU.

Exit codes: 0 done; 2 bad input, or no GPU.";

/// Times a typed launch against the driver's own call, and a graph of 1000 captured launches. Needs a GPU.
#[derive(clap::Args)]
#[command(long_about = LONG)]
pub struct Arguments {
    #[command(flatten)]
    backend: BackendArguments,
    /// The commit to name in the report.
    #[arg(long, value_name = "HASH")]
    commit: Option<String>,
    #[command(flatten)]
    report: ReportArguments,
}

/// What launches cost.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Costs {
    /// Host nanoseconds of `cuLaunchKernel`, median over batches.
    pub raw_ns: f64,
    /// Host nanoseconds of `Stream::launch`.
    pub typed_ns: f64,
    /// `typed_ns` / `raw_ns`.
    pub ratio: f64,
    /// Launches in the graph.
    pub graph_launches: usize,
    /// Host microseconds of the one call that replays it.
    pub graph_call_us: f64,
    /// Microseconds until it is done.
    pub graph_replay_us: f64,
    /// Microseconds of as many single launches, until they are done.
    pub single_launches_us: f64,
}

#[derive(Serialize)]
struct Report {
    schema: u32,
    command: &'static str,
    environment: Environment,
    launch: Costs,
}

/// Runs the benchmark and writes what it found.
///
/// # Errors
/// No GPU; what the driver reports.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let report = arguments.report.open(None, None)?;
    let device = match arguments.backend.open()? {
        Gpu::Ready(device) => device,
        Gpu::None(reason) => return Err(Error::NeedsGpu { reason }.into()),
    };
    let kernels = arguments.backend.kernels()?;
    let costs = measure(&device, kernels)?;
    let environment = Environment::here(Some(&device), kernels, arguments.commit.as_deref());
    let tables = format!("{}\n\n{}", environment.line(), table(costs));
    report.finish(&tables, &Report { schema: 1, command: "bench launch", environment, launch: costs })
}

/// The figures as a table.
pub fn table(costs: Costs) -> String {
    let mut table = Table::new(&[("what", Align::Left), ("time", Align::Right), ("", Align::Left)]);
    let line =
        |what: String, microseconds: f64, note: String| [what, text::seconds(microseconds * 1e-6), note];
    let count = costs.graph_launches;
    table.row(line("cuLaunchKernel, host".into(), costs.raw_ns * 1e-3, String::new()));
    table.row(line(
        "typed launch, host".into(),
        costs.typed_ns * 1e-3,
        format!("{:.3} of the driver's call", costs.ratio),
    ));
    table.row(line(format!("graph of {count} launches, host"), costs.graph_call_us, "one call".into()));
    table.row(line(format!("graph of {count} launches, done"), costs.graph_replay_us, String::new()));
    table.row(line(format!("{count} single launches, done"), costs.single_launches_us, String::new()));
    table.render()
}

fn measure(device: &Device, kernels: Generated) -> Result<Costs, Failure> {
    let stream = Stream::new(device)?;
    let maxima = Buffer::<u32>::zeroed(device, ELEMENTS as usize)?;
    let mut scales = Buffer::<f32>::zeroed(device, ELEMENTS as usize)?;
    let kernel = finish_scales::kernel::<f32>();
    let target = scales.global_mut();
    let typed = |stream: &Stream| {
        let arguments = finish_scales::Args { maxima: maxima.global(), scales: target, channels: ELEMENTS };
        // SAFETY: both buffers have that many elements and live until the last wait; every launch writes the
        // same.
        unsafe { stream.launch(&kernel, LaunchShape::new(1, ELEMENTS), arguments) }
    };
    let raw = raw::Raw::new(device, kernels.images, kernel.name())?;
    let (maxima_at, scales_at) = (maxima.global().address(), target.address());

    let (mut raw_ns, mut typed_ns) = (Vec::new(), Vec::new());
    let mut round = |raw_first: bool| -> Result<(), Failure> {
        for is_raw in [raw_first, !raw_first] {
            let start = Instant::now();
            for _ in 0..BATCH {
                if is_raw {
                    raw.launch(maxima_at, scales_at, ELEMENTS)?;
                } else {
                    typed(&stream)?;
                }
            }
            let nanoseconds = start.elapsed().as_nanos() as f64 / BATCH as f64;
            if is_raw {
                raw.synchronize()?;
                raw_ns.push(nanoseconds);
            } else {
                stream.synchronize()?;
                typed_ns.push(nanoseconds);
            }
        }
        Ok(())
    };
    for index in 0..ROUNDS {
        // In turns, each first every other time.
        round(index % 2 == 0)?;
    }

    let all = |stream: &Stream| (0..GRAPH).try_for_each(|_| typed(stream));
    let (graph, ()) = stream.capture(all)?;
    let graph = graph.instantiate()?;
    let (mut calls, mut replays, mut singles) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..20 {
        let start = Instant::now();
        // SAFETY: the buffers live until the wait.
        unsafe { graph.launch(&stream) }?;
        calls.push(start.elapsed().as_nanos() as f64);
        stream.synchronize()?;
        replays.push(start.elapsed().as_nanos() as f64);
        let start = Instant::now();
        all(&stream)?;
        stream.synchronize()?;
        singles.push(start.elapsed().as_nanos() as f64);
    }
    let (raw_ns, typed_ns) = (median(raw_ns), median(typed_ns));
    Ok(Costs {
        raw_ns,
        typed_ns,
        ratio: typed_ns / raw_ns,
        graph_launches: GRAPH,
        graph_call_us: median(calls) * 1e-3,
        graph_replay_us: median(replays) * 1e-3,
        single_launches_us: median(singles) * 1e-3,
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The same kernel through the driver's own calls.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod raw {
    use super::super::Error;
    use crate::cli::failure::Failure;
    use cust::sys::{self, CUfunction, CUmodule, CUresult, CUstream};
    use host::{Device, PtxImage};
    use std::ffi::{CString, c_void};
    use std::ptr::null_mut;

    pub struct Raw {
        module: CUmodule,
        function: CUfunction,
        stream: CUstream,
    }

    /// The enum lists the codes of one CUDA version; a newer driver's are only numbers.
    macro_rules! check {
        ($doing:literal, $function:path as fn($($type:ty),*): $($argument:expr),*) => {{
            type Coded = unsafe extern "C" fn($($type),*) -> CUresult;
            type Numbered = unsafe extern "C" fn($($type),*) -> u32;
            // SAFETY: the enum is `repr(u32)`: both return in the same way.
            let function: Numbered = unsafe { std::mem::transmute($function as Coded) };
            // SAFETY: the arguments are valid, as the comment at the call says.
            match unsafe { function($($argument),*) } {
                0 => Ok(()),
                code => Err(Failure::from(Error::Driver { code, doing: $doing })),
            }
        }};
    }

    impl Raw {
        /// Loads one of the images once more, into the context that `device` made current with them.
        pub fn new(device: &Device, images: &[PtxImage], entry: &str) -> Result<Self, Failure> {
            let capability = device.info().compute_capability.unwrap_or(0);
            let image = images.iter().filter(|image| image.sm <= capability).max_by_key(|image| image.sm);
            let (text, entry) = (CString::new(image.map_or("", |image| image.text)), CString::new(entry));
            let (Ok(text), Ok(entry)) = (text, entry) else { return Err(host::Error::NoPtx.into()) };
            let mut raw = Raw { module: null_mut(), function: null_mut(), stream: null_mut() };
            // Each pointer is valid for a write; both strings end in NUL.
            check!("loading the PTX again",
                sys::cuModuleLoadData as fn(*mut CUmodule, *const c_void): &mut raw.module, text.as_ptr().cast())?;
            check!("looking up the kernel",
                sys::cuModuleGetFunction as fn(*mut CUfunction, CUmodule, *const std::ffi::c_char):
                &mut raw.function, raw.module, entry.as_ptr())?;
            check!("making a stream",
                sys::cuStreamCreate as fn(*mut CUstream, u32): &mut raw.stream, 1)?;
            Ok(raw)
        }

        #[inline]
        pub fn launch(&self, maxima: u64, scales: u64, count: u32) -> Result<(), Failure> {
            let mut parameters: [*mut c_void; 3] = [
                (&raw const maxima).cast_mut().cast(),
                (&raw const scales).cast_mut().cast(),
                (&raw const count).cast_mut().cast(),
            ];
            // Three parameters as the kernel has them; the buffers have `count` elements.
            check!("launching a kernel",
                sys::cuLaunchKernel as fn(CUfunction, u32, u32, u32, u32, u32, u32, u32, CUstream,
                    *mut *mut c_void, *mut *mut c_void):
                self.function, 1, 1, 1, count, 1, 1, 0, self.stream, parameters.as_mut_ptr(), null_mut())
        }

        pub fn synchronize(&self) -> Result<(), Failure> {
            // The stream is that of `new`.
            check!("waiting for a stream", sys::cuStreamSynchronize as fn(CUstream): self.stream)
        }
    }

    impl Drop for Raw {
        fn drop(&mut self) {
            if !self.stream.is_null() {
                // The stream is that of `new`, and idle. An error here has nobody left to tell.
                let _ = check!("dropping a stream", sys::cuStreamDestroy_v2 as fn(CUstream): self.stream);
            }
            if !self.module.is_null() {
                // As above.
                let _ = check!("dropping a module", sys::cuModuleUnload as fn(CUmodule): self.module);
            }
        }
    }
}

/// There is no driver here, and so no device that could ask for it.
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
mod raw {
    use crate::cli::failure::Failure;
    use host::{Device, PtxImage};

    pub struct Raw;

    impl Raw {
        pub fn new(_: &Device, _: &[PtxImage], _: &str) -> Result<Self, Failure> {
            Err(super::Error::NeedsGpu { reason: "there is no CUDA backend on this platform".into() }.into())
        }

        pub fn launch(&self, _: u64, _: u64, _: u32) -> Result<(), Failure> {
            Ok(())
        }

        pub fn synchronize(&self) -> Result<(), Failure> {
            Ok(())
        }
    }
}
