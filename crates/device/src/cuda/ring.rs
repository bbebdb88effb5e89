//! Memory in which kernels print lines, one ring for each loaded module that has such kernels.

use super::mapped::Mapped;
use crate::prints::Reader;
use cust::sys::CUmodule;
use simt::on_device::lines::{COUNT, HEAD_BYTES, RECORD_WORDS, SYMBOL};
use simt::print::Sink;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Mutex, PoisonError, TryLockError};

const BYTES: usize = HEAD_BYTES + COUNT as usize * RECORD_WORDS * 4;

/// The ring of a module.
pub(super) struct Ring {
    memory: Mapped,
    reader: Mutex<Reader>,
    sink: Mutex<Option<Sink>>,
}

thread_local! {
    /// The rings, by their addresses, whose lines are being handed over here: one inside the other.
    static HANDING_OVER: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Uses the list of this thread; a thread that ends may have none any more.
fn here<R>(with: impl FnOnce(&mut Vec<usize>) -> R) -> Option<R> {
    HANDING_OVER.try_with(|rings| with(&mut rings.borrow_mut())).ok()
}

impl Ring {
    /// Gives the module a ring, if it has kernels that print. Without one they print nothing. The context is
    /// bound.
    pub(super) fn of(module: CUmodule, text: &'static str) -> Option<Self> {
        let without = "kernels that print will print nothing";
        let memory = Mapped::of::<3>((module, text), SYMBOL, BYTES, without, |words| {
            // SAFETY: the first eight bytes of the ring, which are aligned and nobody else's yet.
            unsafe { words.cast::<u64>().write_volatile(COUNT) };
        })?;
        Some(Ring { memory, reader: Mutex::new(Reader::new(text)), sink: Mutex::new(None) })
    }

    /// Who gets the lines from now on; nobody in particular is standard error.
    pub(super) fn print_to(&self, sink: Option<Sink>) {
        let before = std::mem::replace(&mut *self.sink.lock().unwrap_or_else(PoisonError::into_inner), sink);
        // What a sink drops may use the device.
        drop(before);
    }

    /// Hands over the lines that are there. `stopped` says that no kernel will write one that is not. The
    /// caller holds no lock that a sink may want.
    pub(super) fn hand_over(&self, stopped: bool) {
        let ring = self.memory.words().as_ptr().addr();
        let (own, nested) = here(|rings| (rings.contains(&ring), !rings.is_empty())).unwrap_or_default();
        // A sink that waits for the device has what it is given.
        if own {
            return;
        }
        // Held until all are handed over: whoever waits next finds their lines handed over as well.
        let mut reader = match self.reader.try_lock() {
            Ok(reader) => reader,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Whoever holds it may wait for the ring whose sink this is.
            Err(TryLockError::WouldBlock) if nested => return,
            Err(TryLockError::WouldBlock) => self.reader.lock().unwrap_or_else(PoisonError::into_inner),
        };
        let printed = reader.read(|word| self.word(word), stopped);
        if printed.is_empty() {
            return;
        }
        fence(Ordering::Release);
        self.allow(reader.next() + COUNT);
        let sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let sink = sink.unwrap_or_else(simt::print::standard_error);
        /// Also when the sink panics, it is over.
        struct Left;
        impl Drop for Left {
            fn drop(&mut self) {
                here(Vec::pop);
            }
        }
        here(|rings| rings.push(ring));
        let _left = Left;
        printed.iter().for_each(|printed| simt::print::call(&sink, printed));
    }

    /// Lets so many lines be written in all.
    fn allow(&self, lines: u64) {
        // SAFETY: the first eight bytes of the ring, which are aligned; only a thread that holds the reader
        // writes them.
        unsafe { self.memory.words().cast::<u64>().write_volatile(lines) };
    }

    /// 64-bit word number `index` of the ring.
    fn word(&self, index: usize) -> u64 {
        assert!(index < BYTES / 8, "a word of the ring");
        // SAFETY: inside, and aligned; kernels may write meanwhile, which a volatile read allows for.
        let word = unsafe { self.memory.words().cast::<u64>().add(index).read_volatile() };
        // What says that a record is there is read ahead of the record.
        fence(Ordering::Acquire);
        word
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Of a sink that panics the rest of the lines is lost; the program goes on.
        if catch_unwind(AssertUnwindSafe(|| self.hand_over(true))).is_err() {
            tracing::warn!("a sink panicked while the last lines of a device were handed over");
        }
    }
}
