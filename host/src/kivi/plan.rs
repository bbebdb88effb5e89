//! Plan and run: a plan owns its scratch and fixes the launch of a step.

use super::error::length;
use super::setting::checked;
use super::store::Store;
use super::{Error, Result, Setting, cpu};
use crate::attention::StepProblem;
use crate::cpu::handles::{slice, slice_mut};
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::attention::dense::partial_floats;
use kernels_gpu::attention::threads;
use kernels_gpu::kivi::{Layout, Shape, attend, shared_layout};
use simt::{Global, GlobalMut, Kernel, LaunchShape};

macro_rules! instances {
    ($(($d:literal, $k:literal, $v:literal))*) => {
        /// The instance of a layout, and its shared memory.
        pub(super) fn kernel_of(layout: Layout) -> Option<(Kernel<attend::Args>, u32)> {
            match (layout.head_dim, layout.key_bits, layout.value_bits) {
                $(($d, $k, $v) => Some((attend::kernel::<$d, $k, $v>(), shared_layout::<$d, $k, $v>().bytes)),)*
                _ => None,
            }
        }
    };
}
instances!((64, 2, 2)(64, 2, 4)(64, 4, 2)(64, 4, 4)(128, 2, 2)(128, 2, 4)(128, 4, 2)(128, 4, 4));

/// The arguments of a step: memory of any kind that the device reaches.
#[derive(Clone, Copy, Debug)]
pub struct Handles {
    /// [sequences, q_heads, head_dim], rotated.
    pub queries: Global<f16>,
    /// \[sequences\].
    pub lengths: Global<u32>,
    /// Like the queries.
    pub output: GlobalMut<f32>,
}

/// The launch of a step, and its scratch.
///
/// The result depends on the extents, queries, lengths, and what the store holds, and on nothing else: it has
/// the bits of dense attention over the restored cache. One run at a time: the
/// scratch is the plan's.
#[derive(Debug)]
pub struct Plan {
    device: Device,
    problem: StepProblem,
    setting: Setting,
    kernel: Kernel<attend::Args>,
    launch: LaunchShape,
    shape: Shape,
    partials: Buffer<f32>,
    /// How many blocks of a row have come; 0 between launches.
    counters: Buffer<u32>,
}

impl Plan {
    /// A plan for steps over a [`Store`] of the same extents.
    ///
    /// # Errors
    /// Heads or settings that there is no kernel for, [`Error::TooLong`]; a kernel that the device cannot
    /// launch, or has not ([`Device::prepare`]); out of memory for the scratch.
    pub fn new(device: &Device, problem: StepProblem, setting: Setting) -> Result<Self> {
        let problem = checked(problem, setting)?;
        let shape = setting.shape(problem);
        let head_dim = problem.head_dim;
        let (kernel, shared) = kernel_of(shape.layout).ok_or(Error::HeadDim { head_dim })?;
        let rows = problem.kv_heads * shape.row_groups();
        let launches = problem.sequences * rows;
        let grid = (shape.splits, rows, problem.sequences);
        let launch = LaunchShape::new(grid, threads(head_dim)).shared(shared);
        device.prepare(&kernel, launch)?;
        let floats = if shape.splits == 1 { 0 } else { partial_floats(launches, shape.splits, head_dim) };
        Ok(Plan {
            device: device.clone(),
            problem,
            setting,
            kernel,
            launch,
            shape,
            partials: Buffer::new(device, floats)?,
            counters: Buffer::zeroed(device, launches as usize)?,
        })
    }

    /// What it is for.
    pub fn problem(&self) -> StepProblem {
        self.problem
    }

    /// Parts that a sequence of the full length is cut into.
    pub fn splits(&self) -> u32 {
        self.shape.splits
    }

    /// Attention of the last token of each sequence, in one launch. It allocates nothing, waits for nothing
    /// and can be captured. With `slices` on the CPU's own path, which gives the same bits.
    ///
    /// # Safety
    /// Until the launch has finished, for a capture until each run of the graph has: the memory behind the
    /// handles is there, host memory with `slices`; nothing else touches what is written; the store has as
    /// many tokens as the lengths say.
    ///
    /// # Errors
    /// [`Error::Length`] for handles of another problem, [`Error::OtherStore`]; what the launch reports.
    pub unsafe fn run_on(
        &mut self,
        stream: &Stream,
        slices: bool,
        store: &Store,
        handles: Handles,
    ) -> Result<()> {
        stream.device().check_same(&self.device, "the plan")?;
        let rows = self.problem.dense().query_rows() * self.problem.head_dim as usize;
        length("the buffer of queries", handles.queries.len(), rows)?;
        length("the output", handles.output.len(), rows)?;
        length("the buffer of lengths", handles.lengths.len(), self.problem.sequences as usize)?;
        let (store_is, plan_is) = ((store.problem(), store.setting()), (self.problem, self.setting));
        if store_is != plan_is {
            return Err(Error::OtherStore { store: store_is, plan: plan_is });
        }
        let Handles { queries, lengths, output } = handles;
        let [recent_keys, recent_values] = store.recent().map(Buffer::global);
        if slices {
            // SAFETY: the caller's word, and the store's memory.
            return unsafe {
                let stored = cpu::Stored {
                    shape: self.shape,
                    codes: slice(store.codes.global()),
                    recent: [slice(recent_keys), slice(recent_values)],
                };
                cpu::attend_step(stored, self.problem, slice(queries), slice(lengths), slice_mut(output))
            };
        }
        let args = attend::Args {
            queries,
            codes: store.codes.global(),
            recent_keys,
            recent_values,
            lengths,
            partials: self.partials.global_mut(),
            counters: self.counters.global_mut(),
            output,
            shape: self.shape,
        };
        // SAFETY: lengths as just checked and scratch made for this shape; the rest is this function's
        // contract. Blocks of a row meet in `counters` only, and the one that reads the others' parts comes
        // last.
        Ok(unsafe { stream.launch(&self.kernel, self.launch, args) }?)
    }
}
