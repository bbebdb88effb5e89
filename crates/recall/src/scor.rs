//! Scopes and fences, after the patterns of ScoR: what is handed from one thread to another by an atomic, and
//! how far the fences on both sides reach.

#[cfg(not(target_arch = "nvptx64"))]
use crate::Machine;
#[cfg(not(target_arch = "nvptx64"))]
use crate::case::{Found, Mode};
#[cfg(not(target_arch = "nvptx64"))]
use ferrokv_device::Result;
#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
use simt::{GlobalMut, kernel, thread, warp};

#[kernel]
fn fence_too_narrow(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    // In the twin both threads are of one block: there a block's fence is enough, for global memory too.
    let (t, block) = (thread::thread_idx_x(), thread::block_idx_x());
    let (giver, taker) = if bug != 0 { ((0, 0), (0, 1)) } else { ((0, 0), (1, 0)) };
    if (t, block) == giver {
        data.store(0, 7);
        thread::block_fence();
        flag.atomic_exchange(0, 1);
    } else if (t, block) == taker {
        while flag.atomic_add(0, 0) == 0 {}
        thread::block_fence();
        out.store(0, data.load(0)); // BUG: the fences reach their own blocks only
    }
}

#[kernel(args = fence_too_narrow)]
fn reader_fence_too_narrow(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    if thread::block_idx_x() == 0 {
        data.store(0, 7);
        thread::device_fence();
        flag.atomic_exchange(0, 1);
    } else {
        while flag.atomic_add(0, 0) == 0 {}
        if bug != 0 {
            thread::block_fence();
        } else {
            thread::device_fence();
        }
        out.store(0, data.load(0)); // BUG: the reader's fence is for its own block
    }
}

#[kernel(args = fence_too_narrow)]
fn no_fence_at_the_writer(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    if thread::block_idx_x() == 0 {
        data.store(0, 7);
        if bug == 0 {
            thread::device_fence();
        }
        flag.atomic_exchange(0, 1);
    } else {
        while flag.atomic_add(0, 0) == 0 {}
        thread::device_fence();
        out.store(0, data.load(0)); // BUG: the writer made no fence
    }
}

#[kernel(args = fence_too_narrow)]
fn no_fence_at_the_reader(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    if thread::block_idx_x() == 0 {
        data.store(0, 7);
        thread::device_fence();
        flag.atomic_exchange(0, 1);
    } else {
        while flag.atomic_add(0, 0) == 0 {}
        if bug == 0 {
            thread::device_fence();
        }
        out.store(0, data.load(0)); // BUG: the reader made no fence
    }
}

#[kernel(args = fence_too_narrow)]
fn fence_behind_the_flag(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    if thread::block_idx_x() == 0 {
        data.store(0, 7);
        if bug != 0 {
            flag.atomic_exchange(0, 1);
            thread::device_fence();
        } else {
            thread::device_fence();
            flag.atomic_exchange(0, 1);
        }
    } else {
        while flag.atomic_add(0, 0) == 0 {}
        thread::device_fence();
        out.store(0, data.load(0)); // BUG: the fence came behind the flag
    }
}

#[kernel(args = fence_too_narrow)]
fn flag_by_plain_store(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    if thread::block_idx_x() == 0 {
        data.store(0, 7);
        thread::device_fence();
        if bug != 0 {
            flag.store(0, 1);
        } else {
            flag.atomic_exchange(0, 1);
        }
    } else {
        while flag.atomic_add(0, 0) == 0 {} // BUG: the flag is set by a plain store
        thread::device_fence();
        out.store(0, data.load(0));
    }
}

#[kernel(args = fence_too_narrow)]
fn lock_with_block_fences(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    while flag.atomic_cas(0, 0, 1) != 0 {}
    if bug != 0 {
        thread::block_fence();
    } else {
        thread::device_fence();
    }
    let sum = data.load(0) + 1; // BUG: the lock's fences are those of a block
    data.store(0, sum);
    if bug != 0 {
        thread::block_fence();
    } else {
        thread::device_fence();
    }
    flag.atomic_exchange(0, 0);
    out.atomic_add(0, 1);
}

#[kernel(args = fence_too_narrow)]
fn only_one_thread_fences(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    // All threads write, one counts the block in.
    let (t, i) = (thread::thread_idx_x(), thread::index_1d());
    data.store(i, t);
    if bug == 0 {
        thread::sync_threads();
    }
    if t == 0 {
        thread::device_fence();
        if flag.atomic_add(0, 1) + 1 == thread::grid_dim_x() {
            thread::device_fence();
            let mut sum = 0;
            for other in 0..2 * thread::block_dim_x() {
                sum += data.load(other as usize); // BUG: its fence is not the other threads'
            }
            out.store(0, sum);
        }
    }
}

