//! Memory in which a kernel that panics says so, one record for each loaded module that has such kernels.

use super::ffi::{Relaxed, cu, name, note};
use crate::stops;
use cust::sys::{CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CUcontext, CUmodule};
use simt::emu::Fault;
use simt::on_device::{RECORD_SYMBOL, RECORD_WORDS};
use std::ffi::{CString, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::{Mutex, PoisonError};

const BYTES: usize = 4 * RECORD_WORDS;

/// Every record of the process.
static RECORDS: Mutex<Vec<Listed>> = Mutex::new(Vec::new());

struct Listed {
    words: NonNull<u32>,
    /// That of the module, as the driver's handle.
    context: CUcontext,
    /// The module's PTX.
    text: &'static str,
}

// SAFETY: page-locked memory is any thread's, and is read by volatile loads alone; the context is compared.
unsafe impl Send for Listed {}

/// The record of a module.
pub(super) struct Record(NonNull<u32>);

impl Record {
    /// Gives the module a record, if it has kernels that may write one. Without one such a kernel traps and
    /// says nothing. The context is bound.
    pub(super) fn of(module: CUmodule, text: &'static str) -> Option<Self> {
        // A driver that is asked for what is not there reports an error to tools that watch its calls.
        if !text.contains(RECORD_SYMBOL) {
            return None;
        }
        let _relaxed = Relaxed::enter();
        let symbol = CString::new(RECORD_SYMBOL).ok()?;
        let (mut variable, mut bytes) = (0, 0);
        // SAFETY: both are valid for a write, the module is loaded, the name ends in NUL.
        let code = unsafe { cu!(cuModuleGetGlobal_v2(&mut variable, &mut bytes, module, symbol.as_ptr())) };
        if code != 0 || bytes != 8 {
            return None;
        }
        let failed = |code, doing: &str| {
            tracing::warn!(code, name = name(code), doing, "a kernel that panics will not say where");
        };
        let mut host: *mut c_void = null_mut();
        let flags = CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: `host` is valid for a write.
        let code = unsafe { cu!(cuMemHostAlloc(&mut host, BYTES, flags)) };
        let Some(words) = NonNull::new(host.cast::<u32>()).filter(|_| code == 0) else {
            failed(code, "allocating page-locked memory");
            return None;
        };
        // SAFETY: just allocated with so many bytes.
        unsafe { words.as_ptr().write_bytes(0, RECORD_WORDS) };
        let record = Record(words);
        let mut device = 0_u64;
        // SAFETY: `device` is valid for a write; the memory was allocated for mapping.
        let code = unsafe { cu!(cuMemHostGetDevicePointer_v2(&mut device, host, 0)) };
        if code != 0 {
            failed(code, "mapping page-locked memory");
            return None;
        }
        // SAFETY: the variable has the eight bytes that are read.
        let code = unsafe { cu!(cuMemcpyHtoD_v2(variable, (&raw const device).cast(), 8)) };
        if code != 0 {
            failed(code, "telling the kernels where");
            return None;
        }
        let listed = Listed { words, context: current()?, text };
        RECORDS.lock().unwrap_or_else(PoisonError::into_inner).push(listed);
        Some(record)
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        RECORDS.lock().unwrap_or_else(PoisonError::into_inner).retain(|listed| listed.words != self.0);
        let _relaxed = Relaxed::enter();
        // SAFETY: allocated by `of`; nobody finds it any more, and its module's kernels have ended or are
        // stopped for good.
        note(unsafe { cu!(cuMemFreeHost(self.0.as_ptr().cast())) }, "freeing page-locked memory");
    }
}

/// The calling thread's context.
fn current() -> Option<CUcontext> {
    let mut context = null_mut();
    // SAFETY: `context` is valid for a write.
    let code = unsafe { cu!(cuCtxGetCurrent(&mut context)) };
    (code == 0).then_some(context)
}

/// Why a grid of the calling thread's GPU stopped, if one of its threads has said so.
pub(super) fn fault() -> Option<Fault> {
    let context = current()?;
    let records = RECORDS.lock().unwrap_or_else(PoisonError::into_inner);
    records.iter().filter(|listed| listed.context == context).find_map(|listed| {
        let mut record = [0; RECORD_WORDS];
        for (i, word) in record.iter_mut().enumerate() {
            // SAFETY: in the list, the record lives; the state comes first, and behind it nothing changes any
            // more once it says that all is there.
            *word = unsafe { listed.words.add(i).read_volatile() };
        }
        stops::fault(&record, listed.text)
    })
}
