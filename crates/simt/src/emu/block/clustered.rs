//! A block as one of a cluster: its threads at the cluster's barrier, and what others do with its memory.

use super::super::cluster::{self, Cluster};
use super::super::fault::{Fault, FaultKind, ThreadId};
use super::super::lane::Lane;
use super::super::named;
use super::{Block, BlockTurn, Runner};
use core::panic::Location;
use std::rc::Rc;

impl Runner<'_> {
    pub(in super::super) fn block(&self) -> *const Block {
        &*self.block
    }

    /// Makes it the block of this rank.
    pub(in super::super) fn join(&self, rank: u32, cluster: &Rc<Cluster>) {
        self.block.rank.set(rank);
        self.block.cluster.get_or_init(|| cluster.clone());
    }

    pub(in super::super) fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// All lanes of the warp that starts at `first` have come to the cluster's barrier, or wait there: lets
    /// them go on, unless they have to wait longer; says whether it did.
    pub(super) fn settle_cluster(
        &mut self,
        first: usize,
        waits: bool,
        place: &'static Location<'static>,
    ) -> Result<bool, Box<Fault>> {
        let warp = &self.lanes[first..self.lanes.len().min(first + 32)];
        if let Some(lane) = warp.iter().find(|lane| lane.arrived.get().is_some() != waits) {
            return Err(self.fault(lane, Some(place.into()), FaultKind::ClusterArrival { waits }));
        }
        let cluster = self.block.cluster();
        let phase = cluster.phase();
        if waits {
            if warp[0].arrived.get() == Some(phase) {
                return Ok(false);
            }
            warp.iter().for_each(|lane| lane.arrived.set(None));
            cluster.depart(&self.block, first as u32);
        } else {
            warp.iter().for_each(|lane| lane.arrived.set(Some(phase)));
            cluster.arrive(&self.block, first as u32, warp.len() as u32);
        }
        for lane in self.order_of(first) {
            self.resume(lane, 0)?;
        }
        Ok(true)
    }

    /// Whether a warp waits at the cluster's barrier.
    pub(super) fn is_held(&self) -> bool {
        self.lanes.chunks(32).any(|warp| cluster::waits(&warp[0]) && named::met(warp).is_some())
    }

    /// An access to the shared memory of this block, which ends, by a thread of another one that it has not
    /// waited for.
    pub(super) fn unseen_visitor(&self) -> Option<Box<Fault>> {
        let ((block, thread), place) = self.block.races.as_ref()?.borrow().unseen_visitor()?;
        let shape = self.block.shape;
        let thread = ThreadId { block: shape.grid.at(block), thread: shape.block.at(thread.into()) };
        let kind = FaultKind::ClusterEnded { rank: self.block.rank.get() };
        let fault = Fault::of(&self.lanes[0], Some(place.into()), kind);
        Some(Box::new(Fault { thread: Some(thread), ..fault }))
    }

    /// A turn after which no thread can go on before others come to the cluster's barrier.
    pub(super) fn held(&self, further: bool) -> BlockTurn {
        let further = self.block.ended.take() || further;
        BlockTurn::Held { changed: further || self.block.changed.get() }
    }
}
