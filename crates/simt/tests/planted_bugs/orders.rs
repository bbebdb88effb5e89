//! The orders themselves: who goes first under which schedule, and where its name may come from.

use crate::support::{launch, pass, write};
use simt::emu::{EmuOptions, Fault, FaultKind, OrderDependence, SCHEDULE_VARIABLE, Schedule};
use simt::{GlobalMut, LaunchShape, kernel, thread};
use std::process::Command;

#[kernel]
fn tickets(next: GlobalMut<u32>, places: GlobalMut<u32>) {
    let place = next.atomic_add(0, 1);
    places.store(place as usize, thread::index_1d() as u32);
}

/// The threads in the order in which they came to the atomic.
fn order_of(options: &EmuOptions, shape: LaunchShape) -> Result<Vec<u32>, Fault> {
    let threads = (shape.grid.count() * shape.block.count()) as usize;
    let (mut next, mut places) = (vec![0; 1], vec![0; threads]);
    let args = tickets::Args { next: write(&mut next), places: write(&mut places) };
    launch(tickets::kernel(), shape, args, options).map(|()| places)
}

fn named(schedule: Schedule) -> EmuOptions {
    EmuOptions { schedule, ..EmuOptions::default() }
}

#[test]
fn schedules_are_what_they_say() {
    let shape = LaunchShape::new(4, 96);
    assert!(order_of(&named(Schedule::Ascending), shape).unwrap().into_iter().eq(0..384));
    assert!(order_of(&named(Schedule::Reversed), shape).unwrap().into_iter().eq((0..384).rev()));
    let mut seen = Vec::new();
    for seed in 0..5 {
        let order = order_of(&named(Schedule::Seeded(seed)), shape).unwrap();
        assert_eq!(order, order_of(&named(Schedule::Seeded(seed)), shape).unwrap(), "one seed, one order");
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..384));
        // Threads of several blocks come in between each other.
        let changes = order.windows(2).filter(|pair| pair[0] / 96 != pair[1] / 96).count();
        assert!(seed != 1 || changes > 4, "{changes} changes from block to block");
        assert!(!seen.contains(&order), "each seed has its own order");
        seen.push(order);
    }
}

#[test]
fn a_difference_names_both_orders_and_the_element() {
    let (mut next, mut places) = (vec![0; 1], vec![9; 40]);
    let args = tickets::Args { next: write(&mut next), places: write(&mut places) };
    let options = EmuOptions { orders: 1, ..EmuOptions::default() };
    let fault = launch(tickets::kernel(), LaunchShape::new(2, 20), args, &options).unwrap_err();
    let FaultKind::OrderDependence(dependence) = &fault.kind else { panic!("{fault}") };
    let OrderDependence { parameter, index, schedules, values, first } = &**dependence;
    assert_eq!((*parameter, *index, *values), ("places", 0, [0, 39]));
    assert_eq!(*schedules, [Schedule::Ascending, Schedule::Reversed]);
    assert_eq!(first.map(|(thread, _)| thread), Some(crate::support::thread(0, 0)));
    assert_eq!(fault.thread, Some(crate::support::thread(1, 19)));
}

#[kernel]
fn counts(next: GlobalMut<u32>, places: GlobalMut<u32>) {
    next.atomic_add(0, 1);
    places.store(thread::index_1d(), next.atomic_max(1, 5) / 8);
}

#[test]
fn what_no_order_changes_is_left_as_the_first_order_wrote_it() {
    for orders in [1, 2, 6] {
        for schedule in [Schedule::Parallel, Schedule::Reversed, Schedule::Seeded(2)] {
            let (mut next, mut places) = (vec![3; 2], vec![7; 40]);
            let args = counts::Args { next: write(&mut next), places: write(&mut places) };
            let options = EmuOptions { orders, ..named(schedule) };
            pass(counts::kernel(), LaunchShape::new(2, 20), args, &options);
            // Each run began from the same contents.
            assert_eq!((next, places), (vec![43, 5], vec![0; 40]), "{options:?}");
        }
    }
}

/// Run by the test below, in processes of its own.
#[test]
fn in_the_order_of_the_environment() {
    let result = order_of(&EmuOptions::default(), LaunchShape::new(2, 4));
    match std::env::var(SCHEDULE_VARIABLE).as_deref() {
        Ok("reversed") => assert!(result.unwrap().into_iter().eq((0..8).rev())),
        Ok("sideways") => {
            let text = result.unwrap_err().to_string();
            assert!(text.contains("launch refused: FERROKV_SCHEDULE: `sideways` is no schedule"), "{text}");
            // Options that name an order do not ask for it.
            assert!(order_of(&named(Schedule::Ascending), LaunchShape::new(2, 4)).is_ok());
        }
        _ => assert!(result.is_ok()),
    }
}

#[test]
fn the_environment_names_the_order() {
    for order in ["reversed", "sideways"] {
        let test = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "orders::in_the_order_of_the_environment"])
            .env(SCHEDULE_VARIABLE, order)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&test.stdout);
        assert!(test.status.success() && text.contains("1 passed"), "{order}: {text}");
    }
}
