//! `ferrokv bench attention`: decode attention by shape, batch and context, beside reading alone and other
//! libraries.

mod arguments;
mod caches;
mod clock;
mod measure;
mod peers;
mod picture;
mod report;
mod summary;
#[cfg(test)]
mod tests;
mod trace;

pub use arguments::{Arguments, Shape, scale};
pub use caches::Material;
pub use clock::Clock;
pub use measure::{Ceiling, Plan, repetition};
pub use report::{BlockOrder, Row, Subject, set_ratios};

use super::Error;
use super::record::Skipped;
use crate::cli::backend::Gpu;
use crate::cli::environment::Environment;
use crate::cli::failure::Failure;
use crate::cli::{progress, scheme};
use half::{bf16, f16};
use host::{BackendKind, Device};
use measure::measure;
use report::Report;
use simt::emu::EmuOptions;
use std::time::Instant;
use trace::Trace;

/// The share of the time that peers may take. What they leave of it is ours.
const PEERS_SHARE: f64 = 0.6;
/// The most tokens of all heads together that the emulator measures.
const EMULATE_TOKENS: u64 = 1 << 15;
/// The same of the CPU's own path: caches in f16 of half a gigabyte at head_dim 128.
const SLICES_TOKENS: u64 = 1 << 20;

/// Runs the benchmark and writes what it found.
///
/// # Errors
/// What cannot be opened or written; outputs that are wrong, after the report is written.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let begin = Instant::now();
    let report = arguments.report.open(None, None)?;
    let trace = Trace::open(arguments)?;
    let subjects =
        trace.as_ref().map_or_else(|| Ok(subjects(arguments)), |trace| trace.subjects(arguments))?;
    let pictures = arguments.plot.as_deref().map(|prefix| picture::targets(arguments, prefix)).transpose()?;
    let (mut rows, mut skipped) = (Vec::new(), Vec::new());
    // Peers come first, and alone: they get the GPU's whole memory, and how long they take is known then.
    // What is wrong with the arguments or the GPU is said ahead of them.
    let peers = if arguments.peers {
        scheme::each_once(&arguments.kv)?;
        drop(arguments.backend.open()?);
        Some(peers::run(arguments, &subjects, arguments.seconds * PEERS_SHARE))
    } else {
        None
    };
    let environment = {
        let (device, gpu) = match arguments.backend.open()? {
            Gpu::Ready(device) => (device.clone(), Some(device)),
            Gpu::None(reason) => {
                skipped.push(Skipped { what: "gpu".into(), reason });
                (Device::cpu(EmuOptions::default()), None)
            }
        };
        own(arguments, (subjects, trace.as_ref()), begin, &device, &mut rows, &mut skipped)?;
        Environment::here(gpu.as_ref(), arguments.backend.kernels()?, arguments.commit.as_deref())
    };
    let mut about = None;
    if let Some(found) = peers {
        rows.extend(found.rows);
        skipped.extend(found.skipped);
        about = found.about;
    }
    set_ratios(&mut rows);
    let found = Report {
        schema: 1,
        command: "bench attention",
        environment,
        seconds: begin.elapsed().as_secs_f64(),
        rows,
        more: (),
        skipped,
        peers: about,
    };
    report.finish(&summary::tables(&found), &found)?;
    if let Some(pictures) = pictures {
        picture::draw(&found, &pictures)?;
    }
    compared(&found.rows)
}

/// Whether all that was compared is right.
///
/// # Errors
/// It is not, with the first row that is wrong.
pub fn compared(rows: &[Row]) -> Result<(), Failure> {
    let checked = rows.iter().filter(|row| row.verified.is_some()).count();
    let wrong: Vec<&Row> = rows.iter().filter(|row| row.verified == Some(false)).collect();
    let Some(row) = wrong.first() else { return Ok(()) };
    let Row { q_heads, kv_heads, head_dim, dtype, batch, context, .. } = row;
    let first =
        format!("{} {q_heads}/{kv_heads}/{head_dim} {dtype} batch {batch} context {context}", row.by());
    Err(Error::Wrong { rows: wrong.len(), checked, first }.into())
}

