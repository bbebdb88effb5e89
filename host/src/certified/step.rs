//! Plan and run: one decode step of certified attention, all of it on the device.

use super::{Annotation, Error, Policy, Result};
use crate::dense::{self, DenseElement};
use crate::{Buffer, Device, Stream};
use half::{bf16, f16};
use kernels_gpu::attention::{part_floats, threads};
use kernels_gpu::certified::admit::THREADS as CLAIM_THREADS;
use kernels_gpu::certified::selection::{THREADS, bitmap_words};
use kernels_gpu::certified::{
    Certificate, Entry, Record, RowSums, Scratch, StepShape, Thresholds, attend, claim, pass_layout,
    promote_layout, replace, select, select_layout,
};
use kernels_gpu::dense::{partial_floats, split_count};
use simt::{Global, GlobalMut, Kernel, LaunchShape};

type Attend<E> = Kernel<(
    Global<E>,
    Global<u32>,
    Global<Annotation>,
    Global<u32>,
    Global<u32>,
    GlobalMut<Record>,
    GlobalMut<f32>,
    GlobalMut<u32>,
    GlobalMut<f32>,
    StepShape,
)>;

type Replace<E> = Kernel<(
    Global<E>,
    Global<u32>,
    Global<u32>,
    Global<u32>,
    Global<E>,
    Global<E>,
    GlobalMut<E>,
    GlobalMut<u64>,
    Global<Entry>,
    Global<u32>,
    Global<RowSums>,
    Global<f32>,
    GlobalMut<f32>,
    GlobalMut<f32>,
    GlobalMut<u32>,
    GlobalMut<f32>,
    GlobalMut<f32>,
    GlobalMut<Certificate>,
    GlobalMut<u32>,
    StepShape,
    Thresholds,
    Scratch,
)>;

/// The kernels of a head_dim, and their shared memory.
#[doc(hidden)]
#[derive(Debug)]
pub struct StepKernels<E: StepElement> {
    attend: (Attend<E>, u32),
    replace: (Replace<E>, u32),
}

impl<E: StepElement> StepKernels<E> {
    /// `attend` and `replace`.
    pub(super) fn infos(&self) -> [&'static simt::KernelInfo; 2] {
        [self.attend.0.info(), self.replace.0.info()]
    }
}

/// An element type that the kernels of a step have instances for: f16 and bf16.
pub trait StepElement: DenseElement {
    #[doc(hidden)]
    fn step_kernels(head_dim: u32) -> Option<StepKernels<Self>>;
}

/// Head dimensions that a step has instances for.
pub const STEP_HEAD_DIMS: [u32; 2] = [64, 128];

macro_rules! instances {
    ($($element:ty: $($dim:literal)*),*) => {$(
        impl StepElement for $element {
            fn step_kernels(head_dim: u32) -> Option<StepKernels<Self>> {
                match head_dim {
                    $($dim => Some(StepKernels {
                        attend: (attend::kernel::<$element, $dim>(), pass_layout::<$dim>().bytes),
                        replace: (replace::kernel::<$element, $dim>(), promote_layout::<$dim>().bytes),
                    }),)*
                    _ => None,
                }
            }
        }
    )*};
}
instances!(f16: 64 128, bf16: 64 128);

/// What a step is for: one query token for each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepProblem {
    /// Sequences of the batch.
    pub sequences: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads; each serves `q_heads / kv_heads` query heads, 16 at most.
    pub kv_heads: u32,
    /// Channels of a head: one of [`STEP_HEAD_DIMS`].
    pub head_dim: u32,
    /// Tokens that a sequence may grow to.
    pub max_tokens: u32,
}

impl StepProblem {
    /// Tokens that a sequence may have at most: what the selection's shared memory holds.
    pub const MAX_TOKENS: u32 = 16 * 28_000;

