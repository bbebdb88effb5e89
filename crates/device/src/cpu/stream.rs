//! Streams and graphs of the CPU backend.

use super::{copy, host};
use crate::backend::{BoundKernel, GraphBackend, GraphExecBackend, Place, StreamBackend};
use crate::error::Result;
use simt::LaunchShape;
use simt::emu::{EmuOptions, allocations};
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// One step of a graph.
enum Step {
    Launch { kernel: Box<dyn BoundKernel>, shape: LaunchShape },
    Copy { to: Place, from: Place, bytes: usize },
    FillU8 { address: u64, value: u8, bytes: usize },
    FillU32 { address: u64, value: u32, words: usize },
}

// SAFETY: the pointers of a copy are addresses; using them is what the contract of the graph's launch covers.
unsafe impl Send for Step {}
// SAFETY: as above.
unsafe impl Sync for Step {}

impl Clone for Step {
    fn clone(&self) -> Self {
        match self {
            Step::Launch { kernel, shape } => Step::Launch { kernel: kernel.boxed(), shape: *shape },
            Step::Copy { to, from, bytes } => Step::Copy { to: *to, from: *from, bytes: *bytes },
            Step::FillU8 { address, value, bytes } => {
                Step::FillU8 { address: *address, value: *value, bytes: *bytes }
            }
            Step::FillU32 { address, value, words } => {
                Step::FillU32 { address: *address, value: *value, words: *words }
            }
        }
    }
}

impl Step {
    /// Refuses what would touch freed memory or that of another device, as far as it is known. Launches find
    /// out themselves what is freed.
    fn check(&self, device: u64) -> Result<()> {
        let (doing, addresses) = match self {
            Step::Launch { kernel, .. } => return check_owners(&**kernel, device),
            Step::Copy { to, from, .. } => ("a copy", [*to, *from]),
            Step::FillU8 { address, .. } | Step::FillU32 { address, .. } => {
                ("a fill", [Place::Device(*address); 2])
            }
        };
        let freed =
            |place: &Place| matches!(place, Place::Device(address) if allocations::is_freed(*address));
        if addresses.iter().any(freed) { Err(crate::Error::Freed { doing }) } else { Ok(()) }
    }

    /// # Safety
    /// The contract of the call that made the step.
    unsafe fn run(&self, options: &EmuOptions, device: u64) -> Result<()> {
        self.check(device)?;
        match self {
            // SAFETY: this function's contract.
            Step::Launch { kernel, shape } => unsafe { kernel.emulate(*shape, options) }?,
            // SAFETY: this function's contract.
            Step::Copy { to, from, bytes } => unsafe { copy(*to, *from, *bytes) },
            // SAFETY: this function's contract.
            Step::FillU8 { address, value, bytes } => unsafe {
                host(*address).write_bytes(*value, *bytes);
                allocations::write(*address, *bytes);
            },
            // SAFETY: this function's contract, which says that the address is aligned.
            Step::FillU32 { address, value, words } => unsafe {
                std::slice::from_raw_parts_mut(host(*address).cast::<u32>(), *words).fill(*value);
                allocations::write(*address, 4 * *words);
            },
        }
        Ok(())
    }
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
    foreign.map_or(Ok(()), |what| Err(crate::Error::WrongDevice { what }))
}

#[derive(Clone, Default)]
struct Steps {
    all: Vec<Step>,
    /// Where the launches that have a node are in `all`.
    nodes: Vec<usize>,
}

pub(super) struct CpuStream {
    options: EmuOptions,
    device: u64,
    /// What was recorded, while the stream captures. Not held while a step runs: a thread that waits in the
    /// emulator may be lent to other work, which may use the same stream.
    recording: Mutex<Option<Steps>>,
}

impl CpuStream {
    pub(super) fn new(options: EmuOptions, device: u64) -> Self {
        CpuStream { options, device, recording: Mutex::new(None) }
    }

