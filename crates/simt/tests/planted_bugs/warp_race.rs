//! Lanes of one warp that exchange through memory without a warp barrier: they may run apart.

use crate::support::{at, caught, line, modes, pass, thread as thread_id, write};
use simt::emu::{EmuOptions, FaultKind, Race, Space};
use simt::{GlobalMut, LaunchShape, Shared, SharedPlan, kernel, thread, warp};

const SOURCE: &str = include_str!("warp_race.rs");

const fn tile() -> Shared<u32> {
    let mut plan = SharedPlan::new();
    plan.array(64)
}

fn shape() -> LaunchShape {
    LaunchShape::new(1, 64).shared(256)
}

#[kernel]
fn from_below(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    tile().store(t, 10 * t); // BUG: written by the lane below
    let below = tile().load(t / 32 * 32 + t % 32 / 2); // BUG: read without a warp barrier
    y.store(t as usize, below);
}

#[kernel]
fn from_below_fixed(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    tile().store(t, 10 * t);
    warp::sync_warp(warp::FULL_MASK);
    let below = tile().load(t / 32 * 32 + t % 32 / 2);
    y.store(t as usize, below);
}

#[test]
fn through_shared_memory() {
    let mut y = vec![0; 64];
    let place = at!("read without a warp barrier", block 0, thread 1);
    let checked = EmuOptions::race_checked();
    let kind = caught(from_below::kernel(), shape(), from_below::Args { y: write(&mut y) }, &checked, place);
    let expected = FaultKind::Race(Box::new(Race {
        space: Space::Shared,
        index: 0,
        byte: 0,
        access: "read",
        other_access: "write",
        other: thread_id(0, 0),
        other_place: line!("written by the lane below"),
    }));
    assert_eq!(kind, expected);
    pass(from_below::kernel(), shape(), from_below::Args { y: write(&mut y) }, &EmuOptions::default());
    for options in modes() {
        y.fill(0);
        pass(from_below_fixed::kernel(), shape(), from_below_fixed::Args { y: write(&mut y) }, &options);
        assert!((0..64).all(|t| y[t] as usize == 10 * (t / 32 * 32 + t % 32 / 2)));
    }
}

#[kernel]
fn swap(x: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let other = x.load((t ^ 1) as usize); // BUG: the partner may have swapped already
    x.store(t as usize, other); // BUG: swapped without a warp barrier
}

#[kernel]
fn swap_fixed(x: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let other = x.load((t ^ 1) as usize);
    warp::sync_warp(warp::FULL_MASK);
    x.store(t as usize, other);
}

#[test]
fn through_global_memory() {
    let mut x: Vec<u32> = (0..64).collect();
    let place = at!("the partner may have swapped already", block 0, thread 1);
    let args = swap::Args { x: write(&mut x) };
    let base = args.x.address();
    let kind = caught(swap::kernel(), shape(), args, &EmuOptions::race_checked(), place);
    let expected = FaultKind::Race(Box::new(Race {
        space: Space::Global,
        index: 0,
        byte: base,
        access: "read",
        other_access: "write",
        other: thread_id(0, 0),
        other_place: line!("swapped without a warp barrier"),
    }));
    assert_eq!(kind, expected);
    for options in modes() {
        let mut x: Vec<u32> = (0..64).collect();
        pass(swap_fixed::kernel(), shape(), swap_fixed::Args { x: write(&mut x) }, &options);
        assert!((0..64).all(|t| x[t] as usize == t ^ 1));
    }
}
