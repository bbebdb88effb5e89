//! The checks after a step that has chosen for itself, `audit`, `rank` and `settle` of the kernels, and those
//! ahead of one that makes its list anew, `canary`.

use super::choose::Chosen;
use super::list::{Lists, extents, of_parts};
use super::original::originals;
use super::pass::{Note, RowGroup, Scratch, View};
use super::query::head;
use super::stages::Share;
use super::{each, with_scratch};
use crate::attention::Half;
use crate::attention::cpu::lanes::Lanes;
use crate::attention::cpu::softmax::{MAX_ROWS, TOKENS, of_lane, of_lanes};
use crate::attention::cpu::{Work, run};
use crate::certified::{BLOCK_TOKENS, Certificate, Checked};
use crate::simd_level::Level;
use half::f16;
use kernels_gpu::attention::{Chain, PartialRow};
use kernels_gpu::certified::auditing::{beyond, drawn, norm_below};
use kernels_gpu::certified::layout::pair;
use kernels_gpu::certified::policy::{reason, rung};
use kernels_gpu::certified::query::{LOG2_E, LOG2_E_ABOVE, delta, delta_original};
use kernels_gpu::certified::ranking::{MAX_DEPTH, THREADS, key};
use kernels_gpu::certified::{Entry, Exact, Thresholds, Watch};
use simt::math::{abs, exp2, fma, max};
use std::marker::PhantomData;

/// Blocks that are compared as one task.
const TOGETHER: usize = 16;

/// What is checked, and by what blocks are drawn: the steps so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watching {
    pub(super) watch: Watch,
    pub(super) step: u32,
}

/// What is looked at of a group of rows, and what was found.
#[derive(Default)]
pub(super) struct Watched {
    /// What is compared: the entries of the lists, then the blocks that were drawn.
    looked_at: Vec<Entry>,
    /// Of these the entries.
    listed: usize,
    /// Masses of their rows by original keys, relative to the rows' references.
    masses: Vec<[f32; MAX_ROWS]>,
    /// What was found of each row, by task: bits of [`reason`].
    of_tasks: Vec<[u32; MAX_ROWS]>,
    /// What was found of each row.
    found: [u32; MAX_ROWS],
    /// What was read for it.
    pub(super) checked: Checked,
}

impl Watched {
    /// Lists what is looked at: of a list, and what is drawn by `key` of so many blocks of row `row`.
    pub(super) fn begin(
        &mut self,
        watch: Watch,
        [key, row]: [u32; 2],
        list: impl Iterator<Item = Entry>,
        blocks: usize,
    ) {
        self.looked_at.clear();
        self.looked_at.extend(list);
        self.listed = self.looked_at.len();
        if watch.draw != 0 {
            let is_drawn = |block: &u32| drawn(watch.draw, key, row, *block);
            let of_block = |index| Entry { index, rows: u32::MAX };
            self.looked_at.extend((0..blocks as u32).filter(is_drawn).map(of_block));
        }
        self.masses.clear();
        self.masses.resize(self.looked_at.len(), [0.0; MAX_ROWS]);
        self.of_tasks.clear();
        self.of_tasks.resize(self.looked_at.len().div_ceil(TOGETHER), [0; MAX_ROWS]);
        self.checked = Checked::default();
        for entry in &self.looked_at {
            let [keys, values] = entry.wants();
            self.checked.key_tiles += u64::from(keys);
            if watch.compares() {
                self.checked.quantized_tiles += 1;
                self.checked.value_tiles += u64::from(values);
            }
        }
    }

    /// How much is looked at.
    pub(super) fn tiles(&self) -> usize {
        self.looked_at.len()
    }

    /// The tasks: blocks, their masses, and where it belongs what is found of them.
    pub(super) fn tasks(
        &mut self,
    ) -> impl Iterator<Item = (&[Entry], &mut [[f32; MAX_ROWS]], &mut [u32; MAX_ROWS])> {
        let blocks = self.looked_at.chunks(TOGETHER).zip(self.masses.chunks_mut(TOGETHER));
        blocks.zip(&mut self.of_tasks).map(|((entries, masses), found)| (entries, masses, found))
    }

    /// Nothing is looked at.
    pub(super) fn skip(&mut self) {
        self.checked = Checked::default();
    }

    /// What any task has found of any row.
    fn any(&self) -> u32 {
        self.of_tasks.as_flattened().iter().fold(0, |all, found| all | found)
    }

