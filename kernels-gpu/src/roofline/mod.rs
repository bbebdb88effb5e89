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

/// Reads `vectors` × 16 bytes; writes a word only where all bits of a thread's vectors cancel to a value that
/// random data does not have.
#[kernel(system = roofline, max_threads = 256)]
pub fn read_four(source: Global<u32>, sink: GlobalMut<u32>, vectors: u64) {
    let mut x = [UVec4::ZERO; VECTORS_PER_THREAD as usize];
    unroll!(for i in 0..8 {
        if (vector(i) as u64) < vectors {
            x[i] = source.load_vector_streaming::<UVec4>(vector(i) * 4);
        }
    });
    let mut all = UVec4::ZERO;
    unroll!(for i in 0..8 {
        all ^= x[i];
    });
    if all.x ^ all.y ^ all.z ^ all.w == 0x9e37_79b9 {
        sink.atomic_add(0, 1);
    }
}

/// Reads `vectors` × 16 bytes and writes the sum of each vector's words: 4 bytes.
#[kernel(system = roofline, max_threads = 256)]
pub fn narrow_four(source: Global<u32>, target: GlobalMut<u32>, vectors: u64) {
    let mut x = [UVec4::ZERO; VECTORS_PER_THREAD as usize];
    unroll!(for i in 0..8 {
        if (vector(i) as u64) < vectors {
            x[i] = source.load_vector_streaming::<UVec4>(vector(i) * 4);
        }
    });
    unroll!(for i in 0..8 {
        if (vector(i) as u64) < vectors {
            target.store_streaming(vector(i), x[i].x ^ x[i].y ^ x[i].z ^ x[i].w);
        }
    });
}

/// Reads `vectors` × 4 bytes and writes each word four times: 16 bytes.
#[kernel(system = roofline, max_threads = 256)]
pub fn widen_four(source: Global<u32>, target: GlobalMut<u32>, vectors: u64) {
    let mut x = [0u32; VECTORS_PER_THREAD as usize];
    unroll!(for i in 0..8 {
        if (vector(i) as u64) < vectors {
            x[i] = source.load_streaming(vector(i));
        }
    });
    unroll!(for i in 0..8 {
        if (vector(i) as u64) < vectors {
            target.store_vector_streaming::<UVec4>(vector(i) * 4, UVec4::splat(x[i]));
        }
    });
}

/// Copies `vectors` × 16 bytes.
#[kernel(system = roofline, max_threads = 256)]
pub fn copy_four(source: Global<u32>, target: GlobalMut<u32>, vectors: u64) {
    let mut x = [UVec4::ZERO; VECTORS_PER_THREAD as usize];
    unroll!(for i in 0..8 {
        if (vector(i) as u64) < vectors {
            x[i] = source.load_vector_streaming::<UVec4>(vector(i) * 4);
        }
    });
    unroll!(for i in 0..8 {
        if (vector(i) as u64) < vectors {
            target.store_vector_streaming::<UVec4>(vector(i) * 4, x[i]);
        }
    });
}

/// Every kernel instance of the system.
#[cfg(not(target_arch = "nvptx64"))]
pub fn kernels() -> impl Iterator<Item = &'static simt::KernelInfo> {
    [read_four::INSTANCES, narrow_four::INSTANCES, widen_four::INSTANCES, copy_four::INSTANCES]
        .into_iter()
        .flatten()
}
