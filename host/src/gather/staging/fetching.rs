//! From a choice to the staging pool: the launches, and the same on slices.

use super::{HostPool, Staging, cpu, shape, words, words_mut};
use crate::attention::{BLOCK_TOKENS, StepProblem};
use crate::cpu::handles::{slice, slice_mut};
use crate::gather::{Chosen, GatherElement, Handles, Plan, Result, Support, length};
use crate::{Buffer, Device, Stream};
use kernels_gpu::gather::{
    CarryShape, FETCH_THREADS, PLACE_THREADS, StagingShape, carry, fetch, fetch_parts, place, place_bytes,
};
use simt::{Global, GlobalMut, LaunchShape};

/// What brings the blocks that a step has chosen to a staging pool: [`place_on`](Self::place_on), then
/// [`fetch_on`](Self::fetch_on). One for all layers; one step at a time.
#[derive(Debug)]
pub struct Fetching {
    device: Device,
    shape: StagingShape,
    sequences: u32,
    /// The far slot of each far block of the lists, [sequences, kv_heads, most].
    at: Buffer<u32>,
    /// Places in the lists of the blocks that are to be fetched.
    missed: Buffer<u32>,
    misses: Buffer<u32>,
    /// [`Chosen::entries`] over the staging pool.
    staged: Buffer<u32>,
}

/// Where a layer's keys and values are at home.
#[derive(Clone, Copy, Debug)]
pub struct Home {
    /// The host's pool as words: keys and values.
    pool: [GlobalMut<u32>; 2],
    /// Its blocks, [sequences, max_blocks].
    table: Global<u32>,
    /// \[sequences\].
    lengths: Global<u32>,
}

impl Home {
    /// That of sequences whose blocks of `pool` a table names.
    pub fn new<E: GatherElement>(pool: &mut HostPool<E>, table: Global<u32>, lengths: Global<u32>) -> Self {
        Home { pool: pool.words_mut(), table, lengths }
    }
}

/// What a step over a staging pool is made of.
#[derive(Debug)]
pub struct StagedStep<'a, E: GatherElement> {
    /// What chooses and attends.
    pub plan: &'a mut Plan<E>,
    /// Where what is chosen is brought to.
    pub staging: &'a mut Staging<E>,
    /// Where all tokens are.
    pub home: &'a mut HostPool<E>,
    /// The step's arguments: keys and values are the staging pool's, the table is the home's.
    pub handles: &'a Handles<E>,
}

/// Tokens of a sequence, and where they go from and to: pools as words, and its blocks in each.
pub(super) struct Carried {
    pub from: [Global<u32>; 2],
    pub from_table: Global<u32>,
    pub to: [GlobalMut<u32>; 2],
    pub to_table: Global<u32>,
    pub tokens: std::ops::Range<usize>,
}

impl Fetching {
    /// The stages of a step, in order. What is chosen is fetched before another step: else that would take
    /// for staged what is not there.
    pub const STAGES: &[&str] = &["select", "fetch", "attend"];

    /// For the steps of a problem; `slots` as [`Staging::new`] has them.
    ///
    /// # Errors
    /// As [`Staging::new`].
    pub fn new(device: &Device, problem: StepProblem, support: Support, slots: u32) -> Result<Self> {
        let shape = shape(problem, support.checked()?, slots)?;
        let rows = problem.sequences as usize * problem.kv_heads as usize;
        let listed = rows * shape.most as usize;
        Ok(Fetching {
            device: device.clone(),
            shape,
            sequences: problem.sequences,
            at: Buffer::new(device, listed)?,
            missed: Buffer::new(device, listed)?,
            misses: Buffer::new(device, rows)?,
            staged: Buffer::new(device, listed * shape.rule.entries() as usize)?,
        })
    }

    /// Where the last step's blocks are in the staging pool: like [`Chosen::entries`], for
    /// [`Plan::attend_over`](crate::gather::Plan::attend_over).
    pub fn table(&self) -> &Buffer<u32> {
        &self.staged
    }

    /// Sequences times KV heads.
    #[cfg(test)]
    pub(super) fn rows(&self) -> usize {
        self.misses.len()
    }

    /// What is told from launch to launch: far slots, missed places, how many.
    pub(super) fn scratch_mut(&mut self) -> [&mut Buffer<u32>; 4] {
        [&mut self.at, &mut self.missed, &mut self.misses, &mut self.staged]
    }

    /// Chooses, brings what is missing, and attends. It allocates nothing, waits for nothing and can be
    /// captured.
    ///
    /// With `slices` on the CPU's own path in place of the kernels, which gives the same bits.
    ///
    /// # Safety
    /// As [`Plan::select_on`], and as [`fetch_on`](Self::fetch_on) of the step's home; and nothing else
    /// touches what is written.
    ///
    /// # Errors
    /// As [`place_on`](Self::place_on).
    pub unsafe fn step_on<E: GatherElement>(
        &mut self,
        stream: &Stream,
        slices: bool,
        step: StagedStep<'_, E>,
    ) -> Result<()> {
        // SAFETY: this function's contract.
        unsafe { self.stages_on(stream, slices, step, Self::STAGES.len()) }
    }

