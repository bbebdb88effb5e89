//! Ranges that profilers show: NVTX, the names that Nsight Systems and Nsight Compute put beside the work.
//!
//! ```
//! use ferrokv_device::nvtx;
//!
//! let _step = nvtx::Range::new("decode step");
//! {
//!     let _layer = nvtx::range!("layer {}", 3);
//!     // Launches, copies, work of the host.
//! }
//! nvtx::mark("a token");
//! ```
//!
//! A profiler names a library of its own in the variable `NVTX_INJECTION64_PATH`, and puts its functions
//! into the program's tables: this module has such tables, as programs in C have from the headers of NVTX
//! 3, and needs no library for that. If the variable is not set, as in every run outside a profiler, a
//! range costs a load and a branch; the `libnvToolsExt.so.1` of older toolkits is not looked for. The
//! variable is read once, at the first range, and the library loaded then. On other platforms than Linux
//! ranges do nothing.

#[cfg(target_os = "linux")]
use std::cell::Cell;
use std::ffi::{CString, c_char, c_int};
use std::marker::PhantomData;
#[cfg(target_os = "linux")]
use std::sync::OnceLock;

#[cfg(target_os = "linux")]
mod tool;

/// What a profiler gives a program.
#[derive(Clone, Copy)]
struct Functions {
    push: Option<unsafe extern "C" fn(*const c_char) -> c_int>,
    pop: Option<unsafe extern "C" fn() -> c_int>,
    mark: Option<unsafe extern "C" fn(*const c_char)>,
}

#[cfg(not(target_os = "linux"))]
fn functions() -> Option<&'static Functions> {
    None
}

#[cfg(target_os = "linux")]
static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();

#[cfg(target_os = "linux")]
#[inline]
fn functions() -> Option<&'static Functions> {
    FUNCTIONS.get().map_or_else(find, Option::as_ref)
}

#[cfg(target_os = "linux")]
#[cold]
fn find() -> Option<&'static Functions> {
    thread_local! {
        /// Whether this thread is looking: what it does meanwhile has no ranges.
        static FINDING: Cell<bool> = const { Cell::new(false) };
    }
    if FINDING.replace(true) {
        return None;
    }
    let mut report = None;
    let found = FUNCTIONS.get_or_init(|| {
        let found = tool::find();
        report = found.as_ref().map(|found| (found.library.clone(), found.functions.as_ref().err().copied()));
        found.and_then(|found| found.functions.ok())
    });
    FINDING.set(false);
    // Only now: whoever gets this may have ranges of its own.
    match report {
        None => {}
        Some((library, None)) => tracing::debug!(library = %library.display(), "a profiler takes ranges"),
        Some((library, Some(reason))) => {
            tracing::warn!(library = %library.display(), variable = tool::LIBRARY_VARIABLE, reason, "no ranges");
        }
    }
    found.as_ref()
}

/// Whether a profiler is there that takes ranges or marks.
#[inline]
pub fn is_on() -> bool {
    functions().is_some()
}

/// A name as a string of C: up to its first NUL, if it has one.
fn text(name: &str) -> CString {
    let name = name.split('\0').next().unwrap_or_default();
    CString::new(name).unwrap_or_default()
}

/// A stretch of one thread's time, from here to the end of the value. Ranges of a thread nest: the one that
/// ends is always the one that began last, so end them in that order, as values of a scope do by themselves.
#[derive(Debug)]
#[must_use = "the range ends with the value"]
pub struct Range {
    on: bool,
    /// It ends in the thread that it began in.
    thread: PhantomData<*const ()>,
}

impl Range {
    /// Begins a range.
    #[inline]
    pub fn new(name: &str) -> Self {
        Range::of(|| name)
    }

    /// Begins a range with a name that is made only if somebody sees it; [`range!`] calls it.
    #[inline]
    pub fn of<N: AsRef<str>>(name: impl FnOnce() -> N) -> Self {
        let push = functions().and_then(|functions| functions.push);
        if let Some(push) = push {
            let name = text(name().as_ref());
            // SAFETY: the profiler's function of this type; it copies the string, which ends in NUL.
            unsafe { push(name.as_ptr()) };
        }
        Range { on: push.is_some(), thread: PhantomData }
    }
}

impl Drop for Range {
    #[inline]
    fn drop(&mut self) {
        if let Some(pop) = functions().filter(|_| self.on).and_then(|functions| functions.pop) {
            // SAFETY: the profiler's function of this type, in the thread that began the range.
            unsafe { pop() };
        }
    }
}

/// Marks a point in time.
#[inline]
pub fn mark(name: &str) {
    if let Some(mark) = functions().and_then(|functions| functions.mark) {
        // SAFETY: the profiler's function of this type; it copies the string, which ends in NUL.
        unsafe { mark(text(name).as_ptr()) };
    }
}

/// A [`Range`] with a formatted name, which is made only if a profiler is there: `range!("layer {}", i)`.
#[macro_export]
#[doc(hidden)]
macro_rules! __nvtx_range {
    ($($name:tt)*) => {
        $crate::nvtx::Range::of(|| ::std::format!($($name)*))
    };
}

#[doc(inline)]
pub use crate::__nvtx_range as range;
