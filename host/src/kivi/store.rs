//! What a layer holds: codes of whole groups, the most recent tokens in f16.

use super::error::length;
use super::setting::checked;
use super::{Error, Result, Setting, cpu};
use crate::attention::{BLOCK_TOKENS, StepProblem};
use crate::cpu::handles::{slice, slice_mut};
use crate::{Buffer, Device, Stream};
use half::f16;
use kernels_gpu::kivi::{ENCODE_BYTES, ENCODE_THREADS, EncodeShape, RESTORE_THREADS, Shape, encode, restore};
use simt::{Global, GlobalMut, Kernel, LaunchShape};

/// The kernels that write, and that restore.
pub(super) fn kernels_of(head_dim: u32) -> (Kernel<encode::Args>, Kernel<restore::Args>) {
    if head_dim == 64 {
        (encode::kernel::<64>(), restore::kernel::<64>())
    } else {
        (encode::kernel::<128>(), restore::kernel::<128>())
    }
}

/// Keys and values of one layer, of all sequences.
#[derive(Debug)]
pub struct Store {
    setting: Setting,
    problem: StepProblem,
    shape: Shape,
    /// [sequences, kv_heads, groups] of [`Layout`](super::Layout).
    pub(super) codes: Buffer<u32>,
    /// [sequences, kv_heads, slots · group, head_dim]: a ring of groups.
    pub(super) recent_keys: Buffer<f16>,
    /// Likewise.
    pub(super) recent_values: Buffer<f16>,
    /// The first key and the first value that are no numbers, position · kv_heads + head.
    refused: Buffer<u32>,
}

/// New tokens.
#[derive(Clone, Copy, Debug)]
pub struct Encode {
    /// The first sequence that gets some.
    pub sequence: u32,
    /// How many sequences do, and how many tokens each.
    pub counts: [u32; 2],
    /// Rotated keys, [sequences, tokens, kv_heads, head_dim].
    pub keys: Global<f16>,
    /// Values, likewise.
    pub values: Global<f16>,
    /// Positions, [sequences, tokens]: the first of each sequence is read, the others follow.
    pub positions: Global<u32>,
    /// Of the sequences, \[sequences\]: becomes one more than the last position.
    pub lengths: GlobalMut<u32>,
}

impl Store {
    /// An empty one.
    ///
    /// # Errors
    /// Heads or settings that there is no kernel for, [`Error::TooLong`]; out of memory.
    pub fn new(device: &Device, problem: StepProblem, setting: Setting) -> Result<Self> {
        let problem = checked(problem, setting)?;
        let shape = setting.shape(problem);
        let rows = problem.sequences as usize * problem.kv_heads as usize;
        let ring = rows * (shape.slots() * setting.group * problem.head_dim) as usize;
        let words = rows * shape.groups as usize * shape.layout.group_words() as usize;
        Ok(Store {
            setting,
            problem,
            shape,
            codes: Buffer::new(device, words)?,
            recent_keys: Buffer::new(device, ring)?,
            recent_values: Buffer::new(device, ring)?,
            refused: Buffer::from_slice(device, &[u32::MAX; 2])?,
        })
    }

    /// How it stores.
    pub fn setting(&self) -> Setting {
        self.setting
    }

    /// What it is for.
    pub fn problem(&self) -> StepProblem {
        self.problem
    }

    /// The codes, [sequences, kv_heads, groups].
    pub fn codes(&self) -> &Buffer<u32> {
        &self.codes
    }

    /// The rings of keys and of values.
    pub fn recent(&self) -> [&Buffer<f16>; 2] {
        [&self.recent_keys, &self.recent_values]
    }

    /// [`NotFinite`](Error::NotFinite) of a key and of a value, position · kv_heads + head; `u32::MAX`: none.
    pub(super) fn refused(&self) -> &Buffer<u32> {
        &self.refused
    }

    /// Elements of a sequence: of codes, of a ring.
    fn of_sequence(&self) -> [usize; 2] {
        let sequences = self.problem.sequences as usize;
        [self.codes.len() / sequences, self.recent_keys.len() / sequences]
    }