    /// Takes together what the tasks have found, and checks the order of each row's heaviest blocks.
    pub(super) fn end(
        &mut self,
        watch: Watch,
        thresholds: Thresholds,
        rows: usize,
        chosen: &Chosen,
        notes: &[Note],
    ) {
        self.found = [0; MAX_ROWS];
        for found in &self.of_tasks {
            for (all, found) in self.found.iter_mut().zip(found) {
                *all |= found;
            }
        }
        if watch.depth != 0 {
            for r in 0..rows {
                self.found[r] |= self.rank(watch, thresholds, r, chosen, notes);
            }
        }
    }

    /// `rank` of row `r`.
    fn rank(&self, watch: Watch, thresholds: Thresholds, r: usize, chosen: &Chosen, notes: &[Note]) -> u32 {
        let of_row = &chosen.weights[r * notes.len()..][..notes.len()];
        let entries = &self.looked_at[..self.listed];
        let mut promoted = vec![false; notes.len()];
        // By quantized and by original keys.
        let mut keys = Vec::with_capacity(entries.len());
        for (entry, masses) in entries.iter().zip(&self.masses) {
            if entry.row_wants(r as u32)[0] {
                let [quantized, _] = of_row[entry.index as usize];
                keys.push([key(quantized, entry.index), key(masses[r], entry.index)]);
                promoted[entry.index as usize] = true;
            }
        }
        let mut below = [u64::MAX; 2];
        let (mut disagrees, mut least) = (false, 0f32);
        for _ in 0..watch.depth.min(MAX_DEPTH) {
            below = [0, 1].map(|kind| {
                let left = keys.iter().map(|keys| keys[kind]).filter(|key| *key < below[kind]);
                left.max().unwrap_or(0)
            });
            disagrees |= below[0] as u32 != below[1] as u32;
            least = f32::from_bits((below[1] >> 32) as u32);
        }
        // The threads of a block each have every so manieth of what is not promoted.
        let mut tails = [0f32; THREADS as usize];
        for (block, note) in notes.iter().enumerate().filter(|(block, _)| !promoted[*block]) {
            let delta =
                if thresholds.paper_bound != 0 { chosen.sums[r].delta } else { note.records[r].delta() };
            let most = of_row[block][0] * exp2(delta * LOG2_E_ABOVE);
            let tail = &mut tails[block % THREADS as usize];
            // What is not a number is more than any.
            *tail = if most <= *tail { *tail } else { most };
        }
        let tail = tails.iter().filter(|tail| **tail != 0.0).map(|tail| tail.to_bits()).max().unwrap_or(0);
        (if disagrees { reason::RANKING } else { 0 })
            | (if tail > least.to_bits() { reason::BOUNDARY } else { 0 })
    }
}

/// What the bounds of a block's scores and values are taken from.
#[derive(Clone, Copy)]
pub(super) enum Bounds<'a> {
    /// What the pass has noted of the sequence's full blocks, and the rows' references over all of them.
    Noted(&'a [Note], &'a [PartialRow]),
    /// The annotations, in the compact layout.
    Annotated,
}

/// Blocks of a group compared with their originals.
pub(super) struct Audit<'a, E, const D: usize> {
    pub(super) view: View<'a>,
    pub(super) group: RowGroup,
    pub(super) watch: Watch,
    /// Those past the sequence's full blocks are passed over.
    pub(super) entries: &'a [Entry],
    pub(super) bounds: Bounds<'a>,
    /// Where the masses by original keys belong: [entries, rows].
    pub(super) masses: &'a mut [[f32; MAX_ROWS]],
    pub(super) scratch: &'a mut Scratch,
    pub(super) element: PhantomData<E>,
}

