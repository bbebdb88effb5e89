//! Rows of one cache: what memory alone takes, and every scheme, compared.

use super::super::record::Skipped;
use super::caches::{Caches, Material};
use super::clock::Clock;
use super::refusal;
use super::report::{Row, Stage, Subject};
use crate::cli::failure::Failure;
use crate::cli::timing::{Repetition, Timing, on_device, on_host};
use host::attention::dense::DenseElement;
use host::kv::Selection;
use host::kv::workload::{AnyInput, Input, Judged, Opening, Originals, Outcome, Workload, through_cache};
use host::roofline::{self, Mix};
use host::{BackendKind, Buffer, Device, Stream};
use simt::emu::EmuOptions;
use std::sync::Arc;

/// What a captured graph should take, so that the gap around it does not count.
const GRAPH_SECONDS: f64 = 2e-3;
/// A guess of the device's speed, for the number of calls in a graph only.
const BYTES_PER_SECOND: f64 = 2e12;
/// Caches are as many as hold so many times the GPU's own cache.
const CACHE_TIMES: u64 = 4;
/// Tiles of 16 tokens of a KV head up to which the emulator does it too.
const EMULATE_TILES: u64 = 4096;
/// The same for steps of several stages: there it takes three times as long.
const EMULATE_STAGED_TILES: u64 = 2048;
/// Steps of a graph at least, where each does something else than the one before.
const LEAST_CALLS: usize = 16;
/// Vectors of a row, for the pattern of reading that walks down rows.
const ROW_VECTORS: u32 = 4096;

/// How many caches of so many bytes the calls take in turns.
pub fn sets(device: &Device, bytes: u64) -> usize {
    let cache = device.info().l2_bytes.unwrap_or(0) * CACHE_TIMES;
    cache.div_ceil(bytes.max(1)).max(1) as usize
}

fn calls(device: &Device, bytes: u64, sets: usize) -> usize {
    match device.kind() {
        BackendKind::Cuda => {
            let fill = (GRAPH_SECONDS * BYTES_PER_SECOND / bytes as f64).ceil() as usize;
            fill.clamp(1, 64).max(sets)
        }
        BackendKind::Cpu => 1,
    }
}

/// How often a row is repeated.
pub fn repetition(device: &Device, seconds: f64) -> Repetition {
    match device.kind() {
        BackendKind::Cuda => Repetition { seconds, least: 10, most: 400 },
        BackendKind::Cpu => Repetition { seconds, least: 1, most: 5 },
    }
}

/// Reading so many bytes.
#[derive(Clone, Debug)]
pub struct Ceiling {
    /// Of them.
    pub bytes: u64,
    /// The fastest pattern.
    pub pattern: String,
    /// Its times.
    pub timing: Timing,
}

impl Ceiling {
    /// Reads so many bytes in every pattern.
    ///
    /// # Errors
    /// Out of memory, or what the device reports.
    pub fn measure(device: &Device, bytes: u64, repetition: Repetition) -> Result<Ceiling, Failure> {
        let count = sets(device, bytes);
        let stream = Stream::new(device)?;
        // Of unlike words: some memories read equal ones faster.
        let seed: Vec<u32> = (0..1 << 22).map(|i: u32| i.wrapping_mul(0x9e37_79b9)).collect();
        let seed = Buffer::from_slice(device, &seed)?;
        let mut buffers = Vec::with_capacity(count);
        for _ in 0..count {
            let mut buffer = Buffer::<u32>::new(device, bytes as usize / 4)?;
            for start in (0..buffer.len()).step_by(seed.len()) {
                let part = seed.len().min(buffer.len() - start);
                stream.copy(&seed, ..part, &mut buffer, start)?;
            }
            stream.synchronize()?;
            buffers.push(buffer);
        }
        let mut sink = Buffer::<u32>::zeroed(device, 1)?;
        let target = sink.global_mut();
        let none = Timing { median_us: f64::INFINITY, p10_us: 0.0, p90_us: 0.0, calls: 0, replays: 0 };
        let mut best = Ceiling { bytes, pattern: String::new(), timing: none };
        for pattern in Mix::Read.patterns(Some(ROW_VECTORS)) {
            let vectors = bytes / 16;
            // SAFETY: the buffers and the sink outlive the replays.
            let timing = unsafe {
                on_device(&stream, calls(device, bytes, count), repetition, |stream, call| {
                    let source = buffers[call % count].global();
                    // SAFETY: as above.
                    Ok::<_, Failure>(roofline::launch(stream, pattern, vectors, source, target)?)
                })
            }?;
            if timing.median_us < best.timing.median_us {
                best = Ceiling { bytes, pattern: pattern.to_string(), timing };
            }
        }
        Ok(best)
    }

    /// A row of the table.
    pub fn row(&self, subject: Subject) -> Row {
        subject.row("read", &self.pattern, self.bytes, self.timing)
    }
}

