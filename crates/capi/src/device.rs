//! Devices.

use crate::status::{Failure, Status, end, give, handle};
use host::{Device, Stream};
use simt::KernelInfo;
use simt::emu::EmuOptions;
use std::ffi::{CString, c_char, c_void};

/// A device that is open.
pub struct ferrokv_device {
    pub(crate) device: Device,
    name: CString,
}

impl ferrokv_device {
    fn new(device: Device) -> Self {
        let name = CString::new(device.info().name.clone()).unwrap_or_default();
        ferrokv_device { device, name }
    }
}

/// Opens the CPU.
///
/// # Safety
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_device_open_cpu(out: *mut *mut ferrokv_device) -> Status {
    // SAFETY: this function's contract.
    unsafe { give(out, || Ok(ferrokv_device::new(Device::cpu(EmuOptions::default())))) }
}

/// Opens GPU number `ordinal` in its primary context, which the CUDA runtime uses as well.
///
/// # Safety
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_device_open_cuda(ordinal: u32, out: *mut *mut ferrokv_device) -> Status {
    // SAFETY: this function's contract.
    unsafe { give(out, || Ok(ferrokv_device::new(Device::cuda(ordinal, ferrokv::ptx())?))) }
}

/// What the device is called; it is there as long as the handle. Null for null.
///
/// # Safety
/// `device` is null or a handle that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_device_name(device: *const ferrokv_device) -> *const c_char {
    // SAFETY: this function's contract.
    unsafe { handle("device", device) }.map_or(std::ptr::null(), |device| device.name.as_ptr())
}

/// Ends a handle. Plans and caches of the device go on.
///
/// # Safety
/// `device` is null or a handle, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_device_close(device: *mut ferrokv_device) {
    // SAFETY: this function's contract.
    unsafe { end(device) }
}

/// The caller's stream, for the length of one call.
///
/// # Safety
/// The contract of [`Stream::from_raw`].
pub(crate) unsafe fn borrowed(device: &Device, stream: *mut c_void) -> Result<Stream, Failure> {
    // SAFETY: this function's contract.
    Ok(unsafe { Stream::from_raw(device, stream) }?)
}

/// Whether calls take the CPU's own path.
pub(crate) fn on_slices(device: &Device) -> bool {
    device.has_host_paths()
}

/// Has the driver load kernels now: their first launch may be in a capture, where it could not.
pub(crate) fn load(
    device: &Device,
    kernels: impl IntoIterator<Item = &'static KernelInfo>,
) -> Result<(), Failure> {
    for kernel in kernels {
        match device.kernel_attributes(kernel) {
            // Not every target has every kernel; a launch says so if it is wanted.
            Ok(_)
            | Err(
                host::Error::KernelMissing { .. }
                | host::Error::KernelNeeds { .. }
                | host::Error::KernelOnly { .. },
            ) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
