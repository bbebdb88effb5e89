//! Plan and run: a plan owns its scratch and fixes the launch; running it allocates nothing, waits for
//! nothing and can be captured in a graph.

use super::cpu::{self, Level};
use super::{Error, Problem, Result};
use crate::attention::{BLOCK_TOKENS, BlockTable, Half, PagedPool};
use crate::cpu::handles::{slice, slice_mut};
use crate::{Buffer, Device, Stream};
use half::{bf16, f16};
use kernels_gpu::attention::dense::{
    DenseShape, attend, attend_lean, attend_pairs, layout, lean_layout, partial_floats,
};
use kernels_gpu::attention::threads;
use simt::{Global, GlobalMut, Kernel, LaunchShape};

/// The kernel's handle.
#[doc(hidden)]
pub type Attend<E> = Kernel<attend::Args<E>>;

/// An element type that the dense kernels have instances for: f16 and bf16.
pub trait DenseElement: Half {
    /// The instances for a head_dim and their shared memory, the one that takes most first; none if there is
    /// no kernel.
    #[doc(hidden)]
    fn kernels(head_dim: u32) -> &'static [(Attend<Self>, u32)];

    /// The instance that takes two groups of rows at a time, in the shared memory of the first of
    /// [`kernels`](Self::kernels); none if there is no such kernel.
    #[doc(hidden)]
    fn pair_kernel(head_dim: u32) -> Option<(Attend<Self>, u32)>;

    /// The instance for a head_dim on a device whose thread blocks have so many bytes of shared memory, and
    /// what it takes of them: the one that takes least where none fits.
    #[doc(hidden)]
    fn kernel(head_dim: u32, shared_bytes: u32) -> Option<(Attend<Self>, u32)> {
        let kernels = Self::kernels(head_dim);
        kernels.iter().find(|(_, bytes)| *bytes <= shared_bytes).or(kernels.last()).cloned()
    }
}

macro_rules! instances {
    ($($element:ty),*) => {$(
        impl DenseElement for $element {
            fn kernels(head_dim: u32) -> &'static [(Attend<Self>, u32)] {
                macro_rules! own {
                    ($dim:literal) => { (attend::kernel::<$element, $dim>(), layout::<$dim>().bytes) };
                }
                macro_rules! lean {
                    ($dim:literal) => { (attend_lean::kernel::<$element, $dim>(), lean_layout::<$dim>().bytes) };
                }
                match head_dim {
                    64 => const { &[own!(64)] },
                    96 => const { &[own!(96), lean!(96)] },
                    128 => const { &[own!(128), lean!(128)] },
                    256 => const { &[own!(256), lean!(256)] },
                    _ => &[],
                }
            }

            fn pair_kernel(head_dim: u32) -> Option<(Attend<Self>, u32)> {
                macro_rules! pairs {
                    ($dim:literal) => { Some((attend_pairs::kernel::<$element, $dim>(), layout::<$dim>().bytes)) };
                }
                match head_dim {
                    64 => pairs!(64),
                    96 => pairs!(96),
                    128 => pairs!(128),
                    _ => None,
                }
            }
        }
    )*};
}
instances!(f16, bf16);

/// What a run writes.
#[derive(Debug)]
pub struct Attended {
    /// Attention, [sequences, query_tokens, q_heads, head_dim]; zeros for a query token that sees no key.
    pub output: Buffer<f32>,
    /// Natural log-sum-exp of the scaled scores, [sequences, query_tokens, q_heads]; −∞ for a query token
    /// that sees no key.
    pub lse: Buffer<f32>,
}

