//! Global memory: widths and cache hints.

use glam::Vec4;
use simt::{Global, GlobalMut, Pod, kernel, thread};

/// Copies of the input that the output holds.
pub const COPIES: usize = 6;

/// Copies `count` units of `V` once for each pair of hints.
#[kernel(system = probe, instances(u8, u16, u32, u64, Vec4))]
pub fn hints<V: Pod>(x: Global<u8>, out: GlobalMut<u8>, count: u32) {
    let i = thread::index_1d();
    if i >= count as usize {
        return;
    }
    let size = size_of::<V>();
    let (at, copy) = (i * size, count as usize * size);
    out.store_vector::<V>(at, x.load_vector(at));
    out.store_vector::<V>(at + copy, x.load_vector_readonly(at));
    out.store_vector::<V>(at + 2 * copy, x.load_vector_streaming(at));
    out.store_vector_streaming::<V>(at + 3 * copy, x.load_vector(at));
    // What this thread wrote itself, read back through the handle it was written through and as a constant
    // one.
    out.store_vector::<V>(at + 4 * copy, out.load_vector(at + 3 * copy));
    out.store_vector::<V>(at + 5 * copy, out.as_const().load_vector(at + 2 * copy));
}