/// What is measured, and how.
pub struct Plan<'a> {
    /// The schemes.
    pub kv: &'a [Selection],
    /// Of how many of the blocks originals are kept in the GPU's memory, with all others in the host's; none:
    /// all are there.
    pub scratch: Option<f64>,
    /// What attention is over.
    pub material: Material<'a>,
    /// How often a row is repeated.
    pub repetition: Repetition,
    /// Whether a CPU takes its own path, on the host's clock, in place of the emulator.
    pub on_slices: bool,
}

impl Plan<'_> {
    /// The scheme over these caches.
    fn open<E: DenseElement>(
        &self,
        selection: &Selection,
        caches: &Caches<E>,
    ) -> Result<Box<dyn Workload>, Failure>
    where
        Arc<Input<E>>: Into<AnyInput>,
    {
        Ok((selection.scheme().workload)(&self.opening(selection, caches))?)
    }

    /// What it is opened with.
    fn opening<'s, E: DenseElement>(&self, selection: &'s Selection, caches: &Caches<E>) -> Opening<'s>
    where
        Arc<Input<E>>: Into<AnyInput>,
    {
        let blocks = f64::from(caches.input.table.pool_blocks());
        let host = |share: f64| Originals::Host { scratch: (share * blocks).ceil() as u32 };
        let originals = self.scratch.map_or(Originals::Device, host);
        Opening { input: caches.input.clone().into(), selection, originals, layer: None }
    }
}

/// Measures each scheme over one kind of cache, as long as there is time.
///
/// # Errors
/// Out of memory for the cache, or what the device reports.
pub fn measure<E: DenseElement>(
    device: &Device,
    subject: Subject,
    plan: &Plan<'_>,
    ceiling: Option<&Ceiling>,
    clock: &mut Clock,
    skipped: &mut Vec<Skipped>,
) -> Result<Vec<Row>, Failure>
where
    Arc<Input<E>>: Into<AnyInput>,
{
    let heads = f64::from(subject.batch) * f64::from(subject.shape.kv_heads);
    let bytes = |selection: &Selection| {
        let of_head = selection.scheme().step_bytes;
        (heads * of_head(selection, subject.shape.head_dim, subject.context.into())) as u64
    };
    // As many as the scheme that reads least needs, and no more than memory has room for.
    let least = plan.kv.iter().map(bytes).min().unwrap_or_else(|| subject.cache_bytes());
    let room = device.info().memory_bytes.map_or(1, |memory| memory / 2 / subject.cache_bytes().max(1));
    let count = sets(device, least).min(room.max(1) as usize);
    let stored = count as u64 * subject.cache_bytes();
    // The first row counts what all share as well.
    let mut start = clock.now();
    let caches = Caches::<E>::new(device, subject, count, plan.material)?;
    let mut rows = Vec::new();
    for selection in plan.kv {
        let mut skip =
            |reason: String| skipped.push(Skipped { what: format!("{selection} {subject}"), reason });
        if !clock.has(stored) {
            skip(clock.reason());
            continue;
        }
        match row(selection, &caches, plan, ceiling) {
            Ok(row) => rows.push(row),
            Err(error) => match refusal(&error) {
                Some(reason) => skip(reason),
                None => return Err(error),
            },
        }
        clock.took(stored, start);
        start = clock.now();
    }
    Ok(rows)
}

/// One scheme's row.
fn row<E: DenseElement>(
    selection: &Selection,
    caches: &Caches<E>,
    plan: &Plan<'_>,
    ceiling: Option<&Ceiling>,
) -> Result<Row, Failure>
where
    Arc<Input<E>>: Into<AnyInput>,
{
    let (device, subject, count) = (&caches.input.device, caches.subject, caches.input.pools.len());
    let stream = Stream::new(device)?;
    let mut workload = plan.open(selection, caches)?;
    let bytes = workload.read_bytes();
    let calls = match device.kind() {
        BackendKind::Cuda => whole_periods(calls(device, bytes, count), workload.period()),
        BackendKind::Cpu => 1,
    };
    let stages = match device.kind() {
        BackendKind::Cuda => stages(workload.as_mut(), count, &stream, calls, plan.repetition)?,
        BackendKind::Cpu => Vec::new(),
    };
    // The whole step last: it is what is compared.
    let every = workload.stages().len();
    let on_slices = plan.on_slices && device.has_host_paths();
    let timing = if on_slices {
        on_the_cpu(workload.as_mut(), &plan.opening(selection, caches), &stream, plan.repetition)?
    } else {
        // SAFETY: caches and workload outlive the replays.
        unsafe {
            on_device(&stream, calls, plan.repetition, |stream, call| {
                workload.enqueue(stream, call % count, every).map_err(Failure::from)
            })
        }?
    };
    let mut row = subject.row("decode", &selection.to_string(), subject.bytes(), timing);
    row.on_slices = on_slices;
    row.emulator = device.kind() == BackendKind::Cpu && !on_slices;
    row.cache_bytes = Some(bytes);
    row.read_gb_per_s = Some(bytes as f64 / row.median_us * 1e-3);
    row.sets = Some(count);
    if let Some(ceiling) = ceiling {
        // A scheme that reads less is measured against less.
        let part = bytes as f64 / ceiling.bytes as f64;
        let microseconds = ceiling.timing.median_us * part;
        row.roofline = Some(ceiling.pattern.clone());
        row.roofline_us = Some(microseconds);
        row.fraction = Some(microseconds / row.median_us);
    }
    row.stages = stages;
    row.memory = Some(workload.memory());
    row.facts = workload.facts()?;
    let outcome = workload.outcome()?;
    let judged = caches.judge(&*workload, &outcome);
    row.error_of_bound = judged.iter().filter_map(|row| row.error_of_bound).reduce(worse);
    row.verified = row.error_of_bound.map(|_| judged.iter().all(Judged::holds));
    row.relative_error = median_and_most(judged.iter().filter_map(|row| row.share(row.error)));
    row.relative_bound = median_and_most(judged.iter().filter_map(|row| row.share(row.bound?)));
    let tiles = subject.cache_bytes() / (64 * u64::from(subject.shape.head_dim));
    let emulate = if every > 1 { EMULATE_STAGED_TILES } else { EMULATE_TILES };
    if device.kind() == BackendKind::Cuda && tiles <= emulate {
        let expected = emulated::<E>(device, subject, selection, plan)?;
        row.bits_compared = Some(true);
        row.verified = Some(same_bits(&expected, &outcome) && row.verified != Some(false));
    }
    Ok(row)
}