    fn dense(self) -> dense::Problem {
        dense::Problem {
            sequences: self.sequences,
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            query_tokens: 1,
            max_tokens: self.max_tokens,
        }
    }
}

/// What a step writes.
#[derive(Debug)]
pub struct Attended {
    /// Attention, f32 [sequences, q_heads, head_dim].
    pub output: Buffer<f32>,
    /// Natural log-sum-exp of the weights used, [sequences, q_heads]. Of a head on the dense rung that of the exact scores.
    pub lse: Buffer<f32>,
    /// What is known of each head, [sequences, q_heads].
    pub certificates: Buffer<Certificate>,
}

/// What a step reads of the originals, counted in tiles of 16 tokens of a KV head: up to 8 query heads of it are computed
/// together and share what is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OriginalsRead {
    /// Tiles of keys, the trailing blocks among them.
    pub key_tiles: u64,
    /// Tiles of values.
    pub value_tiles: u64,
    /// How many such groups of query heads have one on the dense rung, which reads all of the sequence.
    pub dense_rows: u64,
}

/// Where a step finds the cache: memory of any kind that the device reaches.
#[derive(Clone, Copy, Debug)]
pub struct StepHandles<E> {
    /// [sequences, q_heads, head_dim].
    pub queries: Global<E>,
    /// Quantized blocks, [blocks, kv_heads] of tiles.
    pub tiles: Global<u32>,
    /// Their annotations, [blocks, kv_heads].
    pub annotations: Global<Annotation>,
    /// [sequences, max_blocks].
    pub table: Global<u32>,
    /// \[sequences\], in tokens.
    pub lengths: Global<u32>,
    /// Original keys, [blocks, kv_heads, 16, head_dim].
    pub keys: Global<E>,
    /// Original values.
    pub values: Global<E>,
    /// Originals in the GPU's memory.
    pub near: Near<E>,
}

/// Originals that are in the GPU's memory too: [`kernels_gpu::certified::admit`] says how they lie.
#[derive(Clone, Copy, Debug)]
pub struct Near<E> {
    /// Tiles of [16, head_dim]: slots for keys, slots for values, fresh keys, fresh values.
    pub tiles: GlobalMut<E>,
    /// What the slots hold. Zeros, claims of `u64::MAX` and tags of [`Scratch::EMPTY`] at the start.
    pub directory: GlobalMut<u64>,
    /// How much of each there is.
    pub scratch: Scratch,
}

impl<E: simt::Pod> Near<E> {
    /// Nothing: everything is read from the originals.
    pub fn none() -> Self {
        // SAFETY: they reach no element.
        let (tiles, directory) = unsafe { (GlobalMut::from_raw(0, 0), GlobalMut::from_raw(0, 0)) };
        Near { tiles, directory, scratch: Scratch::NONE }
    }
}

/// The launches of a step, and everything they need but the cache.
///
/// `attend` reads every quantized block once and notes each block's mass and error bound; `select` chooses what to promote;
/// `replace` swaps the shares of the promoted blocks and writes output and certificates; the dense kernel computes the heads
/// whose certificate is over budget. Nothing waits for the host.
pub struct StepPlan<E: StepElement> {
    device: Device,
    problem: StepProblem,
    thresholds: Thresholds,
    shape: StepShape,
    kernels: StepKernels<E>,
    attend: LaunchShape,
    select: LaunchShape,
    replace: LaunchShape,
    dense: dense::Plan<E>,
    records: Buffer<Record>,
    attend_partials: Buffer<f32>,
    replace_partials: Buffer<f32>,
    totals: Buffer<f32>,
    chosen: Buffer<u32>,
    sums: Buffer<RowSums>,
    entries: Buffer<Entry>,
    entry_counts: Buffer<u32>,
    trailing_norms: Buffer<f32>,
    dense_rows: Buffer<u32>,
    /// Of `attend`, `select` and `replace`; 0 between launches.
    counters: [Buffer<u32>; 3],
}

