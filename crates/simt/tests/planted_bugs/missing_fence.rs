//! The reduction by the block that comes last: without a fence before its atomic, a block may be counted
//! before its partial result has arrived; without one after it, the last block may have read before it
//! counted.

use crate::support::{at, caught, line, modes, pass, thread as thread_id, write};
use simt::emu::{EmuOptions, FaultKind, Race, Space};
use simt::{GlobalMut, LaunchShape, kernel, thread, warp};

const SOURCE: &str = include_str!("missing_fence.rs");
const BLOCKS: u32 = 5;

fn sum_of_blocks(partial: GlobalMut<u32>) -> u32 {
    let mut sum = 0;
    for block in 0..thread::grid_dim_x() {
        sum += partial.load(block as usize); // BUG: the last block reads all of them
    }
    sum
}

#[kernel]
fn last_block(partial: GlobalMut<u32>, done: GlobalMut<u32>, total: GlobalMut<u32>) {
    let sum = warp::warp_reduce_add_u32(warp::FULL_MASK, thread::index_1d() as u32);
    if thread::thread_idx_x() == 0 {
        partial.store(thread::block_idx_x() as usize, sum); // BUG: a block's partial result
        if done.atomic_add(0, 1) + 1 == thread::grid_dim_x() {
            total.store(0, sum_of_blocks(partial));
        }
    }
}

#[kernel(args = last_block)]
fn last_block_fixed(partial: GlobalMut<u32>, done: GlobalMut<u32>, total: GlobalMut<u32>) {
    let sum = warp::warp_reduce_add_u32(warp::FULL_MASK, thread::index_1d() as u32);
    if thread::thread_idx_x() == 0 {
        partial.store(thread::block_idx_x() as usize, sum);
        thread::device_fence();
        if done.atomic_add(0, 1) + 1 == thread::grid_dim_x() {
            thread::device_fence();
            total.store(0, sum_of_blocks(partial));
        }
    }
}

#[kernel(args = last_block)]
fn reader_without_fence(partial: GlobalMut<u32>, done: GlobalMut<u32>, total: GlobalMut<u32>) {
    let sum = warp::warp_reduce_add_u32(warp::FULL_MASK, thread::index_1d() as u32);
    if thread::thread_idx_x() == 0 {
        partial.store(thread::block_idx_x() as usize, sum); // BUG: the writer has done its part
        thread::device_fence();
        if done.atomic_add(0, 1) + 1 == thread::grid_dim_x() {
            total.store(0, sum_of_blocks(partial));
        }
    }
}

#[kernel(args = last_block)]
fn block_fence_only(partial: GlobalMut<u32>, done: GlobalMut<u32>, total: GlobalMut<u32>) {
    let sum = warp::warp_reduce_add_u32(warp::FULL_MASK, thread::index_1d() as u32);
    if thread::thread_idx_x() == 0 {
        partial.store(thread::block_idx_x() as usize, sum); // BUG: fenced for its own block
        thread::block_fence();
        if done.atomic_add(0, 1) + 1 == thread::grid_dim_x() {
            total.store(0, sum_of_blocks(partial));
        }
    }
}

#[test]
fn before_the_atomic_and_after() {
    let shape = LaunchShape::new(BLOCKS, 32);
    let broken = [
        (last_block::kernel(), line!("a block's partial result")),
        (block_fence_only::kernel(), line!("fenced for its own block")),
        (reader_without_fence::kernel(), line!("the writer has done its part")),
    ];
    for (kernel, other_place) in broken {
        let (mut partial, mut done, mut total) = (vec![0; BLOCKS as usize], vec![0; 1], vec![0; 1]);
        let args = last_block::Args {
            partial: write(&mut partial),
            done: write(&mut done),
            total: write(&mut total),
        };
        let base = args.partial.address();
        let place = at!("the last block reads all of them", block BLOCKS - 1, thread 0);
        let kind = caught(kernel, shape, args, &EmuOptions::race_checked(), place);
        let expected = FaultKind::Race(Box::new(Race {
            space: Space::Global,
            index: 0,
            byte: base,
            access: "read",
            other_access: "write",
            other: thread_id(0, 0),
            other_place,
        }));
        assert_eq!(kind, expected);
    }
    for options in modes() {
        let (mut partial, mut done, mut total) = (vec![0; BLOCKS as usize], vec![0; 1], vec![0; 1]);
        let args = last_block::Args {
            partial: write(&mut partial),
            done: write(&mut done),
            total: write(&mut total),
        };
        pass(last_block_fixed::kernel(), shape, args, &options);
        assert_eq!(total[0], (0..BLOCKS * 32).sum());
    }
}