/// The arguments of [`Plan::run_on`]: memory of any kind that the device reaches, pinned memory included.
#[derive(Clone, Copy, Debug)]
pub struct Handles<E> {
    /// [sequences, query_tokens, q_heads, head_dim].
    pub queries: Global<E>,
    /// The pool's keys, [blocks, kv_heads, 16, head_dim].
    pub keys: Global<E>,
    /// Its values, like the keys.
    pub values: Global<E>,
    /// [sequences, max_blocks].
    pub table: Global<u32>,
    /// \[sequences\].
    pub lengths: Global<u32>,
    /// [sequences, kv_heads · row groups]: bit g of a word asks for row g of a group of eight, and bit 8 says
    /// that it is one of many ([`DenseShape::MANY`]: how finely it is cut, if the plan makes a difference); a
    /// block whose words are 0 leaves at once. Row `t · group + h` of a KV head is query token t of its query
    /// head h. `None` asks for all.
    pub wanted: Option<Global<u32>>,
    /// Whether keys and values are in the device's own memory: then a launch asks the L2 cache for its first
    /// tiles while the one ahead of it still runs. From pinned host memory they would come over the bus twice
    /// where the cache gives them up.
    pub near: bool,
    /// Like the queries. Rows that are not wanted stay as they are.
    pub output: GlobalMut<f32>,
    /// [sequences, query_tokens, q_heads]; likewise.
    pub lse: GlobalMut<f32>,
}

/// The launch that computes the attention of one problem, and its scratch.
///
/// The result depends on problem, queries, keys, values and lengths, and on nothing else: not on the device,
/// nor on where in the pool a block lies, nor on what other sequences of the batch hold. The split of the
/// work follows from the problem's extents; another `max_tokens` or another number of sequences may give
/// other bits, within the [bound](super::bound).
///
/// One run at a time: the scratch is the plan's. Runs in one stream follow each other anyway.
#[derive(Debug)]
pub struct Plan<E: DenseElement> {
    device: Device,
    problem: Problem,
    kernel: Attend<E>,
    launch: LaunchShape,
    shape: DenseShape,
    /// Partial results, for the block that comes last.
    partials: Buffer<f32>,
    /// How many blocks of a row have come; 0 between launches.
    counters: Buffer<u32>,
    /// Ones: every row is wanted.
    all: Buffer<u32>,
}

/// Thread blocks from which on a plan takes two groups of rows in each: as many as an H100 has
/// multiprocessors. With fewer some of those would stand still.
const PAIRS_FROM: u32 = 132;

impl<E: DenseElement> Plan<E> {
    /// A plan for a problem. Where a KV head has more than eight rows and there are thread blocks enough, as
    /// in a prompt, each has two groups of eight: the bits are the same.
    ///
    /// # Errors
    /// Those of [`Problem::checked`]; a kernel that the device cannot launch, or has not
    /// ([`Device::prepare`]); out of memory for the scratch (some 34·head_dim bytes for each of up to
    /// 132 thread blocks, or one for each sequence, KV head and group of eight query rows).
    pub fn new(device: &Device, problem: Problem) -> Result<Self> {
        Self::with_pairs_from(device, problem, PAIRS_FROM)
    }

