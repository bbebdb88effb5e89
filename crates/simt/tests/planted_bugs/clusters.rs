//! Clusters: what blocks do with each other's shared memory, and who does not come to their barrier.

use crate::support::{aligned, at, caught, launch, line, modes, pass, read, thread, write};
use simt::emu::{EmuOptions, FaultKind, Schedule, Space};
use simt::{Global, GlobalMut, LaunchShape, Shared, SharedPlan, bulk, cluster, kernel, thread as index};

const SOURCE: &str = include_str!("clusters.rs");

/// Threads of a block.
const THREADS: u32 = 48;

struct Layout {
    tile: Shared<u32>,
    word: Shared<u32>,
    bytes: u32,
}

const fn layout() -> Layout {
    let mut plan = SharedPlan::new();
    let (tile, word) = (plan.array(THREADS), plan.array(4));
    Layout { tile, word, bytes: plan.bytes() }
}

fn shape(blocks: impl Into<simt::Dim3>) -> LaunchShape {
    LaunchShape { grid: blocks.into(), ..LaunchShape::new(1, THREADS).shared(layout().bytes) }
}

/// Every way to run a correct kernel.
fn all_modes() -> Vec<EmuOptions> {
    let orders = |schedule| EmuOptions { schedule, ..EmuOptions::race_checked() };
    let seeds = (0..6).map(|seed| orders(Schedule::Seeded(seed)));
    let more = [EmuOptions::thorough(), orders(Schedule::Reversed)].into_iter().chain(seeds);
    modes().into_iter().chain(more).collect()
}

/// Tiles go round the ring of a cluster; each block hands its own to the next one, by vectors.
#[simt::device]
fn around(y: GlobalMut<u32>, rounds: u32) {
    let Layout { tile, .. } = layout();
    let (t, rank, size) = (index::thread_idx_x(), cluster::rank(), cluster::size());
    let block = index::block_idx_x() + index::grid_dim_x() * index::block_idx_y();
    let mut value = 1000 * block + t;
    for _ in 0..rounds {
        tile.store(t, value);
        cluster::sync();
        value = tile.of_block((rank + 1) % size).load(t);
        cluster::sync();
        tile.of_block((rank + 1) % size).store(t, value + 1);
        cluster::sync();
        value = tile.load(t);
    }
    y.store((block * THREADS + t) as usize, value);
}

#[kernel(min_sm = 90, cluster = 2)]
fn ring_of_2(y: GlobalMut<u32>, rounds: u32) {
    around(y, rounds);
}

#[kernel(min_sm = 90, cluster = 8)]
fn ring_of_8(y: GlobalMut<u32>, rounds: u32) {
    around(y, rounds);
}

#[kernel(min_sm = 90, cluster = (2, 2))]
fn ring_of_2_by_2(y: GlobalMut<u32>, rounds: u32) {
    around(y, rounds);
}

#[kernel(min_sm = 90)]
fn ring_of_1(y: GlobalMut<u32>, rounds: u32) {
    around(y, rounds);
}

/// Each block reads the next one's tile and writes it back there, one higher.
fn ring_oracle(blocks: &[usize], y: &[u32], rounds: u32) {
    for (block, values) in blocks.iter().zip(y.chunks(THREADS as usize)) {
        for (t, value) in values.iter().enumerate() {
            assert_eq!(*value, (1000 * block + t) as u32 + rounds, "block {block}, thread {t}");
        }
    }
}

#[test]
fn tiles_go_round_the_ring_in_every_order() {
    for options in all_modes() {
        for rounds in [0, 1, 3] {
            let mut y = vec![0; 16 * THREADS as usize];
            let all: Vec<usize> = (0..16).collect();
            pass(ring_of_2::kernel(), shape(16), ring_of_2::Args { y: write(&mut y), rounds }, &options);
            ring_oracle(&all, &y, rounds);
            pass(ring_of_8::kernel(), shape(16), ring_of_8::Args { y: write(&mut y), rounds }, &options);
            ring_oracle(&all, &y, rounds);
            let args = ring_of_2_by_2::Args { y: write(&mut y), rounds };
            pass(ring_of_2_by_2::kernel(), shape((4, 4)), args, &options);
            ring_oracle(&all, &y, rounds);
            pass(ring_of_1::kernel(), shape(16), ring_of_1::Args { y: write(&mut y), rounds }, &options);
            ring_oracle(&all, &y, rounds);
        }
    }
}

