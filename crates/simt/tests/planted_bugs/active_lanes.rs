//! Lanes that are together: which ones is nobody's to know, and no result's to depend on.

use crate::support::{at, caught, launch, modes, pass, write};
use simt::emu::{EmuOptions, FaultKind, Schedule};
use simt::warp::{active_mask, warp_shuffle_idx};
use simt::{GlobalMut, LaunchShape, kernel, thread};

const SOURCE: &str = include_str!("active_lanes.rs");

fn ordered(schedule: Schedule) -> EmuOptions {
    EmuOptions { schedule, ..EmuOptions::race_checked() }
}

#[kernel]
fn together(masks: GlobalMut<u32>) {
    let t = thread::index_1d();
    if t.is_multiple_of(3) {
        masks.store(t, active_mask());
    } else {
        masks.store(t, active_mask());
    }
}

fn masks(options: &EmuOptions) -> Vec<u32> {
    let mut masks = vec![0; 2 * 40];
    pass(together::kernel(), LaunchShape::new(2, 40), together::Args { masks: write(&mut masks) }, options);
    masks
}

/// The lanes of the warp of thread `t`, of blocks of 40, that take the same way as it.
fn same_way(t: usize) -> u32 {
    let first = t - t % 40 % 32;
    let end = (first + 32).min(t / 40 * 40 + 40);
    (first..end)
        .filter(|other| other.is_multiple_of(3) == t.is_multiple_of(3))
        .map(|other| 1 << (other - first))
        .sum()
}

#[test]
fn a_mask_is_that_of_lanes_at_one_place() {
    for options in modes() {
        assert!(masks(&options).into_iter().enumerate().all(|(t, mask)| mask == same_way(t)));
    }
    // In reversed order each lane is alone.
    let alone = masks(&ordered(Schedule::Reversed));
    assert!(alone.into_iter().enumerate().all(|(t, mask)| mask == 1 << (t % 40 % 32)));
    for seed in 0..8 {
        let masks = masks(&ordered(Schedule::Seeded(seed)));
        for (t, mask) in masks.iter().enumerate() {
            let (first, lane) = (t - t % 40 % 32, t % 40 % 32);
            assert!(mask >> lane & 1 == 1 && mask & !same_way(t) == 0, "seed {seed}, thread {t}: {mask:#x}");
            // Whoever is together gets one mask.
            assert!(
                (0..32).filter(|other| mask >> other & 1 == 1).all(|other| masks[first + other] == *mask)
            );
        }
    }
}

/// Threads of even elements count in one atomic for all that are together.
#[kernel]
fn counted(count: GlobalMut<u32>, seen: GlobalMut<u32>) {
    let t = thread::index_1d();
    if t.is_multiple_of(2) {
        let (mask, lane) = (active_mask(), t as u32 % 32);
        let leader = mask.trailing_zeros();
        let mut place = 0;
        if lane == leader {
            place = count.atomic_add(0, mask.count_ones());
        }
        let place = warp_shuffle_idx(mask, place, leader, 32) + (mask & ((1 << lane) - 1)).count_ones();
        seen.atomic_add(place as usize, 1);
    }
}

#[test]
fn work_shared_by_lanes_that_are_together_is_the_same_in_every_order() {
    let seeds = (0..8).map(|seed| ordered(Schedule::Seeded(seed)));
    let more = [EmuOptions::thorough(), ordered(Schedule::Reversed)].into_iter().chain(seeds);
    for options in modes().into_iter().chain(more) {
        let (mut count, mut seen) = ([0], [0; 96]);
        let args = counted::Args { count: write(&mut count), seen: write(&mut seen) };
        pass(counted::kernel(), LaunchShape::new(2, 96), args, &options);
        assert_eq!((count, seen), ([96], [1; 96]));
    }
}

#[test]
fn a_result_that_depends_on_the_mask_is_found() {
    let mut masks = vec![0; 40];
    let args = together::Args { masks: write(&mut masks) };
    let options = EmuOptions { orders: 1, ..EmuOptions::default() };
    let fault = launch(together::kernel(), LaunchShape::new(1, 40), args, &options).unwrap_err();
    assert!(matches!(fault.kind, FaultKind::OrderDependence(_)), "{fault}");
}

/// Takes it for the lanes of the branch: those that were not together wait for each other in two calls.
#[kernel]
fn taken_for_the_branch(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let mask = active_mask();
    let all = if mask.count_ones() == 32 { mask } else { u32::MAX >> 1 };
    if t < 31 {
        y.store(t as usize, warp_shuffle_idx(all, t, 0, 32)); // BUG: lane 31 may be one of them
    }
}

#[test]
fn a_mask_of_lanes_that_go_elsewhere_is_one_lane_short() {
    let mut y = [0; 32];
    let args = taken_for_the_branch::Args { y: write(&mut y) };
    let at = at!("lane 31 may be one of them", block 0, thread 0);
    let found =
        caught(taken_for_the_branch::kernel(), LaunchShape::new(1, 32), args, &EmuOptions::default(), at);
    assert!(matches!(found, FaultKind::LaneMissing { mask: u32::MAX, lane: 31, .. }), "{found:?}");
    pass(taken_for_the_branch::kernel(), LaunchShape::new(1, 32), args, &ordered(Schedule::Reversed));
}
