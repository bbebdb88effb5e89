//! Plan and launch: a plan owns its scratch and fixes the launches of a step.

use super::codebook::Levels;
use super::{Error, HEAD_DIMS, Result, Settings, TileLayout, Window, cpu, length, near};
use crate::attention::dense::Problem;
use crate::cpu::handles::{slice, slice_mut};
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::attention::dense::partial_floats;
use kernels_gpu::attention::{split_count, threads};
use kernels_gpu::gtq::levels::{MOST_BITS, key_table};
use kernels_gpu::gtq::parts::{self, PARTS, PartTables};
use kernels_gpu::gtq::{
    AttendShape, Codebook, EncodeShape, Parted, Positive, Tables, Whole, attend, attend_parts, decode,
};
use simt::{Global, GlobalMut, Kernel, LaunchShape, Zeroable};

/// Attention over whole keys, or over keys in parts, and what it is told of them.
#[derive(Clone, Copy, Debug)]
enum Attend {
    Whole(Kernel<attend::Args>, Whole),
    Parts(Kernel<attend_parts::Args>, Parted),
}

macro_rules! instances {
    ($($d:literal, $k:literal, $v:literal;)*) => {
        /// The kernel of a layout and its shared memory.
        fn attend_kernel(books: &Books) -> Option<(Attend, u32)> {
            let layout = books.layout;
            match (layout.head_dim, layout.key_bits, layout.value_bits, layout.parted) {
                $(($d, $k, $v, false) => {
                    let shared = decode::layout::<$d, $k, $v, false>().bytes;
                    Some((Attend::Whole(attend::kernel::<$d, $k, $v>(), books.whole()), shared))
                }
                ($d, $k, $v, true) => {
                    let shared = decode::layout::<$d, $k, $v, true>().bytes;
                    Some((Attend::Parts(attend_parts::kernel::<$d, $k, $v>(), books.parted()), shared))
                })*
                _ => None,
            }
        }
    };
}
instances! {
    64, 2, 2; 64, 2, 3; 64, 2, 4; 64, 3, 2; 64, 3, 3; 64, 3, 4; 64, 4, 2; 64, 4, 3; 64, 4, 4;
    128, 2, 2; 128, 2, 3; 128, 2, 4; 128, 3, 2; 128, 3, 3; 128, 3, 4; 128, 4, 2; 128, 4, 3; 128, 4, 4;
}

/// Levels of keys and of values.
#[derive(Clone, Debug)]
pub struct Books {
    /// How they are used.
    pub settings: Settings,
    /// Where codes lie.
    pub layout: TileLayout,
    /// The keys' levels, of each part if they are in parts.
    pub keys: Vec<Levels>,
    /// The values' levels.
    pub values: Levels,
}

impl Books {
    /// For heads of `head_dim` channels.
    ///
    /// # Errors
    /// [`Error::HeadDim`], [`Error::Bits`].
    pub fn new(head_dim: u32, settings: Settings) -> Result<Self> {
        if !HEAD_DIMS.contains(&head_dim) {
            return Err(Error::HeadDim { head_dim });
        }
        for (what, bits) in [("keys", settings.key_bits), ("values", settings.value_bits)] {
            if !super::BITS.contains(&bits) {
                return Err(Error::Bits { what, bits });
            }
        }
        let dim = head_dim as usize;
        let keys = if settings.blocks {
            parts::bits(settings.key_bits).iter().map(|bits| Levels::new(dim / PARTS, *bits)).collect()
        } else {
            vec![Levels::new(dim, settings.key_bits)]
        };
        Ok(Books {
            settings,
            layout: settings.layout(head_dim),
            keys,
            values: Levels::new(dim, settings.value_bits),
        })
    }

    /// Bytes of the order of channels that a layer of so many KV heads needs; 0 where keys are whole.
    pub fn order_bytes(&self, kv_heads: u32) -> usize {
        if self.layout.parted { (kv_heads * self.layout.head_dim) as usize } else { 0 }
    }

