//! Streams and graphs of the CPU backend.

use super::order::{Clock, Order};
use super::{copy, host};
use crate::backend::{At, BoundKernel, GraphBackend, GraphExecBackend, Place, StreamBackend};
use crate::error::{Error, Result};
use crate::unordered::Doing;
use simt::LaunchShape;
use simt::emu::traffic::Touch;
use simt::emu::{EmuOptions, allocations};
use simt::print::Sink;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What the mutexes here hold is whole at any time, also after a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A copy or a fill.
#[derive(Clone, Copy)]
enum Transfer {
    Copy { to: Place, from: Place, bytes: usize },
    FillU8 { address: u64, value: u8, bytes: usize },
    FillU32 { address: u64, value: u32, words: usize },
}

// SAFETY: the pointers of a copy are addresses; using them is what the contract of the graph's launch covers.
unsafe impl Send for Transfer {}
// SAFETY: as above.
unsafe impl Sync for Transfer {}

enum Work {
    Launch { kernel: Box<dyn BoundKernel>, shape: LaunchShape },
    Transfer(Transfer),
}

impl Clone for Work {
    fn clone(&self) -> Self {
        match self {
            Work::Launch { kernel, shape } => Work::Launch { kernel: kernel.boxed(), shape: *shape },
            Work::Transfer(transfer) => Work::Transfer(*transfer),
        }
    }
}

/// One step of a graph, and where it was asked for.
#[derive(Clone)]
struct Step {
    work: Work,
    at: At,
}

/// What the streams and graphs of a device have of it.
#[derive(Clone)]
pub(super) struct Setting {
    pub(super) options: EmuOptions,
    /// The device's number, with `memory_check`; else 0.
    pub(super) device: u64,
    /// With `stream_check`.
    pub(super) order: Option<Arc<Order>>,
    /// Who gets what kernels print, if the device has somebody for that.
    pub(super) sink: Arc<Mutex<Option<Sink>>>,
}

/// Where work comes: the stream's number, and for a step of a graph its own, from 1, and where the graph was
/// launched.
#[derive(Clone, Copy)]
struct Into {
    stream: u64,
    step: Option<(usize, At)>,
}

impl Transfer {
    /// Refuses what would touch freed memory, as far as it is known.
    fn check(&self) -> Result<()> {
        let (doing, addresses) = match self {
            Transfer::Copy { to, from, .. } => ("a copy", [*to, *from]),
            Transfer::FillU8 { address, .. } | Transfer::FillU32 { address, .. } => {
                ("a fill", [Place::Device(*address); 2])
            }
        };
        let freed =
            |place: &Place| matches!(place, Place::Device(address) if allocations::is_freed(*address));
        if addresses.iter().any(freed) { Err(Error::Freed { doing }) } else { Ok(()) }
    }

    /// What it is, and what it reads and writes.
    fn ranges(&self) -> (Doing, Vec<(u64, usize, Touch)>) {
        let address = |place: &Place| match place {
            Place::Host(pointer) => pointer.addr() as u64,
            Place::Device(address) => *address,
        };
        match self {
            Transfer::Copy { to, from, bytes } => {
                (Doing::Copy, vec![(address(from), *bytes, Touch::Read), (address(to), *bytes, Touch::Write)])
            }
            Transfer::FillU8 { address, bytes, .. } => (Doing::Fill, vec![(*address, *bytes, Touch::Write)]),
            Transfer::FillU32 { address, words, .. } => {
                (Doing::Fill, vec![(*address, 4 * *words, Touch::Write)])
            }
        }
    }

