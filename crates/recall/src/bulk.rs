//! Barriers in shared memory, and bulk copies that they count: who arrives, who waits, what has come, and
//! what copies see.

#[cfg(not(target_arch = "nvptx64"))]
use crate::case::{Found, Mode};
#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
use simt::{Global, GlobalMut, Mbarrier, Shared, SharedPlan, bulk, kernel, thread};

struct Layout {
    full: Shared<Mbarrier>,
    tile: Shared<u32>,
}

/// Where things lie, and how many bytes they take.
const fn layout() -> (Layout, u32) {
    let mut plan = SharedPlan::new();
    let (full, tile) = (plan.array(2), plan.array(128));
    (Layout { full, tile }, plan.bytes())
}

/// Thread 0 makes barrier 0 for `count` arrivals.
#[simt::device]
fn make(count: u32) {
    if thread::thread_idx_x() == 0 {
        layout().0.full.init(0, count);
        bulk::fence_shared();
    }
    thread::sync_threads();
}

/// Thread 0 arrives, expects `expected` bytes, and copies the first `bytes` of `x` to the tile.
#[simt::device]
fn fill(x: Global<u32>, expected: u32, bytes: u32) {
    let (Layout { full, tile }, _) = layout();
    if thread::thread_idx_x() == 0 {
        full.arrive_and_expect(0, expected);
        tile.copy_bulk(0, x, 0, bytes, full, 0);
    }
}

#[kernel(min_sm = 90)]
fn read_before_the_wait(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { full, tile }, _) = layout();
    let t = thread::thread_idx_x();
    make(1);
    fill(x, 256, 256);
    if bug == 0 {
        full.wait(0, 0);
    }
    y.store(t as usize, tile.load(t)); // BUG: it may not have come
    full.wait(0, 0);
}

#[kernel(min_sm = 90)]
fn wrong_parity(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { full, tile }, _) = layout();
    let t = thread::thread_idx_x();
    make(1);
    fill(x, 256, 256);
    full.wait(0, bug);
    y.store(t as usize, tile.load(t)); // BUG: the phase before is long over
    full.wait(0, 0);
}

#[kernel(min_sm = 90)]
fn filled_while_read(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { full, tile }, _) = layout();
    let t = thread::thread_idx_x();
    make(1);
    fill(x, 256, 256);
    full.wait(0, 0);
    y.store(t as usize, tile.load(t));
    if bug == 0 {
        thread::sync_threads();
    }
    if t == 63 {
        full.arrive_and_expect(0, 256);
        tile.copy_bulk(0, x, 0, 256, full, 0); // BUG: others may still read
    }
    full.wait(0, 1);
    y.store(t as usize, tile.load(t));
}

#[kernel(min_sm = 90)]
fn two_phases_ahead(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { full, tile }, _) = layout();
    let t = thread::thread_idx_x();
    make(1);
    fill(x, 256, 256);
    full.wait(0, 0); // BUG: phase 1 may be over as well, and then that of parity 0 is the third
    if bug == 0 {
        thread::sync_threads();
    }
    fill(x, 256, 256);
    full.wait(0, 1);
    y.store(t as usize, tile.load(t));
}

#[kernel(min_sm = 90)]
fn expects_too_few(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { full, tile }, _) = layout();
    let t = thread::thread_idx_x();
    make(1);
    fill(x, 256 - 128 * bug, 256); // BUG: half of what comes
    full.wait(0, 0);
    y.store(t as usize, tile.load(t));
}

#[kernel(min_sm = 90)]
fn expects_too_many(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { full, tile }, _) = layout();
    let t = thread::thread_idx_x();
    make(1);
    fill(x, 256 + 16 * bug, 256);
    full.wait(0, 0); // BUG: 16 bytes never come
    y.store(t as usize, tile.load(t));
}

#[kernel(min_sm = 90)]
fn one_does_not_arrive(y: GlobalMut<u32>, bug: u32) {
    let (Layout { full, tile }, _) = layout();
    let t = thread::thread_idx_x();
    make(64);
    tile.store(t, 3 * t);
    if t != 63 || bug == 0 {
        full.arrive(0);
    }
    full.wait(0, 0); // BUG: thread 63 has not arrived
    y.store(t as usize, tile.load(63 - t));
}

