//! Memory that is not there, not written or not the right one, after the errors that DRACC plants.

#[cfg(not(target_arch = "nvptx64"))]
use crate::Machine;
#[cfg(not(target_arch = "nvptx64"))]
use crate::case::{Found, Mode};
#[cfg(not(target_arch = "nvptx64"))]
use ferrokv_device::Result;
#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
use simt::{Global, GlobalMut, Shared, SharedPlan, async_copy, kernel, thread};

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
        y.store(i, (four >> 96) as u32);
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

/// 100 words of which the host wrote so many.
#[cfg(not(target_arch = "nvptx64"))]
fn with_input(
    written: usize,
    on: &Machine,
    launch: impl Fn(Global<u32>, GlobalMut<u32>) -> Result<()>,
) -> Result<()> {
    let (mut x, mut y) = (vec![0u128; 25], vec![0; 100]);
    let (x, _tracked) = on.unwritten(&mut x)?;
    on.wrote(x.address(), 4 * written)?;
    launch(x.as_const().cast(), on.write(&mut y)?)
}

#[cfg(not(target_arch = "nvptx64"))]
fn shape() -> LaunchShape {
    LaunchShape::new(2, 64)
}

cases! { "dracc";
    too_little_filled: "the host fills too little of an input",
        Found::In(Mode::Memory, "Unwritten", "the host filled too little, or freed it", (1, 32)),
        |bug, on| with_input(100 - 4 * bug as usize, on, |x, y| {
            on.go(scale::kernel(), shape(), scale::Args { x, y, n: 100 })
        });
    freed: "an input that is freed", Found::OfLaunch(Mode::Memory, "Freed"), |bug, on| {
        with_input(100, on, |x, y| {
            if bug != 0 {
                on.free(x.address());
            }
            on.go(scale::kernel(), shape(), scale::Args { x, y, n: 100 })
        })
    };
    counters_not_set: "atomics on counters that nobody set",
        Found::In(Mode::Memory, "Unwritten", "counters that nobody set to zero", (0, 0)),
        |bug, on| {
            let mut y = vec![0; 8];
            let (y, _tracked) = on.unwritten(&mut y)?;
            if bug == 0 {
                on.wrote(y.address(), 32)?;
            }
            on.go(accumulate::kernel(), shape(), accumulate::Args { y, n: 100 })
        };
    copy_of_unwritten: "an asynchronous copy of what nobody wrote",
        Found::In(Mode::Memory, "Unwritten", "copies what nobody wrote", (0, 20)),
        |bug, on| with_input(if bug != 0 { 80 } else { 100 }, on, |x, y| {
            let shape = LaunchShape::new(1, 64).shared(512);
            on.go(copied::kernel(), shape, copied::Args { x, y, n: 100 })
        });
    output_too_short: "an output shorter than the launch takes it for",
        Found::In(Mode::Default, "OutOfBounds", "the output is shorter than n", (1, 26)),
        |bug, on| {
            let (x, mut y) = (vec![1; 100], vec![0; if bug != 0 { 90 } else { 100 }]);
            on.go(scale::kernel(), shape(), scale::Args { x: on.read(&x)?, y: on.write(&mut y)?, n: 100 })
        };
    last_vector: "a last vector that crosses the end",
        Found::In(Mode::Default, "OutOfBounds", "the last four are not all there", (0, 24)),
        |bug, on| {
            let (x, mut y) = (vec![0u128; 25], vec![0; 25]);
            let x = on.read(&bytemuck::cast_slice(&x)[..100 - 2 * bug as usize])?;
            on.go(vectors::kernel(), shape(), vectors::Args { x, y: on.write(&mut y)?, n: 98 + 2 * (1 - bug) })
        };
    shared_memory_too_small: "a launch with too little shared memory",
        Found::In(Mode::Default, "SharedTooSmall", "the launch has less shared memory", (0, 60)),
        |bug, on| with_input(100, on, |x, y| {
            let shape = LaunchShape::new(1, 64).shared(256 - 16 * bug);
            on.go(too_large_a_tile::kernel(), shape, too_large_a_tile::Args { x, y, n: 64 })
        });
}
