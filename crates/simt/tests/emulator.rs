//! The emulator runs kernels as a GPU would: indices, shared memory, barriers, warps, atomics.

use simt::emu::{self, EmuOptions, Schedule};
use simt::{
    Global, GlobalMut, Kernel, KernelArgs, LaunchShape, Shared, SharedPlan, kernel, thread, unroll, warp,
};

/// Both modes must accept a correct kernel.
fn run<A: KernelArgs>(kernel: Kernel<A>, shape: LaunchShape, args: A) {
    for options in [EmuOptions::default(), EmuOptions::race_checked()] {
        // SAFETY: each test's handles cover live vectors.
        unsafe { emu::launch(&kernel, shape, args, &options) }.unwrap_or_else(|fault| panic!("{fault}"));
    }
}

fn read<T: simt::Pod>(data: &[T]) -> Global<T> {
    // SAFETY: used while `data` lives.
    unsafe { Global::from_raw(data.as_ptr() as u64, data.len()) }
}

fn write<T: simt::Pod>(data: &mut [T]) -> GlobalMut<T> {
    // SAFETY: used while `data` lives.
    unsafe { GlobalMut::from_raw(data.as_mut_ptr() as u64, data.len()) }
}

#[kernel]
fn scale(x: Global<f32>, y: GlobalMut<f32>, factor: f32, len: u32) {
    let i = thread::index_1d();
    if i < len as usize {
        y.store(i, x.load(i) * factor);
    }
}

#[test]
fn threads_cover_a_ragged_grid() {
    let x: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let mut y = vec![0f32; 1000];
    run(
        scale::kernel(),
        LaunchShape::new(8, 128),
        scale::Args { x: read(&x), y: write(&mut y), factor: 3.0, len: 1000 },
    );
    assert!(y.iter().enumerate().all(|(i, y)| *y == i as f32 * 3.0));
    assert_eq!(scale::INSTANCES[0].name, "scale");
}

struct Reverse {
    tile: Shared<u32>,
    bytes: u32,
}

const fn reverse_layout(threads: u32) -> Reverse {
    let mut plan = SharedPlan::new();
    let tile = plan.array(threads);
    Reverse { tile, bytes: plan.bytes() }
}

#[kernel(instances(64, 256))]
fn reverse<const THREADS: u32>(x: GlobalMut<u32>) {
    let shared = reverse_layout(THREADS);
    let (t, first) = (thread::thread_idx_x(), thread::block_idx_x() * THREADS);
    shared.tile.store(t, x.load((first + t) as usize));
    thread::sync_threads();
    x.store((first + t) as usize, shared.tile.load(THREADS - 1 - t));
}

#[test]
fn a_block_exchanges_through_shared_memory() {
    let mut x: Vec<u32> = (0..1024).collect();
    // Twice (both modes): back where it was after the first pair, reversed after one more.
    let shape = LaunchShape::new(4, 256).shared(reverse_layout(256).bytes);
    run(reverse::kernel::<256>(), shape, reverse::Args { x: write(&mut x) });
    assert!(x.iter().copied().eq(0..1024));
    // SAFETY: `x` lives.
    unsafe {
        emu::launch(
            &reverse::kernel::<256>(),
            shape,
            reverse::Args { x: write(&mut x) },
            &EmuOptions::default(),
        )
    }
    .unwrap();
    assert_eq!(x[..3], [255, 254, 253]);
    assert_eq!(reverse::INSTANCES.iter().map(|i| i.name).collect::<Vec<_>>(), ["reverse_64", "reverse_256"]);
}