    /// A plan that cuts sequences as it is told, where rows of blocks have unequal work: some are short, or
    /// few are wanted. Rows marked [`MANY`](DenseShape::MANY), and all where nobody says which are wanted,
    /// are cut into as many parts as the first of `splits` says, others into the second.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn with_splits(device: &Device, problem: Problem, splits: [u32; 2]) -> Result<Self> {
        Self::with(device, problem, PAIRS_FROM, Some(splits))
    }

    /// [`new`](Self::new) with pairs of groups of rows from so many thread blocks on: for tests and `check`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    #[doc(hidden)]
    pub fn with_pairs_from(device: &Device, problem: Problem, pairs_from: u32) -> Result<Self> {
        Self::with(device, problem, pairs_from, None)
    }

    fn with(device: &Device, problem: Problem, pairs_from: u32, splits: Option<[u32; 2]>) -> Result<Self> {
        let problem = problem.checked()?;
        let head_dim = problem.head_dim;
        let most_bytes = device.info().max_shared_bytes;
        let alone = E::kernel(head_dim, most_bytes).ok_or(Error::HeadDim { head_dim })?;
        let shape = problem.shape();
        let [splits, few_splits] = splits.unwrap_or([shape.splits; 2]);
        let shape = DenseShape { splits, few_splits, ..shape };
        let launches = problem.sequences * problem.kv_heads * shape.row_groups();
        let pairs = problem.kv_heads * shape.row_groups().div_ceil(2);
        let in_pairs = E::pair_kernel(head_dim).filter(|(_, bytes)| {
            shape.most_splits() == 1
                && shape.row_groups() > 1
                && *bytes <= most_bytes
                && problem.sequences.saturating_mul(pairs) >= pairs_from
        });
        let rows = if in_pairs.is_some() { pairs } else { problem.kv_heads * shape.row_groups() };
        let most = shape.most_splits();
        let (kernel, shared_bytes) = in_pairs.unwrap_or(alone);
        let launch =
            LaunchShape::new((most, rows, problem.sequences), threads(head_dim)).shared(shared_bytes);
        device.prepare(&kernel, launch)?;
        let floats = if most == 1 { 0 } else { partial_floats(launches, most, head_dim) };
        Ok(Plan {
            device: device.clone(),
            problem,
            kernel,
            launch,
            shape,
            partials: Buffer::new(device, floats)?,
            counters: Buffer::zeroed(device, launches as usize)?,
            all: Buffer::from_slice(device, &vec![u32::MAX; launches as usize])?,
        })
    }

    /// What it is for.
    pub fn problem(&self) -> Problem {
        self.problem
    }

    /// What the kernel is told, but for what follows from handles.
    pub(crate) fn shape(&self) -> DenseShape {
        self.shape
    }

    /// Parts that a sequence of the full length is cut into: they follow from the problem, but for plans of
    /// lists, which say how many.
    pub fn splits(&self) -> u32 {
        self.shape.splits
    }

    /// Words of [`Handles::wanted`].
    pub fn wanted_words(&self) -> usize {
        self.all.len()
    }

    /// The grid and its blocks.
    pub fn launch_shape(&self) -> LaunchShape {
        self.launch
    }

    /// Buffers for what a run writes.
    ///
    /// # Errors
    /// Out of memory.
    pub fn allocate(&self) -> Result<Attended> {
        let rows = self.problem.query_rows();
        Ok(Attended {
            output: Buffer::new(&self.device, rows * self.problem.head_dim as usize)?,
            lse: Buffer::new(&self.device, rows)?,
        })
    }

    /// Attention of `queries` [sequences, query_tokens, q_heads, head_dim] over the sequences that `table`
    /// names.
    ///
    /// # Errors
    /// [`Error::Length`] and [`Error::Mismatch`] for what belongs to another problem;
    /// [`crate::Error::WrongDevice`]; what the launch reports.
    pub fn run(
        &mut self,
        stream: &Stream,
        queries: &Buffer<E>,
        pool: &PagedPool<E>,
        table: &BlockTable,
        out: &mut Attended,
    ) -> Result<()> {
        let device = stream.device();
        device.check_same(queries.device(), "the buffer of queries")?;
        device.check_same(pool.device(), "the pool")?;
        device.check_same(table.device(), "the block table")?;
        device.check_same(out.output.device(), "the output buffer")?;
        device.check_same(out.lse.device(), "the buffer of log-sums")?;
        let Problem { sequences, kv_heads, head_dim, .. } = self.problem;
        equal("the pool's number of KV heads", pool.kv_heads(), kv_heads)?;
        equal("the pool's head_dim", pool.head_dim(), head_dim)?;
        equal("the table's number of sequences", table.sequences(), sequences)?;
        equal("the table's blocks of a sequence", table.max_blocks(), self.shape.max_blocks)?;
        if table.pool_blocks() > pool.blocks() {
            return equal("the pool's number of blocks", pool.blocks(), table.pool_blocks());
        }
        // The buffers are in the caller's reach: another may have taken their place.
        let elements = pool.blocks() as usize * (BLOCK_TOKENS * kv_heads) as usize * head_dim as usize;
        length("the pool's keys", pool.keys().len(), elements)?;
        let handles = Handles {
            queries: queries.global(),
            keys: pool.keys().global(),
            values: pool.values().global(),
            table: table.blocks().global(),
            lengths: table.lengths().global(),
            wanted: None,
            near: true,
            output: out.output.global_mut(),
            lse: out.lse.global_mut(),
        };
        // SAFETY: buffers of this device; the table checked its entries against a pool no larger than this
        // one and its lengths against its rows. Dropping a buffer waits for the device.
        unsafe { self.run_on(stream, handles) }
    }

    /// [`run`](Self::run) over memory that the caller vouches for, and only for the rows that are wanted: for
    /// pools in pinned memory, tables that the device writes, and for doing again what something cheaper
    /// could not.
    ///
    /// # Safety
    /// Until the launch has finished (for a capture: until each run of the graph has):
    /// - the memory behind every handle is there, reached by the stream's device, and used by nothing else
    ///   that writes it, or for the outputs, that touches it;
    /// - each length is at most `max_blocks · 16`, and each table entry that a length reaches is a block of
    ///   the pool.
    ///
    /// # Errors
    /// [`Error::Length`] for handles of another problem; [`crate::Error::WrongDevice`]; what the launch
    /// reports.
    pub unsafe fn run_on(&mut self, stream: &Stream, handles: Handles<E>) -> Result<()> {
        stream.device().check_same(&self.device, "the plan")?;
        let problem = self.problem;
        let (rows, head_dim) = (problem.query_rows(), problem.head_dim as usize);
        length("the buffer of queries", handles.queries.len(), rows * head_dim)?;
        length("the output", handles.output.len(), rows * head_dim)?;
        length("the buffer of log-sums", handles.lse.len(), rows)?;
        length("the buffer of lengths", handles.lengths.len(), problem.sequences as usize)?;
        let entries = problem.sequences as usize * self.shape.max_blocks as usize;
        length("the block table", handles.table.len(), entries)?;
        length("the buffer of values", handles.values.len(), handles.keys.len())?;
        let block = (BLOCK_TOKENS * problem.kv_heads) as usize * head_dim;
        let blocks = handles.keys.len() / block;
        length("the buffer of keys", handles.keys.len(), blocks * block)?;
        let wanted = handles.wanted.unwrap_or_else(|| self.all.global());
        length("the words of wanted rows", wanted.len(), self.all.len())?;
        let arguments = attend::Args {
            queries: handles.queries,
            keys: handles.keys,
            values: handles.values,
            table: handles.table,
            lengths: handles.lengths,
            wanted,
            partials: self.partials.global_mut(),
            counters: self.counters.global_mut(),
            output: handles.output,
            lse: handles.lse,
            shape: DenseShape {
                pool_blocks: if handles.near { blocks as u32 } else { 0 },
                rung: u32::from(handles.wanted.is_some()),
                ..self.shape
            },
        };
        // SAFETY: lengths as just checked and scratch made for this shape; the rest is this function's
        // contract. Blocks of a row meet in `counters` only, and the one that reads the others' parts comes
        // last.
        unsafe { stream.launch(&self.kernel, self.launch, arguments)? };
        Ok(())
    }

    /// [`run_on`](Self::run_on), or with `slices` the CPU's own path in its place, which gives the same bits
    /// and has finished when this returns.
    ///
    /// # Safety
    /// As [`run_on`](Self::run_on); with `slices` the handles are host memory.
    ///
    /// # Errors
    /// As [`run_on`](Self::run_on); with `slices` a length or a block that table or pool do not have.
    pub unsafe fn attend_on(&mut self, stream: &Stream, slices: bool, handles: Handles<E>) -> Result<()> {
        if !slices {
            // SAFETY: the caller's word.
            return unsafe { self.run_on(stream, handles) };
        }
        let Handles { queries, keys, values, table, lengths, wanted, output, lse, .. } = handles;
        // SAFETY: the caller's word; the emulator's streams have done what they were told when a call
        // returns.
        let (read, wanted, output, lse) = unsafe {
            let (queries, keys, values) = (slice(queries), slice(keys), slice(values));
            let read = cpu::Slices { queries, keys, values, table: slice(table), lengths: slice(lengths) };
            (read, wanted.map(|wanted| slice(wanted)), slice_mut(output), slice_mut(lse))
        };
        cpu::attend_rows(
            Level::best(),
            self.problem,
            [self.shape.splits, self.shape.few_splits],
            read,
            wanted,
            output,
            lse,
        )
    }
}

fn length(what: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::Length { what, got, expected }) }
}

fn equal(what: &'static str, got: u32, expected: u32) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::Mismatch { what, got, expected }) }
}