/// Our rows of `bench attention`: of every shape, batch and type the longest context first, so that short
/// ones are missing if time runs out.
fn own(
    arguments: &Arguments,
    (mut subjects, trace): (Vec<Subject>, Option<&Trace>),
    begin: Instant,
    device: &Device,
    rows: &mut Vec<Row>,
    skipped: &mut Vec<Skipped>,
) -> Result<(), Failure> {
    let kv = scheme::each_once(&arguments.kv)?;
    let share = if arguments.cold { Some(0.0) } else { arguments.scratch };
    let plan = Plan {
        kv: &kv,
        scratch: share,
        material: trace.map_or(Material::Normal(arguments.query_scale), Material::Trace),
        repetition: repetition(device, arguments.seconds_per_row),
        on_slices: false,
    };
    subjects.sort_by_key(|subject| std::cmp::Reverse(subject.context));
    let mut clock = Clock::new(begin, arguments.seconds, 1.0);
    steps(&subjects, &plan, device, &mut clock, rows, skipped)
}

/// Measures every scheme of a plan over every subject, in their order, as long as there is time.
///
/// # Errors
/// What the device reports; what is refused is listed.
pub fn steps(
    subjects: &[Subject],
    plan: &Plan<'_>,
    device: &Device,
    clock: &mut Clock,
    rows: &mut Vec<Row>,
    skipped: &mut Vec<Skipped>,
) -> Result<(), Failure> {
    let bar = progress::bar(subjects.len());
    let mut ceilings: Vec<Ceiling> = Vec::new();
    let blocks = subjects.first().map(|subject| subject.blocks);
    let most = if plan.on_slices { SLICES_TOKENS } else { EMULATE_TOKENS };
    for &subject in subjects {
        bar.set_message(subject.to_string());
        bar.inc(1);
        let mut skip = |reason: String| skipped.push(Skipped { what: subject.to_string(), reason });
        if !clock.has(subject.cache_bytes()) {
            skip(clock.reason());
            continue;
        }
        let tokens =
            u64::from(subject.batch) * u64::from(subject.shape.kv_heads) * u64::from(subject.context);
        if device.kind() == BackendKind::Cpu && tokens > most {
            skip(if plan.on_slices { "too long for a CPU" } else { "too long for the emulator" }.into());
            continue;
        }
        let mut refused = Vec::new();
        let mut one = || -> Result<Vec<Row>, Failure> {
            let bytes = subject.cache_bytes();
            if device.kind() == BackendKind::Cuda && ceilings.iter().all(|known| known.bytes != bytes) {
                ceilings.push(Ceiling::measure(device, bytes, plan.repetition)?);
            }
            let ceiling = ceilings.iter().find(|known| known.bytes == bytes);
            let ceiling_row = ceiling.filter(|_| Some(subject.blocks) == blocks);
            let mut found: Vec<Row> = ceiling_row.map(|ceiling| ceiling.row(subject)).into_iter().collect();
            found.extend(match subject.dtype {
                "bf16" => measure::<bf16>(device, subject, plan, ceiling, clock, &mut refused)?,
                _ => measure::<f16>(device, subject, plan, ceiling, clock, &mut refused)?,
            });
            Ok(found)
        };
        match one() {
            Ok(found) => rows.extend(found),
            Err(error) => match refusal(&error) {
                Some(reason) => skip(reason),
                None => return Err(error),
            },
        }
        skipped.append(&mut refused);
    }
    bar.finish_and_clear();
    Ok(())
}

/// Why something is not measured, where that is no failure: too little memory, or extents that a scheme does
/// not take.
fn refusal(error: &Failure) -> Option<String> {
    let refused = match error {
        Failure::Device(host::Error::OutOfMemory { .. }) => true,
        Failure::Scheme(error) => error.is_refusal(),
        _ => false,
    };
    refused.then(|| error.to_string())
}

/// Every combination that is asked for.
fn subjects(arguments: &Arguments) -> Vec<Subject> {
    let mut subjects = Vec::new();
    for shape in &arguments.shapes {
        for dtype in &arguments.dtype {
            for batch in &arguments.batches {
                for context in &arguments.contexts {
                    for blocks in &arguments.blocks {
                        let dtype = if dtype == "bf16" { "bf16" } else { "f16" };
                        let (batch, context, blocks) = (*batch, *context, *blocks);
                        subjects.push(Subject { shape: *shape, batch, context, dtype, blocks });
                    }
                }
            }
        }
    }
    subjects
}
