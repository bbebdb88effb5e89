//! Streams and events.

use super::context::Context;
use super::ffi::{LaunchAttribute, LaunchConfig, check, cu, failure, launch_kernel_ex, note};
use super::graph::CudaGraph;
use super::module::{Function, Module};
use crate::backend::{At, BoundKernel, EventBackend, GraphBackend, Place, StreamBackend};
use crate::error::{Result, launch_text};
use cust::sys::{CUevent, CUgraphNode, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};
use simt::{LaunchShape, MAX_PARAMS};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

/// Does not wait for the default stream, which other code of the process may use.
const NON_BLOCKING: u32 = 1;
/// An event that is only waited for.
const NO_TIMING: u32 = 2;

/// What the mutexes here hold is whole at any time, also after a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Everything of a stream that those who wait for the whole device need.
struct State {
    raw: CUstream,
    /// Whether the stream is another library's: it is neither made nor dropped here.
    foreign: bool,
    /// Recorded where the last capture began; null for a foreign stream, whose captures are its owner's.
    before_capture: CUevent,
    /// Held while the stream is waited for, so that no capture begins meanwhile: the wait would break it.
    capturing: Mutex<bool>,
    context: Arc<Context>,
}

// SAFETY: the driver lets any thread use a stream and an event.
unsafe impl Send for State {}
// SAFETY: as above.
unsafe impl Sync for State {}

/// What the driver answers of the legacy default stream while another one captures.
const CAPTURE_IMPLICIT: u32 = 906;

/// Every stream of the process, whichever `Device` made it: they share the GPU's memory.
static STREAMS: Mutex<Vec<Weak<State>>> = Mutex::new(Vec::new());

/// Waits for all streams of the context's GPU.
pub(super) fn synchronize_all(context: &Context) -> Result<()> {
    let streams: Vec<Arc<State>> = lock(&STREAMS)
        .iter()
        .filter_map(Weak::upgrade)
        .filter(|state| state.context.raw() == context.raw())
        .collect();
    streams.iter().try_for_each(|state| state.synchronize())
}

impl State {
    fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        context.bind()?;
        let (mut raw, mut before_capture) = (null_mut(), null_mut());
        // SAFETY: valid for a write.
        let code = unsafe { cu!(cuEventCreate(&mut before_capture, NO_TIMING)) };
        check(code, || "making an event".into())?;
        // SAFETY: valid for a write.
        let code = unsafe { cu!(cuStreamCreate(&mut raw, NON_BLOCKING)) };
        if let Err(error) = check(code, || "making a stream".into()) {
            // SAFETY: just made, and not used again.
            note(unsafe { cu!(cuEventDestroy_v2(before_capture)) }, "dropping an event");
            return Err(error);
        }
        Ok(Self::announced(State {
            raw,
            foreign: false,
            before_capture,
            capturing: Mutex::new(false),
            context: context.clone(),
        }))
    }

    /// A stream that is waited for with the device, for as long as it is here.
    fn announced(state: State) -> Arc<Self> {
        let state = Arc::new(state);
        let mut streams = lock(&STREAMS);
        streams.retain(|other| other.strong_count() != 0);
        streams.push(Arc::downgrade(&state));
        state
    }

    /// Whether the driver says that the stream captures.
    fn captures(&self) -> Result<bool> {
        self.context.bind()?;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: `status` is valid for a write, and the stream lives.
        let code = unsafe { cu!(cuStreamIsCapturing(self.raw, &mut status)) };
        // The legacy default stream, while one captures that it would wait for: it may not be waited for.
        if code == CAPTURE_IMPLICIT {
            return Ok(true);
        }
        check(code, || "asking whether the stream captures".into())?;
        Ok(!matches!(status, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE))
    }

    fn synchronize(&self) -> Result<()> {
        // A wait would break the capture, and where that began is its owner's to know.
        if self.foreign && self.captures()? {
            return Ok(());
        }
        self.context.bind()?;
        let capturing = lock(&self.capturing);
        let code = if *capturing {
            // SAFETY: the event was recorded when the capture began.
            unsafe { cu!(cuEventSynchronize(self.before_capture)) }
        } else {
            // SAFETY: the stream lives as long as `self`.
            unsafe { cu!(cuStreamSynchronize(self.raw)) }
        };
        check(code, || "waiting for the stream".into())
    }
}

