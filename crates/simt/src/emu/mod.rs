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
//! - an mbarrier that is used before it is there, or that more threads or bytes come to than it expects; a
//!   bulk copy of a wrong size or place, or that nobody waits for; a tensor copy by a map that is none, or
//!   of another rank, or to a place that is not aligned;
//! - products of a group of four warps that these do not make together, or whose sums or operands are used
//!   before somebody has waited;
//! - a barrier that not all threads reach, or that they reach at different places;
//! - a rank that a cluster does not have, another block's shared memory before that block has started or
//!   behind its end, a cluster's barrier that not all threads reach;
//! - a lane missing from a shuffle's or vote's mask, or named in it and elsewhere;
//! - a panic (on the device the grid would trap); local variables that overflow the thread's stack;
//! - threads that wait for each other, or for a word, while nothing changes any more;
//! - with [`EmuOptions::race_check`], two threads touching the same bytes, one of them writing, with nothing
//!   that orders them: no barrier, no warp synchronisation, no fence with an atomic; read-only loads of what
//!   the launch writes; sources of asynchronous copies that are written too early; bulk copies of plain
//!   writes that no fence has shown to them; atomics of two widths;
//! - with [`EmuOptions::memory_check`], reads of global memory that nobody wrote, and handles to freed
//!   memory;
//! - with [`EmuOptions::orders`], results that depend on the order in which threads run.
//!
//! What it does not model: timing and caches, and weak ordering without the race check. `docs/emulator.md`
//! has a table of planted bugs, found and missed.

pub mod allocations;
mod async_copy;
mod block;
mod bulk;
mod calls;
mod clock;
mod cluster;
mod collective;
mod fault;
mod fixed;
mod grid;
mod history;
mod lane;
mod late;
mod lodging;
mod matrix;
mod mbarrier;
mod memory;
mod mutation;
mod named;
mod options;
mod orders;
mod panics;
pub(crate) mod print;
mod race;
mod rows;
mod shared;
mod stack;
mod target;
mod team;
pub mod tensor;
mod tiles;
pub mod traffic;
mod trap;
mod weak;
pub(crate) mod wgmma;

use crate::kernel::{ArgMemory, Dim3, Kernel, KernelArgs, KernelInfo, LaunchShape};
use crate::print::{Sink, away_from_sink};
use std::ops::Range;
use std::sync::Arc;

#[doc(hidden)]
pub use calls::mark;
#[doc(hidden)]
pub use fault::interned;
pub use fault::{
    Endless, Excess, Fault, FaultKind, OrderDependence, Place, ProductFault, Race, Space, ThreadId,
    TileMistake, Wait, WaitFor,
};
pub use mutation::MUTATION_VARIABLE;
pub use options::{EmuOptions, SCHEDULE_VARIABLE, STREAM_CHECK_VARIABLE, Schedule};
pub(crate) use target::current as current_target;
pub use target::{EMULATE_VARIABLE, Target, UnknownTarget};
pub use tensor::TensorCores;
pub use tiles::{tensor_map, tensor_map_mut};

pub(crate) use async_copy::{copies_commit, copies_wait, copy_async};
pub(crate) use bulk::{bulk_commit, bulk_fence, bulk_load, bulk_store, bulk_wait};
pub(crate) use cluster::{Remote, check_rank, cluster_atomic, cluster_barrier, cluster_load, cluster_store};
pub(crate) use collective::{FenceScope, ReduceOp, ShuffleKind, VoteKind};
pub(crate) use lane::{
    BarrierKind, active_mask, barrier, fence, match_all, match_any, named_barrier, pause, reduce, shuffle,
    sync_warp, vote, wait_for_previous, with_lane,
};
pub(crate) use matrix::{MatrixOp, load_matrix, matrix};
pub(crate) use mbarrier::{Named, mbarrier_arrive, mbarrier_init, mbarrier_invalidate, mbarrier_try_wait};
pub(crate) use memory::{global_atomic, global_load, global_load_readonly, global_store, peek, prefetch};
pub(crate) use rows::{check_matrix, check_place, check_slice};
pub(crate) use shared::{shared_atomic, shared_load, shared_store};
pub(crate) use tensor::Format;
pub(crate) use tiles::{tile_acquire, tile_load, tile_prefetch, tile_store};

/// The most dynamic shared memory a block may have on any GPU: what compute capability 9.0 allows.
/// [`Target::max_shared_bytes`] is that of one.
pub const MAX_SHARED_BYTES: u32 = 227 * 1024;

/// The most threads a block may have.
pub const MAX_BLOCK_THREADS: u64 = 1024;

/// Runs `kernel` over the whole grid and returns when it has finished.
///
/// # Safety
/// Every handle in `args` must be valid host memory for the kernel's accesses within its length, and nothing
/// else may use that memory meanwhile. Everything else the emulator checks itself.
///
/// # Errors
/// The fault of the lowest-numbered block that has one, or cluster of blocks; in an order that a [`Schedule`]
/// names, the first fault that happens. Memory written before it stays written.
pub unsafe fn launch<A: KernelArgs>(
    kernel: &Kernel<A>,
    shape: LaunchShape,
    args: A,
    options: &EmuOptions,
) -> Result<(), Fault> {
    // SAFETY: this function's contract.
    unsafe { launch_printing(kernel, shape, args, options, None) }
}

