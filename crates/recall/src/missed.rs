//! Mistakes that the emulator does not see. A test that finds one of them fails, so that the table stays
//! true.

#[cfg(not(target_arch = "nvptx64"))]
use crate::case::Found;
#[cfg(not(target_arch = "nvptx64"))]
use simt::LaunchShape;
use simt::{Global, GlobalMut, kernel, thread};

#[kernel]
fn path_not_taken(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    let t = thread::thread_idx_x() as usize;
    let at = if bug != 0 && x.load(t) == 77 { 0 } else { t };
    y.store(at, 1);
}

#[kernel]
fn wrapping_index(x: Global<u32>, y: GlobalMut<u32>, bug: u32) {
    // 2^31 elements to a row: in 32 bits all rows begin at 0.
    let t = thread::thread_idx_x();
    let rows = if bug != 0 { 1u32 << 31 } else { 0 };
    let at = rows.wrapping_mul(2 * (t % 3)) + t;
    y.store(at as usize, x.load(t as usize));
}

#[cfg(not(target_arch = "nvptx64"))]
const PATHS: &str = "only paths that this input takes are run";

cases! { "missed";
    path_not_taken: "a race on a branch that no value takes", Found::Missed(PATHS), |bug, on| {
        let (x, mut y) = ([1; 64], [0; 64]);
        on.go(path_not_taken::kernel(), LaunchShape::new(1, 64),
            path_not_taken::Args { x: on.read(&x)?, y: on.write(&mut y)?, bug })
    };
    wrapping_index: "an index that wraps to a place in bounds",
        Found::Missed("the source asks for it; the place is in bounds"), |bug, on| {
            let (x, mut y) = ([1; 64], [0; 64]);
            on.go(wrapping_index::kernel(), LaunchShape::new(1, 64),
                wrapping_index::Args { x: on.read(&x)?, y: on.write(&mut y)?, bug })
        };
}