#[kernel]
fn warp_tour(out: GlobalMut<u64>) {
    let lane = warp::lane_id();
    let full = warp::FULL_MASK;
    let base = thread::thread_idx_x() as usize * 12;
    let wide = 1u64 << 40 | lane as u64;
    let values = [
        warp::warp_shuffle_xor(full, wide, 1, 32),
        warp::warp_shuffle_up(full, lane, 4, 16) as u64,
        warp::warp_shuffle_down(full, lane, 4, 16) as u64,
        warp::warp_shuffle_idx(full, lane as f32, 3, 8) as u64,
        warp::warp_vote_ballot(full, lane.is_multiple_of(3)) as u64,
        warp::warp_vote_all(full, lane < 32) as u64,
        warp::warp_vote_any(full, lane == 40) as u64,
        warp::warp_reduce_add_u32(full, lane) as u64,
        warp::warp_reduce_min_i32(full, lane as i32 - 9) as u32 as u64,
        warp::warp_sum_f32(lane as f32) as u64,
        thread::sync_threads_count(lane & 1) as u64,
        (lane < 8 && warp::warp_vote_all(0xff, lane < 8)) as u64,
    ];
    unroll!(for i in 0..12 {
        out.store(base + i, values[i]);
    });
}

#[test]
fn warp_primitives_follow_the_ptx_isa() {
    let mut out = vec![0u64; 64 * 12];
    run(warp_tour::kernel(), LaunchShape::new(1, 64), warp_tour::Args { out: write(&mut out) });
    for (thread, got) in out.chunks(12).enumerate() {
        let lane = thread as u64 % 32;
        let multiples_of_3 = (0..32).filter(|l| l % 3 == 0).fold(0u64, |m, l| m | 1 << l);
        let expected = [
            1 << 40 | (lane ^ 1),
            if lane % 16 >= 4 { lane - 4 } else { lane },
            if lane % 16 < 12 { lane + 4 } else { lane },
            lane / 8 * 8 + 3,
            multiples_of_3,
            1,
            0,
            496,
            -9i32 as u32 as u64,
            496,
            32,
            (lane < 8) as u64,
        ];
        assert_eq!(got, expected, "thread {thread}");
    }
}

#[kernel]
fn histogram(
    values: Global<u32>,
    bins: GlobalMut<u32>,
    done: GlobalMut<u32>,
    total: GlobalMut<u32>,
    len: u32,
) {
    // Each block counts; the block that comes last adds up all bins: the grid-wide reduction without a second
    // launch.
    let i = thread::index_1d();
    if i < len as usize {
        bins.atomic_add((values.load(i) % 16) as usize, 1);
    }
    thread::sync_threads();
    if thread::thread_idx_x() == 0 {
        thread::device_fence();
        let before = done.atomic_add(0, 1);
        if before + 1 == thread::grid_dim_x() {
            let mut sum = 0;
            for bin in 0..16 {
                sum += bins.atomic_add(bin, 0);
            }
            total.store(0, sum);
        }
    }
}

#[test]
fn blocks_meet_through_atomics() {
    let values: Vec<u32> = (0..1000).collect();
    for options in [EmuOptions::default(), EmuOptions::race_checked()] {
        let (mut bins, mut done, mut total) = (vec![0u32; 16], vec![0u32; 1], vec![0u32; 1]);
        let args = histogram::Args {
            values: read(&values),
            bins: write(&mut bins),
            done: write(&mut done),
            total: write(&mut total),
            len: 1000,
        };
        // SAFETY: all vectors live.
        unsafe { emu::launch(&histogram::kernel(), LaunchShape::new(8, 128), args, &options) }
            .unwrap_or_else(|fault| panic!("{fault}"));
        assert_eq!((total[0], bins[0], bins[8]), (1000, 63, 62));
    }
}

#[kernel]
fn last_block_sums(partial: GlobalMut<u32>, done: GlobalMut<u32>, total: GlobalMut<u32>, fenced: u32) {
    let block = thread::block_idx_x();
    let t = thread::thread_idx_x();
    partial.store((block * 32 + t) as usize, block + t);
    thread::sync_threads();
    let mut last = 0;
    if t == 0 {
        if fenced != 0 {
            thread::device_fence();
        }
        last = (done.atomic_add(0, 1) + 1 == thread::grid_dim_x()) as u32;
    }
    if thread::sync_threads_or(last) != 0 && t == 0 {
        let mut sum = 0;
        for i in 0..thread::grid_dim_x() * 32 {
            sum += partial.load(i as usize);
        }
        total.store(0, sum);
    }
}