impl Drop for State {
    fn drop(&mut self) {
        if !self.foreign && self.context.bind_quietly() {
            // Who waits for the device waits for the streams that are there: none may go with work under way.
            // SAFETY: made by `new`, and not used again after the next call.
            note(unsafe { cu!(cuStreamSynchronize(self.raw)) }, "waiting for a stream that is dropped");
            // SAFETY: as above.
            note(unsafe { cu!(cuStreamDestroy_v2(self.raw)) }, "dropping a stream");
            // SAFETY: as above.
            note(unsafe { cu!(cuEventDestroy_v2(self.before_capture)) }, "dropping an event");
        }
    }
}

/// What was put into a stream.
#[derive(Default)]
struct Order {
    /// The launches of the running capture that have a node, as the driver's handles.
    nodes: Vec<CUgraphNode>,
    /// Whether the last thing was a launch: only after one may a launch overlap what is before it. For other
    /// work CUDA does not say what a kernel that starts early would wait for.
    after_launch: bool,
}

pub(super) struct CudaStream {
    raw: CUstream,
    state: Arc<State>,
    /// Held while anything is put into the stream, so that it is known what came last.
    order: Mutex<Order>,
    module: Arc<Module>,
    context: Arc<Context>,
}

// SAFETY: the driver lets any thread use a stream, and a capture in the relaxed mode.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    pub(super) fn new(context: &Arc<Context>, module: &Arc<Module>) -> Result<Self> {
        let state = State::new(context)?;
        Ok(CudaStream {
            raw: state.raw,
            state,
            order: Mutex::default(),
            module: module.clone(),
            context: context.clone(),
        })
    }

    /// A stream that another library owns.
    ///
    /// # Safety
    /// The contract of [`crate::Stream::from_raw`].
    pub(super) unsafe fn foreign(context: &Arc<Context>, module: &Arc<Module>, raw: CUstream) -> Self {
        let state = State::announced(State {
            raw,
            foreign: true,
            before_capture: null_mut(),
            capturing: Mutex::new(false),
            context: context.clone(),
        });
        CudaStream { raw, state, order: Mutex::default(), module: module.clone(), context: context.clone() }
    }

    pub(super) fn handle(&self) -> CUstream {
        self.raw
    }

    /// To be held while something other than a launch is put into the stream.
    fn other_work(&self) -> MutexGuard<'_, Order> {
        let mut order = lock(&self.order);
        order.after_launch = false;
        order
    }

    /// Finds the kernel and makes the driver accept `shape`. The context is bound then.
    #[inline]
    fn prepared(&self, kernel: &dyn BoundKernel, shape: LaunchShape) -> Result<&Function> {
        self.context.bind()?;
        let function = self.module.function(kernel.info())?;
        function.prepare(shape)?;
        Ok(function)
    }

    /// # Safety
    /// The contract of [`StreamBackend::launch`]; `function` is `kernel`, prepared for `shape`.
    #[inline]
    unsafe fn put_launch(
        &self,
        order: &mut Order,
        function: &Function,
        kernel: &dyn BoundKernel,
        shape: LaunchShape,
    ) -> Result<()> {
        let mut params = [null(); MAX_PARAMS];
        kernel.params(&mut params);
        let params = params.as_mut_ptr().cast::<*mut c_void>();
        let LaunchShape { grid, block, shared_bytes } = shape;
        let code = if kernel.info().overlaps && self.module.overlap && order.after_launch {
            let config = LaunchConfig {
                grid: [grid.x, grid.y, grid.z],
                block: [block.x, block.y, block.z],
                shared_bytes,
                stream: self.raw,
                attributes: &LaunchAttribute::OVERLAP,
                attribute_count: 1,
            };
            // SAFETY: by the contract the arguments suit the kernel; the driver copies all it is given in
            // this call. What is before this launch in the stream is a launch, and the kernel waits for it.
            unsafe { launch_kernel_ex(&config, function.raw, params, null_mut()) }
        } else {
            // SAFETY: by the contract the arguments suit the kernel; the driver copies them in this call.
            unsafe {
                cu!(cuLaunchKernel(
                    function.raw,
                    grid.x,
                    grid.y,
                    grid.z,
                    block.x,
                    block.y,
                    block.z,
                    shared_bytes,
                    self.raw,
                    params,
                    null_mut(),
                ))
            }
        };
        order.after_launch = code == 0;
        check(code, || launch_text(kernel.info(), &shape))
    }

    /// A launch between two events, unless it is captured.
    ///
    /// # Safety
    /// As `put_launch`.
    #[cold]
    unsafe fn put_timed_launch(
        &self,
        order: &mut Order,
        function: &Function,
        kernel: &dyn BoundKernel,
        shape: LaunchShape,
    ) -> Result<()> {
        if self.state.captures()? {
            // SAFETY: this function's contract.
            return unsafe { self.put_launch(order, function, kernel, shape) };
        }
        let put = || {
            // An event is what comes before it, and what comes behind it.
            order.after_launch = false;
            // SAFETY: this function's contract.
            let launched = unsafe { self.put_launch(order, function, kernel, shape) };
            order.after_launch = false;
            launched
        };
        self.module.times.around(kernel.info().name, &self.context, self.raw, put)
    }

    /// The node of the launch that was captured last.
    fn last_node(&self) -> Result<CUgraphNode> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, mut graph, mut nodes, mut count) = (0, null_mut(), null(), 0);
        // SAFETY: all are valid for writes.
        let code = unsafe {
            cu!(cuStreamGetCaptureInfo_v2(self.raw, &mut status, &mut id, &mut graph, &mut nodes, &mut count))
        };
        check(code, || "asking for a captured launch's node".into())?;
        // In a stream that captures for itself alone, what the next step depends on is the last one.
        if count != 1 || nodes.is_null() {
            return Err(failure(
                999,
                format!("asking for a captured launch's node: the stream has {count} last nodes, not 1"),
            ));
        }
        // SAFETY: the driver wrote a list of `count` nodes, valid until the stream is used again.
        Ok(unsafe { *nodes })
    }
}

