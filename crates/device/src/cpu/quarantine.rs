//! Freed memory that is not given out again for a while, so that its use is seen.

use super::{ALIGN, host};
use simt::emu::allocations;
use std::alloc::{Layout, dealloc};
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// How many freed bytes a device keeps.
const LARGEST: usize = 256 << 20;

#[derive(Default)]
struct Kept {
    blocks: VecDeque<(u64, usize)>,
    bytes: usize,
}

/// The freed memory of one device.
#[derive(Default)]
pub(super) struct Quarantine(Mutex<Kept>);

impl Quarantine {
    /// Takes memory that is freed, and gives back the oldest where it has too much.
    ///
    /// # Safety
    /// `address` and `bytes` are of one allocation, which is not used again.
    pub(super) unsafe fn put(&self, address: u64, bytes: usize) {
        allocations::free(address);
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.blocks.push_back((address, bytes));
        kept.bytes += bytes;
        while kept.bytes > LARGEST
            && let Some((address, bytes)) = kept.blocks.pop_front()
        {
            kept.bytes -= bytes;
            // SAFETY: put in here once, and taken out.
            unsafe { give_back(address, bytes) };
        }
    }
}

impl Drop for Quarantine {
    fn drop(&mut self) {
        let kept = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (address, bytes) in kept.blocks.drain(..) {
            // SAFETY: as above.
            unsafe { give_back(address, bytes) };
        }
    }
}

/// # Safety
/// As for [`Quarantine::put`].
unsafe fn give_back(address: u64, bytes: usize) {
    allocations::forget(address);
    // SAFETY: this function's contract; the layout was valid when the memory was allocated.
    unsafe { dealloc(host(address), Layout::from_size_align_unchecked(bytes, ALIGN)) };
}
