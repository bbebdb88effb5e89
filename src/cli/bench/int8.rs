//! `ferrokv bench int8`: the paper's table, with the bandwidth columns that it lacks.

use super::accuracy::{accuracy, uniform_matrix};
use super::cpu::Cpu;
use super::device::{Bench, Expected};
use super::peers::{Found, Script};
use super::record::Skipped;
use super::report::{Accuracy, Errors, Libraries, Place, Report, Row, Subject};
use super::sizes::Sizes;
use super::{Error, plot, seconds, summary};
use crate::cli::backend::{BackendArguments, Gpu};
use crate::cli::environment::{Environment, free_memory};
use crate::cli::failure::Failure;
use crate::cli::output::ReportArguments;
use crate::cli::timing::Repetition;
use crate::cli::{progress, text};
use half::{bf16, f16};
use host::Device;
use host::int8::file::Dtype;
use host::int8::{Int8Element, Matrix, Variant};
use indicatif::ProgressBar;
use kernels_gpu::Element;
use kernels_gpu::int8::TOKENS_PER_BLOCK;
use simt::emu::EmuOptions;
use std::path::PathBuf;
use std::time::Instant;

/// Up to here the emulator runs every variant.
const EMULATE_ALL: usize = 1 << 16;
/// The matrix of 2^20 elements that the emulator runs with one variant: its speed, at a size worth stating.
const EMULATE_ONE: (usize, usize) = (4096, 256);
/// Seconds that the peers' last row may take: compiling it, or searching for its fastest form.
const LAST_ROW_SECONDS: f64 = 120.0;
/// The option that gives the peers more time.
pub const PEERS_OPTION: &str = "--peers-seconds";
/// Seed of the matrices.
const SEED: u64 = 1;

const VARIANTS: [Variant; 6] =
    [Variant::Naive, Variant::Tiled, Variant::Coarsened, Variant::Vectorized, Variant::Rows, Variant::Wide];

const LONG: &str = "\
Times INT8 quantization: every kernel beside the memory's ceiling, the CPU and, asked for, PyTorch and Triton.

The data are U(-1, 1) from a fixed seed. On the GPU each row is the median over replays of a captured graph, whose \
calls take turns over as many buffers as keep the cache out. Every result is compared bit by bit with the CPU's.

Exit codes: 0 all compared bits agree; 1 some differ (the report is written and says which); 2 bad input.";

/// Times INT8 quantization: every kernel beside the memory's ceiling, the CPU and, asked for, PyTorch and
/// Triton.
#[derive(clap::Args)]
#[command(long_about = LONG)]
pub struct Arguments {
    /// `paper` (ten sizes), `largest` of them, or a list: TOKENSxCHANNELS,...
    #[arg(long, value_name = "LIST", default_value = "paper")]
    pub(super) sizes: Sizes,
    /// Element types of the matrix, separated by commas.
    #[arg(long, value_name = "TYPES", default_value = "f32", value_delimiter = ',', value_parser = dtype)]
    pub(super) dtype: Vec<Dtype>,
    #[command(flatten)]
    backend: BackendArguments,
    /// Measure PyTorch and Triton beside: needs a python3 with both and a GPU.
    #[arg(long)]
    pub(super) peers: bool,
    /// The script that measures them.
    #[arg(long, value_name = "FILE", default_value = "benches/peers/int8.py")]
    peers_script: PathBuf,
    /// Seconds after which the peers start no further row; two minutes later they are ended.
    #[arg(long, value_name = "S", default_value_t = 120.0, value_parser = seconds)]
    peers_seconds: f64,
    /// The Python that runs the script.
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: String,
    /// Leave the CPU's rows out. (Its results are still computed, to compare with.)
    #[arg(long)]
    pub(super) no_cpu: bool,
    /// The most elements that the paper's single-thread loop is run over.
    #[arg(long, value_name = "ELEMENTS", default_value_t = 1 << 26)]
    pub(super) cpu_paper_limit: usize,
    /// Seconds after which no further size is started; those left out are listed. The largest goes first.
    #[arg(long, value_name = "S", default_value_t = 3600.0, value_parser = seconds)]
    pub(super) seconds: f64,
    /// Seconds of repetitions a row.
    #[arg(long, value_name = "S", default_value_t = 0.2, value_parser = seconds)]
    pub(super) seconds_per_row: f64,
    /// Draw PREFIX-bandwidth and PREFIX-time, as .svg and .png (replaced if they exist).
    #[arg(long, value_name = "PREFIX")]
    plot: Option<PathBuf>,
    /// The commit to name in the report.
    #[arg(long, value_name = "HASH")]
    commit: Option<String>,
    #[command(flatten)]
    report: ReportArguments,
}

fn dtype(name: &str) -> Result<Dtype, String> {
    match name {
        "f32" => Ok(Dtype::F32),
        "f16" => Ok(Dtype::F16),
        "bf16" => Ok(Dtype::Bf16),
        other => Err(format!("'{other}' is not one of f32, f16, bf16")),
    }
}