    /// # Safety
    /// The contract of the call that made it.
    unsafe fn run(&self, setting: &Setting, at: At, into: Into) -> Result<()> {
        self.check()?;
        if let Some(order) = &setting.order {
            let (doing, ranges) = self.ranges();
            order.transfer(into.stream, (doing, at), into.step, &ranges)?;
        }
        match self {
            // SAFETY: this function's contract.
            Transfer::Copy { to, from, bytes } => unsafe { copy(*to, *from, *bytes) },
            // SAFETY: this function's contract.
            Transfer::FillU8 { address, value, bytes } => unsafe {
                host(*address).write_bytes(*value, *bytes);
                allocations::write(*address, *bytes);
            },
            // SAFETY: this function's contract, which says that the address is aligned.
            Transfer::FillU32 { address, value, words } => unsafe {
                std::slice::from_raw_parts_mut(host(*address).cast::<u32>(), *words).fill(*value);
                allocations::write(*address, 4 * *words);
            },
        }
        Ok(())
    }
}

/// # Safety
/// The contract of [`crate::Stream::launch`].
unsafe fn launch(
    kernel: &dyn BoundKernel,
    shape: LaunchShape,
    setting: &Setting,
    at: At,
    into: Into,
) -> Result<()> {
    check_owners(kernel, setting.device)?;
    let sink = lock(&setting.sink).clone();
    let Some(order) = &setting.order else {
        // SAFETY: this function's contract.
        return unsafe { kernel.emulate(shape, &setting.options, sink.as_ref()) };
    };
    let info = kernel.info();
    let op = order.begin(into.stream, (Doing::Launch(info.name), at), into.step, Some(info.overlaps));
    // SAFETY: this function's contract.
    let traffic = unsafe { kernel.emulate_recorded(shape, &setting.options, sink.as_ref()) };
    order.end_launch(op, &*traffic.inspect_err(|_| order.fail())?)
}

/// Refuses handles to memory of a device that is not `device`, as far as it is known.
fn check_owners(kernel: &dyn BoundKernel, device: u64) -> Result<()> {
    let mut foreign = None;
    if device != 0 {
        kernel.memory(&mut |parameter, address| {
            if allocations::owner(address).is_some_and(|owner| owner != device) {
                foreign.get_or_insert(parameter);
            }
        });
    }
    foreign.map_or(Ok(()), |what| Err(Error::WrongDevice { what }))
}

#[derive(Clone, Default)]
struct Steps {
    all: Vec<Step>,
    /// Where the launches that have a node are in `all`.
    nodes: Vec<usize>,
}

pub(super) struct CpuStream {
    setting: Setting,
    /// Its number, with `stream_check`; else 0.
    number: u64,
    /// What was recorded, while the stream captures. Not held while a step runs: a thread that waits in the
    /// emulator may be lent to other work, which may use the same stream.
    recording: Mutex<Option<Steps>>,
}

impl CpuStream {
    pub(super) fn new(setting: Setting) -> Self {
        let number = setting.order.as_ref().map_or(0, |order| order.open());
        CpuStream { setting, number, recording: Mutex::new(None) }
    }

    fn into(&self) -> Into {
        Into { stream: self.number, step: None }
    }

    /// Records the transfer, or does it.
    ///
    /// # Safety
    /// The contract of the call that made it.
    unsafe fn put(&self, transfer: Transfer, at: At) -> Result<()> {
        if let Some(steps) = &mut *lock(&self.recording) {
            steps.all.push(Step { work: Work::Transfer(transfer), at });
            return Ok(());
        }
        // SAFETY: this function's contract.
        unsafe { transfer.run(&self.setting, at, self.into()) }
    }

    fn captures(&self) {
        if let Some(order) = &self.setting.order {
            order.capture(self.number);
        }
    }
}

impl StreamBackend for CpuStream {
    fn number(&self) -> u64 {
        self.number
    }

    fn put_other(&self, put: &mut dyn FnMut(*mut c_void) -> Result<()>) -> Result<()> {
        put(std::ptr::null_mut())
    }

    unsafe fn launch(&self, kernel: &dyn BoundKernel, shape: LaunchShape, at: At) -> Result<()> {
        if let Some(steps) = &mut *lock(&self.recording) {
            steps.all.push(Step { work: Work::Launch { kernel: kernel.boxed(), shape }, at });
            return Ok(());
        }
        // SAFETY: this function's contract.
        unsafe { launch(kernel, shape, &self.setting, at, self.into()) }
    }

