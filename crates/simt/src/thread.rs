//! Where this thread is, the barriers and fences of its block, and how its grid meets the next.

#[cfg(not(target_arch = "nvptx64"))]
use crate::emu;
#[cfg(target_arch = "nvptx64")]
use core::arch::nvptx as intrinsic;

macro_rules! index_functions {
    ($($name:ident, $intrinsic:ident, $what:literal, $register:literal, |$lane:ident| $emu:expr;)*) => {
        sides! {$(
            #[doc = concat!($what, " PTX: `mov.u32 %r, ", $register, "`.")]
            pub fn $name() -> u32 {
                device {
                    // SAFETY: reads a special register.
                    unsafe { intrinsic::$intrinsic() as u32 }
                }
                emulator { emu::with_lane(|$lane| $emu) }
            }
        )*}
    };
}

index_functions! {
    thread_idx_x, _thread_idx_x, "This thread's x index in its block.", "%tid.x", |l| l.thread.x;
    thread_idx_y, _thread_idx_y, "This thread's y index in its block.", "%tid.y", |l| l.thread.y;
    thread_idx_z, _thread_idx_z, "This thread's z index in its block.", "%tid.z", |l| l.thread.z;
    block_dim_x, _block_dim_x, "Threads of a block along x.", "%ntid.x", |l| l.block().shape.block.x;
    block_dim_y, _block_dim_y, "Threads of a block along y.", "%ntid.y", |l| l.block().shape.block.y;
    block_dim_z, _block_dim_z, "Threads of a block along z.", "%ntid.z", |l| l.block().shape.block.z;
    block_idx_x, _block_idx_x, "This block's x index in the grid.", "%ctaid.x", |l| l.block().index.get().x;
    block_idx_y, _block_idx_y, "This block's y index in the grid.", "%ctaid.y", |l| l.block().index.get().y;
    block_idx_z, _block_idx_z, "This block's z index in the grid.", "%ctaid.z", |l| l.block().index.get().z;
    grid_dim_x, _grid_dim_x, "Blocks of the grid along x.", "%nctaid.x", |l| l.block().shape.grid.x;
    grid_dim_y, _grid_dim_y, "Blocks of the grid along y.", "%nctaid.y", |l| l.block().shape.grid.y;
    grid_dim_z, _grid_dim_z, "Blocks of the grid along z.", "%nctaid.z", |l| l.block().shape.grid.z;
}

/// Number of this thread in a one-dimensional grid: `block_idx_x * block_dim_x + thread_idx_x`, in 64 bits.
#[crate::device]
pub fn index_1d() -> usize {
    block_idx_x() as usize * block_dim_x() as usize + thread_idx_x() as usize
}

