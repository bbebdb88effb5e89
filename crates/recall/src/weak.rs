//! Weak order: atomics are relaxed, and what a thread sees of two words need not be what another did, in that
//! order. The small programs that memory models are told apart by.

#[cfg(not(target_arch = "nvptx64"))]
use crate::Machine;
#[cfg(not(target_arch = "nvptx64"))]
use crate::case::{Found, Mode};
#[cfg(not(target_arch = "nvptx64"))]
use ferrokv_device::Result;
#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
#[cfg(not(target_arch = "nvptx64"))]
use simt::emu::{EmuOptions, Schedule};
use simt::{GlobalMut, kernel, thread};

#[kernel]
fn message_by_atomics(data: GlobalMut<u32>, flag: GlobalMut<u32>, bug: u32) {
    // Relaxed atomics on two words, in one thread's order: another thread may see them in the other order.
    if thread::block_idx_x() == 0 {
        data.atomic_store(0, 7);
        if bug == 0 {
            thread::device_fence();
        }
        flag.atomic_store(0, 1);
    } else {
        while flag.atomic_load(0) == 0 {}
        if bug == 0 {
            thread::device_fence();
        }
        data.atomic_max(1, data.atomic_load(0)); // BUG: the message may be older than its flag
    }
}

/// Each announces itself and looks for the other; at most one may enter. Says in `x[2]` whether both did.
#[inline(always)]
fn enter(x: GlobalMut<u32>, fence: impl Fn()) {
    let own = thread::block_idx_x() as usize;
    x.atomic_store(own, 1);
    fence();
    if x.atomic_load(1 - own) == 0 && x.atomic_add(3, 1) == 1 {
        x.atomic_max(2, 1); // BUG: both entered
    }
    // The last one clears the count of those who entered.
    thread::device_fence();
    let last = x.atomic_add(4, 1) == 1;
    thread::device_fence();
    if last {
        x.atomic_and(3, 0);
    }
}

#[kernel]
fn nobody_seen(x: GlobalMut<u32>, bug: u32) {
    enter(x, || {
        if bug == 0 {
            thread::device_fence_sc();
        }
    });
}

#[kernel]
fn nobody_seen_with_fences(x: GlobalMut<u32>, bug: u32) {
    enter(x, || if bug == 0 { thread::device_fence_sc() } else { thread::device_fence() });
}

#[kernel]
fn message_over_a_third(x: GlobalMut<u32>, bug: u32) {
    // Block 0 tells block 1, which tells block 2: what 0 did is behind what 1 did, if 1 fences.
    match thread::block_idx_x() {
        0 => {
            x.atomic_store(0, 7);
            thread::device_fence();
            x.atomic_store(1, 1);
        }
        1 => {
            while x.atomic_load(1) == 0 {}
            if bug == 0 {
                thread::device_fence();
            }
            x.atomic_store(2, 1);
        }
        _ => {
            while x.atomic_load(2) == 0 {}
            thread::device_fence();
            x.atomic_max(3, x.atomic_load(0)); // BUG: the one between made no fence
        }
    }
}

#[kernel]
fn lock_by_a_look(x: GlobalMut<u32>, bug: u32) {
    // A count under a lock, all by atomics: without fences the next holder may see an old count.
    while x.atomic_cas(0, 0, 1) != 0 {}
    if bug == 0 {
        thread::device_fence();
    }
    let count = x.atomic_load(1);
    x.atomic_store(1, count + 1); // BUG: the count may be older than the lock
    if bug == 0 {
        thread::device_fence();
    }
    x.atomic_store(0, 0);
}

#[kernel]
fn one_word_one_order(x: GlobalMut<u32>) {
    // Of one word all threads see one order: who has seen a value never sees an older one.
    if thread::block_idx_x() == 0 {
        for value in 1..6 {
            x.atomic_store(0, value);
        }
    } else {
        let mut seen = 0;
        for _ in 0..12 {
            let now = x.atomic_load(0);
            if now < seen {
                x.atomic_exchange(1, 1);
            }
            seen = now;
        }
    }
}

#[kernel]
fn behind_a_barrier(x: GlobalMut<u32>, y: GlobalMut<u32>) {
    // What a block's barrier orders everyone sees, whoever set it.
    let t = thread::thread_idx_x() as usize;
    x.atomic_store(t, 1);
    thread::sync_threads();
    y.store(t, x.atomic_load(63 - t));
}

#[kernel]
fn an_update_and_then_a_look(x: GlobalMut<u32>) {
    // An update that changes nothing has seen the word, whether its thread has made a fence or not.
    if thread::block_idx_x() == 0 {
        for value in 1..6 {
            x.atomic_store(0, value);
        }
    } else {
        thread::device_fence();
        for _ in 0..6 {
            let seen = x.atomic_max(0, 0);
            if x.atomic_load(0) < seen {
                x.atomic_exchange(1, 1);
            }
        }
    }
}

