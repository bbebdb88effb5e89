//! Kernels that only move bytes, with the access pattern of the kernels that they stand beside: what a device
//! reaches with no arithmetic in the way.
//!
//! | kernel | reads : writes | stands beside |
//! |---|---|---|
//! | [`read_four`](fn@read_four) | 4 : 0 | column scales |
//! | [`narrow_four`](fn@narrow_four) | 4 : 1 | quantizing f32 |
//! | [`widen_four`](fn@widen_four) | 1 : 4 | dequantizing f32 |
//! | [`copy_four`](fn@copy_four) | 4 : 4 | a plain copy |
//!
//! Each thread has eight accesses of 16 bytes (or the 4 bytes on the narrow side) in flight, `stride` vectors
//! apart, as consecutive blocks cover consecutive memory.

use glam::UVec4;
use simt::{Global, GlobalMut, kernel, thread, unroll};

/// Vectors that one thread has in flight.
pub const VECTORS_PER_THREAD: u32 = 8;

/// Where this thread's vector `i` is: blocks take 8 × 256 vectors in a row, a warp 32 neighbours at a time.
#[inline(always)]
fn vector(i: usize) -> usize {
    let block = thread::block_dim_x() as usize;
    thread::block_idx_x() as usize * block * VECTORS_PER_THREAD as usize
        + i * block
        + thread::thread_idx_x() as usize
}

/// Whether all vectors of this block exist. Its accesses are then unconditional, and all loads in flight at once.
#[inline(always)]
fn whole_block(vectors: u64) -> bool {
    (thread::block_idx_x() as u64 + 1) * (thread::block_dim_x() * VECTORS_PER_THREAD) as u64 <= vectors
}

/// Reads `vectors` × 16 bytes; writes a word only where all bits of a thread's vectors cancel to a value that
/// random data does not have.
#[kernel(system = roofline, max_threads = 256)]
pub fn read_four(source: Global<u32>, sink: GlobalMut<u32>, vectors: u64) {
    let load = |i| source.load_vector_streaming::<UVec4>(vector(i) * 4);
    let mut all = UVec4::ZERO;
    if whole_block(vectors) {
        let x = [load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7)];
        unroll!(for i in 0..8 {
            all ^= x[i];
        });
    } else {
        unroll!(for i in 0..8 {
            if (vector(i) as u64) < vectors {
                all ^= load(i);
            }
        });
    }
    if all.x ^ all.y ^ all.z ^ all.w == 0x9e37_79b9 {
        sink.atomic_add(0, 1);
    }
}

/// Reads `vectors` × 16 bytes and writes the exclusive or of each vector's words: 4 bytes.
#[kernel(system = roofline, max_threads = 256)]
pub fn narrow_four(source: Global<u32>, target: GlobalMut<u32>, vectors: u64) {
    let load = |i| source.load_vector_streaming::<UVec4>(vector(i) * 4);
    let store = |i, x: UVec4| target.store_streaming(vector(i), x.x ^ x.y ^ x.z ^ x.w);
    if whole_block(vectors) {
        let x = [load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7)];
        unroll!(for i in 0..8 {
            store(i, x[i]);
        });
    } else {
        unroll!(for i in 0..8 {
            if (vector(i) as u64) < vectors {
                store(i, load(i));
            }
        });
    }
}

/// Reads `vectors` × 4 bytes and writes each word four times: 16 bytes.
#[kernel(system = roofline, max_threads = 256)]
pub fn widen_four(source: Global<u32>, target: GlobalMut<u32>, vectors: u64) {
    let load = |i| source.load_streaming(vector(i));
    let store = |i, x| target.store_vector_streaming::<UVec4>(vector(i) * 4, UVec4::splat(x));
    if whole_block(vectors) {
        let x = [load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7)];
        unroll!(for i in 0..8 {
            store(i, x[i]);
        });
    } else {
        unroll!(for i in 0..8 {
            if (vector(i) as u64) < vectors {
                store(i, load(i));
            }
        });
    }
}

/// Copies `vectors` × 16 bytes.
#[kernel(system = roofline, max_threads = 256)]
pub fn copy_four(source: Global<u32>, target: GlobalMut<u32>, vectors: u64) {
    let load = |i| source.load_vector_streaming::<UVec4>(vector(i) * 4);
    let store = |i, x| target.store_vector_streaming::<UVec4>(vector(i) * 4, x);
    if whole_block(vectors) {
        let x = [load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7)];
        unroll!(for i in 0..8 {
            store(i, x[i]);
        });
    } else {
        unroll!(for i in 0..8 {
            if (vector(i) as u64) < vectors {
                store(i, load(i));
            }
        });
    }
}

/// The launch over `vectors` vectors; `None` where the grid cannot hold them.
#[cfg(not(target_arch = "nvptx64"))]
pub fn launch(vectors: u64) -> Option<simt::LaunchShape> {
    let blocks = u32::try_from(vectors.div_ceil(256 * VECTORS_PER_THREAD as u64)).ok()?;
    (blocks <= i32::MAX as u32).then(|| simt::LaunchShape::new(blocks, 256))
}

/// Every kernel instance of the system.
#[cfg(not(target_arch = "nvptx64"))]
pub fn kernels() -> impl Iterator<Item = &'static simt::KernelInfo> {
    [read_four::INSTANCES, narrow_four::INSTANCES, widen_four::INSTANCES, copy_four::INSTANCES]
        .into_iter()
        .flatten()
}
