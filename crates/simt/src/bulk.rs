//! Bulk copies: one thread moves kilobytes between global and shared memory, by the copy engine of sm_90.
//!
//! To shared memory, an [`Mbarrier`] counts the bytes that have come, and whoever waits for
//! its phase sees them:
//!
//! ```text
//! if t == 0 {
//!     full.arrive_and_expect(stage, bytes);
//!     tile.copy_bulk(first, x, from, bytes, full, stage);
//! }
//! full.wait(stage, phase);
//! ```
//!
//! To global memory, the thread that copies closes its copies into groups ([`commit`]) and waits: until they
//! have read what they copy ([`wait_read`]), ahead of its next use and of the thread's end, or until they are
//! done ([`wait`]).
//!
//! Copies are not accesses of the thread, but go by a way of their own, the *asynchronous proxy*. What
//! threads have written by plain accesses, an mbarrier's `init` among them, copies see behind a [`fence`]
//! only, or, of shared memory, a [`fence_shared`], which costs far less: the writer makes it ahead of the
//! barrier that hands the bytes on. The same goes for bytes that a copy is to write over. What copies bring
//! is seen by whoever has waited.
//!
//! Sizes are multiples of 16 bytes, and both ends are aligned to 16. All of it needs sm_90: mark the kernel
//! `#[kernel(min_sm = 90)]`. The emulator moves the bytes as late as it may, when somebody waits.

#[cfg(not(target_arch = "nvptx64"))]
use crate::emu;
use crate::{Global, GlobalMut, Mbarrier, Pod, Shared};
#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

impl<T: Pod> Shared<T> {
    /// Starts copying `bytes` bytes from element `from` of `source` to element `index`; element `at` of
    /// `barrier` gets to know of each that has come. PTX:
    /// `cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes`.
    #[crate::device]
    pub fn copy_bulk<S: Pod>(
        self,
        index: u32,
        source: Global<S>,
        from: usize,
        bytes: u32,
        barrier: Shared<Mbarrier>,
        at: u32,
    ) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds and aligned by the launch's contract, which the emulator checks.
        unsafe {
            asm!(
                "{{ .reg .b64 g; cvta.to.global.u64 g, {1}; \
                 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{0}], [g], {2}, [{3}]; }}",
                in(reg32) crate::ptx::shared_base() + self.byte_offset(index), in(reg64) source.element(from),
                in(reg32) bytes, in(reg32) barrier.address(at), options(nostack)
            );
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::bulk_load((self, index), (source, from), bytes, emu::Named::new(barrier, at))
    }
}

impl<T: Pod> GlobalMut<T> {
    /// Starts copying `bytes` bytes from element `from` of `source`, in shared memory, to element `index`.
    /// PTX: `cp.async.bulk.global.shared::cta.bulk_group`.
    #[crate::device]
    pub fn copy_bulk<S: Pod>(self, index: usize, source: Shared<S>, from: u32, bytes: u32) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: as above.
        unsafe {
            asm!(
                "{{ .reg .b64 g; cvta.to.global.u64 g, {0}; \
                 cp.async.bulk.global.shared::cta.bulk_group [g], [{1}], {2}; }}",
                in(reg64) self.element_pointer(index), in(reg32) crate::ptx::shared_base() + source.byte_offset(from),
                in(reg32) bytes, options(nostack)
            );
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::bulk_store((self, index), (source, from), bytes)
    }
}

sides! {
    /// Closes the copies to global memory that this thread has started since the last call into a group; a
    /// group may be empty. PTX: `cp.async.bulk.commit_group`.
    pub fn commit() {
        device {
            // SAFETY: no precondition.
            unsafe { asm!("cp.async.bulk.commit_group;", options(nostack)) }
        }
        emulator { emu::bulk_commit() }
    }

    /// Copies that are behind this fence, started by whomever, see what this thread has written and knows to
    /// be written, to shared and global memory. PTX: `fence.proxy.async`.
    pub fn fence() {
        device {
            // SAFETY: a fence has no precondition.
            unsafe { asm!("fence.proxy.async;", options(nostack)) }
        }
        emulator { emu::bulk_fence(true) }
    }

    /// [`fence`] of shared memory alone, which waits for no write to global memory. PTX:
    /// `fence.proxy.async.shared::cta`.
    pub fn fence_shared() {
        device {
            // SAFETY: a fence has no precondition.
            unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) }
        }
        emulator { emu::bulk_fence(false) }
    }
}

/// Waits until at most the last `PENDING` groups of this thread are still under way: this thread sees what
/// the others wrote. PTX: `cp.async.bulk.wait_group`.
#[crate::device]
pub fn wait<const PENDING: usize>() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: no precondition.
    unsafe {
        asm!("cp.async.bulk.wait_group {0};", const PENDING, options(nostack))
    }
    #[cfg(not(target_arch = "nvptx64"))]
    emu::bulk_wait(PENDING, false)
}

/// Waits until all but at most the last `PENDING` groups of this thread have read what they copy, which may
/// then be written again. PTX: `cp.async.bulk.wait_group.read`.
#[crate::device]
pub fn wait_read<const PENDING: usize>() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: no precondition.
    unsafe {
        asm!("cp.async.bulk.wait_group.read {0};", const PENDING, options(nostack))
    }
    #[cfg(not(target_arch = "nvptx64"))]
    emu::bulk_wait(PENDING, true)
}