#[test]
fn a_fence_with_an_atomic_orders_blocks_and_without_it_they_race() {
    let (mut partial, mut done, mut total) = (vec![0u32; 128], vec![0u32; 1], vec![0u32; 1]);
    let mut launch = |fenced: u32| {
        done[0] = 0;
        let args = last_block_sums::Args {
            partial: write(&mut partial),
            done: write(&mut done),
            total: write(&mut total),
            fenced,
        };
        // SAFETY: all vectors live.
        unsafe {
            emu::launch(
                &last_block_sums::kernel(),
                LaunchShape::new(4, 32),
                args,
                &EmuOptions::race_checked(),
            )
        }
    };
    launch(1).unwrap_or_else(|fault| panic!("{fault}"));
    let fault = launch(0).unwrap_err();
    assert!(matches!(&fault.kind, emu::FaultKind::Race(race) if race.space == emu::Space::Global), "{fault}");
    assert_eq!(total[0], 4 * 496 + 32 * 6);
}

#[test]
fn launch_shapes_that_no_gpu_takes_are_refused() {
    let mut x = vec![0u32; 64];
    for shape in [
        LaunchShape::new(0, 64),
        LaunchShape::new(1, 0),
        LaunchShape::new(1, 1025),
        LaunchShape::new((1, 65536), 32),
        LaunchShape::new(1, (1, 1, 65)),
        LaunchShape::new(1, 64).shared(228 * 1024),
    ] {
        // SAFETY: `x` lives.
        let fault = unsafe {
            emu::launch(
                &reverse::kernel::<64>(),
                shape,
                reverse::Args { x: write(&mut x) },
                &EmuOptions::default(),
            )
        };
        assert!(matches!(fault.unwrap_err().kind, emu::FaultKind::Refused { .. }), "{shape:?}");
    }
}

#[kernel]
fn every_atomic(words: GlobalMut<i32>) {
    words.atomic_min(0, -(thread::thread_idx_x() as i32));
    words.atomic_max(1, thread::thread_idx_x() as i32);
    words.atomic_and(2, !(1 << thread::thread_idx_x()));
    words.atomic_or(3, 1 << thread::thread_idx_x());
    words.atomic_xor(4, 3);
    words.atomic_cas(5, 0, 7);
    words.atomic_exchange(6, 9);
}

#[test]
fn atomics_have_every_operation() {
    let mut words = vec![0, 0, -1, 0, 5, 0, 0];
    run(every_atomic::kernel(), LaunchShape::new(1, 16), every_atomic::Args { words: write(&mut words) });
    assert_eq!(words, [-15, 15, !0xffff, 0xffff, 5, 7, 9]);
}

#[kernel]
fn neighbours(x: GlobalMut<u32>, sums: GlobalMut<u32>, synchronised: u32) {
    let lane = warp::lane_id();
    x.store(lane as usize, lane);
    // An exchange of registers brings the lanes together, and orders no memory access.
    let next = warp::warp_shuffle_xor(warp::FULL_MASK, lane, 1, 32);
    if synchronised != 0 {
        warp::sync_warp(warp::FULL_MASK);
    }
    sums.store(lane as usize, x.load(next as usize) + lane);
}

#[test]
fn a_shuffle_is_no_memory_barrier() {
    let (mut x, mut sums) = (vec![0u32; 32], vec![0u32; 32]);
    let mut launch = |synchronised: u32| {
        let args = neighbours::Args { x: write(&mut x), sums: write(&mut sums), synchronised };
        // SAFETY: both vectors live.
        unsafe {
            emu::launch(&neighbours::kernel(), LaunchShape::new(1, 32), args, &EmuOptions::race_checked())
        }
    };
    launch(1).unwrap_or_else(|fault| panic!("{fault}"));
    let fault = launch(0).unwrap_err();
    assert!(matches!(fault.kind, emu::FaultKind::Race { .. }), "{fault}");
    assert!(sums.iter().enumerate().all(|(lane, sum)| *sum as usize == (lane ^ 1) + lane));
}

