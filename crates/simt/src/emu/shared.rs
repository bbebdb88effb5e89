//! A block's shared memory, and checked access to it.

use super::block::Block;
use super::fault::{FaultKind, Space};
use super::history::Access;
use super::lane::{Lane, Look, after_atomic, before_atomic, raise, with_lane};
use super::memory::{access, atomic, fits, locate, number, watch};
use super::mutation::Change;
use crate::atomic::{AtomicOp, AtomicScope, AtomicWord};
use bytemuck::Pod;
use core::cell::Cell;
use core::mem::size_of;
use core::panic::Location;

/// What is known of a byte.
const NOTHING: u8 = 0;
/// An asynchronous copy is on its way to it.
const AWAITED: u8 = 1;
/// It belongs to an mbarrier.
const BARRIER: u8 = 2;

/// A block's shared memory, and what is known of each of its bytes.
///
/// In units of 16 bytes: an access is aligned to its size, so it never leaves its unit.
pub(crate) struct SharedMemory {
    bytes: u32,
    data: Box<[Cell<u128>]>,
    known: Box<[Cell<u128>]>,
}

/// Where it lies.
#[derive(Clone, Copy)]
pub(super) struct SharedView {
    pub(super) bytes: u32,
    pub(super) data: *mut u8,
    known: *const u8,
}

impl SharedMemory {
    pub(super) fn new(bytes: u32) -> Self {
        let units = bytes.div_ceil(16) as usize;
        let zeros = || vec![Cell::new(0); units].into_boxed_slice();
        SharedMemory { bytes, data: zeros(), known: zeros() }
    }

    pub(super) fn view(&self) -> SharedView {
        let SharedMemory { bytes, data, known } = self;
        SharedView { bytes: *bytes, data: data.as_ptr() as *mut u8, known: known.as_ptr().cast() }
    }

    /// A new block: nothing is written.
    pub(super) fn reset(&self) {
        self.known.iter().for_each(|unit| unit.set(u128::from_ne_bytes([NOTHING; 16])));
    }

    /// The 16 bytes at `offset`, a multiple of 16.
    pub(super) fn read_unit(&self, offset: u32) -> u128 {
        self.data[offset as usize / 16].get()
    }

    /// The bytes at `offset` belong to a copy that is under way.
    pub(super) fn mark_awaited(&self, offset: u32, bytes: usize) {
        self.mark(offset, bytes, AWAITED);
    }

    /// The eight bytes at `offset` are an mbarrier from here on, or are none any more.
    pub(super) fn mark_barrier(&self, offset: u32, is_one: bool) {
        self.mark(offset, 8, if is_one { BARRIER } else { NOTHING });
    }

    fn mark(&self, offset: u32, bytes: usize, known: u8) {
        let (unit, mask) = (&self.known[offset as usize / 16], Self::mask(offset, bytes));
        unit.set(unit.get() & !mask | u128::from_ne_bytes([known; 16]) & mask);
    }

    /// The copy to the bytes at `offset`, which do not leave their unit, has brought `value`.
    pub(super) fn arrive(&self, offset: u32, value: &[u8]) {
        self.mark_written(offset, value.len());
        let (unit, at) = (&self.data[offset as usize / 16], offset as usize % 16);
        let mut bytes = unit.get().to_ne_bytes();
        bytes[at..at + value.len()].copy_from_slice(value);
        unit.set(u128::from_ne_bytes(bytes));
    }

    /// Ones in the place of the bytes of an access, in their unit.
    fn mask(offset: u32, bytes: usize) -> u128 {
        let ones = if bytes == 16 { u128::MAX } else { (1 << (8 * bytes)) - 1 };
        u128::from_le(ones << (8 * (offset % 16)))
    }

    fn is_awaited(&self, offset: u32, bytes: usize) -> bool {
        let awaited = u128::from_ne_bytes([AWAITED; 16]);
        // The bits of a byte that is written are all set, those of one that is awaited only some.
        let known = self.known[offset as usize / 16].get() & Self::mask(offset, bytes);
        known & awaited & !(known >> 1) != 0
    }

    fn is_barrier(&self, offset: u32, bytes: usize) -> bool {
        let barrier = u128::from_ne_bytes([BARRIER; 16]);
        let known = self.known[offset as usize / 16].get() & Self::mask(offset, bytes);
        known & barrier & !(known << 1) != 0
    }

