//! What a step left out, for a sample of its heads: attention to the whole sequence beside that to what is
//! kept.

mod cases;

pub(super) use cases::cases;

use super::{Error, FEW_HEAD_DIMS, GatherElement, Result, Support, length};
use crate::attention::cpu::softmax::warp_sum;
use crate::attention::dense;
use crate::attention::{BLOCK_TOKENS, StepProblem};
use crate::cpu::handles::{slice, slice_mut};
use crate::kv::{self, HeadReport, Selection};
use crate::{Buffer, Device, Stream};
use kernels_gpu::attention::ROWS;
use kernels_gpu::gather::{AUDIT_THREADS, AuditShape, Audited, DRAW_THREADS, audit, draw, skipped_mass};
use simt::math::{canonical_nan, fma, sqrt};
use simt::{Global, GlobalMut, Kernel, LaunchShape};

/// The arguments of an audit: memory of any kind that the device reaches.
#[derive(Clone, Copy, Debug)]
pub struct AuditHandles<E> {
    /// [sequences, q_heads, head_dim].
    pub queries: Global<E>,
    /// The keys of all tokens, [blocks, kv_heads, 16, head_dim].
    pub keys: Global<E>,
    /// Their values, like the keys.
    pub values: Global<E>,
    /// Whether these are in the device's own memory.
    pub near: bool,
    /// [sequences, max_blocks], over these.
    pub table: Global<u32>,
    /// \[sequences\].
    pub lengths: Global<u32>,
    /// What the step returned, like the queries.
    pub output: Global<f32>,
    /// Natural log-sum-exp over what it kept, [sequences, q_heads].
    pub lse: Global<f32>,
}

/// The launches of an audit, which follow a step: they draw a share of its heads, attend to the whole
/// sequence for those, and compare. The step's output stays as it is.
///
/// One step at a time: scratch is the auditor's. Steps in one stream follow each other anyway.
#[derive(Debug)]
pub struct Auditor<E: GatherElement> {
    device: Device,
    problem: StepProblem,
    shape: AuditShape,
    audit: Kernel<audit::Args>,
    /// Heads that were drawn, [sequences, kv_heads · row groups].
    wanted: Buffer<u32>,
    rung: dense::Plan<E>,
    exact: dense::Attended,
}

impl<E: GatherElement> Auditor<E> {
    /// One that draws a share of the head-steps of a problem's plan.
    ///
    /// # Errors
    /// [`Error::AuditShare`] but for more than 0 and at most 1; those of the problem; [`Error::HeadDim`]; out
    /// of memory for the scratch.
    pub fn new(device: &Device, problem: StepProblem, support: Support, share: f64) -> Result<Self> {
        if !(share > 0.0 && share <= 1.0) {
            return Err(Error::AuditShare { share });
        }
        let (what, takes) = ("gather/audit", &FEW_HEAD_DIMS);
        let (support, problem) = (support.checked()?, super::bounds::checked(problem, what, takes)?);
        let StepProblem { sequences, kv_heads, head_dim, max_tokens, .. } = problem;
        let audit = match head_dim {
            64 => audit::kernel::<64>(),
            128 => audit::kernel::<128>(),
            _ => return Err(Error::HeadDim { what, head_dim, takes }),
        };
        let shape = AuditShape {
            rule: support.rule(),
            group: problem.dense().group(),
            kv_heads,
            sequences,
            max_blocks: max_tokens.div_ceil(BLOCK_TOKENS),
            layer: 0,
            // A cast saturates, so that the smallest share still draws one word of 2^32.
            threshold: ((share * 4_294_967_296.0).ceil() - 1.0) as u32,
        };
        let rung = dense::Plan::new(device, problem.dense())?;
        let exact = rung.allocate()?;
        let wanted = Buffer::zeroed(device, rung.wanted_words())?;
        Ok(Auditor { device: device.clone(), problem, shape, audit, wanted, rung, exact })
    }

    /// Parts that attention to everything is cut into.
    pub fn splits(&self) -> u32 {
        self.rung.splits()
    }

    /// Heads that the last step drew, [sequences, kv_heads · row groups], a bit each.
    pub fn wanted(&self) -> &Buffer<u32> {
        &self.wanted
    }

