//! Checked access to global and shared memory.

use super::block::Block;
use super::cluster::with_past_of;
use super::fault::{FaultKind, Space};
use super::history::Access;
use super::lane::{Lane, Look, after_atomic, before_atomic, before_plain, raise, with_lane};
use super::mutation::Change;
use crate::GlobalMut;
use crate::atomic::{AtomicOp, AtomicScope, AtomicWord};
use bytemuck::Pod;
use core::mem::size_of;
use core::panic::Location;

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
        let kind = Kind { access, bytes: bytes as u8 };
        match space {
            Space::Global => record::<GLOBAL, true>(lane, byte, index, kind, place),
            Space::Shared | Space::Cluster => record::<SHARED, true>(lane, byte, index, kind, place),
        }
    }
}

/// The spaces, for what is compiled for each apart.
const GLOBAL: u8 = Space::Global as u8;
const SHARED: u8 = Space::Shared as u8;

/// What an access is. In one word: a function with few arguments has them all in registers.
#[derive(Clone, Copy)]
struct Kind {
    access: Access,
    bytes: u8,
}

/// Without `COUNTS` other launches may do to the bytes whatever they like.
#[cold]
#[inline(never)]
fn record<const SPACE: u8, const COUNTS: bool>(
    lane: &Lane,
    byte: u64,
    index: u64,
    kind: Kind,
    place: &'static Location<'static>,
) {
    if !passes::<SPACE>(lane, byte, kind, place) {
        look_at::<SPACE, COUNTS>(lane, byte, index, kind, place);
    }
}

/// Whether an access is one of those that nothing is wrong with and that nobody has to wait at: then it is
/// recorded.
#[inline(always)]
fn passes<const SPACE: u8>(
    lane: &Lane,
    byte: u64,
    Kind { access, bytes }: Kind,
    place: &'static Location<'static>,
) -> bool {
    let block = lane.block();
    let Some(races) = &block.races else { return false };
    let is_tracked = SPACE == GLOBAL && (block.tracked.is_some() || block.watchpoint.is_some());
    if is_tracked || !lane.has_fuel() {
        return false;
    }
    let Ok(mut races) = races.try_borrow_mut() else { return false };
    let space = if SPACE == SHARED { Space::Shared } else { Space::Global };
    let passes = races.takes(lane, space, (byte, usize::from(bytes)), access, place);
    if passes {
        lane.spend(1);
    }
    passes
}

/// The same of any access.
#[inline(never)]
fn look_at<const SPACE: u8, const COUNTS: bool>(
    lane: &Lane,
    byte: u64,
    index: u64,
    Kind { access, bytes }: Kind,
    place: &'static Location<'static>,
) {
    let space = if SPACE == SHARED { Space::Shared } else { Space::Global };
    let (block, bytes) = (lane.block(), usize::from(bytes));
    before_plain(lane, || Look { space, byte, index, value: None }, place);
    if !block.watched {
        return;
    }
    if space == Space::Global && (block.tracked.is_some() || block.watchpoint.is_some()) {
        track::<COUNTS>(lane, (byte, index), bytes, access, place);
    }
    let Some(races) = &block.races else { return };
    let found = races.borrow_mut().access(lane, space, (byte, index), bytes, access, place);
    if let Some(kind) = found {
        raise(place, kind);
    }
}

