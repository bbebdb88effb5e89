//! Barriers in shared memory that are not there, that more come to than they are made for, or that less do.

use crate::support::{aligned, at, caught, modes, pass, read, thread, write};
use simt::emu::{EmuOptions, FaultKind, WaitFor};
use simt::{Global, GlobalMut, LaunchShape, Mbarrier, Shared, SharedPlan, bulk, kernel, thread as index};

const SOURCE: &str = include_str!("mbarriers.rs");

const STAGES: u32 = 2;
/// Words of a stage.
const WORDS: u32 = 64;

struct Layout {
    full: Shared<Mbarrier>,
    empty: Shared<Mbarrier>,
    tile: Shared<u32>,
    bytes: u32,
}

const fn layout() -> Layout {
    let mut plan = SharedPlan::new();
    let (full, empty) = (plan.array(STAGES), plan.array(STAGES));
    let tile = plan.array(STAGES * WORDS);
    Layout { full, empty, tile, bytes: plan.bytes() }
}

fn shape() -> LaunchShape {
    LaunchShape::new(2, 96).shared(layout().bytes)
}

/// Every way to run a kernel.
fn all_modes() -> Vec<EmuOptions> {
    [&modes()[..], &[EmuOptions::thorough()]].concat()
}

/// Warp 0 fills tiles, each by two copies, the others empty them: `rounds` tiles a block, in two stages. What
/// the writers do by hand the readers see as well: a word behind each tile's first.
#[kernel(min_sm = 90, max_threads = 96)]
fn ring(x: Global<u32>, y: GlobalMut<u32>, rounds: u32) {
    let Layout { full, empty, tile, .. } = layout();
    let (t, block) = (index::thread_idx_x(), index::block_idx_x());
    if t == 0 {
        for stage in 0..STAGES {
            full.init(stage, 1);
            empty.init(stage, 64);
        }
        bulk::fence_shared();
    }
    index::sync_threads();
    for round in 0..rounds {
        let (stage, turn) = (round % STAGES, round / STAGES);
        let from = ((block * rounds + round) * WORDS) as usize;
        if t == 0 {
            // The turn before the first one counts as over.
            empty.wait(stage, turn + 1);
            full.arrive_and_expect(stage, 4 * WORDS);
            tile.copy_bulk(stage * WORDS, x, from, 2 * WORDS, full, stage);
            tile.copy_bulk(stage * WORDS + 32, x, from + 32, 2 * WORDS, full, stage);
        }
        if t >= 32 {
            full.wait(stage, turn);
            let word = (t + 7) % WORDS;
            y.store(from + word as usize, tile.load(stage * WORDS + word) + 1);
            empty.arrive(stage);
        }
    }
}

#[test]
fn a_ring_of_two_stages_passes_in_every_order() {
    for options in all_modes() {
        for rounds in [1, 2, 7] {
            let x = aligned(|i| 3 * i, 2 * 64 * rounds as usize);
            let mut y = vec![0; x.len()];
            let args = ring::Args { x: read(x), y: write(&mut y), rounds };
            pass(ring::kernel(), shape(), args, &options);
            assert!(x.iter().zip(&y).all(|(x, y)| x + 1 == *y), "{options:?}");
        }
    }
}

/// Three phases of 32 arrivals, and the same eight bytes as a number in between.
#[kernel(min_sm = 90)]
fn phases(y: GlobalMut<u32>) {
    let Layout { full, tile, .. } = layout();
    let plain = SharedPlan::new().array::<u64>(1);
    let t = index::thread_idx_x();
    for life in 0..2 {
        if t == 0 {
            full.init(0, 32);
        }
        index::sync_threads();
        for phase in 0..3u32 {
            if t < 32 {
                tile.store(t, 100 * phase + t);
                full.arrive(0);
            }
            // All see what the 32 have written; those write again only when all have seen it.
            full.wait(0, phase);
            let seen = tile.load((t + 5) % 32);
            y.store(((life * 3 + phase) * 96 + t) as usize, seen);
            index::sync_threads();
        }
        if t == 0 {
            full.invalidate(0);
            plain.store(0, 5);
        }
        index::sync_threads();
        y.store((6 * 96 + t) as usize, plain.load(0) as u32);
        index::sync_threads();
    }
}

#[test]
fn phases_follow_one_another_and_a_barrier_has_several_lives() {
    for options in all_modes() {
        let mut y = vec![0; 7 * 96];
        let shape = LaunchShape { grid: 1.into(), ..shape() };
        // Its second life begins where a number lies, which nobody minds.
        pass(phases::kernel(), shape, phases::Args { y: write(&mut y) }, &options);
        for (i, seen) in y[..6 * 96].iter().enumerate() {
            assert_eq!(*seen, (100 * (i / 96 % 3) + (i % 96 + 5) % 32) as u32);
        }
        assert!(y[6 * 96..].iter().all(|seen| *seen == 5));
    }
}

