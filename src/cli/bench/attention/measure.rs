//! Rows of one cache: what memory alone takes, and every scheme, compared.

use super::super::record::Skipped;
use super::super::timing::{Repetition, Timing, on_device};
use super::caches::Caches;
use super::refusal;
use super::report::{Part, Row, Subject};
use super::schemes::{self, Options, Output, Scheme};
use crate::cli::failure::Failure;
use host::certified::CacheElement;
use host::roofline::{self, Mix};
use host::{BackendKind, Buffer, Device, Stream};
use simt::emu::EmuOptions;

/// What a captured graph should take, so that the gap around it does not count.
const GRAPH_SECONDS: f64 = 2e-3;
/// A guess of the device's speed, for the number of calls in a graph only.
const BYTES_PER_SECOND: f64 = 2e12;
/// Caches are as many as hold so many times the GPU's own cache.
const CACHE_TIMES: u64 = 4;
/// Tiles of 16 tokens of a KV head up to which the emulator does it too.
const EMULATE_TILES: u64 = 4096;
/// The same for schemes over a quantized cache: there it takes three times as long.
const EMULATE_QUANTIZED_TILES: u64 = 2048;
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
    pub names: &'a [String],
    /// How the certified one is run.
    pub options: Options,
    /// What queries are multiplied by.
    pub query_scale: f32,
    /// How often a row is repeated.
    pub repetition: Repetition,
}

/// Measures each scheme over one kind of cache.
///
/// # Errors
/// Out of memory for the cache, or what the device reports.
pub fn measure<E: CacheElement>(
    device: &Device,
    subject: Subject,
    plan: &Plan<'_>,
    ceiling: Option<&Ceiling>,
    skipped: &mut Vec<Skipped>,
) -> Result<Vec<Row>, Failure> {
    let least = plan.names.iter().map(|name| schemes::least_bytes(name, subject)).min();
    let count = sets(device, least.unwrap_or_else(|| subject.cache_bytes()));
    let caches = Caches::<E>::new(device, subject, count, plan.query_scale)?;
    let mut rows = Vec::new();
    for name in plan.names {
        match row(name, &caches, plan, ceiling) {
            Ok(row) => rows.push(row),
            Err(error) => match refusal(&error) {
                Some(reason) => skipped.push(Skipped { what: format!("{name} {subject}"), reason }),
                None => return Err(error),
            },
        }
    }
    Ok(rows)
}

/// One scheme's row.
fn row<E: CacheElement>(
    name: &str,
    caches: &Caches<E>,
    plan: &Plan<'_>,
    ceiling: Option<&Ceiling>,
) -> Result<Row, Failure> {
    let (device, subject, count) = (&caches.device, caches.subject, caches.sets.len());
    let stream = Stream::new(device)?;
    let mut scheme = schemes::open::<E>(name, caches, plan.options)?;
    let calls = match device.kind() {
        BackendKind::Cuda => scheme.calls(calls(device, scheme.cache_bytes(), count)),
        BackendKind::Cpu => 1,
    };
    let parts = match device.kind() {
        BackendKind::Cuda => parts(scheme.as_mut(), caches, &stream, calls, plan.repetition)?,
        BackendKind::Cpu => Vec::new(),
    };
    // The whole step last: it is what is compared.
    // SAFETY: caches and scheme outlive the replays.
    let timing = unsafe {
        on_device(&stream, calls, plan.repetition, |stream, call| scheme.step(stream, caches, call % count))
    }?;
    let mut row = subject.row("decode", scheme.name(), subject.bytes(), timing);
    row.emulator = device.kind() == BackendKind::Cpu;
    row.cache_bytes = Some(scheme.cache_bytes());
    row.read_gb_per_s = Some(scheme.cache_bytes() as f64 / row.median_us * 1e-3);
    row.sets = Some(count);
    if let Some(ceiling) = ceiling {
        // A scheme that reads less is measured against less.
        let part = scheme.cache_bytes() as f64 / ceiling.bytes as f64;
        let microseconds = ceiling.timing.median_us * part;
        row.roofline = Some(ceiling.pattern.clone());
        row.roofline_us = Some(microseconds);
        row.fraction = Some(microseconds / row.median_us);
    }
    row.certified = scheme.certified(parts)?;
    let result = scheme.result()?;
    let part = scheme.error_of_bound(caches, &result)?;
    row.error_of_bound = Some(part);
    row.verified = Some(part <= 1.0);
    let tiles = subject.cache_bytes() / (64 * u64::from(subject.shape.head_dim));
    let emulate = if row.certified.is_some() { EMULATE_QUANTIZED_TILES } else { EMULATE_TILES };
    if device.kind() == BackendKind::Cuda && tiles <= emulate {
        let expected = emulated::<E>(subject, name, plan)?;
        row.bits_compared = Some(true);
        row.verified = Some(expected.same_bits(&result) && row.verified != Some(false));
    }
    Ok(row)
}

/// By how much a step's time grows with each of its parts.
fn parts<E: CacheElement>(
    scheme: &mut dyn Scheme<E>,
    caches: &Caches<E>,
    stream: &Stream,
    calls: usize,
    repetition: Repetition,
) -> Result<Vec<Part>, Failure> {
    let count = caches.sets.len();
    let repetition = Repetition { seconds: repetition.seconds / 2.0, ..repetition };
    let mut before = 0.0;
    let mut parts = Vec::new();
    for (i, name) in scheme.parts().iter().enumerate() {
        // SAFETY: caches and scheme outlive the replays.
        let timing = unsafe {
            on_device(stream, calls, repetition, |stream, call| {
                scheme.first_parts(i + 1, stream, caches, call % count)
            })
        }?;
        parts.push(Part { name: (*name).into(), us: timing.median_us - before });
        before = timing.median_us;
    }
    Ok(parts)
}

/// What the emulator makes of the same cache.
fn emulated<E: CacheElement>(subject: Subject, name: &str, plan: &Plan<'_>) -> Result<Output, Failure> {
    let device = Device::cpu(EmuOptions::default());
    let caches = Caches::<E>::new(&device, subject, 1, plan.query_scale)?;
    // Opening runs it once.
    schemes::open::<E>(name, &caches, plan.options)?.result()
}