    /// The first `stages` of the step's [`STAGES`](Self::STAGES).
    ///
    /// # Safety
    /// As [`step_on`](Self::step_on).
    ///
    /// # Errors
    /// As [`place_on`](Self::place_on).
    pub unsafe fn stages_on<E: GatherElement>(
        &mut self,
        stream: &Stream,
        slices: bool,
        step: StagedStep<'_, E>,
        stages: usize,
    ) -> Result<()> {
        let StagedStep { plan, staging, home, handles } = step;
        let home = Home::new(home, handles.table, handles.lengths);
        // SAFETY: this function's contract; each stage follows what it wants.
        unsafe {
            plan.select_on(stream, slices, handles)?;
            if stages > 1 {
                self.place_on(stream, slices, staging, plan.chosen(), handles.lengths)?;
                self.fetch_on(stream, slices, staging, plan.chosen(), home)?;
            }
            if stages > 2 {
                plan.attend_over(stream, slices, handles, self.staged.global())?;
            }
        }
        Ok(())
    }

    /// Finds or makes a slot for each block that was chosen. It allocates nothing, waits for nothing and can
    /// be captured.
    ///
    /// With `slices` on the CPU's own path in place of the kernel, which gives the same.
    ///
    /// # Safety
    /// Until the launch has finished (for a capture: until each run of the graph has): `chosen` is what
    /// [`Plan::select_on`](crate::gather::Plan::select_on) chose last for the same problem and `lengths`,
    /// which are reached by the stream's device and written by nothing else; with `slices` it is host memory.
    ///
    /// # Errors
    /// [`crate::gather::Error::Length`] for what is another problem's; [`crate::Error::WrongDevice`]; what
    /// the launch reports.
    pub unsafe fn place_on<E: GatherElement>(
        &mut self,
        stream: &Stream,
        slices: bool,
        staging: &mut Staging<E>,
        chosen: &Chosen,
        lengths: Global<u32>,
    ) -> Result<()> {
        self.check(stream, staging, lengths)?;
        length("the list", chosen.list.len(), self.at.len())?;
        length("the entries", chosen.entries.len(), self.staged.len())?;
        let (list, entries) = (chosen.list.global(), chosen.entries.global());
        if slices {
            // SAFETY: the caller's word, and buffers that are borrowed; the emulator's streams have done what
            // they were told when a call returns.
            unsafe {
                cpu::place(
                    self.shape,
                    cpu::Listed { list: slice(list), entries: slice(entries), lengths: slice(lengths) },
                    cpu::Placed {
                        directory: slice_mut(staging.directory.global_mut()),
                        at: slice_mut(self.at.global_mut()),
                        missed: slice_mut(self.missed.global_mut()),
                        misses: slice_mut(self.misses.global_mut()),
                        staged: slice_mut(self.staged.global_mut()),
                        tally: slice_mut(staging.tally.global_mut()),
                    },
                );
            }
            return Ok(());
        }
        let launch = LaunchShape::new((self.shape.kv_heads, self.sequences), PLACE_THREADS);
        let args = place::Args {
            list,
            entries,
            lengths,
            directory: staging.directory.global_mut(),
            at: self.at.global_mut(),
            missed: self.missed.global_mut(),
            misses: self.misses.global_mut(),
            staged: self.staged.global_mut(),
            tally: staging.tally.global_mut(),
            shape: self.shape,
        };
        // SAFETY: buffers made for this shape, in which each row has a thread block; a list has no more far
        // blocks than there are slots, and the directory is what earlier launches left. The rest is this
        // function's contract.
        Ok(unsafe { stream.launch(&place::kernel(), launch.shared(place_bytes()), args) }?)
    }

