//! Accesses outside of a matrix, of a row, or of a slice, most of them inside the array.

use crate::support::{at, caught, modes, pass, read, write};
use simt::emu::{FaultKind, Space};
use simt::{Global, GlobalMut, LaunchShape, kernel, thread};

const SOURCE: &str = include_str!("matrices.rs");

/// Five rows of seven columns, and a thread for each place of eight by eight.
const ROWS: u32 = 5;
const COLUMNS: u32 = 7;

fn shape() -> LaunchShape {
    LaunchShape::new(8, 8)
}

#[kernel]
fn doubled(x: Global<u32>, y: GlobalMut<u32>, rows: u32, columns: u32, mistake: u32) {
    let (x, y) = (x.rows(rows, columns), y.rows(rows, columns));
    let (row, column) = (thread::block_idx_x(), thread::thread_idx_x());
    if mistake == 1 && row < rows {
        let value = x.load(row, column); // BUG: the last thread has no column
        y.store(row, column % columns, value);
    }
    if mistake == 2 && column < columns {
        y.store(row, column, 1); // BUG: the last blocks have no row
    }
    if let Some(value) = x.get(row, column) {
        y.store(row, column, 2 * value);
    }
}

#[test]
fn a_place_outside() {
    let x: Vec<u32> = (0..ROWS * COLUMNS).collect();
    for options in modes() {
        let mut y = vec![0; x.len()];
        let mut run = |mistake, place| {
            let args = doubled::Args { x: read(&x), y: write(&mut y), rows: ROWS, columns: COLUMNS, mistake };
            caught(doubled::kernel(), shape(), args, &options, place)
        };
        let of = [ROWS, COLUMNS];
        let (bytes, element_bytes) = (4, 4);
        let kind = run(1, at!("the last thread has no column", block 0, thread 7));
        assert_eq!(kind, FaultKind::OutsideMatrix { place: [0, 7], of, bytes, element_bytes, write: false });
        assert!(kind.to_string().contains("row 0, column 7 of 5 rows and 7 columns"), "{kind}");
        let kind = run(2, at!("the last blocks have no row", block 5, thread 0));
        assert_eq!(kind, FaultKind::OutsideMatrix { place: [5, 0], of, bytes, element_bytes, write: true });
        let args = doubled::Args { x: read(&x), y: write(&mut y), rows: ROWS, columns: COLUMNS, mistake: 0 };
        pass(doubled::kernel(), shape(), args, &options);
        assert!(x.iter().zip(&y).all(|(x, y)| 2 * x == *y));
    }
}

#[kernel]
fn parts(x: Global<u32>, y: GlobalMut<u32>, rows: u32, columns: u32, mistake: u32) {
    let matrix = x.rows(rows, columns); // BUG: more than the array has
    let t = thread::thread_idx_x();
    if t != 0 || thread::block_idx_x() != 0 {
        return;
    }
    if mistake == 1 {
        let pair: u64 = matrix.load_vector(1, 5); // BUG: half of it is in the next row
        y.store(0, pair as u32);
    }
    if mistake == 2 {
        y.store(0, matrix.row(2).load(6)); // BUG: the next row's first element
    }
    if mistake == 3 {
        y.store(0, matrix.row(4).len()); // BUG: there is no such row
    }
    let out = y.slice(2, 3);
    if mistake == 4 {
        out.store(3, 1); // BUG: the slice has three
    }
    if mistake == 5 {
        let _ = y.slice(14, 3); // BUG: the array has sixteen
    }
    let pair: u64 = matrix.load_vector(1, 4);
    out.store(0, pair as u32);
    out.store(1, matrix.row(3).load(5) + matrix.row(3).get(6).unwrap_or(1000));
    out.store(2, matrix.rows() * 100 + matrix.columns() * 10 + out.len());
}

#[test]
fn rows_and_slices() {
    let x = crate::support::aligned(|i| 10 * i, 24);
    for options in modes() {
        let mut y = vec![0; 16];
        let mut run = |rows, mistake, place| {
            let args = parts::Args { x: read(x), y: write(&mut y), rows, columns: 6, mistake };
            caught(parts::kernel(), shape(), args, &options, place)
        };
        let kind = run(5, 0, at!("more than the array has", block 0, thread 0));
        assert_eq!(kind, FaultKind::MatrixTooLarge { rows: 5, columns: 6, len: 24 });
        let (of, element_bytes, write_) = ([4, 6], 4, false);
        let kind = run(4, 1, at!("half of it is in the next row", block 0, thread 0));
        let place = [1, 5];
        assert_eq!(kind, FaultKind::OutsideMatrix { place, of, bytes: 8, element_bytes, write: write_ });
        let kind = run(4, 2, at!("the next row's first element", block 0, thread 0));
        let (space, index, bytes, len) = (Space::Global, 6, 4, 6);
        assert_eq!(kind, FaultKind::OutOfBounds { space, index, bytes, len, element_bytes, write: write_ });
        let kind = run(4, 3, at!("there is no such row", block 0, thread 0));
        let place = [4, 0];
        assert_eq!(kind, FaultKind::OutsideMatrix { place, of, bytes: 0, element_bytes, write: write_ });
        let kind = run(4, 4, at!("the slice has three", block 0, thread 0));
        let (index, len) = (3, 3);
        assert_eq!(kind, FaultKind::OutOfBounds { space, index, bytes, len, element_bytes, write: true });
        let kind = run(4, 5, at!("the array has sixteen", block 0, thread 0));
        let (index, bytes, len) = (14, 12, 16);
        assert_eq!(kind, FaultKind::OutOfBounds { space, index, bytes, len, element_bytes, write: write_ });
        let args = parts::Args { x: read(x), y: write(&mut y), rows: 4, columns: 6, mistake: 0 };
        pass(parts::kernel(), shape(), args, &options);
        assert_eq!(y[..6], [0, 0, 100, 230 + 1000, 463, 0]);
    }
}
