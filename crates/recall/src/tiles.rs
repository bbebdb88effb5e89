//! Boxes of a tensor: what a map and its copies ask of a kernel.

#[cfg(not(target_arch = "nvptx64"))]
use crate::case::{Found, Mode};
use simt::{Global, GlobalMut, Mbarrier, Shared, SharedPlan, Swizzle, TensorMap, bulk, kernel, thread};
#[cfg(not(target_arch = "nvptx64"))]
use simt::{LaunchShape, TensorMapShape};

struct Layout {
    tile: Shared<u32>,
    full: Shared<Mbarrier>,
}

/// Where things lie, and how many bytes they take: a box has 4 rows of 32 words.
const fn layout() -> (Layout, u32) {
    let mut plan = SharedPlan::new();
    let (tile, full) = (plan.tile(128, Swizzle::B128), plan.array(1));
    (Layout { tile, full }, plan.bytes())
}

/// The element of a box's word.
#[simt::device]
fn word(at: u32) -> u32 {
    Swizzle::B128.place(4 * at) / 4
}

/// Thread 0 makes the barrier, and acquires the map.
#[simt::device]
fn make(maps: Global<TensorMap>) {
    if thread::thread_idx_x() == 0 {
        layout().0.full.init(0, 1);
        maps.acquire(0);
        bulk::fence_shared();
    }
    thread::sync_threads();
}

#[kernel(min_sm = 90)]
fn box_read_before_the_wait(maps: Global<TensorMap>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { tile, full }, _) = layout();
    let t = thread::thread_idx_x();
    make(maps);
    if t == 0 {
        full.arrive_and_expect(0, 512);
        tile.copy_tile(0, maps, 0, [0, 0], full, 0);
    }
    if bug == 0 {
        full.wait(0, 0);
    }
    y.store(t as usize, tile.load(word(t))); // BUG: the box may not have come
    full.wait(0, 0);
}

#[kernel(min_sm = 90)]
fn box_expected_inside(maps: Global<TensorMap>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { tile, full }, _) = layout();
    let t = thread::thread_idx_x();
    make(maps);
    if t == 0 {
        full.arrive_and_expect(0, 512 - 256 * bug);
        tile.copy_tile(0, maps, 0, [0, -2], full, 0); // BUG: the zeros of two rows count, too
    }
    full.wait(0, 0);
    // Rows 2 and 3 of the box, which are the tensor's first.
    y.store(t as usize, tile.load(word(64 + t)));
}

#[kernel(min_sm = 90)]
fn map_not_acquired(maps: Global<TensorMap>, y: GlobalMut<u32>, bug: u32) {
    let (Layout { tile, full }, _) = layout();
    let t = thread::thread_idx_x();
    make(maps);
    if t == 32 {
        if bug == 0 {
            maps.acquire(0);
        }
        full.arrive_and_expect(0, 512);
        tile.copy_tile(0, maps, 0, [0, 0], full, 0); // BUG: thread 0 alone sees the map that the host wrote
    }
    full.wait(0, 0);
    y.store(t as usize, tile.load(word(t)));
}

#[kernel(min_sm = 90)]
fn box_not_shown(maps: Global<TensorMap>, bug: u32) {
    let tile = layout().0.tile;
    let t = thread::thread_idx_x();
    make(maps);
    tile.store(word(t), t * t);
    tile.store(word(64 + t), 0);
    if bug == 0 {
        bulk::fence_shared();
    }
    thread::sync_threads();
    if t == 0 {
        maps.copy_tile(0, [0, 0], tile, 0); // BUG: no fence behind the stores of the box
        bulk::commit();
        bulk::wait::<0>();
    }
}

#[kernel(min_sm = 90)]
fn boxes_of_two_blocks(maps: Global<TensorMap>, bug: u32) {
    let tile = layout().0.tile;
    let (t, block) = (thread::thread_idx_x(), thread::block_idx_x());
    make(maps);
    // Rows 0 and 1 of block 0, 2 and 3 of block 1.
    tile.store(word(t), t * t * (1 - block));
    bulk::fence_shared();
    thread::sync_threads();
    if t == 0 {
        let row = block * (2 - bug);
        maps.copy_tile(0, [0, row as i32], tile, 0); // BUG: row 1 is in both boxes
        bulk::commit();
        bulk::wait::<0>();
    }
}

/// Memory that is aligned as device memory is.
#[cfg(not(target_arch = "nvptx64"))]
#[repr(align(16))]
struct Aligned([u32; 128]);

#[cfg(not(target_arch = "nvptx64"))]
fn squares() -> Aligned {
    Aligned(std::array::from_fn(|i| if i < 64 { (i * i) as u32 } else { 0 }))
}

/// Four rows, of which the last two are zeros, in boxes of so many.
#[cfg(not(target_arch = "nvptx64"))]
fn tensor(rows: u32) -> TensorMapShape {
    TensorMapShape::new::<u32, _>([32, 4], [32, rows]).with_swizzle(Swizzle::B128)
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! go {
    // From a tensor to `y`, which must then hold its first 64 words.
    ($kernel:ident, from, $bug:ident, $on:ident) => {{
        let (x, mut y) = (squares(), Aligned([0; 128]));
        let maps = [$on.tensor_map($on.read(&x.0)?, &tensor(4))?];
        let args = $kernel::Args { maps: $on.read(&maps)?, y: $on.write(&mut y.0)?, bug: $bug };
        $on.go($kernel::kernel(), LaunchShape::new(1, 64).shared(layout().1), args)?;
        assert!($bug == 1 || x.0[..64] == y.0[..64], "{:?}", y.0);
        Ok(())
    }};
    // To a tensor, which must then hold the squares, by so many blocks.
    ($kernel:ident, to, $blocks:literal, $bug:ident, $on:ident) => {{
        let mut y = Aligned([7; 128]);
        let maps = [$on.tensor_map_mut($on.write(&mut y.0)?, &tensor(4 / $blocks))?];
        let args = $kernel::Args { maps: $on.read(&maps)?, bug: $bug };
        $on.go($kernel::kernel(), LaunchShape::new($blocks, 64).shared(layout().1), args)?;
        assert!($bug == 1 || y.0 == squares().0, "{:?}", y.0);
        Ok(())
    }};
}

cases! { "tiles";
    box_read_before_the_wait: "a box that is read before the wait for it",
        Found::In(Mode::Default, "CopyUnderWay", "the box may not have come", (0, 0)),
        |bug, on| go!(box_read_before_the_wait, from, bug, on);
    box_expected_inside: "a barrier that expects what is inside of the tensor alone",
        Found::In(Mode::Default, "MbarrierExcess", "the zeros of two rows count, too", (0, 0)),
        |bug, on| go!(box_expected_inside, from, bug, on);
    map_not_acquired: "a copy by a map that another thread has acquired",
        Found::In(Mode::Default, "Tile", "thread 0 alone sees the map that the host wrote", (0, 32)),
        |bug, on| go!(map_not_acquired, from, bug, on);
    box_not_shown: "no fence between stores and a copy of the box",
        Found::In(Mode::Races, "NoProxyFence", "no fence behind the stores of the box", (0, 0)),
        |bug, on| go!(box_not_shown, to, 1, bug, on);
    boxes_of_two_blocks: "boxes of two blocks that share a row", Found::In(Mode::Races, "Race", "row 1 is in both boxes", (1, 0)),
        |bug, on| go!(boxes_of_two_blocks, to, 2, bug, on);
}
