//! Plan and run: a plan owns its scratch and fixes the launch of a step.

use super::books::Tables;
use super::error::length;
use super::setting::{checked, name};
use super::store::Store;
use super::{Code, Error, Result, Setting, cpu};
use crate::attention::StepProblem;
use crate::cpu::handles::{slice, slice_mut};
use crate::simd_level::Level;
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::attention::{BLOCK_TOKENS, threads, warps};
use kernels_gpu::vecinfer::{Shape, attend, attend_wide, layout, partial_floats, rows_of};
use simt::{Global, GlobalMut, Kernel, KernelInfo, LaunchShape};

/// The kernel's handle, and its shared memory.
type Attend = (Kernel<attend::Args>, u32);

macro_rules! instances {
    ($(
        $attend:ident $dim:literal:
        4 or 8 rows $(($keys:literal, $values:literal))*;
        8 rows $(($wide_keys:literal, $wide_values:literal))*;
    )*) => {
        /// The instance for a head_dim, codes of keys and values, and a warp's query rows.
        fn kernel_of(head_dim: u32, keys: Code, values: Code, rows: u32) -> Option<Attend> {
            let narrow = rows == 4;
            match (head_dim, keys.number(), values.number()) {
                $(
                    $(
                        ($dim, $keys, $values) => Some((
                            if narrow {
                                $attend::kernel::<$dim, $keys, $values, 4>()
                            } else {
                                $attend::kernel::<$dim, $keys, $values, 8>()
                            },
                            layout::<$dim, $keys, $values>().bytes,
                        )),
                    )*
                    $(
                        ($dim, $wide_keys, $wide_values) => Some((
                            $attend::kernel::<$dim, $wide_keys, $wide_values, 8>(),
                            layout::<$dim, $wide_keys, $wide_values>().bytes,
                        )),
                    )*
                )*
                _ => None,
            }
        }

        /// Codes of keys and values that there are kernels for.
        pub(super) fn attended(head_dim: u32) -> &'static [(u32, u32)] {
            match head_dim {
                $($dim => &[$(($keys, $values),)* $(($wide_keys, $wide_values)),*],)*
                _ => &[],
            }
        }
    };
}
instances!(
    attend 64:
        4 or 8 rows (208, 208)(208, 408)(408, 408)(410, 410)(808, 808)(810, 810)(812, 812);
        8 rows (412, 412)(410, 812)(812, 808);
    attend 96:
        4 or 8 rows (208, 208)(408, 408);
        8 rows;
    attend 128:
        4 or 8 rows (208, 208)(208, 408)(408, 408)(410, 410)(808, 808)(810, 810)(812, 812);
        8 rows (412, 412)(410, 812)(812, 808);
    attend_wide 256:
        4 or 8 rows (408, 408)(812, 812);
        8 rows;
);

/// The entries that a cache of such heads and setting, with `group` query heads on a KV head, launches: of
/// steps, then those that write and restore.
pub(super) fn kernel_info(head_dim: u32, setting: Setting, group: u32) -> Result<Vec<&'static KernelInfo>> {
    let (attend, _) = kernel_for(head_dim, setting, group)?;
    let mut kernels = vec![attend.info(), super::prompt::turn_for(head_dim).info()];
    kernels.extend(super::store::kernel_info(head_dim, setting)?);
    Ok(kernels)
}

