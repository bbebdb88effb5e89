//! What an element of global or shared memory is chosen by.
//!
//! Each kind of memory has one type of index. A trait with that type as its only member says so, where a
//! plain parameter would make rustc advise `try_into().unwrap()`, which no kernel wants.

mod sealed {
    pub trait Sealed {}
    impl Sealed for usize {}
    impl Sealed for u32 {}
}

/// The index of an element of global memory: a `usize`, as buffers may be larger than 4 GiB.
///
/// ```compile_fail,E0277
/// # use simt::{GlobalMut, kernel, thread};
/// #[kernel]
/// fn clear(x: GlobalMut<u32>) {
///     x.store(thread::thread_idx_x(), 0); // a `u32`
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "an index into global memory is a `usize`",
    label = "this is a `{Self}`: write `… as usize`"
)]
pub trait GlobalIndex: sealed::Sealed + Copy {
    #[doc(hidden)]
    fn index(self) -> usize;
}

impl GlobalIndex for usize {
    #[inline(always)]
    fn index(self) -> usize {
        self
    }
}

/// The index of an element of shared memory: a `u32`, as a block has at most 227 KiB.
///
/// ```compile_fail,E0277
/// # use simt::{Shared, kernel, thread};
/// # const X: Shared<u32> = simt::SharedPlan::new().array(32);
/// #[kernel]
/// fn clear() {
///     X.store(thread::thread_idx_x() as usize, 0);
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "an index into shared memory is a `u32`",
    label = "this is a `{Self}`: write `… as u32`"
)]
pub trait SharedIndex: sealed::Sealed + Copy {
    #[doc(hidden)]
    fn index(self) -> u32;
}

impl SharedIndex for u32 {
    #[inline(always)]
    fn index(self) -> u32 {
        self
    }
}
