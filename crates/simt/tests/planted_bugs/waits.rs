//! Threads that wait for each other's words: what is legal runs, and a wait without end is named.

use crate::support::{at, caught, launch, line, modes, pass, thread as thread_id, write};
use simt::emu::{EmuOptions, Endless, Fault, FaultKind, Place, Schedule, Space, Wait, WaitFor};
use simt::{GlobalMut, LaunchShape, kernel, thread};

const SOURCE: &str = include_str!("waits.rs");

/// The default, the race check, and orders of each kind.
fn orders() -> Vec<EmuOptions> {
    let named = [Schedule::Ascending, Schedule::Reversed].into_iter().chain((0..3).map(Schedule::Seeded));
    let named = named.map(|schedule| EmuOptions { schedule, ..EmuOptions::default() });
    let patience = 500;
    modes().into_iter().chain(named).map(|options| EmuOptions { patience, ..options }).collect()
}

#[kernel]
fn chain(flags: GlobalMut<u32>, sum: GlobalMut<u32>) {
    // Each block waits for the one behind it: the last one goes first.
    let (t, block, blocks) = (thread::thread_idx_x(), thread::block_idx_x() as usize, thread::grid_dim_x());
    if t == 0 {
        while block + 1 < blocks as usize && flags.atomic_add(block + 1, 0) == 0 {
            thread::pause(20);
        }
        thread::device_fence();
    }
    thread::sync_threads();
    let after = if block + 1 < blocks as usize { sum.load(block + 1) } else { 0 };
    thread::sync_threads();
    if t == 0 {
        sum.store(block, after + block as u32);
        thread::device_fence();
        flags.atomic_exchange(block, 1);
    }
}

#[test]
fn blocks_that_wait_for_later_ones_run_in_every_order() {
    for options in orders() {
        // On all cores, as the grid is not small.
        let (mut flags, mut sum) = (vec![0; 60], vec![0; 60]);
        let args = chain::Args { flags: write(&mut flags), sum: write(&mut sum) };
        pass(chain::kernel(), LaunchShape::new(60, 32), args, &options);
        assert_eq!(sum[0], (0..60).sum::<u32>(), "{options:?}");
    }
}

#[kernel]
fn locked(lock: GlobalMut<u32>, sum: GlobalMut<u32>) {
    while lock.atomic_cas(0, 0, 1) != 0 {}
    thread::device_fence();
    sum.store(0, sum.load(0) + 1);
    thread::device_fence();
    lock.atomic_exchange(0, 0);
}

#[test]
fn a_lock_runs_in_every_order() {
    for options in orders() {
        let (mut lock, mut sum) = (vec![0; 1], vec![0; 1]);
        let args = locked::Args { lock: write(&mut lock), sum: write(&mut sum) };
        pass(locked::kernel(), LaunchShape::new(6, 40), args, &options);
        assert_eq!(sum, [240], "{options:?}");
    }
}

#[kernel]
fn kept(lock: GlobalMut<u32>, sum: GlobalMut<u32>) {
    while lock.atomic_cas(0, 0, thread::index_1d() as u32 + 1) != 0 {} // BUG: for the lock that is kept
    thread::device_fence();
    sum.store(0, sum.load(0) + 1);
    if sum.load(0) == 3 {
        thread::sync_threads(); // BUG: with the lock
    }
    thread::device_fence();
    lock.atomic_exchange(0, 0);
    thread::sync_threads();
}

fn line_of(place: Place) -> u32 {
    place.line
}

