//! The CUDA backend, over the driver bindings of `cust`.

mod context;
mod ffi;
mod graph;
mod mapped;
mod module;
mod records;
mod ring;
mod stream;
mod tiles;
mod times;

use crate::backend::{DeviceBackend, EventBackend, PinnedMemory, Place, StreamBackend};
use crate::device::{DeviceInfo, KernelAttributes, PtxImage};
use crate::error::{Error, Result};
use crate::times::KernelTimes;
use crate::unordered::Memory;
use context::Context;
use cust::sys::{CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CUpointer_attribute};
use ffi::{Relaxed, check, cu, note};
use module::Module;
use simt::emu::Target;
use simt::print::Sink;
use simt::{KernelInfo, LaunchShape, TensorMap, TensorMapShape};
use std::ffi::c_void;
use std::panic::Location;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};
use stream::{CudaEvent, CudaStream, copy_async};

/// The driver's code for memory that is not there.
const OUT_OF_MEMORY: u32 = 2;

/// The driver's code for an argument that it does not take.
const INVALID_VALUE: u32 = 1;

/// Every GPU that the driver sees.
pub(crate) fn devices() -> Result<Vec<DeviceInfo>> {
    let count = context::start()?;
    (0..count).map(|ordinal| context::info(context::device(ordinal, count)?, ordinal)).collect()
}

pub(crate) struct CudaDevice {
    info: DeviceInfo,
    module: Arc<Module>,
    context: Arc<Context>,
    /// Carries the copies and fills that no stream is named for: one at a time.
    own_stream: Mutex<CudaStream>,
}

impl CudaDevice {
    pub(crate) fn open(ordinal: u32, images: &[PtxImage]) -> Result<Self> {
        let count = context::start()?;
        let raw = context::device(ordinal, count)?;
        let info = context::info(raw, ordinal)?;
        let context = Arc::new(Context::retain(raw)?);
        let module = Arc::new(Module::load(&context, &info, images)?);
        let own_stream = Mutex::new(CudaStream::new(&context, &module)?);
        Ok(CudaDevice { info, module, context, own_stream })
    }

    /// Puts work into the device's own stream and waits for it.
    fn on_own_stream(&self, put: impl FnOnce(&CudaStream) -> Result<()>) -> Result<()> {
        let stream = self.own_stream.lock().unwrap_or_else(PoisonError::into_inner);
        put(&stream)?;
        let waited = stream.synchronize();
        // A sink may copy.
        drop(stream);
        self.module.handing_over(waited)
    }

    /// The driver's result of an allocation.
    fn check_memory(&self, code: u32, bytes: usize, doing: &str) -> Result<()> {
        if code != OUT_OF_MEMORY {
            return check(code, || format!("{doing} of {bytes} bytes"));
        }
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid for a write.
        let known = unsafe { cu!(cuMemGetInfo_v2(&mut free, &mut total)) } == 0;
        Err(Error::OutOfMemory {
            device: self.info.name.clone(),
            requested: bytes as u64,
            free: known.then_some(free as u64),
        })
    }
}