impl StreamBackend for CudaStream {
    fn owner_captures(&self) -> Result<bool> {
        self.state.captures()
    }

    fn put_other(&self, put: &mut dyn FnMut(*mut c_void) -> Result<()>) -> Result<()> {
        let _order = self.other_work();
        put(self.raw.cast())
    }

    #[inline]
    unsafe fn launch(&self, kernel: &dyn BoundKernel, shape: LaunchShape, _: At) -> Result<()> {
        let function = self.prepared(kernel, shape)?;
        let mut order = lock(&self.order);
        if self.module.times.are_recorded() {
            // SAFETY: this function's contract.
            return unsafe { self.put_timed_launch(&mut order, function, kernel, shape) };
        }
        // SAFETY: this function's contract.
        unsafe { self.put_launch(&mut order, function, kernel, shape) }
    }

    unsafe fn launch_node(&self, kernel: &dyn BoundKernel, shape: LaunchShape, _: At) -> Result<usize> {
        let function = self.prepared(kernel, shape)?;
        // Held over both steps: another thread's launch must not come between.
        let mut order = lock(&self.order);
        // SAFETY: this function's contract.
        unsafe { self.put_launch(&mut order, function, kernel, shape) }?;
        order.nodes.push(self.last_node()?);
        Ok(order.nodes.len() - 1)
    }

    unsafe fn copy(&self, to: Place, from: Place, bytes: usize, _: At) -> Result<()> {
        self.context.bind()?;
        let _order = self.other_work();
        // SAFETY: this function's contract.
        unsafe { copy_async(self.raw, to, from, bytes) }
    }

    unsafe fn fill_u8(&self, address: u64, value: u8, bytes: usize, _: At) -> Result<()> {
        self.context.bind()?;
        let _order = self.other_work();
        // SAFETY: this function's contract.
        let code = unsafe { cu!(cuMemsetD8Async(address, value, bytes, self.raw)) };
        check(code, || format!("filling {bytes} bytes"))
    }

    unsafe fn fill_u32(&self, address: u64, value: u32, words: usize, _: At) -> Result<()> {
        self.context.bind()?;
        let _order = self.other_work();
        // SAFETY: this function's contract.
        let code = unsafe { cu!(cuMemsetD32Async(address, value, words, self.raw)) };
        check(code, || format!("filling {words} words"))
    }

    fn synchronize(&self) -> Result<()> {
        self.state.synchronize()
    }

    fn hand_over(&self, waited: Result<()>) -> Result<()> {
        self.module.handing_over(waited)
    }

    fn begin_capture(&self) -> Result<()> {
        self.context.bind()?;
        let mut order = lock(&self.order);
        *order = Order::default();
        let mut capturing = lock(&self.state.capturing);
        // SAFETY: both live as long as `self`.
        let code = unsafe { cu!(cuEventRecord(self.state.before_capture, self.raw)) };
        check(code, || "starting a capture".into())?;
        // Relaxed: buffers may be made and kernels looked up meanwhile. What would break the capture is
        // refused before it gets here.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as `self`.
        let code = unsafe { cu!(cuStreamBeginCapture_v2(self.raw, mode)) };
        check(code, || "starting a capture".into())?;
        *capturing = true;
        Ok(())
    }

