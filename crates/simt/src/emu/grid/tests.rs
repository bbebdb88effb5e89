//! Tests of who starts when.

use super::*;
use crate::emu::EmuOptions;
use crate::kernel::Dim3;

static INFO: KernelInfo = KernelInfo {
    name: "none",
    module: "",
    file: "",
    line: 0,
    max_threads: 1024,
    overlaps: false,
    waits_late: false,
    min_sm: 0,
    only_sm: 0,
    cluster: Dim3 { x: 1, y: 1, z: 1 },
};

fn setting(shape: LaunchShape, schedule: Schedule, race_check: bool) -> Setting<'static> {
    let options = EmuOptions { race_check, ..EmuOptions::default() };
    Setting {
        info: &INFO,
        shape,
        body: &|| {},
        options,
        schedule,
        tracked: None,
        watchpoint: None,
        mutated: false,
        sink: None,
        late: None,
    }
}

#[test]
fn small_grids_are_shared_among_all_cores() {
    let all = rayon::current_num_threads() as u64;
    let cores = |grid, block, schedule, race_check| {
        let grid = Grid::new(setting(LaunchShape::new(grid, block), schedule, race_check));
        assert!(grid.share * grid.cores <= grid.blocks, "each core has some");
        grid.cores
    };
    assert_eq!(cores(64, 32, Schedule::Parallel, false), all.min(64));
    assert_eq!(cores(2, 512, Schedule::Parallel, false), all.min(2));
    assert_eq!(cores(4, 32, Schedule::Parallel, false), 1);
    assert_eq!(cores(64, 32, Schedule::Parallel, true), 1);
    assert_eq!(cores(64, 32, Schedule::Reversed, false), 1);
}

#[test]
fn every_order_has_each_block_once() {
    for schedule in [Schedule::Reversed, Schedule::Seeded(0), Schedule::Seeded(9)] {
        let mut blocks = order(schedule, 100).unwrap();
        assert!(!blocks.is_sorted(), "{schedule}");
        blocks.sort_unstable();
        assert!(blocks.into_iter().eq(0..100), "{schedule}");
    }
    assert_ne!(order(Schedule::Seeded(0), 100), order(Schedule::Seeded(1), 100));
}

/// A core that ends may have set what the others wait for: they look once more.
#[test]
fn who_waits_looks_again_when_a_core_ends() {
    let shape = LaunchShape::new(64, 32);
    let grid = Grid::new(setting(shape, Schedule::Parallel, false));
    grid.working.store(2, Ordering::SeqCst);
    let changes = grid.changes.load(Ordering::SeqCst);
    let mut core = Core {
        grid: &grid,
        races: None,
        aside: Vec::new(),
        spare: Vec::new(),
        lodging: Lodging::new(0),
        started: 0,
        rounds: 0,
        share: 0..0,
        quiet: 0,
        idle_looks: 0,
        seen_changes: changes,
    };
    drop(Ended(&grid));
    core.wait_with_the_others(changes, true);
    assert!(!grid.over.load(Ordering::SeqCst), "it has not looked since");
    core.wait_with_the_others(grid.changes.load(Ordering::SeqCst), true);
    assert!(grid.over.load(Ordering::SeqCst), "nothing has changed since");
}
