//! Barriers in shared memory, of as many as there is room for: they count threads that arrive, and bytes that
//! [bulk copies](crate::bulk) bring.
//!
//! A barrier is made for so many arrivals, and is in its phase number 0. A phase is over when as many threads
//! have arrived and when all bytes that they expect have come; the next one begins at once, with all arrivals
//! and no bytes lacking. Whoever waits says which phase it waits for, by its parity: number 0 is even. It
//! then sees what was written by those who arrived before they did, and what the copies brought.
//!
//! A barrier that nobody has arrived at counts as one whose odd phase is over: a producer that waits for the
//! phase before number 0 goes on at once.
//!
//! All of it needs sm_90: mark the kernel `#[kernel(min_sm = 90)]`.
//!
//! ```
//! use simt::emu::{self, EmuOptions};
//! use simt::{Global, GlobalMut, LaunchShape, Mbarrier, Shared, SharedPlan, bulk, kernel, thread};
//!
//! const fn plan() -> (Shared<Mbarrier>, Shared<f32>, u32) {
//!     let mut plan = SharedPlan::new();
//!     let (full, tile) = (plan.array(1), plan.array(256));
//!     (full, tile, plan.bytes())
//! }
//!
//! /// `y`, 256 elements, becomes `x` backwards: one copy brings a tile to 256 threads.
//! #[kernel(min_sm = 90, max_threads = 256)]
//! fn reversed(x: Global<f32>, y: GlobalMut<f32>) {
//!     let (full, tile, _) = plan();
//!     let t = thread::thread_idx_x();
//!     if t == 0 {
//!         full.init(0, 1);
//!         bulk::fence_shared();
//!         full.arrive_and_expect(0, 1024);
//!         tile.copy_bulk(0, x, 0, 1024, full, 0);
//!     }
//!     // The barrier is there for all.
//!     thread::sync_threads();
//!     full.wait(0, 0);
//!     y.store(t as usize, tile.load(255 - t));
//! }
//!
//! fn main() {
//!     // Aligned to 16 bytes, as device memory is.
//!     let four = glam::Vec4::new(0.0, 1.0, 2.0, 3.0);
//!     let x: Vec<glam::Vec4> = (0..64).map(|i| four + 4.0 * i as f32).collect();
//!     let mut y = vec![0f32; 256];
//!     // SAFETY: the memory lives, and nothing else uses it meanwhile.
//!     let result = unsafe {
//!         let x = Global::from_raw(x.as_ptr() as u64, 256);
//!         let args = reversed::Args { x, y: GlobalMut::from_raw(y.as_mut_ptr() as u64, 256) };
//!         let shape = LaunchShape::new(1, 256).shared(plan().2);
//!         emu::launch(&reversed::kernel(), shape, args, &EmuOptions::race_checked())
//!     };
//!     assert_eq!(result, Ok(()));
//!     assert_eq!(y[..3], [255.0, 254.0, 253.0]);
//! }
//! ```

use crate::Shared;
#[cfg(not(target_arch = "nvptx64"))]
use crate::emu;
use bytemuck::{Pod, Zeroable};
#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

/// A barrier: eight bytes of shared memory, which mean nothing to others.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(transparent)]
pub struct Mbarrier(u64);

impl Shared<Mbarrier> {
    #[cfg(target_arch = "nvptx64")]
    #[inline(always)]
    pub(crate) fn address(self, index: u32) -> u32 {
        crate::ptx::shared_base() + self.byte_offset(index)
    }

    /// Makes element `index` a barrier of `count` arrivals, 1 to 1,048,575. Other threads may use it behind
    /// a barrier of the block, copies behind a [`bulk::fence_shared`](crate::bulk::fence_shared). PTX:
    /// `mbarrier.init.shared::cta.b64`.
    #[crate::device]
    pub fn init(self, index: u32, count: u32) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds and free by the launch's contract, which the emulator checks.
        unsafe {
            asm!("mbarrier.init.shared::cta.b64 [{0}], {1};", in(reg32) self.address(index), in(reg32) count,
                options(nostack))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::mbarrier_init(emu::Named::new(self, index), count)
    }

    /// Makes element `index` plain memory again, for other uses or another [`init`](Self::init); nobody may
    /// be at it. PTX: `mbarrier.inval.shared::cta.b64`.
    #[crate::device]
    pub fn invalidate(self, index: u32) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: as for `init`.
        unsafe {
            asm!("mbarrier.inval.shared::cta.b64 [{0}];", in(reg32) self.address(index), options(nostack))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::mbarrier_invalidate(emu::Named::new(self, index))
    }

    /// This thread arrives at element `index`, and does not wait: what it has read and written is done for
    /// those who wait for the phase. PTX: `mbarrier.arrive.shared::cta.b64` (release, of the block).
    #[crate::device]
    pub fn arrive(self, index: u32) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: as for `init`.
        unsafe {
            asm!("mbarrier.arrive.shared::cta.b64 _, [{0}];", in(reg32) self.address(index), options(nostack))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::mbarrier_arrive(emu::Named::new(self, index), 0)
    }

    /// [`arrive`](Self::arrive), and the phase expects `bytes` bytes more of copies. At no time may more than
    /// 1,048,575 be lacking. PTX: `mbarrier.arrive.expect_tx.shared::cta.b64`.
    #[crate::device]
    pub fn arrive_and_expect(self, index: u32, bytes: u32) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: as for `init`.
        unsafe {
            asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{0}], {1};", in(reg32) self.address(index),
                in(reg32) bytes, options(nostack))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::mbarrier_arrive(emu::Named::new(self, index), bytes)
    }

    /// Whether the phase of element `index` that has the parity of `phase` is over: the phase under way, or
    /// the one before it. If it is, this thread sees what those who arrived did, and what the copies
    /// brought. It may rest for a while first. PTX: `mbarrier.try_wait.parity.shared::cta.b64` (acquire, of
    /// the block).
    #[crate::device]
    pub fn try_wait(self, index: u32, phase: u32) -> bool {
        #[cfg(target_arch = "nvptx64")]
        {
            let over: u32;
            // SAFETY: as for `init`.
            unsafe {
                asm!("{{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{1}], {2}; selp.u32 {0}, 1, 0, p; }}",
                    out(reg32) over, in(reg32) self.address(index), in(reg32) phase & 1, options(nostack))
            }
            over != 0
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emu::mbarrier_try_wait(emu::Named::new(self, index), phase)
    }

    /// Waits until the phase of element `index` that has the parity of `phase` is over: a loop of
    /// [`try_wait`](Self::try_wait).
    #[crate::device]
    pub fn wait(self, index: u32, phase: u32) {
        while !self.try_wait(index, phase) {}
    }
}