#[kernel(min_sm = 90)]
fn one_arrives_twice(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { full, tile }, _) = layout();
    let t = thread::thread_idx_x();
    make(1);
    fill(x, 256, 256);
    if t == 0 && bug == 1 {
        full.arrive(0); // BUG: it has arrived when it said what it expects
    }
    full.wait(0, 0);
    y.store(t as usize, tile.load(t));
}

#[kernel(min_sm = 90)]
fn written_behind_the_arrival(y: GlobalMut<u32>, bug: u32) {
    let (Layout { full, tile }, _) = layout();
    let t = thread::thread_idx_x();
    make(32);
    if t < 32 {
        tile.store(t, t);
        if bug == 1 {
            full.arrive(0);
        }
        tile.store(t, 3 * t);
        if bug == 0 {
            full.arrive(0);
        }
    } else {
        full.wait(0, 0);
        y.store(t as usize, tile.load(t - 32)); // BUG: the second store came behind the arrival
    }
}

#[kernel(min_sm = 90)]
fn not_yet_made(bug: u32) {
    let full = layout().0.full;
    let t = thread::thread_idx_x();
    if t == 0 {
        full.init(0, 64);
    }
    if bug == 0 {
        thread::sync_threads();
    }
    full.arrive(0); // BUG: no barrier behind `init`
    full.wait(0, 0);
}

#[kernel(min_sm = 90)]
fn made_twice(bug: u32) {
    let full = layout().0.full;
    let t = thread::thread_idx_x();
    for life in 0..2 {
        if t == 0 {
            full.init(0, 64); // BUG: the first one is still there
        }
        thread::sync_threads();
        full.arrive(0);
        full.wait(0, 0);
        thread::sync_threads();
        if t == 0 && bug == 0 && life == 0 {
            full.invalidate(0);
        }
    }
}

#[kernel(min_sm = 90)]
fn a_barrier_not_shown(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { full, tile }, _) = layout();
    let t = thread::thread_idx_x();
    if t == 0 {
        full.init(0, 1);
        if bug == 0 {
            bulk::fence();
        }
    }
    thread::sync_threads();
    fill(x, 256, 256); // BUG: no fence behind `init`
    full.wait(0, 0);
    y.store(t as usize, tile.load(t));
}

#[kernel(min_sm = 90)]
fn a_tile_not_shown(y: GlobalMut<u32>, bug: u32) {
    let tile = layout().0.tile;
    let t = thread::thread_idx_x();
    tile.store(t, 3 * t);
    if bug == 0 {
        bulk::fence();
    }
    thread::sync_threads();
    if t == 0 {
        y.copy_bulk(0, tile, 0, 256); // BUG: no fence behind the stores
        bulk::commit();
        bulk::wait::<0>();
    }
}

#[kernel(min_sm = 90)]
fn a_source_not_shown(x: GlobalMut<u32>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { full, tile }, _) = layout();
    let t = thread::thread_idx_x();
    x.store(t as usize, t * t);
    if bug == 0 {
        bulk::fence();
    } else {
        bulk::fence_shared();
    }
    make(1);
    fill(x.as_const(), 256, 256); // BUG: that fence is one of shared memory
    full.wait(0, 0);
    y.store(t as usize, tile.load(t));
}

#[kernel(min_sm = 90)]
fn source_written_early(y: GlobalMut<u32>, bug: u32) {
    let tile = layout().0.tile;
    let t = thread::thread_idx_x();
    tile.store(t, 3 * t);
    bulk::fence_shared();
    thread::sync_threads();
    if t == 0 {
        y.copy_bulk(0, tile, 0, 256);
        bulk::commit();
        if bug == 0 {
            bulk::wait_read::<0>();
        }
        tile.store(7, 1); // BUG: the copy may not have read it
        bulk::wait::<0>();
    }
}

#[kernel(min_sm = 90)]
fn target_read_early(y: GlobalMut<u32>, bug: u32) {
    let tile = layout().0.tile;
    let t = thread::thread_idx_x();
    tile.store(t, 3 * t);
    bulk::fence_shared();
    thread::sync_threads();
    if t == 0 {
        y.copy_bulk(0, tile, 0, 256);
        bulk::commit();
        bulk::wait_read::<0>();
        if bug == 0 {
            bulk::wait::<0>();
        }
    }
    thread::sync_threads();
    y.store(64 + t as usize, y.load(63 - t as usize)); // BUG: the copy has read, but may not have written
}

