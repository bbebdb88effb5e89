//! Shuffles that read where nothing is: undefined in PTX.

use crate::support::{at, caught, modes, pass, write};
use simt::emu::FaultKind;
use simt::{GlobalMut, LaunchShape, kernel, thread, warp};

const SOURCE: &str = include_str!("shuffle_source.rs");

#[kernel]
fn across(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    if t < 16 {
        let sum = t + warp::warp_shuffle_xor(0xffff, t, 16, 32); // BUG: lanes 16 to 31 take no part
        y.store(t as usize, sum);
    }
}

#[kernel(args = across)]
fn across_fixed(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    if t < 16 {
        let sum = t + warp::warp_shuffle_xor(0xffff, t, 8, 16);
        y.store(t as usize, sum);
    }
}

#[test]
fn outside_the_mask() {
    for options in modes() {
        let mut y = vec![0; 16];
        let args = across::Args { y: write(&mut y) };
        let place = at!("lanes 16 to 31 take no part", block 0, thread 0);
        let kind = caught(across::kernel(), LaunchShape::new(1, 32), args, &options, place);
        assert_eq!(kind, FaultKind::ShuffleSource { mask: 0xffff, lane: 16 });
        pass(across_fixed::kernel(), LaunchShape::new(1, 32), args, &options);
        assert!((0..16).all(|t| y[t] as usize == t + (t ^ 8)));
    }
}

#[kernel]
fn groups(y: GlobalMut<u32>, width: u32) {
    let t = thread::thread_idx_x();
    let first = warp::warp_shuffle_idx(warp::FULL_MASK, t, 0, width); // BUG: groups of twelve
    y.store(t as usize, first);
}

#[test]
fn a_width_that_does_not_exist() {
    for options in modes() {
        let mut y = vec![0; 32];
        for width in [0, 12, 64] {
            let args = groups::Args { y: write(&mut y), width };
            let place = at!("groups of twelve", block 0, thread 0);
            let kind = caught(groups::kernel(), LaunchShape::new(1, 32), args, &options, place);
            assert_eq!(kind, FaultKind::ShuffleWidth { width });
        }
        for width in [1, 2, 4, 8, 16, 32] {
            pass(
                groups::kernel(),
                LaunchShape::new(1, 32),
                groups::Args { y: write(&mut y), width },
                &options,
            );
            assert!((0..32).all(|t| y[t as usize] == t / width * width));
        }
    }
}