fn kernel_for(head_dim: u32, setting: Setting, group: u32) -> Result<Attend> {
    // A warp looks for such a tile among its first ones.
    let most = BLOCK_TOKENS * warps(head_dim);
    if setting.sink > most {
        return Err(Error::Sink { sink: setting.sink, most, head_dim });
    }
    let refuse = || {
        let pair = |(k, v): &(u32, u32)| format!("{} with {}", name(Code::of(*k)), name(Code::of(*v)));
        let there = attended(head_dim).iter().map(pair).collect::<Vec<_>>().join(", ");
        Error::Codes {
            keys: name(setting.keys),
            values: name(setting.values),
            head_dim: Some(head_dim),
            there,
        }
    };
    let rows = rows_of(group, setting.keys, setting.values);
    kernel_of(head_dim, setting.keys, setting.values, rows).ok_or_else(refuse)
}

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
/// The result depends on the extents, queries, lengths, and what the store holds, and on nothing else. One
/// run at a time: the scratch is the plan's.
#[derive(Debug)]
pub struct Plan {
    device: Device,
    problem: StepProblem,
    setting: Setting,
    kernel: Attend,
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
    /// [`Error::HeadDim`], [`Error::Codes`], [`Error::TooLong`]; a kernel that the device cannot launch, or
    /// has not ([`Device::prepare`]); out of memory for the scratch.
    pub fn new(device: &Device, problem: StepProblem, setting: Setting) -> Result<Self> {
        let problem = checked(problem)?;
        let shape = setting.shape(problem);
        let kernel = kernel_for(problem.head_dim, setting, shape.group)?;
        let rows = problem.kv_heads * shape.row_groups();
        let launches = problem.sequences * rows;
        let launch = LaunchShape::new((shape.splits, rows, problem.sequences), threads(problem.head_dim));
        let launch = launch.shared(kernel.1);
        device.prepare(&kernel.0, launch)?;
        let floats =
            if shape.splits == 1 { 0 } else { partial_floats(launches, shape.splits, problem.head_dim) };
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

    /// Attention of the last token of each sequence. With `slices` on the CPU's own path, which gives the
    /// same bits.
    ///
    /// # Safety
    /// Until the launch has finished, for a capture until each run of the graph has: the memory behind the
    /// handles is there, host memory with `slices`; nothing else touches what is written; the store has as
    /// many tokens as the lengths say.
    ///
    /// # Errors
    /// [`Error::Length`] for handles or a store of another problem; what the launch reports.
    pub unsafe fn run_on(
        &mut self,
        stream: &Stream,
        slices: bool,
        store: &Store,
        tables: &Tables,
        handles: Handles,
    ) -> Result<()> {
        stream.device().check_same(&self.device, "the plan")?;
        let rows = self.problem.dense().query_rows() * self.problem.head_dim as usize;
        length("the buffer of queries", handles.queries.len(), rows)?;
        length("the output", handles.output.len(), rows)?;
        length("the buffer of lengths", handles.lengths.len(), self.problem.sequences as usize)?;
        if store.problem() != self.problem || store.setting() != self.setting {
            let expected = self.problem.max_tokens as usize;
            return Err(Error::Length {
                what: "the store",
                got: store.problem().max_tokens as usize,
                expected,
            });
        }
        let shape = tables.complete(self.shape);
        let [recent_keys, recent_values] = store.recent().map(Buffer::global);
        if slices {
            // SAFETY: the caller's word, and memory of the plan, the store and the tables.
            unsafe {
                let stored = cpu::Stored {
                    setting: self.setting,
                    head_dim: self.problem.head_dim,
                    shape,
                    codes: slice(store.codes.global()),
                    recent: [slice(recent_keys), slice(recent_values)],
                    books: [slice(tables.keys.global()), slice(tables.values.global())],
                };
                let transform = slice(tables.transform.global());
                let (queries, lengths) = (slice(handles.queries), slice(handles.lengths));
                cpu::attend(Level::best(), stored, transform, queries, lengths, slice_mut(handles.output));
            }
            return Ok(());
        }
        let args = attend::Args {
            queries: handles.queries,
            transforms: tables.transform.global(),
            key_books: tables.fetched[0].global(),
            value_books: tables.fetched[1].global(),
            codes: store.codes.global(),
            recent_keys,
            recent_values,
            lengths: handles.lengths,
            partials: self.partials.global_mut(),
            counters: self.counters.global_mut(),
            output: handles.output,
            shape,
        };
        // SAFETY: lengths as just checked and scratch made for this shape; the rest is this function's
        // contract. Blocks of a row meet in `counters` only, and the one that reads the others' parts comes
        // last.
        Ok(unsafe { stream.launch(&self.kernel.0, self.launch, args) }?)
    }
}