/// Where each block is.
#[kernel(min_sm = 90, cluster = (2, 1, 3))]
fn places(y: GlobalMut<u32>) {
    let block =
        index::block_idx_x() + index::grid_dim_x() * (index::block_idx_y() + 2 * index::block_idx_z());
    let (a, b) = (cluster::id_x() + 10 * cluster::id_y() + 100 * cluster::id_z(), cluster::rank());
    if index::thread_idx_x() == 0 {
        y.store(block as usize, 10_000 * cluster::size() + 1000 * b + a);
    }
}

#[test]
fn ranks_go_along_x_first() {
    for options in all_modes() {
        let mut y = vec![0; 4 * 2 * 6];
        pass(places::kernel(), shape((4, 2, 6)), places::Args { y: write(&mut y) }, &options);
        for (block, value) in (0u32..).zip(y) {
            let (bx, by, bz) = (block % 4, block / 4 % 2, block / 8);
            let (id, rank) = (bx / 2 + 10 * by + 100 * (bz / 3), bx % 2 + 2 * (bz % 3));
            assert_eq!(value, 60_000 + 1000 * rank + id, "block {block}");
        }
    }
}

/// Every thread adds to a word of each block, and changes bits of its element in two of them.
#[kernel(min_sm = 90, cluster = 4)]
fn counted(x: Global<u32>, y: GlobalMut<u32>) {
    let Layout { tile, word, .. } = layout();
    let (t, rank) = (index::thread_idx_x(), cluster::rank());
    if t < 4 {
        word.store(t, 0);
    }
    tile.store(t, 0);
    cluster::sync();
    let value = x.load(index::index_1d());
    for other in 0..4 {
        word.of_block(other).atomic_add(rank, value);
    }
    tile.of_block((rank + 1) % 4).atomic_xor(t, 7 * t);
    tile.of_block((rank + 2) % 4).atomic_or(t, 1 << 20);
    cluster::sync();
    if t < 4 {
        y.store((index::block_idx_x() * 4 + t) as usize, word.load(t));
    }
    assert_eq!(tile.load(t), 7 * t + (1 << 20));
}

#[test]
fn updates_of_other_blocks_words_add_up() {
    for options in all_modes() {
        let x: Vec<u32> = (0..8 * THREADS).map(|i| i * i).collect();
        let mut y = vec![0; 32];
        pass(counted::kernel(), shape(8), counted::Args { x: read(&x), y: write(&mut y) }, &options);
        for (at, sum) in y.into_iter().enumerate() {
            let from = at / 16 * 4 + at % 4;
            let own: u32 = x.chunks(THREADS as usize).nth(from).unwrap().iter().sum();
            assert_eq!(sum, own, "word {at}");
        }
    }
}

/// A block hands a tile to the next one by a flag in that one's memory, and arrives early at the last
/// barrier.
#[kernel(min_sm = 90, cluster = 2)]
fn flagged(y: GlobalMut<u32>) {
    let Layout { tile, word, .. } = layout();
    let (t, rank) = (index::thread_idx_x(), cluster::rank());
    if t == 0 {
        word.store(0, 0);
    }
    cluster::sync();
    if rank == 0 {
        tile.of_block(1).store(t, 3 * t);
        index::sync_threads();
        if t == 0 {
            index::device_fence();
            word.of_block(1).atomic_store(0, 1);
        }
        cluster::arrive();
    } else {
        cluster::arrive();
        while word.atomic_load(0) == 0 {}
        index::device_fence();
        y.store(t as usize, tile.load(t));
    }
    cluster::wait();
}

#[test]
fn a_flag_hands_on_what_a_block_wrote() {
    for options in all_modes() {
        let mut y = vec![0; THREADS as usize];
        pass(flagged::kernel(), shape(2), flagged::Args { y: write(&mut y) }, &options);
        assert!((0..).zip(y).all(|(t, value)| value == 3 * t));
    }
}

