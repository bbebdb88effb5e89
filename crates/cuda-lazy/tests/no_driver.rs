//! A program that uses `cust` starts and gets errors, not a crash, where there is no driver.
//!
//! `CUDA_LAZY_DRIVER` names a file that does not exist, so this holds on machines with a GPU too. It is one
//! test in a process of its own: the driver is looked for once.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use cust::error::CudaError;
use cust::sys;

#[test]
fn every_call_fails_cleanly() {
    // SAFETY: the only test of this process, before any other thread of it runs.
    unsafe { std::env::set_var(cuda_lazy::DRIVER_VARIABLE, "/nonexistent/libcuda.so.1") };

    let threads: Vec<_> =
        (0..8).map(|_| std::thread::spawn(|| cust::init(cust::CudaFlags::empty()))).collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), Err(CudaError::NoDevice));
    }
    assert_eq!(cust::device::Device::num_devices(), Err(CudaError::NoDevice));
    assert!(cust::quick_init().is_err());

    let why = cuda_lazy::driver().unwrap_err();
    assert!(
        matches!(&why, cuda_lazy::DriverError::NotFound { reason } if reason.contains("/nonexistent/")),
        "{why}"
    );
    assert!(why.to_string().contains("LD_LIBRARY_PATH"), "{why}");
    assert_eq!(why.to_string().lines().count(), 1);

    // The message of an error comes from the driver, and there is none.
    assert_eq!(CudaError::NoDevice.to_string(), "\"no CUDA driver could be loaded\"");
    assert!(CudaError::LaunchFailed.to_string().contains("no CUDA driver"));

    // Eleven arguments, five of them on the stack.
    // SAFETY: no driver is there to read the arguments.
    let code = unsafe {
        let null = std::ptr::null_mut::<std::ffi::c_void>();
        sys::cuLaunchKernel(null.cast(), 1, 1, 1, 1, 1, 1, 0, null.cast(), null.cast(), null.cast())
    };
    assert_eq!(code as u32, 100);
}
