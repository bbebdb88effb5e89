//! What is carried from step to step: which blocks are promoted.

use super::watching::of;
use crate::certified::{Error, Result};
use crate::{Buffer, Device, Stream};
use kernels_gpu::certified::carried::{Promoted, mode};
use kernels_gpu::certified::{Entry, ListHead};
use simt::Pod;

/// The list by which the steps of a [`StepPlan`](super::StepPlan) promote, with
/// [`Policy::renew`](crate::certified::Policy::renew).
///
/// The bound of a step holds whatever blocks are in it; what it misses makes the bound larger. So it may
/// serve other sequences than those it was made for: entries past a sequence's end are passed over, and the
/// next renewal mends it. Plans list no block twice, whose weight would count twice.
///
/// With [`Policy::canary`](crate::certified::Policy::canary) a row also keeps that its sequence's stored data
/// were found to have changed, and stays exact for good. Whoever gives the row to another sequence has to
/// [`forget`](Self::forget) what it has, and [`copy`](Self::copy) it for a fork.
///
/// When it is made anew is counted here, as steps are put into a stream: a graph repeats what its steps were
/// when it was captured. So one that shall renew its list now and then holds as many steps as
/// [`Policy::renew`](crate::certified::Policy::renew) says, or several graphs of one step each take turns.
#[derive(Debug)]
pub struct Carried {
    /// [sequences · kv_heads · row groups, parts].
    pub(super) lists: Buffer<ListHead>,
    /// The same, places of a part.
    pub(super) entries: Buffer<Entry>,
    /// Of each row of blocks, what its last step has promoted.
    pub(super) promoted: Buffer<Promoted>,
    /// Of each head what the last step has left of its mass: [`log_sum`].
    ///
    /// [`log_sum`]: kernels_gpu::certified::carried::sight::log_sum
    pub(super) log_sums: Buffer<f32>,
    /// Whose turn it is.
    pub(super) turns: Turns,
}

/// In which steps a list is made anew: in the first one, then in one of so many.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::certified) struct Turns {
    /// Steps so far.
    steps: u64,
    /// How many steps early.
    phase: u32,
    /// Whether the first step waits for its turn too.
    waits: bool,
}

impl Turns {
    /// Bits of [`mode`] for the step that comes now; `every`: for how many steps a list is used, 0 if there
    /// is none; `followed`: whether steps have a second pass.
    pub(in crate::certified) fn begin(&mut self, every: u32, followed: bool) -> u32 {
        if every == 0 {
            return 0;
        }
        let renews = self.steps == 0 && !self.waits
            || (self.steps + u64::from(self.phase)).is_multiple_of(every.into());
        // The step behind a renewal that comes in turn: of all of them, if all are.
        let judges = (self.steps + u64::from(self.phase)) % u64::from(every) == 1 % u64::from(every);
        self.steps += 1;
        let of = |is: bool, bit: u32| if is { bit } else { 0 };
        let followed = of(followed, mode::FOLLOWED);
        mode::LISTED | of(renews, mode::RENEWS) | of(judges, mode::JUDGES) | followed
    }
}

impl Carried {
    /// For so many lists, entries, rows of blocks and heads; empty.
    pub(super) fn new(
        device: &Device,
        [lists, entries, rows, heads]: [usize; 4],
        phase: u32,
    ) -> Result<Self> {
        Ok(Carried {
            lists: Buffer::zeroed(device, lists)?,
            entries: Buffer::zeroed(device, entries)?,
            promoted: Buffer::zeroed(device, rows)?,
            log_sums: Buffer::zeroed(device, heads)?,
            turns: Turns { steps: 0, phase, waits: false },
        })
    }

    /// An empty one of the same extents.
    pub(super) fn another(&self, device: &Device, phase: u32) -> Result<Self> {
        Carried::new(device, self.extents(), phase)
    }

    /// Renewed in turn only, in the first step as in any other: what a sequence that comes later gets does
    /// not depend on when it comes, as long as its first step is the first of [`Policy::renew`] too.
    ///
    /// [`Policy::renew`]: crate::certified::Policy::renew
    pub(in crate::certified) fn in_turn(mut self) -> Self {
        self.turns.waits = true;
        self
    }

    /// Empties what one of so many sequences has, as for one that begins.
    ///
    /// # Errors
    /// What the device reports.
    pub fn forget(&mut self, stream: &Stream, sequence: usize, sequences: usize) -> Result<()> {
        let own = |all: usize| sequence * (all / sequences)..(sequence + 1) * (all / sequences);
        let [lists, entries, promoted, log_sums] = self.extents().map(own);
        stream.fill_u8(&mut self.lists, lists, 0)?;
        stream.fill_u8(&mut self.entries, entries, 0)?;
        stream.fill_u8(&mut self.promoted, promoted, 0)?;
        Ok(stream.fill_u8(&mut self.log_sums, log_sums, 0)?)
    }

    /// Gives one of so many sequences what another has. Waits for the stream.
    ///
    /// # Errors
    /// What the device reports.
    pub fn copy(&mut self, stream: &Stream, (from, to): (usize, usize), sequences: usize) -> Result<()> {
        copy_part(stream, &mut self.lists, (from, to), sequences)?;
        copy_part(stream, &mut self.entries, (from, to), sequences)?;
        copy_part(stream, &mut self.promoted, (from, to), sequences)?;
        copy_part(stream, &mut self.log_sums, (from, to), sequences)
    }

    pub(super) fn fill(&mut self, stream: &Stream, byte: u8) -> Result<()> {
        stream.fill_u8(&mut self.lists, .., byte)?;
        stream.fill_u8(&mut self.entries, .., byte)?;
        stream.fill_u8(&mut self.promoted, .., byte)?;
        Ok(stream.fill_u8(&mut self.log_sums, .., byte)?)
    }

    pub(super) fn listed(&self, parts: usize) -> Result<Vec<Vec<(u32, u32)>>> {
        let (lists, entries) = (self.lists.to_vec()?, self.entries.to_vec()?);
        let places = entries.len() / lists.len().max(1);
        let of_list = |(list, head): (usize, &ListHead)| {
            let own = &entries[list * places..][..head.entries as usize];
            own.iter()
                .map(|entry| (entry.index, u32::from(entry.wants()[0]) | u32::from(entry.wants()[1]) << 1))
                .collect::<Vec<_>>()
        };
        let all: Vec<_> = lists.iter().enumerate().map(of_list).collect();
        Ok(all.chunks(parts).map(<[_]>::concat).collect())
    }

    fn extents(&self) -> [usize; 4] {
        [self.lists.len(), self.entries.len(), self.promoted.len(), self.log_sums.len()]
    }

    pub(super) fn same(&self, other: &Carried) -> Result<()> {
        self.promoted.device().check_same(other.promoted.device(), "the carried list")?;
        if self.extents() == other.extents() {
            return Ok(());
        }
        Err(Error::Carried { got: other.extents(), expected: self.extents() })
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        of(&self.lists) + of(&self.entries) + of(&self.promoted) + of(&self.log_sums)
    }
}

/// Copies part `from` of a buffer of so many equal parts to part `to`.
fn copy_part<T: Pod>(
    stream: &Stream,
    buffer: &mut Buffer<T>,
    (from, to): (usize, usize),
    parts: usize,
) -> Result<()> {
    let mut part = vec![T::zeroed(); buffer.len() / parts];
    stream.download(buffer, from * part.len(), &mut part)?;
    Ok(stream.upload(&part, buffer, to * part.len())?)
}