/// Steps over the first cache by the CPU's own path, on the host's clock.
///
/// Caches take it where nothing is captured, workloads of a system's own may not. Of a scheme that needs a
/// file the workload alone has one, made from the input: it is through the cache already.
fn on_the_cpu(
    own: &mut dyn Workload,
    opening: &Opening<'_>,
    stream: &Stream,
    repetition: Repetition,
) -> Result<Timing, Failure> {
    let needs_a_file = opening.selection.scheme().calibrate.is_some();
    let mut through = if needs_a_file { None } else { Some(through_cache(opening)?) };
    let workload: &mut dyn Workload = match &mut through {
        Some(through) => &mut **through,
        None => own,
    };
    let stages = workload.stages().len();
    let mut done = Ok(());
    let timing = on_host(repetition, || {
        let step = workload.enqueue(stream, 0, stages).map_err(Failure::from);
        let step = step.and_then(|()| Ok(stream.synchronize()?));
        if done.is_ok() {
            done = step;
        }
    });
    done.map(|()| timing)
}

/// Calls of a graph, `least` or more: of each kind of step as many as there are in the long run, and enough
/// that queries change as they do from token to token.
fn whole_periods(least: usize, period: usize) -> usize {
    if period == 1 { least } else { least.max(LEAST_CALLS).next_multiple_of(period) }
}

/// The larger; NaN if one is.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// The middle and the largest of some numbers.
fn median_and_most(values: impl Iterator<Item = f64>) -> Option<[f64; 2]> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    Some([*values.get(values.len() / 2)?, *values.last()?])
}

/// Whether every bit is the same.
fn same_bits(one: &Outcome, other: &Outcome) -> bool {
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    bits(&one.output) == bits(&other.output) && bits(&one.lse) == bits(&other.lse)
}

/// By how much a step's time grows with each of its stages; nothing for a step of one.
fn stages(
    workload: &mut dyn Workload,
    sets: usize,
    stream: &Stream,
    calls: usize,
    repetition: Repetition,
) -> Result<Vec<Stage>, Failure> {
    let repetition = Repetition { seconds: repetition.seconds / 2.0, ..repetition };
    let names = workload.stages();
    if names.len() < 2 {
        return Ok(Vec::new());
    }
    let (mut before, mut stages) = (0.0, Vec::new());
    for (i, name) in names.iter().enumerate() {
        // SAFETY: caches and workload outlive the replays.
        let timing = unsafe {
            on_device(stream, calls, repetition, |stream, call| {
                workload.enqueue(stream, call % sets, i + 1).map_err(Failure::from)
            })
        }?;
        stages.push(Stage { name: (*name).into(), us: timing.median_us - before });
        before = timing.median_us;
    }
    Ok(stages)
}

/// What the emulator of `gpu` makes of the same cache.
fn emulated<E: DenseElement>(
    gpu: &Device,
    subject: Subject,
    selection: &Selection,
    plan: &Plan<'_>,
) -> Result<Outcome, Failure>
where
    Arc<Input<E>>: Into<AnyInput>,
{
    let device = Device::cpu(EmuOptions { target: Some(gpu.target()), ..EmuOptions::default() });
    let caches = Caches::<E>::new(&device, subject, 1, plan.material)?;
    // Opening runs it.
    Ok(plan.open::<E>(selection, &caches)?.outcome()?)
}