#[kernel(min_sm = 90)]
fn thread_ends_early(y: GlobalMut<u32>, bug: u32) {
    let tile = layout().0.tile;
    let t = thread::thread_idx_x();
    tile.store(t, 3 * t);
    bulk::fence_shared();
    thread::sync_threads();
    if t == 0 {
        y.copy_bulk(0, tile, 0, 256); // BUG: shared memory may be another block's by then
        bulk::commit();
        if bug == 0 {
            bulk::wait_read::<0>();
        }
    }
}

#[kernel(min_sm = 90)]
fn block_ends_early(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { full, tile }, _) = layout();
    let t = thread::thread_idx_x();
    make(1);
    fill(x, 256, 256); // BUG: it comes to a block that is no more
    if bug == 0 {
        full.wait(0, 0);
        y.store(t as usize, tile.load(t));
    }
}

#[kernel(min_sm = 90)]
fn odd_size(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { full, tile }, _) = layout();
    let t = thread::thread_idx_x();
    make(1);
    fill(x, 256 - 8 * bug, 256 - 8 * bug); // BUG: not a multiple of 16
    full.wait(0, 0);
    y.store(t as usize, tile.load(t));
}

#[kernel(min_sm = 90)]
fn odd_place(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { full, tile }, _) = layout();
    let t = thread::thread_idx_x();
    make(1);
    if t == 0 {
        full.arrive_and_expect(0, 128);
        tile.copy_bulk(0, x, 4 + 2 * bug as usize, 128, full, 0); // BUG: not aligned to 16
    }
    full.wait(0, 0);
    y.store(t as usize, tile.load(t % 32));
}

/// Memory that is aligned as device memory is.
#[cfg(not(target_arch = "nvptx64"))]
#[repr(align(16))]
struct Aligned<const N: usize>([u32; N]);

#[cfg(not(target_arch = "nvptx64"))]
fn squares() -> Aligned<64> {
    Aligned(std::array::from_fn(|i| (i * i) as u32))
}

