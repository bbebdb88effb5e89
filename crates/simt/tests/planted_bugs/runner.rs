//! What a launch promises beside its faults.

use crate::support::{launch, modes, pass, write};
use simt::emu::{EmuOptions, FaultKind};
use simt::{GlobalMut, LaunchShape, kernel, thread, warp};
use std::sync::atomic::{AtomicI64, Ordering};

#[kernel]
fn faulty_blocks(y: GlobalMut<u32>, from: u32) {
    // Early blocks take long, so that later ones of other tasks fail first.
    let block = thread::block_idx_x();
    if block < from {
        for _ in 0..50 {
            thread::sync_threads();
        }
    } else {
        y.store((1000 + block) as usize, 0);
    }
}

#[test]
fn the_lowest_failing_block_is_reported() {
    let mut y = vec![0u32; 8];
    for round in 0..20 {
        for options in modes() {
            let from = 40 + round;
            // More than one task of the thread pool: 64 blocks of 1024 threads.
            let shape = LaunchShape::new(if options.race_check { 64 } else { 200 }, 256);
            let fault = launch(
                faulty_blocks::kernel(),
                shape,
                faulty_blocks::Args { y: write(&mut y), from },
                &options,
            )
            .unwrap_err();
            assert_eq!(fault.thread, Some(crate::support::thread(from, 0)), "{fault}");
            assert!(
                matches!(fault.kind, FaultKind::OutOfBounds { index, .. } if index == 1000 + from as u64)
            );
        }
    }
}

/// How many [`Alive`] there are.
static ALIVE: AtomicI64 = AtomicI64::new(0);

/// A local variable of a kernel that counts itself.
struct Alive;

impl Alive {
    fn new() -> Self {
        ALIVE.fetch_add(1, Ordering::Relaxed);
        Alive
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        ALIVE.fetch_sub(1, Ordering::Relaxed);
    }
}

#[kernel]
fn parked(y: GlobalMut<u32>, mistake: u32) {
    let _alive = Alive::new();
    let t = thread::thread_idx_x();
    thread::sync_threads();
    let _more = Box::new(Alive::new());
    if t == 40 {
        match mistake {
            0 => y.store(1 << 20, 0),
            1 => panic!("planted"),
            2 => return,
            _ => {}
        }
    }
    let sum = warp::warp_reduce_add_u32(warp::FULL_MASK, t);
    thread::sync_threads();
    y.store(thread::index_1d(), sum);
}

#[test]
fn parked_threads_are_unwound() {
    for options in modes() {
        for mistake in [0, 1, 2, 3] {
            let mut y = vec![0; 512];
            let result = launch(
                parked::kernel(),
                LaunchShape::new(4, 128),
                parked::Args { y: write(&mut y), mistake },
                &options,
            );
            assert_eq!(result.is_err(), mistake < 3, "{mistake}: {result:?}");
            assert_eq!(ALIVE.load(Ordering::Relaxed), 0, "{mistake}");
        }
    }
}

#[kernel]
fn park_once(y: GlobalMut<u32>) {
    let count = thread::sync_threads_count(1);
    y.store(thread::index_1d(), count);
}

#[test]
fn launches_with_different_stacks_do_not_disturb_each_other() {
    let mut y = vec![0; 256];
    for round in 0..200 {
        let stack_bytes = [64 * 1024, 256 * 1024, 1024 * 1024][round % 3];
        for options in modes().map(|options| EmuOptions { stack_bytes, ..options }) {
            y.fill(0);
            pass(
                park_once::kernel(),
                LaunchShape::new(2, 128),
                park_once::Args { y: write(&mut y) },
                &options,
            );
            assert_eq!(y, [128; 256]);
        }
    }
}

#[kernel]
fn deep(y: GlobalMut<u32>) {
    thread::sync_threads();
    // About 600 KiB, more than the default stack.
    let big = core::hint::black_box([thread::thread_idx_x(); 150_000]);
    y.store(thread::index_1d(), big[149_999]);
}

#[test]
fn a_larger_stack_is_one_after_a_launch_with_the_default() {
    let mut y = vec![0; 4];
    pass(
        park_once::kernel(),
        LaunchShape::new(1, 4),
        park_once::Args { y: write(&mut y) },
        &EmuOptions::race_checked(),
    );
    let options = EmuOptions { stack_bytes: 2 << 20, ..EmuOptions::race_checked() };
    pass(deep::kernel(), LaunchShape::new(1, 4), deep::Args { y: write(&mut y) }, &options);
    assert_eq!(y, [0, 1, 2, 3]);
}

#[kernel]
fn mixed(y: GlobalMut<u32>, rounds: u32) {
    let t = thread::thread_idx_x();
    let mut value = t;
    for _ in 0..rounds {
        value = warp::warp_shuffle_xor(warp::FULL_MASK, value, 1, 32);
        value += thread::sync_threads_or((t == 3) as u32);
    }
    y.store(thread::index_1d(), value);
}

#[test]
fn a_kernel_that_parks_often_gives_the_same_every_time() {
    let mut first = vec![0; 4096];
    pass(
        mixed::kernel(),
        LaunchShape::new(16, 256),
        mixed::Args { y: write(&mut first), rounds: 100 },
        &EmuOptions::default(),
    );
    assert!(first.iter().enumerate().all(|(i, value)| *value as usize == i % 256 + 100));
    for _ in 0..3 {
        let mut again = vec![0; 4096];
        pass(
            mixed::kernel(),
            LaunchShape::new(16, 256),
            mixed::Args { y: write(&mut again), rounds: 100 },
            &EmuOptions::default(),
        );
        assert_eq!(first, again);
    }
}
