//! What a step brings into a scratch, though it needs none here: claims, tags, tiles and traffic are those of
//! the kernels, so that either may go on where the other has stopped.

use super::list::{Next, Used};
use super::{BLOCK_TOKENS, Slices, Step};
use crate::attention::Half;
use crate::attention::dense;
use crate::certified::{Result, Scratch};
use kernels_gpu::certified::Entry;
use kernels_gpu::certified::admit::{LAST, STEP, TOTAL, order, stamp};
use kernels_gpu::certified::layout::pair;

/// A scratch on the host: [`kernels_gpu::certified::admit`] says how it lies.
#[derive(Debug)]
pub struct NearSlices<'a, E> {
    /// Tiles of [16, head_dim].
    pub tiles: &'a mut [E],
    /// What the slots hold.
    pub directory: &'a mut [u64],
    /// How much there is.
    pub scratch: Scratch,
}

/// What a scratch has.
#[derive(Clone, Copy, Debug)]
pub struct Directory<'a> {
    /// What the slots hold.
    pub words: &'a [u64],
    /// How much there is.
    pub scratch: Scratch,
}

impl Directory<'_> {
    /// What of a listed block's keys and values is compared: what the scratch has of the pair, and where it
    /// has no slots for them, all.
    pub(super) fn at_hand(&self, pair: u32, entry: Entry) -> Entry {
        let mut rows = entry.rows;
        for (kind, bits) in [(0, 0xff), (1, 0xff00)] {
            let slot = slot_of(pair, self.scratch, kind);
            if slot.is_some_and(|slot| self.words[Scratch::word(slot) + 1] != u64::from(pair)) {
                rows &= !bits;
            }
        }
        Entry { rows, ..entry }
    }
}

/// The slot that a pair's keys (`kind` 0) or values (1) may have.
fn slot_of(pair: u32, scratch: Scratch, kind: usize) -> Option<u32> {
    let slot = scratch.slot_of(kind as u32, pair);
    (slot != Scratch::EMPTY).then_some(slot)
}

impl Step {
    /// Does to a scratch what the last [`run`](Self::run) over `slices` would have done to it on the kernels.
    /// Nothing, where there is none or the policy promotes nothing.
    ///
    /// # Errors
    /// [`Error::Dense`](crate::certified::Error::Dense) for a scratch that is shorter than it says; it is as
    /// it was then.
    pub fn admit<E: Half>(&self, slices: Slices<'_, E>, near: NearSlices<'_, E>) -> Result<()> {
        let NearSlices { tiles, directory, scratch } = near;
        let chooses = if self.carries { self.every != 0 } else { self.thresholds.certify != 0 };
        if !chooses || !scratch.claims() {
            return Ok(());
        }
        let elements = (BLOCK_TOKENS * self.problem.head_dim) as usize;
        for (what, got, expected) in [
            ("the directory", directory.len() as u64, scratch.words()),
            ("the slice of near tiles", tiles.len() as u64, scratch.tiles() * elements as u64),
        ] {
            if got < expected {
                let (got, expected) = (got as usize, expected as usize);
                return Err(dense::Error::Length { what, got, expected }.into());
            }
        }
        let mut near = NearSlices { tiles, directory, scratch };
        let mut step = near.directory[STEP];
        let mut counts = [0u64; 4];
        if self.carries {
            // What this step has promoted, by the claims that the step before it has made for it; then claims
            // for the next one.
            let first = self.used.iter().map(|used| match &used.earlier {
                Some(earlier) => &earlier.entries[..],
                None => used.listed(),
            });
            self.count_sighted(slices, &near, step.wrapping_sub(1), &mut counts);
            self.bring(slices, &mut near, step.wrapping_sub(1), first);
            if self.again {
                // The second pass has a round of its own.
                let again =
                    || self.used.iter().map(|used| if used.earlier.is_some() { used.listed() } else { &[] });
                self.claim(slices, &mut near, step, again(), |used| used.earlier.is_some(), &mut counts);
                self.bring(slices, &mut near, step, again());
                step += 1;
            }
            let next = self.used.iter().zip(&self.chosen);
            let next = next.map(|(used, chosen)| match used.next {
                Next::Same => used.listed(),
                Next::Chosen => &chosen.entries[..],
                Next::Nothing => &[],
            });
            self.claim(slices, &mut near, step, next, |_| true, &mut counts);
            let newer: usize = self.used.iter().map(|used| used.newer).sum();
            counts[1] += newer as u64;
            counts[3] += newer as u64;
        } else {
            let chosen = self.chosen.iter().map(|chosen| &chosen.entries[..]);
            self.claim(slices, &mut near, step, chosen.clone(), |_| true, &mut counts);
            self.bring(slices, &mut near, step, chosen);
        }
        for (i, count) in counts.into_iter().enumerate() {
            near.directory[LAST + i] = count;
            near.directory[TOTAL + i] += count;
        }
        near.directory[STEP] = step + 1;
        Ok(())
    }

