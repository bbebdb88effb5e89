//! Products of groups of four warps: sums that are used too early, operands that are written or not shown,
//! and warps that part.

use crate::support::{at, caught, launch, line, modes, pass, write};
use simt::emu::{EmuOptions, FaultKind, ProductFault, Space, Target};
use simt::wgmma::{self, I8, Tile};
use simt::{GlobalMut, LaunchShape, Shared, SharedPlan, Swizzle, bulk, kernel, thread, warp};

const SOURCE: &str = include_str!("products.rs");

/// Rows of B: 32 bytes each.
const COLUMNS: u32 = 8;

const fn layout() -> (Shared<u32>, u32) {
    let mut plan = SharedPlan::new();
    let tile = plan.array(2 * 8 * COLUMNS);
    (tile, plan.bytes())
}

fn shape() -> LaunchShape {
    LaunchShape::new(1, 128).shared(layout().1)
}

/// Fills B: row i is all i + 1. Its 16-byte halves lie 128 bytes apart.
#[simt::device]
fn fill(tile: Shared<u32>, shown: bool) {
    let t = thread::thread_idx_x();
    if t < 8 * COLUMNS {
        tile.store(t, (t % 32 / 4 + 1) * 0x0101_0101);
    }
    if shown {
        bulk::fence_shared();
    }
    thread::sync_threads();
}

const ONES: [u32; 4] = [0x0101_0101; 4];

#[kernel(only_sm = 90)]
fn sums_and_operands(y: GlobalMut<i32>, mistake: u32) {
    let (array, _) = layout();
    let t = thread::thread_idx_x();
    fill(array, mistake != 1);
    let tile = Tile::new(array, 0, 256, 128);
    let group = wgmma::begin();
    let sums = group.multiply::<I8, 4>(ONES, tile); // BUG: the stores are not shown
    group.commit();
    if mistake == 2 && t == 127 {
        array.store(0, 0); // BUG: products read it
    }
    let sums = if mistake == 3 {
        wgmma::wait::<1, _, 4, 1>([sums]) // BUG: one group too many
    } else {
        wgmma::wait::<0, _, 4, 1>([sums])
    };
    y.store(t as usize, sums[0][0]);
    thread::sync_threads();
    if t < 32 {
        array.store(t, 0);
    }
}

#[test]
fn sums_that_are_used_and_operands_that_are_written_too_early() {
    for options in modes() {
        let mut y = vec![0; 128];
        let mut run = |mistake, place| {
            let args = sums_and_operands::Args { y: write(&mut y), mistake };
            caught(sums_and_operands::kernel(), shape(), args, &options, place)
        };
        let kind = run(3, at!("one group too many", block 0, thread 0));
        assert_eq!(kind, FaultKind::Products(ProductFault::UnderWay));
        if options.race_check {
            let kind = run(1, at!("the stores are not shown", block 0, thread 0));
            assert!(matches!(kind, FaultKind::NoProxyFence(_)), "{kind:?}");
            let kind = run(2, at!("products read it", block 0, thread 127));
            assert!(matches!(kind, FaultKind::CopySource(_)), "{kind:?}");
        }
        let args = sums_and_operands::Args { y: write(&mut y), mistake: 0 };
        pass(sums_and_operands::kernel(), shape(), args, &options);
        // Register 0 of lane 4·g + q is row g, column 2·q.
        let expected: Vec<i32> = (0..128).map(|t| 32 * (2 * (t % 4) + 1)).collect();
        assert_eq!(y, expected);
    }
}

#[kernel(only_sm = 90)]
fn warps_part(y: GlobalMut<i32>, mistake: u32) {
    let (array, _) = layout();
    let t = thread::thread_idx_x();
    fill(array, true);
    let tile = Tile::new(array, 0, 256, 128);
    if mistake == 1 && t >= 96 || mistake == 5 && t < 32 {
        return;
    }
    let group = wgmma::begin(); // BUG: warp 3 has left
    let sums = if mistake == 2 && t / 32 == 1 {
        group.multiply::<I8, 4>(ONES, tile) // BUG: a product of its own
    } else if mistake == 3 && warp::lane_id() == 5 {
        group.multiply::<I8, 4>(ONES, tile)
    } else {
        group.multiply::<I8, 4>(ONES, tile) // BUG: the others' product
    };
    if mistake != 4 {
        group.commit();
    }
    let [sums] = wgmma::wait::<0, _, 4, 1>([sums]); // BUG: never committed
    y.store(t as usize, sums[0]);
}

#[test]
fn warps_and_lanes_that_part() {
    for options in modes() {
        let mut y = vec![0; 128];
        let mut run = |mistake, place| {
            let args = warps_part::Args { y: write(&mut y), mistake };
            caught(warps_part::kernel(), shape(), args, &options, place)
        };
        let kind = run(2, at!("a product of its own", block 0, thread 32));
        let FaultKind::Products(ProductFault::Parted { other: Some(other) }) = kind else {
            panic!("{kind:?}")
        };
        assert_eq!(other.line, line!("the others' product").line);
        let kind = run(3, at!("the others' product", block 0, thread 0));
        assert!(matches!(kind, FaultKind::LaneMissing { lane: 5, .. }), "{kind:?}");
        let kind = run(4, at!("never committed", block 0, thread 0));
        assert_eq!(kind, FaultKind::Products(ProductFault::UnderWay));
        // Whether the warp that left comes first or last.
        for mistake in [1, 5] {
            let args = warps_part::Args { y: write(&mut y), mistake };
            let fault = launch(warps_part::kernel(), shape(), args, &options).unwrap_err();
            assert!(matches!(fault.kind, FaultKind::Products(ProductFault::Parted { .. })), "{fault}");
        }
        let args = warps_part::Args { y: write(&mut y), mistake: 0 };
        pass(warps_part::kernel(), shape(), args, &options);
    }
}