impl<E: StepElement> StepPlan<E> {
    /// A plan for a problem.
    ///
    /// # Errors
    /// [`Error::StepHeadDim`], [`Error::TooLong`], [`Error::Policy`], [`Error::Dense`] for extents that no kernel takes; out of
    /// memory.
    pub fn new(device: &Device, problem: StepProblem, policy: &Policy) -> Result<Self> {
        let StepProblem { sequences, q_heads, kv_heads, head_dim, max_tokens } = problem;
        if let Some(what) = policy.problem() {
            return Err(Error::Policy { what });
        }
        let kernels = E::step_kernels(head_dim).ok_or(Error::StepHeadDim { head_dim })?;
        if max_tokens > StepProblem::MAX_TOKENS {
            return Err(Error::TooLong { tokens: max_tokens, most: StepProblem::MAX_TOKENS });
        }
        let dense = dense::Plan::new(device, problem.dense())?;
        let max_blocks = max_tokens.div_ceil(super::BLOCK_TOKENS);
        let group = q_heads / kv_heads;
        let mut shape = StepShape {
            group,
            kv_heads,
            max_blocks,
            splits: 1,
            softmax_scale: (1.0 / f64::from(head_dim).sqrt()) as f32,
        };
        let rows = kv_heads * shape.row_groups();
        let launches = sequences * rows;
        shape.splits = split_count(launches, max_blocks);
        // As many blocks for the promoted as for the pass.
        let parts = split_count(launches, max_blocks);
        let heads = (sequences * q_heads) as usize;
        let grid = |x: u32| (x, rows, sequences);
        let words = bitmap_words(max_blocks) as usize;
        let counter = || Buffer::zeroed(device, launches as usize);
        Ok(StepPlan {
            device: device.clone(),
            problem,
            thresholds: policy.thresholds(),
            shape,
            attend: LaunchShape::new(grid(shape.splits), threads(head_dim)).shared(kernels.attend.1),
            select: LaunchShape::new((q_heads, sequences), THREADS).shared(select_layout(max_blocks).bytes),
            replace: LaunchShape::new(grid(parts), threads(head_dim)).shared(kernels.replace.1),
            kernels,
            dense,
            records: Buffer::new(device, heads * max_blocks as usize)?,
            attend_partials: Buffer::new(device, partial_floats(launches, shape.splits, head_dim))?,
            replace_partials: Buffer::new(device, partial_floats(launches, parts, head_dim))?,
            totals: Buffer::new(device, launches as usize * part_floats(head_dim))?,
            chosen: Buffer::new(device, heads * 2 * words)?,
            sums: Buffer::new(device, heads)?,
            entries: Buffer::new(device, launches as usize * (max_blocks as usize + 1))?,
            entry_counts: Buffer::new(device, launches as usize)?,
            trailing_norms: Buffer::zeroed(device, 2 * launches as usize)?,
            dense_rows: Buffer::zeroed(device, launches as usize)?,
            counters: [counter()?, counter()?, counter()?],
        })
    }

    /// What it is for.
    pub fn problem(&self) -> StepProblem {
        self.problem
    }

    /// Parts that a sequence is cut into.
    pub fn splits(&self) -> u32 {
        self.shape.splits
    }

    /// Bytes of device memory that the plan owns, the dense rung's not counted.
    pub fn bytes(&self) -> usize {
        fn of<T: simt::Pod>(buffer: &Buffer<T>) -> usize {
            buffer.len() * size_of::<T>()
        }
        of(&self.records)
            + of(&self.attend_partials)
            + of(&self.replace_partials)
            + of(&self.totals)
            + of(&self.chosen)
            + of(&self.sums)
            + of(&self.entries)
            + of(&self.entry_counts)
            + of(&self.trailing_norms)
            + of(&self.dense_rows)
            + self.counters.iter().map(of).sum::<usize>()
    }

