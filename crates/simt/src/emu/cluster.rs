//! Blocks of one cluster: their barrier, and each other's shared memory.
//!
//! A phase of the barrier is over when every thread of the cluster has arrived; what each of them did before
//! is known to all who then wait. A thread arrives and waits in turns, so no thread is ever more than one
//! phase ahead of another.

use super::block::Block;
use super::clock::Known;
use super::fault::{FaultKind, Space};
use super::history::Access;
use super::lane::{
    Lane, Look, after_atomic, before_atomic, before_plain, breaks, calls, park, raise, with_lane,
};
use super::lane::{Pause, State};
use super::memory::{access, locate, number};
use super::mutation::Change;
use super::named::{CLUSTER, NamedCall};
use super::race::Races;
use super::shared::{shared_atomic, shared_load, shared_store, update};
use crate::atomic::{AtomicOp, AtomicScope, AtomicWord};
use bytemuck::Pod;
use core::cell::RefCell;
use core::panic::Location;

/// What the blocks of one cluster share.
pub(crate) struct Cluster {
    /// By rank. Each of them is there for as long as a thread of any of them is.
    blocks: Vec<*const Block>,
    barrier: RefCell<Barrier>,
}

/// The cluster's barrier.
#[derive(Default)]
struct Barrier {
    /// The number of the phase under way.
    phase: u32,
    /// How many threads have arrived in it, and what they did and knew.
    arrived: u32,
    coming: Known,
    /// Whether all have.
    is_full: bool,
    /// The same of the phase before.
    over: Known,
}

impl Cluster {
    pub(super) fn new(blocks: Vec<*const Block>) -> Self {
        Cluster { blocks, barrier: RefCell::default() }
    }

    /// A new cluster's blocks begin.
    pub(super) fn reset(&self) {
        *self.barrier.borrow_mut() = Barrier::default();
    }

    pub(crate) fn size(&self) -> u32 {
        self.blocks.len() as u32
    }

    pub(super) fn phase(&self) -> u32 {
        self.barrier.borrow().phase
    }

    /// So many threads of the warp that starts at thread `first` of `block` arrive.
    pub(super) fn arrive(&self, block: &Block, first: u32, lanes: u32) {
        let mut barrier = self.barrier.borrow_mut();
        if let Some(races) = &block.races {
            races.borrow_mut().arrive(block.number.get(), first, lanes, &mut barrier.coming);
        }
        barrier.arrived += lanes;
        barrier.is_full = u64::from(barrier.arrived) == block.shape.block.count() * self.blocks.len() as u64;
    }

    /// Whether all threads have arrived.
    pub(super) fn is_full(&self) -> bool {
        self.barrier.borrow().is_full
    }

    /// Ends the phase if all threads have arrived, and says whether they have. Between turns: so the blocks
    /// go on in the order that the launch runs in, and not the one first that came last.
    pub(super) fn end_phase(&self) -> bool {
        let mut barrier = self.barrier.borrow_mut();
        let is_full = barrier.is_full;
        if is_full {
            let over = std::mem::take(&mut barrier.coming);
            *barrier = Barrier { phase: barrier.phase + 1, over, ..Barrier::default() };
        }
        is_full
    }

    /// The warp that starts at thread `first` of `block` has waited for the phase before.
    pub(super) fn depart(&self, block: &Block, first: u32) {
        if let Some(races) = &block.races {
            races.borrow_mut().depart(first, &self.barrier.borrow().over);
        }
    }

    fn block(&self, rank: u32) -> &Block {
        // SAFETY: the team keeps its blocks boxed for as long as a thread of one of them is there.
        unsafe { &*self.blocks[rank as usize] }
    }
}

/// Does `f` to this thread's races, with the past of the shared memory of `owner` in the place of its own
/// block's.
pub(super) fn with_past_of<R>(lane: &Lane, owner: &Block, f: impl FnOnce(&mut Races) -> R) -> Option<R> {
    let (own, theirs) = (lane.block().races.as_ref()?, owner.races.as_ref()?);
    if core::ptr::eq(own, theirs) {
        return Some(f(&mut own.borrow_mut()));
    }
    let (mut own, mut theirs) = (own.borrow_mut(), theirs.borrow_mut());
    own.swap_pasts(&mut theirs);
    let result = f(&mut own);
    own.swap_pasts(&mut theirs);
    Some(result)
}

/// One half of the cluster's barrier.
#[track_caller]
pub(crate) fn cluster_barrier(waits: bool) {
    let place = Location::caller();
    if breaks(Change::NoBarrier, place) {
        return;
    }
    let call = NamedCall { id: CLUSTER, threads: 0, waits, counted: false, calls: calls() };
    park(Pause::Named(call), place);
}

/// Whether the thread waits at the cluster's barrier.
pub(super) fn waits(lane: &Lane) -> bool {
    let State::Parked(Pause::Named(call), _) = lane.state.get() else { return false };
    call.id == CLUSTER && call.waits
}