    /// Why bytes that are not all written must not be accessed, if there is more to say.
    pub(super) fn in_the_way(&self, offset: u32, bytes: usize) -> Option<FaultKind> {
        if self.is_awaited(offset, bytes) {
            return Some(FaultKind::CopyUnderWay { offset, bytes });
        }
        self.is_barrier(offset, bytes).then_some(FaultKind::MbarrierBytes { offset, bytes })
    }

    pub(super) fn is_written(&self, offset: u32, bytes: usize) -> bool {
        let mask = Self::mask(offset, bytes);
        self.known[offset as usize / 16].get() & mask == mask
    }

    pub(super) fn mark_written(&self, offset: u32, bytes: usize) {
        let unit = &self.known[offset as usize / 16];
        unit.set(unit.get() | Self::mask(offset, bytes));
    }
}

impl SharedView {
    /// Whether all bytes of a `V` are written.
    ///
    /// # Safety
    /// It lies inside, and is aligned to its size.
    #[inline(always)]
    unsafe fn is_written<V>(&self, at: usize) -> bool {
        // SAFETY: inside, says the caller, and aligned.
        unsafe {
            let known = self.known.add(at);
            match size_of::<V>() {
                1 => *known == u8::MAX,
                2 => *known.cast::<u16>() == u16::MAX,
                4 => *known.cast::<u32>() == u32::MAX,
                8 => *known.cast::<u64>() == u64::MAX,
                _ => *known.cast::<u128>() == u128::MAX,
            }
        }
    }

    /// # Safety
    /// As for [`is_written`](Self::is_written).
    #[inline(always)]
    pub(super) unsafe fn read<V: Pod>(&self, at: usize) -> V {
        // SAFETY: inside, says the caller; any bytes are a `V`.
        unsafe { self.data.add(at).cast::<V>().read_unaligned() }
    }

    /// # Safety
    /// As for [`is_written`](Self::is_written).
    #[inline(always)]
    pub(super) unsafe fn write<V: Pod>(&self, at: usize, value: V) {
        // SAFETY: inside, says the caller.
        unsafe { self.data.add(at).cast::<V>().write_unaligned(value) }
    }
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
    let launched_with = lane.shared.bytes;
    if needed > launched_with as u64 {
        raise(place, FaultKind::SharedTooSmall { needed, launched_with });
    }
    base + offset as u32
}

#[inline(always)]
pub(super) fn check_written(lane: &Lane, offset: u32, bytes: usize, place: &'static Location<'static>) {
    if !lane.block().shared.is_written(offset, bytes) {
        check_arrived(lane, offset, bytes, place);
        raise(place, FaultKind::Uninitialized { offset, bytes });
    }
}

