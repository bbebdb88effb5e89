//! What a backend is: the traits that the public types call. Each implementation is one folder, `cpu` and
//! `cuda`; nothing outside them knows which one it has.
//!
//! Addresses are plain numbers here (`u64`, as the driver has them); the public types give them their element
//! types and check every range first.

use crate::device::{DeviceInfo, KernelAttributes};
use crate::error::{Error, Result};
use crate::times::KernelTimes;
use crate::unordered::{Access, Memory};
use simt::emu::traffic::{self, Traffic};
use simt::emu::{self, EmuOptions, Target};
use simt::print::Sink;
use simt::{Kernel, KernelArgs, KernelInfo, LaunchShape, MAX_PARAMS, TensorMap, TensorMapShape};
use std::ffi::c_void;
use std::panic::Location;
use std::sync::Arc;

/// Where a call stands in the source.
pub(crate) type At = &'static Location<'static>;

/// A kernel with its arguments, without its types: each backend takes from it what it needs.
pub(crate) trait BoundKernel: Send + Sync {
    fn info(&self) -> &'static KernelInfo;
    /// The address of each argument, for the driver; valid as long as `self`.
    #[cfg_attr(not(all(target_os = "linux", target_arch = "x86_64")), expect(dead_code))]
    fn params(&self, out: &mut [*const c_void; MAX_PARAMS]);
    /// Calls `visit` with name and address of each argument that is a handle.
    fn memory(&self, visit: &mut dyn FnMut(&'static str, u64));
    /// Runs the kernel on the emulator. It prints to `sink`, without one to where the thread's launches do.
    ///
    /// # Safety
    /// The contract of [`crate::Stream::launch`].
    unsafe fn emulate(&self, shape: LaunchShape, options: &EmuOptions, sink: Option<&Sink>) -> Result<()>;
    /// The same, and what it read and wrote.
    ///
    /// # Safety
    /// As for `emulate`.
    unsafe fn emulate_recorded(
        &self,
        shape: LaunchShape,
        options: &EmuOptions,
        sink: Option<&Sink>,
    ) -> Result<Arc<Traffic>>;
    /// A copy that outlives the call, for a graph.
    fn boxed(&self) -> Box<dyn BoundKernel>;
}

#[derive(Clone, Copy)]
pub(crate) struct Bound<A: KernelArgs> {
    pub(crate) kernel: Kernel<A>,
    pub(crate) args: A,
}

impl<A: KernelArgs> BoundKernel for Bound<A> {
    fn info(&self) -> &'static KernelInfo {
        self.kernel.info()
    }

    fn params(&self, out: &mut [*const c_void; MAX_PARAMS]) {
        self.args.params(out);
    }

    fn memory(&self, visit: &mut dyn FnMut(&'static str, u64)) {
        self.args.memory(&mut |name, memory| visit(name, memory.address));
    }

    unsafe fn emulate(&self, shape: LaunchShape, options: &EmuOptions, sink: Option<&Sink>) -> Result<()> {
        // SAFETY: the launch's contract covers what the emulator does not check.
        unsafe { emu::launch_printing(&self.kernel, shape, self.args, options, sink) }?;
        Ok(())
    }

    unsafe fn emulate_recorded(
        &self,
        shape: LaunchShape,
        options: &EmuOptions,
        sink: Option<&Sink>,
    ) -> Result<Arc<Traffic>> {
        // SAFETY: as above.
        Ok(unsafe { traffic::launch_recorded(&self.kernel, shape, self.args, options, sink) }?)
    }

    fn boxed(&self) -> Box<dyn BoundKernel> {
        Box::new(*self)
    }
}

/// Host memory that the device reaches: where each sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PinnedMemory {
    pub(crate) host: *mut u8,
    pub(crate) device: u64,
}

/// One end of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Host(*mut u8),
    Device(u64),
}

