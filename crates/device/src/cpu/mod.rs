//! The CPU backend: host memory, and the emulator for launches. Work is done in the call that asks for it,
//! and a capture keeps the calls for later.
//!
//! [`handles`] is what other crates take from it.

pub mod handles;
mod order;
mod quarantine;
mod stream;

use crate::backend::{At, DeviceBackend, EventBackend, PinnedMemory, Place, StreamBackend};
use crate::device::{BackendKind, DeviceInfo, KernelAttributes};
use crate::error::{Error, Result};
use crate::unordered::{Access, Memory};
use order::{Clock, Order};
use simt::emu::{self, EmuOptions, STREAM_CHECK_VARIABLE, Target, allocations};
use simt::print::Sink;
use simt::{Global, GlobalMut, KernelInfo, LaunchShape, TensorMap, TensorMapShape};
use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Alignment of every allocation, as on the GPU.
const ALIGN: usize = 256;
/// What fresh memory holds: neither zeros, nor a small integer, nor a tame float.
const FRESH: u8 = 0xa5;
/// Allocations from this size on are compared with the memory that is free: the system grants them without
/// having them, and ends the process later.
const LARGE: usize = 64 << 20;

pub(crate) struct CpuDevice {
    info: DeviceInfo,
    options: EmuOptions,
    target: Target,
    /// Where devices are told apart, with `memory_check`; else 0.
    id: u64,
    /// With `stream_check`.
    order: Option<Arc<Order>>,
    sink: Arc<Mutex<Option<Sink>>>,
    quarantine: quarantine::Quarantine,
}

impl CpuDevice {
    pub(crate) fn new(options: EmuOptions) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        // A name that no target has is an error of each launch.
        let target = options.emulated().unwrap_or_default();
        let of = if target == Target::default() { String::new() } else { format!(" of {target}") };
        let info = DeviceInfo {
            backend: BackendKind::Cpu,
            ordinal: 0,
            name: format!("CPU emulator{of} ({threads} hardware threads)"),
            compute_capability: None,
            multiprocessors: threads,
            memory_bytes: memory("MemTotal:"),
            l2_bytes: None,
            memory_bandwidth: None,
            max_shared_bytes: target.max_shared_bytes(),
            driver_version: None,
        };
        static DEVICES: AtomicU64 = AtomicU64::new(1);
        let id = if options.memory_check { DEVICES.fetch_add(1, Ordering::Relaxed) } else { 0 };
        let asked = std::env::var_os(STREAM_CHECK_VARIABLE).is_some_and(|value| value != "0");
        let order = (options.stream_check || asked).then(Arc::default);
        CpuDevice { info, options, target, id, order, sink: Arc::default(), quarantine: Default::default() }
    }

    fn allocate_layout(&self, bytes: usize, zeroed: bool) -> Result<*mut u8> {
        let refuse =
            |free| Error::OutOfMemory { device: self.info.name.clone(), requested: bytes as u64, free };
        let layout = Layout::from_size_align(bytes, ALIGN).map_err(|_| refuse(None))?;
        if bytes >= LARGE
            && let Some(free) = memory("MemAvailable:")
            && bytes as u64 > free
        {
            return Err(refuse(Some(free)));
        }
        // SAFETY: callers ask for at least one byte.
        let memory = unsafe { if zeroed { alloc_zeroed(layout) } else { alloc(layout) } };
        if memory.is_null() { Err(refuse(None)) } else { Ok(memory) }
    }

    fn made(&self, address: u64, memory: Memory) {
        if let Some(order) = &self.order {
            order.made(address, memory);
        }
    }

    fn forget(&self, address: u64, bytes: usize) {
        if let Some(order) = &self.order {
            order.forget(address, bytes);
        }
    }
}