impl<E: Half, const D: usize> Work for Audit<'_, E, D> {
    /// What was found of each row: bits of [`reason`].
    type Output = [u32; MAX_ROWS];

    #[inline(always)]
    fn run<L: Lanes>(self) -> [u32; MAX_ROWS] {
        let Audit { view, group, watch, entries, bounds, masses, scratch, .. } = self;
        scratch.queries.load::<E, L, D>(view.rows::<D>(group), view.shape.softmax_scale);
        let full = view.lengths[group.sequence] / BLOCK_TOKENS;
        let mut found = [0; MAX_ROWS];
        let mut entries = entries.iter().zip(masses).filter(|(entry, _)| entry.index < full).peekable();
        while let Some((entry, masses)) = entries.next() {
            if let Some((after, _)) = entries.peek() {
                view.prefetch::<L, D>(group, **after);
            }
            let [wants_keys, wants_values] = entry.wants();
            let index = entry.index as usize;
            let block = view.block(group.sequence, index);
            let [keys, values] = originals::<D>(&view, group, block);
            let tile = view.tile::<D>(block, group.head);
            let annotation = &view.annotations[pair(block, view.shape.kv_heads, group.head as u32)];
            if wants_keys {
                let exact = scratch.original_scores::<E, L, D>(keys);
                if watch.compares() {
                    let sigma = matches!(bounds, Bounds::Annotated);
                    let products =
                        scratch.tile.products::<L, D>(view.layout, tile, &scratch.queries, [sigma, false]);
                    for r in 0..group.rows {
                        let query = &scratch.queries.heads[r];
                        if !query.finite {
                            continue;
                        }
                        let (of_quantized, kappa) = match bounds {
                            Bounds::Noted(notes, _) => {
                                let record = &notes[index].records[r];
                                (record.delta(), record.kappa())
                            }
                            Bounds::Annotated => {
                                let x = products.sigma[MAX_ROWS + r];
                                (delta::<f16, D>(query, x, *annotation), annotation.eps + annotation.zeta)
                            }
                        };
                        let allowed = of_quantized + delta_original::<D>(query, kappa) + watch.guard;
                        let mut differs = false;
                        for (exact, quantized) in exact[r].iter().zip(&products.scores[r]) {
                            differs |= beyond(abs(exact - quantized) * query.scale, allowed);
                        }
                        if differs {
                            found[r] |= reason::KEY_CANARY;
                        }
                    }
                }
                if let (Bounds::Noted(_, pass), true) = (bounds, watch.depth != 0) {
                    for r in 0..group.rows {
                        let to_log2 = scratch.queries.heads[r].scale * LOG2_E;
                        let lanes = [0, 1, 2, 3].map(|q| {
                            let mut mass = 0f32;
                            for exact in of_lane(&exact[r], q) {
                                mass += exp2(fma(exact, to_log2, -pass[r].reference));
                            }
                            mass
                        });
                        masses[r] = of_lanes(lanes);
                    }
                }
            }
            if wants_values && watch.compares() {
                scratch.tile.restore::<L, D>(view.layout, tile);
                let [eta, nu] = match bounds {
                    // Of every row the same: the annotation's.
                    Bounds::Noted(notes, _) => {
                        let record = &notes[index].records[0];
                        [record.eta(), record.nu]
                    }
                    Bounds::Annotated => [annotation.eta, annotation.nu],
                };
                if values_differ::<E, L, D>(values, scratch.tile.restored::<D>(), eta, nu) {
                    found.iter_mut().for_each(|found| *found |= reason::VALUE_CANARY);
                }
            }
        }
        found
    }
}

/// `canary` of the kernels: what is stored, compared ahead of a step that makes its lists anew.
pub(super) fn compare_ahead<E: Half, const D: usize>(
    level: Level,
    view: View<'_>,
    watch: Watch,
    groups: &[RowGroup],
    watched: &mut [Watched],
    lists: &mut Lists<'_>,
) {
    let [parts, places, ..] = extents(view.shape, 1, 0);
    let (heads, entries) = (lists.lists.chunks_exact(parts), lists.entries.chunks_exact(places));
    let directory = lists.directory;
    let mut tasks = Vec::new();
    for (((group, watched), heads), entries) in groups.iter().zip(watched.iter_mut()).zip(heads).zip(entries)
    {
        let length = view.lengths[group.sequence];
        let blocks = length / BLOCK_TOKENS;
        // The list may be of a sequence that was longer.
        let inside = of_parts(heads, entries).flatten().filter(|entry| entry.index < blocks);
        let at_hand = inside.filter_map(|entry| {
            let block = view.block(group.sequence, entry.index as usize);
            let pair = pair(block, view.shape.kv_heads, group.head as u32) as u32;
            let entry = directory.map_or(*entry, |directory| directory.at_hand(pair, *entry));
            entry.wants().contains(&true).then_some(entry)
        });
        let drawn_by = [length, group.index(view.shape) as u32];
        watched.begin(watch, drawn_by, at_hand, blocks as usize);
        tasks.extend(watched.tasks().map(|of_blocks| (*group, of_blocks)));
    }
    let all = tasks.iter().map(|(_, (entries, ..))| entries.len()).sum();
    each(tasks, all, |(group, (entries, masses, found))| {
        with_scratch(|scratch| {
            let (bounds, element) = (Bounds::Annotated, PhantomData);
            *found =
                run(level, Audit::<E, D> { view, group, watch, entries, bounds, masses, scratch, element });
        });
    });
    let mut found = vec![0; view.lengths.len()];
    for (group, watched) in groups.iter().zip(watched) {
        found[group.sequence] |= watched.any();
    }
    for (promoted, group) in lists.promoted.iter_mut().zip(groups) {
        if found[group.sequence] != 0 {
            promoted.change(found[group.sequence]);
        }
    }
}

