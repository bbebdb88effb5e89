//! Asynchronous copies that are used before they have arrived, or shown to nobody.

use crate::support::{at, caught, modes, pass, read, write};
use simt::emu::{EmuOptions, FaultKind};
use simt::{Global, GlobalMut, LaunchShape, Shared, SharedPlan, async_copy, kernel, warp};

const SOURCE: &str = include_str!("async_copies.rs");

const fn tile() -> Shared<u32> {
    let mut plan = SharedPlan::new();
    plan.array(256)
}

fn shape() -> LaunchShape {
    LaunchShape::new(1, 32).shared(1024)
}

#[kernel]
fn unawaited(x: Global<u32>, y: GlobalMut<u32>) {
    let lane = warp::lane_id();
    tile().copy_async(4 * lane, x, 4 * lane as usize);
    async_copy::commit();
    tile().copy_async(128 + 4 * lane, x, 4 * lane as usize);
    async_copy::commit();
    async_copy::wait::<1>();
    warp::sync_warp(warp::FULL_MASK);
    let other = tile().load(4 * (lane ^ 1));
    let own = tile().load(128 + 4 * lane); // BUG: the second group is still under way
    y.store(lane as usize, other + own);
}

#[kernel]
fn unawaited_fixed(x: Global<u32>, y: GlobalMut<u32>) {
    let lane = warp::lane_id();
    tile().copy_async(4 * lane, x, 4 * lane as usize);
    async_copy::commit();
    tile().copy_async(128 + 4 * lane, x, 4 * lane as usize);
    async_copy::commit();
    async_copy::wait::<0>();
    warp::sync_warp(warp::FULL_MASK);
    let other = tile().load(4 * (lane ^ 1));
    let own = tile().load(128 + 4 * lane);
    y.store(lane as usize, other + own);
}

#[test]
fn a_read_before_the_wait() {
    let x: Vec<u32> = (0..128).collect();
    for options in modes() {
        let mut y = vec![0; 32];
        let place = at!("the second group is still under way", block 0, thread 0);
        let kind = caught(
            unawaited::kernel(),
            shape(),
            unawaited::Args { x: read(&x), y: write(&mut y) },
            &options,
            place,
        );
        assert_eq!(kind, FaultKind::CopyUnderWay { offset: 512, bytes: 4 });
        pass(
            unawaited_fixed::kernel(),
            shape(),
            unawaited_fixed::Args { x: read(&x), y: write(&mut y) },
            &options,
        );
        assert!((0..32).all(|i| y[i] == 4 * (i as u32 ^ 1) + 4 * i as u32));
    }
}

#[kernel]
fn uncommitted(x: Global<u32>, y: GlobalMut<u32>) {
    let lane = warp::lane_id();
    tile().copy_async(4 * lane, x, 4 * lane as usize);
    async_copy::wait::<0>();
    let own = tile().load(4 * lane); // BUG: never committed, so not waited for
    y.store(lane as usize, own);
}

#[test]
fn a_group_that_is_not_closed() {
    let x: Vec<u32> = (0..128).collect();
    for options in modes() {
        let mut y = vec![0; 32];
        let place = at!("never committed, so not waited for", block 0, thread 0);
        let kind = caught(
            uncommitted::kernel(),
            shape(),
            uncommitted::Args { x: read(&x), y: write(&mut y) },
            &options,
            place,
        );
        assert_eq!(kind, FaultKind::CopyUnderWay { offset: 0, bytes: 4 });
    }
}

#[kernel]
fn unshown(x: Global<u32>, y: GlobalMut<u32>, fixed: u32) {
    let lane = warp::lane_id();
    tile().copy_async(4 * lane, x, 4 * lane as usize);
    async_copy::commit();
    async_copy::wait::<0>();
    if fixed == 1 {
        warp::sync_warp(warp::FULL_MASK);
    } else {
        // All lanes have waited here too, but nothing orders their memory accesses.
        warp::warp_vote_any(warp::FULL_MASK, true);
    }
    let other = tile().load(4 * (lane ^ 1)); // BUG: another lane's copy, without a barrier
    y.store(lane as usize, other);
}

#[test]
fn a_copy_that_no_barrier_shows() {
    let x: Vec<u32> = (0..128).collect();
    let mut y = vec![0; 32];
    let place = at!("another lane's copy, without a barrier", block 0, thread 0);
    let options = EmuOptions::race_checked();
    let kind = caught(
        unshown::kernel(),
        shape(),
        unshown::Args { x: read(&x), y: write(&mut y), fixed: 0 },
        &options,
        place,
    );
    assert!(matches!(kind, FaultKind::Race(_)), "{kind:?}");
    for options in modes() {
        pass(unshown::kernel(), shape(), unshown::Args { x: read(&x), y: write(&mut y), fixed: 1 }, &options);
        assert!((0..32).all(|i| y[i] == 4 * (i as u32 ^ 1)));
    }
}
