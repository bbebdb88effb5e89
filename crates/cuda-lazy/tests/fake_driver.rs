//! Binding against a stand-in for the driver, compiled here: arguments of every kind arrive, a symbol that
//! the driver lacks says so, and threads that race to bind one symbol all get through.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use cust::sys;
use std::process::Command;

/// Each function hands back what it received, as the driver's own never would.
const FAKE: &str = r#"
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

static CALLS: AtomicU32 = AtomicU32::new(0);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(out: *mut i32) -> i32 {
    unsafe { *out = 12080 };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(flags: u32) -> i32 {
    if flags == 7 { CALLS.fetch_add(1, Ordering::Relaxed); 0 } else { 1 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(out: *mut i32) -> i32 {
    unsafe { *out = CALLS.load(Ordering::Relaxed) as i32 };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuTexRefSetMipmapLevelBias(texture: *mut f32, bias: f32) -> i32 {
    unsafe { *texture = bias };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32,
    shared: u32, stream: usize, params: *mut *mut c_void, extra: *mut *mut c_void,
) -> i32 {
    let all = [function, gx as usize, gy as usize, gz as usize, bx as usize, by as usize, bz as usize,
        shared as usize, stream, extra as usize];
    unsafe { *params.cast::<[usize; 10]>() = all };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernelEx(config: *const u32, function: usize, params: *mut usize, extra: usize) -> i32 {
    unsafe { *params = function + extra + *config as usize };
    0
}
"#;

unsafe extern "C" {
    /// What the bindings of `cust` lack.
    fn cuLaunchKernelEx(config: *const u32, function: usize, params: *mut usize, extra: usize) -> u32;
}

#[test]
fn calls_reach_the_library() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libfake.so");
    let source = folder.path().join("fake.rs");
    std::fs::write(&source, FAKE).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let status = Command::new(rustc)
        .args(["--edition", "2024", "--crate-type", "cdylib", "-o"])
        .args([&library, &source])
        .status()
        .expect("rustc runs wherever cargo test does");
    assert!(status.success());
    // SAFETY: the only test of this process, before any other thread of it runs.
    unsafe { std::env::set_var(cuda_lazy::DRIVER_VARIABLE, &library) };

    // Sixteen threads bind the same symbol for the first time.
    let start = std::sync::Barrier::new(16);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                start.wait();
                // SAFETY: the stand-in reads one integer.
                assert_eq!(unsafe { sys::cuInit(7) } as u32, 0);
            });
        }
    });
    let mut count = 0;
    // SAFETY: `count` is valid for writes.
    assert_eq!(unsafe { sys::cuDeviceGetCount(&mut count) } as u32, 0);
    assert_eq!(count, 16);

    let driver = cuda_lazy::driver().unwrap();
    assert_eq!(driver.cuda_version(), 12080);
    assert_eq!(driver.path(), library.canonicalize().unwrap());

    // A float travels in a vector register. The first call binds, the second goes straight.
    for bias in [0.375_f32, -2.5] {
        let mut seen = 0.0_f32;
        // SAFETY: the stand-in writes one float.
        unsafe { sys::cuTexRefSetMipmapLevelBias((&raw mut seen).cast(), bias) };
        assert_eq!(seen, bias);
    }

    // Six integers in registers and five on the stack.
    for _ in 0..2 {
        let mut seen = [0_usize; 10];
        // SAFETY: the stand-in writes ten words through `params`.
        unsafe {
            let params = (&raw mut seen).cast();
            sys::cuLaunchKernel(1 as _, 2, 3, 4, 5, 6, 7, 8, 9 as _, params, 10 as _)
        };
        assert_eq!(seen, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    }

    let mut seen = 0;
    // SAFETY: the stand-in reads one number and writes one word.
    assert_eq!(unsafe { cuLaunchKernelEx(&3, 40, &mut seen, 500) }, 0);
    assert_eq!(seen, 543);

    // SAFETY: the stand-in has no such symbol, so nothing reads the argument.
    let code = unsafe { sys::cuCtxSetCurrent(std::ptr::null_mut()) };
    assert_eq!(code as u32, 801);
}
