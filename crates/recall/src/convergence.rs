//! Who has to meet where: helpers that hide which barrier they are, barriers of a part of the warps, warps
//! with work of their own, and what the PTX ISA lets lanes do apart from each other.

#[cfg(not(target_arch = "nvptx64"))]
use crate::case::{Found, Mode};
#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
use simt::{GlobalMut, Shared, SharedPlan, kernel, tensor, thread, warp};

/// Without `#[simt::device]` its caller's line is not known.
#[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn meet() {
    thread::sync_threads();
}

#[kernel]
fn helper_in_both_arms(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if bug == 0 || t.is_multiple_of(2) {
        y.store(t as usize, 1);
        meet(); // BUG: even lanes are at this one, odd ones at the other
        y.store(t as usize, t);
    } else {
        y.store(t as usize, 2);
        meet();
        y.store(t as usize, t + 1);
    }
}

/// The same, where the compiler may make two copies of it.
#[inline]
fn meet_inlined() {
    thread::sync_threads();
}

#[kernel]
fn inlined_in_both_arms(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if bug == 0 || t.is_multiple_of(2) {
        y.store(t as usize, 1);
        meet_inlined(); // BUG: even lanes are at this one
        y.store(t as usize, t);
    } else {
        y.store(t as usize, 2);
        meet_inlined();
        y.store(t as usize, t + 1);
    }
}

#[kernel]
fn helper_last_in_both_arms(y: GlobalMut<u32>, bug: u32) {
    // Nothing that differs follows the two calls: a compiler might make one of them.
    let t = thread::thread_idx_x();
    if bug == 0 || t.is_multiple_of(2) {
        y.store(t as usize, 1);
        meet(); // BUG: odd lanes are at the other one, which is last, too
    } else {
        y.store(t as usize, 2);
        meet();
    }
}

#[kernel]
fn helper_first_in_both_arms(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if bug == 0 || t.is_multiple_of(2) {
        meet(); // BUG: odd lanes are at the other one, which is first, too
        y.store(t as usize, 1);
    } else {
        meet();
        y.store(t as usize, 2);
    }
}

#[kernel]
fn helper_ahead_of_a_return(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if bug == 1 && t.is_multiple_of(2) {
        y.store(t as usize, 1);
        meet(); // BUG: odd lanes are at the one at the end
        return;
    }
    y.store(t as usize, 1);
    meet();
}

#[simt::device]
fn write_and_meet(y: GlobalMut<u32>, t: u32, even: bool) {
    if even {
        y.store(t as usize, 1);
        meet(); // BUG: odd lanes are at the other one of this function
    } else {
        y.store(t as usize, 2);
        meet();
    }
}

#[kernel]
fn arms_of_a_device_function(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    write_and_meet(y, t, bug == 0 || t.is_multiple_of(2));
}

#[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn meet_later() {
    meet();
    core::hint::black_box(());
}

#[kernel]
fn helper_at_two_depths(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if bug == 0 || t.is_multiple_of(2) {
        y.store(t as usize, 1);
        meet(); // BUG: odd lanes are at another one, farther in
        y.store(t as usize, t);
    } else {
        y.store(t as usize, 2);
        meet_later();
        y.store(t as usize, t + 1);
    }
}

#[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn multiply(a: u32) -> f32 {
    tensor::mma_f16([a; 4], [a; 2], [0.0; 4])[0]
}

#[kernel]
fn product_in_both_arms(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if bug == 0 || t.is_multiple_of(2) {
        let sum = multiply(t); // BUG: half of the lanes are at the other product
        y.store(t as usize, sum.to_bits());
    } else {
        let sum = multiply(t + 1);
        y.store(t as usize, sum.to_bits() ^ 1);
    }
}

#[kernel]
fn helper_by_warps(y: GlobalMut<u32>) {
    // Warps may come to a block's barrier by different calls; a loop is one call however often it turns.
    let t = thread::thread_idx_x();
    for round in 0..3 {
        if (t / 32 + round).is_multiple_of(2) {
            meet();
            y.store(t as usize, round);
        } else {
            meet();
            y.store(t as usize, round + 1);
        }
    }
}

