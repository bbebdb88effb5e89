//! The CPU backend: host memory, and the emulator for launches. Work is done in the call that asks for it,
//! and a capture keeps the calls for later.
//!
//! [`handles`] is what other crates take from it.

pub mod handles;
mod quarantine;
mod stream;

use crate::backend::{DeviceBackend, EventBackend, PinnedMemory, Place, StreamBackend};
use crate::device::{BackendKind, DeviceInfo, KernelAttributes};
use crate::error::{Error, Result};
use simt::KernelInfo;
use simt::emu::{EmuOptions, MAX_SHARED_BYTES, allocations};
use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
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
    /// Where devices are told apart, with `memory_check`; else 0.
    id: u64,
    quarantine: quarantine::Quarantine,
}

impl CpuDevice {
    pub(crate) fn new(options: EmuOptions) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        let info = DeviceInfo {
            backend: BackendKind::Cpu,
            ordinal: 0,
            name: format!("CPU emulator ({threads} hardware threads)"),
            compute_capability: None,
            multiprocessors: threads,
            memory_bytes: memory("MemTotal:"),
            l2_bytes: None,
            memory_bandwidth: None,
            max_shared_bytes: MAX_SHARED_BYTES,
            driver_version: None,
        };
        static DEVICES: AtomicU64 = AtomicU64::new(1);
        let id = if options.memory_check { DEVICES.fetch_add(1, Ordering::Relaxed) } else { 0 };
        CpuDevice { info, options, id, quarantine: Default::default() }
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
}

impl DeviceBackend for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn context(&self) -> usize {
        self.id as usize
    }

    fn attributes(&self, _kernel: &'static KernelInfo) -> Result<Option<KernelAttributes>> {
        Ok(None)
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let memory = self.allocate_layout(bytes, false)?;
        // SAFETY: just allocated with `bytes`.
        unsafe { memory.write_bytes(FRESH, bytes) };
        if self.options.memory_check {
            allocations::announce(memory as u64, bytes, self.id);
        }
        Ok(memory.expose_provenance() as u64)
    }

    unsafe fn free(&self, address: u64, bytes: usize) {
        if self.options.memory_check {
            // SAFETY: by the contract, what `allocate` gave for `bytes`, and not used again.
            return unsafe { self.quarantine.put(address, bytes) };
        }
        // SAFETY: by the contract, what `allocate` gave for `bytes`; the layout was valid then.
        unsafe { dealloc(host(address), Layout::from_size_align_unchecked(bytes, ALIGN)) };
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<PinnedMemory> {
        let host = self.allocate_layout(bytes, true)?;
        Ok(PinnedMemory { host, device: host.expose_provenance() as u64 })
    }

    unsafe fn free_pinned(&self, memory: PinnedMemory, bytes: usize) {
        // SAFETY: by the contract, what `allocate_pinned` gave for `bytes`.
        unsafe { dealloc(memory.host, Layout::from_size_align_unchecked(bytes, ALIGN)) };
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

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn stream(&self) -> Result<Box<dyn StreamBackend>> {
        Ok(Box::new(stream::CpuStream::new(self.options, self.id)))
    }

    fn event(&self) -> Result<Box<dyn EventBackend>> {
        Ok(Box::new(CpuEvent { at: Mutex::new(None) }))
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
}

impl EventBackend for CpuEvent {
    fn record(&self, _stream: &dyn StreamBackend) -> Result<()> {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        Ok(())
    }

    fn hold(&self, _stream: &dyn StreamBackend) -> Result<()> {
        // Work is done in the call, so whatever came before the event is done.
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
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
