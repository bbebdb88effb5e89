//! Tokens come in on the CPU's own path: `append`, `prefill`, `inspect` and `quantize_block` on slices.

use super::{BLOCK_TOKENS, CacheElement, TieredCache};
use crate::Buffer;
use crate::attention::Half;
use crate::certified::cpu::{Chances, Level, quantize};
use crate::certified::{Annotation, Scratch};
use crate::cpu::handles::{slice, slice_mut};
use kernels_gpu::certified::layout::{Job, Problems, pair};
use kernels_gpu::certified::{CacheShape, Piece, Refusals};
use rayon::prelude::*;

/// A cache's memory, and tokens that come: [tokens, kv_heads, head_dim].
struct Memory<'a, E> {
    shape: CacheShape,
    scratch: Scratch,
    new: [&'a [E]; 2],
    table: &'a [u32],
    originals: [&'a mut [E]; 2],
    near: &'a mut [E],
    directory: &'a mut [u64],
}

impl<E: CacheElement> TieredCache<E> {
    /// # Safety
    /// The device is the CPU, whose streams have done what they were told when a call returns, and the
    /// buffers are there.
    unsafe fn memory_of<'a>(&'a mut self, keys: &'a Buffer<E>, values: &'a Buffer<E>) -> Memory<'a, E> {
        // SAFETY: the caller's word; this cache's own memory is borrowed with it.
        unsafe {
            Memory {
                shape: self.shape,
                scratch: self.scratch,
                new: [slice(keys.global()), slice(values.global())],
                table: slice(self.table.global()),
                originals: [&mut self.keys, &mut self.values],
                near: slice_mut(self.near.global_mut()),
                directory: slice_mut(self.directory.global_mut()),
            }
        }
    }

    /// `append`, and the blocks that are full then.
    ///
    /// # Safety
    /// As [`memory_of`](Self::memory_of).
    pub(super) unsafe fn append_on_slices(&mut self, keys: &Buffer<E>, values: &Buffer<E>) {
        let elements = self.extents.token_elements();
        // SAFETY: the caller's word; none of these is part of what `memory_of` gives.
        let (lengths, limits, refusals, jobs) = unsafe {
            (
                slice_mut(self.lengths.global_mut()),
                slice_mut(self.limits.global_mut()),
                slice_mut(self.refusals[0].global_mut()),
                slice_mut(self.jobs.global_mut()),
            )
        };
        let mut found: Refusals = of_words(refusals);
        // SAFETY: the caller's word.
        let mut memory = unsafe { self.memory_of(keys, values) };
        for row in 0..memory.table.len() / memory.shape.max_blocks as usize {
            let (length, limit) = (lengths[row], limits[row]);
            jobs[row] = Job::NONE;
            let taken = length < limit && takes(memory.new, row * elements..(row + 1) * elements, &mut found);
            if taken {
                let block =
                    memory.table[row * memory.shape.max_blocks as usize + (length / BLOCK_TOKENS) as usize];
                let token = length % BLOCK_TOKENS;
                memory.copy(row * elements, block, row as u32, token);
                if token == BLOCK_TOKENS - 1 {
                    let index = length / BLOCK_TOKENS;
                    jobs[row] = Job::new(row as u32, block, index);
                }
                lengths[row] = length + 1;
            } else if limit != 0 {
                limits[row] = 0;
                if length >= limit {
                    found.full = found.full.min(row as u64);
                }
            }
        }
        refusals.copy_from_slice(&bytemuck::cast::<Refusals, [u64; 5]>(found));
        // SAFETY: the caller's word.
        unsafe { self.quantize_on_slices(self.extents.sequences) };
    }

    /// `prefill` of `count` tokens, and the blocks that are full then.
    ///
    /// # Safety
    /// As [`memory_of`](Self::memory_of); as many tokens are left in the input, their blocks are in the
    /// table, and from `piece.fresh` on there are as many fresh blocks as they reach.
    pub(super) unsafe fn place_on_slices(
        &mut self,
        keys: &Buffer<E>,
        values: &Buffer<E>,
        piece: Piece,
        count: u32,
    ) {
        let elements = self.extents.token_elements();
        // SAFETY: the caller's word; not part of what `memory_of` gives.
        let jobs = unsafe { slice_mut(self.jobs.global_mut()) };
        // SAFETY: the caller's word.
        let mut memory = unsafe { self.memory_of(keys, values) };
        let mut full = 0;
        for i in 0..count {
            let position = piece.position + i;
            let index = position / BLOCK_TOKENS;
            let nth = index - piece.position / BLOCK_TOKENS;
            let block = memory.table[(piece.row * memory.shape.max_blocks + index) as usize];
            let token = position % BLOCK_TOKENS;
            memory.copy((piece.first + i) as usize * elements, block, piece.fresh + nth, token);
            if token == BLOCK_TOKENS - 1 {
                jobs[nth as usize] = Job::new(piece.fresh + nth, block, index);
                full = nth + 1;
            }
        }
        // SAFETY: the caller's word.
        unsafe { self.quantize_on_slices(full) };
    }

    /// `inspect` of the first `elements`.
    ///
    /// # Safety
    /// As [`memory_of`](Self::memory_of).
    pub(super) unsafe fn inspect_on_slices(&mut self, keys: &Buffer<E>, values: &Buffer<E>, elements: usize) {
        // SAFETY: the caller's word.
        let (new, refusals) = unsafe {
            ([slice(keys.global()), slice(values.global())], slice_mut(self.refusals[1].global_mut()))
        };
        let mut found: Refusals = of_words(refusals);
        takes(new, 0..elements, &mut found);
        refusals.copy_from_slice(&bytemuck::cast::<Refusals, [u64; 5]>(found));
    }

    /// `quantize_block` of the fresh blocks that the first `jobs` jobs name.
    ///
    /// # Safety
    /// As [`memory_of`](Self::memory_of).
    unsafe fn quantize_on_slices(&mut self, jobs: u32) {
        let geometry = self.geometry();
        let (layout, heads) = (geometry.layout(), geometry.kv_heads());
        let fresh = [0, 1].map(|kind| self.fresh_elements(kind, 0));
        // SAFETY: the caller's word; a destination is one sequence's, and each is named once.
        let (jobs, near, tiles, annotations, problems) = unsafe {
            (
                &slice(self.jobs.global())[..jobs as usize],
                slice::<E>(self.near.global()),
                slice_mut(self.tiles.global_mut()),
                slice_mut(self.annotations.global_mut()),
                slice_mut(self.problems.global_mut()),
            )
        };
        let elements = layout.elements() as usize;
        let one = |(job, head): (Job, u32)| {
            let start = layout.originals(job.source, heads, head);
            let [keys, values] = fresh.map(|first| &near[first + start..][..elements]);
            let mut tile = vec![0u8; layout.bytes as usize];
            let mut problems = Problems::NONE;
            let chances = Chances::new(geometry.rounding(), job.index, head);
            let blocks = [keys, values];
            let annotation =
                quantize(Level::best(), layout, chances, blocks, start, &mut tile, &mut problems);
            (pair(job.destination, heads, head), tile, annotation, problems)
        };
        let work: Vec<(Job, u32)> = jobs
            .iter()
            .filter(|job| **job != Job::NONE)
            .flat_map(|job| (0..heads).map(|head| (*job, head)))
            .collect();
        let done: Vec<(usize, Vec<u8>, Annotation, Problems)> = match work.len() {
            0..=1 => work.into_iter().map(one).collect(),
            _ => work.into_par_iter().map(one).collect(),
        };
        let tiles: &mut [u8] = bytemuck::cast_slice_mut(tiles);
        for (pair, tile, annotation, found) in done {
            tiles[pair * layout.bytes as usize..][..tile.len()].copy_from_slice(&tile);
            annotations[pair] = annotation;
            for (problem, found) in problems.iter_mut().zip(bytemuck::cast::<Problems, [u64; 4]>(found)) {
                *problem = (*problem).min(found);
            }
        }
    }
}

