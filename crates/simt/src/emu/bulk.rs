//! Bulk copies: the bytes move when somebody waits for them, as late as they may.

use super::fault::{FaultKind, Place, Space};
use super::history::Access;
use super::lane::{Lane, raise, with_lane};
use super::mbarrier::{Agent, Named, agent};
use super::mutation::Change;
use super::shared::{check_arrived, check_written};
use super::tiles::Tile;
use crate::{Global, GlobalMut, Pod, Shared};
use core::panic::Location;
use std::collections::VecDeque;

/// Copies move units of so many bytes, from and to a multiple of it.
pub(super) const UNIT: usize = 16;

/// A copy to shared memory.
pub(super) struct Load {
    pub(super) thread: u32,
    pub(super) place: &'static Location<'static>,
    /// Byte offset in shared memory.
    pub(super) target: u32,
    pub(super) bytes: u32,
    pub(super) source: Far,
}

/// The end of a copy in global memory.
pub(super) enum Far {
    /// As many bytes from an address on.
    Bytes(u64),
    /// A box of a tensor.
    Tile(Box<Tile>),
}

/// A copy to global memory.
pub(super) struct Store {
    pub(super) place: &'static Location<'static>,
    pub(super) source: u32,
    pub(super) bytes: u32,
    pub(super) target: Far,
    /// What it has read, once it has.
    pub(super) read: Option<Vec<u8>>,
}

/// The copies to global memory that one thread has under way.
#[derive(Default)]
pub(crate) struct Stores {
    open: Vec<Store>,
    groups: VecDeque<Vec<Store>>,
    /// How many groups are done.
    done: u32,
}

impl Stores {
    pub(super) fn clear(&mut self) {
        *self = Stores::default();
    }

    /// The number of the group that is open.
    pub(super) fn group(&self) -> u32 {
        self.done + self.groups.len() as u32
    }

    pub(super) fn start(&mut self, store: Store) {
        self.open.push(store);
    }
}

/// One side of a copy: an array, its element that the copy starts at, and its size.
pub(super) struct Side {
    pub(super) space: Space,
    pub(super) base: u64,
    len: u64,
    pub(super) index: u64,
    pub(super) element_bytes: usize,
}

impl Side {
    pub(super) fn shared<T: Pod>(array: Shared<T>, index: u32) -> Side {
        let (base, len) = array.extent();
        let element_bytes = size_of::<T>();
        Side { space: Space::Shared, base: base.into(), len: len.into(), index: index.into(), element_bytes }
    }

    fn global<T: Pod>(base: u64, len: usize, index: usize) -> Side {
        let element_bytes = size_of::<T>();
        Side { space: Space::Global, base, len: len as u64, index: index as u64, element_bytes }
    }

    /// Where it starts: inside, with all of its bytes, and aligned.
    pub(super) fn start(
        &self,
        lane: &Lane,
        bytes: u32,
        write: bool,
        place: &'static Location<'static>,
    ) -> u64 {
        let Side { space, base, len, index, element_bytes } = *self;
        let size = element_bytes as u64;
        let inside = index <= len && (len - index).saturating_mul(size) >= bytes.into();
        if !inside {
            let bytes = bytes as usize;
            raise(place, FaultKind::OutOfBounds { space, index, bytes, len, element_bytes, write });
        }
        let start = base + index * size;
        let off_by = start % UNIT as u64;
        if off_by != 0 {
            raise(place, FaultKind::Misaligned { space, index, bytes: UNIT, off_by });
        }
        let (needed, launched_with) = (start + u64::from(bytes), lane.shared.bytes);
        if space == Space::Shared && needed > launched_with.into() {
            raise(place, FaultKind::SharedTooSmall { needed, launched_with });
        }
        start
    }

