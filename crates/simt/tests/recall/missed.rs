//! Mistakes that the emulator does not see. A test that finds one of them fails, so that the table stays
//! true.

use crate::case::{Found, cases, go, read, write};
use simt::{Global, GlobalMut, LaunchShape, kernel, tensor, thread};

/// Without `#[simt::device]` its caller's line is not known.
#[inline(never)]
fn meet() {
    thread::sync_threads();
}

#[kernel]
fn helper_in_both_arms(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if bug == 0 || t.is_multiple_of(2) {
        meet();
    } else {
        y.store(64 + t as usize, 1);
        meet();
    }
    y.store(t as usize, t);
}

#[inline(never)]
fn multiply(a: u32) -> f32 {
    tensor::mma_f16([a; 4], [a; 2], [0.0; 4])[0]
}

#[kernel]
fn mma_in_both_arms(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    let sum = if bug == 0 || t.is_multiple_of(2) { multiply(t) } else { -multiply(t) };
    y.store(t as usize, sum.to_bits());
}

#[kernel]
fn store_buffering(x: GlobalMut<u32>, entered: GlobalMut<u32>, bug: u32) {
    // Each announces itself and looks for the other. Without a fence in between both may see nobody.
    let own = thread::block_idx_x() as usize;
    x.atomic_exchange(own, 1);
    if bug == 0 {
        thread::device_fence();
    }
    if x.atomic_add(1 - own, 0) == 0 {
        entered.atomic_add(0, 1);
    }
    // How many entered is for a later launch to see.
    entered.atomic_and(0, 0);
}

#[kernel]
fn path_not_taken(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x() as usize;
    let at = if bug != 0 && x.load(t) == 77 { 0 } else { t };
    y.store(at, 1);
}

#[kernel]
fn wrapping_index(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    // 2^31 elements to a row: in 32 bits all rows begin at 0.
    let t = thread::thread_idx_x();
    let rows = if bug != 0 { 1u32 << 31 } else { 0 };
    let at = rows.wrapping_mul(2 * (t % 3)) + t;
    y.store(at as usize, x.load(t as usize));
}

#[kernel]
fn pause_for_a_fence(data: GlobalMut<u32>, flag: GlobalMut<u32>, bug: u32) {
    // Relaxed atomics on two words, in one thread's order: another thread may see them in the other order.
    if thread::block_idx_x() == 0 {
        data.atomic_exchange(0, 7);
        if bug == 0 {
            thread::device_fence();
        }
        flag.atomic_exchange(0, 1);
    } else {
        while flag.atomic_add(0, 0) == 0 {}
        if bug == 0 {
            thread::device_fence();
        }
        data.atomic_max(1, data.atomic_add(0, 0));
    }
}

const ONE_PLACE: &str = "calls are seen, not machine code";
const NO_WEAK_ORDER: &str = "atomics take effect in one order";
const PATHS: &str = "only paths that this input takes are run";

cases! { "missed";
    helper_in_both_arms: "a helper with a barrier, called in both arms of a branch", Found::Missed(ONE_PLACE),
        |bug, options| {
            let mut y = [0; 128];
            go(helper_in_both_arms::kernel(), LaunchShape::new(1, 64),
                helper_in_both_arms::Args { y: write(&mut y), bug }, options)
        };
    mma_in_both_arms: "a helper with a matrix product, in both arms", Found::Missed(ONE_PLACE), |bug, options| {
        let mut y = [0; 32];
        go(mma_in_both_arms::kernel(), LaunchShape::new(1, 32),
            mma_in_both_arms::Args { y: write(&mut y), bug }, options)
    };
    store_buffering: "two threads that look for each other without a fence", Found::Missed(NO_WEAK_ORDER),
        |bug, options| {
            let (mut x, mut entered) = ([0; 2], [0]);
            go(store_buffering::kernel(), LaunchShape::new(2, 1),
                store_buffering::Args { x: write(&mut x), entered: write(&mut entered), bug }, options)
        };
    pause_for_a_fence: "data and flag both by atomics, no fence", Found::Missed(NO_WEAK_ORDER), |bug, options| {
        let (mut data, mut flag) = ([0; 2], [0]);
        go(pause_for_a_fence::kernel(), LaunchShape::new(2, 1),
            pause_for_a_fence::Args { data: write(&mut data), flag: write(&mut flag), bug }, options)
    };
    path_not_taken: "a race on a branch that no value takes", Found::Missed(PATHS), |bug, options| {
        let (x, mut y) = ([1; 64], [0; 64]);
        go(path_not_taken::kernel(), LaunchShape::new(1, 64),
            path_not_taken::Args { x: read(&x), y: write(&mut y), bug }, options)
    };
    wrapping_index: "an index that wraps to a place in bounds",
        Found::Missed("the source asks for wrapping, and the place is in bounds"), |bug, options| {
            let (x, mut y) = ([1; 64], [0; 64]);
            go(wrapping_index::kernel(), LaunchShape::new(1, 64),
                wrapping_index::Args { x: read(&x), y: write(&mut y), bug }, options)
        };
}
