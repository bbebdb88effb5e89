//! Reads of shared memory that nobody wrote: on a GPU, whatever the block before left there.

use crate::support::{at, caught, modes, pass, write};
use simt::emu::FaultKind;
use simt::{GlobalMut, LaunchShape, Shared, SharedPlan, kernel, thread};

const SOURCE: &str = include_str!("unwritten_shared.rs");

const fn tile() -> Shared<u32> {
    let mut plan = SharedPlan::new();
    plan.array(64)
}

fn shape() -> LaunchShape {
    // Two blocks: what the first one wrote does not count for the second.
    LaunchShape::new(2, 64).shared(256)
}

#[kernel]
fn padded(y: GlobalMut<u32>, len: u32) {
    let t = thread::thread_idx_x();
    if thread::block_idx_x() == 0 || t < len {
        tile().store(t, 5);
    }
    thread::sync_threads();
    let value = tile().load(t); // BUG: the padding was never cleared
    y.store(thread::index_1d(), value);
}

#[kernel(args = padded)]
fn padded_fixed(y: GlobalMut<u32>, len: u32) {
    let t = thread::thread_idx_x();
    tile().store(t, if thread::block_idx_x() == 0 || t < len { 5 } else { 0 });
    thread::sync_threads();
    let value = tile().load(t);
    y.store(thread::index_1d(), value);
}

#[test]
fn a_read() {
    for options in modes() {
        let mut y = vec![1; 128];
        let args = padded::Args { y: write(&mut y), len: 40 };
        let place = at!("the padding was never cleared", block 1, thread 40);
        let kind = caught(padded::kernel(), shape(), args, &options, place);
        assert_eq!(kind, FaultKind::Uninitialized { offset: 160, bytes: 4 });
        pass(padded_fixed::kernel(), shape(), args, &options);
        assert!((0..128).all(|i| y[i] == if i < 64 + 40 { 5 } else { 0 }));
    }
}

#[kernel]
fn halves(y: GlobalMut<u64>) {
    let t = thread::thread_idx_x();
    if t < 63 {
        tile().store(t, t);
    }
    thread::sync_threads();
    if t < 32 {
        let pair: u64 = tile().load_vector(2 * t); // BUG: half of the last vector is missing
        y.store((thread::block_idx_x() * 32 + t) as usize, pair);
    }
}

#[kernel]
fn halves_fixed(y: GlobalMut<u64>) {
    let t = thread::thread_idx_x();
    tile().store(t, t);
    thread::sync_threads();
    if t < 32 {
        let pair: u64 = tile().load_vector(2 * t);
        y.store((thread::block_idx_x() * 32 + t) as usize, pair);
    }
}

#[test]
fn half_a_vector() {
    for options in modes() {
        let mut y = vec![1; 64];
        let place = at!("half of the last vector is missing", block 0, thread 31);
        let kind = caught(halves::kernel(), shape(), halves::Args { y: write(&mut y) }, &options, place);
        assert_eq!(kind, FaultKind::Uninitialized { offset: 248, bytes: 8 });
        pass(halves_fixed::kernel(), shape(), halves_fixed::Args { y: write(&mut y) }, &options);
        assert!((0..64u64).all(|i| y[i as usize] == (i % 32 * 2) | (i % 32 * 2 + 1) << 32));
    }
}

#[kernel]
fn counter(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    tile().atomic_add(0, t); // BUG: the counter has no start
    thread::sync_threads();
    if t == 0 {
        y.store(thread::block_idx_x() as usize, tile().load(0));
    }
}

#[kernel]
fn counter_fixed(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    if t == 0 {
        tile().store(0, 0);
    }
    thread::sync_threads();
    tile().atomic_add(0, t);
    thread::sync_threads();
    if t == 0 {
        y.store(thread::block_idx_x() as usize, tile().load(0));
    }
}

#[test]
fn an_atomic() {
    for options in modes() {
        let mut y = vec![1; 2];
        let place = at!("the counter has no start", block 0, thread 0);
        let kind = caught(counter::kernel(), shape(), counter::Args { y: write(&mut y) }, &options, place);
        assert_eq!(kind, FaultKind::Uninitialized { offset: 0, bytes: 4 });
        pass(counter_fixed::kernel(), shape(), counter_fixed::Args { y: write(&mut y) }, &options);
        assert_eq!(y, [2016, 2016]);
    }
}
