//! Work in order.

use crate::backend::{Bound, Place, StreamBackend};
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::graph::{Graph, NodeId};
use crate::limits;
use crate::pinned::Pinned;
use bytemuck::Pod;
use simt::{Kernel, KernelArgs, LaunchShape};
use std::ffi::c_void;
use std::fmt;
use std::ops::RangeBounds;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, TryLockError};

/// Numbers the captures of the process, from 1.
static NEXT_CAPTURE: AtomicU64 = AtomicU64::new(1);

/// Work that a device does in the order of the calls.
///
/// On a GPU the calls return at once, and streams run beside each other; the CPU backend does the work in the
/// call. A stream may be used from several threads; the order of their work is then that of their calls.
/// Dropping a stream waits for its work, unless [another library owns it](Self::from_raw).
pub struct Stream {
    backend: Box<dyn StreamBackend>,
    device: Device,
    /// Whether another library owns it.
    foreign: bool,
    /// The capture that runs; 0 for none.
    capture: AtomicU64,
    /// Read by what must not be recorded, for as long as it takes; a capture begins when all of them are
    /// done.
    outside: RwLock<()>,
}

impl Stream {
    /// A new stream of `device`, which waits for no other stream.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Stream {
            backend: device.backend().stream()?,
            device: device.clone(),
            foreign: false,
            capture: AtomicU64::new(0),
            outside: RwLock::new(()),
        })
    }

    /// A stream that another library owns, such as the current one of PyTorch. Work goes behind what is in
    /// it, and where its owner captures it, into the owner's graph: nothing is different for launches, copies
    /// and fills; what waits for the stream is refused then ([`Error::Capturing`]). To make one costs no call
    /// of the driver; dropping it waits for nothing.
    ///
    /// On a GPU `raw` is a `CUstream` (the runtime's `cudaStream_t` is the same), null for the legacy default
    /// stream; on the CPU, where work is done in the call, it is not looked at.
    ///
    /// # Safety
    /// - `raw` is null or a stream of the device's primary context, and stays until the value is dropped;
    /// - between two launches that this value puts into the stream nothing is put there by others: what
    ///   [overlaps](simt::KernelInfo::overlaps) the launch before it counts on that. The first launch of a
    ///   value waits for all that is in the stream: so make one for each time that the stream is yours;
    /// - kernels launched by this value have ended before the device and all that was made of it are dropped:
    ///   with the last of these the kernels go, and the host's memory to which they print.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn from_raw(device: &Device, raw: *mut c_void) -> Result<Self> {
        Ok(Stream {
            // SAFETY: this function's contract.
            backend: unsafe { device.backend().foreign_stream(raw) }?,
            device: device.clone(),
            foreign: true,
            capture: AtomicU64::new(0),
            outside: RwLock::new(()),
        })
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn backend(&self) -> &dyn StreamBackend {
        &*self.backend
    }

    /// Launches `kernel` over `shape`.
    ///
    /// It runs when what is in the stream before it is done. A kernel that
    /// [`overlaps`](simt::KernelInfo::overlaps) may be placed on the GPU before, where a launch is what comes
    /// before it; it then waits there.
    ///
    /// # Safety
    /// Until the launch has finished (for a capture: until each run of the graph has):
    /// - the memory behind every handle in `args` is there, on this device, and long enough for what the
    ///   kernel does at this shape;
    /// - the kernel has no race at this shape, and nothing else writes what it reads or touches what it
    ///   writes: no other stream, no other thread, and for pinned memory not the host.
    ///
    /// The emulator checks accesses against the handles' lengths, and with
    /// [`race_check`](simt::emu::EmuOptions::race_check) looks for races: run a new kernel there first. With
    /// [`stream_check`](simt::emu::EmuOptions::stream_check) it looks at what other streams and the host do.
    ///
    /// # Errors
    /// [`Error::Shape`], the same on every device; [`Error::KernelMissing`]; [`Error::Fault`] and
    /// [`Error::Unordered`] on the CPU; or what the driver reports. A GPU reports what goes wrong inside the
    /// kernel at a later call.
    #[track_caller]
    pub unsafe fn launch<A: KernelArgs>(
        &self,
        kernel: &Kernel<A>,
        shape: LaunchShape,
        args: A,
    ) -> Result<()> {
        limits::check(kernel.info(), shape, self.device.info().max_shared_bytes)?;
        let bound = Bound { kernel: *kernel, args };
        // SAFETY: this function's contract.
        unsafe { self.backend.launch(&bound, shape, Location::caller()) }
    }

    /// [`launch`](Self::launch) while the stream captures, returning the launch's node, for
    /// [`GraphExec::update`](crate::GraphExec::update).
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    ///
    /// # Errors
    /// [`Error::NotCapturing`], and as [`launch`](Self::launch).
    #[track_caller]
    pub unsafe fn launch_node<A: KernelArgs>(
        &self,
        kernel: &Kernel<A>,
        shape: LaunchShape,
        args: A,
    ) -> Result<NodeId> {
        let graph = self.capture.load(Ordering::Acquire);
        if graph == 0 {
            return Err(Error::NotCapturing { kernel: kernel.name() });
        }
        limits::check(kernel.info(), shape, self.device.info().max_shared_bytes)?;
        let bound = Bound { kernel: *kernel, args };
        // SAFETY: this function's contract.
        let index = unsafe { self.backend.launch_node(&bound, shape, Location::caller()) }?;
        Ok(NodeId { graph, index, overlaps: kernel.info().overlaps })
    }

    /// Records what `record` puts into this stream, instead of running it. Returns the graph and what
    /// `record` returned, usually the nodes to update later.
    ///
    /// Buffers may be made, read and dropped meanwhile. What waits for this stream, or belongs to no graph,
    /// is refused with [`Error::Capturing`].
    ///
    /// # Errors
    /// [`Error::Capturing`] inside another capture of this stream; [`Error::ForeignStream`] for one
    /// that another library owns; the error of `record`, which ends the capture; or what the driver reports.
    pub fn capture<R>(&self, record: impl FnOnce(&Stream) -> Result<R>) -> Result<(Graph, R)> {
        if self.foreign {
            return Err(Error::ForeignStream { doing: "capturing" });
        }
        let id = NEXT_CAPTURE.fetch_add(1, Ordering::Relaxed);
        if self.capture.compare_exchange(0, id, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Err(Error::Capturing { doing: "starting a capture" });
        }
        // From here on nothing new passes `outside_capture`; what another thread has begun ends first.
        drop(self.outside.write().unwrap_or_else(PoisonError::into_inner));
        if let Err(error) = self.backend.begin_capture() {
            self.capture.store(0, Ordering::Release);
            return Err(error);
        }
        // Also when `record` panics, the stream leaves the capture.
        let running = Capturing { stream: self, ended: false };
        let result = record(self);
        let graph = running.end();
        let result = result?;
        Ok((Graph { backend: graph?, device: self.device.clone(), id }, result))
    }

    /// Whether a [`capture`](Self::capture) is recording what comes into the stream, or one of the library
    /// that owns it.
    pub fn is_capturing(&self) -> bool {
        self.capture.load(Ordering::Acquire) != 0
            || (self.foreign && self.backend.owner_captures().unwrap_or(false))
    }

    /// Waits until all work of the stream is done.
    ///
    /// # Errors
    /// [`Error::Capturing`], or what a kernel did wrong.
    pub fn synchronize(&self) -> Result<()> {
        let outside = self.outside_capture("waiting for the stream")?;
        self.synchronized(outside)
    }

    /// Waits, lets captures begin again, and hands over what kernels have printed: a sink may capture.
    fn synchronized(&self, outside: RwLockReadGuard<'_, ()>) -> Result<()> {
        let waited = self.backend.synchronize();
        drop(outside);
        self.backend.hand_over(waited)
    }

    /// Puts `event` into the stream.
    ///
    /// # Errors
    /// [`Error::WrongDevice`], [`Error::Capturing`], or what the driver reports.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.device.check_same(&event.device, "the event")?;
        let _outside = self.outside_capture("recording an event")?;
        event.backend.record(self.backend())?;
        event.recorded.store(true, Ordering::Release);
        Ok(())
    }

    /// Makes the work that follows in this stream wait for `event`.
    ///
    /// # Errors
    /// [`Error::EventNotRecorded`], [`Error::WrongDevice`], [`Error::Capturing`], or what the driver reports.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.device.check_same(&event.device, "the event")?;
        let _outside = self.outside_capture("waiting for an event")?;
        event.check_recorded()?;
        event.backend.hold(self.backend())
    }

    /// Sets every byte of `range` of `buffer` to `value`.
    ///
    /// # Errors
    /// [`Error::Range`], [`Error::WrongDevice`], [`Error::Unordered`] on the CPU, or what the driver reports.
    #[track_caller]
    pub fn fill_u8<T: Pod>(
        &self,
        buffer: &mut Buffer<T>,
        range: impl RangeBounds<usize>,
        value: u8,
    ) -> Result<()> {
        self.device.check_same(buffer.device(), "the buffer")?;
        let range = buffer.checked(range)?;
        let bytes = range.len() * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: inside the buffer, which is borrowed mutably; dropping it waits for the device.
        unsafe { self.backend.fill_u8(buffer.address_of(range.start), value, bytes, Location::caller()) }
    }

    /// Sets every 4-byte word of `range` of `buffer` to `value`.
    ///
    /// # Errors
    /// [`Error::FillSize`] if the range is no whole number of words or does not start at one, and as
    /// [`fill_u8`](Self::fill_u8).
    #[track_caller]
    pub fn fill_u32<T: Pod>(
        &self,
        buffer: &mut Buffer<T>,
        range: impl RangeBounds<usize>,
        value: u32,
    ) -> Result<()> {
        self.device.check_same(buffer.device(), "the buffer")?;
        let range = buffer.checked(range)?;
        let bytes = range.len() * size_of::<T>();
        let address = buffer.address_of(range.start);
        if !bytes.is_multiple_of(4) || !address.is_multiple_of(4) {
            return Err(Error::FillSize { bytes });
        }
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as above, and aligned.
        unsafe { self.backend.fill_u32(address, value, bytes / 4, Location::caller()) }
    }

    /// Copies `range` of `from` to `to`, from its element `start` on.
    ///
    /// # Errors
    /// [`Error::Range`], [`Error::WrongDevice`], [`Error::Unordered`] on the CPU, or what the driver reports.
    #[track_caller]
    pub fn copy<T: Pod>(
        &self,
        from: &Buffer<T>,
        range: impl RangeBounds<usize>,
        to: &mut Buffer<T>,
        start: usize,
    ) -> Result<()> {
        self.device.check_same(from.device(), "the source buffer")?;
        self.device.check_same(to.device(), "the target buffer")?;
        let range = from.checked(range)?;
        let target = to.sized(start, range.len())?;
        let (target, source) = (to.address_of(target.start), from.address_of(range.start));
        // SAFETY: inside two buffers that the borrows keep apart; dropping either waits for the device.
        unsafe { self.copy_bytes(Place::Device(target), Place::Device(source), range.len() * size_of::<T>()) }
    }

    /// Copies `range` of `buffer` to its elements from `start` on, without memory between them.
    ///
    /// # Errors
    /// [`Error::Overlap`] if the two have an element in common, and as [`copy`](Self::copy).
    #[track_caller]
    pub fn copy_within<T: Pod>(
        &self,
        buffer: &mut Buffer<T>,
        range: impl RangeBounds<usize>,
        start: usize,
    ) -> Result<()> {
        self.device.check_same(buffer.device(), "the buffer")?;
        let range = buffer.checked(range)?;
        let target = buffer.sized(start, range.len())?;
        if range.start < target.end && target.start < range.end {
            return Err(Error::Overlap { start: range.start, end: range.end, to: start });
        }
        let (target, source) = (buffer.address_of(target.start), buffer.address_of(range.start));
        // SAFETY: two parts of a buffer that is borrowed mutably, apart as just checked; dropping it waits
        // for the device.
        unsafe { self.copy_bytes(Place::Device(target), Place::Device(source), range.len() * size_of::<T>()) }
    }

    /// Copies `values` to `to`, from its element `start` on, and waits until they are there.
    ///
    /// # Errors
    /// [`Error::Capturing`], and as [`copy`](Self::copy).
    #[track_caller]
    pub fn upload<T: Pod>(&self, values: &[T], to: &mut Buffer<T>, start: usize) -> Result<()> {
        self.device.check_same(to.device(), "the buffer")?;
        let outside = self.outside_capture("copying from a slice")?;
        let range = to.sized(start, values.len())?;
        let from = Place::Host(values.as_ptr().cast_mut().cast());
        // SAFETY: both are valid, and this call waits before the borrows end.
        unsafe { self.copy_bytes(Place::Device(to.address_of(range.start)), from, size_of_val(values)) }?;
        self.synchronized(outside)
    }

    /// Copies elements of `from`, from `start` on, to `values`, after the work already in the stream, and
    /// waits until they are there.
    ///
    /// # Errors
    /// [`Error::Capturing`], and as [`copy`](Self::copy).
    #[track_caller]
    pub fn download<T: Pod>(&self, from: &Buffer<T>, start: usize, values: &mut [T]) -> Result<()> {
        self.device.check_same(from.device(), "the buffer")?;
        let outside = self.outside_capture("copying to a slice")?;
        let range = from.sized(start, values.len())?;
        let to = Place::Host(values.as_mut_ptr().cast());
        // SAFETY: both are valid, and this call waits before the borrows end.
        unsafe { self.copy_bytes(to, Place::Device(from.address_of(range.start)), size_of_val(values)) }?;
        self.synchronized(outside)
    }

    /// Copies `range` of `from` to `to`, from its element `start` on, without waiting.
    ///
    /// # Safety
    /// Until the copy is done (for a capture: until each run of the graph is), `from` is neither dropped nor
    /// written, and `to` is touched by work ordered with this copy only.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    #[track_caller]
    pub unsafe fn upload_async<T: Pod>(
        &self,
        from: &Pinned<T>,
        range: impl RangeBounds<usize>,
        to: &mut Buffer<T>,
        start: usize,
    ) -> Result<()> {
        self.device.check_same(from.device(), "the pinned memory")?;
        self.device.check_same(to.device(), "the buffer")?;
        let range = from.checked(range)?;
        let target = to.sized(start, range.len())?;
        let (target, source) = (to.address_of(target.start), from.host_address(range.start));
        // SAFETY: checked ranges, and this function's contract.
        unsafe { self.copy_bytes(Place::Device(target), Place::Host(source), range.len() * size_of::<T>()) }
    }

    /// Copies `range` of `from` to `to`, from its element `start` on, without waiting.
    ///
    /// # Safety
    /// Until the copy is done (for a capture: until each run of the graph is), `to` is neither dropped nor
    /// read nor written, and `from` is written by work ordered with this copy only.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    #[track_caller]
    pub unsafe fn download_async<T: Pod>(
        &self,
        from: &Buffer<T>,
        range: impl RangeBounds<usize>,
        to: &mut Pinned<T>,
        start: usize,
    ) -> Result<()> {
        self.device.check_same(from.device(), "the buffer")?;
        self.device.check_same(to.device(), "the pinned memory")?;
        let range = from.checked(range)?;
        let target = to.checked(start..start.saturating_add(range.len()))?;
        let (target, source) = (to.host_address(target.start), from.address_of(range.start));
        // SAFETY: checked ranges, and this function's contract.
        unsafe { self.copy_bytes(Place::Host(target), Place::Device(source), range.len() * size_of::<T>()) }
    }

    /// # Safety
    /// The contract of [`StreamBackend::copy`].
    #[track_caller]
    unsafe fn copy_bytes(&self, to: Place, from: Place, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: this function's contract.
        unsafe { self.backend.copy(to, from, bytes, Location::caller()) }
    }

    /// Keeps captures from beginning while the guard lives: for work that waits, which no capture can hold.
    /// `doing` says what that work is.
    ///
    /// # Errors
    /// [`Error::Capturing`] where one runs or is about to.
    pub fn outside_capture(&self, doing: &'static str) -> Result<RwLockReadGuard<'_, ()>> {
        // Not a blocking read: a capture that waits for other guards would let this one wait for itself.
        let guard = match self.outside.try_read() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(Error::Capturing { doing }),
        };
        let captured =
            self.capture.load(Ordering::Acquire) != 0 || (self.foreign && self.backend.owner_captures()?);
        if captured { Err(Error::Capturing { doing }) } else { Ok(guard) }
    }
}

/// A capture that runs.
struct Capturing<'a> {
    stream: &'a Stream,
    ended: bool,
}

impl Capturing<'_> {
    fn end(mut self) -> Result<Box<dyn crate::backend::GraphBackend>> {
        self.ended = true;
        let graph = self.stream.backend.end_capture();
        self.leave();
        graph
    }

    fn leave(&self) {
        self.stream.capture.store(0, Ordering::Release);
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        if !self.ended {
            if let Err(error) = self.stream.backend.end_capture() {
                tracing::debug!(%error, "a capture that panicked did not end well");
            }
            self.leave();
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", &self.device.info().name).finish_non_exhaustive()
    }
}
