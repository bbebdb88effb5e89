//! The lists of all parts, one behind the other: who reads them counts entries across parts.

use super::marking::{Entry, ListHead, inclusive};
use super::pass::StepShape;
use crate::attention::MAX_PARTS;
use simt::warp::{self, FULL_MASK};
use simt::{Global, Shared, thread};

/// Words that [`lay_out_lists`] fills.
pub(super) const STARTS: u32 = MAX_PARTS + 1;

/// Where each part's list starts among all entries, in shared memory; returns how many there are. The whole
/// block's work.
#[simt::device]
pub(super) fn lay_out_lists(
    starts: Shared<u32>,
    lists: Global<ListHead>,
    launch_row: u32,
    shape: StepShape,
    lane: u32,
    warp: u32,
) -> u32 {
    if warp == 0 {
        let (mut before, mut first) = (0, 0);
        while first < shape.parts {
            let part = first + lane;
            let mut entries = 0;
            if part < shape.parts {
                entries = lists.cast::<u32>().load(4 * (launch_row * shape.parts + part) as usize);
            }
            let up_to_here = before + inclusive(entries, lane);
            if part < shape.parts {
                starts.store(part, up_to_here - entries);
            }
            before = warp::warp_shuffle_idx(FULL_MASK, up_to_here, 31, 32);
            first += 32;
        }
        if lane == 0 {
            starts.store(shape.parts, before);
        }
    }
    thread::sync_threads();
    starts.load(shape.parts)
}

/// Entry `e` of all parts' lists: a warp's work.
#[simt::device]
pub(super) fn find_entry(
    starts: Shared<u32>,
    entries: Global<Entry>,
    launch_row: u32,
    shape: StepShape,
    e: u32,
    lane: u32,
) -> Entry {
    entries.load(find_place(starts, launch_row, shape, e, lane))
}

/// Where entry `e` of all parts' lists is: a warp's work.
#[simt::device]
pub(super) fn find_place(starts: Shared<u32>, launch_row: u32, shape: StepShape, e: u32, lane: u32) -> usize {
    // The last part that starts at it or before it.
    let (mut starting, mut first) = (0, 0);
    while first < shape.parts {
        let part = first + lane;
        let begins = part < shape.parts && starts.load(part) <= e;
        starting += warp::warp_vote_ballot(FULL_MASK, begins).count_ones();
        first += 32;
    }
    let part = starting - 1;
    let list = (launch_row * shape.parts + part) as usize * shape.places() as usize;
    list + (e - starts.load(part)) as usize
}