/// What is found, as it is found.
#[derive(Default)]
pub struct Results {
    /// Figures.
    pub rows: Vec<Row>,
    /// The error columns.
    pub accuracy: Vec<Accuracy>,
    /// What is not there.
    pub skipped: Vec<Skipped>,
}

/// Runs the benchmark and writes what it found.
///
/// # Errors
/// What cannot be opened or written; bits that differ, after the report is written.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let begin = Instant::now();
    let report = arguments.report.open(None, None)?;
    let pictures = arguments.plot.as_deref().map(plot::targets).transpose()?;
    let gpu = arguments.backend.open()?;
    let mut results = Results::default();
    let environment;
    {
        let device = match &gpu {
            Gpu::Ready(device) => Some(device),
            Gpu::None(reason) => {
                results.skipped.push(Skipped { what: "gpu".into(), reason: reason.clone() });
                None
            }
        };
        environment = Environment::here(device, arguments.backend.kernels()?, arguments.commit.as_deref());
        let bar = progress::bar(arguments.dtype.len() * (arguments.sizes.0.len() + 1));
        for dtype in &arguments.dtype {
            match dtype {
                Dtype::F32 => measure::<f32>(arguments, begin, device, &bar, &mut results)?,
                Dtype::F16 => measure::<f16>(arguments, begin, device, &bar, &mut results)?,
                Dtype::Bf16 => measure::<bf16>(arguments, begin, device, &bar, &mut results)?,
            }
        }
        bar.finish_and_clear();
    }
    // The peers get the GPU's whole memory.
    drop(gpu);
    let mut about = None;
    if arguments.peers {
        let found = peers(arguments);
        results.rows.extend(found.rows);
        results.skipped.extend(found.skipped);
        about = found.about;
    }
    let found = Report {
        schema: 1,
        command: "bench int8",
        environment,
        seconds: begin.elapsed().as_secs_f64(),
        rows: results.rows,
        more: Errors { accuracy: results.accuracy },
        skipped: results.skipped,
        peers: about,
    };
    report.finish(&summary::int8(&found), &found)?;
    if let Some(pictures) = pictures {
        plot::int8(&found, &pictures)?;
    }
    compared(&found.rows)
}

/// Runs the script that measures PyTorch and Triton.
pub fn peers(arguments: &Arguments) -> Found<Row, Libraries> {
    let script = Script {
        python: &arguments.python,
        path: &arguments.peers_script,
        seconds: arguments.peers_seconds + LAST_ROW_SECONDS,
        option: PEERS_OPTION,
    };
    let sizes = arguments.sizes.0.iter().map(|m| format!("{}x{}", m.tokens, m.channels)).collect::<Vec<_>>();
    let names: Vec<&str> = arguments.dtype.iter().map(|dtype| name_of(*dtype)).collect();
    script.run(&[
        ("--sizes", sizes.join(",")),
        ("--dtype", names.join(",")),
        ("--block-tokens", TOKENS_PER_BLOCK.to_string()),
        ("--budget-s", arguments.peers_seconds.to_string()),
    ])
}

fn name_of(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => f32::NAME,
        Dtype::F16 => f16::NAME,
        Dtype::Bf16 => bf16::NAME,
    }
}

/// Whether all that was compared is the same.
pub fn compared(rows: &[Row]) -> Result<(), Failure> {
    let checked = rows.iter().filter(|row| row.verified.is_some()).count();
    let differ: Vec<&Row> = rows.iter().filter(|row| row.verified == Some(false)).collect();
    match differ.first() {
        None => Ok(()),
        Some(row) => Err(Error::Bits {
            rows: differ.len(),
            checked,
            first: format!("{} {} at {}x{} {}", row.by(), row.op, row.tokens, row.channels, row.dtype),
        }
        .into()),
    }
}

/// All sizes of one element type, the largest first: if time runs out, the small ones are missing.
fn measure<T: Int8Element>(
    arguments: &Arguments,
    begin: Instant,
    gpu: Option<&Device>,
    bar: &ProgressBar,
    results: &mut Results,
) -> Result<(), Failure> {
    let emulator = Device::cpu(EmuOptions::default());
    let mut sizes = arguments.sizes.0.clone();
    sizes.sort_by_key(|matrix| std::cmp::Reverse(matrix.elements()));
    for matrix in sizes {
        let name = format!("{matrix} {}", T::NAME);
        if begin.elapsed().as_secs_f64() > arguments.seconds {
            let reason = format!("the {} seconds were over", arguments.seconds);
            results.skipped.push(Skipped { what: name, reason });
            continue;
        }
        bar.set_message(name);
        size::<T>(arguments, gpu, &emulator, matrix, results)?;
        bar.inc(1);
    }
    bar.set_message(format!("emulator {}", T::NAME));
    emulate_one::<T>(arguments, &emulator, results)?;
    bar.inc(1);
    Ok(())
}