    /// Draws heads of a layer's step, holds them against everything, and writes what is found, [sequences,
    /// q_heads]. It allocates nothing, waits for nothing and can be captured.
    ///
    /// With `slices` on the CPU's own path in place of the kernels, which gives the same bits.
    ///
    /// # Safety
    /// Until the launches have finished (for a capture: until each run of the graph has):
    /// - the memory behind every handle is there, reached by the stream's device, and written by nothing
    ///   else; with `slices` it is host memory;
    /// - each length is at most the problem's `max_tokens`, and each table entry that a length reaches is a
    ///   block of the pool.
    ///
    /// # Errors
    /// [`Error::Length`] for handles of another problem; [`crate::Error::WrongDevice`]; what a launch
    /// reports.
    pub unsafe fn audit_on(
        &mut self,
        stream: &Stream,
        slices: bool,
        layer: u32,
        handles: &AuditHandles<E>,
        audits: GlobalMut<Audited>,
    ) -> Result<()> {
        stream.device().check_same(&self.device, "the auditor")?;
        let AuditHandles { queries, keys, values, near, table, lengths, output, lse } = *handles;
        let dim = self.problem.head_dim as usize;
        length("the output", output.len(), self.exact.output.len())?;
        length("the buffer of log-sums", lse.len(), self.exact.lse.len())?;
        length("the buffer of audits", audits.len(), self.exact.lse.len())?;
        length("the buffer of lengths", lengths.len(), self.shape.sequences as usize)?;
        let shape = AuditShape { layer, ..self.shape };
        if slices {
            // SAFETY: the caller's word, and the auditor's own memory; the emulator's streams have done what
            // they were told when a call returns.
            unsafe { on_slices::draw(shape, slice(lengths), slice_mut(self.wanted.global_mut())) };
        } else {
            let words = self.wanted.len() as u32;
            let launch = LaunchShape::new(words.div_ceil(DRAW_THREADS), DRAW_THREADS);
            let args = draw::Args { lengths, wanted: self.wanted.global_mut(), shape };
            // SAFETY: lengths as just checked; a word belongs to one thread; the rest is this function's
            // contract.
            unsafe { stream.launch(&draw::kernel(), launch, args) }?;
        }
        let rung = dense::Handles {
            queries,
            keys,
            values,
            table,
            lengths,
            wanted: Some(self.wanted.global()),
            near,
            output: self.exact.output.global_mut(),
            lse: self.exact.lse.global_mut(),
        };
        // SAFETY: this function's contract, and the auditor's own memory.
        unsafe { self.rung.attend_on(stream, slices, rung) }?;
        let (wanted, exact, exact_lse) =
            (self.wanted.global(), self.exact.output.global(), self.exact.lse.global());
        if slices {
            // SAFETY: as above.
            unsafe {
                let [output, exact] = [slice(output), slice(exact)];
                let [lse, exact_lse] = [slice(lse), slice(exact_lse)];
                let found = on_slices::Found { wanted: slice(wanted), output, exact, lse, exact_lse };
                on_slices::audit(shape, dim, found, slice_mut(audits));
            }
            return Ok(());
        }
        let args = audit::Args { wanted, output, exact, lse, exact_lse, audits, shape };
        let grid = (shape.kv_heads * shape.row_groups(), 1, shape.sequences);
        // SAFETY: lengths as just checked; a head's audit belongs to one warp; the rest is this function's
        // contract.
        Ok(unsafe { stream.launch(&self.audit, LaunchShape::new(grid, AUDIT_THREADS), args) }?)
    }

    /// Bytes of its scratch.
    pub(super) fn bytes(problem: StepProblem) -> u64 {
        let rows = u64::from(problem.sequences) * u64::from(problem.q_heads);
        rows.saturating_mul(4 * u64::from(problem.head_dim) + 8)
    }
}

/// The share that a selection asks for; 0: none.
pub(super) fn share(selection: &Selection) -> f64 {
    selection.number("audit", 0.0)
}

/// The auditor of a cache, and what it found last.
#[derive(Debug)]
pub(super) struct Auditing<E: GatherElement> {
    auditor: Auditor<E>,
    /// Of the last step, [layers, sequences, q_heads].
    audits: Buffer<Audited>,
}

impl<E: GatherElement> Auditing<E> {
    /// One for so many layers; none where no share is asked for.
    pub fn new(
        device: &Device,
        (layers, problem): (usize, StepProblem),
        support: Support,
        share: f64,
    ) -> Result<Option<Self>> {
        if share == 0.0 {
            return Ok(None);
        }
        let auditor = Auditor::new(device, problem, support, share)?;
        let audits = Buffer::zeroed(device, layers * problem.dense().query_rows())?;
        Ok(Some(Auditing { auditor, audits }))
    }

