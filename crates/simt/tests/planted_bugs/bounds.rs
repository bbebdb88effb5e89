//! Out of bounds by one.

use crate::support::{at, caught, modes, pass, read, write};
use simt::emu::{FaultKind, Space};
use simt::{Global, GlobalMut, LaunchShape, Shared, SharedPlan, kernel, thread};

const SOURCE: &str = include_str!("bounds.rs");
const LEN: usize = 70;

fn shape() -> LaunchShape {
    LaunchShape::new(3, 32)
}

#[kernel]
fn shift(x: Global<u32>, y: GlobalMut<u32>, len: u32) {
    let i = thread::index_1d();
    if i < len as usize {
        let next = x.load(i + 1); // BUG: reads one past
        y.store(i, next);
    }
}

#[kernel(args = shift)]
fn shift_fixed(x: Global<u32>, y: GlobalMut<u32>, len: u32) {
    let i = thread::index_1d();
    if i < len as usize {
        let next = if i + 1 < len as usize { x.load(i + 1) } else { 0 };
        y.store(i, next);
    }
}

#[test]
fn global_read() {
    let x: Vec<u32> = (0..LEN as u32).collect();
    for options in modes() {
        let mut y = vec![7; LEN];
        let args = shift::Args { x: read(&x), y: write(&mut y), len: LEN as u32 };
        let kind = caught(shift::kernel(), shape(), args, &options, at!("reads one past", block 2, thread 5));
        let expected = FaultKind::OutOfBounds {
            space: Space::Global,
            index: 70,
            bytes: 4,
            len: 70,
            element_bytes: 4,
            write: false,
        };
        assert_eq!(kind, expected);
        pass(shift_fixed::kernel(), shape(), args, &options);
        assert!(y.iter().copied().eq((1..LEN as u32).chain([0])));
    }
}

#[kernel]
fn prefetch(x: Global<u32>, first: u32, bytes: u32) {
    let i = thread::index_1d();
    x.prefetch(first as usize, bytes, i == 40); // BUG: a hint of what is not there
}

#[test]
fn prefetch_of_global_memory() {
    let x = vec![glam::UVec4::ZERO; 8];
    let x: &[u32] = bytemuck::cast_slice(&x);
    let run = |first: u32, bytes: u32| prefetch::Args { x: read(x), first, bytes };
    for options in modes() {
        let place = || at!("a hint of what is not there", block 1, thread 8);
        let kind = caught(prefetch::kernel(), shape(), run(4, 128), &options, place());
        let past = FaultKind::OutOfBounds {
            space: Space::Global,
            index: 4,
            bytes: 128,
            len: 32,
            element_bytes: 4,
            write: false,
        };
        assert_eq!(kind, past);
        let odd = |off_by| FaultKind::Misaligned { space: Space::Global, index: 3, bytes: 16, off_by };
        assert_eq!(caught(prefetch::kernel(), shape(), run(3, 16), &options, place()), odd(12));
        pass(prefetch::kernel(), shape(), run(4, 112), &options);
        pass(prefetch::kernel(), shape(), run(90, 0), &options);
    }
}

#[kernel]
fn fill(y: GlobalMut<u32>, len: u32) {
    let i = thread::index_1d();
    if i <= len as usize {
        y.store(i, 9); // BUG: writes one past
    }
}

#[kernel(args = fill)]
fn fill_fixed(y: GlobalMut<u32>, len: u32) {
    let i = thread::index_1d();
    if i < len as usize {
        y.store(i, 9);
    }
}

#[test]
fn global_write() {
    for options in modes() {
        // One element more than the handle reaches: the neighbour that the broken kernel would overwrite.
        let mut y = vec![7; LEN + 1];
        let args = fill::Args { y: write(&mut y[..LEN]), len: LEN as u32 };
        let kind = caught(fill::kernel(), shape(), args, &options, at!("writes one past", block 2, thread 6));
        let expected = FaultKind::OutOfBounds {
            space: Space::Global,
            index: 70,
            bytes: 4,
            len: 70,
            element_bytes: 4,
            write: true,
        };
        assert_eq!(kind, expected);
        pass(fill_fixed::kernel(), shape(), args, &options);
        assert_eq!((&y[..LEN], y[LEN]), (&[9; LEN][..], 7));
    }
}

struct Layout {
    tile: Shared<u16>,
    /// What lies behind the tile, and what a GPU would read and write there.
    next: Shared<u16>,
    bytes: u32,
}

const fn layout() -> Layout {
    let mut plan = SharedPlan::new();
    let (tile, next) = (plan.array(32), plan.array(32));
    Layout { tile, next, bytes: plan.bytes() }
}

#[kernel]
fn neighbour(y: GlobalMut<u16>) {
    let (shared, t) = (layout(), thread::thread_idx_x());
    shared.tile.store(t, t as u16);
    shared.next.store(t, 99);
    thread::sync_threads();
    let above = shared.tile.load(t + 1); // BUG: reads past the tile
    y.store(thread::index_1d(), above);
}

#[kernel(args = neighbour)]
fn neighbour_fixed(y: GlobalMut<u16>) {
    let (shared, t) = (layout(), thread::thread_idx_x());
    shared.tile.store(t, t as u16);
    shared.next.store(t, 99);
    thread::sync_threads();
    let above = shared.tile.load((t + 1) % 32);
    y.store(thread::index_1d(), above);
}

#[test]
fn shared_read() {
    let shape = LaunchShape::new(2, 32).shared(layout().bytes);
    for options in modes() {
        let mut y = vec![7; 64];
        let args = neighbour::Args { y: write(&mut y) };
        let place = at!("reads past the tile", block 0, thread 31);
        let kind = caught(neighbour::kernel(), shape, args, &options, place);
        let expected = FaultKind::OutOfBounds {
            space: Space::Shared,
            index: 32,
            bytes: 2,
            len: 32,
            element_bytes: 2,
            write: false,
        };
        assert_eq!(kind, expected);
        pass(neighbour_fixed::kernel(), shape, args, &options);
        assert!(y.iter().enumerate().all(|(i, y)| *y as usize == (i + 1) % 32));
    }
}

#[kernel]
fn halo(y: GlobalMut<u16>) {
    let (shared, t) = (layout(), thread::thread_idx_x());
    shared.tile.store(t + 1, t as u16); // BUG: writes past the tile
    thread::sync_threads();
    y.store(thread::index_1d(), shared.tile.load((t + 1) % 32));
}

#[kernel(args = halo)]
fn halo_fixed(y: GlobalMut<u16>) {
    let (shared, t) = (layout(), thread::thread_idx_x());
    shared.tile.store((t + 1) % 32, t as u16);
    thread::sync_threads();
    y.store(thread::index_1d(), shared.tile.load((t + 1) % 32));
}

#[test]
fn shared_write() {
    let shape = LaunchShape::new(2, 32).shared(layout().bytes);
    for options in modes() {
        let mut y = vec![7; 64];
        let args = halo::Args { y: write(&mut y) };
        let place = at!("writes past the tile", block 0, thread 31);
        let kind = caught(halo::kernel(), shape, args, &options, place);
        let expected = FaultKind::OutOfBounds {
            space: Space::Shared,
            index: 32,
            bytes: 2,
            len: 32,
            element_bytes: 2,
            write: true,
        };
        assert_eq!(kind, expected);
        pass(halo_fixed::kernel(), shape, args, &options);
        assert!(y.iter().enumerate().all(|(i, y)| *y as usize == i % 32));
    }
}
