//! Clusters: whose memory is there, who has written it, and who comes to the barrier.

#[cfg(not(target_arch = "nvptx64"))]
use crate::case::{Found, Mode};
#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
use simt::{GlobalMut, Shared, SharedPlan, cluster, kernel, thread};

/// Threads of a block.
const THREADS: u32 = 64;

struct Layout {
    tile: Shared<u32>,
    word: Shared<u32>,
}

/// Where things lie, and how many bytes they take.
const fn layout() -> (Layout, u32) {
    let mut plan = SharedPlan::new();
    let (tile, word) = (plan.array(THREADS), plan.array(1));
    (Layout { tile, word }, plan.bytes())
}

/// This thread, its block's rank, and that of the next block.
#[simt::device]
fn places() -> (u32, u32, u32) {
    let rank = cluster::rank();
    (thread::thread_idx_x(), rank, (rank + 1) % cluster::size())
}

/// What thread `t` of the block of that rank writes.
#[simt::device]
fn value(rank: u32, t: u32) -> u32 {
    1000 * rank + t
}

#[kernel(min_sm = 90, cluster = 2)]
fn not_yet_started(y: GlobalMut<u32>, bug: u32) {
    let (Layout { tile, .. }, _) = layout();
    let (t, rank, next) = places();
    if bug == 0 {
        cluster::sync();
    }
    tile.of_block(next).store(t, value(rank, t)); // BUG: the next block may not have started
    cluster::sync();
    y.store(thread::index_1d(), tile.load(t));
}

#[kernel(min_sm = 90, cluster = 2)]
fn not_yet_written(y: GlobalMut<u32>, bug: u32) {
    let (Layout { tile, .. }, _) = layout();
    let (t, rank, next) = places();
    tile.store(t, 0);
    cluster::sync();
    tile.store(t, value(rank, t));
    if bug == 0 {
        cluster::sync();
    } else {
        thread::sync_threads();
    }
    if rank == 1 {
        y.store(thread::index_1d(), tile.of_block(next).load(t)); // BUG: each block has met alone
    }
    cluster::sync();
}

#[kernel(min_sm = 90, cluster = 2)]
fn written_while_read(y: GlobalMut<u32>, bug: u32) {
    let (Layout { tile, .. }, _) = layout();
    let (t, rank, next) = places();
    tile.store(t, value(rank, t));
    cluster::sync();
    y.store(thread::index_1d(), tile.of_block(next).load(t)); // BUG: that block may have gone on
    if bug == 0 {
        cluster::sync();
    }
    tile.store(t, 7);
    cluster::sync();
}

#[kernel(min_sm = 90, cluster = 2)]
fn ends_while_read(y: GlobalMut<u32>, bug: u32) {
    let (Layout { tile, .. }, _) = layout();
    let (t, rank, next) = places();
    tile.store(t, value(rank, t));
    cluster::sync();
    if rank == 0 {
        y.store(thread::index_1d(), tile.of_block(next).load(t)); // BUG: the next block may have ended
    }
    if bug == 0 {
        cluster::sync();
    }
}

#[kernel(min_sm = 90, cluster = 4)]
fn two_store_to_one_word(y: GlobalMut<u32>, bug: u32) {
    let (Layout { word, .. }, _) = layout();
    let (t, rank, _) = places();
    if t == 0 {
        word.store(0, 0);
    }
    cluster::sync();
    if t == 0 {
        if bug == 0 {
            word.of_block(0).atomic_add(0, rank);
        } else {
            word.of_block(0).store(0, rank); // BUG: each block stores there
        }
    }
    cluster::sync();
    if rank == 0 {
        y.store(thread::index_1d(), word.load(0));
    }
}

#[kernel(min_sm = 90, cluster = 2)]
fn rank_beyond(y: GlobalMut<u32>, bug: u32) {
    let (Layout { tile, .. }, _) = layout();
    let (t, rank, _) = places();
    tile.store(t, value(rank, t));
    cluster::sync();
    let next = if bug == 0 { (rank + 1) % 2 } else { rank + 1 };
    y.store(thread::index_1d(), tile.of_block(next).load(t)); // BUG: the last one has no next
    cluster::sync();
}