#[test]
fn a_wait_without_end_says_who_waits_where_for_whom() {
    let (mut lock, mut sum) = (vec![0; 1], vec![0; 1]);
    let args = kept::Args { lock: write(&mut lock), sum: write(&mut sum) };
    let place = at!("for the lock that is kept", block 0, thread 3);
    let kind = caught(kept::kernel(), LaunchShape::new(1, 64), args, &EmuOptions::race_checked(), place);
    let FaultKind::EndlessWait(endless) = kind else { panic!("{kind}") };
    let Endless { threads, waits, not_started } = *endless;
    assert_eq!((threads, not_started), (64, 0));
    let [looks, holds, ended] = &waits[..] else { panic!("{waits:?}") };
    let WaitFor::Word { space: Space::Global, index: 0, value: Some(3), recorded: true, last } = looks.on
    else {
        panic!("{looks}")
    };
    let last = last.map(|(thread, place)| (thread, line_of(place)));
    assert_eq!(last, Some((thread_id(0, 2), line_of(line!("for the lock that is kept")))));
    // Threads 0 and 1 wait at the barrier behind it.
    assert_eq!((ended.thread, &ended.on), (thread_id(0, 2), &WaitFor::Barrier));
    assert_eq!((holds.thread, &holds.on), (thread_id(0, 0), &WaitFor::Barrier));
    assert_eq!(line_of(ended.place), line_of(line!("with the lock")));
}

#[kernel]
fn circle(flags: GlobalMut<u32>) {
    let (block, blocks) = (thread::block_idx_x() as usize, thread::grid_dim_x() as usize);
    while flags.atomic_add((block + 1) % blocks, 0) == 0 {} // BUG: each for the next
    flags.atomic_exchange(block, 1);
}

#[test]
fn blocks_that_wait_in_a_circle() {
    for options in orders() {
        let mut flags = vec![0; 20];
        let args = circle::Args { flags: write(&mut flags) };
        let place = at!("each for the next", block 0, thread 0);
        let kind = caught(circle::kernel(), LaunchShape::new(20, 16), args, &options, place);
        let FaultKind::EndlessWait(endless) = kind else { panic!("{kind}") };
        assert_eq!((endless.threads, endless.not_started), (320, 0), "{options:?}");
        // One line, and another word for each of them: the first five are told.
        assert_eq!(endless.waits.len(), 5);
        for (block, wait) in (0..).zip(&endless.waits) {
            assert_eq!(wait.thread, thread_id(block, 0));
            assert!(
                matches!(wait.on, WaitFor::Word { index, .. } if index == u64::from(block) + 1),
                "{wait}"
            );
        }
    }
}

#[kernel]
fn crowded(flag: GlobalMut<u32>) {
    let last = thread::block_idx_x() + 1 == thread::grid_dim_x();
    if last {
        flag.atomic_exchange(0, 1);
    } else if thread::thread_idx_x() == 0 {
        while flag.atomic_add(0, 0) == 0 {} // BUG: for a block that has no room
    }
    thread::sync_threads();
}

#[test]
fn more_blocks_than_there_is_room_for() {
    // 320 blocks of 1024 threads are all that may wait at once, and 16 of them have stacks of their own.
    let options = EmuOptions { patience: 20, ..EmuOptions::default() };
    let mut flag = vec![0; 1];
    let args = crowded::Args { flag: write(&mut flag) };
    let options = EmuOptions { schedule: Schedule::Ascending, ..options };
    let place = at!("for a block that has no room", block 0, thread 0);
    let kind = caught(crowded::kernel(), LaunchShape::new(344, 1024), args, &options, place);
    let FaultKind::EndlessWait(endless) = kind else { panic!("{kind}") };
    assert_eq!((endless.threads, endless.not_started), (320 * 1024, 24));
    pass(crowded::kernel(), LaunchShape::new(40, 1024), args, &options);
}

#[kernel]
fn livelock(flag: GlobalMut<u32>, looks: GlobalMut<u32>) {
    // Words change all the time, and nobody comes any further.
    while flag.atomic_add(0, 0) == 0 {
        looks.atomic_add(0, 1); // BUG: counts its looks
    }
}

#[test]
fn a_wait_that_changes_words() {
    let options = EmuOptions { patience: 5, ..EmuOptions::default() };
    let (mut flag, mut looks) = (vec![0; 1], vec![0; 1]);
    let args = livelock::Args { flag: write(&mut flag), looks: write(&mut looks) };
    let fault = launch(livelock::kernel(), LaunchShape::new(2, 2), args, &options).unwrap_err();
    let FaultKind::EndlessWait(endless) = fault.kind else { panic!("{fault}") };
    assert_eq!(endless.threads, 4);
}