    /// Tiles of a problem's sequences that are read in 16 bits.
    pub fn window(&self, problem: Problem) -> Window {
        self.settings.window(problem.max_blocks())
    }

    /// Words of a layer's window, [sequences, kv_heads, slots].
    pub fn window_words(&self, problem: Problem) -> usize {
        let slots =
            problem.sequences as usize * problem.kv_heads as usize * self.window(problem).slots as usize;
        slots * self.layout.slot().bytes() as usize / 4
    }

    /// The levels of keys in parts.
    pub(super) fn part_codebooks(&self) -> Option<[Codebook<{ parts::MOST_LEVELS }>; PARTS]> {
        self.layout.parted.then(|| std::array::from_fn(|p| self.keys[p].codebook()))
    }

    /// The same as encoding is given them, a [`PartBooks`]; nothing of whole keys.
    pub(super) fn part_numbers(&self) -> Vec<f32> {
        let Some(books) = self.part_codebooks() else { return Vec::new() };
        let of = books.iter().zip(parts::bits(self.layout.key_bits));
        // Positive ones, then infinities.
        let positive = of.map(|(book, bits)| {
            let half = 1usize << bits >> 1;
            let at = move |i: usize| *book.thresholds.get(half + i).unwrap_or(&f32::INFINITY);
            (bits, at)
        });
        let (mut coarse, mut fine) = (Vec::new(), Vec::new());
        for (bits, at) in positive {
            let wide = bits > MOST_BITS;
            coarse.extend((0..8).map(|i| if wide { at(4 * i + 3) } else { at(i) }));
            let of_lane = |i: usize| if wide && i % 4 < 3 { at(i) } else { f32::INFINITY };
            fine.extend((0..32).map(of_lane));
        }
        let of = books.iter().zip(parts::bits(self.layout.key_bits));
        let levels = of.flat_map(|(book, bits)| {
            let half = 1usize << bits >> 1;
            (0..parts::MOST_LEVELS / 2).map(move |i| if i < half { book.levels[half + i] } else { 0.0 })
        });
        coarse.into_iter().chain(fine).chain(levels).collect()
    }

    /// What encoding new tokens of a problem is told.
    pub(super) fn encode_shape(&self, problem: Problem) -> EncodeShape {
        let bits = [self.layout.key_bits, self.layout.value_bits];
        EncodeShape {
            tokens: problem.query_tokens,
            kv_heads: problem.kv_heads,
            max_blocks: problem.max_blocks(),
            key_bits: bits[0],
            value_bits: bits[1],
            rule: self.settings.rule as u32,
            root: f64::from(self.layout.head_dim).sqrt() as f32,
            key_units: near::key_units(self),
            value_unit: (1.0 / self.values.step) as f32,
            window: self.window(problem),
            // Keys in parts have theirs in memory.
            keys: if self.layout.parted {
                Positive::zeroed()
            } else {
                Positive::of(&self.keys[0].codebook(), bits[0])
            },
            values: Positive::of(&self.values.codebook(), bits[1]),
        }
    }

    /// What makes scores in log2 units of Σ i·(l + 1/2)·n·m, of each part.
    pub(super) fn scores(&self) -> impl Iterator<Item = f32> {
        let d = f64::from(self.layout.head_dim);
        let of_part = d / self.keys.len() as f64;
        let unit = if self.layout.parted { f64::from(parts::UNIT) } else { 1.0 };
        let largest = f64::from(kernels_gpu::attention::integers::LARGEST);
        let root = (d * of_part).sqrt();
        self.keys
            .iter()
            .map(move |levels| (unit * levels.step * std::f64::consts::LOG2_E / (largest * root)) as f32)
    }

