//! Memory that is not there, not written or not the right one, after the errors that DRACC plants.

use crate::case::{Found, Mode, cases, go, read, tracked, write};
use simt::emu::{EmuOptions, Fault, allocations};
use simt::{Global, GlobalMut, LaunchShape, Shared, SharedPlan, async_copy, kernel, thread};

#[kernel]
fn scale(x: Global<u32>, y: GlobalMut<u32>, n: u32) {
    let i = thread::index_1d();
    if i < n as usize {
        let value = x.load(i); // BUG: the host filled too little, or freed it
        y.store(i, 2 * value); // BUG: the output is shorter than n
    }
}

#[kernel]
fn accumulate(y: GlobalMut<u32>, n: u32) {
    let i = thread::index_1d();
    if i < n as usize {
        y.atomic_add(i % 8, i as u32); // BUG: counters that nobody set to zero
    }
}

#[kernel]
fn vectors(x: Global<u32>, y: GlobalMut<u32>, n: u32) {
    let i = thread::index_1d();
    if 4 * i < n as usize {
        let four: u128 = x.load_vector(4 * i); // BUG: the last four are not all there
        y.store(i, four as u32);
    }
}

const fn tile() -> Shared<u32> {
    let mut plan = SharedPlan::new();
    plan.array(128)
}

#[kernel]
fn copied(x: Global<u32>, y: GlobalMut<u32>, n: u32) {
    let t = thread::thread_idx_x();
    if 4 * t < n {
        tile().copy_async(4 * t, x, 4 * t as usize); // BUG: copies what nobody wrote
    }
    async_copy::commit();
    async_copy::wait::<0>();
    thread::sync_threads();
    if 4 * t < n {
        y.store(t as usize, tile().load(4 * t));
    }
}

#[kernel]
fn too_large_a_tile(x: Global<u32>, y: GlobalMut<u32>, n: u32) {
    let t = thread::thread_idx_x();
    if t < n {
        tile().store(t, x.load(t as usize)); // BUG: the launch has less shared memory
    }
    thread::sync_threads();
    if t < n {
        y.store(t as usize, tile().load(t));
    }
}

/// 100 words of which the host wrote so many, on a device that keeps account of them.
fn with_input(
    written: usize,
    options: &EmuOptions,
    launch: impl Fn(Global<u32>, GlobalMut<u32>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let (x, mut y) = (vec![0u128; 25], vec![0; 100]);
    let x = read(&x).cast();
    let _tracked = tracked(x.address(), 400);
    allocations::write(x.address(), 4 * written);
    let _ = options;
    launch(x, write(&mut y))
}

fn shape() -> LaunchShape {
    LaunchShape::new(2, 64)
}

cases! { "dracc";
    too_little_filled: "the host fills too little of an input",
        Found::In(Mode::Memory, "Unwritten", "the host filled too little, or freed it", (1, 32)),
        |bug, options| with_input(100 - 4 * bug as usize, options, |x, y| {
            go(scale::kernel(), shape(), scale::Args { x, y, n: 100 }, options)
        });
    freed: "an input that is freed", Found::OfLaunch(Mode::Memory, "Freed"), |bug, options| {
        with_input(100, options, |x, y| {
            if bug != 0 {
                allocations::free(x.address());
            }
            go(scale::kernel(), shape(), scale::Args { x, y, n: 100 }, options)
        })
    };
    counters_not_set: "atomics on counters that nobody set",
        Found::In(Mode::Memory, "Unwritten", "counters that nobody set to zero", (0, 0)),
        |bug, options| {
            let mut y = vec![0; 8];
            let y = write(&mut y);
            let _tracked = tracked(y.address(), 32);
            if bug == 0 {
                allocations::write(y.address(), 32);
            }
            go(accumulate::kernel(), shape(), accumulate::Args { y, n: 100 }, options)
        };
    copy_of_unwritten: "an asynchronous copy of what nobody wrote",
        Found::In(Mode::Memory, "Unwritten", "copies what nobody wrote", (0, 20)),
        |bug, options| with_input(if bug != 0 { 80 } else { 100 }, options, |x, y| {
            let shape = LaunchShape::new(1, 64).shared(512);
            go(copied::kernel(), shape, copied::Args { x, y, n: 100 }, options)
        });
    output_too_short: "an output shorter than the launch takes it for",
        Found::In(Mode::Default, "OutOfBounds", "the output is shorter than n", (1, 26)),
        |bug, options| {
            let (x, mut y) = (vec![1; 100], vec![0; if bug != 0 { 90 } else { 100 }]);
            go(scale::kernel(), shape(), scale::Args { x: read(&x), y: write(&mut y), n: 100 }, options)
        };
    last_vector: "a last vector that crosses the end",
        Found::In(Mode::Default, "OutOfBounds", "the last four are not all there", (0, 24)),
        |bug, options| {
            let (x, mut y) = (vec![0u128; 25], vec![0; 25]);
            let x: Global<u32> = read(&x).cast();
            // SAFETY: shorter than the memory of `x`.
            let x = unsafe { Global::from_raw(x.address(), 100 - 2 * bug as usize) };
            go(vectors::kernel(), shape(), vectors::Args { x, y: write(&mut y), n: 98 + 2 * (1 - bug) }, options)
        };
    shared_memory_too_small: "a launch with too little shared memory",
        Found::In(Mode::Default, "SharedTooSmall", "the launch has less shared memory", (0, 60)),
        |bug, options| with_input(100, options, |x, y| {
            let shape = LaunchShape::new(1, 64).shared(256 - 16 * bug);
            go(too_large_a_tile::kernel(), shape, too_large_a_tile::Args { x, y, n: 64 }, options)
        });
}
