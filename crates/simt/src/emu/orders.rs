//! One launch in several orders: whether its results depend on them.

use super::allocations::Tracked;
use super::block::Setting;
use super::fault::{Fault, FaultKind, OrderDependence, Place, ThreadId};
use super::grid::Grid;
use super::lane::Lane;
use super::late::Late;
use super::options::Schedule;
use crate::kernel::{ArgMemory, KernelInfo};
use core::panic::Location;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Waits for the last write to some bytes.
pub(crate) struct Watchpoint {
    bytes: Range<u64>,
    last: Mutex<Option<(ThreadId, Place)>>,
}

impl Watchpoint {
    pub(super) fn new(bytes: Range<u64>) -> Arc<Self> {
        Arc::new(Watchpoint { bytes, last: Mutex::new(None) })
    }

    /// A write of `bytes` bytes from `start` on.
    pub(super) fn note(&self, lane: &Lane, start: u64, bytes: usize, place: &'static Location<'static>) {
        if start < self.bytes.end && self.bytes.start < start + bytes as u64 {
            let writer = ThreadId { block: lane.block().index.get(), thread: lane.thread };
            *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some((writer, place.into()));
        }
    }

    pub(super) fn last(&self) -> Option<(ThreadId, Place)> {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, last: Option<(ThreadId, Place)>) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = last;
    }
}

/// Memory that the launch may write, and the parameter that leads there.
pub(super) struct Output {
    pub(super) parameter: &'static str,
    pub(super) memory: ArgMemory,
}

impl Output {
    fn contents(&self) -> Vec<u8> {
        let (address, bytes) = (self.memory.address as *const u8, self.memory.bytes as usize);
        // SAFETY: the handle's memory, valid by the launch's contract, and no thread of the launch runs.
        unsafe { core::slice::from_raw_parts(address, bytes) }.to_vec()
    }

    fn put(&self, contents: &[u8]) {
        // SAFETY: as above, and `contents` has the memory's length.
        unsafe {
            (self.memory.address as *mut u8).copy_from_nonoverlapping(contents.as_ptr(), contents.len())
        };
    }
}

/// The memory of a launch at one moment.
struct Contents {
    outputs: Vec<Vec<u8>>,
    written: Option<Vec<Vec<u64>>>,
}

impl Contents {
    fn now(outputs: &[Output], tracked: Option<&Tracked>) -> Self {
        Contents {
            outputs: outputs.iter().map(Output::contents).collect(),
            written: tracked.map(Tracked::snapshot),
        }
    }

    fn put(&self, outputs: &[Output], tracked: Option<&Tracked>) {
        for (output, contents) in outputs.iter().zip(&self.outputs) {
            output.put(contents);
        }
        if let (Some(tracked), Some(written)) = (tracked, &self.written) {
            tracked.restore(written);
        }
    }
}

/// Runs the launch in the order of `setting`; with races checked and in an order of a seed once more with a
/// load that takes effect late, if there is one that may.
pub(super) fn run(setting: Setting<'_>, outputs: &[Output]) -> Result<(), Fault> {
    if !setting.options.race_check || !matches!(setting.schedule, Schedule::Seeded(_)) {
        return Grid::new(setting).run();
    }
    let tracked = setting.tracked.clone();
    let before = Contents::now(outputs, tracked.as_deref());
    let once = |late: Late, sink| {
        let late = Arc::new(Mutex::new(late));
        let result = Grid::new(Setting { late: Some(late.clone()), sink, ..setting.clone() }).run();
        let mut late = late.lock().unwrap_or_else(PoisonError::into_inner);
        (result, late.found(), late.is_kept())
    };
    let (result, found, _) = once(Late::default(), setting.sink.clone());
    let Some(promise) = found.filter(|_| result.is_ok()) else { return result };
    let after = Contents::now(outputs, tracked.as_deref());
    let writer = setting.watchpoint.as_ref().map(|watchpoint| watchpoint.last());
    before.put(outputs, tracked.as_deref());
    let (late_result, _, is_kept) = once(Late::with(promise), None);
    if is_kept {
        return late_result;
    }
    after.put(outputs, tracked.as_deref());
    if let (Some(watchpoint), Some(writer)) = (&setting.watchpoint, writer) {
        watchpoint.put(writer);
    }
    result
}

/// Runs the launch in the order of `setting` and in `options.orders` more, each from the memory as it is now.
pub(super) fn run_in_all(setting: Setting<'_>, outputs: &[Output]) -> Result<(), Fault> {
    let tracked = setting.tracked.clone();
    let before = Contents::now(outputs, tracked.as_deref());
    let first = match setting.schedule {
        Schedule::Parallel => Schedule::Ascending,
        schedule => schedule,
    };
    // What threads print is that of the first order.
    run(Setting { schedule: first, ..setting.clone() }, outputs)?;
    let run = |schedule, watchpoint: Option<Arc<Watchpoint>>| {
        before.put(outputs, tracked.as_deref());
        run(Setting { schedule, watchpoint, sink: None, ..setting.clone() }, outputs)
    };
    let after = Contents::now(outputs, tracked.as_deref());
    let others = [Schedule::Reversed, Schedule::Ascending].into_iter().filter(|other| *other != first);
    let seeds = (1..).map(Schedule::Seeded).filter(|other| *other != first);
    for schedule in others.take(1).chain(seeds).take(setting.options.orders as usize) {
        run(schedule, None)?;
        let Some((output, at)) = difference(outputs, &after, &Contents::now(outputs, None)) else { continue };
        let memory = outputs[output].memory;
        let index = at as u64 / memory.element_bytes as u64;
        let start = index * memory.element_bytes as u64;
        let bytes = memory.address + start..memory.address + start + memory.element_bytes as u64;
        let value = || value(&outputs[output].contents()[start as usize..][..memory.element_bytes]);
        // Once more each, to see who wrote it.
        let writer = |schedule| {
            let watchpoint = Watchpoint::new(bytes.clone());
            run(schedule, Some(watchpoint.clone()))?;
            Ok((value(), watchpoint.last()))
        };
        let (second_value, second) = writer(schedule)?;
        let (first_value, first_writer) = writer(first)?;
        let dependence = OrderDependence {
            parameter: outputs[output].parameter,
            index,
            schedules: [first, schedule],
            values: [first_value, second_value],
            first: first_writer,
        };
        return Err(report(setting.info, second.or(first_writer), dependence));
    }
    after.put(outputs, tracked.as_deref());
    Ok(())
}

fn report(
    info: &'static KernelInfo,
    writer: Option<(ThreadId, Place)>,
    dependence: OrderDependence,
) -> Fault {
    let (thread, place) = writer.unzip();
    let schedule = dependence.schedules[1];
    let kind = FaultKind::OrderDependence(Box::new(dependence));
    Fault { thread, place, schedule, ..Fault::of_launch(info, kind) }
}

/// The first output that differs, and its first byte that does.
fn difference(outputs: &[Output], a: &Contents, b: &Contents) -> Option<(usize, usize)> {
    (0..outputs.len()).find_map(|output| {
        let mut pairs = a.outputs[output].iter().zip(&b.outputs[output]);
        pairs.position(|(a, b)| a != b).map(|at| (output, at))
    })
}

/// The first eight bytes of an element as a little-endian number.
fn value(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}
