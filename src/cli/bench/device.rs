//! Rows of a GPU, or of the emulator in its place: every variant, the ceilings beside them, and every bit
//! compared.

use super::operations::{CEILINGS, Ceiling, Operation, Traffic};
use super::report::{Place, Row, Subject};
use crate::cli::timing::{Repetition, Timing, on_device};
use bytemuck::Pod;
use host::int8::{Int8Element, Plan, Quantized, Result, Variant};
use host::roofline::{self, Mix};
use host::{BackendKind, Buffer, Device, Stream};
use simt::{Global, GlobalMut};

/// Elements that are compared at a time: enough to copy at full speed, small beside the matrices.
const WINDOW: usize = 16 << 20;
/// What a captured graph should take, so that the gap around it does not count.
const GRAPH_SECONDS: f64 = 2e-3;
/// A guess of the device's speed, for the number of calls in a graph only.
const BYTES_PER_SECOND: f64 = 2e12;

/// What the CPU made of a matrix.
#[derive(Clone, Copy)]
pub struct Expected<'a, T> {
    /// Scales, of columns or of blocks.
    pub scales: &'a [f32],
    /// Codes.
    pub codes: &'a [i8],
    /// What comes back.
    pub restored: &'a [T],
}

struct Set<T: Pod> {
    keys: Buffer<T>,
    out: Quantized,
    restored: Buffer<T>,
}

/// One matrix on a device, in as many copies as keep the cache out of the times.
pub struct Bench<T: Int8Element> {
    stream: Stream,
    subject: Subject,
    place: Place,
    repetition: Repetition,
    sets: Vec<Set<T>>,
    /// Bytes a second of each ceiling; empty on the emulator.
    ceilings: Vec<(Ceiling, f64)>,
}

impl<T: Int8Element> Bench<T> {
    /// Uploads `keys`.
    ///
    /// # Errors
    /// Out of memory, or what the device reports.
    pub fn new(device: &Device, subject: Subject, keys: &[T], repetition: Repetition) -> Result<Self> {
        // The smallest input counts: the codes, when they are decoded.
        let cache = 3 * device.info().l2_bytes.unwrap_or(0) as usize;
        let count = cache.div_ceil(subject.matrix.elements()).max(1);
        Bench::with_sets(device, subject, keys, repetition, count)
    }

