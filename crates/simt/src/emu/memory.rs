//! Checked access to global and shared memory.

use super::fault::{FaultKind, Space};
use super::history::Access;
use super::lane::{Lane, Look, after_atomic, before_atomic, before_plain, raise, with_lane};
use crate::atomic::{AtomicOp, AtomicWord};
use bytemuck::Pod;
use core::cell::Cell;
use core::mem::size_of;
use core::panic::Location;

/// A block's shared memory, and which of its bytes somebody wrote.
///
/// In units of 16 bytes: an access is aligned to its size, so it never leaves its unit.
pub(crate) struct SharedMemory {
    bytes: u32,
    units: Box<[Cell<u128>]>,
    /// One bit for each byte of a unit.
    written: Box<[Cell<u16>]>,
    /// The same for bytes that an asynchronous copy is on its way to.
    awaited: Box<[Cell<u16>]>,
}

impl SharedMemory {
    pub(super) fn new(bytes: u32) -> Self {
        let units = bytes.div_ceil(16) as usize;
        SharedMemory {
            bytes,
            units: vec![Cell::new(0); units].into_boxed_slice(),
            written: vec![Cell::new(0); units].into_boxed_slice(),
            awaited: vec![Cell::new(0); units].into_boxed_slice(),
        }
    }

    /// A new block: nothing is written.
    pub(super) fn reset(&self) {
        self.written.iter().for_each(|unit| unit.set(0));
        self.awaited.iter().for_each(|unit| unit.set(0));
    }

    /// The 16 bytes at `offset`, a multiple of 16.
    pub(super) fn read_unit(&self, offset: u32) -> u128 {
        self.units[offset as usize / 16].get()
    }

    /// The 16 bytes at `offset` belong to a copy that is under way.
    pub(super) fn mark_awaited(&self, offset: u32) {
        self.awaited[offset as usize / 16].set(u16::MAX);
        self.written[offset as usize / 16].set(0);
    }

    /// The copy to the 16 bytes at `offset` has brought `value`.
    pub(super) fn arrive(&self, offset: u32, value: u128) {
        self.awaited[offset as usize / 16].set(0);
        self.written[offset as usize / 16].set(u16::MAX);
        self.units[offset as usize / 16].set(value);
    }

    #[inline(always)]
    fn is_awaited(&self, offset: u32, bytes: usize) -> bool {
        self.awaited[offset as usize / 16].get() & Self::mask(offset, bytes) != 0
    }

    #[inline(always)]
    fn mask(offset: u32, bytes: usize) -> u16 {
        (((1u32 << bytes) - 1) << (offset % 16)) as u16
    }

    #[inline(always)]
    fn is_written(&self, offset: u32, bytes: usize) -> bool {
        let mask = Self::mask(offset, bytes);
        self.written[offset as usize / 16].get() & mask == mask
    }

    #[inline(always)]
    fn mark_written(&self, offset: u32, bytes: usize) {
        let unit = &self.written[offset as usize / 16];
        unit.set(unit.get() | Self::mask(offset, bytes));
    }

    #[inline(always)]
    fn pointer(&self, offset: u32) -> *mut u8 {
        self.units[offset as usize / 16].as_ptr().cast::<u8>().wrapping_add(offset as usize % 16)
    }
}