    fn end_capture(&self) -> Result<Box<dyn GraphBackend>> {
        // Whatever comes of it, the stream captures no more.
        let nodes = std::mem::take(&mut *lock(&self.order)).nodes;
        let mut capturing = lock(&self.state.capturing);
        *capturing = false;
        self.context.bind()?;
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for a write.
        let code = unsafe { cu!(cuStreamEndCapture(self.raw, &mut raw)) };
        check(code, || "ending a capture".into())?;
        Ok(Box::new(CudaGraph::new(raw, nodes, &self.module, &self.context)?))
    }
}

/// Puts a copy into `stream`. The context is bound.
///
/// # Safety
/// Both ends stay valid for `bytes` until the copy is done, and no other work touches them.
pub(super) unsafe fn copy_async(stream: CUstream, to: Place, from: Place, bytes: usize) -> Result<()> {
    let doing = |what: &str| format!("copying {bytes} bytes {what}");
    match (to, from) {
        (Place::Device(to), Place::Host(from)) => {
            // SAFETY: this function's contract.
            let code = unsafe { cu!(cuMemcpyHtoDAsync_v2(to, from.cast_const().cast(), bytes, stream)) };
            check(code, || doing("to the device"))
        }
        (Place::Host(to), Place::Device(from)) => {
            // SAFETY: this function's contract.
            let code = unsafe { cu!(cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream)) };
            check(code, || doing("from the device"))
        }
        (Place::Device(to), Place::Device(from)) => {
            // SAFETY: this function's contract.
            let code = unsafe { cu!(cuMemcpyDtoDAsync_v2(to, from, bytes, stream)) };
            check(code, || doing("on the device"))
        }
        (Place::Host(to), Place::Host(from)) => {
            // SAFETY: this function's contract.
            unsafe { std::ptr::copy(from, to, bytes) };
            Ok(())
        }
    }
}

pub(super) struct CudaEvent {
    raw: CUevent,
    module: Arc<Module>,
    context: Arc<Context>,
}

// SAFETY: the driver lets any thread use an event.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    pub(super) fn new(context: &Arc<Context>, module: &Arc<Module>) -> Result<Self> {
        context.bind()?;
        let mut raw = null_mut();
        // SAFETY: `raw` is valid for a write.
        check(unsafe { cu!(cuEventCreate(&mut raw, 0)) }, || "making an event".into())?;
        Ok(CudaEvent { raw, module: module.clone(), context: context.clone() })
    }
}

impl EventBackend for CudaEvent {
    fn record(&self, stream: &dyn StreamBackend) -> Result<()> {
        self.context.bind()?;
        stream.put_other(&mut |stream| {
            // SAFETY: both live; the caller has checked that they are of one device.
            check(unsafe { cu!(cuEventRecord(self.raw, stream.cast())) }, || "recording an event".into())
        })
    }

    fn hold(&self, stream: &dyn StreamBackend) -> Result<()> {
        self.context.bind()?;
        stream.put_other(&mut |stream| {
            // SAFETY: as above.
            let code = unsafe { cu!(cuStreamWaitEvent(stream.cast(), self.raw, 0)) };
            check(code, || "making a stream wait".into())
        })
    }

    fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the event lives as long as `self`.
        let code = unsafe { cu!(cuEventSynchronize(self.raw)) };
        self.module.handing_over(check(code, || "waiting for an event".into()))
    }

    fn elapsed_ms(&self, start: &dyn EventBackend) -> Result<f64> {
        self.context.bind()?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: `milliseconds` is valid for a write, and both events live.
        let code = unsafe { cu!(cuEventElapsedTime(&mut milliseconds, start.raw().cast(), self.raw)) };
        check(code, || "comparing two events".into())?;
        Ok(f64::from(milliseconds))
    }

    fn raw(&self) -> *mut c_void {
        self.raw.cast()
    }

    fn instant(&self) -> Option<Instant> {
        None
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.context.bind_quietly() {
            // SAFETY: made by `new`, and not used again.
            note(unsafe { cu!(cuEventDestroy_v2(self.raw)) }, "dropping an event");
        }
    }
}
