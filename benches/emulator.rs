//! How fast the emulator runs 2^20 elements: a vectorized kernel whose threads never wait, and one whose
//! threads all wait at a barrier and in warp reductions. And a product of two matrices by tiles in shared
//! memory, as in docs/emulator.md, without a check and with the two that look at each access.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use glam::Vec4;
use simt::emu::{self, EmuOptions, allocations};
use simt::{Global, GlobalMut, LaunchShape, Shared, SharedPlan, bits, kernel, math, thread, warp};

const LEN: usize = 1 << 20;
const THREADS: u32 = 256;

#[kernel]
fn quantize(x: Global<f32>, y: GlobalMut<u32>, inverse: f32, vectors: u32) {
    let i = thread::index_1d();
    if i < vectors as usize {
        let v: Vec4 = x.load_vector_streaming(4 * i);
        let code = |x: f32| math::to_i32_nearest_even(math::clamp(x * inverse, -127.0, 127.0)) as u32;
        y.store_streaming(i, bits::pack_low_bytes([code(v.x), code(v.y), code(v.z), code(v.w)]));
    }
}

const fn partial() -> Shared<f32> {
    let mut plan = SharedPlan::new();
    plan.array(THREADS / 32)
}

#[kernel]
fn block_sums(x: Global<f32>, y: GlobalMut<f32>) {
    let t = thread::thread_idx_x();
    let sum = warp::warp_sum_f32(x.load(thread::index_1d()));
    if t.is_multiple_of(32) {
        partial().store(t / 32, sum);
    }
    thread::sync_threads();
    if t == 0 {
        let total = (0..THREADS / 32).fold(0.0, |total, warp| total + partial().load(warp));
        y.store(thread::block_idx_x() as usize, total);
    }
}

/// Rows and columns of a tile; a block has a thread for each element.
const TILE: u32 = 16;

struct Tiles {
    a: Shared<f32>,
    b: Shared<f32>,
    bytes: u32,
}

const fn tiles() -> Tiles {
    let mut plan = SharedPlan::new();
    let (a, b) = (plan.array(TILE * TILE), plan.array(TILE * TILE));
    Tiles { a, b, bytes: plan.bytes() }
}

/// `c` = `a` · `b`, all \[n, n\], with `n` a multiple of [`TILE`].
#[kernel]
fn product(a: Global<f32>, b: Global<f32>, c: GlobalMut<f32>, n: u32) {
    let (t, tiles) = (thread::thread_idx_x(), tiles());
    let (i, j) = (t / TILE, t % TILE);
    let (row, column) = (TILE * thread::block_idx_y() + i, TILE * thread::block_idx_x() + j);
    let mut sum = 0.0;
    for first in (0..n).step_by(TILE as usize) {
        tiles.a.store(t, a.load((row * n + first + j) as usize));
        tiles.b.store(t, b.load(((first + i) * n + column) as usize));
        thread::sync_threads();
        for k in 0..TILE {
            sum += tiles.a.load(TILE * i + k) * tiles.b.load(TILE * k + j);
        }
        thread::sync_threads();
    }
    c.store((row * n + column) as usize, sum);
}

/// Multiply-adds a second, on as many threads as there are.
fn products(criterion: &mut Criterion) {
    let checks = [
        ("no check", 256, EmuOptions::default()),
        ("race_check", 64, EmuOptions::race_checked()),
        ("memory_check", 128, EmuOptions { memory_check: true, ..EmuOptions::default() }),
    ];
    let mut group = criterion.benchmark_group("emulator/product");
    group.sample_size(10);
    for (check, n, options) in checks {
        let len = (n * n) as usize;
        let (x, mut c) = (vec![1f32; len], vec![0f32; len]);
        let addresses = [x.as_ptr() as u64, c.as_ptr() as u64];
        if options.memory_check {
            for address in addresses {
                allocations::announce(address, 4 * len, 0);
            }
            allocations::write(addresses[0], 4 * len);
        }
        // SAFETY: the two vectors outlive every launch below and are used by one at a time.
        let (x, c) =
            unsafe { (Global::from_raw(addresses[0], len), GlobalMut::from_raw(c.as_mut_ptr() as u64, len)) };
        let shape = LaunchShape::new((n / TILE, n / TILE), TILE * TILE).shared(tiles().bytes);
        group.throughput(Throughput::Elements(u64::from(n).pow(3)));
        group.bench_function(format!("{check}/{n} × {n}"), |bencher| {
            bencher.iter(|| {
                let args = product::Args { a: x, b: x, c, n };
                // SAFETY: see above.
                if let Err(fault) = unsafe { emu::launch(&product::kernel(), shape, args, &options) } {
                    eprintln!("{fault}");
                }
            });
        });
        if options.memory_check {
            addresses.into_iter().for_each(allocations::forget);
        }
    }
    group.finish();
}

fn emulator(criterion: &mut Criterion) {
    // Vectors, so that the memory is aligned to them.
    let x: Vec<Vec4> = (0..LEN / 4).map(|i| Vec4::splat((i as f32).sin())).collect();
    let mut codes = vec![0u32; LEN / 4];
    let mut sums = vec![0f32; LEN / THREADS as usize];
    // SAFETY: the three vectors outlive every launch below and are used by one at a time.
    let (x, codes, sums) = unsafe {
        (
            Global::from_raw(x.as_ptr() as u64, LEN),
            GlobalMut::from_raw(codes.as_mut_ptr() as u64, codes.len()),
            GlobalMut::from_raw(sums.as_mut_ptr() as u64, sums.len()),
        )
    };
    let mut group = criterion.benchmark_group("emulator");
    group.throughput(Throughput::Elements(LEN as u64)).sample_size(10);
    for threads in [1, 2] {
        let Ok(pool) = rayon::ThreadPoolBuilder::new().num_threads(threads).build() else {
            eprintln!("no thread pool of {threads} threads");
            continue;
        };
        let launch = |run: &(dyn Fn() -> Result<(), emu::Fault> + Sync)| {
            if let Err(fault) = pool.install(run) {
                eprintln!("{fault}");
            }
        };
        let options = EmuOptions::default();
        group.bench_function(format!("vectorized/{threads} threads"), |bencher| {
            let shape = LaunchShape::new((LEN / 4) as u32 / THREADS, THREADS);
            let args = quantize::Args { x, y: codes, inverse: 127.0, vectors: (LEN / 4) as u32 };
            // SAFETY: see above.
            let run = || unsafe { emu::launch(&quantize::kernel(), shape, args, &options) };
            bencher.iter(|| launch(&run));
        });
        group.bench_function(format!("block sums/{threads} threads"), |bencher| {
            let shape = LaunchShape::new(LEN as u32 / THREADS, THREADS).shared(THREADS / 32 * 4);
            // SAFETY: see above.
            let run = || unsafe {
                emu::launch(&block_sums::kernel(), shape, block_sums::Args { x, y: sums }, &options)
            };
            bencher.iter(|| launch(&run));
        });
    }
    group.finish();
}

criterion_group!(benches, emulator, products);
criterion_main!(benches);
