//! Kernels that shall wait for the launch before them, and threads that do not: on the device they would read
//! what that launch has not written yet.

use crate::support::{modes, pass, read, write};
use simt::emu::{FaultKind, launch};
use simt::{Global, GlobalMut, LaunchShape, kernel, thread};

#[kernel(overlaps = late)]
fn scale(weights: Global<u32>, x: GlobalMut<u32>, n: u32) {
    let i = thread::index_1d();
    let weight = weights.load_ahead(i % n as usize);
    // BUG: threads past the end return without the wait.
    if i < n as usize {
        thread::wait_for_previous();
        x.store(i, x.load(i) * weight);
    }
}

#[kernel(overlaps = late)]
fn scale_fixed(weights: Global<u32>, x: GlobalMut<u32>, n: u32) {
    let i = thread::index_1d();
    let weight = weights.load_ahead(i % n as usize);
    thread::wait_for_previous();
    if i < n as usize {
        x.store(i, x.load(i) * weight);
    }
}

#[test]
fn a_thread_that_does_not_wait() {
    let shape = LaunchShape::new(2, 32);
    let weights: Vec<u32> = (0..40).collect();
    assert!(scale::INSTANCES[0].overlaps && scale::INSTANCES[0].waits_late);
    for options in modes() {
        let mut x = vec![3; 40];
        let args = scale::Args { weights: read(&weights), x: write(&mut x), n: 40 };
        // SAFETY: both vectors live and have 40 elements.
        let fault = unsafe { launch(&scale::kernel(), shape, args, &options) }.unwrap_err();
        let thread = fault.thread.unwrap();
        assert_eq!(
            (fault.kind, fault.place, thread.block.x, thread.thread.x),
            (FaultKind::NoWait, None, 1, 8)
        );

        let mut x = vec![3; 40];
        let args = scale_fixed::Args { weights: read(&weights), x: write(&mut x), n: 40 };
        pass(scale_fixed::kernel(), shape, args, &options);
        assert!((0..40).all(|i| x[i as usize] == 3 * i));
    }
}
