//! What a call returns, and the message beside it.

use host::{Error as DeviceError, attention, int8, kv};
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a call returns.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It has done, or begun, what was asked.
    Ok = 0,
    /// An argument is wrong: the message names it, its value and the way out. Nothing was done.
    Argument = 1,
    /// There is no such device, no driver, or no kernels for it.
    Unavailable = 2,
    /// The memory is not there.
    Memory = 3,
    /// The call does not fit what was called before it: a full cache, a chunk that was not begun, a wait
    /// while the stream captures.
    State = 4,
    /// The device failed: what the driver reports, or what the emulator caught. A GPU may report it at a
    /// later call than the one that caused it.
    Device = 5,
    /// A mistake of this library.
    Internal = 6,
}

/// A status with its message.
#[derive(Debug)]
pub(crate) struct Failure {
    status: Status,
    message: String,
}

impl Failure {
    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Failure { status: Status::Argument, message: message.into() }
    }

    pub(crate) fn state(message: impl Into<String>) -> Self {
        Failure { status: Status::State, message: message.into() }
    }

    /// A handle whose contents a panic has left as they were in the middle of a call.
    pub(crate) fn broken(what: &str) -> Self {
        let message = format!(
            "the {what} is not to be used further, for an earlier call failed inside; make a new one"
        );
        Failure { status: Status::Internal, message }
    }

    fn of(status: Status, error: &dyn std::error::Error) -> Self {
        Failure { status, message: error.to_string() }
    }
}

fn of_device(error: &DeviceError) -> Status {
    match error {
        DeviceError::NoDriver(_)
        | DeviceError::NoDevice { .. }
        | DeviceError::NoPtx
        | DeviceError::GpuTooOld { .. }
        | DeviceError::PtxRefused { .. }
        | DeviceError::KernelMissing { .. }
        | DeviceError::KernelNeeds { .. }
        | DeviceError::KernelOnly { .. } => Status::Unavailable,
        DeviceError::OutOfMemory { .. } => Status::Memory,
        DeviceError::Capturing { .. } | DeviceError::ForeignStream { .. } => Status::State,
        DeviceError::Cuda { .. }
        | DeviceError::Fault(_)
        | DeviceError::Unordered(_)
        | DeviceError::Freed { .. } => Status::Device,
        _ => Status::Argument,
    }
}

fn of_pool(error: &attention::Error) -> Status {
    match error {
        attention::Error::Device(error) => of_device(error),
        _ => Status::Argument,
    }
}

fn of_dense(error: &attention::dense::Error) -> Status {
    match error {
        attention::dense::Error::Device(error) => of_device(error),
        attention::dense::Error::Cache(error) => of_pool(error),
        _ => Status::Argument,
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Failure::of(of_device(&error), &error)
    }
}

impl From<attention::dense::Error> for Failure {
    fn from(error: attention::dense::Error) -> Self {
        Failure::of(of_dense(&error), &error)
    }
}

impl From<int8::Error> for Failure {
    fn from(error: int8::Error) -> Self {
        let status = match &error {
            int8::Error::Device(error) => of_device(error),
            _ => Status::Argument,
        };
        Failure::of(status, &error)
    }
}

impl From<kv::Error> for Failure {
    fn from(error: kv::Error) -> Self {
        let status = match &error {
            kv::Error::Device(error) => of_device(error),
            kv::Error::Attention(error) => of_pool(error),
            kv::Error::Exact(error) => of_dense(error),
            kv::Error::Memory { .. } => Status::Memory,
            kv::Error::Full { .. }
            | kv::Error::NoSequence { .. }
            | kv::Error::NoRoom { .. }
            | kv::Error::Order { .. } => Status::State,
            _ => Status::Argument,
        };
        Failure::of(status, &error)
    }
}

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// The message of the last call of this thread that failed, in UTF-8; empty if none has. It is there until
/// the next one fails.
#[unsafe(no_mangle)]
pub extern "C" fn ferrokv_last_error() -> *const c_char {
    // A thread that is ending has no message any more.
    MESSAGE.try_with(|message| message.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Runs what a call does; keeps its message and gives its status.
pub(crate) fn call(work: impl FnOnce() -> Result<(), Failure>) -> Status {
    // What a panic leaves behind is in handles whose locks are poisoned by it: they say so from then on.
    let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        let message = format!("a mistake of this library, please report it: {text}");
        Err(Failure { status: Status::Internal, message })
    });
    match result {
        Ok(()) => Status::Ok,
        Err(Failure { status, message }) => {
            let text = CString::new(message.replace('\0', "\u{fffd}")).unwrap_or_default();
            let _ = MESSAGE.try_with(|kept| *kept.borrow_mut() = text);
            status
        }
    }
}

/// What a handle points at.
///
/// # Safety
/// `handle` is null or was made by this library for this type, and is not destroyed while the
/// reference lives.
pub(crate) unsafe fn handle<'a, T>(what: &'static str, handle: *const T) -> Result<&'a T, Failure> {
    // SAFETY: this function's contract.
    unsafe { handle.as_ref() }.ok_or_else(|| Failure::argument(format!("the {what} is NULL; make one first")))
}

/// A handle for `value`, written to `out`.
///
/// # Safety
/// `out` is null or valid for a write.
pub(crate) unsafe fn give<T>(out: *mut *mut T, make: impl FnOnce() -> Result<T, Failure>) -> Status {
    call(|| {
        if out.is_null() {
            return Err(Failure::argument("the place for the handle is NULL; give the address of a pointer"));
        }
        // SAFETY: not null, so valid by this function's contract: a caller that ignores the status has no
        // handle.
        unsafe { out.write(std::ptr::null_mut()) };
        let made = Box::into_raw(Box::new(make()?));
        // SAFETY: as above.
        unsafe { out.write(made) };
        Ok(())
    })
}

/// Ends a handle.
///
/// # Safety
/// `handle` is null or was made by [`give`], and is not used again.
pub(crate) unsafe fn end<T>(handle: *mut T) {
    if !handle.is_null() {
        call(|| {
            // SAFETY: this function's contract.
            drop(unsafe { Box::from_raw(handle) });
            Ok(())
        });
    }
}
