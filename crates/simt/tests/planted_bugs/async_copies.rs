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

#[kernel]
fn small(x: Global<u32>, y: GlobalMut<u32>, fixed: u32) {
    let lane = warp::lane_id();
    // Words of the same 16 bytes: one on its way, one that is written, a pair of zeros.
    let (own, at) = (4 * lane, lane as usize);
    tile().copy_async_4(own, x, 2 * at + 1);
    tile().store(own + 1, 100 + lane);
    tile().copy_async_8_or_zero(own + 2, x, 2 * at, fixed == 2);
    async_copy::commit();
    let written = tile().load(own + 1);
    if fixed != 0 {
        async_copy::wait::<0>();
    }
    let copied = tile().load(own); // BUG: these four bytes are on their way
    y.store(2 * at, written + copied);
    y.store(2 * at + 1, tile().load(own + 2) + tile().load(own + 3));
}

#[test]
fn a_read_of_four_bytes_before_the_wait() {
    let x: Vec<u32> = (0..64).collect();
    for options in modes() {
        let mut y = vec![0; 64];
        let place = at!("these four bytes are on their way", block 0, thread 0);
        let kind = caught(
            small::kernel(),
            shape(),
            small::Args { x: read(&x), y: write(&mut y), fixed: 0 },
            &options,
            place,
        );
        assert_eq!(kind, FaultKind::CopyUnderWay { offset: 0, bytes: 4 });
        for (fixed, present) in [(1, 0), (2, 1)] {
            pass(small::kernel(), shape(), small::Args { x: read(&x), y: write(&mut y), fixed }, &options);
            let expected: Vec<u32> =
                (0..32).flat_map(|i| [100 + i + 2 * i + 1, present * (4 * i + 1)]).collect();
            assert_eq!(y, expected);
        }
    }
}

#[kernel]
fn unaligned(x: Global<u32>) {
    tile().copy_async_4(5, x, 1);
    tile().copy_async_8(2, x, 3); // BUG: eight bytes from an address that is no multiple of eight
    async_copy::commit();
}

#[test]
fn a_source_that_is_not_aligned() {
    // Aligned to 16 bytes, as device memory is.
    let x = vec![[0u64; 2]; 4].leak().as_flattened_mut();
    let x: &[u32] = bytemuck::cast_slice(x);
    let place = at!("eight bytes from an address that is no multiple of eight", block 0, thread 0);
    let args = unaligned::Args { x: read(x) };
    let kind = caught(unaligned::kernel(), shape(), args, &EmuOptions::default(), place);
    assert!(matches!(kind, FaultKind::Misaligned { index: 3, bytes: 8, off_by: 4, .. }), "{kind:?}");
}

#[kernel]
fn unaligned_absent(x: Global<u32>) {
    // Far behind the end.
    tile().copy_async_8_or_zero(0, x, 1000, false);
    tile().copy_async_8_or_zero(2, x, 1001, false); // BUG: not aligned, though nothing is read
    async_copy::commit();
}

#[test]
fn a_source_that_is_not_read_and_not_aligned() {
    let x = vec![[0u64; 2]; 4].leak().as_flattened_mut();
    let x: &[u32] = bytemuck::cast_slice(x);
    let place = at!("not aligned, though nothing is read", block 0, thread 0);
    let args = unaligned_absent::Args { x: read(x) };
    let kind = caught(unaligned_absent::kernel(), shape(), args, &EmuOptions::default(), place);
    assert!(matches!(kind, FaultKind::Misaligned { index: 1001, bytes: 8, off_by: 4, .. }), "{kind:?}");
}

#[kernel]
fn overwritten(x: GlobalMut<u32>, at: u32) {
    let lane = warp::lane_id();
    if lane == 0 {
        tile().copy_async_4(0, x.as_const(), 1);
        async_copy::commit();
        x.store(at as usize, 5); // BUG: the source of a copy that nobody has waited for
        async_copy::wait::<0>();
    }
}

/// A write beside the four bytes that are copied is none of the copy's business.
#[test]
fn a_source_that_is_written_early() {
    let options = EmuOptions::race_checked();
    for at in 0..4 {
        let mut x = vec![0u32; 8];
        let args = overwritten::Args { x: write(&mut x), at };
        if at == 1 {
            let place = at!("the source of a copy that nobody has waited for", block 0, thread 0);
            let kind = caught(overwritten::kernel(), shape(), args, &options, place);
            assert!(matches!(kind, FaultKind::CopySource(_)), "{kind:?}");
        } else {
            pass(overwritten::kernel(), shape(), args, &options);
        }
    }
}
