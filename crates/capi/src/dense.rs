//! Exact attention of one or more query tokens over a paged pool.

use crate::device::{borrowed, ferrokv_device, load, on_slices};
use crate::status::{Failure, Status, call, end, give, handle};
use crate::tensor::{Count, Dtype, Element, buffer, dtype, ferrokv_tensor};
use half::{bf16, f16};
use host::attention::BLOCK_TOKENS;
use host::attention::dense::{DenseElement, Handles, Plan, Problem};
use host::{Buffer, Device, Stream};
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// The extents that a plan is for.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferrokv_dense_problem {
    /// Sequences of the batch.
    pub sequences: u32,
    /// Query heads; a multiple of `kv_heads`, 16 times at most.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Channels of a head: 64, 96, 128 or 256.
    pub head_dim: u32,
    /// Query tokens of each sequence: its last ones, each sees those before it and itself.
    pub query_tokens: u32,
    /// The most tokens that a sequence will have.
    pub max_tokens: u32,
}

/// What a run reads and writes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ferrokv_dense_tensors {
    /// [sequences, query_tokens, q_heads, head_dim], of the plan's type.
    pub queries: ferrokv_tensor,
    /// [blocks, kv_heads, 16, head_dim], of the plan's type.
    pub keys: ferrokv_tensor,
    /// As the keys, and as many.
    pub values: ferrokv_tensor,
    /// [sequences, ⌈max_tokens / 16⌉], int32: the blocks of each sequence, in order.
    pub table: ferrokv_tensor,
    /// \[sequences\], int32.
    pub lengths: ferrokv_tensor,
    /// As the queries, float32.
    pub output: ferrokv_tensor,
    /// [sequences, query_tokens, q_heads], float32: the natural logarithm of the sum of exponentials; or
    /// `data` null for none.
    pub lse: ferrokv_tensor,
}

/// A plan of exact attention.
pub struct ferrokv_dense {
    device: Device,
    plan: Mutex<Box<dyn Dense>>,
}

/// A plan of either type.
trait Dense: Send {
    fn splits(&self) -> u32;
    /// # Safety
    /// The contract of [`ferrokv_dense_run`].
    unsafe fn run(
        &mut self,
        device: &Device,
        stream: &Stream,
        tensors: &ferrokv_dense_tensors,
    ) -> Result<(), Failure>;
}

struct Of<E: DenseElement> {
    plan: Plan<E>,
    /// Where log-sums go that nobody asked for.
    lse: Buffer<f32>,
}

impl<E: DenseElement + Element> Dense for Of<E> {
    fn splits(&self) -> u32 {
        self.plan.splits()
    }

    unsafe fn run(
        &mut self,
        device: &Device,
        stream: &Stream,
        tensors: &ferrokv_dense_tensors,
    ) -> Result<(), Failure> {
        let problem = self.plan.problem();
        let ferrokv_dense_tensors { queries, keys, values, table, lengths, output, lse } = tensors;
        let rows = problem.query_rows();
        let (head_dim, sequences) = (problem.head_dim as usize, problem.sequences as usize);
        let block = Count::Multiple((BLOCK_TOKENS * problem.kv_heads) as usize * head_dim);
        let entries = sequences * problem.max_blocks() as usize;
        // SAFETY: the caller's word, for all of them.
        unsafe {
            let queries = buffer::<E>(device, "queries", queries, Count::Exactly(rows * head_dim))?;
            let keys = buffer::<E>(device, "keys", keys, block)?;
            let values = buffer::<E>(device, "values", values, Count::Exactly(keys.len()))?;
            let table = buffer::<u32>(device, "table", table, Count::Exactly(entries))?;
            let lengths = buffer::<u32>(device, "lengths", lengths, Count::Exactly(sequences))?;
            let mut output = buffer::<f32>(device, "output", output, Count::Exactly(rows * head_dim))?;
            let mut own = match lse.data.is_null() {
                true => None,
                false => Some(buffer::<f32>(device, "lse", lse, Count::Exactly(rows))?),
            };
            let handles = Handles {
                queries: queries.global(),
                keys: keys.global(),
                values: values.global(),
                table: table.global(),
                lengths: lengths.global(),
                wanted: None,
                near: true,
                output: output.global_mut(),
                lse: own.as_mut().unwrap_or(&mut self.lse).global_mut(),
            };
            Ok(self.plan.attend_on(stream, on_slices(device), handles)?)
        }
    }
}

