//! Tensor copies by maps that are none or not acquired, with wrong coordinates or to wrong places, that are
//! used too early, or that do not see what they copy.

use crate::support::{aligned, at, caught, modes, pass, read, write};
use simt::emu::{self, EmuOptions, FaultKind, Space, TileMistake};
use simt::{
    Global, GlobalMut, LaunchShape, Mbarrier, Shared, SharedPlan, Swizzle, TensorMap, TensorMapShape, bulk,
    kernel, thread,
};

const SOURCE: &str = include_str!("tiles.rs");

struct Layout {
    tile: Shared<u32>,
    full: Shared<Mbarrier>,
    bytes: u32,
}

/// Room for two boxes of 8 rows of 32 words.
const fn layout() -> Layout {
    let mut plan = SharedPlan::new();
    let tile = plan.tile(512, Swizzle::B128);
    let full = plan.array(1);
    Layout { tile, full, bytes: plan.bytes() }
}

fn shape() -> LaunchShape {
    LaunchShape::new(1, 64).shared(layout().bytes)
}

/// 40 rows of 64 words, in boxes of 8 rows of 32.
fn tensor() -> TensorMapShape {
    TensorMapShape::new::<u32, _>([64, 40], [32, 8]).with_swizzle(Swizzle::B128)
}

fn words() -> &'static mut [u32] {
    aligned(|i| 3 * i, 64 * 40)
}

/// Maps of `x`: to read by, to write by, of rank 1, and one of the GPU's.
fn maps(x: &mut [u32]) -> Global<TensorMap> {
    let lines = TensorMapShape::new::<u32, _>([64 * 40], [32]);
    let maps = vec![
        emu::tensor_map(read(x), &tensor()).unwrap(),
        emu::tensor_map_mut(write(x), &tensor()).unwrap(),
        emu::tensor_map(read(x), &lines).unwrap(),
        TensorMap::from_words([0x1234; 16]),
    ];
    read(maps.leak())
}

/// Thread 0 makes the barrier.
#[simt::device]
fn make() {
    if thread::thread_idx_x() == 0 {
        layout().full.init(0, 1);
        bulk::fence_shared();
    }
    thread::sync_threads();
}

#[kernel(min_sm = 90)]
fn placed(maps: Global<TensorMap>, map: u32, acquired: u32, to: u32, expected: u32) {
    let Layout { tile, full, .. } = layout();
    make();
    if thread::thread_idx_x() == 0 {
        maps.acquire(acquired as usize);
        full.arrive_and_expect(0, expected);
        tile.copy_tile(to, maps, map as usize, [-8, 38], full, 0); // BUG: a wrong map or place
    }
    full.wait(0, 0);
}

#[test]
fn maps_places_and_sizes() {
    let x = words();
    let maps = maps(x);
    for options in modes() {
        let run = |map, acquired, to, expected| {
            let args = placed::Args { maps, map, acquired, to, expected };
            caught(placed::kernel(), shape(), args, &options, at!("a wrong map or place", block 0, thread 0))
        };
        let tile = FaultKind::Tile;
        assert_eq!(run(0, 1, 0, 1024), tile(TileMistake::NotAcquired { index: 0 }));
        assert_eq!(run(3, 3, 0, 1024), tile(TileMistake::NoMap { index: 3 }));
        assert_eq!(run(2, 2, 0, 1024), tile(TileMistake::Rank { index: 2, rank: 1, coordinates: 2 }));
        assert_eq!(run(0, 0, 32, 1024), tile(TileMistake::Place { index: 32, align: 1024, off_by: 128 }));
        assert_eq!(run(0, 0, 2, 1024), tile(TileMistake::Place { index: 2, align: 1024, off_by: 8 }));
        let (space, write, element_bytes) = (Space::Shared, true, 4);
        assert_eq!(
            run(0, 0, 512, 1024),
            FaultKind::OutOfBounds { space, index: 512, bytes: 1024, len: 512, element_bytes, write }
        );
        let (space, write, element_bytes) = (Space::Global, false, 128);
        assert_eq!(
            run(4, 0, 0, 1024),
            FaultKind::OutOfBounds { space, index: 4, bytes: 128, len: 4, element_bytes, write }
        );
        // The bytes inside of the tensor alone: 24 words of two rows.
        let FaultKind::MbarrierExcess(excess) = run(0, 0, 0, 192) else { panic!("of another kind") };
        assert_eq!((excess.expected, excess.copied), (192, 1024));
        let args = placed::Args { maps, map: 0, acquired: 0, to: 256, expected: 1024 };
        pass(placed::kernel(), shape(), args, &options);
    }
}

#[kernel(min_sm = 90)]
fn cornered(maps: Global<TensorMap>, column: i32, row: i32, back: u32) {
    let Layout { tile, full, .. } = layout();
    make();
    let t = thread::thread_idx_x();
    for i in 0..4 {
        tile.store(64 * i + t, i);
    }
    bulk::fence_shared();
    thread::sync_threads();
    if t == 0 {
        maps.acquire(0);
        maps.acquire(1);
        if back == 0 {
            full.arrive_and_expect(0, 1024);
            tile.copy_tile(0, maps, 0, [column, row], full, 0); // BUG: a corner to read from
        } else {
            maps.copy_tile(1, [column, row], tile, 0); // BUG: a corner to write to
            bulk::commit();
            bulk::wait::<0>();
        }
    }
    if back == 0 {
        full.wait(0, 0);
    }
}