#[cfg(not(target_arch = "nvptx64"))]
fn shape() -> LaunchShape {
    LaunchShape::new(1, 64).shared(layout().1)
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! go {
    // From `x` to `y`, which must then be the same.
    ($kernel:ident, x, $bug:ident, $on:ident) => {{
        let (x, mut y) = (squares(), Aligned([0; 64]));
        let args = $kernel::Args { x: $on.read(&x.0)?, y: $on.write(&mut y.0)?, bug: $bug };
        $on.go($kernel::kernel(), shape(), args)?;
        assert!($bug == 1 || x.0 == y.0, "{:?}", y.0);
        Ok(())
    }};
    // To `y`, whose element `i` must then be as said.
    ($kernel:ident, $bug:ident, $on:ident, $expected:expr) => {{
        let mut y = Aligned([0; 128]);
        $on.go($kernel::kernel(), shape(), $kernel::Args { y: $on.write(&mut y.0)?, bug: $bug })?;
        let expected: fn(u32) -> u32 = $expected;
        assert!($bug == 1 || (0..).zip(&y.0).all(|(i, y)| *y == expected(i)), "{:?}", y.0);
        Ok(())
    }};
}

cases! { "bulk";
    read_before_the_wait: "a tile that is read before the wait for its copy",
        Found::In(Mode::Default, "CopyUnderWay", "it may not have come", (0, 0)),
        |bug, on| go!(read_before_the_wait, x, bug, on);
    wrong_parity: "a wait for the wrong parity", Found::In(Mode::Default, "CopyUnderWay", "the phase before is long over", (0, 0)),
        |bug, on| go!(wrong_parity, x, bug, on);
    filled_while_read: "a tile that is filled again while others read it", Found::In(Mode::Races, "Race", "others may still read", (0, 63)),
        |bug, on| go!(filled_while_read, x, bug, on);
    two_phases_ahead: "a thread that goes on two phases ahead of others",
        Found::In(Mode::Default, "EndlessWait", "phase 1 may be over as well, and then that of parity 0 is the third", (0, 1)),
        |bug, on| go!(two_phases_ahead, x, bug, on);
    expects_too_few: "a barrier that expects fewer bytes than come", Found::In(Mode::Default, "MbarrierExcess", "half of what comes", (0, 0)),
        |bug, on| go!(expects_too_few, x, bug, on);
    expects_too_many: "one that expects more", Found::In(Mode::Default, "EndlessWait", "16 bytes never come", (0, 0)),
        |bug, on| go!(expects_too_many, x, bug, on);
    one_does_not_arrive: "a thread that does not arrive", Found::In(Mode::Default, "EndlessWait", "thread 63 has not arrived", (0, 0)),
        |bug, on| go!(one_does_not_arrive, bug, on, |i| if i < 64 { 3 * (63 - i) } else { 0 });
    one_arrives_twice: "a thread that arrives twice", Found::In(Mode::Default, "MbarrierArrivals", "it has arrived when it said what it expects", (0, 0)),
        |bug, on| go!(one_arrives_twice, x, bug, on);
    written_behind_the_arrival: "a store behind the arrival that is to hand it on",
        Found::In(Mode::Races, "Race", "the second store came behind the arrival", (0, 32)),
        |bug, on| go!(written_behind_the_arrival, bug, on, |i| if (32..64).contains(&i) { 3 * (i - 32) } else { 0 });
    not_yet_made: "a barrier that is used before its `init` is shown", Found::In(Mode::Races, "Race", "no barrier behind `init`", (0, 1)),
        |bug, on| on.go(not_yet_made::kernel(), shape(), not_yet_made::Args { bug });
    made_twice: "a barrier that is made twice", Found::In(Mode::Default, "MbarrierBytes", "the first one is still there", (0, 0)),
        |bug, on| on.go(made_twice::kernel(), shape(), made_twice::Args { bug });
    a_barrier_not_shown: "no fence between `init` and a copy", Found::In(Mode::Races, "NoProxyFence", "no fence behind `init`", (0, 0)),
        |bug, on| go!(a_barrier_not_shown, x, bug, on);
    a_tile_not_shown: "no fence between stores and a copy of them",
        Found::In(Mode::Races, "NoProxyFence", "no fence behind the stores", (0, 0)),
        |bug, on| go!(a_tile_not_shown, bug, on, |i| if i < 64 { 3 * i } else { 0 });
    a_source_not_shown: "a fence of shared memory for a copy from global memory",
        Found::In(Mode::Races, "NoProxyFence", "that fence is one of shared memory", (0, 0)),
        |bug, on| {
            let (mut x, mut y) = (Aligned([0; 64]), Aligned([0; 64]));
            let args = a_source_not_shown::Args { x: on.write(&mut x.0)?, y: on.write(&mut y.0)?, bug };
            on.go(a_source_not_shown::kernel(), shape(), args)?;
            assert!(bug == 1 || y.0 == squares().0, "{:?}", y.0);
            Ok(())
        };
    source_written_early: "a copy's source that is written before it was read",
        Found::In(Mode::Races, "CopySource", "the copy may not have read it", (0, 0)),
        |bug, on| go!(source_written_early, bug, on, |i| if i < 64 { 3 * i } else { 0 });
    target_read_early: "a copy's target read behind the wait for its source",
        Found::In(Mode::Races, "Race", "the copy has read, but may not have written", (0, 0)),
        |bug, on| go!(target_read_early, bug, on, |i| if i < 64 { 3 * i } else { 3 * (127 - i) });
    thread_ends_early: "a thread that ends before its copy has read",
        Found::In(Mode::Default, "BulkLeft", "shared memory may be another block's by then", (0, 0)),
        |bug, on| go!(thread_ends_early, bug, on, |i| if i < 64 { 3 * i } else { 0 });
    block_ends_early: "a block that ends before a copy has come", Found::In(Mode::Default, "BulkLeft", "it comes to a block that is no more", (0, 0)),
        |bug, on| go!(block_ends_early, x, bug, on);
    odd_size: "a copy of 248 bytes", Found::In(Mode::Default, "BulkSize", "not a multiple of 16", (0, 0)),
        |bug, on| go!(odd_size, x, bug, on);
    odd_place: "a copy from a place that is not aligned", Found::In(Mode::Default, "Misaligned", "not aligned to 16", (0, 0)),
        |bug, on| {
            let (x, mut y) = (squares(), Aligned([0; 64]));
            let args = odd_place::Args { x: on.read(&x.0)?, y: on.write(&mut y.0)?, bug };
            on.go(odd_place::kernel(), shape(), args)?;
            assert!(bug == 1 || (0..64).all(|t| y.0[t] == x.0[4 + t % 32]), "{:?}", y.0);
            Ok(())
        };
}
