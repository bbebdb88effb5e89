//! What the lanes of a warp, or the threads of a block, exchange when all of them have arrived.

use super::calls::Calls;
use super::fault::{FaultKind, Place};
use super::lane::{BarrierKind, Lane, Pause, State};
use super::matrix::{self, MatrixOp};
use super::named::{self, NamedCall};
use super::tensor::TensorCores;
use core::panic::Location;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FenceScope {
    Block,
    Device,
    /// Of the device, and in one order with all such fences.
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShuffleKind {
    Idx,
    Up,
    Down,
    Xor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VoteKind {
    Ballot,
    All,
    Any,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReduceOp {
    AddU32,
    MinU32,
    MaxU32,
    AddI32,
    MinI32,
    MaxI32,
    And,
    Or,
    Xor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WarpOp {
    Sync,
    Vote(VoteKind),
    MatchAny,
    MatchAll,
    Reduce(ReduceOp),
    /// With the width of the groups.
    Shuffle(ShuffleKind, u32),
    /// The value is the address of the lane's [`Operands`](super::matrix::Operands).
    Matrix(MatrixOp),
}

/// One lane's call of a warp primitive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WarpCall {
    pub(crate) mask: u32,
    pub(crate) op: WarpOp,
    pub(crate) value: u64,
    /// Source lane, distance or lane mask of a shuffle.
    pub(crate) param: u32,
    /// Which calls led to it, of operations that all lanes have to come to by the same ones.
    pub(crate) calls: Option<&'static Calls>,
}

impl WarpCall {
    pub(super) fn new(mask: u32, op: WarpOp, value: u64, param: u32) -> Self {
        WarpCall { mask, op, value, param, calls: None }
    }
}

type Stuck = (usize, Place, FaultKind);

fn warp_call(lane: &Lane) -> Option<Call> {
    match lane.state.get() {
        State::Parked(Pause::Warp(call), place) => Some((call, place)),
        _ => None,
    }
}

/// One place has one address, but for inlining into several compilation units.
fn same_place(a: &'static Location<'static>, b: &'static Location<'static>) -> bool {
    core::ptr::eq(a, b) || a == b
}

type Call = (WarpCall, &'static Location<'static>);

/// Whether two lanes make one call. Exchanges of a warp wait for whoever makes the same one, wherever it
/// stands, says the PTX ISA; what is `.aligned` has to be one instruction.
fn same_call(a: Call, b: Call) -> bool {
    let aligned = matches!(a.0.op, WarpOp::Matrix(_));
    let parted = || a.0.calls.zip(b.0.calls).is_some_and(|(a, b)| a.parting(b).is_some());
    a.0.mask == b.0.mask && a.0.op == b.0.op && (!aligned || same_place(a.1, b.1) && !parted())
}

/// The first lane that `call`'s mask names and that does not wait in the same call.
fn missing(warp: &[Lane], call: Call) -> Option<usize> {
    (0..32)
        .filter(|lane| call.0.mask >> lane & 1 == 1)
        .find(|&lane| !warp.get(lane).and_then(warp_call).is_some_and(|other| same_call(call, other)))
}

/// A warp primitive that has all its lanes.
pub(super) struct Settled {
    /// Which lanes.
    pub(super) mask: u32,
    /// What each of them gets.
    pub(super) results: [u64; 32],
    /// Whether it orders their memory accesses: `bar.warp.sync` does, an exchange of registers does not.
    pub(super) orders_memory: bool,
}

/// Finds a warp primitive that has all its lanes and computes what each of them gets. `warp` starts at
/// lane 0.
pub(super) fn settle(warp: &[Lane]) -> Result<Option<Settled>, Stuck> {
    for lane in warp {
        let Some(call) = warp_call(lane) else {
            continue;
        };
        if missing(warp, call).is_some() {
            continue;
        }
        let mask = call.0.mask;
        let mut calls = [call.0; 32];
        for (slot, other) in calls.iter_mut().zip(warp) {
            if let Some((other, _)) = warp_call(other) {
                *slot = other;
            }
        }
        let results =
            exchange(mask, call.0.op, &calls, lane.block().tensor_cores).map_err(|(reader, source)| {
                (reader, call.1.into(), FaultKind::ShuffleSource { mask, lane: source })
            })?;
        return Ok(Some(Settled { mask, results, orders_memory: call.0.op == WarpOp::Sync }));
    }
    Ok(None)
}

/// What each lane of `mask` gets; or the lane that reads one outside the mask, and which.
fn exchange(
    mask: u32,
    op: WarpOp,
    calls: &[WarpCall; 32],
    tensor_cores: TensorCores,
) -> Result<[u64; 32], (usize, u32)> {
    let lanes = || (0..32usize).filter(|lane| mask >> lane & 1 == 1);
    let values = || lanes().map(|lane| calls[lane].value);
    Ok(match op {
        WarpOp::Sync => [0; 32],
        WarpOp::Vote(VoteKind::Ballot) => {
            [lanes().fold(0, |ballot, lane| ballot | calls[lane].value << lane); 32]
        }
        WarpOp::Vote(VoteKind::All) => [values().all(|v| v != 0) as u64; 32],
        WarpOp::Vote(VoteKind::Any) => [values().any(|v| v != 0) as u64; 32],
        WarpOp::MatchAll => {
            let first = values().next();
            [values().all(|v| Some(v) == first) as u64; 32]
        }
        WarpOp::MatchAny => core::array::from_fn(|own| {
            let same = lanes().filter(|&lane| calls[lane].value == calls[own].value);
            same.fold(0, |mask, lane| mask | 1 << lane)
        }),
        WarpOp::Reduce(op) => {
            let words = values().map(|v| v as u32);
            let signed = values().map(|v| v as u32 as i32);
            let result = match op {
                ReduceOp::AddU32 => words.fold(0, u32::wrapping_add),
                ReduceOp::MinU32 => words.min().unwrap_or(0),
                ReduceOp::MaxU32 => words.max().unwrap_or(0),
                ReduceOp::AddI32 => signed.fold(0, i32::wrapping_add) as u32,
                ReduceOp::MinI32 => signed.min().unwrap_or(0) as u32,
                ReduceOp::MaxI32 => signed.max().unwrap_or(0) as u32,
                ReduceOp::And => words.fold(u32::MAX, |a, b| a & b),
                ReduceOp::Or => words.fold(0, |a, b| a | b),
                ReduceOp::Xor => words.fold(0, |a, b| a ^ b),
            };
            [result as u64; 32]
        }
        WarpOp::Shuffle(kind, width) => {
            let mut results = [0; 32];
            for lane in lanes() {
                let source = shuffle_source(kind, width, lane as u32, calls[lane].param);
                if mask >> source & 1 == 0 {
                    return Err((lane, source));
                }
                results[lane] = calls[source as usize].value;
            }
            results
        }
        WarpOp::Matrix(op) => {
            matrix::exchange(op, &calls.map(|call| call.value), tensor_cores);
            [0; 32]
        }
    })
}

/// Which lane a shuffle reads, as the PTX ISA computes it under `shfl.sync`.
fn shuffle_source(kind: ShuffleKind, width: u32, lane: u32, param: u32) -> u32 {
    let (group, within) = (lane & !(width - 1), lane & (width - 1));
    let param = param & 31;
    let (source, inside) = match kind {
        ShuffleKind::Idx => (group | (param & (width - 1)), true),
        ShuffleKind::Up => (lane.wrapping_sub(param), within >= param),
        ShuffleKind::Down => (lane + param, within + param < width),
        ShuffleKind::Xor => (lane ^ param, (lane ^ param) < group + width),
    };
    if inside { source } else { lane }
}

/// Whether all threads wait at one barrier of the source, by the same calls: then nobody is stuck.
pub(super) fn all_meet(lanes: &[Lane]) -> bool {
    let at = |lane: &Lane| match lane.state.get() {
        State::Parked(Pause::Barrier { kind, calls, .. }, place) => {
            Some((kind, calls.map(core::ptr::from_ref), core::ptr::from_ref(place)))
        }
        _ => None,
    };
    lanes.first().and_then(at).is_some_and(|first| lanes.iter().all(|lane| at(lane) == Some(first)))
}

/// Why a warp of the block cannot go on, whatever other warps do.
pub(super) fn why_a_warp_is_stuck(lanes: &[Lane]) -> Option<Stuck> {
    for (index, lane) in lanes.iter().enumerate() {
        let Some(call) = warp_call(lane) else {
            continue;
        };
        let first = index - index % 32;
        let warp = &lanes[first..lanes.len().min(first + 32)];
        let absent = missing(warp, call).unwrap_or(index % 32);
        let mut place = Place::from(call.1);
        let mut waits_at = warp.get(absent).and_then(waiting_place);
        let theirs = warp.get(absent).and_then(warp_call).and_then(|other| other.0.calls);
        if let Some([ours, theirs]) = call.0.calls.zip(theirs).and_then(|(a, b)| a.parting(b)) {
            // In one line of the source: the calls that lead there tell them apart.
            (place, waits_at) = (ours, Some(theirs));
        }
        let kind = FaultKind::LaneMissing { mask: call.0.mask, lane: absent as u32, waits_at };
        return Some((index, place, kind));
    }
    lanes.chunks(32).find_map(stuck_at_named)
}

/// Why no thread of the block can move, if they do not all wait at one barrier.
pub(super) fn why_stuck(lanes: &[Lane]) -> Option<Stuck> {
    // A warp first: threads of other warps may wait at a barrier just because this warp hangs.
    if let Some(stuck) = why_a_warp_is_stuck(lanes) {
        return Some(stuck);
    }
    let (index, kind, place) = lanes.iter().enumerate().find_map(|(index, lane)| match lane.state.get() {
        State::Parked(Pause::Barrier { kind, .. }, place) => Some((index, kind, place)),
        _ => None,
    })?;
    if let Some(parted) = parted_at_barrier(lanes) {
        return Some(parted);
    }
    // Lanes of one warp meet in one call; warps may come from different ones.
    let waits_at = |lane: &Lane| match lane.state.get() {
        State::Parked(Pause::Barrier { kind: k, .. }, place) if k == kind => Some(place),
        _ => None,
    };
    let of_warp = |lane: &Lane| waits_at(&lanes[lane.linear as usize / 32 * 32]);
    let is_there = |lane: &Lane| {
        waits_at(lane).zip(of_warp(lane)).is_some_and(|(place, first)| same_place(place, first))
    };
    let absent = lanes.iter().find(|lane| !is_there(lane))?;
    let (index, place) = match waits_at(absent).and(of_warp(absent)) {
        Some(warps) => (lanes.iter().position(|lane| waits_at(lane) == Some(warps)).unwrap_or(index), warps),
        None => (index, place),
    };
    let kind = FaultKind::DivergentBarrier { absent: absent.thread, waits_at: waiting_place(absent) };
    Some((index, place.into(), kind))
}

/// A lane that has come to a barrier with a number without all others of its warp.
fn stuck_at_named(warp: &[Lane]) -> Option<Stuck> {
    let here = |lane: &Lane| named::call_of(lane).filter(|(call, _)| !call.counted);
    let (lane, (call, place)) = warp.iter().find_map(|lane| here(lane).map(|call| (lane, call)))?;
    let fault = |absent: &Lane, place, waits_at| {
        let kind = FaultKind::DivergentBarrier { absent: absent.thread, waits_at };
        Some((lane.linear as usize, place, kind))
    };
    let same = |other: &Lane| {
        let key = |call: NamedCall| (call.id, call.threads, call.waits);
        here(other).is_some_and(|(theirs, at)| key(theirs) == key(call) && at == place)
    };
    if let Some(absent) = warp.iter().find(|other| !same(other)) {
        return fault(absent, place.into(), waiting_place(absent));
    }
    warp.iter().find_map(|other| {
        let [ours, theirs] = call.calls?.parting(here(other)?.0.calls?)?;
        fault(other, ours, Some(theirs))
    })
}

/// Two lanes of one warp that have come to one barrier of the source by different calls: two barriers.
fn parted_at_barrier(lanes: &[Lane]) -> Option<Stuck> {
    let calls = |lane: &Lane| match lane.state.get() {
        State::Parked(Pause::Barrier { calls, .. }, place) => Some((calls?, place)),
        _ => None,
    };
    lanes.chunks(32).find_map(|warp| {
        let (ours, place) = calls(&warp[0])?;
        let (other, [here, there]) = warp.iter().find_map(|lane| {
            let (theirs, other_place) = calls(lane)?;
            let parting = ours.parting(theirs).filter(|_| place == other_place)?;
            Some((lane, parting))
        })?;
        let kind = FaultKind::DivergentBarrier { absent: other.thread, waits_at: Some(there) };
        Some((warp[0].linear as usize, here, kind))
    })
}

fn waiting_place(lane: &Lane) -> Option<Place> {
    match lane.state.get() {
        State::Parked(_, place) => Some(place.into()),
        _ => None,
    }
}

/// What a barrier that all threads have reached hands each of them.
pub(super) fn barrier_value(lanes: &[Lane]) -> Option<u32> {
    let mut calls = lanes.iter().map(|lane| match lane.state.get() {
        State::Parked(Pause::Barrier { kind, predicate, .. }, _) => Some((kind, predicate)),
        _ => None,
    });
    let (kind, _) = calls.clone().next()??;
    let passed =
        calls.try_fold(0, |passed, call| call.map(|(_, predicate)| passed + (predicate != 0) as u32))?;
    Some(match kind {
        BarrierKind::Plain => 0,
        BarrierKind::Count => passed,
        BarrierKind::And => (passed as usize == lanes.len()) as u32,
        BarrierKind::Or => (passed > 0) as u32,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffle_sources_follow_the_ptx_isa() {
        assert_eq!(shuffle_source(ShuffleKind::Up, 32, 0, 1), 0);
        assert_eq!(shuffle_source(ShuffleKind::Up, 8, 9, 1), 8);
        assert_eq!(shuffle_source(ShuffleKind::Up, 8, 8, 1), 8);
        assert_eq!(shuffle_source(ShuffleKind::Down, 32, 31, 1), 31);
        assert_eq!(shuffle_source(ShuffleKind::Down, 16, 15, 1), 15);
        assert_eq!(shuffle_source(ShuffleKind::Idx, 8, 20, 11), 19);
        assert_eq!(shuffle_source(ShuffleKind::Xor, 32, 5, 16), 21);
        // Across groups `bfly` reads only downwards: the clamp is the group's last lane.
        assert_eq!(shuffle_source(ShuffleKind::Xor, 8, 5, 8), 5);
        assert_eq!(shuffle_source(ShuffleKind::Xor, 8, 13, 8), 5);
    }
}
