//! The CUDA driver symbols, bound on first use.
//!
//! The bindings in `cust` ask the linker for `libcuda`. A binary linked to it the usual way does not even
//! start on a machine with no NVIDIA driver. This crate defines those symbols itself, each as a trampoline of
//! one jump through a slot. A slot first leads to a binder: it opens `libcuda.so.1`, looks the symbol up,
//! stores its address in the slot and goes on to it with every argument in place. From the second call on,
//! the price is one indirect jump, as through a procedure linkage table.
//!
//! What a call returns when it cannot be bound:
//!
//! | the machine | every `cu*` call returns |
//! | --- | --- |
//! | has no driver | `CUDA_ERROR_NO_DEVICE` (100): callers know it, and `cust` has a variant for it |
//! | has a driver without this symbol | `CUDA_ERROR_NOT_SUPPORTED` (801) |
//!
//! [`driver`] says why there is no driver, in words. `cuGetErrorName` and `cuGetErrorString` answer even
//! without one, since `cust` asks them for its messages.
//!
//! A crate that uses `cust` must call [`driver`] (a sensible first call in any case): the call is what makes
//! the linker take this crate's symbols, whatever the order of libraries.
//!
//! The trampolines exist on x86-64 Linux. Elsewhere this crate defines no symbols and [`driver`] reports
//! [`DriverError::Platform`]; crates above leave `cust` out there.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod bind;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod symbols;

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub use bind::SYMBOLS;

use std::path::{Path, PathBuf};

/// The environment variable that names another file to load as the driver.
pub const DRIVER_VARIABLE: &str = "CUDA_LAZY_DRIVER";

/// The driver library of this process, found and opened.
#[derive(Debug)]
pub struct DriverLibrary {
    path: PathBuf,
    version: u32,
    /// What `dlopen` returned; never closed.
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    handle: usize,
}

impl DriverLibrary {
    /// The file, links resolved where possible (its name then ends in the driver's release).
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The newest CUDA version that the driver serves, as CUDA writes it: 12080 is 12.8.
    pub fn cuda_version(&self) -> u32 {
        self.version
    }
}

/// Why there is no driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// No file could be opened.
    #[error(
        "no CUDA driver: {reason}; install the NVIDIA driver, put the folder of libcuda.so.1 on \
         LD_LIBRARY_PATH, or name the file in CUDA_LAZY_DRIVER"
    )]
    NotFound {
        /// What the dynamic loader said.
        reason: String,
    },
    /// A file was opened, but it is no CUDA driver.
    #[error("{} is not a usable CUDA driver: {reason}", path.display())]
    NotADriver {
        /// The file that was opened.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The driver is not loaded on this platform.
    #[error("the CUDA driver is loaded on x86-64 Linux only; this build is for another platform")]
    Platform,
}

/// Opens the driver, once for the process.
///
/// Safe from any thread. The first outcome stays: a driver installed later is seen by the next process.
///
/// ```
/// match cuda_lazy::driver() {
///     Ok(driver) => println!("{}", driver.path().display()),
///     Err(reason) => println!("{reason}"),
/// }
/// ```
pub fn driver() -> Result<&'static DriverLibrary, DriverError> {
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    return bind::driver();
    #[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
    return Err(DriverError::Platform);
}
