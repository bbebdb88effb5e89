//! Libraries that stand in for the driver, or for a profiler's: the tests that load them compile them.
// Each test binary takes a part.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// What a driver of one device says that does nothing, and `functions!`, by which a test adds its own.
const DRIVER: &str = r#"
macro_rules! functions {
    ($($name:ident($($arg:ident: $t:ty),*) $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $t),*) -> i32 { #[allow(unused_unsafe)] unsafe { $body } }
    )*};
}
functions! {
    cuDriverGetVersion(out: *mut i32) { *out = 12030; 0 };
    cuInit() 0;
    cuDeviceGetCount(out: *mut i32) { *out = 1; 0 };
    cuDeviceGet(out: *mut i32) { *out = 0; 0 };
    cuDeviceGetAttribute(out: *mut i32, which: i32) { *out = match which { 75 => 9, 76 => 0, _ => 65536 }; 0 };
    cuDeviceGetName(out: *mut u8) { *out = 0; 0 };
    cuDeviceTotalMem_v2(out: *mut usize) { *out = 1 << 30; 0 };
    cuDevicePrimaryCtxRetain(out: *mut usize) { *out = 1; 0 };
    cuDevicePrimaryCtxRelease_v2() 0;
    cuCtxGetCurrent(out: *mut usize) { *out = 1; 0 };
    cuModuleUnload() 0;
    cuFuncGetAttribute(out: *mut i32) { *out = 1024; 0 };
    cuMemAlloc_v2(out: *mut usize) { *out = 4096; 0 };
    cuMemFree_v2() 0;
    cuEventCreate(out: *mut usize) { *out = 1; 0 };
    cuEventDestroy_v2() 0;
    cuEventSynchronize() 0;
    cuStreamDestroy_v2() 0;
    cuGraphGetNodes(_graph: usize, _nodes: usize, count: *mut usize) { *count = 1; 0 };
    cuGraphInstantiateWithFlags(out: *mut usize) { *out = 1; 0 };
    cuGraphExecDestroy() 0;
    cuGraphDestroy() 0;
}
"#;

/// The source of a driver with these functions besides, or in the place of those above.
pub fn driver(functions: &str) -> String {
    let stays = |line: &&str| match line.trim().split_once('(') {
        Some((name, _)) if name.starts_with("cu") => !functions.contains(&format!(" {name}(")),
        _ => true,
    };
    let lines: Vec<&str> = DRIVER.lines().filter(stays).collect();
    format!("{}\n{functions}", lines.join("\n"))
}

/// Compiles a library into a folder.
pub fn library(folder: &Path, text: &str) -> PathBuf {
    let (library, source) = (folder.join("libstand_in.so"), folder.join("stand_in.rs"));
    std::fs::write(&source, text).expect("a source");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let status = Command::new(rustc)
        .args(["--edition", "2024", "--crate-type", "cdylib", "-o"])
        .args([&library, &source])
        .status()
        .expect("rustc runs wherever cargo test does");
    assert!(status.success());
    library
}
