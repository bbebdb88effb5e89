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
        record(lane, space, (byte, index), bytes, access, place);
    }
}

#[cold]
#[inline(never)]
fn record(
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
            let only_writes = matches!(access, Access::Write | Access::Put);
            if !only_writes && !tracked.is_written(byte, bytes) {
                raise(place, FaultKind::Unwritten { index, bytes });
            }
            if access.writes() {
                tracked.write(byte, bytes);
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

/// Notes that an atomic has brought `new` in the place of `old` to the word at `byte`.
fn changed<T: AtomicWord>(
    lane: &Lane,
    (space, byte): (Space, u64),
    (old, new): (T, T),
    place: &'static Location<'static>,
) {
    lane.block().changed.set(true);
    if let Some(watchpoint) = lane.block().watchpoint.as_ref().filter(|_| space == Space::Global) {
        watchpoint.note(lane, byte, size_of::<T>(), place);
    }
    if let Some(races) = &lane.block().races {
        races.borrow_mut().changed(lane, (space, byte), (number(old), number(new)), place);
    }
}

/// What an atomic sees that leaves the word as it is, if that is older than what the word at `pointer` holds.
///
/// # Safety
/// `pointer` is valid and aligned, and no other OS thread writes there if races are checked.
unsafe fn older<T: AtomicWord>(
    lane: &Lane,
    op: AtomicOp,
    (space, byte): (Space, u64),
    pointer: *const T,
    is_look: impl Fn(T) -> bool,
    place: &'static Location<'static>,
) -> Option<T> {
    let races = lane.block().races.as_ref()?;
    // SAFETY: says the caller; with races checked, all blocks share one OS thread.
    let now = number(unsafe { pointer.read() });
    let is_look = |value| is_look(word(value));
    races.borrow_mut().look(lane, access(op), (space, byte), now, is_look, place).map(word)
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
    let value: u32 = global_load::<u32, u32>(base, len, index);
    with_lane(|lane| {
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
        watch(lane, Space::Global, (address, index as u64), size_of::<T>(), access(op), place);
        let update = |old| T::combine(op, old, value, compare);
        let at = (Space::Global, address);
        // SAFETY: inside the handle's memory, and aligned to the word's size.
        let seen = unsafe { older(lane, op, at, address as *const T, |old| update(old) == old, place) };
        if let Some(seen) = seen {
            return (seen, address);
        }
        // SAFETY: as above.
        let old = unsafe { T::host_update(op, address as *mut T, value, compare) };
        if update(old) != old {
            changed(lane, at, (old, update(old)), place);
        }
        (old, address)
    });
    after_atomic(Look { space: Space::Global, byte, index: index as u64, value: Some(number(old)) }, place);
    old
}

fn access(op: AtomicOp) -> Access {
    match op {
        AtomicOp::Load => Access::Look,
        AtomicOp::Store => Access::Put,
        _ => Access::Atomic,
    }
}

/// The word of these bits.
fn word<T: AtomicWord>(number: u64) -> T {
    bytemuck::pod_read_unaligned(&number.to_ne_bytes()[..size_of::<T>()])
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
        match op {
            AtomicOp::Store => {
                check_arrived(lane, offset, size_of::<T>(), place);
                lane.block().shared.mark_written(offset, size_of::<T>());
            }
            _ => check_written(lane, offset, size_of::<T>(), place),
        }
        let byte = offset as u64;
        watch(lane, Space::Shared, (byte, index as u64), size_of::<T>(), access(op), place);
        let pointer = lane.block().shared.pointer(offset).cast::<T>();
        let update = |old| T::combine(op, old, value, compare);
        let at = (Space::Shared, byte);
        // SAFETY: inside the block's shared memory, which one OS thread uses, and aligned.
        let seen = unsafe { older(lane, op, at, pointer, |old| update(old) == old, place) };
        if let Some(seen) = seen {
            return (seen, byte);
        }
        // SAFETY: as above.
        let old = unsafe { pointer.read() };
        let new = update(old);
        // SAFETY: as above.
        unsafe { pointer.write(new) };
        if new != old {
            changed(lane, at, (old, new), place);
        }
        (old, byte)
    });
    after_atomic(Look { space: Space::Shared, byte, index: index as u64, value: Some(number(old)) }, place);
    old
}
