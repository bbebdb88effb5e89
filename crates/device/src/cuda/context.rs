//! The driver, its GPUs and their contexts.

use super::ffi::{check, cu, note};
use crate::device::{BackendKind, DeviceInfo};
use crate::error::{Error, Result};
use cust::sys::{CUcontext, CUdevice, CUdevice_attribute};
use std::ffi::CStr;
use std::ptr::null_mut;

/// Loads and starts the driver; says how many GPUs it has.
pub(super) fn start() -> Result<u32> {
    cuda_lazy::driver()?;
    // SAFETY: no precondition.
    let code = unsafe { cu!(cuInit(0)) };
    // The driver is there and has no GPU.
    if code == 100 {
        return Ok(0);
    }
    check(code, || "starting the driver".into())?;
    let mut count = 0;
    // SAFETY: `count` is valid for a write.
    check(unsafe { cu!(cuDeviceGetCount(&mut count)) }, || "counting the GPUs".into())?;
    Ok(count.max(0) as u32)
}

/// GPU number `ordinal` of `count`.
pub(super) fn device(ordinal: u32, count: u32) -> Result<CUdevice> {
    if ordinal >= count {
        return Err(Error::NoDevice { ordinal, count });
    }
    let mut device = 0;
    // SAFETY: `device` is valid for a write.
    let code = unsafe { cu!(cuDeviceGet(&mut device, ordinal as i32)) };
    check(code, || format!("choosing GPU number {ordinal}"))?;
    Ok(device)
}

/// What the driver knows of `device`, which is number `ordinal`.
pub(super) fn info(device: CUdevice, ordinal: u32) -> Result<DeviceInfo> {
    use CUdevice_attribute::*;
    let doing = || format!("asking GPU number {ordinal} for its properties");
    let attribute = |which: CUdevice_attribute| -> Result<u32> {
        let mut value = 0;
        // SAFETY: `value` is valid for a write, and the attribute is one the driver has.
        check(unsafe { cu!(cuDeviceGetAttribute(&mut value, which, device)) }, doing)?;
        Ok(value.max(0) as u32)
    };
    let mut name = [0_u8; 256];
    // SAFETY: the buffer is valid for its length.
    let code = unsafe { cu!(cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device)) };
    check(code, doing)?;
    let name = CStr::from_bytes_until_nul(&name).unwrap_or(c"").to_string_lossy().into_owned();
    let mut memory = 0_usize;
    // SAFETY: `memory` is valid for a write.
    check(unsafe { cu!(cuDeviceTotalMem_v2(&mut memory, device)) }, doing)?;

    let major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    // In kHz and bits; memory that moves two words a clock. Newer drivers may not say.
    let clock = u64::from(attribute(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).unwrap_or(0));
    let bus = u64::from(attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0));
    let bandwidth = clock * 1000 * 2 * bus / 8;
    Ok(DeviceInfo {
        backend: BackendKind::Cuda,
        ordinal,
        name,
        compute_capability: Some(major * 10 + minor),
        multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory_bytes: Some(memory as u64),
        l2_bytes: Some(u64::from(attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?)),
        memory_bandwidth: (bandwidth != 0).then_some(bandwidth),
        max_shared_bytes: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        driver_version: Some(cuda_lazy::driver()?.cuda_version()),
    })
}

/// The GPU's primary context, which every user of the GPU in this process shares.
pub(super) struct Context {
    device: CUdevice,
    raw: CUcontext,
}

// SAFETY: the driver lets any thread use a context.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn retain(device: CUdevice) -> Result<Self> {
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for a write.
        let code = unsafe { cu!(cuDevicePrimaryCtxRetain(&mut raw, device)) };
        check(code, || "opening the GPU's context".into())?;
        Ok(Context { device, raw })
    }

    pub(super) fn raw(&self) -> CUcontext {
        self.raw
    }

    /// Makes this the calling thread's context. The driver is asked each time: other code on this thread may
    /// have set its own, and asking costs a few nanoseconds.
    #[inline]
    pub(super) fn bind(&self) -> Result<()> {
        let mut current = null_mut();
        // SAFETY: `current` is valid for a write.
        let code = unsafe { cu!(cuCtxGetCurrent(&mut current)) };
        if code == 0 && current == self.raw {
            return Ok(());
        }
        // SAFETY: the context is retained as long as `self`.
        check(unsafe { cu!(cuCtxSetCurrent(self.raw)) }, || "choosing the GPU for this thread".into())
    }

    /// [`bind`](Self::bind) for dropping: says whether it worked.
    pub(super) fn bind_quietly(&self) -> bool {
        self.bind().inspect_err(|error| tracing::debug!(%error, "cannot clean up")).is_ok()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained by `retain`, and not used again.
        note(unsafe { cu!(cuDevicePrimaryCtxRelease_v2(self.device)) }, "closing the GPU's context");
    }
}
