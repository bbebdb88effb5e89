//! Panics in a kernel: on the device the grid would trap.

use crate::support::{at, caught, modes, pass, read, write};
use simt::emu::FaultKind;
use simt::{Global, GlobalMut, LaunchShape, kernel, thread};

const SOURCE: &str = include_str!("panics.rs");

fn shape() -> LaunchShape {
    LaunchShape::new(2, 32)
}

#[kernel]
fn mean(sums: Global<u32>, counts: Global<u32>, y: GlobalMut<u32>) {
    let i = thread::index_1d();
    let mean = sums.load(i) / counts.load(i); // BUG: a row may be empty
    y.store(i, mean);
}

#[kernel(args = mean)]
fn mean_fixed(sums: Global<u32>, counts: Global<u32>, y: GlobalMut<u32>) {
    let i = thread::index_1d();
    let mean = sums.load(i) / counts.load(i).max(1);
    y.store(i, mean);
}

#[test]
fn a_division_by_zero() {
    let sums: Vec<u32> = (0..64).map(|i| if i == 40 { 0 } else { 3 * i }).collect();
    let counts: Vec<u32> = (0..64).map(|i| if i == 40 { 0 } else { 3 }).collect();
    for options in modes() {
        let mut y = vec![0; 64];
        let args = mean::Args { sums: read(&sums), counts: read(&counts), y: write(&mut y) };
        let kind =
            caught(mean::kernel(), shape(), args, &options, at!("a row may be empty", block 1, thread 8));
        assert_eq!(kind, FaultKind::Panic { message: "attempt to divide by zero".into() });
        pass(mean_fixed::kernel(), shape(), args, &options);
        assert!((0..64).all(|i| y[i as usize] == if i == 40 { 0 } else { i }));
    }
}

#[kernel]
fn table(x: Global<u32>, y: GlobalMut<u32>) {
    const SQUARES: [u32; 4] = [0, 1, 4, 9];
    let i = thread::index_1d();
    // After a barrier, so that the other threads are parked when one panics.
    thread::sync_threads();
    let square = SQUARES[x.load(i) as usize]; // BUG: the table ends
    y.store(i, square);
}

#[kernel(args = table)]
fn table_fixed(x: Global<u32>, y: GlobalMut<u32>) {
    const SQUARES: [u32; 4] = [0, 1, 4, 9];
    let i = thread::index_1d();
    thread::sync_threads();
    let square = SQUARES[x.load(i) as usize % 4];
    y.store(i, square);
}

#[test]
fn an_index() {
    let x: Vec<u32> = (0..64).map(|i| i % 4 + (i == 7) as u32).collect();
    for options in modes() {
        let mut y = vec![0; 64];
        let args = table::Args { x: read(&x), y: write(&mut y) };
        let kind = caught(table::kernel(), shape(), args, &options, at!("the table ends", block 0, thread 7));
        let message = "index out of bounds: the len is 4 but the index is 4".to_string();
        assert_eq!(kind, FaultKind::Panic { message });
        pass(table_fixed::kernel(), shape(), args, &options);
        assert!((0..64).all(|i| y[i as usize] == (x[i as usize] % 4).pow(2)));
    }
}

#[kernel]
fn checked(x: Global<u32>, y: GlobalMut<u32>) {
    let i = thread::index_1d();
    assert!(x.load(i) < 10, "{} is no digit", x.load(i)); // BUG: what the kernel demands
    y.store(i, x.load(i));
}

#[test]
fn an_assertion() {
    for options in modes() {
        let mut x = vec![9; 64];
        let mut y = vec![0; 64];
        x[33] = 11;
        let args = checked::Args { x: read(&x), y: write(&mut y) };
        let place = at!("what the kernel demands", block 1, thread 1);
        let kind = caught(checked::kernel(), shape(), args, &options, place);
        assert_eq!(kind, FaultKind::Panic { message: "11 is no digit".into() });
        x[33] = 1;
        pass(checked::kernel(), shape(), checked::Args { x: read(&x), y: write(&mut y) }, &options);
        assert_eq!(x, y);
    }
}
