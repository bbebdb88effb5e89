//! Ranges as a profiler's library gets them: one is compiled here, and named as profilers name theirs.
#![cfg(target_os = "linux")]

mod stand_in;

use ferrokv_device::nvtx::{self, Range};

/// It writes down what it gets, by the numbers and structures of NVTX's headers.
const PROFILER: &str = r#"
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::io::Write;

fn log(what: &str) {
    let file = std::env::var_os("PROFILER_LOG").unwrap();
    writeln!(std::fs::OpenOptions::new().append(true).create(true).open(file).unwrap(), "{what}").unwrap();
}

unsafe extern "C" fn push(name: *const c_char) -> c_int {
    log(&format!("push {}", unsafe { CStr::from_ptr(name) }.to_str().unwrap()));
    0
}

unsafe extern "C" fn pop() -> c_int {
    log("pop");
    0
}

unsafe extern "C" fn mark(name: *const c_char) {
    log(&format!("mark {}", unsafe { CStr::from_ptr(name) }.to_str().unwrap()));
}

#[repr(C)]
struct Callbacks {
    bytes: usize,
    get: unsafe extern "C" fn(c_int, *mut *mut *mut *const c_void, *mut c_uint) -> c_int,
}

#[repr(C)]
struct Version {
    bytes: usize,
    version: u32,
    reserved: u32,
    told: unsafe extern "C" fn(u32),
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn InitializeInjectionNvtx2(table: unsafe extern "C" fn(u32) -> *const c_void) -> c_int {
    unsafe {
        assert!(table(0).is_null() && table(2).is_null());
        let version = &*table(3).cast::<Version>();
        assert_eq!((version.bytes, version.version), (24, 3));
        (version.told)(3);
        let callbacks = &*table(1).cast::<Callbacks>();
        assert_eq!(callbacks.bytes, 16);
        let (mut functions, mut count) = (std::ptr::null_mut(), 0);
        assert_eq!((callbacks.get)(0, &mut functions, &mut count), 0);
        assert_eq!((callbacks.get)(7, &mut functions, &mut count), 0);
        // A profiler writes to every place there is.
        for (module, expected) in [(2, 9), (3, 15), (4, 7), (5, 16), (6, 7), (1, 16)] {
            assert_eq!((callbacks.get)(module, &mut functions, std::ptr::null_mut()), 1);
            assert_eq!((callbacks.get)(module, std::ptr::null_mut(), &mut count), 1);
            assert_eq!(count, expected);
            assert!((*functions).is_null() && (*functions.add(count as usize)).is_null());
            (1..count as usize).for_each(|i| **functions.add(i) = pop as *const c_void);
        }
        **functions.add(2) = mark as *const c_void;
        **functions.add(9) = push as *const c_void;
        log("begun");
        1
    }
}
"#;

/// Marks events of the log.
struct Marks;

impl tracing::Subscriber for Marks {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        nvtx::mark("an event");
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_profiler_gets_ranges_and_marks() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let library = stand_in::library(folder.path(), PROFILER);
    // SAFETY: the only test of this process, before any other thread of it runs.
    unsafe {
        std::env::set_var("NVTX_INJECTION64_PATH", &library);
        std::env::set_var("PROFILER_LOG", &log);
    }

    // What is logged goes to the profiler as well, also what is logged when that is found.
    tracing::subscriber::set_global_default(Marks).unwrap();
    assert!(nvtx::is_on());
    let outer = Range::new("a step");
    {
        let _inner = nvtx::range!("layer {} of {}", 1, 2);
        nvtx::mark("cut\0here");
    }
    std::thread::spawn(|| drop(Range::new("ünïcode"))).join().unwrap();
    drop(outer);
    let lines = std::fs::read_to_string(&log).unwrap();
    let lines: Vec<&str> = lines.lines().collect();
    let expected = [
        "begun",
        "mark an event",
        "push a step",
        "push layer 1 of 2",
        "mark cut",
        "pop",
        "push ünïcode",
        "pop",
        "pop",
    ];
    assert_eq!(lines, expected);
}
