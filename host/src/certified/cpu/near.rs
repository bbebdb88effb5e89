//! What a step brings into a scratch, though it needs none here: claims, tags, tiles and traffic are those of the kernels, so
//! that either may go on where the other has stopped.

use super::{BLOCK_TOKENS, Slices, Step};
use crate::attention::Half;
use crate::certified::{Result, Scratch};
use crate::dense;
use kernels_gpu::certified::admit::{LAST, STEP, TOTAL, order, stamp};
use kernels_gpu::certified::layout::{TileLayout, pair};

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

/// A slot that a listed block may take.
struct Claim {
    slot: u32,
    pair: u32,
    /// 0 or 1: keys or values.
    kind: usize,
    /// The claim of a block that is not there.
    own: u64,
}

impl Step {
    /// Does to a scratch what the last [`run`](Self::run) over `slices` would have done to it on the kernels. Nothing, where
    /// there is none or the policy wants no certificate.
    ///
    /// # Errors
    /// [`Error::Dense`](crate::certified::Error::Dense) for a scratch that is shorter than it says; it is as it was then.
    pub fn admit<E: Half>(&self, slices: Slices<'_, E>, near: NearSlices<'_, E>) -> Result<()> {
        let NearSlices { tiles, directory, scratch } = near;
        if self.thresholds.certify == 0 || !scratch.claims() {
            return Ok(());
        }
        let elements = TileLayout::new(self.problem.head_dim).elements() as usize;
        for (what, got, expected) in [
            ("the directory", directory.len() as u64, scratch.words()),
            ("the slice of near tiles", tiles.len() as u64, scratch.tiles() * elements as u64),
        ] {
            if got < expected {
                let (got, expected) = (got as usize, expected as usize);
                return Err(dense::Error::Length { what, got, expected }.into());
            }
        }
        let stamp = stamp(directory[STEP]);
        let slots = [scratch.key_slots, scratch.value_slots];
        let mut counts = [0u64; 4];
        let mut claims = Vec::new();
        for (launch_row, (group, chosen)) in self.groups.iter().zip(&self.chosen).enumerate() {
            if !slices.lengths[group.sequence].is_multiple_of(BLOCK_TOKENS) && scratch.fresh == 0 {
                counts[1] += 1;
                counts[3] += 1;
            }
            for entry in &chosen.entries {
                let at = group.sequence * self.shape.max_blocks as usize + entry.index as usize;
                let pair = pair(slices.table[at], self.shape.kv_heads, group.head as u32) as u32;
                let own = u64::from(order(launch_row as u32, self.shape.max_blocks, entry.index)) + 1;
                for kind in (0..2).filter(|kind| entry.wants()[*kind]) {
                    let mut hit = false;
                    if slots[kind] != 0 {
                        let slot = kind as u32 * scratch.key_slots + pair % slots[kind];
                        let word = Scratch::word(slot);
                        hit = directory[word + 1] == u64::from(pair);
                        if scratch.admits != 0 {
                            let own = stamp | own;
                            directory[word] = directory[word].min(if hit { stamp } else { own });
                            claims.push(Claim { slot, pair, kind, own });
                        }
                    }
                    counts[2 * kind + usize::from(!hit)] += 1;
                }
            }
        }
        for Claim { slot, pair, kind, own } in claims {
            let word = Scratch::word(slot);
            if directory[word] == own {
                let originals = if kind == 0 { slices.keys } else { slices.values };
                let from = pair as usize * elements;
                tiles[slot as usize * elements..][..elements]
                    .copy_from_slice(&originals[from..from + elements]);
                directory[word + 1] = u64::from(pair);
            }
        }
        for (i, count) in counts.into_iter().enumerate() {
            directory[LAST + i] = count;
            directory[TOTAL + i] += count;
        }
        directory[STEP] += 1;
        Ok(())
    }
}
