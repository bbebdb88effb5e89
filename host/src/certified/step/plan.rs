//! The launches of a step.

use super::kernels::StepKernels;
use super::residents::Residents;
use super::watching::{Watching, of, words};
use super::{Attended, Carried, Checked, OriginalsRead, StepElement, StepProblem, again_shape, step_shape};
use crate::attention::dense;
use crate::certified::{BLOCK_TOKENS, Error, Layout, Policy, Result, cpu};
use crate::{BackendKind, Buffer, Device, Stream};
use kernels_gpu::attention::dense::partial_floats;
use kernels_gpu::attention::{MAX_WARPS, threads, warps};
use kernels_gpu::certified::carried::{carried_warps, gather::Gathered, mode};
use kernels_gpu::certified::choice::BINS;
use kernels_gpu::certified::marking::THREADS as MARK_THREADS;
use kernels_gpu::certified::parts::weighing_blocks;
use kernels_gpu::certified::weighing::PARTIAL_SUMS;
use kernels_gpu::certified::{Record, StepShape, Taken, Thresholds, Weighed, mark_layout, weigh_layout};
use simt::LaunchShape;

/// The launches of a step, and everything they need but the cache.
///
/// `attend` reads every quantized block once and notes each block's mass and error bound; `weigh` chooses
/// what to promote; `mark` lists it, and settles what comes into the scratch; `replace` swaps the shares of
/// the promoted blocks and writes output and certificates; if the policy asks, what was stored and how it was
/// chosen is checked; the dense kernel computes the heads whose certificate is over budget or that failed a
/// check. Nothing waits for the host.
///
/// With [`Policy::renew`] a step promotes what an earlier one has chosen, the plan's [`Carried`] list:
/// `canary`, if the policy asks, compares what is stored, in steps that make the list anew; `carry` does in
/// one pass what `attend` and `replace` do in two. With [`Policy::again`] rows of blocks with a head over
/// budget get a list of the step's own masses and `carry` again. The dense rung follows, and every so many
/// steps `weigh` and `mark` make the next list.
pub struct StepPlan<E: StepElement> {
    pub(super) device: Device,
    pub(super) problem: StepProblem,
    pub(super) layout: Layout,
    pub(super) policy: Policy,
    pub(super) thresholds: Thresholds,
    pub(super) shape: StepShape,
    /// The CPU's own path, if the last step took it.
    pub(super) on_slices: Option<Box<cpu::Step>>,
    pub(super) kernels: StepKernels<E>,
    pub(super) attend: LaunchShape,
    pub(super) weigh: LaunchShape,
    pub(super) mark: LaunchShape,
    pub(super) replace: LaunchShape,
    pub(super) carry: LaunchShape,
    pub(super) canary: LaunchShape,
    pub(super) dense: dense::Plan<E>,
    /// Steps over resident sequences, if there may be any.
    pub(super) residents: Option<Residents<E>>,
    /// Whether the last step was over resident sequences.
    pub(super) resident: bool,
    pub(super) records: Buffer<Record>,
    /// Of the splits of the pass, then of the replacers, for each row of blocks.
    pub(super) partials: Buffer<f32>,
    pub(super) histograms: Buffer<u64>,
    pub(super) part_counts: Buffer<u32>,
    pub(super) part_sums: Buffer<f32>,
    pub(super) weighed: Buffer<Weighed>,
    /// What the certificates of carried steps add up, of each split.
    pub(super) gathered: Buffer<f32>,
    /// The second pass.
    pub(super) again: Again,
    pub(super) carried: Carried,
    /// What the step that is under way does with it: bits of [`mode`].
    pub(super) mode: u32,
    pub(super) taken: Buffer<Taken>,
    pub(super) trailing_norms: Buffer<f32>,
    pub(super) dense_rows: Buffer<u32>,
    /// Of `weigh`, and of `replace` or `carry`, which counts its progress behind its rows and behind that
    /// what it promotes on sight; 0 between launches.
    pub(super) counters: [Buffer<u32>; 2],
    /// The checks that the policy asks for.
    pub(super) watching: Option<Watching>,
}

/// What the second pass of a step has of its own; nothing where there is none.
pub(super) struct Again {
    pub(super) shape: StepShape,
    pub(super) carry: LaunchShape,
    pub(super) partials: Buffer<f32>,
    pub(super) gathered: Buffer<f32>,
}

/// Tiles that a warp has of a full sequence, from which on warps keep together: with fewer it costs more than
/// it gains (measured: 0.2 us with sixteen).
const PACED_TILES: u32 = 64;

