//! Barriers with a number: a part of a block's warps meets, or tells that it has come this far.
//!
//! A warp counts as 32 threads, whole or not, once all its lanes have made one call. When as many have come
//! as the call asks for, those that wait go on, and the barrier is as it was in the beginning.

use super::calls::Calls;
use super::clock::Known;
use super::fault::Place;
use super::lane::{Lane, Pause, State};
use core::panic::Location;

/// How many a block has; number 0 is that of `sync_threads`.
pub(crate) const BARRIERS: usize = 16;

/// In the place of a number, the cluster's barrier; its threads are all of the cluster's.
pub(super) const CLUSTER: u32 = BARRIERS as u32;

/// One lane's call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedCall {
    pub(super) id: u32,
    pub(super) threads: u32,
    /// Whether the thread waits for the others.
    pub(super) waits: bool,
    /// Whether its warp has been counted: then it waits.
    pub(super) counted: bool,
    pub(super) calls: Option<&'static Calls>,
}

/// One barrier.
#[derive(Clone, Default)]
pub(super) struct Named {
    /// How many threads shall come, and where the first to come says so.
    pub(super) threads: u32,
    pub(super) place: Option<Place>,
    /// The first threads of the warps that have come, and whether they wait.
    pub(super) warps: Vec<(usize, bool)>,
    /// What those who have come knew.
    pub(super) known: Known,
}

impl Named {
    /// How many threads have come.
    pub(super) fn arrived(&self) -> u32 {
        32 * self.warps.len() as u32
    }
}

pub(super) fn call_of(lane: &Lane) -> Option<(NamedCall, &'static Location<'static>)> {
    match lane.state.get() {
        State::Parked(Pause::Named(call), place) => Some((call, place)),
        _ => None,
    }
}

/// A call that all lanes of the warp make and that is not counted; or the two places at which lanes of it
/// stand, though they have made the same calls as far as the source tells.
pub(super) fn met(warp: &[Lane]) -> Option<(NamedCall, &'static Location<'static>)> {
    let first = call_of(&warp[0]).filter(|(call, _)| !call.counted)?;
    let same = |other: (NamedCall, &'static Location<'static>)| {
        let key = |call: NamedCall| (call.id, call.threads, call.waits, call.counted);
        let parted = first.0.calls.zip(other.0.calls).is_some_and(|(a, b)| a.parting(b).is_some());
        key(first.0) == key(other.0) && first.1 == other.1 && !parted
    };
    warp.iter().all(|lane| call_of(lane).is_some_and(same)).then_some(first)
}