    /// A copy reads it or writes it from now on until somebody waits for `agent`.
    pub(super) fn used(
        &self,
        lane: &Lane,
        agent: Agent,
        (start, bytes): (u64, u32),
        access: Access,
        place: &'static Location<'static>,
    ) -> Result<(), FaultKind> {
        used(lane, agent, self.space, (start, self.index, bytes as usize), access, place)
    }
}

/// A copy reads or writes so many bytes from `start` on, whose first element is `index`, from now on until
/// somebody waits for `agent`.
pub(super) fn used(
    lane: &Lane,
    agent: Agent,
    space: Space,
    (start, index, bytes): (u64, u64, usize),
    access: Access,
    place: &'static Location<'static>,
) -> Result<(), FaultKind> {
    let block = lane.block();
    if space == Space::Global {
        if let Some(tracked) = &block.tracked {
            if access.writes() {
                tracked.write(start, bytes);
            } else if !tracked.is_written(start, bytes) {
                return Err(FaultKind::Unwritten { index, bytes });
            }
            let (mut at, end) = (start, start + bytes as u64);
            while at < end {
                let unit = (at + 1).next_multiple_of(UNIT as u64).min(end);
                tracked.traffic(lane, access, at, (unit - at) as usize);
                at = unit;
            }
        }
        if let Some(watchpoint) = block.watchpoint.as_ref().filter(|_| access.writes()) {
            watchpoint.note(lane, start, bytes, place);
        }
    }
    let Some(races) = &block.races else { return Ok(()) };
    let found = races.borrow_mut().copy(lane, agent, space, (start, index, bytes), access, place);
    found.map_or(Ok(()), Err)
}

fn check_size(bytes: u32, place: &'static Location<'static>) {
    if !bytes.is_multiple_of(UNIT as u32) {
        raise(place, FaultKind::BulkSize { bytes });
    }
}

pub(super) fn units(start: u32, bytes: u32) -> impl Iterator<Item = u32> {
    (start..start + bytes).step_by(UNIT)
}

#[track_caller]
pub(crate) fn bulk_load<T: Pod, S: Pod>(
    (target, index): (Shared<T>, u32),
    (source, from): (Global<S>, usize),
    bytes: u32,
    barrier: Named,
) {
    let place = Location::caller();
    check_size(bytes, place);
    let (to, of) = (Side::shared(target, index), Side::global::<S>(source.address(), source.len(), from));
    barrier.load(place, |lane, agent| {
        let (target, source) =
            (to.start(lane, bytes, true, place) as u32, of.start(lane, bytes, false, place));
        units(target, bytes).for_each(|unit| check_arrived(lane, unit, UNIT, place));
        of.used(lane, agent, (source, bytes), Access::Copy, place)?;
        to.used(lane, agent, (target.into(), bytes), Access::Write, place)?;
        units(target, bytes).for_each(|unit| lane.block().shared.mark_awaited(unit, UNIT));
        Ok(Load { thread: lane.linear, place, target, bytes, source: Far::Bytes(source) })
    });
}

impl Load {
    /// The bytes arrive: read now, written now.
    pub(super) fn land(&self, lane: &Lane) {
        let source = match &self.source {
            Far::Bytes(source) => *source as *const u8,
            Far::Tile(tile) => return tile.bring(lane, self.target),
        };
        let mut value = [0; UNIT];
        for (at, unit) in units(self.target, self.bytes).enumerate() {
            // SAFETY: checked against the handle when the copy started.
            unsafe { source.add(UNIT * at).copy_to_nonoverlapping(value.as_mut_ptr(), UNIT) };
            lane.block().shared.arrive(unit, &value);
        }
    }
}