/// Whether the warps of a pass keep together: [`Pace`](kernels_gpu::attention::Pace). All its blocks must run
/// at once, one a multiprocessor. Not where steps certify: what a list promotes makes warps unequal anyhow
/// (measured: 1.5 to 2 % lost).
fn paced(device: &Device, policy: &Policy, launches: u32, shape: StepShape, head_dim: u32) -> bool {
    let places = match device.kind() {
        BackendKind::Cuda => device.info().multiprocessors,
        BackendKind::Cpu => u32::MAX,
    };
    let places = places.min(MAX_WARPS / carried_warps(head_dim));
    let blocks = launches.saturating_mul(shape.splits);
    // As many as eight warps would have, of which that was measured.
    let tiles = shape.max_blocks / (shape.splits * warps(head_dim));
    policy.carries() && !policy.certify && blocks <= places && tiles >= PACED_TILES
}

impl<E: StepElement> StepPlan<E> {
    /// A plan for a problem over tiles in the compact layout.
    ///
    /// # Errors
    /// As [`with_layout`](Self::with_layout).
    pub fn new(device: &Device, problem: StepProblem, policy: &Policy) -> Result<Self> {
        Self::with_layout(device, problem, policy, Layout::Compact)
    }

    /// A plan for a problem over tiles in a layout. The paper's has kernels for steps that choose for
    /// themselves ([`Policy::renew`] 0).
    ///
    /// # Errors
    /// [`Error::CarriedLayout`]; [`Error::StepHeadDim`], [`Error::TooLong`], [`Error::Policy`],
    /// [`Error::Dense`] for extents that no kernel takes; out of memory.
    pub fn with_layout(
        device: &Device,
        problem: StepProblem,
        policy: &Policy,
        layout: Layout,
    ) -> Result<Self> {
        Self::with_shape(device, problem, policy, layout, step_shape(problem, policy, layout)?)
    }

    /// A plan over tiles in the compact layout that cuts a sequence into so many parts at the least.
    ///
    /// # Errors
    /// As [`with_layout`](Self::with_layout).
    pub(crate) fn with_splits(
        device: &Device,
        problem: StepProblem,
        policy: &Policy,
        splits: u32,
    ) -> Result<Self> {
        let shape = step_shape(problem, policy, Layout::Compact)?;
        let shape = StepShape { splits: shape.splits.max(splits), ..shape };
        Self::with_shape(device, problem, policy, Layout::Compact, shape)
    }

    fn with_shape(
        device: &Device,
        problem: StepProblem,
        policy: &Policy,
        layout: Layout,
        mut shape: StepShape,
    ) -> Result<Self> {
        let StepProblem { sequences, q_heads, kv_heads, head_dim, .. } = problem;
        let kernels = E::step_kernels(head_dim, layout).ok_or(Error::StepHeadDim { head_dim })?;
        let kernels = kernels.within(device.info().max_shared_bytes);
        let dense =
            dense::Plan::with_splits(device, problem.dense(), [shape.dense_splits, shape.rung_splits])?;
        let max_blocks = shape.max_blocks;
        let rows = kv_heads * shape.row_groups();
        let launches = sequences * rows;
        shape.paced = paced(device, policy, launches, shape, head_dim) as u32;
        let heads = (sequences * q_heads) as usize;
        let weighing = weighing_blocks(heads as u32, shape.parts);
        let in_rows = launches as usize;
        let (row_parts, head_parts) = (in_rows * shape.parts as usize, heads * shape.parts as usize);
        let grid = |x: u32| (x, rows, sequences);
        let attend = LaunchShape::new(grid(shape.splits), threads(head_dim)).shared(kernels.attend.1);
        let replace = LaunchShape::new(grid(shape.replacers), threads(head_dim)).shared(kernels.replace.1);
        let carry = LaunchShape::new(grid(shape.splits), 32 * carried_warps(head_dim))
            .shared(kernels.carried_bytes(policy.certify));
        let canary = LaunchShape::new(grid(shape.splits), threads(head_dim)).shared(kernels.canary.1);
        if policy.carries() {
            device.prepare(kernels.carry(policy.certify), carry)?;
            if policy.watch().is_some() {
                device.prepare(kernels.canary(), canary)?;
            }
        } else {
            device.prepare(&kernels.attend.0, attend)?;
            device.prepare(&kernels.replace.0, replace)?;
        }
        // What only a choice needs, and what only one of the two kinds of step does.
        let chooses = if policy.carries() { policy.promotes() } else { policy.certify };
        let noted = |elements: usize| if chooses { elements } else { 0 };
        let one_pass = |elements: usize| if policy.carries() && policy.certify { elements } else { 0 };
        let two_passes = |elements: usize| if policy.carries() { 0 } else { elements };
        let of_again = |elements: usize| if policy.passes_again() { elements } else { 0 };
        let second = again_shape(problem, shape);
        let again = Again {
            shape: second,
            carry: LaunchShape { grid: grid(second.splits).into(), ..carry },
            partials: Buffer::new(device, of_again(partial_floats(launches, second.splits, head_dim)))?,
            gathered: Buffer::new(device, of_again(in_rows * (second.splits * Gathered::EIGHT) as usize))?,
        };
        let places = noted(row_parts * shape.places() as usize);
        let watching = policy.watch().map(|watch| match policy.carries() {
            true => Watching::ahead(device, watch, in_rows),
            false => Watching::after(device, watch, heads, places),
        });
        let watching = watching.transpose()?;
        Ok(StepPlan {
            device: device.clone(),
            problem,
            layout,
            policy: *policy,
            thresholds: policy.thresholds(),
            on_slices: None,
            attend,
            weigh: LaunchShape::new((weighing, q_heads, sequences), BINS).shared(weigh_layout().bytes),
            mark: LaunchShape::new(grid(shape.parts), MARK_THREADS).shared(mark_layout().bytes),
            replace,
            carry,
            canary,
            kernels,
            dense,
            residents: None,
            resident: false,
            records: Buffer::new(device, noted(heads * max_blocks as usize))?,
            partials: Buffer::new(
                device,
                partial_floats(launches, shape.splits + shape.replacers, head_dim),
            )?,
            histograms: Buffer::zeroed(device, noted(heads * 2 * BINS as usize))?,
            part_counts: Buffer::new(device, noted(head_parts * BINS as usize))?,
            part_sums: Buffer::new(device, noted(heads * (weighing * PARTIAL_SUMS) as usize))?,
            weighed: Buffer::new(device, noted(heads))?,
            again,
            gathered: Buffer::new(device, one_pass(in_rows * (shape.splits * Gathered::EIGHT) as usize))?,
            carried: Carried::new(device, [noted(row_parts), places, one_pass(in_rows), one_pass(heads)], 0)?,
            mode: 0,
            taken: Buffer::new(device, two_passes(noted(head_parts)))?,
            trailing_norms: Buffer::new(device, two_passes(2 * in_rows))?,
            dense_rows: Buffer::zeroed(device, in_rows)?,
            counters: [Buffer::zeroed(device, noted(heads))?, Buffer::zeroed(device, 2 * in_rows + 1)?],
            watching,
            shape,
        })
    }