#[kernel]
fn seen_by_another(x: GlobalMut<u32>) {
    // What a thread has seen it hands on, too, though who set it made no fence: observation is causal.
    match thread::block_idx_x() {
        0 => x.atomic_store(0, 7),
        1 => {
            while x.atomic_load(0) == 0 {}
            thread::device_fence();
            x.atomic_store(1, 1);
        }
        _ => {
            while x.atomic_load(1) == 0 {}
            thread::device_fence();
            if x.atomic_load(0) != 7 {
                x.atomic_exchange(2, 1);
            }
        }
    }
}

#[kernel]
fn told_of_full_fences(x: GlobalMut<u32>) {
    // If block 0 sees nothing of block 1, its fence comes first. Then block 2, which hears of the other
    // fence, must see what block 0 set.
    match thread::block_idx_x() {
        0 => {
            x.atomic_store(0, 1);
            thread::device_fence_sc();
            x.atomic_store(3, 1 + x.atomic_load(1));
        }
        1 => {
            x.atomic_store(1, 1);
            thread::device_fence_sc();
            x.atomic_store(2, 1);
        }
        _ => {
            while x.atomic_load(2) == 0 {}
            thread::device_fence();
            x.atomic_store(4, 1 + x.atomic_load(0));
        }
    }
    thread::device_fence();
    if x.atomic_add(5, 1) == 2 {
        thread::device_fence();
        if x.atomic_load(3) == 1 && x.atomic_load(4) == 1 {
            x.atomic_exchange(6, 1);
        }
        x.atomic_store(3, 0);
        x.atomic_store(4, 0);
    }
}

#[kernel]
fn a_store_is_no_look(x: GlobalMut<u32>, y: GlobalMut<u32>, bug: u32) {
    if thread::block_idx_x() == 0 {
        y.store(0, 7);
        thread::device_fence();
        x.atomic_store(0, 1);
    } else {
        if bug == 0 {
            while x.atomic_load(0) == 0 {}
        } else {
            x.atomic_store(0, 2);
        }
        thread::device_fence();
        y.store(1, y.load(0)); // BUG: a store hears of nothing
    }
}

/// Says in `x[2]` whether both blocks have seen something, which no order of their steps brings about. Each
/// notes that in `x[3 + block]`; the last one looks at both notes and clears them, as one note alone depends
/// on the order.
#[inline(always)]
fn noted(x: GlobalMut<u32>, seen: bool) {
    x.atomic_store(3 + thread::block_idx_x() as usize, seen as u32);
    if last(x) {
        if x.atomic_load(3) == 1 && x.atomic_load(4) == 1 {
            x.atomic_max(2, 1); // BUG: both saw what the other set later
        }
        x.atomic_store(3, 0);
        x.atomic_store(4, 0);
    }
}

/// Whether the block is the second one here. It then knows all that the first did.
#[inline(always)]
fn last(x: GlobalMut<u32>) -> bool {
    thread::device_fence();
    let last = x.atomic_add(5, 1) == 1;
    thread::device_fence();
    last
}

#[kernel]
fn load_buffering(x: GlobalMut<u32>, bug: u32) {
    // Each looks at the other's word, then sets its own: load buffering. Both may see what the other set.
    let own = thread::block_idx_x() as usize;
    let seen = x.atomic_load(1 - own);
    if bug == 0 {
        thread::device_fence();
    }
    x.atomic_store(own, 1);
    noted(x, seen == 1);
}

#[kernel]
fn two_words_set_by_two(x: GlobalMut<u32>, bug: u32) {
    // Each sets its own word first, the other's behind it: the litmus test 2+2W. Both first ones may stay.
    let own = thread::block_idx_x() as usize;
    x.atomic_store(own, 1);
    if bug == 0 {
        thread::device_fence_sc();
    }
    x.atomic_store(1 - own, 2);
    if last(x) {
        if x.atomic_load(0) == 1 && x.atomic_load(1) == 1 {
            x.atomic_max(2, 1); // BUG: both first ones stayed
        }
        x.atomic_store(0, 0);
        x.atomic_store(1, 0);
    }
}

#[kernel]
fn message_set_again(x: GlobalMut<u32>, bug: u32) {
    // Block 0 sets a word and a flag; block 1 waits for the flag and sets the word again: the litmus test S.
    // The first value may stay.
    let (word, flag) = (0, 1);
    if thread::block_idx_x() == 0 {
        x.atomic_store(word, 2);
        if bug == 0 {
            thread::device_fence();
        }
        x.atomic_store(flag, 1);
    } else {
        while x.atomic_load(flag) == 0 {}
        if bug == 0 {
            thread::device_fence();
        }
        x.atomic_store(word, 1);
    }
    if last(x) {
        if x.atomic_load(word) == 2 {
            x.atomic_max(2, 1); // BUG: the first value stayed
        }
        x.atomic_store(word, 0);
    }
}