/// A device.
pub(crate) trait DeviceBackend: Send + Sync {
    fn info(&self) -> &DeviceInfo;
    /// Equal for two devices that reach each other's memory and streams.
    fn context(&self) -> usize;
    /// The GPU that it is, or is the emulator of.
    fn target(&self) -> Target;
    fn attributes(&self, kernel: &'static KernelInfo) -> Result<Option<KernelAttributes>>;
    /// Makes ready for a launch, whose shape is one that devices take.
    fn prepare(&self, kernel: &'static KernelInfo, shape: LaunchShape) -> Result<()>;

    /// Memory for `memory`, which has bytes.
    fn allocate(&self, memory: Memory) -> Result<u64>;
    /// # Safety
    /// `address` and `bytes` are of one `allocate` and are not used again.
    unsafe fn free(&self, address: u64, bytes: usize);
    /// Memory for `memory`, which has bytes. They are zeroed.
    fn allocate_pinned(&self, memory: Memory) -> Result<PinnedMemory>;
    /// # Safety
    /// `memory` and `bytes` are of one `allocate_pinned` and are not used again.
    unsafe fn free_pinned(&self, memory: PinnedMemory, bytes: usize);
    /// Whether [`host_uses`](Self::host_uses) is to be asked.
    fn watches_host(&self) -> bool {
        false
    }
    /// Refuses what the host must not do to pinned memory while work that touches it is under way.
    fn host_uses(&self, memory: PinnedMemory, bytes: usize, access: Access, at: Option<At>) -> Result<()> {
        let _ = (memory, bytes, access, at);
        Ok(())
    }

    /// Refuses memory that another library owns where the device is known not to reach it.
    fn check_foreign(&self, address: u64) -> Result<()> {
        let _ = address;
        Ok(())
    }

    /// A map of a tensor at `address`, whose shape is checked.
    fn tensor_map(&self, shape: &TensorMapShape, address: u64, writable: bool) -> Result<TensorMap>;

    /// Copies and waits; ordered with no stream.
    ///
    /// # Safety
    /// Both ends are valid for `bytes` and no other work touches them.
    unsafe fn copy_now(&self, to: Place, from: Place, bytes: usize) -> Result<()>;
    /// Fills and waits; ordered with no stream.
    ///
    /// # Safety
    /// As for `copy_now`.
    unsafe fn fill_now(&self, address: u64, byte: u8, bytes: usize) -> Result<()>;
    /// Who gets what kernels print; nobody in particular is standard error.
    fn print_to(&self, sink: Option<Sink>);
    /// Whether launches are timed from here on.
    fn record_times(&self, on: bool) -> Result<()> {
        let _ = on;
        Err(Error::NotTimed)
    }
    /// Waits for the launches that were timed, and forgets them.
    fn take_times(&self) -> Result<Vec<KernelTimes>> {
        Err(Error::NotTimed)
    }
    /// Waits for all work of the device's streams; for one that captures, up to where that began.
    fn synchronize(&self) -> Result<()>;

    fn stream(&self) -> Result<Box<dyn StreamBackend>>;
    /// A stream that another library owns.
    ///
    /// # Safety
    /// The contract of [`crate::Stream::from_raw`].
    unsafe fn foreign_stream(&self, raw: *mut c_void) -> Result<Box<dyn StreamBackend>>;
    fn event(&self) -> Result<Box<dyn EventBackend>>;
}

/// A stream. Whether it captures is known to the caller, which calls only what is allowed then.
pub(crate) trait StreamBackend: Send + Sync {
    /// The stream's number, where its order with others is checked; 0 elsewhere.
    fn number(&self) -> u64 {
        0
    }
    /// Whether whoever owns the stream captures it; asked of foreign streams.
    fn owner_captures(&self) -> Result<bool> {
        Ok(false)
    }
    /// Hands out the driver's handle (null on the CPU) to what puts anything but a launch into the stream.
    #[cfg_attr(not(all(target_os = "linux", target_arch = "x86_64")), expect(dead_code))]
    fn put_other(&self, put: &mut dyn FnMut(*mut c_void) -> Result<()>) -> Result<()>;

    /// # Safety
    /// The contract of [`crate::Stream::launch`].
    unsafe fn launch(&self, kernel: &dyn BoundKernel, shape: LaunchShape, at: At) -> Result<()>;
    /// While it captures: launches, and returns the node's number in the graph to be.
    ///
    /// # Safety
    /// The contract of [`crate::Stream::launch`].
    unsafe fn launch_node(&self, kernel: &dyn BoundKernel, shape: LaunchShape, at: At) -> Result<usize>;
    /// # Safety
    /// Both ends stay valid for `bytes` until the work is done, and no other work touches them.
    unsafe fn copy(&self, to: Place, from: Place, bytes: usize, at: At) -> Result<()>;
    /// # Safety
    /// As for `copy`.
    unsafe fn fill_u8(&self, address: u64, value: u8, bytes: usize, at: At) -> Result<()>;
    /// # Safety
    /// As for `copy`; `address` is a multiple of 4.
    unsafe fn fill_u32(&self, address: u64, value: u32, words: usize, at: At) -> Result<()>;
    /// Waits. What kernels have printed is for [`hand_over`](Self::hand_over).
    fn synchronize(&self) -> Result<()>;
    /// Hands over what kernels have printed, when `synchronize` has come to `waited`, and returns that. The
    /// caller holds no lock: sinks do what they like.
    fn hand_over(&self, waited: Result<()>) -> Result<()> {
        waited
    }

    fn begin_capture(&self) -> Result<()>;
    /// Ends the capture, also one that failed.
    fn end_capture(&self) -> Result<Box<dyn GraphBackend>>;
}

/// An event.
pub(crate) trait EventBackend: Send + Sync {
    fn record(&self, stream: &dyn StreamBackend) -> Result<()>;
    /// Makes `stream` wait for the event.
    fn hold(&self, stream: &dyn StreamBackend) -> Result<()>;
    fn synchronize(&self) -> Result<()>;
    /// Milliseconds from `start` to `self`. Both were recorded on this device.
    fn elapsed_ms(&self, start: &dyn EventBackend) -> Result<f64>;
    /// The driver's handle; null on the CPU.
    #[cfg_attr(not(all(target_os = "linux", target_arch = "x86_64")), expect(dead_code))]
    fn raw(&self) -> *mut c_void;
    /// When it was recorded, on the CPU.
    fn instant(&self) -> Option<std::time::Instant>;
}

/// Captured work.
pub(crate) trait GraphBackend: Send + Sync {
    /// How many steps it has.
    fn len(&self) -> usize;
    fn instantiate(&self) -> Result<Box<dyn GraphExecBackend>>;
}

/// Captured work, ready to run.
pub(crate) trait GraphExecBackend: Send + Sync {
    /// # Safety
    /// The contract of [`crate::GraphExec::launch`].
    unsafe fn launch(&self, stream: &dyn StreamBackend, at: At) -> Result<()>;
    /// # Safety
    /// The contract of [`crate::Stream::launch`], from the next launch of the graph on.
    unsafe fn update(
        &mut self,
        node: usize,
        kernel: &dyn BoundKernel,
        shape: LaunchShape,
        at: At,
    ) -> Result<()>;
}
