//! Exact attention of a chunk: a plan of the dense system, or on the CPU its SIMD path.

use super::{Geometry, Result};
use crate::cpu::handles::{slice, slice_mut};
use crate::dense::{self, Handles, Plan, Problem};
use crate::{Buffer, Device, Stream};
use half::f16;
use simt::GlobalMut;

/// A plan and what it writes besides the output.
#[derive(Debug)]
pub(super) struct Exact {
    pub plan: Plan<f16>,
    lse: Buffer<f32>,
}

/// The problem of one sequence's chunk of `query_tokens`.
pub(super) fn problem(geometry: Geometry, query_tokens: usize, capacity: usize) -> Problem {
    let Geometry { q_heads, kv_heads, head_dim, .. } = geometry;
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Problem {
        sequences: 1,
        q_heads: narrow(q_heads),
        kv_heads: narrow(kv_heads),
        head_dim: narrow(head_dim),
        query_tokens: narrow(query_tokens),
        max_tokens: narrow(capacity),
    }
}

impl Exact {
    pub fn new(device: &Device, geometry: Geometry, query_tokens: usize, capacity: usize) -> Result<Self> {
        let plan = Plan::new(device, problem(geometry, query_tokens, capacity))?;
        Ok(Exact { plan, lse: Buffer::new(device, query_tokens * geometry.q_heads)? })
    }

    /// The plan for chunks of `tokens`, which `held` has or gets.
    pub fn for_chunk<'a>(
        held: &'a mut Option<Exact>,
        device: &Device,
        geometry: Geometry,
        tokens: usize,
        capacity: usize,
    ) -> Result<&'a mut Exact> {
        if held.as_ref().is_none_or(|exact| exact.plan.problem().query_tokens as usize != tokens) {
            *held = None;
        }
        match held {
            Some(exact) => Ok(exact),
            None => Ok(held.insert(Exact::new(device, geometry, tokens, capacity)?)),
        }
    }

    /// The log-sums that nobody reads.
    pub fn lse(&mut self) -> GlobalMut<f32> {
        self.lse.global_mut()
    }

    /// One chunk in one layer; `simd`: on the CPU's own path in place of the kernels.
    ///
    /// # Safety
    /// As [`Plan::run_on`]; with `simd` the handles are host memory.
    pub unsafe fn run(&mut self, stream: &Stream, simd: bool, handles: Handles<f16>) -> Result<()> {
        if !simd {
            // SAFETY: the caller's word.
            return Ok(unsafe { self.plan.run_on(stream, handles) }?);
        }
        // SAFETY: the caller's word.
        unsafe { attend_slices(self.plan.problem(), handles) }
    }
}

/// Attention of one chunk by the CPU's SIMD path.
///
/// # Safety
/// The handles are host memory of their lengths, output and log-sums written by nobody else. The emulator's streams have done
/// what they were told when a call returns.
unsafe fn attend_slices(problem: Problem, handles: Handles<f16>) -> Result<()> {
    // SAFETY: the caller's word.
    let (slices, output, lse) = unsafe {
        let Handles { queries, keys, values, table, lengths, output, lse, .. } = handles;
        let slices = dense::cpu::Slices {
            queries: slice(queries),
            keys: slice(keys),
            values: slice(values),
            table: slice(table),
            lengths: slice(lengths),
        };
        (slices, slice_mut(output), slice_mut(lse))
    };
    Ok(dense::cpu::attend(problem, slices, output, lse)?)
}
