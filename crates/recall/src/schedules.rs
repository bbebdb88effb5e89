//! What depends on who comes first, and waits that never end.

#[cfg(not(target_arch = "nvptx64"))]
use crate::case::{Found, Mode};
#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
use simt::{GlobalMut, Shared, SharedPlan, kernel, thread, warp};

const NOBODY: u32 = u32::MAX;

const fn words() -> Shared<u32> {
    let mut plan = SharedPlan::new();
    plan.array(4)
}

#[kernel]
fn ticket(next: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    let i = thread::index_1d();
    let place = next.atomic_add(0, 1) as usize;
    if bug != 0 {
        out.store(place, i as u32); // BUG: the place is a ticket
    } else {
        out.store(i, i as u32);
    }
}

#[kernel]
fn first_comer(winner: GlobalMut<u32>, bug: u32) {
    let i = thread::index_1d() as u32;
    if bug != 0 {
        winner.atomic_cas(0, NOBODY, i); // BUG: whoever comes first
    } else {
        winner.atomic_min(0, i);
    }
}

#[kernel]
fn float_sum(sum: GlobalMut<u32>, bug: u32) {
    let i = thread::index_1d() as u32;
    if bug != 0 {
        let mut old = sum.atomic_add(0, 0);
        loop {
            let new = f32::from_bits(old) + 1.0 / (i + 1) as f32;
            let seen = sum.atomic_cas(0, old, new.to_bits()); // BUG: rounded in the order of arrival
            if seen == old {
                return;
            }
            old = seen;
        }
    }
    // Fixed point: the order of additions is none.
    sum.atomic_add(0, (1.0 / (i + 1) as f32 * 65536.0) as u32);
}

#[kernel]
fn look_then_take(left: GlobalMut<u32>, bug: u32) {
    if bug != 0 {
        if left.atomic_add(0, 0) > 0 {
            left.atomic_add(0, u32::MAX); // BUG: what was looked at may be gone
        }
        return;
    }
    let mut seen = left.atomic_add(0, 0);
    while seen > 0 {
        let now = left.atomic_cas(0, seen, seen - 1);
        if now == seen {
            return;
        }
        seen = now;
    }
}

#[kernel]
fn flag_between_warps(out: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if t == 0 {
        words().store(0, 0);
    }
    thread::sync_threads();
    if t == 0 {
        while words().atomic_add(0, 0) == 0 {} // BUG: nobody sets it
        thread::block_fence();
        out.store(0, 1);
    }
    if t == 32 && bug == 0 {
        words().atomic_exchange(0, 1);
    }
}

#[kernel]
fn flag_between_blocks(flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    // Block 0 waits for the last one.
    if thread::block_idx_x() == 0 {
        while flag.atomic_add(0, 0) == 0 {
            thread::pause(100); // BUG: its word is never set
        }
        out.store(0, 1);
    } else if thread::block_idx_x() + 1 == thread::grid_dim_x() {
        flag.atomic_exchange(if bug != 0 { 1 } else { 0 }, 1);
    }
}

#[kernel]
fn lock_kept(lock: GlobalMut<u32>, sum: GlobalMut<u32>, bug: u32) {
    let i = thread::index_1d() as u32;
    while lock.atomic_cas(0, 0, 1) != 0 {} // BUG: the lock is never given back
    thread::device_fence();
    let old = sum.load(0);
    sum.store(0, old + i);
    if bug != 0 && i == 5 {
        return;
    }
    thread::device_fence();
    lock.atomic_exchange(0, 0);
}

#[kernel]
fn two_locks(locks: GlobalMut<u32>, sum: GlobalMut<u32>, bug: u32) {
    let odd = if bug != 0 { thread::block_idx_x() as usize % 2 } else { 0 };
    while locks.atomic_cas(odd, 0, 1) != 0 {}
    while locks.atomic_cas(1 - odd, 0, 1) != 0 {} // BUG: the other holds it and waits for ours
    thread::device_fence();
    sum.store(0, sum.load(0) + 1);
    thread::device_fence();
    locks.atomic_exchange(1 - odd, 0);
    locks.atomic_exchange(odd, 0);
}

#[kernel]
fn waits_on_a_plain_load(flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    if thread::thread_idx_x() == 0 {
        if bug != 0 {
            while flag.load(0) == 0 {}
        } else {
            while flag.atomic_add(0, 0) == 0 {}
        }
        out.store(0, 1);
    } else if thread::thread_idx_x() == 32 {
        flag.atomic_exchange(0, 1); // BUG: the other side looks with a plain load
    }
}

#[kernel]
fn last_by_index(partial: GlobalMut<u32>, done: GlobalMut<u32>, total: GlobalMut<u32>, bug: u32) {
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    partial.store(block as usize, block + 1);
    thread::device_fence();
    let before = done.atomic_add(0, 1);
    thread::device_fence();
    if if bug != 0 { block + 1 == blocks } else { before + 1 == blocks } {
        let mut sum = 0;
        for i in 0..blocks {
            sum += partial.load(i as usize);
        }
        total.store(0, sum); // BUG: of what is there by then
    }
}

#[kernel]
fn unread_flag(data: GlobalMut<u32>, flag: GlobalMut<u32>, out: GlobalMut<u32>, bug: u32) {
    if thread::block_idx_x() == 0 {
        data.store(0, 7);
        thread::device_fence();
        flag.atomic_exchange(0, 1);
    } else {
        while flag.atomic_add(0, 0) == 0 && bug == 0 {}
        thread::device_fence();
        out.store(thread::block_idx_x() as usize, data.load(0)); // BUG: may come before the flag
    }
}