/// One mistake each of the four blocks of a cluster.
#[kernel(min_sm = 90, cluster = 4)]
fn misused(y: GlobalMut<u32>, mistake: u32) {
    let Layout { tile, word, .. } = layout();
    let (t, rank) = (index::thread_idx_x(), cluster::rank());
    tile.store(t, t);
    if mistake == 1 && rank == 0 {
        y.store(t as usize, tile.of_block(1).load(t)); // BUG: it may not have started
    }
    cluster::sync();
    let first = t == 0 && rank == 2;
    if first {
        match mistake {
            2 => y.store(0, tile.of_block(4).load(0)), // BUG: there are four
            3 => y.store(0, tile.of_block(1).load(THREADS)), // BUG: one past the end
            4 => y.store(0, tile.of_block(1).load_vector::<u64>(1) as u32), // BUG: not at a multiple of 8
            5 => y.store(0, word.of_block(3).load(0)), // BUG: nobody wrote it
            6 => tile.of_block(3).store(THREADS + 1, 0), // BUG: two past the end
            7 => y.store(0, word.of_block(3).atomic_add(1, 1)), // BUG: nobody set it
            _ => (),
        }
    }
    if mistake == 8 && t < 32 && rank == 1 {
        cluster::arrive();
        cluster::arrive(); // BUG: it has
    }
    if mistake == 9 && t >= 32 && rank == 1 {
        cluster::wait(); // BUG: it has not arrived
    }
    if mistake == 10 && t == 40 && rank == 3 {
        return;
    }
    if mistake == 11 && rank == 3 {
        index::sync_threads();
        return;
    }
    cluster::sync(); // BUG: not all come
}

#[test]
fn a_cluster_without_mistakes_passes() {
    for options in all_modes() {
        let mut y = [0; THREADS as usize];
        pass(misused::kernel(), shape(8), misused::Args { y: write(&mut y), mistake: 0 }, &options);
    }
}

#[test]
fn each_misuse_has_its_fault() {
    let with = |mistake, at, options: &EmuOptions| {
        let mut y = [0; THREADS as usize];
        caught(misused::kernel(), shape(4), misused::Args { y: write(&mut y), mistake }, options, at)
    };
    for options in modes() {
        let found = with(1, at!("it may not have started", block 0, thread 0), &options);
        assert_eq!(found, FaultKind::ClusterNotStarted { rank: 1 });
        let found = with(2, at!("there are four", block 2, thread 0), &options);
        assert_eq!(found, FaultKind::ClusterRank { rank: 4, size: 4 });
        let outside = |index: u32, write| FaultKind::OutOfBounds {
            space: Space::Cluster,
            index: index.into(),
            bytes: 4,
            len: THREADS.into(),
            element_bytes: 4,
            write,
        };
        assert_eq!(with(3, at!("one past the end", block 2, thread 0), &options), outside(THREADS, false));
        assert_eq!(with(6, at!("two past the end", block 2, thread 0), &options), outside(THREADS + 1, true));
        let found = with(4, at!("not at a multiple of 8", block 2, thread 0), &options);
        assert_eq!(found, FaultKind::Misaligned { space: Space::Cluster, index: 1, bytes: 8, off_by: 4 });
        let unwritten = |offset| FaultKind::ClusterUnwritten { rank: 3, offset, bytes: 4 };
        let word = layout().bytes - 16;
        assert_eq!(with(5, at!("nobody wrote it", block 2, thread 0), &options), unwritten(word));
        assert_eq!(with(7, at!("nobody set it", block 2, thread 0), &options), unwritten(word + 4));
        let found = with(8, at!("it has", block 1, thread 0), &options);
        assert_eq!(found, FaultKind::ClusterArrival { waits: false });
        let found = with(9, at!("it has not arrived", block 1, thread 32), &options);
        assert_eq!(found, FaultKind::ClusterArrival { waits: true });
        let at_end = at!("not all come", block 3, thread 32);
        let FaultKind::DivergentBarrier { absent, waits_at: None } = with(10, at_end, &options) else {
            panic!("a lane that has ended")
        };
        assert_eq!(absent.x, 40);
        let found = with(11, at!("not all come", block 0, thread 0), &options);
        assert_eq!(found, FaultKind::ClusterBarrier { absent: Box::new(thread(3, 0)), waits_at: None });
    }
}