    /// What the last step read of the originals; waits for the device.
    ///
    /// # Errors
    /// What the device reports.
    pub fn originals_read(&self) -> Result<OriginalsRead> {
        let stride = self.shape.max_blocks as usize + 1;
        let mut list = vec![Entry { index: 0, rows: 0 }; stride];
        let mut read = OriginalsRead::default();
        for (launch_row, count) in self.entry_counts.to_vec()?.into_iter().enumerate() {
            let list = &mut list[..(count as usize).min(stride)];
            self.entries.read(launch_row * stride, list)?;
            let of = |bits: u32| list.iter().filter(|entry| entry.rows & bits != 0).count() as u64;
            read.key_tiles += of(0xff);
            read.value_tiles += of(0xff00);
        }
        read.dense_rows = self.dense_rows.to_vec()?.iter().filter(|rows| **rows != 0).count() as u64;
        Ok(read)
    }

    /// Buffers for what a step writes.
    ///
    /// # Errors
    /// Out of memory.
    pub fn allocate(&self) -> Result<Attended> {
        let heads = (self.problem.sequences * self.problem.q_heads) as usize;
        Ok(Attended {
            output: Buffer::new(&self.device, heads * self.problem.head_dim as usize)?,
            lse: Buffer::new(&self.device, heads)?,
            certificates: Buffer::new(&self.device, heads)?,
        })
    }

    /// The pass over the quantized blocks alone: the first of the step's launches.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launch reports.
    pub unsafe fn run_pass(&mut self, stream: &Stream, cache: &StepHandles<E>) -> Result<()> {
        let arguments = (
            cache.queries,
            cache.tiles,
            cache.annotations,
            cache.table,
            cache.lengths,
            self.records.global_mut(),
            self.attend_partials.global_mut(),
            self.counters[0].global_mut(),
            self.totals.global_mut(),
            self.shape,
        );
        // SAFETY: this function's contract; the scratch was made for this shape.
        unsafe { stream.launch(&self.kernels.attend.0, self.attend, arguments) }?;
        Ok(())
    }

    /// The choice of what to promote: the second.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launch reports.
    pub unsafe fn run_select(&mut self, stream: &Stream, cache: &StepHandles<E>) -> Result<()> {
        let arguments = (
            self.records.global(),
            cache.lengths,
            self.totals.global(),
            self.chosen.global_mut(),
            self.sums.global_mut(),
            self.entries.global_mut(),
            self.entry_counts.global_mut(),
            self.counters[1].global_mut(),
            self.shape,
            self.thresholds,
            self.problem.head_dim,
        );
        // SAFETY: as above.
        unsafe { stream.launch(&select::kernel(), self.select, arguments) }?;
        Ok(())
    }

    /// Settles what comes into the scratch, where there is one: after the choice, before the replacement.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launch reports.
    pub unsafe fn run_claim(&mut self, stream: &Stream, cache: &StepHandles<E>) -> Result<()> {
        let rows = self.shape.kv_heads * self.shape.row_groups();
        let grid = LaunchShape::new((rows, self.problem.sequences), CLAIM_THREADS);
        let arguments = (
            self.entries.global(),
            self.entry_counts.global(),
            cache.table,
            cache.near.directory,
            self.shape.kv_heads,
            self.shape.row_groups(),
            self.shape.max_blocks,
            cache.near.scratch,
        );
        // SAFETY: as above.
        unsafe { stream.launch(&claim::kernel(), grid, arguments) }?;
        Ok(())
    }

