//! Checked access to global and shared memory.

use super::block::{Lane, raise, with_lane};
use super::fault::{FaultKind, Space};
use super::race::Access;
use crate::atomic::{AtomicOp, AtomicWord};
use bytemuck::Pod;
use core::mem::size_of;
use core::panic::Location;

/// A block's shared memory, and which of its bytes somebody wrote.
pub(crate) struct SharedMemory {
    /// In units of 16 bytes, so that every vector can be aligned.
    bytes: Vec<u128>,
    written: Vec<bool>,
}

impl SharedMemory {
    pub(super) fn new(bytes: u32) -> Self {
        let bytes = bytes as usize;
        SharedMemory { bytes: vec![0; bytes.div_ceil(16)], written: vec![false; bytes] }
    }

    /// A new block: nothing is written.
    pub(super) fn reset(&mut self) {
        self.written.fill(false);
    }

    fn len(&self) -> u32 {
        self.written.len() as u32
    }
}

/// The byte offset of a `V` at element `index` of `len` elements of type `T` at `base`; raises if it does not
/// lie inside or is not aligned.
#[inline(always)]
fn locate<T, V>(
    space: Space,
    base: u64,
    len: u64,
    index: u64,
    write: bool,
    place: &'static Location<'static>,
) -> u64 {
    const { assert!(matches!(size_of::<V>(), 1 | 2 | 4 | 8 | 16), "an access is 1, 2, 4, 8 or 16 bytes") };
    let (bytes, element_bytes) = (size_of::<V>(), size_of::<T>());
    let elements = bytes.div_ceil(element_bytes) as u64;
    if index >= len || len - index < elements {
        raise(place, FaultKind::OutOfBounds { space, index, bytes, len, element_bytes, write });
    }
    let offset = index * element_bytes as u64;
    let off_by = (base + offset) % bytes as u64;
    if off_by != 0 {
        raise(place, FaultKind::Misaligned { space, index, bytes, off_by });
    }
    offset
}

/// Records an access for the race check, if it is on.
#[inline(always)]
fn watch(
    lane: &Lane,
    space: Space,
    byte: u64,
    bytes: usize,
    access: Access,
    place: &'static Location<'static>,
) {
    if let Some(races) = &lane.block().races {
        let found = races.borrow_mut().access(lane, space, byte, bytes, access, place);
        if let Some(kind) = found {
            raise(place, kind);
        }
    }
}

#[track_caller]
#[inline]
pub(crate) fn global_load<T: Pod, V: Pod>(base: u64, len: usize, index: usize) -> V {
    let place = Location::caller();
    with_lane(|lane| {
        let address = base + locate::<T, V>(Space::Global, base, len as u64, index as u64, false, place);
        watch(lane, Space::Global, address, size_of::<V>(), Access::Read, place);
        // SAFETY: inside the handle's memory, which the launch's caller vouches for, and aligned; `V` is `Pod`.
        unsafe { (address as *const V).read_unaligned() }
    })
}

#[track_caller]
#[inline]
pub(crate) fn global_store<T: Pod, V: Pod>(base: u64, len: usize, index: usize, value: V) {
    let place = Location::caller();
    with_lane(|lane| {
        let address = base + locate::<T, V>(Space::Global, base, len as u64, index as u64, true, place);
        watch(lane, Space::Global, address, size_of::<V>(), Access::Write, place);
        // SAFETY: inside the handle's memory, which the launch's caller vouches for; no other thread touches
        // these bytes unless the kernel has the race that race-check mode reports.
        unsafe { (address as *mut V).write_unaligned(value) }
    })
}

#[track_caller]
pub(crate) fn global_atomic<T: AtomicWord>(
    op: AtomicOp,
    base: u64,
    len: usize,
    index: usize,
    value: T,
    compare: T,
) -> T {
    let place = Location::caller();
    with_lane(|lane| {
        let address = base + locate::<T, T>(Space::Global, base, len as u64, index as u64, true, place);
        watch(lane, Space::Global, address, size_of::<T>(), Access::Atomic, place);
        // SAFETY: inside the handle's memory, and aligned to the word's size.
        unsafe { T::host_update(op, address as *mut T, value, compare) }
    })
}

/// The offset of an access to a shared array that starts at byte `base`.
#[inline(always)]
fn locate_shared<T, V>(
    lane: &Lane,
    base: u32,
    len: u32,
    index: u32,
    write: bool,
    place: &'static Location<'static>,
) -> u32 {
    let offset = locate::<T, V>(Space::Shared, base as u64, len as u64, index as u64, write, place);
    let needed = base as u64 + offset + size_of::<V>() as u64;
    let launched_with = lane.block().shared.borrow().len();
    if needed > launched_with as u64 {
        raise(place, FaultKind::SharedTooSmall { needed, launched_with });
    }
    base + offset as u32
}

fn shared_pointer(lane: &Lane, offset: u32) -> *mut u8 {
    // SAFETY: the offset is inside the block's shared memory: `locate_shared` checked it.
    unsafe { lane.block().shared.borrow_mut().bytes.as_mut_ptr().cast::<u8>().add(offset as usize) }
}

fn check_written(lane: &Lane, offset: u32, bytes: usize, place: &'static Location<'static>) {
    let start = offset as usize;
    if !lane.block().shared.borrow().written[start..start + bytes].iter().all(|written| *written) {
        raise(place, FaultKind::Uninitialized { offset, bytes });
    }
}

#[track_caller]
pub(crate) fn shared_load<T: Pod, V: Pod>(base: u32, len: u32, index: u32) -> V {
    let place = Location::caller();
    with_lane(|lane| {
        let offset = locate_shared::<T, V>(lane, base, len, index, false, place);
        check_written(lane, offset, size_of::<V>(), place);
        watch(lane, Space::Shared, offset as u64, size_of::<V>(), Access::Read, place);
        // SAFETY: inside the block's shared memory, which one OS thread uses; `V` is `Pod`.
        unsafe { shared_pointer(lane, offset).cast::<V>().read_unaligned() }
    })
}

#[track_caller]
pub(crate) fn shared_store<T: Pod, V: Pod>(base: u32, len: u32, index: u32, value: V) {
    let place = Location::caller();
    with_lane(|lane| {
        let offset = locate_shared::<T, V>(lane, base, len, index, true, place);
        watch(lane, Space::Shared, offset as u64, size_of::<V>(), Access::Write, place);
        let start = offset as usize;
        lane.block().shared.borrow_mut().written[start..start + size_of::<V>()].fill(true);
        // SAFETY: inside the block's shared memory, which one OS thread uses.
        unsafe { shared_pointer(lane, offset).cast::<V>().write_unaligned(value) }
    })
}

#[track_caller]
pub(crate) fn shared_atomic<T: AtomicWord>(
    op: AtomicOp,
    base: u32,
    len: u32,
    index: u32,
    value: T,
    compare: T,
) -> T {
    let place = Location::caller();
    with_lane(|lane| {
        let offset = locate_shared::<T, T>(lane, base, len, index, true, place);
        check_written(lane, offset, size_of::<T>(), place);
        watch(lane, Space::Shared, offset as u64, size_of::<T>(), Access::Atomic, place);
        let pointer = shared_pointer(lane, offset).cast::<T>();
        // SAFETY: inside the block's shared memory, which one OS thread uses, and aligned.
        unsafe {
            let old = pointer.read();
            pointer.write(T::combine(op, old, value, compare));
            old
        }
    })
}