#[kernel]
fn lanes_together(out: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if t.is_multiple_of(2) {
        let mask = if bug != 0 { warp::active_mask() } else { 0x5555_5555 };
        out.store(t as usize, mask.count_ones()); // BUG: which lanes are together is up to the GPU
    }
}

cases! { "schedules";
    ticket: "results stand where a ticket says", Found::In(Mode::Orders, "OrderDependence", "the place is a ticket", (1, 63)), |bug, on| {
        let (mut next, mut out) = ([0], [0; 128]);
        on.go(ticket::kernel(), LaunchShape::new(2, 64),
            ticket::Args { next: on.write(&mut next)?, out: on.write(&mut out)?, bug })
    };
    first_comer: "the first one to come wins", Found::In(Mode::Orders, "OrderDependence", "whoever comes first", (1, 63)), |bug, on| {
        let mut winner = [NOBODY];
        on.go(first_comer::kernel(), LaunchShape::new(2, 64),
            first_comer::Args { winner: on.write(&mut winner)?, bug })
    };
    float_sum: "a float sum by compare-and-swap", Found::In(Mode::Orders, "OrderDependence", "rounded in the order of arrival", (0, 0)), |bug, on| {
        let mut sum = [0];
        on.go(float_sum::kernel(), LaunchShape::new(2, 64),
            float_sum::Args { sum: on.write(&mut sum)?, bug })
    };
    look_then_take: "a look and a take that are two atomics", Found::In(Mode::Orders, "OrderDependence", "what was looked at may be gone", (0, 5)), |bug, on| {
        let mut left = [40];
        on.go(look_then_take::kernel(), LaunchShape::new(2, 64),
            look_then_take::Args { left: on.write(&mut left)?, bug })
    };
    lanes_together: "lanes counted that happen to be together", Found::In(Mode::Orders, "OrderDependence", "which lanes are together is up to the GPU", (0, 0)), |bug, on| {
        let mut out = [0; 64];
        on.go(lanes_together::kernel(), LaunchShape::new(1, 64), lanes_together::Args { out: on.write(&mut out)?, bug })
    };
    flag_between_warps: "a warp waits for a flag that no warp sets", Found::In(Mode::Default, "EndlessWait", "nobody sets it", (0, 0)), |bug, on| {
        let mut out = [0];
        on.go(flag_between_warps::kernel(), LaunchShape::new(1, 64).shared(16),
            flag_between_warps::Args { out: on.write(&mut out)?, bug })
    };
    flag_between_blocks: "a block waits for a flag that no block sets", Found::In(Mode::Default, "EndlessWait", "its word is never set", (0, 0)), |bug, on| {
        let (mut flag, mut out) = ([0; 2], [0]);
        on.go(flag_between_blocks::kernel(), LaunchShape::new(5, 1),
            flag_between_blocks::Args { flag: on.write(&mut flag)?, out: on.write(&mut out)?, bug })
    };
    lock_kept: "a path that leaves with the lock taken", Found::In(Mode::Default, "EndlessWait", "the lock is never given back", (0, 6)), |bug, on| {
        let (mut lock, mut sum) = ([0], [0]);
        on.go(lock_kept::kernel(), LaunchShape::new(2, 32),
            lock_kept::Args { lock: on.write(&mut lock)?, sum: on.write(&mut sum)?, bug })
    };
    two_locks: "two locks taken in two orders", Found::In(Mode::Orders, "EndlessWait", "the other holds it and waits for ours", (0, 0)), |bug, on| {
        let (mut locks, mut sum) = ([0; 2], [0]);
        on.go(two_locks::kernel(), LaunchShape::new(2, 1),
            two_locks::Args { locks: on.write(&mut locks)?, sum: on.write(&mut sum)?, bug })
    };
    waits_on_a_plain_load: "a wait that looks with a plain load", Found::In(Mode::Races, "Race", "the other side looks with a plain load", (0, 32)), |bug, on| {
        let (mut flag, mut out) = ([0], [0]);
        on.go(waits_on_a_plain_load::kernel(), LaunchShape::new(1, 64),
            waits_on_a_plain_load::Args { flag: on.write(&mut flag)?, out: on.write(&mut out)?, bug })
    };
    last_by_index: "the last block by its index, not by its arrival", Found::In(Mode::Orders, "OrderDependence", "of what is there by then", (5, 0)), |bug, on| {
        let (mut partial, mut done, mut total) = ([0; 6], [0], [0]);
        on.go(last_by_index::kernel(), LaunchShape::new(6, 1),
            last_by_index::Args { partial: on.write(&mut partial)?, done: on.write(&mut done)?, total: on.write(&mut total)?, bug })
    };
    unread_flag: "a flag that is read and not looked at", Found::In(Mode::Orders, "OrderDependence", "may come before the flag", (1, 0)), |bug, on| {
        let (mut data, mut flag, mut out) = ([0], [0], [0; 3]);
        on.go(unread_flag::kernel(), LaunchShape::new(3, 1),
            unread_flag::Args { data: on.write(&mut data)?, flag: on.write(&mut flag)?, out: on.write(&mut out)?, bug })
    };
}