    /// Says so if some of `count` sequences from `first` on are not there.
    fn check_there(&self, first: usize, count: usize) -> Result<()> {
        let there = self.problem.sequences;
        if count > (there as usize).saturating_sub(first) {
            return Err(Error::NoSequence { first, count, there });
        }
        Ok(())
    }

    /// Puts new tokens in, in one launch; with `slices` on the CPU's own path, which gives the same.
    ///
    /// # Safety
    /// Until the launch has finished, for a capture until each run of the graph has: the memory behind the
    /// handles is there, host memory with `slices`, and nothing else touches what is written. Positions past
    /// the room are left out; before a sequence's first new token are those that the store has of it.
    ///
    /// # Errors
    /// [`Error::NoTokens`], [`Error::NoSequence`], [`Error::Length`]; what the launch reports.
    pub unsafe fn encode_on(&mut self, stream: &Stream, slices: bool, new: Encode) -> Result<()> {
        let [sequences, tokens] = new.counts;
        if sequences == 0 || tokens == 0 {
            return Err(Error::NoTokens { sequences, tokens });
        }
        self.check_there(new.sequence as usize, sequences as usize)?;
        let rows = sequences as usize * tokens as usize;
        let elements = rows * (self.problem.kv_heads * self.problem.head_dim) as usize;
        length("the buffer of new keys", new.keys.len(), elements)?;
        length("the buffer of new values", new.values.len(), elements)?;
        length("the buffer of positions", new.positions.len(), rows)?;
        length("the buffer of lengths", new.lengths.len(), sequences as usize)?;
        let [of_codes, of_ring] = self.of_sequence();
        let first = new.sequence as usize;
        let shape = EncodeShape { tokens, cache: self.shape };
        let codes = self.codes.global_range_mut(first * of_codes..)?;
        let recent_keys = self.recent_keys.global_range_mut(first * of_ring..)?;
        let recent_values = self.recent_values.global_range_mut(first * of_ring..)?;
        let refused = self.refused.global_mut();
        let Encode { keys, values, positions, lengths, .. } = new;
        if slices {
            // SAFETY: the caller's word, and this store's own memory.
            unsafe {
                let new = [slice(keys), slice(values)];
                let rings = [slice_mut(recent_keys), slice_mut(recent_values)];
                let (lengths, refused) = (slice_mut(lengths), slice_mut(refused));
                cpu::encode(shape, new, slice(positions), slice_mut(codes), rings, lengths, refused);
            }
            return Ok(());
        }
        // From any place in a group on.
        let groups = (tokens + self.setting.group - 2) / self.setting.group + 1;
        let grid = (groups, 2 * self.problem.kv_heads, sequences);
        let launch = LaunchShape::new(grid, ENCODE_THREADS).shared(ENCODE_BYTES);
        let args = encode::Args {
            keys,
            values,
            positions,
            codes,
            recent_keys,
            recent_values,
            lengths,
            refused,
            shape,
        };
        // SAFETY: the caller's word; the sequences are there, each has a first position, and buffers are as
        // long as just checked; a thread block is alone with a group and with a place of the ring, and what
        // is past the room is left out.
        Ok(unsafe { stream.launch(&kernels_of(self.problem.head_dim).0, launch, args) }?)
    }