#[kernel]
fn hand_over(data: GlobalMut<u32>, flag: GlobalMut<u32>, fences: u32) {
    // Block 0 hands a word over to block 1, which finds the flag set, as blocks run in ascending order.
    if thread::block_idx_x() == 0 {
        data.store(0, 7);
        if fences & 1 != 0 {
            thread::device_fence();
        }
        flag.atomic_exchange(0, 1);
    } else if flag.atomic_add(0, 0) == 1 {
        if fences & 2 != 0 {
            thread::device_fence();
        }
        data.store(1, data.load(0));
    }
}

#[test]
fn a_hand_over_needs_a_fence_on_both_sides() {
    for fences in 0..4u32 {
        let (mut data, mut flag) = (vec![0u32; 2], vec![0u32; 1]);
        let args = hand_over::Args { data: write(&mut data), flag: write(&mut flag), fences };
        let options = EmuOptions { schedule: Schedule::Ascending, ..EmuOptions::race_checked() };
        // SAFETY: both vectors live.
        let result = unsafe { emu::launch(&hand_over::kernel(), LaunchShape::new(2, 1), args, &options) };
        match result {
            Ok(()) => assert_eq!((fences, data[1]), (3, 7)),
            Err(fault) => {
                assert!(
                    matches!(fault.kind, emu::FaultKind::Race { .. }) && fences != 3,
                    "{fences}: {fault}"
                );
            }
        }
    }
}

#[kernel(instances(1, 2), overlaps)]
fn add_in_turn<const STEP: u32>(x: GlobalMut<u32>) {
    // What the entry does on a GPU may be done again, anywhere and by some threads only.
    if thread::thread_idx_x().is_multiple_of(2) {
        thread::wait_for_previous();
    } else {
        thread::let_next_start();
    }
    let i = thread::index_1d();
    x.store(i, x.load(i) + STEP);
}

/// What comes of a peek may be asked for, and nothing else: `leaks` stores it.
#[kernel(instances(0, 1), overlaps = by_hand)]
fn glance<const LEAKS: u32>(next: Global<u32>, pool: Global<u32>, y: GlobalMut<u32>) {
    let i = thread::index_1d();
    let guess = next.peek(i, true) + next.peek(usize::MAX, false);
    let wanted = guess < 16;
    pool.prefetch(if wanted { 4 * guess as usize } else { 0 }, 16, wanted);
    thread::wait_for_previous();
    thread::let_next_start();
    let true_one = next.load(i);
    y.store(i, if LEAKS != 0 { guess } else { pool.load(4 * true_one as usize) });
}

#[test]
fn a_peek_is_right_for_most_threads_and_decides_nothing() {
    let next: Vec<u32> = (0..64).map(|i| i % 16).collect();
    let pool: Vec<u32> = (0..64).collect();
    let mut y = vec![u32::MAX; 64];
    run(
        glance::kernel::<0>(),
        LaunchShape::new(2, 32),
        glance::Args { next: read(&next), pool: read(&pool), y: write(&mut y) },
    );
    assert!(y.iter().zip(&next).all(|(y, next)| *y == 4 * next));
    run(
        glance::kernel::<1>(),
        LaunchShape::new(2, 32),
        glance::Args { next: read(&next), pool: read(&pool), y: write(&mut y) },
    );
    let right = y.iter().zip(&next).filter(|(y, next)| y == next).count();
    assert!((33..60).contains(&right), "{right} of 64");
    assert!(glance::INSTANCES.iter().all(|info| info.overlaps && info.waits_late));
}