#[kernel]
fn shuffles_apart(y: GlobalMut<u32>) {
    // One exchange of one mask at two places: the PTX ISA waits for who makes the same one.
    let t = thread::thread_idx_x();
    let other = if t.is_multiple_of(2) {
        warp::warp_shuffle_xor(warp::FULL_MASK, t, 1, 32)
    } else {
        warp::warp_shuffle_xor(warp::FULL_MASK, 10 * t, 1, 32)
    };
    y.store(t as usize, other);
}

struct Layout {
    tile: Shared<u32>,
}

const fn layout() -> Layout {
    let mut plan = SharedPlan::new();
    Layout { tile: plan.array(2 * 64) }
}

/// Two warps fill tiles of 64 words, two others empty them; of two tiles each in turn.
const FULL: u32 = 1;
const EMPTY: u32 = 3;

#[inline(always)]
fn hand_over(y: GlobalMut<u32>, arrives: impl Fn(u32), waits: impl Fn(u32)) {
    let (t, tile) = (thread::thread_idx_x(), layout().tile);
    for round in 0..6 {
        let half = round % 2;
        let place = 64 * half + t % 64;
        if t < 64 {
            if round >= 2 {
                waits(EMPTY + half);
            }
            tile.store(place, round * 100 + t); // BUG: it may not be empty yet
            thread::named_barrier_arrive(FULL + half, 128);
        } else {
            thread::named_barrier_sync(FULL + half, 128);
            y.store((round * 64 + t % 64) as usize, tile.load(64 * half + (t + 1) % 64));
            if round < 4 {
                arrives(EMPTY + half);
            }
        }
    }
}

#[kernel]
fn producers_that_do_not_wait(y: GlobalMut<u32>, bug: u32) {
    hand_over(
        y,
        |empty| thread::named_barrier_arrive(empty, 128),
        |empty| {
            if bug == 0 {
                thread::named_barrier_sync(empty, 128);
            } else {
                thread::named_barrier_arrive(empty, 128);
            }
        },
    );
}

#[kernel]
fn two_groups(y: GlobalMut<u32>) {
    // Each pair of warps meets alone, as often as it likes.
    let t = thread::thread_idx_x();
    let (pair, tile) = (t / 64, layout().tile);
    for round in 0..=pair {
        tile.store(t, t + round);
        thread::named_barrier_sync(1 + pair, 64);
        y.store(t as usize, tile.load(64 * pair + (t + 32) % 64));
        thread::named_barrier_sync(1 + pair, 64);
    }
    thread::sync_threads();
    y.store(t as usize, y.load(t as usize) + 1);
}

#[kernel]
fn too_few_come(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if t < 96 {
        thread::named_barrier_sync(2, 96 + 32 * bug); // BUG: only three warps ever come here
    }
    y.store(t as usize, t);
}

#[kernel]
fn two_counts(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    thread::named_barrier_sync(2, if t >= 64 { 128 } else { 128 - 32 * bug }); // BUG: of how many?
    y.store(t as usize, t);
}

#[kernel]
fn lanes_apart_at_a_number(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if bug == 0 || t.is_multiple_of(2) {
        thread::named_barrier_sync(1, 128); // BUG: odd lanes are at another one
    } else {
        thread::named_barrier_sync(1, 128);
    }
    y.store(t as usize, t);
}

#[kernel]
fn number_too_large(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    thread::named_barrier_sync(15 + bug, 128); // BUG: there are 16
    y.store(t as usize, t);
}

