//! Copies from global to shared memory that run while the thread goes on: `cp.async`.
//!
//! A thread starts copies, closes them into a group ([`commit`]), and waits until at most so many of its
//! groups are still under way ([`wait`]). From then on the bytes are there **for this thread**; a barrier
//! shows them to others. The emulator moves the bytes as late as it may, at the wait, and reports a read or
//! write of bytes that are still on the way.
//!
//! A copy is of 16 bytes, which pass by the L1 cache, or of 8 or 4, which go through it: for rows that are
//! not aligned to 16, and for gathers of single elements.

#[cfg(not(target_arch = "nvptx64"))]
use crate::emu;
use crate::{Global, Pod, Shared};
#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

impl<T: Pod> Shared<T> {
    /// Starts copying 16 bytes from element `from` of `source` to element `index`, both aligned to 16; they
    /// pass by the L1 cache. PTX: `cp.async.cg.shared.global.L2::128B`.
    #[crate::device]
    pub fn copy_async<S: Pod>(self, index: u32, source: Global<S>, from: usize) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds and aligned by the launch's contract, which the emulator checks.
        unsafe {
            asm!(
                "{{ .reg .b64 g; cvta.to.global.u64 g, {1}; cp.async.cg.shared.global.L2::128B [{0}], [g], 16; }}",
                in(reg32) crate::ptx::shared_base() + self.byte_offset(index), in(reg64) source.element(from),
                options(nostack)
            );
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::copy_async::<T, S, u128>(self, index, source, from, true)
    }

    /// [`copy_async`](Self::copy_async) of bytes that nobody needs again soon: the L2 cache gives them up
    /// first, and keeps what others write meanwhile. PTX: `cp.async.cg.shared.global.L2::cache_hint.L2::128B`
    /// with the policy of `createpolicy.fractional.L2::evict_first`.
    #[crate::device]
    pub fn copy_async_once<S: Pod>(self, index: u32, source: Global<S>, from: usize) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: as above.
        unsafe {
            asm!(
                "{{ .reg .b64 g; cvta.to.global.u64 g, {1}; \
                 cp.async.cg.shared.global.L2::cache_hint.L2::128B [{0}], [g], 16, {2}; }}",
                in(reg32) crate::ptx::shared_base_of_lane() + self.byte_offset(index), in(reg64) source.element(from),
                in(reg64) crate::ptx::evict_first(), options(nostack)
            );
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::copy_async::<T, S, u128>(self, index, source, from, true)
    }

    /// [`copy_async`](Self::copy_async), or 16 zero bytes if not `present`: then nothing is read, and
    /// `from` may lie outside, aligned as ever. PTX: `cp.async.cg.shared.global.L2::128B` with a source size
    /// of 16 or 0.
    #[crate::device]
    pub fn copy_async_or_zero<S: Pod>(self, index: u32, source: Global<S>, from: usize, present: bool) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: as above; a source of no bytes is not read.
        unsafe {
            asm!(
                "{{ .reg .b64 g; cvta.to.global.u64 g, {1}; cp.async.cg.shared.global.L2::128B [{0}], [g], 16, {2}; }}",
                in(reg32) crate::ptx::shared_base() + self.byte_offset(index), in(reg64) source.element(from),
                in(reg32) if present { 16u32 } else { 0 }, options(nostack)
            );
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::copy_async::<T, S, u128>(self, index, source, from, present)
    }

    /// Starts copying 8 bytes from element `from` of `source` to element `index`, both aligned to 8. PTX:
    /// `cp.async.ca.shared.global` of 8.
    #[crate::device]
    pub fn copy_async_8<S: Pod>(self, index: u32, source: Global<S>, from: usize) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: as above.
        unsafe {
            asm!(
                "{{ .reg .b64 g; cvta.to.global.u64 g, {1}; cp.async.ca.shared.global [{0}], [g], 8; }}",
                in(reg32) crate::ptx::shared_base() + self.byte_offset(index), in(reg64) source.element(from),
                options(nostack)
            );
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::copy_async::<T, S, u64>(self, index, source, from, true)
    }

    /// [`copy_async_8`](Self::copy_async_8), or 8 zero bytes if not `present`: then nothing is read, and
    /// `from` may lie outside, aligned as ever. PTX: `cp.async.ca.shared.global` of 8 with a source size of 8
    /// or 0.
    #[crate::device]
    pub fn copy_async_8_or_zero<S: Pod>(self, index: u32, source: Global<S>, from: usize, present: bool) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: as above; a source of no bytes is not read.
        unsafe {
            asm!(
                "{{ .reg .b64 g; cvta.to.global.u64 g, {1}; cp.async.ca.shared.global [{0}], [g], 8, {2}; }}",
                in(reg32) crate::ptx::shared_base() + self.byte_offset(index), in(reg64) source.element(from),
                in(reg32) if present { 8u32 } else { 0 }, options(nostack)
            );
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::copy_async::<T, S, u64>(self, index, source, from, present)
    }

    /// Starts copying 4 bytes from element `from` of `source` to element `index`, both aligned to 4. PTX:
    /// `cp.async.ca.shared.global` of 4.
    #[crate::device]
    pub fn copy_async_4<S: Pod>(self, index: u32, source: Global<S>, from: usize) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: as above.
        unsafe {
            asm!(
                "{{ .reg .b64 g; cvta.to.global.u64 g, {1}; cp.async.ca.shared.global [{0}], [g], 4; }}",
                in(reg32) crate::ptx::shared_base() + self.byte_offset(index), in(reg64) source.element(from),
                options(nostack)
            );
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::copy_async::<T, S, u32>(self, index, source, from, true)
    }

    /// [`copy_async_4`](Self::copy_async_4), or 4 zero bytes if not `present`: then nothing is read, and
    /// `from` may lie outside, aligned as ever. PTX: `cp.async.ca.shared.global` of 4 with a source size of 4
    /// or 0.
    #[crate::device]
    pub fn copy_async_4_or_zero<S: Pod>(self, index: u32, source: Global<S>, from: usize, present: bool) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: as above; a source of no bytes is not read.
        unsafe {
            asm!(
                "{{ .reg .b64 g; cvta.to.global.u64 g, {1}; cp.async.ca.shared.global [{0}], [g], 4, {2}; }}",
                in(reg32) crate::ptx::shared_base() + self.byte_offset(index), in(reg64) source.element(from),
                in(reg32) if present { 4u32 } else { 0 }, options(nostack)
            );
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::copy_async::<T, S, u32>(self, index, source, from, present)
    }
}

sides! {
    /// Closes the copies started since the last call into a group; a group may be empty. PTX:
    /// `cp.async.commit_group`.
    pub fn commit() {
        device {
            // SAFETY: no precondition.
            unsafe { asm!("cp.async.commit_group;", options(nostack)) }
        }
        emulator { emu::copies_commit() }
    }
}

/// Waits until at most the last `PENDING` groups of this thread are still under way. PTX:
/// `cp.async.wait_group`.
#[crate::device]
pub fn wait<const PENDING: usize>() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: no precondition.
    unsafe {
        asm!("cp.async.wait_group {0};", const PENDING, options(nostack))
    }
    #[cfg(not(target_arch = "nvptx64"))]
    emu::copies_wait(PENDING)
}
