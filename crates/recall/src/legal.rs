//! Programs without a mistake that are easy to refuse or to hang. In the twin's place stands the same
//! program. One of them is refused: a false alarm.

#[cfg(not(target_arch = "nvptx64"))]
use crate::case::Found;
#[cfg(not(target_arch = "nvptx64"))]
use crate::machine::Machine;
#[cfg(not(target_arch = "nvptx64"))]
use ferrokv_device::Result;
#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
#[cfg(not(target_arch = "nvptx64"))]
use simt::emu::EmuOptions;
use simt::{Global, GlobalMut, Shared, SharedPlan, async_copy, kernel, thread, warp};

const fn words() -> Shared<u32> {
    let mut plan = SharedPlan::new();
    plan.array(128)
}

#[kernel]
fn ticket_lock(words: GlobalMut<u32>, sum: GlobalMut<u32>) {
    let own = words.atomic_add(0, 1);
    while words.atomic_add(1, 0) != own {
        thread::pause(50);
    }
    thread::device_fence();
    sum.store(0, sum.load(0) + 1);
    thread::device_fence();
    words.atomic_add(1, 1);
}

#[kernel]
fn look_back(x: Global<u32>, states: GlobalMut<u32>, sums: GlobalMut<u32>) {
    // Each block adds its own to what the block before has published.
    let block = thread::block_idx_x() as usize;
    let mut before = 0;
    if block > 0 {
        while states.atomic_add(block - 1, 0) == 0 {}
        thread::device_fence();
        before = sums.load(block - 1);
    }
    sums.store(block, before + x.load(block));
    thread::device_fence();
    states.atomic_exchange(block, 1);
}

#[kernel]
fn producer_and_consumer(x: Global<u32>, y: GlobalMut<u32>) {
    // Warp 0 brings four words at a time, warp 1 takes them, by a flag each way.
    let (t, lane) = (thread::thread_idx_x(), warp::lane_id());
    let (full, empty) = (100, 101);
    if t < 2 {
        words().store(100 + t, 0);
    }
    thread::sync_threads();
    for round in 0..4u32 {
        if t < 32 {
            if lane == 0 {
                while words().atomic_add(empty, 0) != round {}
                thread::block_fence();
            }
            warp::sync_warp(warp::FULL_MASK);
            words().store(lane, x.load((32 * round + lane) as usize));
            warp::sync_warp(warp::FULL_MASK);
            if lane == 0 {
                thread::block_fence();
                words().atomic_add(full, 1);
            }
        } else {
            if lane == 0 {
                while words().atomic_add(full, 0) != round + 1 {}
                thread::block_fence();
            }
            warp::sync_warp(warp::FULL_MASK);
            y.store((32 * round + lane) as usize, words().load(31 - lane));
            warp::sync_warp(warp::FULL_MASK);
            if lane == 0 {
                thread::block_fence();
                words().atomic_add(empty, 1);
            }
        }
    }
}

#[kernel]
fn warps_at_two_barriers(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    if t < 32 {
        words().store(t, t);
        thread::sync_threads();
    } else {
        thread::sync_threads();
        y.store(t as usize, words().load(t - 32));
    }
}

#[kernel]
fn two_buffers(x: Global<u32>, y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let mut sum = 0;
    words().copy_async(4 * t, x, 4 * t as usize);
    async_copy::commit();
    for round in 1..4u32 {
        let target = 64 * (round % 2);
        words().copy_async(target + 4 * t, x, (16 * round + 4 * t) as usize);
        async_copy::commit();
        async_copy::wait::<1>();
        thread::sync_threads();
        sum += words().load(64 * ((round + 1) % 2) + 4 * ((t + 1) % 4));
        thread::sync_threads();
    }
    async_copy::wait::<0>();
    y.store(t as usize, sum);
}

#[kernel]
fn lanes_that_wait_for_a_lane(y: GlobalMut<u32>) {
    // Lanes of one warp make progress apart, since compute capability 7.0.
    let t = thread::thread_idx_x();
    if t == 0 {
        words().store(0, 0);
    }
    warp::sync_warp(warp::FULL_MASK);
    if t == 31 {
        words().atomic_exchange(0, 1);
    } else {
        while words().atomic_add(0, 0) == 0 {}
    }
    y.store(t as usize, t);
}

#[kernel]
fn atomics_that_meet_a_plain_read(y: GlobalMut<u32>, total: GlobalMut<u32>) {
    y.atomic_add(0, 1);
    thread::sync_threads();
    if thread::thread_idx_x() == 0 {
        total.store(0, y.load(0));
    }
}

