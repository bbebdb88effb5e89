//! A box that raw pointers may lead into.

use core::ops::Deref;
use core::ptr::NonNull;

/// Owns a value that raw pointers lead to: unlike a `Box`, moving or borrowing it claims no exclusive access.
pub(super) struct Fixed<T: ?Sized>(NonNull<T>);

impl<T: ?Sized> Fixed<T> {
    pub(super) fn new(value: Box<T>) -> Self {
        // SAFETY: a box is never null.
        Fixed(unsafe { NonNull::new_unchecked(Box::into_raw(value)) })
    }
}

impl<T: ?Sized> Deref for Fixed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: made from a box and owned until the drop; shared access only, what changes is in cells.
        unsafe { self.0.as_ref() }
    }
}

impl<T: ?Sized> Drop for Fixed<T> {
    fn drop(&mut self) {
        // SAFETY: made from a box, and dropped once.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}
