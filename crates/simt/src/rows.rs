//! Matrices and slices of global memory: handles that know their lengths on the device, too.
//!
//! [`Global::rows`] makes a matrix of a handle, [`Global::slice`] a slice. Elements of a matrix are named by
//! row and column. Loads and stores are those of the handle, at no cost but the index: `row · columns +
//! column`. The emulator reports an access outside by row and column, also where it is inside the array, in
//! another row. Where an index may lie outside, [`Rows::get`] and [`Slice::get`] look, on both sides.
//!
//! ```
//! use simt::emu::{self, EmuOptions};
//! use simt::{Global, GlobalMut, LaunchShape, kernel, thread};
//!
//! /// `y`, \[columns, rows\], becomes `x`, \[rows, columns\], transposed: a thread for each element.
//! #[kernel]
//! fn transpose(x: Global<f32>, y: GlobalMut<f32>, rows: u32, columns: u32) {
//!     let (x, y) = (x.rows(rows, columns), y.rows(columns, rows));
//!     let (row, column) = (thread::block_idx_x(), thread::thread_idx_x());
//!     if let Some(value) = x.get(row, column) {
//!         y.store(column, row, value);
//!     }
//! }
//!
//! fn main() {
//!     let x = [1f32, 2.0, 3.0, 4.0, 5.0, 6.0];
//!     let mut y = [0f32; 6];
//!     // SAFETY: the memory lives, and nothing else uses it meanwhile.
//!     let result = unsafe {
//!         let x = Global::from_raw(x.as_ptr() as u64, 6);
//!         let y = GlobalMut::from_raw(y.as_mut_ptr() as u64, 6);
//!         let args = transpose::Args { x, y, rows: 2, columns: 3 };
//!         emu::launch(&transpose::kernel(), LaunchShape::new(2, 32), args, &EmuOptions::race_checked())
//!     };
//!     assert_eq!(result, Ok(()));
//!     assert_eq!(y, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
//! }
//! ```

#[cfg(not(target_arch = "nvptx64"))]
use crate::emu;
use crate::{Global, GlobalMut, Pod};

/// A matrix in global memory, to read: row after row.
#[derive(Clone, Copy, Debug)]
pub struct Rows<T> {
    memory: Global<T>,
    rows: u32,
    columns: u32,
}

/// A matrix in global memory, to read and write: row after row.
#[derive(Clone, Copy, Debug)]
pub struct RowsMut<T> {
    memory: GlobalMut<T>,
    rows: u32,
    columns: u32,
}

/// A part of an array in global memory, to read.
#[derive(Clone, Copy, Debug)]
pub struct Slice<T> {
    memory: Global<T>,
    len: u32,
}

/// A part of an array in global memory, to read and write.
#[derive(Clone, Copy, Debug)]
pub struct SliceMut<T> {
    memory: GlobalMut<T>,
    len: u32,
}