impl DeviceBackend for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn context(&self) -> usize {
        self.id as usize
    }

    fn target(&self) -> Target {
        self.target
    }

    fn attributes(&self, _kernel: &'static KernelInfo) -> Result<Option<KernelAttributes>> {
        Ok(None)
    }

    fn prepare(&self, kernel: &'static KernelInfo, _shape: LaunchShape) -> Result<()> {
        let (only, capability) = (kernel.only_sm, self.target.number());
        if ![0, capability].contains(&only) {
            return Err(Error::KernelOnly { kernel: kernel.name, only, capability });
        }
        Ok(())
    }

    fn allocate(&self, memory: Memory) -> Result<u64> {
        let bytes = memory.bytes();
        let host = self.allocate_layout(bytes, false)?;
        // SAFETY: just allocated with `bytes`.
        unsafe { host.write_bytes(FRESH, bytes) };
        let address = host.expose_provenance() as u64;
        if self.options.memory_check {
            allocations::announce(address, bytes, self.id);
        }
        self.made(address, memory);
        Ok(address)
    }

    unsafe fn free(&self, address: u64, bytes: usize) {
        self.forget(address, bytes);
        if self.options.memory_check {
            // SAFETY: by the contract, what `allocate` gave for `bytes`, and not used again.
            return unsafe { self.quarantine.put(address, bytes) };
        }
        // SAFETY: by the contract, what `allocate` gave for `bytes`; the layout was valid then.
        unsafe { dealloc(host(address), Layout::from_size_align_unchecked(bytes, ALIGN)) };
    }

    fn allocate_pinned(&self, memory: Memory) -> Result<PinnedMemory> {
        let host = self.allocate_layout(memory.bytes(), true)?;
        let device = host.expose_provenance() as u64;
        self.made(device, memory);
        Ok(PinnedMemory { host, device })
    }

    unsafe fn free_pinned(&self, memory: PinnedMemory, bytes: usize) {
        self.forget(memory.device, bytes);
        // SAFETY: by the contract, what `allocate_pinned` gave for `bytes`.
        unsafe { dealloc(memory.host, Layout::from_size_align_unchecked(bytes, ALIGN)) };
    }

    fn watches_host(&self) -> bool {
        self.order.is_some()
    }

    fn host_uses(&self, memory: PinnedMemory, bytes: usize, access: Access, at: Option<At>) -> Result<()> {
        match &self.order {
            // What failed leaves work behind that nobody waits for: the failure is what counts.
            Some(order) if access == Access::Free && order.has_failed() => Ok(()),
            Some(order) => order.host(memory.device, bytes, access, at),
            None => Ok(()),
        }
    }

    fn tensor_map(&self, shape: &TensorMapShape, address: u64, writable: bool) -> Result<TensorMap> {
        let bytes = shape.bytes() as usize;
        // SAFETY: the buffer has so many bytes; that it lives is in the contract of launches.
        Ok(unsafe {
            match writable {
                true => emu::tensor_map_mut(GlobalMut::<u8>::from_raw(address, bytes), shape),
                false => emu::tensor_map(Global::<u8>::from_raw(address, bytes), shape),
            }
        }?)
    }

    unsafe fn copy_now(&self, to: Place, from: Place, bytes: usize) -> Result<()> {
        // SAFETY: by the contract, both ends are valid.
        unsafe { copy(to, from, bytes) };
        Ok(())
    }

    unsafe fn fill_now(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: by the contract, valid for `bytes`.
        unsafe { host(address).write_bytes(byte, bytes) };
        allocations::write(address, bytes);
        Ok(())
    }

    fn print_to(&self, sink: Option<Sink>) {
        let before = std::mem::replace(&mut *self.sink.lock().unwrap_or_else(PoisonError::into_inner), sink);
        // What a sink drops may use the device.
        drop(before);
    }

    fn synchronize(&self) -> Result<()> {
        if let Some(order) = &self.order {
            order.host_waits_for_all();
        }
        Ok(())
    }

    fn stream(&self) -> Result<Box<dyn StreamBackend>> {
        let (options, device, order) = (self.options, self.id, self.order.clone());
        let sink = self.sink.clone();
        Ok(Box::new(stream::CpuStream::new(stream::Setting { options, device, order, sink })))
    }

    unsafe fn foreign_stream(&self, _: *mut c_void) -> Result<Box<dyn StreamBackend>> {
        // Work is done in the call: it comes behind all that its owner has had done.
        self.stream()
    }

    fn event(&self) -> Result<Box<dyn EventBackend>> {
        Ok(Box::new(CpuEvent { at: Mutex::new(None), order: self.order.clone(), clock: Mutex::default() }))
    }
}

/// The host's pointer for an address of this backend.
fn host(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// # Safety
/// Both ends are valid for `bytes`.
unsafe fn copy(to: Place, from: Place, bytes: usize) {
    let pointer = |place| match place {
        Place::Host(pointer) => pointer,
        Place::Device(address) => host(address),
    };
    // SAFETY: this function's contract; `copy` allows overlap.
    unsafe { std::ptr::copy(pointer(from), pointer(to), bytes) };
    match (to, from) {
        (Place::Device(to), Place::Device(from)) => allocations::copy(to, from, bytes),
        (Place::Device(to), Place::Host(_)) => allocations::write(to, bytes),
        (Place::Host(_), _) => {}
    }
}

/// A line of the system's account of its memory, in bytes.
fn memory(line: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let value = text.lines().find_map(|l| l.strip_prefix(line))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

struct CpuEvent {
    at: Mutex<Option<Instant>>,
    order: Option<Arc<Order>>,
    /// What is done when the event has come, with `stream_check`.
    clock: Mutex<Clock>,
}

impl CpuEvent {
    fn clock(&self) -> std::sync::MutexGuard<'_, Clock> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EventBackend for CpuEvent {
    fn record(&self, stream: &dyn StreamBackend) -> Result<()> {
        if let Some(order) = &self.order {
            *self.clock() = order.record(stream.number());
        }
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        Ok(())
    }

    fn hold(&self, stream: &dyn StreamBackend) -> Result<()> {
        // Work is done in the call, so whatever came before the event is done.
        if let Some(order) = &self.order {
            order.hold(stream.number(), &self.clock());
        }
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        if let Some(order) = &self.order {
            order.host_waits(&self.clock());
        }
        Ok(())
    }

    fn elapsed_ms(&self, start: &dyn EventBackend) -> Result<f64> {
        let (Some(start), Some(end)) = (start.instant(), self.instant()) else {
            return Err(Error::EventNotRecorded);
        };
        let after = end.saturating_duration_since(start).as_secs_f64();
        let before = start.saturating_duration_since(end).as_secs_f64();
        Ok((after - before) * 1e3)
    }

    fn raw(&self) -> *mut c_void {
        std::ptr::null_mut()
    }

    fn instant(&self) -> Option<Instant> {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
