//! Asynchronous copies: the bytes move when the thread waits for them, as late as they may.

use super::fault::{FaultKind, Space};
use super::history::Access;
use super::lane::{Lane, raise, with_lane};
use super::memory::{locate, watch};
use super::mutation::Change;
use super::shared::{check_arrived, locate_shared};
use crate::{Global, Pod, Shared};
use core::panic::Location;
use std::collections::VecDeque;

/// One copy.
#[derive(Clone, Copy)]
struct CopyOf {
    /// 4, 8 or 16.
    bytes: usize,
    /// Byte offset in shared memory, and the element index that the kernel used.
    target: u32,
    target_index: u32,
    /// Where the bytes come from, and the element index; `None` for zeros.
    source: Option<(u64, u64)>,
    place: &'static Location<'static>,
}

/// What one thread has under way.
#[derive(Default)]
pub(crate) struct Copies {
    open: Vec<CopyOf>,
    groups: VecDeque<Vec<CopyOf>>,
}

impl Copies {
    pub(super) fn clear(&mut self) {
        self.open.clear();
        self.groups.clear();
    }
}

#[track_caller]
pub(crate) fn copy_async<T: Pod, S: Pod, V: Pod>(
    target: Shared<T>,
    index: u32,
    source: Global<S>,
    from: usize,
    present: bool,
) {
    let (place, bytes) = (Location::caller(), size_of::<V>());
    let (base, len) = target.extent();
    with_lane(|lane| {
        let offset = locate_shared::<T, V>(lane, base, len, index, true, place);
        check_arrived(lane, offset, bytes, place);
        watch(lane, Space::Shared, (offset as u64, index as u64), bytes, Access::Write, place);
        let start = source.address();
        if !present {
            // Nothing is read, so it may be outside; but the instruction wants any address aligned.
            let address = start.wrapping_add((from as u64).wrapping_mul(size_of::<S>() as u64));
            let off_by = address % bytes as u64;
            if off_by != 0 {
                let (space, index) = (Space::Global, from as u64);
                raise(place, FaultKind::Misaligned { space, index, bytes, off_by });
            }
        }
        let source = present.then(|| {
            let at = locate::<S, V>(Space::Global, start, source.len() as u64, from as u64, false, place);
            watch(lane, Space::Global, (start + at, from as u64), bytes, Access::Copy, place);
            if let Some(races) = &lane.block().races {
                races.borrow_mut().copy_starts(lane, (start + at, bytes), from as u64, place);
            }
            (start + at, from as u64)
        });
        lane.block().shared.mark_awaited(offset, bytes);
        let copy = CopyOf { bytes, target: offset, target_index: index, source, place };
        lane.copies.borrow_mut().open.push(copy);
    });
}

pub(crate) fn copies_commit() {
    with_lane(|lane| {
        let mut copies = lane.copies.borrow_mut();
        let group = std::mem::take(&mut copies.open);
        copies.groups.push_back(group);
    });
}

#[track_caller]
pub(crate) fn copies_wait(pending: usize) {
    let place = Location::caller();
    with_lane(|lane| {
        let pending = pending + usize::from(lane.block().breaks(Change::NoWait, place));
        loop {
            let mut copies = lane.copies.borrow_mut();
            if copies.groups.len() <= pending {
                return;
            }
            let group = copies.groups.pop_front().unwrap_or_default();
            drop(copies);
            group.iter().for_each(|copy| land(lane, copy));
        }
    });
}

/// The bytes arrive: read now, written now.
fn land(lane: &Lane, copy: &CopyOf) {
    let mut value = [0; 16];
    let value = &mut value[..copy.bytes];
    match copy.source {
        None => {}
        Some((address, index)) => {
            watch(lane, Space::Global, (address, index), copy.bytes, Access::Copy, copy.place);
            if let Some(races) = &lane.block().races {
                races.borrow_mut().copy_ends(lane, (address, copy.bytes), index);
            }
            // SAFETY: checked against the handle when the copy started.
            unsafe { (address as *const u8).copy_to_nonoverlapping(value.as_mut_ptr(), copy.bytes) };
        }
    }
    let target = (copy.target as u64, copy.target_index as u64);
    watch(lane, Space::Shared, target, copy.bytes, Access::Write, copy.place);
    lane.block().shared.arrive(copy.target, value);
    lane.block().changed.set(true);
}