/// A warp that goes elsewhere, of a block that the others wait for.
#[kernel(min_sm = 90, cluster = 2)]
fn elsewhere(mistake: u32) {
    let warp = index::thread_idx_x() / 32;
    if mistake == 1 && cluster::rank() == 1 && warp == 1 {
        index::named_barrier_sync(1, 64); // BUG: warp 0 is at the cluster's barrier
    }
    cluster::sync(); // BUG: warp 1 of block 1 is not here
}

#[test]
fn who_does_not_come_is_named() {
    for options in modes() {
        pass(elsewhere::kernel(), shape(2), elsewhere::Args { mistake: 0 }, &options);
        let at = at!("warp 1 of block 1 is not here", block 0, thread 0);
        let found = caught(elsewhere::kernel(), shape(2), elsewhere::Args { mistake: 1 }, &options, at);
        let FaultKind::ClusterBarrier { absent, waits_at: Some(place) } = found else { panic!("{found:?}") };
        let expected = line!("warp 0 is at the cluster's barrier");
        assert_eq!((*absent, place.line), (thread(1, 32), expected.line));
    }
}

/// Accesses that nothing orders.
#[kernel(min_sm = 90, cluster = 2)]
fn unordered(y: GlobalMut<u32>, mistake: u32) {
    let Layout { tile, word, .. } = layout();
    let (t, rank) = (index::thread_idx_x(), cluster::rank());
    tile.store(t, t); // BUG: own write
    if t == 0 {
        word.store(0, 0);
    }
    cluster::sync();
    if mistake == 1 {
        tile.store(t, 2 * t); // BUG: the reader has not waited
        if rank == 1 {
            y.store(t as usize, tile.of_block(0).load(t)); // BUG: read of the other's
        }
    }
    if mistake == 2 && t == 0 {
        word.of_block(0).store(0, rank); // BUG: both write
    }
    if mistake == 3 && rank == 0 {
        y.store(t as usize, tile.of_block(1).load(t)); // BUG: it need not be there any more
    }
    if mistake == 3 {
        return;
    }
    if mistake == 4 && t == 1 {
        word.of_block(1).atomic_add(0, 1); // BUG: beside a plain read
    }
    if mistake == 4 && t == 0 && rank == 1 {
        y.store(0, word.load(0)); // BUG: plain
    }
    if mistake == 5 && rank == 1 {
        tile.of_block(0).store(t, 5);
        index::sync_threads();
    }
    if mistake == 5 && rank == 0 {
        index::sync_threads();
        y.store(t as usize, tile.load(t)); // BUG: barriers of one block alone
    }
    cluster::sync();
}

#[test]
fn what_nothing_orders_is_a_race() {
    let with = |mistake, at| {
        let mut y = [0; THREADS as usize];
        let args = unordered::Args { y: write(&mut y), mistake };
        caught(unordered::kernel(), shape(2), args, &EmuOptions::race_checked(), at)
    };
    let race = |found: FaultKind| match found {
        FaultKind::Race(race) => {
            (race.space, race.access, race.other_access, race.other, race.other_place.line)
        }
        other => panic!("{other:?}"),
    };
    let (space, access, other, by, at) = race(with(1, at!("read of the other's", block 1, thread 0)));
    let expected = line!("the reader has not waited").line;
    assert_eq!((space, access, other, by, at), (Space::Cluster, "read", "write", thread(0, 0), expected));
    let (space, access, other, by, _) = race(with(2, at!("both write", block 1, thread 0)));
    assert_eq!((space, access, other, by), (Space::Cluster, "write", "write", thread(0, 0)));
    let (space, access, other, by, at) = race(with(4, at!("plain", block 1, thread 0)));
    let expected = line!("beside a plain read").line;
    assert_eq!((space, access, other, by, at), (Space::Shared, "read", "atomic", thread(0, 1), expected));
    let found = with(3, at!("it need not be there any more", block 0, thread 0));
    assert_eq!(found, FaultKind::ClusterEnded { rank: 1 });
    // The reader comes first: the write of the other block races with its read.
    let mut y = [0; THREADS as usize];
    let args = unordered::Args { y: write(&mut y), mistake: 5 };
    let fault = launch(unordered::kernel(), shape(2), args, &EmuOptions::race_checked()).unwrap_err();
    assert!(matches!(&fault.kind, FaultKind::Race(race) if race.space == Space::Cluster), "{fault}");
}