fn subject<T: Int8Element>(matrix: Matrix) -> Subject {
    Subject { matrix, dtype: T::NAME, element: size_of::<T>() }
}

/// One matrix, everywhere.
fn size<T: Int8Element>(
    arguments: &Arguments,
    gpu: Option<&Device>,
    emulator: &Device,
    matrix: Matrix,
    results: &mut Results,
) -> Result<(), Failure> {
    let subject = subject::<T>(matrix);
    let elements = matrix.elements();
    let name = format!("{matrix} {}", T::NAME);
    // Keys, what comes back, codes and scales; and for small ones the paper's own.
    let paper = if arguments.no_cpu || elements > arguments.cpu_paper_limit { 0 } else { elements };
    let needed = (elements as u64 + paper as u64) * (2 * size_of::<T>() as u64 + 2);
    if let Some(free) = free_memory().filter(|free| *free < needed) {
        let reason = format!("needs {} of memory, {} are free", text::bytes(needed), text::bytes(free));
        results.skipped.push(Skipped { what: name, reason });
        return Ok(());
    }
    let keys: Vec<T> = uniform_matrix(SEED, elements);
    let mut restored = vec![T::zeroed(); elements];
    let mut codes = vec![0i8; elements];
    let mut scales = vec![0f32; matrix.channels];

    let once = Repetition { seconds: arguments.seconds_per_row, least: 3, most: 1000 };
    let mut cpu = Cpu::new(subject, &keys, once, !arguments.no_cpu);
    cpu.copy(&mut restored);
    cpu.columns(&mut scales, &mut codes, &mut restored);
    results.accuracy.push(accuracy(subject, &keys, &restored, &scales));
    let expected = Expected { scales: &scales, codes: &codes, restored: &restored };
    cpu.paper(arguments.cpu_paper_limit, expected, &mut results.skipped);

    // The GPU's memory stays taken from the columns to the blocks: the matrix is uploaded once.
    let mut benches: Vec<Bench<T>> = Vec::new();
    for device in devices(gpu, emulator, elements) {
        let opened = Bench::new(device, subject, &keys, repetition(arguments, device));
        match opened.and_then(|mut bench| {
            if device.kind() == host::BackendKind::Cuda {
                results.rows.extend(bench.ceilings()?);
            }
            results.rows.extend(bench.columns(&VARIANTS, expected)?);
            Ok(bench)
        }) {
            Ok(bench) => benches.push(bench),
            Err(host::int8::Error::Device(error @ host::Error::OutOfMemory { .. })) => {
                let what = format!("{} {name}", device.info().name);
                results.skipped.push(Skipped { what, reason: error.to_string() });
            }
            Err(error) => return Err(error.into()),
        }
    }

    let mut scales = vec![0f32; matrix.scales(Variant::Fused)];
    cpu.blocks(&mut scales, &mut codes, &mut restored);
    results.accuracy.push(accuracy(subject, &keys, &restored, &scales));
    let expected = Expected { scales: &scales, codes: &codes, restored: &restored };
    for bench in &mut benches {
        results.rows.extend(bench.blocks(expected)?);
    }
    results.rows.append(&mut cpu.rows);
    Ok(())
}

/// The GPU, and for small matrices the emulator.
fn devices<'a>(
    gpu: Option<&'a Device>,
    emulator: &'a Device,
    elements: usize,
) -> impl Iterator<Item = &'a Device> {
    gpu.into_iter().chain((elements <= EMULATE_ALL).then_some(emulator))
}

fn repetition(arguments: &Arguments, device: &Device) -> Repetition {
    let seconds = arguments.seconds_per_row;
    match device.kind() {
        host::BackendKind::Cuda => Repetition { seconds, least: 10, most: 400 },
        host::BackendKind::Cpu => Repetition { seconds, least: 1, most: 50 },
    }
}

/// The emulator over 2^20 elements.
fn emulate_one<T: Int8Element>(
    arguments: &Arguments,
    emulator: &Device,
    results: &mut Results,
) -> Result<(), Failure> {
    let matrix = Matrix::new(EMULATE_ONE.0, EMULATE_ONE.1)?;
    let keys: Vec<T> = uniform_matrix(SEED, matrix.elements());
    let (mut scales, mut codes) = (vec![0f32; matrix.channels], vec![0i8; keys.len()]);
    let mut restored = keys.clone();
    host::int8::cpu::column_scales(&keys, matrix, &mut scales);
    host::int8::cpu::quantize(&keys, matrix, &scales, &mut codes);
    host::int8::cpu::dequantize(&codes, matrix, &scales, &mut restored);
    let expected = Expected { scales: &scales, codes: &codes, restored: &restored };
    let mut bench = Bench::new(emulator, subject::<T>(matrix), &keys, repetition(arguments, emulator))?;
    let rows = bench.columns(&[Variant::Vectorized], expected)?;
    debug_assert!(rows.iter().all(|row| row.place == Place::Emulator));
    results.rows.extend(rows);
    Ok(())
}
