//! Captured graphs.

use super::context::Context;
use super::ffi::{check, cu, note};
use super::module::Module;
use crate::backend::{At, BoundKernel, GraphBackend, GraphExecBackend, StreamBackend};
use crate::error::{Error, Result, shape_text};
use cust::sys::{CUDA_KERNEL_NODE_PARAMS, CUgraph, CUgraphExec, CUgraphNode};
use simt::{LaunchShape, MAX_PARAMS};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Arc;

/// The driver's graph. Nodes are its parts, so whatever names one keeps it.
struct Owned {
    raw: CUgraph,
    nodes: Vec<CUgraphNode>,
    len: usize,
    module: Arc<Module>,
    context: Arc<Context>,
}

// SAFETY: after its capture a graph is only read, and the driver lets any thread do so.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        if self.context.bind_quietly() {
            // SAFETY: the capture gave it to us, and it is not used again.
            note(unsafe { cu!(cuGraphDestroy(self.raw)) }, "dropping a graph");
        }
    }
}

pub(super) struct CudaGraph {
    owned: Arc<Owned>,
}

impl CudaGraph {
    /// Takes over `raw`, which holds `nodes`. The context is bound.
    pub(super) fn new(
        raw: CUgraph,
        nodes: Vec<CUgraphNode>,
        module: &Arc<Module>,
        context: &Arc<Context>,
    ) -> Result<Self> {
        let mut owned = Owned { raw, nodes, len: 0, module: module.clone(), context: context.clone() };
        // SAFETY: `len` is valid for a write; with no list the driver only counts.
        let code = unsafe { cu!(cuGraphGetNodes(raw, null_mut(), &mut owned.len)) };
        check(code, || "counting a graph's steps".into())?;
        Ok(CudaGraph { owned: Arc::new(owned) })
    }
}

impl GraphBackend for CudaGraph {
    fn len(&self) -> usize {
        self.owned.len
    }

    fn instantiate(&self) -> Result<Box<dyn GraphExecBackend>> {
        self.owned.context.bind()?;
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for a write, and the graph lives.
        let code = unsafe { cu!(cuGraphInstantiateWithFlags(&mut raw, self.owned.raw, 0)) };
        check(code, || format!("making a graph of {} steps ready", self.owned.len))?;
        Ok(Box::new(CudaGraphExec { raw, graph: self.owned.clone() }))
    }
}

struct CudaGraphExec {
    raw: CUgraphExec,
    graph: Arc<Owned>,
}

// SAFETY: launching from several threads is what the contract of `launch` covers; an update needs `&mut`.
unsafe impl Send for CudaGraphExec {}
// SAFETY: as above.
unsafe impl Sync for CudaGraphExec {}

impl GraphExecBackend for CudaGraphExec {
    unsafe fn launch(&self, stream: &dyn StreamBackend, _: At) -> Result<()> {
        self.graph.context.bind()?;
        stream.put_other(&mut |stream| {
            // SAFETY: both live, and are of one device; the rest is this function's contract.
            let code = unsafe { cu!(cuGraphLaunch(self.raw, stream.cast())) };
            check(code, || format!("launching a graph of {} steps", self.graph.len))
        })
    }

    unsafe fn update(
        &mut self,
        node: usize,
        kernel: &dyn BoundKernel,
        shape: LaunchShape,
        _: At,
    ) -> Result<()> {
        let node = *self.graph.nodes.get(node).ok_or(Error::ForeignNode)?;
        self.graph.context.bind()?;
        let function = self.graph.module.function(kernel.info())?;
        function.prepare(shape)?;
        let mut params = [null(); MAX_PARAMS];
        kernel.params(&mut params);
        let params = CUDA_KERNEL_NODE_PARAMS {
            func: function.raw,
            gridDimX: shape.grid.x,
            gridDimY: shape.grid.y,
            gridDimZ: shape.grid.z,
            blockDimX: shape.block.x,
            blockDimY: shape.block.y,
            blockDimZ: shape.block.z,
            sharedMemBytes: shape.shared_bytes,
            kernelParams: params.as_mut_ptr().cast::<*mut c_void>(),
            extra: null_mut(),
        };
        // An edge by which the node may overlap its predecessor stays; the caller lets only kernels through
        // that wait. SAFETY: the node is of the graph that this one was made from; the driver copies the
        // parameters, and by the contract they suit the kernel.
        let code = unsafe { cu!(cuGraphExecKernelNodeSetParams(self.raw, node, &params)) };
        check(code, || {
            format!("updating a graph's launch to {} with {}", kernel.info().name, shape_text(&shape))
        })
    }
}

impl Drop for CudaGraphExec {
    fn drop(&mut self) {
        if self.graph.context.bind_quietly() {
            // SAFETY: made by `instantiate`, and not used again; the driver lets a run that is under way end.
            note(unsafe { cu!(cuGraphExecDestroy(self.raw)) }, "dropping a graph");
        }
    }
}
