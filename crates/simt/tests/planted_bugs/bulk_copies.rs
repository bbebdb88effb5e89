//! Bulk copies that are used too early, of wrong sizes and places, that nobody waits for, or that do not see
//! what they copy.

use crate::support::{aligned, at, caught, modes, pass, read, write};
use simt::emu::{EmuOptions, FaultKind, Space};
use simt::{Global, GlobalMut, LaunchShape, Mbarrier, Shared, SharedPlan, bulk, kernel, thread};

const SOURCE: &str = include_str!("bulk_copies.rs");

struct Layout {
    full: Shared<Mbarrier>,
    tile: Shared<u32>,
    bytes: u32,
}

const fn layout() -> Layout {
    let mut plan = SharedPlan::new();
    let full = plan.array(2);
    let tile = plan.array(128);
    Layout { full, tile, bytes: plan.bytes() }
}

fn shape() -> LaunchShape {
    LaunchShape::new(1, 64).shared(layout().bytes)
}

/// Thread 0 makes barrier 0 of one arrival and starts a copy of 256 bytes.
#[simt::device]
fn start(x: Global<u32>) {
    let Layout { full, tile, .. } = layout();
    if thread::thread_idx_x() == 0 {
        full.init(0, 1);
        bulk::fence_shared();
        full.arrive_and_expect(0, 256);
        tile.copy_bulk(0, x, 0, 256, full, 0);
    }
    thread::sync_threads();
}

#[kernel(min_sm = 90)]
fn used_early(x: Global<u32>, y: GlobalMut<u32>, mistake: u32) {
    let Layout { full, tile, .. } = layout();
    let t = thread::thread_idx_x();
    start(x);
    if mistake == 1 {
        y.store(t as usize, tile.load(t)); // BUG: nobody has waited
    }
    if mistake == 2 && t == 0 {
        tile.store(5, 1); // BUG: written too early
    }
    // The phase before is over at once.
    full.wait(0, u32::from(mistake == 3));
    if mistake == 3 {
        y.store(t as usize, tile.load(t)); // BUG: that was the phase before
    }
    y.store(t as usize, tile.load(t));
}

#[test]
fn a_copy_that_is_used_before_it_has_come() {
    let x = aligned(|i| i * i, 64);
    for options in modes() {
        let mut y = vec![0; 64];
        let mut run = |mistake, place| {
            let args = used_early::Args { x: read(x), y: write(&mut y), mistake };
            caught(used_early::kernel(), shape(), args, &options, place)
        };
        let way = FaultKind::CopyUnderWay { offset: 16, bytes: 4 };
        assert_eq!(run(1, at!("nobody has waited", block 0, thread 0)), way);
        let kind = run(2, at!("written too early", block 0, thread 0));
        assert_eq!(kind, FaultKind::CopyUnderWay { offset: 36, bytes: 4 });
        assert_eq!(run(3, at!("that was the phase before", block 0, thread 0)), way);
        let args = used_early::Args { x: read(x), y: write(&mut y), mistake: 0 };
        pass(used_early::kernel(), shape(), args, &options);
        assert_eq!(y, x);
    }
}

#[kernel(min_sm = 90)]
fn others_waited(x: Global<u32>, y: GlobalMut<u32>, mistake: u32) {
    let Layout { full, tile, .. } = layout();
    let t = thread::thread_idx_x();
    start(x);
    if t < 32 {
        full.wait(0, 0);
    }
    if mistake == 0 {
        thread::sync_threads();
    }
    y.store(t as usize, tile.load(t)); // BUG: warp 1 has not waited
}

#[test]
fn a_copy_that_others_have_waited_for() {
    let x = aligned(|i| i * i, 64);
    let mut y = vec![0; 64];
    let args = others_waited::Args { x: read(x), y: write(&mut y), mistake: 1 };
    let place = at!("warp 1 has not waited", block 0, thread 32);
    let kind = caught(others_waited::kernel(), shape(), args, &EmuOptions::race_checked(), place);
    assert!(matches!(kind, FaultKind::Race(_)), "{kind:?}");
    let args = others_waited::Args { mistake: 0, ..args };
    pass(others_waited::kernel(), shape(), args, &EmuOptions::thorough());
    assert_eq!(y, x);
}