#[kernel]
fn out_of_thin_air(x: GlobalMut<u32>) {
    // Each sets its own word to what it sees of the other's: nothing but what was there at first.
    let own = thread::block_idx_x() as usize;
    let seen = x.atomic_load(1 - own);
    x.atomic_store(own, seen);
    noted(x, seen == 1);
}

#[kernel]
fn out_of_a_branch(x: GlobalMut<u32>) {
    // The same by branches: block 1 sets its word only if block 0 says that it has seen it set.
    if thread::block_idx_x() == 0 {
        let seen = x.atomic_load(1);
        x.atomic_store(0, 1 + seen);
    } else if x.atomic_load(0) == 2 {
        x.atomic_store(1, 1);
        x.atomic_max(2, 1);
    }
    if last(x) {
        x.atomic_and(0, 0);
    }
}

/// What `no_update_is_lost` may find in its count is less.
const COUNTED: usize = 128;

#[kernel]
fn no_update_is_lost(x: GlobalMut<u32>, y: GlobalMut<u32>) {
    // Block 0 starts a count again while others count: of what they find in it none but 0 comes twice.
    if thread::block_idx_x() == 0 {
        x.atomic_store(0, 100);
    } else {
        for _ in 0..3 {
            let found = x.atomic_add(0, 1) as usize;
            if y.atomic_add(found, 1) != 0 {
                x.atomic_exchange(1, 1);
            }
        }
    }
    thread::device_fence();
    if x.atomic_add(2, 1) + 1 == thread::grid_dim_x() {
        thread::device_fence();
        x.atomic_exchange(0, 0);
        for at in 0..COUNTED {
            y.atomic_exchange(at, 0);
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
const SEEDS: Mode = Mode::Thorough;

/// Runs it in very many orders as well.
#[cfg(not(target_arch = "nvptx64"))]
fn in_many_orders(on: &Machine, run: impl Fn(&Machine) -> Result<()>) -> Result<()> {
    run(on)?;
    let Some(options) = on.options() else { return Ok(()) };
    (1..200).map(Schedule::Seeded).try_for_each(|schedule| {
        run(&Machine::Emulator(EmuOptions { race_check: true, orders: 0, schedule, ..*options }))
    })
}

/// Two blocks of one thread; `x[2]` is 0 unless something is seen that no order of steps brings about.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! two_threads {
    ($kernel:ident, $on:ident, $bug:ident) => {{
        let run = |on: &Machine| {
            let mut x = [0; 6];
            let args = $kernel::Args { x: on.write(&mut x)?, bug: $bug };
            on.go($kernel::kernel(), LaunchShape::new(2, 1), args)?;
            assert!($bug == 1 || x[2] == 0, "the fences bring about no order");
            Ok(())
        };
        if $bug == 0 { in_many_orders($on, run) } else { run($on) }
    }};
}

cases! { "weak";
    message_by_atomics: "data and flag both by atomics, no fence",
        Found::In(SEEDS, "OrderDependence", "the message may be older than its flag", (1, 0)), |bug, on| {
            let (mut data, mut flag) = ([0; 2], [0]);
            on.go(message_by_atomics::kernel(), LaunchShape::new(2, 1),
                message_by_atomics::Args { data: on.write(&mut data)?, flag: on.write(&mut flag)?, bug })
        };
    nobody_seen: "two threads that look for each other without a fence",
        Found::In(SEEDS, "OrderDependence", "both entered", (0, 0)), |bug, on| {
            let mut x = [0; 5];
            on.go(nobody_seen::kernel(), LaunchShape::new(2, 1),
                nobody_seen::Args { x: on.write(&mut x)?, bug })
        };
    nobody_seen_with_fences: "the same with fences that are not of sequential consistency",
        Found::In(SEEDS, "OrderDependence", "both entered", (0, 0)), |bug, on| {
            let mut x = [0; 5];
            on.go(nobody_seen_with_fences::kernel(), LaunchShape::new(2, 1),
                nobody_seen_with_fences::Args { x: on.write(&mut x)?, bug })
        };
    message_over_a_third: "a message handed on without a fence",
        Found::In(SEEDS, "OrderDependence", "the one between made no fence", (2, 0)), |bug, on| {
            let mut x = [0; 4];
            on.go(message_over_a_third::kernel(), LaunchShape::new(3, 1),
                message_over_a_third::Args { x: on.write(&mut x)?, bug })
        };
    lock_by_a_look: "a count under a lock without fences, all by atomics",
        Found::In(SEEDS, "OrderDependence", "the count may be older than the lock", (5, 0)), |bug, on| {
            let mut x = [0; 2];
            on.go(lock_by_a_look::kernel(), LaunchShape::new(8, 1),
                lock_by_a_look::Args { x: on.write(&mut x)?, bug })
        };
    one_word_one_order: "looks at one word that others set", Found::Legal, |_, on| {
        let mut x = [0; 2];
        let result = on.go(one_word_one_order::kernel(), LaunchShape::new(4, 1),
            one_word_one_order::Args { x: on.write(&mut x)? });
        assert_eq!(x[1], 0, "an older value was seen behind a newer one");
        result
    };
    behind_a_barrier: "looks behind a barrier", Found::Legal, |_, on| {
        let (mut x, mut y) = ([0; 64], [0; 64]);
        let result = on.go(behind_a_barrier::kernel(), LaunchShape::new(1, 64),
            behind_a_barrier::Args { x: on.write(&mut x)?, y: on.write(&mut y)? });
        assert_eq!(y, [1; 64]);
        result
    };
    a_store_is_no_look: "a store in the place of a look at the flag",
        Found::In(Mode::Races, "Race", "a store hears of nothing", (1, 0)), |bug, on| {
            let (mut x, mut y) = ([0], [0; 2]);
            on.go(a_store_is_no_look::kernel(), LaunchShape::new(2, 1),
                a_store_is_no_look::Args { x: on.write(&mut x)?, y: on.write(&mut y)?, bug })
        };
    an_update_and_then_a_look: "a look behind an update that changes nothing", Found::Legal, |_, on| {
        in_many_orders(on, |on| {
            let mut x = [0; 2];
            let args = an_update_and_then_a_look::Args { x: on.write(&mut x)? };
            on.go(an_update_and_then_a_look::kernel(), LaunchShape::new(4, 1), args)?;
            assert_eq!(x[1], 0, "an older value was seen behind a newer one");
            Ok(())
        })
    };
    seen_by_another: "a look behind another thread's look", Found::Legal, |_, on| {
        in_many_orders(on, |on| {
            let mut x = [0; 3];
            let args = seen_by_another::Args { x: on.write(&mut x)? };
            on.go(seen_by_another::kernel(), LaunchShape::new(3, 1), args)?;
            assert_eq!(x[2], 0, "not what the other thread has seen");
            Ok(())
        })
    };
    told_of_full_fences: "a look behind another thread's fence of sequential consistency", Found::Legal, |_, on| {
        in_many_orders(on, |on| {
            let mut x = [0; 7];
            let args = told_of_full_fences::Args { x: on.write(&mut x)? };
            on.go(told_of_full_fences::kernel(), LaunchShape::new(3, 1), args)?;
            assert_eq!(x[6], 0, "the fences had no one order");
            Ok(())
        })
    };
    load_buffering: "load buffering: two threads that look, then set",
        Found::In(SEEDS, "OrderDependence", "both saw what the other set later", (0, 0)),
        |bug, on| two_threads!(load_buffering, on, bug);
    two_words_set_by_two: "2+2W: two words that two threads set, no fence",
        Found::In(SEEDS, "OrderDependence", "both first ones stayed", (0, 0)),
        |bug, on| two_threads!(two_words_set_by_two, on, bug);
    message_set_again: "S: a word that is set again behind its flag, no fence",
        Found::In(SEEDS, "OrderDependence", "the first value stayed", (1, 0)),
        |bug, on| two_threads!(message_set_again, on, bug);
    out_of_thin_air: "two threads that set what they see", Found::Legal, |_, on| {
        in_many_orders(on, |on| {
            let mut x = [0; 6];
            let args = out_of_thin_air::Args { x: on.write(&mut x)? };
            on.go(out_of_thin_air::kernel(), LaunchShape::new(2, 1), args)?;
            assert_eq!(x[..3], [0; 3], "a value that nobody set");
            Ok(())
        })
    };
    out_of_a_branch: "a thread that sets a word if another has seen it set", Found::Legal, |_, on| {
        in_many_orders(on, |on| {
            let mut x = [0; 6];
            let args = out_of_a_branch::Args { x: on.write(&mut x)? };
            on.go(out_of_a_branch::kernel(), LaunchShape::new(2, 1), args)?;
            assert_eq!(x[1..3], [0; 2], "a value that nobody set");
            Ok(())
        })
    };
    no_update_is_lost: "a count that is started again while others count", Found::Legal, |_, on| {
        in_many_orders(on, |on| {
            let (mut x, mut y) = ([0; 3], [0; COUNTED]);
            let args = no_update_is_lost::Args { x: on.write(&mut x)?, y: on.write(&mut y)? };
            on.go(no_update_is_lost::kernel(), LaunchShape::new(5, 1), args)?;
            assert_eq!(x[1], 0, "two updates found one value");
            Ok(())
        })
    };
}
