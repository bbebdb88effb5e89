//! Barriers that diverge, races within a block and between blocks, after what GPUVerify tells apart.

#[cfg(not(target_arch = "nvptx64"))]
use crate::Machine;
#[cfg(not(target_arch = "nvptx64"))]
use crate::case::{Found, Mode};
#[cfg(not(target_arch = "nvptx64"))]
use ferrokv_device::Result;
use simt::{GlobalMut, Shared, SharedPlan, kernel, thread, warp};
#[cfg(not(target_arch = "nvptx64"))]
use simt::{Kernel, LaunchShape};

const fn tile() -> Shared<u32> {
    let mut plan = SharedPlan::new();
    plan.array(64)
}

#[kernel]
fn barrier_in_a_branch(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    tile().store(t, t);
    if bug == 0 || t < 40 {
        thread::sync_threads(); // BUG: some threads go past it
    }
    y.store(thread::index_1d(), t);
}

#[kernel(args = barrier_in_a_branch)]
fn barrier_behind_a_return(y: GlobalMut<u32>, bug: u32) {
    let i = thread::index_1d();
    if bug != 0 && i >= 100 {
        return;
    }
    thread::sync_threads(); // BUG: the last threads have returned
    y.store(i, 1);
}

#[kernel(args = barrier_in_a_branch)]
fn barrier_in_a_loop(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    let rounds = if bug != 0 { 1 + t / 50 } else { 2 };
    for _ in 0..rounds {
        thread::sync_threads(); // BUG: as often as the thread's own number says
    }
    y.store(thread::index_1d(), rounds);
}

#[kernel(args = barrier_in_a_branch)]
fn barriers_in_both_arms(y: GlobalMut<u32>, bug: u32) {
    // By warps in the twin: those may meet at two barriers.
    let t = thread::thread_idx_x();
    tile().store(t, t);
    if t < if bug != 0 { 20 } else { 32 } {
        thread::sync_threads(); // BUG: lanes of one warp at two barriers
    } else {
        thread::sync_threads();
    }
    y.store(thread::index_1d(), tile().load(63 - t));
}

#[kernel(args = barrier_in_a_branch)]
fn neighbour_in_place(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    tile().store(t, t);
    thread::sync_threads();
    let next = tile().load((t + 1) % 64);
    if bug == 0 {
        thread::sync_threads();
    }
    tile().store(t, next); // BUG: its neighbour may not have read it yet
    thread::sync_threads();
    y.store(thread::index_1d(), tile().load(t));
}

#[kernel(args = barrier_in_a_branch)]
fn read_ahead_of_the_write(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    tile().store(t, t);
    if bug == 0 {
        thread::sync_threads();
    }
    y.store(thread::index_1d(), tile().load(63 - t)); // BUG: who comes first finds nothing there
}

#[kernel(args = barrier_in_a_branch)]
fn same_value(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if bug != 0 || t == 0 {
        y.store(thread::block_idx_x() as usize, 5); // BUG: all of them write it
    }
}

#[kernel(args = barrier_in_a_branch)]
fn two_blocks_one_output(y: GlobalMut<u32>, bug: u32) {
    if thread::thread_idx_x() == 0 {
        let row = thread::block_idx_x() >> bug;
        y.store(row as usize, thread::block_idx_x()); // BUG: two blocks have one row
    }
}

#[kernel(args = barrier_in_a_branch)]
fn overlapping_rows(y: GlobalMut<u32>, bug: u32) {
    let (t, block) = (thread::thread_idx_x(), thread::block_idx_x());
    // Rows of 64, and one more thread than that in the bug.
    let at = block * (64 - bug) + t;
    y.store(at as usize, block); // BUG: a row begins where the last one ends
}

#[kernel(args = barrier_in_a_branch)]
fn lanes_without_a_warp_barrier(y: GlobalMut<u32>, bug: u32) {
    let (t, lane) = (thread::thread_idx_x(), warp::lane_id());
    tile().store(t, t);
    // An exchange of registers brings the lanes together, and orders no memory.
    let other = warp::warp_shuffle_xor(warp::FULL_MASK, t, 1, 32);
    if bug == 0 {
        warp::sync_warp(warp::FULL_MASK);
    }
    y.store(thread::index_1d(), tile().load(other) + lane); // BUG: a shuffle is no barrier
}