    /// Audits a step of a layer.
    ///
    /// # Safety
    /// As [`Auditor::audit_on`].
    pub unsafe fn audit_on(
        &mut self,
        stream: &Stream,
        slices: bool,
        layer: usize,
        handles: &AuditHandles<E>,
    ) -> Result<()> {
        let rows = self.auditor.problem.dense().query_rows();
        let audits = self.audits.global_range_mut(layer * rows..(layer + 1) * rows)?;
        // SAFETY: this function's contract, and the cache's own memory.
        unsafe { self.auditor.audit_on(stream, slices, layer as u32, handles, audits) }
    }

    /// Writes what was found of the last step's heads beside what is known of them anyway: [layers, sequences
    /// that are there, q_heads].
    pub fn complete(&self, held: kv::Held<'_>, reports: &mut [HeadReport]) -> Result<()> {
        let audits = self.audits.to_vec()?;
        let rows = audits.chunks_exact(held.geometry.q_heads).zip(held.sequences.iter().cycle());
        let there = rows.filter(|(_, tokens)| tokens.is_some()).flat_map(|(row, _)| row);
        reports.iter_mut().zip(there).for_each(|(report, audited)| report.audit = found(*audited));
        Ok(())
    }

    /// The same where all sequences are there.
    pub fn complete_all(&self, reports: &mut [HeadReport]) -> Result<()> {
        let audits = self.audits.to_vec()?;
        reports.iter_mut().zip(audits).for_each(|(report, audited)| report.audit = found(audited));
        Ok(())
    }

    /// What the last step's heads have shown, in words.
    pub fn line(&self) -> Result<String> {
        let audits = self.audits.to_vec()?.into_iter().filter_map(found).map(kv::Audited::of);
        Ok(audits.reduce(kv::Audited::and).map_or("no head was drawn".into(), kv::Audited::line))
    }
}

/// What was found of a head; nothing of one that was not drawn.
fn found(Audited { mass, error, norm, drawn }: Audited) -> Option<kv::Audit> {
    (drawn == 1).then_some(kv::Audit { mass, error, norm })
}

/// The CPU's own path.
mod on_slices {
    use super::*;

    /// What [`draw`](kernels_gpu::gather::draw()) does.
    pub fn draw(shape: AuditShape, lengths: &[u32], wanted: &mut [u32]) {
        let (heads, groups) = (shape.kv_heads, shape.row_groups());
        for (i, word) in (0..).zip(wanted) {
            let (row, row_group) = (i / groups, i % groups);
            let (sequence, head) = (row / heads, row % heads);
            *word = shape.wanted(sequence, head, row_group, lengths[sequence as usize]);
        }
    }

    /// What [`audit`] reads.
    #[derive(Clone, Copy)]
    pub struct Found<'a> {
        pub wanted: &'a [u32],
        pub output: &'a [f32],
        pub exact: &'a [f32],
        pub lse: &'a [f32],
        pub exact_lse: &'a [f32],
    }

    /// What [`audit`](kernels_gpu::gather::audit()) does.
    pub fn audit(shape: AuditShape, dim: usize, found: Found<'_>, audits: &mut [Audited]) {
        let (group, groups, rows) = (shape.group as usize, shape.row_groups() as usize, ROWS as usize);
        for (head, audited) in audits.iter_mut().enumerate() {
            let (row, in_group) = (head / group, head % group);
            let drawn = (found.wanted[row * groups + in_group / rows] >> (in_group % rows)) & 1;
            *audited = Audited { mass: 0.0, error: 0.0, norm: 0.0, drawn };
            if drawn == 0 {
                continue;
            }
            let [a, b] = [found.output, found.exact].map(|all| &all[head * dim..][..dim]);
            let sum = |of: &dyn Fn(usize) -> f32| {
                let lanes = std::array::from_fn(|lane| {
                    let channels = (0..dim / 64).flat_map(|i| [64 * i + 2 * lane, 64 * i + 2 * lane + 1]);
                    channels.fold(0.0, |sum, c| fma(of(c), of(c), sum))
                });
                canonical_nan(sqrt(warp_sum(lanes)))
            };
            audited.error = sum(&|c| a[c] - b[c]);
            audited.norm = sum(&|c| b[c]);
            audited.mass = skipped_mass(found.lse[head], found.exact_lse[head]);
        }
    }
}