    /// The replacement of the promoted shares, and the certificates: the third.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launch reports.
    pub unsafe fn run_replace(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: &mut Attended,
    ) -> Result<()> {
        let arguments = (
            cache.queries,
            cache.tiles,
            cache.table,
            cache.lengths,
            cache.keys,
            cache.values,
            cache.near.tiles,
            cache.near.directory,
            self.entries.global(),
            self.entry_counts.global(),
            self.sums.global(),
            self.totals.global(),
            self.trailing_norms.global_mut(),
            self.replace_partials.global_mut(),
            self.counters[2].global_mut(),
            out.output.global_mut(),
            out.lse.global_mut(),
            out.certificates.global_mut(),
            self.dense_rows.global_mut(),
            self.shape,
            self.thresholds,
            cache.near.scratch,
        );
        // SAFETY: as above.
        unsafe { stream.launch(&self.kernels.replace.0, self.replace, arguments) }?;
        Ok(())
    }

    /// The dense rung, for the heads that want it: the last.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// What the launch reports.
    pub unsafe fn run_dense(
        &mut self,
        stream: &Stream,
        cache: &StepHandles<E>,
        out: &mut Attended,
    ) -> Result<()> {
        let handles = dense::Handles {
            queries: cache.queries,
            keys: cache.keys,
            values: cache.values,
            table: cache.table,
            lengths: cache.lengths,
            wanted: Some(self.dense_rows.global()),
            output: out.output.global_mut(),
            lse: out.lse.global_mut(),
        };
        // SAFETY: this function's contract.
        unsafe { self.dense.run_on(stream, handles) }?;
        Ok(())
    }

    /// One step: allocates nothing, waits for nothing, can be captured.
    ///
    /// # Safety
    /// Until the last launch has finished (for a capture: until each run of the graph has), the memory behind every handle is
    /// there and used by nothing that writes it; each length is at most `max_tokens`, each table entry that a length reaches
    /// is a block of the pools, and every full block among them is quantized.
    ///
    /// # Errors
    /// [`crate::Error::WrongDevice`]; what the launches report.
    pub unsafe fn run(&mut self, stream: &Stream, cache: &StepHandles<E>, out: &mut Attended) -> Result<()> {
        stream.device().check_same(&self.device, "the plan")?;
        // SAFETY: this function's contract.
        unsafe {
            self.run_pass(stream, cache)?;
            self.run_select(stream, cache)?;
            if !cache.near.directory.is_empty() {
                self.run_claim(stream, cache)?;
            }
            self.run_replace(stream, cache, out)?;
            self.run_dense(stream, cache, out)
        }
    }

    /// Fills what the kernels hand to each other with a byte, so that what none of them writes is the same everywhere.
    pub(super) fn fill(&mut self, stream: &Stream, byte: u8) -> Result<()> {
        stream.fill_u8(&mut self.records, .., byte)?;
        stream.fill_u8(&mut self.totals, .., byte)?;
        stream.fill_u8(&mut self.chosen, .., byte)?;
        stream.fill_u8(&mut self.sums, .., byte)?;
        stream.fill_u8(&mut self.entries, .., byte)?;
        stream.fill_u8(&mut self.trailing_norms, .., byte)?;
        stream.fill_u8(&mut self.dense_rows, .., byte)?;
        Ok(stream.fill_u8(&mut self.entry_counts, .., byte)?)
    }

    /// What the kernels hand to each other, word by word.
    pub(super) fn between(&self) -> Result<Vec<(&'static str, Vec<u32>)>> {
        fn words<T: simt::Pod>(buffer: &Buffer<T>) -> Result<Vec<u32>> {
            Ok(bytemuck::cast_slice(&buffer.to_vec()?).to_vec())
        }
        Ok(vec![
            ("records", words(&self.records)?),
            ("totals", words(&self.totals)?),
            ("chosen", words(&self.chosen)?),
            ("sums", words(&self.sums)?),
            ("entries", words(&self.entries)?),
            ("entry counts", words(&self.entry_counts)?),
            ("trailing norms", words(&self.trailing_norms)?),
            ("dense rows", words(&self.dense_rows)?),
            ("counters", self.counters.iter().map(words).collect::<Result<Vec<_>>>()?.concat()),
        ])
    }
}