#[kernel(min_sm = 90)]
fn odd_phase_first(y: GlobalMut<u32>) {
    let full = layout().full;
    if index::thread_idx_x() == 0 {
        full.init(0, 2);
        y.store(0, full.try_wait(0, 1).into());
        y.store(1, full.try_wait(0, 0).into());
        full.arrive(0);
        y.store(2, full.try_wait(0, 0).into());
        full.arrive(0);
        y.store(3, full.try_wait(0, 0).into());
        y.store(4, full.try_wait(0, 1).into());
        full.arrive(0);
        full.arrive(0);
        y.store(5, full.try_wait(0, 1).into());
    }
}

#[test]
fn a_parity_is_that_of_the_phase_under_way_or_of_the_one_before() {
    for options in all_modes() {
        let mut y = vec![9; 6];
        let shape = LaunchShape { grid: 1.into(), ..shape() };
        pass(odd_phase_first::kernel(), shape, odd_phase_first::Args { y: write(&mut y) }, &options);
        assert_eq!(y, [1, 0, 0, 1, 0, 1]);
    }
}

/// One mistake each, of thread 0.
#[kernel(min_sm = 90)]
fn misused(y: GlobalMut<u32>, mistake: u32) {
    let Layout { full, tile, .. } = layout();
    let plain = SharedPlan::new().array::<u64>(2);
    if index::thread_idx_x() != 0 {
        return;
    }
    if mistake == 0 {
        full.arrive(1); // BUG: nobody has made it
    }
    if mistake == 1 {
        full.init(0, 0); // BUG: for nobody
    }
    full.init(0, 1);
    match mistake {
        2 => full.init(0, 2),                    // BUG: there is one already
        3 => y.store(0, plain.load(0) as u32),   // BUG: read as a number
        4 => plain.store(0, 7),                  // BUG: written as a number
        5 => full.arrive_and_expect(0, 1 << 20), // BUG: one byte too many
        6 => {
            full.arrive_and_expect(0, 64);
            full.arrive(0); // BUG: the only one has arrived
        }
        7 => {
            full.invalidate(0);
            y.store(0, full.try_wait(0, 0).into()); // BUG: it is none any more
        }
        8 => tile.store(0, full.load(0).arrivals()), // BUG: read as what it is
        9 => full.init(1, 1 << 20),                  // BUG: for too many
        _ => full.arrive(0),
    }
}

trait Arrivals {
    fn arrivals(self) -> u32;
}

impl Arrivals for Mbarrier {
    fn arrivals(self) -> u32 {
        bytemuck::cast::<Mbarrier, u64>(self) as u32
    }
}

#[test]
fn misuses() {
    let shape = LaunchShape { grid: 1.into(), ..shape() };
    for options in modes() {
        let mut y = vec![0];
        let mut run = |mistake, place| {
            caught(misused::kernel(), shape, misused::Args { y: write(&mut y), mistake }, &options, place)
        };
        let kind = run(0, at!("nobody has made it", block 0, thread 0));
        assert_eq!(kind, FaultKind::NoMbarrier { index: 1 });
        let kind = run(1, at!("for nobody", block 0, thread 0));
        assert_eq!(kind, FaultKind::MbarrierCount { count: 0 });
        let bytes = FaultKind::MbarrierBytes { offset: 0, bytes: 8 };
        assert_eq!(run(2, at!("there is one already", block 0, thread 0)), bytes);
        assert_eq!(run(3, at!("read as a number", block 0, thread 0)), bytes);
        assert_eq!(run(4, at!("written as a number", block 0, thread 0)), bytes);
        let kind = run(5, at!("one byte too many", block 0, thread 0));
        assert_eq!(kind, FaultKind::MbarrierExpected { bytes: 1 << 20, most: (1 << 20) - 1 });
        let kind = run(6, at!("the only one has arrived", block 0, thread 0));
        assert!(matches!(kind, FaultKind::MbarrierArrivals { index: 0, count: 1, .. }), "{kind:?}");
        let kind = run(7, at!("it is none any more", block 0, thread 0));
        assert_eq!(kind, FaultKind::NoMbarrier { index: 0 });
        assert_eq!(run(8, at!("read as what it is", block 0, thread 0)), bytes);
        let kind = run(9, at!("for too many", block 0, thread 0));
        assert_eq!(kind, FaultKind::MbarrierCount { count: 1 << 20 });
        pass(misused::kernel(), shape, misused::Args { y: write(&mut y), mistake: 10 }, &options);
    }
}