/// `values_differ` of the kernels: whether a value is further from its quantized form than η, or longer than
/// ν.
#[inline(always)]
fn values_differ<E: Half, L: Lanes, const D: usize>(
    values: &[u16],
    restored: &[u16],
    eta: f32,
    nu: f32,
) -> bool {
    let mut differs = false;
    for (value, restored) in values.chunks_exact(D).zip(restored.chunks_exact(D)).take(TOKENS) {
        // A lane has an eighth of the dimensions, and lanes are added up by exchanges.
        let (mut errors, mut sizes) = ([0f32; 8], [0f32; 8]);
        let (mut v, mut v_hat) = ([[0f32; 16]; 16], [[0f32; 16]; 16]);
        for chunk in 0..D / 16 {
            let of = |row: &[u16]| {
                let mut bits = [0u16; 16];
                bits.copy_from_slice(&row[16 * chunk..][..16]);
                bits
            };
            L::widen::<E>(&of(value), &mut v[chunk]);
            L::widen::<f16>(&of(restored), &mut v_hat[chunk]);
        }
        let (v, v_hat) = (&v.as_flattened()[..D], &v_hat.as_flattened()[..D]);
        for (lane, (v, v_hat)) in v.chunks_exact(D / 8).zip(v_hat.chunks_exact(D / 8)).enumerate() {
            for (v, v_hat) in v.iter().zip(v_hat) {
                let error = v - v_hat;
                errors[lane] = fma(error, error, errors[lane]);
                sizes[lane] = fma(*v, *v, sizes[lane]);
            }
        }
        let sum = |x: [f32; 8]| of_lanes([x[0], x[1], x[2], x[3]]) + of_lanes([x[4], x[5], x[6], x[7]]);
        differs |= beyond(norm_below(sum(errors)), eta) || beyond(norm_below(sum(sizes)), nu);
    }
    differs
}

/// Sends heads to the dense rung for what was found: rows of one sequence after another.
pub(super) fn settle<E: Half, const D: usize>(shares: &mut [Share<'_>], view: View<'_>, level: Level) {
    for shares in shares.chunk_by_mut(|a, b| a.group.sequence == b.group.sequence) {
        let any = shares.iter().flat_map(|share| share.watched.found).fold(0, |all, found| all | found);
        if any == 0 {
            continue;
        }
        let all = any & reason::CANARY != 0;
        for share in shares {
            let Share { group, length, norms, chosen, watched, certificates, dense, .. } = share;
            let wants = |r: &usize| all || watched.found[*r] != 0;
            for r in (0..group.rows).filter(wants) {
                **dense |= 1 << r;
            }
            let work = Settle::<E, D> {
                view,
                group: *group,
                length: *length,
                norms: **norms,
                chosen,
                found: watched.found,
                all,
                certificates,
                element: PhantomData,
            };
            run(level, work);
        }
    }
}

/// The certificates of a group's rows after what was found.
pub(super) struct Settle<'a, E, const D: usize> {
    view: View<'a>,
    group: RowGroup,
    length: u32,
    norms: [f32; 2],
    chosen: &'a Chosen,
    /// Of each row.
    found: [u32; MAX_ROWS],
    /// Whether stored data have changed: then no row of the sequence is believed.
    all: bool,
    certificates: &'a mut [Certificate],
    element: PhantomData<E>,
}

impl<E: Half, const D: usize> Work for Settle<'_, E, D> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Settle { view, group, length, norms, chosen, found, all, certificates, .. } = self;
        let scale = view.shape.softmax_scale;
        let dense = Chain::of_dense::<D>(length, view.shape.rung_splits);
        let [of_keys, of_values] = if length.is_multiple_of(BLOCK_TOKENS) { [0.0; 2] } else { norms };
        let rows = view.rows::<D>(group).chunks_exact(D).zip(certificates).enumerate();
        for (r, (query, certificate)) in rows.filter(|(r, _)| all || found[*r] != 0) {
            let (query, _) = head::<E, L, D>(query, scale);
            let sums = &chosen.sums[r];
            let exact =
                Exact::new::<E, D>(&query, scale, max(sums.nu, of_values), max(sums.kappa, of_keys), &dense);
            let to = if all { rung::LAYER } else { rung::DENSE };
            let why = certificate.reason() | found[r];
            *certificate = exact.certificate(*certificate, to | why << 16);
        }
    }
}
