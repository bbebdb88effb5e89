//! The emulator: runs a kernel's own machine code on the CPU, thread by thread, as a GPU would order it.
//!
//! Blocks run in parallel on a thread pool. Within a block, threads are coroutines: one runs until it meets a
//! barrier or a warp primitive, where it parks; when every thread that the primitive needs is there, the
//! exchange happens and all go on. Threads that never park cost a function call each.
//!
//! It is strict where hardware is silent. Each of these is a [`Fault`] that names kernel, block, thread and
//! source line:
//! - an access outside its buffer or its shared array, or not aligned to its own size;
//! - a read of shared memory that nobody wrote;
//! - a read or write of shared memory that an asynchronous copy is still on its way to;
//! - a barrier that not all threads reach, or that they reach at different places;
//! - a lane missing from a shuffle's or vote's mask, or named in it and elsewhere;
//! - a panic (on the device the grid would trap);
//! - with [`EmuOptions::race_check`], two threads touching the same bytes, one of them writing, with nothing
//!   that orders them: no barrier, no warp synchronisation, no fence with an atomic.
//!
//! What it does not model: timing, caches, weak ordering beyond the race check, and progress between blocks
//! (a kernel whose block waits for another block hangs on it, as it may on a GPU).

mod async_copy;
mod block;
mod collective;
mod fault;
mod matrix;
mod memory;
mod race;
mod stack;
pub mod tensor;

use crate::kernel::{Dim3, Kernel, KernelArgs, KernelInfo, LaunchShape};
use rayon::prelude::*;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

pub use fault::{Fault, FaultKind, Place, Race, Space, ThreadId};

pub(crate) use async_copy::{copies_commit, copies_wait, copy_async};
pub(crate) use block::{
    BarrierKind, barrier, fence, reduce, shuffle, sync_warp, vote, wait_for_previous, with_lane,
};
pub(crate) use collective::{FenceScope, ReduceOp, ShuffleKind, VoteKind};
pub(crate) use matrix::{MatrixOp, load_matrix, matrix};
pub(crate) use memory::{
    global_atomic, global_load, global_store, peek, prefetch, shared_atomic, shared_load, shared_store,
};
pub(crate) use tensor::Format;

/// The most dynamic shared memory a block may have: what compute capability 9.0 allows.
pub const MAX_SHARED_BYTES: u32 = 227 * 1024;

/// The most threads a block may have.
pub const MAX_BLOCK_THREADS: u64 = 1024;

/// How a launch is emulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmuOptions {
    /// Also report races. Blocks then run one after another and every access is recorded: for small shapes.
    pub race_check: bool,
    /// Stack of each emulated thread that parks, in bytes.
    pub stack_bytes: usize,
}

impl Default for EmuOptions {
    fn default() -> Self {
        EmuOptions { race_check: false, stack_bytes: 256 * 1024 }
    }
}

impl EmuOptions {
    /// The default options with race checking on.
    pub fn race_checked() -> Self {
        EmuOptions { race_check: true, ..Self::default() }
    }
}

/// Runs `kernel` over the whole grid and returns when it has finished.
///
/// # Safety
/// Every handle in `args` must be valid host memory for the kernel's accesses within its length, and nothing
/// else may use that memory meanwhile. Everything else the emulator checks itself.
///
/// # Errors
/// The fault of the lowest-numbered block that has one. Memory written before it stays written.
pub unsafe fn launch<A: KernelArgs>(
    kernel: &Kernel<A>,
    shape: LaunchShape,
    args: A,
    options: &EmuOptions,
) -> Result<(), Fault> {
    let body = kernel.body();
    run_grid(kernel.info(), shape, &move || body(args), options)
}

fn run_grid(
    info: &'static KernelInfo,
    shape: LaunchShape,
    body: &(dyn Fn() + Sync),
    options: &EmuOptions,
) -> Result<(), Fault> {
    check_shape(info, shape)?;
    block::watch_panics();
    let blocks = shape.grid.count();
    if options.race_check {
        let mut runner = block::Runner::new(info, shape, body, options);
        return (0..blocks).try_for_each(|index| runner.run(index).map_err(|fault| *fault));
    }
    // Blocks above one that failed are skipped, those below still run: so the report does not depend on
    // timing.
    let lowest_failed = AtomicU64::new(u64::MAX);
    let first: Mutex<Option<(u64, Fault)>> = Mutex::new(None);
    let per_task = block::blocks_per_task(shape).max(blocks / (64 * rayon::current_num_threads() as u64));
    (0..blocks.div_ceil(per_task) as usize).into_par_iter().for_each(|task| {
        let start = task as u64 * per_task;
        let mut runner = block::Runner::new(info, shape, body, options);
        for index in start..blocks.min(start + per_task) {
            if index > lowest_failed.load(Ordering::Relaxed) {
                return;
            }
            if let Err(fault) = runner.run(index) {
                lowest_failed.fetch_min(index, Ordering::Relaxed);
                let mut first = first.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                if first.as_ref().is_none_or(|(lowest, _)| index < *lowest) {
                    *first = Some((index, *fault));
                }
                return;
            }
        }
    });
    match first.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        Some((_, fault)) => Err(fault),
        None => Ok(()),
    }
}

fn check_shape(info: &'static KernelInfo, shape: LaunchShape) -> Result<(), Fault> {
    let refuse = |reason: String| Err(Fault::refused(info, reason));
    let Dim3 { x, y, z } = shape.grid;
    let threads = shape.block.count();
    if threads == 0 || shape.grid.count() == 0 {
        return refuse(format!("grid {} of blocks {} has no thread", shape.grid, shape.block));
    }
    if x > 0x7fff_ffff || y > 65535 || z > 65535 {
        return refuse(format!("grid {} exceeds the GPU's (2147483647,65535,65535)", shape.grid));
    }
    let most = MAX_BLOCK_THREADS.min(info.max_threads as u64);
    if threads > most || shape.block.z > 64 {
        return refuse(format!(
            "a block of {} is {threads} threads; the most is {most}, 64 along z",
            shape.block
        ));
    }
    if shape.shared_bytes > MAX_SHARED_BYTES {
        return refuse(format!("{} bytes of shared memory exceed {MAX_SHARED_BYTES}", shape.shared_bytes));
    }
    Ok(())
}