#[kernel(min_sm = 90)]
fn refilled(x: Global<u32>, y: GlobalMut<u32>, mistake: u32) {
    let Layout { full, tile, .. } = layout();
    let t = thread::thread_idx_x();
    start(x);
    full.wait(0, 0);
    y.store(t as usize, tile.load(t));
    if mistake != 1 {
        thread::sync_threads();
    }
    if t == 63 {
        full.arrive_and_expect(0, 256);
        tile.copy_bulk(0, x, 64, 256, full, 0); // BUG: others may still read
    }
    full.wait(0, 1);
    y.store(64 + t as usize, tile.load(t));
}

#[test]
fn a_tile_that_is_filled_again_too_early() {
    let x = aligned(|i| i * i, 128);
    let mut y = vec![0; 128];
    let args = refilled::Args { x: read(x), y: write(&mut y), mistake: 1 };
    let place = at!("others may still read", block 0, thread 63);
    let kind = caught(refilled::kernel(), shape(), args, &EmuOptions::race_checked(), place);
    assert!(matches!(kind, FaultKind::Race(_)), "{kind:?}");
    pass(refilled::kernel(), shape(), refilled::Args { mistake: 0, ..args }, &EmuOptions::thorough());
    assert_eq!(y, x);
}

/// Thread 0 copies `bytes` bytes of element `from` to element `to`, and expects `expected`.
#[kernel(min_sm = 90)]
fn sized(x: Global<u32>, from: u32, to: u32, bytes: u32, expected: u32) {
    let Layout { full, tile, .. } = layout();
    if thread::thread_idx_x() == 0 {
        full.init(0, 1);
        bulk::fence_shared();
        full.arrive_and_expect(0, expected);
        tile.copy_bulk(to, x, from as usize, bytes, full, 0); // BUG: of a wrong size or place
        full.wait(0, 0);
    }
}

#[test]
fn sizes_and_places() {
    let x = aligned(|i| i, 128);
    for options in modes() {
        let at = || at!("of a wrong size or place", block 0, thread 0);
        let run = |from, to, bytes, expected| {
            let args = sized::Args { x: read(x), from, to, bytes, expected };
            caught(sized::kernel(), shape(), args, &options, at())
        };
        assert_eq!(run(0, 0, 24, 24), FaultKind::BulkSize { bytes: 24 });
        let kind = run(2, 0, 16, 16);
        assert_eq!(kind, FaultKind::Misaligned { space: Space::Global, index: 2, bytes: 16, off_by: 8 });
        let kind = run(0, 1, 16, 16);
        assert_eq!(kind, FaultKind::Misaligned { space: Space::Shared, index: 1, bytes: 16, off_by: 4 });
        let (len, element_bytes) = (128, 4);
        let (space, write) = (Space::Global, false);
        let kind = run(96, 0, 144, 144);
        assert_eq!(kind, FaultKind::OutOfBounds { space, index: 96, bytes: 144, len, element_bytes, write });
        let (space, write) = (Space::Shared, true);
        let kind = run(0, 124, 32, 32);
        assert_eq!(kind, FaultKind::OutOfBounds { space, index: 124, bytes: 32, len, element_bytes, write });
        let kind = run(0, 0, 64, 32);
        let FaultKind::MbarrierExcess(excess) = kind else { panic!("{kind:?}") };
        assert_eq!((excess.index, excess.expected, excess.copied), (0, 32, 64));
        pass(
            sized::kernel(),
            shape(),
            sized::Args { x: read(x), from: 0, to: 0, bytes: 512, expected: 512 },
            &options,
        );
        pass(
            sized::kernel(),
            shape(),
            sized::Args { x: read(x), from: 128, to: 128, bytes: 0, expected: 0 },
            &options,
        );
    }
}