    /// What it is for.
    pub fn problem(&self) -> StepProblem {
        self.problem
    }

    /// The layout of the tiles that it reads.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Parts that a sequence is cut into.
    pub fn splits(&self) -> u32 {
        self.shape.splits
    }

    /// Bytes of device memory that the plan owns, the dense rung's not counted.
    pub fn bytes(&self) -> usize {
        of(&self.records)
            + of(&self.partials)
            + of(&self.histograms)
            + of(&self.part_counts)
            + of(&self.part_sums)
            + of(&self.weighed)
            + of(&self.gathered)
            + of(&self.again.partials)
            + of(&self.again.gathered)
            + self.carried.bytes()
            + of(&self.taken)
            + of(&self.trailing_norms)
            + of(&self.dense_rows)
            + self.counters.iter().map(of).sum::<usize>()
            + self.watching.as_ref().map_or(0, Watching::bytes)
    }

    /// What the last step read of the originals; waits for the device. `lengths` are those of its sequences.
    ///
    /// # Errors
    /// What the device reports.
    pub fn originals_read(&self, lengths: &[u32]) -> Result<OriginalsRead> {
        if let Some(step) = &self.on_slices {
            return Ok(step.originals_read());
        }
        let mut read = OriginalsRead::default();
        let rows = u64::from(self.shape.kv_heads * self.shape.row_groups());
        if self.resident {
            let rows = rows * lengths.iter().filter(|length| **length > 0).count() as u64;
            return Ok(OriginalsRead { dense_rows: rows, exact_rows: rows, ..read });
        }
        if self.policy.carries() {
            // The list has been made anew since.
            for row in self.carried.promoted.to_vec()? {
                read.key_tiles += u64::from(row.key_tiles);
                read.value_tiles += u64::from(row.value_tiles);
                read.exact_rows += u64::from(row.exact);
                read.again_rows += u64::from(row.again);
            }
        } else {
            for list in self.carried.lists.to_vec()? {
                read.key_tiles += u64::from(list.key_tiles);
                read.value_tiles += u64::from(list.value_tiles);
            }
        }
        let trailing = lengths.iter().filter(|length| !length.is_multiple_of(BLOCK_TOKENS)).count() as u64;
        read.key_tiles += trailing * rows;
        read.value_tiles += trailing * rows;
        read.dense_rows = self.dense_rows.to_vec()?.iter().filter(|rows| **rows != 0).count() as u64;
        Ok(read)
    }