#[kernel]
fn never_sets(flag: GlobalMut<u32>, y: GlobalMut<u32>) {
    if thread::block_idx_x() + 1 == thread::grid_dim_x() && thread::thread_idx_x() == 0 {
        y.store(7, 1); // BUG: ends before it sets the flag
        flag.atomic_exchange(0, 1);
    } else {
        while flag.atomic_add(0, 0) == 0 {}
    }
}

#[test]
fn a_fault_that_others_wait_for_is_the_fault() {
    for options in orders() {
        for blocks in [4, 20] {
            let (mut flag, mut y) = (vec![0; 1], vec![0; 4]);
            let args = never_sets::Args { flag: write(&mut flag), y: write(&mut y) };
            let place = at!("ends before it sets the flag", block blocks - 1, thread 0);
            let kind = caught(never_sets::kernel(), LaunchShape::new(blocks, 32), args, &options, place);
            assert!(matches!(kind, FaultKind::OutOfBounds { index: 7, .. }), "{kind}");
        }
    }
}

#[kernel]
fn slow_giver(flag: GlobalMut<u32>) {
    if thread::block_idx_x() + 1 < thread::grid_dim_x() {
        while flag.atomic_add(0, 0) == 0 {}
    } else if thread::thread_idx_x() == 0 {
        // Long work that touches no memory.
        std::thread::sleep(std::time::Duration::from_millis(100));
        flag.atomic_exchange(0, 1);
    }
}

#[test]
fn a_wait_for_a_block_that_another_core_is_at() {
    let options = EmuOptions { patience: 10, ..EmuOptions::default() };
    for _ in 0..3 {
        let mut flag = vec![0; 1];
        pass(
            slow_giver::kernel(),
            LaunchShape::new(20, 16),
            slow_giver::Args { flag: write(&mut flag) },
            &options,
        );
    }
}

#[kernel]
fn plain_look(flag: GlobalMut<u32>) {
    if thread::thread_idx_x() == 0 {
        while flag.load(0) == 0 {} // BUG: nobody sets it
    }
    thread::sync_threads();
}

#[test]
fn a_wait_by_plain_loads() {
    // A thread gives way after very many of them only.
    for options in modes().map(|options| EmuOptions { patience: 3, ..options }) {
        let mut flag = vec![0; 1];
        let place = at!("nobody sets it", block 0, thread 0);
        let args = plain_look::Args { flag: write(&mut flag) };
        let kind = caught(plain_look::kernel(), LaunchShape::new(1, 2), args, &options, place);
        let FaultKind::EndlessWait(endless) = kind else { panic!("{kind}") };
        assert_eq!(endless.threads, 2);
    }
}

#[test]
fn a_fault_says_in_which_order_it_came() {
    let mut flags = vec![0; 20];
    let args = circle::Args { flags: write(&mut flags) };
    let options = EmuOptions { schedule: Schedule::Seeded(7), ..EmuOptions::default() };
    let fault: Fault = launch(circle::kernel(), LaunchShape::new(20, 1), args, &options).unwrap_err();
    assert!(fault.to_string().contains(", in order `seed 7`: a wait without end: it waits"), "{fault}");
    let again = launch(circle::kernel(), LaunchShape::new(20, 1), args, &options).unwrap_err();
    assert_eq!(fault, again);
    let named: Vec<Result<Schedule, _>> = ["reversed", "7", "x"].map(str::parse).into();
    assert_eq!(named[..2], [Ok(Schedule::Reversed), Ok(Schedule::Seeded(7))]);
    assert!(named[2].as_ref().is_err_and(|error: &String| error.starts_with("`x` is no schedule")));
    let _: &Wait = match &fault.kind {
        FaultKind::EndlessWait(endless) => &endless.waits[0],
        other => panic!("{other}"),
    };
}