    unsafe fn launch_node(&self, kernel: &dyn BoundKernel, shape: LaunchShape, at: At) -> Result<usize> {
        let mut recording = lock(&self.recording);
        let steps = recording.as_mut().ok_or(Error::NotCapturing { kernel: kernel.info().name })?;
        steps.nodes.push(steps.all.len());
        steps.all.push(Step { work: Work::Launch { kernel: kernel.boxed(), shape }, at });
        Ok(steps.nodes.len() - 1)
    }

    unsafe fn copy(&self, to: Place, from: Place, bytes: usize, at: At) -> Result<()> {
        // SAFETY: this function's contract.
        unsafe { self.put(Transfer::Copy { to, from, bytes }, at) }
    }

    unsafe fn fill_u8(&self, address: u64, value: u8, bytes: usize, at: At) -> Result<()> {
        // SAFETY: this function's contract.
        unsafe { self.put(Transfer::FillU8 { address, value, bytes }, at) }
    }

    unsafe fn fill_u32(&self, address: u64, value: u32, words: usize, at: At) -> Result<()> {
        // SAFETY: this function's contract.
        unsafe { self.put(Transfer::FillU32 { address, value, words }, at) }
    }

    fn synchronize(&self) -> Result<()> {
        if let Some(order) = &self.setting.order {
            order.host_waits_for(self.number);
        }
        Ok(())
    }

    fn begin_capture(&self) -> Result<()> {
        self.captures();
        *lock(&self.recording) = Some(Steps::default());
        Ok(())
    }

    fn end_capture(&self) -> Result<Box<dyn GraphBackend>> {
        self.captures();
        let steps = lock(&self.recording).take().unwrap_or_default();
        Ok(Box::new(CpuGraph { steps, setting: self.setting.clone() }))
    }
}

impl Drop for CpuStream {
    fn drop(&mut self) {
        if let Some(order) = &self.setting.order {
            order.close(self.number);
        }
    }
}

struct CpuGraph {
    steps: Steps,
    setting: Setting,
}

impl GraphBackend for CpuGraph {
    fn len(&self) -> usize {
        self.steps.all.len()
    }

    fn instantiate(&self) -> Result<Box<dyn GraphExecBackend>> {
        let (steps, setting) = (self.steps.clone(), self.setting.clone());
        Ok(Box::new(CpuGraphExec { steps, setting, last: Mutex::default() }))
    }
}

struct CpuGraphExec {
    steps: Steps,
    setting: Setting,
    /// What is done when its last run is, with `stream_check`: CUDA runs an instance of a graph once at a
    /// time, each run behind the one before, on whatever streams.
    last: Mutex<Clock>,
}

impl GraphExecBackend for CpuGraphExec {
    unsafe fn launch(&self, stream: &dyn StreamBackend, at: At) -> Result<()> {
        let stream = stream.number();
        if let Some(order) = &self.setting.order {
            order.hold(stream, &lock(&self.last));
        }
        let mut steps = self.steps.all.iter().enumerate();
        let result = steps.try_for_each(|(number, Step { work, at: asked })| {
            let into = Into { stream, step: Some((number + 1, at)) };
            match work {
                // SAFETY: this function's contract.
                Work::Launch { kernel, shape } => unsafe {
                    launch(&**kernel, *shape, &self.setting, asked, into)
                },
                // SAFETY: this function's contract.
                Work::Transfer(transfer) => unsafe { transfer.run(&self.setting, asked, into) },
            }
        });
        if let Some(order) = &self.setting.order {
            *lock(&self.last) = order.record(stream);
        }
        result
    }

    unsafe fn update(
        &mut self,
        node: usize,
        kernel: &dyn BoundKernel,
        shape: LaunchShape,
        at: At,
    ) -> Result<()> {
        let step = self.steps.nodes.get(node).ok_or(Error::ForeignNode)?;
        self.steps.all[*step] = Step { work: Work::Launch { kernel: kernel.boxed(), shape }, at };
        Ok(())
    }
}