    /// Brings what [`place_on`](Self::place_on) found missing, and takes each sequence's last token home. It
    /// allocates nothing, waits for nothing and can be captured.
    ///
    /// With `slices` on the CPU's own path in place of the kernel, which does the same.
    ///
    /// # Safety
    /// As [`place_on`](Self::place_on), which came before with the same staging pool; and: the host's pool is
    /// there and touched by nothing else, each table entry that a length reaches is a block of it, and it
    /// holds all tokens but those that are near.
    ///
    /// # Errors
    /// As [`place_on`](Self::place_on).
    pub unsafe fn fetch_on<E: GatherElement>(
        &mut self,
        stream: &Stream,
        slices: bool,
        staging: &mut Staging<E>,
        chosen: &Chosen,
        home: Home,
    ) -> Result<()> {
        let Home { pool: [host_keys, host_values], table, lengths } = home;
        self.check(stream, staging, lengths)?;
        let StagingShape { kv_heads, head_dim, max_blocks, most, rule, .. } = self.shape;
        length("the block table", table.len(), (self.sequences * max_blocks) as usize)?;
        let block = (BLOCK_TOKENS * kv_heads * head_dim / 2) as usize;
        length("the host's keys", host_keys.len(), host_keys.len() / block * block)?;
        length("the host's values", host_values.len(), host_keys.len())?;
        let (keys, values) = staging.pool.both_mut();
        let (keys, values) = (words_mut(keys.global_mut()), words_mut(values.global_mut()));
        let entries = chosen.entries.global();
        if slices {
            // SAFETY: as in `place_on`.
            unsafe {
                cpu::fetch(
                    self.shape,
                    cpu::Missing {
                        entries: slice(entries),
                        at: slice(self.at.global()),
                        missed: slice(self.missed.global()),
                        misses: slice(self.misses.global()),
                        table: slice(table),
                        lengths: slice(lengths),
                    },
                    [slice_mut(host_keys), slice_mut(host_values)],
                    [slice_mut(keys), slice_mut(values)],
                );
            }
            return Ok(());
        }
        let parts = fetch_parts(self.sequences * kv_heads, most, rule.entries());
        let launch = LaunchShape::new((parts + 1, kv_heads, self.sequences), FETCH_THREADS);
        let args = fetch::Args {
            entries,
            at: self.at.global(),
            missed: self.missed.global(),
            misses: self.misses.global(),
            table,
            lengths,
            host_keys,
            host_values,
            keys,
            values,
            shape: self.shape,
        };
        // SAFETY: slots are those of the pool, a slot is written for one block, and no near block is fetched,
        // so what is read is written by nobody; the rest is this function's contract.
        Ok(unsafe { stream.launch(&fetch::kernel(), launch, args) }?)
    }

    /// Copies tokens of a sequence from one pool to another.
    ///
    /// # Safety
    /// Until the launch has finished: both pools are of this problem's heads, there, reached by the stream's
    /// device, apart from each other and written by nothing else, and each table's entries up to the last
    /// token are blocks of its pool; with `slices` all is host memory.
    pub(super) unsafe fn carry_on(&self, stream: &Stream, slices: bool, carried: Carried) -> Result<()> {
        stream.device().check_same(&self.device, "the staging pool")?;
        let Carried { from, from_table, to, to_table, tokens } = carried;
        if tokens.is_empty() {
            return Ok(());
        }
        let (begin, end) = (tokens.start as u32, tokens.end as u32);
        let StagingShape { kv_heads, head_dim, .. } = self.shape;
        let shape = CarryShape { begin, end, kv_heads, head_dim };
        let tiles = end.div_ceil(BLOCK_TOKENS);
        length("the source's blocks", from_table.len().min(tiles as usize), tiles as usize)?;
        length("the target's blocks", to_table.len().min(tiles as usize), tiles as usize)?;
        if slices {
            // SAFETY: the caller's word.
            unsafe {
                let (from, to) = (from.map(|pool| slice(pool)), to.map(|pool| slice_mut(pool)));
                cpu::carry(shape, (from, slice(from_table)), (to, slice(to_table)));
            }
            return Ok(());
        }
        let launch = LaunchShape::new((tiles - begin / BLOCK_TOKENS, kv_heads), FETCH_THREADS);
        let args = carry::Args {
            from_keys: from[0],
            from_values: from[1],
            from_table,
            to_keys: to[0],
            to_values: to[1],
            to_table,
            shape,
        };
        // SAFETY: this function's contract; a thread copies what no other does.
        Ok(unsafe { stream.launch(&carry::kernel(), launch, args) }?)
    }

    /// A staging pool as a place that tokens are carried to.
    pub(super) fn of_pool_mut<E: GatherElement>(
        pool: &mut crate::attention::PagedPool<E>,
    ) -> [GlobalMut<u32>; 2] {
        let (keys, values) = pool.both_mut();
        [words_mut(keys.global_mut()), words_mut(values.global_mut())]
    }

    /// … that they are carried from.
    pub(super) fn of_pool<E: GatherElement>(pool: &crate::attention::PagedPool<E>) -> [Global<u32>; 2] {
        [words(pool.keys().global()), words(pool.values().global())]
    }

    fn check<E: GatherElement>(
        &self,
        stream: &Stream,
        staging: &Staging<E>,
        lengths: Global<u32>,
    ) -> Result<()> {
        stream.device().check_same(&self.device, "the staging plan")?;
        stream.device().check_same(staging.directory.device(), "the staging pool")?;
        length("the buffer of lengths", lengths.len(), self.sequences as usize)?;
        let rows = (self.sequences * self.shape.kv_heads) as usize;
        let same = staging.shape == self.shape && staging.sequences == self.sequences;
        length("the staging pool's directory", staging.directory.len(), rows * self.shape.words())?;
        length("the staging pool of these steps", usize::from(same), 1)
    }
}
