//! Vectors that do not start at a multiple of their size: a GPU stops the grid at them.

use crate::support::{at, caught, modes, pass, read, write};
use glam::Vec4;
use simt::emu::{FaultKind, Space};
use simt::{Global, GlobalMut, LaunchShape, Shared, SharedPlan, kernel, thread};

const SOURCE: &str = include_str!("alignment.rs");

/// 20 rows of three numbers.
fn rows() -> Vec<Vec4> {
    (0..15).map(|i| Vec4::splat(4.0 * i as f32) + Vec4::new(0.0, 1.0, 2.0, 3.0)).collect()
}

#[kernel]
fn row(x: Global<f32>, y: GlobalMut<f32>) {
    let i = thread::index_1d();
    let v: Vec4 = x.load_vector(3 * i); // BUG: a row is no vector
    y.store(i, v.x + v.y + v.z);
}

#[kernel(args = row)]
fn row_fixed(x: Global<f32>, y: GlobalMut<f32>) {
    let i = thread::index_1d();
    y.store(i, x.load(3 * i) + x.load(3 * i + 1) + x.load(3 * i + 2));
}

#[test]
fn global() {
    let rows = rows();
    let x: &[f32] = bytemuck::cast_slice(&rows);
    for options in modes() {
        let mut y = vec![0f32; 16];
        let args = row::Args { x: read(x), y: write(&mut y) };
        let shape = LaunchShape::new(2, 8);
        let kind = caught(row::kernel(), shape, args, &options, at!("a row is no vector", block 0, thread 1));
        assert_eq!(kind, FaultKind::Misaligned { space: Space::Global, index: 3, bytes: 16, off_by: 12 });
        pass(row_fixed::kernel(), shape, args, &options);
        assert!(y.iter().enumerate().all(|(i, y)| *y == 9.0 * i as f32 + 3.0));
    }
}

#[kernel]
fn store(y: GlobalMut<u8>, first: u32) {
    let i = thread::index_1d();
    y.store_vector(first as usize + 4 * i, 0x0403_0201u32); // BUG: the offset spoils it
}

#[test]
fn a_base_that_is_not_aligned() {
    for options in modes() {
        let mut words = vec![0u32; 17];
        let y: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        let shape = LaunchShape::new(2, 8);
        let place = at!("the offset spoils it", block 0, thread 0);
        // Element 2 of the handle is aligned only if the handle is: this one starts one byte late.
        let kind = caught(
            store::kernel(),
            shape,
            store::Args { y: write(&mut y[1..68]), first: 2 },
            &options,
            place,
        );
        assert_eq!(kind, FaultKind::Misaligned { space: Space::Global, index: 2, bytes: 4, off_by: 3 });
        pass(store::kernel(), shape, store::Args { y: write(&mut y[1..68]), first: 3 }, &options);
        assert!(y[4..].iter().enumerate().all(|(i, y)| *y as usize == i % 4 + 1 || i >= 64));
    }
}

const fn tile() -> Shared<u16> {
    let mut plan = SharedPlan::new();
    plan.array(66)
}

#[kernel]
fn pairs(y: GlobalMut<u32>) {
    let (tile, t) = (tile(), thread::thread_idx_x());
    tile.store(2 * t + 1, t as u16);
    tile.store(2 * t + 2, t as u16);
    let pair: u32 = tile.load_vector(2 * t + 1); // BUG: an odd start
    y.store(thread::index_1d(), pair);
}

#[kernel(args = pairs)]
fn pairs_fixed(y: GlobalMut<u32>) {
    let (tile, t) = (tile(), thread::thread_idx_x());
    tile.store(2 * t, t as u16);
    tile.store(2 * t + 1, t as u16);
    let pair: u32 = tile.load_vector(2 * t);
    y.store(thread::index_1d(), pair);
}

#[test]
fn shared() {
    let shape = LaunchShape::new(2, 32).shared(132);
    for options in modes() {
        let mut y = vec![0; 64];
        let args = pairs::Args { y: write(&mut y) };
        let kind = caught(pairs::kernel(), shape, args, &options, at!("an odd start", block 0, thread 0));
        assert_eq!(kind, FaultKind::Misaligned { space: Space::Shared, index: 1, bytes: 4, off_by: 2 });
        pass(pairs_fixed::kernel(), shape, args, &options);
        assert!(y.iter().enumerate().all(|(i, y)| *y as usize == (i % 32) * 0x1_0001));
    }
}