impl DeviceBackend for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn context(&self) -> usize {
        self.context.raw().addr()
    }

    fn attributes(&self, kernel: &'static KernelInfo) -> Result<Option<KernelAttributes>> {
        Ok(Some(self.module.function(kernel)?.attributes))
    }

    fn target(&self) -> Target {
        self.info.compute_capability.map_or_else(Target::default, Target::of_gpu)
    }

    fn prepare(&self, kernel: &'static KernelInfo, shape: LaunchShape) -> Result<()> {
        self.context.bind()?;
        self.module.function(kernel)?.prepare(shape)
    }

    fn allocate(&self, memory: Memory) -> Result<u64> {
        let bytes = memory.bytes();
        self.context.bind()?;
        let _relaxed = Relaxed::enter();
        let mut address = 0;
        // SAFETY: `address` is valid for a write.
        let code = unsafe { cu!(cuMemAlloc_v2(&mut address, bytes)) };
        self.check_memory(code, bytes, "allocation")?;
        Ok(address)
    }

    unsafe fn free(&self, address: u64, _bytes: usize) {
        if self.context.bind_quietly() {
            let _relaxed = Relaxed::enter();
            // SAFETY: by the contract, what `allocate` gave, and not used again.
            note(unsafe { cu!(cuMemFree_v2(address)) }, "freeing device memory");
        }
    }

    fn allocate_pinned(&self, memory: Memory) -> Result<PinnedMemory> {
        let bytes = memory.bytes();
        self.context.bind()?;
        let _relaxed = Relaxed::enter();
        let mut host: *mut c_void = null_mut();
        let flags = CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: `host` is valid for a write.
        let code = unsafe { cu!(cuMemHostAlloc(&mut host, bytes, flags)) };
        if code == OUT_OF_MEMORY {
            // Host memory: the GPU's free bytes would mislead.
            return Err(Error::OutOfMemory {
                device: "the host (page-locked memory)".into(),
                requested: bytes as u64,
                free: None,
            });
        }
        check(code, || format!("allocating {bytes} bytes of page-locked memory"))?;
        let mut device = 0;
        // SAFETY: `device` is valid for a write; the memory was allocated for mapping.
        let code = unsafe { cu!(cuMemHostGetDevicePointer_v2(&mut device, host, 0)) };
        if let Err(error) = check(code, || "mapping page-locked memory".into()) {
            // SAFETY: just allocated, and not used again.
            note(unsafe { cu!(cuMemFreeHost(host)) }, "freeing page-locked memory");
            return Err(error);
        }
        // SAFETY: just allocated with `bytes`.
        unsafe { host.cast::<u8>().write_bytes(0, bytes) };
        Ok(PinnedMemory { host: host.cast(), device })
    }

    unsafe fn free_pinned(&self, memory: PinnedMemory, _bytes: usize) {
        if self.context.bind_quietly() {
            let _relaxed = Relaxed::enter();
            // SAFETY: by the contract, what `allocate_pinned` gave, and not used again.
            note(unsafe { cu!(cuMemFreeHost(memory.host.cast())) }, "freeing page-locked memory");
        }
    }

    fn check_foreign(&self, address: u64) -> Result<()> {
        self.context.bind()?;
        let mut ordinal = -1_i32;
        let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY: `ordinal` is what the attribute is written to; the driver takes any address.
        let code = unsafe { cu!(cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, address)) };
        let found = match code {
            0 if u32::try_from(ordinal) == Ok(self.info.ordinal) => return Ok(()),
            0 => format!("on GPU number {ordinal}"),
            // Memory that no allocation of the driver has.
            INVALID_VALUE => "not known to the CUDA driver".into(),
            code => return check(code, || format!("asking whose memory is at {address:#x}")),
        };
        let device = format!("GPU number {}, {}", self.info.ordinal, self.info.name);
        Err(Error::NotReached { address, found, device })
    }

    fn tensor_map(&self, shape: &TensorMapShape, address: u64, _writable: bool) -> Result<TensorMap> {
        self.context.bind()?;
        tiles::encode(shape, address)
    }

    unsafe fn copy_now(&self, to: Place, from: Place, bytes: usize) -> Result<()> {
        self.on_own_stream(|stream| {
            self.context.bind()?;
            // SAFETY: by the contract, both ends are valid, and there is a wait until they may go.
            unsafe { copy_async(stream.handle(), to, from, bytes) }
        })
    }

    unsafe fn fill_now(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: by the contract, valid for `bytes`.
        self.on_own_stream(|stream| unsafe { stream.fill_u8(address, byte, bytes, Location::caller()) })
    }

    fn print_to(&self, sink: Option<Sink>) {
        self.module.print_to(sink);
    }

    fn record_times(&self, on: bool) -> Result<()> {
        self.module.times.record(on);
        Ok(())
    }

    fn take_times(&self) -> Result<Vec<KernelTimes>> {
        self.module.handing_over(self.module.times.take(&self.context))
    }

    fn synchronize(&self) -> Result<()> {
        // Not `cuCtxSynchronize`: it fails, and breaks the capture, while any stream of the GPU captures.
        self.module.handing_over(stream::synchronize_all(&self.context))
    }

    fn stream(&self) -> Result<Box<dyn StreamBackend>> {
        Ok(Box::new(CudaStream::new(&self.context, &self.module)?))
    }

    unsafe fn foreign_stream(&self, raw: *mut c_void) -> Result<Box<dyn StreamBackend>> {
        // SAFETY: this function's contract.
        Ok(Box::new(unsafe { CudaStream::foreign(&self.context, &self.module, raw.cast()) }))
    }

    fn event(&self) -> Result<Box<dyn EventBackend>> {
        Ok(Box::new(CudaEvent::new(&self.context, &self.module)?))
    }
}
