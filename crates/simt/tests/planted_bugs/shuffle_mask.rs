//! Masks that do not name exactly the lanes that make the call.

use crate::support::{at, caught, line, modes, pass, write};
use simt::emu::FaultKind;
use simt::warp::{self, FULL_MASK};
use simt::{GlobalMut, LaunchShape, kernel, thread};

const SOURCE: &str = include_str!("shuffle_mask.rs");

fn warps(warps: u32) -> LaunchShape {
    LaunchShape::new(1, 32 * warps)
}

#[kernel]
fn half_mask(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let other = warp::warp_shuffle_xor(0xffff, t, 1, 32); // BUG: the upper half calls too
    y.store(t as usize, other);
}

#[kernel(args = half_mask)]
fn half_mask_fixed(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let other = warp::warp_shuffle_xor(FULL_MASK, t, 1, 32);
    y.store(t as usize, other);
}

#[test]
fn the_caller_is_not_named() {
    for options in modes() {
        let mut y = vec![0; 64];
        let args = half_mask::Args { y: write(&mut y) };
        let place = at!("the upper half calls too", block 0, thread 16);
        let kind = caught(half_mask::kernel(), warps(2), args, &options, place);
        assert_eq!(kind, FaultKind::LaneNotInMask { mask: 0xffff, lane: 16 });
        pass(half_mask_fixed::kernel(), warps(2), args, &options);
        assert!((0..64).all(|t| y[t] as usize == t ^ 1));
    }
}

#[kernel]
fn returned(y: GlobalMut<u32>, len: u32) {
    let t = thread::thread_idx_x();
    if t >= len {
        return;
    }
    let sum = warp::warp_reduce_add_u32(FULL_MASK, t); // BUG: lanes of the tail are gone
    y.store(t as usize, sum);
}

#[kernel(args = returned)]
fn returned_fixed(y: GlobalMut<u32>, len: u32) {
    let t = thread::thread_idx_x();
    let sum = warp::warp_reduce_add_u32(FULL_MASK, if t < len { t } else { 0 });
    if t < len {
        y.store(t as usize, sum);
    }
}

#[test]
fn a_named_lane_has_returned() {
    for options in modes() {
        let mut y = vec![0; 50];
        let args = returned::Args { y: write(&mut y), len: 50 };
        let place = at!("lanes of the tail are gone", block 0, thread 32);
        let kind = caught(returned::kernel(), warps(2), args, &options, place);
        assert_eq!(kind, FaultKind::LaneMissing { mask: FULL_MASK, lane: 18, waits_at: None });
        pass(returned_fixed::kernel(), warps(2), args, &options);
        assert!((0..50).all(|t| y[t] == if t < 32 { 496 } else { (32..50).sum() }));
    }
}

#[kernel]
fn ballot(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let even = warp::warp_vote_ballot(FULL_MASK, t.is_multiple_of(2)); // BUG: a whole warp is assumed
    y.store(t as usize, even);
}

#[kernel(args = ballot)]
fn ballot_fixed(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let lanes = (thread::block_dim_x() - t / 32 * 32).min(32);
    let even = warp::warp_vote_ballot(FULL_MASK >> (32 - lanes), t.is_multiple_of(2));
    y.store(t as usize, even);
}

#[test]
fn a_named_lane_was_never_launched() {
    for options in modes() {
        let mut y = vec![0; 48];
        let args = ballot::Args { y: write(&mut y) };
        // The block's last warp is half empty.
        let place = at!("a whole warp is assumed", block 0, thread 32);
        let kind = caught(ballot::kernel(), LaunchShape::new(1, 48), args, &options, place);
        assert_eq!(kind, FaultKind::LaneMissing { mask: FULL_MASK, lane: 16, waits_at: None });
        pass(ballot_fixed::kernel(), LaunchShape::new(1, 48), args, &options);
        assert!((0..48).all(|t| y[t] == if t < 32 { 0x5555_5555 } else { 0x5555 }));
    }
}

#[kernel]
fn at_barrier(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let mut value = t;
    if t % 32 < 16 {
        value = warp::warp_shuffle_down(FULL_MASK, t, 1, 32); // BUG: half of the lanes skip it
    }
    thread::sync_threads(); // BUG: where the others wait
    y.store(t as usize, value);
}

#[kernel(args = at_barrier)]
fn at_barrier_fixed(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let below = warp::warp_shuffle_down(FULL_MASK, t, 1, 32);
    thread::sync_threads();
    y.store(t as usize, if t % 32 < 16 { below } else { t });
}

#[test]
fn a_named_lane_waits_at_a_barrier() {
    for options in modes() {
        let mut y = vec![0; 64];
        let args = at_barrier::Args { y: write(&mut y) };
        let place = at!("half of the lanes skip it", block 0, thread 0);
        let kind = caught(at_barrier::kernel(), warps(2), args, &options, place);
        let waits_at = Some(line!("where the others wait"));
        assert_eq!(kind, FaultKind::LaneMissing { mask: FULL_MASK, lane: 16, waits_at });
        pass(at_barrier_fixed::kernel(), warps(2), args, &options);
        assert!((0..64).all(|t| y[t] as usize == if t % 32 < 16 { t + 1 } else { t }));
    }
}

/// One exchange at two places is legal; these are two.
#[kernel]
fn two_shuffles(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let value = if t.is_multiple_of(2) {
        warp::warp_shuffle_xor(FULL_MASK, t, 1, 32) // BUG: even lanes call here
    } else {
        warp::warp_shuffle_down(FULL_MASK, t + 100, 1, 32) // BUG: odd lanes call there
    };
    y.store(t as usize, value);
}

#[kernel(args = two_shuffles)]
fn two_shuffles_fixed(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let mine = if t.is_multiple_of(2) { t } else { t + 100 };
    y.store(t as usize, warp::warp_shuffle_xor(FULL_MASK, mine, 1, 32));
}

#[test]
fn a_named_lane_makes_another_call() {
    for options in modes() {
        let mut y = vec![0; 64];
        let args = two_shuffles::Args { y: write(&mut y) };
        let place = at!("even lanes call here", block 0, thread 0);
        let kind = caught(two_shuffles::kernel(), warps(2), args, &options, place);
        let waits_at = Some(line!("odd lanes call there"));
        assert_eq!(kind, FaultKind::LaneMissing { mask: FULL_MASK, lane: 1, waits_at });
        pass(two_shuffles_fixed::kernel(), warps(2), args, &options);
        assert!((0..64).all(|t| y[t] as usize == if t % 2 == 0 { t + 101 } else { t - 1 }));
    }
}
