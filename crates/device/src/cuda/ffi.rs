//! Calls into the driver.
//!
//! `cust`'s bindings type every result as an enum of the codes its CUDA version had. A newer driver returns
//! newer codes, and a value outside an enum is undefined behaviour; its error type also folds the codes it
//! does not know into one. So every call here goes through [`cu!`], which takes the result as the number it
//! is.

use crate::error::{Error, Result};
use cust::sys::{self, CUfunction, CUresult, CUstream, CUstreamCaptureMode};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

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

/// Whether the code says that the context is lost, and with it every kernel of the GPU: an illegal address, a
/// launch that took too long, a context that is gone, an assertion, an error of the hardware's stack, an
/// illegal instruction, a misaligned address, an address of the wrong space, an invalid program counter, a
/// failed launch, tensor memory that was not given back.
pub(super) fn is_lost(code: u32) -> bool {
    matches!(code, 700 | 702 | 709 | 710 | 714..=719 | 721)
}

/// The driver's result as an [`Error`] that says what was being done.
#[inline]
pub(super) fn check(code: u32, doing: impl FnOnce() -> String) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(failure(code, doing())) }
}

#[cold]
pub(super) fn failure(code: u32, doing: String) -> Error {
    // A grid that has stopped: its kernel may have said why.
    if is_lost(code)
        && let Some(fault) = super::records::fault()
    {
        return fault.into();
    }
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

/// While it lives, the calling thread may allocate, free and look kernels up although a stream of its own, or
/// in the global mode any thread's, captures: such a capture would fail otherwise. None of that becomes a
/// part of the graph.
pub(super) struct Relaxed(CUstreamCaptureMode);

impl Relaxed {
    pub(super) fn enter() -> Self {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `mode` is valid for a read and a write; what the driver writes is a mode that was set.
        note(unsafe { cu!(cuThreadExchangeStreamCaptureMode(&mut mode)) }, "relaxing captures");
        Relaxed(mode)
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as above.
        note(
            unsafe { cu!(cuThreadExchangeStreamCaptureMode(&mut self.0)) },
            "restoring the mode of captures",
        );
    }
}

/// `CUlaunchConfig` of CUDA 11.8 and later, which `cust` lacks.
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) stream: CUstream,
    pub(super) attributes: *const LaunchAttribute,
    pub(super) attribute_count: c_uint,
}

/// `CUlaunchAttribute` with the one value that is used here. The others of the union hold up to 64 bytes and
/// pointers.
#[repr(C, align(8))]
pub(super) struct LaunchAttribute {
    id: c_uint,
    padding: [u8; 4],
    value: c_int,
    rest: [u8; 60],
}

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: the launch may start before the kernel ahead
    /// of it in the stream has ended, and waits for that itself.
    pub(super) const OVERLAP: LaunchAttribute =
        LaunchAttribute { id: 6, padding: [0; 4], value: 1, rest: [0; 60] };
}

// The driver reads these by its own layout.
const _: () = {
    use std::mem::{align_of, offset_of, size_of};
    assert!(size_of::<LaunchConfig>() == 56 && align_of::<LaunchConfig>() == 8);
    assert!(offset_of!(LaunchConfig, block) == 12 && offset_of!(LaunchConfig, shared_bytes) == 24);
    assert!(offset_of!(LaunchConfig, stream) == 32 && offset_of!(LaunchConfig, attributes) == 40);
    assert!(offset_of!(LaunchConfig, attribute_count) == 48);
    assert!(size_of::<LaunchAttribute>() == 72 && align_of::<LaunchAttribute>() == 8);
    assert!(offset_of!(LaunchAttribute, id) == 0 && offset_of!(LaunchAttribute, value) == 8);
};

unsafe extern "C" {
    /// `cuLaunchKernelEx`, which `cust` lacks; its result as the number it is.
    #[link_name = "cuLaunchKernelEx"]
    pub(super) fn launch_kernel_ex(
        config: *const LaunchConfig,
        function: CUfunction,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> u32;

    /// `cuTensorMapEncodeTiled` of CUDA 12.0 and later; its result as the number it is.
    #[link_name = "cuTensorMapEncodeTiled"]
    pub(super) fn tensor_map_encode_tiled(
        map: *mut [u64; 16],
        format: c_uint,
        rank: c_uint,
        address: *mut c_void,
        extents: *const u64,
        strides: *const u64,
        tile: *const c_uint,
        element_strides: *const c_uint,
        interleave: c_uint,
        swizzle: c_uint,
        l2_promotion: c_uint,
        fill: c_uint,
    ) -> u32;
}