    /// Uploads `keys` to `count` sets of buffers.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_sets(
        device: &Device,
        subject: Subject,
        keys: &[T],
        repetition: Repetition,
        count: usize,
    ) -> Result<Self> {
        let stream = Stream::new(device)?;
        let place = if device.kind() == BackendKind::Cuda { Place::Gpu } else { Place::Emulator };
        let plan = Plan::<T>::new(device, subject.matrix, Variant::Naive)?;
        let mut sets: Vec<Set<T>> = Vec::with_capacity(count);
        for _ in 0..count {
            let mut set = Set {
                keys: Buffer::new(device, keys.len())?,
                out: plan.allocate()?,
                restored: Buffer::new(device, keys.len())?,
            };
            match sets.first() {
                None => stream.upload(keys, &mut set.keys, 0)?,
                Some(first) => stream.copy(&first.keys, .., &mut set.keys, 0)?,
            }
            sets.push(set);
        }
        stream.synchronize()?;
        Ok(Bench { stream, subject, place, repetition, sets, ceilings: Vec::new() })
    }

    /// Times `record` over all sets in turns, as often as fills a graph.
    fn time(
        &mut self,
        bytes: u64,
        mut record: impl FnMut(&Stream, &mut Set<T>) -> Result<()>,
    ) -> Result<Timing> {
        let fill = match self.place {
            Place::Gpu => (GRAPH_SECONDS * BYTES_PER_SECOND / bytes as f64).ceil() as usize,
            _ => 1,
        };
        let count = self.sets.len();
        let calls = fill.clamp(1, 64).max(count);
        let sets = &mut self.sets;
        // SAFETY: the sets, and the plan or kernel arguments that `record` holds, outlive the call.
        unsafe {
            on_device(&self.stream, calls, self.repetition, |stream, call| {
                record(stream, &mut sets[call % count])
            })
        }
    }

    fn row(&self, variant: &str, operation: Operation, timing: Timing, verified: bool) -> Row {
        let row = Row::of(self.place, variant, self.subject, operation, timing);
        let row = Row { sets: Some(self.sets.len()), verified: Some(verified), ..row };
        match self.ceiling(operation) {
            Some((name, microseconds)) => row.beside(name, microseconds),
            None => row,
        }
    }

    /// What memory alone needs for the operation's passes.
    fn ceiling(&self, operation: Operation) -> Option<(String, f64)> {
        let mut names = Vec::new();
        let mut microseconds = 0.0;
        for pass in operation.passes(self.subject.matrix, self.subject.element) {
            let nearest = Ceiling::nearest(pass);
            let (_, speed) = self.ceilings.iter().find(|(ceiling, _)| *ceiling == nearest)?;
            microseconds += pass.total() as f64 / speed * 1e6;
            names.push(nearest.kernel);
        }
        Some((names.join(" + "), microseconds))
    }

    /// The driver's copy and the kernels that only move bytes. They overwrite codes and restored values.
    ///
    /// # Errors
    /// What the device reports.
    pub fn ceilings(&mut self) -> Result<Vec<Row>> {
        let sets = Some(self.sets.len());
        let copy = Operation::Copy.traffic(self.subject.matrix, self.subject.element);
        let timing =
            self.time(copy.total(), |stream, set| Ok(stream.copy(&set.keys, .., &mut set.restored, 0)?))?;
        let row = Row::of(self.place, "memcpy", self.subject, Operation::Copy, timing);
        let mut rows = vec![Row { peer: "cuda driver".into(), sets, ..row }];
        let mut sink = Buffer::<u32>::zeroed(self.stream.device(), 1)?;
        for ceiling in CEILINGS {
            let vectors = ceiling.vectors(self.subject.matrix, self.subject.element);
            if vectors == 0 {
                continue;
            }
            let traffic = Traffic { reads: vectors * ceiling.reads, writes: vectors * ceiling.writes };
            let sink = sink.global_mut();
            let mut best = f64::INFINITY;
            for pattern in ceiling.patterns(vectors, self.subject.matrix) {
                let timing = self.time(traffic.total(), |stream, set| {
                    let (source, target) = ends(ceiling.mix, set, sink);
                    // SAFETY: the set and the sink outlive the replays.
                    let done = unsafe { roofline::launch(stream, pattern, vectors, source, target) };
                    Ok(done?)
                })?;
                best = best.min(timing.median_us);
                let name = format!("{} {pattern}", ceiling.kernel);
                let row = Row::new(self.place, &name, self.subject, ceiling.operation, traffic, timing);
                rows.push(Row { sets, ..row });
            }
            self.ceilings.push((ceiling, traffic.total() as f64 / best * 1e6));
        }
        Ok(rows)
    }

    /// Scales of the columns; then each variant's codes and what comes back; then scales and codes together.
    ///
    /// # Errors
    /// What the device reports.
    pub fn columns(&mut self, variants: &[Variant], expected: Expected<T>) -> Result<Vec<Row>> {
        let (matrix, element) = (self.subject.matrix, self.subject.element);
        let bytes = |operation: Operation| operation.traffic(matrix, element).total();
        let device = self.stream.device().clone();
        let mut rows = Vec::new();

        let mut plan = Plan::<T>::new(&device, matrix, Variant::Rows)?;
        self.poison()?;
        let timing =
            self.time(bytes(Operation::Scales), |stream, set| plan.scales(stream, &set.keys, &mut set.out))?;
        let same = self.same(|set| &set.out.scales, expected.scales)?;
        rows.push(self.row("columns", Operation::Scales, timing, same));

        for &variant in variants {
            let plan = Plan::<T>::new(&device, matrix, variant)?;
            let quantize = |stream: &Stream, set: &mut Set<T>| plan.codes(stream, &set.keys, &mut set.out);
            self.both(
                &mut rows,
                variant,
                [Operation::Quantize, Operation::Dequantize],
                expected,
                &plan,
                quantize,
            )?;
        }

        self.poison()?;
        let timing = self.time(bytes(Operation::ScalesQuantize), |stream, set| {
            plan.quantize(stream, &set.keys, &mut set.out)
        })?;
        let same = self.same(|set| &set.out.scales, expected.scales)?
            && self.same(|set| &set.out.codes, expected.codes)?;
        rows.push(self.row(Variant::Rows.name(), Operation::ScalesQuantize, timing, same));
        Ok(rows)
    }

    /// Scales and codes of blocks of tokens in one read, and back. Column scales are gone after this.
    ///
    /// # Errors
    /// What the device reports.
    pub fn blocks(&mut self, expected: Expected<T>) -> Result<Vec<Row>> {
        let matrix = self.subject.matrix;
        let device = self.stream.device().clone();
        for set in &mut self.sets {
            set.out.scales = Buffer::new(&device, matrix.scales(Variant::Fused))?;
        }
        self.poison()?;
        let plan = Plan::<T>::new(&device, matrix, Variant::Fused)?;
        let quantize = |stream: &Stream, set: &mut Set<T>| plan.codes(stream, &set.keys, &mut set.out);
        let operations = [Operation::BlockQuantize, Operation::BlockDequantize];
        let mut rows = Vec::new();
        self.both(&mut rows, Variant::Fused, operations, expected, &plan, quantize)?;
        Ok(rows)
    }

    /// Times and compares `quantize` and then the plan's dequantization.
    fn both(
        &mut self,
        rows: &mut Vec<Row>,
        variant: Variant,
        [quantizing, restoring]: [Operation; 2],
        expected: Expected<T>,
        plan: &Plan<T>,
        quantize: impl FnMut(&Stream, &mut Set<T>) -> Result<()>,
    ) -> Result<()> {
        let bytes =
            |operation: Operation| operation.traffic(self.subject.matrix, self.subject.element).total();
        let (to_quantize, to_restore) = (bytes(quantizing), bytes(restoring));
        let set = &mut self.sets[0];
        self.stream.fill_u8(&mut set.out.codes, .., 0xa5)?;
        self.stream.fill_u8(&mut set.restored, .., 0xa5)?;
        let timing = self.time(to_quantize, quantize)?;
        let same = self.same(|set| &set.out.codes, expected.codes)?
            && self.same(|set| &set.out.scales, expected.scales)?;
        rows.push(self.row(variant.name(), quantizing, timing, same));

        let timing =
            self.time(to_restore, |stream, set| plan.dequantize(stream, &set.out, &mut set.restored))?;
        let same = self.same(|set| &set.restored, expected.restored)?;
        rows.push(self.row(variant.name(), restoring, timing, same));
        Ok(())
    }

    /// Fills what is about to be computed with bytes that no right result has everywhere.
    fn poison(&mut self) -> Result<()> {
        let set = &mut self.sets[0];
        self.stream.fill_u8(&mut set.out.codes, .., 0xa5)?;
        self.stream.fill_u8(&mut set.out.scales, .., 0xa5)?;
        Ok(())
    }

    /// Whether the bytes of a buffer of the first set are those of `expected`.
    fn same<P: Pod>(&self, buffer: impl Fn(&Set<T>) -> &Buffer<P>, expected: &[P]) -> Result<bool> {
        let buffer = buffer(&self.sets[0]);
        if buffer.len() != expected.len() {
            return Ok(false);
        }
        let mut window = vec![P::zeroed(); expected.len().min(WINDOW)];
        let mut same = true;
        for (index, expected) in expected.chunks(WINDOW).enumerate() {
            let window = &mut window[..expected.len()];
            self.stream.download(buffer, index * WINDOW, window)?;
            same &= bytemuck::cast_slice::<P, u8>(window) == bytemuck::cast_slice::<P, u8>(expected);
        }
        Ok(same)
    }
}

/// Where a mix reads and where it writes, as words.
fn ends<T: Int8Element>(mix: Mix, set: &mut Set<T>, sink: GlobalMut<u32>) -> (Global<u32>, GlobalMut<u32>) {
    fn words<P: Pod>(buffer: &Buffer<P>) -> Global<u32> {
        // SAFETY: the same memory, with the part of a word at the end left out.
        unsafe { Global::from_raw(buffer.global().address(), buffer.bytes() / 4) }
    }
    fn words_mut<P: Pod>(buffer: &mut Buffer<P>) -> GlobalMut<u32> {
        // SAFETY: as above.
        unsafe { GlobalMut::from_raw(buffer.global_mut().address(), buffer.bytes() / 4) }
    }
    match mix {
        Mix::Read => (words(&set.keys), sink),
        Mix::Narrow => (words(&set.keys), words_mut(&mut set.out.codes)),
        Mix::Widen => (words(&set.out.codes), words_mut(&mut set.restored)),
        Mix::Copy => (words(&set.keys), words_mut(&mut set.restored)),
    }
}
