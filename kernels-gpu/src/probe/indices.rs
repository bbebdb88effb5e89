//! Where a thread is.

use simt::{GlobalMut, kernel, thread, warp};

/// Words that each thread writes.
pub const WORDS: usize = 15;

/// Writes every index and extent, for grids and blocks of up to three dimensions.
#[kernel(system = probe)]
pub fn indices(out: GlobalMut<u32>) {
    let block = (thread::block_idx_z() * thread::grid_dim_y() + thread::block_idx_y()) * thread::grid_dim_x()
        + thread::block_idx_x();
    let threads = thread::block_dim_x() * thread::block_dim_y() * thread::block_dim_z();
    let own = (thread::thread_idx_z() * thread::block_dim_y() + thread::thread_idx_y())
        * thread::block_dim_x()
        + thread::thread_idx_x();
    let first = (block * threads + own) as usize * WORDS;
    out.store(first, thread::thread_idx_x());
    out.store(first + 1, thread::thread_idx_y());
    out.store(first + 2, thread::thread_idx_z());
    out.store(first + 3, thread::block_dim_x());
    out.store(first + 4, thread::block_dim_y());
    out.store(first + 5, thread::block_dim_z());
    out.store(first + 6, thread::block_idx_x());
    out.store(first + 7, thread::block_idx_y());
    out.store(first + 8, thread::block_idx_z());
    out.store(first + 9, thread::grid_dim_x());
    out.store(first + 10, thread::grid_dim_y());
    out.store(first + 11, thread::grid_dim_z());
    out.store(first + 12, warp::lane_id());
    out.store(first + 13, thread::index_1d() as u32);
    out.store(first + 14, (thread::index_1d() >> 32) as u32);
}
