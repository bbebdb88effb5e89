//! Blocks that touch the same memory: nothing orders blocks of one launch.

use crate::support::{at, caught, line, modes, pass, thread as thread_id, write};
use simt::emu::{EmuOptions, FaultKind, Race, Space};
use simt::{GlobalMut, LaunchShape, kernel, thread, warp};

const SOURCE: &str = include_str!("block_overlap.rs");

#[kernel]
fn row_sum(y: GlobalMut<u32>) {
    let sum = warp::warp_reduce_add_u32(warp::FULL_MASK, 1);
    if thread::thread_idx_x() == 0 {
        // Two blocks share a row.
        let row = thread::block_idx_x() as usize / 2;
        y.store(row, sum); // BUG: both blocks write it
    }
}

#[kernel]
fn row_sum_fixed(y: GlobalMut<u32>) {
    let sum = warp::warp_reduce_add_u32(warp::FULL_MASK, 1);
    if thread::thread_idx_x() == 0 {
        let row = thread::block_idx_x() as usize / 2;
        y.atomic_add(row, sum);
    }
}

#[test]
fn two_blocks_write_one_output() {
    let shape = LaunchShape::new(8, 32);
    let mut y = vec![0; 4];
    let args = row_sum::Args { y: write(&mut y) };
    let base = args.y.address();
    let place = at!("both blocks write it", block 1, thread 0);
    let kind = caught(row_sum::kernel(), shape, args, &EmuOptions::race_checked(), place);
    let expected = FaultKind::Race(Box::new(Race {
        space: Space::Global,
        index: 0,
        byte: base,
        access: "write",
        other_access: "write",
        other: thread_id(0, 0),
        other_place: line!("both blocks write it"),
    }));
    assert_eq!(kind, expected);
    pass(row_sum::kernel(), shape, args, &EmuOptions::default());
    for options in modes() {
        let mut y = vec![0; 4];
        pass(row_sum_fixed::kernel(), shape, row_sum_fixed::Args { y: write(&mut y) }, &options);
        assert_eq!(y, [64; 4]);
    }
}

#[kernel]
fn smooth(x: GlobalMut<u32>) {
    let i = thread::index_1d();
    let next = x.load((i + 1) % x_len()); // BUG: the neighbour block's element
    thread::sync_threads();
    x.store(i, next); // BUG: in place
}

fn x_len() -> usize {
    thread::grid_dim_x() as usize * thread::block_dim_x() as usize
}

#[kernel]
fn smooth_fixed(x: GlobalMut<u32>, y: GlobalMut<u32>) {
    let i = thread::index_1d();
    let next = x.load((i + 1) % x_len());
    y.store(i, next);
}

#[test]
fn a_block_overwrites_what_another_reads() {
    let shape = LaunchShape::new(4, 32);
    let mut x: Vec<u32> = (0..128).collect();
    let args = smooth::Args { x: write(&mut x) };
    let base = args.x.address();
    let kind = caught(
        smooth::kernel(),
        shape,
        args,
        &EmuOptions::race_checked(),
        at!("in place", block 1, thread 0),
    );
    let expected = FaultKind::Race(Box::new(Race {
        space: Space::Global,
        index: 32,
        byte: base + 128,
        access: "write",
        other_access: "read",
        other: thread_id(0, 31),
        other_place: line!("the neighbour block's element"),
    }));
    assert_eq!(kind, expected);
    for options in modes() {
        let (mut x, mut y): (Vec<u32>, _) = ((0..128).collect(), vec![0; 128]);
        pass(
            smooth_fixed::kernel(),
            shape,
            smooth_fixed::Args { x: write(&mut x), y: write(&mut y) },
            &options,
        );
        assert!((0..128).all(|i| y[i] as usize == (i + 1) % 128));
    }
}