#[kernel]
fn a_count_of_lanes(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    thread::named_barrier_sync(1, 128 - bug); // BUG: not a number of warps
    y.store(t as usize, t);
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! four_warps {
    ($kernel:ident, $on:ident $(, $bug:ident)?) => {{
        let mut y = [0; 384];
        let args = $kernel::Args { y: $on.write(&mut y)? $(, $bug)? };
        $on.go($kernel::kernel(), LaunchShape::new(1, 128).shared(512), args)
    }};
}

cases! { "convergence";
    helper_in_both_arms: "a helper with a barrier, called in both arms of a branch",
        Found::In(Mode::Races, "DivergentBarrier", "even lanes are at this one, odd ones at the other", (0, 0)),
        |bug, on| four_warps!(helper_in_both_arms, on, bug);
    inlined_in_both_arms: "the same, inlined",
        Found::In(Mode::Races, "DivergentBarrier", "even lanes are at this one", (0, 0)),
        |bug, on| four_warps!(inlined_in_both_arms, on, bug);
    helper_at_two_depths: "a helper with a barrier, in one arm by another helper",
        Found::In(Mode::Races, "DivergentBarrier", "odd lanes are at another one, farther in", (0, 0)),
        |bug, on| four_warps!(helper_at_two_depths, on, bug);
    helper_last_in_both_arms: "a barrier in a helper, last in both arms",
        Found::In(Mode::Races, "DivergentBarrier", "odd lanes are at the other one, which is last, too", (0, 0)),
        |bug, on| four_warps!(helper_last_in_both_arms, on, bug);
    helper_first_in_both_arms: "the same, first in both arms",
        Found::In(Mode::Races, "DivergentBarrier", "odd lanes are at the other one, which is first, too", (0, 0)),
        |bug, on| four_warps!(helper_first_in_both_arms, on, bug);
    helper_ahead_of_a_return: "the same, ahead of an early return and at the end",
        Found::In(Mode::Races, "DivergentBarrier", "odd lanes are at the one at the end", (0, 0)),
        |bug, on| four_warps!(helper_ahead_of_a_return, on, bug);
    arms_of_a_device_function: "the same, last in both arms of a device function",
        Found::In(Mode::Races, "DivergentBarrier", "odd lanes are at the other one of this function", (0, 0)),
        |bug, on| four_warps!(arms_of_a_device_function, on, bug);
    product_in_both_arms: "a helper with a matrix product, in both arms",
        Found::In(Mode::Races, "LaneMissing", "half of the lanes are at the other product", (0, 0)),
        |bug, on| four_warps!(product_in_both_arms, on, bug);
    producers_that_do_not_wait: "a producer that announces where it should wait",
        Found::In(Mode::Races, "Race", "it may not be empty yet", (0, 0)),
        |bug, on| four_warps!(producers_that_do_not_wait, on, bug);
    too_few_come: "a barrier of more warps than come", Found::In(Mode::Default, "NamedBarrierShort", "only three warps ever come here", (0, 0)),
        |bug, on| four_warps!(too_few_come, on, bug);
    two_counts: "warps that differ in how many shall come", Found::In(Mode::Default, "NamedBarrierMismatch", "of how many?", (0, 64)),
        |bug, on| four_warps!(two_counts, on, bug);
    lanes_apart_at_a_number: "lanes of one warp at two barriers of one number", Found::In(Mode::Default, "DivergentBarrier", "odd lanes are at another one", (0, 0)),
        |bug, on| four_warps!(lanes_apart_at_a_number, on, bug);
    number_too_large: "a barrier that no block has", Found::In(Mode::Default, "NamedBarrierId", "there are 16", (0, 0)),
        |bug, on| four_warps!(number_too_large, on, bug);
    a_count_of_lanes: "a barrier of a part of a warp", Found::In(Mode::Default, "NamedBarrierThreads", "not a number of warps", (0, 0)),
        |bug, on| four_warps!(a_count_of_lanes, on, bug);
    helper_by_warps: "warps that come to a barrier by different calls", Found::Legal, |_, on| {
        four_warps!(helper_by_warps, on)
    };
    two_groups: "two groups of warps, each with its barrier", Found::Legal, |_, on| four_warps!(two_groups, on);
    shuffles_apart: "a shuffle of one mask at two places", Found::Legal, |_, on| {
        let mut y = [0; 32];
        let result = on.go(shuffles_apart::kernel(), LaunchShape::new(1, 32), shuffles_apart::Args { y: on.write(&mut y)? });
        let expected = |t: u32| if t.is_multiple_of(2) { 10 * (t + 1) } else { t - 1 };
        assert!((0..32).all(|t| y[t as usize] == expected(t)), "{y:?}");
        result
    };
}
