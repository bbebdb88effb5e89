//! Barriers that not all threads of the block reach.

use crate::support::{at, caught, index, line, modes, pass, read, write};
use simt::emu::FaultKind;
use simt::{Global, GlobalMut, LaunchShape, Shared, SharedPlan, kernel, thread};

const SOURCE: &str = include_str!("divergent_barrier.rs");
const LEN: u32 = 100;

const fn tile() -> Shared<u32> {
    let mut plan = SharedPlan::new();
    plan.array(64)
}

fn shape() -> LaunchShape {
    LaunchShape::new(2, 64).shared(256)
}

#[kernel]
fn early_return(x: Global<u32>, y: GlobalMut<u32>, len: u32) {
    let (t, i) = (thread::thread_idx_x(), thread::index_1d());
    if i >= len as usize {
        return;
    }
    tile().store(t, x.load(i));
    thread::sync_threads(); // BUG: the tail has returned
    y.store(i, tile().load(t ^ 1));
}

#[kernel(args = early_return)]
fn early_return_fixed(x: Global<u32>, y: GlobalMut<u32>, len: u32) {
    let (t, i) = (thread::thread_idx_x(), thread::index_1d());
    if i < len as usize {
        tile().store(t, x.load(i));
    }
    thread::sync_threads();
    if i < len as usize {
        y.store(i, tile().load(t ^ 1));
    }
}

#[test]
fn threads_that_return_early() {
    let x: Vec<u32> = (0..LEN).collect();
    for options in modes() {
        let mut y = vec![0; LEN as usize];
        let args = early_return::Args { x: read(&x), y: write(&mut y), len: LEN };
        let place = at!("the tail has returned", block 1, thread 0);
        let kind = caught(early_return::kernel(), shape(), args, &options, place);
        assert_eq!(kind, FaultKind::DivergentBarrier { absent: index(36), waits_at: None });
        pass(early_return_fixed::kernel(), shape(), args, &options);
        assert!((0..LEN).all(|i| y[i as usize] == i ^ 1));
    }
}

#[kernel]
fn branch(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    tile().store(t, t);
    let value = if t < 48 {
        thread::sync_threads(); // BUG: the lower threads wait here
        tile().load(t + 16)
    } else {
        thread::sync_threads(); // BUG: and the upper ones here
        tile().load(t - 48)
    };
    y.store(thread::index_1d(), value);
}

#[kernel]
fn branch_fixed(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    tile().store(t, t);
    thread::sync_threads();
    let value = if t < 48 { tile().load(t + 16) } else { tile().load(t - 48) };
    y.store(thread::index_1d(), value);
}

#[test]
fn barriers_at_two_places() {
    for options in modes() {
        let mut y = vec![0; 128];
        let place = at!("the lower threads wait here", block 0, thread 0);
        let kind = caught(branch::kernel(), shape(), branch::Args { y: write(&mut y) }, &options, place);
        let elsewhere = Some(line!("and the upper ones here"));
        assert_eq!(kind, FaultKind::DivergentBarrier { absent: index(48), waits_at: elsewhere });
        pass(branch_fixed::kernel(), shape(), branch_fixed::Args { y: write(&mut y) }, &options);
        assert!((0..128).all(|i| y[i] as usize == (i % 64 + 16) % 64));
    }
}

#[kernel]
fn loop_count(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let mut sum = 0;
    for _ in 0..2 + t / 63 {
        sum += thread::sync_threads_count(1); // BUG: one thread goes round once more
    }
    y.store(thread::index_1d(), sum);
}

#[kernel]
fn loop_count_fixed(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let mut sum = 0;
    for round in 0..3 {
        sum += thread::sync_threads_count((round < 2 + t / 63) as u32);
    }
    y.store(thread::index_1d(), sum);
}

#[test]
fn a_loop_of_unequal_length() {
    for options in modes() {
        let mut y = vec![0; 128];
        let place = at!("one thread goes round once more", block 0, thread 63);
        let kind =
            caught(loop_count::kernel(), shape(), loop_count::Args { y: write(&mut y) }, &options, place);
        assert_eq!(kind, FaultKind::DivergentBarrier { absent: index(0), waits_at: None });
        pass(loop_count_fixed::kernel(), shape(), loop_count_fixed::Args { y: write(&mut y) }, &options);
        assert_eq!(y, [64 + 64 + 1; 128]);
    }
}