sides! {
    /// Waits until every thread of the block is here; orders their shared and global memory accesses.
    /// PTX: `bar.sync 0`. Every thread of the block must reach one, the lanes of a warp the same call.
    pub fn sync_threads() {
        device {
            // SAFETY: no precondition but convergence, which the emulator checks.
            unsafe { crate::ptx::convergent::barrier(0) }
        }
        emulator { emu::barrier(emu::BarrierKind::Plain, 0); }
    }

    /// [`sync_threads`], and how many threads of the block passed a non-zero `predicate`.
    /// PTX: `bar.red.popc.u32`.
    pub fn sync_threads_count(predicate: u32) -> u32 {
        device {
            // SAFETY: no precondition but convergence, which the emulator checks.
            unsafe { crate::ptx::convergent::barrier_count(0, predicate != 0) }
        }
        emulator { emu::barrier(emu::BarrierKind::Count, predicate) }
    }

    /// [`sync_threads`], and 1 if every thread of the block passed a non-zero `predicate`, else 0.
    /// PTX: `bar.red.and.pred`.
    pub fn sync_threads_and(predicate: u32) -> u32 {
        device {
            // SAFETY: no precondition but convergence, which the emulator checks.
            unsafe { crate::ptx::convergent::barrier_and(0, predicate != 0) as u32 }
        }
        emulator { emu::barrier(emu::BarrierKind::And, predicate) }
    }

    /// [`sync_threads`], and 1 if any thread of the block passed a non-zero `predicate`, else 0.
    /// PTX: `bar.red.or.pred`.
    pub fn sync_threads_or(predicate: u32) -> u32 {
        device {
            // SAFETY: no precondition but convergence, which the emulator checks.
            unsafe { crate::ptx::convergent::barrier_or(0, predicate != 0) as u32 }
        }
        emulator { emu::barrier(emu::BarrierKind::Or, predicate) }
    }

    /// Waits until so many threads of the block have come to this barrier, or have
    /// [announced](named_barrier_arrive) themselves there; orders their memory accesses. `barrier` is 1 to
    /// 15, and `threads` a multiple of 32: a warp counts as 32. All lanes of a warp must make the same call.
    /// PTX: `bar.sync barrier, threads`.
    pub fn named_barrier_sync(barrier: u32, threads: u32) {
        device {
            // SAFETY: no precondition but convergence and numbers in range, which the emulator checks.
            unsafe { crate::ptx::convergent::named_barrier_sync(barrier, threads) }
        }
        emulator { emu::named_barrier(barrier, threads, true); }
    }

    /// Counts as a thread that has come to this barrier, and does not wait: what it did before is done for
    /// those who [wait](named_barrier_sync) there. For warps that produce what other warps use. PTX:
    /// `bar.arrive barrier, threads`.
    pub fn named_barrier_arrive(barrier: u32, threads: u32) {
        device {
            // SAFETY: as for `named_barrier_sync`.
            unsafe { crate::ptx::convergent::named_barrier_arrive(barrier, threads) }
        }
        emulator { emu::named_barrier(barrier, threads, false); }
    }

    /// Orders this thread's memory accesses before and after, as its block sees them. PTX:
    /// `fence.acq_rel.cta`.
    pub fn block_fence() {
        device {
            // SAFETY: a fence has no precondition.
            unsafe { core::arch::asm!("fence.acq_rel.cta;", options(nostack)) }
        }
        emulator { emu::fence(emu::FenceScope::Block); }
    }

    /// Orders this thread's memory accesses before and after, as the whole GPU sees them. PTX:
    /// `fence.acq_rel.gpu`. Before an [atomic](crate::atomic) it is what lets another block read what this
    /// one wrote.
    pub fn device_fence() {
        device {
            // SAFETY: a fence has no precondition.
            unsafe { core::arch::asm!("fence.acq_rel.gpu;", options(nostack)) }
        }
        emulator { emu::fence(emu::FenceScope::Device); }
    }

    /// [`device_fence`], and in one order with all such fences of the GPU (sequential consistency). PTX:
    /// `fence.sc.gpu`. Two threads that each announce themselves by an atomic and then look for the other
    /// need it in between: with [`device_fence`] both may see nobody.
    pub fn device_fence_sc() {
        device {
            // SAFETY: a fence has no precondition.
            unsafe { core::arch::asm!("fence.sc.gpu;", options(nostack)) }
        }
        emulator { emu::fence(emu::FenceScope::Full); }
    }

    /// Orders this thread's memory accesses before and after, as the GPU, its peers and the host see them.
    /// PTX: `fence.acq_rel.sys`.
    pub fn system_fence() {
        device {
            // SAFETY: a fence has no precondition.
            unsafe { core::arch::asm!("fence.acq_rel.sys;", options(nostack)) }
        }
        emulator { emu::fence(emu::FenceScope::Device); }
    }

    /// Rests for about so many nanoseconds, none to twice as many: for a warp that would only take from
    /// others what they need more. PTX: `nanosleep.u32`. The emulator lets other threads go first now and
    /// then.
    pub fn pause(nanoseconds: u32) {
        device {
            // SAFETY: it only waits.
            unsafe { core::arch::asm!("nanosleep.u32 {0};", in(reg32) nanoseconds, options(nomem, nostack)) }
        }
        emulator {
            let _ = nanoseconds;
            emu::pause();
        }
    }

    /// Waits until the launch before this one in the stream is done and all it wrote can be read, where this
    /// launch may have started before that; else does nothing. PTX: `griddepcontrol.wait`, on sm_90 and
    /// later.
    ///
    /// `#[kernel(overlaps)]` puts it at the start of a kernel, ahead of every access; a second call changes
    /// nothing. A kernel with `overlaps = late` or `by_hand` calls it itself, once and on no branch. Before,
    /// it may `load_ahead` what no launch writes that the stream may still be at: weights, tables. The lint
    /// refuses other accesses there; which memory it is a device of the CPU backend checks, with
    /// `stream_check`. The emulator, which runs one launch after another, reports a kernel that returns
    /// without the call.
    pub fn wait_for_previous() {
        device {
            // Threads may come here one by one, on any path: the instruction waits for a grid, not for other
            // lanes. So it is no convergent operation, and assembly will do. Without `nomem` LLVM moves no
            // access across it.
            // SAFETY: it only waits.
            unsafe { core::arch::asm!("griddepcontrol.wait; // simt.since 90", options(nostack)) }
        }
        emulator { emu::wait_for_previous() }
    }

    /// Lets the next launch of the stream start, if its kernel is one that `overlaps`: once a thread of every
    /// block has called this or the block has ended, the next launch's blocks take what room is left, and
    /// wait there for this launch to be done. `#[kernel(overlaps)]` puts it at the start of a kernel, ahead
    /// of the wait. PTX: `griddepcontrol.launch_dependents`, on sm_90 and later.
    ///
    /// It publishes nothing: what is written before the call is seen no sooner than what is written after it.
    pub fn let_next_start() {
        device {
            // As for `wait_for_previous`.
            // SAFETY: who starts early waits before the first access that depends on this launch.
            unsafe {
                core::arch::asm!("griddepcontrol.launch_dependents; // simt.since 90", options(nostack))
            }
        }
        emulator {}
    }
}

/// Whether the kernel's target is sm_`SM` or newer: a constant of each target's PTX, so that ptxas leaves the
/// arm out that is not taken. Both arms are in the PTX of every target, so each must be made of what every
/// target has. The emulator answers for the GPU that it emulates.
#[inline(always)]
pub fn target_has<const SM: u32>() -> bool {
    #[cfg(target_arch = "nvptx64")]
    {
        let answer: u32;
        // SAFETY: writes a register.
        unsafe {
            core::arch::asm!(
                "mov.b32 {0}, 1; // simt.since {1}",
                "mov.b32 {0}, 0; // simt.below {1}",
                out(reg32) answer, const SM, options(pure, nomem, nostack)
            );
        }
        answer != 0
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        emu::current_target().number() >= SM
    }
}