/// What is known of global memory beside races.
#[inline(never)]
fn track<const COUNTS: bool>(
    lane: &Lane,
    (byte, index): (u64, u64),
    bytes: usize,
    access: Access,
    place: &'static Location<'static>,
) {
    let block = lane.block();
    if let Some(tracked) = &block.tracked {
        let only_writes = access == Access::Write || access.is_put();
        if !only_writes && !tracked.is_written(byte, bytes) {
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

/// An atomic on the word at `pointer`, of `owner`'s memory if that is a block's, which makes `update` of its
/// value and which `apply` does there: what it found.
///
/// # Safety
/// `pointer` is valid and aligned, and no other OS thread writes there if races are checked.
pub(super) unsafe fn atomic<T: AtomicWord>(
    lane: &Lane,
    owner: &Block,
    access: Access,
    at: (Space, u64),
    pointer: *const T,
    (update, apply): (impl Fn(T) -> T, impl FnOnce() -> T),
    place: &'static Location<'static>,
) -> T {
    if lane.block().races.is_none() {
        let old = apply();
        if update(old) != old {
            changed::<T>(lane, owner, at, place);
        }
        return old;
    }
    // SAFETY: says the caller; with races checked, all blocks share one OS thread.
    let now = number(unsafe { pointer.read() });
    let updated = |value| number(update(word(value)));
    let early =
        with_past_of(lane, owner, |races| races.early(lane, access, at, now, updated, place)).flatten();
    let seen = early.or_else(|| {
        let is_look = |value| updated(value) == value;
        with_past_of(lane, owner, |races| races.look(lane, access, at, now, is_look, place)).flatten()
    });
    let old = seen.unwrap_or_else(|| number(apply()));
    let new = updated(old);
    if early.is_some() {
        // Nobody sees it but the thread itself, perhaps.
        lane.block().changed.set(true);
    } else if seen.is_none() && new != old {
        changed::<T>(lane, owner, at, place);
        with_past_of(lane, owner, |races| races.changed(lane, at, (old, new), access, place));
    }
    // Who sees what came in ahead of the newest value must know of nothing newer: that is not asked here.
    let sets = seen.is_none() && (access.is_put() || new != old);
    let set = (old, sets.then_some(new));
    let late = with_past_of(lane, owner, |races| races.late(lane, access, at, set, place)).flatten();
    word(late.unwrap_or(old))
}

/// Notes that an atomic has brought another value to the word at `byte`.
fn changed<T>(lane: &Lane, owner: &Block, (space, byte): (Space, u64), place: &'static Location<'static>) {
    lane.block().changed.set(true);
    owner.changed.set(true);
    if let Some(watchpoint) = lane.block().watchpoint.as_ref().filter(|_| space == Space::Global) {
        watchpoint.note(lane, byte, size_of::<T>(), place);
    }
}

/// Whether a `V` at element `index` lies inside and is aligned, and where; as [`locate`], without a report.
#[inline(always)]
pub(super) fn fits<T, V>(base: u64, len: u64, index: u64) -> Option<u64> {
    const { assert!(matches!(size_of::<V>(), 1 | 2 | 4 | 8 | 16), "an access is 1, 2, 4, 8 or 16 bytes") };
    const { assert!(size_of::<T>() > 0, "an element has bytes") };
    let elements = size_of::<V>().div_ceil(size_of::<T>()) as u64;
    let at = base.wrapping_add(index.wrapping_mul(size_of::<T>() as u64));
    let inside = index < len && (elements == 1 || len - index >= elements);
    // Elements of whole accesses are aligned if the first one is, which loops ask once.
    let first = if size_of::<T>().is_multiple_of(size_of::<V>()) { base } else { at };
    (inside && first.is_multiple_of(size_of::<V>() as u64)).then_some(at)
}

#[track_caller]
#[inline]
pub(crate) fn global_load<T: Pod, V: Pod>(base: u64, len: usize, index: usize) -> V {
    if let Some(address) = fits::<T, V>(base, len as u64, index as u64)
        && with_lane(Lane::passes)
    {
        // SAFETY: inside the handle's memory, which the launch's caller vouches for, and aligned; `V` is
        // `Pod`.
        return unsafe { (address as *const V).read() };
    }
    load::<T, V>(base, len, index, Access::Read, Location::caller())
}

/// Of what the launch must not write.
#[track_caller]
#[inline]
pub(crate) fn global_load_readonly<T: Pod, V: Pod>(base: u64, len: usize, index: usize) -> V {
    load::<T, V>(base, len, index, Access::ReadOnly, Location::caller())
}

/// With every check that is on.
#[inline(never)]
fn load<T: Pod, V: Pod>(
    base: u64,
    len: usize,
    index: usize,
    access: Access,
    place: &'static Location<'static>,
) -> V {
    with_lane(|lane| {
        let index =
            lane.block().index(index as u64, size_of::<V>().div_ceil(size_of::<T>()) as u64, place) as usize;
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
            let kind = Kind { access: Access::Look(AtomicScope::Device), bytes: 4 };
            record::<GLOBAL, false>(lane, address, index as u64, kind, place);
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
    if let Some(address) = fits::<T, V>(base, len as u64, index as u64)
        && with_lane(Lane::passes_writing)
    {
        // SAFETY: inside the handle's memory, and aligned; no other thread touches these bytes unless the
        // kernel has the race that race-check mode reports.
        return unsafe { (address as *mut V).write(value) };
    }
    store::<T, V>(base, len, index, value, Location::caller());
}

/// With every check that is on.
#[inline(never)]
fn store<T: Pod, V: Pod>(base: u64, len: usize, index: usize, value: V, place: &'static Location<'static>) {
    with_lane(|lane| {
        let index =
            lane.block().index(index as u64, size_of::<V>().div_ceil(size_of::<T>()) as u64, place) as usize;
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
    scope: AtomicScope,
    words: GlobalMut<T>,
    index: usize,
    value: T,
    compare: T,
) -> T {
    let (base, len, place) = (words.address(), words.len(), Location::caller());
    before_atomic(place);
    let (old, byte) = with_lane(|lane| {
        let address = base + locate::<T, T>(Space::Global, base, len as u64, index as u64, true, place);
        let access = access(op, scope);
        let watched = if lane.block().breaks(Change::NotAtomic, place) { Access::Write } else { access };
        watch(lane, Space::Global, (address, index as u64), size_of::<T>(), watched, place);
        let update = |old| T::combine(op, old, value, compare);
        // SAFETY: inside the handle's memory, and aligned to the word's size.
        let apply = || unsafe { T::host_update(op, address as *mut T, value, compare) };
        // SAFETY: as above.
        let old = unsafe {
            let at = (Space::Global, address);
            atomic(lane, lane.block(), access, at, address as *const T, (update, apply), place)
        };
        (old, address)
    });
    after_atomic(Look { space: Space::Global, byte, index: index as u64, value: Some(number(old)) }, place);
    old
}

pub(super) fn access(op: AtomicOp, scope: AtomicScope) -> Access {
    match op {
        AtomicOp::Load => Access::Look(scope),
        AtomicOp::Store => Access::Put(scope),
        _ => Access::Atomic(scope),
    }
}

/// The word of these bits.
fn word<T: AtomicWord>(number: u64) -> T {
    bytemuck::pod_read_unaligned(&number.to_ne_bytes()[..size_of::<T>()])
}

/// The bits of a word.
pub(super) fn number<T: AtomicWord>(word: T) -> u64 {
    let mut bytes = [0; 8];
    bytes[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&word));
    u64::from_ne_bytes(bytes)
}
