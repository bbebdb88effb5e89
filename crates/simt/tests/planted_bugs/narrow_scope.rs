//! Atomics of block scope that two blocks make on one word: each block may count for itself.

use crate::support::{at, caught, line, modes, pass, thread as thread_id, write};
use simt::emu::{EmuOptions, FaultKind, Race, Space};
use simt::{GlobalMut, LaunchShape, kernel, thread};

const SOURCE: &str = include_str!("narrow_scope.rs");

#[kernel]
fn counted(count: GlobalMut<u32>) {
    count.in_block_scope().atomic_add(0, 1); // BUG: blocks count in one word
}

/// The words of a block by atomics of its scope, the sum by such of the device's.
#[kernel(args = counted)]
fn counted_fixed(count: GlobalMut<u32>) {
    let own = 1 + thread::block_idx_x() as usize;
    count.in_block_scope().atomic_add(own, 1);
    thread::sync_threads();
    if thread::thread_idx_x() == 0 {
        count.atomic_add(0, count.in_block_scope().atomic_load(own));
    }
}

/// One of the two is wide: that does not help the other.
#[kernel(args = counted)]
fn one_looks(count: GlobalMut<u32>) {
    if thread::index_1d() == 0 {
        count.atomic_store(0, 1); // BUG: for all blocks
    }
    if thread::index_1d() == 64 {
        count.in_block_scope().atomic_load(0); // BUG: into its own block
    }
}

/// A launch has three blocks of 64.
fn args(count: &mut Vec<u32>) -> counted::Args {
    *count = vec![0; 4];
    counted::Args { count: write(count) }
}

#[test]
fn between_blocks() {
    let (shape, mut count) = (LaunchShape::new(3, 64), Vec::new());
    let broken = [
        (
            counted::kernel(),
            at!("blocks count in one word", block 1, thread 0),
            ["atomic of block scope"; 2],
            line!("blocks count in one word"),
        ),
        (
            one_looks::kernel(),
            at!("into its own block", block 1, thread 0),
            ["atomic load of block scope", "atomic store"],
            line!("for all blocks"),
        ),
    ];
    for (kernel, place, [access, other_access], other_place) in broken {
        let args = args(&mut count);
        let byte = args.count.address();
        let kind = caught(kernel, shape, args, &EmuOptions::race_checked(), place);
        let FaultKind::AtomicScope(pair) = kind else { panic!("{kind}") };
        let other = thread_id(0, pair.other.thread.x);
        let expected =
            Race { space: Space::Global, index: 0, byte, access, other_access, other, other_place };
        assert_eq!(*pair, expected);
    }
    for options in modes() {
        pass(counted_fixed::kernel(), shape, args(&mut count), &options);
        assert_eq!(count, [192, 64, 64, 64]);
    }
}