#[track_caller]
pub(crate) fn bulk_store<T: Pod, S: Pod>(
    (target, index): (GlobalMut<T>, usize),
    (source, from): (Shared<S>, u32),
    bytes: u32,
) {
    let place = Location::caller();
    check_size(bytes, place);
    let (to, of) = (Side::global::<T>(target.address(), target.len(), index), Side::shared(source, from));
    with_lane(|lane| {
        let (target, source) =
            (to.start(lane, bytes, true, place), of.start(lane, bytes, false, place) as u32);
        units(source, bytes).for_each(|unit| check_written(lane, unit, UNIT, place));
        let mut stores = lane.stores.borrow_mut();
        let (thread, group) = (lane.linear, stores.group());
        let used =
            of.used(lane, agent::reads(thread, group), (source.into(), bytes), Access::Copy, place).and_then(
                |()| to.used(lane, agent::writes(thread, group), (target, bytes), Access::Write, place),
            );
        if let Err(kind) = used {
            drop(stores);
            raise(place, kind);
        }
        stores.start(Store { place, source, bytes, target: Far::Bytes(target), read: None });
    });
}

impl Store {
    fn read(&mut self, lane: &Lane) -> &[u8] {
        self.read.get_or_insert_with(|| {
            units(self.source, self.bytes)
                .flat_map(|unit| lane.block().shared.read_unit(unit).to_ne_bytes())
                .collect()
        })
    }

    /// The bytes arrive.
    fn land(mut self, lane: &Lane) {
        self.read(lane);
        let value = self.read.unwrap_or_default();
        match self.target {
            // SAFETY: checked against the handle when the copy started.
            Far::Bytes(target) => unsafe {
                value.as_ptr().copy_to_nonoverlapping(target as *mut u8, value.len())
            },
            Far::Tile(tile) => tile.put(&value),
        }
        lane.block().changed.set(true);
    }
}

pub(crate) fn bulk_commit() {
    with_lane(|lane| {
        let mut stores = lane.stores.borrow_mut();
        let group = std::mem::take(&mut stores.open);
        stores.groups.push_back(group);
    });
}

/// Waits until at most so many groups are under way; with `read` they need only have read their sources.
#[track_caller]
pub(crate) fn bulk_wait(pending: usize, read: bool) {
    let place = Location::caller();
    with_lane(|lane| {
        let pending = pending + usize::from(lane.block().breaks(Change::NoWait, place));
        let mut stores = lane.stores.borrow_mut();
        let over = stores.groups.len().saturating_sub(pending);
        let last = stores.done + over as u32;
        stores.groups.iter_mut().take(over).flatten().for_each(|store| {
            store.read(lane);
        });
        if !read {
            stores.groups.drain(..over).flatten().for_each(|store| store.land(lane));
            stores.done = last;
        }
        let (Some(races), Some(group)) = (&lane.block().races, last.checked_sub(1)) else { return };
        races.borrow_mut().copies_are_over(lane, agent::reads(lane.linear, group));
        if !read {
            races.borrow_mut().copies_are_over(lane, agent::writes(lane.linear, group));
        }
    });
}

/// What the thread has written to its block's shared memory is shown to copies, and `everywhere` in other
/// blocks' and in global memory too.
#[track_caller]
pub(crate) fn bulk_fence(everywhere: bool) {
    let all = [Space::Shared, Space::Global, Space::Cluster];
    let spaces = if everywhere { &all[..] } else { &all[..1] };
    let place = Location::caller();
    with_lane(|lane| {
        let left_out = lane.block().breaks(Change::NoFence, place);
        if let Some(races) = lane.block().races.as_ref().filter(|_| !left_out) {
            races.borrow_mut().show_to_copies(lane, spaces);
        }
    });
}

/// The thread ends: its copies have to have read what they read, and go on to write.
pub(super) fn end(lane: &Lane) -> Option<(Place, FaultKind)> {
    let mut stores = lane.stores.borrow_mut();
    let left = stores.open.iter().chain(stores.groups.iter().flatten()).find(|store| store.read.is_none());
    if let Some(store) = left {
        return Some((store.place.into(), FaultKind::BulkLeft { space: Space::Global }));
    }
    stores.groups.drain(..).flatten().for_each(|store| store.land(lane));
    None
}