    /// What the groups' lists have: [`Place`]s of the blocks that are not past their sequences' full ones.
    fn places<'a, E: Half>(
        &'a self,
        slices: Slices<'a, E>,
        lists: impl Iterator<Item = &'a [Entry]>,
    ) -> impl Iterator<Item = Place> {
        let max_blocks = self.shape.max_blocks;
        self.groups.iter().zip(lists).enumerate().flat_map(move |(launch_row, (group, entries))| {
            let full = slices.lengths[group.sequence] / BLOCK_TOKENS;
            let row = &slices.table[group.sequence * max_blocks as usize..][..max_blocks as usize];
            entries.iter().filter(move |entry| entry.index < full).map(move |entry| Place {
                pair: pair(row[entry.index as usize], self.shape.kv_heads, group.head as u32) as u32,
                wants: entry.wants(),
                claim: u64::from(order(launch_row as u32, max_blocks, entry.index)) + 1,
            })
        })
    }

    /// Claims slots for a step's lists, and counts what will be found there and what not; the trailing blocks
    /// of those groups that `counts_trailing` names, too.
    fn claim<'a, E: Half>(
        &'a self,
        slices: Slices<'a, E>,
        near: &mut NearSlices<'_, E>,
        step: u64,
        lists: impl Iterator<Item = &'a [Entry]>,
        counts_trailing: impl Fn(&Used) -> bool,
        counts: &mut [u64; 4],
    ) {
        let NearSlices { directory, scratch, .. } = near;
        for (group, used) in self.groups.iter().zip(&self.used) {
            if !counts_trailing(used) {
                continue;
            }
            if !slices.lengths[group.sequence].is_multiple_of(BLOCK_TOKENS) && scratch.fresh == 0 {
                counts[1] += 1;
                counts[3] += 1;
            }
        }
        for place in self.places(slices, lists) {
            for kind in (0..2).filter(|kind| place.wants[*kind]) {
                let mut hit = false;
                if let Some(slot) = slot_of(place.pair, *scratch, kind) {
                    let word = Scratch::word(slot);
                    hit = directory[word + 1] == u64::from(place.pair);
                    if scratch.admits != 0 {
                        let claim = if hit { 0 } else { place.claim };
                        directory[word] = directory[word].min(stamp(step) | claim);
                    }
                }
                counts[2 * kind + usize::from(!hit)] += 1;
            }
        }
    }

    /// Counts blocks that were promoted on sight: in their slots, where nothing comes into them by the claims
    /// of a step, or not.
    fn count_sighted<E: Half>(
        &self,
        slices: Slices<'_, E>,
        near: &NearSlices<'_, E>,
        step: u64,
        counts: &mut [u64; 4],
    ) {
        let NearSlices { directory, scratch, .. } = near;
        let sighted: Vec<_> = self.used.iter().map(Used::sighted).collect();
        for place in self.places(slices, sighted.iter().map(|entries| &entries[..])) {
            for kind in 0..2 {
                let hit = slot_of(place.pair, *scratch, kind).is_some_and(|slot| {
                    let [claim, tag] = [0, 1].map(|i| directory[Scratch::word(slot) + i]);
                    let comes = claim >> 32 == stamp(step) >> 32 && claim != stamp(step);
                    tag == u64::from(place.pair) && (scratch.admits == 0 || !comes)
                });
                counts[2 * kind + usize::from(!hit)] += 1;
            }
        }
    }

    /// Writes those blocks of lists to their slots that have won them by the claims of a step.
    fn bring<'a, E: Half>(
        &'a self,
        slices: Slices<'a, E>,
        near: &mut NearSlices<'_, E>,
        step: u64,
        lists: impl Iterator<Item = &'a [Entry]>,
    ) {
        let NearSlices { tiles, directory, scratch } = near;
        if scratch.admits == 0 {
            return;
        }
        let elements = (BLOCK_TOKENS * self.problem.head_dim) as usize;
        for place in self.places(slices, lists) {
            for kind in (0..2).filter(|kind| place.wants[*kind]) {
                let Some(slot) = slot_of(place.pair, *scratch, kind) else { continue };
                let word = Scratch::word(slot);
                if directory[word] == stamp(step) | place.claim {
                    let originals = if kind == 0 { slices.keys } else { slices.values };
                    let from = place.pair as usize * elements;
                    tiles[slot as usize * elements..][..elements]
                        .copy_from_slice(&originals[from..from + elements]);
                    directory[word + 1] = u64::from(place.pair);
                }
            }
        }
    }
}

/// A listed block.
struct Place {
    pair: u32,
    /// Whether its keys and its values are wanted.
    wants: [bool; 2],
    /// The claim of a block that is not near, but for the step.
    claim: u64,
}