#[kernel(min_sm = 90)]
fn unseen(y: GlobalMut<u32>, mistake: u32) {
    let Layout { full, tile, .. } = layout();
    let t = thread::thread_idx_x();
    if t == 0 {
        full.init(1, 1);
    }
    y.store(t as usize, t);
    tile.store(64 + t, t);
    // Thread 0 makes one in any case, which shows what it has done itself.
    if mistake == 0 || t == 0 {
        bulk::fence();
    }
    thread::sync_threads();
    if t == 0 {
        full.arrive_and_expect(1, 256);
        tile.copy_bulk(0, y.as_const(), 0, 256, full, 1); // BUG: the source is not shown to it
        y.copy_bulk(64, tile, 64, 256);
        bulk::commit();
        bulk::wait::<0>();
        full.wait(1, 0);
        y.store(128, tile.load(63));
    }
}

#[test]
fn plain_writes_that_no_fence_shows_to_copies() {
    let y = aligned(|_| 0, 129);
    let args = unseen::Args { y: write(y), mistake: 1 };
    let place = at!("the source is not shown to it", block 0, thread 0);
    let kind = caught(unseen::kernel(), shape(), args, &EmuOptions::race_checked(), place);
    let FaultKind::NoProxyFence(pair) = kind else { panic!("{kind:?}") };
    assert_eq!((pair.index, pair.other, pair.other_access), (0, crate::support::thread(0, 1), "write"));
    pass(unseen::kernel(), shape(), unseen::Args { mistake: 0, ..args }, &EmuOptions::thorough());
    assert!((0..128).all(|i| y[i] == i as u32 % 64) && y[128] == 63);
}

#[kernel(min_sm = 90)]
fn unseen_barrier(x: Global<u32>, mistake: u32) {
    let Layout { full, tile, .. } = layout();
    if thread::thread_idx_x() == 0 {
        full.init(0, 1);
        if mistake != 1 {
            bulk::fence();
        }
        full.arrive_and_expect(0, 256);
        tile.copy_bulk(0, x, 0, 256, full, 0); // BUG: the barrier is not shown to it
        full.wait(0, 0);
        tile.store(3, 7);
        if mistake != 2 {
            bulk::fence();
        }
        full.arrive_and_expect(0, 256);
        tile.copy_bulk(0, x, 0, 256, full, 0); // BUG: it may come ahead of the store
        full.wait(0, 1);
    }
}

#[test]
fn a_barrier_that_no_fence_shows_to_copies() {
    let x = aligned(|i| i, 128);
    let options = EmuOptions::race_checked();
    let place = at!("the barrier is not shown to it", block 0, thread 0);
    let args = unseen_barrier::Args { x: read(x), mistake: 1 };
    let kind = caught(unseen_barrier::kernel(), shape(), args, &options, place);
    assert!(matches!(kind, FaultKind::NoProxyFence(_)), "{kind:?}");
    let args = unseen_barrier::Args { mistake: 2, ..args };
    let place = at!("it may come ahead of the store", block 0, thread 0);
    let kind = caught(unseen_barrier::kernel(), shape(), args, &options, place);
    assert!(matches!(kind, FaultKind::NoProxyFence(_)), "{kind:?}");
    pass(
        unseen_barrier::kernel(),
        shape(),
        unseen_barrier::Args { mistake: 0, ..args },
        &EmuOptions::thorough(),
    );
}

#[kernel(min_sm = 90)]
fn stored(x: GlobalMut<u32>, y: GlobalMut<u32>, mistake: u32) {
    let tile = layout().tile;
    let t = thread::thread_idx_x();
    tile.store(t, 3 * t);
    tile.store(64 + t, 5 * t);
    if mistake != 1 {
        bulk::fence_shared();
    }
    thread::sync_threads();
    if t == 0 {
        y.copy_bulk(0, tile, 0, 256); // BUG: no fence, or nobody waits
        bulk::commit();
        y.copy_bulk(64, tile, 64, 256);
        bulk::commit();
        if mistake == 5 {
            return;
        }
        if mistake != 2 {
            bulk::wait_read::<1>();
        }
        tile.store(5, 1); // BUG: the first copy has not read it
        if mistake == 3 {
            tile.store(64, 1); // BUG: the second has not either
        }
        if mistake == 4 {
            bulk::wait_read::<0>();
            x.store(0, y.load(0)); // BUG: read, but not written
        }
        bulk::wait::<0>();
        x.store(0, y.load(64 + 63));
    }
}