fn open<E: DenseElement + Element>(device: &Device, problem: Problem) -> Result<Box<dyn Dense>, Failure> {
    let plan = Plan::<E>::new(device, problem)?;
    load(
        device,
        E::kernel(problem.head_dim, device.info().max_shared_bytes).map(|(kernel, _)| kernel.info()),
    )?;
    let lse = Buffer::new(device, problem.query_rows())?;
    Ok(Box::new(Of { plan, lse }))
}

/// A plan for float16 or bfloat16 queries, keys and values, with all its scratch.
///
/// # Safety
/// `device` is null or a handle; `problem` and `out` are null or valid for a read and a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_dense_create(
    device: *const ferrokv_device,
    element: u32,
    problem: *const ferrokv_dense_problem,
    out: *mut *mut ferrokv_dense,
) -> Status {
    // SAFETY: this function's contract.
    unsafe {
        give(out, || {
            let device = handle("device", device)?.device.clone();
            let given =
                problem.as_ref().ok_or_else(|| Failure::argument("the problem is NULL; give its extents"))?;
            let ferrokv_dense_problem { sequences, q_heads, kv_heads, head_dim, query_tokens, max_tokens } =
                *given;
            let problem = Problem { sequences, q_heads, kv_heads, head_dim, query_tokens, max_tokens };
            let plan = match dtype("the plan's element", element, &[Dtype::F16, Dtype::Bf16])? {
                Dtype::Bf16 => open::<bf16>(&device, problem)?,
                _ => open::<f16>(&device, problem)?,
            };
            Ok(ferrokv_dense { device, plan: Mutex::new(plan) })
        })
    }
}

/// Attention, behind what is in `stream`.
///
/// # Safety
/// `dense` is null or a handle, `tensors` null or valid for a read, `stream` a stream of the device
/// that nothing else is put into during the call. Until the launch has finished (for a capture: each run of
/// the graph) all tensors are there, nothing else writes what is read or touches what is written, lengths are
/// at most ⌈max_tokens / 16⌉ · 16, and each entry of the table that a length reaches is a block of the pool.
/// (On the CPU lengths and table are checked.)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_dense_run(
    dense: *const ferrokv_dense,
    stream: *mut c_void,
    tensors: *const ferrokv_dense_tensors,
) -> Status {
    // SAFETY: this function's contract.
    call(|| unsafe {
        let ferrokv_dense { device, plan } = handle("plan", dense)?;
        let tensors =
            tensors.as_ref().ok_or_else(|| Failure::argument("the tensors are NULL; give all of them"))?;
        let mut plan = plan.lock().map_err(|_| Failure::broken("plan"))?;
        plan.run(device, &borrowed(device, stream)?, tensors)
    })
}

/// Into how many parts a sequence of the full length is cut; 0 for null. Error bounds depend on it.
///
/// # Safety
/// `dense` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_dense_splits(dense: *const ferrokv_dense) -> u32 {
    // SAFETY: this function's contract.
    let plan = unsafe { handle("plan", dense) };
    plan.map_or(0, |dense| dense.plan.lock().unwrap_or_else(PoisonError::into_inner).splits())
}

/// Ends a plan: its launches have finished, and no graph that has them runs again.
///
/// # Safety
/// `dense` is null or a handle, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrokv_dense_destroy(dense: *mut ferrokv_dense) {
    // SAFETY: this function's contract.
    unsafe { end(dense) }
}