    /// What attention is told of the keys.
    fn parted(&self) -> Parted {
        let mut scores = [0.0; PARTS];
        scores.iter_mut().zip(self.scores()).for_each(|(to, score)| *to = score);
        Parted { tables: PartTables::new(std::array::from_fn(|p| &self.keys[p].integers[..])), scores }
    }

    /// The same of whole keys.
    fn whole(&self) -> Whole {
        let score = self.scores().next().unwrap_or_default();
        Whole { table: key_table(&self.keys[0].integers), score }
    }

    /// What attention of a problem is told.
    pub(super) fn shape(&self, problem: Problem) -> AttendShape {
        let d = f64::from(self.layout.head_dim);
        let shape = AttendShape {
            group: problem.group(),
            query_tokens: problem.query_tokens,
            kv_heads: problem.kv_heads,
            max_blocks: problem.max_blocks(),
            splits: 1,
            value: (self.values.step / d.sqrt()) as f32,
            tables: Tables::new(&self.values.integers),
            window: self.window(problem),
        };
        let launches = problem.sequences * problem.kv_heads * shape.row_groups();
        AttendShape { splits: split_count(launches, shape.max_blocks), ..shape }
    }
}

/// The arguments of attention: memory of any kind that the device reaches.
#[derive(Clone, Copy, Debug)]
pub struct Handles {
    /// [sequences, query_tokens, q_heads, head_dim].
    pub queries: Global<f16>,
    /// The pool, [blocks, kv_heads] tiles.
    pub tiles: Global<u32>,
    /// The window, [sequences, kv_heads] slots.
    pub near: Global<u32>,
    /// [sequences, max_blocks].
    pub table: Global<u32>,
    /// Of keys in parts, [kv_heads, head_dim]: the channel that each dimension is. Empty of whole keys. It is
    /// read before the launches ahead have ended.
    pub order: Global<u8>,
    /// \[sequences\].
    pub lengths: Global<u32>,
    /// Like the queries.
    pub output: GlobalMut<f32>,
    /// Natural log-sum-exp, [sequences, query_tokens, q_heads].
    pub lse: GlobalMut<f32>,
}

/// Attention over codes, in one launch.
///
/// Bits depend on the problem and on what is read, and on nothing else. One launch at a time: the scratch is
/// the plan's. Launches in one stream follow each other anyway.
#[derive(Debug)]
pub struct Plan {
    device: Device,
    problem: Problem,
    books: Books,
    kernel: Attend,
    launch: LaunchShape,
    shape: AttendShape,
    /// Partial results, for the block that comes last.
    partials: Buffer<f32>,
    /// How many blocks of a row have come; 0 between launches.
    counters: Buffer<u32>,
}

impl Plan {
    /// A plan for a problem.
    ///
    /// # Errors
    /// [`Error::HeadDim`]; those of [`Problem::checked`]; a kernel that the device cannot launch, or has not
    /// ([`Device::prepare`]); out of memory for the scratch.
    pub fn new(device: &Device, problem: Problem, books: Books) -> Result<Self> {
        let head_dim = problem.head_dim;
        if head_dim != books.layout.head_dim {
            return Err(Error::HeadDim { head_dim });
        }
        let problem = problem.checked()?;
        let (kernel, shared) = attend_kernel(&books).ok_or(Error::HeadDim { head_dim })?;
        let shape = books.shape(problem);
        let rows = problem.kv_heads * shape.row_groups();
        let launches = problem.sequences * rows;
        let grid = (shape.splits, rows, problem.sequences);
        let launch = LaunchShape::new(grid, threads(head_dim)).shared(shared);
        match &kernel {
            Attend::Whole(kernel, _) => device.prepare(kernel, launch),
            Attend::Parts(kernel, _) => device.prepare(kernel, launch),
        }?;
        let floats = if shape.splits == 1 { 0 } else { partial_floats(launches, shape.splits, head_dim) };
        Ok(Plan {
            device: device.clone(),
            problem,
            books,
            kernel,
            launch,
            shape,
            partials: Buffer::new(device, floats)?,
            counters: Buffer::zeroed(device, launches as usize)?,
        })
    }