/// The byte offset of a `V` at element `index` of `len` elements of type `T` at `base`; raises if it does not
/// lie inside or is not aligned.
#[inline(always)]
pub(super) fn locate<T, V>(
    space: Space,
    base: u64,
    len: u64,
    index: u64,
    write: bool,
    place: &'static Location<'static>,
) -> u64 {
    const { assert!(matches!(size_of::<V>(), 1 | 2 | 4 | 8 | 16), "an access is 1, 2, 4, 8 or 16 bytes") };
    const { assert!(size_of::<T>() > 0, "an element has bytes") };
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

/// Records an access for the checks that are on, if any is; notes very many of them in any case.
#[inline(always)]
pub(super) fn watch(
    lane: &Lane,
    space: Space,
    (byte, index): (u64, u64),
    bytes: usize,
    access: Access,
    place: &'static Location<'static>,
) {
    if lane.is_watched() {
        record::<true>(lane, space, (byte, index), bytes, access, place);
    }
}

/// Without `COUNTS` other launches may do to the bytes whatever they like.
#[cold]
#[inline(never)]
fn record<const COUNTS: bool>(
    lane: &Lane,
    space: Space,
    (byte, index): (u64, u64),
    bytes: usize,
    access: Access,
    place: &'static Location<'static>,
) {
    let block = lane.block();
    before_plain(Look { space, byte, index, value: None }, place);
    if !block.watched {
        return;
    }
    if space == Space::Global {
        if let Some(tracked) = &block.tracked {
            if access != Access::Write && !tracked.is_written(byte, bytes) {
                raise(place, FaultKind::Unwritten { index, bytes });
            }
            if access.writes() {
                tracked.write(byte, bytes);
            }
            if COUNTS {
                tracked.traffic(lane, access, byte, bytes);
            }
        }
        if let Some(watchpoint) = block.watchpoint.as_ref().filter(|_| access == Access::Write) {
            watchpoint.note(lane, byte, bytes, place);
        }
    }
    let Some(races) = &block.races else { return };
    let found = races.borrow_mut().access(lane, space, (byte, index), bytes, access, place);
    if let Some(kind) = found {
        raise(place, kind);
    }
}

/// Notes that an atomic has brought another value to the word of `bytes` bytes at `byte`.
fn changed(lane: &Lane, space: Space, byte: u64, bytes: usize, place: &'static Location<'static>) {
    lane.block().changed.set(true);
    if let Some(watchpoint) = lane.block().watchpoint.as_ref().filter(|_| space == Space::Global) {
        watchpoint.note(lane, byte, bytes, place);
    }
    if let Some(races) = &lane.block().races {
        races.borrow_mut().changed(lane, space, byte, place);
    }
}

#[track_caller]
#[inline]
pub(crate) fn global_load<T: Pod, V: Pod>(base: u64, len: usize, index: usize) -> V {
    load::<T, V>(base, len, index, Access::Read, Location::caller())
}

/// Of what the launch must not write.
#[track_caller]
#[inline]
pub(crate) fn global_load_readonly<T: Pod, V: Pod>(base: u64, len: usize, index: usize) -> V {
    load::<T, V>(base, len, index, Access::ReadOnly, Location::caller())
}

#[inline(always)]
fn load<T: Pod, V: Pod>(
    base: u64,
    len: usize,
    index: usize,
    access: Access,
    place: &'static Location<'static>,
) -> V {
    with_lane(|lane| {
        let address = base + locate::<T, V>(Space::Global, base, len as u64, index as u64, false, place);
        watch(lane, Space::Global, (address, index as u64), size_of::<V>(), access, place);
        // SAFETY: inside the handle's memory, which the launch's caller vouches for, and aligned; `V` is
        // `Pod`.
        unsafe { (address as *const V).read_unaligned() }
    })
}

/// What is there, or for every third thread or so something else.
#[track_caller]
pub(crate) fn peek(base: u64, len: usize, index: usize) -> u32 {
    let place = Location::caller();
    with_lane(|lane| {
        let address = base + locate::<u32, u32>(Space::Global, base, len as u64, index as u64, false, place);
        if lane.is_watched() {
            record::<false>(lane, Space::Global, (address, index as u64), 4, Access::Read, place);
        }
        // SAFETY: inside the handle's memory, which the launch's caller vouches for.
        let value = unsafe { (address as *const u32).read_unaligned() };
        let odd = (lane.linear.wrapping_mul(5).wrapping_add(index as u32).wrapping_add(1))
            .wrapping_mul(0x9e37_79b9);
        // Some are a little off, so that they pass for the true ones, and some are wild.
        match (odd >> 16) % 6 {
            0 => value ^ odd,
            1 => value.wrapping_add(odd >> 30),
            _ => value,
        }
    })
}

/// A prefetch moves nothing here, but what it names must be there, in whole units of 16 bytes.
#[track_caller]
pub(crate) fn prefetch<T: Pod>(base: u64, len: usize, index: usize, bytes: u32, wanted: bool) {
    let place = Location::caller();
    if !wanted || bytes == 0 {
        return;
    }
    let (space, index, element_bytes) = (Space::Global, index as u64, size_of::<T>());
    let (end, first) = ((len * element_bytes) as u64, index * element_bytes as u64);
    if first > end || end - first < u64::from(bytes) {
        let (bytes, len) = (bytes as usize, len as u64);
        raise(place, FaultKind::OutOfBounds { space, index, bytes, len, element_bytes, write: false });
    }
    let off_by = ((base + first) % 16).max(u64::from(bytes) % 16);
    if off_by != 0 {
        raise(place, FaultKind::Misaligned { space, index, bytes: 16, off_by });
    }
}

#[track_caller]
#[inline]
pub(crate) fn global_store<T: Pod, V: Pod>(base: u64, len: usize, index: usize, value: V) {
    let place = Location::caller();
    with_lane(|lane| {
        let address = base + locate::<T, V>(Space::Global, base, len as u64, index as u64, true, place);
        watch(lane, Space::Global, (address, index as u64), size_of::<V>(), Access::Write, place);
        // SAFETY: inside the handle's memory, which the launch's caller vouches for; no other thread touches
        // these bytes unless the kernel has the race that race-check mode reports.
        unsafe { (address as *mut V).write_unaligned(value) }
        lane.block().changed.set(true);
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
    before_atomic(place);
    let (old, byte) = with_lane(|lane| {
        let address = base + locate::<T, T>(Space::Global, base, len as u64, index as u64, true, place);
        watch(lane, Space::Global, (address, index as u64), size_of::<T>(), Access::Atomic, place);
        // SAFETY: inside the handle's memory, and aligned to the word's size.
        let old = unsafe { T::host_update(op, address as *mut T, value, compare) };
        if T::combine(op, old, value, compare) != old {
            changed(lane, Space::Global, address, size_of::<T>(), place);
        }
        (old, address)
    });
    after_atomic(Look { space: Space::Global, byte, index: index as u64, value: Some(number(old)) }, place);
    old
}

/// The bits of a word.
fn number<T: AtomicWord>(word: T) -> u64 {
    let mut bytes = [0; 8];
    bytes[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&word));
    u64::from_ne_bytes(bytes)
}

/// The offset of an access to a shared array that starts at byte `base`.
#[inline(always)]
pub(super) fn locate_shared<T, V>(
    lane: &Lane,
    base: u32,
    len: u32,
    index: u32,
    write: bool,
    place: &'static Location<'static>,
) -> u32 {
    let offset = locate::<T, V>(Space::Shared, base as u64, len as u64, index as u64, write, place);
    let needed = base as u64 + offset + size_of::<V>() as u64;
    let launched_with = lane.block().shared.bytes;
    if needed > launched_with as u64 {
        raise(place, FaultKind::SharedTooSmall { needed, launched_with });
    }
    base + offset as u32
}

#[inline(always)]
fn check_written(lane: &Lane, offset: u32, bytes: usize, place: &'static Location<'static>) {
    if !lane.block().shared.is_written(offset, bytes) {
        check_arrived(lane, offset, bytes, place);
        raise(place, FaultKind::Uninitialized { offset, bytes });
    }
}

#[inline(always)]
pub(super) fn check_arrived(lane: &Lane, offset: u32, bytes: usize, place: &'static Location<'static>) {
    if lane.block().shared.is_awaited(offset, bytes) {
        raise(place, FaultKind::CopyUnderWay { offset, bytes });
    }
}

/// The checks of a read of `bytes` bytes of shared memory at `offset`.
pub(super) fn check_shared_read(
    lane: &Lane,
    (offset, index): (u32, u32),
    bytes: usize,
    place: &'static Location<'static>,
) {
    check_written(lane, offset, bytes, place);
    watch(lane, Space::Shared, (offset as u64, index as u64), bytes, Access::Read, place);
}

#[track_caller]
#[inline]
pub(crate) fn shared_load<T: Pod, V: Pod>(base: u32, len: u32, index: u32) -> V {
    let place = Location::caller();
    with_lane(|lane| {
        let offset = locate_shared::<T, V>(lane, base, len, index, false, place);
        check_written(lane, offset, size_of::<V>(), place);
        watch(lane, Space::Shared, (offset as u64, index as u64), size_of::<V>(), Access::Read, place);
        // SAFETY: inside the block's shared memory, which one OS thread uses; `V` is `Pod`.
        unsafe { lane.block().shared.pointer(offset).cast::<V>().read_unaligned() }
    })
}

#[track_caller]
#[inline]
pub(crate) fn shared_store<T: Pod, V: Pod>(base: u32, len: u32, index: u32, value: V) {
    let place = Location::caller();
    with_lane(|lane| {
        let offset = locate_shared::<T, V>(lane, base, len, index, true, place);
        check_arrived(lane, offset, size_of::<V>(), place);
        watch(lane, Space::Shared, (offset as u64, index as u64), size_of::<V>(), Access::Write, place);
        lane.block().shared.mark_written(offset, size_of::<V>());
        // SAFETY: inside the block's shared memory, which one OS thread uses.
        unsafe { lane.block().shared.pointer(offset).cast::<V>().write_unaligned(value) }
        lane.block().changed.set(true);
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
    before_atomic(place);
    let (old, byte) = with_lane(|lane| {
        let offset = locate_shared::<T, T>(lane, base, len, index, true, place);
        check_written(lane, offset, size_of::<T>(), place);
        let byte = offset as u64;
        watch(lane, Space::Shared, (byte, index as u64), size_of::<T>(), Access::Atomic, place);
        let pointer = lane.block().shared.pointer(offset).cast::<T>();
        // SAFETY: inside the block's shared memory, which one OS thread uses, and aligned.
        let old = unsafe { pointer.read() };
        let new = T::combine(op, old, value, compare);
        // SAFETY: as above.
        unsafe { pointer.write(new) };
        if new != old {
            changed(lane, Space::Shared, byte, size_of::<T>(), place);
        }
        (old, byte)
    });
    after_atomic(Look { space: Space::Shared, byte, index: index as u64, value: Some(number(old)) }, place);
    old
}
