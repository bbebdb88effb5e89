//! Devices: opening one, and what is known of it.

use crate::backend::DeviceBackend;
use crate::cpu::CpuDevice;
use crate::error::{Error, Result};
use simt::KernelInfo;
use simt::emu::EmuOptions;
use std::fmt;
use std::sync::Arc;

/// One PTX text with every kernel in it, for one target.
#[derive(Clone, Copy, Debug)]
pub struct PtxImage {
    /// The target's number: 80 for `sm_80`.
    pub sm: u32,
    /// The PTX.
    pub text: &'static str,
}

/// Which implementation stands behind a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BackendKind {
    /// The emulator.
    Cpu,
    /// A GPU through the CUDA driver.
    Cuda,
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BackendKind::Cpu => "cpu",
            BackendKind::Cuda => "cuda",
        })
    }
}

/// What is known of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Which backend it belongs to.
    pub backend: BackendKind,
    /// Its number among the driver's GPUs; 0 for the CPU.
    pub ordinal: u32,
    /// What it is called.
    pub name: String,
    /// The GPU's compute capability as PTX targets write it: 90 for 9.0.
    pub compute_capability: Option<u32>,
    /// The GPU's multiprocessors, or the CPU's hardware threads.
    pub multiprocessors: u32,
    /// Its memory in bytes, if known.
    pub memory_bytes: Option<u64>,
    /// The GPU's second-level cache in bytes.
    pub l2_bytes: Option<u64>,
    /// The bytes per second of the GPU's memory by its clock and bus width.
    pub memory_bandwidth: Option<u64>,
    /// The most dynamic shared memory of a block, in bytes.
    pub max_shared_bytes: u32,
    /// The newest CUDA version that the driver serves: 12080 for 12.8.
    pub driver_version: Option<u32>,
}

/// What the driver's compiler made of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelAttributes {
    /// Registers of a thread.
    pub registers: u32,
    /// Shared memory that the kernel declares itself, in bytes.
    pub static_shared_bytes: u32,
    /// Local memory of a thread in bytes: spills and arrays that found no registers.
    pub local_bytes: u32,
    /// The most threads a block may have with these registers.
    pub max_threads: u32,
}

/// A GPU or the CPU's emulator; clones are the same device.
#[derive(Clone)]
pub struct Device {
    backend: Arc<dyn DeviceBackend>,
}

impl Device {
    /// The emulator. Launches run where they are called and have finished when the call returns.
    pub fn cpu(options: EmuOptions) -> Device {
        Device::new(Arc::new(CpuDevice::new(options)))
    }

    /// GPU number `ordinal`, with the kernels of the image that suits it: the highest target that is not
    /// above the GPU and that the driver accepts.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::NoDevice`], [`Error::NoPtx`], [`Error::GpuTooOld`],
    /// [`Error::PtxRefused`], or what the driver reports.
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    pub fn cuda(ordinal: u32, images: &[PtxImage]) -> Result<Device> {
        Ok(Device::new(Arc::new(crate::cuda::CudaDevice::open(ordinal, images)?)))
    }

    /// There is no CUDA backend on this platform.
    ///
    /// # Errors
    /// Always [`Error::NoDriver`].
    #[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
    pub fn cuda(_ordinal: u32, _images: &[PtxImage]) -> Result<Device> {
        Err(Error::NoDriver(cuda_lazy::DriverError::Platform))
    }

    /// GPU number 0 if it can be used, else the emulator and the reason.
    pub fn auto(options: EmuOptions, images: &[PtxImage]) -> (Device, Option<Error>) {
        match Device::cuda(0, images) {
            Ok(device) => (device, None),
            Err(reason) => (Device::cpu(options), Some(reason)),
        }
    }

    fn new(backend: Arc<dyn DeviceBackend>) -> Device {
        tracing::debug!(device = backend.info().name, backend = %backend.info().backend, "opened a device");
        Device { backend }
    }

    /// What is known of the device.
    pub fn info(&self) -> &DeviceInfo {
        self.backend().info()
    }

    /// Which backend it belongs to.
    pub fn kind(&self) -> BackendKind {
        self.info().backend
    }

    /// What the driver's compiler made of `kernel`; `None` on the CPU.
    ///
    /// # Errors
    /// [`Error::KernelMissing`] if the loaded PTX lacks it.
    pub fn kernel_attributes(&self, kernel: &'static KernelInfo) -> Result<Option<KernelAttributes>> {
        self.backend().attributes(kernel)
    }

    /// Waits until all work that streams of the device were given is done. A stream that captures is waited
    /// for up to where its capture began.
    ///
    /// # Errors
    /// What a kernel did wrong since the last wait.
    pub fn synchronize(&self) -> Result<()> {
        self.backend().synchronize()
    }

    pub(crate) fn backend(&self) -> &dyn DeviceBackend {
        &*self.backend
    }

    /// Refuses things of another device: only those of one device may be used together. `what` names the
    /// thing.
    ///
    /// # Errors
    /// [`Error::WrongDevice`].
    pub fn check_same(&self, other: &Device, what: &'static str) -> Result<()> {
        let same = self.kind() == other.kind() && self.backend().context() == other.backend().context();
        if same { Ok(()) } else { Err(Error::WrongDevice { what }) }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(self.info()).finish()
    }
}

/// Every GPU that the driver sees, without opening any.
///
/// # Errors
/// [`Error::NoDriver`] where there is none, or what the driver reports.
pub fn cuda_devices() -> Result<Vec<DeviceInfo>> {
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    return crate::cuda::devices();
    #[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
    Err(Error::NoDriver(cuda_lazy::DriverError::Platform))
}

/// The bytes of `len` elements of type `T`.
pub(crate) fn size_of_many<T>(len: usize) -> Result<usize> {
    let element_bytes = size_of::<T>();
    len.checked_mul(element_bytes)
        .filter(|bytes| *bytes <= isize::MAX as usize)
        .ok_or(Error::TooLarge { len, element_bytes })
}