    /// What it is for.
    pub fn problem(&self) -> Problem {
        self.problem
    }

    /// Parts that a sequence of the full length is cut into.
    pub fn splits(&self) -> u32 {
        self.shape.splits
    }

    /// Attends. It allocates nothing, waits for nothing and can be captured. With `slices` on the CPU's own
    /// path in place of the kernel, which gives the same bits.
    ///
    /// # Safety
    /// Until the launch has finished (for a capture: until each run of the graph has):
    /// - the memory behind every handle is there, reached by the stream's device, and used by nothing else
    ///   that writes it, or for the outputs, that touches it; with `slices` it is host memory;
    /// - each length is at most `max_blocks · 16`, and each table entry that a length reaches is a block of
    ///   the pool;
    /// - the order's entries are below `head_dim`, and no launch of the stream writes them.
    ///
    /// # Errors
    /// [`Error::Length`] for handles of another problem; [`crate::Error::WrongDevice`]; what the launch
    /// reports.
    pub unsafe fn run_on(&mut self, stream: &Stream, slices: bool, handles: Handles) -> Result<()> {
        stream.device().check_same(&self.device, "the plan")?;
        let problem = self.problem;
        let (rows, head_dim) = (problem.query_rows(), problem.head_dim as usize);
        let tile = self.books.layout.bytes() as usize / 4 * problem.kv_heads as usize;
        length("the buffer of queries", handles.queries.len(), rows * head_dim)?;
        length("the output", handles.output.len(), rows * head_dim)?;
        length("the buffer of log-sums", handles.lse.len(), rows)?;
        length("the buffer of lengths", handles.lengths.len(), problem.sequences as usize)?;
        let entries = problem.sequences as usize * self.shape.max_blocks as usize;
        length("the block table", handles.table.len(), entries)?;
        length("the pool", handles.tiles.len(), handles.tiles.len() / tile * tile)?;
        length("the window", handles.near.len(), self.books.window_words(problem))?;
        length("the order of channels", handles.order.len(), self.books.order_bytes(problem.kv_heads))?;
        let Handles { queries, tiles, near, table, order, lengths, output, lse } = handles;
        if slices {
            // SAFETY: the caller's word; the emulator's streams have done what they were told when a call
            // returns.
            unsafe {
                let slices = cpu::Slices {
                    queries: slice(queries),
                    tiles: slice(tiles.cast::<u8>()),
                    near: slice(near.cast::<u8>()),
                    table: slice(table),
                    lengths: slice(lengths),
                    order: slice(order),
                };
                cpu::attend(&self.books, self.shape, slices, slice_mut(output), slice_mut(lse));
            }
            return Ok(());
        }
        let (partials, counters) = (self.partials.global_mut(), self.counters.global_mut());
        let (launch, shape) = (self.launch, self.shape);
        match self.kernel {
            Attend::Whole(ref kernel, keys) => {
                let args = attend::Args {
                    queries,
                    tiles,
                    near,
                    table,
                    lengths,
                    partials,
                    counters,
                    output,
                    lse,
                    shape,
                    keys,
                };
                // SAFETY: lengths as just checked and scratch made for this shape; the rest is this
                // function's contract. Blocks of a row meet in `counters` only, and the one that reads the
                // others' parts comes last.
                unsafe { stream.launch(kernel, launch, args) }?;
            }
            Attend::Parts(ref kernel, keys) => {
                let args = attend_parts::Args {
                    queries,
                    tiles,
                    near,
                    table,
                    lengths,
                    order,
                    partials,
                    counters,
                    output,
                    lse,
                    shape,
                    keys,
                };
                // SAFETY: as above, and the order has channels of the head.
                unsafe { stream.launch(kernel, launch, args) }?;
            }
        }
        Ok(())
    }
}
