//! Stacks of parked threads.

use super::super::stack::ThreadStack;
use super::*;
use crate::emu::launch;
use crate::{kernel, thread};

#[kernel]
fn park(faulty: u32) {
    thread::sync_threads();
    assert!(faulty == 0 || thread::thread_idx_x() < 40, "planted");
    thread::sync_threads();
}

#[kernel]
fn barrier() {
    thread::sync_threads();
}

#[test]
fn stacks_are_reused_from_launch_to_launch() {
    let kernel = park::kernel();
    // With race checking, blocks run on this very thread, whose pool can be looked at.
    let options = EmuOptions::race_checked();
    // SAFETY: no memory is involved.
    let run =
        |faulty: u32| unsafe { launch(&kernel, LaunchShape::new(2, 64), park::Args { faulty }, &options) };
    for _ in 0..50 {
        assert_eq!(run(0), Ok(()));
        assert_eq!(ThreadStack::idle(), 64);
    }
    for _ in 0..50 {
        assert!(run(1).is_err());
        // The stacks of threads that the fault left parked are freed.
        assert_eq!(ThreadStack::idle(), 0);
    }
    assert_eq!(run(0), Ok(()));
    let other_size = EmuOptions { stack_bytes: 128 * 1024, ..options };
    // SAFETY: no memory is involved.
    let result = unsafe { launch(&kernel, LaunchShape::new(1, 16), park::Args { faulty: 0 }, &other_size) };
    assert_eq!((result, ThreadStack::idle()), (Ok(()), 16));
}

#[test]
fn a_stack_that_no_machine_has_is_refused() {
    let options = EmuOptions { stack_bytes: 1 << 60, ..EmuOptions::default() };
    // SAFETY: no memory is involved.
    let fault = unsafe { launch(&barrier::kernel(), LaunchShape::new(1, 64), barrier::Args {}, &options) }
        .unwrap_err();
    assert!(fault.to_string().contains("no memory for 64 stacks of 1152921504606846976 bytes"), "{fault}");
}
