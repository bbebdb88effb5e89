//! What a memory access may touch, and when.

#[cfg(not(target_arch = "nvptx64"))]
use crate::case::{Found, Mode};
#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
use simt::{GlobalMut, Shared, SharedPlan, async_copy, kernel, thread};

const fn tile() -> Shared<u32> {
    let mut plan = SharedPlan::new();
    plan.array(128)
}

#[kernel]
fn readonly_of_written(x: GlobalMut<u32>, y: GlobalMut<u32>, bug: u32) {
    let (t, i) = (thread::thread_idx_x(), thread::index_1d());
    x.store(i, t);
    thread::sync_threads();
    let other = i ^ 1;
    let value = if bug != 0 {
        x.as_const().load_readonly(other) // BUG: the launch writes it
    } else {
        x.load(other)
    };
    y.store(i, value);
}

#[kernel]
fn source_overwritten(x: GlobalMut<u32>, y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    tile().copy_async(4 * t, x.as_const(), 4 * t as usize);
    async_copy::commit();
    if bug == 0 {
        async_copy::wait::<0>();
    }
    x.store(4 * t as usize, 9); // BUG: the copy may not have read it yet
    async_copy::wait::<0>();
    y.store(t as usize, tile().load(4 * t));
}

#[kernel]
fn source_overwritten_by_another(x: GlobalMut<u32>, y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    tile().copy_async(4 * t, x.as_const(), 4 * t as usize);
    async_copy::commit();
    if bug == 0 {
        async_copy::wait::<0>();
    }
    thread::sync_threads();
    x.store(4 * (t ^ 1) as usize, 9); // BUG: a neighbour's copy may not have read it yet
    thread::sync_threads();
    async_copy::wait::<0>();
    y.store(t as usize, tile().load(4 * t));
}

#[kernel]
fn two_widths(words: GlobalMut<u32>, bug: u32) {
    let i = thread::index_1d();
    if bug != 0 && i % 2 == 1 {
        words.cast::<u64>().atomic_add(0, 1); // BUG: the others add to half of it
    } else {
        words.atomic_add(0, 1);
    }
}

#[kernel]
fn look_of_another_width(words: GlobalMut<u32>, y: GlobalMut<u32>, bug: u32) {
    if thread::block_idx_x() == 0 {
        words.atomic_add(0, 1);
        words.cast::<u64>().atomic_load(0);
    } else if bug != 0 {
        y.store(0, words.load(0)); // BUG: another block adds to it
    }
}

/// Sums of so many words that all stay on the stack. No GPU has room for as many in each thread.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(never)]
fn sorted_locally<const WORDS: usize>(seed: u32) -> u32 {
    let mut words = [seed; WORDS];
    for i in 1..WORDS {
        words[i] = core::hint::black_box(words[i - 1].rotate_left(5) ^ i as u32);
    }
    core::hint::black_box(&mut words)[seed as usize % WORDS]
}

#[cfg(not(target_arch = "nvptx64"))]
#[kernel]
fn large_local_array(y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x();
    if t % 8 == 5 && bug != 0 {
        y.store(t as usize, sorted_locally::<100_000>(t));
    } else {
        y.store(t as usize, sorted_locally::<1_000>(t));
    }
}

cases! { "memory";
    large_local_array: "a local array larger than the stack",
        Found::OfThread(Mode::Default, "StackOverflow", (0, 5)), |bug, on| {
            let mut y = [0; 64];
            on.go(large_local_array::kernel(), LaunchShape::new(1, 64),
                large_local_array::Args { y: on.write(&mut y)?, bug })
        };
    readonly_of_written: "a read-only load of what the launch writes", Found::In(Mode::Races, "ReadOnlyLoad", "the launch writes it", (0, 0)), |bug, on| {
        let (mut x, mut y) = ([0; 64], [0; 64]);
        on.go(readonly_of_written::kernel(), LaunchShape::new(1, 64),
            readonly_of_written::Args { x: on.write(&mut x)?, y: on.write(&mut y)?, bug })
    };
    source_overwritten: "the source of a copy, written before its wait", Found::In(Mode::Races, "CopySource", "the copy may not have read it yet", (0, 0)), |bug, on| {
        let (mut x, mut y) = (vec![0u128; 32], [0; 32]);
        let x = on.write(&mut x)?.cast();
        on.go(source_overwritten::kernel(), LaunchShape::new(1, 32).shared(512),
            source_overwritten::Args { x, y: on.write(&mut y)?, bug })
    };
    source_overwritten_by_another: "the same by another thread, behind a barrier", Found::In(Mode::Races, "CopySource", "a neighbour's copy may not have read it yet", (0, 0)), |bug, on| {
        let (mut x, mut y) = (vec![0u128; 32], [0; 32]);
        let x = on.write(&mut x)?.cast();
        on.go(source_overwritten_by_another::kernel(), LaunchShape::new(1, 32).shared(512),
            source_overwritten_by_another::Args { x, y: on.write(&mut y)?, bug })
    };
    two_widths: "atomics of two widths on one word", Found::In(Mode::Races, "AtomicWidths", "the others add to half of it", (0, 1)), |bug, on| {
        let mut words = [0u64; 1];
        on.go(two_widths::kernel(), LaunchShape::new(1, 64),
            two_widths::Args { words: on.write(&mut words)?.cast(), bug })
    };
    look_of_another_width: "a read of what another block adds to and looks at as a wider word", Found::In(Mode::Races, "Race", "another block adds to it", (1, 0)), |bug, on| {
        let (mut words, mut y) = ([0u64; 1], [0; 1]);
        on.go(look_of_another_width::kernel(), LaunchShape::new(2, 1),
            look_of_another_width::Args { words: on.write(&mut words)?.cast(), y: on.write(&mut y)?, bug })
    };
}