#[kernel(min_sm = 90, cluster = 2)]
fn arrives_twice(y: GlobalMut<u32>, bug: u32) {
    let (Layout { tile, .. }, _) = layout();
    let (t, rank, next) = places();
    tile.store(t, value(rank, t));
    cluster::arrive();
    if bug == 1 {
        cluster::arrive(); // BUG: it has not waited
    }
    cluster::wait();
    y.store(thread::index_1d(), tile.of_block(next).load(t));
    cluster::sync();
}

#[kernel(min_sm = 90, cluster = 2)]
fn one_block_does_not_come(y: GlobalMut<u32>, bug: u32) {
    let (Layout { tile, .. }, _) = layout();
    let (t, rank, next) = places();
    tile.store(t, value(rank, t));
    cluster::sync();
    y.store(thread::index_1d(), tile.of_block(next).load(t));
    cluster::sync();
    if bug == 0 || rank == 1 {
        cluster::sync(); // BUG: block 0 is not here
    }
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! go {
    ($kernel:ident, $blocks:literal, $bug:ident, $on:ident, $expected:expr) => {{
        let mut y = [0; $blocks * THREADS as usize];
        let shape = LaunchShape::new($blocks, THREADS).shared(layout().1);
        $on.go($kernel::kernel(), shape, $kernel::Args { y: $on.write(&mut y)?, bug: $bug })?;
        let expected: fn(u32, u32) -> u32 = $expected;
        assert!($bug == 1 || (0..).zip(y).all(|(i, y)| y == expected(i / THREADS, i % THREADS)), "{y:?}");
        Ok(())
    }};
    // What the other block of each pair wrote.
    ($kernel:ident, $bug:ident, $on:ident) => {
        go!($kernel, 4, $bug, $on, |block, t| 1000 * (1 - block % 2) + t)
    };
}

cases! { "clusters";
    not_yet_started: "another block's memory, and the cluster has not met yet",
        Found::In(Mode::Default, "ClusterNotStarted", "the next block may not have started", (0, 0)),
        |bug, on| go!(not_yet_started, bug, on);
    not_yet_written: "a block's barrier in the place of the cluster's",
        Found::In(Mode::Races, "Race", "each block has met alone", (1, 0)),
        |bug, on| go!(not_yet_written, 4, bug, on, |block, t| if block % 2 == 1 { t } else { 0 });
    written_while_read: "a tile that is written again while another block reads it",
        Found::In(Mode::Races, "Race", "that block may have gone on", (1, 0)),
        |bug, on| go!(written_while_read, bug, on);
    ends_while_read: "a block that ends while another one reads its memory",
        Found::In(Mode::Races, "ClusterEnded", "the next block may have ended", (0, 0)),
        |bug, on| go!(ends_while_read, 4, bug, on, |block, t| if block % 2 == 0 { 1000 + t } else { 0 });
    two_store_to_one_word: "two blocks that store to one word of a third",
        Found::In(Mode::Races, "Race", "each block stores there", (1, 0)),
        |bug, on| go!(two_store_to_one_word, 4, bug, on, |block, _| if block == 0 { 6 } else { 0 });
    rank_beyond: "a rank that the cluster does not have",
        Found::In(Mode::Default, "ClusterRank", "the last one has no next", (1, 0)),
        |bug, on| go!(rank_beyond, bug, on);
    arrives_twice: "a thread that arrives twice at the cluster's barrier",
        Found::In(Mode::Default, "ClusterArrival", "it has not waited", (0, 0)),
        |bug, on| go!(arrives_twice, bug, on);
    one_block_does_not_come: "a block that does not come to the cluster's barrier",
        Found::In(Mode::Default, "ClusterBarrier", "block 0 is not here", (1, 0)),
        |bug, on| go!(one_block_does_not_come, bug, on);
}
