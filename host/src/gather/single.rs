//! A step in one launch: choice and attention by the same thread blocks.

use super::elements::Step;
use super::{Asked, Chosen, Error, GatherElement, Handles, Result};
use crate::kv::Selection;
use crate::{Buffer, Device, Stream};
use kernels_gpu::attention::dense::partial_floats;
use kernels_gpu::gather::{
    MOST_LISTED, STEP_THREADS, StepShape, TILE_BLOCKS, maxima_words, step, step_blocks,
};
use simt::LaunchShape;

/// In how many launches a step of a layer chooses and attends. The results have the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launches {
    /// One, whose thread blocks rank for themselves.
    One,
    /// One that chooses and writes a block table, one that attends over it.
    Two,
}

impl Launches {
    /// Where nothing else is said.
    pub const DEFAULT: Launches = Launches::Two;

    /// What a selection says.
    pub(super) fn of(selection: &Selection) -> Self {
        match selection.word("launches", "") {
            "1" => Launches::One,
            "2" => Launches::Two,
            _ => Launches::DEFAULT,
        }
    }

    /// Whether a selection does not give the option where it does not go.
    ///
    /// # Errors
    /// [`Error::Launches`].
    pub(super) fn check(selection: &Selection) -> Result<()> {
        let with = match Asked::of(selection) {
            Asked::Certified(_) => ":certified",
            Asked::InHost(..) => "staging",
            Asked::OnDevice(_) => return Ok(()),
        };
        match selection.value("launches") {
            Some(_) => Err(Error::Launches { with }),
            None => Ok(()),
        }
    }
}

/// The launch, and its scratch.
#[derive(Debug)]
pub(super) struct Single<E: GatherElement> {
    kernel: Step<E>,
    launch: LaunchShape,
    shape: StepShape,
    /// Words that order like the scores, [sequences, lists, tiles, 16]; 0 between launches.
    scores: Buffer<u32>,
    /// The largest of each tile, [sequences, lists, maxima_words(tiles)]; 0 between launches.
    maxima: Buffer<u32>,
    /// How many thread blocks of a row are done with its scores; 0 between launches.
    departed: Buffer<u32>,
    /// Partial results, for the thread block that comes last.
    partials: Buffer<f32>,
    /// How many thread blocks of a row have attended; 0 between launches.
    counters: Buffer<u32>,
}

impl<E: GatherElement> Single<E> {
    /// Of a plan's choice over grid rows `(lists, sequences)` and its attention.
    ///
    /// # Errors
    /// [`Error::LongList`]; what [`Device::prepare`] says against the kernel; out of memory.
    pub fn new(
        device: &Device,
        (kernel, shared): (Step<E>, u32),
        (lists, sequences): (u32, u32),
        shape: StepShape,
        head_dim: u32,
    ) -> Result<Self> {
        // Besides the first block and a last one.
        let chosen = shape.select.rule.k.min(shape.select.most.saturating_sub(2));
        if chosen > MOST_LISTED {
            return Err(Error::LongList { k: chosen });
        }
        let (tiles, splits) = (shape.select.tiles, shape.attend.splits);
        let (rows, row_groups) = (lists * sequences, shape.attend.row_groups());
        let blocks = step_blocks(rows, tiles, splits, row_groups);
        let launches = rows * row_groups;
        let launch = LaunchShape::new((blocks, lists, sequences), STEP_THREADS).shared(shared);
        device.prepare(&kernel, launch)?;
        let floats = if splits == 1 { 0 } else { partial_floats(launches, splits, head_dim) };
        let rows = rows as usize;
        Ok(Single {
            kernel,
            launch,
            shape,
            scores: Buffer::zeroed(device, rows * (tiles * TILE_BLOCKS) as usize)?,
            maxima: Buffer::zeroed(device, rows * maxima_words(tiles) as usize)?,
            departed: Buffer::zeroed(device, rows)?,
            partials: Buffer::new(device, floats)?,
            counters: Buffer::zeroed(device, launches as usize)?,
        })
    }

    /// Chooses and attends.
    ///
    /// # Safety
    /// That of [`Plan::step_on`](super::Plan::step_on), whose lengths have been checked.
    ///
    /// # Errors
    /// What the launch reports.
    pub unsafe fn run_on(
        &mut self,
        stream: &Stream,
        handles: &Handles<E>,
        chosen: &mut Chosen,
    ) -> Result<()> {
        let Handles { queries, keys, values, bounds, table, lengths, output, lse } = *handles;
        let args = step::Args {
            queries,
            keys,
            values,
            bounds,
            table,
            lengths,
            scores: self.scores.global_mut(),
            maxima: self.maxima.global_mut(),
            departed: self.departed.global_mut(),
            list: chosen.list.global_mut(),
            counts: chosen.counts.global_mut(),
            kept: chosen.kept.global_mut(),
            partials: self.partials.global_mut(),
            counters: self.counters.global_mut(),
            output,
            lse,
            shape: self.shape,
        };
        // SAFETY: scratch made for this shape; the rest is this function's contract. Thread blocks of a row
        // share scores and maxima by atomics, in which each stores what any other would, and set them to 0
        // when all have arrived in the counters; no other memory that one writes is another's to read but
        // parts, by the one that comes last.
        Ok(unsafe { stream.launch(&self.kernel, self.launch, args) }?)
    }

    /// What must be 0 between launches.
    pub fn scratch(&self) -> [(&'static str, &Buffer<u32>); 4] {
        [
            ("scores", &self.scores),
            ("maxima", &self.maxima),
            ("departed", &self.departed),
            ("counters", &self.counters),
        ]
    }
}