macro_rules! views {
    ($handle:ident, $rows:ident, $slice:ident) => {
        impl<T: Pod> $handle<T> {
            /// The first `rows · columns` elements as a matrix; the handle must have as many.
            #[crate::device]
            pub fn rows(self, rows: u32, columns: u32) -> $rows<T> {
                #[cfg(not(target_arch = "nvptx64"))]
                emu::check_matrix(self.len(), (rows, columns));
                $rows { memory: self, rows, columns }
            }

            /// `len` elements from element `start` on; the handle must have them.
            #[crate::device]
            pub fn slice(self, start: usize, len: u32) -> $slice<T> {
                $slice { memory: self.part(start, len as usize), len }
            }
        }

        impl<T: Pod> $rows<T> {
            /// How many rows there are.
            #[inline(always)]
            pub fn rows(self) -> u32 {
                self.rows
            }

            /// How many columns there are.
            #[inline(always)]
            pub fn columns(self) -> u32 {
                self.columns
            }

            /// Row `row`.
            #[crate::device]
            pub fn row(self, row: u32) -> $slice<T> {
                let start = self.index::<[T; 0]>(row, 0, false);
                $slice { memory: self.memory.part(start, self.columns as usize), len: self.columns }
            }

            /// The element of a row and a column, or `None` if there is none.
            #[crate::device]
            pub fn get(self, row: u32, column: u32) -> Option<T> {
                if row < self.rows && column < self.columns { Some(self.load(row, column)) } else { None }
            }

            /// The element of a row and a column. PTX: `ld.global`.
            #[crate::device]
            pub fn load(self, row: u32, column: u32) -> T {
                self.load_vector::<T>(row, column)
            }

            /// The bytes of one `V` (1, 2, 4, 8 or 16 bytes) from an element on, all of its row, whose
            /// address must be a multiple of `V`'s size. PTX: `ld.global`, `.v2`, `.v4`.
            #[crate::device]
            pub fn load_vector<V: Pod>(self, row: u32, column: u32) -> V {
                self.memory.load_vector(self.index::<V>(row, column, false))
            }

            /// Which element of the array it is.
            #[crate::device]
            fn index<V: Pod>(self, row: u32, column: u32, write: bool) -> usize {
                #[cfg(not(target_arch = "nvptx64"))]
                emu::check_place::<T, V>((row, column), (self.rows, self.columns), write);
                #[cfg(target_arch = "nvptx64")]
                let _ = write;
                row as usize * self.columns as usize + column as usize
            }
        }

        impl<T: Pod> $slice<T> {
            /// How many elements there are.
            #[inline(always)]
            pub fn len(self) -> u32 {
                self.len
            }

            /// Whether there is none.
            #[inline(always)]
            pub fn is_empty(self) -> bool {
                self.len == 0
            }

            /// Element `index`, or `None` if there is none.
            #[crate::device]
            pub fn get(self, index: u32) -> Option<T> {
                if index < self.len { Some(self.load(index)) } else { None }
            }

            /// Element `index`. PTX: `ld.global`.
            #[crate::device]
            pub fn load(self, index: u32) -> T {
                self.memory.load(index as usize)
            }

            /// The bytes of one `V` (1, 2, 4, 8 or 16 bytes) from element `index` on, whose address must be a
            /// multiple of `V`'s size. PTX: `ld.global`, `.v2`, `.v4`.
            #[crate::device]
            pub fn load_vector<V: Pod>(self, index: u32) -> V {
                self.memory.load_vector(index as usize)
            }
        }
    };
}
views!(Global, Rows, Slice);
views!(GlobalMut, RowsMut, SliceMut);

impl<T: Pod> Rows<T> {
    /// [`load_vector`](Self::load_vector) of what no thread of the launch writes. PTX: `ld.global.nc`.
    #[crate::device]
    pub fn load_vector_readonly<V: Pod>(self, row: u32, column: u32) -> V {
        self.memory.load_vector_readonly(self.index::<V>(row, column, false))
    }

    /// [`load_vector`](Self::load_vector) of what no thread of the launch writes and none reads again. PTX:
    /// `ld.global.nc.L1::no_allocate`.
    #[crate::device]
    pub fn load_vector_streaming<V: Pod>(self, row: u32, column: u32) -> V {
        self.memory.load_vector_streaming(self.index::<V>(row, column, false))
    }
}

impl<T: Pod> RowsMut<T> {
    /// The same matrix, for reading.
    #[inline(always)]
    pub fn as_const(self) -> Rows<T> {
        Rows { memory: self.memory.as_const(), rows: self.rows, columns: self.columns }
    }

    /// Writes the element of a row and a column. PTX: `st.global`.
    #[crate::device]
    pub fn store(self, row: u32, column: u32, value: T) {
        self.store_vector::<T>(row, column, value)
    }

    /// Writes the bytes of one `V` (1, 2, 4, 8 or 16 bytes) from an element on, all of its row, whose address
    /// must be a multiple of `V`'s size. PTX: `st.global`, `.v2`, `.v4`.
    #[crate::device]
    pub fn store_vector<V: Pod>(self, row: u32, column: u32, value: V) {
        self.memory.store_vector(self.index::<V>(row, column, true), value)
    }
}

impl<T: Pod> SliceMut<T> {
    /// The same elements, for reading.
    #[inline(always)]
    pub fn as_const(self) -> Slice<T> {
        Slice { memory: self.memory.as_const(), len: self.len }
    }

    /// Writes element `index`. PTX: `st.global`.
    #[crate::device]
    pub fn store(self, index: u32, value: T) {
        self.memory.store(index as usize, value)
    }

    /// Writes the bytes of one `V` (1, 2, 4, 8 or 16 bytes) from element `index` on, whose address must be a
    /// multiple of `V`'s size. PTX: `st.global`, `.v2`, `.v4`.
    #[crate::device]
    pub fn store_vector<V: Pod>(self, index: u32, value: V) {
        self.memory.store_vector(index as usize, value)
    }
}