#[test]
fn corners_that_no_copy_engine_takes() {
    let x = words();
    let maps = maps(x);
    for options in modes() {
        let run = |column, row, back| {
            let args = cornered::Args { maps, column, row, back };
            let place = if back == 0 {
                at!("a corner to read from", block 0, thread 0)
            } else {
                at!("a corner to write to", block 0, thread 0)
            };
            caught(cornered::kernel(), shape(), args, &options, place)
        };
        let corner = |coordinate, bytes| FaultKind::Tile(TileMistake::Corner { coordinate, bytes });
        assert_eq!(run(5, 0, 0), corner(5, 20));
        assert_eq!(run(-6, 0, 0), corner(-6, -24));
        assert_eq!(run(2, 0, 1), corner(2, 8));
        let negative =
            |dimension, coordinate| FaultKind::Tile(TileMistake::Negative { dimension, coordinate });
        assert_eq!(run(-4, 0, 1), negative(0, -4));
        assert_eq!(run(0, -1, 1), negative(1, -1));
        pass(cornered::kernel(), shape(), cornered::Args { maps, column: -4, row: -1, back: 0 }, &options);
        pass(cornered::kernel(), shape(), cornered::Args { maps, column: 4, row: 43, back: 1 }, &options);
    }
}

#[test]
fn a_map_that_is_not_aligned() {
    #[repr(C, align(64))]
    struct Odd([u64; 20]);
    let odd = Odd([0; 20]);
    // SAFETY: inside, and nothing is read.
    let maps = unsafe { Global::from_raw(&raw const odd.0[2] as u64, 1) };
    let args = placed::Args { maps, map: 0, acquired: 0, to: 0, expected: 0 };
    // SAFETY: as above.
    let fault = unsafe { emu::launch(&placed::kernel(), shape(), args, &EmuOptions::default()) }.unwrap_err();
    let (space, index) = (Space::Global, 0);
    assert_eq!(fault.kind, FaultKind::Misaligned { space, index, bytes: 64, off_by: 16 });
}

#[kernel(min_sm = 90)]
fn used(maps: Global<TensorMap>, x: GlobalMut<u32>, y: GlobalMut<u32>, mistake: u32) {
    let Layout { tile, full, .. } = layout();
    let t = thread::thread_idx_x();
    if mistake != 4 {
        tile.store(t, 1);
    }
    x.store(64 * 9 + t as usize, t);
    if mistake != 1 && (mistake != 2 || t == 0) {
        bulk::fence();
    }
    make();
    if t == 0 {
        maps.acquire(0);
        full.arrive_and_expect(0, 1024);
        tile.copy_tile(0, maps, 0, [16, 5], full, 0); // BUG: plain writes are not shown to it
    }
    if mistake == 3 {
        y.store(t as usize, tile.load(t)); // BUG: nobody has waited
    }
    if mistake == 5 && t == 0 {
        x.store(64 * 12 + 47, 9); // BUG: the last word of the box
    }
    if mistake == 0 {
        // Beside the box on all sides.
        for at in [64 * 4 + 47, 64 * 13 + 16, 64 * 7 + 15, 64 * 7 + 48] {
            if t == 0 {
                x.store(at, 9);
            }
        }
    }
    full.wait(0, 0);
    // Row 1 of the box, in which vector 0 has changed places with vector 1.
    y.store(t as usize, tile.load(32 + (t ^ 4) % 32));
}

#[test]
fn a_box_that_is_used_or_changed_too_early() {
    let x = words();
    let (maps, y) = (maps(x), aligned(|_| 0, 64));
    let (x, y) = (write(x), write(y));
    let run = |mistake, place| {
        let args = used::Args { maps, x, y, mistake };
        caught(used::kernel(), shape(), args, &EmuOptions::race_checked(), place)
    };
    for mistake in [1, 2] {
        let kind = run(mistake, at!("plain writes are not shown to it", block 0, thread 0));
        let FaultKind::NoProxyFence(pair) = kind else { panic!("{kind:?}") };
        // Of the row that was written, the first word in the box that this fence has not shown.
        assert_eq!((pair.space, pair.index), (Space::Global, 64 * 9 + 16));
    }
    let kind = run(3, at!("nobody has waited", block 0, thread 0));
    assert_eq!(kind, FaultKind::CopyUnderWay { offset: 0, bytes: 4 });
    let kind = run(5, at!("the last word of the box", block 0, thread 0));
    assert!(matches!(kind, FaultKind::CopySource(_)), "{kind:?}");
    for options in [EmuOptions::race_checked(), EmuOptions::thorough()] {
        pass(used::kernel(), shape(), used::Args { maps, x, y, mistake: 0 }, &options);
        assert_eq!(y_words(y), (0..64).map(|t| 3 * (64 * 6 + 16 + t % 32)).collect::<Vec<u32>>());
    }
}