#[inline(always)]
pub(super) fn check_arrived(lane: &Lane, offset: u32, bytes: usize, place: &'static Location<'static>) {
    if let Some(kind) = lane.block().shared.in_the_way(offset, bytes) {
        raise(place, kind);
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

/// Whether a `V` at element `index` of a shared array lies inside the block's memory and is aligned, and
/// where.
#[inline(always)]
fn fits_shared<T, V>(lane: &Lane, base: u32, len: u32, index: u32) -> Option<usize> {
    let at = fits::<T, V>(base.into(), len.into(), index.into())?;
    (at + size_of::<V>() as u64 <= lane.shared.bytes.into()).then_some(at as usize)
}

/// The same where all its bytes are written.
#[inline(always)]
fn fits_written<T, V>(lane: &Lane, base: u32, len: u32, index: u32) -> Option<u32> {
    let at = fits_shared::<T, V>(lane, base, len, index)?;
    // SAFETY: inside the block's shared memory, and aligned.
    unsafe { lane.shared.is_written::<V>(at) }.then_some(at as u32)
}

#[track_caller]
#[inline]
pub(crate) fn shared_load<T: Pod, V: Pod>(base: u32, len: u32, index: u32) -> V {
    let value = with_lane(|lane| {
        let at = fits_shared::<T, V>(lane, base, len, index)?;
        // SAFETY: inside the block's shared memory, which one OS thread uses; `V` is `Pod`.
        unsafe { (lane.shared.is_written::<V>(at) && lane.passes()).then(|| lane.shared.read(at)) }
    });
    match value {
        Some(value) => value,
        None => load::<T, V>(base, len, index, Location::caller()),
    }
}

/// With every check that is on.
#[inline(never)]
fn load<T: Pod, V: Pod>(base: u32, len: u32, index: u32, place: &'static Location<'static>) -> V {
    with_lane(|lane| {
        let index =
            lane.block().index(index.into(), size_of::<V>().div_ceil(size_of::<T>()) as u64, place) as u32;
        let offset = match fits_written::<T, V>(lane, base, len, index) {
            Some(offset) => offset,
            None => {
                let offset = locate_shared::<T, V>(lane, base, len, index, false, place);
                check_written(lane, offset, size_of::<V>(), place);
                offset
            }
        };
        watch(lane, Space::Shared, (offset as u64, index as u64), size_of::<V>(), Access::Read, place);
        // SAFETY: inside the block's shared memory, which one OS thread uses; `V` is `Pod`.
        unsafe { lane.shared.read(offset as usize) }
    })
}

#[track_caller]
#[inline]
pub(crate) fn shared_store<T: Pod, V: Pod>(base: u32, len: u32, index: u32, value: V) {
    let stored = with_lane(|lane| {
        let Some(at) = fits_shared::<T, V>(lane, base, len, index) else { return false };
        // SAFETY: inside the block's shared memory, which one OS thread uses. What is written already is not
        // marked once more.
        unsafe {
            let passes = lane.shared.is_written::<V>(at) && lane.passes_writing();
            if passes {
                lane.shared.write(at, value);
            }
            passes
        }
    });
    if !stored {
        store::<T, V>(base, len, index, value, Location::caller());
    }
}

/// With every check that is on.
#[inline(never)]
fn store<T: Pod, V: Pod>(base: u32, len: u32, index: u32, value: V, place: &'static Location<'static>) {
    with_lane(|lane| {
        let index =
            lane.block().index(index.into(), size_of::<V>().div_ceil(size_of::<T>()) as u64, place) as u32;
        let offset = match fits_written::<T, V>(lane, base, len, index) {
            Some(offset) => offset,
            None => {
                let offset = locate_shared::<T, V>(lane, base, len, index, true, place);
                check_arrived(lane, offset, size_of::<V>(), place);
                offset
            }
        };
        watch(lane, Space::Shared, (offset as u64, index as u64), size_of::<V>(), Access::Write, place);
        lane.block().shared.mark_written(offset, size_of::<V>());
        // SAFETY: inside the block's shared memory, which one OS thread uses.
        unsafe { lane.shared.write(offset as usize, value) }
        lane.block().changed.set(true);
    })
}

/// The update itself, of byte `byte` of the shared memory of `owner`: what was there.
///
/// # Safety
/// A `T` of that memory lies there, aligned. (One OS thread uses the memory of a whole cluster.)
pub(super) unsafe fn update<T: AtomicWord>(
    lane: &Lane,
    owner: &Block,
    op: AtomicOp,
    (space, byte): (Space, u64),
    (value, compare): (T, T),
    place: &'static Location<'static>,
) -> T {
    let pointer = owner.shared.view().data.wrapping_add(byte as usize).cast::<T>();
    let update = |old| T::combine(op, old, value, compare);
    let apply = || {
        // SAFETY: the caller's.
        unsafe {
            let old = pointer.read();
            pointer.write(update(old));
            old
        }
    };
    let access = access(op, AtomicScope::Device);
    // SAFETY: as above.
    unsafe { atomic(lane, owner, access, (space, byte), pointer, (update, apply), place) }
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
        let is_broken = lane.block().breaks(Change::NotAtomic, place);
        let watched = if is_broken { Access::Write } else { access(op, AtomicScope::Device) };
        watch(lane, Space::Shared, (byte, index as u64), size_of::<T>(), watched, place);
        // SAFETY: inside the block's shared memory and aligned.
        let old = unsafe { update(lane, lane.block(), op, (Space::Shared, byte), (value, compare), place) };
        (old, byte)
    });
    after_atomic(Look { space: Space::Shared, byte, index: index as u64, value: Some(number(old)) }, place);
    old
}
