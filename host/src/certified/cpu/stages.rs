//! The stages of a step, for some groups of rows: together, each stage shared out over all threads, or one
//! group as one task from beginning to end. In both, the warps of a thread block go to threads that have
//! nothing else to do.

use super::choose::{Choose, Chosen};
use super::exact::Exact;
use super::finish::{Finish, Known};
use super::gather::{Gather, MergeWarps, Rows};
use super::list::{List, Next, Used, Visits};
use super::pass::{NEVER, Note, Pass, RowGroup, View};
use super::replace::Replace;
use super::watch::{Audit, Bounds, Watched, Watching};
use super::{each, with_scratch, with_warps};
use crate::attention::Half;
use crate::attention::cpu::pieces::Pieces;
use crate::attention::cpu::run;
use crate::attention::cpu::softmax::WarpResult;
use crate::certified::{BLOCK_TOKENS, Certificate};
use crate::simd_level::Level;
use kernels_gpu::attention::dense::DenseShape;
use kernels_gpu::attention::{part_floats, warps};
use kernels_gpu::certified::carried::Turn;
use kernels_gpu::certified::carried::sight::least_score;
use kernels_gpu::certified::policy::reason;
use kernels_gpu::certified::{StepShape, Thresholds, pass_share};
use std::marker::PhantomData;

/// A group of rows: what a step keeps and writes of it.
pub(super) struct Share<'a> {
    pub(super) group: RowGroup,
    /// Tokens of its sequence.
    pub(super) length: u32,
    /// Full blocks of it.
    pub(super) blocks: usize,
    /// Whether an earlier step has left the group to the dense rung.
    pub(super) exact: bool,
    /// For how many renewals it is from the next step on, and how many it waits for: [`Turn::after`].
    ///
    /// [`Turn::after`]: kernels_gpu::certified::carried::Turn::after
    pub(super) left: [u32; 2],
    /// Whether this step's masses choose what is promoted, in it or in those to come.
    pub(super) chooses: bool,
    /// Whether the pass that is under way is over the group's quantized blocks.
    pub(super) passes: bool,
    /// What the pass notes of the full blocks; nothing if nobody asks.
    pub(super) notes: &'a mut [Note],
    /// What is carried from step to step, if anything is.
    pub(super) list: Option<List<'a>>,
    /// What of it this step promotes.
    pub(super) used: &'a mut Used,
    /// What the splits of a carried step gather; nothing if nobody asks.
    pub(super) gathered: &'a mut [Gather],
    /// Of the splits of the pass, then of the replacers.
    pub(super) partials: &'a mut [f32],
    /// What the splits of a second pass leave.
    pub(super) again_partials: &'a mut [f32],
    pub(super) again_gathered: &'a mut [Gather],
    pub(super) chosen: &'a mut Chosen,
    /// Bounds of the norms of the trailing block's keys and values.
    pub(super) norms: &'a mut [f32; 2],
    /// Rows that want the dense rung.
    pub(super) dense: &'a mut u32,
    /// What is checked afterwards, if anything is.
    pub(super) watched: &'a mut Watched,
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
    /// Whether a step promotes what an earlier one has chosen.
    pub(super) carries: bool,
    /// Thread blocks of a row that weigh.
    pub(super) weighing: u32,
    /// How the warps of a thread block are shared out.
    pub(super) pieces: Pieces,
    /// The shape of a second pass.
    pub(super) again: StepShape,
    /// The checks after a step, if anybody asks.
    pub(super) watching: Option<Watching>,
}

