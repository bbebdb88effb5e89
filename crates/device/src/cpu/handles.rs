//! The memory behind handles of the CPU backend, for code that does a kernel's work without the emulator.

use simt::{Global, GlobalMut, Pod};

/// The memory of a handle.
///
/// # Safety
/// It is host memory that is there for 'a, and nothing writes it meanwhile.
pub unsafe fn slice<'a, T: Pod>(handle: Global<T>) -> &'a [T] {
    if handle.is_empty() {
        return &[];
    }
    // SAFETY: the caller's word; the backend aligns what it allocates.
    unsafe { std::slice::from_raw_parts(super::host(handle.address()).cast(), handle.len()) }
}

/// The same for writing.
///
/// # Safety
/// As [`slice()`], and nothing else touches it meanwhile.
pub unsafe fn slice_mut<'a, T: Pod>(handle: GlobalMut<T>) -> &'a mut [T] {
    if handle.is_empty() {
        return &mut [];
    }
    simt::emu::allocations::write(handle.address(), std::mem::size_of::<T>() * handle.len());
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts_mut(super::host(handle.address()).cast(), handle.len()) }
}