fn y_words(y: GlobalMut<u32>) -> Vec<u32> {
    // SAFETY: memory of the test, which no launch uses now.
    unsafe { std::slice::from_raw_parts(y.address() as *const u32, y.len()) }.to_vec()
}

#[kernel(min_sm = 90)]
fn stored(maps: Global<TensorMap>, y: GlobalMut<u32>, mistake: u32) {
    let Layout { tile, .. } = layout();
    let (t, block) = (thread::thread_idx_x(), thread::block_idx_x());
    for row in 0..4 {
        if mistake != 1 || row < 3 {
            tile.store(64 * row + t, 64 * row + t);
        }
    }
    if mistake != 2 {
        bulk::fence_shared();
    }
    thread::sync_threads();
    if t == 0 {
        let map = usize::from(mistake != 3);
        maps.acquire(map);
        let row = if mistake == 4 { 35 } else { 36 - 8 * block as i32 };
        maps.copy_tile(map, [40, row], tile, 0); // BUG: a tile or a map that is not ready, or twice the place
        bulk::commit();
        if mistake == 5 {
            tile.store(0, 1); // BUG: the copy may not have read it
        }
        bulk::wait_read::<0>();
        if mistake == 6 {
            y.store(0, y.load(64 * row as usize + 40)); // BUG: read, but not written
        }
        bulk::wait::<0>();
        tile.store(0, y.load(64 * row as usize + 40));
    }
}

#[test]
fn boxes_that_go_to_global_memory() {
    let x = words();
    let maps = maps(x);
    let y = write(x);
    let grid = LaunchShape::new(2, 64).shared(layout().bytes);
    let options = EmuOptions::race_checked();
    let run = |mistake, place| {
        let args = stored::Args { maps, y, mistake };
        caught(stored::kernel(), grid, args, &options, place)
    };
    let not_ready =
        |block| at!("a tile or a map that is not ready, or twice the place", block block, thread 0);
    assert_eq!(run(1, not_ready(0)), FaultKind::Uninitialized { offset: 768, bytes: 16 });
    let kind = run(2, not_ready(0));
    assert!(matches!(kind, FaultKind::NoProxyFence(_)), "{kind:?}");
    assert_eq!(run(3, not_ready(0)), FaultKind::Tile(TileMistake::ReadOnly { index: 0 }));
    let kind = run(4, not_ready(1));
    let FaultKind::Race(race) = kind else { panic!("{kind:?}") };
    assert_eq!((race.space, race.index), (Space::Global, 64 * 35 + 40));
    let kind = run(5, at!("the copy may not have read it", block 0, thread 0));
    assert!(matches!(kind, FaultKind::CopySource(_)), "{kind:?}");
    let kind = run(6, at!("read, but not written", block 0, thread 0));
    assert!(matches!(kind, FaultKind::Race(_)), "{kind:?}");
    for options in [EmuOptions::default(), EmuOptions::race_checked(), EmuOptions::thorough()] {
        pass(stored::kernel(), grid, stored::Args { maps, y, mistake: 0 }, &options);
        for (at, word) in y_words(y).into_iter().enumerate() {
            let (row, column) = (at as u32 / 64, at as u32 % 64);
            // Rows 28 to 35 of block 1, and what there is of 36 to 43 of block 0; the last eight columns of
            // boxes are outside.
            let first = if row >= 36 { 36 } else { 28 };
            let (i, j) = (row.wrapping_sub(first), column.wrapping_sub(40));
            let expected =
                if row >= 28 && column >= 40 { 32 * i + (j ^ (4 * (i % 8))) } else { 3 * at as u32 };
            assert_eq!(word, expected, "row {row}, column {column}");
        }
    }
}

#[kernel(min_sm = 90)]
fn crossing(maps: Global<TensorMap>) {
    let Layout { tile, .. } = layout();
    let (t, block) = (thread::thread_idx_x(), thread::block_idx_x());
    for row in 0..4 {
        tile.store(64 * row + t, block);
    }
    bulk::fence_shared();
    thread::sync_threads();
    if t == 0 {
        maps.acquire(1);
        maps.copy_tile(1, [0, 0], tile, 0);
        bulk::commit();
        bulk::wait::<0>();
    }
}

/// What a map leads to is put back and compared, as what a handle leads to.
#[test]
fn boxes_whose_order_decides() {
    let x = words();
    let maps = maps(x);
    let options = EmuOptions { orders: 3, ..EmuOptions::default() };
    let grid = LaunchShape::new(2, 64).shared(layout().bytes);
    // SAFETY: the tensor lives.
    let fault = unsafe { emu::launch(&crossing::kernel(), grid, crossing::Args { maps }, &options) };
    let fault = fault.expect_err("block 1 or block 0 comes last");
    let FaultKind::OrderDependence(found) = &fault.kind else { panic!("{fault}") };
    assert_eq!((found.parameter, found.index, found.values), ("maps", 0, [1, 0]));
    assert_eq!(fault.thread, Some(crate::support::thread(0, 0)));
}