#[kernel(min_sm = 90)]
fn waits_for_ever(x: Global<u32>, y: GlobalMut<u32>, arrive: u32, bytes: u32) {
    let Layout { full, tile, .. } = layout();
    let t = index::thread_idx_x();
    if t == 0 {
        full.init(1, 2);
        bulk::fence();
    }
    index::sync_threads();
    if t == 1 {
        full.arrive(1);
    }
    if t == 2 {
        if arrive == 1 {
            full.arrive_and_expect(1, 256);
        }
        tile.copy_bulk(0, x, 0, bytes, full, 1);
    }
    full.wait(1, 0); // BUG: something is lacking
    y.store(t as usize, tile.load(t % 64));
}

#[test]
fn what_a_wait_without_end_lacks() {
    let x = aligned(|i| i, 64);
    let shape = LaunchShape { grid: 1.into(), ..shape() };
    for options in modes().map(|options| EmuOptions { patience: 500, ..options }) {
        let mut y = vec![0; 96];
        for (arrive, bytes, arrivals, lacking) in [(0, 256, 1, -256), (1, 128, 0, 128), (1, 0, 0, 256)] {
            let args = waits_for_ever::Args { x: read(x), y: write(&mut y), arrive, bytes };
            let place = at!("something is lacking", block 0, thread 0);
            let kind = caught(waits_for_ever::kernel(), shape, args, &options, place);
            let FaultKind::EndlessWait(endless) = kind else { panic!("{kind:?}") };
            assert_eq!((endless.threads, endless.waits.len()), (96, 1));
            let WaitFor::Phase { index, parity, arrivals: a, count, bytes, last } = &endless.waits[0].on
            else {
                panic!("{endless}")
            };
            assert_eq!((*index, *parity, *a, *count, *bytes), (1, 0, arrivals, 2, lacking));
            assert_eq!(last.map(|(who, _)| who), Some(thread(0, if arrive == 1 { 2 } else { 1 })));
            let said = endless.to_string();
            let words = if arrivals == 1 { "1 of 2 arrivals" } else { "expected bytes that no copy brings" };
            assert!(said.contains("mbarrier in shared element 1") && said.contains(words), "{said}");
        }
        let args = waits_for_ever::Args { x: read(x), y: write(&mut y), arrive: 1, bytes: 256 };
        pass(waits_for_ever::kernel(), shape, args, &options);
        assert!((0..96).all(|t| y[t] == t as u32 % 64));
    }
}

#[kernel(min_sm = 90)]
fn handed_over(y: GlobalMut<u32>, late: u32) {
    let Layout { full, tile, .. } = layout();
    let t = index::thread_idx_x();
    if t == 0 {
        full.init(0, 32);
    }
    index::sync_threads();
    if t < 32 {
        tile.store(t, t);
        full.arrive(0);
        if late == 1 {
            tile.store(t, t);
        }
    }
    if t >= 64 {
        full.wait(0, 0);
        y.store(t as usize, tile.load(t - 64)); // BUG: the last store is behind the arrival
    }
}

#[test]
fn what_is_written_behind_the_arrival_nobody_is_shown() {
    let shape = LaunchShape { grid: 1.into(), ..shape() };
    let mut y = vec![0; 96];
    for options in all_modes() {
        pass(handed_over::kernel(), shape, handed_over::Args { y: write(&mut y), late: 0 }, &options);
        assert!((64..96).all(|t| y[t] == t as u32 - 64));
    }
    let (args, options) = (handed_over::Args { y: write(&mut y), late: 1 }, EmuOptions::race_checked());
    let place = at!("the last store is behind the arrival", block 0, thread 64);
    let kind = caught(handed_over::kernel(), shape, args, &options, place);
    assert!(matches!(kind, FaultKind::Race(_)), "{kind:?}");
}

#[kernel(min_sm = 90)]
fn unshown(mistake: u32) {
    let full = layout().full;
    let t = index::thread_idx_x();
    if t == 0 {
        full.init(0, 2);
    }
    if mistake == 0 {
        index::sync_threads();
    }
    if t == 0 || t == 32 {
        full.arrive(0); // BUG: nothing says that it is there
    }
}

#[test]
fn a_barrier_that_no_other_barrier_shows() {
    let shape = LaunchShape { grid: 1.into(), ..shape() };
    pass(unshown::kernel(), shape, unshown::Args { mistake: 0 }, &EmuOptions::thorough());
    let place = at!("nothing says that it is there", block 0, thread 32);
    let options = EmuOptions::race_checked();
    let kind = caught(unshown::kernel(), shape, unshown::Args { mistake: 1 }, &options, place);
    assert!(matches!(kind, FaultKind::Race(_)), "{kind:?}");
}