    fn with_recording<R>(&self, f: impl FnOnce(&mut Option<Steps>) -> R) -> R {
        f(&mut self.recording.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Records `step`, or runs it.
    ///
    /// # Safety
    /// The contract of the call that made the step.
    unsafe fn put(&self, step: Step) -> Result<()> {
        let left = self.with_recording(|recording| match recording {
            Some(steps) => {
                steps.all.push(step);
                None
            }
            None => Some(step),
        });
        match left {
            // SAFETY: this function's contract.
            Some(step) => unsafe { step.run(&self.options, self.device) },
            None => Ok(()),
        }
    }
}

impl StreamBackend for CpuStream {
    fn put_other(&self, put: &mut dyn FnMut(*mut c_void) -> Result<()>) -> Result<()> {
        put(std::ptr::null_mut())
    }

    unsafe fn launch(&self, kernel: &dyn BoundKernel, shape: LaunchShape) -> Result<()> {
        let recorded = self.with_recording(|recording| match recording {
            Some(steps) => {
                steps.all.push(Step::Launch { kernel: kernel.boxed(), shape });
                true
            }
            None => false,
        });
        if !recorded {
            check_owners(kernel, self.device)?;
            // SAFETY: this function's contract.
            unsafe { kernel.emulate(shape, &self.options) }?;
        }
        Ok(())
    }

    unsafe fn launch_node(&self, kernel: &dyn BoundKernel, shape: LaunchShape) -> Result<usize> {
        self.with_recording(|recording| {
            let steps =
                recording.as_mut().ok_or(crate::Error::NotCapturing { kernel: kernel.info().name })?;
            steps.nodes.push(steps.all.len());
            steps.all.push(Step::Launch { kernel: kernel.boxed(), shape });
            Ok(steps.nodes.len() - 1)
        })
    }

    unsafe fn copy(&self, to: Place, from: Place, bytes: usize) -> Result<()> {
        // SAFETY: this function's contract.
        unsafe { self.put(Step::Copy { to, from, bytes }) }
    }

    unsafe fn fill_u8(&self, address: u64, value: u8, bytes: usize) -> Result<()> {
        // SAFETY: this function's contract.
        unsafe { self.put(Step::FillU8 { address, value, bytes }) }
    }

    unsafe fn fill_u32(&self, address: u64, value: u32, words: usize) -> Result<()> {
        // SAFETY: this function's contract.
        unsafe { self.put(Step::FillU32 { address, value, words }) }
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn begin_capture(&self) -> Result<()> {
        self.with_recording(|recording| *recording = Some(Steps::default()));
        Ok(())
    }

    fn end_capture(&self) -> Result<Box<dyn GraphBackend>> {
        let steps = self.with_recording(Option::take).unwrap_or_default();
        Ok(Box::new(CpuGraph { steps, options: self.options, device: self.device }))
    }
}

struct CpuGraph {
    steps: Steps,
    options: EmuOptions,
    device: u64,
}

impl GraphBackend for CpuGraph {
    fn len(&self) -> usize {
        self.steps.all.len()
    }

    fn instantiate(&self) -> Result<Box<dyn GraphExecBackend>> {
        Ok(Box::new(CpuGraphExec { steps: self.steps.clone(), options: self.options, device: self.device }))
    }
}

struct CpuGraphExec {
    steps: Steps,
    options: EmuOptions,
    device: u64,
}

impl GraphExecBackend for CpuGraphExec {
    unsafe fn launch(&self, _stream: &dyn StreamBackend) -> Result<()> {
        for step in &self.steps.all {
            // SAFETY: this function's contract.
            unsafe { step.run(&self.options, self.device) }?;
        }
        Ok(())
    }

    unsafe fn update(&mut self, node: usize, kernel: &dyn BoundKernel, shape: LaunchShape) -> Result<()> {
        let step = self.steps.nodes.get(node).ok_or(crate::Error::ForeignNode)?;
        self.steps.all[*step] = Step::Launch { kernel: kernel.boxed(), shape };
        Ok(())
    }
}
