//! Calls into the driver.
//!
//! `cust`'s bindings type every result as an enum of the codes its CUDA version had. A newer driver returns
//! newer codes, and a value outside an enum is undefined behaviour; its error type also folds the codes it
//! does not know into one. So every call here goes through [`cu!`], which takes the result as the number it is.

use crate::error::{Error, Result};
use cust::sys::{self, CUresult};
use std::ffi::{CStr, c_char};

/// For each number of arguments, a function that sees a driver function as returning a number.
macro_rules! numeric {
    ($($name:ident: $($arg:ident)*;)*) => {$(
        #[inline(always)]
        pub(super) fn $name<$($arg),*>(
            function: unsafe extern "C" fn($($arg),*) -> CUresult,
        ) -> unsafe extern "C" fn($($arg),*) -> u32 {
            // SAFETY: the enum is `repr(u32)`, so both return in the same way, and a number may be any value.
            unsafe { std::mem::transmute(function) }
        }
    )*};
}
numeric! {
    numeric_1: A;
    numeric_2: A B;
    numeric_3: A B C;
    numeric_4: A B C D;
    numeric_5: A B C D E;
    numeric_6: A B C D E F;
    numeric_11: A B C D E F G H I J K;
}

/// Calls a driver function of `cust::sys`, giving its result as a number.
macro_rules! cu {
    ($name:ident($a:expr $(,)?)) => { cu!(@numeric_1 $name($a)) };
    ($name:ident($a:expr, $b:expr $(,)?)) => { cu!(@numeric_2 $name($a, $b)) };
    ($name:ident($a:expr, $b:expr, $c:expr $(,)?)) => { cu!(@numeric_3 $name($a, $b, $c)) };
    ($name:ident($a:expr, $b:expr, $c:expr, $d:expr $(,)?)) => { cu!(@numeric_4 $name($a, $b, $c, $d)) };
    ($name:ident($a:expr, $b:expr, $c:expr, $d:expr, $e:expr $(,)?)) => {
        cu!(@numeric_5 $name($a, $b, $c, $d, $e))
    };
    ($name:ident($a:expr, $b:expr, $c:expr, $d:expr, $e:expr, $f:expr $(,)?)) => {
        cu!(@numeric_6 $name($a, $b, $c, $d, $e, $f))
    };
    ($name:ident($a:expr, $b:expr, $c:expr, $d:expr, $e:expr, $f:expr, $($rest:expr),+ $(,)?)) => {
        cu!(@numeric_11 $name($a, $b, $c, $d, $e, $f, $($rest),+))
    };
    (@$numeric:ident $name:ident($($arg:expr),*)) => {
        $crate::cuda::ffi::$numeric(cust::sys::$name)($($arg),*)
    };
}
pub(super) use cu;

/// The driver's result as an [`Error`] that says what was being done.
#[inline]
pub(super) fn check(code: u32, doing: impl FnOnce() -> String) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(failure(code, doing())) }
}

#[cold]
pub(super) fn failure(code: u32, doing: String) -> Error {
    Error::Cuda { code, name: name(code), doing }
}

/// The driver's name for `code`.
pub(super) fn name(code: u32) -> String {
    type GetName = unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult;
    type GetNameOf = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
    // SAFETY: the enum is `repr(u32)`, so both take and return in the same way.
    let get_name = unsafe { std::mem::transmute::<GetName, GetNameOf>(sys::cuGetErrorName) };
    let mut text = std::ptr::null();
    // SAFETY: `text` is valid for a write; the driver takes any number.
    let found = unsafe { get_name(code, &mut text) } == 0 && !text.is_null();
    if !found {
        return "unknown to this driver".to_string();
    }
    // SAFETY: the driver wrote a string that lives as long as itself.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// What a failed clean-up leaves behind: dropping never fails, and at the end of the process the driver may
/// already be gone.
pub(super) fn note(code: u32, doing: &str) {
    if code != 0 {
        tracing::debug!(code, name = name(code), doing, "the driver returned an error on clean-up");
    }
}