#[test]
fn copies_to_global_memory() {
    let (x, y) = (aligned(|_| 0, 1), aligned(|_| 0, 128));
    let options = EmuOptions::race_checked();
    let mut run = |mistake, place| {
        let args = stored::Args { x: write(x), y: write(y), mistake };
        caught(stored::kernel(), shape(), args, &options, place)
    };
    let kind = run(1, at!("no fence, or nobody waits", block 0, thread 0));
    assert!(matches!(kind, FaultKind::NoProxyFence(_)), "{kind:?}");
    let kind = run(2, at!("the first copy has not read it", block 0, thread 0));
    assert!(matches!(kind, FaultKind::CopySource(_)), "{kind:?}");
    let kind = run(3, at!("the second has not either", block 0, thread 0));
    assert!(matches!(kind, FaultKind::CopySource(_)), "{kind:?}");
    let kind = run(4, at!("read, but not written", block 0, thread 0));
    assert!(matches!(kind, FaultKind::Race(_)), "{kind:?}");
    let kind = run(5, at!("no fence, or nobody waits", block 0, thread 0));
    assert_eq!(kind, FaultKind::BulkLeft { space: Space::Global });
    for options in [EmuOptions::default(), EmuOptions::thorough()] {
        y.fill(0);
        pass(stored::kernel(), shape(), stored::Args { x: write(x), y: write(y), mistake: 0 }, &options);
        assert!((0..64).all(|i| y[i] == 3 * i as u32 && y[64 + i] == 5 * i as u32));
        assert_eq!(x[0], 5 * 63);
    }
}

#[kernel(min_sm = 90)]
fn left(x: Global<u32>, mistake: u32) {
    let Layout { full, tile, .. } = layout();
    if thread::thread_idx_x() == 1 {
        full.init(0, 1);
        bulk::fence();
        full.arrive_and_expect(0, 256);
        tile.copy_bulk(0, x, 0, 256, full, 0); // BUG: nobody waits for it
        if mistake == 0 {
            full.wait(0, 0);
        }
    }
}

#[test]
fn a_copy_that_the_block_does_not_wait_for() {
    let x = aligned(|i| i, 64);
    for options in modes() {
        let place = at!("nobody waits for it", block 0, thread 1);
        let kind = caught(left::kernel(), shape(), left::Args { x: read(x), mistake: 1 }, &options, place);
        assert_eq!(kind, FaultKind::BulkLeft { space: Space::Shared });
        pass(left::kernel(), shape(), left::Args { x: read(x), mistake: 0 }, &options);
    }
}

#[kernel(min_sm = 90)]
fn source_written(x: GlobalMut<u32>, mistake: u32) {
    let full = layout().full;
    start(x.as_const());
    if thread::thread_idx_x() == 0 {
        if mistake == 1 {
            x.store(63, 9); // BUG: the copy may not have read it
        }
        full.wait(0, 0);
        x.store(63, 9);
    }
}

#[test]
fn a_source_that_is_written_before_the_copy_has_come() {
    let x = aligned(|i| i, 64);
    let place = at!("the copy may not have read it", block 0, thread 0);
    let args = source_written::Args { x: write(x), mistake: 1 };
    let kind = caught(source_written::kernel(), shape(), args, &EmuOptions::race_checked(), place);
    assert!(matches!(kind, FaultKind::CopySource(_)), "{kind:?}");
    pass(
        source_written::kernel(),
        shape(),
        source_written::Args { mistake: 0, ..args },
        &EmuOptions::thorough(),
    );
}
