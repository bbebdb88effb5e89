//! A layout that does not fit the shared memory that the launch asks for.

use crate::support::{at, caught, modes, pass, write};
use simt::emu::FaultKind;
use simt::{GlobalMut, LaunchShape, Shared, SharedPlan, kernel, thread};

const SOURCE: &str = include_str!("shared_size.rs");

struct Layout {
    keys: Shared<u32>,
    values: Shared<u32>,
    bytes: u32,
}

const fn layout(rows: u32) -> Layout {
    let mut plan = SharedPlan::new();
    let (keys, values) = (plan.array(rows), plan.array(rows));
    Layout { keys, values, bytes: plan.bytes() }
}

#[kernel]
fn gather(y: GlobalMut<u32>) {
    let t = thread::thread_idx_x();
    let shared = layout(thread::block_dim_x());
    shared.keys.store(t, 63 - t);
    shared.values.store(t, 100 + t); // BUG: the second array reaches past the launch
    thread::sync_threads();
    y.store(t as usize, shared.values.load(shared.keys.load(t)));
}

#[test]
fn a_layout_for_more_rows_than_the_launch_has_room_for() {
    for options in modes() {
        let mut y = vec![0; 64];
        let args = gather::Args { y: write(&mut y) };
        // The host sized the launch for 40 rows and launched 64.
        let shape = LaunchShape::new(1, 64);
        let place = at!("the second array reaches past the launch", block 0, thread 16);
        let kind = caught(gather::kernel(), shape.shared(layout(40).bytes), args, &options, place);
        assert_eq!(kind, FaultKind::SharedTooSmall { needed: 256 + 68, launched_with: 320 });
        pass(gather::kernel(), shape.shared(layout(64).bytes), args, &options);
        assert!((0..64).all(|t| y[t] as usize == 100 + 63 - t));
    }
}