#[kernel(args = fence_too_narrow)]
fn block_barrier_between_blocks(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    let i = thread::index_1d();
    let all = 2 * thread::block_dim_x() as usize;
    if bug == 0 {
        // In the twin each block stays with its own.
        let first = i - thread::thread_idx_x() as usize;
        data.store(i, flag.load(0));
        thread::sync_threads();
        out.store(i, data.load(first + (i + 1) % thread::block_dim_x() as usize));
        return;
    }
    data.store(i, flag.load(0)); // BUG: a barrier orders one block only
    thread::sync_threads();
    out.store(i, data.load((i + 1) % all));
}

#[kernel(args = fence_too_narrow)]
fn warp_barrier_between_warps(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x() as usize;
    if thread::block_idx_x() != 0 {
        return;
    }
    data.store(t, flag.load(0));
    if bug != 0 {
        warp::sync_warp(warp::FULL_MASK);
    } else {
        thread::sync_threads();
    }
    let other = data.load((t + 32) % 64); // BUG: a warp's barrier orders one warp only
    thread::sync_threads();
    out.store(t, other);
}

#[kernel(args = fence_too_narrow)]
fn counter_of_block_scope(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    // In the twin each block has a word of its own, and one thread of it hands on what is there.
    let block = thread::block_idx_x() as usize;
    if bug != 0 {
        flag.in_block_scope().atomic_add(0, 1); // BUG: blocks count in one word
        return;
    }
    data.in_block_scope().atomic_add(block, 1);
    thread::sync_threads();
    if thread::thread_idx_x() == 0 {
        out.atomic_add(0, data.in_block_scope().atomic_load(block));
    }
}

#[kernel(args = fence_too_narrow)]
fn flag_of_block_scope(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    if thread::block_idx_x() == 0 {
        data.store(0, 7);
        if bug != 0 {
            thread::device_fence();
            flag.in_block_scope().atomic_store(0, 1);
        } else {
            flag.store_release(0, 1);
        }
    } else {
        while flag.load_acquire(0) == 0 {} // BUG: the flag is set for the giver's block alone
        out.store(0, data.load(0));
    }
}

#[kernel(args = fence_too_narrow)]
fn look_of_block_scope(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    // In the twin both threads are of one block.
    let (t, block) = (thread::thread_idx_x(), thread::block_idx_x());
    let taker = if bug != 0 { (0, 1) } else { (1, 0) };
    if (t, block) == (0, 0) {
        data.store(0, 7);
        if bug != 0 {
            flag.store_release(0, 1);
        } else {
            flag.in_block_scope().store_release(0, 1);
        }
    } else if (t, block) == taker {
        while flag.in_block_scope().load_acquire(0) == 0 {} // BUG: the taker looks into its own block
        out.store(0, data.load(0));
    }
}

#[kernel(args = fence_too_narrow)]
fn lock_of_block_scope(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    if bug != 0 {
        while flag.in_block_scope().atomic_cas(0, 0, 1) != 0 {} // BUG: each block has the lock for itself
    } else {
        while flag.in_system_scope().atomic_cas(0, 0, 1) != 0 {}
    }
    thread::device_fence();
    data.store(0, data.load(0) + 1);
    thread::device_fence();
    if bug != 0 {
        flag.in_block_scope().atomic_exchange(0, 0);
    } else {
        flag.atomic_exchange(0, 0);
    }
    out.atomic_add(0, 1);
}