#[kernel]
fn all_blocks_meet(arrived: GlobalMut<u32>) {
    if thread::thread_idx_x() == 0 {
        arrived.atomic_add(0, 1);
        while arrived.atomic_load(0) != thread::grid_dim_x() {
            thread::pause(50);
        }
    }
    thread::sync_threads();
}

/// Blocks that all wait for each other.
#[cfg(not(target_arch = "nvptx64"))]
fn meet(blocks: u32, threads: u32, on: &Machine) -> Result<()> {
    // Where there is no room for another block, patience changes nothing but the time.
    let impatient = on.options().map(|options| Machine::Emulator(EmuOptions { patience: 100, ..*options }));
    let (on, mut arrived) = (impatient.as_ref().unwrap_or(on), [0]);
    let args = all_blocks_meet::Args { arrived: on.write(&mut arrived)? };
    on.go(all_blocks_meet::kernel(), LaunchShape::new(blocks, threads), args)?;
    assert_eq!(arrived, [blocks]);
    Ok(())
}

cases! { "legal";
    ticket_lock: "a lock by tickets, between blocks", Found::Legal, |_, on| {
        let (mut words, mut sum) = ([0; 2], [0]);
        let args = ticket_lock::Args { words: on.write(&mut words)?, sum: on.write(&mut sum)? };
        on.go(ticket_lock::kernel(), LaunchShape::new(3, 16), args)?;
        assert_eq!(sum, [48]);
        Ok(())
    };
    look_back: "each block waits for the one before", Found::Legal, |_, on| {
        let (x, mut states, mut sums) = ([3; 40], [0; 40], [0; 40]);
        let args =
            look_back::Args { x: on.read(&x)?, states: on.write(&mut states)?, sums: on.write(&mut sums)? };
        on.go(look_back::kernel(), LaunchShape::new(40, 1), args)?;
        assert_eq!(sums[39], 120);
        Ok(())
    };
    producer_and_consumer: "a warp brings what another takes", Found::Legal, |_, on| {
        let (x, mut y): (Vec<u32>, _) = ((0..128).collect(), [0; 128]);
        let args = producer_and_consumer::Args { x: on.read(&x)?, y: on.write(&mut y)? };
        on.go(producer_and_consumer::kernel(), LaunchShape::new(1, 64).shared(512), args)?;
        assert_eq!(y[127], 96);
        Ok(())
    };
    warps_at_two_barriers: "two warps meet from two barriers", Found::Legal, |_, on| {
        let mut y = [0; 64];
        let args = warps_at_two_barriers::Args { y: on.write(&mut y)? };
        on.go(warps_at_two_barriers::kernel(), LaunchShape::new(1, 64).shared(512), args)
    };
    two_buffers: "copies to one buffer while the other is read", Found::Legal, |_, on| {
        let (x, mut y) = ([0u128; 16], [0; 4]);
        let args = two_buffers::Args { x: on.read(&x)?.cast(), y: on.write(&mut y)? };
        on.go(two_buffers::kernel(), LaunchShape::new(1, 4).shared(512), args)
    };
    lanes_that_wait_for_a_lane: "lanes wait for a lane of their warp", Found::Legal, |_, on| {
        let mut y = [0; 32];
        let args = lanes_that_wait_for_a_lane::Args { y: on.write(&mut y)? };
        on.go(lanes_that_wait_for_a_lane::kernel(), LaunchShape::new(1, 32).shared(512), args)
    };
    atomics_that_meet_a_plain_read: "a plain read of what atomics changed, behind a barrier", Found::Legal, |_, on| {
        let (mut y, mut total) = ([0], [0]);
        let args = atomics_that_meet_a_plain_read::Args { y: on.write(&mut y)?, total: on.write(&mut total)? };
        on.go(atomics_that_meet_a_plain_read::kernel(), LaunchShape::new(1, 64), args)
    };
    all_blocks_meet: "all 64 blocks of a grid meet", Found::Legal, |_, on| meet(64, 32, on);
    many_blocks_meet: "all blocks of a grid meet that fills an H100", Found::Legal, |_, on| {
        // With every check and in many orders it is a smaller one.
        let is_plain = on.options().is_none_or(|options| !options.race_check && options.orders == 0);
        meet(if is_plain { 132 * 2 } else { 17 }, 1024, on)
    };
}