    /// Writes the first `length` tokens of a sequence as they are stored to pools, tile t to block t.
    ///
    /// # Safety
    /// As [`encode_on`](Self::encode_on): the pools have as many blocks, and the sequence as many tokens.
    ///
    /// # Errors
    /// What the launch reports.
    pub unsafe fn restore_on(
        &self,
        stream: &Stream,
        slices: bool,
        (sequence, length): (u32, u32),
        [pool_keys, pool_values]: [GlobalMut<f16>; 2],
    ) -> Result<()> {
        let [of_codes, of_ring] = self.of_sequence();
        let first = sequence as usize;
        let codes = self.codes.global_range(first * of_codes..(first + 1) * of_codes)?;
        let ring = first * of_ring..(first + 1) * of_ring;
        let recent_keys = self.recent_keys.global_range(ring.clone())?;
        let recent_values = self.recent_values.global_range(ring)?;
        if slices {
            // SAFETY: the caller's word, and this store's own memory.
            unsafe {
                let stored = cpu::Stored {
                    shape: self.shape,
                    codes: slice(codes),
                    recent: [slice(recent_keys), slice(recent_values)],
                };
                cpu::restore(stored, length, [slice_mut(pool_keys), slice_mut(pool_values)]);
            }
            return Ok(());
        }
        let grid = (length.div_ceil(BLOCK_TOKENS), self.problem.kv_heads, 2);
        let args = restore::Args {
            codes,
            recent_keys,
            recent_values,
            pool_keys,
            pool_values,
            length,
            shape: self.shape,
        };
        let launch = LaunchShape::new(grid, RESTORE_THREADS);
        // SAFETY: the caller's word.
        Ok(unsafe { stream.launch(&kernels_of(self.problem.head_dim).1, launch, args) }?)
    }

    /// What is stored of a sequence's first `length` tokens, keys and values, [tokens, kv_heads, head_dim]:
    /// of whole groups what their codes stand for, of the others what they were.
    ///
    /// # Errors
    /// What the copies report.
    pub(super) fn restored(&self, sequence: usize, length: usize) -> Result<[Vec<f32>; 2]> {
        let [of_codes, of_ring] = self.of_sequence();
        let mut codes = vec![0; of_codes];
        self.codes.read(sequence * of_codes, &mut codes)?;
        let mut rings = [vec![f16::ZERO; of_ring], vec![f16::ZERO; of_ring]];
        self.recent_keys.read(sequence * of_ring, &mut rings[0])?;
        self.recent_values.read(sequence * of_ring, &mut rings[1])?;
        // Nothing but the group that is being filled is read from the ring.
        let stored = cpu::Stored { shape: self.shape, codes: &codes, recent: [&rings[0], &rings[1]] };
        Ok(cpu::rows(stored, length))
    }

    /// Sequence `to` gets what sequence `from` has of its first `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::NoSequence`], [`Error::Full`]; what the copies report.
    pub fn copy(&mut self, stream: &Stream, from: usize, to: usize, tokens: usize) -> Result<()> {
        self.check_there(from, 1)?;
        self.check_there(to, 1)?;
        let room = self.problem.max_tokens;
        if tokens > room as usize {
            return Err(Error::Full { tokens, room });
        }
        let [of_codes, of_ring] = self.of_sequence();
        let heads = self.problem.kv_heads as usize;
        let of_head = of_codes / heads;
        let used = tokens / self.setting.group as usize * self.shape.layout.group_words() as usize;
        // A copy has two buffers: by way of one that lasts until it is done.
        let device = stream.device().clone();
        let mut codes = Buffer::<u32>::new(&device, heads * used)?;
        for head in (0..heads).filter(|_| used > 0) {
            let at = from * of_codes + head * of_head;
            stream.copy(&self.codes, at..at + used, &mut codes, head * used)?;
        }
        for head in (0..heads).filter(|_| used > 0) {
            let at = to * of_codes + head * of_head;
            stream.copy(&codes, head * used..(head + 1) * used, &mut self.codes, at)?;
        }
        for ring in [&mut self.recent_keys, &mut self.recent_values] {
            let mut kept = Buffer::<f16>::new(&device, of_ring)?;
            stream.copy(ring, from * of_ring..(from + 1) * of_ring, &mut kept, 0)?;
            stream.copy(&kept, .., ring, to * of_ring)?;
        }
        Ok(stream.synchronize()?)
    }

    /// Whether all that was put in is finite. Waits for the stream.
    ///
    /// # Errors
    /// [`Error::NotFinite`]; what the device reports.
    pub fn check(&self, stream: &Stream, layer: usize) -> Result<()> {
        stream.synchronize()?;
        for (what, row) in ["key", "value"].into_iter().zip(self.refused.to_vec()?) {
            if row != u32::MAX {
                let (position, head) = (row / self.problem.kv_heads, row % self.problem.kv_heads);
                return Err(Error::NotFinite { layer, head, what, position });
            }
        }
        Ok(())
    }
}