#[test]
fn launches_that_may_overlap_say_so_and_run_in_order_here() {
    assert!(add_in_turn::INSTANCES.iter().all(|info| info.overlaps));
    assert!(reverse::INSTANCES.iter().all(|info| !info.overlaps));
    assert!(add_in_turn::INSTANCES.iter().all(|info| !info.waits_late));
    let mut x = vec![0u32; 64];
    for _ in 0..3 {
        run(add_in_turn::kernel::<1>(), LaunchShape::new(2, 32), add_in_turn::Args { x: write(&mut x) });
        run(add_in_turn::kernel::<2>(), LaunchShape::new(2, 32), add_in_turn::Args { x: write(&mut x) });
    }
    // `run` runs each twice.
    assert_eq!(x, [18; 64]);
}

#[test]
fn a_launch_says_who_wrote_some_bytes() {
    let (x, mut y) = (vec![1f32; 64], vec![0f32; 64]);
    let last = |y: &mut Vec<f32>, element: u64, options: EmuOptions| {
        let start = y.as_ptr() as u64 + 4 * element;
        let args = scale::Args { x: read(&x), y: write(y), factor: 2.0, len: 40 };
        // SAFETY: both have 64 elements, and live.
        unsafe {
            emu::launch_watched(&scale::kernel(), LaunchShape::new(2, 32), args, &options, start..start + 4)
        }
        .unwrap()
    };
    for options in [EmuOptions::default(), EmuOptions::thorough()] {
        let (thread, place) = last(&mut y, 37, options).expect("a thread");
        assert_eq!((thread.block.x, thread.thread.x), (1, 5));
        assert!(place.file.ends_with("emulator.rs"), "{place}");
        assert!(last(&mut y, 40, options).is_none());
    }
    assert_eq!((y[39], y[40]), (2.0, 0.0));
}

#[kernel]
fn load_one(x: Global<u32>, y: GlobalMut<u32>) {
    y.store(0, x.load(0));
}

/// A handle that leads nowhere breaks the contract of a launch. The process ends by the signal, as it would
/// elsewhere: no stack is full.
#[cfg(target_os = "linux")]
#[test]
fn a_bad_address_is_no_full_stack() {
    use std::os::unix::process::ExitStatusExt;
    const VARIABLE: &str = "SIMT_TEST_BAD_ADDRESS";
    if std::env::var_os(VARIABLE).is_some() {
        let mut y = [0];
        // SAFETY: not valid, and this process ends by it.
        let x = unsafe { Global::from_raw(4096, 1) };
        run(load_one::kernel(), LaunchShape::new(1, 1), load_one::Args { x, y: write(&mut y) });
        return;
    }
    let program = std::env::current_exe().expect("the program of the tests");
    let output = std::process::Command::new(program)
        .args(["--exact", "a_bad_address_is_no_full_stack"])
        .env(VARIABLE, "1")
        .output()
        .expect("it starts");
    assert_eq!(output.status.signal(), Some(11), "{}", String::from_utf8_lossy(&output.stdout));
}

#[kernel]
fn meet_with_a_number(y: GlobalMut<u32>, rounds: u32) {
    for _ in 0..rounds {
        thread::named_barrier_sync(1, thread::block_dim_x());
        thread::sync_threads();
    }
    y.store(thread::thread_idx_x() as usize, 1);
}

/// To find the calls that led to a barrier does not fill a small stack.
#[test]
fn small_stacks_are_enough_for_checked_barriers() {
    let mut y = [0; 64];
    for stack_bytes in [16, 64].map(|kib| kib * 1024) {
        let options = EmuOptions { stack_bytes, ..EmuOptions::race_checked() };
        let args = meet_with_a_number::Args { y: write(&mut y), rounds: 2 };
        // SAFETY: `y` has an element for each thread.
        let result =
            unsafe { emu::launch(&meet_with_a_number::kernel(), LaunchShape::new(1, 64), args, &options) };
        assert_eq!(result, Ok(()), "stacks of {stack_bytes} bytes");
    }
}
