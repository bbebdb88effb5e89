//! The stages of a step, for some groups of rows: together, each stage shared out over all threads, or one group as one task
//! from beginning to end. In both, the warps of a thread block go to threads that have nothing else to do.

use super::choose::{Choose, Chosen};
use super::finish::Finish;
use super::pass::{Note, Pass, RowGroup, View};
use super::replace::Replace;
use super::{each, with_scratch};
use crate::attention::Half;
use crate::attention::cpu::pieces::Pieces;
use crate::attention::cpu::run;
use crate::certified::{BLOCK_TOKENS, Certificate};
use crate::simd_level::Level;
use kernels_gpu::attention::{part_floats, warps};
use kernels_gpu::certified::{Thresholds, pass_share};
use std::marker::PhantomData;

/// A group of rows: what a step keeps and writes of it.
pub(super) struct Share<'a> {
    pub(super) group: RowGroup,
    /// Tokens of its sequence.
    pub(super) length: u32,
    /// Full blocks of it.
    pub(super) blocks: usize,
    /// What the pass notes of them; nothing if nobody asks.
    pub(super) notes: &'a mut [Note],
    /// Of the splits of the pass, then of the replacers.
    pub(super) partials: &'a mut [f32],
    pub(super) chosen: &'a mut Chosen,
    /// Bounds of the norms of the trailing block's keys and values.
    pub(super) norms: &'a mut [f32; 2],
    /// Rows that want the dense rung.
    pub(super) dense: &'a mut u32,
    pub(super) output: &'a mut [f32],
    pub(super) lse: &'a mut [f32],
    pub(super) certificates: &'a mut [Certificate],
}

/// Who does it.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Threads {
    All,
    This,
}

impl Threads {
    /// Does tasks that have so many tiles in all.
    fn each<T: Send>(self, tasks: Vec<T>, tiles: usize, one: impl Fn(T) + Sync + Send) {
        each(tasks, if self == Threads::All { tiles } else { 0 }, one);
    }
}

/// What the stages have in common.
#[derive(Clone, Copy)]
pub(super) struct Stages<'a> {
    pub(super) level: Level,
    pub(super) view: View<'a>,
    pub(super) thresholds: Thresholds,
    /// Thread blocks of a row that weigh.
    pub(super) weighing: u32,
    /// How the warps of a thread block are shared out.
    pub(super) pieces: Pieces,
}

impl Stages<'_> {
    /// All of them but the dense rung.
    pub(super) fn run<E: Half, const D: usize>(self, shares: &mut [Share<'_>], threads: Threads) {
        self.pass::<E, D>(shares, threads);
        if self.thresholds.certify != 0 {
            self.choose::<D>(shares, threads);
        }
        self.replace::<E, D>(shares, threads);
        for share in shares {
            self.finish::<E, D>(share);
        }
    }

    /// Splits of a share that have any block.
    fn passed(self, share: &Share<'_>) -> usize {
        pass_share(share.blocks as u32, self.view.shape.splits).1 as usize
    }

    fn pass<E: Half, const D: usize>(self, shares: &mut [Share<'_>], threads: Threads) {
        let Stages { level, view, pieces, .. } = self;
        let mut tasks = Vec::new();
        let mut all = 0;
        for share in shares {
            let (a_split, used) = pass_share(share.blocks as u32, view.shape.splits);
            let mut notes = &mut share.notes[..];
            let parts = share.partials.chunks_exact_mut(part_floats(D as u32)).take(used as usize);
            for (split, out) in parts.enumerate() {
                let first = split * a_split as usize;
                let end = (first + a_split as usize).min(share.blocks);
                let of_split = (end - first).min(notes.len());
                let own = notes.split_off_mut(..of_split).unwrap_or_default();
                tasks.push((share.group, [first, end], own, out));
            }
            all += share.blocks;
        }
        threads.each(tasks, all, |(group, blocks, notes, out)| {
            let notes = pieces.deal(notes);
            pieces.share(level, notes, [group.rows, D], out, |piece, notes, results| {
                with_scratch(|scratch| {
                    let element = PhantomData;
                    let work =
                        Pass::<E, D> { view, group, blocks, pieces, piece, notes, scratch, results, element };
                    run(level, work);
                });
                None::<()>
            });
        });
    }

    fn choose<const D: usize>(self, shares: &mut [Share<'_>], threads: Threads) {
        let Stages { level, view, thresholds, weighing, .. } = self;
        let (shape, head_dim) = (view.shape, D as u32);
        let all: usize = shares.iter().map(|share| share.blocks * share.group.rows).sum();
        let tasks = shares.iter_mut().collect();
        threads.each(tasks, all / 16, |share: &mut Share<'_>| {
            let partials = &share.partials[..self.passed(share) * part_floats(head_dim)];
            let Share { group, ref notes, ref mut chosen, .. } = *share;
            run(level, Choose { shape, thresholds, weighing, head_dim, group, notes, partials, chosen });
        });
    }

    fn replace<E: Half, const D: usize>(self, shares: &mut [Share<'_>], threads: Threads) {
        let Stages { level, view, thresholds, pieces, .. } = self;
        let mut tasks = Vec::new();
        let mut all = 0;
        for share in shares {
            let passed = self.passed(share);
            let count = share.chosen.entries.len() + usize::from(!share.length.is_multiple_of(BLOCK_TOKENS));
            let most = view.shape.replacers as usize;
            share.chosen.replacers = count.div_ceil(warps(D as u32) as usize).min(most).max(1);
            let replacers = share.chosen.replacers;
            all += count;
            // The trailing block comes last.
            let mut norms = Some(&mut *share.norms);
            let last = count.saturating_sub(1) / warps(D as u32) as usize % replacers;
            let partials = share.partials.chunks_exact_mut(part_floats(D as u32)).skip(passed);
            for (replacer, out) in partials.take(replacers).enumerate() {
                let norms = if replacer == last { norms.take() } else { None };
                let (entries, notes) = (&share.chosen.entries[..], &share.notes[..]);
                tasks.push((share.group, entries, notes, [replacer, replacers], norms, out));
            }
        }
        let norms_wanted = thresholds.certify != 0;
        threads.each(tasks, all, |(group, entries, notes, replacer, norms, out)| {
            let inputs = vec![(); pieces.count];
            let found = pieces.share(level, inputs, [group.rows, D], out, |piece, (), results| {
                with_scratch(|scratch| {
                    let element = PhantomData;
                    let work = Replace::<E, D> {
                        view,
                        group,
                        entries,
                        notes,
                        replacer,
                        pieces,
                        piece,
                        norms_wanted,
                        scratch,
                        results,
                        element,
                    };
                    run(level, work)
                })
            });
            if let (Some(norms), Some(found)) = (norms, found) {
                *norms = found;
            }
        });
    }

    fn finish<E: Half, const D: usize>(self, share: &mut Share<'_>) {
        let Stages { level, view, thresholds, .. } = self;
        let parts = self.passed(share) + share.chosen.replacers;
        *share.dense = with_scratch(|scratch| {
            let work = Finish::<E, D> {
                shape: view.shape,
                thresholds,
                group: share.group,
                rows: view.rows::<D>(share.group),
                queries: &mut scratch.queries,
                chosen: share.chosen,
                length: share.length,
                norms: *share.norms,
                partials: &share.partials[..parts * part_floats(D as u32)],
                output: share.output,
                lse: share.lse,
                certificates: share.certificates,
                element: PhantomData,
            };
            run(level, work)
        });
    }
}
