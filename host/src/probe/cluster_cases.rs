//! Cases of clusters.

use super::{Samples, one_output};
use crate::Buffer;
use crate::check::{Case, OutputElement};
use kernels_gpu::probe::atomics::Integer;
use kernels_gpu::probe::clusters;
use simt::cluster::ClusterWord;
use simt::{Kernel, LaunchShape};

/// Cases of every size of cluster: of one cluster, and of two, or as many as keep a GPU busy.
pub fn cases(samples: Samples) -> Vec<Case> {
    let mut cases = Vec::new();
    // Many threads at one word take the emulator long, in many orders.
    let is_small = samples == Samples::SMALL;
    let (many, several, threads) = if is_small { (2, 2, 32) } else { (40, 12, clusters::THREADS) };
    for grid in [(2u32, 1u32, 4u32), (6, 3, 8)] {
        let shape = LaunchShape::new(grid, 33);
        let len = (shape.grid.count() * 33) as usize * clusters::PLACE_WORDS as usize;
        let label = format!("grid={} threads=33", shape.grid);
        let args = |out: &mut Buffer<u32>| clusters::places::Args { out: out.global_mut() };
        // SAFETY: each thread writes its own words of the output.
        cases.push(unsafe { one_output(clusters::places::kernel(), label, shape, len, args) });
    }
    let reductions = [
        (clusters::reduce_2::kernel(), 2),
        (clusters::reduce_4::kernel(), 4),
        (clusters::reduce_8::kernel(), 8),
    ];
    for (kernel, size) in reductions {
        for (count, seed) in [(1u32, 1u32), (many, 2)] {
            let blocks = count * size;
            let shape = LaunchShape::new(blocks, clusters::THREADS).shared(clusters::sums().bytes);
            let len = (blocks * clusters::THREADS * clusters::ROUNDS) as usize;
            let label = format!("clusters={count} of {size} seed={seed}");
            let args = move |out: &mut Buffer<f32>| clusters::reduce_2::Args { out: out.global_mut(), seed };
            // SAFETY: each thread writes its own words of the output.
            cases.push(unsafe { one_output(kernel, label, shape, len, args) });
        }
    }
    for (kernel, size) in
        [(clusters::ring_2::kernel(), 2), (clusters::ring_4::kernel(), 4), (clusters::ring_8::kernel(), 8)]
    {
        for (count, seed) in [(1u32, 3u32), (many, 4)] {
            let blocks = count * size;
            let shape = LaunchShape::new(blocks, clusters::THREADS).shared(clusters::tiles().bytes);
            let len = (blocks * clusters::THREADS * clusters::ROUNDS) as usize;
            let label = format!("clusters={count} of {size} seed={seed}");
            let args = move |out: &mut Buffer<u32>| clusters::ring_2::Args { out: out.global_mut(), seed };
            // SAFETY: each thread writes its own words of the output.
            cases.push(unsafe { one_output(kernel, label, shape, len, args) });
        }
    }
    update_cases(&mut cases, clusters::update_2::kernel::<u32>(), (2, several, threads));
    update_cases(&mut cases, clusters::update_2::kernel::<i32>(), (2, several, threads));
    update_cases(&mut cases, clusters::update_4::kernel::<u32>(), (4, several, threads));
    update_cases(&mut cases, clusters::update_8::kernel::<i32>(), (8, several, threads));
    cases
}

fn update_cases<T: Integer + ClusterWord + OutputElement>(
    cases: &mut Vec<Case>,
    kernel: Kernel<clusters::update_2::Args<T>>,
    (size, several, threads): (u32, u32, u32),
) {
    for (count, seed) in [(1u32, 5u32), (several, 6)] {
        let blocks = count * size;
        let shape = LaunchShape::new(blocks, threads).shared(clusters::words::<T>().bytes);
        let words = clusters::CONTENDED + threads * 2 * clusters::OWN;
        let label = format!("clusters={count} of {size} threads={threads} seed={seed}");
        let args = move |out: &mut Buffer<T>| clusters::update_2::Args { out: out.global_mut(), seed };
        // SAFETY: each block has its words of the output, and each of its threads, THREADS at the most, its
        // own.
        cases.push(unsafe { one_output(kernel, label, shape, (blocks * words) as usize, args) });
    }
}
