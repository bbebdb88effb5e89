//! Who ranks the scores of a list: one thread block, or every one that attends to it.

use super::elements::{AttendChosen, ScoreKernel};
use super::{Asked, Chosen, Error, GatherElement, Handles, Result};
use crate::attention::BLOCK_TOKENS;
use crate::kv::Selection;
use crate::{Buffer, Device, Stream};
use kernels_gpu::attention::dense::{DenseShape, partial_floats};
use kernels_gpu::gather::{
    CHOSEN_THREADS, ChosenShape, MOST_LISTED, SCORE_THREADS, SelectShape, attend_chosen, score, score_parts,
};
use simt::LaunchShape;

/// Who ranks. The results have the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranks {
    /// The thread block of a list that scores last, which writes a block table: `select`, then `attend`.
    One,
    /// Each thread block that attends to the list, for itself: `score`, then `attend_chosen`.
    Each,
}

/// The most tiles of 16 blocks of a list, and of all lists of a batch, for which it is quicker that each
/// thread block ranks: beyond, all of them read too much (docs/gather.md has the times).
const FEW: (u32, u32) = (320, 2560);

impl Ranks {
    /// What a selection says, if it does.
    pub(super) fn of(selection: &Selection) -> Option<Self> {
        match selection.word("ranks", "") {
            "each" => Some(Ranks::Each),
            "one" => Some(Ranks::One),
            _ => None,
        }
    }

    /// Whether a selection does not give the option where it does not go.
    ///
    /// # Errors
    /// [`Error::Ranks`].
    pub(super) fn check(selection: &Selection) -> Result<()> {
        let with = match Asked::of(selection) {
            Asked::Certified(_) => ":certified",
            Asked::InHost(..) => "staging",
            Asked::OnDevice(_) | Asked::Codes(_) => return Ok(()),
        };
        match selection.value("ranks") {
            Some(_) => Err(Error::Ranks { with }),
            None => Ok(()),
        }
    }

    /// What is quicker for so many lists of so many tiles.
    pub(super) fn quicker(lists: u32, tiles: u32) -> Self {
        if tiles <= FEW.0 && lists.saturating_mul(tiles) <= FEW.1 { Ranks::Each } else { Ranks::One }
    }
}

/// Distant blocks of the longest list: besides the first block and a last one.
pub(super) fn longest(select: SelectShape) -> u32 {
    select.rule.k.min(select.most.saturating_sub(2))
}

/// The launches, and their scratch.
#[derive(Debug)]
pub(super) struct Each<E: GatherElement> {
    scoring: (ScoreKernel<E>, LaunchShape),
    attending: (AttendChosen<E>, LaunchShape),
    shape: ChosenShape,
    head_dim: u32,
    /// Partial results, for the thread block that comes last.
    partials: Buffer<f32>,
    /// How many thread blocks of a row have attended; 0 between launches.
    counters: Buffer<u32>,
}

impl<E: GatherElement> Each<E> {
    /// Of a plan's choice over grid rows `(lists, sequences)` and its attention.
    ///
    /// # Errors
    /// [`Error::LongList`]; what [`Device::prepare`] says against a kernel; out of memory.
    pub fn new(
        device: &Device,
        (score, attend, shared): (ScoreKernel<E>, AttendChosen<E>, u32),
        (lists, sequences): (u32, u32),
        (select, attended): (SelectShape, DenseShape),
        head_dim: u32,
    ) -> Result<Self> {
        let chosen = longest(select);
        if chosen > MOST_LISTED {
            return Err(Error::LongList { k: chosen });
        }
        let shape = ChosenShape { select, attend: attended };
        let (tiles, splits) = (select.tiles, attended.splits);
        let (rows, row_groups) = (lists * sequences, attended.row_groups());
        let scoring = LaunchShape::new((score_parts(rows, tiles), lists, sequences), SCORE_THREADS);
        let attending =
            LaunchShape::new((splits * row_groups, lists, sequences), CHOSEN_THREADS).shared(shared);
        device.prepare(&score, scoring)?;
        device.prepare(&attend, attending)?;
        let launches = rows * row_groups;
        let floats = if splits == 1 { 0 } else { partial_floats(launches, splits, head_dim) };
        Ok(Each {
            scoring: (score, scoring),
            attending: (attend, attending),
            shape,
            head_dim,
            partials: Buffer::new(device, floats)?,
            counters: Buffer::zeroed(device, launches as usize)?,
        })
    }

    /// Chooses and attends: the first of the two launches, or both. `scores` and `maxima` are the plan's.
    ///
    /// # Safety
    /// That of [`Plan::step_on`](super::Plan::step_on), whose lengths have been checked.
    ///
    /// # Errors
    /// What the launches report.
    pub unsafe fn run_on(
        &mut self,
        stream: &Stream,
        handles: &Handles<E>,
        (scores, maxima, chosen): (&mut Buffer<u32>, &mut Buffer<u32>, &mut Chosen),
        stages: usize,
    ) -> Result<()> {
        let Handles { queries, keys, values, bounds, table, lengths, output, lse } = *handles;
        let (scores, maxima) = (scores.global_mut(), maxima.global_mut());
        let score = score::Args { queries, bounds, lengths, scores, maxima, shape: self.shape.select };
        let block = BLOCK_TOKENS as usize * self.shape.select.kv_heads as usize * self.head_dim as usize;
        let pool_blocks = (keys.len() / block) as u32;
        let attend = attend_chosen::Args {
            queries,
            keys,
            values,
            table,
            lengths,
            scores,
            maxima,
            list: chosen.list.global_mut(),
            counts: chosen.counts.global_mut(),
            kept: chosen.kept.global_mut(),
            partials: self.partials.global_mut(),
            counters: self.counters.global_mut(),
            output,
            lse,
            shape: ChosenShape { attend: DenseShape { pool_blocks, ..self.shape.attend }, ..self.shape },
        };
        // SAFETY: scratch made for this shape; the rest is this function's contract. Thread blocks of the
        // first launch write what is theirs alone; those of the second meet in `counters`, and the one that
        // reads the others' parts comes last. Of the list, which one writes by atomics, others look at what
        // was there or will be, for a hint.
        unsafe {
            stream.launch(&self.scoring.0, self.scoring.1, score)?;
            if stages > 1 {
                stream.launch(&self.attending.0, self.attending.1, attend)?;
            }
        }
        Ok(())
    }

    /// What must be 0 between launches.
    pub fn counters(&self) -> &Buffer<u32> {
        &self.counters
    }
}
