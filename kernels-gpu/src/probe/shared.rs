//! Shared memory: widths and layouts.

use super::word;
use glam::Vec4;
use simt::{GlobalMut, Pod, Shared, SharedPlan, kernel, thread};

/// The most threads of a block.
pub const THREADS: u32 = 256;

/// The width probe's shared memory: bytes for one 16-byte vector a thread.
pub struct Bytes {
    bytes: Shared<u8>,
    /// Its size.
    pub size: u32,
}

/// Lays out the width probe's shared memory.
pub const fn bytes() -> Bytes {
    let mut plan = SharedPlan::new();
    let bytes = plan.array(THREADS * 16);
    Bytes { bytes, size: plan.bytes() }
}

/// Each thread writes 16 bytes in units of `V`; another reads them in units of `V` and copies them out. Then
/// once more the other way round: written as bytes, read as `V`.
#[kernel(system = probe, instances(u8, u16, u32, u64, Vec4), max_threads = 256)]
pub fn widths<V: Pod>(out: GlobalMut<u8>, seed: u32) {
    let (t, threads) = (thread::thread_idx_x(), thread::block_dim_x());
    let bytes = bytes().bytes;
    let size = size_of::<V>() as u32;
    let first = thread::block_idx_x() as usize * threads as usize * 32;
    // Through global memory: bytes become a `V`.
    for k in 0..16 {
        out.store(first + (t * 16 + k) as usize, word(seed, t * 16 + k, 0) as u8);
    }
    for unit in 0..16 / size {
        let at = t * 16 + unit * size;
        bytes.store_vector::<V>(at, out.load_vector(first + at as usize));
    }
    thread::sync_threads();
    let from = (t + 1) % threads * 16;
    for k in 0..16 {
        let byte = bytes.load(from + k);
        out.store(first + (t * 16 + k) as usize, byte);
    }
    thread::sync_threads();
    for k in 0..16 {
        bytes.store(t * 16 + k, word(seed, t * 16 + k, 1) as u8);
    }
    thread::sync_threads();
    for unit in 0..16 / size {
        let value: V = bytes.load_vector(from + unit * size);
        let at = (threads + t) * 16 + unit * size;
        out.store_vector(first + at as usize, value);
    }
}

/// Arrays of every element size, one after another.
pub struct Layout {
    a: Shared<u8>,
    b: Shared<u16>,
    c: Shared<u64>,
    d: Shared<u8>,
    e: Shared<Vec4>,
    f: Shared<u32>,
    /// The size of all.
    pub bytes: u32,
}

/// Lays out the arrays: lengths that leave gaps.
pub const fn layout() -> Layout {
    let mut plan = SharedPlan::new();
    let (a, b, c) = (plan.array(3), plan.array(5), plan.array(1));
    let (d, e, f) = (plan.array(33), plan.array(2), plan.array(7));
    Layout { a, b, c, d, e, f, bytes: plan.bytes() }
}

/// Words that the layout probe writes.
pub const LAYOUT_WORDS: usize = 3 + 5 + 2 + 33 + 8 + 7;

/// One thread fills all arrays, then reads all: where they overlapped, it would show.
#[kernel(system = probe)]
pub fn layouts(out: GlobalMut<u32>, seed: u32) {
    if thread::thread_idx_x() != 0 {
        return;
    }
    let l = layout();
    for i in 0..l.a.len() {
        l.a.store(i, word(seed, i, 0) as u8);
    }
    for i in 0..l.b.len() {
        l.b.store(i, word(seed, i, 1) as u16);
    }
    l.c.store(0, (word(seed, 0, 2) as u64) << 32 | word(seed, 1, 2) as u64);
    for i in 0..l.d.len() {
        l.d.store(i, word(seed, i, 3) as u8);
    }
    for i in 0..l.e.len() {
        let x = word(seed, i, 4) as i32 as f32;
        l.e.store(i, Vec4::new(x, x + 1.0, x + 2.0, x + 3.0));
    }
    for i in 0..l.f.len() {
        l.f.store(i, word(seed, i, 5));
    }
    let mut at = 0;
    for i in 0..l.a.len() {
        out.store(at + i as usize, l.a.load(i) as u32);
    }
    at += l.a.len() as usize;
    for i in 0..l.b.len() {
        out.store(at + i as usize, l.b.load(i) as u32);
    }
    at += l.b.len() as usize;
    out.store(at, l.c.load(0) as u32);
    out.store(at + 1, (l.c.load(0) >> 32) as u32);
    at += 2;
    for i in 0..l.d.len() {
        out.store(at + i as usize, l.d.load(i) as u32);
    }
    at += l.d.len() as usize;
    for i in 0..l.e.len() {
        let v = l.e.load(i);
        let first = at + 4 * i as usize;
        out.store(first, v.x.to_bits());
        out.store(first + 1, v.y.to_bits());
        out.store(first + 2, v.z.to_bits());
        out.store(first + 3, v.w.to_bits());
    }
    at += 8;
    for i in 0..l.f.len() {
        out.store(at + i as usize, l.f.load(i));
    }
}
