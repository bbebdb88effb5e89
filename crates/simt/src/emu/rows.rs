//! What matrices and slices of global memory are checked for ahead of the access itself.

use super::fault::{FaultKind, Space};
use super::lane::raise;
use bytemuck::Pod;
use core::mem::size_of;
use core::panic::Location;

/// An array of `len` elements has room for a matrix.
#[track_caller]
#[inline]
pub(crate) fn check_matrix(len: usize, (rows, columns): (u32, u32)) {
    if u64::from(rows) * u64::from(columns) > len as u64 {
        raise(Location::caller(), FaultKind::MatrixTooLarge { rows, columns, len: len as u64 });
    }
}

/// A `V` at a place lies in one row of the matrix.
#[track_caller]
#[inline]
pub(crate) fn check_place<T: Pod, V: Pod>(
    (row, column): (u32, u32),
    (rows, columns): (u32, u32),
    write: bool,
) {
    let (bytes, element_bytes) = (size_of::<V>(), size_of::<T>());
    let elements = bytes.div_ceil(element_bytes) as u64;
    if row >= rows || u64::from(column) + elements > columns.into() {
        let (place, of) = ([row, column], [rows, columns]);
        raise(Location::caller(), FaultKind::OutsideMatrix { place, of, bytes, element_bytes, write });
    }
}

/// An array of `len` elements has those of a slice.
#[track_caller]
#[inline]
pub(crate) fn check_slice<T: Pod>(len: usize, start: usize, count: usize) {
    if start > len || len - start < count {
        let (space, index, bytes, len) = (Space::Global, start as u64, count * size_of::<T>(), len as u64);
        let kind =
            FaultKind::OutOfBounds { space, index, bytes, len, element_bytes: size_of::<T>(), write: false };
        raise(Location::caller(), kind);
    }
}
