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
//! A profiler names a library of its own in the variable `NVTX_INJECTION64_PATH`, and puts its functions into
//! the program's tables: this module has such tables, as programs in C have from the headers of NVTX 3, and
//! needs no library for that. If the variable is not set, `libnvToolsExt.so.1` of older CUDA toolkits is
//! used, if it is there. Without either, as in every run outside a profiler, a range costs a load and a
//! branch. What there is, is looked for once, at the first range. On other platforms than Linux ranges do
//! nothing.

use std::ffi::{CString, c_char, c_int};
use std::marker::PhantomData;
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

#[inline]
fn functions() -> Option<&'static Functions> {
    static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();
    #[cfg(target_os = "linux")]
    let found = FUNCTIONS.get_or_init(tool::find);
    #[cfg(not(target_os = "linux"))]
    let found = FUNCTIONS.get_or_init(|| None);
    found.as_ref()
}

/// Whether something takes the ranges: whether a profiler is there.
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
        let Some(functions) = functions() else { return Range { on: false, thread: PhantomData } };
        if let Some(push) = functions.push {
            let name = text(name().as_ref());
            // SAFETY: the profiler's function of this type; it copies the string, which ends in NUL.
            unsafe { push(name.as_ptr()) };
        }
        Range { on: true, thread: PhantomData }
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