/// Narrow atomics that other blocks' come behind, in order.
#[kernel(args = fence_too_narrow)]
fn words_of_blocks_read_by_the_last(
    data: GlobalMut<u32>,
    flag: GlobalMut<u32>,
    out: GlobalMut<u32>,
    bug: u32,
) {
    let block = thread::block_idx_x() as usize;
    data.in_block_scope().atomic_add(block, 1 + bug);
    thread::sync_threads();
    if thread::thread_idx_x() == 0 {
        thread::device_fence();
        if flag.atomic_add(0, 1) + 1 == thread::grid_dim_x() {
            thread::device_fence();
            out.store(0, data.in_block_scope().atomic_load(0) + data.in_block_scope().atomic_load(1));
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
type Run = simt::Kernel<fence_too_narrow::Args>;

#[cfg(not(target_arch = "nvptx64"))]
fn two_blocks(kernel: Run, bug: u32, on: &Machine) -> Result<()> {
    with(kernel, LaunchShape::new(2, 1), bug, on)
}

#[cfg(not(target_arch = "nvptx64"))]
fn with(kernel: Run, shape: LaunchShape, bug: u32, on: &Machine) -> Result<()> {
    let (mut data, mut flag, mut out) = (vec![0; 128], vec![0; 1], vec![0; 128]);
    let (data, flag, out) = (on.write(&mut data)?, on.write(&mut flag)?, on.write(&mut out)?);
    on.go(kernel, shape, fence_too_narrow::Args { data, flag, out, bug })
}

cases! { "scor";
    fence_too_narrow: "fences of a block between two blocks",
        Found::In(Mode::Races, "Race", "the fences reach their own blocks only", (1, 0)),
        |bug, on| with(fence_too_narrow::kernel(), LaunchShape::new(2, 2), bug, on);
    reader_fence_too_narrow: "the reader's fence is its block's",
        Found::In(Mode::Races, "Race", "the reader's fence is for its own block", (1, 0)),
        |bug, on| two_blocks(reader_fence_too_narrow::kernel(), bug, on);
    no_fence_at_the_writer: "no fence ahead of the flag",
        Found::In(Mode::Races, "Race", "the writer made no fence", (1, 0)),
        |bug, on| two_blocks(no_fence_at_the_writer::kernel(), bug, on);
    no_fence_at_the_reader: "no fence behind the look at the flag",
        Found::In(Mode::Races, "Race", "the reader made no fence", (1, 0)),
        |bug, on| two_blocks(no_fence_at_the_reader::kernel(), bug, on);
    fence_behind_the_flag: "the fence comes behind the flag",
        Found::In(Mode::Races, "Race", "the fence came behind the flag", (1, 0)),
        |bug, on| two_blocks(fence_behind_the_flag::kernel(), bug, on);
    flag_by_plain_store: "a flag set by a plain store",
        Found::In(Mode::Races, "Race", "the flag is set by a plain store", (1, 0)),
        |bug, on| two_blocks(flag_by_plain_store::kernel(), bug, on);
    lock_with_block_fences: "a lock between blocks with fences of a block",
        Found::In(Mode::Races, "Race", "the lock's fences are those of a block", (1, 0)),
        |bug, on| two_blocks(lock_with_block_fences::kernel(), bug, on);
    only_one_thread_fences: "one thread fences for all, without a barrier",
        Found::In(Mode::Races, "Race", "its fence is not the other threads'", (1, 0)),
        |bug, on| with(only_one_thread_fences::kernel(), LaunchShape::new(2, 64), bug, on);
    block_barrier_between_blocks: "a block's barrier between two blocks",
        Found::In(Mode::Races, "Race", "a barrier orders one block only", (1, 0)),
        |bug, on| with(block_barrier_between_blocks::kernel(), LaunchShape::new(2, 64), bug, on);
    warp_barrier_between_warps: "a warp's barrier between two warps",
        Found::In(Mode::Races, "Race", "a warp's barrier orders one warp only", (0, 0)),
        |bug, on| with(warp_barrier_between_warps::kernel(), LaunchShape::new(1, 64), bug, on);
    counter_of_block_scope: "blocks count in one word by atomics of block scope",
        Found::In(Mode::Races, "AtomicScope", "blocks count in one word", (1, 0)),
        |bug, on| with(counter_of_block_scope::kernel(), LaunchShape::new(2, 64), bug, on);
    flag_of_block_scope: "a flag set in block scope for another block",
        Found::In(Mode::Races, "AtomicScope", "the flag is set for the giver's block alone", (1, 0)),
        |bug, on| two_blocks(flag_of_block_scope::kernel(), bug, on);
    look_of_block_scope: "a flag looked at in block scope by another block",
        Found::In(Mode::Races, "AtomicScope", "the taker looks into its own block", (1, 0)),
        |bug, on| with(look_of_block_scope::kernel(), LaunchShape::new(2, 2), bug, on);
    lock_of_block_scope: "a lock of block scope between blocks",
        Found::In(Mode::Races, "AtomicScope", "each block has the lock for itself", (1, 0)),
        |bug, on| two_blocks(lock_of_block_scope::kernel(), bug, on);
    words_of_blocks_read_by_the_last: "atomics of block scope, then another block's behind a flag",
        Found::Legal,
        |bug, on| with(words_of_blocks_read_by_the_last::kernel(), LaunchShape::new(2, 64), bug, on);
}