/// In reversed order block 1 has ended when block 0 looks at it: found without any check.
#[test]
fn the_memory_of_a_block_that_has_ended_is_gone() {
    let mut y = [0; THREADS as usize];
    let options = EmuOptions { schedule: Schedule::Reversed, ..EmuOptions::default() };
    let args = unordered::Args { y: write(&mut y), mistake: 3 };
    let fault = launch(unordered::kernel(), shape(2), args, &options).unwrap_err();
    assert_eq!(fault.kind, FaultKind::ClusterEnded { rank: 1 }, "{fault}");
    assert!(fault.to_string().contains("may have ended by then"), "{fault}");
}

#[test]
fn a_grid_is_whole_clusters() {
    for (grid, fits) in [((2, 2, 6), true), ((3, 2, 6), false), ((2, 2, 4), false)] {
        let mut y = vec![0; 24];
        let result =
            launch(places::kernel(), shape(grid), places::Args { y: write(&mut y) }, &EmuOptions::default());
        match result {
            Ok(()) => assert!(fits),
            Err(fault) => {
                assert!(!fits, "{fault}");
                assert!(fault.to_string().contains("no multiple of the kernel's cluster (2,1,3)"), "{fault}");
            }
        }
    }
    assert_eq!(places::kernel().info().cluster.count(), 6);
    assert_eq!(ring_of_1::kernel().info().cluster.count(), 1);
}

/// A thread waits for a word of another block that nobody sets.
#[kernel(min_sm = 90, cluster = 2)]
fn waits_for_a_word() {
    let word = layout().word;
    if index::thread_idx_x() == 0 {
        word.store(0, 0);
    }
    cluster::sync();
    if index::thread_idx_x() == 0 && cluster::rank() == 0 {
        while word.of_block(1).atomic_load(0) == 0 {} // BUG: nobody sets it
    }
    cluster::sync();
}

#[test]
fn a_wait_for_another_blocks_word_has_an_end() {
    for options in modes() {
        let fault =
            launch(waits_for_a_word::kernel(), shape(2), waits_for_a_word::Args {}, &options).unwrap_err();
        let text = fault.to_string();
        assert!(matches!(fault.kind, FaultKind::EndlessWait(_)), "{text}");
        assert!(text.contains("waits for another block's shared element 0 to change from 0"), "{text}");
        assert!(text.contains("waits at the cluster's barrier for the rest of its cluster"), "{text}");
        assert_eq!(fault.place.unwrap().line, line!("nobody sets it").line);
    }
}

/// What is stored to another block's memory, which that block copies on.
#[kernel(min_sm = 90, cluster = 2)]
fn handed_on(y: GlobalMut<u32>, mistake: u32) {
    let Layout { tile, .. } = layout();
    let (t, rank) = (index::thread_idx_x(), cluster::rank());
    cluster::sync();
    tile.of_block(1 - rank).store(t, 100 * rank + t);
    match mistake {
        0 => bulk::fence(),
        1 => bulk::fence_shared(),
        _ => {}
    }
    cluster::sync();
    if t == 0 {
        if mistake == 2 {
            bulk::fence_shared();
        }
        y.copy_bulk((THREADS * rank) as usize, tile, 0, 4 * THREADS); // BUG: only the sender's memory was fenced
        bulk::commit();
        bulk::wait::<0>();
    }
}

/// A fence of the sender's own shared memory is none of the receiver's; one that the receiver makes is.
#[test]
fn a_fence_of_ones_own_memory_shows_nothing_of_anothers() {
    let y = aligned(|_| 0, 2 * THREADS as usize);
    for mistake in [1, 3] {
        let place = at!("only the sender's memory was fenced", block 0, thread 0);
        let args = handed_on::Args { y: write(y), mistake };
        let kind = caught(handed_on::kernel(), shape(2), args, &EmuOptions::race_checked(), place);
        let FaultKind::NoProxyFence(pair) = kind else { panic!("{kind:?}") };
        assert_eq!((pair.index, pair.other, pair.other_access), (0, thread(1, 0), "write"));
    }
    for mistake in [0, 2] {
        for options in all_modes() {
            y.fill(0);
            pass(handed_on::kernel(), shape(2), handed_on::Args { y: write(y), mistake }, &options);
            assert!((0..THREADS).all(|t| y[t as usize] == 100 + t && y[(THREADS + t) as usize] == t));
        }
    }
}