/// Whether the cluster has a block of that rank.
#[track_caller]
pub(crate) fn check_rank(rank: u32) {
    let place = Location::caller();
    let size = with_lane(|lane| lane.block().cluster().size());
    if rank >= size {
        raise(place, FaultKind::ClusterRank { rank, size });
    }
}

/// An array of a block of the cluster, as a kernel names it.
#[derive(Clone, Copy)]
pub(crate) struct Remote {
    pub(crate) rank: u32,
    /// Byte offset in that block's shared memory.
    pub(crate) base: u32,
    /// Elements.
    pub(crate) len: u32,
}

impl Remote {
    fn is_own(self) -> bool {
        with_lane(|lane| lane.block().rank.get() == self.rank)
    }

    /// The block, and the offset in its shared memory of a `V` at element `index`, to which nothing stands in
    /// the way of an access.
    fn reach<'l, T, V>(
        self,
        lane: &'l Lane,
        index: u32,
        access: Access,
        place: &'static Location<'static>,
    ) -> (&'l Block, u32) {
        let Remote { rank, base, len } = self;
        let (own, bytes, write) = (lane.block(), size_of::<V>(), access.writes());
        let index = own.index(index.into(), bytes.div_ceil(size_of::<T>()) as u64, place);
        let offset =
            u64::from(base) + locate::<T, V>(Space::Cluster, base.into(), len.into(), index, write, place);
        let (needed, launched_with) = (offset + bytes as u64, lane.shared.bytes);
        if needed > launched_with.into() {
            raise(place, FaultKind::SharedTooSmall { needed, launched_with });
        }
        if lane.is_watched() {
            before_plain(lane, || Look { space: Space::Cluster, byte: offset, index, value: None }, place);
        }
        let owner = own.cluster().block(rank);
        if owner.is_done.get() {
            raise(place, FaultKind::ClusterEnded { rank });
        }
        let heard = own.races.as_ref().map(|races| races.borrow().has_heard_of(lane, owner.number.get()));
        if !heard.unwrap_or_else(|| owner.has_started()) {
            raise(place, FaultKind::ClusterNotStarted { rank });
        }
        let is_put = access == Access::Write || access.is_put();
        if is_put || !owner.shared.is_written(offset as u32, bytes) {
            if let Some(kind) = owner.shared.in_the_way(offset as u32, bytes) {
                raise(place, kind);
            }
            if !is_put {
                raise(place, FaultKind::ClusterUnwritten { rank, offset: offset as u32, bytes });
            }
        }
        let is_broken = access.is_atomic() && own.breaks(Change::NotAtomic, place);
        let access = if is_broken { Access::Write } else { access };
        let found = with_past_of(lane, owner, |races| {
            races.visit(lane, access, place);
            races.access(lane, Space::Cluster, (offset, index), bytes, access, place)
        });
        if let Some(kind) = found.flatten() {
            raise(place, kind);
        }
        (owner, offset as u32)
    }
}

#[track_caller]
pub(crate) fn cluster_load<T: Pod, V: Pod>(array: Remote, index: u32) -> V {
    if array.is_own() {
        return shared_load::<T, V>(array.base, array.len, index);
    }
    let place = Location::caller();
    with_lane(|lane| {
        let (owner, offset) = array.reach::<T, V>(lane, index, Access::Read, place);
        // SAFETY: inside the block's shared memory and aligned; one OS thread uses that of a whole cluster.
        unsafe { owner.shared.view().read(offset as usize) }
    })
}

#[track_caller]
pub(crate) fn cluster_store<T: Pod, V: Pod>(array: Remote, index: u32, value: V) {
    if array.is_own() {
        return shared_store::<T, V>(array.base, array.len, index, value);
    }
    let place = Location::caller();
    with_lane(|lane| {
        let (owner, offset) = array.reach::<T, V>(lane, index, Access::Write, place);
        owner.shared.mark_written(offset, size_of::<V>());
        // SAFETY: as in `cluster_load`.
        unsafe { owner.shared.view().write(offset as usize, value) }
        owner.changed.set(true);
        lane.block().changed.set(true);
    });
}

#[track_caller]
pub(crate) fn cluster_atomic<T: AtomicWord>(
    op: AtomicOp,
    array: Remote,
    index: u32,
    value: T,
    compare: T,
) -> T {
    if array.is_own() {
        return shared_atomic(op, array.base, array.len, index, value, compare);
    }
    let place = Location::caller();
    before_atomic(place);
    let (old, byte) = with_lane(|lane| {
        let access = access(op, AtomicScope::Device);
        let (owner, offset) = array.reach::<T, T>(lane, index, access, place);
        if access.is_put() {
            owner.shared.mark_written(offset, size_of::<T>());
        }
        let byte = u64::from(offset);
        // SAFETY: `reach` has found it inside the block's shared memory, and aligned.
        let old = unsafe { update(lane, owner, op, (Space::Cluster, byte), (value, compare), place) };
        (old, byte)
    });
    let value = Some(number(old));
    after_atomic(Look { space: Space::Cluster, byte, index: index.into(), value }, place);
    old
}