#[kernel(args = barrier_in_a_branch)]
fn mask_of_absent_lanes(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if warp::lane_id() < 16 {
        let mask = if bug != 0 { warp::FULL_MASK } else { 0xffff };
        let all = warp::warp_vote_ballot(mask, t > 3); // BUG: half of the lanes are elsewhere
        y.store(thread::index_1d(), all);
    }
}

#[kernel(args = barrier_in_a_branch)]
fn shuffle_from_outside(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if warp::lane_id() < 16 {
        let from = if bug != 0 { 20 } else { 2 };
        let value = warp::warp_shuffle_idx(0xffff, t, from, 32); // BUG: of a lane that takes no part
        y.store(thread::index_1d(), value);
    }
}

#[kernel(args = barrier_in_a_branch)]
fn unwritten_tail(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if t < 64 - bug {
        tile().store(t, t);
    }
    thread::sync_threads();
    y.store(thread::index_1d(), tile().load(63 - t)); // BUG: nobody wrote the last word
}

#[cfg(not(target_arch = "nvptx64"))]
fn run(kernel: Kernel<barrier_in_a_branch::Args>, bug: u32, on: &Machine) -> Result<()> {
    let mut y = vec![0; 128];
    let args = barrier_in_a_branch::Args { y: on.write(&mut y)?, bug };
    on.go(kernel, LaunchShape::new(2, 64).shared(256), args)
}

cases! { "gpuverify";
    barrier_in_a_branch: "a barrier in a branch on the thread",
        Found::In(Mode::Default, "DivergentBarrier", "some threads go past it", (0, 0)),
        |bug, on| run(barrier_in_a_branch::kernel(), bug, on);
    barrier_behind_a_return: "a barrier behind an early return",
        Found::In(Mode::Default, "DivergentBarrier", "the last threads have returned", (1, 0)),
        |bug, on| run(barrier_behind_a_return::kernel(), bug, on);
    barrier_in_a_loop: "a barrier in a loop of unequal length",
        Found::In(Mode::Default, "DivergentBarrier", "as often as the thread's own number says", (0, 50)),
        |bug, on| run(barrier_in_a_loop::kernel(), bug, on);
    barriers_in_both_arms: "lanes of one warp at two barriers",
        Found::In(Mode::Default, "DivergentBarrier", "lanes of one warp at two barriers", (0, 0)),
        |bug, on| run(barriers_in_both_arms::kernel(), bug, on);
    neighbour_in_place: "in place, without a barrier ahead of the write",
        Found::In(Mode::Races, "Race", "its neighbour may not have read it yet", (0, 1)),
        |bug, on| run(neighbour_in_place::kernel(), bug, on);
    read_ahead_of_the_write: "no barrier ahead of the read",
        Found::In(Mode::Default, "Uninitialized", "who comes first finds nothing there", (0, 0)),
        |bug, on| run(read_ahead_of_the_write::kernel(), bug, on);
    same_value: "all threads write one word, the same value",
        Found::In(Mode::Races, "Race", "all of them write it", (0, 1)),
        |bug, on| run(same_value::kernel(), bug, on);
    two_blocks_one_output: "two blocks write one word",
        Found::In(Mode::Races, "Race", "two blocks have one row", (1, 0)),
        |bug, on| run(two_blocks_one_output::kernel(), bug, on);
    overlapping_rows: "rows of two blocks that overlap by one",
        Found::In(Mode::Races, "Race", "a row begins where the last one ends", (1, 0)),
        |bug, on| run(overlapping_rows::kernel(), bug, on);
    lanes_without_a_warp_barrier: "a shuffle in the place of a warp's barrier",
        Found::In(Mode::Races, "Race", "a shuffle is no barrier", (0, 0)),
        |bug, on| run(lanes_without_a_warp_barrier::kernel(), bug, on);
    mask_of_absent_lanes: "a mask that names lanes that are elsewhere",
        Found::In(Mode::Default, "LaneMissing", "half of the lanes are elsewhere", (0, 0)),
        |bug, on| run(mask_of_absent_lanes::kernel(), bug, on);
    shuffle_from_outside: "a shuffle from a lane outside the mask",
        Found::In(Mode::Default, "ShuffleSource", "of a lane that takes no part", (0, 0)),
        |bug, on| run(shuffle_from_outside::kernel(), bug, on);
    unwritten_tail: "a word of shared memory that nobody wrote",
        Found::In(Mode::Default, "Uninitialized", "nobody wrote the last word", (0, 0)),
        |bug, on| run(unwritten_tail::kernel(), bug, on);
}
