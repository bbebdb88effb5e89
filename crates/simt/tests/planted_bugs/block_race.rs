//! A block barrier that is missing, or a barrier that orders too little.

use crate::support::{at, caught, line, modes, pass, read, thread as thread_id, write};
use simt::emu::{EmuOptions, FaultKind, Race, Space};
use simt::{Global, GlobalMut, LaunchShape, Shared, SharedPlan, kernel, thread, warp};

const SOURCE: &str = include_str!("block_race.rs");
const THREADS: u32 = 64;

const fn tile() -> Shared<u32> {
    let mut plan = SharedPlan::new();
    plan.array(THREADS)
}

fn shape() -> LaunchShape {
    LaunchShape::new(2, THREADS).shared(THREADS * 4)
}

fn race(index: u64, access: &'static str, other_access: &'static str, other: u32, marker: u32) -> FaultKind {
    FaultKind::Race(Box::new(Race {
        space: Space::Shared,
        index,
        byte: 4 * index,
        access,
        other_access,
        other: thread_id(0, other),
        other_place: simt::emu::Place { file: file!(), line: marker, column: 0 },
    }))
}

#[kernel]
fn below(x: Global<u32>, y: GlobalMut<u32>) {
    let (t, i) = (thread::thread_idx_x(), thread::index_1d());
    tile().store(t, x.load(i)); // BUG: written before the missing barrier
    if t > 0 {
        y.store(i, tile().load(t - 1)); // BUG: read without a barrier
    }
}

#[kernel(args = below)]
fn below_in_warps(x: Global<u32>, y: GlobalMut<u32>) {
    let (t, i) = (thread::thread_idx_x(), thread::index_1d());
    tile().store(t, x.load(i)); // BUG: written before the barrier of one warp
    warp::sync_warp(warp::FULL_MASK);
    if t > 0 {
        y.store(i, tile().load(t - 1)); // BUG: read over the warp's edge
    }
}

#[kernel]
fn below_fixed(x: Global<u32>, y: GlobalMut<u32>) {
    let (t, i) = (thread::thread_idx_x(), thread::index_1d());
    tile().store(t, x.load(i));
    thread::sync_threads();
    if t > 0 {
        y.store(i, tile().load(t - 1));
    }
}

#[test]
fn the_reader_comes_second() {
    let x: Vec<u32> = (0..2 * THREADS).collect();
    let mut y = vec![0; 2 * THREADS as usize];
    let args = below::Args { x: read(&x), y: write(&mut y) };
    let checked = EmuOptions::race_checked();

    let place = at!("read without a barrier", block 0, thread 1);
    let kind = caught(below::kernel(), shape(), args, &checked, place);
    let written = line!("written before the missing barrier").line;
    assert_eq!(kind, race(0, "read", "write", 0, written));

    let place = at!("read over the warp's edge", block 0, thread 32);
    let kind = caught(below_in_warps::kernel(), shape(), args, &checked, place);
    let written = line!("written before the barrier of one warp").line;
    assert_eq!(kind, race(31, "read", "write", 31, written));

    // Without the check both pass: the emulator's own order of threads hides the race.
    pass(below::kernel(), shape(), args, &EmuOptions::default());
    pass(below_in_warps::kernel(), shape(), args, &EmuOptions::default());
    for options in modes() {
        y.fill(0);
        pass(below_fixed::kernel(), shape(), below_fixed::Args { x: read(&x), y: write(&mut y) }, &options);
        assert!((0..2 * THREADS).all(|i| y[i as usize] == if i % THREADS == 0 { 0 } else { i - 1 }));
    }
}

#[kernel]
fn above(x: Global<u32>, y: GlobalMut<u32>) {
    let (t, i) = (thread::thread_idx_x(), thread::index_1d());
    tile().store(t, x.load(i));
    y.store(i, tile().load((t + 1) % THREADS)); // BUG: read before it is written
}

#[kernel(args = above)]
fn above_fixed(x: Global<u32>, y: GlobalMut<u32>) {
    let (t, i) = (thread::thread_idx_x(), thread::index_1d());
    tile().store(t, x.load(i));
    thread::sync_threads();
    y.store(i, tile().load((t + 1) % THREADS));
}

#[test]
fn the_reader_comes_first() {
    let x: Vec<u32> = (0..2 * THREADS).collect();
    for options in modes() {
        let mut y = vec![0; 2 * THREADS as usize];
        let args = above::Args { x: read(&x), y: write(&mut y) };
        let place = at!("read before it is written", block 0, thread 0);
        let kind = caught(above::kernel(), shape(), args, &options, place);
        assert_eq!(kind, FaultKind::Uninitialized { offset: 4, bytes: 4 });
        pass(above_fixed::kernel(), shape(), args, &options);
        assert!((0..2 * THREADS).all(|i| y[i as usize] == i / THREADS * THREADS + (i + 1) % THREADS));
    }
}

#[kernel]
fn two_rounds(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    tile().store(t, t);
    thread::sync_threads();
    let first = tile().load((t + 1) % THREADS); // BUG: read in round one
    tile().store(t, first + 100); // BUG: overwritten for round two
    thread::sync_threads();
    y.store(thread::index_1d(), tile().load((t + 1) % THREADS));
}

#[kernel]
fn two_rounds_fixed(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    tile().store(t, t);
    thread::sync_threads();
    let first = tile().load((t + 1) % THREADS);
    thread::sync_threads();
    tile().store(t, first + 100);
    thread::sync_threads();
    y.store(thread::index_1d(), tile().load((t + 1) % THREADS));
}

#[test]
fn a_tile_is_overwritten_while_others_read_it() {
    let mut y = vec![0; 2 * THREADS as usize];
    let place = at!("overwritten for round two", block 0, thread 1);
    let checked = EmuOptions::race_checked();
    let kind = caught(two_rounds::kernel(), shape(), two_rounds::Args { y: write(&mut y) }, &checked, place);
    assert_eq!(kind, race(1, "write", "read", 0, line!("read in round one").line));
    for options in modes() {
        pass(two_rounds_fixed::kernel(), shape(), two_rounds_fixed::Args { y: write(&mut y) }, &options);
        assert!((0..2 * THREADS).all(|i| y[i as usize] == 100 + (i + 2) % THREADS));
    }
}

#[kernel]
fn count(y: GlobalMut<u32>) {
    if thread::thread_idx_x() == 0 {
        tile().store(0, 0); // BUG: set to zero before the missing barrier
    }
    tile().atomic_add(0, 1); // BUG: counted without a barrier
    thread::sync_threads();
    y.store(thread::index_1d(), tile().load(0));
}

#[kernel]
fn count_fixed(y: GlobalMut<u32>) {
    if thread::thread_idx_x() == 0 {
        tile().store(0, 0);
    }
    thread::sync_threads();
    tile().atomic_add(0, 1);
    thread::sync_threads();
    y.store(thread::index_1d(), tile().load(0));
}

/// Thread 0's own atomic comes between, and orders nothing.
#[test]
fn atomics_on_a_word_that_is_being_set() {
    let mut y = vec![0; 2 * THREADS as usize];
    let args = count::Args { y: write(&mut y) };
    let place = at!("counted without a barrier", block 0, thread 1);
    let kind = caught(count::kernel(), shape(), args, &EmuOptions::race_checked(), place);
    assert_eq!(kind, race(0, "atomic", "write", 0, line!("set to zero before the missing barrier").line));
    for options in modes() {
        y.fill(0);
        pass(count_fixed::kernel(), shape(), count_fixed::Args { y: write(&mut y) }, &options);
        assert_eq!(y, [THREADS; 2 * THREADS as usize]);
    }
}