/// [`launch`], which prints to `sink`; without one to where [`launch`] does.
///
/// # Safety
/// As [`launch`].
///
/// # Errors
/// As [`launch`].
pub unsafe fn launch_printing<A: KernelArgs>(
    kernel: &Kernel<A>,
    shape: LaunchShape,
    args: A,
    options: &EmuOptions,
    sink: Option<&Sink>,
) -> Result<(), Fault> {
    let body = kernel.body();
    let args = mutation::arguments(kernel.info(), args);
    let memory = memory_of(&args, options);
    let asked = Asked { sink: sink.cloned(), ..Asked::default() };
    run_grid(kernel.info(), shape, &move || body(args), options, &memory, asked)
}

/// [`launch`], once, which also says who wrote any of `bytes` last, and where: addresses of global memory.
///
/// # Safety
/// As [`launch`].
///
/// # Errors
/// As [`launch`].
pub unsafe fn launch_watched<A: KernelArgs>(
    kernel: &Kernel<A>,
    shape: LaunchShape,
    args: A,
    options: &EmuOptions,
    bytes: Range<u64>,
) -> Result<Option<(ThreadId, Place)>, Fault> {
    let (body, options) = (kernel.body(), EmuOptions { orders: 0, ..*options });
    let args = mutation::arguments(kernel.info(), args);
    let (memory, watchpoint) = (memory_of(&args, &options), orders::Watchpoint::new(bytes));
    let asked = Asked { watchpoint: Some(watchpoint.clone()), ..Asked::default() };
    run_grid(kernel.info(), shape, &move || body(args), &options, &memory, asked)?;
    Ok(watchpoint.last())
}

/// What the arguments lead to, where a launch with these options asks for it.
fn memory_of<A: KernelArgs>(args: &A, options: &EmuOptions) -> Vec<(&'static str, ArgMemory)> {
    let mut memory = Vec::new();
    if options.memory_check || options.race_check || options.orders > 0 || allocations::any() {
        args.memory(&mut |parameter, handle| memory.push((parameter, handle)));
        tiles::add_tensors(&mut memory);
    }
    memory
}

/// What is asked of a launch beside its results.
#[derive(Default)]
struct Asked {
    traffic: Option<Arc<traffic::Traffic>>,
    watchpoint: Option<Arc<orders::Watchpoint>>,
    /// Who gets what is printed, if that is not the thread's to say.
    sink: Option<Sink>,
}

fn run_grid(
    info: &'static KernelInfo,
    shape: LaunchShape,
    body: &(dyn Fn() + Sync),
    options: &EmuOptions,
    memory: &[(&'static str, ArgMemory)],
    asked: Asked,
) -> Result<(), Fault> {
    let target = options.emulated().map_err(|reason| Fault::refused(info, reason))?;
    check_shape(info, shape, target)?;
    let schedule = options.schedule().map_err(|reason| Fault::refused(info, reason))?;
    let mutated = mutation::is_on().map_err(|reason| Fault::refused(info, reason))?;
    panics::watch();
    let mut tracked = if options.memory_check {
        if let Some((parameter, _)) = memory.iter().find(|(_, memory)| allocations::is_freed(memory.address))
        {
            return Err(Fault::of_launch(info, FaultKind::Freed { parameter }));
        }
        Some(allocations::Tracked::of(memory.iter().map(|(_, memory)| memory.address)))
    } else {
        // What this launch writes is not seen: all that it could write counts as written.
        for (_, memory) in memory.iter().filter(|(_, memory)| memory.writable) {
            allocations::write(memory.address, memory.bytes as usize);
        }
        None
    };
    let Asked { traffic, watchpoint, sink } = asked;
    if traffic.is_some() {
        tracked.get_or_insert_default().traffic = traffic;
    }
    let tracked = tracked.map(Arc::new);
    let sink = Some(crate::print::sink(sink.as_ref()));
    let options = EmuOptions { target: Some(target), ..*options };
    let late = None;
    let setting =
        block::Setting { info, shape, body, options, schedule, tracked, watchpoint, mutated, sink, late };
    let outputs = memory.iter().filter(|(_, memory)| memory.writable && memory.bytes > 0);
    let outputs: Vec<_> = outputs.map(|&(parameter, memory)| orders::Output { parameter, memory }).collect();
    if options.orders == 0 {
        return away_from_sink(|| orders::run(setting, &outputs));
    }
    away_from_sink(|| orders::run_in_all(setting, &outputs))
}

fn check_shape(info: &'static KernelInfo, shape: LaunchShape, target: Target) -> Result<(), Fault> {
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
    let cluster = info.cluster;
    if !shape.grid.is_multiple_of(cluster) {
        return refuse(format!("grid {} is no multiple of the kernel's cluster {cluster}", shape.grid));
    }
    let most = target.max_shared_bytes();
    if shape.shared_bytes > most {
        return refuse(format!(
            "{} bytes of shared memory exceed {most}, which {target} has",
            shape.shared_bytes
        ));
    }
    Ok(())
}