#[kernel(only_sm = 90)]
fn left_behind(mistake: u32) {
    let (array, _) = layout();
    fill(array, true);
    let group = wgmma::begin();
    let sums = group.multiply::<I8, 4>(ONES, Tile::new(array, 0, 256, 128));
    group.commit();
    if mistake == 0 {
        let _ = wgmma::wait::<0, _, 4, 1>([sums]);
    }
}

#[test]
fn products_that_nobody_waits_for() {
    for options in modes() {
        let fault =
            launch(left_behind::kernel(), shape(), left_behind::Args { mistake: 1 }, &options).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Products(ProductFault::Left), "{fault}");
        pass(left_behind::kernel(), shape(), left_behind::Args { mistake: 0 }, &options);
    }
}

#[kernel(only_sm = 90)]
fn misplaced(mistake: u32) {
    let (array, _) = layout();
    fill(array, true);
    let tile = match mistake {
        1 => Tile::new(array, 2, 256, 128),
        2 => Tile::new(array, 0, 256, 120),
        3 => Tile::new(array, 32, 256, 512),
        4 => Tile::swizzled(array, 4, Swizzle::B32, 256),
        5 => Tile::swizzled(array, 0, Swizzle::B32, 128),
        6 => Tile::new(array, 0, 256, 256),
        7 => Tile::new(array, 0, 1 << 18, 128),
        8 => Tile::swizzled(array, 1 << 30, Swizzle::B32, 256),
        _ => Tile::new(array, 0, 256, 128),
    };
    let group = wgmma::begin();
    let sums = group.multiply::<I8, 4>(ONES, tile); // BUG: not where it is
    group.commit();
    let _ = wgmma::wait::<0, _, 4, 1>([sums]);
}

#[test]
fn operands_that_are_not_where_they_may_be() {
    for options in modes() {
        let run = |mistake| {
            let place = at!("not where it is", block 0, thread 0);
            caught(misplaced::kernel(), shape(), misplaced::Args { mistake }, &options, place)
        };
        let space = Space::Shared;
        assert_eq!(run(1), FaultKind::Misaligned { space, index: 2, bytes: 16, off_by: 8 });
        assert_eq!(run(2), FaultKind::Products(ProductFault::Distance { distance: 120, step: 16 }));
        assert!(matches!(run(3), FaultKind::OutOfBounds { write: false, .. }));
        assert_eq!(run(4), FaultKind::Misaligned { space, index: 4, bytes: 32, off_by: 16 });
        assert_eq!(run(5), FaultKind::Products(ProductFault::Distance { distance: 128, step: 256 }));
        assert_eq!(run(7), FaultKind::Products(ProductFault::Distance { distance: 1 << 18, step: 16 }));
        assert!(matches!(run(8), FaultKind::OutOfBounds { index: 0x4000_0000, .. }));
        assert_eq!(run(6), FaultKind::Uninitialized { offset: 256, bytes: 16 });
        pass(misplaced::kernel(), shape(), misplaced::Args { mistake: 0 }, &options);
    }
}

#[kernel(min_sm = 90)]
fn unmarked() {
    let (array, _) = layout();
    fill(array, true);
    let group = wgmma::begin();
    let sums = group.multiply::<I8, 4>(ONES, Tile::new(array, 0, 256, 128));
    group.commit();
    let _ = wgmma::wait::<0, _, 4, 1>([sums]);
}

#[test]
fn a_kernel_that_is_not_marked_for_one_generation() {
    let fault = launch(unmarked::kernel(), shape(), unmarked::Args {}, &EmuOptions::default()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Products(ProductFault::Unmarked), "{fault}");
}

#[test]
fn other_gpus_and_fewer_warps() {
    let run = |shape, options: &EmuOptions| {
        launch(left_behind::kernel(), shape, left_behind::Args { mistake: 0 }, options).unwrap_err().kind
    };
    for sm in [80, 100] {
        let options = EmuOptions { target: Target::new(sm), ..EmuOptions::default() };
        assert_eq!(run(shape(), &options), FaultKind::Products(ProductFault::Target { sm }));
    }
    let three = LaunchShape::new(1, 96).shared(layout().1);
    let kind = run(three, &EmuOptions::default());
    assert_eq!(kind, FaultKind::Products(ProductFault::Warps { threads: 96 }));
}

/// Of 168 registers a thread the last group gives up 16, and the others take eight each.
#[kernel(only_sm = 90, max_threads = 384)]
fn registers(y: GlobalMut<u32>, mistake: u32) {
    let t = thread::thread_idx_x();
    if t >= 256 {
        if mistake == 1 {
            wgmma::release_registers::<160>();
        } else {
            wgmma::release_registers::<152>();
        }
    } else if mistake == 2 && t / 32 == 5 {
        wgmma::claim_registers::<168>(); // BUG: not what the rest of its group claims
    } else {
        wgmma::claim_registers::<176>(); // BUG: more than there are
    }
    y.store(t as usize, t);
}

#[test]
fn registers_that_nobody_has_given_up() {
    let mut y = vec![0; 384];
    let mut run = |mistake| {
        let args = registers::Args { y: write(&mut y), mistake };
        launch(registers::kernel(), LaunchShape::new(1, 384), args, &EmuOptions::race_checked())
    };
    let fault = run(1).unwrap_err();
    assert_eq!(
        fault.kind,
        FaultKind::Products(ProductFault::Registers { total: 512, limit: 504 }),
        "{fault}"
    );
    let fault = run(2).unwrap_err();
    assert!(matches!(fault.kind, FaultKind::Products(ProductFault::Parted { .. })), "{fault}");
    assert_eq!(run(0), Ok(()));
}