impl<E: CacheElement> Memory<'_, E> {
    /// `Target::copy`: a token's rows, from element `from` of the input on, to its place in a block of the
    /// originals and in a fresh one; if the block is full then, the slots that hold what it held before are
    /// emptied.
    fn copy(&mut self, from: usize, block: u32, fresh: u32, token: u32) {
        let CacheShape { kv_heads, head_dim, .. } = self.shape;
        let (tile, dim) = ((BLOCK_TOKENS * head_dim) as usize, head_dim as usize);
        let inside = token as usize * dim;
        for head in 0..kv_heads {
            let row = from + head as usize * dim;
            for kind in 0..2 {
                let new = &self.new[kind][row..row + dim];
                let at = pair(block, kv_heads, head) * tile + inside;
                self.originals[kind][at..at + dim].copy_from_slice(new);
                let near = self.scratch.fresh_tile(kind as u32, fresh * kv_heads + head);
                let at = near as usize * tile + inside;
                self.near[at..at + dim].copy_from_slice(new);
            }
            if token == BLOCK_TOKENS - 1 {
                self.forget(pair(block, kv_heads, head) as u32);
            }
        }
    }

    /// `admit::forget`.
    fn forget(&mut self, pair: u32) {
        let Scratch { key_slots, value_slots, .. } = self.scratch;
        for (first, slots) in [(0, key_slots), (key_slots, value_slots)] {
            if slots != 0 {
                let tag = &mut self.directory[Scratch::word(first + pair % slots) + 1];
                if *tag == u64::from(pair) {
                    *tag = u64::from(Scratch::EMPTY);
                }
            }
        }
    }
}

fn of_words(words: &[u64]) -> Refusals {
    let mut refusals = Refusals::NONE;
    bytemuck::bytes_of_mut(&mut refusals).copy_from_slice(bytemuck::cast_slice(words));
    refusals
}

/// Whether a cache takes these elements of new keys and values; reports those that it does not.
fn takes<E: Half>(new: [&[E]; 2], range: std::ops::Range<usize>, found: &mut Refusals) -> bool {
    let Refusals { key_not_finite, key_range, value_not_finite, value_range, .. } = found;
    let mut all = true;
    for (new, [not_finite, beyond]) in
        new.into_iter().zip([[key_not_finite, key_range], [value_not_finite, value_range]])
    {
        for (x, index) in new[range.clone()].iter().zip(range.start as u64..) {
            let size = x.to_f32().abs();
            // NaN is none of the two.
            if size <= 65504.0 {
                continue;
            }
            all = false;
            let refused = if size <= f32::MAX { &mut *beyond } else { &mut *not_finite };
            *refused = (*refused).min(index);
        }
    }
    all
}