impl Stages<'_> {
    /// All of them but the dense rung.
    pub(super) fn run<E: Half, const D: usize>(self, shares: &mut [Share<'_>], threads: Threads) {
        for share in shares.iter_mut() {
            share.used.exact = share.exact;
            if let Some(list) = &share.list {
                list.read(share.blocks, share.exact, share.used);
            }
        }
        self.pass::<E, D>(shares, threads, true);
        if !self.carries {
            self.choose::<D>(shares, threads, |share| share.chooses);
            self.replace::<E, D>(shares, threads);
        }
        for share in shares.iter_mut() {
            let over = self.finish::<E, D>(share);
            let Some(list) = &share.list else { continue };
            share.left = list.turn.after(over, self.thresholds.retry);
        }
        if let Some(watching) = self.watching {
            self.check::<E, D>(shares, threads, watching);
        }
        self.again::<E, D>(shares, threads);
        for share in shares.iter_mut().filter(|share| share.list.is_some()) {
            share.chooses &= share.left[0] == 0;
            share.used.next = match (share.left[0], share.chooses) {
                (0, false) => Next::Same,
                (0, true) => Next::Chosen,
                _ => Next::Nothing,
            };
        }
        if self.carries {
            self.choose::<D>(shares, threads, |share| share.chooses);
            for share in shares {
                let Some(list) = &mut share.list else { continue };
                if share.chooses {
                    list.write(share.chosen);
                }
                list.count(share.used, share.blocks, share.left);
            }
        }
    }

    /// The second pass of a step, for groups with a head over budget: by a list of the step's own masses.
    fn again<E: Half, const D: usize>(self, shares: &mut [Share<'_>], threads: Threads) {
        for share in shares.iter_mut() {
            let followed = share.list.as_ref().is_some_and(|list| list.followed);
            share.passes = followed && !share.exact && *share.dense != 0;
        }
        self.choose::<D>(shares, threads, |share| share.passes);
        for Share { list, chosen, blocks, left, used, .. } in shares.iter_mut().filter(|share| share.passes) {
            if let Some(list) = list {
                list.own(chosen, *blocks, *left, used);
            }
        }
        let second = Stages { view: View { shape: self.again, ..self.view }, ..self };
        let swap = |share: &mut Share<'_>| {
            std::mem::swap(&mut share.partials, &mut share.again_partials);
            std::mem::swap(&mut share.gathered, &mut share.again_gathered);
        };
        shares.iter_mut().for_each(swap);
        second.pass::<E, D>(shares, threads, false);
        for share in shares.iter_mut().filter(|share| share.passes) {
            let over = second.finish::<E, D>(share);
            if let Some(list) = &share.list {
                share.left = list.turn.after(over, self.thresholds.retry);
            }
        }
        shares.iter_mut().for_each(swap);
    }

    /// Splits of a share that have any block.
    fn passed(self, share: &Share<'_>) -> usize {
        pass_share(share.blocks as u32, self.view.shape.splits).1 as usize
    }

    /// The pass over those that are in it; `first`: the step's first one, which notes.
    fn pass<E: Half, const D: usize>(self, shares: &mut [Share<'_>], threads: Threads, first: bool) {
        let Stages { level, view, pieces, carries, .. } = self;
        let mut tasks = Vec::new();
        let mut all = 0;
        for share in shares.iter_mut().filter(|share| share.passes) {
            let least = if first { self.least(share) } else { NEVER };
            let Share { group, length, blocks, notes, partials, used, gathered, .. } = share;
            let (a_split, splits) = pass_share(*blocks as u32, view.shape.splits);
            let noted = if first { &mut notes[..] } else { &mut [] };
            let mut notes: Vec<Option<&mut Note>> = noted.iter_mut().map(Some).collect();
            let mut gathered = gathered.iter_mut();
            let parts = partials.chunks_exact_mut(part_floats(D as u32)).take(splits as usize);
            for (split, out) in parts.enumerate() {
                let begin = split * a_split as usize;
                let visits = Visits {
                    blocks: [begin, (begin + a_split as usize).min(*blocks)],
                    warps: pieces.warps,
                    split: [split, splits as usize],
                    full: *blocks as u32,
                    entries: &used.entries,
                    listed: &used.listed,
                    trailing: carries && !length.is_multiple_of(BLOCK_TOKENS),
                };
                let own = if notes.is_empty() { Vec::new() } else { visits.deal(pieces, &mut notes) };
                tasks.push((*group, visits, (least, &used.sighted), own, gathered.next(), out));
            }
            all += *blocks + usize::from(carries);
        }
        threads.each(tasks, all, |(group, visits, (least, sighted), notes, gathered, out)| {
            // What each warp gathers, if anybody asks.
            let pass = |of_warps: &mut [Gather]| {
                let (mut notes, mut of_warps) = (notes.into_iter(), of_warps.chunks_exact_mut(pieces.each()));
                let of_piece = |_| (notes.next().unwrap_or_default(), of_warps.next().unwrap_or_default());
                let inputs = (0..pieces.count).map(of_piece).collect();
                let one = |piece, (notes, gathered), results: &mut [WarpResult]| {
                    with_scratch(|scratch| {
                        let element = PhantomData;
                        let work = Pass::<E, D> {
                            view,
                            group,
                            visits,
                            pieces,
                            piece,
                            least,
                            sighted,
                            notes,
                            gathered,
                            scratch,
                            results,
                            element,
                        };
                        run(level, work);
                    });
                    None::<()>
                };
                pieces.share(level, inputs, [group.rows, D], out, one);
            };
            match gathered {
                None => pass(&mut []),
                Some(gathered) => with_warps(|of_warps| {
                    pass(&mut of_warps[..pieces.warps]);
                    *gathered = run(level, MergeWarps { of_warps, pieces });
                }),
            }
        });
        if first {
            shares.iter_mut().filter(|share| share.passes).for_each(|share| share.used.count_sighted());
        }
    }

    /// The scores from which on a share's blocks are promoted on sight, row by row.
    fn least(self, share: &Share<'_>) -> Rows {
        let log_sums = share.list.as_ref().map_or(&[][..], |list| list.log_sums);
        let mut least = NEVER;
        for (least, log_sum) in least.iter_mut().zip(log_sums) {
            *least = least_score(*log_sum, self.thresholds.sight);
        }
        least
    }

    /// The choice for those that `wants` names.
    fn choose<const D: usize>(
        self,
        shares: &mut [Share<'_>],
        threads: Threads,
        wants: impl Fn(&Share<'_>) -> bool,
    ) {
        let Stages { level, view, thresholds, weighing, .. } = self;
        let (shape, head_dim, carried) = (view.shape, D as u32, self.carries);
        let tasks: Vec<_> = shares.iter_mut().filter(|share| wants(share)).collect();
        let all: usize = tasks.iter().map(|share| share.blocks * share.group.rows).sum();
        threads.each(tasks, all / 16, |share: &mut Share<'_>| {
            let partials = &share.partials[..self.passed(share) * part_floats(head_dim)];
            let Share { group, ref notes, ref mut chosen, .. } = *share;
            let work =
                Choose { shape, thresholds, weighing, head_dim, carried, group, notes, partials, chosen };
            run(level, work);
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

    /// `audit` and `rank`: what is found is left with the shares.
    fn check<E: Half, const D: usize>(self, shares: &mut [Share<'_>], threads: Threads, watching: Watching) {
        let Stages { level, view, thresholds, .. } = self;
        let Watching { watch, step } = watching;
        let mut tasks = Vec::new();
        let mut all = 0;
        for share in shares.iter_mut() {
            let Share { group, blocks, notes, chosen, watched, .. } = share;
            let drawn_by = [step, group.index(view.shape) as u32];
            watched.begin(watch, drawn_by, chosen.entries.iter().copied(), *blocks);
            all += watched.tiles();
            let bounds = Bounds::Noted(notes, &chosen.pass);
            tasks.extend(watched.tasks().map(|of_blocks| (*group, bounds, of_blocks)));
        }
        threads.each(tasks, all, |(group, bounds, (entries, masses, found))| {
            with_scratch(|scratch| {
                let element = PhantomData;
                let work = Audit::<E, D> { view, group, watch, entries, bounds, masses, scratch, element };
                *found = run(level, work);
            });
        });
        let all: usize = shares.iter().map(|share| share.blocks * share.group.rows).sum();
        threads.each(shares.iter_mut().collect(), all / 16, |share: &mut Share<'_>| {
            share.watched.end(watch, thresholds, share.group.rows, share.chosen, share.notes);
        });
    }

    /// Whether one of the rows is over its budget, and nothing else is wrong with it.
    fn finish<E: Half, const D: usize>(self, share: &mut Share<'_>) -> bool {
        let Stages { level, view, thresholds, carries, .. } = self;
        if share.exact {
            let Share { group, length, .. } = *share;
            let why = share.list.as_ref().map_or(Turn::NONE, |list| list.turn).rung_and_reason();
            let certificates = &mut *share.certificates;
            run(level, Exact::<E, D> { view, group, length, why, certificates, element: PhantomData });
            *share.dense = ((1 << group.rows) - 1) | DenseShape::MANY;
            return false;
        }
        let passed = self.passed(share);
        let (known, parts) = if carries {
            let gathered = share.gathered.get(..passed).unwrap_or_default();
            (Known::Gathered(share.used, gathered), passed)
        } else {
            (Known::Chosen(share.chosen, *share.norms), passed + share.chosen.replacers)
        };
        let work = Finish::<E, D> {
            shape: view.shape,
            thresholds,
            group: share.group,
            rows: view.rows::<D>(share.group),
            known,
            length: share.length,
            partials: &share.partials[..parts * part_floats(D as u32)],
            output: share.output,
            lse: share.lse,
            certificates: share.certificates,
            log_sums: share.list.as_mut().map_or(&mut [][..], |list| list.log_sums),
            element: PhantomData,
        };
        *share.dense = run(level, work);
        share.certificates.iter().any(|certificate| certificate.reason() == reason::ERROR_BUDGET)
    }
}
