//! Products of groups of four warps: what they read, when their sums are there, who makes the call.

#[cfg(not(target_arch = "nvptx64"))]
use crate::case::{Found, Mode};
#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
use simt::wgmma::{self, I8, Tile};
use simt::{GlobalMut, Shared, SharedPlan, bulk, kernel, thread};

/// Eight rows of 32 bytes, in halves.
const fn layout() -> (Shared<u32>, u32) {
    let mut plan = SharedPlan::new();
    let rows = plan.array(64);
    (rows, plan.bytes())
}

/// Row i is all i + 1; its halves lie 128 bytes apart.
#[simt::device]
fn fill(rows: Shared<u32>) {
    let t = thread::thread_idx_x();
    if t < 64 {
        rows.store(t, (t % 32 / 4 + 1) * 0x0101_0101);
    }
}

/// What all threads have of A.
const ONES: [u32; 4] = [0x0101_0101; 4];

#[kernel(only_sm = 90)]
fn sums_used_early(y: GlobalMut<u32>, bug: u32) {
    let (rows, _) = layout();
    let t = thread::thread_idx_x();
    fill(rows);
    bulk::fence_shared();
    thread::sync_threads();
    let group = wgmma::begin();
    let sums = group.multiply::<I8, 4>(ONES, Tile::new(rows, 0, 256, 128));
    group.commit();
    let [sums] = if bug == 1 {
        wgmma::wait::<1, _, 4, 1>([sums]) // BUG: the last group may be under way
    } else {
        wgmma::wait::<0, _, 4, 1>([sums])
    };
    y.store(t as usize, sums[0] as u32);
    // A wait alone.
    wgmma::wait::<0, u32, 4, 0>([]);
}

#[kernel(only_sm = 90)]
fn operand_not_shown(y: GlobalMut<u32>, bug: u32) {
    let (rows, _) = layout();
    let t = thread::thread_idx_x();
    fill(rows);
    if bug == 0 {
        bulk::fence_shared();
    }
    thread::sync_threads();
    let group = wgmma::begin();
    let sums = group.multiply::<I8, 4>(ONES, Tile::new(rows, 0, 256, 128)); // BUG: no fence behind the stores
    group.commit();
    let [sums] = wgmma::wait::<0, _, 4, 1>([sums]);
    y.store(t as usize, sums[0] as u32);
}

#[kernel(only_sm = 90)]
fn operand_written_early(y: GlobalMut<u32>, bug: u32) {
    let (rows, _) = layout();
    let t = thread::thread_idx_x();
    fill(rows);
    bulk::fence_shared();
    thread::sync_threads();
    let group = wgmma::begin();
    let sums = group.multiply::<I8, 4>(ONES, Tile::new(rows, 0, 256, 128));
    group.commit();
    if bug == 1 && t == 64 {
        rows.store(0, 0); // BUG: products may not have read it
    }
    let [sums] = wgmma::wait::<0, _, 4, 1>([sums]);
    y.store(t as usize, sums[0] as u32);
}

#[kernel(only_sm = 90)]
fn left_under_way(y: GlobalMut<u32>, bug: u32) {
    let (rows, _) = layout();
    let t = thread::thread_idx_x();
    fill(rows);
    bulk::fence_shared();
    thread::sync_threads();
    let group = wgmma::begin();
    let sums = group.multiply::<I8, 4>(ONES, Tile::new(rows, 0, 256, 128));
    group.commit();
    // BUG: nobody waits
    if bug == 0 {
        let [sums] = wgmma::wait::<0, _, 4, 1>([sums]);
        y.store(t as usize, sums[0] as u32);
    }
}

#[kernel(only_sm = 90)]
fn three_of_four_warps(y: GlobalMut<u32>, bug: u32) {
    let (rows, _) = layout();
    let t = thread::thread_idx_x();
    fill(rows);
    bulk::fence_shared();
    thread::sync_threads();
    // BUG: the fourth warp's part of the product is missing
    if bug == 1 && t >= 96 {
        return;
    }
    let group = wgmma::begin();
    let sums = group.multiply::<I8, 4>(ONES, Tile::new(rows, 0, 256, 128));
    group.commit();
    let [sums] = wgmma::wait::<0, _, 4, 1>([sums]);
    y.store(t as usize, sums[0] as u32);
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! go {
    ($kernel:ident, $bug:ident, $on:ident) => {{
        let mut y = [0u32; 128];
        let args = $kernel::Args { y: $on.write(&mut y)?, bug: $bug };
        $on.go($kernel::kernel(), LaunchShape::new(1, 128).shared(layout().1), args)?;
        // Register 0 of lane 4·g + q is row g, column 2·q.
        assert!($bug == 1 || (0..).zip(&y).all(|(t, y)| *y == 32 * (2 * (t % 4) + 1)), "{y:?}");
        Ok(())
    }};
}

cases! { "products";
    sums_used_early: "sums taken when one group may be under way",
        Found::In(Mode::Default, "Products", "the last group may be under way", (0, 0)),
        |bug, on| go!(sums_used_early, bug, on);
    operand_not_shown: "no fence between stores and a product of them",
        Found::In(Mode::Races, "NoProxyFence", "no fence behind the stores", (0, 0)),
        |bug, on| go!(operand_not_shown, bug, on);
    operand_written_early: "an operand that is written before the wait",
        Found::In(Mode::Races, "CopySource", "products may not have read it", (0, 64)),
        |bug, on| go!(operand_written_early, bug, on);
    left_under_way: "a thread that ends before its products", Found::OfThread(Mode::Default, "Products", (0, 0)),
        |bug, on| go!(left_under_way, bug, on);
    three_of_four_warps: "a product that one of the four warps leaves out",
        Found::OfThread(Mode::Default, "Products", (0, 96)),
        |bug, on| go!(three_of_four_warps, bug, on);
}