    /// What the checks of the last step read; waits for the device. `lengths` are those of its sequences. Of
    /// a step by a carried list, whether it compared anything is what was last launched or captured: a
    /// graph's replays are not counted.
    ///
    /// # Errors
    /// What the device reports.
    pub fn checked(&self, lengths: &[u32]) -> Result<Checked> {
        if let Some(step) = &self.on_slices {
            return Ok(step.checked());
        }
        let Some(watching) = &self.watching else { return Ok(Checked::default()) };
        if self.policy.carries() {
            let compared = self.mode & mode::RENEWS != 0;
            return if compared { watching.compared(lengths, self.shape) } else { Ok(Checked::default()) };
        }
        watching.checked(&self.carried.lists.to_vec()?, lengths, self.shape)
    }

    /// Whether a choice is launched.
    pub(super) fn chooses(&self) -> bool {
        if self.policy.carries() { self.policy.promotes() } else { self.policy.certify }
    }

    /// Whether the step that is under way leaves a carried list as it is.
    pub(super) fn stays(&self) -> bool {
        self.policy.carries() && self.mode & mode::RENEWS == 0
    }

    /// An empty list, as the plan has one at first: for plans that serve several caches in turn, layers of a
    /// model say, each of which has a list of its own. `phase`: how many steps early it is renewed, so that
    /// lists of several phases are renewed in turn.
    ///
    /// # Errors
    /// Out of memory.
    pub fn carried(&self, phase: u32) -> Result<Carried> {
        self.carried.another(&self.device, phase)
    }

    /// Takes another list for the steps that follow, and leaves the one there was in its place: of this
    /// plan's [`carried`](Self::carried), or of a plan for the same problem and policy. A graph keeps the
    /// list that was there when its steps were captured. [`originals_read`](Self::originals_read) and
    /// [`listed`](Self::listed) are about the list that is there now.
    ///
    /// # Errors
    /// [`Error::Carried`] for a list of other extents; [`crate::Error::WrongDevice`].
    pub fn swap_carried(&mut self, carried: &mut Carried) -> Result<()> {
        self.carried.same(carried)?;
        std::mem::swap(&mut self.carried, carried);
        Ok(())
    }

    /// What is listed for the next step, of each row of blocks, by block and with a bit for keys and one for
    /// values; waits for the device.
    ///
    /// # Errors
    /// What the device reports.
    pub fn listed(&self) -> Result<Vec<Vec<(u32, u32)>>> {
        self.carried.listed(self.shape.parts as usize)
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

    /// Fills what the kernels hand to each other with a byte, so that what none of them writes is the same
    /// everywhere.
    pub(in crate::certified) fn fill(&mut self, stream: &Stream, byte: u8) -> Result<()> {
        stream.fill_u8(&mut self.records, .., byte)?;
        stream.fill_u8(&mut self.partials, .., byte)?;
        stream.fill_u8(&mut self.part_counts, .., byte)?;
        stream.fill_u8(&mut self.part_sums, .., byte)?;
        stream.fill_u8(&mut self.weighed, .., byte)?;
        stream.fill_u8(&mut self.gathered, .., byte)?;
        stream.fill_u8(&mut self.again.partials, .., byte)?;
        stream.fill_u8(&mut self.again.gathered, .., byte)?;
        if !self.policy.carries() {
            self.carried.fill(stream, byte)?;
        }
        stream.fill_u8(&mut self.taken, .., byte)?;
        stream.fill_u8(&mut self.trailing_norms, .., byte)?;
        if let Some(watching) = &mut self.watching {
            watching.fill(stream, byte)?;
        }
        Ok(stream.fill_u8(&mut self.dense_rows, .., byte)?)
    }

    /// Whether the warps of a pass keep together.
    #[cfg(test)]
    pub(in crate::certified) fn is_paced(&self) -> bool {
        self.shape.paced != 0
    }

    /// What the kernels hand to each other, word by word.
    pub(in crate::certified) fn between(&self) -> Result<Vec<(&'static str, Vec<u32>)>> {
        let mut between = vec![
            ("records", words(&self.records)?),
            ("partials", words(&self.partials)?),
            ("histograms", words(&self.histograms)?),
            ("part counts", words(&self.part_counts)?),
            ("part sums", words(&self.part_sums)?),
            ("weighed", words(&self.weighed)?),
            ("gathered", words(&self.gathered)?),
            ("partials again", words(&self.again.partials)?),
            ("gathered again", words(&self.again.gathered)?),
            ("lists", words(&self.carried.lists)?),
            ("entries", words(&self.carried.entries)?),
            ("promoted", words(&self.carried.promoted)?),
            ("log-sums", words(&self.carried.log_sums)?),
            ("taken", words(&self.taken)?),
            ("trailing norms", words(&self.trailing_norms)?),
            ("dense rows", words(&self.dense_rows)?),
            ("counters", self.counters.iter().map(words).collect::<Result<Vec<_>>>()?.concat()),
        ];
        if let Some(watching) = &self.watching {
            between.extend(watching.between()?);
        }
        Ok(between)
    }
}
