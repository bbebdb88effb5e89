//! Memory in which a kernel that panics says so, one record for each loaded module that has such kernels.

use super::ffi::cu;
use super::mapped::Mapped;
use crate::stops;
use cust::sys::{CUcontext, CUmodule};
use simt::emu::Fault;
use simt::on_device::{RECORD_SYMBOL, RECORD_WORDS};
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
pub(super) struct Record(Mapped);

impl Record {
    /// Gives the module a record, if it has kernels that may write one. Without one such a kernel traps and
    /// says nothing. The context is bound.
    pub(super) fn of(module: CUmodule, text: &'static str) -> Option<Self> {
        let context = current()?;
        let without = "a kernel that panics will not say where";
        let mapped = Mapped::of::<1>((module, text), RECORD_SYMBOL, BYTES, without, |_| {})?;
        let listed = Listed { words: mapped.words(), context, text };
        RECORDS.lock().unwrap_or_else(PoisonError::into_inner).push(listed);
        Some(Record(mapped))
    }
}

impl Drop for Record {
    /// Nobody finds it any more when its memory goes.
    fn drop(&mut self) {
        let mut records = RECORDS.lock().unwrap_or_else(PoisonError::into_inner);
        records.retain(|listed| listed.words != self.0.words());
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
