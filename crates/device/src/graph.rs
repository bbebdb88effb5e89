//! Captured work.

use crate::backend::{Bound, GraphBackend, GraphExecBackend};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::limits;
use crate::stream::Stream;
use simt::{Kernel, KernelArgs, LaunchShape};
use std::fmt;
use std::panic::Location;

/// A kernel launch in a graph: what [`Stream::launch_node`] returns and [`GraphExec::update`] takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeId {
    pub(crate) graph: u64,
    pub(crate) index: usize,
    /// Whether the launch may overlap the one before it.
    pub(crate) overlaps: bool,
}

/// Work that [`Stream::capture`] recorded and did not run.
pub struct Graph {
    pub(crate) backend: Box<dyn GraphBackend>,
    pub(crate) device: Device,
    pub(crate) id: u64,
}

impl Graph {
    /// How many steps it has: launches, copies and fills.
    pub fn len(&self) -> usize {
        self.backend.len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes it ready to run. Several copies may be made; each is updated for itself.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn instantiate(&self) -> Result<GraphExec> {
        Ok(GraphExec { backend: self.backend.instantiate()?, device: self.device.clone(), id: self.id })
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("id", &self.id).field("len", &self.len()).finish_non_exhaustive()
    }
}

/// A graph that is ready to run, any number of times.
pub struct GraphExec {
    backend: Box<dyn GraphExecBackend>,
    device: Device,
    id: u64,
}

impl GraphExec {
    /// Puts all of the graph's work into `stream`, in the order of its capture: one call, whatever the number
    /// of steps, and nothing is allocated. It runs behind the last launch of this same instance as well, on
    /// whatever stream that was; other instances of the graph may run beside it.
    ///
    /// # Safety
    /// The contract of [`Stream::launch`] holds for each launch in the graph, as captured or last updated,
    /// and every buffer and pinned memory that the graph's copies and fills name is still there.
    ///
    /// # Errors
    /// [`Error::WrongDevice`]; [`Error::Capturing`] (a graph does not hold graphs); [`Error::Fault`] and
    /// [`Error::Unordered`] on the CPU; or what the driver reports.
    #[track_caller]
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        self.device.check_same(stream.device(), "the graph")?;
        let _outside = stream.outside_capture("launching a graph")?;
        // SAFETY: this function's contract.
        unsafe { self.backend.launch(stream.backend(), Location::caller()) }
    }

    /// Replaces the kernel, shape and arguments of one launch. Runs that are under way keep the old ones.
    ///
    /// # Safety
    /// The contract of [`Stream::launch`], from the next launch of this graph on.
    ///
    /// # Errors
    /// [`Error::ForeignNode`] for a node of another graph; [`Error::OverlappingNode`] for a kernel that does
    /// not wait for the launch before in the place of one that does; [`Error::Shape`];
    /// [`Error::KernelMissing`]; or what the driver reports. The graph then stays as it was.
    #[track_caller]
    pub unsafe fn update<A: KernelArgs>(
        &mut self,
        node: NodeId,
        kernel: &Kernel<A>,
        shape: LaunchShape,
        args: A,
    ) -> Result<()> {
        if node.graph != self.id {
            return Err(Error::ForeignNode);
        }
        // The graph keeps that the launch may start early, on whichever GPU it would.
        if node.overlaps && !kernel.info().overlaps {
            return Err(Error::OverlappingNode { kernel: kernel.name() });
        }
        limits::check(kernel.info(), shape, self.device.info().max_shared_bytes)?;
        let bound = Bound { kernel: *kernel, args };
        // SAFETY: this function's contract.
        unsafe { self.backend.update(node.index, &bound, shape, Location::caller()) }
    }
}

impl fmt::Debug for GraphExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphExec").field("graph", &self.id).finish_non_exhaustive()
    }
}
